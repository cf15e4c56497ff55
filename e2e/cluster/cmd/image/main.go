// Command oci-image makes an OCI image archive from files of this machine,
// without a container engine or a registry. The same input gives the same
// bytes: entries are sorted, times are fixed, owners are root, and modes are
// reduced to "may be executed" or not.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
)

const usage = `usage: oci-image --name NAME --output FILE [options]

  --name NAME            image name; without a registry it gets docker.io/, as in Kubernetes
  --output FILE          the archive to write ("-" for standard output)
  --base none|glibc      what lies under the added files: nothing, or glibc, bash and
                         busybox of this machine (default none)
  --add SOURCE=DEST      a file or a whole folder, to that absolute path (repeatable)
  --add-bin SOURCE=DEST  as --add for one program, with the shared libraries it needs
  --link PATH=TARGET     a symbolic link
  --dir PATH             an empty folder
  --entrypoint WORD      repeatable
  --cmd WORD             repeatable
  --env NAME=VALUE       repeatable
  --label NAME=VALUE     repeatable
  --workdir PATH
  --user USER
`

type words []string

func (w *words) String() string     { return strings.Join(*w, " ") }
func (w *words) Set(s string) error { *w = append(*w, s); return nil }

func main() {
	if err := run(os.Args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		fmt.Fprintln(os.Stderr, "oci-image: error:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("oci-image", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprint(flags.Output(), usage) }
	var (
		name    = flags.String("name", "", "")
		output  = flags.String("output", "", "")
		base    = flags.String("base", "none", "")
		workdir = flags.String("workdir", "", "")
		user    = flags.String("user", "", "")

		add, addBin, links, dirs, entrypoint, cmd, env, labels words
	)
	for flagName, list := range map[string]*words{
		"add": &add, "add-bin": &addBin, "link": &links, "dir": &dirs,
		"entrypoint": &entrypoint, "cmd": &cmd, "env": &env, "label": &labels,
	} {
		flags.Var(list, flagName, "")
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *output == "" {
		return errors.New("--output is missing")
	}
	fullName, err := qualifyName(*name)
	if err != nil {
		return err
	}

	image := Image{Name: fullName, Architecture: runtime.GOARCH, Config: Config{
		Entrypoint: entrypoint, Cmd: cmd, WorkingDir: *workdir, User: *user,
	}}
	libraries := NewLibraries()

	switch *base {
	case "none":
	case "glibc":
		tree := NewTree()
		if err := addGlibcBase(tree, libraries); err != nil {
			return fmt.Errorf("base glibc: %w", err)
		}
		image.Layers = append(image.Layers, tree)
		image.Config.Env = append(image.Config.Env, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	default:
		return fmt.Errorf("--base %s: there is none and glibc", *base)
	}
	if image.Config.Env, err = mergeEnv(image.Config.Env, env); err != nil {
		return err
	}
	if image.Config.Labels, err = parsePairs("--label", labels); err != nil {
		return err
	}

	tree := NewTree()
	if *base == "glibc" {
		tree.Under(image.Layers[0])
	}
	if err := addAll(tree, libraries, add, addBin, links, dirs); err != nil {
		return err
	}
	if tree.Len() > 0 {
		image.Layers = append(image.Layers, tree)
	}
	if len(image.Layers) == 0 {
		return errors.New("the image would be empty: give --add, --add-bin or --base")
	}

	if *output == "-" {
		err = image.Write(os.Stdout)
	} else {
		err = writeFile(*output, image.Write)
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", *output, err)
	}
	fmt.Fprintln(os.Stderr, "oci-image:", image.Summary())
	if *output != "-" {
		fmt.Println(fullName)
	}
	return nil
}

func addAll(tree *Tree, libraries *Libraries, add, addBin, links, dirs []string) error {
	for _, path := range dirs {
		if err := tree.Dir(path); err != nil {
			return fmt.Errorf("--dir %s: %w", path, err)
		}
	}
	for _, pair := range links {
		path, target, found := strings.Cut(pair, "=")
		if !found {
			return fmt.Errorf("--link %s: must be PATH=TARGET", pair)
		}
		if err := tree.Link(path, target); err != nil {
			return fmt.Errorf("--link %s: %w", pair, err)
		}
	}
	for _, pair := range add {
		source, dest, found := strings.Cut(pair, "=")
		if !found {
			return fmt.Errorf("--add %s: must be SOURCE=DEST", pair)
		}
		if err := tree.Copy(source, dest); err != nil {
			return fmt.Errorf("--add %s: %w", pair, err)
		}
	}
	for _, pair := range addBin {
		source, dest, found := strings.Cut(pair, "=")
		if !found {
			return fmt.Errorf("--add-bin %s: must be SOURCE=DEST", pair)
		}
		if err := libraries.AddProgram(tree, source, dest); err != nil {
			return fmt.Errorf("--add-bin %s: %w", pair, err)
		}
	}
	return nil
}

// qualifyName gives a name the registry and tag that Kubernetes would assume.
func qualifyName(name string) (string, error) {
	if name == "" {
		return "", errors.New("--name is missing")
	}
	path, tag := name, "latest"
	if colon := strings.LastIndexByte(name, ':'); colon > strings.LastIndexByte(name, '/') {
		path, tag = name[:colon], name[colon+1:]
	}
	if path == "" || tag == "" || strings.ContainsAny(name, " @") || path != strings.ToLower(path) {
		return "", fmt.Errorf("--name %s: must be [registry/]path[:tag], the path in lower case, no digest", name)
	}
	first, rest, slash := strings.Cut(path, "/")
	switch {
	case !slash:
		path = "docker.io/library/" + path
	case !strings.ContainsAny(first, ".:") && first != "localhost":
		path = "docker.io/" + first + "/" + rest
	}
	return path + ":" + tag, nil
}

func parsePairs(what string, pairs []string) (map[string]string, error) {
	if len(pairs) == 0 {
		return nil, nil
	}
	result := make(map[string]string, len(pairs))
	for _, pair := range pairs {
		name, value, found := strings.Cut(pair, "=")
		if !found || name == "" {
			return nil, fmt.Errorf("%s %s: must be NAME=VALUE", what, pair)
		}
		result[name] = value
	}
	return result, nil
}

// mergeEnv lets the given variables replace those of the base.
func mergeEnv(base, given []string) ([]string, error) {
	replaced, err := parsePairs("--env", given)
	if err != nil {
		return nil, err
	}
	var result []string
	for _, pair := range base {
		name, _, _ := strings.Cut(pair, "=")
		if _, found := replaced[name]; !found {
			result = append(result, pair)
		}
	}
	return append(result, given...), nil
}

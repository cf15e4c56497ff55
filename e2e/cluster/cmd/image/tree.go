package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
)

type entryKind int

const (
	directory entryKind = iota
	regularFile
	symbolicLink
)

// entry is one path of a layer. A file's bytes are content, or those of source.
type entry struct {
	kind    entryKind
	mode    int64
	source  string
	content []byte
	target  string
}

// Tree is what one layer holds, by absolute path inside the image.
type Tree struct {
	entries map[string]entry
	under   *Tree
}

// NewTree returns an empty layer.
func NewTree() *Tree {
	return &Tree{entries: map[string]entry{}}
}

// Under says which layer lies below, so that its links are followed.
func (t *Tree) Under(base *Tree) { t.under = base }

// Len is the number of entries.
func (t *Tree) Len() int { return len(t.entries) }

// Has tells whether the path is in this layer or below.
func (t *Tree) Has(name string) bool {
	resolved, err := t.resolve(name)
	if err != nil {
		return false
	}
	_, found := t.look(resolved)
	return found
}

// Dir adds a folder and those above it.
func (t *Tree) Dir(name string) error {
	resolved, err := t.place(name)
	if err != nil {
		return err
	}
	return t.put(resolved, entry{kind: directory, mode: 0o755})
}

// DirMode adds a folder with a mode of its own, such as /tmp.
func (t *Tree) DirMode(name string, mode int64) error {
	resolved, err := t.place(name)
	if err != nil {
		return err
	}
	return t.put(resolved, entry{kind: directory, mode: mode})
}

// Link adds a symbolic link.
func (t *Tree) Link(name, target string) error {
	resolved, err := t.place(name)
	if err != nil {
		return err
	}
	return t.put(resolved, entry{kind: symbolicLink, mode: 0o777, target: target})
}

// Content adds a file with the given bytes.
func (t *Tree) Content(name, content string) error {
	resolved, err := t.place(name)
	if err != nil {
		return err
	}
	return t.put(resolved, entry{kind: regularFile, mode: 0o644, content: []byte(content)})
}

// Copy adds a file, or a folder with all that is in it. Links inside a folder
// stay links; a link named as the source itself is followed.
func (t *Tree) Copy(source, dest string) error {
	source, err := filepath.EvalSymlinks(source)
	if err != nil {
		return err
	}
	return filepath.WalkDir(source, func(file string, item fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(source, file)
		if err != nil {
			return err
		}
		name, err := t.place(path.Join(dest, filepath.ToSlash(relative)))
		if err != nil {
			return err
		}
		switch item.Type() {
		case fs.ModeDir:
			return t.put(name, entry{kind: directory, mode: 0o755})
		case fs.ModeSymlink:
			target, err := os.Readlink(file)
			if err != nil {
				return err
			}
			return t.put(name, entry{kind: symbolicLink, mode: 0o777, target: target})
		case 0:
			info, err := item.Info()
			if err != nil {
				return err
			}
			mode := int64(0o644)
			if info.Mode().Perm()&0o111 != 0 {
				mode = 0o755
			}
			absolute, err := filepath.Abs(file)
			if err != nil {
				return err
			}
			return t.put(name, entry{kind: regularFile, mode: mode, source: absolute})
		default:
			return fmt.Errorf("%s is neither a file nor a folder nor a link", file)
		}
	})
}

// Paths lists all entries, folders before what is in them.
func (t *Tree) Paths() []string {
	paths := make([]string, 0, len(t.entries))
	for name := range t.entries {
		paths = append(paths, name)
	}
	sort.Strings(paths)
	return paths
}

func (t *Tree) look(name string) (entry, bool) {
	if found, ok := t.entries[name]; ok {
		return found, true
	}
	if t.under != nil {
		return t.under.look(name)
	}
	return entry{}, false
}

// place resolves the folder part of a path through links of this layer and
// those below (/lib is one where /usr is merged), and adds missing folders.
func (t *Tree) place(name string) (string, error) {
	if !path.IsAbs(name) {
		return "", fmt.Errorf("%q is not an absolute path", name)
	}
	name = path.Clean(name)
	if name == "/" {
		return name, nil
	}
	parent, err := t.resolve(path.Dir(name))
	if err != nil {
		return "", err
	}
	for at := parent; at != "/"; at = path.Dir(at) {
		found, ok := t.look(at)
		if !ok {
			t.entries[at] = entry{kind: directory, mode: 0o755}
		} else if found.kind != directory {
			return "", fmt.Errorf("%s is not a folder in the image", at)
		}
	}
	return path.Join(parent, path.Base(name)), nil
}

func (t *Tree) put(name string, added entry) error {
	if name == "/" {
		if added.kind != directory {
			return errors.New("only a folder can be added as /")
		}
		return nil
	}
	present, found := t.look(name)
	if found && (present.kind == directory) != (added.kind == directory) {
		return fmt.Errorf("%s is a folder here and something else there", name)
	}
	if found && added.kind == directory && added.mode == 0o755 {
		return nil
	}
	t.entries[name] = added
	return nil
}

// resolve follows every link in a path of the image.
func (t *Tree) resolve(name string) (string, error) {
	const mostLinks = 40
	rest := strings.Split(strings.Trim(path.Clean(name), "/"), "/")
	at := "/"
	for links := 0; len(rest) > 0; {
		next := path.Join(at, rest[0])
		rest = rest[1:]
		found, ok := t.look(next)
		if !ok || found.kind != symbolicLink {
			at = next
			continue
		}
		if links++; links > mostLinks {
			return "", fmt.Errorf("%s: too many links", name)
		}
		target := strings.Split(strings.Trim(path.Clean(found.target), "/"), "/")
		rest = append(target, rest...)
		if path.IsAbs(found.target) {
			at = "/"
		}
	}
	return at, nil
}

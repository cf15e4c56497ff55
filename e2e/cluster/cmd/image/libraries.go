package main

import (
	"bufio"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"sort"
	"strings"
)

// Libraries finds shared libraries of this machine as its dynamic loader would.
type Libraries struct {
	folders []string
}

// NewLibraries reads the loader's list of folders.
func NewLibraries() *Libraries {
	l := &Libraries{}
	l.readConfig("/etc/ld.so.conf", 0)
	l.folders = append(l.folders, "/lib64", "/usr/lib64", "/lib", "/usr/lib")
	return l
}

func (l *Libraries) readConfig(file string, depth int) {
	const deepest = 4
	opened, err := os.Open(file)
	if err != nil || depth > deepest {
		return
	}
	defer opened.Close()
	lines := bufio.NewScanner(opened)
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(line)
		if len(words) == 2 && words[0] == "include" {
			included, err := filepath.Glob(words[1])
			if err != nil {
				continue
			}
			sort.Strings(included)
			for _, each := range included {
				l.readConfig(each, depth+1)
			}
		} else if len(words) == 1 {
			l.folders = append(l.folders, words[0])
		}
	}
}

// find looks for a library: the program's own run path first, then the loader's.
func (l *Libraries) find(soname string, runPath []string) (string, error) {
	for _, folder := range append(append([]string{}, runPath...), l.folders...) {
		file := filepath.Join(folder, soname)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
			return file, nil
		}
	}
	return "", fmt.Errorf("library %s is not on this machine", soname)
}

// AddProgram copies a program and every shared library that it needs; libraries
// keep the path that they have here.
func (l *Libraries) AddProgram(tree *Tree, source, dest string) error {
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a file", source)
	}
	if err := tree.Copy(source, dest); err != nil {
		return err
	}
	return l.addNeeded(tree, source)
}

// AddLibrary copies a library by its name, with what it needs.
func (l *Libraries) AddLibrary(tree *Tree, soname string) error {
	file, err := l.find(soname, nil)
	if err != nil {
		return err
	}
	return l.addAt(tree, file)
}

func (l *Libraries) addAt(tree *Tree, file string) error {
	if tree.Has(file) {
		return nil
	}
	if err := tree.Copy(file, file); err != nil {
		return err
	}
	return l.addNeeded(tree, file)
}

func (l *Libraries) addNeeded(tree *Tree, file string) error {
	object, err := elf.Open(file)
	if err != nil {
		var notElf *elf.FormatError
		if errors.As(err, &notElf) {
			return nil // a script needs no libraries
		}
		return err
	}
	defer object.Close()

	for _, segment := range object.Progs {
		if segment.Type != elf.PT_INTERP {
			continue
		}
		name := make([]byte, segment.Filesz)
		if _, err := segment.ReadAt(name, 0); err != nil {
			return fmt.Errorf("%s: reading its loader's name: %w", file, err)
		}
		if err := l.addAt(tree, strings.TrimRight(string(name), "\x00")); err != nil {
			return fmt.Errorf("%s: its loader: %w", file, err)
		}
	}
	needed, err := object.ImportedLibraries()
	if err != nil {
		return nil //nolint:nilerr // a static program has no dynamic section
	}
	var runPath []string
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} {
		values, err := object.DynString(tag)
		if err != nil {
			continue
		}
		for _, value := range values {
			value = strings.ReplaceAll(value, "$ORIGIN", path.Dir(file))
			runPath = append(runPath, strings.Split(value, ":")...)
		}
	}
	for _, soname := range needed {
		library, err := l.find(soname, runPath)
		if err != nil {
			return fmt.Errorf("%s needs it: %w", file, err)
		}
		if err := l.addAt(tree, library); err != nil {
			return err
		}
	}
	return nil
}

// addGlibcBase adds what a program linked against this machine's glibc expects
// of a Debian system: the merged /usr, glibc's libraries, an account file, a
// shell, and busybox under its names.
func addGlibcBase(tree *Tree, libraries *Libraries) error {
	for _, folder := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := errors.Join(tree.Dir("/usr/"+folder), tree.Link("/"+folder, "usr/"+folder)); err != nil {
			return err
		}
	}
	for _, folder := range []string{"/dev", "/etc", "/proc", "/root", "/run", "/sys", "/usr/local/bin", "/usr/local/lib", "/var/lib"} {
		if err := tree.Dir(folder); err != nil {
			return err
		}
	}
	if err := errors.Join(
		tree.DirMode("/tmp", 0o1777),
		tree.Link("/var/run", "/run"),
		tree.Link("/var/tmp", "/tmp"),
		tree.Content("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
		tree.Content("/etc/group", "root:x:0:\nnogroup:x:65534:\n"),
		tree.Content("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
		tree.Content("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n"),
		tree.Content("/etc/ld.so.conf.d/base.conf", "/usr/local/lib\n/usr/local/lib/"+gnuTriplet+"\n/lib/"+gnuTriplet+"\n/usr/lib/"+gnuTriplet+"\n"),
	); err != nil {
		return err
	}

	if err := libraries.AddLibrary(tree, "libc.so.6"); err != nil {
		return err
	}
	for _, soname := range []string{
		"libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1",
		"libresolv.so.2", "libnss_files.so.2", "libnss_dns.so.2", "libgcc_s.so.1", "libstdc++.so.6",
	} {
		if _, err := libraries.find(soname, nil); err != nil {
			continue // each newer glibc has fewer of them
		}
		if err := libraries.AddLibrary(tree, soname); err != nil {
			return err
		}
	}

	for source, dest := range map[string]string{"/bin/bash": "/usr/bin/bash", "/sbin/ldconfig": "/usr/sbin/ldconfig"} {
		if err := libraries.AddProgram(tree, source, dest); err != nil {
			return err
		}
	}
	return addBusybox(tree, libraries)
}

func addBusybox(tree *Tree, libraries *Libraries) error {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("%w: install the Debian package busybox-static", err)
	}
	if err := libraries.AddProgram(tree, busybox, "/usr/bin/busybox"); err != nil {
		return err
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("%s --list: %w", busybox, err)
	}
	for _, applet := range strings.Fields(string(applets)) {
		name := "/usr/bin/" + applet
		if tree.Has(name) || tree.Has("/usr/sbin/"+applet) {
			continue
		}
		if err := tree.Link(name, "busybox"); err != nil {
			return err
		}
	}
	return nil
}

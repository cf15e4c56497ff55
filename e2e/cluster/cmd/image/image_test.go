package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestANameGetsTheRegistryAndTagThatKubernetesAssumes(t *testing.T) {
	for given, want := range map[string]string{
		"tools":                     "docker.io/library/tools:latest",
		"smoke/app:2":               "docker.io/smoke/app:2",
		"aliquot.local/pause:1":     "aliquot.local/pause:1",
		"localhost/x":               "localhost/x:latest",
		"registry:5000/a/b":         "registry:5000/a/b:latest",
		"ghcr.io/a/b:V1.2-RC.3_x86": "ghcr.io/a/b:V1.2-RC.3_x86",
	} {
		if got, err := qualifyName(given); err != nil || got != want {
			t.Errorf("qualifyName(%q) = %q, %v; want %q", given, got, err, want)
		}
	}
	for _, bad := range []string{"", "Upper", "a b", "a@sha256:00", "a:", ":tag"} {
		if got, err := qualifyName(bad); err == nil {
			t.Errorf("qualifyName(%q) = %q, want an error", bad, got)
		}
	}
}

func TestAGivenVariableReplacesTheBases(t *testing.T) {
	got, err := mergeEnv([]string{"PATH=/bin", "A=1"}, []string{"PATH=/opt", "B=2"})
	if want := "A=1 PATH=/opt B=2"; err != nil || strings.Join(got, " ") != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	if _, err := mergeEnv(nil, []string{"NOVALUE"}); err == nil {
		t.Error("a variable without = was accepted")
	}
}

func TestPathsThroughLinksOfTheBaseLandBehindThem(t *testing.T) {
	base, layer := NewTree(), NewTree()
	if err := errors.Join(base.Dir("/usr/lib"), base.Link("/lib", "usr/lib"), base.Link("/run", "/var/run"), base.Link("/var/run", "../srv")); err != nil {
		t.Fatal(err)
	}
	layer.Under(base)
	if err := errors.Join(layer.Content("/lib/a/one", "1"), layer.Content("/run/two", "2")); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(layer.Paths(), " "), "/srv /srv/two /usr/lib/a /usr/lib/a/one"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if !layer.Has("/lib/a/one") || layer.Has("/lib/none") {
		t.Error("Has does not follow links")
	}
}

func TestALinkThatLeadsToItselfIsAnError(t *testing.T) {
	tree := NewTree()
	if err := errors.Join(tree.Link("/a", "b"), tree.Link("/b", "a")); err != nil {
		t.Fatal(err)
	}
	if err := tree.Content("/a/file", ""); err == nil {
		t.Error("accepted")
	}
}

func TestAFolderIsNeverReplacedByAFile(t *testing.T) {
	tree := NewTree()
	if err := tree.Dir("/a/b"); err != nil {
		t.Fatal(err)
	}
	if err := tree.Content("/a/b", "x"); err == nil {
		t.Error("a file took a folder's place")
	}
	if err := tree.Content("relative", "x"); err == nil {
		t.Error("a relative path was accepted")
	}
}

// sample makes a folder whose modes and times depend on the moment.
func sample(t *testing.T, mode os.FileMode) string {
	t.Helper()
	folder := t.TempDir()
	err := errors.Join(
		os.MkdirAll(filepath.Join(folder, "d"), 0o700),
		os.WriteFile(filepath.Join(folder, "d", "run"), []byte("#!/bin/sh\n"), 0o711),
		os.WriteFile(filepath.Join(folder, "data"), []byte("data"), mode),
		os.Symlink("d/run", filepath.Join(folder, "link")),
	)
	if err != nil {
		t.Fatal(err)
	}
	return folder
}

func archive(t *testing.T, folder string) []byte {
	t.Helper()
	tree := NewTree()
	if err := tree.Copy(folder, "/opt/app"); err != nil {
		t.Fatal(err)
	}
	image := Image{Name: "a/b:c", Architecture: "amd64", Config: Config{Entrypoint: []string{"/opt/app/link"}}, Layers: []*Tree{tree}}
	var out bytes.Buffer
	if err := image.Write(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestTheSameContentGivesTheSameBytes(t *testing.T) {
	if !bytes.Equal(archive(t, sample(t, 0o600)), archive(t, sample(t, 0o664))) {
		t.Error("two folders with the same content gave different archives")
	}
}

func TestTheArchiveIsAnImageLayoutWhoseBlobsMatchTheirDigests(t *testing.T) {
	files := readTar(t, archive(t, sample(t, 0o600)))
	var index struct {
		Manifests []descriptor `json:"manifests"`
	}
	if err := json.Unmarshal(files["index.json"], &index); err != nil || len(index.Manifests) != 1 {
		t.Fatalf("index.json: %v, %s", err, files["index.json"])
	}
	if got := index.Manifests[0].Annotations["io.containerd.image.name"]; got != "a/b:c" {
		t.Errorf("name is %q", got)
	}
	blobs := 0
	for name, content := range files {
		digest, found := strings.CutPrefix(name, "blobs/sha256/")
		if !found || digest == "" {
			continue
		}
		blobs++
		measured, err := measure("", func(out io.Writer) error { _, err := out.Write(content); return err })
		if err != nil || measured.Digest != "sha256:"+digest {
			t.Errorf("%s holds %s, %v", name, measured.Digest, err)
		}
	}
	if blobs != 3 {
		t.Errorf("%d blobs, want a layer, a config and a manifest", blobs)
	}
	var manifest struct {
		Layers []descriptor `json:"layers"`
	}
	blob := func(d string) []byte { return files["blobs/sha256/"+strings.TrimPrefix(d, "sha256:")] }
	if err := json.Unmarshal(blob(index.Manifests[0].Digest), &manifest); err != nil || len(manifest.Layers) != 1 {
		t.Fatalf("manifest: %v", err)
	}
	layer := readTar(t, blob(manifest.Layers[0].Digest))
	if got := string(layer["opt/app/data"]); got != "data" {
		t.Errorf("the layer's file holds %q", got)
	}
}

func readTar(t *testing.T, content []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	reader := tar.NewReader(bytes.NewReader(content))
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[header.Name], err = io.ReadAll(reader); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAProgramBringsItsLoaderAndLibraries(t *testing.T) {
	const program = "/bin/bash"
	if _, err := os.Stat(program); err != nil {
		t.Skip("no " + program + " on this machine")
	}
	tree := NewTree()
	if err := NewLibraries().AddProgram(tree, program, "/opt/bash"); err != nil {
		t.Fatal(err)
	}
	all := strings.Join(tree.Paths(), "\n")
	for _, part := range []string{"/opt/bash", "libc.so.6", "ld-linux"} {
		if !strings.Contains(all, part) {
			t.Errorf("%s is missing in:\n%s", part, all)
		}
	}
}

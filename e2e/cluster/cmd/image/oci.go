package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar"
)

// epoch is every file's time and the image's.
var epoch = time.Unix(0, 0).UTC()

// Config is how a container of the image starts.
type Config struct {
	User       string            `json:"User,omitempty"`
	Env        []string          `json:"Env,omitempty"`
	Entrypoint []string          `json:"Entrypoint,omitempty"`
	Cmd        []string          `json:"Cmd,omitempty"`
	WorkingDir string            `json:"WorkingDir,omitempty"`
	Labels     map[string]string `json:"Labels,omitempty"`
}

// Image is one platform's image, layers from the bottom up.
type Image struct {
	Name         string
	Architecture string
	Config       Config
	Layers       []*Tree

	digest string
	size   int64
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Platform    *platform         `json:"platform,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type blob struct {
	descriptor
	write func(io.Writer) error
}

// Write writes the archive: an OCI image layout in a tar.
func (i *Image) Write(out io.Writer) error {
	var blobs []blob
	var layers []descriptor
	var layerDigests []string
	for _, tree := range i.Layers {
		made, err := measure(layerType, tree.write)
		if err != nil {
			return err
		}
		blobs = append(blobs, made)
		layers = append(layers, made.descriptor)
		layerDigests = append(layerDigests, made.Digest)
		i.size += made.Size
	}

	config, err := jsonBlob(configType, map[string]any{
		"created": epoch, "architecture": i.Architecture, "os": "linux", "config": i.Config,
		"rootfs": map[string]any{"type": "layers", "diff_ids": layerDigests},
	})
	if err != nil {
		return err
	}
	manifest, err := jsonBlob(manifestType, map[string]any{
		"schemaVersion": 2, "mediaType": manifestType, "config": config.descriptor, "layers": layers,
	})
	if err != nil {
		return err
	}
	i.digest = manifest.Digest
	blobs = append(blobs, config, manifest)

	named := manifest.descriptor
	named.Platform = &platform{Architecture: i.Architecture, OS: "linux"}
	named.Annotations = map[string]string{
		"io.containerd.image.name":          i.Name,
		"org.opencontainers.image.ref.name": i.Name[strings.LastIndexByte(i.Name, ':')+1:],
	}
	index, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": indexType, "manifests": []descriptor{named},
	})
	if err != nil {
		return err
	}

	archive := tar.NewWriter(out)
	for _, file := range []struct {
		name    string
		content string
	}{
		{"oci-layout", `{"imageLayoutVersion":"1.0.0"}`}, {"index.json", string(index)},
	} {
		if err := writeEntry(archive, file.name, entry{kind: regularFile, mode: 0o644, content: []byte(file.content)}); err != nil {
			return err
		}
	}
	for _, folder := range []string{"blobs", "blobs/sha256"} {
		if err := writeEntry(archive, folder, entry{kind: directory, mode: 0o755}); err != nil {
			return err
		}
	}
	written := map[string]bool{}
	for _, each := range blobs {
		if written[each.Digest] {
			continue
		}
		written[each.Digest] = true
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: "blobs/sha256/" + strings.TrimPrefix(each.Digest, "sha256:"),
			Mode: 0o644, Size: each.Size, ModTime: epoch, Format: tar.FormatPAX,
		}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if err := each.write(archive); err != nil {
			return err
		}
	}
	return archive.Close()
}

// Summary is one line about the image written.
func (i *Image) Summary() string {
	return fmt.Sprintf("%s %s, %d layers, %.1f MiB", i.Name, i.digest[:len("sha256:")+12], len(i.Layers), float64(i.size)/(1<<20))
}

// measure runs a writer once for its digest and size.
func measure(mediaType string, write func(io.Writer) error) (blob, error) {
	hash := sha256.New()
	counted := &counter{to: hash}
	if err := write(counted); err != nil {
		return blob{}, err
	}
	return blob{
		descriptor: descriptor{MediaType: mediaType, Digest: "sha256:" + hex.EncodeToString(hash.Sum(nil)), Size: counted.size},
		write:      write,
	}, nil
}

func jsonBlob(mediaType string, value any) (blob, error) {
	content, err := json.Marshal(value)
	if err != nil {
		return blob{}, err
	}
	return measure(mediaType, func(out io.Writer) error {
		_, err := out.Write(content)
		return err
	})
}

type counter struct {
	to   io.Writer
	size int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.to.Write(p)
	c.size += int64(n)
	return n, err
}

func (t *Tree) write(out io.Writer) error {
	layer := tar.NewWriter(out)
	for _, name := range t.Paths() {
		if err := writeEntry(layer, strings.TrimPrefix(name, "/"), t.entries[name]); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return layer.Close()
}

func writeEntry(archive *tar.Writer, name string, item entry) error {
	header := &tar.Header{Name: name, Mode: item.mode, ModTime: epoch, Format: tar.FormatPAX}
	switch item.kind {
	case directory:
		header.Typeflag = tar.TypeDir
		header.Name += "/"
		return archive.WriteHeader(header)
	case symbolicLink:
		header.Typeflag, header.Linkname = tar.TypeSymlink, item.target
		return archive.WriteHeader(header)
	case regularFile:
	}
	header.Typeflag = tar.TypeReg
	var content io.Reader = bytes.NewReader(item.content)
	header.Size = int64(len(item.content))
	if item.source != "" {
		file, err := os.Open(item.source)
		if err != nil {
			return err
		}
		defer file.Close()
		info, err := file.Stat()
		if err != nil {
			return err
		}
		content, header.Size = file, info.Size()
	}
	if err := archive.WriteHeader(header); err != nil {
		return err
	}
	_, err := io.Copy(archive, content)
	return err
}

// writeFile writes through a temporary file, so that a failure leaves nothing.
func writeFile(name string, write func(io.Writer) error) error {
	file, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	if err := write(file); err != nil {
		file.Close()
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	if err := os.Chmod(file.Name(), 0o644); err != nil {
		return err
	}
	return os.Rename(file.Name(), name)
}

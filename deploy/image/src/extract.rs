//! What is in an archive that [`crate::archive`] wrote: its name and digest, its machines, and files of them.

use crate::oci::{Descriptor, IMAGE_NAME, INDEX, Index, Manifest};
use anyhow::{Context, Result};
use flate2::read::GzDecoder;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// An archive that was read.
#[derive(Debug)]
pub(crate) struct Contents {
    /// Repository and tag.
    pub(crate) name: String,
    /// Digest by which a registry knows the image: of the index of all machines, where there is one.
    pub(crate) digest: String,
    /// Manifests by machine (`amd64`, `arm64`).
    machines: BTreeMap<String, Manifest>,
    blobs: BTreeMap<String, Vec<u8>>,
}

/// What of an image's configuration says the machine that it is for.
#[derive(Deserialize)]
struct Machine {
    architecture: String,
}

impl Contents {
    /// Reads an archive.
    ///
    /// # Errors
    /// If it cannot be read, or is not an archive of one image.
    pub(crate) fn read(from: impl Read) -> Result<Self> {
        let mut tar = tar::Archive::new(from);
        let mut blobs = BTreeMap::new();
        for entry in tar.entries()? {
            let mut entry = entry?;
            let path = entry.path()?.display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content)?;
            blobs.insert(path, content);
        }
        let index: Index = json(blobs.get("index.json").context("it has no index.json")?)?;
        let whole = index.manifests.first().context("its index names no image")?;
        let name = whole.annotations.get(IMAGE_NAME).context("its image has no name")?.clone();
        let manifests = match whole.media_type.as_str() {
            INDEX => json::<Index>(blob(&blobs, whole)?)?.manifests,
            // That of one machine alone.
            _ => vec![whole.clone()],
        };
        let machines = manifests.iter().map(|found| {
            let manifest: Manifest = json(blob(&blobs, found)?)?;
            let config: Machine = json(blob(&blobs, &manifest.config)?)?;
            Ok((config.architecture, manifest))
        });
        let machines = machines.collect::<Result<_>>()?;
        Ok(Self { name, digest: whole.digest.clone(), machines, blobs })
    }

    /// The machines that it has images for.
    pub(crate) fn machines(&self) -> impl Iterator<Item = &str> {
        self.machines.keys().map(String::as_str)
    }

    /// A file of a machine's image, by its path without a leading slash: that of the uppermost layer that has it.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn file(&self, machine: &str, path: &Path) -> Result<Vec<u8>> {
        let manifest = self.machines.get(machine).with_context(|| format!("it has no machine {machine}"))?;
        for layer in manifest.layers.iter().rev() {
            let content = blob(&self.blobs, layer)?;
            let files: Box<dyn Read> = match layer.media_type.ends_with("gzip") {
                true => Box::new(GzDecoder::new(content)),
                false => Box::new(content),
            };
            let mut tar = tar::Archive::new(files);
            for entry in tar.entries()? {
                let mut entry = entry?;
                if entry.path()? == path && entry.header().entry_type().is_file() {
                    let mut content = Vec::new();
                    entry.read_to_end(&mut content)?;
                    return Ok(content);
                }
            }
        }
        anyhow::bail!("its image for {machine} has no file {}", path.display())
    }
}

fn json<T: DeserializeOwned>(content: &[u8]) -> Result<T> {
    Ok(serde_json::from_slice(content)?)
}

fn blob<'a>(blobs: &'a BTreeMap<String, Vec<u8>>, descriptor: &Descriptor) -> Result<&'a [u8]> {
    let path = format!("blobs/{}", descriptor.digest.replace(':', "/"));
    Ok(blobs.get(&path).with_context(|| format!("it has no {path}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::{self, Image};
    use crate::layer;
    use crate::oci::Process;
    use std::fs;

    fn archive() -> Vec<u8> {
        let layers = |machine: &str| {
            let dir = tempfile::tempdir().unwrap();
            let lower = dir.path().join("lower");
            let upper = dir.path().join("upper");
            for layer in [&lower, &upper] {
                fs::create_dir_all(layer.join("usr/bin")).unwrap();
            }
            fs::write(lower.join("usr/bin/a"), "below").unwrap();
            fs::write(lower.join("usr/bin/b"), "below").unwrap();
            fs::write(upper.join("usr/bin/a"), machine).unwrap();
            vec![layer::of(&lower, 7).unwrap(), layer::of(&upper, 7).unwrap()]
        };
        let machines = ["amd64", "arm64"].map(|machine| (machine.to_owned(), layers(machine))).into();
        let image = Image { name: "example.org/a:1".to_owned(), time: 7, process: Process::default() };
        let mut written = Vec::new();
        archive::write(&image, &machines, &mut written).unwrap();
        written
    }

    #[test]
    fn what_was_packed_is_found_by_machine_the_uppermost_layer_first() {
        let contents = Contents::read(archive().as_slice()).unwrap();
        assert_eq!(contents.name, "example.org/a:1");
        assert!(contents.digest.starts_with("sha256:"), "{}", contents.digest);
        assert_eq!(contents.machines().collect::<Vec<_>>(), ["amd64", "arm64"]);
        for machine in ["amd64", "arm64"] {
            let file = |path: &str| contents.file(machine, Path::new(path));
            assert_eq!(file("usr/bin/a").unwrap(), machine.as_bytes());
            assert_eq!(file("usr/bin/b").unwrap(), b"below");
            // A directory is no file.
            assert!(file("usr/bin").unwrap_err().to_string().contains("no file usr/bin"));
        }
        assert!(contents.file("riscv64", Path::new("usr/bin/a")).is_err());
    }

    #[test]
    fn what_is_no_archive_is_said_so() {
        for bytes in [Vec::new(), b"no archive".to_vec(), archive()[..2048].to_vec()] {
            assert!(Contents::read(bytes.as_slice()).is_err());
        }
    }
}

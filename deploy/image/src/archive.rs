//! An OCI archive: an image layout (the specification's `image-layout.md`) as one tar file, which `ctr images import`,
//! `docker load`, `podman load` and `skopeo copy oci-archive:` take.

use crate::layer::Layer;
use crate::oci::{
    CONFIG, Config, Descriptor, History, IMAGE_NAME, INDEX, Index, LAYER, MANIFEST, Manifest, Platform,
    Process, REF_NAME, RootFs,
};
use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use tar::{Builder, EntryType, Header};

/// What images of all machines have in common.
#[derive(Debug, Clone)]
pub(crate) struct Image {
    /// Repository and tag.
    pub(crate) name: String,
    /// When its source was made, in seconds of Unix time.
    pub(crate) time: u64,
    /// Defaults of its containers.
    pub(crate) process: Process,
}

/// Writes the archive of an image: for each machine (`amd64`, `arm64`) its layers, the lowest first.
///
/// # Errors
/// If the name has no tag, or nothing can be written.
pub(crate) fn write(image: &Image, machines: &BTreeMap<String, Vec<Layer>>, to: impl Write) -> Result<()> {
    let (_, tag) = image.name.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')).with_context(|| {
        format!(
            "{:?} is no image's name: it takes a repository and a tag, such as example.org/aliquot:1.0",
            image.name
        )
    })?;
    ensure!(!machines.is_empty(), "there is no layer of any machine");
    let mut archive = Archive { tar: Builder::new(to), time: image.time, there: BTreeSet::new() };
    archive.directory("blobs/")?;
    archive.directory("blobs/sha256/")?;
    let mut manifests = Vec::new();
    for (architecture, layers) in machines {
        manifests.push(archive.machine(image, architecture, layers)?);
    }
    let all = Index {
        schema_version: 2,
        media_type: INDEX.to_owned(),
        manifests,
        annotations: image.process.labels.clone(),
    };
    let mut whole = archive.json(INDEX, &all)?;
    whole.annotations =
        BTreeMap::from([(REF_NAME.to_owned(), tag.to_owned()), (IMAGE_NAME.to_owned(), image.name.clone())]);
    let index = Index {
        schema_version: 2,
        media_type: INDEX.to_owned(),
        manifests: vec![whole],
        annotations: BTreeMap::new(),
    };
    archive.file("index.json", &serde_json::to_vec(&index)?)?;
    archive.file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    archive.tar.into_inner()?.flush()?;
    Ok(())
}

struct Archive<W: Write> {
    tar: Builder<W>,
    time: u64,
    there: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    fn machine(&mut self, image: &Image, architecture: &str, layers: &[Layer]) -> Result<Descriptor> {
        let created = Timestamp::from_second(i64::try_from(image.time)?)?.to_string();
        let history =
            |_: &Layer| History { created: created.clone(), created_by: "aliquot-image".to_owned() };
        let platform = Platform { architecture: architecture.to_owned(), os: "linux".to_owned() };
        let config = Config {
            created: created.clone(),
            architecture: platform.architecture.clone(),
            os: platform.os.clone(),
            config: image.process.clone(),
            rootfs: RootFs {
                kind: "layers".to_owned(),
                diff_ids: layers.iter().map(|layer| layer.diff_id.clone()).collect(),
            },
            history: layers.iter().map(history).collect(),
        };
        let config = self.json(CONFIG, &config)?;
        let layers = layers.iter().map(|layer| self.blob(LAYER, &layer.content)).collect::<Result<_>>()?;
        let manifest = Manifest {
            schema_version: 2,
            media_type: MANIFEST.to_owned(),
            config,
            layers,
            annotations: image.process.labels.clone(),
        };
        Ok(Descriptor { platform: Some(platform), ..self.json(MANIFEST, &manifest)? })
    }

    fn json(&mut self, media_type: &str, value: &impl Serialize) -> Result<Descriptor> {
        self.blob(media_type, &serde_json::to_vec(value)?)
    }

    /// Layers that machines have in common are there once.
    fn blob(&mut self, media_type: &str, content: &[u8]) -> Result<Descriptor> {
        let descriptor = Descriptor::of(media_type, content);
        if self.there.insert(descriptor.digest.clone()) {
            self.file(&format!("blobs/{}", descriptor.digest.replace(':', "/")), content)?;
        }
        Ok(descriptor)
    }

    fn directory(&mut self, path: &str) -> Result<()> {
        let mut header = self.header(EntryType::Directory, 0o755, 0);
        Ok(self.tar.append_data(&mut header, path, std::io::empty())?)
    }

    fn file(&mut self, path: &str, content: &[u8]) -> Result<()> {
        let mut header = self.header(EntryType::Regular, 0o644, content.len() as u64);
        Ok(self.tar.append_data(&mut header, path, content)?)
    }

    fn header(&self, kind: EntryType, mode: u32, size: u64) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size);
        header.set_mtime(self.time);
        header.set_uid(0);
        header.set_gid(0);
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::digest;
    use std::io::Read;

    fn image(name: &str) -> Image {
        let labels = BTreeMap::from([("org.opencontainers.image.version".to_owned(), "1.0".to_owned())]);
        Image {
            name: name.to_owned(),
            time: 1_000_000_000,
            process: Process { labels, ..Process::default() },
        }
    }

    fn machines() -> BTreeMap<String, Vec<Layer>> {
        let layer = |text: &str| Layer { content: text.into(), diff_id: digest(text.as_bytes()) };
        ["arm64", "amd64"].map(|machine| (machine.to_owned(), vec![layer("common"), layer(machine)])).into()
    }

    fn written() -> Vec<u8> {
        let mut archive = Vec::new();
        write(&image("example.org/a:1"), &machines(), &mut archive).unwrap();
        archive
    }

    fn files(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut tar = tar::Archive::new(archive);
        let mut files = BTreeMap::new();
        for entry in tar.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            let path = entry.path().unwrap().display().to_string();
            assert!(files.insert(path.clone(), content).is_none(), "{path} is there twice");
        }
        files
    }

    fn blob(files: &BTreeMap<String, Vec<u8>>, descriptor: &Descriptor) -> Vec<u8> {
        let content = &files[&format!("blobs/{}", descriptor.digest.replace(':', "/"))];
        assert_eq!(descriptor.size, content.len() as u64);
        assert_eq!(descriptor.digest, digest(content));
        content.clone()
    }

    #[test]
    fn every_content_is_found_by_its_digest_from_the_index_down() {
        let files = files(&written());
        let index: Index = serde_json::from_slice(&files["index.json"]).unwrap();
        assert_eq!(index.manifests[0].annotations[REF_NAME], "1");
        assert_eq!(index.manifests[0].annotations[IMAGE_NAME], "example.org/a:1");
        let all: Index = serde_json::from_slice(&blob(&files, &index.manifests[0])).unwrap();
        for (found, machine) in all.manifests.iter().zip(["amd64", "arm64"]) {
            assert_eq!(found.platform.as_ref().unwrap().architecture, machine);
            let manifest: Manifest = serde_json::from_slice(&blob(&files, found)).unwrap();
            let config: Config = serde_json::from_slice(&blob(&files, &manifest.config)).unwrap();
            assert_eq!(
                (config.architecture.as_str(), config.created.as_str()),
                (machine, "2001-09-09T01:46:40Z")
            );
            let layers: Vec<_> = manifest.layers.iter().map(|layer| blob(&files, layer)).collect();
            assert_eq!(layers, [b"common".to_vec(), machine.as_bytes().to_vec()]);
            let digests: Vec<String> = layers.iter().map(|layer| digest(layer)).collect();
            assert_eq!(config.rootfs.diff_ids, digests);
        }
    }

    #[test]
    fn the_same_image_is_the_same_archive() {
        assert_eq!(digest(&written()), digest(&written()));
    }

    #[test]
    fn a_name_without_a_tag_is_refused() {
        for name in ["example.org/a", "example.org:5000/a", ""] {
            let error = write(&image(name), &machines(), Vec::new()).unwrap_err();
            assert!(error.to_string().contains("repository and a tag"), "{error}");
        }
    }
}

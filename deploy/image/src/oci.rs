//! What an image is made of, as the OCI image specification 1.1 has it
//! (<https://github.com/opencontainers/image-spec>), as far as we write it. Maps are sorted, so the same image is the
//! same text.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;

/// Media type of a layer.
pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// Media type of a configuration.
pub(crate) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Media type of an image for one machine.
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of a list of images, one for each machine.
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Annotation with the tag of what an archive has.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The same with repository, for `ctr images import` and `docker load`.
pub(crate) const IMAGE_NAME: &str = "io.containerd.image.name";

/// `sha256:` and the digest of a content.
pub(crate) fn digest(content: &[u8]) -> String {
    let mut text = "sha256:".to_owned();
    for byte in Sha256::digest(content) {
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Where a content is, and what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    /// Media type.
    pub(crate) media_type: String,
    /// `sha256:…`.
    pub(crate) digest: String,
    /// Bytes.
    pub(crate) size: u64,
    /// For which machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) platform: Option<Platform>,
    /// What else is to be known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// Of a content.
    pub(crate) fn of(media_type: &str, content: &[u8]) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest: digest(content),
            size: content.len() as u64,
            platform: None,
            annotations: BTreeMap::new(),
        }
    }
}

/// A machine that an image runs on, in Go's words.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Platform {
    /// `amd64` or `arm64`.
    pub(crate) architecture: String,
    /// `linux`.
    pub(crate) os: String,
}

/// An image for one machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    /// 2.
    pub(crate) schema_version: u32,
    /// [`MANIFEST`].
    pub(crate) media_type: String,
    /// Configuration.
    pub(crate) config: Descriptor,
    /// Layers, the lowest first.
    pub(crate) layers: Vec<Descriptor>,
    /// What else is to be known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
}

/// Images, one for each machine; also what an archive has.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Index {
    /// 2.
    pub(crate) schema_version: u32,
    /// [`INDEX`].
    pub(crate) media_type: String,
    /// Images.
    pub(crate) manifests: Vec<Descriptor>,
    /// What else is to be known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
}

/// What a container of an image starts with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Config {
    /// When it was made, RFC 3339.
    pub(crate) created: String,
    /// `amd64` or `arm64`.
    pub(crate) architecture: String,
    /// `linux`.
    pub(crate) os: String,
    /// Defaults of its process.
    pub(crate) config: Process,
    /// Its file system.
    pub(crate) rootfs: RootFs,
    /// How each layer came about.
    pub(crate) history: Vec<History>,
}

/// Defaults of a container's process.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Process {
    /// User and group.
    pub(crate) user: String,
    /// Environment, `NAME=value`.
    pub(crate) env: Vec<String>,
    /// Program.
    pub(crate) entrypoint: Vec<String>,
    /// Labels.
    pub(crate) labels: BTreeMap<String, String>,
}

/// Digests of the layers before compression.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RootFs {
    /// `layers`.
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The lowest first.
    pub(crate) diff_ids: Vec<String>,
}

/// How a layer came about.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct History {
    /// When, RFC 3339.
    pub(crate) created: String,
    /// By what.
    pub(crate) created_by: String,
}

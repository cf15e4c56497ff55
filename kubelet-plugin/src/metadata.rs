//! Device metadata files (KEP-5304), from which a program learns about its devices without asking the API.
//! Pure, except for [`files`].
//!
//! A claim has one file for each request. Containers have the files of the requests that they name,
//! read-only, in `/var/run/kubernetes.io/dra-device-attributes` at
//!
//! ```text
//! resourceclaims/<claim>/<request>/<driver>-metadata.json
//! resourceclaimtemplates/<name in the pod>/<request>/<driver>-metadata.json
//! ```
//!
//! the latter if the claim was made from a template. A file is a stream of JSON objects. Each says the same
//! in one version of `metadata.resource.k8s.io`, newest first; readers take the first version that they know.
//! The attributes are those under which the device is published. A partition also has the `uuid` of its MIG
//! device. A GPU that is given through MPS also has the limits of its `MpsConfig`: `activeThreadPercentage`
//! and `pinnedDeviceMemoryLimitBytes`.
//! device. A GPU that is given through MPS also has the limits of its `MpsConfig`: `activeThreadPercentage`
//! and `pinnedDeviceMemoryLimitBytes`.
//!
//! On the node a file is `<data dir>/dra-device-metadata/<claim UID>/<request>/metadata.json`. (Kubernetes'
//! own helper has namespace and name in the place of the UID. Both together can be longer than a file name
//! may be, and two claims that had the same name one after the other would share a file.) The file is mounted
//! by a CDI spec of its own, named as the helper names it: `<driver>_metadata_<claim UID>_<request>.json`
//! with the device `<driver>/metadata=<claim UID>_<request>`.

pub mod files;

use crate::claim::ClaimRef;
use crate::ledger::{Device, Metadata};
use crate::object_names::{is_claim_name, is_label, is_safe_uid};
use crate::resourceslice;
use aliquot_cdi::{ContainerEdits, Device as CdiDevice, Mount, NameError, Spec};
use aliquot_model::layout::{Attribute, device_attributes};
use aliquot_model::{DeviceName, GpuInfo};
use k8s_openapi::api::resource::v1::DeviceAttribute;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The API versions in which a file says the same, newest first.
pub const VERSIONS: [&str; 2] = ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"];
/// The kind of the objects.
pub const KIND: &str = "DeviceMetadata";
/// The directory in the container with the files.
pub const CONTAINER_DIR: &str = "/var/run/kubernetes.io/dra-device-attributes";
/// The class part of the CDI kind; the vendor is the driver's name.
pub const CLASS: &str = "metadata";
/// The reason why a file cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MetadataError {
    /// A name that Kubernetes does not allow, and that would be part of a path.
    #[error(
        "cannot make device metadata of claim {claim}: its {what} {text:?} is no name that Kubernetes allows, and would be \
         part of a path"
    )]
    Name {
        /// The claim.
        claim: Box<ClaimRef>,
        /// What the name is of.
        what: &'static str,
        /// The name.
        text: String,
    },
    /// A name that CDI does not allow.
    #[error("cannot name a CDI device for device metadata: {0}")]
    Cdi(#[from] NameError),
    /// The object does not serialize, which its types exclude.
    #[error("cannot encode device metadata: {0}")]
    Encode(#[from] serde_json::Error),
}

/// A request's file, and the CDI spec that mounts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestFile {
    /// The path of the file on this node.
    pub path: PathBuf,
    /// The content of the file.
    pub content: Vec<u8>,
    /// The name of the spec without suffix.
    pub spec_name: String,
    /// The spec.
    pub spec: Spec,
}

/// Returns the directory of all files.
pub fn root(data_dir: &Path) -> PathBuf {
    data_dir.join("dra-device-metadata")
}

/// Returns the prefix of the names of all this driver's specs of such files. No driver's name has a `_`.
pub fn spec_prefix(driver: &str) -> String {
    format!("{driver}_{CLASS}_")
}

/// Returns the prefix of the names of one claim's specs. No UID has a `_`.
fn spec_prefix_of(driver: &str, uid: &str) -> String {
    format!("{}{uid}_", spec_prefix(driver))
}

/// Returns the CDI ID of a request's file. `request` is without its subrequest.
pub fn device_id(driver: &str, uid: &str, request: &str) -> String {
    format!("{driver}/{CLASS}={uid}_{request}")
}

/// Returns a request without its subrequest.
pub fn base(request: &str) -> &str {
    request.split('/').next().unwrap_or_default()
}

/// Returns the path of a request's file in the container.
fn container_path(driver: &str, claim: &ClaimRef, metadata: &Metadata, request: &str) -> String {
    let (kind, name) = match &metadata.pod_claim_name {
        Some(name) => ("resourceclaimtemplates", name),
        None => ("resourceclaims", &claim.name),
    };
    format!("{CONTAINER_DIR}/{kind}/{name}/{request}/{driver}-metadata.json")
}

/// Returns the attributes that a file gives of a device.
pub fn attributes(device: &Device, info: &GpuInfo) -> BTreeMap<String, Attribute> {
    let name: Option<DeviceName> = device.name();
    let mut attributes =
        name.map(|name| device_attributes(info, &name, device.passthrough())).unwrap_or_default();
    if let Some(uuid) = device.partition.as_ref().and_then(|partition| partition.uuid.as_ref()) {
        attributes.insert("uuid".to_owned(), Attribute::Text(uuid.to_string()));
    }
    if let Some(config) = &device.mps {
        let percent = config.active_thread_percentage.map(i64::from);
        let bytes = config.pinned_bytes();
        let limits = [
            ("activeThreadPercentage", percent),
            ("pinnedDeviceMemoryLimitBytes", bytes.and_then(|bytes| i64::try_from(bytes).ok())),
        ];
        let limits =
            limits.into_iter().filter_map(|(name, limit)| Some((name.to_owned(), Attribute::Int(limit?))));
        attributes.extend(limits);
    }
    attributes
}

/// Builds the files of a claim: one for each request, in the order of its devices. The same arguments give
/// the same bytes.
///
/// # Errors
/// Fails with [`MetadataError`].
pub fn requests(
    driver: &str,
    data_dir: &Path,
    claim: &ClaimRef,
    metadata: &Metadata,
    devices: &[(Device, BTreeMap<String, Attribute>)],
) -> Result<Vec<RequestFile>, MetadataError> {
    let check = |holds: bool, what, text: &str| match holds {
        true => Ok(()),
        false => Err(MetadataError::Name { claim: Box::new(claim.clone()), what, text: text.to_owned() }),
    };
    check(is_safe_uid(&claim.uid), "UID", &claim.uid)?;
    check(is_claim_name(&claim.name), "name", &claim.name)?;
    let in_pod = metadata.pod_claim_name.as_deref();
    check(in_pod.is_none_or(is_label), "name in its pod", in_pod.unwrap_or_default())?;
    let mut bases: Vec<&str> = Vec::new();
    for (device, _) in devices {
        let request = base(&device.request);
        check(is_label(request), "request", request)?;
        if !bases.contains(&request) {
            bases.push(request);
        }
    }
    let file = |request: &str| {
        let own: Vec<_> = devices.iter().filter(|(device, _)| base(&device.request) == request).collect();
        let path = root(data_dir).join(&claim.uid).join(request).join("metadata.json");
        let mount =
            Mount::read_only(path.to_string_lossy(), container_path(driver, claim, metadata, request));
        let edits = ContainerEdits { mounts: vec![mount], ..ContainerEdits::default() };
        let name = format!("{}_{request}", claim.uid).parse()?;
        Ok(RequestFile {
            content: stream(driver, claim, metadata, &own)?,
            spec_name: format!("{}{request}", spec_prefix_of(driver, &claim.uid)),
            spec: Spec::new(format!("{driver}/{CLASS}").parse()?, vec![CdiDevice::new(name, edits)]),
            path,
        })
    };
    bases.into_iter().map(file).collect()
}

/// The `DeviceMetadata` object, which is the same in both versions.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceMetadata<'a> {
    kind: &'static str,
    api_version: &'static str,
    metadata: ObjectMeta<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_claim_name: Option<&'a str>,
    requests: Vec<MetadataRequest<'a>>,
}

/// The part of the claim's own metadata that the file gives.
#[derive(Serialize)]
struct ObjectMeta<'a> {
    name: &'a str,
    namespace: &'a str,
    uid: &'a str,
    /// The generation of the file. A driver that finds out more after the pod has started raises it; this one
    /// does not.
    generation: u32,
}

/// The `DeviceMetadataRequest` object.
#[derive(Serialize)]
struct MetadataRequest<'a> {
    /// The request with its subrequest.
    name: &'a str,
    devices: Vec<MetadataDevice<'a>>,
}

/// The `Device` object.
#[derive(Serialize)]
struct MetadataDevice<'a> {
    driver: &'a str,
    pool: &'a str,
    name: &'a str,
    attributes: BTreeMap<&'a str, DeviceAttribute>,
}

/// Returns the content of a request's file.
fn stream(
    driver: &str,
    claim: &ClaimRef,
    metadata: &Metadata,
    devices: &[&(Device, BTreeMap<String, Attribute>)],
) -> Result<Vec<u8>, serde_json::Error> {
    let mut stream = Vec::new();
    for api_version in VERSIONS {
        let told = devices.iter().map(|(device, attributes)| MetadataDevice {
            driver,
            pool: &device.pool,
            name: &device.device,
            attributes: attributes
                .iter()
                .map(|(name, value)| (name.as_str(), resourceslice::attribute(value)))
                .collect(),
        });
        let name = devices.first().map_or("", |(device, _)| device.request.as_str());
        let object = DeviceMetadata {
            kind: KIND,
            api_version,
            metadata: ObjectMeta {
                name: &claim.name,
                namespace: &claim.namespace,
                uid: &claim.uid,
                generation: 1,
            },
            pod_claim_name: metadata.pod_claim_name.as_deref(),
            requests: vec![MetadataRequest { name, devices: told.collect() }],
        };
        serde_json::to_writer_pretty(&mut stream, &object)?;
        stream.push(b'\n');
    }
    Ok(stream)
}

#[cfg(test)]
mod tests;

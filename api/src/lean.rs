//! Which parts of which kinds are read.

use crate::filter::{Filter, Place, Rules};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::Resource;
use kube::core::ObjectMeta;
use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Cow;

/// Objects of a page, of kinds that anybody may make as large as etcd takes them, 1.5 MiB: their text is in memory
/// together.
pub const PAGE: u32 = 50;

/// A kind of which nobody reads all.
pub trait Kept: Resource {
    /// Fields that nobody reads, each with the field in which its object stands.
    const LEFT_OUT: &'static [(&'static str, &'static str)];
}

/// Who wrote which field is half of every object.
const MANAGED: &[Place] = &[("metadata", "managedFields")];
/// Of drivers in classes, claims and allocations.
const OPAQUE: &[Place] = &[("opaque", "parameters")];

/// What drivers tell of devices stands in `status.devices`; the node agents write ours.
impl Kept for ResourceClaim {
    const LEFT_OUT: &'static [Place] = &[("metadata", "labels"), ("status", "devices")];
}

/// Of a template's claims the requests are looked at, before they are made.
impl Kept for ResourceClaimTemplate {
    const LEFT_OUT: &'static [Place] = &[
        ("metadata", "annotations"),
        ("metadata", "labels"),
        ("metadata", "ownerReferences"),
        ("spec", "metadata"),
        ("devices", "config"),
    ];
}

/// Of containers it matters what they ask of the node.
impl Kept for Pod {
    const LEFT_OUT: &'static [Place] = &[
        ("spec", "ephemeralContainers"),
        ("containers", "args"),
        ("containers", "command"),
        ("containers", "env"),
        ("containers", "envFrom"),
        ("containers", "lifecycle"),
        ("containers", "livenessProbe"),
        ("containers", "readinessProbe"),
        ("containers", "startupProbe"),
        ("containers", "volumeDevices"),
        ("containers", "volumeMounts"),
        ("initContainers", "args"),
        ("initContainers", "command"),
        ("initContainers", "env"),
        ("initContainers", "envFrom"),
        ("initContainers", "lifecycle"),
        ("initContainers", "livenessProbe"),
        ("initContainers", "readinessProbe"),
        ("initContainers", "startupProbe"),
        ("initContainers", "volumeDevices"),
        ("initContainers", "volumeMounts"),
    ];
}

/// An object, read without what its kind leaves out, without field managers, and with opaque parameters within the
/// bounds of our configurations. What was read must not be written back as a whole.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct Lean<K>(pub K);

impl<'de, K: Kept + Deserialize<'de>> Deserialize<'de> for Lean<K> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let rules = Rules { left_out: [MANAGED, K::LEFT_OUT], opaque: OPAQUE };
        K::deserialize(Filter { inner: from, rules, field: "" }).map(Self)
    }
}

/// The object of an answer.
///
/// # Errors
/// Those of the request.
pub async fn lean<K, E>(answer: impl Future<Output = Result<Lean<K>, E>>) -> Result<K, E> {
    answer.await.map(|Lean(object)| object)
}

impl<K: Resource> Resource for Lean<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(of: &Self::DynamicType) -> Cow<'_, str> {
        K::kind(of)
    }

    fn group(of: &Self::DynamicType) -> Cow<'_, str> {
        K::group(of)
    }

    fn version(of: &Self::DynamicType) -> Cow<'_, str> {
        K::version(of)
    }

    fn plural(of: &Self::DynamicType) -> Cow<'_, str> {
        K::plural(of)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.meta_mut()
    }
}

#[cfg(test)]
#[path = "lean_tests.rs"]
mod tests;

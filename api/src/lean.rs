//! The parts of objects that are read, by kind.

use crate::filter::{Filter, Place, Rules};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::Resource;
use kube::core::ObjectMeta;
use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Cow;

/// The number of objects in a page of a list, for kinds whose objects any user may make as large as etcd
/// accepts, 1.5 MiB: the text of a page is in memory at once.
pub const PAGE: u32 = 50;

/// A kind of which only some fields are read.
pub trait Kept: Resource {
    /// Fields that are not read, each with the field in which its object stands.
    const LEFT_OUT: &'static [(&'static str, &'static str)];
}

/// Field managers are half of every object.
const MANAGED: &[Place] = &[("metadata", "managedFields")];
/// Parameters of drivers in classes, claims and allocations.
const OPAQUE: &[Place] = &[("opaque", "parameters")];

/// `status.devices` contains what drivers report about devices; the node agents write that of this driver.
impl Kept for ResourceClaim {
    const LEFT_OUT: &'static [Place] = &[("metadata", "labels"), ("status", "devices")];
}

/// Of a template, only the requests of its claims are used, before the claims are created.
impl Kept for ResourceClaimTemplate {
    const LEFT_OUT: &'static [Place] = &[
        ("metadata", "annotations"),
        ("metadata", "labels"),
        ("metadata", "ownerReferences"),
        ("spec", "metadata"),
        ("devices", "config"),
    ];
}

/// Of a container, only what it requests of the node is used.
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

/// An object that was read without the fields that its kind leaves out, without field managers, and with
/// opaque parameters within the bounds of this driver's configurations. Such an object must not be written
/// back as a whole.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct Lean<K>(pub K);

impl<'de, K: Kept + Deserialize<'de>> Deserialize<'de> for Lean<K> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let rules = Rules { left_out: [MANAGED, K::LEFT_OUT], opaque: OPAQUE };
        K::deserialize(Filter { inner: from, rules, field: "" }).map(Self)
    }
}

/// Returns the object of an answer.
///
/// # Errors
/// The errors of the request.
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

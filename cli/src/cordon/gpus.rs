//! The GPUs of the cluster, as their node agents publish them. All functions are pure.

use aliquot_model::layout::TaintEffect;
use aliquot_model::{DeviceKind, DeviceName, GpuUuid};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use std::collections::BTreeSet;
use std::fmt;

/// The most GPUs that an error lists.
const LISTED: usize = 32;

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Gpu {
    pub(super) node: String,
    pub(super) minor: u32,
    pub(super) uuid: GpuUuid,
    product: String,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpu-{} of node {} ({}", self.minor, self.node, self.uuid)?;
        if self.product.is_empty() { f.write_str(")") } else { write!(f, ", {})", self.product) }
    }
}

impl Gpu {
    fn has(&self, slice: &ResourceSlice, device: &Device) -> bool {
        slice.spec.node_name.as_ref() == Some(&self.node) && minor(&device.name) == Some(self.minor)
    }

    /// Returns a description of a claim and its users, if the claim has devices of this GPU.
    pub(super) fn used_by(&self, claim: &ResourceClaim, driver: &str, pool: &str) -> Option<String> {
        let status = claim.status.as_ref()?;
        let results = status.allocation.as_ref()?.devices.as_ref()?.results.as_deref()?;
        let mine = results.iter().filter(|result| {
            result.driver == driver && result.pool == pool && minor(&result.device) == Some(self.minor)
        });
        let devices: Vec<&str> = mine.map(|result| result.device.as_str()).collect();
        if devices.is_empty() {
            return None;
        }
        let pods = status.reserved_for.iter().flatten().filter(|consumer| consumer.resource == "pods");
        let pods: Vec<&str> = pods.map(|pod| pod.name.as_str()).collect();
        let users = if pods.is_empty() { "no pod".to_owned() } else { format!("pod {}", pods.join(", ")) };
        let meta = &claim.metadata;
        let (namespace, name) =
            (meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default());
        Some(format!("{namespace}/{name}: {}, {users}", devices.join(", ")))
    }
}

fn minor(device: &str) -> Option<u32> {
    Some(DeviceName::parse(device)?.minor())
}

fn text(device: &Device, name: &str) -> Option<String> {
    device.attributes.as_ref()?.get(name)?.string.clone()
}

/// Returns the GPUs in all slices of a driver.
pub(super) fn published(slices: &[ResourceSlice]) -> BTreeSet<Gpu> {
    let devices = slices.iter().flat_map(|slice| {
        slice.spec.devices.iter().flatten().filter_map(|device| {
            let uuid = text(device, "uuid").or_else(|| text(device, "parentUUID"))?;
            Some(Gpu {
                node: slice.spec.node_name.clone()?,
                minor: minor(&device.name)?,
                uuid: GpuUuid::parse(&uuid)?,
                product: text(device, "productName").unwrap_or_default(),
            })
        })
    });
    devices.collect()
}

/// Returns the names of a GPU's devices that do not have the taint with the right effect, except the one for
/// administration.
pub(super) fn without_taint(slices: &[ResourceSlice], gpu: &Gpu, key: &str, evict: bool) -> BTreeSet<String> {
    let effect = if evict { TaintEffect::NoExecute } else { TaintEffect::NoSchedule }.as_str();
    let all = slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten().map(move |device| (slice, device)));
    let of_gpu = all.filter(|(slice, device)| {
        let kind = DeviceName::parse(&device.name).map(|name| name.kind());
        gpu.has(slice, device) && kind != Some(DeviceKind::Admin)
    });
    let tainted = |device: &Device| {
        device.taints.iter().flatten().any(|taint| taint.key == key && taint.effect == effect)
    };
    of_gpu.filter(|(_, device)| !tainted(device)).map(|(_, device)| device.name.clone()).collect()
}

/// Returns the taints with one of these keys on devices of a GPU, as `<key>=<value>:<effect>`.
pub(super) fn taints(slices: &[ResourceSlice], gpu: &Gpu, keys: &[String]) -> BTreeSet<String> {
    let all = slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten().map(move |device| (slice, device)));
    let of_gpu = all.filter(|(slice, device)| gpu.has(slice, device));
    let taints = of_gpu.flat_map(|(_, device)| device.taints.iter().flatten());
    let shown = taints.filter(|taint| keys.contains(&taint.key)).map(|taint| {
        let value = taint.value.as_deref().filter(|value| !value.is_empty());
        format!(
            "{}{}:{}",
            taint.key,
            value.map(|value| format!("={value}")).unwrap_or_default(),
            taint.effect
        )
    });
    shown.collect()
}

/// The GPU that the command line names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The GPU with this UUID, on any node or on the given node.
    Uuid(GpuUuid, Option<String>),
    /// The GPU with this minor number on a node.
    Minor(u32, String),
}

impl Wanted {
    /// Parses `GPU-…`, or `gpu-<minor>` of a node.
    ///
    /// # Errors
    /// If the text names no GPU; the error says why.
    pub(super) fn parse(text: &str, node: Option<&str>) -> Result<Self, String> {
        if let Some(uuid) = GpuUuid::parse(text) {
            return Ok(Self::Uuid(uuid, node.map(str::to_owned)));
        }
        match (DeviceName::parse(text), node) {
            (Some(DeviceName::Plain { minor, kind: DeviceKind::Gpu }), Some(node)) => {
                Ok(Self::Minor(minor, node.to_owned()))
            }
            (Some(DeviceName::Plain { kind: DeviceKind::Gpu, .. }), None) => Err(format!(
                "every node may have a {text}: say which with --node, or name the GPU by its UUID"
            )),
            _ => Err(format!(
                "{text:?} names no GPU: use its UUID (GPU-…, as `nvidia-smi -L` shows it), or gpu-0 and --node"
            )),
        }
    }

    /// Returns the GPU that is named.
    ///
    /// # Errors
    /// If there is no such GPU; the error lists those that exist.
    pub(super) fn among(&self, all: &BTreeSet<Gpu>) -> Result<Gpu, String> {
        let (what, node) = match self {
            Self::Uuid(uuid, node) => (format!("GPU {uuid}"), node.as_deref()),
            Self::Minor(minor, node) => (format!("gpu-{minor}"), Some(node.as_str())),
        };
        let is_meant = |gpu: &&Gpu| match self {
            Self::Uuid(uuid, _) => gpu.uuid == *uuid,
            Self::Minor(minor, _) => gpu.minor == *minor,
        };
        let there: Vec<&Gpu> = all.iter().filter(|gpu| node.is_none_or(|node| gpu.node == node)).collect();
        if let Some(gpu) = there.iter().copied().find(is_meant) {
            return Ok(gpu.clone());
        }
        let place = node.map_or_else(|| "any node".to_owned(), |node| format!("node {node}"));
        if let Some(gpu) = all.iter().find(|gpu| matches!(self, Self::Uuid(..)) && is_meant(gpu)) {
            return Err(format!("{what} is not on {place}: it is {gpu}"));
        }
        if there.is_empty() {
            return Err(format!(
                "{what} is not there: no GPU is published of {place}; is its node agent running, under this --driver-name?"
            ));
        }
        let mut names: Vec<String> = there.iter().take(LISTED).map(|gpu| format!("  {gpu}")).collect();
        if there.len() > LISTED {
            names.push(format!("  and {} more; --node shows those of one node", there.len() - LISTED));
        }
        Err(format!(
            "{what} is not on {place}. One that is cordoned is not published where the API server keeps no taints: name it by \
             its UUID. There are:\n{}",
            names.join("\n")
        ))
    }
}

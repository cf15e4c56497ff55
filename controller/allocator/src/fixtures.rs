//! Objects of a cluster with this driver's nodes, for tests and benchmarks. Slices come from the model's own
//! layout.
#![allow(
    missing_docs,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use aliquot_model::layout::{
    AllocatorMode, Attribute, Capacity, CapacityPolicy, Device, GpuState, Options, ServerFeatures, Slice,
    publish,
};
use aliquot_model::{
    Architecture, Engines, GpuInfo, GpuUuid, MigCapability, MigProfile, Placement, ProfileName, names,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::time::Instant;

pub const DRIVER: &str = names::DEFAULT_DRIVER;
const GIB: u64 = 1 << 30;

/// Returns a moment in time; callers do not depend on which one.
#[allow(clippy::disallowed_methods, reason = "there is no other way to get one")]
pub fn some_moment() -> Instant {
    Instant::now()
}

/// Returns an object from JSON.
pub fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("a well-formed object")
}

fn profile(name: &str, id: u32, gib: u64, sms: u32, size: u32, starts: &[u32], media: u32) -> MigProfile {
    MigProfile {
        name: ProfileName::new(name),
        id,
        nvml_profile: id,
        memory_bytes: gib * GIB,
        multiprocessors: sms,
        compute_slices: size.min(7),
        engines: Engines { copy: size, decoders: size, encoders: 0, jpeg: media, ofa: media },
        max_instances: u32::try_from(starts.len()).expect("few"),
        placements: starts.iter().map(|start| Placement::new(*start, size)).collect(),
    }
}

/// Returns an H100 with its 25 placements.
pub fn h100(node: &str, minor: u32) -> GpuInfo {
    let seed = node.bytes().fold(7u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    let mut with_media = profile("1g.10gb+me", 20, 10, 16, 1, &[0, 1, 2, 3, 4, 5, 6], 1);
    with_media.max_instances = 1;
    GpuInfo {
        minor,
        index: minor,
        uuid: GpuUuid::parse(&format!("GPU-{seed:08x}-{minor:04x}")).expect("a UUID"),
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: Architecture::Hopper,
        compute_capability: (9, 0),
        driver_version: "570.86.15".to_owned(),
        cuda_driver_version: (12, 8),
        memory_bytes: 80 * GIB,
        multiprocessors: 132,
        pci_bus_id: Some(format!("0000:{:02x}:00.0", 16 + minor)),
        pcie_root: Some(format!("pci0000:{:02x}", minor / 2)),
        numa_node: Some(minor / 4),
        nvswitch: false,
        nvlink_domain: None,
        mig: MigCapability::Supported {
            enabled: false,
            pending: false,
            needs_reset: false,
            profiles: vec![
                profile("1g.10gb", 19, 10, 16, 1, &[0, 1, 2, 3, 4, 5, 6], 0),
                with_media,
                profile("1g.20gb", 15, 20, 16, 2, &[0, 2, 4, 6], 0),
                profile("2g.20gb", 14, 20, 32, 2, &[0, 2, 4], 0),
                profile("3g.40gb", 9, 40, 60, 4, &[0, 4], 0),
                profile("4g.40gb", 5, 40, 64, 4, &[0], 0),
                profile("7g.80gb", 0, 80, 132, 8, &[0], 1),
            ],
        },
    }
}

/// Returns the slices of a node with this number of H100s, as the node's agent publishes them.
pub fn slices(node: &str, gpus: u32, mode: AllocatorMode, generation: i64) -> Vec<ResourceSlice> {
    let gpus: Vec<GpuState> = (0..gpus).map(|minor| state(h100(node, minor))).collect();
    slices_of(node, &gpus, mode, generation)
}

/// Returns the slices of a node with this number of H100s whose partitions are also given out in shares.
pub fn slices_with_mig_shares(node: &str, gpus: u32) -> Vec<ResourceSlice> {
    let gpus: Vec<GpuState> = (0..gpus).map(|minor| state(h100(node, minor))).collect();
    slices_by(node, &gpus, &options(AllocatorMode::Controller, true), 1)
}

/// Returns the options with which a node publishes.
pub fn options(mode: AllocatorMode, mig_shares: bool) -> Options {
    Options {
        driver: DRIVER.to_owned(),
        mode,
        slots: 10,
        mps: (0..64).collect(),
        mig_shares,
        passthrough: Default::default(),
    }
}

/// Returns a GPU of which nothing is held.
pub fn state(info: GpuInfo) -> GpuState {
    GpuState { info, live: Vec::new(), held: Vec::new(), standing: Vec::new(), taints: Vec::new() }
}

/// Returns the slices of a node with these GPUs.
pub fn slices_of(node: &str, gpus: &[GpuState], mode: AllocatorMode, generation: i64) -> Vec<ResourceSlice> {
    slices_by(node, gpus, &options(mode, false), generation)
}

/// Returns the slices of a node with these GPUs, published with these options.
pub fn slices_by(node: &str, gpus: &[GpuState], options: &Options, generation: i64) -> Vec<ResourceSlice> {
    let layout = publish(gpus, ServerFeatures::all_of_minor(36), options);
    let count = layout.len();
    layout
        .into_iter()
        .enumerate()
        .map(|(position, slice)| object(slice_json(node, position, count, generation, &slice)))
        .collect()
}

fn slice_json(node: &str, position: usize, count: usize, generation: i64, slice: &Slice) -> Value {
    let mut spec = json!({
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": names::pool_name(DRIVER, node), "generation": generation, "resourceSliceCount": count},
    });
    if !slice.counter_sets.is_empty() {
        let sets: Vec<Value> = slice
            .counter_sets
            .iter()
            .map(|set| json!({"name": set.name, "counters": counters(set.counters.iter())}))
            .collect();
        spec["sharedCounters"] = json!(sets);
    }
    if !slice.devices.is_empty() {
        spec["devices"] = slice.devices.iter().map(device_json).collect();
    }
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": format!("{position:03}-{DRIVER}-{node}")},
        "spec": spec,
    })
}

fn counters<'a>(counters: impl Iterator<Item = (&'a String, &'a u64)>) -> Value {
    counters.map(|(name, value)| (name.clone(), json!({"value": value.to_string()}))).collect()
}

fn device_json(device: &Device) -> Value {
    let attributes: Value = device
        .attributes
        .iter()
        .map(|(name, value)| {
            let value = match value {
                Attribute::Text(text) => json!({"string": text}),
                Attribute::Int(int) => json!({"int": int}),
                Attribute::Bool(bool) => json!({"bool": bool}),
                Attribute::Version(version) => json!({"version": version}),
            };
            (name.clone(), value)
        })
        .collect();
    let capacity: Value =
        device.capacity.iter().map(|(name, capacity)| (name.clone(), capacity_json(capacity))).collect();
    let mut object = json!({"name": device.name.to_string(), "attributes": attributes, "capacity": capacity});
    if let Some(consumes) = &device.consumes {
        let set = format!("gpu-{}", device.name.minor());
        object["consumesCounters"] = json!([{"counterSet": set, "counters": counters(consumes.iter())}]);
    }
    if !device.taints.is_empty() {
        let taints: Vec<Value> = device
            .taints
            .iter()
            .map(|taint| json!({"key": taint.key, "value": taint.value, "effect": "NoSchedule"}))
            .collect();
        object["taints"] = json!(taints);
    }
    if device.allow_multiple_allocations {
        object["allowMultipleAllocations"] = json!(true);
    }
    object
}

fn capacity_json(capacity: &Capacity) -> Value {
    let mut object = json!({"value": capacity.value.to_string()});
    match &capacity.policy {
        None => {}
        Some(CapacityPolicy::Range { default, min, max, step }) => {
            object["requestPolicy"] = json!({
                "default": default.to_string(),
                "validRange": {"min": min.to_string(), "max": max.to_string(), "step": step.to_string()},
            });
        }
        Some(CapacityPolicy::Values { default, values }) => {
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            object["requestPolicy"] = json!({"default": default.to_string(), "validValues": values});
        }
    }
    object
}

/// Returns the DeviceClasses of the chart.
pub fn classes() -> Vec<DeviceClass> {
    ["gpu", "mig", "share", "admin"].map(class_of).into()
}

/// Returns the DeviceClasses of the chart with shares of partitions switched on.
pub fn classes_with_mig_shares() -> Vec<DeviceClass> {
    ["gpu", "mig", "mig-share", "share", "admin"].map(class_of).into()
}

fn class_of(kind: &str) -> DeviceClass {
    let expression =
        format!(r#"device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].type == "{kind}""#);
    class(&format!("{kind}.aliquot.dev"), &expression)
}

/// Returns a DeviceClass with one selector.
pub fn class(name: &str, expression: &str) -> DeviceClass {
    object(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }))
}

/// Returns a node with room for everything.
pub fn node(name: &str) -> Node {
    object(json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }))
}

/// Returns a request for a number of devices of a class.
pub fn request(name: &str, class: &str, count: u32) -> Value {
    json!({"name": name, "exactly": {"deviceClassName": class, "allocationMode": "ExactCount", "count": count}})
}

/// Returns a request for a partition by profile.
pub fn partition(name: &str, profile: &str) -> Value {
    let expression = format!(r#"device.attributes["{DRIVER}"].profile == "{profile}""#);
    let mut request = request(name, "mig.aliquot.dev", 1);
    request["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    request
}

/// Returns a request for a share.
pub fn share(name: &str, memory: &str, cores: &str) -> Value {
    let mut request = request(name, "share.aliquot.dev", 1);
    request["exactly"]["capacity"] = json!({"requests": {"memory": memory, "cores": cores}});
    request
}

/// Returns a request for a share of a partition.
pub fn mig_share(name: &str, profile: &str, memory: &str, cores: &str) -> Value {
    let mut request = partition(name, profile);
    request["exactly"]["deviceClassName"] = json!("mig-share.aliquot.dev");
    request["exactly"]["capacity"] = json!({"requests": {"memory": memory, "cores": cores}});
    request
}

/// Returns the spec of a claim.
pub fn spec(requests: &[Value]) -> Value {
    json!({"devices": {"requests": requests}})
}

/// Returns a claim.
pub fn claim(name: &str, spec: &Value) -> ResourceClaim {
    object(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }))
}

/// Returns a gated pod that uses these claims.
pub fn pod(name: &str, claims: &[&str]) -> Pod {
    let claims: Vec<Value> =
        claims.iter().map(|claim| json!({"name": claim, "resourceClaimName": claim})).collect();
    object(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "containers": [{
                "name": "main",
                "image": "example.com/image",
                "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
            }],
            "resourceClaims": claims,
            "schedulingGates": [{"name": names::SCHEDULING_GATE}],
        },
    }))
}

/// Returns what an earlier controller stored in a budget: it saw the claims of these releases with a GPU of a
/// node, and nothing more of them. `site` is the node in the form of an account.
pub fn account_of_seen(numbers: &[u64], now: i64, site: &str) -> Value {
    let since = now - 1800;
    let uses: Vec<String> = numbers.iter().map(|n| format!("uid-{n}:{since}:{since}:::1000000:0")).collect();
    let sites = vec![site; numbers.len()].join(" ");
    json!({
        "begun": since, "seen": now, "charged": "", "claims": uses.join(" "), "sites": {"seen": now, "text": sites},
    })
}

/// Returns the record of node n1's agent for released claims, by number: half an hour of a whole GPU each.
pub fn released(numbers: &[u64], until: i64) -> Value {
    let released: Vec<Value> = numbers
        .iter()
        .map(|number| {
            json!({
                "number": number, "namespace": "default", "name": format!("c{number}"),
                "uid": format!("uid-{number}"), "microGpus": 1_000_000, "since": until - 1800, "until": until,
            })
        })
        .collect();
    json!({
        "apiVersion": "aliquot.dev/v1alpha1", "kind": "NodeUsage", "metadata": {"name": "n1"},
        "spec": {"ledger": "l1", "held": [], "released": released},
    })
}

//! Converts the model's slices to ResourceSlice objects, and compares them with the API's objects to decide
//! what must be written. Pure; [`crate::publish`] does the I/O.

use crate::allocation_mode;
use aliquot_model::layout::{Attribute, Capacity, CapacityPolicy, Device, ServerFeatures, Slice};
use aliquot_model::names;
use jiff::Timestamp;
use k8s_openapi::api::resource::v1 as api;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use std::collections::{BTreeMap, BTreeSet};

/// The data that all slices of a node share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The name of the driver.
    pub driver: String,
    /// The name of the pool.
    pub pool: String,
    /// The name of the node.
    pub node: String,
    /// The UID of the Node object, which owns the slices.
    pub node_uid: String,
    /// The latest end of a hand-over to the controller; noted on the first slice.
    pub hand_over_until: Option<Timestamp>,
}

impl Owner {
    /// Returns the annotations of a slice. Only the first slice has any. One slice is enough, and a single
    /// slice is written in place, so that the pool stays complete.
    fn annotations(&self, index: usize) -> Option<BTreeMap<String, String>> {
        let until = self.hand_over_until.filter(|_| index == 0)?;
        Some([(names::HAND_OVER_UNTIL.to_owned(), allocation_mode::stated(until))].into())
    }
}

/// Returns `<5-digit index>-<driver>-<node>`. The names sort in the order in which kube-scheduler should try
/// the slices (from 1.36 on it sorts by name), and are the same after every restart.
pub fn slice_name(index: usize, driver: &str, node: &str) -> String {
    let mut name = format!("{index:05}-{driver}-{node}").to_ascii_lowercase();
    name = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.') { c } else { '-' })
        .collect();
    name.truncate(253);
    name.trim_end_matches(['-', '.']).to_owned()
}

/// Builds the objects of a layout at a pool generation.
pub fn objects(slices: &[Slice], owner: &Owner, generation: i64) -> Vec<api::ResourceSlice> {
    let count = i64::try_from(slices.len()).unwrap_or(i64::MAX);
    slices
        .iter()
        .enumerate()
        .map(|(index, slice)| api::ResourceSlice {
            metadata: ObjectMeta {
                name: Some(slice_name(index, &owner.driver, &owner.node)),
                owner_references: Some(vec![OwnerReference {
                    api_version: "v1".into(),
                    kind: "Node".into(),
                    name: owner.node.clone(),
                    uid: owner.node_uid.clone(),
                    controller: Some(true),
                    block_owner_deletion: None,
                }]),
                annotations: owner.annotations(index),
                ..ObjectMeta::default()
            },
            spec: api::ResourceSliceSpec {
                driver: owner.driver.clone(),
                node_name: Some(owner.node.clone()),
                pool: api::ResourcePool { name: owner.pool.clone(), generation, resource_slice_count: count },
                devices: none_if_empty(slice.devices.iter().map(device).collect()),
                shared_counters: none_if_empty(slice.counter_sets.iter().map(counter_set).collect()),
                ..api::ResourceSliceSpec::default()
            },
        })
        .collect()
}

fn none_if_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

fn quantity(units: u64) -> Quantity {
    Quantity(aliquot_model::Quantity::from_u64(units).to_string())
}

fn counters(counters: &BTreeMap<String, u64>) -> BTreeMap<String, api::Counter> {
    counters.iter().map(|(name, value)| (name.clone(), api::Counter { value: quantity(*value) })).collect()
}

fn counter_set(set: &aliquot_model::layout::CounterSet) -> api::CounterSet {
    api::CounterSet { name: set.name.clone(), counters: counters(&set.counters) }
}

fn device(device: &Device) -> api::Device {
    api::Device {
        name: device.name.to_string(),
        attributes: Some(device.attributes.iter().map(|(k, v)| (k.clone(), attribute(v))).collect()),
        capacity: Some(device.capacity.iter().map(|(k, v)| (k.clone(), capacity(v))).collect()),
        consumes_counters: device.consumes.as_ref().map(|consumed| {
            vec![api::DeviceCounterConsumption {
                counter_set: format!("gpu-{}", device.name.minor()),
                counters: counters(consumed),
            }]
        }),
        taints: none_if_empty(
            device
                .taints
                .iter()
                .map(|taint| api::DeviceTaint {
                    key: taint.key.clone(),
                    value: (!taint.value.is_empty()).then(|| taint.value.clone()),
                    effect: taint.effect.as_str().into(),
                    time_added: None,
                })
                .collect(),
        ),
        allow_multiple_allocations: device.allow_multiple_allocations.then_some(true),
        ..api::Device::default()
    }
}

/// Converts an attribute to the form that the API has.
pub(crate) fn attribute(attribute: &Attribute) -> api::DeviceAttribute {
    let mut out = api::DeviceAttribute::default();
    match attribute {
        Attribute::Text(text) => out.string = Some(text.clone()),
        Attribute::Int(int) => out.int = Some(*int),
        Attribute::Bool(bool) => out.bool = Some(*bool),
        Attribute::Version(version) => out.version = Some(version.clone()),
    }
    out
}

fn capacity(capacity: &Capacity) -> api::DeviceCapacity {
    let text = |q: &aliquot_model::Quantity| Quantity(q.to_string());
    api::DeviceCapacity {
        value: text(&capacity.value),
        request_policy: capacity.policy.as_ref().map(|policy| match policy {
            CapacityPolicy::Range { default, min, max, step } => api::CapacityRequestPolicy {
                default: Some(text(default)),
                valid_range: Some(api::CapacityRequestPolicyRange {
                    min: text(min),
                    max: Some(text(max)),
                    step: Some(text(step)),
                }),
                valid_values: None,
            },
            CapacityPolicy::Values { default, values } => api::CapacityRequestPolicy {
                default: Some(text(default)),
                valid_values: Some(values.iter().map(text).collect()),
                valid_range: None,
            },
        }),
    }
}

/// Normalizes a spec so that specs with equal meaning are equal. Quantities are compared by value, and empty
/// counts as absent. Fields that the server adds (taint times) and that only the publisher decides
/// (generation and count) are left out.
pub fn normal(spec: &api::ResourceSliceSpec) -> api::ResourceSliceSpec {
    let mut spec = spec.clone();
    spec.pool.generation = 0;
    spec.pool.resource_slice_count = 0;
    spec.all_nodes = spec.all_nodes.filter(|all| *all);
    spec.per_device_node_selection = spec.per_device_node_selection.filter(|per| *per);
    let mut devices = spec.devices.take().unwrap_or_default();
    for device in &mut devices {
        device.allow_multiple_allocations = device.allow_multiple_allocations.filter(|allow| *allow);
        device.attributes = device.attributes.take().filter(|map| !map.is_empty());
        device.capacity = device.capacity.take().filter(|map| !map.is_empty());
        device.consumes_counters = device.consumes_counters.take().filter(|list| !list.is_empty());
        device.taints = device.taints.take().filter(|list| !list.is_empty());
        for capacity in device.capacity.iter_mut().flat_map(BTreeMap::values_mut) {
            normalise(&mut capacity.value);
            if let Some(policy) = &mut capacity.request_policy {
                policy.default.iter_mut().for_each(normalise);
                policy.valid_values.iter_mut().flatten().for_each(normalise);
                if let Some(range) = &mut policy.valid_range {
                    normalise(&mut range.min);
                    range.max.iter_mut().for_each(normalise);
                    range.step.iter_mut().for_each(normalise);
                }
            }
        }
        for consumption in device.consumes_counters.iter_mut().flatten() {
            consumption.counters.values_mut().for_each(|counter| normalise(&mut counter.value));
        }
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added = None;
            taint.value = taint.value.take().filter(|value| !value.is_empty());
        }
    }
    spec.devices = none_if_empty(devices);
    let mut sets = spec.shared_counters.take().unwrap_or_default();
    for counter in sets.iter_mut().flat_map(|set| set.counters.values_mut()) {
        normalise(&mut counter.value);
    }
    spec.shared_counters = none_if_empty(sets);
    spec
}

fn normalise(quantity: &mut Quantity) {
    if let Ok(value) = quantity.0.parse::<aliquot_model::Quantity>() {
        quantity.0 = value.to_string();
    }
}

/// The fields that the server did not keep, because a feature of it is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dropped {
    /// True if counter sets or their consumption were dropped (DRAPartitionableDevices).
    pub counters: bool,
    /// True if `allowMultipleAllocations` or request policies were dropped (DRAConsumableCapacity).
    pub consumable_capacity: bool,
    /// True if taints were dropped (DRADeviceTaints).
    pub taints: bool,
}

impl Dropped {
    /// Returns true if the server dropped anything.
    pub const fn any(self) -> bool {
        self.counters || self.consumable_capacity || self.taints
    }

    /// Returns the fields dropped in either.
    pub const fn or(self, other: Self) -> Self {
        Self {
            counters: self.counters || other.counters,
            consumable_capacity: self.consumable_capacity || other.consumable_capacity,
            taints: self.taints || other.taints,
        }
    }

    /// Returns the server's features without those of the dropped fields.
    pub const fn without(self, mut server: ServerFeatures) -> ServerFeatures {
        server.counters = server.counters && !self.counters;
        server.consumable_capacity = server.consumable_capacity && !self.consumable_capacity;
        server.taints = server.taints && !self.taints;
        server
    }

    /// Returns the feature gates that are off, for messages.
    pub fn gates(self) -> Vec<&'static str> {
        let gates = [
            (self.counters, "DRAPartitionableDevices"),
            (self.consumable_capacity, "DRAConsumableCapacity"),
            (self.taints, "DRADeviceTaints"),
        ];
        gates.into_iter().filter(|(off, _)| *off).map(|(_, gate)| gate).collect()
    }
}

/// Compares the spec that was sent with the spec that came back. Returns the fields that are missing.
pub fn dropped(sent: &api::ResourceSliceSpec, kept: &api::ResourceSliceSpec) -> Dropped {
    let sets = |spec: &api::ResourceSliceSpec| spec.shared_counters.iter().flatten().count();
    let mut out = Dropped { counters: sets(kept) < sets(sent), ..Dropped::default() };
    let kept: BTreeMap<&str, &api::Device> =
        kept.devices.iter().flatten().map(|device| (device.name.as_str(), device)).collect();
    for device in sent.devices.iter().flatten() {
        let Some(kept) = kept.get(device.name.as_str()) else { continue };
        let lost = |sent: bool, kept: bool| sent && !kept;
        let some = |list: &Option<Vec<_>>| list.as_ref().is_some_and(|list| !list.is_empty());
        out.counters |= lost(some(&device.consumes_counters), some(&kept.consumes_counters));
        let tainted = |device: &api::Device| device.taints.iter().flatten().count();
        out.taints |= tainted(kept) < tainted(device);
        let policies = |device: &api::Device| {
            device.capacity.iter().flat_map(BTreeMap::values).filter(|c| c.request_policy.is_some()).count()
        };
        out.consumable_capacity |= policies(kept) < policies(device)
            || lost(
                device.allow_multiple_allocations == Some(true),
                kept.allow_multiple_allocations == Some(true),
            );
    }
    out
}

/// The writes that give the API the desired objects.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Writes {
    /// The names of objects to delete, before anything else.
    pub delete: Vec<String>,
    /// The objects to create.
    pub create: Vec<api::ResourceSlice>,
    /// The objects to replace, with the resourceVersion of the objects that they replace.
    pub update: Vec<api::ResourceSlice>,
    /// The generation of the pool after the writes.
    pub generation: i64,
}

impl Writes {
    /// Returns true if there is nothing to write.
    pub const fn is_empty(&self) -> bool {
        self.delete.is_empty() && self.create.is_empty() && self.update.is_empty()
    }
}

/// Decides the writes. `slices` is the desired layout; `floor` is the highest generation ever used; `bump`
/// asks for a new generation even for one write.
pub fn writes(
    actual: &[api::ResourceSlice],
    slices: &[Slice],
    owner: &Owner,
    floor: i64,
    bump: bool,
) -> Writes {
    let current = actual.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    let by_name: BTreeMap<&str, &api::ResourceSlice> =
        actual.iter().filter_map(|slice| Some((slice.metadata.name.as_deref()?, slice))).collect();
    let keep = objects(slices, owner, current);
    let wanted: BTreeSet<&str> = keep.iter().filter_map(|slice| slice.metadata.name.as_deref()).collect();
    let delete: Vec<String> =
        by_name.keys().filter(|name| !wanted.contains(**name)).map(|name| (*name).to_owned()).collect();
    let differs = |slice: &api::ResourceSlice, same_generation: bool| {
        let Some(there) = slice.metadata.name.as_deref().and_then(|name| by_name.get(name)) else {
            return true;
        };
        normal(&there.spec) != normal(&slice.spec)
            || there.metadata.owner_references != slice.metadata.owner_references
            || noted_until(there) != noted_until(slice)
            || (same_generation && there.spec.pool != slice.spec.pool)
    };
    let changed = keep.iter().filter(|slice| differs(slice, true)).count();
    if changed + delete.len() == 0 && !bump {
        return Writes { generation: current, ..Writes::default() };
    }
    // One write is atomic by itself; more than one must not be seen half done.
    let in_place = changed + delete.len() <= 1 && !bump && current > 0 && current >= floor;
    let generation = if in_place { current } else { current.max(floor).saturating_add(1) };
    let mut writes = Writes { delete, generation, ..Writes::default() };
    for mut slice in objects(slices, owner, generation) {
        let there = slice.metadata.name.as_deref().and_then(|name| by_name.get(name));
        match there {
            None => writes.create.push(slice),
            Some(_) if !differs(&slice, true) => {}
            Some(there) => {
                slice.metadata.resource_version.clone_from(&there.metadata.resource_version);
                keep_taint_times(&mut slice.spec, &there.spec);
                writes.update.push(slice);
            }
        }
    }
    writes
}

fn noted_until(slice: &api::ResourceSlice) -> Option<&String> {
    slice.metadata.annotations.as_ref()?.get(names::HAND_OVER_UNTIL)
}

/// Keeps the time at which a taint was added, if the taint stays.
fn keep_taint_times(new: &mut api::ResourceSliceSpec, old: &api::ResourceSliceSpec) {
    let old: BTreeMap<&str, &api::Device> =
        old.devices.iter().flatten().map(|device| (device.name.as_str(), device)).collect();
    for device in new.devices.iter_mut().flatten() {
        let Some(before) = old.get(device.name.as_str()) else { continue };
        for taint in device.taints.iter_mut().flatten() {
            let same = before.taints.iter().flatten().find(|other| {
                other.key == taint.key
                    && other.effect == taint.effect
                    && other.value.as_deref().unwrap_or_default()
                        == taint.value.as_deref().unwrap_or_default()
            });
            taint.time_added = same.and_then(|other| other.time_added.clone());
        }
    }
}

#[cfg(test)]
#[path = "resourceslice/tests.rs"]
mod tests;

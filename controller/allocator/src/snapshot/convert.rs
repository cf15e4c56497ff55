//! Converts API objects to what the snapshot stores. Nothing here fails: a part that cannot be read makes the
//! slice, and with it the pool, invalid, and the reason is kept.

use super::device::Range;
use super::slice_error::SliceError;
use super::{Capacity, Owner, Policy, Shape, Snapshot, Sym, Taint};
use crate::api_time::second;
use crate::quantity::Quantity;
use crate::selector::AttributeValue;
use aliquot_model::quantity::QuantityError;
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, Device as ApiDevice, DeviceAttribute, DeviceTaint, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Amounts by counter, in ascending order by symbol.
type Amounts = Arc<[(Sym, Quantity)]>;

/// A ResourceSlice of this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SliceRecord {
    /// `resourceVersion` of the object that was read.
    pub(crate) version: Option<Box<str>>,
    pub(crate) generation: i64,
    pub(crate) slice_count: i64,
    pub(crate) node: Option<Arc<str>>,
    pub(crate) sets: Box<[(Sym, Amounts)]>,
    pub(crate) devices: Box<[RawDevice]>,
    pub(crate) problem: Option<SliceError>,
    /// When a hand-over to the controller ends at the latest, in seconds of Unix time.
    pub(crate) hand_over_until: Option<i64>,
}

/// A device whose counters are not resolved yet: the pool's counter sets may be in other slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RawDevice {
    pub(crate) name: Sym,
    pub(crate) position: u32,
    pub(crate) shape: u32,
    pub(crate) values: Arc<[u32]>,
    pub(crate) taints: u32,
    pub(crate) owner: Owner,
    pub(crate) consumes: Box<[(Sym, Amounts)]>,
}

pub(crate) fn slice(index: &mut Snapshot, slice: &ResourceSlice) -> SliceRecord {
    let spec = &slice.spec;
    let mut problem = None;
    let mut sets = Vec::new();
    for set in spec.shared_counters.iter().flatten() {
        let name = index.names.intern(&set.name);
        match counters(index, set.counters.iter().map(|(name, counter)| (name.as_str(), &counter.value))) {
            Ok(counters) => sets.push((name, counters)),
            Err(source) => problem = Some(SliceError::CounterSet { set: set.name.clone(), source }),
        }
    }
    let mut devices = Vec::new();
    for (device, position) in spec.devices.iter().flatten().zip(0u32..) {
        match raw_device(index, device, position) {
            Ok(device) => devices.push(device),
            Err(source) => problem = Some(SliceError::Device { device: device.name.clone(), source }),
        }
    }
    SliceRecord {
        version: slice.metadata.resource_version.as_deref().map(Into::into),
        generation: spec.pool.generation,
        slice_count: spec.pool.resource_slice_count,
        node: spec.node_name.as_deref().map(Into::into),
        sets: sets.into(),
        devices: devices.into(),
        problem,
        hand_over_until: slice
            .metadata
            .annotations
            .as_ref()
            .and_then(|all| second(all.get(aliquot_model::names::HAND_OVER_UNTIL)?)),
    }
}

/// A device that was read before. Devices of one name differ between nodes in little but UUIDs, so most
/// devices of a fleet are compared with a few templates instead of being read.
#[derive(Debug)]
pub(crate) struct Template {
    device: ApiDevice,
    raw: RawDevice,
    /// For each attribute, in the order of publication: the position of its value; `None` if its value is of
    /// an unknown type.
    places: Box<[Option<usize>]>,
}

/// The most templates for one device name.
const MOST_TEMPLATES: usize = 8;

impl Template {
    /// Returns true if the device differs from the template only in values of attributes.
    fn suits(&self, device: &ApiDevice) -> bool {
        let own = &self.device;
        let names = own.attributes.iter().flatten().map(|(name, _)| name);
        names.eq(device.attributes.iter().flatten().map(|(name, _)| name))
            && own.capacity == device.capacity
            && own.consumes_counters == device.consumes_counters
            && own.taints == device.taints
            && own.allow_multiple_allocations == device.allow_multiple_allocations
            && own.binding_conditions == device.binding_conditions
            && own.binding_failure_conditions == device.binding_failure_conditions
    }
}

fn raw_device(index: &mut Snapshot, device: &ApiDevice, position: u32) -> Result<RawDevice, QuantityError> {
    let name = index.names.intern(&device.name);
    if let Some(known) = like_before(index, name, device, position) {
        return Ok(known);
    }
    let raw = read_device(index, name, device, position)?;
    let published: Vec<Sym> =
        device.attributes.iter().flatten().map(|(attribute, _)| index.qualify(attribute)).collect();
    let names = &index.shapes.get(raw.shape).attributes;
    let places = published.iter().map(|name| names.binary_search(name).ok()).collect();
    let templates = index.templates.entry(name).or_default();
    if templates.len() < MOST_TEMPLATES {
        templates.push(Template { device: device.clone(), raw: raw.clone(), places });
    }
    Ok(raw)
}

/// Reads a device from a template: only the attribute values that differ are converted. `None` if no template
/// fits.
fn like_before(index: &mut Snapshot, name: Sym, device: &ApiDevice, position: u32) -> Option<RawDevice> {
    let Snapshot { templates, values: known_values, .. } = index;
    let template = templates.get(&name)?.iter().find(|template| template.suits(device))?;
    let mut values = template.raw.values.to_vec();
    let before = template.device.attributes.iter().flatten();
    let now = device.attributes.iter().flatten();
    for (((_, before), (_, now)), place) in before.zip(now).zip(&template.places) {
        if before == now {
            continue;
        }
        match (place, attribute_value(now)) {
            (Some(place), Some(value)) => *values.get_mut(*place)? = known_values.intern(value),
            (None, None) => {}
            // The value is of another type, so the shape is another one.
            _ => return None,
        }
    }
    Some(RawDevice { position, values: values.into(), ..template.raw.clone() })
}

fn read_device(
    index: &mut Snapshot,
    name: Sym,
    device: &ApiDevice,
    position: u32,
) -> Result<RawDevice, QuantityError> {
    let mut attributes = Vec::new();
    for (attribute, value) in device.attributes.iter().flatten() {
        let qualified = index.qualify(attribute);
        // A value of an unknown type cannot be selected or matched by the controller.
        if let Some(value) = attribute_value(value) {
            attributes.push((qualified, index.values.intern(value)));
        }
    }
    attributes.sort_unstable_by_key(|(name, _)| *name);
    let mut capacities = Vec::new();
    for (capacity_name, capacity) in device.capacity.iter().flatten() {
        let value = quantity(&capacity.value)?;
        let policy = capacity.request_policy.as_ref().map(policy).transpose()?;
        let published = index.names.intern(capacity_name);
        capacities.push((index.qualify(capacity_name), Capacity { value, policy }, published));
    }
    capacities.sort_unstable_by_key(|(name, _, _)| *name);
    let published_names = capacities.iter().map(|(_, _, published)| *published).collect();
    let (taints, owner) = taints(index, device.taints.as_deref().unwrap_or_default());
    let mut consumes = Vec::new();
    for consumption in device.consumes_counters.iter().flatten() {
        let set = index.names.intern(&consumption.counter_set);
        let amounts = counters(
            index,
            consumption.counters.iter().map(|(name, counter)| (name.as_str(), &counter.value)),
        )?;
        consumes.push((set, amounts));
    }
    let shape = Shape {
        attributes: attributes.iter().map(|(name, _)| *name).collect(),
        capacities: capacities.into_iter().map(|(name, capacity, _)| (name, capacity)).collect(),
        published_names,
        shareable: device.allow_multiple_allocations.unwrap_or(false),
        binding_conditions: device.binding_conditions.clone().unwrap_or_default(),
        binding_failure_conditions: device.binding_failure_conditions.clone().unwrap_or_default(),
    };
    Ok(RawDevice {
        name,
        position,
        shape: index.shapes.intern(shape),
        values: attributes.into_iter().map(|(_, value)| value).collect(),
        taints: index.taint_lists.intern(taints),
        owner,
        consumes: consumes.into(),
    })
}

fn counters<'a>(
    index: &mut Snapshot,
    counters: impl Iterator<Item = (&'a str, &'a ApiQuantity)>,
) -> Result<Amounts, QuantityError> {
    let mut read: BTreeMap<Sym, Quantity> = BTreeMap::new();
    for (name, value) in counters {
        read.insert(index.names.intern(name), quantity(value)?);
    }
    Ok(read.into_iter().collect())
}

pub(crate) fn quantity(quantity: &ApiQuantity) -> Result<Quantity, QuantityError> {
    quantity.0.parse()
}

fn policy(policy: &CapacityRequestPolicy) -> Result<Policy, QuantityError> {
    let range = policy
        .valid_range
        .as_ref()
        .map(|range| -> Result<Range, QuantityError> {
            Ok(Range {
                min: quantity(&range.min)?,
                max: range.max.as_ref().map(quantity).transpose()?,
                step: range.step.as_ref().map(quantity).transpose()?,
            })
        })
        .transpose()?;
    Ok(Policy {
        default: policy.default.as_ref().map(quantity).transpose()?,
        values: policy.valid_values.iter().flatten().map(quantity).collect::<Result<_, _>>()?,
        range,
    })
}

fn attribute_value(value: &DeviceAttribute) -> Option<AttributeValue> {
    match value {
        DeviceAttribute { int: Some(value), .. } => Some(AttributeValue::Int(*value)),
        DeviceAttribute { bool: Some(value), .. } => Some(AttributeValue::Bool(*value)),
        DeviceAttribute { string: Some(value), .. } => Some(AttributeValue::Text(value.as_str().into())),
        DeviceAttribute { version: Some(value), .. } => Some(AttributeValue::Version(value.as_str().into())),
        _ => None,
    }
}

/// Returns the taints without that of this driver, and the owner that this taint sets. A taint that does not
/// repel does not keep kube-scheduler off, so it does not make the controller the owner.
fn taints(index: &Snapshot, taints: &[DeviceTaint]) -> (Vec<Taint>, Owner) {
    let mut owner = Owner::Scheduler;
    let mut others = Vec::new();
    for taint in taints {
        let taint = Taint {
            key: taint.key.as_str().into(),
            value: taint.value.as_deref().unwrap_or("").into(),
            effect: taint.effect.as_str().into(),
        };
        if *taint.key != *index.controller_taint() {
            others.push(taint);
        } else if taint.repels() {
            // Any value but the empty one means that no scheduler allocates the device.
            owner = if taint.value.is_empty() { Owner::Controller } else { Owner::HandOver };
        }
    }
    others.sort();
    (others, owner)
}

impl Snapshot {
    /// Returns the symbol of a name with its domain. A name without a domain is in the driver's domain.
    pub(crate) fn qualify(&mut self, name: &str) -> Sym {
        if name.contains('/') {
            self.names.intern(name)
        } else {
            let qualified = format!("{}/{name}", self.driver());
            self.names.intern(&qualified)
        }
    }

    /// Returns the symbol of a name with its domain; `None` if the name is not known. A name without a domain
    /// is in the driver's domain.
    pub fn find_qualified(&self, name: &str) -> Option<Sym> {
        if name.contains('/') {
            self.names.find(name)
        } else {
            self.names.find(&format!("{}/{name}", self.driver()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{DRIVER, object, slices};
    use aliquot_model::layout::AllocatorMode;
    use rstest::rstest;
    use serde_json::{Value, json};

    /// What selectors see of all devices of a node, and what else is kept of them.
    fn seen(index: &Snapshot, node: &str) -> Vec<String> {
        let pool = index.pools_of_node(node).next().expect("a pool");
        let layout = pool.layout.as_ref().expect("complete");
        let describe = |(device, position): (&super::super::Device, u32)| {
            let facts = index.facts(layout, position).map(|facts| {
                // Symbols are others in another index, and with them the order.
                let attributes: BTreeMap<_, _> =
                    facts.attributes.into_iter().map(|(name, value)| (name, format!("{value:?}"))).collect();
                let capacities: BTreeMap<_, _> =
                    facts.capacities.into_iter().map(|(name, value)| (name, format!("{value:?}"))).collect();
                (attributes, capacities, facts.shareable)
            });
            let taints = index.taint_lists.get(device.taints);
            let draws: Vec<_> = index.draws(device).collect();
            format!("{} {facts:?} {taints:?} {:?} {draws:?}", index.name(device.name), device.owner)
        };
        layout.devices.iter().zip(0..).map(describe).collect()
    }

    fn with(change: &Value) -> Vec<ResourceSlice> {
        let slices = slices("n2", 1, AllocatorMode::Controller, 1);
        let changed = slices.into_iter().map(|slice| {
            let mut json = serde_json::to_value(slice).expect("JSON");
            for device in json["spec"]["devices"].as_array_mut().into_iter().flatten() {
                for (field, value) in change.as_object().into_iter().flatten() {
                    match value.as_object() {
                        Some(entries) => {
                            for (key, value) in entries {
                                if value.is_null() {
                                    device[field].as_object_mut().expect("a map").remove(key);
                                } else {
                                    device[field][key] = value.clone();
                                }
                            }
                        }
                        None => device[field] = value.clone(),
                    }
                }
            }
            object(json)
        });
        changed.collect()
    }

    #[rstest]
    #[case::the_same(json!({}))]
    #[case::another_value(json!({"attributes": {"productName": {"string": "another"}}}))]
    #[case::another_type(json!({"attributes": {"productName": {"int": 3}}}))]
    #[case::a_type_that_we_do_not_know(json!({"attributes": {"productName": {}}}))]
    #[case::one_attribute_less(json!({"attributes": {"productName": null}}))]
    #[case::one_attribute_more(json!({"attributes": {"colour": {"string": "green"}}}))]
    #[case::another_capacity(json!({"capacity": {"memory": {"value": "3Gi"}}}))]
    #[case::other_taints(json!({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}))]
    #[case::shared(json!({"allowMultipleAllocations": true}))]
    #[case::conditions(json!({"bindingConditions": ["ready"], "bindingFailureConditions": ["broken"]}))]
    fn a_device_is_read_alike_whatever_was_read_before(#[case] change: Value) {
        let (mut alone, mut after) = (Snapshot::new(DRIVER), Snapshot::new(DRIVER));
        for node in ["n0", "n1"] {
            slices(node, 1, AllocatorMode::Controller, 1).iter().for_each(|slice| {
                after.apply_slice(slice);
            });
        }
        for slice in &with(&change) {
            alone.apply_slice(slice);
            after.apply_slice(slice);
        }
        let (alone, after) = (seen(&alone, "n2"), seen(&after, "n2"));
        assert!(!alone.is_empty());
        assert_eq!(alone, after);
    }
}

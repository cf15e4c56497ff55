//! Attributes and capacities of a device. Their names are NVIDIA's where NVIDIA's driver has the fact. All
//! names are listed in [`super::vocabulary`], for code that checks requests.

use super::vocabulary::MEMORY_SLICE_CAPACITY;
use super::{Attribute, MAX_ATTRIBUTES_AND_CAPACITIES, Passthrough};
use crate::names::{ATTR_NUMA_NODE, ATTR_NVLINK_DOMAIN, ATTR_PCI_BUS_ID, ATTR_PCIE_ROOT};
use crate::{DeviceKind, DeviceName, GpuInfo, MigProfile, Quantity, version};
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;

/// A capacity, with the rule for consuming it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capacity {
    /// The total.
    pub value: Quantity,
    /// How much one claim may take; only on devices that several claims may hold.
    pub policy: Option<CapacityPolicy>,
}

/// The `requestPolicy` of a capacity (KEP-5075).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CapacityPolicy {
    /// Any value from `min` to `max` in steps of `step`.
    Range {
        /// The amount for a claim that requests none.
        default: Quantity,
        /// The least amount.
        min: Quantity,
        /// The most.
        max: Quantity,
        /// Requests are rounded up to `min` plus a multiple of this.
        step: Quantity,
    },
    /// One of these values.
    Values {
        /// The amount for a claim that requests none.
        default: Quantity,
        /// The values, ascending, with the default among them.
        values: Vec<Quantity>,
    },
}

/// Returns the memory of a GPU or partition for shares: rounded down to MiB, so that steps of 1Mi end on it.
fn shared_memory(bytes: u64) -> Quantity {
    Quantity::from_u64(bytes / MIB * MIB)
}

/// Returns the attributes with which [`super::publish`] publishes a device, for code that describes the same
/// device elsewhere. `passthrough` has the facts of the GPU as a PCI device, if the device is of that kind.
pub fn device_attributes(
    info: &GpuInfo,
    name: &DeviceName,
    passthrough: Option<&Passthrough>,
) -> BTreeMap<String, Attribute> {
    let profile = super::profile_of(info, name);
    // The number of tenants of a GPU is a capacity, not an attribute.
    of_device(info, name, profile, super::DEFAULT_SLOTS, passthrough).0
}

pub(super) fn of_device(
    info: &GpuInfo,
    name: &DeviceName,
    profile: Option<&MigProfile>,
    slots: u32,
    passthrough: Option<&Passthrough>,
) -> (BTreeMap<String, Attribute>, BTreeMap<String, Capacity>) {
    let kind = name.kind();
    let mut attributes = common(info, kind);
    let mut capacity = BTreeMap::new();
    let plain = |value: u64| Capacity { value: Quantity::from_u64(value), policy: None };
    match (kind, profile) {
        (DeviceKind::Mig, Some(profile)) => {
            attributes.insert("parentUUID".into(), Attribute::Text(info.uuid.to_string()));
            attributes.insert("profile".into(), Attribute::Text(profile.name.to_string()));
            partition_capacity(name, profile, &mut capacity);
        }
        (DeviceKind::MigShare, Some(profile)) => {
            attributes.insert("parentUUID".into(), Attribute::Text(info.uuid.to_string()));
            attributes.insert("profile".into(), Attribute::Text(profile.name.to_string()));
            shared_capacity(profile.memory_bytes, slots, &mut capacity);
        }
        (DeviceKind::Gpu | DeviceKind::Mps | DeviceKind::Mig | DeviceKind::Admin | DeviceKind::Vfio, _) => {
            capacity.insert("memory".into(), plain(info.memory_bytes));
            if info.multiprocessors > 0 {
                capacity.insert("multiprocessors".into(), plain(info.multiprocessors.into()));
            }
        }
        (DeviceKind::MigShare | DeviceKind::Share | DeviceKind::TimeSlice, _) => {
            shared_capacity(info.memory_bytes, slots, &mut capacity);
        }
    }
    if name.partition().is_none() {
        attributes.insert("uuid".into(), Attribute::Text(info.uuid.to_string()));
        // Partitions cannot use NVLink.
        if let Some(domain) = &info.nvlink_domain {
            attributes
                .insert(ATTR_NVLINK_DOMAIN.to_owned(), Attribute::Text(truncate(domain, 64).to_owned()));
        }
    }
    if let Some(passthrough) = passthrough.filter(|_| kind == DeviceKind::Vfio) {
        passthrough.tell(&mut attributes, &mut capacity);
    }
    drop_surplus(&mut attributes, &mut capacity);
    (attributes, capacity)
}

fn common(info: &GpuInfo, kind: DeviceKind) -> BTreeMap<String, Attribute> {
    let text = |value: &str| Attribute::Text(truncate(value, 64).to_owned());
    let (major, minor) = info.compute_capability;
    let (cuda_major, cuda_minor) = info.cuda_driver_version;
    let mut attributes = BTreeMap::from([
        ("type".to_owned(), text(kind.as_str())),
        ("productName".to_owned(), text(&info.product_name)),
        ("brand".to_owned(), text(&info.brand)),
        ("architecture".to_owned(), text(info.architecture.as_str())),
        ("cudaComputeCapability".to_owned(), Attribute::Version(format!("{major}.{minor}.0"))),
        ("cudaDriverVersion".to_owned(), Attribute::Version(format!("{cuda_major}.{cuda_minor}.0"))),
        ("minor".to_owned(), Attribute::Int(info.minor.into())),
        ("index".to_owned(), Attribute::Int(info.index.into())),
    ]);
    if let Some(version) = version::normalise(&info.driver_version) {
        attributes.insert("driverVersion".to_owned(), Attribute::Version(version.to_string()));
    }
    if let Some(id) = &info.pci_bus_id {
        attributes.insert(ATTR_PCI_BUS_ID.to_owned(), text(id));
    }
    if let Some(root) = &info.pcie_root {
        attributes.insert(ATTR_PCIE_ROOT.to_owned(), text(root));
    }
    if let Some(node) = info.numa_node {
        attributes.insert(ATTR_NUMA_NODE.to_owned(), Attribute::Int(node.into()));
    }
    attributes
}

fn partition_capacity(name: &DeviceName, profile: &MigProfile, capacity: &mut BTreeMap<String, Capacity>) {
    let mut insert = |name: String, value: u64| {
        capacity.insert(name, Capacity { value: Quantity::from_u64(value), policy: None });
    };
    insert("memory".into(), profile.memory_bytes);
    insert("multiprocessors".into(), profile.multiprocessors.into());
    insert("copyEngines".into(), profile.engines.copy.into());
    insert("decoders".into(), profile.engines.decoders.into());
    insert("encoders".into(), profile.engines.encoders.into());
    insert("jpegEngines".into(), profile.engines.jpeg.into());
    insert("ofaEngines".into(), profile.engines.ofa.into());
    if let DeviceName::Mig { start, .. } = name
        && let Some(placement) = profile.placements.iter().find(|p| p.start == *start)
    {
        for slice in placement.slices() {
            insert(format!("{MEMORY_SLICE_CAPACITY}{slice}"), 1);
        }
    }
}

/// Inserts the capacities of a shared device. Each needs a policy with a default, or the first share takes
/// all of it (KEP-5075).
fn shared_capacity(memory_bytes: u64, slots: u32, capacity: &mut BTreeMap<String, Capacity>) {
    let memory = shared_memory(memory_bytes);
    let range = |default, min, max, step| CapacityPolicy::Range { default, min, max, step };
    let mebibyte = Quantity::from_u64(MIB);
    capacity.insert(
        "memory".into(),
        Capacity { value: memory, policy: Some(range(memory, mebibyte, memory, mebibyte)) },
    );
    let percent = Quantity::from_u64(100);
    let one = Quantity::from_u64(1);
    capacity.insert(
        "cores".into(),
        Capacity { value: percent, policy: Some(range(Quantity::ZERO, Quantity::ZERO, percent, one)) },
    );
    // The only valid value: with a range from 0 a tenant could request no slot.
    let policy = CapacityPolicy::Values { default: one, values: vec![one] };
    capacity.insert(
        "slots".into(),
        Capacity { value: Quantity::from_u64(u64::from(slots).max(1)), policy: Some(policy) },
    );
}

/// Removes facts if a board has more than the API allows, in this order: memory slices, then index, minor and
/// brand. All others stay.
fn drop_surplus(attributes: &mut BTreeMap<String, Attribute>, capacity: &mut BTreeMap<String, Capacity>) {
    let slices: Vec<String> =
        capacity.keys().filter(|k| k.starts_with(MEMORY_SLICE_CAPACITY)).cloned().collect();
    for name in slices.into_iter().rev() {
        if attributes.len() + capacity.len() <= MAX_ATTRIBUTES_AND_CAPACITIES {
            return;
        }
        capacity.remove(&name);
    }
    for name in ["index", "minor", "brand"] {
        if attributes.len() + capacity.len() <= MAX_ATTRIBUTES_AND_CAPACITIES {
            return;
        }
        attributes.remove(name);
    }
}

/// Returns the longest prefix of at most `max` bytes that ends at a character boundary.
fn truncate(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.get(..end).unwrap_or_default()
}

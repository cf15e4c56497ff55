//! Under which names devices have attributes and capacities: what claims can select by and ask for.

use crate::DeviceKind;
use crate::names::{ATTR_NUMA_NODE, ATTR_NVLINK_DOMAIN, ATTR_PCI_BUS_ID, ATTR_PCIE_ROOT};

/// A partition has one capacity of this name and a number for each of its memory slices.
pub(super) const MEMORY_SLICE_CAPACITY: &str = "memorySlice";

const COMMON: [&str; 12] = [
    "architecture",
    "brand",
    "cudaComputeCapability",
    "cudaDriverVersion",
    "driverVersion",
    "index",
    "minor",
    "productName",
    "type",
    ATTR_NUMA_NODE,
    ATTR_PCIE_ROOT,
    ATTR_PCI_BUS_ID,
];

/// Attributes that a device of the kind can have; a name without a domain is in the driver's.
pub fn attribute_names(kind: DeviceKind) -> impl Iterator<Item = &'static str> {
    let own: &[&str] = match kind {
        DeviceKind::Mig | DeviceKind::MigShare => &["parentUUID", "profile"],
        DeviceKind::Vfio => &["uuid", ATTR_NVLINK_DOMAIN, "deviceID", "vendorID", "iommuFDEnabled"],
        _ => &["uuid", ATTR_NVLINK_DOMAIN],
    };
    COMMON.into_iter().chain(own.iter().copied())
}

/// Capacities that a device of the kind can have, in the driver's domain, without those of memory slices.
pub const fn capacity_names(kind: DeviceKind) -> &'static [&'static str] {
    match kind {
        DeviceKind::Gpu | DeviceKind::Mps | DeviceKind::Admin => &["memory", "multiprocessors"],
        DeviceKind::Vfio => &["addressableMemory", "memory", "multiprocessors"],
        DeviceKind::Mig => {
            &["copyEngines", "decoders", "encoders", "jpegEngines", "memory", "multiprocessors", "ofaEngines"]
        }
        DeviceKind::MigShare | DeviceKind::Share | DeviceKind::TimeSlice => &["cores", "memory", "slots"],
    }
}

/// Whether a device of the kind can have a capacity of this name in the driver's domain.
pub fn has_capacity(kind: DeviceKind, name: &str) -> bool {
    let slice =
        |name: &str| name.strip_prefix(MEMORY_SLICE_CAPACITY).is_some_and(|n| n.parse::<u8>().is_ok());
    capacity_names(kind).contains(&name) || kind == DeviceKind::Mig && slice(name)
}

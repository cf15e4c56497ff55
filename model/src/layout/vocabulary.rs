//! The names of attributes and capacities of devices, by which claims can select and request. A name without
//! a domain is in the driver's domain.

use crate::DeviceKind;
use crate::names::{ATTR_NUMA_NODE, ATTR_NVLINK_DOMAIN, ATTR_PCI_BUS_ID, ATTR_PCIE_ROOT};

/// The prefix of the capacities that a partition has for its memory slices, one for each slice, followed by
/// the slice's number.
pub(super) const MEMORY_SLICE_CAPACITY: &str = "memorySlice";
/// These capacities as one fact.
pub const MEMORY_SLICES: Fact =
    amount("memorySlice<number>", "1 for each memory slice that the partition takes.");

/// The type of a fact's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactType {
    /// Text.
    Text,
    /// A whole number.
    Int,
    /// A semantic version.
    Version,
    /// True or false.
    Bool,
    /// A capacity: a Kubernetes quantity.
    Quantity,
}

/// A fact of devices: an attribute or a capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fact {
    /// The name.
    pub name: &'static str,
    /// The type of the value.
    pub form: FactType,
    /// The meaning, for the reference documentation.
    pub about: &'static str,
}

const fn text(name: &'static str, about: &'static str) -> Fact {
    Fact { name, form: FactType::Text, about }
}

const fn int(name: &'static str, about: &'static str) -> Fact {
    Fact { name, form: FactType::Int, about }
}

const fn version(name: &'static str, about: &'static str) -> Fact {
    Fact { name, form: FactType::Version, about }
}

const fn amount(name: &'static str, about: &'static str) -> Fact {
    Fact { name, form: FactType::Quantity, about }
}

const COMMON: [Fact; 12] = [
    text("architecture", "GPU architecture, such as `Hopper`."),
    text("brand", "NVIDIA's brand, such as `Nvidia`."),
    version("cudaComputeCapability", "CUDA compute capability, such as `9.0.0`."),
    version("cudaDriverVersion", "CUDA version that the driver supports, such as `13.0.0`."),
    version("driverVersion", "Version of NVIDIA's driver on the node."),
    int("index", "Number of the GPU in NVML, which can change with a reboot."),
    int(
        "minor",
        "Minor number of the GPU's device node `/dev/nvidia<minor>`, which device names are made of.",
    ),
    text("productName", "Name of the board, such as `NVIDIA H100 80GB HBM3`."),
    text("type", "Kind of device: DeviceClasses select by it."),
    int(ATTR_NUMA_NODE, "NUMA node that the GPU is attached to (KEP-6072)."),
    text(
        ATTR_PCIE_ROOT,
        "PCIe root complex, such as `pci0000:00`: devices with the same one are near each other.",
    ),
    text(ATTR_PCI_BUS_ID, "PCI address of the GPU, `dddd:bb:dd.f`."),
];

const WHOLE: [Fact; 2] = [
    text("uuid", "UUID of the GPU, `GPU-…`."),
    text(ATTR_NVLINK_DOMAIN, "GPUs with the same value reach each other over NVLink."),
];

const PARTITION: [Fact; 2] = [
    text("parentUUID", "UUID of the GPU that the partition is of, `GPU-…`."),
    text("profile", "MIG profile, such as `1g.10gb`."),
];

const PASSED: [Fact; 3] = [
    text("deviceID", "PCI device, such as `0x2330`."),
    text("vendorID", "PCI vendor, `0x10de`."),
    Fact {
        name: "iommuFDEnabled",
        form: FactType::Bool,
        about: "Whether the kernel offers IOMMUFD beside the older interface.",
    },
];

const MEMORY: Fact = amount("memory", "Bytes of memory.");
const MULTIPROCESSORS: Fact = amount("multiprocessors", "Streaming multiprocessors.");
const ADDRESSABLE: Fact =
    amount("addressableMemory", "Bytes that the device's memory regions (BARs) address.");

const ENGINES: [Fact; 5] = [
    amount("copyEngines", "Copy engines."),
    amount("decoders", "Video decoders."),
    amount("encoders", "Video encoders."),
    amount("jpegEngines", "JPEG decoders."),
    amount("ofaEngines", "Optical flow accelerators."),
];

const SHARED: [Fact; 3] = [
    amount("cores", "Percent of compute, 100 in all: a claim gets 0 (best effort) unless it asks."),
    amount("memory", "Bytes of memory: a claim gets all of it unless it asks, in steps of 1Mi."),
    amount("slots", "Claims that may share the device at a time; each takes one."),
];

/// Returns the attributes that a device of the kind can have.
pub fn attributes(kind: DeviceKind) -> impl Iterator<Item = &'static Fact> {
    let own: [&[Fact]; 2] = match kind {
        DeviceKind::Mig | DeviceKind::MigShare => [&PARTITION, &[]],
        DeviceKind::Vfio => [&WHOLE, &PASSED],
        _ => [&WHOLE, &[]],
    };
    COMMON.iter().chain(own.into_iter().flatten())
}

/// Returns the capacities that a device of the kind can have, except those of memory slices.
pub fn capacities(kind: DeviceKind) -> impl Iterator<Item = &'static Fact> {
    let own: [&[Fact]; 2] = match kind {
        DeviceKind::Gpu | DeviceKind::Mps | DeviceKind::Admin => [&[MEMORY, MULTIPROCESSORS], &[]],
        DeviceKind::Vfio => [&[ADDRESSABLE, MEMORY, MULTIPROCESSORS], &[]],
        DeviceKind::Mig => [&[MEMORY, MULTIPROCESSORS], &ENGINES],
        DeviceKind::MigShare | DeviceKind::Share | DeviceKind::TimeSlice => [&SHARED, &[]],
    };
    own.into_iter().flatten()
}

/// Returns the names of [`attributes`].
pub fn attribute_names(kind: DeviceKind) -> impl Iterator<Item = &'static str> {
    attributes(kind).map(|fact| fact.name)
}

/// Returns the names of [`capacities`].
pub fn capacity_names(kind: DeviceKind) -> impl Iterator<Item = &'static str> {
    capacities(kind).map(|fact| fact.name)
}

/// Returns true if a device of the kind can have a capacity of this name in the driver's domain.
pub fn has_capacity(kind: DeviceKind, name: &str) -> bool {
    let slice =
        |name: &str| name.strip_prefix(MEMORY_SLICE_CAPACITY).is_some_and(|n| n.parse::<u8>().is_ok());
    capacity_names(kind).any(|known| known == name) || kind == DeviceKind::Mig && slice(name)
}

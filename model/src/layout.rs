//! The layout of what a node publishes for its GPUs: counter sets, devices, and how they are split over
//! slices.
//!
//! [`publish`] is a pure function of the node's facts and the server's features, so node agent, simulator and
//! benchmarks publish exactly the same devices. Sources: KEP-4815 (partitionable devices), KEP-5075
//! (consumable capacity), KEP-5055 (taints).

mod attributes;
mod counters;
mod passthrough;
mod slices;
mod vocabulary;

pub use attributes::{Capacity, CapacityPolicy, device_attributes};
pub use counters::MEMORY_SLICE;
pub use passthrough::Passthrough;
pub use vocabulary::{
    Fact, FactType, MEMORY_SLICES, attribute_names, attributes, capacities, capacity_names, has_capacity,
};

use crate::{DeviceKind, DeviceName, GpuInfo, GpuUuid, LiveMig, MigCapability, MigProfile, Placement};
use std::collections::{BTreeMap, BTreeSet};

/// The most attributes and capacities of a device together (resource.k8s.io validation).
pub const MAX_ATTRIBUTES_AND_CAPACITIES: usize = 32;
/// The most devices of a slice in which any device has taints or consumes counters.
pub const MAX_DEVICES_PER_SLICE: usize = 64;
/// The most counter sets of a slice.
pub const MAX_COUNTER_SETS_PER_SLICE: usize = 8;
/// The most taints of a device on Kubernetes 1.35 and newer.
pub const MAX_TAINTS: usize = 16;
/// The most taints of a device before Kubernetes 1.35.
pub const MAX_TAINTS_BEFORE_1_35: usize = 4;
/// The default number of tenants of a shared GPU.
pub const DEFAULT_SLOTS: u32 = 10;

/// Features of the API server, found by discovery and by comparing what was stored with what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerFeatures {
    /// True if counter sets go into slices of their own (Kubernetes 1.35 and newer). In older versions they
    /// must be in the slice of the devices that consume them.
    pub separate_counter_slices: bool,
    /// True if counters are kept (DRAPartitionableDevices).
    pub counters: bool,
    /// True if `allowMultipleAllocations` and request policies are kept (DRAConsumableCapacity).
    pub consumable_capacity: bool,
    /// True if taints are kept (DRADeviceTaints).
    pub taints: bool,
    /// True if a taint may be informational (effect None) and a device may have [`MAX_TAINTS`] taints
    /// (Kubernetes 1.35 and newer).
    pub informational_taints: bool,
}

impl ServerFeatures {
    /// Returns a server of this minor version with all features enabled that the version has.
    pub const fn all_of_minor(minor: u32) -> Self {
        Self {
            separate_counter_slices: minor >= 35,
            counters: true,
            consumable_capacity: true,
            taints: true,
            informational_taints: minor >= 35,
        }
    }
}

/// The allocator of a pool's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AllocatorMode {
    /// The controller of this driver; devices carry its taint.
    Controller,
    /// Nobody, because a switch between the other two is under way.
    HandOver,
    /// kube-scheduler; devices do not carry the taint.
    Scheduler,
}

/// What the node agent decides to publish, beside the facts of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Driver name, for the keys of taints.
    pub driver: String,
    /// The allocator of the devices.
    pub mode: AllocatorMode,
    /// The most tenants of a shared GPU, and of a shared partition.
    pub slots: u32,
    /// Minor numbers of the GPUs that are offered through MPS, if they support it.
    pub mps: BTreeSet<u32>,
    /// True if partitions are also offered in shares, which nearly doubles the devices of a GPU.
    pub mig_shares: bool,
    /// GPUs that are also offered to virtual machines; the others have no such device.
    pub passthrough: BTreeMap<GpuUuid, Passthrough>,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attribute {
    /// A string of at most 64 bytes.
    Text(String),
    /// An integer.
    Int(i64),
    /// A boolean.
    Bool(bool),
    /// A strict semver.
    Version(String),
}

/// The effect of a taint on claims that do not tolerate it (KEP-5055), from mild to severe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaintEffect {
    /// No effect; the taint informs.
    None,
    /// The device is not allocated.
    NoSchedule,
    /// The device is not allocated, and pods that use it are evicted.
    NoExecute,
}

impl TaintEffect {
    /// Returns the effect as the API writes it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }

    /// Reads an effect as the API writes it; `None` for a word that is no effect.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::None, Self::NoSchedule, Self::NoExecute].into_iter().find(|effect| effect.as_str() == text)
    }
}

/// A taint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// Qualified key.
    pub key: String,
    /// Value; may be empty.
    pub value: String,
    /// Effect.
    pub effect: TaintEffect,
}

/// A device as it is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name of the device.
    pub name: DeviceName,
    /// Attributes by name; names without a domain are in the driver's domain.
    pub attributes: BTreeMap<String, Attribute>,
    /// Capacities by name.
    pub capacity: BTreeMap<String, Capacity>,
    /// Counters that the device consumes of its GPU's counter set; `None` if it consumes none.
    pub consumes: Option<BTreeMap<String, u64>>,
    /// Taints of the device.
    pub taints: Vec<Taint>,
    /// True if several claims may hold the device at once.
    pub allow_multiple_allocations: bool,
}

impl Device {
    /// Returns the kind of the device.
    pub const fn kind(&self) -> DeviceKind {
        self.name.kind()
    }
}

/// The counters of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterSet {
    /// Name, `gpu-<minor>`.
    pub name: String,
    /// Totals by counter.
    pub counters: BTreeMap<String, u64>,
}

/// A ResourceSlice, without what only the publisher knows (object name, generation).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slice {
    /// Counter sets; from Kubernetes 1.35 on, empty if there are devices.
    pub counter_sets: Vec<CounterSet>,
    /// Devices, in the order in which a first-fit allocator should try them.
    pub devices: Vec<Device>,
}

/// A GPU that could be read, with its existing partitions, and the parts that are held for a claim that is
/// gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuState {
    /// The facts of the GPU.
    pub info: GpuInfo,
    /// The existing partitions.
    pub live: Vec<LiveMig>,
    /// Hardware that is held without a claim; overlapping devices get the `held` taint.
    pub held: Vec<Holding>,
    /// Partitions that exist without a claim and are allocated as they are. Of the devices that overlap such
    /// a partition, all but the partition itself get the `held` taint.
    pub standing: Vec<LiveMig>,
    /// Taints of the GPU as a whole, for example for its health. Every device gets them except the one for
    /// administration.
    pub taints: Vec<Taint>,
}

/// A part of a GPU that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holding {
    /// The whole GPU, exclusively.
    Whole,
    /// A partition.
    Partition(Placement),
    /// A partition, together with others that have shares of the same partition.
    SharedPartition {
        /// The profile's id from `nvidia-smi mig -lgip`; several profiles may have the same placement.
        profile_id: u32,
        /// Placement of the partition.
        placement: Placement,
    },
    /// The whole GPU, together with others of the same kind.
    Shared(DeviceKind),
}

impl Holding {
    /// Returns true if two holdings on one GPU exclude each other.
    pub fn conflicts(self, other: Self) -> bool {
        match (self, other) {
            (Self::Shared(a), Self::Shared(b)) => a != b,
            (Self::SharedPartition { .. }, Self::SharedPartition { .. }) if self == other => false,
            _ => match (self.placement(), other.placement()) {
                (Some(a), Some(b)) => a.overlaps(b),
                _ => true,
            },
        }
    }

    /// Returns the placement of the partition; `None` for a holding of the whole GPU.
    pub const fn placement(self) -> Option<Placement> {
        match self {
            Self::Partition(placement) | Self::SharedPartition { placement, .. } => Some(placement),
            Self::Whole | Self::Shared(_) => None,
        }
    }

    /// Returns what a device of this name would hold; `None` for admin devices, which hold nothing.
    pub fn of(name: &DeviceName, info: &GpuInfo) -> Option<Self> {
        let placement = |profile_id: u32, start: u32| {
            info.profile(profile_id)?.placements.iter().find(|p| p.start == start).copied()
        };
        match name {
            DeviceName::Mig { profile_id, start, .. } => {
                Some(Self::Partition(placement(*profile_id, *start)?))
            }
            DeviceName::MigShare { profile_id, start, .. } => {
                let placement = placement(*profile_id, *start)?;
                Some(Self::SharedPartition { profile_id: *profile_id, placement })
            }
            DeviceName::Plain { kind: DeviceKind::Admin, .. } => None,
            DeviceName::Plain { kind: DeviceKind::Gpu | DeviceKind::Mps | DeviceKind::Vfio, .. } => {
                Some(Self::Whole)
            }
            DeviceName::Plain { kind, .. } => Some(Self::Shared(*kind)),
        }
    }
}

/// Returns the node's slices, in the order in which their names must sort. There is at least one slice,
/// possibly empty, so that the pool is visible.
pub fn publish(gpus: &[GpuState], server: ServerFeatures, options: &Options) -> Vec<Slice> {
    let published = gpus
        .iter()
        .map(|gpu| slices::PublishedGpu {
            counters: server.counters.then(|| counters::of_gpu(&gpu.info)),
            devices: devices(gpu, server, options),
        })
        .collect();
    slices::split(published, server)
}

/// Returns the devices of one GPU, smallest first and the whole GPU last. A request that any device satisfies
/// takes the GPU from its driver (for a virtual machine) only after all other devices.
fn devices(gpu: &GpuState, server: ServerFeatures, options: &Options) -> Vec<Device> {
    let names =
        if server.counters { names_with_counters(&gpu.info, options) } else { names_without_counters(gpu) };
    names
        .into_iter()
        .filter(|name| server.consumable_capacity || !name.kind().shareable())
        .filter(|name| name.kind() != DeviceKind::Mps || offers_mps(&gpu.info, options))
        .map(|name| device(gpu, name, server, options))
        .collect()
}

/// Returns true if the GPU can run processes of one claim side by side through MPS with limits for each of
/// them: Volta and newer. On older GPUs, one client could read and write the memory of another.
pub fn can_serve_mps(info: &GpuInfo) -> bool {
    info.compute_capability >= (7, 0)
}

fn offers_mps(info: &GpuInfo, options: &Options) -> bool {
    options.mps.contains(&info.minor) && can_serve_mps(info)
}

/// Returns the names of all devices of a GPU; counters make them exclude each other.
fn names_with_counters(info: &GpuInfo, options: &Options) -> Vec<DeviceName> {
    let (partitions, others) = match &info.mig {
        MigCapability::Unsupported => (false, true),
        // A change of mode needs a reset, so the layout follows the mode in force.
        MigCapability::Supported { enabled, needs_reset: true, .. } => (*enabled, !*enabled),
        MigCapability::Supported { needs_reset: false, .. } => (true, true),
    };
    let minor = info.minor;
    let plain = |kind| DeviceName::Plain { minor, kind };
    let mut names = Vec::new();
    if partitions {
        names.extend(partition_order(info).map(|(p, at)| DeviceName::mig(minor, &p.name, p.id, at)));
        // Engines are not divided, so a profile that differs only in engines has no shares of its own. With
        // shares of all profiles, some boards would have more devices than a slice holds.
        let shared = partition_order(info).filter(|(p, _)| options.mig_shares && p.name.is_plain());
        names.extend(shared.map(|(p, at)| DeviceName::mig_share(minor, &p.name, p.id, at)));
    }
    if others {
        names.extend([DeviceKind::Share, DeviceKind::TimeSlice, DeviceKind::Mps].map(plain));
    }
    names.push(plain(DeviceKind::Admin));
    if others {
        names.push(DeviceName::gpu(minor));
        let passed = options.passthrough.contains_key(&info.uuid);
        names.extend(passed.then(|| plain(DeviceKind::Vfio)));
    }
    names
}

/// Returns the names of the devices that a GPU has now: its existing partitions in MIG mode, otherwise the
/// whole GPU. Without counters, nothing makes overlapping devices exclude each other.
fn names_without_counters(gpu: &GpuState) -> Vec<DeviceName> {
    let minor = gpu.info.minor;
    if !gpu.info.mig_enabled() {
        return vec![DeviceName::gpu(minor)];
    }
    gpu.live
        .iter()
        .filter(|live| live.uuid.is_some())
        .filter_map(|live| {
            let profile = gpu.info.profile(live.profile_id)?;
            Some(DeviceName::mig(minor, &profile.name, profile.id, live.placement))
        })
        .collect()
}

/// Returns the partitions in the order in which first fit should try them: small before large, and within one
/// profile the highest start first. The low starts are the only placements of the large profiles on 7-slice
/// boards (4g at 0, and 3g at 0 if there is no 4g), so small partitions begin at the top.
fn partition_order(info: &GpuInfo) -> impl Iterator<Item = (&MigProfile, Placement)> {
    let mut order: Vec<_> =
        info.profiles().iter().flat_map(|p| p.placements.iter().map(move |at| (p, *at))).collect();
    // Profiles with special engines (+me, +gfx) come after the plain profiles of their size: first fit must
    // not give the only media engine to a claim that did not request it.
    order.sort_by_key(|(p, at)| {
        (at.size, p.compute_slices, p.name.as_str().contains('+'), p.id, std::cmp::Reverse(at.start))
    });
    order.into_iter()
}

/// Returns the profile of a partition.
fn profile_of<'a>(info: &'a GpuInfo, name: &DeviceName) -> Option<&'a MigProfile> {
    info.profile(name.partition()?.profile_id)
}

fn device(gpu: &GpuState, name: DeviceName, server: ServerFeatures, options: &Options) -> Device {
    let kind = name.kind();
    let profile = profile_of(&gpu.info, &name);
    let (attributes, capacity) = attributes::of_device(
        &gpu.info,
        &name,
        profile,
        options.slots,
        options.passthrough.get(&gpu.info.uuid),
    );
    let holding = Holding::of(&name, &gpu.info);
    Device {
        consumes: match (holding, server.counters) {
            (Some(holding), true) => Some(counters::consumed(&gpu.info, profile, holding)),
            _ => None,
        },
        taints: if server.taints { taints(gpu, &name, holding, server, options) } else { Vec::new() },
        allow_multiple_allocations: kind.shareable() && server.consumable_capacity,
        name,
        attributes,
        capacity,
    }
}

fn taints(
    gpu: &GpuState,
    name: &DeviceName,
    holding: Option<Holding>,
    server: ServerFeatures,
    options: &Options,
) -> Vec<Taint> {
    let effect = TaintEffect::NoSchedule;
    let mut taints = Vec::new();
    let value = match options.mode {
        AllocatorMode::Controller => Some(String::new()),
        AllocatorMode::HandOver => Some(crate::names::HAND_OVER.to_owned()),
        AllocatorMode::Scheduler => None,
    };
    if let Some(value) = value {
        taints.push(Taint { key: crate::names::controller_taint(&options.driver), value, effect });
    }
    // A held share closes its device even to other shares, because nobody knows how much it still uses.
    let held = |h: &Holding| holding.is_some_and(|mine| mine.conflicts(*h) || mine == *h);
    let in_the_way = |mig: &LiveMig| {
        holding.is_some_and(|mine| mine.conflicts(Holding::Partition(mig.placement))) && !name.is_of(mig)
    };
    if gpu.held.iter().any(held) || gpu.standing.iter().any(in_the_way) {
        let key = crate::names::held_taint(&options.driver);
        taints.push(Taint { key, value: String::new(), effect });
    }
    // The device for administration holds nothing and is always available, to look at faulty GPUs.
    if holding.is_some() {
        let least = if server.informational_taints { TaintEffect::None } else { TaintEffect::NoSchedule };
        let most = if server.informational_taints { MAX_TAINTS } else { MAX_TAINTS_BEFORE_1_35 };
        let mut of_gpu: Vec<&Taint> = gpu.taints.iter().filter(|taint| taint.effect >= least).collect();
        of_gpu.sort_by(|a, b| b.effect.cmp(&a.effect).then_with(|| a.key.cmp(&b.key)));
        // One taint that no claim may tolerate is enough, and it comes before all taints that claims may
        // tolerate.
        let is_reserved = |taint: &&Taint| crate::names::is_reserved_taint(&options.driver, &taint.key);
        let first = of_gpu.iter().position(is_reserved).map(|at| of_gpu.remove(at));
        let room = most.saturating_sub(taints.len());
        taints.extend(first.into_iter().chain(of_gpu).take(room).cloned());
    }
    taints
}

#[cfg(test)]
#[path = "layout/tests.rs"]
mod tests;

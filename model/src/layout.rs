//! What a node publishes for its GPUs: counter sets, devices and how they are split over slices.
//!
//! [`publish`] is a pure function of the node's facts and the server's features, so node agent,
//! simulator and benchmarks offer exactly the same devices. Sources: KEP-4815 (partitionable
//! devices), KEP-5075 (consumable capacity), KEP-5055 (taints).

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

/// Most attributes and capacities of a device together (resource.k8s.io validation).
pub const MAX_ATTRIBUTES_AND_CAPACITIES: usize = 32;
/// Most devices of a slice in which any device has taints or consumes counters.
pub const MAX_DEVICES_PER_SLICE: usize = 64;
/// Most counter sets of a slice.
pub const MAX_COUNTER_SETS_PER_SLICE: usize = 8;
/// Most taints of a device on Kubernetes 1.35 and newer.
pub const MAX_TAINTS: usize = 16;
/// Most taints of a device before.
pub const MAX_TAINTS_BEFORE_1_35: usize = 4;
/// Tenants of a shared GPU unless configured otherwise.
pub const DEFAULT_SLOTS: u32 = 10;

/// What the API server can store, found by discovery and by comparing what came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerFeatures {
    /// Whether counter sets go into slices of their own (Kubernetes 1.35 and newer); before, they
    /// must lie in the slice of the devices that consume them.
    pub separate_counter_slices: bool,
    /// DRAPartitionableDevices: counters are kept.
    pub counters: bool,
    /// DRAConsumableCapacity: `allowMultipleAllocations` and request policies are kept.
    pub consumable_capacity: bool,
    /// DRADeviceTaints: taints are kept.
    pub taints: bool,
    /// Whether a taint may be informational (effect None) and a device may have [`MAX_TAINTS`] of them
    /// (Kubernetes 1.35 and newer).
    pub informational_taints: bool,
}

impl ServerFeatures {
    /// A server of this minor version with every feature that it has switched on.
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

/// Who may give out the devices of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AllocatorMode {
    /// Our controller: devices carry its taint.
    Controller,
    /// Nobody: a switch between the two others is under way.
    HandOver,
    /// kube-scheduler: no taint.
    Scheduler,
}

/// What the node's agent decides to publish beside the facts of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Driver name, for taint keys.
    pub driver: String,
    /// Who allocates.
    pub mode: AllocatorMode,
    /// Most tenants of a shared GPU, and of a shared partition.
    pub slots: u32,
    /// Minor numbers of the GPUs that are offered through MPS, as far as they can be.
    pub mps: BTreeSet<u32>,
    /// Whether partitions are given out in shares too. Nearly doubles the devices of a GPU.
    pub mig_shares: bool,
    /// GPUs that are also offered to virtual machines; the others have no such device.
    pub passthrough: BTreeMap<GpuUuid, Passthrough>,
}

/// An attribute's value.
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

/// What a taint does to claims that do not tolerate it (KEP-5055), from mild to severe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaintEffect {
    /// Nothing: it informs.
    None,
    /// The device is not allocated.
    NoSchedule,
    /// The same, and pods that use the device are evicted.
    NoExecute,
}

impl TaintEffect {
    /// As the API has it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }

    /// From what the API has; `None` for a word that is no effect.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::None, Self::NoSchedule, Self::NoExecute].into_iter().find(|effect| effect.as_str() == text)
    }
}

/// A taint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// Qualified key.
    pub key: String,
    /// Value, may be empty.
    pub value: String,
    /// What it does.
    pub effect: TaintEffect,
}

/// A device as published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name.
    pub name: DeviceName,
    /// Attributes by name; names without a domain belong to the driver's.
    pub attributes: BTreeMap<String, Attribute>,
    /// Capacities by name.
    pub capacity: BTreeMap<String, Capacity>,
    /// Counters that it takes of its GPU's counter set; `None` consumes nothing.
    pub consumes: Option<BTreeMap<String, u64>>,
    /// Taints.
    pub taints: Vec<Taint>,
    /// Whether several claims may hold it at once.
    pub allow_multiple_allocations: bool,
}

impl Device {
    /// What it is.
    pub const fn kind(&self) -> DeviceKind {
        self.name.kind()
    }
}

/// The counters of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterSet {
    /// Name, `gpu-<minor>`.
    pub name: String,
    /// Totals.
    pub counters: BTreeMap<String, u64>,
}

/// One ResourceSlice, without what only the publisher knows (object name, generation).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slice {
    /// Counter sets; empty from 1.35 on if there are devices.
    pub counter_sets: Vec<CounterSet>,
    /// Devices, in the order in which a first-fit allocator should try them.
    pub devices: Vec<Device>,
}

/// A GPU that could be read, with the partitions that exist on it now and which of its parts are
/// held by a claim that is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuState {
    /// Facts.
    pub info: GpuInfo,
    /// Partitions that exist.
    pub live: Vec<LiveMig>,
    /// Hardware held without a claim; overlapping devices get the `held` taint.
    pub held: Vec<Holding>,
    /// Partitions that exist without a claim and are given out as they are: of the devices that overlap one, all but
    /// the partition itself get the `held` taint.
    pub standing: Vec<LiveMig>,
    /// Taints of the GPU as a whole, such as for its health; every device has them but the one for administration.
    pub taints: Vec<Taint>,
}

/// A part of a GPU that something holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holding {
    /// All of it, alone.
    Whole,
    /// A partition.
    Partition(Placement),
    /// A partition, with others that have shares of the same one.
    SharedPartition {
        /// Profile's lgip id: several profiles may lie at one place.
        profile_id: u32,
        /// Where it lies.
        placement: Placement,
    },
    /// All of it, with others of the same kind.
    Shared(DeviceKind),
}

impl Holding {
    /// Whether two holdings on one GPU exclude each other.
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

    /// Where the partition lies; `None` for what needs all of the GPU.
    pub const fn placement(self) -> Option<Placement> {
        match self {
            Self::Partition(placement) | Self::SharedPartition { placement, .. } => Some(placement),
            Self::Whole | Self::Shared(_) => None,
        }
    }

    /// What a device of this kind would hold; `None` for admin devices, which hold nothing.
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

/// The node's slices in the order that their names must sort in. At least one, possibly empty, so
/// that the pool is visible.
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

/// The devices of one GPU, smallest first, whole GPU last; a request that any device satisfies never takes the GPU
/// from its driver before that.
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

/// Returns true if the GPU can run processes of one claim side by side through MPS with limits for each of them: from
/// Volta on. Before, one client could read and write the memory of another.
pub fn can_serve_mps(info: &GpuInfo) -> bool {
    info.compute_capability >= (7, 0)
}

fn offers_mps(info: &GpuInfo, options: &Options) -> bool {
    options.mps.contains(&info.minor) && can_serve_mps(info)
}

/// Every device of the GPU: counters keep them apart.
fn names_with_counters(info: &GpuInfo, options: &Options) -> Vec<DeviceName> {
    let (partitions, others) = match &info.mig {
        MigCapability::Unsupported => (false, true),
        // A change needs a reset, so the layout follows the mode in force.
        MigCapability::Supported { enabled, needs_reset: true, .. } => (*enabled, !*enabled),
        MigCapability::Supported { needs_reset: false, .. } => (true, true),
    };
    let minor = info.minor;
    let plain = |kind| DeviceName::Plain { minor, kind };
    let mut names = Vec::new();
    if partitions {
        names.extend(partition_order(info).map(|(p, at)| DeviceName::mig(minor, &p.name, p.id, at)));
        // Engines are not divided, so a profile that differs in them only has no shares of its own. With shares of all,
        // some boards would have more devices than a slice holds.
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

/// Without counters nothing keeps overlapping devices apart, so a GPU is exactly what it is now:
/// its present partitions in MIG mode, else the whole GPU.
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

/// Partitions in the order in which first fit should try them: small before large, and of one
/// profile the highest start first. The low starts are the only places of the large profiles on
/// 7-slice boards (4g at 0, and 3g at 0 beside a 4g's absence), so small ones begin at the top.
fn partition_order(info: &GpuInfo) -> impl Iterator<Item = (&MigProfile, Placement)> {
    let mut order: Vec<_> =
        info.profiles().iter().flat_map(|p| p.placements.iter().map(move |at| (p, *at))).collect();
    // Profiles with special engines (+me, +gfx) come after the plain ones of their size: first fit
    // must not spend the one media set on a claim that did not ask for it.
    order.sort_by_key(|(p, at)| {
        (at.size, p.compute_slices, p.name.as_str().contains('+'), p.id, std::cmp::Reverse(at.start))
    });
    order.into_iter()
}

/// The profile of a partition.
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
    // A held share keeps its device closed even to other shares: nobody knows how much it still uses.
    let held = |h: &Holding| holding.is_some_and(|mine| mine.conflicts(*h) || mine == *h);
    let in_the_way = |mig: &LiveMig| {
        holding.is_some_and(|mine| mine.conflicts(Holding::Partition(mig.placement))) && !name.is_of(mig)
    };
    if gpu.held.iter().any(held) || gpu.standing.iter().any(in_the_way) {
        let key = crate::names::held_taint(&options.driver);
        taints.push(Taint { key, value: String::new(), effect });
    }
    // Administration holds nothing and never waits: it is there to look at what is sick.
    if holding.is_some() {
        let least = if server.informational_taints { TaintEffect::None } else { TaintEffect::NoSchedule };
        let most = if server.informational_taints { MAX_TAINTS } else { MAX_TAINTS_BEFORE_1_35 };
        let mut of_gpu: Vec<&Taint> = gpu.taints.iter().filter(|taint| taint.effect >= least).collect();
        of_gpu.sort_by(|a, b| b.effect.cmp(&a.effect).then_with(|| a.key.cmp(&b.key)));
        let room = most.saturating_sub(taints.len());
        taints.extend(of_gpu.into_iter().take(room).cloned());
    }
    taints
}

#[cfg(test)]
#[path = "layout/tests.rs"]
mod tests;

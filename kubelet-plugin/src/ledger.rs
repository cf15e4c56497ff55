//! The record of what this node holds for each claim: the data of the checkpoint and the rules over it. Pure:
//! it does no I/O.
//!
//! The ledger is the last line of defence (design.md, "Who allocates", rule 8): whatever an allocator or a
//! race says, nothing is prepared that overlaps something already prepared.

// The fuzzer of the checkpoint has this file without the rest of the agent (`e2e/fuzz`).
#[path = "ledger/device_number.rs"]
mod device_number;
#[path = "ledger/former.rs"]
mod former;
#[path = "ledger/here.rs"]
mod here;
#[path = "ledger/lost.rs"]
mod lost;
#[path = "ledger/newer.rs"]
mod newer;
#[path = "ledger/passed.rs"]
mod passed;
#[path = "ledger/shared.rs"]
mod shared;

pub use device_number::DeviceNumber;
pub use former::{Former, Given};
pub use here::Place;
pub use lost::{Cause, Ended, Lost, Running};
pub use newer::NewerRecord;
pub use passed::Passed;

use crate::checkpoint::Surplus;
use crate::claim::{ClaimRef, Consumed, ResultKey};
use crate::plan::Step;
use crate::releases::{Charge, Releases};
use aliquot_model::config::{ComputePolicy, FailMode, MpsConfig, TimeSliceInterval};
use aliquot_model::layout::Holding;
use aliquot_model::{
    DeviceKind, DeviceName, DriverCapabilities, GpuUuid, LiveMig, MigUuid, Placement, ProfileName,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The progress of a claim on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Any number of the steps may have run. After a crash they are all undone.
    Started,
    /// All steps are done; the same answer can be given to the kubelet again.
    Completed,
    /// Any part of the undoing may have run. After a crash it is run again.
    Unpreparing,
    /// The claim was completed in an earlier boot and could not be prepared again yet. Nothing of it exists
    /// on the node, but the claim keeps its place until it is prepared again or unprepared.
    Lost,
}

impl State {
    /// Returns the state in words, for messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Started => "being prepared",
            Self::Completed => "prepared",
            Self::Unpreparing => "being unprepared",
            Self::Lost => "waiting to be prepared again after a reboot",
        }
    }
}

/// The controller's decision to keep a claim's devices without a pod. A claim without one gives everything
/// back when the kubelet asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Retention {
    /// The claim's GPU instances stay when the kubelet unprepares the claim.
    Keep,
    /// The kubelet unprepared the claim; only its GPU instances are left.
    Parked {
        /// Unix time in seconds at which the GPU instances are removed, whatever the API says.
        until: i64,
    },
}

/// The part of its GPU that a device holds, as written in the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Held {
    /// The whole GPU, exclusively. Releases that could not yet give GPUs out through MPS wrote `mps`.
    #[serde(alias = "mps")]
    Whole,
    /// A partition.
    Partition(Placement),
    /// Shares of a partition. A release that does not know this variant counts the whole GPU as held.
    #[serde(rename_all = "camelCase")]
    SharedPartition {
        /// The profile's ID, as `nvidia-smi mig -lgip` lists it.
        profile_id: u32,
        /// The placement of the partition.
        placement: Placement,
    },
    /// Shares of the whole GPU.
    Share,
    /// Time slices of the whole GPU.
    TimeSlice,
}

impl Held {
    /// Converts from the model's [`Holding`].
    pub const fn from_holding(holding: Holding) -> Self {
        match holding {
            Holding::Whole => Self::Whole,
            Holding::Partition(placement) => Self::Partition(placement),
            Holding::SharedPartition { profile_id, placement } => {
                Self::SharedPartition { profile_id, placement }
            }
            Holding::Shared(DeviceKind::TimeSlice) => Self::TimeSlice,
            Holding::Shared(_) => Self::Share,
        }
    }

    /// Converts to the model's [`Holding`].
    pub const fn holding(self) -> Holding {
        match self {
            Self::Whole => Holding::Whole,
            Self::Partition(placement) => Holding::Partition(placement),
            Self::SharedPartition { profile_id, placement } => {
                Holding::SharedPartition { profile_id, placement }
            }
            Self::Share => Holding::Shared(DeviceKind::Share),
            Self::TimeSlice => Holding::Shared(DeviceKind::TimeSlice),
        }
    }
}

/// A MIG partition that a claim holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Partition {
    /// The profile's ID, as `nvidia-smi mig -lgip` lists it.
    pub profile_id: u32,
    /// The profile's name.
    pub profile: ProfileName,
    /// The placement of the partition on its GPU.
    pub placement: Placement,
    /// True if the partition existed before the claim; it is then given back, not destroyed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopted: bool,
    /// The UUID of the MIG device, known once the device exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<MigUuid>,
}

/// The limits of a share that are in force at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limit {
    /// Bytes of GPU memory.
    pub memory_bytes: u64,
    /// Percent of compute; 0 is best effort.
    pub cores_percent: u8,
}

/// The quota of a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// The capacity that the scheduler allocated to the share.
    pub consumed: Consumed,
    /// The limit that the controller granted instead; absent if the allocated capacity is the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted: Option<Limit>,
    /// The compute policy, hard or soft.
    pub compute_policy: ComputePolicy,
    /// The priority of the share among those that borrow compute.
    pub priority: i8,
    /// The behaviour when the limiter cannot work.
    pub fail_mode: FailMode,
    /// Bytes of managed memory on top of the share's GPU memory; 0 is none.
    #[serde(default, skip_serializing_if = "none")]
    pub oversubscribe_bytes: u64,
    /// The position among the claim's devices, for indexed variables.
    pub order: u16,
    /// True if the share's files were already there while the claim was prepared, left from a record that was
    /// lost. A pod may be running with these files, so they are not undone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub found: bool,
}

fn none(bytes: &u64) -> bool {
    *bytes == 0
}

impl Share {
    /// Returns the limit that is in force at the moment.
    pub const fn limit(&self) -> Limit {
        match self.granted {
            Some(limit) => limit,
            None => {
                Limit { memory_bytes: self.consumed.memory_bytes, cores_percent: self.consumed.cores_percent }
            }
        }
    }
}

/// One allocation result of a claim, as this node holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// The result's ID, which names the CDI device, directories and mounts.
    pub result_id: String,
    /// The request, as in the result.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// The name of the device.
    pub device: String,
    /// The share ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// The GPU that the name meant when the claim was first prepared. This binding never changes.
    pub gpu: GpuUuid,
    /// The part of the GPU that is held; `None` for admin access.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Held>,
    /// The partition, if the device is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<Partition>,
    /// The capacity consumed of a shareable device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumed: Option<Consumed>,
    /// The quota, if the device is a share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
    /// The time slice that the claim asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<TimeSliceInterval>,
    /// The MPS settings, if the device is given out through MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsConfig>,
    /// The driver's files that the claim asked for on top of the usual ones.
    #[serde(default, skip_serializing_if = "DriverCapabilities::is_empty")]
    pub driver_capabilities: DriverCapabilities,
    /// The GPU, if it is passed through to a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed: Option<Box<Passed>>,
}

impl Device {
    /// Returns the device's parsed name; names of this driver always parse.
    pub fn name(&self) -> Option<DeviceName> {
        DeviceName::parse(&self.device)
    }

    /// Returns the kind of the device.
    pub fn kind(&self) -> Option<DeviceKind> {
        self.name().map(|name| name.kind())
    }

    /// Returns the key that identifies the result in the claim.
    pub fn key(&self) -> ResultKey {
        ResultKey {
            request: self.request.clone(),
            pool: self.pool.clone(),
            device: self.device.clone(),
            share_id: self.share_id.clone(),
        }
    }
}

/// The device metadata files of a claim ([`crate::metadata`]).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// The name that the pod's spec gives the claim, if the claim was made from a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_claim_name: Option<String>,
}

/// A claim in the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The claim.
    pub claim: ClaimRef,
    /// The claim's progress.
    pub state: State,
    /// The boot in which the claim was prepared.
    pub boot_id: String,
    /// Unix time in seconds at which the claim was prepared.
    pub since: i64,
    /// The claim's devices.
    pub devices: Vec<Device>,
    /// True if HAMi's indexed variables are written (the claim is its containers' only one).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub indexed_env: bool,
    /// The device metadata files, if the claim's containers get them. An older release answers without them,
    /// and leaves them for the next newer release to remove.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Metadata>,
    /// The usage that the claim is charged for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub charge: Option<Charge>,
    /// Unix time in seconds at which the kubelet first asked to unprepare the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<i64>,
    /// The controller's decision to keep the claim without a pod. An older release takes a parked claim for a
    /// prepared one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
    /// True if the kubelet was ever told that the claim is prepared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub confirmed: bool,
    /// The numbers of all devices that the claim's CDI spec has named since the claim was prepared.
    /// Containers keep the device numbers that they were started with.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub numbers: BTreeSet<DeviceNumber>,
    /// The steps that were done, in order; their inverses in reverse order undo them.
    pub steps: Vec<Step>,
    /// Fields that a newer release wrote into the record.
    #[serde(skip)]
    pub extra: Surplus,
}

impl Record {
    /// Returns the keys that identify the claim's results.
    pub fn keys(&self) -> Vec<ResultKey> {
        self.devices.iter().map(Device::key).collect()
    }

    /// Returns the Unix time in seconds until which the claim's GPU instances stay, if only they are left:
    /// for its next pod, or because they could not be removed yet.
    pub const fn parked_until(&self) -> Option<i64> {
        match self.retention {
            Some(Retention::Parked { until }) => Some(until),
            _ => None,
        }
    }

    /// Returns true if only the claim's GPU instances are left, kept for its next pod.
    pub const fn is_parked(&self) -> bool {
        self.parked_until().is_some() && matches!(self.state, State::Completed)
    }

    /// Returns true if GPU instances were made for the claim.
    pub fn has_instances(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::CreatePartition { .. }))
    }

    /// Returns the claim's progress in words, for messages.
    pub const fn standing(&self) -> &'static str {
        if self.is_parked() { "kept for its next pod" } else { self.state.as_str() }
    }
}

/// The GPU that a minor number means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Binding {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The claims that were given the GPU that the number meant before.
    #[serde(default, skip_serializing_if = "Former::is_empty")]
    pub former: Former,
}

/// Everything that this node holds. [`crate::checkpoint`] defines how it is written to disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    /// Records, by claim UID.
    pub claims: BTreeMap<String, Record>,
    /// Records that only a newer release understands, by claim UID.
    pub newer: BTreeMap<String, NewerRecord>,
    /// The GPU that each minor number means, by minor number.
    pub bindings: BTreeMap<u32, Binding>,
    /// Releases that are not acknowledged yet.
    pub releases: Releases,
    /// Set when a checkpoint is lost, until everything is accounted for again.
    pub lost: Option<Lost>,
    /// The rest of the checkpoint that a newer release wrote.
    pub beside: Beside,
}

/// The parts of a checkpoint, apart from claims, that only a newer release understands.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Beside {
    /// The version of the format that the newer release wrote, if it is higher than this release's.
    pub version: Option<u32>,
    /// The release that wrote the parts.
    pub release: Option<String>,
    /// The parts of the checkpoint, as they are on disk, by name.
    pub parts: BTreeMap<String, String>,
}

impl Beside {
    /// Merges the parts that were noted later; what is already here wins.
    fn take_in(&mut self, meanwhile: Self) {
        self.version = self.version.max(meanwhile.version);
        self.release = self.release.take().or(meanwhile.release);
        for (name, part) in meanwhile.parts {
            self.parts.entry(name).or_insert(part);
        }
    }

    /// Returns the release that wrote the parts, or a placeholder for people.
    pub fn release_or_unknown(&self) -> &str {
        self.release.as_deref().unwrap_or("(newer, it does not say which)")
    }
}

/// The claim that holds a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder<'a> {
    /// The claim.
    pub claim: &'a ClaimRef,
    /// The claim's progress, for messages.
    pub standing: &'static str,
}

impl Ledger {
    /// Returns true if the checkpoint has a record of this claim.
    pub fn has(&self, uid: &str) -> bool {
        self.claims.contains_key(uid) || self.newer.contains_key(uid)
    }

    /// Returns true if the checkpoint has anything that only a newer release understands.
    pub fn has_newer(&self) -> bool {
        !self.newer.is_empty() || !self.beside.parts.is_empty()
    }

    /// Returns all devices that are held, each with its holder.
    pub fn held(&self) -> impl Iterator<Item = (Holder<'_>, &Device)> {
        let known = self.claims.values().flat_map(|record| {
            let holder = Holder { claim: &record.claim, standing: record.standing() };
            record.devices.iter().map(move |device| (holder, device))
        });
        let newer = self.newer.values().flat_map(|record| {
            let holder = Holder { claim: &record.claim, standing: "held by a newer release" };
            record.devices().unwrap_or_default().iter().map(move |device| (holder, device))
        });
        known.chain(newer)
    }

    /// Returns the devices that other claims hold on a GPU.
    pub fn others<'a>(
        &'a self,
        uid: &'a str,
        gpu: &'a GpuUuid,
    ) -> impl Iterator<Item = (Holder<'a>, &'a Device)> + 'a {
        self.held().filter(move |(holder, device)| holder.claim.uid != uid && &device.gpu == gpu)
    }

    /// Returns true if a claim holds the whole GPU exclusively.
    pub fn is_held_whole(&self, gpu: &GpuUuid) -> bool {
        self.held().any(|(_, device)| &device.gpu == gpu && device.held == Some(Held::Whole))
    }

    /// Returns true if any claim may hold a partition that overlaps this instance.
    pub fn knows(&self, live: &LiveMig) -> bool {
        self.knows_beside("", live)
    }

    /// Returns true if any claim except `uid` may hold a partition that overlaps this instance.
    pub fn knows_beside(&self, uid: &str, live: &LiveMig) -> bool {
        let known = self
            .claims
            .values()
            .filter(|record| record.claim.uid != uid)
            .flat_map(|record| &record.devices)
            .filter(|device| device.gpu == live.parent)
            .filter_map(|device| device.partition.as_ref())
            .any(|partition| partition.placement.overlaps(live.placement));
        known || self.newer.values().any(|record| record.may_have(live))
    }

    /// Returns true if a claim holds this instance and it existed before the claim.
    pub fn has_adopted(&self, live: &LiveMig) -> bool {
        let devices = self.claims.values().flat_map(|record| &record.devices);
        let partitions =
            devices.filter(|device| device.gpu == live.parent).filter_map(|device| device.partition.as_ref());
        partitions.into_iter().any(|partition| partition.adopted && partition.placement == live.placement)
    }

    /// Records the GPU that each minor number means now. Returns true if a binding changed.
    pub fn bind(&mut self, gpus: impl IntoIterator<Item = (u32, GpuUuid)>) -> bool {
        let mut changed = false;
        for (minor, gpu) in gpus {
            let former = match self.bindings.get(&minor) {
                Some(binding) if binding.gpu == gpu => continue,
                Some(_) => Former::NotAsked,
                None => Former::default(),
            };
            self.bindings.insert(minor, Binding { gpu, former });
            changed = true;
        }
        changed
    }
}

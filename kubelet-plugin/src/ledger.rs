//! What this node holds for which claim: the data of the checkpoint and the rules over it. Pure.
//!
//! The ledger is the last line of defence (design.md, "Who allocates", rule 8): whatever an allocator
//! or a race says, nothing is prepared that overlaps something prepared.

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

/// How far a claim is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Steps may have run, any number of them. After a crash they are all undone.
    Started,
    /// Everything is done; the answer to the kubelet can be given again.
    Completed,
    /// Undoing may have run, any part of it. After a crash it is run again.
    Unpreparing,
    /// It was completed in an earlier boot and could not be prepared again yet: nothing of it exists,
    /// but the claim keeps its place until it is prepared again or unprepared.
    Lost,
}

impl State {
    /// For messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Started => "being prepared",
            Self::Completed => "prepared",
            Self::Unpreparing => "being unprepared",
            Self::Lost => "waiting to be prepared again after a reboot",
        }
    }
}

/// What the controller wrote of keeping a claim's devices without a pod. A claim that it says nothing of
/// gives everything back when the kubelet asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Retention {
    /// When the kubelet gives the claim back, its GPU instances stay.
    Keep,
    /// The kubelet gave it back; only its GPU instances are left.
    Parked {
        /// Second of Unix time at which they go, whatever the API says.
        until: i64,
    },
}

/// What a device holds of its GPU, in the checkpoint's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Held {
    /// All of it, alone. `mps` is the word of releases that could not give GPUs out through MPS yet.
    #[serde(alias = "mps")]
    Whole,
    /// A partition.
    Partition(Placement),
    /// Shares of a partition. A release that does not know this takes the whole GPU for held.
    #[serde(rename_all = "camelCase")]
    SharedPartition {
        /// Profile's lgip id.
        profile_id: u32,
        /// Where it lies.
        placement: Placement,
    },
    /// Shares of it.
    Share,
    /// Time slices of it.
    TimeSlice,
}

impl Held {
    /// From the model's word.
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

    /// To the model's word.
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

/// A partition of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Partition {
    /// Profile's lgip id.
    pub profile_id: u32,
    /// Profile's name.
    pub profile: ProfileName,
    /// Where it lies.
    pub placement: Placement,
    /// It existed before and is given back, not destroyed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopted: bool,
    /// UUID of the MIG device, known once it exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<MigUuid>,
}

/// What a share may use at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limit {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Percent of compute; 0 is best effort.
    pub cores_percent: u8,
}

/// Quota of a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// What it was allocated.
    pub consumed: Consumed,
    /// What the controller granted instead; absent if that is what it was allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted: Option<Limit>,
    /// Hard or soft.
    pub compute_policy: ComputePolicy,
    /// Order of borrowers.
    pub priority: i8,
    /// When the limiter cannot work.
    pub fail_mode: FailMode,
    /// Bytes of managed memory on top of the memory; 0 is none.
    #[serde(default, skip_serializing_if = "none")]
    pub oversubscribe_bytes: u64,
    /// Position among the claim's devices, for indexed variables.
    pub order: u16,
    /// While the claim is prepared: its files were there before, left of a record that was lost. A pod may be running
    /// with them, so they are not undone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub found: bool,
}

fn none(bytes: &u64) -> bool {
    *bytes == 0
}

impl Share {
    /// What it may use at the moment.
    pub const fn limit(&self) -> Limit {
        match self.granted {
            Some(limit) => limit,
            None => {
                Limit { memory_bytes: self.consumed.memory_bytes, cores_percent: self.consumed.cores_percent }
            }
        }
    }
}

/// One allocation result of a claim as this node holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Names CDI device, directories and mounts.
    pub result_id: String,
    /// Request as in the result.
    pub request: String,
    /// Pool.
    pub pool: String,
    /// Device name.
    pub device: String,
    /// Share id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// GPU that the name meant when the claim was prepared first. Binding for ever.
    pub gpu: GpuUuid,
    /// What it holds; nothing for admin access.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Held>,
    /// Partition, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<Partition>,
    /// What it takes of a shareable device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumed: Option<Consumed>,
    /// Quota, if it is a share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
    /// Time slice that the claim asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<TimeSliceInterval>,
    /// MPS settings, if it is given through MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsConfig>,
    /// Which of the driver's files it asked for on top of the usual ones.
    #[serde(default, skip_serializing_if = "DriverCapabilities::is_empty")]
    pub driver_capabilities: DriverCapabilities,
    /// The GPU, if it is given to a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed: Option<Box<Passed>>,
}

impl Device {
    /// The device's parsed name; ours always parse.
    pub fn name(&self) -> Option<DeviceName> {
        DeviceName::parse(&self.device)
    }

    /// What it is.
    pub fn kind(&self) -> Option<DeviceKind> {
        self.name().map(|name| name.kind())
    }

    /// What identifies the result in the claim.
    pub fn key(&self) -> ResultKey {
        ResultKey {
            request: self.request.clone(),
            pool: self.pool.clone(),
            device: self.device.clone(),
            share_id: self.share_id.clone(),
        }
    }
}

/// Device metadata files of a claim ([`crate::metadata`]).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// What its pod calls the claim, if it was made from a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_claim_name: Option<String>,
}

/// A claim in the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The claim.
    pub claim: ClaimRef,
    /// How far it is.
    pub state: State,
    /// Boot in which it was prepared.
    pub boot_id: String,
    /// Seconds since the epoch at which it was prepared.
    pub since: i64,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Whether HAMi's indexed variables are written (the claim is its containers' only one).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub indexed_env: bool,
    /// Device metadata files, if its containers get them. An older release answers without, and leaves them to the next
    /// newer one to remove.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Metadata>,
    /// What it is charged for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub charge: Option<Charge>,
    /// When the kubelet asked first to give it back, in seconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<i64>,
    /// Whether it is kept without a pod. An older release takes a parked claim for a prepared one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
    /// Whether the kubelet was ever told that it is prepared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub confirmed: bool,
    /// Numbers of all devices that its CDI spec has named since it was prepared: its containers keep those that they
    /// were started with.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub numbers: BTreeSet<DeviceNumber>,
    /// What was done, in order; the inverses in reverse order undo it.
    pub steps: Vec<Step>,
    /// What a newer release wrote beside it.
    #[serde(skip)]
    pub extra: Surplus,
}

impl Record {
    /// What identifies its results.
    pub fn keys(&self) -> Vec<ResultKey> {
        self.devices.iter().map(Device::key).collect()
    }

    /// Until when its GPU instances stay, if only they are left: for its next pod, or because they could
    /// not be removed yet.
    pub const fn parked_until(&self) -> Option<i64> {
        match self.retention {
            Some(Retention::Parked { until }) => Some(until),
            _ => None,
        }
    }

    /// Whether only its GPU instances are left, for its next pod.
    pub const fn is_parked(&self) -> bool {
        self.parked_until().is_some() && matches!(self.state, State::Completed)
    }

    /// Whether it has GPU instances that were made for it.
    pub fn has_instances(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::CreatePartition { .. }))
    }

    /// How far it is, for messages.
    pub const fn standing(&self) -> &'static str {
        if self.is_parked() { "kept for its next pod" } else { self.state.as_str() }
    }
}

/// Which GPU a minor number means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Binding {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Who was given the GPU that it meant before.
    #[serde(default, skip_serializing_if = "Former::is_empty")]
    pub former: Former,
}

/// Everything that this node holds. How it is written down: [`crate::checkpoint`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    /// By claim UID.
    pub claims: BTreeMap<String, Record>,
    /// Records that only a newer release understands, by claim UID.
    pub newer: BTreeMap<String, NewerRecord>,
    /// By minor number.
    pub bindings: BTreeMap<u32, Binding>,
    /// What was released and is not acknowledged.
    pub releases: Releases,
    /// Set from the loss of a checkpoint until everything is accounted for again.
    pub lost: Option<Lost>,
    /// What a newer release wrote beside it.
    pub beside: Beside,
}

/// What of a checkpoint only a newer release understands, apart from claims.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Beside {
    /// Version of the format that it wrote, if that is higher than ours.
    pub version: Option<u32>,
    /// The release that wrote it.
    pub release: Option<String>,
    /// Parts of the checkpoint, as they are on disk.
    pub parts: BTreeMap<String, String>,
}

impl Beside {
    /// Takes in what was noted beside it later.
    fn take_in(&mut self, meanwhile: Self) {
        self.version = self.version.max(meanwhile.version);
        self.release = self.release.take().or(meanwhile.release);
        for (name, part) in meanwhile.parts {
            self.parts.entry(name).or_insert(part);
        }
    }

    /// The release that wrote what is not understood, for people.
    pub fn release_or_unknown(&self) -> &str {
        self.release.as_deref().unwrap_or("(newer, it does not say which)")
    }
}

/// Who holds a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder<'a> {
    /// The claim.
    pub claim: &'a ClaimRef,
    /// How far it is, for messages.
    pub standing: &'static str,
}

impl Ledger {
    /// Whether the checkpoint has anything of this claim.
    pub fn has(&self, uid: &str) -> bool {
        self.claims.contains_key(uid) || self.newer.contains_key(uid)
    }

    /// Whether there is anything that only a newer release understands.
    pub fn has_newer(&self) -> bool {
        !self.newer.is_empty() || !self.beside.parts.is_empty()
    }

    /// All devices that are held, and who holds them.
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

    /// Devices of other claims on a GPU.
    pub fn others<'a>(
        &'a self,
        uid: &'a str,
        gpu: &'a GpuUuid,
    ) -> impl Iterator<Item = (Holder<'a>, &'a Device)> + 'a {
        self.held().filter(move |(holder, device)| holder.claim.uid != uid && &device.gpu == gpu)
    }

    /// Whether a claim has all of a GPU, alone.
    pub fn is_held_whole(&self, gpu: &GpuUuid) -> bool {
        self.held().any(|(_, device)| &device.gpu == gpu && device.held == Some(Held::Whole))
    }

    /// Whether any claim has a partition that covers this instance.
    pub fn knows(&self, live: &LiveMig) -> bool {
        self.knows_beside("", live)
    }

    /// The same of all claims but one.
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

    /// Whether a claim has an instance that was there before it.
    pub fn has_adopted(&self, live: &LiveMig) -> bool {
        let devices = self.claims.values().flat_map(|record| &record.devices);
        let partitions =
            devices.filter(|device| device.gpu == live.parent).filter_map(|device| device.partition.as_ref());
        partitions.into_iter().any(|partition| partition.adopted && partition.placement == live.placement)
    }

    /// Notes which GPU each minor number means now. Returns whether anything changed.
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

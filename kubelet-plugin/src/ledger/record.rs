//! Defines the record of a claim, as the checkpoint has it. Pure: it does no I/O.

use super::DeviceNumber;
use crate::checkpoint::Surplus;
use crate::claim::{ClaimRef, Consumed, ResultKey};
use crate::plan::Step;
use aliquot_model::config::{ComputePolicy, FailMode, Iommu, MpsConfig, TimeSliceInterval};
use aliquot_model::layout::{Holding, Passthrough};
use aliquot_model::{
    DeviceKind, DeviceName, DriverCapabilities, GpuInfo, GpuUuid, MicroGpus, MigUuid, Placement, ProfileName,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

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

/// The data that is kept of a GPU that a claim gives to a virtual machine, and the container's way to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Passed {
    /// The PCI address, such as `0000:17:00.0`.
    pub address: String,
    /// The facts of the GPU, as they were while NVIDIA's driver had it.
    pub info: GpuInfo,
    /// The facts of the GPU as a PCI device.
    pub device: Passthrough,
    /// The interface to the IOMMU.
    pub iommu: Iommu,
    /// True if the driver kept the GPU initialised while nothing used it, and is to do so again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub persistence: bool,
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

/// The charge for a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Charge {
    /// The claim's part of GPUs.
    pub micro_gpus: MicroGpus,
    /// The part that the claim would have if it had been given what it asked for; absent if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<MicroGpus>,
    /// Unix time in seconds since which the claim is charged.
    pub since: i64,
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

//! The reasons why a plan is refused, in the words that a user finds in a pod's events.

use crate::claim::ClaimRef;
use crate::device_number_reuse::Reach;
use crate::vfio::NotOffered;
use aliquot_model::config::TimeSliceInterval;
use aliquot_model::{DeviceName, GpuUuid, Placement, Quantity};

/// The error of a claim that cannot be prepared now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("request {request}: {refusal}")]
pub struct PlanError {
    /// The request at fault.
    pub request: String,
    /// The reason for the refusal.
    pub refusal: Box<Refusal>,
}

impl PlanError {
    /// Builds the refusal of a request.
    pub fn new(request: &str, refusal: Refusal) -> Self {
        Self { request: request.to_owned(), refusal: Box::new(refusal) }
    }

    /// Returns true if another claim's hold on hardware is the reason. If this lasts, the allocator should
    /// decide again.
    pub fn is_conflict(&self) -> bool {
        matches!(
            *self.refusal,
            Refusal::Conflict { .. }
                | Refusal::Oversubscribed { .. }
                | Refusal::Foreign { .. }
                | Refusal::Vanished { .. }
                | Refusal::Reached { .. }
                | Refusal::Unaccounted { .. }
                | Refusal::Unreadable { .. }
                | Refusal::Beyond { .. }
                | Refusal::Unfathomed { .. }
                | Refusal::WithinClaim { .. }
        )
    }
}

/// The reason for a refusal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The node does not have the GPU, or cannot read it now.
    #[error(
        "device {device} needs the GPU with minor number {minor}, which this node does not have or cannot read now"
    )]
    NoGpu {
        /// The device.
        device: DeviceName,
        /// The minor number.
        minor: u32,
    },
    /// The device's name means another GPU than when the claim was prepared or allocated.
    #[error(
        "device {device} now means GPU {now}, but the claim got it when it meant {then}; delete the pod so that the claim is allocated anew"
    )]
    OtherGpu {
        /// The device.
        device: DeviceName,
        /// The GPU that the name means now.
        now: GpuUuid,
        /// The GPU that the name meant then, as far as it is known.
        then: String,
    },
    /// The device's name means another GPU than before, and it is not known yet whether the claim was given
    /// the former one.
    #[error(
        "device {device} means GPU {now} since a short while, and which claims were given the former one is being asked of the API server; it is tried again, and if this lasts, look at why the node agent cannot list ResourceClaims"
    )]
    Exchanged {
        /// The device.
        device: DeviceName,
        /// The GPU that the name means now.
        now: GpuUuid,
    },
    /// Containers of another claim may open the GPU.
    #[error(
        "device {device} is on {}, which is given to nobody: {reach}; it becomes free when that claim is unprepared: delete the pods that use it", reach.target()
    )]
    Reached {
        /// The device.
        device: DeviceName,
        /// The claim that may open the GPU, and how.
        reach: Box<Reach>,
    },
    /// The board does not have this profile or placement.
    #[error(
        "GPU {gpu} has no partition {device}; the driver on this node may have been changed since it was published"
    )]
    NoSuchPartition {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: GpuUuid,
    },
    /// A partition that existed before its claims was destroyed while they hold it. This driver did not make
    /// the partition, and does not make it again.
    #[error(
        "{device} is of a partition that claim {other} found on GPU {gpu} and has shares of, and that somebody has destroyed since; make it again in the same place (nvidia-smi mig -cgi -C), or delete the pods that use that claim"
    )]
    Vanished {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: GpuUuid,
        /// A claim that holds shares of the partition.
        other: Box<ClaimRef>,
    },
    /// The GPU cannot be passed through to a virtual machine.
    #[error("device {device}, GPU {gpu}, cannot be given to a virtual machine: {reason}")]
    NoPassthrough {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: GpuUuid,
        /// The reason: the condition that is not met.
        reason: NotOffered,
    },
    /// Another claim holds the device, or one that overlaps it.
    #[error(
        "device {device} on GPU {gpu} overlaps {other_device}, which is {state} for claim {other}; it becomes free when that claim is unprepared"
    )]
    Conflict {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: GpuUuid,
        /// The other claim.
        other: Box<ClaimRef>,
        /// The other claim's device.
        other_device: String,
        /// The other claim's progress.
        state: &'static str,
    },
    /// Two allocation results of one claim overlap.
    #[error("device {device} overlaps {other_device} of request {other_request} of the same claim")]
    WithinClaim {
        /// The device.
        device: DeviceName,
        /// The other request.
        other_request: String,
        /// The other request's device.
        other_device: String,
    },
    /// The checkpoint does not know a claim that may be using the GPU.
    #[error(
        "device {device} is on a GPU that a claim with UID {uid} may be using, of which the node's checkpoint has lost the record; it becomes free when the pods of that claim have ended{}", spec.as_ref().map(|spec| format!(" (if none runs, remove {})", spec.display())).unwrap_or_default()
    )]
    Unaccounted {
        /// The device.
        device: DeviceName,
        /// The UID of the other claim.
        uid: String,
        /// The other claim's CDI spec, if it has one.
        spec: Option<std::path::PathBuf>,
    },
    /// The checkpoint does not know a claim, and the claim's CDI spec does not say which GPUs it may be
    /// using.
    #[error(
        "device {device} may be in use by a claim with UID {uid}, of which the node's checkpoint has lost the record and the CDI spec cannot be read ({reason}); it becomes free when the pods of that claim have ended (if none runs, delete {})", spec.display()
    )]
    Unreadable {
        /// The device.
        device: DeviceName,
        /// The UID of the other claim.
        uid: String,
        /// The other claim's CDI spec.
        spec: std::path::PathBuf,
        /// The reason why the spec cannot be read.
        reason: String,
    },
    /// The checkpoint was written by a newer release, and nothing of it can be read.
    #[error(
        "device {device} may be in use: nobody here can read what the node's checkpoint says is held: {reason}; no GPU takes a new claim while that file is there: if the release will not run here again, delete it once no pod of this node uses a GPU"
    )]
    Beyond {
        /// The device.
        device: DeviceName,
        /// The file, and the reason why it cannot be read.
        reason: String,
    },
    /// A record of a newer release does not say which GPUs its claim holds.
    #[error(
        "device {device} may be held by claim {other}, whose record release {release} of the node agent wrote and this one ({own}) does not understand; it becomes free when that release runs on this node again and the claim is unprepared", own = env!("CARGO_PKG_VERSION")
    )]
    Unfathomed {
        /// The device.
        device: DeviceName,
        /// The other claim.
        other: Box<ClaimRef>,
        /// The newer release.
        release: String,
    },
    /// A GPU instance that no claim holds is in the way.
    #[error(
        "device {device} overlaps a GPU instance at {placement} on GPU {gpu} that no claim has and that is not this device; destroy it (nvidia-smi mig -dci, -dgi) or let the agent do so with kubeletPlugin.unclaimedMig: destroy"
    )]
    Foreign {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: GpuUuid,
        /// The placement of the foreign instance.
        placement: Placement,
    },
    /// The GPU needs a reset before it can serve this device.
    #[error(
        "device {device} needs MIG mode {wanted} on GPU {gpu}, which this agent cannot switch: it takes a GPU reset on boards like A100, and an administrator where the API server keeps no counters"
    )]
    NeedsReset {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: GpuUuid,
        /// The MIG mode that the device needs: `on` or `off`.
        wanted: &'static str,
    },
    /// The board does not support MIG.
    #[error("GPU {gpu} has no MIG")]
    NoMig {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// The shares of a device would together take more than there is.
    #[error(
        "shares of {device} on GPU {gpu} would take {wanted} of {capacity}, of which {total} exist; claims that hold shares: {holders}"
    )]
    Oversubscribed {
        /// The device.
        device: DeviceName,
        /// The GPU.
        gpu: GpuUuid,
        /// The name of the capacity.
        capacity: &'static str,
        /// The sum that all shares would take.
        wanted: u64,
        /// The capacity that exists.
        total: u64,
        /// The claims that hold the other shares.
        holders: String,
    },
    /// The claim asks for more managed memory beyond the share than the node allows.
    #[error(
        "ShareConfig.oversubscribe asks for {wanted} of managed memory beyond the share, and this node allows {most} at most (0: none): ask for less, or have the administrator raise kubeletPlugin.oversubscribeAtMost (--oversubscribe-at-most)"
    )]
    ManagedMemory {
        /// The amount that the claim asks for.
        wanted: String,
        /// The node's limit.
        most: String,
    },
    /// Another claim set another time slice on the GPU.
    #[error(
        "GPU {gpu} has time slice {set:?} for claim {other}, and this claim wants {wanted:?}; it starts when that one has ended, or with GpuConfig.timeSlice: {set:?}"
    )]
    TimeSlice {
        /// The GPU.
        gpu: GpuUuid,
        /// The time slice in force.
        set: TimeSliceInterval,
        /// The time slice that this claim wants.
        wanted: TimeSliceInterval,
        /// The claim that set the time slice in force.
        other: ClaimRef,
    },
    /// No supervisor of MPS daemons runs on this node.
    #[error(
        "device {device} is given through MPS, and no supervisor of MPS daemons runs on this node: an administrator \
         switches it on with the chart value kubeletPlugin.mps.enabled; where it is on, look at the pod of DaemonSet \
         aliquot-mps on this node"
    )]
    MpsNotServed {
        /// The device.
        device: DeviceName,
    },
    /// The board is too old for MPS.
    #[error(
        "GPU {gpu} has compute capability {major}.{minor}, and MPS keeps the memory of its clients apart from 7.0 on; use \
         gpu.aliquot.dev or timeslice.aliquot.dev"
    )]
    MpsUnsafe {
        /// The GPU.
        gpu: GpuUuid,
        /// The major number of the compute capability.
        major: u32,
        /// The minor number of the compute capability.
        minor: u32,
    },
    /// Two devices of a claim have different MPS settings.
    #[error(
        "the MpsConfig of device {device} is not that of device {other} of request {other_request}: all GPUs that a \
         claim has through MPS have one daemon, and so the same limits; use one MpsConfig, or two claims"
    )]
    MpsConfigs {
        /// The device.
        device: DeviceName,
        /// The other device.
        other: String,
        /// The other device's request.
        other_request: String,
    },
    /// The limit is one that MPS cannot keep.
    #[error(
        "MpsConfig.pinnedDeviceMemoryLimit is {limit}, and GPU {gpu} has {memory} bytes of memory: use a limit from 1Mi \
         up to that, or none"
    )]
    MpsMemory {
        /// The GPU.
        gpu: GpuUuid,
        /// The limit that the claim asks for.
        limit: Quantity,
        /// Bytes of memory that the GPU has.
        memory: u64,
    },
}

//! Why a plan is refused: the words that a user finds in a pod's events.

use crate::claim::ClaimRef;
use crate::reach::Reach;
use aliquot_model::config::TimeSliceInterval;
use aliquot_model::{DeviceName, GpuUuid, Placement, Quantity};

/// A claim that cannot be prepared now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("request {request}: {refusal}")]
pub struct PlanError {
    /// The request at fault.
    pub request: String,
    /// What is wrong with it.
    pub refusal: Box<Refusal>,
}

impl PlanError {
    /// A refusal of a request.
    pub fn new(request: &str, refusal: Refusal) -> Self {
        Self { request: request.to_owned(), refusal: Box::new(refusal) }
    }

    /// Whether another claim's hold on hardware is the reason: the allocator should decide anew if it
    /// lasts.
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

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such GPU.
    #[error(
        "device {device} needs the GPU with minor number {minor}, which this node does not have or cannot read now"
    )]
    NoGpu {
        /// Device.
        device: DeviceName,
        /// Minor number.
        minor: u32,
    },
    /// The name means another GPU than when the claim was prepared or allocated.
    #[error(
        "device {device} now means GPU {now}, but the claim got it when it meant {then}; delete the pod so that the claim is allocated anew"
    )]
    OtherGpu {
        /// Device.
        device: DeviceName,
        /// GPU now.
        now: GpuUuid,
        /// What it meant, as far as known.
        then: String,
    },
    /// The name means another GPU than before, and nobody knows yet whether the claim was given the former one.
    #[error(
        "device {device} means GPU {now} since a short while, and which claims were given the former one is being asked of the API server; it is tried again, and if this lasts, look at why the node agent cannot list ResourceClaims"
    )]
    Exchanged {
        /// Device.
        device: DeviceName,
        /// GPU now.
        now: GpuUuid,
    },
    /// Containers of another claim may open the GPU.
    #[error(
        "device {device} is on {}, which is given to nobody: {reach}; it becomes free when that claim is unprepared: delete the pods that use it", reach.target()
    )]
    Reached {
        /// Device.
        device: DeviceName,
        /// Who, and how.
        reach: Box<Reach>,
    },
    /// No such profile or placement on the board.
    #[error(
        "GPU {gpu} has no partition {device}; the driver on this node may have been changed since it was published"
    )]
    NoSuchPartition {
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
    },
    /// A partition that was there before its claims was destroyed while they have it. It is not for us to make it again.
    #[error(
        "{device} is of a partition that claim {other} found on GPU {gpu} and has shares of, and that somebody has destroyed since; make it again in the same place (nvidia-smi mig -cgi -C), or delete the pods that use that claim"
    )]
    Vanished {
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
        /// A claim that has it.
        other: Box<ClaimRef>,
    },
    /// No virtual machine can have the GPU.
    #[error("device {device}, GPU {gpu}, cannot be given to a virtual machine: {reason}")]
    NoPassthrough {
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
        /// What is missing.
        reason: String,
    },
    /// Somebody has it.
    #[error(
        "device {device} on GPU {gpu} overlaps {other_device}, which is {state} for claim {other}; it becomes free when that claim is unprepared"
    )]
    Conflict {
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
        /// The other claim.
        other: Box<ClaimRef>,
        /// Its device.
        other_device: String,
        /// How far the other claim is.
        state: &'static str,
    },
    /// Two results of one claim overlap.
    #[error("device {device} overlaps {other_device} of request {other_request} of the same claim")]
    WithinClaim {
        /// Device.
        device: DeviceName,
        /// The other request.
        other_request: String,
        /// Its device.
        other_device: String,
    },
    /// The checkpoint does not know a claim that may be using the GPU.
    #[error(
        "device {device} is on a GPU that a claim with UID {uid} may be using, of which the node's checkpoint has lost the record; it becomes free when the pods of that claim have ended{}", spec.as_ref().map(|spec| format!(" (if none runs, remove {})", spec.display())).unwrap_or_default()
    )]
    Unaccounted {
        /// Device.
        device: DeviceName,
        /// UID of the other claim.
        uid: String,
        /// Its CDI spec, if it has one.
        spec: Option<std::path::PathBuf>,
    },
    /// The checkpoint does not know a claim, and its spec does not say which GPUs it may be using.
    #[error(
        "device {device} may be in use by a claim with UID {uid}, of which the node's checkpoint has lost the record and the CDI spec cannot be read ({reason}); it becomes free when the pods of that claim have ended (if none runs, delete {})", spec.display()
    )]
    Unreadable {
        /// Device.
        device: DeviceName,
        /// UID of the other claim.
        uid: String,
        /// Its CDI spec.
        spec: std::path::PathBuf,
        /// Why it cannot be read.
        reason: String,
    },
    /// The checkpoint is of a newer release, and nothing of it can be read.
    #[error(
        "device {device} may be in use: nobody here can read what the node's checkpoint says is held: {reason}; no GPU takes a new claim while that file is there: if the release will not run here again, delete it once no pod of this node uses a GPU"
    )]
    Beyond {
        /// Device.
        device: DeviceName,
        /// Which file, and why it cannot be read.
        reason: String,
    },
    /// A record of a newer release does not say which GPUs it has.
    #[error(
        "device {device} may be held by claim {other}, whose record release {release} of the node agent wrote and this one ({own}) does not understand; it becomes free when that release runs on this node again and the claim is unprepared", own = env!("CARGO_PKG_VERSION")
    )]
    Unfathomed {
        /// Device.
        device: DeviceName,
        /// The other claim.
        other: Box<ClaimRef>,
        /// The newer release.
        release: String,
    },
    /// A partition that nobody knows is in the way.
    #[error(
        "device {device} overlaps a GPU instance at {placement} on GPU {gpu} that no claim has and that is not this device; destroy it (nvidia-smi mig -dci, -dgi) or let the agent do so with kubeletPlugin.unclaimedMig: destroy"
    )]
    Foreign {
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
        /// Where the foreign instance lies.
        placement: Placement,
    },
    /// The board needs a reset for this device.
    #[error(
        "device {device} needs MIG mode {wanted} on GPU {gpu}, which this agent cannot switch: it takes a GPU reset on boards like A100, and an administrator where the API server keeps no counters"
    )]
    NeedsReset {
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
        /// `on` or `off`.
        wanted: &'static str,
    },
    /// The board has no MIG.
    #[error("GPU {gpu} has no MIG")]
    NoMig {
        /// GPU.
        gpu: GpuUuid,
    },
    /// Shares promise more than there is.
    #[error(
        "shares of {device} on GPU {gpu} would take {wanted} of {capacity}, of which {total} exist; claims that hold shares: {holders}"
    )]
    Oversubscribed {
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
        /// Name of the capacity.
        capacity: &'static str,
        /// Sum.
        wanted: u64,
        /// Limit.
        total: u64,
        /// Claims that hold the rest.
        holders: String,
    },
    /// More managed memory beyond the share than the node allows.
    #[error(
        "ShareConfig.oversubscribe asks for {wanted} of managed memory beyond the share, and this node allows {most} at most (0: none): ask for less, or have the administrator raise kubeletPlugin.oversubscribeAtMost (--oversubscribe-at-most)"
    )]
    ManagedMemory {
        /// Asked for.
        wanted: String,
        /// The node's setting.
        most: String,
    },
    /// Another claim set another time slice.
    #[error(
        "GPU {gpu} has time slice {set:?} for claim {other}, and this claim wants {wanted:?}; it starts when that one has ended, or with GpuConfig.timeSlice: {set:?}"
    )]
    TimeSlice {
        /// GPU.
        gpu: GpuUuid,
        /// In force.
        set: TimeSliceInterval,
        /// Wanted.
        wanted: TimeSliceInterval,
        /// Claim that set it.
        other: ClaimRef,
    },
    /// Nobody runs MPS daemons here.
    #[error(
        "device {device} is given through MPS, and no supervisor of MPS daemons runs on this node: an administrator \
         switches it on with the chart value kubeletPlugin.mps.enabled; where it is on, look at the pod of DaemonSet \
         aliquot-mps on this node"
    )]
    MpsNotServed {
        /// Device.
        device: DeviceName,
    },
    /// The board is too old for MPS.
    #[error(
        "GPU {gpu} has compute capability {major}.{minor}, and MPS keeps the memory of its clients apart from 7.0 on; use \
         gpu.aliquot.dev or timeslice.aliquot.dev"
    )]
    MpsUnsafe {
        /// GPU.
        gpu: GpuUuid,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
    },
    /// Two devices of a claim with other settings.
    #[error(
        "the MpsConfig of device {device} is not that of device {other} of request {other_request}: all GPUs that a \
         claim has through MPS have one daemon, and so the same limits; use one MpsConfig, or two claims"
    )]
    MpsConfigs {
        /// Device.
        device: DeviceName,
        /// The other device.
        other: String,
        /// Its request.
        other_request: String,
    },
    /// A limit that MPS cannot keep.
    #[error(
        "MpsConfig.pinnedDeviceMemoryLimit is {limit}, and GPU {gpu} has {memory} bytes of memory: use a limit from 1Mi \
         up to that, or none"
    )]
    MpsMemory {
        /// GPU.
        gpu: GpuUuid,
        /// Asked for.
        limit: Quantity,
        /// What the GPU has.
        memory: u64,
    },
}

//! The errors of preparing and unpreparing claims.

use crate::claim::ClaimRef;
use crate::devices::DeviceError;
use crate::execute::StepError;
use crate::plan::PlanError;
use crate::rebuild::Disagreement;
use crate::reservation::ReserveError;
use crate::store::StoreError;
use aliquot_nvml::GpuError;
use std::io;
use std::path::PathBuf;

/// The reason why a claim could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The claim was refused when it was planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The checkpoint or its lock failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another operation has reserved the claim or a GPU.
    #[error(transparent)]
    Reserved(#[from] ReserveError),
    /// The GPUs could not be read.
    #[error("cannot read the node's GPUs: {0}")]
    Gpu(#[from] GpuError),
    /// No container could use the claim's devices with the driver as it is now.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A step failed. All steps before it were undone.
    #[error("cannot {step}: {source}")]
    Step {
        /// The step that was tried.
        step: String,
        /// The reason why it failed.
        source: StepError,
    },
    /// A step failed, and undoing failed too. Undoing is tried again before anything else is done.
    #[error("cannot {step}: {source}; undoing failed too: {undo}")]
    StepAndUndo {
        /// The step that was tried.
        step: String,
        /// The reason why it failed.
        source: StepError,
        /// The reason why undoing failed.
        undo: Box<StepError>,
    },
    /// The steps that a dead process left half done cannot be undone yet.
    #[error("cannot {undo}: {error}")]
    HalfDone {
        /// The undo step that was tried.
        undo: String,
        /// The reason why it failed.
        error: StepError,
    },
    /// The leftovers of an earlier attempt cannot be removed.
    #[error("cannot clean up after an earlier attempt: {0}")]
    Leftovers(StepError),
    /// The claim's allocation changed while its old devices are still prepared.
    #[error(
        "claim {claim} is prepared with {prepared} from an earlier allocation and must be unprepared first; the kubelet does so when the pod that used it is gone"
    )]
    Reallocated {
        /// The claim.
        claim: ClaimRef,
        /// The devices that are prepared.
        prepared: String,
    },
    /// The claim's record is lost, and containers may be running with something other than what the claim has
    /// now.
    #[error(
        "the checkpoint has no record of claim {claim}, and {reason}: containers may be running with what {} gives them, so it stays as it is; delete the pods that use the claim and create them again (if none of them runs, removing the file is enough)", spec.display()
    )]
    Disagrees {
        /// The claim.
        claim: ClaimRef,
        /// The claim's CDI spec.
        spec: PathBuf,
        /// The point on which the spec and the rest do not agree.
        reason: Box<Disagreement>,
    },
    /// Only a newer release understands the claim's record.
    #[error(
        "claim {claim} was prepared by release {release} of the node agent, whose record this one ({own}) does not understand ({why}): its containers go on, and new ones can be started once that release runs on this node again, or after the pods that use the claim are deleted", own = env!("CARGO_PKG_VERSION")
    )]
    Newer {
        /// The claim.
        claim: Box<ClaimRef>,
        /// The newer release.
        release: String,
        /// The part that is not understood.
        why: String,
    },
    /// The driver is to be unloaded.
    #[error(
        "claim {claim} is not prepared now: the driver of this node is to be unloaded, as its label {label} says. The kubelet tries again until the label is gone; delete the pod to have it run elsewhere"
    )]
    DriverAskedFor {
        /// The claim.
        claim: ClaimRef,
        /// The label, as `name=value`.
        label: String,
    },
    /// Another process changed the claim's record in between.
    #[error(
        "the record of claim {claim} was changed by another instance of the node agent while the claim was prepared; the kubelet tries again"
    )]
    Interfered {
        /// The claim.
        claim: ClaimRef,
    },
    /// The GPUs' minor numbers changed again and again.
    #[error(
        "the minor numbers of the GPUs of claim {claim} changed while it was prepared; the kubelet tries again"
    )]
    Renumbered {
        /// The claim.
        claim: ClaimRef,
    },
    /// The devices that the claim kept from an earlier allocation or boot cannot be removed.
    #[error("cannot clean up what the claim kept without a pod: {0}")]
    Parked(UnprepareError),
    /// The ID of the boot cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    BootId {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

impl PrepareError {
    /// Returns true if another claim's hold on hardware is the reason.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Plan(error) if error.is_conflict())
    }
}

/// The reason why a claim could not be unprepared.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareError {
    /// The checkpoint or its lock failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another operation has reserved the claim or a GPU.
    #[error(transparent)]
    Reserved(#[from] ReserveError),
    /// The ID of the boot cannot be read.
    #[error(transparent)]
    Boot(Box<PrepareError>),
    /// Undoing a step failed. The claim keeps what it holds; the kubelet tries again.
    #[error("cannot {undo}: {source}")]
    Undo {
        /// The undo step that was tried.
        undo: String,
        /// The reason.
        source: StepError,
    },
}

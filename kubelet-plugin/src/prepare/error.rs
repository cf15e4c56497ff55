//! Why prepare and unprepare fail.

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

/// Why a claim could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The decision.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Checkpoint or lock.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another operation has the claim or a GPU.
    #[error(transparent)]
    Reserved(#[from] ReserveError),
    /// The GPUs could not be read.
    #[error("cannot read the node's GPUs: {0}")]
    Gpu(#[from] GpuError),
    /// No container could use what the claim was given, as the driver is now.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A step failed. Everything before it was undone.
    #[error("cannot {step}: {source}")]
    Step {
        /// What was tried.
        step: String,
        /// Why it failed.
        source: StepError,
    },
    /// A step failed, and undoing failed too; it is tried again before anything else is done.
    #[error("cannot {step}: {source}; undoing failed too: {undo}")]
    StepAndUndo {
        /// What was tried.
        step: String,
        /// Why it failed.
        source: StepError,
        /// Why undoing failed.
        undo: Box<StepError>,
    },
    /// What a dead process left half done cannot be undone yet.
    #[error("cannot {undo}: {error}")]
    HalfDone {
        /// What was tried.
        undo: String,
        /// Why it failed.
        error: StepError,
    },
    /// Leftovers of an earlier attempt cannot be removed.
    #[error("cannot clean up after an earlier attempt: {0}")]
    Leftovers(StepError),
    /// The claim's allocation changed while its old devices are still prepared.
    #[error(
        "claim {claim} is prepared with {prepared} from an earlier allocation and must be unprepared first; the kubelet does so when the pod that used it is gone"
    )]
    Reallocated {
        /// The claim.
        claim: ClaimRef,
        /// Devices that are prepared.
        prepared: String,
    },
    /// The claim's record is lost, and containers may be running with something else than it has now.
    #[error(
        "the checkpoint has no record of claim {claim}, and {reason}: containers may be running with what {} gives them, so it stays as it is; delete the pods that use the claim and create them again (if none of them runs, removing the file is enough)", spec.display()
    )]
    Disagrees {
        /// The claim.
        claim: ClaimRef,
        /// Its CDI spec.
        spec: PathBuf,
        /// In what it and the rest do not agree.
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
        /// What is not understood.
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
    /// The GPUs got other numbers again and again.
    #[error(
        "the minor numbers of the GPUs of claim {claim} changed while it was prepared; the kubelet tries again"
    )]
    Renumbered {
        /// The claim.
        claim: ClaimRef,
    },
    /// What the claim kept of an earlier allocation or boot cannot be removed.
    #[error("cannot clean up what the claim kept without a pod: {0}")]
    Parked(UnprepareError),
    /// The boot cannot be told.
    #[error("cannot read {}: {source}", path.display())]
    BootId {
        /// File.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl PrepareError {
    /// Whether another claim's hold on hardware is the reason.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Plan(error) if error.is_conflict())
    }
}

/// Why a claim could not be unprepared.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareError {
    /// Checkpoint or lock.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another operation has the claim or a GPU.
    #[error(transparent)]
    Reserved(#[from] ReserveError),
    /// The boot cannot be told.
    #[error(transparent)]
    Boot(Box<PrepareError>),
    /// An inverse failed. The claim keeps what it holds; the kubelet tries again.
    #[error("cannot {undo}: {source}")]
    Undo {
        /// What was tried.
        undo: String,
        /// Why.
        source: StepError,
    },
}

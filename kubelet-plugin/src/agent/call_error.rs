//! The error of a call of the kubelet, with its metrics label and its event reason.

use crate::claim::{ClaimError, ClaimRef};
use crate::prepare::{PrepareError, UnprepareError};
use crate::reasons;
use tokio::task::JoinError;

/// The reason why a claim was not prepared, or not released.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The UID could name a file outside the agent's folders.
    #[error("claim {0} has an impossible uid")]
    BadUid(ClaimRef),
    /// The API server does not know the claim.
    #[error("claim {0} does not exist any more")]
    Gone(ClaimRef),
    /// The API server gave no answer, and the node holds no earlier answer for the claim.
    #[error("cannot read claim {claim} from the API server: {why}")]
    Unreachable {
        /// The claim.
        claim: ClaimRef,
        /// The error of the API client.
        why: String,
    },
    /// The claim asks for what this node cannot read or does not have.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The node could not prepare the devices.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The node could not release the devices.
    #[error(transparent)]
    Unprepare(#[from] UnprepareError),
    /// The operation panicked.
    #[error("the operation ended abnormally: {0}")]
    Panic(#[from] JoinError),
}

impl CallError {
    /// Returns the value of the label `outcome` of the call's metrics.
    #[must_use]
    pub fn outcome(&self) -> &'static str {
        match self {
            Self::BadUid(_) | Self::Gone(_) | Self::Claim(_) => "refused",
            Self::Prepare(error) if error.is_conflict() => "conflict",
            Self::Unreachable { .. } | Self::Prepare(_) | Self::Unprepare(_) | Self::Panic(_) => "failed",
        }
    }

    /// Returns the reason of the event on the claim; `None` if no event would help whoever looks at the claim.
    #[must_use]
    pub fn reason(&self) -> Option<&'static str> {
        match self {
            Self::Claim(_) => Some(reasons::PREPARE_FAILED),
            Self::Prepare(error) if error.is_conflict() => Some(reasons::CONFLICT),
            Self::Prepare(_) => Some(reasons::PREPARE_FAILED),
            Self::Unprepare(_) => Some(reasons::UNPREPARE_FAILED),
            Self::BadUid(_) | Self::Gone(_) | Self::Unreachable { .. } | Self::Panic(_) => None,
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execute::StepError;
    use crate::plan::{PlanError, Refusal};
    use crate::testing;
    use aliquot_model::DeviceName;
    use rstest::rstest;

    fn claim() -> ClaimRef {
        testing::claim("c-1")
    }

    fn refused(refusal: Refusal) -> CallError {
        PrepareError::from(PlanError::new("gpu", refusal)).into()
    }

    fn device() -> DeviceName {
        DeviceName::parse("gpu-0").unwrap()
    }

    fn no_quota() -> StepError {
        StepError::NoQuota("r-1".into())
    }

    #[rstest]
    #[case::bad_uid(CallError::BadUid(claim()), "refused", None, "has an impossible uid")]
    #[case::gone(CallError::Gone(claim()), "refused", None, "does not exist any more")]
    #[case::unreachable(
        CallError::Unreachable { claim: claim(), why: "timed out".into() },
        "failed", None, "from the API server: timed out"
    )]
    #[case::claim(
        ClaimError::NotAllocated(claim()).into(),
        "refused", Some(reasons::PREPARE_FAILED), "is not allocated; its pod must wait for the allocator"
    )]
    #[case::not_here(
        refused(Refusal::NoGpu { device: device(), minor: 0 }),
        "failed", Some(reasons::PREPARE_FAILED), "which this node does not have or cannot read now"
    )]
    #[case::conflict(
        refused(Refusal::WithinClaim { device: device(), other_request: "b".into(), other_device: "gpu-0".into() }),
        "conflict", Some(reasons::CONFLICT), "request gpu: "
    )]
    #[case::step(
        PrepareError::Step { step: "make share r-1".into(), source: no_quota() }.into(),
        "failed", Some(reasons::PREPARE_FAILED), "cannot make share r-1: the checkpoint does not say"
    )]
    #[case::undo(
        UnprepareError::Undo { undo: "remove share r-1".into(), source: no_quota() }.into(),
        "failed", Some(reasons::UNPREPARE_FAILED), "cannot remove share r-1: the checkpoint does not say"
    )]
    fn an_error_has_an_outcome_a_reason_and_a_text(
        #[case] error: CallError,
        #[case] outcome: &str,
        #[case] reason: Option<&str>,
        #[case] text: &str,
    ) {
        assert_eq!((error.outcome(), error.reason()), (outcome, reason));
        assert!(error.to_string().contains(text), "{error}");
    }

    #[tokio::test]
    async fn a_task_that_ended_abnormally_has_failed_and_is_no_event() {
        let task = tokio::spawn(std::future::pending::<()>());
        task.abort();
        let error = CallError::from(task.await.unwrap_err());
        assert_eq!((error.outcome(), error.reason()), ("failed", None));
        assert!(error.to_string().starts_with("the operation ended abnormally: "), "{error}");
    }

    #[test]
    fn the_claim_is_named_with_its_uid() {
        let named = format!("claim {}", claim());
        for error in [CallError::BadUid(claim()), CallError::Gone(claim())] {
            assert!(error.to_string().starts_with(&named), "{error}");
        }
    }
}

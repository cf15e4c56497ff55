//! The reasons why a pod has to wait before it can be decided, in words.

use crate::snapshot::{ClaimSource, ObjectKey, PodClaim};
use std::fmt;

/// The reason why a pod has to wait before it can be decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wait {
    /// A claim is not yet generated from its template.
    NotMade {
        /// The pod's claim.
        claim: PodClaim,
    },
    /// A claim does not exist.
    NoSuchClaim {
        /// The claim.
        claim: ObjectKey,
    },
    /// A claim is being deleted.
    Deleting {
        /// The claim.
        claim: ObjectKey,
    },
    /// A claim was generated for another pod.
    OfAnotherPod {
        /// The claim.
        claim: ObjectKey,
    },
    /// A claim is being allocated for another pod.
    InFlight {
        /// The claim.
        claim: ObjectKey,
    },
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMade { claim } => match &claim.source {
                ClaimSource::Template(template) => write!(
                    f,
                    "waiting for kube-controller-manager to make the claim for {:?} from ResourceClaimTemplate {template}; \
                     check that the template exists",
                    claim.name
                ),
                ClaimSource::Named(name) => write!(f, "waiting for ResourceClaim {name}"),
            },
            Self::NoSuchClaim { claim } => write!(f, "ResourceClaim {claim} does not exist; create it"),
            Self::Deleting { claim } => {
                write!(f, "ResourceClaim {claim} is being deleted; wait until it is gone and make it anew")
            }
            Self::OfAnotherPod { claim } => {
                write!(
                    f,
                    "ResourceClaim {claim} was made for another pod; delete the pod that owns it, or rename"
                )
            }
            Self::InFlight { claim } => write!(f, "ResourceClaim {claim} is being allocated for another pod"),
        }
    }
}

//! What has to happen before a pod can be decided, in words.

use crate::index::{ClaimSource, ObjectKey, PodClaim};
use std::fmt;

/// What has to happen before a pod can be decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wait {
    /// A claim is not made from its template yet.
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
    /// A claim was made for another pod.
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

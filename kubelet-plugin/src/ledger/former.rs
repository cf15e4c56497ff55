//! Records the claims that were given a former GPU under a name that means another GPU now; see
//! [`crate::former`]. Pure: it does no I/O.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The claims that were given the GPU that a minor number meant before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Former {
    /// The number meant another GPU, and the API was not asked yet.
    NotAsked,
    /// The claims that were given the former GPU; empty if the number never meant another.
    Claims(BTreeSet<Given>),
}

/// An allocation of a claim. Earlier releases wrote only the claim and the time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Given {
    /// The UID of the claim.
    pub claim: String,
    /// The `allocationTimestamp`, which is only compared for equality.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
    /// The controller's mark or, without a time, the same mark computed from the results.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<String>,
    /// The UIDs in `reservedFor`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub consumers: BTreeSet<String>,
}

impl Given {
    /// Returns an allocation of which nothing else is known.
    pub fn of(claim: &str) -> Self {
        Self { claim: claim.to_owned(), at: None, allocation: None, consumers: BTreeSet::new() }
    }

    /// Returns true if both may be the same allocation. If there is no allocation time, the time in seconds
    /// in the controller's mark distinguishes them. kube-scheduler leaves no mark. Marks are also equal for
    /// two allocations of the same devices in one second, or where kube-scheduler allocates again what the
    /// controller had allocated. Then the consumers decide: an allocation ends only when it has no consumers,
    /// so one that has none of the earlier consumers is another allocation.
    pub fn may_be(&self, other: &Self) -> bool {
        let alike = match (&self.allocation, &other.allocation) {
            (Some(one), Some(other)) => one == other,
            _ => true,
        };
        let exchanged = self.at.is_none()
            && !self.consumers.is_empty()
            && !other.consumers.is_empty()
            && self.consumers.is_disjoint(&other.consumers);
        self.claim == other.claim && self.at == other.at && alike && !exchanged
    }
}

impl Default for Former {
    fn default() -> Self {
        Self::Claims(BTreeSet::new())
    }
}

impl Former {
    /// Returns true if there are no such claims.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Claims(claims) if claims.is_empty())
    }

    /// Returns true if this allocation is of the former GPU.
    pub fn has(&self, given: &Given) -> bool {
        matches!(self, Self::Claims(claims) if claims.iter().any(|then| then.may_be(given)))
    }
}

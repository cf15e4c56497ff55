//! Who was given a GPU from before under a name that means another now: see [`crate::former`]. Pure.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Who was given the GPU that a minor number meant before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Former {
    /// It meant another, and the API was not asked yet.
    NotAsked,
    /// These; nobody where it never meant another.
    Claims(BTreeSet<Given>),
}

/// An allocation of a claim. What an earlier release wrote has only the claim and the time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Given {
    /// UID of the claim.
    pub claim: String,
    /// `allocationTimestamp`, compared for being the same one only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
    /// The controller's mark, or the same made of the results without a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<String>,
    /// UIDs in `reservedFor`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub consumers: BTreeSet<String>,
}

impl Given {
    /// An allocation of which nothing is known.
    pub fn of(claim: &str) -> Self {
        Self { claim: claim.to_owned(), at: None, allocation: None, consumers: BTreeSet::new() }
    }

    /// Whether both may be the same allocation. Where nothing has its time, the second in the controller's mark tells
    /// them apart. kube-scheduler leaves no mark, and marks are equal of two allocations of the same devices in one
    /// second, or where kube-scheduler gives again what the controller had given. Then the consumers tell: an
    /// allocation ends only when it has none, so one that has none of those from before is another one.
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
    /// Whether there is nobody.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Claims(claims) if claims.is_empty())
    }

    /// Whether this allocation is of the GPU from before.
    pub fn has(&self, given: &Given) -> bool {
        matches!(self, Self::Claims(claims) if claims.iter().any(|then| then.may_be(given)))
    }
}

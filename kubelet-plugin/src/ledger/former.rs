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

/// An allocation of a claim: another one has another time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Given {
    /// UID of the claim.
    pub claim: String,
    /// `allocationTimestamp`, compared for being the same one only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
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
}

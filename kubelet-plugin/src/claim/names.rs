//! How claims, their results and what these take are named: in calls of the kubelet and in the checkpoint.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A claim as the kubelet names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClaimRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID; a claim of the same name with another UID is another claim.
    pub uid: String,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} (uid {})", self.namespace, self.name, self.uid)
    }
}

/// What a share takes of its device (`consumedCapacity`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consumed {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Percent of compute; 0 is best effort.
    pub cores_percent: u8,
    /// Slots.
    pub slots: u64,
}

/// What identifies an allocation result within a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResultKey {
    /// Request.
    pub request: String,
    /// Pool.
    pub pool: String,
    /// Device.
    pub device: String,
    /// Share.
    pub share_id: Option<String>,
}

//! Defines how claims, their results and consumed capacity are named, in calls of the kubelet and in the
//! checkpoint.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A claim as the kubelet names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClaimRef {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The UID; a claim of the same name with another UID is another claim.
    pub uid: String,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} (uid {})", self.namespace, self.name, self.uid)
    }
}

/// The capacity that a share consumes of its device (`consumedCapacity`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consumed {
    /// Bytes of GPU memory.
    pub memory_bytes: u64,
    /// Percent of compute; 0 is best effort.
    pub cores_percent: u8,
    /// The number of slots.
    pub slots: u64,
}

/// The key that identifies an allocation result within a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResultKey {
    /// The request.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// The device.
    pub device: String,
    /// The share ID.
    pub share_id: Option<String>,
}

//! The seat of a process: what it holds in the region, by its own count.

use super::floor::Floor;

/// What this process holds in the region. The tenant can write the region, but not this.
pub(super) struct Seat {
    pub(super) slot: Option<usize>,
    pub(super) state: u64,
    /// Bytes that this process has charged, by its own count.
    pub(super) held: u64,
    /// The lock that tells other processes of those bytes.
    pub(super) floor: Option<Floor>,
    /// The least that was held since floors were last read, in bytes.
    pub(super) looked_at: u64,
    /// The time of the last comparison of the total with its parts, in milliseconds.
    pub(super) compared_ms: u64,
    /// The number of times that a slot was taken.
    pub(super) sittings: u32,
}

impl Seat {
    pub(super) const fn new() -> Self {
        Self { slot: None, state: 0, held: 0, floor: None, looked_at: 0, compared_ms: 0, sittings: 0 }
    }
}

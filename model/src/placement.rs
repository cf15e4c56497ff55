//! Positions of partitions on a GPU's axis of memory slices.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The placement of a GPU instance: `size` memory slices from `start` (`nvmlGpuInstancePlacement_t`). The
/// axis is 4, 8 or 12 slices wide, depending on the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Placement {
    /// First memory slice.
    pub start: u32,
    /// Number of memory slices, at least 1.
    pub size: u32,
}

impl Placement {
    /// Returns a placement of `size` slices from `start`.
    pub const fn new(start: u32, size: u32) -> Self {
        Self { start, size }
    }

    /// Returns the first slice after this placement.
    pub const fn end(self) -> u32 {
        self.start.saturating_add(self.size)
    }

    /// Returns true if both placements have a memory slice in common.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// Returns the memory slices of the placement, in order.
    pub fn slices(self) -> impl Iterator<Item = u32> {
        self.start..self.end()
    }
}

impl fmt::Display for Placement {
    /// Formats the placement as nvidia-smi prints it: `{4}:2`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{}}}:{}", self.start, self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn placements_overlap_exactly_when_they_share_a_slice(a in 0u32..12, n in 1u32..13, b in 0u32..12, m in 1u32..13) {
            let (p, q) = (Placement::new(a, n), Placement::new(b, m));
            let shared = p.slices().any(|s| q.slices().any(|t| s == t));
            prop_assert_eq!(p.overlaps(q), shared);
            prop_assert_eq!(q.overlaps(p), shared);
        }
    }
}

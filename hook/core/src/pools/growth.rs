//! How pools grow, learnt from how they were seen to grow.

use crate::device;
use crate::pages::SLAB;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The least that a pool is assumed to grow by, in bytes, and the unit in which it is assumed to grow beyond
/// that, until it has been seen to grow.
pub(super) const ASSUMED: u64 = 32 << 20;

/// How a device's pools grow, in bytes; 0 = not seen yet.
pub(super) struct Growth {
    /// The least growth.
    chunk: AtomicU64,
    /// The unit of growth beyond the least.
    grain: AtomicU64,
    /// True if the growth was tried out.
    pub(super) probed: AtomicBool,
}

/// How the pools of each device grow.
pub(super) static GROWTH: [Growth; device::MOST] =
    [const { Growth { chunk: AtomicU64::new(0), grain: AtomicU64::new(0), probed: AtomicBool::new(false) } };
        device::MOST];

impl Growth {
    /// Returns the most bytes that an allocation of `bytes` can make a pool grow by.
    pub(super) fn most(&self, bytes: u64) -> Option<u64> {
        let known =
            |cell: &AtomicU64| Some(cell.load(Relaxed)).filter(|value| *value != 0).unwrap_or(ASSUMED);
        Some(bytes.checked_next_multiple_of(known(&self.grain))?.max(known(&self.chunk)))
    }

    /// Learns from how much a pool without anything free grew for `bytes`.
    pub(super) fn learn(&self, bytes: u64, grown: u64) {
        if bytes <= SLAB && grown >= SLAB {
            self.chunk.store(grown, Relaxed);
        } else if let Some(grain) = explain(bytes, grown) {
            self.grain.store(grain, Relaxed);
        }
    }

    /// Forgets what was learnt.
    pub(super) fn forget(&self) {
        self.chunk.store(0, Relaxed);
        self.grain.store(0, Relaxed);
        self.probed.store(false, Relaxed);
    }
}

/// Forgets how pools grow, in a forked child.
pub(crate) fn renew_after_fork() {
    for growth in &GROWTH {
        growth.forget();
    }
}

/// Returns the unit of growth that explains a pool's growth beyond its least, where the growth tells the unit
/// apart from the assumed one.
fn explain(bytes: u64, grown: u64) -> Option<u64> {
    if bytes <= ASSUMED || bytes.checked_next_multiple_of(ASSUMED)? == grown {
        return None;
    }
    let mut grain = ASSUMED / 2;
    while grain >= SLAB {
        if bytes.checked_next_multiple_of(grain)? == grown {
            return Some(grain);
        }
        grain /= 2;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_of_growth_is_learnt_where_growth_tells_it() {
        assert_eq!(explain(33 << 20, 34 << 20), Some(2 << 20));
        assert_eq!(explain((32 << 20) + 1, 48 << 20), Some(16 << 20));
        assert_eq!(explain(33 << 20, 64 << 20), None, "as assumed");
        assert_eq!(explain(64 << 20, 64 << 20), None, "fits any unit");
        assert_eq!(explain(1 << 20, 2 << 20), None, "the least says nothing");
        assert_eq!(explain(33 << 20, 35 << 20), None, "no unit explains it");
    }

    #[test]
    fn growth_is_assumed_large_until_learnt() {
        let growth =
            Growth { chunk: AtomicU64::new(0), grain: AtomicU64::new(0), probed: AtomicBool::new(false) };
        assert_eq!(growth.most(1), Some(32 << 20));
        assert_eq!(growth.most(33 << 20), Some(64 << 20));
        growth.learn((32 << 20) + 1, 34 << 20);
        assert_eq!((growth.most(33 << 20), growth.most(1)), (Some(34 << 20), Some(32 << 20)));
        growth.learn(1, 2 << 20);
        assert_eq!(growth.most(1), Some(2 << 20));
        assert_eq!(growth.most(u64::MAX), None);
    }
}

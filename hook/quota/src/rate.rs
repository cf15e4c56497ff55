//! An account of GPU time in one word: the instant of the monotonic clock at which everything charged is paid
//! for.
//!
//! Whoever pays at `percent` (1 to 100) pays for a cost in as much clock time as [`price`] says. The word
//! cannot be half written. Whatever is in it, it is read as at most [`LONGEST_DEBT_NS`] ahead and, where time
//! is saved up, as at most a burst behind. [`crate::gate`] keeps such words in the region, [`crate::own`] in
//! the process's memory.

use crate::line::STEP_NS;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire};

/// The longest debt, in nanoseconds of the clock. A word beyond it is impossible (kernels of six seconds at
/// one percent come to it) and is read as this much.
pub const LONGEST_DEBT_NS: u64 = 600_000_000_000;

/// The number of attempts to change a word that others change at the same time. Only a process that means
/// harm writes it all the while; then the launch has to come again, or the correction is lost.
pub(crate) const TRIES: usize = 1000;

/// Returns the clock time in which `percent` of the GPU pays for `cost_ns`, rounded up.
pub(crate) fn price(cost_ns: u64, percent: u8) -> u64 {
    cost_ns.saturating_mul(100).div_ceil(u64::from(percent.clamp(1, 100)))
}

/// A rate of payment, and the time that can be saved up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rate {
    /// Percent of the GPU.
    pub(crate) percent: u8,
    /// GPU time that can be saved up, in nanoseconds.
    pub(crate) burst_ns: u64,
}

impl Rate {
    /// Returns `paid_until` moved on by a cost, counted from no earlier than what can be saved up.
    fn charged(self, paid_until: u64, now_ns: u64, cost_ns: u64) -> u64 {
        let earliest = now_ns.saturating_sub(price(self.burst_ns, self.percent));
        let latest = now_ns.saturating_add(LONGEST_DEBT_NS);
        paid_until.clamp(earliest, latest).saturating_add(price(cost_ns, self.percent)).min(latest)
    }

    /// Charges a launch of `cost_ns` if it may go, with a lease on top, whose length `lease` gives for the
    /// GPU time saved up. Returns the length of the lease and the amount charged. The error is the time at
    /// which to ask again.
    pub(crate) fn admit(
        self,
        word: &AtomicU64,
        now_ns: u64,
        cost_ns: u64,
        lease: impl Fn(u64) -> u64,
    ) -> Result<(u64, u64), u64> {
        let mut found = word.load(Acquire);
        for _ in 0..TRIES {
            if found > now_ns {
                return Err(found.min(now_ns.saturating_add(LONGEST_DEBT_NS)));
            }
            let most = price(self.burst_ns, self.percent);
            let saved_ns = (now_ns - found).min(most) / 100 * u64::from(self.percent.clamp(1, 100));
            let lease_ns = lease(saved_ns);
            let amount_ns = cost_ns.saturating_add(lease_ns);
            let next = self.charged(found, now_ns, amount_ns);
            match word.compare_exchange_weak(found, next, AcqRel, Acquire) {
                Ok(_) => return Ok((lease_ns, amount_ns)),
                Err(other) => found = other,
            }
        }
        Err(now_ns.saturating_add(STEP_NS))
    }

    /// Charges what launches took beyond their estimate, or refunds what they did not take.
    pub(crate) fn correct(self, word: &AtomicU64, now_ns: u64, delta_ns: i64) {
        let amount = delta_ns.unsigned_abs();
        change(word, |found| {
            if delta_ns > 0 {
                self.charged(found, now_ns, amount)
            } else {
                found.saturating_sub(price(amount, self.percent))
            }
        });
    }
}

/// Charges a launch that borrows at the rate of `percent`, if what was borrowed before will be paid for
/// within `ahead_ns` of the clock. The error is the time at which to ask again. Nothing is saved up, and no
/// debt counts as longer than `longest_ns`.
pub(crate) fn borrow(
    word: &AtomicU64,
    now_ns: u64,
    cost_ns: u64,
    percent: u8,
    [ahead_ns, longest_ns]: [u64; 2],
) -> Result<(), u64> {
    let open = now_ns.saturating_add(ahead_ns);
    let mut found = word.load(Acquire);
    for _ in 0..TRIES {
        if found > open {
            return Err(found.saturating_sub(ahead_ns).min(now_ns.saturating_add(longest_ns)));
        }
        let next = found.max(now_ns).saturating_add(price(cost_ns, percent));
        match word.compare_exchange_weak(found, next, AcqRel, Acquire) {
            Ok(_) => return Ok(()),
            Err(other) => found = other,
        }
    }
    Err(now_ns.saturating_add(STEP_NS))
}

/// Charges what borrowing launches took beyond their estimate, or refunds what they did not take.
pub(crate) fn correct_borrowed(word: &AtomicU64, now_ns: u64, delta_ns: i64, percent: u8) {
    // A refund is worth no more than it was charged, and more may have been lent then.
    let amount = price(delta_ns.unsigned_abs(), if delta_ns > 0 { percent.max(1) } else { 100 });
    change(word, |found| {
        if delta_ns > 0 { found.max(now_ns).saturating_add(amount) } else { found.saturating_sub(amount) }
    });
}

/// Changes a word, unless others change it all the while.
pub(crate) fn change(word: &AtomicU64, next: impl Fn(u64) -> u64) {
    let mut found = word.load(Acquire);
    for _ in 0..TRIES {
        match word.compare_exchange_weak(found, next(found), AcqRel, Acquire) {
            Ok(_) => return,
            Err(other) => found = other,
        }
    }
}

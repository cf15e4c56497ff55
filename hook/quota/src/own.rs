//! A process's own account of its GPU time, in its own memory.
//!
//! The share's account is in the region, which every process of the share can write. So each process also
//! counts its own launches, by the same rules, and makes only those that both accounts allow. Nobody else can
//! write what this account knows: the process's launches, what its events showed, its quota, and what the
//! node agent lends. (The last two come from files that containers cannot write.) So a process has at most
//! its share's part of the GPU and [`OWN_BURST_NS`], whatever the region says. Where it has neighbours, it
//! cannot know how much of its kernels' time was its own; [`crate::wall`] bounds that.
//!
//! Where nobody writes into the region, this account is never ahead of the share's, which has the same
//! charges and those of the other processes. So it delays nobody: it can save up more, and it follows the
//! agent's corrections only as far as they can concern this process.

use crate::gate::BURST_NS;
use crate::grant::Grant;
use crate::lease::Lease;
use crate::meter::Seen;
use crate::rate::{self, Rate, price};
use crate::wall::Wall;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU64};

/// GPU time that a process can save up, and so have beyond its share's rate by its own account, in
/// nanoseconds.
pub const OWN_BURST_NS: u64 = 100_000_000;

/// How far a process may be ahead, by its own account, of what was lent to it, in nanoseconds of the clock:
/// it does not know what other processes of its share are refunded.
pub const OWN_AHEAD_NS: u64 = 100_000_000;

/// The most of the agent's corrections that is applied at a time, in nanoseconds of GPU time.
pub(crate) const MOST_TOLD_NS: i64 = 10_000_000_000;

/// The agent's corrections that have been applied.
///
/// Corrections follow from what the share's processes logged in the region. So they count to a process only
/// within what it knows itself: it was charged no less than nothing for what it logged, and had no more than
/// all its wall time.
struct Told {
    /// The sum of corrections as last read; wraps.
    seen: AtomicU64,
    has_begun: AtomicBool,
    /// GPU time that may still be refunded: what was charged for logged launches.
    may_refund: AtomicU64,
    /// GPU time that may still be charged: the rest of the wall time of logged launches.
    may_charge: AtomicU64,
}

impl Told {
    const fn new() -> Self {
        Self {
            seen: AtomicU64::new(0),
            has_begun: AtomicBool::new(false),
            may_refund: AtomicU64::new(0),
            may_charge: AtomicU64::new(0),
        }
    }

    /// Returns the part of a sum of corrections that is new and counts. Where several threads call, only one
    /// gets it.
    fn take(&self, found_ns: i64) -> i64 {
        if !self.has_begun.load(Acquire) {
            // Corrections from before this process came do not concern it.
            self.seen.store(found_ns as u64, Relaxed);
            self.has_begun.store(true, Release);
            return 0;
        }
        let Some(delta) = untold(&self.seen, found_ns) else { return 0 };
        let budget = if delta > 0 { &self.may_charge } else { &self.may_refund };
        let wanted = delta.unsigned_abs();
        let before = budget.fetch_update(AcqRel, Acquire, |left| Some(left.saturating_sub(wanted)));
        let taken = i64::try_from(before.unwrap_or(0).min(wanted)).unwrap_or(MOST_TOLD_NS);
        if delta > 0 { taken } else { -taken }
    }

    fn note(&self, seen: &Seen) {
        let wall = seen.end_ns.saturating_sub(seen.start_ns);
        let taken = seen.taken_ns.min(wall);
        self.may_refund.fetch_add(taken, Relaxed);
        self.may_charge.fetch_add(wall - taken, Relaxed);
    }
}

/// Returns the part of the agent's corrections that has not been applied to an account. Where several threads
/// call, only one gets it.
pub(crate) fn untold(seen_ns: &AtomicU64, found_ns: i64) -> Option<i64> {
    let before = seen_ns.load(Acquire);
    let delta = (found_ns as u64).wrapping_sub(before) as i64;
    let is_mine = || seen_ns.compare_exchange(before, found_ns as u64, AcqRel, Acquire).is_ok();
    (delta != 0 && is_mine()).then_some(delta.clamp(-MOST_TOLD_NS, MOST_TOLD_NS))
}

/// One process's account on one share.
pub struct Own {
    /// The time at which everything that the process was charged is paid for; 0 = nothing was charged yet.
    until_ns: AtomicU64,
    /// The time at which everything that the process borrowed is paid for.
    borrowed_until_ns: AtomicU64,
    told: Told,
    told_borrowed: Told,
    wall: Wall,
}

impl Default for Own {
    fn default() -> Self {
        Self::new()
    }
}

impl Own {
    /// Returns the account of a process that has launched nothing.
    pub const fn new() -> Self {
        Self {
            until_ns: AtomicU64::new(0),
            borrowed_until_ns: AtomicU64::new(0),
            told: Told::new(),
            told_borrowed: Told::new(),
            wall: Wall::new(),
        }
    }

    const fn rate(percent: u8) -> Rate {
        Rate { percent, burst_ns: OWN_BURST_NS }
    }

    /// Charges `cost_ns` at `percent` if the process's launches so far are paid for. The error is the time at
    /// which they will be.
    pub fn admit(&self, now_ns: u64, cost_ns: u64, percent: u8) -> Result<(), u64> {
        self.wall.ask(now_ns)?;
        self.admit_overdue(now_ns, cost_ns, percent)
    }

    /// Does what [`Own::admit`] does for a launch that has waited as long as any may, and so does not wait
    /// because of [`crate::wall`].
    pub fn admit_overdue(&self, now_ns: u64, cost_ns: u64, percent: u8) -> Result<(), u64> {
        if self.until_ns.load(Relaxed) == 0 {
            // The process has saved up no more than its share can have.
            let begin = now_ns.saturating_sub(price(BURST_NS, percent)).max(1);
            let _ = self.until_ns.compare_exchange(0, begin, AcqRel, Acquire);
        }
        Self::rate(percent).admit(&self.until_ns, now_ns, cost_ns, |_| 0).map(drop)
    }

    /// Charges `cost_ns` of the time that is lent at `percent`, if not too much was borrowed before. The
    /// error is the time at which to ask again.
    pub fn borrow(&self, now_ns: u64, cost_ns: u64, percent: u8) -> Result<(), u64> {
        self.wall.ask(now_ns)?;
        let word = &self.borrowed_until_ns;
        rate::borrow(word, now_ns, cost_ns, percent, [OWN_AHEAD_NS, rate::LONGEST_DEBT_NS])
    }

    /// Charges what the process's launches took beyond their estimate, or refunds what they did not take.
    pub fn correct(&self, now_ns: u64, delta_ns: i64, percent: u8) {
        if delta_ns != 0 {
            Self::rate(percent).correct(&self.until_ns, now_ns, delta_ns);
        }
    }

    /// Charges what borrowing launches took beyond their estimate, or refunds what they did not take.
    pub fn correct_borrowed(&self, now_ns: u64, delta_ns: i64, percent: u8) {
        if delta_ns != 0 {
            rate::correct_borrowed(&self.borrowed_until_ns, now_ns, delta_ns, percent);
        }
    }

    /// Takes back a lease that was charged to this account and not spent.
    pub fn give_back(&self, now_ns: u64, lease: Lease, percent: u8) {
        let refund = i64::try_from(lease.ns).unwrap_or(i64::MAX).saturating_neg();
        if lease.is_borrowed {
            self.correct_borrowed(now_ns, refund, percent);
        } else {
            self.correct(now_ns, refund, percent);
        }
    }

    /// Notes a measurement of this process, which the node agent will settle.
    pub fn note(&self, is_borrowed: bool, seen: &Seen) {
        if is_borrowed { &self.told_borrowed } else { &self.told }.note(seen);
        self.wall.spend(seen.fresh_ns);
    }

    /// Notes that a launch that is not timed will be on the GPU for about `wall_ns`.
    pub fn untimed(&self, wall_ns: u64) {
        self.wall.spend(wall_ns);
    }

    /// Applies what the agent found to be charged wrongly, and takes in what the agent says of the
    /// neighbours.
    pub fn true_up(&self, now_ns: u64, grant: &Grant, percent: u8) {
        self.wall.look(now_ns, grant, percent);
        self.correct(now_ns, self.told.take(grant.true_up_ns), percent);
        if grant.borrow_percent > 0 {
            let delta = self.told_borrowed.take(grant.borrowed_true_up_ns);
            self.correct_borrowed(now_ns, delta, grant.borrow_percent);
        }
    }
}

#[cfg(test)]
mod tests;

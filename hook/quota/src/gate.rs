//! The compute gate: when a share's next launch may go to the GPU.
//!
//! A share of `percent` pays for GPU time at that rate. Its state is one word in the region, the instant of
//! the monotonic clock at which everything charged so far is paid for. A launch may go once that instant has
//! come, and moves it on by its cost divided by the rate; at most [`BURST_NS`] of GPU time can be saved up.
//! What a launch really took is charged or refunded later, by [`correct`].
//!
//! One word cannot be half written: a process that is killed at any time leaves at most the charge of launches
//! that the GPU has or will have run, and time pays for that. Nobody holds anything, so nobody waits for anyone.

use crate::grant::Grant;
use crate::lease::{HOLDERS, Lease, Purse, Room, WORDS as PURSE_WORDS};
use crate::line::{GRACE_NS, LINE_WORDS, Line, STEP_NS, is_within};
use crate::meter::Seen;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// GPU time in nanoseconds that a share can save up: a fifth of what the promise over a window allows, so
/// that windows of ten seconds are off by 0.2 percentage points at the most for it.
pub const BURST_NS: u64 = 20_000_000;

/// No debt lasts longer than this many nanoseconds of the clock: beyond it, the word cannot be (kernels of
/// six seconds at one percent come to it), and it is read as this much.
pub const LONGEST_DEBT_NS: u64 = 600_000_000_000;

/// Longest launch that may borrow: borrowed work is to end soon after its owner comes back.
pub const LONGEST_BORROWED_NS: u64 = 100_000_000;

/// GPU time that a launch may have before its end when it borrows, those that were launched before it included; one
/// that is longer goes alone.
pub const MOST_AHEAD_NS: u64 = 60_000_000;

/// No launch borrows more than is lent in so many nanoseconds: where little is lent, a long launch would hold up
/// those whose time it is.
pub const LONGEST_LOAN_NS: u64 = 400_000_000;

/// How often a word is tried to be changed that others change at the same time. Who writes it all the while, which only
/// somebody can that means harm, has the launch come again, or the correction lost.
pub(crate) const TRIES: usize = 1000;

/// Measurements that the log holds.
pub const LOG_LENGTH: usize = 1024;

/// What an entry says of a measurement beside its times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The process's slot.
    pub slot: u16,
    /// Whether what was charged is what the process had, and not its part by supposition.
    pub is_sure: bool,
    /// Whether it was charged as borrowed.
    pub is_borrowed: bool,
    /// Tells the process's kernels apart: 24 bits.
    pub key: u32,
}

const SURE: u64 = 1 << 32;
const BORROWED: u64 = 1 << 33;
const KEY_SHIFT: u32 = 40;

impl Mark {
    /// As one word of an entry.
    pub fn word(self) -> u64 {
        let sure = if self.is_sure { SURE } else { 0 };
        let borrowed = if self.is_borrowed { BORROWED } else { 0 };
        u64::from(self.slot) | sure | borrowed | u64::from(self.key) << KEY_SHIFT
    }

    /// From one; bits that have no meaning yet are left out.
    pub fn of(word: u64) -> Self {
        Self {
            slot: word as u16,
            is_sure: word & SURE != 0,
            is_borrowed: word & BORROWED != 0,
            key: (word >> KEY_SHIFT) as u32,
        }
    }
}

/// One measured stretch of GPU work, for the node agent: it sees all processes of the GPU and knows better how
/// much of a stretch was the process's own.
#[repr(C)]
pub struct Entry {
    /// Nanoseconds of the monotonic clock.
    pub start_ns: AtomicU64,
    /// The same; 0 while the entry is being written.
    pub end_ns: AtomicU64,
    /// What was charged for it.
    pub taken_ns: AtomicU64,
    /// A [`Mark`].
    pub mark: AtomicU64,
}

/// The compute side of a region; zeros are a share that has never launched.
#[repr(C, align(64))]
pub struct Compute {
    /// Nanoseconds of the monotonic clock at which everything charged is paid for.
    pub paid_until_ns: AtomicU64,
    /// GPU time charged so far, borrowed time and corrections included, in nanoseconds; wraps.
    pub charged_ns: AtomicU64,
    /// Launches that had to wait.
    pub delayed: AtomicU64,
    /// The same as `paid_until_ns` for borrowed time.
    pub borrowed_until_ns: AtomicU64,
    /// GPU time charged as borrowed so far; wraps.
    pub borrowed_ns: AtomicU64,
    /// How much of the agent's corrections has been charged; wraps.
    pub trued_ns: AtomicU64,
    /// Entries ever written to the log.
    pub logged: AtomicU64,
    /// GPU time leased for short launches, which are not logged; wraps.
    pub leased_ns: AtomicU64,
    /// The newest measurements: entry `n` is at `n % LOG_LENGTH`.
    pub log: [Entry; LOG_LENGTH],
    /// How much of the agent's corrections of borrowed time has been charged; wraps.
    pub trued_borrowed_ns: AtomicU64,
    /// Who waits.
    pub line: Line,
    /// How often a process has come to the share, or was found to be gone; wraps.
    pub members: AtomicU64,
    reserved1: [AtomicU64; 6],
    /// The leases of the processes in the first slots.
    pub purses: [Purse; HOLDERS],
    reserved2: [AtomicU64; RESERVED],
}

/// Words that have no meaning yet.
const RESERVED: usize = 16384 - 16 - 4 * LOG_LENGTH - LINE_WORDS - PURSE_WORDS;

const _: () = assert!(size_of::<Compute>() == 131_072);

impl Default for Compute {
    fn default() -> Self {
        Self::new()
    }
}

impl Compute {
    /// A share that has never launched.
    pub const fn new() -> Self {
        Self {
            paid_until_ns: AtomicU64::new(0),
            charged_ns: AtomicU64::new(0),
            delayed: AtomicU64::new(0),
            borrowed_until_ns: AtomicU64::new(0),
            borrowed_ns: AtomicU64::new(0),
            trued_ns: AtomicU64::new(0),
            logged: AtomicU64::new(0),
            leased_ns: AtomicU64::new(0),
            log: [const {
                Entry {
                    start_ns: AtomicU64::new(0),
                    end_ns: AtomicU64::new(0),
                    taken_ns: AtomicU64::new(0),
                    mark: AtomicU64::new(0),
                }
            }; LOG_LENGTH],
            trued_borrowed_ns: AtomicU64::new(0),
            line: Line::new(),
            members: AtomicU64::new(0),
            reserved1: [const { AtomicU64::new(0) }; 6],
            purses: [const { Purse::new() }; HOLDERS],
            reserved2: [const { AtomicU64::new(0) }; RESERVED],
        }
    }
}

/// What the gate answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The launch may go and is charged.
    Go,
    /// It may be asked again at this time. Refunds can make it earlier.
    Wait(u64),
}

/// Clock time in which `percent` of the GPU pays for `cost_ns`, rounded up.
fn price(cost_ns: u64, percent: u8) -> u64 {
    cost_ns.saturating_mul(100).div_ceil(u64::from(percent.clamp(1, 100)))
}

/// Moves `paid_until` on by a cost, from what can be saved up at the earliest.
fn charged(paid_until: u64, now_ns: u64, cost_ns: u64, percent: u8) -> u64 {
    let earliest = now_ns.saturating_sub(price(BURST_NS, percent));
    let latest = now_ns.saturating_add(LONGEST_DEBT_NS);
    paid_until.clamp(earliest, latest).saturating_add(price(cost_ns, percent)).min(latest)
}

/// On which terms a share's launches may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Percent of the GPU, 1 to 100.
    pub percent: u8,
    /// Percent that may be borrowed on top; 0 = none.
    pub borrow_percent: u8,
}

/// What [`enter`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrance {
    /// It may go on the share's own quota, with so many nanoseconds of lease.
    Own(u64),
    /// It may go on borrowed time, with so many nanoseconds of lease.
    Borrowed(u64),
    /// It may be asked again at this time.
    Wait(u64),
}

/// What a launch asks the gate for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// The process's slot, for its place in the line; whoever asks the gate fills it in.
    pub slot: usize,
    /// Nanoseconds that the launch is charged.
    pub cost_ns: u64,
    /// Whether it is one of those that leases are for, which are not logged one by one.
    pub is_short: bool,
    /// How long a lease may be.
    pub room: Room,
    /// Whether that has been measured: only such launches may borrow.
    pub is_known: bool,
    /// GPU time of the process's launches that have not ended.
    pub ahead_ns: u64,
}

impl Ask {
    /// How much of what lies ahead has to end first.
    fn excess_ns(&self) -> u64 {
        self.ahead_ns.saturating_sub(MOST_AHEAD_NS.saturating_sub(self.cost_ns))
    }
}

/// Asks for a launch: on the share's own quota first, then on borrowed time. Where the gate has just opened, those of
/// the share's processes that wait longer come first.
pub fn enter(compute: &Compute, now_ns: u64, ask: Ask, terms: Terms) -> Entrance {
    let line = &compute.line;
    let entrance = if has_just_opened(compute, now_ns, terms) && line.is_behind(ask.slot, now_ns) {
        Entrance::Wait(now_ns.saturating_add(STEP_NS))
    } else {
        enter_at_once(compute, now_ns, ask, terms)
    };
    match entrance {
        Entrance::Wait(_) => line.wait(ask.slot, now_ns),
        Entrance::Own(_) | Entrance::Borrowed(_) => line.leave(ask.slot),
    }
    entrance
}

/// Whether the gate through which the next launch would go has been open for less than the grace.
fn has_just_opened(compute: &Compute, now_ns: u64, terms: Terms) -> bool {
    let own = compute.paid_until_ns.load(Acquire);
    let until =
        if own > now_ns && terms.borrow_percent > 0 { compute.borrowed_until_ns.load(Acquire) } else { own };
    is_within(until, now_ns, GRACE_NS)
}

fn enter_at_once(compute: &Compute, now_ns: u64, ask: Ask, terms: Terms) -> Entrance {
    let Ask { cost_ns, .. } = ask;
    // Near its limit a share has nothing saved up, and a long lease would be a debt that all its processes pay.
    let lease = |saved_ns: u64| ask.room.lease_ns(saved_ns.saturating_sub(cost_ns));
    let entrance = match admit_with(compute, now_ns, cost_ns, terms.percent, lease) {
        Ok(lease) => Entrance::Own(lease),
        Err(until) if terms.borrow_percent == 0 || !ask.is_known => Entrance::Wait(until),
        Err(until) => match ask.excess_ns() {
            0 => {
                // Nothing is saved up there, so whoever wakes late has lost that time.
                let lease = ask.room.lease_ns(u64::MAX);
                match borrow(compute, now_ns, cost_ns.saturating_add(lease), terms.borrow_percent) {
                    Admission::Go => Entrance::Borrowed(lease),
                    Admission::Wait(other) => Entrance::Wait(until.min(other)),
                }
            }
            excess => Entrance::Wait(until.min(now_ns.saturating_add(excess))),
        },
    };
    if let Entrance::Own(lease) | Entrance::Borrowed(lease) = entrance
        && ask.is_short
    {
        compute.leased_ns.fetch_add(cost_ns.saturating_add(lease), Relaxed);
    }
    entrance
}

/// Gives back a lease that was taken out of a purse.
pub fn give_back(compute: &Compute, now_ns: u64, lease: Lease, percent: u8) {
    let refund = i64::try_from(lease.ns).unwrap_or(i64::MAX).saturating_neg();
    match refund {
        0 => return,
        _ if lease.is_borrowed => correct_borrowed(compute, now_ns, refund, percent),
        _ => correct(compute, now_ns, refund, percent),
    }
    compute.leased_ns.fetch_sub(lease.ns, Relaxed);
}

/// Asks for a launch that borrows at the rate of `percent` (1 to 100), and charges it if it may go. Nothing is
/// saved up for borrowing, and a launch must not be longer than [`LONGEST_BORROWED_NS`].
pub fn borrow(compute: &Compute, now_ns: u64, cost_ns: u64, percent: u8) -> Admission {
    if cost_ns > LONGEST_BORROWED_NS || percent == 0 || price(cost_ns, percent) > LONGEST_LOAN_NS {
        return Admission::Wait(u64::MAX);
    }
    let mut found = compute.borrowed_until_ns.load(Acquire);
    for _ in 0..TRIES {
        let latest = now_ns.saturating_add(price(LONGEST_BORROWED_NS, percent));
        if found > now_ns {
            return Admission::Wait(found.min(latest));
        }
        let next = now_ns.saturating_add(price(cost_ns, percent));
        match compute.borrowed_until_ns.compare_exchange_weak(found, next, AcqRel, Acquire) {
            Ok(_) => {
                compute.charged_ns.fetch_add(cost_ns, Relaxed);
                compute.borrowed_ns.fetch_add(cost_ns, Relaxed);
                return Admission::Go;
            }
            Err(other) => found = other,
        }
    }
    Admission::Wait(now_ns.saturating_add(STEP_NS))
}

/// Charges what borrowing launches took beyond their estimate, or refunds what they did not take.
pub fn correct_borrowed(compute: &Compute, now_ns: u64, delta_ns: i64, percent: u8) {
    // A refund is worth no more than it was charged, and more may have been lent then.
    let amount = price(delta_ns.unsigned_abs(), if delta_ns > 0 { percent.max(1) } else { 100 });
    let change = |found: u64| {
        if delta_ns > 0 { found.max(now_ns).saturating_add(amount) } else { found.saturating_sub(amount) }
    };
    let until = &compute.borrowed_until_ns;
    let mut found = until.load(Acquire);
    for _ in 0..TRIES {
        match until.compare_exchange_weak(found, change(found), AcqRel, Acquire) {
            Ok(_) => break,
            Err(other) => found = other,
        }
    }
    compute.charged_ns.fetch_add(delta_ns as u64, Relaxed);
    compute.borrowed_ns.fetch_add(delta_ns as u64, Relaxed);
}

/// Applies what the agent found to be charged wrongly up to now, once for all processes of the share. What was
/// borrowed is put right as soon as the share borrows again. At most ten seconds of GPU time are applied at a time.
pub fn true_up(compute: &Compute, now_ns: u64, grant: &Grant, percent: u8) {
    if let Some(delta) = untrued(&compute.trued_ns, grant.true_up_ns) {
        correct(compute, now_ns, delta, percent);
    }
    if grant.borrow_percent > 0
        && let Some(delta) = untrued(&compute.trued_borrowed_ns, grant.borrowed_true_up_ns)
    {
        correct_borrowed(compute, now_ns, delta, grant.borrow_percent);
    }
}

/// What of the agent's corrections has not been charged; for one caller only.
fn untrued(trued_ns: &AtomicU64, found_ns: i64) -> Option<i64> {
    const MOST: i64 = 10_000_000_000;
    let before = trued_ns.load(Acquire);
    let delta = (found_ns as u64).wrapping_sub(before) as i64;
    let is_mine = || trued_ns.compare_exchange(before, found_ns as u64, AcqRel, Acquire).is_ok();
    (delta != 0 && is_mine()).then_some(delta.clamp(-MOST, MOST))
}

/// Writes a measurement to the log.
pub fn log(compute: &Compute, slot: u16, is_borrowed: bool, seen: &Seen) {
    let mark = Mark { slot, is_sure: seen.is_sure, is_borrowed, key: seen.key };
    let number = compute.logged.fetch_add(1, AcqRel);
    if let Some(entry) = compute.log.get(number as usize % LOG_LENGTH) {
        entry.end_ns.store(0, Release);
        entry.start_ns.store(seen.start_ns, Relaxed);
        entry.taken_ns.store(seen.taken_ns, Relaxed);
        entry.mark.store(mark.word(), Relaxed);
        entry.end_ns.store(seen.end_ns, Release);
    }
}

/// Asks for a launch of `cost_ns` at the rate of `percent` (1 to 100), and charges it if it may go.
pub fn admit(compute: &Compute, now_ns: u64, cost_ns: u64, percent: u8) -> Admission {
    match admit_with(compute, now_ns, cost_ns, percent, |_| 0) {
        Ok(_) => Admission::Go,
        Err(until) => Admission::Wait(until),
    }
}

/// The same with a lease on top, as long as `lease` says of the GPU time that is saved up; how long it is, or when to
/// ask again.
fn admit_with(
    compute: &Compute,
    now_ns: u64,
    cost_ns: u64,
    percent: u8,
    lease: impl Fn(u64) -> u64,
) -> Result<u64, u64> {
    let mut found = compute.paid_until_ns.load(Acquire);
    for _ in 0..TRIES {
        if found > now_ns {
            return Err(found.min(now_ns.saturating_add(LONGEST_DEBT_NS)));
        }
        let saved_ns =
            (now_ns - found).min(price(BURST_NS, percent)) / 100 * u64::from(percent.clamp(1, 100));
        let lease_ns = lease(saved_ns);
        let amount_ns = cost_ns.saturating_add(lease_ns);
        let next = charged(found, now_ns, amount_ns, percent);
        match compute.paid_until_ns.compare_exchange_weak(found, next, AcqRel, Acquire) {
            Ok(_) => {
                compute.charged_ns.fetch_add(amount_ns, Relaxed);
                return Ok(lease_ns);
            }
            Err(other) => found = other,
        }
    }
    Err(now_ns.saturating_add(STEP_NS))
}

/// Charges what launches took beyond their estimate, or refunds what they did not take.
pub fn correct(compute: &Compute, now_ns: u64, delta_ns: i64, percent: u8) {
    if delta_ns == 0 {
        return;
    }
    let amount = delta_ns.unsigned_abs();
    let mut found = compute.paid_until_ns.load(Acquire);
    for _ in 0..TRIES {
        let next = if delta_ns > 0 {
            charged(found, now_ns, amount, percent)
        } else {
            found.saturating_sub(price(amount, percent))
        };
        match compute.paid_until_ns.compare_exchange_weak(found, next, AcqRel, Acquire) {
            Ok(_) => break,
            Err(other) => found = other,
        }
    }
    compute.charged_ns.fetch_add(delta_ns as u64, Relaxed);
}

#[cfg(test)]
mod tests;

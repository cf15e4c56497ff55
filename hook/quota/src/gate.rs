//! The compute gate: it decides when a share's next launch may go to the GPU.
//!
//! A share of `percent` pays for GPU time at that rate. Its state is one word in the region: the instant of
//! the monotonic clock at which everything charged so far is paid for. A launch may go once that instant has
//! come, and moves the instant on by its cost divided by the rate. At most [`BURST_NS`] of GPU time can be
//! saved up. What a launch really took is charged or refunded later, by [`correct`].
//!
//! One word cannot be half written: a process that is killed at any time leaves at most the charge of
//! launches that the GPU has run or will run, and time pays for that. Nobody holds anything, so nobody waits
//! for anyone.

use crate::grant::Grant;
use crate::lease::{HOLDERS, Lease, Purse, Room, WORDS as PURSE_WORDS};
use crate::line::{GRACE_NS, LINE_WORDS, Line, STEP_NS, is_within};
use crate::meter::Seen;
use crate::own::{Own, untold};
pub use crate::rate::LONGEST_DEBT_NS;
use crate::rate::{self, Rate, price};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// GPU time that a share can save up, in nanoseconds. It is a fifth of what the promise over a window allows,
/// so windows of ten seconds are off by at most 0.2 percentage points because of it.
pub const BURST_NS: u64 = 20_000_000;

/// The longest launch that may borrow, in nanoseconds: borrowed work is to end soon after the owner of the
/// time comes back.
pub const LONGEST_BORROWED_NS: u64 = 100_000_000;

/// The most GPU time between now and the end of a launch that borrows, in nanoseconds, earlier launches
/// included. A longer launch goes alone.
pub const MOST_AHEAD_NS: u64 = 60_000_000;

/// The most that a launch borrows: what is lent in this many nanoseconds. Where little is lent, a long launch
/// would delay those whose time it is.
pub const LONGEST_LOAN_NS: u64 = 400_000_000;

/// The number of measurements in the log.
pub const LOG_LENGTH: usize = 1024;

/// What a log entry says about a measurement beside its times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The process's slot.
    pub slot: u16,
    /// True if the charge is what the process really had, and not its assumed part.
    pub is_sure: bool,
    /// True if it was charged as borrowed time.
    pub is_borrowed: bool,
    /// A number that tells the process's kernels apart; 24 bits.
    pub key: u32,
}

const SURE: u64 = 1 << 32;
const BORROWED: u64 = 1 << 33;
const KEY_SHIFT: u32 = 40;

impl Mark {
    /// Returns the mark as one word of a log entry.
    pub fn word(self) -> u64 {
        let sure = if self.is_sure { SURE } else { 0 };
        let borrowed = if self.is_borrowed { BORROWED } else { 0 };
        u64::from(self.slot) | sure | borrowed | u64::from(self.key) << KEY_SHIFT
    }

    /// Returns the mark in a word of a log entry; bits that have no meaning yet are ignored.
    pub fn of(word: u64) -> Self {
        Self {
            slot: word as u16,
            is_sure: word & SURE != 0,
            is_borrowed: word & BORROWED != 0,
            key: (word >> KEY_SHIFT) as u32,
        }
    }
}

/// One measured stretch of GPU work, for the node agent: the agent sees all processes of the GPU and knows
/// better how much of the stretch was the process's own.
#[repr(C)]
pub struct Entry {
    /// Start of the stretch, in nanoseconds of the monotonic clock.
    pub start_ns: AtomicU64,
    /// End of the stretch, in nanoseconds of the monotonic clock; 0 while the entry is being written.
    pub end_ns: AtomicU64,
    /// GPU time charged for the stretch, in nanoseconds.
    pub taken_ns: AtomicU64,
    /// The [`Mark`] of the measurement.
    pub mark: AtomicU64,
}

/// The compute side of a region; zeros are a share that has never launched.
#[repr(C, align(64))]
pub struct Compute {
    /// The time at which everything charged is paid for, in nanoseconds of the monotonic clock.
    pub paid_until_ns: AtomicU64,
    /// GPU time charged so far, borrowed time and corrections included, in nanoseconds; wraps.
    pub charged_ns: AtomicU64,
    /// The number of launches that had to wait.
    pub delayed: AtomicU64,
    /// The time at which everything borrowed is paid for, in nanoseconds of the monotonic clock.
    pub borrowed_until_ns: AtomicU64,
    /// GPU time charged as borrowed so far, in nanoseconds; wraps.
    pub borrowed_ns: AtomicU64,
    /// The part of the agent's corrections that has been charged, in nanoseconds; wraps.
    pub trued_ns: AtomicU64,
    /// The number of entries ever written to the log.
    pub logged: AtomicU64,
    /// GPU time leased for short launches, which are not logged, in nanoseconds; wraps.
    pub leased_ns: AtomicU64,
    /// The newest measurements: entry `n` is at `n % LOG_LENGTH`.
    pub log: [Entry; LOG_LENGTH],
    /// The part of the agent's corrections of borrowed time that has been charged, in nanoseconds; wraps.
    pub trued_borrowed_ns: AtomicU64,
    /// The processes that wait.
    pub line: Line,
    /// The number of times that a process joined the share or was found to be gone; wraps.
    pub members: AtomicU64,
    reserved1: [AtomicU64; 6],
    /// The leases of the processes in the first slots.
    pub purses: [Purse; HOLDERS],
    reserved2: [AtomicU64; RESERVED],
}

/// The number of words that have no meaning yet.
const RESERVED: usize = 16384 - 16 - 4 * LOG_LENGTH - LINE_WORDS - PURSE_WORDS;

const _: () = assert!(size_of::<Compute>() == 131_072);

impl Default for Compute {
    fn default() -> Self {
        Self::new()
    }
}

impl Compute {
    /// Returns a share that has never launched.
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

/// The answer of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The launch may go and is charged.
    Go,
    /// The launch may be asked for again at this time. Refunds can make the time earlier.
    Wait(u64),
}

/// Returns the rate at which a share pays.
const fn rate(percent: u8) -> Rate {
    Rate { percent, burst_ns: BURST_NS }
}

/// The terms on which a share's launches may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Percent of the GPU, 1 to 100.
    pub percent: u8,
    /// Percent of the GPU that may be borrowed on top; 0 = none.
    pub borrow_percent: u8,
}

/// The answer of [`enter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrance {
    /// The launch may go on the share's own quota, with a lease of this many nanoseconds.
    Own(u64),
    /// The launch may go on borrowed time, with a lease of this many nanoseconds.
    Borrowed(u64),
    /// The launch may be asked for again at this time.
    Wait(u64),
}

/// A launch's request to the gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// The process's slot, for its place in the line; the caller of the gate fills it in.
    pub slot: usize,
    /// The charge of the launch, in nanoseconds of GPU time.
    pub cost_ns: u64,
    /// True if leases are meant for launches like this one, which are not logged one by one.
    pub is_short: bool,
    /// Room for a lease.
    pub room: Room,
    /// True if the cost has been measured: only such launches may borrow.
    pub is_known: bool,
    /// GPU time of the process's launches that have not ended, in nanoseconds.
    pub ahead_ns: u64,
}

impl Ask {
    /// Returns how much of the work ahead has to end first, in nanoseconds of GPU time.
    fn excess_ns(&self) -> u64 {
        self.ahead_ns.saturating_sub(MOST_AHEAD_NS.saturating_sub(self.cost_ns))
    }
}

/// Asks for a launch: on the share's own quota first, then on borrowed time; the process's own account has to
/// agree as well. Where the gate has just opened, processes of the share that have waited longer come first.
pub fn enter(compute: &Compute, own: &Own, now_ns: u64, ask: Ask, terms: Terms) -> Entrance {
    let line = &compute.line;
    let entrance = if has_just_opened(compute, now_ns, terms) && line.is_behind(ask.slot, now_ns) {
        Entrance::Wait(now_ns.saturating_add(STEP_NS))
    } else {
        enter_at_once(compute, own, now_ns, ask, terms)
    };
    match entrance {
        Entrance::Wait(_) => line.wait(ask.slot, now_ns),
        Entrance::Own(_) | Entrance::Borrowed(_) => line.leave(ask.slot),
    }
    entrance
}

/// Returns true if the gate through which the next launch would go has been open for less than the grace.
fn has_just_opened(compute: &Compute, now_ns: u64, terms: Terms) -> bool {
    let own = compute.paid_until_ns.load(Acquire);
    let until =
        if own > now_ns && terms.borrow_percent > 0 { compute.borrowed_until_ns.load(Acquire) } else { own };
    is_within(until, now_ns, GRACE_NS)
}

/// Lets a launch go that has waited as long as any does for what others have launched or for wall time,
/// unless it has to wait for what its own process was charged. The launch is charged and takes no lease.
pub fn enter_overdue(compute: &Compute, own: &Own, now_ns: u64, ask: Ask, terms: Terms) -> Entrance {
    if let Err(until) = own.admit_overdue(now_ns, ask.cost_ns, terms.percent) {
        return Entrance::Wait(until);
    }
    compute.line.leave(ask.slot);
    correct(compute, now_ns, i64::try_from(ask.cost_ns).unwrap_or(i64::MAX), terms.percent);
    Entrance::Own(0)
}

fn enter_at_once(compute: &Compute, own: &Own, now_ns: u64, ask: Ask, terms: Terms) -> Entrance {
    let Ask { cost_ns, .. } = ask;
    // Near its limit a share has nothing saved up, and a long lease would be a debt that all its processes
    // pay.
    let lease = |saved_ns: u64| ask.room.lease_ns(saved_ns.saturating_sub(cost_ns));
    let admitted = admit_with(compute, now_ns, cost_ns, terms.percent, lease).and_then(|lease| {
        let amount_ns = cost_ns.saturating_add(lease);
        own.admit(now_ns, amount_ns, terms.percent).map(|()| lease).inspect_err(|_| {
            correct(compute, now_ns, refund_of(amount_ns), terms.percent);
        })
    });
    let entrance = match admitted {
        Ok(lease) => Entrance::Own(lease),
        Err(until) if terms.borrow_percent == 0 || !ask.is_known => Entrance::Wait(until),
        Err(until) => match ask.excess_ns() {
            0 => {
                // Borrowing saves nothing up, so a process that wakes late has lost that time: the lease is
                // as long as there is room for.
                let lease = ask.room.lease_ns(u64::MAX);
                let amount_ns = cost_ns.saturating_add(lease);
                match borrow_with(compute, own, now_ns, amount_ns, terms.borrow_percent) {
                    Ok(()) => Entrance::Borrowed(lease),
                    Err(other) => Entrance::Wait(until.min(other)),
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

/// Returns the correction that takes a charge back.
fn refund_of(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX).saturating_neg()
}

/// Borrows on both accounts or on neither. The error is the time at which to ask again.
fn borrow_with(compute: &Compute, own: &Own, now_ns: u64, amount_ns: u64, percent: u8) -> Result<(), u64> {
    if let Admission::Wait(until) = borrow(compute, now_ns, amount_ns, percent) {
        return Err(until);
    }
    own.borrow(now_ns, amount_ns, percent)
        .inspect_err(|_| correct_borrowed(compute, now_ns, refund_of(amount_ns), percent))
}

/// Gives back to the share a lease that was taken out of a purse.
pub fn give_back(compute: &Compute, now_ns: u64, lease: Lease, percent: u8) {
    match refund_of(lease.ns) {
        0 => return,
        refund if lease.is_borrowed => correct_borrowed(compute, now_ns, refund, percent),
        refund => correct(compute, now_ns, refund, percent),
    }
    compute.leased_ns.fetch_sub(lease.ns, Relaxed);
}

/// Asks for a launch that borrows at the rate of `percent` (1 to 100), and charges the launch if it may go.
/// Nothing is saved up for borrowing, and a launch must not be longer than [`LONGEST_BORROWED_NS`].
pub fn borrow(compute: &Compute, now_ns: u64, cost_ns: u64, percent: u8) -> Admission {
    if cost_ns > LONGEST_BORROWED_NS || percent == 0 || price(cost_ns, percent) > LONGEST_LOAN_NS {
        return Admission::Wait(u64::MAX);
    }
    let longest_ns = price(LONGEST_BORROWED_NS, percent);
    match rate::borrow(&compute.borrowed_until_ns, now_ns, cost_ns, percent, [0, longest_ns]) {
        Ok(()) => {
            compute.charged_ns.fetch_add(cost_ns, Relaxed);
            compute.borrowed_ns.fetch_add(cost_ns, Relaxed);
            Admission::Go
        }
        Err(until) => Admission::Wait(until),
    }
}

/// Charges what borrowing launches took beyond their estimate, or refunds what they did not take.
pub fn correct_borrowed(compute: &Compute, now_ns: u64, delta_ns: i64, percent: u8) {
    rate::correct_borrowed(&compute.borrowed_until_ns, now_ns, delta_ns, percent);
    compute.charged_ns.fetch_add(delta_ns as u64, Relaxed);
    compute.borrowed_ns.fetch_add(delta_ns as u64, Relaxed);
}

/// Applies the agent's corrections up to now: once for all processes of the share, and to the process's own
/// account. Corrections of borrowed time are applied as soon as the share borrows again. At most ten seconds
/// of GPU time are applied at a time.
pub fn true_up(compute: &Compute, own: &Own, now_ns: u64, grant: &Grant, percent: u8) {
    own.true_up(now_ns, grant, percent);
    if let Some(delta) = untold(&compute.trued_ns, grant.true_up_ns) {
        correct(compute, now_ns, delta, percent);
    }
    if grant.borrow_percent > 0
        && let Some(delta) = untold(&compute.trued_borrowed_ns, grant.borrowed_true_up_ns)
    {
        correct_borrowed(compute, now_ns, delta, grant.borrow_percent);
    }
}

/// Writes a measurement to the log, and notes it in the process's own account.
pub fn log(compute: &Compute, own: &Own, slot: u16, is_borrowed: bool, seen: &Seen) {
    own.note(is_borrowed, seen);
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

/// Asks for a launch of `cost_ns` at the rate of `percent` (1 to 100), and charges the launch if it may go.
pub fn admit(compute: &Compute, now_ns: u64, cost_ns: u64, percent: u8) -> Admission {
    match admit_with(compute, now_ns, cost_ns, percent, |_| 0) {
        Ok(_) => Admission::Go,
        Err(until) => Admission::Wait(until),
    }
}

/// Does what [`admit`] does, with a lease on top whose length `lease` gives for the GPU time saved up.
/// Returns that length; the error is the time at which to ask again.
fn admit_with(
    compute: &Compute,
    now_ns: u64,
    cost_ns: u64,
    percent: u8,
    lease: impl Fn(u64) -> u64,
) -> Result<u64, u64> {
    let (lease_ns, amount_ns) = rate(percent).admit(&compute.paid_until_ns, now_ns, cost_ns, lease)?;
    compute.charged_ns.fetch_add(amount_ns, Relaxed);
    Ok(lease_ns)
}

/// Charges what launches took beyond their estimate, or refunds what they did not take.
pub fn correct(compute: &Compute, now_ns: u64, delta_ns: i64, percent: u8) {
    if delta_ns == 0 {
        return;
    }
    rate(percent).correct(&compute.paid_until_ns, now_ns, delta_ns);
    compute.charged_ns.fetch_add(delta_ns as u64, Relaxed);
}

#[cfg(test)]
mod tests;

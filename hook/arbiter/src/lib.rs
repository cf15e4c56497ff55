//! The node agent's decisions about the GPU time of the shares on one GPU, every few hundredths of a second:
//! which shares may borrow how much idle time, and whose the wall time of their kernels really was.
//!
//! [`Arbiter::tick`] makes pure decisions; [`files`] reads regions and writes grants. Nothing here can take
//! time from a share that its quota promises: a grant only adds, and what is charged afterwards is what a
//! share's own kernels took.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests"))]

mod beside;
mod divide;
pub mod files;
mod habits;
mod lend;
mod settle;
mod slices;

use aliquot_quota::grant::Grant;
use beside::Beside;
use lend::Use;
use settle::Settlement;
use std::collections::BTreeMap;

/// The time between two calls of [`Arbiter::tick`], in nanoseconds.
pub const TICK_NS: u64 = 20_000_000;

/// The time for which a grant holds, in nanoseconds: a few ticks, so that a share whose agent is gone falls
/// back to its quota.
pub const VALID_NS: u64 = 80_000_000;

/// A measured stretch of GPU work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The process, by its slot.
    pub slot: u64,
    /// A number that tells the process's kernels apart.
    pub key: u32,
    /// Start of the stretch, in nanoseconds of the monotonic clock.
    pub start_ns: u64,
    /// End of the stretch, in nanoseconds of the monotonic clock.
    pub end_ns: u64,
    /// GPU time charged for the stretch, in nanoseconds.
    pub taken_ns: u64,
    /// True if the charge is what the process really had.
    pub is_sure: bool,
    /// True if it was charged as borrowed.
    pub is_borrowed: bool,
}

impl Stretch {
    /// Returns the length in nanoseconds on the clock; 1 if start and end are impossible.
    fn length(&self) -> f64 {
        self.end_ns.saturating_sub(self.start_ns).max(1) as f64
    }
}

/// A share as its quota and region show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// The name of the share.
    pub id: String,
    /// Percent of the GPU; 0 = no limit.
    pub percent: u8,
    /// True if the share may borrow.
    pub is_soft: bool,
    /// Order among borrowers; higher goes first.
    pub priority: i8,
    /// GPU time charged so far, borrowed time included, in nanoseconds; wraps.
    pub charged_ns: u64,
    /// GPU time borrowed so far, in nanoseconds; wraps.
    pub borrowed_ns: u64,
    /// GPU time leased for short launches so far, in nanoseconds; wraps.
    pub leased_ns: u64,
    /// The number of launches that had to wait so far.
    pub delayed: u64,
    /// Measurements since the last tick.
    pub stretches: Vec<Stretch>,
    /// Slots of processes whose launches may still run.
    pub pending: Vec<u64>,
}

/// The arbiter of one GPU.
#[derive(Debug, Default)]
pub struct Arbiter {
    uses: BTreeMap<String, Use>,
    settlement: Settlement,
    beside: Beside,
    /// Percent of the GPU that each share may borrow.
    lent: BTreeMap<String, u8>,
    slice_us: u32,
    /// Part of the GPU that belongs to shares whose regions are not understood.
    unseen: f64,
}

/// Returns true if anything has to be decided about the shares of a GPU. A share that is alone on it and may
/// not borrow has all the wall time of its kernels, and where no share has a process nobody takes any time.
/// For each share, `shares` has whether it may borrow and how many processes it has.
pub fn is_needed(shares: impl IntoIterator<Item = (bool, usize)>) -> bool {
    let (mut any, mut alone, mut is_used) = (false, true, false);
    for (is_soft, processes) in shares {
        alone = alone && !any && !is_soft && processes < 2;
        is_used |= processes > 0;
        any = true;
    }
    is_used && !alone
}

impl Arbiter {
    /// Returns an arbiter that knows nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an arbiter of a GPU whose time slices are known, in microseconds; 0 = not known.
    pub fn with_slices(slice_us: u32) -> Self {
        Self { slice_us, ..Self::default() }
    }

    /// Notes the quotas, in percent, of shares on the GPU whose regions are not understood: such shares get
    /// no grants, so they have their quotas and nothing else.
    pub fn note_unseen(&mut self, percents: &[u8]) {
        let part = |percent: &u8| if *percent == 0 { 1.0 } else { f64::from(*percent) / 100.0 };
        self.unseen = percents.iter().map(part).sum();
    }

    /// Returns the part of the GPU that a share may have.
    fn entitled(&self, share: &Share) -> f64 {
        let lent = self.lent.get(&share.id).copied().unwrap_or(0);
        let percent = if share.percent == 0 { 100 } else { share.percent };
        f64::from(percent.saturating_add(lent).min(100)) / 100.0
    }

    /// Looks at all shares of the GPU, and returns the grant of each.
    pub fn tick(&mut self, now_ns: u64, shares: &[Share]) -> Vec<Grant> {
        self.uses.retain(|id, _| shares.iter().any(|share| share.id == *id));
        for share in shares {
            self.uses.entry(share.id.clone()).or_insert_with(|| Use::of(share)).note(now_ns, share);
        }
        let rates: Vec<f32> =
            shares.iter().map(|share| self.uses.get(&share.id).map_or(0.0, Use::rate)).collect();
        let entitled: Vec<f64> = shares.iter().map(|share| self.entitled(share)).collect();
        // A share's own claim beyond what it may have had is not believed.
        let limits = entitled.iter().map(|part| *part as f32);
        let rates: Vec<f32> = rates.iter().zip(limits).map(|(rate, most)| rate.min(most)).collect();
        self.settlement.tick(now_ns, shares, &rates, &entitled);
        self.beside.tick(now_ns, shares, &entitled, self.unseen);
        let lent = lend::lend(shares, &self.uses);
        self.lent = shares.iter().zip(&lent).map(|(share, lent)| (share.id.clone(), *lent)).collect();
        let grant = |(share, borrow_percent): (&Share, u8)| {
            let account = self.settlement.account(&share.id);
            Grant {
                valid_until_ns: now_ns.saturating_add(VALID_NS),
                borrow_percent,
                slice_us: self.slice_us,
                own_permille: account.map_or(0, |account| account.own_permille),
                true_up_ns: account.map_or(0, |account| account.true_up_ns),
                borrowed_true_up_ns: account.map_or(0, |account| account.borrowed_true_up_ns),
                beside_ns: self.beside.of(&share.id),
            }
        };
        shares.iter().zip(lent).map(grant).collect()
    }
}

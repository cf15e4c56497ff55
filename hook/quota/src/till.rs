//! The fast path of a launch: what a process may launch without asking the gate.
//!
//! A process takes GPU time from the gate in leases ([`crate::lease`]) and spends them from cells, which
//! threads find by their thread pointer. So a launch of a known small kernel costs one look-up and two
//! subtractions on cache lines of the thread's own: no driver call, no clock, no lock, nothing that other
//! processes use.
//!
//! There are two subtractions because the cells are in the region, where everybody in the share can write. So
//! a process also knows itself what it has charged and not spent (its *backing*), and a launch is paid for by
//! both or by neither. Others may take out of the region's cells, so there may be less in them than is
//! backed; the difference comes back with the next lease.

use crate::lease::{Lease, Purse};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// The number of cells that threads are spread over.
pub const CELLS: usize = 64;
/// The number of costs that can be looked up.
const KEYS: usize = 1024;
/// The number of places in the table in which a key can be.
const REACH: usize = 4;

/// A count of the launches of the few threads that share a cell.
#[repr(align(128))]
struct Turn(AtomicU32);

struct Known {
    key: AtomicU64,
    cost_ns: AtomicU64,
}

/// The known costs of one process on one device, and what backs its leases.
pub struct Till {
    turns: [Turn; CELLS],
    /// Time that the process has charged in leases and not spent, in cells like those of its purse.
    backing: Purse,
    known: [Known; KEYS],
    /// True if every launch is to be shown to the learner.
    watched: AtomicBool,
    /// True if a cost was ever published here; the table of a till that was never used is not touched.
    /// allocated.
    used: AtomicBool,
    /// True while a thread takes a lease: only one does at a time, because the same room must not be used
    /// twice.
    refilled: AtomicBool,
}

impl Default for Till {
    fn default() -> Self {
        Self::new()
    }
}

impl Till {
    /// Returns an empty till.
    pub const fn new() -> Self {
        Self {
            turns: [const { Turn(AtomicU32::new(0)) }; CELLS],
            backing: Purse::new(),
            known: [const { Known { key: AtomicU64::new(0), cost_ns: AtomicU64::new(0) } }; KEYS],
            watched: AtomicBool::new(false),
            used: AtomicBool::new(false),
            refilled: AtomicBool::new(false),
        }
    }

    fn places(&self, key: u64) -> impl Iterator<Item = &Known> {
        let home = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as usize;
        (home..home + REACH).filter_map(|at| self.known.get(at % KEYS))
    }

    /// Returns the cell of a thread, from any number that differs between threads.
    #[inline]
    pub fn cell(thread: u64) -> usize {
        (thread.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
    }

    /// Pays for a launch of `key` from the thread's cell. Returns true if it was paid.
    #[inline]
    pub fn pays(&self, purse: &Purse, cell: usize, key: u64) -> bool {
        if self.watched.load(Relaxed) {
            return false;
        }
        let Some(known) = self.places(key).find(|known| known.key.load(Acquire) == key) else { return false };
        match known.cost_ns.load(Relaxed) {
            0 => false,
            cost => self.spend(purse, cell, cost).is_some(),
        }
    }

    /// Takes `cost_ns` out of a cell of the purse and of its backing, all or nothing. Returns true if that
    /// time was borrowed, or `None` if there was too little.
    #[inline]
    pub fn spend(&self, purse: &Purse, cell: usize, cost_ns: u64) -> Option<bool> {
        let is_borrowed = self.backing.spend(cell, cost_ns)?;
        if purse.spend(cell, cost_ns).is_none() {
            // Somebody has taken out of the purse what is backed.
            self.backing.unspend(cell, Lease { ns: cost_ns, is_borrowed });
            return None;
        }
        Some(is_borrowed)
    }

    /// Returns what backs the leases.
    pub(crate) fn backing(&self) -> &Purse {
        &self.backing
    }

    /// Returns true for one in `of` launches of a cell. Threads of one cell may miss each other's count.
    #[inline]
    pub fn is_turn(&self, cell: usize, of: u32) -> bool {
        self.turns.get(cell).is_none_or(|Turn(count)| {
            let before = count.load(Relaxed);
            count.store(before.wrapping_add(1), Relaxed);
            before.is_multiple_of(of)
        })
    }

    /// Returns the right to take leases, which the calling thread has until it drops it; `None` if another
    /// thread has it.
    pub fn refill(&self) -> Option<Refill<'_>> {
        let is_mine = self.refilled.compare_exchange(false, true, AcqRel, Relaxed).is_ok();
        is_mine.then_some(Refill(&self.refilled))
    }

    /// Prepares the till of a forked child: no other thread takes leases, and there are none.
    pub fn renew_after_fork(&self) {
        self.refilled.store(false, Relaxed);
        self.backing.trim(0);
    }

    /// Lets launches of `key` take the fast path for `cost_ns` each; 0 = no longer.
    pub fn publish(&self, key: u64, cost_ns: u64) {
        let found = self.places(key).find(|known| known.key.load(Relaxed) == key);
        if let Some(known) = found {
            known.cost_ns.store(cost_ns, Relaxed);
            return;
        }
        let free = self.places(key).find(|known| known.cost_ns.load(Relaxed) == 0);
        if let Some(known) = free.or_else(|| self.places(key).next()).filter(|_| cost_ns > 0) {
            // A thread that reads in between finds no cost.
            known.cost_ns.store(0, Release);
            known.key.store(key, Release);
            known.cost_ns.store(cost_ns, Release);
            self.used.store(true, Relaxed);
        }
    }

    /// Sends every launch to the learner, or no longer does.
    pub fn watch(&self, watched: bool) {
        if self.watched.load(Relaxed) != watched {
            self.watched.store(watched, Relaxed);
        }
    }

    /// Forgets all costs.
    pub fn forget(&self) {
        if !self.used.load(Relaxed) {
            return;
        }
        for known in &self.known {
            known.cost_ns.store(0, Relaxed);
        }
    }
}

/// The right to take leases; given up when dropped.
pub struct Refill<'a>(&'a AtomicBool);

impl Drop for Refill<'_> {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Lease;

    /// A till and its purse with a lease in a cell.
    fn with_lease(cell: usize, ns: u64) -> (Till, Purse) {
        let (till, purse) = (Till::new(), Purse::new());
        for both in [&till.backing, &purse] {
            both.put(cell, Lease { ns, is_borrowed: false });
        }
        (till, purse)
    }

    #[test]
    fn a_known_launch_is_paid_by_the_cell_until_it_is_empty() {
        let (till, purse) = with_lease(3, 100);
        assert!(!till.pays(&purse, 3, 42), "unknown");
        till.publish(42, 30);
        assert_eq!((0..5).filter(|_| till.pays(&purse, 3, 42)).count(), 3);
        assert!(!till.pays(&purse, 4, 42), "another thread's cell is empty");
        assert_eq!(purse.held_ns(), 10);
    }

    #[test]
    fn nothing_is_paid_while_the_learner_watches_or_after_forgetting() {
        let (till, purse) = with_lease(0, 100);
        till.publish(42, 1);
        till.watch(true);
        assert!(!till.pays(&purse, 0, 42));
        till.watch(false);
        assert!(till.pays(&purse, 0, 42));
        till.forget();
        assert!(!till.pays(&purse, 0, 42));
    }

    #[test]
    fn one_thread_at_a_time_takes_leases() {
        let till = Till::new();
        let refill = till.refill();
        assert!(refill.is_some() && till.refill().is_none());
        drop(refill);
        assert!(till.refill().is_some());
    }

    #[test]
    fn a_full_table_keeps_the_newest() {
        let (till, purse) = with_lease(0, 5000);
        for key in 1..if cfg!(miri) { 1100 } else { 5000 } {
            till.publish(key, 1);
            assert!(till.pays(&purse, 0, key));
        }
    }

    #[test]
    fn what_others_write_into_a_purse_pays_for_nothing() {
        let (till, purse) = with_lease(3, 100);
        till.publish(42, 30);
        let mut paid = 0;
        for round in 0..1000 {
            // Somebody puts there what he likes, of either kind.
            for cell in 0..CELLS {
                purse.put(cell, Lease { ns: 1_000_000, is_borrowed: round % 2 == 0 });
            }
            paid += u64::from(till.pays(&purse, 3, 42));
        }
        assert_eq!(paid, 3, "what was charged pays for three");
        assert_eq!(till.backing.held_ns(), 10);
    }

    #[test]
    fn what_others_take_out_of_a_purse_pays_for_nothing_and_is_not_lost() {
        let (till, purse) = with_lease(3, 100);
        till.publish(42, 30);
        purse.trim(40);
        assert_eq!((0..5).filter(|_| till.pays(&purse, 3, 42)).count(), 1);
        assert_eq!((purse.held_ns(), till.backing.held_ns()), (10, 70));
    }
}

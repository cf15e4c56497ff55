//! The fast path of a launch: what a process may launch without asking the gate.
//!
//! A process takes GPU time from the gate in leases and spends them here, from cells that threads find by
//! their thread pointer, so that a launch of a known small kernel costs one look-up and one subtraction on a
//! cache line of the thread's own: no driver call, no clock, no lock, nothing shared with other processes.
//! What lies in the cells is charged already; a process that dies leaves at most its leases unspent.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64};

/// Cells of a process.
pub const CELLS: usize = 64;
/// Costs that can be looked up.
const KEYS: usize = 1024;
/// Places of the table in which a key can be.
const REACH: usize = 4;

#[repr(align(128))]
struct Cell(AtomicI64, AtomicU32);

struct Known {
    key: AtomicU64,
    cost_ns: AtomicU64,
}

/// Leases and known costs of one process on one device.
pub struct Till {
    cells: [Cell; CELLS],
    known: [Known; KEYS],
    /// Every launch is to be shown to the learner.
    watched: AtomicBool,
    /// Whether anything was ever put here: the memory of others is not touched.
    used: AtomicBool,
    /// Whom the leases in the cells were charged to.
    account: AtomicU32,
}

impl Default for Till {
    fn default() -> Self {
        Self::new()
    }
}

impl Till {
    /// Empty.
    pub const fn new() -> Self {
        Self {
            cells: [const { Cell(AtomicI64::new(0), AtomicU32::new(0)) }; CELLS],
            known: [const { Known { key: AtomicU64::new(0), cost_ns: AtomicU64::new(0) } }; KEYS],
            watched: AtomicBool::new(false),
            used: AtomicBool::new(false),
            account: AtomicU32::new(0),
        }
    }

    fn places(&self, key: u64) -> impl Iterator<Item = &Known> {
        let home = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as usize;
        (home..home + REACH).filter_map(|at| self.known.get(at % KEYS))
    }

    /// Cell of a thread, by any number that differs between threads.
    #[inline]
    pub fn cell(thread: u64) -> usize {
        (thread.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
    }

    /// Whether a launch of `key` is paid for by the thread's cell, and is now.
    #[inline]
    pub fn pays(&self, cell: usize, key: u64) -> bool {
        if self.watched.load(Relaxed) {
            return false;
        }
        let Some(known) = self.places(key).find(|known| known.key.load(Acquire) == key) else { return false };
        match known.cost_ns.load(Relaxed) {
            0 => false,
            cost => self.spend(cell, cost),
        }
    }

    /// Whether it is time to do what one launch in `of` does. Threads of one cell may miss each other's count.
    #[inline]
    pub fn is_turn(&self, cell: usize, of: u32) -> bool {
        self.cells.get(cell).is_none_or(|Cell(_, count)| {
            let before = count.load(Relaxed);
            count.store(before.wrapping_add(1), Relaxed);
            before.is_multiple_of(of)
        })
    }

    /// Takes `cost_ns` out of a cell, all or nothing.
    #[inline]
    pub fn spend(&self, cell: usize, cost_ns: u64) -> bool {
        let (Some(Cell(left, _)), Ok(cost)) = (self.cells.get(cell), i64::try_from(cost_ns)) else {
            return false;
        };
        if left.load(Relaxed) < cost {
            return false;
        }
        if left.fetch_sub(cost, Relaxed) < cost {
            // Another thread of the same cell was faster.
            left.fetch_add(cost, Relaxed);
            return false;
        }
        true
    }

    /// Puts a lease into a cell.
    pub fn put(&self, cell: usize, lease_ns: u64, account: u32) {
        if let (Some(Cell(left, _)), Ok(lease)) = (self.cells.get(cell), i64::try_from(lease_ns)) {
            left.fetch_add(lease, Relaxed);
            self.account.store(account, Relaxed);
            self.used.store(true, Relaxed);
        }
    }

    /// Whom the leases were charged to last.
    pub fn account(&self) -> u32 {
        self.account.load(Relaxed)
    }

    /// Nanoseconds in all cells.
    pub fn held(&self) -> u64 {
        self.cells.iter().map(|cell| cell.0.load(Relaxed).max(0).unsigned_abs()).sum()
    }

    /// Empties all cells; what was in them.
    pub fn empty(&self) -> u64 {
        if !self.used.load(Relaxed) {
            return 0;
        }
        self.cells.iter().map(|cell| cell.0.swap(0, Relaxed).max(0).unsigned_abs()).sum()
    }

    /// Lets launches of `key` go by the fast path for `cost_ns`; 0 = no longer.
    pub fn publish(&self, key: u64, cost_ns: u64) {
        let found = self.places(key).find(|known| known.key.load(Relaxed) == key);
        if let Some(known) = found {
            known.cost_ns.store(cost_ns, Relaxed);
            return;
        }
        let free = self.places(key).find(|known| known.cost_ns.load(Relaxed) == 0);
        if let Some(known) = free.or_else(|| self.places(key).next()).filter(|_| cost_ns > 0) {
            // Whoever reads in between finds no cost.
            known.cost_ns.store(0, Release);
            known.key.store(key, Release);
            known.cost_ns.store(cost_ns, Release);
            self.used.store(true, Relaxed);
        }
    }

    /// Sends every launch to the learner, or no longer.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_launch_is_paid_by_the_cell_until_it_is_empty() {
        let till = Till::new();
        till.put(3, 100, 7);
        assert!(!till.pays(3, 42), "unknown");
        till.publish(42, 30);
        assert_eq!((0..5).filter(|_| till.pays(3, 42)).count(), 3);
        assert!(!till.pays(4, 42), "another thread's cell is empty");
        assert_eq!((till.held(), till.empty(), till.held()), (10, 10, 0));
    }

    #[test]
    fn nothing_is_paid_while_the_learner_watches_or_after_forgetting() {
        let till = Till::new();
        till.put(0, 100, 0);
        till.publish(42, 1);
        till.watch(true);
        assert!(!till.pays(0, 42));
        till.watch(false);
        assert!(till.pays(0, 42));
        till.forget();
        assert!(!till.pays(0, 42));
    }

    #[test]
    fn threads_of_one_cell_never_spend_more_than_is_in_it() {
        let till = Till::new();
        const ROUNDS: u64 = if cfg!(miri) { 200 } else { 50_000 };
        till.put(0, 2 * ROUNDS, 0);
        let spent: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..ROUNDS).filter(|_| till.spend(0, 3)).count() as u64))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(spent * 3 + till.held(), 2 * ROUNDS, "{spent}");
    }

    #[test]
    fn a_full_table_keeps_the_newest() {
        let till = Till::new();
        for key in 1..if cfg!(miri) { 1100 } else { 5000 } {
            till.put(0, 10, 0);
            till.publish(key, 1);
            assert!(till.pays(0, key));
        }
    }
}

//! Leases: GPU time that a process has paid for in advance and spends launch by launch.
//!
//! Leases lie in cells of the share's region, one cell for every few threads of a process. So when the
//! process dies, whoever takes back its leases knows what is left of them. A cell is one word: what is left
//! and whether it was borrowed. A lease is charged before it is put into a cell, and put back on the share's
//! account after it was taken out; so a process that is killed in between leaves its share charged too much
//! and never too little. Anybody may take from a cell at any time; whoever comes too late finds nothing in
//! it.
//!
//! All leases of a share together are at most [`ALL_NS`]: each process holds at most [`allowance_ns`] for
//! their number. A process that joins reduces the allowance of the others, and takes from their cells what is
//! beyond it.

use crate::rate::TRIES;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicI64, AtomicU64};

/// The most that all leases of a share come to, in nanoseconds of GPU time.
pub const ALL_NS: u64 = 50_000_000;
/// The most that one process holds in leases, in nanoseconds of GPU time.
pub const MOST_NS: u64 = 4_000_000;
/// The number of leases of full length that a process can hold at a time.
const PARTS: u64 = 4;
/// A lease is at most one in this many parts of what the share has saved up.
const PARTS_OF_SAVED: u64 = 4;
/// Length of a lease where nothing is saved up, in nanoseconds: a process that waits for each of its launches
/// wakes too often.
const SHORT_NS: u64 = 250_000;

/// The number of processes that can hold leases: those in the region's first slots. Others pay for each
/// launch by itself.
pub const HOLDERS: usize = 64;
/// The number of cells of a process.
pub const CELLS: usize = 16;

/// Returns what each process of a share with `processes` processes may hold, in nanoseconds.
pub const fn allowance_ns(processes: usize) -> u64 {
    let part = ALL_NS / if processes == 0 { 1 } else { processes as u64 };
    if part < MOST_NS { part } else { MOST_NS }
}

/// What a process may hold in leases, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// The process's allowance; 0 = it takes no lease.
    pub allowance_ns: u64,
    /// GPU time that the process holds.
    pub held_ns: u64,
}

impl Room {
    /// Returns the length of the next lease where the share has saved up `saved_ns` of GPU time beyond the
    /// launch.
    pub fn lease_ns(self, saved_ns: u64) -> u64 {
        let longest = self.allowance_ns / PARTS;
        let wanted = (saved_ns / PARTS_OF_SAVED).clamp(SHORT_NS.min(longest), longest);
        wanted.min(self.allowance_ns.saturating_sub(self.held_ns))
    }

    /// Returns true if there is no room for another lease of full length.
    pub fn is_full(self) -> bool {
        self.held_ns.saturating_add(self.allowance_ns / PARTS) > self.allowance_ns
    }
}

/// GPU time that was leased.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lease {
    /// Length in nanoseconds of GPU time.
    pub ns: u64,
    /// True if that time was borrowed.
    pub is_borrowed: bool,
}

impl Lease {
    /// Returns the lease as a cell's word; the lowest bit is the kind.
    fn word(self) -> i64 {
        i64::try_from(self.ns).unwrap_or(i64::MAX >> 1).min(i64::MAX >> 1) << 1 | i64::from(self.is_borrowed)
    }

    /// Returns the lease in a word that a tenant may have written; an impossible word is an empty lease.
    fn of(word: i64) -> Self {
        let ns = (word >> 1).max(0).unsigned_abs();
        Self { ns: if ns > ALL_NS { 0 } else { ns }, is_borrowed: word & 1 != 0 }
    }
}

/// A cell, alone on its cache line.
#[repr(C, align(64))]
struct Cell {
    left: AtomicI64,
    reserved: [AtomicU64; 7],
}

/// The cells of one process.
#[repr(C)]
pub struct Purse {
    cells: [Cell; CELLS],
}

/// The number of 64-bit words in the purses of a share.
pub(crate) const WORDS: usize = HOLDERS * CELLS * 8;
const _: () = assert!(size_of::<Purse>() * HOLDERS == 8 * WORDS);

impl Default for Purse {
    fn default() -> Self {
        Self::new()
    }
}

impl Purse {
    /// Returns an empty purse.
    pub const fn new() -> Self {
        Self {
            cells: [const { Cell { left: AtomicI64::new(0), reserved: [const { AtomicU64::new(0) }; 7] } };
                CELLS],
        }
    }

    /// Returns the cell of a thread, whose number is below [`crate::till::CELLS`].
    #[inline]
    fn cell(&self, cell: usize) -> Option<&AtomicI64> {
        self.cells.get(cell % CELLS).map(|cell| &cell.left)
    }

    /// Takes `cost_ns` out of a cell, all or nothing. Returns true if that time was borrowed, or `None` if
    /// there was too little.
    #[inline]
    pub fn spend(&self, cell: usize, cost_ns: u64) -> Option<bool> {
        let left = self.cell(cell)?;
        let mut found = left.load(Relaxed);
        for _ in 0..TRIES {
            if found >> 1 < i64::try_from(cost_ns).ok()? {
                return None;
            }
            match left.compare_exchange_weak(found, found - ((cost_ns as i64) << 1), Relaxed, Relaxed) {
                Ok(_) => return Some(found & 1 != 0),
                Err(other) => found = other,
            }
        }
        None
    }

    /// Puts a lease into a cell. Returns time of the other kind that was in it, which the caller has to give
    /// back.
    pub fn put(&self, cell: usize, lease: Lease) -> Lease {
        let Some(left) = self.cell(cell) else { return lease };
        let mut found = left.load(Relaxed);
        for _ in 0..TRIES {
            let was = Lease::of(found);
            let is_same = was.is_borrowed == lease.is_borrowed;
            let ns = if is_same { was.ns.saturating_add(lease.ns) } else { lease.ns };
            match left.compare_exchange_weak(found, Lease { ns, ..lease }.word(), SeqCst, Relaxed) {
                Ok(_) => return if is_same { Lease::default() } else { was },
                Err(other) => found = other,
            }
        }
        lease
    }

    /// Puts back what was just taken out of a cell. If time of the other kind is there now, what was taken is
    /// lost: no more than one short launch, charged and not made.
    pub(crate) fn unspend(&self, cell: usize, lease: Lease) {
        let Some(left) = self.cell(cell) else { return };
        let mut found = left.load(Relaxed);
        for _ in 0..TRIES {
            let was = Lease::of(found);
            if was.ns > 0 && was.is_borrowed != lease.is_borrowed {
                return;
            }
            let sum = Lease { ns: was.ns.saturating_add(lease.ns), ..lease };
            match left.compare_exchange_weak(found, sum.word(), SeqCst, Relaxed) {
                Ok(_) => return,
                Err(other) => found = other,
            }
        }
    }

    /// Returns the nanoseconds in all cells.
    pub fn held_ns(&self) -> u64 {
        self.cells.iter().map(|cell| Lease::of(cell.left.load(SeqCst)).ns).sum()
    }

    /// Takes out what is beyond `most_ns`. Returns the share's own time and the borrowed time that were
    /// taken.
    pub fn trim(&self, most_ns: u64) -> [Lease; 2] {
        let mut taken = [Lease::default(), Lease { ns: 0, is_borrowed: true }];
        let mut beyond = self.held_ns().saturating_sub(most_ns);
        for cell in &self.cells {
            if beyond == 0 {
                break;
            }
            let mut found = cell.left.load(SeqCst);
            for _ in 0..TRIES {
                let was = Lease::of(found);
                let part = Lease { ns: was.ns.min(beyond), ..was };
                if part.ns == 0 {
                    break;
                }
                let rest = Lease { ns: was.ns - part.ns, ..was }.word();
                match cell.left.compare_exchange_weak(found, rest, SeqCst, SeqCst) {
                    Ok(_) => {
                        beyond -= part.ns;
                        let [own, borrowed] = &mut taken;
                        (if part.is_borrowed { borrowed } else { own }).ns += part.ns;
                        break;
                    }
                    Err(other) => found = other,
                }
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn own(ns: u64) -> Lease {
        Lease { ns, is_borrowed: false }
    }

    const fn borrowed(ns: u64) -> Lease {
        Lease { ns, is_borrowed: true }
    }

    #[test]
    fn the_leases_of_any_number_of_processes_come_to_fifty_milliseconds_at_the_most() {
        for processes in 0..=HOLDERS {
            assert!(allowance_ns(processes) * processes as u64 <= ALL_NS, "{processes}");
            assert!(allowance_ns(processes + 1) <= allowance_ns(processes), "{processes}");
            assert!(allowance_ns(processes) >= 4 * 100_000, "{processes}: a refill pays for a few launches");
        }
    }

    proptest! {
        // Miri is a thousand times slower.
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 256 }))]

        #[test]
        fn a_lease_shrinks_with_the_processes_and_near_the_limit(
            processes in 1..=HOLDERS, saved in 0..=20_000_000_u64, held in 0..=5_000_000_u64
        ) {
            let room = |processes| Room { allowance_ns: allowance_ns(processes), held_ns: held };
            let lease = room(processes).lease_ns(saved);
            prop_assert!(lease == 0 || held + lease <= allowance_ns(processes));
            prop_assert!(room(processes + 1).lease_ns(saved) <= lease);
            prop_assert!(room(processes).lease_ns(saved / 2) <= lease);
            prop_assert!(room(processes).lease_ns(0) <= SHORT_NS);
            prop_assert_eq!(Room::default().lease_ns(saved), 0);
        }

        /// Processes come, take leases, spend and die in any order.
        #[test]
        fn a_share_never_has_more_out_than_fifty_milliseconds_and_loses_none(
            steps in prop::collection::vec((0..HOLDERS, 0..CELLS, 0..6_u8, 0..1_000_000_u64, any::<bool>()), 0..400)
        ) {
            let purses: Vec<Purse> = (0..HOLDERS).map(|_| Purse::new()).collect();
            let mut living = [false; HOLDERS];
            // Charged, and either spent or given back.
            let (mut charged, mut gone) = ([0_u64; 2], [0_u64; 2]);
            for (who, cell, what, ns, is_borrowed) in steps {
                let purse = &purses[who];
                let back = |gone: &mut [u64; 2], lease: Lease| gone[usize::from(lease.is_borrowed)] += lease.ns;
                let count = living.iter().filter(|lives| **lives).count();
                if !living[who] {
                    living[who] = true;
                    for other in &purses {
                        other.trim(allowance_ns(count + 1)).iter().for_each(|taken| back(&mut gone, *taken));
                    }
                } else if what == 0 {
                    living[who] = false;
                    purse.trim(0).iter().for_each(|taken| back(&mut gone, *taken));
                } else if what < 4 {
                    let room = Room { allowance_ns: allowance_ns(count), held_ns: purse.held_ns() };
                    let lease = Lease { ns: room.lease_ns(ns * 20), is_borrowed };
                    charged[usize::from(is_borrowed)] += lease.ns;
                    back(&mut gone, purse.put(cell, lease));
                } else if let Some(is_borrowed) = purse.spend(cell, ns) {
                    gone[usize::from(is_borrowed)] += ns;
                }
                prop_assert!(purses.iter().map(Purse::held_ns).sum::<u64>() <= ALL_NS);
            }
            for purse in &purses {
                purse.trim(0).iter().for_each(|taken| gone[usize::from(taken.is_borrowed)] += taken.ns);
            }
            prop_assert_eq!(charged, gone);
        }
    }

    #[test]
    fn what_is_put_on_the_other_kind_is_handed_out() {
        let purse = Purse::new();
        assert_eq!(purse.put(3, own(100)), own(0));
        assert_eq!(purse.put(3, own(50)), own(0));
        assert_eq!(purse.put(3, borrowed(10)), own(150));
        assert_eq!((purse.spend(3, 11), purse.spend(3, 4)), (None, Some(true)));
        assert_eq!(purse.put(3 + CELLS, own(0)), borrowed(6), "threads share cells");
        assert_eq!(purse.held_ns(), 0);
    }

    #[test]
    fn a_word_that_cannot_be_is_worth_nothing() {
        let purse = Purse::new();
        for word in [i64::MAX, i64::MIN, -1, (ALL_NS as i64 + 1) << 1] {
            purse.cells[0].left.store(word, Relaxed);
            assert_eq!((purse.held_ns(), purse.trim(0)), (0, [own(0), borrowed(0)]));
        }
    }

    #[test]
    fn threads_and_those_who_take_back_never_have_more_than_was_put() {
        const ROUNDS: u64 = if cfg!(miri) { 200 } else { 50_000 };
        let purse = Purse::new();
        let gone: u64 = std::thread::scope(|scope| {
            let spend = || (0..ROUNDS).filter(|_| purse.spend(0, 3).is_some()).count() as u64 * 3;
            let put = || {
                (0..ROUNDS).map(|round| purse.put(0, Lease { ns: 3, is_borrowed: round % 64 == 0 }).ns).sum()
            };
            let trim = || (0..ROUNDS).map(|_| purse.trim(5).iter().map(|lease| lease.ns).sum::<u64>()).sum();
            let threads: Vec<std::thread::ScopedJoinHandle<'_, u64>> =
                vec![scope.spawn(spend), scope.spawn(spend), scope.spawn(put), scope.spawn(trim)];
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(gone + purse.held_ns(), 3 * ROUNDS);
    }
}

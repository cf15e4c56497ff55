//! The account of memory: how bytes are charged, released and taken back from dead processes.
//!
//! The total and each slot's part of it are in two places, and a process can be killed or stopped between
//! writing one and writing the other. So every change is an *operation* with a number:
//!
//! - the owner writes into its slot's spare entry what the slot will be charged;
//! - one 128-bit compare and swap puts the new total and the operation's name into the header: from here on
//!   the operation has happened;
//! - the slot's `recorded` follows, which makes the entry the valid one.
//!
//! Whoever wants to change the total next first records the operation that the header names. Hence:
//!
//! - the account is exact after a kill at any single store: the total is the sum of the slots, plus the one
//!   operation named in the header if its slot does not show it yet;
//! - nobody ever waits: the others record a stopped process's operation, and when the process wakes up it
//!   finds the operation done;
//! - a stamp never repeats, so a compare and swap that comes late fails, however late it is;
//! - an operation costs its owner one locked instruction.
//!
//! A tenant can write the region, so its content is never believed against what a process knows itself:
//! callers pass in what they have charged by their own count (`held`). A slot that shows less than its owner
//! knows, or a total below one of its parts, is damage: nothing is charged on it until [`mend`] has put the
//! larger figures back. Every call ends: where others change what it reads, it looks again at most [`TRIES`]
//! times.
//!
//! The functions take [`Cells`], so that tests can stop, kill and interleave processes at every access.

use crate::region::{Pair, Region, SLOT_COUNT, SlotState, generation};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

const SEQ_BITS: u32 = 48;
const SEQ_MASK: u64 = (1 << SEQ_BITS) - 1;
/// The highest number of an operation that is believed. No slot has made so many: a million a second would
/// take nine years.
const SEQ_MOST: u64 = SEQ_MASK - 16;

/// The number of times that one call looks again because others have changed what it was reading. Each time,
/// one of the others has made progress, so even a thousand processes that only charge and release do not
/// reach this number. A process that writes into the region all the while does, within milliseconds.
pub const TRIES: u32 = 20_000;

/// The number of times that a call may still look again.
struct Tries(u32);

impl Tries {
    fn again(&mut self) -> Result<()> {
        self.0 = self.0.checked_sub(1).ok_or(LedgerError::Busy)?;
        Ok(())
    }
}

/// A word of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Bytes charged by all slots.
    Total,
    /// The last operation: its slot and its number.
    Op,
    /// Bytes charged to a slot after its operations with even or odd numbers: `Entry(slot, number % 2)`.
    Entry(usize, usize),
    /// The number of the operation that an entry belongs to.
    EntrySeq(usize, usize),
    /// The number of a slot's last operation that is known to have happened.
    Recorded(usize),
    /// The state of a slot.
    State(usize),
    /// The time at which a slot's owner was found dead, in milliseconds of the monotonic clock.
    DeadSince(usize),
}

/// Two words that change together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairOf {
    /// The pair of [`Word::Total`] and [`Word::Op`].
    Total,
    /// The pair of [`Word::Entry`] and [`Word::EntrySeq`].
    Entry(usize, usize),
}

/// Shared memory, one atomic access at a time.
pub trait Cells {
    /// Returns the number of slots.
    fn slots(&self) -> usize;
    /// Loads a word (acquire).
    fn load(&self, word: Word) -> u64;
    /// Stores a word (release).
    fn store(&self, word: Word, value: u64);
    /// Compares and swaps a word; returns true if it was swapped.
    fn swap(&self, word: Word, old: u64, new: u64) -> bool;
    /// Compares and swaps a pair; returns true if it was swapped.
    fn swap_pair(&self, pair: PairOf, old: (u64, u64), new: (u64, u64)) -> bool;
}

/// Why an operation did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerError {
    /// The charge would exceed the limit. Holds the total that was found.
    Refused(u64),
    /// A value in the region is impossible. Nothing is charged on top of it.
    Corrupt,
    /// The words that the call had to read changed [`TRIES`] times meanwhile.
    Busy,
}

type Result<T> = core::result::Result<T, LedgerError>;

fn op_word(slot: usize, seq: u64) -> u64 {
    (slot as u64) << SEQ_BITS | seq & SEQ_MASK
}

fn read_pair(cells: &impl Cells, value: Word, stamp: Word, tries: &mut Tries) -> Result<(u64, u64)> {
    loop {
        let before = cells.load(stamp);
        let found = cells.load(value);
        if cells.load(stamp) == before {
            return Ok((found, before));
        }
        tries.again()?;
    }
}

fn read_total(cells: &impl Cells, tries: &mut Tries) -> Result<(u64, u64)> {
    read_pair(cells, Word::Total, Word::Op, tries)
}

fn parity(seq: u64) -> usize {
    (seq % 2) as usize
}

/// Returns the bytes that a slot is charged and the number of its last recorded operation.
fn read_charged(cells: &impl Cells, slot: usize, tries: &mut Tries) -> Result<(u64, u64)> {
    loop {
        let recorded = cells.load(Word::Recorded(slot));
        let which = parity(recorded);
        let (bytes, seq) = read_pair(cells, Word::Entry(slot, which), Word::EntrySeq(slot, which), tries)?;
        if cells.load(Word::Recorded(slot)) != recorded {
            tries.again()?;
            continue;
        }
        let is_sound = seq == recorded && recorded <= SEQ_MOST;
        return if is_sound { Ok((bytes, recorded)) } else { Err(LedgerError::Corrupt) };
    }
}

/// Records operation `seq` of `slot`, which the header names or has named, if that is not done yet.
fn record(cells: &impl Cells, slot: usize, seq: u64, tries: &mut Tries) -> Result<()> {
    loop {
        let recorded = cells.load(Word::Recorded(slot));
        if recorded >= seq {
            return Ok(());
        }
        if cells.load(Word::EntrySeq(slot, parity(seq))) < seq {
            return Err(LedgerError::Corrupt);
        }
        if !cells.swap(Word::Recorded(slot), recorded, seq) {
            tries.again()?;
        }
    }
}

/// Records the operation that the header names, and returns the header's pair.
fn settle(cells: &impl Cells, tries: &mut Tries) -> Result<(u64, u64)> {
    let found = read_total(cells, tries)?;
    let slot = (found.1 >> SEQ_BITS) as usize;
    if slot >= cells.slots() {
        return Err(LedgerError::Corrupt);
    }
    record(cells, slot, found.1 & SEQ_MASK, tries)?;
    Ok(found)
}

/// Settles the header; returns its pair and the slot's charged bytes and last operation. The total is checked
/// to be no less than the slot's charge, and that to be no less than `held`.
fn read_sound(
    cells: &impl Cells,
    slot: usize,
    held: u64,
    tries: &mut Tries,
) -> Result<((u64, u64), (u64, u64))> {
    let found = settle(cells, tries)?;
    // Settled: nothing of this slot is under way, and only its owner starts anything.
    let charged = read_charged(cells, slot, tries)?;
    let is_sound = held <= charged.0 && charged.0 <= found.0;
    if is_sound { Ok((found, charged)) } else { Err(LedgerError::Corrupt) }
}

/// Changes what `slot` is charged by `delta` bytes (two's complement) and returns the new total. With a
/// limit, a growth that would exceed it is refused. The caller owns the slot and makes one operation at a
/// time.
fn change(cells: &impl Cells, slot: usize, held: u64, delta: u64, limit: Option<u64>) -> Result<u64> {
    let mut tries = Tries(TRIES);
    let (found, charged) = read_sound(cells, slot, held, &mut tries)?;
    change_from(cells, slot, found, charged, delta, limit, &mut tries)
}

/// Does what [`change`] does, from a header that was found settled and the slot's charge at that time.
fn change_from(
    cells: &impl Cells,
    slot: usize,
    mut found: (u64, u64),
    (charged, recorded): (u64, u64),
    delta: u64,
    limit: Option<u64>,
    tries: &mut Tries,
) -> Result<u64> {
    let seq = recorded + 1;
    let shrinks = (delta as i64) < 0;
    let after = if shrinks { charged.checked_sub(delta.wrapping_neg()) } else { charged.checked_add(delta) };
    announce(cells, slot, seq, after.ok_or(LedgerError::Corrupt)?);
    loop {
        let total = if shrinks {
            found.0.checked_sub(delta.wrapping_neg()).ok_or(LedgerError::Corrupt)?
        } else {
            found.0.checked_add(delta).ok_or(LedgerError::Refused(found.0))?
        };
        if limit.is_some_and(|limit| total > limit) {
            return Err(LedgerError::Refused(found.0));
        }
        if cells.swap_pair(PairOf::Total, found, (total, op_word(slot, seq))) {
            // Others may have recorded it already, and only the slot's owner goes beyond it.
            cells.store(Word::Recorded(slot), seq);
            return Ok(total);
        }
        tries.again()?;
        found = settle(cells, tries)?;
        if found.0 < charged {
            return Err(LedgerError::Corrupt);
        }
    }
}

/// Writes into the slot's spare entry what it will be charged after operation `seq`.
fn announce(cells: &impl Cells, slot: usize, seq: u64, after: u64) {
    cells.store(Word::Entry(slot, parity(seq)), after);
    cells.store(Word::EntrySeq(slot, parity(seq)), seq);
}

/// Charges `bytes` to `slot` if the total stays within `limit`, and returns the new total. `held` is what the
/// caller has charged to the slot so far.
pub fn charge(cells: &impl Cells, slot: usize, held: u64, bytes: u64, limit: u64) -> Result<u64> {
    if bytes > i64::MAX as u64 {
        return Err(LedgerError::Refused(cells.load(Word::Total)));
    }
    change(cells, slot, held, bytes, Some(limit))
}

/// Charges `bytes` to `slot` whatever the limit is, for memory that exists already. Returns the new total.
pub fn charge_forced(cells: &impl Cells, slot: usize, held: u64, bytes: u64) -> Result<u64> {
    if bytes > i64::MAX as u64 {
        return Err(LedgerError::Corrupt);
    }
    change(cells, slot, held, bytes, None)
}

/// Charges as much of `bytes` to `slot` as the limit leaves room for, and returns the number of bytes
/// charged.
pub fn charge_up_to(cells: &impl Cells, slot: usize, held: u64, bytes: u64, limit: u64) -> Result<u64> {
    let mut tries = Tries(TRIES);
    loop {
        let wanted = bytes.min(limit.saturating_sub(cells.load(Word::Total)));
        if wanted == 0 {
            return Ok(0);
        }
        match charge(cells, slot, held, wanted, limit) {
            Ok(_) => return Ok(wanted),
            Err(LedgerError::Refused(_)) => tries.again()?,
            Err(error) => return Err(error),
        }
    }
}

/// Releases `bytes` of the slot's charge, at most all of it, and returns the new total.
pub fn release(cells: &impl Cells, slot: usize, held: u64, bytes: u64) -> Result<u64> {
    let mut tries = Tries(TRIES);
    let (found, charged) = read_sound(cells, slot, held, &mut tries)?;
    let bytes = bytes.min(charged.0);
    if bytes == 0 {
        return Ok(found.0);
    }
    if bytes > i64::MAX as u64 {
        return Err(LedgerError::Corrupt);
    }
    change_from(cells, slot, found, charged, bytes.wrapping_neg(), None, &mut tries)
}

/// Compares the slot with what its owner holds, and the total with the sum of the slots, and raises whichever
/// is too low. Returns true if one was: somebody has written into the region. A total above the sum is left
/// as it is, because what is missing may be another slot's.
///
/// In a sound region the sum equals the total: the sum is taken while the header stays settled and unchanged.
pub fn mend(cells: &impl Cells, slot: usize, held: u64) -> Result<bool> {
    let mut tries = Tries(TRIES);
    loop {
        let found = settle(cells, &mut tries)?;
        let charged = read_charged(cells, slot, &mut tries)?;
        let own = charged.0.max(held);
        let mut sum = own;
        for other in (0..cells.slots()).filter(|other| *other != slot) {
            sum = sum.saturating_add(shown(cells, other, &mut tries)?);
        }
        let total = found.0.max(sum);
        if (total, own) == (found.0, charged.0) {
            return Ok(false);
        }
        if read_total(cells, &mut tries)? == found {
            let seq = charged.1 + 1;
            announce(cells, slot, seq, own);
            if cells.swap_pair(PairOf::Total, found, (total, op_word(slot, seq))) {
                cells.store(Word::Recorded(slot), seq);
                return Ok(true);
            }
        }
        tries.again()?;
    }
}

/// Returns the bytes that a slot shows as its charge; the larger entry if the valid one cannot be told.
fn shown(cells: &impl Cells, slot: usize, tries: &mut Tries) -> Result<u64> {
    match read_charged(cells, slot, tries) {
        Ok((bytes, _)) => Ok(bytes),
        Err(LedgerError::Corrupt) => {
            Ok(cells.load(Word::Entry(slot, 0)).max(cells.load(Word::Entry(slot, 1))))
        }
        Err(error) => Err(error),
    }
}

/// Returns the bytes charged to a slot, as far as recorded; 0 if the region is corrupt.
pub fn charged(cells: &impl Cells, slot: usize) -> u64 {
    read_charged(cells, slot, &mut Tries(TRIES)).map_or(0, |charged| charged.0)
}

/// Returns the bytes charged by all slots.
pub fn total(cells: &impl Cells) -> u64 {
    cells.load(Word::Total)
}

/// Makes a free slot the caller's. The caller holds the slot's lock and has written the slot's identity.
/// Returns the state word that stays in the slot as long as it is the caller's, or `None` if the slot was not
/// free.
pub fn attach(cells: &impl Cells, slot: usize) -> Option<u64> {
    let found = cells.load(Word::State(slot));
    if SlotState::of(found) != Some(SlotState::Free) || charged(cells, slot) != 0 {
        return None;
    }
    cells.store(Word::DeadSince(slot), 0);
    let mine = SlotState::Live.word(generation(found) + 1);
    cells.swap(Word::State(slot), found, mine).then_some(mine)
}

/// Records that the owner of `slot`, as seen in the state word `found`, is dead. Returns true if this call
/// recorded it. `now_ms` is not 0.
pub fn mark_dead(cells: &impl Cells, slot: usize, found: u64, now_ms: u64) -> bool {
    if SlotState::of(found) != Some(SlotState::Live) {
        return false;
    }
    let marked = cells.swap(Word::State(slot), found, SlotState::Dead.word(generation(found)));
    if marked {
        cells.swap(Word::DeadSince(slot), 0, now_ms);
    }
    marked
}

/// Returns the time at which the owner of a dead slot was found dead. If the process that found it died
/// before it noted the time, that time becomes `now_ms`.
pub fn dead_since(cells: &impl Cells, slot: usize, now_ms: u64) -> u64 {
    match cells.load(Word::DeadSince(slot)) {
        0 => {
            cells.swap(Word::DeadSince(slot), 0, now_ms);
            cells.load(Word::DeadSince(slot))
        }
        since => since,
    }
}

/// Takes back the bytes of a dead slot and frees the slot. Any number of processes may do this at once.
/// Returns the number of bytes that this call took back.
pub fn reap(cells: &impl Cells, slot: usize) -> Result<u64> {
    reap_to(cells, slot, 0)
}

/// Does what [`reap`] does, but leaves `keep` bytes, which others still use: as long as there are any, the
/// slot stays dead and charged.
pub fn reap_to(cells: &impl Cells, slot: usize, keep: u64) -> Result<u64> {
    reap_seen(cells, slot, cells.load(Word::State(slot)), keep)
}

/// Does what [`reap_to`] does, but only for the owner that was seen dead in the state word `state`: what was
/// found out about that owner says nothing about a later owner of the slot.
pub fn reap_seen(cells: &impl Cells, slot: usize, state: u64, keep: u64) -> Result<u64> {
    if SlotState::of(state) != Some(SlotState::Dead) {
        return Ok(0);
    }
    let (mut taken, mut tries) = (0, Tries(TRIES));
    loop {
        let found = settle(cells, &mut tries)?;
        let charged = read_charged(cells, slot, &mut tries)?;
        // Far enough from what the dead may have prepared, and in the other entry than what it is charged.
        let seq = charged.1 + 3;
        let which = parity(seq);
        let spare = read_pair(cells, Word::Entry(slot, which), Word::EntrySeq(slot, which), &mut tries)?;
        if cells.load(Word::State(slot)) != state {
            return Ok(taken);
        }
        if charged.0 == 0 {
            cells.swap(Word::State(slot), state, SlotState::Free.word(generation(state)));
        }
        if charged.0 <= keep {
            return Ok(taken);
        }
        if spare.1 < seq {
            cells.swap_pair(PairOf::Entry(slot, which), spare, (keep, seq));
            tries.again()?;
            continue;
        }
        // Another one may have had another opinion of what to keep: this operation is the one announced.
        let part = charged.0.checked_sub(spare.0).ok_or(LedgerError::Corrupt)?;
        let total = found.0.checked_sub(part).ok_or(LedgerError::Corrupt)?;
        if cells.swap_pair(PairOf::Total, found, (total, op_word(slot, seq))) {
            taken = taken.saturating_add(part);
            record(cells, slot, seq, &mut tries)?;
        }
        tries.again()?;
    }
}

impl Region {
    fn pair(&self, pair: PairOf) -> Option<&Pair> {
        Some(match pair {
            PairOf::Total => &self.header.total,
            PairOf::Entry(slot, which) => self.slots.get(slot)?.entries.get(which)?,
        })
    }

    fn word(&self, word: Word) -> Option<&core::sync::atomic::AtomicU64> {
        Some(match word {
            Word::Total => &self.header.total.value,
            Word::Op => &self.header.total.stamp,
            Word::Entry(slot, which) => &self.slots.get(slot)?.entries.get(which)?.value,
            Word::EntrySeq(slot, which) => &self.slots.get(slot)?.entries.get(which)?.stamp,
            Word::Recorded(slot) => &self.slots.get(slot)?.recorded,
            Word::State(slot) => &self.slots.get(slot)?.state,
            Word::DeadSince(slot) => &self.slots.get(slot)?.dead_since_ms,
        })
    }
}

impl Cells for Region {
    fn slots(&self) -> usize {
        SLOT_COUNT
    }

    #[inline]
    fn load(&self, word: Word) -> u64 {
        self.word(word).map_or(0, |cell| cell.load(Acquire))
    }

    #[inline]
    fn store(&self, word: Word, value: u64) {
        if let Some(cell) = self.word(word) {
            cell.store(value, Release);
        }
    }

    #[inline]
    fn swap(&self, word: Word, old: u64, new: u64) -> bool {
        self.word(word).is_some_and(|cell| cell.compare_exchange(old, new, AcqRel, Relaxed).is_ok())
    }

    #[inline]
    fn swap_pair(&self, pair: PairOf, old: (u64, u64), new: (u64, u64)) -> bool {
        self.pair(pair).is_some_and(|pair| pair.compare_exchange(old, new))
    }
}

impl Pair {
    /// Compares and swaps both words as one, with full ordering; returns true if they were swapped.
    #[inline]
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[allow(unsafe_code, reason = "Rust has no stable 128-bit atomic")]
    pub fn compare_exchange(&self, old: (u64, u64), new: (u64, u64)) -> bool {
        let done: u8;
        // SAFETY: `self` is valid for atomic writes (its words have interior mutability) and 16-byte
        // aligned by its type. Every x86-64 processor that can host a supported GPU has cmpxchg16b. rbx,
        // which the instruction needs and LLVM reserves, is restored before the block ends.
        unsafe {
            core::arch::asm!(
                "xchg rsi, rbx",
                "lock cmpxchg16b xmmword ptr [rdi]",
                "sete r8b",
                "mov rbx, rsi",
                in("rdi") core::ptr::from_ref(self),
                inout("rsi") new.0 => _,
                out("r8b") done,
                in("rcx") new.1,
                inout("rax") old.0 => _,
                inout("rdx") old.1 => _,
                options(nostack),
            );
        }
        done != 0
    }

    /// Compares and swaps both words as one, with full ordering; returns true if they were swapped.
    #[inline]
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[allow(unsafe_code, reason = "Rust has no stable 128-bit atomic")]
    pub fn compare_exchange(&self, old: (u64, u64), new: (u64, u64)) -> bool {
        let failed: u64;
        // SAFETY: `self` is valid for atomic writes and 16-byte aligned by its type. The pair is loaded
        // exclusively and only stored to if nobody wrote in between; a mismatch stores the loaded values
        // back, which makes the load single-copy atomic as the architecture asks.
        unsafe {
            core::arch::asm!(
                "2:",
                "ldaxp {lo}, {hi}, [{at}]",
                "cmp {lo}, {old_lo}",
                "ccmp {hi}, {old_hi}, #0, eq",
                "cset {failed}, ne",
                "csel {lo}, {new_lo}, {lo}, eq",
                "csel {hi}, {new_hi}, {hi}, eq",
                "stlxp {retry:w}, {lo}, {hi}, [{at}]",
                "cbnz {retry:w}, 2b",
                "dmb ish",
                at = in(reg) core::ptr::from_ref(self),
                old_lo = in(reg) old.0,
                old_hi = in(reg) old.1,
                new_lo = in(reg) new.0,
                new_hi = in(reg) new.1,
                lo = out(reg) _,
                hi = out(reg) _,
                retry = out(reg) _,
                failed = out(reg) failed,
                options(nostack),
            );
        }
        failed == 0
    }

    /// Compares and swaps both words; only callers of this function see them as one. Miri cannot run
    /// assembly.
    #[cfg(miri)]
    pub fn compare_exchange(&self, old: (u64, u64), new: (u64, u64)) -> bool {
        use core::sync::atomic::AtomicBool;
        static TURN: AtomicBool = AtomicBool::new(false);
        while TURN.compare_exchange(false, true, AcqRel, Relaxed).is_err() {
            core::hint::spin_loop();
        }
        let is_old = (self.value.load(Acquire), self.stamp.load(Acquire)) == old;
        if is_old {
            self.value.store(new.0, Release);
            self.stamp.store(new.1, Release);
        }
        TURN.store(false, Release);
        is_old
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    /// A zeroed region on the heap.
    struct Memory(*mut Region);

    impl Memory {
        #[allow(unsafe_code)]
        fn new() -> Self {
            // SAFETY: the layout has a size, and a region of zeros is valid: it only holds atomics.
            Self(unsafe { alloc_zeroed(Layout::new::<Region>()) }.cast())
        }
    }

    impl core::ops::Deref for Memory {
        type Target = Region;
        #[allow(unsafe_code)]
        fn deref(&self) -> &Region {
            // SAFETY: allocated and initialised in `new`, freed only in `drop`.
            unsafe { &*self.0 }
        }
    }

    impl Drop for Memory {
        #[allow(unsafe_code)]
        fn drop(&mut self) {
            // SAFETY: allocated in `new` with this layout.
            unsafe { dealloc(self.0.cast(), Layout::new::<Region>()) }
        }
    }

    // SAFETY: everything in a region is atomic.
    #[allow(unsafe_code)]
    unsafe impl Sync for Memory {}

    fn sum(region: &Region) -> u64 {
        (0..SLOT_COUNT).map(|slot| charged(region, slot)).sum()
    }

    #[test]
    fn charges_are_exact_to_the_byte() {
        let region = Memory::new();
        attach(&*region, 3).unwrap();
        assert_eq!(charge(&*region, 3, 0, 1000, 1000), Ok(1000));
        assert_eq!(charge(&*region, 3, 0, 1, 1000), Err(LedgerError::Refused(1000)));
        assert_eq!(release(&*region, 3, 0, 1), Ok(999));
        assert_eq!(charge(&*region, 3, 0, 2, 1000), Err(LedgerError::Refused(999)));
        assert_eq!(charge(&*region, 3, 0, 1, 1000), Ok(1000));
        assert_eq!(charge_forced(&*region, 3, 0, 5), Ok(1005));
        assert_eq!(charge(&*region, 3, 0, 1, u64::MAX), Ok(1006));
        assert_eq!(charge(&*region, 3, 0, u64::MAX, u64::MAX), Err(LedgerError::Refused(1006)));
        assert_eq!(release(&*region, 3, 0, u64::MAX), Ok(0));
        assert_eq!(sum(&region), 0);
    }

    #[test]
    fn a_partial_charge_fills_up_to_the_limit() {
        let region = Memory::new();
        attach(&*region, 0).unwrap();
        assert_eq!(charge_up_to(&*region, 0, 0, 70, 100), Ok(70));
        assert_eq!(charge_up_to(&*region, 0, 0, 70, 100), Ok(30));
        assert_eq!(charge_up_to(&*region, 0, 0, 70, 100), Ok(0));
    }

    #[test]
    fn a_dead_slot_is_taken_back_once_and_can_be_used_again() {
        let region = Memory::new();
        let first = attach(&*region, 7).unwrap();
        charge(&*region, 7, 0, 500, 1000).unwrap();
        assert_eq!(attach(&*region, 7), None);
        assert_eq!(reap(&*region, 7), Ok(0), "a live slot is left alone");
        assert!(mark_dead(&*region, 7, first, 10));
        assert!(!mark_dead(&*region, 7, first, 11));
        assert_eq!(dead_since(&*region, 7, 12), 10);
        assert_eq!(reap(&*region, 7), Ok(500));
        assert_eq!(reap(&*region, 7), Ok(0));
        assert_eq!(total(&*region), 0);
        let second = attach(&*region, 7).unwrap();
        assert_ne!(first, second);
        assert_eq!(charge(&*region, 7, 0, 1000, 1000), Ok(1000));
    }

    #[test]
    fn an_operation_that_happened_is_completed_by_the_next_one() {
        let region = Memory::new();
        attach(&*region, 1).unwrap();
        attach(&*region, 2).unwrap();
        // Slot 1 dies right after its compare and swap.
        region.store(Word::Entry(1, 1), 300);
        region.store(Word::EntrySeq(1, 1), 1);
        assert!(region.swap_pair(PairOf::Total, (0, 0), (300, op_word(1, 1))));
        assert_eq!(charged(&*region, 1), 0);
        assert_eq!(charge(&*region, 2, 0, 700, 1000), Ok(1000));
        assert_eq!(charged(&*region, 1), 300);
        assert_eq!(sum(&region), 1000);
    }

    #[test]
    fn an_operation_that_was_only_announced_never_happens() {
        let region = Memory::new();
        let state = attach(&*region, 1).unwrap();
        charge(&*region, 1, 0, 100, 1000).unwrap();
        region.store(Word::Entry(1, 0), 400);
        region.store(Word::EntrySeq(1, 0), 2);
        mark_dead(&*region, 1, state, 1);
        assert_eq!(reap(&*region, 1), Ok(100));
        assert_eq!((total(&*region), sum(&region)), (0, 0));
    }

    #[test]
    fn values_that_cannot_be_refuse_charges() {
        let region = Memory::new();
        attach(&*region, 0).unwrap();
        region.store(Word::Op, op_word(2000, 1));
        assert_eq!(charge(&*region, 0, 0, 1, 100), Err(LedgerError::Corrupt));
        region.store(Word::Op, op_word(5, 9));
        assert_eq!(charge(&*region, 0, 0, 1, 100), Err(LedgerError::Corrupt));
        region.store(Word::Op, 0);
        region.store(Word::Total, u64::MAX);
        assert!(charge(&*region, 0, 0, 1, 100).is_err());
    }

    #[test]
    fn a_total_below_its_parts_charges_nothing_until_it_is_as_much_again() {
        let region = Memory::new();
        attach(&*region, 1).unwrap();
        attach(&*region, 2).unwrap();
        charge(&*region, 1, 0, 700, 1000).unwrap();
        charge(&*region, 2, 0, 100, 1000).unwrap();
        assert_eq!(mend(&*region, 2, 100), Ok(false), "it is sound");
        region.store(Word::Total, 0);
        assert_eq!(charge(&*region, 2, 100, 1, 1000), Err(LedgerError::Corrupt), "its own part is more");
        assert_eq!(mend(&*region, 2, 100), Ok(true));
        assert_eq!((total(&*region), sum(&region)), (800, 800));
        assert_eq!(charge(&*region, 2, 100, 201, 1000), Err(LedgerError::Refused(800)));
        // A slot that shows less than its owner knows, and the total with it.
        region.store(Word::Total, 100);
        region.store(Word::Entry(1, 1), 0);
        assert_eq!(release(&*region, 1, 700, 700), Err(LedgerError::Corrupt));
        assert_eq!(mend(&*region, 1, 700), Ok(true));
        assert_eq!((total(&*region), sum(&region)), (800, 800));
        // What is too much stays.
        region.store(Word::Total, 900);
        assert_eq!(mend(&*region, 1, 700), Ok(false));
        assert_eq!(total(&*region), 900);
    }

    #[test]
    fn threads_never_exceed_the_limit_and_leave_nothing() {
        let region = Memory::new();
        const ROUNDS: u64 = if cfg!(miri) { 50 } else { 20_000 };
        let limit = 10_000;
        std::thread::scope(|scope| {
            for slot in 0..4 {
                let region = &region;
                scope.spawn(move || {
                    attach(&**region, slot).unwrap();
                    let mut held = 0;
                    for round in 0..ROUNDS {
                        let bytes = 1 + (round * 37 + slot as u64 * 101) % 4000;
                        match charge(&**region, slot, 0, bytes, limit) {
                            Ok(total) => {
                                assert!(total <= limit);
                                held += bytes;
                            }
                            Err(LedgerError::Refused(_)) => {
                                release(&**region, slot, 0, held).unwrap();
                                held = 0;
                            }
                            Err(error) => panic!("{error:?}"),
                        }
                    }
                    assert_eq!(charged(&**region, slot), held);
                    release(&**region, slot, 0, held).unwrap();
                });
            }
        });
        assert_eq!((total(&*region), sum(&region)), (0, 0));
    }
}

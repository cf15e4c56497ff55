//! Bytes that their exporter has freed and that other processes of the share still have.
//!
//! Such bytes are moved to a slot of their own, which has no owner, as if their exporter had died. So anybody
//! takes them back when the last importer is done, and their exporter need never do anything again. The bytes
//! are charged there before their exporter gives them up, and only then can they be taken back. So an
//! exporter that is killed or stopped in between leaves too much charged, never too little: until the dead
//! are looked for if it was killed, until it goes on if it was stopped.

use super::Share;
use super::dead::DEATH_MS;
use super::files::open_region;
use crate::sys::{self, File};
use aliquot_quota::ledger::{self, Cells, Word};
use aliquot_quota::region::{LOCK_BASE, Region, SLOT_COUNT, SlotState};
use core::sync::atomic::Ordering::Relaxed;

impl Share {
    /// Charges `bytes` to a slot without an owner, and has the caller give them up. Returns false if they
    /// stay charged to the caller.
    pub(crate) fn leave(&self, bytes: u64, give_up: impl FnOnce()) -> bool {
        let path = *self.region_path.lock();
        let (Some(region), Ok(file)) = (self.region(), open_region(&path)) else { return false };
        let state = |slot: usize| SlotState::of(region.load(Word::State(slot)));
        // Processes come first.
        if (0..SLOT_COUNT).filter(|slot| state(*slot) != Some(SlotState::Free)).count() > SLOT_COUNT / 2 {
            return false;
        }
        let fd = file.into_raw();
        // From the end: the first slots are those that can have leases.
        let taken =
            (0..SLOT_COUNT).rev().filter(|slot| state(*slot) == Some(SlotState::Free)).find_map(|slot| {
                sys::lock_byte(fd, LOCK_BASE + slot as u64).ok()?;
                let taken = take(region, slot, bytes);
                if taken.is_none() {
                    sys::unlock_byte(fd, LOCK_BASE + slot as u64);
                }
                Some((slot, taken?))
            });
        let is_charged = taken.is_some_and(|(slot, state)| {
            let is_charged = ledger::charge_forced(region, slot, 0, bytes).is_ok();
            if is_charged {
                give_up();
            }
            // The driver frees it with the last importer's call, so nobody need wait for that.
            ledger::mark_dead(region, slot, state, sys::now_ms().saturating_sub(DEATH_MS).max(1));
            sys::unlock_byte(fd, LOCK_BASE + slot as u64);
            is_charged
        });
        drop(File::from_raw(fd));
        is_charged
    }

    /// Returns true if a slot holds bytes that an exporter left, and is not a process's.
    pub(super) fn is_left(region: &Region, slot: usize) -> bool {
        region.slots.get(slot).is_some_and(|slot| slot.pid.load(Relaxed) == 0)
    }

    /// Takes back what exporters left, after memory of others was given back, which may have been the last of
    /// it.
    pub(crate) fn settle_left(&self) {
        let is_dead = |region: &Region, slot: usize| {
            SlotState::of(region.load(Word::State(slot))) == Some(SlotState::Dead)
        };
        if self.region().is_some_and(|region| (0..SLOT_COUNT).any(|slot| is_dead(region, slot))) {
            self.reap();
        }
    }
}

/// Makes a free slot, whose lock is held, a slot without an owner. Returns its state word, or `None` if it
/// was not free.
fn take(region: &Region, slot: usize, bytes: u64) -> Option<u64> {
    let mine = region.slots.get(slot)?;
    mine.pid.store(0, Relaxed);
    mine.start_time.store(0, Relaxed);
    mine.pid_namespace.store(0, Relaxed);
    mine.overhead_bytes.store(0, Relaxed);
    mine.imported_bytes.store(0, Relaxed);
    mine.exported_bytes.store(bytes, Relaxed);
    ledger::attach(region, slot)
}

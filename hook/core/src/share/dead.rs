//! Finding dead processes, and taking back what they hold.

use super::Share;
use super::files::pid_namespace;
use crate::nvml::ask::{self, List};
use crate::sys::{self, File};
use aliquot_quota::ledger::{self, Cells, LedgerError, Word};
use aliquot_quota::region::{self, LOCK_BASE, Region, SLOT_COUNT, Slot, SlotState};
use core::ops::Range;
use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

/// The time that the driver may need to free a dead process's memory, in milliseconds.
pub(super) const DEATH_MS: u64 = 2000;

impl Share {
    /// Looks for dead processes and takes their bytes back once the driver has had time to free them. Returns
    /// whether bytes came back, and after how many milliseconds more will.
    pub(crate) fn reap(&self) -> (bool, Option<u64>) {
        match self.region() {
            Some(region) => {
                let own = self.seat.lock().slot;
                self.reap_in(region, own)
            }
            None => (false, None),
        }
    }

    /// Returns for how many more milliseconds the driver may still be freeing the memory of a process that
    /// died.
    pub(crate) fn freeing_ms(&self) -> Option<u64> {
        let died = self.region()?.header.last_death_ms.load(Relaxed);
        let age = sys::now_ms().checked_sub(died)?;
        DEATH_MS.checked_sub(age).filter(|left| *left > 0 && died != 0)
    }

    pub(super) fn reap_in(&self, region: &Region, own: Option<usize>) -> (bool, Option<u64>) {
        // All dead processes are found first: what they imported keeps nothing charged.
        if !self.find_dead(region, own, 0..SLOT_COUNT) {
            return (false, None);
        }
        let (dead, wait) = self.look_at_dead(region, own);
        let (mut imported, mut came_back) = (None, false);
        for slot in 0..SLOT_COUNT {
            let state = region.load(Word::State(slot));
            if !dead.has_freed(slot, state) {
                continue;
            }
            // The bytes that others have imported from the dead stay charged until the driver has freed the
            // last of them.
            let exported = region.slots.get(slot).map_or(0, |slot| slot.exported_bytes.load(Relaxed));
            let mut keep = 0;
            if exported > 0 {
                let left = imported.get_or_insert_with(|| imported_now(region, &dead));
                // In a slot of what an exporter freed, it is what others have imported beyond what is
                // exported now.
                let exported_now = if Self::is_left(region, slot) { exported_now(region) } else { 0 };
                keep = exported.min(left.saturating_sub(exported_now)).min(ledger::charged(region, slot));
                *left -= keep;
            }
            let reaped = ledger::reap_seen(region, slot, state, keep);
            if keep == 0 {
                // The living processes may hold more leases.
                region.compute.members.fetch_add(1, SeqCst);
            }
            match reaped {
                Ok(0) => {}
                Ok(_) => {
                    if !Self::is_left(region, slot) {
                        region.header.reaped.fetch_add(1, Relaxed);
                    }
                    came_back = true;
                }
                Err(LedgerError::Corrupt) => {
                    region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
                }
                Err(_) => {}
            }
        }
        (came_back, wait)
    }

    /// Returns the dead processes, and the fewest milliseconds for which the driver may still be freeing
    /// memory that they owned or had imported.
    fn look_at_dead(&self, region: &Region, own: Option<usize>) -> (Dead, Option<u64>) {
        // A process that was dead before NVML is asked and is not in NVML's list has no memory any more. The
        // list says nothing about processes that die later.
        let (mut dead, mut list, mut wait) = (Dead::seen(region, own), None, None);
        let (now, here) = (sys::now_ms(), pid_namespace());
        for ((slot, owner), mark) in region.slots.iter().enumerate().zip(&mut dead.0) {
            let age = || age_ms(ledger::dead_since(region, slot, now), now);
            if *mark == 0 || age() >= DEATH_MS || Self::is_left(region, slot) {
                continue;
            }
            let held = ledger::charged(region, slot) > 0 || owner.imported_bytes.load(Relaxed) > 0;
            if !held {
                continue;
            }
            let list: &Option<List> = list.get_or_insert_with(|| ask::computing(&self.uuid()?));
            let is_here = owner.pid_namespace.load(Relaxed) == here;
            let has_freed = list.as_ref().is_some_and(|list| is_here && list.lacks(owner.pid.load(Relaxed)));
            if !has_freed {
                *mark |= Dead::FREEING;
                wait = Some(wait.unwrap_or(u64::MAX).min(DEATH_MS.saturating_sub(age())));
            }
        }
        (dead, wait)
    }
}

/// Returns how long ago a process was found dead, in milliseconds. Processes read the clock one after the
/// other. A time that is more than a second ahead was written by none of them, and nobody waits for it.
const fn age_ms(since_ms: u64, now_ms: u64) -> u64 {
    if since_ms > now_ms.saturating_add(1000) { DEATH_MS } else { now_ms.saturating_sub(since_ms) }
}

/// The dead processes at one look, by slot. 0 = the slot's owner was not dead. Otherwise a mark of the state
/// word in which it was seen, with the lower part of the generation, and of whether the driver may still be
/// freeing its memory.
struct Dead([u16; SLOT_COUNT]);

impl Dead {
    const SEEN: u16 = 1;
    const FREEING: u16 = 2;

    const fn mark(state: u64) -> u16 {
        (region::generation(state) as u16) << 2 | Self::SEEN
    }

    /// Returns the processes that are dead now, except this one.
    fn seen(region: &Region, own: Option<usize>) -> Self {
        let mut marks = [0; SLOT_COUNT];
        for (slot, mark) in marks.iter_mut().enumerate().filter(|(slot, _)| Some(*slot) != own) {
            let state = region.load(Word::State(slot));
            if SlotState::of(state) == Some(SlotState::Dead) {
                *mark = Self::mark(state);
            }
        }
        Self(marks)
    }

    /// Returns true if the owner of a slot in this state was dead at the look, and the driver had freed its
    /// memory.
    fn has_freed(&self, slot: usize, state: u64) -> bool {
        SlotState::of(state) == Some(SlotState::Dead) && self.0.get(slot) == Some(&Self::mark(state))
    }
}

impl Share {
    /// Marks those of these slots whose owners have died, and takes back their leases, which nobody will
    /// spend. Returns false if the region cannot be opened.
    pub(super) fn find_dead(&self, region: &Region, own: Option<usize>, slots: Range<usize>) -> bool {
        let path = *self.region_path.lock();
        let (mut file, now) = (None, sys::now_ms());
        for slot in slots.filter(|slot| Some(*slot) != own) {
            let state = region.load(Word::State(slot));
            if SlotState::of(state) == Some(SlotState::Live) {
                if file.is_none() {
                    file = File::read_write(path.as_c()).ok();
                }
                let Some(file) = &file else { return false };
                if !file.is_locked(LOCK_BASE + slot as u64) && ledger::mark_dead(region, slot, state, now) {
                    region.header.last_death_ms.store(now, Relaxed);
                }
            }
            if SlotState::of(region.load(Word::State(slot))) == Some(SlotState::Dead) {
                self.take_leases(region, slot, 0);
            }
        }
        true
    }
}

/// Returns the bytes that processes have imported; those of dead processes count as long as the driver may
/// still be freeing them.
fn imported_now(region: &Region, dead: &Dead) -> u64 {
    let has = |(slot, state): (usize, u64)| match SlotState::of(state) {
        Some(SlotState::Live) => true,
        Some(SlotState::Dead) => !dead.has_freed(slot, state),
        _ => false,
    };
    let slots = region.slots.iter().enumerate();
    let bytes = slots.filter(|(index, slot)| has((*index, slot.state.load(Acquire))));
    bytes.fold(0, |sum, (_, slot)| sum.saturating_add(slot.imported_bytes.load(Relaxed)))
}

/// Returns the bytes that living processes have exported. Bytes that such a process is moving to a slot
/// without an owner count as its own.
fn exported_now(region: &Region) -> u64 {
    let lives = |slot: &&Slot| {
        SlotState::of(slot.state.load(Acquire)) == Some(SlotState::Live) && slot.pid.load(Relaxed) != 0
    };
    let bytes = region.slots.iter().filter(lives).map(|slot| slot.exported_bytes.load(Relaxed));
    bytes.fold(0, u64::saturating_add)
}

//! Taking back what dead processes hold.

use super::Share;
use super::files::pid_namespace;
use crate::nvml::{self, List};
use crate::sys::{self, File};
use aliquot_quota::ledger::{self, Cells, LedgerError, Word};
use aliquot_quota::region::{self, LOCK_BASE, Region, SLOT_COUNT, Slot, SlotState};
use core::ops::Range;
use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

/// How long the driver may need to free a dead process's memory.
pub(super) const DEATH_MS: u64 = 2000;

impl Share {
    /// Looks for dead processes and takes their bytes back once the driver has had time to free them. Tells
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

    /// For how many milliseconds more the driver may still be freeing what a process that died had.
    pub(crate) fn freeing_ms(&self) -> Option<u64> {
        let died = self.region()?.header.last_death_ms.load(Relaxed);
        let age = sys::now_ms().checked_sub(died)?;
        DEATH_MS.checked_sub(age).filter(|left| *left > 0 && died != 0)
    }

    pub(super) fn reap_in(&self, region: &Region, own: Option<usize>) -> (bool, Option<u64>) {
        // All who are dead first: what they imported keeps nothing.
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
            // What others have imported from the dead stays charged until the driver has freed the last of it.
            let exported = region.slots.get(slot).map_or(0, |slot| slot.exported_bytes.load(Relaxed));
            let mut keep = 0;
            if exported > 0 {
                let left = imported.get_or_insert_with(|| imported_now(region, &dead));
                // What its exporter freed is what others have beyond what is exported now.
                let exported_now = if Self::is_left(region, slot) { exported_now(region) } else { 0 };
                keep = exported.min(left.saturating_sub(exported_now)).min(ledger::charged(region, slot));
                *left -= keep;
            }
            let reaped = ledger::reap_seen(region, slot, state, keep);
            if keep == 0 {
                // Those who live may hold more leases.
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

    /// Who is dead, and for how many milliseconds at the least the driver may still be freeing memory of theirs, of
    /// their own or imported.
    fn look_at_dead(&self, region: &Region, own: Option<usize>) -> (Dead, Option<u64>) {
        // Whoever is dead before NVML is asked and not in its list has nothing any more; of who dies later that says
        // nothing.
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
            let list: &Option<List> = list.get_or_insert_with(|| nvml::computing(&self.uuid()?));
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

/// How long ago somebody was found dead. Processes look at the clock one after the other; what is a second ahead was
/// written by none of them, and nobody waits for it.
const fn age_ms(since_ms: u64, now_ms: u64) -> u64 {
    if since_ms > now_ms.saturating_add(1000) { DEATH_MS } else { now_ms.saturating_sub(since_ms) }
}

/// The dead as they were looked at. Of each slot: 0 = its owner was not dead then, or else a mark of the state word in
/// which it was seen, with the lower part of the generation, and whether the driver may still be freeing its memory.
struct Dead([u16; SLOT_COUNT]);

impl Dead {
    const SEEN: u16 = 1;
    const FREEING: u16 = 2;

    const fn mark(state: u64) -> u16 {
        (region::generation(state) as u16) << 2 | Self::SEEN
    }

    /// Who is dead now, beside this process.
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

    /// Whether the owner of a slot in this state had died when they were looked at, and the driver had freed its memory.
    fn has_freed(&self, slot: usize, state: u64) -> bool {
        SlotState::of(state) == Some(SlotState::Dead) && self.0.get(slot) == Some(&Self::mark(state))
    }
}

impl Share {
    /// Marks those of these slots whose owners have died, and takes back their leases, which nobody will spend. `false`:
    /// the region cannot be opened.
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

/// Bytes that processes have imported, the dead as long as the driver may still be freeing them.
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

/// Bytes that living processes have exported. What one of them is leaving to a slot of nobody's counts as its own.
fn exported_now(region: &Region) -> u64 {
    let lives = |slot: &&Slot| {
        SlotState::of(slot.state.load(Acquire)) == Some(SlotState::Live) && slot.pid.load(Relaxed) != 0
    };
    let bytes = region.slots.iter().filter(lives).map(|slot| slot.exported_bytes.load(Relaxed));
    bytes.fold(0, u64::saturating_add)
}

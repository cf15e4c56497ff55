//! Taking back what dead processes hold.

use super::Share;
use super::files::pid_namespace;
use crate::nvml::{self, List};
use crate::sys::{self, File};
use aliquot_quota::ledger::{self, Cells, Word};
use aliquot_quota::region::{self, LOCK_BASE, Region, SLOT_COUNT, SlotState};
use core::ops::Range;
use core::sync::atomic::AtomicU64;
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
        let (mut list, mut came_back, mut wait) = (None, false, None);
        let (now, here) = (sys::now_ms(), pid_namespace());
        let others = || (0..SLOT_COUNT).filter(|slot| Some(*slot) != own);
        // All who are dead first: what they imported keeps nothing.
        if !self.find_dead(region, own, 0..SLOT_COUNT) {
            return (came_back, wait);
        }
        let mut imported = None;
        for slot in others() {
            if SlotState::of(region.load(Word::State(slot))) != Some(SlotState::Dead) {
                continue;
            }
            let age = now.saturating_sub(ledger::dead_since(region, slot, now));
            let held = ledger::charged(region, slot) > 0;
            let has_freed = |list: &mut Option<Option<List>>| {
                let owner = region.slots.get(slot).filter(|owner| owner.pid_namespace.load(Relaxed) == here);
                let list = list.get_or_insert_with(|| nvml::computing(&self.uuid()?)).as_ref();
                owner.zip(list).is_some_and(|(owner, list)| list.lacks(owner.pid.load(Relaxed)))
            };
            if held && age < DEATH_MS && !has_freed(&mut list) {
                wait = Some(wait.unwrap_or(u64::MAX).min(DEATH_MS - age));
                continue;
            }
            // What the living have imported from the dead stays charged until the last of them gives it back.
            let exported = region.slots.get(slot).map_or(0, |slot| slot.exported_bytes.load(Relaxed));
            let mut keep = 0;
            if exported > 0 {
                let left = imported.get_or_insert_with(|| of_the_living(region, |slot| &slot.imported_bytes));
                // What its exporter freed is what others have beyond what is exported now.
                let exported_now = if Self::is_left(region, slot) {
                    of_the_living(region, |slot| &slot.exported_bytes)
                } else {
                    0
                };
                keep = exported.min(left.saturating_sub(exported_now)).min(ledger::charged(region, slot));
                *left -= keep;
            }
            let reaped = ledger::reap_to(region, slot, keep);
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
                Err(_) => {
                    region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
                }
            }
        }
        (came_back, wait)
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

fn of_the_living(region: &Region, bytes: impl Fn(&region::Slot) -> &AtomicU64) -> u64 {
    let live = |slot: &&region::Slot| SlotState::of(slot.state.load(Acquire)) == Some(SlotState::Live);
    let bytes = region.slots.iter().filter(live).map(|slot| bytes(slot).load(Relaxed));
    bytes.fold(0, u64::saturating_add)
}

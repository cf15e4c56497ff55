//! The slot of a process in the region: taking one, and finding the one that was taken.

use super::bytes::{Refusal, compare};
use super::files::{map_region, open_region, pid_namespace, start_time};
use super::seat::Seat;
use super::{Share, notes};
use crate::lock::Guard;
use crate::log::Text;
use crate::sys::{self, File};
use aliquot_quota::REGION_FILE_SIZE;
use aliquot_quota::ledger::{self, Cells, Word};
use aliquot_quota::region::{LOCK_BASE, Region, SLOT_COUNT, SlotState};
use core::sync::atomic::Ordering::{Relaxed, Release};

/// The most times that a process takes another slot after it found its slot taken away. Only somebody who
/// writes into the region takes slots away.
const MOST_SITTINGS: u32 = 16;

impl Share {
    /// Takes a slot, and charges to it what this process already holds.
    fn sit(&self, seat: &mut Seat) -> Result<usize, Text<400>> {
        let path = *self.region_path.lock();
        let file = open_region(&path)?;
        // A mapping of its own, of this very open file, is what keeps the lock.
        let mapped = map_region(&file, &path)?;
        // SAFETY: just mapped, whole, and not undone unless no slot is found.
        let region = unsafe { &*mapped };
        let fd = file.into_raw();
        let take = |slot: usize| {
            if SlotState::of(region.load(Word::State(slot))) != Some(SlotState::Free)
                || sys::lock_byte(fd, LOCK_BASE + slot as u64).is_err()
            {
                return None;
            }
            if let Some(mine) = region.slots.get(slot) {
                mine.pid.store(sys::process_id(), Relaxed);
                mine.host_pid.store(0, Relaxed);
                mine.start_time.store(start_time(), Relaxed);
                mine.pid_namespace.store(pid_namespace(), Relaxed);
                mine.overhead_bytes.store(0, Relaxed);
                self.tell_shared(mine);
            }
            match ledger::attach(region, slot) {
                Some(state) => Some((slot, state)),
                None => {
                    sys::unlock_byte(fd, LOCK_BASE + slot as u64);
                    None
                }
            }
        };
        let found = (0..SLOT_COUNT).find_map(take).or_else(|| {
            // All taken, perhaps by the dead.
            self.reap_in(region, None);
            (0..SLOT_COUNT).find_map(take)
        });
        drop(File::from_raw(fd));
        let Some((slot, state)) = found else {
            // SAFETY: nothing refers to this mapping.
            unsafe { sys::free_memory(mapped.cast(), REGION_FILE_SIZE) };
            return Err(Text::of(format_args!("{SLOT_COUNT} processes already use this share")));
        };
        // The former mapping, if any, stays: other threads may be reading it. It is the same file.
        self.region.store(mapped, Release);
        (seat.slot, seat.state, seat.sittings) = (Some(slot), state, seat.sittings + 1);
        self.seated.store(slot as u32 + 1, Relaxed);
        self.join(region, slot);
        // The floor is the former slot's.
        (seat.floor, seat.looked_at) = (None, 0);
        // Charges to the new slot what this process holds already, with the rest of what is missing.
        compare(region, slot, seat.held);
        Ok(slot)
    }

    pub(super) fn seated(&self) -> Result<(Guard<'_, Seat>, &Region, usize), Refusal> {
        let mut seat = self.seat.lock();
        if let (Some(slot), Some(region)) = (seat.slot, self.region())
            && region.load(Word::State(slot)) == seat.state
        {
            return Ok((seat, region, slot));
        }
        // Either this is the first time, or another process took this one for dead and took its slot.
        if seat.sittings >= MOST_SITTINGS {
            return Err(Refusal::Broken);
        }
        match self.sit(&mut seat) {
            Ok(slot) => Ok((seat, self.region().ok_or(Refusal::Broken)?, slot)),
            Err(reason) => {
                crate::log::note(format_args!("no device memory can be charged: {reason}"));
                Err(Refusal::Broken)
            }
        }
    }

    /// Takes a slot now, so that a region that cannot be used is found early.
    pub(crate) fn attach(&self) -> Result<(), Text<400>> {
        let mut seat = self.seat.lock();
        if seat.slot.is_none() {
            self.sit(&mut seat)?;
        }
        self.note(notes::kept());
        Ok(())
    }
}

//! Charging bytes to a share, and releasing them.

use super::Share;
use super::floor::{self, Floor};
use super::seat::Seat;
use crate::sys;
use aliquot_quota::ledger::{self, Cells, LedgerError, Word};
use aliquot_quota::region::{self, Region};
use core::sync::atomic::Ordering::Relaxed;

/// The kind of memory that bytes are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Memory on the device.
    Device,
    /// Managed memory, wherever the driver moves it; a share may be allowed to have more of it than fits its
    /// quota.
    Managed,
}

/// Why bytes could not be charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The bytes do not fit the quota.
    Quota,
    /// The region cannot be used.
    Broken,
}

/// The shortest time between two comparisons of the total with its parts, in milliseconds.
const COMPARE_AGE_MS: u64 = 10;

/// The number of times that floors are read again because charges and releases came in between.
const LOOKS: u32 = 20;

impl Share {
    /// Charges all of `bytes` or nothing. `now_ms`, here and below, is [`sys::coarse_ms`].
    pub(crate) fn charge(&self, bytes: u64, kind: Kind, now_ms: u64) -> Result<(), Refusal> {
        self.change(bytes, kind, now_ms, |region, slot, held, limit| {
            ledger::charge(region, slot, held, bytes, limit).map(|_| bytes)
        })
        .map(drop)
    }

    /// Charges up to `bytes`; returns the number of bytes charged.
    pub(crate) fn charge_up_to(&self, bytes: u64, kind: Kind, now_ms: u64) -> Result<u64, Refusal> {
        self.change(bytes, kind, now_ms, |region, slot, held, limit| {
            ledger::charge_up_to(region, slot, held, bytes, limit)
        })
    }

    /// Returns the bytes that could be charged now.
    pub(crate) fn room(&self, kind: Kind, now_ms: u64) -> u64 {
        self.limit_of(kind, now_ms).saturating_sub(self.total())
    }

    fn change(
        &self,
        bytes: u64,
        kind: Kind,
        now_ms: u64,
        make: impl Fn(&Region, usize, u64, u64) -> Result<u64, LedgerError>,
    ) -> Result<u64, Refusal> {
        let limit = self.limit_of(kind, now_ms);
        let (mut seat, region, slot) = self.seated()?;
        let grows = limit != u64::MAX && has_grown(seat.held.saturating_add(bytes), seat.looked_at, limit);
        if grows || now_ms.wrapping_sub(seat.compared_ms) >= COMPARE_AGE_MS {
            seat.compared_ms = now_ms;
            compare(region, slot, seat.held);
        }
        let made = match make(region, slot, seat.held, limit) {
            Err(LedgerError::Corrupt) if compare(region, slot, seat.held) => {
                make(region, slot, seat.held, limit)
            }
            made => made,
        };
        let charged = made.map_err(|error| refuse(region, error))?;
        seat.held += charged;
        if grows && !self.fits_above_floors(&mut seat, slot, limit) {
            region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
            self.release_held(&mut seat, charged);
            return Err(Refusal::Quota);
        }
        let total = ledger::total(region);
        if total > region.header.peak_bytes.load(Relaxed) {
            region.header.peak_bytes.fetch_max(total, Relaxed);
        }
        Ok(charged)
    }

    /// Raises the floor to what this process holds now. Returns true if that and what the others hold at
    /// least are within the limit, which they always are unless somebody has written into the region.
    fn fits_above_floors(&self, seat: &mut Seat, slot: usize, limit: u64) -> bool {
        let path = *self.region_path.lock();
        if seat.held >= floor::part(limit) {
            match Floor::take(&path, slot, seat.held) {
                Ok(floor) => seat.floor = Some(floor),
                // Somebody else has locked bytes that only this process locks.
                Err(sys::EAGAIN) => return false,
                Err(_) => {}
            }
        }
        let Some(region) = self.region() else { return true };
        for _ in 0..LOOKS {
            let before = region.load(Word::Op);
            let all = seat.held.saturating_add(floor::of_others(&path, slot));
            if all <= self.widest() {
                seat.looked_at = seat.held;
                return true;
            }
            // While nothing is charged and released, floors that were read one after the other belong
            // together.
            if region.load(Word::Op) == before {
                break;
            }
        }
        false
    }

    /// Charges bytes that exist already, whatever the limit is.
    pub(crate) fn charge_forced(&self, bytes: u64) {
        if let Ok((mut seat, region, slot)) = self.seated() {
            seat.held = seat.held.saturating_add(bytes);
            let held = seat.held - bytes;
            if ledger::charge_forced(region, slot, held, bytes).is_err() {
                compare(region, slot, seat.held);
            }
        }
    }

    /// Releases up to `bytes` of what this process has charged; returns the number of bytes released.
    pub(crate) fn release_up_to(&self, bytes: u64) -> u64 {
        let mut seat = self.seat.lock();
        let bytes = bytes.min(seat.held);
        if bytes > 0 {
            self.release_held(&mut seat, bytes);
        }
        bytes
    }

    /// Releases `bytes`, which are no more than are held.
    fn release_held(&self, seat: &mut Seat, bytes: u64) {
        let before = seat.held;
        seat.held -= bytes;
        seat.looked_at = seat.looked_at.min(seat.held);
        let (Some(slot), Some(region)) = (seat.slot, self.region()) else { return };
        // The floor is lowered first: others must never see a floor above what is charged.
        if seat.floor.as_ref().is_some_and(|floor| floor.bytes() > seat.held) {
            let path = *self.region_path.lock();
            let lower = seat.held.saturating_sub(floor::part(self.file_limit.load(Relaxed)) / 2);
            seat.floor = if lower >> 20 == 0 { None } else { Floor::take(&path, slot, lower).ok() };
        }
        if region.load(Word::State(slot)) != seat.state {
            return;
        }
        let released = match ledger::release(region, slot, before, bytes) {
            Err(LedgerError::Corrupt) if compare(region, slot, before) => {
                ledger::release(region, slot, before, bytes)
            }
            released => released,
        };
        if released == Err(LedgerError::Corrupt) {
            region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
        }
    }

    /// Publishes how many bytes of this process's charge are not allocations.
    pub(crate) fn show_overhead(&self, bytes: u64) {
        let seat = self.seat.lock();
        if let (Some(slot), Some(region)) = (seat.slot, self.region())
            && let Some(slot) = region.slots.get(slot)
        {
            slot.overhead_bytes.store(bytes, Relaxed);
        }
    }

    /// Counts a refused allocation.
    pub(crate) fn count_refusal(&self) {
        if let Some(region) = self.region() {
            region.header.refused.fetch_add(1, Relaxed);
        }
    }

    /// Returns the bytes that this process has charged.
    pub(crate) fn held(&self) -> u64 {
        self.seat.lock().held
    }

    /// Returns the bytes charged by all processes of the claim, at least what this process has charged.
    pub(crate) fn total(&self) -> u64 {
        self.region().map_or(0, ledger::total).max(self.held())
    }
}

/// Returns true if a process that comes to hold `held` bytes has grown so much since floors were last read
/// that they have to be read again.
const fn has_grown(held: u64, looked_at: u64, limit: u64) -> bool {
    held > looked_at && held - looked_at >= floor::part(limit)
}

/// Compares the total with its parts, and the slot with what its owner knows. Returns true if one was too
/// low; it is then raised and the damage noted.
pub(super) fn compare(region: &Region, slot: usize, held: u64) -> bool {
    let mended = ledger::mend(region, slot, held) == Ok(true);
    if mended {
        region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
    }
    mended
}

fn refuse(region: &Region, error: LedgerError) -> Refusal {
    match error {
        LedgerError::Refused(_) => Refusal::Quota,
        LedgerError::Busy => Refusal::Broken,
        LedgerError::Corrupt => {
            region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
            Refusal::Broken
        }
    }
}

//! Memory that processes of the share have from each other, as each publishes it in its slot.

use super::Share;
use aliquot_quota::ledger;
use aliquot_quota::region::{self, SlotState};
use core::sync::atomic::Ordering::{Acquire, Relaxed};

impl Share {
    /// Publishes how many bytes this process has exported and imported.
    pub(crate) fn show_shared(&self, exported: u64, imported: u64) {
        let [mine, others] = &self.shared;
        mine.store(exported, Relaxed);
        others.store(imported, Relaxed);
        if let Ok((_seat, region, slot)) = self.seated()
            && let Some(slot) = region.slots.get(slot)
        {
            self.tell_shared(slot);
        }
    }

    /// Returns the bytes that other processes have imported, and those that they have exported. Of a dead
    /// process, the first are bytes that the driver may still be freeing.
    pub(crate) fn shared_by_others(&self) -> (u64, u64) {
        let (Some(region), own) = (self.region(), self.slot()) else { return (0, 0) };
        let others = region.slots.iter().enumerate().filter(|(slot, _)| Some(*slot) != own);
        others.fold((0, 0), |(imported, exported), (index, slot)| {
            let (theirs, given) = match SlotState::of(slot.state.load(Acquire)) {
                // Being left to nobody: its exporter tells of it as well.
                Some(SlotState::Live) if slot.pid.load(Relaxed) == 0 => (0, 0),
                Some(SlotState::Live) => {
                    (slot.imported_bytes.load(Relaxed), slot.exported_bytes.load(Relaxed))
                }
                // The bytes kept for a process that died, but no more than its slot is still charged.
                Some(SlotState::Dead) => (
                    slot.imported_bytes.load(Relaxed),
                    slot.exported_bytes.load(Relaxed).min(ledger::charged(region, index)),
                ),
                _ => (0, 0),
            };
            (imported.saturating_add(theirs), exported.saturating_add(given))
        })
    }

    pub(super) fn tell_shared(&self, slot: &region::Slot) {
        let [mine, others] = &self.shared;
        slot.exported_bytes.store(mine.load(Relaxed), Relaxed);
        slot.imported_bytes.store(others.load(Relaxed), Relaxed);
    }
}

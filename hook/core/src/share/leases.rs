//! GPU time that the share's processes have leased: what each may hold, and what comes back from the dead.

use super::Share;
use crate::sys;
use aliquot_quota::gate;
use aliquot_quota::lease::{HOLDERS, Lease, Purse, allowance_ns};
use aliquot_quota::ledger::{Cells, Word};
use aliquot_quota::own::Own;
use aliquot_quota::region::{Region, SlotState};
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

/// The time after which a waiting process looks again for others that have died with leases, in milliseconds.
const LOOK_MS: u64 = 500;

impl Share {
    /// Returns this process's leases, if its slot is one of those that can have some.
    pub(crate) fn purse(&self) -> Option<&Purse> {
        self.region()?.compute.purses.get(self.slot()?)
    }

    /// Returns this process's own account of its GPU time.
    pub(crate) const fn own(&self) -> &Own {
        &self.own
    }

    /// Returns what this process may hold in leases now, in nanoseconds of GPU time.
    pub(crate) fn allowance_ns(&self) -> u64 {
        let Some(region) = self.region() else { return 0 };
        // Read first: a process that comes while the others are counted makes the figure old.
        let members = region.compute.members.load(SeqCst) << 8;
        let counted = self.counted.load(Relaxed);
        let holders = if counted & !0xff == members && counted & 0xff != 0 {
            counted & 0xff
        } else {
            let holders = holders(region) as u64;
            self.counted.store(members | holders, Relaxed);
            holders
        };
        allowance_ns(holders as usize)
    }

    /// Gives back to the share a lease that was taken out of a purse.
    pub(crate) fn give_back(&self, lease: Lease) {
        if let Some(region) = self.region() {
            self.give_back_in(region, lease);
        }
    }

    fn give_back_in(&self, region: &Region, lease: Lease) {
        // Without a limit there is no account of time.
        let percent = self.percent.load(Relaxed) as u8;
        if lease.ns > 0 && percent > 0 {
            gate::give_back(&region.compute, sys::now_ns(), lease, percent);
        }
    }

    /// Lets this process join at a slot: it begins without leases, and the others may hold less from now on.
    pub(super) fn join(&self, region: &Region, slot: usize) {
        self.take_leases(region, slot, 0);
        self.counted.store(0, Relaxed);
        region.compute.members.fetch_add(1, SeqCst);
        let holders = holders(region);
        if allowance_ns(holders) < allowance_ns(holders.saturating_sub(1)) {
            (0..HOLDERS).for_each(|slot| self.take_leases(region, slot, allowance_ns(holders)));
        }
    }

    /// Takes what a slot holds in leases beyond `most_ns`. Its owner, if it lives, finds less there.
    pub(super) fn take_leases(&self, region: &Region, slot: usize, most_ns: u64) {
        if let Some(purse) = region.compute.purses.get(slot) {
            purse.trim(most_ns).into_iter().for_each(|lease| self.give_back_in(region, lease));
        }
    }

    /// Takes back, every now and then, what processes that have died held in leases.
    pub(crate) fn look_for_leases(&self) {
        let (now, before) = (sys::coarse_ms(), self.looked_ms.load(Relaxed));
        if now.wrapping_sub(before) >= LOOK_MS
            && self.looked_ms.compare_exchange(before, now, Relaxed, Relaxed).is_ok()
            && let Some(region) = self.region()
        {
            self.find_dead(region, self.slot(), 0..HOLDERS);
        }
    }
}

/// Returns the number of slots in use, of those that can have leases.
fn holders(region: &Region) -> usize {
    let is_used = |slot: &usize| SlotState::of(region.load(Word::State(*slot))) != Some(SlotState::Free);
    (0..HOLDERS).filter(is_used).count()
}

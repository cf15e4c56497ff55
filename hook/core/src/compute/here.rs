//! What the pacer needs from this process: the clock, the accounts of the shares, and the driver's events.

use super::book::{HANDLES, LOOKING, METER, OWNERS, PURSES, till};
use super::limits::{BORROWED, limiting, payer};
use crate::device::Device;
use crate::nvml::ask;
use crate::share::Share;
use crate::stream::LEGACY;
use crate::{account, captures, device, real, sys};
use aliquot_quota::gate::{self, Entrance, Terms};
use aliquot_quota::lease::{Lease, Purse, Room};
use aliquot_quota::meter::{ASSUMED_SLICE_NS, Launch, Meter, Others, Seen};
use aliquot_quota::pacer::{Answer, Ask, Host, Reached, Timing};
use aliquot_quota::till::Till;
use core::cell::Cell;
use core::ptr::null_mut;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The time after which the processes on a GPU are counted again, in milliseconds.
const COUNT_AGE_MS: u64 = 1000;
/// A context on a device, for the pacer.
pub(super) struct Here {
    pub(super) device: Device,
    context: u64,
    /// True if the launch has waited as long as any does.
    pub(super) is_overdue: Cell<bool>,
}

impl Host for Here {
    fn now_ns(&self) -> u64 {
        sys::now_ns()
    }

    fn meter<T>(&self, part: impl FnOnce(&mut Meter) -> T) -> T {
        part(&mut METER.lock())
    }

    fn till(&self) -> &Till {
        till(self.device)
    }

    fn purse(&self) -> Option<&Purse> {
        let found = limiting(self.device).next().and_then(|(_, share, _)| share.purse());
        if let Some(cell) = PURSES.get(self.device) {
            cell.store(found.map_or(null_mut(), |purse| core::ptr::from_ref(purse).cast_mut()), Release);
        }
        found
    }

    fn allowance_ns(&self) -> u64 {
        limiting(self.device).next().map_or(0, |(_, share, _)| share.allowance_ns())
    }

    fn account(&self, is_borrowed: bool) -> u32 {
        let own = limiting(self.device).next().map_or(0, |(index, ..)| index as u32);
        if is_borrowed { own | BORROWED } else { own }
    }

    fn give_back(&self, lease: Lease) {
        if let Some((_, share, _)) = limiting(self.device).next() {
            share.give_back(lease);
        }
    }

    fn give_back_own(&self, lease: Lease) {
        if let Some((_, share, percent)) = limiting(self.device).next()
            && lease.ns > 0
        {
            share.own().give_back(sys::now_ns(), lease, percent);
        }
    }

    fn timing(&self, launch: &Launch) -> Timing {
        match captures::are_open() {
            false => Timing::Windows,
            // An event on the legacy stream would spoil the capture of any blocking stream.
            true if launch.stream == LEGACY => Timing::No,
            true => Timing::Alone,
        }
    }

    fn admit(&self, now_ns: u64, ask: Ask) -> Answer {
        let mut earliest = u64::MAX;
        for (at, (index, share, percent)) in limiting(self.device).enumerate() {
            let Some(region) = share.region() else { continue };
            let (compute, own, grant) = (&region.compute, share.own(), share.grant(now_ns));
            gate::true_up(compute, own, now_ns, &grant, percent);
            let terms = Terms { percent, borrow_percent: grant.borrow_percent };
            // Leases are the first one's.
            let room = if at == 0 { ask.room } else { Room::default() };
            let ask = Ask { slot: share.slot().unwrap_or(usize::MAX), room, ..ask };
            let entrance = match self.is_overdue.get() {
                true => gate::enter_overdue(compute, own, now_ns, ask, terms),
                false => gate::enter(compute, own, now_ns, ask, terms),
            };
            match entrance {
                Entrance::Own(ns) => return Answer::Go(index as u32, Lease { ns, is_borrowed: false }),
                Entrance::Borrowed(ns) => {
                    return Answer::Go(index as u32 | BORROWED, Lease { ns, is_borrowed: true });
                }
                Entrance::Wait(until) => earliest = earliest.min(until),
            }
        }
        if earliest == u64::MAX { Answer::Free } else { Answer::Wait(earliest) }
    }

    fn correct(&self, account: u32, delta_ns: i64) {
        let Some((share, region)) = payer(account) else { return };
        let now = sys::now_ns();
        if account & BORROWED != 0 {
            let percent = share.grant(now).borrow_percent.max(1);
            share.own().correct_borrowed(now, delta_ns, percent);
            gate::correct_borrowed(&region.compute, now, delta_ns, percent);
        } else if share.percent() > 0 {
            share.own().correct(now, delta_ns, share.percent());
            gate::correct(&region.compute, now, delta_ns, share.percent());
        }
    }

    fn untimed(&self, account: u32, wall_ns: u64) {
        if let Some((share, _)) = payer(account) {
            share.own().untimed(wall_ns);
        }
    }

    fn log(&self, account: u32, seen: &Seen) {
        if let Some((share, region)) = payer(account)
            && let Some(slot) = share.slot()
        {
            gate::log(&region.compute, share.own(), slot as u16, account & BORROWED != 0, seen);
        }
    }

    fn is_pending(&self, pending: bool) {
        for (_, share, _) in limiting(self.device) {
            if let (Some(region), Some(slot)) = (share.region(), share.slot())
                && let Some(mine) = region.slots.get(slot)
                && mine.pending.load(Relaxed) != u64::from(pending)
            {
                mine.pending.store(u64::from(pending), Release);
            }
        }
    }

    fn others(&self) -> Others {
        let granted = limiting(self.device).map(|(_, share, _)| share.grant(sys::now_ns()));
        match granted.filter(|grant| grant.own_permille > 0).min_by_key(|grant| grant.own_permille) {
            Some(grant) => Others {
                own_permille: Some(u32::from(grant.own_permille)),
                slice_ns: if grant.slice_us == 0 {
                    ASSUMED_SLICE_NS
                } else {
                    u64::from(grant.slice_us) * 1000
                },
            },
            None if processes(self.device) <= 1 => Others::NONE,
            None => Others { own_permille: None, slice_ns: ASSUMED_SLICE_NS },
        }
    }

    fn record(&self, event: usize, stream: u64) -> bool {
        let Some(handle) = self.event(event) else { return false };
        // SAFETY: an event of the current context, and the stream of a launch of the program.
        unsafe { real::cuEventRecord(handle, stream) == Some(0) }
    }

    fn reached(&self, event: usize) -> Reached {
        const NOT_READY: i32 = 600;
        // SAFETY: an event of ours, of a context that lives: else it would have been forgotten.
        match self.known(event).and_then(|handle| unsafe { real::cuEventQuery(handle) }) {
            Some(0) => Reached::Yes,
            Some(NOT_READY) => Reached::No,
            _ => Reached::Lost,
        }
    }

    fn between(&self, from: usize, to: usize) -> Option<i64> {
        let (from, to) = (self.known(from)?, self.known(to)?);
        let mut millis = 0.0_f32;
        // SAFETY: events of ours, of a context that lives; the driver writes one number.
        let code = unsafe { real::cuEventElapsedTime(&mut millis, from, to) };
        (code == Some(0)).then_some((f64::from(millis) * 1e6) as i64)
    }

    fn may_look(&self) -> bool {
        !LOOKING.swap(true, AcqRel)
    }

    fn has_looked(&self) {
        LOOKING.store(false, Release);
    }
}

impl Here {
    pub(super) const fn new(device: Device, context: u64) -> Self {
        Self { device, context, is_overdue: Cell::new(false) }
    }

    /// Returns the driver's handle of an event, if it is of this context.
    fn known(&self, event: usize) -> Option<u64> {
        let is_ours = OWNERS.get(event)?.load(Acquire) == self.context;
        HANDLES.get(event).map(|handle| handle.load(Acquire)).filter(|handle| is_ours && *handle != 0)
    }

    /// Returns the driver's handle of an event of this context, which is made if need be.
    fn event(&self, event: usize) -> Option<u64> {
        if let Some(known) = self.known(event) {
            return Some(known);
        }
        let (handle, owner) = (HANDLES.get(event)?, OWNERS.get(event)?);
        let stranger = handle.swap(0, AcqRel);
        if stranger != 0 {
            // SAFETY: an event of ours, of a context that lives: else it would have been forgotten.
            unsafe { real::cuEventDestroy_v2(stranger) };
        }
        let mut made = 0;
        // SAFETY: the driver writes one handle.
        if unsafe { real::cuEventCreate(&mut made, 0) } != Some(0) {
            return None;
        }
        owner.store(self.context, Release);
        handle.store(made, Release);
        Some(made)
    }
}

/// Returns the number of processes with contexts on a device. If NVML does not tell, that is 1, so that a
/// measurement counts in full.
fn processes(device: Device) -> u32 {
    static COUNTED: [AtomicU64; device::MOST] = [const { AtomicU64::new(0) }; device::MOST];
    let Some(cell) = COUNTED.get(device) else { return 1 };
    let (now, before) = (sys::coarse_ms(), cell.load(Relaxed));
    // Milliseconds since boot, and the count in the lowest 16 bits.
    if before != 0 && now.wrapping_sub(before >> 16) < COUNT_AGE_MS {
        return (before & 0xffff) as u32;
    }
    let uuid = account::shares_on(device).find_map(Share::uuid);
    let count = uuid.and_then(|uuid| ask::computing(&uuid)).map_or(1, |list| list.len().clamp(1, 0xffff));
    cell.store(now << 16 | count as u64, Relaxed);
    count as u32
}

//! What this process keeps about its launches: costs, tills, leases, and the learner's events.

use crate::device::{self, Device};
use crate::lock::Mutex;
use aliquot_quota::lease::Purse;
use aliquot_quota::meter::{EVENTS, Meter};
use aliquot_quota::till::Till;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};

/// What launches cost, as learned.
pub(super) static METER: Mutex<Meter> = Mutex::new(Meter::new());

/// What each device's launches are paid from without the meter.
pub(super) static TILLS: [Till; device::MOST] = [const { Till::new() }; device::MOST];

/// This process's leases of each device, as last seen: in the region of the first share that limits it.
pub(super) static PURSES: [AtomicPtr<Purse>; device::MOST] =
    [const { AtomicPtr::new(null_mut()) }; device::MOST];

/// The driver's handles of the learner's events; their contexts follow. Each event is one thread's at a time.
pub(super) static HANDLES: [AtomicU64; EVENTS] = [const { AtomicU64::new(0) }; EVENTS];
pub(super) static OWNERS: [AtomicU64; EVENTS] = [const { AtomicU64::new(0) }; EVENTS];

/// True while a thread looks at events; only one does at a time.
pub(super) static LOOKING: AtomicBool = AtomicBool::new(false);

/// Returns the till of a device.
pub(super) fn till(device: Device) -> &'static Till {
    static NONE: Till = Till::new();
    TILLS.get(device).unwrap_or(&NONE)
}

/// Returns this process's leases of a device, as last seen.
#[inline]
pub(super) fn purse(device: Device) -> Option<&'static Purse> {
    // SAFETY: null, or part of a mapping that is never undone in this process; forked children forget it.
    PURSES.get(device).and_then(|cell| unsafe { cell.load(Acquire).as_ref() })
}

/// Forgets the events of a context that is gone.
pub(crate) fn context_gone(context: u64) {
    METER.lock().context_gone(context);
    for (handle, owner) in HANDLES.iter().zip(&OWNERS) {
        if owner.load(Acquire) == context {
            handle.store(0, Release);
            owner.store(0, Release);
        }
    }
}

/// Forgets all launches, in a forked child.
pub(crate) fn renew_after_fork() {
    METER.renew_after_fork();
    METER.lock().clear();
    PURSES.iter().for_each(|cell| cell.store(null_mut(), Relaxed));
    HANDLES.iter().chain(&OWNERS).for_each(|cell| cell.store(0, Relaxed));
    for till in &TILLS {
        till.watch(false);
        till.renew_after_fork();
        till.forget();
    }
    LOOKING.store(false, Release);
}

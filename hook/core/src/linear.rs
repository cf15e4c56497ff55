//! Linear, pitched and managed memory, and arrays.

use crate::account;
use crate::allocations::{BOOK, Origin, PACKING_DOUBTED};
use crate::captures;
use crate::cu_result::{OUT_OF_MEMORY, REFUSED};
use crate::device::Device;
use crate::gate::{Gate, gate};
use crate::map::Full;
use crate::pages::Pages;
use crate::pools::reserved as pools;
use crate::real::{self, call};
use crate::reclaim;
use crate::share::Kind;
use crate::shared::{self, Side};
use crate::state::{self, Mode};
use aliquot_quota::region::audit;
use core::sync::atomic::Ordering::Relaxed;

/// Allocates packed memory: charges the most that it can take, calls the driver, then lowers the charge to
/// what it did take. `made` returns the address and the true size.
pub(crate) fn allocate(
    kind: Kind,
    bytes: Option<u64>,
    driver: impl Fn() -> i32,
    made: impl Fn() -> (u64, u64),
    undo: impl Fn(u64),
) -> i32 {
    let (device, context) = match gate() {
        Gate::Pass => return driver(),
        Gate::Refuse(code) => return code,
        Gate::Limit(device, context) => (device, context),
    };
    // An overflowing size cannot be had; a zero one is the driver's to refuse.
    let Some(bytes) = bytes else { return OUT_OF_MEMORY };
    if bytes == 0 {
        return driver();
    }
    let Some(most) = Pages::most(bytes) else { return OUT_OF_MEMORY };
    let reserved = if reclaim::try_charge_as(device, most, kind).is_ok() {
        most
    } else if fits_a_gap(device, bytes, context) {
        0
    } else {
        match reclaim::charge_as(device, most, kind) {
            Ok(()) => most,
            Err(code) => return code,
        }
    };
    let code = reclaim::retry(device, driver(), &driver);
    if code != 0 {
        account::release(device, reserved);
        return code;
    }
    let (address, bytes) = made();
    let taken = {
        let mut book = BOOK.lock();
        match book.known.reserve_one() {
            Ok(()) => {
                let taken = book
                    .pages
                    .get_mut(device)
                    .ok_or(Full)
                    .and_then(|pages| pages.take(address, bytes, context));
                if taken.is_ok() {
                    let origin = Origin::Linear { device: device as u16, bytes, context };
                    let _ = book.known.insert(address, origin);
                }
                taken
            }
            Err(full) => Err(full),
        }
    };
    match taken {
        Ok(taken) if taken <= reserved => {
            account::release(device, reserved - taken);
            0
        }
        Ok(taken) => {
            // The driver took more than it should have needed. It keeps it only if it fits all the same.
            account::note(device, audit::PACKING);
            PACKING_DOUBTED.store(true, Relaxed);
            if reclaim::try_charge_as(device, taken - reserved, kind).is_ok() {
                return 0;
            }
            forget(address);
            undo(address);
            account::release(device, reserved);
            OUT_OF_MEMORY
        }
        Err(Full) => {
            undo(address);
            account::release(device, reserved);
            OUT_OF_MEMORY
        }
    }
}

fn fits_a_gap(device: Device, bytes: u64, context: u64) -> bool {
    !PACKING_DOUBTED.load(Relaxed)
        && BOOK.lock().pages.get(device).is_some_and(|pages| pages.fits_a_gap(bytes, context))
}

/// Forgets an address without releasing anything.
fn forget(address: u64) {
    let mut book = BOOK.lock();
    if let Some(Origin::Linear { device, bytes, .. }) = book.known.remove(address)
        && let Some(pages) = book.pages.get_mut(usize::from(device))
    {
        pages.give(address, bytes);
    }
}

/// Frees whatever an address is. With a `stream`, the free is in that stream's order, which may still have
/// work before it.
pub(crate) fn free(address: u64, stream: Option<u64>, driver: impl Fn() -> i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    // Taken out first: the driver may give the address to another thread as soon as it is free. Its slab
    // stays taken until the driver is done.
    let found = BOOK.lock().known.remove(address);
    let code = driver();
    let Some(origin) = found else {
        if code == 0 {
            // An allocation of another process's pool is freed like one of this process.
            shared::forget(Side::Imported, address);
        }
        return code;
    };
    if code != 0 {
        let _ = BOOK.lock().known.insert(address, origin);
        return code;
    }
    match origin {
        Origin::Linear { device, bytes, .. } => {
            if let Some(stream) = stream {
                // Memory of a context freed in stream order is there until the stream gets to it.
                // SAFETY: the stream that the program has just used.
                captures::relaxed(|| unsafe { real::cuStreamSynchronize(stream) });
            }
            give_back(usize::from(device), address, bytes);
        }
        Origin::Array { device, bytes, .. } => account::release(usize::from(device), bytes),
        Origin::Pooled { pool } => {
            shared::forget(Side::Exported, address);
            pools::freed(pool);
        }
    }
    0
}

fn give_back(device: Device, address: u64, bytes: u64) {
    let of_slab = || BOOK.lock().pages.get_mut(device).map_or(0, |pages| pages.give(address, bytes));
    let given = Pages::whole(address, bytes).unwrap_or_else(of_slab);
    account::release(device, shared::freed(address, device, given));
}

/// Allocates and charges an array of a size known beforehand.
pub(crate) fn allocate_array(
    bytes: Option<u64>,
    driver: impl Fn() -> i32,
    made: impl Fn() -> u64,
    undo: impl Fn(u64),
) -> i32 {
    let (device, context) = match gate() {
        Gate::Pass => return driver(),
        Gate::Refuse(code) => return code,
        Gate::Limit(device, context) => (device, context),
    };
    // An overflowing size cannot be had.
    let Some(bytes) = bytes else { return OUT_OF_MEMORY };
    if let Err(code) = reclaim::charge(device, bytes) {
        return code;
    }
    let code = reclaim::retry(device, driver(), &driver);
    if code != 0 {
        account::release(device, bytes);
        return code;
    }
    let handle = made();
    let origin = Origin::Array { device: device as u16, bytes, context };
    if BOOK.lock().known.insert(handle, origin).is_err() {
        undo(handle);
        account::release(device, bytes);
        return OUT_OF_MEMORY;
    }
    0
}

/// Gives another process the right to open memory; the driver gives whole slabs.
pub(crate) fn export(address: u64, driver: impl Fn() -> i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    let code = driver();
    if code == 0 {
        let mut found = None;
        let book = BOOK.lock();
        let inside = |start: u64, origin: &Origin| matches!(origin, Origin::Linear { bytes, .. } if address >= start && address - start < *bytes);
        if let Some(start) = book.known.find_key(inside)
            && let Some(Origin::Linear { device, bytes, context }) = book.known.get(start)
        {
            found = Some((start, device, bytes, context));
        }
        drop(book);
        if let Some((start, device, bytes, context)) = found {
            let bytes = Pages::most(bytes).unwrap_or(bytes);
            shared::note(Side::Exported, start, usize::from(device), bytes, context);
        }
    }
    code
}

/// Opens another process's memory.
pub(crate) fn open_shared(driver: impl Fn() -> i32, made: impl Fn() -> u64) -> i32 {
    let (device, context) = match gate() {
        Gate::Pass => return driver(),
        Gate::Refuse(code) => return code,
        Gate::Limit(device, context) => (device, context),
    };
    let code = driver();
    if code == 0 {
        let (address, mut base, mut bytes) = (made(), 0_u64, 0_usize);
        // SAFETY: the results outlive the call.
        let told = unsafe { real::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) };
        if told == Some(0) {
            let bytes = Pages::most(bytes as u64).unwrap_or(bytes as u64);
            shared::note(Side::Imported, address, device, bytes, context);
        }
    }
    code
}

/// Closes another process's memory.
pub(crate) fn close_shared(address: u64, driver: impl Fn() -> i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    let code = driver();
    if code == 0 {
        shared::forget(Side::Imported, address);
    }
    code
}

/// Releases everything that died with a context.
pub(crate) fn context_gone(context: u64) {
    shared::context_gone(context);
    loop {
        let mut book = BOOK.lock();
        let dead = book.known.find_key(|_, origin| match origin {
            Origin::Linear { context: of, .. } | Origin::Array { context: of, .. } => *of == context,
            Origin::Pooled { .. } => false,
        });
        let Some((address, origin)) = dead.and_then(|key| Some((key, book.known.remove(key)?))) else {
            return;
        };
        drop(book);
        match origin {
            Origin::Linear { device, bytes, .. } => give_back(usize::from(device), address, bytes),
            Origin::Array { device, bytes, .. } => account::release(usize::from(device), bytes),
            Origin::Pooled { .. } => {}
        }
    }
}

/// Frees an address through the driver, to undo an allocation.
pub(crate) fn driver_free(address: u64) {
    // SAFETY: an address that the driver has just given out and nobody has seen.
    unsafe { call!(cuMemFree_v2(address)) };
}

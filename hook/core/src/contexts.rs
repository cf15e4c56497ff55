//! Contexts: what they cost, and what goes with them.
//!
//! A context takes device memory that no allocation shows. Where NVML lists this process, that memory is
//! measured by NVML before and after, and remembered in the region, so that the next process charges it
//! before its context is made. Otherwise it is assumed from the size of the GPU. A context that does not fit
//! is undone.

pub(crate) mod book;
mod limits;
pub(crate) mod overhead;

pub(crate) use limits::set as set_limit;

use crate::account;
use crate::config;
use crate::cu_result::{OUT_OF_MEMORY, REFUSED};
use crate::device::{self, Device};
use crate::nvml::ask::{self, Use};
use crate::reclaim;
use crate::state::{self, Mode};
use crate::{captures, compute, linear, log, real};
use book::{COSTS, Cost, PRIMARY, REFRESHING, UnderWay, note_change};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use overhead::used_by_us;

/// Device memory of a context for each multiprocessor, in bytes, where it can be neither measured nor looked
/// up (assumed: 0.4 to 0.6 GiB on the large boards).
const ASSUMED_PER_MULTIPROCESSOR: u64 = 4 << 20;

fn ordinal(device: i32) -> Option<Device> {
    usize::try_from(device).ok().filter(|device| *device < device::MOST)
}

/// Makes a context on a device; `made` returns its handle.
pub(crate) fn create(
    device: i32,
    driver: impl Fn() -> i32,
    made: impl Fn() -> u64,
    undo: impl Fn(u64),
) -> i32 {
    match state::mode() {
        Mode::Failed => return REFUSED,
        Mode::Unlimited => return driver(),
        Mode::Limited => {}
    }
    let Some(index) = ordinal(device).filter(|device| account::is_limited(*device)) else { return driver() };
    let _under_way = UnderWay::begin();
    let known = known_cost(index);
    if reclaim::charge(index, known).is_err() {
        return OUT_OF_MEMORY;
    }
    let is_first = COSTS.lock().find_key(|_, cost| usize::from(cost.device) == index).is_none();
    let before = used_by_us(index);
    let held_before = account::held(index);
    let code = reclaim::retry(index, driver(), &driver);
    if code != 0 {
        account::release(index, known);
        return code;
    }
    let context = made();
    device::remember(context, device);
    let measured = match (before, used_by_us(index)) {
        // A process of this pid that had memory before this process's first context is another one.
        (Use::Listed(_), _) if is_first => None,
        (Use::Listed(before), Use::Listed(after)) => after.checked_sub(before),
        (Use::NotListed, Use::Listed(after)) => {
            ask::trust_pids();
            Some(after)
        }
        _ => None,
    };
    // Memory that other threads allocated meanwhile is not the context's.
    let meanwhile = account::held(index).saturating_sub(held_before);
    let cost = match measured {
        Some(measured) => {
            let cost = measured.saturating_sub(meanwhile);
            if is_first {
                remember_cost(index, cost);
            }
            cost
        }
        None if known > 0 => known,
        None => assumed_cost(device),
    };
    let fits = if cost > known {
        reclaim::charge(index, cost - known).is_ok()
    } else {
        account::release(index, known - cost);
        true
    };
    match enter(context, index, cost, fits) {
        Entered::New => 0,
        Entered::Known => {
            // Another thread made the same primary context at the same time, and charged it.
            account::release(index, if fits { cost } else { known });
            0
        }
        Entered::Refused => {
            account::release(index, if fits { cost } else { known });
            undo(context);
            device::forget(context);
            OUT_OF_MEMORY
        }
    }
}

enum Entered {
    New,
    Known,
    Refused,
}

/// Keeps the cost of a new context, at once in both places where [`overhead::refresh`] looks.
fn enter(context: u64, device: Device, bytes: u64, fits: bool) -> Entered {
    let _one_at_a_time = REFRESHING.lock();
    let mut costs = COSTS.lock();
    if costs.get(context).is_some() {
        return Entered::Known;
    }
    if !fits
        || costs.insert(context, Cost { device: device as u16, bytes, raised: Default::default() }).is_err()
    {
        return Entered::Refused;
    }
    drop(costs);
    account::add_overhead(device, bytes as i64);
    note_change(device);
    Entered::New
}

/// Forgets a context that is gone, and everything in it.
pub(crate) fn gone(context: u64) {
    linear::context_gone(context);
    compute::context_gone(context);
    captures::context_gone(context);
    device::forget(context);
    let cost = COSTS.lock().remove(context);
    if let Some(Cost { device, bytes, .. }) = cost {
        // The last context takes with it whatever the overhead has grown by.
        let device = usize::from(device);
        let _one_at_a_time = REFRESHING.lock();
        let is_last = COSTS.lock().find_key(|_, cost| usize::from(cost.device) == device).is_none();
        let bytes = if is_last { account::overhead(device) } else { bytes.min(account::overhead(device)) };
        account::add_overhead(device, -(bytes as i64));
        account::release(device, bytes);
        note_change(device);
    }
}

/// Retains a device's primary context, and makes it if it does not live.
pub(crate) fn retain_primary(
    device: i32,
    driver: impl Fn() -> i32,
    made: impl Fn() -> u64,
    undo: impl Fn(u64),
) -> i32 {
    if state::mode() == Mode::Limited && !is_active(device) {
        let code = create(device, driver, &made, undo);
        if code == 0
            && let Some(cell) = ordinal(device).and_then(|device| PRIMARY.get(device))
        {
            cell.store(made(), Relaxed);
        }
        return code;
    }
    if state::mode() == Mode::Failed { REFUSED } else { driver() }
}

/// Releases or resets a device's primary context; whatever it held is gone unless it lives on.
pub(crate) fn release_primary(device: i32, driver: impl Fn() -> i32, is_reset: bool) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    let code = driver();
    if code == 0
        && (is_reset || !is_active(device))
        && let Some(cell) = ordinal(device).and_then(|device| PRIMARY.get(device))
    {
        let context = cell.swap(0, Relaxed);
        if context != 0 {
            gone(context);
        }
    }
    code
}

/// Destroys a context.
pub(crate) fn destroy(context: u64, driver: impl Fn() -> i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    let code = driver();
    if code == 0 {
        gone(context);
    }
    code
}

/// Restores a process from its checkpoint; its charge has stayed. Refuses to restore it to other devices
/// (`moves`), where it has no charge.
pub(crate) fn restore(moves: bool, driver: impl Fn() -> i32) -> i32 {
    /// `CUDA_ERROR_NOT_SUPPORTED`
    const NOT_SUPPORTED: i32 = 801;
    match state::mode() {
        Mode::Failed => REFUSED,
        Mode::Limited if moves => {
            log::note(format_args!("a process in a share is not restored to another GPU than it was on"));
            NOT_SUPPORTED
        }
        _ => driver(),
    }
}

fn is_active(device: i32) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the driver writes two integers.
    unsafe { real::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) == Some(0) && active != 0 }
}

fn region_cells(device: Device) -> impl Iterator<Item = &'static AtomicU64> {
    let mask = device::shares_of(device);
    let here = move |index: usize| mask >> index & 1 == 1;
    let shares = config::shares().iter().enumerate().filter(move |(index, _)| here(*index));
    shares.filter_map(|(_, share)| share.region().map(|region| &region.header.context_bytes))
}

fn known_cost(device: Device) -> u64 {
    // More than any context ever took is not a cost but a broken region.
    const MOST: u64 = 16 << 30;
    region_cells(device).map(|cell| cell.load(Relaxed)).filter(|cost| *cost <= MOST).max().unwrap_or_default()
}

fn remember_cost(device: Device, bytes: u64) {
    for cell in region_cells(device) {
        cell.store(bytes, Relaxed);
    }
}

fn assumed_cost(device: i32) -> u64 {
    const MULTIPROCESSORS: i32 = 16;
    let mut count = 0;
    // SAFETY: the driver writes one integer.
    unsafe { real::cuDeviceGetAttribute(&mut count, MULTIPROCESSORS, device) };
    u64::try_from(count).unwrap_or_default() * ASSUMED_PER_MULTIPROCESSOR
}

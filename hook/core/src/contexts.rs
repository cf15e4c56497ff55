//! Contexts: what they cost, and what goes with them.
//!
//! A context takes device memory that no allocation shows. It is measured by NVML before and after where
//! NVML lists this process, and remembered in the region, so that the next process charges it before its
//! context is made; else it is assumed from the size of the GPU. A context that does not fit is undone.

use crate::account::{self, OUT_OF_MEMORY};
use crate::config;
use crate::device::{self, Device};
use crate::lock::Mutex;
use crate::map::Map;
use crate::state::{self, Mode, REFUSED};
use crate::{linear, nvml, real};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Device memory of a context for each multiprocessor, where it can be neither measured nor looked up
/// (assumed: 0.4 to 0.6 GiB on the large boards).
const ASSUMED_PER_MULTIPROCESSOR: u64 = 4 << 20;

#[derive(Clone, Copy)]
struct Cost {
    device: u16,
    bytes: u64,
}

/// The contexts of this process that are charged.
static COSTS: Mutex<Map<Cost>> = Mutex::new(Map::new());

/// Each device's primary context while it lives.
static PRIMARY: [AtomicU64; device::MOST] = [const { AtomicU64::new(0) }; device::MOST];

fn ordinal(device: i32) -> Option<Device> {
    usize::try_from(device).ok().filter(|device| *device < device::MOST)
}

/// Makes a context on a device; `made` tells its handle.
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
    let known = known_cost(index);
    if account::charge(index, known).is_err() {
        return OUT_OF_MEMORY;
    }
    let is_first = COSTS.lock().find_key(|_, cost| usize::from(cost.device) == index).is_none();
    let before = nvml::used_by_us(index);
    let held_before = account::held(index);
    let code = driver();
    if code != 0 {
        account::release(index, known);
        return code;
    }
    let context = made();
    device::remember(context, device);
    let measured = match (before, nvml::used_by_us(index)) {
        // A process of this pid that had memory before our first context is another one.
        (nvml::Use::Listed(_), _) if is_first => None,
        (nvml::Use::Listed(before), nvml::Use::Listed(after)) => after.checked_sub(before),
        (nvml::Use::NotListed, nvml::Use::Listed(after)) => {
            nvml::trust_pids();
            Some(after)
        }
        _ => None,
    };
    // What other threads allocated meanwhile is not the context's.
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
        account::charge(index, cost - known).is_ok()
    } else {
        account::release(index, known - cost);
        true
    };
    let twice = COSTS.lock().get(context).is_some();
    if !fits || twice || COSTS.lock().insert(context, Cost { device: index as u16, bytes: cost }).is_err() {
        account::release(index, if fits { cost } else { known });
        if twice {
            // Another thread made the same primary context at the same time, and charged it.
            return 0;
        }
        undo(context);
        device::forget(context);
        return OUT_OF_MEMORY;
    }
    account::add_overhead(index, cost as i64);
    0
}

/// A context is gone, and everything in it.
pub(crate) fn gone(context: u64) {
    linear::context_gone(context);
    device::forget(context);
    let cost = COSTS.lock().remove(context);
    if let Some(Cost { device, bytes }) = cost {
        account::add_overhead(usize::from(device), -(bytes as i64));
        account::release(usize::from(device), bytes);
    }
}

/// Retains a device's primary context, which makes it if it does not live.
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

/// Releases or resets a device's primary context; whatever it held is gone if it does not live on.
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

/// Ends a context.
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

/// In a forked child: no context lives.
pub(crate) fn renew_after_fork() {
    COSTS.renew_after_fork();
    COSTS.lock().clear();
    for cell in &PRIMARY {
        cell.store(0, Relaxed);
    }
}

//! Stream-ordered memory. A pool takes memory in large pieces and keeps what is freed, so what is charged is
//! what it has reserved, not what it has given out.
//!
//! Before an allocation, the most that the pool can grow by is charged. Afterwards the charge follows the
//! pool's reserved bytes, plus what other threads' calls in flight may still make it grow by. Reserved bytes
//! shrink at synchronisations that the limiter does not see, so they are read again before anything is
//! refused and before anybody is told how much is free.

pub(crate) mod book;
pub(crate) mod growth;
pub(crate) mod reserved;

use crate::account;
use crate::allocations;
use crate::captures;
use crate::cu_result::{OUT_OF_MEMORY, REFUSED};
use crate::device::{self, Device};
use crate::gate::{Gate, gate};
use crate::map::Full;
use crate::real::{self, call};
use crate::reclaim;
use crate::shared::{self, Side};
use crate::state::{self, Mode};
use aliquot_quota::region::audit;
use book::{POOLS, Pool};
use core::sync::atomic::Ordering::Relaxed;
use growth::{ASSUMED, GROWTH, Growth};
use reserved::{RESERVED_CURRENT, attribute, before_growth, settle};

/// The pool that an allocation comes from.
pub(crate) enum From {
    /// The pool that is set for the stream's device.
    Stream,
    /// The pool with this handle.
    Pool(u64),
}

/// Returns the device of a stream's context. The handles 0 to 2 are the current context's default streams.
fn device_of_stream(stream: u64, current: Device) -> Device {
    if stream <= 2 {
        return current;
    }
    let mut context = 0;
    // SAFETY: the program's stream; the driver writes one handle.
    if unsafe { real::cuStreamGetCtx(stream, &mut context) } != Some(0) {
        return current;
    }
    device::of_context(context).unwrap_or(current)
}

/// Allocates from a pool, in the order of a stream. Into a capture nothing is allocated: the graph allocates
/// when it is launched.
pub(crate) fn allocate(
    bytes: u64,
    from: &From,
    stream: u64,
    driver: impl Fn() -> i32,
    made: impl Fn() -> u64,
) -> i32 {
    let current = match gate_any() {
        Gate::Pass => return driver(),
        Gate::Refuse(code) => return code,
        Gate::Limit(device, _) => device,
    };
    if captures::take(stream) {
        return driver();
    }
    let (pool, guess) = match from {
        From::Pool(pool) => (*pool, current),
        From::Stream => {
            let device = device_of_stream(stream, current);
            let mut pool = 0;
            let ordinal = i32::try_from(device).unwrap_or(-1);
            // SAFETY: the driver writes one handle.
            if unsafe { real::cuDeviceGetMemPool(&mut pool, ordinal) } != Some(0) {
                return driver();
            }
            (pool, device)
        }
    };
    let known = {
        let mut pools = POOLS.lock();
        match pools.get(pool) {
            Some(known) => Ok(known),
            None => {
                // A device's default pool, which nobody creates.
                let new = Pool {
                    device: guess as u16 + 1,
                    destroyed: false,
                    charged: 0,
                    in_flight: 0,
                    outstanding: 0,
                };
                pools.insert(pool, new).map(|()| new)
            }
        }
    };
    let Ok(known) = known else { return OUT_OF_MEMORY };
    let Some(device) = known.device().filter(|device| account::is_limited(*device)) else { return driver() };
    if bytes == 0 {
        return driver();
    }
    let most = match reserve(device, bytes) {
        Ok(most) => most,
        Err(code) => return code,
    };
    let idle_before = {
        let mut pools = POOLS.lock();
        if let Some(pool) = pools.get_mut(pool) {
            pool.in_flight += most;
            pool.charged += most;
        }
        before_growth(pool)
    };
    let code = reclaim::retry(device, driver(), &driver);
    let result = if code == 0 { allocations::record_pooled(made(), pool) } else { Ok(()) };
    let mut pools = POOLS.lock();
    let Some(entry) = pools.get_mut(pool) else { return code };
    entry.in_flight = entry.in_flight.saturating_sub(most);
    if code == 0 {
        entry.outstanding += 1;
        if entry.in_flight == 0 {
            let grown = idle_before.and_then(|before| attribute(pool, RESERVED_CURRENT)?.checked_sub(before));
            if let (Some(growth), Some(grown)) = (GROWTH.get(device), grown) {
                growth.learn(bytes, grown);
            }
        }
    }
    let over = settle(pool, entry);
    drop(pools);
    if over > 0 {
        // The pool took more than a pool was ever seen to take for this size. It stays charged.
        account::note(device, audit::PACKING);
        if let Some(growth) = GROWTH.get(device) {
            growth.forget();
        }
    }
    match result {
        Ok(()) => code,
        Err(Full) => OUT_OF_MEMORY,
    }
}

/// Decides as for other allocations, but whatever the current device is: a stream or pool may belong to
/// another.
fn gate_any() -> Gate {
    match gate() {
        Gate::Pass if state::mode() == Mode::Limited => match device::current() {
            Some((device, context)) => Gate::Limit(device, context),
            None => Gate::Pass,
        },
        gate => gate,
    }
}

/// Charges the most that an allocation of `bytes` can make a pool grow by, and returns that number of bytes.
fn reserve(device: Device, bytes: u64) -> Result<u64, i32> {
    let growth = GROWTH.get(device).ok_or(OUT_OF_MEMORY)?;
    let wanted = growth.most(bytes).ok_or(OUT_OF_MEMORY)?;
    if reclaim::try_charge(device, wanted).is_ok() {
        return Ok(wanted);
    }
    reclaim::trim(device);
    if reclaim::try_charge(device, wanted).is_ok() {
        return Ok(wanted);
    }
    if !growth.probed.swap(true, Relaxed) {
        probe(device, growth);
    }
    let wanted = growth.most(bytes).ok_or(OUT_OF_MEMORY)?;
    reclaim::charge(device, wanted).map(|()| wanted)
}

/// Finds out how pools grow, with a pool and a stream of the limiter's own: by one byte, and where there is
/// room by a byte more than the assumed least.
fn probe(device: Device, growth: &Growth) {
    const NON_BLOCKING: u32 = 1;
    let Some(room) =
        [3 * ASSUMED, ASSUMED].into_iter().find(|room| reclaim::try_charge(device, *room).is_ok())
    else {
        return;
    };
    let mut properties = [0_u32; 22];
    let [kind, _, place, id, ..] = &mut properties;
    // Pinned memory, located on the device with this ordinal.
    (*kind, *place, *id) = (1, 1, device as u32);
    let (mut pool, mut stream) = (0_u64, 0_u64);
    // SAFETY: every out parameter is a local of the driver's type; the properties have the driver's size.
    captures::relaxed(|| unsafe {
        if real::cuStreamCreate(&mut stream, NON_BLOCKING) == Some(0) {
            if call!(cuMemPoolCreate(&mut pool as *mut u64, properties.as_ptr())) == 0 {
                for bytes in [1, ASSUMED + 1].into_iter().take(if room > ASSUMED { 2 } else { 1 }) {
                    let mut address = 0_u64;
                    let before = attribute(pool, RESERVED_CURRENT);
                    if call!(cuMemAllocFromPoolAsync(&mut address as *mut u64, bytes as usize, pool, stream))
                        == 0
                    {
                        let after = attribute(pool, RESERVED_CURRENT);
                        if let (Some(before), Some(after)) = (before, after) {
                            growth.learn(bytes, after.saturating_sub(before));
                        }
                        call!(cuMemFreeAsync(address, stream));
                    }
                }
                real::cuStreamSynchronize(stream);
                call!(cuMemPoolDestroy(pool));
            }
            real::cuStreamDestroy_v2(stream);
        }
    });
    account::release(device, room);
}

/// Returns the code that calls about pools are refused with, if they are.
fn refused() -> Option<i32> {
    (state::mode() == Mode::Failed).then_some(REFUSED)
}

/// Makes a call about pools that charges nothing.
pub(crate) fn pass(driver: impl Fn() -> i32) -> i32 {
    refused().unwrap_or_else(driver)
}

/// Returns the most bytes that a pool takes for an allocation: others may hold as much of the pool.
fn most_of(device: Device, address: u64) -> Option<u64> {
    let (mut base, mut bytes) = (0_u64, 0_usize);
    // SAFETY: the results outlive the call.
    let told = unsafe { real::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) };
    GROWTH.get(device).filter(|_| told == Some(0))?.most(bytes as u64)
}

/// Gives another process the right to open an allocation.
pub(crate) fn export(address: u64, driver: impl Fn() -> i32) -> i32 {
    if let Some(code) = refused() {
        return code;
    }
    let code = driver();
    if code == 0
        && let Some(pool) = allocations::pool_of(address)
        && let Some(device) = POOLS.lock().get(pool).and_then(|pool| pool.device())
        && let Some(bytes) = most_of(device, address)
    {
        shared::note(Side::Exported, address, device, bytes, 0);
    }
    code
}

/// Opens another process's allocation, which that process is charged for.
pub(crate) fn import(driver: impl Fn() -> i32, made: impl Fn() -> u64) -> i32 {
    let device = match gate_any() {
        Gate::Pass => return driver(),
        Gate::Refuse(code) => return code,
        Gate::Limit(device, _) => device,
    };
    let code = driver();
    if code == 0
        && let Some(bytes) = most_of(device, made())
    {
        shared::note(Side::Imported, made(), device, bytes, 0);
    }
    code
}

/// Records a pool that the program made: on a device, or of memory that is not charged.
pub(crate) fn created(device: Option<i32>, driver: impl Fn() -> i32, made: impl Fn() -> u64) -> i32 {
    if let Some(code) = refused() {
        return code;
    }
    let code = driver();
    if code == 0 {
        let device = device.and_then(|device| u16::try_from(device).ok()).map_or(0, |device| device + 1);
        let pool = Pool { device, destroyed: false, charged: 0, in_flight: 0, outstanding: 0 };
        let _ = POOLS.lock().insert(made(), pool);
    }
    code
}

/// Destroys a pool. What it holds stays charged until its last allocation is freed.
pub(crate) fn destroy(pool: u64, driver: impl Fn() -> i32) -> i32 {
    if let Some(code) = refused() {
        return code;
    }
    // Noted first: once the driver has destroyed it, its attributes must not be read by another thread.
    let set = |destroyed: bool| {
        if let Some(entry) = POOLS.lock().get_mut(pool) {
            entry.destroyed = destroyed;
        }
    };
    set(true);
    let code = driver();
    if code != 0 {
        set(false);
        return code;
    }
    let mut pools = POOLS.lock();
    if let Some(entry) = pools.get_mut(pool) {
        settle(pool, entry);
        if entry.outstanding == 0 {
            pools.remove(pool);
        }
    }
    code
}

/// Trims a pool, and settles its charge.
pub(crate) fn trim(pool: u64, driver: impl Fn() -> i32) -> i32 {
    if let Some(code) = refused() {
        return code;
    }
    let code = driver();
    if let Some(entry) = POOLS.lock().get_mut(pool) {
        settle(pool, entry);
    }
    code
}

//! Stream-ordered memory. A pool takes memory in large pieces and keeps what is freed, so what is charged is
//! what it has reserved, not what it has given out.
//!
//! Before an allocation, the most that the pool can grow by is charged. Afterwards the charge follows the
//! pool's reserved bytes, plus what other threads' calls in flight may still make it grow by. Reserved bytes
//! shrink at synchronisations that the limiter does not see, so they are read again before anything is
//! refused and before anybody is told how much is free.

use crate::account;
use crate::captures;
use crate::code::{OUT_OF_MEMORY, REFUSED};
use crate::device::{self, Device};
use crate::linear::{self, Gate, gate};
use crate::lock::Mutex;
use crate::map::{Full, Map};
use crate::pages::SLAB;
use crate::real::{self, call};
use crate::shared::{self, Side};
use crate::state::{self, Mode};
use aliquot_quota::region::audit;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

const RESERVED_CURRENT: i32 = 5;
const USED_CURRENT: i32 = 7;

/// The least that a pool is assumed to grow by, in bytes, and the unit in which it is assumed to grow beyond
/// that, until it has been seen to grow.
const ASSUMED: u64 = 32 << 20;

#[derive(Clone, Copy)]
struct Pool {
    /// The device plus one; 0 = memory that is not charged here (host memory, another process's pool).
    device: u16,
    destroyed: bool,
    /// Bytes charged for the pool, calls in flight included.
    charged: u64,
    /// Bytes charged for calls in flight.
    in_flight: u64,
    /// The number of allocations that the program holds.
    outstanding: u64,
}

impl Pool {
    fn device(&self) -> Option<Device> {
        self.device.checked_sub(1).map(usize::from)
    }
}

/// The pools that this process has used. The lock is held while a pool's attributes are read, which never
/// blocks: what is read must not be older than what is charged.
static POOLS: Mutex<Map<Pool>> = Mutex::new(Map::new());

/// How a device's pools grow, in bytes; 0 = not seen yet.
struct Growth {
    /// The least growth.
    chunk: AtomicU64,
    /// The unit of growth beyond the least.
    grain: AtomicU64,
    /// True if the growth was tried out.
    probed: AtomicBool,
}

static GROWTH: [Growth; device::MOST] =
    [const { Growth { chunk: AtomicU64::new(0), grain: AtomicU64::new(0), probed: AtomicBool::new(false) } };
        device::MOST];

impl Growth {
    /// Returns the most bytes that an allocation of `bytes` can make a pool grow by.
    fn most(&self, bytes: u64) -> Option<u64> {
        let known =
            |cell: &AtomicU64| Some(cell.load(Relaxed)).filter(|value| *value != 0).unwrap_or(ASSUMED);
        Some(bytes.checked_next_multiple_of(known(&self.grain))?.max(known(&self.chunk)))
    }

    /// Learns from how much a pool without anything free grew for `bytes`.
    fn learn(&self, bytes: u64, grown: u64) {
        if bytes <= SLAB && grown >= SLAB {
            self.chunk.store(grown, Relaxed);
        } else if let Some(grain) = explain(bytes, grown) {
            self.grain.store(grain, Relaxed);
        }
    }

    fn forget(&self) {
        self.chunk.store(0, Relaxed);
        self.grain.store(0, Relaxed);
        self.probed.store(false, Relaxed);
    }
}

/// Returns the unit of growth that explains a pool's growth beyond its least, where the growth tells the unit
/// apart from the assumed one.
fn explain(bytes: u64, grown: u64) -> Option<u64> {
    if bytes <= ASSUMED || bytes.checked_next_multiple_of(ASSUMED)? == grown {
        return None;
    }
    let mut grain = ASSUMED / 2;
    while grain >= SLAB {
        if bytes.checked_next_multiple_of(grain)? == grown {
            return Some(grain);
        }
        grain /= 2;
    }
    None
}

fn attribute(pool: u64, attribute: i32) -> Option<u64> {
    let mut value = 0;
    // SAFETY: the driver writes one 64-bit value for these attributes.
    (unsafe { real::cuMemPoolGetAttribute(pool, attribute, &mut value) } == Some(0)).then_some(value)
}

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
    let code = account::retry(device, driver(), &driver);
    let result = if code == 0 { linear::record_pooled(made(), pool) } else { Ok(()) };
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
    if account::try_charge(device, wanted).is_ok() {
        return Ok(wanted);
    }
    trim_all(device);
    crate::graphs::trim_unused(device);
    if account::try_charge(device, wanted).is_ok() {
        return Ok(wanted);
    }
    if !growth.probed.swap(true, Relaxed) {
        probe(device, growth);
    }
    let wanted = growth.most(bytes).ok_or(OUT_OF_MEMORY)?;
    account::charge(device, wanted).map(|()| wanted)
}

/// Returns the reserved bytes of a pool that has nothing free inside, so that its next allocation makes it
/// grow.
fn before_growth(pool: u64) -> Option<u64> {
    let reserved = attribute(pool, RESERVED_CURRENT)?;
    (attribute(pool, USED_CURRENT)? == reserved).then_some(reserved)
}

/// Finds out how pools grow, with a pool and a stream of the limiter's own: by one byte, and where there is
/// room by a byte more than the assumed least.
fn probe(device: Device, growth: &Growth) {
    const NON_BLOCKING: u32 = 1;
    let Some(room) =
        [3 * ASSUMED, ASSUMED].into_iter().find(|room| account::try_charge(device, *room).is_ok())
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

/// Sets the charge of a pool to what it has reserved plus what calls in flight may add. Returns by how many
/// bytes it had grown beyond what was charged.
fn settle(pool: u64, entry: &mut Pool) -> u64 {
    let Some(device) = entry.device() else { return 0 };
    let reserved = if entry.destroyed { None } else { attribute(pool, RESERVED_CURRENT) };
    let Some(reserved) = reserved else {
        if entry.outstanding == 0 && entry.in_flight == 0 {
            account::release(device, core::mem::take(&mut entry.charged));
        }
        return 0;
    };
    let target = reserved + entry.in_flight;
    let before = core::mem::replace(&mut entry.charged, target);
    if target < before {
        account::release(device, before - target);
        return 0;
    }
    account::charge_forced(device, target - before);
    target - before
}

fn each_on(device: Device, mut visit: impl FnMut(u64, &mut Pool)) {
    let mut pools = POOLS.lock();
    let mut last = 0;
    // Handles in ascending order, so that the map may be looked at while it is walked.
    loop {
        let mut next = u64::MAX;
        pools.find_key(|key, pool| {
            if key > last && key < next && pool.device() == Some(device) {
                next = key;
            }
            false
        });
        let Some(pool) = pools.get_mut(next) else { return };
        visit(next, pool);
        last = next;
    }
}

/// Brings the charge of all pools of a device up to date.
pub(crate) fn settle_all(device: Device) {
    if POOLS.lock().len() > 0 {
        each_on(device, |pool, entry| {
            settle(pool, entry);
        });
    }
}

/// Gives back to the driver what the pools of a device keep without need.
pub(crate) fn trim_all(device: Device) {
    let mut handles = [0_u64; 64];
    let mut count = 0;
    each_on(device, |pool, entry| {
        if let Some(handle) = handles.get_mut(count).filter(|_| !entry.destroyed && entry.charged > 0) {
            *handle = pool;
            count += 1;
        }
    });
    captures::relaxed(|| {
        for handle in handles.iter().take(count) {
            // SAFETY: a pool of the program that it has not destroyed.
            unsafe { call!(cuMemPoolTrimTo(*handle, 0_usize)) };
        }
    });
    settle_all(device);
}

/// Notes that an allocation of a pool was freed.
pub(crate) fn freed(pool: u64) {
    let mut pools = POOLS.lock();
    let Some(entry) = pools.get_mut(pool) else { return };
    entry.outstanding = entry.outstanding.saturating_sub(1);
    settle(pool, entry);
    if entry.destroyed && entry.outstanding == 0 {
        pools.remove(pool);
    }
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
        && let Some(pool) = linear::pool_of(address)
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

/// Forgets all pools, in a forked child.
pub(crate) fn renew_after_fork() {
    POOLS.renew_after_fork();
    POOLS.lock().clear();
    for growth in &GROWTH {
        growth.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_of_growth_is_learnt_where_growth_tells_it() {
        assert_eq!(explain(33 << 20, 34 << 20), Some(2 << 20));
        assert_eq!(explain((32 << 20) + 1, 48 << 20), Some(16 << 20));
        assert_eq!(explain(33 << 20, 64 << 20), None, "as assumed");
        assert_eq!(explain(64 << 20, 64 << 20), None, "fits any unit");
        assert_eq!(explain(1 << 20, 2 << 20), None, "the least says nothing");
        assert_eq!(explain(33 << 20, 35 << 20), None, "no unit explains it");
    }

    #[test]
    fn growth_is_assumed_large_until_learnt() {
        let growth =
            Growth { chunk: AtomicU64::new(0), grain: AtomicU64::new(0), probed: AtomicBool::new(false) };
        assert_eq!(growth.most(1), Some(32 << 20));
        assert_eq!(growth.most(33 << 20), Some(64 << 20));
        growth.learn((32 << 20) + 1, 34 << 20);
        assert_eq!((growth.most(33 << 20), growth.most(1)), (Some(34 << 20), Some(32 << 20)));
        growth.learn(1, 2 << 20);
        assert_eq!(growth.most(1), Some(2 << 20));
        assert_eq!(growth.most(u64::MAX), None);
    }
}

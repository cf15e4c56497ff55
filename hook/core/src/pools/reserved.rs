//! What pools have reserved: their charge follows it, and what they keep without need goes back.

use super::book::{POOLS, Pool};
use crate::account;
use crate::captures;
use crate::device::Device;
use crate::real::{self, call};

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`
pub(super) const RESERVED_CURRENT: i32 = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`
const USED_CURRENT: i32 = 7;

/// Returns a 64-bit attribute of a pool.
pub(super) fn attribute(pool: u64, attribute: i32) -> Option<u64> {
    let mut value = 0;
    // SAFETY: the driver writes one 64-bit value for these attributes.
    (unsafe { real::cuMemPoolGetAttribute(pool, attribute, &mut value) } == Some(0)).then_some(value)
}

/// Returns the reserved bytes of a pool that has nothing free inside, so that its next allocation makes it
/// grow.
pub(super) fn before_growth(pool: u64) -> Option<u64> {
    let reserved = attribute(pool, RESERVED_CURRENT)?;
    (attribute(pool, USED_CURRENT)? == reserved).then_some(reserved)
}

/// Sets the charge of a pool to what it has reserved plus what calls in flight may add. Returns by how many
/// bytes it had grown beyond what was charged.
pub(super) fn settle(pool: u64, entry: &mut Pool) -> u64 {
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
pub(crate) fn settle_pools(device: Device) {
    if POOLS.lock().len() > 0 {
        each_on(device, |pool, entry| {
            settle(pool, entry);
        });
    }
}

/// Gives back to the driver what the pools of a device keep without need.
pub(crate) fn trim_pools(device: Device) {
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
    settle_pools(device);
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

//! Memory pools: stream-ordered allocations out of memory that stays reserved.
//!
//! A pool grows by segments and gives back whole segments that nothing lies in: when it is told to, when anybody in
//! the process waits for the device and more than its release threshold is reserved, and when an allocation would
//! otherwise fail.

use crate::backing::Backing;
use crate::charge::charge;
use crate::codes::{Code, Cu};
use crate::driver::{Driver, code_of};
use crate::extents::Extents;
use crate::state::State;
use crate::state::memory::{ALIGN, Kind, PAGE};
use crate::state::pool::Pool;
use crate::{shared, space};

pub(crate) mod reclaim;

use reclaim::{collect, settle};

/// `cuMemPoolCreate`.
pub(crate) fn create(state: &mut State, device: usize, max_size: u64, handle_types: i32) -> u64 {
    let handle = state.handle();
    let pool = Pool { device, max_size, handle_types, reuse: [1; 3], ..Pool::default() };
    state.pools.pools.insert(handle, pool);
    handle
}

/// Another process's pool.
pub(crate) fn import(state: &mut State, device: usize, handle_types: i32) -> u64 {
    let handle = create(state, device, 0, handle_types);
    if let Some(pool) = state.pools.pools.get_mut(&handle) {
        pool.imported = true;
    }
    handle
}

/// Lets other processes hold the segment that an allocation lies in; returns its id on the node.
pub(crate) fn share_segment(driver: &Driver, state: &mut State, handle: u64, segment: u64) -> Cu<u64> {
    let pool = state.pools.get(handle)?;
    if let Some(id) = pool.shared.get(&segment) {
        return Ok(*id);
    }
    let bytes = pool.segments.get(&segment).ok_or(Code::INVALID_VALUE)?.size();
    let place = driver.devices().get(pool.device).ok_or(Code::INVALID_DEVICE)?.pool;
    let id = driver.node()?.share(place, bytes, 0).map_err(|e| code_of(&e))?;
    shared::hold(state, id);
    state.pools.get_mut(handle)?.shared.insert(segment, id);
    Ok(id)
}

/// `cuMemPoolDestroy`: allocations that are still there keep their memory.
pub(crate) fn destroy(driver: &Driver, state: &mut State, handle: u64) -> Cu {
    let pool = state.pools.get_mut(handle)?;
    if pool.is_default {
        return Err(Code::INVALID_VALUE);
    }
    pool.doomed = true;
    let device = pool.device;
    if let Some(defaults) = state.pools.defaults.get_mut(device).filter(|d| d.1 == handle) {
        defaults.1 = defaults.0;
    }
    settle(driver, state, handle);
    Ok(())
}

/// Allocates in stream order; the address can be used by work that `stream` does from here on.
pub(crate) fn allocate(driver: &Driver, state: &mut State, handle: u64, bytes: u64, stream: u64) -> Cu<u64> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    // What this stream freed before it can have again before it gets there.
    collect(driver, state, handle, Some(stream));
    let (segment, offset) = match fit(state, handle, bytes)? {
        Some(found) => found,
        None => {
            grow(driver, state, handle, bytes)?;
            fit(state, handle, bytes)?.ok_or(Code::OUT_OF_MEMORY)?
        }
    };
    let pool = state.pools.get_mut(handle)?;
    pool.used += bytes.next_multiple_of(ALIGN);
    pool.used_high = pool.used_high.max(pool.used);
    let device = pool.device;
    let kind = Kind::Pool { pool: handle, segment };
    let content = Backing::new(driver.config.backing_bytes);
    state.memory.insert_device(segment + offset, (bytes, device, 0), kind, content);
    Ok(segment + offset)
}

fn fit(state: &mut State, handle: u64, bytes: u64) -> Cu<Option<(u64, u64)>> {
    let pool = state.pools.get_mut(handle)?;
    Ok(pool.segments.iter_mut().find_map(|(base, parts)| Some((*base, parts.take(bytes, ALIGN)?))))
}

fn grow(driver: &Driver, state: &mut State, handle: u64, bytes: u64) -> Cu {
    let pool = state.pools.get(handle)?;
    if pool.imported {
        return Err(Code::NOT_PERMITTED);
    }
    let device = pool.device;
    let room = if pool.max_size == 0 { u64::MAX } else { pool.max_size.saturating_sub(pool.reserved) };
    let least = bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
    let usual = least.max(driver.config.pool_chunk_bytes.next_multiple_of(PAGE));
    // With little memory left a pool grows by no more than it needs.
    let size = if usual <= room && driver.charge(device, usual).is_ok() {
        usual
    } else if least <= room {
        charge(driver, state, device, least)?;
        least
    } else {
        return Err(Code::OUT_OF_MEMORY);
    };
    let Some(base) = space::reserve(size, PAGE, false) else {
        driver.release(device, size);
        return Err(Code::OUT_OF_MEMORY);
    };
    let pool = state.pools.get_mut(handle)?;
    pool.segments.insert(base, Extents::new(size));
    pool.reserved += size;
    pool.reserved_high = pool.reserved_high.max(pool.reserved);
    Ok(())
}

//! Memory pools: stream-ordered allocations out of memory that stays reserved.
//!
//! A pool grows by segments and gives back whole segments that nothing lies in: when it is told to, when anybody in
//! the process waits for the device and more than its release threshold is reserved, and when an allocation would
//! otherwise fail.

use std::collections::BTreeMap;

use crate::codes::{Code, Cu};
use crate::driver::{Driver, code_of};
use crate::extents::Extents;
use crate::memory::{ALIGN, Kind, PAGE};
use crate::state::State;
use crate::{memory, space, vmm};

/// A memory pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool {
    pub(crate) device: usize,
    segments: BTreeMap<u64, Extents>,
    /// Segments that other processes may hold too: ids on the node by base.
    shared: BTreeMap<u64, u64>,
    /// Another process's: nothing can be taken from it.
    imported: bool,
    max_size: u64,
    pub(crate) handle_types: i32,
    /// Reuse by event dependencies, opportunistic, by internal dependencies; only stored.
    reuse: [i32; 3],
    threshold: u64,
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    /// Destroyed by its owner; goes with its last allocation.
    doomed: bool,
    pub(crate) is_default: bool,
    /// Devices that may access it besides its own.
    pub(crate) access: BTreeMap<i32, i32>,
    /// Freed in stream order, by a stream that has not got there yet.
    pending: Vec<Pending>,
}

#[derive(Clone, Debug)]
struct Pending {
    stream: u64,
    operation: u64,
    segment: u64,
    base: u64,
    bytes: u64,
}

/// All pools of the process.
#[derive(Default)]
pub(crate) struct Pools {
    pools: BTreeMap<u64, Pool>,
    /// By device: the default pool and the current one.
    defaults: Vec<(u64, u64)>,
}

impl Pools {
    pub(crate) fn add_default(&mut self, device: usize, handle: u64) {
        let pool = Pool { device, reuse: [1; 3], is_default: true, ..Pool::default() };
        self.pools.insert(handle, pool);
        self.defaults.push((handle, handle));
    }

    pub(crate) fn get(&self, handle: u64) -> Cu<&Pool> {
        self.pools.get(&handle).filter(|p| !p.doomed).ok_or(Code::INVALID_VALUE)
    }

    pub(crate) fn get_mut(&mut self, handle: u64) -> Cu<&mut Pool> {
        self.pools.get_mut(&handle).filter(|p| !p.doomed).ok_or(Code::INVALID_VALUE)
    }

    /// The device's default pool.
    pub(crate) fn default_of(&self, device: usize) -> Cu<u64> {
        self.defaults.get(device).map(|d| d.0).ok_or(Code::INVALID_DEVICE)
    }

    /// The pool that `cuMemAllocAsync` takes from.
    pub(crate) fn current_of(&self, device: usize) -> Cu<u64> {
        self.defaults.get(device).map(|d| d.1).ok_or(Code::INVALID_DEVICE)
    }

    pub(crate) fn set_current(&mut self, device: usize, handle: u64) -> Cu {
        if self.get(handle)?.device != device {
            return Err(Code::INVALID_VALUE);
        }
        self.defaults.get_mut(device).ok_or(Code::INVALID_DEVICE)?.1 = handle;
        Ok(())
    }
}

/// Attributes whose value is an `int`.
fn is_int(attribute: i32) -> bool {
    matches!(attribute, 1..=3 | 9..=12 | 14)
}

/// Reads an attribute; the flag says whether it is an `int` rather than 64 bits.
pub(crate) fn attribute(pool: &Pool, attribute: i32) -> Cu<(u64, bool)> {
    let flag = |index: usize| pool.reuse.get(index).map_or(0, |v| u64::from(v.unsigned_abs()));
    let value = match attribute {
        1 => flag(0),
        2 => flag(1),
        3 => flag(2),
        4 => pool.threshold,
        5 => pool.reserved,
        6 => pool.reserved_high,
        7 => pool.used,
        8 => pool.used_high,
        9 | 12 => 1,
        10 => u64::from(pool.handle_types.unsigned_abs()),
        11 => pool.device as u64,
        13 => pool.max_size,
        14 => 0,
        _ => return Err(Code::INVALID_VALUE),
    };
    Ok((value, is_int(attribute)))
}

/// Sets an attribute.
pub(crate) fn set_attribute(pool: &mut Pool, attribute: i32, value: impl Fn(bool) -> Cu<u64>) -> Cu {
    let value = value(is_int(attribute))?;
    match (attribute, value) {
        (1..=3, flag) => {
            let index = usize::try_from(attribute - 1).map_err(|_| Code::INVALID_VALUE)?;
            if let Some(place) = pool.reuse.get_mut(index) {
                *place = i32::from(flag != 0);
            }
        }
        (4, bytes) => pool.threshold = bytes,
        // The high-water marks can only be reset.
        (6, 0) => pool.reserved_high = pool.reserved,
        (8, 0) => pool.used_high = pool.used,
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

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
    vmm::hold_shared(state, id);
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
    memory::insert_device(driver, state, segment + offset, (bytes, device, 0), kind);
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
        memory::charge(driver, state, device, least)?;
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

/// `cuMemFreeAsync`: the memory can be used again once `operation` of `stream` is done, by the same stream at once.
pub(crate) fn free_async(driver: &Driver, state: &mut State, base: u64, stream: u64, operation: u64) -> Cu {
    let range = state.memory.at(base).ok_or(Code::INVALID_VALUE)?;
    let Kind::Pool { pool, segment } = range.kind else { return Err(Code::INVALID_VALUE) };
    let bytes = range.bytes;
    state.memory.remove(base);
    if let Some(entry) = state.pools.pools.get_mut(&pool) {
        entry.pending.push(Pending { stream, operation, segment, base, bytes });
    }
    collect(driver, state, pool, None);
    Ok(())
}

/// Frees without regard to streams.
pub(crate) fn free_now(driver: &Driver, state: &mut State, base: u64) -> Cu {
    free_async(driver, state, base, 0, 0)
}

/// Makes freed memory usable: what its stream is done with, and what `stream` itself freed.
fn collect(driver: &Driver, state: &mut State, handle: u64, stream: Option<u64>) {
    let Some(entry) = state.pools.pools.get_mut(&handle) else { return };
    let pending = std::mem::take(&mut entry.pending);
    let (ready, waiting): (Vec<_>, Vec<_>) =
        pending.into_iter().partition(|p| Some(p.stream) == stream || state.is_done(p.operation));
    let Some(entry) = state.pools.pools.get_mut(&handle) else { return };
    entry.pending = waiting;
    for part in ready {
        entry.used = entry.used.saturating_sub(part.bytes.next_multiple_of(ALIGN));
        if let Some(segment) = entry.segments.get_mut(&part.segment) {
            segment.give(part.base - part.segment, part.bytes, ALIGN);
        }
    }
    settle(driver, state, handle);
}

/// Counts what streams have got to freeing.
pub(crate) fn refresh(driver: &Driver, state: &mut State, handle: u64) {
    collect(driver, state, handle, None);
}

/// Ends a destroyed pool that holds nothing any more.
fn settle(driver: &Driver, state: &mut State, handle: u64) {
    let empty = |p: &Pool| p.doomed && p.pending.is_empty() && p.segments.values().all(Extents::is_unused);
    if state.pools.pools.get(&handle).is_some_and(empty) {
        shrink(driver, state, handle, 0);
        state.pools.pools.remove(&handle);
    }
}

/// Gives unused segments back until no more than `keep` bytes are reserved; says how much went.
pub(crate) fn trim(driver: &Driver, state: &mut State, handle: u64, keep: u64) -> u64 {
    collect(driver, state, handle, None);
    shrink(driver, state, handle, keep)
}

fn shrink(driver: &Driver, state: &mut State, handle: u64, keep: u64) -> u64 {
    let Some(pool) = state.pools.pools.get_mut(&handle) else { return 0 };
    let mut gone = 0;
    let mut shared = Vec::new();
    let unused: Vec<u64> =
        pool.segments.iter().filter(|(_, s)| s.is_unused()).map(|(base, _)| *base).collect();
    for base in unused.into_iter().rev() {
        if pool.reserved <= keep {
            break;
        }
        if let Some(segment) = pool.segments.remove(&base) {
            space::unmap(base, segment.size());
            pool.reserved -= segment.size();
            gone += segment.size();
            match pool.shared.remove(&base) {
                Some(id) => shared.push(id),
                None => driver.release(pool.device, segment.size()),
            }
        }
    }
    for id in shared {
        vmm::drop_shared(driver, state, id);
    }
    gone
}

/// What waiting for a device does to its pools.
pub(crate) fn trim_at_wait(driver: &Driver, state: &mut State, device: usize) {
    for (handle, threshold) in of_device(state, device) {
        trim(driver, state, handle, threshold);
    }
}

/// Gives everything back that no allocation lies in; says how much went.
pub(crate) fn trim_unused(driver: &Driver, state: &mut State, device: usize) -> u64 {
    let pools = of_device(state, device);
    pools.into_iter().map(|(handle, _)| trim(driver, state, handle, 0)).sum()
}

fn of_device(state: &State, device: usize) -> Vec<(u64, u64)> {
    let pools = state.pools.pools.iter().filter(|(_, p)| p.device == device);
    pools.map(|(handle, p)| (*handle, p.threshold)).collect()
}

//! What comes back to pools, and from them: allocations that streams have freed, and segments that nothing lies in.

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::extents::Extents;
use crate::state::State;
use crate::state::memory::{ALIGN, Kind};
use crate::state::pool::{Pending, Pool};
use crate::{shared, space};

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
pub(crate) fn collect(driver: &Driver, state: &mut State, handle: u64, stream: Option<u64>) {
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

/// Ends a destroyed pool that holds nothing any more.
pub(crate) fn settle(driver: &Driver, state: &mut State, handle: u64) {
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
        shared::release(driver, state, id);
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

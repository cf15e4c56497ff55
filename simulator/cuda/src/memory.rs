//! Memory that a program allocates, frees and moves, and what it takes on the device.

use crate::backing::Backing;
use crate::charge::charge;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::extents::Extents;
use crate::pool::reclaim;
use crate::state::State;
use crate::state::memory::{ALIGN, Kind, PAGE, Slab};
use crate::{shared, space};

/// `cuMemAlloc`: from a slab, or as pages.
pub(crate) fn allocate(driver: &Driver, state: &mut State, context: u64, bytes: u64, low: bool) -> Cu<u64> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let device = state.context(context)?.device;
    let (base, kind) = if bytes <= driver.config.small_bytes.min(driver.config.slab_bytes) {
        let (base, slab) = take_from_slab(driver, state, (context, device), bytes, low)?;
        (base, Kind::Linear { slab: Some(slab), charged: 0 })
    } else {
        let charged = bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
        charge(driver, state, device, charged)?;
        let Some(base) = space::reserve(charged, PAGE, low) else {
            driver.release(device, charged);
            return Err(Code::OUT_OF_MEMORY);
        };
        (base, Kind::Linear { slab: None, charged })
    };
    let content = Backing::new(driver.config.backing_bytes);
    state.memory.insert_device(base, (bytes, device, context), kind, content);
    Ok(base)
}

fn take_from_slab(
    driver: &Driver,
    state: &mut State,
    (context, device): (u64, usize),
    bytes: u64,
    low: bool,
) -> Cu<(u64, u64)> {
    let own = state.memory.slabs.iter_mut().filter(|(_, s)| s.context == context && s.low == low);
    for (&base, slab) in own {
        if let Some(offset) = slab.parts.take(bytes, ALIGN) {
            return Ok((base + offset, base));
        }
    }
    let size = driver.config.slab_bytes;
    charge(driver, state, device, size)?;
    let Some(base) = space::reserve(size, size.next_power_of_two().min(PAGE), low) else {
        driver.release(device, size);
        return Err(Code::OUT_OF_MEMORY);
    };
    let mut parts = Extents::new(size);
    let offset = parts.take(bytes, ALIGN).ok_or(Code::OUT_OF_MEMORY)?;
    state.memory.slabs.insert(base, Slab { context, device, low, parts });
    Ok((base + offset, base))
}

/// `cuMemAllocManaged`.
pub(crate) fn allocate_managed(state: &mut State, context: u64, bytes: u64) -> Cu<u64> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let device = state.context(context)?.device;
    let base = space::host_memory(bytes).ok_or(Code::OUT_OF_MEMORY)?;
    state.memory.insert_host(base, (bytes, device, context), Kind::Managed { resident: 0 });
    Ok(base)
}

/// Counts part of a managed range as being on a device (`Some`) or on the host. What does not fit stays on the host:
/// managed memory can be larger than the device.
pub(crate) fn migrate(driver: &Driver, state: &mut State, address: u64, bytes: u64, to: Option<usize>) {
    let Some((base, range)) = state.memory.find(address) else { return };
    let Kind::Managed { resident } = range.kind else { return };
    let (from, total) = (range.device, range.bytes.next_multiple_of(4096));
    let bytes = bytes.next_multiple_of(4096).min(total);
    let (device, wanted) = match to {
        Some(device) if device == from => (device, total.min(resident + bytes)),
        Some(device) => (device, bytes),
        None => (from, resident.saturating_sub(bytes)),
    };
    if device != from || wanted < resident {
        let kept = if device == from { wanted } else { 0 };
        driver.release(from, resident - kept);
        set_resident(state, base, device, kept);
    }
    let held = if device == from { resident.min(wanted) } else { 0 };
    let more = wanted.saturating_sub(held);
    let free = driver
        .devices()
        .get(device)
        .and_then(|d| driver.node().ok()?.memory(d.pool).ok())
        .map_or(0, |m| m.free);
    let more = more.min(free);
    if more > 0 && driver.charge(device, more).is_ok() {
        set_resident(state, base, device, held + more);
    }
}

fn set_resident(state: &mut State, base: u64, device: usize, bytes: u64) {
    if let Some(range) = state.memory.at_mut(base) {
        range.device = device;
        range.kind = Kind::Managed { resident: bytes };
    }
}

/// `cuMemFree` and what a context's end does: by base address.
pub(crate) fn free(driver: &Driver, state: &mut State, base: u64) -> Cu {
    let range = state.memory.at(base).ok_or(Code::INVALID_VALUE)?.clone();
    match range.kind {
        Kind::Linear { slab: Some(slab), .. } => {
            state.memory.remove(base);
            give_to_slab(driver, state, slab, base, range.bytes);
        }
        Kind::Linear { slab: None, charged } => {
            state.memory.remove(base);
            space::unmap(base, charged);
            match range.shared {
                Some(id) => shared::release(driver, state, id),
                None => driver.release(range.device, charged),
            }
        }
        Kind::Managed { resident } => {
            state.memory.remove(base);
            space::unmap(base, range.bytes);
            driver.release(range.device, resident);
        }
        Kind::Pool { .. } => reclaim::free_now(driver, state, base)?,
        // Of another process's pool; what was opened by a handle is closed instead.
        Kind::Imported { .. } if range.context == 0 => shared::forget(driver, state, base)?,
        Kind::Graph if state.execs.is_live(base) => state.execs.freed(&state.memory, base),
        Kind::Host { .. } | Kind::Mapping { .. } | Kind::Imported { .. } | Kind::Graph => {
            return Err(Code::INVALID_VALUE);
        }
    }
    Ok(())
}

fn give_to_slab(driver: &Driver, state: &mut State, slab: u64, base: u64, bytes: u64) {
    let Some(entry) = state.memory.slabs.get_mut(&slab) else { return };
    entry.parts.give(base - slab, bytes, ALIGN);
    if entry.parts.is_unused() {
        let (device, size) = (entry.device, entry.parts.size());
        state.memory.slabs.remove(&slab);
        space::unmap(slab, size);
        driver.release(device, size);
    }
}

/// Frees everything that a context owns.
pub(crate) fn free_context(driver: &Driver, state: &mut State, context: u64) {
    let owned: Vec<(u64, Kind)> = state
        .memory
        .iter()
        .filter(|(_, range)| range.context == context)
        .map(|(base, range)| (base, range.kind.clone()))
        .collect();
    for (base, kind) in owned {
        let done = match kind {
            Kind::Host { .. } => free_host(state, base),
            Kind::Imported { .. } => shared::forget(driver, state, base),
            _ => free(driver, state, base),
        };
        debug_assert!(done.is_ok(), "a context's own memory can be freed");
    }
}

/// `cuMemFreeHost` and `cuMemHostUnregister`.
pub(crate) fn free_host(state: &mut State, base: u64) -> Cu {
    let range = state.memory.at(base).ok_or(Code::INVALID_VALUE)?;
    let (bytes, owned) = match range.kind {
        Kind::Host { owned, .. } => (range.bytes, owned),
        _ => return Err(Code::INVALID_VALUE),
    };
    state.memory.remove(base);
    if owned {
        space::unmap(base, bytes);
    }
    Ok(())
}

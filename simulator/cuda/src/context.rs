//! Contexts: making them, and what goes with them when they end.

use aliquot_sim_node::ProcessUse;

use crate::codes::{Code, Cu};
use crate::device::Device;
use crate::driver::{Driver, code_of};
use crate::state::State;
use crate::state::context::Context;
use crate::{array, engine, memory, module};

pub(crate) mod overhead;

const MIB: u64 = 1 << 20;

/// Device memory of a context for each multiprocessor: 528 MiB on an H100, 432 MiB on an A100 (assumed).
const BYTES_PER_MULTIPROCESSOR: u64 = 4 * MIB;

/// `CUcomputemode`.
const PROHIBITED: u32 = 2;
const EXCLUSIVE_PROCESS: u32 = 3;

/// Limits of a fresh context.
const DEFAULT_LIMITS: [u64; 8] = [1024, 7 * MIB, 8 * MIB, 2, 2048, 128, 0, 0];

/// Makes a context on a device: takes its memory and a place among the device's tenants.
///
/// A primary context comes with the handle that it had before.
pub(crate) fn create(
    driver: &Driver,
    state: &mut State,
    device: usize,
    flags: u32,
    primary: Option<u64>,
) -> Cu<u64> {
    let described = driver.devices().get(device).ok_or(Code::INVALID_DEVICE)?;
    admit(driver, described)?;
    let multiprocessors = driver.config.multiprocessors.unwrap_or(described.multiprocessors);
    let by_size = u64::from(multiprocessors) * BYTES_PER_MULTIPROCESSOR;
    let overhead = driver.config.context_bytes.unwrap_or(by_size);
    driver.charge(device, overhead)?;
    let fresh = state.handle();
    let handle = primary.unwrap_or(fresh);
    let instance = described.mig.as_ref().map(|m| m.ci.id);
    let opened = driver.node()?.context_opened(described.pool, instance).map_err(|e| code_of(&e));
    if let Err(code) = opened.and_then(|()| engine::open_lane(driver, state, handle, device)) {
        driver.release(device, overhead);
        return Err(code);
    }
    state.contexts_made += 1;
    let id = state.contexts_made;
    state.contexts.insert(
        handle,
        Context {
            device,
            flags,
            primary: primary.is_some(),
            alive: true,
            id,
            overhead,
            limits: DEFAULT_LIMITS,
            local_bytes: DEFAULT_LIMITS[0],
            stuck: None,
            cache_config: 0,
            shared_config: 0,
            peers: Vec::new(),
        },
    );
    Ok(handle)
}

/// Whether the administrator's compute mode lets this process have a context.
///
/// Clients of one MPS control daemon are one process to the GPU: the contexts are its server's.
fn admit(driver: &Driver, device: &Device) -> Cu {
    let node = driver.node()?;
    let daemon = driver.mps_daemon();
    let settings = node.settings(device.gpu.index).map_err(|_| Code::UNKNOWN)?;
    let taken_by_others = || {
        let processes = node.processes(device.gpu.index).unwrap_or_default();
        let is_ours = |p: &ProcessUse| p.is_self || daemon.is_some() && p.mps_daemon == daemon;
        processes.iter().any(|p| !is_ours(p) && p.contexts > 0 && p.pool == device.pool)
    };
    match settings.compute_mode {
        _ if settings.lost => Err(Code::DEVICE_UNAVAILABLE),
        PROHIBITED => Err(Code::DEVICE_UNAVAILABLE),
        EXCLUSIVE_PROCESS if taken_by_others() => Err(Code::DEVICE_UNAVAILABLE),
        _ => Ok(()),
    }
}

/// Ends a context and everything that lives in it.
pub(crate) fn destroy(driver: &Driver, state: &mut State, handle: u64) -> Cu {
    let context = state.context(handle)?;
    let (device, overhead) = (context.device, context.overhead);
    engine::close_lane(driver, state, handle);
    state.streams.retain(|_, stream| stream.context != handle);
    state.default_streams.retain(|(context, _), _| *context != handle);
    state.events.retain(|_, event| event.context != handle);
    module::free_context(state, handle);
    memory::free_context(driver, state, handle);
    array::free_context(driver, state, handle);
    if let Some(context) = state.contexts.get_mut(&handle) {
        context.alive = false;
        context.overhead = 0;
    }
    driver.release(device, overhead);
    if let (Some(described), Ok(node)) = (driver.devices().get(device), driver.node()) {
        let _ = node.context_closed(described.pool);
    }
    Ok(())
}

/// The device's primary context, made when nobody holds it yet.
pub(crate) fn retain_primary(driver: &Driver, state: &mut State, device: usize) -> Cu<u64> {
    let primary = state.primaries.get(device).cloned().ok_or(Code::INVALID_DEVICE)?;
    let handle = match primary.handle {
        Some(handle) => handle,
        None => state.handle(),
    };
    if !primary.active {
        create(driver, state, device, primary.flags, Some(handle))?;
    }
    if let Some(place) = state.primaries.get_mut(device) {
        place.handle = Some(handle);
        place.active = true;
        place.references += 1;
    }
    Ok(handle)
}

/// Gives a reference back; with the last one the context ends.
pub(crate) fn release_primary(driver: &Driver, state: &mut State, device: usize) -> Cu {
    let place = state.primaries.get_mut(device).ok_or(Code::INVALID_DEVICE)?;
    if place.references == 0 {
        return Err(Code::INVALID_CONTEXT);
    }
    place.references -= 1;
    if place.references == 0 { end_primary(driver, state, device) } else { Ok(()) }
}

/// Ends the primary context for whoever holds it; the next retain makes it anew.
pub(crate) fn end_primary(driver: &Driver, state: &mut State, device: usize) -> Cu {
    let place = state.primaries.get_mut(device).ok_or(Code::INVALID_DEVICE)?;
    let handle = place.handle.filter(|_| place.active);
    place.active = false;
    handle.map_or(Ok(()), |handle| destroy(driver, state, handle))
}

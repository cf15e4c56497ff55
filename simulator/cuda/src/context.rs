//! Contexts: what they cost, and what goes with them.

use aliquot_sim_node::ProcessUse;

use crate::codes::{Code, Cu};
use crate::device::Device;
use crate::driver::{Driver, code_of};
use crate::engine;
use crate::state::State;

const MIB: u64 = 1 << 20;

/// Device memory of a context for each multiprocessor: 528 MiB on an H100, 432 MiB on an A100 (assumed).
const BYTES_PER_MULTIPROCESSOR: u64 = 4 * MIB;

/// `CUcomputemode`.
const PROHIBITED: u32 = 2;
const EXCLUSIVE_PROCESS: u32 = 3;

/// `CUlimit` values that take device memory.
const STACK_SIZE: i32 = 0;
const PRINTF_FIFO_SIZE: i32 = 1;
const MALLOC_HEAP_SIZE: i32 = 2;
const DEV_RUNTIME_SYNC_DEPTH: i32 = 3;
const DEV_RUNTIME_PENDING_LAUNCH_COUNT: i32 = 4;
/// `CUlimit` values in all.
const LIMITS: i32 = 8;

/// Limits of a fresh context.
const DEFAULT_LIMITS: [u64; 8] = [1024, 7 * MIB, 8 * MIB, 2, 2048, 128, 0, 0];

/// Device memory of each level of nested kernels that wait for each other (NVIDIA's guide tells of about 150 MiB), and
/// of each launch from the device that may be under way (assumed).
const DEPTH_BYTES: u64 = 150 * MIB;
const PENDING_BYTES: u64 = 8 << 10;

/// Multiprocessors hold this many threads at once, each with a stack.
const RESIDENT_THREADS: u64 = 2048;

/// A context.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) flags: u32,
    pub(crate) primary: bool,
    pub(crate) alive: bool,
    /// Number for `cuCtxGetId`.
    pub(crate) id: u64,
    /// Device memory that it takes itself, growth included.
    pub(crate) overhead: u64,
    limits: [u64; 8],
    /// Local memory for each resident thread that has been set aside.
    local_bytes: u64,
    /// The error after which nothing in it works any more.
    pub(crate) stuck: Option<Code>,
    pub(crate) cache_config: i32,
    pub(crate) shared_config: i32,
    pub(crate) peers: Vec<u64>,
}

/// A device's primary context.
#[derive(Clone, Debug, Default)]
pub(crate) struct Primary {
    /// The same for every life of it.
    pub(crate) handle: Option<u64>,
    pub(crate) active: bool,
    pub(crate) references: u32,
    pub(crate) flags: u32,
}

impl Context {
    /// Fails with the error that the context is stuck in.
    pub(crate) fn usable(&self) -> Cu {
        self.stuck.map_or(Ok(()), Err)
    }

    pub(crate) fn limit(&self, limit: i32) -> Cu<u64> {
        let index = usize::try_from(limit).map_err(|_| Code::INVALID_VALUE)?;
        self.limits.get(index).copied().ok_or(Code::INVALID_VALUE)
    }
}

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
    crate::module::free_context(state, handle);
    crate::memory::free_context(driver, state, handle);
    crate::array::free_context(driver, state, handle);
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

/// Takes more device memory for what a context itself needs.
pub(crate) fn grow(driver: &Driver, state: &mut State, handle: u64, bytes: u64) -> Cu {
    let device = state.context(handle)?.device;
    driver.charge(device, bytes)?;
    if let Some(context) = state.contexts.get_mut(&handle) {
        context.overhead += bytes;
    }
    Ok(())
}

/// Gives back some of what a context itself needs.
pub(crate) fn shrink(driver: &Driver, state: &mut State, handle: u64, bytes: u64) {
    if let Some(context) = state.contexts.get_mut(&handle).filter(|c| c.alive) {
        let bytes = bytes.min(context.overhead);
        context.overhead -= bytes;
        driver.release(context.device, bytes);
    }
}

/// `cuCtxSetLimit`: the stack, the printf buffer, the device heap and what the device runtime needs for nested kernels
/// live in device memory.
pub(crate) fn set_limit(driver: &Driver, state: &mut State, handle: u64, limit: i32, value: u64) -> Cu {
    if !(0..LIMITS).contains(&limit) {
        return Err(Code::INVALID_VALUE);
    }
    let before = state.context(handle)?.limit(limit)?;
    let unit = match limit {
        PRINTF_FIFO_SIZE | MALLOC_HEAP_SIZE => 1,
        // Kernels cannot wait for those that they launch since compute capability 9.0.
        DEV_RUNTIME_SYNC_DEPTH if capability(driver, state, handle)? >= 9 => {
            return Err(Code::UNSUPPORTED_LIMIT);
        }
        DEV_RUNTIME_SYNC_DEPTH => DEPTH_BYTES,
        DEV_RUNTIME_PENDING_LAUNCH_COUNT => PENDING_BYTES,
        _ => 0,
    };
    let bytes = value.abs_diff(before).checked_mul(unit).ok_or(Code::INVALID_VALUE)?;
    match limit {
        STACK_SIZE => reserve_local(driver, state, handle, value)?,
        _ if value > before => grow(driver, state, handle, bytes)?,
        _ => shrink(driver, state, handle, bytes),
    }
    let index = usize::try_from(limit).map_err(|_| Code::INVALID_VALUE)?;
    if let Some(place) = state.contexts.get_mut(&handle).and_then(|c| c.limits.get_mut(index)) {
        *place = value;
    }
    Ok(())
}

/// Major compute capability of a context's device.
fn capability(driver: &Driver, state: &State, handle: u64) -> Cu<i32> {
    let device = state.context(handle)?.device;
    driver.devices().get(device).map(|device| device.capability().0).ok_or(Code::INVALID_DEVICE)
}

/// Sets local memory aside for threads that need that much; it never shrinks.
pub(crate) fn reserve_local(driver: &Driver, state: &mut State, handle: u64, bytes: u64) -> Cu {
    let context = state.context(handle)?;
    let more = bytes.saturating_sub(context.local_bytes);
    if more == 0 {
        return Ok(());
    }
    let threads =
        driver.devices().get(context.device).map_or(0, |d| u64::from(d.multiprocessors) * RESIDENT_THREADS);
    let bytes_in_all = more.checked_mul(threads).ok_or(Code::INVALID_VALUE)?;
    grow(driver, state, handle, bytes_in_all.next_multiple_of(2 * MIB))?;
    if let Some(context) = state.contexts.get_mut(&handle) {
        context.local_bytes += more;
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

//! What a context itself takes on its device: code, stacks, heap and the like, which grow with its limits.

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::state::State;

const MIB: u64 = 1 << 20;

/// `CUlimit` values that take device memory.
const STACK_SIZE: i32 = 0;
const PRINTF_FIFO_SIZE: i32 = 1;
const MALLOC_HEAP_SIZE: i32 = 2;
const DEV_RUNTIME_SYNC_DEPTH: i32 = 3;
const DEV_RUNTIME_PENDING_LAUNCH_COUNT: i32 = 4;
/// `CUlimit` values in all.
const LIMITS: i32 = 8;

/// Device memory of each level of nested kernels that wait for each other (NVIDIA's guide tells of about 150 MiB), and
/// of each launch from the device that may be under way (assumed).
const DEPTH_BYTES: u64 = 150 * MIB;
const PENDING_BYTES: u64 = 8 << 10;

/// Multiprocessors hold this many threads at once, each with a stack.
const RESIDENT_THREADS: u64 = 2048;

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

//! Contexts.

use crate::codes::{Code, Cu};
use crate::context::{self, overhead};
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::{In, Out};
use crate::state::context::Context;
use crate::stream;
use crate::thread::{current_handle, with_stack};

/// Flags of a context that exist.
const KNOWN_FLAGS: u32 = 0xff;

fn ordinal(driver: &Driver, device: i32) -> Cu<usize> {
    driver.device(device)?;
    usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)
}

fn create(driver: &Driver, context: Out<u64>, flags: u32, device: i32) -> Cu {
    context.check()?;
    if flags & !KNOWN_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let handle = context::create(driver, &mut driver.lock(), ordinal(driver, device)?, flags, None)?;
    with_stack(|stack| stack.push(handle))?;
    context.put(handle)
}

fn destroy(driver: &Driver, context: u64) -> Cu {
    if driver.lock().context(context)?.primary {
        return Err(Code::INVALID_CONTEXT);
    }
    drain(driver, context);
    context::destroy(driver, &mut driver.lock(), context)?;
    with_stack(|stack| {
        if stack.last() == Some(&context) {
            stack.pop();
        }
    })
}

/// Waits for what a context still has to do before it ends; one that is stuck has nothing.
fn drain(driver: &Driver, context: u64) {
    let _ = stream::synchronise_context(driver, context);
}

/// The same for a primary context, where this call would end it.
fn drain_primary(driver: &Driver, device: usize, references: u32) {
    let ending = {
        let state = driver.lock();
        state.primaries.get(device).filter(|p| p.active && p.references <= references).and_then(|p| p.handle)
    };
    if let Some(context) = ending {
        drain(driver, context);
    }
}

fn release_primary(driver: &Driver, device: i32) -> Cu {
    let device = ordinal(driver, device)?;
    drain_primary(driver, device, 1);
    context::release_primary(driver, &mut driver.lock(), device)
}

fn reset_primary(driver: &Driver, device: i32) -> Cu {
    let device = ordinal(driver, device)?;
    drain_primary(driver, device, u32::MAX);
    context::end_primary(driver, &mut driver.lock(), device)
}

fn push(driver: &Driver, context: u64) -> Cu {
    driver.lock().context(context)?;
    with_stack(|stack| stack.push(context))
}

fn pop(driver: &Driver, context: Out<u64>) -> Cu {
    let top = with_stack(Vec::pop)?.ok_or(Code::INVALID_CONTEXT)?;
    let _ = driver;
    context.offer(top);
    Ok(())
}

fn set_flags(driver: &Driver, device: i32, flags: u32, while_active: bool) -> Cu {
    let device = ordinal(driver, device)?;
    if flags & !KNOWN_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut state = driver.lock();
    let place = state.primaries.get_mut(device).ok_or(Code::INVALID_DEVICE)?;
    if place.active && !while_active {
        return Err(Code::PRIMARY_CONTEXT_ACTIVE);
    }
    place.flags = flags;
    let handle = place.handle;
    if let Some(context) = handle.and_then(|h| state.contexts.get_mut(&h)) {
        context.flags = flags;
    }
    Ok(())
}

fn change(driver: &Driver, work: impl FnOnce(&mut Context)) -> Cu {
    let mut state = driver.lock();
    let (handle, _) = state.current()?;
    state.contexts.get_mut(&handle).map(work).ok_or(Code::INVALID_CONTEXT)
}

api! { (driver, flavour)
    Init fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) {
        context.check()?;
        let handle = context::retain_primary(driver, &mut driver.lock(), ordinal(driver, device)?)?;
        context.put(handle)
    }

    Init fn cuDevicePrimaryCtxRelease(device: i32) {
        release_primary(driver, device)
    }

    Init fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        release_primary(driver, device)
    }

    Init fn cuDevicePrimaryCtxReset(device: i32) {
        reset_primary(driver, device)
    }

    Init fn cuDevicePrimaryCtxReset_v2(device: i32) {
        reset_primary(driver, device)
    }

    Init fn cuDevicePrimaryCtxSetFlags(device: i32, flags: u32) {
        set_flags(driver, device, flags, false)
    }

    Init fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) {
        set_flags(driver, device, flags, true)
    }

    Init fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        let state = driver.lock();
        let place = state.primaries.get(ordinal(driver, device)?).ok_or(Code::INVALID_DEVICE)?;
        flags.put(place.flags)?;
        active.put(i32::from(place.active))
    }

    Init fn cuCtxCreate(context: Out<u64>, flags: u32, device: i32) {
        create(driver, context, flags, device)
    }

    Init fn cuCtxCreate_v2(context: Out<u64>, flags: u32, device: i32) {
        create(driver, context, flags, device)
    }

    Init fn cuCtxCreate_v3(context: Out<u64>, affinity: In<[u32; 2]>, number: i32, flags: u32, device: i32) {
        // An affinity can only be had from an MPS server.
        if number > 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        create(driver, context, flags, device)
    }

    Init fn cuCtxCreate_v4(context: Out<u64>, parameters: In<[u64; 3]>, flags: u32, device: i32) {
        // Affinity and graphics interoperability are all that the parameters can ask for.
        let asked = !parameters.is_null() && parameters.get()?.iter().any(|word| *word != 0);
        if asked {
            return Err(Code::NOT_SUPPORTED);
        }
        create(driver, context, flags, device)
    }

    Init fn cuCtxDestroy(context: u64) {
        destroy(driver, context)
    }

    Init fn cuCtxDestroy_v2(context: u64) {
        destroy(driver, context)
    }

    Init fn cuCtxAttach(context: Out<u64>, flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let handle = driver.lock().current()?.0;
        context.put(handle)
    }

    Init fn cuCtxDetach(context: u64) {
        destroy(driver, context)
    }

    Init fn cuCtxPushCurrent(context: u64) {
        push(driver, context)
    }

    Init fn cuCtxPushCurrent_v2(context: u64) {
        push(driver, context)
    }

    Init fn cuCtxPopCurrent(context: Out<u64>) {
        pop(driver, context)
    }

    Init fn cuCtxPopCurrent_v2(context: Out<u64>) {
        pop(driver, context)
    }

    Init fn cuCtxSetCurrent(context: u64) {
        if context != 0 {
            driver.lock().context(context)?;
        }
        with_stack(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        })
    }

    Init fn cuCtxGetCurrent(context: Out<u64>) {
        context.put(current_handle()?)
    }

    Init fn cuCtxGetDevice(device: Out<i32>) {
        let found = driver.lock().current()?.1.device;
        device.put(i32::try_from(found).unwrap_or(0))
    }

    Init fn cuCtxGetDevice_v2(device: Out<i32>, context: u64) {
        let state = driver.lock();
        let found = if context == 0 { state.current()?.1 } else { state.context(context)? };
        device.put(i32::try_from(found.device).unwrap_or(0))
    }

    Init fn cuCtxGetId(context: u64, id: Out<u64>) {
        let state = driver.lock();
        let found = if context == 0 { state.current()?.1 } else { state.context(context)? };
        id.put(found.id)
    }

    Init fn cuCtxGetFlags(flags: Out<u32>) {
        let found = driver.lock().current()?.1.flags;
        flags.put(found)
    }

    Init fn cuCtxSetFlags(flags: u32) {
        change(driver, |context| context.flags = flags)
    }

    Init fn cuCtxGetApiVersion(context: u64, version: Out<u32>) {
        let state = driver.lock();
        if context == 0 { state.current()?.1 } else { state.context(context)? };
        version.put(3020)
    }

    Init fn cuCtxGetLimit(value: Out<u64>, limit: i32) {
        let found = driver.lock().current()?.1.limit(limit)?;
        value.put(found)
    }

    Init fn cuCtxSetLimit(limit: i32, value: u64) {
        let mut state = driver.lock();
        let (handle, _) = state.current()?;
        overhead::set_limit(driver, &mut state, handle, limit, value)
    }

    Init fn cuCtxGetCacheConfig(config: Out<i32>) {
        let found = driver.lock().current()?.1.cache_config;
        config.put(found)
    }

    Init fn cuCtxSetCacheConfig(config: i32) {
        change(driver, |context| context.cache_config = config)
    }

    Init fn cuCtxGetSharedMemConfig(config: Out<i32>) {
        let found = driver.lock().current()?.1.shared_config;
        config.put(found)
    }

    Init fn cuCtxSetSharedMemConfig(config: i32) {
        change(driver, |context| context.shared_config = config)
    }

    Init fn cuCtxResetPersistingL2Cache() {
        driver.lock().current().map(|_| ())
    }

    Init fn cuCtxGetExecAffinity(affinity: Out<[u32; 2]>, kind: i32) {
        driver.lock().current()?;
        Err(Code::NOT_SUPPORTED)
    }

    Init fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        driver.lock().current()?;
        least.offer(0);
        greatest.offer(-5);
        Ok(())
    }

    Init fn cuCtxEnablePeerAccess(peer: u64, flags: u32) {
        let mut state = driver.lock();
        let device = state.context(peer)?.device;
        let (handle, own) = state.current()?;
        if flags != 0 || own.device == device {
            return Err(Code::INVALID_VALUE);
        }
        let context = state.contexts.get_mut(&handle).ok_or(Code::INVALID_CONTEXT)?;
        if context.peers.contains(&peer) {
            return Err(Code::PEER_ACCESS_ALREADY_ENABLED);
        }
        context.peers.push(peer);
        Ok(())
    }

    Init fn cuCtxDisablePeerAccess(peer: u64) {
        let mut state = driver.lock();
        let (handle, _) = state.current()?;
        let context = state.contexts.get_mut(&handle).ok_or(Code::INVALID_CONTEXT)?;
        let place = context.peers.iter().position(|p| *p == peer).ok_or(Code::PEER_ACCESS_NOT_ENABLED)?;
        context.peers.remove(place);
        Ok(())
    }
}

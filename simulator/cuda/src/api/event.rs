//! Events.

use crate::capture;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::engine;
use crate::entry::api;
use crate::event;
use crate::ffi::Out;
use crate::resolver::Flavour;
use crate::state::event::{DISABLE_TIMING, Event, INTERPROCESS};
use crate::state::graph::NodeKind;
use crate::state::work::Work;
use crate::stream;

/// `CU_EVENT_RECORD_EXTERNAL`.
const EXTERNAL: u32 = 1;

fn record(driver: &Driver, handle: u64, stream_handle: u64, flavour: Flavour, flags: u32) -> Cu {
    if flags & !EXTERNAL != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, stream_handle, flavour)?;
    let context = state.events.get(&handle).ok_or(Code::INVALID_HANDLE)?.context;
    if context != target.context {
        return Err(Code::INVALID_HANDLE);
    }
    if let Some(id) = capture::of(&state, target.stream)? {
        return if flags & EXTERNAL == 0 {
            capture::record(&mut state, id, target.stream, handle)
        } else {
            capture::add(&mut state, id, target.stream, NodeKind::Record(handle)).map(|_| ())
        };
    }
    capture::check_implicit(&mut state, target)?;
    let entry = state.events.get_mut(&handle).ok_or(Code::INVALID_HANDLE)?;
    entry.generation += 1;
    let generation = entry.generation;
    let operation =
        stream::submit(driver, &mut state, target, &[], Work::Record { event: handle, generation });
    if let Some(entry) = state.events.get_mut(&handle) {
        entry.record(operation);
    }
    // An event behind nothing has its time at once.
    engine::advance(driver, &mut state);
    Ok(())
}

fn destroy(driver: &Driver, handle: u64) -> Cu {
    driver.lock().events.remove(&handle).map(|_| ()).ok_or(Code::INVALID_HANDLE)
}

/// The operation that an event stands for, and its context.
fn pending(driver: &Driver, handle: u64) -> Cu<(u64, u64)> {
    let mut state = driver.lock();
    capture::check_event(&mut state, handle)?;
    let entry = state.events.get(&handle).ok_or(Code::INVALID_HANDLE)?;
    Ok((entry.operation, entry.context))
}

fn elapsed(driver: &Driver, start: u64, end: u64) -> Cu<f32> {
    let mut state = driver.lock();
    engine::advance(driver, &mut state);
    event::elapsed(&state, start, end)
}

api! { (driver, flavour)
    Init fn cuEventCreate(handle: Out<u64>, flags: u32) {
        handle.check()?;
        let interprocess = flags & INTERPROCESS != 0;
        if flags & !7 != 0 || (interprocess && flags & DISABLE_TIMING == 0) {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = driver.lock();
        let (context, _) = state.current()?;
        let made = state.handle();
        state.events.insert(made, Event { flags, context, ..Event::default() });
        handle.put(made)
    }

    Init fn cuEventDestroy(handle: u64) {
        destroy(driver, handle)
    }

    Init fn cuEventDestroy_v2(handle: u64) {
        destroy(driver, handle)
    }

    Init fn cuEventRecord | cuEventRecord_ptsz(handle: u64, stream: u64) {
        record(driver, handle, stream, flavour, 0)
    }

    Init fn cuEventRecordWithFlags | cuEventRecordWithFlags_ptsz(handle: u64, stream: u64, flags: u32) {
        record(driver, handle, stream, flavour, flags)
    }

    Init fn cuEventQuery(handle: u64) {
        let (operation, context) = pending(driver, handle)?;
        let mut state = driver.lock();
        engine::advance(driver, &mut state);
        state.context(context)?.usable()?;
        if state.engine.is_done(operation) { Ok(()) } else { Err(Code::NOT_READY) }
    }

    Init fn cuEventSynchronize(handle: u64) {
        let (operation, context) = pending(driver, handle)?;
        stream::wait(driver, |state| (!state.engine.is_done(operation)).then_some(operation));
        stream::waited(driver, context)
    }

    Init fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) {
        milliseconds.put(elapsed(driver, start, end)?)
    }

    Init fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) {
        milliseconds.put(elapsed(driver, start, end)?)
    }

    Init fn cuCtxSynchronize() {
        let context = {
            let mut state = driver.lock();
            let context = state.current()?.0;
            capture::check_unsafe(&mut state)?;
            context
        };
        stream::synchronise_context(driver, context)
    }

    Init fn cuCtxSynchronize_v2(context: u64) {
        let context = {
            let mut state = driver.lock();
            let context = if context == 0 { state.current()?.0 } else { context };
            state.context(context)?.usable()?;
            capture::check_unsafe(&mut state)?;
            context
        };
        stream::synchronise_context(driver, context)
    }
}

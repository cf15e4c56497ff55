//! Streams: which one a handle means, what its work waits for, and waiting for it.

use std::time::Duration;

use aliquot_sim_node::now_ns;

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::engine;
use crate::pool::reclaim;
use crate::resolver::Flavour;
use crate::state::State;
use crate::state::stream::{NON_BLOCKING, Stream, Target};
use crate::state::work::Work;
use crate::{capture, thread};

/// `CU_STREAM_LEGACY`.
const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;
/// The highest priority; 0 is the lowest.
pub(crate) const GREATEST_PRIORITY: i32 = -5;

/// Waits shorter than this are spent awake: sleeping takes longer than that.
const SPIN_NS: u64 = 80_000;

/// The stream that a handle means; the current context's default stream for the null handle.
pub(crate) fn resolve(state: &mut State, handle: u64, flavour: Flavour) -> Cu<Target> {
    let default = match (handle, flavour) {
        (0, Flavour::Legacy) | (LEGACY, _) => Some(true),
        (0, Flavour::PerThread) | (PER_THREAD, _) => Some(false),
        _ => None,
    };
    let Some(legacy) = default else {
        let stream = state.streams.get(&handle).filter(|s| !s.doomed).ok_or(Code::INVALID_HANDLE)?;
        let context = stream.context;
        state.context(context)?.usable()?;
        return Ok(Target { stream: handle, context, legacy: false });
    };
    let (context, _) = state.current()?;
    let thread = if legacy { 0 } else { thread::id() };
    let stream = match state.default_streams.get(&(context, thread)) {
        Some(stream) => *stream,
        None => {
            let stream = create(state, context, 0, 0);
            state.default_streams.insert((context, thread), stream);
            stream
        }
    };
    Ok(Target { stream, context, legacy })
}

/// Makes a stream in a context.
pub(crate) fn create(state: &mut State, context: u64, flags: u32, priority: i32) -> u64 {
    let handle = state.handle();
    let id = handle;
    let priority = priority.clamp(GREATEST_PRIORITY, 0);
    state.streams.insert(handle, Stream { context, flags, priority, id, ..Stream::default() });
    handle
}

/// What new work of a stream has to wait for: the stream's own last operation, and between the legacy default stream
/// and the blocking streams of its context, each other's.
pub(crate) fn predecessors(state: &State, target: Target) -> Vec<u64> {
    let mut before = Vec::new();
    if let Some(own) = state.streams.get(&target.stream) {
        before.push(own.last);
        if own.flags & NON_BLOCKING == 0 {
            let legacy = state.default_streams.get(&(target.context, 0)).copied();
            let others = state.streams.iter().filter(|(handle, other)| {
                other.context == target.context
                    && other.flags & NON_BLOCKING == 0
                    && (target.legacy || legacy == Some(**handle))
            });
            before.extend(others.map(|(_, other)| other.last));
        }
    }
    before
}

/// Gives a stream something to do, behind what it has and behind `after`.
pub(crate) fn submit(driver: &Driver, state: &mut State, target: Target, after: &[u64], work: Work) -> u64 {
    engine::settle(driver, state);
    let id = enqueue(driver, state, target, after, work);
    engine::publish(driver, state);
    driver.wake_worker(state);
    id
}

/// The same without telling the node; for several in a row.
pub(crate) fn enqueue(driver: &Driver, state: &mut State, target: Target, after: &[u64], work: Work) -> u64 {
    let mut before = predecessors(state, target);
    before.extend_from_slice(after);
    let priority = state.streams.get(&target.stream).map_or(0, |s| s.priority);
    let id = engine::enqueue(driver, state, (target.context, target.stream, priority), &before, work);
    if let Some(stream) = state.streams.get_mut(&target.stream) {
        stream.last = id;
    }
    id
}

/// Waits until the stream's launch queue has room.
pub(crate) fn wait_for_room(driver: &Driver, target: Target) -> Cu {
    let depth = driver.config.launch_queue;
    wait(driver, |state| {
        let full = state.engine.outstanding(target.stream) >= depth;
        state.streams.get(&target.stream).filter(|_| full).map(|stream| oldest(state, stream.last, depth))
    });
    driver.lock().context(target.context)?.usable()
}

/// An operation that leaves room when it is done: operations of a stream have ascending numbers.
fn oldest(state: &State, last: u64, depth: usize) -> u64 {
    let back = last.saturating_sub(depth as u64).max(1);
    (back..=last).find(|id| !state.engine.is_done(*id)).unwrap_or(last)
}

/// Waits until `pending` names no operation any more.
pub(crate) fn wait(driver: &Driver, pending: impl Fn(&State) -> Option<u64>) {
    loop {
        let mut state = driver.lock();
        engine::advance(driver, &mut state);
        let Some(operation) = pending(&state) else { return };
        if driver.is_exiting() {
            return;
        }
        let now = now_ns();
        let left = engine::next_look(driver, &state, Some(operation)).saturating_sub(now);
        if left < SPIN_NS {
            drop(state);
            std::thread::yield_now();
        } else {
            drop(driver.wait_changed(state, Duration::from_nanos(left - SPIN_NS / 2)));
        }
    }
}

/// `cuStreamSynchronize`.
pub(crate) fn synchronise(driver: &Driver, target: Target) -> Cu {
    wait(driver, |state| {
        let last = state.streams.get(&target.stream)?.last;
        (!state.engine.is_done(last)).then_some(last)
    });
    waited(driver, target.context)
}

/// Waits for everything in a context.
pub(crate) fn synchronise_context(driver: &Driver, context: u64) -> Cu {
    wait(driver, |state| outstanding_of(state, context));
    waited(driver, context)
}

fn outstanding_of(state: &State, context: u64) -> Option<u64> {
    if state.engine.is_idle(context) {
        return None;
    }
    let streams = state.streams.values().filter(|s| s.context == context);
    streams.map(|s| s.last).find(|last| !state.engine.is_done(*last))
}

/// What follows every wait: pools give back, and the context's error shows.
pub(crate) fn waited(driver: &Driver, context: u64) -> Cu {
    let mut state = driver.lock();
    let entry = state.contexts.get(&context).ok_or(Code::INVALID_CONTEXT)?;
    let (device, usable) = (entry.device, entry.usable());
    reclaim::trim_at_wait(driver, &mut state, device);
    usable
}

/// Whether a stream has nothing left to do.
pub(crate) fn query(driver: &Driver, target: Target) -> Cu {
    let mut state = driver.lock();
    engine::advance(driver, &mut state);
    state.context(target.context)?.usable()?;
    let last = state.streams.get(&target.stream).ok_or(Code::INVALID_HANDLE)?.last;
    if state.engine.is_done(last) { Ok(()) } else { Err(Code::NOT_READY) }
}

/// `cuStreamDestroy`: its work goes on.
pub(crate) fn destroy(state: &mut State, handle: u64) -> Cu {
    let stream = state.streams.get(&handle).filter(|s| !s.doomed).ok_or(Code::INVALID_HANDLE)?;
    let (last, capture) = (stream.last, stream.capture);
    if let Some(id) = capture {
        capture::invalidate(state, id);
    }
    // A stream that still has work is remembered, so that waiting for the context waits for it.
    let busy = !state.engine.is_done(last);
    if busy {
        if let Some(stream) = state.streams.get_mut(&handle) {
            stream.doomed = true;
        }
    } else {
        state.streams.remove(&handle);
    }
    let finished: Vec<u64> = state
        .streams
        .iter()
        .filter(|(_, s)| s.doomed && state.engine.is_done(s.last))
        .map(|(handle, _)| *handle)
        .collect();
    for handle in finished {
        state.streams.remove(&handle);
    }
    Ok(())
}

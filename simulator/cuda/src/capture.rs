//! Recording what streams are given into a graph, and everything that may not happen meanwhile.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use crate::codes::{Code, Cu};
use crate::graph;
use crate::state::State;
use crate::state::capture::{Capture, CaptureMark};
use crate::state::event::Event;
use crate::state::graph::NodeKind;
use crate::state::stream::{NON_BLOCKING, Target};
use crate::thread;

/// `CUstreamCaptureMode`.
pub(crate) const GLOBAL: i32 = 0;
pub(crate) const THREAD_LOCAL: i32 = 1;
pub(crate) const RELAXED: i32 = 2;

thread_local! {
    static MODE: Cell<i32> = const { Cell::new(GLOBAL) };
}

/// `cuThreadExchangeStreamCaptureMode`.
pub(crate) fn exchange_mode(mode: i32) -> Cu<i32> {
    if !matches!(mode, GLOBAL | THREAD_LOCAL | RELAXED) {
        return Err(Code::INVALID_VALUE);
    }
    MODE.try_with(|place| place.replace(mode)).map_err(|_| Code::DEINITIALIZED)
}

/// Begins a capture on a stream.
pub(crate) fn begin(state: &mut State, target: Target, mode: i32, into: Option<(u64, Vec<u64>)>) -> Cu {
    if !matches!(mode, GLOBAL | THREAD_LOCAL | RELAXED) {
        return Err(Code::INVALID_VALUE);
    }
    let stream = state.streams.get(&target.stream).ok_or(Code::INVALID_HANDLE)?;
    if target.legacy {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    if stream.capture.is_some() {
        return Err(Code::ILLEGAL_STATE);
    }
    let into_own = into.is_some();
    let (graph, nodes) = match into {
        Some(own) => own,
        None => (graph::create(state, target.context), Vec::new()),
    };
    let id = state.handle();
    let frontier = BTreeMap::from([(target.stream, nodes)]);
    let capture =
        Capture { origin: target.stream, thread: thread::id(), mode, graph, into_own, valid: true, frontier };
    state.captures.insert(id, capture);
    if let Some(stream) = state.streams.get_mut(&target.stream) {
        stream.capture = Some(id);
    }
    Ok(())
}

/// The capture that a stream takes part in.
///
/// # Errors
/// `STREAM_CAPTURE_INVALIDATED` when something has spoilt it.
pub(crate) fn of(state: &State, stream: u64) -> Cu<Option<u64>> {
    let Some(id) = state.streams.get(&stream).and_then(|s| s.capture) else { return Ok(None) };
    match state.captures.get(&id) {
        Some(capture) if capture.valid => Ok(Some(id)),
        _ => Err(Code::STREAM_CAPTURE_INVALIDATED),
    }
}

/// Adds a node for work that a capturing stream is given.
pub(crate) fn add(state: &mut State, id: u64, stream: u64, kind: NodeKind) -> Cu<u64> {
    let capture = state.captures.get(&id).ok_or(Code::INVALID_HANDLE)?;
    let (graph, before) = (capture.graph, capture.frontier.get(&stream).cloned().unwrap_or_default());
    let node = graph::add(state, graph, &before, kind)?;
    if let Some(capture) = state.captures.get_mut(&id) {
        capture.frontier.insert(stream, vec![node]);
    }
    Ok(node)
}

/// The captures that work for a stream would have to wait for: those of the blocking streams, for the legacy one.
pub(crate) fn implied(state: &State, target: Target) -> impl Iterator<Item = u64> + '_ {
    let streams = state.streams.values().filter(move |_| target.legacy);
    streams
        .filter(move |s| s.context == target.context && s.flags & NON_BLOCKING == 0)
        .filter_map(|s| s.capture)
}

/// Work for the legacy default stream would have to wait for blocking streams, which it cannot while they capture.
pub(crate) fn check_implicit(state: &mut State, target: Target) -> Cu {
    let capturing: Vec<u64> = implied(state, target).collect();
    if capturing.is_empty() {
        return Ok(());
    }
    capturing.into_iter().for_each(|id| invalidate(state, id));
    Err(Code::STREAM_CAPTURE_IMPLICIT)
}

/// A call that may wait for the device, or make it wait, spoils the captures that forbid such calls to this thread.
pub(crate) fn check_unsafe(state: &mut State) -> Cu {
    if state.captures.is_empty() {
        return Ok(());
    }
    let thread = thread::id();
    let mode = MODE.try_with(Cell::get).unwrap_or(GLOBAL);
    let forbids = |capture: &Capture| match mode {
        RELAXED => false,
        _ if capture.thread == thread => capture.mode != RELAXED,
        GLOBAL => capture.mode == GLOBAL,
        _ => false,
    };
    let spoilt: Vec<u64> = state.captures.iter().filter(|(_, c)| forbids(c)).map(|(id, _)| *id).collect();
    if spoilt.is_empty() {
        return Ok(());
    }
    spoilt.into_iter().for_each(|id| invalidate(state, id));
    Err(Code::STREAM_CAPTURE_UNSUPPORTED)
}

/// A capturing stream has no state to be asked for.
pub(crate) fn check_waitable(state: &mut State, target: Target) -> Cu {
    if let Some(id) = state.streams.get(&target.stream).and_then(|s| s.capture) {
        invalidate(state, id);
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    check_implicit(state, target)?;
    check_unsafe(state)
}

/// Nor has an event that was recorded in a capture.
pub(crate) fn check_event(state: &mut State, event: u64) -> Cu {
    let mark = state.events.get(&event).ok_or(Code::INVALID_HANDLE)?.captured.clone();
    if let Some(mark) = mark {
        invalidate(state, mark.capture);
        return Err(Code::CAPTURED_EVENT);
    }
    check_unsafe(state)
}

/// Spoils a capture; it still has to be ended.
pub(crate) fn invalidate(state: &mut State, id: u64) {
    if let Some(capture) = state.captures.get_mut(&id) {
        capture.valid = false;
    }
}

/// Records an event in a capturing stream.
pub(crate) fn record(state: &mut State, id: u64, stream: u64, event: u64) -> Cu {
    let nodes = state.captures.get(&id).and_then(|c| c.frontier.get(&stream).cloned()).unwrap_or_default();
    let event: &mut Event = state.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
    event.captured = Some(CaptureMark { capture: id, nodes });
    Ok(())
}

/// Makes a stream wait for an event that was recorded in a capture: it joins that capture.
pub(crate) fn join(state: &mut State, target: Target, mark: &CaptureMark) -> Cu {
    let own = of(state, target.stream)?;
    let alive = state.captures.get(&mark.capture).is_some_and(|c| c.valid);
    match own {
        Some(own) if own != mark.capture => {
            invalidate(state, own);
            invalidate(state, mark.capture);
            Err(Code::STREAM_CAPTURE_MERGE)
        }
        _ if !alive => Err(Code::CAPTURED_EVENT),
        None if target.legacy => {
            invalidate(state, mark.capture);
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        }
        _ => {
            if let Some(capture) = state.captures.get_mut(&mark.capture) {
                let frontier = capture.frontier.entry(target.stream).or_default();
                frontier
                    .extend(mark.nodes.iter().filter(|n| !frontier.contains(n)).copied().collect::<Vec<_>>());
            }
            if let Some(stream) = state.streams.get_mut(&target.stream) {
                stream.capture = Some(mark.capture);
            }
            Ok(())
        }
    }
}

/// Ends a capture; the graph is the program's.
pub(crate) fn end(state: &mut State, target: Target) -> Cu<u64> {
    let id = state.streams.get(&target.stream).and_then(|s| s.capture).ok_or(Code::ILLEGAL_STATE)?;
    let capture = state.captures.get(&id).cloned().ok_or(Code::ILLEGAL_STATE)?;
    if capture.origin != target.stream {
        invalidate(state, id);
        return Err(Code::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != thread::id() {
        return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
    }
    state.captures.remove(&id);
    for stream in state.streams.values_mut().filter(|s| s.capture == Some(id)) {
        stream.capture = None;
    }
    let verdict = if !capture.valid {
        Err(Code::STREAM_CAPTURE_INVALIDATED)
    } else if !is_joined(state, &capture) {
        Err(Code::STREAM_CAPTURE_UNJOINED)
    } else {
        Ok(capture.graph)
    };
    if verdict.is_err() && !capture.into_own {
        graph::destroy(state, capture.graph)?;
    }
    verdict
}

/// Whether the work of every stream of the capture comes before what its origin has recorded.
fn is_joined(state: &State, capture: &Capture) -> bool {
    let mut reached: BTreeSet<u64> = BTreeSet::new();
    let mut open = capture.frontier.get(&capture.origin).cloned().unwrap_or_default();
    while let Some(node) = open.pop() {
        if reached.insert(node) {
            open.extend(graph::dependencies(state, node));
        }
    }
    capture.frontier.values().flatten().all(|node| reached.contains(node))
}

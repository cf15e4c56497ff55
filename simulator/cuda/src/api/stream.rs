//! Streams, and what they can be made to wait for.

use crate::capture;
use crate::codes::{Code, Cu};
use crate::copy;
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::{In, Out};
use crate::resolver::Flavour;
use crate::span::Span;
use crate::state::State;
use crate::state::graph::NodeKind;
use crate::state::memory::Kind;
use crate::state::stream::{NON_BLOCKING, Stream, Target};
use crate::state::work::{HostCall, Work};
use crate::stream;
use crate::transfer::Transfer;

/// `CU_STREAM_WAIT_VALUE_FLUSH`.
const FLUSH: u32 = 1 << 30;
/// `CU_EVENT_WAIT_EXTERNAL`.
const EXTERNAL: u32 = 1;

fn create(driver: &Driver, handle: Out<u64>, flags: u32, priority: i32) -> Cu {
    handle.check()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut state = driver.lock();
    let (context, _) = state.current()?;
    let made = stream::create(&mut state, context, flags, priority);
    handle.put(made)
}

/// Reads something of a stream.
fn of<R>(
    driver: &Driver,
    handle: u64,
    flavour: Flavour,
    read: impl Fn(&State, &Stream, Target) -> R,
) -> Cu<R> {
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    let entry = state.streams.get(&target.stream).ok_or(Code::INVALID_HANDLE)?;
    Ok(read(&state, entry, target))
}

/// Gives a stream a function of the program's to call.
fn call(driver: &Driver, handle: u64, flavour: Flavour, host: HostCall) -> Cu {
    if host.function == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    if let Some(id) = capture::of(&state, target.stream)? {
        return match host.stream {
            Some(_) => Err(Code::STREAM_CAPTURE_UNSUPPORTED),
            None => capture::add(&mut state, id, target.stream, NodeKind::Host(host)).map(|_| ()),
        };
    }
    capture::check_implicit(&mut state, target)?;
    stream::submit(driver, &mut state, target, &[], Work::Call(host));
    Ok(())
}

fn wait_event(driver: &Driver, handle: u64, flavour: Flavour, event: u64, flags: u32) -> Cu {
    if flags & !EXTERNAL != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    let entry = state.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
    let (operation, mark) = (entry.operation, entry.captured.clone());
    if let Some(mark) = mark {
        return capture::join(&mut state, target, &mark);
    }
    if let Some(id) = capture::of(&state, target.stream)? {
        if flags & EXTERNAL != 0 {
            return capture::add(&mut state, id, target.stream, NodeKind::Wait(event)).map(|_| ());
        }
        if operation == 0 {
            return Ok(());
        }
        // Work from outside cannot be waited for by something that runs later, and often.
        capture::invalidate(&mut state, id);
        return Err(Code::STREAM_CAPTURE_ISOLATION);
    }
    capture::check_implicit(&mut state, target)?;
    if !state.engine.is_done(operation) {
        stream::submit(driver, &mut state, target, &[operation], Work::Marker);
    }
    Ok(())
}

fn word(value: u64, wide: bool) -> u64 {
    if wide { value } else { value & u64::from(u32::MAX) }
}

fn write_value(
    driver: &Driver,
    handle: u64,
    flavour: Flavour,
    (address, value): (u64, u64),
    wide: bool,
) -> Cu {
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    if capture::of(&state, target.stream)?.is_some() {
        return Err(Code::NOT_SUPPORTED);
    }
    capture::check_implicit(&mut state, target)?;
    let length = if wide { 8 } else { 4 };
    let span = copy::span(&state, address, length, true)?;
    let content = value.to_le_bytes();
    let source = Span::snapshot(content.as_ptr() as u64, length);
    let transfer = Box::new(Transfer::line(span, source, length));
    stream::submit(driver, &mut state, target, &[], Work::Write { transfer });
    Ok(())
}

fn wait_value(
    driver: &Driver,
    handle: u64,
    flavour: Flavour,
    (address, value): (u64, u64),
    wide: bool,
    flags: u32,
) -> Cu {
    if flags & !(FLUSH | 3) != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    if capture::of(&state, target.stream)?.is_some() {
        return Err(Code::NOT_SUPPORTED);
    }
    capture::check_implicit(&mut state, target)?;
    state.memory.places(address, if wide { 8 } else { 4 }, true)?;
    let work = Work::Poll { address, value: word(value, wide), wide, condition: flags & 3 };
    stream::submit(driver, &mut state, target, &[], work);
    Ok(())
}

api! { (driver, flavour)
    Init fn cuStreamCreate(handle: Out<u64>, flags: u32) {
        create(driver, handle, flags, 0)
    }

    Init fn cuStreamCreateWithPriority(handle: Out<u64>, flags: u32, priority: i32) {
        create(driver, handle, flags, priority)
    }

    Init fn cuStreamDestroy(handle: u64) {
        stream::destroy(&mut driver.lock(), handle)
    }

    Init fn cuStreamDestroy_v2(handle: u64) {
        stream::destroy(&mut driver.lock(), handle)
    }

    Init fn cuStreamQuery | cuStreamQuery_ptsz(handle: u64) {
        let target = {
            let mut state = driver.lock();
            let target = stream::resolve(&mut state, handle, flavour)?;
            capture::check_waitable(&mut state, target)?;
            target
        };
        stream::query(driver, target)
    }

    Init fn cuStreamSynchronize | cuStreamSynchronize_ptsz(handle: u64) {
        let target = {
            let mut state = driver.lock();
            let target = stream::resolve(&mut state, handle, flavour)?;
            capture::check_waitable(&mut state, target)?;
            target
        };
        stream::synchronise(driver, target)
    }

    Init fn cuStreamGetPriority | cuStreamGetPriority_ptsz(handle: u64, priority: Out<i32>) {
        priority.put(of(driver, handle, flavour, |_, s, _| s.priority)?)
    }

    Init fn cuStreamGetFlags | cuStreamGetFlags_ptsz(handle: u64, flags: Out<u32>) {
        flags.put(of(driver, handle, flavour, |_, s, _| s.flags)?)
    }

    Init fn cuStreamGetId | cuStreamGetId_ptsz(handle: u64, id: Out<u64>) {
        id.put(of(driver, handle, flavour, |_, s, _| s.id)?)
    }

    Init fn cuStreamGetCtx | cuStreamGetCtx_ptsz(handle: u64, context: Out<u64>) {
        context.put(of(driver, handle, flavour, |_, s, _| s.context)?)
    }

    Init fn cuStreamGetDevice | cuStreamGetDevice_ptsz(handle: u64, device: Out<i32>) {
        let found = of(driver, handle, flavour, |state, _, t| state.context(t.context).map(|c| c.device))??;
        device.put(i32::try_from(found).unwrap_or(0))
    }

    Init fn cuStreamWaitEvent | cuStreamWaitEvent_ptsz(handle: u64, event: u64, flags: u32) {
        wait_event(driver, handle, flavour, event, flags)
    }

    Init fn cuLaunchHostFunc | cuLaunchHostFunc_ptsz(handle: u64, function: u64, data: u64) {
        let function = usize::try_from(function).unwrap_or(0);
        call(driver, handle, flavour, HostCall { function, data, stream: None })
    }

    Init fn cuLaunchHostFunc_v2 | cuLaunchHostFunc_v2_ptsz(handle: u64, function: u64, data: u64, mode: u32) {
        let function = usize::try_from(function).unwrap_or(0);
        call(driver, handle, flavour, HostCall { function, data, stream: None })
    }

    Init fn cuStreamAddCallback | cuStreamAddCallback_ptsz(handle: u64, function: u64, data: u64, flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let function = usize::try_from(function).unwrap_or(0);
        call(driver, handle, flavour, HostCall { function, data, stream: Some(handle) })
    }

    Init fn cuStreamAttachMemAsync | cuStreamAttachMemAsync_ptsz(handle: u64, pointer: u64, bytes: u64, flags: u32) {
        let state = driver.lock();
        let managed = state.memory.find(pointer).is_some_and(|(_, r)| matches!(r.kind, Kind::Managed { .. }));
        if managed { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    Init fn cuStreamCopyAttributes | cuStreamCopyAttributes_ptsz(target: u64, source: u64) {
        of(driver, target, flavour, |_, _, _| ())?;
        of(driver, source, flavour, |_, _, _| ())
    }

    Init fn cuStreamWriteValue32 | cuStreamWriteValue32_ptsz(handle: u64, address: u64, value: u32, flags: u32) {
        write_value(driver, handle, flavour, (address, value.into()), false)
    }

    Init fn cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz(handle: u64, address: u64, value: u32, flags: u32) {
        write_value(driver, handle, flavour, (address, value.into()), false)
    }

    Init fn cuStreamWriteValue64 | cuStreamWriteValue64_ptsz(handle: u64, address: u64, value: u64, flags: u32) {
        write_value(driver, handle, flavour, (address, value), true)
    }

    Init fn cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz(handle: u64, address: u64, value: u64, flags: u32) {
        write_value(driver, handle, flavour, (address, value), true)
    }

    Init fn cuStreamWaitValue32 | cuStreamWaitValue32_ptsz(handle: u64, address: u64, value: u32, flags: u32) {
        wait_value(driver, handle, flavour, (address, value.into()), false, flags)
    }

    Init fn cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz(handle: u64, address: u64, value: u32, flags: u32) {
        wait_value(driver, handle, flavour, (address, value.into()), false, flags)
    }

    Init fn cuStreamWaitValue64 | cuStreamWaitValue64_ptsz(handle: u64, address: u64, value: u64, flags: u32) {
        wait_value(driver, handle, flavour, (address, value), true, flags)
    }

    Init fn cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz(handle: u64, address: u64, value: u64, flags: u32) {
        wait_value(driver, handle, flavour, (address, value), true, flags)
    }

    Init fn cuThreadExchangeStreamCaptureMode(mode: Out<i32>) {
        mode.put(capture::exchange_mode(mode.get()?)?)
    }

    Init fn cuStreamBeginCapture | cuStreamBeginCapture_ptsz(handle: u64) {
        let mut state = driver.lock();
        let target = stream::resolve(&mut state, handle, flavour)?;
        capture::begin(&mut state, target, capture::GLOBAL, None)
    }

    Init fn cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz(handle: u64, mode: i32) {
        let mut state = driver.lock();
        let target = stream::resolve(&mut state, handle, flavour)?;
        capture::begin(&mut state, target, mode, None)
    }

    Init fn cuStreamBeginCaptureToGraph | cuStreamBeginCaptureToGraph_ptsz(
        handle: u64, graph: u64, dependencies: In<u64>, edges: u64, count: u64, mode: i32,
    ) {
        let nodes = dependencies.list(usize::try_from(count).unwrap_or(0))?;
        let mut state = driver.lock();
        let target = stream::resolve(&mut state, handle, flavour)?;
        state.graphs.get(graph)?;
        for node in &nodes {
            if state.graphs.node(*node)?.graph != graph {
                return Err(Code::INVALID_VALUE);
            }
        }
        capture::begin(&mut state, target, mode, Some((graph, nodes)))
    }

    Init fn cuStreamEndCapture | cuStreamEndCapture_ptsz(handle: u64, graph: Out<u64>) {
        graph.check()?;
        let mut state = driver.lock();
        let target = stream::resolve(&mut state, handle, flavour)?;
        graph.put(0)?;
        graph.put(capture::end(&mut state, target)?)
    }

    Init fn cuStreamIsCapturing | cuStreamIsCapturing_ptsz(handle: u64, status: Out<i32>) {
        status.put(capture_info(driver, handle, flavour)?.0)
    }

    Init fn cuStreamGetCaptureInfo | cuStreamGetCaptureInfo_ptsz(handle: u64, status: Out<i32>, id: Out<u64>) {
        let (now, capture_id, _, _) = capture_info(driver, handle, flavour)?;
        status.put(now)?;
        id.offer(capture_id);
        Ok(())
    }

    Init fn cuStreamGetCaptureInfo_v2 | cuStreamGetCaptureInfo_v2_ptsz(
        handle: u64, status: Out<i32>, id: Out<u64>, graph: Out<u64>, nodes: Out<u64>, count: Out<u64>,
    ) {
        let info = capture_info(driver, handle, flavour)?;
        describe(info, (status, id, graph, nodes, count))
    }

    Init fn cuStreamGetCaptureInfo_v3 | cuStreamGetCaptureInfo_v3_ptsz(
        handle: u64, status: Out<i32>, id: Out<u64>, graph: Out<u64>, nodes: Out<u64>, edges: Out<u64>, count: Out<u64>,
    ) {
        let info = capture_info(driver, handle, flavour)?;
        edges.offer(0);
        describe(info, (status, id, graph, nodes, count))
    }

    Init fn cuStreamUpdateCaptureDependencies | cuStreamUpdateCaptureDependencies_ptsz(
        handle: u64, nodes: In<u64>, count: u64, flags: u32,
    ) {
        update_dependencies(driver, handle, flavour, &nodes.list(usize::try_from(count).unwrap_or(0))?, flags)
    }

    Init fn cuStreamUpdateCaptureDependencies_v2 | cuStreamUpdateCaptureDependencies_v2_ptsz(
        handle: u64, nodes: In<u64>, edges: u64, count: u64, flags: u32,
    ) {
        update_dependencies(driver, handle, flavour, &nodes.list(usize::try_from(count).unwrap_or(0))?, flags)
    }
}

type Info = (i32, u64, u64, Vec<u64>);
/// Where they go, and the number of nodes.
type Places = (Out<i32>, Out<u64>, Out<u64>, Out<u64>, Out<u64>);

/// Status (none, active, invalidated), id, graph and the nodes that the next work depends on.
fn capture_info(driver: &Driver, handle: u64, flavour: Flavour) -> Cu<Info> {
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    if capture::implied(&state, target).next().is_some() {
        // Asking spoils nothing, says cuda.h.
        return Err(Code::STREAM_CAPTURE_IMPLICIT);
    }
    let id = state.streams.get(&target.stream).and_then(|s| s.capture);
    Ok(match id.and_then(|id| Some((id, state.captures.get(&id)?))) {
        Some((id, capture)) if capture.valid => {
            let nodes = capture.frontier.get(&target.stream).cloned().unwrap_or_default();
            (1, id, capture.graph, nodes)
        }
        Some(_) => (2, 0, 0, Vec::new()),
        None => (0, 0, 0, Vec::new()),
    })
}

thread_local! {
    /// What the last question about a capture answered: the list lives until the next one.
    static NODES: std::cell::RefCell<Vec<u64>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn describe((now, capture_id, captured, frontier): Info, (status, id, graph, nodes, count): Places) -> Cu {
    status.put(now)?;
    id.offer(capture_id);
    graph.offer(captured);
    count.offer(frontier.len() as u64);
    NODES
        .try_with(|place| {
            *place.borrow_mut() = frontier;
            nodes.offer(place.borrow().as_ptr() as u64);
        })
        .map_err(|_| Code::DEINITIALIZED)
}

fn update_dependencies(driver: &Driver, handle: u64, flavour: Flavour, nodes: &[u64], flags: u32) -> Cu {
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    let id = capture::of(&state, target.stream)?.ok_or(Code::ILLEGAL_STATE)?;
    let graph = state.captures.get(&id).ok_or(Code::ILLEGAL_STATE)?.graph;
    for node in nodes {
        if state.graphs.node(*node)?.graph != graph {
            return Err(Code::INVALID_VALUE);
        }
    }
    let frontier = state.captures.get_mut(&id).map(|c| c.frontier.entry(target.stream).or_default());
    match (frontier, flags) {
        // Add to them, or replace them.
        (Some(list), 0) => list.extend_from_slice(nodes),
        (Some(list), 1) => *list = nodes.to_vec(),
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

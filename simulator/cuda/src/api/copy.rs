//! Copies and memsets.

use crate::capture;
use crate::codes::{Code, Cu};
use crate::copy;
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::In;
use crate::memory;
use crate::resolver::Flavour;
use crate::span::Bus;
use crate::state::State;
use crate::state::graph::{NodeKind, Set};
use crate::state::memory::Kind;
use crate::state::stream::Target;
use crate::state::work::Work;
use crate::stream;
use crate::types::{Copy2d, Copy3d, Side2d, Side3d};

const HOST: u32 = 1;
const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// Pageable memory up to this size is taken over at once; larger copies from it make their caller wait.
const STAGED: u64 = 16 << 20;

fn memory_side(kind: u32, address: u64) -> Side3d {
    Side3d { kind, host: address, device: address, ..Side3d::default() }
}

fn array_side(array: u64, offset: u64) -> Side3d {
    Side3d { kind: ARRAY, array, x: offset, ..Side3d::default() }
}

fn line(target: Side3d, source: Side3d, bytes: u64) -> Copy3d {
    Copy3d { source, target, width: bytes, height: 1, depth: 1 }
}

fn widen(side: &Side2d) -> Side3d {
    Side3d {
        x: side.x,
        y: side.y,
        kind: side.kind,
        host: side.host,
        device: side.device,
        array: side.array,
        pitch: side.pitch,
        ..Side3d::default()
    }
}

fn flat(copy: &Copy2d) -> Copy3d {
    let (source, target) = (widen(&copy.source), widen(&copy.target));
    Copy3d { source, target, width: copy.width, height: copy.height, depth: 1 }
}

/// Whether a side is memory of the host's that the driver knows nothing of.
fn is_pageable(state: &State, side: &Side3d) -> bool {
    let address = match side.kind {
        HOST => side.host,
        UNIFIED => side.device,
        _ => return false,
    };
    state.memory.find(address).is_none()
}

/// Device memory that is written counts as being on the device, where it can move.
fn touch(driver: &Driver, state: &mut State, address: u64, bytes: u64) {
    if let Some((_, range)) = state.memory.find(address)
        && matches!(range.kind, Kind::Managed { .. })
    {
        let device = range.device;
        memory::migrate(driver, state, address, bytes, Some(device));
    }
}

/// The same for what a copy writes.
fn touch_target(driver: &Driver, state: &mut State, copy: &Copy3d) {
    if matches!(copy.target.kind, DEVICE | UNIFIED) {
        touch(driver, state, copy.target.device, copy.width * copy.height.max(1) * copy.depth.max(1));
    }
}

/// A copy in stream order.
fn enqueue(driver: &Driver, handle: u64, flavour: Flavour, copy: &Copy3d) -> Cu {
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    let mut transfer = copy::boxed(&state, copy)?;
    if let Some(id) = capture::of(&state, target.stream)? {
        return capture::add(&mut state, id, target.stream, NodeKind::Copy(*copy)).map(|_| ());
    }
    capture::check_implicit(&mut state, target)?;
    let bytes = transfer.bytes();
    if bytes == 0 {
        return Ok(());
    }
    let from_pageable = is_pageable(&state, &copy.source) && transfer.route() == (Bus::Host, Bus::Device);
    let to_pageable = is_pageable(&state, &copy.target);
    let staged = from_pageable && bytes <= STAGED;
    if staged {
        transfer.stage();
    }
    touch_target(driver, &mut state, copy);
    stream::submit(driver, &mut state, target, &[], Work::Transfer(Box::new(transfer)));
    drop(state);
    // The host may use its pageable memory as soon as the call returns.
    if to_pageable || (from_pageable && !staged) { stream::synchronise(driver, target) } else { Ok(()) }
}

/// A copy that its caller waits for.
fn run(driver: &Driver, flavour: Flavour, copy: &Copy3d) -> Cu {
    let mut state = driver.lock();
    let target = default_stream(&mut state, flavour)?;
    let transfer = copy::boxed(&state, copy)?;
    if transfer.bytes() == 0 {
        return Ok(());
    }
    // Inside the device nobody has to wait.
    touch_target(driver, &mut state, copy);
    let waits = transfer.route() != (Bus::Device, Bus::Device);
    stream::submit(driver, &mut state, target, &[], Work::Transfer(Box::new(transfer)));
    drop(state);
    if waits { stream::synchronise(driver, target) } else { Ok(()) }
}

fn default_stream(state: &mut State, flavour: Flavour) -> Cu<Target> {
    let target = stream::resolve(state, 0, flavour)?;
    capture::check_waitable(state, target)?;
    Ok(target)
}

fn set(driver: &Driver, stream_handle: Option<u64>, flavour: Flavour, set: Set) -> Cu {
    let mut state = driver.lock();
    let target = match stream_handle {
        Some(handle) => stream::resolve(&mut state, handle, flavour)?,
        None => default_stream(&mut state, flavour)?,
    };
    let transfer = crate::exec::fill(&state, &set)?;
    if let Some(id) = capture::of(&state, target.stream)? {
        return capture::add(&mut state, id, target.stream, NodeKind::Set(set)).map(|_| ());
    }
    capture::check_implicit(&mut state, target)?;
    if transfer.bytes() == 0 {
        return Ok(());
    }
    touch(driver, &mut state, set.target, transfer.bytes());
    stream::submit(driver, &mut state, target, &[], Work::Transfer(Box::new(transfer)));
    Ok(())
}

fn row(target: u64, value: u32, element: u32, width: u64) -> Set {
    Set { target, pitch: 0, value, element, width, height: 1 }
}

fn rows(target: u64, pitch: u64, value: u32, element: u32, width: u64, height: u64) -> Set {
    Set { target, pitch, value, element, width, height }
}

fn batch(
    driver: &Driver,
    (targets, sources, sizes): (In<u64>, In<u64>, In<u64>),
    count: u64,
    handle: u64,
    flavour: Flavour,
) -> Cu {
    let count = usize::try_from(count).map_err(|_| Code::INVALID_VALUE)?;
    for index in 0..count {
        let (to, from) =
            (memory_side(UNIFIED, targets.get_at(index)?), memory_side(UNIFIED, sources.get_at(index)?));
        enqueue(driver, handle, flavour, &line(to, from, sizes.get_at(index)?))?;
    }
    Ok(())
}

api! { (driver, flavour)
    Init fn cuMemcpy | cuMemcpy_ptds(target: u64, source: u64, bytes: u64) {
        run(driver, flavour, &line(memory_side(UNIFIED, target), memory_side(UNIFIED, source), bytes))
    }

    Init fn cuMemcpyAsync | cuMemcpyAsync_ptsz(target: u64, source: u64, bytes: u64, stream: u64) {
        enqueue(driver, stream, flavour, &line(memory_side(UNIFIED, target), memory_side(UNIFIED, source), bytes))
    }

    Init fn cuMemcpyHtoD(target: u32, source: u64, bytes: u32) {
        let copy = line(memory_side(DEVICE, target.into()), memory_side(HOST, source), bytes.into());
        run(driver, flavour, &copy)
    }

    Init fn cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds(target: u64, source: u64, bytes: u64) {
        run(driver, flavour, &line(memory_side(DEVICE, target), memory_side(HOST, source), bytes))
    }

    Init fn cuMemcpyHtoDAsync(target: u32, source: u64, bytes: u32, stream: u64) {
        let copy = line(memory_side(DEVICE, target.into()), memory_side(HOST, source), bytes.into());
        enqueue(driver, stream, flavour, &copy)
    }

    Init fn cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz(target: u64, source: u64, bytes: u64, stream: u64) {
        enqueue(driver, stream, flavour, &line(memory_side(DEVICE, target), memory_side(HOST, source), bytes))
    }

    Init fn cuMemcpyDtoH(target: u64, source: u32, bytes: u32) {
        let copy = line(memory_side(HOST, target), memory_side(DEVICE, source.into()), bytes.into());
        run(driver, flavour, &copy)
    }

    Init fn cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds(target: u64, source: u64, bytes: u64) {
        run(driver, flavour, &line(memory_side(HOST, target), memory_side(DEVICE, source), bytes))
    }

    Init fn cuMemcpyDtoHAsync(target: u64, source: u32, bytes: u32, stream: u64) {
        let copy = line(memory_side(HOST, target), memory_side(DEVICE, source.into()), bytes.into());
        enqueue(driver, stream, flavour, &copy)
    }

    Init fn cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz(target: u64, source: u64, bytes: u64, stream: u64) {
        enqueue(driver, stream, flavour, &line(memory_side(HOST, target), memory_side(DEVICE, source), bytes))
    }

    Init fn cuMemcpyDtoD(target: u32, source: u32, bytes: u32) {
        let copy = line(memory_side(DEVICE, target.into()), memory_side(DEVICE, source.into()), bytes.into());
        run(driver, flavour, &copy)
    }

    Init fn cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds(target: u64, source: u64, bytes: u64) {
        run(driver, flavour, &line(memory_side(DEVICE, target), memory_side(DEVICE, source), bytes))
    }

    Init fn cuMemcpyDtoDAsync(target: u32, source: u32, bytes: u32, stream: u64) {
        let copy = line(memory_side(DEVICE, target.into()), memory_side(DEVICE, source.into()), bytes.into());
        enqueue(driver, stream, flavour, &copy)
    }

    Init fn cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz(target: u64, source: u64, bytes: u64, stream: u64) {
        enqueue(driver, stream, flavour, &line(memory_side(DEVICE, target), memory_side(DEVICE, source), bytes))
    }

    Init fn cuMemcpyPeer | cuMemcpyPeer_ptds(
        target: u64, target_context: u64, source: u64, source_context: u64, bytes: u64,
    ) {
        run(driver, flavour, &line(memory_side(UNIFIED, target), memory_side(UNIFIED, source), bytes))
    }

    Init fn cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz(
        target: u64, target_context: u64, source: u64, source_context: u64, bytes: u64, stream: u64,
    ) {
        enqueue(driver, stream, flavour, &line(memory_side(UNIFIED, target), memory_side(UNIFIED, source), bytes))
    }

    Init fn cuMemcpyDtoA_v2 | cuMemcpyDtoA_v2_ptds(target: u64, offset: u64, source: u64, bytes: u64) {
        run(driver, flavour, &line(array_side(target, offset), memory_side(DEVICE, source), bytes))
    }

    Init fn cuMemcpyAtoD_v2 | cuMemcpyAtoD_v2_ptds(target: u64, source: u64, offset: u64, bytes: u64) {
        run(driver, flavour, &line(memory_side(DEVICE, target), array_side(source, offset), bytes))
    }

    Init fn cuMemcpyHtoA_v2 | cuMemcpyHtoA_v2_ptds(target: u64, offset: u64, source: u64, bytes: u64) {
        run(driver, flavour, &line(array_side(target, offset), memory_side(HOST, source), bytes))
    }

    Init fn cuMemcpyAtoH_v2 | cuMemcpyAtoH_v2_ptds(target: u64, source: u64, offset: u64, bytes: u64) {
        run(driver, flavour, &line(memory_side(HOST, target), array_side(source, offset), bytes))
    }

    Init fn cuMemcpyAtoA_v2 | cuMemcpyAtoA_v2_ptds(
        target: u64, target_offset: u64, source: u64, source_offset: u64, bytes: u64,
    ) {
        run(driver, flavour, &line(array_side(target, target_offset), array_side(source, source_offset), bytes))
    }

    Init fn cuMemcpyHtoAAsync_v2 | cuMemcpyHtoAAsync_v2_ptsz(
        target: u64, offset: u64, source: u64, bytes: u64, stream: u64,
    ) {
        enqueue(driver, stream, flavour, &line(array_side(target, offset), memory_side(HOST, source), bytes))
    }

    Init fn cuMemcpyAtoHAsync_v2 | cuMemcpyAtoHAsync_v2_ptsz(
        target: u64, source: u64, offset: u64, bytes: u64, stream: u64,
    ) {
        enqueue(driver, stream, flavour, &line(memory_side(HOST, target), array_side(source, offset), bytes))
    }

    Init fn cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds(copy: In<Copy2d>) {
        run(driver, flavour, &flat(&copy.get()?))
    }

    Init fn cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds(copy: In<Copy2d>) {
        run(driver, flavour, &flat(&copy.get()?))
    }

    Init fn cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz(copy: In<Copy2d>, stream: u64) {
        enqueue(driver, stream, flavour, &flat(&copy.get()?))
    }

    Init fn cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds(copy: In<Copy3d>) {
        run(driver, flavour, &copy.get()?)
    }

    Init fn cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz(copy: In<Copy3d>, stream: u64) {
        enqueue(driver, stream, flavour, &copy.get()?)
    }

    Init fn cuMemcpy3DPeer | cuMemcpy3DPeer_ptds(copy: In<Copy3d>) {
        run(driver, flavour, &copy.get()?)
    }

    Init fn cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz(copy: In<Copy3d>, stream: u64) {
        enqueue(driver, stream, flavour, &copy.get()?)
    }

    Init fn cuMemcpyBatchAsync | cuMemcpyBatchAsync_ptsz(
        targets: In<u64>, sources: In<u64>, sizes: In<u64>, count: u64,
        attributes: u64, indexes: u64, attribute_count: u64, failed: u64, stream: u64,
    ) {
        batch(driver, (targets, sources, sizes), count, stream, flavour)
    }

    Init fn cuMemcpyBatchAsync_v2 | cuMemcpyBatchAsync_v2_ptsz(
        targets: In<u64>, sources: In<u64>, sizes: In<u64>, count: u64,
        attributes: u64, indexes: u64, attribute_count: u64, stream: u64,
    ) {
        batch(driver, (targets, sources, sizes), count, stream, flavour)
    }

    Init fn cuMemsetD8(target: u32, value: u8, count: u32) {
        set(driver, None, flavour, row(target.into(), value.into(), 1, count.into()))
    }

    Init fn cuMemsetD16(target: u32, value: u16, count: u32) {
        set(driver, None, flavour, row(target.into(), value.into(), 2, count.into()))
    }

    Init fn cuMemsetD32(target: u32, value: u32, count: u32) {
        set(driver, None, flavour, row(target.into(), value, 4, count.into()))
    }

    Init fn cuMemsetD8_v2 | cuMemsetD8_v2_ptds(target: u64, value: u8, count: u64) {
        set(driver, None, flavour, row(target, value.into(), 1, count))
    }

    Init fn cuMemsetD16_v2 | cuMemsetD16_v2_ptds(target: u64, value: u16, count: u64) {
        set(driver, None, flavour, row(target, value.into(), 2, count))
    }

    Init fn cuMemsetD32_v2 | cuMemsetD32_v2_ptds(target: u64, value: u32, count: u64) {
        set(driver, None, flavour, row(target, value, 4, count))
    }

    Init fn cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds(target: u64, pitch: u64, value: u8, width: u64, height: u64) {
        set(driver, None, flavour, rows(target, pitch, value.into(), 1, width, height))
    }

    Init fn cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds(target: u64, pitch: u64, value: u16, width: u64, height: u64) {
        set(driver, None, flavour, rows(target, pitch, value.into(), 2, width, height))
    }

    Init fn cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds(target: u64, pitch: u64, value: u32, width: u64, height: u64) {
        set(driver, None, flavour, rows(target, pitch, value, 4, width, height))
    }

    Init fn cuMemsetD8Async | cuMemsetD8Async_ptsz(target: u64, value: u8, count: u64, stream: u64) {
        set(driver, Some(stream), flavour, row(target, value.into(), 1, count))
    }

    Init fn cuMemsetD16Async | cuMemsetD16Async_ptsz(target: u64, value: u16, count: u64, stream: u64) {
        set(driver, Some(stream), flavour, row(target, value.into(), 2, count))
    }

    Init fn cuMemsetD32Async | cuMemsetD32Async_ptsz(target: u64, value: u32, count: u64, stream: u64) {
        set(driver, Some(stream), flavour, row(target, value, 4, count))
    }

    Init fn cuMemsetD2D8Async | cuMemsetD2D8Async_ptsz(
        target: u64, pitch: u64, value: u8, width: u64, height: u64, stream: u64,
    ) {
        set(driver, Some(stream), flavour, rows(target, pitch, value.into(), 1, width, height))
    }

    Init fn cuMemsetD2D16Async | cuMemsetD2D16Async_ptsz(
        target: u64, pitch: u64, value: u16, width: u64, height: u64, stream: u64,
    ) {
        set(driver, Some(stream), flavour, rows(target, pitch, value.into(), 2, width, height))
    }

    Init fn cuMemsetD2D32Async | cuMemsetD2D32Async_ptsz(
        target: u64, pitch: u64, value: u32, width: u64, height: u64, stream: u64,
    ) {
        set(driver, Some(stream), flavour, rows(target, pitch, value, 4, width, height))
    }
}

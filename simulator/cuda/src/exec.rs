//! Making graphs runnable, running them, and backing their allocation nodes with memory.

use std::collections::{BTreeMap, BTreeSet};

use crate::charge::charge;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::state::State;
use crate::state::exec::{Exec, Step};
use crate::state::graph::{NodeKind, Set};
use crate::state::memory::PAGE;
use crate::state::stream::Target;
use crate::state::work::Work;
use crate::transfer::Transfer;
use crate::{copy, engine, graph, launch, stream};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
pub(crate) const AUTO_FREE: u64 = 1;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
pub(crate) const UPLOAD: u64 = 2;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH`.
const DEVICE_LAUNCH: u64 = 4;

/// Makes a graph runnable.
pub(crate) fn instantiate(driver: &Driver, state: &mut State, handle: u64, flags: u64) -> Cu<u64> {
    if flags & DEVICE_LAUNCH != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    if flags & !0xf != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let context = match state.graphs.get(handle)?.context {
        0 => state.current()?.0,
        context => context,
    };
    let mut steps = Vec::new();
    flatten(state, handle, &[], &mut steps)?;
    for step in &steps {
        if let NodeKind::Kernel(launch) = &step.kind {
            launch::prepare(driver, state, context, launch)?;
        }
    }
    let footprint = footprint(&steps);
    let source = graph::clone(state, handle)?;
    let exec = Exec {
        source,
        context,
        flags,
        steps,
        footprint,
        backed: false,
        live: BTreeMap::new(),
        running: 0,
        last: 0,
        doomed: false,
    };
    let made = state.handle();
    state.execs.execs.insert(made, exec);
    Ok(made)
}

/// Appends a graph's nodes, children in place of their nodes, behind the steps in `roots`.
fn flatten(state: &State, handle: u64, roots: &[usize], steps: &mut Vec<Step>) -> Cu<Vec<usize>> {
    let mut place: BTreeMap<u64, usize> = BTreeMap::new();
    let mut followed: BTreeSet<usize> = BTreeSet::new();
    for node in graph::order(state, handle)? {
        let entry = state.graphs.node(node)?.clone();
        let mut after: Vec<usize> = entry.after.iter().filter_map(|n| place.get(n).copied()).collect();
        if after.is_empty() {
            after.extend_from_slice(roots);
        }
        followed.extend(&after);
        if let NodeKind::Child(child) = entry.kind {
            let leaves = flatten(state, child, &after, steps)?;
            after = if leaves.is_empty() { after } else { leaves };
        }
        place.insert(node, steps.len());
        steps.push(Step { node, kind: entry.kind, after, enabled: true });
    }
    Ok(place.into_values().filter(|p| !followed.contains(p)).collect())
}

/// The most that is allocated at a time when steps run in their order.
fn footprint(steps: &[Step]) -> BTreeMap<usize, u64> {
    let mut now: BTreeMap<usize, u64> = BTreeMap::new();
    let mut most: BTreeMap<usize, u64> = BTreeMap::new();
    let mut held: BTreeMap<u64, (usize, u64)> = BTreeMap::new();
    for step in steps {
        match &step.kind {
            NodeKind::Alloc { address, bytes, device } => {
                let size = bytes.next_multiple_of(PAGE);
                held.insert(*address, (*device, size));
                let sum = now.entry(*device).or_default();
                *sum += size;
                let high = most.entry(*device).or_default();
                *high = (*high).max(*sum);
            }
            NodeKind::Free { address } => {
                if let Some((device, size)) = held.remove(address) {
                    *now.entry(device).or_default() -= size;
                }
            }
            _ => {}
        }
    }
    most
}

/// Reserves the memory of the allocation nodes.
pub(crate) fn back(driver: &Driver, state: &mut State, handle: u64) -> Cu {
    let exec = state.execs.get(handle)?;
    if exec.backed {
        return Ok(());
    }
    let footprint = exec.footprint.clone();
    let mut taken = Vec::new();
    for (device, bytes) in &footprint {
        if let Err(code) = charge(driver, state, *device, *bytes) {
            taken.into_iter().for_each(|(device, bytes)| driver.release(device, bytes));
            return Err(code);
        }
        taken.push((*device, *bytes));
    }
    for (device, bytes) in taken {
        let memory = state.execs.memory_mut(device);
        memory.reserved += bytes;
        memory.reserved_high = memory.reserved_high.max(memory.reserved);
    }
    if let Some(exec) = state.execs.execs.get_mut(&handle) {
        exec.backed = true;
    }
    Ok(())
}

fn unback(driver: &Driver, state: &mut State, handle: u64) {
    let Some(exec) = state.execs.execs.get_mut(&handle).filter(|e| e.backed) else { return };
    exec.backed = false;
    for (device, bytes) in exec.footprint.clone() {
        driver.release(device, bytes);
        state.execs.memory_mut(device).reserved -= bytes;
    }
}

/// `cuDeviceGraphMemTrim`: what no launch uses and no allocation lies in.
pub(crate) fn trim(driver: &Driver, state: &mut State, device: usize) {
    let idle = |e: &Exec| e.running == 0 && e.live.is_empty() && e.footprint.contains_key(&device);
    let idle: Vec<u64> =
        state.execs.execs.iter().filter(|(_, e)| idle(e)).map(|(handle, _)| *handle).collect();
    idle.into_iter().for_each(|handle| unback(driver, state, handle));
}

/// The node that a launch is in a capture.
pub(crate) fn as_child(state: &State, handle: u64) -> Cu<NodeKind> {
    Ok(NodeKind::Child(state.execs.get(handle)?.source))
}

/// Runs a graph behind what a stream has.
pub(crate) fn run(driver: &Driver, state: &mut State, handle: u64, target: Target) -> Cu<u64> {
    let exec = state.execs.get(handle)?;
    if !exec.live.is_empty() && exec.flags & AUTO_FREE == 0 {
        // Its allocations from the last launch have not been freed.
        return Err(Code::INVALID_VALUE);
    }
    engine::settle(driver, state);
    back(driver, state, handle)?;
    let exec = state.execs.get(handle)?.clone();
    if exec.flags & AUTO_FREE != 0 {
        exec.live.keys().for_each(|address| state.execs.freed(&state.memory, *address));
    }
    let works = exec
        .steps
        .iter()
        .map(|step| work_of(driver, state, &exec, step))
        .collect::<Cu<Vec<(Work, Vec<u64>)>>>()?;
    let start = stream::enqueue(driver, state, target, &[exec.last], Work::Marker);
    let priority = state.streams.get(&target.stream).map_or(0, |s| s.priority);
    let mut operations: Vec<u64> = Vec::new();
    for (step, (work, mut after)) in exec.steps.iter().zip(works) {
        after.push(start);
        after.extend(step.after.iter().filter_map(|i| operations.get(*i).copied()));
        let recorded = match (&step.kind, work) {
            (NodeKind::Record(event), Work::Marker) => {
                let generation = state.events.get_mut(event).map_or(0, |e| {
                    e.generation += 1;
                    e.generation
                });
                Some((*event, Work::Record { event: *event, generation }))
            }
            (_, work) => {
                operations.push(engine::enqueue(
                    driver,
                    state,
                    (target.context, target.stream, priority),
                    &after,
                    work,
                ));
                None
            }
        };
        if let Some((event, work)) = recorded {
            let place = (target.context, target.stream, priority);
            let operation = engine::enqueue(driver, state, place, &after, work);
            if let Some(event) = state.events.get_mut(&event) {
                event.record(operation);
            }
            operations.push(operation);
        }
    }
    let end = stream::enqueue(driver, state, target, &operations, Work::GraphEnd { exec: handle });
    launched(state, handle, end);
    engine::publish(driver, state);
    driver.wake_worker(state);
    Ok(end)
}

/// What a step does, and what it waits for besides other steps.
fn work_of(driver: &Driver, state: &mut State, exec: &Exec, step: &Step) -> Cu<(Work, Vec<u64>)> {
    if !step.enabled {
        return Ok((Work::Marker, Vec::new()));
    }
    Ok(match &step.kind {
        NodeKind::Kernel(launch) => (launch::prepare(driver, state, exec.context, launch)?, Vec::new()),
        NodeKind::Copy(copy) => (Work::Transfer(Box::new(copy::boxed(state, copy)?)), Vec::new()),
        NodeKind::Set(set) => (Work::Transfer(Box::new(fill(state, set)?)), Vec::new()),
        NodeKind::Host(call) => (Work::Call(*call), Vec::new()),
        NodeKind::Wait(event) => {
            let operation = state.events.get(event).map_or(0, |e| e.operation);
            (Work::Marker, vec![operation])
        }
        NodeKind::Child(_)
        | NodeKind::Empty
        | NodeKind::Record(_)
        | NodeKind::Alloc { .. }
        | NodeKind::Free { .. } => (Work::Marker, Vec::new()),
    })
}

/// What a memset node does.
pub(crate) fn fill(state: &State, set: &Set) -> Cu<Transfer> {
    if !matches!(set.element, 1 | 2 | 4) {
        return Err(Code::INVALID_VALUE);
    }
    let row = set.width * u64::from(set.element);
    let pitch = if set.height <= 1 { row } else { set.pitch };
    let length = pitch * set.height.saturating_sub(1) + row;
    let span = copy::span(state, set.target, length, true)?;
    Ok(Transfer::fill(span, pitch, set.value, set.element, set.width, set.height.max(1)))
}

fn launched(state: &mut State, handle: u64, end: u64) {
    let Some(exec) = state.execs.execs.get_mut(&handle) else { return };
    exec.last = end;
    exec.running += 1;
    let mut used: BTreeMap<usize, u64> = BTreeMap::new();
    let mut elsewhere = Vec::new();
    for step in &exec.steps {
        match &step.kind {
            NodeKind::Alloc { address, bytes, device } => {
                exec.live.insert(*address, *bytes);
                *used.entry(*device).or_default() += bytes;
            }
            // Of another graph's launch, unless it is this one's own.
            NodeKind::Free { address } if exec.live.remove(address).is_none() => elsewhere.push(*address),
            _ => {}
        }
    }
    elsewhere.into_iter().for_each(|address| state.execs.freed(&state.memory, address));
    state.execs.count_used(&state.memory);
    for (device, bytes) in used {
        let memory = state.execs.memory_mut(device);
        memory.used_high = memory.used_high.max(memory.used.max(bytes));
    }
}

/// `cuGraphExecDestroy`: a launch that is under way ends first.
pub(crate) fn destroy(driver: &Driver, state: &mut State, handle: u64) -> Cu {
    state.execs.get(handle)?;
    if let Some(exec) = state.execs.execs.get_mut(&handle) {
        exec.doomed = true;
    }
    collect(driver, state);
    Ok(())
}

/// Frees destroyed graphs that no longer run and whose allocations are freed.
pub(crate) fn collect(driver: &Driver, state: &mut State) {
    let over = |e: &Exec| e.doomed && e.running == 0 && e.live.is_empty();
    let over: Vec<u64> =
        state.execs.execs.iter().filter(|(_, e)| over(e)).map(|(handle, _)| *handle).collect();
    for handle in over {
        unback(driver, state, handle);
        if let Some(exec) = state.execs.execs.remove(&handle) {
            // It is the exec's own and has no other holder.
            let _ = graph::destroy(state, exec.source);
        }
    }
}

/// Takes over the parameters of a graph of the same shape.
pub(crate) fn update(state: &mut State, handle: u64, from: u64) -> Cu {
    state.execs.get(handle)?;
    let mut steps = Vec::new();
    flatten(state, from, &[], &mut steps)?;
    let exec = state.execs.execs.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
    let same = exec.steps.len() == steps.len()
        && exec.steps.iter().zip(&steps).all(|(old, new)| {
            let fixed = |kind: &NodeKind| matches!(kind, NodeKind::Alloc { .. } | NodeKind::Free { .. });
            old.kind.number() == new.kind.number() && old.after == new.after && !fixed(&new.kind)
        });
    if !same {
        return Err(Code::GRAPH_EXEC_UPDATE_FAILURE);
    }
    for (old, new) in exec.steps.iter_mut().zip(steps) {
        old.kind = new.kind;
    }
    Ok(())
}

/// Replaces what one node does by something of the same sort.
pub(crate) fn set_node(state: &mut State, handle: u64, node: u64, kind: NodeKind) -> Cu {
    let step = state.execs.step_mut(handle, node)?;
    if step.kind.number() != kind.number() {
        return Err(Code::INVALID_VALUE);
    }
    step.kind = kind;
    Ok(())
}

/// Switches a kernel, copy or memset node on or off.
pub(crate) fn set_enabled(state: &mut State, handle: u64, node: u64, on: bool) -> Cu {
    let step = state.execs.step_mut(handle, node)?;
    if step.kind.number() > 2 {
        return Err(Code::INVALID_VALUE);
    }
    step.enabled = on;
    Ok(())
}

/// Whether a node is switched on.
pub(crate) fn is_enabled(state: &mut State, handle: u64, node: u64) -> Cu<bool> {
    Ok(state.execs.step_mut(handle, node)?.enabled)
}

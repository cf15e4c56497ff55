//! Carrying out what streams were given, on the wall clock.
//!
//! An operation waits for others, is *due* at some point, and is done. Kernels are due at a point of their context's
//! own GPU time and are planned as soon as everything before them is, so that the node knows how long the context has
//! work; copies over the bus are due on the wall clock; host functions are due when they return. Nothing needs to be
//! awake while kernels run: [`advance`] carries out everything that has become due, at the instant at which it did, and
//! is called by whoever looks. A thread is only there for what somebody outside the driver can notice.

use aliquot_sim_node::now_ns;

mod lane;
mod look;

pub(crate) use lane::{close_lane, open_lane};
pub(crate) use look::next_look;

use crate::codes::Code;
use crate::driver::Driver;
use crate::plan::WHOLE;
use crate::span::Bus;
use crate::state::State;
use crate::state::engine::{Due, Engine, Operation};
use crate::state::work::Work;
use crate::{copy, event};

/// Ends all outstanding operations of a context, as its end or its error does.
fn drop_operations(state: &mut State, context: u64) {
    let engine = &mut state.engine;
    let ended: Vec<u64> =
        engine.operations.iter().filter(|(_, o)| o.context == context).map(|(id, _)| *id).collect();
    if let Some(lane) = engine.lanes.get_mut(&context) {
        lane.plan.clear();
    }
    for id in ended {
        finish(state, id, now_ns());
    }
    state.engine.ready_calls.retain(|(id, _)| state.engine.operations.contains_key(id));
}

/// Gives a stream of a context something to do after the operations in `after`.
pub(crate) fn enqueue(
    driver: &Driver,
    state: &mut State,
    (context, stream, priority): (u64, u64, i32),
    after: &[u64],
    work: Work,
) -> u64 {
    let engine = &mut state.engine;
    engine.last += 1;
    let id = engine.last;
    let mut pending: Vec<u64> =
        after.iter().copied().filter(|id| engine.operations.contains_key(id)).collect();
    pending.sort_unstable();
    pending.dedup();
    let now = now_ns();
    if work.is_noticed() {
        engine.needs_thread = true;
    }
    let ahead = engine.planned_ahead(context, &pending).filter(|_| work.is_planned());
    let operation = Operation {
        context,
        stream,
        priority,
        work,
        missing: 0,
        dependents: Vec::new(),
        ready_ns: now,
        due: Due::Waiting,
        after: pending.clone(),
    };
    engine.insert(id, operation);
    match ahead {
        Some(earliest) if engine.overtakes(context, priority) => {
            schedule_planned(driver, engine, id, earliest);
            replan(driver, state, context);
        }
        Some(earliest) => schedule_planned(driver, engine, id, earliest),
        None if pending.is_empty() => schedule(driver, engine, id),
        None => {
            for before in &pending {
                if let Some(dependency) = engine.operations.get_mut(before) {
                    dependency.dependents.push(id);
                }
            }
            if let Some(operation) = engine.operations.get_mut(&id) {
                operation.missing = pending.len();
            }
            // The first of them that is due without anybody looking lets this one start.
            engine.needs_thread = true;
        }
    }
    id
}

/// Plans an operation in its context's own time.
fn schedule_planned(driver: &Driver, engine: &mut Engine, id: u64, earliest: u64) {
    let Some(operation) = engine.operations.get_mut(&id) else { return };
    let Some(lane) = engine.lanes.get_mut(&operation.context) else { return };
    let point = match &operation.work {
        Work::Kernel { cost_ns, share, .. } => lane.plan.place(id, earliest, *cost_ns, *share).1,
        Work::Transfer(transfer) => {
            let cost = driver.config.transfer_ns(transfer.bytes(), driver.config.device_gbps);
            lane.plan.place(id, earliest, cost, WHOLE).1
        }
        _ => earliest,
    };
    operation.due = Due::Served(point);
    lane.due.insert((point, id));
}

/// Starts an operation that waits for nothing any more.
fn schedule(driver: &Driver, engine: &mut Engine, id: u64) {
    let Some(operation) = engine.operations.get_mut(&id) else { return };
    let ready = operation.ready_ns;
    let Some(lane) = engine.lanes.get_mut(&operation.context) else { return };
    let due = match &operation.work {
        Work::Kernel { .. } => None,
        Work::Transfer(transfer) => match transfer.route() {
            (Bus::Device, Bus::Device) => None,
            (from, _) => {
                let cost = driver.config.transfer_ns(transfer.bytes(), driver.config.host_gbps);
                let copier = lane.copiers.get_mut(usize::from(from == Bus::Device));
                let start = copier.as_ref().map_or(ready, |free| ready.max(**free));
                if let Some(free) = copier {
                    *free = start + cost;
                }
                Some(Due::Wall(start + cost))
            }
        },
        Work::Call(call) => {
            engine.ready_calls.push_back((id, *call));
            Some(Due::Told)
        }
        Work::Poll { .. } => {
            engine.told.insert(id);
            Some(Due::Told)
        }
        Work::Record { .. } | Work::Marker | Work::Write { .. } | Work::GraphEnd { .. } => {
            Some(Due::Wall(ready))
        }
    };
    match due {
        None => {
            let earliest = lane.track.served_at(ready);
            schedule_planned(driver, engine, id, earliest);
        }
        Some(due) => {
            operation.due = due;
            if let Due::Wall(at) = due {
                engine.on_wall.insert((at, id));
            }
        }
    }
}

/// Plans everything of a context anew that has not started, by priority.
fn replan(driver: &Driver, state: &mut State, context: u64) {
    let engine = &mut state.engine;
    let Some(lane) = engine.lanes.get_mut(&context) else { return };
    let served = lane.track.served();
    let mut open: Vec<(i32, u64)> = Vec::new();
    for (id, operation) in engine.operations.iter().filter(|(_, o)| o.context == context) {
        let started = lane.plan.start_of(*id).is_some_and(|start| start < served);
        if matches!(operation.due, Due::Served(_)) && !started {
            open.push((operation.priority, *id));
        }
    }
    for (_, id) in &open {
        lane.plan.remove(*id);
        lane.due.retain(|(_, other)| other != id);
        if let Some(operation) = engine.operations.get_mut(id) {
            operation.due = Due::Waiting;
        }
    }
    // Smaller numbers are higher priorities; within one, first come first served.
    open.sort_unstable();
    while !open.is_empty() {
        let free = open.iter().position(|(_, id)| {
            let after = engine.operations.get(id).map_or(&[][..], |o| o.after.as_slice());
            after.iter().all(|before| !open.iter().any(|(_, other)| other == before))
        });
        let (_, id) = open.remove(free.unwrap_or(0));
        let after: Vec<u64> = engine.operations.get(&id).map_or_else(Vec::new, |o| {
            o.after.iter().copied().filter(|before| engine.operations.contains_key(before)).collect()
        });
        let earliest = engine.planned_ahead(context, &after).unwrap_or(served);
        schedule_planned(driver, engine, id, earliest);
    }
}

/// Carries out everything that has become due by now, and tells the node what is still to come.
pub(crate) fn advance(driver: &Driver, state: &mut State) {
    if settle(driver, state) {
        publish(driver, state);
    }
}

/// Carries out everything that has become due by now; says whether there was anything.
pub(crate) fn settle(driver: &Driver, state: &mut State) -> bool {
    let now = now_ns();
    observe(driver, state, now, false);
    poll_words(state, now);
    let mut changed = false;
    while let Some((wall, id)) = state.engine.next_due(now) {
        finish_due(driver, state, id, wall);
        changed = true;
    }
    for lane in state.engine.lanes.values_mut() {
        lane.settled = lane.track.served();
    }
    if changed {
        driver.changed.notify_all();
    }
    changed
}

/// Tells the node how long the contexts have work.
pub(crate) fn publish(driver: &Driver, state: &mut State) {
    observe(driver, state, now_ns(), true);
}

/// Brings the shared state of this process's devices up to `now`, and reads from it what this process's contexts were
/// served; with `publish`, also states what they still need.
fn observe(driver: &Driver, state: &mut State, now: u64, publish: bool) {
    if state.engine.lanes.is_empty() {
        return;
    }
    let mut lost = Vec::new();
    let Ok(compute) = driver.node().and_then(|n| n.compute().map_err(|_| Code::UNKNOWN)) else { return };
    for (context, lane) in &mut state.engine.lanes {
        let Some(device) = driver.devices().get(lane.device) else { continue };
        let Some(domain) = compute.domain(device.domain, driver.config.slices(), now) else { continue };
        let tenant = domain.tenant(lane.tenant);
        if !compute.is_mine(tenant) {
            lost.push(*context);
            continue;
        }
        compute.reap(domain, now);
        domain.advance(now);
        // Another process may have brought it further, if this one was stopped after it had read the clock.
        lane.track.update(tenant, domain.advanced_ns());
        if publish {
            let served = lane.track.served();
            tenant.set_demand(lane.plan.end().max(served));
            lane.plan.forget_before(lane.settled);
            lane.track.forget_before(lane.due.first().map_or(served, |(point, _)| *point).min(lane.settled));
        }
    }
    drop(compute);
    for context in lost {
        // The node was rebooted under the process.
        state.engine.lanes.remove(&context);
        drop_operations(state, context);
        if let Some(entry) = state.contexts.get_mut(&context) {
            entry.stuck = Some(Code::UNKNOWN);
        }
    }
}

/// Looks at the words that streams wait for.
fn poll_words(state: &mut State, now: u64) {
    let waiting: Vec<u64> = state.engine.told.iter().copied().collect();
    for id in waiting {
        let fulfilled = match state.engine.operations.get(&id).map(|o| &o.work) {
            Some(Work::Poll { address, value, wide, condition }) => copy::read_word(state, *address, *wide)
                .is_ok_and(|found| meets(found, *value, *wide, *condition)),
            _ => false,
        };
        if fulfilled {
            state.engine.told.remove(&id);
            if let Some(operation) = state.engine.operations.get_mut(&id) {
                operation.due = Due::Wall(now);
            }
            state.engine.on_wall.insert((now, id));
        }
    }
}

/// `CUstreamWaitValue_flags`: cyclic greater or equal, equal, any bit, none of the bits set.
fn meets(found: u64, value: u64, wide: bool, condition: u32) -> bool {
    match condition & 3 {
        0 if wide => found.wrapping_sub(value).cast_signed() >= 0,
        0 => {
            let low = |n: u64| u32::try_from(n & u64::from(u32::MAX)).unwrap_or(0);
            low(found).wrapping_sub(low(value)).cast_signed() >= 0
        }
        1 => found == value,
        2 => found & value != 0,
        _ => !(found | value) != 0,
    }
}

/// The program's function has returned.
pub(crate) fn call_returned(driver: &Driver, state: &mut State, id: u64) {
    settle(driver, state);
    finish_due(driver, state, id, now_ns());
    publish(driver, state);
    driver.changed.notify_all();
}

/// Carries an operation out.
fn finish_due(driver: &Driver, state: &mut State, id: u64, wall: u64) {
    let Some(operation) = state.engine.operations.get(&id) else { return };
    let (context, work) = (operation.context, operation.work.clone());
    match work {
        Work::Transfer(transfer) | Work::Write { transfer } => transfer.run(),
        Work::Kernel { fault: Some(code), .. } => {
            fail_context(driver, state, context, code);
            return;
        }
        _ => {}
    }
    for ready in finish(state, id, wall) {
        schedule(driver, &mut state.engine, ready);
    }
}

/// Takes an operation that is done out; returns those that wait for nothing any more.
fn finish(state: &mut State, id: u64, wall: u64) -> Vec<u64> {
    let Some(operation) = state.engine.remove(id) else { return Vec::new() };
    match operation.due {
        Due::Served(point) => {
            if let Some(lane) = state.engine.lanes.get_mut(&operation.context) {
                lane.due.remove(&(point, id));
            }
        }
        Due::Wall(at) => {
            state.engine.on_wall.remove(&(at, id));
        }
        Due::Told | Due::Waiting => {
            state.engine.told.remove(&id);
        }
    }
    match operation.work {
        Work::Record { event, generation } => event::completed(state, event, generation, wall),
        Work::GraphEnd { exec } => state.execs.launch_ended(exec),
        _ => {}
    }
    let mut ready = Vec::new();
    for dependent in operation.dependents {
        if let Some(waiting) = state.engine.operations.get_mut(&dependent) {
            waiting.missing = waiting.missing.saturating_sub(1);
            waiting.ready_ns = waiting.ready_ns.max(wall);
            if waiting.missing == 0 {
                ready.push(dependent);
            }
        }
    }
    ready
}

/// An error on the device: the context is lost with everything that it still had to do, and the node reports it.
fn fail_context(driver: &Driver, state: &mut State, context: u64, code: Code) {
    let Some(entry) = state.contexts.get_mut(&context) else { return };
    entry.stuck = Some(code);
    let device = entry.device;
    drop_operations(state, context);
    if let (Some(device), Ok(node)) = (driver.devices().get(device), driver.node()) {
        // MMU fault, or an exception of the program's own.
        let xid = if code == Code::ILLEGAL_ADDRESS { 31 } else { 13 };
        let instance = device.mig.as_ref();
        let _ = node.raise_xid(device.pool.gpu, xid, instance.map(|m| m.ci.gi), instance.map(|m| m.ci.id));
    }
    driver.changed.notify_all();
}

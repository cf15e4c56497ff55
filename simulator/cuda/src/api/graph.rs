//! Building graphs.

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::{In, Out};
use crate::graph;
use crate::state::State;
use crate::state::graph::{NodeKind, Set};
use crate::state::work::{HostCall, Launch};
use crate::types::{Copy3d, PoolProps};
use crate::vmm;

/// `CUDA_KERNEL_NODE_PARAMS_v1`; the later ones go on with a kernel and a context.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct KernelParams {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    parameters: In<u64>,
    extra: In<u64>,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct KernelParams2 {
    base: KernelParams,
    kernel: u64,
    context: u64,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct AllocParams {
    pool: PoolProps,
    access: u64,
    access_count: u64,
    bytes: u64,
    pointer: u64,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct HostParams {
    function: u64,
    data: u64,
}

/// `CUgraphNodeParams`, up to the union.
const PARAMS: u64 = 16;
/// Where the copy is in `CUDA_MEMCPY_NODE_PARAMS`.
const MEMCPY_COPY: u64 = 16;

const _: () = {
    assert!(size_of::<KernelParams2>() == 72);
    assert!(size_of::<AllocParams>() == 120);
    assert!(std::mem::offset_of!(AllocParams, pointer) == 112);
};

type Behind = (u64, In<u64>, u64);

fn nodes_of((graph, list, count): Behind) -> Cu<(u64, Vec<u64>)> {
    Ok((graph, list.list(usize::try_from(count).map_err(|_| Code::INVALID_VALUE)?)?))
}

fn add(driver: &Driver, result: Out<u64>, behind: Behind, kind: NodeKind) -> Cu {
    result.check()?;
    let (graph, after) = nodes_of(behind)?;
    let node = graph::add(&mut driver.lock(), graph, &after, kind)?;
    result.put(node)
}

impl KernelParams {
    pub(super) fn launch(&self, state: &State) -> Cu<Launch> {
        let parameter = super::launch::parameter(state, self.function, self.parameters, self.extra)?;
        Ok(Launch {
            function: self.function,
            grid: self.grid,
            block: self.block,
            shared: self.shared,
            parameter,
        })
    }

    fn of(launch: &Launch) -> Self {
        Self {
            function: launch.function,
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            parameters: In::at(0),
            extra: In::at(0),
        }
    }
}

impl KernelParams2 {
    /// The function, or the kernel where only that is given.
    pub(super) fn launch(&self, state: &State) -> Cu<Launch> {
        let function = if self.base.function == 0 { self.kernel } else { self.base.function };
        KernelParams { function, ..self.base }.launch(state)
    }
}

impl HostParams {
    fn call(self) -> NodeKind {
        let function = usize::try_from(self.function).unwrap_or(0);
        NodeKind::Host(HostCall { function, data: self.data, stream: None })
    }
}

fn allocation(driver: &Driver, state: &mut State, params: Out<AllocParams>) -> Cu<NodeKind> {
    let asked = params.get()?;
    let device = vmm::device_of(driver, asked.pool.location)?.ok_or(Code::NOT_SUPPORTED)?;
    if asked.pool.handle_types != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let address = graph::reserve_addresses(driver, state, device, asked.bytes)?;
    params.put(AllocParams { pointer: address, ..asked })?;
    Ok(NodeKind::Alloc { address, bytes: asked.bytes, device })
}

/// What a `CUgraphNodeParams` describes.
fn generic(driver: &Driver, state: &mut State, params: u64) -> Cu<NodeKind> {
    let body = params + PARAMS;
    let kind: i32 = In::at(params).get()?;
    Ok(match kind {
        0 => NodeKind::Kernel(In::<KernelParams2>::at(body).get()?.launch(state)?),
        1 => NodeKind::Copy(In::<Copy3d>::at(body + MEMCPY_COPY).get()?),
        2 => NodeKind::Set(In::<Set>::at(body).get()?),
        3 => In::<HostParams>::at(body).get()?.call(),
        4 => NodeKind::Child(In::at(body).get()?),
        5 => NodeKind::Empty,
        6 => NodeKind::Wait(In::at(body).get()?),
        7 => NodeKind::Record(In::at(body).get()?),
        10 => allocation(driver, state, Out::at(body))?,
        11 => NodeKind::Free { address: In::at(body).get()? },
        _ => return Err(Code::NOT_SUPPORTED),
    })
}

fn add_generic(driver: &Driver, result: Out<u64>, behind: Behind, params: u64) -> Cu {
    result.check()?;
    let (graph, after) = nodes_of(behind)?;
    let mut state = driver.lock();
    state.graphs.get(graph)?;
    let kind = generic(driver, &mut state, params)?;
    let node = graph::add(&mut state, graph, &after, kind)?;
    result.put(node)
}

/// Writes a list as the driver does: as much as fits, zeroes behind it; without a list only the length.
pub(super) fn put_list(list: Out<u64>, length: Out<u64>, found: &[u64]) -> Cu {
    if list.is_null() {
        return length.put(found.len() as u64);
    }
    let room = usize::try_from(length.get()?).map_err(|_| Code::INVALID_VALUE)?;
    for index in 0..room {
        list.put_at(index, found.get(index).copied().unwrap_or(0))?;
    }
    length.put(found.len().min(room) as u64)
}

fn edges(driver: &Driver, graph: u64, from: Out<u64>, to: Out<u64>, length: Out<u64>) -> Cu {
    let state = driver.lock();
    let nodes = state.graphs.get(graph)?.nodes.clone();
    let pairs: Vec<(u64, u64)> = nodes
        .iter()
        .flat_map(|n| graph::dependencies(&state, *n).into_iter().map(|before| (before, *n)))
        .collect();
    if from.is_null() || to.is_null() {
        return length.put(pairs.len() as u64);
    }
    let room = length.get()?;
    put_list(from, length, &pairs.iter().map(|p| p.0).collect::<Vec<_>>())?;
    length.put(room)?;
    put_list(to, length, &pairs.iter().map(|p| p.1).collect::<Vec<_>>())
}

fn dependents(driver: &Driver, node: u64, list: Out<u64>, length: Out<u64>) -> Cu {
    let state = driver.lock();
    let graph = state.graphs.node(node)?.graph;
    let nodes = &state.graphs.get(graph)?.nodes;
    let found: Vec<u64> =
        nodes.iter().copied().filter(|n| graph::dependencies(&state, *n).contains(&node)).collect();
    put_list(list, length, &found)
}

fn link(driver: &Driver, graph: u64, from: In<u64>, to: In<u64>, count: u64, adds: bool) -> Cu {
    let count = usize::try_from(count).map_err(|_| Code::INVALID_VALUE)?;
    let mut state = driver.lock();
    for (before, after) in from.list(count)?.into_iter().zip(to.list(count)?) {
        let same = state.graphs.node(before)?.graph == graph && state.graphs.node(after)?.graph == graph;
        let linked = graph::dependencies(&state, after).contains(&before);
        if !same || before == after || linked == adds {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(node) = state.graphs.nodes.get_mut(&after) {
            if adds {
                node.after.push(before);
            } else {
                node.after.retain(|n| *n != before);
            }
        }
    }
    Ok(())
}

/// Reads what a node does, where it is of the sort that the caller expects.
fn read<R>(driver: &Driver, node: u64, pick: impl Fn(&NodeKind) -> Option<R>) -> Cu<R> {
    let state = driver.lock();
    pick(&state.graphs.node(node)?.kind).ok_or(Code::INVALID_VALUE)
}

/// Replaces what a node does by something of the same sort.
fn write(driver: &Driver, node: u64, make: impl FnOnce(&State) -> Cu<NodeKind>) -> Cu {
    let mut state = driver.lock();
    let kind = make(&state)?;
    let place = state.graphs.nodes.get_mut(&node).ok_or(Code::INVALID_VALUE)?;
    if place.kind.number() != kind.number() {
        return Err(Code::INVALID_VALUE);
    }
    place.kind = kind;
    Ok(())
}

api! { (driver, flavour)
    Init fn cuGraphCreate(result: Out<u64>, flags: u32) {
        result.check()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let made = graph::create(&mut driver.lock(), 0);
        result.put(made)
    }

    Init fn cuGraphDestroy(graph: u64) {
        graph::destroy(&mut driver.lock(), graph)
    }

    Init fn cuGraphClone(result: Out<u64>, graph: u64) {
        result.check()?;
        let made = graph::clone(&mut driver.lock(), graph)?;
        result.put(made)
    }

    Init fn cuGraphNodeFindInClone(result: Out<u64>, original: u64, clone: u64) {
        let state = driver.lock();
        let nodes = &state.graphs.get(clone)?.nodes;
        let stands_for = |n: &&u64| state.graphs.nodes.get(*n).is_some_and(|node| node.original == Some(original));
        result.put(*nodes.iter().find(stands_for).ok_or(Code::INVALID_VALUE)?)
    }

    Init fn cuGraphAddKernelNode(result: Out<u64>, graph: u64, after: In<u64>, count: u64, params: In<KernelParams>) {
        let launch = params.get()?.launch(&driver.lock())?;
        add(driver, result, (graph, after, count), NodeKind::Kernel(launch))
    }

    Init fn cuGraphAddKernelNode_v2(
        result: Out<u64>, graph: u64, after: In<u64>, count: u64, params: In<KernelParams2>,
    ) {
        let launch = params.get()?.launch(&driver.lock())?;
        add(driver, result, (graph, after, count), NodeKind::Kernel(launch))
    }

    Init fn cuGraphAddMemcpyNode(
        result: Out<u64>, graph: u64, after: In<u64>, count: u64, copy: In<Copy3d>, context: u64,
    ) {
        add(driver, result, (graph, after, count), NodeKind::Copy(copy.get()?))
    }

    Init fn cuGraphAddMemsetNode(
        result: Out<u64>, graph: u64, after: In<u64>, count: u64, set: In<Set>, context: u64,
    ) {
        add(driver, result, (graph, after, count), NodeKind::Set(set.get()?))
    }

    Init fn cuGraphAddHostNode(result: Out<u64>, graph: u64, after: In<u64>, count: u64, params: In<HostParams>) {
        add(driver, result, (graph, after, count), params.get()?.call())
    }

    Init fn cuGraphAddChildGraphNode(result: Out<u64>, graph: u64, after: In<u64>, count: u64, child: u64) {
        add(driver, result, (graph, after, count), NodeKind::Child(child))
    }

    Init fn cuGraphAddEmptyNode(result: Out<u64>, graph: u64, after: In<u64>, count: u64) {
        add(driver, result, (graph, after, count), NodeKind::Empty)
    }

    Init fn cuGraphAddEventRecordNode(result: Out<u64>, graph: u64, after: In<u64>, count: u64, event: u64) {
        add(driver, result, (graph, after, count), NodeKind::Record(event))
    }

    Init fn cuGraphAddEventWaitNode(result: Out<u64>, graph: u64, after: In<u64>, count: u64, event: u64) {
        add(driver, result, (graph, after, count), NodeKind::Wait(event))
    }

    Init fn cuGraphAddMemAllocNode(
        result: Out<u64>, graph: u64, after: In<u64>, count: u64, params: Out<AllocParams>,
    ) {
        result.check()?;
        let (graph, after) = nodes_of((graph, after, count))?;
        let mut state = driver.lock();
        state.graphs.get(graph)?;
        let kind = allocation(driver, &mut state, params)?;
        let node = graph::add(&mut state, graph, &after, kind)?;
        result.put(node)
    }

    Init fn cuGraphAddMemFreeNode(result: Out<u64>, graph: u64, after: In<u64>, count: u64, address: u64) {
        add(driver, result, (graph, after, count), NodeKind::Free { address })
    }

    Init fn cuGraphAddNode(result: Out<u64>, graph: u64, after: In<u64>, count: u64, params: u64) {
        add_generic(driver, result, (graph, after, count), params)
    }

    Init fn cuGraphAddNode_v2(
        result: Out<u64>, graph: u64, after: In<u64>, edges: u64, count: u64, params: u64,
    ) {
        add_generic(driver, result, (graph, after, count), params)
    }

    Init fn cuGraphAddNode_v3(
        result: Out<u64>, graph: u64, after: In<u64>, edges: u64, count: u64, params: u64,
    ) {
        add_generic(driver, result, (graph, after, count), params)
    }

    Init fn cuGraphDestroyNode(node: u64) {
        graph::destroy_node(&mut driver.lock(), node)
    }

    Init fn cuGraphGetNodes(graph: u64, list: Out<u64>, length: Out<u64>) {
        let found = driver.lock().graphs.get(graph)?.nodes.clone();
        put_list(list, length, &found)
    }

    Init fn cuGraphGetRootNodes(graph: u64, list: Out<u64>, length: Out<u64>) {
        let state = driver.lock();
        let nodes = &state.graphs.get(graph)?.nodes;
        let roots: Vec<u64> =
            nodes.iter().copied().filter(|n| graph::dependencies(&state, *n).is_empty()).collect();
        put_list(list, length, &roots)
    }

    Init fn cuGraphGetEdges(graph: u64, from: Out<u64>, to: Out<u64>, length: Out<u64>) {
        edges(driver, graph, from, to, length)
    }

    Init fn cuGraphGetEdges_v2(graph: u64, from: Out<u64>, to: Out<u64>, data: Out<u64>, length: Out<u64>) {
        edges(driver, graph, from, to, length)
    }

    Init fn cuGraphNodeGetType(node: u64, kind: Out<i32>) {
        let number = driver.lock().graphs.node(node)?.kind.number();
        kind.put(number)
    }

    Init fn cuGraphNodeGetDependencies(node: u64, list: Out<u64>, length: Out<u64>) {
        let found = driver.lock().graphs.node(node)?.after.clone();
        put_list(list, length, &found)
    }

    Init fn cuGraphNodeGetDependencies_v2(node: u64, list: Out<u64>, edges: u64, length: Out<u64>) {
        let found = driver.lock().graphs.node(node)?.after.clone();
        put_list(list, length, &found)
    }

    Init fn cuGraphNodeGetDependentNodes(node: u64, list: Out<u64>, length: Out<u64>) {
        dependents(driver, node, list, length)
    }

    Init fn cuGraphNodeGetDependentNodes_v2(node: u64, list: Out<u64>, edges: u64, length: Out<u64>) {
        dependents(driver, node, list, length)
    }

    Init fn cuGraphAddDependencies(graph: u64, from: In<u64>, to: In<u64>, count: u64) {
        link(driver, graph, from, to, count, true)
    }

    Init fn cuGraphAddDependencies_v2(graph: u64, from: In<u64>, to: In<u64>, edges: u64, count: u64) {
        link(driver, graph, from, to, count, true)
    }

    Init fn cuGraphRemoveDependencies(graph: u64, from: In<u64>, to: In<u64>, count: u64) {
        link(driver, graph, from, to, count, false)
    }

    Init fn cuGraphRemoveDependencies_v2(graph: u64, from: In<u64>, to: In<u64>, edges: u64, count: u64) {
        link(driver, graph, from, to, count, false)
    }

    Init fn cuGraphKernelNodeGetParams(node: u64, params: Out<KernelParams>) {
        let launch = read(driver, node, |k| if let NodeKind::Kernel(l) = k { Some(*l) } else { None })?;
        params.put(KernelParams::of(&launch))
    }

    Init fn cuGraphKernelNodeGetParams_v2(node: u64, params: Out<KernelParams2>) {
        let launch = read(driver, node, |k| if let NodeKind::Kernel(l) = k { Some(*l) } else { None })?;
        params.put(KernelParams2 { base: KernelParams::of(&launch), kernel: 0, context: 0 })
    }

    Init fn cuGraphKernelNodeSetParams(node: u64, params: In<KernelParams>) {
        write(driver, node, |state| Ok(NodeKind::Kernel(params.get()?.launch(state)?)))
    }

    Init fn cuGraphKernelNodeSetParams_v2(node: u64, params: In<KernelParams2>) {
        write(driver, node, |state| Ok(NodeKind::Kernel(params.get()?.launch(state)?)))
    }

    Init fn cuGraphMemcpyNodeGetParams(node: u64, copy: Out<Copy3d>) {
        copy.put(read(driver, node, |k| if let NodeKind::Copy(c) = k { Some(*c) } else { None })?)
    }

    Init fn cuGraphMemcpyNodeSetParams(node: u64, copy: In<Copy3d>) {
        write(driver, node, |_| Ok(NodeKind::Copy(copy.get()?)))
    }

    Init fn cuGraphMemsetNodeGetParams(node: u64, set: Out<Set>) {
        set.put(read(driver, node, |k| if let NodeKind::Set(s) = k { Some(*s) } else { None })?)
    }

    Init fn cuGraphMemsetNodeSetParams(node: u64, set: In<Set>) {
        write(driver, node, |_| Ok(NodeKind::Set(set.get()?)))
    }

    Init fn cuGraphHostNodeGetParams(node: u64, params: Out<HostParams>) {
        let call = read(driver, node, |k| if let NodeKind::Host(c) = k { Some(*c) } else { None })?;
        params.put(HostParams { function: call.function as u64, data: call.data })
    }

    Init fn cuGraphHostNodeSetParams(node: u64, params: In<HostParams>) {
        write(driver, node, |_| Ok(params.get()?.call()))
    }

    Init fn cuGraphMemAllocNodeGetParams(node: u64, params: Out<AllocParams>) {
        let (address, bytes, device) = read(driver, node, |k| match k {
            NodeKind::Alloc { address, bytes, device } => Some((*address, *bytes, *device)),
            _ => None,
        })?;
        let location = crate::types::Location {
            kind: crate::types::Location::DEVICE,
            id: i32::try_from(device).unwrap_or(0),
        };
        let pool = PoolProps {
            kind: 1, handle_types: 0, location, win32: 0, max_size: 0, usage: 0, rdma: 0, reserved: [0; 53],
        };
        params.put(AllocParams { pool, access: 0, access_count: 0, bytes, pointer: address })
    }

    Init fn cuGraphMemFreeNodeGetParams(node: u64, address: Out<u64>) {
        address.put(read(driver, node, |k| if let NodeKind::Free { address } = k { Some(*address) } else { None })?)
    }

    Init fn cuGraphChildGraphNodeGetGraph(node: u64, graph: Out<u64>) {
        graph.put(read(driver, node, |k| if let NodeKind::Child(g) = k { Some(*g) } else { None })?)
    }

    Init fn cuGraphEventRecordNodeGetEvent(node: u64, event: Out<u64>) {
        event.put(read(driver, node, |k| if let NodeKind::Record(e) = k { Some(*e) } else { None })?)
    }

    Init fn cuGraphEventWaitNodeGetEvent(node: u64, event: Out<u64>) {
        event.put(read(driver, node, |k| if let NodeKind::Wait(e) = k { Some(*e) } else { None })?)
    }

    Init fn cuUserObjectCreate(result: Out<u64>, object: u64, destructor: u64, count: u32, flags: u32) {
        result.check()?;
        if count == 0 || flags != 1 {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = driver.lock();
        let handle = state.handle();
        state.user_objects.insert(handle, object, usize::try_from(destructor).unwrap_or(0), count);
        result.put(handle)
    }

    Init fn cuUserObjectRetain(object: u64, count: u32) {
        driver.lock().user_objects.retain(object, count)
    }

    Init fn cuUserObjectRelease(object: u64, count: u32) {
        let mut state = driver.lock();
        state.engine.needs_thread = true;
        let known = state.user_objects.release(object, count);
        driver.wake_worker(&state);
        if known { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    Init fn cuGraphRetainUserObject(graph: u64, object: u64, count: u32, flags: u32) {
        let mut state = driver.lock();
        state.graphs.get(graph)?;
        // Flag 1 moves the caller's own references.
        if flags & 1 == 0 {
            state.user_objects.retain(object, count)?;
        }
        if let Some(entry) = state.graphs.graphs.get_mut(&graph) {
            *entry.objects.entry(object).or_default() += count;
        }
        Ok(())
    }

    Init fn cuGraphReleaseUserObject(graph: u64, object: u64, count: u32) {
        let mut state = driver.lock();
        state.graphs.get(graph)?;
        if let Some(held) = state.graphs.graphs.get_mut(&graph).and_then(|g| g.objects.get_mut(&object)) {
            *held = held.saturating_sub(count);
        }
        if state.user_objects.release(object, count) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }
}

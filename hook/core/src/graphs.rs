//! Memory of graphs.
//!
//! A graph's allocation nodes take nothing when they are added or captured. The driver reserves memory when
//! the graph is uploaded or launched, and keeps it for later launches until it is told to trim. So the charge
//! follows the device's reserved bytes of graph memory around those calls.

pub(crate) mod book;
pub(crate) mod reserved;

pub(crate) use reserved::trim;

use crate::account;
use crate::compute;
use crate::cu_result::{OUT_OF_MEMORY, REFUSED};
use crate::device::Device;
use crate::pages::SLAB;
use crate::real;
use crate::reclaim;
use crate::state::{self, Mode};
use crate::sys;
use aliquot_quota::region::audit;
use book::{BOOK, Exec, epoch};
use reserved::settle;

/// `CU_GRAPH_NODE_TYPE_GRAPH`
const CHILD: i32 = 4;
/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`
const ALLOCATION: i32 = 10;

/// Adds up the allocation nodes of a graph and its children.
fn measure(graph: u64, exec: &mut Exec, depth: u32) {
    let mut count = 0_usize;
    // SAFETY: the program's graph; without room the driver only counts.
    if unsafe { real::cuGraphGetNodes(graph, core::ptr::null_mut(), &mut count) } != Some(0)
        || count == 0
        || depth > 8
    {
        return;
    }
    let size = count * size_of::<u64>();
    let nodes = sys::memory(size).cast::<u64>();
    if nodes.is_null() {
        return;
    }
    // SAFETY: room for `count` nodes, and the driver writes at most as many.
    if unsafe { real::cuGraphGetNodes(graph, nodes, &mut count) } == Some(0) {
        for index in 0..count.min(size / size_of::<u64>()) {
            // SAFETY: below the number of nodes that the driver wrote.
            measure_node(unsafe { *nodes.add(index) }, exec, depth);
        }
    }
    // SAFETY: our own memory; nothing refers to it any more.
    unsafe { sys::free_memory(nodes.cast(), size) };
}

fn measure_node(node: u64, exec: &mut Exec, depth: u32) {
    let mut kind = 0;
    // SAFETY: a node of the program's graph; the driver writes one integer.
    if unsafe { real::cuGraphNodeGetType(node, &mut kind) } != Some(0) {
        return;
    }
    if kind == CHILD {
        let mut child = 0;
        // SAFETY: as above; the driver writes one handle.
        if unsafe { real::cuGraphChildGraphNodeGetGraph(node, &mut child) } == Some(0) {
            measure(child, exec, depth + 1);
        }
        return;
    }
    if kind != ALLOCATION {
        return;
    }
    // CUDA_MEM_ALLOC_NODE_PARAMS: location at 8, size at 104; larger than any version of it.
    let mut params = [0_u64; 32];
    // SAFETY: as above; the driver writes one record.
    if unsafe { real::cuGraphMemAllocNodeGetParams(node, params.as_mut_ptr()) } != Some(0) {
        return;
    }
    let (location, bytes) =
        (params.get(1).copied().unwrap_or_default(), params.get(13).copied().unwrap_or_default());
    let device = ((location >> 32) as u16).wrapping_add(1);
    let bytes = bytes.checked_next_multiple_of(SLAB).unwrap_or(u64::MAX);
    if let Some(place) = exec.most.iter_mut().find(|place| place.0 == device || place.0 == 0) {
        *place = (device, place.1.saturating_add(bytes));
    }
}

/// Instantiates a graph, and records what it can allocate. If `uploads`, the driver uploads the graph in the
/// same call, and so reserves its memory.
pub(crate) fn instantiate(
    graph: u64,
    uploads: bool,
    driver: impl Fn() -> i32,
    made: impl Fn() -> u64,
) -> i32 {
    match state::mode() {
        Mode::Failed => return REFUSED,
        Mode::Unlimited => return driver(),
        Mode::Limited => {}
    }
    let (mut exec, epoch) = (Exec::default(), epoch());
    measure(graph, &mut exec, 0);
    let code = if uploads { reserve(&exec, || retry(&exec, driver(), &driver)) } else { driver() };
    if code == 0 {
        exec.backed = if uploads { epoch } else { 0 };
        let mut book = BOOK.lock();
        // A handle may be used again.
        book.execs.remove(made());
        if exec.most.iter().any(|place| place.1 > 0) {
            let _ = book.execs.insert(made(), exec);
        }
    }
    code
}

/// Forgets an instantiated graph. What it had reserved stays with the driver until a trim.
pub(crate) fn destroy(exec: u64, driver: impl Fn() -> i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    let known = BOOK.lock().execs.remove(exec);
    let code = driver();
    compute::graph_gone(exec);
    if let Some(known) = known {
        if code != 0 {
            let _ = BOOK.lock().execs.insert(exec, known);
        }
        for (device, _) in known.most.iter().filter(|place| place.0 > 0) {
            settle(usize::from(device - 1));
        }
    }
    code
}

/// Asks the driver again for each device that the graph allocates on, while memory is about to come back.
fn retry(exec: &Exec, code: i32, driver: impl Fn() -> i32) -> i32 {
    exec.places().fold(code, |code, (device, _)| reclaim::retry(device, code, &driver))
}

/// Asks the driver again, from the start, where a dead process's memory is about to come back: nothing is
/// timed or charged meanwhile.
pub(crate) fn retried(exec: u64, run: impl Fn() -> i32) -> i32 {
    let code = run();
    if code != OUT_OF_MEMORY || state::mode() != Mode::Limited {
        return code;
    }
    let known = BOOK.lock().execs.get(exec);
    known.map_or(code, |known| retry(&known, code, run))
}

/// Uploads or launches a graph.
pub(crate) fn run(exec: u64, driver: impl Fn() -> i32) -> i32 {
    match state::mode() {
        Mode::Failed => return REFUSED,
        Mode::Unlimited => return driver(),
        Mode::Limited => {}
    }
    let epoch = epoch();
    let Some(known) = BOOK.lock().execs.get(exec).filter(|known| known.backed != epoch) else {
        return driver();
    };
    let code = reserve(&known, driver);
    if code == 0
        && let Some(known) = BOOK.lock().execs.get_mut(exec)
    {
        known.backed = epoch;
    }
    code
}

/// Charges the most that a graph can take, has the driver reserve it, and lowers the charge to what it did
/// take.
fn reserve(exec: &Exec, driver: impl Fn() -> i32) -> i32 {
    for (at, (device, bytes)) in exec.places().enumerate() {
        if let Err(code) = reclaim::charge(device, bytes) {
            exec.places().take(at).for_each(|(device, bytes)| land(device, bytes));
            return code;
        }
        if let Some(memory) = BOOK.lock().memory.get_mut(device) {
            memory.in_flight += bytes;
            memory.charged += bytes;
        }
    }
    let code = driver();
    for (device, bytes) in exec.places() {
        land(device, bytes);
    }
    code
}

/// Ends a call in flight: settles the charge, and notes it if the driver took more than assumed.
fn land(device: Device, bytes: u64) {
    if let Some(memory) = BOOK.lock().memory.get_mut(device) {
        memory.in_flight = memory.in_flight.saturating_sub(bytes);
    }
    if settle(device) > 0 {
        account::note(device, audit::PACKING);
    }
}

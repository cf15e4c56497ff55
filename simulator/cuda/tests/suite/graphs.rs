//! Graphs: building, running, and the memory that they take.
#![allow(unsafe_code, reason = "the tests call a C library")]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{Cuda, GIB, MIB, at, of, on};

const CODE: &str = "aliquot-sim-module 1\nkernel lead us=300000 share=100\nkernel k us=10000 share=100\nkernel half us=10000 share=50";

/// `CUDA_KERNEL_NODE_PARAMS_v2` for one block of one thread.
#[repr(C)]
struct Kernel(u64, [u32; 6], u32, [u64; 4]);

fn kernel_node(cuda: &Cuda, graph: u64, after: &[u64], function: u64) -> u64 {
    let params = Kernel(function, [1; 6], 0, [0; 4]);
    cuda.make("cuGraphAddKernelNode_v2", &[graph, after.as_ptr() as u64, after.len() as u64, of(&params)])
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`: pinned on device 0.
fn alloc_params(bytes: u64) -> [u64; 15] {
    let mut params = [0; 15];
    params[0] = 1;
    params[1] = 1;
    params[13] = bytes;
    params
}

fn alloc_node(cuda: &Cuda, graph: u64, after: &[u64], bytes: u64) -> (u64, u64) {
    let mut params = alloc_params(bytes);
    let arguments = [graph, after.as_ptr() as u64, after.len() as u64, params.as_mut_ptr() as u64];
    let node = cuda.make("cuGraphAddMemAllocNode", &arguments);
    (node, params[14])
}

fn free_node(cuda: &Cuda, graph: u64, after: &[u64], address: u64) -> u64 {
    cuda.make("cuGraphAddMemFreeNode", &[graph, after.as_ptr() as u64, after.len() as u64, address])
}

fn instantiate(cuda: &Cuda, graph: u64) -> u64 {
    cuda.make("cuGraphInstantiateWithFlags", &[graph, 0])
}

/// Milliseconds of a launch, behind something that hides the time of enqueueing.
fn time(cuda: &Cuda, exec: u64) -> f64 {
    let stream = cuda.stream();
    assert_eq!(cuda.launch(cuda.kernel(CODE, "lead"), stream), 0);
    let (start, end) = (cuda.event(), cuda.event());
    cuda.ok("cuEventRecord", &[start, stream]);
    cuda.ok("cuGraphLaunch", &[exec, stream]);
    cuda.ok("cuEventRecord", &[end, stream]);
    cuda.ok("cuStreamSynchronize", &[stream]);
    cuda.elapsed(start, end)
}

fn memory(cuda: &Cuda, attribute: u64) -> u64 {
    let mut value = u64::MAX;
    cuda.ok("cuDeviceGetGraphMemAttribute", &[0, attribute, at(&mut value)]);
    value
}

const USED: u64 = 0;
const RESERVED: u64 = 2;
const RESERVED_HIGH: u64 = 3;

#[test]
fn branches_of_a_graph_overlap_and_chains_do_not() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let half = cuda.kernel(CODE, "half");
        let graph = cuda.make("cuGraphCreate", &[0]);
        let root = kernel_node(&cuda, graph, &[], half);
        let branches = [kernel_node(&cuda, graph, &[root], half), kernel_node(&cuda, graph, &[root], half)];
        kernel_node(&cuda, graph, &branches, half);
        let exec = instantiate(&cuda, graph);
        let ms = time(&cuda, exec);
        assert!((ms - 30.0).abs() < 0.1, "{ms}");
        // What was instantiated no longer depends on its graph.
        cuda.ok("cuGraphDestroy", &[graph]);
        let ms = time(&cuda, exec);
        assert!((ms - 30.0).abs() < 0.1, "{ms}");
        cuda.ok("cuGraphExecDestroy", &[exec]);
        assert_eq!(cuda.call("cuGraphLaunch", &[exec, 0]), 1);
    });
}

#[test]
fn children_nodes_and_parameters_can_be_changed() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (kernel, half) = (cuda.kernel(CODE, "k"), cuda.kernel(CODE, "half"));
        let child = cuda.make("cuGraphCreate", &[0]);
        let first = kernel_node(&cuda, child, &[], kernel);
        kernel_node(&cuda, child, &[first], kernel);
        let graph = cuda.make("cuGraphCreate", &[0]);
        let before = kernel_node(&cuda, graph, &[], kernel);
        let inner = cuda.make("cuGraphAddChildGraphNode", &[graph, of(&before), 1, child]);
        let after = kernel_node(&cuda, graph, &[inner], kernel);
        let exec = instantiate(&cuda, graph);
        assert!((time(&cuda, exec) - 40.0).abs() < 0.1);
        cuda.ok("cuGraphNodeSetEnabled", &[exec, after, 0]);
        assert!((time(&cuda, exec) - 30.0).abs() < 0.1);
        let params = Kernel(half, [1; 6], 0, [0; 4]);
        cuda.ok("cuGraphExecKernelNodeSetParams_v2", &[exec, before, of(&params)]);
        let other = cuda.make("cuGraphClone", &[graph]);
        let mut info = [9_u64; 3];
        cuda.ok("cuGraphExecUpdate_v2", &[exec, other, info.as_mut_ptr() as u64]);
        kernel_node(&cuda, other, &[], kernel);
        assert_eq!(cuda.call("cuGraphExecUpdate_v2", &[exec, other, info.as_mut_ptr() as u64]), 910);
        cuda.ok("cuGraphDestroyNode", &[after]);
        let mut length = 0_u64;
        cuda.ok("cuGraphGetNodes", &[graph, 0, at(&mut length)]);
        assert_eq!(length, 2);
    });
}

#[test]
fn a_captured_launch_becomes_a_child() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let kernel = cuda.kernel(CODE, "k");
        let graph = cuda.make("cuGraphCreate", &[0]);
        kernel_node(&cuda, graph, &[], kernel);
        let exec = instantiate(&cuda, graph);
        let stream = cuda.stream();
        cuda.ok("cuStreamBeginCapture_v2", &[stream, 0]);
        cuda.ok("cuGraphLaunch", &[exec, stream]);
        assert_eq!(cuda.launch(kernel, stream), 0);
        let mut outer = 0_u64;
        cuda.ok("cuStreamEndCapture", &[stream, at(&mut outer)]);
        cuda.ok("cuGraphExecDestroy", &[exec]);
        assert!((time(&cuda, instantiate(&cuda, outer)) - 20.0).abs() < 0.1);
    });
}

#[test]
fn a_circle_cannot_be_instantiated() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let graph = cuda.make("cuGraphCreate", &[0]);
        let a = cuda.make("cuGraphAddEmptyNode", &[graph, 0, 0]);
        let b = cuda.make("cuGraphAddEmptyNode", &[graph, of(&a), 1]);
        cuda.ok("cuGraphAddDependencies", &[graph, of(&b), of(&a), 1]);
        assert_eq!(cuda.call("cuGraphInstantiateWithFlags", &[at(&mut 0_u64), graph, 0]), 1);
        cuda.ok("cuGraphRemoveDependencies", &[graph, of(&b), of(&a), 1]);
        instantiate(&cuda, graph);
    });
}

#[test]
fn memory_of_allocation_nodes_is_reserved_at_launch_and_kept_until_trimmed() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let kernel = cuda.kernel(CODE, "k");
        assert_eq!(cuda.launch(kernel, 0), 0);
        let start = cuda.free_bytes();
        let used = || start - cuda.free_bytes();
        let graph = cuda.make("cuGraphCreate", &[0]);
        let (alloc, address) = alloc_node(&cuda, graph, &[], GIB);
        assert_ne!(address, 0);
        let run = kernel_node(&cuda, graph, &[alloc], kernel);
        let freed = free_node(&cuda, graph, &[run], address);
        // The second allocation can lie where the first one was.
        let (again, second) = alloc_node(&cuda, graph, &[freed], GIB / 2);
        free_node(&cuda, graph, &[again], second);
        assert_eq!(used(), 0, "not when nodes are added");
        let exec = instantiate(&cuda, graph);
        assert_eq!(used(), 0, "nor by instantiation");
        cuda.ok("cuGraphLaunch", &[exec, 0]);
        assert_eq!((used(), memory(&cuda, RESERVED)), (GIB, GIB));
        cuda.ok("cuStreamSynchronize", &[0]);
        cuda.ok("cuGraphLaunch", &[exec, 0]);
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!((used(), memory(&cuda, USED)), (GIB, 0), "kept for the next launch");
        cuda.ok("cuDeviceGraphMemTrim", &[0]);
        assert_eq!((used(), memory(&cuda, RESERVED), memory(&cuda, RESERVED_HIGH)), (0, 0, GIB));
        cuda.ok("cuGraphUpload", &[exec, 0]);
        assert_eq!(used(), GIB, "reserved by an upload as well");
        cuda.ok("cuGraphExecDestroy", &[exec]);
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!(used(), 0);
    });
}

#[test]
fn an_allocation_that_a_graph_leaves_must_be_freed_before_the_next_launch() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let graph = cuda.make("cuGraphCreate", &[0]);
        let (_, address) = alloc_node(&cuda, graph, &[], 64 * MIB);
        let exec = instantiate(&cuda, graph);
        cuda.ok("cuGraphLaunch", &[exec, 0]);
        cuda.ok("cuStreamSynchronize", &[0]);
        assert_eq!(memory(&cuda, USED), 64 * MIB);
        assert_eq!(cuda.call("cuGraphLaunch", &[exec, 0]), 1);
        cuda.ok("cuDeviceGraphMemTrim", &[0]);
        assert_eq!(memory(&cuda, RESERVED), 64 * MIB, "somebody still has it");
        cuda.ok("cuMemFreeAsync", &[address, 0]);
        cuda.ok("cuGraphLaunch", &[exec, 0]);
        cuda.free(address);
        cuda.ok("cuCtxSynchronize", &[]);
        cuda.ok("cuDeviceGraphMemTrim", &[0]);
        assert_eq!(cuda.free_bytes(), start);
        // AUTO_FREE_ON_LAUNCH.
        let auto = cuda.make("cuGraphInstantiateWithFlags", &[graph, 1]);
        cuda.ok("cuGraphLaunch", &[auto, 0]);
        cuda.ok("cuGraphLaunch", &[auto, 0]);
    });
}

#[test]
fn a_launch_that_finds_no_memory_is_refused() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let graph = cuda.make("cuGraphCreate", &[0]);
        let (alloc, address) = alloc_node(&cuda, graph, &[], 10 * GIB);
        free_node(&cuda, graph, &[alloc], address);
        let exec = instantiate(&cuda, graph);
        let held = cuda.alloc(8 * GIB);
        assert_eq!(cuda.call("cuGraphLaunch", &[exec, 0]), 2);
        cuda.free(held);
        cuda.ok("cuGraphLaunch", &[exec, 0]);
        cuda.ok("cuCtxSynchronize", &[]);
    });
}

#[test]
fn captured_allocations_become_nodes() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        let start = cuda.free_bytes();
        cuda.ok("cuStreamBeginCapture_v2", &[stream, 0]);
        let pointer = cuda.make("cuMemAllocAsync", &[100 * MIB, stream]);
        cuda.ok("cuMemsetD8Async", &[pointer, 1, 100 * MIB, stream]);
        cuda.ok("cuMemFreeAsync", &[pointer, stream]);
        let mut graph = 0_u64;
        cuda.ok("cuStreamEndCapture", &[stream, at(&mut graph)]);
        assert_eq!(cuda.free_bytes(), start);
        let (mut nodes, mut length) = ([0_u64; 3], 3_u64);
        cuda.ok("cuGraphGetNodes", &[graph, nodes.as_mut_ptr() as u64, at(&mut length)]);
        let kinds: Vec<i32> = nodes
            .iter()
            .map(|node| {
                let mut kind = -1;
                cuda.ok("cuGraphNodeGetType", &[*node, at(&mut kind)]);
                kind
            })
            .collect();
        assert_eq!(kinds, [10, 2, 11]);
        let exec = instantiate(&cuda, graph);
        cuda.ok("cuGraphLaunch", &[exec, stream]);
        assert_eq!(start - cuda.free_bytes(), 100 * MIB);
        cuda.ok("cuStreamSynchronize", &[stream]);
    });
}

static CALLS: AtomicU64 = AtomicU64::new(0);

extern "C" fn add_to_calls(amount: u64) {
    CALLS.fetch_add(amount, Ordering::SeqCst);
}

#[test]
fn host_nodes_events_and_copies_run_in_their_order() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (kernel, event) = (cuda.kernel(CODE, "k"), cuda.event());
        let memory = cuda.alloc(4096);
        let graph = cuda.make("cuGraphCreate", &[0]);
        // CUDA_MEMSET_NODE_PARAMS: 1024 words of 5.
        #[repr(C)]
        struct Set(u64, u64, u32, u32, u64, u64);
        let set = Set(memory, 0, 5, 4, 1024, 1);
        let fill = cuda.make("cuGraphAddMemsetNode", &[graph, 0, 0, of(&set), 0]);
        let run = kernel_node(&cuda, graph, &[fill], kernel);
        let record = cuda.make("cuGraphAddEventRecordNode", &[graph, of(&run), 1, event]);
        let host = [add_to_calls as *const () as u64, 3];
        cuda.make("cuGraphAddHostNode", &[graph, of(&record), 1, of(&host)]);
        let exec = instantiate(&cuda, graph);
        for _ in 0..3 {
            cuda.ok("cuGraphLaunch", &[exec, 0]);
        }
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!(CALLS.load(Ordering::SeqCst), 9);
        assert_eq!(cuda.call("cuEventQuery", &[event]), 0);
        let mut word = 0_u32;
        cuda.ok("cuMemcpyDtoH_v2", &[at(&mut word), memory + 4092, 4]);
        assert_eq!(word, 5);
    });
}

#[test]
fn generic_nodes_are_the_same_nodes() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let kernel = cuda.kernel(CODE, "k");
        let graph = cuda.make("cuGraphCreate", &[0]);
        let mut params = [0_u64; 32];
        params[0] = 10;
        params[2..17].copy_from_slice(&alloc_params(64 * MIB));
        let alloc = cuda.make("cuGraphAddNode", &[graph, 0, 0, params.as_mut_ptr() as u64]);
        let address = params[2 + 14];
        assert_ne!(address, 0);
        let mut params = [0_u64; 32];
        params[2] = kernel;
        params[3..6].copy_from_slice(&[1 | 1 << 32; 3]);
        let run = cuda.make("cuGraphAddNode_v2", &[graph, of(&alloc), 0, 1, params.as_mut_ptr() as u64]);
        let mut params = [0_u64; 32];
        (params[0], params[2]) = (11, address);
        cuda.make("cuGraphAddNode_v3", &[graph, of(&run), 0, 1, params.as_mut_ptr() as u64]);
        params[0] = 13;
        let unmodelled = [at(&mut 0_u64), graph, 0, 0, params.as_mut_ptr() as u64];
        assert_eq!(cuda.call("cuGraphAddNode", &unmodelled), 801, "conditional nodes");
        let exec = instantiate(&cuda, graph);
        cuda.ok("cuGraphLaunch", &[exec, 0]);
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!(memory(&cuda, RESERVED_HIGH), 64 * MIB);
    });
}

#[test]
fn user_objects_live_as_long_as_a_graph_holds_them() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let before = CALLS.load(Ordering::SeqCst);
        let object = cuda.make("cuUserObjectCreate", &[1000, add_to_calls as *const () as u64, 1, 1]);
        let graph = cuda.make("cuGraphCreate", &[0]);
        cuda.ok("cuGraphRetainUserObject", &[graph, object, 1, 0]);
        cuda.ok("cuUserObjectRelease", &[object, 1]);
        assert_eq!(CALLS.load(Ordering::SeqCst), before);
        cuda.ok("cuGraphDestroy", &[graph]);
        let waiting = std::time::Instant::now();
        while CALLS.load(Ordering::SeqCst) != before + 1000 {
            assert!(waiting.elapsed().as_secs() < 60, "the destructor is called by a thread of the driver");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    });
}

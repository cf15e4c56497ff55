//! Entries of graphs and their memory.

use crate::compute;
use crate::graphs;
use crate::real::call;
use crate::stream;

pub(super) unsafe extern "C" fn cuGraphInstantiate(
    out: *mut u64,
    graph: u64,
    node: *mut u64,
    log: *mut u8,
    size: usize,
) -> i32 {
    // SAFETY: the caller's own arguments; the result is read after the driver has written it.
    unsafe {
        graphs::instantiate(graph, false, || call!(cuGraphInstantiate(out, graph, node, log, size)), || *out)
    }
}

pub(super) unsafe extern "C" fn cuGraphInstantiate_v2(
    out: *mut u64,
    graph: u64,
    node: *mut u64,
    log: *mut u8,
    size: usize,
) -> i32 {
    // SAFETY: as above.
    unsafe {
        graphs::instantiate(
            graph,
            false,
            || call!(cuGraphInstantiate_v2(out, graph, node, log, size)),
            || *out,
        )
    }
}

pub(super) unsafe extern "C" fn cuGraphInstantiateWithFlags(out: *mut u64, graph: u64, flags: u64) -> i32 {
    // SAFETY: as above.
    unsafe {
        graphs::instantiate(graph, false, || call!(cuGraphInstantiateWithFlags(out, graph, flags)), || *out)
    }
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`
#[repr(C)]
pub(super) struct Parameters {
    flags: u64,
    stream: u64,
    node: u64,
    result: i32,
}

const _: () = assert!(size_of::<Parameters>() == 32);

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`
const UPLOAD: u64 = 2;

macro_rules! with_params {
    ($($symbol:ident)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(out: *mut u64, graph: u64, params: *mut Parameters) -> i32 {
                // SAFETY: as above; the parameters are null or the caller's record.
                unsafe {
                    let uploads = params.as_ref().is_some_and(|params| params.flags & UPLOAD != 0);
                    graphs::instantiate(graph, uploads, || call!($symbol(out, graph, params)), || *out)
                }
            }
        )*
    };
}
with_params!(cuGraphInstantiateWithParams cuGraphInstantiateWithParams_ptsz);

pub(super) unsafe extern "C" fn cuGraphExecDestroy(exec: u64) -> i32 {
    // SAFETY: the caller's own argument.
    graphs::destroy(exec, || unsafe { call!(cuGraphExecDestroy(exec)) })
}

macro_rules! runs {
    ($($symbol:ident)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(exec: u64, stream: u64) -> i32 {
                // SAFETY: the caller's own arguments.
                graphs::retried(exec, || graphs::run(exec, || unsafe { call!($symbol(exec, stream)) }))
            }
        )*
    };
}
runs!(cuGraphUpload cuGraphUpload_ptsz);

macro_rules! launches {
    ($($symbol:ident $default:ident;)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(exec: u64, stream: u64) -> i32 {
                let driver = || graphs::run(exec, || {
                    // SAFETY: the caller's own arguments.
                    unsafe { call!($symbol(exec, stream)) }
                });
                let stream = stream::named(stream, stream::$default);
                graphs::retried(exec, || compute::launch(exec, stream, false, driver))
            }
        )*
    };
}
launches! {
    cuGraphLaunch LEGACY;
    cuGraphLaunch_ptsz PER_THREAD;
}

pub(super) unsafe extern "C" fn cuDeviceGraphMemTrim(device: i32) -> i32 {
    // SAFETY: the caller's own argument.
    graphs::trim(device, || unsafe { call!(cuDeviceGraphMemTrim(device)) })
}

macro_rules! changes {
    ($($symbol:ident($($argument:ident),*);)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(exec: u64, $($argument: u64),*) -> i32 {
                // SAFETY: the caller's own arguments.
                compute::change_graph(exec, || unsafe { call!($symbol(exec, $($argument),*)) })
            }
        )*
    };
}
changes! {
    cuGraphExecUpdate(graph, node, result);
    cuGraphExecUpdate_v2(graph, result);
    cuGraphExecKernelNodeSetParams(node, params);
    cuGraphExecKernelNodeSetParams_v2(node, params);
    cuGraphExecChildGraphNodeSetParams(node, graph);
    cuGraphExecNodeSetParams(node, params);
}

pub(super) unsafe extern "C" fn cuGraphNodeSetEnabled(exec: u64, node: u64, enabled: u32) -> i32 {
    // SAFETY: the caller's own arguments.
    compute::change_graph(exec, || unsafe { call!(cuGraphNodeSetEnabled(exec, node, enabled)) })
}

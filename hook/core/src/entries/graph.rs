//! Graphs: their memory.

use crate::compute;
use crate::graphs;
use crate::real::call;
use core::ffi::c_void;

pub(super) unsafe extern "C" fn cuGraphInstantiate(
    out: *mut u64,
    graph: u64,
    node: *mut u64,
    log: *mut u8,
    size: usize,
) -> i32 {
    // SAFETY: the caller's own arguments; the result is read after the driver has written it.
    unsafe { graphs::instantiate(graph, || call!(cuGraphInstantiate(out, graph, node, log, size)), || *out) }
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
        graphs::instantiate(graph, || call!(cuGraphInstantiate_v2(out, graph, node, log, size)), || *out)
    }
}

pub(super) unsafe extern "C" fn cuGraphInstantiateWithFlags(out: *mut u64, graph: u64, flags: u64) -> i32 {
    // SAFETY: as above.
    unsafe { graphs::instantiate(graph, || call!(cuGraphInstantiateWithFlags(out, graph, flags)), || *out) }
}

pub(super) unsafe extern "C" fn cuGraphInstantiateWithParams(
    out: *mut u64,
    graph: u64,
    params: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    unsafe { graphs::instantiate(graph, || call!(cuGraphInstantiateWithParams(out, graph, params)), || *out) }
}

pub(super) unsafe extern "C" fn cuGraphInstantiateWithParams_ptsz(
    out: *mut u64,
    graph: u64,
    params: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    unsafe {
        graphs::instantiate(graph, || call!(cuGraphInstantiateWithParams_ptsz(out, graph, params)), || *out)
    }
}

pub(super) unsafe extern "C" fn cuGraphExecDestroy(exec: u64) -> i32 {
    // SAFETY: the caller's own argument.
    graphs::destroy(exec, || unsafe { call!(cuGraphExecDestroy(exec)) })
}

macro_rules! runs {
    ($($symbol:ident)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(exec: u64, stream: u64) -> i32 {
                // SAFETY: the caller's own arguments.
                graphs::run(exec, || unsafe { call!($symbol(exec, stream)) })
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
                compute::launch(exec, compute::named(stream, compute::$default), false, driver)
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

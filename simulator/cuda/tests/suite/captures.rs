//! Captures: what becomes a node, and what may not happen meanwhile.
#![allow(unsafe_code, reason = "the tests call a C library")]

use crate::common::{Cuda, MIB, at, of, on};

const CODE: &str = "aliquot-sim-module 1\nkernel k us=1000 share=100";
const GLOBAL: u64 = 0;
const THREAD_LOCAL: u64 = 1;
const RELAXED: u64 = 2;

fn begin(cuda: &Cuda, stream: u64, mode: u64) {
    cuda.ok("cuStreamBeginCapture_v2", &[stream, mode]);
}

fn status(cuda: &Cuda, stream: u64) -> i32 {
    let mut status = -1;
    cuda.ok("cuStreamIsCapturing", &[stream, at(&mut status)]);
    status
}

fn end(cuda: &Cuda, stream: u64) -> (i32, u64) {
    let mut graph = 99_u64;
    let code = cuda.call("cuStreamEndCapture", &[stream, at(&mut graph)]);
    (code, graph)
}

fn count(cuda: &Cuda, function: &str, handle: u64) -> u64 {
    let mut count = 0_u64;
    let arguments = if function == "cuGraphGetEdges" {
        vec![handle, 0, 0, at(&mut count)]
    } else {
        vec![handle, 0, at(&mut count)]
    };
    cuda.ok(function, &arguments);
    count
}

#[test]
fn captured_work_becomes_a_chain_and_does_not_run() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        let kernel = cuda.kernel(CODE, "k");
        let memory = cuda.alloc(4096);
        assert_eq!(status(&cuda, stream), 0);
        begin(&cuda, stream, GLOBAL);
        assert_eq!(status(&cuda, stream), 1);
        assert_eq!(cuda.launch(kernel, stream), 0);
        cuda.ok("cuMemsetD8Async", &[memory, 1, 4096, stream]);
        cuda.ok("cuMemcpyDtoDAsync_v2", &[memory + 2048, memory, 2048, stream]);
        let (code, graph) = end(&cuda, stream);
        assert_eq!(code, 0);
        assert_eq!(count(&cuda, "cuGraphGetNodes", graph), 3);
        assert_eq!(count(&cuda, "cuGraphGetEdges", graph), 2);
        assert_eq!(count(&cuda, "cuGraphGetRootNodes", graph), 1);
        assert_eq!(status(&cuda, stream), 0);
        cuda.ok("cuGraphDestroy", &[graph]);
        assert_eq!(end(&cuda, stream).0, 401, "nothing is being captured");
    });
}

#[test]
fn streams_join_by_events_and_must_join_back() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (a, b) = (cuda.stream(), cuda.stream());
        let kernel = cuda.kernel(CODE, "k");
        let (fork, join) = (cuda.event(), cuda.event());
        let run = |joins: bool| {
            begin(&cuda, a, GLOBAL);
            assert_eq!(cuda.launch(kernel, a), 0);
            cuda.ok("cuEventRecord", &[fork, a]);
            cuda.ok("cuStreamWaitEvent", &[b, fork, 0]);
            assert_eq!(status(&cuda, b), 1);
            assert_eq!(cuda.launch(kernel, b), 0);
            assert_eq!(cuda.launch(kernel, a), 0);
            if joins {
                cuda.ok("cuEventRecord", &[join, b]);
                cuda.ok("cuStreamWaitEvent", &[a, join, 0]);
                assert_eq!(cuda.launch(kernel, a), 0);
            }
            end(&cuda, a)
        };
        let (code, graph) = run(true);
        assert_eq!(code, 0);
        assert_eq!((count(&cuda, "cuGraphGetNodes", graph), count(&cuda, "cuGraphGetEdges", graph)), (4, 4));
        assert_eq!(run(false), (904, 0), "unjoined");
        assert_eq!(status(&cuda, b), 0, "the other stream is free again");
        assert_eq!(cuda.call("cuEventQuery", &[fork]), 907, "it stands for nothing that runs");
    });
}

#[test]
fn what_cannot_be_captured_spoils_the_capture() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (stream, other) = (cuda.stream(), cuda.stream());
        let kernel = cuda.kernel(CODE, "k");
        let event = cuda.event();
        let spoilt_by = |name: &str, expected: i32, work: &dyn Fn() -> i32| {
            begin(&cuda, stream, GLOBAL);
            assert_eq!(work(), expected, "{name}");
            assert_eq!(status(&cuda, stream), 2, "{name}");
            assert_eq!(cuda.launch(kernel, stream), 901, "{name}");
            assert_eq!(end(&cuda, stream), (901, 0), "{name}");
        };
        spoilt_by("query", 900, &|| cuda.call("cuStreamQuery", &[stream]));
        spoilt_by("synchronise", 900, &|| cuda.call("cuStreamSynchronize", &[stream]));
        spoilt_by("query of another stream", 900, &|| cuda.call("cuStreamQuery", &[other]));
        spoilt_by("allocation", 900, &|| cuda.call("cuMemAlloc_v2", &[at(&mut 0_u64), MIB]));
        spoilt_by("context", 900, &|| cuda.call("cuCtxSynchronize", &[]));
        spoilt_by("event query", 900, &|| cuda.call("cuEventQuery", &[event]));
        let captured = cuda.event();
        spoilt_by("query of a captured event", 907, &|| {
            cuda.ok("cuEventRecord", &[captured, stream]);
            cuda.call("cuEventQuery", &[captured])
        });
        cuda.ok("cuEventRecord", &[event, other]);
        spoilt_by("work from outside", 905, &|| cuda.call("cuStreamWaitEvent", &[stream, event, 0]));
        assert_eq!(cuda.call("cuStreamBeginCapture_v2", &[0, GLOBAL]), 900, "not the legacy stream");
        begin(&cuda, stream, GLOBAL);
        assert_eq!(cuda.call("cuStreamBeginCapture_v2", &[stream, GLOBAL]), 401);
        assert_eq!(end(&cuda, stream).0, 0);
    });
}

#[test]
fn the_legacy_stream_cannot_be_used_while_a_blocking_stream_captures() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let blocking = cuda.make("cuStreamCreate", &[0]);
        let kernel = cuda.kernel(CODE, "k");
        begin(&cuda, blocking, RELAXED);
        let mut status = 0_i32;
        assert_eq!(cuda.call("cuStreamIsCapturing", &[0, at(&mut status)]), 906);
        assert_eq!(end(&cuda, blocking).0, 0, "asking spoils nothing");
        begin(&cuda, blocking, RELAXED);
        assert_eq!(cuda.launch(kernel, 0), 906);
        assert_eq!(end(&cuda, blocking), (901, 0));
        let free = cuda.stream();
        begin(&cuda, free, RELAXED);
        assert_eq!(cuda.launch(kernel, 0), 0, "a non-blocking stream does not mind");
        assert_eq!(end(&cuda, free).0, 0);
    });
}

#[test]
fn two_captures_cannot_merge() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (a, b) = (cuda.stream(), cuda.stream());
        let event = cuda.event();
        begin(&cuda, a, RELAXED);
        begin(&cuda, b, RELAXED);
        cuda.ok("cuEventRecord", &[event, a]);
        assert_eq!(cuda.call("cuStreamWaitEvent", &[b, event, 0]), 902);
        assert_eq!((end(&cuda, a), end(&cuda, b)), ((901, 0), (901, 0)));
        begin(&cuda, a, RELAXED);
        cuda.ok("cuEventRecord", &[event, a]);
        cuda.ok("cuStreamWaitEvent", &[b, event, 0]);
        assert_eq!(end(&cuda, b).0, 903, "not the stream where it began");
        assert_eq!(end(&cuda, a), (901, 0));
    });
}

#[test]
fn modes_decide_which_threads_calls_spoil_a_capture() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let context = cuda.make("cuCtxGetCurrent", &[]);
        let stream = cuda.stream();
        // A call that may wait, from another thread in a mode of its own.
        let elsewhere = |mode: u64| {
            std::thread::scope(|scope| {
                scope
                    .spawn(|| {
                        cuda.ok("cuCtxSetCurrent", &[context]);
                        let mut place = i32::try_from(mode).unwrap();
                        cuda.ok("cuThreadExchangeStreamCaptureMode", &[at(&mut place)]);
                        assert_eq!(place, 0, "threads start with the strictest mode");
                        let event = cuda.event();
                        cuda.call("cuEventQuery", &[event])
                    })
                    .join()
                    .unwrap()
            })
        };
        for (capture, caller, expected) in [
            (GLOBAL, GLOBAL, 900),
            (GLOBAL, THREAD_LOCAL, 0),
            (GLOBAL, RELAXED, 0),
            (THREAD_LOCAL, GLOBAL, 0),
            (RELAXED, GLOBAL, 0),
        ] {
            begin(&cuda, stream, capture);
            assert_eq!(elsewhere(caller), expected, "{capture} {caller}");
            assert_eq!(end(&cuda, stream).0, if expected == 0 { 0 } else { 901 });
        }
        // The capturing thread's own calls.
        for (capture, mode, expected) in [
            (GLOBAL, GLOBAL, 900),
            (THREAD_LOCAL, GLOBAL, 900),
            (THREAD_LOCAL, THREAD_LOCAL, 900),
            (GLOBAL, RELAXED, 0),
            (RELAXED, GLOBAL, 0),
        ] {
            begin(&cuda, stream, capture);
            let mut place = i32::try_from(mode).unwrap();
            cuda.ok("cuThreadExchangeStreamCaptureMode", &[at(&mut place)]);
            let event = cuda.event();
            assert_eq!(cuda.call("cuEventQuery", &[event]), expected, "{capture} {mode}");
            cuda.ok("cuThreadExchangeStreamCaptureMode", &[at(&mut place)]);
            assert_eq!(place, i32::try_from(mode).unwrap(), "restored");
            assert_eq!(end(&cuda, stream).0, if expected == 0 { 0 } else { 901 });
        }
        assert_eq!(cuda.call("cuThreadExchangeStreamCaptureMode", &[at(&mut 3)]), 1);
    });
}

#[test]
fn a_capture_ends_in_the_thread_that_began_it_unless_it_is_relaxed() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let context = cuda.make("cuCtxGetCurrent", &[]);
        let stream = cuda.stream();
        let end_elsewhere = || {
            std::thread::scope(|scope| {
                scope
                    .spawn(|| {
                        cuda.ok("cuCtxSetCurrent", &[context]);
                        end(&cuda, stream).0
                    })
                    .join()
                    .unwrap()
            })
        };
        begin(&cuda, stream, THREAD_LOCAL);
        assert_eq!(end_elsewhere(), 908);
        assert_eq!(end(&cuda, stream).0, 0);
        begin(&cuda, stream, RELAXED);
        assert_eq!(end_elsewhere(), 0);
    });
}

#[test]
fn a_capture_can_be_looked_into_and_redirected() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        let kernel = cuda.kernel(CODE, "k");
        let graph = cuda.make("cuGraphCreate", &[0]);
        let root = cuda.make("cuGraphAddEmptyNode", &[graph, 0, 0]);
        cuda.ok("cuStreamBeginCaptureToGraph", &[stream, graph, of(&root), 0, 1, GLOBAL]);
        assert_eq!(cuda.launch(kernel, stream), 0);
        let (mut now, mut id, mut into, mut nodes, mut length) = (-1_i32, 0_u64, 0_u64, 0_u64, 0_u64);
        let places = [at(&mut now), at(&mut id), at(&mut into), at(&mut nodes), at(&mut length)];
        let mut arguments = vec![stream];
        arguments.extend(places);
        cuda.ok("cuStreamGetCaptureInfo_v2", &arguments);
        assert_eq!((now, into, length), (1, graph, 1));
        assert_ne!(id, 0);
        cuda.ok("cuStreamUpdateCaptureDependencies", &[stream, of(&root), 1, 1]);
        assert_eq!(cuda.launch(kernel, stream), 0);
        // SAFETY: the driver's list of one node.
        let first = unsafe { *(nodes as *const u64) };
        cuda.ok("cuStreamUpdateCaptureDependencies", &[stream, of(&first), 1, 0]);
        let (code, ended) = end(&cuda, stream);
        assert_eq!((code, ended), (0, graph));
        assert_eq!((count(&cuda, "cuGraphGetNodes", graph), count(&cuda, "cuGraphGetEdges", graph)), (3, 2));
    });
}

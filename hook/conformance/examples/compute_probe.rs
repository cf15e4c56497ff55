//! A CUDA program that keeps the GPU busy, for the limiter's tests: `compute_probe HOW MICROS MILLIS
//! [STREAMS]` launches kernels of MICROS microseconds for MILLIS milliseconds, in turn on its streams, waits
//! for them and prints
//!
//! `gpu = START END USED` (nanoseconds of the monotonic clock at the first launch and behind the last kernel;
//! nanoseconds of kernels).
//!
//! HOW is an entry point or one of these:
//! - `graph`: captured, eight kernels each;
//! - `changed`: the same, after the graph was one of short kernels for a while;
//! - `two`: kernels of MICROS and of ten times as many;
//! - `sync`: waits for each kernel;
//! - `capture`: another stream captures all the while;
//! - `others`: another thread captures time and again;
//! - `refused`: before each launch, one on several devices that the driver refuses;
//! - `doomed`: a capturing stream was destroyed before, and one went with its context;
//! - `unload`: loads its module again every 64 launches;
//! - `streams`: destroys its stream every 8 launches.

#![allow(unsafe_code, reason = "calls a C library")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test program"
)]

mod driver;

use driver::{Libraries, at, call, now_ns, text};
use std::ffi::c_void;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Captures in the global mode, in which other threads may make no call that could spoil the capture. Returns
/// the number of captures.
fn capture_until(driver: &Libraries, context: u64, function: u64, is_over: &AtomicBool) -> u32 {
    let ok = |code: i32, what: &str| assert_eq!(code, 0, "{what}");
    let (mut stream, mut count) = (0_u64, 0);
    ok(driver.call("cuCtxSetCurrent", &[context]), "cuCtxSetCurrent");
    ok(driver.call("cuStreamCreate", &[at(&mut stream), 1]), "cuStreamCreate");
    while !is_over.load(Relaxed) {
        let mut graph = 0_u64;
        ok(driver.call("cuStreamBeginCapture_v2", &[stream, 0]), "begin");
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(10));
            ok(
                driver.call("cuLaunchKernel", &[function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0]),
                "a captured launch",
            );
        }
        ok(
            driver.call("cuStreamEndCapture", &[stream, at(&mut graph)]),
            "the other thread's capture is whole",
        );
        ok(driver.call("cuGraphDestroy", &[graph]), "cuGraphDestroy");
        count += 1;
        std::thread::sleep(Duration::from_millis(2));
    }
    count
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let how = arguments[0].as_str();
    let micros: u64 = arguments[1].parse().unwrap();
    let span = Duration::from_millis(arguments[2].parse().unwrap());
    let count: usize = arguments.get(3).map_or(0, |n| n.parse().unwrap());
    let driver = Libraries::open(false);
    let ok = |code: i32, what: &str| assert_eq!(code, 0, "{what}");
    ok(driver.call("cuInit", &[0]), "cuInit");
    let (mut context, mut module) = (0_u64, 0_u64);
    ok(driver.call("cuDevicePrimaryCtxRetain", &[at(&mut context), 0]), "retain");
    ok(driver.call("cuCtxSetCurrent", &[context]), "cuCtxSetCurrent");
    ok(driver.call("cuModuleLoadData", &[at(&mut module), c"any".as_ptr() as u64]), "cuModuleLoadData");
    let first = module;
    let kernel = |us: u64| {
        let module = first;
        let (mut function, name) = (0_u64, text(&format!("spin_us_{us}")));
        let code = driver.call("cuModuleGetFunction", &[at(&mut function), module, name.as_ptr() as u64]);
        assert_eq!(code, 0, "{name:?}");
        function
    };
    let (mut plain, long) = (kernel(micros), kernel(micros * 10));
    let mut streams = vec![0_u64; count.max(1)];
    for stream in streams.iter_mut().filter(|_| count > 0) {
        ok(driver.call("cuStreamCreate", &[at(stream), 1]), "cuStreamCreate");
    }

    let symbol = match how {
        "graph" | "changed" | "two" | "sync" | "capture" | "others" | "refused" | "doomed" | "unload"
        | "streams" => "cuLaunchKernel",
        symbol => symbol,
    };
    let launch = driver.entry(symbol);
    // CUlaunchConfig: one thread in each of 16384 blocks of 1024, which fill any board.
    let config =
        |stream: u64| -> [u64; 7] { [16384 | 1 << 32, 1 | 1024 << 32, 1 | 1 << 32, 0, stream, 0, 0] };
    let on = |function: u64, stream: u64| match symbol {
        "cuLaunch" => call(launch, &[function]),
        "cuLaunchGrid" => call(launch, &[function, 16384, 1]),
        "cuLaunchGridAsync" => call(launch, &[function, 16384, 1, stream]),
        "cuLaunchKernelEx" | "cuLaunchKernelEx_ptsz" => {
            call(launch, &[config(stream).as_ptr() as u64, function, 0, 0])
        }
        "cuLaunchCooperativeKernelMultiDevice" => {
            let [a, b, c, ..] = config(stream);
            call(launch, &[[function, a, b, c, 0, stream, 0].as_ptr() as u64, 1, 0])
        }
        _ => call(launch, &[function, 16384, 1, 1, 1024, 1, 1, 0, stream, 0, 0]),
    };
    let captured_graph = |function: u64| {
        let (mut stream, mut graph) = (0_u64, 0_u64);
        ok(driver.call("cuStreamCreate", &[at(&mut stream), 1]), "cuStreamCreate");
        ok(driver.call("cuStreamBeginCapture_v2", &[stream, 0]), "begin");
        let before = Instant::now();
        (0..8).for_each(|_| ok(on(function, stream), "a captured launch"));
        assert!(before.elapsed() < Duration::from_secs(5), "captured launches do not wait");
        ok(driver.call("cuStreamEndCapture", &[stream, at(&mut graph)]), "end");
        graph
    };
    let mut exec = 0_u64;
    let run_graph = driver.entry("cuGraphLaunch");
    if how == "graph" {
        let graph = captured_graph(plain);
        ok(driver.call("cuGraphInstantiateWithFlags", &[at(&mut exec), graph, 0]), "instantiate");
    } else if how == "changed" {
        let (short, graph) = (captured_graph(kernel(5)), captured_graph(plain));
        ok(driver.call("cuGraphInstantiateWithFlags", &[at(&mut exec), short, 0]), "instantiate");
        for _ in 0..400 {
            ok(call(run_graph, &[exec, streams[0]]), "cuGraphLaunch");
        }
        ok(driver.call("cuCtxSynchronize", &[]), "cuCtxSynchronize");
        let mut info = [0_u64; 3];
        ok(driver.call("cuGraphExecUpdate_v2", &[exec, graph, at(&mut info)]), "cuGraphExecUpdate");
    }
    let mut captured = 0_u64;
    if how == "capture" {
        ok(driver.call("cuStreamCreate", &[at(&mut captured), 1]), "cuStreamCreate");
        // Mode 0 is global: calls that could spoil a capture are refused in every thread.
        ok(driver.call("cuStreamBeginCapture_v2", &[captured, 0]), "begin");
    }

    if how == "doomed" {
        // Mode 2 is relaxed: the captures, which nobody can end, forbid nothing.
        for of_context in [false, true] {
            let (mut other, mut doomed) = (0_u64, 0_u64);
            if of_context {
                ok(driver.call("cuCtxCreate_v2", &[at(&mut other), 0, 0]), "cuCtxCreate");
            }
            ok(driver.call("cuStreamCreate", &[at(&mut doomed), 1]), "cuStreamCreate");
            ok(driver.call("cuStreamBeginCapture_v2", &[doomed, 2]), "begin");
            if of_context {
                ok(driver.call("cuCtxDestroy_v2", &[other]), "cuCtxDestroy");
                ok(driver.call("cuCtxSetCurrent", &[context]), "cuCtxSetCurrent");
            } else {
                ok(driver.call("cuStreamDestroy_v2", &[doomed]), "cuStreamDestroy");
            }
        }
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let capturer = (how == "others").then(|| {
        let (libraries, is_over) = ([driver.cuda as usize, driver.nvml as usize], Arc::clone(&is_over));
        std::thread::spawn(move || {
            let [cuda, nvml] = libraries.map(|library| library as *mut c_void);
            capture_until(&Libraries { cuda, nvml }, context, plain, &is_over)
        })
    });

    let (start, mut used) = (now_ns(), 0_u64);
    for round in 0_usize.. {
        if Duration::from_nanos(now_ns() - start) >= span {
            break;
        }
        if how == "streams" && round % 8 == 0 {
            let mut new = 0_u64;
            ok(driver.call("cuStreamCreate", &[at(&mut new), 1]), "cuStreamCreate");
            let old = std::mem::replace(&mut streams[0], new);
            if old != 0 {
                ok(driver.call("cuStreamDestroy_v2", &[old]), "cuStreamDestroy");
            }
        }
        if how == "unload" && round % 64 == 63 {
            let mut other = 0_u64;
            ok(driver.call("cuModuleLoadData", &[at(&mut other), c"any".as_ptr() as u64]), "load");
            ok(driver.call("cuCtxSynchronize", &[]), "cuCtxSynchronize");
            ok(driver.call("cuModuleUnload", &[module]), "cuModuleUnload");
            module = other;
            let name = text(&format!("spin_us_{micros}"));
            let code = driver.call("cuModuleGetFunction", &[at(&mut plain), module, name.as_ptr() as u64]);
            ok(code, "cuModuleGetFunction");
        }
        let stream = streams[round % streams.len()];
        if how == "refused" {
            let part = [plain, 1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0, 0, 0];
            let arguments = [part.as_ptr() as u64, 1, 0];
            // It names no stream of its own.
            assert_eq!(driver.call("cuLaunchCooperativeKernelMultiDevice", &arguments), 1, "refused");
        }
        let code = match how {
            "graph" | "changed" => {
                used += 8 * micros * 1000;
                call(run_graph, &[exec, stream])
            }
            "two" if round % 4 == 3 => {
                used += micros * 10_000;
                on(long, stream)
            }
            _ => {
                used += micros * 1000;
                on(plain, stream)
            }
        };
        ok(code, how);
        if how == "sync" {
            ok(driver.call("cuStreamSynchronize", &[stream]), "sync");
        }
    }
    if how == "capture" {
        let mut graph = 0_u64;
        ok(driver.call("cuStreamEndCapture", &[captured, at(&mut graph)]), "the capture is whole");
    }
    is_over.store(true, Relaxed);
    if let Some(capturer) = capturer {
        assert!(capturer.join().unwrap() > 2, "there were captures");
    }
    ok(driver.call("cuCtxSynchronize", &[]), "cuCtxSynchronize");
    println!("gpu = {start} {} {used}", now_ns());
    std::io::stdout().flush().unwrap();
}

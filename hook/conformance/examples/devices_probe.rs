//! A CUDA program on two GPUs, for the limiter's tests: `devices_probe HOW MICROS MILLIS` launches one kernel
//! of a library, which runs in any context, on either device in turn, for so many milliseconds, and prints
//! for each
//!
//! `gpu = START END USED` (nanoseconds of the monotonic clock at the first launch and behind the last kernel;
//! nanoseconds of kernels).
//!
//! HOW is `current` (the device's context is made current, and the launch goes to its default stream),
//! `streams` (the first device's context stays current, and the stream tells the device) or `threads` (a
//! thread for each device).

#![allow(unsafe_code, reason = "calls a C library")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test program"
)]

use std::ffi::{CString, c_void};
use std::io::Write;
use std::time::Duration;

type Twelve = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> i32;

#[derive(Clone, Copy)]
struct Entry(Twelve);

impl Entry {
    fn ok(self, arguments: &[u64], what: &str) {
        let a = |i: usize| arguments.get(i).copied().unwrap_or(0);
        // SAFETY: the arguments are the ones of the function.
        let code =
            unsafe { (self.0)(a(0), a(1), a(2), a(3), a(4), a(5), a(6), a(7), a(8), a(9), a(10), a(11)) };
        assert_eq!(code, 0, "{what}");
    }
}

/// Finds a function of the driver.
fn entry(symbol: &str) -> Entry {
    let name = CString::new(symbol).unwrap();
    // SAFETY: terminated names; callers pass the arguments of the function.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{symbol} is found");
        Entry(std::mem::transmute::<*mut c_void, Twelve>(found))
    }
}

fn call(symbol: &str, arguments: &[u64]) {
    entry(symbol).ok(arguments, symbol);
}

fn at<T>(place: &mut T) -> u64 {
    std::ptr::from_mut(place) as u64
}

fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the record outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (how, micros) = (arguments[0].as_str(), arguments[1].parse::<u64>().unwrap());
    let span = Duration::from_millis(arguments[2].parse().unwrap()).as_nanos() as u64;
    call("cuInit", &[0]);
    let (mut contexts, mut streams) = ([0_u64; 2], [0_u64; 2]);
    for (device, (context, stream)) in contexts.iter_mut().zip(&mut streams).enumerate() {
        call("cuDevicePrimaryCtxRetain", &[at(context), device as u64]);
        call("cuCtxSetCurrent", &[*context]);
        if how == "streams" {
            call("cuStreamCreate", &[at(stream), 1]);
        }
    }
    let (mut library, mut kernel) = (0_u64, 0_u64);
    call("cuLibraryLoadData", &[at(&mut library), c"any".as_ptr() as u64]);
    let name = CString::new(format!("spin_us_{micros}")).unwrap();
    call("cuLibraryGetKernel", &[at(&mut kernel), library, name.as_ptr() as u64]);
    let (launch, current) = (entry("cuLaunchKernel"), entry("cuCtxSetCurrent"));
    // They fill any board.
    let on = |device: usize| {
        launch.ok(&[kernel, 16384, 1, 1, 1024, 1, 1, 0, streams[device], 0, 0], "cuLaunchKernel");
    };
    let end = |device: usize| {
        current.ok(&[contexts[device]], "cuCtxSetCurrent");
        call("cuCtxSynchronize", &[]);
        now_ns()
    };
    current.ok(&[contexts[0]], "cuCtxSetCurrent");
    let start = now_ns();
    let mut results = Vec::new();
    if how == "threads" {
        let run = |device: usize| {
            current.ok(&[contexts[device]], "cuCtxSetCurrent");
            let mut launches = 0;
            while now_ns() - start < span {
                on(device);
                launches += 1;
            }
            (end(device), launches)
        };
        std::thread::scope(|scope| {
            let threads = [0, 1].map(|device| scope.spawn(move || run(device)));
            results.extend(threads.map(|thread| thread.join().unwrap()));
        });
    } else {
        let mut launches = 0;
        while now_ns() - start < span {
            for (device, context) in contexts.iter().enumerate() {
                if how == "current" {
                    current.ok(&[*context], "cuCtxSetCurrent");
                }
                on(device);
            }
            launches += 1;
        }
        results.extend([0, 1].map(|device| (end(device), launches)));
    }
    for (end, launches) in results {
        println!("gpu = {start} {end} {}", launches * micros * 1000);
    }
    std::io::stdout().flush().unwrap();
}

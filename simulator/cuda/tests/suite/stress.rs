//! Everything at once, in an order that nobody chose.
#![allow(unsafe_code, reason = "the tests call a C library")]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{Cuda, MIB, Process, TestNode, at, of, on, role};
use aliquot_sim_node::Pool;

const CODE: &str = "aliquot-sim-module 1\n\
    kernel a us=5 share=100\nkernel b us=50 share=30\nkernel c us=300 share=60\nkernel d ns=1\n";

/// A small generator with a seed: the same test does the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

static CALLS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: u64) {
    CALLS.fetch_add(1, Ordering::SeqCst);
}

/// Random work on streams of its own; returns how many host functions it enqueued.
fn work(cuda: &Cuda, seed: u64) -> u64 {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1);
    let kernels: Vec<u64> = ["a", "b", "c", "d"].iter().map(|name| cuda.kernel(CODE, name)).collect();
    let streams: Vec<u64> = (0..3)
        .map(|i: u64| {
            cuda.make("cuStreamCreateWithPriority", &[i % 2, (0 - i64::try_from(i).unwrap()) as u64])
        })
        .collect();
    let events: Vec<u64> = (0..4).map(|_| cuda.event()).collect();
    let (device, host) = (cuda.alloc(64 << 10), cuda.make("cuMemHostAlloc", &[64 << 10, 0]));
    let mut pooled: Vec<(u64, u64)> = Vec::new();
    let mut calls = 0;
    for _ in 0..400 {
        let stream = streams[usize::try_from(random.below(3)).unwrap()];
        let event = events[usize::try_from(random.below(4)).unwrap()];
        match random.below(12) {
            0..=3 => {
                let kernel = kernels[usize::try_from(random.below(4)).unwrap()];
                assert_eq!(cuda.launch(kernel, stream), 0);
            }
            4 => cuda.ok("cuEventRecord", &[event, stream]),
            5 => cuda.ok("cuStreamWaitEvent", &[stream, event, 0]),
            6 => cuda.ok("cuMemcpyHtoDAsync_v2", &[device, host, 1 + random.below(60_000), stream]),
            7 => cuda.ok("cuMemcpyDtoHAsync_v2", &[host, device, 1 + random.below(60_000), stream]),
            8 => {
                calls += 1;
                cuda.ok("cuLaunchHostFunc", &[stream, count as *const () as u64, 0]);
            }
            9 => pooled.push((cuda.make("cuMemAllocAsync", &[1 + random.below(4 * MIB), stream]), stream)),
            10 => {
                if let Some((pointer, stream)) = pooled.pop() {
                    cuda.ok("cuMemFreeAsync", &[pointer, stream]);
                }
            }
            _ => {
                let code = cuda.call("cuStreamQuery", &[stream]);
                assert!(matches!(code, 0 | 600), "{code}");
            }
        }
    }
    for (pointer, stream) in pooled {
        cuda.ok("cuMemFreeAsync", &[pointer, stream]);
    }
    streams.iter().for_each(|stream| cuda.ok("cuStreamSynchronize", &[*stream]));
    events.iter().for_each(|event| assert_eq!(cuda.call("cuEventQuery", &[*event]), 0));
    streams.iter().for_each(|stream| cuda.ok("cuStreamDestroy_v2", &[*stream]));
    cuda.free(device);
    cuda.ok("cuMemFreeHost", &[host]);
    calls
}

#[test]
fn threads_with_streams_of_their_own_all_come_to_an_end() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let context = cuda.make("cuCtxGetCurrent", &[]);
        // Code, pools and slabs are in place before memory is counted.
        let mut calls = work(&cuda, 99);
        cuda.ok("cuCtxSynchronize", &[]);
        let before = cuda.free_bytes();
        calls += std::thread::scope(|scope| {
            let threads: Vec<_> = (1..=6)
                .map(|seed| {
                    let cuda = &cuda;
                    scope.spawn(move || {
                        cuda.ok("cuCtxSetCurrent", &[context]);
                        work(cuda, seed)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
        });
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!(CALLS.load(Ordering::SeqCst), calls);
        let modules = 6 * 4 * 2 * MIB;
        assert_eq!(before - cuda.free_bytes(), modules, "each thread's modules, and nothing else");
    });
}

#[test]
fn processes_that_are_killed_at_any_time_leave_nothing() {
    if let Some(seed) = role() {
        let cuda = Cuda::start();
        // The others may have taken everything for the moment.
        let mut context = 0_u64;
        while cuda.call("cuDevicePrimaryCtxRetain", &[at(&mut context), 0]) != 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        cuda.ok("cuCtxSetCurrent", &[context]);
        let mut random = Random(seed.parse::<u64>().unwrap() * 77 + 5);
        let mut held: Vec<u64> = Vec::new();
        let kernel = cuda.kernel(CODE, "c");
        println!("\u{1}reply running");
        loop {
            let mut pointer = 0_u64;
            match random.below(5) {
                0 => {
                    if let Some(pointer) = held.pop() {
                        cuda.free(pointer);
                    }
                }
                // Its code may find no room at the first launch.
                1 => assert!(matches!(cuda.launch(kernel, 0), 0 | 2)),
                2 => {
                    let prop = [1_u32, 1, 1, 0, 0, 0, 0, 0];
                    if cuda.call("cuMemCreate", &[at(&mut pointer), 64 * MIB, of(&prop), 0]) == 0 {
                        let mut fd = -1_i32;
                        cuda.ok("cuMemExportToShareableHandle", &[at(&mut fd), pointer, 1, 0]);
                        // SAFETY: the descriptor was made for this process just now.
                        unsafe { libc::close(fd) };
                        cuda.ok("cuMemRelease", &[pointer]);
                    }
                }
                _ => {
                    let bytes = 1 + random.below(2048 * MIB);
                    match cuda.call("cuMemAlloc_v2", &[at(&mut pointer), bytes]) {
                        0 => held.push(pointer),
                        code => {
                            assert_eq!(code, 2);
                            held.drain(..).for_each(|pointer| cuda.free(pointer));
                        }
                    }
                }
            }
        }
    }
    let node = TestNode::of(&["T4"]);
    let start = |seed: u64| {
        let mut process = node.spawn(&seed.to_string());
        assert_eq!(process.reply(), "running");
        process
    };
    let mut random = Random(4711);
    let mut processes: Vec<Process> = (0..4).map(start).collect();
    for seed in 4..20 {
        let memory = node.node.memory(Pool::whole(0)).unwrap();
        assert!(memory.used + memory.reserved <= memory.total, "{memory:?}");
        std::thread::sleep(std::time::Duration::from_millis(random.below(40)));
        let victim = usize::try_from(random.below(4)).unwrap();
        std::mem::replace(&mut processes[victim], start(seed)).kill();
    }
    processes.into_iter().for_each(Process::kill);
    assert_eq!(node.node.memory(Pool::whole(0)).unwrap().used, 0);
    assert!(node.node.processes(0).unwrap().is_empty());
}

#[test]
fn a_thread_with_a_small_stack_is_enough() {
    on(&["H100-80"], || {
        let small = std::thread::Builder::new().stack_size(64 << 10).spawn(|| {
            let cuda = Cuda::with_context();
            let stream = cuda.stream();
            let kernel = cuda.kernel(CODE, "b");
            let pointer = cuda.alloc(4 * MIB);
            assert_eq!(cuda.launch(kernel, stream), 0);
            cuda.ok("cuMemsetD8Async", &[pointer, 1, 4 * MIB, stream]);
            cuda.ok("cuStreamSynchronize", &[stream]);
            cuda.free(pointer);
            std::mem::forget(cuda);
        });
        small.unwrap().join().unwrap();
    });
}

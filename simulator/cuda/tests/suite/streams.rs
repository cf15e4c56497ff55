//! Streams, events and time: what runs when, alone and beside another process.
#![allow(unsafe_code, reason = "the tests call a C library")]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{Cuda, MIB, Process, TestNode, at, check, of, on, on_node, role, serve};

/// Kernels of the tests: durations in their names, and how much of the GPU.
const CODE: &str = "aliquot-sim-module 1\n\
    kernel lead us=300000 share=100\n\
    kernel ms us=1000 share=100\n\
    kernel ms10 us=10000 share=100\n\
    kernel ms100 us=100000 share=100\n\
    kernel ms2000 us=2000000 share=100\n\
    kernel half us=10000 share=50\n\
    kernel param param=us share=100\n\
    kernel crash us=1000 fault=700\n";

/// Enqueues something that runs long enough for everything else of a test to be enqueued behind it: from then on
/// nothing depends on how fast this machine is.
fn lead(cuda: &Cuda, stream: u64) {
    assert_eq!(cuda.launch(cuda.kernel(CODE, "lead"), stream), 0);
}

fn record(cuda: &Cuda, stream: u64) -> u64 {
    let event = cuda.event();
    cuda.ok("cuEventRecord", &[event, stream]);
    event
}

/// Within a nanosecond's rounding of the driver's own floats.
#[track_caller]
fn assert_ms(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-3 * expected.max(1.0), "{found} ms, not {expected}");
}

#[test]
fn a_kernel_takes_the_time_that_it_declares() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        lead(&cuda, stream);
        let start = record(&cuda, stream);
        let kernel = cuda.kernel(CODE, "ms10");
        for _ in 0..5 {
            assert_eq!(cuda.launch(kernel, stream), 0);
        }
        let end = record(&cuda, stream);
        let mut ms = 0_f32;
        assert_eq!(cuda.call("cuEventElapsedTime", &[at(&mut ms), start, end]), 600, "not ready");
        assert_eq!(cuda.call("cuStreamQuery", &[stream]), 600);
        assert_eq!(cuda.call("cuEventQuery", &[end]), 600);
        cuda.ok("cuStreamSynchronize", &[stream]);
        assert_eq!(cuda.call("cuStreamQuery", &[stream]), 0);
        assert_eq!(cuda.call("cuEventQuery", &[end]), 0);
        assert_ms(cuda.elapsed(start, end), 50.0);
    });
}

#[test]
fn time_in_which_the_gpu_was_idle_is_in_no_pair_of_events() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        let kernel = cuda.kernel(CODE, "ms10");
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(300));
            // No pair spans more than what passed outside meanwhile, however slow this machine is.
            let asked = std::time::Instant::now();
            let start = record(&cuda, stream);
            assert_eq!(cuda.launch(kernel, stream), 0);
            let end = record(&cuda, stream);
            cuda.ok("cuStreamSynchronize", &[stream]);
            let outside = asked.elapsed().as_secs_f64() * 1e3;
            let found = cuda.elapsed(start, end);
            assert!(
                (10.0 - 1e-3..=outside).contains(&found),
                "{found} ms between events, {outside} ms outside"
            );
        }
    });
}

#[test]
fn all_durations_scale() {
    if role().is_some() {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        lead(&cuda, stream);
        let start = record(&cuda, stream);
        assert_eq!(cuda.launch(cuda.kernel(CODE, "ms2000"), stream), 0);
        let end = record(&cuda, stream);
        cuda.ok("cuEventSynchronize", &[end]);
        return assert_ms(cuda.elapsed(start, end), 1000.0);
    }
    let node = TestNode::of(&["H100-80"]);
    let mut command = node.command("only");
    command.env("ALIQUOT_SIM_TIME_SCALE", "0.5");
    check(command);
}

#[test]
fn a_duration_can_be_a_parameter() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        let function = cuda.kernel(CODE, "param");
        lead(&cuda, stream);
        let start = record(&cuda, stream);
        for us in [1000_u64, 2000, 4000] {
            let parameters = [of(&us)];
            let arguments = [function, 1, 1, 1, 32, 1, 1, 0, stream, parameters.as_ptr() as u64, 0];
            cuda.ok("cuLaunchKernel", &arguments);
        }
        let end = record(&cuda, stream);
        cuda.ok("cuStreamSynchronize", &[stream]);
        assert_ms(cuda.elapsed(start, end), 7.0);
    });
}

#[test]
fn streams_overlap_while_the_gpu_has_room() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (first, second) = (cuda.stream(), cuda.stream());
        lead(&cuda, first);
        let start = record(&cuda, first);
        cuda.ok("cuStreamWaitEvent", &[second, start, 0]);
        for (name, expected) in [("half", 20.0), ("ms10", 40.0)] {
            let kernel = cuda.kernel(CODE, name);
            let before = record(&cuda, first);
            for _ in 0..2 {
                assert_eq!(cuda.launch(kernel, first), 0);
                assert_eq!(cuda.launch(kernel, second), 0);
            }
            let joined = record(&cuda, second);
            cuda.ok("cuStreamWaitEvent", &[first, joined, 0]);
            let end = record(&cuda, first);
            cuda.ok("cuStreamWaitEvent", &[second, end, 0]);
            cuda.ok("cuStreamSynchronize", &[first]);
            // Halves run side by side, whole ones after each other.
            if name == "half" {
                assert_ms(cuda.elapsed(before, end), expected);
                lead(&cuda, first);
                let again = record(&cuda, first);
                cuda.ok("cuStreamWaitEvent", &[second, again, 0]);
            } else {
                assert_ms(cuda.elapsed(before, end), expected);
            }
        }
    });
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (blocking, free) = (cuda.make("cuStreamCreate", &[0]), cuda.stream());
        let kernel = cuda.kernel(CODE, "half");
        lead(&cuda, blocking);
        assert_eq!(cuda.launch(kernel, 0), 0);
        assert_eq!(cuda.launch(kernel, blocking), 0);
        let end = record(&cuda, blocking);
        cuda.ok("cuStreamSynchronize", &[free]);
        assert_eq!(cuda.call("cuEventQuery", &[end]), 600, "a non-blocking stream waits for none of it");
        cuda.ok("cuStreamSynchronize", &[0]);
        assert_eq!(cuda.call("cuStreamQuery", &[0]), 0);
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!(cuda.call("cuEventQuery", &[end]), 0);
    });
}

#[test]
fn a_thread_has_a_default_stream_of_its_own_where_it_asks_for_it() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let mut ids = [0_u64; 3];
        cuda.ok("cuStreamGetId", &[0, at(&mut ids[0])]);
        cuda.ok("cuStreamGetId_ptsz", &[0, at(&mut ids[1])]);
        let context = cuda.make("cuCtxGetCurrent", &[]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cuda.ok("cuCtxSetCurrent", &[context]);
                cuda.ok("cuStreamGetId_ptsz", &[0, at(&mut ids[2])]);
                let mut named = 0_u64;
                // CU_STREAM_PER_THREAD.
                cuda.ok("cuStreamGetId", &[2, at(&mut named)]);
                assert_eq!(named, ids[2]);
            });
        });
        assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], "{ids:?}");
    });
}

#[test]
fn a_full_launch_queue_blocks_the_next_launch() {
    on_node(&["H100-80"], "launch_queue = 8", || {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        let kernel = cuda.kernel(CODE, "ms10");
        let first = record(&cuda, stream);
        for _ in 0..20 {
            assert_eq!(cuda.launch(kernel, stream), 0);
        }
        let end = record(&cuda, stream);
        // No more than the queue's depth can still be outstanding.
        let (now, mut ms) = (cuda.event(), 0_f32);
        let other = cuda.stream();
        cuda.ok("cuEventRecord", &[now, other]);
        cuda.ok("cuEventSynchronize", &[now]);
        cuda.ok("cuEventElapsedTime", &[at(&mut ms), first, now]);
        assert!(ms >= 120.0, "the calls came back after {ms} ms");
        cuda.ok("cuEventSynchronize", &[end]);
        assert!(cuda.elapsed(first, end) >= 200.0);
    });
}

#[test]
fn a_higher_priority_goes_before_what_has_not_started() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (mut least, mut greatest) = (9_i32, 9_i32);
        cuda.ok("cuCtxGetStreamPriorityRange", &[at(&mut least), at(&mut greatest)]);
        assert_eq!((least, greatest), (0, -5));
        let low = cuda.stream();
        let high = cuda.make("cuStreamCreateWithPriority", &[1, greatest as u32 as u64]);
        let kernel = cuda.kernel(CODE, "ms10");
        lead(&cuda, low);
        let start = record(&cuda, low);
        for _ in 0..10 {
            assert_eq!(cuda.launch(kernel, low), 0);
        }
        let low_end = record(&cuda, low);
        assert_eq!(cuda.launch(kernel, high), 0);
        let high_end = record(&cuda, high);
        cuda.ok("cuCtxSynchronize", &[]);
        assert_ms(cuda.elapsed(start, high_end), 10.0);
        assert_ms(cuda.elapsed(start, low_end), 110.0);
    });
}

#[test]
fn events_have_the_drivers_rules() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (mut ms, never, plain) = (0_f32, cuda.event(), cuda.event());
        assert_eq!(cuda.call("cuEventQuery", &[never]), 0, "never recorded is done");
        cuda.ok("cuEventSynchronize", &[never]);
        cuda.ok("cuEventRecord", &[plain, 0]);
        cuda.ok("cuEventSynchronize", &[plain]);
        assert_eq!(cuda.call("cuEventElapsedTime", &[at(&mut ms), never, plain]), 400);
        let untimed = cuda.make("cuEventCreate", &[2]);
        cuda.ok("cuEventRecord", &[untimed, 0]);
        cuda.ok("cuEventSynchronize", &[untimed]);
        assert_eq!(cuda.call("cuEventElapsedTime", &[at(&mut ms), plain, untimed]), 400);
        assert_eq!(cuda.call("cuEventCreate", &[at(&mut 0_u64), 4]), 1, "interprocess events are untimed");
        cuda.ok("cuEventDestroy_v2", &[plain]);
        assert_eq!(cuda.call("cuEventQuery", &[plain]), 400);
        assert_eq!(cuda.call("cuStreamSynchronize", &[12345]), 400);
    });
}

static CALLS: AtomicU64 = AtomicU64::new(0);

extern "C" fn add_to_calls(amount: u64) {
    CALLS.fetch_add(amount, Ordering::SeqCst);
}

extern "C" fn of_a_stream(_stream: u64, status: i32, amount: u64) {
    CALLS.fetch_add(amount + u64::from(status.unsigned_abs()), Ordering::SeqCst);
}

#[test]
fn functions_of_the_program_run_in_stream_order() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        lead(&cuda, stream);
        cuda.ok("cuLaunchHostFunc", &[stream, add_to_calls as *const () as u64, 7]);
        cuda.ok("cuStreamAddCallback", &[stream, of_a_stream as *const () as u64, 100, 0]);
        assert_eq!(CALLS.load(Ordering::SeqCst), 0);
        assert_eq!(cuda.launch(cuda.kernel(CODE, "ms"), stream), 0);
        cuda.ok("cuStreamSynchronize", &[stream]);
        assert_eq!(CALLS.load(Ordering::SeqCst), 107);
    });
}

#[test]
fn a_stream_can_wait_for_a_word_and_write_one() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let (stream, other) = (cuda.stream(), cuda.stream());
        let words = cuda.make("cuMemAllocManaged", &[4096, 1]);
        cuda.ok("cuStreamWaitValue32_v2", &[stream, words, 5, 0]);
        cuda.ok("cuStreamWriteValue32_v2", &[stream, words + 64, 77, 0]);
        assert_eq!(cuda.call("cuStreamQuery", &[stream]), 600);
        cuda.ok("cuStreamWriteValue32_v2", &[other, words, 4, 0]);
        cuda.ok("cuStreamSynchronize", &[other]);
        assert_eq!(cuda.call("cuStreamQuery", &[stream]), 600, "4 is less than 5");
        // SAFETY: managed memory is the host's as well.
        unsafe { (words as *mut u32).write_volatile(6) };
        cuda.ok("cuStreamSynchronize", &[stream]);
        // SAFETY: as above.
        assert_eq!(unsafe { ((words + 64) as *const u32).read_volatile() }, 77);
    });
}

#[test]
fn an_error_on_the_device_sticks_to_its_context() {
    if role().is_some() {
        let cuda = Cuda::with_context();
        let kernel = cuda.kernel(CODE, "crash");
        assert_eq!(cuda.launch(kernel, 0), 0);
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), 700);
        let mut pointer = 0_u64;
        assert_eq!(cuda.call("cuMemAlloc_v2", &[at(&mut pointer), MIB]), 700);
        assert_eq!(cuda.launch(kernel, 0), 700);
        assert_eq!(cuda.call("cuStreamQuery", &[0]), 700);
        cuda.ok("cuDevicePrimaryCtxReset_v2", &[0]);
        cuda.use_device(0);
        cuda.alloc(MIB);
        return cuda.ok("cuCtxSynchronize", &[]);
    }
    let node = TestNode::of(&["H100-80"]);
    node.run("only");
    let events = node.node.events_after(0).unwrap();
    assert_eq!(events.iter().map(|e| e.data).collect::<Vec<_>>(), [31], "the node reports the XID");
}

/// A process that runs a kernel, or measures one from event to event, when it is told to.
fn serve_time() {
    let cuda = Cuda::with_context();
    let stream = cuda.stream();
    serve(|line| match line.split_once(' ').unwrap() {
        ("run", name) => {
            assert_eq!(cuda.launch(cuda.kernel(CODE, name), stream), 0);
            "runs".to_owned()
        }
        ("measure", name) => {
            lead(&cuda, stream);
            let start = record(&cuda, stream);
            assert_eq!(cuda.launch(cuda.kernel(CODE, name), stream), 0);
            let end = record(&cuda, stream);
            cuda.ok("cuStreamSynchronize", &[stream]);
            format!("{:.3}", cuda.elapsed(start, end))
        }
        (_, _) => {
            cuda.ok("cuStreamSynchronize", &[stream]);
            "done".to_owned()
        }
    });
}

fn measure(process: &mut Process, name: &str) -> f64 {
    process.ask(&format!("measure {name}")).parse().unwrap()
}

#[test]
fn two_processes_share_a_gpu_in_time_slices_and_events_show_it() {
    if role().is_some() {
        return serve_time();
    }
    let node = TestNode::of(&["H100-80"]);
    let (mut a, mut b) = (node.spawn("a"), node.spawn("b"));
    assert_ms(measure(&mut b, "ms100"), 100.0);
    a.ask("run ms2000");
    let beside = measure(&mut b, "ms100");
    assert!((196.0..=204.0).contains(&beside), "half of the time is the other's: {beside} ms");
    a.ask("wait .");
    assert_ms(measure(&mut b, "ms100"), 100.0);
    a.finish();
    b.finish();
}

#[test]
fn the_administrators_time_slice_holds() {
    if role().is_some() {
        return serve_time();
    }
    let node = TestNode::of(&["H100-80"]);
    node.configure("slice_us = 50000");
    node.node.set_timeslice(0, 3).unwrap();
    let (mut a, mut b) = (node.spawn("a"), node.spawn("b"));
    b.ask("wait .");
    // With slices of half a second a tenth of a second is one piece or waits for a whole slice of the other's.
    a.ask("run ms2000");
    let beside = measure(&mut b, "ms100");
    let whole = |ms: f64| (beside - ms).abs() < 1.0;
    assert!(whole(100.0) || whole(600.0), "{beside} ms");
    a.finish();
    b.finish();
}

#[test]
fn a_killed_process_stops_taking_time() {
    if role().is_some() {
        return serve_time();
    }
    let node = TestNode::of(&["H100-80"]);
    let (mut a, mut b) = (node.spawn("a"), node.spawn("b"));
    a.ask("run ms2000");
    a.ask("run ms2000");
    b.ask("wait .");
    a.kill();
    // The lead alone is longer than it takes to notice.
    assert_ms(measure(&mut b, "ms100"), 100.0);
    b.finish();
}

#[test]
fn processes_share_the_time_of_their_mig_device_and_of_no_other() {
    if role().is_some() {
        return serve_time();
    }
    let spec = aliquot_sim_node::NodeSpec {
        gpus: vec![aliquot_sim_node::GpuSpec::new("H100-80").with_mig()],
        ..aliquot_sim_node::NodeSpec::new(["H100-80"])
    };
    let node = TestNode::new(&spec);
    let profile = node.node.gpu(0).unwrap().board.profile_by_name("3g.40gb").unwrap().id;
    for _ in 0..2 {
        let gi = node.node.create_gi(0, profile, None).unwrap();
        node.node.create_ci(0, gi.id, gi.serial, 2, None).unwrap();
    }
    let [one, other] = &node.node.mig_devices(0).unwrap()[..] else { panic!("two partitions") };
    let mut processes: Vec<Process> = [one, other, one]
        .map(|device| {
            let mut command = node.command("tenant");
            command.env("CUDA_VISIBLE_DEVICES", &device.uuid);
            Process::start(command)
        })
        .into();
    processes[0].ask("run ms2000");
    assert_ms(measure(&mut processes[1], "ms100"), 100.0);
    let beside = measure(&mut processes[2], "ms100");
    assert!((196.0..=204.0).contains(&beside), "half of the time is the other's: {beside} ms");
    processes.into_iter().for_each(Process::finish);
}

#[test]
fn calls_are_logged_and_can_be_made_to_fail_or_to_take_their_time() {
    if role().is_some() {
        let cuda = Cuda::with_context();
        let mut pointer = 0_u64;
        let codes: Vec<i32> = (0..3).map(|_| cuda.call("cuMemAlloc_v2", &[at(&mut pointer), MIB])).collect();
        assert_eq!(codes, [0, 2, 0]);
        return;
    }
    let node = TestNode::of(&["H100-80"]);
    node.node.add_fault(&aliquot_sim_node::Fault::fail("cuMemAlloc_v2", 2, 2)).unwrap();
    let log = node.dir().join("calls");
    let mut command = node.command("only");
    command.env("ALIQUOT_SIM_CUDA_LOG", &log);
    check(command);
    let text = std::fs::read_to_string(log).unwrap();
    let results: Vec<&str> = text
        .lines()
        .filter(|l| l.contains(" cuMemAlloc_v2(pointer="))
        .map(|l| l.rsplit_once(" = ").unwrap().1)
        .collect();
    assert_eq!(results, ["0", "2", "0"]);
    assert!(text.contains("bytes=1048576"), "{text}");
    let order: Vec<usize> = ["cuInit(", "cuDevicePrimaryCtxRetain(", "cuMemAlloc_v2("]
        .iter()
        .map(|n| text.find(n).unwrap())
        .collect();
    assert!(order.is_sorted());
}

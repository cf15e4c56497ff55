//! The memory quota, by real programs under the limiter on a simulated node.

use crate::support::{Bench, GIB, Holder, MIB, NO_CONTEXTS, answers};
use aliquot_sim_node::{NodeSpec, ProcessView};

/// Finds by bisection the largest allocation of a family that a quota lets through.
fn largest(quota: u64, family: &str, grain: &str) -> u64 {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, quota);
    let answers = bench.run(&["init", "retain", &format!("bisect:{family}:{grain}"), "info"]);
    assert_eq!(answers[..2], ["0", "0"]);
    // Whatever was tried, nothing of it is left.
    assert_eq!(answers[3], format!("0 {quota} {quota}"), "{family}");
    assert_eq!(bench.charged("a").0, bench.charged("a").1);
    answers[2].parse().unwrap()
}

#[test]
fn linear_memory_is_limited_to_the_byte() {
    assert_eq!(largest(GIB, "linear", "1"), GIB);
}

#[test]
fn managed_memory_is_limited_to_the_byte() {
    assert_eq!(largest(GIB, "managed", "1"), GIB);
}

#[test]
fn pitched_memory_is_limited_to_the_row() {
    assert_eq!(largest(GIB, "pitched", "4K"), GIB);
}

#[test]
fn stream_ordered_memory_is_limited_to_the_byte() {
    assert_eq!(largest(GIB, "async", "1"), GIB);
    assert_eq!(largest(GIB, "async_ptsz", "1"), GIB);
}

#[test]
fn physical_handles_are_limited_to_their_grain() {
    assert_eq!(largest(GIB, "vmm", "2M"), GIB);
    assert_eq!(largest(GIB, "mapped", "2M"), GIB);
}

#[test]
fn arrays_are_limited_to_their_tile() {
    assert_eq!(largest(GIB, "array", "64K"), GIB);
}

#[test]
fn a_quota_that_is_no_multiple_of_what_the_driver_takes_is_never_exceeded() {
    let odd = GIB + 3 * MIB + 17;
    assert_eq!(largest(odd, "linear", "1"), GIB + 2 * MIB);
    assert_eq!(largest(odd, "vmm", "2M"), GIB + 2 * MIB);
    assert_eq!(largest(odd, "async", "1"), GIB + 2 * MIB);
}

#[test]
fn small_allocations_fill_the_quota_as_the_driver_packs_them() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, 16 * MIB);
    // Each slab of 2 MiB holds 4096 pieces of 512 bytes.
    let answers =
        bench.run(&["init", "retain", "fill:linear:512", "free", "alloc:linear:512", "alloc:linear:512"]);
    assert_eq!(answers[2..], ["32768 2", "0", "0", "2"]);
    assert_eq!(bench.audit("a"), 0, "the driver packed as assumed");
}

#[test]
fn out_of_memory_is_no_error_that_sticks() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let mut script = vec!["init", "retain"];
    for _ in 0..50 {
        script.extend([
            "alloc:linear:700M",
            "alloc:linear:400M",
            "alloc:async:400M",
            "alloc:vmm:400M",
            "free",
        ]);
    }
    script.extend(["alloc:linear:1G", "free", "info"]);
    let answers = bench.run(&script);
    for round in answers[2..252].chunks(5) {
        assert_eq!(round, ["0", "2", "2", "2", "0"]);
    }
    assert_eq!(answers[252..], ["0", "0", &format!("0 {GIB} {GIB}")]);
}

#[test]
fn all_families_draw_on_one_quota() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, 100 * MIB);
    let answers = bench.run(&[
        "init",
        "retain",
        "alloc:linear:20M",
        "alloc:vmm:20M",
        "alloc:array:4M",
        "alloc:async:32M",
        "alloc:managed:20M",
        "info",
        "alloc:linear:6M",
        "alloc:linear:4M",
        "info",
        "freeall",
        "info",
    ]);
    let free = |bytes: u64| format!("0 {bytes} {}", 100 * MIB);
    assert_eq!(answers[2..7], ["0"; 5]);
    assert_eq!(answers[7], free(4 * MIB));
    assert_eq!(answers[8..], ["2", "0", &free(0), "0", &free(100 * MIB)]);
}

#[test]
fn what_is_charged_is_what_the_driver_took() {
    for variant in ["multiprocessors=0", "multiprocessors=75", "multiprocessors=0,pool_chunk_kib=4096"] {
        for allocations in [
            ["linear:1", "linear:3M", "linear:700K"],
            ["async:1", "async:33M", "async:65M"],
            ["vmm:2M", "mapped:6M", "array:1088K"],
            ["pitched:12K", "async_ptsz:5M", "linear:1G"],
        ] {
            let bench = Bench::new(["H100-80"]).driver(variant);
            bench.share("a", 0, 2 * GIB);
            let script = allocations.map(|allocation| format!("alloc:{allocation}"));
            let script = [&["init", "retain"][..], &script.each_ref().map(String::as_str)].concat();
            let holder = bench.hold(&script);
            assert_eq!(holder.before, ["0"; 5], "{variant} {script:?}");
            assert_eq!(bench.charged("a").0, bench.used(0), "{variant} {script:?}");
            holder.kill();
        }
    }
}

#[test]
fn memory_that_is_still_mapped_stays_charged_when_its_handle_is_released() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, 64 * MIB);
    let answers =
        bench.run(&["init", "retain", "alloc:mapped:64M", "alloc:linear:2M", "free", "alloc:linear:64M"]);
    assert_eq!(answers[2..], ["0", "2", "0", "0"]);
}

#[test]
fn memory_may_be_freed_by_the_other_family() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, 64 * MIB);
    let script =
        ["init", "retain", "alloc:linear:64M", "free_async", "alloc:async:64M", "free_sync", "sync", "info"];
    let answers = bench.run(&script);
    assert_eq!(answers[2..7], ["0"; 5]);
    assert_eq!(answers[7], format!("0 {} {}", 64 * MIB, 64 * MIB));
}

#[test]
fn graph_memory_is_charged_when_the_driver_reserves_it() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, 100 * MIB);
    let seen = |free: u64| format!("0 {} {}", free * MIB, 100 * MIB);
    // Making a graph costs nothing, launching it does, and launching it again nothing more.
    let script =
        ["init", "retain", "graph:60M", "info", "launch", "info", "launch", "info", "alloc:linear:42M"];
    let answers = bench.run(&script);
    assert_eq!(answers[2..8], ["0", &seen(100), "0", &seen(40), "0", &seen(40)]);
    // An allocation that does not fit beside it has the unused graph memory trimmed.
    assert_eq!(answers[8], "0");
    let script =
        ["init", "retain", "graph:60M", "launch", "graphtrim", "info", "upload", "info", "alloc:linear:40M"];
    assert_eq!(bench.run(&script)[2..], ["0", "0", "0", &seen(100), "0", &seen(40), "0"]);
    // A graph that does not fit is not launched, and nothing stays charged for the attempt.
    let script = ["init", "retain", "graph:102M", "launch", "upload", "info", "graph:100M", "launch", "info"];
    assert_eq!(bench.run(&script)[2..], ["0", "2", "2", &seen(100), "0", "0", &seen(0)]);
}

#[test]
fn a_graph_that_is_uploaded_as_it_is_made_is_charged_at_once() {
    for symbol in ["cuGraphInstantiateWithParams", "cuGraphInstantiateWithParams_ptsz"] {
        let [bench, other] = [(); 2].map(|()| Bench::new(["H100-80"]));
        [&bench, &other].into_iter().for_each(|bench| bench.share("a", 0, 100 * MIB));
        let seen = |free: u64| format!("0 {} {}", free * MIB, 100 * MIB);
        let graph = |size: &str, flags: u32| format!("graph:{size}:{symbol}:{flags}");
        let (uploaded, plain, large) = (graph("60M", 2), graph("60M", 0), graph("102M", 2));
        let holder = bench.hold(&["init", "retain", &uploaded, "info", "launch", "info"]);
        assert_eq!(holder.before[2..], ["0", &seen(40), "0", &seen(40)], "{symbol}");
        assert_eq!(bench.charged("a").0, bench.used(0), "{symbol}");
        holder.kill();
        // Without the flag it takes nothing; what does not fit is refused, and nothing stays charged for it.
        let holder = other.hold(&["init", "retain", &plain, "info", &large, "info", &uploaded]);
        assert_eq!(holder.before[2..], ["0", &seen(100), "2", &seen(100), "0"], "{symbol}");
        assert_eq!(other.charged("a").0, other.used(0), "{symbol}");
        holder.kill();
    }
}

#[test]
fn an_allocation_into_a_capture_is_charged_by_the_launch() {
    for symbol in ["cuMemAllocAsync", "cuMemAllocAsync_ptsz"] {
        let bench = Bench::new(["H100-80"]);
        bench.share("a", 0, 64 * MIB);
        let seen = |free: u64| format!("0 {} {}", free * MIB, 64 * MIB);
        let allocate = format!("capturealloc:{symbol}:60M");
        let script = ["init", "retain", "alloc:linear:40M", "capture", &allocate, "info", "captured"];
        let after = ["launch", "info", "free", "launch", "info"];
        let holder = bench.hold(&[&script[..], &after].concat());
        assert_eq!(holder.before[3..7], ["0", "0", &seen(24), "0"], "{symbol}");
        assert_eq!(holder.before[7..], ["2", &seen(24), "0", "0", &seen(4)], "{symbol}");
        assert_eq!(bench.charged("a").0, bench.used(0), "{symbol}");
        holder.kill();
    }
}

#[test]
fn freeing_in_the_order_of_a_stream_spoils_no_capture() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, 64 * MIB);
    let script = ["init", "retain", "alloc:linear:40M", "capture", "free_async", "captured", "info"];
    let answers = bench.run(&script);
    assert_eq!(answers[3..], ["0", "0", "0", &format!("0 {} {}", 64 * MIB, 64 * MIB)]);
}

#[test]
fn queries_tell_the_tenants_own_truth() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let answers =
        bench.run(&["init", "retain", "alloc:linear:256M", "info", "total", "nvml", "free", "info", "nvml"]);
    let (quota, free) = (GIB, GIB - 256 * MIB);
    assert_eq!(answers[3], format!("0 {free} {quota}"));
    assert_eq!(answers[4], format!("0 {quota}"));
    assert_eq!(answers[5], format!("0 {quota} {free} {}", 256 * MIB));
    assert_eq!(answers[7], format!("0 {quota} {quota}"));
    assert_eq!(answers[8], format!("0 {quota} {quota} 0"));
}

#[test]
fn free_memory_is_never_more_than_the_device_has() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, 79 * GIB);
    let mut other = bench.unlimited(&crate::support::built().probe);
    let hog = Holder::start(other.args(["init", "retain", "alloc:linear:40G", "hold"]));
    let answers = bench.run(&["init", "retain", "info", "alloc:linear:45G"]);
    let free: u64 = answers[2].split(' ').nth(1).unwrap().parse().unwrap();
    assert!(free < 40 * GIB, "{}", answers[2]);
    assert_eq!(answers[3], "2", "the driver's own out of memory passes through");
    assert_eq!(bench.charged("a"), (0, 0), "and leaves no charge");
    hog.kill();
}

/// What a second process is answered that runs this, when one with 60 GiB was killed whose memory the driver frees so
/// many milliseconds later.
fn after_a_kill(delay_ms: u64, script: &[&str]) -> Vec<String> {
    let spec = NodeSpec::new(["H100-80"]);
    // NVML does not tell when the memory is free.
    let bench = Bench::with(NodeSpec { reap_delay_ms: delay_ms, process_view: ProcessView::Empty, ..spec });
    // Both fit the quota, so the driver is asked at once.
    bench.share("a", 0, 200 * GIB);
    let holder = bench.hold(&["init", "retain", "alloc:linear:60G"]);
    assert_eq!(holder.before[2], "0");
    holder.kill();
    let second = bench.hold(&[&["init", "retain"], script].concat());
    let answers = second.before[2..].to_vec();
    assert_eq!(bench.charged("a").0, bench.charged("a").1, "{script:?}");
    second.kill();
    answers
}

#[test]
fn the_driver_is_asked_again_while_it_frees_what_a_dead_process_had() {
    for family in ["linear", "managed", "vmm", "async"] {
        assert_eq!(after_a_kill(700, &[&format!("alloc:{family}:60G")]), ["0"], "{family}");
    }
    assert_eq!(after_a_kill(700, &["graph:60G", "upload"]), ["0", "0"]);
    assert_eq!(after_a_kill(700, &["graph:60G", "launch"]), ["0", "0"]);
    assert_eq!(after_a_kill(700, &["graph:60G:cuGraphInstantiateWithParams:2"]), ["0"]);
}

#[test]
fn the_driver_is_not_asked_for_ever() {
    for script in ["alloc:linear:60G", "alloc:async:60G", "alloc:vmm:60G"] {
        assert_eq!(after_a_kill(600_000, &[script]), ["2"], "{script}");
    }
}

#[test]
fn other_tenants_processes_are_invisible() {
    for view in [ProcessView::Host, ProcessView::Own, ProcessView::Empty, ProcessView::NotAvailable] {
        let bench = Bench::viewed(view, ["H100-80"]);
        bench.share("a", 0, 4 * GIB);
        let mut other = bench.unlimited(&crate::support::built().probe);
        let stranger = Holder::start(other.args(["init", "retain", "hold"]));
        let sibling = bench.hold(&["init", "retain"]);
        let sibling_pid = u64::from(sibling.child.id());
        let answer = bench.run(&["init", "retain", "processes"]).pop().unwrap();
        let (listed, own) = answer.rsplit_once(' ').unwrap();
        if view == ProcessView::Empty {
            assert_eq!(listed, "[]");
        } else {
            let mut pids: Vec<u64> =
                listed.trim_matches(['[', ']']).split(", ").map(|pid| pid.parse().unwrap()).collect();
            let mut expected = vec![sibling_pid, own.parse().unwrap()];
            pids.sort_unstable();
            expected.sort_unstable();
            assert_eq!(pids, expected, "{view:?}");
        }
        stranger.kill();
        sibling.kill();
    }
}

#[test]
fn other_tenants_utilisation_is_invisible() {
    // Of partitions the driver has none.
    for view in [ProcessView::Host, ProcessView::Own] {
        let bench = Bench::with(NodeSpec { process_view: view, ..NodeSpec::new(["H100-80"]) });
        bench.share("a", 0, 4 * GIB);
        let mut other = bench.unlimited(&crate::support::built().probe);
        let stranger = Holder::start(other.args(["init", "retain", "spin:600000000", "hold"]));
        // Where only others are busy, nobody is.
        let idle = bench.run(&["init", "sleep:200", "busy"]).pop().unwrap();
        assert!(idle.starts_with("Err(6) Err(6) "), "{view:?}: {idle}");
        let sibling = bench.hold(&["init", "retain", "spin:600000000"]);
        let own = bench.hold(&["init", "retain", "spin:600000000", "sleep:500", "busy"]);
        let mut expected = [sibling.child.id(), own.child.id()];
        expected.sort_unstable();
        let answer = own.before.last().unwrap().replace("Ok", "");
        let mut found = [Vec::new(), Vec::new()];
        for (list, text) in found.iter_mut().zip(answer.split(['(', ')']).filter(|part| part.contains('['))) {
            *list =
                text.trim_matches(['[', ']']).split(", ").map(|pid| pid.parse::<u32>().unwrap()).collect();
            list.sort_unstable();
        }
        assert_eq!(found, [expected, expected], "{view:?}: {answer}");
        [stranger, sibling, own].into_iter().for_each(Holder::kill);
    }
}

#[test]
fn devices_without_a_share_are_not_limited() {
    let bench = Bench::whole(["H100-80", "H100-80"]);
    bench.share("a", 1, GIB);
    let answers = bench.run(&["init", "retain", "alloc:linear:10G", "device:1", "retain", "alloc:linear:2G"]);
    assert_eq!(answers[2..], ["0", "0", "0", "2"]);
}

#[test]
fn each_device_has_its_own_quota() {
    let bench = Bench::whole(["H100-80", "A100-40"]);
    bench.share("b", 0, 2 * GIB);
    bench.share("a", 1, GIB);
    let answers = bench.run(&[
        "init",
        "retain",
        "total",
        "bisect:linear:2M",
        "device:1",
        "retain",
        "total",
        "bisect:linear:2M",
    ]);
    assert_eq!(answers[2..4], [format!("0 {}", 2 * GIB), (2 * GIB).to_string()]);
    assert_eq!(answers[6..8], [format!("0 {GIB}"), GIB.to_string()]);
}

#[test]
fn two_shares_of_one_gpu_add_up() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    bench.share("b", 0, 512 * MIB);
    let answers = bench.run(&["init", "retain", "bisect:linear:1", "alloc:linear:1200M", "info", "free"]);
    assert_eq!(answers[2], (GIB + 512 * MIB).to_string());
    assert_eq!(answers[4], format!("0 {} {}", 336 * MIB, GIB + 512 * MIB));
    assert_eq!((bench.charged("a"), bench.charged("b")), ((0, 0), (0, 0)));
}

#[test]
fn a_quota_of_zero_bytes_sets_no_limit_and_is_still_counted() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, 0);
    let holder = bench.hold(&["init", "retain", "alloc:linear:40G"]);
    assert_eq!(holder.before[2], "0");
    assert_eq!(bench.charged("a"), (40 * GIB, 40 * GIB));
    holder.finish();
}

#[test]
fn the_end_of_a_context_releases_what_was_in_it() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let full = format!("0 {GIB} {GIB}");
    let answers = bench.run(&[
        "init",
        "ctx",
        "alloc:linear:500M",
        "alloc:array:64M",
        "ctx",
        "alloc:linear:400M",
        "destroy",
        "info",
        "destroy",
        "retain",
        "info",
        "alloc:linear:1G",
        "reset",
        "retain",
        "info",
        "alloc:linear:1G",
        "release",
        "release",
        "retain",
        "info",
    ]);
    assert_eq!(answers[1..7], ["0"; 6]);
    assert_eq!(answers[8..11], ["0", "0", &full]);
    assert_eq!(answers[11..15], ["0", "0", "0", &full], "reset");
    // The reset kept the two references.
    assert_eq!(answers[15..], ["0", "0", "0", "0", &full], "release");
}

#[test]
fn a_context_is_charged_what_it_takes() {
    let context = 528 * MIB;
    for (view, variant) in [
        (ProcessView::Host, "context_mib=528"),
        (ProcessView::Own, "context_mib=528"),
        // Not measurable: taken from the size of the GPU, which the simulated board agrees with.
        (ProcessView::Empty, ""),
        (ProcessView::NotAvailable, ""),
    ] {
        let bench = Bench::viewed(view, ["H100-80"]).driver(variant);
        bench.share("a", 0, 2 * GIB);
        let answers = bench.run(&["init", "retain", "info", "bisect:linear:1"]);
        let left = 2 * GIB - context;
        assert_eq!(answers[2..], [format!("0 {left} {}", 2 * GIB), left.to_string()], "{view:?}");
    }
}

#[test]
fn a_context_that_does_not_fit_is_not_made() {
    let bench = Bench::new(["H100-80"]).driver("multiprocessors=100");
    bench.share("a", 0, GIB);
    // The first one is measured, so that the next process knows beforehand.
    let first = bench.hold(&["init", "retain"]);
    let second = bench.hold(&["init", "ctx"]);
    assert_eq!((first.before[1].as_str(), second.before[1].as_str()), ("0", "0"));
    let used = bench.used(0);
    let answers = bench.run(&["init", "retain", "ctx"]);
    assert_eq!(answers, ["0", "2", "2"]);
    assert_eq!(bench.used(0), used);
    assert_eq!(bench.charged("a").0, 800 * MIB);
    first.kill();
    second.kill();
    let bench = Bench::new(["H100-80"]).driver("multiprocessors=100");
    bench.share("a", 0, 300 * MIB);
    let holder = bench.hold(&["init", "retain", "ctx"]);
    assert_eq!(holder.before, ["0", "2", "2"], "nor one that is only measured afterwards");
    assert_eq!((bench.used(0), bench.charged("a")), (0, (0, 0)));
    holder.finish();
}

#[test]
fn memory_that_no_call_asks_for_is_charged_soon() {
    // Where NVML does not show it, the node agent does (`measured.rs`).
    let bench = Bench::shown(["H100-80"]).driver("context_mib=100");
    bench.share("a", 0, GIB);
    // Code grows the context when it is first run; NVML shows it.
    let script = [
        "init",
        "retain",
        "alloc:linear:100M",
        "code:209715200:0",
        "sleep:600",
        "info",
        "free",
        "bisect:linear:2M",
    ];
    let answers = bench.run(&script);
    let left = GIB - 100 * MIB - 200 * MIB;
    assert_eq!(answers[3..7], ["0", "0", &format!("0 {} {GIB}", left - 100 * MIB), "0"]);
    assert_eq!(answers[7], left.to_string());
    let script = ["init", "retain", "code:209715200:0", "sleep:600", "info", "release", "retain", "info"];
    assert_eq!(bench.run(&script)[7], format!("0 {} {GIB}", GIB - 100 * MIB), "it goes with the context");
}

#[test]
fn managed_memory_may_be_oversubscribed_where_the_node_allows_it() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let mut quota = bench.quota("a");
    quota.oversubscribe_bytes = 512 * MIB;
    bench.write_quota("a", &quota);
    let script = [
        "init",
        "retain",
        "bisect:linear:2M",
        "bisect:managed:2M",
        "alloc:managed:1200M",
        "alloc:linear:2M",
        "info",
    ];
    let answers = bench.run(&script);
    assert_eq!(answers[2..4], [GIB.to_string(), (GIB + 512 * MIB).to_string()]);
    assert_eq!(answers[4..], ["0", "2", &format!("0 0 {GIB}")]);
}

#[test]
fn two_processes_share_one_quota() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let first = bench.hold(&["init", "retain", "alloc:linear:600M"]);
    let second = bench.hold(&["init", "retain", "alloc:linear:600M", "alloc:linear:400M", "info"]);
    assert_eq!(second.before[2..4], ["2", "0"]);
    assert_eq!(second.before[4], format!("0 {} {GIB}", 24 * MIB));
    assert_eq!(bench.charged("a"), (1000 * MIB, 1000 * MIB));
    assert_eq!(bench.used(0), 1000 * MIB);
    first.finish();
    second.finish();
}

#[test]
fn a_lowered_quota_applies_to_running_programs() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let mut program =
        bench.probe(&["init", "retain", "alloc:linear:600M", "hold", "alloc:linear:10M", "total", "free"]);
    program.args(["alloc:linear:500M"]);
    let holder = Holder::start(&mut program);
    let mut quota = bench.quota("a");
    quota.memory_bytes = 500 * MIB;
    bench.write_quota("a", &quota);
    std::thread::sleep(std::time::Duration::from_millis(1000));
    assert_eq!(holder.finish(), ["2", &format!("0 {}", 500 * MIB), "0", "0"]);
}

#[test]
fn a_quota_that_becomes_unreadable_keeps_the_last_limit() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let mut program = bench.probe(&["init", "retain", "hold", "alloc:linear:2G", "alloc:linear:1G"]);
    let holder = Holder::start(&mut program);
    bench.write_quota_bytes("a", b"garbage");
    std::thread::sleep(std::time::Duration::from_millis(1000));
    assert_eq!(holder.finish(), ["2", "0"]);
}

#[test]
fn the_environment_can_only_lower_a_limit() {
    let bench = Bench::whole(["H100-80", "H100-80"]);
    bench.share("a", 0, GIB);
    bench.share("b", 1, GIB);
    let totals = |variables: &[(&str, &str)]| {
        let mut program = bench.probe(&["init", "total", "device:1", "total"]);
        program.envs(variables.iter().copied());
        let answers = answers(program);
        [answers[1].clone(), answers[3].clone()]
            .map(|text| text.strip_prefix("0 ").unwrap().parse::<u64>().unwrap())
    };
    const ALL: &str = "CUDA_DEVICE_MEMORY_LIMIT";
    const SECOND: &str = "CUDA_DEVICE_MEMORY_LIMIT_1";
    assert_eq!(totals(&[(ALL, "100m")]), [100 * MIB; 2]);
    assert_eq!(totals(&[(SECOND, "100m")]), [GIB, 100 * MIB]);
    assert_eq!(totals(&[(ALL, "200m"), (SECOND, "300m")]), [200 * MIB, 300 * MIB]);
    assert_eq!(totals(&[(ALL, "10g"), (SECOND, "0")]), [GIB, GIB]);
    assert_eq!(totals(&[(ALL, "")]), [GIB, GIB]);
    // The index is the device's place in the claim, whatever CUDA is told to show.
    assert_eq!(totals(&[(SECOND, "100m"), ("CUDA_VISIBLE_DEVICES", "1,0")]), [100 * MIB, GIB]);
}

#[test]
fn every_way_to_find_a_function_is_limited() {
    for resolve in ["dlsym", "dlvsym", "default", "next", "resolver"] {
        for variant in ["same", "alias"] {
            let bench = Bench::new(["H100-80"]).driver(&format!("{NO_CONTEXTS},resolver={variant}"));
            bench.share("a", 0, GIB);
            for family in ["linear", "managed", "async", "async_ptsz", "vmm", "array"] {
                let mut program = bench.probe(&["init", "retain", "total"]);
                program.args([format!("alloc:{family}:1026M"), format!("alloc:{family}:1G")]);
                program.env("PROBE_RESOLVE", resolve);
                let expected = ["0", "0", &format!("0 {GIB}"), "2", "0"];
                assert_eq!(answers(program), expected, "{resolve} {variant} {family}");
            }
        }
    }
}

#[test]
fn other_drivers_pack_differently_and_stay_within_the_quota() {
    for variant in ["slab_kib=4096", "slab_kib=128", "small_kib=0", "small_kib=2048", "pool_chunk_kib=2048"] {
        let bench = Bench::new(["H100-80"]).driver(&format!("{NO_CONTEXTS},{variant}"));
        bench.share("a", 0, 64 * MIB);
        for family in ["linear:100K", "linear:700K", "linear:3M", "async:100K", "async:5M"] {
            let holder = bench.hold(&["init", "retain", &format!("fill:{family}")]);
            let used = bench.used(0);
            assert!(used <= 64 * MIB, "{variant} {family}: {used} bytes used");
            assert!(used > 0 && holder.before[2].ends_with(" 2"), "{variant} {family}: {:?}", holder.before);
            holder.finish();
        }
    }
}

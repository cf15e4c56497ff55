//! What contexts take beside allocations: what they are made of, and the limits that a program sets in them.

use crate::support::{Bench, GIB, MIB};
use aliquot_sim_node::{NodeSpec, ProcessView};

const VIEWS: [ProcessView; 3] = [ProcessView::Host, ProcessView::Own, ProcessView::Empty];

/// A node whose contexts take 100 MiB, where NVML shows processes so, and a share of one GiB.
fn bench(view: ProcessView) -> Bench {
    let bench = Bench::viewed(view, ["H100-80"]);
    let bench = bench.driver("context_mib=100");
    bench.share("a", 0, 4 * GIB);
    bench
}

/// Bytes that a program thinks it has.
fn free(answer: &str) -> u64 {
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_context_is_asked_for_again_while_the_driver_frees_what_a_dead_process_had() {
    // NVML does not tell when the memory is free.
    let spec =
        NodeSpec { reap_delay_ms: 700, process_view: ProcessView::Empty, ..NodeSpec::new(["H100-80"]) };
    for make in ["retain", "ctx"] {
        let bench = Bench::with(spec.clone()).driver("context_mib=24000");
        // All fits the quota, so the driver is asked at once.
        bench.share("a", 0, 200 * GIB);
        let holder = bench.hold(&["init", "retain", "alloc:linear:54G"]);
        assert_eq!(holder.before, ["0"; 3]);
        holder.kill();
        let second = bench.hold(&["init", make]);
        assert_eq!(second.before, ["0", "0"], "{make}");
        assert_eq!(bench.charged("a").0, bench.charged("a").1, "{make}");
        second.kill();
    }
}

/// The limits that memory is taken for: heap and buffer of so many bytes, and a stack in each of 132 times 2048 threads.
const RAISED: [(&str, u64); 3] =
    [("limit:2:208M", 200 * MIB), ("limit:1:207M", 200 * MIB), ("limit:0:2K", 132 * 2048 * 1024)];

#[test]
fn a_raised_limit_of_a_context_is_charged_at_once_and_once() {
    for view in VIEWS {
        for (limit, bytes) in RAISED {
            let bench = bench(view);
            let script = ["init", "retain", "info", limit, "info", "sleep:600", "info", limit, "info"];
            let holder = bench.hold(&script);
            let before = free(&holder.before[2]);
            assert_eq!([&holder.before[3], &holder.before[7]], ["0", "0"], "{view:?} {limit}");
            for at in [4, 6, 8] {
                assert_eq!(free(&holder.before[at]), before - bytes, "{view:?} {limit}, {at}");
            }
            if view != ProcessView::Empty {
                assert_eq!(bench.charged("a").0, bench.used(0), "{view:?} {limit}");
            }
            holder.kill();
        }
    }
}

#[test]
fn what_nested_kernels_need_is_charged() {
    for view in VIEWS {
        for (limit, bytes) in [("limit:3:4", 300 * MIB), ("limit:4:18432", 128 * MIB)] {
            let bench = Bench::viewed(view, ["A100-40"]);
            let bench = bench.driver("context_mib=100");
            bench.share("a", 0, GIB);
            let answers = bench.run(&["init", "retain", "info", limit, "info", "limit:3:9"]);
            assert_eq!(answers[3], "0", "{view:?} {limit}");
            assert_eq!(free(&answers[2]) - free(&answers[4]), bytes, "{view:?} {limit}");
            assert_eq!(answers[5], "2", "{view:?} {limit}");
        }
    }
}

#[test]
fn a_limit_that_does_not_fit_is_not_raised() {
    for view in VIEWS {
        for limit in ["limit:2:5G", "limit:1:5G", "limit:0:64K"] {
            let bench = bench(view);
            let holder =
                bench.hold(&["init", "retain", "info", limit, "info", "alloc:linear:2G", "limit:2:1G"]);
            assert_eq!(holder.before[3], "2", "{view:?} {limit}");
            assert_eq!(holder.before[2], holder.before[4], "{view:?} {limit}: nothing stays charged");
            assert_eq!(holder.before[5..], ["0", "0"], "{view:?} {limit}");
            assert_eq!(
                bench.used(0),
                100 * MIB + 2 * GIB + GIB - 8 * MIB,
                "{view:?} {limit}: the driver was not asked"
            );
            holder.kill();
        }
    }
}

#[test]
fn what_the_driver_refuses_to_raise_is_not_charged() {
    for view in VIEWS {
        let bench = bench(view);
        // More than the device has, and less than the quota.
        bench.share("a", 0, 200 * GIB);
        let answers = bench.run(&["init", "retain", "info", "limit:2:100G", "limit:99:1", "info"]);
        assert_eq!(answers[3..5], ["2", "1"], "{view:?}");
        assert_eq!(answers[2], answers[5], "{view:?}");
    }
}

#[test]
fn a_lowered_limit_gives_back_what_it_was_raised_by() {
    for view in VIEWS {
        let bench = bench(view);
        let script = ["init", "retain", "info", "limit:2:208M", "limit:2:108M", "info", "limit:2:8M", "info"];
        let answers = bench
            .run(&[&script[..], &["limit:2:1M", "sleep:600", "limit:2:8M", "sleep:600", "info"]].concat());
        let start = free(&answers[2]);
        assert_eq!(free(&answers[5]), start - 100 * MIB, "{view:?}");
        assert_eq!(free(&answers[7]), start, "{view:?}");
        assert_eq!(
            free(answers.last().unwrap()),
            start,
            "{view:?}: less than it was made with is nothing to give back"
        );
    }
}

#[test]
fn raised_limits_go_with_their_context() {
    for view in VIEWS {
        let bench = bench(view);
        let raise = ["ctx", "limit:2:208M", "limit:0:2K", "destroy", "info"];
        let answers = bench.run(&[&["init", "retain", "info"][..], &raise, &raise].concat());
        assert_eq!([&answers[7], &answers[12]], [&answers[2]; 2], "{view:?}");
    }
}

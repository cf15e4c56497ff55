//! What contexts take beside allocations.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use aliquot_sim_node::{NodeSpec, ProcessView};
use support::{Bench, GIB};

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

//! The same runner as on hardware, on the simulated driver: whatever needs no Python package and no compiler runs
//! and keeps its promises, and what was measured is written down. Figures of time are not looked at.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test"
)]

mod common;

use aliquot_sim_node::{NodeSpec, ProcessView, Record};
use common::{check, has_containers, node, section};
use serde_json::Value;

/// What is written and what is read cannot drift apart: the driver of a record is the one that it was taken of.
#[test]
fn a_record_makes_the_driver_that_it_is_of() {
    for (view, aliases) in [
        (ProcessView::Host, false),
        (ProcessView::Own, true),
        (ProcessView::Empty, true),
        (ProcessView::NotAvailable, false),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let resolver = if aliases { "alias" } else { "same" };
        let spec = NodeSpec {
            process_view: view,
            reap_delay_ms: 300,
            cuda_settings: vec![
                format!("resolver={resolver}"),
                "context_mib=313".to_owned(),
                "slice_us=3000".to_owned(),
            ],
            ..NodeSpec::new(["H100-80"])
        };
        node(folder.path(), spec.clone());
        let (output, results) = check(folder.path(), &["--only", "queries show"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let refused = Record::read(&results).unwrap_err().to_string();
        assert!(refused.contains("results.json") && refused.contains("simulated"), "{refused}");

        let mut report: Value = serde_json::from_slice(&std::fs::read(&results).unwrap()).unwrap();
        let can_unshare = report["facts"]["nvml_pids"]["inside_a_pid_namespace"].get("unknown").is_none();
        report["simulated"] = false.into();
        let facts = report["facts"].to_string();
        std::fs::write(&results, report.to_string()).unwrap();
        let record = Record::read(&results).unwrap_or_else(|error| panic!("{error}: {facts}"));
        if can_unshare || !matches!(view, ProcessView::Host | ProcessView::Own) {
            assert_eq!(record.process_view, Some(view), "{facts}");
        }
        assert_eq!(record.resolver_aliases, Some(aliases), "{facts}");
        assert_eq!(record.context_mib, Some(313), "{facts}");
        // On a busy machine launches come late, which looks like a slice of somebody else's.
        let median = report["facts"]["time_slices"]["median_us"].as_f64().map(|us| us.round() as u64);
        assert!(record.slice_us.is_some() && record.slice_us == median, "{facts}");
        // A busy machine looks later.
        assert!(record.reap_delay_ms.is_some_and(|ms| ms >= 299), "{facts}");
        let again = NodeSpec::new(["H100-80"]).recorded(&record);
        assert_eq!(again.cuda_settings[..2], spec.cuda_settings[..2], "{facts}");
        assert_eq!(Some(again.reap_delay_ms), record.reap_delay_ms);
    }
}

#[test]
fn every_case_runs_on_the_simulated_driver() {
    let folder = tempfile::tempdir().unwrap();
    node(folder.path(), NodeSpec::new(["H100-80"]));
    let (output, results) = check(folder.path(), &["--change-mig"]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    println!("{said}");
    assert!(output.status.success(), "a case failed");
    let report: Value = serde_json::from_slice(&std::fs::read(&results).unwrap()).unwrap();
    assert_eq!(report["simulated"], true);
    for fact in ["nvml_pids", "resolver", "context_bytes", "event_of_1ms_kernel", "release_after_sigkill"] {
        assert!(report["facts"][fact].get("unknown").is_none(), "{fact}: {}", report["facts"][fact]);
    }
    assert_eq!(report["facts"]["resolver"]["equal"], 12, "{}", report["facts"]["resolver"]);
    for line in report["node"]["assumptions"].as_array().unwrap() {
        let beside_nvidias = line["assumption"].as_str().unwrap().contains("nvidia-ctk");
        // A machine may have no nvidia-ctk.
        let unknown = line["verdict"] == "unknown";
        assert!(line["verdict"] == "held" || beside_nvidias && unknown, "{line}");
    }
    // When a launch waits is seen by the clock, and a busy machine has its own.
    let by_clock = |line: &&Value| line["assumption"].as_str().unwrap().starts_with("launches");
    for line in report["cuda"].as_array().unwrap().iter().filter(|line| !by_clock(line)) {
        assert_eq!(line["verdict"], "held", "{line}");
    }
    assert_eq!(report["complete"], true);
    assert_eq!(report["unchanged"]["outcome"], "passed", "{}", report["unchanged"]);
    assert!(
        said.contains("== Assumptions of the simulator: ") && said.contains("RESULT: no promise failed.")
    );
    let promises = report["node"]["promises"].as_array().unwrap();
    if has_containers(&report["node"]) {
        assert!(promises.iter().all(|promise| promise["outcome"] == "passed"), "{promises:?}");
    }
    let cases = report["cases"].as_array().unwrap();
    for case in cases.iter().filter(|case| case["mode"] == "LD_PRELOAD") {
        let name = case["name"].as_str().unwrap();
        let needs_more = ["PyTorch", "CuPy", "nvcc"].iter().any(|what| name.contains(what));
        assert!(needs_more || case["outcome"] != "skipped", "{case}");
    }
    let passed = cases.iter().filter(|case| case["outcome"] == "passed").count();
    assert!(passed >= 5, "what is promised was tried: {passed}");
}

#[test]
fn a_board_that_is_not_as_assumed_differs_and_fails_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut spec = NodeSpec::new(["L40S"]);
    spec.gpus[0].memory_mib = Some(40_000);
    node(folder.path(), spec);
    let devices = folder.path().join("node/root/proc/driver/nvidia-caps/mig-minors");
    std::fs::write(&devices, "config 1\nmonitor 2\ngpu0/gi0/access 33\n").unwrap();
    let (output, results) = check(folder.path(), &["--only", "node", "--runtime", "own"]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let section = section(&results);
    let lines = section["assumptions"].as_array().unwrap();
    let differing: Vec<&str> = lines
        .iter()
        .filter(|line| line["verdict"] == "differs")
        .map(|line| line["assumption"].as_str().unwrap())
        .collect();
    assert_eq!(differing, ["memory in MiB", "minor numbers of capabilities in mig-minors"], "{said}");
    let memory = lines.iter().find(|line| line["assumption"] == "memory in MiB").unwrap();
    assert_eq!((memory["assumed"].as_str(), memory["machine"].as_str()), (Some("46068"), Some("40000")));
    if has_containers(&section) {
        assert!(said.contains("passed    a share ends at its quota"), "{said}");
    }
}

#[test]
fn a_promise_that_fails_fails_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut spec = NodeSpec::new(["H100-80"]);
    spec.late_uvm = true;
    node(folder.path(), spec);
    let (output, results) = check(folder.path(), &["--only", "node"]);
    let section = section(&results);
    assert!(!output.status.success());
    let promises = section["promises"].as_array().unwrap();
    let refused = promises.iter().find(|promise| promise["outcome"] == "failed").unwrap();
    assert!(refused["reason"].as_str().unwrap().contains("nvidia-modprobe"), "{refused}");
}

//! What a run may do to the GPUs of a machine: nothing, unless it is told that partitions may be made.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test"
)]

mod common;

use aliquot_sim_node::{Fault, GpuSpec, Node, NodeSpec};
use common::{check, has_containers, node, said, section};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// The functions of NVML that change something, among all that the simulated one has.
fn that_write() -> Vec<&'static str> {
    let all = include_str!("../../../simulator/nvml/symbols.txt").lines();
    let writes = |name: &&str| {
        let rest = name.replace("EventSet", "");
        ["Set", "Create", "Destroy", "Reset", "Clear"].iter().any(|word| rest.contains(word))
    };
    all.filter(writes).filter(|name| *name != "nvmlEventSetCreate").collect()
}

/// Counts the calls of these functions, and lets them through.
fn count(node: &Node) {
    for function in that_write() {
        node.add_fault(&Fault::fail(function, u64::MAX, 1)).unwrap();
    }
}

/// Functions that were called, with how often.
fn called(node: &Node) -> Vec<(String, u64)> {
    let rules = node.faults().unwrap();
    rules.into_iter().filter(|rule| rule.calls > 0).map(|rule| (rule.fault.function, rule.calls)).collect()
}

#[test]
fn no_function_of_nvml_that_writes_is_called_without_leave() {
    assert!(that_write().contains(&"nvmlDeviceSetPersistenceMode"), "{:?}", that_write());
    let folder = tempfile::tempdir().unwrap();
    let mut spec = NodeSpec::new(["H100-80"]);
    spec.gpus.push(GpuSpec::new("H100-80").with_mig());
    let node = node(folder.path(), spec);
    // Somebody's partition on the second GPU.
    let profile = 19;
    let instance = node.create_gi(1, profile, None).unwrap();
    node.create_ci(1, instance.id, instance.serial, 0, None).unwrap();
    let state = || {
        let settings: Vec<String> = (0..2).map(|gpu| format!("{:?}", node.settings(gpu).unwrap())).collect();
        let partitions: Vec<String> =
            node.mig_devices(1).unwrap().into_iter().map(|device| device.uuid).collect();
        (settings, partitions)
    };
    let before = state();
    count(&node);
    let (output, results) = check(folder.path(), &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(called(&node), [], "{}", said(&output));
    assert_eq!(state(), before);
    if !has_containers(&section(&results)) {
        return;
    }
    let (output, _) = check(folder.path(), &["--only", "node", "--change-mig"]);
    assert!(
        output.status.success() && said(&output).contains("passed    a partition is made, used and undone"),
        "{}",
        said(&output)
    );
    assert!(!called(&node).is_empty(), "the counters count");
    let never = ["nvmlDeviceSetComputeMode", "nvmlDeviceSetPersistenceMode"];
    assert!(called(&node).iter().all(|(name, _)| !never.contains(&name.as_str())), "{:?}", called(&node));
    assert_eq!(state(), before);
}

#[test]
fn a_gpu_that_somebody_uses_is_not_filled_and_not_kept_busy() {
    let folder = tempfile::tempdir().unwrap();
    let node = node(folder.path(), NodeSpec::new(["H100-80"]));
    // A program of the runner's own, which holds memory until its input ends.
    let mut hold = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
    hold.args(["tenant", "hold", "1048576"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    common::on_node(&mut hold, folder.path());
    hold.env("LD_LIBRARY_PATH", node.dir().join("root/usr/lib/x86_64-linux-gnu"));
    let mut other = hold.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let (output, results) = check(folder.path(), &[]);
    drop(other.stdin.take());
    other.wait().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(results).unwrap()).unwrap();
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 1, "{cases:?}");
    assert_eq!(cases[0]["outcome"], "skipped");
    assert!(cases[0]["reason"].as_str().unwrap().contains("processes that use it: 1"), "{cases:?}");
    assert!(said(&output).contains("no GPU has MIG mode off, no processes"), "{}", said(&output));
}

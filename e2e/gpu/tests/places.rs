//! Machines that lack something: a run ends everywhere, and says what was not tried and why.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test"
)]

mod common;

use aliquot_sim_node::NodeSpec;
use common::{arguments, built, hook, node, on_node, runner, said};
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

/// The runner on a node, started by a program that takes something away.
fn without(by: &[&str], change: impl FnOnce(&mut Command)) -> (Output, Value) {
    let folder = tempfile::tempdir().unwrap();
    node(folder.path(), NodeSpec::new(["H100-80"]));
    let mut command = runner(folder.path(), by, &["--seconds", "30"]);
    change(&mut command);
    let output = command.output().unwrap();
    let report = std::fs::read(common::results(folder.path()));
    let report = report.unwrap_or_else(|error| panic!("{error}: {}", said(&output)));
    (output, serde_json::from_slice(&report).unwrap())
}

/// Everything that needs containers was skipped with this reason, and the rest was tried.
fn has_no_containers(output: &Output, report: &Value, reason: &str) {
    assert!(output.status.success(), "{}", said(output));
    assert_eq!(report["complete"], true);
    let promises = report["node"]["promises"].as_array().unwrap();
    let skipped: Vec<&str> = promises
        .iter()
        .filter(|promise| promise["outcome"] == "skipped")
        .map(|promise| promise["reason"].as_str().unwrap())
        .collect();
    assert!(skipped.len() >= 2 && skipped.iter().all(|why| why.contains(reason)), "{promises:?}");
    assert!(said(output).contains("passed    gpu-0-share is prepared"), "{}", said(output));
    let passed = |case: &&Value| case["outcome"] == "passed" && case["mode"] == "LD_PRELOAD";
    assert!(report["cases"].as_array().unwrap().iter().filter(passed).count() >= 5, "{}", said(output));
}

#[test]
fn without_root() {
    let (output, report) = without(&["unshare", "--user"], |_| {});
    has_no_containers(&output, &report, "need root");
}

#[test]
fn without_the_right_to_mount() {
    // Root of a container.
    let by = ["setpriv", "--bounding-set=-sys_admin,-mknod", "--inh-caps=-sys_admin,-mknod"];
    let (output, report) = without(&by, |_| {});
    has_no_containers(&output, &report, "no container can be started here");
}

#[test]
fn without_any_program_of_the_machine() {
    let (output, report) = without(&[], |command| {
        command.env("PATH", "/nonexistent");
    });
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(report["complete"], true);
    let unshared =
        report["cases"].as_array().unwrap().iter().find(|case| case["mode"] != "LD_PRELOAD").unwrap();
    assert!(unshared["reason"].as_str().unwrap().contains("unshare does not start"), "{unshared}");
    let facts = &report["facts"];
    assert!(facts["mps"]["version"].as_str().unwrap().contains("mps-control does not start"), "{facts}");
    assert!(facts["mig_profiles"]["output"].is_string(), "the driver's root has nvidia-smi: {facts}");
}

#[test]
fn without_certificates() {
    // As on a machine without the package: the API server of a run needs none.
    let (output, report) = without(&[], |command| {
        command
            .args(["--only", "node"])
            .envs([("SSL_CERT_FILE", "/nonexistent"), ("SSL_CERT_DIR", "/nonexistent")]);
    });
    assert!(output.status.success(), "{}", said(&output));
    assert!(report["node"]["promises"].as_array().unwrap().len() > 5, "{}", said(&output));
}

#[test]
fn without_a_driver() {
    let folder = tempfile::tempdir().unwrap();
    node(folder.path(), NodeSpec::new(["H100-80"]));
    std::fs::remove_dir_all(folder.path().join("node/root/usr/lib")).unwrap();
    let output = runner(folder.path(), &[], &[]).output().unwrap();
    assert!(!output.status.success());
    assert!(said(&output).contains("is the driver installed?"), "{}", said(&output));
    assert!(said(&output).contains("RESULT: promises failed"), "{}", said(&output));
    assert_eq!(std::fs::read_dir(folder.path().join("tmp")).unwrap().count(), 0);
}

/// `e2e/gpu/run` in a checkout with or without what `pack` makes, on a machine without cargo.
fn carried(with_programs: bool, outside: bool) -> (Output, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    node(folder.path(), NodeSpec::new(["H100-80"]));
    let (here, there) = (Path::new(env!("CARGO_MANIFEST_DIR")), folder.path().join("checkout/e2e/gpu"));
    std::fs::create_dir_all(there.join("cases")).unwrap();
    std::fs::copy(here.join("run"), there.join("run")).unwrap();
    if with_programs {
        let carry = there.join(".carry");
        std::fs::create_dir(&carry).unwrap();
        for program in ["aliquot-kubelet-plugin", "cuda-probe", "gpu-check"] {
            symlink(built().join(program), carry.join(program)).unwrap();
        }
        for file in ["libaliquot_preload.so", "libaliquot_core.so", "aliquot-oci-hook"] {
            symlink(hook().join(file), carry.join(file)).unwrap();
        }
    }
    let out = folder.path().join("out");
    let mut command = Command::new(there.join("run"));
    command.args(arguments(folder.path())).args(["--quick", "--only", "queries show"]);
    on_node(&mut command, folder.path());
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env_remove("OUT");
    if outside {
        command.env("OUT", &out);
    }
    let output = command.output().unwrap();
    let results = if outside { out } else { there.join("results") };
    let files = std::fs::read_dir(results).into_iter().flatten().flatten();
    (output, files.map(|file| file.file_name().into_string().unwrap()).collect())
}

#[test]
fn from_carried_files_with_results_where_they_are_wanted() {
    for outside in [true, false] {
        let (output, files) = carried(true, outside);
        assert!(output.status.success(), "{}", said(&output));
        assert!(files.len() == 1 && files[0].ends_with("Z.json"), "{files:?}");
        assert!(said(&output).contains("RESULT: no promise failed."), "{}", said(&output));
    }
}

#[test]
fn without_carried_files_and_without_cargo() {
    let (output, files) = carried(false, true);
    assert!(!output.status.success());
    assert!(said(&output).contains("run e2e/gpu/pack where Rust is"), "{}", said(&output));
    assert!(files.is_empty());
}

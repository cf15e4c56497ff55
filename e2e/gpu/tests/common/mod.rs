//! The runner on a simulated node.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "for tests"
)]
#![allow(dead_code, reason = "each test file uses a part of it")]

use aliquot_sim_node::{CUDA_LIBRARY, NVML_LIBRARY, Node, NodeSpec, built_library};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Where the programs are.
pub(crate) fn built() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_gpu-check")).parent().unwrap()
}

/// Folder of the limiter's two files.
pub(crate) fn hook() -> PathBuf {
    let target = built().parent().unwrap();
    let hook = std::env::var_os("ALIQUOT_HOOK_DIR").map_or_else(|| target.join("hook"), PathBuf::from);
    assert!(hook.join("libaliquot_preload.so").is_file(), "run `make build-hook` first");
    hook
}

/// A node as the runner finds one: with the driver's files, and an `nvidia-smi`.
pub(crate) fn node(folder: &Path, spec: NodeSpec) -> Node {
    for program in ["aliquot-kubelet-plugin", "cuda-probe", "aliquot-sim"] {
        assert!(built().join(program).is_file(), "{program}: run `make build` first");
    }
    let spec = NodeSpec {
        nvml_library: built_library(NVML_LIBRARY),
        cuda_library: built_library(CUDA_LIBRARY),
        nvidia_smi: Some(built().join("aliquot-sim")),
        ..spec
    };
    aliquot_sim_node::create(&folder.join("node"), &spec).unwrap()
}

/// Where a run on the node of a folder has its results.
pub(crate) fn results(folder: &Path) -> PathBuf {
    folder.join("results.json")
}

/// What tells the runner of the node in a folder.
pub(crate) fn arguments(folder: &Path) -> Vec<String> {
    let node = folder.join("node");
    let root = node.join("root");
    vec![
        format!("--driver-root={}", root.display()),
        format!("--proc-root={}", root.join("proc").display()),
        format!("--sys-root={}", root.join("sys").display()),
        format!("--agent-arg=--container-mount={}:/run/aliquot-sim:rw", node.display()),
    ]
}

/// Lets a command run on the node of a folder, with temporary files in that folder.
pub(crate) fn on_node(command: &mut Command, folder: &Path) {
    let (node, tmp) = (folder.join("node"), folder.join("tmp"));
    std::fs::create_dir_all(&tmp).unwrap();
    command
        .env("TMPDIR", tmp)
        .env("ALIQUOT_SIM_NODE", &node)
        .env("ALIQUOT_SIM_ROOT", node.join("root"))
        .env("PATH", format!("{}:{}", node.join("root/usr/bin").display(), std::env::var("PATH").unwrap()));
}

/// The runner on the node of a folder, started by another program with its arguments where one is given.
pub(crate) fn runner(folder: &Path, by: &[&str], more: &[&str]) -> Command {
    let own = env!("CARGO_BIN_EXE_gpu-check");
    let words: Vec<&str> = by.iter().copied().chain([own]).collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).args(["run", "--quick", "--hook"]).arg(hook());
    command.args(arguments(folder)).arg("--cases").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("cases"));
    command.arg("--out").arg(results(folder)).args(more);
    on_node(&mut command, folder);
    command
}

/// Runs it to its end; where its results are.
pub(crate) fn check(folder: &Path, more: &[&str]) -> (Output, PathBuf) {
    (runner(folder, &[], more).output().unwrap(), results(folder))
}

/// All that it said.
pub(crate) fn said(output: &Output) -> String {
    (String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr)).into_owned()
}

/// The section `node` of the results.
pub(crate) fn section(results: &Path) -> Value {
    let mut report: Value = serde_json::from_slice(&std::fs::read(results).unwrap()).unwrap();
    report["node"].take()
}

/// Whether this machine lets us start containers.
pub(crate) fn has_containers(section: &Value) -> bool {
    let is_there = !section["runtime"].as_str().unwrap().is_empty();
    if !is_there {
        println!("SKIPPED: what needs containers: {}", section["promises"]);
    }
    is_there
}

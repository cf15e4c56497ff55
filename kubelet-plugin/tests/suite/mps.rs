//! Claims that have GPUs through MPS, beside a supervisor that keeps its side of the contract.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

mod agent;
use crate::common;
mod kills;
mod lost;
mod mounts;
mod unserved;

use aliquot_kubelet_plugin::claim::{Request, Settings};
use aliquot_kubelet_plugin::mps::Mps;
use aliquot_kubelet_plugin::prepare::Node;
use aliquot_kubelet_plugin::share::RegionStorage;
use aliquot_model::config::MpsConfig;
use aliquot_model::{GpuInfo, Quantity};
use aliquot_nvml::fake::{FakeGpus, h100_80};
use aliquot_nvml::{ComputeMode, Gpus};
use common::supervisor::{Answer, Supervisor};
use common::{DRIVER, World, now, request};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use rstest::rstest;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const GPUS: [&str; 2] = ["gpu-1-mps", "gpu-0-mps"];

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1)]))
}

fn config() -> MpsConfig {
    MpsConfig {
        active_thread_percentage: Some(50),
        pinned_device_memory_limit: Some(Quantity::from_u64(1 << 30)),
    }
}

/// A claim with both GPUs, the second one first.
fn wanted() -> Request {
    let mut wanted = request("c-1", &[("a", GPUS[0]), ("b", GPUS[1])]);
    wanted.devices.iter_mut().for_each(|device| device.settings = Settings::Mps(config()));
    wanted
}

/// The world's node, with hardly any patience for a supervisor that does nothing.
fn impatient(world: &World) -> Node {
    let mut node = world.node();
    node.machine.mps = Mps::new(world.mps(), RegionStorage::Directory, Duration::from_millis(10));
    node
}

fn modes(world: &World) -> [ComputeMode; 2] {
    [0, 1].map(|minor| world.gpus.compute_mode(&h100_80(minor).uuid).unwrap())
}

fn spec(world: &World) -> Value {
    let path = world.cdi().join(format!("{DRIVER}-claim-c-1.json"));
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_claim_has_one_daemon_for_all_its_gpus_which_nobody_else_can_use_meanwhile() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    let node = world.node();
    let prepared = node.prepare(&wanted(), false, now()).unwrap();
    assert_eq!(modes(&world), [ComputeMode::ExclusiveProcess; 2]);
    let asked = serde_json::to_value(supervisor.asks()).unwrap();
    assert_eq!(
        asked,
        json!([{
            "version": 1, "claim": {"namespace": "ns", "name": "claim-c-1", "uid": "c-1"},
            "gpus": [{"uuid": h100_80(1).uuid, "minor": 1}, {"uuid": h100_80(0).uuid, "minor": 0}],
            "activeThreadPercentage": 50, "pinnedDeviceMemoryLimitBytes": 1 << 30,
        }])
    );
    let spec = spec(&world);
    for (device, minor) in prepared.iter().zip([1, 0]) {
        let name = device.cdi[1].rsplit('=').next().unwrap();
        let devices = spec["devices"].as_array().unwrap();
        let edits = &devices.iter().find(|device| device["name"] == name).unwrap()["containerEdits"];
        let mount = |path: &str| {
            let mounts = edits["mounts"].as_array().unwrap();
            let mount = mounts.iter().find(|mount| mount["containerPath"] == path).unwrap();
            mount["hostPath"].as_str().unwrap().to_owned()
        };
        for (inside, outside) in [("/tmp/nvidia-mps", "c-1/pipe"), ("/dev/shm", "c-1/shm")] {
            assert_eq!(mount(inside), world.mps().join(outside).to_str().unwrap());
            assert!(world.mps().join(outside).is_dir());
        }
        assert!(edits["env"].as_array().unwrap().contains(&json!("CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps")));
        assert_eq!(edits["deviceNodes"][0]["path"], json!(format!("/dev/nvidia{minor}")));
    }
    assert_eq!(node.prepare(&wanted(), false, now()).unwrap(), prepared, "asked again");
    assert_eq!(supervisor.asks().len(), 1);
    assert!(node.unprepare("c-1").unwrap());
    assert_eq!(supervisor.asks(), []);
    world.assert_clean();
}

#[test]
fn a_daemon_that_cannot_be_started_is_told_with_the_supervisors_reason() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    supervisor.answers(Answer::Fails("no libcuda.so.1 below /run/nvidia/driver"));
    let error = world.node().prepare(&wanted(), false, now()).unwrap_err().to_string();
    assert!(error.contains("start the MPS daemon of claim c-1"), "{error}");
    assert!(error.contains("no libcuda.so.1 below /run/nvidia/driver"), "{error}");
    world.assert_clean();
    supervisor.answers(Answer::Works);
    world.node().prepare(&wanted(), false, now()).unwrap();
}

#[test]
fn without_a_supervisor_the_claim_is_refused_with_what_to_do() {
    let world = world();
    let refused = || world.node().prepare(&wanted(), false, now()).unwrap_err().to_string();
    assert!(refused().contains("kubeletPlugin.mps.enabled"), "{}", refused());
    drop(Supervisor::start(world.mps()));
    assert!(refused().contains("kubeletPlugin.mps.enabled"), "one that has ended: {}", refused());
    world.assert_clean();
}

#[test]
fn a_supervisor_that_hangs_holds_nobody_up_longer_than_its_time() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    supervisor.answers(Answer::Nothing);
    let error = impatient(&world).prepare(&wanted(), false, now()).unwrap_err().to_string();
    assert!(error.contains("was not ready within 10ms (the supervisor has not answered)"), "{error}");
    world.assert_clean();
    supervisor.answers(Answer::Works);
    world.node().prepare(&wanted(), false, now()).unwrap();
    supervisor.answers(Answer::Nothing);
    let error = impatient(&world).unprepare("c-1").unwrap_err().to_string();
    assert!(error.contains("has not ended the MPS daemon of claim c-1 within 10ms"), "{error}");
    assert!(error.contains("delete the pod of DaemonSet aliquot-mps on this node"), "{error}");
    // Its GPUs are nobody else's meanwhile.
    assert!(world.node().prepare(&request("c-2", &[("r", "gpu-0")]), false, now()).is_err());
    supervisor.answers(Answer::Works);
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
}

#[test]
fn a_new_supervisor_finds_what_is_asked_and_the_claim_goes_on() {
    let world = world();
    drop({
        let supervisor = Supervisor::start(world.mps());
        world.node().prepare(&wanted(), false, now()).unwrap();
        supervisor
    });
    let inode = || {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(world.mps().join("c-1/pipe")).unwrap().ino()
    };
    let before = inode();
    let _supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    assert_eq!(inode(), before, "containers that run keep what they have mounted");
}

/// The daemon's root has the device nodes of the numbers that were asked.
#[test]
fn a_daemon_is_asked_for_anew_when_the_driver_numbers_the_claims_gpu_otherwise() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    let mut wanted = request("c-1", &[("a", GPUS[0])]);
    wanted.devices.iter_mut().for_each(|device| device.settings = Settings::Mps(config()));
    world.node().prepare(&wanted, false, now()).unwrap();
    let minors =
        || -> Vec<u32> { supervisor.asks().iter().flat_map(|ask| &ask.gpus).map(|gpu| gpu.minor).collect() };
    assert_eq!(minors(), [1]);
    assert!(world.node().renumber().unwrap().rewritten.is_empty());
    assert_eq!(minors(), [1]);
    // As after the driver was loaded anew.
    let mut node = world.node();
    let renumbered = GpuInfo { minor: 0, ..h100_80(1) };
    node.machine.gpus = Arc::new(FakeGpus::new([renumbered]));
    let ask = world.mps().join("c-1/ask.json");
    let before = fs::read(&ask).unwrap();
    assert_eq!(node.renumber().unwrap().rewritten.len(), 1);
    assert_eq!(minors(), [0]);
    // As if the agent had been killed between the spec and the ask.
    fs::write(&ask, before).unwrap();
    node.renumber().unwrap();
    assert_eq!(minors(), [0]);
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
}

/// Directories inside each other.
fn nest(dir: &Path, depth: usize) {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
    let mut at: OwnedFd = File::open(dir).unwrap().into();
    for _ in 0..depth {
        mkdirat(&at, "d", Mode::from_bits_truncate(0o755)).unwrap();
        at = openat(&at, "d", flags, Mode::empty()).unwrap();
    }
}

#[test]
fn twenty_thousand_nested_directories_of_a_container_go_with_the_daemon() {
    let world = world();
    let _supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    nest(&world.mps().join("c-1/shm"), 20_000);
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
    // What an agent that was killed before left.
    let ended = world.mps().join("c-2.ended");
    fs::create_dir_all(&ended).unwrap();
    nest(&ended, 20_000);
    assert_eq!(world.node().recover().unwrap().orphans, ["MPS daemon of claim c-2"]);
    world.assert_clean();
}

#[rstest]
#[case::from_outside(ComputeMode::Prohibited, Some("compute mode PROHIBITED"))]
#[case::left_over(ComputeMode::ExclusiveProcess, None)]
fn a_gpu_on_which_nothing_is_to_run_is_left_alone(#[case] mode: ComputeMode, #[case] words: Option<&str>) {
    let world = world();
    let _supervisor = Supervisor::start(world.mps());
    let gpu = h100_80(0).uuid;
    world.gpus.set_compute_mode(&gpu, mode).unwrap();
    let error = world.node().prepare(&wanted(), false, now()).err().map(|error| error.to_string());
    assert_eq!(error.is_some(), words.is_some(), "{error:?}");
    assert!(words.is_none_or(|words| error.as_ref().is_some_and(|error| error.contains(words))), "{error:?}");
    world.node().unprepare("c-1").unwrap();
    let left = if words.is_some() { mode } else { ComputeMode::Default };
    assert_eq!(modes(&world), [left, ComputeMode::Default]);
    assert_eq!(world.files(), [""; 0]);
}

#[test]
fn what_a_claim_left_that_is_in_no_record_is_ended_at_the_next_start() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    let mut lost = world.mps().join("c-1");
    for uid in ["c-2", "c-3.ended"] {
        lost.set_file_name(uid);
        fs::create_dir_all(lost.join("pipe")).unwrap();
    }
    let recovery = world.node().recover().unwrap();
    assert_eq!(recovery.orphans, ["MPS daemon of claim c-2", "MPS daemon of claim c-3"]);
    assert_eq!(supervisor.asks().len(), 1, "a claim with a record keeps its daemon");
    world.node().unprepare("c-1").unwrap();
    world.assert_clean();
}

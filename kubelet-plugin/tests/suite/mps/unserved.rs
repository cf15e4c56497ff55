//! Claims whose supervisor is gone, with or without its daemons.

use super::common::supervisor::Supervisor;
use super::common::{World, now, request};
use super::{modes, wanted, world};
use aliquot_nvml::fake::h100_80;
use aliquot_nvml::{ComputeMode, GpuProcess, ProcessKind};
use std::fs;

/// A process on the second GPU.
fn starts(world: &World, pid: u32, kind: ProcessKind) {
    let name = Some("nvidia-cuda-mps-server".to_owned());
    let process =
        GpuProcess { pid, name, kind, memory_bytes: None, gpu_instance: None, compute_instance: None };
    world.gpus.start_process(&h100_80(1).uuid, process);
}

#[test]
fn a_claim_whose_supervisor_and_daemon_are_gone_is_released() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    drop(supervisor);
    let error = world.node().prepare(&wanted(), false, now()).unwrap_err().to_string();
    assert!(error.contains("kubeletPlugin.mps.enabled"), "a second pod would find no daemon: {error}");
    assert!(world.files().contains(&"c-1".to_owned()), "what containers run with stays: {:?}", world.files());
    // A screen is nobody's daemon.
    starts(&world, 7, ProcessKind::Graphics);
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
}

/// As after a SIGKILL of the supervisor, whose processes live on until the runtime kills its container.
#[test]
fn a_claim_keeps_its_gpus_while_processes_of_a_daemon_without_a_supervisor_run_there() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    starts(&world, 4711, ProcessKind::Compute);
    drop(supervisor);
    for _ in 0..2 {
        let error = world.node().unprepare("c-1").unwrap_err().to_string();
        for words in ["claim c-1", "nvidia-cuda-mps-server", "4711", "DaemonSet aliquot-mps on this node"] {
            assert!(error.contains(words), "{words}: {error}");
        }
    }
    // Its GPUs are nobody else's meanwhile.
    assert!(world.node().prepare(&request("c-2", &[("r", "gpu-0")]), false, now()).is_err());
    world.gpus.stop_process(4711);
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
}

#[test]
fn after_a_reboot_processes_on_a_claims_gpus_are_not_its_daemons() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    drop(supervisor);
    world.reboot("boot-2");
    starts(&world, 4711, ProcessKind::Compute);
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
}

#[test]
fn a_daemon_without_record_and_supervisor_keeps_its_gpus_exclusive_while_its_processes_run() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    starts(&world, 4711, ProcessKind::Mps);
    drop(supervisor);
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        fs::remove_file(world.data().join(name)).unwrap();
    }
    let node = world.node();
    node.recover().unwrap();
    for _ in 0..2 {
        let error = node.unprepare("c-1").unwrap_err().to_string();
        assert!(error.contains("4711"), "{error}");
        assert_eq!(modes(&world), [ComputeMode::ExclusiveProcess; 2]);
    }
    world.gpus.stop_process(4711);
    assert!(node.unprepare("c-1").unwrap());
    world.assert_clean();
}

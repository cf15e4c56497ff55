//! Persistence mode: with it on the driver does not give a GPU away.

use super::common::kill::killer;
use super::common::now;
use super::scene::Scene;
use super::{only_vm, wanted};
use aliquot_nvml::fake::until_killed;
use std::fs;

#[test]
fn a_gpu_that_its_driver_keeps_initialised_goes_and_is_kept_so_when_it_is_back() {
    let scene = Scene::new();
    scene.persist();
    let node = scene.node();
    node.prepare(&only_vm("c-1"), false, now()).unwrap();
    assert_eq!(scene.drivers()[0].as_deref(), Some("vfio-pci"));
    assert!(node.unprepare("c-1").unwrap());
    assert!(scene.is_persistent());
    scene.assert_clean();
    // One that was not is not afterwards.
    let scene = Scene::new();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    assert!(scene.node().unprepare("c-1").unwrap());
    assert!(!scene.is_persistent());
}

#[test]
fn a_kill_at_any_point_leaves_no_gpu_without_its_persistence_mode() {
    let mut points = 0;
    for at in 1.. {
        let scene = Scene::new();
        scene.persist();
        let (probe, _) = killer(at);
        let node = scene.node_with(probe);
        let done = until_killed(|| {
            node.prepare(&wanted(), false, now()).unwrap();
            node.unprepare("c-1").unwrap();
        });
        if done.is_some() {
            break;
        }
        points += 1;
        let node = scene.node();
        let recovery = node.recover().unwrap();
        assert!(recovery.failed.is_empty(), "killed at point {at}: {recovery:?}");
        if scene.world.ledger().claims.is_empty() {
            assert!(scene.is_persistent(), "killed at point {at}");
        }
        node.prepare(&wanted(), false, now()).unwrap();
        assert!(node.unprepare("c-1").unwrap());
        assert!(scene.is_persistent(), "killed at point {at}");
        scene.assert_clean();
    }
    // One more each way than without.
    assert_eq!(points, 17 + 16 + 2);
}

#[test]
fn a_daemon_that_keeps_a_gpu_open_is_named_and_nothing_is_changed() {
    let scene = Scene::new();
    scene.persist();
    let daemon = scene.open("4712", "nvidia-persistenced", "/dev/nvidia0");
    let refused = scene.node().prepare(&only_vm("c-1"), false, now()).unwrap_err().to_string();
    assert!(refused.contains("process 4712 (nvidia-persistenced)") && refused.contains("-pm 0"), "{refused}");
    assert!(scene.is_persistent());
    scene.assert_clean();
    fs::remove_dir_all(daemon).unwrap();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
}

#[test]
fn a_mode_that_cannot_be_had_again_keeps_no_gpu_away() {
    let scene = Scene::new();
    scene.persist();
    let node = scene.node();
    node.prepare(&only_vm("c-1"), false, now()).unwrap();
    let refused = aliquot_nvml::fake::FaultKind::Fail(aliquot_nvml::NvmlCode::NO_PERMISSION);
    scene.world.gpus.fault("nvmlDeviceSetPersistenceMode", 1, refused);
    assert!(node.unprepare("c-1").unwrap());
    scene.assert_clean();
    // Any other failure is tried again.
    scene.persist();
    node.prepare(&only_vm("c-1"), false, now()).unwrap();
    let failed = aliquot_nvml::fake::FaultKind::Fail(aliquot_nvml::NvmlCode::UNKNOWN);
    scene.world.gpus.fault("nvmlDeviceSetPersistenceMode", 1, failed);
    assert!(node.unprepare("c-1").unwrap_err().to_string().contains("persistence mode"));
    assert!(node.unprepare("c-1").unwrap());
    assert!(scene.is_persistent());
    scene.assert_clean();
}

//! The checkpoint is lost while a virtual machine has a GPU, which NVML does not list then.

use super::common::kill::killer;
use super::common::{now, request};
use super::scene::Scene;
use super::{only_vm, wanted};
use aliquot_kubelet_plugin::prepare::{Conclusion, Node};
use aliquot_nvml::Gpus;
use aliquot_nvml::fake::until_killed;
use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

/// The API says that no pod runs with anything.
fn conclude(node: &Node) -> Conclusion {
    node.conclude(BTreeMap::new(), Instant::now()).unwrap()
}

#[test]
fn its_record_is_made_anew_and_the_gpu_is_there_and_nobody_elses_meanwhile() {
    let scene = Scene::new();
    scene.persist();
    let expected = scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    let before = scene.node().record("c-1").unwrap().unwrap();
    scene.lose_checkpoint();
    let node = scene.node();
    assert_eq!(node.recover().unwrap().unaccounted.len(), 1);
    let overview = node.overview().unwrap().0;
    assert_eq!(overview.passed.iter().collect::<Vec<_>>(), [&Scene::gpu()]);
    assert_eq!(overview.inventory.unwrap().gpus.len(), 2);
    for device in ["gpu-0", "gpu-0-vfio", "gpu-0-share"] {
        let refused = node.prepare(&request("c-2", &[("r", device)]), false, now()).unwrap_err().to_string();
        assert!(refused.contains("c-1"), "{device}: {refused}");
    }
    assert!(node.rebuild(&only_vm("c-1"), now()).unwrap());
    let record = node.record("c-1").unwrap().unwrap();
    assert_eq!((record.devices, record.steps), (before.devices, before.steps));
    assert!(matches!(conclude(&node), Conclusion::Found { .. }));
    assert_eq!(node.prepare(&only_vm("c-1"), false, now()).unwrap(), expected);
    assert!(node.unprepare("c-1").unwrap());
    assert!(scene.is_persistent());
    scene.assert_clean();
}

/// It also was divided before the claim, so that the record begins with switching that off.
#[test]
fn the_record_of_a_board_that_was_in_mig_mode_is_made_anew() {
    let scene = Scene::new();
    scene.world.gpus.set_mig_mode(&Scene::gpu(), true).unwrap();
    let expected = scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    scene.lose_checkpoint();
    scene.node().recover().unwrap();
    assert_eq!(scene.node().prepare(&only_vm("c-1"), false, now()).unwrap(), expected);
    assert!(scene.node().unprepare("c-1").unwrap());
    scene.assert_clean();
}

#[test]
fn killed_at_any_point_and_asked_again_the_claim_is_prepared() {
    let expected = Scene::new().node().prepare(&wanted(), false, now()).unwrap();
    for at in 1.. {
        let scene = Scene::new();
        scene.persist();
        let (probe, _) = killer(at);
        let node = scene.node_with(probe);
        let done = until_killed(|| node.prepare(&wanted(), false, now()).unwrap()).is_some();
        scene.lose_checkpoint();
        let node = scene.node();
        node.recover().unwrap();
        assert_eq!(node.prepare(&wanted(), false, now()).unwrap(), expected, "killed at point {at}");
        assert!(node.unprepare("c-1").unwrap());
        conclude(&node);
        assert!(scene.is_persistent(), "killed at point {at}");
        scene.assert_clean();
        if done {
            assert!(at > 8, "{at}");
            break;
        }
    }
}

#[test]
fn killed_at_any_point_and_never_asked_again_the_gpu_comes_back() {
    for at in 1.. {
        let scene = Scene::new();
        scene.persist();
        let (probe, _) = killer(at);
        let node = scene.node_with(probe);
        let done = until_killed(|| node.prepare(&only_vm("c-1"), false, now()).unwrap()).is_some();
        scene.lose_checkpoint();
        let node = scene.node();
        // A spec says that a pod may be running with it, which the API knows.
        for lost in node.recover().unwrap().unaccounted {
            node.give_up(&lost.uid, now()).unwrap();
        }
        conclude(&node);
        assert!(scene.is_persistent(), "killed at point {at}");
        scene.assert_clean();
        if done {
            assert!(at > 8, "{at}");
            break;
        }
    }
}

#[test]
fn one_that_a_machine_uses_stays_until_it_has_ended() {
    let scene = Scene::new();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    let machine = scene.open("4713", "qemu-system-x86", "/dev/vfio/15");
    scene.lose_checkpoint();
    // Nothing says who has it but the agent's own note.
    fs::remove_dir_all(scene.world.cdi()).unwrap();
    let node = scene.node();
    node.recover().unwrap();
    for _ in 0..2 {
        assert_eq!(conclude(&node), Conclusion::Unchanged);
        assert_eq!(scene.drivers()[0].as_deref(), Some("vfio-pci"));
    }
    let refused = node.prepare(&request("c-2", &[("r", "gpu-0")]), false, now());
    assert!(refused.is_err());
    fs::remove_dir_all(machine).unwrap();
    conclude(&node);
    scene.assert_clean();
}

/// With the agent's whole directory gone only the CDI spec is left, and what NVML knew of the GPU is not in it.
#[test]
fn without_any_note_it_is_held_and_comes_back_with_its_claim() {
    let scene = Scene::new();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    fs::remove_dir_all(scene.world.data()).unwrap();
    let node = scene.node();
    let recovery = node.recover().unwrap();
    assert_eq!(recovery.unaccounted.len(), 1, "{recovery:?}");
    assert!(node.prepare(&only_vm("c-1"), false, now()).is_err());
    assert!(node.prepare(&request("c-2", &[("r", "gpu-0")]), false, now()).is_err());
    assert_eq!(scene.drivers()[0].as_deref(), Some("vfio-pci"));
    assert!(node.give_up("c-1", now()).unwrap());
    conclude(&node);
    scene.assert_clean();
}

#[test]
fn a_gpu_that_an_administrator_gave_to_vfio_is_left_alone() {
    let scene = Scene::new();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    // As if it had been somebody else.
    for dir in [scene.world.data(), scene.world.cdi()] {
        fs::remove_dir_all(dir).unwrap();
    }
    let node = scene.node();
    node.recover().unwrap();
    conclude(&node);
    assert_eq!(scene.drivers()[0].as_deref(), Some("vfio-pci"));
}

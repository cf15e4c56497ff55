//! Claims whose records were lost.

use super::common::supervisor::Supervisor;
use super::common::{World, now};
use super::{modes, wanted, world};
use aliquot_kubelet_plugin::prepare::Conclusion;
use aliquot_nvml::ComputeMode;
use std::collections::BTreeMap;
use std::fs;

fn lose(world: &World) {
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        fs::remove_file(world.data().join(name)).unwrap();
    }
}

#[test]
fn a_record_is_made_anew_and_the_daemon_goes_on() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    let before = world.ledger().claims;
    lose(&world);
    let node = world.node();
    assert_eq!(node.recover().unwrap().orphans, [""; 0], "a pod may be running with it");
    assert!(node.rebuild(&wanted(), now()).unwrap());
    assert_eq!(world.ledger().claims, before);
    assert!(matches!(node.conclude(BTreeMap::new()).unwrap(), Conclusion::Found { .. }));
    assert_eq!(supervisor.asks().len(), 1);
    assert!(node.unprepare("c-1").unwrap());
    world.assert_clean();
}

#[test]
fn a_claim_without_a_record_gives_its_gpus_back_to_all_programs() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    lose(&world);
    let node = world.node();
    node.recover().unwrap();
    assert!(node.unprepare("c-1").unwrap());
    assert_eq!(supervisor.asks(), []);
    world.assert_clean();
}

#[test]
fn a_daemon_of_which_nothing_else_is_left_is_ended_once_all_is_accounted_for() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    lose(&world);
    fs::remove_dir_all(world.cdi()).unwrap();
    let node = world.node();
    node.recover().unwrap();
    assert_eq!(supervisor.asks().len(), 1, "until the API has said who runs here");
    let Conclusion::Found { orphans, .. } = node.conclude(BTreeMap::new()).unwrap() else { panic!() };
    assert_eq!(orphans, ["MPS daemon of claim c-1"]);
    assert_eq!(modes(&world), [ComputeMode::Default; 2]);
    world.assert_clean();
}

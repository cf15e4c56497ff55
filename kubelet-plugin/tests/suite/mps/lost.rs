//! Claims whose records were lost.

use super::common::kill::settle_daemons;
use super::common::supervisor::{Answer, Supervisor};
use super::common::{World, now, request};
use super::{impatient, modes, wanted, world};
use aliquot_kubelet_plugin::ledger::Ledger;
use aliquot_kubelet_plugin::prepare::Conclusion;
use aliquot_nvml::ComputeMode;
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;
use std::time::Instant;

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
    assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Found { .. }));
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
    let Conclusion::Found { orphans: mut ended, .. } =
        node.conclude(BTreeMap::new(), Instant::now()).unwrap()
    else {
        panic!()
    };
    ended.extend(settle_daemons(&node));
    assert_eq!(ended, ["MPS daemon of claim c-1"]);
    assert_eq!(modes(&world), [ComputeMode::Default; 2]);
    world.assert_clean();
}

#[test]
fn a_supervisor_that_hangs_does_not_keep_the_agent_from_starting() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    for uid in ["c-1", "c-2"] {
        let device = if uid == "c-1" { "gpu-0-mps" } else { "gpu-1-mps" };
        world.node().prepare(&request(uid, &[("r", device)]), false, now()).unwrap();
    }
    let node = world.node();
    let mut locked = node.store.lock(Duration::from_secs(1)).unwrap();
    let ledger = Ledger { claims: BTreeMap::new(), ..locked.load().unwrap().ledger };
    locked.save(&ledger).unwrap();
    drop(locked);
    assert_eq!(world.node().recover().unwrap().orphans, [""; 0], "their specs say that pods may be running");
    fs::remove_dir_all(world.cdi()).unwrap();
    supervisor.answers(Answer::Nothing);
    let node = impatient(&world);
    assert!(!node.recover().unwrap().orphans.iter().any(|orphan| orphan.starts_with("MPS")));
    assert_eq!(supervisor.asks(), [], "all of them were told to end");
    assert_eq!(modes(&world), [ComputeMode::ExclusiveProcess; 2]);
    assert_eq!(node.end_left_daemons().unwrap().failed.len(), 2);
    supervisor.answers(Answer::Works);
    assert_eq!(settle_daemons(&node), ["MPS daemon of claim c-1", "MPS daemon of claim c-2"]);
    world.assert_clean();
}

//! Kills and failures of the agent while it sets a claim up, or takes it down.

use super::common::kill::{self, at_each_point, killer};
use super::common::supervisor::{Answer, Supervisor};
use super::common::{World, now, request};
use super::{impatient, modes, wanted, world};
use aliquot_kubelet_plugin::ledger::State;
use aliquot_kubelet_plugin::mps::Mps;
use aliquot_kubelet_plugin::prepare::Prepared;
use aliquot_kubelet_plugin::share::RegionStorage;
use aliquot_nvml::fake::{FaultKind, until_killed};
use aliquot_nvml::{ComputeMode, NvmlCode};
use std::time::Duration;

fn settles_after_restart(world: &World, supervisor: &Supervisor, what: &str) {
    let used = |_: &[Prepared]| {
        assert_eq!(modes(world), [ComputeMode::ExclusiveProcess; 2], "{what}");
        assert_eq!(supervisor.asks().len(), 1, "{what}");
    };
    kill::settles_after_restart(world, &wanted(), used, what);
}

/// A node with a supervisor.
fn served() -> (World, Supervisor) {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    (world, supervisor)
}

/// The same, with a prepared claim.
fn prepared() -> (World, Supervisor) {
    let (world, supervisor) = served();
    world.node().prepare(&wanted(), false, now()).unwrap();
    (world, supervisor)
}

#[test]
fn a_kill_at_any_point_of_prepare_converges() {
    let points = at_each_point(served, |node| node.prepare(&wanted(), false, now()), settles_after_restart);
    // Write-ahead, four steps, completion, each with a point before and after; directory and ask of the daemon.
    assert_eq!(points, 14);
}

#[test]
fn a_kill_at_any_point_of_unprepare_converges() {
    let points = at_each_point(
        prepared,
        |node| node.unprepare("c-1"),
        |world, _, _| {
            let node = world.node();
            node.recover().unwrap();
            node.unprepare("c-1").unwrap();
            world.assert_clean();
        },
    );
    assert_eq!(points, 14);
}

/// Nobody asks for the claims again, and there are several.
#[test]
fn a_start_waits_for_no_daemon_and_what_is_half_given_back_is_finished_once_they_have_ended() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    for (uid, device) in [("c-1", "gpu-0-mps"), ("c-2", "gpu-1-mps")] {
        let node = world.node();
        node.prepare(&request(uid, &[("r", device)]), false, now()).unwrap();
        let (probe, _) = killer(3);
        assert!(until_killed(|| world.node_with(probe).unprepare(uid)).is_none());
    }
    supervisor.answers(Answer::Nothing);
    let mut node = world.node();
    // Whoever waited would do so for longer than the test may take.
    node.machine.mps = Mps::new(world.mps(), RegionStorage::Directory, Duration::from_secs(100_000));
    let recovery = node.recover().unwrap();
    let failed: Vec<&str> = recovery.failed.iter().map(|(claim, _)| claim.uid.as_str()).collect();
    assert_eq!(failed, ["c-1", "c-2"]);
    assert_eq!(supervisor.asks(), [], "all of them were told to end");
    let left = node.end_left_daemons().unwrap();
    assert_eq!((left.ended.len(), left.failed.len()), (0, 2), "{left:?}");
    assert!(left.failed[0].1.contains("has not ended the MPS daemon of claim c-1"), "{left:?}");
    assert_eq!(modes(&world), [ComputeMode::ExclusiveProcess; 2]);
    for device in ["gpu-0", "gpu-1"] {
        let error = node.prepare(&request("c-3", &[("r", device)]), false, now()).unwrap_err().to_string();
        assert!(error.contains("being unprepared"), "{error}");
    }
    supervisor.answers(Answer::Works);
    let ended = ["claim ns/claim-c-1 (uid c-1)", "claim ns/claim-c-2 (uid c-2)"];
    assert_eq!(kill::settle_daemons(&node), ended);
    world.assert_clean();
}

/// A claim of which one GPU is through MPS, and another a partition.
#[test]
fn a_daemon_that_does_not_end_keeps_its_gpu_exclusive_and_the_whole_claim_in_the_record() {
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    let wanted = request("c-1", &[("a", "gpu-0-mps"), ("b", "gpu-1-mig-1g10gb-19-6")]);
    world.node().prepare(&wanted, false, now()).unwrap();
    let before = world.ledger().claims["c-1"].clone();
    supervisor.answers(Answer::Nothing);
    for _ in 0..2 {
        let error = impatient(&world).unprepare("c-1").unwrap_err().to_string();
        assert!(error.contains("end the MPS daemon of claim c-1"), "{error}");
        assert_eq!(modes(&world)[0], ComputeMode::ExclusiveProcess, "a server may be computing");
        assert_eq!(world.instances(), [], "what can be undone is");
        let after = world.ledger().claims["c-1"].clone();
        assert_eq!((after.state, &after.steps), (State::Unpreparing, &before.steps));
        assert_eq!(after.devices, before.devices);
    }
    for device in ["gpu-0", "gpu-0-mps", "gpu-1-mig-1g10gb-19-6"] {
        let other = request("c-2", &[("r", device)]);
        let error = impatient(&world).prepare(&other, false, now()).unwrap_err().to_string();
        assert!(error.contains("c-1"), "{device}: {error}");
    }
    supervisor.answers(Answer::Works);
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
}

#[test]
fn a_kill_while_preparing_again_after_a_reboot_keeps_the_claims_place_and_makes_the_daemon_anew() {
    for at in 1.. {
        let world = world();
        let supervisor = Supervisor::start(world.mps());
        world.node().prepare(&wanted(), false, now()).unwrap();
        drop(supervisor);
        world.reboot("boot-2");
        let supervisor = Supervisor::start(world.mps());
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| {
            node.recover().unwrap();
            node.prepare(&wanted(), false, now())
        });
        let node = world.node();
        node.recover().unwrap();
        let other = request("c-2", &[("x", "gpu-0-mps")]);
        assert!(node.prepare(&other, false, now()).is_err(), "killed at {at}: the place was given away");
        node.prepare(&wanted(), false, now()).unwrap();
        assert_eq!(supervisor.asks().len(), 1, "killed at {at}");
        node.unprepare("c-1").unwrap();
        world.assert_clean();
        if done.is_some() {
            break;
        }
    }
}

/// The daemon of a claim that nobody asks for again after a reboot is not kept for it.
#[test]
fn after_a_reboot_a_start_ends_daemons_that_no_container_can_be_using() {
    let world = world();
    let first = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    drop(first);
    world.reboot("boot-2");
    let supervisor = Supervisor::start(world.mps());
    let node = world.node();
    let mut ended = node.recover().unwrap().orphans;
    ended.extend(kill::settle_daemons(&node));
    assert_eq!(ended, ["MPS daemon of claim c-1"]);
    assert_eq!(supervisor.asks(), []);
    assert!(world.ledger().claims.contains_key("c-1"), "the claim keeps its place");
    world.node().unprepare("c-1").unwrap();
    world.assert_clean();
}

#[test]
fn a_compute_mode_that_cannot_be_set_is_told_and_what_was_set_is_undone() {
    for (function, nth) in [("nvmlDeviceSetComputeMode", 1), ("nvmlDeviceSetComputeMode", 2)] {
        let world = world();
        let supervisor = Supervisor::start(world.mps());
        world.gpus.fault(function, nth, FaultKind::Fail(NvmlCode::NO_PERMISSION));
        let error = world.node().prepare(&wanted(), false, now()).unwrap_err().to_string();
        assert!(error.contains("to EXCLUSIVE_PROCESS"), "{error}");
        world.gpus.clear_faults();
        settles_after_restart(&world, &supervisor, &format!("{nth} of {function}"));
    }
}

/// It would keep the next claim's second process from running.
#[test]
fn a_compute_mode_that_cannot_be_reset_keeps_the_claim_until_it_can() {
    let world = world();
    let _supervisor = Supervisor::start(world.mps());
    world.node().prepare(&wanted(), false, now()).unwrap();
    world.gpus.fault("nvmlDeviceSetComputeMode", 1, FaultKind::Fail(NvmlCode::UNKNOWN));
    let error = world.node().unprepare("c-1").unwrap_err().to_string();
    assert!(error.contains("reset the compute mode"), "{error}");
    world.gpus.clear_faults();
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
}

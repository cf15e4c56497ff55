//! Kills and failures of the agent while it sets a claim up, or takes it down.

use super::common::kill::killer;
use super::common::supervisor::Supervisor;
use super::common::{World, now};
use super::{modes, wanted, world};
use aliquot_kubelet_plugin::ledger::State;
use aliquot_nvml::fake::{FaultKind, until_killed};
use aliquot_nvml::{ComputeMode, NvmlCode};

/// A new process comes up, the kubelet asks again, uses the claim and gives it back.
fn settles_after_restart(world: &World, supervisor: &Supervisor, what: &str) {
    world.gpus.clear_faults();
    let node = world.node();
    let recovery = node.recover().unwrap();
    assert!(recovery.failed.is_empty(), "{what}: {recovery:?}");
    for record in world.ledger().claims.values() {
        assert_eq!(record.state, State::Completed, "{what}");
    }
    if world.ledger().claims.is_empty() {
        world.assert_clean();
    }
    node.prepare(&wanted(), false, now()).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(modes(world), [ComputeMode::ExclusiveProcess; 2], "{what}");
    assert_eq!(supervisor.asks().len(), 1, "{what}");
    assert!(node.unprepare("c-1").unwrap(), "{what}");
    world.assert_clean();
}

#[test]
fn a_kill_at_any_point_of_prepare_converges() {
    let mut points = 0;
    for at in 1.. {
        let world = world();
        let supervisor = Supervisor::start(world.mps());
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        if until_killed(|| node.prepare(&wanted(), false, now())).is_some() {
            break;
        }
        points += 1;
        settles_after_restart(&world, &supervisor, &format!("killed at point {at}"));
    }
    // Write-ahead, four steps, completion, each with a point before and after; directory and ask of the daemon.
    assert_eq!(points, 14);
}

#[test]
fn a_kill_at_any_point_of_unprepare_converges() {
    let mut points = 0;
    for at in 1.. {
        let world = world();
        let _supervisor = Supervisor::start(world.mps());
        world.node().prepare(&wanted(), false, now()).unwrap();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        if until_killed(|| node.unprepare("c-1")).is_some() {
            world.assert_clean();
            break;
        }
        points += 1;
        let node = world.node();
        node.recover().unwrap();
        node.unprepare("c-1").unwrap();
        world.assert_clean();
    }
    assert_eq!(points, 14);
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
        let other = super::request("c-2", &[("x", "gpu-0-mps")]);
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
    let recovery = world.node().recover().unwrap();
    assert_eq!(recovery.orphans, ["MPS daemon of claim c-1"]);
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

//! Kill and fail at every point of prepare and unprepare; after a restart the node must always end in
//! the same state: no leaked GPU instance, no lost claim, the same CDI ids.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;
mod metadata;
mod unload;

use aliquot_api::v1alpha1::NodeUsageStatus;
use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::ledger::State;
use aliquot_kubelet_plugin::prepare::{Node, Prepared};
use aliquot_model::{MicroGpus, MigProfile, ProfileName};
use aliquot_nvml::NvmlCode;
use aliquot_nvml::fake::until_killed;
use aliquot_nvml::fake::{FUNCTIONS, FakeGpus, FaultKind, a100_40, h100_80};
use common::kill::{self, at_each_point, killer};
use common::{World, now, request};
use jiff::Timestamp;
use rstest::rstest;

/// A claim of every kind of step: mode, two partitions, a share, a whole GPU.
fn wanted() -> Request {
    request(
        "c-1",
        &[
            ("a", "gpu-0-mig-1g10gb-19-6"),
            ("b", "gpu-0-mig-3g40gb-9-0"),
            ("c", "gpu-1-share"),
            ("d", "gpu-2"),
        ],
    )
}

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1), h100_80(2)]))
}

fn ids(prepared: &[Prepared]) -> Vec<Vec<String>> {
    prepared.iter().map(|device| device.cdi.clone()).collect()
}

/// The answer of an undisturbed prepare.
fn expected() -> Vec<Vec<String>> {
    let world = world();
    ids(&world.node().prepare(&wanted(), false, now()).unwrap())
}

/// The kubelet gets the same answer after a restart as without a kill.
fn settles_after_restart(world: &World, what: &str) {
    let used = |prepared: &[Prepared]| {
        assert_eq!(ids(prepared), expected(), "{what}");
        assert_eq!(world.instances(), [(0, 0, 4, true), (0, 6, 1, true)], "{what}");
    };
    kill::settles_after_restart(world, &wanted(), used, what);
}

#[test]
fn a_kill_at_any_point_of_prepare_converges() {
    let prepare = |node: &Node| node.prepare(&wanted(), false, now());
    let points =
        at_each_point(|| (world(), ()), prepare, |world, (), what| settles_after_restart(world, what));
    // Write-ahead, five steps, completion, each with a point before and after.
    assert_eq!(points, 14);
}

#[test]
fn a_kill_at_any_point_of_unprepare_converges() {
    let prepared = || {
        let world = world();
        world.node().prepare(&wanted(), false, now()).unwrap();
        (world, ())
    };
    let points = at_each_point(
        prepared,
        |node| node.unprepare("c-1"),
        |world, (), _| {
            // The kubelet asks again; a restart alone must not resurrect the claim either.
            let node = world.node();
            node.recover().unwrap();
            node.unprepare("c-1").unwrap();
            world.assert_clean();
        },
    );
    assert_eq!(points, 14);
}

/// What the controller would be told.
fn released(world: &World) -> Vec<(u64, String, i64)> {
    let spec = world.node().usage(&NodeUsageStatus::default()).unwrap();
    assert!(spec.held.is_empty(), "{spec:?}");
    spec.released.into_iter().map(|r| (r.number, r.claim.uid, r.until)).collect()
}

#[test]
fn a_kill_at_any_point_of_unprepare_records_the_release_once_with_its_first_time() {
    let later = |seconds: i64| Timestamp::from_second(now().as_second() + seconds).unwrap();
    let mut with_first_time = 0;
    for at in 1.. {
        let world = world();
        world.node().prepare(&wanted(), false, now()).unwrap();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| node.unprepare_at("c-1", later(10))).is_some();
        // A restart long after, and a kubelet that asks again later still.
        let node = world.node();
        node.recover().unwrap();
        node.unprepare_at("c-1", later(6000)).unwrap();
        let found = released(&world);
        let until = found.first().map(|(_, _, until)| *until);
        assert_eq!(found.len(), 1, "killed at {at}: {found:?}");
        assert_eq!((found[0].0, found[0].1.as_str()), (1, "c-1"), "killed at {at}");
        // Before the first write-ahead nothing is known of the first time.
        let first = until == Some(later(10).as_second());
        assert!(first || (at == 1 && until == Some(later(6000).as_second())), "killed at {at}: {found:?}");
        with_first_time += u32::from(first);
        if done {
            break;
        }
    }
    assert!(with_first_time > 5, "{with_first_time}");
}

#[test]
fn a_kill_at_any_point_of_prepare_records_no_release_until_the_claim_is_given_back() {
    for at in 1.. {
        let world = world();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| node.prepare(&wanted(), false, now())).is_some();
        let node = world.node();
        node.recover().unwrap();
        node.prepare(&wanted(), false, now()).unwrap();
        let spec = node.usage(&NodeUsageStatus::default()).unwrap();
        assert!(spec.released.is_empty(), "killed at {at}: {spec:?}");
        assert_eq!(spec.held.iter().map(|held| held.uid.as_str()).collect::<Vec<_>>(), ["c-1"]);
        node.unprepare("c-1").unwrap();
        assert_eq!(released(&world).len(), 1, "killed at {at}");
        if done {
            break;
        }
    }
}

#[test]
fn a_kill_while_forgetting_what_was_acknowledged_neither_loses_nor_renumbers_anything() {
    for at in 1.. {
        let world = world();
        let node = world.node();
        for uid in ["c-1", "c-2", "c-3"] {
            node.prepare(&request(uid, &[("a", "gpu-2")]), false, now()).unwrap();
            node.unprepare(uid).unwrap();
        }
        let ledger = node.usage(&NodeUsageStatus::default()).unwrap().ledger;
        let answer = NodeUsageStatus { ledger, acknowledged: 2 };
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| node.usage(&answer)).is_some();
        let spec = world.node().usage(&answer).unwrap();
        assert_eq!(spec.released.iter().map(|r| r.number).collect::<Vec<_>>(), [3], "killed at {at}");
        assert_eq!(spec.ledger, answer.ledger);
        if done {
            break;
        }
    }
}

#[test]
fn a_reboot_does_not_change_since_when_a_claim_is_charged() {
    let world = world();
    let wanted = Request { charged_since: Some(now().as_second() - 500), ..wanted() };
    world.node().prepare(&wanted, false, now()).unwrap();
    world.reboot("boot-2");
    let node = world.node();
    node.recover().unwrap();
    let later = Timestamp::from_second(now().as_second() + 900).unwrap();
    node.prepare(&Request { charged_since: None, ..wanted }, false, later).unwrap();
    let spec = node.usage(&NodeUsageStatus::default()).unwrap();
    assert_eq!(spec.held[0].since, now().as_second() - 500);
}

#[test]
fn what_a_claim_asked_for_first_is_told_beside_what_it_was_given() {
    let world = world();
    let node = world.node();
    let mut wanted = request("c-1", &[("a/larger", "gpu-0-mig-3g40gb-9-0"), ("b", "gpu-0-mig-1g10gb-19-6")]);
    wanted.asked.insert("a/larger".to_owned(), ProfileName::new("2g.20gb"));
    node.prepare(&wanted, false, now()).unwrap();
    let held = node.usage(&NodeUsageStatus::default()).unwrap().held.remove(0);
    let part = |profile: &str| {
        let gpu = h100_80(0);
        let of = |known: &&MigProfile| known.name.as_str() == profile;
        MicroGpus::of_partition(gpu.profiles().iter().find(of).unwrap(), &gpu)
    };
    assert_eq!(held.micro_gpus, part("3g.40gb").plus(part("1g.10gb")));
    assert_eq!(held.asked_micro_gpus, Some(part("2g.20gb").plus(part("1g.10gb"))));
    node.unprepare("c-1").unwrap();
    let released = node.usage(&NodeUsageStatus::default()).unwrap().released.remove(0);
    assert_eq!(released.claim, held, "the release says the same");
    // A profile that the GPU does not have says nothing.
    wanted.asked.insert("a/larger".to_owned(), ProfileName::new("9g.90gb"));
    node.prepare(&wanted, false, now()).unwrap();
    assert_eq!(node.usage(&NodeUsageStatus::default()).unwrap().held[0].asked_micro_gpus, None);
}

#[test]
fn a_kill_during_recovery_converges() {
    for first in [6, 9, 12] {
        for at in 1.. {
            let world = world();
            let (probe, _) = killer(first);
            let node = world.node_with(probe);
            assert!(until_killed(|| node.prepare(&wanted(), false, now())).is_none());
            let (probe, _) = killer(at);
            let node = world.node_with(probe);
            let done = until_killed(|| node.recover()).is_some();
            settles_after_restart(&world, &format!("killed at {first}, then at {at} of the recovery"));
            if done {
                break;
            }
        }
    }
}

#[rstest]
#[case::killed_before(FaultKind::KillBefore)]
#[case::killed_after(FaultKind::KillAfter)]
fn a_kill_inside_any_call_to_the_driver_converges(#[case] kind: FaultKind) {
    let mut killed = 0;
    for function in FUNCTIONS {
        for nth in 1..=4 {
            let world = world();
            world.gpus.fault(function, nth, kind);
            let node = world.node();
            if until_killed(|| node.prepare(&wanted(), false, now())).is_none() {
                killed += 1;
                settles_after_restart(&world, &format!("{kind:?} {nth} of {function}"));
            }
            world.gpus.clear_faults();
        }
    }
    assert!(killed >= 6, "only {killed} kills hit");
}

#[rstest]
#[case::killed_before(FaultKind::KillBefore)]
#[case::killed_after(FaultKind::KillAfter)]
fn a_kill_inside_any_call_while_unpreparing_converges(#[case] kind: FaultKind) {
    let mut killed = 0;
    for function in FUNCTIONS {
        for nth in 1..=4 {
            let world = world();
            world.node().prepare(&wanted(), false, now()).unwrap();
            world.gpus.fault(function, nth, kind);
            let node = world.node();
            if until_killed(|| node.unprepare("c-1")).is_none() {
                killed += 1;
                world.gpus.clear_faults();
                let node = world.node();
                node.recover().unwrap();
                node.unprepare("c-1").unwrap();
                world.assert_clean();
            }
        }
    }
    assert!(killed >= 4, "only {killed} kills hit");
}

#[test]
fn an_error_of_any_call_leaves_nothing_and_names_the_step() {
    let mut failed = 0;
    for function in FUNCTIONS {
        for nth in 1..=4 {
            let world = world();
            world.gpus.fault(function, nth, FaultKind::Fail(NvmlCode::UNKNOWN));
            let node = world.node();
            match node.prepare(&wanted(), false, now()) {
                Ok(_) => {}
                Err(error) => {
                    failed += 1;
                    let text = error.to_string();
                    assert!(text.contains("UNKNOWN") || text.contains("gpu-"), "{function} {nth}: {text}");
                    settles_after_restart(&world, &format!("error {nth} of {function}"));
                }
            }
            world.gpus.clear_faults();
        }
    }
    assert!(failed >= 6, "only {failed} faults hit");
}

#[test]
fn a_failed_create_is_undone_at_once() {
    let world = world();
    world.gpus.fault(
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        2,
        FaultKind::Fail(NvmlCode::INSUFFICIENT_RESOURCES),
    );
    let error = world.node().prepare(&wanted(), false, now()).unwrap_err().to_string();
    assert!(error.contains("3g.40gb at {0}:4") && error.contains("INSUFFICIENT_RESOURCES"), "{error}");
    world.assert_clean();
}

#[test]
fn an_undo_that_fails_is_done_before_anything_else_is_prepared() {
    let world = world();
    world.gpus.fault(
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        2,
        FaultKind::Fail(NvmlCode::INSUFFICIENT_RESOURCES),
    );
    world.gpus.fault("nvmlGpuInstanceDestroy", 1, FaultKind::Fail(NvmlCode::UNKNOWN));
    let error = world.node().prepare(&wanted(), false, now()).unwrap_err().to_string();
    assert!(error.contains("undoing failed too"), "{error}");
    // The leftover still keeps others out…
    let overlapping = request("c-2", &[("x", "gpu-0-mig-1g10gb-19-6")]);
    let refused = world.node().prepare(&overlapping, false, now()).unwrap_err();
    assert!(refused.to_string().contains("ns/claim-c-1"), "{refused}");
    // …until the claim is prepared or given up.
    world.node().unprepare("c-1").unwrap();
    world.assert_clean();
}

/// Completed claims at a reboot: the hardware is gone, the claim is not.
#[test]
fn after_a_reboot_the_same_claim_gets_the_same_ids_on_new_hardware() {
    let world = world();
    world.node().prepare(&wanted(), false, now()).unwrap();
    let before = world.ledger().claims["c-1"].clone();
    world.reboot("boot-2");
    let node = world.node();
    node.recover().unwrap();
    assert_eq!(world.instances(), []);
    let prepared = node.prepare(&wanted(), false, now()).unwrap();
    assert_eq!(ids(&prepared), expected());
    assert_eq!(world.instances().len(), 2);
    let after = world.ledger().claims["c-1"].clone();
    assert_eq!((after.state, after.boot_id.as_str()), (State::Completed, "boot-2"));
    assert_eq!(before.keys(), after.keys());
    node.unprepare("c-1").unwrap();
    world.assert_clean();
}

#[test]
fn after_a_reboot_unprepare_alone_cleans_up() {
    let world = world();
    world.node().prepare(&wanted(), false, now()).unwrap();
    world.reboot("boot-2");
    let node = world.node();
    node.recover().unwrap();
    assert!(node.unprepare("c-1").unwrap());
    world.assert_clean();
}

#[test]
fn a_kill_while_preparing_again_after_a_reboot_keeps_the_claims_place() {
    for at in 1.. {
        let world = world();
        world.node().prepare(&wanted(), false, now()).unwrap();
        world.reboot("boot-2");
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        if until_killed(|| node.prepare(&wanted(), false, now())).is_some() {
            break;
        }
        let node: Node = world.node();
        node.recover().unwrap();
        let other = request("c-2", &[("x", "gpu-0-mig-1g10gb-19-6")]);
        assert!(node.prepare(&other, false, now()).is_err(), "killed at {at}: the place was given away");
        assert_eq!(ids(&node.prepare(&wanted(), false, now()).unwrap()), expected(), "killed at {at}");
        node.unprepare("c-1").unwrap();
        world.assert_clean();
    }
}

#[test]
fn boards_that_need_a_reset_keep_their_mode() {
    let world = World::new(FakeGpus::new([a100_40(0, true)]));
    let request = request("c-1", &[("a", "gpu-0-mig-1g5gb-19-6")]);
    world.node().prepare(&request, false, now()).unwrap();
    assert_eq!(world.instances(), [(0, 6, 1, true)]);
    world.node().unprepare("c-1").unwrap();
    world.assert_clean();
    use aliquot_nvml::Gpus;
    assert!(world.gpus.mig_mode(&a100_40(0, true).uuid).unwrap().current);
}

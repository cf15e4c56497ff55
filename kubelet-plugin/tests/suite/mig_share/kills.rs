//! Kills at every point, with another claim's share of the same partition, and without.

use super::*;
use aliquot_kubelet_plugin::prepare::Node;
use aliquot_nvml::NvmlCode;
use aliquot_nvml::fake::{FUNCTIONS, FaultKind, until_killed};
use common::kill::killer;

/// A new process comes up; the other share has what it had, and in the end nothing is left.
fn settles(world: &World, other: Option<&MigUuid>, what: &str) {
    settles_after(world, other, true, what);
}

/// A mode that could not be switched off stays on until the next claim ends.
fn settles_after(world: &World, other: Option<&MigUuid>, killed: bool, what: &str) {
    world.gpus.clear_faults();
    let node = world.node();
    let recovery = node.recover().unwrap();
    assert!(recovery.failed.is_empty(), "{what}: {recovery:?}");
    if let Some(before) = other {
        assert_eq!((world.instances(), &uuid(world)), (vec![PARTITION], before), "{what}");
    } else if killed && world.ledger().claims.is_empty() {
        world.assert_clean();
    }
    node.prepare(&share("c-1"), false, now()).unwrap();
    assert_eq!(world.instances(), [PARTITION], "{what}");
    assert_eq!(quotas(world, "c-1")[0].gpu_uuid.as_str(), uuid(world).as_str(), "{what}");
    if other.is_some() {
        node.unprepare("c-2").unwrap();
        assert_eq!(world.instances(), [PARTITION], "{what}: c-1 has it still");
    }
    node.unprepare("c-1").unwrap();
    world.assert_clean();
}

/// A world in which the other share is prepared, or not.
fn beside(shared: bool) -> (World, Option<MigUuid>) {
    let world = world();
    if shared {
        world.node().prepare(&share("c-2"), false, now()).unwrap();
    }
    let made = shared.then(|| uuid(&world));
    (world, made)
}

/// Kills `work` at each point of it; the number of points.
fn kill_everywhere(shared: bool, prepare_first: bool, work: impl Fn(&Node)) -> usize {
    for at in 1.. {
        let (world, other) = beside(shared);
        if prepare_first {
            world.node().prepare(&share("c-1"), false, now()).unwrap();
        }
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        if until_killed(|| work(&node)).is_some() {
            return at - 1;
        }
        settles(&world, other.as_ref(), &format!("shared: {shared}, killed at {at}"));
    }
    0
}

#[test]
fn a_kill_at_any_point_of_prepare_leaves_the_other_share_its_partition() {
    for shared in [false, true] {
        let points =
            kill_everywhere(shared, false, |node| drop(node.prepare(&share("c-1"), false, now()).unwrap()));
        // Write-ahead, four steps, completion, each with a point before and after.
        assert_eq!(points, 12, "shared: {shared}");
    }
}

#[test]
fn a_kill_at_any_point_of_unprepare_leaves_the_other_share_its_partition() {
    for shared in [false, true] {
        let points = kill_everywhere(shared, true, |node| {
            node.unprepare("c-1").unwrap();
        });
        assert_eq!(points, 12, "shared: {shared}");
    }
}

#[test]
fn a_kill_inside_any_call_to_the_driver_leaves_the_other_share_its_partition() {
    let mut killed = 0;
    for kind in [FaultKind::KillBefore, FaultKind::KillAfter, FaultKind::Fail(NvmlCode::UNKNOWN)] {
        for function in FUNCTIONS {
            for nth in 1..=2 {
                for (shared, prepared) in [(false, false), (true, false), (false, true), (true, true)] {
                    let (world, other) = beside(shared);
                    if prepared {
                        world.node().prepare(&share("c-1"), false, now()).unwrap();
                    }
                    world.gpus.fault(function, nth, kind);
                    let node = world.node();
                    let done = until_killed(|| {
                        if prepared {
                            drop(node.unprepare("c-1"));
                        } else {
                            drop(node.prepare(&share("c-1"), false, now()));
                        }
                    });
                    killed += u32::from(done.is_none());
                    let what =
                        format!("{kind:?} {nth} of {function}, shared: {shared}, prepared: {prepared}");
                    let is_kill = !matches!(kind, FaultKind::Fail(_));
                    settles_after(&world, other.as_ref(), is_kill, &what);
                }
            }
        }
    }
    assert!(killed >= 10, "only {killed} kills hit");
}

#[test]
fn a_kill_while_preparing_again_after_a_reboot_converges() {
    for first in ["c-1", "c-2"] {
        for at in 1.. {
            let world = world();
            for uid in ["c-1", "c-2"] {
                world.node().prepare(&share(uid), false, now()).unwrap();
            }
            world.reboot("boot-2");
            if first == "c-2" {
                world.node().prepare(&share("c-2"), false, now()).unwrap();
            }
            let (probe, _) = killer(at);
            let node = world.node_with(probe);
            let done = until_killed(|| node.prepare(&share("c-1"), false, now())).is_some();
            let node = world.node();
            node.recover().unwrap();
            for uid in ["c-2", "c-1"] {
                node.prepare(&share(uid), false, now()).unwrap();
                assert_eq!(world.instances(), [PARTITION], "killed at {at}");
            }
            for uid in [first, if first == "c-1" { "c-2" } else { "c-1" }] {
                assert_eq!(world.instances(), [PARTITION], "killed at {at}");
                node.unprepare(uid).unwrap();
            }
            world.assert_clean();
            if done {
                break;
            }
        }
    }
}

#[test]
fn both_shares_killed_half_way_leave_nothing() {
    for first in 1..=12 {
        for second in 1..=12 {
            let world = world();
            for (uid, at) in [("c-1", first), ("c-2", second)] {
                let (probe, _) = killer(at);
                let node = world.node_with(probe);
                let _ = until_killed(|| drop(node.prepare(&share(uid), false, now())));
            }
            let node = world.node();
            let recovery = node.recover().unwrap();
            assert!(recovery.failed.is_empty(), "{first}, {second}: {recovery:?}");
            for uid in ["c-1", "c-2"] {
                node.prepare(&share(uid), false, now()).unwrap();
            }
            assert_eq!(world.instances(), [PARTITION], "killed at {first} and {second}");
            for uid in ["c-1", "c-2"] {
                node.unprepare(uid).unwrap();
            }
            world.assert_clean();
        }
    }
}

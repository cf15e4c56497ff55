//! A partition that is gone is made anew for one of its claims, with another UUID, for all of them: their records, quota
//! files and CDI specs follow, whatever is killed when, and the last of them takes it away.

use super::*;
use aliquot_kubelet_plugin::prepare::Node;
use aliquot_nvml::fake::{FUNCTIONS, FaultKind, until_killed};
use common::kill::killer;

/// Somebody else's partition, because of which the one that is made anew has another UUID.
pub(super) const BESIDE: (u32, u32, u32, bool) = (0, 0, 2, true);
const ALONE: &str = "gpu-0-mig-2g20gb-14-4";

/// Takes the partition away, as a driver that is loaded anew does.
fn lose_partition(world: &World) {
    let gpu = h100_80(0).uuid;
    let live = world.gpus.live_migs(&gpu).unwrap();
    world.gpus.destroy_mig(&live[0]).unwrap();
    world.gpus.create_mig(&gpu, 14, Placement::new(0, 2)).unwrap();
}

/// Shares that are prepared, and one that is kept without a pod, of a partition that is gone.
pub(super) fn gone() -> World {
    let world = world();
    let node = world.node();
    for uid in ["c-1", "c-2"] {
        node.prepare(&share(uid), false, now()).unwrap();
    }
    node.prepare(&Request { hold: Some(Hold::InUse), ..share("c-3") }, false, now()).unwrap();
    node.unprepare("c-3").unwrap();
    lose_partition(&world);
    world
}

fn spec(world: &World, uid: &str) -> String {
    fs::read_to_string(world.cdi().join(format!("{DRIVER}-claim-{uid}.json"))).unwrap()
}

/// A new process comes up and has a look.
pub(super) fn starts(world: &World) -> Node {
    world.gpus.clear_faults();
    let node = world.node();
    let recovery = node.recover().unwrap();
    assert!(recovery.failed.is_empty(), "{recovery:?}");
    let done = node.renumber().unwrap();
    assert!(done.failed.is_empty(), "{done:?}");
    node
}

fn is_there(world: &World) -> bool {
    world.instances().contains(&PARTITION)
}

/// All that is prepared names the partition that is there.
fn all_name_it(world: &World, what: &str) {
    let named = uuid(world);
    for (uid, record) in world.ledger().claims {
        let own = record.devices[0].partition.as_ref().unwrap().uuid.clone();
        assert_eq!(own.as_ref(), Some(&named), "{what}: {uid}");
        if !record.is_parked() {
            assert_eq!(quotas(world, &uid)[0].gpu_uuid.as_str(), named.as_str(), "{what}: {uid}");
            let spec = spec(world, &uid);
            assert_eq!(spec.matches(named.as_str()).count(), 2, "{what}: {spec}");
        }
    }
}

/// Everything is given back, and only what is somebody else's is left.
fn ends(node: &Node, world: &World, order: [&str; 3], what: &str) {
    for uid in order {
        node.unprepare(uid).unwrap();
        node.release_parked(uid).unwrap();
    }
    assert_eq!((world.instances(), world.files()), (vec![BESIDE], Vec::new()), "{what}");
    assert!(world.ledger().claims.is_empty(), "{what}");
}

const ORDERS: [[&str; 3]; 3] = [["c-1", "c-2", "c-3"], ["c-2", "c-3", "c-1"], ["c-3", "c-1", "c-2"]];

#[test]
fn a_partition_that_is_made_anew_for_one_share_is_the_others_too() {
    for order in ORDERS {
        let world = gone();
        let node = world.node();
        let former = quotas(&world, "c-2")[0].gpu_uuid;
        node.prepare(&share("c-1"), false, now()).unwrap();
        assert_ne!(former.as_str(), uuid(&world).as_str());
        assert_eq!(quotas(&world, "c-2")[0].gpu_uuid.as_str(), uuid(&world).as_str());
        node.renumber().unwrap();
        all_name_it(&world, "made anew");
        assert_eq!(created(&world), 3);
        ends(&node, &world, order, "made anew");
    }
}

#[test]
fn a_new_share_that_makes_it_anew_makes_it_for_all() {
    for order in ORDERS {
        let world = gone();
        let node = world.node();
        node.prepare(&share("c-4"), false, now()).unwrap();
        node.renumber().unwrap();
        all_name_it(&world, "made anew");
        node.unprepare("c-4").unwrap();
        assert!(is_there(&world), "the others have it");
        ends(&node, &world, order, "made anew");
    }
}

/// Kills `work` at each point on a node whose partition is gone, and looks at what a new process makes of it. `node` is a
/// process that is killed at a point, if there is one.
fn kill_everywhere(node: impl Fn(&World, usize) -> Option<Node>, work: impl Fn(&Node)) -> usize {
    let mut kills = 0;
    for at in 1.. {
        for (index, order) in ORDERS.into_iter().enumerate() {
            let world = gone();
            let Some(node) = node(&world, at) else { return kills };
            if until_killed(|| work(&node)).is_some() {
                continue;
            }
            kills += 1;
            let what = format!("killed at {at}, then {order:?}");
            let node = starts(&world);
            if is_there(&world) {
                all_name_it(&world, &what);
            }
            // The kubelet asks for one of them again, or for none.
            if index > 0 {
                node.prepare(&share("c-2"), false, now()).unwrap();
                node.renumber().unwrap();
                all_name_it(&world, &what);
            }
            node.unprepare("c-4").unwrap();
            ends(&node, &world, order, &what);
        }
    }
    kills
}

/// Kills at one point after the other, until there is none any more.
fn at_each_point(uid: &str) -> usize {
    let passed = {
        let (probe, passed) = killer(usize::MAX);
        let node = gone();
        node.node_with(probe).prepare(&share(uid), false, now()).unwrap();
        passed.load(std::sync::atomic::Ordering::SeqCst)
    };
    let points = |world: &World, at| (at <= passed).then(|| world.node_with(killer(at).0));
    kill_everywhere(points, |node| drop(node.prepare(&share(uid), false, now())))
}

#[test]
fn a_kill_while_it_is_made_anew_leaves_no_share_behind() {
    assert!(at_each_point("c-1") >= 24, "unnaming, partition, spec and completion, before and after");
}

#[test]
fn a_kill_while_a_new_share_makes_it_anew_leaves_no_share_behind() {
    assert!(at_each_point("c-4") >= 36);
}

#[test]
fn a_kill_inside_any_call_to_the_driver_while_it_is_made_anew_leaves_no_share_behind() {
    for uid in ["c-1", "c-4"] {
        let faults: Vec<_> = FUNCTIONS
            .into_iter()
            .flat_map(|function| [1, 2].map(|nth| (function, nth)))
            .flat_map(|call| [FaultKind::KillBefore, FaultKind::KillAfter].map(|kind| (call, kind)))
            .collect();
        let points = |world: &World, at: usize| {
            let ((function, nth), kind) = *faults.get(at - 1)?;
            world.gpus.fault(function, nth, kind);
            Some(world.node())
        };
        let kills = kill_everywhere(points, |node| drop(node.prepare(&share(uid), false, now())));
        assert!(kills >= 12, "only {kills} kills hit");
    }
}

/// A claim that has a partition alone loses it, and is killed while it is made anew.
#[test]
fn a_partition_that_was_made_anew_by_a_killed_process_goes_with_its_claim() {
    let alone = || request("c-1", &[("m", ALONE)]);
    let world_with = || {
        let world = world();
        world.node().prepare(&alone(), false, now()).unwrap();
        lose_partition(&world);
        world
    };
    let mut kills = 0;
    for function in FUNCTIONS {
        for (nth, kind) in
            [1, 2].into_iter().flat_map(|n| [(n, FaultKind::KillBefore), (n, FaultKind::KillAfter)])
        {
            for again in [false, true] {
                let world = world_with();
                world.gpus.fault(function, nth, kind);
                let node = world.node();
                if until_killed(|| drop(node.prepare(&alone(), false, now()))).is_some() {
                    continue;
                }
                kills += 1;
                let node = starts(&world);
                if again {
                    node.prepare(&alone(), false, now()).unwrap();
                    assert_eq!(world.instances(), [BESIDE, PARTITION], "{kind:?} {nth} of {function}");
                }
                node.unprepare("c-1").unwrap();
                assert_eq!(world.instances(), [BESIDE], "{kind:?} {nth} of {function}, again: {again}");
            }
        }
    }
    assert!(kills >= 8, "only {kills} kills hit");
}

#[test]
fn a_partition_that_somebody_else_made_in_its_place_is_left_alone() {
    let world = gone();
    world.gpus.create_mig(&h100_80(0).uuid, 14, Placement::new(4, 2)).unwrap();
    let node = world.node();
    let refused = node.prepare(&share("c-1"), false, now()).unwrap_err();
    assert!(refused.to_string().contains(&h100_80(0).uuid.to_string()), "{refused}");
    let theirs = uuid(&world);
    let refused = node.prepare(&share("c-4"), false, now()).unwrap_err();
    assert!(refused.to_string().contains("that no claim has"), "{refused}");
    for uid in ["c-1", "c-2", "c-4"] {
        node.unprepare(uid).unwrap();
    }
    node.release_parked("c-3").unwrap();
    assert_eq!((world.instances(), uuid(&world)), (vec![BESIDE, PARTITION], theirs));
}

/// As an administrator's `nvidia-smi mig -cgi` without `-C` leaves it.
#[test]
fn an_instance_that_somebody_else_has_half_made_in_its_place_is_not_taken() {
    let world = gone();
    world.gpus.fault("nvmlGpuInstanceCreateComputeInstance", 1, FaultKind::KillBefore);
    until_killed(|| world.gpus.create_mig(&h100_80(0).uuid, 14, Placement::new(4, 2)));
    let half = (0, 4, 2, false);
    assert_eq!(world.instances(), [BESIDE, half]);
    let node = world.node();
    for uid in ["c-1", "c-4"] {
        node.prepare(&share(uid), false, now()).unwrap_err();
        assert_eq!(world.instances(), [BESIDE, half], "{uid}");
    }
    for uid in ["c-1", "c-2", "c-4"] {
        node.unprepare(uid).unwrap();
        assert_eq!(world.instances(), [BESIDE, half], "{uid} is over");
    }
    node.release_parked("c-3").unwrap();
    assert_eq!(world.instances(), [BESIDE, half], "nobody of ours is left");
}

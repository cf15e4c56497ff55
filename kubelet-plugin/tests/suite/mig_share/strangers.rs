//! Partitions that somebody else makes where ours is to be, while the agent does not run, are not taken for ours and stay;
//! and so do those that shares were given as they were.

use super::anew::{BESIDE, gone, starts};
use super::*;
use aliquot_kubelet_plugin::prepare::Node;
use common::kill::at_each_point;
use std::cell::Cell;

/// Somebody makes a partition of their own in the place, if it is free. Returns its UUID.
fn make(world: &World) -> Option<MigUuid> {
    let gpu = h100_80(0).uuid;
    let place = Placement::new(4, 2);
    if world.gpus.live_migs(&gpu).unwrap().iter().any(|mig| mig.placement.overlaps(place)) {
        return None;
    }
    world.gpus.set_mig_mode(&gpu, true).unwrap();
    world.gpus.create_mig(&gpu, 14, place).unwrap();
    Some(uuid(world))
}

fn ends(node: &Node, uids: &[&str]) {
    for uid in uids {
        node.unprepare(uid).unwrap();
        node.release_parked(uid).unwrap();
    }
}

#[test]
fn what_is_made_in_the_place_of_one_that_was_to_be_made_anew_is_not_it() {
    for uid in ["c-1", "c-4"] {
        for asked in [None, Some("c-2"), Some("c-4")] {
            let met = Cell::new(0);
            at_each_point(
                || (gone(), ()),
                |node| node.prepare(&share(uid), false, now()),
                |world, (), what| {
                    let Some(theirs) = make(world) else { return };
                    met.set(met.get() + 1);
                    let node = starts(world);
                    if let Some(asked) = asked {
                        let refused = node.prepare(&share(asked), false, now());
                        refused.expect_err(&format!("{what}, then {asked}"));
                    }
                    node.renumber().unwrap();
                    for (uid, record) in world.ledger().claims {
                        let known = record.devices[0].partition.as_ref().unwrap();
                        assert_ne!(known.uuid.as_ref(), Some(&theirs), "{what}: {uid}");
                    }
                    ends(&node, &["c-4", "c-1", "c-2", "c-3"]);
                    assert_eq!(world.instances(), [BESIDE, PARTITION], "{what}, then {asked:?}");
                    assert_eq!(uuid(world), theirs, "{what}, then {asked:?}");
                },
            );
            assert!(met.get() >= 4, "before and after unnaming, before the step: {}", met.get());
        }
    }
}

#[test]
fn what_is_made_in_the_place_of_one_that_was_to_be_made_first_is_not_it() {
    for wanted in [share("c-1"), request("c-1", &[("m", "gpu-0-mig-2g20gb-14-4")])] {
        let met = Cell::new(0);
        at_each_point(
            || (world(), ()),
            |node| node.prepare(&wanted, false, now()),
            |world, (), what| {
                let Some(theirs) = make(world) else { return };
                met.set(met.get() + 1);
                let node = starts(world);
                ends(&node, &["c-1"]);
                assert_eq!((world.instances(), uuid(world)), (vec![PARTITION], theirs), "{what}");
            },
        );
        assert!(met.get() >= 4, "{}", met.get());
    }
}

#[test]
fn one_that_shares_were_given_as_it_was_is_made_again_by_nobody_but_whose_it_is() {
    let world = with_static_partition();
    let node = world.node();
    for uid in ["c-1", "c-2"] {
        node.prepare(&share(uid), false, now()).unwrap();
    }
    let gpu = h100_80(0).uuid;
    let live = world.gpus.live_migs(&gpu).unwrap();
    world.gpus.destroy_mig(&live[0]).unwrap();
    let refused = node.prepare(&share("c-4"), false, now()).unwrap_err().to_string();
    assert!(refused.contains("claim-c-1") && refused.contains("destroyed since"), "{refused}");
    assert_eq!((world.instances(), created(&world)), (vec![], 1));
    make(&world).unwrap();
    node.prepare(&share("c-4"), false, now()).unwrap();
    ends(&node, &["c-4", "c-1", "c-2"]);
    assert_eq!((world.instances(), world.files()), (vec![PARTITION], Vec::new()));
}

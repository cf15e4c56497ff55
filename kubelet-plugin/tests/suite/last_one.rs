//! What several claims have set up on a GPU goes with the last of them that has it: not before, and not later. A claim of
//! an earlier boot, and one that waits to be prepared again, has nothing.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::claim::{Request, Settings};
use aliquot_model::Placement;
use aliquot_model::config::{GpuConfig, TimeSliceInterval};
use aliquot_nvml::fake::{FakeGpus, h100_80, until_killed};
use aliquot_nvml::{Gpus, TimeSlice};
use common::kill::killer;
use common::{World, now, request};
use proptest::prelude::*;
use rstest::rstest;

const SHARED: &str = "gpu-0-mig-2g20gb-14-4-share";
const ALONE: &str = "gpu-0-mig-1g10gb-19-0";

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1)]))
}

/// Time slices of the second GPU, long ones.
fn long(uid: &str) -> Request {
    let mut request = request(uid, &[("t", "gpu-1-timeslice")]);
    let config = GpuConfig { time_slice: TimeSliceInterval::Long, ..GpuConfig::default() };
    request.devices[0].settings = Settings::Gpu(Some(config));
    request
}

/// Three shares of a partition, a partition alone beside it, and two claims with time slices of another GPU.
fn claim(index: usize) -> Request {
    let uid = format!("c-{index}");
    match index {
        0..=2 => request(&uid, &[("s", SHARED)]),
        3 => request(&uid, &[("m", ALONE)]),
        _ => long(&uid),
    }
}

const CLAIMS: usize = 6;

#[derive(Debug, Clone)]
enum Turn {
    Prepare(usize),
    Unprepare(usize),
    /// The agent is killed while it prepares, or gives back, and started again.
    Killed {
        claim: usize,
        unprepare: bool,
        at: usize,
    },
    /// The driver is loaded anew, and has no partitions.
    Reload,
    Reboot,
}

fn turn() -> impl Strategy<Value = Turn> {
    let killed = (0..CLAIMS, any::<bool>(), 1..14_usize);
    prop_oneof![
        5 => (0..CLAIMS).prop_map(Turn::Prepare),
        4 => (0..CLAIMS).prop_map(Turn::Unprepare),
        3 => killed.prop_map(|(claim, unprepare, at)| Turn::Killed { claim, unprepare, at }),
        1 => Just(Turn::Reload),
        1 => Just(Turn::Reboot),
    ]
}

/// What is set up is what claims of this boot have, no more and no less. After a driver was loaded anew, claims have what
/// was made anew for them since.
fn is_as_the_ledger_says(world: &World, boot: &str, reloaded: bool) {
    let ledger = world.ledger();
    let here = |index: usize| ledger.claims.get(&format!("c-{index}")).is_some_and(|c| c.is_prepared(boot));
    let mut wanted = Vec::new();
    if here(3) {
        wanted.push((0, 0, 1, true));
    }
    if (0..3).any(here) {
        wanted.push((0, 4, 2, true));
    }
    let found = world.instances();
    let extra: Vec<_> = found.iter().filter(|instance| !wanted.contains(instance)).collect();
    assert!(extra.is_empty(), "nobody has {extra:?}");
    assert!(reloaded || found == wanted, "{found:?} instead of {wanted:?}");
    let mig = world.gpus.mig_mode(&h100_80(0).uuid).unwrap().current;
    assert_eq!(mig, !wanted.is_empty(), "MIG mode");
    let slice = world.gpus.time_slice(&h100_80(1).uuid).unwrap();
    assert_eq!(slice == TimeSlice::Long, here(4) || here(5), "{slice:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_last_claim_that_has_something_undoes_it(turns in proptest::collection::vec(turn(), 1..24)) {
        let world = world();
        let (mut boots, mut reloaded) = (1, false);
        for turn in turns {
            let node = world.node();
            match turn {
                Turn::Prepare(index) => drop(node.prepare(&claim(index), false, now()).unwrap()),
                Turn::Unprepare(index) => drop(node.unprepare(&format!("c-{index}")).unwrap()),
                Turn::Killed { claim: index, unprepare, at } => {
                    let node = world.node_with(killer(at).0);
                    until_killed(|| match unprepare {
                        true => drop(node.unprepare(&format!("c-{index}")).unwrap()),
                        false => drop(node.prepare(&claim(index), false, now()).unwrap()),
                    });
                    let recovery = world.node().recover().unwrap();
                    prop_assert!(recovery.failed.is_empty(), "{:?}", recovery);
                }
                Turn::Reload => {
                    for mig in world.gpus.live_migs(&h100_80(0).uuid).unwrap() {
                        world.gpus.destroy_mig(&mig).unwrap();
                    }
                    reloaded = true;
                }
                Turn::Reboot => {
                    (boots, reloaded) = (boots + 1, false);
                    world.reboot(&format!("boot-{boots}"));
                    world.node().recover().unwrap();
                }
            }
            is_as_the_ledger_says(&world, &format!("boot-{boots}"), reloaded);
        }
        for index in 0..CLAIMS {
            world.node().unprepare(&format!("c-{index}")).unwrap();
        }
        world.assert_clean();
        prop_assert_eq!(world.gpus.time_slice(&h100_80(1).uuid), Some(TimeSlice::Default));
    }
}

#[test]
fn a_claim_that_was_not_prepared_again_after_a_reboot_keeps_no_time_slice() {
    let world = world();
    for uid in ["c-1", "c-2"] {
        world.node().prepare(&long(uid), false, now()).unwrap();
    }
    world.reboot("boot-2");
    let node = world.node();
    node.prepare(&long("c-1"), false, now()).unwrap();
    assert_eq!(world.gpus.time_slice(&h100_80(1).uuid), Some(TimeSlice::Long));
    node.unprepare("c-1").unwrap();
    assert_eq!(world.gpus.time_slice(&h100_80(1).uuid), Some(TimeSlice::Default), "c-2 has none now");
}

#[test]
fn a_claim_that_was_not_prepared_again_after_a_reboot_keeps_no_mig_mode() {
    let world = world();
    for uid in ["c-1", "c-2"] {
        world.node().prepare(&request(uid, &[("s", SHARED)]), false, now()).unwrap();
    }
    world.reboot("boot-2");
    let node = world.node();
    node.prepare(&request("c-1", &[("s", SHARED)]), false, now()).unwrap();
    node.unprepare("c-1").unwrap();
    assert!(!world.gpus.mig_mode(&h100_80(0).uuid).unwrap().current, "c-2 has no partition now");
}

/// What an administrator has set up since the reboot, by a claim of the boot before.
#[rstest]
#[case::with_other_uuids(true)]
#[case::with_the_uuid_that_the_claims_partition_had(false)]
fn a_claim_of_an_earlier_boot_takes_nothing_with_it(#[case] another_first: bool) {
    let world = world();
    world.node().prepare(&request("c-1", &[("m", ALONE)]), false, now()).unwrap();
    world.node().prepare(&long("c-2"), false, now()).unwrap();
    world.reboot("boot-2");
    let (gpu, sliced) = (h100_80(0).uuid, h100_80(1).uuid);
    world.gpus.set_mig_mode(&gpu, true).unwrap();
    world.gpus.set_time_slice(&sliced, TimeSlice::Short).unwrap();
    let node = world.node();
    if another_first {
        world.gpus.create_mig(&gpu, 19, Placement::new(5, 1)).unwrap();
    }
    let there = world.gpus.create_mig(&gpu, 19, Placement::new(0, 1)).unwrap();
    let then = world.ledger().claims["c-1"].devices[0].partition.clone().unwrap().uuid;
    assert_eq!(there.uuid == then, !another_first);
    for uid in ["c-1", "c-2"] {
        node.unprepare(uid).unwrap();
    }
    assert!(world.gpus.live_migs(&gpu).unwrap().contains(&there));
    assert_eq!(world.gpus.time_slice(&sliced), Some(TimeSlice::Short));
    assert!(world.ledger().claims.is_empty() && world.files().is_empty());
}

#[test]
fn a_claim_of_an_earlier_boot_leaves_a_mig_mode_that_was_switched_on_since() {
    let world = world();
    world.node().prepare(&request("c-1", &[("m", ALONE)]), false, now()).unwrap();
    world.reboot("boot-2");
    world.gpus.set_mig_mode(&h100_80(0).uuid, true).unwrap();
    world.node().unprepare("c-1").unwrap();
    assert!(world.gpus.mig_mode(&h100_80(0).uuid).unwrap().current);
}

//! A driver that was loaded anew and numbers its devices otherwise, and an agent that is killed at any point between the
//! look that finds it and the last CDI spec that follows: in the end every spec names its claim's own devices, and every
//! number that a container may have been started with is known.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::device_number_reuse::named;
use aliquot_kubelet_plugin::former::Allocations;
use aliquot_kubelet_plugin::ledger::DeviceNumber;
use aliquot_kubelet_plugin::prepare::Node;
use aliquot_kubelet_plugin::probe::Probe;
use aliquot_model::GpuInfo;
use aliquot_nvml::fake::{FakeGpus, h100_80, until_killed};
use common::kill::killer;
use common::{DEVICES, DRIVER, World, now, request};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// A whole GPU with device metadata, and two shares of the other.
fn claims() -> [Request; 3] {
    [
        request("c-1", &[("g", "gpu-0")]),
        request("c-2", &[("s", "gpu-1-share")]),
        request("c-3", &[("s", "gpu-1-share")]),
    ]
}

fn node(world: &World, probe: Probe) -> Node {
    Node { device_metadata: true, ..world.node_with(probe) }
}

fn numbers_of(world: &World, uid: &str) -> BTreeSet<DeviceNumber> {
    named(&world.node().machine.cdi.read(&format!("{DRIVER}-claim-{uid}")).unwrap().unwrap())
}

/// What a container of a claim is started with now.
fn all_numbers(world: &World) -> BTreeMap<String, BTreeSet<DeviceNumber>> {
    claims().into_iter().map(|c| (c.claim.uid.clone(), numbers_of(world, &c.claim.uid))).collect()
}

/// The GPUs exchange their numbers, and nvidia-uvm and the capabilities theirs.
fn reload(world: &mut World) {
    let other = |gpu: u32, minor: u32| GpuInfo { minor, ..h100_80(gpu) };
    world.gpus = FakeGpus::new([other(0, 1), other(1, 0)]);
    let devices =
        DEVICES.replace("235 nvidia-caps", "510 nvidia-caps").replace("510 nvidia-uvm", "235 nvidia-uvm");
    fs::write(world.proc().join("devices"), devices).unwrap();
}

fn prepared() -> World {
    let world = World::new(FakeGpus::new([h100_80(0), h100_80(1)]));
    for claim in claims() {
        node(&world, Probe::default()).prepare(&claim, false, now()).unwrap();
    }
    world
}

fn number(major: u32, minor: u32) -> DeviceNumber {
    DeviceNumber { major, minor }
}

/// Numbers of the GPU with this minor number and of what every container gets.
fn expected(minor: u32, uvm: u32) -> BTreeSet<DeviceNumber> {
    [number(195, minor), number(195, 255), number(uvm, 0), number(uvm, 1)].into()
}

/// Whatever a container may have been started with is written down, and what is another claim's is given to nobody.
fn is_followed(world: &World, started: &BTreeMap<String, BTreeSet<DeviceNumber>>, what: &str) {
    for (uid, minor) in [("c-1", 1), ("c-2", 0), ("c-3", 0)] {
        assert_eq!(numbers_of(world, uid), expected(minor, 235), "{what}: {uid}");
        let known = &world.ledger().claims[uid].numbers;
        assert!(known.is_superset(&started[uid]), "{what}: {uid} has {known:?}");
        assert!(known.is_superset(&numbers_of(world, uid)), "{what}: {uid} has {known:?}");
    }
    let node = node(world, Probe::default());
    // Both GPUs have a name that meant another one, which nobody was given, says the API.
    let overview = node.overview().unwrap().0;
    let asked =
        overview.ledger.bindings.iter().map(|(minor, binding)| (*minor, binding.gpu.clone())).collect();
    node.note_former(&asked, &Allocations::default()).unwrap();
    let reached = node.overview().unwrap().0.reached;
    let reaches = |uid: &str, gpu: u32| {
        reached.iter().any(|reach| reach.claim.uid == uid && reach.gpu == h100_80(gpu).uuid)
    };
    assert!(reaches("c-1", 1) && reaches("c-2", 0) && reaches("c-3", 0), "{what}: {reached:?}");
    // A share of the other GPU would fit beside the two, were it not that c-1 may open it.
    let refused = node.prepare(&request("c-4", &[("s", "gpu-0-share")]), false, now()).unwrap_err();
    assert!(refused.to_string().contains("ns/claim-c-1"), "{what}: {refused}");
}

fn ends(world: &World, what: &str) {
    let node = node(world, Probe::default());
    for uid in ["c-1", "c-2", "c-3"] {
        assert!(node.unprepare(uid).unwrap(), "{what}");
    }
    node.prepare(&request("c-4", &[("s", "gpu-0-share")]), false, now()).unwrap();
    node.unprepare("c-4").unwrap();
    world.assert_clean();
}

#[test]
fn a_kill_at_any_point_of_following_new_numbers_loses_none_of_them() {
    let mut kills = 0;
    for at in 1.. {
        let mut world = prepared();
        let mut started = all_numbers(&world);
        reload(&mut world);
        let killed = node(&world, killer(at).0);
        let done = until_killed(|| killed.renumber().unwrap()).is_some();
        // A container that is started between the kill and the next start.
        for (uid, numbers) in all_numbers(&world) {
            started.get_mut(&uid).unwrap().extend(numbers);
        }
        let what = format!("killed at {at}");
        let node = node(&world, Probe::default());
        node.recover().unwrap();
        let again = node.renumber().unwrap();
        assert!(again.failed.is_empty(), "{what}: {again:?}");
        is_followed(&world, &started, &what);
        ends(&world, &what);
        if done {
            break;
        }
        kills += 1;
    }
    // For each claim noting, metadata's file and spec, and the spec itself.
    assert!(kills >= 12, "{kills}");
}

/// The kubelet asks again before the agent has looked: then it is prepare that follows.
#[test]
fn a_kill_while_a_claim_is_prepared_again_after_new_numbers_loses_none_of_them() {
    for at in 1.. {
        let mut world = prepared();
        let mut started = all_numbers(&world);
        reload(&mut world);
        let killed = node(&world, killer(at).0);
        let done = until_killed(|| killed.prepare_known("c-1").unwrap()).is_some();
        for (uid, numbers) in all_numbers(&world) {
            started.get_mut(&uid).unwrap().extend(numbers);
        }
        let what = format!("killed at {at}");
        let node = node(&world, Probe::default());
        node.recover().unwrap();
        node.renumber().unwrap();
        is_followed(&world, &started, &what);
        ends(&world, &what);
        if done {
            assert!(at > 3, "{at}");
            break;
        }
    }
}

/// Twice in a row, with a kill in each: what was named in between is not forgotten either.
#[test]
fn numbers_of_two_loads_of_the_driver_are_all_known() {
    for at in 1..8 {
        let mut world = prepared();
        let mut started = all_numbers(&world);
        let mut note = |world: &World| {
            for (uid, numbers) in all_numbers(world) {
                started.get_mut(&uid).unwrap().extend(numbers);
            }
        };
        // A load with other major numbers alone, of which the agent sees a part.
        fs::write(world.proc().join("devices"), DEVICES.replace("510", "507")).unwrap();
        let killed = node(&world, killer(at).0);
        until_killed(|| killed.renumber().unwrap());
        note(&world);
        reload(&mut world);
        let second = node(&world, killer(at).0);
        until_killed(|| {
            second.recover().unwrap();
            second.renumber().unwrap()
        });
        note(&world);
        let node = node(&world, Probe::default());
        node.recover().unwrap();
        node.renumber().unwrap();
        is_followed(&world, &started, &format!("killed at {at} twice"));
        ends(&world, "twice");
    }
}

/// The capabilities have the major number that nvidia-uvm had, so that nvidia-uvm-tools of before divides GPUs.
#[test]
fn who_was_started_with_the_former_number_of_nvidia_uvm_may_divide_gpus_and_they_are_given_to_nobody() {
    let world = World::new(FakeGpus::new([h100_80(0), h100_80(1)]));
    let node = world.node();
    node.prepare(&request("c-1", &[("g", "gpu-0")]), false, now()).unwrap();
    let devices =
        DEVICES.replace("235 nvidia-caps", "510 nvidia-caps").replace("510 nvidia-uvm", "235 nvidia-uvm");
    fs::write(world.proc().join("devices"), devices).unwrap();
    node.renumber().unwrap();
    let refused = node.prepare(&request("c-2", &[("g", "gpu-1")]), false, now()).unwrap_err().to_string();
    assert!(refused.contains("510:1") && refused.contains("ns/claim-c-1"), "{refused}");
    node.unprepare("c-1").unwrap();
    node.prepare(&request("c-2", &[("g", "gpu-1")]), false, now()).unwrap();
}

/// With the checkpoint lost, the CDI spec alone says by which numbers containers may open what.
#[test]
fn numbers_of_a_claim_whose_record_is_lost_keep_its_former_and_its_present_gpu_from_others() {
    let mut world = World::new(FakeGpus::new([h100_80(0), h100_80(1), h100_80(2)]));
    world.node().prepare(&request("c-1", &[("g", "gpu-0")]), false, now()).unwrap();
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        fs::remove_file(world.data().join(name)).unwrap();
    }
    let other = |gpu: u32, minor: u32| GpuInfo { minor, ..h100_80(gpu) };
    world.gpus = FakeGpus::new([other(0, 1), other(1, 0), other(2, 2)]);
    let node = world.node();
    assert!(node.recover().unwrap().lost.is_some());
    // The one that it has, under the name that it has now, and the one that containers may open.
    for (uid, device) in [("c-2", "gpu-1"), ("c-3", "gpu-0")] {
        let refused = node.prepare(&request(uid, &[("g", device)]), false, now()).unwrap_err().to_string();
        assert!(refused.contains("c-1"), "{device}: {refused}");
    }
    node.prepare(&request("c-4", &[("g", "gpu-2")]), false, now()).unwrap();
    let reached = node.overview().unwrap().0.reached;
    assert!(
        reached.iter().any(|reach| reach.claim.uid == "c-1" && reach.gpu == h100_80(1).uuid),
        "{reached:?}"
    );
}

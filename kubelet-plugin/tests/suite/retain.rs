//! GPU instances of claims that are kept without a pod: they stay, for their next pod alone, and always
//! end; whatever is killed when.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_api::v1alpha1::NodeUsageStatus;
use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::prepare::{Node, PrepareError};
use aliquot_model::hold::Hold;
use aliquot_nvml::Gpus;
use aliquot_nvml::fake::until_killed;
use aliquot_nvml::fake::{FakeGpus, h100_80};
use common::cluster::{Cluster, eventually};
use common::kill::killer;
use common::{World, now, request};
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;
use std::time::Duration;

const SMALL: &str = "gpu-0-mig-1g10gb-19-6";

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1)]))
}

/// A claim that the controller keeps: a partition, a share, a time-sliced part that is not kept.
fn kept() -> Request {
    Request { hold: Some(Hold::InUse), ..request("c-1", &[("a", SMALL), ("s", "gpu-1-share")]) }
}

fn later(seconds: i64) -> Timestamp {
    Timestamp::from_second(now().as_second() + seconds).unwrap()
}

/// Ids of the GPU instances that exist.
fn instance_ids(world: &World) -> Vec<u32> {
    world.gpus.inventory().unwrap().live.iter().map(|mig| mig.gpu_instance).collect()
}

/// Only the claim's GPU instance is left.
fn assert_parked(world: &World, what: &str) {
    assert_eq!(world.instances(), [(0, 6, 1, true)], "{what}");
    assert_eq!(world.files(), Vec::<String>::new(), "{what}");
    assert!(world.ledger().claims["c-1"].is_parked(), "{what}");
}

/// Prepared beside an older instance that then goes, so that one made anew gets another id.
fn prepare_beside_another(world: &World, node: &Node) -> Vec<u32> {
    node.prepare(&request("other", &[("a", "gpu-0-mig-1g10gb-19-5")]), false, now()).unwrap();
    node.prepare(&kept(), false, now()).unwrap();
    node.unprepare("other").unwrap();
    instance_ids(world)
}

#[test]
fn a_kept_claim_gets_the_very_same_instance_again() {
    let world = world();
    let node = world.node();
    let before = prepare_beside_another(&world, &node);
    assert!(node.unprepare("c-1").unwrap());
    assert_parked(&world, "given back");
    assert!(node.unprepare("c-1").unwrap(), "the kubelet may ask again");
    let again = node.prepare(&kept(), false, now()).unwrap();
    assert_eq!(again.len(), 2);
    assert_eq!(instance_ids(&world), before);
    assert_eq!(world.files().len(), 2, "its spec and its share are made again");
    // One that the controller does not keep any more goes.
    node.note_retention("c-1", false).unwrap();
    node.unprepare("c-1").unwrap();
    world.assert_clean();
}

#[test]
fn a_parked_claim_has_no_device_metadata_and_its_next_pod_gets_it_again() {
    let world = world();
    let node = Node { device_metadata: true, ..world.node() };
    let first = node.prepare(&kept(), false, now()).unwrap();
    assert!(first.iter().all(|device| device.cdi.len() == 3), "{first:?}");
    let files = world.files();
    node.unprepare("c-1").unwrap();
    assert_parked(&world, "given back");
    let next = Request { pod_claim_name: Some("in-pod".into()), ..kept() };
    assert_eq!(node.prepare(&next, false, now()).unwrap(), first);
    assert_eq!(world.files(), files);
    let of_next = world.ledger().claims["c-1"].metadata.clone().unwrap();
    assert_eq!(of_next.pod_claim_name.as_deref(), Some("in-pod"));
    // An administrator may have switched it off before the next pod comes.
    node.unprepare("c-1").unwrap();
    let off = world.node();
    assert!(off.prepare(&kept(), false, now()).unwrap().iter().all(|device| device.cdi.len() == 2));
    off.note_retention("c-1", false).unwrap();
    off.unprepare("c-1").unwrap();
    world.assert_clean();
}

#[test]
fn without_the_controllers_entry_and_without_instances_nothing_is_kept() {
    let world = world();
    let node = world.node();
    node.prepare(&Request { hold: None, ..kept() }, false, now()).unwrap();
    node.unprepare("c-1").unwrap();
    world.assert_clean();
    let whole = Request { hold: Some(Hold::InUse), ..request("c-2", &[("g", "gpu-1")]) };
    node.prepare(&whole, false, now()).unwrap();
    node.unprepare("c-2").unwrap();
    world.assert_clean();
    // An agent that says farewell, or an administrator who switched it off.
    let off = Node { hold_at_most: Duration::ZERO, ..world.node() };
    off.prepare(&kept(), false, now()).unwrap();
    off.unprepare("c-1").unwrap();
    world.assert_clean();
}

#[test]
fn a_parked_claim_keeps_others_out_and_is_not_prepared() {
    let world = world();
    let node = world.node();
    node.prepare(&kept(), false, now()).unwrap();
    node.unprepare("c-1").unwrap();
    assert_eq!(node.prepare_known("c-1").unwrap(), None, "the API must be asked");
    let other = request("c-2", &[("x", SMALL)]);
    let refused = node.prepare(&other, false, now()).unwrap_err();
    assert!(refused.is_conflict() && refused.to_string().contains("kept for its next pod"), "{refused}");
    assert_eq!(node.parked_beside(&other).unwrap().len(), 1);
    assert!(node.parked_beside(&request("c-3", &[("x", "gpu-1-share")])).unwrap().len() == 1);
    // Beside it there is room, also for shares of the GPU whose share was given back.
    node.prepare(&request("c-4", &[("x", "gpu-0-mig-1g10gb-19-5")]), false, now()).unwrap();
    assert!(node.release_parked("c-1").unwrap());
    node.prepare(&other, false, now()).unwrap();
    assert!(!node.release_parked("c-2").unwrap(), "a prepared claim is not ended so");
    assert!(!node.release_parked("c-1").unwrap());
}

#[test]
fn a_parked_claim_of_another_allocation_or_boot_makes_room_for_its_new_devices() {
    let world = world();
    let node = world.node();
    node.prepare(&kept(), false, now()).unwrap();
    node.unprepare("c-1").unwrap();
    let moved = request("c-1", &[("a", "gpu-1-mig-1g10gb-19-6")]);
    node.prepare(&moved, false, now()).unwrap();
    assert_eq!(world.instances(), [(1, 6, 1, true)]);
    node.unprepare("c-1").unwrap();
    world.assert_clean();
    node.prepare(&kept(), false, now()).unwrap();
    node.unprepare("c-1").unwrap();
    world.reboot("boot-2");
    let node = world.node();
    node.recover().unwrap();
    assert!(world.ledger().claims.is_empty(), "the reboot took what was kept");
    node.prepare(&kept(), false, now()).unwrap();
    node.give_up("c-1", now()).unwrap();
    world.assert_clean();
}

/// (number, until) of what the controller would be told, and how many claims are reported as held.
fn reported(world: &World) -> (Vec<(u64, i64)>, usize) {
    let spec = world.node().usage(&NodeUsageStatus::default()).unwrap();
    (spec.released.iter().map(|r| (r.number, r.until)).collect(), spec.held.len())
}

#[test]
fn to_the_controller_a_parked_claim_is_released_once_whenever_it_ends() {
    let world = world();
    let node = world.node();
    node.prepare(&kept(), false, now()).unwrap();
    node.unprepare_at("c-1", later(10)).unwrap();
    node.unprepare_at("c-1", later(20)).unwrap();
    assert_eq!(reported(&world), (vec![(1, later(10).as_second())], 0));
    node.prepare(&kept(), false, later(30)).unwrap();
    assert_eq!(reported(&world).1, 1);
    node.unprepare_at("c-1", later(40)).unwrap();
    node.release_parked("c-1").unwrap();
    assert_eq!(reported(&world), (vec![(1, later(10).as_second()), (2, later(40).as_second())], 0));
    world.assert_clean();
}

#[test]
fn a_kill_at_any_point_of_parking_ends_in_the_same_state() {
    let mut points = 0;
    for at in 1.. {
        let world = world();
        world.node().prepare(&kept(), false, now()).unwrap();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| node.unprepare_at("c-1", later(10))).is_some();
        let node = world.node();
        assert!(node.recover().unwrap().failed.is_empty());
        node.unprepare_at("c-1", later(20)).unwrap();
        assert_parked(&world, &format!("killed at {at}"));
        assert_eq!(reported(&world).0.len(), 1, "killed at {at}");
        // A restart alone leaves it.
        world.node().recover().unwrap();
        assert_parked(&world, &format!("killed at {at}"));
        world.node().prepare(&kept(), false, now()).unwrap();
        node.give_up("c-1", now()).unwrap();
        world.assert_clean();
        if done {
            break;
        }
        points += 1;
    }
    // The write, and the inverses of share and spec, each with a point before and after.
    assert_eq!(points, 6);
}

#[test]
fn a_kill_at_any_point_of_taking_up_keeps_the_instance() {
    let (mut points, mut taken_up) = (0, 0);
    for at in 1.. {
        let world = world();
        let ids = prepare_beside_another(&world, &world.node());
        world.node().unprepare("c-1").unwrap();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| node.prepare(&kept(), false, now())).is_some();
        if !done {
            points += 1;
            let node = world.node();
            node.recover().unwrap();
            // At the last point it is on record as taken up.
            taken_up += usize::from(!world.ledger().claims["c-1"].is_parked());
            if taken_up == 0 {
                assert_parked(&world, &format!("killed at {at}"));
            }
            node.prepare(&kept(), false, now()).unwrap();
        }
        assert_eq!(instance_ids(&world), ids, "killed at {at}");
        assert_eq!(world.files().len(), 2);
        world.node().give_up("c-1", now()).unwrap();
        world.assert_clean();
        if done {
            break;
        }
    }
    assert!(points >= 4, "{points}");
    assert_eq!(taken_up, 1);
}

#[test]
fn a_kill_at_any_point_of_ending_a_parked_claim_leaks_nothing() {
    let mut points = 0;
    for at in 1.. {
        let world = world();
        world.node().prepare(&kept(), false, now()).unwrap();
        world.node().unprepare("c-1").unwrap();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| node.release_parked("c-1")).is_some();
        let node = world.node();
        node.recover().unwrap();
        node.release_parked("c-1").unwrap();
        world.assert_clean();
        if done {
            break;
        }
        points += 1;
    }
    assert!(points >= 8, "{points}");
}

#[test]
fn an_instance_in_use_stays_and_is_ended_later() {
    let world = world();
    let node = world.node();
    node.prepare(&kept(), false, now()).unwrap();
    node.unprepare("c-1").unwrap();
    world.gpus.fault(
        "nvmlGpuInstanceDestroy",
        1,
        aliquot_nvml::fake::FaultKind::Fail(aliquot_nvml::NvmlCode::IN_USE),
    );
    assert!(node.release_parked("c-1").is_err());
    world.gpus.clear_faults();
    let refused = node.prepare(&request("c-2", &[("x", SMALL)]), false, now()).unwrap_err();
    assert!(matches!(refused, PrepareError::Plan(_)), "{refused}");
    assert_eq!(node.parked_beside(&request("c-2", &[("x", SMALL)])).unwrap().len(), 1, "it can be asked for");
    assert!(node.release_parked("c-1").unwrap());
    world.assert_clean();
}

// --- with the API ------------------------------------------------------------------------------------

impl Cluster {
    fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), "ns")
    }

    /// Sets our entry among the claim's consumers.
    async fn keep(&self, name: &str, uid: &str, entry: Option<Hold>) {
        let consumers: Vec<_> = entry
            .iter()
            .map(|hold| json!({"apiGroup": "aliquot.dev", "resource": "holds", "name": hold.name(), "uid": uid}))
            .collect();
        let patch = json!({"status": {"reservedFor": consumers}});
        self.claims().patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }

    async fn no_instances(&self, what: &str) {
        eventually(what, || async {
            let left = self.world.instances();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        })
        .await;
    }

    async fn parked(&self) -> (String, Vec<u32>) {
        let uid = self.allocated_claim("kept", &[("a", SMALL)], json!([])).await;
        self.keep("kept", &uid, Some(Hold::InUse)).await;
        self.prepare("kept", &uid).await.unwrap();
        let ids = instance_ids(&self.world);
        self.unprepare("kept", &uid).await.unwrap();
        assert!(self.world.ledger().claims[&uid].is_parked());
        (uid, ids)
    }
}

fn in_an_hour() -> Hold {
    Hold::Until(Timestamp::now().as_second() + 3600)
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_end_when_the_api_keeps_the_claim_no_more() {
    for case in ["released", "expired", "deleted"] {
        let cluster = Cluster::new(world()).await;
        let agent = cluster.start(&[]).await;
        let (uid, ids) = cluster.parked().await;
        cluster.keep("kept", &uid, Some(in_an_hour())).await;
        // The agent takes the end from the API, over a kill.
        agent.kill();
        let agent = cluster.start(&[]).await;
        eventually("the end", || async {
            let until = cluster.world.ledger().claims[&uid].parked_until().unwrap();
            let left = until - Timestamp::now().as_second();
            if (1..=3600).contains(&left) { Ok(()) } else { Err(format!("{left} s")) }
        })
        .await;
        assert_eq!(instance_ids(&cluster.world), ids, "{case}");
        match case {
            "released" => cluster.keep("kept", &uid, None).await,
            "expired" => {
                cluster.keep("kept", &uid, Some(Hold::Until(Timestamp::now().as_second() - 1))).await;
            }
            _ => {
                let patch = json!({"metadata": {"finalizers": null}});
                cluster.claims().patch("kept", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
                cluster.claims().delete("kept", &DeleteParams::default()).await.unwrap();
            }
        }
        cluster.no_instances(case).await;
        agent.terminate().await;
        cluster.world.assert_clean();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overlapping_claim_gets_the_place_once_the_api_shows_that_the_kept_one_is_gone() {
    let cluster = Cluster::new(world()).await;
    // Nobody looks by himself.
    let agent = cluster.start(&["--claim-check-interval=1h"]).await;
    let (uid, ids) = cluster.parked().await;
    let next = cluster.allocated_claim("next", &[("a", "gpu-0-mig-3g40gb-9-4")], json!([])).await;
    let refused = cluster.prepare("next", &next).await.unwrap_err();
    assert!(refused.contains("ns/kept") && refused.contains("kept for its next pod"), "{refused}");
    assert_eq!(instance_ids(&cluster.world), ids, "the API still keeps it");
    cluster.keep("kept", &uid, None).await;
    cluster.prepare("next", &next).await.unwrap();
    assert_eq!(cluster.world.instances(), [(0, 4, 4, true)]);
    cluster.unprepare("next", &next).await.unwrap();
    agent.terminate().await;
    cluster.world.assert_clean();
}

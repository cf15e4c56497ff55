//! Limits of shares that change while they run, on the node: whoever is killed when, quota files say what
//! the ledger says, and the controller is answered only what is in force.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;
use aliquot_api::v1alpha1::{NodeLimits, NodeLimitsSpec, NodeLimitsStatus};

use aliquot_api::v1alpha1::node_limits::{ShareLimit, ShareName};
use aliquot_kubelet_plugin::probe::Probe;
use aliquot_nvml::fake::{FakeGpus, Killed, h100_80};
use aliquot_quota::QuotaFile;
use common::cluster::{Cluster, eventually};
use common::{World, now, request};
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use serde_json::json;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

const GIB: u64 = 1 << 30;

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1)]))
}

fn limit(uid: &str, share_id: &str, gib: u64, cores_percent: u8) -> ShareLimit {
    ShareLimit {
        share: ShareName { uid: uid.to_owned(), share_id: share_id.to_owned() },
        namespace: "ns".to_owned(),
        name: "one".to_owned(),
        device: "gpu-0-share".to_owned(),
        memory_bytes: gib * GIB,
        cores_percent,
    }
}

/// Memory in GiB, percent and generation of the only quota file.
fn quota(world: &World) -> (u64, u8, u64) {
    let shares = world.data().join("shares");
    let dir = std::fs::read_dir(shares).unwrap().next().unwrap().unwrap().path();
    let file = QuotaFile::decode(&std::fs::read(dir.join("quota/quota")).unwrap()).unwrap();
    (file.memory_bytes / GIB, file.cores_percent, file.generation)
}

/// Memory in GiB and percent that the ledger says.
fn ledger(world: &World) -> (u64, u8) {
    let ledger = world.ledger();
    let limit = ledger.claims.values().next().unwrap().devices[0].share.as_ref().unwrap().limit();
    (limit.memory_bytes / GIB, limit.cores_percent)
}

/// Whether it was killed at that point.
fn killed(world: &World, at: usize, wanted: &[ShareLimit]) -> bool {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !info.payload().is::<Killed>() {
                loud(info);
            }
        }));
    });
    let passed = AtomicUsize::new(0);
    let node = world.node_with(Probe::new(move |_| {
        if passed.fetch_add(1, Ordering::SeqCst) + 1 == at {
            std::panic::panic_any(Killed);
        }
    }));
    match catch_unwind(AssertUnwindSafe(|| node.limit(wanted))) {
        Ok(result) => {
            result.unwrap();
            false
        }
        Err(death) if death.is::<Killed>() => true,
        Err(other) => std::panic::resume_unwind(other),
    }
}

#[test]
fn a_kill_at_any_point_of_a_change_leaves_files_that_say_what_the_ledger_says() {
    for (before, after) in [(4, 8), (8, 4), (8, 2)] {
        let mut points = 0;
        for at in 1.. {
            let world = world();
            world.node().prepare(&request("c-1", &[("c", "gpu-1-share")]), false, now()).unwrap();
            world.node().limit(&[limit("c-1", "share-c", before, 25)]).unwrap();
            let wanted = [limit("c-1", "share-c", after, 40)];
            if !killed(&world, at, &wanted) {
                assert_eq!(quota(&world).0, after);
                break;
            }
            points += 1;
            world.node().recover().unwrap();
            let (memory, cores, _) = quota(&world);
            assert_eq!((memory, cores), ledger(&world), "killed at point {at}");
            assert!([(before, 25), (after, 40)].contains(&(memory, cores)));
            world.node().limit(&wanted).unwrap();
            assert_eq!((quota(&world).0, quota(&world).1), (after, 40));
            assert!(world.node().unprepare("c-1").unwrap());
            world.assert_clean();
        }
        assert_eq!(points, 3);
    }
}

#[test]
fn a_share_that_grew_leaves_less_for_others_and_is_made_so_after_a_reboot() {
    let world = world();
    let node = world.node();
    node.prepare(&request("c-1", &[("c", "gpu-1-share")]), false, now()).unwrap();
    assert!(node.limit(&[limit("c-1", "share-c", 77, 30)]).unwrap().refused.is_empty());
    let refused = node.prepare(&request("c-2", &[("c", "gpu-1-share")]), false, now()).unwrap_err();
    assert!(refused.to_string().contains("memory"), "{refused}");
    // What another claim has cannot be granted either.
    node.limit(&[limit("c-1", "share-c", 70, 30)]).unwrap();
    node.prepare(&request("c-2", &[("c", "gpu-1-share")]), false, now()).unwrap();
    let answer = node.limit(&[limit("c-1", "share-c", 77, 30)]).unwrap();
    assert_eq!(answer.refused.len(), 1);
    assert_eq!(ledger(&world), (70, 30));
    world.reboot("boot-2");
    let node = world.node();
    node.recover().unwrap();
    node.unprepare("c-2").unwrap();
    // The kubelet prepares it anew, with its allocation, and the controller's word counts again.
    node.prepare(&request("c-1", &[("c", "gpu-1-share")]), false, now()).unwrap();
    assert_eq!(quota(&world).0, 4);
    node.limit(&[limit("c-1", "share-c", 70, 30)]).unwrap();
    assert_eq!((quota(&world).0, quota(&world).1), (70, 30));
}

async fn cluster() -> Cluster {
    let cluster = Cluster::new(world()).await;
    cluster.define::<NodeLimits>().await;
    cluster
}

fn objects(cluster: &Cluster) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("aliquot.dev", "v1alpha1", "NodeLimits");
    Api::all_with(cluster.client.clone(), &ApiResource::from_gvk_with_plural(&kind, "nodelimits"))
}

async fn say(cluster: &Cluster, shares: Vec<ShareLimit>) {
    let spec = NodeLimitsSpec { shares };
    let object = json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "NodeLimits",
        "metadata": {"name": "n1"}, "spec": spec});
    let params = PatchParams::apply("test").force();
    objects(cluster).patch("n1", &params, &Patch::Apply(&object)).await.unwrap();
}

/// Waits for the node's answer to what was said last.
async fn answered(cluster: &Cluster) -> NodeLimitsStatus {
    eventually("an answer", || async {
        let object = objects(cluster).get("n1").await.map_err(|error| error.to_string())?;
        let status = object.data.get("status").cloned().unwrap_or_default();
        let status: NodeLimitsStatus = serde_json::from_value(status).unwrap_or_default();
        if Some(status.observed_generation) == object.metadata.generation {
            Ok(status)
        } else {
            Err(format!("{status:?}"))
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_does_what_it_is_told_and_answers_also_after_a_kill() {
    let cluster = cluster().await;
    let agent = cluster.start(&["--elastic-shares=true"]).await;
    let uid = cluster.allocated_claim("one", &[("a", "gpu-0-share")], json!([])).await;
    cluster.prepare("one", &uid).await.unwrap();
    let share_id = cluster.world.ledger().claims[&uid].devices[0].share_id.clone().unwrap();
    let base = quota(&cluster.world);
    say(&cluster, vec![limit(&uid, &share_id, 20, 50)]).await;
    assert_eq!(answered(&cluster).await.refused, []);
    assert_eq!(quota(&cluster.world), (20, 50, base.2 + 1));
    // More than the GPU has.
    say(&cluster, vec![limit(&uid, &share_id, 90, 50)]).await;
    let refused = answered(&cluster).await.refused;
    assert!(refused.len() == 1 && refused[0].reason.contains("bytes of its"), "{refused:?}");
    assert_eq!(quota(&cluster.world).0, 20);
    agent.kill();
    say(&cluster, vec![limit(&uid, &share_id, 2, 50)]).await;
    let agent = cluster.start(&["--elastic-shares=true"]).await;
    assert_eq!(answered(&cluster).await.refused, []);
    assert_eq!(quota(&cluster.world).0, 2);
    // Without the object it has its allocation again.
    objects(&cluster).delete("n1", &DeleteParams::default()).await.unwrap();
    eventually("the allocation", || async {
        let now = quota(&cluster.world);
        if (now.0, now.1) == (base.0, base.1) { Ok(()) } else { Err(format!("{now:?}")) }
    })
    .await;
    agent.terminate().await;
}

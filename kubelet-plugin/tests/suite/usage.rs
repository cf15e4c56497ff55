//! What a node tells of usage: held, released, acknowledged, whoever is killed when.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;
use aliquot_api::v1alpha1::{NodeUsage, NodeUsageSpec, NodeUsageStatus};

use aliquot_control_plane::{Fault, FaultRule, Matcher};
use aliquot_model::MicroGpus;
use aliquot_nvml::fake::{FakeGpus, h100_80};
use common::World;
use common::cluster::{Agent, Cluster, eventually, of_agent};
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use rstest::rstest;
use serde_json::json;

async fn cluster() -> Cluster {
    let cluster = Cluster::new(World::new(FakeGpus::new([h100_80(0), h100_80(1)]))).await;
    cluster.define::<NodeUsage>().await;
    cluster
}

fn usages(cluster: &Cluster) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("aliquot.dev", "v1alpha1", "NodeUsage");
    Api::all_with(cluster.client.clone(), &ApiResource::from_gvk_with_plural(&kind, "nodeusages"))
}

async fn start(cluster: &Cluster) -> Agent {
    cluster.start(&["--report-usage=true"]).await
}

/// Waits until the node says so.
async fn said(cluster: &Cluster, what: &str, want: impl Fn(&NodeUsageSpec) -> bool) -> NodeUsageSpec {
    eventually(what, || async {
        let object = usages(cluster).get("n1").await.map_err(|error| error.to_string())?;
        let spec: NodeUsageSpec = serde_json::from_value(object.data["spec"].clone()).unwrap();
        if want(&spec) { Ok(spec) } else { Err(format!("{spec:?}")) }
    })
    .await
}

async fn acknowledge(cluster: &Cluster, ledger: &str, number: u64) {
    let status = NodeUsageStatus { ledger: ledger.to_owned(), acknowledged: number };
    let patch = Patch::Merge(json!({"status": status}));
    usages(cluster).patch_status("n1", &PatchParams::default(), &patch).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_held_then_released_then_forgotten_when_it_is_acknowledged() {
    let cluster = cluster().await;
    let agent = start(&cluster).await;
    let devices = [("a", "gpu-0-mig-3g40gb-9-0"), ("b", "gpu-1-share")];
    let uid = cluster.allocated_claim("one", &devices, json!([])).await;
    cluster.prepare("one", &uid).await.unwrap();
    let spec = said(&cluster, "a claim is held", |spec| spec.held.len() == 1).await;
    let held = &spec.held[0];
    assert_eq!((held.namespace.as_str(), held.name.as_str(), held.uid.as_str()), ("ns", "one", uid.as_str()));
    // Its allocation says 2026-01-02T03:04:05Z, and nothing is allocated before it was made.
    let created = cluster.plane.object("resource.k8s.io", "resourceclaims", "ns", "one").unwrap();
    let created: jiff::Timestamp =
        created["metadata"]["creationTimestamp"].as_str().unwrap().parse().unwrap();
    assert_eq!(held.since, created.as_second().max(1_767_323_045));
    let gpu = h100_80(0);
    let half = MicroGpus::of_partition(gpu.profile(9).unwrap(), &gpu);
    assert!((490_000..=500_000).contains(&half.0), "{half}");
    // And a quarter of the other GPU's compute.
    assert_eq!(held.micro_gpus, half.plus(MicroGpus(250_000)));
    cluster.unprepare("one", &uid).await.unwrap();
    let spec = said(&cluster, "it is released", |spec| spec.released.len() == 1).await;
    assert!(spec.held.is_empty());
    assert_eq!((spec.released[0].number, spec.released[0].claim.uid.as_str()), (1, uid.as_str()));
    assert!(spec.released[0].until >= held.since);
    // An answer to another ledger changes nothing.
    acknowledge(&cluster, "another", 7).await;
    acknowledge(&cluster, &spec.ledger, 0).await;
    assert_eq!(cluster.world.ledger().releases.len(), 1);
    acknowledge(&cluster, &spec.ledger, 1).await;
    said(&cluster, "it is forgotten", |spec| spec.released.is_empty()).await;
    assert!(cluster.world.ledger().releases.is_empty());
    agent.terminate().await;
}

#[rstest]
#[case::before_it_arrives(Fault::DropBefore)]
#[case::before_the_answer(Fault::DropAfter)]
#[case::in_the_middle(Fault::Hang { millis: 600_000 })]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_has_one_number_whenever_the_agent_is_killed(#[case] fault: Fault) {
    let cluster = cluster().await;
    let agent = start(&cluster).await;
    let first = cluster.allocated_claim("one", &[("a", "gpu-0")], json!([])).await;
    cluster.prepare("one", &first).await.unwrap();
    said(&cluster, "a claim is held", |spec| spec.held.len() == 1).await;
    // The write that tells the release.
    let rule = FaultRule::always(of_agent(Matcher::new("patch", "nodeusages")), fault);
    let rule = cluster.plane.faults().add(rule);
    cluster.unprepare("one", &first).await.unwrap();
    eventually("the agent is in its write", || async {
        let hit = cluster.plane.faults().rules().iter().any(|state| state.hits > 0);
        if hit { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    agent.kill();
    cluster.plane.faults().remove(rule);
    let agent = start(&cluster).await;
    let spec = said(&cluster, "the release", |spec| spec.released.len() == 1 && spec.held.is_empty()).await;
    assert_eq!(spec.released[0].number, 1);
    // Killed between the acknowledgement and forgetting.
    agent.kill();
    acknowledge(&cluster, &spec.ledger, 1).await;
    let second = cluster.allocated_claim("two", &[("a", "gpu-0")], json!([])).await;
    let agent = start(&cluster).await;
    cluster.prepare("two", &second).await.unwrap();
    cluster.unprepare("two", &second).await.unwrap();
    let wanted = |spec: &NodeUsageSpec| spec.released.iter().map(|r| r.number).eq([2]);
    let spec = said(&cluster, "only the second release", wanted).await;
    assert_eq!(spec.released[0].claim.uid, second);
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_somebody_deleted_is_written_again_while_anything_waits_in_it() {
    let cluster = cluster().await;
    let agent = start(&cluster).await;
    let uid = cluster.allocated_claim("one", &[("a", "gpu-0")], json!([])).await;
    cluster.prepare("one", &uid).await.unwrap();
    cluster.unprepare("one", &uid).await.unwrap();
    let before = said(&cluster, "a release", |spec| spec.released.len() == 1).await;
    usages(&cluster).delete("n1", &DeleteParams::default()).await.unwrap();
    let after = said(&cluster, "the release again", |spec| spec.released.len() == 1).await;
    assert_eq!(before, after);
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_nobody_asks_for_it_nothing_is_recorded() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let uid = cluster.allocated_claim("one", &[("a", "gpu-0")], json!([])).await;
    cluster.prepare("one", &uid).await.unwrap();
    cluster.unprepare("one", &uid).await.unwrap();
    assert!(cluster.world.ledger().releases.is_unused());
    assert!(usages(&cluster).get_opt("n1").await.unwrap().is_none());
    agent.terminate().await;
}

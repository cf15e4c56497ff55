//! Elastic shares against an API server: whoever is killed when, the limit is never more than what is
//! reserved, and ends where the claim asks for it.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::common;
use aliquot_api::v1alpha1::{NodeLimits, NodeLimitsSpec, NodeLimitsStatus, resource};

use aliquot_control_plane::{Fault, FaultRule, Matcher};
use aliquot_model::names::{COMPANION_OF, LIMITS};
use common::{Cluster, Running, eventually, fixtures};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use rstest::rstest;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::task::JoinHandle;

const GIB: u64 = 1 << 30;

fn limits(cluster: &Cluster) -> Api<DynamicObject> {
    Api::all_with(cluster.client.clone(), &resource::<NodeLimits>())
}

fn claims(cluster: &Cluster) -> Api<ResourceClaim> {
    Api::namespaced(cluster.client.clone(), "default")
}

async fn controller(cluster: &Cluster, identity: &str) -> Running {
    cluster.controller(identity, &["--elastic-shares=true"]).await
}

/// Memory that the node is told, if it is told any.
fn told(object: &DynamicObject) -> Option<u64> {
    let spec: NodeLimitsSpec = serde_json::from_value(object.data["spec"].clone()).expect("a spec");
    spec.shares.first().map(|limit| limit.memory_bytes)
}

/// Memory that claims have.
async fn reserved(cluster: &Cluster) -> u64 {
    let all = claims(cluster).list(&ListParams::default()).await.expect("listed").items;
    let results = all.into_iter().filter_map(|claim| claim.status?.allocation?.devices?.results).flatten();
    let memory = results.filter_map(|result| result.consumed_capacity?.get("memory").cloned());
    memory.filter_map(|amount| amount.0.parse::<aliquot_model::Quantity>().ok()?.to_u64()).sum()
}

/// The node's agent: does what it is told, and looks that it is reserved first.
fn agent(cluster: &Arc<Cluster>) -> (JoinHandle<()>, Arc<AtomicBool>) {
    let (cluster, beyond) = (cluster.clone(), Arc::new(AtomicBool::new(false)));
    let found = beyond.clone();
    let task = tokio::spawn(async move {
        loop {
            if let Ok(Some(object)) = limits(&cluster).get_opt("n1").await {
                let generation = object.metadata.generation.unwrap_or_default();
                let status = object.data.get("status").cloned().unwrap_or_default();
                let status: NodeLimitsStatus = serde_json::from_value(status).unwrap_or_default();
                if status.observed_generation != generation {
                    let memory = told(&object);
                    // What is told now was reserved before, and stays so until we confirm something else.
                    if memory.is_some_and(|memory| memory > 10 * GIB)
                        && reserved(&cluster).await < memory.unwrap_or_default()
                    {
                        found.store(true, Ordering::Relaxed);
                    }
                    let patch = json!({"metadata": {"resourceVersion": object.resource_version()},
                        "status": {"observedGeneration": generation}});
                    let params = PatchParams::default();
                    let _ = limits(&cluster).patch_status("n1", &params, &Patch::Merge(&patch)).await;
                }
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
    (task, beyond)
}

async fn start() -> Arc<Cluster> {
    let cluster = Cluster::start().await;
    cluster.define::<NodeLimits>().await;
    cluster.add_node("n1", 1).await;
    Arc::new(cluster)
}

async fn share(cluster: &Cluster) {
    cluster.claim("a", &[fixtures::share("r", "10Gi", "30")]).await;
    cluster.pod("a", &["a"]).await;
    assert_eq!(cluster.bound("a").await, "n1");
}

async fn wish(cluster: &Cluster, text: &str) {
    let patch = json!({"metadata": {"annotations": {LIMITS: text}}});
    claims(cluster).patch("a", &PatchParams::default(), &Patch::Merge(&patch)).await.expect("patched");
}

/// Waits until the node is told so and exactly as much is reserved, by as many claims.
async fn settled(cluster: &Cluster, memory: Option<u64>, held: u64, companions: usize) {
    eventually(&format!("a limit of {memory:?} GiB, {held} GiB reserved"), async || {
        let object = limits(cluster).get_opt("n1").await.expect("readable");
        let all = claims(cluster).list(&ListParams::default()).await.expect("listed").items;
        let count = all.iter().filter(|claim| claim.annotations().contains_key(COMPANION_OF)).count();
        let fine = object.as_ref().and_then(told) == memory.map(|gib| gib * GIB)
            && reserved(cluster).await == held * GIB
            && count == companions;
        fine.then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_grows_shrinks_and_leaves_nothing_when_its_pod_ends() {
    let cluster = start().await;
    let (node, beyond) = agent(&cluster);
    let controller = controller(&cluster, "c1").await;
    share(&cluster).await;
    wish(&cluster, "memory=20Gi").await;
    settled(&cluster, Some(20), 20, 1).await;
    wish(&cluster, "memory=70Gi").await;
    settled(&cluster, Some(70), 70, 2).await;
    wish(&cluster, "memory=12Gi").await;
    settled(&cluster, Some(12), 12, 1).await;
    wish(&cluster, "memory=5Gi").await;
    settled(&cluster, Some(5), 10, 0).await;
    wish(&cluster, "memory=30Gi").await;
    settled(&cluster, Some(30), 30, 1).await;
    cluster.delete_pod("a").await;
    settled(&cluster, None, 0, 0).await;
    assert!(!beyond.load(Ordering::Relaxed), "a limit was told that was not reserved");
    node.abort();
    controller.terminate().await;
}

fn writes(verb: &str, resource: &str) -> Matcher {
    Matcher::new(verb, resource).by("c1")
}

#[rstest]
#[case::no_companion_is_made(writes("create", "resourceclaims"), Fault::DropBefore)]
#[case::a_companion_is_made(writes("create", "resourceclaims"), Fault::DropAfter)]
#[case::its_finalizer(writes("patch", "resourceclaims").subresource(""), Fault::DropAfter)]
#[case::before_its_allocation(writes("patch", "resourceclaims").subresource("status"), Fault::DropBefore)]
#[case::after_its_allocation(writes("patch", "resourceclaims").subresource("status"), Fault::DropAfter)]
#[case::before_the_node_is_told(writes("create", "nodelimits"), Fault::DropBefore)]
#[case::after_the_node_is_told(writes("create", "nodelimits"), Fault::DropAfter)]
#[case::before_the_node_is_told_less(writes("patch", "nodelimits"), Fault::DropBefore)]
#[case::after_the_node_is_told_less(writes("patch", "nodelimits"), Fault::DropAfter)]
#[case::a_companion_is_deleted(writes("delete", "resourceclaims"), Fault::DropAfter)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_in_a_write_leaves_what_the_next_one_ends(
    #[case] at: Matcher,
    #[case] fault: Fault,
) {
    let cluster = start().await;
    let (node, beyond) = agent(&cluster);
    let first = controller(&cluster, "c1").await;
    share(&cluster).await;
    let rule = cluster.handle.faults().add(FaultRule::always(at, fault));
    let hit = || cluster.handle.faults().rules().iter().any(|state| state.hits > 0);
    wish(&cluster, "memory=20Gi").await;
    // Writes of shrinking come after those of growing.
    eventually("the write, or growth", async || {
        let object = limits(&cluster).get_opt("n1").await.expect("readable");
        (hit() || object.as_ref().and_then(told) == Some(20 * GIB)).then_some(())
    })
    .await;
    if !hit() {
        wish(&cluster, "memory=10Gi").await;
        eventually("the write", async || hit().then_some(())).await;
    }
    first.kill();
    cluster.handle.faults().remove(rule);
    wish(&cluster, "memory=15Gi").await;
    let second = controller(&cluster, "c2").await;
    settled(&cluster, Some(15), 15, 1).await;
    wish(&cluster, "memory=10Gi").await;
    settled(&cluster, None, 10, 0).await;
    assert!(!beyond.load(Ordering::Relaxed), "a limit was told that was not reserved");
    node.abort();
    second.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_given_back_before_the_node_has_confirmed() {
    let cluster = start().await;
    let controller = controller(&cluster, "c1").await;
    share(&cluster).await;
    let (node, _) = agent(&cluster);
    wish(&cluster, "memory=60Gi").await;
    settled(&cluster, Some(60), 60, 1).await;
    node.abort();
    let _ = node.await;
    wish(&cluster, "memory=10Gi").await;
    settled(&cluster, None, 60, 1).await;
    // A pod that wants the rest waits for the node.
    cluster.claim("b", &[fixtures::share("r", "50Gi", "30")]).await;
    cluster.pod("b", &["b"]).await;
    eventually("the controller has looked", async || {
        (controller.metrics.text().contains("decisions_total{outcome=\"no_fit\"}")).then_some(())
    })
    .await;
    assert!(cluster.devices("b").await.is_empty());
    let (node, _) = agent(&cluster);
    assert_eq!(cluster.bound("b").await, "n1");
    node.abort();
    controller.terminate().await;
}

//! Claims that have devices without a pod, against the embedded control plane.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::common;

use aliquot_control_plane::{Controllers, Fault, FaultRule, Matcher, Options, PodDeletion};
use aliquot_model::names::{BINDING, HOLD_FOR, HOLD_PRIORITY, RECLAIM};
use common::{Cluster, auditor, eventually, fixtures};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use rstest::rstest;
use serde_json::{Value, json};

async fn claim(cluster: &Cluster, name: &str, annotations: Value) {
    let mut claim = fixtures::claim(name, &fixtures::spec(&[fixtures::request("gpu", "gpu.aliquot.dev", 1)]));
    claim.metadata.annotations = Some(serde_json::from_value(annotations).expect("annotations"));
    cluster.create(&claim).await;
}

/// Names of a claim's consumers, ours as `holds/<until when>`.
async fn consumers(cluster: &Cluster, claim: &str) -> Vec<String> {
    let status = cluster.get_claim(claim).await.status.unwrap_or_default();
    let consumers = status.reserved_for.unwrap_or_default();
    consumers.into_iter().map(|consumer| format!("{}/{}", consumer.resource, consumer.name)).collect()
}

fn claims(cluster: &Cluster) -> Api<ResourceClaim> {
    Api::namespaced(cluster.client.clone(), "default")
}

async fn is_allocated(cluster: &Cluster, claim: &str, wanted: bool) {
    eventually(&format!("claim {claim} allocated: {wanted}"), async || {
        (cluster.devices(claim).await.is_empty() != wanted).then_some(())
    })
    .await;
}

async fn is_kept_without_pod(cluster: &Cluster, claim: &str) {
    eventually(&format!("claim {claim} is kept without a pod"), async || {
        let consumers = consumers(cluster, claim).await;
        matches!(consumers.as_slice(), [only] if only.starts_with("holds/until-")).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_immediate_claim_has_devices_before_its_pod_which_then_runs_on_them() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    claim(&cluster, "early", json!({BINDING: "Immediate"})).await;
    is_allocated(&cluster, "early", true).await;
    is_kept_without_pod(&cluster, "early").await;
    let before = cluster.devices("early").await;
    // A pod that comes first and wants the same waits.
    cluster.claim("late", &[fixtures::request("gpu", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("late", &["late"]).await;
    cluster.pod("p", &["early"]).await;
    assert_eq!(cluster.bound("p").await, "n1");
    assert_eq!(cluster.devices("early").await, before);
    assert!(cluster.devices("late").await.is_empty());
    cluster.delete_pod("p").await;
    is_kept_without_pod(&cluster, "early").await;
    assert_eq!(cluster.devices("early").await, before, "an hour is not over");
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_immediate_claim_that_does_not_fit_is_bound_when_there_is_room() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("first", &[fixtures::request("gpu", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("first", &["first"]).await;
    cluster.bound("first").await;
    claim(&cluster, "early", json!({BINDING: "Immediate"})).await;
    cluster.pod("other", &["first"]).await;
    cluster.bound("other").await;
    assert!(cluster.devices("early").await.is_empty());
    cluster.delete_pod("first").await;
    cluster.delete_pod("other").await;
    is_allocated(&cluster, "early", true).await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retained_claim_keeps_its_devices_for_its_next_pod_and_is_gone_when_deleted() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    claim(&cluster, "notebook", json!({RECLAIM: "Retain"})).await;
    assert!(cluster.devices("notebook").await.is_empty(), "it waits for its first consumer");
    cluster.pod("monday", &["notebook"]).await;
    cluster.bound("monday").await;
    let devices = cluster.devices("notebook").await;
    eventually("our entry", async || {
        consumers(&cluster, "notebook").await.contains(&"holds/in-use".to_owned()).then_some(())
    })
    .await;
    cluster.delete_pod("monday").await;
    is_kept_without_pod(&cluster, "notebook").await;
    cluster.pod("tuesday", &["notebook"]).await;
    cluster.bound("tuesday").await;
    assert_eq!(cluster.devices("notebook").await, devices);
    cluster.delete_pod("tuesday").await;
    is_kept_without_pod(&cluster, "notebook").await;
    claims(&cluster).delete("notebook", &DeleteParams::default()).await.expect("deleted");
    eventually("the claim is gone", async || {
        claims(&cluster).get_opt("notebook").await.expect("readable").is_none().then_some(())
    })
    .await;
    cluster.claim("both", &[fixtures::request("gpu", "gpu.aliquot.dev", 2)]).await;
    cluster.pod("both", &["both"]).await;
    cluster.bound("both").await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_ends_by_itself_also_when_the_controller_that_began_it_was_killed() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let first = cluster.controller("c1", &[]).await;
    claim(&cluster, "notebook", json!({RECLAIM: "Retain", HOLD_FOR: "2s"})).await;
    cluster.pod("p", &["notebook"]).await;
    cluster.bound("p").await;
    eventually("our entry", async || {
        consumers(&cluster, "notebook").await.contains(&"holds/in-use".to_owned()).then_some(())
    })
    .await;
    first.kill();
    cluster.delete_pod("p").await;
    eventually("the pod has left the claim", async || {
        (consumers(&cluster, "notebook").await == ["holds/in-use"]).then_some(())
    })
    .await;
    assert_eq!(cluster.devices("notebook").await.len(), 1, "nobody else clears it");
    let second = cluster.controller("c2", &[]).await;
    is_allocated(&cluster, "notebook", false).await;
    eventually("the finalizer is gone", async || {
        cluster.get_claim("notebook").await.finalizers().is_empty().then_some(())
    })
    .await;
    assert!(consumers(&cluster, "notebook").await.is_empty());
    second.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_takes_the_annotation_away_has_the_devices_released() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    claim(&cluster, "early", json!({BINDING: "Immediate"})).await;
    is_kept_without_pod(&cluster, "early").await;
    let patch = json!({"metadata": {"annotations": {BINDING: null}}});
    claims(&cluster).patch("early", &PatchParams::default(), &Patch::Merge(&patch)).await.expect("patched");
    is_allocated(&cluster, "early", false).await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_class_says_it_for_all_its_claims_and_the_administrator_can_forbid_it() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    let patch = json!({"metadata": {"annotations": {BINDING: "Immediate"}}});
    let params = PatchParams::default();
    classes.patch("gpu.aliquot.dev", &params, &Patch::Merge(&patch)).await.expect("patched");
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("a", &[fixtures::request("gpu", "gpu.aliquot.dev", 1)]).await;
    is_kept_without_pod(&cluster, "a").await;
    controller.terminate().await;
    let strict = cluster.controller("c2", &["--hold-at-most", "0s"]).await;
    is_allocated(&cluster, "a", false).await;
    strict.terminate().await;
}

/// A pod of that priority that uses a claim of its own for one GPU.
async fn with_priority(cluster: &Cluster, name: &str, priority: i32) {
    cluster.claim(name, &[fixtures::request("gpu", "gpu.aliquot.dev", 1)]).await;
    let mut pod = fixtures::pod(name, &[name]);
    if priority != 0 {
        let class = format!("class-{name}");
        let object = json!({"metadata": {"name": class}, "value": priority});
        cluster.create_global::<PriorityClass>(&fixtures::object(object)).await;
        if let Some(spec) = &mut pod.spec {
            spec.priority_class_name = Some(class);
        }
    }
    cluster.create(&pod).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_pod_uses_is_taken_for_a_pod_of_higher_priority_before_anybody_is_evicted() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 3).await;
    let controller = cluster.controller("c1", &[]).await;
    with_priority(&cluster, "low", -10).await;
    cluster.bound("low").await;
    claim(&cluster, "kept", json!({BINDING: "Immediate"})).await;
    is_allocated(&cluster, "kept", true).await;
    claim(&cluster, "lower", json!({BINDING: "Immediate", HOLD_PRIORITY: "-20"})).await;
    is_allocated(&cluster, "lower", true).await;
    // A pod of the same standing as a hold waits; one hold says that it stands lower.
    with_priority(&cluster, "same", 0).await;
    cluster.bound("same").await;
    is_allocated(&cluster, "lower", false).await;
    with_priority(&cluster, "again", 0).await;
    with_priority(&cluster, "high", 5).await;
    cluster.bound("high").await;
    is_allocated(&cluster, "kept", false).await;
    auditor::check(&cluster.handle);
    let evicted = cluster.handle.audit(0).iter().any(|entry| entry.origin.subresource == "eviction");
    let low = cluster.get_pod("low").await;
    assert!(!evicted || low.is_none(), "only who stands below is evicted, and after what nobody uses");
    controller.terminate().await;
}

async fn evictions(cluster: &Cluster) -> Vec<String> {
    let record = cluster.handle.audit(0);
    let evictions = record.iter().filter(|entry| entry.origin.subresource == "eviction");
    evictions.map(|entry| entry.name.clone()).collect()
}

/// A pod ends at once, or only when the test says so; the controller is killed right after the eviction, or not.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_of_higher_priority_gets_what_a_kept_claim_has_in_use(
    #[values(PodDeletion::Immediate, PodDeletion::Graceful)] deletion: PodDeletion,
    #[values(false, true)] killed: bool,
) {
    let options = Options { controllers: Controllers::ALL, pod_deletion: deletion, ..Options::default() };
    let cluster = Cluster::start_as(options).await;
    cluster.add_node("n1", 1).await;
    let first = cluster.controller("c1", &[]).await;
    claim(&cluster, "kept", json!({RECLAIM: "Retain"})).await;
    let mut low = fixtures::pod("low", &["kept"]);
    let class = json!({"metadata": {"name": "low"}, "value": -10});
    cluster.create_global::<PriorityClass>(&fixtures::object(class)).await;
    low.spec.as_mut().expect("a spec").priority_class_name = Some("low".to_owned());
    cluster.create(&low).await;
    cluster.bound("low").await;
    eventually("the claim is kept", async || {
        consumers(&cluster, "kept").await.contains(&"holds/in-use".to_owned()).then_some(())
    })
    .await;
    // Without its pod the claim would stand at 0, so this one would gain nothing.
    with_priority(&cluster, "same", 0).await;
    eventually("it is told that it does not fit", async || {
        let told = cluster.handle.audit(0).iter().any(|entry| {
            let about = |event: &std::sync::Arc<Value>| {
                event["reason"] == "DevicesDoNotFit" && event["involvedObject"]["name"] == "same"
            };
            entry.origin.resource == "events" && entry.after.as_ref().is_some_and(about)
        });
        told.then_some(())
    })
    .await;
    assert!(evictions(&cluster).await.is_empty());
    cluster.delete_pod("same").await;
    let mut second = None;
    if killed {
        let writes = Matcher::new("patch", "resourceclaims").subresource("status").by("c1");
        cluster.handle.faults().add(FaultRule::always(writes, Fault::Hang { millis: 600_000 }));
    }
    with_priority(&cluster, "high", 1).await;
    eventually("an eviction", async || (!evictions(&cluster).await.is_empty()).then_some(())).await;
    let first = if killed {
        first.kill();
        second = Some(cluster.controller("c2", &[]).await);
        None
    } else {
        Some(first)
    };
    if deletion == PodDeletion::Graceful {
        eventually("nothing is kept", async || {
            (!consumers(&cluster, "kept").await.iter().any(|name| name.starts_with("holds/"))).then_some(())
        })
        .await;
        cluster.delete_pod("low").await;
    }
    cluster.bound("high").await;
    is_allocated(&cluster, "kept", false).await;
    assert_eq!(evictions(&cluster).await, ["low"]);
    auditor::check(&cluster.handle);
    for controller in first.into_iter().chain(second) {
        controller.terminate().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_pod_uses_and_what_a_lower_pod_has_are_taken_together() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    claim(&cluster, "spare", json!({BINDING: "Immediate"})).await;
    is_allocated(&cluster, "spare", true).await;
    with_priority(&cluster, "low", -10).await;
    cluster.bound("low").await;
    cluster.claim("high", &[fixtures::request("gpu", "gpu.aliquot.dev", 2)]).await;
    let class = json!({"metadata": {"name": "high"}, "value": 5});
    cluster.create_global::<PriorityClass>(&fixtures::object(class)).await;
    let mut high = fixtures::pod("high", &["high"]);
    high.spec.as_mut().expect("a spec").priority_class_name = Some("high".to_owned());
    cluster.create(&high).await;
    cluster.bound("high").await;
    assert_eq!(evictions(&cluster).await, ["low"]);
    is_allocated(&cluster, "spare", false).await;
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_as_much_is_taken_as_is_needed() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 3).await;
    let controller = cluster.controller("c1", &[]).await;
    for name in ["a", "b", "c"] {
        claim(&cluster, name, json!({BINDING: "Immediate"})).await;
        is_allocated(&cluster, name, true).await;
    }
    with_priority(&cluster, "high", 1).await;
    cluster.bound("high").await;
    let mut left = 0;
    for name in ["a", "b", "c"] {
        left += usize::from(!cluster.devices(name).await.is_empty());
    }
    assert_eq!(left, 2);
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

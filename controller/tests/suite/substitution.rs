//! Pods that have a larger profile than they asked for go back: one at a time, to a place that is held for
//! them, whatever happens to the controller in between.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::common;

use aliquot_allocator::snapshot::GOING_BACK;
use aliquot_allocator::substitution::ANNOTATION;
use aliquot_control_plane::{Fault, FaultRule, Matcher};
use common::{Cluster, auditor, eventually, fixtures};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::Api;
use kube::api::{Patch, PatchParams};
use rstest::rstest;
use serde_json::{Value, json};

/// Of a GPU's media engines there is one: the second 1g.10gb+me is free nowhere, 1g.20gb is.
const ASKED: &str = "1g.10gb+me";
const QUICK: &[&str] = &["--go-back-after", "100ms"];

fn alternative(name: &str, profile: &str) -> Value {
    let expression = format!(r#"device.attributes["{}"].profile == "{profile}""#, fixtures::DRIVER);
    json!({"name": name, "deviceClassName": "mig.aliquot.dev", "selectors": [{"cel": {"expression": expression}}]})
}

/// What the webhook makes of a template's claims.
fn template(go_back: bool) -> ResourceClaimTemplate {
    let record = json!({"asked": {"r": ASKED}, "goBack": go_back}).to_string();
    let request = json!({"name": "r", "firstAvailable": [alternative("asked", ASKED), alternative("larger", "1g.20gb")]});
    fixtures::object(json!({
        "metadata": {"name": "t", "namespace": "default"},
        "spec": {"metadata": {"annotations": {ANNOTATION: record}}, "spec": fixtures::spec(&[request])},
    }))
}

/// A pod with a claim of its own, as somebody makes it who makes another one when it goes.
async fn made(cluster: &Cluster, name: &str, maker: Option<&ConfigMap>) -> Pod {
    let mut pod = fixtures::pod(name, &[]);
    let spec = pod.spec.as_mut().expect("a spec");
    spec.resource_claims =
        Some(vec![fixtures::object(json!({"name": "gpu", "resourceClaimTemplateName": "t"}))]);
    pod.metadata.owner_references = maker.map(|maker| {
        vec![fixtures::object(json!({
            "apiVersion": "v1", "kind": "ConfigMap", "controller": true,
            "name": maker.metadata.name, "uid": maker.metadata.uid,
        }))]
    });
    cluster.create(&pod).await
}

async fn maker(cluster: &Cluster) -> ConfigMap {
    cluster.create(&fixtures::object(json!({"metadata": {"name": "maker", "namespace": "default"}}))).await
}

/// Waits until the pod is bound; the alternative that it was given. Then it runs.
async fn given(cluster: &Cluster, name: &str) -> String {
    cluster.bound(name).await;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    let pod = pods.patch_status(name, &PatchParams::default(), &running).await.expect("running");
    let statuses = pod.status.and_then(|status| status.resource_claim_statuses).unwrap_or_default();
    let claim = statuses[0].resource_claim_name.clone().expect("a claim");
    let claim: ResourceClaim = cluster.get_claim(&claim).await;
    let results = claim.status.and_then(|s| s.allocation).and_then(|a| a.devices).and_then(|d| d.results);
    results.expect("results")[0].request.clone()
}

async fn gone(cluster: &Cluster, name: &str) {
    eventually(&format!("{name} is evicted"), async || cluster.get_pod(name).await.is_none().then_some(()))
        .await;
}

/// The note of a place that is held.
async fn note(cluster: &Cluster) -> Option<String> {
    let node = Api::<Node>::all(cluster.client.clone()).get("n1").await.expect("a node");
    node.metadata.annotations?.get(GOING_BACK).cloned()
}

/// A pod on a claim of its own.
async fn lone(cluster: &Cluster, name: &str, profile: &str) {
    cluster.claim(name, &[fixtures::partition("r", profile)]).await;
    cluster.pod(name, &[name]).await;
}

/// Something else goes through the controller, which has then seen all that was before it.
async fn passing(cluster: &Cluster, name: &str) {
    lone(cluster, name, "1g.10gb").await;
    cluster.bound(name).await;
    cluster.delete_pod(name).await;
}

/// A cluster in which `user-1` has the larger profile, because `filler` has the asked one.
async fn crowded(go_back: bool) -> (Cluster, ConfigMap) {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let maker = maker(&cluster).await;
    cluster.create(&template(go_back)).await;
    (cluster, maker)
}

#[rstest]
#[case::one_controller(false)]
#[case::another_controller_after_the_eviction(true)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_goes_back_to_the_place_that_is_held_for_it(#[case] killed: bool) {
    let (cluster, maker) = crowded(true).await;
    let mut controller = cluster.controller("c1", QUICK).await;
    lone(&cluster, "filler", ASKED).await;
    cluster.bound("filler").await;
    made(&cluster, "user-1", Some(&maker)).await;
    assert_eq!(given(&cluster, "user-1").await, "r/larger");
    // Nothing is free: nobody is evicted, whatever else comes and goes.
    for number in 0..3 {
        passing(&cluster, &format!("other-{number}")).await;
    }
    assert_eq!((cluster.get_pod("user-1").await.is_some(), note(&cluster).await), (true, None));
    cluster.delete_pod("filler").await;
    gone(&cluster, "user-1").await;
    assert!(note(&cluster).await.is_some_and(|note| note.contains("gpu-0-mig-1g10gb-me")));
    if killed {
        controller.kill();
        controller = cluster.controller("c2", QUICK).await;
    }
    // Somebody else wants it, and does not get it.
    lone(&cluster, "rival", ASKED).await;
    passing(&cluster, "another").await;
    made(&cluster, "user-2", Some(&maker)).await;
    assert_eq!(given(&cluster, "user-2").await, "r/asked");
    eventually("the note is removed", async || note(&cluster).await.is_none().then_some(())).await;
    let rival = cluster.get_pod("rival").await.and_then(|pod| pod.spec).expect("a pod");
    assert_eq!(rival.node_name, None);
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[rstest]
#[case::the_policy_does_not_say_so(false, true, &[])]
#[case::nobody_makes_it_anew(true, false, &[])]
#[case::switched_off(true, true, &["--go-back", "false"])]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_stays_where(#[case] go_back: bool, #[case] is_made: bool, #[case] more: &[&str]) {
    let (cluster, maker) = crowded(go_back).await;
    let controller = cluster.controller("c1", &[QUICK, more].concat()).await;
    lone(&cluster, "filler", ASKED).await;
    cluster.bound("filler").await;
    made(&cluster, "user-1", is_made.then_some(&maker)).await;
    assert_eq!(given(&cluster, "user-1").await, "r/larger");
    cluster.delete_pod("filler").await;
    // The place is free for others, again and again.
    for number in 0..4 {
        let name = format!("rival-{number}");
        lone(&cluster, &name, ASKED).await;
        cluster.bound(&name).await;
        cluster.delete_pod(&name).await;
    }
    assert!(cluster.get_pod("user-1").await.is_some() && note(&cluster).await.is_none());
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disruption_budget_keeps_the_pod_and_frees_the_place() {
    let (cluster, maker) = crowded(true).await;
    let budget = Fault::Status {
        code: 429,
        reason: "TooManyRequests".to_owned(),
        message: "Cannot evict pod as it would violate the pod's disruption budget.".to_owned(),
        retry_after: Some(0),
    };
    let rule = FaultRule::first(100, Matcher::new("create", "pods").subresource("eviction"), budget);
    cluster.handle.faults().add(rule);
    let controller = cluster.controller("c1", QUICK).await;
    lone(&cluster, "filler", ASKED).await;
    cluster.bound("filler").await;
    made(&cluster, "user-1", Some(&maker)).await;
    assert_eq!(given(&cluster, "user-1").await, "r/larger");
    cluster.delete_pod("filler").await;
    let events = || async {
        let events: Api<k8s_openapi::api::events::v1::Event> =
            Api::namespaced(cluster.client.clone(), "default");
        events.list(&Default::default()).await.expect("events").items
    };
    eventually("the pod is told that it stays", async || {
        let events = events().await;
        let told = |note: &String| note.contains("not evicted: Cannot evict pod as it would violate");
        events.iter().any(|event| event.note.as_ref().is_some_and(told)).then_some(())
    })
    .await;
    lone(&cluster, "rival", ASKED).await;
    cluster.bound("rival").await;
    assert!(cluster.get_pod("user-1").await.is_some());
    eventually("the note is removed", async || note(&cluster).await.is_none().then_some(())).await;
    controller.terminate().await;
}

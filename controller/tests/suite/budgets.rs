//! Budgets against an API server: what is charged, whoever is killed when, and what a used-up one does.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use crate::common;
use aliquot_api::v1alpha1::{GpuBudget, NodeUsage, resource};

use aliquot_allocator::budget::account::Site;
use aliquot_allocator::substitution::ANNOTATION;
use aliquot_control_plane::{Fault, FaultRule, Matcher};
use common::{Cluster, Running, eventually, fixtures};
use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use rstest::rstest;
use serde_json::{Value, json};
use std::time::Duration;

async fn start(terms: Value) -> Cluster {
    start_with(2, terms).await
}

/// A cluster with a node of so many GPUs and a budget.
async fn start_with(gpus: u32, terms: Value) -> Cluster {
    let cluster = Cluster::start().await;
    cluster.define::<GpuBudget>().await;
    cluster.define::<NodeUsage>().await;
    cluster.add_node("n1", gpus).await;
    let budget = fixtures::object(json!({
        "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuBudget",
        "metadata": {"name": "gpu", "namespace": "default"}, "spec": terms,
    }));
    budgets(&cluster).create(&PostParams::default(), &budget).await.expect("created");
    cluster
}

fn budgets(cluster: &Cluster) -> Api<DynamicObject> {
    Api::namespaced_with(cluster.client.clone(), "default", &resource::<GpuBudget>())
}

fn usages(cluster: &Cluster) -> Api<DynamicObject> {
    Api::all_with(cluster.client.clone(), &resource::<NodeUsage>())
}

async fn controller(cluster: &Cluster, identity: &str) -> Running {
    cluster.controller(identity, &["--budgets=true"]).await
}

async fn status(cluster: &Cluster, field: &str) -> Value {
    let budget = budgets(cluster).get("gpu").await.expect("a budget");
    budget.data.pointer(&format!("/status/{field}")).cloned().unwrap_or_default()
}

async fn status_is(cluster: &Cluster, field: &str, wanted: Value) {
    eventually(&format!("{field} is {wanted}"), async || {
        (status(cluster, field).await == wanted).then_some(())
    })
    .await;
}

fn now() -> i64 {
    k8s_openapi::jiff::Timestamp::now().as_second()
}

async fn say(cluster: &Cluster, numbers: &[u64], until: i64) {
    let params = PatchParams::apply("agent").force();
    let object = fixtures::released(numbers, until);
    usages(cluster).patch("n1", &params, &Patch::Apply(&object)).await.expect("applied");
}

/// What an earlier controller stored: it saw these claims with a GPU of n1, and nothing more of them.
async fn were_seen(cluster: &Cluster, numbers: &[u64], now: i64) {
    let account = fixtures::account_of_seen(numbers, now, &Site::of("n1").to_string());
    let patch = Patch::Merge(json!({"status": {"account": account}}));
    budgets(cluster).patch_status("gpu", &PatchParams::default(), &patch).await.expect("stored");
}

async fn acknowledged(cluster: &Cluster, wanted: u64) {
    eventually(&format!("release {wanted} is acknowledged"), async || {
        let usage = usages(cluster).get("n1").await.ok()?;
        (usage.data.pointer("/status/acknowledged") == Some(&json!(wanted))).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_charged_from_its_allocation_until_it_is_taken_back() {
    let cluster = start(json!({"gpuHours": 10, "window": {"rolling": "24h"}})).await;
    let controller = controller(&cluster, "c1").await;
    cluster.claim("a", &[fixtures::partition("r", "3g.40gb")]).await;
    cluster.pod("a", &["a"]).await;
    cluster.bound("a").await;
    status_is(&cluster, "claims", json!(1)).await;
    status_is(&cluster, "gpus", json!("0.5")).await;
    cluster.delete_pod("a").await;
    status_is(&cluster, "claims", json!(0)).await;
    assert_eq!(status(&cluster, "state").await, "Within");
    controller.terminate().await;
}

/// `filler` has the one 1g.10gb+me of the GPU, an eighth of it; `user` asks for another one and gets a
/// quarter, the larger 1g.20gb.
#[rstest]
#[case::what_was_given_by_default(json!({}), "0.375")]
#[case::what_was_asked_for(json!({"chargeSubstitutesAs": "Asked"}), "0.25")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_substitute_is_charged_as_the_budget_says(#[case] more: Value, #[case] gpus: &str) {
    let mut terms = json!({"gpuHours": 10, "window": {"rolling": "24h"}});
    terms.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let cluster = start_with(1, terms).await;
    let first = controller(&cluster, "c1").await;
    cluster.claim("filler", &[fixtures::partition("r", "1g.10gb+me")]).await;
    cluster.pod("filler", &["filler"]).await;
    cluster.bound("filler").await;
    let alternative = |name: &str, profile: &str| {
        let expression = format!(r#"device.attributes["{}"].profile == "{profile}""#, fixtures::DRIVER);
        json!({"name": name, "deviceClassName": "mig.aliquot.dev",
               "selectors": [{"cel": {"expression": expression}}]})
    };
    let alternatives = [alternative("asked", "1g.10gb+me"), alternative("larger", "1g.20gb")];
    let spec = fixtures::spec(&[json!({"name": "r", "firstAvailable": alternatives})]);
    let mut claim = fixtures::claim("user", &spec);
    let record = json!({"asked": {"r": "1g.10gb+me"}, "goBack": false}).to_string();
    claim.metadata.annotations = Some([(ANNOTATION.to_owned(), record)].into());
    cluster.create(&claim).await;
    cluster.pod("user", &["user"]).await;
    cluster.bound("user").await;
    status_is(&cluster, "gpus", json!(gpus)).await;
    // Whoever leads next comes to the same.
    first.kill();
    let second = controller(&cluster, "c2").await;
    cluster.delete_pod("filler").await;
    status_is(&cluster, "claims", json!(1)).await;
    let left = if more == json!({}) { "0.25" } else { "0.125" };
    status_is(&cluster, "gpus", json!(left)).await;
    second.terminate().await;
}

/// The first controller is killed in the middle of a write: before the server has it, or before the
/// answer is back. The second one and a third see everything again.
#[rstest]
#[case::before_the_account_is_stored("gpubudgets", false)]
#[case::after_the_account_is_stored("gpubudgets", true)]
#[case::before_the_release_is_acknowledged("nodeusages", false)]
#[case::after_the_release_is_acknowledged("nodeusages", true)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_is_charged_once_whenever_the_controller_is_killed(
    #[case] resource: &str,
    #[case] carried_out: bool,
) {
    let cluster = start(json!({"gpuHours": 10, "window": {"rolling": "24h"}})).await;
    were_seen(&cluster, &[1, 2, 3], now()).await;
    let first = controller(&cluster, "c1").await;
    status_is(&cluster, "state", json!("Within")).await;
    // What ended before the budget was seen first would not be charged.
    tokio::time::sleep(Duration::from_millis(2100)).await;
    let fault = if carried_out { Fault::DropAfter } else { Fault::Hang { millis: 600_000 } };
    let rule = FaultRule::always(Matcher::new("patch", resource).subresource("status").by("c1"), fault);
    cluster.handle.faults().add(rule);
    let until = now() - 1;
    say(&cluster, &[1, 2], until).await;
    eventually("the first controller is in its write", async || {
        cluster.handle.faults().rules().iter().any(|state| state.hits > 0).then_some(())
    })
    .await;
    first.kill();
    let second = controller(&cluster, "c2").await;
    acknowledged(&cluster, 2).await;
    status_is(&cluster, "used", json!("1.000")).await;
    // The agent forgets what is acknowledged, and releases another one.
    say(&cluster, &[3], until).await;
    acknowledged(&cluster, 3).await;
    second.kill();
    say(&cluster, &[], until).await;
    let third = controller(&cluster, "c3").await;
    status_is(&cluster, "used", json!("1.500")).await;
    // It has looked at everything more than once.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(status(&cluster, "used").await, "1.500");
    third.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beyond_a_refusing_budget_pods_wait_for_it_and_others_do_not() {
    let cluster = start(json!({"gpuHours": 0, "window": {"calendar": "Day"}, "enforcement": "Refuse"})).await;
    let controller = controller(&cluster, "c1").await;
    status_is(&cluster, "state", json!("Over")).await;
    cluster.claim("a", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.pod("a", &["a"]).await;
    let mut other = fixtures::claim("b", &fixtures::spec(&[fixtures::partition("r", "1g.10gb")]));
    other.metadata.namespace = Some("free".to_owned());
    let namespace: k8s_openapi::api::core::v1::Namespace =
        fixtures::object(json!({"metadata": {"name": "free"}}));
    cluster.create_global(&namespace).await;
    cluster.create(&other).await;
    let mut pod = fixtures::pod("b", &["b"]);
    pod.metadata.namespace = Some("free".to_owned());
    cluster.create(&pod).await;
    eventually("the pod without a budget is bound", async || {
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client.clone(), "free");
        pods.get("b").await.ok()?.spec?.node_name
    })
    .await;
    let said = eventually("the pod is told", async || {
        let events = cluster.handle.objects("", "events", "default");
        let found = events.iter().find(|event| event["reason"] == "BudgetRefused")?;
        Some(found["message"].as_str().or_else(|| found["note"].as_str())?.to_owned())
    })
    .await;
    assert!(said.contains("default/gpu") && said.contains("of 0 GPU-hours"), "{said}");
    assert!(cluster.devices("a").await.is_empty());
    let more = json!({"spec": {"gpuHours": 1}});
    budgets(&cluster).patch("gpu", &PatchParams::default(), &Patch::Merge(&more)).await.expect("patched");
    cluster.bound("a").await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_kinds_there_are_no_budgets_and_everything_else_goes_on() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = controller(&cluster, "c1").await;
    cluster.claim("a", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.pod("a", &["a"]).await;
    cluster.bound("a").await;
    controller.terminate().await;
}

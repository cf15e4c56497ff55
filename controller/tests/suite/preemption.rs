//! Pods of higher priority take the devices of lower ones, whatever goes wrong in between.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::common;

use aliquot_control_plane::{Controllers, Fault, FaultRule, Matcher, Options, PodDeletion};
use common::{Cluster, auditor, eventually, fixtures};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use rstest::rstest;
use serde_json::json;
use std::time::Duration;

/// A cluster whose pods end only when somebody plays the kubelet.
async fn cluster_with_grace() -> Cluster {
    let options =
        Options { controllers: Controllers::ALL, pod_deletion: PodDeletion::Graceful, ..Options::default() };
    Cluster::start_as(options).await
}

/// A pod of that priority with a claim for a whole GPU.
async fn gpu_pod(cluster: &Cluster, name: &str, priority: i32) {
    several_gpus(cluster, name, 1, priority).await;
}

async fn several_gpus(cluster: &Cluster, name: &str, count: u32, priority: i32) {
    let class = format!("p{priority}");
    let classes: Api<PriorityClass> = Api::all(cluster.client.clone());
    if classes.get_opt(&class).await.expect("read").is_none() {
        let object = fixtures::object(json!({"metadata": {"name": class}, "value": priority}));
        cluster.create_global::<PriorityClass>(&object).await;
    }
    cluster.claim(name, &[fixtures::request("r", "gpu.aliquot.dev", count)]).await;
    let mut pod = fixtures::pod(name, &[name]);
    pod.spec.as_mut().expect("a spec").priority_class_name = Some(class);
    cluster.create(&pod).await;
}

async fn is_ending(cluster: &Cluster, name: &str) {
    eventually(&format!("{name} is being deleted"), async || {
        let pod = cluster.get_pod(name).await;
        pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some()).then_some(())
    })
    .await;
}

async fn nominated(cluster: &Cluster, name: &str) -> String {
    eventually(&format!("{name} is nominated"), async || {
        cluster.get_pod(name).await?.status?.nominated_node_name
    })
    .await
}

async fn event(cluster: &Cluster, pod: &str, reason: &str) -> String {
    let api: Api<Event> = Api::namespaced(cluster.client.clone(), "default");
    eventually(&format!("an event {reason} on {pod}"), async || {
        let events = api.list(&ListParams::default()).await.ok()?.items;
        let about = |event: &Event| event.regarding.as_ref().and_then(|r| r.name.as_deref()) == Some(pod);
        let found = events.into_iter().find(|e| about(e) && e.reason.as_deref() == Some(reason))?;
        found.note
    })
    .await
}

fn evictions() -> Matcher {
    Matcher::new("create", "pods").subresource("eviction").by("c1")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_victim_is_waited_for_and_its_devices_go_to_nobody_else() {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    gpu_pod(&cluster, "low", 0).await;
    cluster.bound("low").await;
    gpu_pod(&cluster, "high", 100).await;
    is_ending(&cluster, "low").await;
    assert_eq!(nominated(&cluster, "high").await, "n1");
    gpu_pod(&cluster, "rival", 50).await;
    let note = event(&cluster, "low", "Preempted").await;
    assert!(note.contains("pod high") && note.contains("100"), "{note}");
    event(&cluster, "high", "PreemptionStarted").await;
    event(&cluster, "rival", "DevicesDoNotFit").await;
    assert_eq!(auditor::allocations(&cluster.handle, "high"), 0, "the victim still has them");
    cluster.delete_pod("low").await;
    assert_eq!(cluster.bound("high").await, "n1");
    assert_eq!(auditor::allocations(&cluster.handle, "rival"), 0);
    assert_eq!(controller.metrics.evictions("evicted"), 1);
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

/// The first controller dies at that point, the second comes to the same end.
#[rstest]
#[case::before_it_is_noted(Matcher::new("patch", "pods").subresource("status").by("c1"), true)]
#[case::before_the_eviction(evictions(), true)]
#[case::after_the_eviction(Matcher::new("never", "pods"), true)]
#[case::after_the_victim(Matcher::new("patch", "resourceclaims").subresource("status").by("c1"), false)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_ends_what_a_dead_controller_began(#[case] hangs: Matcher, #[case] early: bool) {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 1).await;
    let first = cluster.controller("c1", &[]).await;
    gpu_pod(&cluster, "low", 0).await;
    cluster.bound("low").await;
    let ends = !matches!(hangs.verbs.first().map(String::as_str), Some("never")) && early;
    cluster.handle.faults().add(FaultRule::always(hangs, Fault::Hang { millis: 600_000 }));
    gpu_pod(&cluster, "high", 100).await;
    if ends {
        eventually("the first controller hangs", async || {
            cluster.handle.faults().rules().iter().any(|state| state.hits > 0).then_some(())
        })
        .await;
    } else {
        is_ending(&cluster, "low").await;
    }
    if !early {
        cluster.delete_pod("low").await;
        eventually("the first controller hangs", async || {
            cluster.handle.faults().rules().iter().any(|state| state.hits > 0).then_some(())
        })
        .await;
    }
    first.kill();
    // Lower than the one that room is made for; the same is in the reconciler's own tests.
    gpu_pod(&cluster, "between", 99).await;
    let second = cluster.controller("c2", &[]).await;
    if early {
        is_ending(&cluster, "low").await;
        cluster.delete_pod("low").await;
    }
    assert_eq!(cluster.bound("high").await, "n1");
    assert_eq!(auditor::allocations(&cluster.handle, "between"), 0);
    auditor::check(&cluster.handle);
    second.terminate().await;
}

fn budget(message: &str) -> Fault {
    Fault::Status {
        code: 429,
        reason: "TooManyRequests".to_owned(),
        message: message.to_owned(),
        retry_after: Some(0),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_protected_by_a_budget_stays_and_the_next_best_goes() {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    gpu_pod(&cluster, "protected", 0).await;
    cluster.bound("protected").await;
    gpu_pod(&cluster, "dearer", 1).await;
    cluster.bound("dearer").await;
    let protected = Matcher { name: Some("protected".to_owned()), ..evictions() };
    let refusal = budget("Cannot evict pod as it would violate the pod's disruption budget.");
    cluster.handle.faults().add(FaultRule::always(protected, refusal));
    gpu_pod(&cluster, "high", 100).await;
    let note = event(&cluster, "high", "PreemptionRefused").await;
    assert!(note.contains("disruption budget"), "{note}");
    is_ending(&cluster, "dearer").await;
    cluster.delete_pod("dearer").await;
    cluster.bound("high").await;
    let protected = cluster.get_pod("protected").await.expect("still there");
    assert!(protected.metadata.deletion_timestamp.is_none());
    assert_eq!((controller.metrics.evictions("evicted"), controller.metrics.evictions("refused")), (1, 1));
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_was_told_of_an_eviction_that_is_refused_at_last_is_told_that_it_stays() {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    gpu_pod(&cluster, "low", 0).await;
    cluster.bound("low").await;
    // The rehearsal passes, and then somebody else uses up what the budget allows.
    let refusal = budget("Cannot evict pod as it would violate the pod's disruption budget.");
    let rule = FaultRule { matches: evictions(), skip: 1, times: None, fault: refusal };
    cluster.handle.faults().add(rule);
    gpu_pod(&cluster, "high", 100).await;
    event(&cluster, "low", "Preempted").await;
    let note = event(&cluster, "low", "EvictionCalledOff").await;
    assert!(note.contains("it stays after all") && note.contains("disruption budget"), "{note}");
    event(&cluster, "high", "PreemptionRefused").await;
    let low = cluster.get_pod("low").await.expect("still there");
    assert!(low.metadata.deletion_timestamp.is_none());
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_several_victims_none_goes_if_one_is_protected() {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    for name in ["a", "b"] {
        gpu_pod(&cluster, name, 0).await;
        cluster.bound(name).await;
    }
    let protected = Matcher { name: Some("b".to_owned()), ..evictions() };
    let rule = cluster.handle.faults().add(FaultRule::always(protected, budget("the disruption budget")));
    several_gpus(&cluster, "high", 2, 5).await;
    event(&cluster, "high", "PreemptionRefused").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    for name in ["a", "b"] {
        let pod = cluster.get_pod(name).await.expect("still there");
        assert!(pod.metadata.deletion_timestamp.is_none(), "{name} goes for nothing");
    }
    // It is asked again.
    cluster.handle.faults().remove(rule);
    for name in ["a", "b"] {
        is_ending(&cluster, name).await;
        cluster.delete_pod(name).await;
    }
    cluster.bound("high").await;
    controller.terminate().await;
}

/// A dry run uses nothing of a budget up, so each victim by itself may go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_victims_under_one_budget_none_goes_before_both_may() {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    let params = PatchParams::default();
    for name in ["a", "b"] {
        gpu_pod(&cluster, name, 0).await;
        cluster.bound(name).await;
        let labels = Patch::Merge(json!({"metadata": {"labels": {"app": "trained"}}}));
        pods.patch(name, &params, &labels).await.expect("labelled");
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let runs = Patch::Merge(json!({"status": {"phase": "Running", "conditions": ready}}));
        pods.patch_status(name, &params, &runs).await.expect("it runs");
    }
    let spec = json!({"maxUnavailable": 1, "selector": {"matchLabels": {"app": "trained"}}});
    cluster
        .create::<PodDisruptionBudget>(&fixtures::object(json!({"metadata": {"name": "keep"}, "spec": spec})))
        .await;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(cluster.client.clone(), "default");
    let allow = async |count: i32| {
        let status = json!({"disruptionsAllowed": count, "observedGeneration": 1, "expectedPods": 2,
                            "currentHealthy": 2, "desiredHealthy": 2 - count});
        let patch = Patch::Merge(json!({"status": status}));
        budgets.patch_status("keep", &params, &patch).await.expect("written");
    };
    allow(1).await;
    several_gpus(&cluster, "high", 2, 5).await;
    let note = event(&cluster, "high", "PreemptionRefused").await;
    assert!(note.contains("disruption budget keep allows 1 more"), "{note}");
    tokio::time::sleep(Duration::from_millis(300)).await;
    for name in ["a", "b"] {
        let pod = cluster.get_pod(name).await.expect("still there");
        assert!(pod.metadata.deletion_timestamp.is_none(), "{name} goes for nothing");
    }
    assert_eq!(controller.metrics.writes("evict", "ok"), 0);
    allow(2).await;
    for name in ["a", "b"] {
        is_ending(&cluster, name).await;
        cluster.delete_pod(name).await;
    }
    cluster.bound("high").await;
    controller.terminate().await;
}

#[rstest]
#[case::overload(budget("slow down"))]
#[case::lost_answers(Fault::DropAfter)]
#[case::lost_requests(Fault::DropBefore)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_that_fails_on_the_way_is_repeated(#[case] fault: Fault) {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    gpu_pod(&cluster, "low", 0).await;
    cluster.bound("low").await;
    cluster.handle.faults().add(FaultRule::first(3, evictions(), fault));
    gpu_pod(&cluster, "high", 100).await;
    cluster.bound("high").await;
    // Whoever is evicted is told why, also if nobody said that it was done.
    event(&cluster, "low", "Preempted").await;
    assert_eq!(controller.metrics.evictions("refused"), 0);
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_evicted_before_it_is_on_record_why() {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 1).await;
    let first = cluster.controller("c1", &[]).await;
    gpu_pod(&cluster, "low", 0).await;
    cluster.bound("low").await;
    // The first controller hangs where it says why, and dies there.
    let says = Matcher::new("create", "events").by("c1");
    cluster.handle.faults().add(FaultRule::always(says, Fault::Hang { millis: 600_000 }));
    gpu_pod(&cluster, "high", 100).await;
    eventually("the eviction is rehearsed", async || {
        (first.metrics.writes("evict_rehearsal", "ok") > 0).then_some(())
    })
    .await;
    for _ in 0..20 {
        let low = cluster.get_pod("low").await.expect("it is there");
        assert!(low.metadata.deletion_timestamp.is_none(), "evicted, and nobody says why");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    first.kill();
    let second = cluster.controller("c2", &[]).await;
    is_ending(&cluster, "low").await;
    event(&cluster, "low", "Preempted").await;
    second.terminate().await;
}

fn no_events(code: u16, reason: &str, message: &str) -> Fault {
    let (reason, message) = (reason.to_owned(), message.to_owned());
    Fault::Status { code, reason, message, retry_after: None }
}

#[rstest]
#[case::refused(no_events(403, "Forbidden", "events is forbidden: you may not"))]
#[case::failing(no_events(500, "InternalError", "the store is full"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_evicted_while_it_cannot_be_put_on_record_why(#[case] fault: Fault) {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    gpu_pod(&cluster, "low", 0).await;
    cluster.bound("low").await;
    let says = Matcher::new("create", "events").by("c1");
    let rule = cluster.handle.faults().add(FaultRule::always(says, fault));
    gpu_pod(&cluster, "high", 100).await;
    eventually("the eviction was given up once, and is decided anew", async || {
        (controller.metrics.writes("evict_rehearsal", "ok") > 1).then_some(())
    })
    .await;
    let low = cluster.get_pod("low").await.expect("it is there");
    assert!(low.metadata.deletion_timestamp.is_none(), "evicted, and nobody says why");
    assert_eq!(controller.metrics.writes("evict", "ok"), 0);
    // It goes once that can be said.
    cluster.handle.faults().remove(rule);
    event(&cluster, "low", "Preempted").await;
    is_ending(&cluster, "low").await;
    cluster.delete_pod("low").await;
    cluster.bound("high").await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_namespace_that_is_going_nothing_can_be_said_and_pods_are_evicted_all_the_same() {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    gpu_pod(&cluster, "low", 0).await;
    cluster.bound("low").await;
    let says = Matcher::new("create", "events").by("c1");
    let going = "unable to create new content in namespace default because it is being terminated";
    cluster.handle.faults().add(FaultRule::always(says, no_events(403, "Forbidden", going)));
    gpu_pod(&cluster, "high", 100).await;
    is_ending(&cluster, "low").await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_evicted_when_it_is_switched_off() {
    let cluster = cluster_with_grace().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &["--preemption=false"]).await;
    gpu_pod(&cluster, "low", 0).await;
    cluster.bound("low").await;
    gpu_pod(&cluster, "high", 100).await;
    event(&cluster, "high", "DevicesDoNotFit").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(cluster.get_pod("low").await.expect("there").metadata.deletion_timestamp.is_none());
    controller.terminate().await;
}

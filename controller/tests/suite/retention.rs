//! Devices of claims that die with their pod, kept for the next pod, against the embedded control plane.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::common;

use aliquot_control_plane::{Fault, FaultRule, Matcher};
use aliquot_model::names::{HOLD_FOR, HOLD_OF, RECLAIM, RETENTION_RECORD};
use common::{Cluster, Running, auditor, eventually, fixtures};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use rstest::rstest;
use serde_json::json;

const PROFILE: &str = "2g.20gb";

/// A template whose claims keep their devices for the next, and what stands for a pod's controller.
async fn template(cluster: &Cluster) -> String {
    let template: ResourceClaimTemplate = fixtures::object(json!({
        "metadata": {"name": "t", "namespace": "default"},
        "spec": {
            "metadata": {"annotations": {RECLAIM: "Retain", HOLD_FOR: "1h"}},
            "spec": fixtures::spec(&[fixtures::partition("r", PROFILE)]),
        },
    }));
    cluster.create(&template).await;
    let maker: ConfigMap = fixtures::object(json!({"metadata": {"name": "maker", "namespace": "default"}}));
    cluster.create(&maker).await.uid().expect("a uid")
}

/// A pod of that controller with a claim from the template.
async fn pod(cluster: &Cluster, name: &str, maker: &str) {
    let mut pod = fixtures::pod(name, &[]);
    let owner =
        json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "maker", "uid": maker, "controller": true}]);
    pod.metadata.owner_references = Some(serde_json::from_value(owner).expect("owners"));
    if let Some(spec) = &mut pod.spec {
        let claims = json!([{"name": "gpu", "resourceClaimTemplateName": "t"}]);
        spec.resource_claims = Some(serde_json::from_value(claims).expect("claims"));
    }
    cluster.create(&pod).await;
}

/// What a pod was given.
async fn devices(cluster: &Cluster, pod: &str) -> Vec<String> {
    cluster.bound(pod).await;
    let claim = claim_of(cluster, pod).await;
    cluster.devices(&claim).await
}

async fn claim_of(cluster: &Cluster, pod: &str) -> String {
    eventually(&format!("a claim for {pod}"), async || {
        let statuses = cluster.get_pod(pod).await?.status?.resource_claim_statuses?;
        statuses.first()?.resource_claim_name.clone()
    })
    .await
}

/// A GPU whose places three pods have (a, b and c); another one (late) waits for one.
async fn crowded() -> (Cluster, Running, String) {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    let maker = template(&cluster).await;
    for name in ["a", "b", "c"] {
        pod(&cluster, name, &maker).await;
        devices(&cluster, name).await;
    }
    cluster.claim("late", &[fixtures::partition("r", PROFILE)]).await;
    cluster.pod("late", &["late"]).await;
    (cluster, controller, maker)
}

fn claims(cluster: &Cluster) -> Api<ResourceClaim> {
    Api::namespaced(cluster.client.clone(), "default")
}

/// Hold claims, and whether they have devices.
async fn holds(cluster: &Cluster) -> Vec<(String, bool)> {
    let all = claims(cluster).list(&ListParams::default()).await.expect("claims").items;
    all.into_iter()
        .filter(|claim| claim.annotations().contains_key(HOLD_OF))
        .map(|claim| (claim.name_any(), claim.status.is_some_and(|status| status.allocation.is_some())))
        .collect()
}

async fn one_hold(cluster: &Cluster) -> String {
    eventually("a hold claim with devices", async || match holds(cluster).await.as_slice() {
        [(name, true)] => Some(name.clone()),
        _ => None,
    })
    .await
}

async fn no_holds(cluster: &Cluster) {
    eventually("no hold claims", async || holds(cluster).await.is_empty().then_some(())).await;
}

async fn no_claims(cluster: &Cluster) {
    eventually("no claims", async || {
        claims(cluster).list(&ListParams::default()).await.ok()?.items.is_empty().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_pod_of_the_same_controller_gets_the_same_devices_and_nobody_else_does() {
    let (cluster, controller, maker) = crowded().await;
    let before = devices(&cluster, "b").await;
    cluster.delete_pod("b").await;
    let hold = one_hold(&cluster).await;
    assert_eq!(cluster.devices(&hold).await, before);
    assert!(cluster.devices("late").await.is_empty());
    pod(&cluster, "b", &maker).await;
    assert_eq!(devices(&cluster, "b").await, before);
    no_holds(&cluster).await;
    assert!(cluster.devices("late").await.is_empty());
    auditor::check(&cluster.handle);
    // Released, the place is anybody's.
    cluster.delete_pod("a").await;
    let hold = one_hold(&cluster).await;
    let wish = json!({"metadata": {"annotations": {RECLAIM: "Delete"}}});
    claims(&cluster).patch(&hold, &PatchParams::default(), &Patch::Merge(&wish)).await.expect("released");
    cluster.bound("late").await;
    no_holds(&cluster).await;
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_that_passes_costs_no_hold_claim() {
    let (cluster, controller, maker) = crowded().await;
    let before = devices(&cluster, "b").await;
    // As with a quota that others charge at the same time.
    let created = Matcher::new("create", "resourceclaims").named("aliquot-hold-*");
    cluster.handle.faults().add(FaultRule::first(2, created, Fault::Conflict));
    cluster.delete_pod("b").await;
    pod(&cluster, "b", &maker).await;
    assert_eq!(devices(&cluster, "b").await, before);
    assert!(cluster.handle.faults().rules().iter().all(|state| state.hits == 2));
    assert!(cluster.devices("late").await.is_empty());
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_of_its_own_name_comes_before_others_of_the_controller() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    let maker = template(&cluster).await;
    let mut before = Vec::new();
    for name in ["web-0", "web-1"] {
        pod(&cluster, name, &maker).await;
        before.push(devices(&cluster, name).await);
    }
    for name in ["web-0", "web-1"] {
        cluster.delete_pod(name).await;
    }
    eventually("two hold claims", async || {
        (holds(&cluster).await.iter().filter(|(_, allocated)| *allocated).count() == 2).then_some(())
    })
    .await;
    for (name, wanted) in [("web-1", 1), ("web-0", 0)] {
        pod(&cluster, name, &maker).await;
        assert_eq!(devices(&cluster, name).await, before[wanted], "{name}");
    }
    no_holds(&cluster).await;
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[rstest]
#[case::its_time_is_over(false)]
#[case::its_controller_is_deleted(true)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_claim_ends(#[case] delete: bool) {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    let maker = template(&cluster).await;
    pod(&cluster, "a", &maker).await;
    devices(&cluster, "a").await;
    cluster.delete_pod("a").await;
    let hold = one_hold(&cluster).await;
    if delete {
        let makers: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), "default");
        makers.delete("maker", &DeleteParams::default()).await.expect("deleted");
    } else {
        // An hour later.
        let text = cluster.get_claim(&hold).await.annotations()[HOLD_OF].clone();
        let mut retention: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        retention["until"] = json!(1);
        let wish = json!({"metadata": {"annotations": {HOLD_OF: retention.to_string()}}});
        claims(&cluster).patch(&hold, &PatchParams::default(), &Patch::Merge(&wish)).await.expect("patched");
    }
    no_claims(&cluster).await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_evicted_pod_leaves_its_devices_to_others() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    let maker = template(&cluster).await;
    pod(&cluster, "a", &maker).await;
    devices(&cluster, "a").await;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    pods.evict("a", &EvictParams::default()).await.expect("evicted");
    no_claims(&cluster).await;
    assert_eq!(holds_ever(&cluster), 0);
    controller.terminate().await;
}

/// How many hold claims were ever made.
fn holds_ever(cluster: &Cluster) -> usize {
    let writes = cluster.handle.audit(0);
    let made = writes.iter().filter(|entry| {
        entry.before.is_none()
            && entry.after.as_ref().is_some_and(|claim| !claim["metadata"]["annotations"][HOLD_OF].is_null())
    });
    made.count()
}

/// Returns the number of retention records.
async fn retention_records(cluster: &Cluster) -> usize {
    let maps: Api<ConfigMap> = Api::all(cluster.client.clone());
    let params = ListParams::default().labels(&format!("{RETENTION_RECORD}=true"));
    maps.list(&params).await.expect("config maps").items.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_ends_while_no_controller_runs_leaves_its_devices_to_the_next() {
    let (cluster, first, maker) = crowded().await;
    let before = devices(&cluster, "b").await;
    eventually("a retention record for each", async || {
        (retention_records(&cluster).await == 3).then_some(())
    })
    .await;
    first.kill();
    let claim = claim_of(&cluster, "b").await;
    cluster.delete_pod("b").await;
    eventually("no claim", async || claims(&cluster).get_opt(&claim).await.ok()?.is_none().then_some(()))
        .await;
    let second = cluster.controller("c2", &[]).await;
    let hold = one_hold(&cluster).await;
    assert_eq!(cluster.devices(&hold).await, before);
    assert!(cluster.devices("late").await.is_empty());
    pod(&cluster, "b", &maker).await;
    assert_eq!(devices(&cluster, "b").await, before);
    no_holds(&cluster).await;
    assert!(cluster.devices("late").await.is_empty());
    auditor::check(&cluster.handle);
    for name in ["a", "b", "c"] {
        cluster.delete_pod(name).await;
    }
    let makers: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), "default");
    makers.delete("maker", &DeleteParams::default()).await.expect("deleted");
    no_holds(&cluster).await;
    eventually("no retention records", async || (retention_records(&cluster).await == 0).then_some(())).await;
    second.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_will_whose_devices_others_have_by_now_keeps_nobody_waiting() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let first = cluster.controller("c1", &[]).await;
    let maker = template(&cluster).await;
    pod(&cluster, "a", &maker).await;
    devices(&cluster, "a").await;
    eventually("a retention record", async || (retention_records(&cluster).await == 1).then_some(())).await;
    first.kill();
    cluster.delete_pod("a").await;
    no_claims(&cluster).await;
    // The node's GPU is gone meanwhile.
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    for slice in slices.list(&ListParams::default()).await.expect("slices") {
        slices.delete(&slice.name_any(), &DeleteParams::default()).await.expect("deleted");
    }
    cluster.add_node("n2", 1).await;
    let second = cluster.controller("c2", &[]).await;
    pod(&cluster, "a", &maker).await;
    assert!(!devices(&cluster, "a").await.is_empty());
    no_holds(&cluster).await;
    auditor::check(&cluster.handle);
    second.terminate().await;
}

/// The first controller hangs in its n-th write of claims from the end of the pod on and is killed there; its
/// successor ends in the same state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_at_any_write_ends_in_the_same_state() {
    let mut crashed = 0;
    for nth in 0..16 {
        let (cluster, first, maker) = crowded().await;
        let before = devices(&cluster, "b").await;
        let mut matches = Matcher::verb("write").by("c1");
        matches.resource = Some("resourceclaims".to_owned());
        let rule = FaultRule { matches, skip: nth, times: None, fault: Fault::Hang { millis: 600_000 } };
        let rule = cluster.handle.faults().add(rule);
        cluster.delete_pod("b").await;
        let hit = || cluster.handle.faults().rules().iter().any(|state| state.hits > 0);
        // With or without a hold claim that has devices yet.
        eventually("the hold claim or the crash", async || {
            (hit() || holds(&cluster).await.iter().any(|(_, allocated)| *allocated)).then_some(())
        })
        .await;
        pod(&cluster, "b", &maker).await;
        let ended = async || {
            let bound = cluster.get_pod("b").await?.spec?.node_name.is_some();
            (hit() || (bound && holds(&cluster).await.is_empty())).then_some(())
        };
        eventually("the end or the crash", ended).await;
        let hit = hit();
        first.kill();
        cluster.handle.faults().remove(rule);
        let second = cluster.controller("c2", &[]).await;
        assert_eq!(devices(&cluster, "b").await, before, "killed in write {nth}");
        assert!(cluster.devices("late").await.is_empty(), "killed in write {nth}");
        no_holds(&cluster).await;
        auditor::check(&cluster.handle);
        second.terminate().await;
        if !hit {
            break;
        }
        crashed += 1;
    }
    // Made; finalizer, allocation; taken back, finalizer; the new claim's finalizer and allocation; deleted.
    assert!(crashed >= 7, "{crashed}");
}

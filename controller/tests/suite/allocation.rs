//! From a claim in the API to a bound pod, against the embedded control plane.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::common;

use aliquot_control_plane::{Options, PodDeletion, ServerVersion};
use aliquot_model::layout::AllocatorMode;
use aliquot_model::names;
use common::{Cluster, auditor, eventually, fixtures};
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

/// Reasons and notes of the events about an object.
async fn events(cluster: &Cluster, name: &str) -> Vec<(String, String)> {
    let api: Api<Event> = Api::all(cluster.client.clone());
    api.list(&Default::default())
        .await
        .expect("listed")
        .items
        .into_iter()
        .filter(|event| event.regarding.as_ref().and_then(|r| r.name.as_deref()) == Some(name))
        .map(|event| (event.reason.unwrap_or_default(), event.note.unwrap_or_default()))
        .collect()
}

async fn event(cluster: &Cluster, name: &str, reason: &str) -> String {
    eventually(&format!("event {reason} about {name}"), async || {
        events(cluster, name).await.into_iter().find(|(r, _)| r == reason).map(|(_, note)| note)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gated_pod_gets_its_partition_and_is_bound() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("small", &[fixtures::partition("part", "1g.10gb")]).await;
    cluster.pod("p", &["small"]).await;
    assert_eq!(cluster.bound("p").await, "n1");
    let claim = cluster.get_claim("small").await;
    let status = claim.status.expect("a status");
    let allocation = status.allocation.expect("an allocation");
    assert!(allocation.allocation_timestamp.is_some());
    assert_eq!(cluster.devices("small").await, ["n1/gpu-0-mig-1g10gb-19-5"]);
    assert_eq!(status.reserved_for.expect("reserved").len(), 1);
    assert_eq!(claim.metadata.finalizers.expect("finalizers"), ["resource.kubernetes.io/delete-protection"]);
    assert_eq!(event(&cluster, "p", "DevicesAllocated").await, "allocated gpu-0-mig-1g10gb-19-5 on node n1");
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_claim_is_served_also_from_templates_and_two_of_one_pod() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 4).await;
    let controller = cluster.controller("c1", &[]).await;
    let template: ResourceClaimTemplate = fixtures::object(json!({
        "metadata": {"name": "shares", "namespace": "default"},
        "spec": {"spec": fixtures::spec(&[fixtures::share("a", "10Gi", "30"), fixtures::share("b", "20Gi", "40")])},
    }));
    cluster.create(&template).await;
    cluster.claim("whole", &[fixtures::request("gpu", "gpu.aliquot.dev", 2)]).await;
    let mut pod = fixtures::pod("p", &["whole"]);
    let claims = pod.spec.as_mut().expect("a spec").resource_claims.as_mut().expect("claims");
    claims.push(fixtures::object(json!({"name": "s", "resourceClaimTemplateName": "shares"})));
    cluster.create(&pod).await;
    cluster.bound("p").await;
    assert_eq!(cluster.devices("whole").await.len(), 2);
    let generated = cluster
        .get_pod("p")
        .await
        .and_then(|pod| pod.status?.resource_claim_statuses?.first()?.resource_claim_name.clone())
        .expect("a generated claim");
    let claim = cluster.get_claim(&generated).await;
    let results = claim.status.and_then(|s| s.allocation?.devices?.results).expect("results");
    assert!(results.iter().all(|result| result.device.ends_with("-share") && result.share_id.is_some()));
    assert_ne!(results[0].share_id, results[1].share_id);
    assert_eq!(results[1].consumed_capacity.as_ref().expect("consumed")["memory"].0, "20Gi");
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_a_pod_names_twice_is_given_once_and_nobody_elses_gpu() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 6).await;
    for n in 0..3 {
        let (twice, once) = (format!("twice-{n}"), format!("once-{n}"));
        for name in [&twice, &once] {
            cluster.claim(name, &[fixtures::request("gpu", "gpu.aliquot.dev", 1)]).await;
        }
        let mut pod = fixtures::pod(&twice, &[&twice]);
        let claims = pod.spec.as_mut().expect("a spec").resource_claims.as_mut().expect("claims");
        claims.push(fixtures::object(json!({"name": "again", "resourceClaimName": twice})));
        cluster.create(&pod).await;
        cluster.pod(&once, &[&once]).await;
    }
    let controller = cluster.controller("c1", &[]).await;
    for n in 0..3 {
        cluster.bound(&format!("twice-{n}")).await;
        cluster.bound(&format!("once-{n}")).await;
    }
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_does_not_fit_is_told_why_and_gets_what_becomes_free() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("a", &[fixtures::request("gpu", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("a", &["a"]).await;
    cluster.bound("a").await;
    cluster.claim("b", &[fixtures::request("gpu", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("b", &["b"]).await;
    let note = event(&cluster, "b", "DevicesDoNotFit").await;
    assert_eq!(note, "0 of 1 nodes with devices fit: 1 (n1) have not enough free devices for request gpu");
    let pod = cluster.get_pod("b").await.expect("a pod");
    assert_eq!(pod.spec.and_then(|spec| spec.scheduling_gates).map_or(0, |gates| gates.len()), 1);
    cluster.delete_pod("a").await;
    cluster.bound("b").await;
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pods_share_a_claim_and_the_last_one_frees_it() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    cluster.add_node("n2", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("shared", &[fixtures::request("gpu", "gpu.aliquot.dev", 1)]).await;
    for pod in ["p", "q"] {
        cluster.pod(pod, &["shared"]).await;
    }
    assert_eq!(cluster.bound("p").await, cluster.bound("q").await);
    let claim = cluster.get_claim("shared").await;
    assert_eq!(claim.status.and_then(|s| s.reserved_for).map_or(0, |r| r.len()), 2);
    assert_eq!(auditor::allocations(&cluster.handle, "shared"), 1);
    for pod in ["p", "q"] {
        cluster.delete_pod(pod).await;
    }
    eventually("the claim is free", async || cluster.devices("shared").await.is_empty().then_some(())).await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_need_nothing_of_ours_lose_the_gate() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    cluster.create_global(&fixtures::class("nic.example.com", r#"device.driver == "nic.example.com""#)).await;
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("nic", &[fixtures::request("r", "nic.example.com", 1)]).await;
    cluster.pod("p", &["nic"]).await;
    cluster.pod("none", &[]).await;
    for pod in ["p", "none"] {
        eventually("the gate is gone", async || {
            let gates = cluster.get_pod(pod).await?.spec?.scheduling_gates.unwrap_or_default();
            gates.is_empty().then_some(())
        })
        .await;
    }
    assert!(cluster.devices("nic").await.is_empty());
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_only_scheduler_mode_nodes_can_serve_are_left_to_kube_scheduler() {
    let cluster = Cluster::start().await;
    cluster.add_node_in("n1", 1, AllocatorMode::Scheduler).await;
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("c", &[fixtures::request("r", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("p", &["c"]).await;
    eventually("the gate is gone", async || {
        let gates = cluster.get_pod("p").await?.spec?.scheduling_gates.unwrap_or_default();
        gates.is_empty().then_some(())
    })
    .await;
    assert!(cluster.devices("c").await.is_empty());
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_allocation_of_ours_that_nobody_uses_is_taken_back() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &["--idle-timeout", "300ms"]).await;
    cluster.claim("c", &[fixtures::request("r", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("p", &["c"]).await;
    cluster.bound("p").await;
    // As kube-scheduler does it when binding fails: the reservation goes, the allocation stays.
    let mut without = cluster.handle.controllers();
    without.claim_templates = false;
    without.claim_cleanup = false;
    cluster.handle.set_controllers(without);
    // A pod that has not started would get its devices anew.
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    pods.patch_status("p", &PatchParams::default(), &running).await.expect("patched");
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "default");
    let patch = Patch::Merge(json!({"status": {"reservedFor": null}}));
    api.patch_status("c", &PatchParams::default(), &patch).await.expect("patched");
    eventually("the claim is free", async || {
        let claim = cluster.get_claim("c").await;
        let free = claim.status.as_ref().is_none_or(|status| status.allocation.is_none());
        (free && claim.finalizers().is_empty()).then_some(())
    })
    .await;
    assert!(event(&cluster, "c", "UnusedAllocationReleased").await.contains("its devices are free again"));
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_is_acknowledged_and_nothing_is_given_out_until_it_ends() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("a", &[fixtures::request("r", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("a", &["a"]).await;
    cluster.bound("a").await;
    cluster.publish("n1", 2, AllocatorMode::HandOver, 2).await;
    let api: Api<Node> = Api::all(cluster.client.clone());
    eventually("generation 2 is acknowledged", async || {
        let node = api.get("n1").await.expect("a node");
        (node.annotations().get("aliquot.dev/hand-over-acknowledged").map(String::as_str) == Some("2"))
            .then_some(())
    })
    .await;
    cluster.claim("b", &[fixtures::request("r", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("b", &["b"]).await;
    let note = event(&cluster, "b", "DevicesDoNotFit").await;
    assert!(note.contains("are being handed over between kube-scheduler and the controller"), "{note}");
    cluster.publish("n1", 2, AllocatorMode::Controller, 3).await;
    cluster.bound("b").await;
    assert_eq!(cluster.devices("b").await, ["n1/gpu-1"]);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_from_kube_scheduler_ends_when_it_has_nothing_under_way() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    cluster.publish("n1", 2, AllocatorMode::Scheduler, 2).await;
    let wanted = [fixtures::request("r", "gpu.aliquot.dev", 1)];
    cluster.claim("a", &wanted).await;
    let mut pod = fixtures::pod("a", &["a"]);
    let spec = pod.spec.as_mut().expect("a spec");
    // kube-scheduler of this control plane leaves it alone, so it stays under way.
    (spec.scheduling_gates, spec.scheduler_name) = (None, Some("another".to_owned()));
    cluster.create(&pod).await;
    let controller = cluster.controller("c1", &["--scheduler-settle=200ms"]).await;
    cluster.publish("n1", 2, AllocatorMode::HandOver, 3).await;
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    let name = fixtures::slices("n1", 2, AllocatorMode::HandOver, 3)[0].name_any();
    let until = json!({"metadata": {"annotations": {names::HAND_OVER_UNTIL: "2026-01-02T03:14:00Z"}}});
    slices.patch(&name, &PatchParams::default(), &Patch::Merge(until)).await.expect("patched");
    let note = event(&cluster, "n1", "HandOverWaits").await;
    assert!(note.contains("default/a") && note.contains("2026-01-02T03:14:00Z at the latest"), "{note}");
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let idle =
        async || nodes.get("n1").await.expect("a node").annotations().get(names::SCHEDULER_IDLE).cloned();
    assert_eq!(idle().await, None);
    allocate_by_hand(&cluster, "a", "gpu-0", Some("2026-01-02T03:04:05Z")).await;
    eventually("generation 3 is idle", async || (idle().await.as_deref() == Some("3")).then_some(())).await;
    controller.terminate().await;
}

/// Writes an allocation as somebody who does not ask.
async fn allocate_by_hand(cluster: &Cluster, claim: &str, device: &str, time: Option<&str>) {
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "default");
    let mut allocation = json!({
        "devices": {"results": [{"request": "r", "driver": fixtures::DRIVER,
                                 "pool": format!("{}/n1", fixtures::DRIVER), "device": device}]},
        "nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]},
    });
    if let Some(time) = time {
        allocation["allocationTimestamp"] = json!(time);
    }
    let finalizer = json!({"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}});
    api.patch(claim, &PatchParams::default(), &Patch::Merge(finalizer)).await.expect("patched");
    let patch = Patch::Merge(json!({"status": {"allocation": allocation}}));
    api.patch_status(claim, &PatchParams::default(), &patch).await.expect("patched");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_allocation_by_somebody_else_stops_the_pool_until_it_is_gone() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    // It leads when it has given something out.
    cluster.claim("a", &[fixtures::request("r", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("a", &["a"]).await;
    cluster.bound("a").await;
    cluster.claim("foreign", &[fixtures::request("r", "gpu.aliquot.dev", 1)]).await;
    allocate_by_hand(&cluster, "foreign", "gpu-1-mig-1g10gb-19-6", None).await;
    let note = event(&cluster, "n1", "ForeignAllocation").await;
    assert!(note.contains("claim default/foreign was given devices of pool gpu.aliquot.dev/n1"), "{note}");
    cluster.claim("b", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.pod("b", &["b"]).await;
    let note = event(&cluster, "b", "DevicesDoNotFit").await;
    assert!(note.contains("are stopped (claim default/foreign was allocated by somebody else)"), "{note}");
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "default");
    api.delete("foreign", &Default::default()).await.expect("deleted");
    cluster.bound("b").await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_younger_of_two_overlapping_allocations_is_decided_anew() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    for (name, device, time) in
        [("old", "gpu-0", "2026-01-01T00:00:00Z"), ("young", "gpu-0-mig-1g10gb-19-5", "2026-01-01T00:00:09Z")]
    {
        cluster.claim(name, &[fixtures::request("r", "gpu.aliquot.dev", 1)]).await;
        allocate_by_hand(&cluster, name, device, Some(time)).await;
        let mut pod = fixtures::pod(name, &[name]);
        pod.spec.as_mut().expect("a spec").scheduling_gates = None;
        cluster.create(&pod).await;
        cluster.bound(name).await;
    }
    let controller = cluster.controller("c1", &[]).await;
    let note = event(&cluster, "young", "OverlappingAllocation").await;
    assert!(note.contains("it is the younger one, so it is taken back and decided anew"), "{note}");
    eventually("the younger claim is on the other GPU", async || {
        (cluster.devices("young").await == ["n1/gpu-1"]).then_some(())
    })
    .await;
    assert_eq!(cluster.devices("old").await, ["n1/gpu-0"]);
    assert_eq!(controller.metrics.overlaps.get(), 1);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn device_taint_rules_keep_devices_back() {
    let options =
        Options { version: ServerVersion::V1_37, pod_deletion: PodDeletion::Immediate, ..Options::default() };
    let cluster = Cluster::start_as(options).await;
    cluster.add_node("n1", 2).await;
    let kind = GroupVersionKind::gvk("resource.k8s.io", "v1", "DeviceTaintRule");
    let resource = ApiResource::from_gvk_with_plural(&kind, "devicetaintrules");
    let rules: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource);
    let rule = fixtures::object(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceTaintRule", "metadata": {"name": "repair"},
        "spec": {"deviceSelector": {"driver": fixtures::DRIVER, "device": "gpu-0"},
                 "taint": {"key": "example.com/repair", "effect": "NoSchedule"}},
    }));
    rules.create(&Default::default(), &rule).await.expect("created");
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("c", &[fixtures::request("r", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("p", &["c"]).await;
    cluster.bound("p").await;
    assert_eq!(cluster.devices("c").await, ["n1/gpu-1"]);
    cluster.claim("d", &[fixtures::request("r", "gpu.aliquot.dev", 1)]).await;
    cluster.pod("q", &["d"]).await;
    event(&cluster, "q", "DevicesDoNotFit").await;
    rules.delete("repair", &Default::default()).await.expect("deleted");
    cluster.bound("q").await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sick_gpu_is_given_to_those_who_tolerate_it_and_an_informational_taint_keeps_nobody_off() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 3).await;
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    let taint = async |gpu: &str, effect: &str| {
        for mut slice in slices.list(&Default::default()).await.expect("a list").items {
            let devices = slice.spec.devices.iter_mut().flatten();
            for device in devices.filter(|d| d.name.starts_with(gpu) && !d.name.ends_with("admin")) {
                let taints = device.taints.get_or_insert_default();
                taints.retain(|taint| !taint.key.ends_with("/xid"));
                let key = format!("{}/xid", fixtures::DRIVER);
                let xid = json!({"key": key, "value": "48", "effect": effect});
                taints.push(serde_json::from_value(xid).expect("a taint"));
            }
            let name = slice.metadata.name.clone().expect("a name");
            slices.replace(&name, &Default::default(), &slice).await.expect("replaced");
        }
    };
    taint("gpu-0", "NoSchedule").await;
    taint("gpu-2", "NoExecute").await;
    let controller = cluster.controller("c1", &[]).await;
    let claim_and_pod = async |name: &str, tolerations: Value| {
        let mut request = fixtures::request("r", "gpu.aliquot.dev", 1);
        request["exactly"]["tolerations"] = tolerations;
        cluster.claim(name, &[request]).await;
        cluster.pod(name, &[name]).await;
    };
    claim_and_pod("well", json!([])).await;
    cluster.bound("well").await;
    assert_eq!(cluster.devices("well").await, ["n1/gpu-1"]);
    claim_and_pod("waits", json!([])).await;
    event(&cluster, "waits", "DevicesDoNotFit").await;
    let key = format!("{}/xid", fixtures::DRIVER);
    claim_and_pod("brave", json!([{"key": key, "operator": "Exists", "effect": "NoSchedule"}])).await;
    cluster.bound("brave").await;
    assert_eq!(cluster.devices("brave").await, ["n1/gpu-0"]);
    taint("gpu-2", "None").await;
    cluster.bound("waits").await;
    assert_eq!(cluster.devices("waits").await, ["n1/gpu-2"]);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_service_account_tells_who_may_write_and_which_classes_are_ours() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let account: ServiceAccount =
        fixtures::object(json!({"metadata": {"name": "fence", "namespace": "default"}}));
    cluster.create(&account).await;
    let fenced = ["--fence-service-account", "fence"];
    let first = cluster.controller("c1", &fenced).await;
    let annotation = async |name: &str| {
        let api: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), "default");
        api.get("fence").await.expect("an account").annotations().get(name).cloned()
    };
    cluster.claim("a", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.pod("a", &["a"]).await;
    cluster.bound("a").await;
    assert_eq!(annotation("aliquot.dev/writer").await.as_deref(), Some("c1"));
    eventually("the classes are listed", async || {
        let classes = annotation("aliquot.dev/device-classes").await?;
        (classes == "admin.aliquot.dev,gpu.aliquot.dev,mig.aliquot.dev,share.aliquot.dev").then_some(())
    })
    .await;
    first.kill();
    let second = cluster.controller("c2", &fenced).await;
    cluster.claim("b", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.pod("b", &["b"]).await;
    cluster.bound("b").await;
    assert_eq!(annotation("aliquot.dev/writer").await.as_deref(), Some("c2"));
    second.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_pods_that_no_board_can_hold_do_not_keep_a_later_one_waiting() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 4).await;
    let mut spec = fixtures::spec(&[fixtures::request("r", "mig.aliquot.dev", 8)]);
    spec["devices"]["constraints"] = json!([{"matchAttribute": format!("{}/parentUUID", fixtures::DRIVER)}]);
    for number in 0..50 {
        let name = format!("hard-{number}");
        cluster.create(&fixtures::claim(&name, &spec)).await;
        cluster.pod(&name, &[&name]).await;
    }
    cluster.claim("easy", &[fixtures::partition("part", "1g.10gb")]).await;
    cluster.pod("easy", &["easy"]).await;
    let controller = cluster.controller("c1", &[]).await;
    assert_eq!(cluster.bound("easy").await, "n1");
    let note = event(&cluster, "hard-0", "DevicesDoNotFit").await;
    assert!(note.contains("hold at most 7 devices for request r on one GPU"), "{note}");
    // Each was looked at, and none until its time was over.
    assert!(!controller.metrics.text().contains("out_of_time"), "{}", controller.metrics.text());
    controller.terminate().await;
}

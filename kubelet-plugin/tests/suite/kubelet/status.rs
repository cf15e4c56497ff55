//! `status.devices` of claims as users of the API read it.

use super::cluster;
use crate::common::cluster::{Cluster, eventually};
use crate::common::{DRIVER, POOL, World};
use aliquot_api::v1alpha1::NodeLimits;
use aliquot_control_plane::{Fault, FaultRule, Matcher};
use aliquot_nvml::Gpus;
use aliquot_nvml::fake::{FakeGpus, h100_80};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};

fn claims(cluster: &Cluster) -> Api<ResourceClaim> {
    Api::namespaced(cluster.client.clone(), "ns")
}

/// The entries of a claim, by device.
async fn entries(cluster: &Cluster, name: &str) -> Vec<Value> {
    let devices = claims(cluster).get(name).await.unwrap().status.and_then(|status| status.devices);
    let mut entries: Vec<Value> =
        devices.unwrap_or_default().iter().map(|device| serde_json::to_value(device).unwrap()).collect();
    entries.sort_by_key(|entry| entry["device"].to_string());
    entries
}

/// Waits until all entries of ours have data that satisfies `want`, and returns all entries.
async fn told(cluster: &Cluster, name: &str, want: impl Fn(&Value) -> bool) -> Vec<Value> {
    eventually("status.devices", || async {
        let entries = entries(cluster, name).await;
        let mut ours = entries.iter().filter(|entry| entry["driver"] == DRIVER).peekable();
        let there = ours.peek().is_some() && ours.all(|entry| want(&entry["data"]));
        if there { Ok(entries.clone()) } else { Err(format!("{entries:?}")) }
    })
    .await
}

fn is_told(data: &Value) -> bool {
    data["uuid"].is_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_says_what_was_prepared() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let devices = [("m", "gpu-0-mig-3g40gb-9-4"), ("s", "gpu-1-share")];
    let uid = cluster.allocated_claim("c", &devices, json!([])).await;
    cluster.prepare("c", &uid).await.unwrap();
    let entries = told(&cluster, "c", is_told).await;
    let inventory = cluster.world.gpus.inventory().unwrap();
    let (first, second, mig) = (&inventory.gpus[0], &inventory.gpus[1], &inventory.live[0]);
    assert_eq!(entries.len(), 2);
    assert_eq!(
        entries[0]["data"],
        json!({
            "type": "mig", "uuid": mig.uuid, "parentUUID": first.uuid, "productName": first.product_name,
            "pciBusID": first.pci_bus_id, "minor": 0, "profile": "3g.40gb", "placement": {"start": 4, "size": 4},
            "gpuInstanceID": mig.gpu_instance, "computeInstanceID": 0,
        })
    );
    assert_eq!(
        entries[1]["data"],
        json!({
            "type": "share", "uuid": second.uuid, "productName": second.product_name,
            "pciBusID": second.pci_bus_id, "minor": 1, "memoryBytes": 4u64 << 30, "coresPercent": 25, "slots": 1,
            "computePolicy": "Hard", "priority": 0, "failMode": "Closed", "oversubscribeBytes": 0,
        })
    );
    let share_id = cluster.world.ledger().claims[&uid].devices[1].share_id.clone();
    assert_eq!(entries[1]["shareID"], json!(share_id));
    agent.terminate().await;
}

/// A claim with a device of ours and one of a driver for network cards, and what that driver says of it.
async fn claim_of_two_drivers(cluster: &Cluster) -> (String, Value) {
    let request = |name: &str| json!({"name": name, "exactly": {"deviceClassName": "c"}});
    let claim = serde_json::from_value(json!({
        "metadata": {"name": "c", "namespace": "ns"},
        "spec": {"devices": {"requests": [request("gpu"), request("nic")]}},
    }));
    let claim = claims(cluster).create(&PostParams::default(), &claim.unwrap()).await.unwrap();
    let result = |request: &str, driver: &str, pool: &str, device: &str| json!({"request": request, "driver": driver, "pool": pool, "device": device});
    let results = [result("gpu", DRIVER, POOL, "gpu-0"), result("nic", "nic.example.com", "n1", "nic-0")];
    let allocation = json!({"status": {"allocation": {"devices": {"results": results}}}});
    claims(cluster).patch_status("c", &PatchParams::default(), &Patch::Merge(&allocation)).await.unwrap();
    let condition = json!({"type": "Ready", "status": "True", "reason": "LinkUp", "message": "",
        "lastTransitionTime": "2026-01-02T03:04:05Z"});
    let network = json!({"interfaceName": "eth7", "ips": ["10.0.0.7/24"]});
    // The second entry is of ours: another program may tell more of our device.
    let theirs = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
    "status": {"devices": [
        {"driver": "nic.example.com", "pool": "n1", "device": "nic-0", "conditions": [condition],
            "data": {"link": "up"}, "networkData": network},
        {"driver": DRIVER, "pool": POOL, "device": "gpu-0", "conditions": [condition], "networkData": network},
    ]}});
    let params = PatchParams::apply("nic.example.com");
    claims(cluster).patch_status("c", &params, &Patch::Apply(&theirs)).await.unwrap();
    let theirs = entries(cluster, "c").await.remove(1);
    assert_eq!(theirs["driver"], "nic.example.com");
    (claim.metadata.uid.unwrap(), theirs)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_say_of_devices_is_not_touched() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let (uid, theirs) = claim_of_two_drivers(&cluster).await;
    cluster.prepare("c", &uid).await.unwrap();
    let entries = told(&cluster, "c", is_told).await;
    assert_eq!(entries[1], theirs);
    assert_eq!(entries[0]["networkData"], theirs["networkData"]);
    let conditions: Vec<&str> =
        entries[0]["conditions"].as_array().unwrap().iter().filter_map(|c| c["type"].as_str()).collect();
    assert!(conditions.contains(&"Ready") && conditions.contains(&"Prepared"), "{conditions:?}");
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_could_not_say_before_it_died_the_next_one_says() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let uid = cluster.allocated_claim("c", &[("g", "gpu-0")], json!([])).await;
    let write = Matcher::new("write", "resourceclaims").subresource("status");
    let rule = cluster.plane.faults().add(FaultRule::always(write, Fault::DropBefore));
    cluster.prepare("c", &uid).await.unwrap();
    eventually("a write that fails", || async {
        if cluster.plane.faults().hits(rule) > 0 { Ok(()) } else { Err(String::new()) }
    })
    .await;
    agent.kill();
    cluster.plane.faults().clear();
    assert_eq!(entries(&cluster, "c").await, Vec::<Value>::new());
    // Nobody asks the next one to prepare it.
    let agent = cluster.start(&[]).await;
    let entry = told(&cluster, "c", is_told).await.remove(0);
    assert_eq!(entry["conditions"][0]["status"], "True");
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_earlier_agent_could_not_prepare_does_not_count_for_ever() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let holder = cluster.allocated_claim("holder", &[("g", "gpu-0")], json!([])).await;
    cluster.prepare("holder", &holder).await.unwrap();
    let uid = cluster.allocated_claim("c", &[("g", "gpu-0")], json!([])).await;
    cluster.prepare("c", &uid).await.unwrap_err();
    let status = |entries: &[Value]| entries.first().map(|entry| entry["conditions"][0]["status"].clone());
    eventually("the refusal in the status", || async {
        let entries = entries(&cluster, "c").await;
        if status(&entries) == Some(json!("False")) { Ok(()) } else { Err(format!("{entries:?}")) }
    })
    .await;
    cluster.unprepare("holder", &holder).await.unwrap();
    let write = Matcher::new("write", "resourceclaims").subresource("status");
    cluster.plane.faults().add(FaultRule::always(write, Fault::DropBefore));
    cluster.prepare("c", &uid).await.unwrap();
    agent.kill();
    cluster.plane.faults().clear();
    let agent = cluster.start(&[]).await;
    let told = told(&cluster, "c", is_told).await;
    assert_eq!(status(&told), Some(json!("True")));
    agent.terminate().await;
}

/// A tenant may make its own claim so large that nothing more can be written into it.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_status_cannot_be_written_silences_no_other() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let mut claims = Vec::new();
    for (name, device) in [("a", "gpu-0"), ("b", "gpu-1")] {
        claims.push((cluster.allocated_claim(name, &[("g", device)], json!([])).await, name));
    }
    // They are told in the order of their UIDs.
    claims.sort();
    let write = Matcher {
        name: Some(claims[0].1.into()),
        ..Matcher::new("write", "resourceclaims").subresource("status")
    };
    let too_large = Fault::Status {
        code: 500,
        reason: "InternalError".into(),
        message: "etcdserver: request is too large".into(),
        retry_after: None,
    };
    let rule = cluster.plane.faults().add(FaultRule::always(write, too_large));
    for (uid, name) in &claims {
        cluster.prepare(name, uid).await.unwrap();
    }
    told(&cluster, claims[1].1, is_told).await;
    assert!(cluster.plane.faults().hits(rule) > 0 && entries(&cluster, claims[0].1).await.is_empty());
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_starts_anew_writes_nothing_that_is_there() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let uid = cluster.allocated_claim("first", &[("g", "gpu-0")], json!([])).await;
    cluster.prepare("first", &uid).await.unwrap();
    told(&cluster, "first", is_told).await;
    agent.kill();
    let before = claims(&cluster).get("first").await.unwrap().metadata.resource_version;
    let agent = cluster.start(&[]).await;
    cluster.prepare("first", &uid).await.unwrap();
    // When this one is told of, so was the first.
    let second = cluster.allocated_claim("second", &[("g", "gpu-1")], json!([])).await;
    cluster.prepare("second", &second).await.unwrap();
    told(&cluster, "second", is_told).await;
    agent.terminate().await;
    assert_eq!(claims(&cluster).get("first").await.unwrap().metadata.resource_version, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_says_a_limit_that_changed_while_the_share_runs() {
    let cluster = Cluster::new(World::new(FakeGpus::new([h100_80(0)]))).await;
    cluster.define::<NodeLimits>().await;
    // Nothing but the change itself has the agent look.
    let agent = cluster.start(&["--elastic-shares=true", "--inventory-interval=1h"]).await;
    cluster.pool_where("published", |slices| !slices.is_empty()).await;
    let uid = cluster.allocated_claim("c", &[("s", "gpu-0-share")], json!([])).await;
    cluster.prepare("c", &uid).await.unwrap();
    told(&cluster, "c", |data| data["memoryBytes"] == 4u64 << 30).await;
    let share_id = cluster.world.ledger().claims[&uid].devices[0].share_id.clone();
    let kind = GroupVersionKind::gvk("aliquot.dev", "v1alpha1", "NodeLimits");
    let limits: Api<DynamicObject> =
        Api::all_with(cluster.client.clone(), &ApiResource::from_gvk_with_plural(&kind, "nodelimits"));
    // The second change finds an agent that has nothing else to look for.
    for (gibibytes, cores) in [(20u64, 50), (2, 60)] {
        let limit = json!({"uid": uid, "shareId": share_id, "namespace": "ns", "name": "c",
            "device": "gpu-0-share", "memoryBytes": gibibytes << 30, "coresPercent": cores});
        let object = json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "NodeLimits",
            "metadata": {"name": "n1"}, "spec": {"shares": [limit]}});
        limits.patch("n1", &PatchParams::apply("test"), &Patch::Apply(&object)).await.unwrap();
        let entry = told(&cluster, "c", |data| data["memoryBytes"] == gibibytes << 30).await.remove(0);
        assert_eq!(entry["data"]["coresPercent"], cores);
    }
    agent.terminate().await;
}

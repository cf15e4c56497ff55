//! Claims that are gone from the API while they are prepared.

use super::cluster;
use crate::common::DRIVER;
use crate::common::cluster::{Cluster, eventually, of_agent, taints};
use aliquot_control_plane::{Fault, FaultRule, Matcher};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn hardware_of_a_claim_that_vanished_is_kept_out_of_allocation_until_unprepared() {
    let cluster = cluster().await;
    let agent = cluster.start(&["--orphan-grace=1h"]).await;
    let uid = cluster.allocated_claim("c", &[("m", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    cluster.prepare("c", &uid).await.unwrap();
    let held = |slices: &[k8s_openapi::api::resource::v1::ResourceSlice]| -> Vec<String> {
        let key = aliquot_model::names::held_taint(DRIVER);
        taints(slices).into_iter().filter(|(_, k, _)| *k == key).map(|(device, _, _)| device).collect()
    };
    let (_, slices) = cluster.pool_where("published", |s| !taints(s).is_empty()).await;
    assert_eq!(held(&slices), Vec::<String>::new());
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "ns");
    let free = json!({"metadata": {"finalizers": null}});
    api.patch("c", &PatchParams::default(), &Patch::Merge(&free)).await.unwrap();
    api.delete("c", &DeleteParams::default()).await.unwrap();
    let (_, slices) = cluster.pool_where("held", |s| !held(s).is_empty()).await;
    let names = held(&slices);
    assert!(names.contains(&"gpu-0".to_owned()) && names.contains(&"gpu-0-mig-1g10gb-19-6".to_owned()));
    assert!(!names.contains(&"gpu-0-mig-1g10gb-19-0".to_owned()), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with("gpu-1")), "{names:?}");
    cluster.unprepare("c", &uid).await.unwrap();
    cluster.pool_where("free", |s| held(s).is_empty()).await;
    agent.terminate().await;
}

/// Namespaced names of the claims of which it was told that they are gone while they are prepared.
async fn told_vanished(cluster: &Cluster) -> Vec<String> {
    let api: Api<Event> = Api::all(cluster.client.clone());
    let events = api.list(&ListParams::default()).await.unwrap().items;
    let notes = events.into_iter().filter(|event| event.reason.as_deref() == Some("ClaimVanished"));
    let claim = |note: String| note.split(' ').nth(1).unwrap_or_default().to_owned();
    notes.filter_map(|event| event.note).map(claim).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_was_unprepared_before_it_went_has_not_vanished() {
    let cluster = cluster().await;
    let agent = cluster.start(&["--orphan-grace=1h"]).await;
    let uid = cluster.allocated_claim("c", &[("m", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    cluster.prepare("c", &uid).await.unwrap();
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "ns");
    let go = async |name: &str| {
        let free = json!({"metadata": {"finalizers": null}});
        api.patch(name, &PatchParams::default(), &Patch::Merge(&free)).await.unwrap();
        api.delete(name, &DeleteParams::default()).await.unwrap();
    };
    let slow = FaultRule::always(
        of_agent(Matcher::new("get", "resourceclaims").named("c")),
        Fault::Latency { millis: 1500 },
    );
    let slow = cluster.plane.faults().add(slow);
    eventually("the agent asks for the claim", || async {
        if cluster.plane.faults().hits(slow) > 0 { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    // Before the answer, which is that there is no such claim.
    cluster.unprepare("c", &uid).await.unwrap();
    go("c").await;
    // One that does vanish is found after that.
    let other = cluster.allocated_claim("other", &[("g", "gpu-1")], json!([])).await;
    cluster.prepare("other", &other).await.unwrap();
    go("other").await;
    let told = eventually("one that vanished", || async {
        let told = told_vanished(&cluster).await;
        if told.contains(&"ns/other".to_owned()) { Ok(told) } else { Err(format!("{told:?}")) }
    })
    .await;
    assert_eq!(told, ["ns/other"]);
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_was_prepared_anew_on_other_devices_has_not_vanished() {
    let cluster = cluster().await;
    let agent = cluster.start(&["--orphan-grace=1h"]).await;
    let uid = cluster.allocated_claim("c", &[("g", "gpu-0")], json!([])).await;
    cluster.prepare("c", &uid).await.unwrap();
    // A claim that seems gone is asked for twice, so the agent prepares it anew meanwhile.
    let slow = FaultRule::always(
        of_agent(Matcher::new("get", "resourceclaims").named("c")),
        Fault::Latency { millis: 1500 },
    );
    let slow = cluster.plane.faults().add(slow);
    eventually("the agent asks for the claim", || async {
        if cluster.plane.faults().hits(slow) > 0 { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    cluster.unprepare("c", &uid).await.unwrap();
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "ns");
    let mut allocation = api.get("c").await.unwrap().status.unwrap().allocation.unwrap();
    allocation.devices.as_mut().unwrap().results.as_mut().unwrap()[0].device = "gpu-1".to_owned();
    for allocation in [json!(null), json!(allocation)] {
        let patch = Patch::Merge(json!({"status": {"allocation": allocation}}));
        api.patch_status("c", &PatchParams::default(), &patch).await.unwrap();
    }
    cluster.prepare("c", &uid).await.unwrap();
    let other = cluster.allocated_claim("other", &[("g", "gpu-0")], json!([])).await;
    cluster.prepare("other", &other).await.unwrap();
    let clear = json!({"status": {"allocation": null}});
    api.patch_status("other", &PatchParams::default(), &Patch::Merge(&clear)).await.unwrap();
    let told = eventually("one that vanished", || async {
        let told = told_vanished(&cluster).await;
        if told.contains(&"ns/other".to_owned()) { Ok(told) } else { Err(format!("{told:?}")) }
    })
    .await;
    assert_eq!(told, ["ns/other"]);
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hardware_of_a_vanished_claim_without_pods_is_released_after_its_grace() {
    let cluster = cluster().await;
    let agent = cluster.start(&["--orphan-grace=200ms"]).await;
    let uid = cluster.allocated_claim("c", &[("m", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    cluster.prepare("c", &uid).await.unwrap();
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "ns");
    let clear = json!({"status": {"allocation": null}});
    api.patch_status("c", &PatchParams::default(), &Patch::Merge(&clear)).await.unwrap();
    eventually("released", || async {
        let left = cluster.world.instances();
        if left.is_empty() && cluster.world.files().is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
    agent.terminate().await;
    cluster.world.assert_clean();
}

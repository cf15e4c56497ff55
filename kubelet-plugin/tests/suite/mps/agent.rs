//! The whole agent: what it publishes, and what the API is told.

use super::common::cluster::{Cluster, devices, eventually};
use super::common::supervisor::Supervisor;
use super::common::{DRIVER, World};
use super::world;
use aliquot_nvml::fake::FakeGpus;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Api;
use serde_json::{Value, json};

fn has(slices: &[ResourceSlice], name: &str) -> bool {
    devices(slices).iter().any(|device| device == name)
}

#[tokio::test(flavor = "multi_thread")]
async fn gpus_are_offered_through_mps_while_a_supervisor_is_there() {
    let cluster = Cluster::new(World::new(FakeGpus::new([super::h100_80(0)]))).await;
    let agent = cluster.start(&[]).await;
    let (_, slices) = cluster.pool_where("published", |slices| has(slices, "gpu-0")).await;
    assert!(!has(&slices, "gpu-0-mps"));
    let supervisor = Supervisor::start(cluster.world.mps());
    let (_, slices) = cluster.pool_where("MPS", |slices| has(slices, "gpu-0-mps")).await;
    let device = slices.iter().flat_map(|s| s.spec.devices.iter().flatten()).find(|d| d.name == "gpu-0-mps");
    assert_ne!(device.unwrap().allow_multiple_allocations, Some(true));
    drop(supervisor);
    cluster.pool_where("no MPS", |slices| has(slices, "gpu-0") && !has(slices, "gpu-0-mps")).await;
    agent.terminate().await;
}

/// An allocated device that is not published counts for nobody, and its GPU would be given out once more.
#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_a_claim_has_through_mps_stays_published_without_a_supervisor() {
    let cluster = Cluster::new(world()).await;
    let supervisor = Supervisor::start(cluster.world.mps());
    let agent = cluster.start(&[]).await;
    cluster.pool_where("MPS", |slices| has(slices, "gpu-1-mps")).await;
    let parameters = json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "MpsConfig",
        "activeThreadPercentage": 25, "pinnedDeviceMemoryLimit": "2Gi"});
    let config = json!([{"source": "FromClaim", "requests": [], "opaque": {"driver": DRIVER, "parameters": parameters}}]);
    let uid = cluster.allocated_claim("c", &[("m", "gpu-0-mps")], config).await;
    cluster.prepare("c", &uid).await.unwrap();
    drop(supervisor);
    let only_held = |slices: &[ResourceSlice]| has(slices, "gpu-0-mps") && !has(slices, "gpu-1-mps");
    cluster.pool_where("MPS of the GPU that the claim has", only_held).await;
    let data = eventually("status.devices", || async {
        let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "ns");
        let devices =
            api.get("c").await.unwrap().status.and_then(|status| status.devices).unwrap_or_default();
        let data: Option<Value> = devices.first().and_then(|device| Some(device.data.as_ref()?.0.clone()));
        data.filter(|data| data["uuid"].is_string()).ok_or_else(|| format!("{devices:?}"))
    })
    .await;
    assert_eq!(
        (&data["type"], &data["activeThreadPercentage"], &data["pinnedDeviceMemoryLimitBytes"]),
        (&json!("mps"), &json!(25), &json!(2u64 << 30))
    );
    cluster.unprepare("c", &uid).await.unwrap();
    cluster.pool_where("given back", |slices| !has(slices, "gpu-0-mps")).await;
    agent.terminate().await;
    cluster.world.assert_clean();
}

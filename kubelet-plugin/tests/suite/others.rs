//! The agent on a node on which somebody else gives out GPUs, too.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use crate::common::cluster::{Agent, Cluster, devices, eventually, taints};
use crate::common::{DRIVER, World};
use crate::publish::{events, is_told};

use aliquot_model::names;
use aliquot_nvml::fake::{FakeGpus, h100_80, t4};
use aliquot_proto::podresources::v1::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use aliquot_proto::podresources::v1::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ClaimResource, ContainerDevices,
    ContainerResources, DynamicResource, GetPodResourcesRequest, GetPodResourcesResponse,
    ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), t4(1)]))
}

/// Whether nothing of ours can be given out, as far as something is published.
fn closed(slices: &[ResourceSlice]) -> Option<bool> {
    let key = names::other_driver_taint(DRIVER);
    let ours: Vec<_> = slices.iter().filter(|slice| slice.spec.driver == DRIVER).cloned().collect();
    let tainted: BTreeSet<String> =
        taints(&ours).into_iter().filter(|(_, taint, _)| *taint == key).map(|(name, ..)| name).collect();
    let all: BTreeSet<String> = devices(&ours).into_iter().filter(|name| !name.ends_with("-admin")).collect();
    (!all.is_empty()).then(|| tainted == all)
}

/// What the kubelet says of the node's pods; `None` is a kubelet that does not answer.
#[derive(Clone, Default)]
struct PodsOf(Arc<Mutex<Option<Vec<PodResources>>>>);

#[tonic::async_trait]
impl PodResourcesLister for PodsOf {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let pod_resources = self.0.lock().unwrap().clone().ok_or_else(|| Status::unavailable("starting"))?;
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("not asked for"))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("not asked for"))
    }
}

/// Has a kubelet say this of the pods of the cluster's node.
fn serve(cluster: &Cluster, pods: &PodsOf) {
    let dir = cluster.world.dir.path().join("pod-resources");
    std::fs::create_dir(&dir).unwrap();
    let listener = UnixListener::bind(dir.join("kubelet.sock")).unwrap();
    let server = tonic::transport::Server::builder().add_service(PodResourcesListerServer::new(pods.clone()));
    tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
}

/// How often publishing failed.
async fn errors(agent: &Agent) -> u32 {
    let metrics = agent.get("/metrics").await.1;
    let errors = metrics.lines().find_map(|line| line.strip_prefix("dra_gpu_publish_errors_total "));
    errors.unwrap_or_default().parse().unwrap_or_default()
}

fn pod(name: &str, container: ContainerResources) -> PodResources {
    PodResources {
        name: name.into(),
        namespace: "ml".into(),
        containers: vec![container],
        ..PodResources::default()
    }
}

/// A pod with devices of a device plugin.
fn with_devices(name: &str, resource: &str, count: usize) -> PodResources {
    let device_ids = (0..count).map(|at| format!("GPU-{at}")).collect();
    let devices = ContainerDevices { resource_name: resource.into(), device_ids, topology: None };
    pod(name, ContainerResources { devices: vec![devices], ..ContainerResources::default() })
}

/// A pod with a device of a DRA driver.
fn with_claim(name: &str, driver: &str) -> PodResources {
    let device = ClaimResource { driver_name: driver.into(), ..ClaimResource::default() };
    let claim = DynamicResource { claim_resources: vec![device], ..DynamicResource::default() };
    pod(name, ContainerResources { dynamic_resources: vec![claim], ..ContainerResources::default() })
}

#[tokio::test(flavor = "multi_thread")]
async fn where_a_device_plugin_or_another_dra_driver_gives_out_gpus_nothing_of_ours_is() {
    let cluster = Cluster::new(world()).await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let gives_out = async |count: &str| {
        // None can be had while the plugin is started anew.
        let status = json!({"status": {
            "capacity": {"nvidia.com/gpu": count}, "allocatable": {"nvidia.com/gpu": "0"},
        }});
        nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    };
    // Before anything is published.
    gives_out("8").await;
    let agent = cluster.start(&["--other-driver-grace=1s"]).await;
    cluster.pool_where("nothing to be given out", |slices| closed(slices) == Some(true)).await;
    is_told(&cluster, "OtherDriver").await;
    let told = events(&cluster, "OtherDriver").await.remove(0);
    assert!(told.contains("(nvidia.com/gpu: 8)"), "{told}");
    assert!(agent.get("/healthz").await.1.contains("nvidia.com/gpu: 8"));
    let gone = Instant::now();
    gives_out("0").await;
    cluster.pool_where("all to be given out", |slices| closed(slices) == Some(false)).await;
    assert!(gone.elapsed() >= Duration::from_secs(1), "a kubelet that starts says the same for a while");
    is_told(&cluster, "OtherDriverGone").await;

    let theirs: ResourceSlice = serde_json::from_value(json!({
        "metadata": {"name": "theirs"},
        "spec": {"driver": "gpu.nvidia.com", "nodeName": "n1",
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "gpu-0"}]},
    }))
    .unwrap();
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    slices.create(&PostParams::default(), &theirs).await.unwrap();
    cluster.pool_where("nothing to be given out", |slices| closed(slices) == Some(true)).await;
    slices.delete("theirs", &DeleteParams::default()).await.unwrap();
    cluster.pool_where("all to be given out", |slices| closed(slices) == Some(false)).await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_pods_have_of_somebody_who_has_ended_is_not_given_out_a_second_time() {
    let cluster = Cluster::new(world()).await;
    let pods = PodsOf::default();
    let have = |list: &[PodResources]| *pods.0.lock().unwrap() = Some(list.to_vec());
    serve(&cluster, &pods);
    let agent = cluster.start(&["--other-driver-grace=1s"]).await;
    // A kubelet that does not answer may know of some.
    eventually("asked twice", async || {
        let errors = errors(&agent).await;
        if errors < 2 { Err(format!("{errors} errors")) } else { Ok(()) }
    })
    .await;
    assert!(cluster.slices().await.is_empty(), "published without an answer");
    agent.terminate().await;
    // One that has just started knows of no pod, not even of the agent's.
    have(&[]);
    let agent = cluster
        .start(&["--other-driver-grace=1s", "--pod-namespace=aliquot-system", "--pod-name=agent"])
        .await;
    eventually("asked twice", async || {
        let errors = errors(&agent).await;
        if errors < 2 { Err(format!("{errors} errors")) } else { Ok(()) }
    })
    .await;
    assert!(cluster.slices().await.is_empty(), "published while the kubelet starts");

    let own = || PodResources { namespace: "aliquot-system".into(), ..with_devices("agent", "cpu", 0) };
    have(&[own(), with_devices("other", "example.com/nic", 1), with_devices("old", "nvidia.com/gpu", 2)]);
    cluster.pool_where("nothing to be given out", |slices| closed(slices) == Some(true)).await;
    is_told(&cluster, "OtherDriver").await;
    let told = events(&cluster, "OtherDriver").await.remove(0);
    assert!(told.contains("(pod ml/old still has nvidia.com/gpu: 2)"), "{told}");
    // A kubelet that is started anew has not forgotten them for good.
    let before = errors(&agent).await;
    have(&[]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!((closed(&cluster.slices().await), errors(&agent).await), (Some(true), before));
    have(&[own(), with_claim("ours", DRIVER), with_claim("net", "nic.example.com")]);
    cluster.pool_where("all to be given out", |slices| closed(slices) == Some(false)).await;
    is_told(&cluster, "OtherDriverGone").await;
    agent.terminate().await;

    have(&[with_claim("old", "gpu.nvidia.com")]);
    let agent = cluster.start(&[]).await;
    cluster.pool_where("nothing to be given out", |slices| closed(slices) == Some(true)).await;
    assert!(agent.get("/healthz").await.1.contains("pod ml/old still has gpu.nvidia.com: 1"));
    agent.terminate().await;
}

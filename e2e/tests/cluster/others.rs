//! A device plugin that gives out the node's GPUs, too.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_model::names::{DEFAULT_DRIVER, other_driver_taint};
use aliquot_proto::deviceplugin::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use aliquot_proto::deviceplugin::v1beta1::registration_client::RegistrationClient;
use aliquot_proto::deviceplugin::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions, Empty,
    ListAndWatchResponse, RegisterRequest,
};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::path::PathBuf;
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

const RESOURCE: &str = "nvidia.com/gpu";
const SOCKET: &str = "others.sock";

/// Has two devices, and gives containers nothing of them.
struct Plugin;

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream =
        std::pin::Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |id: &str| Device { id: id.into(), health: "Healthy".into() };
        let all = ListAndWatchResponse { devices: vec![device("a"), device("b")] };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(all)).chain(tokio_stream::pending()))))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        let nothing = |_| ContainerAllocateResponse::default();
        Ok(Response::new(AllocateResponse {
            container_responses: containers.into_iter().map(nothing).collect(),
        }))
    }
}

/// Starts it and registers it at the kubelet; dropped, it ends.
async fn start(cluster: &Cluster) -> Result<JoinSet<()>> {
    let dir = PathBuf::from(cluster.setting("KUBELET_ROOT")?).join("device-plugins");
    let path = dir.join(SOCKET);
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).with_context(|| path.display().to_string())?;
    let mut running = JoinSet::new();
    running.spawn(async {
        let server = Server::builder().add_service(DevicePluginServer::new(Plugin));
        let _ = server.serve_with_incoming(UnixListenerStream::new(listener)).await;
    });
    let kubelet = format!("unix://{}", dir.join("kubelet.sock").display());
    let mut kubelet = RegistrationClient::new(Endpoint::from_shared(kubelet)?.connect().await?);
    let request = RegisterRequest {
        version: "v1beta1".into(),
        endpoint: SOCKET.into(),
        resource_name: RESOURCE.into(),
        options: None,
    };
    kubelet.register(request).await?;
    Ok(running)
}

/// Waits until all devices of ours but those for administration are kept back, or none is.
async fn kept_back(cluster: &Cluster, wanted: bool) -> Result<()> {
    let key = other_driver_taint(DEFAULT_DRIVER);
    cluster
        .wait_for(&format!("devices that are kept back: {wanted}"), || async {
            let devices = cluster.devices().await?;
            let mut given = devices.iter().filter(|device| !device.name.ends_with("-admin")).peekable();
            let there = given.peek().is_some();
            let tainted = |taints: &Option<Vec<_>>| {
                taints
                    .iter()
                    .flatten()
                    .any(|taint: &k8s_openapi::api::resource::v1::DeviceTaint| taint.key == key)
            };
            Ok((there && given.all(|device| tainted(&device.taints) == wanted)).then_some(()))
        })
        .await
}

#[test]
fn nothing_is_given_out_while_a_device_plugin_does_it_and_its_pods_have_some_still() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster
            .configure(&["kubeletPlugin.extraArgs={--scheduler-timeouts=4s,--claim-check-interval=1s,--other-driver-grace=2s}"])
            .await?;
        let outcome = async {
            let namespace = cluster.namespace("others").await?;
            let plugin = start(cluster).await?;
            kept_back(cluster, true).await?;
            let told = cluster.event("default", "OtherDriver").await?;
            ensure!(told.contains("nvidia.com/gpu: 2"), "{told}");
            let mut theirs =
                PodManifest::of_template(&namespace, "theirs", "gpu").shell("sleep 1000000 & wait").build();
            theirs["spec"]["resourceClaims"] = json!([]);
            theirs["spec"]["containers"][0]["resources"] = json!({"limits": {RESOURCE: "1"}});
            cluster.create(&[
                objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
                theirs,
                PodManifest::of_template(&namespace, "ours", "gpu").build(),
            ])?;
            cluster.running(&namespace, "theirs").await?;
            let told = cluster.event(&namespace, "ours DevicesDoNotFit").await?;
            ensure!(told.contains("untolerated taint gpu.aliquot.dev/other-driver"), "{told}");

            // The plugin is uninstalled, and a kubelet that starts knows of none; but its pod goes on.
            drop(plugin);
            cluster.component("stop", "kubelet")?;
            cluster.component("start", "kubelet")?;
            let of_pod = format!("pod {namespace}/theirs still has nvidia.com/gpu: 1");
            let told = cluster.event("default", &of_pod).await?;
            ensure!(told.contains("OtherDriver"), "{told}");
            kept_back(cluster, true).await?;
            cluster.running(&namespace, "theirs").await?;
            cluster.delete_pod(&namespace, "theirs").await?;
            cluster.running(&namespace, "ours").await?;
            kept_back(cluster, false).await?;
            cluster.event("default", "OtherDriverGone").await?;
            cluster.delete_namespace(&namespace).await
        }
        .await;
        cluster.configure(&[]).await?;
        outcome
    })
}

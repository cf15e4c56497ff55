//! An agent on fake GPUs, an embedded control plane, and a client that plays kubelet.

use super::{DRIVER, POOL, World};
use aliquot_api::v1alpha1;
use aliquot_control_plane::{Controllers, Gates, Handle, Matcher, Options, PodDeletion, ServerVersion};
use aliquot_kubelet_plugin::args::Args;
use aliquot_kubelet_plugin::run;
use aliquot_proto::dra::{v1, v1beta1};
use aliquot_proto::pluginregistration::v1::registration_client::RegistrationClient;
use clap::Parser;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, CustomResourceExt};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, UnixStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

pub struct Cluster {
    pub world: World,
    pub plane: Handle,
    pub client: Client,
}

/// A running agent.
pub struct Agent {
    pub stop: CancellationToken,
    pub task: JoinHandle<anyhow::Result<()>>,
    pub http: std::net::SocketAddr,
}

impl Agent {
    /// SIGTERM.
    pub async fn terminate(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }

    /// SIGKILL, as far as a task can be killed: nothing of its shutdown runs.
    pub fn kill(self) {
        self.task.abort();
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        page(self.http, path).await.unwrap()
    }
}

/// Status and content of a page of an agent; nothing while it does not answer.
pub async fn page(agent: std::net::SocketAddr, path: &str) -> Option<(u16, String)> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(agent).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

/// Waits until something holds; fails with the last answer after a time that no working agent needs.
pub async fn eventually<T, F: Future<Output = Result<T, String>>>(
    what: &str,
    mut look: impl FnMut() -> F,
) -> T {
    let started = Instant::now();
    loop {
        match look().await {
            Ok(value) => return value,
            Err(last) if started.elapsed() > Duration::from_secs(60) => panic!("{what}: {last}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(30)).await,
        }
    }
}

impl Cluster {
    pub async fn new(world: World) -> Self {
        Self::of(world, ServerVersion::default(), None).await
    }

    pub async fn of(world: World, version: ServerVersion, gates: Option<Gates>) -> Self {
        if std::env::var_os("RUST_LOG").is_some() {
            run::start_logging(aliquot_kubelet_plugin::args::LogFormat::Text);
        }
        let options = Options {
            version,
            gates,
            controllers: Controllers::NONE,
            pod_deletion: PodDeletion::Immediate,
            namespaces: vec!["ns".into(), "aliquot-system".into()],
            ..Options::default()
        };
        let plane = aliquot_control_plane::serve(options).await.unwrap();
        let client = Client::try_from(kube::Config::new(plane.url().parse().unwrap())).unwrap();
        let nodes: Api<Node> = Api::all(client.clone());
        let node = serde_json::from_value(json!({"metadata": {"name": "n1"}})).unwrap();
        nodes.create(&PostParams::default(), &node).await.unwrap();
        Self { world, plane, client }
    }

    /// Defines a kind of this driver, as the chart does.
    pub async fn define<K: CustomResourceExt>(&self) {
        let definition = serde_json::from_value(v1alpha1::definition::<K>()).unwrap();
        let definitions: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        definitions.create(&PostParams::default(), &definition).await.unwrap();
    }

    fn args(&self, extra: &[&str]) -> Args {
        Args::parse_from(self.command_line(extra))
    }

    /// The agent's command line, its name first.
    pub fn command_line(&self, extra: &[&str]) -> Vec<String> {
        let dir = self.world.dir.path();
        let path = |name: &str| dir.join(name).display().to_string();
        let mut line = vec![
            "agent".to_owned(),
            "--node-name=n1".into(),
            format!("--driver-name={DRIVER}"),
            format!("--registrar-dir={}", path("registry")),
            format!("--plugin-dir={}", path("plugins")),
            format!("--cdi-dir={}", path("cdi")),
            format!("--driver-root={}", path("root")),
            format!("--proc-root={}", path("root/proc")),
            format!("--limiter-dir={}", path("limiter")),
            // Nothing of a test is left mounted.
            "--region-storage=directory".to_owned(),
            "--claim-check-interval=100ms".into(),
            "--inventory-interval=200ms".into(),
            "--lock-timeout=5s".into(),
        ];
        // What a test says itself takes the place of the usual.
        let name = |arg: &str| arg.split('=').next().unwrap_or_default().to_owned();
        line.retain(|arg| !extra.iter().any(|own| own.starts_with("--") && name(own) == name(arg)));
        line.extend(extra.iter().map(|arg| (*arg).to_owned()));
        line
    }

    pub async fn start(&self, extra: &[&str]) -> Agent {
        let args = self.args(extra);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let http = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let gpus = Arc::new(self.world.gpus.clone());
        let client = run::client_of(kube::Config::new(self.plane.url().parse().unwrap())).unwrap();
        let task = tokio::spawn(run::run_with(args, client, listener, Some(gpus), stop.clone()));
        Agent { stop, task, http }
    }

    pub fn registry(&self) -> PathBuf {
        self.world.dir.path().join("registry")
    }

    pub fn dra_socket(&self) -> PathBuf {
        self.world.data().join(format!("dra@{DRIVER}.sock"))
    }

    pub fn slices_api(&self) -> Api<ResourceSlice> {
        Api::all(self.client.clone())
    }

    pub async fn slices(&self) -> Vec<ResourceSlice> {
        self.slices_api().list(&ListParams::default()).await.unwrap().items
    }

    /// The pool if it is complete: its generation and its slices.
    pub async fn pool(&self) -> Result<(i64, Vec<ResourceSlice>), String> {
        let slices = self.slices().await;
        let generation = slices.iter().map(|s| s.spec.pool.generation).max().ok_or("no slices")?;
        let current: Vec<_> = slices.into_iter().filter(|s| s.spec.pool.generation == generation).collect();
        let count = i64::try_from(current.len()).unwrap();
        if current.iter().any(|slice| slice.spec.pool.resource_slice_count != count) {
            return Err(format!("{count} slices, incomplete"));
        }
        Ok((generation, current))
    }

    /// Waits for a complete pool that satisfies `want`.
    pub async fn pool_where(
        &self,
        what: &str,
        want: impl Fn(&[ResourceSlice]) -> bool,
    ) -> (i64, Vec<ResourceSlice>) {
        eventually(what, || async {
            let (generation, slices) = self.pool().await?;
            if want(&slices) {
                Ok((generation, slices))
            } else {
                Err(format!("generation {generation}: {:?}", taints(&slices).first()))
            }
        })
        .await
    }

    pub async fn annotate(&self, patch: Value) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let patch = json!({"metadata": patch});
        nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }

    /// Creates a claim that an allocator gave these (request, device), and returns its UID.
    pub async fn allocated_claim(&self, name: &str, devices: &[(&str, &str)], config: Value) -> String {
        let results = devices.iter().enumerate().map(|(index, (request, device))| {
            let mut result = json!({"request": request, "device": device});
            if device.ends_with("share") {
                result["shareID"] = json!(format!("0d5f5f9e-0b6c-4e0d-8a44-6c1d0d4f3f{index:02x}"));
                result["consumedCapacity"] = json!({"memory": "4Gi", "cores": "25", "slots": "1"});
            }
            result
        });
        self.allocated(name, results.collect(), config).await
    }

    /// Creates a claim with these results, and returns its UID.
    pub async fn allocated(&self, name: &str, mut results: Vec<Value>, config: Value) -> String {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), "ns");
        let requests: Vec<Value> = results
            .iter()
            .map(|result| {
                let mut exactly = json!({"deviceClassName": "c"});
                if result["device"].as_str().unwrap().ends_with("admin") {
                    exactly["adminAccess"] = json!(true);
                }
                json!({"name": result["request"], "exactly": exactly})
            })
            .collect();
        let claim = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "ns",
                "finalizers": ["resource.kubernetes.io/delete-protection"]},
            "spec": {"devices": {"requests": requests}},
        }))
        .unwrap();
        let claim = api.create(&PostParams::default(), &claim).await.unwrap();
        for result in &mut results {
            result["driver"] = json!(DRIVER);
            result["pool"] = json!(POOL);
        }
        let status = json!({"status": {"allocation": {
            "allocationTimestamp": "2026-01-02T03:04:05Z",
            "devices": {"results": results, "config": config},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields":
                [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]},
        }}});
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
        claim.metadata.uid.unwrap()
    }

    pub async fn kubelet(&self) -> v1::dra_plugin_client::DraPluginClient<Channel> {
        let path = self.dra_socket();
        let channel = eventually("the DRA socket", || dial(&path, "http://localhost")).await;
        v1::dra_plugin_client::DraPluginClient::new(channel)
    }

    pub async fn old_kubelet(&self) -> v1beta1::dra_plugin_client::DraPluginClient<Channel> {
        let path = self.dra_socket();
        let channel = eventually("the DRA socket", || dial(&path, "http://localhost")).await;
        v1beta1::dra_plugin_client::DraPluginClient::new(channel)
    }

    pub async fn prepare(&self, name: &str, uid: &str) -> Result<Vec<v1::Device>, String> {
        let mut answer = self
            .kubelet()
            .await
            .node_prepare_resources(v1::NodePrepareResourcesRequest { claims: vec![claim(name, uid)] })
            .await
            .unwrap()
            .into_inner();
        let answer = answer.claims.remove(uid).unwrap();
        if answer.error.is_empty() { Ok(answer.devices) } else { Err(answer.error) }
    }

    pub async fn unprepare(&self, name: &str, uid: &str) -> Result<(), String> {
        let mut answer = self
            .kubelet()
            .await
            .node_unprepare_resources(v1::NodeUnprepareResourcesRequest { claims: vec![claim(name, uid)] })
            .await
            .unwrap()
            .into_inner();
        let error = answer.claims.remove(uid).unwrap().error;
        if error.is_empty() { Ok(()) } else { Err(error) }
    }

    /// Registers as the kubelet does, by raw path.
    pub async fn registration(&self, socket: &Path) -> RegistrationClient<Channel> {
        let authority = socket.to_str().unwrap().replace('/', "%2F");
        let origin = format!("http://{authority}");
        RegistrationClient::new(eventually("the registration socket", || dial(socket, &origin)).await)
    }
}

/// Calls of the agent, not of the test.
pub fn of_agent(mut matcher: Matcher) -> Matcher {
    matcher.user_agent = Some("aliquot-kubelet-plugin".into());
    matcher
}

pub fn claim(name: &str, uid: &str) -> v1::Claim {
    v1::Claim { namespace: "ns".into(), name: name.into(), uid: uid.into() }
}

/// A channel over a unix socket, with this `:authority`.
pub async fn dial(path: &Path, origin: &str) -> Result<Channel, String> {
    let path = path.to_owned();
    Endpoint::from_shared(origin.to_owned())
        .map_err(|e| e.to_string())?
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .map_err(|e| format!("{e:?}"))
}

/// (device, taint key, taint value) of all devices.
pub fn taints(slices: &[ResourceSlice]) -> Vec<(String, String, String)> {
    slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .flat_map(|device| {
            device.taints.iter().flatten().map(|taint| {
                (device.name.clone(), taint.key.clone(), taint.value.clone().unwrap_or_default())
            })
        })
        .collect()
}

/// Names of all devices.
pub fn devices(slices: &[ResourceSlice]) -> Vec<String> {
    slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .map(|device| device.name.clone())
        .collect()
}

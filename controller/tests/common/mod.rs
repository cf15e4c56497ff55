//! A cluster in the process: the embedded control plane, nodes that publish, and controllers.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

pub use aliquot_allocator::fixtures;

use aliquot_api::v1alpha1;
use aliquot_control_plane::{Controllers, Handle, Options, PodDeletion, serve};
use aliquot_controller::args::Args;
use aliquot_controller::metrics::Metrics;
use aliquot_controller::watchdog::Pulse;
use aliquot_model::layout::AllocatorMode;
use clap::Parser;
use fixtures::DRIVER;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, CustomResourceExt, ResourceExt};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A control plane with a client.
pub struct Cluster {
    pub handle: Handle,
    pub client: Client,
}

/// A controller that runs, in a runtime of its own.
pub struct Running {
    pub metrics: Arc<Metrics>,
    pub pulse: Pulse,
    pub stop: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
    runtime: Option<Runtime>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Running {
    /// Ends it as SIGKILL would: every task of it stops where it is.
    pub fn kill(self) {}

    /// Ends it as SIGTERM would.
    pub async fn terminate(mut self) {
        self.stop.cancel();
        self.end().await.expect("an end in order");
    }

    /// Waits until it ends by itself.
    pub async fn end(&mut self) -> anyhow::Result<()> {
        (&mut self.task).await.expect("no panic")
    }

    /// Takes the only thread of its runtime until what is returned is dropped: all that it does on that runtime stands
    /// still, as behind a computation that does not end.
    pub fn block(&self) -> std::sync::mpsc::Sender<()> {
        let (hold, held) = std::sync::mpsc::channel();
        let runtime = self.runtime.as_ref().expect("a runtime");
        // It ends when the other side is dropped.
        runtime.spawn(async move {
            let _ = held.recv();
        });
        hold
    }
}

pub async fn client(handle: &Handle, user: &str) -> Client {
    Client::try_from(connection(handle, user).await).expect("a client")
}

/// How a user reaches the API.
pub async fn connection(handle: &Handle, user: &str) -> kube::Config {
    connection_of(&handle.kubeconfig(user)).await
}

async fn connection_of(kubeconfig: &str) -> kube::Config {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).expect("a kubeconfig");
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .expect("a configuration");
    config.default_retry = false;
    // Else each client reads all authorities of the machine, a fifth of the time of tests with many of them.
    config.root_cert.get_or_insert_default();
    config
}

impl Cluster {
    /// Defines a kind of this driver, as the chart does.
    pub async fn define<K: CustomResourceExt>(&self) {
        let definition: CustomResourceDefinition = fixtures::object(v1alpha1::definition::<K>());
        self.create_global(&definition).await;
    }

    /// A cluster with the chart's classes and without nodes.
    pub async fn start() -> Self {
        Self::start_with(Controllers::ALL).await
    }

    pub async fn start_with(controllers: Controllers) -> Self {
        Self::start_as(Options { controllers, pod_deletion: PodDeletion::Immediate, ..Options::default() })
            .await
    }

    pub async fn start_as(options: Options) -> Self {
        let handle = serve(options).await.expect("a control plane");
        let client = client(&handle, "admin").await;
        let cluster = Self { handle, client };
        for class in fixtures::classes() {
            cluster.create_global(&class).await;
        }
        cluster
    }

    pub async fn create_global<K>(&self, object: &K) -> K
    where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + serde::Serialize
            + serde::de::DeserializeOwned
            + std::fmt::Debug,
    {
        Api::<K>::all(self.client.clone()).create(&PostParams::default(), object).await.expect("created")
    }

    pub async fn create<K>(&self, object: &K) -> K
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + serde::Serialize
            + serde::de::DeserializeOwned
            + std::fmt::Debug,
    {
        let namespace = object.namespace().unwrap_or_else(|| "default".to_owned());
        let api = Api::<K>::namespaced(self.client.clone(), &namespace);
        reviewed(async || api.create(&PostParams::default(), object).await).await.expect("created")
    }

    /// Adds a node with so many H100s in controller mode.
    pub async fn add_node(&self, name: &str, gpus: u32) {
        self.add_node_in(name, gpus, AllocatorMode::Controller).await;
    }

    pub async fn add_node_in(&self, name: &str, gpus: u32, mode: AllocatorMode) {
        self.create_global::<Node>(&fixtures::node(name)).await;
        self.publish(name, gpus, mode, 1).await;
    }

    /// Publishes a node's devices anew, as its agent does.
    pub async fn publish(&self, name: &str, gpus: u32, mode: AllocatorMode, generation: i64) {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        for slice in fixtures::slices(name, gpus, mode, generation) {
            match api.get_opt(&slice.name_any()).await.expect("read") {
                Some(present) => {
                    let mut slice = slice;
                    slice.metadata.resource_version = present.metadata.resource_version;
                    api.replace(&slice.name_any(), &PostParams::default(), &slice).await.expect("replaced");
                }
                None => {
                    api.create(&PostParams::default(), &slice).await.expect("created");
                }
            }
        }
    }

    pub async fn claim(&self, name: &str, requests: &[Value]) -> ResourceClaim {
        self.create(&fixtures::claim(name, &fixtures::spec(requests))).await
    }

    pub async fn pod(&self, name: &str, claims: &[&str]) -> Pod {
        self.create(&fixtures::pod(name, claims)).await
    }

    pub async fn delete_pod(&self, name: &str) {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), "default");
        api.delete(name, &DeleteParams::default().grace_period(0)).await.expect("deleted");
    }

    pub async fn get_claim(&self, name: &str) -> ResourceClaim {
        Api::namespaced(self.client.clone(), "default").get(name).await.expect("a claim")
    }

    pub async fn get_pod(&self, name: &str) -> Option<Pod> {
        Api::namespaced(self.client.clone(), "default").get_opt(name).await.expect("readable")
    }

    /// Waits until a pod is bound; the node.
    pub async fn bound(&self, name: &str) -> String {
        eventually(&format!("pod {name} is bound"), async || {
            let pod = self.get_pod(name).await?;
            pod.spec?.node_name.filter(|node| !node.is_empty())
        })
        .await
    }

    /// The devices that a claim has.
    pub async fn devices(&self, claim: &str) -> Vec<String> {
        let claim = self.get_claim(claim).await;
        claim
            .status
            .and_then(|status| status.allocation)
            .and_then(|allocation| allocation.devices)
            .and_then(|devices| devices.results)
            .unwrap_or_default()
            .into_iter()
            .map(|result| format!("{}/{}", result.pool.rsplit('/').next().unwrap_or_default(), result.device))
            .collect()
    }

    /// Starts a controller under a user and identity of this name.
    pub async fn controller(&self, identity: &str, more: &[&str]) -> Running {
        self.controller_as(identity, identity, more).await
    }

    /// Starts a controller of which the API server knows the user. One of the same identity as another takes the lease
    /// over at once, as a container that is started anew in its pod.
    pub async fn controller_as(&self, user: &str, identity: &str, more: &[&str]) -> Running {
        let mut words = vec![
            "aliquot-controller",
            "--driver-name",
            DRIVER,
            "--namespace",
            "default",
            "--identity",
            identity,
            "--webhook-addr",
            "off",
        ];
        if !more.contains(&"--lease-duration") {
            words.extend(["--lease-duration", "3s"]);
        }
        words.extend_from_slice(more);
        let args = Args::parse_from(words);
        let metrics = Arc::new(Metrics::new());
        let stop = CancellationToken::new();
        let pulse = Pulse::default();
        let (task_metrics, task_pulse, task_stop) = (metrics.clone(), pulse.clone(), stop.clone());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let kubeconfig = self.handle.kubeconfig(user);
        let task = runtime.spawn(async move {
            let connection = connection_of(&kubeconfig).await;
            aliquot_controller::run::elect(connection, &args, task_metrics, task_pulse, task_stop).await
        });
        Running { metrics, pulse, stop, task, runtime: Some(runtime) }
    }

    /// Every claim that is allocated, as the API has it now.
    pub async fn all_classes(&self) -> Vec<DeviceClass> {
        Api::<DeviceClass>::all(self.client.clone()).list(&Default::default()).await.expect("listed").items
    }
}

/// Carries out a write that admission looks at. Where the webhook of a busy machine gave no answer in time, the write was
/// not carried out, and is tried again, as whoever makes objects in a cluster does.
pub async fn reviewed<T>(mut write: impl AsyncFnMut() -> kube::Result<T>) -> kube::Result<T> {
    let is_late = |message: &str| {
        message.contains("failed calling webhook")
            && ["context deadline exceeded", "operation was canceled"].iter().any(|why| message.contains(why))
    };
    for _ in 0..3 {
        match write().await {
            Err(kube::Error::Api(status)) if is_late(&status.message) => {
                eprintln!("tried again: {}", status.message);
            }
            answer => return answer,
        }
    }
    write().await
}

/// Waits until something holds; fails after a time that no machine should need.
pub async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(found) = check().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never happened: {what}");
}

/// Looks at every write that the control plane recorded and fails if two claims ever held the same
/// hardware at the same time. It knows claims and device names, and nothing of the controller.
pub mod auditor {
    use super::fixtures;
    use aliquot_control_plane::Handle;
    use aliquot_model::DeviceName;
    use aliquot_model::layout::Holding;
    use serde_json::Value;
    use std::collections::BTreeMap;

    /// A claim's holds: pool and device.
    pub type Held = Vec<(String, String)>;

    /// What a claim holds.
    pub fn held(claim: &Value) -> Held {
        claim["status"]["allocation"]["devices"]["results"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|result| result["adminAccess"] != true)
            .map(|result| {
                (
                    result["pool"].as_str().expect("a pool").to_owned(),
                    result["device"].as_str().expect("a device").to_owned(),
                )
            })
            .collect()
    }

    /// Whether two claims cannot hold these at a time.
    pub fn conflict(one: &(String, String), other: &(String, String)) -> bool {
        let name = |device: &str| DeviceName::parse(device).expect("a name of ours");
        let (a, b) = (name(&one.1), name(&other.1));
        if one.0 != other.0 || a.minor() != b.minor() {
            return false;
        }
        let info = fixtures::h100("any", a.minor());
        match (Holding::of(&a, &info), Holding::of(&b, &info)) {
            (Some(a), Some(b)) => a.conflicts(b),
            _ => false,
        }
    }

    /// How many allocations overlapped with another when they were written, all in all.
    pub fn overlaps(handle: &Handle) -> Vec<String> {
        let mut now: BTreeMap<(String, String), Held> = BTreeMap::new();
        let mut found = Vec::new();
        for entry in handle.audit(0) {
            if entry.origin.resource != "resourceclaims" {
                continue;
            }
            let key = (entry.namespace.clone(), entry.name.clone());
            now.remove(&key);
            let Some(after) = &entry.after else { continue };
            let holds = held(after);
            for (other, others) in &now {
                for one in &holds {
                    for two in others {
                        if conflict(one, two) {
                            found.push(format!("{key:?} {one:?} and {other:?} {two:?}"));
                        }
                    }
                }
            }
            if !holds.is_empty() {
                now.insert(key, holds);
            }
        }
        found
    }

    /// Fails on the first overlap.
    pub fn check(handle: &Handle) {
        assert_eq!(overlaps(handle), Vec::<String>::new());
    }

    /// How often a claim was given an allocation.
    pub fn allocations(handle: &Handle, claim: &str) -> usize {
        handle
            .audit(0)
            .iter()
            .filter(|entry| entry.origin.resource == "resourceclaims" && entry.name == claim)
            .filter(|entry| {
                let holds = |value: &Option<std::sync::Arc<Value>>| {
                    value.as_ref().is_some_and(|v| !held(v).is_empty())
                };
                !holds(&entry.before) && holds(&entry.after)
            })
            .count()
    }
}

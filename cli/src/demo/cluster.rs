//! The demo's cluster: simulated nodes, an embedded control plane, and the product's real programs on top.

use super::api;
use super::fleet::{Fleet, FleetNode};
use super::manifests::Document;
use super::picture::{GpuPicture, Part};
use super::processes::{Build, Process};
use super::report::NodeReport;
use aliquot_control_plane::Handle;
use aliquot_model::names::{self, DEFAULT_DRIVER};
use aliquot_model::{DeviceKind, DeviceName, Quantity};
use aliquot_sim_kubelet::Kubelet;
use anyhow::{Context, Result, bail};
use k8s_openapi::api::resource::v1::{Device, DeviceRequestAllocationResult, ResourceClaim, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, PostParams};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The time that programs get to start and to publish.
const START: Duration = Duration::from_secs(60);
/// The controller's user; the webhook does not review writes by this user.
const CONTROLLER: &str = "system:serviceaccount:aliquot-system:aliquot-controller";
/// The version under which the limiter's files are installed; it is the version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Everything that runs.
pub(crate) struct Cluster {
    pub(crate) client: kube::Client,
    _control_plane: Handle,
    controller: Process,
    /// The client for the page on which the controller shows whether it is ready.
    pages: kube::Client,
    nodes: Vec<DemoNode>,
    slices: Vec<ResourceSlice>,
}

/// A node and its agent.
pub(crate) struct DemoNode {
    pub(crate) name: String,
    pub(crate) dir: PathBuf,
    agent: Process,
    kubelet: Kubelet,
}

impl DemoNode {
    /// Returns the directory of the simulated hardware.
    pub(crate) fn hardware(&self) -> PathBuf {
        self.dir.join("sim")
    }

    /// Returns the directory in which the node agent writes CDI specs.
    pub(crate) fn cdi(&self) -> PathBuf {
        self.dir.join("cdi")
    }

    /// Returns the directory in which the node agent keeps its state.
    pub(crate) fn data(&self) -> PathBuf {
        self.dir.join("plugins").join(DEFAULT_DRIVER)
    }
}

impl Cluster {
    /// Starts everything and registers the node agents.
    pub(crate) async fn start(
        dir: &Path,
        fleet: &Fleet,
        build: &Build,
        installation: &[Document],
    ) -> Result<Self> {
        let logs = dir.join("logs");
        std::fs::create_dir_all(&logs)?;
        let limiter = install_limiter(dir, build)?;
        let (webhook, pages) = (free_address()?, free_address()?);
        let options = aliquot_control_plane::Options {
            namespaces: vec!["aliquot-system".to_owned()],
            services: BTreeMap::from([("aliquot-system/aliquot-webhook".to_owned(), webhook)]),
            ..aliquot_control_plane::Options::default()
        };
        let control_plane =
            aliquot_control_plane::serve(options).await.context("cannot start the control plane")?;
        let client = client(&control_plane)?;
        for document in installation {
            api::create(&client, document).await?;
        }
        let controller = Process::start(
            &build.file("aliquot-controller")?,
            "controller",
            &logs,
            &[
                &format!("--webhook-addr={webhook}"),
                &format!("--http-addr={pages}"),
                "--budgets=true",
                "--elastic-shares=true",
            ],
            &[
                (
                    "KUBECONFIG",
                    kubeconfig(&control_plane, &dir.join("controller.kubeconfig"), CONTROLLER)?.as_os_str(),
                ),
                ("POD_NAMESPACE", OsStr::new("aliquot-system")),
                ("POD_NAME", OsStr::new("controller-0")),
            ],
        )?;
        let mut nodes = Vec::new();
        for node in &fleet.nodes {
            create_node(&client, &node.name).await?;
            let path = dir.join(format!("{}.kubeconfig", node.name));
            let kubeconfig = kubeconfig(&control_plane, &path, &node.name)?;
            nodes.push(start_node(dir, node, build, &limiter, &kubeconfig, &logs).await?);
        }
        let pages = kube::Client::try_from(kube::Config::new(format!("http://{pages}").parse()?))?;
        Ok(Self { client, _control_plane: control_plane, controller, pages, nodes, slices: Vec::new() })
    }

    /// Waits until every node has published a complete pool and the controller reviews objects. Returns the
    /// number of devices of each node.
    pub(crate) async fn wait_for_devices(&mut self) -> Result<Vec<NodeReport>> {
        let started = Instant::now();
        loop {
            self.check()?;
            self.slices = api::slices(&self.client).await?;
            let counts: Vec<NodeReport> = self
                .nodes
                .iter()
                .map(|node| NodeReport {
                    name: node.name.clone(),
                    devices: complete_pool(&self.slices, &node.name),
                })
                .collect();
            let published = counts.iter().all(|node| node.devices > 0);
            if published && self.controller_is_ready().await {
                return Ok(counts);
            }
            if started.elapsed() > START {
                let what = if published {
                    "the controller was not ready"
                } else {
                    "not every node published its devices"
                };
                bail!("{what} within {} s: {counts:?}", START.as_secs());
            }
            tokio::time::sleep(super::LOOK).await;
        }
    }

    /// Returns true if the controller's webhook answers; without it, pods and claims would be accepted as
    /// they are.
    async fn controller_is_ready(&self) -> bool {
        let Ok(request) = http::Request::get("/readyz").body(kube::client::Body::empty()) else {
            return false;
        };
        self.pages.send(request).await.is_ok_and(|answer| answer.status().is_success())
    }

    /// Returns an error if a program of the product has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.controller.check()?;
        self.nodes.iter_mut().try_for_each(|node| node.agent.check())
    }

    pub(crate) fn nodes(&self) -> &[DemoNode] {
        &self.nodes
    }

    /// Returns the kubelet of a node.
    pub(crate) fn kubelet(&mut self, node: &str) -> Result<&mut Kubelet> {
        let found = self.nodes.iter_mut().find(|n| n.name == node);
        Ok(&mut found.with_context(|| format!("no node {node:?} in the fleet"))?.kubelet)
    }

    pub(crate) fn cdi_dir(&self, node: &str) -> Result<PathBuf> {
        let found = self.nodes.iter().find(|n| n.name == node);
        Ok(found.with_context(|| format!("no node {node:?} in the fleet"))?.cdi())
    }

    /// Returns the nodes of a claim's devices.
    pub(crate) fn nodes_of(&self, claim: &ResourceClaim) -> Vec<String> {
        let mut nodes: Vec<String> =
            results(claim).filter_map(|r| names::pool_node(&r.driver, &r.pool)).map(str::to_owned).collect();
        nodes.sort();
        nodes.dedup();
        nodes
    }

    /// Returns the devices that a claim, or one of its requests, was allocated, with the promised bytes of
    /// memory of each.
    pub(crate) fn promised(&self, claim: &ResourceClaim, request: Option<&str>) -> Vec<(String, u64)> {
        let asked = |r: &&DeviceRequestAllocationResult| match request {
            Some(request) => r.request.split('/').next() == Some(request),
            None => true,
        };
        results(claim).filter(asked).map(|r| (r.device.clone(), self.memory(r).unwrap_or(0))).collect()
    }

    /// Returns the memory of an allocation result in bytes: what it consumes of a shared device, otherwise
    /// all of the device.
    fn memory(&self, result: &DeviceRequestAllocationResult) -> Option<u64> {
        let consumed = result.consumed_capacity.as_ref().and_then(|c| c.get("memory")).map(|q| &q.0);
        let text = match consumed {
            Some(text) => text,
            None => &self.device(result)?.capacity.as_ref()?.get("memory")?.value.0,
        };
        text.parse::<Quantity>().ok()?.to_u64()
    }

    fn device(&self, result: &DeviceRequestAllocationResult) -> Option<&Device> {
        let of_pool = self.slices.iter().filter(|s| s.spec.pool.name == result.pool);
        of_pool.flat_map(|s| s.spec.devices.iter().flatten()).find(|d| d.name == result.device)
    }

    /// Returns what is held of each GPU, by node.
    pub(crate) async fn pictures(&self, claims: &[ResourceClaim]) -> Result<Vec<(String, Vec<GpuPicture>)>> {
        let mut pictures = Vec::new();
        for node in &self.nodes {
            let pool = names::pool_name(DEFAULT_DRIVER, &node.name);
            let mut gpus: BTreeMap<u32, GpuPicture> = BTreeMap::new();
            for device in self
                .slices
                .iter()
                .filter(|s| s.spec.pool.name == pool)
                .flat_map(|s| s.spec.devices.iter().flatten())
            {
                let Some(name) = DeviceName::parse(&device.name) else { continue };
                gpus.entry(name.minor()).or_insert_with(|| GpuPicture {
                    name: format!("gpu-{}", name.minor()),
                    board: text_attribute(device, "productName"),
                    parts: Vec::new(),
                });
            }
            for claim in claims {
                for result in results(claim).filter(|r| r.pool == pool) {
                    let Some(name) = DeviceName::parse(&result.device) else { continue };
                    if let Some(gpu) = gpus.get_mut(&name.minor()) {
                        let part = self.part(claim, result, &name, &gpu.parts);
                        gpu.parts.extend(part);
                    }
                }
            }
            for gpu in gpus.values_mut() {
                gpu.parts.sort_by(|a, b| a.start.total_cmp(&b.start));
            }
            pictures.push((node.name.clone(), gpus.into_values().collect()));
        }
        Ok(pictures)
    }

    /// Returns the part of its GPU that a result holds. Shares have no placement; they are drawn side by
    /// side.
    fn part(
        &self,
        claim: &ResourceClaim,
        result: &DeviceRequestAllocationResult,
        name: &DeviceName,
        beside: &[Part],
    ) -> Option<Part> {
        let holder = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
        let device = self.device(result)?;
        match name {
            DeviceName::Mig { minor, start, .. } | DeviceName::MigShare { minor, start, .. } => {
                let slices = |d: &Device| {
                    let capacity = d.capacity.as_ref();
                    capacity.map_or(0, |c| c.keys().filter(|k| k.starts_with("memorySlice")).count())
                };
                let of_gpu = |d: &&Device| DeviceName::parse(&d.name).is_some_and(|n| n.minor() == *minor);
                let of_pool = self.slices.iter().filter(|s| s.spec.pool.name == result.pool);
                let devices = || of_pool.clone().flat_map(|s| s.spec.devices.iter().flatten());
                let all = devices().filter(of_gpu).map(slices).max()?;
                // The size of the partition of a share is that of the partition's own device.
                let partition = result.device.trim_end_matches("-share");
                let partition = devices().find(|device| device.name == partition)?;
                let (size, all) = (slices(partition) as f64, all.max(1) as f64);
                let (start, width) = (f64::from(*start) / all, size / all);
                let label = text_attribute(device, "profile");
                if matches!(name, DeviceName::Mig { .. }) {
                    return Some(Part { start, share: width, label, holder });
                }
                let (memory, part) = self.share(result, device)?;
                let within = beside.iter().filter(|part| (start..start + width).contains(&part.start));
                let before: f64 = within.map(|part| part.share).sum();
                Some(Part {
                    start: start + before,
                    share: part * width,
                    label: format!("{label} {memory}"),
                    holder,
                })
            }
            DeviceName::Plain { kind: DeviceKind::Gpu | DeviceKind::Vfio, .. } => {
                Some(Part { start: 0.0, share: 1.0, label: "whole GPU".into(), holder })
            }
            DeviceName::Plain { .. } => {
                let (label, share) = self.share(result, device)?;
                let start = beside.iter().map(|part| part.share).sum();
                Some(Part { start, share, label, holder })
            }
        }
    }

    /// Returns a share as text, and its fraction of the device's memory.
    fn share(&self, result: &DeviceRequestAllocationResult, device: &Device) -> Option<(String, f64)> {
        let total: Quantity = device.capacity.as_ref()?.get("memory")?.value.0.parse().ok()?;
        let memory = self.memory(result)?;
        let cores = result.consumed_capacity.as_ref().and_then(|c| c.get("cores")).map(|q| q.0.as_str());
        let label = format!("{} {}%", Quantity::from_u64(memory), cores.unwrap_or("0"));
        Some((label, memory as f64 / total.to_u64()?.max(1) as f64))
    }

    /// Stops the programs of the product, agents first.
    pub(crate) async fn stop(self) -> Result<()> {
        for node in self.nodes {
            node.agent.stop().await?;
        }
        self.controller.stop().await
    }
}

/// Returns an address of this machine on which nobody listens.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no port is free")?;
    Ok(listener.local_addr()?)
}

fn client(control_plane: &Handle) -> Result<kube::Client> {
    let url = control_plane.url().parse().context("the control plane has no URL")?;
    kube::Client::try_from(kube::Config::new(url)).context("cannot connect to the control plane")
}

/// Writes a kubeconfig for a program of the product; the audit log shows the user's name.
fn kubeconfig(control_plane: &Handle, path: &Path, user: &str) -> Result<PathBuf> {
    control_plane.write_kubeconfig(path, user).context("cannot write a kubeconfig")?;
    Ok(path.to_owned())
}

/// Returns the results of a claim that are this driver's.
pub(crate) fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|s| s.allocation.as_ref());
    let results = allocation.and_then(|a| a.devices.as_ref()).and_then(|d| d.results.as_ref());
    results.into_iter().flatten().filter(|r| r.driver == DEFAULT_DRIVER)
}

fn text_attribute(device: &Device, name: &str) -> String {
    device.attributes.as_ref().and_then(|a| a.get(name)).and_then(|a| a.string.clone()).unwrap_or_default()
}

/// Returns the number of devices in a node's pool; 0 while slices are missing.
fn complete_pool(slices: &[ResourceSlice], node: &str) -> usize {
    let pool = names::pool_name(DEFAULT_DRIVER, node);
    let of_pool: Vec<&ResourceSlice> = slices.iter().filter(|s| s.spec.pool.name == pool).collect();
    let Some(generation) = of_pool.iter().map(|s| s.spec.pool.generation).max() else { return 0 };
    let newest: Vec<_> = of_pool.iter().filter(|s| s.spec.pool.generation == generation).collect();
    let wanted = newest.first().map_or(0, |s| s.spec.pool.resource_slice_count);
    if usize::try_from(wanted) != Ok(newest.len()) {
        return 0;
    }
    newest.iter().flat_map(|s| s.spec.devices.iter().flatten()).count()
}

async fn create_node(client: &kube::Client, name: &str) -> Result<()> {
    let resources =
        serde_json::json!({"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti"});
    let node = serde_json::from_value(serde_json::json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"capacity": resources, "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True"}]},
    }))?;
    Api::<k8s_openapi::api::core::v1::Node>::all(client.clone())
        .create(&PostParams::default(), &node)
        .await
        .with_context(|| format!("cannot create node {name}"))?;
    Ok(())
}

/// Installs the limiter's files as a DaemonSet's init container would.
fn install_limiter(dir: &Path, build: &Build) -> Result<PathBuf> {
    let limiter = dir.join("limiter");
    let version = limiter.join(VERSION);
    std::fs::create_dir_all(&version)?;
    for name in ["libaliquot_preload.so", "libaliquot_core.so"] {
        std::fs::copy(build.limiter_file(name)?, version.join(name))
            .with_context(|| format!("cannot install {name}"))?;
    }
    Ok(limiter)
}

async fn start_node(
    dir: &Path,
    node: &FleetNode,
    build: &Build,
    limiter: &Path,
    kubeconfig: &Path,
    logs: &Path,
) -> Result<DemoNode> {
    let own = dir.join(&node.name);
    let path = |name: &str| -> Result<PathBuf> {
        let path = own.join(name);
        std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(path)
    };
    let (registrar, plugins, cdi) = (path("registry")?, path("plugins")?, path("cdi")?);
    let sim = own.join("sim");
    let mut spec = node.spec();
    spec.nvml_library = Some(build.file("libnvidia_ml.so")?);
    spec.cuda_library = Some(build.file("libcuda.so")?);
    spec.nvidia_smi = Some(build.file("aliquot-sim")?);
    aliquot_sim_node::create(&sim, &spec).with_context(|| format!("cannot simulate node {}", node.name))?;
    let root = sim.join("root");
    let flag = |name: &str, value: &Path| format!("--{name}={}", value.display());
    let args = [
        format!("--node-name={}", node.name),
        flag("registrar-dir", &registrar),
        flag("plugin-dir", &plugins),
        flag("cdi-dir", &cdi),
        flag("driver-root", &root),
        flag("proc-root", &root.join("proc")),
        flag("sys-root", &root.join("sys")),
        flag("limiter-dir", limiter),
        // An unprivileged user may not mount.
        "--region-storage=directory".to_owned(),
        // The containers of such a user are not confined either.
        "--selinux-labels=never".to_owned(),
        "--mig-shares=true".to_owned(),
        "--report-usage=true".to_owned(),
        "--elastic-shares=true".to_owned(),
        flag("oci-hook", &build.limiter_file("aliquot-oci-hook")?),
        format!("--container-mount={}:/run/aliquot-sim:rw", sim.display()),
    ];
    let env = [
        ("KUBECONFIG", kubeconfig.as_os_str()),
        ("ALIQUOT_SIM_NODE", sim.as_os_str()),
        ("POD_NAMESPACE", OsStr::new("aliquot-system")),
    ];
    let program = build.file("aliquot-kubelet-plugin")?;
    let mut agent = Process::start(&program, &node.name, logs, &args, &env)?;
    let kubelet = Kubelet::register(&registrar, DEFAULT_DRIVER, START, || agent.check()).await?;
    Ok(DemoNode { name: node.name.clone(), dir: own, agent, kubelet })
}

//! The shipped binary on a simulated node, through the real NVML wrapper, killed with SIGKILL.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

mod away;
use crate::common;
mod gone;
mod mig_numbers;
mod renumber;
mod truth;
mod vfio;

use aliquot_kubelet_plugin::own_partitions;
use aliquot_proto::dra::v1;
use aliquot_proto::pluginregistration::v1::RegistrationStatus;
use aliquot_quota::measured::Measured;
use aliquot_sim_node::{NVML_LIBRARY, Node, NodeSpec, Pool, built_library};
use common::cluster::{Cluster, claim, devices, dial, eventually, page};
use common::{DRIVER, World};
use k8s_openapi::api::core::v1::Pod as KubePod;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::json;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// What the pod of a farewell finds: no service account, and an image without certificate authorities.
const NO_AUTHORITIES: [(&str, &str); 2] =
    [("SSL_CERT_FILE", "/nonexistent"), ("SSL_CERT_DIR", "/nonexistent")];

/// An agent process; killed when dropped.
struct Process(Child);

impl Process {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Sim {
    cluster: Cluster,
    node: Node,
}

impl Sim {
    async fn new(boards: &[&str]) -> Self {
        Self::new_with(boards, |_| {}).await
    }

    async fn new_with(boards: &[&str], change: impl FnOnce(&mut NodeSpec)) -> Self {
        let world = World::bare();
        let mut spec = NodeSpec::new(boards.iter().map(|board| board.trim_end_matches(":mig")));
        for (gpu, board) in spec.gpus.iter_mut().zip(boards) {
            gpu.mig = board.ends_with(":mig");
        }
        spec.nvml_library = Some(built_library(NVML_LIBRARY).expect("cargo builds it beside this test"));
        change(&mut spec);
        let node = aliquot_sim_node::create(world.dir.path(), &spec).unwrap();
        Self { cluster: Cluster::new(world).await, node }
    }

    fn start(&self, extra: &[&str]) -> Process {
        self.start_with(extra, &[])
    }

    fn start_with(&self, extra: &[&str], env: &[(&str, &str)]) -> Process {
        let dir = self.cluster.world.dir.path();
        let kubeconfig = dir.join("kubeconfig");
        self.cluster.plane.write_kubeconfig(&kubeconfig, "agent").unwrap();
        let sys = format!("--sys-root={}", dir.join("root/sys").display());
        let config = format!("--kubeconfig={}", kubeconfig.display());
        let all: Vec<&str> = [sys.as_str(), &config].into_iter().chain(extra.iter().copied()).collect();
        let line = self.cluster.command_line(&all);
        let quiet = std::env::var_os("RUST_LOG").is_none();
        let child = Command::new(env!("CARGO_BIN_EXE_aliquot-kubelet-plugin"))
            .args(&line[1..])
            .envs(env.iter().copied())
            .stderr(if quiet { Stdio::null() } else { Stdio::inherit() })
            .spawn()
            .unwrap();
        Process(child)
    }

    /// (GPU, start, size) of all GPU instances.
    fn instances(&self) -> Vec<(usize, u32, u32)> {
        let gpus = 0..self.node.gpus().len();
        gpus.flat_map(|gpu| self.node.gis(gpu).unwrap()).map(|gi| (gi.gpu, gi.start, gi.size)).collect()
    }

    /// One call; `None` when the agent was not there or died in the middle.
    async fn try_prepare(&self, name: &str, uid: &str) -> Option<Result<Vec<v1::Device>, String>> {
        let channel = dial(&self.cluster.dra_socket(), "http://localhost").await.ok()?;
        let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
        let request = v1::NodePrepareResourcesRequest { claims: vec![claim(name, uid)] };
        let mut answer = client.node_prepare_resources(request).await.ok()?.into_inner();
        let answer = answer.claims.remove(uid)?;
        Some(if answer.error.is_empty() { Ok(answer.devices) } else { Err(answer.error) })
    }

    async fn try_unprepare(&self, name: &str, uid: &str) -> Option<String> {
        let channel = dial(&self.cluster.dra_socket(), "http://localhost").await.ok()?;
        let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
        let request = v1::NodeUnprepareResourcesRequest { claims: vec![claim(name, uid)] };
        let mut answer = client.node_unprepare_resources(request).await.ok()?.into_inner();
        Some(answer.claims.remove(uid)?.error)
    }

    async fn prepared(&self, name: &str, uid: &str) -> Vec<v1::Device> {
        eventually("prepared", || async {
            match self.try_prepare(name, uid).await {
                Some(Ok(devices)) => Ok(devices),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }

    async fn unprepared(&self, name: &str, uid: &str) {
        eventually("unprepared", || async {
            match self.try_unprepare(name, uid).await {
                Some(error) if error.is_empty() => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }

    fn assert_clean(&self) {
        assert_eq!(self.instances(), []);
        assert_eq!(self.cluster.world.files(), Vec::<String>::new());
        assert!(self.cluster.world.ledger().claims.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_gets_the_numbers_of_the_driver_once_nvidia_uvm_is_loaded() {
    let sim = Sim::new_with(&["H100-80"], |spec| spec.late_uvm = true).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let _agent = sim.start(&[]);
    eventually("a refusal", || async {
        match sim.try_prepare("c", &uid).await {
            Some(Err(reason)) if reason.contains("nvidia-modprobe -c 0 -u") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    assert_eq!(sim.instances(), [], "nothing was made for it");
    sim.node.load_uvm().unwrap();
    sim.prepared("c", &uid).await;
    let spec = sim.cluster.world.node().machine.cdi.read(&format!("{DRIVER}-claim-{uid}")).unwrap().unwrap();
    let nodes = spec.devices.iter().flat_map(|device| &device.container_edits.device_nodes);
    let caps: Vec<(&str, Option<i64>)> = nodes
        .filter(|node| node.path.contains("nvidia-cap"))
        .map(|node| (node.path.as_str(), node.minor))
        .collect();
    let gi = sim.node.gis(0).unwrap()[0].id;
    let wanted =
        [aliquot_sim_node::gi_capability_minor(0, gi), aliquot_sim_node::ci_capability_minor(0, gi, 0)];
    assert_eq!(caps.len(), 2, "{caps:?}");
    for ((path, minor), wanted) in caps.into_iter().zip(wanted) {
        assert_eq!((path, minor), (&*format!("/dev/nvidia-caps/nvidia-cap{wanted}"), Some(wanted.into())));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn boards_are_published_as_nvml_tells() {
    let sim = Sim::new(&["H100-80", "A100-40:mig", "T4"]).await;
    let _agent = sim.start(&[]);
    let (_, slices) = sim.cluster.pool_where("published", |slices| !devices(slices).is_empty()).await;
    let names = devices(&slices);
    let of = |minor: u32| {
        let prefix = format!("gpu-{minor}-mig-");
        names.iter().filter(|name| name.starts_with(&prefix)).count()
    };
    assert_eq!((of(0), of(1), of(2)), (25, 25, 0));
    for (name, there) in [("gpu-0", true), ("gpu-0-share", true), ("gpu-1", false), ("gpu-2-share", true)] {
        assert_eq!(names.contains(&name.to_owned()), there, "{name}");
    }
}

/// SIGKILL at moments spread over prepare and unprepare; whatever it hits, the next process must bring
/// the node to the same state.
#[tokio::test(flavor = "multi_thread")]
async fn a_sigkill_at_any_moment_converges() {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let wanted = [("a", "gpu-0-mig-1g10gb-19-6"), ("b", "gpu-0-mig-3g40gb-9-0"), ("c", "gpu-1-share")];
    let uid = sim.cluster.allocated_claim("c", &wanted, json!([])).await;
    let mut agent = sim.start(&[]);
    let first = sim.prepared("c", &uid).await;
    assert_eq!(sim.instances().len(), 2);
    sim.unprepared("c", &uid).await;
    sim.assert_clean();
    let mut cut_off = 0;
    for round in 0..24u64 {
        let delay = Duration::from_micros(700 * round);
        let (answer, ()) = tokio::join!(sim.try_prepare("c", &uid), async {
            tokio::time::sleep(delay).await;
            agent.kill();
        });
        cut_off += u32::from(answer.is_none());
        agent = sim.start(&[]);
        assert_eq!(sim.prepared("c", &uid).await, first, "round {round}");
        assert_eq!(sim.instances().len(), 2, "round {round}");
        let (answer, ()) = tokio::join!(sim.try_unprepare("c", &uid), async {
            tokio::time::sleep(delay).await;
            agent.kill();
        });
        cut_off += u32::from(answer.is_none());
        agent = sim.start(&[]);
        sim.unprepared("c", &uid).await;
        sim.assert_clean();
    }
    assert!(cut_off > 0, "no kill hit a call");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reboot_loses_hardware_and_no_claim() {
    let sim = Sim::new(&["H100-80"]).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let mut agent = sim.start(&[]);
    let first = sim.prepared("c", &uid).await;
    agent.kill();
    aliquot_sim_node::reboot(sim.node.dir()).unwrap();
    std::fs::remove_dir_all(sim.cluster.world.cdi()).unwrap();
    assert_eq!(sim.instances(), []);
    let _agent = sim.start(&[]);
    assert_eq!(sim.prepared("c", &uid).await, first);
    assert_eq!(sim.instances(), [(0, 6, 1)]);
    let spec = sim.cluster.world.cdi().join(format!("{DRIVER}-claim-{uid}.json"));
    let spec: aliquot_cdi::Spec = serde_json::from_slice(&std::fs::read(spec).unwrap()).unwrap();
    let mounts: Vec<&str> =
        spec.devices[0].container_edits.mounts.iter().map(|m| m.container_path.as_str()).collect();
    assert!(mounts.contains(&"/usr/lib64/libnvidia-ml.so.1"), "{mounts:?}");
    sim.unprepared("c", &uid).await;
    sim.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_farewell_answers_for_what_is_prepared_and_ends_with_the_last_claim() {
    let sim = Sim::new(&["H100-80"]).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let other = sim.cluster.allocated_claim("other", &[("a", "gpu-0-mig-1g10gb-19-5")], json!([])).await;
    let mut agent = sim.start(&[]);
    let first = sim.prepared("c", &uid).await;
    agent.kill();
    let mut farewell = sim.start_with(&["--farewell"], &NO_AUTHORITIES);
    assert_eq!(sim.prepared("c", &uid).await, first);
    let refused = sim.try_prepare("other", &other).await.unwrap();
    assert!(refused.is_err(), "{refused:?}");
    assert!(farewell.0.try_wait().unwrap().is_none(), "it waits for the claim");
    sim.unprepared("c", &uid).await;
    let ended = eventually("its end", || {
        let ended = farewell.0.try_wait().unwrap();
        async move { ended.ok_or_else(|| "still there".to_owned()) }
    })
    .await;
    assert!(ended.success());
    let dir = sim.cluster.world.dir.path();
    assert!(!dir.join("plugins").join(DRIVER).exists(), "the agent's data");
    assert_eq!(std::fs::read_dir(dir.join("limiter")).unwrap().count(), 0, "what it installed");
    sim.assert_clean();
}

impl Sim {
    /// A pod of the claim `c`, bound to the node, in whose container this process seems to be: its UID.
    async fn pod_of_this_process(&self) -> String {
        let api: Api<KubePod> = Api::namespaced(self.cluster.client.clone(), "ns");
        let pod = json!({
            "metadata": {"name": "tenant", "namespace": "ns"},
            "spec": {
                "nodeName": "n1",
                "containers": [{"name": "main", "image": "i", "resources": {"claims": [{"name": "gpu"}]}}],
                "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}],
            },
        });
        let pod = api.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
        let uid = pod.metadata.uid.unwrap();
        let folder = self.cluster.world.dir.path().join("host-proc").join(std::process::id().to_string());
        std::fs::create_dir_all(&folder).unwrap();
        let id = "ab".repeat(32);
        std::fs::write(folder.join("cgroup"), format!("0::/kubepods/besteffort/pod{uid}/{id}\n")).unwrap();
        uid
    }

    /// An agent that audits often.
    fn start_auditing(&self, evict: bool) -> Process {
        let proc = format!("--host-proc={}", self.cluster.world.dir.path().join("host-proc").display());
        let evict = format!("--audit-evict={evict}");
        self.start(&["--audit-interval=50ms", "--audit-looks=4", &proc, &evict])
    }

    /// Reasons of the events on the pod.
    async fn events_on_pod(&self) -> Vec<(String, String)> {
        let api: Api<Event> = Api::namespaced(self.cluster.client.clone(), "ns");
        let events = api.list(&ListParams::default()).await.unwrap().items;
        let on_pod = events.into_iter().filter(|e| {
            e.regarding
                .as_ref()
                .is_some_and(|o| (o.kind.as_deref(), o.name.as_deref()) == (Some("Pod"), Some("tenant")))
        });
        on_pod.map(|e| (e.reason.unwrap_or_default(), e.note.unwrap_or_default())).collect()
    }

    async fn event_on_pod(&self, reason: &str) -> String {
        eventually(reason, || async {
            let events = self.events_on_pod().await;
            events
                .iter()
                .find(|(r, _)| r == reason)
                .map(|(_, note)| note.clone())
                .ok_or_else(|| format!("{events:?}"))
        })
        .await
    }

    /// Whether a process is counted with so much memory.
    fn counts(&self, bytes: u64) -> bool {
        self.node.processes(0).unwrap().iter().any(|process| process.bytes == bytes)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_share_that_takes_more_than_its_quota_past_the_limiter_is_reported_and_evicted() {
    let sim = Sim::new(&["H100-80"]).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0-share")], json!([])).await;
    let mut agent = sim.start_auditing(false);
    sim.prepared("c", &uid).await;
    let pod = sim.pod_of_this_process().await;
    // Within its 4 GiB it is never reported: the next event is the one that is due.
    let pool = Pool::whole(0);
    sim.node.context_opened(pool, None).unwrap();
    sim.node.charge(pool, 4 << 30).unwrap();
    assert!(sim.counts(4 << 30));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(sim.events_on_pod().await, []);
    sim.node.charge(pool, 4 << 30).unwrap();
    let note = sim.event_on_pod("ShareOverMemory").await;
    let pid = std::process::id();
    assert!(note.starts_with(&format!("processes {pid}")), "{note}");
    assert!(note.contains("use 8.00 GiB") && note.contains("claim ns/c grants 4.00 GiB"), "{note}");
    let pods: Api<KubePod> = Api::namespaced(sim.cluster.client.clone(), "ns");
    let there = pods.get("tenant").await.unwrap();
    assert!(there.metadata.deletion_timestamp.is_none(), "nobody is evicted unless it is asked for");
    agent.kill();
    let _agent = sim.start_auditing(true);
    eventually("eviction", || async {
        match pods.get_opt("tenant").await.unwrap() {
            Some(pod) if pod.metadata.deletion_timestamp.is_none() => Err("still there".to_owned()),
            other => {
                assert!(other.is_none_or(|other| other.metadata.uid.as_ref() == Some(&pod)));
                Ok(())
            }
        }
    })
    .await;
    sim.event_on_pod("EvictedOverShare").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_that_a_tenant_truncated_is_reported_and_nobody_is_evicted_for_it() {
    let sim = Sim::new(&["H100-80"]).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0-share")], json!([])).await;
    let _agent = sim.start_auditing(true);
    sim.prepared("c", &uid).await;
    sim.pod_of_this_process().await;
    sim.node.context_opened(Pool::whole(0), None).unwrap();
    let shares = sim.cluster.world.data().join("shares");
    let share = std::fs::read_dir(&shares).unwrap().next().unwrap().unwrap().path();
    std::fs::OpenOptions::new().write(true).open(share.join("region/region")).unwrap().set_len(9).unwrap();
    let note = sim.event_on_pod("ShareAccountDamaged").await;
    assert!(note.contains("claim ns/c") && note.contains("9 bytes"), "{note}");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let pods: Api<KubePod> = Api::namespaced(sim.cluster.client.clone(), "ns");
    assert!(pods.get("tenant").await.unwrap().metadata.deletion_timestamp.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_share_is_told_what_the_driver_counts_for_its_processes_and_nobody_elses() {
    let sim = Sim::new(&["H100-80"]).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0-share")], json!([])).await;
    let _agent = sim.start_auditing(false);
    sim.prepared("c", &uid).await;
    sim.pod_of_this_process().await;
    let pid = std::process::id();
    let (real, host) = (std::path::Path::new("/proc/self"), sim.cluster.world.dir.path().join("host-proc"));
    let folder = host.join(pid.to_string());
    for name in ["stat", "status"] {
        std::fs::copy(real.join(name), folder.join(name)).unwrap();
    }
    std::fs::create_dir(folder.join("ns")).unwrap();
    std::os::unix::fs::symlink(std::fs::read_link(real.join("ns/pid")).unwrap(), folder.join("ns/pid"))
        .unwrap();
    let pool = Pool::whole(0);
    sim.node.context_opened(pool, None).unwrap();
    sim.node.charge(pool, 3 << 30).unwrap();
    let shares = sim.cluster.world.data().join("shares");
    let path = std::fs::read_dir(&shares).unwrap().next().unwrap().unwrap().path().join("quota/measured");
    let told = || {
        let bytes = std::fs::read(&path).map_err(|error| error.to_string())?;
        let measured = Measured::decode(&bytes).ok_or("it is half written")?;
        assert!(measured.is_fresh(aliquot_arbiter::files::now_ns().unwrap()));
        Ok::<_, String>(measured.processes().collect::<Vec<_>>())
    };
    let seen = eventually("this process", || async {
        told().and_then(|all| all.first().copied().ok_or_else(|| "nobody".to_owned()))
    })
    .await;
    assert_eq!((seen.host_pid, seen.identity.pid, seen.bytes), (pid, pid, 3 << 30));
    assert_eq!(seen.counted_bytes, [u64::MAX; 2], "it has no account");
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    // As if it were of another pod.
    std::fs::write(folder.join("cgroup"), "0::/system.slice/other.service\n").unwrap();
    eventually("nobody", || async {
        told().and_then(|all| if all.is_empty() { Ok(()) } else { Err(format!("{all:?}")) })
    })
    .await;
}

/// `key=value:effect` of the taints of a device that are not about allocators.
async fn taints_of(sim: &Sim, device: &str) -> Option<Vec<String>> {
    let (_, slices) = sim.cluster.pool().await.ok()?;
    let mut devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let found = devices.find(|found| found.name == device)?;
    let taints = found.taints.iter().flatten().filter(|taint| !taint.key.ends_with("/controller-allocated"));
    let shown = taints.map(|taint| {
        let key = taint.key.rsplit('/').next().unwrap();
        format!("{key}={}:{}", taint.value.as_deref().unwrap_or_default(), taint.effect)
    });
    Some(shown.collect())
}

async fn tainted(sim: &Sim, device: &str, wanted: &[&str]) {
    eventually(&format!("{device} with taints {wanted:?}"), || async {
        match taints_of(sim, device).await {
            Some(taints) if taints == wanted => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

async fn noted(sim: &Sim, reason: &str, text: &str) {
    eventually(reason, || async {
        let api: Api<Event> = Api::all(sim.cluster.client.clone());
        let events = api.list(&ListParams::default()).await.unwrap().items;
        let notes: Vec<_> = events
            .into_iter()
            .filter(|event| event.reason.as_deref() == Some(reason))
            .map(|event| event.note)
            .collect();
        let told = notes.iter().flatten().any(|note| note.contains(text));
        if told { Ok(()) } else { Err(format!("{notes:?}")) }
    })
    .await;
}

/// The driver goes away under a running agent, with a partition in use, and comes back in another version.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_is_upgraded_under_the_agent_is_taken_up_without_a_restart() {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let partition = sim.cluster.allocated_claim("p", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let whole = sim.cluster.allocated_claim("w", &[("a", "gpu-1")], json!([])).await;
    let _agent = sim.start(&[]);
    sim.prepared("p", &partition).await;
    tainted(&sim, "gpu-1", &[]).await;
    assert_eq!(sim.instances().len(), 1);

    sim.node.unload_module(true).unwrap();
    tainted(&sim, "gpu-1", &["unmonitored=driver:NoSchedule"]).await;
    noted(&sim, "NvmlUnavailable", "load the nvidia kernel module").await;
    // What needs NVML is refused with the reason and what to do, and what is over can end.
    let refused = sim.try_prepare("w", &whole).await.unwrap().unwrap_err();
    assert!(
        refused.contains("DRIVER_NOT_LOADED") && refused.contains("load the nvidia kernel module"),
        "{refused}"
    );
    let marks = || own_partitions::all(&sim.cluster.world.data(), &sim.node.boot_id().unwrap());
    assert_eq!(marks().len(), 1);
    sim.unprepared("p", &partition).await;
    assert!(sim.cluster.world.ledger().claims.is_empty());
    // Whoever makes a partition there after the driver is back may get the same UUID.
    assert_eq!(marks().len(), 0);

    sim.node.load_module(Some("590.10.01")).unwrap();
    tainted(&sim, "gpu-1", &[]).await;
    noted(&sim, "NvmlAnswersAgain", "").await;
    noted(&sim, "GpuTaintGone", "unmonitored=driver").await;
    let version = |slices: &[ResourceSlice]| {
        let mut devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        let device = devices.find(|device| device.name == "gpu-1");
        device.and_then(|device| device.attributes.as_ref()?["driverVersion"].version.clone())
    };
    sim.cluster.pool_where("the new version", |slices| version(slices).as_deref() == Some("590.10.1")).await;
    // Specs name the files of the new driver and no other.
    sim.prepared("w", &whole).await;
    let specs: Vec<_> =
        std::fs::read_dir(sim.cluster.world.dir.path().join("cdi")).unwrap().flatten().collect();
    let spec = std::fs::read_to_string(specs[0].path()).unwrap();
    assert!(
        spec.contains("libnvidia-ml.so.590.10.01") && !spec.contains(&sim.node.spec().driver_version),
        "{spec}"
    );
    // Errors are listened for again.
    eventually("heard of", || async {
        sim.node.raise_xid(1, 62, None, None).unwrap();
        match taints_of(&sim, "gpu-1").await {
            Some(taints) if taints == ["xid=62:NoSchedule"] => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    sim.prepared("w", &whole).await;
    sim.unprepared("w", &whole).await;
    sim.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_starts_before_the_driver_is_loaded_serves_once_it_is() {
    let sim = Sim::new(&["T4"]).await;
    sim.node.unload_module(false).unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0")], json!([])).await;
    let mut agent = sim.start(&[&format!("--http-addr={free}")]);
    says(free, "/readyz", "NVML is not open yet").await;
    says(free, "/healthz", "DRIVER_NOT_LOADED").await;
    assert!(agent.0.try_wait().unwrap().is_none(), "it waits");
    sim.node.load_module(None).unwrap();
    sim.prepared("c", &uid).await;
    tainted(&sim, "gpu-0", &[]).await;
    eventually("nothing to say any more", || async {
        match page(free, "/healthz").await {
            Some((_, text)) if !text.contains("DRIVER_NOT_LOADED") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

/// Takes everything off the node's PCI bus; returns what puts it back.
fn empty_bus(sim: &Sim) -> impl FnOnce() {
    sim.node.unload_module(false).unwrap();
    let bus = sim.cluster.world.root().join("sys/bus/pci/devices");
    let away = bus.with_file_name("away");
    std::fs::rename(&bus, &away).unwrap();
    std::fs::create_dir(&bus).unwrap();
    move || {
        std::fs::remove_dir(&bus).unwrap();
        std::fs::rename(&away, &bus).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_finds_no_gpu_any_more_withdraws_what_was_published() {
    let sim = Sim::new(&["T4"]).await;
    let agent = sim.start(&[]);
    sim.cluster.pool_where("its devices", |slices| !slices.is_empty()).await;
    drop(agent);
    let back = empty_bus(&sim);
    let _agent = sim.start(&[]);
    eventually("nothing", || async {
        let slices = sim.cluster.slices().await;
        if slices.is_empty() { Ok(()) } else { Err(format!("{slices:?}")) }
    })
    .await;
    noted(&sim, "GpusWithdrawn", "no GPU of NVIDIA on its PCI bus").await;
    back();
    sim.node.load_module(None).unwrap();
    sim.cluster.pool_where("its devices again", |slices| !slices.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_on_a_node_without_a_gpu_is_ready_and_waits_for_one() {
    let sim = Sim::new(&["T4"]).await;
    let back = empty_bus(&sim);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let _agent = sim.start(&[&format!("--http-addr={free}")]);
    says(free, "/healthz", "no GPU of NVIDIA on its PCI bus").await;
    let socket = sim.cluster.registry().join(format!("reg@{DRIVER}.sock"));
    let done = RegistrationStatus { plugin_registered: true, error: String::new() };
    sim.cluster.registration(&socket).await.notify_registration_status(done).await.unwrap();
    ready(free).await;
    assert_eq!(sim.cluster.slices().await, []);
    // It comes, as one that was hot-plugged does.
    back();
    says(free, "/readyz", "NVML is not open yet").await;
    sim.node.load_module(None).unwrap();
    sim.cluster.pool_where("its devices", |slices| !slices.is_empty()).await;
    ready(free).await;
}

async fn ready(agent: std::net::SocketAddr) {
    eventually("readiness", || async {
        match page(agent, "/readyz").await {
            Some((200, _)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

async fn says(agent: std::net::SocketAddr, path: &str, wanted: &str) {
    eventually(wanted, || async {
        match page(agent, path).await {
            Some((_, text)) if text.contains(wanted) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

/// As the GPU operator upgrades a driver: it labels the Node, ends pods, unloads the module, loads another and takes
/// the label away.
#[tokio::test(flavor = "multi_thread")]
async fn the_driver_is_let_go_of_while_the_operator_asks_for_it_and_no_claim_is_prepared() {
    const LABEL: &str = "nvidia.com/gpu.deploy.dra-driver";
    let sim = Sim::new(&["H100-80"]).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0")], json!([])).await;
    let later = sim.cluster.allocated_claim("later", &[("a", "gpu-0")], json!([])).await;
    let _agent = sim.start(&[]);
    sim.prepared("c", &uid).await;
    tainted(&sim, "gpu-0-admin", &[]).await;

    sim.cluster.annotate(json!({"labels": {LABEL: "paused-for-driver-upgrade"}})).await;
    tainted(&sim, "gpu-0", &["driver-paused=:NoSchedule"]).await;
    assert_eq!(taints_of(&sim, "gpu-0-admin").await, None, "it opens the driver, too");
    noted(&sim, "DriverPaused", "when the claim that is prepared has ended").await;
    assert!(sim.node.unload_module(false).is_err(), "a claim is prepared");
    sim.unprepared("c", &uid).await;
    noted(&sim, "DriverLetGo", "label nvidia.com/gpu.deploy.dra-driver=paused-for-driver-upgrade").await;
    sim.node.unload_module(false).expect("the event says that it is free");
    let refused = sim.try_prepare("later", &later).await.unwrap().unwrap_err();
    assert!(refused.contains("to be unloaded, as its label nvidia.com/gpu.deploy.dra-driver="), "{refused}");

    // Loaded again, it is left alone until the label is gone.
    sim.node.load_module(Some("590.10.01")).unwrap();
    let refused = sim.try_prepare("later", &later).await.unwrap().unwrap_err();
    assert!(refused.contains("to be unloaded, as its label"), "{refused}");
    sim.node.unload_module(false).unwrap();
    sim.node.load_module(None).unwrap();
    sim.cluster.annotate(json!({"labels": {LABEL: "true"}})).await;
    tainted(&sim, "gpu-0", &[]).await;
    noted(&sim, "DriverResumed", "").await;
    sim.prepared("later", &later).await;
    sim.unprepared("later", &later).await;
    sim.assert_clean();
}

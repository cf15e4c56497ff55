//! The shipped binary on a simulated node with a GPU that does not answer.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_sim_node::{Fault, NVML_LIBRARY, Node, NodeSpec, built_library};
use common::World;
use common::cluster::{Cluster, devices, eventually};
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::ListParams;
use serde_json::json;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any test runs.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// An agent process on a node with two GPUs; killed when dropped.
struct Agent {
    cluster: Cluster,
    node: Node,
    http: SocketAddr,
    process: Child,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Agent {
    async fn start(extra: &[&str]) -> Self {
        let world = World::bare();
        let mut spec = NodeSpec::new(["H100-80", "H100-80"]);
        spec.nvml_library = Some(built_library(NVML_LIBRARY).expect("cargo builds it beside this test"));
        let node = aliquot_sim_node::create(world.dir.path(), &spec).unwrap();
        let cluster = Cluster::new(world).await;
        let dir = cluster.world.dir.path();
        let kubeconfig = dir.join("kubeconfig");
        cluster.plane.write_kubeconfig(&kubeconfig, "agent").unwrap();
        let http = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let own = [
            format!("--sys-root={}", dir.join("root/sys").display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--http-addr={http}"),
        ];
        let all: Vec<&str> = own.iter().map(String::as_str).chain(extra.iter().copied()).collect();
        let quiet = std::env::var_os("RUST_LOG").is_none();
        let process = Command::new(env!("CARGO_BIN_EXE_aliquot-kubelet-plugin"))
            .args(&cluster.command_line(&all)[1..])
            .stderr(if quiet { Stdio::null() } else { Stdio::inherit() })
            .spawn()
            .unwrap();
        let agent = Self { cluster, node, http, process };
        agent.cluster.pool_where("published", |slices| !devices(slices).is_empty()).await;
        agent
    }

    async fn share(&self, name: &str, gpu: usize) -> String {
        self.cluster.allocated_claim(name, &[("a", &format!("gpu-{gpu}-share"))], json!([])).await
    }

    async fn get(&self, path: &str) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(self.http).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    async fn says(&self, path: &str, what: &str) -> String {
        eventually(what, || async {
            let text = self.get(path).await;
            if text.contains(what) { Ok(text) } else { Err(text) }
        })
        .await
    }

    /// Notes of the events on our Node with a reason.
    async fn notes(&self, reason: &str) -> BTreeSet<String> {
        let api: Api<Event> = Api::all(self.cluster.client.clone());
        let events = api.list(&ListParams::default()).await.unwrap().items;
        let mine = events.into_iter().filter(|event| event.reason.as_deref() == Some(reason));
        mine.filter_map(|event| event.note).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_hangs_is_named_and_holds_up_nobody_else() {
    let mut agent = Agent::start(&["--gpu-read-timeout=1s"]).await;
    let held = agent.share("held", 1).await;
    agent.cluster.prepare("held", &held).await.unwrap();
    let uuid = agent.node.gpus()[1].uuid.clone();
    agent.node.add_fault(&Fault::delay("nvmlDeviceGetMinorNumber", FOR_EVER).on(1)).unwrap();
    agent.says("/metrics", &format!("dra_gpu_gpu_stuck{{gpu=\"{uuid}\"}} 1")).await;
    let health = agent.says("/healthz", &uuid).await;
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    assert!(health.contains("\"read the facts\" for "), "{health}");
    assert!(health.contains("drain the node and reboot it"), "{health}");
    let notes = agent.notes("GpuStuck").await;
    eventually("event", || async {
        let notes = agent.notes("GpuStuck").await;
        if notes.iter().any(|note| note.contains(&uuid)) { Ok(()) } else { Err(format!("{notes:?}")) }
    })
    .await;
    assert!(notes.iter().all(|note| !note.contains(&agent.node.gpus()[0].uuid)), "{notes:?}");
    // The other GPU goes on.
    let other = agent.share("other", 0).await;
    agent.cluster.prepare("other", &other).await.unwrap();
    agent.cluster.unprepare("other", &other).await.unwrap();
    let part = agent.cluster.allocated_claim("part", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    agent.cluster.prepare("part", &part).await.unwrap();
    agent.cluster.unprepare("part", &part).await.unwrap();
    // On the one that hangs: a share that is prepared is confirmed and given back, nothing new is prepared.
    agent.cluster.prepare("held", &held).await.unwrap();
    let new = agent.share("new", 1).await;
    let refused = agent.cluster.prepare("new", &new).await.unwrap_err();
    assert!(refused.contains(&uuid) && refused.contains("has not answered"), "{refused}");
    agent.cluster.unprepare("held", &held).await.unwrap();
    assert!(agent.cluster.world.ledger().claims.is_empty());

    let pid = nix::unistd::Pid::from_raw(i32::try_from(agent.process.id()).unwrap());
    let asked = Instant::now();
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    while agent.process.try_wait().unwrap().is_none() {
        // The promise is 10 s; the rest is for a busy machine.
        assert!(asked.elapsed() < Duration::from_secs(30), "SIGTERM does not end it");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_is_made_after_the_deadline_is_neither_lost_nor_made_twice() {
    let agent = Agent::start(&["--gpu-change-timeout=1s"]).await;
    let late = Fault::delay("nvmlDeviceCreateGpuInstanceWithPlacement", Duration::from_secs(6)).on(1);
    agent.node.add_fault(&Fault { times: 1, ..late }).unwrap();
    let uid = agent.cluster.allocated_claim("c", &[("a", "gpu-1-mig-1g10gb-19-6")], json!([])).await;
    let error = agent.cluster.prepare("c", &uid).await.unwrap_err();
    assert!(error.contains("has not answered within 1s"), "{error}");
    // The call is still under way: the GPU is left alone, the others are not.
    let other = agent.cluster.allocated_claim("o", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    agent.cluster.prepare("o", &other).await.unwrap();
    agent.cluster.unprepare("o", &other).await.unwrap();
    eventually("prepared", || agent.cluster.prepare("c", &uid)).await;
    assert_eq!(agent.node.gis(1).unwrap().len(), 1);
    agent.says("/metrics", "dra_gpu_gpu_stuck{gpu=\"").await;
    agent.cluster.unprepare("c", &uid).await.unwrap();
    assert_eq!(agent.node.gis(1).unwrap().len(), 0);
    assert!(agent.cluster.world.ledger().claims.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn four_errors_of_two_gpus_are_four_events_that_name_their_gpu() {
    let agent = Agent::start(&[]).await;
    let uuid = |gpu: usize| agent.node.gpus()[gpu].uuid.clone();
    let wanted: BTreeSet<String> = [(0, 48), (0, 63), (1, 48), (1, 95)]
        .into_iter()
        .map(|(gpu, xid)| format!("the driver reported xid-{xid} on GPU {}", uuid(gpu)))
        .collect();
    eventually("four events", || async {
        // Again and again: an error is heard of once somebody listens.
        for (gpu, xid) in [(0, 48), (0, 63), (1, 48), (1, 95)] {
            agent.node.raise_xid(gpu, xid, None, None).unwrap();
        }
        let notes = agent.notes("GpuError").await;
        let notes: BTreeSet<String> =
            notes.iter().filter_map(|note| note.split(". ").next()).map(str::to_owned).collect();
        if notes == wanted { Ok(()) } else { Err(format!("{notes:?}")) }
    })
    .await;
}

//! The shipped agent as a process on a simulated node.

use crate::common::World;
use crate::common::cluster::{Cluster, page};
use aliquot_proto::pluginregistration::v1::InfoRequest;
use aliquot_sim_node::{NVML_LIBRARY, NodeSpec, built_library};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A node of eight GPUs and an API server.
pub(crate) struct Bench {
    pub(crate) cluster: Cluster,
    program: OsString,
    line: Vec<String>,
    metrics: SocketAddr,
}

/// An agent process; killed when dropped.
pub(crate) struct Agent {
    child: Child,
    metrics: SocketAddr,
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Bench {
    pub(crate) async fn new(storage: &str) -> Self {
        let world = World::bare();
        let mut spec = NodeSpec::new(["H100-80"; 8]);
        spec.nvml_library = Some(built_library(NVML_LIBRARY).expect("cargo builds it beside this"));
        aliquot_sim_node::create(world.dir.path(), &spec).expect("a simulated node");
        let cluster = Cluster::new(world).await;
        let dir = cluster.world.dir.path();
        let kubeconfig = dir.join("kubeconfig");
        cluster.plane.write_kubeconfig(&kubeconfig, "agent").expect("written");
        // Free now, and nothing else here asks for one.
        let port = TcpListener::bind("127.0.0.1:0").expect("a port");
        let metrics = port.local_addr().expect("an address");
        let own = [
            format!("--sys-root={}", dir.join("root/sys").display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--region-storage={storage}"),
            "--slots=16".to_owned(),
            format!("--http-addr={metrics}"),
        ];
        let mut line = cluster.command_line(&own.each_ref().map(String::as_str));
        // Tests look more often than the shipped agent does.
        line.retain(|arg| !arg.starts_with("--claim-check") && !arg.starts_with("--inventory"));
        let built = env!("CARGO_BIN_EXE_aliquot-kubelet-plugin").into();
        Self { cluster, program: std::env::var_os("ALIQUOT_AGENT").unwrap_or(built), line, metrics }
    }

    fn spawn(&self) -> Agent {
        let child = Command::new(&self.program)
            .args(&self.line[1..])
            // As the chart has it.
            .env("MALLOC_ARENA_MAX", "1")
            .stderr(Stdio::null())
            .spawn()
            .expect("the agent");
        Agent { child, metrics: self.metrics }
    }

    /// Until a kubelet can ask for claims.
    async fn registered(&self) {
        let socket = self.cluster.registry().join(format!("reg@{}.sock", crate::common::DRIVER));
        let mut registration = self.cluster.registration(&socket).await;
        registration.get_info(InfoRequest {}).await.expect("an answer");
    }

    /// An agent that has published its devices.
    pub(crate) async fn start(&self) -> Agent {
        let agent = self.spawn();
        self.registered().await;
        self.cluster.pool_where("devices of all GPUs", |slices| slices.len() >= 8).await;
        agent
    }

    /// How long agents take from their start until they answer a kubelet, one after another.
    pub(crate) async fn starts(&self, count: usize) -> Vec<Duration> {
        let mut times = Vec::new();
        let socket = self.cluster.registry().join(format!("reg@{}.sock", crate::common::DRIVER));
        for _ in 0..count {
            // What a killed one left is no answer.
            let _ = std::fs::remove_file(&socket);
            let started = Instant::now();
            let agent = self.spawn();
            while !socket.exists() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            self.registered().await;
            times.push(started.elapsed());
            drop(agent);
        }
        times
    }
}

impl Agent {
    /// How long the driver took for all that was asked of it since the agent's start.
    pub(crate) async fn driver_time(&self) -> Duration {
        let (_, text) = page(self.metrics, "/metrics").await.expect("metrics");
        let sums = text.lines().filter(|line| line.starts_with("dra_gpu_driver_call_duration_seconds_sum{"));
        let seconds = sums.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Duration::from_secs_f64(seconds.sum())
    }

    /// Its resident memory.
    pub(crate) fn rss_mib(&self) -> f64 {
        resident_mib(self.child.id())
    }

    /// The part of it that no file has.
    pub(crate) fn rss_anon_mib(&self) -> f64 {
        memory_mib(self.child.id(), "RssAnon:")
    }

    /// How many files it has open, and how many threads it has.
    pub(crate) fn holds(&self) -> (usize, usize) {
        let count =
            |of: &str| std::fs::read_dir(format!("/proc/{}/{of}", self.child.id())).expect("it runs").count();
        (count("fd"), count("task"))
    }

    /// Processor time that it took, of the kernel for it too.
    pub(crate) fn cpu(&self) -> Duration {
        let pid = Pid::from_raw(self.child.id().try_into().expect("a process id"));
        let clock = clock_getcpuclockid(pid).expect("it runs");
        clock_gettime(clock).expect("a time").into()
    }
}

/// The resident memory of a process.
pub(crate) fn resident_mib(pid: u32) -> f64 {
    memory_mib(pid, "VmRSS:")
}

fn memory_mib(pid: u32, field: &str) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("it has memory");
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
    kib / 1024.0
}

//! The shipped agent as a process on a simulated node.

use crate::common::World;
use crate::common::cluster::Cluster;
use aliquot_proto::pluginregistration::v1::InfoRequest;
use aliquot_sim_node::{NVML_LIBRARY, NodeSpec, built_library};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A node of eight GPUs and an API server.
pub(crate) struct Bench {
    pub(crate) cluster: Cluster,
    program: OsString,
    line: Vec<String>,
}

/// An agent process; killed when dropped.
pub(crate) struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
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
        let own = [
            format!("--sys-root={}", dir.join("root/sys").display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--region-storage={storage}"),
            "--slots=16".to_owned(),
        ];
        let mut line = cluster.command_line(&own.each_ref().map(String::as_str));
        // Tests look more often than the shipped agent does.
        line.retain(|arg| !arg.starts_with("--claim-check") && !arg.starts_with("--inventory"));
        let built = env!("CARGO_BIN_EXE_aliquot-kubelet-plugin").into();
        Self { cluster, program: std::env::var_os("ALIQUOT_AGENT").unwrap_or(built), line }
    }

    fn spawn(&self) -> Agent {
        let child = Command::new(&self.program)
            .args(&self.line[1..])
            // As the chart has it.
            .env("MALLOC_ARENA_MAX", "1")
            .stderr(Stdio::null())
            .spawn()
            .expect("the agent");
        Agent(child)
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
    fn proc(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.0.id())).expect("it runs")
    }

    /// Its resident memory.
    pub(crate) fn rss_mib(&self) -> f64 {
        self.memory_mib("VmRSS:")
    }

    /// The part of it that no file has.
    pub(crate) fn rss_anon_mib(&self) -> f64 {
        self.memory_mib("RssAnon:")
    }

    fn memory_mib(&self, field: &str) -> f64 {
        let status = self.proc("status");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("it has memory");
        let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
        kib / 1024.0
    }

    /// How many files it has open, and how many threads it has.
    pub(crate) fn holds(&self) -> (usize, usize) {
        let count =
            |of: &str| std::fs::read_dir(format!("/proc/{}/{of}", self.0.id())).expect("it runs").count();
        (count("fd"), count("task"))
    }

    /// Processor time that it took, of the kernel for it too.
    pub(crate) fn cpu(&self) -> Duration {
        let pid = Pid::from_raw(self.0.id().try_into().expect("a process id"));
        let clock = clock_getcpuclockid(pid).expect("it runs");
        clock_gettime(clock).expect("a time").into()
    }
}

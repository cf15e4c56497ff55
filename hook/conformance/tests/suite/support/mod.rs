//! What the limiter's tests share: the built files, a simulated node, and shares on it as the node agent lays
//! them out.

pub(crate) mod arm;
pub(crate) mod c;
pub(crate) mod namespace;
pub(crate) mod old;
pub(crate) mod scribbler;
#[cfg(target_arch = "x86_64")]
pub(crate) mod traced;
pub(crate) mod variant;

use aliquot_quota::region::{RegionView, initial_header};
use aliquot_quota::{GpuUuid, QuotaFile, REGION_FILE_SIZE};
use aliquot_sim_node::{Node, NodeSpec, ProcessView};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use variant::Variant;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// The files under test and the simulated driver's libraries.
#[derive(Clone)]
pub(crate) struct Built {
    /// Folder of `libaliquot_preload.so` and `libaliquot_core.so`.
    pub(crate) limiter: PathBuf,
    /// Folder of `libcuda.so.1` and `libnvidia-ml.so.1`.
    pub(crate) driver: PathBuf,
    /// The test program.
    pub(crate) probe: PathBuf,
}

/// Cargo's folder of built files.
fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a target folder").to_owned()
}

fn cargo(arguments: &[&str]) {
    cargo_with(&[], arguments);
}

fn cargo_with(environment: &[(&str, &str)], arguments: &[&str]) {
    let status = Command::new(env!("CARGO"))
        .envs(environment.iter().copied())
        .args(arguments)
        .arg("--target-dir")
        .arg(target())
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap())
        .env_remove("LD_PRELOAD")
        .status();
    assert!(status.expect("cargo runs").success(), "cargo {arguments:?}");
}

/// A folder of the driver's libraries under the names that programs open.
fn installed(from: &Path, name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for (built, installed) in [("libcuda.so", "libcuda.so.1"), ("libnvidia_ml.so", "libnvidia-ml.so.1")] {
        let _ = std::os::unix::fs::symlink(from.join(built), folder.join(installed));
        assert!(folder.join(installed).exists(), "cargo has built {built}");
    }
    folder
}

/// Builds them once per test process. `ALIQUOT_HOOK_DIR` and `ALIQUOT_DRIVER_DIR` name folders of files that
/// are built already.
pub(crate) fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let target = target();
        let limiter = std::env::var_os("ALIQUOT_HOOK_DIR").map(PathBuf::from).unwrap_or_else(|| {
            cargo(&["build", "--quiet", "--profile", "hook", "-p", "aliquot-preload", "-p", "aliquot-core"]);
            target.join("hook")
        });
        let driver = std::env::var_os("ALIQUOT_DRIVER_DIR").map(PathBuf::from).unwrap_or_else(|| {
            // Built with the tests, as they depend on it; here under the names that programs open.
            installed(&target.join("debug/deps"), "limiter-driver-built")
        });
        // The whole workspace is named, so that its libraries are not built anew with other features.
        let all = ["--workspace", "--exclude", "aliquot-preload", "--exclude", "aliquot-core"];
        cargo(&[&["build", "--quiet", "--examples"], &all[..]].concat());
        let probe = target.join("debug/examples/cuda_probe");
        Built { limiter, driver, probe }
    })
}

/// Folder of a driver that does nothing, for what must not depend on what a simulated one needs.
pub(crate) fn null_driver() -> PathBuf {
    cargo(&["build", "--quiet", "-p", "aliquot-null-cuda"]);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("limiter-driver-null");
    std::fs::create_dir_all(&folder).unwrap();
    let _ = std::os::unix::fs::symlink(target().join("debug/libnullcuda.so"), folder.join("libcuda.so.1"));
    folder
}

/// A node with shares, and the folder that a process sees as `/run/aliquot`.
pub(crate) struct Bench {
    pub(crate) folder: TempDir,
    pub(crate) node: Node,
    driver: String,
}

/// Contexts that take nothing, and that nobody takes for large who cannot measure them: sums are round.
pub(crate) const NO_CONTEXTS: &str = "multiprocessors=0";

impl Bench {
    /// A node of these boards, otherwise as this run's variant has it.
    pub(crate) fn new<const N: usize>(boards: [&str; N]) -> Self {
        Self::of(Variant::of_this_run(), boards)
    }

    /// A node of these boards, with the partitions of a variant.
    fn of<const N: usize>(variant: &Variant, boards: [&str; N]) -> Self {
        let bench = Self::with(variant.node(boards));
        variant.partition(&bench.node);
        bench
    }

    /// A node of these boards that are not divided, whatever the variant: of MIG devices a process has only one.
    pub(crate) fn whole<const N: usize>(boards: [&str; N]) -> Self {
        Self::with(Variant::of_this_run().whole(boards))
    }

    /// A node of these boards that are divided, whatever the variant; its partitions are the test's to make.
    pub(crate) fn divided<const N: usize>(boards: [&str; N]) -> Self {
        Self::with(Variant::of_this_run().divided(boards))
    }

    /// A node as specified, for what depends on how NVML names processes or when memory is released.
    pub(crate) fn with(spec: NodeSpec) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let node = aliquot_sim_node::create(&folder.path().join("node"), &spec).expect("a node");
        let settings = Variant::of_this_run().driver.replace(',', "\n");
        std::fs::write(folder.path().join("node/cuda.conf"), settings).unwrap();
        for part in ["quota", "region"] {
            std::fs::create_dir_all(folder.path().join("aliquot").join(part)).unwrap();
        }
        let bench = Self { folder, node, driver: NO_CONTEXTS.to_owned() };
        bench.copy_limiter(&built().limiter, &bench.root(), "limiter");
        bench
    }

    /// A copy of the shipped limiter that takes `root` for the folder that a container has as `/run/aliquot`; its stub.
    pub(crate) fn copy_limiter(&self, from: &Path, root: &Path, name: &str) -> PathBuf {
        aliquot_sim_node::limiter_at(root, from, &self.folder.path().join(name)).expect("a copy")
    }

    /// The stub of the limiter's copy for this bench.
    pub(crate) fn stub(&self) -> PathBuf {
        self.folder.path().join("limiter/libaliquot_preload.so")
    }

    /// A node of these boards whose NVML lists processes and their memory by pids that they know, for what only that
    /// shows.
    pub(crate) fn shown<const N: usize>(boards: [&str; N]) -> Self {
        Self::viewed(ProcessView::Host, boards)
    }

    /// A node of these boards whose NVML lists processes like this; otherwise plain, but divided where this run's are.
    pub(crate) fn viewed<const N: usize>(view: ProcessView, boards: [&str; N]) -> Self {
        Self::of(&Variant::of_this_run().viewed(view), boards)
    }

    /// The same with other settings of the driver.
    pub(crate) fn driver(mut self, settings: &str) -> Self {
        settings.clone_into(&mut self.driver);
        self
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("aliquot")
    }

    /// UUID of a GPU or, where it is divided, of its first MIG device.
    pub(crate) fn device_uuid(&self, gpu: usize) -> String {
        let first = self.node.mig_devices(gpu).ok().and_then(|devices| devices.into_iter().next());
        first.map_or_else(|| self.node.gpus()[gpu].uuid.clone(), |device| device.uuid)
    }

    /// Lays a share of `gpu` out.
    pub(crate) fn share(&self, id: &str, gpu: usize, memory: u64) {
        self.share_of(id, &self.device_uuid(gpu), gpu as u16, memory);
    }

    /// Lays a share out of the device with this UUID, the claim's `order`-th.
    pub(crate) fn share_of(&self, id: &str, uuid: &str, order: u16, memory: u64) {
        let uuid = GpuUuid::new(uuid).unwrap();
        self.write_quota(
            id,
            &QuotaFile { memory_bytes: memory, device_order: order, ..QuotaFile::new(uuid) },
        );
        let folder = self.root().join("region").join(id);
        std::fs::create_dir_all(&folder).unwrap();
        let mut bytes = vec![0; REGION_FILE_SIZE];
        let header = initial_header();
        bytes[..header.len()].copy_from_slice(&header);
        std::fs::write(folder.join("region"), bytes).unwrap();
        std::fs::set_permissions(folder.join("region"), PermissionsExt::from_mode(0o666)).unwrap();
    }

    /// Replaces a quota as the agent does.
    pub(crate) fn write_quota(&self, id: &str, quota: &QuotaFile) {
        self.write_quota_bytes(id, &quota.encode());
    }

    pub(crate) fn write_quota_bytes(&self, id: &str, bytes: &[u8]) {
        let folder = self.root().join("quota").join(id);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("new"), bytes).unwrap();
        std::fs::rename(folder.join("new"), folder.join("quota")).unwrap();
    }

    pub(crate) fn quota(&self, id: &str) -> QuotaFile {
        QuotaFile::decode(&std::fs::read(self.root().join("quota").join(id).join("quota")).unwrap()).unwrap()
    }

    pub(crate) fn region_path(&self, id: &str) -> PathBuf {
        self.root().join("region").join(id).join("region")
    }

    /// Bytes charged to a share, and what its slots add up to.
    pub(crate) fn charged(&self, id: &str) -> (u64, u64) {
        let bytes = std::fs::read(self.region_path(id)).unwrap();
        let view = RegionView::parse(&bytes).unwrap();
        (view.total_bytes(), view.processes().map(|process| process.charged_bytes).sum())
    }

    pub(crate) fn audit(&self, id: &str) -> u64 {
        RegionView::parse(&std::fs::read(self.region_path(id)).unwrap()).unwrap().audit()
    }

    /// Bytes that all processes hold on a GPU by the node's own account.
    pub(crate) fn used(&self, gpu: usize) -> u64 {
        self.node.memory(aliquot_sim_node::Pool::whole(gpu)).unwrap().used
    }

    /// Waits until all processes hold so much: the driver may free later what a dead one had.
    pub(crate) fn await_used(&self, gpu: usize, bytes: u64, what: &str) {
        let started = Instant::now();
        while self.used(gpu) != bytes {
            assert!(started.elapsed().as_secs() < 20, "{what}: {} bytes instead of {bytes}", self.used(gpu));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A program under the limiter.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = self.unlimited(program);
        command.env("LD_PRELOAD", self.stub());
        command
    }

    /// The same program without it.
    pub(crate) fn unlimited(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let node = self.folder.path().join("node");
        command
            .env_clear()
            .env("LD_LIBRARY_PATH", &built().driver)
            .env("ALIQUOT_SIM_ROOT", node.join("root"))
            .env("ALIQUOT_SIM_NODE", node)
            .env("ALIQUOT_SIM_CUDA", &self.driver);
        command
    }

    pub(crate) fn probe(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(&built().probe);
        command.args(arguments);
        command
    }

    /// Runs the test program to its end; the answers in order.
    pub(crate) fn run(&self, arguments: &[&str]) -> Vec<String> {
        answers(self.probe(arguments))
    }

    /// Starts the test program and waits until it has come to `hold`.
    pub(crate) fn hold(&self, arguments: &[&str]) -> Holder {
        Holder::start(self.probe(arguments).arg("hold"))
    }
}

/// Milliseconds of the monotonic clock.
pub(crate) fn now_ms() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
    now.tv_sec() as u64 * 1000 + now.tv_nsec() as u64 / 1_000_000
}

/// Runs a program that must succeed; what stands behind `=` on each line.
pub(crate) fn answers(mut command: Command) -> Vec<String> {
    let output = command.output().expect("runs");
    assert!(output.status.success(), "{command:?}: {output:?}");
    values(&output)
}

/// What stands behind `=` on each line.
pub(crate) fn values(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter_map(|line| line.split_once(" = ")).map(|(_, value)| value.to_owned()).collect()
}

/// Processes that do not outlive their test, also where it fails.
pub(crate) struct Storm(pub(crate) Vec<Child>);

impl Drop for Storm {
    fn drop(&mut self) {
        for child in &mut self.0 {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// A program that waits to be told to go on.
pub(crate) struct Holder {
    pub(crate) child: Child,
    stdin: Option<ChildStdin>,
    /// What it answered before holding.
    pub(crate) before: Vec<String>,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Holder {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::start_watched(command, drop)
    }

    /// The same, where `watch` gets its pid, and what that returns lives until it holds.
    pub(crate) fn start_watched<T>(command: &mut Command, watch: impl FnOnce(u32) -> T) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts");
        let _watch = watch(child.id());
        let stdin = child.stdin.take();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut before = Vec::new();
        loop {
            let mut line = String::new();
            assert!(stdout.read_line(&mut line).unwrap() > 0, "the program ended before it held: {before:?}");
            match line.trim_end().split_once(" = ") {
                Some((_, value)) => before.push(value.to_owned()),
                None if line == "hold\n" => break,
                None => {}
            }
        }
        Self { child, stdin, before, stdout }
    }

    /// Lets it go on to its end; the answers from then on, without the one to `hold`.
    pub(crate) fn finish(mut self) -> Vec<String> {
        let _ = self.stdin.take().unwrap().write_all(b"\n");
        let mut after = Vec::new();
        let mut line = String::new();
        while self.stdout.read_line(&mut line).unwrap() > 0 {
            if let Some((_, value)) = line.trim_end().split_once(" = ") {
                after.push(value.to_owned());
            }
            line.clear();
        }
        assert!(self.child.wait().unwrap().success());
        after.remove(0);
        after
    }

    /// Lets it go on to its next `hold`.
    pub(crate) fn step(&mut self) {
        self.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        let mut line = String::new();
        while line != "hold\n" {
            line.clear();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "the program ended before it held");
        }
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

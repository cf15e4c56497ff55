//! The stage `node`: the node agent on this machine's NVML, its CDI specs applied by a runtime, a CUDA program in the
//! container, and each assumption of the simulator beside what the machine says.
//!
//! Nothing of the GPUs is changed, unless `--change-mig` allows a partition to be made and undone.

mod agent;
mod boards;
pub(crate) mod containers;
mod files;
mod groups;
mod hardware;
mod kernel;
pub(crate) mod line;
mod partitions;
mod trials;

use crate::driver::Board;
use agent::Agent;
use aliquot_kubelet_plugin::driver::{Roots, find_library};
use aliquot_model::{DeviceName, GpuInfo, GpuUuid};
use aliquot_nvml::{ComputeMode, Gpus, Inventory, MigMode, NvmlGpus, Options};
use anyhow::{Context, Result};
pub(crate) use containers::Choice;
use containers::Containers;
use line::{Line, Promise};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Where things are on this machine.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Setting {
    /// Folder of libaliquot_preload.so, libaliquot_core.so and aliquot-oci-hook.
    #[arg(long)]
    pub(crate) hook: PathBuf,
    /// Folder of aliquot-kubelet-plugin and cuda-probe. Default: that of this program.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Root of the file system that holds the NVIDIA driver.
    #[arg(long, default_value = "/")]
    pub(crate) driver_root: PathBuf,
    /// Where `/proc` is.
    #[arg(long, default_value = "/proc")]
    pub(crate) proc_root: PathBuf,
    /// Where `/sys` is.
    #[arg(long, default_value = "/sys")]
    sys_root: PathBuf,
    /// A further argument of the node agent; repeatable.
    #[arg(long = "agent-arg", value_name = "ARGUMENT", allow_hyphen_values = true)]
    agent_args: Vec<String>,
    /// What containers are started with.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    runtime: Choice,
    /// Allow that a partition is made on a GPU without processes, and undone. Else MIG is only read.
    #[arg(long)]
    change_mig: bool,
}

impl Setting {
    /// A program that was carried here, or built.
    pub(crate) fn program(&self, name: &str) -> Result<PathBuf> {
        let own = std::env::current_exe()?;
        let beside = own.parent().context("this program has no folder")?;
        let path = self.programs.as_deref().unwrap_or(beside).join(name);
        path.canonicalize().with_context(|| format!("{}: build it, or carry it along", path.display()))
    }

    /// Where the driver is.
    pub(crate) fn roots(&self) -> Roots {
        Roots {
            driver: self.driver_root.clone(),
            host: self.driver_root.clone(),
            proc: self.proc_root.clone(),
        }
    }

    fn nvml(&self) -> Result<NvmlGpus> {
        let library = find_library(&self.driver_root, "libnvidia-ml.so.1");
        let library = library.with_context(|| {
            format!("no libnvidia-ml.so.1 under {}: is the driver installed?", self.driver_root.display())
        })?;
        Ok(NvmlGpus::open(Options { library, sys_root: self.sys_root.clone(), nvidia_smi: None })?)
    }
}

/// What the stage found.
#[derive(Debug, Serialize)]
pub(crate) struct Section {
    /// What containers were started with.
    pub(crate) runtime: String,
    /// What the agent published, by GPU.
    published: Vec<Value>,
    pub(crate) assumptions: Vec<Line>,
    pub(crate) promises: Vec<Promise>,
}

impl Section {
    fn promise(&mut self, promise: Promise) {
        say!("{promise}");
        self.promises.push(promise);
    }
}

/// What of a GPU must be after the stage as it was before.
#[derive(Debug, Clone, PartialEq, Eq)]
struct State {
    mode: Option<MigMode>,
    partitions: usize,
    compute: Option<ComputeMode>,
}

fn states(gpus: &NvmlGpus, inventory: &Inventory) -> BTreeMap<GpuUuid, State> {
    let of = |gpu: &GpuInfo| State {
        mode: gpus.mig_mode(&gpu.uuid).ok(),
        partitions: gpus.live_migs(&gpu.uuid).map_or(0, |all| all.len()),
        compute: gpus.compute_mode(&gpu.uuid).ok(),
    };
    inventory.gpus.iter().map(|gpu| (gpu.uuid.clone(), of(gpu))).collect()
}

/// Runs the stage, and prints a line for each thing that it finds.
pub(crate) fn run(setting: &Setting, folder: &Path) -> Section {
    let mut section = Section {
        runtime: String::new(),
        published: Vec::new(),
        assumptions: Vec::new(),
        promises: Vec::new(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let done = runtime
        .context("no threads")
        .and_then(|runtime| runtime.block_on(all(setting, folder, &mut section)));
    if let Err(error) = done {
        section.promise(Promise::of("the stage runs to its end", false, format!("{error:#}"), Value::Null));
    }
    for line in &section.assumptions {
        say!("{line}");
    }
    section
}

/// What the stage writes, in the folder of the run.
fn room(folder: &Path) -> PathBuf {
    folder.join("node")
}

/// Where the stage keeps its containers.
pub(crate) fn containers_in(folder: &Path) -> PathBuf {
    room(folder).join("containers")
}

/// Undoes what a stage left that did not run to its end.
pub(crate) fn undo(setting: &Setting, folder: &Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(agent::undo(setting, &room(folder)))
}

async fn all(setting: &Setting, folder: &Path, section: &mut Section) -> Result<()> {
    let gpus = setting.nvml()?;
    let inventory = gpus.inventory()?;
    section.assumptions.extend(read_only(setting, &gpus, &inventory));
    let before = states(&gpus, &inventory);
    let mut agent = Agent::start(setting, &room(folder)).await?;
    let devices = agent.published().await?;
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    section.published = inventory.gpus.iter().map(|gpu| published(gpu, &names)).collect();
    section.promise(every_gpu(&inventory, &names));
    let probe = setting.program("cuda-probe");
    let containers = probe.and_then(|probe| Containers::new(&containers_in(folder), &probe, setting.runtime));
    if let Ok(containers) = &containers {
        for other in &containers.others {
            say!("          not used: {other}");
        }
        containers.name().clone_into(&mut section.runtime);
    }
    let containers = containers.as_ref().map_err(|error| format!("{error:#}"));
    let trials = trials::Trials { setting, gpus: &gpus, inventory: &inventory, containers };
    trials.all(&mut agent, &names, section).await;
    let left = agent.files();
    section.promise(Promise::of(
        "nothing is left of claims",
        left.is_empty(),
        format!("left: {}", left.join(", ")),
        Value::Null,
    ));
    let stopped = agent.stop().await;
    let reason = stopped.as_ref().err().map(|error| format!("{error:#}")).unwrap_or_default();
    section.promise(Promise::of("the agent ends when it is told to", stopped.is_ok(), reason, Value::Null));
    let after = states(&gpus, &inventory);
    let reason = format!("before {before:?}, after {after:?}");
    section.promise(Promise::of(
        "MIG modes, partitions and compute modes are as they were",
        before == after,
        reason,
        Value::Null,
    ));
    Ok(())
}

/// What can be compared without doing anything.
fn read_only(setting: &Setting, gpus: &NvmlGpus, inventory: &Inventory) -> Vec<Line> {
    let mut lines = Vec::new();
    let raw = Board::all(&setting.driver_root).map_err(|error| format!("{error:#}"));
    for gpu in &inventory.gpus {
        lines.extend(boards::lines(gpu, gpus.memory(&gpu.uuid).ok()));
        lines.push(events(gpus, gpu));
        lines.extend(match hardware::board(&raw, gpu) {
            Ok(board) => hardware::lines(gpu, board),
            Err(reason) => vec![hardware::untold(gpu, reason)],
        });
    }
    lines.extend(inventory.unreadable.iter().map(|gpu| {
        Line::unknown(&format!("GPU of index {}", gpu.index), "it can be read", "yes", gpu.error.to_string())
    }));
    lines.extend(kernel::lines(&setting.proc_root, &inventory.driver.driver_version, &inventory.gpus));
    lines.extend(files::lines(&setting.roots()));
    lines
}

/// Whether errors of a GPU can be listened to.
fn events(gpus: &NvmlGpus, gpu: &GpuInfo) -> Line {
    let (of, what) = (boards::name(gpu), "NVML tells of errors as they happen");
    match gpus.watch(std::slice::from_ref(&gpu.uuid)) {
        Ok(source) => {
            let refused = source.unmonitored().iter().map(|(_, error)| error.to_string());
            let refused: Vec<String> = refused.collect();
            let machine =
                if refused.is_empty() { "yes".to_owned() } else { format!("no: {}", refused.join(", ")) };
            Line::compare(&of, what, "yes", machine)
        }
        Err(error) => Line::compare(&of, what, "yes", format!("no: {error}")),
    }
}

/// What a GPU has published.
fn published(gpu: &GpuInfo, devices: &[&str]) -> Value {
    let own = of_gpu(gpu, devices);
    let profiles: Vec<&str> = gpu.profiles().iter().map(|profile| profile.name.as_str()).collect();
    say!(
        "{}: {} MiB for programs, {} devices published, {} MIG profiles: {}",
        boards::name(gpu),
        gpu.memory_bytes >> 20,
        own.len(),
        profiles.len(),
        profiles.join(", "),
    );
    json!({
        "gpu": gpu.minor, "uuid": gpu.uuid, "board": gpu.product_name, "memory_bytes": gpu.memory_bytes,
        "driver": gpu.driver_version, "devices": own, "profiles": profiles,
    })
}

/// The devices of a GPU.
fn of_gpu<'a>(gpu: &GpuInfo, devices: &[&'a str]) -> Vec<&'a str> {
    let own = |name: &&str| DeviceName::parse(name).is_some_and(|name| name.minor() == gpu.minor);
    devices.iter().copied().filter(own).collect()
}

fn every_gpu(inventory: &Inventory, devices: &[&str]) -> Promise {
    let missing: Vec<String> = inventory
        .gpus
        .iter()
        .filter(|gpu| of_gpu(gpu, devices).is_empty())
        .map(|gpu| format!("GPU {}", gpu.minor))
        .collect();
    let held = missing.is_empty() && !inventory.gpus.is_empty();
    let reason = format!("of {} GPUs, without devices: {}", inventory.gpus.len(), missing.join(", "));
    Promise::of("the agent publishes devices of every GPU", held, reason, json!(devices.len()))
}

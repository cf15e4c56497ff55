//! Claims that are prepared, applied and used: a whole GPU, a share and, where that is allowed, a partition.

use super::agent::Agent;
use super::containers::{Containers, PROBE};
use super::line::{Line, Promise};
use super::partitions::{self, Made};
use super::{Section, Setting, boards, files, of_gpu};
use crate::life::said;
use aliquot_cdi::ContainerEdits;
use aliquot_model::{DeviceName, GpuInfo, MigCapability};
use aliquot_nvml::{Gpus, Inventory, NvmlGpus};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
/// What the program takes of a whole GPU: enough to be seen, and nobody's way is in.
const TAKEN: u64 = 256 * MIB;
/// Memory of the share.
const QUOTA: u64 = 4096 * MIB;

/// What cuda-probe says.
#[derive(Debug, Deserialize)]
struct Probed {
    devices: Vec<Device>,
    error: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Device {
    uuid: String,
    total_bytes: u64,
    allocated_bytes: u64,
    refused_with: Option<i32>,
}

/// What trials need.
pub(super) struct Trials<'a> {
    pub(super) setting: &'a Setting,
    pub(super) gpus: &'a NvmlGpus,
    pub(super) inventory: &'a Inventory,
    /// Or why no container can be started here.
    pub(super) containers: Result<&'a Containers, String>,
}

impl Trials<'_> {
    /// All of them, one after the other.
    pub(super) async fn all(&self, agent: &mut Agent, devices: &[&str], section: &mut Section) {
        let Some(gpu) = self.free(devices) else {
            let reason = "no GPU has MIG mode off, no processes, and a device for the whole of it";
            return section.promise(Promise::skipped("a whole GPU and a share", reason));
        };
        let whole = format!("gpu-{}", gpu.minor);
        let whole =
            self.trial(agent, "gpu", &whole, None, section, |edits, section| self.whole(gpu, edits, section));
        whole.await;
        let consumed = json!({"memory": QUOTA.to_string(), "cores": "25", "slots": "1"});
        let share = format!("gpu-{}-share", gpu.minor);
        let share = self.trial(agent, "share", &share, Some(consumed), section, |edits, section| {
            self.share(gpu, edits, section)
        });
        share.await;
        self.partitions(agent, gpu, devices, section).await;
    }

    /// What starts containers; without it what needs one is skipped.
    fn containers(&self, what: &str, section: &mut Section) -> Option<&Containers> {
        match &self.containers {
            Ok(containers) => Some(containers),
            Err(reason) => {
                section.promise(Promise::skipped(what, reason.clone()));
                None
            }
        }
    }

    /// The first GPU that nobody uses and nobody has partitioned.
    fn free(&self, devices: &[&str]) -> Option<&GpuInfo> {
        self.inventory.gpus.iter().find(|gpu| {
            let whole = format!("gpu-{}", gpu.minor);
            let is_idle = self.gpus.processes(&gpu.uuid).is_ok_and(|all| all.is_empty());
            !gpu.mig_enabled() && is_idle && devices.contains(&whole.as_str())
        })
    }

    /// Prepares a claim, does something with its edits, and unprepares it whatever came of that.
    async fn trial(
        &self,
        agent: &mut Agent,
        class: &str,
        device: &str,
        consumed: Option<Value>,
        section: &mut Section,
        does: impl FnOnce(&ContainerEdits, &mut Section) -> Result<()>,
    ) {
        let prepared = agent.prepare(class, device, consumed).await;
        let name = format!("{device} is prepared");
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                return section.promise(Promise::of(&name, false, format!("{error:#}"), Value::Null));
            }
        };
        let edits = &prepared.edits;
        let nodes: Vec<&str> = edits.device_nodes.iter().map(|node| node.path.as_str()).collect();
        let figures =
            json!({"device_nodes": nodes, "mounts": edits.mounts.len(), "hooks": edits.hooks.len()});
        section.promise(Promise::of(&name, true, "", figures));
        if let Err(error) = does(edits, section) {
            let name = format!("a CUDA program runs in a container with {device}");
            section.promise(Promise::of(&name, false, format!("{error:#}"), Value::Null));
        }
        let undone = agent.unprepare(&prepared).await;
        let reason = undone.as_ref().err().map(|error| format!("{error:#}")).unwrap_or_default();
        section.promise(Promise::of(&format!("{device} is unprepared"), undone.is_ok(), reason, Value::Null));
    }

    fn whole(&self, gpu: &GpuInfo, edits: &ContainerEdits, section: &mut Section) -> Result<()> {
        section.assumptions.push(files::beside_ctk(&self.setting.roots(), edits));
        let name = "a container with a whole GPU runs a CUDA program that sees it alone";
        let Some(containers) = self.containers(name, section) else { return Ok(()) };
        let taken = format!("--occupy={TAKEN}");
        let held = containers.hold(edits, &[PROBE, &taken, "--hold"])?;
        let probed: Probed = serde_json::from_value(held.said.clone())?;
        let device = only(&probed)?;
        let is_it = device.uuid == gpu.uuid.as_str();
        let reason = format!("it sees {}, not {}", device.uuid, gpu.uuid);
        section.promise(Promise::of(
            name,
            is_it && device.allocated_bytes == TAKEN,
            reason,
            held.said.clone(),
        ));
        let of = boards::name(gpu);
        let what = "MiB that CUDA has of the whole GPU are those that NVML has without what is reserved";
        section.assumptions.push(Line::compare(&of, what, gpu.memory_bytes / MIB, device.total_bytes / MIB));
        section.assumptions.push(self.process(gpu));
        drop(held);
        section.promise(smi(containers, edits)?);
        Ok(())
    }

    /// How NVML lists the process in the container, which was the only one.
    fn process(&self, gpu: &GpuInfo) -> Line {
        let (of, what) = (boards::name(gpu), "NVML lists a container's process");
        let assumed = "by its pid on the host, with its memory";
        let listed = match self.gpus.processes(&gpu.uuid) {
            Ok(listed) => listed,
            Err(error) => return Line::unknown(&of, what, assumed, error.to_string()),
        };
        let is_probe = |pid: u32| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "cuda-probe")
        };
        let machine = match listed.as_slice() {
            [] => "not at all".to_owned(),
            [one] if is_probe(one.pid) && one.memory_bytes.is_some_and(|bytes| bytes >= TAKEN) => {
                assumed.to_owned()
            }
            [one] if is_probe(one.pid) => {
                format!("by its pid on the host, its memory as {:?}", one.memory_bytes)
            }
            others => {
                let pids: Vec<String> = others.iter().map(|process| process.pid.to_string()).collect();
                format!("as {}, which is no cuda-probe in this pid namespace", pids.join(", "))
            }
        };
        Line::compare(&of, what, assumed, machine)
    }

    fn share(&self, gpu: &GpuInfo, edits: &ContainerEdits, section: &mut Section) -> Result<()> {
        let hooks: Vec<&str> =
            edits.hooks.iter().filter_map(|hook| hook.args.get(1)).map(String::as_str).collect();
        let quota = "a share ends at its quota";
        let Some(containers) = self.containers(quota, section) else { return Ok(()) };
        let output = containers.run(edits, &[PROBE])?;
        let probed: Result<Probed, _> = serde_json::from_slice(&output.stdout);
        // Without the program's own word it was not started: a hook forbids that by its status.
        section.promise(Promise::of(
            "the OCI hook's trial passes for a share",
            hooks.contains(&"create-container") && probed.is_ok(),
            format!("hooks {hooks:?}; {}", said(&output)),
            json!(hooks),
        ));
        let probed = probed.with_context(|| said(&output))?;
        let device = only(&probed)?;
        let (total, got) = (device.total_bytes, device.allocated_bytes);
        let held = device.uuid == gpu.uuid.as_str()
            && total == QUOTA
            && (1..=QUOTA).contains(&got)
            && device.refused_with == Some(2);
        let reason = format!(
            "of a quota of {QUOTA}, CUDA shows {total} and gave {got}, and refused with {:?}",
            device.refused_with
        );
        let figures =
            json!({"quota": QUOTA, "total": total, "allocated": got, "refused_with": device.refused_with});
        section.promise(Promise::of(quota, held, reason, figures));
        Ok(())
    }

    /// The smallest partition, where that is allowed and needs no reset.
    async fn partitions(&self, agent: &mut Agent, gpu: &GpuInfo, devices: &[&str], section: &mut Section) {
        let mut made = Vec::new();
        if self.setting.change_mig {
            made = self.partition(agent, gpu, devices, section).await;
        }
        section.assumptions.extend(boards::mode_change(gpu, made.first().map(|made| made.waits)));
        section.assumptions.extend(partitions::lines(gpu, &made));
    }

    /// Makes it twice, each time anew; what was seen.
    async fn partition(
        &self,
        agent: &mut Agent,
        gpu: &GpuInfo,
        devices: &[&str],
        section: &mut Section,
    ) -> Vec<Made> {
        let name = "a partition is made, used and undone";
        let Some(smallest) = gpu.profiles().iter().min_by_key(|profile| profile.memory_bytes) else {
            section.promise(Promise::skipped(name, format!("{} has no MIG", boards::name(gpu))));
            return Vec::new();
        };
        let is_it = |name: &&&str| match DeviceName::parse(name) {
            Some(DeviceName::Mig { profile_id, .. }) => profile_id == smallest.id,
            _ => false,
        };
        let needs_reset = matches!(gpu.mig, MigCapability::Supported { needs_reset: true, .. });
        let own = of_gpu(gpu, devices);
        let Some(device) = own.iter().find(is_it).filter(|_| !needs_reset) else {
            section.promise(Promise::skipped(name, "its MIG mode is off, and switching it needs a reset"));
            return Vec::new();
        };
        let mut all = Vec::new();
        let memory = smallest.memory_bytes;
        for class in ["mig", "mig-again"] {
            let trial = self.trial(agent, class, device, None, section, |edits, section| {
                let (mode, live) = (self.gpus.mig_mode(&gpu.uuid)?, self.gpus.live_migs(&gpu.uuid)?);
                all.push(Made { waits: !mode.current, live, cuda: None });
                let Some(containers) = self.containers(name, section) else { return Ok(()) };
                let output = containers.run(edits, &[PROBE, &format!("--occupy={TAKEN}")])?;
                let probed: Probed = serde_json::from_slice(&output.stdout).with_context(|| said(&output))?;
                let seen = only(&probed)?;
                if let Some(made) = all.last_mut() {
                    made.cuda = Some(seen.uuid.clone());
                }
                let total = seen.total_bytes;
                // The driver takes its part of a partition, too.
                let held = total <= memory && total > memory / 2;
                let reason = format!("CUDA shows {total} bytes of a partition of {memory}");
                section.promise(Promise::of(name, held, reason, json!({"profile": memory, "total": total})));
                Ok(())
            });
            trial.await;
        }
        all
    }
}

/// The one device that a program should see.
fn only(probed: &Probed) -> Result<&Device> {
    ensure!(probed.error.is_none(), "CUDA does not start: {}", probed.error.as_deref().unwrap_or_default());
    let [device] = probed.devices.as_slice() else {
        anyhow::bail!("the program sees {} devices, not one", probed.devices.len());
    };
    Ok(device)
}

/// nvidia-smi in the container, where the driver has one.
fn smi(containers: &Containers, edits: &ContainerEdits) -> Result<Promise> {
    let name = "nvidia-smi -L in that container lists one GPU";
    let smi = edits.mounts.iter().find(|mount| mount.container_path.ends_with("/nvidia-smi"));
    let Some(smi) = smi else {
        return Ok(Promise::skipped(name, "the driver's files have no nvidia-smi"));
    };
    let output = containers.run(edits, &[smi.container_path.as_str(), "-L"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let listed = text.lines().filter(|line| line.starts_with("GPU ")).count();
    Ok(Promise::of(name, output.status.success() && listed == 1, said(&output), json!(text)))
}

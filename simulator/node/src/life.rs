//! Making a node, rebooting it, and the settings that an administrator changes while it runs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use crate::error::NodeError;
use crate::layout::{GpuState, MAGIC, STATE_FILE_BYTES, State};
use crate::memory::{clear_slot, pid_namespace};
use crate::mig::clear_instances;
use crate::module;
use crate::node::{Node, write_text};
use crate::root;
use crate::spec::{NodeSpec, ProcessView, uuid_of};

/// The settings of a GPU that NVML reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuSettings {
    /// NVML compute mode.
    pub compute_mode: u32,
    /// Persistence mode.
    pub persistence: bool,
    /// Time-slice setting: 0 default, 1 short, 2 medium, 3 long.
    pub timeslice: u32,
    /// Whether it has fallen off the bus.
    pub lost: bool,
    /// Whether another driver has it.
    pub away: bool,
    /// Corrected ECC errors since boot.
    pub ecc_corrected: u64,
    /// Uncorrected ECC errors since boot.
    pub ecc_uncorrected: u64,
}

/// Makes a node in `dir` and opens it. What was there before is replaced.
pub fn create(dir: &Path, spec: &NodeSpec) -> Result<Node, NodeError> {
    let gpus = spec.resolve()?;
    let io = |what, path: &Path| {
        let path = path.to_owned();
        move |source| NodeError::Io { what, path, source }
    };
    fs::create_dir_all(dir).map_err(io("could not create", dir))?;
    // Each file is made aside and renamed, so that a process of an earlier node keeps its own mapping.
    let put = |name: &str, fill: &dyn Fn(&Path) -> std::io::Result<()>, mode: u32| {
        let (path, aside) = (dir.join(name), dir.join(format!(".{name}.new")));
        let _ = fs::remove_file(&aside);
        fill(&aside)
            .and_then(|()| fs::set_permissions(&aside, fs::Permissions::from_mode(mode)))
            .and_then(|()| fs::rename(&aside, &path))
            .map_err(io("could not write", &path))
    };
    put("procs", &|p| fs::write(p, ""), 0o666)?;
    put(
        "state",
        &|p| {
            let file = fs::File::create(p)?;
            file.set_len(STATE_FILE_BYTES as u64)?;
            use std::os::unix::fs::FileExt;
            file.write_all_at(&MAGIC.to_ne_bytes(), 0)
        },
        0o666,
    )?;
    spec.write(dir)?;
    if spec.cuda_settings.is_empty() {
        let _ = fs::remove_file(dir.join("cuda.conf"));
    } else {
        let lines = spec.cuda_settings.join("\n") + "\n";
        put("cuda.conf", &|p| fs::write(p, lines.as_bytes()), 0o644)?;
    }
    let of_gpus = gpus.iter().flat_map(|gpu| [module::gpu_file(gpu.index), module::mode_file(gpu.index)]);
    for name in of_gpus.chain(["module".to_owned()]) {
        let path = dir.join(name);
        module::make_locked(&path).map_err(io("could not write", &path))?;
    }
    root::lay_out(dir, spec, &gpus)?;
    let node = Node::open(dir)?;
    {
        let mut state = node.lock()?;
        state.host_pid_namespace = pid_namespace();
        state.reap_delay_ns = spec.reap_delay_ms.saturating_mul(1_000_000);
        state.process_view = view_number(spec.process_view);
        state.deny_mig_in_containers = u32::from(spec.deny_mig_in_containers);
        for (gpu, slot) in gpus.iter().zip(state.gpus.iter_mut()) {
            slot.mig_current = u32::from(gpu.mig_at_creation);
            slot.mig_pending = slot.mig_current;
            slot.persistence = 1;
        }
    }
    node.start_boot()?;
    Ok(node)
}

/// Reboots the node in `dir`: instances, processes, memory and counters go; the boot id changes.
///
/// Where the board keeps the MIG mode over a reboot, the pending one comes into force, else it is off.
pub fn reboot(dir: &Path) -> Result<(), NodeError> {
    Node::open(dir)?.reboot()
}

impl Node {
    fn reboot(&self) -> Result<(), NodeError> {
        {
            let mut state = self.lock()?;
            self.lose_state(&mut state);
            state.gpus.iter_mut().for_each(|gpu| gpu.away = 0);
            for word in self.map.compute_words() {
                word.store(0, std::sync::atomic::Ordering::Relaxed);
            }
        }
        if self.module().is_none() {
            self.load_module(None)?;
        }
        // They may have been numbered anew since this process opened the node.
        let now = Self::open(&self.dir)?;
        root::restart(&self.dir, &now.spec, &now.gpus)?;
        self.start_boot()
    }

    /// What processes and GPUs lose with the driver, and in a reboot. A board that keeps its MIG mode gets a pending one.
    pub(crate) fn lose_state(&self, state: &mut State) {
        for index in 0..state.procs.len() {
            clear_slot(state, index);
        }
        for (gpu, slot) in self.gpus.iter().zip(state.gpus.iter_mut()) {
            let keeps = self.spec.mig_survives_reboot.unwrap_or(gpu.board.mig_survives_reboot);
            slot.mig_current = if keeps { slot.mig_pending } else { 0 };
            slot.mig_pending = slot.mig_current;
            slot.compute_mode = 0;
            slot.timeslice = 0;
            slot.lost = 0;
            slot.moved = 0;
            slot.ecc_corrected = 0;
            slot.ecc_uncorrected = 0;
            clear_instances(slot);
        }
    }

    /// Counts a boot and writes its id, for those who ask us and for those who read `/proc`.
    fn start_boot(&self) -> Result<(), NodeError> {
        let id = {
            let mut state = self.lock()?;
            state.boot += 1;
            let id = uuid_of(&self.spec.seed, &format!("boot {}", state.boot));
            write_text(&mut state.boot_id, &id);
            id
        };
        root::write_boot_id(&self.dir, &id)
    }

    /// The settings of a GPU.
    pub fn settings(&self, gpu: usize) -> Result<GpuSettings, NodeError> {
        self.gpu(gpu)?;
        let state = self.lock()?;
        let gpu = state.gpus.get(gpu).ok_or(NodeError::NotFound("no GPU has this index"))?;
        Ok(GpuSettings {
            compute_mode: gpu.compute_mode,
            persistence: gpu.persistence == 1,
            timeslice: gpu.timeslice,
            lost: gpu.lost == 1,
            away: gpu.away == 1,
            ecc_corrected: gpu.ecc_corrected,
            ecc_uncorrected: gpu.ecc_uncorrected,
        })
    }

    /// Says whether another driver has a GPU. Libraries that are opened from then on do not list it.
    pub fn set_away(&self, gpu: usize, away: bool) -> Result<(), NodeError> {
        self.update_gpu(gpu, |g| {
            g.away = u32::from(away);
            // A driver that gets a GPU starts it as at first.
            if away {
                g.persistence = 0;
            }
        })
    }

    /// Sets NVML's compute mode (0 default, 2 prohibited, 3 exclusive process).
    pub fn set_compute_mode(&self, gpu: usize, mode: u32) -> Result<(), NodeError> {
        self.update_gpu(gpu, |g| g.compute_mode = mode)
    }

    /// Sets persistence mode.
    pub fn set_persistence(&self, gpu: usize, on: bool) -> Result<(), NodeError> {
        self.update_gpu(gpu, |g| g.persistence = u32::from(on))
    }

    /// Sets the time-slice (0 default, 1 short, 2 medium, 3 long).
    pub fn set_timeslice(&self, gpu: usize, timeslice: u32) -> Result<(), NodeError> {
        self.update_gpu(gpu, |g| g.timeslice = timeslice)
    }

    /// How NVML names processes now.
    pub fn process_view(&self) -> Result<ProcessView, NodeError> {
        Ok(match self.lock()?.process_view {
            1 => ProcessView::Own,
            2 => ProcessView::Empty,
            3 => ProcessView::NotAvailable,
            _ => ProcessView::Host,
        })
    }

    /// Changes how NVML names processes.
    pub fn set_process_view(&self, view: ProcessView) -> Result<(), NodeError> {
        self.lock()?.process_view = view_number(view);
        Ok(())
    }

    /// Changes how long a killed process's memory stays in use.
    pub fn set_reap_delay(&self, delay: Duration) -> Result<(), NodeError> {
        self.lock()?.reap_delay_ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        Ok(())
    }

    /// Changes whether MIG management is refused outside the creator's pid namespace.
    pub fn set_deny_mig_in_containers(&self, deny: bool) -> Result<(), NodeError> {
        self.lock()?.deny_mig_in_containers = u32::from(deny);
        Ok(())
    }

    pub(crate) fn update_gpu(&self, gpu: usize, change: impl FnOnce(&mut GpuState)) -> Result<(), NodeError> {
        self.gpu(gpu)?;
        let mut state = self.lock()?;
        change(state.gpus.get_mut(gpu).ok_or(NodeError::NotFound("no GPU has this index"))?);
        Ok(())
    }
}

fn view_number(view: ProcessView) -> u32 {
    match view {
        ProcessView::Host => 0,
        ProcessView::Own => 1,
        ProcessView::Empty => 2,
        ProcessView::NotAvailable => 3,
    }
}

//! Runs steps and their inverses on the node: hardware, directories, CDI specs. No decisions.

mod metadata;
mod mps;
mod nodes;
mod partition;
mod passthrough;
mod spec;

pub use spec::Missing;

use crate::devices::{DeviceError, Majors};
use crate::driver::Driver;
use crate::edits::{self, Limiter, OfDriver, Ours, Site};
use crate::holders::{self, Client};
use crate::ledger::{Ledger, Record};
use crate::metadata::MetadataError;
use crate::mps::{Mps, MpsError};
use crate::plan::{Step, Undo};
use crate::reach::Reach;
use crate::selinux::{Existing, LabelError, Labels};
use crate::share::{self, RegionStorage, ShareError};
use crate::store::{StoreError, io_error, replace};
use crate::vfio::{Vfio, VfioError};
use aliquot_cdi::{DirError, NameError, Spec, SpecDir};
use aliquot_model::config::TimeSliceInterval;
use aliquot_model::{GpuUuid, MigCapability, Placement};
use aliquot_nvml::caps::MigMinors;
use aliquot_nvml::{GpuError, GpuProcess, Gpus, ModeChange, TimeSlice};
use nodes::shows_partitions;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a step or its inverse failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The GPU refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Share directories.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The file system.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A label could not be given.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// The CDI directory.
    #[error("{0}{tail}", tail = causes(.0))]
    Cdi(#[from] DirError),
    /// A name that CDI does not allow.
    #[error("cannot name a CDI device: {0}")]
    Name(#[from] NameError),
    /// Device metadata files.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// The claim's MPS daemon.
    #[error(transparent)]
    Mps(#[from] MpsError),
    /// Somebody wants nothing to run on a GPU.
    #[error(
        "GPU {gpu} has compute mode PROHIBITED, which nothing of ours sets: if programs may use it, run nvidia-smi -i {gpu} \
         -c DEFAULT on the node"
    )]
    Prohibited {
        /// GPU.
        gpu: GpuUuid,
    },
    /// The limiter is not on this node.
    #[error("the limiter is not installed: no {} with libaliquot_preload.so and libaliquot_core.so; a share without it would have no limit", .0.display())]
    NoLimiter(PathBuf),
    /// The kernel has no device that a container needs.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The kernel lists no capability for an instance.
    #[error("{} lists no capability for GPU instance {gpu_instance} of GPU {gpu}, so no container could open the partition; reload the NVIDIA driver", path.display())]
    NoCapability {
        /// GPU.
        gpu: GpuUuid,
        /// GPU instance.
        gpu_instance: u32,
        /// The list.
        path: PathBuf,
    },
    /// A partition that was just made, or that the claim has as it was, is not there.
    #[error(
        "the partition at {placement} on GPU {gpu} is gone: the driver was loaded anew, or somebody destroyed it; delete the pods that use the claim, and the partition is made again when the claim is prepared next"
    )]
    PartitionGone {
        /// GPU.
        gpu: GpuUuid,
        /// Place.
        placement: Placement,
    },
    /// Containers of another claim may open the partition that was made.
    #[error(
        "{target} would be given to it, but {0}; it is given out once that claim is unprepared: delete the pods that use it",
        target = .0.target()
    )]
    Reached(Box<Reach>),
    /// The driver switches MIG mode only with a reset of the GPU.
    #[error(
        "MIG mode of GPU {gpu} can be switched {} only with a reset of the GPU, which this agent does not do while others \
         may use the node; drain the node and run nvidia-smi -i {gpu} -mig {} and nvidia-smi -i {gpu} --gpu-reset{}",
        if *on { "on" } else { "off" },
        u8::from(*on),
        taken_back.as_ref().map_or_else(String::new, |error| format!("; the change is still pending: {error}"))
    )]
    NeedsReset {
        /// GPU.
        gpu: GpuUuid,
        /// What it was to be.
        on: bool,
        /// Why the change is still pending, if it could not be taken back.
        taken_back: Option<Box<GpuError>>,
    },
    /// Something holds the GPU that the driver does not list.
    #[error("{error}. {}", clients_text(clients))]
    Held {
        /// What the driver said.
        error: Box<GpuError>,
        /// Who has a device node of it open.
        clients: Vec<Client>,
    },
    /// A partition that the claim is to have as it is, is used.
    #[error(
        "processes run in the partition at {placement} on GPU {gpu}, which no claim has: {}; end them, or find out which \
         other program gives that partition out",
        list(processes)
    )]
    InUse {
        /// GPU.
        gpu: GpuUuid,
        /// Place.
        placement: Placement,
        /// Who runs there.
        processes: Vec<GpuProcess>,
    },
    /// A GPU could not be given to a virtual machine, or not taken back.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// A step that does not fit its record.
    #[error("the checkpoint does not say what GPU {0} is to a virtual machine")]
    NothingToPass(GpuUuid),
    /// A step that does not fit its record.
    #[error("the checkpoint does not say what share {0} may use")]
    NoQuota(String),
}

fn clients_text(clients: &[Client]) -> String {
    if clients.is_empty() {
        return "The driver lists no process, and none is seen that has a device node of it open".to_owned();
    }
    format!("The driver lists no process; {}", holders::text(clients))
}

pub(crate) fn list(processes: &[GpuProcess]) -> String {
    let names: Vec<String> = processes.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// The chain of causes, as one text.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

type Report = dyn Fn(&str) + Send + Sync;

/// Called between any two changes of the node; a test ends the process here.
#[derive(Clone, Default)]
pub struct Probe(Option<Arc<Report>>);

impl Probe {
    /// A probe that calls a function.
    pub fn new(probe: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(probe)))
    }

    /// Reports a point.
    pub fn at(&self, point: &str) {
        if let Some(probe) = &self.0 {
            probe(point);
        }
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Probe")
    }
}

/// The node as steps change it.
#[derive(Clone)]
pub struct Machine {
    /// GPUs.
    pub gpus: Arc<dyn Gpus>,
    /// CDI directory.
    pub cdi: SpecDir,
    /// The driver's files.
    pub driver: Driver,
    /// Facts for CDI specs.
    pub site: Site,
    /// What the regions of new shares lie in.
    pub regions: RegionStorage,
    /// MPS daemons.
    pub mps: Mps,
    /// SELinux labels of what containers find of ours.
    pub labels: Labels,
    /// Directory of limiter releases.
    pub limiter_dir: PathBuf,
    /// Our data directory.
    pub data_dir: PathBuf,
    /// `/proc`.
    pub proc_root: PathBuf,
    /// `/sys`.
    pub sys_root: PathBuf,
    /// GPUs of virtual machines.
    pub vfio: Vfio,
    /// For tests.
    pub probe: Probe,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("cdi", &self.cdi).field("site", &self.site).finish_non_exhaustive()
    }
}

impl Machine {
    /// Runs a step. What becomes known by it (a partition's UUID) is noted in the record.
    ///
    /// # Errors
    /// [`StepError`]; the step's inverse is then still due.
    pub fn run(&self, record: &mut Record, step: &Step) -> Result<(), StepError> {
        self.probe.at("before step");
        match step {
            Step::SwitchMig { gpu, on } => self.switch_mig(gpu, *on)?,
            Step::CreatePartition { .. } => {
                if let Some(place) = step.place() {
                    self.create_partition(record, &place)?;
                }
            }
            Step::SetTimeSlice { gpu, interval } => self.gpus.set_time_slice(gpu, time_slice(*interval))?,
            Step::MakeShare { result_id } => {
                let device = record.devices.iter().find(|device| &device.result_id == result_id);
                let (device, share) = device
                    .and_then(|device| Some((device, device.share.as_ref()?)))
                    .ok_or_else(|| StepError::NoQuota(result_id.clone()))?;
                share::make(&self.site.shares_dir, self.regions, &self.labels, device, share)?;
            }
            Step::MakeExclusive { gpu } => self.make_exclusive(gpu)?,
            Step::StartMps { .. } => self.start_mps(record)?,
            Step::BindVfio { gpu, .. } => self.bind_vfio(record, gpu)?,
            Step::WriteSpec => self.write_spec(record, &self.spec(record, Missing::Refused)?)?,
        }
        self.probe.at("after step");
        Ok(())
    }

    /// Runs an inverse. Right from any state that a crash can leave.
    ///
    /// # Errors
    /// [`StepError`]; it can be run again.
    pub fn undo(
        &self,
        record: &Record,
        undo: &Undo,
        ledger: &Ledger,
        boot_id: &str,
    ) -> Result<(), StepError> {
        self.probe.at("before undo");
        match undo {
            // What it had set up ended with its boot, and what is there now is of somebody else.
            Undo::SettleMig { .. }
            | Undo::DestroyPartition { .. }
            | Undo::ResetTimeSlice { .. }
            | Undo::ResetComputeMode { .. }
                if record.boot_id != boot_id => {}
            Undo::SettleMig { gpu } => self.settle_mig(record, gpu, ledger),
            Undo::DestroyPartition { gpu, placement } => self.destroy(record, gpu, *placement, ledger)?,
            Undo::ResetTimeSlice { gpu } => self.reset_time_slice(record, gpu, ledger),
            Undo::UnbindVfio { gpu, address } => self.unbind_vfio(record, gpu, address, boot_id)?,
            // Files that stay keep nobody's claim: they are looked for again at the next start.
            Undo::RemoveShare { result_id } => {
                if let Err(error) = share::discard(&self.site.shares_dir, result_id) {
                    tracing::warn!(share = %result_id, %error, "a share's files stay until the agent's next start");
                }
            }
            Undo::ResetComputeMode { gpu } => {
                self.reset_compute_mode(&record.claim.uid, gpu, ledger, boot_id)?
            }
            Undo::StopMps { uid } => self.end_mps(record, uid, boot_id)?,
            Undo::RemoveSpec => {
                self.remove_metadata(&record.claim.uid);
                self.cdi.remove(&edits::spec_name(&self.site.driver, &record.claim.uid))?;
            }
        }
        self.probe.at("after undo");
        Ok(())
    }

    fn switch_mig(&self, gpu: &GpuUuid, on: bool) -> Result<(), StepError> {
        let before = self.gpus.mig_mode(gpu)?;
        if before.current == on {
            return Ok(());
        }
        match self.gpus.set_mig_mode(gpu, on) {
            Ok(ModeChange::InForce) => {
                tracing::info!(gpu.uuid = %gpu, on, "switched MIG mode");
                Ok(())
            }
            // A reset at any time later would switch what nobody wants any more.
            Ok(ModeChange::AfterReset) => {
                let taken_back = self.gpus.set_mig_mode(gpu, before.pending).err();
                Err(StepError::NeedsReset { gpu: gpu.clone(), on, taken_back: taken_back.map(Box::new) })
            }
            Err(error) if error.is_in_use() && error.blocked_by.is_empty() => {
                let clients = holders::of_gpu(&self.proc_root, &self.sys_root, &self.gpus.gpu(gpu)?);
                Err(StepError::Held { error: Box::new(error), clients })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Whoever removes the last partition switches the mode off. A mode that stays on harms nobody: a
    /// whole-GPU claim switches it off itself, so failures are only warned of.
    fn settle_mig(&self, record: &Record, gpu: &GpuUuid, ledger: &Ledger) {
        let Record { claim, boot_id, .. } = record;
        if ledger.has_others_here(&claim.uid, gpu, boot_id, |device| device.partition.is_some()) {
            return;
        }
        let settle = || -> Result<bool, StepError> {
            let info = self.gpus.gpu(gpu)?;
            let MigCapability::Supported { enabled: true, needs_reset: false, .. } = info.mig else {
                return Ok(false);
            };
            if !self.gpus.live_migs(gpu)?.is_empty() {
                return Ok(false);
            }
            self.switch_mig(gpu, false).map(|()| true)
        };
        match settle() {
            Ok(true) => tracing::info!(gpu.uuid = %gpu, "switched MIG mode off after the last partition"),
            Ok(false) => {}
            Err(error) => tracing::warn!(gpu.uuid = %gpu, %error, "MIG mode stays on"),
        }
    }

    /// Whether the driver is not loaded, and no partition exists: also the kernel lists none of its devices.
    fn is_unloaded(&self, error: &GpuError) -> bool {
        let not_listed = |majors: Majors| matches!(majors.gpu(0), Err(DeviceError::NoDriver(_)));
        (error.is_no_driver() || error.is_no_library()) && Majors::read(&self.proc_root).is_ok_and(not_listed)
    }

    /// As with the mode: a time slice that stays is no reason to keep a claim from being released.
    fn reset_time_slice(&self, record: &Record, gpu: &GpuUuid, ledger: &Ledger) {
        let Record { claim, boot_id, .. } = record;
        if ledger.has_others_here(&claim.uid, gpu, boot_id, |device| device.time_slice.is_some()) {
            return;
        }
        if let Err(error) = self.gpus.set_time_slice(gpu, TimeSlice::Default) {
            tracing::warn!(gpu.uuid = %gpu, %error, "the time slice stays as the claim had it");
        }
    }

    /// Whether the claim's CDI spec is there.
    pub fn has_spec(&self, record: &Record) -> bool {
        let name = edits::spec_name(&self.site.driver, &record.claim.uid);
        self.cdi.list(&name).is_ok_and(|names| names.contains(&name))
    }

    /// The claim's CDI spec from the hardware as it is now.
    ///
    /// # Errors
    /// [`StepError`] if something that the spec must name is not there.
    pub fn spec(&self, record: &Record, missing: Missing) -> Result<Spec, StepError> {
        let limiter =
            record.devices.iter().any(|device| device.share.is_some()).then(|| self.limiter()).transpose()?;
        let majors = Majors::read(&self.proc_root)?;
        let caps = match record.devices.iter().any(shows_partitions) {
            true => MigMinors::read(&self.proc_root)
                .map_err(io_error("read", &MigMinors::path(&self.proc_root)))?,
            false => MigMinors::default(),
        };
        let devices = record
            .devices
            .iter()
            .map(|device| Ok((device.clone(), missing.settle(self.nodes(device, &majors, &caps))?)))
            .collect::<Result<Vec<_>, StepError>>()?;
        let indexed = record.indexed_env;
        let (boot_id, claim) = (&record.boot_id, &record.claim);
        // A virtual machine has a driver of its own.
        let (files, control) = match record.devices.iter().all(|device| device.passed.is_some()) {
            true => Default::default(),
            false => (self.driver.files(), majors.control()?),
        };
        let driver = OfDriver { files: &files, control: &control };
        let uses_mps = devices.iter().any(|(device, _)| device.mps.is_some());
        let daemon = uses_mps.then(|| self.mps.claim(&claim.uid)).transpose()?;
        let ours = Ours { limiter: limiter.as_ref(), daemon: daemon.as_ref() };
        let mut spec = edits::spec(&self.site, driver, boot_id, claim, &devices, ours, indexed)?;
        edits::tell_mounts(&mut spec, identity)?;
        Ok(spec)
    }

    /// Labels what containers that start again find of ours. Returns what could not be labelled.
    pub fn label_existing(&self) -> Vec<LabelError> {
        let Self { limiter_dir, data_dir, site, labels, .. } = self;
        Existing { limiter_dir, data_dir, shares: &site.shares_dir }.label(labels)
    }

    /// The limiter of our release, or else the only one that is installed. Its preload file is written
    /// when it is missing, at a path of its own version, so that running containers keep theirs.
    ///
    /// # Errors
    /// [`StepError::NoLimiter`] if there is none, [`StepError::Label`] if containers could not read it.
    pub fn limiter(&self) -> Result<Limiter, StepError> {
        let (version, host_dir) = find_limiter(&self.limiter_dir)
            .ok_or_else(|| StepError::NoLimiter(self.limiter_dir.join(env!("CARGO_PKG_VERSION"))))?;
        let dir = self.data_dir.join("limiter").join(&version);
        let preload_file = dir.join(edits::PRELOAD_LIST);
        let content = format!("{}/{version}/{}\n", edits::LIMITER_DIR, edits::PRELOAD);
        if fs::read(&preload_file).ok().as_deref() != Some(content.as_bytes()) {
            fs::create_dir_all(&dir).map_err(io_error("create", &dir))?;
            replace(&preload_file, content.as_bytes(), 0o644)?;
        }
        for file in [&host_dir.join(edits::PRELOAD), &host_dir.join(edits::CORE), &preload_file] {
            self.labels.read_only(file)?;
        }
        Ok(Limiter { version, host_dir, preload_file })
    }
}

/// Device and inode of a file or directory.
pub(crate) fn identity(path: &str) -> Result<(u64, u64), StoreError> {
    use std::os::unix::fs::MetadataExt;
    let meta = fs::metadata(path).map_err(io_error("look at", Path::new(path)))?;
    Ok((meta.dev(), meta.ino()))
}

/// Version and directory of the limiter to mount.
fn find_limiter(dir: &Path) -> Option<(String, PathBuf)> {
    let complete = |path: &Path| path.join(edits::PRELOAD).is_file() && path.join(edits::CORE).is_file();
    let own = dir.join(env!("CARGO_PKG_VERSION"));
    if complete(&own) {
        return Some((env!("CARGO_PKG_VERSION").to_owned(), own));
    }
    let mut found = fs::read_dir(dir)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| complete(path))
        .filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), path)));
    let only = found.next()?;
    found.next().is_none().then_some(only)
}

const fn time_slice(interval: TimeSliceInterval) -> TimeSlice {
    match interval {
        TimeSliceInterval::Default => TimeSlice::Default,
        TimeSliceInterval::Short => TimeSlice::Short,
        TimeSliceInterval::Medium => TimeSlice::Medium,
        TimeSliceInterval::Long => TimeSlice::Long,
    }
}

//! Runs steps and their inverses on the node: hardware, directories, CDI specs. It makes no decisions.

mod error;
mod metadata;
mod mps;
mod nodes;
mod partition;
mod passthrough;
mod spec;

pub use error::StepError;
pub use spec::Missing;

use crate::devices::{DeviceError, Majors};
use crate::driver::Driver;
use crate::edits::{self, Limiter, OfDriver, Ours, Site};
use crate::holders;
use crate::ledger::{Ledger, Record};
use crate::mps::Mps;
use crate::plan::{Step, Undo};
use crate::probe::Probe;
use crate::selinux::{Existing, LabelError, Labels};
use crate::share::{self, RegionStorage};
use crate::store::{StoreError, io_error, replace};
use crate::vfio::Vfio;
use aliquot_cdi::{Spec, SpecDir};
use aliquot_model::config::TimeSliceInterval;
use aliquot_model::{GpuUuid, MigCapability};
use aliquot_nvml::caps::MigMinors;
use aliquot_nvml::{GpuError, Gpus, ModeChange, TimeSlice};
use nodes::shows_partitions;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The parts of the node that steps change.
#[derive(Clone)]
pub struct Machine {
    /// The GPUs.
    pub gpus: Arc<dyn Gpus>,
    /// The CDI directory.
    pub cdi: SpecDir,
    /// The driver's files.
    pub driver: Driver,
    /// The facts of the node for CDI specs.
    pub site: Site,
    /// The storage for the regions of new shares.
    pub regions: RegionStorage,
    /// The MPS daemons.
    pub mps: Mps,
    /// The SELinux labels of this driver's files in containers.
    pub labels: Labels,
    /// The directory of limiter releases.
    pub limiter_dir: PathBuf,
    /// The data directory of this driver.
    pub data_dir: PathBuf,
    /// The path of `/proc`.
    pub proc_root: PathBuf,
    /// The path of `/sys`.
    pub sys_root: PathBuf,
    /// The GPUs of virtual machines.
    pub vfio: Vfio,
    /// The probe for tests.
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
    /// Fails with [`StepError`]; the step's inverse must then still be run.
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

    /// Runs an inverse. It is right from any state that a crash can leave.
    ///
    /// # Errors
    /// Fails with [`StepError`]; the inverse can be run again.
    pub fn undo(
        &self,
        record: &Record,
        undo: &Undo,
        ledger: &Ledger,
        boot_id: &str,
    ) -> Result<(), StepError> {
        self.probe.at("before undo");
        match undo {
            // What these steps set up ended with the record's boot; what is there now belongs to another
            // claim.
            Undo::SettleMig { .. }
            | Undo::DestroyPartition { .. }
            | Undo::ResetTimeSlice { .. }
            | Undo::ResetComputeMode { .. }
                if record.boot_id != boot_id => {}
            Undo::SettleMig { gpu } => self.settle_mig(record, gpu, ledger),
            Undo::DestroyPartition { gpu, placement } => self.destroy(record, gpu, *placement, ledger)?,
            Undo::ResetTimeSlice { gpu } => self.reset_time_slice(record, gpu, ledger),
            Undo::UnbindVfio { gpu, address } => self.unbind_vfio(record, gpu, address, boot_id)?,
            // Files that stay do not keep the claim from being released: the next start looks for them again.
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
            // The pending change is taken back: a reset at any later time would switch a mode that nobody
            // wants any more.
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

    /// Switches MIG mode off if this was the last partition. A mode that stays on does no harm, because a
    /// whole-GPU claim switches it off itself. So failures only cause a warning.
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

    /// Returns true if the driver is not loaded, so that no partition exists. The kernel must list none of
    /// the driver's devices either.
    fn is_unloaded(&self, error: &GpuError) -> bool {
        let not_listed = |majors: Majors| matches!(majors.gpu(0), Err(DeviceError::NoDriver(_)));
        (error.is_no_driver() || error.is_no_library()) && Majors::read(&self.proc_root).is_ok_and(not_listed)
    }

    /// Resets the time slice. As with MIG mode, a time slice that stays does not keep a claim from being
    /// released.
    fn reset_time_slice(&self, record: &Record, gpu: &GpuUuid, ledger: &Ledger) {
        let Record { claim, boot_id, .. } = record;
        if ledger.has_others_here(&claim.uid, gpu, boot_id, |device| device.time_slice.is_some()) {
            return;
        }
        if let Err(error) = self.gpus.set_time_slice(gpu, TimeSlice::Default) {
            tracing::warn!(gpu.uuid = %gpu, %error, "the time slice stays as the claim had it");
        }
    }

    /// Returns true if the claim's CDI spec is there.
    pub fn has_spec(&self, record: &Record) -> bool {
        let name = edits::spec_name(&self.site.driver, &record.claim.uid);
        self.cdi.list(&name).is_ok_and(|names| names.contains(&name))
    }

    /// Builds the claim's CDI spec from the hardware as it is now.
    ///
    /// # Errors
    /// Fails with [`StepError`] if something that the spec must name is not there.
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

    /// Labels the existing files that containers get when they start again. Returns the errors of those that
    /// could not be labelled.
    pub fn label_existing(&self) -> Vec<LabelError> {
        let Self { limiter_dir, data_dir, site, labels, .. } = self;
        Existing { limiter_dir, data_dir, shares: &site.shares_dir }.label(labels)
    }

    /// Finds the limiter of this release, or else the only one that is installed. Its preload file is written
    /// if it is missing, at a path that contains the limiter's version, so that running containers keep
    /// theirs.
    ///
    /// # Errors
    /// Fails with [`StepError::NoLimiter`] if there is none, or [`StepError::Label`] if containers could not
    /// read it.
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

/// Returns the device and inode of a file or directory.
pub(crate) fn identity(path: &str) -> Result<(u64, u64), StoreError> {
    use std::os::unix::fs::MetadataExt;
    let meta = fs::metadata(path).map_err(io_error("look at", Path::new(path)))?;
    Ok((meta.dev(), meta.ino()))
}

/// Returns the version and directory of the limiter to mount.
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

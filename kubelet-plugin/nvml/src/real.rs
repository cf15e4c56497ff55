//! Implements the GPUs of a node with the real library.

use crate::boards::Boards;
use crate::events::Listening;
use crate::program::Ended;
use crate::raw::{DeviceHandle, ProcessList};
use crate::{
    Cause, ComputeMode, Destroyed, DriverInfo, EventSource, GpuError, GpuHealth, GpuProcess, Gpus, MemoryUse,
    MigMode, ModeChange, NvmlCode, Opened, Operation, ProcessKind, ProcessTime, TimeSlice, Unreadable, facts,
    mig,
};
use aliquot_model::{GpuInfo, GpuUuid, LiveMig, Placement};
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::enum_wrappers::device::ComputeMode as NvmlComputeMode;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// The longest time that a program of the driver may run.
const PROGRAM_LIMIT: Duration = Duration::from_secs(10);

/// The paths on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The path of the library; a bare file name is looked up as the dynamic loader does.
    pub library: PathBuf,
    /// The root of sysfs.
    pub sys_root: PathBuf,
    /// The path of the driver's `nvidia-smi`, for operations that NVML has no call for.
    pub nvidia_smi: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { library: "libnvidia-ml.so.1".into(), sys_root: "/sys".into(), nvidia_smi: None }
    }
}

/// The GPUs of this node through `libnvidia-ml.so.1`.
pub struct NvmlGpus {
    nvml: Arc<Nvml>,
    options: Options,
    listening: Listening,
    boards: Boards,
}

impl NvmlGpus {
    /// Loads and starts the library. If all GPUs of the node have gone missing, this is no error: its
    /// inventory is empty.
    pub fn open(options: Options) -> Result<Self, GpuError> {
        let failed = |cause: Cause| GpuError::of_library(Operation::Load(options.library.clone()), cause);
        let start = |flags| Nvml::builder().lib_path(options.library.as_os_str()).flags(flags).init();
        let nvml = match start(InitFlags::NO_GPUS) {
            // Libraries from before R396 know no flags.
            Err(NvmlError::FailedToLoadSymbol(_)) => start(InitFlags::empty()),
            other => other,
        };
        let nvml = Arc::new(nvml.map_err(|error| failed(error.into()))?);
        Ok(Self { nvml, options, listening: Listening::default(), boards: Boards::default() })
    }

    /// Wraps the library together with a function that tells whether the library, or an event set of it, is
    /// still held.
    pub fn opened(self) -> Opened {
        let nvml = Arc::downgrade(&self.nvml);
        Opened { gpus: Arc::new(self), held: Box::new(move || nvml.strong_count() > 0) }
    }

    fn device(&self, gpu: &GpuUuid) -> Result<Device<'_>, GpuError> {
        self.nvml
            .device_by_uuid(gpu.as_str())
            .map_err(|error| GpuError::on(gpu, Operation::Read("handle"), error))
    }

    fn facts(
        &self,
        device: &Device<'_>,
        index: u32,
        gpu: &GpuUuid,
        driver: &DriverInfo,
    ) -> Result<GpuInfo, GpuError> {
        facts::read(&self.nvml, device, index, gpu, driver, &self.options.sys_root, &self.boards)
    }

    fn handle<'a>(&'a self, device: &Device<'a>) -> DeviceHandle<'a> {
        DeviceHandle::of(&self.nvml, device)
    }

    fn mode(device: &Device<'_>, gpu: &GpuUuid, operation: Operation) -> Result<MigMode, GpuError> {
        let mode =
            facts::mig_mode(device).map_err(|cause| GpuError::on(gpu, Operation::Read("MIG mode"), cause))?;
        mode.ok_or_else(|| GpuError::on(gpu, operation, NvmlCode::NOT_SUPPORTED))
    }
}

impl Gpus for NvmlGpus {
    fn driver(&self) -> Result<DriverInfo, GpuError> {
        let failed = |fact| move |error: NvmlError| GpuError::of_library(Operation::Read(fact), error);
        let driver_version = self.nvml.sys_driver_version().map_err(failed("driver version"))?;
        let cuda = self.nvml.sys_cuda_driver_version().map_err(failed("CUDA version"))?;
        Ok(DriverInfo {
            driver_version,
            cuda_version: (
                cuda_driver_version_major(cuda).unsigned_abs(),
                cuda_driver_version_minor(cuda).unsigned_abs(),
            ),
        })
    }

    fn count(&self) -> Result<u32, GpuError> {
        self.nvml
            .device_count()
            .map_err(|error| GpuError::of_library(Operation::Read("number of GPUs"), error))
    }

    fn identify(&self, index: u32) -> Result<GpuUuid, GpuError> {
        let failed = |fact| move |cause: Cause| GpuError::on_index(index, Operation::Read(fact), cause);
        let device = self.nvml.device_by_index(index).map_err(|error| failed("handle")(error.into()))?;
        facts::uuid(&device).map_err(failed("UUID"))
    }

    fn read(&self, index: u32, driver: &DriverInfo) -> Result<(GpuInfo, Vec<LiveMig>), Unreadable> {
        let gpu = self.identify(index).map_err(|error| Unreadable { index, uuid: None, error })?;
        let all = || {
            let failed = |error: NvmlError| GpuError::on(&gpu, Operation::Read("handle"), error);
            let device = self.nvml.device_by_index(index).map_err(failed)?;
            let info = self.facts(&device, index, &gpu, driver)?;
            Ok((info, facts::live(&self.nvml, &device, &gpu, &self.boards)?))
        };
        all().map_err(|error| Unreadable { index, uuid: Some(gpu.clone()), error })
    }

    fn gpu(&self, gpu: &GpuUuid) -> Result<GpuInfo, GpuError> {
        let device = self.device(gpu)?;
        let index = device.index().map_err(|error| GpuError::on(gpu, Operation::Read("index"), error))?;
        self.facts(&device, index, gpu, &self.driver()?)
    }

    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        Self::mode(&self.device(gpu)?, gpu, Operation::Read("MIG mode"))
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<ModeChange, GpuError> {
        let operation = Operation::SetMigMode { on };
        let device = self.device(gpu)?;
        let before = Self::mode(&device, gpu, operation.clone())?;
        if before == (MigMode { current: on, pending: on }) {
            return Ok(ModeChange::InForce);
        }
        // A refusal can come in two places: the return code, and the status of the activation.
        let status = match self.listening.without(gpu, || device.set_mig_mode(on)) {
            Ok(status) => NvmlCode(status),
            Err(error) => match Cause::from(error) {
                Cause::Nvml(code) => code,
                cause => return Err(GpuError::on(gpu, operation, cause)),
            },
        };
        let after = Self::mode(&device, gpu, operation.clone())?;
        if after.current == on {
            return Ok(ModeChange::InForce);
        }
        if after.pending == on && matches!(status, NvmlCode(0) | NvmlCode::RESET_REQUIRED) {
            return Ok(ModeChange::AfterReset);
        }
        let cause = match status {
            NvmlCode(0) => Cause::Unexpected("NVML reports success, but the mode has not changed".to_owned()),
            code => Cause::Nvml(code),
        };
        let mut error = GpuError::on(gpu, operation, cause);
        if error.is_in_use() {
            error = error.blocked_by(self.processes(gpu).unwrap_or_default());
        }
        if after.pending != before.pending
            && let Err(failure) = device.set_mig_mode(before.pending)
        {
            error = error.leaving(format!("the mode after the next reset is changed: {failure}"));
        }
        Err(error)
    }

    fn live_migs(&self, gpu: &GpuUuid) -> Result<Vec<LiveMig>, GpuError> {
        facts::live(&self.nvml, &self.device(gpu)?, gpu, &self.boards)
    }

    fn create_mig(&self, gpu: &GpuUuid, profile_id: u32, placement: Placement) -> Result<LiveMig, GpuError> {
        let device = self.device(gpu)?;
        mig::create(self.handle(&device), gpu, &self.boards, (profile_id, placement))
    }

    fn destroy_mig(&self, mig: &LiveMig) -> Result<Destroyed, GpuError> {
        let device = self.device(&mig.parent)?;
        match facts::mig_mode(&device) {
            // A GPU with MIG mode off has no instances.
            Ok(Some(MigMode { current: false, .. }) | None) => return Ok(Destroyed::WasGone),
            Ok(Some(_)) => {}
            Err(cause) => return Err(GpuError::on(&mig.parent, Operation::Read("MIG mode"), cause)),
        }
        mig::destroy(self.handle(&device), mig, &self.boards).map_err(|error| {
            if !error.is_in_use() {
                return error;
            }
            let mut inside = self.processes(&mig.parent).unwrap_or_default();
            inside.retain(|process| process.gpu_instance.is_none_or(|gi| gi == mig.gpu_instance));
            error.blocked_by(inside)
        })
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        let device = self.device(gpu)?;
        let handle = self.handle(&device);
        let mut found = Vec::new();
        for (kind, list) in [
            (ProcessKind::Compute, ProcessList::Compute),
            (ProcessKind::Mps, ProcessList::Mps),
            (ProcessKind::Graphics, ProcessList::Graphics),
        ] {
            let processes = match handle.processes(list) {
                Ok(processes) => processes,
                // Some boards have no graphics, and some drivers no MPS.
                Err(NvmlCode::NOT_SUPPORTED | NvmlCode::FUNCTION_NOT_FOUND) => continue,
                Err(code) => return Err(GpuError::on(gpu, Operation::Read("list of processes"), code)),
            };
            found.extend(processes.into_iter().map(|process| GpuProcess {
                pid: process.pid,
                name: self.nvml.sys_process_name(process.pid, 256).ok().and_then(|path| program(&path)),
                kind,
                memory_bytes: process.memory_bytes,
                gpu_instance: process.gpu_instance,
                compute_instance: process.compute_instance,
            }));
        }
        found.sort_by_key(|process| (process.pid, process.kind, process.gpu_instance));
        Ok(found)
    }

    fn utilization(&self, gpu: &GpuUuid, since_us: u64) -> Result<Vec<ProcessTime>, GpuError> {
        let device = self.device(gpu)?;
        match self.handle(&device).utilization(since_us) {
            Err(NvmlCode::NOT_SUPPORTED | NvmlCode::FUNCTION_NOT_FOUND) => Ok(Vec::new()),
            other => other.map_err(|code| GpuError::on(gpu, Operation::Read("GPU time of processes"), code)),
        }
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<MemoryUse, GpuError> {
        let info = self
            .device(gpu)?
            .memory_info()
            .map_err(|error| GpuError::on(gpu, Operation::Read("memory in use"), error))?;
        Ok(MemoryUse { total: info.total, reserved: info.reserved, free: info.free, used: info.used })
    }

    fn compute_mode(&self, gpu: &GpuUuid) -> Result<ComputeMode, GpuError> {
        let mode = self
            .device(gpu)?
            .compute_mode()
            .map_err(|error| GpuError::on(gpu, Operation::Read("compute mode"), error))?;
        Ok(match mode {
            NvmlComputeMode::Default => ComputeMode::Default,
            NvmlComputeMode::ExclusiveProcess | NvmlComputeMode::ExclusiveThread => {
                ComputeMode::ExclusiveProcess
            }
            NvmlComputeMode::Prohibited => ComputeMode::Prohibited,
        })
    }

    fn set_compute_mode(&self, gpu: &GpuUuid, mode: ComputeMode) -> Result<(), GpuError> {
        let mode = match mode {
            ComputeMode::Default => NvmlComputeMode::Default,
            ComputeMode::ExclusiveProcess => NvmlComputeMode::ExclusiveProcess,
            ComputeMode::Prohibited => NvmlComputeMode::Prohibited,
        };
        self.device(gpu)?
            .set_compute_mode(mode)
            .map_err(|error| GpuError::on(gpu, Operation::SetComputeMode, error))
    }

    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        match self.device(gpu)?.is_in_persistent_mode() {
            Ok(on) => Ok(on),
            Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => Ok(false),
            Err(error) => Err(GpuError::on(gpu, Operation::Read("persistence mode"), error)),
        }
    }

    fn set_persistence_mode(&self, gpu: &GpuUuid, on: bool) -> Result<(), GpuError> {
        self.device(gpu)?
            .set_persistent(on)
            .map_err(|error| GpuError::on(gpu, Operation::SetPersistenceMode { on }, error))
    }

    fn set_time_slice(&self, gpu: &GpuUuid, slice: TimeSlice) -> Result<(), GpuError> {
        let program = |text: String| GpuError::on(gpu, Operation::SetTimeSlice, Cause::Program(text));
        let Some(path) = &self.options.nvidia_smi else {
            return Err(program("no nvidia-smi was found".to_owned()));
        };
        let number = slice.number().to_string();
        let arguments = ["compute-policy", "-i", gpu.as_str(), "--set-timeslice", &number];
        let mut command = Command::new(path);
        command.args(arguments);
        if let Some(folder) = self.options.library.parent().filter(|folder| folder.is_absolute()) {
            command.env("LD_LIBRARY_PATH", folder);
        }
        let shown = format!("{} {}", path.display(), arguments.join(" "));
        match crate::program::run(&mut command, PROGRAM_LIMIT) {
            Err(error) => Err(program(format!("{shown} did not start: {error}"))),
            Ok(Ended::Exited(status, _)) if status.success() => Ok(()),
            Ok(Ended::Exited(status, said)) => Err(program(format!("{shown}: {status}: {said}"))),
            Ok(Ended::Killed) => {
                Err(program(format!("{shown} did not end within {PROGRAM_LIMIT:?} and was killed")))
            }
        }
    }

    fn health(&self, gpu: &GpuUuid) -> Result<GpuHealth, GpuError> {
        let device = self.device(gpu)?;
        let failed = |code: NvmlCode| GpuError::on(gpu, Operation::Read("health"), code);
        facts::health(&device, self.handle(&device)).map_err(failed)
    }

    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, GpuError> {
        Ok(Box::new(self.listening.listen(Arc::clone(&self.nvml), gpus)?))
    }
}

/// Returns the file name of a program's path, without its arguments.
fn program(path: &str) -> Option<String> {
    let first = path.split_whitespace().next()?;
    Some(Path::new(first).file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_what_to_do() {
        let options = Options { library: "/nowhere/libnvidia-ml.so.1".into(), ..Options::default() };
        let error = NvmlGpus::open(options).err().unwrap().to_string();
        assert!(error.starts_with("cannot load /nowhere/libnvidia-ml.so.1: "), "{error}");
        assert!(error.contains("cannot open shared object file"), "{error}");
        assert!(error.ends_with("or name its libnvidia-ml.so.1 with --nvml-library"), "{error}");
    }

    #[test]
    fn programs_are_named_by_their_file() {
        assert_eq!(program("/usr/bin/python3 -m train").as_deref(), Some("python3"));
        assert_eq!(program("nvidia-cuda-mps-server").as_deref(), Some("nvidia-cuda-mps-server"));
        assert_eq!(program(""), None);
    }
}

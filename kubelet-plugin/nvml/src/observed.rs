//! The types that describe what the library reports beyond the vocabulary of `aliquot-model`.

use crate::GpuError;
use aliquot_model::{GpuInfo, GpuUuid, LiveMig, version};
use std::collections::BTreeSet;

/// The versions of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverInfo {
    /// The driver version as NVML prints it, such as `535.104.05`; not always semver.
    pub driver_version: String,
    /// The newest CUDA version that the driver supports, major and minor.
    pub cuda_version: (u32, u32),
}

impl DriverInfo {
    /// Returns the driver version as DRA attributes want it, such as `535.104.5`; `None` if it has no number.
    pub fn driver_semver(&self) -> Option<String> {
        version::normalise(&self.driver_version).map(|version| version.to_string())
    }
}

/// The GPUs of a node at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// The versions of the driver.
    pub driver: DriverInfo,
    /// The GPUs that could be read, in NVML's order.
    pub gpus: Vec<GpuInfo>,
    /// The MIG instances on the GPUs.
    pub live: Vec<LiveMig>,
    /// The GPUs that could not be read.
    pub unreadable: Vec<Unreadable>,
}

impl Inventory {
    /// Builds an inventory from what was read of each GPU.
    pub(crate) fn of(
        driver: DriverInfo,
        all: impl IntoIterator<Item = Result<(GpuInfo, Vec<LiveMig>), Unreadable>>,
    ) -> Self {
        let mut inventory = Self { driver, gpus: Vec::new(), live: Vec::new(), unreadable: Vec::new() };
        for one in all {
            match one {
                Ok((info, live)) => {
                    inventory.gpus.push(info);
                    inventory.live.extend(live);
                }
                Err(gpu) => {
                    tracing::debug!(index = gpu.index, error = %gpu.error, "GPU is not readable");
                    inventory.unreadable.push(gpu);
                }
            }
        }
        inventory
    }

    /// Keeps only the GPUs with these minor numbers, and their instances. GPUs that could not be read stay.
    pub(crate) fn only(mut self, minors: &BTreeSet<u32>) -> Self {
        self.gpus.retain(|gpu| minors.contains(&gpu.minor));
        self.live.retain(|mig| self.gpus.iter().any(|gpu| gpu.uuid == mig.parent));
        self
    }

    /// Returns the GPU with that UUID.
    pub fn gpu(&self, uuid: &GpuUuid) -> Option<&GpuInfo> {
        self.gpus.iter().find(|gpu| &gpu.uuid == uuid)
    }

    /// Returns the instances on a GPU, by ascending start.
    pub fn live_on<'a>(&'a self, uuid: &'a GpuUuid) -> impl Iterator<Item = &'a LiveMig> {
        self.live.iter().filter(move |mig| &mig.parent == uuid)
    }
}

/// A GPU that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// The NVML index.
    pub index: u32,
    /// The GPU's UUID, if that much could be read.
    pub uuid: Option<GpuUuid>,
    /// The reason.
    pub error: GpuError,
}

/// The MIG mode of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigMode {
    /// True if MIG mode is on now.
    pub current: bool,
    /// True if MIG mode is on after the next reset of the GPU.
    pub pending: bool,
}

/// The result of a change of MIG mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeChange {
    /// The mode is in force.
    InForce,
    /// The mode takes effect with the next reset of the GPU (Ampere).
    AfterReset,
}

/// The result of a destroy operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destroyed {
    /// The instance existed and is gone now.
    Now,
    /// The instance did not exist.
    WasGone,
}

/// A process that uses a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcess {
    /// The process ID, as the driver sees it: on the host.
    pub pid: u32,
    /// The name of the program, if the driver reports it.
    pub name: Option<String>,
    /// The kind of work that the process does on the GPU.
    pub kind: ProcessKind,
    /// Bytes of GPU memory that the process uses; `None` where the driver does not count.
    pub memory_bytes: Option<u64>,
    /// The ID of the GPU instance that the process runs in.
    pub gpu_instance: Option<u32>,
    /// The ID of the compute instance that the process runs in.
    pub compute_instance: Option<u32>,
}

impl std::fmt::Display for GpuProcess {
    /// Writes the process as `4711 (python3)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{} ({name})", self.pid),
            None => write!(f, "{}", self.pid),
        }
    }
}

/// The share of a GPU's time that a process had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessTime {
    /// The process ID, as the driver sees it: on the host.
    pub pid: u32,
    /// The time of the measurement, in microseconds of the wall clock.
    pub at_us: u64,
    /// Percent of the time in which the process's kernels ran.
    pub percent: u32,
}

/// The kind of work that a process does on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProcessKind {
    /// The process has CUDA contexts.
    Compute,
    /// The process has CUDA contexts through the Multi-Process Service.
    Mps,
    /// The process draws graphics.
    Graphics,
}

/// The memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes of memory in total.
    pub total: u64,
    /// Bytes reserved by driver and firmware.
    pub reserved: u64,
    /// Bytes not in use.
    pub free: u64,
    /// Bytes in use.
    pub used: u64,
}

/// The compute mode, which decides which processes may have contexts on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process, such as the MPS server.
    ExclusiveProcess,
    /// No process.
    Prohibited,
}

/// The time that a process runs before the next process's turn; the driver has four steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimeSlice {
    /// The driver's default.
    Default,
    /// A short time slice.
    Short,
    /// A medium time slice.
    Medium,
    /// A long time slice.
    Long,
}

impl TimeSlice {
    /// Returns the number that `nvidia-smi compute-policy --set-timeslice` takes.
    pub const fn number(self) -> u32 {
        match self {
            Self::Default => 0,
            Self::Short => 1,
            Self::Medium => 2,
            Self::Long => 3,
        }
    }
}

/// The health that a GPU reports of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpuHealth {
    /// The number of memory errors that could not be corrected, since the driver was loaded or the GPU was
    /// reset; `None` where the board or the driver does not count.
    pub uncorrected_errors: Option<u64>,
    /// The state of row remapping; `None` on boards that do not remap rows (before Ampere).
    pub rows: Option<RowRemapping>,
    /// The action that is needed before the GPU works again; `None` where the driver does not report it
    /// (before R560).
    pub recovery: Option<Recovery>,
}

/// The state of remapping broken rows of memory (`nvmlDeviceGetRemappedRows`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowRemapping {
    /// True if a row is replaced with the next reset.
    pub pending: bool,
    /// True if a row could not be replaced.
    pub failed: bool,
}

/// The recovery action that the driver wants (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// No action is needed.
    Nothing,
    /// An action such as a reset or a reboot is needed; the value is NVML's number.
    Needed(u64),
}

/// An event on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuEvent {
    /// The GPU; `None` if it cannot be named any more.
    pub gpu: Option<GpuUuid>,
    /// The ID of the GPU instance concerned; `None` means the whole GPU.
    pub gpu_instance: Option<u32>,
    /// The ID of the compute instance concerned.
    pub compute_instance: Option<u32>,
    /// The kind of the event.
    pub kind: EventKind,
}

/// The kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// An error that the driver reports by number (NVIDIA's "XID errors").
    Xid(u64),
    /// A memory error that was corrected.
    EccSingleBit,
    /// A memory error that could not be corrected.
    EccDoubleBit,
    /// Another event, by NVML's event bit.
    Other(u64),
}

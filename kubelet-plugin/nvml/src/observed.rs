//! What the library tells beyond the vocabulary of `aliquot-model`.

use crate::GpuError;
use aliquot_model::{GpuInfo, GpuUuid, LiveMig, version};
use std::collections::BTreeSet;

/// The driver's versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverInfo {
    /// As NVML prints it, such as `535.104.05`; not always semver.
    pub driver_version: String,
    /// Newest CUDA version of the driver, major and minor.
    pub cuda_version: (u32, u32),
}

impl DriverInfo {
    /// The driver version as DRA attributes want it, `535.104.5`; `None` if it has no number.
    pub fn driver_semver(&self) -> Option<String> {
        version::normalise(&self.driver_version).map(|version| version.to_string())
    }
}

/// A node at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// The driver.
    pub driver: DriverInfo,
    /// The GPUs that could be read, in NVML's order.
    pub gpus: Vec<GpuInfo>,
    /// The instances on them.
    pub live: Vec<LiveMig>,
    /// The GPUs that could not be read.
    pub unreadable: Vec<Unreadable>,
}

impl Inventory {
    /// From what was read of each GPU.
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

    /// The GPUs with these minor numbers; those that could not be read stay.
    pub(crate) fn only(mut self, minors: &BTreeSet<u32>) -> Self {
        self.gpus.retain(|gpu| minors.contains(&gpu.minor));
        self.live.retain(|mig| self.gpus.iter().any(|gpu| gpu.uuid == mig.parent));
        self
    }

    /// The GPU of that identity.
    pub fn gpu(&self, uuid: &GpuUuid) -> Option<&GpuInfo> {
        self.gpus.iter().find(|gpu| &gpu.uuid == uuid)
    }

    /// The instances on a GPU, by ascending start.
    pub fn live_on<'a>(&'a self, uuid: &'a GpuUuid) -> impl Iterator<Item = &'a LiveMig> {
        self.live.iter().filter(move |mig| &mig.parent == uuid)
    }
}

/// A GPU that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// NVML index.
    pub index: u32,
    /// Its identity, if that much could be read.
    pub uuid: Option<GpuUuid>,
    /// Why.
    pub error: GpuError,
}

/// Whether partitioning is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigMode {
    /// Now.
    pub current: bool,
    /// After the next reset of the GPU.
    pub pending: bool,
}

/// What a change of MIG mode came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeChange {
    /// The mode is in force.
    InForce,
    /// The mode takes effect with the next reset of the GPU (Ampere).
    AfterReset,
}

/// What a destroy came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destroyed {
    /// The instance was there and is gone now.
    Now,
    /// There was no such instance.
    WasGone,
}

/// A process that uses a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcess {
    /// Process id, as the driver sees it: on the host.
    pub pid: u32,
    /// Its program, if the driver tells.
    pub name: Option<String>,
    /// What it does there.
    pub kind: ProcessKind,
    /// Bytes of GPU memory that it uses; `None` where the driver does not count.
    pub memory_bytes: Option<u64>,
    /// GPU instance that it is in.
    pub gpu_instance: Option<u32>,
    /// Compute instance that it is in.
    pub compute_instance: Option<u32>,
}

impl std::fmt::Display for GpuProcess {
    /// `4711 (python3)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{} ({name})", self.pid),
            None => write!(f, "{}", self.pid),
        }
    }
}

/// What a process had of a GPU's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessTime {
    /// Process id, as the driver sees it: on the host.
    pub pid: u32,
    /// When it was measured, in microseconds of the wall clock.
    pub at_us: u64,
    /// Percent of the time in which its kernels ran.
    pub percent: u32,
}

/// What a process does on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProcessKind {
    /// It has CUDA contexts.
    Compute,
    /// It has CUDA contexts through the Multi-Process Service.
    Mps,
    /// It draws.
    Graphics,
}

/// Memory of a GPU in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// All of it.
    pub total: u64,
    /// Kept by driver and firmware.
    pub reserved: u64,
    /// Not in use.
    pub free: u64,
    /// In use.
    pub used: u64,
}

/// Who may have contexts on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Everybody.
    Default,
    /// One process, such as the MPS server.
    ExclusiveProcess,
    /// Nobody.
    Prohibited,
}

/// How long a process runs before the next one's turn; the driver's four steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimeSlice {
    /// The driver's choice.
    Default,
    /// Short.
    Short,
    /// Medium.
    Medium,
    /// Long.
    Long,
}

impl TimeSlice {
    /// The number that `nvidia-smi compute-policy --set-timeslice` takes.
    pub const fn number(self) -> u32 {
        match self {
            Self::Default => 0,
            Self::Short => 1,
            Self::Medium => 2,
            Self::Long => 3,
        }
    }
}

/// What a GPU says of its own health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpuHealth {
    /// Memory errors since the driver was loaded or the GPU was reset that could not be corrected; `None` where the
    /// board or the driver does not count.
    pub uncorrected_errors: Option<u64>,
    /// Its spare rows of memory; `None` on boards that do not remap rows (before Ampere).
    pub rows: Option<RowRemapping>,
    /// What has to be done before it works again; `None` where the driver does not tell (before R560).
    pub recovery: Option<Recovery>,
}

/// How replacing broken rows of memory stands (`nvmlDeviceGetRemappedRows`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowRemapping {
    /// A row is replaced with the next reset.
    pub pending: bool,
    /// A row could not be replaced.
    pub failed: bool,
}

/// What the driver wants done (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Nothing.
    Nothing,
    /// Something, such as a reset or a reboot; NVML's number.
    Needed(u64),
}

/// Something happened to a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuEvent {
    /// The GPU; `None` when it cannot be named any more.
    pub gpu: Option<GpuUuid>,
    /// GPU instance concerned; `None` means the whole GPU.
    pub gpu_instance: Option<u32>,
    /// Compute instance concerned.
    pub compute_instance: Option<u32>,
    /// What.
    pub kind: EventKind,
}

/// Kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// An error that the driver reports by number (NVIDIA's "XID errors").
    Xid(u64),
    /// A memory error that was corrected.
    EccSingleBit,
    /// A memory error that could not be corrected.
    EccDoubleBit,
    /// Another one, by NVML's event bit.
    Other(u64),
}

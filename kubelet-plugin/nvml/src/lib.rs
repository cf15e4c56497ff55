//! Gives access to a node's GPUs through NVML: inventory, MIG modes and instances, processes, events.
//!
//! [`Gpus`] is the interface. [`NvmlGpus`] implements it with the real library (or the simulator's stand-in,
//! loaded from a path). `fake::FakeGpus` (feature `test-util`) implements it with a node that is described in
//! a test. Both pass the same contract, `contract`.
//!
//! Invariants:
//! - The only unsafe code of the node agent is here, in `raw`; no C type leaves it.
//! - A GPU that cannot be read is reported in [`Inventory::unreadable`] and the others are listed.
//! - A create that fails leaves nothing behind, or says in the error what it left.
//! - GPU-instance ids are handles that are used again: [`Gpus::destroy_mig`] destroys an instance only if
//!   profile, placement and UUID are still those of the instance that is meant.
//! - A call that the driver does not answer holds up calls on the same GPU only ([`Timed`]).
//! - A library whose kernel module is gone or another one is closed and opened anew ([`Reopening`]).
//! - Every error names the GPU, the operation, NVML's code and the remedy.
//!
//! Nothing else is decided here: no policy, no retries, no state beside the library's own.
//!
//! Start reading at [`Gpus`], then `real`, `mig` and `timed`.

mod boards;
mod brand;
pub mod caps;
#[cfg(feature = "test-util")]
pub mod contract;
mod error;
mod events;
mod facts;
#[cfg(feature = "test-util")]
pub mod fake;
mod mig;
mod nvlink;
mod observed;
pub mod pci;
mod program;
mod raw;
mod real;
mod reopen;
mod timed;

pub use error::{Cause, GpuError, GpuErrorDetail, NvmlCode, Operation};
pub use observed::{
    ComputeMode, Destroyed, DriverInfo, EventKind, GpuEvent, GpuHealth, GpuProcess, Inventory, MemoryUse,
    MigMode, ModeChange, ProcessKind, ProcessTime, Recovery, RowRemapping, TimeSlice, Unreadable,
};
pub use real::{NvmlGpus, Options};
pub use reopen::{Opened, Pauses, Reopening};
pub use timed::{Calls, Deadlines, Stuck, Timed};

use aliquot_model::{GpuInfo, GpuUuid, LiveMig, Placement};
use std::collections::BTreeSet;
use std::time::Duration;

/// The GPUs of a node. Calls block, some of them for seconds (a change of MIG mode, the creation of an
/// instance), so they must not run on an async thread. All methods may be called from several threads at
/// once; the caller must serialize calls that change one GPU.
pub trait Gpus: Send + Sync {
    /// Returns the driver's versions.
    fn driver(&self) -> Result<DriverInfo, GpuError>;

    /// Returns the number of GPUs that the driver lists. Indexes are smaller than this number.
    fn count(&self) -> Result<u32, GpuError>;

    /// Returns the UUID of the GPU with an index.
    fn identify(&self, index: u32) -> Result<GpuUuid, GpuError>;

    /// Returns the facts of the GPU with an index, and the instances that exist on it.
    fn read(&self, index: u32, driver: &DriverInfo) -> Result<(GpuInfo, Vec<LiveMig>), Unreadable>;

    /// Returns everything that changes slowly: the facts of each GPU, and the instances that exist on it.
    /// Fails only when the library as a whole does not answer.
    fn inventory(&self) -> Result<Inventory, GpuError> {
        let driver = self.driver()?;
        let all: Vec<_> = (0..self.count()?).map(|index| self.read(index, &driver)).collect();
        Ok(Inventory::of(driver, all))
    }

    /// Returns the inventory of the GPUs with these minor numbers. GPUs that cannot be read are listed if
    /// they may be one of these.
    fn inventory_of(&self, minors: &BTreeSet<u32>) -> Result<Inventory, GpuError> {
        Ok(self.inventory()?.only(minors))
    }

    /// Returns the facts of one GPU, read anew.
    fn gpu(&self, gpu: &GpuUuid) -> Result<GpuInfo, GpuError>;

    /// Returns whether MIG mode is on, now and after the next reset.
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError>;

    /// Switches MIG mode. If something holds the GPU, the error names the processes, and the pending mode is
    /// put back, so that no later reset switches a mode that nobody wants any more.
    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<ModeChange, GpuError>;

    /// Returns the GPU instances that exist, by ascending start; empty without MIG or with the mode off.
    fn live_migs(&self, gpu: &GpuUuid) -> Result<Vec<LiveMig>, GpuError>;

    /// Creates a GPU instance of a profile (its ID as `nvidia-smi mig -lgip` lists it) at a placement, and in
    /// it the compute instance that takes all of it. If the second fails, the first is undone.
    fn create_mig(&self, gpu: &GpuUuid, profile_id: u32, placement: Placement) -> Result<LiveMig, GpuError>;

    /// Destroys an instance with all its compute instances. If the instance is no longer there, or its ID now
    /// belongs to another instance, returns [`Destroyed::WasGone`].
    fn destroy_mig(&self, mig: &LiveMig) -> Result<Destroyed, GpuError>;

    /// Returns the processes that use the GPU, including its instances. Empty where the driver hides
    /// processes.
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError>;

    /// Returns the percentage of the GPU's time that each process had in the driver's last sample period
    /// (about a second), if that period ended after `since_us` (microseconds of the wall clock). Processes
    /// without GPU time are left out, as are all processes where the driver does not count (MIG mode, old
    /// boards).
    fn utilization(&self, gpu: &GpuUuid, since_us: u64) -> Result<Vec<ProcessTime>, GpuError>;

    /// Returns the GPU's memory in use, in bytes.
    fn memory(&self, gpu: &GpuUuid) -> Result<MemoryUse, GpuError>;

    /// Returns the compute mode.
    fn compute_mode(&self, gpu: &GpuUuid) -> Result<ComputeMode, GpuError>;

    /// Sets the compute mode.
    fn set_compute_mode(&self, gpu: &GpuUuid, mode: ComputeMode) -> Result<(), GpuError>;

    /// Returns true if the driver keeps the GPU initialised while nothing uses it; false where it has no such
    /// mode.
    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError>;

    /// Switches persistence mode, in which the driver keeps the GPU initialised while nothing uses it
    /// (`nvmlDeviceSetPersistenceMode`). If nvidia-persistenced runs and its socket can be reached, the
    /// library asks it.
    fn set_persistence_mode(&self, gpu: &GpuUuid, on: bool) -> Result<(), GpuError>;

    /// Sets the time that a process runs before the next process's turn. NVML has no call for it, so this
    /// runs the driver's `nvidia-smi`.
    fn set_time_slice(&self, gpu: &GpuUuid, slice: TimeSlice) -> Result<(), GpuError>;

    /// Returns the health that the GPU reports of itself.
    fn health(&self, gpu: &GpuUuid) -> Result<GpuHealth, GpuError>;

    /// Starts to listen for errors of these GPUs.
    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, GpuError>;
}

/// A source of GPU errors as they happen.
pub trait EventSource: Send {
    /// Returns the next event, or `None` after `timeout` without one.
    fn next(&mut self, timeout: Duration) -> Result<Option<GpuEvent>, GpuError>;

    /// Returns the GPUs that cannot be listened to although that was asked for, with the reason.
    fn unmonitored(&self) -> &[(GpuUuid, GpuError)];
}

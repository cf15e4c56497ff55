//! GPUs of a node through NVML: inventory, MIG modes and instances, processes, events.
//!
//! [`Gpus`] is the seam: [`NvmlGpus`] is the real library (or the simulator's stand-in, loaded from a
//! path), `fake::FakeGpus` (feature `test-util`) a node written down in a test. Both pass the same
//! contract, `contract`.
//!
//! What holds:
//! - The only unsafe code of the node agent is here, in `raw`; no C type leaves it.
//! - A GPU that cannot be read is reported in [`Inventory::unreadable`] and the others are listed.
//! - A create that fails leaves nothing behind, or says in the error what it left.
//! - GPU-instance ids are handles that are used again: [`Gpus::destroy_mig`] destroys an instance
//!   only if profile, place and UUID are still those of the instance that is meant.
//! - A call that the driver does not answer holds up calls on the same GPU only ([`Timed`]).
//! - A library whose kernel module is gone or another one is closed and opened anew ([`Reopening`]).
//! - Every error names the GPU, what was tried, NVML's code and what to do.
//!
//! Nothing here decides anything else: no policy, no retries, no state beside the library's own.
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
/// instance): not for an async thread. Everything may be called from several threads at once; calls
/// that change one GPU are the caller's to put in order.
pub trait Gpus: Send + Sync {
    /// The driver's versions.
    fn driver(&self) -> Result<DriverInfo, GpuError>;

    /// How many GPUs the driver lists. Their indexes are the numbers below.
    fn count(&self) -> Result<u32, GpuError>;

    /// The identity of the GPU with an index.
    fn identify(&self, index: u32) -> Result<GpuUuid, GpuError>;

    /// What the GPU with an index is, and the instances that exist on it.
    fn read(&self, index: u32, driver: &DriverInfo) -> Result<(GpuInfo, Vec<LiveMig>), Unreadable>;

    /// Everything that is slow to change: what each GPU is, and the instances that exist on it.
    /// Fails only when the library as a whole does not answer.
    fn inventory(&self) -> Result<Inventory, GpuError> {
        let driver = self.driver()?;
        let all: Vec<_> = (0..self.count()?).map(|index| self.read(index, &driver)).collect();
        Ok(Inventory::of(driver, all))
    }

    /// The same of the GPUs with these minor numbers. Those that cannot be read are listed, as far as they
    /// may be one of these.
    fn inventory_of(&self, minors: &BTreeSet<u32>) -> Result<Inventory, GpuError> {
        Ok(self.inventory()?.only(minors))
    }

    /// The facts of one GPU, read anew.
    fn gpu(&self, gpu: &GpuUuid) -> Result<GpuInfo, GpuError>;

    /// Whether partitioning is on, now and after the next reset.
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError>;

    /// Switches partitioning. When something holds the GPU the error names the processes, and the
    /// mode pending is put back, so that no later reset switches what nobody wants any more.
    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<ModeChange, GpuError>;

    /// The GPU instances that exist, by ascending start; empty without MIG or with the mode off.
    fn live_migs(&self, gpu: &GpuUuid) -> Result<Vec<LiveMig>, GpuError>;

    /// Creates a GPU instance of a profile (its lgip id) at a place, and in it the compute instance
    /// that takes all of it. Undoes the first when the second fails.
    fn create_mig(&self, gpu: &GpuUuid, profile_id: u32, placement: Placement) -> Result<LiveMig, GpuError>;

    /// Destroys an instance with all its compute instances. An instance that is no longer there, or
    /// whose id now belongs to another one, is [`Destroyed::WasGone`].
    fn destroy_mig(&self, mig: &LiveMig) -> Result<Destroyed, GpuError>;

    /// Who uses the GPU, its instances included. Empty where the driver hides processes.
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError>;

    /// How much of the GPU's time each process had in the driver's last sample period (about a second), as far as
    /// that ended after `since_us` (microseconds of the wall clock). Processes that had none are left out, as are
    /// all where the driver does not count (MIG mode, old boards).
    fn utilization(&self, gpu: &GpuUuid, since_us: u64) -> Result<Vec<ProcessTime>, GpuError>;

    /// How much of the GPU's memory is in use.
    fn memory(&self, gpu: &GpuUuid) -> Result<MemoryUse, GpuError>;

    /// Who may have contexts.
    fn compute_mode(&self, gpu: &GpuUuid) -> Result<ComputeMode, GpuError>;

    /// Sets who may have contexts.
    fn set_compute_mode(&self, gpu: &GpuUuid, mode: ComputeMode) -> Result<(), GpuError>;

    /// Whether the driver keeps the GPU initialised while nothing uses it; not where it has no such mode.
    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError>;

    /// Has the driver keep the GPU initialised while nothing uses it, or not (`nvmlDeviceSetPersistenceMode`). Where
    /// nvidia-persistenced runs and its socket can be reached, the library asks it.
    fn set_persistence_mode(&self, gpu: &GpuUuid, on: bool) -> Result<(), GpuError>;

    /// Sets how long a process runs before the next one's turn. NVML has no call for it, so this runs
    /// the driver's `nvidia-smi`.
    fn set_time_slice(&self, gpu: &GpuUuid, slice: TimeSlice) -> Result<(), GpuError>;

    /// What the GPU says of its own health.
    fn health(&self, gpu: &GpuUuid) -> Result<GpuHealth, GpuError>;

    /// Listens for errors of these GPUs.
    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, GpuError>;
}

/// Errors of GPUs as they happen.
pub trait EventSource: Send {
    /// The next event, or `None` after `timeout` without one.
    fn next(&mut self, timeout: Duration) -> Result<Option<GpuEvent>, GpuError>;

    /// GPUs that were asked for and cannot be listened to, with the reason.
    fn unmonitored(&self) -> &[(GpuUuid, GpuError)];
}

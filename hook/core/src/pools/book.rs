//! The pools that this process has used.

use crate::device::Device;
use crate::lock::Mutex;
use crate::map::Map;

/// A pool that this process has used.
#[derive(Clone, Copy)]
pub(super) struct Pool {
    /// The device plus one; 0 = memory that is not charged here (host memory, another process's pool).
    pub(super) device: u16,
    /// True once the driver has been told to destroy it.
    pub(super) destroyed: bool,
    /// Bytes charged for the pool, calls in flight included.
    pub(super) charged: u64,
    /// Bytes charged for calls in flight.
    pub(super) in_flight: u64,
    /// The number of allocations that the program holds.
    pub(super) outstanding: u64,
}

impl Pool {
    /// Returns the device that the pool is charged on.
    pub(super) fn device(&self) -> Option<Device> {
        self.device.checked_sub(1).map(usize::from)
    }
}

/// The pools that this process has used. The lock is held while a pool's attributes are read, which never
/// blocks: what is read must not be older than what is charged.
pub(super) static POOLS: Mutex<Map<Pool>> = Mutex::new(Map::new());

/// Forgets all pools, in a forked child.
pub(crate) fn renew_after_fork() {
    POOLS.renew_after_fork();
    POOLS.lock().clear();
}

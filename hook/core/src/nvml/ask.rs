//! What NVML is asked: for devices, for their processes, and for what this process holds by the driver's own
//! account.

use crate::real::{self, call};
use crate::sys;
use aliquot_quota::GpuUuid;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// `NVML_ERROR_INSUFFICIENT_SIZE`
pub(super) const INSUFFICIENT_SIZE: i32 = 7;
/// `NVML_ERROR_GPU_IS_LOST`
pub(crate) const GPU_IS_LOST: i32 = 15;
/// `NVML_VALUE_NOT_AVAILABLE`
const NOT_AVAILABLE: u64 = u64::MAX;

/// True if this process came into NVML's list together with its first context, so that the pids there are
/// those of its own namespace.
static SHOWS_OUR_PIDS: AtomicBool = AtomicBool::new(false);

/// Notes that NVML's pids are those of this process's namespace.
pub(crate) fn trust_pids() {
    SHOWS_OUR_PIDS.store(true, Relaxed);
}

/// Returns true if NVML's pids are known to be those of this process's namespace.
pub(crate) fn shows_our_pids() -> bool {
    SHOWS_OUR_PIDS.load(Relaxed)
}

/// The memory of this process, as NVML shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// The process holds this many bytes.
    Listed(u64),
    /// The process is not in the list.
    NotListed,
    /// NVML cannot be asked, or does not know.
    Unknown,
}

/// Returns the handle of a GPU or MIG device that the container has. The error is NVML's code if the
/// container has none, and `None` if NVML cannot be asked.
pub(crate) fn device(uuid: &GpuUuid) -> Result<usize, Option<i32>> {
    static STARTED: AtomicBool = AtomicBool::new(false);
    // Once per process: NVML counts its users, and ours never leaves.
    // SAFETY: NVML's function without arguments.
    if !STARTED.load(Relaxed) && unsafe { real::nvmlInit_v2() } != Some(0) {
        return Err(None);
    }
    STARTED.store(true, Relaxed);
    let mut handle = 0;
    // SAFETY: the UUID is zero padded; NVML writes one handle.
    match unsafe { real::nvmlDeviceGetHandleByUUID(uuid.as_bytes().as_ptr().cast(), &mut handle) } {
        Some(0) => Ok(handle),
        code => Err(code),
    }
}

/// Returns the processes that compute on a GPU or MIG device, by NVML's account.
pub(crate) fn computing(uuid: &GpuUuid) -> Option<List> {
    let handle = device(uuid).ok()?;
    let driver = |count: *mut u32, infos: *mut u8| {
        // SAFETY: NVML writes at most `count` records.
        unsafe { call!(nvmlDeviceGetComputeRunningProcesses_v3(handle, count, infos)) }
    };
    List::ask(24, driver).ok()
}

/// Returns the memory that this process holds on the GPU or MIG device of a UUID, by NVML's account.
pub(crate) fn used_by_us(uuid: Option<GpuUuid>) -> Use {
    let Some(list) = uuid.and_then(|uuid| computing(&uuid)) else { return Use::Unknown };
    match list.find(sys::process_id()).map(used) {
        Some(NOT_AVAILABLE) => Use::Unknown,
        Some(bytes) => Use::Listed(bytes),
        None => Use::NotListed,
    }
}

/// Returns the pid of a record.
pub(super) fn pid(record: &[u8]) -> u32 {
    record.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn used(record: &[u8]) -> u64 {
    record.get(8..16).and_then(|bytes| bytes.try_into().ok()).map_or(NOT_AVAILABLE, u64::from_le_bytes)
}

/// A list of processes, in memory of its own, because callers may be on small stacks.
pub(crate) struct List {
    bytes: *mut u8,
    size: usize,
    record: usize,
    count: usize,
}

impl List {
    /// Asks for a list of records of this size, with as much room as it takes. The error is NVML's code.
    pub(super) fn ask(record: usize, driver: impl Fn(*mut u32, *mut u8) -> i32) -> Result<Self, i32> {
        let mut room = 128_u32;
        loop {
            let size = room as usize * record;
            let bytes = sys::memory(size);
            if bytes.is_null() {
                return Err(INSUFFICIENT_SIZE);
            }
            let mut list = Self { bytes, size, record, count: 0 };
            let mut count = room;
            match driver(&mut count, bytes) {
                0 => {
                    list.count = (count.min(room)) as usize;
                    return Ok(list);
                }
                INSUFFICIENT_SIZE if room < 1 << 20 => room = count.max(room) * 2,
                code => return Err(code),
            }
        }
    }

    /// Returns the number of processes.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Returns the record of a process.
    pub(super) fn find(&self, us: u32) -> Option<&[u8]> {
        (0..self.count).filter_map(|index| self.record(index)).find(|record| pid(record) == us)
    }

    /// Returns true if a process of this pid namespace no longer holds anything on the GPU. Only a list that
    /// shows pids of this namespace can tell, and such a list also has this process.
    pub(crate) fn lacks(&self, dead: u32) -> bool {
        SHOWS_OUR_PIDS.load(Relaxed) && self.find(sys::process_id()).is_some() && self.find(dead).is_none()
    }

    /// Returns the record at an index below the number of processes.
    pub(super) fn record(&self, index: usize) -> Option<&[u8]> {
        // SAFETY: the memory holds `count` records of this size.
        (index < self.count)
            .then(|| unsafe { core::slice::from_raw_parts(self.bytes.add(index * self.record), self.record) })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: our own memory; nothing refers to it any more.
        unsafe { sys::free_memory(self.bytes, self.size) };
    }
}

//! NVML: what this process holds by the driver's own account, and what the tenant is shown.

use crate::account;
use crate::config;
use crate::device::{self, Device};
use crate::real::{self, call};
use crate::share::{Page, pid_namespace};
use crate::state::{self, Mode};
use crate::sys;
use aliquot_quota::GpuUuid;
use aliquot_quota::measured::Process;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// `NVML_ERROR_NO_PERMISSION`
pub(crate) const NO_PERMISSION: i32 = 4;
/// `NVML_ERROR_NOT_FOUND`
pub(crate) const NOT_FOUND: i32 = 6;
/// `NVML_ERROR_INSUFFICIENT_SIZE`
const INSUFFICIENT_SIZE: i32 = 7;
/// `NVML_ERROR_GPU_IS_LOST`
pub(crate) const GPU_IS_LOST: i32 = 15;
/// `NVML_ERROR_NOT_READY`
pub(crate) const NOT_READY: i32 = 27;
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

/// Returns the memory that this process holds on a device, by NVML's account.
pub(crate) fn used_by_us(device: Device) -> Use {
    let mask = device::shares_of(device);
    let share = config::shares().iter().enumerate().find(|(index, _)| mask >> index & 1 == 1);
    let uuid = share.and_then(|(_, share)| share.uuid());
    let Some(list) = uuid.and_then(|uuid| computing(&uuid)) else { return Use::Unknown };
    match list.find(sys::process_id()).map(used) {
        Some(NOT_AVAILABLE) => Use::Unknown,
        Some(bytes) => Use::Listed(bytes),
        None => Use::NotListed,
    }
}

fn pid(record: &[u8]) -> u32 {
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
    fn ask(record: usize, driver: impl Fn(*mut u32, *mut u8) -> i32) -> Result<Self, i32> {
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
    fn find(&self, us: u32) -> Option<&[u8]> {
        (0..self.count).filter_map(|index| self.record(index)).find(|record| pid(record) == us)
    }

    /// Returns true if a process of this pid namespace no longer holds anything on the GPU. Only a list that
    /// shows pids of this namespace can tell, and such a list also has this process.
    pub(crate) fn lacks(&self, dead: u32) -> bool {
        SHOWS_OUR_PIDS.load(Relaxed) && self.find(sys::process_id()).is_some() && self.find(dead).is_none()
    }

    fn record(&self, index: usize) -> Option<&[u8]> {
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

/// Returns the UUID of a device handle, if a share is on that device.
fn limited(handle: usize) -> Option<[u8; 96]> {
    if state::mode() != Mode::Limited {
        return None;
    }
    let mut uuid = [0; 96];
    // SAFETY: NVML writes a terminated text of at most 96 bytes.
    if unsafe { real::nvmlDeviceGetUUID(handle, uuid.as_mut_ptr(), 96) } != Some(0) {
        return None;
    }
    config::shares().iter().any(|share| is_on(share, &uuid)).then_some(uuid)
}

/// Returns what NVML answers about the memory and processes of a device without being asked, if anything. Of
/// a GPU that is divided into partitions, a container with a share of one partition learns nothing as a
/// whole: that is other tenants' use, and memory that it cannot have. The driver itself gives this answer to
/// whoever may not monitor all partitions, so programs know it.
pub(crate) fn refusal(handle: usize) -> Option<i32> {
    match state::mode() {
        Mode::Failed => Some(NOT_READY),
        Mode::Limited if config::has_partitions() && is_divided(handle) => Some(NO_PERMISSION),
        _ => None,
    }
}

/// Returns true if a handle is of a GPU in MIG mode; false for MIG devices.
fn is_divided(handle: usize) -> bool {
    let (mut current, mut pending) = (0, 0);
    // SAFETY: NVML writes a terminated text of at most 96 bytes, and two numbers.
    unsafe {
        let mut uuid = [0; 96];
        real::nvmlDeviceGetUUID(handle, uuid.as_mut_ptr(), 96) == Some(0)
            && uuid.starts_with(b"GPU-")
            && real::nvmlDeviceGetMigMode(handle, &mut current, &mut pending) == Some(0)
            && current != 0
    }
}

fn text(uuid: &[u8; 96]) -> &[u8] {
    uuid.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn is_on(share: &crate::share::Share, uuid: &[u8; 96]) -> bool {
    share.uuid().is_some_and(|id| id.as_str().as_bytes() == text(uuid))
}

/// Replaces a GPU's or MIG device's total, free and used bytes by the tenant's own. Returns false if no share
/// is on it.
pub(crate) fn memory(handle: usize, total: &mut u64, free: &mut u64, used: &mut u64) -> bool {
    let Some(uuid) = limited(handle) else { return false };
    for share in config::shares().iter().filter(|share| is_on(share, &uuid)) {
        let _ = share.map();
    }
    let Some(seen) = account::seen_by_uuid(text(&uuid), *free, *total) else { return false };
    (*total, *free, *used) = (seen.total, seen.free, seen.used);
    true
}

/// Lists processes without those of other tenants.
///
/// # Safety
/// `count` and `infos` are as the caller of NVML passed them: a count, and room for as many records.
pub(crate) unsafe fn processes(
    handle: usize,
    count: *mut u32,
    infos: *mut u8,
    record: usize,
    driver: impl Fn(*mut u32, *mut u8) -> i32,
) -> i32 {
    if let Some(code) = refusal(handle) {
        return code;
    }
    let Some(uuid) = limited(handle).filter(|_| !count.is_null()) else { return driver(count, infos) };
    let list = match List::ask(record, driver) {
        Ok(list) => list,
        Err(code) => return code,
    };
    let ours = Ours::new(&uuid, |pid| list.find(pid).is_some());
    let mut kept = 0_u32;
    // SAFETY: the caller's pointer to one count.
    let room = if infos.is_null() { 0 } else { unsafe { *count } };
    for record in (0..list.count).filter_map(|index| list.record(index)) {
        if !ours.has(pid(record)) {
            continue;
        }
        if kept < room {
            // SAFETY: the caller's array has `room` records.
            unsafe { infos.add(kept as usize * list.record).copy_from(record.as_ptr(), list.record) };
        }
        kept += 1;
    }
    // SAFETY: as above.
    unsafe { *count = kept };
    if kept > room { INSUFFICIENT_SIZE } else { 0 }
}

/// The pids by which NVML names processes, as far as can be told; so it says which listed processes are of
/// the claim.
struct Ours<'a> {
    uuid: &'a [u8; 96],
    names: Names,
    /// The node agent's measurements of the shares on the GPU.
    pages: [Option<Page>; config::MOST],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Names {
    /// Pids of this process's namespace.
    Ours,
    /// Pids of the node; the node agent knows which of them are the claim's.
    Nodes,
    /// Pids of none of the claim's processes.
    Nobodys,
}

impl<'a> Ours<'a> {
    fn new(uuid: &'a [u8; 96], lists: impl Fn(u32) -> bool) -> Self {
        let mut pages = [const { None }; config::MOST];
        let on_it = config::shares().iter().filter(|share| is_on(share, uuid));
        for (page, share) in pages.iter_mut().zip(on_it) {
            let _ = share.map();
            *page = share.measured().filter(|page| page.fresh().is_some());
        }
        let mut ours = Self { uuid, names: Names::Ours, pages };
        // Without an agent nobody can tell.
        if !shows_our_pids() && ours.pages.iter().any(Option::is_some) {
            let (here, mut as_ours, mut as_nodes) = (pid_namespace(), 0, 0);
            for process in ours.measured() {
                as_nodes += u32::from(lists(process.host_pid));
                as_ours += u32::from(process.identity.pid_namespace == here && lists(process.identity.pid));
            }
            // The processes themselves tell, as a pid that is found by chance is found for one of them at
            // most.
            ours.names = match (as_ours, as_nodes) {
                (0, 0) => Names::Nobodys,
                (as_ours, as_nodes) if as_nodes >= as_ours => Names::Nodes,
                _ => Names::Ours,
            };
        }
        ours
    }

    fn measured(&self) -> impl Iterator<Item = Process> {
        self.pages.iter().flatten().filter_map(Page::fresh).flat_map(|measured| measured.processes())
    }

    /// Returns true if a process that NVML lists is of the claim.
    fn has(&self, pid: u32) -> bool {
        match self.names {
            Names::Nobodys => false,
            Names::Nodes => self.measured().any(|process| process.host_pid == pid),
            Names::Ours => {
                let mut on_it = config::shares().iter().filter(|share| is_on(share, self.uuid));
                pid == sys::process_id() || on_it.any(|share| share.has_process(pid))
            }
        }
    }
}

/// The layout of records that NVML has filled in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Size of a record, in bytes.
    pub size: usize,
    /// Offset of the pid in a record, in bytes.
    pub pid: usize,
}

/// `nvmlProcessDetail_v1_t`
pub(crate) const DETAIL: Layout = Layout { size: 32, pid: 0 };
/// `nvmlProcessUtilizationSample_t`
pub(crate) const SAMPLE: Layout = Layout { size: 32, pid: 0 };
/// `nvmlProcessUtilizationInfo_v1_t`
pub(crate) const UTILIZATION: Layout = Layout { size: 40, pid: 8 };

/// Removes other tenants' processes from what NVML has just filled in, and returns the number of records
/// left.
///
/// # Safety
/// `records` is null, or NVML has filled in so many.
pub(crate) unsafe fn keep_ours(handle: usize, records: *mut u8, count: u32, layout: Layout) -> u32 {
    let Some(uuid) = limited(handle).filter(|_| !records.is_null()) else { return count };
    // SAFETY: the record is below the count, and the pid is within it.
    let pid_of = |index: usize| unsafe {
        records.add(index * layout.size + layout.pid).cast::<u32>().read_unaligned()
    };
    let ours = Ours::new(&uuid, |pid| (0..count as usize).any(|index| pid_of(index) == pid));
    let mut kept = 0;
    for index in 0..count as usize {
        // SAFETY: both records are below the count.
        unsafe {
            let record = records.add(index * layout.size);
            if ours.has(pid_of(index)) {
                record.copy_to(records.add(kept * layout.size), layout.size);
                kept += 1;
            }
        }
    }
    kept as u32
}

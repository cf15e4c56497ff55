//! What NVML shows a tenant: its quota as the GPU's memory, and the claim's own processes.

use super::ask::{INSUFFICIENT_SIZE, List, pid, shows_our_pids};
use crate::config;
use crate::real;
use crate::seen;
use crate::share::{Page, Share, pid_namespace};
use crate::state::{self, Mode};
use crate::sys;
use aliquot_quota::measured::Process;

/// `NVML_ERROR_NO_PERMISSION`
pub(crate) const NO_PERMISSION: i32 = 4;
/// `NVML_ERROR_NOT_FOUND`
pub(crate) const NOT_FOUND: i32 = 6;
/// `NVML_ERROR_NOT_READY`
pub(crate) const NOT_READY: i32 = 27;

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

fn is_on(share: &Share, uuid: &[u8; 96]) -> bool {
    share.uuid().is_some_and(|id| id.as_str().as_bytes() == text(uuid))
}

/// Replaces a GPU's or MIG device's total, free and used bytes by the tenant's own. Returns false if no share
/// is on it.
pub(crate) fn memory(handle: usize, total: &mut u64, free: &mut u64, used: &mut u64) -> bool {
    let Some(uuid) = limited(handle) else { return false };
    for share in config::shares().iter().filter(|share| is_on(share, &uuid)) {
        let _ = share.map();
    }
    let Some(seen) = seen::seen_by_uuid(text(&uuid), *free, *total) else { return false };
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
    for record in (0..list.len()).filter_map(|index| list.record(index)) {
        if !ours.has(pid(record)) {
            continue;
        }
        if kept < room {
            // SAFETY: the caller's array has `room` records.
            unsafe { infos.add(kept as usize * record.len()).copy_from(record.as_ptr(), record.len()) };
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

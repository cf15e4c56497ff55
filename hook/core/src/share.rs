//! A share: the quota that a claim was given on one GPU, and the region in which the claim's processes keep
//! their account of it.
//!
//! A process holds a slot of the region by an OFD lock on one byte. The lock is taken through the same open
//! file that the region is mapped from, and the descriptor is closed at once. The mapping keeps the lock, so
//! `closefrom` cannot drop it. The mapping is not inherited by forked children, so neither is the lock. Hence
//! a slot's byte is free exactly when its owner's memory is gone: the process has ended, whatever its pid
//! namespace, or became another program.

mod bytes;
mod dead;
mod files;
mod floor;
mod leases;
mod left;
mod measured;
mod notes;
mod seat;
mod shared;
mod slot;
mod terms;

pub(crate) use bytes::{Kind, Refusal};
pub(crate) use files::pid_namespace;
pub(crate) use measured::{Page, own_identity};
pub(crate) use notes::keep as keep_note;

use crate::lock::Mutex;
use crate::log::Text;
use crate::path::Path;
use crate::sys;
use aliquot_quota::own::Own;
use aliquot_quota::region::{Region, SlotState};
use aliquot_quota::{GpuUuid, REGION_FILE_SIZE};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};
use files::{map_region, open_region, read_quota};
use seat::Seat;

/// One share.
pub(crate) struct Share {
    uuid: Mutex<Option<GpuUuid>>,
    quota_path: Mutex<Path>,
    region_path: Mutex<Path>,
    /// Limit from the quota file, in bytes; `u64::MAX` = no limit.
    file_limit: AtomicU64,
    /// Limit from the environment, in bytes; `u64::MAX` = no limit.
    env_limit: AtomicU64,
    /// Bytes that managed memory may take on top of the limit.
    oversubscription: AtomicU64,
    /// Percent of the GPU's time; 0 = no limit.
    percent: AtomicU32,
    /// 1 if idle time may be borrowed.
    is_soft: AtomicU32,
    checked_ms: AtomicU64,
    grant_path: Mutex<Path>,
    measured_path: Mutex<Path>,
    /// The grant as last read: its end; borrowed percent, own part and slice; the two corrections; what the
    /// neighbours had.
    granted: [AtomicU64; 5],
    grant_checked_ms: AtomicU64,
    /// The number of the slot plus one; 0 = none.
    seated: AtomicU32,
    /// The count from which the leases that the process may hold follow: how often processes had come or gone
    /// at the last count, and, in the lowest byte, how many there were.
    counted: AtomicU64,
    /// The time of the last look for dead processes' leases, in milliseconds.
    looked_ms: AtomicU64,
    /// Bytes of this process that others may have imported, and bytes that it has imported.
    shared: [AtomicU64; 2],
    order: AtomicU32,
    fail_open: AtomicU32,
    region: AtomicPtr<Region>,
    seat: Mutex<Seat>,
    /// This process's own account of its GPU time. A forked child goes on with it: it is never ahead of the
    /// share's.
    own: Own,
}

impl Share {
    /// Returns a place without a share.
    pub(crate) const fn new() -> Self {
        Self {
            uuid: Mutex::new(None),
            quota_path: Mutex::new(Path::new()),
            region_path: Mutex::new(Path::new()),
            file_limit: AtomicU64::new(u64::MAX),
            env_limit: AtomicU64::new(u64::MAX),
            oversubscription: AtomicU64::new(0),
            percent: AtomicU32::new(0),
            is_soft: AtomicU32::new(0),
            checked_ms: AtomicU64::new(0),
            grant_path: Mutex::new(Path::new()),
            measured_path: Mutex::new(Path::new()),
            granted: [const { AtomicU64::new(0) }; 5],
            grant_checked_ms: AtomicU64::new(0),
            seated: AtomicU32::new(0),
            counted: AtomicU64::new(0),
            looked_ms: AtomicU64::new(0),
            shared: [const { AtomicU64::new(0) }; 2],
            order: AtomicU32::new(0),
            fail_open: AtomicU32::new(0),
            region: AtomicPtr::new(null_mut()),
            seat: Mutex::new(Seat::new()),
            own: Own::new(),
        }
    }

    /// Reads the quota file, and remembers the paths of the grant and of the measurement beside it, and of
    /// the region.
    pub(crate) fn open(&self, quota: Path, beside: [Path; 2], region: Path) -> Result<(), Text<400>> {
        let read = read_quota(&quota)?;
        let [grant, measured] = beside;
        *self.grant_path.lock() = grant;
        *self.measured_path.lock() = measured;
        self.grant_checked_ms.store(0, Relaxed);
        *self.uuid.lock() = Some(read.gpu_uuid);
        *self.quota_path.lock() = quota;
        *self.region_path.lock() = region;
        self.take(&read);
        self.env_limit.store(u64::MAX, Relaxed);
        self.order.store(u32::from(read.device_order), Relaxed);
        Ok(())
    }

    /// Returns the UUID of the GPU or MIG device.
    pub(crate) fn uuid(&self) -> Option<GpuUuid> {
        *self.uuid.lock()
    }

    /// Returns the path of the quota file.
    pub(crate) fn quota_path(&self) -> Path {
        *self.quota_path.lock()
    }

    /// Returns the share's position among the claim's devices.
    pub(crate) fn order(&self) -> u32 {
        self.order.load(Relaxed)
    }

    /// Returns true if the share's DeviceClass lets programs run without limits where the limiter fails.
    pub(crate) fn may_fail_open(&self) -> bool {
        self.fail_open.load(Relaxed) != 0
    }

    /// Returns this process's slot, if it has one.
    pub(crate) fn slot(&self) -> Option<usize> {
        (self.seated.load(Relaxed) as usize).checked_sub(1)
    }

    /// Returns the region if it is mapped.
    pub(crate) fn region(&self) -> Option<&Region> {
        // SAFETY: set once to a mapping of the whole file that is never undone; a region only has atomics.
        unsafe { self.region.load(Acquire).as_ref() }
    }

    /// Maps the region without taking a slot.
    pub(crate) fn map(&self) -> Result<&Region, Text<400>> {
        if let Some(region) = self.region() {
            return Ok(region);
        }
        let path = *self.region_path.lock();
        let file = open_region(&path)?;
        let mapped = map_region(&file, &path)?;
        if self.region.compare_exchange(null_mut(), mapped, Release, Acquire).is_err() {
            // SAFETY: another thread's mapping is used; nothing refers to this one.
            unsafe { sys::free_memory(mapped.cast(), REGION_FILE_SIZE) };
        }
        self.region().ok_or_else(|| Text::of(format_args!("region {path} cannot be mapped")))
    }

    /// Notes audit bits in the region, for the node agent.
    pub(crate) fn note(&self, bits: u64) {
        if let Some(region) = self.region()
            && region.header.audit.load(Relaxed) & bits != bits
        {
            region.header.audit.fetch_or(bits, Relaxed);
        }
    }

    /// Returns true if a live process of the claim has this pid in this process's pid namespace.
    pub(crate) fn has_process(&self, pid: u32) -> bool {
        let Some(region) = self.region() else { return false };
        let here = pid_namespace();
        region.slots.iter().any(|slot| {
            SlotState::of(slot.state.load(Acquire)) == Some(SlotState::Live)
                && slot.pid.load(Relaxed) == pid
                && slot.pid_namespace.load(Relaxed) == here
        })
    }

    /// Forgets, in a forked child, the parent's slot and mapping.
    pub(crate) fn renew_after_fork(&self) {
        self.seat.renew_after_fork();
        self.uuid.renew_after_fork();
        self.quota_path.renew_after_fork();
        self.region_path.renew_after_fork();
        self.grant_path.renew_after_fork();
        self.measured_path.renew_after_fork();
        self.seated.store(0, Relaxed);
        self.counted.store(0, Relaxed);
        self.shared.iter().for_each(|bytes| bytes.store(0, Relaxed));
        let before = core::mem::replace(&mut *self.seat.lock(), Seat::new());
        if let Some(floor) = before.floor {
            floor.forget();
        }
        self.region.store(null_mut(), Release);
    }
}

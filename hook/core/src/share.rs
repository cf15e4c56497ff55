//! A share: the quota that a claim was given on one GPU, and the region in which the claim's processes keep
//! their account of it.
//!
//! A process holds a slot of the region by an OFD lock on one byte. The lock is taken through the same open
//! file that the region is mapped from, and the descriptor is closed at once: the mapping keeps the lock,
//! `closefrom` cannot drop it, and because the mapping is not inherited by forked children, neither is the
//! lock. So a slot's byte is free exactly when its owner's memory is gone: the process has ended, whatever
//! its pid namespace, or became another program.

mod bytes;
mod dead;
mod files;
mod floor;
mod leases;
mod left;
mod measured;
mod seat;
mod shared;
mod terms;

pub(crate) use bytes::{Kind, Refusal};
pub(crate) use files::pid_namespace;
pub(crate) use measured::{Page, own_identity};

use crate::lock::Mutex;
use crate::log::Text;
use crate::sys;
use aliquot_quota::own::Own;
use aliquot_quota::region::{Region, SlotState};
use aliquot_quota::{GpuUuid, REGION_FILE_SIZE};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};
use files::{map_region, open_region, read_quota};
use seat::Seat;

/// What is noted for every share, kept for those that are not mapped yet.
static NOTES: AtomicU64 = AtomicU64::new(0);

/// Notes something about the whole process that the node agent should look at.
pub(crate) fn note_in_all(bits: u64) {
    NOTES.fetch_or(bits, Relaxed);
    for share in crate::config::shares() {
        share.note(bits);
    }
}

/// A path of the limiter's own files.
pub(crate) type Path = Text<512>;

/// One share.
pub(crate) struct Share {
    uuid: Mutex<Option<GpuUuid>>,
    quota_path: Mutex<Path>,
    region_path: Mutex<Path>,
    /// From the file; `u64::MAX` = no limit.
    file_limit: AtomicU64,
    /// From the environment; `u64::MAX` = no limit.
    env_limit: AtomicU64,
    /// What managed memory may take on top of the limit.
    oversubscription: AtomicU64,
    /// Percent of the GPU's time; 0 = no limit.
    percent: AtomicU32,
    /// Whether idle time may be borrowed.
    is_soft: AtomicU32,
    checked_ms: AtomicU64,
    grant_path: Mutex<Path>,
    measured_path: Mutex<Path>,
    /// The grant as last read: until when, borrowed percent and own part and slice, corrections, and what the neighbours had.
    granted: [AtomicU64; 5],
    grant_checked_ms: AtomicU64,
    /// The slot plus one.
    seated: AtomicU32,
    /// What leases the process may hold follows from this: how often processes had come or gone when they were counted
    /// last, and how many they were in the lowest byte.
    counted: AtomicU64,
    /// When dead processes' leases were looked for last.
    looked_ms: AtomicU64,
    /// Bytes of this process that others may have imported, and those that it has imported.
    shared: [AtomicU64; 2],
    order: AtomicU32,
    fail_open: AtomicU32,
    region: AtomicPtr<Region>,
    seat: Mutex<Seat>,
    /// GPU time of this process. A forked child goes on with it: it is never ahead of the share's.
    own: Own,
}

impl Share {
    /// No share yet.
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

    /// Reads the quota file and remembers where grant and measure, which lie beside it, and the region are.
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

    /// The GPU.
    pub(crate) fn uuid(&self) -> Option<GpuUuid> {
        *self.uuid.lock()
    }

    /// Where its quota is.
    pub(crate) fn quota_path(&self) -> Path {
        *self.quota_path.lock()
    }

    /// Position among the claim's devices.
    pub(crate) fn order(&self) -> u32 {
        self.order.load(Relaxed)
    }

    /// Whether the share's DeviceClass lets programs run without limits where the limiter fails.
    pub(crate) fn may_fail_open(&self) -> bool {
        self.fail_open.load(Relaxed) != 0
    }

    /// This process's slot.
    pub(crate) fn slot(&self) -> Option<usize> {
        (self.seated.load(Relaxed) as usize).checked_sub(1)
    }

    /// The region if it is mapped.
    pub(crate) fn region(&self) -> Option<&Region> {
        // SAFETY: set once to a mapping of the whole file that is never undone; a region only has atomics.
        unsafe { self.region.load(Acquire).as_ref() }
    }

    /// Maps the region, without taking a slot.
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

    /// Notes something that the node agent should look at.
    pub(crate) fn note(&self, bits: u64) {
        if let Some(region) = self.region()
            && region.header.audit.load(Relaxed) & bits != bits
        {
            region.header.audit.fetch_or(bits, Relaxed);
        }
    }

    /// Whether a process of the claim has this pid in our pid namespace.
    pub(crate) fn has_process(&self, pid: u32) -> bool {
        let Some(region) = self.region() else { return false };
        let here = pid_namespace();
        region.slots.iter().any(|slot| {
            SlotState::of(slot.state.load(Acquire)) == Some(SlotState::Live)
                && slot.pid.load(Relaxed) == pid
                && slot.pid_namespace.load(Relaxed) == here
        })
    }

    /// In a forked child: the parent's slot and mapping are not ours.
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

//! A share: the quota that a claim was given on one GPU, and the region in which the claim's processes keep
//! their account of it.
//!
//! A process holds a slot of the region by an OFD lock on one byte. The lock is taken through the same open
//! file that the region is mapped from, and the descriptor is closed at once: the mapping keeps the lock,
//! `closefrom` cannot drop it, and because the mapping is not inherited by forked children, neither is the
//! lock. So a slot's byte is free exactly when its owner's memory is gone: the process has ended, whatever
//! its pid namespace, or became another program.

mod dead;
mod files;
mod floor;
mod leases;
mod left;
mod measured;
mod shared;

pub(crate) use files::pid_namespace;
pub(crate) use measured::{Page, own_identity};

use crate::lock::{Guard, Mutex};
use crate::log::Text;
use crate::sys::{self, File};
use aliquot_quota::grant::Grant;
use aliquot_quota::ledger::{self, Cells, LedgerError, Word};
use aliquot_quota::region::{self, LOCK_BASE, Region, SLOT_COUNT, SlotState};
use aliquot_quota::{ComputePolicy, FailMode, GpuUuid, QuotaFile, REGION_FILE_SIZE};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};
use files::{map_region, open_region, read_grant, read_quota, start_time};
use floor::Floor;

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

/// How often a grant is read again.
const GRANT_AGE_MS: u64 = 10;

/// How often the quota file is read again.
const QUOTA_AGE_MS: u64 = 500;

/// Where bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// On the device.
    Device,
    /// Wherever the driver moves them; a share may be allowed to have more of these than fits its quota.
    Managed,
}

/// Why bytes could not be charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// They do not fit.
    Quota,
    /// The region cannot be used.
    Broken,
}

/// How often the total is compared with its parts at the most.
const COMPARE_AGE_MS: u64 = 10;

/// How often floors are looked at again because charges and releases came in between.
const LOOKS: u32 = 20;

/// How often a process that finds its slot taken away takes another one. Only somebody who writes into the region takes
/// slots away.
const MOST_SITTINGS: u32 = 16;

/// What this process holds in the region. The region is the tenant's to write; this is not.
struct Seat {
    slot: Option<usize>,
    state: u64,
    /// Bytes that this process has charged, by its own count.
    held: u64,
    /// The lock that tells others of them.
    floor: Option<Floor>,
    /// The least that was held since floors were looked at.
    looked_at: u64,
    /// When the total was compared with its parts.
    compared_ms: u64,
    /// How often a slot was taken.
    sittings: u32,
}

impl Seat {
    const fn new() -> Self {
        Self { slot: None, state: 0, held: 0, floor: None, looked_at: 0, compared_ms: 0, sittings: 0 }
    }
}

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
    /// The grant as last read: until when, borrowed percent and own part and slice, corrections, and when.
    granted: [AtomicU64; 4],
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
            granted: [const { AtomicU64::new(0) }; 4],
            grant_checked_ms: AtomicU64::new(0),
            seated: AtomicU32::new(0),
            counted: AtomicU64::new(0),
            looked_ms: AtomicU64::new(0),
            shared: [const { AtomicU64::new(0) }; 2],
            order: AtomicU32::new(0),
            fail_open: AtomicU32::new(0),
            region: AtomicPtr::new(null_mut()),
            seat: Mutex::new(Seat::new()),
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

    fn take(&self, quota: &QuotaFile) {
        let limit = if quota.memory_bytes == 0 { u64::MAX } else { quota.memory_bytes };
        self.file_limit.store(limit, Relaxed);
        self.oversubscription.store(quota.oversubscribe_bytes, Relaxed);
        self.percent.store(u32::from(quota.cores_percent), Relaxed);
        self.is_soft.store(u32::from(quota.compute_policy == ComputePolicy::Soft), Relaxed);
        self.fail_open.store(u32::from(quota.fail_mode == FailMode::Open), Relaxed);
        self.checked_ms.store(sys::coarse_ms(), Relaxed);
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

    /// Lowers the limit to what the environment says.
    pub(crate) fn lower(&self, bytes: u64) {
        self.env_limit.fetch_min(bytes, Relaxed);
    }

    /// Bytes that may be charged now, `u64::MAX` = any number. Reads the quota file again when it is time.
    pub(crate) fn limit(&self) -> u64 {
        self.limit_at(sys::coarse_ms())
    }

    /// The same, where the time is known already.
    fn limit_at(&self, now_ms: u64) -> u64 {
        self.renew(now_ms);
        self.file_limit.load(Relaxed).min(self.env_limit.load(Relaxed))
    }

    /// Percent of the GPU's time, 0 = no limit. Reads the quota file again when it is time.
    pub(crate) fn percent(&self) -> u8 {
        self.renew(sys::coarse_ms());
        self.percent.load(Relaxed) as u8
    }

    /// What the node agent grants now; nothing where there is none, or where it has run out.
    pub(crate) fn grant(&self, now_ns: u64) -> Grant {
        let (now_ms, checked) = (now_ns / 1_000_000, self.grant_checked_ms.load(Relaxed));
        let [until, terms, up, borrowed_up] = &self.granted;
        let age = if until.load(Relaxed) == 0 { QUOTA_AGE_MS } else { GRANT_AGE_MS };
        if checked == 0 || now_ms.wrapping_sub(checked) >= age {
            self.grant_checked_ms.store(now_ms, Relaxed);
            let path = *self.grant_path.lock();
            if let Some(read) = read_grant(&path) {
                until.store(read.valid_until_ns, Relaxed);
                let own = u64::from(read.own_permille) << 16;
                terms.store(u64::from(read.slice_us) << 32 | own | u64::from(read.borrow_percent), Relaxed);
                up.store(read.true_up_ns as u64, Relaxed);
                borrowed_up.store(read.borrowed_true_up_ns as u64, Relaxed);
            }
        }
        let (valid_until_ns, terms) = (until.load(Relaxed), terms.load(Relaxed));
        let (true_up_ns, borrowed_true_up_ns) = (up.load(Relaxed) as i64, borrowed_up.load(Relaxed) as i64);
        if valid_until_ns <= now_ns {
            // What was found to be charged wrongly stays so.
            return Grant { true_up_ns, borrowed_true_up_ns, ..Grant::default() };
        }
        let borrow_percent = if self.is_soft.load(Relaxed) == 0 { 0 } else { terms as u8 };
        let (own_permille, slice_us) = ((terms >> 16) as u16, (terms >> 32) as u32);
        Grant { valid_until_ns, borrow_percent, own_permille, slice_us, true_up_ns, borrowed_true_up_ns }
    }

    /// This process's slot.
    pub(crate) fn slot(&self) -> Option<usize> {
        (self.seated.load(Relaxed) as usize).checked_sub(1)
    }

    fn renew(&self, now: u64) {
        if now.wrapping_sub(self.checked_ms.load(Relaxed)) >= QUOTA_AGE_MS {
            self.checked_ms.store(now, Relaxed);
            let path = *self.quota_path.lock();
            // A file that cannot be read leaves the limit as it was, which is said where a newer node agent wrote it.
            match read_quota(&path) {
                Ok(quota) if self.uuid() == Some(quota.gpu_uuid) => self.take(&quota),
                Err(reason) if sys::File::read_only(path.as_c()).is_ok() => {
                    crate::log::note(format_args!("the limits stay as they were: {reason}"));
                }
                _ => {}
            }
        }
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

    /// Takes a slot, and charges to it what this process already holds.
    fn sit(&self, seat: &mut Seat) -> Result<usize, Text<400>> {
        let path = *self.region_path.lock();
        let file = open_region(&path)?;
        // A mapping of its own, of this very open file, is what keeps the lock.
        let mapped = map_region(&file, &path)?;
        // SAFETY: just mapped, whole, and not undone unless no slot is found.
        let region = unsafe { &*mapped };
        let fd = file.into_raw();
        let take = |slot: usize| {
            if SlotState::of(region.load(Word::State(slot))) != Some(SlotState::Free)
                || sys::lock_byte(fd, LOCK_BASE + slot as u64).is_err()
            {
                return None;
            }
            if let Some(mine) = region.slots.get(slot) {
                mine.pid.store(sys::process_id(), Relaxed);
                mine.host_pid.store(0, Relaxed);
                mine.start_time.store(start_time(), Relaxed);
                mine.pid_namespace.store(pid_namespace(), Relaxed);
                mine.overhead_bytes.store(0, Relaxed);
                self.tell_shared(mine);
            }
            match ledger::attach(region, slot) {
                Some(state) => Some((slot, state)),
                None => {
                    sys::unlock_byte(fd, LOCK_BASE + slot as u64);
                    None
                }
            }
        };
        let found = (0..SLOT_COUNT).find_map(take).or_else(|| {
            // All taken, perhaps by the dead.
            self.reap_in(region, None);
            (0..SLOT_COUNT).find_map(take)
        });
        drop(File::from_raw(fd));
        let Some((slot, state)) = found else {
            // SAFETY: nothing refers to this mapping.
            unsafe { sys::free_memory(mapped.cast(), REGION_FILE_SIZE) };
            return Err(Text::of(format_args!("{SLOT_COUNT} processes already use this share")));
        };
        // The former mapping, if any, stays: other threads may be reading it. It is the same file.
        self.region.store(mapped, Release);
        (seat.slot, seat.state, seat.sittings) = (Some(slot), state, seat.sittings + 1);
        self.seated.store(slot as u32 + 1, Relaxed);
        self.join(region, slot);
        // The floor is the former slot's.
        (seat.floor, seat.looked_at) = (None, 0);
        // What this process holds already is charged to the new slot with the rest of what is missing.
        compare(region, slot, seat.held);
        Ok(slot)
    }

    fn seated(&self) -> Result<(Guard<'_, Seat>, &Region, usize), Refusal> {
        let mut seat = self.seat.lock();
        if let (Some(slot), Some(region)) = (seat.slot, self.region())
            && region.load(Word::State(slot)) == seat.state
        {
            return Ok((seat, region, slot));
        }
        // Either the first time, or somebody thought that we were dead and took the slot.
        if seat.sittings >= MOST_SITTINGS {
            return Err(Refusal::Broken);
        }
        match self.sit(&mut seat) {
            Ok(slot) => Ok((seat, self.region().ok_or(Refusal::Broken)?, slot)),
            Err(reason) => {
                crate::log::note(format_args!("no device memory can be charged: {reason}"));
                Err(Refusal::Broken)
            }
        }
    }

    /// Takes a slot now, so that a region that cannot be used is found early.
    pub(crate) fn attach(&self) -> Result<(), Text<400>> {
        let mut seat = self.seat.lock();
        if seat.slot.is_none() {
            self.sit(&mut seat)?;
        }
        self.note(NOTES.load(Relaxed));
        Ok(())
    }

    /// Charges all of `bytes` or nothing. `now_ms`, here and below, is [`sys::coarse_ms`].
    pub(crate) fn charge(&self, bytes: u64, kind: Kind, now_ms: u64) -> Result<(), Refusal> {
        self.change(bytes, kind, now_ms, |region, slot, held, limit| {
            ledger::charge(region, slot, held, bytes, limit).map(|_| bytes)
        })
        .map(drop)
    }

    /// Charges up to `bytes`; returns how many.
    pub(crate) fn charge_up_to(&self, bytes: u64, kind: Kind, now_ms: u64) -> Result<u64, Refusal> {
        self.change(bytes, kind, now_ms, |region, slot, held, limit| {
            ledger::charge_up_to(region, slot, held, bytes, limit)
        })
    }

    /// Bytes that could be charged now.
    pub(crate) fn room(&self, kind: Kind, now_ms: u64) -> u64 {
        self.limit_of(kind, now_ms).saturating_sub(self.total())
    }

    fn limit_of(&self, kind: Kind, now_ms: u64) -> u64 {
        let limit = self.limit_at(now_ms);
        match kind {
            Kind::Device => limit,
            Kind::Managed => limit.saturating_add(self.oversubscription.load(Relaxed)),
        }
    }

    fn change(
        &self,
        bytes: u64,
        kind: Kind,
        now_ms: u64,
        make: impl Fn(&Region, usize, u64, u64) -> Result<u64, LedgerError>,
    ) -> Result<u64, Refusal> {
        let limit = self.limit_of(kind, now_ms);
        let (mut seat, region, slot) = self.seated()?;
        let grows = limit != u64::MAX && has_grown(seat.held.saturating_add(bytes), seat.looked_at, limit);
        if grows || now_ms.wrapping_sub(seat.compared_ms) >= COMPARE_AGE_MS {
            seat.compared_ms = now_ms;
            compare(region, slot, seat.held);
        }
        let made = match make(region, slot, seat.held, limit) {
            Err(LedgerError::Corrupt) if compare(region, slot, seat.held) => {
                make(region, slot, seat.held, limit)
            }
            made => made,
        };
        let charged = made.map_err(|error| refuse(region, error))?;
        seat.held += charged;
        if grows && !self.fits_above_floors(&mut seat, slot, limit) {
            region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
            self.release_held(&mut seat, charged);
            return Err(Refusal::Quota);
        }
        let total = ledger::total(region);
        if total > region.header.peak_bytes.load(Relaxed) {
            region.header.peak_bytes.fetch_max(total, Relaxed);
        }
        Ok(charged)
    }

    /// Raises the floor to what this process holds now, and looks whether that and what the others hold at the least is
    /// within the limit. It always is, unless somebody has written into the region.
    fn fits_above_floors(&self, seat: &mut Seat, slot: usize, limit: u64) -> bool {
        let path = *self.region_path.lock();
        if seat.held >= floor::part(limit) {
            match Floor::take(&path, slot, seat.held) {
                Ok(floor) => seat.floor = Some(floor),
                // Somebody else has locked what only we lock.
                Err(sys::EAGAIN) => return false,
                Err(_) => {}
            }
        }
        let Some(region) = self.region() else { return true };
        for _ in 0..LOOKS {
            let before = region.load(Word::Op);
            let all = seat.held.saturating_add(floor::of_others(&path, slot));
            if all <= self.widest() {
                seat.looked_at = seat.held;
                return true;
            }
            // While nothing is charged and released, floors that were read one after the other belong together.
            if region.load(Word::Op) == before {
                break;
            }
        }
        false
    }

    /// The most that any process of the share may charge now: another one may have read a newer quota, or have managed
    /// memory.
    fn widest(&self) -> u64 {
        let path = *self.quota_path.lock();
        if let Ok(quota) = read_quota(&path)
            && self.uuid() == Some(quota.gpu_uuid)
        {
            self.take(&quota);
        }
        self.file_limit.load(Relaxed).saturating_add(self.oversubscription.load(Relaxed))
    }

    /// Charges bytes that exist already.
    pub(crate) fn charge_forced(&self, bytes: u64) {
        if let Ok((mut seat, region, slot)) = self.seated() {
            seat.held = seat.held.saturating_add(bytes);
            let held = seat.held - bytes;
            if ledger::charge_forced(region, slot, held, bytes).is_err() {
                compare(region, slot, seat.held);
            }
        }
    }

    /// Releases up to `bytes` of what this process has charged; returns how many.
    pub(crate) fn release_up_to(&self, bytes: u64) -> u64 {
        let mut seat = self.seat.lock();
        let bytes = bytes.min(seat.held);
        if bytes > 0 {
            self.release_held(&mut seat, bytes);
        }
        bytes
    }

    /// Releases so many bytes, no more than are held.
    fn release_held(&self, seat: &mut Seat, bytes: u64) {
        let before = seat.held;
        seat.held -= bytes;
        seat.looked_at = seat.looked_at.min(seat.held);
        let (Some(slot), Some(region)) = (seat.slot, self.region()) else { return };
        // First: others must never see a floor above what is charged.
        if seat.floor.as_ref().is_some_and(|floor| floor.bytes() > seat.held) {
            let path = *self.region_path.lock();
            let lower = seat.held.saturating_sub(floor::part(self.file_limit.load(Relaxed)) / 2);
            seat.floor = if lower >> 20 == 0 { None } else { Floor::take(&path, slot, lower).ok() };
        }
        if region.load(Word::State(slot)) != seat.state {
            return;
        }
        let released = match ledger::release(region, slot, before, bytes) {
            Err(LedgerError::Corrupt) if compare(region, slot, before) => {
                ledger::release(region, slot, before, bytes)
            }
            released => released,
        };
        if released == Err(LedgerError::Corrupt) {
            region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
        }
    }

    /// Publishes how much of this process's charge is no allocation.
    pub(crate) fn show_overhead(&self, bytes: u64) {
        let seat = self.seat.lock();
        if let (Some(slot), Some(region)) = (seat.slot, self.region())
            && let Some(slot) = region.slots.get(slot)
        {
            slot.overhead_bytes.store(bytes, Relaxed);
        }
    }

    /// Counts a refused allocation.
    pub(crate) fn count_refusal(&self) {
        if let Some(region) = self.region() {
            region.header.refused.fetch_add(1, Relaxed);
        }
    }

    /// Notes something that the node agent should look at.
    pub(crate) fn note(&self, bits: u64) {
        if let Some(region) = self.region()
            && region.header.audit.load(Relaxed) & bits != bits
        {
            region.header.audit.fetch_or(bits, Relaxed);
        }
    }

    /// Bytes that this process has charged.
    pub(crate) fn held(&self) -> u64 {
        self.seat.lock().held
    }

    /// Bytes charged by all processes of the claim, no less than what this one knows of.
    pub(crate) fn total(&self) -> u64 {
        self.region().map_or(0, ledger::total).max(self.held())
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

/// Whether a process that comes to hold so much has grown by so much since floors were looked at that they are to be
/// looked at again.
const fn has_grown(held: u64, looked_at: u64, limit: u64) -> bool {
    held > looked_at && held - looked_at >= floor::part(limit)
}

/// Compares the total with its parts, and the slot with what its owner knows. Where they were less, which is noted, they
/// are as much now, and `true` is returned.
fn compare(region: &Region, slot: usize, held: u64) -> bool {
    let mended = ledger::mend(region, slot, held) == Ok(true);
    if mended {
        region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
    }
    mended
}

fn refuse(region: &Region, error: LedgerError) -> Refusal {
    match error {
        LedgerError::Refused(_) => Refusal::Quota,
        LedgerError::Busy => Refusal::Broken,
        LedgerError::Corrupt => {
            region.header.audit.fetch_or(region::audit::CORRUPT, Relaxed);
            Refusal::Broken
        }
    }
}

//! Charging a device's memory to the shares on it.
//!
//! Bytes are charged before the driver is asked for them. Where a container has several shares of one GPU, it
//! may use what they hold together: a charge fills them in order, a release empties them in reverse.

use crate::code::OUT_OF_MEMORY;
use crate::config;
use crate::device::{self, Device};
use crate::share::{Kind, Refusal, Share, keep_note};
use crate::{captures, compute, contexts, graphs, linear, pools, shared, sys, vmm};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The longest time that a call waits for memory of dead processes, in milliseconds of its own clock,
/// whatever the region says.
const MOST_WAIT_MS: u64 = 5000;

/// The time after which a refused charge looks again while a dead process's memory is about to come back, in
/// milliseconds.
const LOOK_AGAIN_MS: u64 = 5;

/// Returns the shares on a device.
pub(crate) fn shares_on(device: Device) -> impl DoubleEndedIterator<Item = &'static Share> {
    let mask = device::shares_of(device);
    config::shares()
        .iter()
        .enumerate()
        .filter(move |(index, _)| mask >> index & 1 == 1)
        .map(|(_, share)| share)
}

fn first_two(device: Device) -> [Option<&'static Share>; 2] {
    let mut shares = shares_on(device);
    [shares.next(), shares.next()]
}

/// Returns true if any share is on the device; other devices are not limited.
#[inline]
pub(crate) fn is_limited(device: Device) -> bool {
    device::shares_of(device) != 0
}

/// Charges `bytes` if they fit right now.
#[inline]
pub(crate) fn try_charge(device: Device, bytes: u64) -> Result<(), Refusal> {
    try_charge_as(device, bytes, Kind::Device)
}

/// Charges `bytes` of either kind if they fit right now.
pub(crate) fn try_charge_as(device: Device, bytes: u64, kind: Kind) -> Result<(), Refusal> {
    if bytes == 0 {
        return Ok(());
    }
    let now = sys::coarse_ms();
    contexts::glance(device, now);
    // What is refused must not be charged in part meanwhile: others would be refused what is free.
    if let [Some(share), None] = first_two(device) {
        return share.charge(bytes, kind, now);
    }
    if shares_on(device).fold(0, |sum: u64, share| sum.saturating_add(share.room(kind, now))) < bytes {
        return Err(Refusal::Quota);
    }
    let mut left = bytes;
    let mut refusal = Refusal::Quota;
    for share in shares_on(device) {
        if left == 0 {
            break;
        }
        match share.charge_up_to(left, kind, now) {
            Ok(charged) => left -= charged,
            Err(found) => refusal = found,
        }
    }
    if left == 0 {
        return Ok(());
    }
    release(device, bytes - left);
    Err(refusal)
}

/// Charges `bytes`. Before refusing, takes back what dead processes hold, waiting for the driver to free it,
/// and what this process's own pools and graphs no longer use. The error is a CUDA code.
pub(crate) fn charge(device: Device, bytes: u64) -> Result<(), i32> {
    charge_as(device, bytes, Kind::Device)
}

/// Does what [`charge`] does for memory of either kind.
pub(crate) fn charge_as(device: Device, bytes: u64, kind: Kind) -> Result<(), i32> {
    if try_charge_as(device, bytes, kind).is_ok() {
        return Ok(());
    }
    contexts::refresh(device);
    pools::settle_all(device);
    graphs::settle_all(device);
    shared::settle(device);
    if try_charge_as(device, bytes, kind).is_ok() {
        return Ok(());
    }
    // Only what this process keeps without need can be given back.
    pools::trim_all(device);
    graphs::trim_unused(device);
    let started = sys::now_ms();
    loop {
        if try_charge_as(device, bytes, kind).is_ok() {
            return Ok(());
        }
        let (mut came_back, mut wait) = (false, None::<u64>);
        for share in shares_on(device) {
            let (back, until) = share.reap();
            came_back |= back;
            wait = match (wait, until) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
        let may_wait = sys::now_ms().saturating_sub(started) < MOST_WAIT_MS;
        if may_wait && (came_back || shared::settle(device)) {
            continue;
        }
        let could_ever_fit = may_wait && (kind == Kind::Managed || bytes <= limit(device));
        match wait.filter(|_| could_ever_fit) {
            Some(millis) => sys::sleep_ms(millis.min(LOOK_AGAIN_MS)),
            None => break,
        }
    }
    for share in shares_on(device).take(1) {
        share.count_refusal();
    }
    Err(OUT_OF_MEMORY)
}

/// Returns the driver's final answer about memory that is charged. If it has none (`code`) shortly after a
/// process of the share has died, it is asked again until that process's memory must be back.
#[inline]
pub(crate) fn retry(device: Device, code: i32, driver: impl Fn() -> i32) -> i32 {
    if code == OUT_OF_MEMORY { retry_after_death(device, &driver) } else { code }
}

#[cold]
fn retry_after_death(device: Device, driver: &dyn Fn() -> i32) -> i32 {
    shares_on(device).for_each(|share| {
        share.reap();
    });
    let started = sys::now_ms();
    while let Some(left) = shares_on(device).filter_map(Share::freeing_ms).max()
        && sys::now_ms().saturating_sub(started) < MOST_WAIT_MS
    {
        sys::sleep_ms(left.min(LOOK_AGAIN_MS));
        let code = driver();
        if code != OUT_OF_MEMORY {
            return code;
        }
    }
    OUT_OF_MEMORY
}

/// Charges bytes that exist already, whatever the limit is.
pub(crate) fn charge_forced(device: Device, bytes: u64) {
    if bytes > 0
        && let Some(share) = shares_on(device).next()
    {
        share.charge_forced(bytes);
    }
}

/// Releases bytes.
pub(crate) fn release(device: Device, bytes: u64) {
    let mut left = bytes;
    for share in shares_on(device).rev() {
        if left == 0 {
            break;
        }
        left -= share.release_up_to(left);
    }
}

/// Returns the bytes that the shares on the device allow together; `u64::MAX` = no limit.
pub(crate) fn limit(device: Device) -> u64 {
    shares_on(device).fold(0, |sum: u64, share| sum.saturating_add(share.limit()))
}

/// A device's memory as a tenant sees it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The quota, or the device's memory if that is less.
    pub total: u64,
    /// The part of it that is not charged, at most what the device has free.
    pub free: u64,
    /// The part of it that is charged.
    pub used: u64,
}

/// Turns what the driver says about a device into what the tenant sees.
pub(crate) fn seen(device: Device, free: u64, total: u64) -> Seen {
    contexts::refresh(device);
    pools::settle_all(device);
    graphs::settle_all(device);
    shared::settle(device);
    see(shares_on(device), free, total)
}

/// Does what [`seen`] does for NVML, for the shares of a GPU by its UUID.
pub(crate) fn seen_by_uuid(uuid: &[u8], free: u64, total: u64) -> Option<Seen> {
    let on_it = || {
        config::shares().iter().filter(|share| share.uuid().is_some_and(|id| id.as_str().as_bytes() == uuid))
    };
    on_it().next()?;
    Some(see(on_it(), free, total))
}

fn see(shares: impl Iterator<Item = &'static Share>, free: u64, total: u64) -> Seen {
    let (mut limit, mut used) = (0_u64, 0_u64);
    for share in shares {
        share.reap();
        limit = limit.saturating_add(share.limit());
        used = used.saturating_add(share.total());
    }
    let total = total.min(limit);
    Seen { total, free: total.saturating_sub(used).min(free), used: used.min(total) }
}

/// Notes audit bits about the whole process, for the node agent.
pub(crate) fn note_in_all(bits: u64) {
    keep_note(bits);
    for share in config::shares() {
        share.note(bits);
    }
}

/// Notes audit bits on all shares of a device, for the node agent.
pub(crate) fn note(device: Device, bits: u64) {
    for share in shares_on(device) {
        share.note(bits);
    }
}

/// Bytes of this process's charge on each device that are not allocations.
static OVERHEAD: [AtomicU64; device::MOST] = [const { AtomicU64::new(0) }; device::MOST];

/// Counts a change of the bytes that are not allocations. The caller charges or releases them.
pub(crate) fn add_overhead(device: Device, change: i64) {
    let Some(cell) = OVERHEAD.get(device) else { return };
    let before = cell.fetch_add(change as u64, Relaxed);
    for share in shares_on(device).take(1) {
        share.show_overhead(before.wrapping_add(change as u64));
    }
}

/// Returns the bytes of this process's charge that are not allocations.
pub(crate) fn overhead(device: Device) -> u64 {
    OVERHEAD.get(device).map_or(0, |cell| cell.load(Relaxed))
}

/// Returns all bytes that this process has charged on a device.
pub(crate) fn held(device: Device) -> u64 {
    shares_on(device).map(Share::held).sum()
}

/// Forgets, in a forked child, everything that is the parent's.
pub(crate) fn renew_after_fork() {
    for cell in &OVERHEAD {
        cell.store(0, Relaxed);
    }
    device::renew_after_fork();
    linear::renew_after_fork();
    pools::renew_after_fork();
    graphs::renew_after_fork();
    vmm::renew_after_fork();
    shared::renew_after_fork();
    contexts::renew_after_fork();
    compute::renew_after_fork();
    captures::renew_after_fork();
}

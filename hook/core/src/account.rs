//! Charging a device's memory to the shares on it.
//!
//! Bytes are charged before the driver is asked for them. Where a container has several shares of one GPU, it
//! may use what they hold together: a charge fills them in order, a release empties them in reverse.

use crate::config;
use crate::device::{self, Device};
use crate::share::{Kind, Refusal, Share, keep_note};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

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

/// Charges `bytes` of either kind if they fit right now. `now` is [`crate::sys::coarse_ms`].
#[inline]
pub(crate) fn try_charge(device: Device, bytes: u64, kind: Kind, now: u64) -> Result<(), Refusal> {
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

/// Forgets, in a forked child, what the parent has charged.
pub(crate) fn renew_after_fork() {
    for cell in &OVERHEAD {
        cell.store(0, Relaxed);
    }
}

//! Charges that a program's calls ask for, and what is taken back before one is refused.
//!
//! What a device's account says is first brought up to date: contexts, pools, graphs and memory that others
//! have may hold less, or more, than is charged for them. Then this process gives back what it keeps without
//! need, and what dead processes held comes back.

use crate::account::{self, shares_on};
use crate::contexts::overhead::{glance, refresh};
use crate::cu_result::OUT_OF_MEMORY;
use crate::device::Device;
use crate::graphs::reserved::{settle_graphs, trim_graphs};
use crate::pools::reserved::{settle_pools, trim_pools};
use crate::share::{Kind, Refusal, Share};
use crate::shared;
use crate::sys;

/// The longest time that a call waits for memory of dead processes, in milliseconds of its own clock,
/// whatever the region says.
const MOST_WAIT_MS: u64 = 5000;

/// The time after which a refused charge looks again while a dead process's memory is about to come back, in
/// milliseconds.
const LOOK_AGAIN_MS: u64 = 5;

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
    glance(device, now);
    account::try_charge(device, bytes, kind, now)
}

/// Brings the charge of everything that changes without a call up to date.
pub(crate) fn bring_up_to_date(device: Device) {
    refresh(device);
    settle_pools(device);
    settle_graphs(device);
    shared::settle(device);
}

/// Gives back to the driver what this process's pools and graphs keep without need.
pub(crate) fn trim(device: Device) {
    trim_pools(device);
    trim_graphs(device);
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
    bring_up_to_date(device);
    if try_charge_as(device, bytes, kind).is_ok() {
        return Ok(());
    }
    // Only what this process keeps without need can be given back.
    trim(device);
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
        let could_ever_fit = may_wait && (kind == Kind::Managed || bytes <= account::limit(device));
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

//! What this process holds on a device that is not allocations, as it grows unseen.

use super::book::{AGENT_KNOWS, CHANGED_NS, COSTS, REFRESHING, UNDER_WAY};
use crate::account;
use crate::device::{self, Device};
use crate::nvml::ask::{self, Use};
use crate::share::{Share, own_identity};
use crate::sys;
use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};

/// The shortest time between two measurements of what is not allocations, in milliseconds.
const AGE_MS: u64 = 500;

/// Measures again which part of this process's memory is not allocations: modules are loaded lazily, and
/// kernels need more local memory. This is done at most once in [`AGE_MS`]: by what the node agent measured,
/// or else by NVML, which takes its time, and only where NVML lists this process.
pub(crate) fn refresh(device: Device) {
    let now = sys::coarse_ms();
    glance(device, now);
    static MEASURED: [AtomicU64; device::MOST] = [const { AtomicU64::new(0) }; device::MOST];
    let is_known = AGENT_KNOWS.get(device).is_some_and(|known| known.load(Relaxed));
    let Some(cell) =
        MEASURED.get(device).filter(|_| !is_known && ask::shows_our_pids() && UNDER_WAY.load(Acquire) == 0)
    else {
        return;
    };
    if !is_due(cell, now) {
        return;
    }
    let counted = || account::held(device).saturating_sub(account::overhead(device));
    let counted_before = counted();
    let Use::Listed(measured) = used_by_us(device) else { return };
    if UNDER_WAY.load(Acquire) != 0 {
        return;
    }
    // The count at the instant of the measurement lies between these two; the larger one blames no
    // allocation.
    let counted = counted_before.max(counted());
    let _one_at_a_time = REFRESHING.lock();
    let beyond = measured.saturating_sub(counted);
    set_overhead(device, beyond..=beyond);
}

/// Takes over what the node agent has measured since, at most once in [`AGE_MS`]. It is cheap enough for
/// every charge, so hidden memory is also found in programs that never ask how much they have. `now` is
/// [`sys::coarse_ms`].
pub(crate) fn glance(device: Device, now: u64) {
    static GLANCED: [AtomicU64; device::MOST] = [const { AtomicU64::new(0) }; device::MOST];
    let (Some(cell), Some(known)) = (GLANCED.get(device), AGENT_KNOWS.get(device)) else { return };
    if !is_due(cell, now) {
        return;
    }
    let found = own_identity().and_then(|own| {
        account::shares_on(device).find_map(|share| {
            let page = share.measured()?;
            let measured = page.fresh()?;
            let ours = measured.processes().find(|process| process.identity == own)?;
            Some((measured.taken_ns, ours.bytes, ours.counted_bytes))
        })
    });
    let found = found.filter(|(_, bytes, [_, most])| *bytes != u64::MAX && *most != u64::MAX);
    known.store(found.is_some(), Relaxed);
    let Some((taken_ns, bytes, [least, most])) = found else { return };
    let _one_at_a_time = REFRESHING.lock();
    // A context that came or went since is in one of the figures only.
    let changed = CHANGED_NS.get(device).map_or(u64::MAX, |changed| changed.load(Acquire));
    if UNDER_WAY.load(Acquire) == 0 && taken_ns > changed {
        set_overhead(device, bytes.saturating_sub(most)..=bytes.saturating_sub(least));
    }
}

fn is_due(cell: &AtomicU64, now: u64) -> bool {
    let before = cell.load(Relaxed);
    now.wrapping_sub(before) >= AGE_MS && cell.compare_exchange(before, now, Relaxed, Relaxed).is_ok()
}

/// Charges as overhead what it is known to be within these bounds. The caller holds [`REFRESHING`].
fn set_overhead(device: Device, bounds: core::ops::RangeInclusive<u64>) {
    let mut known = 0;
    COSTS.lock().find_key(|_, cost| {
        known += if usize::from(cost.device) == device { cost.bytes } else { 0 };
        false
    });
    let charged = account::overhead(device);
    let overhead = charged.min(*bounds.end()).max(*bounds.start()).max(known);
    if overhead > charged {
        account::charge_forced(device, overhead - charged);
    } else {
        account::release(device, charged - overhead);
    }
    account::add_overhead(device, overhead.wrapping_sub(charged) as i64);
}

/// Returns the memory that this process holds on a device, by NVML's account.
pub(super) fn used_by_us(device: Device) -> Use {
    ask::used_by_us(account::shares_on(device).next().and_then(Share::uuid))
}

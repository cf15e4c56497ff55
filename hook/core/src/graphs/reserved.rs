//! What devices have reserved for graphs: the charge follows it, and what nothing uses goes back.

use super::book::{BOOK, TRIMS};
use crate::account;
use crate::captures;
use crate::cu_result::REFUSED;
use crate::device::Device;
use crate::real::{self, call};
use crate::state::{self, Mode};
use core::sync::atomic::Ordering::Relaxed;

/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`
const RESERVED_CURRENT: i32 = 2;

fn reserved(device: Device) -> Option<u64> {
    let (mut value, ordinal) = (0, i32::try_from(device).ok()?);
    // SAFETY: the driver writes one 64-bit value for this attribute.
    (unsafe { real::cuDeviceGetGraphMemAttribute(ordinal, RESERVED_CURRENT, &mut value) } == Some(0))
        .then_some(value)
}

/// Sets the charge to what is reserved plus what calls in flight may add. Returns by how many bytes it had
/// grown beyond what was charged. The attribute is read under the lock, which never blocks: what is read must
/// not be older than what is charged.
pub(super) fn settle(device: Device) -> u64 {
    let mut book = BOOK.lock();
    let Some(memory) = book.memory.get_mut(device).filter(|memory| memory.charged > 0) else { return 0 };
    let Some(reserved) = reserved(device) else { return 0 };
    let target = reserved + memory.in_flight;
    let before = core::mem::replace(&mut memory.charged, target);
    if target < before {
        account::release(device, before - target);
        return 0;
    }
    account::charge_forced(device, target - before);
    target - before
}

/// Brings the charge of a device's graph memory up to date.
pub(crate) fn settle_graphs(device: Device) {
    settle(device);
}

/// Gives graph memory that nothing uses back to the driver.
pub(crate) fn trim_graphs(device: Device) {
    let charged = BOOK.lock().memory.get(device).is_some_and(|memory| memory.charged > 0);
    if let Some(ordinal) = i32::try_from(device).ok().filter(|_| charged) {
        // SAFETY: a device of the process.
        trim(ordinal, || captures::relaxed(|| unsafe { call!(cuDeviceGraphMemTrim(ordinal)) }));
    }
}

/// Trims a device's graph memory (`cuDeviceGraphMemTrim`).
pub(crate) fn trim(device: i32, driver: impl Fn() -> i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    TRIMS.fetch_add(1, Relaxed);
    let code = driver();
    if let Ok(device) = usize::try_from(device) {
        settle(device);
    }
    code
}

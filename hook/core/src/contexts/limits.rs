//! Limits that a program sets in its context (`cuCtxSetLimit`), as far as the driver takes device memory for
//! them.
//!
//! cuda.h and NVIDIA's programming guide say this about them:
//! - the stack is so many bytes for each thread, so for every thread that the device can hold at once, and is
//!   raised at once;
//! - the heap of kernels and the buffer of their `printf` are so many bytes, taken when code is next loaded
//!   at the latest;
//! - what the device runtime needs for nested kernels is device memory; they do not say how much.
//!
//! The growth is charged before the driver is asked, and corrected afterwards by what NVML shows, where it
//! shows this process.

use super::book::{COSTS, REFRESHING, Raised, UnderWay, note_change};
use super::overhead::used_by_us;
use crate::account;
use crate::cu_result::{OUT_OF_MEMORY, REFUSED};
use crate::device::{self, Device};
use crate::nvml::ask::Use;
use crate::real;
use crate::reclaim;
use crate::state::{self, Mode};

/// The deepest nesting of kernels that wait for each other, and the most launches under way, that need
/// nothing extra.
const USUAL_DEPTH: u64 = 2;
const USUAL_LAUNCHES: u64 = 2048;
/// Device memory of each further level (the guide tells of about 150 MiB where a device is full of threads),
/// and of each further launch (assumed: its 4 KiB of parameters and as much again).
const LEVEL_BYTES: u64 = 150 << 20;
const LAUNCH_BYTES: u64 = 8 << 10;

/// A kind of limit, by its number in `CUlimit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    Stack,
    Printf,
    Heap,
    Depth,
    Launches,
}

impl Limit {
    fn of(number: u32) -> Option<Self> {
        [Self::Stack, Self::Printf, Self::Heap, Self::Depth, Self::Launches].get(number as usize).copied()
    }

    /// Returns true if the driver may take the memory later than now, and gives it back when the limit is
    /// lowered.
    fn is_plain(self) -> bool {
        matches!(self, Self::Printf | Self::Heap)
    }

    /// Returns the bytes of device memory for a limit of `value` beyond one of `base`.
    fn bytes(self, device: Device, base: u64, value: u64) -> u64 {
        let (least, each) = match self {
            Self::Stack => (0, threads(device)),
            Self::Printf | Self::Heap => (0, 1),
            Self::Depth => (USUAL_DEPTH, LEVEL_BYTES),
            Self::Launches => (USUAL_LAUNCHES, LAUNCH_BYTES),
        };
        value.saturating_sub(base.max(least)).saturating_mul(each)
    }
}

/// Returns the number of threads that a device can hold at once.
fn threads(device: Device) -> u64 {
    const MULTIPROCESSORS: i32 = 16;
    const THREADS_OF_EACH: i32 = 39;
    /// The most threads of a multiprocessor that any device has had.
    const MOST: i32 = 2048;
    let attribute = |which: i32| {
        let mut value = 0;
        // SAFETY: the driver writes one integer.
        unsafe { real::cuDeviceGetAttribute(&mut value, which, device as i32) };
        value
    };
    let each = Some(attribute(THREADS_OF_EACH)).filter(|each| *each > 0).unwrap_or(MOST);
    u64::from(attribute(MULTIPROCESSORS).unsigned_abs()) * u64::from(each.unsigned_abs())
}

fn current(limit: u32) -> Option<u64> {
    let mut value = 0;
    // SAFETY: the driver writes one number.
    (unsafe { real::cuCtxGetLimit(&mut value, limit) } == Some(0)).then_some(value)
}

/// Sets a limit of the current context.
pub(crate) fn set(number: u32, value: u64, driver: impl Fn() -> i32) -> i32 {
    match state::mode() {
        Mode::Failed => return REFUSED,
        Mode::Unlimited => return driver(),
        Mode::Limited => {}
    }
    let here = device::current().filter(|(device, _)| account::is_limited(*device));
    let (Some((device, context)), Some(limit), Some(before)) = (here, Limit::of(number), current(number))
    else {
        return driver();
    };
    let raised = COSTS.lock().get(context).and_then(|cost| cost.raised.get(number as usize).copied());
    let raised = raised.unwrap_or_default();
    let base = raised.base.unwrap_or(before);
    let reserved = limit.bytes(device, base, value).saturating_sub(raised.bytes);
    // Nobody may measure what grows until it is entered.
    let _under_way = UnderWay::begin();
    if reclaim::charge(device, reserved).is_err() {
        return OUT_OF_MEMORY;
    }
    let (used, held) = (used_by_us(device), account::held(device));
    let code = reclaim::retry(device, driver(), &driver);
    if code != 0 {
        account::release(device, reserved);
        return code;
    }
    let measured = match (used, used_by_us(device)) {
        (Use::Listed(before), Use::Listed(after)) if reserved > 0 => {
            // Memory that other threads allocated meanwhile is not the context's.
            let meanwhile = account::held(device).saturating_sub(held);
            Some(after.saturating_sub(before).saturating_sub(meanwhile))
        }
        _ => None,
    };
    // The driver may have rounded the limit, and keeps a stack that it once had.
    let wanted = limit.bytes(device, base, current(number).unwrap_or(value));
    let kept = if limit.is_plain() { wanted } else { wanted.max(raised.bytes) };
    let growth = kept.saturating_sub(raised.bytes);
    let growth = match measured {
        Some(measured) if limit.is_plain() => measured.max(growth),
        Some(measured) => measured,
        None => growth,
    };
    let _one_at_a_time = REFRESHING.lock();
    let given_back = {
        let mut costs = COSTS.lock();
        let cost = costs.get_mut(context);
        let given_back = cost.as_ref().map_or(0, |cost| raised.bytes.saturating_sub(kept).min(cost.bytes));
        if let Some(cost) = cost {
            cost.bytes = cost.bytes.saturating_add(growth).saturating_sub(given_back);
            if let Some(raised) = cost.raised.get_mut(number as usize) {
                *raised = Raised { base: Some(base), bytes: kept };
            }
        }
        given_back
    };
    if growth > reserved {
        account::charge_forced(device, growth - reserved);
    } else {
        account::release(device, reserved - growth);
    }
    account::release(device, given_back);
    account::add_overhead(device, growth.wrapping_sub(given_back) as i64);
    note_change(device);
    0
}

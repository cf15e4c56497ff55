//! Entries that tell how much memory there is: the tenant's own part.

use crate::account;
use crate::cu_result::REFUSED;
use crate::device;
use crate::gate::{Gate, gate};
use crate::real::call;
use crate::seen::seen;
use crate::state::{self, Mode};

pub(super) unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32 {
    let device = match gate() {
        Gate::Refuse(code) => return code,
        Gate::Pass => None,
        Gate::Limit(device, _) => Some(device),
    };
    // SAFETY: the caller's own arguments; the driver has written both where it answers 0.
    unsafe {
        let code = call!(cuMemGetInfo_v2(free, total));
        if code == 0
            && let (Some(device), Some(free), Some(total)) = (device, free.as_mut(), total.as_mut())
        {
            let seen = seen(device, *free as u64, *total as u64);
            (*free, *total) = (seen.free as usize, seen.total as usize);
        }
        code
    }
}

pub(super) unsafe extern "C" fn cuMemGetInfo(free: *mut u32, total: *mut u32) -> i32 {
    let device = match gate() {
        Gate::Refuse(code) => return code,
        Gate::Pass => None,
        Gate::Limit(device, _) => Some(device),
    };
    // SAFETY: as above.
    unsafe {
        let code = call!(cuMemGetInfo(free, total));
        if code == 0
            && let (Some(device), Some(free), Some(total)) = (device, free.as_mut(), total.as_mut())
        {
            let seen = seen(device, u64::from(*free), u64::from(*total));
            *free = u32::try_from(seen.free).unwrap_or(u32::MAX);
            *total = u32::try_from(seen.total).unwrap_or(u32::MAX);
        }
        code
    }
}

/// Returns the quota of a device in bytes, if one is set.
fn limit(device: i32) -> Option<u64> {
    let device = usize::try_from(device).ok().filter(|device| *device < device::MOST)?;
    account::is_limited(device).then(|| account::limit(device))
}

pub(super) unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    // SAFETY: the caller's own arguments; the driver has written the result where it answers 0.
    unsafe {
        let code = call!(cuDeviceTotalMem_v2(bytes, device));
        if code == 0
            && let (Some(bytes), Some(limit)) = (bytes.as_mut(), limit(device))
        {
            *bytes = (*bytes).min(usize::try_from(limit).unwrap_or(usize::MAX));
        }
        code
    }
}

pub(super) unsafe extern "C" fn cuDeviceTotalMem(bytes: *mut u32, device: i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    // SAFETY: as above.
    unsafe {
        let code = call!(cuDeviceTotalMem(bytes, device));
        if code == 0
            && let (Some(bytes), Some(limit)) = (bytes.as_mut(), limit(device))
        {
            *bytes = (*bytes).min(u32::try_from(limit).unwrap_or(u32::MAX));
        }
        code
    }
}

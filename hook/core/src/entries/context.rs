//! Entries of contexts.

use crate::contexts;
use crate::real::call;
use core::ffi::c_void;

pub(super) unsafe extern "C" fn cuDevicePrimaryCtxRetain(out: *mut u64, device: i32) -> i32 {
    // SAFETY: the caller's own arguments; the result is read after the driver has written it.
    unsafe {
        let undo = |_: u64| {
            call!(cuDevicePrimaryCtxRelease_v2(device));
        };
        contexts::retain_primary(device, || call!(cuDevicePrimaryCtxRetain(out, device)), || *out, undo)
    }
}

macro_rules! primary {
    ($($symbol:ident, $is_reset:literal;)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(device: i32) -> i32 {
                // SAFETY: the caller's own argument.
                contexts::release_primary(device, || unsafe { call!($symbol(device)) }, $is_reset)
            }
        )*
    };
}
primary! {
    cuDevicePrimaryCtxRelease, false;
    cuDevicePrimaryCtxRelease_v2, false;
    cuDevicePrimaryCtxReset, true;
    cuDevicePrimaryCtxReset_v2, true;
}

fn undo(context: u64) {
    // SAFETY: a context that the driver has just made and nobody has seen.
    unsafe { call!(cuCtxDestroy_v2(context)) };
}

pub(super) unsafe extern "C" fn cuCtxCreate(out: *mut u64, flags: u32, device: i32) -> i32 {
    // SAFETY: the caller's own arguments; the result is read after the driver has written it.
    unsafe { contexts::create(device, || call!(cuCtxCreate(out, flags, device)), || *out, undo) }
}

pub(super) unsafe extern "C" fn cuCtxCreate_v2(out: *mut u64, flags: u32, device: i32) -> i32 {
    // SAFETY: as above.
    unsafe { contexts::create(device, || call!(cuCtxCreate_v2(out, flags, device)), || *out, undo) }
}

pub(super) unsafe extern "C" fn cuCtxCreate_v3(
    out: *mut u64,
    affinity: *mut c_void,
    count: i32,
    flags: u32,
    device: i32,
) -> i32 {
    // SAFETY: as above.
    unsafe {
        let driver = || call!(cuCtxCreate_v3(out, affinity, count, flags, device));
        contexts::create(device, driver, || *out, undo)
    }
}

pub(super) unsafe extern "C" fn cuCtxCreate_v4(
    out: *mut u64,
    parameters: *mut c_void,
    flags: u32,
    device: i32,
) -> i32 {
    // SAFETY: as above.
    unsafe {
        let driver = || call!(cuCtxCreate_v4(out, parameters, flags, device));
        contexts::create(device, driver, || *out, undo)
    }
}

macro_rules! destroy {
    ($($symbol:ident)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(context: u64) -> i32 {
                // SAFETY: the caller's own argument.
                contexts::destroy(context, || unsafe { call!($symbol(context)) })
            }
        )*
    };
}
destroy!(cuCtxDestroy cuCtxDestroy_v2 cuGreenCtxDestroy);

pub(super) unsafe extern "C" fn cuCtxDetach(context: u64) -> i32 {
    // SAFETY: the caller's own argument.
    contexts::destroy(context, || unsafe { call!(cuCtxDetach(context)) })
}

pub(super) unsafe extern "C" fn cuGreenCtxCreate(
    out: *mut u64,
    resource: *mut c_void,
    device: i32,
    flags: u32,
) -> i32 {
    // SAFETY: the caller's own arguments; the result is read after the driver has written it.
    unsafe {
        let undo = |context: u64| {
            call!(cuGreenCtxDestroy(context));
        };
        contexts::create(device, || call!(cuGreenCtxCreate(out, resource, device, flags)), || *out, undo)
    }
}

pub(super) unsafe extern "C" fn cuCtxSetLimit(limit: u32, value: usize) -> i32 {
    // SAFETY: the caller's own arguments.
    contexts::set_limit(limit, value as u64, || unsafe { call!(cuCtxSetLimit(limit, value)) })
}

pub(super) unsafe extern "C" fn cuCheckpointProcessRestore(pid: i32, arguments: *mut c_void) -> i32 {
    // SAFETY: null, or the caller's record with its array.
    let moves = unsafe { arguments.cast::<Restore>().as_ref().is_some_and(|restore| restore.moves()) };
    // SAFETY: the caller's own arguments.
    contexts::restore(moves, || unsafe { call!(cuCheckpointProcessRestore(pid, arguments)) })
}

/// `CUcheckpointRestoreArgs`, whose words of before CUDA 13 are zero.
#[repr(C)]
struct Restore {
    /// UUIDs of each device before and after.
    pairs: *const [[u8; 16]; 2],
    count: u32,
}

impl Restore {
    /// Returns true if memory comes back to another device than it was on.
    ///
    /// # Safety
    /// There are so many pairs.
    unsafe fn moves(&self) -> bool {
        let count = if self.pairs.is_null() { 0 } else { self.count as usize };
        (0..count).any(|at| {
            // SAFETY: the caller's array of that many pairs.
            let [from, to] = unsafe { self.pairs.add(at).read_unaligned() };
            from != to
        })
    }
}

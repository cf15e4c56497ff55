//! Entries of initialisation and of the resolver.

use crate::cu_result::REFUSED;
use crate::device;
use crate::real::call;
use crate::resolver;
use crate::state::{self, Mode};
use core::ffi::{c_char, c_void};
use core::ptr::null_mut;

/// Initialises the driver first; then matches shares with the devices that it shows.
pub(super) unsafe extern "C" fn cuInit(flags: u32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    // SAFETY: the caller's own argument.
    let code = unsafe { call!(cuInit(flags)) };
    if code != 0 || state::mode() != Mode::Limited {
        return code;
    }
    match device::match_shares() {
        Ok(()) => code,
        Err(reason) => state::fail(reason.as_str()),
    }
}

pub(super) unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> i32 {
    // SAFETY: the caller's own arguments, and a local in place of the result.
    unsafe {
        let code = call!(cuGetProcAddress(symbol, function, version, flags));
        let ask = |version: u32| {
            let mut found: *mut c_void = null_mut();
            let code = call!(cuGetProcAddress(symbol, &mut found as *mut *mut c_void, version as i32, flags));
            if code == 0 { found as usize } else { 0 }
        };
        resolver::answer(code, symbol, function, (version, flags), null_mut(), ask, super::address)
    }
}

pub(super) unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
    status: *mut i32,
) -> i32 {
    // SAFETY: the caller's own arguments, and locals in place of the results.
    unsafe {
        let code = call!(cuGetProcAddress_v2(symbol, function, version, flags, status));
        let ask = |version: u32| {
            let (mut found, mut status): (*mut c_void, i32) = (null_mut(), 0);
            let (found_at, status_at) = (&mut found as *mut *mut c_void, &mut status as *mut i32);
            let code = call!(cuGetProcAddress_v2(symbol, found_at, version as i32, flags, status_at));
            if code == 0 { found as usize } else { 0 }
        };
        resolver::answer(code, symbol, function, (version, flags), status, ask, super::address)
    }
}

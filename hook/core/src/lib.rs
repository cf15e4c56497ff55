//! The limiter's core: it charges device memory to the claim's share before the driver is asked for it, and
//! shows the tenant its own part of the GPU. The stub loads it at the first CUDA or NVML look-up.
//!
//! The core must never do any of these:
//! - let a program have more memory than its quota where it can tell;
//! - break a program that it does not limit;
//! - allocate from the program's heap, use thread-local storage, or print more than one message;
//! - change signal handlers, working directory, umask or environment, or end the process;
//! - wait for another process;
//! - hold a lock across a driver call that can block.
//!
//! Reading order: [`table`] (what is taken over), [`entries`] (the functions that stand in), [`account`] and
//! [`share`] (the account, which calls nothing above it), [`reclaim`] (what comes back before a charge is
//! refused), [`linear`], [`pools`], [`vmm`], [`graphs`], [`contexts`] (what each family charges), [`shared`]
//! (exports), [`compute`] (launches), [`resolver`] (`cuGetProcAddress`), [`state`] (failing closed), [`fork`]
//! (forked children).
//!
//! A module's `book` is what the process knows; it is below [`state`], so that a forked child can forget it.

#![cfg_attr(not(test), no_std)]
#![allow(unsafe_code, reason = "a library of C entry points; every block says why it is sound")]
#![allow(non_snake_case, reason = "entries are named after the symbols that they replace")]
#![allow(clippy::result_large_err, reason = "reasons are texts, there is no allocator, and errors are rare")]

mod account;
mod allocations;
mod arrays;
mod captures;
mod compute;
mod config;
mod contexts;
mod cu_result;
mod device;
mod entries;
mod env;
mod fork;
mod gate;
mod graphs;
mod linear;
mod lock;
mod log;
mod map;
mod nvml;
mod pages;
mod path;
mod pools;
mod real;
mod reclaim;
mod resolver;
mod seen;
mod share;
mod shared;
mod state;
mod stream;
mod sys;
mod table;
mod vmm;

use core::ffi::{CStr, c_char, c_int, c_void};

/// Version of the agreement between stub and core; both files of a release have the same.
const AGREEMENT: u32 = 1;

/// The record that the stub gives to the core: see `start.rs` of the stub.
#[repr(C)]
struct Given {
    agreement: u32,
    count: u32,
    dlsym: *mut c_void,
    dlvsym: *mut c_void,
    dlopen: *mut c_void,
}

/// The record that the core gives to the stub.
#[repr(C)]
struct Core {
    agreement: u32,
    count: u32,
    entries: *const *const c_void,
    row: unsafe extern "C" fn(u32, *mut c_void) -> *mut c_void,
    other: unsafe extern "C" fn(*const c_char, *mut c_void) -> *mut c_void,
    opened: unsafe extern "C" fn(c_int),
}

/// Returns the answer to a look-up of a row's symbol.
unsafe extern "C" fn row(hook: u32, found: *mut c_void) -> *mut c_void {
    let known = table::Hook::of(hook as usize).map_or(core::ptr::null_mut(), real::function);
    if !known.is_null() && known != found {
        // A second copy of the vendor's library: its handles mean nothing to the first one.
        return resolver::refusing();
    }
    entries::address(hook as usize)
}

/// Returns the answer to a look-up of another symbol of the vendor's library.
unsafe extern "C" fn other(name: *const c_char, found: *mut c_void) -> *mut c_void {
    // SAFETY: the stub passes the name that the program looked up.
    resolver::other(unsafe { CStr::from_ptr(name) }.to_bytes(), found)
}

/// Notes a call of `dlopen`.
unsafe extern "C" fn opened(flags: c_int) {
    const RTLD_DEEPBIND: c_int = 8;
    if flags & RTLD_DEEPBIND != 0 {
        account::note_in_all(aliquot_quota::region::audit::DEEPBIND);
    }
}

/// Starts the core: the one symbol of the core that the stub looks for. Returns null if the stub is of
/// another release.
///
/// # Safety
/// `given` is the stub's record, whose functions are the loader's.
#[unsafe(no_mangle)]
unsafe extern "C" fn aliquot_core_start(given: *const c_void) -> *const c_void {
    struct Shared(Core);
    // SAFETY: constants and the address of a static array.
    unsafe impl Sync for Shared {}
    static CORE: Shared = Shared(Core {
        agreement: AGREEMENT,
        count: table::COUNT as u32,
        entries: entries::ALL,
        row,
        other,
        opened,
    });
    // SAFETY: the stub's record.
    let Some(given) = (unsafe { given.cast::<Given>().as_ref() }) else { return core::ptr::null() };
    if given.agreement != AGREEMENT || given.count != table::COUNT as u32 {
        return core::ptr::null();
    }
    real::set_loader(given.dlsym, given.dlopen);
    (&raw const CORE.0).cast()
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Nothing here is meant to panic; a defect ends the process like any other fault.
    loop {
        sys::trap();
    }
}

// The compiled library `core` names the function that unwinding would call; nothing here unwinds.
#[cfg(all(not(test), target_arch = "aarch64"))]
core::arch::global_asm!(
    ".globl rust_eh_personality",
    ".hidden rust_eh_personality",
    "rust_eh_personality:",
    "brk #1",
);

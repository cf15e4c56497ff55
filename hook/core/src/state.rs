//! The mode of this process: whether it is limited. It is found out once, and again in each forked child.
//!
//! The word that holds the mode is on a page that reads as zero in forked children, so a child never believes
//! what its parent found out, however it was forked.

use crate::cu_result::REFUSED;
use crate::sys;
use crate::{config, fork, log};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32};

const UNKNOWN: u32 = 0;
const LIMITED: u32 = 1;
const FAILED: u32 = 2;
const UNLIMITED: u32 = 3;

/// The mode's word until there is a page, and where there is no memory for one.
static FALLBACK: AtomicU32 = AtomicU32::new(UNKNOWN);
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
/// The process that reads the configuration, or has read it.
static READER: AtomicU32 = AtomicU32::new(0);

fn word() -> &'static AtomicU32 {
    // SAFETY: null or a page that is never unmapped.
    unsafe { PAGE.load(Acquire).as_ref() }.unwrap_or(&FALLBACK)
}

/// What the limiter does in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The limiter limits.
    Limited,
    /// The limiter refuses CUDA.
    Failed,
    /// The limiter failed, and the DeviceClass lets programs run all the same.
    Unlimited,
}

/// Returns the process's mode, which the first call finds out.
#[inline]
pub(crate) fn mode() -> Mode {
    match word().load(Acquire) {
        LIMITED => Mode::Limited,
        FAILED => Mode::Failed,
        UNLIMITED => Mode::Unlimited,
        _ => find_out(),
    }
}

/// Makes a call that is not limited, but is refused where CUDA is.
pub(crate) fn pass(driver: impl Fn() -> i32) -> i32 {
    if mode() == Mode::Failed { REFUSED } else { driver() }
}

#[cold]
fn find_out() -> Mode {
    loop {
        match word().load(Acquire) {
            LIMITED => return Mode::Limited,
            FAILED => return Mode::Failed,
            UNLIMITED => return Mode::Unlimited,
            _ => {}
        }
        let me = sys::process_id();
        let reader = READER.load(Acquire);
        if reader == me {
            // Another thread is reading; it calls none of the limiter's entries meanwhile.
            sys::sleep_ms(1);
            continue;
        }
        if READER.compare_exchange(reader, me, AcqRel, Relaxed).is_err() {
            continue;
        }
        if reader == 0 {
            let page = sys::memory(4096);
            if !page.is_null() && sys::wipe_on_fork(page, 4096) {
                PAGE.store(page.cast(), Release);
            }
            register_fork_handler();
        } else {
            fork::renew();
        }
        let found = match config::load() {
            Ok(()) => LIMITED,
            Err(reason) => {
                log::refusal(reason.as_str());
                FAILED
            }
        };
        word().store(found, Release);
    }
}

/// Gives up: from here on CUDA is refused, and the reason is told once. If the DeviceClass of every share
/// allows it, programs run unlimited instead. Returns 0 in that case, else the CUDA code.
pub(crate) fn fail(reason: &str) -> i32 {
    let shares = config::shares();
    if !shares.is_empty() && shares.iter().all(|share| share.may_fail_open()) {
        log::note(format_args!("running without limits, as the device class allows: {reason}"));
        word().store(UNLIMITED, Release);
        return 0;
    }
    log::refusal(reason);
    word().store(FAILED, Release);
    REFUSED
}

/// Has the word forgotten in children of the C library's fork, for kernels that cannot wipe a page.
fn register_fork_handler() {
    type Handler = Option<unsafe extern "C" fn()>;
    unsafe extern "C" {
        fn __register_atfork(
            before: Handler,
            parent: Handler,
            child: Handler,
            library: *mut core::ffi::c_void,
        ) -> i32;
    }
    unsafe extern "C" fn in_child() {
        word().store(UNKNOWN, Release);
    }
    // SAFETY: libc's function behind pthread_atfork; the handler stores one word and is never unloaded.
    unsafe { __register_atfork(None, None, Some(in_child), core::ptr::null_mut()) };
}

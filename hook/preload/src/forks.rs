//! Keeps walks over what is loaded and forks apart, so that one comes after the other.
//!
//! The loader walks under a lock. If another thread forks meanwhile, the lock stays locked in the child,
//! whose next walk would wait for ever. So the C library's `fork` waits for the stub's walks, and they wait
//! for it.
//!
//! Either takes microseconds, but a busy machine stops a walk for a tenth of a second, and the fork of a process with
//! hundreds of gigabytes takes seconds. So each waits for the other for as long as [`ROUNDS`] says. It gives up then,
//! because the other may itself wait for what this thread has: a fork out of a signal handler within a walk, or a walk
//! behind somebody else's that waits for an allocator which is locked for the fork.

use crate::scope;
use crate::sys;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// The number of walks under way.
static WALKS: AtomicU32 = AtomicU32::new(0);
/// The number of forks under way.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The number of times that one side waits, at most 10 ms each time: 10 s together.
const ROUNDS: usize = 1000;

/// Makes a walk when nobody forks.
pub(crate) fn walk<R>(walk: impl FnOnce() -> R) -> R {
    for round in 0..=ROUNDS {
        WALKS.fetch_add(1, SeqCst);
        let forks = FORKS.load(SeqCst);
        if forks == 0 || round == ROUNDS {
            break;
        }
        leave();
        sys::wait(&FORKS, forks);
    }
    let result = walk();
    leave();
    result
}

fn leave() {
    // A child that was forked within a walk of its own thread begins at 0.
    let before = WALKS.fetch_update(SeqCst, SeqCst, |walks| walks.checked_sub(1));
    if before == Ok(1) && FORKS.load(SeqCst) > 0 {
        sys::wake(&WALKS);
    }
}

/// Makes forks wait for walks from now on, where the C library can be asked for that.
pub(crate) fn watch() {
    type Handler = unsafe extern "C" fn();
    type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    let register = scope::of_libc(c"__register_atfork");
    if register.is_null() {
        return;
    }
    // SAFETY: glibc's function behind pthread_atfork has this type; the handlers touch two words, and we are
    // never unloaded.
    unsafe {
        let register = core::mem::transmute::<*mut c_void, Register>(register);
        register(before, in_parent, in_child, core::ptr::null_mut());
    }
}

unsafe extern "C" fn before() {
    FORKS.fetch_add(1, SeqCst);
    for _ in 0..ROUNDS {
        let walks = WALKS.load(SeqCst);
        if walks == 0 {
            break;
        }
        sys::wait(&WALKS, walks);
    }
}

unsafe extern "C" fn in_parent() {
    let _ = FORKS.fetch_update(SeqCst, SeqCst, |forks| forks.checked_sub(1));
    sys::wake(&FORKS);
}

unsafe extern "C" fn in_child() {
    WALKS.store(0, SeqCst);
    FORKS.store(0, SeqCst);
}

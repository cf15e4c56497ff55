//! Keeps walks over what is loaded and forks apart, so that one comes after the other.
//!
//! The loader walks under a lock. If another thread forks meanwhile, the lock stays locked in the child,
//! whose next walk would wait for ever. So the C library's `fork` waits for the stub's walks, and they wait
//! for it.
//!
//! Either takes microseconds, but a busy machine stops a walk for a tenth of a second, and the fork of a process with
//! hundreds of gigabytes takes seconds. So each waits for the other for as long as [`ROUNDS`] says. It gives up then,
//! because the other may itself wait for what this thread has, as a walk behind somebody else's that waits for an
//! allocator which is locked for the fork. A fork out of a signal handler waits for no walk of its own thread, and a
//! handler of a fork for no fork of its own.

use crate::scope;
use crate::sys;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};

/// The number of walks under way.
static WALKS: AtomicU32 = AtomicU32::new(0);
/// The number of forks under way.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// The process and thread that began the last fork.
static FORKER: AtomicU64 = AtomicU64::new(0);
/// True if a walk has waited for the present forks for as long as one does: no other waits for them.
static GIVEN_UP: AtomicBool = AtomicBool::new(false);
/// True if the last fork has waited for walks for as long as one does. The walk may never end, as its thread may be
/// gone, so the next ones wait a short time only, until there is no walk again.
static IN_VAIN: AtomicBool = AtomicBool::new(false);
/// Which threads walk, by their thread pointers; 0 = free. A walk that finds none free is made without an entry.
static WALKERS: [AtomicUsize; 32] = [const { AtomicUsize::new(0) }; 32];

/// The number of times that one side waits for 10 ms in which nothing happens: 10 s together.
const ROUNDS: usize = 1000;
/// The same for a fork after one that waited in vain.
const FEW_ROUNDS: usize = 10;

/// Makes a walk when nobody forks.
pub(crate) fn walk<R>(walk: impl FnOnce() -> R) -> R {
    // Before it is counted, so that a signal handler which forks finds it wherever it interrupts this.
    let me = sys::thread_pointer();
    let entry = WALKERS.iter().find(|entry| entry.compare_exchange(0, me, SeqCst, SeqCst).is_ok());
    let mut quiet = 0;
    loop {
        WALKS.fetch_add(1, SeqCst);
        let forks = FORKS.load(SeqCst);
        if forks == 0 || is_hopeless() {
            break;
        }
        if quiet == ROUNDS {
            GIVEN_UP.store(true, SeqCst);
            break;
        }
        leave();
        quiet += usize::from(sys::wait(&FORKS, forks));
    }
    let result = walk();
    leave();
    if let Some(entry) = entry {
        entry.store(0, SeqCst);
    }
    result
}

/// Returns true if it is no use to wait for the forks: another walk has, or this is a handler of the fork itself, in
/// the thread that forks or in the child.
fn is_hopeless() -> bool {
    let (forker, me) = (FORKER.load(SeqCst), sys::thread_of_process());
    GIVEN_UP.load(SeqCst) || forker == me || forker >> 32 != me >> 32
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
    // SAFETY: glibc's function behind pthread_atfork has this type; the handlers touch a few words, and we are
    // never unloaded.
    unsafe {
        let register = core::mem::transmute::<*mut c_void, Register>(register);
        register(before, in_parent, in_child, core::ptr::null_mut());
    }
}

unsafe extern "C" fn before() {
    FORKER.store(sys::thread_of_process(), SeqCst);
    FORKS.fetch_add(1, SeqCst);
    let me = sys::thread_pointer();
    let own = WALKERS.iter().filter(|entry| entry.load(SeqCst) == me).count();
    let rounds = if IN_VAIN.load(SeqCst) { FEW_ROUNDS } else { ROUNDS };
    let mut quiet = 0;
    loop {
        let walks = WALKS.load(SeqCst);
        if walks as usize <= own {
            IN_VAIN.store(false, SeqCst);
            break;
        }
        if quiet == rounds {
            IN_VAIN.store(true, SeqCst);
            break;
        }
        quiet += usize::from(sys::wait(&WALKS, walks));
    }
}

unsafe extern "C" fn in_parent() {
    let _ = FORKS.fetch_update(SeqCst, SeqCst, |forks| forks.checked_sub(1));
    GIVEN_UP.store(false, SeqCst);
    sys::wake(&FORKS);
}

unsafe extern "C" fn in_child() {
    WALKS.store(0, SeqCst);
    FORKS.store(0, SeqCst);
    GIVEN_UP.store(false, SeqCst);
    WALKERS.iter().for_each(|entry| entry.store(0, SeqCst));
}

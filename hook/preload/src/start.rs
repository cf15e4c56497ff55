//! Loads the core, once, when the first name of the table is looked up or called.

use crate::forks;
use crate::scope::{self, Loader};
use crate::sys;
use crate::table::COUNT;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

/// Version of the agreement between stub and core; both files of a release have the same.
pub(crate) const AGREEMENT: u32 = 1;

/// The type of `dlsym`.
pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

/// The record that the core is given.
#[repr(C)]
pub(crate) struct Given {
    /// [`AGREEMENT`].
    pub agreement: u32,
    /// The number of rows of the hook table.
    pub count: u32,
    /// The loader's own `dlsym`.
    pub dlsym: *mut c_void,
    /// The loader's own `dlvsym`.
    pub dlvsym: *mut c_void,
    /// The loader's own `dlopen`.
    pub dlopen: *mut c_void,
}

/// The record that the core gives back; it lives as long as the process.
#[repr(C)]
pub(crate) struct Core {
    /// [`AGREEMENT`].
    pub agreement: u32,
    /// The number of rows of the hook table.
    pub count: u32,
    /// The entry that replaces each row's symbol.
    pub entries: *const *const c_void,
    /// Answers a look-up of row `hook`, for which the vendor's library has `found`.
    pub row: unsafe extern "C" fn(hook: u32, found: *mut c_void) -> *mut c_void,
    /// Answers a look-up of another symbol of the vendor's library; null = as if it were not there.
    pub other: unsafe extern "C" fn(name: *const c_char, found: *mut c_void) -> *mut c_void,
    /// Notes a call of `dlopen` with these flags.
    pub opened: unsafe extern "C" fn(flags: c_int),
}

/// The state of the core.
pub(crate) enum State {
    /// The core is loaded.
    Ready(&'static Core),
    /// The core could not be loaded; CUDA is refused.
    Failed,
    /// This very thread is loading the core; look-ups meanwhile are not for the stub to answer.
    Loading,
}

const UNTRIED: u32 = 0;
const READY: u32 = 1;
const FAILED: u32 = 2;
const LOADING: u32 = 3;

static STATE: AtomicU32 = AtomicU32::new(UNTRIED);
/// The process and thread that is loading.
static LOADER: AtomicU64 = AtomicU64::new(0);
static CORE: AtomicPtr<Core> = AtomicPtr::new(core::ptr::null_mut());

/// Flags of `dlopen` that were seen before there was a core to tell.
static SEEN_FLAGS: AtomicU32 = AtomicU32::new(0);

/// Tells the core about a call of `dlopen`, now or when it is loaded.
pub(crate) fn opened(flags: c_int) {
    match if_started() {
        // SAFETY: the core's function of this type, which only notes the flags.
        Some(State::Ready(core)) => unsafe { (core.opened)(flags) },
        _ if flags as u32 & !SEEN_FLAGS.load(Relaxed) != 0 => {
            SEEN_FLAGS.fetch_or(flags as u32, Relaxed);
        }
        _ => {}
    }
}

/// Returns the state of the core if loading it has ended.
pub(crate) fn if_started() -> Option<State> {
    match STATE.load(Acquire) {
        READY => Some(ready()),
        FAILED => Some(State::Failed),
        _ => None,
    }
}

fn ready() -> State {
    // SAFETY: set before READY, and never freed.
    match unsafe { CORE.load(Acquire).as_ref() } {
        Some(core) => State::Ready(core),
        None => State::Failed,
    }
}

/// Loads the core if that has not been tried; waits for another thread that does. Returns its state.
pub(crate) fn started() -> State {
    loop {
        if let Some(state) = if_started() {
            return state;
        }
        let me = sys::thread_of_process();
        if STATE.compare_exchange(UNTRIED, LOADING, Acquire, Acquire).is_ok() {
            LOADER.store(me, Release);
            let state = match load() {
                Ok(core) => {
                    CORE.store(core.cast_mut(), Release);
                    // SAFETY: the core's record, whose function has this type and only notes the flags.
                    unsafe { ((*core).opened)(SEEN_FLAGS.load(Relaxed) as c_int) };
                    READY
                }
                Err(reason) => {
                    let start = b"aliquot: CUDA is refused: ".as_slice();
                    sys::warn(&[start, reason.as_bytes(), b"\n"]);
                    FAILED
                }
            };
            STATE.store(state, Release);
            sys::wake(&STATE);
            continue;
        }
        let loader = LOADER.load(Relaxed);
        if loader == me {
            return State::Loading;
        }
        if loader != 0 && loader >> 32 != me >> 32 {
            // Forked while another thread was loading: that thread does not exist here, so start over.
            let _ = LOADER.compare_exchange(loader, 0, Relaxed, Relaxed);
            let _ = STATE.compare_exchange(LOADING, UNTRIED, Acquire, Relaxed);
            continue;
        }
        sys::wait(&STATE, LOADING);
    }
}

const CORE_FILE: &[u8] = b"libaliquot_core.so\0";
const RTLD_NOW: c_int = 2;
const RTLD_NODELETE: c_int = 0x1000;

fn load() -> Result<*const Core, &'static str> {
    forks::watch();
    let (dlsym, dlopen) = (scope::real(Loader::Sym), scope::real(Loader::Open));
    if dlsym.is_null() || dlopen.is_null() {
        return Err("the dynamic loader's own functions were not found");
    }
    // SAFETY: the addresses of functions of these types, from the loader's symbol tables.
    let (sym, open) = unsafe {
        (
            core::mem::transmute::<*mut c_void, Dlsym>(dlsym),
            core::mem::transmute::<*mut c_void, Dlopen>(dlopen),
        )
    };
    let mut path = [0_u8; 1024];
    let length = scope::own_path(&mut path);
    let folder = path.get(..length).and_then(|p| p.iter().rposition(|b| *b == b'/')).map_or(0, |at| at + 1);
    if folder == 0 {
        return Err("the limiter was loaded without a path");
    }
    let target = path.get_mut(folder..folder + CORE_FILE.len()).ok_or("the limiter's path is too long")?;
    target.copy_from_slice(CORE_FILE);
    let given =
        Given { agreement: AGREEMENT, count: COUNT as u32, dlsym, dlvsym: scope::real(Loader::Vsym), dlopen };
    // SAFETY: a terminated path; loading the core runs none of its code (it has no constructors). The core's
    // start function has this type in every release with this agreement, which it checks itself.
    unsafe {
        let handle = open(path.as_ptr().cast(), RTLD_NOW | RTLD_NODELETE);
        if handle.is_null() {
            return Err("libaliquot_core.so beside the preloaded library cannot be loaded");
        }
        let start = sym(handle, c"aliquot_core_start".as_ptr());
        if start.is_null() {
            return Err("libaliquot_core.so has no start function");
        }
        let start: unsafe extern "C" fn(*const Given) -> *const Core = core::mem::transmute(start);
        let core = start(&given);
        match core.as_ref() {
            Some(found) if found.agreement == AGREEMENT && found.count == COUNT as u32 => Ok(core),
            _ => Err("libaliquot_core.so is of another release than the preloaded library"),
        }
    }
}

/// Returns the entry of row `hook` in the loaded core; null if there is no such row.
pub(crate) fn entry(core: &Core, hook: usize) -> *const c_void {
    if hook >= COUNT {
        return core::ptr::null();
    }
    // SAFETY: the core's array has as many entries as the table has rows, checked when it was loaded.
    unsafe { *core.entries.add(hook) }
}

/// Returns the text of a C string as a slice, without a copy.
///
/// # Safety
/// `name` is a terminated string that outlives the use of the slice.
pub(crate) unsafe fn text<'a>(name: *const c_char) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(name) }.to_bytes()
}

//! The answers to look-ups: the loader's own answer, by a tail jump, unless the name is one of the table's
//! and the vendor's library really has it.
//!
//! `RTLD_NEXT` and `RTLD_DEFAULT` depend on the return address of the caller, so the exported functions are
//! naked: they ask [`symbol`], and then either return its answer or jump to the real function with registers
//! and stack as the caller left them.

use crate::exports;
use crate::names::row;
use crate::refuse;
use crate::scope::{self, Loader, Owner, Vendor};
use crate::start::{self, Dlsym, State};
use crate::table::looks_hooked;
use core::ffi::{c_char, c_int, c_void};
use core::ptr::null_mut;

/// The next step of a naked function: jump to `jump`, or, if that is null, return `value`.
#[repr(C)]
pub(crate) struct Answer {
    value: *mut c_void,
    jump: *mut c_void,
}

impl Answer {
    fn jump(function: Loader) -> Self {
        Self { value: null_mut(), jump: scope::real(function) }
    }

    fn value(value: *mut c_void) -> Self {
        Self { value, jump: null_mut() }
    }
}

const RTLD_DEFAULT: usize = 0;
const RTLD_NEXT: usize = usize::MAX;

/// Returns the vendor that a name could belong to, from its first letters.
fn vendor(name: *const c_char) -> Option<Vendor> {
    if name.is_null() {
        return None;
    }
    // SAFETY: the caller of dlsym passes a terminated string; no byte behind its end is read.
    unsafe {
        match (*name as u8, *name.add(1) as u8) {
            (b'c', b'u') => Some(Vendor::Cuda),
            (b'n', b'v') => Some(Vendor::Nvml),
            _ => None,
        }
    }
}

/// Answers `dlsym(handle, name)`, given the caller's return address.
pub(crate) extern "C" fn symbol(handle: *mut c_void, name: *const c_char, caller: usize) -> Answer {
    match vendor(name).and_then(|vendor| ours(handle, name, caller, vendor, Loader::Sym, None)) {
        Some(value) => Answer::value(value),
        None => Answer::jump(Loader::Sym),
    }
}

/// Answers `dlvsym(handle, name, version)`. No vendor library versions its symbols, so a version that does
/// not exist is the only difference.
pub(crate) extern "C" fn versioned(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> Answer {
    match vendor(name).and_then(|vendor| ours(handle, name, caller, vendor, Loader::Vsym, Some(version))) {
        Some(value) => Answer::value(value),
        None => Answer::jump(Loader::Vsym),
    }
}

/// Looks at `dlopen(file, flags)`, and has it done by the loader.
pub(crate) extern "C" fn open(_file: *const c_char, flags: c_int) -> Answer {
    start::opened(flags);
    Answer::jump(Loader::Open)
}

/// Returns the stub's answer to a look-up of a name that begins like a vendor's; `None` = the loader's own
/// answer.
fn ours(
    handle: *mut c_void,
    name: *const c_char,
    caller: usize,
    vendor: Vendor,
    function: Loader,
    version: Option<*const c_char>,
) -> Option<*mut c_void> {
    // SAFETY: the caller of dlsym passes a terminated string.
    let text = unsafe { start::text(name) };
    let row = row(text);
    if row.is_none() && start::if_started().is_none() && !looks_hooked(text) {
        return None;
    }
    let real = Real { function: scope::real(function), version };
    if real.function.is_null() {
        return None;
    }
    let next = || real.look_up(RTLD_NEXT as *mut c_void, name);
    let found = match handle as usize {
        RTLD_DEFAULT => match next() {
            found if found.is_null() && scope::is_loaded(vendor) => exported(row),
            found => found,
        },
        RTLD_NEXT => {
            if !scope::is_loaded(vendor) {
                return Some(next());
            }
            match scope::owner(caller) {
                // The vendor's libraries see each other as they are.
                Owner::Vendor(_) => return None,
                _ if scope::is_before_us(caller) => return None,
                _ => next(),
            }
        }
        _ => real.look_up(handle, name),
    };
    if found.is_null() {
        return Some(found);
    }
    match scope::owner(found as usize) {
        Owner::Vendor(_) => {}
        // A handle of the program itself searches the global scope, and finds the stub's export first.
        Owner::Stub => {
            let behind = next();
            if behind.is_null() && !scope::is_loaded(vendor) {
                return Some(behind);
            }
            if behind.is_null() || scope::owner(behind as usize) == Owner::Other {
                return Some(found);
            }
            return Some(answer(row, name, behind));
        }
        Owner::Other => return Some(found),
    }
    Some(answer(row, name, found))
}

/// Returns the stub's own export of a row: what a local scope that holds the vendor's library would find
/// through the stub.
fn exported(row: Option<usize>) -> *mut c_void {
    row.map_or(null_mut(), |row| exports::address(row).cast_mut())
}

/// Returns the answer for a symbol that the vendor's library has at `found`.
fn answer(row: Option<usize>, name: *const c_char, found: *mut c_void) -> *mut c_void {
    match (start::started(), row) {
        // Our export of the row asks again when it is called.
        (State::Loading, Some(row)) => exports::address(row).cast_mut(),
        (State::Loading, None) => found,
        // SAFETY: functions of the loaded core, called with a row of its table or a terminated string.
        (State::Ready(core), Some(row)) => unsafe { (core.row)(row as u32, found) },
        // SAFETY: as above.
        (State::Ready(core), None) => unsafe { (core.other)(name, found) },
        (State::Failed, row) => refuse::entry(row, name, found),
    }
}

/// The look-up function of the loader, with the version to look for.
struct Real {
    function: *mut c_void,
    version: Option<*const c_char>,
}

impl Real {
    fn look_up(&self, handle: *mut c_void, name: *const c_char) -> *mut c_void {
        type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
        // SAFETY: the address of dlsym, or of dlvsym where there is a version; the arguments are the
        // program's own.
        unsafe {
            match self.version {
                None => core::mem::transmute::<*mut c_void, Dlsym>(self.function)(handle, name),
                Some(version) => {
                    core::mem::transmute::<*mut c_void, Dlvsym>(self.function)(handle, name, version)
                }
            }
        }
    }
}

//! The answer to programs if the core cannot be loaded: every driver entry returns one code, which no
//! framework mistakes for a machine without GPUs.

use crate::scope::{self, Loader};
use crate::start::{self, Dlsym};
use crate::table::{Hook, ROWS, Stream};
use core::ffi::{c_char, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// `CUDA_ERROR_SYSTEM_NOT_READY`
const CUDA_NOT_READY: c_int = 802;
/// `NVML_ERROR_NOT_READY`
const NVML_NOT_READY: c_int = 27;

/// The entries that tell about the driver and its errors; without them no program could say what went wrong.
const TELLING: [&[u8]; 3] = [b"cuDriverGetVersion", b"cuGetErrorName", b"cuGetErrorString"];

extern "C" fn cuda() -> c_int {
    CUDA_NOT_READY
}

extern "C" fn nvml() -> c_int {
    NVML_NOT_READY
}

static RESOLVERS: [AtomicPtr<c_void>; 2] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 2];

/// Returns the replacement for a symbol that the vendor's library has at `found` (null where it is called
/// directly).
pub(crate) fn entry(row: Option<usize>, name: *const c_char, found: *mut c_void) -> *mut c_void {
    if let Some(row) = row {
        return entry_of_row(row, found).cast_mut();
    }
    // SAFETY: the caller of dlsym passes a terminated string.
    let name = unsafe { start::text(name) };
    let is_cuda = name.starts_with(b"cu") && name.get(2).is_some_and(u8::is_ascii_uppercase);
    if is_cuda && !TELLING.contains(&name) { cuda as *mut c_void } else { found }
}

/// Returns the replacement for a row of the table.
pub(crate) fn entry_of_row(row: usize, found: *mut c_void) -> *const c_void {
    if row == Hook::cuGetProcAddress as usize {
        RESOLVERS[0].store(found, Relaxed);
        return resolve as *const c_void;
    }
    if row == Hook::cuGetProcAddress_v2 as usize {
        RESOLVERS[1].store(found, Relaxed);
        return resolve_v2 as *const c_void;
    }
    match ROWS.get(row).map(|row| row.stream) {
        Some(Stream::nvml) => nvml as *const c_void,
        _ => cuda as *const c_void,
    }
}

fn resolver(which: usize, name: &core::ffi::CStr) -> *mut c_void {
    let Some(cell) = RESOLVERS.get(which) else { return core::ptr::null_mut() };
    let known = cell.load(Relaxed);
    if !known.is_null() {
        return known;
    }
    let dlsym = scope::real(Loader::Sym);
    if dlsym.is_null() {
        return dlsym;
    }
    // SAFETY: dlsym's address and type; RTLD_NEXT is a handle, the name is terminated.
    unsafe { core::mem::transmute::<*mut c_void, Dlsym>(dlsym)(usize::MAX as *mut c_void, name.as_ptr()) }
}

unsafe fn replace(code: c_int, symbol: *const c_char, function: *mut *mut c_void) -> c_int {
    if code == 0 && !symbol.is_null() && !function.is_null() {
        // SAFETY: the driver accepted both pointers.
        unsafe {
            if !(*function).is_null() {
                *function = entry(None, symbol, *function);
            }
        }
    }
    code
}

unsafe extern "C" fn resolve(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    type Resolve = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
    let real = resolver(0, c"cuGetProcAddress");
    if real.is_null() {
        return CUDA_NOT_READY;
    }
    // SAFETY: the driver's function of this name and type, with the caller's own arguments.
    unsafe {
        let code = core::mem::transmute::<*mut c_void, Resolve>(real)(symbol, function, version, flags);
        replace(code, symbol, function)
    }
}

unsafe extern "C" fn resolve_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    type Resolve = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;
    let real = resolver(1, c"cuGetProcAddress_v2");
    if real.is_null() {
        return CUDA_NOT_READY;
    }
    // SAFETY: as above.
    unsafe {
        let code =
            core::mem::transmute::<*mut c_void, Resolve>(real)(symbol, function, version, flags, status);
        replace(code, symbol, function)
    }
}

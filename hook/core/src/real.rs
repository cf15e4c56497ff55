//! The vendor's own functions: those that rows of the hook table replace, and a few more that the limiter
//! needs.

use crate::table::{COUNT, Hook, ROWS, Stream};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static DLOPEN: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static HANDLES: [AtomicPtr<c_void>; 2] = [const { AtomicPtr::new(null_mut()) }; 2];
static FUNCTIONS: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(null_mut()) }; COUNT];

/// Takes the loader's functions from the stub.
pub(crate) fn set_loader(dlsym: *mut c_void, dlopen: *mut c_void) {
    DLSYM.store(dlsym, Release);
    DLOPEN.store(dlopen, Release);
}

/// A vendor library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    /// `libcuda.so.1`
    Cuda,
    /// `libnvidia-ml.so.1`
    Nvml,
}

/// Returns the handle of the library. CUDA's is only found if the program has loaded it; NVML is loaded if
/// need be.
fn handle(library: Library) -> *mut c_void {
    const RTLD_LAZY: c_int = 1;
    const RTLD_NOLOAD: c_int = 4;
    let (cell, name, flags) = match library {
        Library::Cuda => (&HANDLES[0], c"libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD),
        Library::Nvml => (&HANDLES[1], c"libnvidia-ml.so.1", RTLD_LAZY),
    };
    let known = cell.load(Acquire);
    if !known.is_null() {
        return known;
    }
    let dlopen = DLOPEN.load(Acquire);
    if dlopen.is_null() {
        return null_mut();
    }
    // SAFETY: dlopen's address and type, from the stub; the name is terminated.
    let found = unsafe { core::mem::transmute::<*mut c_void, Dlopen>(dlopen)(name.as_ptr(), flags) };
    cell.store(found, Release);
    found
}

/// Returns the address of any symbol of the library; null if it has none.
pub(crate) fn symbol(library: Library, name: &CStr) -> *mut c_void {
    let (handle, dlsym) = (handle(library), DLSYM.load(Acquire));
    if handle.is_null() || dlsym.is_null() {
        return null_mut();
    }
    // SAFETY: dlsym's address and type, from the stub; a handle of dlopen; the name is terminated.
    unsafe { core::mem::transmute::<*mut c_void, Dlsym>(dlsym)(handle, name.as_ptr()) }
}

/// Returns the vendor's function that row `hook` replaces; null if the library is not loaded or lacks it.
#[inline]
pub(crate) fn function(hook: Hook) -> *mut c_void {
    let known = FUNCTIONS.get(hook as usize).map_or(null_mut(), |cell| cell.load(Relaxed));
    if known.is_null() { find(hook) } else { known }
}

#[cold]
fn find(hook: Hook) -> *mut c_void {
    let (Some(row), Some(cell)) = (ROWS.get(hook as usize), FUNCTIONS.get(hook as usize)) else {
        return null_mut();
    };
    let library = if row.stream == Stream::nvml { Library::Nvml } else { Library::Cuda };
    let mut name: crate::log::Text<96> = crate::log::Text::new();
    name.push(row.symbol.as_bytes());
    let found = symbol(library, name.as_c());
    cell.store(found, Relaxed);
    found
}

/// Calls the vendor's function of a row with these arguments; answers that there is none if the library lacks
/// it.
macro_rules! call {
    ($hook:ident($($argument:expr),* $(,)?)) => {{
        let function = $crate::real::function($crate::table::Hook::$hook);
        if function.is_null() {
            $crate::real::absent($crate::table::Hook::$hook)
        } else {
            #[allow(clippy::missing_transmute_annotations, reason = "the row's signature, as its entry declares it")]
            let function = core::mem::transmute::<
                *mut core::ffi::c_void,
                unsafe extern "C" fn($($crate::real::any!($argument)),*) -> i32,
            >(function);
            function($($argument),*)
        }
    }};
}
pub(crate) use call;

/// A type to be inferred, one per argument.
macro_rules! any {
    ($argument:expr) => {
        _
    };
}
pub(crate) use any;

/// Returns the code for a function that the vendor's library does not have.
pub(crate) fn absent(hook: Hook) -> i32 {
    /// `CUDA_ERROR_STUB_LIBRARY`
    const STUB: i32 = 34;
    /// `CUDA_ERROR_NOT_FOUND`
    const NOT_FOUND: i32 = 500;
    /// `NVML_ERROR_FUNCTION_NOT_FOUND`
    const NVML_NOT_FOUND: i32 = 13;
    match ROWS.get(hook as usize).map(|row| row.stream) {
        Some(Stream::nvml) => NVML_NOT_FOUND,
        _ if handle(Library::Cuda).is_null() => STUB,
        _ => NOT_FOUND,
    }
}

/// Declares functions of a vendor library that are not in the hook table. Each returns `None` if the library
/// lacks it.
macro_rules! driver {
    ($($library:ident $name:ident($($argument:ident: $kind:ty),*);)*) => {
        $(
            /// The vendor's function of this name.
            #[allow(non_snake_case)]
            pub(crate) unsafe fn $name($($argument: $kind),*) -> Option<i32> {
                static CELL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
                let mut function = CELL.load(Relaxed);
                if function.is_null() {
                    let name = concat!(stringify!($name), "\0");
                    function = symbol(Library::$library, CStr::from_bytes_until_nul(name.as_bytes()).ok()?);
                    if function.is_null() {
                        return None;
                    }
                    CELL.store(function, Relaxed);
                }
                // SAFETY: the vendor's function of this name has this type; the caller vouches for the rest.
                Some(unsafe {
                    core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> i32>(function)(
                        $($argument),*
                    )
                })
            }
        )*
    };
}

driver! {
    Cuda cuCtxGetCurrent(context: *mut u64);
    Cuda cuCtxGetDevice(device: *mut i32);
    Cuda cuCtxPushCurrent_v2(context: u64);
    Cuda cuCtxPopCurrent_v2(context: *mut u64);
    Cuda cuCtxGetLimit(value: *mut u64, limit: u32);
    Cuda cuDeviceGetCount(count: *mut i32);
    Cuda cuDeviceGet(device: *mut i32, ordinal: i32);
    Cuda cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32);
    Cuda cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32);
    Cuda cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
    Cuda cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32);
    Cuda cuDeviceGetMemPool(pool: *mut u64, device: i32);
    Cuda cuMemPoolGetAttribute(pool: u64, attribute: i32, value: *mut u64);
    Cuda cuDeviceGetGraphMemAttribute(device: i32, attribute: i32, value: *mut u64);
    Cuda cuGraphGetNodes(graph: u64, nodes: *mut u64, count: *mut usize);
    Cuda cuGraphNodeGetType(node: u64, kind: *mut i32);
    Cuda cuGraphChildGraphNodeGetGraph(node: u64, graph: *mut u64);
    Cuda cuGraphMemAllocNodeGetParams(node: u64, params: *mut u64);
    Cuda cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64);
    Cuda cuMemGetAllocationPropertiesFromHandle(properties: *mut [i32; 8], handle: u64);
    Cuda cuStreamGetCtx(stream: u64, context: *mut u64);
    Cuda cuStreamSynchronize(stream: u64);
    Cuda cuStreamCreate(stream: *mut u64, flags: u32);
    Cuda cuStreamDestroy_v2(stream: u64);
    Cuda cuThreadExchangeStreamCaptureMode(mode: *mut i32);
    Cuda cuStreamIsCapturing(stream: u64, status: *mut i32);
    Cuda cuEventCreate(event: *mut u64, flags: u32);
    Cuda cuEventDestroy_v2(event: u64);
    Cuda cuEventRecord(event: u64, stream: u64);
    Cuda cuEventQuery(event: u64);
    Cuda cuEventElapsedTime(millis: *mut f32, start: u64, end: u64);
    Nvml nvmlInit_v2();
    Nvml nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut usize);
    Nvml nvmlDeviceGetUUID(device: usize, uuid: *mut u8, length: u32);
    Nvml nvmlDeviceGetMigMode(device: usize, current: *mut u32, pending: *mut u32);
}

//! Entries of launches of kernels.

use crate::compute;
use crate::real::call;
use crate::state;
use crate::stream::{LEGACY, PER_THREAD, named};
use core::ffi::c_void;

type Dimensions = (u32, u32, u32);

macro_rules! kernels {
    ($($symbol:ident $default:ident;)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(
                function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
                shared: u32, stream: u64, parameters: *mut c_void, extra: *mut c_void,
            ) -> i32 {
                let ((a, b, c), (d, e, f)): (Dimensions, Dimensions) =
                    ((grid_x, grid_y, grid_z), (block_x, block_y, block_z));
                compute::launch(key(function, [a, b, c]), named(stream, $default), false, || {
                    // SAFETY: the caller's own arguments.
                    unsafe { call!($symbol(function, a, b, c, d, e, f, shared, stream, parameters, extra)) }
                })
            }
        )*
    };
}
kernels! {
    cuLaunchKernel LEGACY;
    cuLaunchKernel_ptsz PER_THREAD;
}

macro_rules! cooperative {
    ($($symbol:ident $default:ident;)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(
                function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
                shared: u32, stream: u64, parameters: *mut c_void,
            ) -> i32 {
                let ((a, b, c), (d, e, f)): (Dimensions, Dimensions) =
                    ((grid_x, grid_y, grid_z), (block_x, block_y, block_z));
                compute::launch(key(function, [a, b, c]), named(stream, $default), true, || {
                    // SAFETY: the caller's own arguments.
                    unsafe { call!($symbol(function, a, b, c, d, e, f, shared, stream, parameters)) }
                })
            }
        )*
    };
}
cooperative! {
    cuLaunchCooperativeKernel LEGACY;
    cuLaunchCooperativeKernel_ptsz PER_THREAD;
}

/// `CUlaunchConfig`
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    attributes: *const Attribute,
    attribute_count: u32,
}

/// `CUlaunchAttribute`
#[repr(C)]
struct Attribute {
    id: u32,
    value: [u64; 8],
}

/// `CUDA_LAUNCH_PARAMS`
#[repr(C)]
struct Parameters {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    parameters: *mut c_void,
}

const _: () =
    assert!(size_of::<Config>() == 56 && size_of::<Attribute>() == 72 && size_of::<Parameters>() == 56);

impl Config {
    /// Returns true if events between the launch and its neighbours would defeat what its attributes are for.
    fn is_delicate(&self) -> bool {
        /// Cooperative, programmatic serialisation, programmatic event, launch completion event.
        const DELICATE: [u32; 4] = [2, 6, 7, 12];
        /// More attributes than the driver knows.
        const MOST: u32 = 64;
        let known = if self.attributes.is_null() { 0 } else { self.attribute_count.min(MOST) };
        // SAFETY: the caller's array of that many attributes.
        (0..known as usize).any(|at| DELICATE.contains(&unsafe { (*self.attributes.add(at)).id }))
    }
}

macro_rules! extended {
    ($($symbol:ident $default:ident;)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(
                config: *const c_void, function: u64, parameters: *mut c_void, extra: *mut c_void,
            ) -> i32 {
                // SAFETY: the caller's own arguments.
                let driver = || unsafe { call!($symbol(config, function, parameters, extra)) };
                // SAFETY: null, or the caller's record.
                let Some(wanted) = (unsafe { config.cast::<Config>().as_ref() }) else { return state::pass(driver) };
                let stream = named(wanted.stream, $default);
                compute::launch(key(function, wanted.grid), stream, wanted.is_delicate(), driver)
            }
        )*
    };
}
extended! {
    cuLaunchKernelEx LEGACY;
    cuLaunchKernelEx_ptsz PER_THREAD;
}

pub(super) unsafe extern "C" fn cuLaunchCooperativeKernelMultiDevice(
    list: *mut c_void,
    devices: u32,
    flags: u32,
) -> i32 {
    let count = if list.is_null() { 0 } else { devices.min(crate::device::MOST as u32) };
    let of = |at: usize| {
        // SAFETY: the caller's array of that many records.
        let part = unsafe { &*list.cast::<Parameters>().add(at) };
        (key(part.function, part.grid), part.stream)
    };
    compute::launch_on_many(count as usize, of, || {
        // SAFETY: the caller's own arguments.
        unsafe { call!(cuLaunchCooperativeKernelMultiDevice(list, devices, flags)) }
    })
}

pub(super) unsafe extern "C" fn cuLaunch(function: u64) -> i32 {
    // SAFETY: the caller's own argument.
    compute::launch(key(function, [1; 3]), LEGACY, false, || unsafe { call!(cuLaunch(function)) })
}

pub(super) unsafe extern "C" fn cuLaunchGrid(function: u64, width: i32, height: i32) -> i32 {
    let grid = [width.unsigned_abs(), height.unsigned_abs(), 1];
    compute::launch(key(function, grid), LEGACY, false, || {
        // SAFETY: the caller's own arguments.
        unsafe { call!(cuLaunchGrid(function, width, height)) }
    })
}

pub(super) unsafe extern "C" fn cuLaunchGridAsync(
    function: u64,
    width: i32,
    height: i32,
    stream: u64,
) -> i32 {
    let grid = [width.unsigned_abs(), height.unsigned_abs(), 1];
    compute::launch(key(function, grid), named(stream, LEGACY), false, || {
        // SAFETY: the caller's own arguments.
        unsafe { call!(cuLaunchGridAsync(function, width, height, stream)) }
    })
}

/// Returns the key of a kernel: its function and the size of its grid.
fn key(function: u64, grid: [u32; 3]) -> u64 {
    let blocks = grid.iter().fold(1_u64, |blocks, side| blocks.wrapping_mul(u64::from(*side)));
    (function ^ blocks.wrapping_mul(0xd6e8_feb8_6659_fd93)).rotate_left(17) | 1
}

macro_rules! begins {
    ($($symbol:ident($($argument:ident: $kind:ty),*), $default:ident;)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(stream: u64, $($argument: $kind),*) -> i32 {
                compute::begin_capture(named(stream, $default), || {
                    // SAFETY: the caller's own arguments.
                    unsafe { call!($symbol(stream, $($argument),*)) }
                })
            }
        )*
    };
}
begins! {
    cuStreamBeginCapture(), LEGACY;
    cuStreamBeginCapture_ptsz(), PER_THREAD;
    cuStreamBeginCapture_v2(mode: i32), LEGACY;
    cuStreamBeginCapture_v2_ptsz(mode: i32), PER_THREAD;
    cuStreamBeginCaptureToGraph(
        graph: u64, nodes: *mut c_void, edges: *mut c_void, count: usize, mode: i32
    ), LEGACY;
    cuStreamBeginCaptureToGraph_ptsz(
        graph: u64, nodes: *mut c_void, edges: *mut c_void, count: usize, mode: i32
    ), PER_THREAD;
    cuStreamBeginRecaptureToGraph(
        mode: i32, graph: u64, callback: *mut c_void, data: *mut c_void
    ), LEGACY;
    cuStreamBeginRecaptureToGraph_ptsz(
        mode: i32, graph: u64, callback: *mut c_void, data: *mut c_void
    ), PER_THREAD;
    cuStreamBeginCaptureToCig(parameters: *mut c_void), LEGACY;
    cuStreamBeginCaptureToCig_ptsz(parameters: *mut c_void), PER_THREAD;
}

macro_rules! ends {
    ($($symbol:ident($($argument:ident: $kind:ty),*), $default:ident;)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(stream: u64, $($argument: $kind),*) -> i32 {
                compute::end_capture(named(stream, $default), || {
                    // SAFETY: the caller's own arguments.
                    unsafe { call!($symbol(stream, $($argument),*)) }
                })
            }
        )*
    };
}
ends! {
    cuStreamEndCapture(graph: *mut u64), LEGACY;
    cuStreamEndCapture_ptsz(graph: *mut u64), PER_THREAD;
    cuStreamEndCaptureToCig(), LEGACY;
    cuStreamEndCaptureToCig_ptsz(), PER_THREAD;
}

macro_rules! streams {
    ($($symbol:ident)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(stream: u64) -> i32 {
                // SAFETY: the caller's own argument.
                compute::destroy_stream(stream, || unsafe { call!($symbol(stream)) })
            }
        )*
    };
}
streams!(cuStreamDestroy cuStreamDestroy_v2);

macro_rules! unloads {
    ($($symbol:ident)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(code: u64) -> i32 {
                // SAFETY: the caller's own argument.
                compute::unload(|| unsafe { call!($symbol(code)) })
            }
        )*
    };
}
unloads!(cuModuleUnload cuLibraryUnload);

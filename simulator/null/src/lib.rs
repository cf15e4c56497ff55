//! A `libcuda.so.1` that does nothing, for benchmarks: what they see is what the limiter adds.
//!
//! One device, or as many as `ALIQUOT_NULL_DEVICES` says, of which the first is always current. Its kernels take five
//! microseconds each by its own count, nothing on the clock. Calls about events take a microsecond of the processor,
//! which is assumed, not measured.

#![allow(unsafe_code, reason = "a library of C entry points; every block says why it is sound")]
#![allow(non_snake_case, reason = "named after the functions that they stand in for")]
#![allow(clippy::missing_safety_doc, reason = "called as the driver's functions are")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const KERNEL_NS: u64 = 5_000;
const EVENT_CALL: Duration = Duration::from_micros(1);
const EVENTS: usize = 1024;
const CONTEXT: u64 = 0x1000;

/// Kernels launched, by thread so that threads do not meet here.
static LAUNCHED: [Count; 64] = [const { Count(AtomicU64::new(0)) }; 64];
/// What the count was when an event was recorded; handles are places plus one.
static RECORDED: [AtomicU64; EVENTS] = [const { AtomicU64::new(0) }; EVENTS];
static MADE: AtomicU64 = AtomicU64::new(0);
/// Bytes allocated, by thread likewise.
static ALLOCATED: [Count; 64] = [const { Count(AtomicU64::new(0)) }; 64];

#[repr(align(128))]
struct Count(AtomicU64);

/// The calling thread's place in such a list.
fn place() -> usize {
    thread_local!(static PLACE: usize = {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Relaxed) as usize
    });
    PLACE.with(|place| *place) % LAUNCHED.len()
}

fn own(of: &'static [Count; 64]) -> &'static AtomicU64 {
    of.get(place()).map_or(&MADE, |count| &count.0)
}

fn call() {
    let start = Instant::now();
    while start.elapsed() < EVENT_CALL {
        std::hint::spin_loop();
    }
}

/// Writes a result of the caller's.
fn put<T>(to: *mut T, value: T) -> i32 {
    if !to.is_null() {
        // SAFETY: the caller's place for the result.
        unsafe { to.write(value) };
    }
    0
}

macro_rules! driver {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {
        $(
            /// As in cuda.h.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> i32 $body
        )*
    };
}

driver! {
    cuInit(_flags: u32) { 0 }
    cuDriverGetVersion(version: *mut i32) { put(version, 12_090) }
    cuDeviceGetCount(count: *mut i32) {
        let wanted = std::env::var("ALIQUOT_NULL_DEVICES").ok().and_then(|text| text.parse().ok());
        put(count, wanted.unwrap_or(1))
    }
    cuDeviceGet(device: *mut i32, ordinal: i32) { put(device, ordinal) }
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) {
        let mut bytes = [0; 16];
        bytes[15] = device as u8;
        put(uuid, bytes)
    }
    cuDeviceGetName(name: *mut u8, _length: i32, _device: i32) { put(name, 0) }
    cuDeviceTotalMem_v2(bytes: *mut usize, _device: i32) { put(bytes, 80 << 30) }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        put(free, 80 << 30);
        put(total, 80 << 30)
    }
    cuDeviceGetAttribute(value: *mut i32, _attribute: i32, _device: i32) { put(value, 1) }
    cuDevicePrimaryCtxGetState(_device: i32, flags: *mut u32, active: *mut i32) {
        put(flags, 0);
        put(active, 1)
    }
    cuDevicePrimaryCtxRetain(context: *mut u64, _device: i32) { put(context, CONTEXT) }
    cuCtxSetCurrent(_context: u64) { 0 }
    cuCtxGetCurrent(context: *mut u64) { put(context, CONTEXT) }
    cuCtxGetDevice(device: *mut i32) { put(device, 0) }
    cuCtxSynchronize() { 0 }
    cuMemAlloc_v2(pointer: *mut u64, bytes: usize) {
        // The same addresses over and over, as a driver would give; each thread has its own.
        let (size, count) = (bytes.next_multiple_of(2 << 20) as u64, own(&ALLOCATED));
        let before = count.load(Relaxed);
        count.store(before + size, Relaxed);
        put(pointer, (1 << 40) + ((place() as u64) << 30) + before % (1 << 30))
    }
    cuMemAllocManaged(pointer: *mut u64, bytes: usize, _flags: u32) {
        // SAFETY: the caller's own arguments.
        unsafe { cuMemAlloc_v2(pointer, bytes) }
    }
    cuMemFree_v2(_pointer: u64) { 0 }
    cuCtxSetLimit(_limit: u32, _bytes: usize) { 0 }
    cuModuleLoadData(module: *mut u64, _image: *const c_void) { put(module, 1) }
    cuModuleGetFunction(function: *mut u64, _module: u64, _name: *const c_void) { put(function, 0x7000) }
    cuStreamIsCapturing(_stream: u64, status: *mut i32) { put(status, 0) }
    cuThreadExchangeStreamCaptureMode(_mode: *mut i32) { 0 }
    cuEventCreate(event: *mut u64, _flags: u32) { put(event, MADE.fetch_add(1, Relaxed) % EVENTS as u64 + 1) }
    cuEventDestroy_v2(_event: u64) { 0 }
    cuEventRecord(event: u64, _stream: u64) {
        call();
        if let Some(recorded) = RECORDED.get((event as usize).wrapping_sub(1)) {
            recorded.store(own(&LAUNCHED).load(Relaxed), Relaxed);
        }
        0
    }
    cuEventQuery(_event: u64) {
        call();
        0
    }
    cuEventElapsedTime(millis: *mut f32, start: u64, end: u64) {
        call();
        let at = |event: u64| {
            RECORDED.get((event as usize).wrapping_sub(1)).map_or(0, |recorded| recorded.load(Relaxed))
        };
        let kernels = at(end).cast_signed() - at(start).cast_signed();
        put(millis, (kernels as f64 * KERNEL_NS as f64 / 1e6) as f32)
    }
    cuLaunchKernel(
        _function: u64, _grid_x: u32, _grid_y: u32, _grid_z: u32, _block_x: u32, _block_y: u32, _block_z: u32,
        _shared: u32, _stream: u64, _parameters: *mut c_void, _extra: *mut c_void
    ) {
        let count = own(&LAUNCHED);
        count.store(count.load(Relaxed) + 1, Relaxed);
        0
    }
}

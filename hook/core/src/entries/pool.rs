//! Entries of stream-ordered memory and pools.

use crate::linear;
use crate::pools::{self, From};
use crate::real::call;
use crate::stream::{LEGACY, PER_THREAD, named};
use core::ffi::c_void;

macro_rules! asynchronous {
    ($default:ident: $allocate:ident, $from_pool:ident, $free:ident) => {
        pub(super) unsafe extern "C" fn $allocate(out: *mut u64, bytes: usize, stream: u64) -> i32 {
            let order = named(stream, $default);
            // SAFETY: the caller's own arguments; the result is read after the driver has written it.
            unsafe {
                let driver = || call!($allocate(out, bytes, stream));
                pools::allocate(bytes as u64, &From::Stream, order, driver, || *out)
            }
        }

        pub(super) unsafe extern "C" fn $from_pool(
            out: *mut u64,
            bytes: usize,
            pool: u64,
            stream: u64,
        ) -> i32 {
            let order = named(stream, $default);
            // SAFETY: as above.
            unsafe {
                let driver = || call!($from_pool(out, bytes, pool, stream));
                pools::allocate(bytes as u64, &From::Pool(pool), order, driver, || *out)
            }
        }

        pub(super) unsafe extern "C" fn $free(address: u64, stream: u64) -> i32 {
            // SAFETY: the caller's own arguments.
            let driver = || unsafe { call!($free(address, stream)) };
            linear::free(address, Some(named(stream, $default)), driver)
        }
    };
}
asynchronous!(LEGACY: cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync);
asynchronous!(PER_THREAD: cuMemAllocAsync_ptsz, cuMemAllocFromPoolAsync_ptsz, cuMemFreeAsync_ptsz);

/// The start of `CUmemPoolProps`.
#[repr(C)]
pub(super) struct Properties {
    kind: i32,
    handle_types: i32,
    place: i32,
    id: i32,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE` and `CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN`.
const ON_DEVICE: [i32; 2] = [1, 6];

/// Returns the device of a location. A locality domain's id has the device in its lower half.
pub(super) fn device_of(place: i32, id: i32) -> Option<i32> {
    match place {
        1 => Some(id),
        6 => Some(id & 0xffff),
        _ => None,
    }
    .filter(|_| ON_DEVICE.contains(&place))
}

pub(super) unsafe extern "C" fn cuMemPoolCreate(out: *mut u64, properties: *const Properties) -> i32 {
    // SAFETY: the caller's own arguments; the result is read after the driver has written it.
    unsafe {
        let device = properties.as_ref().and_then(|properties| device_of(properties.place, properties.id));
        pools::created(device, || call!(cuMemPoolCreate(out, properties)), || *out)
    }
}

pub(super) unsafe extern "C" fn cuMemPoolDestroy(pool: u64) -> i32 {
    // SAFETY: the caller's own argument.
    pools::destroy(pool, || unsafe { call!(cuMemPoolDestroy(pool)) })
}

pub(super) unsafe extern "C" fn cuMemPoolTrimTo(pool: u64, keep: usize) -> i32 {
    // SAFETY: as above.
    pools::trim(pool, || unsafe { call!(cuMemPoolTrimTo(pool, keep)) })
}

pub(super) unsafe extern "C" fn cuMemPoolSetAttribute(pool: u64, attribute: i32, value: *mut c_void) -> i32 {
    // SAFETY: as above. A lower release threshold can make the pool shrink.
    pools::trim(pool, || unsafe { call!(cuMemPoolSetAttribute(pool, attribute, value)) })
}

pub(super) unsafe extern "C" fn cuMemPoolImportFromShareableHandle(
    out: *mut u64,
    handle: *mut c_void,
    kind: i32,
    flags: u64,
) -> i32 {
    // SAFETY: as above. Another process's pool: who made it pays for it.
    unsafe {
        pools::created(None, || call!(cuMemPoolImportFromShareableHandle(out, handle, kind, flags)), || *out)
    }
}

pub(super) unsafe extern "C" fn cuMemPoolImportPointer(out: *mut u64, pool: u64, data: *mut c_void) -> i32 {
    // SAFETY: as above.
    unsafe { pools::import(|| call!(cuMemPoolImportPointer(out, pool, data)), || *out) }
}

pub(super) unsafe extern "C" fn cuMemPoolExportPointer(data: *mut c_void, address: u64) -> i32 {
    // SAFETY: as above.
    pools::export(address, || unsafe { call!(cuMemPoolExportPointer(data, address)) })
}

pub(super) unsafe extern "C" fn cuDeviceSetMemPool(device: i32, pool: u64) -> i32 {
    // SAFETY: as above.
    pools::pass(|| unsafe { call!(cuDeviceSetMemPool(device, pool)) })
}

pub(super) unsafe extern "C" fn cuMemSetMemPool(place: *mut c_void, kind: i32, pool: u64) -> i32 {
    // SAFETY: as above.
    pools::pass(|| unsafe { call!(cuMemSetMemPool(place, kind, pool)) })
}

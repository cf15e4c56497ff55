//! Entries of linear, pitched and managed memory, and of arrays.

use crate::arrays::{Flat, FlatV1, Shape, Solid, SolidV1};
use crate::linear;
use crate::real::call;
use crate::share::Kind;
use crate::state;

/// The unit of pitched memory in bytes: rows start at multiples of it, as far as is known; more is charged if
/// need be.
const PITCH: usize = 512;

pub(super) unsafe extern "C" fn cuMemAlloc_v2(out: *mut u64, bytes: usize) -> i32 {
    // SAFETY: the caller's own arguments; the result is read only after the driver has written it.
    unsafe {
        linear::allocate(
            Kind::Device,
            Some(bytes as u64),
            || call!(cuMemAlloc_v2(out, bytes)),
            || (*out, bytes as u64),
            linear::driver_free,
        )
    }
}

pub(super) unsafe extern "C" fn cuMemAlloc(out: *mut u32, bytes: u32) -> i32 {
    // SAFETY: as above.
    unsafe {
        linear::allocate(
            Kind::Device,
            Some(u64::from(bytes)),
            || call!(cuMemAlloc(out, bytes)),
            || (u64::from(*out), u64::from(bytes)),
            linear::driver_free,
        )
    }
}

pub(super) unsafe extern "C" fn cuMemAllocManaged(out: *mut u64, bytes: usize, flags: u32) -> i32 {
    // SAFETY: as above.
    unsafe {
        linear::allocate(
            Kind::Managed,
            Some(bytes as u64),
            || call!(cuMemAllocManaged(out, bytes, flags)),
            || (*out, bytes as u64),
            linear::driver_free,
        )
    }
}

pub(super) unsafe extern "C" fn cuMemAllocPitch_v2(
    out: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
) -> i32 {
    let bytes = width.checked_next_multiple_of(PITCH).and_then(|row| row.checked_mul(height));
    // SAFETY: as above; the driver has written the pitch as well.
    unsafe {
        linear::allocate(
            Kind::Device,
            bytes.map(|bytes| bytes as u64),
            || call!(cuMemAllocPitch_v2(out, pitch, width, height, element)),
            || (*out, (*pitch).saturating_mul(height) as u64),
            linear::driver_free,
        )
    }
}

pub(super) unsafe extern "C" fn cuMemAllocPitch(
    out: *mut u32,
    pitch: *mut u32,
    width: u32,
    height: u32,
    element: u32,
) -> i32 {
    let bytes = (width as usize).next_multiple_of(PITCH) as u64 * u64::from(height);
    // SAFETY: as above.
    unsafe {
        linear::allocate(
            Kind::Device,
            Some(bytes),
            || call!(cuMemAllocPitch(out, pitch, width, height, element)),
            || (u64::from(*out), u64::from(*pitch) * u64::from(height)),
            linear::driver_free,
        )
    }
}

pub(super) unsafe extern "C" fn cuMemFree_v2(address: u64) -> i32 {
    // SAFETY: the caller's own argument.
    linear::free(address, None, || unsafe { call!(cuMemFree_v2(address)) })
}

pub(super) unsafe extern "C" fn cuMemFree(address: u32) -> i32 {
    // SAFETY: as above.
    linear::free(u64::from(address), None, || unsafe { call!(cuMemFree(address)) })
}

/// Allocates and charges an array of a shape. Without a shape, only the driver is called, which then refuses.
fn array(shape: Option<Option<u64>>, out: *mut u64, driver: impl Fn() -> i32, undo: impl Fn(u64)) -> i32 {
    match shape {
        None => state::pass(driver),
        // SAFETY: read only after the driver has written it.
        Some(bytes) => linear::allocate_array(bytes, driver, || unsafe { *out }, undo),
    }
}

fn destroy_array(handle: u64) {
    // SAFETY: an array that the driver has just given out and nobody has seen.
    unsafe { call!(cuArrayDestroy(handle)) };
}

macro_rules! array_entries {
    ($($symbol:ident($descriptor:ty);)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(out: *mut u64, descriptor: *const $descriptor) -> i32 {
                // SAFETY: the caller's own arguments.
                unsafe {
                    let bytes = descriptor.as_ref().map(|descriptor| Shape::from(descriptor).bytes());
                    array(bytes, out, || call!($symbol(out, descriptor)), destroy_array)
                }
            }
        )*
    };
}
array_entries! {
    cuArrayCreate(FlatV1);
    cuArrayCreate_v2(Flat);
    cuArray3DCreate(SolidV1);
    cuArray3DCreate_v2(Solid);
}

pub(super) unsafe extern "C" fn cuArrayDestroy(array: u64) -> i32 {
    // SAFETY: the caller's own argument.
    linear::free(array, None, || unsafe { call!(cuArrayDestroy(array)) })
}

pub(super) unsafe extern "C" fn cuMipmappedArrayCreate(
    out: *mut u64,
    descriptor: *const Solid,
    levels: u32,
) -> i32 {
    // SAFETY: the caller's own arguments.
    unsafe {
        let bytes = descriptor.as_ref().map(|descriptor| Shape::from(descriptor).mipmap_bytes(levels));
        let undo = |handle: u64| {
            call!(cuMipmappedArrayDestroy(handle));
        };
        array(bytes, out, || call!(cuMipmappedArrayCreate(out, descriptor, levels)), undo)
    }
}

pub(super) unsafe extern "C" fn cuMipmappedArrayDestroy(array: u64) -> i32 {
    // SAFETY: the caller's own argument.
    linear::free(array, None, || unsafe { call!(cuMipmappedArrayDestroy(array)) })
}

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcHandle([u8; 64]);

pub(super) unsafe extern "C" fn cuIpcGetMemHandle(out: *mut IpcHandle, address: u64) -> i32 {
    // SAFETY: as above.
    linear::export(address, || unsafe { call!(cuIpcGetMemHandle(out, address)) })
}

macro_rules! ipc_opens {
    ($($symbol:ident)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(out: *mut u64, handle: IpcHandle, flags: u32) -> i32 {
                // SAFETY: as above.
                unsafe { linear::open_shared(|| call!($symbol(out, handle, flags)), || *out) }
            }
        )*
    };
}
ipc_opens!(cuIpcOpenMemHandle cuIpcOpenMemHandle_v2);

pub(super) unsafe extern "C" fn cuIpcCloseMemHandle(address: u64) -> i32 {
    // SAFETY: as above.
    linear::close_shared(address, || unsafe { call!(cuIpcCloseMemHandle(address)) })
}

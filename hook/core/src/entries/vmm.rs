//! Entries of physical memory handles and mappings.

use super::pool::device_of;
use crate::real::call;
use crate::vmm::{self, ArrayMap};
use core::ffi::c_void;

/// The start of `CUmemAllocationProp`.
#[repr(C)]
pub(super) struct Properties {
    kind: i32,
    handle_types: i32,
    place: i32,
    id: i32,
}

pub(super) unsafe extern "C" fn cuMemCreate(
    out: *mut u64,
    bytes: usize,
    properties: *const Properties,
    flags: u64,
) -> i32 {
    // SAFETY: the caller's own arguments; the result is read after the driver has written it.
    unsafe {
        let device = properties.as_ref().and_then(|properties| device_of(properties.place, properties.id));
        let undo = |handle: u64| {
            call!(cuMemRelease(handle));
        };
        vmm::create(
            device.and_then(|device| usize::try_from(device).ok()),
            bytes as u64,
            || call!(cuMemCreate(out, bytes, properties, flags)),
            || *out,
            undo,
        )
    }
}

pub(super) unsafe extern "C" fn cuMemRelease(handle: u64) -> i32 {
    // SAFETY: the caller's own argument.
    vmm::release_handle(handle, || unsafe { call!(cuMemRelease(handle)) })
}

pub(super) unsafe extern "C" fn cuMemRetainAllocationHandle(out: *mut u64, address: *mut c_void) -> i32 {
    // SAFETY: as above.
    unsafe { vmm::retain(address as u64, || call!(cuMemRetainAllocationHandle(out, address)), || *out) }
}

pub(super) unsafe extern "C" fn cuMemMap(
    address: u64,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> i32 {
    // SAFETY: as above.
    vmm::map(address, bytes as u64, offset as u64, handle, || unsafe {
        call!(cuMemMap(address, bytes, offset, handle, flags))
    })
}

pub(super) unsafe extern "C" fn cuMemUnmap(address: u64, bytes: usize) -> i32 {
    // SAFETY: as above.
    vmm::unmap(address, bytes as u64, || unsafe { call!(cuMemUnmap(address, bytes)) })
}

pub(super) unsafe extern "C" fn cuMemImportFromShareableHandle(
    out: *mut u64,
    handle: *mut c_void,
    kind: i32,
) -> i32 {
    // SAFETY: as above.
    unsafe { vmm::import(|| call!(cuMemImportFromShareableHandle(out, handle, kind)), || *out) }
}

pub(super) unsafe extern "C" fn cuMemExportToShareableHandle(
    out: *mut c_void,
    handle: u64,
    kind: i32,
    flags: u64,
) -> i32 {
    // SAFETY: as above.
    vmm::export(handle, || unsafe { call!(cuMemExportToShareableHandle(out, handle, kind, flags)) })
}

macro_rules! array_maps {
    ($($symbol:ident)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(list: *const ArrayMap, count: u32, stream: u64) -> i32 {
                // SAFETY: the caller's own arguments.
                unsafe { vmm::map_arrays(list, count, || call!($symbol(list, count, stream))) }
            }
        )*
    };
}
array_maps!(cuMemMapArrayAsync cuMemMapArrayAsync_ptsz);

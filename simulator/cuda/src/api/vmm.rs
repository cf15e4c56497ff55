//! Virtual memory management.

use crate::codes::{Code, Cu};
use crate::entry::api;
use crate::ffi::{In, Out};
use crate::state::memory::PAGE;
use crate::types::{AccessDesc, AllocationProp, Location};
use crate::vmm;

fn no_flags(flags: u64) -> Cu {
    if flags == 0 { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

api! { (driver, flavour)
    Init fn cuMemGetAllocationGranularity(granularity: Out<u64>, prop: In<AllocationProp>, option: i32) {
        vmm::device_of(driver, prop.get()?.location)?;
        if !matches!(option, 0 | 1) {
            return Err(Code::INVALID_VALUE);
        }
        granularity.put(PAGE)
    }

    Init fn cuMemCreate(handle: Out<u64>, bytes: u64, prop: In<AllocationProp>, flags: u64) {
        handle.check()?;
        no_flags(flags)?;
        let made = vmm::create(driver, &mut driver.lock(), bytes, prop.get()?)?;
        handle.put(made)
    }

    Init fn cuMemRelease(handle: u64) {
        vmm::release(driver, &mut driver.lock(), handle)
    }

    Init fn cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) {
        handle.check()?;
        let found = vmm::retain(&mut driver.lock(), address)?;
        handle.put(found)
    }

    Init fn cuMemGetAllocationPropertiesFromHandle(prop: Out<AllocationProp>, handle: u64) {
        let found = driver.lock().vmm.physical(handle)?.prop;
        prop.put(found)
    }

    Init fn cuMemAddressReserve(pointer: Out<u64>, bytes: u64, align: u64, wanted: u64, flags: u64) {
        pointer.check()?;
        no_flags(flags)?;
        let base = vmm::reserve(&mut driver.lock(), bytes, align, wanted)?;
        pointer.put(base)
    }

    Init fn cuMemAddressFree(pointer: u64, bytes: u64) {
        vmm::free_addresses(&mut driver.lock(), pointer, bytes)
    }

    Init fn cuMemMap(pointer: u64, bytes: u64, offset: u64, handle: u64, flags: u64) {
        no_flags(flags)?;
        vmm::map(&mut driver.lock(), pointer, bytes, offset, handle)
    }

    Init fn cuMemUnmap(pointer: u64, bytes: u64) {
        vmm::unmap(driver, &mut driver.lock(), pointer, bytes)
    }

    Init fn cuMemSetAccess(pointer: u64, bytes: u64, descriptors: In<AccessDesc>, count: u64) {
        let mut state = driver.lock();
        for wanted in descriptors.list(usize::try_from(count).unwrap_or(0))? {
            vmm::device_of(driver, wanted.location)?;
            vmm::set_access(&mut state, pointer, bytes, wanted.location, wanted.flags)?;
        }
        Ok(())
    }

    Init fn cuMemGetAccess(flags: Out<u64>, location: In<Location>, pointer: u64) {
        let state = driver.lock();
        let (base, _) = state.memory.find(pointer).ok_or(Code::INVALID_VALUE)?;
        let location = location.get()?;
        vmm::device_of(driver, location)?;
        let device = if location.kind == Location::DEVICE { location.id } else { -1 };
        flags.put(u64::from(state.vmm.access_of(base, device).unsigned_abs()))
    }

    Init fn cuMemExportToShareableHandle(result: Out<i32>, handle: u64, kind: i32, flags: u64) {
        result.check()?;
        no_flags(flags)?;
        if kind != vmm::POSIX_FD {
            return Err(Code::NOT_SUPPORTED);
        }
        let fd = vmm::export(driver, &mut driver.lock(), handle)?;
        result.put(fd)
    }

    Init fn cuMemImportFromShareableHandle(handle: Out<u64>, os_handle: u64, kind: i32) {
        handle.check()?;
        if kind != vmm::POSIX_FD {
            return Err(Code::NOT_SUPPORTED);
        }
        let fd = i32::try_from(os_handle).map_err(|_| Code::INVALID_VALUE)?;
        let made = vmm::import(driver, &mut driver.lock(), fd)?;
        handle.put(made)
    }
}

//! Stream-ordered memory and its pools.

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::{In, Out};
use crate::types::{AccessDesc, Location, PoolProps};
use crate::{pool, vmm};

fn allocate(driver: &Driver, from: Option<u64>, bytes: u64, stream: u64) -> Cu<u64> {
    let mut state = driver.lock();
    let device = state.current()?.1.device;
    let handle = match from {
        Some(handle) => handle,
        None => state.pools.current_of(device)?,
    };
    state.pools.get(handle)?;
    pool::allocate(driver, &mut state, handle, bytes, stream)
}

fn of_location(driver: &Driver, location: In<Location>) -> Cu<usize> {
    vmm::device_of(driver, location.get()?)?.ok_or(Code::NOT_SUPPORTED)
}

api! { (driver, flavour)
    Init fn cuMemAllocAsync | cuMemAllocAsync_ptsz(pointer: Out<u64>, bytes: u64, stream: u64) {
        pointer.check()?;
        pointer.put(allocate(driver, None, bytes, stream)?)
    }

    Init fn cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz(
        pointer: Out<u64>, bytes: u64, pool: u64, stream: u64,
    ) {
        pointer.check()?;
        pointer.put(allocate(driver, Some(pool), bytes, stream)?)
    }

    Init fn cuMemFreeAsync | cuMemFreeAsync_ptsz(pointer: u64, stream: u64) {
        if pointer == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = driver.lock();
        state.current()?;
        let pooled = state.memory.at(pointer).is_some_and(|r| matches!(r.kind, crate::memory::Kind::Pool { .. }));
        if pooled {
            pool::free_async(driver, &mut state, pointer, stream, 0)
        } else {
            crate::memory::free(driver, &mut state, pointer)
        }
    }

    Init fn cuMemPoolCreate(pool: Out<u64>, properties: In<PoolProps>) {
        pool.check()?;
        let asked = properties.get()?;
        if asked.kind != 1 || asked.handle_types & !vmm::POSIX_FD != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let device = vmm::device_of(driver, asked.location)?.ok_or(Code::NOT_SUPPORTED)?;
        let handle = pool::create(&mut driver.lock(), device, asked.max_size, asked.handle_types);
        pool.put(handle)
    }

    Init fn cuMemPoolDestroy(pool: u64) {
        pool::destroy(driver, &mut driver.lock(), pool)
    }

    Init fn cuMemPoolTrimTo(pool: u64, keep: u64) {
        let mut state = driver.lock();
        state.pools.get(pool)?;
        pool::trim(driver, &mut state, pool, keep);
        Ok(())
    }

    Init fn cuMemPoolGetAttribute(pool: u64, attribute: i32, value: Out<u64>) {
        let state = driver.lock();
        let (found, int) = pool::attribute(state.pools.get(pool)?, attribute)?;
        if int { Out::at(value.address()).put(i32::try_from(found).unwrap_or(i32::MAX)) } else { value.put(found) }
    }

    Init fn cuMemPoolSetAttribute(pool: u64, attribute: i32, value: In<u64>) {
        let mut state = driver.lock();
        pool::set_attribute(state.pools.get_mut(pool)?, attribute, |int| {
            if int { In::<u32>::at(value.address()).get().map(u64::from) } else { value.get() }
        })
    }

    Init fn cuMemPoolSetAccess(pool: u64, descriptors: In<AccessDesc>, count: u64) {
        let mut state = driver.lock();
        let entry = state.pools.get_mut(pool)?;
        for wanted in descriptors.list(usize::try_from(count).unwrap_or(0))? {
            let device = vmm::device_of(driver, wanted.location)?.ok_or(Code::INVALID_VALUE)?;
            // The pool's own device always has access.
            if device == entry.device && wanted.flags != 3 {
                return Err(Code::INVALID_DEVICE);
            }
            entry.access.insert(wanted.location.id, wanted.flags);
        }
        Ok(())
    }

    Init fn cuMemPoolGetAccess(flags: Out<i32>, pool: u64, location: In<Location>) {
        let state = driver.lock();
        let entry = state.pools.get(pool)?;
        let device = of_location(driver, location)?;
        let own = if device == entry.device { 3 } else { 0 };
        flags.put(entry.access.get(&location.get()?.id).copied().unwrap_or(own))
    }

    Init fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) {
        driver.device(device)?;
        let found = driver.lock().pools.default_of(usize::try_from(device).unwrap_or(0))?;
        pool.put(found)
    }

    Init fn cuDeviceGetMemPool(pool: Out<u64>, device: i32) {
        driver.device(device)?;
        let found = driver.lock().pools.current_of(usize::try_from(device).unwrap_or(0))?;
        pool.put(found)
    }

    Init fn cuDeviceSetMemPool(device: i32, pool: u64) {
        driver.device(device)?;
        driver.lock().pools.set_current(usize::try_from(device).unwrap_or(0), pool)
    }

    Init fn cuMemGetDefaultMemPool(pool: Out<u64>, location: In<Location>, kind: i32) {
        let found = driver.lock().pools.default_of(of_location(driver, location)?)?;
        pool.put(found)
    }

    Init fn cuMemGetMemPool(pool: Out<u64>, location: In<Location>, kind: i32) {
        let found = driver.lock().pools.current_of(of_location(driver, location)?)?;
        pool.put(found)
    }

    Init fn cuMemSetMemPool(location: In<Location>, kind: i32, pool: u64) {
        let device = of_location(driver, location)?;
        driver.lock().pools.set_current(device, pool)
    }
}

//! Stream-ordered memory and its pools.

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::engine;
use crate::entry::api;
use crate::ffi::{In, Out};
use crate::graph;
use crate::memory;
use crate::pool::{self, reclaim};
use crate::resolver::Flavour;
use crate::state::graph::NodeKind;
use crate::state::memory::Kind;
use crate::state::work::Work;
use crate::types::{AccessDesc, Location, PoolProps};
use crate::{capture, stream, vmm};

fn allocate(driver: &Driver, from: Option<u64>, bytes: u64, handle: u64, flavour: Flavour) -> Cu<u64> {
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    let device = state.context(target.context)?.device;
    let pool = match from {
        Some(pool) => pool,
        None => state.pools.current_of(device)?,
    };
    let device = state.pools.get(pool)?.device;
    if let Some(id) = capture::of(&state, target.stream)? {
        let address = graph::reserve_addresses(driver, &mut state, device, bytes)?;
        capture::add(&mut state, id, target.stream, NodeKind::Alloc { address, bytes, device })?;
        return Ok(address);
    }
    capture::check_implicit(&mut state, target)?;
    engine::advance(driver, &mut state);
    pool::allocate(driver, &mut state, pool, bytes, target.stream)
}

fn free(driver: &Driver, address: u64, handle: u64, flavour: Flavour) -> Cu {
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, handle, flavour)?;
    let kind = state.memory.at(address).map(|r| r.kind.clone()).ok_or(Code::INVALID_VALUE)?;
    if let Some(id) = capture::of(&state, target.stream)? {
        return capture::add(&mut state, id, target.stream, NodeKind::Free { address }).map(|_| ());
    }
    capture::check_implicit(&mut state, target)?;
    match kind {
        Kind::Pool { .. } => {
            let operation = stream::submit(driver, &mut state, target, &[], Work::Marker);
            reclaim::free_async(driver, &mut state, address, target.stream, operation)
        }
        Kind::Graph => memory::free(driver, &mut state, address),
        // Memory of cuMemAlloc goes when the stream gets there; the caller waits for it here.
        _ => {
            drop(state);
            stream::synchronise(driver, target)?;
            memory::free(driver, &mut driver.lock(), address)
        }
    }
}

fn of_location(driver: &Driver, location: In<Location>) -> Cu<usize> {
    vmm::device_of(driver, location.get()?)?.ok_or(Code::NOT_SUPPORTED)
}

api! { (driver, flavour)
    Init fn cuMemAllocAsync | cuMemAllocAsync_ptsz(pointer: Out<u64>, bytes: u64, stream: u64) {
        pointer.check()?;
        pointer.put(allocate(driver, None, bytes, stream, flavour)?)
    }

    Init fn cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz(
        pointer: Out<u64>, bytes: u64, pool: u64, stream: u64,
    ) {
        pointer.check()?;
        pointer.put(allocate(driver, Some(pool), bytes, stream, flavour)?)
    }

    Init fn cuMemFreeAsync | cuMemFreeAsync_ptsz(pointer: u64, stream: u64) {
        free(driver, pointer, stream, flavour)
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
        engine::advance(driver, &mut state);
        state.pools.get(pool)?;
        reclaim::trim(driver, &mut state, pool, keep);
        Ok(())
    }

    Init fn cuMemPoolGetAttribute(pool: u64, attribute: i32, value: Out<u64>) {
        let mut state = driver.lock();
        engine::advance(driver, &mut state);
        reclaim::collect(driver, &mut state, pool, None);
        let (found, int) = state.pools.get(pool)?.attribute(attribute)?;
        if int { Out::at(value.address()).put(i32::try_from(found).unwrap_or(i32::MAX)) } else { value.put(found) }
    }

    Init fn cuMemPoolSetAttribute(pool: u64, attribute: i32, value: In<u64>) {
        let mut state = driver.lock();
        state.pools.get_mut(pool)?.set_attribute(attribute, |int| {
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

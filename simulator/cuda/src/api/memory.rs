//! Linear, pitched, managed and host memory, and what is asked about addresses.

use crate::capture;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::{In, Out};
use crate::memory;
use crate::space;
use crate::state::State;
use crate::state::memory::{Allocation, Kind};
use crate::stream;
use crate::types::Location;

/// Rows of pitched memory start at multiples of this.
const PITCH: u64 = 512;

fn allocate(driver: &Driver, bytes: u64, low: bool) -> Cu<u64> {
    let mut state = driver.lock();
    let (context, _) = state.current()?;
    capture::check_unsafe(&mut state)?;
    memory::allocate(driver, &mut state, context, bytes, low)
}

fn allocate_pitched(driver: &Driver, width: u64, height: u64, element: u32, low: bool) -> Cu<(u64, u64)> {
    if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let pitch = width.checked_next_multiple_of(PITCH).ok_or(Code::OUT_OF_MEMORY)?;
    let bytes = pitch.checked_mul(height).ok_or(Code::OUT_OF_MEMORY)?;
    Ok((allocate(driver, bytes, low)?, pitch))
}

fn free(driver: &Driver, address: u64) -> Cu {
    if address == 0 {
        return Ok(());
    }
    let owner = {
        let mut state = driver.lock();
        let (current, _) = state.current()?;
        capture::check_unsafe(&mut state)?;
        let range = state.memory.at(address).ok_or(Code::INVALID_VALUE)?;
        if range.context == 0 { current } else { range.context }
    };
    // Nothing that runs may still use it.
    if driver.config.free_syncs {
        stream::synchronise_context(driver, owner)?;
    }
    memory::free(driver, &mut driver.lock(), address)
}

fn info(driver: &Driver) -> Cu<(u64, u64)> {
    let device = driver.lock().current()?.1.device;
    let pool = driver.devices().get(device).ok_or(Code::INVALID_DEVICE)?.pool;
    let memory = driver.node()?.memory(pool).map_err(|_| Code::UNKNOWN)?;
    Ok((memory.free, memory.total - memory.reserved))
}

fn low_half(value: u64) -> Cu<u32> {
    u32::try_from(value).map_err(|_| Code::INVALID_VALUE)
}

fn allocate_host(driver: &Driver, bytes: u64, flags: u32) -> Cu<u64> {
    let mut state = driver.lock();
    let (context, own) = state.current()?;
    let device = own.device;
    capture::check_unsafe(&mut state)?;
    if bytes == 0 || flags & !0x7 != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let base = space::host_memory(bytes).ok_or(Code::OUT_OF_MEMORY)?;
    state.memory.insert_host(base, (bytes, device, context), Kind::Host { flags, owned: true });
    Ok(base)
}

fn register(driver: &Driver, address: u64, bytes: u64, flags: u32) -> Cu {
    let mut state = driver.lock();
    let (context, own) = state.current()?;
    let device = own.device;
    if address == 0 || bytes == 0 || flags & !0xf != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if state.memory.overlaps(address, bytes) {
        return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
    }
    state.memory.insert_host(address, (bytes, device, context), Kind::Host { flags, owned: false });
    Ok(())
}

fn device_pointer(driver: &Driver, address: u64, flags: u32) -> Cu<u64> {
    let state = driver.lock();
    state.current()?;
    match state.memory.find(address) {
        Some((_, range)) if flags == 0 && matches!(range.kind, Kind::Host { .. } | Kind::Managed { .. }) => {
            Ok(address)
        }
        _ => Err(Code::INVALID_VALUE),
    }
}

fn range_of(driver: &Driver, address: u64) -> Cu<(u64, u64)> {
    let state = driver.lock();
    state.current()?;
    state.memory.find(address).map(|(base, range)| (base, range.bytes)).ok_or(Code::NOT_FOUND)
}

/// `CUmemorytype` of an address: pinned host memory is host memory, managed memory is the device's.
fn memory_type(state: &State, range: &Allocation) -> u32 {
    match &range.kind {
        Kind::Host { .. } => 1,
        Kind::Mapping { handle } if state.vmm.physical(*handle).is_ok_and(|p| p.device.is_none()) => 1,
        _ => 2,
    }
}

/// A value of some attribute, in the width that the attribute has.
enum Value {
    Int(i32),
    Flag(bool),
    Word(u64),
}

fn attribute(state: &State, attribute: i32, address: u64) -> Cu<Value> {
    let (base, range) = state.memory.find(address).ok_or(Code::INVALID_VALUE)?;
    let host = matches!(range.kind, Kind::Host { .. });
    let managed = matches!(range.kind, Kind::Managed { .. });
    let owner = if range.context == 0 { owner_of(state, range) } else { range.context };
    Ok(match attribute {
        1 if matches!(range.kind, Kind::Mapping { .. } | Kind::Pool { .. }) => Value::Word(0),
        1 => Value::Word(owner),
        2 => Value::Int(i32::try_from(memory_type(state, range)).unwrap_or(0)),
        3 => Value::Word(address),
        4 if host || managed => Value::Word(address),
        4 => return Err(Code::INVALID_VALUE),
        5 => return Err(Code::INVALID_VALUE),
        6 => Value::Flag(range.sync_memops),
        7 => Value::Word(range.id),
        8 => Value::Flag(managed),
        9 => Value::Int(i32::try_from(range.device).unwrap_or(0)),
        10 => Value::Flag(matches!(range.kind, Kind::Linear { .. })),
        11 => Value::Word(base),
        12 => Value::Word(range.bytes),
        13 => Value::Flag(true),
        14 => match &range.kind {
            Kind::Mapping { handle } => Value::Word(handle_types(state, *handle)),
            Kind::Pool { pool, .. } => {
                Value::Word(state.pools.get(*pool).map_or(0, |p| u64::from(p.handle_types.unsigned_abs())))
            }
            _ => Value::Word(0),
        },
        15 => Value::Flag(matches!(range.kind, Kind::Linear { .. })),
        16 => match &range.kind {
            Kind::Mapping { .. } => {
                let device = i32::try_from(range.device).unwrap_or(0);
                Value::Int(state.vmm.access_of(base, device))
            }
            _ => Value::Int(3),
        },
        17 => match &range.kind {
            Kind::Pool { pool, .. } => Value::Word(*pool),
            _ => Value::Word(0),
        },
        18 => Value::Word(range.bytes),
        19 => Value::Word(base),
        20 => Value::Word(range.id),
        21 => Value::Flag(false),
        22 => Value::Int(0),
        _ => return Err(Code::INVALID_VALUE),
    })
}

fn handle_types(state: &State, handle: u64) -> u64 {
    state.vmm.physical(handle).map_or(0, |p| u64::from(p.prop.handle_types.unsigned_abs()))
}

fn owner_of(state: &State, range: &Allocation) -> u64 {
    state.primaries.get(range.device).and_then(|p| p.handle).unwrap_or(0)
}

fn write_value(address: u64, value: &Value) -> Cu {
    match value {
        Value::Int(value) => Out::at(address).put(*value),
        Value::Flag(value) => Out::at(address).put(u32::from(*value)),
        Value::Word(value) => Out::at(address).put(*value),
    }
}

/// A null value of the attribute's width, as `cuPointerGetAttributes` writes for addresses that it does not know.
fn write_nothing(address: u64, attribute: i32) -> Cu {
    match attribute {
        2 | 6 | 8 | 10 | 13 | 15 | 16 | 21 | 22 => Out::at(address).put(0_u32),
        // No device.
        9 => Out::at(address).put(-2_i32),
        _ => Out::at(address).put(0_u64),
    }
}

fn prefetch(driver: &Driver, address: u64, bytes: u64, location: Location) -> Cu {
    let mut state = driver.lock();
    state.current()?;
    let managed = |(_, range): (u64, &Allocation)| matches!(range.kind, Kind::Managed { .. });
    if bytes == 0 || !state.memory.find(address).is_some_and(managed) {
        return Err(Code::INVALID_VALUE);
    }
    let to = crate::vmm::device_of(driver, location)?;
    memory::migrate(driver, &mut state, address, bytes, to);
    Ok(())
}

/// The location that an ordinal meant before locations existed: -1 is the host.
fn location_of(device: i32) -> Location {
    if device == -1 {
        Location { kind: Location::HOST, id: 0 }
    } else {
        Location { kind: Location::DEVICE, id: device }
    }
}

fn advise(driver: &Driver, address: u64, bytes: u64, advice: i32, location: Location) -> Cu {
    let state = driver.lock();
    state.current()?;
    let (_, range) = state.memory.find(address).ok_or(Code::INVALID_VALUE)?;
    if bytes == 0 || !(1..=6).contains(&advice) || !matches!(range.kind, Kind::Managed { .. }) {
        return Err(Code::INVALID_VALUE);
    }
    // Read-mostly advice takes no location; the others must name one that exists.
    if advice > 2 { crate::vmm::device_of(driver, location).map(|_| ()) } else { Ok(()) }
}

api! { (driver, flavour)
    Init fn cuMemGetInfo(free: Out<u32>, total: Out<u32>) {
        let (now, all) = info(driver)?;
        free.offer(u32::try_from(now).unwrap_or(u32::MAX));
        total.offer(u32::try_from(all).unwrap_or(u32::MAX));
        Ok(())
    }

    Init fn cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) {
        let (now, all) = info(driver)?;
        free.offer(now);
        total.offer(all);
        Ok(())
    }

    Init fn cuMemAlloc(pointer: Out<u32>, bytes: u32) {
        pointer.check()?;
        pointer.put(low_half(allocate(driver, u64::from(bytes), true)?)?)
    }

    Init fn cuMemAlloc_v2(pointer: Out<u64>, bytes: u64) {
        pointer.check()?;
        pointer.put(allocate(driver, bytes, false)?)
    }

    Init fn cuMemAllocPitch(pointer: Out<u32>, pitch: Out<u32>, width: u32, height: u32, element: u32) {
        pointer.check()?;
        pitch.check()?;
        let (base, found) = allocate_pitched(driver, u64::from(width), u64::from(height), element, true)?;
        pointer.put(low_half(base)?)?;
        pitch.put(low_half(found)?)
    }

    Init fn cuMemAllocPitch_v2(pointer: Out<u64>, pitch: Out<u64>, width: u64, height: u64, element: u32) {
        pointer.check()?;
        pitch.check()?;
        let (base, found) = allocate_pitched(driver, width, height, element, false)?;
        pointer.put(base)?;
        pitch.put(found)
    }

    Init fn cuMemAllocManaged(pointer: Out<u64>, bytes: u64, flags: u32) {
        pointer.check()?;
        if !matches!(flags, 1 | 2) {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = driver.lock();
        let (context, _) = state.current()?;
        capture::check_unsafe(&mut state)?;
        let base = memory::allocate_managed(&mut state, context, bytes)?;
        pointer.put(base)
    }

    Init fn cuMemFree(pointer: u32) {
        free(driver, u64::from(pointer))
    }

    Init fn cuMemFree_v2(pointer: u64) {
        free(driver, pointer)
    }

    Init fn cuMemAllocHost(pointer: Out<u64>, bytes: u32) {
        pointer.check()?;
        pointer.put(allocate_host(driver, u64::from(bytes), 0)?)
    }

    Init fn cuMemAllocHost_v2(pointer: Out<u64>, bytes: u64) {
        pointer.check()?;
        pointer.put(allocate_host(driver, bytes, 0)?)
    }

    Init fn cuMemHostAlloc(pointer: Out<u64>, bytes: u64, flags: u32) {
        pointer.check()?;
        pointer.put(allocate_host(driver, bytes, flags)?)
    }

    Init fn cuMemFreeHost(pointer: u64) {
        let mut state = driver.lock();
        let owned = |range: &Allocation| matches!(range.kind, Kind::Host { owned: true, .. });
        if !state.memory.at(pointer).is_some_and(owned) {
            return Err(Code::INVALID_VALUE);
        }
        memory::free_host(&mut state, pointer)
    }

    Init fn cuMemHostRegister(pointer: u64, bytes: u64, flags: u32) {
        register(driver, pointer, bytes, flags)
    }

    Init fn cuMemHostRegister_v2(pointer: u64, bytes: u64, flags: u32) {
        register(driver, pointer, bytes, flags)
    }

    Init fn cuMemHostUnregister(pointer: u64) {
        let mut state = driver.lock();
        let registered = |range: &Allocation| matches!(range.kind, Kind::Host { owned: false, .. });
        if !state.memory.at(pointer).is_some_and(registered) {
            return Err(Code::HOST_MEMORY_NOT_REGISTERED);
        }
        memory::free_host(&mut state, pointer)
    }

    Init fn cuMemHostGetDevicePointer(result: Out<u32>, pointer: u64, flags: u32) {
        result.put(low_half(device_pointer(driver, pointer, flags)?)?)
    }

    Init fn cuMemHostGetDevicePointer_v2(result: Out<u64>, pointer: u64, flags: u32) {
        result.put(device_pointer(driver, pointer, flags)?)
    }

    Init fn cuMemHostGetFlags(flags: Out<u32>, pointer: u64) {
        match driver.lock().memory.find(pointer).map(|(_, range)| range.kind.clone()) {
            Some(Kind::Host { flags: found, .. }) => flags.put(found),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    Init fn cuMemGetAddressRange(base: Out<u32>, bytes: Out<u32>, pointer: u32) {
        let (start, length) = range_of(driver, u64::from(pointer))?;
        base.offer(low_half(start)?);
        bytes.offer(low_half(length)?);
        Ok(())
    }

    Init fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<u64>, pointer: u64) {
        let (start, length) = range_of(driver, pointer)?;
        base.offer(start);
        bytes.offer(length);
        Ok(())
    }

    Init fn cuPointerGetAttribute(data: u64, attribute_id: i32, pointer: u64) {
        let value = attribute(&driver.lock(), attribute_id, pointer)?;
        write_value(data, &value)
    }

    Init fn cuPointerGetAttributes(number: u32, attributes: In<i32>, data: In<u64>, pointer: u64) {
        let state = driver.lock();
        let length = usize::try_from(number).unwrap_or(0);
        for (id, place) in attributes.list(length)?.into_iter().zip(data.list(length)?) {
            match attribute(&state, id, pointer) {
                Ok(value) => write_value(place, &value)?,
                Err(_) => write_nothing(place, id)?,
            }
        }
        Ok(())
    }

    Init fn cuPointerSetAttribute(value: In<u32>, attribute_id: i32, pointer: u64) {
        if attribute_id != 6 {
            return Err(Code::INVALID_VALUE);
        }
        let on = value.get()? != 0;
        let mut state = driver.lock();
        let (base, _) = state.memory.find(pointer).ok_or(Code::INVALID_VALUE)?;
        state.memory.at_mut(base).map(|range| range.sync_memops = on).ok_or(Code::INVALID_VALUE)
    }

    Init fn cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz(pointer: u64, bytes: u64, device: i32, stream: u64) {
        prefetch(driver, pointer, bytes, location_of(device))
    }

    Init fn cuMemPrefetchAsync_v2 | cuMemPrefetchAsync_v2_ptsz(
        pointer: u64, bytes: u64, location: Location, flags: u32, stream: u64,
    ) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        prefetch(driver, pointer, bytes, location)
    }

    Init fn cuMemAdvise(pointer: u64, bytes: u64, advice: i32, device: i32) {
        advise(driver, pointer, bytes, advice, location_of(device))
    }

    Init fn cuMemAdvise_v2(pointer: u64, bytes: u64, advice: i32, location: Location) {
        advise(driver, pointer, bytes, advice, location)
    }
}

//! Arrays.

use crate::array;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::{In, Out};
use crate::shape;
use crate::types::{
    Array3dDescriptor, Array3dDescriptorV1, ArrayDescriptor, ArrayDescriptorV1, MemoryRequirements,
};

fn create(driver: &Driver, handle: Out<u64>, shape: Array3dDescriptor) -> Cu {
    handle.check()?;
    let mut state = driver.lock();
    let (context, _) = state.current()?;
    let made = array::create(driver, &mut state, context, shape)?;
    handle.put(made)
}

fn shape_of(driver: &Driver, handle: u64) -> Cu<Array3dDescriptor> {
    Ok(driver.lock().arrays.get(handle)?.shape)
}

fn short(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn flat(width: u64, height: u64, format: u32, channels: u32) -> Array3dDescriptor {
    Array3dDescriptor { width, height, depth: 0, format, channels, flags: 0 }
}

fn requirements(shape: &Array3dDescriptor) -> Cu<MemoryRequirements> {
    let (size, alignment) = shape::requirements(shape)?;
    Ok(MemoryRequirements { size, alignment, ..MemoryRequirements::default() })
}

api! { (driver, flavour)
    Init fn cuArrayCreate(handle: Out<u64>, wanted: In<ArrayDescriptorV1>) {
        let d = wanted.get()?;
        create(driver, handle, flat(u64::from(d.width), u64::from(d.height), d.format, d.channels))
    }

    Init fn cuArrayCreate_v2(handle: Out<u64>, wanted: In<ArrayDescriptor>) {
        let d = wanted.get()?;
        create(driver, handle, flat(d.width, d.height, d.format, d.channels))
    }

    Init fn cuArray3DCreate(handle: Out<u64>, wanted: In<Array3dDescriptorV1>) {
        let d = wanted.get()?;
        let shape = flat(u64::from(d.width), u64::from(d.height), d.format, d.channels);
        create(driver, handle, Array3dDescriptor { depth: u64::from(d.depth), flags: d.flags, ..shape })
    }

    Init fn cuArray3DCreate_v2(handle: Out<u64>, wanted: In<Array3dDescriptor>) {
        create(driver, handle, wanted.get()?)
    }

    Init fn cuArrayGetDescriptor(result: Out<ArrayDescriptorV1>, handle: u64) {
        let s = shape_of(driver, handle)?;
        let (width, height) = (short(s.width), short(s.height));
        result.put(ArrayDescriptorV1 { width, height, format: s.format, channels: s.channels })
    }

    Init fn cuArrayGetDescriptor_v2(result: Out<ArrayDescriptor>, handle: u64) {
        let s = shape_of(driver, handle)?;
        result.put(ArrayDescriptor { width: s.width, height: s.height, format: s.format, channels: s.channels })
    }

    Init fn cuArray3DGetDescriptor(result: Out<Array3dDescriptorV1>, handle: u64) {
        let s = shape_of(driver, handle)?;
        result.put(Array3dDescriptorV1 {
            width: short(s.width),
            height: short(s.height),
            depth: short(s.depth),
            format: s.format,
            channels: s.channels,
            flags: s.flags,
        })
    }

    Init fn cuArray3DGetDescriptor_v2(result: Out<Array3dDescriptor>, handle: u64) {
        result.put(shape_of(driver, handle)?)
    }

    Init fn cuArrayDestroy(handle: u64) {
        array::destroy(driver, &mut driver.lock(), handle)
    }

    Init fn cuArrayGetMemoryRequirements(result: Out<MemoryRequirements>, handle: u64, device: i32) {
        driver.device(device)?;
        result.put(requirements(&shape_of(driver, handle)?)?)
    }

    Init fn cuMipmappedArrayCreate(handle: Out<u64>, wanted: In<Array3dDescriptor>, levels: u32) {
        handle.check()?;
        let mut state = driver.lock();
        let (context, _) = state.current()?;
        let made = array::create_mipmap(driver, &mut state, context, wanted.get()?, levels)?;
        handle.put(made)
    }

    Init fn cuMipmappedArrayGetLevel(level_handle: Out<u64>, handle: u64, level: u32) {
        let state = driver.lock();
        let levels = &state.arrays.mipmap(handle)?.levels;
        let found = usize::try_from(level).ok().and_then(|i| levels.get(i)).ok_or(Code::INVALID_VALUE)?;
        level_handle.put(*found)
    }

    Init fn cuMipmappedArrayDestroy(handle: u64) {
        array::destroy_mipmap(driver, &mut driver.lock(), handle)
    }

    Init fn cuMipmappedArrayGetMemoryRequirements(result: Out<MemoryRequirements>, handle: u64, device: i32) {
        driver.device(device)?;
        let shape = driver.lock().arrays.mipmap(handle)?.shape;
        result.put(requirements(&shape)?)
    }
}

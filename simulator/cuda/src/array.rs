//! Arrays and mipmapped arrays: opaque device memory with a shape.

use std::sync::Arc;

use crate::backing::Backing;
use crate::charge::charge;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::shape::device_bytes;
use crate::state::State;
use crate::state::array::{Array, Mipmap};
use crate::types::Array3dDescriptor;

/// `cuArray3DCreate`, and the two-dimensional one.
pub(crate) fn create(driver: &Driver, state: &mut State, context: u64, shape: Array3dDescriptor) -> Cu<u64> {
    let device = state.context(context)?.device;
    let charged = device_bytes(&shape)?;
    charge(driver, state, device, charged)?;
    Ok(insert(
        driver,
        state,
        Array { device, context, shape, charged, content: new_content(driver), parent: None },
    ))
}

fn new_content(driver: &Driver) -> Arc<Backing> {
    Arc::new(Backing::new(driver.config.backing_bytes))
}

fn insert(_driver: &Driver, state: &mut State, array: Array) -> u64 {
    let handle = state.handle();
    state.arrays.arrays.insert(handle, array);
    handle
}

/// `cuArrayDestroy`.
pub(crate) fn destroy(driver: &Driver, state: &mut State, handle: u64) -> Cu {
    if state.arrays.get(handle)?.parent.is_some() {
        return Err(Code::INVALID_HANDLE);
    }
    if let Some(array) = state.arrays.arrays.remove(&handle) {
        driver.release(array.device, array.charged);
    }
    Ok(())
}

/// `cuMipmappedArrayCreate`.
pub(crate) fn create_mipmap(
    driver: &Driver,
    state: &mut State,
    context: u64,
    shape: Array3dDescriptor,
    levels: u32,
) -> Cu<u64> {
    let device = state.context(context)?.device;
    let longest = [shape.width, shape.height, shape.depth_of_volume()].into_iter().max().unwrap_or(1).max(1);
    // No more levels than halvings to a single element.
    let levels = levels.clamp(1, longest.ilog2() + 1);
    let shapes: Vec<Array3dDescriptor> = (0..levels).map(|level| shape.level(level)).collect();
    let sizes: Vec<u64> = shapes.iter().map(device_bytes).collect::<Cu<_>>()?;
    let charged = sizes.iter().try_fold(0_u64, |sum, n| sum.checked_add(*n)).ok_or(Code::OUT_OF_MEMORY)?;
    charge(driver, state, device, charged)?;
    let parent = state.handle();
    let mut handles = Vec::new();
    for shape in shapes {
        let content = new_content(driver);
        let level = Array { device, context, shape, charged: 0, content, parent: Some(parent) };
        handles.push(insert(driver, state, level));
    }
    state.arrays.mipmaps.insert(parent, Mipmap { device, context, shape, charged, levels: handles });
    Ok(parent)
}

/// `cuMipmappedArrayDestroy`.
pub(crate) fn destroy_mipmap(driver: &Driver, state: &mut State, handle: u64) -> Cu {
    let mipmap = state.arrays.mipmaps.remove(&handle).ok_or(Code::INVALID_HANDLE)?;
    for level in mipmap.levels {
        state.arrays.arrays.remove(&level);
    }
    driver.release(mipmap.device, mipmap.charged);
    Ok(())
}

/// Ends the arrays of a context.
pub(crate) fn free_context(driver: &Driver, state: &mut State, context: u64) {
    let mipmaps = state.arrays.mipmaps.iter().filter(|(_, m)| m.context == context);
    for handle in mipmaps.map(|(handle, _)| *handle).collect::<Vec<_>>() {
        let _ = destroy_mipmap(driver, state, handle);
    }
    let arrays = state.arrays.arrays.iter().filter(|(_, a)| a.context == context);
    for handle in arrays.map(|(handle, _)| *handle).collect::<Vec<_>>() {
        let _ = destroy(driver, state, handle);
    }
}

//! Launches, by all the entry points that there are.

use crate::capture;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::In;
use crate::launch;
use crate::resolver::Flavour;
use crate::state::State;
use crate::state::graph::NodeKind;
use crate::state::work::Launch;
use crate::stream;

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    attributes: u64,
    attribute_count: u32,
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Parameters {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    parameters: In<u64>,
}

const _: () = assert!(size_of::<Config>() == 56);
const _: () = assert!(size_of::<Parameters>() == 56);

/// `CU_LAUNCH_PARAM_BUFFER_POINTER`.
const BUFFER_POINTER: u64 = 1;

/// First parameter as a word, for functions that take their duration from it. Only those have it read.
pub(super) fn parameter(state: &State, function: u64, parameters: In<u64>, extra: In<u64>) -> Cu<u64> {
    if state.modules.function(function)?.figures.param_unit_ns.is_none() {
        return Ok(0);
    }
    if !parameters.is_null() {
        return In::<u64>::at(parameters.get()?).get();
    }
    if !extra.is_null() && extra.get()? == BUFFER_POINTER {
        return In::<u64>::at(extra.get_at(1)?).get();
    }
    Err(Code::INVALID_VALUE)
}

fn run(driver: &Driver, handle: u64, flavour: Flavour, launch: impl Fn(&State) -> Cu<Launch>) -> Cu {
    let target = stream::resolve(&mut driver.lock(), handle, flavour)?;
    // Room first: nothing is held while a full queue drains.
    if driver.lock().engine.outstanding(target.stream) >= driver.config.launch_queue {
        stream::wait_for_room(driver, target)?;
    }
    let mut state = driver.lock();
    let launch = launch(&state)?;
    let work = launch::prepare(driver, &mut state, target.context, &launch)?;
    if let Some(id) = capture::of(&state, target.stream)? {
        return capture::add(&mut state, id, target.stream, NodeKind::Kernel(launch)).map(|_| ());
    }
    capture::check_implicit(&mut state, target)?;
    stream::submit(driver, &mut state, target, &[], work);
    Ok(())
}

/// A launch of CUDA 3: the block and the parameters are the function's.
fn run_old(driver: &Driver, function: u64, grid: (i32, i32), handle: u64) -> Cu {
    let side = |n: i32| u32::try_from(n).map_err(|_| Code::INVALID_VALUE);
    let grid = [side(grid.0)?, side(grid.1)?, 1];
    run(driver, handle, Flavour::Legacy, |state| {
        let entry = state.modules.function(function)?;
        let first: Vec<u8> = entry.parameters.iter().copied().chain([0; 8]).take(8).collect();
        let parameter = first.try_into().map_or(0, u64::from_le_bytes);
        Ok(Launch { function, grid, block: entry.block, shared: 0, parameter })
    })
}

fn set_bytes(driver: &Driver, function: u64, offset: i32, bytes: &[u8]) -> Cu {
    let offset = usize::try_from(offset).map_err(|_| Code::INVALID_VALUE)?;
    let mut state = driver.lock();
    let buffer = &mut state.modules.function_mut(function)?.parameters;
    let end = offset.checked_add(bytes.len()).filter(|end| *end <= 4096).ok_or(Code::INVALID_VALUE)?;
    if buffer.len() < end {
        buffer.resize(end, 0);
    }
    if let Some(place) = buffer.get_mut(offset..end) {
        place.copy_from_slice(bytes);
    }
    Ok(())
}

api! { (driver, flavour)
    Init fn cuLaunchKernel | cuLaunchKernel_ptsz(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: u64, parameters: In<u64>, extra: In<u64>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        run(driver, stream, flavour, |state| {
            let parameter = parameter(state, function, parameters, extra)?;
            Ok(Launch { function, grid, block, shared, parameter })
        })
    }

    Init fn cuLaunchKernelEx | cuLaunchKernelEx_ptsz(
        config: In<Config>, function: u64, parameters: In<u64>, extra: In<u64>,
    ) {
        let wanted = config.get()?;
        run(driver, wanted.stream, flavour, |state| {
            let parameter = parameter(state, function, parameters, extra)?;
            Ok(Launch { function, grid: wanted.grid, block: wanted.block, shared: wanted.shared, parameter })
        })
    }

    Init fn cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: u64, parameters: In<u64>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        run(driver, stream, flavour, |state| {
            let parameter = parameter(state, function, parameters, In::at(0))?;
            Ok(Launch { function, grid, block, shared, parameter })
        })
    }

    Init fn cuLaunchCooperativeKernelMultiDevice(list: In<Parameters>, devices: u32, flags: u32) {
        for wanted in list.list(usize::try_from(devices).unwrap_or(0))? {
            // Each must name a stream of its own device; the default streams have none to name.
            if wanted.stream < 3 {
                return Err(Code::INVALID_VALUE);
            }
            run(driver, wanted.stream, Flavour::Legacy, |state| {
                let parameter = parameter(state, wanted.function, wanted.parameters, In::at(0))?;
                let Parameters { function, grid, block, shared, .. } = wanted;
                Ok(Launch { function, grid, block, shared, parameter })
            })?;
        }
        Ok(())
    }

    Init fn cuLaunch(function: u64) {
        run_old(driver, function, (1, 1), 0)
    }

    Init fn cuLaunchGrid(function: u64, width: i32, height: i32) {
        run_old(driver, function, (width, height), 0)
    }

    Init fn cuLaunchGridAsync(function: u64, width: i32, height: i32, stream: u64) {
        run_old(driver, function, (width, height), stream)
    }

    Init fn cuFuncSetBlockShape(function: u64, x: i32, y: i32, z: i32) {
        let side = |n: i32| u32::try_from(n).ok().filter(|n| *n > 0).ok_or(Code::INVALID_VALUE);
        let block = [side(x)?, side(y)?, side(z)?];
        driver.lock().modules.function_mut(function).map(|f| f.block = block)
    }

    Init fn cuFuncSetSharedSize(function: u64, bytes: u32) {
        driver.lock().modules.function(function).map(|_| ())
    }

    Init fn cuParamSetSize(function: u64, bytes: u32) {
        let bytes = usize::try_from(bytes).ok().filter(|n| *n <= 4096).ok_or(Code::INVALID_VALUE)?;
        driver.lock().modules.function_mut(function).map(|f| f.parameters.resize(bytes, 0))
    }

    Init fn cuParamSeti(function: u64, offset: i32, value: u32) {
        set_bytes(driver, function, offset, &value.to_le_bytes())
    }

    Init fn cuParamSetf(function: u64, offset: i32, value: f32) {
        set_bytes(driver, function, offset, &value.to_le_bytes())
    }

    Init fn cuParamSetv(function: u64, offset: i32, value: In<u8>, bytes: u32) {
        let content = value.list(usize::try_from(bytes).ok().filter(|n| *n <= 4096).ok_or(Code::INVALID_VALUE)?)?;
        set_bytes(driver, function, offset, &content)
    }
}

//! Modules, libraries and their functions.

use crate::capture;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::{Out, Text};
use crate::image::Image;
use crate::module;

fn load(driver: &Driver, handle: Out<u64>, image: Image) -> Cu {
    handle.check()?;
    let mut state = driver.lock();
    let (context, _) = state.current()?;
    capture::check_unsafe(&mut state)?;
    let made = module::load(driver, &mut state, image, context)?;
    handle.put(made)
}

fn load_library(driver: &Driver, handle: Out<u64>, image: Image) -> Cu {
    handle.check()?;
    let made = module::load(driver, &mut driver.lock(), image, 0)?;
    handle.put(made)
}

/// A library can be used wherever a module is, once a context is current.
fn global(driver: &Driver, module: u64, name: Text) -> Cu<(u64, u64)> {
    let mut state = driver.lock();
    let (context, _) = state.current()?;
    module::global(driver, &mut state, module, context, name.get()?)
}

fn enumerate(driver: &Driver, list: Out<u64>, length: u32, module: u64) -> Cu {
    let state = driver.lock();
    state.modules.get(module)?;
    let functions = state.modules.functions_of(module);
    for (index, function) in functions.into_iter().take(usize::try_from(length).unwrap_or(0)).enumerate() {
        list.put_at(index, function)?;
    }
    Ok(())
}

fn count(driver: &Driver, result: Out<u32>, module: u64) -> Cu {
    let state = driver.lock();
    state.modules.get(module)?;
    result.put(u32::try_from(state.modules.functions_of(module).len()).unwrap_or(u32::MAX))
}

/// What a function says of itself where nobody has set it.
fn attribute(driver: &Driver, number: i32, function: u64) -> Cu<i32> {
    let state = driver.lock();
    let entry = state.modules.function(function)?;
    if let Some(value) = entry.attributes.get(&number) {
        return Ok(*value);
    }
    Ok(match number {
        0 => 1024,
        1 | 2 | 7 | 10..=15 => 0,
        3 => i32::try_from(entry.figures.local).unwrap_or(i32::MAX),
        4 => 32,
        5 | 6 => 90,
        8 => 48 << 10,
        9 => -1,
        _ => return Err(Code::INVALID_VALUE),
    })
}

fn set_attribute(driver: &Driver, number: i32, value: i32, function: u64) -> Cu {
    if !matches!(number, 8..=15) || (number == 8 && !(0..=(227 << 10)).contains(&value)) {
        return Err(Code::INVALID_VALUE);
    }
    let mut state = driver.lock();
    state.modules.function_mut(function)?.attributes.insert(number, value);
    Ok(())
}

fn name(driver: &Driver, result: Out<u64>, function: u64) -> Cu {
    let state = driver.lock();
    result.put(state.modules.function(function)?.name.as_ptr() as u64)
}

/// Loads a function's code now rather than at its first launch.
fn load_now(driver: &Driver, function: u64) -> Cu {
    let mut state = driver.lock();
    let (context, _) = state.current()?;
    let module = state.modules.function(function)?.module;
    module::ensure_loaded(driver, &mut state, module, context)
}

api! { (driver, flavour)
    Init fn cuModuleLoad(module: Out<u64>, path: Text) {
        load(driver, module, Image::from_file(path.get()?)?)
    }

    Init fn cuModuleLoadData(module: Out<u64>, image: u64) {
        load(driver, module, Image::from_memory(image)?)
    }

    Init fn cuModuleLoadDataEx(module: Out<u64>, image: u64, options: u32, keys: u64, values: u64) {
        load(driver, module, Image::from_memory(image)?)
    }

    Init fn cuModuleLoadFatBinary(module: Out<u64>, image: u64) {
        load(driver, module, Image::from_memory(image)?)
    }

    Init fn cuModuleUnload(module: u64) {
        let mut state = driver.lock();
        if state.modules.get(module)?.context == 0 {
            return Err(Code::INVALID_HANDLE);
        }
        module::unload(driver, &mut state, module)
    }

    Init fn cuModuleGetLoadingMode(mode: Out<i32>) {
        mode.put(if driver.config.eager_modules { 1 } else { 2 })
    }

    Init fn cuModuleGetFunction(function: Out<u64>, module: u64, name: Text) {
        function.check()?;
        let found = module::function(&mut driver.lock(), module, name.get()?, false)?;
        function.put(found)
    }

    Init fn cuModuleGetFunctionCount(result: Out<u32>, module: u64) {
        count(driver, result, module)
    }

    Init fn cuModuleEnumerateFunctions(functions: Out<u64>, length: u32, module: u64) {
        enumerate(driver, functions, length, module)
    }

    Init fn cuModuleGetGlobal_v2(pointer: Out<u64>, bytes: Out<u64>, module: u64, name: Text) {
        let (address, size) = global(driver, module, name)?;
        pointer.offer(address);
        bytes.offer(size);
        Ok(())
    }

    Init fn cuLibraryLoadData(
        library: Out<u64>, image: u64, options: u64, values: u64, length: u32,
        library_options: u64, library_values: u64, library_length: u32,
    ) {
        load_library(driver, library, Image::from_memory(image)?)
    }

    Init fn cuLibraryLoadFromFile(
        library: Out<u64>, path: Text, options: u64, values: u64, length: u32,
        library_options: u64, library_values: u64, library_length: u32,
    ) {
        load_library(driver, library, Image::from_file(path.get()?)?)
    }

    Init fn cuLibraryUnload(library: u64) {
        let mut state = driver.lock();
        if state.modules.get(library)?.context != 0 {
            return Err(Code::INVALID_HANDLE);
        }
        module::unload(driver, &mut state, library)
    }

    Init fn cuLibraryGetKernel(kernel: Out<u64>, library: u64, name: Text) {
        kernel.check()?;
        let found = module::function(&mut driver.lock(), library, name.get()?, true)?;
        kernel.put(found)
    }

    Init fn cuLibraryGetKernelCount(result: Out<u32>, library: u64) {
        count(driver, result, library)
    }

    Init fn cuLibraryEnumerateKernels(kernels: Out<u64>, length: u32, library: u64) {
        enumerate(driver, kernels, length, library)
    }

    Init fn cuLibraryGetModule(module: Out<u64>, library: u64) {
        driver.lock().modules.get(library)?;
        module.put(library)
    }

    Init fn cuLibraryGetGlobal(pointer: Out<u64>, bytes: Out<u64>, library: u64, name: Text) {
        let (address, size) = global(driver, library, name)?;
        pointer.offer(address);
        bytes.offer(size);
        Ok(())
    }

    Init fn cuKernelGetFunction(function: Out<u64>, kernel: u64) {
        load_now(driver, kernel)?;
        function.put(kernel)
    }

    Init fn cuKernelGetLibrary(library: Out<u64>, kernel: u64) {
        let state = driver.lock();
        let entry = state.modules.function(kernel)?;
        if entry.is_kernel { library.put(entry.module) } else { Err(Code::INVALID_HANDLE) }
    }

    Init fn cuKernelGetName(result: Out<u64>, kernel: u64) {
        name(driver, result, kernel)
    }

    Init fn cuKernelGetAttribute(value: Out<i32>, number: i32, kernel: u64, device: i32) {
        driver.device(device)?;
        value.put(attribute(driver, number, kernel)?)
    }

    Init fn cuKernelSetAttribute(number: i32, value: i32, kernel: u64, device: i32) {
        driver.device(device)?;
        set_attribute(driver, number, value, kernel)
    }

    Init fn cuKernelSetCacheConfig(kernel: u64, config: i32, device: i32) {
        driver.lock().modules.function(kernel).map(|_| ())
    }

    Init fn cuFuncGetModule(module: Out<u64>, function: u64) {
        let found = driver.lock().modules.function(function)?.module;
        module.put(found)
    }

    Init fn cuFuncGetName(result: Out<u64>, function: u64) {
        name(driver, result, function)
    }

    Init fn cuFuncGetAttribute(value: Out<i32>, number: i32, function: u64) {
        value.put(attribute(driver, number, function)?)
    }

    Init fn cuFuncSetAttribute(function: u64, number: i32, value: i32) {
        set_attribute(driver, number, value, function)
    }

    Init fn cuFuncSetCacheConfig(function: u64, config: i32) {
        driver.lock().modules.function(function).map(|_| ())
    }

    Init fn cuFuncSetSharedMemConfig(function: u64, config: i32) {
        driver.lock().modules.function(function).map(|_| ())
    }

    Init fn cuFuncLoad(function: u64) {
        load_now(driver, function)
    }

    Init fn cuFuncIsLoaded(result: Out<i32>, function: u64) {
        let state = driver.lock();
        let (context, _) = state.current()?;
        let module = state.modules.get(state.modules.function(function)?.module)?;
        result.put(i32::from(module.is_loaded(context)))
    }

    Init fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<i32>, function: u64, size: i32, shared: u64) {
        driver.lock().modules.function(function)?;
        blocks.put(occupancy(size)?)
    }

    Init fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>, function: u64, size: i32, shared: u64, flags: u32,
    ) {
        driver.lock().modules.function(function)?;
        blocks.put(occupancy(size)?)
    }

    Init fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: Out<u64>, function: u64, blocks: i32, size: i32) {
        driver.lock().modules.function(function)?;
        let share = (100_u64 << 10) / u64::try_from(blocks.max(1)).unwrap_or(1);
        bytes.put(share.min(48 << 10))
    }
}

/// Blocks of that many threads that a multiprocessor holds.
fn occupancy(threads: i32) -> Cu<i32> {
    if threads <= 0 {
        return Err(Code::INVALID_VALUE);
    }
    Ok(if threads > 1024 { 0 } else { (2048 / ((threads + 31) / 32 * 32)).min(32) })
}

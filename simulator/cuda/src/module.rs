//! Loading and unloading code, and the functions and global variables in it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;

use crate::codes::{Code, Cu};
use crate::context::overhead;
use crate::driver::Driver;
use crate::image::Image;
use crate::memory;
use crate::state::State;
use crate::state::memory::PAGE;
use crate::state::module::{Function, Module};

/// Loads an image into a context, or as a library.
pub(crate) fn load(driver: &Driver, state: &mut State, image: Image, context: u64) -> Cu<u64> {
    let listed: Vec<String> = image.listed().cloned().collect();
    let handle = state.handle();
    let module = Module { image, context, loaded: BTreeMap::new(), functions: BTreeMap::new() };
    state.modules.modules.insert(handle, module);
    for name in listed {
        function(state, handle, &name, context == 0)?;
    }
    if context != 0
        && driver.config.eager_modules
        && let Err(code) = ensure_loaded(driver, state, handle, context)
    {
        forget(state, handle);
        return Err(code);
    }
    Ok(handle)
}

/// Takes a module's memory in a context, if that has not happened yet.
pub(crate) fn ensure_loaded(driver: &Driver, state: &mut State, handle: u64, context: u64) -> Cu {
    let module = state.modules.get(handle)?;
    if module.loaded.contains_key(&context) {
        return Ok(());
    }
    let bytes = size(driver, module);
    let globals = module.image.globals.clone();
    overhead::grow(driver, state, context, bytes)?;
    let mut addresses = BTreeMap::new();
    for (name, bytes) in globals {
        addresses.insert(name, memory::allocate(driver, state, context, bytes, false)?);
    }
    if let Some(module) = state.modules.modules.get_mut(&handle) {
        module.loaded.insert(context, addresses);
    }
    Ok(())
}

fn size(driver: &Driver, module: &Module) -> u64 {
    module.image.bytes.max(driver.config.module_bytes).next_multiple_of(PAGE)
}

/// The function of that name.
pub(crate) fn function(state: &mut State, module: u64, name: &str, is_kernel: bool) -> Cu<u64> {
    let entry = state.modules.get(module)?;
    if let Some(known) = entry.functions.get(name) {
        return Ok(*known);
    }
    let figures = entry.image.figures_of(name).ok_or(Code::NOT_FOUND)?;
    let handle = state.handle();
    let function = Function {
        name: CString::new(name).map_err(|_| Code::NOT_FOUND)?,
        module,
        figures,
        is_kernel,
        attributes: BTreeMap::new(),
        block: [1; 3],
        parameters: Vec::new(),
    };
    state.modules.functions.insert(handle, function);
    if let Some(entry) = state.modules.modules.get_mut(&module) {
        entry.functions.insert(name.to_owned(), handle);
    }
    Ok(handle)
}

/// Address and size of a global variable in a context.
pub(crate) fn global(
    driver: &Driver,
    state: &mut State,
    module: u64,
    context: u64,
    name: &str,
) -> Cu<(u64, u64)> {
    let bytes = *state.modules.get(module)?.image.globals.get(name).ok_or(Code::NOT_FOUND)?;
    ensure_loaded(driver, state, module, context)?;
    let loaded = state.modules.get(module)?.loaded.get(&context);
    let address = loaded.and_then(|globals| globals.get(name)).ok_or(Code::NOT_FOUND)?;
    Ok((*address, bytes))
}

/// `cuModuleUnload` and `cuLibraryUnload`.
pub(crate) fn unload(driver: &Driver, state: &mut State, handle: u64) -> Cu {
    let module = state.modules.get(handle)?.clone();
    let bytes = size(driver, &module);
    forget(state, handle);
    for (context, globals) in module.loaded {
        if state.context(context).is_err() {
            continue;
        }
        for address in globals.into_values() {
            memory::free(driver, state, address)?;
        }
        overhead::shrink(driver, state, context, bytes);
    }
    Ok(())
}

fn forget(state: &mut State, handle: u64) {
    state.modules.modules.remove(&handle);
    state.modules.functions.retain(|_, f| f.module != handle);
}

/// Ends the modules of a context; libraries stay, without their part of it.
pub(crate) fn free_context(state: &mut State, context: u64) {
    let own: BTreeSet<u64> = state
        .modules
        .modules
        .iter()
        .filter(|(_, m)| m.context == context)
        .map(|(handle, _)| *handle)
        .collect();
    for handle in own {
        forget(state, handle);
    }
    for module in state.modules.modules.values_mut() {
        module.loaded.remove(&context);
    }
}

//! Launches: from a function and a grid to time on the GPU.

use crate::codes::{Code, Cu};
use crate::context::overhead;
use crate::driver::Driver;
use crate::module;
use crate::plan::WHOLE;
use crate::state::State;
use crate::state::work::{Launch, Work};

/// Threads of a block at the most.
const BLOCK_THREADS: u64 = 1024;
/// Threads that a multiprocessor holds at once.
const RESIDENT_THREADS: u64 = 2048;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: i32 = 8;
/// Dynamic shared memory that needs no leave.
const SHARED_BY_DEFAULT: u32 = 48 << 10;

/// Checks a launch and takes what it needs on the device; returns what it does there.
pub(crate) fn prepare(driver: &Driver, state: &mut State, context: u64, launch: &Launch) -> Cu<Work> {
    let function = state.modules.function(launch.function)?;
    let (figures, module) = (function.figures, function.module);
    let allowed =
        function.attributes.get(&MAX_DYNAMIC_SHARED).map_or(SHARED_BY_DEFAULT, |v| v.unsigned_abs());
    let of_context = state.modules.get(module)?.context;
    if of_context != 0 && of_context != context {
        return Err(Code::INVALID_HANDLE);
    }
    let product = |dims: [u32; 3]| dims.iter().map(|n| u64::from(*n)).try_fold(1_u64, u64::checked_mul);
    let (Some(blocks), Some(threads)) = (product(launch.grid), product(launch.block)) else {
        return Err(Code::INVALID_VALUE);
    };
    let [x, y, z] = launch.block;
    let too_long = launch.grid.iter().skip(1).any(|n| *n > 65535) || x > 1024 || y > 1024 || z > 64;
    if blocks == 0 || threads == 0 || threads > BLOCK_THREADS || too_long || launch.shared > allowed {
        return Err(Code::INVALID_VALUE);
    }
    module::ensure_loaded(driver, state, module, context)?;
    overhead::reserve_local(driver, state, context, figures.local)?;
    let device = state.context(context)?.device;
    let multiprocessors = driver.devices().get(device).map_or(1, |d| u64::from(d.multiprocessors.max(1)));

    let declared = match figures.param_unit_ns {
        Some(unit) => launch.parameter.saturating_mul(unit),
        None => figures.cost_ns.unwrap_or(driver.config.kernel_ns),
    };
    let cost = declared.saturating_add(figures.block_ns.saturating_mul(blocks));
    let by_grid = || {
        let wanted = blocks.saturating_mul(threads.next_multiple_of(32)).saturating_mul(u64::from(WHOLE));
        let share = wanted.div_ceil(multiprocessors * RESIDENT_THREADS).clamp(1, u64::from(WHOLE));
        u32::try_from(share).unwrap_or(WHOLE)
    };
    Ok(Work::Kernel {
        cost_ns: driver.config.scaled(cost),
        share: figures.share.unwrap_or_else(by_grid),
        fault: figures.fault,
    })
}

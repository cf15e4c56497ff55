//! Taking device memory for whatever needs it.

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::engine;
use crate::pool::reclaim;
use crate::state::State;

/// Takes device memory; where there is not enough, the process's own unused pool memory goes first.
pub(crate) fn charge(driver: &Driver, state: &mut State, device: usize, bytes: u64) -> Cu {
    match driver.charge(device, bytes) {
        Err(Code::OUT_OF_MEMORY) => {
            // Frees that streams have come to by now count.
            engine::advance(driver, state);
            if reclaim::trim_unused(driver, state, device) == 0 {
                return Err(Code::OUT_OF_MEMORY);
            }
            driver.charge(device, bytes)
        }
        other => other,
    }
}

//! Device memory that other processes may hold too: how many objects of this process do.

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::space;
use crate::state::State;
use crate::state::memory::Kind;

/// Counts one more object of this process that holds `id`.
pub(crate) fn hold(state: &mut State, id: u64) {
    *state.vmm.shared.entry(id).or_insert(0) += 1;
}

/// Stops holding `id` when no object of this process does any more.
pub(crate) fn release(driver: &Driver, state: &mut State, id: u64) {
    let left = state.vmm.shared.get(&id).copied().unwrap_or(1).saturating_sub(1);
    if left > 0 {
        state.vmm.shared.insert(id, left);
        return;
    }
    state.vmm.shared.remove(&id);
    if let Ok(node) = driver.node() {
        let _ = node.detach(id);
    }
}

/// Gives an imported range up.
pub(crate) fn forget(driver: &Driver, state: &mut State, base: u64) -> Cu {
    let range = state.memory.at(base).ok_or(Code::INVALID_VALUE)?;
    let Kind::Imported { shared } = range.kind else { return Err(Code::INVALID_VALUE) };
    let bytes = range.bytes;
    state.memory.remove(base);
    space::unmap(base, bytes);
    if shared != 0 {
        release(driver, state, shared);
    }
    Ok(())
}

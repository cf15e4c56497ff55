//! A context's place among those that share its device.

use std::collections::BTreeSet;

use aliquot_sim_node::compute::Slices;
use aliquot_sim_node::now_ns;

use super::drop_operations;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::plan::Plan;
use crate::state::State;
use crate::state::engine::Lane;
use crate::track::Track;

/// The same under the administrator's time-slice setting; what its steps are in milliseconds is assumed.
fn administered(driver: &Driver, device: usize) -> Slices {
    let usual = driver.config.slices();
    let gpu = driver.devices().get(device).map(|d| d.gpu.index);
    let setting = gpu.and_then(|gpu| driver.node().ok()?.settings(gpu).ok()).map_or(0, |s| s.timeslice);
    let slice_ns = match setting {
        1 => usual.slice_ns / 2,
        2 => usual.slice_ns * 2,
        3 => usual.slice_ns * 10,
        _ => usual.slice_ns,
    };
    Slices { slice_ns, ..usual }
}

/// Gives a context a place among those that share its device.
pub(crate) fn open_lane(driver: &Driver, state: &mut State, context: u64, device: usize) -> Cu {
    let key = driver.devices().get(device).ok_or(Code::INVALID_DEVICE)?.domain;
    let slices = administered(driver, device);
    let now = now_ns();
    let compute = driver.node()?.compute().map_err(|_| Code::UNKNOWN)?;
    let domain = compute.domain(key, slices, now).ok_or(Code::OUT_OF_MEMORY)?;
    compute.reap(domain, now);
    domain.advance(now);
    domain.set_slices(slices);
    let tenant = compute.enter(domain, 100).ok_or(Code::OUT_OF_MEMORY)?;
    let track = Track::new(domain.tenant(tenant), domain.advanced_ns());
    let settled = track.served();
    let lane =
        Lane { device, tenant, track, plan: Plan::default(), due: BTreeSet::new(), copiers: [0; 2], settled };
    state.engine.lanes.insert(context, lane);
    Ok(())
}

/// Takes the place away, with everything that is outstanding.
pub(crate) fn close_lane(driver: &Driver, state: &mut State, context: u64) {
    drop_operations(state, context);
    let Some(lane) = state.engine.lanes.remove(&context) else { return };
    let Some(key) = driver.devices().get(lane.device).map(|d| d.domain) else { return };
    if let Ok(compute) = driver.node().and_then(|n| n.compute().map_err(|_| Code::UNKNOWN)) {
        let now = now_ns();
        if let Some(domain) = compute.domain(key, driver.config.slices(), now) {
            domain.advance(now);
            if compute.is_mine(domain.tenant(lane.tenant)) {
                domain.leave(lane.tenant);
            }
        }
    }
}

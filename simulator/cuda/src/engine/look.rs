//! When it is worth looking again.

use aliquot_sim_node::now_ns;

use crate::driver::Driver;
use crate::state::State;
use crate::state::engine::Due;

/// Longest sleep of a waiter; guards against everything that cannot be foreseen.
const LONGEST_SLEEP_NS: u64 = 200_000_000;

/// When it is worth looking again for `target`, or for anything that happens unseen.
pub(crate) fn next_look(driver: &Driver, state: &State, target: Option<u64>) -> u64 {
    let now = now_ns();
    let latest = now + LONGEST_SLEEP_NS;
    let engine = &state.engine;
    // Words of the program's own memory change without a sign.
    let polling = if engine.told.is_empty() { latest } else { now + 50_000 };
    let foreseen = match target {
        Some(id) => foresee(driver, state, id),
        None => {
            let unseen = |id: &u64| {
                engine.operations.get(id).is_some_and(|o| o.work.is_noticed() || !o.dependents.is_empty())
            };
            let planned =
                engine.lanes.values().filter_map(|l| l.due.iter().map(|(_, id)| id).find(|id| unseen(id)));
            let timed = engine.on_wall.first().map(|(wall, _)| *wall);
            planned.filter_map(|id| foresee(driver, state, *id)).chain(timed).min()
        }
    };
    foreseen.unwrap_or(latest).min(polling).clamp(now, latest)
}

/// When an operation will be due, or the first thing that it waits for.
fn foresee(driver: &Driver, state: &State, id: u64) -> Option<u64> {
    let mut id = id;
    // Every step leads to an older operation.
    loop {
        let operation = state.engine.operations.get(&id)?;
        match operation.due {
            Due::Wall(at) => return Some(at),
            Due::Told => return None,
            Due::Served(point) => {
                let lane = state.engine.lanes.get(&operation.context)?;
                if let Some(wall) = lane.track.wall_at(point) {
                    return Some(wall);
                }
                let key = driver.devices().get(lane.device)?.domain;
                let compute = driver.node().ok()?.compute().ok()?;
                let domain = compute.domain(key, driver.config.slices(), now_ns())?;
                return domain.predict(lane.tenant, point, LONGEST_SLEEP_NS);
            }
            Due::Waiting => {
                id = operation
                    .after
                    .iter()
                    .copied()
                    .find(|before| state.engine.operations.contains_key(before))?;
            }
        }
    }
}

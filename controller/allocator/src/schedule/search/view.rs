//! The pools of a node from which a search may take devices.

use super::super::ask::{Ask, Count};
use super::super::reason::DeviceReason;
use super::solution::Failure;
use crate::snapshot::{Layout, Owner, Pool, PoolState, Snapshot};

/// A pool of the node from which devices can be allocated.
pub(super) struct View<'a> {
    pub(super) pool: &'a Pool,
    pub(super) layout: &'a Layout,
}

/// Returns the pools with devices of this owner, in the order of their names.
///
/// # Errors
/// The reason why there are none, or why those that there are do not tell enough.
pub(super) fn views<'a>(
    index: &Snapshot,
    mut pools: Vec<&'a Pool>,
    owner: Owner,
    asks: &[Ask<'_>],
) -> Result<Vec<View<'a>>, Failure> {
    // A pool that is being replaced or contradicts itself could have any devices, so `All` must not miss a
    // part of it. A request for a number of devices can be met from the other pools.
    let alternatives = asks.iter().flat_map(|ask| &ask.requests).flat_map(|request| &request.alternatives);
    let all = alternatives.into_iter().any(|alternative| alternative.count == Count::All);
    let mut views = Vec::new();
    let mut reason = None;
    pools.sort_by_key(|pool| index.name(pool.name));
    for pool in pools {
        match (&pool.state, &pool.layout) {
            (PoolState::Ready, Some(layout)) => {
                let owned = match owner {
                    Owner::Controller => layout.owners.controller,
                    Owner::HandOver => layout.owners.hand_over,
                    Owner::Scheduler => layout.owners.scheduler,
                };
                match (&pool.stopped, owned) {
                    (_, false) if layout.owners.hand_over => {
                        // Times are rounded up to minutes, so that nodes that are handed over at about the
                        // same time are reported together.
                        let until = pool.hand_over_until.map(|until| until.saturating_add(59) / 60 * 60);
                        reason = reason.or(Some(DeviceReason::HandOver(until)));
                    }
                    (_, false) => reason = reason.or(Some(DeviceReason::NotInControllerMode)),
                    (Some(why), true) => reason = reason.or_else(|| Some(DeviceReason::Stopped(why.clone()))),
                    (None, true) => views.push(View { pool, layout }),
                }
            }
            (PoolState::Incomplete { .. }, _) => {
                let why = DeviceReason::Updating(index.name(pool.name).to_owned());
                if all {
                    return Err(Failure::Devices(why));
                }
                reason = reason.or(Some(why));
            }
            (PoolState::Invalid(why), _) => {
                let why = DeviceReason::Invalid(why.to_string());
                if all {
                    return Err(Failure::Devices(why));
                }
                reason = reason.or(Some(why));
            }
            (PoolState::Absent, _) | (PoolState::Ready, None) => {}
        }
    }
    if views.is_empty() {
        return Err(Failure::Devices(reason.unwrap_or(DeviceReason::NotInControllerMode)));
    }
    Ok(views)
}

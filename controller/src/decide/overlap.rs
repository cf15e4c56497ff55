//! Devices that were given out twice: who gives way.
//!
//! The node's ledger lets only one of them prepare. A claim whose pod runs is prepared, so it
//! stays; among the others the younger allocation goes.

use crate::index::{Claim, Conflict, Index, Pool, Uid};
use std::collections::HashMap;

/// The claims of a pool that have to be taken back so that no device is given out twice.
pub fn losers(index: &Index, pool: &Pool, conflicts: &[Conflict]) -> Vec<Claim> {
    if conflicts.is_empty() {
        return Vec::new();
    }
    let by_uid: HashMap<&Uid, &Claim> = index.claims().map(|claim| (&claim.uid, claim)).collect();
    let mut involved: Vec<&Claim> = conflicts
        .iter()
        .flat_map(|conflict| conflict.claims.iter())
        .filter_map(|uid| by_uid.get(uid).copied())
        .collect();
    involved.sort_by_key(|claim| seniority(index, claim));
    involved.dedup_by_key(|claim| claim.uid.clone());
    let order: Vec<Uid> = involved.iter().map(|claim| claim.uid.clone()).collect();
    let losers = index.losers(pool, &order);
    involved.into_iter().filter(|claim| losers.contains(&claim.uid)).cloned().collect()
}

/// Smaller is more senior. An allocation without a time stamp is kube-scheduler's; its claim's age
/// has to do.
fn seniority(index: &Index, claim: &Claim) -> (bool, i64, Uid) {
    let running = index.pods_of_claim(&claim.key).any(|pod| pod.started && claim.is_reserved_for(pod));
    let since = index
        .effective_allocation(&claim.key)
        .and_then(|allocation| allocation.timestamp)
        .unwrap_or(claim.created);
    (!running, since, claim.uid.clone())
}

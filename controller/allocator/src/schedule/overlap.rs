//! Decides which claims give way when devices were given out twice.
//!
//! The node's ledger lets only one of the claims prepare. A claim whose pod runs is prepared, so it stays;
//! among the others the younger allocation gives way.

use crate::snapshot::{Claim, Conflict, Pool, Snapshot, Uid};
use std::collections::HashMap;

/// Returns the claims of a pool that have to be taken back so that no device is given out twice.
pub fn losers(index: &Snapshot, pool: &Pool, conflicts: &[Conflict]) -> Vec<Claim> {
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

/// Returns the sort key by seniority; smaller is more senior. An allocation without a timestamp is from
/// kube-scheduler; the age of its claim is used instead.
fn seniority(index: &Snapshot, claim: &Claim) -> (bool, i64, Uid) {
    let running = index.pods_of_claim(&claim.key).any(|pod| pod.started && claim.is_reserved_for(pod));
    let since = index
        .effective_allocation(&claim.key)
        .and_then(|allocation| allocation.timestamp)
        .unwrap_or(claim.created);
    (!running, since, claim.uid.clone())
}

//! Auditors that know only the record of writes.

use super::audits::evictions::{evictions, moves};
use super::audits::{gangs, lost_under_a_pod, shares};
use super::common::{Cluster, auditor};
use super::onlooker::Sights;
use super::{MOVES_PER_HOUR, accounts, tenants};
use aliquot_control_plane::AuditEntry;
use aliquot_model::names::HOLD_OF;
use serde_json::Value;
use std::collections::BTreeMap;

/// Looks at the record of all writes; `is_long` = long enough that everything happened in it.
pub fn judge(
    cluster: &Cluster,
    record: &[AuditEntry],
    budgets: &BTreeMap<String, f64>,
    sights: &Sights,
    is_long: bool,
) -> String {
    if let Ok(place) = std::env::var("ALIQUOT_CHAOS_SHOW") {
        show(record, &place);
    }
    let overlaps = auditor::overlaps(&cluster.handle);
    if !overlaps.is_empty() {
        show_leaders(record);
    }
    for overlap in overlaps.iter().take(3) {
        // Pool and device of the first of both.
        let words: Vec<&str> = overlap.split('"').collect();
        let gpu = words[7]
            .rsplit_once("-mig")
            .or_else(|| words[7].rsplit_once("-share"))
            .map_or(words[7], |(gpu, _)| gpu);
        eprintln!("{overlap}; every write of {}/{gpu}:", words[5]);
        show(record, &format!("{}/{gpu}", words[5]));
    }
    assert_eq!(overlaps, Vec::<String>::new(), "claims that had the same hardware at a time");
    let lost = lost_under_a_pod(record);
    assert_eq!(lost, Vec::<String>::new(), "claims that lost devices under a running pod");
    let (evictions, unexplained) = evictions(record);
    assert_eq!(unexplained, Vec::<String>::new(), "evictions without a reason on record");
    let (moves, most) = moves(record);
    assert!(most <= MOVES_PER_HOUR, "{most} pods were moved to fill gaps within an hour");
    let (grown, beyond) = shares::judge(record);
    assert_eq!(beyond, Vec::<String>::new(), "limits beyond what is reserved");
    let (begun, torn) = gangs::judge(record);
    assert_eq!(torn, Vec::<String>::new(), "gangs that began without all of their devices");
    let holds = record
        .iter()
        .filter(|e| e.before.is_none())
        .filter(|e| e.after.as_ref().is_some_and(|o| !o["metadata"]["annotations"][HOLD_OF].is_null()))
        .count();
    let generous: Vec<String> = tenants::generous().collect();
    accounts::judge(record, budgets, sights, &generous);
    let bound = record.iter().filter(|e| e.origin.subresource == "binding").count();
    let seen = [bound, evictions, holds, grown, begun];
    assert!(!is_long || seen.iter().all(|count| *count > 0), "{seen:?}");
    format!(
        "{bound} pods bound, {evictions} evicted, {moves} of them to fill gaps, {holds} hold claims, {grown} companions, \
         {begun} gangs"
    )
}

/// When which controller led.
fn show_leaders(record: &[AuditEntry]) {
    let mut last = String::new();
    for entry in record.iter().filter(|entry| entry.origin.resource == "leases") {
        let holder = entry.after.as_ref().map(|lease| lease["spec"]["holderIdentity"].to_string());
        let holder = holder.unwrap_or_default();
        if holder != last {
            eprintln!("{} {} the lease has {holder}", entry.time, entry.revision);
        }
        last = holder;
    }
}

/// Every write of a claim with a device whose pool and name contain this text.
fn show(record: &[AuditEntry], place: &str) {
    for entry in record.iter().filter(|entry| entry.origin.resource == "resourceclaims") {
        let held = |claim: Option<&std::sync::Arc<Value>>| -> Vec<String> {
            let results =
                claim.map(|c| c["status"]["allocation"]["devices"]["results"].clone()).unwrap_or_default();
            let results = results.as_array().cloned().unwrap_or_default();
            results
                .iter()
                .map(|r| format!("{}/{}", r["pool"].as_str().unwrap(), r["device"].as_str().unwrap()))
                .collect()
        };
        let (before, after) = (held(entry.before.as_ref()), held(entry.after.as_ref()));
        if before.iter().chain(&after).any(|device| device.contains(place)) {
            eprintln!(
                "{} {} {} {}/{} {} {} {before:?} -> {after:?} {:?}",
                entry.time,
                entry.revision,
                entry.origin.user,
                entry.namespace,
                entry.name,
                entry.origin.verb,
                entry.origin.subresource,
                entry.after.as_ref().map(|c| c["status"]["reservedFor"].to_string())
            );
        }
    }
}

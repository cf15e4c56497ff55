//! Auditors that know only the record of writes.

use super::common::{Cluster, auditor};
use super::{elastic, gangs};
use aliquot_control_plane::AuditEntry;
use aliquot_model::Quantity;
use aliquot_model::names::{COMPANION_OF, HOLD_OF};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// What a result is of a GPU, told from the device's name and what of it is consumed.
fn part(result: &Value) -> f64 {
    let device = result["device"].as_str().expect("a device");
    if device.ends_with("-share") {
        let (memory, cores) = consumed(result);
        return (memory as f64 / elastic::MEMORY as f64).max(cores as f64 / 100.0);
    }
    let partitions =
        [("-mig-1g10gb", 0.125), ("-mig-1g20gb", 0.25), ("-mig-2g20gb", 0.25), ("-mig-3g40gb", 0.5)];
    partitions.iter().find(|(name, _)| device.contains(name)).map_or(1.0, |(_, part)| *part)
}

/// Bytes of memory and percent of compute that a share takes.
pub fn consumed(result: &Value) -> (u64, u64) {
    let of = |name: &str| {
        let amount = result["consumedCapacity"][name].as_str().unwrap_or("0");
        amount.parse::<Quantity>().expect("a quantity").to_u64().expect("a whole number")
    };
    (of("memory"), of("cores"))
}

/// What a claim was given.
pub fn results(claim: &Value) -> &[Value] {
    claim["status"]["allocation"]["devices"]["results"].as_array().map_or(&[], Vec::as_slice)
}

fn devices(claim: &Value) -> Vec<&str> {
    results(claim).iter().map(|result| result["device"].as_str().expect("a device")).collect()
}

/// Looks at the record of all writes.
pub fn judge(
    cluster: &Cluster,
    record: &[AuditEntry],
    kills: &[Timestamp],
    budgets: &BTreeMap<String, f64>,
) -> String {
    if let Ok(place) = std::env::var("ALIQUOT_CHAOS_SHOW") {
        show(record, &place);
    }
    auditor::check(&cluster.handle);
    let lost = lost_under_a_pod(record);
    assert_eq!(lost, Vec::<String>::new(), "claims that lost devices under a running pod");
    let (evictions, unexplained) = evictions(record, kills);
    assert_eq!(unexplained, Vec::<String>::new(), "evictions without a reason on record");
    let (grown, beyond) = elastic::judge(record);
    assert_eq!(beyond, Vec::<String>::new(), "limits beyond what is reserved");
    let (begun, torn) = gangs::judge(record);
    assert_eq!(torn, Vec::<String>::new(), "gangs that began without all of their devices");
    let holds = record
        .iter()
        .filter(|e| e.before.is_none())
        .filter(|e| e.after.as_ref().is_some_and(|o| !o["metadata"]["annotations"][HOLD_OF].is_null()))
        .count();
    let mut worst: f64 = 0.0;
    for (namespace, (exact, allowed)) in accounts(record, kills) {
        let counted = budgets.get(&namespace).copied().unwrap_or_default() * 3600.0;
        // Three decimals of an hour are shown.
        let allowed = allowed + 3.6;
        worst = worst.max((counted - exact).abs() / allowed);
        assert!(
            (counted - exact).abs() <= allowed,
            "{namespace}: the budget counted {counted:.1} GPU-seconds, the accountant {exact:.1} (±{allowed:.1})"
        );
    }
    let bound = record.iter().filter(|e| e.origin.subresource == "binding").count();
    let seen = [bound, evictions, holds, grown, begun];
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
    format!(
        "{bound} pods bound, {evictions} evicted, {holds} hold claims, {grown} companions, {begun} gangs, budgets within {:.0} % of their bound",
        worst * 100.0
    )
}

/// Claims whose allocation was taken while a pod that they were reserved for ran.
fn lost_under_a_pod(record: &[AuditEntry]) -> Vec<String> {
    let mut running: BTreeSet<String> = BTreeSet::new();
    let mut found = Vec::new();
    for entry in record {
        match entry.origin.resource.as_str() {
            "pods" => {
                let of = |pod: &Value| pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
                match &entry.after {
                    Some(pod)
                        if pod["status"]["phase"] == "Running"
                            && pod["metadata"]["deletionTimestamp"].is_null() =>
                    {
                        running.insert(of(pod));
                    }
                    Some(pod) => drop(running.remove(&of(pod))),
                    None => drop(entry.before.as_ref().map(|pod| running.remove(&of(pod)))),
                }
            }
            "resourceclaims" => {
                let Some(before) = &entry.before else { continue };
                let after = entry.after.as_ref().map(|claim| devices(claim)).unwrap_or_default();
                if devices(before).is_empty() || after == devices(before) {
                    continue;
                }
                let users = before["status"]["reservedFor"].as_array().cloned().unwrap_or_default();
                let used = users.iter().any(|u| running.contains(u["uid"].as_str().unwrap_or_default()));
                // A companion goes when its share shrinks, which its own auditor looks at.
                let companion = !before["metadata"]["annotations"][COMPANION_OF].is_null();
                if used && !companion {
                    found.push(format!("{}/{} by {}", entry.namespace, entry.name, entry.origin.user));
                }
            }
            _ => {}
        }
    }
    found
}

/// How many pods were evicted, and those for which no event says why.
fn evictions(record: &[AuditEntry], kills: &[Timestamp]) -> (usize, Vec<String>) {
    const REASONS: [&str; 3] = ["Preempted", "MovedToFillGaps", "GoingBackToAskedProfile"];
    let told: BTreeSet<(String, String)> = record
        .iter()
        .filter(|entry| entry.origin.resource == "events")
        .filter_map(|entry| entry.after.as_ref())
        .filter(|event| REASONS.iter().any(|reason| event["reason"] == *reason))
        .map(|event| {
            let text = |field: &str| event["involvedObject"][field].as_str().unwrap_or_default().to_owned();
            (text("namespace"), text("name"))
        })
        .collect();
    let evicted: BTreeMap<(String, String), Timestamp> = record
        .iter()
        .filter(|entry| entry.origin.subresource == "eviction")
        .map(|entry| ((entry.namespace.clone(), entry.name.clone()), entry.time))
        .collect();
    let killed_then =
        |at: &Timestamp| kills.iter().any(|kill| (kill.as_millisecond() - at.as_millisecond()).abs() < 1_500);
    let unexplained = evicted
        .iter()
        .filter(|(pod, at)| !told.contains(pod) && !killed_then(at))
        .map(|((namespace, name), at)| {
            let about = |event: &&AuditEntry| {
                event.origin.resource == "events"
                    && event.after.as_ref().is_some_and(|e| {
                        e["involvedObject"]["name"] == **name
                            && e["involvedObject"]["namespace"] == **namespace
                    })
            };
            let said = record.iter().filter(about).filter_map(|event| {
                Some(format!(
                    "{} {}: {}",
                    event.time,
                    event.after.as_ref()?["reason"],
                    event.after.as_ref()?["note"]
                ))
            });
            let who = record
                .iter()
                .rev()
                .find(|e| e.origin.subresource == "eviction" && e.name == *name && e.namespace == *namespace);
            let who = who.map(|e| e.origin.user.clone()).unwrap_or_default();
            format!("{namespace}/{name} at {at} by {who}, told {:?}", said.collect::<Vec<_>>())
        })
        .collect();
    (evicted.len(), unexplained)
}

/// GPU-seconds of each tenant and how far a budget may be off: what the record of allocations says, and the
/// stated error, which is some seconds a claim, and an outage (with the 15 s since the last stored moment) for
/// claims that ended in one.
fn accounts(record: &[AuditEntry], kills: &[Timestamp]) -> BTreeMap<String, (f64, f64)> {
    let mut accounts: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    let mut open: BTreeMap<String, (String, f64, f64)> = BTreeMap::new();
    let seconds = |time: &Timestamp| time.as_millisecond() as f64 / 1000.0;
    for entry in record.iter().filter(|entry| entry.origin.resource == "resourceclaims") {
        let now = seconds(&entry.time);
        let object = entry.after.as_ref().or(entry.before.as_ref()).unwrap();
        let uid = object["metadata"]["uid"].as_str().unwrap().to_owned();
        let held = entry.after.as_ref().map(|claim| results(claim)).unwrap_or_default();
        let share: f64 = held.iter().map(part).sum();
        if let Some((namespace, since, share)) = open.remove(&uid) {
            let account = accounts.entry(namespace).or_default();
            account.0 += (now - since) * share;
            account.1 += 2.0 * share;
            let outage = kills.iter().any(|kill| (0.0..8.0).contains(&(now - seconds(kill))));
            account.1 += if outage { share * (15.0 + 8.0) } else { 0.0 };
        }
        if !held.is_empty() {
            open.insert(uid, (entry.namespace.clone(), now, share));
        }
    }
    accounts
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

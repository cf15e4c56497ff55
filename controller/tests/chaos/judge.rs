//! Auditors that know only the record of writes.

use super::common::{Cluster, auditor};
use super::onlooker::Sights;
use super::{MOVES_PER_HOUR, accounts, elastic, gangs, tenants};
use aliquot_control_plane::AuditEntry;
use aliquot_model::Quantity;
use aliquot_model::names::{COMPANION_OF, HOLD_OF};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

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
    let (grown, beyond) = elastic::judge(record);
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

/// Why a pod may be evicted.
const REASONS: [&str; 3] = ["Preempted", "MovedToFillGaps", "GoingBackToAskedProfile"];

/// What it is told if it stays all the same.
const STAYS: &str = "EvictionCalledOff";

/// How many pods were evicted, and those for which no event of before says why: about this very pod, as another
/// one of its name may have been told something else.
fn evictions(record: &[AuditEntry]) -> (usize, Vec<String>) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    // What each pod was told so far: when, and why.
    let mut told: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut evicted = 0;
    let mut unexplained = Vec::new();
    for entry in record {
        let origin = &entry.origin;
        if let ("events", Some(event)) = (origin.resource.as_str(), &entry.after) {
            told.entry(text(&event["involvedObject"]["uid"])).or_default().push(text(&event["reason"]));
        }
        if origin.subresource != "eviction" {
            continue;
        }
        evicted += 1;
        let pod = entry.before.as_ref().or(entry.after.as_ref()).expect("a pod");
        let said = told.get(&text(&pod["metadata"]["uid"])).map(Vec::as_slice).unwrap_or_default();
        let about = |reason: &&String| **reason == STAYS || REASONS.contains(&reason.as_str());
        if said.iter().rev().find(about).is_none_or(|last| last == STAYS) {
            unexplained.push(format!(
                "{}/{} at {} by {}, told {said:?}",
                entry.namespace, entry.name, entry.time, origin.user
            ));
        }
    }
    (evicted, unexplained)
}

/// How many pods were moved to fill gaps, and how many of them within any hour. A move is written down before the pod
/// goes, with whatever that takes in between.
fn moves(record: &[AuditEntry]) -> (usize, usize) {
    const HOUR: i64 = 3600 - 120;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut told: BTreeMap<String, String> = BTreeMap::new();
    let mut times = Vec::new();
    for entry in record {
        let origin = &entry.origin;
        if let ("events", Some(event)) = (origin.resource.as_str(), &entry.after) {
            let reason = text(&event["reason"]);
            if REASONS.contains(&reason.as_str()) {
                told.insert(text(&event["involvedObject"]["uid"]), reason);
            }
        }
        let pod = entry.before.as_ref().or(entry.after.as_ref());
        if let ("eviction", Some(pod)) = (origin.subresource.as_str(), pod)
            && told.get(&text(&pod["metadata"]["uid"])).is_some_and(|reason| reason == "MovedToFillGaps")
        {
            times.push(entry.time.as_second());
        }
    }
    let within = |from: &i64| times.iter().filter(|at| (*from..*from + HOUR).contains(*at)).count();
    (times.len(), times.iter().map(within).max().unwrap_or_default())
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

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_control_plane::{ChangeKind, Origin};
    use serde_json::json;
    use std::sync::Arc;

    fn write(resource: &str, subresource: &str, object: Value) -> AuditEntry {
        let origin = Origin {
            resource: resource.to_owned(),
            subresource: subresource.to_owned(),
            ..Origin::default()
        };
        AuditEntry {
            revision: 0,
            time: k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
            origin,
            change: ChangeKind::Deleted,
            namespace: "t".to_owned(),
            name: "p".to_owned(),
            before: Some(Arc::new(object.clone())),
            after: Some(Arc::new(object)),
        }
    }

    fn told(uid: &str, reason: &str) -> AuditEntry {
        write("events", "", json!({"involvedObject": {"name": "p", "uid": uid}, "reason": reason}))
    }

    fn evicted(uid: &str) -> AuditEntry {
        write("pods", "eviction", json!({"metadata": {"name": "p", "uid": uid}}))
    }

    #[test]
    fn moves_of_an_hour_are_counted_and_other_evictions_are_not() {
        let at = |second: i64, entry: AuditEntry| AuditEntry {
            time: k8s_openapi::jiff::Timestamp::from_second(second).expect("a time"),
            ..entry
        };
        let one = |uid: &str, second: i64, reason: &str| [told(uid, reason), at(second, evicted(uid))];
        let record = [
            one("a", 0, "MovedToFillGaps"),
            one("b", 100, "Preempted"),
            one("c", 200, "MovedToFillGaps"),
            one("d", 3_600, "MovedToFillGaps"),
        ];
        assert_eq!(moves(&record.concat()), (3, 2));
    }

    #[test]
    fn an_eviction_needs_a_reason_that_this_very_pod_was_told_before() {
        let explained = |record: &[AuditEntry]| evictions(record).1.is_empty();
        assert!(explained(&[told("a", "Preempted"), evicted("a")]));
        assert!(!explained(&[evicted("a"), told("a", "Preempted")]));
        assert!(!explained(&[told("b", "Preempted"), evicted("a")]));
        assert!(!explained(&[told("a", "Allocated"), evicted("a")]));
        let called_off = [told("a", "Preempted"), told("a", STAYS)];
        assert!(!explained(&[&called_off[..], &[evicted("a")]].concat()));
        assert!(explained(&[&called_off[..], &[told("a", "Preempted"), evicted("a")]].concat()));
        assert!(!explained(&[told("a", "Preempted"), evicted("a"), evicted("b")]));
    }
}

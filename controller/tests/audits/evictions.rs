//! Pods that were evicted: why, and how many of them to fill gaps.

use aliquot_control_plane::AuditEntry;
use serde_json::Value;
use std::collections::BTreeMap;

/// Why a pod may be evicted.
const REASONS: [&str; 3] = ["Preempted", "MovedToFillGaps", "GoingBackToAskedProfile"];

/// What it is told if it stays all the same.
const STAYS: &str = "EvictionCalledOff";

/// How many pods were evicted, and those for which no event of before says why: about this very pod, as another
/// one of its name may have been told something else.
pub fn evictions(record: &[AuditEntry]) -> (usize, Vec<String>) {
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
pub fn moves(record: &[AuditEntry]) -> (usize, usize) {
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

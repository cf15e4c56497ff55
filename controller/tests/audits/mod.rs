//! Auditors that know only the record of writes, for every test program that breaks things.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    reason = "test code"
)]

pub mod evictions;
pub mod gangs;
pub mod shares;

use aliquot_control_plane::AuditEntry;
use aliquot_model::Quantity;
use aliquot_model::names::COMPANION_OF;
use serde_json::Value;
use std::collections::BTreeSet;

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

/// Claims whose allocation was taken while a pod that they were reserved for ran.
pub fn lost_under_a_pod(record: &[AuditEntry]) -> Vec<String> {
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

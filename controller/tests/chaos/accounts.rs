//! The independent accountant: what each tenant used, told from the record of allocations alone, how far a
//! budget may be off by its stated error and by what an onlooker saw late (docs/design/budgets.md), and whether it is not.

use super::audits::shares::MEMORY;
use super::audits::{consumed, results};
use super::onlooker::{Sights, lag};
use aliquot_api::v1alpha1::NodeUsageSpec;
use aliquot_control_plane::AuditEntry;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use std::collections::BTreeMap;

/// "Seconds a claim": its end is rounded down, and claims are looked at once a second.
const CLAIM: f64 = 2.0;
/// Accounts are stored at least so often.
const HEARTBEAT: f64 = 15.0;
/// Whoever leads renews the lease many times in so many seconds.
const RENEWED: f64 = 1.0;
/// GPU-seconds: a budget shows three decimals of an hour.
const SHOWN: f64 = 3.6;

/// GPU-seconds of one tenant.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Account {
    /// What was used.
    pub exact: f64,
    /// How far a budget may be off.
    pub allowed: f64,
}

impl Account {
    /// Whether a budget that counted this is within its stated error.
    pub fn admits(&self, counted: f64) -> bool {
        (counted - self.exact).abs() <= self.allowed + SHOWN
    }
}

/// What a result is of a GPU, told from the device's name and what of it is consumed.
fn part(result: &Value) -> f64 {
    let device = result["device"].as_str().expect("a device");
    if device.ends_with("-share") {
        let (memory, cores) = consumed(result);
        return (memory as f64 / MEMORY as f64).max(cores as f64 / 100.0);
    }
    let partitions = [
        ("-mig-1g10gb", 0.125),
        ("-mig-1g20gb", 0.25),
        ("-mig-2g20gb", 0.25),
        ("-mig-3g40gb", 0.5),
        ("-mig-4g40gb", 0.5),
    ];
    partitions.iter().find(|(name, _)| device.contains(name)).map_or(1.0, |(_, part)| *part)
}

fn seconds(time: &Timestamp) -> f64 {
    time.as_millisecond() as f64 / 1000.0
}

/// When the account of each budget was stored.
fn stores(record: &[AuditEntry]) -> BTreeMap<&str, Vec<f64>> {
    let mut stores: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for entry in record.iter().filter(|entry| entry.origin.resource == "gpubudgets") {
        if entry.origin.subresource == "status" {
            stores.entry(&entry.namespace).or_default().push(seconds(&entry.time));
        }
    }
    stores
}

/// When nodes say that they gave claims back, by claim and by when it had been allocated.
fn releases(record: &[AuditEntry]) -> BTreeMap<(String, i64), f64> {
    let mut releases: BTreeMap<(String, i64), f64> = BTreeMap::new();
    let said = record.iter().filter(|entry| entry.origin.resource == "nodeusages");
    let said = said.filter_map(|entry| entry.after.as_ref());
    for spec in said.filter_map(|usage| serde_json::from_value::<NodeUsageSpec>(usage["spec"].clone()).ok()) {
        for release in spec.released {
            let until = releases.entry((release.claim.uid, release.claim.since)).or_default();
            *until = until.max(release.until as f64);
        }
    }
    releases
}

/// When nobody led any more, or hardly: moments after which the lease was not renewed for a while.
fn outages(record: &[AuditEntry]) -> Vec<f64> {
    let renewed = record.iter().filter(|entry| entry.origin.resource == "leases");
    let renewed: Vec<f64> = renewed.map(|entry| seconds(&entry.time)).collect();
    renewed.windows(2).filter(|pair| pair[1] - pair[0] > RENEWED).map(|pair| pair[0]).collect()
}

/// A claim's devices, from the write that gave them to the one that took them.
struct Use {
    namespace: String,
    devices: Vec<(String, String)>,
    since: i64,
    part: f64,
}

/// From when a claim is charged: its `allocationTimestamp`, which must make sense.
fn charged_since(claim: &Value, now: f64) -> i64 {
    let time =
        |value: &Value| value.as_str().map(|text| text.parse::<Timestamp>().expect("a time").as_second());
    let since = time(&claim["status"]["allocation"]["allocationTimestamp"]).expect("when it was allocated");
    let made = time(&claim["metadata"]["creationTimestamp"]).expect("when it was made");
    assert!(made <= since && since as f64 <= now, "allocated at {since}, written at {now}: {claim}");
    since
}

/// What of the time before this end is charged to nobody: what lies after the last stored moment, if there was
/// an outage before anything was stored again, and at most a heartbeat and the outage.
fn unseen(stores: &[f64], outages: &[f64], end: f64) -> f64 {
    let after = stores.partition_point(|at| *at <= end);
    let (Some(next), Some(last)) = (stores.get(after), stores[..after].last()) else { return 0.0 };
    let outage = outages.iter().find(|outage| (*last..*next).contains(outage));
    outage.map_or(0.0, |outage| (end - last).min(HEARTBEAT + (end - outage).max(0.0)))
}

/// What each tenant used. Each claim is allowed its seconds once, and those that ended when no controller
/// looked what was seen by none, unless their node said when they ended.
pub fn accounts(record: &[AuditEntry], sights: &Sights) -> BTreeMap<String, Account> {
    let (stores, releases, outages) = (stores(record), releases(record), outages(record));
    let mut accounts: BTreeMap<String, Account> = BTreeMap::new();
    let mut open: BTreeMap<String, Use> = BTreeMap::new();
    // The largest part for which a claim was allowed its seconds.
    let mut allowed: BTreeMap<String, f64> = BTreeMap::new();
    for entry in record.iter().filter(|entry| entry.origin.resource == "resourceclaims") {
        let now = seconds(&entry.time);
        let object = entry.after.as_ref().or(entry.before.as_ref()).unwrap();
        let uid = object["metadata"]["uid"].as_str().unwrap().to_owned();
        let held = entry.after.as_ref().map(|claim| results(claim)).unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let devices: Vec<_> = held.iter().map(|r| (text(&r["pool"]), text(&r["device"]))).collect();
        let part: f64 = held.iter().map(part).sum();
        if open.get(&uid).is_some_and(|found| found.devices == devices && found.part == part) {
            continue;
        }
        if let Some(ended) = open.remove(&uid) {
            let account = accounts.entry(ended.namespace.clone()).or_default();
            let released = releases.get(&(uid.clone(), ended.since)).copied();
            // Its node may have it for a moment longer than the API says.
            account.exact += (now.max(released.unwrap_or(now)) - ended.since as f64) * ended.part;
            let before = allowed.entry(uid.clone()).or_default();
            account.allowed += CLAIM * (ended.part - *before).max(0.0);
            *before = before.max(ended.part);
            // Nobody can stop to charge before it sees the end.
            account.allowed += ended.part * lag(sights, entry.revision, now);
            // What a node says is in whole seconds. A claim that is kept without a pod is released before it
            // ends.
            let stores = stores.get(ended.namespace.as_str()).map(Vec::as_slice).unwrap_or_default();
            // Its node's word counts if a controller saw it there, and stored that.
            let is_known = stores.iter().any(|at| (ended.since as f64..now).contains(at));
            let told = released.filter(|_| is_known);
            if told.is_none_or(|told| told < now - CLAIM) {
                let told = told.unwrap_or(ended.since as f64);
                account.allowed += ended.part * unseen(stores, &outages, now).min(now - told);
            }
        }
        if !devices.is_empty() {
            let since = charged_since(object, now);
            open.insert(uid, Use { namespace: entry.namespace.clone(), devices, since, part });
        }
    }
    accounts
}

/// What was stored of each claim's last use in its budget, beside what the record of allocations says, where
/// they differ by more than the seconds that a claim is allowed.
fn explain(record: &[AuditEntry], sights: &Sights, namespace: &str) {
    /// When a claim was allocated and when not, and what the last stored account said of it.
    #[derive(Default)]
    struct Seen {
        ends: Vec<f64>,
        /// How late its last write was seen by the onlooker.
        late: f64,
        last: Option<(f64, String)>,
    }
    let mut uses: BTreeMap<&str, Seen> = BTreeMap::new();
    for entry in record.iter().filter(|entry| entry.namespace == namespace) {
        match (entry.origin.resource.as_str(), &entry.after) {
            ("resourceclaims", after) => {
                let object = after.as_ref().or(entry.before.as_ref()).unwrap();
                let seen = uses.entry(object["metadata"]["uid"].as_str().unwrap()).or_default();
                let held = after.as_ref().is_some_and(|claim| !results(claim).is_empty());
                if held == seen.ends.len().is_multiple_of(2) {
                    seen.ends.push(seconds(&entry.time));
                    seen.late = lag(sights, entry.revision, seconds(&entry.time));
                }
            }
            ("gpubudgets", Some(budget)) => {
                let known = budget["status"]["account"]["claims"].as_str().unwrap_or_default();
                for known in known.split_whitespace() {
                    let fields: Vec<&str> = known.split(':').collect();
                    let seen = uses.entry(fields[0]).or_default();
                    let end = fields[2..5].iter().filter_map(|time| time.parse::<i64>().ok()).max().unwrap();
                    seen.last = Some((end as f64, format!("at {}: {known}", seconds(&entry.time))));
                }
            }
            _ => {}
        }
    }
    for (uid, Seen { ends, late, last }) in uses {
        let off = match (&last, ends.last()) {
            (Some((end, _)), Some(ended)) => end - ended,
            (None, Some(_)) => f64::NAN,
            _ => continue,
        };
        if off.abs() <= CLAIM {
            continue;
        }
        eprintln!(
            "{namespace} {uid}: allocated {ends:?}, {off:.1} s off, seen after {late:.1} s, last stored {last:?}"
        );
    }
}

/// Compares budgets with what was used. `generous` are tenants whose budgets are never used up: for them the
/// comparison must be able to fail.
pub fn judge(record: &[AuditEntry], counted: &BTreeMap<String, f64>, sights: &Sights, generous: &[String]) {
    let mut wrong = Vec::new();
    let accounts = accounts(record, sights);
    let late = record.iter().filter(|entry| entry.origin.resource == "resourceclaims");
    let late = late.map(|entry| lag(sights, entry.revision, seconds(&entry.time))).fold(0.0, f64::max);
    eprintln!("an onlooker saw claims' writes {late:.1} s late at the most");
    for (namespace, account) in &accounts {
        let Account { exact, allowed } = account;
        let counted = counted.get(namespace).copied().unwrap_or_default();
        eprintln!(
            "{namespace}: the budget counted {counted:.1} GPU-seconds, the accountant {exact:.1} (±{allowed:.1})"
        );
        if !account.admits(counted) {
            explain(record, sights, namespace);
            wrong.push(namespace);
        }
    }
    if !wrong.is_empty() {
        eprintln!("stored {:?}, outages {:?}", stores(record), outages(record));
    }
    assert!(wrong.is_empty(), "budgets beyond their stated error: {wrong:?}");
    let mut all = Account::default();
    for account in generous.iter().map(|namespace| accounts.get(namespace).copied().unwrap_or_default()) {
        all.exact += account.exact;
        all.allowed += account.allowed;
    }
    let Account { exact, allowed } = all;
    assert!(allowed < exact / 4.0, "this run proves little: ±{allowed:.1} of {exact:.1} GPU-seconds");
    assert!(
        !all.admits(0.0) && !all.admits(2.0 * exact),
        "a budget that counts nothing, or twice, would pass"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_control_plane::{ChangeKind, Origin};
    use serde_json::json;
    use std::sync::Arc;

    fn write(second: i64, resource: &str, namespace: &str, after: Value) -> AuditEntry {
        let subresource = if resource == "gpubudgets" { "status" } else { "" };
        AuditEntry {
            revision: u64::try_from(second).unwrap(),
            time: Timestamp::from_second(second).unwrap(),
            origin: Origin {
                resource: resource.to_owned(),
                subresource: subresource.to_owned(),
                ..Origin::default()
            },
            change: ChangeKind::Modified,
            namespace: namespace.to_owned(),
            name: String::new(),
            before: None,
            after: Some(Arc::new(after)),
        }
    }

    fn claim(second: i64, uid: &str, device: Option<&str>, note: &str) -> AuditEntry {
        let results: Vec<Value> = device.iter().map(|d| json!({"pool": "p", "device": d})).collect();
        let since = Timestamp::from_second(100).unwrap();
        let allocation = json!({"devices": {"results": results}, "allocationTimestamp": since});
        let status = json!({"allocation": allocation, "note": note});
        let object = json!({"metadata": {"uid": uid, "creationTimestamp": since}, "status": status});
        write(second, "resourceclaims", "t", object)
    }

    fn stored(second: i64) -> AuditEntry {
        write(second, "gpubudgets", "t", json!({}))
    }

    fn renewed(second: i64) -> AuditEntry {
        write(second, "leases", "", json!({}))
    }

    #[test]
    fn a_claim_is_allowed_its_seconds_once_however_often_it_is_written() {
        let mut record = vec![claim(100, "a", Some("gpu-0"), "")];
        record.extend((101..130).map(|second| claim(second, "a", Some("gpu-0"), &second.to_string())));
        record.push(claim(130, "a", None, ""));
        let account = accounts(&record, &Sights::new())["t"];
        assert_eq!(account, Account { exact: 30.0, allowed: CLAIM });
        assert!(account.admits(30.0) && account.admits(35.0) && account.admits(25.0));
        assert!(!account.admits(0.0) && !account.admits(60.0));
    }

    #[test]
    fn what_began_and_ended_in_an_outage_is_allowed_whatever_its_node_says() {
        let usage = json!({"spec": {"ledger": "l", "held": [], "released": [{
            "number": 1, "namespace": "t", "name": "a", "uid": "a", "microGpus": 1_000_000, "since": 100, "until": 110,
        }]}});
        for (seen, allowed) in [(false, CLAIM + 10.0), (true, CLAIM)] {
            let mut record = vec![
                stored(90),
                renewed(90),
                claim(100, "a", Some("gpu-0"), ""),
                claim(110, "a", None, ""),
                write(111, "nodeusages", "", usage.clone()),
                renewed(120),
                stored(121),
            ];
            record.extend(seen.then(|| stored(105)));
            record.sort_by_key(|entry| entry.time);
            let account = accounts(&record, &Sights::new())["t"];
            assert_eq!(account, Account { exact: 10.0, allowed }, "seen: {seen}");
        }
    }

    #[test]
    fn only_what_ends_in_an_outage_and_without_a_word_of_its_node_is_allowed_more() {
        let half = "gpu-0-mig-3g40gb-9-0";
        let usage = json!({"spec": {"ledger": "l", "held": [], "released": [{
            "number": 1, "namespace": "t", "name": "b", "uid": "b", "microGpus": 500_000, "since": 100, "until": 151,
        }]}});
        let mut record: Vec<AuditEntry> =
            ["a", "b", "c", "d"].iter().map(|uid| claim(100, uid, Some(half), "")).collect();
        record.push(stored(101));
        record.extend((101..=145).map(renewed));
        record.extend([
            claim(139, "c", None, ""),
            // This one has seen the end of that.
            stored(140),
            claim(150, "a", None, ""),
            claim(150, "b", None, ""),
            write(151, "nodeusages", "", usage),
        ]);
        record.extend((153..=161).map(renewed));
        record.extend([stored(154), stored(155), claim(160, "d", None, ""), stored(161)]);
        record.sort_by_key(|entry| entry.time);
        let account = accounts(&record, &Sights::new())["t"];
        assert_eq!(account.exact, (50.0 + 51.0 + 39.0 + 60.0) / 2.0);
        assert_eq!(account.allowed, (4.0 * CLAIM + 10.0) / 2.0);
        // The stored moment is at most a heartbeat before the outage.
        record.retain(|entry| entry.origin.resource != "gpubudgets" || entry.revision != 140);
        assert_eq!(accounts(&record, &Sights::new())["t"].allowed, (4.0 * CLAIM + 15.0 + 20.0) / 2.0);
    }
}

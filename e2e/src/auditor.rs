//! An independent auditor: watches all claims in the API and all CDI specs on the node while tests run,
//! and knows nothing of the product's own rules. What a device takes of a GPU it reads from the
//! published slices (the memory slices of partitions; everything else takes all of it), and what a claim
//! holds on the node from the device nodes of its CDI spec.

use anyhow::{Result, bail};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An overlap of allocations may last this long before it counts as a failure.
pub const RESOLVE_WITHIN: Duration = Duration::from_secs(30);

/// What one allocation result takes of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Take {
    gpu: (String, String),
    /// Memory slices; `None` is all of them.
    slices: Option<BTreeSet<String>>,
    /// The shared device, if it is one: takes of the same shared device go together.
    shared: Option<String>,
}

impl Take {
    fn overlaps(&self, other: &Self) -> bool {
        if self.gpu != other.gpu || (self.shared.is_some() && self.shared == other.shared) {
            return false;
        }
        match (&self.slices, &other.slices) {
            (Some(a), Some(b)) => !a.is_disjoint(b),
            _ => true,
        }
    }
}

#[derive(Debug, Default)]
struct Record {
    looks: usize,
    most_claims: usize,
    /// Overlapping pairs of claims and since when.
    open: BTreeMap<(String, String), Instant>,
    resolved: Vec<(String, Duration)>,
    failures: Vec<String>,
}

/// Watches until it is asked for its verdict.
pub struct Auditor {
    record: Arc<Mutex<Record>>,
    task: tokio::task::JoinHandle<()>,
}

/// What the auditor saw.
#[derive(Debug)]
pub struct Verdict {
    /// How often it looked.
    pub looks: usize,
    /// Most allocated claims at once.
    pub most_claims: usize,
    /// Overlapping allocations that were resolved in time, and how long they lasted.
    pub resolved: Vec<(String, Duration)>,
}

impl Auditor {
    /// Starts to watch.
    pub fn start(client: Client, driver: &str, cdi_dir: &str) -> Self {
        let record = Arc::new(Mutex::new(Record::default()));
        let (driver, cdi_dir, shared) = (driver.to_owned(), cdi_dir.to_owned(), Arc::clone(&record));
        let task = tokio::spawn(async move {
            let mut partitions = Partitions::default();
            loop {
                if let Ok(takes) = takes(&client, &driver, &mut partitions).await {
                    shared.lock().observe(&takes, Instant::now());
                }
                let overlaps = overlapping_prepares(&cdi_dir);
                shared.lock().failures.extend(overlaps);
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
        });
        Self { record, task }
    }

    /// Stops and judges.
    ///
    /// # Errors
    /// Every overlapping prepare, and every overlapping allocation that lasted too long.
    pub fn verdict(self) -> Result<Verdict> {
        self.task.abort();
        let mut record = std::mem::take(&mut *self.record.lock());
        let still: Vec<String> =
            record.open.keys().map(|(a, b)| format!("{a} and {b} still overlap")).collect();
        record.failures.extend(still);
        record.failures.sort();
        record.failures.dedup();
        if !record.failures.is_empty() {
            bail!("the auditor saw:\n{}", record.failures.join("\n"));
        }
        if record.looks == 0 {
            bail!("the auditor never saw the API");
        }
        Ok(Verdict { looks: record.looks, most_claims: record.most_claims, resolved: record.resolved })
    }
}

impl Record {
    fn observe(&mut self, takes: &[(String, Vec<Take>)], now: Instant) {
        self.looks += 1;
        self.most_claims = self.most_claims.max(takes.len());
        let mut seen = BTreeSet::new();
        for (index, (a, mine)) in takes.iter().enumerate() {
            for (b, theirs) in takes.iter().skip(index + 1) {
                if mine.iter().any(|t| theirs.iter().any(|u| t.overlaps(u))) {
                    let pair = (a.clone().min(b.clone()), a.clone().max(b.clone()));
                    self.open.entry(pair.clone()).or_insert(now);
                    seen.insert(pair);
                }
            }
        }
        let ended: Vec<_> = self.open.keys().filter(|pair| !seen.contains(*pair)).cloned().collect();
        for pair in ended {
            if let Some(since) = self.open.remove(&pair) {
                self.resolved.push((format!("{} and {}", pair.0, pair.1), now.duration_since(since)));
            }
        }
        for (pair, since) in &self.open {
            if now.duration_since(*since) > RESOLVE_WITHIN {
                self.failures
                    .push(format!("{} and {} overlap for more than {RESOLVE_WITHIN:?}", pair.0, pair.1));
            }
        }
    }
}

/// Memory slices of every device seen so far; what a device is never changes.
type Partitions = BTreeMap<(String, String), Option<BTreeSet<String>>>;

/// What every allocated claim takes, by `namespace/name`.
async fn takes(
    client: &Client,
    driver: &str,
    partitions: &mut Partitions,
) -> Result<Vec<(String, Vec<Take>)>> {
    let claims = Api::<ResourceClaim>::all(client.clone()).list(&ListParams::default()).await?;
    let mut all = Vec::new();
    for claim in claims {
        let results =
            claim.status.as_ref().and_then(|s| s.allocation.as_ref()?.devices.as_ref()?.results.clone());
        let mut takes = Vec::new();
        for result in results.unwrap_or_default() {
            if result.driver != driver || result.admin_access == Some(true) {
                continue;
            }
            let key = (result.pool.clone(), result.device.clone());
            if !partitions.contains_key(&key) {
                learn(client, partitions).await?;
            }
            // `gpu-3-share` and `gpu-3-mig-…` lie on `gpu-3`.
            let gpu: String = result.device.splitn(3, '-').take(2).collect::<Vec<_>>().join("-");
            let shared = result.share_id.is_some().then(|| result.device.clone());
            takes.push(Take {
                gpu: (result.pool.clone(), gpu),
                slices: partitions.get(&key).cloned().flatten(),
                shared,
            });
        }
        if !takes.is_empty() {
            all.push((format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any()), takes));
        }
    }
    Ok(all)
}

async fn learn(client: &Client, partitions: &mut Partitions) -> Result<()> {
    for slice in Api::<ResourceSlice>::all(client.clone()).list(&ListParams::default()).await? {
        for device in slice.spec.devices.iter().flatten() {
            let capacities = device.capacity.iter().flatten().map(|(name, _)| name);
            let counters = device.consumes_counters.iter().flatten().flat_map(|c| c.counters.keys());
            let names: BTreeSet<String> =
                capacities.chain(counters).filter_map(|name| memory_slice(name)).collect();
            // Whatever can be cut takes all memory slices if it is not a partition.
            let partition = device.name.contains("-mig-") && !names.is_empty();
            partitions
                .insert((slice.spec.pool.name.clone(), device.name.clone()), partition.then_some(names));
        }
    }
    Ok(())
}

/// The number in `memorySlice3` (a capacity) and in `memory-slice-3` (a counter).
fn memory_slice(name: &str) -> Option<String> {
    let number = name.strip_prefix("memorySlice").or_else(|| name.strip_prefix("memory-slice-"))?;
    number.chars().all(|c| c.is_ascii_digit()).then(|| number.to_owned())
}

/// Claims whose CDI specs give them the same hardware without sharing it.
fn overlapping_prepares(cdi_dir: &str) -> Vec<String> {
    let mut specs: Vec<(String, BTreeSet<String>, bool)> = Vec::new();
    for entry in std::fs::read_dir(cdi_dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(text) = std::fs::read_to_string(entry.path()) else { continue };
        let Ok(spec) = serde_json::from_str::<serde_json::Value>(&text) else { continue };
        if !name.contains("aliquot") {
            continue;
        }
        let limited = text.contains("libaliquot_preload.so");
        let mut held = BTreeSet::new();
        for device in spec.pointer("/devices").and_then(|d| d.as_array()).into_iter().flatten() {
            held.extend(held_by(device));
        }
        if !held.is_empty() {
            specs.push((name, held, limited));
        }
    }
    let mut found = Vec::new();
    for (index, (a, mine, a_limited)) in specs.iter().enumerate() {
        for (b, theirs, b_limited) in specs.iter().skip(index + 1) {
            let shared = *a_limited && *b_limited;
            if !shared && !mine.is_disjoint(theirs) {
                let both: Vec<&String> = mine.intersection(theirs).collect();
                found.push(format!("CDI specs {a} and {b} both give {both:?}"));
            }
        }
    }
    found
}

/// The hardware of a CDI device: its MIG capability nodes if there are any, else its GPU nodes.
fn held_by(device: &serde_json::Value) -> BTreeSet<String> {
    let nodes = device.pointer("/containerEdits/deviceNodes").and_then(|n| n.as_array());
    let paths: BTreeSet<String> = nodes
        .into_iter()
        .flatten()
        .filter_map(|n| n.get("path").and_then(|p| p.as_str()))
        .map(str::to_owned)
        .collect();
    let caps: BTreeSet<String> = paths.iter().filter(|p| p.contains("nvidia-cap")).cloned().collect();
    if !caps.is_empty() {
        return caps;
    }
    let gpu = |p: &&String| {
        p.strip_prefix("/dev/nvidia").is_some_and(|n| n.chars().all(|c| c.is_ascii_digit()) && !n.is_empty())
    };
    paths.iter().filter(gpu).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(slices: Option<&[&str]>, shared: Option<&str>) -> Take {
        Take {
            gpu: ("pool".into(), "gpu-0".into()),
            slices: slices.map(|s| s.iter().map(|s| (*s).to_owned()).collect()),
            shared: shared.map(str::to_owned),
        }
    }

    #[test]
    fn only_disjoint_partitions_and_shares_of_one_device_go_together() {
        let whole = take(None, None);
        let (low, high) = (take(Some(&["memorySlice0"]), None), take(Some(&["memorySlice1"]), None));
        let share = take(None, Some("gpu-0-share"));
        assert!(whole.overlaps(&low) && whole.overlaps(&share) && whole.overlaps(&whole.clone()));
        assert!(!low.overlaps(&high) && low.overlaps(&low.clone()) && low.overlaps(&share));
        assert!(!share.overlaps(&share.clone()));
        assert!(share.overlaps(&take(None, Some("gpu-0-mps"))));
    }

    #[test]
    fn an_overlap_that_ends_is_resolved_and_one_that_lasts_is_a_failure() {
        let mut record = Record::default();
        let claims =
            |n: usize| (0..n).map(|i| (format!("ns/{i}"), vec![take(None, None)])).collect::<Vec<_>>();
        let start = Instant::now();
        record.observe(&claims(2), start);
        record.observe(&claims(1), start + Duration::from_secs(5));
        assert_eq!(record.resolved.len(), 1);
        assert!(record.failures.is_empty());
        record.observe(&claims(2), start + Duration::from_secs(6));
        record.observe(&claims(2), start + Duration::from_secs(40));
        assert_eq!(record.failures.len(), 1);
    }
}

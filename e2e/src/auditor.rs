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
    /// What it takes of a shared device's capacities, each beside all that there is.
    consumed: BTreeMap<String, (Amount, Amount)>,
}

/// An amount of a capacity, in billionths.
type Amount = i128;

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
    /// Overlaps, each of two claims or of a device's shares, and since when.
    open: BTreeMap<String, Instant>,
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
        let still: Vec<String> = record.open.keys().map(|what| format!("{what} still")).collect();
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
                    seen.insert(format!("{} and {} overlap", a.min(b), a.max(b)));
                }
            }
        }
        seen.extend(over_allocated(takes));
        for what in &seen {
            self.open.entry(what.clone()).or_insert(now);
        }
        let ended: Vec<_> = self.open.keys().filter(|what| !seen.contains(*what)).cloned().collect();
        for what in ended {
            if let Some(since) = self.open.remove(&what) {
                self.resolved.push((what, now.duration_since(since)));
            }
        }
        for (what, since) in &self.open {
            if now.duration_since(*since) > RESOLVE_WITHIN {
                self.failures.push(format!("{what} for more than {RESOLVE_WITHIN:?}"));
            }
        }
    }
}

/// Capacities of shared devices of which all claims together take more than there is.
fn over_allocated(takes: &[(String, Vec<Take>)]) -> Vec<String> {
    let mut sums: BTreeMap<(&str, &str, &str), (Amount, Amount)> = BTreeMap::new();
    for take in takes.iter().flat_map(|(_, takes)| takes) {
        let Some(device) = &take.shared else { continue };
        for (name, (taken, all)) in &take.consumed {
            let sum = sums.entry((&take.gpu.0, device, name)).or_insert((0, *all));
            // An older look at the device, or a newer one: the one that allows less.
            *sum = (sum.0 + taken, sum.1.min(*all));
        }
    }
    let over = sums.into_iter().filter(|(_, (taken, all))| taken > all);
    over.map(|((pool, device, name), _)| format!("shares of {pool}/{device} take more {name} than it has"))
        .collect()
}

/// An amount as Kubernetes writes it; nothing if it is not one.
fn amount(text: &str) -> Option<Amount> {
    const ONE: f64 = 1e9;
    let at = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '-')).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let factor = match unit {
        "" => 1.0,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => 2f64.powi(10),
        "Mi" => 2f64.powi(20),
        "Gi" => 2f64.powi(30),
        "Ti" => 2f64.powi(40),
        _ => return None,
    };
    let whole: Option<Amount> = number.parse().ok();
    if let Some(whole) = whole.filter(|_| factor >= 1.0) {
        // Exact, as bytes of memory have to be.
        return Some(whole * factor as Amount * ONE as Amount);
    }
    number.parse::<f64>().ok().map(|number| (number * factor * ONE) as Amount)
}

/// Memory slices of every device seen so far, and its capacities; what a device is never changes.
type Partitions = BTreeMap<(String, String), (Option<BTreeSet<String>>, BTreeMap<String, Amount>)>;

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
            let (slices, capacities) = partitions.get(&key).cloned().unwrap_or_default();
            let consumed = result.consumed_capacity.iter().flatten().map(|(name, taken)| {
                // What cannot be read counts as more than there is.
                let taken = amount(&taken.0).unwrap_or(Amount::MAX / 4);
                (name.clone(), (taken, capacities.get(name).copied().unwrap_or(0)))
            });
            let consumed = consumed.collect();
            takes.push(Take { gpu: (result.pool.clone(), gpu), slices, shared, consumed });
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
            let capacities = device.capacity.iter().flatten();
            let capacities = capacities.filter_map(|(name, all)| Some((name.clone(), amount(&all.value.0)?)));
            partitions.insert(
                (slice.spec.pool.name.clone(), device.name.clone()),
                (partition.then_some(names), capacities.collect()),
            );
        }
    }
    Ok(())
}

/// The number in `memorySlice3` (a capacity) and in `memory-slice-3` (a counter).
fn memory_slice(name: &str) -> Option<String> {
    let number = name.strip_prefix("memorySlice").or_else(|| name.strip_prefix("memory-slice-"))?;
    number.chars().all(|c| c.is_ascii_digit()).then(|| number.to_owned())
}

/// How a claim shares what it has, as its CDI spec shows it; `None` if it does not.
fn shares_by(spec: &str) -> Option<&'static str> {
    ["libaliquot_preload.so", "-timeslice="].into_iter().find(|mark| spec.contains(mark))
}

/// Claims whose CDI specs give them the same hardware without sharing it.
fn overlapping_prepares(cdi_dir: &str) -> Vec<String> {
    let mut specs: Vec<(String, BTreeSet<String>, Option<&str>)> = Vec::new();
    for entry in std::fs::read_dir(cdi_dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(text) = std::fs::read_to_string(entry.path()) else { continue };
        let Ok(spec) = serde_json::from_str::<serde_json::Value>(&text) else { continue };
        if !name.contains("aliquot") {
            continue;
        }
        let mut held = BTreeSet::new();
        for device in spec.pointer("/devices").and_then(|d| d.as_array()).into_iter().flatten() {
            held.extend(held_by(device));
        }
        if !held.is_empty() {
            specs.push((name, held, shares_by(&text)));
        }
    }
    let mut found = Vec::new();
    for (index, (a, mine, a_shares)) in specs.iter().enumerate() {
        for (b, theirs, b_shares) in specs.iter().skip(index + 1) {
            let shared = a_shares.is_some() && a_shares == b_shares;
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
            consumed: BTreeMap::new(),
        }
    }

    fn share(memory: &str) -> Take {
        let amounts = |text: &str| (amount(text).expect("an amount"), amount("80Gi").expect("an amount"));
        let consumed = BTreeMap::from([("memory".to_owned(), amounts(memory))]);
        Take { consumed, ..take(None, Some("gpu-0-share")) }
    }

    #[test]
    fn shares_that_take_more_together_than_their_device_has_are_found() {
        let takes = |sizes: &[&str]| -> Vec<(String, Vec<Take>)> {
            sizes.iter().enumerate().map(|(at, size)| (format!("ns/{at}"), vec![share(size)])).collect()
        };
        assert_eq!(over_allocated(&takes(&["40Gi", "30Gi", "10240Mi"])), Vec::<String>::new(), "exactly all");
        // A byte more than there is.
        let planted = takes(&["40Gi", "30Gi", "10737418241"]);
        assert_eq!(over_allocated(&planted), ["shares of pool/gpu-0-share take more memory than it has"]);
        let mut record = Record::default();
        let start = Instant::now();
        record.observe(&planted, start);
        record.observe(&planted, start + RESOLVE_WITHIN + Duration::from_secs(1));
        assert_eq!(record.failures.len(), 1, "{:?}", record.failures);
        // Two shares of one claim count both, and those of other devices do not.
        let twice = vec![("ns/a".to_owned(), vec![share("41Gi"), share("41Gi")])];
        assert_eq!(over_allocated(&twice).len(), 1);
        let mut elsewhere = share("41Gi");
        elsewhere.gpu.0 = "another".to_owned();
        assert!(over_allocated(&[("ns/a".to_owned(), vec![share("41Gi"), elsewhere])]).is_empty());
    }

    #[test]
    fn amounts_are_read_as_kubernetes_writes_them() {
        let billion = 1_000_000_000;
        for (text, all) in [("5", 5), ("8Gi", 8 << 30), ("1k", 1000), ("2M", 2_000_000)] {
            assert_eq!(amount(text), Some(all * billion), "{text}");
        }
        assert_eq!((amount("500m"), amount("1.5Ki")), (Some(billion / 2), Some(1536 * billion)));
        assert_eq!((amount("many"), amount("1Xi")), (None, None));
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

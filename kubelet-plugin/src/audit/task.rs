//! Reads NVML, processes and quotas, and acts on the verdicts with events, metrics and evictions.

use super::evict::{Evicted, Evictor};
use super::measured::{self, Accounts};
use super::process_owner::{self, Hardware, Owner, PodFacts};
use super::{Auditor, Breach, Look, Measured, Quota, Settings, Subject, Verdict};
use crate::beat;
use crate::events::Events;
use crate::ledger::{Device, Ledger, Record, State};
use crate::metrics::{Breached, Metrics, Outcome, ShareLabels};
use crate::pages;
use crate::prepare::{Node, Overview};
use crate::reasons;
use crate::share::read_region;
use aliquot_api::Lean;
use aliquot_model::GpuUuid;
use aliquot_nvml::{GpuProcess, Gpus};
use aliquot_quota::measured::Identity;
use aliquot_quota::region::{RegionView, audit};
use aliquot_quota::{ComputePolicy, QuotaFile};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(super) const API_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before pods that the API does not show yet are asked for again.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// The pause before an eviction is asked for again if it was refused, or if the pod is still there.
pub(super) const EVICT_AGAIN: Duration = Duration::from_secs(30);

/// The task that audits shares.
pub struct Audit {
    /// The node.
    pub node: Arc<Node>,
    /// The API client.
    pub client: Client,
    /// The name of the node.
    pub node_name: String,
    /// The metrics.
    pub metrics: Metrics,
    /// The event recorder.
    pub events: Events,
    /// The overview with the ledger.
    pub overview: watch::Receiver<Arc<Overview>>,
    /// The tolerances.
    pub settings: Settings,
    /// The interval between looks.
    pub interval: Duration,
    /// True if pods that use more than their share are evicted.
    pub evict: bool,
    /// The path of the host's `/proc`.
    pub proc: PathBuf,
}

impl std::fmt::Debug for Audit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Audit").field("node_name", &self.node_name).finish_non_exhaustive()
    }
}

/// A process on a GPU.
#[derive(Debug)]
struct Seen {
    on: Hardware,
    process: GpuProcess,
    percent: u32,
    owner: Option<Owner>,
    identity: Option<Identity>,
}

/// The files of a share, as the agent finds them.
#[derive(Debug, Clone, Default)]
struct Files {
    quota: Quota,
    region: Option<String>,
    /// The bytes that the limiter says it charged, and the bits of its audit word.
    charged: Option<(u64, u64)>,
    accounts: Accounts,
}

/// The state that is remembered between looks.
struct Memory {
    auditor: Auditor,
    pods: BTreeMap<String, PodFacts>,
    /// The owners that the API did not know, and the time at which it was asked.
    unknown: (BTreeSet<Owner>, Option<Instant>),
    /// The device and inode of each region when it was first seen.
    regions: BTreeMap<String, (u64, u64)>,
    evicted: BTreeMap<String, Instant>,
    since_us: BTreeMap<GpuUuid, u64>,
    looked: Instant,
}

impl Audit {
    /// Runs until cancelled.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut memory = Memory {
            auditor: Auditor::new(self.settings.clone()),
            pods: BTreeMap::new(),
            unknown: (BTreeSet::new(), None),
            regions: BTreeMap::new(),
            evicted: BTreeMap::new(),
            since_us: BTreeMap::new(),
            looked: Instant::now(),
        };
        loop {
            let overview = Arc::clone(&self.overview.borrow_and_update());
            self.look(&overview.ledger, &mut memory).await;
            tokio::select! {
                () = cancel.cancelled() => return,
                () = beat::next(self.interval) => {}
            }
        }
    }

    async fn look(&self, ledger: &Ledger, memory: &mut Memory) {
        let elapsed = memory.looked.elapsed();
        memory.looked = Instant::now();
        let gpus: BTreeSet<GpuUuid> = shares(ledger).map(|(_, device)| device.gpu.clone()).collect();
        let ids: BTreeSet<String> = shares(ledger).map(|(_, device)| device.result_id.clone()).collect();
        memory.regions.retain(|id, _| ids.contains(id));
        memory.since_us.retain(|gpu, _| gpus.contains(gpu));
        if ids.is_empty() && memory.auditor.is_idle() {
            return;
        }
        let (node, proc) = (Arc::clone(&self.node), self.proc.clone());
        let (mut since, mut regions) =
            (std::mem::take(&mut memory.since_us), std::mem::take(&mut memory.regions));
        let Ok((taken_ns, before, seen, files, since, regions)) = tokio::task::spawn_blocking(move || {
            let taken_ns = aliquot_arbiter::files::now_ns().unwrap_or(0);
            let before = measured::read_accounts(&node.machine.site.shares_dir, ids.iter());
            let seen = processes(node.machine.gpus.as_ref(), &gpus, &mut since, &proc);
            let read = |id: String| {
                let files = read_files(&node.machine.site.shares_dir, &id, &mut regions);
                (id, files)
            };
            let files: BTreeMap<String, Files> = ids.into_iter().map(read).collect();
            (taken_ns, before, seen, files, since, regions)
        })
        .await
        else {
            return;
        };
        (memory.since_us, memory.regions) = (since, regions);
        self.know(&seen, &files, memory).await;
        let looks = looks(ledger, &seen, &files, &memory.pods, &self.metrics);
        self.count(ledger, &looks);
        let after = files.iter().map(|(id, files)| (id.clone(), files.accounts.clone())).collect();
        let pages = measured::pages(&looks, &before, &after);
        let (node, interval) = (Arc::clone(&self.node), self.interval);
        let write = move || {
            let machine = &node.machine;
            measured::write(&machine.site.shares_dir, &machine.labels, &pages, taken_ns, interval);
        };
        drop(tokio::task::spawn_blocking(write).await);
        let verdicts = memory.auditor.look(elapsed, &looks);
        for verdict in &verdicts {
            let Some(look) = looks.iter().find(|look| look.subject == verdict.subject) else { continue };
            self.tell(ledger, look, verdict, &files, &memory.pods);
            if self.evict && !matches!(verdict.breach, Breach::Region(_)) {
                self.evict(ledger, look, verdict, memory).await;
            }
        }
        memory.evicted.retain(|_, at| at.elapsed() < EVICT_AGAIN);
    }

    /// Asks the API for the node's pods if an owner is not known.
    async fn know(&self, seen: &[Seen], files: &BTreeMap<String, Files>, memory: &mut Memory) {
        let is_unknown = |owner: &&Owner| {
            memory.pods.get(&owner.pod).is_none_or(|pod| !pod.knows(owner.container.as_deref()))
        };
        let unknown: BTreeSet<Owner> =
            seen.iter().filter_map(|one| one.owner.as_ref()).filter(is_unknown).cloned().collect();
        // The owner of a damaged region is asked for as well.
        let wanted = !unknown.is_empty() || files.values().any(|files| files.region.is_some());
        let asked = memory.unknown.1.is_some_and(|at| at.elapsed() < ASK_AGAIN);
        if !wanted || asked && unknown.is_subset(&memory.unknown.0) {
            return;
        }
        let api: Api<Lean<Pod>> = Api::all(self.client.clone());
        let params = ListParams::default().fields(&format!("spec.nodeName={}", self.node_name));
        match pages::all(&api, params, API_TIMEOUT, Some).await {
            Ok(pods) => memory.pods = pods.iter().filter_map(PodFacts::of).collect(),
            Err(error) => tracing::debug!(%error, "cannot list the node's pods"),
        }
        memory.unknown = (unknown, Some(Instant::now()));
    }

    /// Updates the metrics of the measured usage.
    fn count(&self, ledger: &Ledger, looks: &[Look]) {
        self.metrics.share_measured.clear();
        self.metrics.share_time.clear();
        self.metrics.share_over.clear();
        for look in looks.iter().filter(|look| look.subject.len() == 1) {
            let Some(labels) = labels(ledger, &look.subject) else { continue };
            if let Some(bytes) = look.memory_bytes() {
                let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
                self.metrics.share_measured.get_or_create(&labels).set(bytes);
            }
            self.metrics.share_time.get_or_create(&labels).set(i64::from(look.percent()));
        }
    }

    /// Sends the event and updates the metrics of a verdict.
    fn tell(
        &self,
        ledger: &Ledger,
        look: &Look,
        verdict: &Verdict,
        files: &BTreeMap<String, Files>,
        pods: &BTreeMap<String, PodFacts>,
    ) {
        let Some(labels) = labels(ledger, &verdict.subject) else { return };
        let breached = Breached {
            namespace: labels.namespace,
            claim: labels.claim,
            gpu: labels.gpu,
            result: labels.result,
            kind: verdict.breach.kind(),
        };
        self.metrics.share_over.get_or_create(&breached).set(1);
        if !verdict.is_new {
            return;
        }
        self.metrics.share_breaches.get_or_create(&breached).inc();
        let claims: BTreeSet<String> = shares(ledger)
            .filter(|(_, device)| verdict.subject.contains(&device.result_id))
            .map(|(record, _)| format!("{}/{}", record.claim.namespace, record.claim.name))
            .collect();
        let claims = claims.into_iter().collect::<Vec<_>>().join(", ");
        let file = verdict.subject.first().and_then(|id| files.get(id)).cloned().unwrap_or_default();
        let (reason, text) = describe(look, &verdict.breach, &claims, &breached.gpu, &file);
        let mut about: BTreeSet<&str> = look.processes.iter().map(|process| process.pod.as_str()).collect();
        if about.is_empty() {
            let uses = |pod: &PodFacts| {
                shares(ledger)
                    .filter(|(_, d)| verdict.subject.contains(&d.result_id))
                    .any(|(record, _)| pod.uses(&record.claim.namespace, &record.claim.name))
            };
            about = pods.iter().filter(|(_, pod)| uses(pod)).map(|(uid, _)| uid.as_str()).collect();
        }
        for uid in about {
            if let Some(pod) = pods.get(uid) {
                self.events.pod_warning(&pod.namespace, &pod.name, uid, reason, text.clone());
            }
        }
    }

    /// Asks the API to evict the pod that uses most of the exceeded resource.
    async fn evict(&self, ledger: &Ledger, look: &Look, verdict: &Verdict, memory: &mut Memory) {
        let mut by_pod: BTreeMap<&str, u64> = BTreeMap::new();
        for process in &look.processes {
            let part = match verdict.breach {
                Breach::Memory { .. } => process.memory_bytes.unwrap_or(0),
                _ => u64::from(process.percent),
            };
            *by_pod.entry(process.pod.as_str()).or_default() += part;
        }
        let Some((uid, _)) = by_pod.into_iter().max_by_key(|(_, part)| *part) else { return };
        if memory.evicted.contains_key(uid) {
            return;
        }
        let Some(pod) = memory.pods.get(uid) else { return };
        let kind = verdict.breach.kind();
        let claim = labels(ledger, &verdict.subject).map(|labels| labels.claim).unwrap_or_default();
        let evictor = Evictor { client: &self.client, events: &self.events };
        let outcome = match evictor.evict(pod, uid, kind, &claim).await {
            Evicted::Yes => "evicted",
            Evicted::Refused => "refused",
            Evicted::Unsaid => {
                // Asked again at the next look.
                self.metrics.audit_evictions.get_or_create(&Outcome { outcome: "unsaid" }).inc();
                return;
            }
            Evicted::Gone => return,
        };
        self.metrics.audit_evictions.get_or_create(&Outcome { outcome }).inc();
        memory.evicted.insert(uid.to_owned(), Instant::now());
    }
}

/// Returns the shares in use.
fn shares(ledger: &Ledger) -> impl Iterator<Item = (&Record, &Device)> {
    let records = ledger.claims.values().filter(|record| record.state == State::Completed);
    records
        .flat_map(|record| record.devices.iter().map(move |device| (record, device)))
        .filter(|(_, device)| device.share.is_some())
}

/// Returns the labels of a subject: those of its first share.
fn labels(ledger: &Ledger, subject: &Subject) -> Option<ShareLabels> {
    let (record, device) = shares(ledger).find(|(_, device)| subject.first() == Some(&device.result_id))?;
    Some(ShareLabels::of(record, device))
}

/// Returns the processes on these GPUs and in their partitions. A GPU that does not answer has none at this
/// look.
fn processes(
    gpus: &dyn Gpus,
    wanted: &BTreeSet<GpuUuid>,
    since: &mut BTreeMap<GpuUuid, u64>,
    proc: &Path,
) -> Vec<Seen> {
    let mut all = Vec::new();
    for gpu in wanted {
        let found = match gpus.processes(gpu) {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, "the audit cannot list processes");
                continue;
            }
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let before = since.insert(gpu.clone(), u64::try_from(now).unwrap_or(u64::MAX)).unwrap_or(0);
        let times = gpus.utilization(gpu, before).unwrap_or_default();
        // A process is listed once for each kind, each time with the same memory.
        let mut by_pid: BTreeMap<u32, GpuProcess> = BTreeMap::new();
        for process in found {
            let known = by_pid.entry(process.pid).or_insert_with(|| process.clone());
            known.memory_bytes = known.memory_bytes.max(process.memory_bytes);
        }
        // Without partitions this call costs little and returns nothing.
        let live = gpus.live_migs(gpu).unwrap_or_default();
        for (pid, process) in by_pid {
            let instance = live.iter().find(|mig| process.gpu_instance == Some(mig.gpu_instance));
            let samples: Vec<u32> = times.iter().filter(|t| t.pid == pid).map(|t| t.percent).collect();
            let count = u32::try_from(samples.len()).unwrap_or(u32::MAX).max(1);
            let owner = fs::read_to_string(proc.join(format!("{pid}/cgroup"))).ok();
            all.push(Seen {
                on: Hardware { gpu: gpu.clone(), partition: instance.and_then(|mig| mig.uuid.clone()) },
                process,
                percent: samples.iter().sum::<u32>() / count,
                owner: owner.as_deref().and_then(process_owner::owner),
                identity: measured::identity(proc, pid),
            });
        }
    }
    all
}

fn read_files(folder: &Path, id: &str, known: &mut BTreeMap<String, (u64, u64)>) -> Files {
    let quota = fs::read(folder.join(id).join("quota/quota")).ok();
    let quota = quota.and_then(|bytes| QuotaFile::decode(&bytes).ok()).map(|quota| Quota {
        // Managed memory beyond the quota is in GPU memory, too, if the GPU has room.
        memory_bytes: match quota.memory_bytes {
            0 => 0,
            bytes => bytes.saturating_add(quota.oversubscribe_bytes),
        },
        cores_percent: quota.cores_percent,
        is_soft: quota.compute_policy == ComputePolicy::Soft,
    });
    let mut files = Files { quota: quota.unwrap_or_default(), ..Files::default() };
    match read_region(folder, id) {
        Ok((inode, _)) if *known.entry(id.to_owned()).or_insert(inode) != inode => {
            files.region = Some("it was replaced by another file".to_owned());
        }
        Ok((_, bytes)) => match RegionView::parse(&bytes) {
            Ok(region) => {
                files.charged = Some((region.total_bytes(), region.audit()));
                files.accounts = measured::accounts(&region);
            }
            Err(error) => files.region = Some(error.to_string()),
        },
        Err(error) => files.region = Some(format!("it cannot be read: {error}")),
    }
    files
}

/// Assigns the processes to the shares.
fn looks(
    ledger: &Ledger,
    seen: &[Seen],
    files: &BTreeMap<String, Files>,
    pods: &BTreeMap<String, PodFacts>,
    metrics: &Metrics,
) -> Vec<Look> {
    let mut subjects: BTreeMap<Subject, Vec<Measured>> =
        shares(ledger).map(|(_, device)| ([device.result_id.clone()].into(), Vec::new())).collect();
    let mut strangers = 0;
    for one in seen {
        let of_pod = one.owner.as_ref().and_then(|owner| Some((owner, pods.get(&owner.pod)?)));
        let subject = of_pod
            .map(|(owner, pod)| process_owner::shares(ledger, &one.on, pod, owner.container.as_deref()));
        match (subject, &one.owner) {
            (Some(subject), Some(owner)) if !subject.is_empty() => {
                subjects.entry(subject).or_default().push(Measured {
                    pid: one.process.pid,
                    name: one.process.name.clone(),
                    pod: owner.pod.clone(),
                    memory_bytes: one.process.memory_bytes,
                    percent: one.percent,
                    identity: one.identity,
                });
            }
            _ => strangers += 1,
        }
    }
    metrics.unattributed_processes.set(strangers);
    let look = |(subject, processes): (Subject, Vec<Measured>)| {
        let mut of = subject.iter().filter_map(|id| files.get(id));
        let first = of.next().cloned().unwrap_or_default();
        let quota = of.fold(first.quota, |sum, files| sum.and(files.quota));
        let region = if subject.len() == 1 { first.region } else { None };
        Look { subject, quota, processes, region }
    };
    subjects.into_iter().map(look).collect()
}

/// Returns the reason and text of an event.
fn describe(look: &Look, breach: &Breach, claims: &str, gpu: &str, files: &Files) -> (&'static str, String) {
    const SHOWN: usize = 4;
    let name = |process: &Measured| match &process.name {
        Some(name) => format!("{} ({name})", process.pid),
        None => process.pid.to_string(),
    };
    let mut names: Vec<String> = look.processes.iter().take(SHOWN).map(name).collect();
    if look.processes.len() > SHOWN {
        names.push(format!("{} more", look.processes.len() - SHOWN));
    }
    let names = names.join(", ");
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
    let deep = files.charged.is_some_and(|(_, word)| word & audit::DEEPBIND != 0);
    let deep =
        if deep { " A library was opened with RTLD_DEEPBIND, which binds past the limiter." } else { "" };
    let advice = "Programs that bypass the limiter are to be stopped or given a partition or a whole GPU, whose \
                  limits bind everyone.";
    match breach {
        Breach::Memory { used, quota } => {
            let charged = files.charged.map(|(bytes, _)| format!(", of which {} are charged", gib(bytes)));
            (
                reasons::OVER_MEMORY,
                format!(
                    "processes {names} use {} of GPU {gpu}{}; claim {claims} grants {}.{deep} {advice}",
                    gib(*used),
                    charged.unwrap_or_default(),
                    gib(*quota)
                ),
            )
        }
        Breach::Time { percent, quota } => (
            reasons::OVER_TIME,
            format!(
                "processes {names} take {percent} % of the time of GPU {gpu}; claim {claims} grants {quota} \
                 %.{deep} {advice}"
            ),
        ),
        Breach::Region(what) => (
            reasons::REGION_DAMAGED,
            format!(
                "the account of claim {claims} on GPU {gpu} was changed from inside a container: {what}. CUDA \
                 fails in its processes, or counts wrongly. The next pod gets a new one; start this one anew"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::region_path;

    fn look() -> Look {
        let process = |pid| Measured {
            pid,
            name: Some("python3".into()),
            pod: "pod".into(),
            memory_bytes: Some(9 << 30),
            percent: 80,
            identity: None,
        };
        Look {
            subject: ["r".to_owned()].into(),
            quota: Quota::default(),
            processes: (1..=6).map(process).collect(),
            region: None,
        }
    }

    #[test]
    fn events_name_processes_claim_and_what_to_do() {
        let files = Files { charged: Some((1 << 30, audit::DEEPBIND)), ..Files::default() };
        let breach = Breach::Memory { used: 9 << 30, quota: 4 << 30 };
        let (reason, text) = describe(&look(), &breach, "ns/c", "GPU-1", &files);
        assert_eq!(
            (reason, text.as_str()),
            (
                "ShareOverMemory",
                "processes 1 (python3), 2 (python3), 3 (python3), 4 (python3), 2 more use 9.00 GiB of GPU GPU-1, of \
                 which 1.00 GiB are charged; claim ns/c grants 4.00 GiB. A library was opened with RTLD_DEEPBIND, \
                 which binds past the limiter. Programs that bypass the limiter are to be stopped or given a \
                 partition or a whole GPU, whose limits bind everyone."
            )
        );
        let (reason, text) =
            describe(&look(), &Breach::Time { percent: 80, quota: 30 }, "ns/c", "GPU-1", &Files::default());
        assert!(
            reason == "ShareOverTime" && text.contains("take 80 %") && text.contains("grants 30 %"),
            "{text}"
        );
    }

    #[test]
    fn a_region_that_was_truncated_or_replaced_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let region = region_path(folder.path(), "r");
        fs::create_dir_all(region.parent().unwrap()).unwrap();
        let mut bytes = vec![0; aliquot_quota::REGION_FILE_SIZE];
        let header = aliquot_quota::region::initial_header();
        bytes[..header.len()].copy_from_slice(&header);
        fs::write(&region, &bytes).unwrap();
        let mut known = BTreeMap::new();
        let mut fault = || read_files(folder.path(), "r", &mut known).region;
        assert_eq!(fault(), None);
        fs::OpenOptions::new().write(true).open(&region).unwrap().set_len(7).unwrap();
        assert_eq!(fault(), Some(format!("region has 7 bytes instead of {}", bytes.len())));
        fs::write(&region, vec![0; bytes.len()]).unwrap();
        assert_eq!(fault(), Some("region does not start with its magic bytes".to_owned()));
        fs::write(&region, &bytes).unwrap();
        assert_eq!(fault(), None);
        fs::write(region.with_extension("new"), &bytes).unwrap();
        fs::rename(region.with_extension("new"), &region).unwrap();
        assert_eq!(fault(), Some("it was replaced by another file".to_owned()));
        fs::remove_file(&region).unwrap();
        assert!(fault().unwrap().starts_with("it cannot be read"), "gone");
    }
}

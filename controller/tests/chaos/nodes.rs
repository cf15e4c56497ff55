//! Nodes with the real ledger: claims are prepared and given back by the node agent's own code, against GPUs in
//! memory and a checkpoint in a directory, and the agent is killed in the middle of it. What it answers is
//! compared, by an auditor of its own, with what else the node was told to hand out, and with the hardware.

mod reports;

use super::common::{Cluster, auditor, fixtures};
use super::dice::Dice;
use aliquot_cdi::SpecDir;
use aliquot_kubelet_plugin::claim::{ClaimRef, decode};
use aliquot_kubelet_plugin::driver::{Driver, Roots};
use aliquot_kubelet_plugin::driver_unload::Wish;
use aliquot_kubelet_plugin::edits::Site;
use aliquot_kubelet_plugin::execute::Machine;
use aliquot_kubelet_plugin::mps::Mps;
use aliquot_kubelet_plugin::partitioning::{Partitioning, Shared, Unclaimed};
use aliquot_kubelet_plugin::prepare::{GivenBack, Node};
use aliquot_kubelet_plugin::probe::Probe;
use aliquot_kubelet_plugin::retained;
use aliquot_kubelet_plugin::selinux::Labels;
use aliquot_kubelet_plugin::share::RegionStorage;
use aliquot_kubelet_plugin::store::Store;
use aliquot_kubelet_plugin::vfio::Vfio;
use aliquot_model::layout::Holding;
use aliquot_model::names::pool_name;
use aliquot_model::{DeviceName, DriverCapabilities, Placement};
use aliquot_nvml::Gpus;
use aliquot_nvml::fake::{FakeGpus, Killed, until_killed};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, ResourceExt};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// The agent dies at a step with this chance, one in so many.
const DEATHS: u64 = 40;

/// A claim as the kubelet knows it, from before it asks for it.
struct Given {
    claim: ClaimRef,
    pods: BTreeSet<String>,
    /// Containers have it: it was prepared, and its pods have not ended.
    used: bool,
    /// Pool and device, as the API had them when it was prepared.
    devices: Vec<(String, String)>,
}

/// A node, its kubelet and its agent.
pub struct RealNode {
    name: String,
    dir: TempDir,
    gpus: FakeGpus,
    node: Arc<Node>,
    steps: Arc<AtomicU64>,
    given: BTreeMap<String, Given>,
    /// Releases that the controller has not acknowledged.
    owed: usize,
    /// Why limits are not kept now.
    refused: Vec<String>,
    pub tally: Tally,
}

/// What happened.
#[derive(Default, Clone, Copy)]
pub struct Tally {
    pub prepared: u64,
    pub unprepared: u64,
    pub killed: u64,
    pub held_off: u64,
    /// Releases that the controller counted.
    pub acknowledged: u64,
    /// Answers to what shares may use, and those with a limit that the ledger could not hold yet.
    pub limited: u64,
    pub refused: u64,
    /// Looks at quota files that were larger than what was allocated.
    pub grown: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.prepared += other.prepared;
        self.unprepared += other.unprepared;
        self.killed += other.killed;
        self.held_off += other.held_off;
        self.acknowledged += other.acknowledged;
        self.limited += other.limited;
        self.refused += other.refused;
        self.grown += other.grown;
    }
}

/// The tables that a driver shows in `/proc`.
fn furnish(root: &Path, gpus: u32) {
    let mut minors = String::from("config 1\nmonitor 2\n");
    let mut next = 3;
    for gpu in 0..gpus {
        for instance in 0..15 {
            minors += &format!("gpu{gpu}/gi{instance}/access {next}\n");
            minors += &format!("gpu{gpu}/gi{instance}/ci0/access {}\n", next + 1);
            next += 2;
        }
    }
    let proc = root.join("proc");
    for (path, text) in [
        ("devices", "Character devices:\n195 nvidia\n195 nvidiactl\n235 nvidia-caps\n510 nvidia-uvm\n"),
        ("driver/nvidia-caps/mig-minors", minors.as_str()),
        ("sys/kernel/random/boot_id", "boot-1\n"),
    ] {
        let path = proc.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

impl RealNode {
    /// A node whose GPUs are those that [`fixtures::slices`] publishes.
    pub fn new(name: &str, gpus: u32, seed: u64) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        furnish(&dir.path().join("root"), gpus);
        let limiter = dir.path().join("limiter").join(env!("CARGO_PKG_VERSION"));
        fs::create_dir_all(&limiter).unwrap();
        for file in ["libaliquot_preload.so", "libaliquot_core.so"] {
            fs::write(limiter.join(file), "").unwrap();
        }
        let gpus = FakeGpus::new((0..gpus).map(|minor| fixtures::h100(name, minor)));
        let steps = Arc::new(AtomicU64::new(seed));
        let node = Arc::new(agent(dir.path(), &gpus, &steps));
        Self {
            name: name.to_owned(),
            dir,
            gpus,
            node,
            steps,
            given: BTreeMap::new(),
            owed: 0,
            refused: Vec::new(),
            tally: Tally::default(),
        }
    }

    pub fn is(&self, name: &str) -> bool {
        self.name == name
    }

    /// Work of the agent, which may be killed in it; then another one comes up, and `None` is the answer.
    fn work<T>(&mut self, work: impl FnOnce(&Node) -> T) -> Option<T> {
        let node = Arc::clone(&self.node);
        let answer = until_killed(|| work(&node));
        if answer.is_none() {
            self.tally.killed += 1;
            loop {
                let fresh = agent(self.dir.path(), &self.gpus, &self.steps);
                self.node = Arc::new(fresh);
                let node = Arc::clone(&self.node);
                // It may be killed while it recovers, too.
                match until_killed(|| node.recover()) {
                    Some(recovery) => {
                        let recovery = recovery.expect("recovered");
                        assert!(recovery.failed.is_empty(), "{}: {recovery:?}", self.name);
                        break;
                    }
                    None => self.tally.killed += 1,
                }
            }
            self.check();
        }
        answer
    }

    /// One round of kubelet and agent: what ended is given back, what was bound is prepared. Says of which
    /// pods every claim is prepared.
    pub async fn play(&mut self, cluster: &Cluster, pods: &[Pod]) -> BTreeSet<String> {
        let here = |pod: &&Pod| {
            pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(self.name.as_str())
        };
        let pods: Vec<&Pod> = pods.iter().filter(here).collect();
        let present: BTreeSet<String> = pods.iter().filter_map(|pod| pod.uid()).collect();
        self.give_back(&present);
        self.review(cluster).await;
        let mut ready = BTreeSet::new();
        for pod in pods {
            let pending = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Pending");
            if pending && pod.metadata.deletion_timestamp.is_none() && self.prepare_all(cluster, pod).await {
                ready.insert(pod.uid().unwrap());
            }
        }
        self.talk(cluster).await;
        ready
    }

    fn give_back(&mut self, present: &BTreeSet<String>) {
        for given in self.given.values_mut() {
            given.pods.retain(|pod| present.contains(pod));
            given.used &= !given.pods.is_empty();
        }
        let over: Vec<String> = self
            .given
            .iter()
            .filter(|(_, given)| given.pods.is_empty())
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in over {
            match self.work(|node| node.unprepare(&uid)) {
                Some(Ok(_)) => {
                    self.given.remove(&uid);
                    self.tally.unprepared += 1;
                    self.check();
                }
                Some(Err(error)) => panic!("{}: {uid} is not given back: {error}", self.name),
                // The kubelet asks again.
                None => {}
            }
        }
    }

    /// Claims that are kept without a pod: whether the API still keeps them.
    async fn review(&self, cluster: &Cluster) {
        let ledger = self.ledger();
        for record in ledger.claims.values().filter(|record| record.is_parked()) {
            retained::review(&self.quiet(), &cluster.client, fixtures::DRIVER, record, Timestamp::now())
                .await;
        }
    }

    async fn prepare_all(&mut self, cluster: &Cluster, pod: &Pod) -> bool {
        let statuses = pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
        let generated: BTreeMap<&str, Option<&str>> =
            statuses.map(|status| (status.name.as_str(), status.resource_claim_name.as_deref())).collect();
        let claims = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
        let names: Vec<Option<String>> = claims
            .map(|claim| {
                let named = claim.resource_claim_name.as_deref();
                named.or_else(|| generated.get(claim.name.as_str()).copied().flatten()).map(str::to_owned)
            })
            .collect();
        let namespace = pod.namespace().unwrap();
        let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &namespace);
        let pod = pod.uid().unwrap();
        for name in names {
            let Some(name) = name else { return false };
            let Ok(Some(claim)) = api.get_opt(&name).await else { return false };
            let users = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
            // As the kubelet: nothing without its pod among those that the claim is reserved for.
            if !users.into_iter().any(|user| user.uid == pod) || !self.prepare(cluster, &claim, &pod).await {
                return false;
            }
        }
        true
    }

    async fn prepare(&mut self, cluster: &Cluster, claim: &ResourceClaim, pod: &str) -> bool {
        let reference = ClaimRef {
            namespace: claim.namespace().unwrap(),
            name: claim.name_any(),
            uid: claim.uid().unwrap(),
        };
        let pool = pool_name(fixtures::DRIVER, &self.name);
        let request = decode(&reference, claim, fixtures::DRIVER, &pool).expect("a claim of this node");
        let object = serde_json::to_value(claim).unwrap();
        let given = self.given.entry(reference.uid.clone()).or_insert_with(|| Given {
            claim: reference.clone(),
            pods: BTreeSet::new(),
            used: false,
            devices: auditor::held(&object),
        });
        given.pods.insert(pod.to_owned());
        let mut answer = self.work(|node| node.prepare(&request, false, Timestamp::now()));
        if let Some(Err(error)) = &answer
            && error.is_conflict()
            && retained::end_in_the_way(&self.quiet(), &cluster.client, fixtures::DRIVER, &request).await
        {
            answer = self.work(|node| node.prepare(&request, false, Timestamp::now()));
        }
        match answer {
            Some(Ok(prepared)) => {
                assert_eq!(prepared.len(), request.devices.len(), "{reference}");
                if let Some(given) = self.given.get_mut(&reference.uid) {
                    given.used = true;
                    given.devices = auditor::held(&object);
                }
                self.tally.prepared += 1;
                self.check();
                true
            }
            // Its agent was killed before it gave back what somebody else had: the ledger holds this one
            // off until the kubelet has asked again.
            Some(Err(error)) if error.is_conflict() && self.owes() => {
                self.tally.held_off += 1;
                false
            }
            Some(Err(error)) => panic!("{}: {reference} is not prepared: {error}", self.name),
            None => false,
        }
    }

    /// Whether something is still to be given back.
    fn owes(&self) -> bool {
        self.given.values().any(|given| given.pods.is_empty())
    }

    /// The node's code without a kill in it.
    fn quiet(&self) -> Arc<Node> {
        Arc::new(agent(self.dir.path(), &self.gpus, &Arc::new(AtomicU64::new(0))))
    }

    fn ledger(&self) -> aliquot_kubelet_plugin::ledger::Ledger {
        self.quiet().store.lock(Duration::from_secs(5)).unwrap().load().unwrap().ledger
    }

    /// The independent look: nothing that was handed out overlaps, and the hardware is what was handed out
    /// and what the ledger is in the middle of, and nothing else.
    fn check(&self) {
        let given: Vec<&Given> = self.given.values().filter(|given| given.used).collect();
        for (at, one) in given.iter().enumerate() {
            for other in given.iter().skip(at + 1) {
                for (a, b) in one.devices.iter().flat_map(|a| other.devices.iter().map(move |b| (a, b))) {
                    assert!(
                        !auditor::conflict(a, b),
                        "{}: {} has {a:?} and {} has {b:?} at a time",
                        self.name,
                        one.claim,
                        other.claim
                    );
                }
            }
        }
        let inventory = self.gpus.inventory().unwrap();
        let minor = |uuid| inventory.gpus.iter().find(|gpu| &gpu.uuid == uuid).unwrap().minor;
        let live: BTreeSet<(u32, Placement)> =
            inventory.live.iter().map(|mig| (minor(&mig.parent), mig.placement)).collect();
        for given in &given {
            for (_, device) in &given.devices {
                if let Some(DeviceName::Mig { minor, .. }) = DeviceName::parse(device) {
                    let info = fixtures::h100(&self.name, minor);
                    let name = DeviceName::parse(device).expect("a name of ours");
                    let Some(Holding::Partition(placement)) = Holding::of(&name, &info) else {
                        panic!("{device} has no place");
                    };
                    let there = inventory.live.iter().any(|mig| {
                        mig.parent == info.uuid
                            && mig.placement == placement
                            && mig.compute_instance.is_some()
                    });
                    assert!(
                        there,
                        "{}: {} has {device}, which is not there: {live:?}",
                        self.name, given.claim
                    );
                }
            }
        }
        let ledger = self.ledger();
        for (gpu, placement) in &live {
            let known = ledger.claims.values().flat_map(|record| &record.devices).any(|device| {
                let same = device.name().is_some_and(|name| name.minor() == *gpu);
                same && device.partition.as_ref().is_some_and(|partition| partition.placement == *placement)
            });
            assert!(known, "{}: GPU {gpu} has an instance at {placement:?} that nobody knows", self.name);
        }
    }

    /// Everything ended: nothing of any claim is left on the node, and every release was counted.
    pub async fn settle(&mut self, cluster: &Cluster) {
        for _ in 0..1000 {
            self.give_back(&BTreeSet::new());
            self.review(cluster).await;
            self.talk(cluster).await;
            if self.given.is_empty() && self.ledger().claims.is_empty() && self.is_quits() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(self.is_quits(), "{}: {} releases are not acknowledged", self.name, self.owed);
        assert!(self.ledger().claims.is_empty(), "{}: left: {:?}", self.name, self.ledger().claims);
        assert_eq!(self.gpus.inventory().unwrap().live, [], "{}: leaked instances", self.name);
        for place in ["cdi", "data/shares"] {
            let left = fs::read_dir(self.dir.path().join(place)).into_iter().flatten().count();
            assert_eq!(left, 0, "{}: leaked files in {place}", self.name);
        }
    }
}

/// An agent process on a node's directory and GPUs. Before and after each step the dice say whether it is
/// killed there; a seed of 0: never.
fn agent(dir: &Path, gpus: &FakeGpus, steps: &Arc<AtomicU64>) -> Node {
    let root = dir.join("root");
    let data = dir.join("data");
    let state = Arc::clone(steps);
    let probe = Probe::new(move |_| {
        let mut dice = Dice(state.load(Ordering::SeqCst));
        if dice.0 != 0 {
            let dies = dice.roll(DEATHS) == 0;
            state.store(dice.0, Ordering::SeqCst);
            if dies {
                std::panic::panic_any(Killed);
            }
        }
    });
    Node {
        store: Store::new(data.clone()),
        machine: Machine {
            gpus: Arc::new(gpus.clone()),
            cdi: SpecDir::new(dir.join("cdi")),
            driver: Driver::new(Roots { driver: root.clone(), host: root.clone(), proc: root.join("proc") }),
            site: Site {
                driver: fixtures::DRIVER.to_owned(),
                capabilities: DriverCapabilities::usual(),
                mounts: Vec::new(),
                shares_dir: data.join("shares"),
                oci_hook: None,
            },
            regions: RegionStorage::Directory,
            mps: Mps::new(data.join("mps"), RegionStorage::Directory, Duration::from_secs(5)),
            labels: Labels::default(),
            limiter_dir: dir.join("limiter"),
            data_dir: data,
            vfio: Vfio::new(false, &root.join("sys"), &root.join("proc"), None),
            proc_root: root.join("proc"),
            sys_root: root.join("sys"),
            probe,
        },
        slots: 10,
        oversubscribe_at_most: 0,
        lock_timeout: Duration::from_secs(5),
        report_usage: true,
        device_metadata: false,
        hold_at_most: Duration::from_secs(3600),
        partitioning: Shared::new(Partitioning::OnDemand),
        unclaimed: Unclaimed::Adopt,
        wish: Wish::default(),
        given_back: GivenBack::default(),
    }
}

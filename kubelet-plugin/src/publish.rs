//! Keeps the node's ResourceSlices in the API as they should be.
//!
//! The publisher is level-triggered. Whatever wakes the loop (a change of the node, of this driver's slices,
//! of the Node object, a timer), it computes the desired slices, reads the actual ones, and writes the
//! difference. The kubelet deletes all slices of its node when it starts; the watch sees that, and the loop
//! writes them again. The loop never gives up: every error is retried, with growing pauses.
//!
//! While two instances run side by side, the one that holds `publish.lock` publishes; the other stands by.

mod acknowledge;
mod basis;
mod call;
mod cordon;
mod former;
mod lease;
mod memory;
mod mps;
mod others;
mod phase;
mod pod_resources;
mod wakes;
mod write;

pub use call::PublishError;

use basis::Basis;
use call::call;
use lease::ControllerLease;
use memory::Memory;
use others::Others;
use wakes::Wake;

use crate::allocation_mode::{Target, Waits};
use crate::driver_unload;
use crate::events::Events;
use crate::health::{Health, Monitor};
use crate::http::Readiness;
use crate::metrics::{Gate, Metrics, Mode};
use crate::notice;
use crate::partitioning::{self, Partitioning};
use crate::prepare::{Node, Overview};
use crate::reasons;
use crate::resourceslice::{Dropped, Owner};
use aliquot_model::layout::{self, AllocatorMode, ServerFeatures, Slice, TaintEffect};
use aliquot_model::names;
use aliquot_model::{DeviceKind, DeviceName};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node as ApiNode;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::ListParams;
use kube::{Api, Client};
use nix::fcntl::{Flock, FlockArg};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(60);
/// The time in which events are collected and answered together.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// The name of the publisher's entry in `/healthz`.
const NOTE: &str = "publish";
/// The number of failures in a row after which any error is reported.
const LASTING: u32 = 5;
const STANDBY_POLL: Duration = Duration::from_secs(1);

/// The settings that do not change while the agent runs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The name of the driver.
    pub driver: String,
    /// The name of the node.
    pub node: String,
    /// The allocator mode unless the Node says otherwise.
    pub mode: Target,
    /// The largest number of tenants of a shared GPU, and of a shared partition.
    pub slots: u32,
    /// True if shares of partitions are published.
    pub mig_shares: bool,
    /// The waiting times of a hand-over.
    pub waits: Waits,
    /// The time for which another driver that gave out the node's GPUs has to be away.
    pub other_driver_grace: Duration,
    /// The kubelet's pod-resources socket, which lists the devices of pods.
    pub pod_resources_socket: PathBuf,
    /// The namespace and name of the agent's own pod, if it runs in one.
    pub own_pod: Option<(String, String)>,
    /// The namespace of the controller's Lease.
    pub lease_namespace: String,
    /// The name of the controller's Lease.
    pub lease_name: String,
    /// The longest interval between full comparisons.
    pub resync: Duration,
    /// The data directory.
    pub data_dir: PathBuf,
}

/// The publisher.
pub struct Publisher {
    settings: Settings,
    client: Client,
    events: Events,
    metrics: Metrics,
    readiness: Arc<Readiness>,
    node: Arc<Node>,
    /// The time at which the API was last asked which claims were given GPUs that are no longer here.
    asked_for_former: Option<Instant>,
    partitioning: partitioning::Shared,
    /// Notified when `partitioning` changes, because partitioning decides which partitions are foreign.
    changed: Arc<Notify>,
    overview: watch::Receiver<Arc<Overview>>,
    vanished: watch::Receiver<Arc<BTreeSet<String>>>,
    monitor: Monitor,
    health: watch::Receiver<Arc<Health>>,
    /// The names of the published devices, for the health service.
    published: watch::Sender<Arc<Vec<DeviceName>>>,
    memory: Memory,
    /// The pool generation that was last seen or written completely.
    generation: i64,
    /// The features that the server keeps, with the server version for which they were found out.
    server: Option<(String, ServerFeatures)>,
    lease: ControllerLease,
    told_cordons: cordon::Told,
    told_others: Others,
    /// True if it is known that no pod has GPUs from another driver.
    nobody_else: bool,
    /// The acknowledgement annotations that were already reported as ignored.
    told_acknowledgements: BTreeSet<String>,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Publisher {
    /// Creates a publisher; [`Publisher::run`] does the work.
    #[expect(clippy::too_many_arguments, reason = "wiring, once")]
    pub fn new(
        settings: Settings,
        client: Client,
        events: Events,
        metrics: Metrics,
        readiness: Arc<Readiness>,
        node: Arc<Node>,
        changed: Arc<Notify>,
        overview: watch::Receiver<Arc<Overview>>,
        vanished: watch::Receiver<Arc<BTreeSet<String>>>,
        monitor: Monitor,
        published: watch::Sender<Arc<Vec<DeviceName>>>,
    ) -> Self {
        Self {
            settings,
            client,
            events,
            metrics,
            readiness,
            partitioning: node.partitioning.clone(),
            node,
            asked_for_former: None,
            changed,
            overview,
            vanished,
            health: monitor.subscribe(),
            monitor,
            published,
            memory: Memory::default(),
            generation: 0,
            server: None,
            lease: ControllerLease::default(),
            told_cordons: cordon::Told::default(),
            told_others: Others::default(),
            nobody_else: false,
            told_acknowledgements: BTreeSet::new(),
        }
    }

    /// Publishes until cancelled. The slices stay: pods go on, and the kubelet removes the slices if no
    /// instance comes back.
    pub async fn run(mut self, cancel: CancellationToken) {
        let Some(_lock) = self.stand_by(&cancel).await else { return };
        self.memory = Memory::load(&self.settings.data_dir);
        let mut node: Option<Box<ApiNode>> = None;
        let mut wakes = self.wakes();
        let mut retry = FIRST_RETRY;
        let mut failures = 0u32;
        // `due` is when to publish in any case; `soon` is when to check whether the node's own state requires
        // it.
        let (mut due, mut soon) = (Instant::now(), None::<Instant>);
        // The basis that was last published, as long as only the node's own state has woken the loop.
        let mut published: Option<Basis> = None;
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                () = sleep_until(soon.map_or(due, |soon| soon.min(due))) => {}
                Some(wake) = wakes.next() => {
                    if let Wake::Node(seen) = wake {
                        node = seen;
                    }
                    due = due.min(Instant::now() + DEBOUNCE);
                    continue;
                }
                Ok(()) = self.overview.changed() => {
                    soon.get_or_insert_with(|| Instant::now() + DEBOUNCE);
                    continue;
                }
                Ok(()) = self.health.changed() => {
                    soon.get_or_insert_with(|| Instant::now() + DEBOUNCE);
                    continue;
                }
                Ok(()) = self.vanished.changed() => {
                    soon.get_or_insert_with(|| Instant::now() + DEBOUNCE);
                    continue;
                }
            }
            soon = None;
            let basis = self.basis();
            if Instant::now() < due && basis.is_some() && basis == published {
                continue;
            }
            let outcome = tokio::select! {
                () = cancel.cancelled() => return,
                outcome = self.reconcile(node.as_deref(), basis.clone()) => outcome,
            };
            published = basis.filter(|_| outcome.is_ok());
            match outcome {
                Ok(wake_at) => {
                    retry = FIRST_RETRY;
                    failures = 0;
                    self.readiness.notes.set(NOTE, Vec::new());
                    self.readiness.published.store(true, Ordering::Relaxed);
                    due = Instant::now() + wake_at.unwrap_or(self.settings.resync);
                }
                Err(error) => {
                    self.metrics.publish_errors.inc();
                    failures = failures.saturating_add(1);
                    self.report(&error, failures);
                    due = Instant::now() + retry;
                    retry = (retry * 2).min(LAST_RETRY);
                }
            }
        }
    }

    /// Reports the error of the `failures`th failure in a row: a refusal at once, any other error when it
    /// lasts.
    fn report(&self, error: &PublishError, failures: u32) {
        let (reason, note) = match error.code() {
            Some(403 | 422) => (reasons::PUBLISH_REFUSED, notice::refused(error)),
            _ if failures >= LASTING => (reasons::PUBLISH_FAILED, notice::not_published(error)),
            // Another client wrote in between; the next look sees it.
            Some(409) => return tracing::debug!(%error, "publishing again after a conflict"),
            _ => return tracing::warn!(%error, "not published"),
        };
        self.readiness.notes.set(NOTE, vec![note.clone()]);
        self.events.node_warning(reason, note);
    }

    /// Waits until no other instance publishes. Returns the lock, or `None` if cancelled.
    async fn stand_by(&self, cancel: &CancellationToken) -> Option<Flock<File>> {
        let path = self.settings.data_dir.join("publish.lock");
        let mut said = false;
        loop {
            // The instance that publishes may have learned what the server keeps.
            self.partitioning.set(Memory::load(&self.settings.data_dir).partitioning);
            let _ = fs::create_dir_all(&self.settings.data_dir);
            match OpenOptions::new().write(true).create(true).truncate(false).open(&path) {
                Ok(file) => match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                    Ok(lock) => return Some(lock),
                    Err(_) if !said => {
                        tracing::info!("another instance publishes, standing by");
                        said = true;
                        self.readiness.published.store(true, Ordering::Relaxed);
                    }
                    Err(_) => {}
                },
                Err(error) => tracing::warn!(path = %path.display(), %error, "cannot open"),
            }
            tokio::select! {
                () = cancel.cancelled() => return None,
                () = tokio::time::sleep(STANDBY_POLL) => {}
            }
        }
    }

    fn save_memory(&self) -> Result<(), PublishError> {
        Ok(self.memory.save(&self.settings.data_dir)?)
    }

    fn slices_api(&self) -> Api<ResourceSlice> {
        Api::all(self.client.clone())
    }

    fn slices_selector(&self) -> String {
        format!("spec.nodeName={}", self.settings.node)
    }

    /// Returns the basis of the slices from the last look at the node. Without any look at the hardware there
    /// is none, and the published slices stay, also where some GPUs are known from before. A node without a
    /// GPU on its bus has nothing to publish.
    fn basis(&mut self) -> Option<Basis> {
        let overview = Arc::clone(&self.overview.borrow_and_update());
        let opened = self.readiness.gpus.load(Ordering::Relaxed);
        let known = opened && (overview.inventory.is_some() || !overview.absent.is_empty());
        if !known && !overview.withdrawn {
            return None;
        }
        let health = Arc::clone(&self.health.borrow_and_update());
        let vanished = Arc::clone(&self.vanished.borrow_and_update());
        let (driver, xids) = (&self.settings.driver, self.monitor.xids());
        Some(Basis::of(&overview, &health, &vanished, driver, xids, &self.node.machine.mps))
    }

    /// Makes the slices in the API match a look. Returns the longest time until the next look.
    async fn reconcile(
        &mut self,
        node: Option<&ApiNode>,
        basis: Option<Basis>,
    ) -> Result<Option<Duration>, PublishError> {
        let Some(basis) = basis else { return Ok(None) };
        let withdrawn = self.overview.borrow().withdrawn;
        let Basis { gpus: all, here, passed, passthrough, mps, shared_partitions, not_asked, has_former } =
            basis;
        let node = match node {
            Some(node) => node.clone(),
            None => self.get_node().await?,
        };
        self.acknowledge(&node);
        let mut owner = Owner {
            driver: self.settings.driver.clone(),
            pool: names::pool_name(&self.settings.driver, &self.settings.node),
            node: self.settings.node.clone(),
            node_uid: node.metadata.uid.clone().unwrap_or_default(),
            hand_over_until: None,
        };
        let mut features = self.features().await?;
        let cordons = cordon::read(&node);
        let paused = driver_unload::asked(&node).is_some();
        loop {
            let (actual, theirs): (Vec<_>, Vec<_>) =
                self.list().await?.into_iter().partition(|slice| slice.spec.driver == owner.driver);
            let mut gpus = all.clone();
            let (others, others_again) = self.others(&node, &theirs).await?;
            if withdrawn && !actual.is_empty() {
                self.events.node_warning(reasons::GPUS_WITHDRAWN, notice::WITHDRAWN.to_owned());
            }
            self.note_told_cordons(&actual, &gpus);
            cordon::apply(&mut gpus, &cordons, &owner.driver, features);
            if !features.taints {
                // Without taints there is no other way to keep claims off an ill GPU.
                gpus.retain(|gpu| gpu.taints.iter().all(|taint| taint.effect == TaintEffect::None));
            }
            if paused {
                cordon::close(&mut gpus, |_| Some(driver_unload::taint(&owner.driver)), features);
            }
            cordon::close(&mut gpus, |_| others.taint(&owner.driver), features);
            let (phase, wake) = self.decide_phase(&node, &actual, features).await?;
            owner.hand_over_until = phase.until(&self.settings.waits);
            let options = layout::Options {
                driver: owner.driver.clone(),
                mode: phase.mode(),
                slots: self.settings.slots,
                mps: mps.clone(),
                mig_shares: self.settings.mig_shares || shared_partitions,
                passthrough: passthrough.clone(),
            };
            let mut desired = layout::publish(&gpus, features, &options);
            if withdrawn {
                // Not even a slice without devices, as most nodes may have no GPU.
                desired.clear();
            }
            // Admin devices carry no taints. Admin access opens the driver, too, and a GPU that a virtual
            // machine has is not with the driver.
            let watched = |name: &DeviceName| !paused && !passed.contains(&name.minor());
            for slice in &mut desired {
                slice.devices.retain(|device| device.kind() != DeviceKind::Admin || watched(&device.name));
            }
            let dropped = self.write(&actual, &desired, &owner, features, phase.mode()).await?;
            if dropped.any() {
                features = self.reduce(features, dropped);
                continue;
            }
            self.note_partitioning(features)?;
            self.tell_cordons(&cordons, &here, features);
            self.tell_others(others);
            self.note_published(&desired, phase.mode());
            let again = self.note_hand_over(&desired, phase)?;
            self.ask_for_former(not_asked, has_former, &owner.pool).await?;
            let wake = wake.into_iter().chain(others_again).min();
            return Ok(if again { Some(Duration::ZERO) } else { wake });
        }
    }

    async fn get_node(&self) -> Result<ApiNode, PublishError> {
        let api: Api<ApiNode> = Api::all(self.client.clone());
        let node = call("read the Node", api.get_opt(&self.settings.node)).await?;
        node.ok_or_else(|| PublishError::NoNode(self.settings.node.clone()))
    }

    async fn list(&self) -> Result<Vec<ResourceSlice>, PublishError> {
        let params = ListParams::default().fields(&self.slices_selector());
        let list = call("list the node's ResourceSlices", self.slices_api().list(&params)).await?;
        Ok(list.items)
    }

    /// Returns the features that the server keeps. They are found out anew when the server's version changes.
    async fn features(&mut self) -> Result<ServerFeatures, PublishError> {
        let version = call("read the server's version", self.client.apiserver_version()).await?;
        if let Some((known, features)) = &self.server
            && *known == version.git_version
        {
            return Ok(*features);
        }
        // A server that does not give its version is taken for a new one; fields that it drops are seen
        // later.
        let digits: String = version.minor.chars().take_while(char::is_ascii_digit).collect();
        let features = ServerFeatures::all_of_minor(digits.parse().unwrap_or(u32::MAX));
        self.server = Some((version.git_version, features));
        Ok(features)
    }

    /// Goes on without the features that the server dropped, and reports it.
    fn reduce(&mut self, features: ServerFeatures, dropped: Dropped) -> ServerFeatures {
        let features = dropped.without(features);
        let gates = dropped.gates().join(", ");
        let mut offer = Vec::new();
        if dropped.counters {
            offer.push("one exclusive device per GPU (whole, or its present MIG devices) is published");
        }
        if dropped.consumable_capacity {
            offer.push("no shares are published");
        }
        if dropped.taints {
            offer.push("kube-scheduler allocates, whatever the mode is set to");
            offer.push("a GPU that is ill is not published, and pods that use it are not evicted");
        }
        self.events.node_warning(reasons::FEATURES_OFF, notice::features_off(&gates, &offer));
        if let Some((_, known)) = &mut self.server {
            *known = features;
        }
        features
    }

    /// Notes the features that the server keeps, as shown by what was published without loss or was there
    /// already.
    fn note_partitioning(&mut self, features: ServerFeatures) -> Result<(), PublishError> {
        self.monitor.note_taints(features.taints);
        for (gate, on) in [
            ("DRAPartitionableDevices", features.counters),
            ("DRAConsumableCapacity", features.consumable_capacity),
            ("DRADeviceTaints", features.taints),
        ] {
            self.metrics.server_features.get_or_create(&Gate { gate }).set(i64::from(on));
        }
        let now = if features.counters { Partitioning::OnDemand } else { Partitioning::Fixed };
        let changed = self.partitioning.get() != now;
        self.partitioning.set(now);
        if self.memory.partitioning != now {
            self.memory.partitioning = now;
            self.save_memory()?;
        }
        if changed {
            self.changed.notify_one();
        }
        Ok(())
    }

    fn note_published(&self, desired: &[Slice], mode: AllocatorMode) {
        self.metrics.slices.set(i64::try_from(desired.len()).unwrap_or(i64::MAX));
        for (name, which) in [
            ("controller", AllocatorMode::Controller),
            ("hand-over", AllocatorMode::HandOver),
            ("scheduler", AllocatorMode::Scheduler),
        ] {
            self.metrics.mode.get_or_create(&Mode { mode: name }).set(i64::from(mode == which));
        }
        let names: Vec<DeviceName> =
            desired.iter().flat_map(|slice| &slice.devices).map(|device| device.name.clone()).collect();
        self.published.send_if_modified(|published| {
            let changed = **published != names;
            if changed {
                *published = Arc::new(names);
            }
            changed
        });
    }
}

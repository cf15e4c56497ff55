//! Watches the node's GPUs: combines hardware and ledger, listens for errors, and reports GPUs that cannot be
//! read.

mod bus;
mod follow;
mod gone;
mod listen;
mod load;
mod told;

use crate::events::Events;
use crate::health::state::Look;
use crate::health::{Monitor, Verdict};
use crate::http::Readiness;
use crate::ledger::Lost;
use crate::metrics::{GpuFault, Kind, Metrics};
use crate::notice;
use crate::prepare::{Node, Overview, PrepareError};
use crate::reasons;
use aliquot_model::layout::TaintEffect;
use aliquot_model::{DeviceKind, GpuUuid};
use aliquot_nvml::{EventKind, GpuError, GpuEvent, GpuHealth, Gpus, Inventory};
use follow::Followed;
use jiff::Timestamp;
use listen::Listeners;
use load::module_load;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use told::Told;

const DEBOUNCE: Duration = Duration::from_millis(50);
/// The longest interval between looks while the driver does not answer (it may answer again at any time), or
/// while a CDI spec may name other devices than it should.
const AWAY: Duration = Duration::from_secs(5);
/// The shortest interval between looks that are caused by changes of the ledger; less if the look interval is
/// short.
const REST: Duration = Duration::from_secs(1);
/// The largest number of GPU errors that wait to be handled.
const WAITING: usize = 64;
/// The name of the driver's entry in `/healthz`.
pub(crate) const NOTE: &str = "driver";

/// The task that watches the GPUs.
#[derive(Debug)]
pub struct Watcher {
    /// The node.
    pub node: Arc<Node>,
    /// The metrics.
    pub metrics: Metrics,
    /// The event recorder.
    pub events: Events,
    /// The channel for the result of each look.
    pub overview: watch::Sender<Arc<Overview>>,
    /// The health of the GPUs.
    pub health: Monitor,
    /// The path of `/sys`.
    pub sys_root: PathBuf,
    /// The state for `/healthz`: its notes, and whether NVML was opened.
    pub readiness: Arc<Readiness>,
    /// Notified after a change of the ledger.
    pub changed: Arc<Notify>,
    /// The longest interval between looks.
    pub interval: Duration,
}

impl Watcher {
    /// Runs until cancelled.
    pub async fn run(self, cancel: CancellationToken) {
        let (sender, mut errors) = mpsc::channel::<GpuEvent>(WAITING);
        let mut told = Told::default();
        let mut listeners = Listeners::new(Arc::clone(&self.node.machine.gpus), sender, cancel.clone());
        let mut reported: BTreeSet<String> = BTreeSet::new();
        let mut answered = true;
        let mut followed = Followed::default();
        loop {
            let mut interval = self.interval;
            let rested = Instant::now() + REST.min(interval / 10);
            let load = self.driver_load();
            if let Some(overview) = self.look(&mut reported, &listeners).await {
                let gpus = overview.inventory.iter().flat_map(|inventory| &inventory.gpus);
                let heard = gpus.map(|gpu| &gpu.uuid).filter(|gpu| !overview.passed.contains(*gpu));
                listeners.follow(&heard.cloned().collect());
                let answers = overview.inventory.is_some();
                if answers && !answered {
                    self.events
                        .node_normal(reasons::NVML_ANSWERS, "the node's GPUs can be read again".to_owned());
                }
                answered = answers;
                let follows = self.follow_numbers(&mut followed, &overview).await;
                if !answers || !follows {
                    interval = interval.min(AWAY);
                }
            } else {
                interval = interval.min(AWAY);
            }
            {
                let changed = self.changed_after(rested);
                let due = self.wait_or_reload(interval, &load);
                tokio::pin!(changed, due);
                loop {
                    tokio::select! {
                        () = cancel.cancelled() => return,
                        () = &mut changed => break,
                        () = &mut due => break,
                        Some(event) = errors.recv() => {
                            // All waiting errors are handled together, so that a GPU whose programs fault all
                            // the time does not delay the errors of others.
                            let waiting = std::iter::from_fn(|| errors.try_recv().ok()).take(WAITING);
                            let all: Vec<GpuEvent> = std::iter::once(event).chain(waiting).collect();
                            let mut taints = false;
                            for event in &all {
                                taints |= matches!(self.fault(event, &mut told), Verdict::Taint(_));
                            }
                            if taints {
                                break;
                            }
                        }
                    }
                }
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    }

    /// Waits until the ledger was changed and the node has rested from the last look. While claims come and
    /// go one after the other, reading all GPUs for each of them would hold the claims up.
    async fn changed_after(&self, rested: Instant) {
        self.changed.notified().await;
        tokio::time::sleep_until(rested).await;
    }

    /// Makes one look. Returns `None` if the lock or the checkpoint is not available, or if NVML is closed
    /// for a moment.
    async fn look(&self, reported: &mut BTreeSet<String>, listeners: &Listeners) -> Option<Arc<Overview>> {
        let (node, metrics) = (Arc::clone(&self.node), self.metrics.clone());
        let looked = tokio::task::spawn_blocking(move || {
            let (overview, error) = node.overview()?;
            crate::share_metrics::measure(&metrics, &node.machine.site.shares_dir, &overview.ledger);
            let said = overview
                .inventory
                .as_ref()
                .map(|inventory| health_of(&*node.machine.gpus, inventory, &overview.passed));
            Ok::<_, PrepareError>((overview, error, said.unwrap_or_default()))
        });
        let (mut overview, error, said) = match looked.await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot read the node's state");
                return None;
            }
            Err(error) => {
                tracing::error!(%error, "reading the node's state ended abnormally");
                return None;
            }
        };
        let unreadable = overview.inventory.iter().flat_map(|inventory| &inventory.unreadable);
        let mut errors = error.iter().chain(unreadable.map(|gpu| &gpu.error));
        if errors.any(GpuError::is_let_go) && self.node.wish.label().is_none() {
            // This agent closed NVML for a moment, while a GPU goes to a virtual machine or comes back. The
            // task that closed it wakes this one, and the earlier result stays.
            return None;
        }
        let unheard: BTreeSet<GpuUuid> = listeners.unheard().difference(&overview.passed).cloned().collect();
        self.note_health(&overview, error.as_ref(), &said, &unheard);
        overview.absent = self.health.now().absent().cloned().collect();
        let mut seen = BTreeSet::new();
        let planned = error.as_ref().is_some_and(GpuError::is_let_go);
        let opened = &self.readiness.gpus;
        opened.fetch_or(overview.inventory.is_some(), Ordering::Relaxed);
        let was_open = opened.load(Ordering::Relaxed);
        // A node that had GPUs and has none on its bus has lost them, and this must be reported.
        let had = !overview.absent.is_empty()
            || !overview.ledger.claims.is_empty()
            || !overview.ledger.bindings.is_empty();
        let no_gpu = error.is_some() && !was_open && bus::has_no_gpu(&self.sys_root);
        let ledger = &overview.ledger;
        let unused = ledger.claims.is_empty() && ledger.newer.is_empty() && ledger.lost.is_none();
        overview.withdrawn = no_gpu && unused && overview.unaccounted.is_empty();
        let bare = no_gpu && !had;
        self.readiness.bare.store(bare, Ordering::Relaxed);
        self.readiness.paused.store(planned, Ordering::Relaxed);
        let away = error.filter(|_| !bare).map(|error| match was_open {
            true => notice::no_driver(&error),
            false => notice::no_driver_yet(&error),
        });
        let note = if bare { Some(notice::NO_GPU.to_owned()) } else { away.clone() };
        self.readiness.notes.set(NOTE, note.into_iter().collect());
        if let Some(away) = away {
            seen.insert(away);
            // The administrator asked for it, so there is no event.
            if !planned {
                self.say_once(reported, &seen, reasons::NVML_UNAVAILABLE);
            }
        } else if let Some(inventory) = &overview.inventory {
            seen.extend(inventory.unreadable.iter().map(|gpu| {
                // A lost GPU does not report its UUID.
                let last = overview.absent.iter().find(|last| last.info.index == gpu.index);
                let uuid = gpu.uuid.as_ref().or_else(|| last.map(|last| &last.info.uuid));
                let name = uuid.map(|uuid| format!(" {uuid}")).unwrap_or_default();
                format!(
                    "GPU {}{name} cannot be read, and takes no other claim until it can: {}",
                    gpu.index, gpu.error
                )
            }));
            self.say_once(reported, &seen, reasons::GPU_UNREADABLE);
        }
        self.say_gone(reported, &mut seen, &overview);
        self.say_reached(reported, &mut seen, &overview);
        let missing = overview.offers.iter().filter_map(|(gpu, offer)| {
            let reason = offer.as_ref().err()?;
            Some(format!("GPU {gpu} cannot be given to virtual machines: {reason}"))
        });
        self.readiness.notes.set("vfio", missing.collect());
        self.say_state(reported, &mut seen, &overview);
        *reported = seen;
        self.measure(&overview);
        let overview = Arc::new(overview);
        self.overview.send_replace(Arc::clone(&overview));
        Some(overview)
    }

    /// Takes the look into the GPUs' health.
    fn note_health(
        &self,
        overview: &Overview,
        error: Option<&GpuError>,
        said: &BTreeMap<GpuUuid, GpuHealth>,
        unheard: &BTreeSet<GpuUuid>,
    ) {
        let why = error.map_or_else(|| "the GPUs were not read".to_owned(), ToString::to_string);
        let look = Look {
            inventory: overview.inventory.as_ref().ok_or(why.as_str()),
            said,
            unheard,
            module: module_load(&self.sys_root),
            lost_is_lost: !overview.inventory.as_ref().is_some_and(all_lost),
            now: Timestamp::now(),
        };
        self.health.change(|health, xids| health.look(&look, xids));
    }

    /// Reports damage and loss of the checkpoint, and what a newer release left in it.
    fn say_state(&self, reported: &BTreeSet<String>, seen: &mut BTreeSet<String>, overview: &Overview) {
        for damage in self.node.store.take_damage() {
            self.events.node_warning(reasons::CHECKPOINT_DAMAGED, notice::damage(&damage));
        }
        let ledger = &overview.ledger;
        let release = ledger.beside.release_or_unknown();
        let newer: BTreeSet<String> = ledger
            .newer
            .values()
            .map(|record| {
                format!(
                    "claim {} was written by a newer release ({release}) and is kept as it is, with the hardware that it \
                     holds, until that release runs here again or the claim is unprepared; not understood: {}",
                    record.claim,
                    record.why()
                )
            })
            .collect();
        self.say_once(reported, &newer, reasons::CHECKPOINT_NEWER);
        self.readiness.notes.set("newer", newer.iter().cloned().collect());
        seen.extend(newer);
        let lost: BTreeSet<String> =
            ledger.lost.iter().filter(|lost| lost.is_loss()).map(notice::loss).collect();
        self.say_once(reported, &lost, reasons::LEDGER_LOST);
        self.readiness.notes.set("lost", lost.iter().cloned().collect());
        seen.extend(lost);
    }

    fn say_once(&self, before: &BTreeSet<String>, now: &BTreeSet<String>, reason: &str) {
        for note in now.difference(before) {
            self.events.node_warning(reason, note.clone());
        }
    }

    fn measure(&self, overview: &Overview) {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        if let Some(inventory) = &overview.inventory {
            self.metrics.gpus.set(count(inventory.gpus.len()));
            self.metrics.unreadable_gpus.set(count(inventory.unreadable.len()));
        }
        self.metrics.foreign_instances.set(count(overview.foreign.len()));
        self.metrics.newer_claims.set(count(overview.ledger.newer.len()));
        let lost = overview.ledger.lost.as_ref().is_some_and(Lost::is_loss);
        self.metrics.ledger_lost.set(i64::from(lost));
        self.metrics
            .prepared_claims
            .set(count(overview.ledger.claims.values().filter(|record| !record.is_parked()).count()));
        let parked = overview.ledger.claims.values().filter(|record| record.is_parked()).count();
        self.metrics.parked_claims.set(count(parked));
        for kind in DeviceKind::ALL {
            let devices = overview.ledger.claims.values().flat_map(|record| &record.devices);
            let of_kind = devices.filter(|device| device.kind() == Some(kind)).count();
            self.metrics.prepared_devices.get_or_create(&Kind { kind: kind.as_str() }).set(count(of_kind));
        }
    }

    /// Takes in an error of a GPU. Returns the verdict on it.
    fn fault(&self, event: &GpuEvent, told: &mut Told) -> Verdict {
        let fault = match event.kind {
            EventKind::Xid(number) => format!("xid-{number}"),
            EventKind::EccSingleBit => "ecc-single-bit".to_owned(),
            EventKind::EccDoubleBit => "ecc-double-bit".to_owned(),
            EventKind::Other(bit) => format!("event-{bit:#x}"),
        };
        let gpu = event.gpu.as_ref().map_or_else(|| "unknown".to_owned(), ToString::to_string);
        self.metrics.gpu_faults.get_or_create(&GpuFault { gpu: gpu.clone(), fault: fault.clone() }).inc();
        let verdict = match event.kind {
            EventKind::Xid(number) => self.health.xids().verdict(number),
            EventKind::EccDoubleBit => Verdict::Taint(TaintEffect::NoSchedule),
            EventKind::EccSingleBit | EventKind::Other(_) => Verdict::Ignore,
        };
        self.health.change(|health, xids| health.event(event, xids, Timestamp::now()));
        // The number of events is limited, as a program can fault as often as it likes.
        if told.is_due((gpu, fault.clone()), Instant::now()) {
            self.events.node_warning(
                reasons::GPU_ERROR,
                notice::fault(event, &fault, verdict, self.health.keeps_taints()),
            );
        }
        verdict
    }
}

/// Reads the health that the GPUs report, all at the same time, so that a GPU that hangs does not delay the
/// others. GPUs that do not answer are left out.
fn health_of(
    gpus: &dyn Gpus,
    inventory: &Inventory,
    passed: &BTreeSet<GpuUuid>,
) -> BTreeMap<GpuUuid, GpuHealth> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = inventory
            .gpus
            .iter()
            .filter(|info| !passed.contains(&info.uuid))
            .map(|info| (&info.uuid, scope.spawn(move || gpus.health(&info.uuid))))
            .collect();
        let answers = asked.into_iter().filter_map(|(gpu, answer)| match answer.join() {
            Ok(Ok(health)) => Some((gpu.clone(), health)),
            Ok(Err(error)) => {
                tracing::debug!(gpu.uuid = %gpu, %error, "the GPU does not tell its health");
                None
            }
            Err(_) => None,
        });
        answers.collect()
    })
}

/// Returns true if all GPUs of a node with several are reported as lost: then the library is more likely to
/// be at fault.
fn all_lost(inventory: &Inventory) -> bool {
    let lost = inventory.unreadable.iter().filter(|gpu| gpu.error.is_lost()).count();
    inventory.gpus.is_empty() && lost > 1 && lost == inventory.unreadable.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_nvml::fake::{FakeGpus, h100_80};

    #[test]
    fn that_every_gpu_of_several_is_lost_is_not_believed_and_that_one_is_lost_is() {
        let gpus = FakeGpus::new([h100_80(0), h100_80(1)]);
        assert!(!all_lost(&gpus.inventory().unwrap()));
        gpus.lose(&h100_80(0).uuid);
        assert!(!all_lost(&gpus.inventory().unwrap()));
        gpus.lose(&h100_80(1).uuid);
        assert!(all_lost(&gpus.inventory().unwrap()));
        let alone = FakeGpus::new([h100_80(0)]);
        alone.lose(&h100_80(0).uuid);
        assert!(!all_lost(&alone.inventory().unwrap()), "of one GPU nobody can tell");
    }
}

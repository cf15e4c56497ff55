//! Watches the node's GPUs: gathers hardware and ledger, listens for errors, reports what cannot be read.

use crate::events::Events;
use crate::health::Faults;
use crate::http::Notes;
use crate::ledger::Lost;
use crate::metrics::{GpuFault, Kind, Metrics};
use crate::notice;
use crate::prepare::{Node, Overview};
use crate::reasons;
use aliquot_model::{DeviceKind, GpuUuid};
use aliquot_nvml::{EventKind, GpuEvent, Gpus};
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

const DEBOUNCE: Duration = Duration::from_millis(50);
const LISTEN: Duration = Duration::from_secs(1);

/// The task.
#[derive(Debug)]
pub struct Watcher {
    /// The node.
    pub node: Arc<Node>,
    /// Metrics.
    pub metrics: Metrics,
    /// Events.
    pub events: Events,
    /// Where the result goes.
    pub overview: watch::Sender<Arc<Overview>>,
    /// Where errors of GPUs go.
    pub faults: watch::Sender<Arc<Faults>>,
    /// What `/healthz` names.
    pub notes: Notes,
    /// Wakes us after a change of the ledger.
    pub changed: Arc<Notify>,
    /// Look at least this often.
    pub interval: Duration,
}

impl Watcher {
    /// Runs until cancelled.
    pub async fn run(self, cancel: CancellationToken) {
        let (sender, mut errors) = mpsc::channel::<GpuEvent>(64);
        let mut listeners: BTreeMap<GpuUuid, CancellationToken> = BTreeMap::new();
        let mut reported: BTreeSet<String> = BTreeSet::new();
        loop {
            if let Some(overview) = self.look(&mut reported).await {
                let gpus: BTreeSet<GpuUuid> =
                    overview.inventory.iter().flat_map(|i| &i.gpus).map(|gpu| gpu.uuid.clone()).collect();
                listeners.retain(|gpu, token| {
                    let stays = gpus.contains(gpu);
                    if !stays {
                        token.cancel();
                    }
                    stays
                });
                for gpu in gpus {
                    let (hardware, to) = (Arc::clone(&self.node.machine.gpus), sender.clone());
                    listeners.entry(gpu.clone()).or_insert_with(|| {
                        let token = cancel.child_token();
                        listen(hardware, gpu, to, token.clone());
                        token
                    });
                }
            }
            tokio::select! {
                () = cancel.cancelled() => return,
                () = self.changed.notified() => {}
                () = tokio::time::sleep(self.interval) => {}
                Some(event) = errors.recv() => self.fault(&event),
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    }

    /// One look; `None` if lock or checkpoint could not be had.
    async fn look(&self, reported: &mut BTreeSet<String>) -> Option<Arc<Overview>> {
        let node = Arc::clone(&self.node);
        let looked = tokio::task::spawn_blocking(move || node.overview()).await;
        let (overview, error) = match looked {
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
        let mut seen = BTreeSet::new();
        if let Some(error) = error {
            seen.insert(format!("the node's GPUs cannot be read; what is published stays: {error}"));
            self.say_once(reported, &seen, reasons::NVML_UNAVAILABLE);
        } else if let Some(inventory) = &overview.inventory {
            seen.extend(inventory.unreadable.iter().map(|gpu| {
                let name = gpu.uuid.as_ref().map(ToString::to_string).unwrap_or_default();
                format!("GPU {} {name} is not published: {}", gpu.index, gpu.error)
            }));
            self.say_once(reported, &seen, reasons::GPU_UNREADABLE);
        }
        self.say_state(reported, &mut seen, &overview);
        *reported = seen;
        self.measure(&overview);
        let overview = Arc::new(overview);
        self.overview.send_replace(Arc::clone(&overview));
        Some(overview)
    }

    /// Damage and loss of the checkpoint, and what a newer release left in it.
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
        self.notes.set("newer", newer.iter().cloned().collect());
        seen.extend(newer);
        let lost: BTreeSet<String> =
            ledger.lost.iter().filter(|lost| lost.is_loss()).map(notice::loss).collect();
        self.say_once(reported, &lost, reasons::LEDGER_LOST);
        self.notes.set("lost", lost.iter().cloned().collect());
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
        crate::usage::measure(&self.metrics, &self.node.machine.shares, &overview.ledger);
    }

    fn fault(&self, event: &GpuEvent) {
        let fault = match event.kind {
            EventKind::Xid(number) => format!("xid-{number}"),
            EventKind::EccSingleBit => "ecc-single-bit".to_owned(),
            EventKind::EccDoubleBit => "ecc-double-bit".to_owned(),
            EventKind::Other(bit) => format!("event-{bit:#x}"),
        };
        let gpu = event.gpu.as_ref().map_or_else(|| "unknown".to_owned(), ToString::to_string);
        self.metrics.gpu_faults.get_or_create(&GpuFault { gpu: gpu.clone(), fault: fault.clone() }).inc();
        self.events.node_warning(reasons::GPU_ERROR, notice::fault(event, &fault));
        self.faults.send_modify(|faults| Arc::make_mut(faults).note(event, Timestamp::now()));
    }
}

/// Listens to one GPU on a thread of its own: NVML's wait blocks, and one GPU that hangs must silence neither
/// the others nor the end of the process.
fn listen(gpus: Arc<dyn Gpus>, gpu: GpuUuid, to: mpsc::Sender<GpuEvent>, cancel: CancellationToken) {
    let spawned = std::thread::Builder::new().name("gpu-events".to_owned()).spawn(move || {
        let mut source = match gpus.watch(std::slice::from_ref(&gpu)) {
            Ok(source) => source,
            Err(error) => {
                tracing::warn!(gpu.uuid = %gpu, %error, "errors of this GPU are not listened for");
                return;
            }
        };
        for (gpu, error) in source.unmonitored() {
            tracing::warn!(gpu.uuid = %gpu, %error, "errors of this GPU are not listened for");
        }
        while !cancel.is_cancelled() && !to.is_closed() {
            match source.next(LISTEN) {
                Ok(None) => {}
                Ok(Some(event)) => {
                    if to.blocking_send(event).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(gpu.uuid = %gpu, %error, "listening for errors of this GPU failed");
                    std::thread::sleep(LISTEN);
                }
            }
        }
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "no thread to listen for errors of a GPU");
    }
}

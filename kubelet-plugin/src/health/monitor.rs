//! Holds the health of the GPUs, and reports its changes.

use super::cause::Cause;
use super::file;
use super::state::{Health, Told};
use super::xid::Xids;
use crate::events::Events;
use crate::metrics::{GpuCause, Metrics};
use crate::notice;
use crate::reasons;
use aliquot_model::GpuUuid;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The pause in which errors that come in a storm are collected and stored together.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause before a file that could not be written is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// The health of the GPUs. Clones share the same health.
#[derive(Debug, Clone)]
pub struct Monitor {
    state: watch::Sender<Arc<Health>>,
    xids: Arc<Xids>,
    driver: Arc<str>,
    events: Events,
    metrics: Metrics,
    /// True if the API server keeps taints, as far as is known.
    taints: Arc<AtomicBool>,
}

impl Monitor {
    /// Starts with the health that was known before.
    pub fn new(known: Health, driver: &str, xids: Xids, events: Events, metrics: Metrics) -> Self {
        let monitor = Self {
            state: watch::channel(Arc::new(Health::default())).0,
            xids: Arc::new(xids),
            driver: driver.into(),
            events,
            metrics,
            taints: Arc::new(AtomicBool::new(true)),
        };
        // Known faults were already reported by the process that found them.
        monitor.measure(&Health::default(), &known);
        monitor.state.send_replace(Arc::new(known));
        monitor
    }

    /// Notes whether the API server keeps taints.
    pub fn note_taints(&self, kept: bool) {
        self.taints.store(kept, Ordering::Relaxed);
    }

    /// Returns true if the API server keeps taints.
    pub fn keeps_taints(&self) -> bool {
        self.taints.load(Ordering::Relaxed)
    }

    /// Returns the meaning of XIDs.
    pub fn xids(&self) -> &Arc<Xids> {
        &self.xids
    }

    /// Subscribes to the health and its changes.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Health>> {
        self.state.subscribe()
    }

    /// Returns the health now.
    pub fn now(&self) -> Arc<Health> {
        Arc::clone(&self.state.borrow())
    }

    /// Changes the health, and reports the taints that came and went.
    pub fn change(&self, change: impl FnOnce(&mut Health, &Xids)) {
        self.state.send_if_modified(|held| {
            let mut next = (**held).clone();
            change(&mut next, &self.xids);
            if next == **held {
                return false;
            }
            self.measure(held, &next);
            self.tell(held, &next);
            *held = Arc::new(next);
            true
        });
    }

    /// Sends events for the taints that came and went.
    fn tell(&self, before: &Health, after: &Health) {
        for gpu in gpus(before, after) {
            let was = before.told(gpu, &self.driver, &self.xids);
            let is = after.told(gpu, &self.driver, &self.xids);
            let among = |list: &[Told], told: &Told| list.iter().any(|other| other.taint == told.taint);
            for told in is.iter().filter(|told| !among(&was, told)) {
                self.events
                    .node_warning(reasons::GPU_TAINTED, notice::tainted(gpu, told, self.keeps_taints()));
            }
            for told in was.iter().filter(|told| !among(&is, told)) {
                self.events.node_normal(reasons::GPU_TAINT_GONE, notice::taint_gone(gpu, told));
            }
        }
    }

    fn measure(&self, before: &Health, after: &Health) {
        for gpu in gpus(before, after) {
            let causes = |health: &Health| -> BTreeSet<Cause> {
                let all = health.gpus.get(gpu).into_iter().flat_map(|of_gpu| of_gpu.causes.keys().copied());
                all.filter(|cause| cause.effect(&self.xids).is_some()).collect()
            };
            let (was, is) = (causes(before), causes(after));
            for cause in was.symmetric_difference(&is) {
                let labels = GpuCause { gpu: gpu.to_string(), cause: cause.to_string() };
                self.metrics.gpu_health.get_or_create(&labels).set(i64::from(is.contains(cause)));
            }
        }
    }

    /// Stores every change until cancelled. A file that cannot be written is tried again; the health stays in
    /// memory meanwhile.
    pub async fn keep(self, data_dir: PathBuf, boot_id: String, cancel: CancellationToken) {
        let mut changes = self.subscribe();
        let mut stored: Option<Vec<u8>> = None;
        loop {
            let health = Arc::clone(&changes.borrow_and_update());
            let wait = match store(&health, &data_dir, &boot_id, &mut stored).await {
                Ok(()) => Duration::MAX,
                Err(error) => {
                    tracing::warn!(%error, "the GPUs' health is not stored, trying again");
                    RETRY
                }
            };
            tokio::select! {
                () = cancel.cancelled() => return,
                _ = changes.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
            tokio::select! {
                // The last change is stored before the task ends.
                () = cancel.cancelled() => {}
                () = tokio::time::sleep(PAUSE) => {}
            }
        }
    }
}

fn gpus<'a>(before: &'a Health, after: &'a Health) -> BTreeSet<&'a GpuUuid> {
    before.gpus.keys().chain(after.gpus.keys()).collect()
}

async fn store(
    health: &Health,
    data_dir: &Path,
    boot_id: &str,
    stored: &mut Option<Vec<u8>>,
) -> anyhow::Result<()> {
    let content = file::encode(health, boot_id)?;
    if stored.as_ref() == Some(&content) {
        return Ok(());
    }
    let (folder, bytes) = (data_dir.to_owned(), content.clone());
    tokio::task::spawn_blocking(move || file::save(&folder, &bytes)).await??;
    *stored = Some(content);
    Ok(())
}

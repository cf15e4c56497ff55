//! Reports calls to the driver that do not come back, to health, events and metrics.

use crate::beat;
use crate::events::Events;
use crate::health::Monitor;
use crate::metrics::{Gpu, Metrics};
use crate::notice;
use crate::reasons;
use aliquot_nvml::{Calls, Stuck};
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

const LOOK: Duration = Duration::from_secs(1);

/// The task that reports stuck calls.
pub struct Teller {
    /// The calls under way.
    pub calls: Calls,
    /// The metrics.
    pub metrics: Metrics,
    /// The event recorder.
    pub events: Events,
    /// The health of the GPUs.
    pub health: Monitor,
    /// Notified when a GPU answers again, so that it is read at once.
    pub changed: Arc<Notify>,
}

impl std::fmt::Debug for Teller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Teller").finish_non_exhaustive()
    }
}

impl Teller {
    /// Runs until cancelled.
    pub async fn run(self, cancel: CancellationToken) {
        let mut before: BTreeMap<String, Stuck> = BTreeMap::new();
        loop {
            let now: BTreeMap<String, Stuck> =
                self.calls.stuck().into_iter().map(|stuck| (stuck.name(), stuck)).collect();
            if before.keys().ne(now.keys()) {
                self.tell(&before, &now);
            }
            before = now;
            tokio::select! {
                () = cancel.cancelled() => return,
                () = beat::next(LOOK) => {}
            }
        }
    }

    fn tell(&self, before: &BTreeMap<String, Stuck>, now: &BTreeMap<String, Stuck>) {
        for (name, stuck) in now.iter().filter(|(name, _)| !before.contains_key(*name)) {
            self.metrics.gpu_stuck.get_or_create(&Gpu { gpu: name.clone() }).set(1);
            self.events.node_warning(reasons::GPU_STUCK, notice::stuck(&stuck.what()));
        }
        for name in before.keys().filter(|name| !now.contains_key(*name)) {
            self.metrics.gpu_stuck.get_or_create(&Gpu { gpu: name.clone() }).set(0);
            self.events.node_normal(reasons::GPU_ANSWERS, format!("{name} answers the driver again"));
            self.changed.notify_one();
        }
        let stuck: Vec<_> =
            now.values().map(|stuck| (stuck.gpu.clone(), stuck.index, stuck.what())).collect();
        self.health.change(|health, _| health.set_stuck(&stuck, Timestamp::now()));
    }
}

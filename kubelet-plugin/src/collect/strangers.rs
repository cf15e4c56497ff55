//! GPU instances that no claim has: named, and destroyed if nothing can depend on them.

use super::known::Known;
use super::pace::Pace;
use super::{Collector, Instant};
use crate::notice;
use crate::prepare::Overview;
use crate::reasons;
use aliquot_model::LiveMig;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names an instance among those that are there: GPU, place, profile.
type Key = (String, u32, u32);

fn key(mig: &LiveMig) -> Key {
    (mig.parent.to_string(), mig.placement.start, mig.profile_id)
}

/// What is remembered between two looks.
#[derive(Debug, Default)]
pub(super) struct Memory {
    first_seen: BTreeMap<Key, Instant>,
    pace: Pace<Vec<Key>>,
}

impl Collector {
    /// One look.
    pub(super) async fn check_strangers(&self, overview: &Overview, memory: &mut Memory) {
        memory.first_seen.retain(|seen, _| overview.foreign.iter().any(|mig| key(mig) == *seen));
        let mut idle = Vec::new();
        for mig in &overview.foreign {
            match memory.first_seen.get(&key(mig)) {
                None => {
                    memory.first_seen.insert(key(mig), Instant::now());
                    self.tell_stranger(mig);
                }
                Some(seen) if self.may_go(overview, mig) && seen.elapsed() >= self.interval / 2 => {
                    idle.push(mig)
                }
                Some(_) => {}
            }
        }
        let about = idle.iter().map(|mig| key(mig)).collect();
        if idle.is_empty() || !memory.pace.is_due(about, self.interval, Instant::now()) {
            return;
        }
        let known = match self.ask().await {
            Ok(known) => known,
            Err(error) => {
                tracing::debug!(%error, "nobody knows whether an unknown instance is of a claim");
                return;
            }
        };
        for mig in idle.into_iter().filter(|mig| !self.is_used(overview, mig, &known)) {
            self.destroy(mig).await;
        }
    }

    fn tell_stranger(&self, mig: &LiveMig) {
        let note = notice::stranger(mig, self.destroy_unknown);
        self.events.node_warning(reasons::FOREIGN_INSTANCE, note);
    }

    /// Whether it may be destroyed, as far as this node knows: not if a claim whose record is lost may have it.
    fn may_go(&self, overview: &Overview, mig: &LiveMig) -> bool {
        if !self.destroy_unknown || overview.ledger.lost.is_some() {
            return false;
        }
        let gpus = overview.inventory.iter().flat_map(|inventory| &inventory.gpus);
        let minor = gpus.filter(|gpu| gpu.uuid == mig.parent).map(|gpu| gpu.minor).next();
        let mut lost = overview.unaccounted.iter().flat_map(|lost| &lost.devices);
        lost.all(|device| Some(device.minor()) != minor)
    }

    /// Whether a pod of this node runs with a claim that has a device that overlaps the instance: it may be what is
    /// left of that claim. A claim that no pod runs with needs no instance: one is made for its next pod. In doubt it
    /// is used.
    fn is_used(&self, overview: &Overview, mig: &LiveMig, known: &Known) -> bool {
        let mut gpus = overview.inventory.iter().flat_map(|inventory| &inventory.gpus);
        let Some(gpu) = gpus.find(|gpu| gpu.uuid == mig.parent) else { return true };
        known.runs_with(mig, gpu, &self.driver, &self.pool)
    }

    async fn destroy(&self, mig: &LiveMig) {
        let (node, target) = (Arc::clone(&self.node), mig.clone());
        match tokio::task::spawn_blocking(move || node.destroy_foreign(&target)).await {
            Ok(Ok(true)) => {
                self.events.node_normal(
                    reasons::FOREIGN_DESTROYED,
                    format!(
                        "destroyed GPU instance {} at {} on GPU {}, which no claim had and no process used",
                        mig.gpu_instance, mig.placement, mig.parent
                    ),
                );
                self.changed.notify_one();
            }
            Ok(Ok(false)) => tracing::debug!(gpu.uuid = %mig.parent, "an unknown instance is in use"),
            Ok(Err(error)) => tracing::warn!(gpu.uuid = %mig.parent, %error, "an unknown instance stays"),
            Err(error) => tracing::error!(%error, "destroying ended abnormally"),
        }
    }
}

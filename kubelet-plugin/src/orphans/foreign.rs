//! Handles GPU instances that no claim has. They are reported, and destroyed if the node is configured so and
//! nothing can depend on them.

use super::pace::Pace;
use super::{Collector, Instant};
use crate::ledger::Running;
use crate::notice;
use crate::partitioning::Unclaimed;
use crate::prepare::Overview;
use crate::reasons;
use aliquot_model::LiveMig;
use aliquot_model::layout::Holding;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The key of an instance among those that exist: GPU, start of the placement, profile.
type Key = (String, u32, u32);

fn key(mig: &LiveMig) -> Key {
    (mig.parent.to_string(), mig.placement.start, mig.profile_id)
}

/// The state that is remembered between two looks.
#[derive(Debug, Default)]
pub(super) struct Memory {
    first_seen: BTreeMap<Key, Instant>,
    pace: Pace<Vec<Key>>,
}

impl Collector {
    /// Makes one look.
    pub(super) async fn check_foreign(&self, overview: &Overview, memory: &mut Memory) {
        memory.first_seen.retain(|seen, _| overview.foreign.iter().any(|mig| key(mig) == *seen));
        let mut idle = Vec::new();
        for mig in &overview.foreign {
            match memory.first_seen.get(&key(mig)) {
                // While records are lost, it is not known yet which instances are given out as they are.
                None if self.node.unclaimed == Unclaimed::Adopt && overview.ledger.lost.is_some() => {}
                None => {
                    memory.first_seen.insert(key(mig), Instant::now());
                    self.tell_foreign(overview, mig);
                }
                Some(seen) if self.may_go(overview, mig) && seen.elapsed() >= self.interval / 2 => {
                    idle.push(mig)
                }
                Some(_) => {}
            }
        }
        // The node is asked before the API: processes in the instance may end at any time.
        let idle = self.without_processes(idle).await;
        if idle.is_empty() {
            return memory.pace.forget();
        }
        if !memory.pace.take_turn(idle.iter().map(|mig| key(mig)).collect(), self.interval, Instant::now()) {
            return;
        }
        let known = match self.ask().await {
            Ok(known) => known,
            Err(error) => {
                tracing::debug!(%error, "nobody knows whether an unknown instance is of a claim");
                return memory.pace.forget();
            }
        };
        let running = known.running(&self.driver, &self.pool);
        for mig in idle.into_iter().filter(|mig| !is_used(overview, mig, &running)) {
            self.destroy(mig).await;
        }
    }

    fn tell_foreign(&self, overview: &Overview, mig: &LiveMig) {
        match overview.name_of(mig).filter(|_| overview.is_adopted(mig)) {
            Some(device) => {
                self.events.node_normal(reasons::INSTANCE_ADOPTED, notice::adopted(mig, &device));
            }
            None => {
                let note = notice::foreign(mig, self.node.unclaimed, overview.is_left_over(mig));
                self.events.node_warning(reasons::FOREIGN_INSTANCE, note);
            }
        }
    }

    /// Returns true if the instance may be destroyed, as far as this node knows. It must stay if a claim
    /// whose record is lost may have it.
    fn may_go(&self, overview: &Overview, mig: &LiveMig) -> bool {
        let goes = match self.node.unclaimed {
            Unclaimed::Destroy => true,
            Unclaimed::Adopt => overview.is_left_over(mig),
            Unclaimed::Leave => false,
        };
        if !goes || overview.ledger.lost.is_some() {
            return false;
        }
        let gpus = overview.inventory.iter().flat_map(|inventory| &inventory.gpus);
        let minor = gpus.filter(|gpu| gpu.uuid == mig.parent).map(|gpu| gpu.minor).next();
        let mut lost = overview.unaccounted.iter().flat_map(|lost| &lost.devices);
        lost.all(|device| Some(device.minor()) != minor)
    }

    /// Returns the instances in which no process runs, as far as the driver reports.
    async fn without_processes<'a>(&self, instances: Vec<&'a LiveMig>) -> Vec<&'a LiveMig> {
        let (node, asked) = (Arc::clone(&self.node), instances.iter().copied().cloned().collect::<Vec<_>>());
        let look = move || asked.iter().map(|mig| node.runs_nothing(mig)).collect::<Vec<bool>>();
        let idle = tokio::task::spawn_blocking(look).await.unwrap_or_default();
        instances.into_iter().zip(idle).filter_map(|(mig, idle)| idle.then_some(mig)).collect()
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

/// Returns true if a claim that a pod of this node runs with has a device that overlaps the instance: the
/// instance may be left from that claim. A claim that no pod runs with needs no instance, because it gets one
/// with its next pod. If it cannot be found out, returns true.
fn is_used(overview: &Overview, mig: &LiveMig, running: &BTreeMap<String, Running>) -> bool {
    let mut gpus = overview.inventory.iter().flat_map(|inventory| &inventory.gpus);
    let Some(gpu) = gpus.find(|gpu| gpu.uuid == mig.parent) else { return true };
    let instance = Holding::Partition(mig.placement);
    running.values().flat_map(Running::names).any(|device| {
        device.minor() == gpu.minor
            && Holding::of(&device, gpu).is_some_and(|holding| holding.conflicts(instance))
    })
}

//! Nodes that kube-scheduler rejected for a pod: they are left out for that pod, each time twice as long.

use super::{GivenBack, Reconciler};
use aliquot_allocator::snapshot::{Allocation, Claim, Uid};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time for which a rejected node is remembered after it may be used again.
const GIVEN_BACK_MEMORY: Duration = Duration::from_secs(600);

impl Reconciler {
    /// Notes that kube-scheduler took back a claim of a pod that still waits: it rejected the node.
    pub(super) fn note_given_back(&mut self, claim: &Claim, taken: &Allocation, now: Instant) {
        let Some(node) = taken.node.clone().filter(|_| taken.by_us) else { return };
        if self.deallocating.contains_key(&claim.uid) {
            return;
        }
        let pods: Vec<_> = self
            .index
            .pods_of_claim(&claim.key)
            .filter(|pod| pod.is_pending() && !pod.gated)
            .map(|pod| pod.uid.clone())
            .collect();
        for pod in pods {
            self.give_back(&pod, &node, now);
        }
    }

    /// Notes that a pod could not be bound to a node.
    pub(super) fn give_back(&mut self, pod: &Uid, node: &Arc<str>, now: Instant) {
        let key = (pod.clone(), node.clone());
        let entry = self.given_back.entry(key).or_insert(GivenBack { times: 0, until: now });
        entry.times = entry.times.saturating_add(1);
        let doubled = 1u32.checked_shl(entry.times.saturating_sub(1).min(10)).unwrap_or(1024);
        entry.until = now + self.settings.left_out.saturating_mul(doubled);
    }

    /// Forgets nodes that have been usable again for a long time.
    pub(super) fn forget_given_back(&mut self, now: Instant) {
        self.given_back.retain(|_, given| now < given.until + GIVEN_BACK_MEMORY);
    }
}

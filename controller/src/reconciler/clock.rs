//! Work that is done because time has passed, and the time when it is next due.

use super::Reconciler;
use aliquot_allocator::snapshot::ObjectKey;
use k8s_openapi::jiff::Timestamp;
use std::time::Instant;

impl Reconciler {
    /// Does what is due.
    pub fn tick(&mut self, now: Instant, wall: Timestamp) {
        if !self.is_synced() {
            return;
        }
        self.begin_turn();
        self.late.tidy(now);
        self.resolve_overlaps();
        self.acknowledge_hand_overs();
        self.keep_hand_overs(now);
        self.take_idle_claims_back(now);
        self.tidy_lost(now);
        self.tidy_retention_records();
        self.release_unbindable(now);
        self.write_quotas(now);
        self.look_back(now);
        self.tidy_preemptions(now);
        self.compact(now, wall.as_second());
        self.forget_given_back(now);
        self.publish_classes_again(now);
        let (ready, delayed, parked) = self.queue.lengths();
        self.metrics.queue(ready, delayed, parked);
        self.metrics.objects(&self.index.sizes());
        self.metrics.selector_evaluations.set(i64::try_from(self.matcher.evaluations()).unwrap_or(i64::MAX));
        self.metrics.selector_cache.set(i64::try_from(self.matcher.selectors().bytes()).unwrap_or(i64::MAX));
    }

    /// Returns the time at which something is due without a new input; `None` if nothing is.
    pub fn next_due(&self) -> Option<Instant> {
        let idle = self.next_idle_claim();
        let classes = self.next_publication_of_classes();
        let unbindable = self.unbindable.next(self.settings.idle);
        let look = self.hand_overs.next_look(self.settings.scheduler_settle);
        [idle, classes, unbindable, look, self.queue.next(), self.holds.next()].into_iter().flatten().min()
    }

    /// Runs once after the first lists: takes up what earlier leaders left, and reports what should not be
    /// there.
    pub(super) fn first_look(&mut self, now: Instant) {
        tracing::info!(sizes = ?self.index.sizes(), "in the picture");
        self.publish_classes(now);
        self.acknowledge_hand_overs();
        let ended: Vec<_> = self.index.pods().filter(|pod| pod.deleting || pod.terminal).cloned().collect();
        for pod in ended {
            self.note_ended_pod(&pod, now);
        }
        self.carry_out_retention_records();
        self.dirty_pools.extend(self.index.pools().map(|pool| pool.name).collect::<Vec<_>>());
        // The owner of a claim's devices was unknown before the slices were listed.
        let claims: Vec<ObjectKey> = self.index.claims().map(|claim| claim.key.clone()).collect();
        for claim in claims {
            self.watch_claim(&claim, now);
        }
        self.tell_who_tolerates_our_taint();
    }
}

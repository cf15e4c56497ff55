//! Claims as the API shows them, and the consequences of their changes.

use super::{Reconciler, key_of};
use aliquot_allocator::snapshot::{Change, ObjectKey};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::time::Instant;

impl Reconciler {
    /// Takes in a claim as the API has it.
    pub(super) fn claim(&mut self, claim: &ResourceClaim, now: Instant) -> Change {
        let Some(key) = key_of(&claim.metadata) else { return Change::Nothing };
        let before = self.index.effective_allocation(&key).cloned();
        let observed_before = self.index.claim(&key).map(|known| known.allocation.is_some());
        let change = self.index.apply_claim(claim);
        if matches!(change, Change::Nothing) && before == self.index.effective_allocation(&key).cloned() {
            self.watch_claim(&key, now);
            return change;
        }
        let after = self.index.effective_allocation(&key).cloned();
        if let Some(known) = self.index.claim(&key).cloned() {
            let appeared = observed_before == Some(false) || (observed_before.is_none() && self.was_listed());
            if let (true, Some(allocation)) = (appeared, &known.allocation)
                && !allocation.by_us
            {
                self.judge_foreign(&known, allocation);
            }
            if let (true, Some(allocation)) = (appeared, &known.allocation) {
                self.tell_substituted(&known, allocation);
            }
            if after.is_none() {
                self.claim_gone_foreign(&known.uid);
            }
            if let (Some(true), Some(taken), None) = (observed_before, &before, &after) {
                self.note_given_back(&known, taken, now);
                self.note_lost(&known, taken);
            }
        }
        for allocation in before.iter().chain(&after) {
            self.dirty_pools.extend(allocation.pools());
        }
        self.watch_claim(&key, now);
        change
    }

    /// Notes since when a claim of this driver has no consumer.
    pub(super) fn watch_claim(&mut self, key: &ObjectKey, now: Instant) {
        self.holds.note(key);
        self.note_elastic(key);
        let Some(claim) = self.index.claim(key) else { return };
        // A hold claim keeps the devices now, so this controller need not record them, even before the answer
        // to the write that made the hold claim.
        if let Some(retention) = &claim.retention {
            self.holds.pending_holds.remove(retention.claim_uid.as_str());
        }
        let idle = claim.reserved_for.is_empty()
            && claim.companion.is_none()
            && claim.allocation.as_ref().is_some_and(|allocation| self.index.is_ours(allocation));
        let uid = claim.uid.clone();
        if idle {
            self.idle.entry(uid).or_insert_with(|| (key.clone(), now));
        } else {
            self.idle.remove(&uid);
        }
    }

    /// Drops what is stored for a claim that is gone.
    pub(super) fn claim_gone(&mut self, uid: &str) {
        self.idle.remove(uid);
        self.elastic.gone(uid);
        self.hold_gone(uid);
        self.claim_gone_foreign(uid);
    }
}

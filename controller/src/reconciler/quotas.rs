//! GpuQuotas: decisions that would exceed a quota wait, and what is held is written into the status of the
//! quotas.

use super::{Effect, Reconciler, Regarding, Report, Seen, reasons};
use crate::writer::Job;
use aliquot_allocator::elastic::Size;
use aliquot_allocator::quota::Ledger;
use aliquot_allocator::schedule::Plan;
use aliquot_allocator::snapshot::{Change, ObjectKey, Pod};
use aliquot_api::v1alpha1::{GpuQuota, GpuQuotaStatus};
use k8s_openapi::api::resource::v1::AllocationResult;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The time after which a status that could not be written is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// The quotas and their statuses.
#[derive(Debug, Default)]
pub(super) struct Quotas {
    ledger: Ledger,
    /// Statuses that are being written or could not be written, and when the write began.
    written: HashMap<ObjectKey, (GpuQuotaStatus, Instant)>,
}

impl Reconciler {
    /// Takes in a change of GpuQuotas. Pods that wait for a quota may fit now.
    pub(super) fn quota(&mut self, seen: Seen<GpuQuota>) -> Change {
        let ledger = &mut self.quotas.ledger;
        match seen {
            Seen::Apply(quota) => ledger.apply(*quota),
            Seen::Delete(quota) => ledger.delete(&quota),
            Seen::Reset(quotas) => {
                self.synced.insert("quotas");
                ledger.reset(quotas);
            }
        }
        Change::Room
    }

    /// Returns the quota of a namespace that a decision would exceed, as text; `None` if there is none.
    pub(super) fn quota_in_the_way(&mut self, namespace: &str, plan: &Plan) -> Option<String> {
        let drafts = plan.drafts.iter().map(aliquot_allocator::schedule::Draft::allocation);
        self.quotas.ledger.excess(&self.index, namespace, drafts).map(|excess| excess.to_string())
    }

    /// Returns the quota of a namespace that an allocation would exceed, as text; `whole` is the size of the
    /// claim with all its companions after it.
    pub(super) fn quota_on_allocation(
        &mut self,
        namespace: &str,
        allocation: &AllocationResult,
        whole: Size,
    ) -> Option<String> {
        let excess = self.quotas.ledger.excess(&self.index, namespace, std::iter::once(allocation));
        excess.or_else(|| self.quotas.ledger.excess_of_one(namespace, whole)).map(|excess| excess.to_string())
    }

    /// Returns true if a recreated pod would get as much as it has now, with its priority: false if a budget
    /// is used up, or if a quota is exceeded already because it was lowered.
    pub(super) fn gets_it_back(&mut self, namespace: &str) -> bool {
        self.book.verdict(namespace).is_none() && !self.quotas.ledger.is_exceeded(&self.index, namespace)
    }

    /// Parks a pod whose devices would exceed a quota; returns false if they exceed none.
    pub(super) fn waits_for_quota(&mut self, pod: &Pod, plan: &Plan, now: Instant) -> bool {
        let Some(note) = self.quota_in_the_way(&pod.key.namespace, plan) else { return false };
        self.queue.park(&pod.key);
        if self.tell_pod(pod, reasons::QUOTA, &note, now) {
            for draft in &plan.drafts {
                self.tell(Report {
                    regarding: Regarding::Claim(draft.claim.clone(), draft.uid.clone()),
                    warning: true,
                    reason: reasons::QUOTA,
                    note: note.clone(),
                });
            }
        }
        true
    }

    /// Writes the statuses of quotas that differ from what is held.
    pub(super) fn write_quotas(&mut self, now: Instant) {
        for (quota, status) in self.quotas.ledger.stale(&self.index) {
            let pending = self.quotas.written.get(&quota);
            if pending
                .is_some_and(|(written, at)| *written == status && now.saturating_duration_since(*at) < RETRY)
            {
                continue;
            }
            self.quotas.written.insert(quota.clone(), (status.clone(), now));
            self.effects.push(Effect::Do(Job::QuotaStatus { quota, status }));
        }
    }
}

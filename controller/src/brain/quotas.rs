//! GpuQuotas: what a decision would exceed waits, and what is held is written into their status.

use super::{Core, Effect, Regarding, Report, Seen, reasons};
use crate::act::Job;
use crate::decide::Plan;
use crate::elastic::Size;
use crate::govern::{GpuQuota, GpuQuotaStatus, Ledger};
use crate::index::{Change, ObjectKey, Pod};
use k8s_openapi::api::resource::v1::AllocationResult;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A status that could not be written is tried again after this long.
const RETRY: Duration = Duration::from_secs(10);

/// Quotas and what was written of them.
#[derive(Debug, Default)]
pub(super) struct Quotas {
    ledger: Ledger,
    /// Statuses that are being written, or could not be, and when.
    written: HashMap<ObjectKey, (GpuQuotaStatus, Instant)>,
}

impl Core {
    /// A change of GpuQuotas. Pods that wait for one may fit now.
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

    /// Says which quota of a namespace a decision would exceed, if there is one.
    pub(super) fn quota_in_the_way(&mut self, namespace: &str, plan: &Plan) -> Option<String> {
        let drafts = plan.drafts.iter().map(crate::decide::Draft::allocation);
        self.quotas.ledger.excess(&self.index, namespace, drafts).map(|excess| excess.to_string())
    }

    /// Says which quota of a namespace an allocation would exceed by which a claim has so much on the whole.
    pub(super) fn quota_on_allocation(
        &mut self,
        namespace: &str,
        allocation: &AllocationResult,
        whole: Size,
    ) -> Option<String> {
        let excess = self.quotas.ledger.excess(&self.index, namespace, std::iter::once(allocation));
        excess.or_else(|| self.quotas.ledger.excess_of_one(namespace, whole)).map(|excess| excess.to_string())
    }

    /// Whether a pod that is made anew would be given as much as it has now, with its priority: not where a
    /// budget is used up, and not where a quota is exceeded already, because it was lowered.
    pub(super) fn gets_it_back(&mut self, namespace: &str) -> bool {
        self.book.verdict(namespace).is_none() && !self.quotas.ledger.is_exceeded(&self.index, namespace)
    }

    /// Parks a pod whose devices would exceed a quota; false if there is none that they do.
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

    /// Writes what is held where the status says something else.
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

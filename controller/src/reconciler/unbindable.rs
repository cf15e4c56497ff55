//! Pods that kube-scheduler cannot bind although they have devices, because the node was closed or filled in
//! between. If a node fails for another reason than the claims, kube-scheduler keeps such allocations for
//! ever. So the controller takes them back after a while: other pods may need the devices, and the pod may
//! find another node.

use super::{Reconciler, reasons};
use aliquot_allocator::snapshot::{ObjectKey, Pod, Uid};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The pods of which kube-scheduler says that they fit nowhere, and since when.
#[derive(Debug, Default)]
pub(super) struct Unbindable {
    since: HashMap<ObjectKey, (Uid, Instant)>,
}

impl Unbindable {
    /// Takes in the state of a pod; `None` if it is gone.
    pub(super) fn note(&mut self, key: &ObjectKey, pod: Option<&Pod>, now: Instant) {
        match pod.filter(|pod| is_unbindable(pod)) {
            None => {
                self.since.remove(key);
            }
            Some(pod) => {
                let entry = self.since.entry(key.clone()).or_insert_with(|| (pod.uid.clone(), now));
                if entry.0 != pod.uid {
                    *entry = (pod.uid.clone(), now);
                }
            }
        }
    }

    /// Takes in the states of all pods.
    pub(super) fn note_all<'a>(&mut self, pods: impl Iterator<Item = &'a Pod>, now: Instant) {
        let mut before = std::mem::take(&mut self.since);
        for pod in pods.filter(|pod| is_unbindable(pod)) {
            let same = before.remove(&pod.key).filter(|(uid, _)| *uid == pod.uid);
            self.since.insert(pod.key.clone(), same.unwrap_or_else(|| (pod.uid.clone(), now)));
        }
    }

    /// Returns the time when the first of them will have waited for `patience`.
    pub(super) fn next(&self, patience: Duration) -> Option<Instant> {
        self.since.values().map(|(_, since)| *since + patience).min()
    }

    /// Returns the pods that have waited for `patience`; their wait starts anew.
    fn take_due(&mut self, patience: Duration, now: Instant) -> Vec<ObjectKey> {
        let due =
            self.since.iter_mut().filter(|(_, (_, since))| now.saturating_duration_since(*since) >= patience);
        due.map(|(key, (_, since))| {
            *since = now;
            key.clone()
        })
        .collect()
    }
}

/// Returns true if a pod cannot be bound. A pod with a nominated node is excluded, because kube-scheduler is
/// making room for it; so is a pod with the driver's gate, because kube-scheduler has not tried it.
fn is_unbindable(pod: &Pod) -> bool {
    pod.unschedulable && pod.is_pending() && !pod.gated && pod.nominated.is_none() && !pod.claims.is_empty()
}

impl Reconciler {
    /// Takes back the devices of pods that cannot be bound.
    pub(super) fn release_unbindable(&mut self, now: Instant) {
        for key in self.unbindable.take_due(self.settings.idle, now) {
            let Some(pod) = self.index.pod(&key).filter(|pod| is_unbindable(pod)).cloned() else { continue };
            // Only claims that the pod alone uses: other pods may run on the same claim.
            let own: Vec<_> = pod
                .claim_keys()
                .filter_map(|claim| self.index.claim(&claim))
                .filter(|claim| self.index.sole_users(claim, &pod).is_some())
                .filter_map(|claim| {
                    let allocation = claim.allocation.as_ref().filter(|taken| self.index.is_ours(taken))?;
                    Some((claim.key.clone(), claim.uid.clone(), allocation.node.clone()?))
                })
                .filter(|(_, uid, _)| !self.deallocating.contains_key(uid) && !self.index.is_assumed(uid))
                .collect();
            let Some((_, _, node)) = own.first() else { continue };
            let note = format!(
                "kube-scheduler has not bound this pod to node {node} for {:?}, so its devices there are free again; \
                 they are decided anew. What is in the way is in the pod's FailedScheduling events",
                self.settings.idle
            );
            self.give_back(&pod.uid, &node.clone(), now);
            self.tell_pod(&pod, reasons::UNBINDABLE, &note, now);
            for (claim, _, _) in own {
                self.take_back(&pod, &claim, "unbindable");
            }
        }
    }
}

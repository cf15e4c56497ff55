//! Takes in the results of the writes.

use super::{Reconciler, Regarding, Report, reasons};
use crate::writer::object_backoff::LONGEST;
use crate::writer::{Job, Outcome, WriteError};
use aliquot_allocator::schedule::Plan;
use aliquot_allocator::snapshot::Change;
use std::time::Instant;

impl Reconciler {
    /// Takes in the outcome of a job. Objects that the API returned count as seen.
    pub(super) fn done(&mut self, outcome: Outcome, now: Instant) -> Change {
        let Outcome { job, claims, gone, pod, evictions, limits, moves, error } = outcome;
        for claim in &claims {
            let change = self.claim(claim, now);
            self.changed(change, now);
        }
        for (key, uid) in &gone {
            let change = self.index.delete_claim(key, Some(uid));
            self.claim_gone(uid);
            self.changed(change, now);
        }
        if let Some(pod) = &pod {
            let change = self.index.answer_pod(pod);
            self.changed(change, now);
        }
        self.moves_counted(moves);
        match job {
            Job::Allocate { plan, gives, .. } => {
                let given = self.gave_way(gives, error.is_none(), now);
                self.changed(given, now);
                self.allocated(&plan, error, now)
            }
            Job::MakeRetentionRecord { source, .. } => {
                self.retention_record_written(&source, true, error, now);
                Change::Nothing
            }
            Job::DropRetentionRecord { source, .. } => {
                self.retention_record_written(&source, false, error, now);
                Change::Nothing
            }
            Job::MakeHold { source, .. } => {
                self.hold_made(&source, error);
                Change::Nothing
            }
            Job::DropHold { claim, uid } => {
                self.hold_dropped(&claim, &uid, error, now);
                Change::Nothing
            }
            Job::Bind { plan, until, .. } => self.bound(&plan, until, error, now),
            Job::Move { pod, uid, .. } => {
                self.moved_away(&pod, &uid, evictions, error, now);
                Change::Nothing
            }
            Job::AllowMoves(_) => {
                if let Some(error) = error {
                    tracing::warn!(%error, "could not write down how many moves an hour allows");
                }
                Change::Nothing
            }
            Job::Hold { claim, uid, .. } => {
                self.hold_written(&claim, &uid, error, now);
                Change::Nothing
            }
            Job::Lift { pod, .. } => {
                self.in_flight.remove(&pod);
                if let Some(error) = error {
                    tracing::warn!(%pod, %error, "could not lift the gate");
                    self.offer(&pod, now);
                    self.queue.delay(&pod, now);
                } else {
                    self.offer(&pod, now);
                }
                Change::Nothing
            }
            Job::MakeRoom { pod, uid, .. } => self.room_made(&pod, &uid, evictions, error, now),
            Job::Deallocate { claim, uid, .. } => {
                let reason = self.deallocating.remove(&uid).unwrap_or("unknown");
                match error {
                    None => self.metrics.deallocated(reason),
                    Some(error) => {
                        tracing::warn!(%claim, %error, reason, "could not take an allocation back")
                    }
                }
                // Whatever the result: look again at the claim as it is, and wait for the idle time again.
                self.idle.remove(&uid);
                self.watch_claim(&claim, now);
                let pods: Vec<_> = self.index.pods_of_claim(&claim).map(|pod| pod.key.clone()).collect();
                if let Some(allocation) = self.index.effective_allocation(&claim) {
                    self.dirty_pools.extend(allocation.pools());
                }
                Change::PodsAndRoom(pods)
            }
            Job::Acknowledge { node, .. } => {
                if let Some(error) = error {
                    tracing::warn!(%node, %error, "could not acknowledge the hand-over");
                    self.acknowledging.remove(&node);
                }
                Change::Nothing
            }
            Job::SchedulerIdle { node, generation } => {
                if let Some(error) = error {
                    tracing::warn!(%node, %error, "could not say that kube-scheduler is idle");
                    self.hand_overs.not_written(&node, generation);
                }
                Change::Nothing
            }
            Job::MakeCompanion { of, .. } => self.elastic_written(&of.uid, "a companion claim", error, now),
            Job::DeleteCompanion { of, .. } => self.elastic_written(&of.uid, "a companion claim", error, now),
            Job::Share { of, .. } => self.elastic_written(&of.uid, "a companion's consumers", error, now),
            Job::Grow { of, companion, uid, .. } => self.grown(&of, &companion, &uid, error, now),
            Job::Limits { node, about, note, .. } => {
                self.limits_written(&node, &about, note, limits, error, now)
            }
            Job::GoBack { pod, uid, .. } => self.went_back(&pod, &uid, evictions, error, now),
            Job::PlaceFree { node } => {
                if let Some(error) = error {
                    tracing::warn!(%node, %error, "could not note that no place is held any more");
                }
                Change::Nothing
            }
            Job::QuotaStatus { quota, .. } => {
                if let Some(error) = error {
                    tracing::warn!(%quota, %error, "could not write what a GpuQuota's claims hold");
                }
                Change::Nothing
            }
            Job::Classes { names } => {
                match error {
                    None => self.classes_written = Some(names),
                    Some(error) => {
                        tracing::warn!(%error, "could not publish the classes that select our devices");
                        self.classes_written = None;
                        self.classes_failed = Some(now);
                    }
                }
                Change::Nothing
            }
        }
    }

    /// Lets a pod whose allocation cannot be written wait, each time longer, and reports that.
    fn write_failed(&mut self, plan: &Plan, error: &WriteError, now: Instant) {
        let until = self.slow.failed(&plan.pod_uid, now);
        self.queue.hold_back(&plan.pod, until);
        let Some(pod) = self.index.pod(&plan.pod).cloned() else { return };
        let what_to_do = match error {
            WriteError::Exhausted { .. } => {
                "look at the API server and at the admission webhooks for ResourceClaims and Pods"
            }
            _ => "look at what the answer names: an object that is too large, a policy, a right",
        };
        let note = format!(
            "its devices were found and could not be written, so they are free again: {error}. It is tried again after \
             {} s at most; if this goes on, {what_to_do}",
            LONGEST.as_secs()
        );
        self.tell_pod(&pod, reasons::WRITE_FAILED, &note, now);
    }

    fn allocated(&mut self, plan: &Plan, error: Option<WriteError>, now: Instant) -> Change {
        let pod = &plan.pod;
        let in_flight = self.in_flight.remove(pod);
        let mut room = false;
        for (key, uid) in in_flight.iter().flat_map(|flight| flight.claims.iter()) {
            // If the allocation is still only assumed, the API does not show it, so it was not written.
            if self.index.is_assumed(uid) {
                room = true;
                self.index.forget(key, uid);
            }
        }
        self.dirty_pools.extend(in_flight.iter().flat_map(|flight| flight.pools.iter()));
        let waited = self.first_seen.remove(pod).map(|since| now.saturating_duration_since(since));
        self.offer(pod, now);
        match error {
            None => {
                self.slow.forget(&plan.pod_uid);
                self.metrics.placed(waited.unwrap_or_default());
                self.told.forget_pod(pod);
                if self.preemptions.is_reserved_for(pod) {
                    self.metrics.reservation("met");
                }
                room |= self.preemptions.forget(pod);
                self.tell(Report {
                    regarding: Regarding::Pod(pod.clone(), plan.pod_uid.clone()),
                    warning: false,
                    reason: reasons::ALLOCATED,
                    note: format!("allocated {} on node {}", plan.devices().join(", "), plan.node),
                });
            }
            Some(error) => {
                tracing::warn!(%pod, %error, "could not write an allocation");
                if error.is_of_the_object() {
                    self.write_failed(plan, &error, now);
                } else {
                    self.queue.delay(pod, now);
                }
            }
        }
        self.acknowledge_hand_overs();
        if room { Change::Room } else { Change::Nothing }
    }
}

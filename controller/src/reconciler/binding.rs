//! Decisions for claims that get devices before a pod.

use super::deciding::Assumed;
use super::decision_timeouts::Known;
use super::holds::clock;
use super::{Effect, Reconciler, reasons};
use crate::writer::{Job, WriteError};
use aliquot_allocator::hold::{self, Hold, Step};
use aliquot_allocator::schedule::{Decision, Plan};
use aliquot_allocator::snapshot::{Change, Claim, ObjectKey, Pod};
use k8s_openapi::jiff::Timestamp;
use std::sync::Arc;
use std::time::Instant;

impl Reconciler {
    /// Decides for a claim that wants devices before a pod.
    pub(super) fn bind(&mut self, key: &ObjectKey, is_first_look: bool, now: Instant, wall: Timestamp) {
        let Some(claim) = self.index.claim(key).cloned() else {
            self.holds.forget(key);
            return;
        };
        if self.index.effective_allocation(key).is_some() {
            self.holds.unbound.remove(key);
            return;
        }
        if let Some(retention) = claim.retention.clone() {
            return self.bind_retention(&claim, &retention, is_first_look, now, wall);
        }
        let Step::Bind(until) = hold::step(self.hold_policy(&claim), self.facts(&claim), wall.as_second())
        else {
            self.holds.unbound.remove(key);
            return;
        };
        if !claim.hold.mistakes.is_empty() {
            self.tell_claim(&claim, true, reasons::ANNOTATION, &claim.hold.mistakes.join("; "), now);
        }
        // The priority keeps the claim from devices that are kept for a pod to which it would give way.
        let priority = self.hold_policy(&claim).priority;
        let pod = Pod { priority, ..Pod::in_place_of(&claim) };
        if let Some(known) = self.known_late(&pod, now) {
            return self.bind_later(&claim, &known, now);
        }
        let situation = self.situation(&pod, now);
        let decision = match self.consider(&pod, &situation, is_first_look) {
            Ok(decision) => decision,
            Err(cost) => return self.holds.unbound.put_behind(key, cost, &mut self.account, now),
        };
        if let Decision::OutOfTime(reason) = &decision {
            let known = self.note_late(&pod, reason, now);
            return self.bind_later(&claim, &known, now);
        }
        self.holds.unbound.in_time(key);
        self.forget_late(&pod);
        let waiting = match decision {
            Decision::Placed(plan) => match self.in_the_way(&key.namespace, &plan) {
                None => return self.write_binding(&claim, plan, until, wall),
                Some(reason) => reason,
            },
            Decision::Waiting(wait) => wait.to_string(),
            Decision::Rejected(rejection) => rejection.to_string(),
            Decision::NoFit(reason) | Decision::OutOfTime(reason) | Decision::Undo { reason, .. } => {
                reason.to_string()
            }
            Decision::LeaveToScheduler { .. } => {
                "only nodes in scheduler mode could serve it, and kube-scheduler allocates for pods alone"
                    .to_owned()
            }
            Decision::NotOurs | Decision::Settled { .. } => {
                self.holds.unbound.remove(key);
                return;
            }
        };
        self.holds.unbound.park(key);
        let note = format!("it is to be bound before its first pod, but: {waiting}");
        self.tell_claim(&claim, true, reasons::DOES_NOT_FIT, &note, now);
    }

    /// Puts off a claim whose request ran out of time, together with all that request the same.
    fn bind_later(&mut self, claim: &Claim, known: &Known, now: Instant) {
        self.holds.unbound.put_off(&claim.key, known.times, known.until);
        let note = format!("it is to be bound before its first pod, but was {}", known.note);
        self.tell_claim(claim, true, reasons::OUT_OF_TIME, &note, now);
    }

    /// Returns the used-up budget or the quota that keeps a claim from the devices found for it; `None` if
    /// none does.
    fn in_the_way(&mut self, namespace: &Arc<str>, plan: &Plan) -> Option<String> {
        if let Some(verdict) = self.refusal(namespace) {
            self.holds.refused.insert(namespace.clone());
            return Some(verdict.note);
        }
        self.quota_in_the_way(namespace, plan)
    }

    /// Looks again at claims to bind once no budget holds them back any more.
    pub(super) fn bind_within_budget(&mut self, now: Instant) {
        let before = self.holds.refused.len();
        let refused = std::mem::take(&mut self.holds.refused);
        let still = refused.into_iter().filter(|namespace| self.refusal(namespace).is_some()).collect();
        self.holds.refused = still;
        if self.holds.refused.len() < before {
            self.holds.wake(now);
        }
    }

    pub(super) fn write_binding(&mut self, claim: &Claim, plan: Box<Plan>, until: i64, wall: Timestamp) {
        let Assumed { mut writes, .. } = self.assume(&plan, wall);
        // In place of a pod, the driver's own entry among its consumers keeps the claim.
        for write in &mut writes {
            write.user = hold::consumer(Hold::Until(until), &plan.pod_uid);
        }
        tracing::info!(claim = %claim.key, node = %plan.node, score = ?plan.score, "binding before any pod");
        self.holds.writing.insert(claim.uid.clone());
        self.effects.push(Effect::Do(Job::Bind { plan, writes, until }));
    }

    /// Takes in the result of a binding.
    pub(super) fn bound(
        &mut self,
        plan: &Plan,
        until: i64,
        error: Option<WriteError>,
        now: Instant,
    ) -> Change {
        let (key, uid) = (&plan.pod, &plan.pod_uid);
        self.holds.writing.remove(uid);
        self.holds.note(key);
        let mut change = Change::Nothing;
        // If the allocation is still only assumed, the API does not show it, so it was not written.
        if self.index.is_assumed(uid) {
            self.dirty_pools
                .extend(self.index.effective_allocation(key).map(|held| held.pools()).into_iter().flatten());
            self.index.forget(key, uid);
            change = Change::Room;
        }
        let Some(claim) = self.index.claim(key).cloned() else { return change };
        match error {
            None if claim.retention.is_some() => {
                if let Some(retention) = claim.retention.clone() {
                    self.tell_retained(&claim, &retention, &clock(until));
                    self.queue.wake(now);
                }
            }
            None => {
                let note = format!(
                    "bound to devices on node {} before any pod; without one it keeps them until {}",
                    plan.node,
                    clock(until)
                );
                self.tell_claim(&claim, false, reasons::ALLOCATED, &note, now);
            }
            Some(error) => {
                tracing::warn!(claim = %key, %error, "could not bind a claim");
                if error.is_of_the_object() {
                    let until = self.slow.failed(uid, now);
                    self.holds.unbound.hold_back(key, until);
                    let note = format!("it could not be given devices before its first pod: {error}");
                    self.tell_claim(&claim, true, reasons::WRITE_FAILED, &note, now);
                } else {
                    self.holds.unbound.delay(key, now);
                }
            }
        }
        change
    }
}

//! Decisions and their consequences.

use super::gangs::Turn;
use super::no_fit_memory::Verdict;
use super::{Effect, GivesWay, InFlight, Reconciler, Regarding, Report, reasons};
use crate::writer::{ClaimWrite, Consumers, Eviction, Fate, Gates, Job};
use aliquot_allocator::queue::account::For;
use aliquot_allocator::schedule::{self, Decision, LeftOut, Reservation, Situation, Wait};
use aliquot_allocator::snapshot::{ObjectKey, Pod};
use k8s_openapi::jiff::Timestamp;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// The time, in seconds, within which objects that were applied together are seen.
const MOMENT: i64 = 5;

/// A plan that counts as written.
pub(super) struct Assumed {
    pub(super) in_flight: InFlight,
    /// A write for each of the plan's drafts.
    pub(super) writes: Vec<ClaimWrite>,
}

impl Reconciler {
    /// Returns true if a pod or claim is ready to be decided.
    pub fn has_work(&mut self, now: Instant) -> bool {
        self.is_synced() && (self.queue.has_ready(now) || self.holds.has_ready(now))
    }

    /// Decides for the next pod, or for the next claim that wants devices before its pod.
    pub fn work(&mut self, now: Instant, wall: Timestamp) {
        if !self.is_synced() {
            return;
        }
        self.holds.wall = wall.as_second();
        self.nominate_again(now, wall);
        self.hold_again(now);
        self.begin_turn();
        let Some(next) = self.account.next(&mut self.queue, &mut self.holds.unbound, now) else { return };
        match next.is {
            For::Pod => self.work_on(&next.key, next.is_first_look, now, wall),
            For::Claim => self.bind(&next.key, next.is_first_look, now, wall),
        }
        self.account.took(&next, self.cost(), now);
    }

    fn work_on(&mut self, key: &ObjectKey, is_first_look: bool, now: Instant, wall: Timestamp) {
        let Some(pod) = self.index.pod(key).cloned() else {
            self.queue.remove(key);
            return;
        };
        if !self.wants_decision(&pod) {
            self.queue.remove(key);
            return;
        }
        // Kubernetes took the pod's devices back, as it does when a pod ends: the devices are for the next
        // pod.
        if self.holds.awaits_end_of(&pod.uid) {
            self.queue.park(key);
            return;
        }
        // A gate of somebody else means that the pod is not to be decided yet.
        if pod.is_held_by_others() {
            self.queue.park(key);
            return;
        }
        if let Turn::Done = self.work_gang(&pod, now, wall) {
            return;
        }
        if self.waits_as_late(&pod, now) || self.take_retained(&pod, now, wall) {
            return;
        }
        let situation = self.situation(&pod, now);
        match self.consider(&pod, &situation, is_first_look) {
            Ok(decision) => self.decided(&pod, decision, now, wall),
            Err(cost) => self.queue.put_behind(key, cost, &mut self.account, now),
        }
    }

    /// Decides for a pod, or for a claim in place of one, unless the outcome is known already. Returns an
    /// error with the time that was spent if the short first look did not decide it.
    pub(super) fn consider(
        &mut self,
        pod: &Pod,
        situation: &Situation,
        is_first_look: bool,
    ) -> Result<Decision, Duration> {
        match self.known(pod, situation) {
            Some(Verdict::NoFit(reason)) => {
                self.metrics.decision("no_fit_again", Duration::ZERO);
                return Ok(Decision::NoFit(Box::new(reason)));
            }
            Some(Verdict::NotAtOnce) if is_first_look => return Err(Duration::ZERO),
            _ => {}
        }
        let decision = if is_first_look { self.glance(pod, situation)? } else { self.decide(pod, situation) };
        if let Decision::NoFit(reason) = &decision {
            self.remember(pod, situation, Verdict::NoFit((**reason).clone()));
        }
        Ok(decision)
    }

    fn glance(&mut self, pod: &Pod, situation: &Situation) -> Result<Decision, Duration> {
        let began = self.settings.clock.now();
        let until = self.until().min(began + self.settings.first_look);
        let decision = self.decide_until(pod, situation, until);
        let cost = self.settings.clock.since(began);
        if !matches!(decision, Decision::OutOfTime(_)) {
            self.metrics.decision(name_of(&decision), cost);
            return Ok(decision);
        }
        self.metrics.decision("put_behind", cost);
        // The search gave up on these only because the first look is short, so they are not to be remembered.
        self.matcher.take_given_up();
        self.remember(pod, situation, Verdict::NotAtOnce);
        Err(cost)
    }

    /// Returns what was found for pods that request the same, if no room was made since.
    fn known(&mut self, pod: &Pod, situation: &Situation) -> Option<Verdict> {
        if !self.verdicts.has_any(self.queue.wakes()) || self.compaction.is_under_way() {
            return None;
        }
        self.question(pod, situation).and_then(|question| self.verdicts.get(question).cloned())
    }

    fn remember(&mut self, pod: &Pod, situation: &Situation, verdict: Verdict) {
        // While a GPU is being emptied, a pod that does not fit is decided again without that.
        if self.compaction.is_under_way() {
            return;
        }
        if let Some(question) = self.question(pod, situation) {
            self.verdicts.insert(question, self.queue.wakes(), verdict);
        }
    }

    /// Acts on a decision.
    fn decided(&mut self, pod: &Pod, mut decision: Decision, now: Instant, wall: Timestamp) {
        // No pod waits for compaction if compaction is all that keeps it waiting.
        if is_short(&decision)
            && let Some(open) = self.without_compaction(pod, now)
        {
            let with_all = self.decide(pod, &open);
            if !is_short(&with_all) {
                self.end_compaction("a pod needs the room", now);
                decision = with_all;
            }
        }
        tracing::debug!(pod = %pod.key, outcome = name_of(&decision), "decided");
        self.follow(pod, decision, now, wall);
    }

    /// Decides for a pod, or for a claim in place of one, within the time limit.
    pub(super) fn decide(&mut self, pod: &Pod, situation: &Situation) -> Decision {
        let (started, until) = (self.settings.clock.now(), self.until());
        let decision = self.decide_until(pod, situation, until);
        self.metrics.decision(name_of(&decision), self.settings.clock.since(started));
        decision
    }

    fn decide_until(&mut self, pod: &Pod, situation: &Situation, until: Instant) -> Decision {
        self.settings.pulse.doing(format!("deciding for pod {}", pod.key));
        let clock = &self.settings.clock;
        let (options, mut expired) = (self.settings.options, || clock.now() >= until);
        schedule::decide_in(&self.index, &mut self.matcher, pod, situation, options, &mut expired)
    }

    pub(super) fn left_out(&self, pod: &Pod, now: Instant) -> LeftOut {
        let because = match &pod.unschedulable_because {
            Some(said) => format!(", the last time: {said}"),
            None => String::new(),
        };
        self.given_back
            .iter()
            .filter(|((uid, _), given)| *uid == pod.uid && given.times > 1 && given.until > now)
            .map(|((_, node), given)| (node.clone(), format!("{} times{because}", given.times)))
            .collect()
    }

    fn follow(&mut self, pod: &Pod, decision: Decision, now: Instant, wall: Timestamp) {
        if !matches!(decision, Decision::OutOfTime(_)) {
            self.was_in_time(pod);
        }
        match decision {
            Decision::NotOurs => self.settle(pod, Vec::new()),
            Decision::Settled { reserve } => self.settle(pod, reserve),
            Decision::Placed(_) | Decision::LeaveToScheduler { .. } if self.is_refused(pod, now) => {
                self.queue.park(&pod.key);
                self.end_nomination(&pod.key, now);
            }
            Decision::Placed(plan) => {
                if self.waits_for_quota(pod, &plan, now) {
                    self.end_nomination(&pod.key, now);
                } else {
                    self.write_plan(pod, plan, wall);
                }
            }
            // Claims that were applied together with the pod may be seen after it.
            Decision::Waiting(Wait::NoSuchClaim { claim })
                if pod.names(&claim) && wall.as_second().saturating_sub(pod.created) < MOMENT =>
            {
                self.queue.delay(&pod.key, now);
            }
            Decision::Waiting(wait) => {
                self.queue.park(&pod.key);
                // A wait that ends by itself in a moment is not reported.
                let lasts = match &wait {
                    Wait::OfAnotherPod { .. } => true,
                    Wait::NoSuchClaim { claim } | Wait::Deleting { claim } => pod.names(claim),
                    Wait::NotMade { .. } | Wait::InFlight { .. } => false,
                };
                if lasts {
                    self.tell_pod(pod, reasons::WAITING, &wait.to_string(), now);
                }
            }
            Decision::Rejected(rejection) => {
                self.queue.park(&pod.key);
                let note = rejection.to_string();
                let news = self.tell_pod(pod, reasons::CLAIM_REJECTED, &note, now);
                // The author of the claim looks at the claim's events.
                if let (true, Some(claim)) = (news, self.index.claim(rejection.claim())) {
                    let regarding = Regarding::Claim(claim.key.clone(), claim.uid.clone());
                    self.tell(Report { regarding, warning: true, reason: reasons::CLAIM_REJECTED, note });
                }
            }
            Decision::NoFit(reason) => {
                if !self.reclaim_for(pod, now, wall) {
                    self.make_room(pod, &reason, now, wall);
                }
            }
            Decision::OutOfTime(reason) => {
                self.was_late(pod, &reason, now);
            }
            Decision::LeaveToScheduler { node } => {
                self.queue.park(&pod.key);
                if pod.gated {
                    tracing::info!(pod = %pod.key, %node, "left to kube-scheduler");
                    self.lift(pod, Vec::new());
                }
            }
            Decision::Undo { claims, reason } => {
                self.queue.park(&pod.key);
                let note = format!(
                    "taking {} claim(s) back, because with them the rest does not fit: {reason}",
                    claims.len()
                );
                self.tell_pod(pod, reasons::UNDONE, &note, now);
                for key in claims {
                    self.take_back(pod, &key, "undo");
                }
            }
        }
    }

    /// Acts on a pod for which nothing is to be allocated. Once its gate is removed, kube-scheduler schedules
    /// it and reserves its allocated claims.
    pub(super) fn settle(&mut self, pod: &Pod, reserve: Vec<Reservation>) {
        if pod.gated && pod.node.is_none() {
            self.queue.park(&pod.key);
            self.lift(pod, reserve);
        } else {
            self.queue.remove(&pod.key);
        }
    }

    pub(super) fn lift(&mut self, pod: &Pod, reserve: Vec<Reservation>) {
        self.in_flight.insert(pod.key.clone(), InFlight { pools: HashSet::new(), claims: Vec::new() });
        let gates = gates_of(pod);
        self.effects.push(Effect::Do(Job::Lift {
            pod: pod.key.clone(),
            uid: pod.uid.clone(),
            reserve,
            gates,
        }));
    }

    fn write_plan(&mut self, pod: &Pod, plan: Box<schedule::Plan>, wall: Timestamp) {
        self.write_plan_after(pod, plan, Vec::new(), wall);
    }

    /// Like `write_plan`, after hold claims have given their devices back.
    pub(super) fn write_plan_after(
        &mut self,
        pod: &Pod,
        plan: Box<schedule::Plan>,
        gives: Vec<GivesWay>,
        wall: Timestamp,
    ) {
        let Assumed { in_flight, writes } = self.assume(&plan, wall);
        tracing::info!(
            pod = %pod.key,
            node = %plan.node,
            claims = writes.len(),
            score = ?plan.score,
            "allocating"
        );
        self.arrived(pod);
        self.queue.remove(&pod.key);
        self.in_flight.insert(pod.key.clone(), in_flight);
        let gates = gates_of(pod);
        self.effects.push(Effect::Do(Job::Allocate { plan, writes, gates, gives }));
    }

    /// Counts a plan as written, before the API shows it.
    pub(super) fn assume(&mut self, plan: &schedule::Plan, wall: Timestamp) -> Assumed {
        let mut in_flight = InFlight { pools: HashSet::new(), claims: Vec::new() };
        let mut writes = Vec::new();
        for draft in &plan.drafts {
            let allocation = draft.finish(wall, || uuid::Uuid::new_v4().to_string());
            let mut assumed = self.index.read_allocation(&draft.uid, None, &allocation);
            assumed.by_us = true;
            in_flight.pools.extend(assumed.pools());
            in_flight.claims.push((draft.claim.clone(), draft.uid.clone()));
            writes.push(ClaimWrite {
                claim: draft.claim.clone(),
                uid: draft.uid.clone(),
                allocation,
                user: draft.user.clone(),
                seen: self.index.claim(&draft.claim).map(aliquot_allocator::snapshot::Claim::stub),
            });
            self.index.assume(&draft.claim, assumed);
        }
        Assumed { in_flight, writes }
    }

    /// Counts evictions; returns why the last one was not certainly carried out, `None` if all were.
    pub(super) fn count_evictions(&self, evictions: Vec<Eviction>) -> Option<String> {
        let mut refused = None;
        for eviction in evictions {
            self.metrics.eviction(eviction.fate.word());
            match eviction.fate {
                Fate::Evicted | Fate::Gone => {}
                Fate::Refused(message) => refused = Some(message),
                Fate::Unanswered(message) => {
                    refused = Some(format!("the API server did not answer: {message}"));
                }
            }
        }
        refused
    }

    /// Takes a claim back that the pod alone uses; does nothing if somebody else uses it.
    pub(super) fn take_back(&mut self, pod: &Pod, key: &ObjectKey, reason: &'static str) {
        let users = self.index.claim(key).and_then(|claim| self.index.sole_users(claim, pod));
        if let Some(users) = users {
            self.deallocate(key, Consumers::Only(users), reason);
        }
    }

    pub(super) fn deallocate(&mut self, key: &ObjectKey, consumers: Consumers, reason: &'static str) {
        let Some(claim) = self.index.claim(key) else { return };
        let Some(mark) = claim.allocation.as_ref().map(|allocation| allocation.mark.clone()) else { return };
        let uid = claim.uid.clone();
        if self.deallocating.contains_key(&uid) || self.index.is_assumed(&uid) {
            return;
        }
        tracing::info!(claim = %key, reason, "taking an allocation back");
        self.deallocating.insert(uid.clone(), reason);
        self.effects.push(Effect::Do(Job::Deallocate { claim: key.clone(), uid, mark, consumers }));
    }
}

/// Returns what the writer needs to remove the driver's gate; `None` if the gate is not set.
fn gates_of(pod: &Pod) -> Option<Gates> {
    pod.gated.then(|| Gates { version: pod.version.clone(), names: pod.gates.clone() })
}

fn name_of(decision: &Decision) -> &'static str {
    match decision {
        Decision::NotOurs => "not_ours",
        Decision::Settled { .. } => "settled",
        Decision::Placed(_) => "placed",
        Decision::Waiting(_) => "waiting",
        Decision::Rejected(_) => "rejected",
        Decision::NoFit(_) => "no_fit",
        Decision::OutOfTime(_) => "out_of_time",
        Decision::LeaveToScheduler { .. } => "left_to_scheduler",
        Decision::Undo { .. } => "undo",
    }
}

/// Returns true if a decision found no room.
const fn is_short(decision: &Decision) -> bool {
    matches!(
        decision,
        Decision::NoFit(_)
            | Decision::OutOfTime(_)
            | Decision::Undo { .. }
            | Decision::LeaveToScheduler { .. }
    )
}

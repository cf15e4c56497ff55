//! Preemption: makes room for pods that fit nowhere, by evicting other pods and keeping devices for the pod.
//!
//! A nomination keeps the devices that a pod was promised from pods that do not stand higher, until the pod
//! has them or is gone. It is stored here; `status.nominatedNodeName`, which is written before the first
//! eviction, tells the next controller (and kube-scheduler) which node it was. The devices themselves are
//! decided anew: pods that end count as gone, so the same place is found again.

use super::reclaimable::hold_standing;
use super::reserved::Reserved;
use super::{Effect, InFlight, Reconciler, Regarding, Report, Turn, reasons};
use crate::writer::{Eviction, Fate, Job, Victim, WriteError};
use aliquot_allocator::preempt::{self, Choice, Room};
use aliquot_allocator::schedule::{Decision, NoFit, Overlay, Plan, Situation};
use aliquot_allocator::snapshot::{Change, Claim, Holder, ObjectKey, Pod, PodNeeds, Sym, Uid};
use k8s_openapi::jiff::Timestamp;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

/// The nominations of an earlier controller are taken up within this many times the time limit of a decision.
const RESUMED_WITHIN: u32 = 10;

/// The state of preemptions.
#[derive(Debug, Default)]
pub(super) struct Preemptions {
    pub(super) nominations: HashMap<ObjectKey, Nomination>,
    /// Pods whose eviction was accepted.
    pub(super) evicted: HashSet<Uid>,
    /// Pods that are spared for a while, because their eviction was refused.
    spared: HashMap<Uid, Instant>,
    /// True if the nominations of an earlier controller were taken up.
    resumed: bool,
}

/// Devices that are kept for a pod.
#[derive(Debug)]
pub(super) struct Nomination {
    uid: Uid,
    pub(super) standing: i32,
    pub(super) node: Arc<str>,
    pub(super) held: Vec<(Sym, Holder)>,
    pub(super) needs: Arc<PodNeeds>,
    /// True if a pod has gone, or is going, for this nomination.
    earned: bool,
    /// The time until which a reservation lasts; `None` if this is not a reservation.
    pub(super) until: Option<Instant>,
    /// The GPUs that are reserved.
    pub(super) gpus: HashSet<(Sym, u32)>,
}

/// The terms on which devices are kept.
#[derive(Debug, Default)]
pub(super) struct Terms {
    /// See [`Nomination`].
    pub(super) earned: bool,
    /// See [`Nomination`].
    pub(super) until: Option<Instant>,
    /// See [`Nomination`].
    pub(super) gpus: HashSet<(Sym, u32)>,
}

impl Preemptions {
    /// Returns true if the pod's eviction was accepted.
    pub(super) fn evicted(&self, pod: &Uid) -> bool {
        self.evicted.contains(pod)
    }

    /// Drops the nomination of a pod; returns true if there was one.
    pub(super) fn forget(&mut self, pod: &ObjectKey) -> bool {
        self.nominations.remove(pod).is_some()
    }

    /// Returns true if devices are reserved for the pod.
    pub(super) fn is_reserved_for(&self, pod: &ObjectKey) -> bool {
        self.nominations.get(pod).is_some_and(|nomination| nomination.until.is_some())
    }
}

impl Reconciler {
    /// Returns the rank of a pod among pods: see [`aliquot_allocator::preempt::Terms::standing`]. Pods of a used-up budget may stand
    /// below their priority.
    pub(super) fn standing(&self, pod: &Pod) -> i32 {
        self.book.standing(&pod.key.namespace, pod.priority)
    }

    /// Returns the situation in which a pod is decided: without nodes that were rejected for it, and without
    /// devices that are kept for others.
    pub(super) fn situation(&self, pod: &Pod, now: Instant) -> Situation {
        let mut situation = self.beside_compaction(pod, now);
        self.close_compacted(&mut situation);
        situation
    }

    /// Returns the situation of a pod as if no GPU were being emptied.
    pub(super) fn beside_compaction(&self, pod: &Pod, now: Instant) -> Situation {
        self.beside(pod, now, true)
    }

    /// Returns the situation of a pod as if nothing were reserved.
    pub(super) fn beside_reservations(&self, pod: &Pod, now: Instant) -> Situation {
        let mut situation = self.beside(pod, now, false);
        self.close_compacted(&mut situation);
        situation
    }

    fn beside(&self, pod: &Pod, now: Instant, reservations: bool) -> Situation {
        let mut situation = Situation { left_out: self.left_out(pod, now), ..Situation::default() };
        Reserved { reservations, ..self.reserved_for_others() }.keep(pod, &mut situation);
        situation
    }

    /// Makes room for a pod that does not fit: looks for pods whose devices would be enough, and evicts them.
    pub(super) fn make_room(&mut self, pod: &Pod, reason: &NoFit, now: Instant, wall: Timestamp) {
        // The request is counted once, however often the pod is decided.
        if self.unmet.insert(pod.key.clone()) {
            for (board, place) in reason.wanted() {
                self.index.note_asked(*board, *place);
            }
        }
        let may_help = self.may_preempt(pod) && !reason.is_for_good();
        let choice = if may_help { self.choose_once(pod, now, wall) } else { Choice::None };
        match choice {
            // No pod is evicted for devices that a quota would hold back.
            Choice::Room(room) if self.waits_for_quota(pod, &room.plan, now) => {
                self.call_off(pod, now);
            }
            Choice::Room(room) => self.nominate(pod, &room, now),
            Choice::OutOfTime => {
                self.were_late(std::iter::once(&pod.key), now);
                self.tell_pod(pod, reasons::DOES_NOT_FIT, &reason.to_string(), now);
            }
            // Spared pods may be evicted later: what others left for the pod stays kept until then.
            Choice::None if self.may_preempt(pod) && !self.preemptions.spared.is_empty() => {
                self.queue.delay(&pod.key, now);
                self.tell_pod(pod, reasons::DOES_NOT_FIT, &reason.to_string(), now);
                let unearned = |nomination: &Nomination| !nomination.earned && nomination.until.is_none();
                if self.preemptions.nominations.get(&pod.key).is_some_and(unearned) {
                    self.end_nomination(&pod.key, now);
                }
            }
            Choice::None => {
                // Pods whose allocation is being written could be evicted once the API shows it.
                if self.may_preempt(pod) && !self.in_flight.is_empty() {
                    self.queue.delay(&pod.key, now);
                } else {
                    self.queue.park(&pod.key);
                }
                self.note_short(pod, now);
                // A reservation stays until its time is over, and its pod was told.
                if self.preemptions.is_reserved_for(&pod.key) {
                    return;
                }
                let note = match self.blocked_by_reservations(pod, now) {
                    Some(kept) => format!("{kept}. {reason}"),
                    None => reason.to_string(),
                };
                self.tell_pod(pod, reasons::DOES_NOT_FIT, &note, now);
                self.call_off(pod, now);
            }
        }
    }

    /// Returns true if the pod may preempt: only pods that wait for this controller, because kube-scheduler
    /// makes room for the others.
    fn may_preempt(&self, pod: &Pod) -> bool {
        self.settings.preemption
            && pod.gated
            && pod.node.is_none()
            && !pod.never_preempts
            && self.may_allocate(&pod.key.namespace)
            && (self.book.has_first_victims()
                || self.index.lowest_priority().is_some_and(|lowest| lowest < pod.priority))
    }

    /// Looks for victims, once for all pods that request the same, until the pods that could be evicted
    /// change.
    fn choose_once(&mut self, pod: &Pod, now: Instant, wall: Timestamp) -> Choice {
        let situation = self.situation(pod, now);
        // Writes under way show their holders later; pods that are spared, or over a budget, are so only for
        // a time.
        let settled = self.in_flight.is_empty()
            && self.preemptions.spared.is_empty()
            && !self.book.has_first_victims()
            && !self.compaction.is_under_way();
        let question = if settled { self.question(pod, &situation) } else { None };
        let (wakes, holders) = (self.queue.wakes(), self.index.holders_version());
        if question.is_some_and(|question| self.verdicts.is_hopeless(question, wakes, holders)) {
            return Choice::None;
        }
        let choice = self.choose(pod, &situation, wall);
        if let (Some(question), Choice::None) = (question, &choice) {
            self.verdicts.note_hopeless(question, wakes, holders);
        }
        choice
    }

    fn choose(&mut self, pod: &Pod, situation: &Situation, wall: Timestamp) -> Choice {
        let spared: HashSet<Uid> = self.preemptions.spared.keys().cloned().collect();
        let book = &self.book;
        let standing = |pod: &Pod| book.standing(&pod.key.namespace, pod.priority);
        let limits = self.settings.holds;
        let index = &self.index;
        let kept = |claim: &Claim| hold_standing(index, limits, book, claim);
        let terms = preempt::Terms {
            standing: &standing,
            kept: &kept,
            wall: wall.as_second(),
            evicted: &self.preemptions.evicted,
            spared: &spared,
        };
        let clock = &self.settings.clock;
        let (started, until) = (clock.now(), self.until());
        let mut expired = || clock.now() >= until;
        let (index, matcher) = (&self.index, &mut self.matcher);
        let choice =
            preempt::choose(index, matcher, pod, situation, &terms, self.settings.options, &mut expired);
        self.metrics.preemption(clock.since(started));
        choice
    }

    fn nominate(&mut self, pod: &Pod, room: &Room, now: Instant) {
        let terms = Terms { earned: room.victims.is_empty(), ..Terms::default() };
        self.keep(pod, &room.plan, terms, now);
        let node = room.plan.node.clone();
        let devices = room.plan.devices().join(", ");
        if room.victims.is_empty() {
            // The pod is looked at now and then, because the pods that are ending may not end.
            self.queue.delay(&pod.key, now);
            let awaited: Vec<String> = room.awaited.iter().map(|other| seen_from(other, pod)).collect();
            let after =
                if awaited.is_empty() { String::new() } else { format!(", after {}", awaited.join(", ")) };
            let note = format!("kept for this pod on node {node} until free{after}: {devices}");
            self.tell_pod(pod, reasons::NOMINATED, &note, now);
            if pod.nominated.as_ref() != Some(&node) {
                self.note_room(pod, Some(node), Vec::new());
            }
            return;
        }
        let names: Vec<String> = room.victims.iter().map(|victim| seen_from(&victim.pod, pod)).collect();
        tracing::info!(pod = %pod.key, %node, victims = room.victims.len(), lost = room.cost.lost, "preempting");
        let note = format!(
            "evicting {} pod(s) of lower priority on node {node}: {}; kept for this pod until it has them or is deleted: \
             {devices}",
            names.len(),
            names.join(", ")
        );
        self.tell_pod(pod, reasons::PREEMPTING, &note, now);
        let victims = room.victims.iter().map(|victim| {
            let (key, uid) = (victim.pod.clone(), victim.uid.clone());
            let why = Report {
                regarding: Regarding::Pod(key.clone(), uid.clone()),
                warning: true,
                reason: reasons::PREEMPTED,
                note: self.victim_note(&key, pod, Some(&node)),
            };
            Victim { pod: key, uid, why }
        });
        let victims = victims.collect();
        self.note_room(pod, Some(node), victims);
    }

    pub(super) fn note_room(&mut self, pod: &Pod, node: Option<Arc<str>>, victims: Vec<Victim>) {
        self.queue.remove(&pod.key);
        self.in_flight.insert(pod.key.clone(), InFlight { pools: HashSet::new(), claims: Vec::new() });
        let (key, uid) = (pod.key.clone(), pod.uid.clone());
        self.effects.push(Effect::Do(Job::MakeRoom { pod: key, uid, node, victims }));
    }

    /// Keeps the devices of a plan for a pod.
    pub(super) fn keep(&mut self, pod: &Pod, plan: &Plan, terms: Terms, now: Instant) {
        let held = plan.holders(&mut self.index);
        let Terms { earned, until, gpus } = terms;
        let nomination = Nomination {
            uid: pod.uid.clone(),
            standing: self.standing(pod),
            node: plan.node.clone(),
            held,
            needs: pod.needs.clone(),
            earned,
            until,
            gpus,
        };
        let entry = self.preemptions.nominations.entry(pod.key.clone());
        match entry {
            Entry::Vacant(entry) => {
                entry.insert(nomination);
            }
            Entry::Occupied(mut entry) => {
                let before = entry.insert(nomination);
                let moved = before.node != plan.node;
                entry.get_mut().earned |= before.earned && !moved;
                if moved {
                    self.queue.wake(now);
                }
            }
        }
    }

    /// Offers the nominated pods whose devices have become free, so that they are decided at once.
    pub(super) fn offer_nominated(&mut self, now: Instant) {
        let free = |nomination: &Nomination| {
            let mut stage = Overlay::new(&self.index, &nomination.node);
            stage.hold(&self.index, &nomination.held);
            stage.is_consistent(&self.index)
        };
        let nominations = self.preemptions.nominations.iter();
        let ready: Vec<ObjectKey> =
            nominations.filter(|(_, nomination)| free(nomination)).map(|(key, _)| key.clone()).collect();
        for key in ready {
            self.offer(&key, now);
        }
    }

    /// Frees what was kept for a pod; returns true if something was.
    pub(super) fn end_nomination(&mut self, pod: &ObjectKey, now: Instant) -> bool {
        let ended = self.preemptions.forget(pod);
        if ended {
            self.queue.wake(now);
        }
        ended
    }

    /// Stops making room for a pod, and removes the note on it. The note may be from an earlier controller,
    /// and unknown here if there was no room any more when this controller began; on a gated pod nobody else
    /// writes it.
    fn call_off(&mut self, pod: &Pod, now: Instant) {
        let ended = self.end_nomination(&pod.key, now);
        if pod.nominated.is_some() && (ended || pod.gated) {
            self.note_room(pod, None, Vec::new());
        }
    }

    /// Takes up, once, what an earlier controller began: before any decision, devices are kept again for the
    /// pods for which room is being made.
    pub(super) fn nominate_again(&mut self, now: Instant, wall: Timestamp) {
        if std::mem::replace(&mut self.preemptions.resumed, true) {
            return;
        }
        let mut pods: Vec<Pod> = self
            .index
            .pods()
            .filter(|pod| pod.nominated.is_some() && self.wants_decision(pod))
            .filter(|pod| self.may_preempt(pod) || (self.settings.reserving.is_some() && pod.gated))
            .cloned()
            .collect();
        pods.sort_by_key(|pod| (std::cmp::Reverse(self.standing(pod)), pod.created, pod.key.clone()));
        // No pod is decided before, so the time is limited for all of them together.
        let began = self.settings.clock.now();
        let until = began + self.settings.deadline.saturating_mul(RESUMED_WITHIN);
        self.turn = Some(Turn { began, until });
        let count = pods.len();
        for (done, pod) in pods.into_iter().enumerate() {
            if self.settings.clock.now() >= until {
                tracing::warn!(
                    left = count - done,
                    "not all that was kept for pods could be looked at in time"
                );
                break;
            }
            let situation = Situation { only: pod.nominated.clone(), ..self.situation(&pod, now) };
            let decision = self.decide(&pod, &situation);
            let plan = match decision {
                Decision::Placed(plan) => Some(*plan),
                _ if self.may_preempt(&pod) => match self.choose(&pod, &situation, wall) {
                    Choice::Room(room) => Some(room.plan),
                    Choice::None | Choice::OutOfTime => None,
                },
                _ => None,
            };
            if let Some(plan) = plan {
                tracing::info!(pod = %pod.key, node = %plan.node, "its devices are kept on");
                self.keep(&pod, &plan, Terms { earned: true, ..Terms::default() }, now);
            } else {
                self.reserve_again(&pod, now, wall);
            }
        }
    }

    /// Takes in the results of evictions.
    pub(super) fn room_made(
        &mut self,
        pod: &ObjectKey,
        uid: &Uid,
        evictions: Vec<Eviction>,
        error: Option<WriteError>,
        now: Instant,
    ) -> Change {
        self.in_flight.remove(pod);
        let known = self.index.pod(pod).filter(|known| known.uid == *uid).cloned();
        for Eviction { pod: victim, uid: victim_uid, fate } in evictions {
            self.metrics.eviction(fate.word());
            match fate {
                Fate::Evicted => {
                    self.preemptions.evicted.insert(victim_uid.clone());
                    // The devices of an evicted pod are not kept beyond its end.
                    let claims: Vec<ObjectKey> =
                        self.index.pod(&victim).into_iter().flat_map(Pod::claim_keys).collect();
                    for claim in &claims {
                        self.holds.note(claim);
                    }
                    if let Some(nomination) = self.preemptions.nominations.get_mut(pod) {
                        nomination.earned = true;
                    }
                    tracing::info!(pod = %victim, for_pod = %pod, "evicted");
                }
                Fate::Gone => {}
                Fate::Refused(message) | Fate::Unanswered(message) => {
                    tracing::info!(pod = %victim, for_pod = %pod, message, "not evicted");
                    self.preemptions.spared.insert(victim_uid, now + self.settings.spared);
                    if let Some(known) = &known {
                        let note = format!(
                            "{} was not evicted: {message}. Others are looked for, and it is asked again in {:?}",
                            seen_from(&victim, known),
                            self.settings.spared
                        );
                        self.tell_pod(known, reasons::PREEMPTION_REFUSED, &note, now);
                    }
                }
            }
        }
        self.offer(pod, now);
        if let Some(error) = error {
            tracing::warn!(%pod, %error, "could not make room");
            self.queue.delay(pod, now);
        }
        Change::Nothing
    }

    fn victim_note(&self, victim: &ObjectKey, pod: &Pod, node: Option<&str>) -> String {
        let node = node.unwrap_or_default();
        let name = if victim.namespace == pod.key.namespace {
            format!("pod {}", pod.key.name)
        } else {
            format!("pod {} of another namespace", pod.uid)
        };
        let known = self.index.pod(victim);
        let own = known.map(|known| format!(", this one's is {}", known.priority)).unwrap_or_default();
        let budget = match self.book.first_victim_of(&victim.namespace) {
            Some(budget) => format!(", and budget {budget} is used up"),
            None => String::new(),
        };
        format!(
            "evicted so that {name} gets its devices on node {node}: its priority is {}{own}{budget}",
            pod.priority
        )
    }

    /// Drops entries that are over.
    pub(super) fn tidy_preemptions(&mut self, now: Instant) {
        let alive: HashSet<&Uid> = if self.preemptions.evicted.is_empty() {
            HashSet::new()
        } else {
            self.index.pods().map(|pod| &pod.uid).collect()
        };
        self.preemptions.evicted.retain(|uid| alive.contains(uid));
        self.preemptions.spared.retain(|_, until| *until > now);
        let gone: Vec<ObjectKey> = self
            .preemptions
            .nominations
            .iter()
            .filter(|(key, nomination)| self.index.pod(key).is_none_or(|pod| pod.uid != nomination.uid))
            .map(|(key, _)| key.clone())
            .collect();
        for key in gone {
            self.end_nomination(&key, now);
        }
        let count = self.preemptions.nominations.len();
        self.metrics.nominated.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

/// Returns the name of a pod as another pod's events give it; names of other namespaces are not shown.
pub(super) fn seen_from(pod: &ObjectKey, other: &Pod) -> String {
    if pod.namespace == other.key.namespace {
        pod.name.to_string()
    } else {
        "a pod of another namespace".to_owned()
    }
}

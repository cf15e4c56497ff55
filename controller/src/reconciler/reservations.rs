//! Reservations: room for large requests that small ones would starve. Devices are kept for the first pod in
//! order that has waited long enough, until the pods that have them end.
//!
//! A reservation is a nomination (see [`super::preemption`]) for which nobody is evicted. It is limited in
//! time: afterwards the pod waits as long again before it gets another reservation, on other nodes if there
//! are any. All reservations together are limited to a part of the GPUs. Pods of higher priority pass a
//! reservation.
//!
//! `status.nominatedNodeName` tells the next controller of a reservation; its time begins anew there.

use super::preemption::Terms;
use super::{Reconciler, reasons};
use aliquot_allocator::preempt::{self, Choice, Room};
use aliquot_allocator::schedule::{Decision, Plan, Situation};
use aliquot_allocator::snapshot::{ObjectKey, Pod, Sym, Uid};
use k8s_openapi::jiff::Timestamp;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval at which due pods are looked for.
const LOOK: Duration = Duration::from_secs(1);
/// The most pods that an event names.
const NAMED: usize = 5;

/// The conditions of reservations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserving {
    /// The time that a pod has to wait for room before it gets a reservation.
    pub after: Duration,
    /// The longest time that devices are kept.
    pub at_most: Duration,
    /// The most GPUs that are reserved at a time, in percent of all GPUs; one is always allowed.
    pub percent: usize,
}

impl Default for Reserving {
    fn default() -> Self {
        Self { after: Duration::from_secs(300), at_most: Duration::from_secs(3600), percent: 25 }
    }
}

/// The state of reservations.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    /// Pods without room, and the time from which their wait counts.
    short: HashMap<ObjectKey, Instant>,
    /// Nodes on which a reservation of the pod ended without success.
    tried: HashMap<ObjectKey, HashSet<Arc<str>>>,
    looked: Option<Instant>,
}

impl Reconciler {
    /// Notes that a pod found no room.
    pub(super) fn note_short(&mut self, pod: &Pod, now: Instant) {
        if self.settings.reserving.is_some() {
            let since = self.first_seen.get(&pod.key).copied().unwrap_or(now);
            self.reservations.short.entry(pod.key.clone()).or_insert(since);
        }
    }

    /// Ends reservations whose time is over, and makes the next one that is due.
    pub fn keep_reservations(&mut self, now: Instant, wall: Timestamp) {
        let Some(reserving) = self.settings.reserving.clone() else { return };
        let looked = self.reservations.looked;
        if !self.is_synced() || looked.is_some_and(|at| now.saturating_duration_since(at) < LOOK) {
            return;
        }
        self.reservations.looked = Some(now);
        self.begin_turn();
        self.end_late_reservations(&reserving, now);
        self.tidy_reservations();
        self.reserve_next(&reserving, now, wall);
        let reserved = self.preemptions.nominations.values().filter(|nomination| nomination.until.is_some());
        self.metrics.reserved.set(i64::try_from(reserved.count()).unwrap_or(i64::MAX));
    }

    fn end_late_reservations(&mut self, reserving: &Reserving, now: Instant) {
        let nominations = self.preemptions.nominations.iter();
        let late: Vec<(ObjectKey, Arc<str>)> = nominations
            .filter(|(key, nomination)| {
                nomination.until.is_some_and(|until| until <= now) && !self.in_flight.contains_key(*key)
            })
            .map(|(key, nomination)| (key.clone(), nomination.node.clone()))
            .collect();
        for (key, node) in late {
            self.end_nomination(&key, now);
            self.metrics.reservation("expired");
            self.reservations.short.insert(key.clone(), now);
            self.reservations.tried.entry(key.clone()).or_default().insert(node.clone());
            let Some(pod) = self.index.pod(&key).cloned() else { continue };
            tracing::info!(pod = %key, %node, "the reservation is over");
            let note = format!(
                "devices on node {node} were kept for this pod for {:?}, which is the longest, and did not become \
                 free; they are free for others now, and others may be kept for it in {:?}",
                reserving.at_most, reserving.after
            );
            self.tell_pod(&pod, reasons::RESERVATION_ENDED, &note, now);
            if pod.nominated.is_some() {
                self.note_room(&pod, None, Vec::new());
            }
        }
    }

    fn tidy_reservations(&mut self) {
        let mut short = std::mem::take(&mut self.reservations.short);
        short.retain(|key, _| {
            self.in_flight.contains_key(key)
                || self.index.pod(key).is_some_and(|pod| self.wants_decision(pod))
        });
        self.reservations.tried.retain(|key, _| short.contains_key(key));
        self.reservations.short = short;
    }

    /// Reserves devices for the first pod that has waited long enough; the pods behind it wait for their
    /// turn.
    fn reserve_next(&mut self, reserving: &Reserving, now: Instant, wall: Timestamp) {
        let waited = |since: &Instant| now.saturating_duration_since(*since) >= reserving.after;
        let due = self.reservations.short.iter().filter(|(_, since)| waited(since));
        let mut due: Vec<Pod> = due
            .filter(|(key, _)| {
                !self.preemptions.nominations.contains_key(*key)
                    && !self.in_flight.contains_key(*key)
                    && !self.budgets.has_refused(key)
            })
            .filter_map(|(key, _)| self.index.pod(key))
            .filter(|pod| pod.gated && pod.node.is_none() && !pod.is_held_by_others())
            .cloned()
            .collect();
        due.sort_by_key(|pod| (Reverse(self.standing(pod)), pod.created, pod.key.clone()));
        let Some(pod) = due.first() else { return };
        // The next pod has its own turn: there is one search a look.
        let again = |core: &mut Self| core.reservations.short.insert(pod.key.clone(), now);
        let room = match self.room_to_reserve(pod, None, now, wall) {
            Choice::Room(room) => room,
            Choice::None | Choice::OutOfTime => {
                // No pod that could end would make room, at least not on nodes that were not tried yet.
                self.reservations.tried.remove(&pod.key);
                again(self);
                return;
            }
        };
        if self.waits_for_quota(pod, &room.plan, now) {
            again(self);
            return;
        }
        let wanted = self.gpus_of(&room.plan).len();
        let most = self.most_reserved(reserving);
        if wanted > most {
            let note = format!(
                "it has waited for room for {:?}, but needs {wanted} GPUs, and at most {most} are kept for waiting pods \
                 (controller.reservation.percent of the chart)",
                reserving.after
            );
            self.tell_pod(pod, reasons::RESERVATION_ENDED, &note, now);
            self.metrics.reservation("too_large");
            again(self);
            return;
        }
        let reserved: HashSet<(Sym, u32)> = self
            .preemptions
            .nominations
            .values()
            .flat_map(|nomination| nomination.gpus.iter().copied())
            .collect();
        // The pod stays first in order: pods behind it do not pass.
        if reserved.len() + wanted > most {
            return;
        }
        self.reserve(pod, &room, reserving, now);
    }

    fn reserve(&mut self, pod: &Pod, room: &Room, reserving: &Reserving, now: Instant) {
        let terms = Terms {
            earned: false,
            until: Some(now + reserving.at_most),
            gpus: self.gpus_of(&room.plan).into_iter().collect(),
        };
        self.keep(pod, &room.plan, terms, now);
        self.metrics.reservation("made");
        let node = room.plan.node.clone();
        let awaited: Vec<String> = room
            .victims
            .iter()
            .map(|victim| &victim.pod)
            .chain(&room.awaited)
            .take(NAMED)
            .map(|other| super::preemption::seen_from(other, pod))
            .collect();
        let count = room.victims.len() + room.awaited.len();
        let more = if count > awaited.len() { " and others" } else { "" };
        tracing::info!(pod = %pod.key, %node, awaited = count, "reserving");
        let note = format!(
            "it has waited for room for {:?}, so devices on node {node} are kept for it for at most {:?}, until {}{more} \
             ended: {}",
            reserving.after,
            reserving.at_most,
            if awaited.is_empty() { "those there".to_owned() } else { awaited.join(", ") },
            room.plan.devices().join(", ")
        );
        self.tell_pod(pod, reasons::RESERVED, &note, now);
        self.note_room(pod, Some(node), Vec::new());
    }

    /// Takes up the reservation of an earlier controller for a pod.
    pub(super) fn reserve_again(&mut self, pod: &Pod, now: Instant, wall: Timestamp) {
        let Some(reserving) = self.settings.reserving.clone() else { return };
        if let Choice::Room(room) = self.room_to_reserve(pod, pod.nominated.clone(), now, wall)
            && self.gpus_of(&room.plan).len() <= self.most_reserved(&reserving)
        {
            self.note_short(pod, now);
            self.reserve(pod, &room, &reserving, now);
        }
    }

    /// Returns the devices that a pod would get if other pods ended, as few pods as possible. Any pod may be
    /// among them, because nobody is evicted.
    pub(super) fn room_to_reserve(
        &mut self,
        pod: &Pod,
        only: Option<Arc<str>>,
        now: Instant,
        wall: Timestamp,
    ) -> Choice {
        let mut situation = Situation { only, ..self.situation(pod, now) };
        let tried = self.reservations.tried.get(&pod.key).into_iter().flatten();
        situation.left_out.extend(tried.map(|node| (node.clone(), "tried".to_owned())));
        let key = &pod.key;
        let standing = |other: &Pod| i32::from(other.key == *key);
        let nobody: HashSet<Uid> = HashSet::new();
        let evicted = &self.preemptions.evicted;
        let terms = preempt::Terms {
            standing: &standing,
            // Devices that are kept without a pod do not become free by the end of a pod.
            kept: &|_| i32::MAX,
            wall: wall.as_second(),
            evicted,
            spared: &nobody,
        };
        let until = self.until();
        let clock = &self.settings.clock;
        let mut expired = || clock.now() >= until;
        let (index, matcher) = (&self.index, &mut self.matcher);
        preempt::choose(index, matcher, pod, &situation, &terms, self.settings.options, &mut expired)
    }

    fn gpus_of(&mut self, plan: &Plan) -> BTreeSet<(Sym, u32)> {
        let held = plan.holders(&mut self.index);
        let gpu = |(pool, holder): &(Sym, aliquot_allocator::snapshot::Holder)| {
            let layout = self.index.pool(*pool).and_then(|pool| pool.layout.as_ref())?;
            let device = layout.devices.get(layout.position(holder.device)? as usize)?;
            (!holder.admin).then_some((*pool, device.gpu))
        };
        held.iter().filter_map(gpu).collect()
    }

    fn most_reserved(&self, reserving: &Reserving) -> usize {
        let layouts = self.index.pools().filter_map(|pool| pool.layout.as_ref());
        let gpus: usize = layouts.map(|layout| layout.gpus.len()).sum();
        (gpus.saturating_mul(reserving.percent) / 100).max(1)
    }

    /// Returns why a pod does not fit, if it would fit without the reservations of others; otherwise `None`.
    pub(super) fn blocked_by_reservations(&mut self, pod: &Pod, now: Instant) -> Option<String> {
        let own = self.standing(pod);
        let nominations = self.preemptions.nominations.iter();
        let mut others: Vec<ObjectKey> = nominations
            .filter(|(key, nomination)| {
                nomination.until.is_some() && nomination.standing >= own && **key != pod.key
            })
            .map(|(key, _)| key.clone())
            .collect();
        if others.is_empty() {
            return None;
        }
        let open = self.beside_reservations(pod, now);
        let Decision::Placed(plan) = self.decide(pod, &open) else { return None };
        others.sort();
        let names: Vec<String> =
            others.iter().take(NAMED).map(|other| super::preemption::seen_from(other, pod)).collect();
        Some(format!(
            "it would fit on node {}, but devices are kept for pods that have waited longer: {}",
            plan.node,
            names.join(", ")
        ))
    }
}

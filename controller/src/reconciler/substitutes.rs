//! Larger profiles in place of requested ones: reports them, and lets pods go back to the requested profile.
//!
//! One pod at a time goes back, and only while no pod waits. The place with the requested profile is held
//! from before the eviction until the recreated pod has it, for a limited time. The note on the node lets
//! another controller go on holding it.

use super::{Effect, Reconciler, Regarding, Report, reasons};
use crate::writer::{Eviction, Job, WriteError};
use aliquot_allocator::schedule;
use aliquot_allocator::snapshot::{Allocation, Change, Claim, Holder, ObjectKey, Pod, PodNeeds, Sym, Uid};
use aliquot_allocator::substitution::back::{self, Place, Successor};
use aliquot_allocator::substitution::substituted;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time that a pod is left alone after its eviction was refused.
const SPARED: Duration = Duration::from_secs(60);
/// The most pods that are looked at in one step.
const LOOKED_AT: usize = 16;
/// The claim UID of the holder of a held place, because the claim that will have the place does not exist
/// yet.
const HOLDER: &str = "going-back";

/// The state of the pods that go back.
#[derive(Debug, Default)]
pub(super) struct Returns {
    hold: Option<Hold>,
    /// The time since which pods could have what they requested.
    possible: HashMap<Uid, Instant>,
    /// Pods that are left alone for a while.
    spared: HashMap<Uid, Instant>,
    /// True if nothing has become free since no pod could go back.
    quiet: bool,
    /// True if the place that an earlier controller held was taken up.
    pub(super) resumed: bool,
}

/// A place that is held.
#[derive(Debug)]
pub(super) struct Hold {
    successor: Successor,
    /// The pod that leaves.
    pub(super) leaves: Uid,
    pub(super) node: Arc<str>,
    pub(super) held: Vec<(Sym, Holder)>,
    /// What the next pod needs of the node in addition.
    pub(super) needs: Arc<PodNeeds>,
    until: Instant,
}

impl Returns {
    /// Notes that something may have become free.
    pub(super) const fn look_again(&mut self) {
        self.quiet = false;
    }

    /// Returns the held place, if it is held for another pod than this one.
    pub(super) fn held_from(&self, pod: &Pod) -> Option<&Hold> {
        self.hold.as_ref().filter(|hold| !hold.successor.is(pod))
    }
}

fn holder(device: Sym) -> Holder {
    Holder {
        claim: HOLDER.into(),
        device,
        admin: false,
        share: None,
        consumed: Box::default(),
        time_slice: None,
    }
}

impl Reconciler {
    /// Reports on a claim and its pods that a larger profile was given than requested, whichever controller
    /// allocated it.
    pub(super) fn tell_substituted(&mut self, claim: &Claim, allocation: &Allocation) {
        for given in substituted(claim, allocation) {
            let go_back = claim.substitution.as_ref().is_some_and(|record| record.go_back);
            let later = if go_back {
                "the pod goes back when that is free, within its disruption budgets"
            } else {
                "the pod keeps it until it ends"
            };
            let note = format!(
                "claim {}, request {}: {} was free nowhere, so the larger {} is given, as the allocation policy \
                 says; {later}",
                claim.key.name, given.request, given.asked, given.given
            );
            tracing::info!(claim = %claim.key, request = given.request, asked = given.asked, given = given.given, "substituted");
            self.metrics.substituted.inc();
            let pods: Vec<_> = self
                .index
                .pods_of_claim(&claim.key)
                .map(|pod| Regarding::Pod(pod.key.clone(), pod.uid.clone()))
                .collect();
            let own = Regarding::Claim(claim.key.clone(), claim.uid.clone());
            for regarding in pods.into_iter().chain(std::iter::once(own)) {
                let note = note.clone();
                self.tell(Report { regarding, warning: false, reason: reasons::SUBSTITUTED, note });
            }
        }
    }

    /// Takes in that a pod is given its devices: a place that was held for it is not held any more.
    pub(super) fn arrived(&mut self, pod: &Pod) {
        if self.returns.hold.as_ref().is_some_and(|hold| hold.successor.is(pod)) {
            tracing::info!(pod = %pod.key, "back");
            self.end_hold();
        }
    }

    fn end_hold(&mut self) {
        if let Some(hold) = self.returns.hold.take() {
            self.effects.push(Effect::Do(Job::PlaceFree { node: hold.node }));
        }
    }

    /// Takes up, once, the place that an earlier controller held.
    pub(super) fn hold_again(&mut self, now: Instant) {
        if std::mem::replace(&mut self.returns.resumed, true) {
            return;
        }
        let noted = self.index.nodes_with_pools().find_map(|name| {
            let place: Place = serde_json::from_str(self.index.node(name)?.going_back.as_deref()?).ok()?;
            Some((name.clone(), place))
        });
        let Some((node, place)) = noted else { return };
        let held = place
            .devices
            .iter()
            .filter_map(|(pool, device)| Some((self.index.sym(pool)?, holder(self.index.sym(device)?))));
        let held = held.collect();
        tracing::info!(%node, namespace = %place.successor.namespace, "a place is held on");
        let until = now + self.settings.place_held;
        let Place { successor, needs, .. } = place;
        let leaves: Uid = successor.leaves.as_str().into();
        // A note without the needs is from an earlier version; then they come from one of the pods, if it is
        // there.
        let of_pod = || self.index.pods().find(|pod| pod.uid == leaves || successor.is(pod));
        let needs = needs.map(|needs| Arc::new(needs.into()));
        let needs = needs.or_else(|| of_pod().map(|pod| pod.needs.clone())).unwrap_or_default();
        self.returns.hold = Some(Hold { successor, leaves, node, held, needs, until });
    }

    /// Looks for a pod that can have what it requested.
    pub(super) fn look_back(&mut self, now: Instant) {
        if let Some(hold) = &self.returns.hold {
            if now >= hold.until {
                tracing::info!(node = %hold.node, "nobody came for the place that was held");
                self.end_hold();
                self.queue.wake(now);
            }
            return;
        }
        let (ready, delayed, _) = self.queue.lengths();
        if !self.settings.go_back || self.returns.quiet || ready + delayed > 0 || !self.in_flight.is_empty() {
            return;
        }
        self.returns.spared.retain(|_, until| *until > now);
        let mut possible = HashMap::new();
        let mut chosen = None;
        for key in back::candidates(&self.index).into_iter().take(LOOKED_AT) {
            let Some(pod) = self.index.pod(&key).cloned() else { continue };
            if self.returns.spared.contains_key(&pod.uid) || !self.gets_it_back(&pod.key.namespace) {
                continue;
            }
            let situation = self.situation(&pod, now);
            let until = self.until();
            let plan = schedule::place_as_asked(
                &self.index,
                &mut self.matcher,
                &pod,
                &situation,
                self.settings.options,
                &mut || self.settings.clock.now() >= until,
            );
            let Some(plan) = plan else { continue };
            let since = self.returns.possible.get(&pod.uid).copied().unwrap_or(now);
            possible.insert(pod.uid.clone(), since);
            if now.saturating_duration_since(since) >= self.settings.settled {
                chosen = Some((pod, plan));
                break;
            }
        }
        // Nothing can be found until something becomes free.
        self.returns.quiet = possible.is_empty() && self.returns.spared.is_empty();
        self.returns.possible = possible;
        if let Some((pod, plan)) = chosen {
            self.send_back(&pod, &plan, now);
        }
    }

    fn send_back(&mut self, pod: &Pod, plan: &schedule::Plan, now: Instant) {
        let Some(successor) = Successor::of(pod) else { return };
        let results = plan.drafts.iter().flat_map(|draft| draft.allocation().devices.iter());
        let results = results.flat_map(|devices| devices.results.iter().flatten());
        let mut held = Vec::new();
        let mut devices = Vec::new();
        for result in
            results.filter(|result| result.driver == self.index.driver() && result.share_id.is_none())
        {
            if let (Some(pool), Some(device)) = (self.index.sym(&result.pool), self.index.sym(&result.device))
            {
                held.push((pool, holder(device)));
                devices.push((result.pool.clone(), result.device.clone()));
            }
        }
        let names: Vec<&str> = devices.iter().map(|(_, device): &(String, String)| device.as_str()).collect();
        let note = format!(
            "what this pod asked for is free: {} on node {}. It is evicted, and the place is held for the pod that \
             is made in its stead",
            names.join(", "),
            plan.node
        );
        let place = Place {
            successor: successor.clone(),
            devices: devices.clone(),
            needs: Some((&*pod.needs).into()),
        };
        let Ok(place) = serde_json::to_string(&place) else { return };
        tracing::info!(pod = %pod.key, node = %plan.node, "going back");
        let until = now + self.settings.place_held;
        let (leaves, needs) = (pod.uid.clone(), pod.needs.clone());
        self.returns.hold = Some(Hold { successor, leaves, node: plan.node.clone(), held, needs, until });
        self.returns.possible.remove(&pod.uid);
        let (key, uid) = (pod.key.clone(), pod.uid.clone());
        let why = Report {
            regarding: Regarding::Pod(key.clone(), uid.clone()),
            warning: false,
            reason: reasons::GOING_BACK,
            note,
        };
        self.effects.push(Effect::Do(Job::GoBack { pod: key, uid, node: plan.node.clone(), place, why }));
    }

    /// Takes in the result of the eviction of a pod that goes back.
    pub(super) fn went_back(
        &mut self,
        pod: &ObjectKey,
        uid: &Uid,
        evictions: Vec<Eviction>,
        error: Option<WriteError>,
        now: Instant,
    ) -> Change {
        let refused = self.count_evictions(evictions).or_else(|| error.map(|error| error.to_string()));
        let Some(message) = refused else { return Change::Nothing };
        tracing::info!(%pod, message, "not sent back");
        self.returns.spared.insert(uid.clone(), now + SPARED);
        self.tell(Report {
            regarding: Regarding::Pod(pod.clone(), uid.clone()),
            warning: false,
            reason: reasons::NOT_EVICTED,
            note: format!(
                "not evicted: {message}. The pod keeps what it has; it is asked again in {SPARED:?}"
            ),
        });
        self.end_hold();
        Change::Room
    }
}

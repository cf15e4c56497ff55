//! Decides when a hand-over from kube-scheduler to the controller may end early: once nothing that
//! kube-scheduler decided can still be written. The logic is pure: the controller makes the looks, reports
//! the result, and records it.
//!
//! # What can still be written
//! kube-scheduler writes an allocation while it binds the pod (PreBind), at the latest before `spec.nodeName`
//! is set. Before that, its decision exists only in its memory, for as long as volumes take. So an allocation
//! that can still come is for a pod that is not bound, has no gate, and has a claim without an allocation, or
//! an extended resource for which kube-scheduler makes the claim only then ([`under_way`]). Allocations that
//! wait for binding conditions are in the API already, and count.
//!
//! # Where the controller looks
//! The controller lists pods and claims from the API itself: its watches may be behind, and what they have
//! not seen may be under way. A look that began after the controller saw the pool handed over shows every pod
//! that kube-scheduler can have decided on without knowing of the hand-over, with two exceptions:
//! - a pod that came later, for which kube-scheduler decided on slices whose change it has not seen yet;
//! - a pod that was deleted before, for which a request is under way all the same.
//!
//! Both cases end soon. The settle time covers them: it is the longest time that client-go pauses before it
//! watches slices again (30 s), while pods, which it sees all the time, are decided on.
//! - Pods that are under way in looks that began within the settle time, and in the first look after it, are
//!   suspects. Pods that come later are decided on with knowledge of the hand-over. So a node can leave
//!   scheduler mode in a busy cluster.
//! - The hand-over is over when two looks that are a settle time apart, and all looks between them, show no
//!   suspect under way.
//!
//! # Invariants
//! Once the result is true, it stays true. So a record of it may be late, may come from a controller that no
//! longer leads, and may get no answer. The record names a generation of the pool, so it says nothing about
//! another hand-over. A new leader begins anew. A pod that waits for something else delays the hand-over only
//! until the time that the node agent has set.

use crate::schedule::{Matcher, ask, fit::IMPLICIT_EXTENDED};
use crate::snapshot::{ObjectKey, Pod, Resolution, Snapshot, Uid};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shortest time between two looks, unless the settle time is shorter. A look lists pods and claims of
/// the whole cluster.
const PAUSE: Duration = Duration::from_secs(2);

/// Returns true if kube-scheduler, or another scheduler, may be binding the pod. A deletion does not prevent
/// this: the pod exists as long as it has a finalizer, and a binding that has begun goes on.
pub fn may_be_bound(pod: &ApiPod) -> bool {
    let spec = pod.spec.as_ref();
    let bound = spec.and_then(|spec| spec.node_name.as_deref()).is_some_and(|node| !node.is_empty());
    let gated = spec.is_some_and(|spec| spec.scheduling_gates.iter().flatten().next().is_some());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let ended = matches!(phase, Some("Succeeded" | "Failed"));
    !bound && !gated && !ended
}

/// Returns true if a scheduler may be giving devices of this driver to the pod. An unclear case counts as
/// true: a claim that is not created yet or not known, a claim source of an unknown kind, a class that is
/// gone. The snapshot has the pod's claims at least in the state in which they were when the pod was read.
pub fn under_way(index: &Snapshot, matcher: &mut Matcher, pod: &ApiPod) -> bool {
    if !may_be_bound(pod) {
        return false;
    }
    let Some(read) = Pod::read(pod) else { return true };
    let claims = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()).count();
    let waits = |name: &Arc<str>, matcher: &mut Matcher| {
        let key = ObjectKey { namespace: read.key.namespace.clone(), name: name.clone() };
        let Some(claim) = index.claim(&key) else { return true };
        claim.allocation.is_none() && !matches!(ask::resolve(index, matcher, claim), Ok(None))
    };
    read.claims.len() != claims
        || read.claims.iter().any(|claim| match &claim.resolution {
            Resolution::Claim(name) => waits(name, matcher),
            Resolution::NotMade => true,
            Resolution::NotNeeded => false,
        })
        || read.needs.requests.keys().any(|resource| stands_for_ours(index, matcher, resource))
}

/// Returns true if kube-scheduler may make a claim for devices of this driver for the resource.
fn stands_for_ours(index: &Snapshot, matcher: &mut Matcher, resource: &str) -> bool {
    let driver = index.driver();
    match resource.strip_prefix(IMPLICIT_EXTENDED) {
        Some(class) => index.class(class).is_none_or(|class| matcher.may_select(driver, class)),
        None => {
            let mut classes =
                index.classes().filter(|class| class.extended_resource.as_deref() == Some(resource));
            classes.any(|class| matcher.may_select(driver, class))
        }
    }
}

/// Pods to which a scheduler may be giving devices, by UID.
pub type UnderWay = BTreeMap<Uid, ObjectKey>;

/// A pool that is handed over from kube-scheduler to the controller.
#[derive(Debug)]
struct HandOver {
    generation: i64,
    /// When the controller saw the hand-over.
    seen: Instant,
    /// True while a pod that is under way may have been decided on without knowledge of the hand-over.
    open: bool,
    suspects: HashSet<Uid>,
    /// The time since which no look has shown a suspect under way.
    clear: Option<Instant>,
    told: bool,
    done: bool,
}

impl HandOver {
    fn new(generation: i64, seen: Instant) -> Self {
        Self { generation, seen, open: true, suspects: HashSet::new(), clear: None, told: false, done: false }
    }

    fn looked(&mut self, began: Instant, ended: Instant, under_way: &UnderWay, settle: Duration) {
        if began < self.seen || self.done {
            return;
        }
        if self.open {
            self.suspects.extend(under_way.keys().cloned());
        }
        self.open &= began < self.seen + settle;
        self.suspects.retain(|suspect| under_way.contains_key(suspect));
        self.clear = self.suspects.is_empty().then(|| self.clear.unwrap_or(ended));
        self.done = self.clear.is_some_and(|since| began >= since + settle);
    }
}

/// The news from a look.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct News {
    /// Nodes, with the generation of their pool, for which nothing is under way any more.
    pub idle: Vec<(Arc<str>, i64)>,
    /// Nodes that wait for these pods; each node is reported once.
    pub held_up: Vec<(Arc<str>, Vec<ObjectKey>)>,
}

/// The hand-overs to the controller, by node.
#[derive(Debug, Default)]
pub struct HandOvers {
    nodes: BTreeMap<Arc<str>, HandOver>,
    looking: bool,
    looked: Option<Instant>,
}

impl HandOvers {
    /// Replaces the set of nodes that are handed over to the controller, with the generation of their pools.
    /// Nodes for which kube-scheduler is already recorded as idle are not among them.
    pub fn note(&mut self, nodes: &HashMap<Arc<str>, i64>, now: Instant) {
        self.nodes.retain(|node, known| nodes.get(node) == Some(&known.generation));
        for (node, generation) in nodes {
            self.nodes.entry(node.clone()).or_insert_with(|| HandOver::new(*generation, now));
        }
    }

    /// Returns true if a look is due now. The look then lasts until [`Self::looked`] or [`Self::not_looked`].
    pub fn begin_look(&mut self, now: Instant, settle: Duration) -> bool {
        let begins = self.next_look(settle).is_some_and(|due| due <= now);
        self.looking |= begins;
        begins
    }

    /// Returns when the next look is due; `None` while no node waits for one, or while a look is under way.
    pub fn next_look(&self, settle: Duration) -> Option<Instant> {
        let mut waiting = self.nodes.values().filter(|known| !known.done).map(|known| known.seen);
        let first = waiting.next().filter(|_| !self.looking)?;
        let newest = waiting.fold(first, Instant::max);
        // Nodes that are handed over shortly after one another share a look.
        let again =
            |last: Instant| if newest <= last { last + settle } else { newest.max(last + PAUSE.min(settle)) };
        Some(self.looked.map_or(newest, again))
    }

    /// Notes that a look could not be finished.
    pub fn not_looked(&mut self, now: Instant) {
        self.looking = false;
        self.looked = Some(now);
    }

    /// Takes in the result of a look: it began at `began` and showed these pods under way. Returns what is
    /// new.
    pub fn looked(&mut self, began: Instant, now: Instant, under_way: &UnderWay, settle: Duration) -> News {
        self.not_looked(now);
        let mut news = News::default();
        for (node, known) in &mut self.nodes {
            let before = known.done;
            known.looked(began, now, under_way, settle);
            if known.done && !before {
                news.idle.push((node.clone(), known.generation));
            }
            if !known.open && !known.suspects.is_empty() && !std::mem::replace(&mut known.told, true) {
                let pods = under_way.iter().filter(|(uid, _)| known.suspects.contains(*uid));
                news.held_up.push((node.clone(), pods.map(|(_, key)| key.clone()).collect()));
            }
        }
        news
    }

    /// Notes that the record that nothing is under way for a node's pool could not be written.
    pub fn not_written(&mut self, node: &str, generation: i64) {
        if let Some(known) = self.nodes.get_mut(node).filter(|known| known.generation == generation) {
            known.done = false;
        }
    }

    /// Returns how many nodes wait, and for how many pods.
    pub fn counts(&self) -> (usize, usize) {
        let waiting = || self.nodes.values().filter(|known| !known.done);
        let pods: HashSet<&Uid> = waiting().flat_map(|known| &known.suspects).collect();
        (waiting().count(), pods.len())
    }
}

#[cfg(test)]
#[path = "handover/tests.rs"]
mod tests;

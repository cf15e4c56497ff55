//! When a hand-over from kube-scheduler to us may end before its time: once nothing that kube-scheduler decided on can
//! still be written. Pure: the [brain](crate::brain) has it looked, tells, and writes it down.
//!
//! # What can still be written
//! kube-scheduler writes an allocation while it binds the pod (PreBind), at the latest before `spec.nodeName` is set;
//! before, its decision is in its memory alone, for as long as volumes take. So whatever can still come is for a pod
//! that is not bound, has no gate, and has a claim without an allocation, or an extended resource for which
//! kube-scheduler makes the claim only then ([`under_way`]). Allocations that wait for binding conditions are in the
//! API already, and count.
//!
//! # Where it is looked
//! In the API itself: our watches may be behind, and what they have not seen may be under way. A look that began after
//! we saw the pool handed over shows every pod that kube-scheduler can have decided on without knowing of that, but
//! for two:
//! - one that came later, of which kube-scheduler decided on slices that it has not seen change yet;
//! - one that was deleted before, for which a request is under way all the same.
//!
//! Both are over soon, and the settle time is what that takes: it is as long as client-go pauses at most before
//! it watches slices again (30 s), while pods that it sees all the time are decided on.
//! - Pods that are under way in looks that began within the settle time, and in the first one after it, are suspects;
//!   what comes later knows of the hand-over. So a node can leave a busy cluster in scheduler mode.
//! - It is over when two looks that are a settle time apart, and all between them, show no suspect under way.
//!
//! # What it rests on
//! Once true it stays true, so a note of it may be late, from a controller that leads no more, or without its answer.
//! It is of a generation of the pool, so it says nothing about another hand-over. A new leader begins anew. A pod that
//! waits for something else holds it up only until the time that the node agent has set.

use crate::decide::{Matcher, ask, fit::IMPLICIT_EXTENDED};
use crate::index::{Index, ObjectKey, Pod, Resolution, Uid};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks at least, if the settle time is not shorter: a look lists pods and claims of the whole cluster.
const PAUSE: Duration = Duration::from_secs(2);

/// Whether kube-scheduler, or another scheduler, may be binding a pod: nothing but itself keeps it from it. A deletion
/// does not: the pod is there for as long as it has a finalizer, and a binding that has begun goes on.
pub fn may_be_bound(pod: &ApiPod) -> bool {
    let spec = pod.spec.as_ref();
    let bound = spec.and_then(|spec| spec.node_name.as_deref()).is_some_and(|node| !node.is_empty());
    let gated = spec.is_some_and(|spec| spec.scheduling_gates.iter().flatten().next().is_some());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let ended = matches!(phase, Some("Succeeded" | "Failed"));
    !bound && !gated && !ended
}

/// Whether a scheduler may be giving devices of ours to a pod of this kind. What cannot be told counts as such: a
/// claim that is not made yet or not known, one of a kind that we do not know, a class that is gone. The index knows
/// the pod's claims at least as they were when the pod was read.
pub fn under_way(index: &Index, matcher: &mut Matcher, pod: &ApiPod) -> bool {
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

/// Whether a resource is one for which kube-scheduler may make a claim for devices of ours.
fn stands_for_ours(index: &Index, matcher: &mut Matcher, resource: &str) -> bool {
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

/// Pods that may be given devices by a scheduler.
pub type UnderWay = BTreeMap<Uid, ObjectKey>;

/// A pool that is handed over from kube-scheduler to us.
#[derive(Debug)]
struct HandOver {
    generation: i64,
    /// When we saw it.
    seen: Instant,
    /// Whether what is under way may be without knowing of it.
    open: bool,
    suspects: HashSet<Uid>,
    /// Since when no look showed a suspect under way.
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

/// What follows from a look, of which nobody knew before.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct News {
    /// Nodes for whose pools of this generation nothing is under way any more.
    pub idle: Vec<(Arc<str>, i64)>,
    /// Nodes that wait for these pods, told once.
    pub held_up: Vec<(Arc<str>, Vec<ObjectKey>)>,
}

/// The hand-overs to us, by node.
#[derive(Debug, Default)]
pub struct HandOvers {
    nodes: BTreeMap<Arc<str>, HandOver>,
    looking: bool,
    looked: Option<Instant>,
}

impl HandOvers {
    /// Takes in which nodes are handed over to us, at which generation of the pool, and of which it is not said yet
    /// that kube-scheduler is idle.
    pub fn note(&mut self, nodes: &HashMap<Arc<str>, i64>, now: Instant) {
        self.nodes.retain(|node, known| nodes.get(node) == Some(&known.generation));
        for (node, generation) in nodes {
            self.nodes.entry(node.clone()).or_insert_with(|| HandOver::new(*generation, now));
        }
    }

    /// Whether to look now; then it is being looked until [`Self::looked`] or [`Self::not_looked`].
    pub fn begin_look(&mut self, now: Instant, settle: Duration) -> bool {
        let begins = self.next_look(settle).is_some_and(|due| due <= now);
        self.looking |= begins;
        begins
    }

    /// When the next look is due; `None` while nobody waits for one, or it is being looked.
    pub fn next_look(&self, settle: Duration) -> Option<Instant> {
        let mut waiting = self.nodes.values().filter(|known| !known.done).map(|known| known.seen);
        let first = waiting.next().filter(|_| !self.looking)?;
        let newest = waiting.fold(first, Instant::max);
        // Nodes that are handed over one after the other do not each have a look of their own.
        let again =
            |last: Instant| if newest <= last { last + settle } else { newest.max(last + PAUSE.min(settle)) };
        Some(self.looked.map_or(newest, again))
    }

    /// A look could not be finished.
    pub fn not_looked(&mut self, now: Instant) {
        self.looking = false;
        self.looked = Some(now);
    }

    /// A look that began then showed these pods under way.
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

    /// It could not be written down that a node's pool has nothing under way.
    pub fn not_written(&mut self, node: &str, generation: i64) {
        if let Some(known) = self.nodes.get_mut(node).filter(|known| known.generation == generation) {
            known.done = false;
        }
    }

    /// How many nodes wait, and for how many pods.
    pub fn counts(&self) -> (usize, usize) {
        let waiting = || self.nodes.values().filter(|known| !known.done);
        let pods: HashSet<&Uid> = waiting().flat_map(|known| &known.suspects).collect();
        (waiting().count(), pods.len())
    }
}

#[cfg(test)]
#[path = "handover/tests.rs"]
mod tests;

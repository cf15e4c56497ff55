//! The observations of claims and nodes: what the API shows, what nodes report, and which claims have changed
//! since the last look.

use super::super::account::{Allocated, Released, Sight, Site, Taken};
use super::super::kinds::NodeReport;
use crate::snapshot::{ObjectKey, Uid};
use aliquot_api::v1alpha1::gpu_budget::Substitutes;
use aliquot_model::MicroGpus;
use aliquot_model::charge::{HeldClaim, Release};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound::{self, Excluded, Unbounded};
use std::sync::Arc;

/// The number of claims that are compared with the cluster at a look although no change of them was reported.
/// So many of all claims are compared, in turn, and so many of those whose part is not known, because a claim
/// does not change when its devices are published.
const SWEPT: usize = 64;

/// A claim that the API shows as allocated with devices of this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// UID of the claim.
    pub uid: Uid,
    /// When the claim was allocated, in seconds of Unix time, if this is known.
    pub since: Option<i64>,
    /// Its part of GPUs, if its devices are published.
    pub part: Option<MicroGpus>,
    /// The part that it would have if it had been given the profile that it asked for, if that is less.
    pub asked: Option<MicroGpus>,
    /// The node of its devices; only what this node says about the claim counts.
    pub node: Option<Arc<str>>,
    /// The largest part that this node may report.
    pub most: MicroGpus,
    /// When the claim was created, in seconds of Unix time.
    pub created: i64,
}

/// The reachability of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Presence {
    /// The node exists and can be reached: what it reports as held counts.
    Heard,
    /// The node cannot be reached, or nothing is known of it.
    #[default]
    Silent,
    /// The node does not exist.
    Gone,
}

#[derive(Debug)]
struct Node {
    usage: NodeReport,
    presence: Presence,
}

impl Node {
    /// Returns true if the node's releases are to be acknowledged or its record is to be deleted.
    fn waits(&self) -> bool {
        self.presence == Presence::Gone || !self.usage.spec.released.is_empty()
    }

    fn held(&self) -> &[HeldClaim] {
        &self.usage.spec.held
    }

    fn released(&self) -> &[Release] {
        &self.usage.spec.released
    }
}

/// The observations of all claims and nodes.
#[derive(Debug, Default)]
pub(super) struct Sights {
    /// Allocated claims of namespaces with a budget.
    claims: BTreeMap<ObjectKey, AllocatedClaim>,
    key_of: HashMap<Uid, ObjectKey>,
    nodes: HashMap<Arc<str>, Node>,
    /// For each claim: the nodes that list it as held, or list a release of it.
    listing: HashMap<Uid, BTreeSet<Arc<str>>>,
    waiting: BTreeSet<Arc<str>>,
    touched: HashMap<Arc<str>, BTreeSet<Uid>>,
    /// Claims whose part is not known.
    unknown: BTreeSet<ObjectKey>,
    /// The last claims that were swept: of all claims, and of those whose part is not known.
    swept: (Option<ObjectKey>, Option<ObjectKey>),
}

impl Sights {
    /// Takes in a claim; `None` if it has no devices or does not exist.
    pub(super) fn claim(&mut self, key: &ObjectKey, claim: Option<AllocatedClaim>) {
        if self.claims.get(key) == claim.as_ref() {
            return;
        }
        if let Some(before) = self.claims.remove(key) {
            self.key_of.remove(&before.uid);
            self.unknown.remove(key);
            self.touch(&key.namespace, before.uid);
        }
        if let Some(claim) = claim {
            self.key_of.insert(claim.uid.clone(), key.clone());
            if claim.part.is_none() {
                self.unknown.insert(key.clone());
            }
            self.touch(&key.namespace, claim.uid.clone());
            self.claims.insert(key.clone(), claim);
        }
    }

    /// Replaces all claims of a namespace that have devices.
    pub(super) fn reset_claims(&mut self, namespace: &Arc<str>, claims: Vec<(ObjectKey, AllocatedClaim)>) {
        let kept: HashSet<&ObjectKey> = claims.iter().map(|(key, _)| key).collect();
        let gone: Vec<ObjectKey> =
            self.keys_of(namespace).filter(|key| !kept.contains(key)).cloned().collect();
        for key in gone {
            self.claim(&key, None);
        }
        for (key, claim) in claims {
            self.claim(&key, Some(claim));
        }
    }

    fn keys_of(&self, namespace: &Arc<str>) -> impl Iterator<Item = &ObjectKey> {
        let first = ObjectKey { namespace: namespace.clone(), name: Arc::default() };
        let keys = self.claims.range(first..).map(|(key, _)| key);
        keys.take_while(move |key| key.namespace == *namespace)
    }

    /// Returns the claims to compare with the cluster now; each claim comes up again and again.
    pub(super) fn sweep(&mut self) -> Vec<ObjectKey> {
        let mut keys =
            next(&mut self.swept.0, |from| self.claims.range((from, Unbounded)).map(|(key, _)| key));
        keys.extend(next(&mut self.swept.1, |from| self.unknown.range((from, Unbounded))));
        keys
    }

    /// Takes in what a node reports now.
    pub(super) fn apply_usage(&mut self, usage: NodeReport) {
        let presence = self.nodes.get(&usage.node).map(|node| node.presence).unwrap_or_default();
        self.exchange(&usage.node.clone(), Some(Node { usage, presence }));
    }

    /// Removes the record of a node.
    pub(super) fn delete_usage(&mut self, node: &str) {
        self.exchange(node, None);
    }

    /// Replaces the records of all nodes.
    pub(super) fn reset_usages(&mut self, usages: Vec<NodeReport>) {
        let kept: HashSet<&Arc<str>> = usages.iter().map(|usage| &usage.node).collect();
        let gone: Vec<Arc<str>> = self.nodes.keys().filter(|node| !kept.contains(node)).cloned().collect();
        for node in gone {
            self.exchange(&node, None);
        }
        for usage in usages {
            self.apply_usage(usage);
        }
    }

    fn exchange(&mut self, name: &str, node: Option<Node>) {
        let before = self.nodes.remove(name);
        let was = before.as_ref().map(Said::of).unwrap_or_default();
        let is = node.as_ref().map(Said::of).unwrap_or_default();
        let mut touched: Vec<(Arc<str>, Uid)> = Vec::new();
        for (uid, said) in was.iter().filter(|(uid, said)| is.get(*uid) != Some(*said)) {
            touched.extend(said.namespaces().map(|namespace| (namespace.into(), (*uid).into())));
            if !is.contains_key(uid)
                && self.listing.get_mut(*uid).is_some_and(|nodes| {
                    nodes.remove(name);
                    nodes.is_empty()
                })
            {
                self.listing.remove(*uid);
            }
        }
        for (uid, said) in is.iter().filter(|(uid, said)| was.get(*uid) != Some(*said)) {
            touched.extend(said.namespaces().map(|namespace| (namespace.into(), (*uid).into())));
            self.listing.entry((*uid).into()).or_default().insert(name.into());
        }
        for (namespace, uid) in touched {
            self.touch(&namespace, uid);
        }
        if let Some(node) = node {
            self.nodes.insert(name.into(), node);
        }
        self.note_waiting(name);
    }

    fn note_waiting(&mut self, name: &str) {
        if self.nodes.get(name).is_some_and(Node::waits) {
            self.waiting.insert(name.into());
        } else {
            self.waiting.remove(name);
        }
    }

    /// Sets whether a node exists and can be reached.
    pub(super) fn presence(&mut self, name: &str, presence: Presence) {
        let Some(node) = self.nodes.get_mut(name).filter(|node| node.presence != presence) else { return };
        node.presence = presence;
        let held: Vec<(Arc<str>, Uid)> = node
            .held()
            .iter()
            .map(|held| (held.namespace.as_str().into(), held.uid.as_str().into()))
            .collect();
        for (namespace, uid) in held {
            self.touch(&namespace, uid);
        }
        self.note_waiting(name);
    }

    fn touch(&mut self, namespace: &Arc<str>, uid: Uid) {
        self.touched.entry(namespace.clone()).or_default().insert(uid);
    }

    /// Returns the claims that have changed since the last call, by namespace.
    pub(super) fn take_touched(&mut self) -> HashMap<Arc<str>, BTreeSet<Uid>> {
        std::mem::take(&mut self.touched)
    }

    /// Returns all claims of which anything is seen, by namespace.
    pub(super) fn all(&self) -> HashMap<Arc<str>, BTreeSet<Uid>> {
        let mut all: HashMap<Arc<str>, BTreeSet<Uid>> = HashMap::new();
        for (key, claim) in &self.claims {
            all.entry(key.namespace.clone()).or_default().insert(claim.uid.clone());
        }
        for node in self.nodes.values() {
            let released = node.released().iter().map(|release| &release.claim);
            for held in node.held().iter().chain(released) {
                all.entry(held.namespace.as_str().into()).or_default().insert(held.uid.as_str().into());
            }
        }
        all
    }

    /// Returns everything that is seen of a claim now, with the parts that it is charged for.
    pub(super) fn of(&self, namespace: &str, uid: &Uid, substitutes: Substitutes) -> Sight {
        let asked = |part: MicroGpus, asked: Option<MicroGpus>| match substitutes {
            Substitutes::Given => part,
            Substitutes::Asked => asked.map_or(part, |asked| asked.min(part)),
        };
        let taken = |site: Site, held: &HeldClaim| Taken {
            site,
            since: held.since,
            part: asked(held.micro_gpus, held.asked_micro_gpus),
        };
        let is_it = |held: &HeldClaim| *held.uid == **uid && held.namespace == namespace;
        let key = self.key_of.get(uid).filter(|key| *key.namespace == *namespace);
        let allocated = key.and_then(|key| self.claims.get(key)).map(|claim| Allocated {
            since: claim.since,
            part: match substitutes {
                Substitutes::Given => claim.part,
                Substitutes::Asked => claim.asked.or(claim.part),
            },
            site: claim.node.as_deref().map(Site::of),
            most: claim.most,
            born: claim.created,
        });
        let mut sight = Sight { allocated, ..Sight::default() };
        let nodes = self.listing.get(uid).into_iter().flatten().filter_map(|name| self.nodes.get(name));
        for node in nodes {
            let site = Site::of(&node.usage.node);
            if node.presence == Presence::Heard {
                sight
                    .held
                    .extend(node.held().iter().filter(|held| is_it(held)).map(|held| taken(site, held)));
            }
            let acknowledged = node.usage.acknowledged();
            for release in node.released().iter().filter(|release| is_it(&release.claim)) {
                sight.listed.push(site);
                if release.number > acknowledged {
                    let taken = taken(site, &release.claim);
                    sight.released.push(Released { taken, until: release.until });
                }
            }
        }
        sight
    }

    pub(super) fn hears_from(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// Returns the nodes that have a record.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &Arc<str>> {
        self.nodes.keys()
    }

    /// Returns the records of nodes that are gone or have releases to acknowledge.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &NodeReport> {
        self.waiting.iter().filter_map(|name| self.nodes.get(name)).map(|node| &node.usage)
    }

    /// Returns true if a node is gone and no claim that it held has its devices any more: such a claim itself
    /// shows what is to be charged. A node that is gone only for a while would miss its record.
    pub(super) fn is_over(&self, usage: &NodeReport) -> bool {
        let is_gone = self.nodes.get(&usage.node).is_some_and(|node| node.presence == Presence::Gone);
        is_gone && !usage.spec.held.iter().any(|held| self.key_of.contains_key(held.uid.as_str()))
    }
}

/// Returns the next claims in the order of keys; after the last one it starts again from the beginning.
fn next<'a, I: Iterator<Item = &'a ObjectKey>>(
    last: &mut Option<ObjectKey>,
    from: impl Fn(Bound<ObjectKey>) -> I,
) -> Vec<ObjectKey> {
    let after = last.take().map_or(Unbounded, Excluded);
    let keys: Vec<ObjectKey> = from(after).take(SWEPT).cloned().collect();
    *last = keys.last().filter(|_| keys.len() == SWEPT).cloned();
    keys
}

/// The report of one node about one claim.
#[derive(Debug, Default, PartialEq)]
struct Said<'a> {
    held: Vec<&'a HeldClaim>,
    /// Releases with the node's ledger: the same number in another ledger is another release.
    released: Vec<(&'a str, &'a Release)>,
}

impl<'a> Said<'a> {
    fn of(node: &'a Node) -> HashMap<&'a str, Self> {
        let mut all: HashMap<&str, Self> = HashMap::new();
        for held in node.held() {
            all.entry(&held.uid).or_default().held.push(held);
        }
        for release in node.released() {
            let said = all.entry(&release.claim.uid).or_default();
            said.released.push((&node.usage.spec.ledger, release));
        }
        all
    }

    fn namespaces(&self) -> impl Iterator<Item = &'a str> {
        let released = self.released.iter().map(|(_, release)| &release.claim);
        self.held.iter().copied().chain(released).map(|held| held.namespace.as_str())
    }
}

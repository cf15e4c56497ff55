//! What is kept about elastic shares: whom to look at, and what nodes and annotations say.

use crate::elastic::Wish;
use crate::index::{Claim, CompanionOf, Index, ObjectKey, Uid};
use crate::queue::Rank;
use aliquot_model::limits::{NodeLimitsSpec, NodeLimitsStatus};
use kube::api::DynamicObject;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Instant;

/// What an annotation asks for, or what is wrong with it.
pub(in crate::brain) type ReadWish = Result<Arc<Wish>, Arc<str>>;

/// What is kept about them.
#[derive(Debug, Default)]
pub(in crate::brain) struct Elastic {
    /// Claims with a wish, or that had one.
    pub(in crate::brain) parents: HashMap<Uid, ObjectKey>,
    /// Companions by the claim that they belong to.
    pub(in crate::brain) companions: HashMap<Uid, HashMap<Uid, CompanionOf>>,
    /// Where they are.
    pub(in crate::brain) keys: HashMap<Uid, ObjectKey>,
    /// What nodes are told.
    pub(in crate::brain) nodes: HashMap<Arc<str>, Told>,
    /// Claims to look at.
    pub(in crate::brain) look: BTreeSet<Uid>,
    /// Claims to look at when those have been: room may have become free for them meanwhile.
    pub(in crate::brain) next: BTreeSet<Uid>,
    /// The claim that was looked at last, while not all have been.
    pub(in crate::brain) last: Option<Uid>,
    /// What annotations ask for, by the text that was read.
    pub(in crate::brain) wishes: HashMap<Uid, (Arc<str>, ReadWish)>,
    /// Claims that wait for room.
    pub(in crate::brain) waiting: HashSet<Uid>,
    /// Claims to look at by themselves.
    pub(in crate::brain) due: HashMap<Uid, Instant>,
    /// Claims of which something is being written.
    pub(in crate::brain) writing: HashSet<Uid>,
    /// Nodes whose object is being written.
    pub(in crate::brain) busy: HashSet<Arc<str>>,
    /// Companions that were to lose their devices, and when.
    pub(in crate::brain) released: HashMap<Uid, Instant>,
    /// Since when shares are to have more than they have, in seconds.
    pub(in crate::brain) since: HashMap<Uid, i64>,
    /// Claims whose share could grow, behind pods that stand before them.
    pub(in crate::brain) behind: BTreeSet<(Rank, Uid)>,
}

/// What a node is told, as it was seen last.
#[derive(Debug, Clone)]
pub(in crate::brain) struct Told {
    pub(in crate::brain) version: String,
    pub(in crate::brain) generation: i64,
    pub(in crate::brain) spec: NodeLimitsSpec,
    pub(in crate::brain) status: NodeLimitsStatus,
}

impl Told {
    pub(in crate::brain) fn read(object: &DynamicObject) -> Option<(Arc<str>, Self)> {
        let part = |name: &str| object.data.get(name).cloned().unwrap_or_default();
        let told = Self {
            version: object.metadata.resource_version.clone().unwrap_or_default(),
            generation: object.metadata.generation.unwrap_or_default(),
            spec: serde_json::from_value(part("spec")).unwrap_or_default(),
            status: serde_json::from_value(part("status")).unwrap_or_default(),
        };
        Some((object.metadata.name.as_deref()?.into(), told))
    }

    pub(in crate::brain) fn is_older(&self, than: &Self) -> bool {
        let number = |told: &Self| told.version.parse::<u64>().ok();
        number(self).zip(number(than)).is_some_and(|(own, other)| own < other)
    }
}

impl Elastic {
    pub(in crate::brain) fn writes_under_way(&self) -> usize {
        self.writing.len()
    }

    /// Something may have become free.
    pub(in crate::brain) fn look_again(&mut self) {
        let look = if self.is_looking() { &mut self.next } else { &mut self.look };
        look.extend(self.waiting.drain());
    }

    /// Whether claims are left of those that are being looked at, step by step.
    pub(in crate::brain) const fn is_looking(&self) -> bool {
        self.last.is_some()
    }

    /// The claim that is looked at next: they take turns, whoever comes to it meanwhile.
    pub(in crate::brain) fn next_look(&mut self) -> Option<Uid> {
        let after = self
            .last
            .as_ref()
            .and_then(|last| self.look.range::<Uid, _>((Bound::Excluded(last), Bound::Unbounded)).next());
        let uid = after.or_else(|| self.look.first())?.clone();
        self.look.remove(&uid);
        Some(uid)
    }

    /// What a claim's annotation asks for. It is read once, however often it is looked at.
    pub(in crate::brain) fn wish_of(&mut self, claim: &Claim) -> Option<ReadWish> {
        let text = claim.limits.as_ref()?;
        if let Some((known, wish)) = self.wishes.get(&claim.uid)
            && known == text
        {
            return Some(wish.clone());
        }
        let wish = Wish::parse(text).map(Arc::new).map_err(Arc::from);
        self.wishes.insert(claim.uid.clone(), (text.clone(), wish.clone()));
        Some(wish)
    }

    /// Drops what is kept for a claim that is gone.
    pub(in crate::brain) fn gone(&mut self, uid: &str) {
        self.keys.remove(uid);
        self.wishes.remove(uid);
        self.released.remove(uid);
        self.since.remove(uid);
        let parents: Vec<Uid> = self
            .companions
            .iter()
            .filter(|(parent, companions)| ***parent == *uid || companions.contains_key(uid))
            .map(|(parent, _)| parent.clone())
            .collect();
        for parent in parents {
            if let Some(companions) = self.companions.get_mut(&parent) {
                companions.remove(uid);
            }
            self.look.insert(parent);
        }
        if self.parents.contains_key(uid) {
            self.look.insert(uid.into());
        }
    }

    /// What a node is told, or answers, is about the shares that it names and those on its devices.
    pub(in crate::brain) fn take_told(&mut self, index: &Index, name: Arc<str>, told: Option<Told>) {
        let there = self.shares_on(index, &name);
        let before = match &told {
            Some(told) if self.nodes.get(&name).is_some_and(|known| told.is_older(known)) => return,
            Some(told) => self.nodes.insert(name, told.clone()),
            None => self.nodes.remove(&name),
        };
        let named = before.iter().chain(&told).flat_map(|told| &told.spec.shares);
        self.look.extend(named.map(|limit| Uid::from(limit.share.uid.as_str())));
        self.look.extend(there);
    }

    /// Claims on a node's devices that have companions, or whose companions are there.
    fn shares_on(&self, index: &Index, node: &str) -> Vec<Uid> {
        let holders = index.pools_of_node(node).flat_map(|pool| &pool.holders);
        let parent = |uid: &Uid| {
            let companion = self.keys.get(uid).and_then(|key| index.claim(key)?.companion.as_ref());
            companion.map_or_else(|| uid.clone(), |of| of.uid.clone())
        };
        holders.map(|holder| parent(&holder.claim)).filter(|uid| self.companions.contains_key(uid)).collect()
    }

    /// Nodes that are told something about a claim.
    pub(in crate::brain) fn nodes_about(&self, uid: &str) -> Option<Arc<str>> {
        let names = |told: &Told| told.spec.shares.iter().any(|limit| limit.share.uid == *uid);
        self.nodes.iter().find(|(_, told)| names(told)).map(|(node, _)| node.clone())
    }

    pub(in crate::brain) fn again(&mut self, uid: &Uid, at: Instant) {
        self.due.insert(uid.clone(), at);
    }
}

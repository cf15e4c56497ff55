//! The state of elastic shares: the claims to look at, and what nodes and annotations say.

use aliquot_allocator::elastic::Wish;
use aliquot_allocator::queue::Rank;
use aliquot_allocator::snapshot::{Claim, CompanionOf, ObjectKey, Snapshot, Uid};
use aliquot_api::v1alpha1::{NodeLimitsSpec, NodeLimitsStatus};
use kube::api::DynamicObject;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Instant;

/// The wish in an annotation, or the mistake in it.
pub(in crate::reconciler) type ReadWish = Result<Arc<Wish>, Arc<str>>;

/// The state of elastic shares.
#[derive(Debug, Default)]
pub(in crate::reconciler) struct Elastic {
    /// Claims that have a wish, or had one.
    pub(in crate::reconciler) parents: HashMap<Uid, ObjectKey>,
    /// Companions, by the claim that they belong to.
    pub(in crate::reconciler) companions: HashMap<Uid, HashMap<Uid, CompanionOf>>,
    /// Keys of companions by their UID.
    pub(in crate::reconciler) keys: HashMap<Uid, ObjectKey>,
    /// What each node is told.
    pub(in crate::reconciler) nodes: HashMap<Arc<str>, Told>,
    /// Claims to look at.
    pub(in crate::reconciler) look: BTreeSet<Uid>,
    /// Claims to look at in the next round: room may have become free for them meanwhile.
    pub(in crate::reconciler) next: BTreeSet<Uid>,
    /// The claim that was looked at last; `None` when the round is over.
    pub(in crate::reconciler) last: Option<Uid>,
    /// The wishes of claims, with the text from which they were read.
    pub(in crate::reconciler) wishes: HashMap<Uid, (Arc<str>, ReadWish)>,
    /// Claims that wait for room.
    pub(in crate::reconciler) waiting: HashSet<Uid>,
    /// Claims to look at when their time comes.
    pub(in crate::reconciler) due: HashMap<Uid, Instant>,
    /// Claims for which a write is under way.
    pub(in crate::reconciler) writing: HashSet<Uid>,
    /// Nodes whose NodeLimits object is being written.
    pub(in crate::reconciler) busy: HashSet<Arc<str>>,
    /// Companions that are to lose their devices, and when that was last requested.
    pub(in crate::reconciler) released: HashMap<Uid, Instant>,
    /// The time from which a share was to have more than it has, in seconds since the epoch.
    pub(in crate::reconciler) since: HashMap<Uid, i64>,
    /// Claims whose share could grow, but that wait behind pods ahead of them.
    pub(in crate::reconciler) behind: BTreeSet<(Rank, Uid)>,
}

/// What a node is told, as it was seen last.
#[derive(Debug, Clone)]
pub(in crate::reconciler) struct Told {
    pub(in crate::reconciler) version: String,
    pub(in crate::reconciler) generation: i64,
    pub(in crate::reconciler) spec: NodeLimitsSpec,
    pub(in crate::reconciler) status: NodeLimitsStatus,
}

impl Told {
    pub(in crate::reconciler) fn read(object: &DynamicObject) -> Option<(Arc<str>, Self)> {
        let part = |name: &str| object.data.get(name).cloned().unwrap_or_default();
        let told = Self {
            version: object.metadata.resource_version.clone().unwrap_or_default(),
            generation: object.metadata.generation.unwrap_or_default(),
            spec: serde_json::from_value(part("spec")).unwrap_or_default(),
            status: serde_json::from_value(part("status")).unwrap_or_default(),
        };
        Some((object.metadata.name.as_deref()?.into(), told))
    }

    pub(in crate::reconciler) fn is_older(&self, than: &Self) -> bool {
        let number = |told: &Self| told.version.parse::<u64>().ok();
        number(self).zip(number(than)).is_some_and(|(own, other)| own < other)
    }
}

impl Elastic {
    pub(in crate::reconciler) fn writes_under_way(&self) -> usize {
        self.writing.len()
    }

    /// Looks again at the claims that wait for room, because room may have become free.
    pub(in crate::reconciler) fn look_again(&mut self) {
        let look = if self.is_looking() { &mut self.next } else { &mut self.look };
        look.extend(self.waiting.drain());
    }

    /// Returns true if a round of looks is under way.
    pub(in crate::reconciler) const fn is_looking(&self) -> bool {
        self.last.is_some()
    }

    /// Takes the claim to look at next. Claims take turns, even if others are added meanwhile.
    pub(in crate::reconciler) fn next_look(&mut self) -> Option<Uid> {
        let after = self
            .last
            .as_ref()
            .and_then(|last| self.look.range::<Uid, _>((Bound::Excluded(last), Bound::Unbounded)).next());
        let uid = after.or_else(|| self.look.first())?.clone();
        self.look.remove(&uid);
        Some(uid)
    }

    /// Returns the wish in a claim's annotation; `None` if there is no annotation. A text is parsed only
    /// once.
    pub(in crate::reconciler) fn wish_of(&mut self, claim: &Claim) -> Option<ReadWish> {
        let text = claim.limits.as_ref()?;
        if let Some((known, wish)) = self.wishes.get(&claim.uid)
            && known == text
        {
            return Some(wish.clone());
        }
        let wish = Wish::parse(text).map(Arc::new).map_err(|error| error.to_string().into());
        self.wishes.insert(claim.uid.clone(), (text.clone(), wish.clone()));
        Some(wish)
    }

    /// Drops what is stored for a claim that is gone.
    pub(in crate::reconciler) fn gone(&mut self, uid: &str) {
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

    /// Takes in what a node is told or answers, and looks at the shares that it names and at those on the
    /// node's devices.
    pub(in crate::reconciler) fn take_told(&mut self, index: &Snapshot, name: Arc<str>, told: Option<Told>) {
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

    /// Returns the claims on a node's devices that have companions, or whose companions are on the node.
    fn shares_on(&self, index: &Snapshot, node: &str) -> Vec<Uid> {
        let holders = index.pools_of_node(node).flat_map(|pool| &pool.holders);
        let parent = |uid: &Uid| {
            let companion = self.keys.get(uid).and_then(|key| index.claim(key)?.companion.as_ref());
            companion.map_or_else(|| uid.clone(), |of| of.uid.clone())
        };
        holders.map(|holder| parent(&holder.claim)).filter(|uid| self.companions.contains_key(uid)).collect()
    }

    /// Returns a node that is told something about a claim; `None` if there is none.
    pub(in crate::reconciler) fn nodes_about(&self, uid: &str) -> Option<Arc<str>> {
        let names = |told: &Told| told.spec.shares.iter().any(|limit| limit.share.uid == *uid);
        self.nodes.iter().find(|(_, told)| names(told)).map(|(node, _)| node.clone())
    }

    pub(in crate::reconciler) fn again(&mut self, uid: &Uid, at: Instant) {
        self.due.insert(uid.clone(), at);
    }
}

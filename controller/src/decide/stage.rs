//! Nodes as a decision shall take them to be, where that is not as the index has them: with pods and
//! claims gone that could go, and with devices kept for somebody else.

use super::LeftOut;
use crate::index::{Holder, Index, Node, Pod, PodNeeds, Pool, Sym, Uid};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Devices, by pool.
pub type Devices = Arc<BTreeSet<(Sym, Sym)>>;

/// What a decision is made for besides the pod.
#[derive(Debug, Clone, Default)]
pub struct Situation {
    /// Nodes that are left out.
    pub left_out: LeftOut,
    /// Nodes that are taken to be otherwise than they are.
    pub stages: HashMap<Arc<str>, Stage>,
    /// The one node to look at, if it is not all.
    pub only: Option<Arc<str>>,
    /// Claims that are decided as if they had no devices.
    pub anew: HashSet<Uid>,
    /// Claims that are given, but not written, for the pod's group.
    pub together: HashSet<Uid>,
    /// Claims that are given nothing but these devices, by pool.
    pub exactly: HashMap<Uid, Devices>,
}

impl Situation {
    /// Things as they are, but for nodes that are left out.
    pub fn leaving_out(left_out: &LeftOut) -> Self {
        Self { left_out: left_out.clone(), ..Self::default() }
    }

    /// Adds what two situations have in common that are the same of the same cluster.
    pub fn hash_into(&self, hasher: &mut impl Hasher) {
        let mut stages: Vec<_> = self.stages.iter().map(|(node, stage)| (node, stage.changes)).collect();
        let mut left_out: Vec<_> = self.left_out.iter().collect();
        let mut anew: Vec<_> = self.anew.iter().collect();
        let mut together: Vec<_> = self.together.iter().collect();
        let mut exactly: Vec<_> = self.exactly.iter().collect();
        stages.sort_unstable();
        left_out.sort_unstable();
        anew.sort_unstable();
        together.sort_unstable();
        exactly.sort_unstable();
        (stages, left_out, &self.only, anew, together).hash(hasher);
        format!("{exactly:?}").hash(hasher);
    }
}

/// A node as it would be.
#[derive(Debug, Clone)]
pub struct Stage {
    node: Option<Node>,
    pools: Vec<Pool>,
    /// Pods that are there no more.
    left: HashSet<Uid>,
    /// What was changed of it, in one number.
    changes: u64,
}

impl Stage {
    /// The node as it is.
    pub fn new(index: &Index, name: &str) -> Self {
        Self {
            node: index.node(name).cloned(),
            pools: index.pools_of_node(name).map(Pool::without_slices).collect(),
            left: HashSet::new(),
            changes: 0,
        }
    }

    fn note(&mut self, change: &'static str, of: impl Debug) {
        let mut hasher = DefaultHasher::new();
        (self.changes, change, format!("{of:?}")).hash(&mut hasher);
        self.changes = hasher.finish();
    }

    /// The node itself.
    pub(super) const fn node(&self) -> Option<&Node> {
        self.node.as_ref()
    }

    /// Its pools.
    pub(crate) fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.iter()
    }

    /// These claims hold nothing any more.
    pub fn release(&mut self, index: &Index, claims: &HashSet<Uid>) {
        self.note("release", claims.iter().collect::<BTreeSet<_>>());
        for pool in &mut self.pools {
            let (gone, kept) = std::mem::take(&mut pool.holders)
                .into_iter()
                .partition::<Vec<Holder>, _>(|holder| claims.contains(&holder.claim));
            pool.holders = kept;
            for holder in &gone {
                index.count_out(pool, holder);
            }
        }
    }

    /// This is held as well.
    pub fn hold(&mut self, index: &Index, held: &[(Sym, Holder)]) {
        self.note("hold", held);
        for pool in &mut self.pools {
            let of = pool.name;
            for (_, holder) in held.iter().filter(|(name, _)| *name == of) {
                index.count_in(pool, holder);
                pool.holders.push(holder.clone());
            }
        }
    }

    /// Whether nothing is held twice.
    pub fn is_consistent(&self, index: &Index) -> bool {
        self.pools.iter().all(|pool| !index.is_given_twice_in(pool))
    }

    /// A pod that is counted on the node leaves it.
    pub fn leave(&mut self, index: &Index, name: &str, pod: &Pod) {
        if index.accounted_node(&pod.uid).is_some_and(|node| **node == *name)
            && let Some(node) = &mut self.node
        {
            node.subtract(&pod.needs);
            self.left.insert(pod.uid.clone());
            self.note("leave", &pod.uid);
        }
    }

    /// Whether a pod has left the node.
    pub(super) fn has_left(&self, pod: &Uid) -> bool {
        self.left.contains(pod)
    }

    /// A pod with these needs comes to the node.
    pub fn join(&mut self, needs: &PodNeeds) {
        self.note("join", needs);
        if let Some(node) = &mut self.node {
            node.add(needs);
        }
    }
}

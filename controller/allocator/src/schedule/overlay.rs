//! Nodes in the state that a decision assumes for them, if it differs from the snapshot: without pods and
//! claims that could go, and with devices kept for other pods.

use crate::snapshot::{Holder, Node, Pod, PodNeeds, Pool, Snapshot, Sym, Uid};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Nodes that are left out for a pod for a while, because kube-scheduler gave them back, each with the
/// reason.
pub type LeftOut = HashMap<Arc<str>, String>;

/// Devices, each as pool and device.
pub type Devices = Arc<BTreeSet<(Sym, Sym)>>;

/// The circumstances of a decision, apart from the pod.
#[derive(Debug, Clone, Default)]
pub struct Situation {
    /// Nodes that are left out.
    pub left_out: LeftOut,
    /// Nodes whose assumed state differs from the snapshot.
    pub stages: HashMap<Arc<str>, Overlay>,
    /// The only node to look at; `None` allows all.
    pub only: Option<Arc<str>>,
    /// Claims that are decided as if they had no devices.
    pub anew: HashSet<Uid>,
    /// Claims that are decided, but not yet written, for the pod's group.
    pub together: HashSet<Uid>,
    /// Claims that may get only these devices.
    pub exactly: HashMap<Uid, Devices>,
}

impl Situation {
    /// Returns a situation in which only these nodes are left out.
    pub fn leaving_out(left_out: &LeftOut) -> Self {
        Self { left_out: left_out.clone(), ..Self::default() }
    }

    /// Adds to a hash what determines the situation. Situations with the same hash are the same, if the
    /// cluster is.
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

/// The assumed state of a node.
#[derive(Debug, Clone)]
pub struct Overlay {
    node: Option<Node>,
    pools: Vec<Pool>,
    /// Pods that have left the node.
    left: HashSet<Uid>,
    /// A hash of all changes.
    changes: u64,
}

impl Overlay {
    /// Creates an overlay with the present state of the node.
    pub fn new(index: &Snapshot, name: &str) -> Self {
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

    /// Returns the node itself.
    pub(super) const fn node(&self) -> Option<&Node> {
        self.node.as_ref()
    }

    /// Returns the pools of the node.
    pub fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.iter()
    }

    /// Removes everything that these claims hold.
    pub fn release(&mut self, index: &Snapshot, claims: &HashSet<Uid>) {
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

    /// Adds these holders.
    pub fn hold(&mut self, index: &Snapshot, held: &[(Sym, Holder)]) {
        self.note("hold", held);
        for pool in &mut self.pools {
            let of = pool.name;
            for (_, holder) in held.iter().filter(|(name, _)| *name == of) {
                index.count_in(pool, holder);
                pool.holders.push(holder.clone());
            }
        }
    }

    /// Returns true if nothing is given out twice.
    pub fn is_consistent(&self, index: &Snapshot) -> bool {
        self.pools.iter().all(|pool| !index.is_given_twice_in(pool))
    }

    /// Removes a pod that is counted on the node.
    pub fn leave(&mut self, index: &Snapshot, name: &str, pod: &Pod) {
        if index.accounted_node(&pod.uid).is_some_and(|node| **node == *name)
            && let Some(node) = &mut self.node
        {
            node.subtract(&pod.needs);
            self.left.insert(pod.uid.clone());
            self.note("leave", &pod.uid);
        }
    }

    /// Returns true if a pod has left the node.
    pub(super) fn has_left(&self, pod: &Uid) -> bool {
        self.left.contains(pod)
    }

    /// Adds a pod with these needs to the node.
    pub fn join(&mut self, needs: &PodNeeds) {
        self.note("join", needs);
        if let Some(node) = &mut self.node {
            node.add(needs);
        }
    }
}

//! The state of the cluster as the controller knows it: plain structs, kept incrementally, without API
//! access.
//!
//! Every kind has a synchronous `apply`, `delete` and `reset`; `reset` takes the result of a fresh list and
//! drops everything else. Decisions that were made but are not yet seen in the API lie over it; see
//! [`Snapshot::assume`]. The whole state can be rebuilt from the API at any time.

mod affinity;
mod claims;
mod classes;
mod convert;
mod device;
mod fleet;
mod fragmentation;
mod gang;
mod intern;
mod labels;
mod layout;
mod node;
mod pod;
mod pool;
pub mod profiles;
mod published;
mod slice_error;
mod storage;
pub mod substitution;
mod taints;
pub mod time_slice;
mod usage;
pub mod worth;

pub use affinity::{Affinity, Spread, Term};
pub(crate) use claims::key_of;
pub use claims::{
    Allocation, Assumption, Claim, CompanionOf, FINGERPRINT, Held, fingerprint, fingerprint_of,
};
pub use classes::Class;
pub use device::{Capacity, Device, Draw, Owner, Policy, Range, Shape, Taint};
pub use fleet::{Board, Fleet, GpuState, Make, Place, Row};
pub(crate) use fleet::{IDENTITIES, PARENT};
pub use fragmentation::Outlook;
pub use gang::{Gang, POD_GROUP_APIS};
pub use intern::{Interner, Pooled, Sym, Table};
pub use labels::{Labels, Selector};
pub use layout::{Column, CounterSet, Fixed, Gpu, Layout, Owners};
pub use node::{ACKNOWLEDGED, GOING_BACK, HostPort, Node, resources_of};
pub use pod::{ClaimSource, Pod, PodClaim, PodNeeds, Resolution};
pub use pool::{Pool, PoolState};
pub use slice_error::SliceError;
pub use storage::{PodVolume, StorageClass, Volume, VolumeClaim};
pub use taints::{TaintRule, tolerated};
pub(crate) use usage::gpu_of_name;
pub use usage::{Conflict, Holder, Usage};

use crate::quantity::Quantity;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::hash::RandomState;
use std::sync::Arc;

/// Namespace and name of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Namespace.
    pub namespace: Arc<str>,
    /// Name.
    pub name: Arc<str>,
}

impl ObjectKey {
    /// Creates a key from namespace and name.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// UID of an object.
pub type Uid = Arc<str>;

/// The consequences of a change for decisions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Nothing that a decision depends on has changed.
    Nothing,
    /// These pods, or objects that they refer to, have changed: decide on them again.
    Pods(Vec<ObjectKey>),
    /// Devices or room may have become free: decide again on the pods that did not fit.
    Room,
    /// These pods have changed, and devices or room may have become free.
    PodsAndRoom(Vec<ObjectKey>),
}

impl Change {
    fn of(pods: Vec<ObjectKey>, room: bool) -> Self {
        match (pods.is_empty(), room) {
            (true, false) => Self::Nothing,
            (true, true) => Self::Room,
            (false, false) => Self::Pods(pods),
            (false, true) => Self::PodsAndRoom(pods),
        }
    }
}

/// The state of the cluster.
#[derive(Debug)]
pub struct Snapshot {
    driver: Arc<str>,
    controller_taint: Arc<str>,
    /// Names of devices, attributes and counters.
    pub(crate) names: Interner,
    pub(crate) values: Table<crate::selector::AttributeValue>,
    pub(crate) shapes: Table<Shape>,
    pub(crate) draws: Table<Box<[(u16, crate::quantity::Quantity)]>>,
    pub(crate) taint_lists: Table<Vec<Taint>>,
    columns: Pooled<layout::Column>,
    fixed: Pooled<layout::Fixed>,
    last_id: u64,
    pools: HashMap<Sym, Pool>,
    pools_of_node: HashMap<Arc<str>, BTreeSet<Sym>>,
    pool_of_slice: HashMap<Arc<str>, Sym>,
    classes: HashMap<Arc<str>, Class>,
    claims: HashMap<ObjectKey, Claim>,
    /// The hash keys for the numbers of what claims ask for. They are random for each process, so nobody can
    /// construct a claim that has the number of another.
    demands: RandomState,
    /// Claims that were added, changed or removed since this set was last taken; `None` until it is taken for
    /// the first time.
    claims_changed: Option<HashSet<ObjectKey>>,
    /// Hold claims of the controller.
    retentions: BTreeSet<ObjectKey>,
    claims_gone: claims::Tombstones,
    assumed: HashMap<Uid, Assumption>,
    pods: HashMap<ObjectKey, Pod>,
    pods_of_claim: HashMap<ObjectKey, HashSet<ObjectKey>>,
    priorities: BTreeMap<i32, usize>,
    /// The number of changes of who holds devices, or of whether those pods end.
    holders_version: u64,
    accounted: HashMap<Uid, node::Accounted>,
    nodes: HashMap<Arc<str>, Node>,
    taint_rules: HashMap<Arc<str>, TaintRule>,
    companies: affinity::Companies,
    gangs: gang::Gangs,
    storage: storage::Storage,
    fleet: Fleet,
    /// A layout of each make, in a copy that only tells what is published.
    makes: Option<Box<[Arc<Layout>]>>,
    /// Devices that were read before, by name.
    templates: HashMap<Sym, Vec<convert::Template>>,
}

impl Snapshot {
    /// Creates the snapshot of an empty cluster for the driver with this name.
    pub fn new(driver: &str) -> Self {
        Self {
            driver: driver.into(),
            controller_taint: aliquot_model::names::controller_taint(driver).into(),
            names: Interner::default(),
            values: Table::default(),
            shapes: Table::default(),
            draws: Table::default(),
            taint_lists: Table::default(),
            columns: Pooled::default(),
            fixed: Pooled::default(),
            demands: RandomState::new(),
            last_id: 0,
            pools: HashMap::new(),
            pools_of_node: HashMap::new(),
            pool_of_slice: HashMap::new(),
            classes: HashMap::new(),
            claims: HashMap::new(),
            claims_changed: None,
            retentions: BTreeSet::new(),
            claims_gone: claims::Tombstones::default(),
            assumed: HashMap::new(),
            pods: HashMap::new(),
            pods_of_claim: HashMap::new(),
            priorities: BTreeMap::new(),
            holders_version: 0,
            accounted: HashMap::new(),
            nodes: HashMap::new(),
            taint_rules: HashMap::new(),
            companies: affinity::Companies::default(),
            gangs: gang::Gangs::default(),
            storage: storage::Storage::default(),
            fleet: Fleet::default(),
            makes: None,
            templates: HashMap::new(),
        }
    }

    /// Returns the name of the driver.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// Returns the key of the taint that gives a device to the controller.
    pub fn controller_taint(&self) -> &str {
        &self.controller_taint
    }

    /// Returns the string of a symbol.
    pub fn name(&self, sym: Sym) -> &str {
        self.names.get(sym)
    }

    /// Returns the symbol of a string; `None` if the string is not known.
    pub fn sym(&self, name: &str) -> Option<Sym> {
        self.names.find(name)
    }

    /// Returns the symbol of a string; creates one if the string is not known yet.
    pub fn intern(&mut self, name: &str) -> Sym {
        self.names.intern(name)
    }

    /// Returns what the device has in common with others of its kind.
    pub fn shape(&self, device: &Device) -> &Shape {
        self.shapes.get(device.shape)
    }

    /// Returns the amounts that the device draws from its pool's counter sets.
    pub fn draws<'a>(
        &'a self,
        device: &'a Device,
    ) -> impl Iterator<Item = (u16, &'a [(u16, crate::quantity::Quantity)])> {
        device.draws.iter().flatten().map(|draw| (draw.set, self.draws.get(draw.amounts).as_ref()))
    }

    /// Returns the device's taints, without those of this driver.
    pub fn taints(&self, device: &Device) -> &[Taint] {
        self.taint_lists.get(device.taints)
    }

    /// Returns all pools.
    pub fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.values()
    }

    /// Returns a pool by its name.
    pub fn pool(&self, name: Sym) -> Option<&Pool> {
        self.pools.get(&name)
    }

    /// Returns the pools of a node.
    pub fn pools_of_node(&self, node: &str) -> impl Iterator<Item = &Pool> {
        self.pools_of_node.get(node).into_iter().flatten().filter_map(|pool| self.pools.get(pool))
    }

    /// Returns the nodes that have devices of this driver.
    pub fn nodes_with_pools(&self) -> impl Iterator<Item = &Arc<str>> {
        self.pools_of_node.keys()
    }

    /// Returns a node by its name.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(name)
    }

    /// Returns the nodes that are in the cluster.
    pub fn nodes(&self) -> impl Iterator<Item = (&Arc<str>, &Node)> {
        self.nodes.iter().filter(|(_, node)| node.known)
    }

    /// Returns a DeviceClass by its name.
    pub fn class(&self, name: &str) -> Option<&Class> {
        self.classes.get(name)
    }

    /// Returns all DeviceClasses.
    pub fn classes(&self) -> impl Iterator<Item = &Class> {
        self.classes.values()
    }

    /// Returns a claim by its key.
    pub fn claim(&self, key: &ObjectKey) -> Option<&Claim> {
        self.claims.get(key)
    }

    /// Returns all claims.
    pub fn claims(&self) -> impl Iterator<Item = &Claim> {
        self.claims.values()
    }

    /// Takes in the answer to a write of a pod. The answer does not bring back a pod whose end was seen
    /// meanwhile, and does not replace another pod that has the same name by now.
    pub fn answer_pod(&mut self, pod: &k8s_openapi::api::core::v1::Pod) -> Change {
        let known = key_of(&pod.metadata).and_then(|key| self.pods.get(&key));
        match known {
            Some(known) if pod.metadata.uid.as_deref() == Some(&*known.uid) => self.apply_pod(pod),
            _ => Change::Nothing,
        }
    }

    /// Returns a pod by its key.
    pub fn pod(&self, key: &ObjectKey) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// Returns all pods that have claims or run on a node.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// Returns the lowest priority of the pods with claims; `None` if there are no such pods.
    pub fn lowest_priority(&self) -> Option<i32> {
        self.priorities.keys().next().copied()
    }

    /// Returns the pods that refer to a claim. For a companion, these are the pods of the claim that grew.
    pub fn pods_of_claim(&self, claim: &ObjectKey) -> impl Iterator<Item = &Pod> {
        let companion = self.claims.get(claim).and_then(|known| known.companion.as_ref());
        let claim = companion.map_or(claim, |of| &of.claim);
        self.pods_of_claim.get(claim).into_iter().flatten().filter_map(|pod| self.pods.get(pod))
    }

    /// Returns all DeviceTaintRules.
    pub fn taint_rules(&self) -> impl Iterator<Item = &TaintRule> {
        self.taint_rules.values()
    }

    /// Returns the number of objects of each kind, for metrics.
    pub fn sizes(&self) -> [(&'static str, usize); 6] {
        [
            ("pools", self.pools.len()),
            ("classes", self.classes.len()),
            ("claims", self.claims.len()),
            ("pods", self.pods.len()),
            ("nodes", self.nodes.len()),
            ("assumed", self.assumed.len()),
        ]
    }
}

#[cfg(test)]
mod tests;

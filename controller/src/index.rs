//! What the controller knows of the cluster: plain structs, kept incrementally, no API in it.
//!
//! Every kind has a synchronous `apply`, `delete` and `reset`; `reset` takes what a fresh list
//! returned and drops the rest. Decisions that were made but not yet seen in the API lie over it:
//! see [`Index::assume`]. Everything here can be rebuilt from the API at any time.

mod claims;
mod classes;
mod company;
mod convert;
mod device;
mod fleet;
mod gang;
mod intern;
mod labels;
mod layout;
mod node;
mod outlook;
mod pod;
mod pool;
mod published;
mod storage;
mod taints;
pub mod time_slice;
mod usage;

pub(crate) use claims::key_of;
pub use claims::{
    Allocation, Assumption, Claim, CompanionOf, FINGERPRINT, Held, fingerprint, fingerprint_of,
};
pub use classes::Class;
pub use company::{Company, Spread, Term};
pub use device::{Capacity, Device, Draw, Owner, Policy, Range, Shape, Taint};
pub use fleet::{Board, Fleet, GpuState, Make, Place, Row};
pub(crate) use fleet::{IDENTITIES, PARENT};
pub use gang::{Gang, POD_GROUP_APIS};
pub use intern::{Interner, Pooled, Sym, Table};
pub use labels::{Labels, Selector};
pub use layout::{Column, CounterSet, Fixed, Gpu, Layout, Owners};
pub use node::{ACKNOWLEDGED, GOING_BACK, HostPort, Node, resources_of};
pub use outlook::Outlook;
pub use pod::{ClaimSource, Pod, PodClaim, PodNeeds, Resolution};
pub use pool::{Pool, PoolState};
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
    /// From its parts.
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

/// What a change may have made possible or necessary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Nothing that a decision depends on.
    Nothing,
    /// A pod, or what it refers to: look at it again.
    Pods(Vec<ObjectKey>),
    /// Devices or room may have become free: look at the pods that did not fit.
    Room,
    /// Both.
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
pub struct Index {
    driver: Arc<str>,
    controller_taint: Arc<str>,
    /// Strings of devices, attributes, counters.
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
    /// Numbers of what claims ask for, of this process alone: nobody can look for a claim that has another's.
    demands: RandomState,
    /// Claims that were added, changed or removed since this was taken; `None` while nobody asks.
    claims_changed: Option<HashSet<ObjectKey>>,
    /// Hold claims of ours.
    bequests: BTreeSet<ObjectKey>,
    claims_gone: claims::Tombstones,
    assumed: HashMap<Uid, Assumption>,
    pods: HashMap<ObjectKey, Pod>,
    pods_of_claim: HashMap<ObjectKey, HashSet<ObjectKey>>,
    priorities: BTreeMap<i32, usize>,
    /// How often it changed who holds devices, or whether they go.
    holders_version: u64,
    accounted: HashMap<Uid, node::Accounted>,
    nodes: HashMap<Arc<str>, Node>,
    taint_rules: HashMap<Arc<str>, TaintRule>,
    companies: company::Companies,
    gangs: gang::Gangs,
    storage: storage::Storage,
    fleet: Fleet,
    /// A layout of each make, in a copy that only tells what is published.
    makes: Option<Box<[Arc<Layout>]>>,
    /// Devices as they were read before, by name.
    templates: HashMap<Sym, Vec<convert::Template>>,
}

impl Index {
    /// An empty cluster, as seen by the driver of this name.
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
            bequests: BTreeSet::new(),
            claims_gone: claims::Tombstones::default(),
            assumed: HashMap::new(),
            pods: HashMap::new(),
            pods_of_claim: HashMap::new(),
            priorities: BTreeMap::new(),
            holders_version: 0,
            accounted: HashMap::new(),
            nodes: HashMap::new(),
            taint_rules: HashMap::new(),
            companies: company::Companies::default(),
            gangs: gang::Gangs::default(),
            storage: storage::Storage::default(),
            fleet: Fleet::default(),
            makes: None,
            templates: HashMap::new(),
        }
    }

    /// The driver's name.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// Key of the taint that makes a device ours to give.
    pub fn controller_taint(&self) -> &str {
        &self.controller_taint
    }

    /// A string by its symbol.
    pub fn name(&self, sym: Sym) -> &str {
        self.names.get(sym)
    }

    /// A string's symbol, if anything is called so.
    pub fn sym(&self, name: &str) -> Option<Sym> {
        self.names.find(name)
    }

    /// A string's symbol, new if nothing is called so yet.
    pub fn intern(&mut self, name: &str) -> Sym {
        self.names.intern(name)
    }

    /// What devices have in common.
    pub fn shape(&self, device: &Device) -> &Shape {
        self.shapes.get(device.shape)
    }

    /// What the device takes of its pool's counter sets.
    pub fn draws<'a>(
        &'a self,
        device: &'a Device,
    ) -> impl Iterator<Item = (u16, &'a [(u16, crate::quantity::Quantity)])> {
        device.draws.iter().flatten().map(|draw| (draw.set, self.draws.get(draw.amounts).as_ref()))
    }

    /// The device's own taints, ours left out.
    pub fn taints(&self, device: &Device) -> &[Taint] {
        self.taint_lists.get(device.taints)
    }

    /// Pools that exist.
    pub fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.values()
    }

    /// A pool.
    pub fn pool(&self, name: Sym) -> Option<&Pool> {
        self.pools.get(&name)
    }

    /// Pools of a node.
    pub fn pools_of_node(&self, node: &str) -> impl Iterator<Item = &Pool> {
        self.pools_of_node.get(node).into_iter().flatten().filter_map(|pool| self.pools.get(pool))
    }

    /// Nodes that have devices of ours.
    pub fn nodes_with_pools(&self) -> impl Iterator<Item = &Arc<str>> {
        self.pools_of_node.keys()
    }

    /// A node.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(name)
    }

    /// Nodes that are in the cluster.
    pub fn nodes(&self) -> impl Iterator<Item = (&Arc<str>, &Node)> {
        self.nodes.iter().filter(|(_, node)| node.known)
    }

    /// A DeviceClass.
    pub fn class(&self, name: &str) -> Option<&Class> {
        self.classes.get(name)
    }

    /// All DeviceClasses.
    pub fn classes(&self) -> impl Iterator<Item = &Class> {
        self.classes.values()
    }

    /// A claim.
    pub fn claim(&self, key: &ObjectKey) -> Option<&Claim> {
        self.claims.get(key)
    }

    /// All claims.
    pub fn claims(&self) -> impl Iterator<Item = &Claim> {
        self.claims.values()
    }

    /// Takes in the answer to a write of a pod. It brings back no pod whose end was seen meanwhile, and takes the place of
    /// none that has its name by now.
    pub fn answer_pod(&mut self, pod: &k8s_openapi::api::core::v1::Pod) -> Change {
        let known = key_of(&pod.metadata).and_then(|key| self.pods.get(&key));
        match known {
            Some(known) if pod.metadata.uid.as_deref() == Some(&*known.uid) => self.apply_pod(pod),
            _ => Change::Nothing,
        }
    }

    /// A pod.
    pub fn pod(&self, key: &ObjectKey) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// All pods that have claims or run somewhere.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// The lowest priority of a pod with claims.
    pub fn lowest_priority(&self) -> Option<i32> {
        self.priorities.keys().next().copied()
    }

    /// Pods that refer to a claim; a companion is referred to by those of the claim that grew.
    pub fn pods_of_claim(&self, claim: &ObjectKey) -> impl Iterator<Item = &Pod> {
        let companion = self.claims.get(claim).and_then(|known| known.companion.as_ref());
        let claim = companion.map_or(claim, |of| &of.claim);
        self.pods_of_claim.get(claim).into_iter().flatten().filter_map(|pod| self.pods.get(pod))
    }

    /// DeviceTaintRules.
    pub fn taint_rules(&self) -> impl Iterator<Item = &TaintRule> {
        self.taint_rules.values()
    }

    /// What each kind has, for metrics.
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

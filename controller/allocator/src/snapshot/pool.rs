//! Pools. The slices of one generation make a layout; an incomplete generation offers nothing.

use super::convert::{self, SliceRecord};
use super::slice_error::SliceError;
use super::usage::Names;
use super::{Change, Holder, Layout, Snapshot, Sym, Usage};
use aliquot_model::names::pool_node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

/// The state that says whether devices of a pool can be allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolState {
    /// There are no slices: nothing is published, or nothing is published any more.
    Absent,
    /// Slices of the newest generation are missing: the pool is being updated.
    Incomplete {
        /// The newest generation.
        generation: i64,
        /// The number of its slices that are present.
        have: usize,
        /// The number of slices that it should have.
        want: i64,
    },
    /// The slices contradict each other.
    Invalid(SliceError),
    /// Devices of the pool can be allocated.
    Ready,
}

/// A pool of this driver.
#[derive(Debug, Clone)]
pub struct Pool {
    /// Name of the pool.
    pub name: Sym,
    /// Node that has the devices; `None` for a pool that is not local to one node, which this driver does not
    /// publish.
    pub node: Option<Arc<str>>,
    /// The state that says whether devices can be allocated.
    pub state: PoolState,
    /// The layout, if the state is `Ready`.
    pub layout: Option<Arc<Layout>>,
    /// The holds on the layout.
    pub usage: Usage,
    /// The holders, whether the layout has their device or not.
    pub holders: Vec<Holder>,
    /// A number that grows with every change of what can be allocated; used by caches.
    pub version: u64,
    /// The reason why nothing is allocated from the pool at the moment, apart from its state. The controller
    /// sets it when it finds that another allocator allocates from the pool.
    pub stopped: Option<String>,
    /// The end of the wait for kube-scheduler, in seconds of Unix time by the node's clock, if the pool is
    /// handed over from kube-scheduler to the controller.
    pub hand_over_until: Option<i64>,
    pub(crate) slices: BTreeMap<Arc<str>, SliceRecord>,
}

impl Pool {
    pub(crate) fn new(name: Sym) -> Self {
        Self {
            name,
            node: None,
            state: PoolState::Absent,
            layout: None,
            usage: Usage::default(),
            holders: Vec::new(),
            version: 0,
            stopped: None,
            hand_over_until: None,
            slices: BTreeMap::new(),
        }
    }

    /// Returns a copy to count in, without the slices of the pool.
    pub fn without_slices(&self) -> Self {
        Self {
            name: self.name,
            node: self.node.clone(),
            state: self.state.clone(),
            layout: self.layout.clone(),
            usage: self.usage.clone(),
            holders: self.holders.clone(),
            version: self.version,
            stopped: self.stopped.clone(),
            hand_over_until: self.hand_over_until,
            slices: BTreeMap::new(),
        }
    }

    /// Returns the newest generation of the slices.
    pub fn generation(&self) -> Option<i64> {
        self.slices.values().map(|slice| slice.generation).max()
    }

    pub(crate) fn touch(&mut self) {
        self.version = self.version.wrapping_add(1);
        self.usage.refresh_fingerprint();
    }

    pub(crate) fn is_forgotten(&self) -> bool {
        self.slices.is_empty() && self.holders.is_empty()
    }
}

impl Snapshot {
    /// Adds or replaces a slice. Slices of other drivers are ignored.
    pub fn apply_slice(&mut self, slice: &ResourceSlice) -> Change {
        self.apply_slices(std::slice::from_ref(slice))
    }

    /// Adds or replaces slices. A pool is rebuilt once, however many of its slices are given, and not at all
    /// if they have not changed.
    pub fn apply_slices(&mut self, slices: &[ResourceSlice]) -> Change {
        let mut touched = BTreeSet::new();
        for slice in slices {
            self.take_in(slice, &mut touched);
        }
        self.rebuild_pools(touched)
    }

    fn take_in(&mut self, slice: &ResourceSlice, touched: &mut BTreeSet<Sym>) {
        let Some(object) = slice.metadata.name.as_deref() else { return };
        // A node's pool is only what that node itself publishes; a slice of the pool for another node is
        // ignored.
        let node = slice.spec.node_name.as_deref();
        let of_another = pool_node(self.driver(), &slice.spec.pool.name).is_some_and(|of| node != Some(of));
        if slice.spec.driver != self.driver() || of_another {
            self.leave_out(object, touched);
            return;
        }
        let pool = self.names.intern(&slice.spec.pool.name);
        let known = self.pools.get(&pool).and_then(|pool| pool.slices.get(object));
        let version = slice.metadata.resource_version.as_deref();
        if version.is_some() && known.is_some_and(|known| known.version.as_deref() == version) {
            return;
        }
        let record = convert::slice(self, slice);
        if let Some(before) = self.pool_of_slice.insert(object.into(), pool)
            && before != pool
        {
            if let Some(entry) = self.pools.get_mut(&before) {
                entry.slices.remove(object);
            }
            touched.insert(before);
        }
        let entry = self.pools.entry(pool).or_insert_with(|| Pool::new(pool));
        let same = entry
            .slices
            .get(object)
            .is_some_and(|known| *known == SliceRecord { version: known.version.clone(), ..record.clone() });
        entry.slices.insert(object.into(), record);
        if !same {
            touched.insert(pool);
        }
    }

    /// Removes a slice.
    pub fn delete_slice(&mut self, object: &str) -> Change {
        self.delete_slices(std::iter::once(object))
    }

    /// Removes slices.
    pub fn delete_slices<'a>(&mut self, objects: impl Iterator<Item = &'a str>) -> Change {
        let mut touched = BTreeSet::new();
        for object in objects {
            self.leave_out(object, &mut touched);
        }
        self.rebuild_pools(touched)
    }

    fn leave_out(&mut self, object: &str, touched: &mut BTreeSet<Sym>) {
        let Some(pool) = self.pool_of_slice.remove(object) else { return };
        if let Some(entry) = self.pools.get_mut(&pool) {
            entry.slices.remove(object);
        }
        touched.insert(pool);
    }

    /// Replaces all slices.
    pub fn reset_slices(&mut self, slices: &[ResourceSlice]) -> Change {
        let kept: HashSet<&str> = slices.iter().filter_map(|slice| slice.metadata.name.as_deref()).collect();
        let gone: Vec<Arc<str>> =
            self.pool_of_slice.keys().filter(|name| !kept.contains(&***name)).cloned().collect();
        let mut touched = BTreeSet::new();
        for name in gone {
            self.leave_out(&name, &mut touched);
        }
        for slice in slices {
            self.take_in(slice, &mut touched);
        }
        self.rebuild_pools(touched)
    }

    /// Returns the names of all slices.
    pub fn slice_names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.pool_of_slice.keys()
    }

    fn rebuild_pools(&mut self, touched: BTreeSet<Sym>) -> Change {
        let change = if touched.is_empty() { Change::Nothing } else { Change::Room };
        for pool in touched {
            self.rebuild_pool(pool);
        }
        change
    }

    /// Stops allocation from a pool for this reason; `None` resumes it.
    pub fn stop_pool(&mut self, pool: Sym, reason: Option<String>) {
        if let Some(entry) = self.pools.get_mut(&pool) {
            entry.stopped = reason;
            entry.touch();
            let node = entry.node.clone();
            self.refresh_fleet(node.as_ref());
        }
    }

    fn rebuild_pool(&mut self, name: Sym) {
        let Some(mut pool) = self.pools.remove(&name) else { return };
        let before = pool.node.clone();
        self.fleet.remove(name);
        let (state, layout, node) = self.layout_of(&pool);
        pool.hand_over_until = pool.slices.values().filter_map(|slice| slice.hand_over_until).max();
        pool.state = state;
        pool.node = node;
        pool.layout = layout.map(Arc::new);
        pool.usage = Usage::default();
        if let Some(layout) = &pool.layout {
            let names = Names { names: &self.names, shapes: &self.shapes, draws: &self.draws };
            pool.usage = Usage::empty(layout);
            for holder in &pool.holders {
                pool.usage.count(&names, layout, holder, 1);
            }
        }
        pool.touch();
        let after = pool.node.clone();
        if before != pool.node {
            if let Some(before) = &before
                && let Some(pools) = self.pools_of_node.get_mut(before)
            {
                pools.remove(&name);
                if pools.is_empty() {
                    self.pools_of_node.remove(before);
                }
            }
            if let Some(node) = &pool.node {
                self.pools_of_node.entry(node.clone()).or_default().insert(name);
            }
        }
        if !pool.is_forgotten() {
            self.pools.insert(name, pool);
        }
        if before != after {
            self.refresh_fleet(before.as_ref());
        }
        self.refresh_fleet(after.as_ref());
    }

    fn layout_of(&mut self, pool: &Pool) -> (PoolState, Option<Layout>, Option<Arc<str>>) {
        let Some(generation) = pool.generation() else { return (PoolState::Absent, None, None) };
        let current: Vec<&SliceRecord> =
            pool.slices.values().filter(|slice| slice.generation == generation).collect();
        let want = current.iter().map(|slice| slice.slice_count).max().unwrap_or_default();
        let nodes: BTreeSet<&Option<Arc<str>>> = current.iter().map(|slice| &slice.node).collect();
        let node = match nodes.iter().collect::<Vec<_>>().as_slice() {
            [Some(node)] => Some(node.clone()),
            _ => None,
        };
        if i64::try_from(current.len()).unwrap_or(i64::MAX) != want {
            let state = PoolState::Incomplete { generation, have: current.len(), want };
            return (state, None, node);
        }
        match self.build_layout(generation, &current) {
            Ok(layout) => (PoolState::Ready, Some(layout), node),
            Err(reason) => (PoolState::Invalid(reason), None, node),
        }
    }
}

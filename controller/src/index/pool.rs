//! Pools: slices of one generation make a layout; an incomplete generation offers nothing.

use super::convert::{self, SliceRecord};
use super::usage::Names;
use super::{Change, Device, Holder, Index, Owner, Sym, Usage};
use crate::quantity::Quantity;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// A counter set of a layout.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CounterSet {
    /// Name.
    pub name: Sym,
    /// Totals, ascending by symbol.
    pub counters: Arc<[(Sym, Quantity)]>,
    /// Where the set begins in [`Usage::free`].
    pub offset: usize,
}

/// What a complete generation of a pool offers. Nodes of one make share everything but the columns
/// of attributes in which they differ, so what is found out about one holds for all.
#[derive(Debug)]
pub struct Layout {
    /// Generation.
    pub generation: i64,
    fixed: Arc<Fixed>,
    columns: Box<[(Sym, Arc<Column>)]>,
}

impl Deref for Layout {
    type Target = Fixed;

    fn deref(&self) -> &Fixed {
        &self.fixed
    }
}

/// The part of a layout that equal nodes share.
#[derive(Debug)]
pub struct Fixed {
    /// Tells layouts apart; never used again.
    pub id: u64,
    /// Devices in the order of slices by name, then as listed.
    pub devices: Box<[Device]>,
    /// Counter sets.
    pub sets: Box<[CounterSet]>,
    /// GPUs, in the order of their first device.
    pub gpus: Box<[Gpu]>,
    by_name: Box<[(Sym, u32)]>,
    /// Whether some device is ours to give, waits for a switch, or is kube-scheduler's.
    pub owners: Owners,
}

impl PartialEq for Fixed {
    fn eq(&self, other: &Self) -> bool {
        self.devices == other.devices && self.sets == other.sets
    }
}

impl Eq for Fixed {}

impl Hash for Fixed {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.devices.hash(state);
        self.sets.hash(state);
    }
}

/// Devices that stand and fall together.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// Its number in device names.
    pub number: u32,
    /// Its devices, by position.
    pub devices: Box<[u32]>,
    /// The counter sets that they draw on.
    pub sets: Box<[u16]>,
    /// Whether no other GPU draws on these sets.
    pub alone: bool,
    /// Its board: what it has in common with GPUs of other nodes.
    pub board: u32,
}

/// The values of one attribute, a device each.
#[derive(Debug)]
pub struct Column {
    /// Tells columns apart; never used again.
    pub id: u64,
    values: Box<[u32]>,
}

/// In place of a value where a device does not have the attribute.
const NO_VALUE: u32 = u32::MAX;

impl Column {
    /// A device's value, if it has one.
    pub fn value(&self, position: u32) -> Option<u32> {
        self.values.get(position as usize).copied().filter(|value| *value != NO_VALUE)
    }
}

impl PartialEq for Column {
    fn eq(&self, other: &Self) -> bool {
        self.values == other.values
    }
}

impl Eq for Column {}

impl Hash for Column {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.values.hash(state);
    }
}

/// Which owners the devices of a layout have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Owners {
    /// Some device is ours to give.
    pub controller: bool,
    /// Some device is in a switch.
    pub hand_over: bool,
    /// Some device is kube-scheduler's.
    pub scheduler: bool,
}

impl Layout {
    /// Where a device is.
    pub fn position(&self, name: Sym) -> Option<u32> {
        let at = self.by_name.binary_search_by_key(&name, |(name, _)| *name).ok()?;
        self.by_name.get(at).map(|(_, position)| *position)
    }

    /// A device's attribute, by its name with domain.
    pub fn attribute(&self, position: u32, name: Sym) -> Option<u32> {
        self.column(name)?.value(position)
    }

    /// The values of an attribute that some device has.
    pub fn column(&self, name: Sym) -> Option<&Column> {
        let at = self.columns.binary_search_by_key(&name, |(name, _)| *name).ok()?;
        self.columns.get(at).map(|(_, column)| &**column)
    }

    /// All attributes with their names.
    pub fn named_columns(&self) -> impl Iterator<Item = (Sym, &Column)> {
        self.columns.iter().map(|(name, column)| (*name, &**column))
    }

    /// All attributes.
    pub fn columns(&self) -> impl Iterator<Item = &Column> {
        self.columns.iter().map(|(_, column)| &**column)
    }
}

/// Whether a pool can be given from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolState {
    /// There are no slices: nothing is published (any more).
    Absent,
    /// Slices of the newest generation are missing: it is being updated.
    Incomplete {
        /// Newest generation.
        generation: i64,
        /// Slices of it that are there.
        have: usize,
        /// Slices that it should have.
        want: i64,
    },
    /// The slices contradict each other.
    Invalid(String),
    /// It can.
    Ready,
}

/// A pool of our driver.
#[derive(Debug, Clone)]
pub struct Pool {
    /// Name.
    pub name: Sym,
    /// Node that its devices are on; `None` for a pool of another kind, which nobody of us publishes.
    pub node: Option<Arc<str>>,
    /// Whether it can be given from.
    pub state: PoolState,
    /// What it offers, when ready.
    pub layout: Option<Arc<Layout>>,
    /// What of it is taken.
    pub usage: Usage,
    /// By whom, whether the layout knows the device or not.
    pub holders: Vec<Holder>,
    /// Counts up with every change of what could be given; for caches.
    pub version: u64,
    /// Why nothing is given from it at the moment, beside its state: set by the controller when it
    /// finds that somebody else allocates from it.
    pub stopped: Option<String>,
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
            slices: BTreeMap::new(),
        }
    }

    /// A copy to count in: without the slices that it is made of.
    pub(crate) fn without_slices(&self) -> Self {
        Self {
            name: self.name,
            node: self.node.clone(),
            state: self.state.clone(),
            layout: self.layout.clone(),
            usage: self.usage.clone(),
            holders: self.holders.clone(),
            version: self.version,
            stopped: self.stopped.clone(),
            slices: BTreeMap::new(),
        }
    }

    /// Generation of the newest slices.
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

impl Index {
    /// Adds or replaces a slice. Slices of other drivers are ignored.
    pub fn apply_slice(&mut self, slice: &ResourceSlice) -> Change {
        let Some(object) = slice.metadata.name.as_deref() else { return Change::Nothing };
        if slice.spec.driver != self.driver() {
            return self.delete_slice(object);
        }
        let pool = self.names.intern(&slice.spec.pool.name);
        let mut touched = Vec::new();
        if let Some(before) = self.pool_of_slice.insert(object.into(), pool)
            && before != pool
        {
            touched.push(before);
        }
        let record = convert::slice(self, slice);
        for before in touched {
            self.remove_slice(before, object);
        }
        let entry = self.pools.entry(pool).or_insert_with(|| Pool::new(pool));
        entry.slices.insert(object.into(), record);
        self.rebuild_pool(pool);
        Change::Room
    }

    /// Removes a slice.
    pub fn delete_slice(&mut self, object: &str) -> Change {
        let Some(pool) = self.pool_of_slice.remove(object) else { return Change::Nothing };
        self.remove_slice(pool, object);
        Change::Room
    }

    /// Replaces all slices.
    pub fn reset_slices(&mut self, slices: &[ResourceSlice]) -> Change {
        let kept: HashSet<&str> = slices.iter().filter_map(|slice| slice.metadata.name.as_deref()).collect();
        let gone: Vec<Arc<str>> =
            self.pool_of_slice.keys().filter(|name| !kept.contains(&***name)).cloned().collect();
        for name in gone {
            self.delete_slice(&name);
        }
        for slice in slices {
            self.apply_slice(slice);
        }
        Change::Room
    }

    fn remove_slice(&mut self, pool: Sym, object: &str) {
        if let Some(entry) = self.pools.get_mut(&pool) {
            entry.slices.remove(object);
        }
        self.rebuild_pool(pool);
    }

    /// Stops a pool, or lets it go on.
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

    fn build_layout(&mut self, generation: i64, slices: &[&SliceRecord]) -> Result<Layout, String> {
        let mut sets: Vec<CounterSet> = Vec::new();
        let mut offset = 0;
        for (name, counters) in slices.iter().flat_map(|slice| slice.sets.iter()) {
            if sets.iter().any(|set| set.name == *name) {
                return Err(format!("counter set {} is there twice", self.name(*name)));
            }
            sets.push(CounterSet { name: *name, counters: counters.clone(), offset });
            offset += counters.len();
        }
        let count = slices.iter().map(|slice| slice.devices.len()).sum();
        let mut devices: Vec<Device> = Vec::with_capacity(count);
        let mut columns: BTreeMap<Sym, Vec<u32>> = BTreeMap::new();
        for slice in slices {
            if let Some(problem) = &slice.problem {
                return Err(problem.clone());
            }
            for raw in slice.devices.iter() {
                let position = devices.len();
                devices.push(self.place(raw, &sets)?);
                let names = &self.shapes.get(raw.shape).attributes;
                for (name, value) in names.iter().zip(raw.values.iter()) {
                    let column = columns.entry(*name).or_insert_with(|| vec![NO_VALUE; count]);
                    if let Some(slot) = column.get_mut(position) {
                        *slot = *value;
                    }
                }
            }
        }
        let fixed = self.fixed_part(devices, sets)?;
        let columns = columns
            .into_iter()
            .map(|(name, values)| {
                let id = self.next_id();
                (name, self.columns.share(Column { id, values: values.into() }))
            })
            .collect();
        Ok(Layout { generation, fixed, columns })
    }

    fn fixed_part(&mut self, devices: Vec<Device>, sets: Vec<CounterSet>) -> Result<Arc<Fixed>, String> {
        let mut owners = Owners::default();
        let mut by_name: Vec<(Sym, u32)> = Vec::with_capacity(devices.len());
        let mut gpus: Vec<(u32, Vec<u32>, BTreeSet<u16>)> = Vec::new();
        for (device, position) in devices.iter().zip(0u32..) {
            match device.owner {
                Owner::Controller => owners.controller = true,
                Owner::HandOver => owners.hand_over = true,
                Owner::Scheduler => owners.scheduler = true,
            }
            by_name.push((device.name, position));
            let draws = device.draws.iter().flatten().map(|draw| draw.set);
            match gpus.iter_mut().find(|(number, _, _)| *number == device.gpu) {
                Some((_, positions, sets)) => {
                    positions.push(position);
                    sets.extend(draws);
                }
                None => gpus.push((device.gpu, vec![position], draws.collect())),
            }
        }
        by_name.sort_unstable();
        if let Some([(name, _), _]) = by_name.array_windows::<2>().find(|[(a, _), (b, _)]| a == b) {
            return Err(format!("device {} is there twice", self.name(*name)));
        }
        let mut users: BTreeMap<u16, usize> = BTreeMap::new();
        for set in gpus.iter().flat_map(|(_, _, sets)| sets) {
            *users.entry(*set).or_default() += 1;
        }
        let gpus = gpus
            .into_iter()
            .map(|(number, positions, used)| Gpu {
                number,
                alone: used.iter().all(|set| users.get(set) == Some(&1)),
                board: self.board_of(&devices, &sets, &positions, &used),
                devices: positions.into(),
                sets: used.into_iter().collect(),
            })
            .collect();
        let id = self.next_id();
        Ok(self.fixed.share(Fixed {
            id,
            devices: devices.into(),
            sets: sets.into(),
            gpus,
            by_name: by_name.into(),
            owners,
        }))
    }

    fn next_id(&mut self) -> u64 {
        self.last_id = self.last_id.wrapping_add(1);
        self.last_id
    }

    /// A slice's device with its counters found in the pool's sets.
    fn place(&mut self, raw: &convert::RawDevice, sets: &[CounterSet]) -> Result<Device, String> {
        let mut draws = [None, None];
        if raw.consumes.len() > draws.len() {
            return Err(format!("device {} consumes of more than two counter sets", self.name(raw.name)));
        }
        let mut gpu = super::usage::gpu_of_name(self.name(raw.name));
        for (slot, (set_name, amounts)) in draws.iter_mut().zip(raw.consumes.iter()) {
            let found = sets.iter().zip(0u16..).find(|(set, _)| set.name == *set_name);
            let Some((set, position)) = found else {
                return Err(format!(
                    "device {} consumes of counter set {}, which is not published",
                    self.name(raw.name),
                    self.name(*set_name)
                ));
            };
            let mut relative = Vec::with_capacity(amounts.len());
            for (counter, amount) in amounts.iter() {
                let at = set.counters.binary_search_by_key(counter, |(name, _)| *name).map_err(|_| {
                    format!(
                        "device {} consumes counter {} of set {}, which is not published",
                        self.names.get(raw.name),
                        self.names.get(*counter),
                        self.names.get(*set_name)
                    )
                })?;
                relative.push((u16::try_from(at).unwrap_or(u16::MAX), *amount));
            }
            gpu = gpu.or_else(|| Some((1 << 31) | u32::from(position)));
            *slot = Some(super::Draw { set: position, amounts: self.draws.intern(relative.into()) });
        }
        Ok(Device {
            name: raw.name,
            // A device of a foreign name without counters stands alone.
            gpu: gpu.unwrap_or((1 << 30) | raw.position),
            shape: raw.shape,
            draws,
            taints: raw.taints,
            owner: raw.owner,
        })
    }
}

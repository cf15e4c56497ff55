//! GPUs grouped by state, over all nodes. A decision looks at each state once, however many GPUs are in it.
//!
//! Nodes of one make differ only in what identifies a device. GPUs of one board have the same places; two of
//! them are in the same state if the same places are free on them. A node that does not fit this model (it
//! has several pools, or a pool that cannot be allocated from) is odd, and is looked at by itself.

use super::fragmentation::MOST_SLICES;
use super::{CounterSet, Device, Layout, Outlook, Pool, PoolState, Quantity, Shape, Snapshot, Sym, Table};
use crate::snapshot::worth::{Cost, Worth};
use aliquot_model::layout::MEMORY_SLICE;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// The most devices of a GPU that a state can describe.
const MOST_PLACES: usize = 64;
/// Attributes in which devices of one make differ.
pub(crate) const IDENTITIES: [&str; 2] = ["uuid", PARENT];
/// The attribute that the partitions of one GPU have in common.
pub(crate) const PARENT: &str = "parentUUID";

/// The devices of a GPU by place, without their attributes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Board {
    /// The devices, in layout order.
    pub places: Vec<Place>,
    pub(crate) totals: Vec<Quantity>,
    /// Positions of the counters that stand for memory slices.
    pub(crate) slices: Vec<usize>,
}

/// A device of a board.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    pub(crate) shape: u32,
    pub(crate) taints: u32,
    /// The scheduler that may give the device out.
    pub owner: super::Owner,
    /// The counters that the device draws on, with the amounts; positions count through all sets.
    pub(crate) draws: Vec<(usize, Quantity)>,
}

impl Place {
    /// Returns true if more is drawn from one of the place's counters than it has. Then another device has
    /// what this place needs.
    fn is_overdrawn(&self, free: &[Quantity]) -> bool {
        self.draws.iter().any(|(at, _)| free.get(*at).is_none_or(|free| *free < Quantity::ZERO))
    }

    /// Returns true if this much free capacity suffices for the place.
    pub(crate) fn fits(&self, free: &[Quantity]) -> bool {
        self.draws.iter().all(|(at, amount)| free.get(*at).is_some_and(|free| amount <= free))
    }
}

/// The holds on a GPU, as far as decisions depend on them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    board: u32,
    free: Vec<Quantity>,
    shared: Vec<(usize, Box<[Quantity]>)>,
    fits: u64,
    untouched: bool,
}

/// The GPUs that are in one state.
#[derive(Debug)]
pub struct GpuState {
    key: Key,
    /// The cost of taking each place.
    costs: Vec<Cost>,
    /// The GPUs of all nodes in this state: room on the node, pool of the node, and position of the GPU.
    members: BTreeSet<(i64, Sym, usize)>,
}

impl GpuState {
    /// Returns the board of these GPUs.
    pub const fn board(&self) -> u32 {
        self.key.board
    }

    /// Returns the places that no claim holds or shares and that could be taken, one bit for each place.
    pub const fn fits(&self) -> u64 {
        self.key.fits
    }

    /// Returns the free amount of each counter of the board.
    pub(crate) fn free(&self) -> &[Quantity] {
        &self.key.free
    }

    /// Returns true if nothing of the GPU is held.
    pub const fn untouched(&self) -> bool {
        self.key.untouched
    }

    /// Returns the places that are shared now, with the amounts consumed of them.
    pub fn shared(&self) -> impl Iterator<Item = (usize, &[Quantity])> {
        self.key.shared.iter().map(|(at, consumed)| (*at, &**consumed))
    }

    /// Returns true if two places could be taken together.
    pub fn fit_together(&self, board: &Board, one: usize, other: usize) -> bool {
        let (Some(one), Some(other)) = (board.places.get(one), board.places.get(other)) else { return false };
        let left = |at: usize, amount: Quantity| {
            let free = self.key.free.get(at).copied().unwrap_or_default();
            free - amount
        };
        other.draws.iter().all(|(at, amount)| {
            let before = one.draws.iter().find(|(other, _)| other == at).map(|(_, amount)| *amount);
            *amount <= left(*at, before.unwrap_or_default())
        })
    }

    /// Returns the cost of taking a place.
    pub fn cost(&self, place: usize) -> Cost {
        self.costs.get(place).copied().unwrap_or_default()
    }

    /// Returns the number of GPUs in this state.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// Returns the GPUs in this state, those on the fullest nodes first: room on the node, pool, and position
    /// of the GPU.
    pub fn members(&self) -> impl DoubleEndedIterator<Item = &(i64, Sym, usize)> {
        self.members.iter()
    }
}

/// Nodes of one make.
#[derive(Debug)]
pub struct Make {
    /// The layout of one of the nodes.
    pub layout: Arc<Layout>,
    /// The names of the nodes.
    pub nodes: BTreeSet<Arc<str>>,
    /// The boards of the GPUs on each node.
    pub boards: Vec<u32>,
}

/// The GPUs of a node.
#[derive(Debug)]
pub struct Row {
    /// The name of the node.
    pub node: Arc<str>,
    /// The make of the node.
    pub make: u32,
    /// The state of each GPU.
    pub states: Box<[usize]>,
    room: i64,
}

/// The GPUs of all nodes.
#[derive(Debug, Default)]
pub struct Fleet {
    boards: Table<Board>,
    /// The outlook of each board.
    outlooks: Vec<Outlook>,
    make_ids: Table<(u64, Vec<u64>)>,
    makes: BTreeMap<u32, Make>,
    known: HashMap<Key, usize>,
    states: Vec<GpuState>,
    vacant: Vec<usize>,
    rows: HashMap<Sym, Row>,
    pool_of_node: HashMap<Arc<str>, Sym>,
    by_room: BTreeSet<(i64, Sym)>,
    odd: BTreeSet<Arc<str>>,
}

impl Fleet {
    /// Returns the nodes that have to be looked at one by one.
    pub const fn odd(&self) -> &BTreeSet<Arc<str>> {
        &self.odd
    }

    /// Returns the makes that have nodes.
    pub const fn makes(&self) -> &BTreeMap<u32, Make> {
        &self.makes
    }

    /// Returns a board by its number.
    pub fn board(&self, board: u32) -> &Board {
        self.boards.get(board)
    }

    /// Returns the states that GPUs are in.
    pub fn states(&self) -> impl Iterator<Item = &GpuState> {
        self.states.iter().filter(|state| !state.members.is_empty())
    }

    /// Returns a bound: the numbers of all states are below it.
    pub const fn most_states(&self) -> usize {
        self.states.len()
    }

    /// Returns all nodes that are not odd, in no order.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.values()
    }

    /// Returns a state by its number.
    pub fn state(&self, state: usize) -> Option<&GpuState> {
        self.states.get(state)
    }

    /// Returns the GPUs of a node, by the node's pool.
    pub fn row(&self, pool: Sym) -> Option<&Row> {
        self.rows.get(&pool)
    }

    /// Returns the GPUs of a node; `None` if the node is odd or unknown.
    pub fn row_of_node(&self, node: &str) -> Option<&Row> {
        self.rows.get(self.pool_of_node.get(node)?)
    }

    /// Returns the nodes that are not odd, the fullest first.
    pub fn by_room(&self) -> impl DoubleEndedIterator<Item = &Row> {
        self.by_room.iter().filter_map(|(_, pool)| self.rows.get(pool))
    }

    pub(super) fn remove(&mut self, pool: Sym) {
        let Some(row) = self.rows.remove(&pool) else { return };
        self.by_room.remove(&(row.room, pool));
        self.pool_of_node.remove(&row.node);
        for (gpu, at) in row.states.iter().enumerate() {
            let Some(state) = self.states.get_mut(*at) else { continue };
            state.members.remove(&(row.room, pool, gpu));
            if state.members.is_empty() && self.known.remove(&state.key).is_some() {
                self.vacant.push(*at);
            }
        }
        if let Some(make) = self.makes.get_mut(&row.make) {
            make.nodes.remove(&row.node);
            if make.nodes.is_empty() {
                self.makes.remove(&row.make);
            }
        }
    }

    /// Returns what a GPU can still be used for, given the free amount of each counter; the sets follow one
    /// another.
    pub fn worth(&self, board: u32, free: &[Quantity]) -> Worth {
        let outlook = self.outlooks.get(board as usize);
        outlook.map(|outlook| outlook.worth(self.boards.get(board), free)).unwrap_or_default()
    }

    /// Returns the size of a place, in thousandths of the GPU; 0 for shares.
    pub fn size(&self, board: u32, place: usize) -> i64 {
        self.outlooks.get(board as usize).map(|outlook| outlook.size(place)).unwrap_or_default()
    }

    fn intern_board(&mut self, board: Board, shareable: impl Fn(u32) -> bool) -> u32 {
        let number = self.boards.intern(board);
        if self.outlooks.len() <= number as usize {
            self.outlooks.push(Outlook::new(self.boards.get(number), shareable));
        }
        number
    }

    fn ask(&mut self, board: u32, place: usize) {
        let Some(outlook) = self.outlooks.get_mut(board as usize) else { return };
        if !outlook.ask(self.boards.get(board), place) {
            return;
        }
        for at in 0..self.states.len() {
            let Some(key) = self.states.get(at).map(|state| &state.key) else { continue };
            if key.board == board {
                let costs = self.costs(key);
                if let Some(state) = self.states.get_mut(at) {
                    state.costs = costs;
                }
            }
        }
    }

    /// Returns the cost of taking each place of a GPU.
    fn costs(&self, key: &Key) -> Vec<Cost> {
        let before = self.worth(key.board, &key.free);
        let places = self.boards.get(key.board).places.iter().enumerate();
        let cost = |(at, place): (usize, &Place)| {
            if key.fits >> at & 1 == 0 {
                return Cost::default();
            }
            let mut free = key.free.clone();
            for (at, amount) in &place.draws {
                if let Some(free) = free.get_mut(*at) {
                    *free = *free - *amount;
                }
            }
            before.until(self.worth(key.board, &free))
        };
        places.map(cost).collect()
    }

    fn intern(&mut self, key: Key) -> usize {
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let state = GpuState { costs: self.costs(&key), key: key.clone(), members: BTreeSet::new() };
        let at = self.vacant.pop().unwrap_or(self.states.len());
        match self.states.get_mut(at) {
            Some(slot) => *slot = state,
            None => self.states.push(state),
        }
        self.known.insert(key, at);
        at
    }
}

impl Snapshot {
    /// Returns the GPUs grouped by state.
    pub const fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Returns what the devices of a place have in common.
    pub fn shape_of(&self, place: &Place) -> &Shape {
        self.shapes.get(place.shape)
    }

    /// Returns the taints of a place, without those of this driver.
    pub fn taints_of(&self, place: &Place) -> &[super::Taint] {
        self.taint_lists.get(place.taints)
    }

    /// Returns what nodes of one make have in common: the fixed part of their layouts, and the columns.
    pub(super) fn make_of(&self, layout: &Layout) -> (u64, Vec<u64>) {
        let identities = IDENTITIES.map(|name| self.find_qualified(name));
        let columns = layout.named_columns().filter(|(name, _)| !identities.contains(&Some(*name)));
        (layout.id, columns.map(|(_, column)| column.id).collect())
    }

    /// Updates the fleet after a change of a node's pools.
    pub(crate) fn refresh_fleet(&mut self, node: Option<&Arc<str>>) {
        let Some(node) = node else { return };
        let pools: Vec<Sym> = self.pools_of_node.get(node).into_iter().flatten().copied().collect();
        for pool in &pools {
            self.fleet.remove(*pool);
        }
        self.fleet.odd.remove(node);
        if !pools.is_empty() && !matches!(pools.as_slice(), [pool] if self.add_row(node, *pool)) {
            self.fleet.odd.insert(node.clone());
        }
    }

    fn add_row(&mut self, node: &Arc<str>, name: Sym) -> bool {
        let Some(pool) = self.pools.get(&name).filter(|pool| pool.stopped.is_none()) else { return false };
        let (PoolState::Ready, Some(layout)) = (&pool.state, pool.layout.clone()) else { return false };
        let simple = layout.gpus.iter().all(|gpu| {
            let first = gpu.devices.first().copied().unwrap_or_default();
            gpu.alone
                && gpu.devices.len() <= MOST_PLACES
                && gpu.devices.iter().copied().eq((first..).take(gpu.devices.len()))
        });
        if !simple || !layout.owners.controller {
            return false;
        }
        let boards: Vec<u32> = layout.gpus.iter().map(|gpu| gpu.board).collect();
        let make = self.fleet.make_ids.intern(self.make_of(&layout));
        let mut room = 0;
        let mut keys = Vec::new();
        for (gpu, board) in boards.iter().enumerate() {
            let Some(pool) = self.pools.get(&name) else { return false };
            let key = self.key_of(pool, &layout, gpu, *board);
            let totals = &self.fleet.board(*board).totals;
            let parts = key.free.iter().zip(totals).filter(|(_, total)| **total > Quantity::ZERO);
            let (sum, count) = parts.fold((0, 0), |(sum, count), (free, total)| {
                (sum + crate::snapshot::worth::thousandths(*free, *total), count + 1)
            });
            room += sum / i64::max(count, 1);
            keys.push(key);
        }
        let states: Box<[usize]> = keys.into_iter().map(|key| self.fleet.intern(key)).collect();
        for (gpu, at) in states.iter().enumerate() {
            if let Some(state) = self.fleet.states.get_mut(*at) {
                state.members.insert((room, name, gpu));
            }
        }
        let entry = self.fleet.makes.entry(make);
        entry.or_insert_with(|| Make { layout, nodes: BTreeSet::new(), boards }).nodes.insert(node.clone());
        self.fleet.by_room.insert((room, name));
        self.fleet.pool_of_node.insert(node.clone(), name);
        self.fleet.rows.insert(name, Row { node: node.clone(), make, states, room });
        true
    }

    /// Returns the board of a GPU that has the devices at `positions` and draws on the counter sets in
    /// `used`.
    pub(super) fn board_of(
        &mut self,
        devices: &[Device],
        sets: &[CounterSet],
        positions: &[u32],
        used: &BTreeSet<u16>,
    ) -> u32 {
        let mut board = Board { places: Vec::new(), totals: Vec::new(), slices: Vec::new() };
        let mut begins = BTreeMap::new();
        for at in used {
            let Some(set) = sets.get(usize::from(*at)) else { continue };
            begins.insert(*at, board.totals.len());
            for (name, total) in set.counters.iter() {
                if self.names.get(*name).starts_with(MEMORY_SLICE) {
                    board.slices.push(board.totals.len());
                }
                board.totals.push(*total);
            }
        }
        if board.slices.len() > MOST_SLICES {
            board.slices.clear();
        }
        for device in positions.iter().filter_map(|at| devices.get(*at as usize)) {
            let mut draws = Vec::new();
            for (set, amounts) in self.draws(device) {
                let begin = begins.get(&set).copied().unwrap_or_default();
                draws.extend(amounts.iter().map(|(at, amount)| (begin + usize::from(*at), *amount)));
            }
            let (shape, taints, owner) = (device.shape, device.taints, device.owner);
            board.places.push(Place { shape, taints, owner, draws });
        }
        self.fleet.intern_board(board, |shape| self.shapes.get(shape).shareable)
    }

    /// Notes that a pod asked for a device such as this place of a board; see [`Outlook`].
    pub fn note_asked(&mut self, board: u32, place: usize) {
        self.fleet.ask(board, place);
    }

    /// Notes that a claim has a device.
    pub(super) fn note_given(&mut self, layout: &Layout, device: Sym) {
        let Some(position) = layout.position(device) else { return };
        let Some(number) = layout.devices.get(position as usize).map(|device| device.gpu) else { return };
        let Some(gpu) = layout.gpus.iter().find(|gpu| gpu.number == number) else { return };
        if let Ok(place) = gpu.devices.binary_search(&position) {
            self.fleet.ask(gpu.board, place);
        }
    }

    fn key_of(&self, pool: &Pool, layout: &Layout, gpu: usize, board: u32) -> Key {
        let mut key = Key { board, free: Vec::new(), shared: Vec::new(), fits: 0, untouched: true };
        let Some(gpu) = layout.gpus.get(gpu) else { return key };
        for set in gpu.sets.iter().filter_map(|at| layout.sets.get(usize::from(*at))) {
            key.free.extend(pool.usage.free.iter().skip(set.offset).take(set.counters.len()));
        }
        let closed = pool.usage.blocked.contains_key(&gpu.number);
        let places = &self.fleet.board(board).places;
        for (at, (position, place)) in gpu.devices.iter().zip(places).enumerate() {
            match pool.usage.devices.get(position) {
                None => key.fits |= u64::from(!closed && place.fits(&key.free)) << at,
                Some(used) => {
                    key.untouched = false;
                    if used.exclusive == 0 && !closed && !place.is_overdrawn(&key.free) {
                        key.shared.push((at, used.consumed.clone()));
                    }
                }
            }
        }
        key
    }
}

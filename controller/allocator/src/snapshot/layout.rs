//! Layouts: what a complete generation of a pool offers, with the attributes of its devices in columns.

use super::convert::{self, SliceRecord};
use super::slice_error::SliceError;
use super::{Device, Owner, Snapshot, Sym};
use crate::quantity::Quantity;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// A counter set of a layout.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CounterSet {
    /// Name of the set.
    pub name: Sym,
    /// Total of each counter, in ascending order by symbol.
    pub counters: Arc<[(Sym, Quantity)]>,
    /// Position of the set's first counter in [`super::Usage::free`].
    pub offset: usize,
}

/// The layout of a complete generation of a pool. Nodes of one make share everything but the columns of the
/// attributes in which they differ, so a result for one node holds for all of them.
#[derive(Debug)]
pub struct Layout {
    /// Generation of the pool.
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
    /// Unique number of this part; never reused.
    pub id: u64,
    /// Devices: slices in the order of their names, and within a slice as listed.
    pub devices: Box<[Device]>,
    /// Counter sets of the pool.
    pub sets: Box<[CounterSet]>,
    /// GPUs, in the order of their first device.
    pub gpus: Box<[Gpu]>,
    by_name: Box<[(Sym, u32)]>,
    /// The owners that the devices have.
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

/// A GPU: devices that share its fate.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// Number of the GPU in device names.
    pub number: u32,
    /// Positions of its devices.
    pub devices: Box<[u32]>,
    /// Positions of the counter sets that its devices draw on.
    pub sets: Box<[u16]>,
    /// True if no other GPU draws on these sets.
    pub alone: bool,
    /// Number of its board: what it has in common with GPUs of other nodes.
    pub board: u32,
}

/// The values of one attribute, one for each device.
#[derive(Debug)]
pub struct Column {
    /// Unique number of the column; never reused.
    pub id: u64,
    values: Box<[u32]>,
}

/// Stands in place of a value where a device does not have the attribute.
const NO_VALUE: u32 = u32::MAX;

impl Column {
    /// Returns the value of a device; `None` if the device does not have the attribute.
    pub fn value(&self, position: u32) -> Option<u32> {
        self.values.get(position as usize).copied().filter(|value| *value != NO_VALUE)
    }

    /// Returns the values of all devices that have the attribute.
    pub fn values(&self) -> impl Iterator<Item = u32> {
        self.values.iter().copied().filter(|value| *value != NO_VALUE)
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

/// The owners that the devices of a layout have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Owners {
    /// True if the controller may give out a device.
    pub controller: bool,
    /// True if a device is being handed over.
    pub hand_over: bool,
    /// True if kube-scheduler may give out a device.
    pub scheduler: bool,
}

impl Layout {
    /// Returns the position of a device; `None` if the layout does not have it.
    pub fn position(&self, name: Sym) -> Option<u32> {
        let at = self.by_name.binary_search_by_key(&name, |(name, _)| *name).ok()?;
        self.by_name.get(at).map(|(_, position)| *position)
    }

    /// Returns the number of a device's attribute value; `name` includes the domain.
    pub fn attribute(&self, position: u32, name: Sym) -> Option<u32> {
        self.column(name)?.value(position)
    }

    /// Returns the values of an attribute; `None` if no device has it.
    pub fn column(&self, name: Sym) -> Option<&Column> {
        let at = self.columns.binary_search_by_key(&name, |(name, _)| *name).ok()?;
        self.columns.get(at).map(|(_, column)| &**column)
    }

    /// Returns the columns of all attributes with their names.
    pub fn named_columns(&self) -> impl Iterator<Item = (Sym, &Column)> {
        self.columns.iter().map(|(name, column)| (*name, &**column))
    }

    /// Returns the columns of all attributes.
    pub fn columns(&self) -> impl Iterator<Item = &Column> {
        self.columns.iter().map(|(_, column)| &**column)
    }
}

impl Snapshot {
    /// Builds the layout of a complete generation.
    ///
    /// # Errors
    /// Fails with the reason why the slices do not make a layout.
    pub(super) fn build_layout(
        &mut self,
        generation: i64,
        slices: &[&SliceRecord],
    ) -> Result<Layout, SliceError> {
        let mut sets: Vec<CounterSet> = Vec::new();
        let mut offset = 0;
        for (name, counters) in slices.iter().flat_map(|slice| slice.sets.iter()) {
            if sets.iter().any(|set| set.name == *name) {
                return Err(SliceError::SameSet(self.name(*name).to_owned()));
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

    fn fixed_part(&mut self, devices: Vec<Device>, sets: Vec<CounterSet>) -> Result<Arc<Fixed>, SliceError> {
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
            return Err(SliceError::SameDevice(self.name(*name).to_owned()));
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

    /// Converts a device of a slice: resolves its counters to positions in the pool's sets.
    fn place(&mut self, raw: &convert::RawDevice, sets: &[CounterSet]) -> Result<Device, SliceError> {
        let mut draws = [None, None];
        if raw.consumes.len() > draws.len() {
            return Err(SliceError::ManySets(self.name(raw.name).to_owned()));
        }
        let mut gpu = super::usage::gpu_of_name(self.name(raw.name));
        for (slot, (set_name, amounts)) in draws.iter_mut().zip(raw.consumes.iter()) {
            let found = sets.iter().zip(0u16..).find(|(set, _)| set.name == *set_name);
            let Some((set, position)) = found else {
                return Err(SliceError::NoSet {
                    device: self.name(raw.name).to_owned(),
                    set: self.name(*set_name).to_owned(),
                });
            };
            let mut relative = Vec::with_capacity(amounts.len());
            for (counter, amount) in amounts.iter() {
                let at = set.counters.binary_search_by_key(counter, |(name, _)| *name).map_err(|_| {
                    SliceError::NoCounter {
                        device: self.names.get(raw.name).to_owned(),
                        counter: self.names.get(*counter).to_owned(),
                        set: self.names.get(*set_name).to_owned(),
                    }
                })?;
                relative.push((u16::try_from(at).unwrap_or(u16::MAX), *amount));
            }
            gpu = gpu.or_else(|| Some((1 << 31) | u32::from(position)));
            *slot = Some(super::Draw { set: position, amounts: self.draws.intern(relative.into()) });
        }
        Ok(Device {
            name: raw.name,
            // A device without counters whose name is not one of this driver's forms a GPU of its own.
            gpu: gpu.unwrap_or((1 << 30) | raw.position),
            shape: raw.shape,
            draws,
            taints: raw.taints,
            owner: raw.owner,
        })
    }
}

//! Counts what is held of a pool, and by which claims.

use super::{Device, Layout, Pool, Snapshot, Sym, Uid};
use crate::quantity::Quantity;
use aliquot_model::config::TimeSliceInterval;
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

/// The hold of one claim on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// UID of the claim.
    pub claim: Uid,
    /// The device.
    pub device: Sym,
    /// True for admin access: the device can be held by others at the same time.
    pub admin: bool,
    /// `shareID`
    pub share: Option<Uid>,
    /// `consumedCapacity`; the names have their domain.
    pub consumed: Box<[(Sym, Quantity)]>,
    /// The time slice that the claim asked for.
    pub time_slice: Option<TimeSliceInterval>,
}

/// The holds on a layout.
#[derive(Debug, Default, Clone)]
pub struct Usage {
    /// The free amount of each counter; the sets follow one another. Below zero if more was given out than
    /// there is.
    pub free: Vec<Quantity>,
    /// Devices that are held, by position.
    pub devices: HashMap<u32, DeviceUse>,
    /// GPUs on which a device is held that the layout does not have, or no longer has; nothing of them may be
    /// given out. The value is the number of such holds.
    pub blocked: BTreeMap<u32, u32>,
    /// A hash of the fields above: pools of one layout with the same fingerprint are held in the same way.
    pub fingerprint: u64,
}

/// The holds on one device.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash)]
pub struct DeviceUse {
    /// The number of claims that hold the device alone; more than one is a conflict.
    pub exclusive: u32,
    /// The number of claims that hold a share of the device.
    pub shares: u32,
    /// The amounts that the shares consume, in the order of the shape's capacities.
    pub consumed: Box<[Quantity]>,
}

/// A GPU of which something was given out twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The pool of the GPU.
    pub pool: Sym,
    /// The number of the GPU in the pool.
    pub gpu: u32,
    /// The claims that hold devices of the GPU, in no order.
    pub claims: Vec<Uid>,
}

impl Usage {
    /// Creates the usage of a layout of which nothing is held.
    pub fn empty(layout: &Layout) -> Self {
        let free = layout.sets.iter().flat_map(|set| set.counters.iter().map(|(_, total)| *total)).collect();
        Self { free, devices: HashMap::new(), blocked: BTreeMap::new(), fingerprint: 0 }
    }

    pub(crate) fn refresh_fingerprint(&mut self) {
        let mut hasher = DefaultHasher::new();
        self.free.hash(&mut hasher);
        self.blocked.hash(&mut hasher);
        let mut devices: Vec<_> = self.devices.iter().collect();
        devices.sort_unstable_by_key(|(position, _)| **position);
        devices.hash(&mut hasher);
        self.fingerprint = hasher.finish();
    }

    /// Counts a holder in (`sign` 1) or out (`sign` -1).
    pub(crate) fn count(&mut self, index: &Names<'_>, layout: &Layout, holder: &Holder, sign: i8) {
        if holder.admin {
            return;
        }
        let Some(position) = layout.position(holder.device) else {
            if let Some(gpu) = gpu_of_name(index.names.get(holder.device)) {
                let count = self.blocked.entry(gpu).or_default();
                *count = if sign > 0 { count.saturating_add(1) } else { count.saturating_sub(1) };
                if *count == 0 {
                    self.blocked.remove(&gpu);
                }
            }
            return;
        };
        let Some(device) = layout.devices.get(position as usize) else { return };
        let shape = index.shapes.get(device.shape);
        let entry = self.devices.entry(position).or_default();
        let shared_before = entry.shares > 0;
        let exclusive = !(shape.shareable && holder.share.is_some());
        let counter = if exclusive { &mut entry.exclusive } else { &mut entry.shares };
        *counter = if sign > 0 { counter.saturating_add(1) } else { counter.saturating_sub(1) };
        if !exclusive {
            if entry.consumed.is_empty() {
                entry.consumed = vec![Quantity::ZERO; shape.capacities.len()].into();
            }
            for (name, amount) in &holder.consumed {
                let at = shape.capacities.binary_search_by_key(name, |(name, _)| *name);
                if let Some(sum) = at.ok().and_then(|at| entry.consumed.get_mut(at)) {
                    *sum = if sign > 0 { *sum + *amount } else { *sum - *amount };
                }
            }
        }
        let shared_after = entry.shares > 0;
        if entry.exclusive == 0 && entry.shares == 0 {
            self.devices.remove(&position);
        }
        // A shared device draws on its counters once: from its first share until its last.
        if exclusive || shared_before != shared_after {
            self.draw(index, layout, device, sign);
        }
    }

    fn draw(&mut self, index: &Names<'_>, layout: &Layout, device: &Device, sign: i8) {
        for draw in device.draws.iter().flatten() {
            let Some(set) = layout.sets.get(usize::from(draw.set)) else { continue };
            for (counter, amount) in index.draws.get(draw.amounts).iter() {
                if let Some(free) = self.free.get_mut(set.offset + usize::from(*counter)) {
                    *free = if sign > 0 { *free - *amount } else { *free + *amount };
                }
            }
        }
    }
}

/// The tables that counting needs, borrowed separately from the pools.
pub(crate) struct Names<'a> {
    pub(crate) names: &'a super::Interner,
    pub(crate) shapes: &'a super::Table<super::Shape>,
    pub(crate) draws: &'a super::Table<Box<[(u16, Quantity)]>>,
}

/// Returns the GPU number in a device name of this driver or of NVIDIA's driver; `None` for other names.
pub(crate) fn gpu_of_name(name: &str) -> Option<u32> {
    aliquot_model::DeviceName::parse(name).map(|name| name.minor())
}

impl Snapshot {
    fn counting(&self) -> Names<'_> {
        Names { names: &self.names, shapes: &self.shapes, draws: &self.draws }
    }

    /// Counts a holder into a copy of a pool.
    pub fn count_in(&self, pool: &mut Pool, holder: &Holder) {
        if let Some(layout) = pool.layout.clone() {
            pool.usage.count(&self.counting(), &layout, holder, 1);
        }
    }

    /// Counts a holder out of a copy of a pool.
    pub(crate) fn count_out(&self, pool: &mut Pool, holder: &Holder) {
        if let Some(layout) = pool.layout.clone() {
            pool.usage.count(&self.counting(), &layout, holder, -1);
        }
    }

    /// Counts a holder into a pool.
    pub(crate) fn hold(&mut self, pool: Sym, holder: Holder) {
        let names = Names { names: &self.names, shapes: &self.shapes, draws: &self.draws };
        let entry = self.pools.entry(pool).or_insert_with(|| Pool::new(pool));
        let layout = entry.layout.clone();
        if let Some(layout) = &layout {
            entry.usage.count(&names, layout, &holder, 1);
        }
        let given = (!holder.admin).then_some(holder.device);
        entry.holders.push(holder);
        entry.touch();
        let node = entry.node.clone();
        if let (Some(layout), Some(device)) = (layout, given) {
            self.note_given(&layout, device);
        }
        self.refresh_fleet(node.as_ref());
    }

    /// Counts out everything that a claim holds in a pool.
    pub(crate) fn release(&mut self, pool: Sym, claim: &Uid) {
        let names = Names { names: &self.names, shapes: &self.shapes, draws: &self.draws };
        let Some(entry) = self.pools.get_mut(&pool) else { return };
        let (gone, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut entry.holders).into_iter().partition(|holder| holder.claim == *claim);
        entry.holders = kept;
        if let Some(layout) = entry.layout.clone() {
            for holder in &gone {
                entry.usage.count(&names, &layout, holder, -1);
            }
        }
        entry.touch();
        let node = entry.node.clone();
        if entry.is_forgotten() {
            self.pools.remove(&pool);
        }
        self.refresh_fleet(node.as_ref());
    }

    /// Returns the GPUs of a pool of which something is given out twice, with the claims that hold devices of
    /// each. Claims on a GPU whose layout changed under them are not reported here but in
    /// [`super::Usage::blocked`].
    pub fn conflicts(&self, pool: &Pool) -> Vec<Conflict> {
        let Some(layout) = &pool.layout else { return Vec::new() };
        let mut gpus: BTreeMap<u32, ()> = BTreeMap::new();
        for (position, used) in &pool.usage.devices {
            let Some(device) = layout.devices.get(*position as usize) else { continue };
            if self.is_given_twice(layout, &pool.usage, device, used) {
                gpus.insert(device.gpu, ());
            }
        }
        gpus.into_keys()
            .map(|gpu| Conflict { pool: pool.name, gpu, claims: holders_on(layout, pool, gpu) })
            .collect()
    }

    /// Returns the claims that do not fit beside the claims before them; `seniority` lists the claims of the
    /// pool, the most senior first.
    pub fn losers(&self, pool: &Pool, seniority: &[Uid]) -> Vec<Uid> {
        let Some(layout) = &pool.layout else { return Vec::new() };
        let names = Names { names: &self.names, shapes: &self.shapes, draws: &self.draws };
        let mut usage = Usage::empty(layout);
        let mut losers = Vec::new();
        for claim in seniority {
            let held: Vec<&Holder> = pool.holders.iter().filter(|holder| holder.claim == *claim).collect();
            for holder in &held {
                usage.count(&names, layout, holder, 1);
            }
            if self.is_overdrawn(layout, &usage) {
                for holder in &held {
                    usage.count(&names, layout, holder, -1);
                }
                losers.push(claim.clone());
            }
        }
        losers
    }

    /// Returns true if something is given out twice in a copy of a pool.
    pub fn is_given_twice_in(&self, pool: &Pool) -> bool {
        pool.layout.as_ref().is_some_and(|layout| self.is_overdrawn(layout, &pool.usage))
    }

    fn is_overdrawn(&self, layout: &Layout, usage: &Usage) -> bool {
        usage.devices.iter().any(|(position, used)| {
            layout
                .devices
                .get(*position as usize)
                .is_some_and(|d| self.is_given_twice(layout, usage, d, used))
        })
    }

    fn is_given_twice(&self, layout: &Layout, usage: &Usage, device: &Device, used: &DeviceUse) -> bool {
        let capacities = self.shape(device).capacities.iter();
        used.exclusive > 1
            || (used.exclusive > 0 && used.shares > 0)
            || capacities
                .zip(used.consumed.iter())
                .any(|((_, capacity), consumed)| *consumed > capacity.value)
            || self.overdraws(layout, usage, device)
    }

    fn overdraws(&self, layout: &Layout, usage: &Usage, device: &Device) -> bool {
        self.draws(device).any(|(set, amounts)| {
            layout.sets.get(usize::from(set)).is_some_and(|set| {
                amounts.iter().any(|(counter, _)| {
                    usage
                        .free
                        .get(set.offset + usize::from(*counter))
                        .is_some_and(|free| *free < Quantity::ZERO)
                })
            })
        })
    }
}

fn holders_on(layout: &Layout, pool: &Pool, gpu: u32) -> Vec<Uid> {
    let mut claims: Vec<Uid> = pool
        .holders
        .iter()
        .filter(|holder| !holder.admin)
        .filter(|holder| {
            let device = layout.position(holder.device).and_then(|at| layout.devices.get(at as usize));
            device.is_some_and(|device| device.gpu == gpu)
        })
        .map(|holder| holder.claim.clone())
        .collect();
    claims.sort();
    claims.dedup();
    claims
}

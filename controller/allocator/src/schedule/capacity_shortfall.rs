//! Tells how far a device is from the requested amount of a capacity such as memory, for the reader of the
//! pod's events.

use super::ask::Alternative;
use crate::quantity::Quantity;
use crate::snapshot::{Capacity, Device, Pool, Shape, Snapshot};
use std::fmt;
use std::sync::Arc;

/// A capacity of which a device has less than is asked for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lack {
    /// Name of the capacity, without its domain.
    pub capacity: Arc<str>,
    /// The amount that is asked for.
    pub asked: Quantity,
    /// The most that one device gives, whoever holds it.
    pub most: Quantity,
    /// The most that is free on one device now, if that is known.
    pub free: Option<Quantity>,
    /// The shape of that device.
    pub(super) shape: u32,
}

impl Lack {
    /// Returns what a device lacks of what is asked for, whoever holds it.
    pub(super) fn of_device(
        index: &Snapshot,
        pool: &Pool,
        (device, position): (&Device, u32),
        alternative: &Alternative<'_>,
    ) -> Option<Self> {
        Self::of(index, pool, (device, position), alternative, |lack| lack.most)
    }

    /// Returns the capacity of which a device has too little free.
    pub(super) fn of_free(
        index: &Snapshot,
        pool: &Pool,
        (device, position): (&Device, u32),
        alternative: &Alternative<'_>,
    ) -> Option<Self> {
        Self::of(index, pool, (device, position), alternative, |lack| lack.free.unwrap_or(lack.most))
    }

    fn of(
        index: &Snapshot,
        pool: &Pool,
        (device, position): (&Device, u32),
        alternative: &Alternative<'_>,
        has: impl Fn(&Self) -> Quantity,
    ) -> Option<Self> {
        let shape = index.shape(device);
        let lacks = alternative.capacities.iter().filter_map(|asked| {
            let name = asked.name?;
            let at = shape.capacities.binary_search_by_key(&name, |(known, _)| *known).ok()?;
            let (_, capacity) = shape.capacities.get(at)?;
            let name = index.name(name);
            let lack = Self {
                capacity: name.rsplit('/').next().unwrap_or(name).into(),
                asked: asked.amount,
                most: most(capacity),
                free: free(index, pool, (device, position), shape, (at, capacity)),
                shape: device.shape,
            };
            (has(&lack) < lack.asked).then_some(lack)
        });
        // The distance of a device is that of the capacity that it lacks most.
        lacks.max_by(|a, b| a.share().total_cmp(&b.share()))
    }

    /// Returns the nearer of the two. If the devices are alike, and both amounts of free capacity are known,
    /// the larger one is reported.
    pub(super) fn nearer(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (Some(one), Some(other)) => {
                let of_other = other.clone();
                let (near, far) = if one.share() <= other.share() { (one, of_other) } else { (other, one) };
                let alike = near.capacity == far.capacity && near.most == far.most;
                let free = near.free.zip(far.free).map(|(one, other)| one.max(other));
                Some(if alike { Self { free, ..near } } else { near })
            }
            (one, other) => one.or(other),
        }
    }

    /// Returns the missing part of what is asked for, as a fraction. Used only to compare what is reported.
    pub(super) fn share(&self) -> f64 {
        let has = self.free.filter(|_| self.most >= self.asked).unwrap_or(self.most);
        let (asked, has) = (self.asked.nanos() as f64, has.nanos() as f64);
        (asked - has) / asked.max(1.0)
    }

    /// Returns the most that is free on one device of this shape in a pool.
    pub(super) fn free_in(&self, index: &Snapshot, pool: &Pool) -> Option<Quantity> {
        let devices = pool.layout.iter().flat_map(|layout| layout.devices.iter().zip(0u32..));
        let alike = devices.filter(|(device, _)| device.shape == self.shape);
        let of = alike.filter_map(|(device, position)| {
            let shape = index.shape(device);
            let named = |name: &str| name.rsplit('/').next() == Some(&*self.capacity);
            let at = shape.capacities.iter().position(|(name, _)| named(index.name(*name)))?;
            free(index, pool, (device, position), shape, (at, &shape.capacities.get(at)?.1))
        });
        of.max()
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { capacity, asked, most, free, .. } = self;
        write!(f, "which asks for {asked} of {capacity}: ")?;
        match free {
            Some(Quantity::ZERO) if most < asked => {
                write!(f, "the largest has {most}, and none of that is free now; ask for {most} or less")
            }
            Some(free) if most < asked => {
                write!(
                    f,
                    "the largest has {most}, and at most {free} of that is free on one now; ask for {most} or less"
                )
            }
            Some(Quantity::ZERO) => write!(f, "none is free now, of {most} on one; wait until some is free"),
            None if most < asked => write!(f, "the largest has {most}; ask for that or less"),
            Some(free) => write!(
                f,
                "at most {free} is free on one now, of {most}; ask for that or less, or wait until more is free"
            ),
            None => write!(f, "one has {most}, but not all of it is free"),
        }
    }
}

/// Returns how much of a capacity is free on a device; `None` if the device cannot be shared.
fn free(
    index: &Snapshot,
    pool: &Pool,
    (device, position): (&Device, u32),
    shape: &Shape,
    (at, capacity): (usize, &Capacity),
) -> Option<Quantity> {
    if !shape.shareable {
        return None;
    }
    let used = pool.usage.devices.get(&position);
    if used.is_some_and(|used| used.exclusive > 0) || pool.usage.blocked.contains_key(&device.gpu) {
        return Some(Quantity::ZERO);
    }
    if used.is_none_or(|used| used.shares == 0) && !has_counters(index, pool, device) {
        return Some(Quantity::ZERO);
    }
    let before = used.and_then(|used| used.consumed.get(at)).copied().unwrap_or_default();
    Some((capacity.value - before).max(Quantity::ZERO).min(most(capacity)))
}

/// Returns true if the counters that a device draws on have as much left.
fn has_counters(index: &Snapshot, pool: &Pool, device: &Device) -> bool {
    let left = |set: u16, counter: u16| {
        let set = pool.layout.as_ref()?.sets.get(usize::from(set))?;
        pool.usage.free.get(set.offset + usize::from(counter)).copied()
    };
    index.draws(device).all(|(set, amounts)| {
        amounts.iter().all(|(counter, amount)| left(set, *counter).is_none_or(|left| left >= *amount))
    })
}

/// Returns the most of a capacity that one request may take.
fn most(capacity: &Capacity) -> Quantity {
    let policy = capacity.policy.as_ref();
    let range = policy.and_then(|policy| policy.range).and_then(|range| range.max);
    let limit = range.or_else(|| policy.and_then(|policy| policy.values.last().copied()));
    limit.map_or(capacity.value, |limit| limit.min(capacity.value))
}

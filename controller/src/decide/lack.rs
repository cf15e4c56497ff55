//! How far a device is from what a request asks of a capacity such as memory, for whoever reads the pod's events.

use super::ask::Alternative;
use crate::index::{Capacity, Index, Shape};
use crate::quantity::Quantity;
use std::sync::Arc;

/// A capacity of which a device does not have as much as is asked.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lack {
    /// Name of the capacity, without its domain.
    pub capacity: Arc<str>,
    /// What is asked.
    pub asked: Quantity,
    /// What there is.
    pub most: Quantity,
}

impl Lack {
    /// What a device of this shape lacks of what is asked, whoever holds it.
    pub(super) fn of_shape(index: &Index, shape: &Shape, alternative: &Alternative<'_>) -> Option<Self> {
        Self::of(index, shape, alternative, |_, capacity| most(capacity))
    }

    /// What a device lacks of what is asked, with so much that can be had of each capacity, by its place in the shape.
    pub(super) fn of(
        index: &Index,
        shape: &Shape,
        alternative: &Alternative<'_>,
        free: impl Fn(usize, &Capacity) -> Quantity,
    ) -> Option<Self> {
        let lacks = alternative.capacities.iter().filter_map(|(name, asked)| {
            let name = (*name)?;
            let at = shape.capacities.binary_search_by_key(&name, |(known, _)| *known).ok()?;
            let (_, capacity) = shape.capacities.get(at)?;
            let most = free(at, capacity);
            let name = index.name(name);
            let capacity = name.rsplit('/').next().unwrap_or(name).into();
            (most < *asked).then_some(Self { capacity, asked: *asked, most })
        });
        // A device is as far away as what it lacks most.
        lacks.max_by(|a, b| a.share().total_cmp(&b.share()))
    }

    /// The nearer one of two.
    pub(super) fn nearer(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (Some(one), Some(other)) if one.share() <= other.share() => Some(one),
            (Some(one), None) => Some(one),
            (_, other) => other,
        }
    }

    /// The part of what is asked that is missing. Only for comparisons of what is told.
    pub(super) fn share(&self) -> f64 {
        let (asked, most) = (self.asked.nanos() as f64, self.most.nanos() as f64);
        (asked - most) / asked.max(1.0)
    }
}

/// Most of a capacity that one request may take.
fn most(capacity: &Capacity) -> Quantity {
    let policy = capacity.policy.as_ref();
    let range = policy.and_then(|policy| policy.range).and_then(|range| range.max);
    let limit = range.or_else(|| policy.and_then(|policy| policy.values.last().copied()));
    limit.map_or(capacity.value, |limit| limit.min(capacity.value))
}

//! Constraints that demand one value of several requests, as far as states of GPUs tell.

use super::super::Inputs;
use super::super::ask::{ConstraintKind, Count, Request};
use super::places::{Looks, Opens, Part};
use super::{IDENTITIES, PARENT, bits};
use crate::index::{Fleet, GpuState, Index, Layout, Row, Sym};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A constraint that demands one value of several requests.
pub(super) struct Binding {
    /// Requests that it is about, whichever alternative they take.
    requests: u64,
    /// Their parts, if it is about two requests for one unshared device each and nothing else.
    pair: Option<(usize, usize)>,
    /// The attribute.
    attribute: Sym,
    /// Whether it tells nodes of one make apart.
    identity: bool,
    /// Whether it is the same on devices of one GPU alone.
    of_one_gpu: bool,
    /// Parts of these requests.
    parts: Vec<usize>,
    /// By make: the value of each GPU, if each has one.
    values: BTreeMap<u32, Option<Vec<u64>>>,
}

/// By state, and what two requests could have of it: whether they can have it together.
pub(super) type Bound = HashMap<(usize, u64, u64), bool>;

impl Binding {
    /// The part that has to be on the same GPU as this one.
    pub(super) fn beside(&self, part: usize) -> Option<usize> {
        let (one, other) = self.pair?;
        let distinct = |values: &Vec<u64>| values.iter().collect::<HashSet<_>>().len() == values.len();
        let apart = || self.values.values().all(|values| values.as_ref().is_some_and(distinct));
        match part {
            part if part == one && (self.of_one_gpu || apart()) => Some(other),
            part if part == other && (self.of_one_gpu || apart()) => Some(one),
            _ => None,
        }
    }

    /// Whether some value has enough devices on a node for each request that it is about, and where a value
    /// is that of one GPU, two requests for one device each find places beside each other.
    pub(super) fn can_agree(
        &self,
        index: &Index,
        looks: &Looks,
        row: &Row,
        opens: &mut Opens<'_>,
        bound: &mut Bound,
    ) -> bool {
        let own = || {
            let layout = index.pools_of_node(&row.node).next()?.layout.as_ref()?;
            values_of(layout, self.attribute, looks, row.make, &self.parts)
        };
        // What tells nodes of one make apart has to be read of the node itself.
        let read = self.identity.then(own).flatten();
        let of_make = self.values.get(&row.make).and_then(Option::as_ref);
        let Some(values) = read.as_ref().or(of_make) else { return true };
        let mut distinct: Vec<u64> = values.clone();
        distinct.sort_unstable();
        distinct.dedup();
        distinct.into_iter().any(|value| {
            let gpus = || values.iter().enumerate().filter(|(_, v)| **v == value).map(|(gpu, _)| gpu);
            if opens.met_on(row, gpus()) & self.requests != self.requests {
                return false;
            }
            let mut gpus = gpus();
            match (self.pair, gpus.next(), gpus.next()) {
                (Some(pair), Some(gpu), None) => beside(index.fleet(), looks, pair, row, gpu, opens, bound),
                _ => true,
            }
        })
    }
}

/// Whether two of these places of a GPU, one of each kind, can be taken together.
pub(super) fn fit_beside(fleet: &Fleet, state: &GpuState, one: u64, other: u64) -> bool {
    let board = fleet.board(state.board());
    bits(one).any(|a| bits(other).any(|b| a != b && state.fit_together(board, a, b)))
}

/// Whether a GPU has places for two parts beside each other.
fn beside(
    fleet: &Fleet,
    looks: &Looks,
    (one, other): (usize, usize),
    row: &Row,
    gpu: usize,
    opens: &mut Opens<'_>,
    bound: &mut Bound,
) -> bool {
    let (Some(at), Some(look)) = (row.states.get(gpu), looks.of_make(row.make).get(gpu)) else {
        return false;
    };
    let open = opens.get(*look, *at);
    let of = |part: usize| open.get(part).copied().unwrap_or_default();
    let (one, other) = (of(one), of(other));
    *bound
        .entry((*at, one, other))
        .or_insert_with(|| fleet.state(*at).is_some_and(|state| fit_beside(fleet, state, one, other)))
}

/// The constraints of a pod's claims that demand one value.
pub(super) fn bindings(
    inputs: &Inputs<'_>,
    fleet: &Fleet,
    parts: &[Part<'_>],
    looks: &Looks,
) -> Vec<Binding> {
    let index = inputs.index;
    let identities = IDENTITIES.map(|name| format!("{}/{name}", index.driver()));
    let mut first = 0;
    let mut found = Vec::new();
    for ask in inputs.asks {
        for constraint in ask.constraints.iter().filter(|constraint| constraint.kind == ConstraintKind::Match)
        {
            let Some(attribute) = constraint.attribute else { continue };
            let concerned = |(_, request): &(usize, &Request<'_>)| {
                let mut alternatives = request.alternatives.iter();
                alternatives.all(|a| constraint.concerns(&request.name, a.subrequest.as_deref()))
            };
            let numbers: Vec<usize> =
                ask.requests.iter().enumerate().filter(concerned).map(|(at, _)| first + at).collect();
            let own: Vec<usize> = (0..parts.len())
                .filter(|at| parts.get(*at).is_some_and(|p| numbers.contains(&p.request)))
                .collect();
            let alone = |at: &usize| {
                parts.get(*at).is_some_and(|part| {
                    let mut supplies = part.supplies.values().flatten().flatten();
                    part.alternative.count == Count::Exactly(1)
                        && !part.alternative.admin
                        && supplies.all(|supply| supply.amounts.is_none())
                })
            };
            let pair = match (own.as_slice(), numbers.len()) {
                ([one, other], 2) if alone(one) && alone(other) => Some((*one, *other)),
                _ => None,
            };
            let of_one_gpu = index.name(attribute) == format!("{}/{PARENT}", index.driver());
            let identity = identities.iter().any(|name| name == index.name(attribute));
            let mut values = BTreeMap::new();
            for (number, make) in fleet.makes().iter().filter(|_| !identity) {
                values.insert(*number, values_of(&make.layout, attribute, looks, *number, &own));
            }
            let requests = numbers.iter().fold(0, |all, number| all | 1u64 << number);
            found.push(Binding { requests, pair, attribute, identity, of_one_gpu, parts: own, values });
        }
        first += ask.requests.len();
    }
    found
}

/// The value of an attribute on each GPU, as far as these parts can use the GPU's places; `None` if
/// some GPU has several, or none on some place.
fn values_of(layout: &Layout, attribute: Sym, looks: &Looks, make: u32, parts: &[usize]) -> Option<Vec<u64>> {
    let column = layout.column(attribute)?;
    layout
        .gpus
        .iter()
        .zip(looks.of_make(make))
        .zip(1u64 << 40..)
        .map(|((gpu, look), own)| {
            let masks = looks.masks(*look);
            let mask = parts.iter().filter_map(|part| masks.get(*part)).fold(0, |all, mask| all | mask);
            let mut values =
                bits(mask).map(|place| gpu.devices.get(place).and_then(|position| column.value(*position)));
            // A GPU that nothing can be had of is by itself.
            let Some(first) = values.next() else { return Some(own) };
            let first = first?;
            values.all(|value| value == Some(first)).then_some(u64::from(first))
        })
        .collect()
}

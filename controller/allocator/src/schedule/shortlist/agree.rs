//! Requests that have to be met together, as far as the states of GPUs tell: beside each other on one GPU, or
//! with values that agree.

use super::super::ask::{ConstraintKind, Count, Request};
use super::super::inputs::Inputs;
use super::bounds::{Bounds, Packings};
use super::mask::bits;
use super::places::{Looks, Opens, Part};
use crate::snapshot::{Fleet, GpuState, IDENTITIES, Layout, PARENT, Row, Snapshot, Sym};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A constraint on several requests.
pub(super) struct Binding {
    kind: ConstraintKind,
    /// The requests that the constraint applies to, whichever alternative they take.
    requests: u64,
    /// Their parts, if the constraint applies to exactly two requests for one unshared device each.
    pair: Option<(usize, usize)>,
    /// The attribute.
    attribute: Sym,
    /// True if the attribute differs between nodes of one make.
    identity: bool,
    /// True if only devices of one GPU have the same value.
    of_one_gpu: bool,
    /// The parts of these requests.
    parts: Vec<usize>,
    /// For each make: the value of each GPU, if every GPU has exactly one.
    values: BTreeMap<u32, Option<Vec<u64>>>,
}

/// For each state and two masks: true if two places, one of each mask, can be taken together.
type Beside = HashMap<(usize, u64, u64), bool>;

/// Checks nodes, one after the other.
pub(super) struct Together<'s> {
    index: &'s Snapshot,
    looks: &'s Looks,
    bindings: &'s [Binding],
    /// Pairs of parts of which both are wanted.
    pairs: &'s [(usize, usize)],
    bounds: &'s Bounds,
    packings: Packings,
    beside: Beside,
}

impl<'s> Together<'s> {
    pub(super) fn new(
        index: &'s Snapshot,
        looks: &'s Looks,
        bindings: &'s [Binding],
        pairs: &'s [(usize, usize)],
        bounds: &'s Bounds,
    ) -> Self {
        let (packings, beside) = (Packings::new(), Beside::new());
        Self { index, looks, bindings, pairs, bounds, packings, beside }
    }

    /// Returns true if a node that has enough for each request alone could serve them together.
    pub(super) fn can_be(&mut self, row: &Row, opens: &mut Opens<'_>) -> bool {
        let (bindings, pairs) = (self.bindings, self.pairs);
        pairs.iter().all(|pair| self.pair_fits(*pair, row, opens, |_, _| true))
            && self.bounds.hold_on(self.index, row, opens, &mut self.packings)
            && bindings.iter().all(|binding| self.can_agree(binding, row, opens))
    }

    fn can_agree(&mut self, binding: &Binding, row: &Row, opens: &mut Opens<'_>) -> bool {
        let own = || {
            let layout = self.index.pools_of_node(&row.node).next()?.layout.as_ref()?;
            values_of(layout, binding.attribute, self.looks, row.make, &binding.parts)
        };
        // A value that differs between nodes of one make has to be read from the node itself.
        let read = binding.identity.then(own).flatten();
        let of_make = binding.values.get(&row.make).and_then(Option::as_ref);
        let Some(values) = read.as_ref().or(of_make) else { return true };
        match (binding.pair, binding.kind) {
            (Some(pair), kind) => self.pair_fits(pair, row, opens, |one, other| {
                (values.get(one) == values.get(other)) == (kind == ConstraintKind::Match)
            }),
            (None, ConstraintKind::Distinct) => true,
            (None, ConstraintKind::Match) => {
                let distinct: HashSet<u64> = values.iter().copied().collect();
                distinct.into_iter().any(|value| {
                    let gpus = values.iter().enumerate().filter(|(_, v)| **v == value).map(|(gpu, _)| gpu);
                    let gpus: Vec<usize> = gpus.collect();
                    let of = (row, gpus.as_slice());
                    opens.met_on(row, gpus.iter().copied()) & binding.requests == binding.requests
                        && self.bounds.agree_on(self.index, binding.requests, of, opens, &mut self.packings)
                })
            }
        }
    }

    /// Returns true if two parts find places on GPUs that `accepted` allows for them, or beside each other on
    /// one GPU.
    fn pair_fits(
        &mut self,
        (one, other): (usize, usize),
        row: &Row,
        opens: &mut Opens<'_>,
        accepted: impl Fn(usize, usize) -> bool,
    ) -> bool {
        let looks = self.looks.of_make(row.make);
        let open: Vec<(usize, u64, u64)> = row
            .states
            .iter()
            .zip(looks)
            .map(|(state, look)| {
                let open = opens.get(*look, *state);
                let of = |part: usize| open.get(part).copied().unwrap_or_default();
                (*state, of(one), of(other))
            })
            .collect();
        open.iter().enumerate().filter(|(_, (_, ones, _))| *ones != 0).any(|(x, (state, ones, beside))| {
            let elsewhere =
                |(y, (_, _, others)): (usize, &(usize, u64, u64))| x != y && *others != 0 && accepted(x, y);
            (*beside != 0 && accepted(x, x) && self.fit_beside(*state, *ones, *beside))
                || open.iter().enumerate().any(elsewhere)
        })
    }

    fn fit_beside(&mut self, state: usize, one: u64, other: u64) -> bool {
        let fleet = self.index.fleet();
        let find = || fleet.state(state).is_some_and(|state| fit_beside(fleet, state, one, other));
        *self.beside.entry((state, one, other)).or_insert_with(find)
    }
}

/// Returns true if two of these places of a GPU, one of each mask, can be taken together.
pub(super) fn fit_beside(fleet: &Fleet, state: &GpuState, one: u64, other: u64) -> bool {
    let board = fleet.board(state.board());
    bits(one).any(|a| bits(other).any(|b| a != b && state.fit_together(board, a, b)))
}

impl Binding {
    /// Returns the requests whose devices must have one value, if the constraint demands that.
    pub(super) fn agreeing(&self) -> Option<u64> {
        (self.kind == ConstraintKind::Match).then_some(self.requests)
    }

    /// Returns the part that must be on the same GPU as this one.
    pub(super) fn beside(&self, part: usize) -> Option<usize> {
        let (one, other) = self.pair.filter(|_| self.kind == ConstraintKind::Match)?;
        let distinct = |values: &Vec<u64>| values.iter().collect::<HashSet<_>>().len() == values.len();
        let apart = || self.values.values().all(|values| values.as_ref().is_some_and(distinct));
        match part {
            part if part == one && (self.of_one_gpu || apart()) => Some(other),
            part if part == other && (self.of_one_gpu || apart()) => Some(one),
            _ => None,
        }
    }
}

/// Returns true if a part is one device that is not shared.
fn is_alone(fleet: &Fleet, looks: &Looks, number: usize, part: &Part<'_>) -> bool {
    let unshared = |board: &u32, mask: u64| {
        let supplies = part.supplies.get(board).map(Vec::as_slice).unwrap_or_default();
        bits(mask).all(|at| matches!(supplies.get(at), Some(Some(supply)) if supply.amounts.is_none()))
    };
    part.alternative.count == Count::Exactly(1)
        && !part.alternative.admin
        && fleet.makes().iter().all(|(make, of)| {
            let masks = looks.of_make(*make).iter().map(|look| looks.masks(*look).get(number).copied());
            of.boards.iter().zip(masks).all(|(board, mask)| unshared(board, mask.unwrap_or_default()))
        })
}

/// Returns pairs of parts whose requests want one unshared device each and have no alternatives.
pub(super) fn pairs(fleet: &Fleet, parts: &[Part<'_>], looks: &Looks) -> Vec<(usize, usize)> {
    let only = |part: &Part<'_>| parts.iter().filter(|other| other.request == part.request).count() == 1;
    let alone: Vec<usize> = parts
        .iter()
        .enumerate()
        .filter(|(number, part)| only(part) && is_alone(fleet, looks, *number, part))
        .map(|(number, _)| number)
        .collect();
    alone.iter().zip(alone.iter().skip(1)).map(|(one, other)| (*one, *other)).collect()
}

/// Returns the constraints of a pod's claims.
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
        for constraint in &ask.constraints {
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
            let alone = |at: &usize| parts.get(*at).is_some_and(|part| is_alone(fleet, looks, *at, part));
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
            let kind = constraint.kind;
            found.push(Binding { kind, requests, pair, attribute, identity, of_one_gpu, parts: own, values });
        }
        first += ask.requests.len();
    }
    found
}

/// Returns the value of an attribute on each GPU, as far as these parts can use the GPU's places; `None` if a
/// GPU has several values, or a place without one.
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
            // A GPU on which no part can use a place gets a value of its own.
            let Some(first) = values.next() else { return Some(own) };
            let first = first?;
            values.all(|value| value == Some(first)).then_some(u64::from(first))
        })
        .collect()
}

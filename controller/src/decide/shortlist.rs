//! Which nodes to search: those on which each request can be met by what is free, best first, told
//! from the states of GPUs ([`crate::index::Fleet`]) without a look at the nodes themselves.
//!
//! What is left out cannot fit; what is listed may still not, and is searched before it is chosen.

use super::ask::{Alternative, Ask, ConstraintKind, Count};
use super::policy::{Cost, Placing, Strategy};
use super::{Inputs, Matcher, Stage, search};
use crate::index::{Board, Fleet, GpuState, Index, Layout, Make, Owner, Row, Sym, tolerated};
use crate::quantity::Quantity;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Attributes that tell devices of one make apart.
const IDENTITIES: [&str; 2] = ["uuid", "parentUUID"];

/// What a place gives to a request: all of itself, or so much of so much.
struct Supply {
    amounts: Option<Arc<[Quantity]>>,
    totals: Vec<Quantity>,
}

/// An alternative of a request.
struct Part<'a> {
    request: usize,
    alternative: &'a Alternative<'a>,
    /// By board: what each place gives.
    supplies: BTreeMap<u32, Vec<Option<Supply>>>,
}

/// By make: for each GPU, the places that each part can use.
type Masks = BTreeMap<u32, Vec<Vec<u64>>>;

/// Nodes on which a decision could end.
pub(super) struct Shortlist<'a> {
    index: &'a Index,
    fleet: &'a Fleet,
    parts: Vec<Part<'a>>,
    requests: usize,
    /// By make: for each GPU, the places that each part can use.
    masks: Masks,
    bindings: Vec<Binding>,
    strategy: Strategy,
    /// Nodes that are taken to be otherwise than their states say.
    stages: &'a HashMap<Arc<str>, Stage>,
}

impl<'a> Shortlist<'a> {
    /// `None` if a decision depends on more than states and makes.
    pub(super) fn new(inputs: &Inputs<'a>, matcher: &mut Matcher) -> Option<Self> {
        let index = inputs.index;
        let whole = inputs.pod.node.is_none()
            && inputs.pinned.node.is_none()
            && inputs.pinned.selectors.is_empty()
            && inputs.owner == Owner::Controller
            && index.taint_rules().next().is_none();
        if !whole {
            return None;
        }
        let fleet = index.fleet();
        let (mut parts, requests) = parts(inputs.asks);
        let identities = IDENTITIES.map(|name| format!("{}/{name}", index.driver()));
        for part in &mut parts {
            for expression in &part.alternative.selectors {
                if matcher.reads_any(index.driver(), expression, &identities) {
                    return None;
                }
            }
            for board in fleet.makes().values().flat_map(|make| &make.boards) {
                let supplies = || supplies(inputs, fleet.board(*board), part.alternative);
                part.supplies.entry(*board).or_insert_with(supplies);
            }
        }
        if parts.len() > MOST_PARTS {
            return None;
        }
        let mut masks = Masks::new();
        for (number, make) in fleet.makes() {
            masks.insert(*number, masks_of(inputs, matcher, make, &parts)?);
        }
        let bindings = bindings(inputs, fleet, &parts, &masks);
        Some(Self {
            index,
            bindings,
            fleet,
            parts,
            requests,
            masks,
            strategy: inputs.options.strategy,
            stages: &inputs.situation.stages,
        })
    }

    fn mask(&self, make: u32, gpu: usize, part: usize) -> u64 {
        let of = || self.masks.get(&make)?.get(gpu)?.get(part).copied();
        of().unwrap_or_default()
    }

    /// Whether one device is all that is asked for, so that states alone tell what is best.
    pub(super) fn is_exact(&self) -> bool {
        // Where nodes and GPUs are chosen in different ways the nodes' order comes first.
        self.strategy.node() == self.strategy.gpu()
            && self.requests == 1
            && self
                .parts
                .iter()
                .all(|part| part.alternative.count == Count::Exactly(1) && !part.alternative.admin)
    }

    /// The places of a mask that a part can have now.
    fn open(&self, state: &GpuState, part: &Part<'_>, mask: u64) -> u64 {
        if part.alternative.admin {
            return mask;
        }
        let mut open = mask & state.fits();
        let Some(supplies) = part.supplies.get(&state.board()) else { return 0 };
        for (place, used) in state.shared().filter(|(place, _)| mask >> place & 1 == 1) {
            let Some(Some(Supply { amounts: Some(amounts), totals })) = supplies.get(place) else { continue };
            let mut sums = totals.iter().zip(used).zip(amounts.iter());
            if sums.all(|((total, used), wanted)| *used + *wanted <= *total) {
                open |= 1 << place;
            }
        }
        open
    }

    /// Nodes for one device, those where taking it is best first. One node can be listed twice.
    pub(super) fn ranked(&self) -> Vec<Sym> {
        let mut groups = Vec::new();
        for number in 0..self.parts.len() {
            for (mask, board) in self.masks_of_part(number) {
                for state in self.fleet.states().filter(|state| state.board() == board) {
                    let Some(part) = self.parts.get(number) else { continue };
                    if let Some(rank) = self.rank(state, part, mask) {
                        groups.push(((number, rank), mask, state));
                    }
                }
            }
        }
        groups.sort_by_key(|(rank, _, _)| *rank);
        let mut nodes = Vec::new();
        for same in groups.chunk_by(|(a, _, _), (b, _, _)| a == b) {
            let mut of_rank: Vec<(i64, Sym)> = Vec::new();
            for ((number, _), mask, state) in same {
                let takes = |pool: Sym, gpu: usize| {
                    let make = self.fleet.row(pool).map(|row| row.make);
                    make.is_some_and(|make| self.mask(make, gpu, *number) == *mask)
                };
                // The rest of a group matters only where pods do not fit for other reasons.
                match self.strategy.node() {
                    Placing::BinPack => {
                        let fitting = state.members().filter(|(_, pool, gpu)| takes(*pool, *gpu));
                        of_rank.extend(fitting.take(FIRST).map(|(room, pool, _)| (*room, *pool)));
                    }
                    Placing::Spread => {
                        let fitting = state.members().rev().filter(|(_, pool, gpu)| takes(*pool, *gpu));
                        of_rank.extend(fitting.take(FIRST).map(|(room, pool, _)| (-*room, *pool)));
                    }
                }
            }
            of_rank.sort_unstable();
            of_rank.dedup();
            nodes.extend(of_rank.into_iter().map(|(_, pool)| pool));
            if nodes.len() >= ENOUGH {
                break;
            }
        }
        nodes
    }

    /// The masks that GPUs have for a part, with their boards.
    fn masks_of_part(&self, part: usize) -> BTreeSet<(u64, u32)> {
        let mut found = BTreeSet::new();
        for (number, make) in self.fleet.makes() {
            for (gpu, board) in make.boards.iter().enumerate() {
                found.insert((self.mask(*number, gpu, part), *board));
            }
        }
        found.retain(|(mask, _)| *mask != 0);
        found
    }

    /// By part and board: the smallest place that would do.
    pub(super) fn wanted(&self) -> Vec<(u32, usize)> {
        let mut wanted = Vec::new();
        for part in 0..self.parts.len() {
            let boards: BTreeMap<u32, u64> =
                self.masks_of_part(part).into_iter().map(|(mask, board)| (board, mask)).collect();
            for (board, mask) in boards {
                wanted.extend(bits(mask).min_by_key(|at| self.fleet.size(board, *at)).map(|at| (board, at)));
            }
        }
        wanted
    }

    /// How good the best place of a mask is; smaller is better.
    fn rank(&self, state: &GpuState, part: &Part<'_>, mask: u64) -> Option<(i64, Cost)> {
        let open = self.open(state, part, mask);
        let opened = i64::from(state.untouched());
        let cost = bits(open).map(|place| state.cost(place)).min()?;
        Some(match self.strategy.gpu() {
            Placing::BinPack => (opened, cost),
            Placing::Spread => (-opened, Cost::default()),
        })
    }

    /// All nodes on which each request has enough devices, fullest first, or emptiest.
    pub(super) fn possible(&self) -> impl Iterator<Item = &'a Arc<str>> {
        let rows = self.rows().filter(|row| !self.stages.contains_key(&row.node));
        let mut known = Known::new(self.fleet.most_states());
        let mut bound = HashMap::new();
        rows.filter(move |row| {
            self.suffices(row, &mut known) == self.all() && self.can_agree(row, &mut known, &mut bound)
        })
        .map(|row| &row.node)
    }

    /// Every request met.
    const fn all(&self) -> u64 {
        if self.requests >= 64 { u64::MAX } else { (1 << self.requests) - 1 }
    }

    /// Nodes to be looked at one by one, although they are not odd: their makes have what is asked for.
    pub(super) fn staged(&self) -> impl Iterator<Item = &'a Arc<str>> {
        let rows = self.stages.keys().flat_map(|node| self.row_of(node));
        rows.filter(|row| !self.is_barren(row.make)).map(|row| &row.node)
    }

    fn row_of(&self, node: &str) -> Option<&'a Row> {
        self.fleet.row_of_node(node)
    }

    /// Nodes of makes that have what is asked for.
    fn rows(&self) -> Box<dyn Iterator<Item = &'a Row> + '_> {
        let (fleet, strategy) = (self.fleet, self.strategy);
        if fleet.makes().keys().all(|make| self.is_barren(*make)) {
            return Box::new(std::iter::empty());
        }
        let rows: Box<dyn Iterator<Item = &'a Row>> = match strategy.node() {
            Placing::BinPack => Box::new(fleet.by_room()),
            Placing::Spread => Box::new(fleet.by_room().rev()),
        };
        Box::new(rows.filter(|row| !self.is_barren(row.make)))
    }

    /// Whether no node of a make could serve the pod, even an empty one.
    fn is_barren(&self, make: u32) -> bool {
        let gpus = self.masks.get(&make).map(Vec::as_slice).unwrap_or_default();
        let mut found = vec![0u32; self.parts.len()];
        for (sum, mask) in gpus.iter().flat_map(|masks| found_of(masks)) {
            if let Some(found) = found.get_mut(sum) {
                *found += mask;
            }
        }
        self.met(&found) != self.all()
    }

    /// Nodes on which devices are short, those together of which one reason is true.
    pub(super) fn short(&self) -> Vec<Vec<&'a Arc<str>>> {
        let mut groups: BTreeMap<Shortage<'_>, Vec<&'a Arc<str>>> = BTreeMap::new();
        let mut barren = BTreeSet::new();
        let mut looks = BTreeMap::new();
        for (number, make) in self.fleet.makes() {
            let look =
                (make.boards.as_slice(), self.masks.get(number).map(Vec::as_slice).unwrap_or_default());
            looks.insert(*number, look);
            if self.is_barren(*number) {
                barren.insert(*number);
                groups
                    .entry((look, None))
                    .or_default()
                    .extend(make.pools.iter().filter_map(|p| self.node(*p)));
            }
        }
        let mut known = Known::new(self.fleet.most_states());
        let mut bound = HashMap::new();
        if barren.len() < looks.len() {
            for row in self.fleet.rows().filter(|row| !barren.contains(&row.make)) {
                let met = self.suffices(row, &mut known);
                if (met != self.all() || !self.can_agree(row, &mut known, &mut bound))
                    && !self.stages.contains_key(&row.node)
                    && let Some(look) = looks.get(&row.make)
                {
                    groups.entry((*look, Some(met))).or_default().push(&row.node);
                }
            }
        }
        let mut groups: Vec<_> = groups.into_values().collect();
        for nodes in &mut groups {
            // The one that is named is always the same.
            let first = nodes.iter().enumerate().min_by_key(|(_, node)| **node).map(|(at, _)| at);
            nodes.swap(0, first.unwrap_or_default());
        }
        groups
    }

    fn suffices(&self, row: &Row, known: &mut Known) -> u64 {
        let mut found = [0u32; MOST_PARTS];
        for (gpu, at) in row.states.iter().enumerate() {
            let opens = self.opens(row, gpu, *at, known);
            for (sum, open) in found.iter_mut().zip(opens) {
                *sum += open.count_ones();
            }
        }
        self.met(found.get(..self.parts.len()).unwrap_or_default())
    }

    /// By part, the places of a GPU that it could have now.
    fn opens<'k>(&self, row: &Row, gpu: usize, state: usize, known: &'k mut Known) -> &'k [u64] {
        let masks =
            self.masks.get(&row.make).and_then(|gpus| gpus.get(gpu)).map(Vec::as_slice).unwrap_or_default();
        known.get(masks, state, || {
            let Some(state) = self.fleet.state(state) else { return vec![0; masks.len()] };
            self.parts.iter().zip(masks).map(|(part, mask)| self.open(state, part, *mask)).collect()
        })
    }

    /// Which requests have enough devices, when each part has so many.
    fn met(&self, found: &[u32]) -> u64 {
        let mut met = 0;
        for (part, found) in self.parts.iter().zip(found) {
            let enough = match part.alternative.count {
                Count::Exactly(count) => usize::try_from(*found).unwrap_or(usize::MAX) >= count,
                Count::All => *found > 0,
            };
            met |= u64::from(enough) << part.request;
        }
        met
    }

    /// Whether every constraint that demands one value could be met: some value has enough devices for
    /// each request that it is about, and where a value is that of one GPU, two requests for one device
    /// each find places beside each other.
    fn can_agree(&self, row: &Row, known: &mut Known, bound: &mut Bound) -> bool {
        (0..self.bindings.len()).all(|number| self.can_agree_on(number, row, known, bound))
    }

    fn can_agree_on(&self, number: usize, row: &Row, known: &mut Known, bound: &mut Bound) -> bool {
        let Some(binding) = self.bindings.get(number) else { return true };
        let own = || {
            let layout = self.index.pools_of_node(&row.node).next()?.layout.as_ref()?;
            let masks = self.masks.get(&row.make)?;
            values_of(layout, binding.attribute, masks, &binding.parts)
        };
        // What tells nodes of one make apart has to be read of the node itself.
        let read = binding.identity.then(own).flatten();
        let of_make = binding.values.get(&row.make).and_then(Option::as_ref);
        let Some(values) = read.as_ref().or(of_make) else { return true };
        let mut distinct: Vec<u64> = values.clone();
        distinct.sort_unstable();
        distinct.dedup();
        distinct.into_iter().any(|value| {
            let gpus: Vec<usize> =
                values.iter().enumerate().filter(|(_, v)| **v == value).map(|(gpu, _)| gpu).collect();
            let mut found = [0u32; MOST_PARTS];
            for gpu in &gpus {
                let Some(at) = row.states.get(*gpu) else { continue };
                for (sum, open) in found.iter_mut().zip(self.opens(row, *gpu, *at, known)) {
                    *sum += open.count_ones();
                }
            }
            let met = self.met(found.get(..self.parts.len()).unwrap_or_default());
            if met & binding.requests != binding.requests {
                return false;
            }
            let (Some((one, other)), [gpu]) = (binding.pair, gpus.as_slice()) else { return true };
            let Some(at) = row.states.get(*gpu) else { return false };
            let opens = self.opens(row, *gpu, *at, known);
            let open = |part: usize| opens.get(part).copied().unwrap_or_default();
            let (one, other) = (open(one), open(other));
            *bound.entry((*at, one, other)).or_insert_with(|| {
                let Some(state) = self.fleet.state(*at) else { return false };
                let board = self.fleet.board(state.board());
                bits(one).any(|a| bits(other).any(|b| a != b && state.fit_together(board, a, b)))
            })
        })
    }

    /// The node of a pool.
    pub(super) fn node(&self, pool: Sym) -> Option<&'a Arc<str>> {
        self.fleet.row(pool).map(|row| &row.node)
    }
}

/// Nodes that are taken of a group of equal ones at first.
const FIRST: usize = 8;
/// Nodes after which no worse ones are listed.
const ENOUGH: usize = 16;
/// Parts of a pod beyond which every node is looked at.
const MOST_PARTS: usize = 16;

/// What is alike of a make as far as the pod can tell, and which requests have enough devices; `None`
/// where even an empty node has not enough.
type Shortage<'m> = ((&'m [u32], &'m [Vec<u64>]), Option<u64>);
/// By state, and what two requests could have of it: whether they can have it together.
type Bound = HashMap<(usize, u64, u64), bool>;

/// What each part could have of GPUs, by their masks and state.
struct Known {
    states: usize,
    numbers: HashMap<Vec<u64>, usize>,
    opens: Vec<Option<Vec<u64>>>,
}

impl Known {
    fn new(states: usize) -> Self {
        Self { states, numbers: HashMap::new(), opens: Vec::new() }
    }

    fn get(&mut self, masks: &[u64], state: usize, find: impl FnOnce() -> Vec<u64>) -> &[u64] {
        let number = match self.numbers.get(masks) {
            Some(number) => *number,
            None => {
                let number = self.numbers.len();
                self.numbers.insert(masks.to_vec(), number);
                self.opens.resize(self.numbers.len() * self.states, None);
                number
            }
        };
        match self.opens.get_mut(number * self.states + state) {
            Some(slot) => slot.get_or_insert_with(find),
            None => &[],
        }
    }
}

/// A constraint that demands one value of several requests.
struct Binding {
    /// Requests that it is about, whichever alternative they take.
    requests: u64,
    /// Their parts, if it is about two requests for one unshared device each and nothing else.
    pair: Option<(usize, usize)>,
    /// The attribute.
    attribute: Sym,
    /// Whether it tells nodes of one make apart.
    identity: bool,
    /// Parts of these requests.
    parts: Vec<usize>,
    /// By make: the value of each GPU, if each has one.
    values: BTreeMap<u32, Option<Vec<u64>>>,
}

/// The places of a mask.
fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let place = mask.trailing_zeros();
        mask &= mask.checked_sub(1)?;
        usize::try_from(place).ok()
    })
}

/// The constraints of a pod's claims that demand one value.
fn bindings(inputs: &Inputs<'_>, fleet: &Fleet, parts: &[Part<'_>], masks: &Masks) -> Vec<Binding> {
    let index = inputs.index;
    let identities = IDENTITIES.map(|name| format!("{}/{name}", index.driver()));
    let mut first = 0;
    let mut found = Vec::new();
    for ask in inputs.asks {
        for constraint in ask.constraints.iter().filter(|constraint| constraint.kind == ConstraintKind::Match)
        {
            let Some(attribute) = constraint.attribute else { continue };
            let concerned = |(_, request): &(usize, &super::ask::Request<'_>)| {
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
            let identity = identities.iter().any(|name| name == index.name(attribute));
            let mut values = BTreeMap::new();
            for (number, make) in fleet.makes().iter().filter(|_| !identity) {
                let of = masks.get(number).map(Vec::as_slice).unwrap_or_default();
                values.insert(*number, values_of(&make.layout, attribute, of, &own));
            }
            let requests = numbers.iter().fold(0, |all, number| all | 1u64 << number);
            found.push(Binding { requests, pair, attribute, identity, parts: own, values });
        }
        first += ask.requests.len();
    }
    found
}

/// The value of an attribute on each GPU, as far as these parts can use the GPU's places; `None` if
/// some GPU has several, or none on some place.
fn values_of(layout: &Layout, attribute: Sym, masks: &[Vec<u64>], parts: &[usize]) -> Option<Vec<u64>> {
    let column = layout.column(attribute)?;
    layout
        .gpus
        .iter()
        .zip(masks)
        .zip(1u64 << 40..)
        .map(|((gpu, masks), own)| {
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

/// How many places of a GPU each part could use.
fn found_of(masks: &[u64]) -> impl Iterator<Item = (usize, u32)> {
    masks.iter().map(|mask| mask.count_ones()).enumerate()
}

fn parts<'a>(asks: &'a [Ask<'a>]) -> (Vec<Part<'a>>, usize) {
    let mut parts = Vec::new();
    let requests = asks.iter().flat_map(|ask| &ask.requests);
    let mut count = 0;
    for (request, of) in requests.enumerate() {
        count += 1;
        parts.extend(of.alternatives.iter().map(|alternative| Part {
            request,
            alternative,
            supplies: BTreeMap::new(),
        }));
    }
    (parts, count)
}

fn supplies(inputs: &Inputs<'_>, board: &Board, alternative: &Alternative<'_>) -> Vec<Option<Supply>> {
    let tolerations = alternative.tolerations.as_deref().unwrap_or_default();
    let of = |place: &crate::index::Place| {
        let taints = inputs.index.taints_of(place);
        if place.owner != inputs.owner || taints.iter().any(|t| t.repels() && !tolerated(t, tolerations)) {
            return None;
        }
        let shape = inputs.index.shape_of(place);
        let amounts = search::consumption(shape, alternative)?;
        Some(Supply {
            amounts,
            totals: shape.capacities.iter().map(|(_, capacity)| capacity.value).collect(),
        })
    };
    board.places.iter().map(of).collect()
}

/// By GPU and part: the places that are selected and give something. `None` where a selector fails.
fn masks_of(
    inputs: &Inputs<'_>,
    matcher: &mut Matcher,
    make: &Make,
    parts: &[Part<'_>],
) -> Option<Vec<Vec<u64>>> {
    let mut masks = vec![Vec::new(); make.layout.gpus.len()];
    for part in parts {
        let selectors = part.alternative.selectors.iter();
        let answers: Vec<_> = selectors.map(|e| matcher.answers(inputs.index, &make.layout, e)).collect();
        for ((gpu, board), masks) in make.layout.gpus.iter().zip(&make.boards).zip(&mut masks) {
            let first = gpu.devices.first().copied().unwrap_or_default();
            let mut mask = u64::MAX;
            for answer in &answers {
                let (accepted, failed) = answer.of(first, gpu.devices.len());
                if mask & failed != 0 {
                    return None;
                }
                mask &= accepted;
            }
            let supplies = part.supplies.get(board)?;
            let gives = |mask: u64, (place, supply): (usize, &Option<Supply>)| {
                mask | u64::from(supply.is_some()) << place
            };
            masks.push(mask & supplies.iter().enumerate().fold(0, gives));
        }
    }
    Some(masks)
}

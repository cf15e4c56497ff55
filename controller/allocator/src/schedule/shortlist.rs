//! Decides which nodes to search: the nodes on which each request can be met by what is free, best first.
//! This is told from the states of GPUs ([`crate::snapshot::Fleet`]), without looking at the nodes
//! themselves.
//!
//! A node that is left out cannot fit. A node that is listed may still not fit, and is searched before it is
//! chosen.

mod agree;
mod bounds;
mod mask;
mod merge;
mod places;

use super::ask::Count;
use super::inputs::Inputs;
use super::score::{Placing, Strategy};
use super::{Matcher, Overlay};
use crate::snapshot::worth::Cost;
use crate::snapshot::{Fleet, GpuState, IDENTITIES, Make, Owner, Row, Snapshot, Sym};
use agree::{Binding, Together};
use bounds::Bounds;
use mask::bits;
use merge::Merge;
use places::{Looks, MOST_PARTS, Opens, Part};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// The nodes on which a decision could end.
pub(super) struct Shortlist<'a> {
    index: &'a Snapshot,
    fleet: &'a Fleet,
    parts: Vec<Part<'a>>,
    requests: usize,
    looks: Looks,
    /// Makes of which not even an empty node could serve the pod.
    barren: BTreeSet<u32>,
    bindings: Vec<Binding>,
    pairs: Vec<(usize, usize)>,
    bounds: Bounds,
    strategy: Strategy,
    /// Nodes whose state differs from what the fleet shows.
    stages: &'a HashMap<Arc<str>, Overlay>,
}

/// The quality of a GPU's best place for a part. Smaller is better.
type Rank = (usize, i64, Cost);

/// GPUs in one state, with the places on them that a part can use.
struct Group<'s> {
    rank: Rank,
    part: usize,
    mask: u64,
    /// The places that the part can have now.
    open: u64,
    state: &'s GpuState,
}

impl<'a> Shortlist<'a> {
    /// Creates the shortlist; `None` if the decision depends on more than states and makes.
    pub(super) fn new(
        inputs: &Inputs<'a>,
        matcher: &mut Matcher,
        expired: &mut dyn FnMut() -> bool,
    ) -> Option<Self> {
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
        let (mut parts, requests) = places::parts(inputs.asks);
        if parts.len() > MOST_PARTS {
            return None;
        }
        let identities = IDENTITIES.map(|name| format!("{}/{name}", index.driver()));
        for part in &mut parts {
            for expression in &part.alternative.selectors {
                if matcher.reads_any(index.driver(), expression, &identities) {
                    return None;
                }
            }
            for board in fleet.makes().values().flat_map(|make| &make.boards) {
                let supplies = || places::supplies(inputs, fleet.board(*board), part.alternative);
                part.supplies.entry(*board).or_insert_with(supplies);
            }
        }
        let looks = Looks::new(inputs, matcher, fleet, &parts, expired)?;
        let bindings = agree::bindings(inputs, fleet, &parts, &looks);
        let pairs = agree::pairs(fleet, &parts, &looks);
        let bounds = Bounds::new(fleet, &parts, &looks, bindings.iter().filter_map(Binding::agreeing));
        let (strategy, stages) = (inputs.options.strategy, &inputs.situation.stages);
        let mut list = Self {
            index,
            fleet,
            parts,
            requests,
            looks,
            barren: BTreeSet::new(),
            bindings,
            pairs,
            bounds,
            strategy,
            stages,
        };
        list.barren = fleet.makes().keys().copied().filter(|make| list.lacks_places(*make)).collect();
        Some(list)
    }

    /// Returns true if not even an empty node of a make could serve the pod.
    fn lacks_places(&self, make: u32) -> bool {
        let mut found = vec![0u32; self.parts.len()];
        for look in self.looks.of_make(make) {
            for (found, mask) in found.iter_mut().zip(self.looks.masks(*look)) {
                *found += mask.count_ones();
            }
        }
        places::met(&self.parts, &found) != self.all()
    }

    /// Returns true if only one device is asked for, so that the first node is the best.
    pub(super) fn is_exact(&self) -> bool {
        // If nodes and GPUs are chosen by different placings, the order of nodes comes first.
        self.strategy.node() == self.strategy.gpu()
            && self.requests == 1
            && self
                .parts
                .iter()
                .all(|part| part.alternative.count == Count::Exactly(1) && !part.alternative.admin)
    }

    /// Returns all nodes on which each request has enough devices, each node once, the most promising first.
    pub(super) fn possible(&self) -> impl Iterator<Item = &'a Arc<str>> {
        let mut opens = Opens::new(self.fleet, &self.parts, &self.looks);
        let mut together = self.together();
        let rows = self.rows().filter(|row| !self.stages.contains_key(&row.node));
        let all = self.all();
        rows.filter(move |row| {
            opens.met_on(row, 0..row.states.len()) == all && together.can_be(row, &mut opens)
        })
        .map(|row| &row.node)
    }

    fn together(&self) -> Together<'_> {
        Together::new(self.index, &self.looks, &self.bindings, &self.pairs, &self.bounds)
    }

    /// Returns the nodes that may be possible, in the order of the strategy.
    fn rows(&self) -> Box<dyn Iterator<Item = &'a Row> + '_> {
        let fleet = self.fleet;
        if self.barren.len() == fleet.makes().len() {
            return Box::new(std::iter::empty());
        }
        let rows: Box<dyn Iterator<Item = &'a Row>> = match (self.strategy.node(), self.strategy.gpu()) {
            (Placing::BinPack, Placing::Spread) => Box::new(fleet.by_room()),
            (Placing::Spread, Placing::BinPack) => Box::new(fleet.by_room().rev()),
            _ => Box::new(self.by_rarest().filter_map(|pool| fleet.row(pool))),
        };
        Box::new(rows.filter(|row| !self.barren.contains(&row.make)))
    }

    /// Returns the nodes that have devices for the request with the fewest GPUs, first those where taking
    /// them is best. No other node can serve the pod.
    fn by_rarest(&self) -> impl Iterator<Item = Sym> + use<'a, '_> {
        let of_requests = (0..self.requests).map(|request| (self.least_of(request), self.groups(request)));
        let gpus = |(_, groups): &(u32, Vec<Group<'_>>)| {
            groups.iter().map(|group| group.state.count()).sum::<usize>()
        };
        let (wanted, mut groups) = of_requests.min_by_key(gpus).unwrap_or_default();
        groups.sort_by_key(|group| group.rank);
        let mut groups = groups.into_iter().peekable();
        let of_rank = std::iter::from_fn(move || {
            let rank = groups.peek()?.rank;
            let mut same = Vec::new();
            while let Some(group) = groups.next_if(|group| group.rank == rank) {
                let gives = group.open.count_ones();
                same.push((self.members(group), gives));
            }
            Some(Merge::new(same))
        });
        // Nodes that have everything in the best state come before those that need other GPUs too.
        let (mut seen, mut later) = (HashSet::new(), Vec::new());
        let mut nodes = of_rank.flatten();
        let mut rest = None;
        std::iter::from_fn(move || {
            for (pool, gives) in nodes.by_ref() {
                if gives < wanted {
                    later.push(pool);
                } else if seen.insert(pool) {
                    return Some(pool);
                }
            }
            let rest = rest.get_or_insert_with(|| std::mem::take(&mut later).into_iter());
            rest.find(|pool| seen.insert(*pool))
        })
    }

    /// Returns the least number of devices that a request takes.
    fn least_of(&self, request: usize) -> u32 {
        let of = self.parts.iter().filter(|part| part.request == request);
        let counts = of.map(|part| match part.alternative.count {
            Count::Exactly(count) => u32::try_from(count).unwrap_or(u32::MAX),
            Count::All => 1,
        });
        counts.min().unwrap_or(1)
    }

    /// Returns the states in which a GPU has places for a request.
    fn groups(&self, request: usize) -> Vec<Group<'a>> {
        let mut groups = Vec::new();
        for (number, part) in self.parts.iter().enumerate().filter(|(_, part)| part.request == request) {
            let beside: Vec<usize> = self.bindings.iter().filter_map(|b| b.beside(number)).collect();
            for (mask, board) in self.masks_of_part(number) {
                let others: Vec<BTreeSet<u64>> =
                    beside.iter().map(|other| self.masks_beside((number, mask), *other, board)).collect();
                for state in self.fleet.states().filter(|state| state.board() == board) {
                    let open = part.open(state, mask);
                    let Some((opened, cost)) = self.rank(state, open) else { continue };
                    let with = |(other, masks): (&usize, &BTreeSet<u64>)| {
                        let part = self.parts.get(*other);
                        let opens = masks.iter().filter_map(|mask| Some(part?.open(state, *mask)));
                        opens.into_iter().any(|other| agree::fit_beside(self.fleet, state, open, other))
                    };
                    if beside.iter().zip(&others).all(with) {
                        groups.push(Group { rank: (number, opened, cost), part: number, mask, open, state });
                    }
                }
            }
        }
        groups
    }

    /// Returns the masks of another part on GPUs on which a part has this mask.
    fn masks_beside(&self, (part, mask): (usize, u64), other: usize, board: u32) -> BTreeSet<u64> {
        let mut found = BTreeSet::new();
        for (number, make) in self.fleet.makes() {
            for (look, on) in self.looks.of_make(*number).iter().zip(&make.boards) {
                let masks = self.looks.masks(*look);
                if *on == board && masks.get(part) == Some(&mask) {
                    found.extend(masks.get(other));
                }
            }
        }
        found
    }

    /// Returns the nodes with a GPU of a group, in the order of the strategy, each with its sort key.
    fn members<'s>(&'s self, group: Group<'s>) -> Box<dyn Iterator<Item = (i64, Sym)> + 's> {
        let Group { part, mask, state, .. } = group;
        let takes = move |&(_, pool, gpu): &(i64, Sym, usize)| {
            let make = self.fleet.row(pool).map(|row| row.make);
            make.is_some_and(|make| self.looks.mask(make, gpu, part) == mask)
        };
        let members = state.members().copied();
        match self.strategy.node() {
            Placing::BinPack => Box::new(members.filter(takes).map(|(room, pool, _)| (room, pool))),
            Placing::Spread => Box::new(members.rev().filter(takes).map(|(room, pool, _)| (-room, pool))),
        }
    }

    /// Returns the masks that GPUs have for a part, with the boards of the GPUs.
    fn masks_of_part(&self, part: usize) -> BTreeSet<(u64, u32)> {
        let mut found = BTreeSet::new();
        for (number, make) in self.fleet.makes() {
            for (look, board) in self.looks.of_make(*number).iter().zip(&make.boards) {
                found.extend(self.looks.masks(*look).get(part).map(|mask| (*mask, *board)));
            }
        }
        found.retain(|(mask, _)| *mask != 0);
        found
    }

    /// Returns for each part and board the smallest place that would suffice.
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

    fn rank(&self, state: &GpuState, open: u64) -> Option<(i64, Cost)> {
        let opened = i64::from(state.untouched());
        let cost = bits(open).map(|place| state.cost(place)).min()?;
        Some(match self.strategy.gpu() {
            Placing::BinPack => (opened, cost),
            Placing::Spread => (-opened, Cost::default()),
        })
    }

    /// Returns the set of all requests.
    const fn all(&self) -> u64 {
        if self.requests >= 64 { u64::MAX } else { (1 << self.requests) - 1 }
    }

    /// Returns the nodes that have to be looked at individually because their state differs; their makes have
    /// what is asked for.
    pub(super) fn staged(&self) -> impl Iterator<Item = &'a Arc<str>> {
        let rows = self.stages.keys().flat_map(|node| self.fleet.row_of_node(node));
        rows.filter(|row| !self.barren.contains(&row.make)).map(|row| &row.node)
    }

    /// Returns the nodes with too few devices, grouped so that one reason holds for each group.
    pub(super) fn short(&self) -> Vec<Short<'a>> {
        let mut groups: BTreeMap<Shortage<'_>, Short<'a>> = BTreeMap::new();
        for (number, make) in self.fleet.makes().iter().filter(|(number, _)| self.barren.contains(number)) {
            let look = (make.boards.as_slice(), self.looks.of_make(*number));
            groups.entry((look, None)).or_default().makes.push(make);
        }
        if self.barren.len() < self.fleet.makes().len() {
            let mut opens = Opens::new(self.fleet, &self.parts, &self.looks);
            let mut together = self.together();
            for row in self.fleet.rows().filter(|row| !self.barren.contains(&row.make)) {
                let Some(make) = self.fleet.makes().get(&row.make) else { continue };
                let met = opens.met_on(row, 0..row.states.len());
                let could_serve = met == self.all() && together.can_be(row, &mut opens);
                if !could_serve && !self.stages.contains_key(&row.node) {
                    let look = (make.boards.as_slice(), self.looks.of_make(row.make));
                    groups.entry((look, Some(met))).or_default().nodes.push(&row.node);
                }
            }
        }
        let mut groups: Vec<_> = groups.into_values().collect();
        for short in &mut groups {
            // The node that is named is always the same.
            short.makes.sort_by_key(|make| make.nodes.first());
            let first = short.nodes.iter().enumerate().min_by_key(|(_, node)| **node).map(|(at, _)| at);
            if let Some(first) = first {
                short.nodes.swap(0, first);
            }
        }
        groups
    }
}

/// Nodes that have too few devices in the same way.
#[derive(Default)]
pub(super) struct Short<'a> {
    /// Makes of which all nodes belong to the group.
    makes: Vec<&'a Make>,
    nodes: Vec<&'a Arc<str>>,
}

impl<'a> Short<'a> {
    /// Returns the number of nodes.
    pub(super) fn len(&self) -> usize {
        self.makes.iter().map(|make| make.nodes.len()).sum::<usize>() + self.nodes.len()
    }

    /// Returns one node of each make whose nodes all belong to the group.
    pub(super) fn kinds(&self) -> impl Iterator<Item = &'a Arc<str>> {
        self.makes.iter().filter_map(|make| make.nodes.first())
    }

    /// Returns the nodes; the first is always the same.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &'a Arc<str>> {
        self.makes.iter().flat_map(|make| &make.nodes).chain(self.nodes.iter().copied())
    }
}

/// What makes have in common as far as the pod can tell, and the requests that have enough devices; `None` if
/// not even an empty node has enough.
type Shortage<'m> = ((&'m [u32], &'m [usize]), Option<u64>);

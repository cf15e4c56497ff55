//! Which nodes to search: those on which each request can be met by what is free, best first, told
//! from the states of GPUs ([`crate::index::Fleet`]) without a look at the nodes themselves.
//!
//! What is left out cannot fit; what is listed may still not, and is searched before it is chosen.

use super::ask::{Alternative, Ask, Count};
use super::policy::Strategy;
use super::{Inputs, Matcher, Stage, search};
use crate::index::{Board, Fleet, GpuState, Make, Owner, Row, Sym, tolerated};
use crate::quantity::Quantity;
use std::collections::{BTreeMap, HashMap};
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

/// Nodes on which a decision could end.
pub(super) struct Shortlist<'a> {
    fleet: &'a Fleet,
    parts: Vec<Part<'a>>,
    requests: usize,
    /// By make: for each GPU, the places that each part can use.
    masks: BTreeMap<u32, Vec<Vec<u64>>>,
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
        let mut masks = BTreeMap::new();
        for (number, make) in fleet.makes() {
            masks.insert(*number, masks_of(inputs, matcher, make, &parts)?);
        }
        Some(Self {
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
        self.requests == 1
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
        for (place, supply) in supplies.iter().enumerate().filter(|(place, _)| mask >> place & 1 == 1) {
            let (Some(Supply { amounts: Some(amounts), totals }), Some(used)) = (supply, state.shared(place))
            else {
                continue;
            };
            if totals
                .iter()
                .zip(used)
                .zip(amounts.iter())
                .all(|((total, used), wanted)| *used + *wanted <= *total)
            {
                open |= 1 << place;
            }
        }
        open
    }

    /// Nodes for one device, those where taking it is best first. One node can be listed twice.
    pub(super) fn ranked(&self) -> Vec<Sym> {
        let mut groups = Vec::new();
        for (number, part) in self.parts.iter().enumerate() {
            for state in self.fleet.states() {
                let mut ranks: Vec<(u64, Option<(i64, i64)>)> = Vec::new();
                for ((make, gpu), pools) in state.members() {
                    let mask = self.mask(*make, *gpu, number);
                    let known = ranks.iter().find(|(known, _)| *known == mask).map(|(_, rank)| *rank);
                    let rank = known.unwrap_or_else(|| {
                        let rank = self.rank(state, part, mask);
                        ranks.push((mask, rank));
                        rank
                    });
                    if let Some(rank) = rank {
                        groups.push(((number, rank), pools));
                    }
                }
            }
        }
        groups.sort_by_key(|(rank, _)| *rank);
        let mut nodes = Vec::new();
        for same in groups.chunk_by(|(a, _), (b, _)| a == b) {
            let mut of_rank: Vec<(i64, Sym)> = Vec::new();
            for (_, pools) in same {
                // The rest of a group matters only where pods do not fit for other reasons.
                match self.strategy {
                    Strategy::BinPack => of_rank.extend(pools.iter().take(FIRST)),
                    Strategy::Spread => of_rank.extend(pools.iter().rev().take(FIRST).map(|(r, p)| (-r, *p))),
                }
            }
            of_rank.sort_unstable();
            nodes.extend(of_rank.into_iter().map(|(_, pool)| pool));
            if nodes.len() >= ENOUGH {
                break;
            }
        }
        nodes
    }

    /// How good the best place of a mask is; smaller is better.
    fn rank(&self, state: &GpuState, part: &Part<'_>, mask: u64) -> Option<(i64, i64)> {
        let open = self.open(state, part, mask);
        let opened = i64::from(state.untouched());
        let lost = (0..64).filter(|place| open >> place & 1 == 1).map(|place| state.lost(place)).min()?;
        Some(match self.strategy {
            Strategy::BinPack => (opened, lost),
            Strategy::Spread => (-opened, 0),
        })
    }

    /// All nodes on which each request has enough devices, fullest first, or emptiest.
    pub(super) fn possible(&self) -> impl Iterator<Item = &'a Arc<str>> {
        let rows = self.rows().filter(|row| !self.stages.contains_key(&row.node));
        let mut known: Known = HashMap::new();
        rows.filter(move |row| self.suffices(row, &mut known).iter().all(|met| *met)).map(|row| &row.node)
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
        let rows: Box<dyn Iterator<Item = &'a Row>> = match strategy {
            Strategy::BinPack => Box::new(fleet.by_room()),
            Strategy::Spread => Box::new(fleet.by_room().rev()),
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
        !self.met(&found).iter().all(|met| *met)
    }

    /// Nodes on which devices are short, with what tells why: the same number, the same reason.
    pub(super) fn short(&self) -> Vec<(&'a Arc<str>, usize, Shortage)> {
        let mut short = Vec::new();
        for (number, make) in self.fleet.makes() {
            let node = make.pools.first().and_then(|pool| self.node(*pool));
            if let Some(node) = node.filter(|_| self.is_barren(*number)) {
                short.push((node, make.pools.len(), (*number, Vec::new())));
            }
        }
        let mut known: Known = HashMap::new();
        for row in self.rows().filter(|row| !self.stages.contains_key(&row.node)) {
            let met = self.suffices(row, &mut known);
            if !met.iter().all(|met| *met) {
                short.push((&row.node, 1, (row.make, met)));
            }
        }
        short
    }

    fn suffices(&self, row: &Row, known: &mut Known) -> Vec<bool> {
        let mut found = vec![0u32; self.parts.len()];
        for (gpu, at) in row.states.iter().enumerate() {
            let counts = known.entry((row.make, gpu, *at)).or_insert_with(|| {
                let Some(state) = self.fleet.state(*at) else { return Vec::new() };
                let open = |(number, part)| self.open(state, part, self.mask(row.make, gpu, number));
                self.parts.iter().enumerate().map(|part| open(part).count_ones()).collect()
            });
            for (sum, count) in found.iter_mut().zip(counts.iter()) {
                *sum += *count;
            }
        }
        self.met(&found)
    }

    /// Which requests have enough devices, when each part has so many.
    fn met(&self, found: &[u32]) -> Vec<bool> {
        let mut met = vec![false; self.requests];
        for (part, found) in self.parts.iter().zip(found) {
            let enough = match part.alternative.count {
                Count::Exactly(count) => usize::try_from(*found).unwrap_or(usize::MAX) >= count,
                Count::All => *found > 0,
            };
            if let Some(met) = met.get_mut(part.request) {
                *met |= enough;
            }
        }
        met
    }

    /// The node of a pool.
    pub(super) fn node(&self, pool: Sym) -> Option<&'a Arc<str>> {
        self.fleet.row(pool).map(|row| &row.node)
    }
}

/// Nodes that are taken of a group of equal ones at first.
const FIRST: usize = 2;
/// Nodes after which no worse ones are listed.
const ENOUGH: usize = 16;

/// A make, and which requests have enough devices; none of them where the make has not.
pub(super) type Shortage = (u32, Vec<bool>);
/// By make, position of the GPU and state: how many devices each part could have.
type Known = HashMap<(u32, usize, usize), Vec<u32>>;

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

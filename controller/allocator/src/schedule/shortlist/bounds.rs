//! Finds by counting the nodes that do not have enough for everything that is asked for: it uses the most
//! that GPUs in their states hold at once.

use super::super::ask::Count;
use super::super::capacity_bound::{self, Item, STEPS};
use super::mask::bits;
use super::places::{Looks, Opens, Part};
use crate::snapshot::{Fleet, Row, Snapshot};
use std::collections::HashMap;

/// A weighted sum of requests.
struct Mix {
    /// For each request: the weight of one device.
    weights: Vec<u64>,
    wanted: u64,
}

/// The amounts that a pod's requests want, for every way of counting.
pub(super) struct Bounds {
    /// For each part: its request.
    requests: Vec<usize>,
    /// For each request: the least number of devices; 0 if the request sets no bound.
    counts: Vec<u64>,
    mixes: Vec<Mix>,
    /// For each set of requests whose devices must agree: the requests and their mixes.
    agreeing: Vec<(u64, Vec<Mix>)>,
}

/// The packings that were found, and the steps that are left for more.
pub(super) struct Packings {
    known: HashMap<(Vec<u64>, usize, usize), u64>,
    steps: u32,
}

impl Packings {
    pub(super) fn new() -> Self {
        Self { known: HashMap::new(), steps: STEPS }
    }
}

impl Bounds {
    /// Creates the bounds of a pod's parts. `agreeing` has the sets of requests that must be on GPUs with
    /// equal values.
    pub(super) fn new(
        fleet: &Fleet,
        parts: &[Part<'_>],
        looks: &Looks,
        agreeing: impl Iterator<Item = u64>,
    ) -> Self {
        let requests: Vec<usize> = parts.iter().map(|part| part.request).collect();
        let number = requests.iter().max().map_or(0, |last| last + 1);
        let of = |request: usize| parts.iter().filter(move |part| part.request == request);
        let least = |part: &Part<'_>| match part.alternative.count {
            Count::Exactly(count) => u64::try_from(count).unwrap_or(u64::MAX),
            Count::All => 1,
        };
        let count = |request: usize| {
            let takes_nothing = of(request).any(|part| part.alternative.admin);
            if takes_nothing { 0 } else { of(request).map(least).min().unwrap_or_default() }
        };
        let counts: Vec<u64> = (0..number).map(count).collect();
        let mut bounds = Self { requests, counts, mixes: Vec::new(), agreeing: Vec::new() };
        // If only one device is wanted, a look at the open places tells.
        if bounds.counts.iter().sum::<u64>() < 2 {
            return bounds;
        }
        let sizes: Vec<u64> = (0..number).map(|request| bounds.size(fleet, looks, request)).collect();
        bounds.mixes = bounds.mixes_of(looks, &sizes, u64::MAX);
        for requests in agreeing {
            let mixes = bounds.mixes_of(looks, &sizes, requests);
            bounds.agreeing.push((requests, mixes));
        }
        bounds
    }

    /// Returns the size of the smallest place for a request, in thousandths of its GPU.
    fn size(&self, fleet: &Fleet, looks: &Looks, request: usize) -> u64 {
        let mut smallest: Option<i64> = None;
        for (make, of) in fleet.makes() {
            for (look, board) in looks.of_make(*make).iter().zip(&of.boards) {
                let parts = looks.masks(*look).iter().zip(&self.requests);
                for (mask, _) in parts.filter(|(_, of)| **of == request) {
                    let sizes = bits(*mask).map(|place| fleet.size(*board, place));
                    smallest = sizes.chain(smallest).min();
                }
            }
        }
        smallest.and_then(|size| u64::try_from(size).ok()).unwrap_or_default().max(1)
    }

    /// Groups requests by the places that they can have; returns a mix for each group alone, and mixes of all
    /// of them together.
    fn mixes_of(&self, looks: &Looks, sizes: &[u64], among: u64) -> Vec<Mix> {
        let concerned = |request: &usize| {
            among >> request.min(&63) & 1 == 1 && self.counts.get(*request).is_some_and(|count| *count > 0)
        };
        let asked: Vec<usize> = (0..self.counts.len()).filter(concerned).collect();
        let own = |request: usize| -> Vec<Vec<u64>> {
            let masks = |look| looks.masks(look).iter().zip(&self.requests);
            let of = |look| masks(look).filter(|(_, of)| **of == request).map(|(mask, _)| *mask).collect();
            (0..looks.len()).map(of).collect()
        };
        let mut kinds: Vec<(Vec<Vec<u64>>, Vec<usize>)> = Vec::new();
        for request in asked {
            let masks = own(request);
            match kinds.iter_mut().find(|(known, _)| *known == masks) {
                Some((_, kind)) => kind.push(request),
                None => kinds.push((masks, vec![request])),
            }
        }
        let mix = |weight: &dyn Fn(usize) -> u64| {
            let weights: Vec<u64> = (0..self.counts.len()).map(weight).collect();
            let wanted = weights.iter().zip(&self.counts);
            let wanted =
                wanted.fold(0u64, |sum, (weight, count)| sum.saturating_add(weight.saturating_mul(*count)));
            Mix { weights, wanted }
        };
        let of_kind = |kind: &Vec<usize>| mix(&|request| u64::from(kind.contains(&request)));
        let mut mixes: Vec<Mix> = kinds.iter().map(|(_, kind)| of_kind(kind)).collect();
        mixes.retain(|mix| mix.wanted > 1);
        if kinds.len() > 1 {
            let part = |request: usize| kinds.iter().any(|(_, kind)| kind.contains(&request));
            let size = |request: usize| sizes.get(request).copied().unwrap_or(1);
            mixes.push(mix(&|request| u64::from(part(request))));
            mixes.push(mix(&|request| if part(request) { size(request) } else { 0 }));
        }
        mixes
    }

    /// Returns true if a node could hold everything that is asked for.
    pub(super) fn hold_on(
        &self,
        index: &Snapshot,
        row: &Row,
        opens: &mut Opens<'_>,
        packings: &mut Packings,
    ) -> bool {
        let gpus: Vec<usize> = (0..row.states.len()).collect();
        self.mixes.iter().all(|mix| self.suffice(index, mix, row, &gpus, opens, packings))
    }

    /// Returns true if these GPUs could hold everything that must agree.
    pub(super) fn agree_on(
        &self,
        index: &Snapshot,
        requests: u64,
        (row, gpus): (&Row, &[usize]),
        opens: &mut Opens<'_>,
        packings: &mut Packings,
    ) -> bool {
        let of = self.agreeing.iter().filter(|(of, _)| *of == requests).flat_map(|(_, mixes)| mixes);
        of.into_iter().all(|mix| self.suffice(index, mix, row, gpus, opens, packings))
    }

    fn suffice(
        &self,
        index: &Snapshot,
        mix: &Mix,
        row: &Row,
        gpus: &[usize],
        opens: &mut Opens<'_>,
        packings: &mut Packings,
    ) -> bool {
        let mut sum = 0u64;
        for gpu in gpus {
            let Some((look, state)) = opens.look_of(row, *gpu) else { continue };
            let most = self.most(index, mix, (look, state), opens, packings);
            sum = sum.saturating_add(most);
            if sum >= mix.wanted {
                return true;
            }
        }
        false
    }

    /// Returns the greatest weight that a GPU in this state holds.
    fn most(
        &self,
        index: &Snapshot,
        mix: &Mix,
        (look, state): (usize, usize),
        opens: &mut Opens<'_>,
        packings: &mut Packings,
    ) -> u64 {
        let key = (mix.weights.clone(), look, state);
        if let Some(known) = packings.known.get(&key) {
            return *known;
        }
        let fleet = index.fleet();
        let Some(of) = fleet.state(state) else { return 0 };
        let board = fleet.board(of.board());
        let open: Vec<u64> = opens.get(look, state).to_vec();
        let mut items = Vec::new();
        for (at, place) in board.places.iter().enumerate() {
            // Users are counted by request, because a request with several alternatives takes only one of
            // them.
            let mut users: Vec<usize> = open
                .iter()
                .zip(&self.requests)
                .filter(|(mask, _)| **mask >> at & 1 == 1)
                .map(|(_, request)| *request)
                .collect();
            users.dedup();
            let weights = users.iter().filter_map(|request| mix.weights.get(*request)).copied();
            let weight = if index.shape_of(place).shareable {
                weights.fold(0, u64::saturating_add)
            } else {
                weights.max().unwrap_or_default()
            };
            let drawn = of.shared().any(|(shared, _)| shared == at);
            let draws = if drawn { Vec::new() } else { place.draws.clone() };
            items.push(Item { weight, draws });
        }
        let most = capacity_bound::most(&items, of.free(), &mut packings.steps);
        packings.known.insert(key, most);
        most
    }
}

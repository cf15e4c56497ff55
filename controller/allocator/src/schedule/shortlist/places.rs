//! The places that each part of a pod could have: for each make regardless of what is held, and for each
//! state of a GPU as it is now.

use super::super::ask::{Alternative, Ask, Count};
use super::super::capacity::consumption;
use super::super::inputs::Inputs;
use super::super::matcher::Matcher;
use crate::quantity::Quantity;
use crate::snapshot::{Board, Fleet, GpuState, Make, Row, tolerated};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The most parts of a pod; a pod with more parts is looked at on every node.
pub(super) const MOST_PARTS: usize = 16;

/// The supply of a place for a request: the whole device, or these amounts of its totals.
pub(super) struct Supply {
    pub(super) amounts: Option<Arc<[Quantity]>>,
    totals: Vec<Quantity>,
}

/// One alternative of a request.
pub(super) struct Part<'a> {
    pub(super) request: usize,
    pub(super) alternative: &'a Alternative<'a>,
    /// For each board: what each place gives to the alternative.
    pub(super) supplies: BTreeMap<u32, Vec<Option<Supply>>>,
}

impl Part<'_> {
    /// Returns the places of a mask that the part can have now.
    pub(super) fn open(&self, state: &GpuState, mask: u64) -> u64 {
        if self.alternative.admin {
            return mask;
        }
        let mut open = mask & state.fits();
        for (place, used) in state.shared().filter(|(place, _)| mask >> place & 1 == 1) {
            let supply = self.supplies.get(&state.board()).and_then(|supplies| supplies.get(place));
            let Some(Some(Supply { amounts: Some(amounts), totals })) = supply else { continue };
            let mut sums = totals.iter().zip(used).zip(amounts.iter());
            if sums.all(|((total, used), wanted)| *used + *wanted <= *total) {
                open |= 1 << place;
            }
        }
        open
    }
}

/// Returns the parts of what is asked for, and the number of requests.
pub(super) fn parts<'a>(asks: &'a [Ask<'a>]) -> (Vec<Part<'a>>, usize) {
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

/// Returns what each place of a board gives to an alternative.
pub(super) fn supplies(
    inputs: &Inputs<'_>,
    board: &Board,
    alternative: &Alternative<'_>,
) -> Vec<Option<Supply>> {
    let tolerations = alternative.tolerations.as_deref().unwrap_or_default();
    let of = |place: &crate::snapshot::Place| {
        let taints = inputs.index.taints_of(place);
        if place.owner != inputs.owner || taints.iter().any(|t| t.repels() && !tolerated(t, tolerations)) {
            return None;
        }
        let shape = inputs.index.shape_of(place);
        let amounts = consumption(shape, alternative)?;
        Some(Supply {
            amounts,
            totals: shape.capacities.iter().map(|(_, capacity)| capacity.value).collect(),
        })
    };
    board.places.iter().map(of).collect()
}

/// For each part: the places of a GPU that it can use, regardless of what is held.
pub(super) type Masks = Box<[u64]>;

/// For each make: the masks of each GPU. Equal combinations of masks are stored once.
#[derive(Default)]
pub(super) struct Looks {
    distinct: Vec<Masks>,
    numbers: HashMap<Masks, usize>,
    by_make: BTreeMap<u32, Vec<usize>>,
}

impl Looks {
    /// Computes the masks; `None` if a selector fails or the time is up.
    pub(super) fn new(
        inputs: &Inputs<'_>,
        matcher: &mut Matcher,
        fleet: &Fleet,
        parts: &[Part<'_>],
        expired: &mut dyn FnMut() -> bool,
    ) -> Option<Self> {
        let mut looks = Self::default();
        for (number, make) in fleet.makes() {
            let gpus = masks_of(inputs, matcher, make, parts, expired)?;
            let gpus = gpus.into_iter().map(|masks| looks.intern(masks.into())).collect();
            looks.by_make.insert(*number, gpus);
        }
        Some(looks)
    }

    fn intern(&mut self, masks: Masks) -> usize {
        if let Some(known) = self.numbers.get(&masks) {
            return *known;
        }
        let number = self.distinct.len();
        self.distinct.push(masks.clone());
        self.numbers.insert(masks, number);
        number
    }

    /// Returns the number of different combinations.
    pub(super) fn len(&self) -> usize {
        self.distinct.len()
    }

    /// Returns the combination of each GPU of a make.
    pub(super) fn of_make(&self, make: u32) -> &[usize] {
        self.by_make.get(&make).map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns the masks of a combination.
    pub(super) fn masks(&self, look: usize) -> &[u64] {
        self.distinct.get(look).map(|masks| &**masks).unwrap_or_default()
    }

    /// Returns the mask of a part on a GPU of a make.
    pub(super) fn mask(&self, make: u32, gpu: usize, part: usize) -> u64 {
        let look = self.of_make(make).get(gpu);
        look.and_then(|look| self.masks(*look).get(part)).copied().unwrap_or_default()
    }
}

/// Returns for each GPU and part the places that are selected and give something; `None` if a selector fails
/// or the time is up.
fn masks_of(
    inputs: &Inputs<'_>,
    matcher: &mut Matcher,
    make: &Make,
    parts: &[Part<'_>],
    expired: &mut dyn FnMut() -> bool,
) -> Option<Vec<Vec<u64>>> {
    let mut masks = vec![Vec::with_capacity(parts.len()); make.layout.gpus.len()];
    for part in parts {
        let selectors = part.alternative.selectors.iter();
        let answers = selectors.map(|e| matcher.answers(inputs.index, &make.layout, e, expired));
        let answers: Vec<_> = answers.collect::<Result<_, _>>().ok()?;
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

/// Returns the set of requests that have enough devices, given the number of devices for each part.
pub(super) fn met(parts: &[Part<'_>], found: &[u32]) -> u64 {
    let mut met = 0;
    for (part, found) in parts.iter().zip(found) {
        let enough = match part.alternative.count {
            Count::Exactly(count) => usize::try_from(*found).unwrap_or(usize::MAX) >= count,
            Count::All => *found > 0,
        };
        met |= u64::from(enough) << part.request;
    }
    met
}

/// The places that each part could have on GPUs now, by look and state; computed on first use.
pub(super) struct Opens<'s> {
    fleet: &'s Fleet,
    parts: &'s [Part<'s>],
    looks: &'s Looks,
    states: usize,
    /// For each look and state: one more than the position of its places; 0 if it was not used yet.
    begins: Vec<u32>,
    places: Vec<u64>,
}

impl<'s> Opens<'s> {
    pub(super) fn new(fleet: &'s Fleet, parts: &'s [Part<'s>], looks: &'s Looks) -> Self {
        let states = fleet.most_states();
        Self { fleet, parts, looks, states, begins: vec![0; states * looks.len()], places: Vec::new() }
    }

    /// Returns the look and the state of a node's GPU.
    pub(super) fn look_of(&self, row: &Row, gpu: usize) -> Option<(usize, usize)> {
        Some((*self.looks.of_make(row.make).get(gpu)?, *row.states.get(gpu)?))
    }

    /// Returns for each part the places that it could have.
    pub(super) fn get(&mut self, look: usize, state: usize) -> &[u64] {
        let Some(slot) = self.begins.get_mut(look * self.states + state) else { return &[] };
        let begin = if let Some(begin) = slot.checked_sub(1) {
            begin as usize
        } else {
            let begin = self.places.len();
            *slot = u32::try_from(begin + 1).unwrap_or_default();
            let masks = self.looks.masks(look);
            let state = self.fleet.state(state);
            let open = |(part, mask): (&Part<'_>, &u64)| state.map_or(0, |state| part.open(state, *mask));
            self.places.extend(self.parts.iter().zip(masks).map(open));
            begin
        };
        self.places.get(begin..begin + self.parts.len()).unwrap_or_default()
    }

    /// Returns the set of requests that have enough devices on these GPUs of a node.
    pub(super) fn met_on(&mut self, row: &Row, gpus: impl Iterator<Item = usize>) -> u64 {
        let (looks, parts) = (self.looks.of_make(row.make), self.parts);
        let mut found = [0u32; MOST_PARTS];
        for gpu in gpus {
            let (Some(look), Some(state)) = (looks.get(gpu), row.states.get(gpu)) else { continue };
            for (sum, open) in found.iter_mut().zip(self.get(*look, *state)) {
                *sum += open.count_ones();
            }
        }
        met(parts, found.get(..parts.len()).unwrap_or_default())
    }
}

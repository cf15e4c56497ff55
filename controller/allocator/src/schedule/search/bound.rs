//! Says by counting whether requests can be met together at all: compares what they ask for with the most
//! that the hardware holds at once. The answer is never no if something fits.

use super::super::ask::{Alternative, Ask, ConstraintKind, Count};
use super::super::capacity_bound::{self, Item, STEPS};
use super::super::reason::{DeviceReason, Scope};
use super::candidates::Candidates;
use super::state::State;
use super::view::View;
use crate::quantity::Quantity;
use crate::snapshot::{PARENT, Sym};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The part of the hardware that counts as held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// The part that is held now.
    AsItIs,
    /// Nothing.
    Nothing,
}

/// A request that wants devices for itself.
struct Wanted {
    claim: usize,
    request: usize,
    /// The least number of devices.
    count: u64,
    /// The devices that the request could be given, each as view and position.
    devices: BTreeSet<(usize, u32)>,
}

/// The counters that a device draws on, and whether several requests can have it.
struct Place {
    component: usize,
    draws: Vec<(usize, Quantity)>,
    shared: bool,
}

/// Requests that could be given the same devices.
type Kind = Vec<usize>;
/// For each value of an attribute: the devices with that value that each request could be given.
type ByValue = BTreeMap<u32, Vec<BTreeSet<(usize, u32)>>>;

/// The requests that ask for too much.
enum Excess {
    /// These requests, of whose devices at most this number can be held.
    Of(Kind, u64),
    /// All requests together.
    Together,
}

/// Returns why these requests cannot be met at once; `None` if counting does not tell.
pub(super) fn excess(
    state: &State<'_, '_>,
    views: &[View<'_>],
    asks: &[Ask<'_>],
    candidates: &[Vec<Vec<Option<Candidates>>>],
    taken: Taken,
) -> Option<DeviceReason> {
    let wanted = wanted(state, asks, candidates, taken);
    // If only one device is asked for, the search itself tells.
    if wanted.iter().map(|wanted| wanted.count).sum::<u64>() < 2 {
        return None;
    }
    let mut count = Counting::new(state, &wanted, taken);
    if let Some(excess) = count.over(&wanted.iter().map(|wanted| wanted.devices.clone()).collect::<Vec<_>>())
    {
        return Some(reason(asks, &wanted, excess, Scope::Node));
    }
    for (claim, ask) in asks.iter().enumerate() {
        for constraint in &ask.constraints {
            let Some(attribute) = constraint.attribute else { continue };
            let concerned = |wanted: &Wanted| {
                let request = ask.requests.get(wanted.request).filter(|_| wanted.claim == claim);
                request.is_some_and(|request| {
                    let mut alternatives = request.alternatives.iter();
                    alternatives.all(|a| constraint.concerns(&request.name, a.subrequest.as_deref()))
                })
            };
            let concerned: Vec<bool> = wanted.iter().map(concerned).collect();
            let scope = match constraint.attribute_name.rsplit('/').next() {
                Some(PARENT) => Scope::Gpu,
                _ => Scope::Value(constraint.attribute_name.clone()),
            };
            let found = match constraint.kind {
                ConstraintKind::Match => count.over_for_each_value(views, &wanted, &concerned, attribute),
                ConstraintKind::Distinct => over_values(views, &wanted, &concerned, attribute),
            };
            if let Some(excess) = found {
                let scope = if constraint.kind == ConstraintKind::Match { scope } else { Scope::Node };
                return Some(reason(asks, &wanted, excess, scope));
            }
        }
    }
    None
}

fn reason(asks: &[Ask<'_>], wanted: &[Wanted], excess: Excess, scope: Scope) -> DeviceReason {
    match excess {
        Excess::Together => DeviceReason::TooMuch { scope },
        Excess::Of(kind, most) => {
            let of = |at: &usize| {
                let wanted = wanted.get(*at)?;
                Some((asks.get(wanted.claim)?.requests.get(wanted.request)?.name.to_string(), wanted.count))
            };
            let (names, counts): (Vec<String>, Vec<u64>) = kind.iter().filter_map(of).unzip();
            DeviceReason::TooMany { requests: names.join(", "), wanted: counts.iter().sum(), most, scope }
        }
    }
}

/// Returns the requests with the devices that they could be given. Requests with admin access take nothing
/// and are left out.
fn wanted(
    state: &State<'_, '_>,
    asks: &[Ask<'_>],
    candidates: &[Vec<Vec<Option<Candidates>>>],
    taken: Taken,
) -> Vec<Wanted> {
    let mut all = Vec::new();
    for (claim, (ask, of_claim)) in asks.iter().zip(candidates).enumerate() {
        for (request, (asked, found)) in ask.requests.iter().zip(of_claim).enumerate() {
            let viable = || {
                let both = asked.alternatives.iter().zip(found);
                both.filter_map(|(alternative, found)| Some((alternative, found.as_ref()?)))
            };
            if viable().any(|(alternative, _)| alternative.admin) {
                continue;
            }
            let least = |(alternative, found): (&Alternative<'_>, &Candidates)| match alternative.count {
                Count::Exactly(count) => count,
                Count::All => found.devices.iter().map(Vec::len).sum(),
            };
            let count = viable().map(least).min().unwrap_or_default();
            let mut devices = BTreeSet::new();
            for (alternative, found) in viable() {
                for (view, of_view) in found.devices.iter().enumerate() {
                    let open = of_view.iter().filter(|candidate| {
                        let now = taken == Taken::AsItIs;
                        candidate.usable && state.could_take(alternative, view, candidate, now)
                    });
                    devices.extend(open.map(|candidate| (view, candidate.position)));
                }
            }
            let count = u64::try_from(count).unwrap_or(u64::MAX);
            all.push(Wanted { claim, request, count, devices });
        }
    }
    all
}

/// Returns an excess if more devices are asked for than an attribute has different values.
fn over_values(views: &[View<'_>], wanted: &[Wanted], concerned: &[bool], attribute: Sym) -> Option<Excess> {
    let (kind, values) = values(views, wanted, concerned, attribute);
    let count = kind.iter().filter_map(|at| wanted.get(*at)).map(|wanted| wanted.count).sum::<u64>();
    let most = u64::try_from(values.len()).unwrap_or(u64::MAX);
    (count > most).then_some(Excess::Of(kind, most))
}

/// Returns the requests that a constraint applies to, and the values of their devices.
fn values(views: &[View<'_>], wanted: &[Wanted], concerned: &[bool], attribute: Sym) -> (Kind, ByValue) {
    let mut values = ByValue::new();
    let kind: Kind = (0..wanted.len()).filter(|at| concerned.get(*at) == Some(&true)).collect();
    for (at, of) in wanted.iter().enumerate().filter(|(at, _)| kind.contains(at)) {
        for (view, position) in &of.devices {
            let value = views.get(*view).and_then(|view| view.layout.attribute(*position, attribute));
            let Some(value) = value else { continue };
            let sets = values.entry(value).or_insert_with(|| vec![BTreeSet::new(); wanted.len()]);
            if let Some(set) = sets.get_mut(at) {
                set.insert((*view, *position));
            }
        }
    }
    (kind, values)
}

/// The packings of a node's GPUs; equal ones are computed once.
struct Counting {
    counts: Vec<u64>,
    places: BTreeMap<(usize, u32), Place>,
    /// For each component: the free amounts of its counters.
    free: Vec<Vec<Quantity>>,
    known: HashMap<(Vec<Item>, Vec<Quantity>), u64>,
    steps: u32,
}

impl Counting {
    fn new(state: &State<'_, '_>, wanted: &[Wanted], taken: Taken) -> Self {
        let now = taken == Taken::AsItIs;
        let devices: BTreeSet<(usize, u32)> =
            wanted.iter().flat_map(|wanted| wanted.devices.iter().copied()).collect();
        let mut components = Components::default();
        let drawn: Vec<_> = devices
            .into_iter()
            .map(|device| (device, state.draws_of(device.0, device.1, now), state.is_shareable(device)))
            .collect();
        for ((view, _), draws, _) in &drawn {
            components.join(*view, draws.iter().map(|(set, _, _)| *set));
        }
        let mut free: Vec<Vec<Quantity>> = Vec::new();
        let mut begins: HashMap<(usize, u16), (usize, usize)> = HashMap::new();
        let mut numbers: HashMap<(usize, u16), usize> = HashMap::new();
        let mut places = BTreeMap::new();
        for ((view, position), draws, shared) in drawn {
            let component = match draws.first() {
                Some((set, _, _)) => {
                    let root = components.root((view, *set));
                    *numbers.entry(root).or_insert_with(|| {
                        free.push(Vec::new());
                        free.len() - 1
                    })
                }
                None => {
                    free.push(Vec::new());
                    free.len() - 1
                }
            };
            let mut own = Vec::new();
            for (set, counter, amount) in draws {
                let begin = begins.entry((view, set)).or_insert_with(|| {
                    let all = free.get_mut(component);
                    let begin = all.as_ref().map_or(0, |free| free.len());
                    if let Some(all) = all {
                        all.extend(state.counters(view, set, now));
                    }
                    (component, begin)
                });
                own.push((begin.1 + usize::from(counter), amount));
            }
            own.sort_unstable();
            places.insert((view, position), Place { component, draws: own, shared });
        }
        let counts = wanted.iter().map(|wanted| wanted.count).collect();
        Self { counts, places, free, known: HashMap::new(), steps: STEPS }
    }

    /// Returns the excess, if each request can be given the devices in its set.
    fn over(&mut self, devices: &[BTreeSet<(usize, u32)>]) -> Option<Excess> {
        let mut kinds: Vec<Kind> = Vec::new();
        for (at, set) in devices.iter().enumerate() {
            match kinds
                .iter_mut()
                .find(|kind| kind.first().and_then(|first| devices.get(*first)) == Some(set))
            {
                Some(kind) => kind.push(at),
                None => kinds.push(vec![at]),
            }
        }
        let mut scale = vec![0u64; devices.len()];
        for kind in &kinds {
            let count: u64 = kind.iter().filter_map(|at| self.counts.get(*at)).sum();
            if count == 0 {
                continue;
            }
            let weights: Vec<u64> = (0..devices.len()).map(|at| u64::from(kind.contains(&at))).collect();
            let (most, of_one) = self.most(devices, &weights);
            if most < count {
                return Some(Excess::Of(kind.clone(), most));
            }
            for at in kind {
                if let Some(scale) = scale.get_mut(*at) {
                    *scale = (SCALE / of_one.max(1)).max(1);
                }
            }
        }
        if kinds.len() < 2 {
            return None;
        }
        // No kind of requests is too much alone. They are counted together in two ways: each device as one,
        // and each device as its part of a GPU.
        let over = [vec![1; devices.len()], scale].iter().any(|weights| {
            let wanted = weights.iter().zip(&self.counts);
            let wanted =
                wanted.fold(0u64, |sum, (weight, count)| sum.saturating_add(weight.saturating_mul(*count)));
            self.most(devices, weights).0 < wanted
        });
        over.then_some(Excess::Together)
    }

    /// Returns the excess that holds for every value on which the devices of these requests could agree.
    fn over_for_each_value(
        &mut self,
        views: &[View<'_>],
        wanted: &[Wanted],
        concerned: &[bool],
        attribute: Sym,
    ) -> Option<Excess> {
        let (kind, values) = values(views, wanted, concerned, attribute);
        let count: u64 = kind.iter().filter_map(|at| self.counts.get(*at)).sum();
        if count < 2 {
            return None;
        }
        let mut found: Option<Excess> = None;
        for mut devices in values.into_values() {
            for (at, of) in wanted.iter().enumerate().filter(|(at, _)| !kind.contains(at)) {
                if let Some(set) = devices.get_mut(at) {
                    set.clone_from(&of.devices);
                }
            }
            let excess = self.over(&devices)?;
            // The value with which the requests would be nearest to fitting.
            found = Some(match (found, excess) {
                (Some(Excess::Of(one, most)), Excess::Of(other, more)) if one == other => {
                    Excess::Of(one, most.max(more))
                }
                (None, excess) => excess,
                _ => Excess::Together,
            });
        }
        found
    }

    /// Returns the greatest weight that the requests can have on the node and on one GPU; `weights` has the
    /// weight of a device of each request.
    fn most(&mut self, devices: &[BTreeSet<(usize, u32)>], weights: &[u64]) -> (u64, u64) {
        let mut items: BTreeMap<usize, Vec<Item>> = BTreeMap::new();
        for (device, place) in &self.places {
            let users = devices.iter().zip(weights).filter(|(set, _)| set.contains(device));
            let users = users.map(|(_, weight)| *weight);
            let weight = if place.shared {
                users.fold(0, u64::saturating_add)
            } else {
                users.max().unwrap_or_default()
            };
            if weight > 0 {
                let item = Item { weight, draws: place.draws.clone() };
                items.entry(place.component).or_default().push(item);
            }
        }
        let (mut sum, mut greatest) = (0u64, 0u64);
        for (component, items) in items {
            let key = (items, self.free.get(component).cloned().unwrap_or_default());
            let most = match self.known.get(&key) {
                Some(known) => *known,
                None => {
                    let most = capacity_bound::most(&key.0, &key.1, &mut self.steps);
                    self.known.insert(key, most);
                    most
                }
            };
            sum = sum.saturating_add(most);
            greatest = greatest.max(most);
        }
        (sum, greatest)
    }
}

/// The number of smallest parts of a GPU; it can be divided by 1 to 8.
const SCALE: u64 = 840;

/// Groups of counter sets that some device draws on together.
#[derive(Default)]
struct Components {
    parents: HashMap<(usize, u16), (usize, u16)>,
}

impl Components {
    fn root(&self, of: (usize, u16)) -> (usize, u16) {
        let mut at = of;
        while let Some(parent) = self.parents.get(&at).filter(|parent| **parent != at) {
            at = *parent;
        }
        at
    }

    fn join(&mut self, view: usize, sets: impl Iterator<Item = u16>) {
        let mut first = None;
        for set in sets {
            let root = self.root((view, set));
            let first = *first.get_or_insert(root);
            self.parents.insert(root, first);
        }
    }
}

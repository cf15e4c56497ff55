//! Finds devices on one node for all claims of a pod. It is a depth-first search that tries the best devices
//! first and everything in the end. Running out of time is an outcome of its own.

mod bound;
mod candidates;
mod solution;
mod state;
mod view;

pub use solution::{Failure, Pick, Solution};

use super::ask::{Alternative, Ask, Count, MOST_RESULTS};
use super::matcher::Matcher;
use super::reason::DeviceReason;
use super::score::{Rank, Strategy};
use crate::snapshot::worth::Cost;
use crate::snapshot::{Owner, Pool, Snapshot};
use bound::Taken;
use candidates::{Candidate, Candidates, eligible, enough, marks};
use state::State;
use std::collections::{BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use view::{View, views};

/// The number of steps after which a search is not easy. Before it continues, counting shows whether it can
/// succeed at all.
const EASY: u64 = 500;
/// The number of steps between two looks at the clock.
const STEPS_BETWEEN_LOOKS: u64 = 256;

/// The limits at which a search is given up.
pub struct Limits<'l> {
    /// The most steps.
    pub steps: u64,
    /// Returns true if the time is up; called from time to time.
    pub expired: &'l mut dyn FnMut() -> bool,
}

/// Returns a number that nodes share if every search on them has the same outcome: they have the same
/// devices, on which every selector gives the same answers, with the same values where constraints look, and
/// the same parts are held. `None` if a node has to be looked at by itself. The numbers are hashes, so before
/// an outcome is used for a node, that very node is searched.
pub fn equality(
    index: &Snapshot,
    matcher: &mut Matcher,
    node: &str,
    asks: &[Ask<'_>],
    expired: &mut dyn FnMut() -> bool,
) -> Option<u64> {
    let mut pools = index.pools_of_node(node);
    let (pool, None) = (pools.next()?, pools.next()) else { return None };
    let layout = pool.layout.as_ref()?;
    if pool.stopped.is_some() || index.taint_rules().next().is_some() {
        return None;
    }
    let mut hasher = DefaultHasher::new();
    (layout.id, pool.usage.fingerprint, pool.hand_over_until, matcher.generation()).hash(&mut hasher);
    if asks.iter().any(Ask::asks_for_time_slice) {
        let holders = pool.holders.iter().filter(|holder| holder.time_slice.is_some());
        let slices = holders.map(|holder| (layout.position(holder.device), holder.time_slice));
        slices.collect::<BTreeSet<_>>().hash(&mut hasher);
    }
    for ask in asks {
        for constraint in &ask.constraints {
            let column = constraint.attribute.and_then(|name| layout.column(name));
            column.map(|column| column.id).hash(&mut hasher);
        }
        for alternative in ask.requests.iter().flat_map(|request| &request.alternatives) {
            for expression in &alternative.selectors {
                // Equal answers are the same object.
                let answers = matcher.answers(index, layout, expression, expired).ok()?;
                Arc::as_ptr(&answers).hash(&mut hasher);
            }
        }
    }
    Some(hasher.finish())
}

/// Searches the pools of a node for devices with this owner.
///
/// # Errors
/// The reason why there is no solution.
pub fn search(
    index: &Snapshot,
    matcher: &mut Matcher,
    pools: Vec<&Pool>,
    asks: &[Ask<'_>],
    owner: Owner,
    strategy: Strategy,
    limits: Limits<'_>,
) -> Result<Solution, Failure> {
    let views = views(index, pools, owner, asks)?;
    let mut candidates = Vec::new();
    let mut reason = None;
    for ask in asks {
        let mut of_claim = Vec::new();
        for request in &ask.requests {
            let mut of_request = Vec::new();
            let mut why = None;
            for alternative in &request.alternatives {
                let request = &request.name;
                let expired = &mut *limits.expired;
                let found = eligible(index, matcher, &views, ask, request, alternative, owner, expired)?;
                match enough(index, &views, request, alternative, &found) {
                    Ok(()) => of_request.push(Some(found)),
                    Err(reason) => {
                        why = why.or(Some(reason));
                        of_request.push(None);
                    }
                }
            }
            if of_request.iter().all(Option::is_none) {
                reason = reason.or(why);
            }
            of_claim.push(of_request);
        }
        candidates.push(of_claim);
    }
    if let Some(reason) = reason {
        return Err(Failure::Devices(reason));
    }
    let marks = marks(&views, &candidates);
    // Without steps, the attempt only returns why there is no solution.
    let mut attempt = |steps: Option<u64>| {
        let mut search = Search {
            views: &views,
            asks,
            candidates: &candidates,
            strategy,
            state: State::new(index, &views, asks, marks.clone()),
            picks: Vec::new(),
            chosen: asks.iter().map(|ask| vec![0; ask.requests.len()]).collect(),
            steps: 0,
            limits: Limits { steps: steps.unwrap_or_default(), expired: &mut *limits.expired },
            too_many: None,
            cost: Cost::default(),
            opened: HashSet::new(),
        };
        if steps.is_none() {
            return Err(Failure::Devices(search.why()));
        }
        match search.request(0, 0) {
            Ok(true) => Ok(search.solution()),
            Ok(false) => Err(Failure::Devices(search.why())),
            Err(OutOfTime) => Err(Failure::OutOfTime),
        }
    };
    if limits.steps <= EASY {
        return attempt(Some(limits.steps));
    }
    match attempt(Some(EASY)) {
        Err(Failure::OutOfTime) => {
            let state = State::new(index, &views, asks, marks.clone());
            match bound::excess(&state, &views, asks, &candidates, Taken::AsItIs) {
                Some(_) => attempt(None),
                None => attempt(Some(limits.steps)),
            }
        }
        outcome => {
            let counted = || {
                let state = State::new(index, &views, asks, marks.clone());
                bound::excess(&state, &views, asks, &candidates, Taken::AsItIs)
            };
            debug_assert!(outcome.is_err() || counted().is_none(), "counting refuses {outcome:?}");
            outcome
        }
    }
}

/// The error that the time is up.
struct OutOfTime;

struct Search<'a, 's> {
    views: &'s [View<'a>],
    asks: &'s [Ask<'a>],
    candidates: &'s [Vec<Vec<Option<Candidates>>>],
    strategy: Strategy,
    state: State<'a, 's>,
    picks: Vec<Pick>,
    chosen: Vec<Vec<usize>>,
    steps: u64,
    limits: Limits<'s>,
    too_many: Option<String>,
    cost: Cost,
    opened: HashSet<(usize, u32)>,
}

/// An alternative of a request while its devices are picked.
struct Slot<'s> {
    claim: usize,
    request: usize,
    alternative: usize,
    order: &'s [(usize, Candidate)],
    wanted: usize,
}

impl Search<'_, '_> {
    fn step(&mut self) -> Result<(), OutOfTime> {
        self.steps = self.steps.wrapping_add(1);
        let late = self.steps.is_multiple_of(STEPS_BETWEEN_LOOKS) && (self.limits.expired)();
        if late || self.steps > self.limits.steps { Err(OutOfTime) } else { Ok(()) }
    }

    /// Satisfies a request and all requests after it.
    fn request(&mut self, claim: usize, request: usize) -> Result<bool, OutOfTime> {
        self.step()?;
        let (asks, all) = (self.asks, self.candidates);
        let (Some(ask), Some(of_claim)) = (asks.get(claim), all.get(claim)) else { return Ok(true) };
        let (Some(wanted), Some(found)) = (ask.requests.get(request), of_claim.get(request)) else {
            return self.request(claim + 1, 0);
        };
        for (position, (alternative, found)) in wanted.alternatives.iter().zip(found).enumerate() {
            let Some(found) = found else { continue };
            let order = self.order(claim, &wanted.name, alternative, found);
            let count = match alternative.count {
                Count::Exactly(count) => count,
                Count::All => order.len(),
            };
            if self.state.results(claim) + count > MOST_RESULTS {
                self.too_many = Some(ask.claim.to_string());
                continue;
            }
            if let Some(chosen) = self.chosen.get_mut(claim).and_then(|chosen| chosen.get_mut(request)) {
                *chosen = position;
            }
            let slot = Slot { claim, request, alternative: position, order: &order, wanted: count };
            let done = match alternative.count {
                Count::Exactly(_) => self.some_of(&slot, 0, 0)?,
                Count::All => self.all_of(&slot, 0)?,
            };
            if done {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the candidates, best first. Candidates of equal rank are grouped by GPU, in layout order.
    fn order(
        &mut self,
        claim: usize,
        request: &str,
        alternative: &Alternative<'_>,
        found: &Candidates,
    ) -> Vec<(usize, Candidate)> {
        let mut order: Vec<(Rank, usize, u32, Candidate)> = Vec::new();
        let strategy = self.strategy.unless(None, alternative.class.gpu_strategy);
        for (view, devices) in found.devices.iter().enumerate() {
            for candidate in devices {
                let all = alternative.count == Count::All;
                if !all && !candidate.usable {
                    continue;
                }
                if all {
                    order.push((Rank::default(), view, 0, candidate.clone()));
                    continue;
                }
                if !self.state.agrees(claim, request, alternative, view, candidate.position) {
                    continue;
                }
                if let Some((rank, gpu)) = self.state.rank(view, candidate, alternative, strategy) {
                    order.push((rank, view, gpu, candidate.clone()));
                }
            }
        }
        order.sort_by_key(|(rank, view, gpu, candidate)| (*rank, *view, *gpu, candidate.position));
        order.into_iter().map(|(_, view, _, candidate)| (view, candidate)).collect()
    }

    /// Picks the rest of a request's devices from those at `start` and after. It tries combinations, not
    /// permutations. As in upstream, a shared device may serve one request only once.
    fn some_of(&mut self, slot: &Slot<'_>, picked: usize, start: usize) -> Result<bool, OutOfTime> {
        self.step()?;
        if picked == slot.wanted {
            return self.request(slot.claim, slot.request + 1);
        }
        // Too few candidates are left.
        if slot.order.len().saturating_sub(start) < slot.wanted - picked {
            return Ok(false);
        }
        let mut failed: HashSet<u64> = HashSet::new();
        for (position, (view, candidate)) in slot.order.iter().enumerate().skip(start) {
            self.step()?;
            let key = self.state.equivalence(*view, candidate.position);
            if key.is_some_and(|key| failed.contains(&key)) {
                continue;
            }
            if self.take(slot, *view, candidate) {
                if self.some_of(slot, picked + 1, position + 1)? {
                    return Ok(true);
                }
                self.give_back(slot, *view);
            }
            // If one device led to no solution, an equivalent device does not either.
            failed.extend(key);
        }
        Ok(false)
    }

    fn all_of(&mut self, slot: &Slot<'_>, picked: usize) -> Result<bool, OutOfTime> {
        self.step()?;
        let Some((view, candidate)) = slot.order.get(picked) else {
            return self.request(slot.claim, slot.request + 1);
        };
        if candidate.usable && self.take(slot, *view, candidate) {
            if self.all_of(slot, picked + 1)? {
                return Ok(true);
            }
            self.give_back(slot, *view);
        }
        Ok(false)
    }

    fn take(&mut self, slot: &Slot<'_>, view: usize, candidate: &Candidate) -> bool {
        let (Some(ask), Some(in_view)) = (self.asks.get(slot.claim), self.views.get(view)) else {
            return false;
        };
        let Some(request) = ask.requests.get(slot.request) else { return false };
        let Some(alternative) = request.alternatives.get(slot.alternative) else { return false };
        if !self.state.take(slot.claim, &request.name, alternative, view, candidate) {
            return false;
        }
        self.picks.push(Pick {
            claim: slot.claim,
            request: slot.request,
            alternative: slot.alternative,
            pool: in_view.pool.name,
            position: candidate.position,
            consumed: candidate.consumed.as_deref().map(Into::into),
        });
        true
    }

    fn give_back(&mut self, slot: &Slot<'_>, view: usize) {
        let asks = self.asks;
        let request = asks.get(slot.claim).and_then(|ask| ask.requests.get(slot.request));
        let alternative = request.and_then(|request| request.alternatives.get(slot.alternative));
        if let (Some(alternative), Some(pick)) = (alternative, self.picks.pop()) {
            self.state.give_back(slot.claim, alternative, view, &pick);
        }
    }

    fn solution(mut self) -> Solution {
        for pick in &self.picks {
            let Some((position, view)) =
                self.views.iter().enumerate().find(|(_, view)| view.pool.name == pick.pool)
            else {
                continue;
            };
            let Some(device) = view.layout.devices.get(pick.position as usize) else { continue };
            if self.opened.insert((position, device.gpu)) {
                let before = self.state.worth_at_start(position, device.gpu);
                let cost = before.until(self.state.worth_now(position, device.gpu));
                self.cost = self.cost.plus(cost);
            }
        }
        let opened =
            self.opened.iter().filter(|(view, gpu)| self.state.untouched_at_start(*view, *gpu)).count();
        let left = self.state.left();
        let alternatives = self.chosen.iter().flatten().sum();
        let opened = i64::try_from(opened).unwrap_or(i64::MAX);
        let score = self.strategy.score(alternatives, opened, self.cost, left);
        Solution { picks: self.picks, chosen: self.chosen, score }
    }

    /// Returns the reason, after every combination was tried.
    fn why(&mut self) -> DeviceReason {
        if let Some(claim) = self.too_many.take() {
            return DeviceReason::TooManyResults { claim };
        }
        let excess = bound::excess(&self.state, self.views, self.asks, self.candidates, Taken::Nothing);
        if let Some(reason) = excess {
            return reason;
        }
        for (ask, of_claim) in self.asks.iter().zip(self.candidates) {
            for (request, found) in ask.requests.iter().zip(of_claim) {
                let mut reason = None;
                for (alternative, found) in request.alternatives.iter().zip(found) {
                    let name = alternative.result_name(&request.name);
                    let Some(found) = found else { continue };
                    let free = self.state.free_now(found.devices.iter().enumerate(), alternative);
                    match alternative.count {
                        Count::Exactly(count) if free < count => {
                            let devices = found.devices.iter().enumerate();
                            let lack = self.state.lack(devices, alternative).map(Box::new);
                            reason = reason.or(Some(DeviceReason::InUse { request: name, lack }));
                        }
                        Count::All if free < found.devices.iter().map(Vec::len).sum() => {
                            reason = reason.or(Some(DeviceReason::NotAllFree { request: name }));
                        }
                        _ => {
                            reason = None;
                            break;
                        }
                    }
                }
                if let Some(reason) = reason {
                    return reason;
                }
            }
        }
        DeviceReason::Together
    }
}

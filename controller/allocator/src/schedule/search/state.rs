//! The state of a search: what it has taken so far, on top of what the snapshot shows as held.

mod rank;
mod taken;
mod time_slices;

use super::super::ask::{Alternative, Ask};
use super::super::capacity_shortfall::Lack;
use super::candidates::Candidate;
use super::solution::Pick;
use super::view::View;
use crate::quantity::Quantity;
use crate::snapshot::worth::Worth;
use crate::snapshot::{Device, Gpu, Snapshot};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use taken::{Seen, Taken};
use time_slices::TimeSlices;

pub(super) struct State<'a, 's> {
    index: &'a Snapshot,
    views: &'s [View<'a>],
    asks: &'s [Ask<'a>],
    free: Vec<Vec<Quantity>>,
    taken: Vec<HashMap<u32, Taken>>,
    seen: Vec<Vec<Seen>>,
    results: Vec<usize>,
    /// A number for each GPU that is the same if no request can tell the GPUs apart; see
    /// [`State::equivalence`].
    kinds: HashMap<(usize, u32), u64>,
    marks: Vec<Vec<u64>>,
    /// Time slices that the holders of devices asked for; empty if no claim of this search asks for one.
    time_slices: TimeSlices,
    worths: HashMap<(u64, u32, u64), Worth>,
}

impl<'a, 's> State<'a, 's> {
    pub(super) fn new(
        index: &'a Snapshot,
        views: &'s [View<'a>],
        asks: &'s [Ask<'a>],
        marks: Vec<Vec<u64>>,
    ) -> Self {
        Self {
            index,
            views,
            asks,
            free: views.iter().map(|view| view.pool.usage.free.clone()).collect(),
            taken: views.iter().map(|_| HashMap::new()).collect(),
            seen: asks.iter().map(|ask| vec![Seen::default(); ask.constraints.len()]).collect(),
            results: vec![0; asks.len()],
            kinds: HashMap::new(),
            marks,
            time_slices: time_slices::asked_for(views, asks),
            worths: HashMap::new(),
        }
    }

    pub(super) fn results(&self, claim: usize) -> usize {
        self.results.get(claim).copied().unwrap_or_default()
    }

    fn device(&self, view: usize, position: u32) -> Option<&'a Device> {
        self.views.get(view)?.layout.devices.get(position as usize)
    }

    fn gpu(&self, view: usize, number: u32) -> Option<&'a Gpu> {
        self.views.get(view)?.layout.gpus.iter().find(|gpu| gpu.number == number)
    }

    fn taken(&self, view: usize, position: u32) -> Option<&Taken> {
        self.taken.get(view)?.get(&position)
    }

    /// Returns true if a share of the device is held or was taken by this search.
    fn is_shared(&self, view: usize, position: u32) -> bool {
        self.taken(view, position).is_some_and(|taken| taken.shares > 0)
            || self
                .views
                .get(view)
                .and_then(|view| view.pool.usage.devices.get(&position))
                .is_some_and(|used| used.shares > 0)
    }

    /// Returns true if a device can be taken now; constraints are not checked.
    fn is_free(
        &self,
        claim: Option<usize>,
        alternative: &Alternative<'_>,
        view: usize,
        candidate: &Candidate,
    ) -> bool {
        let position = candidate.position;
        let (Some(in_view), Some(device)) = (self.views.get(view), self.device(view, position)) else {
            return false;
        };
        let tolerations = alternative.tolerations.as_deref().unwrap_or_default();
        if self.index.repelling_taint(in_view.pool, device, tolerations).is_some() {
            return false;
        }
        let taken = self.taken(view, position);
        if alternative.admin {
            // Admin access is possible beside any holder, but a claim does not get a device twice unless the
            // device is shared.
            return candidate.consumed.is_some()
                || !claim.is_some_and(|claim| taken.is_some_and(|taken| taken.is_of(claim)));
        }
        if candidate.consumed.is_none()
            && claim.is_some_and(|claim| taken.is_some_and(|taken| taken.is_of(claim)))
        {
            return false;
        }
        let usage = &in_view.pool.usage;
        if usage.blocked.contains_key(&device.gpu) {
            return false;
        }
        if alternative
            .time_slice
            .is_some_and(|wanted| self.is_sliced_otherwise(view, device, position, wanted))
        {
            return false;
        }
        let used = usage.devices.get(&position);
        if used.is_some_and(|used| used.exclusive > 0) || taken.is_some_and(|taken| taken.exclusive) {
            return false;
        }
        match &candidate.consumed {
            None => {
                if used.is_some() || taken.is_some_and(|taken| taken.shares > 0) {
                    return false;
                }
            }
            Some(amounts) => {
                let shape = self.index.shape(device);
                let held = |list: Option<&[Quantity]>, at: usize| {
                    list.and_then(|list| list.get(at)).copied().unwrap_or_default()
                };
                for (at, ((_, capacity), amount)) in shape.capacities.iter().zip(amounts.iter()).enumerate() {
                    let before = held(used.map(|used| &*used.consumed), at)
                        + held(taken.map(|taken| taken.consumed.as_slice()), at);
                    if before + *amount > capacity.value {
                        return false;
                    }
                }
                if self.is_shared(view, position) {
                    // The share adds nothing to the counters, which are consumed already. But the counters
                    // may be overdrawn where a share is kept for another pod until the present holders have
                    // gone.
                    return !self.is_overdrawn(view, device);
                }
            }
        }
        self.counters_suffice(view, device)
    }

    /// Returns true if more is drawn from one of the device's counters than it has.
    fn is_overdrawn(&self, view: usize, device: &Device) -> bool {
        let (Some(in_view), Some(free)) = (self.views.get(view), self.free.get(view)) else { return true };
        self.index.draws(device).any(|(set, amounts)| {
            let set = in_view.layout.sets.get(usize::from(set));
            amounts.iter().any(|(counter, _)| {
                let free = set.and_then(|set| free.get(set.offset + usize::from(*counter)));
                free.is_none_or(|free| *free < Quantity::ZERO)
            })
        })
    }

    fn counters_suffice(&self, view: usize, device: &Device) -> bool {
        let (Some(in_view), Some(free)) = (self.views.get(view), self.free.get(view)) else { return false };
        self.index.draws(device).all(|(set, amounts)| {
            in_view.layout.sets.get(usize::from(set)).is_some_and(|set| {
                amounts.iter().all(|(counter, amount)| {
                    free.get(set.offset + usize::from(*counter)).is_some_and(|free| amount <= free)
                })
            })
        })
    }

    fn draw(&mut self, view: usize, device: &Device, back: bool) {
        let (Some(in_view), Some(free)) = (self.views.get(view), self.free.get_mut(view)) else { return };
        for (set, amounts) in self.index.draws(device) {
            let Some(set) = in_view.layout.sets.get(usize::from(set)) else { continue };
            for (counter, amount) in amounts {
                if let Some(free) = free.get_mut(set.offset + usize::from(*counter)) {
                    *free = if back { *free + *amount } else { *free - *amount };
                }
            }
        }
    }

    /// Takes a device; returns false and changes nothing if that is not possible.
    pub(super) fn take(
        &mut self,
        claim: usize,
        request: &str,
        alternative: &Alternative<'_>,
        view: usize,
        candidate: &Candidate,
    ) -> bool {
        if !self.is_free(Some(claim), alternative, view, candidate)
            || !self.constrain(claim, request, alternative, view, candidate.position)
        {
            return false;
        }
        let position = candidate.position;
        let Some(device) = self.device(view, position) else { return false };
        let shared_before = self.is_shared(view, position);
        let Some(taken) = self.taken.get_mut(view) else { return false };
        let taken = taken.entry(position).or_default();
        match (&candidate.consumed, alternative.admin) {
            (_, true) => taken.admin_of.push(claim),
            (None, false) => {
                taken.exclusive = true;
                taken.exclusive_of = Some(claim);
            }
            (Some(amounts), false) => {
                taken.shares = taken.shares.saturating_add(1);
                taken.consumed.resize(amounts.len(), Quantity::ZERO);
                for (sum, amount) in taken.consumed.iter_mut().zip(amounts.iter()) {
                    *sum = *sum + *amount;
                }
                taken.time_slices.extend(alternative.time_slice);
            }
        }
        if !alternative.admin && !shared_before {
            self.draw(view, device, false);
        }
        if let Some(results) = self.results.get_mut(claim) {
            *results += 1;
        }
        true
    }

    /// Gives a pick back. Picks are given back in the reverse order.
    pub(super) fn give_back(
        &mut self,
        claim: usize,
        alternative: &Alternative<'_>,
        view: usize,
        pick: &Pick,
    ) {
        let (position, admin) = (pick.position, alternative.admin);
        let Some(device) = self.device(view, position) else { return };
        if let Some(taken) = self.taken.get_mut(view).and_then(|taken| taken.get_mut(&position)) {
            match (&pick.consumed, admin) {
                (_, true) => {
                    taken.admin_of.pop();
                }
                (None, false) => {
                    taken.exclusive = false;
                    taken.exclusive_of = None;
                }
                (Some(amounts), false) => {
                    taken.shares = taken.shares.saturating_sub(1);
                    for (sum, amount) in taken.consumed.iter_mut().zip(amounts.iter()) {
                        *sum = *sum - *amount;
                    }
                    if alternative.time_slice.is_some() {
                        taken.time_slices.pop();
                    }
                }
            }
            if *taken == Taken::default()
                || (taken.shares == 0 && !taken.exclusive && taken.admin_of.is_empty())
            {
                self.taken.get_mut(view).map(|all| all.remove(&position));
            }
        }
        if !admin && !self.is_shared(view, position) {
            self.draw(view, device, true);
        }
        if let Some(results) = self.results.get_mut(claim) {
            *results = results.saturating_sub(1);
        }
        self.unconstrain(claim, pick);
    }

    /// Notes a device's values for the constraints of its claim; returns false and changes nothing if a
    /// constraint is violated.
    fn constrain(
        &mut self,
        claim: usize,
        request: &str,
        alternative: &Alternative<'_>,
        view: usize,
        position: u32,
    ) -> bool {
        if !self.agrees(claim, request, alternative, view, position) {
            return false;
        }
        let (Some(ask), Some(in_view)) = (self.asks.get(claim), self.views.get(view)) else { return false };
        let Some(seen) = self.seen.get_mut(claim) else { return false };
        for (constraint, seen) in ask.constraints.iter().zip(seen.iter_mut()) {
            if constraint.concerns(request, alternative.subrequest.as_deref()) {
                let value = constraint.attribute.and_then(|name| in_view.layout.attribute(position, name));
                seen.values.extend(value);
            }
        }
        true
    }

    fn unconstrain(&mut self, claim: usize, pick: &Pick) {
        let (Some(ask), Some(seen)) = (self.asks.get(claim), self.seen.get_mut(claim)) else { return };
        let Some(request) = ask.requests.get(pick.request) else { return };
        let subrequest = request.alternatives.get(pick.alternative).and_then(|a| a.subrequest.as_deref());
        for (constraint, seen) in ask.constraints.iter().zip(seen.iter_mut()) {
            if constraint.concerns(&request.name, subrequest) {
                seen.values.pop();
            }
        }
    }

    /// Returns how many of these devices could be taken, each alone.
    pub(super) fn free_now<'c>(
        &self,
        devices: impl Iterator<Item = (usize, &'c Vec<Candidate>)>,
        alternative: &Alternative<'_>,
    ) -> usize {
        devices
            .flat_map(|(view, devices)| devices.iter().map(move |candidate| (view, candidate)))
            .filter(|(view, candidate)| candidate.usable && self.is_free(None, alternative, *view, candidate))
            .count()
    }

    /// Returns the amount that the nearest of these devices has too little of; `None` if the amount is not
    /// the reason.
    pub(super) fn lack<'c>(
        &self,
        devices: impl Iterator<Item = (usize, &'c Vec<Candidate>)>,
        alternative: &Alternative<'_>,
    ) -> Option<Lack> {
        let shared = devices
            .flat_map(|(view, devices)| devices.iter().map(move |candidate| (view, candidate)))
            .filter(|(_, candidate)| candidate.usable && candidate.consumed.is_some());
        let lacks = shared.filter_map(|(at, candidate)| {
            let (view, device) = (self.views.get(at)?, self.device(at, candidate.position)?);
            Lack::of_free(self.index, view.pool, (device, candidate.position), alternative)
        });
        lacks.fold(None, |nearest, lack| Lack::nearer(nearest, Some(lack)))
    }

    /// Returns true if a device could be taken: as things are if `now` is true, or else if nothing of its GPU
    /// were held.
    pub(super) fn could_take(
        &self,
        alternative: &Alternative<'_>,
        view: usize,
        candidate: &Candidate,
        now: bool,
    ) -> bool {
        if now {
            return self.is_free(None, alternative, view, candidate);
        }
        let (Some(in_view), Some(device)) = (self.views.get(view), self.device(view, candidate.position))
        else {
            return false;
        };
        let tolerations = alternative.tolerations.as_deref().unwrap_or_default();
        self.index.repelling_taint(in_view.pool, device, tolerations).is_none()
    }

    /// Returns what a device would draw: counter set, counter in the set, and amount. Empty if `now` is true
    /// and the device is shared already.
    pub(super) fn draws_of(&self, view: usize, position: u32, now: bool) -> Vec<(u16, u16, Quantity)> {
        if now && self.is_shared(view, position) {
            return Vec::new();
        }
        let draws = self.device(view, position).into_iter().flat_map(|device| self.index.draws(device));
        draws
            .flat_map(|(set, amounts)| amounts.iter().map(move |(counter, amount)| (set, *counter, *amount)))
            .collect()
    }

    /// Returns true if several requests can have a device.
    pub(super) fn is_shareable(&self, (view, position): (usize, u32)) -> bool {
        self.device(view, position).is_some_and(|device| self.index.shape(device).shareable)
    }

    /// Returns the amounts of a set's counters: the free amounts if `now` is true, else the totals.
    pub(super) fn counters(&self, view: usize, set: u16, now: bool) -> Vec<Quantity> {
        let Some(in_view) = self.views.get(view) else { return Vec::new() };
        let Some(set) = in_view.layout.sets.get(usize::from(set)) else { return Vec::new() };
        if now {
            let free = self.free.get(view).into_iter().flatten();
            free.skip(set.offset).take(set.counters.len()).copied().collect()
        } else {
            set.counters.iter().map(|(_, total)| *total).collect()
        }
    }

    /// Returns true if a device agrees with what was taken for the other requests of its claim. A device that
    /// does not agree will not agree as long as those are kept.
    pub(super) fn agrees(
        &self,
        claim: usize,
        request: &str,
        alternative: &Alternative<'_>,
        view: usize,
        position: u32,
    ) -> bool {
        let (Some(ask), Some(in_view)) = (self.asks.get(claim), self.views.get(view)) else { return false };
        let seen = self.seen.get(claim).map(Vec::as_slice).unwrap_or_default();
        ask.constraints.iter().zip(seen).all(|(constraint, seen)| {
            !constraint.concerns(request, alternative.subrequest.as_deref())
                || constraint
                    .attribute
                    .and_then(|name| in_view.layout.attribute(position, name))
                    .is_some_and(|value| seen.admits(constraint.kind, value))
        })
    }

    /// Returns a key that two devices share only if each can replace the other in everything that is still to
    /// be decided. They have the same place on GPUs that no request and no constraint can tell apart, and the
    /// same parts of these GPUs are taken. `None` if this cannot be said of the device's GPU.
    pub(super) fn equivalence(&mut self, view: usize, position: u32) -> Option<u64> {
        let in_view = self.views.get(view)?;
        let device = self.device(view, position)?;
        let gpu = self.gpu(view, device.gpu).filter(|gpu| gpu.alone)?;
        let kind = self.kind(view, gpu);
        let mut hasher = DefaultHasher::new();
        (view, kind).hash(&mut hasher);
        gpu.devices.iter().position(|other| *other == position).hash(&mut hasher);
        let free = self.free.get(view)?;
        for set in gpu.sets.iter().filter_map(|set| in_view.layout.sets.get(usize::from(*set))) {
            free.get(set.offset..set.offset + set.counters.len()).hash(&mut hasher);
        }
        for (place, of_gpu) in gpu.devices.iter().enumerate() {
            if let Some(taken) = self.taken(view, *of_gpu) {
                (place, taken).hash(&mut hasher);
            }
        }
        Some(hasher.finish())
    }

    /// Returns a hash of the facts about a GPU that do not change during the search.
    fn kind(&mut self, view: usize, gpu: &Gpu) -> u64 {
        if let Some(known) = self.kinds.get(&(view, gpu.number)) {
            return *known;
        }
        let mut hasher = DefaultHasher::new();
        if let Some(in_view) = self.views.get(view) {
            in_view.pool.usage.blocked.contains_key(&gpu.number).hash(&mut hasher);
            for position in &gpu.devices {
                let Some(device) = in_view.layout.devices.get(*position as usize) else { continue };
                (device.shape, device.taints, device.owner).hash(&mut hasher);
                device.draws.map(|draw| draw.map(|draw| draw.amounts)).hash(&mut hasher);
                // The marks stand for what selectors read; constraints read these attributes.
                self.marks.get(view).and_then(|marks| marks.get(*position as usize)).hash(&mut hasher);
                for attribute in self.constrained_attributes() {
                    in_view.layout.attribute(*position, attribute).hash(&mut hasher);
                }
                self.time_slices.get(&(view, device.name)).hash(&mut hasher);
                if let Some(used) = in_view.pool.usage.devices.get(position) {
                    (used.exclusive, used.shares, &used.consumed).hash(&mut hasher);
                }
                for rule in self.index.taint_rules() {
                    let (pool, name) = (self.index.name(in_view.pool.name), self.index.name(device.name));
                    rule.applies(self.index.driver(), pool, name).hash(&mut hasher);
                }
            }
        }
        let kind = hasher.finish();
        self.kinds.insert((view, gpu.number), kind);
        kind
    }

    fn constrained_attributes(&self) -> impl Iterator<Item = crate::snapshot::Sym> + use<'s, 'a> {
        self.asks.iter().flat_map(|ask| ask.constraints.iter()).filter_map(|constraint| constraint.attribute)
    }
}

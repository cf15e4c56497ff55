//! How processes share the time of one GPU.
//!
//! Without MPS a GPU runs one context at a time and switches between those that have work, in turn, after a time
//! slice. This file is that scheduler as arithmetic over shared memory: nobody has to be awake for time to pass.
//! Whoever looks first at a *domain* (a GPU, or a compute instance of a GPU in MIG mode) brings it up to the
//! present ([`Domain::advance`]); what comes out does not depend on who looked, or how often.
//!
//! A *tenant* is one context of one process. Its own GPU time ([`Tenant::served_ns`]) only advances while it is
//! switched in. It states up to which point of its own time it has work without a gap ([`Tenant::set_demand`]), and
//! reads back from its *track*, a ring of corners, at which wall-clock instant it reached any point.
//!
//! The words live in [`Node::compute_words`](Node), all zeroes is the valid empty state, every word is meaningful
//! by itself, and changes are made under the node's lock, which ends with its holder: a process killed between two
//! stores costs at most a time slice of accuracy.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::NodeError;
use crate::layout::COMPUTE_BYTES;
use crate::map::Locked;
use crate::node::Node;

/// GPUs and compute instances that can have work at the same time on one node.
pub const MAX_DOMAINS: usize = 64;
/// Contexts that one GPU or compute instance can hold.
pub const MAX_TENANTS: usize = 48;
/// Corners of a track that are kept to be read; what is older becomes a straight line to its reader.
pub const TRACK_LENGTH: usize = 64;

/// How often processes with work are checked for being alive.
const LIVENESS_INTERVAL_NS: u64 = 20_000_000;
const SHORTEST_SLICE_NS: u64 = 1_000;

/// Words of a domain, before its tenants.
mod domain {
    pub(super) const KEY: usize = 0;
    /// Wall clock up to which the rest is true.
    pub(super) const ADVANCED: usize = 1;
    pub(super) const SLICE: usize = 2;
    pub(super) const SWITCH: usize = 3;
    /// Time in which any tenant was served.
    pub(super) const BUSY: usize = 4;
    pub(super) const CHECKED: usize = 5;
    pub(super) const SLICE_LEFT: usize = 6;
    pub(super) const SWITCH_LEFT: usize = 7;
    /// Index of the tenant that runs or ran last.
    pub(super) const CURRENT: usize = 8;
    /// 1 while it is being served.
    pub(super) const RUNNING: usize = 9;
    pub(super) const HEADER: usize = 16;
}

/// Words of a tenant, before its track.
mod tenant {
    /// Token of its process; 0 for a free entry.
    pub(super) const OWNER: usize = 0;
    /// Its process's place in the node's table.
    pub(super) const SLOT: usize = 1;
    pub(super) const SERVED: usize = 2;
    pub(super) const DEMAND: usize = 3;
    /// Its share of the domain's slice length in percent; 0 is 100.
    pub(super) const SLICE_PERCENT: usize = 4;
    /// Corners ever written.
    pub(super) const CORNERS: usize = 5;
    pub(super) const HEADER: usize = 8;
}

const TENANT_WORDS: usize = tenant::HEADER + 2 * TRACK_LENGTH;
const DOMAIN_WORDS: usize = domain::HEADER + MAX_TENANTS * TENANT_WORDS;
const _: () = assert!(MAX_DOMAINS * DOMAIN_WORDS * 8 <= COMPUTE_BYTES);

static NOTHING: AtomicU64 = AtomicU64::new(0);

/// At `wall_ns` a tenant had received `served_ns` of GPU time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// On the clock of [`crate::now_ns`].
    pub wall_ns: u64,
    /// The tenant's own GPU time.
    pub served_ns: u64,
}

/// What a domain is made with by whoever uses it first.
#[derive(Clone, Copy, Debug)]
pub struct Slices {
    /// How long a tenant runs while others wait.
    pub slice_ns: u64,
    /// Cost of switching from one tenant to another.
    pub switch_ns: u64,
}

impl Default for Slices {
    fn default() -> Self {
        Self { slice_ns: 2_000_000, switch_ns: 0 }
    }
}

/// The key of a whole GPU (`instance` is `None`), or of a compute instance by GPU and compute instance id.
pub fn domain_key(gpu: usize, instance: Option<(u32, u32)>) -> u64 {
    let (gi, ci) = instance.map_or((0, 0), |(gi, ci)| (u64::from(gi) + 1, u64::from(ci) + 1));
    (1 << 63) | ((gpu as u64) << 32) | (gi << 16) | ci
}

/// The compute area with the node's lock held.
pub struct Compute<'n> {
    node: &'n Node,
    state: Locked<'n>,
}

/// A GPU or a compute instance.
#[derive(Clone, Copy)]
pub struct Domain<'a> {
    words: &'a [AtomicU64],
}

/// A context on a domain.
#[derive(Clone, Copy)]
pub struct Tenant<'a> {
    words: &'a [AtomicU64],
}

impl Node {
    /// The shared words; all access is atomic.
    pub(crate) fn compute_words(&self) -> &[AtomicU64] {
        self.map.compute_words()
    }

    /// Takes the node's lock for work on the compute area.
    ///
    /// # Errors
    /// When the lock cannot be had.
    pub fn compute(&self) -> Result<Compute<'_>, NodeError> {
        Ok(Compute { node: self, state: self.lock()? })
    }
}

impl Compute<'_> {
    /// The domain of that key, made on first use; `None` when all are taken.
    pub fn domain(&self, key: u64, slices: Slices, now_ns: u64) -> Option<Domain<'_>> {
        find_domain(self.node.compute_words(), key, slices, now_ns)
    }

    /// The domain of that key, if anyone has used it.
    pub fn existing(&self, key: u64) -> Option<Domain<'_>> {
        let words = self.node.compute_words();
        let mut all = words.chunks_exact(DOMAIN_WORDS).take(MAX_DOMAINS).map(|words| Domain { words });
        all.find(|d| d.get(domain::KEY) == key)
    }

    /// Enters this process as a tenant of `domain`; the index names it from then on. `None` when the domain is full
    /// or the process is not in the node's table ([`Node::attach_process`]).
    pub fn enter(&self, domain: Domain<'_>, slice_percent: u64) -> Option<usize> {
        let slot = self.node.own_slot(&self.state)?;
        let token = self.state.procs.get(slot)?.token;
        domain.enter(token, slot as u64, slice_percent)
    }

    /// Whether that tenant is still this process's (it is not after a reboot of the node).
    pub fn is_mine(&self, tenant: Tenant<'_>) -> bool {
        let mine = self.node.own_slot(&self.state).and_then(|slot| self.state.procs.get(slot));
        mine.is_some_and(|p| p.token == tenant.get(tenant::OWNER))
    }

    /// Takes out tenants whose process is gone, if that was not looked at a moment ago.
    pub fn reap(&self, domain: Domain<'_>, now_ns: u64) {
        if now_ns.saturating_sub(domain.get(domain::CHECKED)) < LIVENESS_INTERVAL_NS {
            return;
        }
        domain.set(domain::CHECKED, now_ns);
        for index in 0..MAX_TENANTS {
            let entry = domain.tenant(index);
            let owner = entry.get(tenant::OWNER);
            if owner != 0
                && !self.alive(owner, usize::try_from(entry.get(tenant::SLOT)).unwrap_or(usize::MAX))
            {
                domain.leave(index);
            }
        }
    }

    fn alive(&self, token: u64, slot: usize) -> bool {
        let known = self.state.procs.get(slot).is_some_and(|p| p.in_use == 1 && p.token == token);
        let own = self.node.own_slot(&self.state) == Some(slot);
        // An error of the kernel's tells nothing about the process.
        known && (own || self.state.slot_holder(slot).map_or(true, |holder| holder.is_some()))
    }
}

fn find_domain(words: &[AtomicU64], key: u64, slices: Slices, now_ns: u64) -> Option<Domain<'_>> {
    let all = || words.chunks_exact(DOMAIN_WORDS).take(MAX_DOMAINS).map(|words| Domain { words });
    if let Some(found) = all().find(|d| d.get(domain::KEY) == key) {
        return Some(found);
    }
    // Instances come and go: an entry that nobody is entered in can be used again.
    let free =
        all().find(|d| d.get(domain::KEY) == 0).or_else(|| all().find(|d| d.tenants().next().is_none()))?;
    for index in 0..domain::HEADER {
        free.set(index, 0);
    }
    free.set(domain::SLICE, slices.slice_ns.max(SHORTEST_SLICE_NS));
    free.set(domain::SWITCH, slices.switch_ns);
    free.set(domain::CURRENT, MAX_TENANTS as u64 - 1);
    free.set(domain::ADVANCED, now_ns);
    free.set(domain::KEY, key);
    Some(free)
}

impl<'a> Domain<'a> {
    fn word(&self, index: usize) -> &'a AtomicU64 {
        self.words.get(index).unwrap_or(&NOTHING)
    }

    fn get(&self, index: usize) -> u64 {
        self.word(index).load(Relaxed)
    }

    fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Relaxed);
    }

    fn add(&self, index: usize, value: u64) {
        self.word(index).fetch_add(value, Relaxed);
    }

    /// That tenant's entry, in use or not.
    pub fn tenant(&self, index: usize) -> Tenant<'a> {
        let start = domain::HEADER + index * TENANT_WORDS;
        Tenant { words: self.words.get(start..start + TENANT_WORDS).unwrap_or_default() }
    }

    /// Wall clock up to which the state is true.
    pub fn advanced_ns(&self) -> u64 {
        self.get(domain::ADVANCED)
    }

    /// Time in which any tenant was served.
    pub fn busy_ns(&self) -> u64 {
        self.get(domain::BUSY)
    }

    /// Changes how long slices are from the next one on.
    pub fn set_slices(&self, slices: Slices) {
        self.set(domain::SLICE, slices.slice_ns.max(SHORTEST_SLICE_NS));
        self.set(domain::SWITCH, slices.switch_ns);
    }

    /// Everyone who is entered, by index.
    pub fn tenants(self) -> impl Iterator<Item = (usize, Tenant<'a>)> {
        (0..MAX_TENANTS).map(move |i| (i, self.tenant(i))).filter(|(_, t)| t.get(tenant::OWNER) != 0)
    }

    /// Whether anyone but `index` has work.
    pub fn others_active(&self, index: usize) -> bool {
        self.tenants().any(|(i, t)| i != index && t.wanted() > 0)
    }

    fn enter(&self, owner: u64, slot: u64, slice_percent: u64) -> Option<usize> {
        let index = (0..MAX_TENANTS).find(|i| self.tenant(*i).get(tenant::OWNER) == 0)?;
        let entry = self.tenant(index);
        // The entry's clock goes on from its former holder's, so that nobody sees it run backwards.
        entry.set(tenant::DEMAND, entry.served_ns());
        entry.set(tenant::SLICE_PERCENT, slice_percent);
        entry.set(tenant::SLOT, slot);
        entry.set(tenant::OWNER, owner);
        Some(index)
    }

    /// Takes a tenant out; the work that it still had is dropped.
    pub fn leave(&self, index: usize) {
        let entry = self.tenant(index);
        entry.set(tenant::DEMAND, entry.served_ns());
        entry.set(tenant::OWNER, 0);
    }

    /// Lets time pass up to `now_ns`: tenants with work are served in turn, a slice each.
    pub fn advance(&self, now_ns: u64) {
        let mut wall = self.get(domain::ADVANCED);
        while wall < now_ns {
            let Some(index) = self.pick() else { break };
            self.switch_to(index, wall);
            let switching = self.get(domain::SWITCH_LEFT).min(now_ns - wall);
            if switching > 0 {
                self.set(domain::SWITCH_LEFT, self.get(domain::SWITCH_LEFT) - switching);
                wall += switching;
                continue;
            }
            let entry = self.tenant(index);
            if self.get(domain::RUNNING) == 0 {
                entry.turn(wall);
                self.set(domain::RUNNING, 1);
            }
            let alone = !self.others_active(index);
            let slice = if alone { u64::MAX } else { self.get(domain::SLICE_LEFT) };
            let run = entry.wanted().min(slice).min(now_ns - wall);
            entry.set(tenant::SERVED, entry.served_ns() + run);
            self.add(domain::BUSY, run);
            self.set(domain::SLICE_LEFT, self.get(domain::SLICE_LEFT).saturating_sub(run));
            wall += run;
            self.set(domain::ADVANCED, wall);
        }
        if self.pick().is_none() {
            self.stop(wall);
        }
        self.set(domain::ADVANCED, wall.max(now_ns));
    }

    /// When tenant `index` will have received `served_ns`, should everybody's demand stay as it is.
    ///
    /// `None` when its demand does not reach that far or the answer is further away than `horizon_ns`.
    pub fn predict(&self, index: usize, served_ns: u64, horizon_ns: u64) -> Option<u64> {
        let start = self.advanced_ns();
        let mine = self.tenant(index);
        if mine.demand_ns() < served_ns {
            return None;
        }
        if mine.served_ns() >= served_ns {
            return Some(start);
        }
        let wanted =
            |i: usize, t: Tenant<'_>| if i == index { served_ns - t.served_ns() } else { t.wanted() };
        let mut queue: std::collections::VecDeque<(usize, u64)> =
            self.tenants().map(|(i, t)| (i, wanted(i, t))).filter(|(_, w)| *w > 0).collect();
        let first = self.pick()?;
        while queue.front()?.0 != first {
            queue.rotate_left(1);
        }
        let going = first == self.current() && self.get(domain::SLICE_LEFT) > 0;
        let mut slice = if going { self.get(domain::SLICE_LEFT) } else { self.slice_of(first) };
        let mut wall = start + self.get(domain::SWITCH_LEFT);
        while wall - start <= horizon_ns {
            let (who, wanted) = queue.pop_front()?;
            let run = if queue.is_empty() { wanted } else { wanted.min(slice) };
            wall += run;
            if wanted > run {
                queue.push_back((who, wanted - run));
            } else if who == index {
                return Some(wall);
            }
            let next = queue.front()?.0;
            slice = self.slice_of(next);
            wall += if next == who { 0 } else { self.get(domain::SWITCH) };
        }
        None
    }

    fn current(&self) -> usize {
        usize::try_from(self.get(domain::CURRENT)).unwrap_or(0).min(MAX_TENANTS - 1)
    }

    fn slice_of(&self, index: usize) -> u64 {
        let percent = match self.tenant(index).get(tenant::SLICE_PERCENT) {
            0 => 100,
            other => other,
        };
        (self.get(domain::SLICE).max(SHORTEST_SLICE_NS).saturating_mul(percent) / 100).max(SHORTEST_SLICE_NS)
    }

    /// Whoever is to be served: the current tenant while it has work and slice, else the next one with work.
    fn pick(&self) -> Option<usize> {
        let current = self.current();
        let has_work = |i: &usize| {
            let entry = self.tenant(*i);
            entry.get(tenant::OWNER) != 0 && entry.wanted() > 0
        };
        if has_work(&current) && (self.get(domain::SLICE_LEFT) > 0 || self.get(domain::SWITCH_LEFT) > 0) {
            return Some(current);
        }
        (current + 1..MAX_TENANTS).chain(0..=current).find(has_work)
    }

    /// Makes `index` the current tenant, with a new slice where it has none left.
    fn switch_to(&self, index: usize, wall_ns: u64) {
        let before = self.current();
        if before == index {
            if self.get(domain::SLICE_LEFT) == 0 {
                self.set(domain::SLICE_LEFT, self.slice_of(index));
            }
            return;
        }
        self.stop(wall_ns);
        self.set(domain::CURRENT, index as u64);
        self.set(domain::SLICE_LEFT, self.slice_of(index));
        self.set(domain::SWITCH_LEFT, self.get(domain::SWITCH));
    }

    fn stop(&self, wall_ns: u64) {
        if self.word(domain::RUNNING).swap(0, Relaxed) == 1 {
            self.tenant(self.current()).turn(wall_ns);
        }
    }
}

impl Tenant<'_> {
    fn word(&self, index: usize) -> &AtomicU64 {
        self.words.get(index).unwrap_or(&NOTHING)
    }

    fn get(&self, index: usize) -> u64 {
        self.word(index).load(Relaxed)
    }

    fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Relaxed);
    }

    /// GPU time received so far.
    pub fn served_ns(&self) -> u64 {
        self.get(tenant::SERVED)
    }

    /// GPU time at which its known work ends.
    pub fn demand_ns(&self) -> u64 {
        self.get(tenant::DEMAND)
    }

    /// States up to which point of its own time there is work. The domain must have been advanced to the present:
    /// what is stated now cannot have been served before.
    pub fn set_demand(&self, demand_ns: u64) {
        self.set(tenant::DEMAND, demand_ns);
    }

    /// Its process's place in the node's table.
    pub fn process_slot(&self) -> usize {
        usize::try_from(self.get(tenant::SLOT)).unwrap_or(usize::MAX)
    }

    /// The corners from number `from` on that are still kept, oldest first, and the number to go on from.
    pub fn track(&self, from: u64) -> (Vec<Point>, u64) {
        let end = self.get(tenant::CORNERS);
        let start = from.max(end.saturating_sub(TRACK_LENGTH as u64));
        let points = (start..end)
            .map(|number| {
                let at = corner(number);
                Point { wall_ns: self.get(at), served_ns: self.get(at + 1) }
            })
            .collect();
        (points, end)
    }

    fn wanted(&self) -> u64 {
        self.demand_ns().saturating_sub(self.served_ns())
    }

    /// Writes a corner: service starts or stops here.
    fn turn(&self, wall_ns: u64) {
        let number = self.get(tenant::CORNERS);
        let at = corner(number);
        self.set(at, wall_ns);
        self.set(at + 1, self.served_ns());
        self.set(tenant::CORNERS, number + 1);
    }
}

fn corner(number: u64) -> usize {
    let place = usize::try_from(number % TRACK_LENGTH as u64).unwrap_or(0);
    tenant::HEADER + 2 * place
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn area() -> Vec<AtomicU64> {
        (0..COMPUTE_BYTES / 8).map(|_| AtomicU64::new(0)).collect()
    }

    fn gpu(words: &[AtomicU64], switch_ns: u64) -> Domain<'_> {
        find_domain(words, domain_key(0, None), Slices { slice_ns: 2 * MS, switch_ns }, 0).expect("room")
    }

    #[test]
    fn a_tenant_alone_is_served_without_a_break() {
        let words = area();
        let gpu = gpu(&words, 0);
        let a = gpu.enter(1, 0, 0).unwrap();
        gpu.tenant(a).set_demand(50 * MS);
        gpu.advance(20 * MS);
        assert_eq!(gpu.tenant(a).served_ns(), 20 * MS);
        assert_eq!(gpu.predict(a, 50 * MS, u64::MAX / 2), Some(50 * MS));
        gpu.advance(80 * MS);
        assert_eq!(gpu.tenant(a).served_ns(), 50 * MS);
        assert_eq!(gpu.busy_ns(), 50 * MS);
        let corners = [Point { wall_ns: 0, served_ns: 0 }, Point { wall_ns: 50 * MS, served_ns: 50 * MS }];
        assert_eq!(gpu.tenant(a).track(0), (corners.to_vec(), 2));
    }

    #[test]
    fn two_tenants_take_turns_a_slice_each() {
        let words = area();
        let gpu = gpu(&words, 0);
        let (a, b) = (gpu.enter(1, 0, 0).unwrap(), gpu.enter(2, 1, 0).unwrap());
        gpu.tenant(a).set_demand(3 * MS);
        gpu.tenant(b).set_demand(10 * MS);
        // a 0-2, b 2-4, a 4-5, b from 5 on.
        assert_eq!(gpu.predict(a, 3 * MS, u64::MAX / 2), Some(5 * MS));
        assert_eq!(gpu.predict(b, 10 * MS, u64::MAX / 2), Some(13 * MS));
        gpu.advance(20 * MS);
        let wall: Vec<u64> = gpu.tenant(a).track(0).0.iter().map(|p| p.wall_ns / MS).collect();
        assert_eq!(wall, [0, 2, 4, 5]);
        let wall: Vec<u64> = gpu.tenant(b).track(0).0.iter().map(|p| p.wall_ns / MS).collect();
        assert_eq!(wall, [2, 4, 5, 13]);
    }

    #[test]
    fn the_result_does_not_depend_on_how_often_time_is_advanced() {
        let finish = |step: u64| {
            let words = area();
            let gpu = gpu(&words, 50_000);
            let ids: Vec<usize> = (0..3).map(|i| gpu.enter(i + 1, i, 0).unwrap()).collect();
            for (id, ms) in ids.iter().zip([7, 11, 2]) {
                gpu.tenant(*id).set_demand(ms * MS);
            }
            let mut now = 0;
            while now < 40 * MS {
                now += step;
                gpu.advance(now);
            }
            ids.iter().map(|id| gpu.tenant(*id).track(0).0).collect::<Vec<_>>()
        };
        let coarse = finish(40 * MS);
        assert_eq!(finish(10_000), coarse);
        assert_eq!(finish(777_777), coarse);
        assert_eq!(coarse[1].last().map(|p| p.served_ns), Some(11 * MS));
    }

    #[test]
    fn a_switch_costs_its_time_and_serves_nobody() {
        let words = area();
        let gpu = gpu(&words, MS);
        let (a, b) = (gpu.enter(1, 0, 0).unwrap(), gpu.enter(2, 1, 0).unwrap());
        gpu.tenant(a).set_demand(2 * MS);
        gpu.tenant(b).set_demand(2 * MS);
        gpu.advance(10 * MS);
        // Switching in the first one costs as well: 1 + 2 + 1 + 2.
        assert_eq!(gpu.tenant(b).track(0).0.last().map(|p| p.wall_ns), Some(6 * MS));
        assert_eq!(gpu.busy_ns(), 4 * MS);
    }

    #[test]
    fn a_longer_slice_is_a_larger_share() {
        let words = area();
        let gpu = gpu(&words, 0);
        let (a, b) = (gpu.enter(1, 0, 300).unwrap(), gpu.enter(2, 1, 100).unwrap());
        gpu.tenant(a).set_demand(1_000 * MS);
        gpu.tenant(b).set_demand(1_000 * MS);
        gpu.advance(400 * MS);
        assert_eq!((gpu.tenant(a).served_ns(), gpu.tenant(b).served_ns()), (300 * MS, 100 * MS));
    }

    #[test]
    fn slices_can_be_changed_while_tenants_run() {
        let words = area();
        let gpu = gpu(&words, 0);
        let (a, b) = (gpu.enter(1, 0, 0).unwrap(), gpu.enter(2, 1, 0).unwrap());
        gpu.tenant(a).set_demand(1_000 * MS);
        gpu.tenant(b).set_demand(1_000 * MS);
        gpu.advance(4 * MS);
        gpu.set_slices(Slices { slice_ns: 10 * MS, switch_ns: 0 });
        gpu.advance(14 * MS);
        assert_eq!((gpu.tenant(a).served_ns(), gpu.tenant(b).served_ns()), (12 * MS, 2 * MS));
    }

    #[test]
    fn work_that_comes_late_is_not_served_before_it_came() {
        let words = area();
        let gpu = gpu(&words, 0);
        let a = gpu.enter(1, 0, 0).unwrap();
        gpu.advance(5 * MS);
        gpu.tenant(a).set_demand(MS);
        gpu.advance(7 * MS);
        let track = gpu.tenant(a).track(0).0;
        assert_eq!(track[0], Point { wall_ns: 5 * MS, served_ns: 0 });
        assert_eq!(track[1], Point { wall_ns: 6 * MS, served_ns: MS });
    }

    #[test]
    fn who_looks_with_an_old_clock_sees_what_was_and_when_that_was() {
        let words = area();
        let gpu = gpu(&words, 0);
        let a = gpu.enter(1, 0, 0).unwrap();
        gpu.tenant(a).set_demand(100 * MS);
        gpu.advance(10 * MS);
        gpu.advance(5 * MS);
        assert_eq!((gpu.advanced_ns(), gpu.tenant(a).served_ns()), (10 * MS, 10 * MS));
    }

    #[test]
    fn a_tenant_that_leaves_makes_room_and_stops_being_served() {
        let words = area();
        let gpu = gpu(&words, 0);
        let a = gpu.enter(1, 0, 0).unwrap();
        let b = gpu.enter(2, 1, 0).unwrap();
        gpu.tenant(a).set_demand(100 * MS);
        gpu.tenant(b).set_demand(100 * MS);
        gpu.advance(MS);
        gpu.leave(a);
        gpu.advance(51 * MS);
        assert_eq!(gpu.tenant(b).served_ns(), 50 * MS);
        assert_eq!(gpu.enter(3, 2, 0), Some(a));
        assert_eq!(gpu.tenant(a).demand_ns(), gpu.tenant(a).served_ns());
    }

    #[test]
    fn an_overrun_track_keeps_its_newest_corners() {
        let words = area();
        let gpu = gpu(&words, 0);
        let (a, b) = (gpu.enter(1, 0, 0).unwrap(), gpu.enter(2, 1, 0).unwrap());
        gpu.tenant(a).set_demand(1_000 * MS);
        gpu.tenant(b).set_demand(1_000 * MS);
        gpu.advance(1_000 * MS);
        let (points, end) = gpu.tenant(a).track(0);
        assert_eq!(points.len(), TRACK_LENGTH);
        assert!(end > TRACK_LENGTH as u64);
        assert!(points.windows(2).all(|w| w[0].wall_ns < w[1].wall_ns && w[0].served_ns <= w[1].served_ns));
    }

    #[test]
    fn an_unused_domain_is_given_to_another_key() {
        let words = area();
        for gpu in 0..MAX_DOMAINS {
            assert!(find_domain(&words, domain_key(gpu, None), Slices::default(), 0).is_some());
        }
        let first = find_domain(&words, domain_key(0, None), Slices::default(), 0).unwrap();
        first.enter(1, 0, 0).unwrap();
        let extra = find_domain(&words, domain_key(900, Some((1, 0))), Slices::default(), 0).unwrap();
        assert!(extra.tenants().next().is_none());
        assert_eq!(
            find_domain(&words, domain_key(0, None), Slices::default(), 0).unwrap().tenants().count(),
            1
        );
    }
}

//! Tenants on one GPU: what they launch, and how the limiter holds them to their quotas.

use crate::gpu::Gpu;
use crate::rivals::{self, Board, Rival, Rule};
pub use crate::setting::{Death, Devices, Load, Moment, Tenant, VARIANTS, Variant};
use crate::waits::{Sleep, Waits};
use aliquot_arbiter::{Arbiter, Share, Stretch, TICK_NS};
use aliquot_quota::gate::{self, Compute, Entrance, LOG_LENGTH, Mark, Terms};
use aliquot_quota::grant::Grant;
use aliquot_quota::lease::{self, Lease, Purse};
use aliquot_quota::meter::{ASSUMED_SLICE_NS, EVENTS, Launch, Meter, Others, Seen};
use aliquot_quota::own::Own;
use aliquot_quota::pacer::{self, Answer, Ask, Host, Reached, Step};
use aliquot_quota::till::Till;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering::Relaxed;

/// The number of launches that a stream takes before the next one blocks.
const QUEUE: usize = 1024;
/// The time by which a sleeper wakes late, in nanoseconds.
const WAKE_NS: u64 = 60_000;
/// Host time of a driver call, in nanoseconds.
const CALL_NS: u64 = 1_000;

/// The node agent's place in the agenda.
const AGENT: usize = usize::MAX;

/// A share's region and grant.
struct Held {
    tenant: Tenant,
    compute: Box<Compute>,
    /// The number of log entries that the agent has read.
    logged: u64,
    grant: Grant,
    /// Another limiter, if one limits the share in place of this one.
    rival: Cell<Option<Rival>>,
    /// The share's processes in the world, by slot.
    processes: Vec<usize>,
}

struct Process {
    share: usize,
    slot: usize,
    meter: RefCell<Box<Meter>>,
    till: Box<Till>,
    own: Own,
    is_looking: Cell<bool>,
    /// Host time that the limiter's calls took in the present step.
    spent_ns: Cell<u64>,
    launches: u64,
    random: u64,
    is_pending: Cell<bool>,
    is_dead: bool,
    sleep: Option<Sleep>,
}

impl Process {
    fn new(share: usize, slot: usize, random: u64) -> Self {
        Self {
            share,
            slot,
            meter: RefCell::new(Box::new(Meter::new())),
            till: Box::new(Till::new()),
            own: Own::new(),
            is_looking: Cell::new(false),
            spent_ns: Cell::new(0),
            launches: 0,
            random,
            is_pending: Cell::new(false),
            is_dead: false,
            sleep: None,
        }
    }
}

impl Held {
    /// Returns the share as the agent sees it.
    fn share(&mut self, at: usize, processes: &[Process]) -> Share {
        let compute = &self.compute;
        let logged = compute.logged.load(Relaxed);
        let stretch = |number: u64| {
            let entry = compute.log.get(number as usize % LOG_LENGTH)?;
            let mark = Mark::of(entry.mark.load(Relaxed));
            Some(Stretch {
                slot: mark.slot.into(),
                key: mark.key,
                is_sure: mark.is_sure,
                is_borrowed: mark.is_borrowed,
                start_ns: entry.start_ns.load(Relaxed),
                end_ns: entry.end_ns.load(Relaxed),
                taken_ns: entry.taken_ns.load(Relaxed),
            })
        };
        let first = self.logged.max(logged.saturating_sub(LOG_LENGTH as u64));
        self.logged = logged;
        let living = self.processes.iter().filter_map(|at| processes.get(*at)).filter(|p| !p.is_dead);
        Share {
            id: at.to_string(),
            percent: self.tenant.percent,
            is_soft: self.tenant.is_soft,
            priority: self.tenant.priority,
            charged_ns: compute.charged_ns.load(Relaxed),
            borrowed_ns: compute.borrowed_ns.load(Relaxed),
            leased_ns: compute.leased_ns.load(Relaxed),
            delayed: compute.delayed.load(Relaxed),
            stretches: (first..logged).filter_map(stretch).collect(),
            pending: living.filter(|p| p.is_pending.get()).map(|p| p.slot as u64).collect(),
        }
    }

    /// Returns the GPU time of all processes of the share, in nanoseconds.
    fn used_ns(&self, gpu: &Gpu) -> u64 {
        self.processes.iter().map(|at| gpu.used_ns(*at)).sum()
    }
}

/// The whole state of one run.
pub struct World {
    gpu: RefCell<Gpu>,
    variant: Variant,
    shares: Vec<Held>,
    processes: Vec<Process>,
    arbiter: Arbiter,
    waits: Waits,
    start_ns: u64,
    lie: Option<Lie>,
}

struct View<'a> {
    world: &'a World,
    at: usize,
    share: &'a Held,
    process: &'a Process,
}

impl View<'_> {
    fn spend(&self) {
        self.process.spent_ns.set(self.process.spent_ns.get() + CALL_NS);
    }
}

impl Host for View<'_> {
    fn now_ns(&self) -> u64 {
        self.world.gpu.borrow().now_ns()
    }

    fn meter<T>(&self, part: impl FnOnce(&mut Meter) -> T) -> T {
        part(&mut self.process.meter.borrow_mut())
    }

    fn till(&self) -> &Till {
        &self.process.till
    }

    fn purse(&self) -> Option<&Purse> {
        self.share.compute.purses.get(self.process.slot)
    }

    fn allowance_ns(&self) -> u64 {
        lease::allowance_ns(self.share.processes.len())
    }

    fn account(&self, is_borrowed: bool) -> u32 {
        is_borrowed.into()
    }

    fn give_back(&self, lease: Lease) {
        gate::give_back(&self.share.compute, self.now_ns(), lease, self.share.tenant.percent);
    }

    fn give_back_own(&self, lease: Lease) {
        self.process.own.give_back(self.now_ns(), lease, self.share.tenant.percent);
    }

    fn admit(&self, now_ns: u64, ask: Ask) -> Answer {
        let grant = &self.share.grant;
        let terms = Terms {
            percent: self.share.tenant.percent,
            borrow_percent: if grant.valid_until_ns > now_ns { grant.borrow_percent } else { 0 },
        };
        let grant = Grant { borrow_percent: terms.borrow_percent, ..*grant };
        gate::true_up(&self.share.compute, &self.process.own, now_ns, &grant, terms.percent);
        let ask = Ask { slot: self.process.slot, ..ask };
        match gate::enter(&self.share.compute, &self.process.own, now_ns, ask, terms) {
            Entrance::Own(ns) => Answer::Go(0, Lease { ns, is_borrowed: false }),
            Entrance::Borrowed(ns) => Answer::Go(1, Lease { ns, is_borrowed: true }),
            Entrance::Wait(until) => Answer::Wait(until),
        }
    }

    fn correct(&self, account: u32, delta_ns: i64) {
        let (compute, now) = (&self.share.compute, self.now_ns());
        if account == 1 {
            self.process.own.correct_borrowed(now, delta_ns, self.share.grant.borrow_percent);
            gate::correct_borrowed(compute, now, delta_ns, self.share.grant.borrow_percent);
        } else {
            self.process.own.correct(now, delta_ns, self.share.tenant.percent);
            gate::correct(compute, now, delta_ns, self.share.tenant.percent);
        }
    }

    fn untimed(&self, _: u32, wall_ns: u64) {
        self.process.own.untimed(wall_ns);
    }

    fn log(&self, account: u32, seen: &Seen) {
        gate::log(&self.share.compute, &self.process.own, self.process.slot as u16, account == 1, seen);
    }

    fn is_pending(&self, pending: bool) {
        self.process.is_pending.set(pending);
    }

    /// Returns what is known of others, as in the limiter's core, which counts the processes that NVML lists.
    fn others(&self) -> Others {
        let grant = &self.share.grant;
        let is_valid = grant.own_permille > 0 && grant.valid_until_ns > self.now_ns();
        match is_valid.then(|| u32::from(grant.own_permille)) {
            None if self.world.processes.iter().filter(|process| !process.is_dead).count() <= 1 => {
                Others::NONE
            }
            None => Others { own_permille: None, slice_ns: ASSUMED_SLICE_NS },
            own_permille => Others { own_permille, slice_ns: u64::from(grant.slice_us) * 1000 },
        }
    }

    fn record(&self, event: usize, stream: u64) -> bool {
        self.spend();
        self.world.gpu.borrow_mut().record(self.at, stream as usize, event);
        true
    }

    fn reached(&self, event: usize) -> Reached {
        self.spend();
        if self.world.gpu.borrow().event(self.at, event).is_some() { Reached::Yes } else { Reached::No }
    }

    fn between(&self, from: usize, to: usize) -> Option<i64> {
        self.spend();
        let gpu = self.world.gpu.borrow();
        let step = self.world.variant.resolution_ns.max(1);
        let at = |event| Some((gpu.event(self.at, event)? / step * step) as i64);
        let between = at(to)? - at(from)?;
        Some(between + if between > 0 { self.world.variant.event_ns as i64 } else { 0 })
    }

    fn may_look(&self) -> bool {
        !self.process.is_looking.replace(true)
    }

    fn has_looked(&self) {
        self.process.is_looking.set(false);
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// GPU time of each tenant in each window, as a part of the window.
    pub windows: Vec<Vec<f64>>,
    /// GPU time of each process of each tenant in all windows, in nanoseconds.
    pub processes: Vec<Vec<u64>>,
    /// The waits at the gate.
    pub waits: Waits,
}

/// Runs tenants for so many windows of `window_ns`, from their first launch on.
pub fn run(variant: Variant, tenants: &[Tenant], window_ns: u64, windows: usize, seed: u64) -> Outcome {
    play(World::new(variant, tenants, seed), tenants, window_ns, windows)
}

/// A function that writes something into a share's region, at a time.
pub type Lie = fn(&Compute, u64);

/// Does what [`run`] does while somebody writes into the first share's region at every step.
pub fn run_beside(
    lie: Lie,
    variant: Variant,
    tenants: &[Tenant],
    window_ns: u64,
    windows: usize,
    seed: u64,
) -> Outcome {
    let world = World { lie: Some(lie), ..World::new(variant, tenants, seed) };
    play(world, tenants, window_ns, windows)
}

/// Does what [`run`] does with another limiter, on a board as that limiter sees it.
pub fn run_rival(
    (rule, board): (Rule, Board),
    variant: Variant,
    tenants: &[Tenant],
    window_ns: u64,
    windows: usize,
    seed: u64,
) -> Outcome {
    let mut world = World::new(variant, tenants, seed);
    for share in &mut world.shares {
        share.rival.set(Some(Rival::new(rule, board, share.tenant.percent)));
    }
    play(world, tenants, window_ns, windows)
}

fn play(mut world: World, tenants: &[Tenant], window_ns: u64, windows: usize) -> Outcome {
    let start = world.start_ns;
    // The process that acts next, in order of time.
    let first = |(at, process): (usize, &Process)| {
        let share = tenants.get(process.share)?;
        Some(Reverse((start + share.load.start_ns, at)))
    };
    let mut agenda: BinaryHeap<Reverse<(u64, usize)>> =
        world.processes.iter().enumerate().filter_map(first).collect();
    agenda.push(Reverse((start, AGENT)));
    let mut outcome = Outcome { windows: Vec::new(), processes: Vec::new(), waits: Waits::default() };
    let mut before = vec![0; tenants.len()];
    for window in 1..=windows as u64 {
        let end = start + window * window_ns;
        while let Some(Reverse((time, at))) = agenda.peek().copied().filter(|Reverse((time, _))| *time < end)
        {
            agenda.pop();
            world.pass(time);
            if let (Some(lie), Some(share)) = (world.lie, world.shares.first()) {
                lie(&share.compute, time);
            }
            let next = if at == AGENT { world.tick(time) } else { world.act(at) };
            world.note_gates();
            agenda.push(Reverse((next, at)));
        }
        world.pass(end);
        let used = world.shares.iter().map(|share| share.used_ns(&world.gpu.borrow()));
        let shares = used
            .zip(&mut before)
            .map(|(used, before)| (used - std::mem::replace(before, used)) as f64 / window_ns as f64);
        outcome.windows.push(shares.collect());
    }
    let gpu = world.gpu.borrow();
    let used = |share: &Held| share.processes.iter().map(|at| gpu.used_ns(*at)).collect();
    outcome.processes = world.shares.iter().map(used).collect();
    outcome.waits = world.waits;
    drop(gpu);
    outcome
}

impl World {
    fn new(variant: Variant, tenants: &[Tenant], seed: u64) -> Self {
        let (mut shares, mut processes) = (Vec::new(), Vec::new());
        for (at, tenant) in tenants.iter().enumerate() {
            let first = processes.len();
            for slot in 0..tenant.load.processes {
                let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (processes.len() as u64 + 1);
                processes.push(Process::new(at, slot, random));
            }
            shares.push(Held {
                tenant: *tenant,
                compute: Box::new(Compute::new()),
                logged: 0,
                grant: Grant::default(),
                rival: Cell::new(None),
                processes: (first..processes.len()).collect(),
            });
        }
        let streams = tenants.iter().map(|tenant| tenant.load.streams).max().unwrap_or(1);
        let gpu = Gpu::new(variant.slices, processes.len(), streams, EVENTS);
        Self {
            start_ns: gpu.now_ns(),
            gpu: RefCell::new(gpu),
            variant,
            shares,
            processes,
            arbiter: Arbiter::with_slices((variant.told_ns / 1000) as u32),
            waits: Waits::default(),
            lie: None,
        }
    }

    /// Lets time pass, in which nobody does anything.
    fn pass(&mut self, until_ns: u64) {
        for process in &mut self.processes {
            if let (Some(sleep), Some(share)) = (&mut process.sleep, self.shares.get(process.share)) {
                sleep.pass(until_ns, share.compute.paid_until_ns.load(Relaxed));
            }
        }
        let gpu = self.gpu.get_mut();
        while gpu.now_ns() < until_ns {
            gpu.advance(until_ns);
        }
    }

    /// Notes at the waiting processes that some process has acted.
    fn note_gates(&mut self) {
        let now = self.gpu.get_mut().now_ns();
        for process in &mut self.processes {
            if let (Some(sleep), Some(share)) = (&mut process.sleep, self.shares.get(process.share)) {
                sleep.note(now, share.compute.paid_until_ns.load(Relaxed));
            }
        }
    }

    /// Lets the node agent read the regions and write the grants, or other limiters look at utilisation.
    /// Returns the time of the next tick.
    fn tick(&mut self, now_ns: u64) -> u64 {
        if self.shares.iter().any(|share| share.rival.get().is_some()) {
            for share in &self.shares {
                let used_ns = share.used_ns(&self.gpu.borrow());
                share.rival.set(share.rival.get().map(|rival| rival.tick(now_ns, used_ns)));
            }
            return now_ns + rivals::PERIOD_NS;
        }
        let processes = &self.processes;
        let living = |share: &Held| {
            let all = share.processes.iter().filter_map(|at| processes.get(*at));
            all.filter(|process| !process.is_dead).count()
        };
        if !aliquot_arbiter::is_needed(self.shares.iter().map(|share| (share.tenant.is_soft, living(share))))
        {
            return now_ns + TICK_NS;
        }
        let shares: Vec<Share> =
            self.shares.iter_mut().enumerate().map(|(at, share)| share.share(at, processes)).collect();
        let grants = self.arbiter.tick(now_ns, &shares);
        for (share, grant) in self.shares.iter_mut().zip(grants) {
            share.grant = grant;
        }
        now_ns + TICK_NS
    }

    /// Kills a process, whose kernels run to their ends; it never acts again.
    fn kill(&mut self, at: usize) -> u64 {
        if let Some(process) = self.processes.get_mut(at) {
            process.is_dead = true;
            process.sleep = None;
        }
        u64::MAX
    }

    /// Makes one step of a process's thread. Returns the time at which it acts again.
    fn act(&mut self, at: usize) -> u64 {
        let now = self.gpu.borrow().now_ns();
        if let Some(sleep) = self.processes.get_mut(at).and_then(|process| process.sleep.take()) {
            self.waits.add(&sleep, now);
        }
        let Some(process) = self.processes.get(at) else { return u64::MAX };
        let Some(share) = self.shares.get(process.share) else { return u64::MAX };
        let load = share.tenant.load;
        let is_due = |death: &Death| process.slot == 0 && now >= self.start_ns + death.from_ns;
        let dies = load.death.filter(is_due).map(|death| death.moment);
        let stream = (process.launches % load.streams.max(1) as u64) as usize;
        let depth = self.gpu.borrow().depth(at, stream);
        let shortest = load.kernels_ns.iter().copied().filter(|k| *k > 0).min().unwrap_or(1000);
        if depth >= QUEUE || (load.waits && depth > 0) {
            return now + (shortest / 4).clamp(2_000, 1_000_000);
        }
        let lengths: Vec<u64> = load.kernels_ns.iter().copied().filter(|k| *k > 0).collect();
        let which = (process.launches / load.streams.max(1) as u64) as usize % lengths.len().max(1);
        let base = lengths.get(which).copied().unwrap_or(1000);
        let launch = Launch {
            key: base << 8 | 1,
            context: 1,
            stream: stream as u64,
            thread: 1,
            is_thread_stream: false,
            is_delicate: false,
        };
        process.spent_ns.set(0);
        let cell = Till::cell(1);
        let view = View { world: self, at, share, process };
        let ticket = if let Some(rival) = share.rival.get() {
            let Some(rival) = rival.launch(base) else { return now + rivals::RETRY_NS + WAKE_NS };
            share.rival.set(Some(rival));
            None
        } else if view.purse().is_some_and(|purse| process.till.pays(purse, cell, launch.key)) {
            None
        } else {
            match pacer::before(&view, cell, &launch, true) {
                Step::Wait(until) => {
                    share.compute.delayed.fetch_add(1, Relaxed);
                    if dies == Some(Moment::InLine) {
                        return self.kill(at);
                    }
                    if let Some(process) = self.processes.get_mut(at) {
                        process.sleep = Some(Sleep::new(now));
                    }
                    return until.max(now) + WAKE_NS;
                }
                Step::Go(_) if dies == Some(Moment::Admitted) => return self.kill(at),
                Step::Go(ticket) => Some(ticket),
                Step::Free => None,
            }
        };
        let mut state = process.random;
        for node in 0..load.nodes {
            let mut gpu = self.gpu.borrow_mut();
            if node > 0 && load.gap_ns > 0 {
                gpu.idle(at, stream, load.gap_ns);
            }
            gpu.launch(at, stream, load.length(base, &mut state), load.width);
        }
        if let Some(ticket) = ticket {
            pacer::after(&view, &launch, &ticket, true);
        }
        let spent = process.spent_ns.get();
        let Some(process) = self.processes.get_mut(at) else { return u64::MAX };
        process.random = state;
        process.launches += 1;
        let pause =
            if load.burst > 0 && process.launches.is_multiple_of(load.burst) { load.pause_ns } else { 0 };
        now + 2_000 + spent + pause
    }
}

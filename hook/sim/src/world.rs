//! Tenants on one GPU: what they launch, and how the limiter holds them.

use crate::gpu::{Gpu, Slices};
use aliquot_arbiter::{Arbiter, Share, Stretch, TICK_NS};
use aliquot_quota::gate::{self, Compute, Entrance, LOG_LENGTH, Mark, Terms};
use aliquot_quota::grant::Grant;
use aliquot_quota::meter::{EVENTS, Launch, Meter, Others, Seen};
use aliquot_quota::pacer::{self, Answer, Ask, Host, LEASE_NS, Reached, Step};
use aliquot_quota::till::Till;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering::Relaxed;

/// Launches that a stream takes before the next one blocks.
const QUEUE: usize = 1024;
/// How late a sleeper wakes.
const WAKE_NS: u64 = 60_000;
/// Host time of a call of the driver.
const CALL_NS: u64 = 1_000;

/// The node agent's place in the agenda.
const AGENT: usize = usize::MAX;

/// What a device is like.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// For reports.
    pub name: &'static str,
    /// Time slices.
    pub slices: Slices,
    /// Steps of event times.
    pub resolution_ns: u64,
    /// What a pair of events adds to the time between them.
    pub event_ns: u64,
}

/// The variants that every figure is the worst of. All parameters are assumed.
pub const VARIANTS: [Variant; 3] = [
    Variant {
        name: "2 ms slices",
        slices: Slices { slice_ns: 2_000_000, switch_ns: 0 },
        resolution_ns: 500,
        event_ns: 0,
    },
    Variant {
        name: "1 ms slices, slow events",
        slices: Slices { slice_ns: 1_000_000, switch_ns: 5_000 },
        resolution_ns: 1_000,
        event_ns: 1_000,
    },
    Variant {
        name: "0.3 ms slices",
        slices: Slices { slice_ns: 300_000, switch_ns: 1_000 },
        resolution_ns: 500,
        event_ns: 500,
    },
];

/// What a tenant does.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Kernels' lengths, launched in turn; zeros are left out.
    pub kernels_ns: [u64; 3],
    /// Random part of each, in percent to either side.
    pub jitter_percent: u64,
    /// Streams, used in turn.
    pub streams: usize,
    /// Part of the GPU that a kernel fills, in thousandths.
    pub width: u32,
    /// Launches between pauses of `pause_ns`; 0 = never.
    pub burst: u64,
    /// Host time between bursts.
    pub pause_ns: u64,
    /// Waits for each kernel before the next launch.
    pub waits: bool,
    /// When the first launch comes, from the start of the run.
    pub start_ns: u64,
}

impl Load {
    /// Kernels of one length on one stream, as fast as they go.
    pub fn of(kernel_ns: u64) -> Self {
        Self {
            kernels_ns: [kernel_ns, 0, 0],
            jitter_percent: 5,
            streams: 1,
            width: crate::gpu::WHOLE,
            burst: 0,
            pause_ns: 0,
            waits: false,
            start_ns: 0,
        }
    }

    /// Longest kernel.
    pub fn longest_ns(&self) -> u64 {
        self.kernels_ns.iter().copied().max().unwrap_or(0)
    }
}

/// A share and what runs in it.
#[derive(Clone, Copy, Debug)]
pub struct Tenant {
    /// Percent of the GPU.
    pub percent: u8,
    /// Its only process.
    pub load: Load,
    /// Whether it may borrow.
    pub is_soft: bool,
    /// Orders borrowers.
    pub priority: i8,
}

struct Process {
    tenant: Tenant,
    compute: Box<Compute>,
    meter: RefCell<Box<Meter>>,
    till: Box<Till>,
    is_looking: Cell<bool>,
    /// Host time that the limiter's calls took in the present step.
    spent_ns: Cell<u64>,
    launches: u64,
    random: u64,
    /// Entries of the log that the agent has read.
    logged: u64,
    is_pending: Cell<bool>,
    grant: Grant,
}

impl Process {
    /// What the agent sees of it.
    fn share(&mut self, at: usize) -> Share {
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
            pending: if self.is_pending.get() { vec![0] } else { Vec::new() },
        }
    }
}

/// Everything of one run.
pub struct World {
    gpu: RefCell<Gpu>,
    variant: Variant,
    processes: Vec<Process>,
    arbiter: Arbiter,
}

struct View<'a> {
    world: &'a World,
    at: usize,
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

    fn lease_ns(&self) -> u64 {
        LEASE_NS
    }

    fn admit(&self, now_ns: u64, ask: Ask) -> Answer {
        let grant = &self.process.grant;
        let terms = Terms {
            percent: self.process.tenant.percent,
            borrow_percent: if grant.valid_until_ns > now_ns { grant.borrow_percent } else { 0 },
        };
        let grant = Grant { borrow_percent: terms.borrow_percent, ..*grant };
        gate::true_up(&self.process.compute, now_ns, &grant, terms.percent);
        match gate::enter(&self.process.compute, now_ns, ask, terms) {
            Entrance::Own => Answer::Go(0),
            Entrance::Borrowed => Answer::Go(1),
            Entrance::Wait(until) => Answer::Wait(until),
        }
    }

    fn correct(&self, account: u32, delta_ns: i64) {
        let (compute, now) = (&self.process.compute, self.now_ns());
        if account == 1 {
            gate::correct_borrowed(compute, now, delta_ns, self.process.grant.borrow_percent);
        } else {
            gate::correct(compute, now, delta_ns, self.process.tenant.percent);
        }
    }

    fn log(&self, account: u32, seen: &Seen) {
        gate::log(&self.process.compute, 0, account == 1, seen);
    }

    fn is_pending(&self, pending: bool) {
        self.process.is_pending.set(pending);
    }

    fn others(&self) -> Others {
        let grant = &self.process.grant;
        Others {
            own_permille: Some(u32::from(grant.own_permille)).filter(|own| *own > 0),
            slice_ns: u64::from(grant.slice_us) * 1000,
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

/// What came out of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// GPU time of each tenant in each window, as a part of the window.
    pub windows: Vec<Vec<f64>>,
}

/// Runs tenants for so many windows of `window_ns`, from their first launch on.
pub fn run(variant: Variant, tenants: &[Tenant], window_ns: u64, windows: usize, seed: u64) -> Outcome {
    let streams = tenants.iter().map(|tenant| tenant.load.streams).max().unwrap_or(1);
    let processes = tenants.iter().enumerate().map(|(at, tenant)| Process {
        tenant: *tenant,
        compute: Box::new(Compute::new()),
        meter: RefCell::new(Box::new(Meter::new())),
        till: Box::new(Till::new()),
        is_looking: Cell::new(false),
        spent_ns: Cell::new(0),
        launches: 0,
        logged: 0,
        is_pending: Cell::new(false),
        grant: Grant::default(),
        random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (at as u64 + 1),
    });
    let mut world = World {
        gpu: RefCell::new(Gpu::new(variant.slices, tenants.len(), streams, EVENTS)),
        variant,
        processes: processes.collect(),
        arbiter: Arbiter::with_slices((variant.slices.slice_ns / 1000) as u32),
    };
    let start = world.gpu.borrow().now_ns();
    // Who acts next, in order of time.
    let mut agenda: BinaryHeap<Reverse<(u64, usize)>> =
        tenants.iter().enumerate().map(|(at, t)| Reverse((start + t.load.start_ns, at))).collect();
    agenda.push(Reverse((start, AGENT)));
    let mut outcome = Outcome { windows: Vec::new() };
    let mut before = vec![0; tenants.len()];
    for window in 1..=windows as u64 {
        let end = start + window * window_ns;
        while let Some(Reverse((time, at))) = agenda.peek().copied().filter(|Reverse((time, _))| *time < end)
        {
            agenda.pop();
            while world.gpu.borrow().now_ns() < time {
                world.gpu.borrow_mut().advance(time);
            }
            let next = if at == AGENT { world.tick(time) } else { world.act(at) };
            agenda.push(Reverse((next, at)));
        }
        while world.gpu.borrow().now_ns() < end {
            world.gpu.borrow_mut().advance(end);
        }
        let used = (0..tenants.len()).map(|at| world.gpu.borrow().used_ns(at));
        let shares = used
            .zip(&mut before)
            .map(|(used, before)| (used - std::mem::replace(before, used)) as f64 / window_ns as f64);
        outcome.windows.push(shares.collect());
    }
    outcome
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

impl World {
    /// The node agent reads the regions and writes the grants.
    fn tick(&mut self, now_ns: u64) -> u64 {
        let shares: Vec<Share> = self.processes.iter_mut().enumerate().map(|(at, p)| p.share(at)).collect();
        let grants = self.arbiter.tick(now_ns, &shares);
        for (process, grant) in self.processes.iter_mut().zip(grants) {
            process.grant = grant;
        }
        now_ns + TICK_NS
    }

    /// One step of a process's thread; when it acts again.
    fn act(&mut self, at: usize) -> u64 {
        let now = self.gpu.borrow().now_ns();
        let Some(process) = self.processes.get(at) else { return u64::MAX };
        let load = process.tenant.load;
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
        let view = View { world: self, at, process };
        let ticket = if process.till.pays(cell, launch.key) {
            None
        } else {
            match pacer::before(&view, cell, &launch, true) {
                Step::Wait(until) => {
                    process.compute.delayed.fetch_add(1, Relaxed);
                    return until.max(now) + WAKE_NS;
                }
                Step::Go(ticket) => Some(ticket),
                Step::Free => None,
            }
        };
        let mut state = process.random;
        let spread = base / 100 * load.jitter_percent;
        let cost = base - spread + if spread > 0 { random(&mut state) % (2 * spread) } else { 0 };
        self.gpu.borrow_mut().launch(at, stream, cost, load.width);
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

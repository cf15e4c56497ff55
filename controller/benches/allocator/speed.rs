//! Time and memory.

use crate::claims::{self, PROFILES, SLICES};
use crate::cluster::{Cluster, DRIVERS, GPUS, PRODUCTS, Shape};
use crate::fixtures::spec;
use crate::random::Random;
use crate::{Args, Figure};
use aliquot_allocator::schedule::{Decision, Options, Plan};
use aliquot_controller::reconciler::Settings;
use std::time::{Duration, Instant};

/// Part of the memory slices that is in use when decisions are timed.
const OCCUPANCY: f64 = 0.85;

pub(crate) fn measure(args: &Args, command: &str) -> Vec<Figure> {
    let shapes: Vec<Shape> = (0..PRODUCTS.len() * DRIVERS.len()).map(Shape::new).collect();
    let mut cluster = Cluster::new(Options::default());
    let before = memory_mib();
    let build = cluster.add_nodes(args.nodes, &shapes).as_secs_f64();
    println!("index of {} nodes: {build:.1} s, {:.0} MiB", args.nodes, memory_mib() - before);
    let mut random = Random::new(args.seed);
    let start = Instant::now();
    let mut live = fill(&mut cluster, args.nodes, &mut random);
    println!(
        "{} claims hold partitions: {:.1} s, seed {}",
        live.len(),
        start.elapsed().as_secs_f64(),
        args.seed
    );
    let mut timings = run(&mut cluster, args.nodes, args.decisions, &mut random, &mut live);
    let memory = memory_mib() - before;
    timings.report();
    let mut figures = vec![
        Figure::new("allocator.index.build_s", build, "s", command),
        Figure::new("allocator.decision.p50_us", timings.all.at(50), "us", command),
        Figure::new("allocator.decision.p99_us", timings.all.at(99), "us", command),
        Figure::new("allocator.memory_mib", memory, "MiB", command),
    ];
    figures.push(worst(&mut cluster, command));
    figures.push(Figure::new("allocator.nodes", number(args.nodes), "nodes", command));
    figures
}

#[expect(clippy::cast_precision_loss, reason = "small")]
const fn number(value: usize) -> f64 {
    value as f64
}

#[expect(clippy::cast_precision_loss, reason = "small")]
const fn share(used: u64, all: f64) -> f64 {
    used as f64 / all
}

/// Names of the devices that a plan gives.
fn devices(plan: &Plan) -> impl Iterator<Item = String> {
    let results = plan.drafts.iter().flat_map(|draft| draft.allocation().devices.iter());
    results.flat_map(|devices| devices.results.iter().flatten()).map(|result| result.device.clone())
}

/// Resident memory of this process.
fn memory_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("resident memory");
    let kib: f64 = line.split_whitespace().nth(1).expect("a value").parse().expect("a number");
    kib / 1024.0
}

/// A claim, and the memory slices that it holds.
pub(crate) type Live = Vec<(String, u32)>;

/// Of a hundred GPUs so many stay empty at first, so that whole ones are to be had.
const EMPTY: usize = 8;
/// The part of the others that is filled.
const FILLED: f64 = 0.93;

/// Partitions at random places until so much is in use: more states of a GPU than any policy leaves.
pub(crate) fn fill(cluster: &mut Cluster, nodes: usize, random: &mut Random) -> Live {
    let mut live = Vec::new();
    for node in 0..nodes {
        for gpu in 0..GPUS {
            if random.below(100) < EMPTY {
                continue;
            }
            let (mut used, mut taken, mut failures) = (0u32, 0u32, 0);
            while f64::from(used) < FILLED * f64::from(SLICES) && failures < 6 {
                let number = claims::any_profile(random);
                let profile = &PROFILES[number];
                let mask = |start: u32| ((1u32 << profile.size) - 1) << start;
                let free: Vec<u32> =
                    profile.starts.iter().copied().filter(|start| taken & mask(*start) == 0).collect();
                if free.is_empty() {
                    failures += 1;
                    continue;
                }
                let start = free[random.below(free.len())];
                taken |= mask(start);
                used += profile.size;
                let name = format!("f{node}-{gpu}-{start}");
                let allocation = claims::partition_at(node, gpu, profile, start);
                cluster.hold(&name, &spec(&[claims::by_profile(number)]), &allocation);
                live.push((name, profile.size));
            }
        }
    }
    live
}

/// Claims that are hard to refuse: eight devices of which four attributes must be equal, and more devices
/// than the attributes leave together. Each ends by itself or says that time ran out.
fn worst(cluster: &mut Cluster, command: &str) -> Figure {
    let deadline = Settings::default().deadline;
    let mut longest = Duration::ZERO;
    for (number, (what, spec)) in claims::hardest().into_iter().enumerate() {
        let name = format!("worst-{number}");
        let pod = cluster.ask(&name, &spec);
        let start = Instant::now();
        let decision = cluster.decide_within(&pod, &mut || start.elapsed() >= deadline);
        let taken = start.elapsed();
        let outcome = match decision {
            Decision::Placed(_) => "placed",
            Decision::NoFit(_) => "does not fit",
            Decision::OutOfTime(_) => "out of time, and says so",
            other => panic!("{what}: {other:?}"),
        };
        println!("hardest, {what}: {outcome} after {:.1} ms", taken.as_secs_f64() * 1e3);
        longest = longest.max(taken);
        cluster.end(&name);
    }
    Figure::new("allocator.decision.worst_ms", longest.as_secs_f64() * 1e3, "ms", command)
        .against(deadline.as_secs_f64() * 1e3)
}

/// Times by outcome.
#[derive(Default)]
struct Timings {
    all: Times,
    one: Times,
    several: Times,
    refused: Times,
}

impl Timings {
    fn report(&mut self) {
        for (name, times) in [
            ("all", &mut self.all),
            ("placed, one device", &mut self.one),
            ("placed, several", &mut self.several),
            ("refused", &mut self.refused),
        ] {
            println!(
                "decisions, {name}: {} of them, p50 {:.0} us, p99 {:.0} us, most {:.0} us",
                times.0.len(),
                times.at(50),
                times.at(99),
                times.at(100)
            );
        }
    }
}

#[derive(Default)]
pub(crate) struct Times(pub(crate) Vec<Duration>);

impl Times {
    /// A percentile in microseconds.
    pub(crate) fn at(&mut self, percent: usize) -> f64 {
        self.0.sort_unstable();
        let at = (self.0.len() * percent / 100).min(self.0.len().saturating_sub(1));
        self.0.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e6)
    }
}

/// Claims come, are decided, and make others leave.
fn run(
    cluster: &mut Cluster,
    nodes: usize,
    decisions: usize,
    random: &mut Random,
    live: &mut Live,
) -> Timings {
    let mut timings = Timings::default();
    let all = number(nodes) * f64::from(GPUS * SLICES);
    let mut used: u64 = live.iter().map(|(_, slices)| u64::from(*slices)).sum();
    for count in 0..decisions {
        let name = format!("c{count}");
        let (spec, possible) = claims::any_spec(random);
        let pod = cluster.ask(&name, &spec);
        let start = Instant::now();
        let decision = cluster.decide(&pod);
        let taken = start.elapsed();
        timings.all.0.push(taken);
        if let Decision::Placed(plan) = decision {
            assert!(possible, "{name} cannot fit anywhere");
            let times = if devices(&plan).count() == 1 { &mut timings.one } else { &mut timings.several };
            times.0.push(taken);
            let slices = devices(&plan).map(|device| claims::slices_of(&device)).sum();
            cluster.show(&plan);
            live.push((name, slices));
            used += u64::from(slices);
        } else {
            timings.refused.0.push(taken);
            cluster.end(&name);
        }
        while share(used, all) > OCCUPANCY {
            let (gone, slices) = live.swap_remove(random.below(live.len()));
            cluster.end(&gone);
            used -= u64::from(slices);
        }
    }
    println!("at the end {:.1} % of the memory is in use", share(used, all) * 100.0);
    timings
}

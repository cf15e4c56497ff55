//! Time and memory.

use crate::claims::{self, PROFILES, SLICES};
use crate::cluster::{Cluster, DRIVERS, GPUS, PRODUCTS, Shape};
use crate::fixtures::spec;
use crate::random::Random;
use crate::{Args, Figure};
use aliquot_controller::decide::{Decision, Options};
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
        "{} claims hold {:.0} % of the memory: {:.1} s, seed {}",
        live.len(),
        OCCUPANCY * 100.0,
        start.elapsed().as_secs_f64(),
        args.seed
    );
    let mut timings = run(&mut cluster, args.decisions, &mut random, &mut live);
    let memory = memory_mib() - before;
    timings.report();
    let mut figures = vec![
        Figure::new("allocator.index.build_s", build, "s", command),
        Figure::new("allocator.decision.p50_us", timings.all.at(50), "us", command),
        Figure::new("allocator.decision.p99_us", timings.all.at(99), "us", command),
        Figure::new("allocator.memory_mib", memory, "MiB", command),
    ];
    figures.push(Figure::new("allocator.nodes", number(args.nodes), "nodes", command));
    figures
}

#[expect(clippy::cast_precision_loss, reason = "small")]
const fn number(value: usize) -> f64 {
    value as f64
}

/// Resident memory of this process.
fn memory_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("resident memory");
    let kib: f64 = line.split_whitespace().nth(1).expect("a value").parse().expect("a number");
    kib / 1024.0
}

/// Partitions at random places until so much is in use: more states of a GPU than any policy leaves.
fn fill(cluster: &mut Cluster, nodes: usize, random: &mut Random) -> Vec<String> {
    let mut live = Vec::new();
    for node in 0..nodes {
        for gpu in 0..GPUS {
            let (mut used, mut taken, mut failures) = (0u32, 0u32, 0);
            while f64::from(used) < OCCUPANCY * f64::from(SLICES) && failures < 4 {
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
                live.push(name);
            }
        }
    }
    live
}

/// Times by outcome.
#[derive(Default)]
struct Timings {
    all: Times,
    placed: Times,
    refused: Times,
}

impl Timings {
    fn report(&mut self) {
        for (name, times) in
            [("all", &mut self.all), ("placed", &mut self.placed), ("refused", &mut self.refused)]
        {
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
struct Times(Vec<Duration>);

impl Times {
    /// A percentile in microseconds.
    fn at(&mut self, percent: usize) -> f64 {
        self.0.sort_unstable();
        let at = (self.0.len() * percent / 100).min(self.0.len().saturating_sub(1));
        self.0.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e6)
    }
}

/// Claims come, are decided, and make others leave.
fn run(cluster: &mut Cluster, decisions: usize, random: &mut Random, live: &mut Vec<String>) -> Timings {
    let mut timings = Timings::default();
    let limit = live.len();
    for number in 0..decisions {
        let name = format!("c{number}");
        let (spec, possible) = claims::any_spec(random);
        let pod = cluster.ask(&name, &spec);
        let start = Instant::now();
        let decision = cluster.decide(&pod);
        let taken = start.elapsed();
        timings.all.0.push(taken);
        if let Decision::Placed(plan) = decision {
            assert!(possible, "{name} cannot fit anywhere");
            timings.placed.0.push(taken);
            cluster.show(&plan);
            live.push(name);
        } else {
            timings.refused.0.push(taken);
            cluster.end(&name);
        }
        while live.len() > limit {
            let gone = live.swap_remove(random.below(live.len()));
            cluster.end(&gone);
        }
    }
    timings
}

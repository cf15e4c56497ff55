//! How well decisions pack: the same arrivals for simple rules, for decisions as shipped, and for an
//! allocator that may move everything at any time, which bounds what any policy can reach.
//!
//! Each case counts the memory slices of refused claims, after the cluster has filled up. The gap
//! runs from the best simple rule to the bound.

use crate::claims::{self, PROFILES, SLICES};
use crate::cluster::{Cluster, GPUS, Shape};
use crate::fixtures::spec;
use crate::random::Random;
use crate::{Args, Figure};
use aliquot_controller::decide::{Decision, Options, Strategy};
use std::collections::BTreeMap;

/// How claims come and go.
#[derive(Debug, Clone, Copy)]
enum Load {
    /// One comes; while more than this part of all slices is in use, random ones leave.
    Level(f64),
    /// They come by a Poisson process that offers this load and stay for exponential times.
    Poisson(f64),
}

struct Case {
    name: &'static str,
    nodes: usize,
    load: Load,
    arrivals: usize,
}

const CASES: [Case; 5] = [
    Case { name: "10_nodes_86", nodes: 10, load: Load::Level(0.86), arrivals: 2_000 },
    Case { name: "100_nodes_95", nodes: 100, load: Load::Level(0.95), arrivals: 7_000 },
    Case { name: "poisson_85", nodes: 10, load: Load::Poisson(0.85), arrivals: 3_000 },
    Case { name: "poisson_95", nodes: 10, load: Load::Poisson(0.95), arrivals: 3_000 },
    Case { name: "poisson_105", nodes: 10, load: Load::Poisson(1.05), arrivals: 3_000 },
];

/// Someone who places claims.
trait Placer {
    /// Places a claim of this profile, or refuses it.
    fn place(&mut self, claim: usize, profile: usize) -> bool;
    /// Ends a claim that was placed.
    fn end(&mut self, claim: usize);
}

pub(crate) fn measure(args: &Args, command: &str) -> Vec<Figure> {
    let mut figures = Vec::new();
    println!("rejected slices in percent, seeds {}..{}:", args.seed, args.seed + args.seeds);
    println!(
        "{:<14} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8} {:>11}",
        "case", "spread", "random", "fullest", "bin-pack", "spread*", "repack", "gap closed"
    );
    for case in &CASES {
        let mut sums = [Count::default(); 6];
        for seed in args.seed..args.seed + args.seeds {
            let mut placers: [Box<dyn Placer>; 6] = [
                Box::new(Simple::new(case.nodes, Rule::Spread, seed)),
                Box::new(Simple::new(case.nodes, Rule::Random, seed)),
                Box::new(Simple::new(case.nodes, Rule::Fullest, seed)),
                Box::new(Shipped::new(case.nodes, Strategy::BinPack)),
                Box::new(Shipped::new(case.nodes, Strategy::Spread)),
                Box::new(Repacking::new(case.nodes)),
            ];
            for (sum, placer) in sums.iter_mut().zip(&mut placers) {
                sum.add(play(case, seed, placer.as_mut()));
            }
        }
        let rejected = sums.map(|sum| sum.rejected_slices());
        let baseline = rejected[..3].iter().copied().fold(f64::INFINITY, f64::min);
        let (ours, bound) = (rejected[3], rejected[5]);
        let closed = if baseline > bound { (baseline - ours) / (baseline - bound) } else { 1.0 };
        println!(
            "{:<14} {:>8.2} {:>8.2} {:>8.2} {:>9.2} {:>8.2} {:>8.2} {:>11.3}",
            case.name, rejected[0], rejected[1], rejected[2], ours, rejected[4], bound, closed
        );
        let name = |what: &str| format!("allocator.packing.{}.{what}", case.name);
        figures
            .push(Figure::new(&name("rejected_slices_percent"), ours, "percent", command).against(baseline));
        let claims = |sum: &Count| sum.rejected_claims();
        let best = sums[..3].iter().map(claims).fold(f64::INFINITY, f64::min);
        figures.push(
            Figure::new(&name("rejected_claims_percent"), claims(&sums[3]), "percent", command).against(best),
        );
        figures.push(Figure::new(&name("gap_closed"), closed, "of 1", command));
    }
    figures
}

/// What was asked for and refused.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    claims: u32,
    slices: u32,
    refused_claims: u32,
    refused_slices: u32,
}

impl Count {
    const fn add(&mut self, other: Self) {
        self.claims += other.claims;
        self.slices += other.slices;
        self.refused_claims += other.refused_claims;
        self.refused_slices += other.refused_slices;
    }

    fn rejected_slices(&self) -> f64 {
        100.0 * f64::from(self.refused_slices) / f64::from(self.slices.max(1))
    }

    fn rejected_claims(&self) -> f64 {
        100.0 * f64::from(self.refused_claims) / f64::from(self.claims.max(1))
    }
}

/// Plays a case; the arrivals depend on case and seed alone.
fn play(case: &Case, seed: u64, placer: &mut dyn Placer) -> Count {
    let mut random = Random::new(seed ^ 0x5eed);
    let total = f64::from(u32::try_from(case.nodes).expect("few") * GPUS * SLICES);
    let mean: f64 = PROFILES
        .iter()
        .map(|p| f64::from(p.size) * f64::from(u32::try_from(p.percent).expect("few")) / 100.0)
        .sum();
    let mut count = Count::default();
    let mut live: BTreeMap<usize, (usize, f64)> = BTreeMap::new();
    let (mut used, mut now, mut departures) = (0u32, 0.0, 0u64);
    for claim in 0..case.arrivals {
        let profile = claims::any_profile(&mut random);
        let stay = random.interval(1.0);
        if let Load::Poisson(load) = case.load {
            now += random.interval(mean / (load * total));
            let gone: Vec<usize> =
                live.iter().filter(|(_, (_, until))| *until <= now).map(|(claim, _)| *claim).collect();
            for claim in gone {
                placer.end(claim);
                live.remove(&claim);
            }
        }
        let size = PROFILES[profile].size;
        let placed = placer.place(claim, profile);
        if placed {
            live.insert(claim, (profile, now + stay));
            used += size;
        }
        if claim >= case.arrivals / 2 {
            count.claims += 1;
            count.slices += size;
            count.refused_claims += u32::from(!placed);
            count.refused_slices += if placed { 0 } else { size };
        }
        if let Load::Level(level) = case.load {
            // Claims leave whether or not the last one came in, so that a cluster that is blocked
            // comes loose again.
            while f64::from(used) > level * total {
                departures += 1;
                let draw = |claim: usize| {
                    let claim = u64::try_from(claim).expect("64 bits");
                    Random::new(seed.wrapping_mul(31).wrapping_add(departures << 32 ^ claim)).next()
                };
                let gone = live.keys().copied().min_by_key(|claim| draw(*claim)).expect("some are live");
                let (profile, _) = live.remove(&gone).expect("live");
                used -= PROFILES[profile].size;
                placer.end(gone);
            }
        }
    }
    count
}

fn mask(profile: usize, start: u32) -> u32 {
    ((1 << PROFILES[profile].size) - 1) << start
}

/// A rule that others have.
#[derive(Debug, Clone, Copy)]
enum Rule {
    /// The emptiest node, then the first place.
    Spread,
    /// A random node, then the first place.
    Random,
    /// The fullest node, then the first place.
    Fullest,
}

struct Simple {
    rule: Rule,
    random: Random,
    gpus: Vec<u32>,
    places: BTreeMap<usize, (usize, u32)>,
}

impl Simple {
    fn new(nodes: usize, rule: Rule, seed: u64) -> Self {
        let gpus = vec![0; nodes * usize::try_from(GPUS).expect("few")];
        Self { rule, random: Random::new(seed), gpus, places: BTreeMap::new() }
    }
}

impl Placer for Simple {
    fn place(&mut self, claim: usize, profile: usize) -> bool {
        let per_node = usize::try_from(GPUS).expect("few");
        // Places in the order in which devices are published: high starts first.
        let place = |gpus: &[u32]| {
            gpus.iter().enumerate().find_map(|(gpu, used)| {
                let mut starts = PROFILES[profile].starts.iter().rev();
                starts.find(|start| used & mask(profile, **start) == 0).map(|start| (gpu, *start))
            })
        };
        let mut best = None;
        for (node, gpus) in self.gpus.chunks(per_node).enumerate() {
            let Some((gpu, start)) = place(gpus) else { continue };
            let used: i64 = gpus.iter().map(|gpu| i64::from(gpu.count_ones())).sum();
            let rank = match self.rule {
                Rule::Spread => used,
                Rule::Random => i64::from(u32::try_from(self.random.next() >> 32).expect("32 bits")),
                Rule::Fullest => -used,
            };
            if best.is_none_or(|(known, _, _)| rank < known) {
                best = Some((rank, node * per_node + gpu, mask(profile, start)));
            }
        }
        let Some((_, gpu, mask)) = best else { return false };
        self.gpus[gpu] |= mask;
        self.places.insert(claim, (gpu, mask));
        true
    }

    fn end(&mut self, claim: usize) {
        let (gpu, mask) = self.places.remove(&claim).expect("placed");
        self.gpus[gpu] &= !mask;
    }
}

/// May move everything: refuses only what does not fit after packing all anew, largest first.
struct Repacking {
    gpus: usize,
    claims: BTreeMap<usize, usize>,
}

impl Repacking {
    fn new(nodes: usize) -> Self {
        Self { gpus: nodes * usize::try_from(GPUS).expect("few"), claims: BTreeMap::new() }
    }

    fn fits(&self) -> bool {
        let mut gpus = vec![0u32; self.gpus];
        for (profile, of) in PROFILES.iter().enumerate().rev() {
            let count = self.claims.values().filter(|claim| **claim == profile).count();
            let mut first = 0;
            for _ in 0..count {
                // The fullest place is best; high starts keep the places of the large.
                let place = (first..gpus.len()).find_map(|gpu| {
                    let mut starts = of.starts.iter().rev();
                    starts.find(|start| gpus[gpu] & mask(profile, **start) == 0).map(|start| (gpu, *start))
                });
                let Some((gpu, start)) = place else { return false };
                gpus[gpu] |= mask(profile, start);
                first = gpu;
            }
        }
        true
    }
}

impl Placer for Repacking {
    fn place(&mut self, claim: usize, profile: usize) -> bool {
        self.claims.insert(claim, profile);
        let fits = self.fits();
        if !fits {
            self.claims.remove(&claim);
        }
        fits
    }

    fn end(&mut self, claim: usize) {
        self.claims.remove(&claim);
    }
}

/// Decisions as shipped.
struct Shipped(Cluster);

impl Shipped {
    fn new(nodes: usize, strategy: Strategy) -> Self {
        let mut cluster = Cluster::new(Options { strategy });
        cluster.add_nodes(nodes, &[Shape::new(0)]);
        Self(cluster)
    }
}

impl Placer for Shipped {
    fn place(&mut self, claim: usize, profile: usize) -> bool {
        let name = format!("c{claim}");
        let pod = self.0.ask(&name, &spec(&[claims::by_profile(profile)]));
        match self.0.decide(&pod) {
            Decision::Placed(plan) => {
                self.0.show(&plan);
                true
            }
            Decision::NoFit(reason) => {
                self.0.refused(&reason);
                self.0.end(&name);
                false
            }
            other => panic!("{other:?}"),
        }
    }

    fn end(&mut self, claim: usize) {
        self.0.end(&format!("c{claim}"));
    }
}

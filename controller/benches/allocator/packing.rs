//! How well decisions pack: the same arrivals for simple rules, for decisions as shipped, and for an
//! allocator that may move everything at any time, which bounds what any policy that fills one place
//! after the other can reach (it refuses only what does not fit, and so takes in large claims that
//! a policy that refuses some would be better off without).
//!
//! Each case counts the memory slices of refused claims, after the cluster has filled up. The gap
//! runs from the best simple rule to the bound.

use crate::claims::{self, Mix, PROFILES, SLICES, USUAL};
use crate::cluster::GPUS;
use crate::placers::{Fgd, Placer, Repacking, Rule, Shipped, Simple};
use crate::random::Random;
use crate::{Args, Figure};
use aliquot_allocator::schedule::Strategy;
use std::collections::BTreeMap;

/// How claims come and go.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Load {
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
    mix: Mix,
}

/// The mix without 1g.20gb, 4g.40gb and 7g.80gb, and the one of two sizes alone: what a policy does
/// with profiles that nobody asks for.
const THREE: Mix = [50, 0, 30, 20, 0, 0];
const TWO: Mix = [60, 0, 0, 40, 0, 0];

const CASES: [Case; 7] = [
    Case { name: "10_nodes_86", nodes: 10, load: Load::Level(0.86), arrivals: 2_000, mix: USUAL },
    Case { name: "100_nodes_95", nodes: 100, load: Load::Level(0.95), arrivals: 7_000, mix: USUAL },
    Case { name: "poisson_85", nodes: 10, load: Load::Poisson(0.85), arrivals: 3_000, mix: USUAL },
    Case { name: "poisson_95", nodes: 10, load: Load::Poisson(0.95), arrivals: 3_000, mix: USUAL },
    Case { name: "poisson_105", nodes: 10, load: Load::Poisson(1.05), arrivals: 3_000, mix: USUAL },
    Case { name: "three_kinds_95", nodes: 10, load: Load::Poisson(0.95), arrivals: 3_000, mix: THREE },
    Case { name: "two_kinds_95", nodes: 10, load: Load::Poisson(0.95), arrivals: 3_000, mix: TWO },
];

pub(crate) fn measure(args: &Args, command: &str) -> Vec<Figure> {
    let mut figures = Vec::new();
    println!("rejected slices in percent, seeds {}..{}:", args.seed, args.seed + args.seeds);
    println!(
        "{:<14} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8} {:>11}",
        "case", "spread", "random", "fullest", "fgd", "bin-pack", "spread*", "repack", "gap closed"
    );
    for case in &CASES {
        let mut sums = [Count::default(); 7];
        for seed in args.seed..args.seed + args.seeds {
            let mut placers: [Box<dyn Placer>; 7] = [
                Box::new(Simple::new(case.nodes, Rule::Spread, seed)),
                Box::new(Simple::new(case.nodes, Rule::Random, seed)),
                Box::new(Simple::new(case.nodes, Rule::Fullest, seed)),
                Box::new(Fgd::new(case.nodes, case.mix)),
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
        let (ours, bound) = (rejected[4], rejected[6]);
        let closed = if baseline > bound { (baseline - ours) / (baseline - bound) } else { 1.0 };
        println!(
            "{:<14} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>9.2} {:>8.2} {:>8.2} {:>11.3}",
            case.name, rejected[0], rejected[1], rejected[2], rejected[3], ours, rejected[5], bound, closed
        );
        let name = |what: &str| format!("allocator.packing.{}.{what}", case.name);
        figures
            .push(Figure::new(&name("rejected_slices_percent"), ours, "percent", command).against(baseline));
        let claims = |sum: &Count| sum.rejected_claims();
        let best = sums[..3].iter().map(claims).fold(f64::INFINITY, f64::min);
        figures.push(
            Figure::new(&name("rejected_claims_percent"), claims(&sums[4]), "percent", command).against(best),
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
    let mut count = Count::default();
    let (load, arrivals) = (case.load, case.arrivals);
    let seen = churn(case.nodes, load, arrivals, &case.mix, seed, placer, &mut |_, _| {});
    for (profile, placed) in seen.into_iter().skip(arrivals / 2) {
        let size = PROFILES[profile].size;
        count.claims += 1;
        count.slices += size;
        count.refused_claims += u32::from(!placed);
        count.refused_slices += if placed { 0 } else { size };
    }
    count
}

/// Lets claims come and go; what each asked for, and whether it was placed. `look` sees the cluster after
/// each arrival.
pub(crate) fn churn(
    nodes: usize,
    load: Load,
    arrivals: usize,
    mix: &Mix,
    seed: u64,
    placer: &mut dyn Placer,
    look: &mut dyn FnMut(usize, &dyn Placer),
) -> Vec<(usize, bool)> {
    let mut random = Random::new(seed ^ 0x5eed);
    let total = f64::from(u32::try_from(nodes).expect("few") * GPUS * SLICES);
    let mean: f64 = PROFILES.iter().zip(mix).map(|(p, percent)| f64::from(p.size * percent) / 100.0).sum();
    let mut seen = Vec::new();
    let mut live: BTreeMap<usize, (usize, f64)> = BTreeMap::new();
    let (mut used, mut now, mut departures) = (0u32, 0.0, 0u64);
    for claim in 0..arrivals {
        let profile = claims::any_of_mix(mix, &mut random);
        let stay = random.interval(1.0);
        if let Load::Poisson(load) = load {
            now += random.interval(mean / (load * total));
            let gone: Vec<usize> =
                live.iter().filter(|(_, (_, until))| *until <= now).map(|(claim, _)| *claim).collect();
            for claim in gone {
                placer.end(claim);
                live.remove(&claim);
            }
        }
        let placed = placer.place(claim, profile);
        if placed {
            live.insert(claim, (profile, now + stay));
            used += PROFILES[profile].size;
        }
        seen.push((profile, placed));
        if let Load::Level(level) = load {
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
        look(claim, placer);
    }
    seen
}

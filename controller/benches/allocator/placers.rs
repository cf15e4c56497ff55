//! Who places claims of partitions: simple rules, FGD, an allocator that may move everything, and
//! decisions as shipped.

use crate::claims::{self, Mix, PROFILES, SLICES};
use crate::cluster::{Cluster, GPUS, Shape};
use crate::fixtures::spec;
use crate::random::Random;
use aliquot_allocator::schedule::{Decision, Options, Strategy};
use std::collections::BTreeMap;

/// Someone who places claims.
pub(crate) trait Placer {
    /// Places a claim of this profile, or refuses it.
    fn place(&mut self, claim: usize, profile: usize) -> bool;
    /// Ends a claim that was placed.
    fn end(&mut self, claim: usize);
    /// The slices in use of each GPU, where it is known.
    fn gpus(&self) -> Vec<u32>;
}

pub(crate) fn mask(profile: usize, start: u32) -> u32 {
    ((1 << PROFILES[profile].size) - 1) << start
}

/// What is taken of GPUs, and by whom.
struct Taken {
    used: Vec<u32>,
    places: BTreeMap<usize, (usize, u32)>,
}

impl Taken {
    fn nothing(gpus: usize) -> Self {
        Self { used: vec![0; gpus], places: BTreeMap::new() }
    }

    fn take(&mut self, claim: usize, gpu: usize, mask: u32) {
        self.used[gpu] |= mask;
        self.places.insert(claim, (gpu, mask));
    }

    fn end(&mut self, claim: usize) {
        let (gpu, mask) = self.places.remove(&claim).expect("placed");
        self.used[gpu] &= !mask;
    }
}

/// A rule that others have.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    /// The emptiest node, then the first place.
    Spread,
    /// A random node, then the first place.
    Random,
    /// The fullest node, then the first place.
    Fullest,
}

pub(crate) struct Simple {
    rule: Rule,
    random: Random,
    gpus: Taken,
}

impl Simple {
    pub(crate) fn new(nodes: usize, rule: Rule, seed: u64) -> Self {
        Self::on(nodes * usize::try_from(GPUS).expect("few"), rule, seed)
    }

    /// On so many GPUs.
    pub(crate) fn on(gpus: usize, rule: Rule, seed: u64) -> Self {
        Self { rule, random: Random::new(seed), gpus: Taken::nothing(gpus) }
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
        for (node, gpus) in self.gpus.used.chunks(per_node).enumerate() {
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
        self.gpus.take(claim, gpu, mask);
        true
    }

    fn end(&mut self, claim: usize) {
        self.gpus.end(claim);
    }

    fn gpus(&self) -> Vec<u32> {
        self.gpus.used.clone()
    }
}

/// The free slices that claims of a mix cannot use, of all slices, as FGD (Weng et al., USENIX ATC 2023)
/// defines it, with a legal placement for a fitting part.
pub(crate) fn fragmentation(gpu: u32, mix: &Mix) -> f64 {
    let fits = |profile: usize| PROFILES[profile].starts.iter().any(|start| gpu & mask(profile, *start) == 0);
    let missed: u32 = mix.iter().enumerate().filter(|(at, _)| !fits(*at)).map(|(_, often)| often).sum();
    f64::from(missed) / 100.0 * f64::from(SLICES - gpu.count_ones())
}

/// FGD, told the mix beforehand: where fragmentation grows least.
pub(crate) struct Fgd {
    mix: Mix,
    gpus: Taken,
}

impl Fgd {
    pub(crate) fn new(nodes: usize, mix: Mix) -> Self {
        Self::on(nodes * usize::try_from(GPUS).expect("few"), mix)
    }

    /// On so many GPUs.
    pub(crate) fn on(gpus: usize, mix: Mix) -> Self {
        Self { mix, gpus: Taken::nothing(gpus) }
    }
}

impl Placer for Fgd {
    fn place(&mut self, claim: usize, profile: usize) -> bool {
        let mut best: Option<(f64, usize, u32)> = None;
        for (gpu, used) in self.gpus.used.iter().enumerate() {
            for start in PROFILES[profile].starts {
                let mask = mask(profile, *start);
                if used & mask == 0 {
                    let growth = fragmentation(used | mask, &self.mix) - fragmentation(*used, &self.mix);
                    if best.is_none_or(|(known, _, _)| growth < known) {
                        best = Some((growth, gpu, mask));
                    }
                }
            }
        }
        let Some((_, gpu, mask)) = best else { return false };
        self.gpus.take(claim, gpu, mask);
        true
    }

    fn end(&mut self, claim: usize) {
        self.gpus.end(claim);
    }

    fn gpus(&self) -> Vec<u32> {
        self.gpus.used.clone()
    }
}

/// May move everything: refuses only what does not fit after packing all anew, largest first.
pub(crate) struct Repacking {
    gpus: usize,
    claims: BTreeMap<usize, usize>,
}

impl Repacking {
    pub(crate) fn new(nodes: usize) -> Self {
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

    fn gpus(&self) -> Vec<u32> {
        Vec::new()
    }
}

/// Decisions as shipped.
pub(crate) struct Shipped {
    cluster: Cluster,
    gpus: Vec<u32>,
    places: BTreeMap<usize, (usize, u32)>,
}

impl Shipped {
    pub(crate) fn new(nodes: usize, strategy: Strategy) -> Self {
        Self::on(nodes, usize::try_from(GPUS).expect("few"), strategy)
    }

    /// On nodes with so many GPUs, eight at most.
    pub(crate) fn on(nodes: usize, gpus: usize, strategy: Strategy) -> Self {
        let mut cluster = Cluster::new(Options { strategy });
        cluster.add_nodes(nodes, &[Shape::with(gpus, |_| {})]);
        let gpus = vec![0; nodes * usize::try_from(GPUS).expect("few")];
        Self { cluster, gpus, places: BTreeMap::new() }
    }
}

impl Placer for Shipped {
    fn place(&mut self, claim: usize, profile: usize) -> bool {
        let name = format!("c{claim}");
        let pod = self.cluster.ask(&name, &spec(&[claims::by_profile(profile)]));
        match self.cluster.decide(&pod) {
            Decision::Placed(plan) => {
                self.cluster.show(&plan);
                let device = plan.devices().remove(0);
                let number = |text: &str| text.parse::<usize>().expect("a number");
                let parts: Vec<&str> = device.split('-').collect();
                let node = number(plan.node.trim_start_matches("node-"));
                let gpu = node * usize::try_from(GPUS).expect("few") + number(parts[1]);
                let start = u32::try_from(number(parts[parts.len() - 1])).expect("few");
                let mask = mask(profile, start);
                assert_eq!(self.gpus[gpu] & mask, 0, "given twice: {device} on {}", plan.node);
                self.gpus[gpu] |= mask;
                self.places.insert(claim, (gpu, mask));
                true
            }
            Decision::NoFit(reason) => {
                self.cluster.refused(&reason);
                self.cluster.end(&name);
                false
            }
            other => panic!("{other:?}"),
        }
    }

    fn end(&mut self, claim: usize) {
        let (gpu, mask) = self.places.remove(&claim).expect("placed");
        self.gpus[gpu] &= !mask;
        self.cluster.end(&format!("c{claim}"));
    }

    fn gpus(&self) -> Vec<u32> {
        self.gpus.clone()
    }
}

//! Rules that others place by, on nodes with processors, memory and GPUs that are shared or partitioned.

use crate::claims::{PROFILES, SLICES};
use crate::random::Random;

/// How GPUs are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gpus {
    /// By thousandths; a GPU's state is what is free of it.
    Shares,
    /// By MIG profiles; a GPU's state is a mask of the slices in use.
    Partitions,
}

/// What a pod asks for: processors and GPUs in thousandths, memory in MiB.
#[derive(Debug, Clone)]
pub(crate) struct Demand {
    pub(crate) cpu: u64,
    pub(crate) memory: u64,
    pub(crate) gpus: u32,
    pub(crate) milli: u32,
}

/// The profile of a part of a GPU.
pub(crate) const fn profile(milli: u32) -> usize {
    match milli {
        0..=143 => 0,
        144..=286 => 2,
        287..=429 => 3,
        430..=571 => 4,
        _ => 5,
    }
}

fn slices(profile: usize, start: u32) -> u32 {
    ((1 << PROFILES[profile].size) - 1) << start
}

impl Gpus {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Shares => "shares",
            Self::Partitions => "partitions",
        }
    }

    const fn empty(self) -> u32 {
        match self {
            Self::Shares => 1000,
            Self::Partitions => 0,
        }
    }

    /// How much of GPUs a pod is given, in GPUs.
    pub(crate) fn size(self, demand: &Demand) -> f64 {
        let one = match self {
            Self::Shares => f64::from(demand.milli) / 1000.0,
            Self::Partitions => f64::from(PROFILES[profile(demand.milli)].size) / f64::from(SLICES),
        };
        one * f64::from(demand.gpus)
    }

    /// What is free of a GPU, in thousandths.
    fn free(self, gpu: u32) -> u32 {
        match self {
            Self::Shares => gpu,
            Self::Partitions => (SLICES - gpu.count_ones()) * 1000 / SLICES,
        }
    }

    /// What the GPU could become when one of the demand's parts is taken of it, in the order in which
    /// devices are published.
    fn after(self, gpu: u32, demand: &Demand) -> Vec<u32> {
        match self {
            Self::Shares => gpu.checked_sub(demand.milli).into_iter().collect(),
            Self::Partitions => {
                let profile = profile(demand.milli);
                let masks = PROFILES[profile].starts.iter().rev().map(|start| slices(profile, *start));
                masks.filter(|mask| gpu & mask == 0).map(|mask| gpu | mask).collect()
            }
        }
    }
}

/// A node.
#[derive(Debug, Clone)]
struct Node {
    cpu: u64,
    memory: u64,
    gpus: Vec<u32>,
    /// Processors, memory and GPUs that it has in all.
    total: (u64, u64, usize),
}

/// How a node and its GPUs are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    /// A random node, its first GPU that fits.
    Random,
    /// The node with the least left of everything, its fullest GPU.
    BestFit,
    /// The node whose free resources point most in the pod's direction (Tetris), its fullest GPU.
    DotProduct,
    /// GPUs in use first, then free ones of nodes in use, then free nodes.
    Packing,
    /// Where fragmentation, weighted by how often the trace asks for what, grows least.
    Fgd,
}

impl Rule {
    pub(crate) const ALL: [(&'static str, Self); 5] = [
        ("random", Self::Random),
        ("best-fit", Self::BestFit),
        ("dot-product", Self::DotProduct),
        ("packing", Self::Packing),
        ("fgd", Self::Fgd),
    ];
}

/// Nodes, and a rule that fills them.
pub(crate) struct Farm {
    gpus: Gpus,
    rule: Rule,
    nodes: Vec<Node>,
    /// What is asked for typically, with its frequency.
    typical: Vec<(Demand, f64)>,
    random: Random,
}

impl Farm {
    pub(crate) fn new(
        gpus: Gpus,
        rule: Rule,
        nodes: impl Iterator<Item = (u64, u64, usize)>,
        pods: Vec<(Demand, usize)>,
        seed: u64,
    ) -> Self {
        let nodes = nodes.map(|(cpu, memory, count)| Node {
            cpu,
            memory,
            gpus: vec![gpus.empty(); count],
            total: (cpu, memory, count),
        });
        Self { gpus, rule, nodes: nodes.collect(), typical: typical(pods), random: Random::new(seed) }
    }

    /// Places a pod, if it fits.
    pub(crate) fn put(&mut self, demand: &Demand) -> bool {
        let mut best: Option<(f64, usize, Vec<u32>)> = None;
        for (at, node) in self.nodes.iter().enumerate() {
            if node.cpu < demand.cpu || node.memory < demand.memory {
                continue;
            }
            let before = match self.rule {
                Rule::Fgd => self.fragmentation(node, (node.cpu, node.memory), &node.gpus),
                _ => 0.0,
            };
            for gpus in self.choices(node, demand) {
                let rank = match self.rule {
                    Rule::Random => self.random.unit(),
                    Rule::BestFit => left(self.gpus, node, demand, &gpus),
                    Rule::DotProduct => -alignment(self.gpus, node, demand),
                    Rule::Packing => opened(self.gpus, node, &gpus),
                    Rule::Fgd => {
                        let left = (node.cpu - demand.cpu, node.memory - demand.memory);
                        self.fragmentation(node, left, &gpus) - before
                    }
                };
                if best.as_ref().is_none_or(|(known, _, _)| rank < *known) {
                    best = Some((rank, at, gpus));
                }
            }
        }
        let Some((_, at, gpus)) = best else { return false };
        let node = &mut self.nodes[at];
        (node.cpu, node.memory, node.gpus) = (node.cpu - demand.cpu, node.memory - demand.memory, gpus);
        true
    }

    /// What a node's GPUs could become. Only FGD tries every GPU.
    fn choices(&self, node: &Node, demand: &Demand) -> Vec<Vec<u32>> {
        let whole = self.gpus.empty();
        if demand.gpus > 1 || demand.milli == 1000 {
            let mut gpus = node.gpus.clone();
            let free = gpus.iter_mut().filter(|gpu| **gpu == whole);
            let taken: Vec<&mut u32> = free.take(usize::try_from(demand.gpus).expect("few")).collect();
            if taken.len() < usize::try_from(demand.gpus).expect("few") {
                return Vec::new();
            }
            for gpu in taken {
                *gpu = self.gpus.after(whole, &Demand { gpus: 1, milli: 1000, ..demand.clone() })[0];
            }
            return vec![gpus];
        }
        let fitting =
            node.gpus.iter().enumerate().flat_map(|(at, gpu)| {
                self.gpus.after(*gpu, demand).into_iter().map(move |after| (at, after))
            });
        let with = |(at, after): (usize, u32)| {
            let mut gpus = node.gpus.clone();
            gpus[at] = after;
            gpus
        };
        match self.rule {
            Rule::Fgd => {
                let mut seen = Vec::new();
                let mut news = Vec::new();
                for (at, after) in fitting {
                    if !seen.contains(&(node.gpus[at], after)) {
                        seen.push((node.gpus[at], after));
                        news.push(with((at, after)));
                    }
                }
                news
            }
            Rule::Random => fitting.take(1).map(with).collect(),
            _ => {
                let fullest = fitting.min_by_key(|(at, _)| self.gpus.free(node.gpus[*at]));
                fullest.map(with).into_iter().collect()
            }
        }
    }

    /// The free part of GPUs that typical pods cannot use, in GPUs (FGD's definition).
    fn fragmentation(&self, node: &Node, (cpu, memory): (u64, u64), gpus: &[u32]) -> f64 {
        let free = |gpu: &u32| f64::from(self.gpus.free(*gpu)) / 1000.0;
        let all: f64 = gpus.iter().map(free).sum();
        let cost = |(demand, often): &(Demand, f64)| {
            let whole = demand.gpus > 1 || demand.milli == 1000;
            let usable = |gpu: &&u32| {
                if whole { **gpu == self.gpus.empty() } else { !self.gpus.after(**gpu, demand).is_empty() }
            };
            let count = gpus.iter().filter(usable).count();
            let runs = demand.cpu <= cpu
                && demand.memory <= memory
                && count >= usize::try_from(demand.gpus).expect("few");
            let useless = gpus.iter().filter(|gpu| !usable(gpu)).map(free).sum::<f64>();
            often * if runs { useless } else { all }
        };
        debug_assert!(cpu <= node.total.0, "more than there is");
        self.typical.iter().map(cost).sum()
    }
}

/// The kinds of pods by what they ask of GPUs, with their mean processors and memory and their frequency.
fn typical(pods: Vec<(Demand, usize)>) -> Vec<(Demand, f64)> {
    let mut kinds: std::collections::BTreeMap<(u32, u32), (u64, u64, u64)> =
        std::collections::BTreeMap::new();
    let mut all = 0;
    for (demand, count) in pods {
        let count = u64::try_from(count).expect("64 bits");
        let sums = kinds.entry((demand.gpus, demand.milli)).or_default();
        *sums = (sums.0 + demand.cpu * count, sums.1 + demand.memory * count, sums.2 + count);
        all += count;
    }
    let part = |count: u64| f64::from(u32::try_from(count).expect("few"));
    let kind = |((gpus, milli), (cpu, memory, count)): ((u32, u32), (u64, u64, u64))| {
        (Demand { cpu: cpu / count, memory: memory / count, gpus, milli }, part(count) / part(all))
    };
    kinds.into_iter().map(kind).collect()
}

#[expect(clippy::cast_precision_loss, reason = "small")]
fn parts(gpus: Gpus, node: &Node, state: &[u32]) -> [f64; 3] {
    let free: u32 = state.iter().map(|gpu| gpus.free(*gpu)).sum();
    [
        node.cpu as f64 / node.total.0 as f64,
        node.memory as f64 / node.total.1 as f64,
        f64::from(free) / (1000 * node.total.2) as f64,
    ]
}

#[expect(clippy::cast_precision_loss, reason = "small")]
fn wanted(gpus: Gpus, node: &Node, demand: &Demand) -> [f64; 3] {
    [
        demand.cpu as f64 / node.total.0 as f64,
        demand.memory as f64 / node.total.1 as f64,
        gpus.size(demand) / node.total.2 as f64,
    ]
}

/// What is left of a node, all resources alike.
fn left(gpus: Gpus, node: &Node, demand: &Demand, after: &[u32]) -> f64 {
    let [cpu, memory, gpu] = parts(gpus, node, after);
    let [less_cpu, less_memory, _] = wanted(gpus, node, demand);
    cpu - less_cpu + memory - less_memory + gpu
}

fn alignment(gpus: Gpus, node: &Node, demand: &Demand) -> f64 {
    let free = parts(gpus, node, &node.gpus);
    free.iter().zip(wanted(gpus, node, demand)).map(|(free, wanted)| free * wanted).sum()
}

/// Whether a free GPU is taken, and of a free node; among equals the fuller node.
fn opened(gpus: Gpus, node: &Node, after: &[u32]) -> f64 {
    let is_free = |state: &[u32]| state.iter().filter(|gpu| **gpu == gpus.empty()).count();
    let opens = is_free(&node.gpus) > is_free(after);
    let fresh = is_free(&node.gpus) == node.gpus.len();
    let rank = if !opens {
        0.0
    } else if fresh {
        2.0
    } else {
        1.0
    };
    rank * 10.0 + parts(gpus, node, after)[2]
}

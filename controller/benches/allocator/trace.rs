//! Production arrivals: pods and nodes of the openb trace, for known rules, for FGD and for decisions as
//! shipped. Pods arrive until more was asked for than there is, and none ends (the experiment of Weng
//! et al., USENIX ATC 2023); what counts is how much of the GPUs is given out by then.
//!
//! Pods are drawn from the trace's list at random; those without a GPU are left out, and so are wishes
//! for a model of GPU. A part of a GPU is mapped either to a share of as much memory and compute, or,
//! on the same nodes with an H100 for each GPU, to a MIG profile: at most 143 thousandths to `1g.10gb`,
//! 286 to `2g.20gb`, 429 to `3g.40gb`, 571 to `4g.40gb`, more to `7g.80gb`.

use crate::claims::PROFILES;
use crate::cluster::{Cluster, Shape};
use crate::fixtures::{self, request, share, spec};
use crate::random::Random;
use crate::rules::{Demand, Farm, Gpus, Rule};
use crate::{Args, Figure};
use aliquot_allocator::schedule::{Decision, Options};
use aliquot_model::MigCapability;
use std::collections::BTreeMap;

const NODES: &str = include_str!("../data/openb-nodes.csv");
const PODS: &str = include_str!("../data/openb-pods.csv");

/// Memory of a GPU that is shared, in MiB, so that a thousandth of it is a whole number.
const MEMORY_MIB: u64 = 32_000;
/// Parts of all GPUs that were asked for when it is looked at, in percent.
const LOOKS: [u32; 4] = [70, 85, 100, 115];

/// A kind of node of the trace.
struct NodeKind {
    cpu: u64,
    memory: u64,
    gpus: usize,
    count: usize,
}

fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.skip(1).map(|line| line.split(',').collect())
}

fn nodes() -> Vec<NodeKind> {
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let small = |text: &str| text.parse::<usize>().expect("a number");
    let kind = |row: Vec<&str>| NodeKind {
        cpu: number(row[1]),
        memory: number(row[2]),
        gpus: small(row[3]),
        count: small(row[4]),
    };
    rows(NODES).map(kind).collect()
}

/// What pods of the trace ask for, and how many do.
fn pods() -> Vec<(Demand, usize)> {
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let kind = |row: Vec<&str>| {
        let (gpus, milli) = (row[2].parse().expect("a number"), row[3].parse().expect("a number"));
        let demand = Demand { cpu: number(row[0]), memory: number(row[1]), gpus, milli };
        (demand, row[4].parse().expect("a number"))
    };
    rows(PODS).map(kind).collect()
}

/// Someone who places pods.
trait Placer {
    /// Places a pod on so much of the GPUs, in thousandths of one; nothing if it does not fit.
    fn place(&mut self, number: usize, demand: &Demand) -> bool;
}

impl Placer for Farm {
    fn place(&mut self, _: usize, demand: &Demand) -> bool {
        self.put(demand)
    }
}

/// Decisions as shipped.
struct Shipped {
    cluster: Cluster,
    gpus: Gpus,
}

impl Shipped {
    fn new(gpus: Gpus, kinds: &[NodeKind]) -> Self {
        let mut cluster = Cluster::new(Options::default());
        let mut first = 0;
        for kind in kinds {
            let shape = Shape::with(kind.gpus, |info| {
                if gpus == Gpus::Shares {
                    info.mig = MigCapability::Unsupported;
                    info.memory_bytes = MEMORY_MIB << 20;
                }
            });
            let resources = [
                ("cpu", format!("{}m", kind.cpu)),
                ("memory", format!("{}Mi", kind.memory)),
                ("pods", "1000".to_owned()),
            ];
            cluster.add(first..first + kind.count, &[shape], &resources);
            first += kind.count;
        }
        Self { cluster, gpus }
    }

    fn wish(&self, demand: &Demand) -> serde_json::Value {
        if demand.gpus > 1 || (demand.milli == 1000 && self.gpus == Gpus::Shares) {
            return request("r", "gpu.aliquot.dev", demand.gpus);
        }
        match self.gpus {
            Gpus::Shares => {
                let memory = format!("{}Mi", MEMORY_MIB * u64::from(demand.milli) / 1000);
                share("r", &memory, &demand.milli.div_ceil(10).to_string())
            }
            Gpus::Partitions => fixtures::partition("r", PROFILES[crate::rules::profile(demand.milli)].name),
        }
    }
}

impl Placer for Shipped {
    fn place(&mut self, number: usize, demand: &Demand) -> bool {
        let name = format!("c{number}");
        let requests = [("cpu", format!("{}m", demand.cpu)), ("memory", format!("{}Mi", demand.memory))];
        let pod = self.cluster.ask_for(&name, &spec(&[self.wish(demand)]), &requests);
        match self.cluster.decide(&pod) {
            Decision::Placed(plan) => {
                self.cluster.show(&plan);
                self.cluster.bind(&name, &plan.node, &requests);
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
}

/// What part of all GPUs was given out at each look, in percent; the arrivals depend on the seed alone.
fn play(gpus: Gpus, capacity: f64, seed: u64, placer: &mut dyn Placer) -> Vec<f64> {
    let pods = pods();
    let total: usize = pods.iter().map(|(_, count)| count).sum();
    let mut random = Random::new(seed ^ 0x0b);
    let (mut asked, mut given, mut number) = (0.0, 0.0, 0);
    let mut seen = Vec::new();
    while let Some(look) = LOOKS.get(seen.len()) {
        let mut at = random.below(total);
        let demand = pods.iter().find_map(|(demand, count)| match at.checked_sub(*count) {
            None => Some(demand),
            Some(rest) => {
                at = rest;
                None
            }
        });
        let demand = demand.expect("one of all");
        let size = gpus.size(demand);
        asked += size;
        number += 1;
        if placer.place(number, demand) {
            given += size;
        }
        if asked >= capacity * f64::from(*look) / 100.0 {
            seen.push(100.0 * given / capacity);
        }
    }
    seen
}

pub(crate) fn measure(args: &Args, command: &str) -> Vec<Figure> {
    let kinds = nodes();
    let all: usize = kinds.iter().map(|kind| kind.gpus * kind.count).sum();
    let capacity = f64::from(u32::try_from(all).expect("thousands"));
    let mut figures = Vec::new();
    for gpus in [Gpus::Shares, Gpus::Partitions] {
        let mut results: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for seed in args.seed..args.seed + args.trace_seeds {
            let mut add = |name, placer: &mut dyn Placer| {
                let seen = play(gpus, capacity, seed, placer);
                let sums = results.entry(name).or_insert_with(|| vec![0.0; LOOKS.len()]);
                for (sum, seen) in sums.iter_mut().zip(seen) {
                    *sum += seen / f64::from(u32::try_from(args.trace_seeds).expect("few"));
                }
            };
            for (name, rule) in Rule::ALL {
                let nodes = kinds
                    .iter()
                    .flat_map(|kind| std::iter::repeat_n((kind.cpu, kind.memory, kind.gpus), kind.count));
                add(name, &mut Farm::new(gpus, rule, nodes, pods(), seed));
            }
            add("aliquot", &mut Shipped::new(gpus, &kinds));
        }
        println!(
            "openb as {}: GPUs given out, in percent, when so much was asked for ({} seeds):",
            gpus.name(),
            args.trace_seeds
        );
        println!("{:<14} {:>8} {:>8} {:>8} {:>8}", "rule", "70 %", "85 %", "100 %", "115 %");
        for (name, seen) in &results {
            let shown: Vec<String> = seen.iter().map(|part| format!("{part:>8.2}")).collect();
            println!("{name:<14} {}", shown.join(" "));
        }
        for (at, look) in LOOKS.iter().enumerate().skip(2) {
            let others = results.iter().filter(|(name, _)| **name != "aliquot").map(|(_, seen)| seen[at]);
            let best = others.fold(0.0, f64::max);
            let name = format!("allocator.openb.{}.given_percent_at_{look}", gpus.name());
            figures.push(Figure::new(&name, results["aliquot"][at], "percent", command).against(best));
        }
    }
    figures
}

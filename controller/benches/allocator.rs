//! `make bench`, allocator: index build, decisions and memory at the size of a large fleet, and how
//! well decisions pack. Prints a table and writes `target/bench/allocator.json`.
//!
//! `cargo bench -p aliquot-controller --bench allocator -- --nodes 10000 --decisions 20000`
#![forbid(unsafe_code)]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a measurement ends where anything is not as it should be"
)]

#[path = "allocator/budgets.rs"]
mod budgets;
#[path = "allocator/claims.rs"]
mod claims;
#[path = "allocator/cluster.rs"]
mod cluster;
#[path = "../tests/common/costly.rs"]
mod costly;
#[path = "allocator/exact.rs"]
mod exact;
use aliquot_allocator::fixtures;
#[path = "allocator/hard_pods.rs"]
mod hard_pods;
#[path = "allocator/packing.rs"]
mod packing;
#[path = "allocator/placers.rs"]
mod placers;
#[path = "allocator/plot.rs"]
mod plot;
#[path = "allocator/random.rs"]
mod random;
#[path = "allocator/rules.rs"]
mod rules;
#[path = "allocator/selectors.rs"]
mod selectors;
#[path = "allocator/speed.rs"]
mod speed;
#[path = "allocator/trace.rs"]
mod trace;
#[path = "allocator/upstream.rs"]
mod upstream;

use clap::Parser;
use serde::Serialize;

/// What is measured, and how large.
#[derive(Debug, Clone, Parser)]
struct Args {
    /// Nodes of eight H100.
    #[arg(long, default_value_t = 10_000)]
    nodes: usize,
    /// Decisions that are timed.
    #[arg(long, default_value_t = 20_000)]
    decisions: usize,
    /// First seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seeds of each packing case; 0 leaves packing out.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Seeds of the production trace; 0 leaves it out.
    #[arg(long, default_value_t = 2)]
    trace_seeds: u64,
    /// Packing only.
    #[arg(long)]
    packing_only: bool,
    /// Costly selectors only.
    #[arg(long)]
    selectors_only: bool,
    /// Budgets only.
    #[arg(long)]
    budgets_only: bool,
    /// Hard pods only.
    #[arg(long)]
    hard_pods_only: bool,
    /// Draws occupancy against fragmentation into this file and measures nothing.
    #[arg(long)]
    plot: Option<std::path::PathBuf>,
    /// What `cargo bench` passes on.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A line of the table.
#[derive(Debug, Serialize)]
struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
    baseline: Option<f64>,
    ratio: Option<f64>,
    command: String,
}

impl Figure {
    fn new(name: &str, value: f64, unit: &'static str, command: &str) -> Self {
        Self { name: name.to_owned(), value, unit, baseline: None, ratio: None, command: command.to_owned() }
    }

    fn against(self, baseline: f64) -> Self {
        let ratio = (baseline > 0.0).then(|| self.value / baseline);
        Self { baseline: Some(baseline), ratio, ..self }
    }
}

fn main() {
    let args = Args::parse();
    if let Some(path) = &args.plot {
        for (name, curve) in plot::draw(path, args.seed) {
            println!("{name}: {curve:.1?}");
        }
        return;
    }
    let command = format!(
        "cargo bench -p aliquot-controller --bench allocator -- --nodes {} --decisions {} --seed {} --seeds {}",
        args.nodes, args.decisions, args.seed, args.seeds
    );
    let mut figures = Vec::new();
    let one = [args.packing_only, args.selectors_only, args.budgets_only, args.hard_pods_only];
    let is_wanted = |only: bool| only || !one.contains(&true);
    if is_wanted(args.selectors_only) {
        figures.extend(selectors::measure(&command));
    }
    if is_wanted(args.budgets_only) {
        figures.extend(budgets::measure(&command));
    }
    if is_wanted(args.hard_pods_only) {
        figures.extend(hard_pods::measure(args.seed, &command));
    }
    if is_wanted(false) {
        figures.extend(speed::measure(&args, &command));
        figures.extend(upstream::measure(&args, &command));
    }
    if is_wanted(args.packing_only) && args.seeds > 0 {
        figures.extend(packing::measure(&args, &command));
        figures.extend(exact::measure(&args, &command));
    }
    if is_wanted(args.packing_only) && args.trace_seeds > 0 {
        figures.extend(trace::measure(&args, &command));
    }
    println!("{:<44} {:>12} {:>12} {:>8}  unit", "name", "value", "baseline", "ratio");
    for f in &figures {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.3}"));
        println!(
            "{:<44} {:>12.3} {:>12} {:>8}  {}",
            f.name,
            f.value,
            number(f.baseline),
            number(f.ratio),
            f.unit
        );
    }
    let own = std::env::current_exe().expect("a program");
    // <target>/release/deps/allocator-…
    let out = own.ancestors().nth(3).expect("in a target folder").join("bench");
    std::fs::create_dir_all(&out).expect("a folder for results");
    let json = serde_json::to_vec_pretty(&figures).expect("plain data");
    std::fs::write(out.join("allocator.json"), json).expect("written");
}

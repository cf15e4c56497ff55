//! `make bench`, node agent: what preparing costs over the real socket, and what the shipped program takes of a node.
//! Prints a table and writes `target/bench/node.json`.
//!
//! `cargo bench -p aliquot-kubelet-plugin --bench node -- --cycles 10000`; `ALIQUOT_AGENT` names the agent where it is not
//! to be the one of that build, as `make bench` does with the shipped one (`--profile node`).
//!
//! GPUs are simulated and answer at once, files are in memory, where a flush takes no time, and the API server is in this
//! process. The baseline of a time is the least that such a call can take, a call with no claim in it.
//!
//! `ALIQUOT_PEER` names NVIDIA's plugin, which is then measured beside ours ([`peer`]).
//!
//! Our part (`ours`) of a prepare is its time without that of one answer of the API server, for which the bench asks
//! just before as the agent does, and without what the driver took, which the agent counts
//! (`dra_gpu_driver_call_duration_seconds`; what else it asked of the driver meanwhile is in it too). Unpreparing asks
//! nothing of the API. Both still have the way over the socket in them, and whatever else runs on the machine; `cpu_ms`,
//! the processors' time of the agent for one of each and for all that follows from them (slices, status, metrics), does
//! not depend on that.
#![forbid(unsafe_code)]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a measurement ends where anything is not as it should be"
)]

#[path = "node/agent.rs"]
mod agent;
#[path = "../tests/common/mod.rs"]
mod common;
#[allow(unreachable_pub, reason = "it is public where all benchmarks share it")]
#[path = "../../e2e/src/figure.rs"]
mod figure;
#[path = "node/peer.rs"]
mod peer;
#[path = "node/prepare.rs"]
mod prepare;
#[path = "node/times.rs"]
mod times;

use agent::{Agent, Bench};
use clap::Parser;
use figure::Figure;
use serde_json::json;
use std::path::Path;
use std::time::Duration;

/// What is measured, and how long.
#[derive(Debug, Clone, Parser)]
struct Args {
    /// Timed prepares and unprepares of each kind of device.
    #[arg(long, default_value_t = 1_000)]
    samples: usize,
    /// Prepares and unprepares of shares, one after the other, over which memory must not grow.
    #[arg(long, default_value_t = 10_000)]
    cycles: usize,
    /// Seconds of looking at an idle agent.
    #[arg(long, default_value_t = 60)]
    idle: u64,
    /// What `cargo bench` passes on.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Regions of shares are file systems of their own, for which the agent, and before it this thread, needs mounts.
fn main() {
    let args = Args::parse();
    let storage = if common::private_mounts("regions on tmpfs") { "tmpfs" } else { "directory" };
    let figures = tokio::runtime::Runtime::new().expect("a runtime").block_on(measure(&args, storage));
    let target =
        Path::new(env!("CARGO_BIN_EXE_aliquot-kubelet-plugin")).ancestors().nth(2).expect("a target");
    let out = target.join("bench");
    std::fs::create_dir_all(&out).expect("a directory");
    figure::report(&out.join("node.json"), &figures).expect("written");
}

async fn measure(args: &Args, storage: &str) -> Vec<Figure> {
    let command = format!(
        "cargo bench -p aliquot-kubelet-plugin --bench node -- --samples {} --cycles {} --idle {} (8 simulated H100, \
         regions: {storage})",
        args.samples, args.cycles, args.idle
    );
    let figure = |name: &str, value: f64, unit: &str, baseline: f64| Figure {
        name: name.to_owned(),
        value,
        unit: unit.to_owned(),
        baseline,
        ratio: value / baseline,
        command: command.clone(),
        assumed: Vec::new(),
    };
    let bench = Bench::new(storage).await;
    let mut figures = Vec::new();

    let start = times::Times::of(bench.starts(20).await);
    figures.push(figure(
        "node.start_s",
        start.worst() / 1e3,
        "s to registered, worst of 20; baseline: the goal",
        1.0,
    ));

    let agent = bench.start().await;
    figures.push(figure("node.rss_mib", agent.rss_mib(), "MiB without claims; baseline: the goal", 20.0));
    figures.push(figure(
        "node.rss_anon_mib",
        agent.rss_anon_mib(),
        "MiB of it that are not of the program's file; baseline: all of it",
        agent.rss_mib(),
    ));
    figures.extend(prepare::figures(&bench, &agent, args.samples, &figure).await);
    let hundred = prepare::Hundred::allocate(&bench).await;
    let time = hundred.prepare(&bench).await;
    let unit = "ms until 100 claims that came at once are prepared; baseline: 2 ms each";
    figures.push(figure("node.prepare.hundred_ms", time, unit, 200.0));
    figures.push(figure(
        "node.rss_hundred_mib",
        agent.rss_mib(),
        "MiB with 100 claims; baseline: the goal",
        20.0,
    ));
    // Threads that were needed only then have ended.
    tokio::time::sleep(Duration::from_secs(30)).await;
    figures.push(figure(
        "node.rss_hundred_settled_mib",
        agent.rss_mib(),
        "MiB with 100 claims half a minute later; baseline: the goal",
        20.0,
    ));
    hundred.unprepare(&bench).await;

    let uid = bench.cluster.allocated_claim("cycled", &[("r", "gpu-3-share")], json!([])).await;
    prepare::cycles(&bench, &uid, args.cycles / 10).await;
    let (before, open) = (agent.rss_mib(), agent.holds());
    let cpu = agent.cpu();
    prepare::cycles(&bench, &uid, args.cycles - args.cycles / 10).await;
    let timed = args.cycles - args.cycles / 10;
    let each = (agent.cpu() - cpu).as_secs_f64() * 1e3 / timed as f64;
    let unit = "ms of processors for a share's prepare and unprepare, all that follows from them included; baseline: 4";
    figures.push(figure("node.cycle_cpu_ms", each, unit, 4.0));
    let (files, threads) = agent.holds();
    figures.push(figure(
        "node.files",
        files as f64,
        "open files after the cycles; baseline: before",
        open.0 as f64,
    ));
    figures.push(figure(
        "node.threads",
        threads as f64,
        "threads after them; baseline: before",
        open.1 as f64,
    ));
    let name = "node.growth_mib";
    let unit = format!("MiB more after {} cycles than after a tenth of them; baseline: before", args.cycles);
    figures.push(figure(name, agent.rss_mib() - before, &unit, before));

    figures.extend(idle(&bench, &agent, Duration::from_secs(args.idle), &figure).await);
    drop(agent);
    figures.extend(peer::figures(&bench, &figure).await);
    figures
}

/// What an agent takes and writes that nobody asks for anything.
async fn idle(
    bench: &Bench,
    agent: &Agent,
    time: Duration,
    figure: &impl Fn(&str, f64, &str, f64) -> Figure,
) -> Vec<Figure> {
    // What the cycles before have set off is done.
    tokio::time::sleep(Duration::from_secs(15)).await;
    let (cpu, writes) = (agent.cpu(), bench.cluster.plane.revision());
    tokio::time::sleep(time).await;
    let percent = (agent.cpu() - cpu).as_secs_f64() / time.as_secs_f64() * 100.0;
    let written = bench.cluster.plane.audit(writes).len();
    vec![
        figure("node.idle_cpu_percent", percent, "percent of a processor; baseline: the goal", 0.1),
        figure(
            "node.idle_writes",
            written as f64,
            "writes to the API; baseline: a heartbeat every 10 s",
            time.as_secs_f64() / 10.0,
        ),
    ]
}

//! `gpu-check`: the node agent and the limiter on a machine with an NVIDIA GPU and no Kubernetes.
//!
//! The stage `node` comes first ([`node`]). Then it runs every case plainly by `LD_PRELOAD` and in namespaces of its own with a bind-mounted `/etc/ld.so.preload`,
//! measures what the simulator assumes of drivers, and writes a file of results. `e2e/gpu/run` calls it.

/// Prints a line. Who read it may be gone (`| head`); what is being done goes on all the same.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

mod cases;
mod driver;
mod facts;
mod node;
mod report;
mod stage;
mod tenant;

use aliquot_sim_kubelet::{container, tether};
use anyhow::{Context, Result, ensure};
use clap::Parser;
use driver::Board;
use report::{Case, Found, Outcome, Report};
use serde_json::{Map, Value, json};
use stage::{Mode, Stage};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
#[command(name = "gpu-check", version)]
enum Args {
    /// Runs the stage `node` and the cases.
    Run(Box<Run>),
    /// Becomes a container.
    #[command(name = "__container", hide = true)]
    Container { spec: PathBuf, parent: u32 },
    /// Becomes a program that ends with its parent.
    #[command(name = "__tether", hide = true)]
    Tether {
        parent: u32,
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// A program in a case; prints lines of JSON.
    #[command(hide = true)]
    Tenant {
        /// Role and its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        role: Vec<String>,
    },
}

#[derive(Debug, Parser)]
struct Run {
    #[command(flatten)]
    node: node::Setting,
    /// Folder of the cases' scripts.
    #[arg(long)]
    cases: PathBuf,
    /// Where the results go.
    #[arg(long)]
    out: PathBuf,
    /// Only cases whose name contains this; `node` is the stage of that name.
    #[arg(long, default_value = "")]
    only: String,
    /// Tenths of the length: shows that everything runs, and measures nothing.
    #[arg(long)]
    quick: bool,
    /// Cases that would begin after so many seconds are skipped.
    #[arg(long, default_value_t = 540)]
    seconds: u64,
}

fn main() -> ExitCode {
    let done = match Args::parse() {
        Args::Run(run) => run_all(&run),
        // Before any thread exists.
        Args::Container { spec, parent } => return container::run(&spec, parent),
        Args::Tether { parent, program, args } => return tether::run(parent, &program, &args),
        Args::Tenant { role } => tenant::run(&role).map(|()| true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu-check: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Name of the stage of the node agent.
const NODE: &str = "node";

/// Runs everything; whether no case and no promise failed.
fn run_all(run: &Run) -> Result<bool> {
    let started = Instant::now();
    let date = jiff::Timestamp::now().to_string();
    let node = NODE.contains(&run.only).then(|| node::run(&run.node));
    let limiter = Board::first().and_then(|board| Ok((limiter(run, &board, started), device(&board)?)));
    let (found, mut device) = match limiter {
        Ok((found, device)) => (found, device),
        Err(error) => (Err(error), json!({"name": "unknown", "driver": "unknown"})),
    };
    // What the agent was seen to do is worth a file even where no CUDA program starts.
    let Limiter { rounds_per_us, facts, cases } = match found {
        Ok(found) => found,
        Err(error) if node.is_some() => Limiter::failed(&error),
        Err(error) => return Err(error),
    };
    ensure!(!cases.is_empty() || node.is_some(), "no case has {:?} in its name", run.only);
    if let Some(device) = device.as_object_mut() {
        device.insert("rounds_per_us".to_owned(), json!(rounds_per_us));
    }
    let report = Report {
        date,
        aliquot: env!("CARGO_PKG_VERSION"),
        simulated: std::env::var_os("ALIQUOT_SIM_NODE").is_some(),
        device,
        machine: machine(),
        facts,
        node,
        cases,
    };
    std::fs::write(&run.out, serde_json::to_vec_pretty(&report)?)
        .with_context(|| run.out.display().to_string())?;
    say!("{} after {:.0} s", run.out.display(), started.elapsed().as_secs_f64());
    let agent_holds = report.node.as_ref().is_none_or(node::Section::holds);
    Ok(agent_holds && report.cases.iter().all(|case| case.outcome != Outcome::Failed))
}

fn device(board: &Board) -> Result<Value> {
    let (total, _) = board.memory()?;
    Ok(json!({
        "name": board.name(), "uuid": board.uuid(), "memory_bytes": total, "driver": board.driver(),
    }))
}

/// What was found with the limiter, and without it.
struct Limiter {
    rounds_per_us: u64,
    facts: Map<String, Value>,
    cases: Vec<Case>,
}

impl Limiter {
    /// Nothing could be tried.
    fn failed(error: &anyhow::Error) -> Self {
        let case = Case {
            name: "CUDA programs start without the limiter".to_owned(),
            mode: Mode::Bare.name(),
            outcome: Outcome::Failed,
            reason: format!("{error:#}"),
            figures: Value::Null,
            seconds: 0.0,
        };
        tell(&case);
        Self { rounds_per_us: 0, facts: Map::new(), cases: vec![case] }
    }
}

fn tell(case: &Case) {
    say!("{:<9} {} ({}) {}", format!("{:?}", case.outcome), case.name, case.mode, case.reason);
}

/// Measures the facts and runs the cases.
fn limiter(run: &Run, board: &Board, started: Instant) -> Result<Limiter> {
    let mut stage = Stage::new(&run.node.hook, &board.uuid())?;
    let calibrated = stage.run(Mode::Bare, None, &["calibrate"])?;
    let rounds_per_us = calibrated.get("rounds_per_us").and_then(Value::as_u64).context("no calibration")?;
    stage.env.push(("GPU_CHECK_ROUNDS_PER_US".to_owned(), rounds_per_us.to_string()));
    let namespaces = namespaces();
    let facts = facts::all(&stage, board, run.quick, namespaces.is_ok());
    let setting =
        cases::Setting { stage: &stage, folder: run.cases.clone(), hurry: if run.quick { 10 } else { 1 } };
    let mut all = Vec::new();
    for case in cases::ALL.iter().filter(|case| case.name.contains(&run.only)) {
        for mode in [Mode::Preloaded, Mode::Unshared] {
            let before = Instant::now();
            let found = match (&namespaces, mode) {
                _ if started.elapsed() > Duration::from_secs(run.seconds) => {
                    Ok(Found::skipped(format!("{} s were over", run.seconds)))
                }
                (Err(why), Mode::Unshared) => Ok(Found::skipped(why.clone())),
                _ => (case.run)(&setting, mode),
            };
            let found = found.unwrap_or_else(|e| Found::promised(false, &format!("{e:#}"), Value::Null));
            let case = Case {
                name: case.name.to_owned(),
                mode: mode.name(),
                outcome: found.outcome,
                reason: found.reason,
                figures: found.figures,
                seconds: before.elapsed().as_secs_f64(),
            };
            tell(&case);
            all.push(case);
        }
    }
    Ok(Limiter { rounds_per_us, facts, cases: all })
}

/// Whether programs can be started in namespaces of their own with mounts, or why not.
fn namespaces() -> Result<(), String> {
    let mut command = Command::new("unshare");
    command.args(["-p", "-m", "--fork", "--kill-child", "--mount-proc", "mount", "--bind", "/etc", "/etc"]);
    match command.output() {
        Err(error) => Err(format!("unshare does not start: {error}")),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(format!("namespaces with mounts cannot be made here: {said}"))
        }
    }
}

fn machine() -> Value {
    let read = |path: &str| std::fs::read_to_string(path).map(|t| t.trim().to_owned()).unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    json!({"kernel": read("/proc/sys/kernel/osrelease"), "processors": processors})
}

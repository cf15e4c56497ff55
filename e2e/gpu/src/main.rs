//! `gpu-check`: the limiter on a machine with an NVIDIA GPU and no container runtime.
//!
//! Runs every case plainly by `LD_PRELOAD` and in namespaces of its own with a bind-mounted `/etc/ld.so.preload`,
//! measures what the simulator assumes of drivers, and writes a file of results. `e2e/gpu/run` calls it.

mod cases;
mod driver;
mod facts;
mod report;
mod stage;
mod tenant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use driver::Board;
use report::{Case, Found, Outcome, Report};
use serde_json::{Value, json};
use stage::{Mode, Stage};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
#[command(name = "gpu-check", version)]
enum Args {
    /// Runs the cases.
    Run(Run),
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
    /// Folder of libaliquot_preload.so and libaliquot_core.so.
    #[arg(long)]
    hook: PathBuf,
    /// Folder of the cases' scripts.
    #[arg(long)]
    cases: PathBuf,
    /// Where the results go.
    #[arg(long)]
    out: PathBuf,
    /// Only cases whose name contains this.
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

/// Runs everything; whether no case failed.
fn run_all(run: &Run) -> Result<bool> {
    let started = Instant::now();
    let date = jiff::Timestamp::now().to_string();
    let board = Board::first()?;
    let mut stage = Stage::new(&run.hook, &board.uuid())?;
    let calibrated = stage.run(Mode::Bare, None, &["calibrate"])?;
    let per_us = calibrated.get("rounds_per_us").and_then(Value::as_u64).context("no calibration")?;
    stage.env.push(("GPU_CHECK_ROUNDS_PER_US".to_owned(), per_us.to_string()));
    let namespaces = namespaces();
    let facts = facts::all(&stage, &board, run.quick, namespaces.is_ok());
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
            println!("{:<9} {} ({}) {}", format!("{:?}", case.outcome), case.name, case.mode, case.reason);
            all.push(case);
        }
    }
    ensure!(!all.is_empty(), "no case has {:?} in its name", run.only);
    let (total, _) = board.memory()?;
    let report = Report {
        date,
        aliquot: env!("CARGO_PKG_VERSION"),
        simulated: std::env::var_os("ALIQUOT_SIM_NODE").is_some(),
        device: json!({
            "name": board.name(), "uuid": board.uuid(), "memory_bytes": total, "driver": board.driver(),
            "rounds_per_us": per_us,
        }),
        machine: machine(),
        facts,
        cases: all,
    };
    std::fs::write(&run.out, serde_json::to_vec_pretty(&report)?)
        .with_context(|| run.out.display().to_string())?;
    println!("{} after {:.0} s", run.out.display(), started.elapsed().as_secs_f64());
    Ok(report.cases.iter().all(|case| case.outcome != Outcome::Failed))
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

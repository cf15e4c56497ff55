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
mod closing;
mod driver;
mod facts;
mod guard;
mod habits;
mod life;
mod modes;
mod node;
mod report;
mod stage;
mod tenant;

use aliquot_sim_kubelet::{container, tether};
use anyhow::{Context, Result};
use clap::Parser;
use driver::Board;
use report::{Case, Found, Outcome, Report};
use serde_json::{Map, Value, json};
use stage::{Mode, Stage};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
#[command(name = "gpu-check", version)]
enum Args {
    /// Runs the stage `node` and the cases.
    Run(Box<Run>),
    /// The run itself, in a folder of its own, while the process `guard` watches over it.
    #[command(name = "__run", hide = true)]
    Watched {
        folder: PathBuf,
        guard: u32,
        #[command(flatten)]
        run: Box<Run>,
    },
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
    /// Where the results go; the last one counts, as `e2e/gpu/run` gives one before its arguments.
    #[arg(long, overrides_with = "out")]
    out: PathBuf,
    /// Only cases whose name contains this; `node` is the stage of that name.
    #[arg(long, default_value = "")]
    only: String,
    /// Tenths of the length: shows that everything runs, and measures nothing.
    #[arg(long)]
    quick: bool,
    /// Cases that would begin after so many seconds are skipped; a little later what still runs is ended.
    #[arg(long, default_value_t = 540)]
    seconds: u64,
}

/// What a case may last beyond the seconds of the run: with it and the end a run stays within ten minutes.
const LATE: Duration = Duration::from_secs(25);

fn main() -> ExitCode {
    let done = match Args::parse() {
        Args::Run(run) => {
            let arguments: Vec<OsString> = std::env::args_os().skip(2).collect();
            guard::watch(&arguments, &run.node)
        }
        Args::Watched { folder, guard, run } => {
            let done = life::listen(guard).and_then(|()| run_all(&run, &folder));
            guard::tidy(&folder, guard);
            done.map(|is_good| u8::from(!is_good))
        }
        // Before any thread exists.
        Args::Container { spec, parent } => return container::run(&spec, parent),
        Args::Tether { parent, program, args } => return tether::run(parent, &program, &args),
        Args::Tenant { role } => tenant::run(&role).map(|()| 0),
    };
    match done {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("gpu-check: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Name of the stage of the node agent.
const NODE: &str = "node";

/// Runs everything; whether no case and no promise failed.
fn run_all(run: &Run, folder: &Path) -> Result<bool> {
    let started = Instant::now();
    life::set_end(started + Duration::from_secs(run.seconds) + LATE);
    let with_node = NODE.contains(&run.only);
    let chosen: Vec<&cases::Case> = cases::ALL.iter().filter(|case| case.name.contains(&run.only)).collect();
    anyhow::ensure!(with_node || !chosen.is_empty(), "no case has {:?} in its name", run.only);
    let mut report = Report {
        date: jiff::Timestamp::now().to_string(),
        aliquot: env!("CARGO_PKG_VERSION"),
        complete: false,
        simulated: is_simulated(&run.node.proc_root),
        device: json!({"name": "unknown", "driver": "unknown"}),
        machine: machine(),
        facts: Map::new(),
        node: None,
        cuda: Vec::new(),
        unchanged: None,
        cases: Vec::new(),
    };
    report.save(&run.out)?;
    let boards = Board::all(&run.node.driver_root);
    let before = boards.as_ref().map(|boards| modes::read(boards)).unwrap_or_default();
    if let Some(board) = boards.as_ref().ok().and_then(|boards| boards.first()) {
        report.device = device(board)?;
    }
    if with_node {
        report.node = Some(node::run(&run.node, folder));
        report.save(&run.out)?;
    }
    match &boards {
        _ if life::is_stopped() => {}
        Ok(boards) => {
            let tried = limiter(run, boards, &chosen, started, &mut report);
            tried.unwrap_or_else(|error| report.cases.push(untried(Outcome::Failed, format!("{error:#}"))));
        }
        Err(error) => report.cases.push(untried(Outcome::Failed, format!("{error:#}"))),
    }
    if let Ok(boards) = &boards {
        report.unchanged = Some(modes::unchanged(&before, &modes::read(boards)));
    }
    report.complete = !life::is_stopped();
    report.save(&run.out)?;
    let path = run.out.display().to_string();
    say!("{}", closing::text(&report, &path, started.elapsed().as_secs_f64()));
    Ok(report.holds())
}

/// Whether the driver is the simulated one, which says so itself.
fn is_simulated(proc_root: &Path) -> bool {
    let version = std::fs::read_to_string(proc_root.join("driver/nvidia/version")).unwrap_or_default();
    let node = Path::new(aliquot_sim_node::DEFAULT_DIR).join("node.json");
    version.contains("(simulated)") || std::env::var_os("ALIQUOT_SIM_NODE").is_some() || node.exists()
}

fn device(board: &Board) -> Result<Value> {
    let (total, _) = board.memory()?;
    Ok(json!({
        "name": board.name(), "uuid": board.uuid(), "memory_bytes": total, "driver": board.driver(),
    }))
}

/// The cases as a whole, where none could be tried.
fn untried(outcome: Outcome, reason: String) -> Case {
    let name = match outcome {
        Outcome::Failed => "CUDA programs start without the limiter",
        _ => "cases of the limiter",
    };
    let case = Case {
        name: name.to_owned(),
        mode: Mode::Bare.name(),
        outcome,
        reason,
        figures: Value::Null,
        seconds: 0.0,
    };
    tell(&case);
    case
}

fn tell(case: &Case) {
    let outcome = format!("{:?}", case.outcome).to_lowercase();
    let reason = if case.reason.is_empty() { String::new() } else { format!(": {}", case.reason) };
    say!("{outcome:<9} {} ({}){reason}", case.name, case.mode);
}

/// Measures the facts and runs the cases, on the first GPU that nobody uses.
fn limiter(
    run: &Run,
    boards: &[Board],
    chosen: &[&cases::Case],
    started: Instant,
    report: &mut Report,
) -> Result<()> {
    let Some(board) = boards.iter().find(|board| board.why_not().is_none()) else {
        let why = |board: &Board| format!("{}: {}", board.uuid(), board.why_not().unwrap_or_default());
        let all: Vec<String> = boards.iter().map(why).collect();
        report.cases.push(untried(Outcome::Skipped, format!("no GPU is free for them ({})", all.join("; "))));
        return Ok(());
    };
    report.device = device(board)?;
    let mut stage = Stage::new(&run.node.hook, &board.uuid(), &run.node.roots())?;
    let calibrated = stage.run(Mode::Bare, None, &["calibrate"])?;
    let rounds_per_us = calibrated.get("rounds_per_us").and_then(Value::as_u64).context("no calibration")?;
    if let Some(device) = report.device.as_object_mut() {
        device.insert("rounds_per_us".to_owned(), json!(rounds_per_us));
    }
    stage.env.push(("GPU_CHECK_ROUNDS_PER_US".to_owned(), rounds_per_us.to_string()));
    let namespaces = namespaces();
    report.facts = facts::all(&stage, board, &run.node.driver_root, run.quick, namespaces.is_ok());
    report.cuda = habits::lines(&stage);
    for line in &report.cuda {
        say!("{line}");
    }
    report.save(&run.out)?;
    let setting = cases::Setting {
        stage: &stage,
        folder: run.cases.clone(),
        runtime_program: run.node.program("runtime").ok(),
        hurry: if run.quick { 10 } else { 1 },
    };
    for case in chosen {
        for mode in [Mode::Preloaded, Mode::Unshared] {
            if life::is_stopped() {
                return Ok(());
            }
            let before = Instant::now();
            let found = match (&namespaces, mode) {
                _ if started.elapsed() > Duration::from_secs(run.seconds) => {
                    Ok(Found::skipped(format!("{} s were over", run.seconds)))
                }
                (Err(why), Mode::Unshared) => Ok(Found::skipped(why.clone())),
                _ => (case.run)(&setting, mode),
            };
            if life::is_stopped() {
                return Ok(());
            }
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
            report.cases.push(case);
            report.save(&run.out)?;
        }
    }
    Ok(())
}

/// Whether programs can be started in namespaces of their own with mounts, or why not.
fn namespaces() -> Result<(), String> {
    let mut command = Command::new("unshare");
    command.args(["-p", "-m", "--fork", "--kill-child", "--mount-proc", "mount", "--bind", "/etc", "/etc"]);
    match life::output(&mut command, stage::LONGEST) {
        Err(error) => Err(format!("{error:#}")),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("namespaces with mounts cannot be made here: {}", life::said(&output))),
    }
}

fn machine() -> Value {
    let read = |path: &str| std::fs::read_to_string(path).map(|t| t.trim().to_owned()).unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    json!({"kernel": read("/proc/sys/kernel/osrelease"), "processors": processors})
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;

    #[test]
    fn of_two_places_for_the_results_the_last_counts() {
        let line = ["gpu-check", "run", "--hook", "h", "--cases", "c", "--out", "first", "--out", "last"];
        let args = Args::try_parse_from(line).unwrap();
        assert!(matches!(&args, Args::Run(run) if run.out == Path::new("last")), "{args:?}");
    }
}

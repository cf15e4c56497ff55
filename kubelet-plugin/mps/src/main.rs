//! `aliquot-mps`: runs NVIDIA's MPS control daemon for each claim that asks for one. See the library.

use aliquot_mps::contract::MpsDir;
use aliquot_mps::isolate::{self, HOPELESS, Isolation, Part, Role, Roots};
use aliquot_mps::keeper::Timing;
use aliquot_mps::supervise::{self, Launcher};
use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;

/// Runs NVIDIA's MPS control daemon for each claim that asks for one.
#[derive(Debug, Parser)]
#[command(name = "aliquot-mps", version)]
struct Args {
    /// Directory that the node agent asks in, `<plugin-dir>/<driver-name>/mps`.
    #[arg(long, env = "MPS_DIR", default_value = "/var/lib/kubelet/plugins/gpu.aliquot.dev/mps")]
    mps_dir: PathBuf,

    #[command(flatten)]
    place: Place,

    /// Log format.
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,

    #[command(subcommand)]
    command: Option<Task>,
}

/// Where things are.
#[derive(Debug, Clone, clap::Args)]
struct Place {
    /// Root of the file system with the driver's files.
    #[arg(long, env = "DRIVER_ROOT", default_value = "/", global = true)]
    driver_root: PathBuf,

    /// The driver root as the host sees it, if it is another path.
    #[arg(long, env = "HOST_DRIVER_ROOT", global = true)]
    host_driver_root: Option<PathBuf>,

    /// Root of the host's file system. A driver that is files alone, without a loader and libc, runs there.
    #[arg(long, env = "HOST_ROOT", global = true)]
    host_root: Option<PathBuf>,

    /// Where `/proc` is: its list of devices has their numbers.
    #[arg(long, env = "PROC_ROOT", default_value = "/proc", global = true)]
    proc_root: PathBuf,

    /// Run daemons where this process runs, for tests without rights.
    #[arg(long, hide = true, global = true)]
    without_isolation: bool,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Becomes the control daemon of one claim. The supervisor runs this.
    #[command(hide = true)]
    Daemon {
        /// Directory of the claim.
        directory: PathBuf,
        /// Group of the claim's processes.
        #[arg(long)]
        group: u32,
        /// Become a program instead that tells the daemon what standard input says.
        #[arg(long)]
        control: bool,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LogFormat {
    /// For people.
    Text,
    /// For machines, one object a line.
    Json,
}

impl Place {
    fn roots(&self) -> Roots {
        Roots {
            driver: self.driver_root.clone(),
            driver_on_host: self.host_driver_root.clone().unwrap_or_else(|| self.driver_root.clone()),
            host: self.host_root.clone(),
            proc: self.proc_root.clone(),
        }
    }

    fn isolation(&self) -> Isolation {
        if self.without_isolation { Isolation::None } else { Isolation::Full }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match &args.command {
        Some(Task::Daemon { directory, group, control }) => {
            let role = if *control { Role::Control } else { Role::Daemon };
            daemon(&args.place, directory, Part { role, group: *group })
        }
        None => serve(&args),
    }
}

fn serve(args: &Args) -> ExitCode {
    start_logging(args.log_format);
    let served = std::env::current_exe().context("cannot find this program").and_then(|program| {
        let (roots, isolation) = (args.place.roots(), args.place.isolation());
        let launcher = Launcher { program, roots, isolation };
        supervise::run(&MpsDir::new(&args.mps_dir), &launcher, &Timing::default())
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "giving up");
            ExitCode::FAILURE
        }
    }
}

fn daemon(place: &Place, directory: &std::path::Path, part: Part) -> ExitCode {
    use std::io::Write;
    let claim = directory
        .parent()
        .zip(directory.file_name().and_then(|name| name.to_str()))
        .context("the directory of a claim has a parent and a name")
        .and_then(|(parent, uid)| Ok(MpsDir::new(parent).claim(uid)?));
    let (reason, hopeless) = match claim {
        Ok(claim) => {
            let error = isolate::become_program(&claim, &place.roots(), place.isolation(), part);
            (error.to_string(), error.is_hopeless())
        }
        Err(error) => (format!("{error:#}"), true),
    };
    // The supervisor reads it from the log.
    let _ = writeln!(std::io::stderr(), "{reason}");
    match u8::try_from(HOPELESS) {
        Ok(status) if hopeless => ExitCode::from(status),
        _ => ExitCode::FAILURE,
    }
}

fn start_logging(format: LogFormat) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}

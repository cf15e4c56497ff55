//! The command line.

use crate::isolate::{Isolation, Roots};
use clap::{Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Runs NVIDIA's MPS control daemon for each claim that asks for one.
#[derive(Debug, Parser)]
#[command(name = "aliquot-mps", version)]
pub struct Args {
    /// Directory that the node agent asks in, `<plugin-dir>/<driver-name>/mps`.
    #[arg(long, env = "MPS_DIR", default_value = "/var/lib/kubelet/plugins/gpu.aliquot.dev/mps")]
    pub mps_dir: PathBuf,

    /// Where things are.
    #[command(flatten)]
    pub place: Place,

    /// Log format.
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// What to be; the supervisor unless said.
    #[command(subcommand)]
    pub command: Option<Task>,
}

/// Where things are.
#[derive(Debug, Clone, clap::Args)]
pub struct Place {
    /// Root of the file system with the driver's files.
    #[arg(long, env = "DRIVER_ROOT", default_value = "/", global = true)]
    pub driver_root: PathBuf,

    /// The driver root as the host sees it, if it is another path.
    #[arg(long, env = "HOST_DRIVER_ROOT", global = true)]
    pub host_driver_root: Option<PathBuf>,

    /// Root of the host's file system. A driver that is files alone, without a loader and libc, runs there.
    #[arg(long, env = "HOST_ROOT", global = true)]
    pub host_root: Option<PathBuf>,

    /// Where `/proc` is: its list of devices has their numbers.
    #[arg(long, env = "PROC_ROOT", default_value = "/proc", global = true)]
    pub proc_root: PathBuf,

    /// Run daemons where this process runs, for tests without rights.
    #[arg(long, hide = true, global = true)]
    pub without_isolation: bool,
}

/// What the program becomes.
#[derive(Debug, Subcommand)]
pub enum Task {
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

/// How log lines are written.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines, one object a line.
    Json,
}

impl Place {
    /// All roots.
    pub fn roots(&self) -> Roots {
        Roots {
            driver: self.driver_root.clone(),
            driver_on_host: self.host_driver_root.clone().unwrap_or_else(|| self.driver_root.clone()),
            host: self.host_root.clone(),
            proc: self.proc_root.clone(),
        }
    }

    /// Whether daemons run apart from this process.
    pub fn isolation(&self) -> Isolation {
        if self.without_isolation { Isolation::None } else { Isolation::Full }
    }
}

//! `aliquot-sim`: makes and looks at simulated nodes, and makes things go wrong on them.
//!
//! Under the name `nvidia-smi` it plays the few commands of that program that node agents and examples run.

mod args;
mod query;
mod show;
mod smi;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use aliquot_sim_node::{DEFAULT_DIR, Node, NodeError, RecordError, create, reboot};

use crate::args::{Command, USAGE};

/// Why the program ends without success.
#[derive(Debug, thiserror::Error)]
enum CliError {
    /// The command line is not understood.
    #[error("{0}")]
    Usage(String),
    /// The node refused.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The record of a real driver cannot be used.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// NVML does not answer.
    #[error(transparent)]
    Nvml(#[from] nvml_wrapper::error::NvmlError),
    /// The specification file cannot be read.
    #[error("could not read {}: {reason}", path.display())]
    Spec {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

fn main() -> ExitCode {
    let mut words = std::env::args();
    let program = words.next().unwrap_or_default();
    let words: Vec<String> = words.collect();
    let as_smi = Path::new(&program).file_name() == Some(OsStr::new("nvidia-smi"));
    let outcome = if as_smi { smi::run(&words) } else { run(&words) };
    match outcome {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            let cause = std::error::Error::source(&error).map(|s| format!(": {s}")).unwrap_or_default();
            eprintln!("{}: {error}{cause}", if as_smi { "nvidia-smi" } else { "aliquot-sim" });
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[String]) -> Result<String, CliError> {
    let args = args::parse(words).map_err(|e| CliError::Usage(format!("{e}\n\n{USAGE}")))?;
    let dir = args.node.unwrap_or_else(|| {
        std::env::var_os("ALIQUOT_SIM_NODE").map_or_else(|| PathBuf::from(DEFAULT_DIR), PathBuf::from)
    });
    let open = || Node::open(&dir);
    let done = |()| String::new();
    match args.command {
        Command::Help => Ok(format!("{USAGE}\n")),
        Command::Create(request) => {
            let spec = request.spec()?;
            let node = create(&dir, &spec)?;
            Ok(show::show(&node, false)?)
        }
        Command::Show { json } => Ok(show::show(&open()?, json)?),
        Command::Xid { gpu, xid } => {
            Ok(open()?.raise_xid(gpu, xid, None, None).map(|n| format!("event {n}\n"))?)
        }
        Command::Ecc { gpu, uncorrected, count } => {
            Ok(open()?.raise_ecc(gpu, uncorrected, count).map(|n| format!("event {n}\n"))?)
        }
        Command::Fault(fault) => Ok(open()?.add_fault(&fault).map(|id| format!("fault {id}\n"))?),
        Command::Clear(id) => Ok(open()?.remove_faults(id).map(done)?),
        Command::View(view) => Ok(open()?.set_process_view(view).map(done)?),
        Command::LoadUvm => Ok(open()?.load_uvm().map(done)?),
        Command::Unload { force } => Ok(open()?.unload_module(force).map(done)?),
        Command::Load { renumber, version } => {
            let node = open()?;
            if renumber {
                node.renumber()?;
            }
            Ok(node.load_module(version.as_deref()).map(done)?)
        }
        Command::Reset(gpu) => Ok(open()?.reset(gpu).map(done)?),
        Command::Reboot => Ok(reboot(&dir).map(done)?),
    }
}

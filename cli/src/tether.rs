//! Processes that end with the demo, however it ends.
//!
//! A program is started through this one, which asks the kernel to be killed with its parent before it becomes that
//! program. So nobody has to be there to end it.

use crate::args::TetherArgs;
use anyhow::{Context, Result, ensure};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;
use tokio::process::Child;

/// How long the kernel may take to end a process that was killed.
const KILLED: Duration = Duration::from_secs(10);

/// A command that runs a program for as long as this process runs. Arguments of the program can be added.
pub(crate) fn command(own: &Path, program: &Path) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(own);
    command.arg("__tether").arg(std::process::id().to_string()).arg(program).kill_on_drop(true);
    // Who interrupts the demo at a terminal interrupts it alone; it ends its programs itself.
    command.process_group(0);
    command
}

/// Has the kernel kill this process when its parent ends. It watches the thread that started this process: in the
/// demo that is the main thread, on which everything but its servers runs.
pub(crate) fn end_with(parent: u32) -> Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL).context("cannot ask to end with the demo")?;
    // It may have ended before the kernel was asked.
    ensure!(u32::try_from(nix::unistd::getppid().as_raw()) == Ok(parent), "the demo has ended");
    Ok(())
}

/// Becomes a program that ends with its parent. Never returns if all goes well.
pub(crate) fn run(args: &TetherArgs) -> ExitCode {
    let error = match end_with(args.parent) {
        Err(error) => error,
        Ok(()) => Command::new(&args.program).args(&args.args).exec().into(),
    };
    eprintln!("aliquot: cannot run {}: {error:#}", args.program.display());
    ExitCode::from(127)
}

/// A child that has ended when this is dropped, so that what it used can be removed.
pub(crate) struct Tethered(pub(crate) Child);

impl Drop for Tethered {
    fn drop(&mut self) {
        let pause = Duration::from_millis(5);
        if self.0.start_kill().is_err() {
            return;
        }
        let mut waited = Duration::ZERO;
        while waited < KILLED && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(pause);
            waited = waited.saturating_add(pause);
        }
    }
}

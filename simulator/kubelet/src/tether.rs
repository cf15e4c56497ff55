//! Processes that end with the program that started them, however it ends.
//!
//! A program is started through this one, which asks the kernel to be killed with its parent before it becomes that
//! program. So nobody has to be there to end it.

use anyhow::{Context, Result, ensure};
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;
use tokio::process::Child;

/// How long a process may take to end that was told to.
const KILLED: Duration = Duration::from_secs(10);

/// A command that runs a program for as long as this process runs. Arguments of the program can be added. The program
/// `own` hands `__tether`'s arguments to [`run`].
pub fn command(own: &Path, program: &Path) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(own);
    command.arg("__tether").arg(std::process::id().to_string()).arg(program).kill_on_drop(true);
    // Who interrupts this process at a terminal interrupts it alone; it ends its programs itself.
    command.process_group(0);
    command
}

/// Has the kernel kill this process when its parent ends. It watches the thread that started this process: in the
/// demo that is the main thread, on which everything but its servers runs.
///
/// # Errors
/// If the parent has ended already.
pub fn end_with(parent: u32) -> Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL).context("cannot ask to end with the process that started us")?;
    // It may have ended before the kernel was asked.
    let stat = std::fs::read_to_string("/proc/self/stat").context("cannot read who started us")?;
    ensure!(parent_of(&stat) == Some(parent), "the process that started us has ended");
    Ok(())
}

/// The parent in a line of `/proc/<pid>/stat`. Unlike `getppid` that names one in another PID namespace, too, as long as
/// `/proc` is of that one.
fn parent_of(stat: &str) -> Option<u32> {
    // The program's name, in parentheses, can have anything in it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Becomes a program that ends with its parent. Never returns if all goes well.
pub fn run(parent: u32, program: &Path, args: &[OsString]) -> ExitCode {
    let error = match end_with(parent) {
        Err(error) => error,
        Ok(()) => Command::new(program).args(args).exec().into(),
    };
    eprintln!("cannot run {}: {error:#}", program.display());
    ExitCode::from(127)
}

/// A child that has ended when this is dropped, so that what it used can be removed.
pub struct Tethered(pub Child);

impl Tethered {
    /// Asks a program to end that ends what it started itself, and waits for that.
    pub fn terminate(&mut self) {
        let pid = self.0.id().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid
            && kill(Pid::from_raw(pid), Signal::SIGTERM).is_ok()
        {
            self.wait();
        }
    }

    fn wait(&mut self) {
        let pause = Duration::from_millis(5);
        let mut waited = Duration::ZERO;
        while waited < KILLED && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(pause);
            waited = waited.saturating_add(pause);
        }
    }
}

impl Drop for Tethered {
    fn drop(&mut self) {
        if self.0.start_kill().is_ok() {
            self.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_read_whatever_the_program_is_called() {
        assert_eq!(parent_of("12 (a) b) S 7 12 12 0 -1"), Some(7));
        assert_eq!(parent_of("12 (a"), None);
    }
}

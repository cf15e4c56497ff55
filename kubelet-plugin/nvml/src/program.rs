//! Runs programs of the driver, with a time limit.

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_millis(10);
/// The largest number of bytes of output that are read.
const MOST_OUTPUT: u64 = 16 << 10;

/// The end of a program.
pub(crate) enum Ended {
    /// The program ended by itself, with this output.
    Exited(ExitStatus, String),
    /// The program did not end in time and was killed, with all processes that it had started.
    Killed,
}

/// Runs a program in a process group of its own, for `limit` at most. The program writes to a file, not to a
/// pipe, so that nothing waits for a process that it left behind.
///
/// # Errors
/// Fails if the program cannot be started.
pub(crate) fn run(command: &mut Command, limit: Duration) -> io::Result<Ended> {
    let mut said = output()?;
    command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said.try_clone()?).process_group(0);
    let mut child = command.spawn()?;
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            let mut text = Vec::new();
            said.seek(SeekFrom::Start(0))?;
            said.take(MOST_OUTPUT).read_to_end(&mut text)?;
            return Ok(Ended::Exited(status, String::from_utf8_lossy(&text).trim().to_owned()));
        }
        if started.elapsed() >= limit {
            kill(child);
            return Ok(Ended::Killed);
        }
        std::thread::sleep(LOOK);
    }
}

/// Returns a file in memory.
fn output() -> io::Result<File> {
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    Ok(File::from(nix::sys::memfd::memfd_create("output", flags)?))
}

fn kill(mut child: Child) {
    if let Ok(group) = i32::try_from(child.id()) {
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    // A program that is stuck in the driver does not end; only this thread waits for it.
    let _ = std::thread::Builder::new().name("reap".to_owned()).spawn(move || child.wait());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(line: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", line]);
        command
    }

    #[test]
    fn a_program_that_does_not_end_is_killed_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let pids = dir.path().join("pids");
        let line = format!("sleep 600 & echo $$ $! > {0}.new; mv {0}.new {0}; wait", pids.display());
        let ended = run(&mut shell(&line), Duration::from_secs(2)).unwrap();
        assert!(matches!(ended, Ended::Killed));
        let pids = std::fs::read_to_string(pids).unwrap();
        let runs = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            !stat.is_empty() && !stat.contains(") Z ")
        };
        let started = Instant::now();
        while pids.split_whitespace().any(runs) {
            assert!(started.elapsed() < Duration::from_secs(30), "{pids} still run");
            std::thread::sleep(LOOK);
        }
    }

    #[test]
    fn a_program_that_leaves_one_behind_is_not_waited_for() {
        let ended = run(&mut shell("sleep 5 & echo done"), Duration::from_secs(60)).unwrap();
        let Ended::Exited(status, said) = ended else { panic!("killed") };
        assert!(status.success());
        assert_eq!(said, "done");
    }
}

//! Processes of daemons, known by a variable in their environment, which a daemon's servers inherit. Its value has the
//! claim's uid in it, so nobody can have another claim's daemon taken for running by setting it; a program that sets
//! it to its own claim's is ended with the daemon.
//!
//! A process is signalled through a descriptor that was opened before its environment was read, so a process id that
//! is used again never meets the wrong process.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The variable; its value is the claim's directory.
pub const MARK: &str = "ALIQUOT_MPS_CLAIM";

/// A process of a daemon.
#[derive(Debug)]
pub struct Process {
    /// Its process id.
    pub pid: u32,
    handle: OwnedFd,
}

impl Process {
    /// Kills it. One that is gone is no error.
    pub fn kill(&self) {
        // It is gone, or the next look finds it again.
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
    }
}

/// Processes of the daemon of the claim in this directory.
pub fn of_claim(claim: &Path) -> Vec<Process> {
    marked(|value| value == claim.as_os_str().as_bytes())
}

/// Processes of every daemon of this directory.
pub fn of_all(mps_dir: &Path) -> Vec<Process> {
    let prefix = [mps_dir.as_os_str().as_bytes(), b"/"].concat();
    marked(|value| value.starts_with(&prefix))
}

fn marked(is_ours: impl Fn(&[u8]) -> bool) -> Vec<Process> {
    let own = std::process::id();
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| *pid != own)
        .filter_map(|pid| {
            let raw = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
            let handle = pidfd_open(raw, PidfdFlags::empty()).ok()?;
            // A zombie has no environment: nothing of it is left to be ended.
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            mark_of(&environment).is_some_and(&is_ours).then_some(Process { pid, handle })
        })
        .collect()
}

fn mark_of(environment: &[u8]) -> Option<&[u8]> {
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|variable| variable.strip_prefix(MARK.as_bytes())?.strip_prefix(b"="))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn sleeper(claim: &Path) -> std::process::Child {
        Command::new("sleep").arg("1000").env_clear().env(MARK, claim).spawn().unwrap()
    }

    #[test]
    fn only_processes_of_the_claim_are_found_and_killed() {
        let temp = tempfile::tempdir().unwrap();
        let (one, two) = (temp.path().join("one"), temp.path().join("two"));
        let mut children = [sleeper(&one), sleeper(&two)];
        let pids = |found: Vec<Process>| found.iter().map(|process| process.pid).collect::<Vec<_>>();
        assert_eq!(pids(of_claim(&one)), [children[0].id()]);
        let mut all = pids(of_all(temp.path()));
        all.sort_unstable();
        let mut wanted = [children[0].id(), children[1].id()];
        wanted.sort_unstable();
        assert_eq!(all, wanted);
        of_claim(&one).iter().for_each(Process::kill);
        children[0].wait().unwrap();
        assert_eq!(pids(of_all(temp.path())), [children[1].id()]);
        of_all(temp.path()).iter().for_each(Process::kill);
        children[1].wait().unwrap();
    }
}

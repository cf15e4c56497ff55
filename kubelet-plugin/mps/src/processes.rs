//! Processes of daemons, known by a variable of their environment, which a daemon's servers inherit. Only what
//! runs in our own PID namespace counts: containers have others, whatever they set. Of an environment only the beginning
//! is read, for a program can have any of its memory shown as that.
//!
//! A process is signalled through a descriptor that was opened before its environment was read, so a process id that
//! is used again never meets the wrong process.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The variable; its value is the claim's directory.
pub const MARK: &str = "ALIQUOT_MPS_CLAIM";

/// How much of an environment is read. A page holds the longest path.
const MOST: usize = 8192;

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
    let Some(own_namespace) = namespace("self") else { return Vec::new() };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| *pid != own)
        .filter_map(|pid| {
            let raw = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
            let handle = pidfd_open(raw, PidfdFlags::empty()).ok()?;
            if namespace(&pid.to_string())? != own_namespace {
                return None;
            }
            let environment = environment(pid)?;
            mark_of(&environment).is_some_and(&is_ours).then_some(Process { pid, handle })
        })
        .collect()
}

/// The PID namespace of a process.
fn namespace(pid: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

/// The beginning of a process's environment; none of a process of which nothing is left to be ended. The first thread of
/// one that was killed may have ended, and with it what `/proc` shows of the process, while another one is in the driver
/// still, with all that the process has there.
fn environment(pid: u32) -> Option<Vec<u8>> {
    let first = beginning(Path::new(&format!("/proc/{pid}/environ")));
    let threads = || fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of_threads = || threads().find_map(|thread| beginning(&thread.path().join("environ")));
    first.or_else(of_threads)
}

/// What one read gives of a file, unless that is nothing.
fn beginning(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = vec![0; MOST];
    let length = fs::File::open(path).ok()?.read(&mut bytes).ok()?;
    bytes.truncate(length);
    (length > 0).then_some(bytes)
}

fn mark_of(environment: &[u8]) -> Option<&[u8]> {
    // What was cut off is no value.
    let end = environment.iter().rposition(|byte| *byte == 0)?;
    let mut variables = environment.get(..end)?.split(|byte| *byte == 0);
    variables.find_map(|variable| variable.strip_prefix(MARK.as_bytes())?.strip_prefix(b"="))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn sleeper(claim: &Path) -> Child {
        Command::new("sleep").arg("1000").env_clear().env(MARK, claim).spawn().unwrap()
    }

    fn pids(found: &[Process]) -> Vec<u32> {
        found.iter().map(|process| process.pid).collect()
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Waits until the process, or a child of it, runs `sleep` with the environment that it was given.
    fn wait_for_sleep(pid: u32) -> u32 {
        let children = format!("/proc/{pid}/task/{pid}/children");
        loop {
            let of_it = fs::read_to_string(&children).unwrap_or_default();
            let candidates = of_it.split_whitespace().filter_map(|pid| pid.parse().ok()).chain([pid]);
            for pid in candidates {
                if fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n") {
                    return pid;
                }
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn a_mark_counts_however_much_follows_it() {
        let temp = tempfile::tempdir().unwrap();
        let claim = temp.path().join("one");
        let mut command = Command::new("sleep");
        command.arg("1000").env_clear().env(MARK, &claim).env("B", "b".repeat(100_000));
        let long = command.spawn().unwrap();
        wait_for_sleep(long.id());
        assert_eq!(pids(&of_claim(&claim)), [long.id()]);
        end(long);
    }

    #[test]
    fn a_process_of_a_container_never_counts_whatever_its_environment() {
        let temp = tempfile::tempdir().unwrap();
        let claim = temp.path().join("one");
        let mark = format!("{MARK}={}", claim.display());
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child"]);
        command.args(["env", "-i", &mark, "sleep", "1000"]);
        if !Command::new("unshare").args(["-Urpf", "true"]).status().is_ok_and(|status| status.success()) {
            return println!("SKIPPED: a container's processes: no PID namespace can be made here");
        }
        let container = command.spawn().unwrap();
        let inner = wait_for_sleep(container.id());
        assert!(fs::read(format!("/proc/{inner}/environ")).unwrap().starts_with(mark.as_bytes()));
        assert_eq!(pids(&of_claim(&claim)), [0; 0]);
        assert_eq!(pids(&of_all(temp.path())), [0; 0]);
        end(container);
    }

    #[test]
    fn only_processes_of_the_claim_are_found_and_killed() {
        let temp = tempfile::tempdir().unwrap();
        let (one, two) = (temp.path().join("one"), temp.path().join("two"));
        let mut children = [sleeper(&one), sleeper(&two)];
        assert_eq!(pids(&of_claim(&one)), [children[0].id()]);
        let mut all = pids(&of_all(temp.path()));
        all.sort_unstable();
        let mut wanted = [children[0].id(), children[1].id()];
        wanted.sort_unstable();
        assert_eq!(all, wanted);
        of_claim(&one).iter().for_each(Process::kill);
        children[0].wait().unwrap();
        assert_eq!(pids(&of_all(temp.path())), [children[1].id()]);
        of_all(temp.path()).iter().for_each(Process::kill);
        children[1].wait().unwrap();
    }
}

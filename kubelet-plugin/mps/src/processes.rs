//! Finds the processes of daemons by the group that each claim has for itself ([`crate::groups`]), which no
//! process can leave. Some processes have no claim's group: those of a daemon without isolation, and those of
//! a predecessor that gave no groups. They are found by an environment variable instead, which servers
//! inherit. A daemon that an attacker took over can drop the variable. Only processes in the supervisor's own
//! PID namespace count: containers have others, whatever they set. Only the beginning of an environment is
//! read, because a program can have any of its memory shown as its environment.
//!
//! A process that was seen once counts until it has ended with all of its threads, whatever `/proc` shows of
//! it. A killed process has no environment any more while it releases its driver resources, which happens
//! before its pidfd polls as readable (pidfd_open(2)). An environment is read once at most, and never of a
//! process of a claim's group: reading waits for the process's memory, which the process could withhold.
//!
//! A process is signalled through a descriptor that was opened before its claim was determined. So a process
//! ID that is used again never meets the wrong process.

use crate::contract::MpsDir;
use crate::groups;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The environment variable that marks a daemon's processes; its value is the claim's directory.
pub const MARK: &str = "ALIQUOT_MPS_CLAIM";

/// The number of bytes of an environment that are read. A page holds the longest path.
const MOST: usize = 8192;

/// A process of a daemon.
#[derive(Debug)]
pub struct Process {
    /// The process ID.
    pub pid: u32,
    claim: PathBuf,
    handle: OwnedFd,
}

impl Process {
    /// Kills the process. It is no error if the process is gone.
    pub fn kill(&self) {
        // On an error the process is gone, or the next look finds it again.
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
    }

    /// Returns true once nothing is left of the process that could have a device open. If this cannot be
    /// found out, returns false.
    fn has_ended(&self) -> bool {
        let mut handle = [PollFd::new(&self.handle, PollFlags::IN)];
        matches!(poll(&mut handle, Some(&Timespec::default())), Ok(1..))
    }
}

/// The processes of all daemons of one directory that were seen and have not ended.
#[derive(Debug)]
pub struct Table {
    dir: MpsDir,
    known: BTreeMap<u32, Process>,
    looked: Option<Instant>,
}

impl Table {
    /// Creates the table for daemons whose claims have their directories in `mps_dir`. It has seen no process
    /// yet.
    pub fn new(mps_dir: &Path) -> Self {
        Self { dir: MpsDir::new(mps_dir), known: BTreeMap::new(), looked: None }
    }

    /// Looks for new processes, and forgets those that have ended.
    ///
    /// # Errors
    /// Fails if the kernel does not show all processes. The processes that are not known may then belong to
    /// any claim.
    pub fn look(&mut self) -> io::Result<()> {
        self.known.retain(|_, process| !process.has_ended());
        let own_namespace = namespace("self")?;
        let claims = self.dir.claims().map_err(io::Error::other)?;
        let groups: BTreeMap<u32, PathBuf> =
            claims.iter().filter_map(|claim| Some((claim.group()?, claim.path().to_owned()))).collect();
        for entry in fs::read_dir("/proc")? {
            let pid = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
            let Some(pid) = pid.filter(|pid| *pid != std::process::id() && !self.known.contains_key(pid))
            else {
                continue;
            };
            let found =
                self.identify(pid, &own_namespace, &groups).or_else(|error| match is_none_of_ours(&error) {
                    true => Ok(None),
                    false => Err(error),
                });
            self.known.extend(found?.map(|process| (pid, process)));
        }
        self.looked = Some(Instant::now());
        Ok(())
    }

    /// Looks for processes, unless the last look was within this time.
    ///
    /// # Errors
    /// Fails as [`Self::look`] does.
    pub fn look_within(&mut self, time: Duration) -> io::Result<()> {
        match self.looked {
            Some(looked) if looked.elapsed() < time => Ok(()),
            _ => self.look(),
        }
    }

    /// Returns the processes of the daemon of the claim in this directory, as of the last look.
    pub fn of_claim(&self, claim: &Path) -> impl Iterator<Item = &Process> {
        self.all().filter(move |process| process.claim == claim)
    }

    /// Returns the processes of all daemons, as of the last look.
    pub fn all(&self) -> impl Iterator<Item = &Process> {
        self.known.values()
    }

    fn identify(
        &self,
        pid: u32,
        own_namespace: &Path,
        groups: &BTreeMap<u32, PathBuf>,
    ) -> io::Result<Option<Process>> {
        let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        if namespace(&pid.to_string())? != own_namespace {
            return Ok(None);
        }
        let handle = pidfd_open(raw, PidfdFlags::empty())?;
        let status = fs::read(format!("/proc/{pid}/status"))?;
        if let Some(claim) = groups::of(&status).find_map(|group| groups.get(&group)) {
            return Ok(Some(Process { pid, claim: claim.clone(), handle }));
        }
        let environment = environment(pid)?;
        let claim = mark_of(&environment).map(|mark| PathBuf::from(OsStr::from_bytes(mark)));
        let claim = claim.filter(|claim| claim.starts_with(self.dir.path()) && claim != self.dir.path());
        Ok(claim.map(|claim| Process { pid, claim, handle }))
    }
}

/// Returns true for an error of a process that has ended, that has unmapped its environment, or that the
/// supervisor may not inspect because it has rights that the supervisor could not have given it. Any other
/// error, such as too many open files, says nothing about the process.
fn is_none_of_ours(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::NOENT | Errno::SRCH | Errno::ACCESS | Errno::PERM | Errno::IO))
}

/// Returns the PID namespace of a process.
fn namespace(pid: &str) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid"))
}

/// Returns the beginning of a process's environment; empty if nothing is left of the process that could be
/// ended. The first thread of a killed process may have ended, and with it what `/proc` shows of the process,
/// while another thread is still in the driver, with all of the process's resources there.
fn environment(pid: u32) -> io::Result<Vec<u8>> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let first = beginning(&process.join("environ"))?;
    if !first.is_empty() {
        return Ok(first);
    }
    for thread in fs::read_dir(process.join("task"))? {
        let of_thread = beginning(&thread?.path().join("environ"))?;
        if !of_thread.is_empty() {
            return Ok(of_thread);
        }
    }
    Ok(Vec::new())
}

/// Returns the result of one read of a file; empty for a thread that has ended.
fn beginning(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; MOST];
    let length = match fs::File::open(path).and_then(|mut file| file.read(&mut bytes)) {
        Err(error) if is_none_of_ours(&error) => 0,
        length => length?,
    };
    bytes.truncate(length);
    Ok(bytes)
}

fn mark_of(environment: &[u8]) -> Option<&[u8]> {
    // A value that was cut off does not count.
    let end = environment.iter().rposition(|byte| *byte == 0)?;
    let mut variables = environment.get(..end)?.split(|byte| *byte == 0);
    variables.find_map(|variable| variable.strip_prefix(MARK.as_bytes())?.strip_prefix(b"="))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command, Stdio};

    fn sleeper(claim: &Path) -> Child {
        Command::new("sleep").arg("1000").env_clear().env(MARK, claim).spawn().unwrap()
    }

    fn pids<'a>(found: impl Iterator<Item = &'a Process>) -> Vec<u32> {
        found.map(|process| process.pid).collect()
    }

    /// What a first look finds.
    fn table(mps_dir: &Path) -> Table {
        let mut table = Table::new(mps_dir);
        table.look().unwrap();
        table
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
        assert_eq!(pids(table(temp.path()).of_claim(&claim)), [long.id()]);
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
        assert_eq!(pids(table(temp.path()).of_claim(&claim)), [0; 0]);
        assert_eq!(pids(table(temp.path()).all()), [0; 0]);
        end(container);
    }

    #[test]
    fn only_processes_of_the_claim_are_found_and_killed() {
        let temp = tempfile::tempdir().unwrap();
        let (one, two) = (temp.path().join("one"), temp.path().join("two"));
        let mut children = [sleeper(&one), sleeper(&two)];
        assert_eq!(pids(table(temp.path()).of_claim(&one)), [children[0].id()]);
        let mut all = pids(table(temp.path()).all());
        all.sort_unstable();
        let mut wanted = [children[0].id(), children[1].id()];
        wanted.sort_unstable();
        assert_eq!(all, wanted);
        table(temp.path()).of_claim(&one).for_each(Process::kill);
        children[0].wait().unwrap();
        assert_eq!(pids(table(temp.path()).all()), [children[1].id()]);
        table(temp.path()).all().for_each(Process::kill);
        children[1].wait().unwrap();
    }

    #[test]
    fn a_process_that_was_seen_counts_until_it_has_ended_also_without_an_environment() {
        let temp = tempfile::tempdir().unwrap();
        let claim = temp.path().join("one");
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "read line; exec /usr/bin/env -i /bin/sleep 1000"]);
        let mut child = command.env_clear().env(MARK, &claim).stdin(Stdio::piped()).spawn().unwrap();
        let mut seen = table(temp.path());
        assert_eq!(pids(seen.of_claim(&claim)), [child.id()]);
        drop(child.stdin.take());
        wait_for_sleep(child.id());
        assert_eq!(fs::read(format!("/proc/{}/environ", child.id())).unwrap(), [0; 0]);
        assert_eq!(pids(table(temp.path()).all()), [0; 0], "one who has not seen it does not know it");
        seen.look().unwrap();
        assert_eq!(pids(seen.of_claim(&claim)), [child.id()]);
        seen.all().for_each(Process::kill);
        // It has ended and nobody has waited for it.
        let handle = seen.known.get(&child.id()).unwrap().handle.try_clone().unwrap();
        poll(&mut [PollFd::new(&handle, PollFlags::IN)], None).unwrap();
        seen.look().unwrap();
        assert_eq!(pids(seen.all()), [0; 0]);
        child.wait().unwrap();
    }

    #[test]
    fn a_process_of_a_claims_group_counts_whatever_its_environment_and_in_every_later_table() {
        if !nix::unistd::geteuid().is_root() {
            return println!("SKIPPED: a process of a claim's group: needs root");
        }
        let temp = tempfile::tempdir().unwrap();
        let dir = MpsDir::new(temp.path());
        let [one, two] = ["c-1", "c-2"].map(|uid| dir.claim(uid).unwrap());
        let mut groups = groups::Groups::new(&dir).unwrap();
        for claim in [&one, &two] {
            fs::create_dir(claim.path()).unwrap();
            claim.set_group(groups.another()).unwrap();
        }
        let group = one.group().unwrap();
        let mut command = Command::new("sleep");
        // It says that it is of another claim.
        command.arg("1000").env_clear().env(MARK, two.path()).gid(group).uid(65_534);
        let child = command.spawn().unwrap();
        wait_for_sleep(child.id());
        assert_eq!(pids(table(temp.path()).of_claim(one.path())), [child.id()]);
        assert_eq!(pids(table(temp.path()).of_claim(two.path())), [0; 0]);
        assert_ne!(
            groups::Groups::new(&dir).unwrap().another(),
            group,
            "a successor gives it to nobody else"
        );
        end(child);
    }

    #[test]
    fn an_error_of_ours_is_not_taken_for_the_end_of_a_process() {
        let table = [
            (Errno::NOENT, true),
            (Errno::SRCH, true),
            (Errno::ACCESS, true),
            (Errno::IO, true),
            (Errno::MFILE, false),
            (Errno::NFILE, false),
            (Errno::NOMEM, false),
        ];
        for (errno, none) in table {
            assert_eq!(is_none_of_ours(&errno.into()), none, "{errno}");
        }
        assert!(!is_none_of_ours(&io::Error::other("?")));
    }
}

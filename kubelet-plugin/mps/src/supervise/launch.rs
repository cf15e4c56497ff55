//! Runs the processes of one claim's daemon: the control daemon, and a program that gives it commands.

use super::logs::{self, Printed};
use crate::contract::{Ask, ClaimDir};
use crate::isolate::{self, HOPELESS, Isolation, Roots};
use crate::keeper::{End, Seen, Told};
use crate::limits::{self, NotTaken};
use crate::processes::{MARK, Process, Table};
use aliquot_devices::{CharDevice, Majors};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The longest time that a command may take.
const COMMAND: Duration = Duration::from_secs(5);
/// The largest size of an answer, in bytes.
const MOST_ANSWER: u64 = 64 << 10;

/// The settings for starting processes.
#[derive(Debug, Clone)]
pub struct Launcher {
    /// The path of this program.
    pub program: PathBuf,
    /// The root directories of the driver and of the host.
    pub roots: Roots,
    /// The isolation of a daemon.
    pub isolation: Isolation,
}

impl Launcher {
    /// Returns the device nodes that a daemon would get now. Returns `None` if the driver is not loaded, or
    /// if the daemon runs without isolation.
    fn devices(&self, ask: &Ask) -> Option<Vec<CharDevice>> {
        match self.isolation {
            Isolation::Full => isolate::devices(&Majors::read(&self.roots.proc).ok()?, ask).ok(),
            Isolation::None => None,
        }
    }
}

/// The processes of a claim's daemon.
#[derive(Debug)]
pub(super) struct Processes {
    launcher: Launcher,
    claim: ClaimDir,
    /// The claim's group; see [`crate::groups`].
    group: u32,
    daemon: Option<Daemon>,
    end: End,
    order: Option<Order>,
    told: Told,
}

#[derive(Debug)]
struct Daemon {
    child: Child,
    ask: Ask,
    /// The device nodes that the daemon has, as far as they were known when it was started.
    devices: Option<Vec<CharDevice>>,
    printed: Printed,
}

/// A command that is running.
#[derive(Debug)]
struct Order {
    child: Child,
    since: Instant,
    /// For a command that sets limits: the ask that it implements.
    ask: Option<Ask>,
}

/// The reason why a command was not carried out.
#[derive(Debug, thiserror::Error)]
enum OrderError {
    #[error("it did not answer a command within {COMMAND:?}")]
    Unanswered,
    #[error("{status}: {said}")]
    Failed { status: ExitStatus, said: String },
    #[error(transparent)]
    NotTaken(#[from] NotTaken),
    #[error(transparent)]
    Wait(#[from] io::Error),
}

impl Processes {
    pub(super) fn new(launcher: Launcher, claim: ClaimDir, group: u32) -> Self {
        let end = End { reason: String::new(), hopeless: false };
        Self { launcher, claim, group, daemon: None, end, order: None, told: Told::Nothing }
    }

    /// Returns the state of the daemon and of the last command.
    pub(super) fn look(&mut self, table: &mut Table) -> (Seen, Told) {
        (self.daemon(table), self.told())
    }

    fn daemon(&mut self, table: &mut Table) -> Seen {
        if let Some(daemon) = &mut self.daemon {
            let pid = daemon.child.id();
            self.end = match daemon.child.try_wait() {
                Ok(None) if self.is_outdated(table) => return Seen::Outdated(pid),
                Ok(None) => return Seen::Runs(pid),
                Ok(Some(status)) => {
                    let said = self.daemon.as_ref().map(|daemon| daemon.printed.tail());
                    how_it_ended(status, &said.unwrap_or_default())
                }
                Err(error) => End { reason: error.to_string(), hopeless: false },
            };
            self.daemon = None;
        }
        // If processes cannot be listed, one may still be there.
        let none =
            is_done("look for processes", table.look()) && table.of_claim(self.claim.path()).next().is_none();
        if none { Seen::Ended(self.end.clone()) } else { Seen::Lingers(self.end.clone()) }
    }

    /// Returns true if the daemon has nodes of other devices than its GPUs have now, and no server has them
    /// open. Returns false while the driver is not loaded.
    fn is_outdated(&self, table: &mut Table) -> bool {
        let Some(daemon) = &self.daemon else { return false };
        let now = self.launcher.devices(&daemon.ask);
        let differ = now.is_some() && daemon.devices.is_some() && now != daemon.devices;
        let order = self.order.as_ref().map(|order| order.child.id());
        let own = |pid: u32| pid == daemon.child.id() || Some(pid) == order;
        differ
            && is_done("look for processes", table.look())
            && table.of_claim(self.claim.path()).all(|process| own(process.pid))
    }

    fn told(&mut self) -> Told {
        let Some(order) = &mut self.order else { return self.told.clone() };
        let ended = order.child.try_wait();
        let answer = match ended {
            Ok(None) if order.since.elapsed() < COMMAND => return Told::Waiting,
            Ok(None) => Err(OrderError::Unanswered),
            Ok(Some(status)) => order.answer(status),
            Err(error) => Err(error.into()),
        };
        self.drop_order();
        self.told = answer.map_or_else(|error| Told::Refused(error.to_string()), |()| Told::Taken);
        self.told.clone()
    }

    fn drop_order(&mut self) {
        if let Some(mut order) = self.order.take() {
            // The command has ended, or is of no use any more.
            let _ = order.child.kill();
            let _ = order.child.wait();
        }
    }

    /// Starts a control daemon. A daemon that cannot be started counts as ended, with the reason that is also
    /// returned.
    pub(super) fn start(&mut self, ask: &Ask) -> io::Result<()> {
        self.drop_order();
        self.told = Told::Nothing;
        let started = self.spawn(ask);
        if let Err(error) = &started {
            let reason = format!("cannot start a daemon in {}: {error}", self.claim.path().display());
            self.end = End { reason, hopeless: false };
        }
        started
    }

    fn spawn(&mut self, ask: &Ask) -> io::Result<()> {
        if self.launcher.isolation == Isolation::Full {
            // The group is how the daemon's processes are found.
            self.claim.set_group(self.group)?;
        }
        clean(&self.claim.pipe())?;
        let printed = Printed::open(&self.claim)?;
        let mut command = self.command(&[]);
        command.stdin(Stdio::null()).stdout(printed.file()?).stderr(printed.file()?);
        // The nodes are read before the daemon reads them: if they change in between, the daemon is started
        // again.
        let devices = self.launcher.devices(ask);
        self.daemon = Some(Daemon { child: command.spawn()?, ask: ask.clone(), devices, printed });
        Ok(())
    }

    /// Tells the daemon its limits.
    pub(super) fn set_limits(&mut self, ask: &Ask) {
        self.order(&limits::script(ask), Some(ask.clone()));
    }

    /// Tells the daemon to end, and its servers to end soon.
    pub(super) fn quit(&mut self) {
        self.order("quit -t 3\n", None);
    }

    /// Kills all processes of the daemon.
    pub(super) fn kill(&mut self, table: &mut Table) {
        // Processes are listed first: after the kill, a process may not show which claim it belongs to.
        is_done("look for processes to kill", table.look());
        self.drop_order();
        if let Some(daemon) = &mut self.daemon {
            let _ = daemon.child.kill();
        }
        table.of_claim(self.claim.path()).for_each(Process::kill);
    }

    fn order(&mut self, text: &str, ask: Option<Ask>) {
        self.drop_order();
        match self.tell(text) {
            Ok(child) => self.order = Some(Order { child, since: Instant::now(), ask }),
            Err(error) => self.told = Told::Refused(format!("cannot run nvidia-cuda-mps-control: {error}")),
        }
    }

    fn tell(&self, text: &str) -> io::Result<Child> {
        let mut command = self.command(&["--control"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // The text is short enough for the pipe. A program that does not read it has ended, and says why.
            let _ = stdin.write_all(text.as_bytes());
        }
        Ok(child)
    }

    /// Builds the command that runs this program again, to become NVIDIA's program.
    fn command(&self, more: &[&str]) -> Command {
        let Launcher { program, roots, isolation } = &self.launcher;
        let mut command = Command::new(program);
        command.arg("daemon").arg(self.claim.path()).args(more);
        command.arg("--group").arg(self.group.to_string());
        command.arg("--driver-root").arg(&roots.driver);
        command.arg("--host-driver-root").arg(&roots.driver_on_host);
        command.arg("--proc-root").arg(&roots.proc);
        if let Some(host) = &roots.host {
            command.arg("--host-root").arg(host);
        }
        if *isolation == Isolation::None {
            command.arg("--without-isolation");
        }
        command.env_clear().env(MARK, self.claim.path()).process_group(0);
        command
    }

    /// Truncates logs that have become long.
    pub(super) fn bound_logs(&self) {
        self.daemon.iter().for_each(|daemon| daemon.printed.bound());
        logs::bound(&self.claim.log());
    }
}

fn how_it_ended(status: ExitStatus, said: &str) -> End {
    let hopeless = status.code() == Some(HOPELESS);
    let reason = match (hopeless, said.is_empty()) {
        (true, false) => said.to_owned(),
        (_, true) => format!("the MPS control daemon ended ({status}) and said nothing"),
        (false, false) => format!("the MPS control daemon ended ({status}); its last words: {said}"),
    };
    End { reason, hopeless }
}

impl Order {
    fn answer(&mut self, status: ExitStatus) -> Result<(), OrderError> {
        let said = read(self.child.stdout.take());
        if !status.success() {
            let complaint = read(self.child.stderr.take());
            return Err(OrderError::Failed { status, said: format!("{}{}", said.trim(), complaint.trim()) });
        }
        Ok(self.ask.as_ref().map_or(Ok(()), |ask| limits::check(ask, &said))?)
    }
}

/// Logs a failure. Returns true if there was none.
pub(super) fn is_done(what: &str, done: io::Result<()>) -> bool {
    if let Err(error) = &done {
        tracing::error!(%error, "cannot {what} of MPS daemons");
    }
    done.is_ok()
}

/// Reads what a program that ended has left in a pipe. A child of that program may still have the other end
/// open, and is not waited for.
fn read(pipe: Option<impl Read + AsFd>) -> String {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe
        && fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).is_ok()
    {
        // What was read so far counts.
        let _ = pipe.take(MOST_ANSWER).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Removes what an earlier daemon, or a client, left in the directory of sockets. A server runs as its
/// clients' user and may make files there; the sticky bit keeps it from removing the control daemon's files.
/// A directory that is not empty was made by a client and may be of any depth. It is set aside, and never
/// entered.
fn clean(pipe: &Path) -> io::Result<()> {
    for (number, entry) in fs::read_dir(pipe)?.collect::<Vec<_>>().into_iter().enumerate() {
        let entry = entry?;
        let path = entry.path();
        if !entry.file_type()?.is_dir() {
            fs::remove_file(path)?;
        } else if fs::remove_dir(&path).is_err() && !entry.file_name().into_vec().starts_with(ASIDE) {
            let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
            let name = [ASIDE, format!("{time}.{number}").as_bytes()].concat();
            fs::rename(&path, pipe.join(OsStr::from_bytes(&name)))?;
        }
    }
    fs::set_permissions(pipe, Permissions::from_mode(0o1777))
}

/// The prefix of the names of directories that were set aside.
const ASIDE: &[u8] = b"left.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_a_client_is_put_aside_and_never_entered() {
        let temp = tempfile::tempdir().unwrap();
        let pipe = temp.path();
        fs::create_dir_all(pipe.join("control/deep")).unwrap();
        fs::create_dir(pipe.join("empty")).unwrap();
        fs::write(pipe.join("log"), "").unwrap();
        for _ in 0..2 {
            clean(pipe).unwrap();
            let left: Vec<_> = fs::read_dir(pipe).unwrap().map(|entry| entry.unwrap().path()).collect();
            assert_eq!(left.len(), 1, "{left:?}");
            assert_ne!(left[0], pipe.join("control"));
            assert!(left[0].join("deep").is_dir());
        }
    }
}

//! Becomes a container: the host's files, or a root of its own, with the binds, device nodes and environment that a
//! CDI runtime would have made, in namespaces of its own.
//!
//! Without namespaces the same edits become links in a scratch root, and the limiter, which
//! `/etc/ld.so.preload` would have brought, comes by `LD_PRELOAD`.

mod mirror;
mod root;

use crate::tether;
use anyhow::{Context, Result, bail};
use caps::CapSet;
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::{Pid, getegid, geteuid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

/// What to become.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerSpec {
    /// An empty directory for the container's own files.
    pub scratch: PathBuf,
    /// What keeps it from the host.
    pub isolation: Isolation,
    /// Its root, which mounts leave empty files and directories in; without one it has the host's files.
    pub root: Option<PathBuf>,
    /// Files and directories of the host that appear in the container.
    pub binds: Vec<Bind>,
    /// Its device nodes.
    pub nodes: Vec<Node>,
    /// CDI hooks of the stage createContainer.
    pub hooks: Vec<Hook>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// A program with arguments that runs to its end first, if there is one. The container's own then starts with the
    /// first byte on standard input, and never where that ends.
    pub before: Vec<String>,
    /// Program and arguments; the program's path is one of the container.
    pub argv: Vec<String>,
}

/// What keeps a container from the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Isolation {
    /// Nothing: there is only a scratch root of links.
    None,
    /// A user, a mount, a PID and an IPC namespace, which a user without rights may make, and no capabilities. Of the
    /// host's files and directories none can be written, and of its processes none be signalled: enough against
    /// accidents. Who sets out to still reaches the network, keyrings, and sockets that are not in /run or /tmp.
    User,
    /// A mount namespace of root, in which there are real device nodes.
    Root,
}

/// A character device. Only with [`Isolation::Root`] it becomes one, else an empty file: a user without rights may make
/// no others, and the simulated driver only looks whether they are there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Path in the container.
    pub path: PathBuf,
    /// Major and minor number.
    pub number: (u64, u64),
}

/// A program that runs before the container's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// Path on the host.
    pub path: PathBuf,
    /// Its name first.
    pub args: Vec<String>,
    /// `NAME=value` each, and nothing else.
    pub env: Vec<String>,
}

/// A file or directory of the host in the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// Path on the host.
    pub host: PathBuf,
    /// Path in the container.
    pub container: PathBuf,
    /// Whether the container may not write there.
    pub read_only: bool,
}

/// Whether this machine lets us make a container in namespaces: tries it with `true`.
///
/// # Errors
/// What is in the way.
pub fn namespaces_work(program: &Path, scratch: &Path) -> Result<()> {
    let spec = ContainerSpec {
        scratch: scratch.to_owned(),
        isolation: Isolation::User,
        root: None,
        binds: Vec::new(),
        nodes: Vec::new(),
        hooks: Vec::new(),
        env: BTreeMap::new(),
        before: Vec::new(),
        argv: vec!["/bin/true".to_owned()],
    };
    let path = scratch.with_extension("json");
    fs::write(&path, serde_json::to_vec(&spec)?).with_context(|| path.display().to_string())?;
    fs::create_dir_all(scratch).with_context(|| scratch.display().to_string())?;
    let tried = command(program, &path).output().context("cannot start this program")?;
    if tried.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&tried.stderr);
    bail!("{}", said.lines().next().unwrap_or("it ends without a word"))
}

/// A command that becomes the container that a file describes. The program hands `__container`'s arguments to [`run`].
pub fn command(program: &Path, spec: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("__container").arg(spec).arg(std::process::id().to_string());
    command
}

/// Becomes the container that a file describes, and ends with the process `parent` or by SIGTERM. Never returns if all goes well,
/// except with what a container in a PID namespace ended with. Must be called before there are threads.
pub fn run(spec: &Path, parent: u32) -> ExitCode {
    let error = match run_inside(spec, parent) {
        Ok(Ended(code)) => return code,
        Err(error) => error,
    };
    eprintln!("cannot start the container: {error:#}");
    ExitCode::from(NOT_STARTED)
}

/// How a container ends that did not start, as a shell ends for a program that is not there.
pub const NOT_STARTED: u8 = 127;

/// How the process ended that is the container.
struct Ended(ExitCode);

fn run_inside(path: &Path, parent: u32) -> Result<Ended> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let spec: ContainerSpec = serde_json::from_slice(&text).context("malformed container description")?;
    match spec.isolation {
        Isolation::None => root::link(&spec)?,
        Isolation::Root => {
            unshare(CloneFlags::CLONE_NEWNS).context("cannot have mounts of our own")?;
            root::enter(&spec)?;
        }
        // Whoever makes a PID namespace is not in it; the first process that he starts is.
        Isolation::User if std::process::id() != 1 => {
            enter_user_namespace()?;
            tether::end_with(parent)?;
            return first_process(path);
        }
        Isolation::User => {
            tether::end_with(parent)?;
            root::enter(&spec)?;
            drop_rights()?;
            return init(&spec);
        }
    }
    // Last, since the kernel forgets it where rights change.
    tether::end_with(parent)?;
    match start(&spec)? {}
}

/// Runs the container in a process of its own, with whose end all others of the PID namespace end. That comes with
/// SIGTERM, too, which this process outlives them by.
fn first_process(spec: &Path) -> Result<Ended> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGCHLD]);
    signals.thread_block().context("cannot wait for signals")?;
    let mut first = command(&own, spec).spawn().context("cannot start the first process")?;
    loop {
        if let Some(status) = first.try_wait().context("cannot wait for the first process")? {
            return Ok(Ended(code(status)));
        }
        if signals.wait().context("cannot wait for signals")? == Signal::SIGTERM {
            first.kill().context("cannot end the first process")?;
        }
    }
}

/// An exit status as shells say it.
fn code(status: ExitStatus) -> ExitCode {
    match (status.code(), status.signal()) {
        (Some(code), _) => ExitCode::from(u8::try_from(code).unwrap_or(NOT_STARTED)),
        (None, signal) => shell_code(signal.unwrap_or_default()),
    }
}

/// How a shell says that a signal ended a program.
fn shell_code(signal: i32) -> ExitCode {
    ExitCode::from(u8::try_from(signal.saturating_add(128)).unwrap_or(NOT_STARTED))
}

/// Leaves this process and all that it starts without capabilities: with those of its user namespace a program could
/// mount anew what it may only read, or leave its root.
fn drop_rights() -> Result<()> {
    prctl::set_no_new_privs().context("cannot give up new rights")?;
    // Who is root in a namespace would get with each program what is left here.
    for set in [CapSet::Bounding, CapSet::Inheritable, CapSet::Effective, CapSet::Permitted] {
        caps::clear(None, set).with_context(|| format!("cannot give up capabilities ({set:?})"))?;
    }
    // What it starts has the same rights, and would take off by ptrace what ends this process with its parent.
    prctl::set_dumpable(false).context("cannot keep other processes out of this one")
}

/// Runs the container's programs as the first process of its PID namespace, which none of them is: that one ends with
/// its parent whatever they do, and all others with it.
fn init(spec: &ContainerSpec) -> Result<Ended> {
    run_before(spec)?;
    let (program, mut command) = program(spec, &spec.argv)?;
    let child = command.spawn().with_context(|| format!("cannot run {program}"))?;
    let own = i32::try_from(child.id()).ok();
    loop {
        // Whoever lost its parent is this process's to wait for.
        let ended = wait().context("cannot wait for the container's processes")?;
        if ended.pid().map(Pid::as_raw) == own {
            return Ok(Ended(match ended {
                WaitStatus::Exited(_, status) => ExitCode::from(u8::try_from(status).unwrap_or(NOT_STARTED)),
                WaitStatus::Signaled(_, signal, _) => shell_code(signal as i32),
                _ => continue,
            }));
        }
    }
}

/// Becomes the container's program.
fn start(spec: &ContainerSpec) -> Result<Infallible> {
    run_before(spec)?;
    let (program, mut command) = program(spec, &spec.argv)?;
    Err(command.exec()).with_context(|| format!("cannot run {program}"))
}

/// Runs what comes first, and waits for the word to go on.
fn run_before(spec: &ContainerSpec) -> Result<()> {
    if spec.before.is_empty() {
        return Ok(());
    }
    let (program, mut before) = program(spec, &spec.before)?;
    let status = before.status().with_context(|| format!("cannot run {program}"))?;
    if !status.success() {
        bail!("{program} ended with {status}");
    }
    std::io::stdin().read_exact(&mut [0]).context("nobody wants the container's own program")
}

fn program(spec: &ContainerSpec, argv: &[String]) -> Result<(String, Command)> {
    let (program, arguments) = argv.split_first().context("no program to run")?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(&spec.env).stdin(Stdio::null());
    Ok((program.clone(), command))
}

fn enter_user_namespace() -> Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    let own = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWIPC;
    unshare(own).context("this machine allows no user namespaces")?;
    fs::write("/proc/self/setgroups", "deny").context("cannot write setgroups")?;
    fs::write("/proc/self/uid_map", format!("0 {uid} 1")).context("cannot map the user")?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1")).context("cannot map the group")
}

//! Becomes a container: the host's files, or a root of its own, with the binds, device nodes and environment that a
//! CDI runtime would have made, in namespaces of its own.
//!
//! Without namespaces the same edits become links in a scratch root, and the limiter, which
//! `/etc/ld.so.preload` would have brought, comes by `LD_PRELOAD`.

mod mirror;
mod root;

use crate::tether;
use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getegid, geteuid};
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
    /// A user, a mount and a PID namespace, which a user without rights may make. Of the host's files none can be
    /// written, and of its processes none be signalled.
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
pub fn namespaces_work(program: &Path, scratch: &Path) -> bool {
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
    let written =
        serde_json::to_vec(&spec).map_err(std::io::Error::other).and_then(|json| fs::write(&path, json));
    written.is_ok()
        && fs::create_dir_all(scratch).is_ok()
        && command(program, &path).output().is_ok_and(|out| out.status.success())
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
        }
    }
    if spec.isolation != Isolation::User {
        // Last, since the kernel forgets it where rights change.
        tether::end_with(parent)?;
    }
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
    let signal = || status.signal().map(|signal| signal.saturating_add(128));
    let code = status.code().or_else(signal).and_then(|code| u8::try_from(code).ok());
    ExitCode::from(code.unwrap_or(NOT_STARTED))
}

/// Becomes the container's program.
fn start(spec: &ContainerSpec) -> Result<Infallible> {
    let command = |argv: &[String]| {
        let (program, arguments) = argv.split_first().context("no program to run")?;
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(&spec.env).stdin(Stdio::null());
        anyhow::Ok((program.clone(), command))
    };
    if !spec.before.is_empty() {
        let (program, mut before) = command(&spec.before)?;
        let status = before.status().with_context(|| format!("cannot run {program}"))?;
        if !status.success() {
            bail!("{program} ended with {status}");
        }
        std::io::stdin().read_exact(&mut [0]).context("nobody wants the container's own program")?;
    }
    let (program, mut command) = command(&spec.argv)?;
    let error = command.exec();
    Err(error).with_context(|| format!("cannot run {program}"))
}

fn enter_user_namespace() -> Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID)
        .context("this machine allows no user namespaces")?;
    fs::write("/proc/self/setgroups", "deny").context("cannot write setgroups")?;
    fs::write("/proc/self/uid_map", format!("0 {uid} 1")).context("cannot map the user")?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1")).context("cannot map the group")
}

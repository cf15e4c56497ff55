//! One process watches over a run, so that nothing of it is left however it ends: by Ctrl-C, a signal, or a crash.
//!
//! The run is a child of it, and all that the run writes, but its results, lies in one folder. What the run leaves
//! running is handed to the guard by the kernel, and ended there. Claims that the run left prepared are unprepared by
//! a node agent that is started anew. If the guard itself is killed, the kernel tells the run, which then ends in order.

use crate::life;
use crate::node::{self, Setting, containers};
use anyhow::{Context, Result, ensure};
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// How long a run that was told to end may take to undo what it did.
const GRACE: Duration = Duration::from_secs(60);

/// How a run ended.
enum End {
    /// By itself; whether nothing failed.
    Itself(bool),
    /// It was told to, by a signal of this number.
    Told(i32),
    /// It was killed, or it crashed.
    Crashed(String),
}

/// Runs this program's `__run` with these arguments, and leaves nothing behind; the exit status.
pub(crate) fn watch(arguments: &[OsString], setting: &Setting) -> Result<u8> {
    let folder = tempfile::Builder::new().prefix("gpu-check-").tempdir().context("no temporary folder")?;
    let flags = statvfs(folder.path()).with_context(|| folder.path().display().to_string())?.flags();
    ensure!(
        !flags.contains(FsFlags::ST_NOEXEC),
        "{} is mounted with noexec, and programs are run from there: set TMPDIR to another directory",
        folder.path().display()
    );
    prctl::set_child_subreaper(true).context("cannot take orphans in")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let end = runtime.block_on(run(arguments, folder.path()))?;
    drop(runtime);
    end_orphans();
    containers::forget(&node::containers_in(folder.path()));
    let left = node::undo(setting, folder.path());
    end_orphans();
    // It is emptied even where something in it resists.
    let path = folder.path().to_owned();
    if let Err(error) = folder.close() {
        eprintln!("gpu-check: {} could not be removed: {error}", path.display());
    }
    left.context("a claim of the run is still prepared: look for partitions with `nvidia-smi mig -lgi`")?;
    Ok(match end {
        End::Itself(is_good) => u8::from(!is_good),
        End::Told(signal) => {
            say!("interrupted; nothing of the run is left, but what results had been written");
            u8::try_from(128 + signal).unwrap_or(1)
        }
        End::Crashed(how) => {
            eprintln!("gpu-check: the run ended with {how}; nothing of it is left");
            1
        }
    })
}

/// Starts the run and waits for its end.
async fn run(arguments: &[OsString], folder: &Path) -> Result<End> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut command = tokio::process::Command::new(std::env::current_exe()?);
    command.arg("__run").arg(folder).arg(std::process::id().to_string()).args(arguments);
    // Who interrupts at a terminal interrupts the guard alone, which tells the run to end in order.
    command.env("TMPDIR", folder).process_group(0);
    let mut child = command.spawn().context("cannot start the run")?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
    let mut told = None;
    loop {
        let grace = async {
            match told {
                Some(_) => tokio::time::sleep(GRACE).await,
                None => std::future::pending().await,
            }
        };
        let signal = tokio::select! {
            status = child.wait() => {
                let status = status?;
                return Ok(match (told, status.code()) {
                    (Some(signal), _) => End::Told(signal),
                    (None, Some(code @ (0 | 1))) => End::Itself(code == 0),
                    (None, _) => End::Crashed(status.to_string()),
                });
            }
            () = grace => {
                child.start_kill()?;
                continue;
            }
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
            _ = hangup.recv() => SignalKind::hangup(),
        };
        if told.is_none() {
            eprintln!("gpu-check: told to end; what was done is undone");
        }
        told = Some(signal.as_raw_value());
        if let Some(pid) = pid {
            let _ = kill(pid, Signal::SIGTERM);
        }
    }
}

/// Kills what the run left, until there is nothing: who is killed leaves its own children to this process.
fn end_orphans() {
    for _ in 0..1000 {
        let orphans = children();
        if orphans.is_empty() {
            return;
        }
        for orphan in &orphans {
            let _ = kill(*orphan, Signal::SIGKILL);
            let _ = waitpid(*orphan, Some(WaitPidFlag::WNOHANG));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    eprintln!("gpu-check: these processes do not end: {:?}", children());
}

/// The children of this process.
fn children() -> Vec<Pid> {
    let own = std::process::id().to_string();
    let is_ours = |pid: &Pid| {
        // `pid (name) state parent …`, and a name can have anything in it.
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        text.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)) == Some(&own)
    };
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid::from_raw));
    pids.filter(is_ours).collect()
}

/// Removes the folder where the guard is gone and cannot.
pub(crate) fn tidy(folder: &Path, guard: u32) {
    if !life::is_child_of(guard) {
        let _ = std::fs::remove_dir_all(folder);
    }
}

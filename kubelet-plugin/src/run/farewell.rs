//! Runs the farewell: an agent that gives nothing out, ends with the last claim, and removes the node's
//! files.

use crate::args::Args;
use crate::prepare::{Node, UnprepareError};
use crate::trash::sweep;
use aliquot_model::names::NODE_FILES;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tokio_util::sync::CancellationToken;

/// The interval at which the agent checks whether the last claim is gone.
const LOOK: Duration = Duration::from_secs(1);
/// The lock file in the data directory, which an agent holds as long as it runs.
const LOCK: &str = "agent.lock";
/// The time that the agent's predecessor may take to end: a pod's grace period, and as much again.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Ends the agent, and sets `over`, when no claim holds anything on the node any more.
pub(super) async fn run(node: Arc<Node>, over: Arc<AtomicBool>, cancel: CancellationToken) {
    let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
    loop {
        let (worker, told) = (Arc::clone(&node), Arc::clone(&told));
        let look = move || {
            // No other task looks, and ending the leftovers may need a driver that comes up.
            let _ = worker.machine.gpus.driver();
            worker.release_all_parked()?;
            match worker.end_left_daemons() {
                Ok(ended) => drop(ended.tell(&mut told.lock())),
                Err(error) => tracing::warn!(%error, "cannot look for MPS daemons that were left"),
            }
            worker.is_idle().map_err(Into::into)
        };
        let looked: Result<Result<bool, UnprepareError>, _> = tokio::task::spawn_blocking(look).await;
        match looked {
            Ok(Ok(true)) => {
                tracing::info!("the last claim is gone");
                over.store(true, Ordering::Release);
                cancel.cancel();
                return;
            }
            Ok(Ok(false)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "not over yet, trying again"),
            Err(error) => tracing::warn!(%error, "reading the ledger ended abnormally, trying again"),
        }
        tokio::select! {
            () = cancel.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// Locks the node for an agent that gives something out, as long as it runs, so that a farewell removes
/// nothing meanwhile. Returns `None` if nothing can be written, which keeps no agent from serving prepared
/// claims.
///
/// # Errors
/// Fails if a farewell is removing the files.
pub(super) fn claim_node(args: &Args) -> anyhow::Result<Option<Flock<File>>> {
    let path = args.data_dir().join(LOCK);
    let open = || {
        fs::create_dir_all(args.data_dir())?;
        OpenOptions::new().write(true).create(true).truncate(false).open(&path)
    };
    let file = match open() {
        Ok(file) => file,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "cannot be locked");
            return Ok(None);
        }
    };
    let locked = Flock::lock(file, FlockArg::LockSharedNonblock).map_err(|(_, errno)| errno);
    // The file may have been removed between opening and locking.
    let is_there = |lock: &Flock<File>| {
        let there = fs::metadata(&path).and_then(|there| Ok(there.ino() == lock.metadata()?.ino()));
        there.unwrap_or(false)
    };
    match locked {
        Ok(lock) if is_there(&lock) => Ok(Some(lock)),
        Ok(_) | Err(Errno::EWOULDBLOCK) => {
            anyhow::bail!("what is left of a former agent removes {}; start again", args.data_dir().display())
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "cannot be locked");
            Ok(None)
        }
    }
}

/// Removes the agent's data, and the limiter and hook of all versions, if nothing is in use. The files of a
/// running agent stay, and so do those that were installed since `began`. The data also stays while a
/// supervisor of MPS daemons runs.
pub(super) async fn leave_nothing(
    args: &Args,
    began: SystemTime,
    patience: Duration,
    has_nothing: impl FnOnce() -> bool,
    is_mps_served: bool,
) {
    let data = args.data_dir();
    let until = Instant::now() + patience;
    // The predecessor of this agent may still be ending.
    let lock = loop {
        match File::open(data.join(LOCK)).map(|file| Flock::lock(file, FlockArg::LockExclusiveNonblock)) {
            Ok(Ok(lock)) => break Some(lock),
            Err(_) => break None,
            Ok(Err(_)) if Instant::now() < until => tokio::time::sleep(LOOK).await,
            Ok(Err(_)) => {
                tracing::info!("an agent runs on this node: its files stay");
                return;
            }
        }
    };
    if !has_nothing() {
        tracing::warn!("something is in use again, or of a newer release: the files stay");
        return;
    }
    if is_mps_served || has_socket(&data) {
        tracing::info!(path = %data.display(), "stays: a supervisor of MPS daemons, or another driver, is there");
    } else {
        remove(&data);
    }
    let found = fs::read_dir(&args.limiter_dir).into_iter().flatten().flatten().map(|entry| entry.path());
    for version in found.filter(|path| is_version(path) && !is_since(path, began)) {
        remove(&version);
    }
    drop(lock);
}

/// Returns true if another driver serves from the directory; this agent's own socket is gone by now.
fn has_socket(data: &Path) -> bool {
    let mut entries = fs::read_dir(data).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
}

/// Returns true if the path is a directory with only files that an installation puts there. An installation
/// directory may be shared, and other files in it must stay.
fn is_version(path: &Path) -> bool {
    let is_ours = |name: &str| {
        NODE_FILES
            .iter()
            .any(|file| *file == name || Path::new(file).with_extension("new") == Path::new(name))
    };
    let is_folder = fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    is_folder
        && fs::read_dir(path).is_ok_and(|entries| {
            entries
                .into_iter()
                .all(|entry| entry.is_ok_and(|entry| entry.file_name().to_str().is_some_and(is_ours)))
        })
}

/// Returns true if a directory was made or installed to since `began`; each installation updates its time.
fn is_since(path: &Path, began: SystemTime) -> bool {
    let written = fs::symlink_metadata(path).and_then(|found| found.modified());
    written.is_ok_and(|written| written >= began)
}

/// Removes a directory. It is renamed first, because another process may make a new one meanwhile. Then it is
/// removed like an ended share: no mount is entered, and no link is followed.
fn remove(dir: &Path) {
    let removed = aside(dir).and_then(|aside| {
        fs::rename(dir, &aside)?;
        let failed = sweep(&aside, &[], &AtomicBool::new(false))?;
        match failed.into_iter().next() {
            Some((name, error)) => Err(io::Error::new(error.kind(), format!("{}: {error}", name.display()))),
            None => fs::remove_dir(&aside),
        }
    });
    match removed {
        Ok(()) => tracing::info!(path = %dir.display(), "removed"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(path = %dir.display(), %error, "stays, and nothing needs it any more"),
    }
}

/// Returns a path beside the directory that does not exist and that no program uses.
fn aside(dir: &Path) -> io::Result<PathBuf> {
    let name = dir.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let free = (0..100).map(|number| dir.with_file_name(format!(".left-{number}-{}", name.display())));
    free.into_iter().find(|path| !path.exists()).ok_or_else(|| io::ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;
    use clap::Parser;
    use std::collections::BTreeSet;

    /// A node that agents of two versions were on: its directory, and the arguments of the one that says farewell.
    fn node() -> (tempfile::TempDir, Args) {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let args = Args::parse_from([
            "agent".to_owned(),
            "--node-name=n".to_owned(),
            format!("--plugin-dir={}", path("plugins")),
            format!("--limiter-dir={}", path("limiter")),
        ]);
        for made in ["plugins/another.example.com", "limiter/0.1.0", "limiter/0.2.0"] {
            fs::create_dir_all(dir.path().join(made)).unwrap();
        }
        fs::create_dir_all(args.data_dir().join("shares/a")).unwrap();
        for file in [args.data_dir().join(LOCK), args.limiter_dir.join("0.1.0/libaliquot_core.so")] {
            fs::write(file, "").unwrap();
        }
        (dir, args)
    }

    const LATER: Duration = Duration::from_secs(60);

    fn left(dir: &Path) -> BTreeSet<String> {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[tokio::test]
    async fn the_agents_data_and_all_versions_of_the_limiter_go() {
        let (_dir, args) = node();
        // What an interrupted removal, and an interrupted installation, have left.
        fs::create_dir_all(args.limiter_dir.join(".left-0.1.0")).unwrap();
        fs::write(args.limiter_dir.join("0.2.0/libaliquot_core.new"), "").unwrap();
        leave_nothing(&args, SystemTime::now() + LATER, Duration::ZERO, || true, false).await;
        assert_eq!(left(&args.plugin_dir), ["another.example.com".to_owned()].into());
        assert_eq!(left(&args.limiter_dir), BTreeSet::new());
        leave_nothing(&args, SystemTime::now(), Duration::ZERO, || true, false).await;
    }

    #[tokio::test]
    async fn what_others_have_beside_the_limiter_stays() {
        let (dir, args) = node();
        let theirs = dir.path().join("theirs");
        fs::create_dir_all(&theirs).unwrap();
        fs::write(theirs.join("libaliquot_core.so"), "").unwrap();
        std::os::unix::fs::symlink(&theirs, args.limiter_dir.join("link")).unwrap();
        fs::write(args.limiter_dir.join("file"), "").unwrap();
        fs::create_dir_all(args.limiter_dir.join("bin/nested")).unwrap();
        fs::write(args.limiter_dir.join("0.1.0/kubelet"), "").unwrap();
        leave_nothing(&args, SystemTime::now() + LATER, Duration::ZERO, || true, false).await;
        assert_eq!(left(&args.limiter_dir), ["0.1.0", "bin", "file", "link"].map(str::to_owned).into());
        assert_eq!(left(&args.limiter_dir.join("0.1.0")).len(), 2);
        assert_eq!(left(&theirs).len(), 1);
    }

    #[tokio::test]
    async fn a_version_that_is_installed_meanwhile_stays() {
        let (_dir, args) = node();
        let began = SystemTime::now() + LATER;
        File::open(args.limiter_dir.join("0.2.0")).unwrap().set_modified(began).unwrap();
        leave_nothing(&args, began, Duration::ZERO, || true, false).await;
        assert_eq!(left(&args.limiter_dir), ["0.2.0".to_owned()].into());
    }

    #[tokio::test]
    async fn where_an_agent_runs_everything_stays_until_it_has_ended() {
        let (_dir, args) = node();
        let agents = File::open(args.data_dir().join(LOCK)).unwrap();
        let agent = Flock::lock(agents, FlockArg::LockExclusiveNonblock).unwrap();
        leave_nothing(&args, SystemTime::now() + LATER, Duration::ZERO, || true, false).await;
        assert_eq!(left(&args.limiter_dir).len(), 2);
        assert!(args.data_dir().join("shares/a").is_dir());
        let ends = async { drop(agent) };
        tokio::join!(leave_nothing(&args, SystemTime::now() + LATER, LATER, || true, false), ends);
        assert_eq!(left(&args.limiter_dir).len(), 0);
    }

    #[tokio::test]
    async fn what_is_in_use_again_stays_and_so_does_what_others_serve_from() {
        let (_dir, args) = node();
        let later = SystemTime::now() + LATER;
        leave_nothing(&args, later, Duration::ZERO, || false, false).await;
        assert_eq!(left(&args.limiter_dir).len(), 2);
        leave_nothing(&args, later, Duration::ZERO, || true, true).await;
        assert_eq!(left(&args.limiter_dir).len(), 0, "MPS needs no limiter");
        assert!(args.data_dir().join("shares/a").is_dir());
        let _server = std::os::unix::net::UnixListener::bind(args.data_dir().join("plugin.sock")).unwrap();
        leave_nothing(&args, later, Duration::ZERO, || true, false).await;
        assert!(args.data_dir().join("shares/a").is_dir(), "another driver of this name");
    }

    #[tokio::test]
    async fn an_agent_that_starts_while_files_are_removed_starts_again() {
        let (_dir, args) = node();
        let removing =
            Flock::lock(File::open(args.data_dir().join(LOCK)).unwrap(), FlockArg::LockExclusive).unwrap();
        let refused = claim_node(&args).unwrap_err().to_string();
        assert!(refused.contains("start again"), "{refused}");
        drop(removing);
        let agents = [claim_node(&args).unwrap(), claim_node(&args).unwrap()];
        assert!(agents.iter().all(Option::is_some), "two during an update");
        leave_nothing(&args, SystemTime::now() + LATER, Duration::ZERO, || true, false).await;
        assert!(args.data_dir().is_dir());
    }
}

//! The working directory of a run, and the directories that killed runs left behind.

use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The prefix of temporary directories. It is short because the paths of unix sockets are at most 107 bytes.
const PREFIX: &str = "aliquot-";
/// A file in each directory that its run keeps locked; the kernel releases the lock when the run ends, in
/// whatever way.
const LOCK: &str = "demo.lock";

/// A working directory; a temporary one is removed when this value is dropped.
pub(crate) struct WorkDir {
    path: PathBuf,
    temporary: Option<(TempDir, File)>,
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        let Some((dir, _lock)) = self.temporary.take() else { return };
        let path = dir.keep();
        if let Err(error) = remove(&path) {
            eprintln!("cannot remove {}: {error}", path.display());
        }
    }
}

impl WorkDir {
    /// Returns the given directory, or a temporary one.
    pub(crate) fn make(wanted: Option<&Path>) -> Result<Self> {
        match wanted {
            Some(dir) => {
                fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
                Ok(Self { path: dir.canonicalize()?, temporary: None })
            }
            None => {
                let parent = std::env::temp_dir();
                remove_left(&parent);
                Self::temporary(&parent).context("cannot create a temporary directory")
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn temporary(parent: &Path) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        // The file is locked before it gets its name: a directory without that name is not removed by
        // anybody.
        let unnamed = dir.path().join(".lock");
        let lock = File::create(&unnamed)?;
        lock.lock()?;
        fs::rename(&unnamed, dir.path().join(LOCK))?;
        Ok(Self { path: dir.path().to_owned(), temporary: Some((dir, lock)) })
    }
}

/// Removes the directories of this user's runs that ended without removing them.
fn remove_left(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with(PREFIX) && is_left(&path) {
            match remove(&path) {
                Ok(()) => eprintln!("removed {}, which a demo that was killed left behind", path.display()),
                Err(error) => eprintln!("a demo that was killed left {} behind: {error}", path.display()),
            }
        }
    }
}

/// Removes a directory, even if a program in a container, which can write into its simulated node, has
/// removed the owner's permissions.
fn remove(path: &Path) -> io::Result<()> {
    fs::remove_dir_all(path).or_else(|_| {
        unlock(path)?;
        fs::remove_dir_all(path)
    })
}

fn unlock(dir: &Path) -> io::Result<()> {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            unlock(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns true for the directory of a run that is over.
fn is_left(path: &Path) -> bool {
    let own = fs::symlink_metadata(path)
        .is_ok_and(|found| found.is_dir() && found.uid() == nix::unistd::geteuid().as_raw());
    own && File::open(path.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_runs_that_are_over_left_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let running = WorkDir::temporary(parent.path()).unwrap();
        let (left, other) = (parent.path().join("aliquot-left"), parent.path().join("aliquot-other"));
        fs::create_dir_all(left.join("node")).unwrap();
        fs::write(left.join(LOCK), "").unwrap();
        fs::create_dir(&other).unwrap();
        remove_left(parent.path());
        assert!(running.path().is_dir(), "its run goes on");
        assert!(!left.exists(), "its run is over");
        assert!(other.is_dir(), "not a run's");
    }

    #[test]
    fn a_temporary_directory_goes_with_its_run() {
        let parent = tempfile::tempdir().unwrap();
        drop(WorkDir::temporary(parent.path()).unwrap());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_was_asked_for_stays() {
        let parent = tempfile::tempdir().unwrap();
        let wanted = parent.path().join("wanted");
        drop(WorkDir::make(Some(&wanted)).unwrap());
        assert!(wanted.is_dir());
    }
}

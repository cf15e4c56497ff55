//! The directory that a run works in, and those that killed runs left behind.

use anyhow::{Context, Result};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// What names of temporary directories start with. Short, because unix socket paths end at 107 bytes.
const PREFIX: &str = "aliquot-";
/// A file in each that its run holds locked; the kernel lets go of it when the run ends in whatever way.
const LOCK: &str = "demo.lock";

/// A directory; a temporary one goes when this is dropped.
pub(crate) struct WorkDir {
    path: PathBuf,
    _temporary: Option<(TempDir, File)>,
}

impl WorkDir {
    /// The directory that is wanted, else a temporary one.
    pub(crate) fn make(wanted: Option<&Path>) -> Result<Self> {
        match wanted {
            Some(dir) => {
                fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
                Ok(Self { path: dir.canonicalize()?, _temporary: None })
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

    fn temporary(parent: &Path) -> std::io::Result<Self> {
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        // Locked before it has its name: without that name the directory is nobody's to remove.
        let unnamed = dir.path().join(".lock");
        let lock = File::create(&unnamed)?;
        lock.lock()?;
        fs::rename(&unnamed, dir.path().join(LOCK))?;
        Ok(Self { path: dir.path().to_owned(), _temporary: Some((dir, lock)) })
    }
}

/// Removes the directories of this user's runs that ended without doing so.
fn remove_left(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with(PREFIX) && is_left(&path) {
            match fs::remove_dir_all(&path) {
                Ok(()) => eprintln!("removed {}, which a demo that was killed left behind", path.display()),
                Err(error) => eprintln!("a demo that was killed left {} behind: {error}", path.display()),
            }
        }
    }
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

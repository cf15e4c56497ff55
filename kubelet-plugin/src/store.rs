//! The checkpoint on disk, and the lock under which it is read and written.
//!
//! Two instances of the agent may run during an update, and both may get calls. So every operation
//! takes the node's lock (`flock`, which the kernel drops with the process), reads the checkpoint from
//! disk, and writes it back: disk is the truth, memory is nothing.
//!
//! Two equal copies are kept, each replaced by rename after fsync. The newer one that reads wins, so a
//! truncated file costs nothing (dra-driver-nvidia-gpu#1100, #1259).

use crate::checkpoint::{self, CheckpointError};
use crate::ledger::Ledger;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const FILES: [&str; 2] = ["checkpoint.json", "checkpoint.copy.json"];
const LOCK: &str = "lock";
const RETRY: Duration = Duration::from_millis(20);

/// Why state could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The other instance, or another operation, has the lock.
    #[error("another operation or another instance of the plugin held {} for {waited:?}; try again", path.display())]
    Busy {
        /// Lock file.
        path: PathBuf,
        /// How long we waited.
        waited: Duration,
    },
    /// No copy of the checkpoint can be read though there is one.
    #[error("no checkpoint can be read: {details}")]
    Corrupt {
        /// File and reason of each copy.
        details: String,
    },
    /// A newer release wrote it.
    #[error("cannot use the checkpoint {}: {source}", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// What it says.
        source: CheckpointError,
    },
    /// The file system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Makes an [`StoreError::Io`].
pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { action, path, source }
}

/// The data directory.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
}

/// The node's lock. Everything that changes hardware, checkpoint or CDI directory happens under it.
#[derive(Debug)]
pub struct Locked {
    dir: PathBuf,
    sequence: u64,
    _lock: Flock<File>,
}

/// What was read.
#[derive(Debug)]
pub struct Loaded {
    /// The ledger.
    pub ledger: Ledger,
    /// Copies that could not be read, with the reason; the ledger came from the other one.
    pub damaged: Vec<String>,
}

impl Store {
    /// A data directory, which [`Store::lock`] makes when it is missing.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Takes the lock. Blocks the thread for at most `timeout`.
    ///
    /// # Errors
    /// [`StoreError::Busy`] after the timeout.
    pub fn lock(&self, timeout: Duration) -> Result<Locked, StoreError> {
        fs::create_dir_all(&self.dir).map_err(io_error("create", &self.dir))?;
        let path = self.dir.join(LOCK);
        let started = Instant::now();
        let mut file = open_lock(&path)?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Locked { dir: self.dir.clone(), sequence: 0, _lock: lock }),
                Err((unlocked, Errno::EWOULDBLOCK | Errno::EINTR)) => {
                    if started.elapsed() >= timeout {
                        return Err(StoreError::Busy { path, waited: timeout });
                    }
                    file = unlocked;
                    std::thread::sleep(RETRY);
                }
                Err((_, errno)) => {
                    return Err(StoreError::Io { action: "lock", path, source: errno.into() });
                }
            }
        }
    }
}

fn open_lock(path: &Path) -> Result<File, StoreError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(io_error("open", path))
}

impl Locked {
    /// Reads the newer readable copy. No file at all is an empty ledger.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] when copies exist and none reads.
    pub fn load(&mut self) -> Result<Loaded, StoreError> {
        let mut best: Option<(Ledger, u64)> = None;
        let mut damaged = Vec::new();
        for name in FILES {
            let path = self.dir.join(name);
            let bytes = match fs::read(&path) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(source) => return Err(StoreError::Io { action: "read", path, source }),
            };
            match checkpoint::decode(&bytes) {
                Ok((ledger, sequence)) => {
                    if best.as_ref().is_none_or(|(_, newest)| sequence > *newest) {
                        best = Some((ledger, sequence));
                    }
                }
                Err(source @ CheckpointError::Newer { .. }) => {
                    return Err(StoreError::Newer { path, source });
                }
                Err(error) => damaged.push(format!("{}: {error}", path.display())),
            }
        }
        match best {
            Some((ledger, sequence)) => {
                self.sequence = sequence;
                Ok(Loaded { ledger, damaged })
            }
            None if damaged.is_empty() => Ok(Loaded { ledger: Ledger::default(), damaged }),
            None => Err(StoreError::Corrupt { details: damaged.join("; ") }),
        }
    }

    /// Writes both copies. After the return, or a crash, at least one is whole.
    ///
    /// # Errors
    /// If the first copy cannot be written. The second one is only worth a warning.
    pub fn save(&mut self, ledger: &Ledger) -> Result<(), StoreError> {
        self.sequence = self.sequence.saturating_add(1);
        let [first, second] = FILES.map(|name| self.dir.join(name));
        let bytes = checkpoint::encode(ledger, self.sequence).map_err(|error| StoreError::Io {
            action: "encode",
            path: first.clone(),
            source: error.into(),
        })?;
        replace(&first, &bytes, 0o600)?;
        if let Err(error) = replace(&second, &bytes, 0o600) {
            tracing::warn!(%error, "the second copy of the checkpoint is stale");
        }
        Ok(())
    }

    /// Moves unreadable copies out of the way, so that the agent can start at all.
    ///
    /// # Errors
    /// If a file cannot be renamed.
    pub fn set_aside(&mut self, suffix: &str) -> Result<Vec<PathBuf>, StoreError> {
        let mut moved = Vec::new();
        for name in FILES {
            let from = self.dir.join(name);
            let to = self.dir.join(format!("{name}.corrupt-{suffix}"));
            match fs::rename(&from, &to) {
                Ok(()) => moved.push(to),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(source) => return Err(StoreError::Io { action: "rename", path: from, source }),
            }
        }
        sync_dir(&self.dir)?;
        Ok(moved)
    }
}

/// Replaces a file by rename: readers see the old or the new content, also after a crash.
///
/// # Errors
/// If the file system refuses; the old file is then untouched.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> Result<(), StoreError> {
    let temp = path.with_extension("tmp");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&temp)
        .map_err(io_error("create", &temp))?;
    file.write_all(content).map_err(io_error("write", &temp))?;
    file.sync_all().map_err(io_error("sync", &temp))?;
    fs::rename(&temp, path).map_err(io_error("replace", path))?;
    path.parent().map_or(Ok(()), sync_dir)
}

/// Makes renames and removals in a directory last.
///
/// # Errors
/// If the directory cannot be synced.
pub fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("sync", dir))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Binding;
    use aliquot_model::GpuUuid;

    fn ledger(minor: u32) -> Ledger {
        let mut ledger = Ledger::default();
        let gpu = GpuUuid::parse("GPU-00").unwrap();
        ledger.bindings.insert(minor, Binding { gpu, since: None });
        ledger
    }

    fn locked(dir: &Path) -> Locked {
        Store::new(dir).lock(Duration::from_millis(50)).unwrap()
    }

    #[test]
    fn an_empty_directory_is_an_empty_ledger() {
        let temp = tempfile::tempdir().unwrap();
        assert_eq!(locked(&temp.path().join("new")).load().unwrap().ledger, Ledger::default());
    }

    #[test]
    fn a_truncated_file_is_recovered_from_its_copy() {
        for damaged in FILES {
            let temp = tempfile::tempdir().unwrap();
            let mut lock = locked(temp.path());
            lock.save(&ledger(1)).unwrap();
            lock.save(&ledger(2)).unwrap();
            let path = temp.path().join(damaged);
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
            let loaded = lock.load().unwrap();
            assert_eq!(loaded.ledger, ledger(2));
            assert_eq!(loaded.damaged.len(), 1);
            lock.save(&ledger(3)).unwrap();
            assert!(lock.load().unwrap().damaged.is_empty());
        }
    }

    #[test]
    fn a_crash_between_the_copies_keeps_the_newer_one() {
        let temp = tempfile::tempdir().unwrap();
        let mut lock = locked(temp.path());
        lock.save(&ledger(1)).unwrap();
        let old = fs::read(temp.path().join(FILES[1])).unwrap();
        lock.save(&ledger(2)).unwrap();
        fs::write(temp.path().join(FILES[1]), old).unwrap();
        assert_eq!(lock.load().unwrap().ledger, ledger(2));
    }

    #[test]
    fn two_broken_copies_are_an_error_and_can_be_set_aside() {
        let temp = tempfile::tempdir().unwrap();
        let mut lock = locked(temp.path());
        lock.save(&ledger(1)).unwrap();
        for name in FILES {
            fs::write(temp.path().join(name), "{").unwrap();
        }
        assert!(matches!(lock.load(), Err(StoreError::Corrupt { .. })));
        assert_eq!(lock.set_aside("x").unwrap().len(), 2);
        assert_eq!(lock.load().unwrap().ledger, Ledger::default());
    }

    #[test]
    fn the_lock_excludes_another_holder_and_ends_with_it() {
        let temp = tempfile::tempdir().unwrap();
        let store = Store::new(temp.path());
        let first = store.lock(Duration::ZERO).unwrap();
        assert!(matches!(store.lock(Duration::from_millis(30)), Err(StoreError::Busy { .. })));
        drop(first);
        assert!(store.lock(Duration::ZERO).is_ok());
    }
}

//! The checkpoint on disk, and the lock under which it is read and written.
//!
//! Two instances of the agent may run during an update, and both may get calls. So every operation
//! takes the node's lock (`flock`, which the kernel drops with the process), reads the checkpoint from
//! disk, and writes it back: disk is the truth, memory is nothing.
//!
//! Two equal copies are kept, each replaced by rename after fsync. The newer one that reads wins, so a
//! truncated file costs nothing (dra-driver-nvidia-gpu#1100, #1259).
//!
//! A third file of the same size is the reserve, which only giving back may use ([`Locked::save_releasing`]):
//! on a full disk nothing is prepared, and everything that is prepared can be unprepared.

mod files;
mod reserve;

pub(crate) use files::io_error;
pub use files::{replace, sync_dir};

use crate::checkpoint::{self, CheckpointError};
use crate::ledger::Ledger;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
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
    /// No block or no inode is left, or a quota is used up.
    #[error(
        "cannot {action} {}: {source}: free space or inodes on the file system of {} (df -h, df -i), for until then nothing new is prepared there; what is prepared can be unprepared", path.display(), path.parent().unwrap_or(path).display()
    )]
    Full {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
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

    /// Writes both copies, to take something on. After the return, or a crash, at least one is whole, and
    /// there is room to give back everything that the ledger holds.
    ///
    /// # Errors
    /// If the reserve or the first copy cannot be written; [`StoreError::Full`] on a full disk. The ledger on
    /// disk is then what it was. A second copy that cannot be written is only worth a warning.
    pub fn save(&mut self, ledger: &Ledger) -> Result<(), StoreError> {
        let bytes = self.encode(ledger, None)?;
        reserve::keep(&self.dir, bytes.len())?;
        let [first, second] = FILES.map(|name| self.dir.join(name));
        replace(&first, &bytes, 0o600)?;
        if let Err(error) = replace(&second, &bytes, 0o600) {
            tracing::warn!(%error, "the second copy of the checkpoint is stale");
        }
        Ok(())
    }

    /// Writes both copies, to give something back or to keep what there is: as [`Self::save`], but a full
    /// disk does not stop it, for there is a reserve.
    ///
    /// # Errors
    /// If the first copy cannot be written.
    pub fn save_releasing(&mut self, ledger: &Ledger) -> Result<(), StoreError> {
        let full = match self.save(ledger) {
            Err(error @ StoreError::Full { .. }) => error,
            other => return other,
        };
        let [first, second] = FILES.map(|name| self.dir.join(name));
        let reserved = reserve::size(&self.dir).unwrap_or_default();
        let bytes = self.encode(ledger, Some(reserved))?;
        if reserve::exchange(&self.dir, &first, &bytes).is_err() {
            // Without a reserve there may still be room for the content alone.
            let bare = self.encode(ledger, Some(0))?;
            return replace(&first, &bare, 0o600).map_err(|_| full);
        }
        if let Err(error) = reserve::exchange(&self.dir, &second, &bytes) {
            tracing::warn!(%error, "the second copy of the checkpoint is stale");
        }
        tracing::warn!(error = %full, "wrote the checkpoint into its reserve");
        Ok(())
    }

    /// Makes the reserve, and gives both copies their full size, where an earlier release or a full disk left
    /// them smaller.
    ///
    /// # Errors
    /// [`StoreError::Full`] if there is no room for it.
    pub fn settle(&mut self, ledger: &Ledger) -> Result<(), StoreError> {
        let size = self.encode(ledger, None)?.len() as u64;
        let fits = |name: &str| fs::metadata(self.dir.join(name)).is_ok_and(|meta| meta.len() >= size);
        let settled = FILES.iter().all(|name| fits(name)) && reserve::size(&self.dir) >= Some(size);
        if settled { Ok(()) } else { self.save(ledger) }
    }

    /// The file's bytes under the next sequence number; of the size that they should have, or of this one.
    fn encode(&mut self, ledger: &Ledger, size: Option<u64>) -> Result<Vec<u8>, StoreError> {
        self.sequence = self.sequence.saturating_add(1);
        checkpoint::encode(ledger, self.sequence)
            .and_then(|content| match size {
                Some(size) => content.padded(usize::try_from(size).unwrap_or(usize::MAX)),
                None => content.with_room(),
            })
            .and_then(|content| content.file())
            .map_err(|error| StoreError::Io {
                action: "encode",
                path: self.dir.join("checkpoint.json"),
                source: error.into(),
            })
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

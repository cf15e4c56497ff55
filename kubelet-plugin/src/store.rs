//! Keeps the checkpoint on disk, and the lock under which it is read and written.
//!
//! Two instances of the agent may run during an update, and both may get calls. So every operation takes the
//! node's lock (`flock`, which the kernel drops with the process), reads the checkpoint from disk, and writes
//! it back. The state on disk is authoritative; nothing is kept in memory.
//!
//! Two equal copies are kept, each replaced by rename after fsync. The newer readable copy wins, so a
//! truncated file costs nothing (dra-driver-nvidia-gpu#1100, #1259). A copy that cannot be read is kept under
//! another name before anything is written in its place. If no copy can be read, or none is there, the result
//! is an empty ledger that is marked as lost ([`Ledger::lost`]).
//!
//! A third file of the same size is the reserve, which only releasing operations may use
//! ([`Locked::save_releasing`]): on a full disk nothing new is prepared, and everything that is prepared can
//! be unprepared.

mod aside;
mod decoded;
mod files;
mod newer;
mod reserve;
mod turn;
mod wait;

use decoded::{Decoded, Said};
use files::replace_unsettled;
pub(crate) use files::{io_error, replace_until_reboot, replace_until_reboot_with, replace_with};
pub use files::{replace, sync_dir};
use newer::NewerCopy;
use turn::{Turn, Turns};
pub(crate) use wait::{open_lock, patiently};

use crate::checkpoint::{self, CheckpointError};
use crate::ledger::{Cause, Ledger, Lost};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const FILES: [&str; 2] = ["checkpoint.json", "checkpoint.copy.json"];
const LOCK: &str = "lock";

/// The reason why state could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another instance, or another operation, holds the lock.
    #[error("another operation or another instance of the plugin held {} for {waited:?}; try again", path.display())]
    Busy {
        /// The lock file.
        path: PathBuf,
        /// The time that was waited.
        waited: Duration,
    },
    /// The file system has no block or inode left, or a quota is used up.
    #[error(
        "cannot {action} {}: {source}: free space or inodes on the file system of {} (df -h, df -i), for until then nothing new is prepared there; what is prepared can be unprepared", path.display(), path.parent().unwrap_or(path).display()
    )]
    Full {
        /// The action that was tried.
        action: &'static str,
        /// The path of the action.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file system refused the action.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The action that was tried.
        action: &'static str,
        /// The path of the action.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// A copy of the checkpoint that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The path of the copy.
    pub path: PathBuf,
    /// The reason why it could not be read.
    pub reason: String,
    /// The path at which the copy is kept now.
    pub kept: PathBuf,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; it was kept as {}", self.path.display(), self.reason, self.kept.display())
    }
}

/// The data directory of the checkpoint.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
    damage: Arc<Mutex<Vec<Damage>>>,
    decoded: Arc<Mutex<Decoded>>,
    turns: Arc<Turns>,
}

/// The node's lock, while it is held. The checkpoint is read and written under it, and nothing that takes
/// long happens under it.
#[derive(Debug)]
pub struct Locked {
    dir: PathBuf,
    sequence: u64,
    damage: Arc<Mutex<Vec<Damage>>>,
    decoded: Arc<Mutex<Decoded>>,
    // In this order: whose turn is next finds the lock free.
    _lock: Flock<File>,
    _turn: Turn,
}

/// The result of reading the checkpoint.
#[derive(Debug)]
pub struct Loaded {
    /// The ledger.
    pub ledger: Ledger,
    /// The copies that could not be read. The ledger came from the other copy, or is marked as lost.
    pub damaged: Vec<Damage>,
}

impl Store {
    /// Uses a data directory; [`Store::lock`] makes it if it is missing.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), damage: Arc::default(), decoded: Arc::default(), turns: Arc::default() }
    }

    /// Returns the path of the data directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the copies that could not be read since the last call.
    pub fn take_damage(&self) -> Vec<Damage> {
        std::mem::take(&mut *self.damage.lock())
    }

    /// Takes the lock. Blocks the thread for at most `timeout`.
    ///
    /// # Errors
    /// Fails with [`StoreError::Busy`] after the timeout, or with another [`StoreError`] if the file system
    /// refuses.
    pub fn lock(&self, timeout: Duration) -> Result<Locked, StoreError> {
        let until = Instant::now() + timeout;
        let path = self.dir.join(LOCK);
        let Some(turn) = self.turns.take(until) else {
            return Err(StoreError::Busy { path, waited: timeout });
        };
        let mut file = Some(open_lock(&path)?);
        let taken = patiently(until.saturating_duration_since(Instant::now()), || {
            let Some(unlocked) = file.take() else { return Ok(None) };
            match Flock::lock(unlocked, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => Ok(Some(lock)),
                Err((unlocked, Errno::EWOULDBLOCK | Errno::EINTR)) => {
                    file = Some(unlocked);
                    Ok(None)
                }
                Err((_, errno)) => {
                    Err(StoreError::Io { action: "lock", path: path.clone(), source: errno.into() })
                }
            }
        })?;
        match taken {
            Some(lock) => {
                let (damage, decoded) = (Arc::clone(&self.damage), Arc::clone(&self.decoded));
                Ok(Locked { dir: self.dir.clone(), sequence: 0, damage, decoded, _lock: lock, _turn: turn })
            }
            None => Err(StoreError::Busy { path, waited: timeout }),
        }
    }
}

impl Locked {
    /// Reads the newer readable copy. A copy that cannot be read is kept under another name. If no copy can
    /// be read, or none is there, returns a ledger that is marked as lost.
    ///
    /// # Errors
    /// Fails if the file system refuses.
    pub fn load(&mut self) -> Result<Loaded, StoreError> {
        let mut best: Option<(Arc<Said>, &'static str)> = None;
        let mut newer: Vec<NewerCopy> = Vec::new();
        let mut damaged = Vec::new();
        for name in FILES {
            let path = self.dir.join(name);
            let reason = match fs::read(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) if is_damage(&error) => error.to_string(),
                Err(source) => return Err(StoreError::Io { action: "read", path, source }),
                Ok(bytes) => match self.decoded.lock().read(bytes) {
                    Ok(said) => {
                        if best.as_ref().is_none_or(|(newest, _)| said.sequence > newest.sequence) {
                            best = Some((said, name));
                        }
                        continue;
                    }
                    Err(CheckpointError::Newer { sequence, .. }) => {
                        newer.push(NewerCopy { name, sequence });
                        continue;
                    }
                    Err(error) => error.to_string(),
                },
            };
            let kept = aside::keep(&self.dir, name)?;
            damaged.push(Damage { path, reason, kept });
        }
        // Of two copies the later one counts.
        let sequence = best.as_ref().map(|(said, _)| said.sequence);
        if newer.iter().any(|copy| Some(copy.sequence) > sequence) {
            let stale = best.take().map(|(_, name)| name);
            damaged.extend(self.set_newer_aside(newer, stale)?);
        }
        for damage in &damaged {
            tracing::warn!(%damage, "a copy of the checkpoint cannot be used");
        }
        self.damage.lock().extend(damaged.iter().cloned());
        let best = best.map(|(said, _)| Arc::unwrap_or_clone(said));
        let Said { mut ledger, sequence } = best.unwrap_or_else(|| {
            let reasons: Vec<String> = damaged.iter().map(ToString::to_string).collect();
            let reason = if reasons.is_empty() { "none was there".to_owned() } else { reasons.join("; ") };
            let cause = match (reasons.is_empty(), self.has_traces()) {
                (false, _) => Cause::Unreadable,
                (true, true) => Cause::Gone,
                (true, false) => Cause::Nothing,
            };
            let lost = Some(Lost { reason, cause, ..Lost::default() });
            Said { ledger: Ledger { lost, ..Ledger::default() }, sequence: 0 }
        });
        self.sequence = sequence;
        self.look_aside(&mut ledger)?;
        Ok(Loaded { ledger, damaged })
    }

    /// Returns true if another file in the directory shows that there was a checkpoint.
    fn has_traces(&self) -> bool {
        reserve::size(&self.dir).is_some() || aside::any(&self.dir)
    }

    /// Writes both copies, for an operation that takes something on. After the return, or a crash, at least
    /// one copy is whole, and there is room to release everything that the ledger holds.
    ///
    /// # Errors
    /// Fails if the reserve or the first copy cannot be written; with [`StoreError::Full`] on a full disk.
    /// The ledger on disk is then unchanged. If only the final sync of the directory fails, the new ledger is
    /// the one that is read from then on, but it may be lost in a power failure. A second copy that cannot be
    /// written only causes a warning.
    pub fn save(&mut self, ledger: &Ledger) -> Result<(), StoreError> {
        let bytes = self.encode(ledger, None)?;
        reserve::keep(&self.dir, bytes.len())?;
        let [first, second] = FILES.map(|name| self.dir.join(name));
        replace_unsettled(&first, &bytes, 0o600)?;
        if let Err(error) = replace_unsettled(&second, &bytes, 0o600) {
            tracing::warn!(%error, "the second copy of the checkpoint is stale");
        }
        // Each name is that of a whole file all the while, and of the new one from here on.
        sync_dir(&self.dir)?;
        self.decoded.lock().wrote(bytes, ledger, self.sequence);
        Ok(())
    }

    /// Writes both copies, for an operation that releases something or keeps what there is. Works as
    /// [`Self::save`], but a full disk does not stop it, because there is a reserve.
    ///
    /// # Errors
    /// Fails if the first copy cannot be written.
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

    /// Makes the reserve and gives both copies their full size, if an earlier release or a full disk left
    /// them smaller.
    ///
    /// # Errors
    /// Fails with [`StoreError::Full`] if there is no room for it.
    pub fn settle(&mut self, ledger: &Ledger) -> Result<(), StoreError> {
        let size = self.encode(ledger, None)?.len() as u64;
        let fits = |name: &str| fs::metadata(self.dir.join(name)).is_ok_and(|meta| meta.len() >= size);
        let settled = FILES.iter().all(|name| fits(name)) && reserve::size(&self.dir) >= Some(size);
        if settled { Ok(()) } else { self.save(ledger) }
    }

    /// Encodes the checkpoint under the next sequence number, padded to `size` bytes or, without one, to the
    /// size that it should have.
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
}

/// Returns true if the error means that the content on disk is damaged, not that the request failed.
fn is_damage(error: &io::Error) -> bool {
    let damage = [Errno::EIO, Errno::EBADMSG, Errno::EUCLEAN, Errno::EISDIR];
    error.raw_os_error().is_some_and(|code| damage.contains(&Errno::from_raw(code)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Binding;
    use aliquot_model::GpuUuid;

    fn ledger(minor: u32) -> Ledger {
        let mut ledger = Ledger::default();
        let gpu = GpuUuid::parse("GPU-00").unwrap();
        ledger.bindings.insert(minor, Binding { gpu, former: Default::default() });
        ledger
    }

    fn locked(dir: &Path) -> Locked {
        Store::new(dir).lock(Duration::from_millis(50)).unwrap()
    }

    #[test]
    fn an_empty_directory_is_an_empty_ledger_and_one_without_its_checkpoint_is_a_lost_one() {
        let temp = tempfile::tempdir().unwrap();
        let empty = |cause| {
            let lost = Some(Lost { reason: "none was there".into(), cause, ..Lost::default() });
            Ledger { lost, ..Ledger::default() }
        };
        let mut lock = locked(&temp.path().join("new"));
        assert_eq!(lock.load().unwrap().ledger, empty(Cause::Nothing));
        lock.save(&ledger(1)).unwrap();
        for name in FILES {
            fs::remove_file(temp.path().join("new").join(name)).unwrap();
        }
        assert_eq!(lock.load().unwrap().ledger, empty(Cause::Gone));
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
    fn copies_that_do_not_read_are_kept_as_they_are_and_named_and_only_so_many() {
        let temp = tempfile::tempdir().unwrap();
        let mut kept = Vec::new();
        for round in 0..6 {
            let mut lock = locked(temp.path());
            lock.save(&ledger(1)).unwrap();
            for name in FILES {
                fs::write(temp.path().join(name), format!("{{{round} {name}")).unwrap();
            }
            let loaded = lock.load().unwrap();
            let lost = loaded.ledger.lost.clone().unwrap();
            assert_eq!(loaded.damaged.len(), 2);
            for (damage, name) in loaded.damaged.iter().zip(FILES) {
                assert!(lost.reason.contains(&damage.kept.display().to_string()), "{}", lost.reason);
                assert_eq!(fs::read_to_string(&damage.kept).unwrap(), format!("{{{round} {name}"));
                kept.push(damage.kept.clone());
            }
            // It is on disk that it was lost as soon as anything is.
            assert!(lock.load().unwrap().ledger.lost.is_some());
            lock.save(&loaded.ledger).unwrap();
            assert_eq!(lock.load().unwrap().ledger.lost, Some(lost));
        }
        let there: Vec<bool> = kept.iter().map(|path| path.exists()).collect();
        assert_eq!(there.iter().filter(|there| **there).count(), aside::KEPT);
        assert!(there.ends_with(&[true; aside::KEPT]), "the newest: {there:?}");
    }

    #[test]
    fn one_copy_that_does_not_read_is_kept_too_and_told_of_once() {
        let temp = tempfile::tempdir().unwrap();
        let store = Store::new(temp.path());
        let mut lock = store.lock(Duration::ZERO).unwrap();
        lock.save(&ledger(1)).unwrap();
        fs::write(temp.path().join(FILES[0]), "{").unwrap();
        assert_eq!(lock.load().unwrap().ledger, ledger(1));
        lock.save(&ledger(2)).unwrap();
        let damage = store.take_damage();
        assert_eq!(damage.len(), 1);
        assert_eq!(fs::read_to_string(&damage[0].kept).unwrap(), "{");
        assert_eq!(store.take_damage(), []);
    }

    /// Rewrites a copy's header.
    fn of_newer(dir: &Path, name: &str, content: Option<&str>) {
        let path = dir.join(name);
        let text = fs::read_to_string(&path).unwrap();
        let text = text.replacen("\"version\":1", "\"version\":7", 1);
        let text = match content {
            None => text,
            Some(content) => {
                let mut header: serde_json::Value =
                    serde_json::from_str(text.lines().next().unwrap()).unwrap();
                header["bytes"] = content.len().into();
                header["sha256"] = checkpoint::checksum(content.as_bytes()).into();
                format!("{header}\n{content}")
            }
        };
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_checkpoint_of_which_a_newer_release_left_nothing_to_read_is_set_aside_if_it_is_the_later_one() {
        let temp = tempfile::tempdir().unwrap();
        let mut lock = locked(temp.path());
        lock.save(&ledger(1)).unwrap();
        for name in FILES {
            of_newer(temp.path(), name, Some("[]"));
        }
        let before = FILES.map(|name| fs::read(temp.path().join(name)).unwrap());
        let lost = lock.load().unwrap().ledger.lost.unwrap();
        assert_eq!(lost.cause, Cause::Newer);
        assert!(lost.reason.contains("written by a newer release (format version 7"), "{}", lost.reason);
        let aside = aside::newer(temp.path()).unwrap();
        assert_eq!(aside.iter().map(|path| fs::read(path).unwrap()).collect::<Vec<_>>(), before);
        // Whatever a later one says.
        lock.save(&ledger(1)).unwrap();
        assert_eq!(lock.load().unwrap().ledger.lost.unwrap().cause, Cause::Newer);
        aside.iter().for_each(|path| fs::remove_file(path).unwrap());
        lock.save(&Ledger { lost: Some(lost), ..ledger(1) }).unwrap();
        assert_eq!(lock.load().unwrap().ledger.lost.unwrap().cause, Cause::Gone);
        // Of two copies the later one counts.
        lock.save(&ledger(2)).unwrap();
        lock.save(&ledger(3)).unwrap();
        of_newer(temp.path(), FILES[0], None);
        assert_eq!(lock.load().unwrap().ledger.bindings, ledger(3).bindings);
    }

    #[test]
    fn an_older_copy_that_reads_does_not_stand_for_a_later_one_of_a_newer_release() {
        let temp = tempfile::tempdir().unwrap();
        let mut lock = locked(temp.path());
        lock.save(&ledger(1)).unwrap();
        let old = fs::read(temp.path().join(FILES[1])).unwrap();
        lock.save(&ledger(2)).unwrap();
        fs::write(temp.path().join(FILES[1]), old).unwrap();
        of_newer(temp.path(), FILES[0], Some("[]"));
        let loaded = lock.load().unwrap();
        assert!(loaded.ledger.bindings.is_empty());
        assert_eq!(loaded.ledger.lost.unwrap().cause, Cause::Newer);
        assert!(loaded.damaged[0].reason.contains("older than the other copy"), "{:?}", loaded.damaged);
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

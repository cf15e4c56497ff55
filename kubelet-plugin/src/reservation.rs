//! Reserves claims and GPUs for one operation, across this instance of the agent and any other.
//!
//! The node's lock ([`crate::store`]) is held only for reading, deciding and writing the ledger. Work that
//! takes time (calls to the driver, child processes, files of a claim) happens outside of it, under a
//! reservation of the claim and of each GPU whose hardware is changed. So operations on different GPUs never
//! wait for each other, and no two operations on one GPU interleave.
//!
//! To keep operations from deadlocking, reservations are taken in a fixed order: claim, GPUs by ascending
//! UUID, node's lock. Each is a lock on one byte of a file, at an offset that follows from the name. The
//! kernel drops it with the process (open file description locks, fcntl_locking(2)). Two names that share an
//! offset, which 2^62 offsets make very unlikely, only wait for each other.

use crate::store::{StoreError, open_lock, patiently};
use aliquot_model::GpuUuid;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

const FILE: &str = "operations.lock";

/// The reason why something could not be reserved.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// Another operation holds the reservation.
    #[error(
        "another operation of the node agent works on {what} and did not end within {waited:?}; it is tried again. If it stays so, see /healthz of the agent for calls that the driver does not answer"
    )]
    Busy {
        /// The claim or GPU.
        what: String,
        /// The time that was waited.
        waited: Duration,
    },
    /// The file system refused an operation.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A reservation; given back when dropped.
#[derive(Debug)]
pub struct Reserved {
    _locks: Vec<Lock>,
}

/// A locked byte of an open file.
#[derive(Debug)]
struct Lock {
    file: File,
    at: i64,
}

impl Drop for Lock {
    /// Unlocks the byte. Closing the file is not enough: a process that is being started shares the open file
    /// until it runs its program, and would keep the lock until then.
    fn drop(&mut self) {
        // If unlocking fails, the lock lasts as it would without this call.
        let _ = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&byte(libc::F_UNLCK, self.at)));
    }
}

/// Reserves a claim. Blocks the thread for at most `timeout`.
///
/// # Errors
/// Fails with [`ReserveError::Busy`] after the timeout.
pub fn claim(dir: &Path, uid: &str, timeout: Duration) -> Result<Reserved, ReserveError> {
    let lock = lock(dir, &format!("claim/{uid}"), &format!("claim {uid}"), timeout)?;
    Ok(Reserved { _locks: vec![lock] })
}

/// Reserves GPUs. Blocks the thread for at most `timeout` for each.
///
/// # Errors
/// Fails with [`ReserveError::Busy`] after the timeout; nothing is reserved then.
pub fn gpus(dir: &Path, gpus: &BTreeSet<GpuUuid>, timeout: Duration) -> Result<Reserved, ReserveError> {
    let each = gpus.iter().map(|gpu| lock(dir, &format!("gpu/{gpu}"), &format!("GPU {gpu}"), timeout));
    Ok(Reserved { _locks: each.collect::<Result<_, _>>()? })
}

fn lock(dir: &Path, name: &str, what: &str, timeout: Duration) -> Result<Lock, ReserveError> {
    let path = dir.join(FILE);
    let file = open_lock(&path)?;
    let at = place(name);
    let wanted = byte(libc::F_WRLCK, at);
    let taken = patiently(timeout, || match fcntl(&file, FcntlArg::F_OFD_SETLK(&wanted)) {
        Ok(_) => Ok(Some(())),
        Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR) => Ok(None),
        Err(errno) => Err(StoreError::Io { action: "lock", path: path.clone(), source: errno.into() }),
    })?;
    match taken {
        Some(()) => Ok(Lock { file, at }),
        None => Err(ReserveError::Busy { what: what.to_owned(), waited: timeout }),
    }
}

/// Returns the offset of the byte that stands for a name.
fn place(name: &str) -> i64 {
    let digest = Sha256::digest(name.as_bytes());
    let mut bytes = [0; 8];
    for (to, from) in bytes.iter_mut().zip(digest) {
        *to = from;
    }
    // The byte after the last offset must have an offset, too.
    i64::try_from(u64::from_be_bytes(bytes) >> 2).unwrap_or(0)
}

fn byte(kind: i32, at: i64) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: at,
        l_len: 1,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u32) -> BTreeSet<GpuUuid> {
        BTreeSet::from([GpuUuid::parse(&format!("GPU-{number:02}")).unwrap()])
    }

    #[test]
    fn operations_on_different_gpus_and_claims_do_not_wait_for_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let _first = gpus(dir.path(), &gpu(0), Duration::ZERO).unwrap();
        let _second = gpus(dir.path(), &gpu(1), Duration::ZERO).unwrap();
        let _claim = claim(dir.path(), "a", Duration::ZERO).unwrap();
        let _other = claim(dir.path(), "b", Duration::ZERO).unwrap();
    }

    #[test]
    fn what_is_given_back_is_free_while_a_process_is_being_started() {
        let dir = tempfile::tempdir().unwrap();
        let reserved = claim(dir.path(), "a", Duration::ZERO).unwrap();
        // As a child has it between fork and exec.
        let _inherited: Vec<File> =
            reserved._locks.iter().map(|lock| lock.file.try_clone().unwrap()).collect();
        drop(reserved);
        claim(dir.path(), "a", Duration::ZERO).unwrap();
    }

    #[test]
    fn two_operations_on_one_gpu_or_claim_exclude_each_other_and_the_error_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let both: BTreeSet<GpuUuid> = gpu(0).into_iter().chain(gpu(1)).collect();
        let first = gpus(dir.path(), &both, Duration::ZERO).unwrap();
        let busy = gpus(dir.path(), &gpu(1), Duration::from_millis(30)).unwrap_err().to_string();
        assert!(busy.contains("works on GPU GPU-01 "), "{busy}");
        drop(first);
        gpus(dir.path(), &both, Duration::ZERO).unwrap();
        let _claim = claim(dir.path(), "a", Duration::ZERO).unwrap();
        let busy = claim(dir.path(), "a", Duration::from_millis(30)).unwrap_err().to_string();
        assert!(busy.contains("works on claim a "), "{busy}");
    }
}

//! Reservations: who works on which claim and on which GPU, in this instance of the agent or another.
//!
//! The node's lock ([`crate::store`]) is held for reading, deciding and writing the ledger only. What takes
//! time (calls to the driver, child processes, files of a claim) happens outside of it, under a reservation of
//! the claim and of each GPU whose hardware is changed. So operations on different GPUs never wait for each
//! other, and no two operations on one GPU interleave.
//!
//! Order, which keeps operations from waiting for each other in a circle: claim, GPUs by ascending UUID, node's
//! lock. Each is a lock on one byte of a file, at a place that follows from the name; the kernel drops it with
//! the process (open file description locks, fcntl_locking(2)). Two names that share a place, which 2^62 places
//! make very unlikely, only wait for each other.

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

/// Why something could not be reserved.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// Another operation has it.
    #[error(
        "another operation of the node agent works on {what} and did not end within {waited:?}; it is tried again. If it stays so, see /healthz of the agent for calls that the driver does not answer"
    )]
    Busy {
        /// Claim or GPU.
        what: String,
        /// How long we waited.
        waited: Duration,
    },
    /// The file system refused.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What is reserved; given back when dropped.
#[derive(Debug)]
pub struct Reserved {
    /// Each lock belongs to the open file that it was taken through.
    _files: Vec<File>,
}

/// Reserves a claim. Blocks the thread for at most `timeout`.
///
/// # Errors
/// [`ReserveError::Busy`] after the timeout.
pub fn claim(dir: &Path, uid: &str, timeout: Duration) -> Result<Reserved, ReserveError> {
    let file = lock(dir, &format!("claim/{uid}"), &format!("claim {uid}"), timeout)?;
    Ok(Reserved { _files: vec![file] })
}

/// Reserves GPUs. Blocks the thread for at most `timeout` for each.
///
/// # Errors
/// [`ReserveError::Busy`] after the timeout; nothing is then reserved.
pub fn gpus(dir: &Path, gpus: &BTreeSet<GpuUuid>, timeout: Duration) -> Result<Reserved, ReserveError> {
    let each = gpus.iter().map(|gpu| lock(dir, &format!("gpu/{gpu}"), &format!("GPU {gpu}"), timeout));
    Ok(Reserved { _files: each.collect::<Result<_, _>>()? })
}

fn lock(dir: &Path, name: &str, what: &str, timeout: Duration) -> Result<File, ReserveError> {
    let path = dir.join(FILE);
    let file = open_lock(&path)?;
    let wanted = byte(place(name));
    let taken = patiently(timeout, || match fcntl(&file, FcntlArg::F_OFD_SETLK(&wanted)) {
        Ok(_) => Ok(Some(())),
        Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR) => Ok(None),
        Err(errno) => Err(StoreError::Io { action: "lock", path: path.clone(), source: errno.into() }),
    })?;
    match taken {
        Some(()) => Ok(file),
        None => Err(ReserveError::Busy { what: what.to_owned(), waited: timeout }),
    }
}

/// The byte that stands for a name.
fn place(name: &str) -> i64 {
    let digest = Sha256::digest(name.as_bytes());
    let mut bytes = [0; 8];
    for (to, from) in bytes.iter_mut().zip(digest) {
        *to = from;
    }
    // The byte behind the last place must have an offset, too.
    i64::try_from(u64::from_be_bytes(bytes) >> 2).unwrap_or(0)
}

fn byte(at: i64) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(libc::F_WRLCK).unwrap_or_default(),
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

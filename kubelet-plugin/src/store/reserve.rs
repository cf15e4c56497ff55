//! Keeps space for one more checkpoint, for operations that release something.
//!
//! The reserve is a file as large as a copy of the checkpoint, with its blocks and its inode. On a full disk
//! a checkpoint is written into it, in place, and it changes places with a copy in one system call
//! (`renameat2`). So the copy that was replaced is the reserve of the next write. No block is freed in
//! between that another program could take.
//!
//! Limits: a file system that copies on write (btrfs, ZFS) may need space to overwrite a block. A file system
//! that cannot exchange names (`EINVAL`) frees the old copy, and the reserve is made anew.

use super::StoreError;
use super::files::{io_error, sync_dir};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const NAME: &str = "checkpoint.reserve";

fn path(dir: &Path) -> PathBuf {
    dir.join(NAME)
}

/// Returns the reserve's size in bytes, if there is a reserve.
pub(super) fn size(dir: &Path) -> Option<u64> {
    fs::metadata(path(dir)).ok().map(|meta| meta.len())
}

/// Grows the reserve to at least this size in bytes.
///
/// # Errors
/// Fails if there is no room; the reserve is then unchanged.
pub(super) fn keep(dir: &Path, wanted: usize) -> Result<(), StoreError> {
    let path = path(dir);
    let (present, wanted) = (size(dir), wanted as u64);
    let missing = wanted.saturating_sub(present.unwrap_or_default());
    if missing == 0 {
        return Ok(());
    }
    let grow = || {
        let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
        // The filler is written and not only sized, so that the blocks are there; it is not zeros, which some
        // file systems do not store.
        let filler = vec![b'.'; usize::try_from(missing).unwrap_or(usize::MAX)];
        file.write_all(&filler)?;
        file.sync_all()
    };
    let grown = grow().map_err(io_error("reserve space in", &path));
    if grown.is_err() {
        // The old size is restored: a part of the space helps nobody. The first error is the one to report.
        let _ = match present {
            Some(size) => OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(size)),
            None => fs::remove_file(&path),
        };
        return grown;
    }
    sync_dir(dir)
}

/// Writes the reserve and exchanges it with a file.
///
/// # Errors
/// Fails if the file system refuses; the file is then unchanged.
pub(super) fn exchange(dir: &Path, with: &Path, content: &[u8]) -> Result<(), StoreError> {
    let path = path(dir);
    let write = || {
        let mut file = OpenOptions::new().write(true).open(&path)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(content)?;
        file.set_len(content.len() as u64)?;
        file.sync_all()
    };
    write().map_err(io_error("write", &path))?;
    match renameat2(AT_FDCWD, &path, AT_FDCWD, with, RenameFlags::RENAME_EXCHANGE) {
        Ok(()) => {}
        // There is no such file, or the file system cannot exchange names.
        Err(Errno::ENOENT | Errno::EINVAL | Errno::ENOSYS) => {
            fs::rename(&path, with).map_err(io_error("replace", with))?;
            if let Err(error) = keep(dir, content.len()) {
                tracing::warn!(%error, "there is no reserve for the checkpoint any more");
            }
        }
        Err(errno) => return Err(io_error("exchange", with)(errno.into())),
    }
    sync_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn an_exchange_leaves_the_old_file_as_the_reserve_and_frees_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("file");
        fs::write(&file, [b'a'; 4096]).unwrap();
        keep(temp.path(), 4096).unwrap();
        let inodes = || [&file, &path(temp.path())].map(|path| fs::metadata(path).unwrap().ino());
        let [old, spare] = inodes();
        exchange(temp.path(), &file, &[b'b'; 4096]).unwrap();
        assert_eq!(inodes(), [spare, old]);
        assert_eq!(fs::read(&file).unwrap(), [b'b'; 4096]);
        assert_eq!(size(temp.path()), Some(4096));
    }

    #[test]
    fn a_file_that_is_not_there_is_made_and_the_reserve_is_made_anew() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("file");
        keep(temp.path(), 4096).unwrap();
        exchange(temp.path(), &file, b"content").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"content");
        assert_eq!(size(temp.path()), Some(7));
        keep(temp.path(), 4096).unwrap();
        assert_eq!(size(temp.path()), Some(4096));
    }

    #[test]
    fn without_a_reserve_nothing_is_exchanged() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("file");
        fs::write(&file, "old").unwrap();
        assert!(exchange(temp.path(), &file, b"new").is_err());
        assert_eq!(fs::read(&file).unwrap(), b"old");
    }
}

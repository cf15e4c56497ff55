//! Replaces files atomically, and syncs directories.

use super::StoreError;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Builds an error of the file system: [`StoreError::Full`] if space, inodes or a quota are used up.
pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StoreError::Full { action, path, source },
        _ => StoreError::Io { action, path, source },
    }
}

/// Replaces a file by rename: readers see the old or the new content, also after a crash.
///
/// # Errors
/// Fails if the file system refuses; the old file is then unchanged, and no other file is left.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> Result<(), StoreError> {
    replace_with(path, content, mode, |_| Ok(()))
}

/// Replaces a file whose content means nothing after a reboot: nothing is synced to disk.
///
/// # Errors
/// Fails as [`replace`] does.
pub(crate) fn replace_until_reboot(path: &Path, content: &[u8], mode: u32) -> Result<(), StoreError> {
    replace_until_reboot_with(path, content, mode, |_| Ok(()))
}

/// Replaces a file as [`replace`] does, and calls `before` on the new file before it becomes visible.
///
/// # Errors
/// Fails if `before` fails, or if the file system refuses.
pub(crate) fn replace_with<E: From<StoreError>>(
    path: &Path,
    content: &[u8],
    mode: u32,
    before: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    put(path, content, mode, File::sync_all, before)?;
    Ok(path.parent().map_or(Ok(()), sync_dir)?)
}

/// Replaces a file as [`replace_until_reboot`] does, and calls `before` on the new file before it becomes
/// visible.
///
/// # Errors
/// Fails if `before` fails, or if the file system refuses.
pub(crate) fn replace_until_reboot_with<E: From<StoreError>>(
    path: &Path,
    content: &[u8],
    mode: u32,
    before: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    put(path, content, mode, |_| Ok(()), before)
}

/// Replaces a file as [`replace`] does. The replacement lasts once its directory was synced ([`sync_dir`]).
///
/// # Errors
/// Fails as [`replace`] does.
pub(super) fn replace_unsettled(path: &Path, content: &[u8], mode: u32) -> Result<(), StoreError> {
    put(path, content, mode, File::sync_all, |_| Ok(()))
}

fn put<E: From<StoreError>>(
    path: &Path,
    content: &[u8],
    mode: u32,
    sync: impl FnOnce(&File) -> io::Result<()>,
    before: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let temp = path.with_extension("tmp");
    let replaced = write(&temp, content, mode, sync)
        .map_err(E::from)
        .and_then(|()| before(&temp))
        .and_then(|()| Ok(fs::rename(&temp, path).map_err(io_error("replace", path))?));
    if replaced.is_err() {
        // The unfinished file takes space that others need. The first error is the one to report.
        let _ = fs::remove_file(&temp);
    }
    replaced
}

fn write(
    path: &Path,
    content: &[u8],
    mode: u32,
    sync: impl FnOnce(&File) -> io::Result<()>,
) -> Result<(), StoreError> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(path)
        .map_err(io_error("create", path))?;
    file.write_all(content).map_err(io_error("write", path))?;
    sync(&file).map_err(io_error("sync", path))
}

/// Syncs a directory, so that renames and removals in it last.
///
/// # Errors
/// Fails if the directory cannot be synced.
pub fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("sync", dir))
}

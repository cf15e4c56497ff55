//! Keeps copies of the checkpoint that cannot be read under other names: damaged ones for people to
//! investigate, and those of a newer release for that release.

use super::StoreError;
use super::files::{io_error, sync_dir};
use std::fs;
use std::path::{Path, PathBuf};

const DAMAGED: &str = ".corrupt-";
const NEWER: &str = ".newer-";
/// The number of damaged copies that are kept; the oldest are removed first.
pub(super) const KEPT: usize = 8;

/// Renames a damaged copy. The rename is synced when this returns, so a copy that is written in its place
/// comes later.
///
/// # Errors
/// Fails if the file system refuses.
pub(super) fn keep(dir: &Path, name: &str) -> Result<PathBuf, StoreError> {
    let (there, to) = rename(dir, name, DAMAGED)?;
    for (_, old) in there.iter().take(there.len().saturating_sub(KEPT)) {
        if let Err(error) = fs::remove_file(old) {
            tracing::warn!(path = %old.display(), %error, "an old copy of the checkpoint stays");
        }
    }
    sync_dir(dir)?;
    Ok(to)
}

/// Renames a copy of a newer release. Such copies are removed only by that release, or by hand.
///
/// # Errors
/// Fails if the file system refuses.
pub(super) fn keep_newer(dir: &Path, name: &str) -> Result<PathBuf, StoreError> {
    let (_, to) = rename(dir, name, NEWER)?;
    sync_dir(dir)?;
    Ok(to)
}

/// Returns true if any damaged copy is kept.
pub(super) fn any(dir: &Path) -> bool {
    kept(dir, DAMAGED).is_ok_and(|kept| !kept.is_empty())
}

/// Returns the copies of a newer release, the one that was set aside first in front.
///
/// # Errors
/// Fails if the file system refuses.
pub(super) fn newer(dir: &Path) -> Result<Vec<PathBuf>, StoreError> {
    Ok(kept(dir, NEWER)?.into_iter().map(|(_, path)| path).collect())
}

/// Renames a copy. Returns all copies that are kept with this mark, and the path of the new one.
fn rename(dir: &Path, name: &str, mark: &str) -> Result<(Vec<(u64, PathBuf)>, PathBuf), StoreError> {
    let mut there = kept(dir, mark)?;
    let number = there.last().map_or(1, |(number, _)| number.saturating_add(1));
    let (from, to) = (dir.join(name), dir.join(format!("{name}{mark}{number}")));
    fs::rename(&from, &to).map_err(io_error("rename", &from))?;
    there.push((number, to.clone()));
    Ok((there, to))
}

/// Returns the copies that are kept with this mark, the oldest first.
fn kept(dir: &Path, mark: &str) -> Result<Vec<(u64, PathBuf)>, StoreError> {
    let numbered = |path: PathBuf| {
        let (_, number) = path.file_name()?.to_str()?.rsplit_once(mark)?;
        Some((number.parse().ok()?, path))
    };
    let mut found = Vec::new();
    // The list must be complete: a copy that is missed would not be counted, and would be overwritten.
    for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
        found.extend(numbered(entry.map_err(io_error("list", dir))?.path()));
    }
    found.sort();
    Ok(found)
}

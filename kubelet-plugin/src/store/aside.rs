//! Copies of the checkpoint that do not read, kept under other names: damaged ones for whoever looks into it, those of a
//! newer release for that release.

use super::StoreError;
use super::files::{io_error, sync_dir};
use std::fs;
use std::path::{Path, PathBuf};

const DAMAGED: &str = ".corrupt-";
const NEWER: &str = ".newer-";
/// How many damaged ones are kept; the oldest go first.
pub(super) const KEPT: usize = 8;

/// Renames a damaged copy. It is renamed for good when this returns, so whatever is written in its place comes later.
///
/// # Errors
/// If the file system refuses.
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

/// The same with a copy of a newer release. None of them goes but by that release, or by hand.
///
/// # Errors
/// If the file system refuses.
pub(super) fn keep_newer(dir: &Path, name: &str) -> Result<PathBuf, StoreError> {
    let (_, to) = rename(dir, name, NEWER)?;
    sync_dir(dir)?;
    Ok(to)
}

/// Whether any damaged copy is kept.
pub(super) fn any(dir: &Path) -> bool {
    kept(dir, DAMAGED).is_ok_and(|kept| !kept.is_empty())
}

/// Copies of a newer release, the one that was set aside first in front.
///
/// # Errors
/// If the file system refuses.
pub(super) fn newer(dir: &Path) -> Result<Vec<PathBuf>, StoreError> {
    Ok(kept(dir, NEWER)?.into_iter().map(|(_, path)| path).collect())
}

/// Returns all that are kept with this mark, and the new one.
fn rename(dir: &Path, name: &str, mark: &str) -> Result<(Vec<(u64, PathBuf)>, PathBuf), StoreError> {
    let mut there = kept(dir, mark)?;
    let number = there.last().map_or(1, |(number, _)| number.saturating_add(1));
    let (from, to) = (dir.join(name), dir.join(format!("{name}{mark}{number}")));
    fs::rename(&from, &to).map_err(io_error("rename", &from))?;
    there.push((number, to.clone()));
    Ok((there, to))
}

/// Those that are kept with this mark, the oldest first.
fn kept(dir: &Path, mark: &str) -> Result<Vec<(u64, PathBuf)>, StoreError> {
    let numbered = |path: PathBuf| {
        let (_, number) = path.file_name()?.to_str()?.rsplit_once(mark)?;
        Some((number.parse().ok()?, path))
    };
    let mut found = Vec::new();
    // Whole or not at all: one that is not seen would not count, and be written over.
    for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
        found.extend(numbered(entry.map_err(io_error("list", dir))?.path()));
    }
    found.sort();
    Ok(found)
}

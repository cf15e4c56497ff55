//! Copies of the checkpoint that do not read, kept for whoever looks into it.

use super::StoreError;
use super::files::{io_error, sync_dir};
use std::fs;
use std::path::{Path, PathBuf};

const MARK: &str = ".corrupt-";
/// How many are kept; the oldest go first.
pub(super) const KEPT: usize = 8;

/// Renames a copy. It is renamed for good when this returns, so whatever is written in its place comes later.
///
/// # Errors
/// If the file system refuses.
pub(super) fn keep(dir: &Path, name: &str) -> Result<PathBuf, StoreError> {
    let mut there = kept(dir)?;
    let number = there.last().map_or(1, |(number, _)| number.saturating_add(1));
    let (from, to) = (dir.join(name), dir.join(format!("{name}{MARK}{number}")));
    fs::rename(&from, &to).map_err(io_error("rename", &from))?;
    there.push((number, to.clone()));
    for (_, old) in there.iter().take(there.len().saturating_sub(KEPT)) {
        if let Err(error) = fs::remove_file(old) {
            tracing::warn!(path = %old.display(), %error, "an old copy of the checkpoint stays");
        }
    }
    sync_dir(dir)?;
    Ok(to)
}

/// Whether any is kept.
pub(super) fn any(dir: &Path) -> bool {
    kept(dir).is_ok_and(|kept| !kept.is_empty())
}

/// Those that are kept, the oldest first.
fn kept(dir: &Path) -> Result<Vec<(u64, PathBuf)>, StoreError> {
    let entries = fs::read_dir(dir).map_err(io_error("list", dir))?;
    let mut found: Vec<(u64, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (_, number) = name.rsplit_once(MARK)?;
            Some((number.parse().ok()?, entry.path()))
        })
        .collect();
    found.sort();
    Ok(found)
}

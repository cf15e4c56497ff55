//! Finds the directories of a root that have the driver's libraries.

use super::root::Root;
use super::version::ANCHORS;
use std::path::{Path, PathBuf};

/// Returns the known directories that exist, best first, followed by the hidden ones.
pub(super) fn there(root: Root<'_>, known: &[String]) -> Vec<String> {
    let hidden = hidden(root, known).into_iter().filter_map(|dir| Some(dir.to_str()?.to_owned()));
    known.iter().filter(|dir| root.dir(Path::new(dir)).is_some()).cloned().chain(hidden).collect()
}

/// Returns the targets of links in the known directories. Debian hides each branch of the driver in a
/// directory of its own (`nvidia/tesla-535`), and not every library of it has a link.
pub(super) fn hidden(root: Root<'_>, known: &[String]) -> Vec<PathBuf> {
    let dirs: Vec<(&String, PathBuf)> =
        known.iter().filter_map(|dir| Some((dir, root.dir(Path::new(dir))?))).collect();
    let files = dirs.iter().flat_map(|(dir, _)| anchors(dir)).filter_map(|link| root.file(&link));
    let mut hidden: Vec<PathBuf> = Vec::new();
    for dir in files.filter_map(|file| Some(file.parent()?.to_owned())) {
        if !hidden.contains(&dir) && dirs.iter().all(|(_, there)| *there != dir) {
            hidden.push(dir);
        }
    }
    hidden
}

/// Returns the library names in a directory that every driver has, and that never change.
pub(super) fn anchors(dir: &str) -> [PathBuf; 2] {
    ANCHORS.map(|anchor| Path::new(dir).join(format!("{anchor}.1")))
}

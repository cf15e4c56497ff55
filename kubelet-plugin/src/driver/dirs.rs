//! The directories of a root that have the driver's libraries.

use super::root::Root;
use super::version::ANCHORS;
use std::path::Path;

/// Those of the known directories that are there, best first, and behind them where links in these lead to: Debian hides
/// each branch of the driver in a directory of its own (`nvidia/tesla-535`), and not every library of it has a link.
pub(super) fn there(root: Root<'_>, known: &[String]) -> Vec<String> {
    let mut dirs: Vec<String> =
        known.iter().filter(|dir| root.dir(Path::new(dir)).is_some()).cloned().collect();
    let anchors =
        dirs.iter().flat_map(|dir| ANCHORS.map(|anchor| Path::new(dir).join(format!("{anchor}.1"))));
    let files: Vec<_> = anchors.filter_map(|link| root.file(&link)).collect();
    for dir in files.iter().filter_map(|file| file.parent()?.to_str()) {
        if dirs.iter().all(|there| root.dir(Path::new(there)).as_deref() != Some(Path::new(dir))) {
            dirs.push(dir.to_owned());
        }
    }
    dirs
}

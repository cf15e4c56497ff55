//! Keeps the driver's files as they are now, and looks for them again when the driver changes.

use super::layout::{library_dirs, library_dirs_32};
use super::others::SOCKETS;
use super::root::{Identity, Look, Root};
use super::{DriverFiles, Roots, dirs, version};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The driver of a node.
#[derive(Debug, Clone)]
pub struct Driver {
    roots: Roots,
    known: Arc<Mutex<Option<Known>>>,
}

/// The files that were found, and the state of the driver at that time.
#[derive(Debug)]
struct Known {
    stamp: Stamp,
    /// The targets of links in the searched directories; under the root.
    hidden: Vec<PathBuf>,
    files: Arc<DriverFiles>,
}

/// Data that changes when a driver is installed, removed or exchanged. It covers the kernel module's own
/// version text, the directories of libraries, the targets of the names in them that never change, and the
/// sockets of the driver's daemons, which come and go by themselves.
type Stamp = (Vec<u8>, Vec<Option<Identity>>);

impl Driver {
    /// Uses the driver under these roots.
    pub fn new(roots: Roots) -> Self {
        Self { roots, known: Arc::default() }
    }

    /// Returns the driver's files. The files found earlier are returned as long as nothing shows that the
    /// driver is another one. To check this takes some dozens of system calls, none of which reads a file of
    /// the driver.
    pub fn files(&self) -> Arc<DriverFiles> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Known { stamp, hidden, files }) = &*known
            && *stamp == self.stamp(hidden)
        {
            return Arc::clone(files);
        }
        let root = Root(&self.roots.driver);
        let hidden = searched().iter().flat_map(|dirs| dirs::hidden(root, dirs)).collect::<Vec<_>>();
        // The stamp is taken before the search, so that changes during the search are seen the next time.
        let stamp = self.stamp(&hidden);
        let files = Arc::new(DriverFiles::discover(&self.roots));
        tracing::info!(
            version = files.version.as_deref().unwrap_or("none"),
            libraries = files.libraries.len(),
            others = files.others.len(),
            "found the driver's files"
        );
        *known = Some(Known { stamp, hidden, files: Arc::clone(&files) });
        files
    }

    /// Returns the path at which this process sees a file of the driver.
    pub(crate) fn here(&self, host: &Path) -> PathBuf {
        match host.strip_prefix(&self.roots.host) {
            Ok(below) => self.roots.driver.join(below),
            Err(_) => host.to_owned(),
        }
    }

    fn stamp(&self, hidden: &[PathBuf]) -> Stamp {
        let Roots { driver, proc, .. } = &self.roots;
        let module = fs::read(version::path(proc)).unwrap_or_default();
        let Some(look) = Look::into(Root(driver)) else { return (module, Vec::new()) };
        let mut seen = Vec::new();
        for dir in searched().iter().flatten() {
            let there = look.identity(Path::new(dir));
            if there.is_some() {
                seen.extend(dirs::anchors(dir).iter().map(|link| look.identity(link)));
            }
            seen.push(there);
        }
        let sockets = SOCKETS.iter().map(|(socket, _)| Path::new(socket));
        seen.extend(hidden.iter().map(PathBuf::as_path).chain(sockets).map(|path| look.identity(path)));
        (module, seen)
    }
}

/// Returns the directories that are searched for libraries of 64 bits and of 32 bits.
fn searched() -> [Vec<String>; 2] {
    [library_dirs(), library_dirs_32()]
}

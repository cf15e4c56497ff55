//! The driver's files as they are now: looked for anew when the driver is another.

use super::layout::{library_dirs, library_dirs_32};
use super::others::SOCKETS;
use super::root::Root;
use super::{DriverFiles, Roots, dirs, version};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The driver of a node.
#[derive(Debug, Clone)]
pub struct Driver {
    roots: Roots,
    known: Arc<Mutex<Known>>,
}

/// What was found, and what was seen of the driver then.
type Known = Option<(Stamp, Arc<DriverFiles>)>;

/// What changes when a driver is installed, removed or exchanged: what the kernel module says of itself, and the
/// directories that libraries are put into and the sockets of its daemons, which come and go by themselves (file
/// system, inode, time of change).
type Stamp = (Vec<u8>, Vec<Option<(u64, u64, i64, i64)>>);

impl Driver {
    /// The driver under these roots.
    pub fn new(roots: Roots) -> Self {
        Self { roots, known: Arc::default() }
    }

    /// Its files. What was found stands as long as nothing shows that it is another driver; to see that takes a
    /// few hundred system calls, none of which reads a file of the driver's.
    pub fn files(&self) -> Arc<DriverFiles> {
        let stamp = self.stamp();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, files)) = known.as_ref().filter(|(then, _)| *then == stamp) {
            return Arc::clone(files);
        }
        let files = Arc::new(DriverFiles::discover(&self.roots));
        tracing::info!(
            version = files.version.as_deref().unwrap_or("none"),
            libraries = files.libraries.len(),
            others = files.others.len(),
            "found the driver's files"
        );
        *known = Some((stamp, Arc::clone(&files)));
        files
    }

    /// Where this process sees a file of the driver's.
    pub(crate) fn here(&self, host: &Path) -> PathBuf {
        match host.strip_prefix(&self.roots.host) {
            Ok(below) => self.roots.driver.join(below),
            Err(_) => host.to_owned(),
        }
    }

    fn stamp(&self) -> Stamp {
        let Roots { driver, proc, .. } = &self.roots;
        let module = fs::read(version::path(proc)).unwrap_or_default();
        let root = Root(driver);
        let state = |path: &Path| {
            let meta = fs::metadata(path).ok()?;
            Some((meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec()))
        };
        let dirs =
            [library_dirs(), library_dirs_32()].into_iter().flat_map(|known| dirs::there(root, &known));
        let dirs = dirs.map(|dir| state(&driver.join(root.dir(Path::new(&dir))?)));
        let sockets = SOCKETS.iter().map(|(socket, _)| state(&driver.join(socket)));
        (module, dirs.chain(sockets).collect())
    }
}

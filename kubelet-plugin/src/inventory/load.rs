//! Identifies the load of the driver that a node has, as far as this is possible without asking the driver.
//!
//! After the driver is loaded anew and until CDI specs follow, a container that starts gets devices by their
//! former numbers. To keep this time short, the load is checked often: it takes two files of the kernel,
//! together a page.

use super::Watcher;
use crate::beat;
use crate::devices::Majors;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;

/// The interval between checks.
const GLANCE: Duration = Duration::from_secs(1);

/// A load of the driver; different loads are not equal.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Load {
    module: Option<u64>,
    majors: Option<Majors>,
}

impl Load {
    /// Reads the present load, or that there is none.
    pub(super) fn read(proc_root: &Path, sys_root: &Path) -> Self {
        Self { module: module_load(sys_root), majors: Majors::read(proc_root).ok() }
    }
}

/// Returns the number of the load of the kernel module: the inode of its directory in sysfs, which is never
/// used again in a boot.
pub(super) fn module_load(sys_root: &Path) -> Option<u64> {
    std::fs::metadata(sys_root.join("module/nvidia")).ok().map(|found| found.ino())
}

impl Watcher {
    /// Returns the present load of the driver.
    pub(super) fn driver_load(&self) -> Load {
        Load::read(&self.node.machine.proc_root, &self.sys_root)
    }

    /// Waits for `interval`, or until the driver's load differs from `before`.
    pub(super) async fn wait_or_reload(&self, interval: Duration, before: &Load) {
        let end = Instant::now() + interval;
        while Instant::now() < end {
            let _ = tokio::time::timeout_at(end, beat::next(GLANCE)).await;
            if self.driver_load() != *before {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_loaded_anew_is_another_load_whatever_it_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let read = || Load::read(root, root);
        let none = read();
        let module = root.join("module/nvidia");
        std::fs::create_dir_all(&module).unwrap();
        std::fs::write(root.join("devices"), "Character devices:\n195 nvidia\n510 nvidia-uvm\n").unwrap();
        let first = read();
        assert_eq!(first, read());
        assert_ne!(first, none);
        // A module of its own, which is loaded later.
        std::fs::write(root.join("devices"), "Character devices:\n195 nvidia\n509 nvidia-uvm\n").unwrap();
        assert_ne!(first, read());
        std::fs::write(root.join("devices"), "Character devices:\n195 nvidia\n510 nvidia-uvm\n").unwrap();
        assert_eq!(first, read());
        std::fs::rename(&module, root.join("unloaded")).unwrap();
        std::fs::create_dir_all(&module).unwrap();
        assert_ne!(first, read());
    }
}

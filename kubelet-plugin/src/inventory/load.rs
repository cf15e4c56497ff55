//! Which load of the driver a node has, as far as that is told without asking the driver.
//!
//! From when the driver is loaded anew until CDI specs follow, a container that starts gets devices by their former
//! numbers. So that this is short, it is looked for often: two files of the kernel's, of a page together.

use super::Watcher;
use crate::beat;
use crate::devices::Majors;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;

/// How often it is looked for.
const GLANCE: Duration = Duration::from_secs(1);

/// A load of the driver; others differ from it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Load {
    module: Option<u64>,
    majors: Option<Majors>,
}

impl Load {
    /// The one that is there, or that none is.
    pub(super) fn read(proc_root: &Path, sys_root: &Path) -> Self {
        Self { module: module_load(sys_root), majors: Majors::read(proc_root).ok() }
    }
}

/// Which load of the kernel module it is: the number of its directory in sysfs, which is never used again in a boot.
pub(super) fn module_load(sys_root: &Path) -> Option<u64> {
    std::fs::metadata(sys_root.join("module/nvidia")).ok().map(|found| found.ino())
}

impl Watcher {
    /// The load of the driver that is there.
    pub(super) fn driver_load(&self) -> Load {
        Load::read(&self.node.machine.proc_root, &self.sys_root)
    }

    /// Waits for so long, or until the driver is not as it was `before`.
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

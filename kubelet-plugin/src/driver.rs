//! Finds the files of the NVIDIA driver that a container needs, under the driver's root.
//!
//! Libraries become findable without `nvidia-ctk` as follows. Each one is mounted under all its names
//! (`libcuda.so.1`, `libcuda.so.580.65.06`) into the directories that glibc searches without a cache, on
//! Debian's kind of image (`/usr/lib/<triple>`) and on Red Hat's (`/usr/lib64`). Names that are symbolic
//! links on the host are mounts of the same file in the container; the loader takes files of one inode for
//! one library.

mod current;
mod dirs;
mod libraries;
mod others;
mod root;
mod version;

use crate::devices::layout;
use aliquot_model::{DriverCapabilities, DriverCapability};
use aliquot_nvml::caps::MigMinors;
use root::Root;
use std::fs;
use std::path::{Path, PathBuf};

pub use current::Driver;
pub(crate) use layout::{CONTAINER_LIBRARY_DIR_32, container_library_dirs};

/// The root directories of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// The root of the file system with the driver's files, as this process sees it.
    pub driver: PathBuf,
    /// The driver's root as the host sees it.
    pub host: PathBuf,
    /// The path of `/proc`.
    pub proc: PathBuf,
}

/// A file of the driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverFile {
    /// The path on the host.
    pub host: PathBuf,
    /// The paths in the container.
    pub container: Vec<String>,
    /// The capability that the file belongs to.
    pub capability: DriverCapability,
    /// Another capability that needs the file, if there is one.
    pub also: Option<DriverCapability>,
    /// True if the file is for 32-bit programs.
    pub compat32: bool,
}

impl DriverFile {
    fn is_for(&self, capabilities: &DriverCapabilities) -> bool {
        let of_width = !self.compat32 || capabilities.has(DriverCapability::Compat32);
        of_width && [Some(self.capability), self.also].into_iter().flatten().any(|one| capabilities.has(one))
    }
}

/// The files of the driver that were found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DriverFiles {
    /// The version of the libraries.
    pub version: Option<String>,
    /// The libraries.
    pub libraries: Vec<DriverFile>,
    /// The programs, firmware, sockets and other files that are not libraries.
    pub others: Vec<DriverFile>,
}

impl DriverFiles {
    /// Finds all files of the driver.
    pub fn discover(roots: &Roots) -> Self {
        let root = Root(&roots.driver);
        let version = version::of_libraries(root, &roots.proc);
        let of = |find: fn(Root<'_>, &Path, &str) -> Vec<DriverFile>| {
            version.as_deref().map(|version| find(root, &roots.host, version)).unwrap_or_default()
        };
        Self { libraries: of(libraries::find), others: of(others::find), version }
    }

    /// Returns the files that containers with these capabilities get.
    pub fn of(&self, capabilities: &DriverCapabilities) -> Self {
        let of = |files: &[DriverFile]| -> Vec<DriverFile> {
            files.iter().filter(|file| file.is_for(capabilities)).cloned().collect()
        };
        Self { version: self.version.clone(), libraries: of(&self.libraries), others: of(&self.others) }
    }
}

/// Returns the path of a library under the driver's root, by its exact name, as this process can open it.
pub fn find_library(root: &Path, name: &str) -> Option<PathBuf> {
    layout::library_dirs()
        .iter()
        .find_map(|dir| Root(root).file(&Path::new(dir).join(name)))
        .map(|path| root.join(path))
}

/// Returns the path of a program under the driver's root, as this process can run it.
pub fn find_program(root: &Path, name: &str) -> Option<PathBuf> {
    layout::PROGRAM_DIRS
        .iter()
        .find_map(|dir| Root(root).file(&Path::new(dir).join(name)))
        .map(|path| root.join(path))
}

/// Returns the minor number of the capability to monitor all partitions, which the driver lists beside those
/// of the instances (`monitor 2`).
pub fn monitor_capability(proc_root: &Path) -> Option<u32> {
    let list = fs::read_to_string(MigMinors::path(proc_root)).ok()?;
    list.lines().find_map(|line| line.trim().strip_prefix("monitor ")?.parse().ok())
}

#[cfg(test)]
mod tests;

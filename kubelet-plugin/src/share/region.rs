//! Makes the region of a share: the only file of this driver that the share's containers write.
//!
//! Containers get the file mounted and not its directory, so they cannot change the directory's entries. On
//! the node's disk they could still enlarge the file until the disk is full. So each region has an in-memory
//! file system of its own, of exactly its size and with room for one file. Whatever a container writes,
//! punches out, locks or keeps open, it cannot use more of the node's memory.

use crate::selinux::Labels;
use crate::store::{StoreError, io_error};
use crate::tmpfs;
use aliquot_quota::REGION_FILE_SIZE;
use aliquot_quota::region::initial_header;
use clap::ValueEnum;
use nix::errno::Errno;
use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What regions lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum RegionStorage {
    /// A file system in memory for each region, of the region's size. The agent must be allowed to mount, and the
    /// container runtime must see its mounts (`mountPropagation: Bidirectional` of the plugin directory).
    #[default]
    Tmpfs,
    /// The data directory, for agents without rights (demo, tests): a container can make its region's file larger
    /// until that disk is full.
    Directory,
}

/// The way in which a region is mounted into its containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RegionMount {
    /// The file is mounted.
    #[default]
    File,
    /// The directory is mounted, as earlier releases did. Containers that have the directory may have put a
    /// link in the file's place, which a runtime would follow on the host. So such a share keeps its
    /// directory.
    Directory,
}

/// The reason why a region could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The kernel refused the mount.
    #[error(
        "cannot mount a file system ({options}) for the region of a share at {}: {source}; the agent needs \
         CAP_SYS_ADMIN (the chart's pod is privileged), and a context must be a label that the node's SELinux policy \
         knows (--selinux-writable-label). --region-storage=directory does without, and lets \
         containers fill the disk", path.display()
    )]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// The mount options.
        options: String,
        /// The reason.
        source: Errno,
    },
    /// The file could not be made.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Makes the region's file in an empty directory, written in full.
pub(super) fn make(dir: &Path, storage: RegionStorage, labels: &Labels) -> Result<(), RegionError> {
    if storage == RegionStorage::Tmpfs {
        let options = mount_options(labels);
        tmpfs::make("aliquot-region", dir, &options).map_err(|source| RegionError::Mount {
            path: dir.to_owned(),
            options,
            source,
        })?;
    }
    let path = dir.join("region");
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o666)
        .open(&path)
        .map_err(io_error("create", &path))?;
    let header = initial_header();
    file.write_all(&header).map_err(io_error("write", &path))?;
    // The file is written, not only sized: a hole that cannot be filled later would kill the process that
    // maps it.
    let zeros = vec![0u8; REGION_FILE_SIZE.saturating_sub(header.len())];
    file.write_all(&zeros).map_err(io_error("write", &path))?;
    file.sync_all().map_err(io_error("sync", &path))?;
    // Containers run as any user; the umask must not decide.
    fs::set_permissions(&path, Permissions::from_mode(0o666)).map_err(io_error("chmod", &path))?;
    Ok(())
}

/// Returns the mount options of a share's file system: the region's size, two inodes (root and file), and its
/// SELinux label.
fn mount_options(labels: &Labels) -> String {
    format!("size={REGION_FILE_SIZE},nr_inodes=2,mode=0755{}", labels.mount_option())
}

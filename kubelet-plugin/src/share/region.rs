//! The region of a share: the one file of ours that its containers write.
//!
//! Containers get the file mounted and not its directory, so they cannot change the directory's entries. On the node's
//! disk they could still make the file larger until the disk is full, so each region has a file system in memory of its
//! own, of exactly its size and with room for one file. Whatever a container writes, punches out, locks or keeps open,
//! the node has no more to give for it.

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

/// How a region comes into its containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RegionMount {
    /// The file.
    #[default]
    File,
    /// Its directory, as earlier releases mounted it. Containers that have the directory can have put a link in the
    /// file's place, which a runtime would follow on the host, so such a share keeps its directory.
    Directory,
}

/// Why a region could not be made.
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
        /// Where.
        path: PathBuf,
        /// With what.
        options: String,
        /// Why not.
        source: Errno,
    },
    /// The file system refused the file.
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
    // Written, not only sized: a hole that cannot be filled later would kill the process that maps it.
    let zeros = vec![0u8; REGION_FILE_SIZE.saturating_sub(header.len())];
    file.write_all(&zeros).map_err(io_error("write", &path))?;
    file.sync_all().map_err(io_error("sync", &path))?;
    // Containers run as any user; the umask must not decide.
    fs::set_permissions(&path, Permissions::from_mode(0o666)).map_err(io_error("chmod", &path))?;
    Ok(())
}

/// Options of a share's file system: the region's size, two inodes (root and file), and its SELinux label.
fn mount_options(labels: &Labels) -> String {
    format!("size={REGION_FILE_SIZE},nr_inodes=2,mode=0755{}", labels.mount_option())
}

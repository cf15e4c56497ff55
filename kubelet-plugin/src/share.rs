//! Manages a share's directories: the quota that the limiter reads and the region in which it keeps account.
//!
//! `<shares>/<result id>/quota/quota` is mounted read-only as a directory: if the file itself were mounted, a
//! container would keep the old file after it is replaced by rename. Beside it is the grant, which the
//! arbiter of GPU time overwrites. `<shares>/<result id>/region/region` is mounted writable, as a file, for
//! this claim's containers only, whatever user they run as. The region is in a file system of its own
//! ([`region`]). The file `<shares>/<result id>/layout` marks this layout. Shares of earlier releases, whose
//! containers have the region's directory, lack it.
//!
//! All these files serve running containers. After a reboot they are made anew before any container starts,
//! so they are not synced to disk.

mod region;

pub use region::{RegionError, RegionMount, RegionStorage};

use crate::ledger::{Device, Ledger, Share, State};
use crate::selinux::{LabelError, Labels};
use crate::store::{StoreError, io_error, replace_until_reboot, replace_until_reboot_with};
use crate::tmpfs;
use crate::trash;
use aliquot_model::config::{ComputePolicy, FailMode};
use aliquot_quota::region::{LOCK_BASE, RegionView};
use aliquot_quota::{QuotaError, QuotaFile, REGION_FILE_SIZE};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The reason why a share's directories could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The quota cannot be encoded.
    #[error("cannot encode the quota of {result_id}: {source}")]
    Quota {
        /// The ID of the result.
        result_id: String,
        /// The reason.
        source: QuotaError,
    },
    /// The file system refused an operation.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A SELinux label could not be set.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// The region could not be made.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// The reason why a share's quota file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum QuotaFileError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// The content of the file is no quota.
    #[error("{}: {error}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: QuotaError,
    },
}

/// The file that marks shares whose containers have the region's file, and not its directory.
const LAYOUT: &str = "layout";

/// Returns the content of a share's quota file.
///
/// # Errors
/// Fails if the UUID does not fit, or if the share's partition does not exist.
pub fn quota(device: &Device, share: &Share, generation: u64) -> Result<QuotaFile, QuotaError> {
    let mut quota = QuotaFile::new(aliquot_quota::GpuUuid::new(device.uuid().unwrap_or_default())?);
    quota.generation = generation;
    let limit = share.limit();
    quota.memory_bytes = limit.memory_bytes;
    quota.cores_percent = limit.cores_percent;
    quota.compute_policy = match share.compute_policy {
        ComputePolicy::Hard => aliquot_quota::ComputePolicy::Hard,
        ComputePolicy::Soft => aliquot_quota::ComputePolicy::Soft,
    };
    quota.priority = share.priority;
    quota.fail_mode = match share.fail_mode {
        FailMode::Closed => aliquot_quota::FailMode::Closed,
        FailMode::Open => aliquot_quota::FailMode::Open,
    };
    quota.oversubscribe_bytes = share.oversubscribe_bytes;
    quota.device_order = share.order;
    Ok(quota)
}

/// Reads the quota of a share that a container may be using.
///
/// # Errors
/// Fails with [`QuotaFileError`].
pub fn left(shares: &Path, result_id: &str) -> Result<QuotaFile, QuotaFileError> {
    let path = shares.join(result_id).join("quota/quota");
    match fs::read(&path) {
        Ok(bytes) => QuotaFile::decode(&bytes).map_err(|error| QuotaFileError::Content { path, error }),
        Err(error) => Err(QuotaFileError::Read { path, error }),
    }
}

/// Returns true if a share's files are there, which containers may be using. Before the UUID of its partition
/// is known, any files that are there may be the share's.
pub fn is_there(shares: &Path, device: &Device) -> bool {
    left(shares, &device.result_id)
        .is_ok_and(|left| device.uuid().is_none_or(|uuid| left.gpu_uuid.as_str() == uuid))
}

/// The kind of file found in the place of a share's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RegionFound {
    File,
    Nothing,
    /// Something that this driver did not make.
    Other,
}

fn find_region(shares: &Path, result_id: &str) -> RegionFound {
    match fs::symlink_metadata(region_path(shares, result_id)) {
        Ok(meta) if meta.is_file() => RegionFound::File,
        Err(error) if error.kind() == ErrorKind::NotFound => RegionFound::Nothing,
        Ok(_) | Err(_) => RegionFound::Other,
    }
}

/// Returns true if containers that start now get the same region as the running ones.
pub fn has_region(shares: &Path, result_id: &str) -> bool {
    find_region(shares, result_id) == RegionFound::File
}

/// Makes a share's directories, anew unless containers may be using existing ones. With a region of their
/// own, new containers would not know what the old ones use.
///
/// # Errors
/// Fails with [`ShareError`]; [`discard`] then removes what was made.
pub fn make(
    shares: &Path,
    storage: RegionStorage,
    labels: &Labels,
    device: &Device,
    share: &Share,
) -> Result<(), ShareError> {
    make_files(shares, storage, labels, device, share)?;
    Ok(label(shares, labels, &device.result_id)?)
}

/// Sets the SELinux labels of a share's files that containers see, as far as the files are there.
///
/// # Errors
/// Fails with [`LabelError`].
pub fn label(shares: &Path, labels: &Labels, result_id: &str) -> Result<(), LabelError> {
    if !labels.are_given() {
        return Ok(());
    }
    // What an audit replaces meanwhile has its label already.
    let there = |labelled: Result<(), LabelError>| match labelled {
        Err(error) if error.source.kind() == ErrorKind::NotFound => Ok(()),
        labelled => labelled,
    };
    let quota = shares.join(result_id).join("quota");
    there(labels.read_only(&quota))?;
    for entry in fs::read_dir(&quota).into_iter().flatten().flatten() {
        there(labels.read_only(&entry.path()))?;
    }
    there(labels.writable(&shares.join(result_id).join("region")))?;
    there(labels.writable(&region_path(shares, result_id)))
}

fn make_files(
    shares: &Path,
    storage: RegionStorage,
    labels: &Labels,
    device: &Device,
    share: &Share,
) -> Result<(), ShareError> {
    let fail = |source| ShareError::Quota { result_id: device.result_id.clone(), source };
    let quota = quota(device, share, 1).map_err(fail)?;
    let dir = shares.join(&device.result_id);
    let (quota_dir, region_dir) = (dir.join("quota"), dir.join("region"));
    if is_there(shares, device) {
        match find_region(shares, &device.result_id) {
            // Only the record of the share was lost. Its quota file is brought up to date together with all
            // others.
            RegionFound::File => return Ok(()),
            // The layout file is written after everything but the region, and containers have only the
            // region's file.
            RegionFound::Nothing if dir.join(LAYOUT).is_file() => {
                return make_region(&region_dir, storage, labels);
            }
            RegionFound::Nothing | RegionFound::Other => {}
        }
    }
    let quota = quota.encode();
    discard(shares, &device.result_id)?;
    for path in [&quota_dir, &region_dir] {
        fs::create_dir_all(path).map_err(io_error("create", path))?;
        // Containers run as any user; the umask must not decide.
        fs::set_permissions(path, Permissions::from_mode(0o755)).map_err(io_error("chmod", path))?;
    }
    let path = quota_dir.join("quota");
    replace_until_reboot(&path, &quota, 0o644)?;
    fs::set_permissions(&path, Permissions::from_mode(0o644)).map_err(io_error("chmod", &path))?;
    aliquot_arbiter::files::make_grant(&quota_dir).map_err(io_error("make the grant in", &quota_dir))?;
    replace_until_reboot(&dir.join(LAYOUT), b"2\n", 0o644)?;
    Ok(region::make(&region_dir, storage, labels)?)
}

/// Makes a region in the place of one that is gone. Running containers keep their old region and read the
/// quota file that is there.
fn make_region(dir: &Path, storage: RegionStorage, labels: &Labels) -> Result<(), ShareError> {
    tmpfs::remove(dir).map_err(io_error("unmount", dir))?;
    fs::create_dir_all(dir).map_err(io_error("create", dir))?;
    fs::set_permissions(dir, Permissions::from_mode(0o755)).map_err(io_error("chmod", dir))?;
    Ok(region::make(dir, storage, labels)?)
}

/// Returns how a share's region is mounted into its containers.
pub fn region_mount(shares: &Path, result_id: &str) -> RegionMount {
    let path = shares.join(result_id).join(LAYOUT);
    if path.is_file() { RegionMount::File } else { RegionMount::Directory }
}

/// Returns the cap on a best-effort share's compute, in percent, if `promised` percent of the GPU are
/// promised to others: the rest, but never nothing. 0 is no cap.
fn leftover(promised: u64) -> u8 {
    match promised {
        0 => 0,
        promised => u8::try_from(100u64.saturating_sub(promised)).unwrap_or(0).max(1),
    }
}

/// Returns the lower of two caps, where 0 is no cap.
fn tighter(one: u8, other: u8) -> u8 {
    match (one, other) {
        (0, cap) | (cap, 0) => cap,
        (one, other) => one.min(other),
    }
}

/// Makes the quota files match the ledger. Best-effort shares (`cores` 0) are capped at the compute that no
/// share of their GPU, or of their partition, was promised. Where that is not known, because a newer release
/// promised it, a cap is never lifted. Only files whose content differs are written. The limiter reads them
/// again.
///
/// # Errors
/// Fails if a file cannot be replaced.
pub fn rebalance(shares: &Path, labels: &Labels, ledger: &Ledger) -> Result<(), ShareError> {
    let all = || {
        let prepared =
            ledger.claims.values().filter(|record| record.state == State::Completed && !record.is_parked());
        prepared
            .flat_map(|record| &record.devices)
            .filter_map(|device| Some((device, device.share.as_ref()?)))
    };
    // A partition that is being made anew has no UUID yet, so its quotas stay as they are.
    for (device, share) in all().filter(|(device, _)| device.uuid().is_some()) {
        let path = shares.join(&device.result_id).join("quota/quota");
        // A file that is not there or not readable is made anew by the next prepare.
        let Some(present) = fs::read(&path).ok().and_then(|bytes| QuotaFile::decode(&bytes).ok()) else {
            continue;
        };
        let fail = |source| ShareError::Quota { result_id: device.result_id.clone(), source };
        let mut wanted = quota(device, share, present.generation).map_err(fail)?;
        if wanted.cores_percent == 0 {
            let newer = ledger.newer.values().flat_map(|record| record.devices().unwrap_or_default());
            let newer = newer.filter_map(|device| Some((device, device.share.as_ref()?)));
            let others = all().chain(newer).filter(|(other, _)| device.shares_with(other));
            wanted.cores_percent =
                leftover(others.map(|(_, other)| u64::from(other.limit().cores_percent)).sum());
            if ledger.unknown_share(&device.gpu).is_some() {
                wanted.cores_percent = tighter(wanted.cores_percent, present.cores_percent);
            }
        }
        if wanted == present {
            continue;
        }
        wanted.generation = present.generation.saturating_add(1);
        let label = |new: &Path| labels.read_only(new).map_err(ShareError::from);
        replace_until_reboot_with(&path, &wanted.encode(), 0o644, label)?;
        fs::set_permissions(&path, Permissions::from_mode(0o644)).map_err(io_error("chmod", &path))?;
    }
    Ok(())
}

/// Renames a share's directories into the trash, which [`trash::Trash`] empties. Takes the same time whatever
/// is in them. It is no error if there are none.
///
/// # Errors
/// Fails if the directories cannot be renamed.
pub fn discard(shares: &Path, result_id: &str) -> Result<(), StoreError> {
    let dir = shares.join(result_id);
    if let Err(error) = tmpfs::remove(&dir.join("region")) {
        // It goes into the trash with its directory.
        tracing::warn!(share = result_id, %error, "the region's file system stays mounted");
    }
    let trash = trash::dir(shares);
    let to = trash.join(unique(result_id));
    let rename = || match fs::rename(&dir, &to) {
        Err(error) if error.kind() == ErrorKind::NotFound && fs::symlink_metadata(&dir).is_ok() => {
            fs::create_dir_all(&trash).and_then(|()| fs::rename(&dir, &to))
        }
        renamed => renamed,
    };
    match rename() {
        Err(error) if error.kind() == ErrorKind::StorageFull || error.kind() == ErrorKind::QuotaExceeded => {
            // Room for the directory's entry.
            let _ = fs::remove_file(dir.join("region/region"));
            rename()
        }
        renamed => renamed,
    }
    .or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
    .map_err(io_error("move to the trash", &dir))
}

/// Returns a name that no other entry of the trash has.
fn unique(result_id: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{result_id}.{}.{}.{number}", since.as_nanos(), std::process::id())
}

/// Returns the result IDs that have directories.
///
/// # Errors
/// Fails if the directory cannot be listed.
pub fn list(shares: &Path) -> Result<Vec<String>, StoreError> {
    match fs::read_dir(shares) {
        Ok(entries) => Ok(entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(StoreError::Io { action: "list", path: shares.to_owned(), source }),
    }
}

/// Returns the bytes that the processes of a share hold. Dead processes are left out: their account is only
/// cleared when another process comes. Memory that living processes have imported from dead ones counts.
/// Returns `None` if the region cannot be read.
pub fn used(shares: &Path, result_id: &str) -> Option<u64> {
    let (file, _, bytes) = open_region(shares, result_id).ok()?;
    let view = RegionView::parse(&bytes).ok()?;
    Some(view.held_bytes(|process| {
        let at = LOCK_BASE.saturating_add(u64::try_from(process.slot).unwrap_or(u64::MAX));
        is_locked(&file, at).unwrap_or(true)
    }))
}

/// Returns true if a process holds a lock on a byte of a file: the living owner of a slot.
fn is_locked(file: &File, at: u64) -> nix::Result<bool> {
    let mut lock = nix::libc::flock {
        l_type: i16::try_from(nix::libc::F_WRLCK).unwrap_or_default(),
        l_whence: i16::try_from(nix::libc::SEEK_SET).unwrap_or_default(),
        l_start: i64::try_from(at).unwrap_or(i64::MAX),
        l_len: 1,
        l_pid: 0,
    };
    nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(i32::from(lock.l_type) != nix::libc::F_UNLCK)
}

/// Returns the path of a share's region file on this host.
pub fn region_path(shares: &Path, result_id: &str) -> PathBuf {
    shares.join(result_id).join("region/region")
}

/// Returns the device and inode, and the content of a share's region, at most one byte more than it should
/// have. A tenant can put anything there, so links are not followed and the read does not block.
///
/// # Errors
/// Fails if it is not a regular file, or cannot be read.
pub fn read_region(shares: &Path, result_id: &str) -> std::io::Result<((u64, u64), Vec<u8>)> {
    open_region(shares, result_id).map(|(_, inode, bytes)| (inode, bytes))
}

fn open_region(shares: &Path, result_id: &str) -> std::io::Result<(File, (u64, u64), Vec<u8>)> {
    use std::os::unix::fs::MetadataExt;
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let path = region_path(shares, result_id);
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(std::io::Error::other("it is no file"));
    }
    let mut bytes = Vec::with_capacity(REGION_FILE_SIZE.saturating_add(1));
    (&file).take(REGION_FILE_SIZE as u64 + 1).read_to_end(&mut bytes)?;
    Ok((file, (meta.dev(), meta.ino()), bytes))
}

#[cfg(test)]
mod tests;

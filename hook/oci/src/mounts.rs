//! The check that a container finds what the node has mounted, at the places where the node has mounted it.
//!
//! A runtime makes a pod's own volume mounts in one row with the node's, those of shorter paths first. So a
//! tenant's mount may come after one of the node's and lie over it, or over something in it, also through a
//! link of the image; and a mount beside the node's may look like a further quota. The node agent says which
//! file or directory each of its mounts is, and the kernel tells what is there: it has to be the same one,
//! with nothing mounted in it.

use crate::inside::Root;
use crate::quota;
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag};
use nix::sys::stat::{Mode, fstat};
use std::fmt;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// One mount of the node agent's: `<device>:<inode>:<path in the container>`, both numbers as `stat` tells
/// them on the host. They are the same in every mount of the file or directory, also where user ids are
/// mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The file system's device number.
    pub device: u64,
    /// The inode of the file or directory.
    pub inode: u64,
    /// The path in the container.
    pub path: PathBuf,
}

impl FromStr for Mounted {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.splitn(3, ':');
        let mut number = || parts.next().and_then(|part| part.parse().ok()).ok_or(());
        let (device, inode) = (number()?, number()?);
        let path = parts.next().map(PathBuf::from).filter(|path| path.is_absolute()).ok_or(())?;
        Ok(Self { device, inode, path })
    }
}

impl fmt::Display for Mounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.device, self.inode, self.path.display())
    }
}

/// What the user can do about a volume that is in the way.
const ELSEWHERE: &str = "the pod's volumeMounts, or links in the image that they follow, must lie elsewhere";

/// The reason why a container does not find what the node has mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountsError {
    /// Nothing is there, or it cannot be looked at.
    #[error("{path} in the container, which the node has mounted, cannot be looked at: {source}")]
    Look {
        /// Path inside the container.
        path: PathBuf,
        /// The reason.
        source: Errno,
    },
    /// Something else is there.
    #[error("{0} in the container is not what the node has mounted there: {ELSEWHERE}")]
    Covered(PathBuf),
    /// Something is mounted in it.
    #[error("something else is mounted in {0} in the container, which the node has mounted: {ELSEWHERE}")]
    Within(PathBuf),
    /// There is a quota that the node has not mounted.
    #[error("{0} in the container is no quota of the node's: {ELSEWHERE}")]
    Foreign(PathBuf),
    /// The file or directory can be moved away.
    #[error(
        "{path} in the container is found through {through}, which is on or leads to a volume and which others than root \
         can change, so that they could put something else in its place: {ELSEWHERE}"
    )]
    Movable {
        /// Path inside the container.
        path: PathBuf,
        /// The directory that others can change.
        through: PathBuf,
    },
    /// The kernel's list of mounts cannot be read.
    #[error("the list of mounts /proc/self/mountinfo cannot be read: {0}")]
    List(std::io::Error),
}

/// One line of the kernel's list of mounts, as far as it matters here.
#[derive(Debug, PartialEq, Eq)]
struct Mount<'a> {
    id: &'a str,
    parent: &'a str,
    device: &'a str,
    /// The part of the file system that is mounted, in the kernel's spelling.
    root: &'a str,
}

impl<'a> Mount<'a> {
    /// Reads a line of `/proc/self/mountinfo` (proc(5)).
    fn read(line: &'a str) -> Option<Self> {
        let mut fields = line.split(' ');
        let mut next = || fields.next();
        Some(Self { id: next()?, parent: next()?, device: next()?, root: next()? })
    }

    /// Returns the device and folder of the shares, if this is the mount of the quota of that name: the node
    /// has the quota at `<shares>/<name>/quota`.
    fn shares(&self, name: &str) -> Option<(&'a str, &'a str)> {
        let share = self.root.strip_suffix("/quota")?;
        Some((self.device, share.strip_suffix(name)?.strip_suffix('/')?))
    }
}

/// Checks everything that the node agent says that it has mounted, and that the folder of quotas has only the
/// node's quotas. Agents of earlier releases say nothing; then nothing is checked.
pub fn check(root: &Root, mounted: &[Mounted], quotas: &Path) -> Result<(), MountsError> {
    if mounted.is_empty() {
        return Ok(());
    }
    let list = std::fs::read_to_string("/proc/self/mountinfo").map_err(MountsError::List)?;
    let mounts: Vec<Mount<'_>> = list.lines().filter_map(Mount::read).collect();
    for ours in mounted {
        let id = is_ours(root, ours)?;
        if mounts.iter().any(|mount| mount.parent == id) {
            return Err(MountsError::Within(ours.path.clone()));
        }
        if let Some(through) = is_movable(root, &ours.path)? {
            return Err(MountsError::Movable { path: ours.path.clone(), through });
        }
    }
    let mount_of = |path: &Path| -> Result<Option<&Mount<'_>>, MountsError> {
        let id = mount_id(&look(root, path)?)?;
        Ok(mounts.iter().find(|mount| mount.id == id))
    };
    let shares = |path: &Path| -> Result<Option<(&str, &str)>, MountsError> {
        let name = path.file_name().and_then(|name| name.to_str());
        Ok(mount_of(path)?.zip(name).and_then(|(mount, name)| mount.shares(name)))
    };
    let Some(ours) = mounted.iter().map(|ours| &ours.path).find(|path| path.parent() == Some(quotas)) else {
        return Ok(());
    };
    let expected = shares(ours)?;
    let names =
        quota::names(root, quotas).map_err(|source| MountsError::Look { path: quotas.into(), source })?;
    for path in names.iter().map(|name| quotas.join(name)).filter(|path| path != ours) {
        if expected.is_none() || shares(&path)? != expected {
            return Err(MountsError::Foreign(path));
        }
    }
    Ok(())
}

/// Opens what a path leads to.
fn look(root: &Root, path: &Path) -> Result<OwnedFd, MountsError> {
    let error = |source| MountsError::Look { path: path.to_owned(), source };
    root.file(path, OFlag::O_PATH, Mode::empty()).map_err(error)
}

/// Checks that what is there is the node's. Returns the mount that it is in.
fn is_ours(root: &Root, ours: &Mounted) -> Result<String, MountsError> {
    let found = look(root, &ours.path)?;
    let stat = fstat(&found).map_err(|source| MountsError::Look { path: ours.path.clone(), source })?;
    if (stat.st_dev, stat.st_ino) != (ours.device, ours.inode) {
        return Err(MountsError::Covered(ours.path.clone()));
    }
    mount_id(&found)
}

/// Returns the id of the mount that an open file is in, as the kernel's list names it.
fn mount_id(file: &OwnedFd) -> Result<String, MountsError> {
    let path = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
    let info = std::fs::read_to_string(path).map_err(MountsError::List)?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    Ok(id.unwrap_or_default().trim().to_owned())
}

/// Returns a directory above a path that is on or leads to a volume and that users other than root can
/// change; these can also be in other containers. The image's own directories are the image's matter, as its
/// loader is.
fn is_movable(root: &Root, path: &Path) -> Result<Option<PathBuf>, MountsError> {
    let error = |source| MountsError::Look { path: path.to_owned(), source };
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
    let above = path.parent().unwrap_or(path);
    match root.resolve(above, flags, Mode::empty(), ResolveFlag::RESOLVE_NO_XDEV) {
        Ok(_) => return Ok(None),
        Err(Errno::EXDEV) => {}
        Err(errno) => return Err(error(errno)),
    }
    for directory in above.ancestors() {
        // Without links these are all directories on the way.
        match root.resolve(directory, flags, Mode::empty(), ResolveFlag::RESOLVE_NO_SYMLINKS) {
            Err(Errno::ELOOP) => return Ok(Some(directory.to_owned())),
            Err(errno) => return Err(error(errno)),
            Ok(found) => {
                let stat = fstat(&found).map_err(error)?;
                if stat.st_uid != 0 || stat.st_mode & 0o022 != 0 {
                    return Ok(Some(directory.to_owned()));
                }
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_is_read_as_it_is_written() {
        let mounted = Mounted { device: 2049, inode: 7, path: "/etc/a:b".into() };
        assert_eq!(mounted.to_string(), "2049:7:/etc/a:b");
        assert_eq!(mounted.to_string().parse(), Ok(mounted));
        for wrong in ["", "1:2", "1:2:etc", "1:x:/etc", "-1:2:/etc", "/etc"] {
            assert_eq!(wrong.parse::<Mounted>(), Err(()), "{wrong}");
        }
    }

    #[test]
    fn quotas_are_of_one_node_where_they_lie_beside_each_other() {
        let read = |line: &'static str| Mount::read(line).unwrap();
        let a = read(r"97 90 8:1 /data/shares/a-1/quota /root/run/aliquot/quota/a-1 ro - ext4 /dev/sda1 rw");
        assert_eq!((a.id, a.parent), ("97", "90"));
        assert_eq!(a.shares("a-1"), Some(("8:1", "/data/shares")));
        assert_eq!(a.shares("1"), None);
        let b = read("98 90 8:1 /data/shares/b/quota /root/run/aliquot/quota/b ro - ext4 /dev/sda1 rw");
        assert_eq!(b.shares("b"), a.shares("a-1"));
        for elsewhere in ["99 90 8:1 /pods/shares/b/quota /x", "99 90 8:2 /data/shares/b/quota /x"] {
            assert_ne!(read(elsewhere).shares("b"), a.shares("a-1"), "{elsewhere}");
        }
    }
}

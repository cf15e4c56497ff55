//! Files inside a container's root. The image decides about links there, so the kernel resolves every path as
//! if the root were `/`.

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::Mode;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The reason why something inside the root could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InsideError {
    /// The root cannot be opened.
    #[error("the container's root {path} cannot be opened: {source}")]
    Root {
        /// The root.
        path: PathBuf,
        /// The reason.
        source: Errno,
    },
    /// A file inside the root cannot be read.
    #[error("{path} in the container cannot be read: {source}")]
    Read {
        /// Path inside the container.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A file is larger than it can be.
    #[error("{0} in the container is larger than it can be")]
    Large(PathBuf),
}

/// A container's root.
#[derive(Debug)]
pub struct Root {
    fd: OwnedFd,
    path: PathBuf,
}

/// The largest file that is read here, in bytes.
const LARGEST: u64 = 1 << 20;

impl Root {
    /// Opens a container's root.
    pub fn open(path: &Path) -> Result<Self, InsideError> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let fd = nix::fcntl::open(path, flags, Mode::empty())
            .map_err(|source| InsideError::Root { path: path.to_owned(), source })?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Returns the same root without what is mounted inside it: the image as it is.
    ///
    /// This needs the right to mount; returns `None` without it.
    pub fn without_mounts(&self) -> Option<Self> {
        const OPEN_TREE_CLONE: libc::c_uint = 1;
        let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as libc::c_uint | libc::AT_EMPTY_PATH as libc::c_uint;
        // SAFETY: a system call with a descriptor that we own and a terminated empty path.
        let fd = unsafe { libc::syscall(libc::SYS_open_tree, self.fd.as_raw_fd(), c"".as_ptr(), flags) };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: a fresh descriptor that nobody else owns.
        let fd = unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) };
        Some(Self { fd, path: self.path.clone() })
    }

    /// Opens a path inside the root.
    pub fn file(&self, path: &Path, flags: OFlag, mode: Mode) -> Result<OwnedFd, Errno> {
        self.resolve(path, flags, mode, ResolveFlag::empty())
    }

    /// Opens a path inside the root if the way there is as `way` asks.
    pub fn resolve(&self, path: &Path, flags: OFlag, mode: Mode, way: ResolveFlag) -> Result<OwnedFd, Errno> {
        let relative = path.strip_prefix("/").unwrap_or(path);
        let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        let how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .mode(mode)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS | way);
        openat2(&self.fd, relative, how)
    }

    /// Opens a path in the root's own file system: nothing that is mounted below the root is entered.
    pub fn own(&self, path: &Path, flags: OFlag) -> Result<OwnedFd, Errno> {
        self.resolve(path, flags, Mode::empty(), ResolveFlag::RESOLVE_NO_XDEV)
    }

    /// Returns the names in a directory, sorted; none if it cannot be read or has more than `most`.
    pub fn names(&self, path: &Path, most: usize) -> Vec<String> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NONBLOCK;
        let Ok(fd) = self.file(path, flags, Mode::empty()) else { return Vec::new() };
        let Ok(mut dir) = nix::dir::Dir::from_fd(fd) else { return Vec::new() };
        let mut names: Vec<String> = dir
            .iter()
            .flatten()
            .filter_map(|entry| Some(entry.file_name().to_str().ok()?.to_owned()))
            .filter(|name| name != "." && name != "..")
            .take(most + 1)
            .collect();
        if names.len() > most {
            names.clear();
        }
        names.sort();
        names
    }

    /// Reads a small file, of at most 1 MiB; returns `None` if it does not exist.
    pub fn read(&self, path: &Path) -> Result<Option<Vec<u8>>, InsideError> {
        self.read_up_to(path, LARGEST)
    }

    /// Reads a file of at most `largest` bytes; returns `None` if it does not exist.
    pub fn read_up_to(&self, path: &Path, largest: u64) -> Result<Option<Vec<u8>>, InsideError> {
        let error = |source| InsideError::Read { path: path.to_owned(), source };
        // Not blocking, should the image have put a pipe there.
        let fd = match self.file(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(None),
            Err(errno) => return Err(error(errno.into())),
        };
        let mut bytes = Vec::new();
        File::from(fd).take(largest + 1).read_to_end(&mut bytes).map_err(error)?;
        if bytes.len() as u64 > largest { Err(InsideError::Large(path.to_owned())) } else { Ok(Some(bytes)) }
    }

    /// Returns the path of the root as the hook sees it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_the_image_stay_inside() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir_all(root.join("etc")).unwrap();
        std::fs::write(folder.path().join("secret"), "out").unwrap();
        std::fs::write(root.join("secret"), "in").unwrap();
        for (link, target) in [("up", "../../../secret"), ("absolute", "/secret")] {
            std::os::unix::fs::symlink(target, root.join("etc").join(link)).unwrap();
        }
        let root = Root::open(&root).unwrap();
        for link in ["up", "absolute"] {
            assert_eq!(root.read(&Path::new("/etc").join(link)).unwrap().unwrap(), b"in", "{link}");
        }
        assert!(root.read(Path::new("/etc/none")).unwrap().is_none());
        assert!(root.read(Path::new("/secret/none")).unwrap().is_none());
        assert!(matches!(root.read(Path::new("/etc")), Err(InsideError::Read { .. })));
    }
}

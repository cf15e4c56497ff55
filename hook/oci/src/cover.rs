//! Covers a file in the container by another content, read-only. The cover is made in the container's `/dev`,
//! which is memory, and has no name once it is mounted, so neither the image nor its layer is changed.

use crate::inside::Root;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, fstat};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// The reason why nothing could be put over a file.
#[derive(Debug, thiserror::Error)]
#[error("the file that is to cover {path} cannot be {what}: {source}")]
pub struct CoverError {
    /// The file that was to be covered.
    path: PathBuf,
    /// The step that failed.
    what: &'static str,
    /// The reason.
    source: Errno,
}

/// The name of the cover while it is made.
const ASIDE: &str = ".aliquot-cover";

/// Covers a file by `content`.
pub(crate) fn cover(root: &Root, path: &Path, content: &[u8]) -> Result<(), CoverError> {
    let error = |what| move |source| CoverError { path: path.to_owned(), what, source };
    let create = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW;
    let mode = Mode::S_IRUSR | Mode::S_IRGRP | Mode::S_IROTH;
    let fd = root.file(&Path::new("/dev").join(ASIDE), create, mode).map_err(error("created"))?;
    let mut file = File::from(fd);
    let io = |source: std::io::Error| Errno::from_raw(source.raw_os_error().unwrap_or(libc::EIO));
    let written = file.write_all(content).map_err(|e| error("written")(io(e)));
    let mounted = written.and_then(|()| {
        let target = root.file(path, OFlag::O_PATH, Mode::empty()).map_err(error("put in place"))?;
        let (from, to) = (proc_path(file.as_raw_fd()), proc_path(target.as_raw_fd()));
        let none = None::<&str>;
        mount(Some(&from), &to, none, MsFlags::MS_BIND, none).map_err(error("mounted"))?;
        // The descriptor still means the file below, so the new mount is looked up again.
        let top = root.file(path, OFlag::O_PATH, Mode::empty()).map_err(error("found again"))?;
        let flags = MsFlags::MS_BIND
            | MsFlags::MS_REMOUNT
            | MsFlags::MS_RDONLY
            | MsFlags::MS_NOSUID
            | MsFlags::MS_NODEV;
        mount(none, &proc_path(top.as_raw_fd()), none, flags, none).map_err(error("made read-only"))
    });
    let dev = root.file(Path::new("/dev"), OFlag::O_PATH | OFlag::O_DIRECTORY, Mode::empty());
    if let Ok(dev) = dev {
        let _ = nix::unistd::unlinkat(&dev, ASIDE, nix::unistd::UnlinkatFlags::NoRemoveDir);
    }
    mounted
}

/// Takes away a cover, which is recognised by having no name. A cover that somebody else made is taken away
/// as well.
pub(crate) fn uncover(root: &Root, path: &Path) -> Result<(), CoverError> {
    let error = |what| move |source| CoverError { path: path.to_owned(), what, source };
    let Ok(found) = root.file(path, OFlag::O_PATH, Mode::empty()) else { return Ok(()) };
    if fstat(&found).map_err(error("looked at"))?.st_nlink > 0 {
        return Ok(());
    }
    umount2(&proc_path(found.as_raw_fd()), MntFlags::MNT_DETACH).map_err(error("taken away"))
}

fn proc_path(fd: i32) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{fd}"))
}

//! Mounts in-memory file systems that containers write to. Their size is bounded, so whatever a container
//! does there costs the node no more than was set aside for it.

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::io;
use std::path::Path;

/// Mounts a file system from which nothing can be run and which has no devices. `name` is what the node's
/// list of mounts shows.
pub(crate) fn make(name: &str, dir: &Path, options: &str) -> nix::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some(name), dir, Some("tmpfs"), flags, Some(options))
}

/// Unmounts a file system, even while containers have it open: it then disappears with the last of them. It
/// is no error if there is none.
///
/// # Errors
/// Fails if the kernel refuses.
pub(crate) fn remove(dir: &Path) -> io::Result<()> {
    // A kill may have left several, one over the other. The number of attempts is limited.
    for _ in 0..16 {
        match umount2(dir, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
            // A process that may not mount has not mounted anything.
            Err(Errno::EPERM) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

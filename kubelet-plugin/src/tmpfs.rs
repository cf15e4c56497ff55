//! File systems in memory that containers write to: bounded, so that whatever a container does there costs the node no
//! more than was set aside for it.

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::io;
use std::path::Path;

/// Mounts one that nothing can be run from and that has no devices. `name` is what the node's list of mounts shows.
pub(crate) fn make(name: &str, dir: &Path, options: &str) -> nix::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some(name), dir, Some("tmpfs"), flags, Some(options))
}

/// Takes one away, also while containers have it open: it then goes with the last of them. None there is fine.
///
/// # Errors
/// If the kernel refuses.
pub(crate) fn remove(dir: &Path) -> io::Result<()> {
    // One over the other, should a kill have left some; never without end.
    for _ in 0..16 {
        match umount2(dir, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
            // Who may not mount has not mounted.
            Err(Errno::EPERM) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

//! The root of a container: its mounts, device nodes and hooks.

use super::mirror::{materialise, mirrored_root};
use super::{ContainerSpec, Hook, Isolation, Node};
use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, makedev, mknod, umask};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::chroot;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes the root of a container in the mount namespace of this process, and enters it.
pub(super) fn enter(spec: &ContainerSpec) -> Result<()> {
    let none = None::<&Path>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot detach from the host's mounts")?;
    let root = match &spec.root {
        None => mirrored_root(&spec.scratch)?,
        Some(root) => root.clone(),
    };
    proc(&root.join("proc"), spec.isolation)?;
    bind(Path::new("/sys"), &root.join("sys"), true, true)?;
    fs::create_dir_all(root.join("dev")).context("cannot create /dev")?;
    mount(Some("tmpfs"), &root.join("dev"), Some("tmpfs"), MsFlags::empty(), none)
        .context("cannot mount /dev")?;
    fs::create_dir_all(root.join("dev/shm")).context("cannot create /dev/shm")?;
    for node in ["null", "zero", "full", "random", "urandom"] {
        bind(&Path::new("/dev").join(node), &root.join("dev").join(node), false, false)?;
    }
    for entry in &spec.binds {
        let target = match &spec.root {
            None => materialise(&root, &entry.container)
                .with_context(|| format!("cannot make room for {}", entry.container.display()))?,
            Some(_) => inside(&root, &entry.container),
        };
        bind(&entry.host, &target, entry.read_only, true)?;
    }
    make_nodes(&root, &spec.nodes, spec.isolation)?;
    for Hook { path, args, env } in &spec.hooks {
        let mut command = Command::new(path);
        command
            .args(args.iter().skip(1))
            .env_clear()
            .envs(env.iter().filter_map(|entry| entry.split_once('=')));
        // A runtime says on standard input where the root is; here it is said on the command line.
        let status = command.arg("--root").arg(&root).status();
        let status = status.with_context(|| format!("cannot run the hook {}", path.display()))?;
        anyhow::ensure!(status.success(), "the hook {} forbids the start", path.display());
    }
    chroot(&root).context("cannot enter the container's root")?;
    std::env::set_current_dir("/").context("cannot enter the container's root")
}

/// The processes of the container's PID namespace, or all where it has none.
fn proc(target: &Path, isolation: Isolation) -> Result<()> {
    if isolation == Isolation::User {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        match mount(Some("proc"), target, Some("proc"), flags, None::<&Path>) {
            // In a container that sees a part of it alone nobody gets another. What is in it has the numbers of the
            // host, and can be looked at only.
            Err(Errno::EPERM) => bind(Path::new("/proc"), target, false, true)?,
            mounted => mounted.context("cannot mount /proc")?,
        }
        // What is the whole machine's, as container runtimes have it.
        for path in OF_THE_MACHINE.iter().map(|name| target.join(name)).filter(|path| path.exists()) {
            bind(&path, &path, true, true)?;
        }
        return Ok(());
    }
    bind(Path::new("/proc"), target, false, true)
}

/// What of `/proc` is not a process's, and can be written.
const OF_THE_MACHINE: [&str; 5] = ["bus", "fs", "irq", "sys", "sysrq-trigger"];

/// The path of a container under the root, with no way out of it.
pub(super) fn inside(root: &Path, container: &Path) -> PathBuf {
    root.join(
        container.components().filter(|c| matches!(c, std::path::Component::Normal(_))).collect::<PathBuf>(),
    )
}

fn bind(host: &Path, target: &Path, read_only: bool, recursive: bool) -> Result<()> {
    let what = || format!("cannot mount {} at {}", host.display(), target.display());
    make_target(host, target).with_context(what)?;
    let none = None::<&Path>;
    let recursion = if recursive { MsFlags::MS_REC } else { MsFlags::empty() };
    mount(Some(host), target, none, MsFlags::MS_BIND | recursion, none).with_context(what)?;
    if read_only { forbid_writing(target).with_context(what) } else { Ok(()) }
}

/// Forbids to write to a mount and to what is mounted below it.
pub(super) fn forbid_writing(top: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot list mounts")?;
    for target in mounts.lines().filter_map(mount_point).filter(|path| path.starts_with(top)) {
        // What the host's mount forbids must stay forbidden, or an unprivileged remount is refused.
        let forbidden = match statvfs(&target) {
            Ok(status) => status.flags(),
            // Nothing can be written where this user cannot go, where another mount is in the way, and where the server
            // is gone.
            Err(Errno::EACCES | Errno::ENOENT | Errno::ENOTCONN | Errno::ESTALE) => continue,
            Err(error) => return Err(error).with_context(|| target.display().to_string()),
        };
        // A device can be written to wherever it is.
        let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        flags |= MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        if forbidden.contains(FsFlags::ST_NOEXEC) {
            flags |= MsFlags::MS_NOEXEC;
        }
        match mount(None::<&Path>, &target, None::<&Path>, flags, None::<&Path>) {
            // Not the root of a mount: another one covers it.
            Err(Errno::EINVAL) => {}
            done => done.with_context(|| format!("cannot make {} read-only", target.display()))?,
        }
    }
    Ok(())
}

/// Where something is mounted, of a line of `/proc/self/mountinfo`, which has spaces and the like as octal numbers.
fn mount_point(line: &str) -> Option<PathBuf> {
    let mut rest = line.split(' ').nth(4)?.as_bytes();
    let mut path = Vec::new();
    while let Some((byte, after)) = rest.split_first() {
        let number = || u8::from_str_radix(std::str::from_utf8(after.get(..3)?).ok()?, 8).ok();
        match number().filter(|_| *byte == b'\\') {
            Some(octal) => {
                path.push(octal);
                rest = after.get(3..)?;
            }
            None => {
                path.push(*byte);
                rest = after;
            }
        }
    }
    Some(PathBuf::from(OsString::from_vec(path)))
}

/// A file or directory, like the host's, to mount over.
fn make_target(host: &Path, target: &Path) -> std::io::Result<()> {
    if host.is_dir() {
        return fs::create_dir_all(target);
    }
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::symlink_metadata(target) {
        // A mount would follow a link of the host out of what it is meant to cover.
        Ok(meta) if meta.is_symlink() => fs::remove_file(target).and_then(|()| fs::write(target, "")),
        Ok(_) => Ok(()),
        Err(_) => fs::write(target, ""),
    }
}

/// The container's device nodes under its root.
fn make_nodes(root: &Path, nodes: &[Node], isolation: Isolation) -> Result<()> {
    for Node { path, number: (major, minor) } in nodes {
        let target = inside(root, path);
        let what = || format!("cannot make the device {}", target.display());
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).with_context(what)?;
        }
        if isolation == Isolation::Root {
            let before = umask(Mode::empty());
            let made =
                mknod(&target, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(*major, *minor));
            umask(before);
            match made {
                // Who is in a container himself may have the host's nodes and make none.
                Err(Errno::EPERM) if path.exists() => bind(path, &target, false, false)?,
                made => made.with_context(what)?,
            }
        } else {
            fs::write(&target, "").with_context(what)?;
        }
    }
    Ok(())
}

/// The container's files as links under the scratch root.
pub(super) fn link(spec: &ContainerSpec) -> Result<()> {
    for entry in &spec.binds {
        let target = inside(&spec.scratch, &entry.container);
        let what = || format!("cannot link {} to {}", target.display(), entry.host.display());
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).with_context(what)?;
        }
        if fs::symlink_metadata(&target).is_ok() {
            fs::remove_file(&target).with_context(what)?;
        }
        std::os::unix::fs::symlink(&entry.host, &target).with_context(what)?;
    }
    make_nodes(&spec.scratch, &spec.nodes, spec.isolation)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;

    #[test]
    fn devices_are_files_in_the_containers_own_dev() {
        let dir = tempfile::tempdir().unwrap();
        let node = |path: &str| Node { path: path.into(), number: (195, 255) };
        let nodes = [node("/dev/nvidiactl"), node("/dev/nvidia-caps/nvidia-cap12")];
        make_nodes(dir.path(), &nodes, Isolation::User).unwrap();
        for name in ["nvidiactl", "nvidia-caps/nvidia-cap12"] {
            assert!(dir.path().join("dev").join(name).is_file(), "{name}");
        }
    }

    #[test]
    fn container_paths_cannot_leave_the_root() {
        assert_eq!(inside(Path::new("/r"), Path::new("/../../etc/x")), Path::new("/r/etc/x"));
        assert_eq!(inside(Path::new("/r"), Path::new("a/./b")), Path::new("/r/a/b"));
    }

    #[test]
    fn a_mount_point_is_read_as_it_was_written() {
        let line = r"36 35 98:0 /mnt1 /mnt/a\040b\134c rw,noatime master:1 - ext3 /dev/root rw";
        assert_eq!(mount_point(line), Some(PathBuf::from(r"/mnt/a b\c")));
        assert_eq!(mount_point(""), None);
    }
}

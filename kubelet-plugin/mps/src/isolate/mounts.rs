//! Builds the file system that a daemon sees: one of its own, in a mount namespace of its own, with nothing
//! of the host's behind it. The daemon also has a network namespace of its own, which is empty. Programs and
//! libraries are bound into the file system; everything is read-only except what a daemon writes. A daemon is
//! root without rights, so the files that it can reach decide what it can do. It has no directory of the
//! host's configuration or state, and can change nothing in `/proc` and `/sys`, where the kernel checks only
//! a file's owner.

use super::root::Place;
use super::{IsolateError, LOG, PIPE, Roots, relative, step};
use crate::contract::ClaimDir;
use aliquot_devices::CharDevice;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, SFlag, makedev, mknod, umask};
use nix::unistd::{chdir, pivot_root};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

/// The paths in which a system has its programs and libraries, and how its loader finds them. Debian's
/// `alternatives` lead to the driver's files; NixOS's files are in its store.
const SYSTEM: [&str; 14] = [
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "usr",
    "opt",
    "nix/store",
    "run/opengl-driver",
    "etc/alternatives",
    "etc/ld.so.cache",
    "etc/ld.so.conf",
    "etc/ld.so.conf.d",
];
/// The path of shared memory, as in the claim's containers.
const SHM: &str = "/dev/shm";
/// The paths that a daemon writes to.
const WRITABLE: [&str; 4] = ["/tmp", PIPE, LOG, SHM];
/// `MS_NOSYMFOLLOW`, which Linux has since 5.10.
const NO_LINKS: MsFlags = MsFlags::from_bits_retain(0x100);
/// The devices that every program expects: name, major, minor.
const USUAL: [(&str, u64, u64); 5] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9)];

/// Moves this process into the daemon's file system.
pub(super) fn enter(
    claim: &ClaimDir,
    roots: &Roots,
    place: &Place,
    devices: &[CharDevice],
) -> Result<(), IsolateError> {
    let all = Path::new("/");
    // The daemon speaks only through sockets in its directory.
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET)
        .map_err(step("leave the mount and network namespaces of", all))?;
    // Mounts from here on are visible only to this process. Unmounts on the host still apply here. Otherwise
    // file systems of other claims below the daemon's view would live as long as this daemon.
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    mount(None::<&Path>, all, None::<&Path>, slave, None::<&Path>)
        .map_err(step("detach the mounts of", all))?;
    let [pipe, shm, log] = [claim.pipe(), claim.shm(), claim.log()].map(|path| hold(&path));
    let (pipe, shm, log) = (pipe?, shm?, log?);
    // The claim's directory serves as the mount point, because it exists in any case; the directories in it
    // are held open.
    let root = claim.path();
    let within = |path: &str| root.join(relative(Path::new(path)));
    tmpfs(root, "mode=0755,size=256k,nr_inodes=256", MsFlags::MS_NODEV)?;
    for path in SYSTEM {
        add(&place.root.join(path), &root.join(path))?;
    }
    if let Some(driver) = &place.driver {
        add_driver(&roots.driver, root, relative(driver))?;
    }
    for path in ["/proc", "/sys"] {
        directory(&within(path))?;
        bind(Path::new(path), &within(path), MsFlags::MS_BIND)?;
    }
    directory(&within("/tmp"))?;
    tmpfs(&within("/tmp"), "mode=1777,size=256k,nr_inodes=64", MsFlags::MS_NODEV)?;
    directory(&within("/dev"))?;
    tmpfs(&within("/dev"), "mode=0755,size=256k,nr_inodes=64", MsFlags::empty())?;
    make_devices(&within("/dev"), devices)?;
    for (held, path) in [(&shm, SHM), (&pipe, PIPE), (&log, LOG)] {
        share(held, &within(path))?;
    }
    change_root(root)?;
    restrict()
}

/// Leaves everything behind that is not below `root`. A process that has only changed its root can come back,
/// if it has the rights; here there is nothing to come back to.
fn change_root(root: &Path) -> Result<(), IsolateError> {
    chdir(root).map_err(step("enter", root))?;
    // The former root is then mounted over the new one, at the same place.
    pivot_root(".", ".").map_err(step("change the root to", root))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(step("unmount the former root over", root))?;
    let root = Path::new("/");
    chdir(root).map_err(step("enter", root))?;
    // From now on no mount of the host appears here.
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&Path>, root, None::<&Path>, private, None::<&Path>)
        .map_err(step("detach the mounts of", root))
}

/// Makes everything read-only except what a daemon writes.
fn restrict() -> Result<(), IsolateError> {
    let path = Path::new("/proc/self/mountinfo");
    let mounts = fs::read(path).map_err(failed("read", path))?;
    for (point, flags) in mounts.split(|byte| *byte == b'\n').filter_map(mounted) {
        if WRITABLE.iter().any(|writable| point == Path::new(writable)) {
            continue;
        }
        let own_devices = point == Path::new("/dev");
        let no_devices = if own_devices { MsFlags::empty() } else { MsFlags::MS_NODEV };
        let flags = flags | no_devices | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID;
        let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
        mount(None::<&Path>, &point, None::<&Path>, flags, None::<&Path>)
            .map_err(step("make read-only", &point))?;
    }
    Ok(())
}

/// Returns the mount point and flags of a line of `mountinfo` (proc_pid_mountinfo(5)).
fn mounted(line: &[u8]) -> Option<(PathBuf, MsFlags)> {
    let mut fields = line.split(|byte| *byte == b' ');
    let point = OsString::from_vec(unescaped(fields.nth(4)?)).into();
    let options = fields.next()?.split(|byte| *byte == b',');
    let flags = options.map(|option| match option {
        b"nodev" => MsFlags::MS_NODEV,
        b"noexec" => MsFlags::MS_NOEXEC,
        b"noatime" => MsFlags::MS_NOATIME,
        b"nodiratime" => MsFlags::MS_NODIRATIME,
        b"relatime" => MsFlags::MS_RELATIME,
        _ => MsFlags::empty(),
    });
    Some((point, flags.fold(MsFlags::empty(), MsFlags::union)))
}

/// Decodes a field. The kernel writes a space, a tab, a line feed and a backslash as a backslash with three
/// octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| *first == b'\\').and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { after.get(3..).unwrap_or_default() } else { after };
    }
    bytes
}

/// Adds a file or directory of a system to the new root, if the system has it.
fn add(source: &Path, target: &Path) -> Result<(), IsolateError> {
    let kind = match fs::symlink_metadata(source) {
        Ok(meta) => meta.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("look at", source)(error)),
    };
    if let Some(parent) = target.parent() {
        directory(parent)?;
    }
    if kind.is_symlink() {
        let to = fs::read_link(source).map_err(failed("read", source))?;
        return symlink(to, target).map_err(failed("link", target));
    }
    if kind.is_dir() {
        directory(target)?;
    } else {
        File::create(target).map_err(failed("create", target))?;
    }
    bind(source, target, MsFlags::MS_BIND | MsFlags::MS_REC)
}

/// Adds a driver that consists of files alone, at its path on the host, unless it is there already with the
/// host's own files.
fn add_driver(source: &Path, root: &Path, path: &Path) -> Result<(), IsolateError> {
    if super::root::is_below(root, path) {
        return Ok(());
    }
    let target = root.join(path);
    directory(&target)?;
    bind(source, &target, MsFlags::MS_BIND | MsFlags::MS_REC)
}

fn hold(path: &Path) -> Result<File, IsolateError> {
    let flags = nix::libc::O_PATH | nix::libc::O_DIRECTORY | nix::libc::O_NOFOLLOW;
    let held = OpenOptions::new().read(true).custom_flags(flags).open(path);
    held.map_err(failed("open", path))
}

fn directory(path: &Path) -> Result<(), IsolateError> {
    fs::create_dir_all(path).map_err(failed("create", path))
}

fn tmpfs(target: &Path, options: &str, more: MsFlags) -> Result<(), IsolateError> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | more;
    mount(Some("tmpfs"), target, Some("tmpfs"), flags, Some(options))
        .map_err(step("mount a tmpfs on", target))
}

fn bind(source: &Path, target: &Path, flags: MsFlags) -> Result<(), IsolateError> {
    mount(Some(source), target, None::<&Path>, flags, None::<&Path>).map_err(step("mount on", target))
}

/// Binds a directory that the claim's containers also have: no link in it is followed.
fn share(source: &File, target: &Path) -> Result<(), IsolateError> {
    directory(target)?;
    bind(&PathBuf::from(format!("/proc/self/fd/{}", source.as_raw_fd())), target, MsFlags::MS_BIND)?;
    let safe = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let again = |flags: MsFlags| {
        let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
        mount(None::<&Path>, target, None::<&Path>, flags, None::<&Path>)
    };
    again(safe | NO_LINKS).or_else(|_| again(safe)).map_err(step("restrict", target))
}

/// Makes the usual device nodes, and the daemon's own.
fn make_devices(dev: &Path, own: &[CharDevice]) -> Result<(), IsolateError> {
    let own = own
        .iter()
        .map(|device| (device.path.trim_start_matches("/dev/"), device.major.into(), device.minor.into()));
    let everybody = Mode::from_bits_truncate(0o666);
    // The modes must not be changed by the umask.
    let before = umask(Mode::empty());
    let made = USUAL.into_iter().chain(own).try_for_each(|(name, major, minor)| {
        let path = dev.join(name);
        mknod(&path, SFlag::S_IFCHR, everybody, makedev(major, minor)).map_err(step("make the device", &path))
    });
    umask(before);
    made
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> IsolateError {
    let path = path.to_owned();
    move |error| IsolateError::Step { what, path, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_is_read_as_the_kernel_writes_it() {
        let line = br"36 35 98:0 /mnt1 /mnt\040a\134b ro,nosuid,noexec,relatime master:1 - ext4 /dev/root rw";
        let flags = MsFlags::MS_NOEXEC | MsFlags::MS_RELATIME;
        assert_eq!(mounted(line), Some((PathBuf::from(r"/mnt a\b"), flags)));
        assert_eq!(mounted(b""), None);
        assert_eq!(unescaped(br"a\04"), br"a\04");
    }
}

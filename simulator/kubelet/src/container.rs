//! Becomes a container: the host's files, or a root of its own, with the binds, device nodes and environment that a
//! CDI runtime would have made, in namespaces of its own.
//!
//! Without namespaces the same edits become links in a scratch root, and the limiter, which
//! `/etc/ld.so.preload` would have brought, comes by `LD_PRELOAD`.

use crate::tether;
use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, SFlag, makedev, mknod, umask};
use nix::unistd::{chroot, getegid, geteuid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What to become.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerSpec {
    /// An empty directory for the container's own files.
    pub scratch: PathBuf,
    /// What keeps it from the host.
    pub isolation: Isolation,
    /// Its root, which mounts leave empty files and directories in; without one it has the host's files.
    pub root: Option<PathBuf>,
    /// Files and directories of the host that appear in the container.
    pub binds: Vec<Bind>,
    /// Its device nodes.
    pub nodes: Vec<Node>,
    /// CDI hooks of the stage createContainer.
    pub hooks: Vec<Hook>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// Program and arguments; the program's path is one of the container.
    pub argv: Vec<String>,
}

/// What keeps a container from the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Isolation {
    /// Nothing: there is only a scratch root of links.
    None,
    /// A user and a mount namespace, which a user without rights may make.
    User,
    /// A mount namespace of root, in which there are real device nodes.
    Root,
}

/// A character device. Only with [`Isolation::Root`] it becomes one, else an empty file: a user without rights may make
/// no others, and the simulated driver only looks whether they are there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Path in the container.
    pub path: PathBuf,
    /// Major and minor number.
    pub number: (u64, u64),
}

/// A program that runs before the container's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// Path on the host.
    pub path: PathBuf,
    /// Its name first.
    pub args: Vec<String>,
    /// `NAME=value` each, and nothing else.
    pub env: Vec<String>,
}

/// A file or directory of the host in the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// Path on the host.
    pub host: PathBuf,
    /// Path in the container.
    pub container: PathBuf,
    /// Whether the container may not write there.
    pub read_only: bool,
}

/// Whether this machine lets us make a container in namespaces: tries it with `true`.
pub fn namespaces_work(program: &Path, scratch: &Path) -> bool {
    let spec = ContainerSpec {
        scratch: scratch.to_owned(),
        isolation: Isolation::User,
        root: None,
        binds: Vec::new(),
        nodes: Vec::new(),
        hooks: Vec::new(),
        env: BTreeMap::new(),
        argv: vec!["/bin/true".to_owned()],
    };
    let path = scratch.with_extension("json");
    let written =
        serde_json::to_vec(&spec).map_err(std::io::Error::other).and_then(|json| fs::write(&path, json));
    written.is_ok()
        && fs::create_dir_all(scratch).is_ok()
        && command(program, &path).output().is_ok_and(|out| out.status.success())
}

/// A command that becomes the container that a file describes. The program hands `__container`'s arguments to [`run`].
pub fn command(program: &Path, spec: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("__container").arg(spec).arg(std::process::id().to_string());
    command
}

/// Becomes the container that a file describes, and ends with the process `parent`. Never returns if all goes well, and
/// must be called before there are threads.
pub fn run(spec: &Path, parent: u32) -> ExitCode {
    let error = match become_container(spec, parent) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    eprintln!("cannot start the container of {}: {error:#}", spec.display());
    ExitCode::from(127)
}

fn become_container(path: &Path, parent: u32) -> Result<std::convert::Infallible> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let spec: ContainerSpec = serde_json::from_slice(&text).context("malformed container description")?;
    if spec.isolation == Isolation::None {
        link_scratch(&spec)?
    } else {
        enter_namespaces(&spec)?
    }
    // Last, since the kernel forgets it where rights change.
    tether::end_with(parent)?;
    let (program, arguments) = spec.argv.split_first().context("no program to run")?;
    let error = Command::new(program).args(arguments).env_clear().envs(&spec.env).exec();
    Err(error).with_context(|| format!("cannot run {program}"))
}

fn enter_namespaces(spec: &ContainerSpec) -> Result<()> {
    if spec.isolation == Isolation::Root {
        unshare(CloneFlags::CLONE_NEWNS).context("cannot have mounts of our own")?;
    } else {
        enter_user_namespace()?
    }
    let none = None::<&Path>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot detach from the host's mounts")?;
    let root = match &spec.root {
        None => mirrored_root(&spec.scratch)?,
        Some(root) => root.clone(),
    };
    for dir in ["proc", "sys"] {
        bind(&Path::new("/").join(dir), &root.join(dir), false, true)?;
    }
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

fn enter_user_namespace() -> Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)
        .context("this machine allows no user namespaces")?;
    fs::write("/proc/self/setgroups", "deny").context("cannot write setgroups")?;
    fs::write("/proc/self/uid_map", format!("0 {uid} 1")).context("cannot map the user")?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1")).context("cannot map the group")
}

/// Where the host's own root is in a container.
const HOST: &str = "/host";
/// Top-level directories that are the container's own.
const OWN: [&str; 6] = ["proc", "sys", "dev", "run", "tmp", "host"];

/// A root in memory whose entries are links to the host's. An unprivileged user can neither write into
/// the host's directories nor, owning none of them, into an overlay over them; directories of links can
/// be changed at will, and [`materialise`] makes one wherever a bind has to go.
fn mirrored_root(scratch: &Path) -> Result<PathBuf> {
    let none = None::<&Path>;
    mount(Some("tmpfs"), scratch, Some("tmpfs"), MsFlags::empty(), none)
        .context("cannot mount a scratch file system")?;
    let root = scratch.join("root");
    fs::create_dir(&root)?;
    for name in OWN {
        fs::create_dir(root.join(name)).with_context(|| format!("cannot create /{name}"))?;
    }
    mirror(Path::new("/"), &root)?;
    mount(Some("/"), &root.join("host"), none, MsFlags::MS_BIND | MsFlags::MS_REC, none)
        .context("cannot mount the host's files")?;
    Ok(root)
}

/// Fills a directory with links to the entries of one of the host's; its own entries stay. Links of the
/// host are copied, so that `/lib` stays what it is.
fn mirror(host: &Path, target: &Path) -> Result<()> {
    for entry in fs::read_dir(host).with_context(|| format!("cannot list {}", host.display()))? {
        let (path, link) =
            (entry.as_ref().map(fs::DirEntry::path), entry.as_ref().map(|e| target.join(e.file_name())));
        let (Ok(path), Ok(link)) = (path, link) else { continue };
        if fs::symlink_metadata(&link).is_ok() {
            continue;
        }
        let to = match fs::read_link(&path) {
            Ok(own) => own,
            Err(_) => Path::new(HOST).join(path.strip_prefix("/").unwrap_or(&path)),
        };
        std::os::unix::fs::symlink(to, link)?;
    }
    Ok(())
}

/// Makes the parents of a container path real directories that mirror the host's, and gives the path
/// under the root.
fn materialise(root: &Path, container: &Path) -> Result<PathBuf> {
    let mut at = PathBuf::new();
    let inside_root = inside(Path::new(""), container);
    let (Some(parent), Some(name)) = (inside_root.parent(), inside_root.file_name()) else {
        anyhow::bail!("{} is no path for a mount", container.display());
    };
    for part in parent.components() {
        let path = root.join(&at).join(part);
        match fs::read_link(&path) {
            // A link into the host becomes a directory of links.
            Ok(link) if link.starts_with(HOST) => {
                at.push(part);
                let host = Path::new("/").join(&at);
                anyhow::ensure!(host.is_dir(), "{} is not a directory", host.display());
                fs::remove_file(&path)?;
                fs::create_dir(&path)?;
                mirror(&host, &path)?;
            }
            // A link of the host's own, such as /lib: go where it leads.
            Ok(link) => {
                let target = if link.is_absolute() { link } else { Path::new("/").join(&at).join(link) };
                let below = parent.strip_prefix(at.join(part)).unwrap_or_else(|_| Path::new(""));
                return materialise(root, &normal(&target).join(below).join(name));
            }
            Err(_) => {
                at.push(part);
                fs::create_dir_all(&path)?;
            }
        }
    }
    Ok(root.join(at).join(name))
}

/// The path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::from("/");
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                out.pop();
            }
            std::path::Component::Normal(part) => out.push(part),
            _ => {}
        }
    }
    out
}

/// The path of a container under the root, with no way out of it.
fn inside(root: &Path, container: &Path) -> PathBuf {
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
    if read_only {
        // What the host's mount forbids must stay forbidden, or an unprivileged remount is refused.
        let forbidden = nix::sys::statvfs::statvfs(target).map(|s| s.flags()).with_context(what)?;
        let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        for (have, keep) in [
            (nix::sys::statvfs::FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
            (nix::sys::statvfs::FsFlags::ST_NODEV, MsFlags::MS_NODEV),
            (nix::sys::statvfs::FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        ] {
            if forbidden.contains(have) {
                flags |= keep;
            }
        }
        mount(none, target, none, flags, none).with_context(what)?;
    }
    Ok(())
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
fn link_scratch(spec: &ContainerSpec) -> Result<()> {
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
    fn room_for_a_mount_leaves_its_neighbours_in_place() {
        let dir = tempfile::tempdir().unwrap();
        mirror(Path::new("/"), dir.path()).unwrap();
        let target = materialise(dir.path(), Path::new("/usr/lib/new-dir/new-file")).unwrap();
        assert_eq!(target, dir.path().join("usr/lib/new-dir/new-file"));
        assert!(fs::symlink_metadata(dir.path().join("usr/lib")).unwrap().is_dir());
        let neighbours = fs::read_dir("/usr/lib").unwrap().count();
        assert_eq!(fs::read_dir(dir.path().join("usr/lib")).unwrap().count(), neighbours + 1);
    }

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
    fn paths_are_normal() {
        assert_eq!(normal(Path::new("/a/../b/./c")), Path::new("/b/c"));
        assert_eq!(normal(Path::new("/../x")), Path::new("/x"));
    }

    #[test]
    fn container_paths_cannot_leave_the_root() {
        assert_eq!(inside(Path::new("/r"), Path::new("/../../etc/x")), Path::new("/r/etc/x"));
        assert_eq!(inside(Path::new("/r"), Path::new("a/./b")), Path::new("/r/a/b"));
    }
}

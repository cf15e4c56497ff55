//! A root that looks like the host's and is the container's own.

use super::root::{forbid_writing, inside};
use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use std::fs;
use std::path::{Path, PathBuf};

/// Where the host's own root is in a container.
const HOST: &str = "/host";
/// Top-level directories that are the container's own.
const OWN: [&str; 6] = ["proc", "sys", "dev", "run", "tmp", "host"];

/// A root in memory whose entries are links to the host's. An unprivileged user can neither write into
/// the host's directories nor, owning none of them, into an overlay over them; directories of links can
/// be changed at will, and [`materialise`] makes one wherever a bind has to go.
pub(super) fn mirrored_root(scratch: &Path) -> Result<PathBuf> {
    let none = None::<&Path>;
    mount(Some("tmpfs"), scratch, Some("tmpfs"), MsFlags::empty(), none)
        .context("cannot mount a scratch file system")?;
    let root = scratch.join("root");
    fs::create_dir(&root)?;
    for name in OWN {
        fs::create_dir(root.join(name)).with_context(|| format!("cannot create /{name}"))?;
    }
    mirror(Path::new("/"), &root)?;
    let host = inside(&root, Path::new(HOST));
    mount(Some("/"), &host, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)
        .context("cannot mount the host's files")?;
    // Sockets and devices can be written to wherever they are.
    for name in OWN.iter().map(|name| host.join(name)).filter(|path| path.is_dir()) {
        mount(Some("tmpfs"), &name, Some("tmpfs"), MsFlags::empty(), none)
            .with_context(|| format!("cannot cover {}", name.display()))?;
    }
    forbid_writing(&host)?;
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
pub(super) fn materialise(root: &Path, container: &Path) -> Result<PathBuf> {
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
    fn paths_are_normal() {
        assert_eq!(normal(Path::new("/a/../b/./c")), Path::new("/b/c"));
        assert_eq!(normal(Path::new("/../x")), Path::new("/x"));
    }
}

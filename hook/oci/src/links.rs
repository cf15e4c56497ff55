//! Links in the container's `/dev`, which is memory. They lead by a GPU's address to its DRM nodes; programs
//! that know a GPU by its address look for the nodes there.
//!
//! A container can do without the links, so it also starts if one cannot be made, and the reason is told on
//! standard error.

use crate::args::Link;
use crate::inside::Root;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{Mode, fchmod, mkdirat};
use nix::unistd::symlinkat;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The reason why a link is not there.
#[derive(Debug, thiserror::Error)]
#[error("the link {} cannot be made: {source}", path.display())]
pub struct LinkError {
    path: PathBuf,
    source: Errno,
}

/// Makes all links, and returns which could not be made. What is there already stays.
pub(crate) fn make(root: &Root, links: &[Link]) -> Vec<LinkError> {
    let failed = |link: &Link| {
        let made = one(root, link);
        made.err().map(|source| LinkError { path: link.path.clone(), source })
    };
    links.iter().filter_map(failed).collect()
}

fn one(root: &Root, link: &Link) -> Result<(), Errno> {
    let (Some(dir), Some(name)) = (link.path.parent(), link.path.file_name()) else {
        return Err(Errno::EINVAL);
    };
    // No link of the image's is followed, so that it is this directory and no other.
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
    let mut at = root.resolve(Path::new("/dev"), flags, Mode::empty(), ResolveFlag::RESOLVE_NO_SYMLINKS)?;
    for component in dir.strip_prefix("/dev").map_err(|_| Errno::EINVAL)?.components() {
        at = enter(&at, Path::new(component.as_os_str()))?;
    }
    match symlinkat(link.target.as_path(), &at, name) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Opens a directory; makes it, readable by everybody, if it is not there.
fn enter(at: &OwnedFd, name: &Path) -> Result<OwnedFd, Errno> {
    let open = |flags| {
        let way = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        let flags = flags | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        openat2(at, name, OpenHow::new().flags(flags).resolve(way))
    };
    match mkdirat(at, name, Mode::from_bits_truncate(0o755)) {
        // Whatever file mode mask the runtime has.
        Ok(()) => fchmod(open(OFlag::O_RDONLY)?, Mode::from_bits_truncate(0o755))?,
        Err(Errno::EEXIST) => {}
        Err(errno) => return Err(errno),
    }
    open(OFlag::O_PATH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn link(target: &str, path: &str) -> Link {
        Link { target: target.into(), path: path.into() }
    }

    #[test]
    fn links_are_made_below_dev_with_their_directories_and_what_is_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let dri = folder.path().join("dev/dri");
        fs::create_dir_all(&dri).unwrap();
        let root = Root::open(folder.path()).unwrap();
        let wanted = link("../card1", "/dev/dri/by-path/pci-0000:17:00.0-card");
        let other = link("../card2", "/dev/dri/by-path/pci-0000:17:00.0-card");
        for links in [[wanted.clone()], [wanted], [other]] {
            assert!(make(&root, &links).is_empty());
            let made = fs::read_link(dri.join("by-path/pci-0000:17:00.0-card")).unwrap();
            assert_eq!(made, Path::new("../card1"));
        }
        let mode = fs::metadata(dri.join("by-path")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
    }

    #[test]
    fn an_image_that_puts_links_in_the_way_gets_nothing_made_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        fs::create_dir_all(at("root/dev")).unwrap();
        fs::create_dir_all(at("root/elsewhere")).unwrap();
        symlink("/elsewhere", at("root/dev/dri")).unwrap();
        let root = Root::open(&at("root")).unwrap();
        let failed = make(&root, &[link("../card1", "/dev/dri/by-path/a"), link("x", "/etc/a")]);
        let told: Vec<String> = failed.iter().map(ToString::to_string).collect();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].starts_with("the link /dev/dri/by-path/a cannot be made"), "{told:?}");
        assert_eq!(fs::read_dir(at("root/elsewhere")).unwrap().count(), 0);
    }
}

//! Looks into the file system with the driver's files as `chroot` would: absolute links start at its root,
//! and no link leads out of it.

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

/// The longest chain of links that is followed; more than any driver's packages have.
const MOST_LINKS: u32 = 40;

/// A root; all paths that its methods take and return are relative to it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Root<'a>(pub(super) &'a Path);

impl Root<'_> {
    /// Returns the file that a path leads to.
    pub(super) fn file(self, path: &Path) -> Option<PathBuf> {
        self.follow(path).filter(|found| self.0.join(found).is_file())
    }

    /// Returns true if a file is a program or library of 32 bits (`ELFCLASS32`).
    pub(super) fn is_32_bit(self, file: &Path) -> bool {
        let mut head = [0; 5];
        let read = File::open(self.0.join(file)).and_then(|mut file| file.read_exact(&mut head));
        read.is_ok() && head == *b"\x7fELF\x01"
    }

    /// Returns the socket that a path leads to.
    pub(super) fn socket(self, path: &Path) -> Option<PathBuf> {
        let found = self.follow(path)?;
        let kind = fs::metadata(self.0.join(&found)).ok()?.file_type();
        kind.is_socket().then_some(found)
    }

    /// Returns the directory that a path leads to.
    pub(super) fn dir(self, path: &Path) -> Option<PathBuf> {
        self.follow(path).filter(|found| self.0.join(found).is_dir())
    }

    /// Returns the names in a directory, sorted; empty if it cannot be read.
    pub(super) fn names(self, dir: &Path) -> Vec<String> {
        let Some(entries) = self.dir(dir).and_then(|dir| fs::read_dir(self.0.join(dir)).ok()) else {
            return Vec::new();
        };
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Returns the path that a path leads to, whatever is there.
    fn follow(self, path: &Path) -> Option<PathBuf> {
        let mut pending: Vec<PathBuf> = vec![path.to_owned()];
        let mut done = PathBuf::new();
        let mut links = 0;
        while let Some(next) = pending.pop() {
            let mut components = next.components();
            let Some(first) = components.next() else { continue };
            let rest = components.as_path().to_owned();
            if rest != Path::new("") {
                pending.push(rest);
            }
            match first {
                Component::RootDir | Component::Prefix(_) => done = PathBuf::new(),
                Component::CurDir => {}
                Component::ParentDir => {
                    done.pop();
                }
                Component::Normal(name) => {
                    let candidate = done.join(name);
                    match fs::read_link(self.0.join(&candidate)) {
                        Ok(target) => {
                            links += 1;
                            if links > MOST_LINKS {
                                return None;
                            }
                            pending.push(target);
                        }
                        Err(_) => done = candidate,
                    }
                }
            }
        }
        Some(done)
    }
}

/// The identity of a file or directory: file system, inode and time of change. It changes when the file or
/// directory is replaced, or when something in the directory changes.
pub(super) type Identity = (u64, u64, i64, i64);

/// A view into a root for repeated checks that do not need to know where a path leads.
#[derive(Debug)]
pub(super) struct Look<'a> {
    root: Root<'a>,
    open: File,
}

impl<'a> Look<'a> {
    /// Opens a root, if it is there.
    pub(super) fn into(root: Root<'a>) -> Option<Self> {
        let open = OpenOptions::new().read(true).custom_flags(OFlag::O_PATH.bits()).open(root.0).ok()?;
        Some(Self { root, open })
    }

    /// Returns the identity of the target of a path. The kernel follows the path (openat2(2), from 5.6), or
    /// [`Root::follow`] does where the kernel cannot.
    pub(super) fn identity(&self, path: &Path) -> Option<Identity> {
        let how =
            OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_IN_ROOT);
        let meta = match openat2(&self.open, path, how) {
            Ok(found) => File::from(found).metadata(),
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return None,
            Err(_) => return self.identity_by_hand(path),
        };
        Some(identity_of(&meta.ok()?))
    }

    /// Returns the identity on an older kernel.
    fn identity_by_hand(&self, path: &Path) -> Option<Identity> {
        fs::metadata(self.root.0.join(self.root.follow(path)?)).ok().as_ref().map(identity_of)
    }
}

fn identity_of(meta: &Metadata) -> Identity {
    (meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::os::unix::fs::symlink;

    #[rstest]
    #[case::a_directory("usr/lib", true)]
    #[case::a_file("usr/lib/libcuda.so.1", true)]
    #[case::a_link_to_the_root("lib/libcuda.so.1", true)]
    #[case::an_absolute_path("/usr/lib", true)]
    #[case::an_absolute_link("alternatives/libcuda.so.1", true)]
    #[case::out_of_the_root("out/etc/hostname", false)]
    #[case::out_of_the_root_and_in_again("out/usr/lib", true)]
    #[case::a_loop("loop", false)]
    #[case::below_a_file("usr/lib/libcuda.so.1/x", false)]
    #[case::nothing("usr/lib64", false)]
    fn kernels_old_and_new_follow_a_path_to_the_same_and_never_out_of_the_root(
        #[case] path: &str,
        #[case] there: bool,
    ) {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path();
        fs::create_dir_all(root.join("usr/lib")).unwrap();
        fs::create_dir_all(root.join("alternatives")).unwrap();
        fs::write(root.join("usr/lib/libcuda.so.1"), "").unwrap();
        symlink("/usr/lib", root.join("lib")).unwrap();
        symlink("/lib/libcuda.so.1", root.join("alternatives/libcuda.so.1")).unwrap();
        symlink("../../../../../../..", root.join("out")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let look = Look::into(Root(root)).unwrap();
        let found = look.identity(Path::new(path));
        assert_eq!(found.is_some(), there);
        assert_eq!(look.identity_by_hand(Path::new(path)), found);
    }
}

//! The file system that the driver lies in, looked into as `chroot` would: absolute links start at its root,
//! and no link leads out of it.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

/// More links than any driver's packages have in a row.
const MOST_LINKS: u32 = 40;

/// A root; all paths that it takes and gives are relative to it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Root<'a>(pub(super) &'a Path);

impl Root<'_> {
    /// The file that a path leads to.
    pub(super) fn file(self, path: &Path) -> Option<PathBuf> {
        self.follow(path).filter(|found| self.0.join(found).is_file())
    }

    /// Whether a file is a program or library of 32 bits (`ELFCLASS32`).
    pub(super) fn is_32_bit(self, file: &Path) -> bool {
        let mut head = [0; 5];
        let read = File::open(self.0.join(file)).and_then(|mut file| file.read_exact(&mut head));
        read.is_ok() && head == *b"\x7fELF\x01"
    }

    /// The socket that a path leads to.
    pub(super) fn socket(self, path: &Path) -> Option<PathBuf> {
        let found = self.follow(path)?;
        let kind = fs::metadata(self.0.join(&found)).ok()?.file_type();
        kind.is_socket().then_some(found)
    }

    /// The directory that a path leads to.
    pub(super) fn dir(self, path: &Path) -> Option<PathBuf> {
        self.follow(path).filter(|found| self.0.join(found).is_dir())
    }

    /// Names in a directory, sorted; none if it cannot be read.
    pub(super) fn names(self, dir: &Path) -> Vec<String> {
        let Some(entries) = self.dir(dir).and_then(|dir| fs::read_dir(self.0.join(dir)).ok()) else {
            return Vec::new();
        };
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Where a path leads, whatever is there.
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

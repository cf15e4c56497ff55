//! `/etc/ld.so.preload`: the node mounts a file with the limiter's one line, and an image may have lines of
//! its own under that mount. Those lines are kept, before the limiter's, in a merged file that is mounted
//! over both.

use crate::cover::{self, CoverError};
use crate::inside::{InsideError, Root};
use std::path::{Path, PathBuf};

/// The reason why the limiter would not be preloaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreloadError {
    /// A list cannot be read.
    #[error(transparent)]
    Inside(#[from] InsideError),
    /// The node's list is not there.
    #[error("{preload} in the container does not name {limiter}: the node's file is not mounted")]
    NotMounted {
        /// The list's path.
        preload: PathBuf,
        /// The stub's path.
        limiter: PathBuf,
    },
    /// The merged list cannot be made.
    #[error(transparent)]
    Merge(#[from] CoverError),
}

/// Returns the libraries that a list names: separated by colons or white space, comments behind `#`.
fn libraries(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|b| *b == b'\n')
        .map(|line| line.split(|b| *b == b'#').next().unwrap_or_default())
        .flat_map(|line| line.split(|b| b.is_ascii_whitespace() || *b == b':'))
        .filter(|name| !name.is_empty())
}

/// Returns the image's libraries followed by the limiter's, each once; `None` if the limiter's list is
/// complete without them.
///
/// The limiter comes last: a library before it that also replaces `dlsym` finds the limiter's behind itself.
fn merge(image: &[u8], node: &[u8]) -> Option<Vec<u8>> {
    let ours: Vec<&[u8]> = libraries(node).collect();
    let mut merged: Vec<&[u8]> = Vec::new();
    for library in libraries(image) {
        if !ours.contains(&library) && !merged.contains(&library) {
            merged.push(library);
        }
    }
    if merged.is_empty() {
        return None;
    }
    merged.extend(ours);
    Some(merged.iter().flat_map(|library| library.iter().copied().chain([b'\n'])).collect())
}

/// Takes away the merged list that the hook of another share of the container has put over the node's.
pub fn uncover(root: &Root, preload: &Path) -> Result<(), PreloadError> {
    Ok(cover::uncover(root, preload)?)
}

/// Checks that the limiter is named, and puts the image's own lines back if it has any.
pub fn apply(root: &Root, preload: &Path, limiter: &Path) -> Result<(), PreloadError> {
    let node = root.read(preload)?.unwrap_or_default();
    if !libraries(&node).any(|library| library == limiter.as_os_str().as_encoded_bytes()) {
        return Err(PreloadError::NotMounted { preload: preload.to_owned(), limiter: limiter.to_owned() });
    }
    let Some(image) = root.without_mounts() else {
        // Without the right to mount, the hook has mounted nothing there either: the list is the image's own.
        return Ok(());
    };
    let image = image.read(preload)?.unwrap_or_default();
    match merge(&image, &node) {
        Some(merged) => Ok(cover::cover(root, preload, &merged)?),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_the_loader_reads_them() {
        let names = |list: &[u8]| -> Vec<String> {
            libraries(list).map(|name| String::from_utf8_lossy(name).into_owned()).collect()
        };
        assert_eq!(names(b"/a.so /b.so:/c.so\n# /d.so\n/e.so # f\n\n"), ["/a.so", "/b.so", "/c.so", "/e.so"]);
        assert!(names(b"").is_empty());
    }

    #[test]
    fn the_images_libraries_come_first_and_ours_once() {
        let ours = b"/usr/local/lib/aliquot/1/libaliquot_preload.so\n".as_slice();
        assert_eq!(merge(b"", ours), None);
        assert_eq!(merge(b"# nothing\n", ours), None);
        assert_eq!(merge(ours, ours), None);
        let merged = merge(b"/j.so\n/usr/local/lib/aliquot/1/libaliquot_preload.so /j.so", ours).unwrap();
        assert_eq!(merged, [b"/j.so\n".as_slice(), ours].concat());
    }

    #[test]
    fn a_list_without_the_limiter_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("etc")).unwrap();
        let root = Root::open(folder.path()).unwrap();
        let apply = || apply(&root, Path::new("/etc/ld.so.preload"), Path::new("/l.so"));
        assert!(matches!(apply(), Err(PreloadError::NotMounted { .. })));
        std::fs::write(folder.path().join("etc/ld.so.preload"), "/l.so.1\n").unwrap();
        assert!(matches!(apply(), Err(PreloadError::NotMounted { .. })));
        std::fs::write(folder.path().join("etc/ld.so.preload"), "/l.so\n").unwrap();
        assert!(apply().is_ok());
    }
}

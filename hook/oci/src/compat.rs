//! CUDA's forward compatibility: whether the libraries for CUDA that an image brings come before the host's.
//!
//! Newer libraries say in a note of their ELF file which branches of the driver they work with, as JSON
//! (`{"Driver": [535, 550], …}`). Libraries without a note work with older branches. The image's author made
//! the file, so every number in it is checked, and no more than a few kibibytes of it are read.

use crate::inside::Root;
use crate::json::numbers_at;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The directory where images have these libraries.
pub(crate) const DIR: &str = "/usr/local/cuda/compat";
/// More files than such a directory has.
const MOST: usize = 64;
/// The name of the section with the note, and the note's owner.
const SECTION: &[u8] = b".note.cuda.fwd_compatibility\0";
const OWNER: &[u8] = b"NVIDIA Corporation\0";
/// The largest table of sections, table of their names, or note, in bytes.
const LARGEST: u64 = 1 << 16;
/// The sizes of the header, of a section's entry and of a note's header, in bytes (ELF of 64 bits).
const HEADER: u64 = 64;
const ENTRY: u64 = 64;
const NOTE: usize = 12;

/// Returns the names of the image's libraries, if they come before those of the host's driver.
pub(crate) fn names(root: &Root, host: &str) -> Vec<String> {
    let names = root.names(Path::new(DIR), MOST);
    let versions = names.iter().filter_map(|name| version(name.strip_prefix("libcuda.so.")?));
    let (Some(image), Some(host)) = (versions.max(), version(host)) else { return Vec::new() };
    let found = names.iter().find(|name| {
        name.strip_prefix("libcuda.so.").and_then(version).is_some_and(|version| version == image)
    });
    let branches = found.and_then(|name| branches(root, &Path::new(DIR).join(name)));
    if comes_first(&image, &host, branches.as_deref()) {
        names.into_iter().filter(|name| name.starts_with("lib") && name.contains(".so")).collect()
    } else {
        Vec::new()
    }
}

/// Returns true if libraries of a version come before the host's, given the branches that they say they work
/// with.
fn comes_first(image: &[u32], host: &[u32], branches: Option<&[u32]>) -> bool {
    match branches {
        Some(branches) => image > host && host.first().is_some_and(|branch| branches.contains(branch)),
        None => image.first() > host.first(),
    }
}

/// Returns the numbers of `535.261.03`; `None` for `1`.
fn version(text: &str) -> Option<Vec<u32>> {
    let parts: Option<Vec<u32>> = text.split('.').map(|part| part.parse().ok()).collect();
    parts.filter(|parts| parts.len() > 1)
}

/// Returns the branches that a library says it works with.
fn branches(root: &Root, path: &Path) -> Option<Vec<u32>> {
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let file = File::from(root.file(path, flags, Mode::empty()).ok()?);
    let note = section(&file)?;
    let number = |at: usize| Some(u32::from_le_bytes(note.get(at..at + 4)?.try_into().ok()?));
    let (owner, length) = (usize::try_from(number(0)?).ok()?, usize::try_from(number(4)?).ok()?);
    if note.get(NOTE..NOTE.checked_add(owner)?)? != OWNER {
        return None;
    }
    // The owner's name is filled up to whole words.
    let start = NOTE.checked_add(owner)?.next_multiple_of(4);
    let text = std::str::from_utf8(note.get(start..start.checked_add(length)?)?).ok()?;
    numbers_at(text.trim_end_matches('\0'), &["Driver"])
}

/// Returns the content of the section with the note.
fn section(file: &File) -> Option<Vec<u8>> {
    let header = read(file, 0, HEADER)?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let short = |at: usize| Some(u64::from(u16::from_le_bytes(header.get(at..at + 2)?.try_into().ok()?)));
    let (size, count, names) = (short(58)?, short(60)?, short(62)?);
    if size != ENTRY || names >= count {
        return None;
    }
    let table = read(file, long(&header, 40)?, ENTRY.checked_mul(count)?)?;
    let entries: Vec<&[u8]> = table.chunks_exact(usize::try_from(ENTRY).ok()?).collect();
    let content = |entry: &[u8]| read(file, long(entry, 24)?, long(entry, 32)?);
    let names = content(entries.get(usize::try_from(names).ok()?)?)?;
    let is_it = |entry: &&&[u8]| {
        let at = entry.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
        let name = at.and_then(|at| names.get(usize::try_from(at).ok()?..));
        name.is_some_and(|name| name.starts_with(SECTION))
    };
    content(entries.iter().find(is_it)?)
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

fn read(file: &File, offset: u64, length: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(length).ok().filter(|_| length <= LARGEST)?];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_come_first_where_they_say_so_and_else_if_their_branch_is_newer() {
        let first = |image: &str, host: &str, branches: Option<&[u32]>| {
            comes_first(&version(image).unwrap(), &version(host).unwrap(), branches)
        };
        assert!(first("550.54.15", "535.261.03", None));
        assert!(!first("535.300.01", "535.261.03", None), "newer releases of a branch need none");
        assert!(first("550.54.15", "535.261.03", Some(&[470, 535])));
        assert!(!first("550.54.15", "545.23.08", Some(&[470, 535])), "not with that branch");
        assert!(first("580.95.05", "580.65.06", Some(&[535, 580])));
        assert!(!first("580.65.06", "580.95.05", Some(&[535, 580])));
        assert_eq!(version("1"), None);
        assert_eq!(version("535.261.03"), Some(vec![535, 261, 3]));
    }

    #[test]
    fn a_file_that_is_no_library_says_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let mut damaged = b"\x7fELF\x02\x01".to_vec();
        damaged.resize(64, 0xff);
        for content in [b"".as_slice(), b"\x7fELF", &damaged] {
            std::fs::write(folder.path().join("l.so"), content).unwrap();
            assert_eq!(branches(&root, Path::new("/l.so")), None);
        }
        nix::unistd::mkfifo(&folder.path().join("pipe"), Mode::S_IRWXU).unwrap();
        assert_eq!(branches(&root, Path::new("/pipe")), None);
    }
}

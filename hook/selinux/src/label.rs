//! Labels: the names under which the policy knows files and processes.

use rustix::fs::{XattrFlags, getxattr, lgetxattr, lsetxattr};
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The extended attribute that holds a file's label.
const ATTRIBUTE: &str = "security.selinux";
/// The longest label, in bytes: the kernel lets no attribute of a file be longer on most file systems.
const LONGEST: usize = 4096;

/// A label: user, role and type, and a level where the policy has levels, such as
/// `system_u:object_r:container_file_t:s0`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label(String);

/// The error of a text that is no label. Holds the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no SELinux label: expected user:role:type or user:role:type:level, such as system_u:object_r:container_file_t:s0"
)]
pub struct NotALabel(String);

impl FromStr for Label {
    type Err = NotALabel;

    fn from_str(text: &str) -> Result<Self, NotALabel> {
        // The kernel reads labels up to white space, and quotes end them in options of mounts.
        let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\'' | b'\\');
        let parts = text.splitn(4, ':');
        let is_label = text.len() < LONGEST
            && text.bytes().all(plain)
            && parts.clone().count() >= 3
            && parts.into_iter().all(|part| !part.is_empty());
        if is_label { Ok(Self(text.to_owned())) } else { Err(NotALabel(text.to_owned())) }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Label {
    /// Returns the label as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads a label from what the kernel gives, which ends in a zero.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        std::str::from_utf8(bytes.get(..end)?).ok()?.trim_end().parse().ok()
    }
}

/// Returns the label of what a path names; a link's own, not that of its target. Returns `None` if there is
/// none.
///
/// # Errors
/// If the label cannot be read, or is one that no policy could have.
pub fn of(path: &Path) -> io::Result<Option<Label>> {
    read(|buffer| lgetxattr(path, ATTRIBUTE, buffer))
}

/// Returns the label of an open file, also of one that was opened as a mere place (`O_PATH`). Returns `None`
/// if there is none.
///
/// # Errors
/// As with [`of`].
pub fn through(file: BorrowedFd<'_>) -> io::Result<Option<Label>> {
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    read(|buffer| getxattr(&path, ATTRIBUTE, buffer))
}

fn read(get: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>) -> io::Result<Option<Label>> {
    let mut buffer = [0; LONGEST];
    let length = match get(&mut buffer) {
        Ok(length) => length,
        Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let label = Label::from_bytes(buffer.get(..length).unwrap_or_default());
    label.map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its label is damaged"))
}

/// Gives a label to what a path names; to a link itself, not to its target. A file that has the label already
/// is not touched, so this also succeeds where a file system is read-only or was mounted with that label.
/// Returns true if the label changed.
///
/// # Errors
/// If the kernel refuses: a label that the policy does not know is `InvalidInput`.
pub fn set(path: &Path, label: &Label) -> io::Result<bool> {
    if of(path).is_ok_and(|found| found.as_ref() == Some(label)) {
        return Ok(false);
    }
    let value = [label.as_str().as_bytes(), b"\0"].concat();
    lsetxattr(path, ATTRIBUTE, &value, XattrFlags::empty())?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::fd::AsFd;

    #[test]
    fn labels_have_three_parts_or_a_level_besides() {
        for text in
            ["a:b:c", "system_u:object_r:container_file_t:s0", "u:r:t:s0-s0:c0.c1023", "u:r:t:s0:c1,c2"]
        {
            assert_eq!(text.parse::<Label>().map(|label| label.to_string()).as_deref(), Ok(text));
        }
        let long = format!("u:r:{}", "t".repeat(LONGEST));
        for text in
            ["", "kernel", "u:r", "u:r:", ":r:t", "u:r:t:", "u:r:t t", "u:r:t\"", "u:r:t\0", "u:r:ü", &long]
        {
            assert_eq!(text.parse::<Label>(), Err(NotALabel(text.to_owned())));
        }
        assert_eq!(Label::from_bytes(b"u:r:t:s0\0").unwrap().as_str(), "u:r:t:s0");
        assert_eq!(Label::from_bytes(b"\xff:r:t"), None);
    }

    #[test]
    fn a_file_keeps_the_label_that_it_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let label = |text: &str| text.parse::<Label>().unwrap();
        let first = label("system_u:object_r:container_file_t:s0");
        match set(&file, &first) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return eprintln!("skipped: only root may give labels here");
            }
            changed => assert!(changed.unwrap()),
        }
        assert_eq!(of(&file).unwrap().as_ref(), Some(&first));
        assert!(!set(&file, &first).unwrap(), "it has it already");
        let second = label("system_u:object_r:container_ro_file_t:s0");
        assert!(set(&file, &second).unwrap());
        let place = File::open(&link).unwrap();
        assert_eq!(through(place.as_fd()).unwrap(), Some(second));
        // The link is another thing than the file.
        assert_eq!(of(&link).unwrap(), None);
        lsetxattr(&file, ATTRIBUTE, b"damage", XattrFlags::empty()).unwrap();
        assert!(of(&file).is_err());
        assert!(set(&file, &first).unwrap(), "damage is mended");
        assert!(set(&folder.path().join("none"), &first).is_err());
    }
}

//! What the loaded policy lets a process do, as the kernel answers it in selinuxfs. Asking changes nothing
//! and is not audited.

use crate::Label;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// The class of a file in the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A regular file.
    File,
    /// A directory.
    Directory,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "dir",
        }
    }
}

/// The permission that policies have had since 2017; older policies have no such permission.
const YOUNG: &str = "map";
/// The longest answer, in bytes.
const LONGEST: usize = 256;

/// The reason why it is not known what the policy allows.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A file of selinuxfs cannot be used.
    #[error("{path} cannot be {what}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The step that failed.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// A file of selinuxfs has another content than it should.
    #[error("{path} says {said:?}, which is not understood")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The content.
        said: String,
    },
    /// The policy does not know one of the labels.
    #[error("the loaded policy does not know one of the labels {process} and {object}")]
    Unknown {
        /// The process's label.
        process: Label,
        /// The file's label.
        object: Label,
    },
}

/// The loaded policy.
#[derive(Clone, Debug)]
pub struct Policy {
    dir: PathBuf,
}

impl Policy {
    /// Returns the policy of the selinuxfs that is mounted at `dir`.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// Returns the policy of the first of these directories that is a selinuxfs.
    pub fn find(dirs: impl IntoIterator<Item = PathBuf>) -> Option<Self> {
        dirs.into_iter().find(|dir| dir.join("access").exists()).map(|dir| Self { dir })
    }

    /// Returns which of the `wanted` permissions a process with one label does not have on a file with the
    /// other. Returns none if denials are only noted, because the system or the process's domain is
    /// permissive.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn denied(
        &self,
        process: &Label,
        object: &Label,
        class: Class,
        wanted: &[&'static str],
    ) -> Result<Vec<&'static str>, PolicyError> {
        if self.number(Path::new("enforce"))? == 0 {
            return Ok(Vec::new());
        }
        let of_class = Path::new("class").join(class.name());
        let index = self.number(&of_class.join("index"))?;
        let question = format!("{process} {object} {index}");
        let path = self.dir.join("access");
        let answer = ask(&path, &question).map_err(|(what, source)| match source.kind() {
            io::ErrorKind::InvalidInput => {
                PolicyError::Unknown { process: process.clone(), object: object.clone() }
            }
            _ => PolicyError::Io { path: path.clone(), what, source },
        })?;
        let answer = Answer::read(&answer).ok_or(PolicyError::Malformed { path, said: answer })?;
        let mut denied = Vec::new();
        for name in wanted {
            let file = of_class.join("perms").join(name);
            match self.number(&file) {
                Ok(bit) if !answer.allows(bit) => denied.push(*name),
                Ok(_) => {}
                Err(PolicyError::Io { source, .. })
                    if *name == YOUNG && source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(denied)
    }

    fn number(&self, file: &Path) -> Result<u32, PolicyError> {
        let path = self.dir.join(file);
        let said = fs::read_to_string(&path).map_err(|source| PolicyError::Io {
            path: path.clone(),
            what: "read",
            source,
        })?;
        said.trim().parse().map_err(|_| PolicyError::Malformed { path, said })
    }
}

/// Writes a question and reads its answer, which the kernel keeps with the open file.
fn ask(path: &Path, question: &str) -> Result<String, (&'static str, io::Error)> {
    let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(|error| ("opened", error))?;
    file.write_all(question.as_bytes()).map_err(|error| ("asked", error))?;
    let mut buffer = [0; LONGEST];
    let length = file.read(&mut buffer).map_err(|error| ("read", error))?;
    Ok(String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned())
}

/// The kernel's answer about a process, a file and a class: `allowed decided auditallow auditdeny seqno
/// flags`, in hexadecimal but for the fifth. Kernels before 2.6.32 have no flags.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    allowed: u32,
    permissive: bool,
}

impl Answer {
    fn read(text: &str) -> Option<Self> {
        let text = text.trim_end_matches(['\0', '\n']);
        let mut words = text.split(' ');
        let mut hexadecimal = || u32::from_str_radix(words.next()?, 16).ok();
        let (allowed, _decided) = (hexadecimal()?, hexadecimal()?);
        let _audited = (hexadecimal()?, hexadecimal()?);
        let _number: u32 = words.next()?.parse().ok()?;
        let flags = words.next().map_or(Some(0), |flags| u32::from_str_radix(flags, 16).ok())?;
        Some(Self { allowed, permissive: flags & 1 != 0 })
    }

    /// Returns true if a permission is allowed; permissions are counted from one.
    fn allows(&self, permission: u32) -> bool {
        let bit = permission.checked_sub(1).and_then(|at| 1_u32.checked_shl(at));
        self.permissive || bit.is_some_and(|bit| self.allowed & bit != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_as_the_kernel_writes_it() {
        let read = |text| Answer::read(text).map(|answer| (answer.allowed, answer.permissive));
        assert_eq!(read("120013 ffffffff 0 fffafff5 7 0"), Some((0x12_0013, false)));
        assert_eq!(read("0 ffffffff 0 ffffffff 7 1\0"), Some((0, true)));
        assert_eq!(read("2 ffffffff 0 ffffffff 7"), Some((2, false)));
        for wrong in [
            "",
            "x",
            "1 2 3",
            "1 2 3 4 x 0",
            "1 2 3 4 5 y",
            "system_u:system_r:a_t:s0 system_u 7",
            "1ffffffff 0 0 0 1 0",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn permissions_are_counted_from_one() {
        let allows = |allowed, permissive, bit| Answer { allowed, permissive }.allows(bit);
        assert!(allows(0b10, false, 2) && !allows(0b10, false, 1) && !allows(0b10, false, 3));
        assert!(allows(1 << 31, false, 32));
        for never in [0, 33, u32::MAX] {
            assert!(!allows(u32::MAX, false, never), "{never}");
        }
        assert!(allows(0, true, 1));
    }
}

//! Gives out groups for claims' daemons and servers: each claim has a group that no other claim has.
//!
//! A process of the same user and group as another, with no fewer rights, may read and change its memory and
//! reach its files and device nodes through `/proc/<pid>/root` (ptrace(2), "Ptrace access mode checking";
//! proc(5)). A daemon is root and can become any user, so only the group keeps claims apart. A daemon cannot
//! change its group, so the group also shows which claim a process belongs to ([`crate::processes`]). The
//! group of a claim's directory is the claim's group; it outlives the supervisor.

use crate::contract::{ClaimDir, FIRST_GROUP, MpsDir};
use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::ffi::OsStrExt;
use std::{fs, io};

/// The number of groups.
const COUNT: u32 = 147_000_000;

/// Gives out groups, each once.
#[derive(Debug)]
pub struct Groups {
    taken: BTreeSet<u32>,
}

impl Groups {
    /// Marks the groups that a claim or a process has now as taken: a predecessor's processes may not have
    /// ended.
    ///
    /// # Errors
    /// Fails if `/proc` or the directory cannot be read.
    pub fn new(dir: &MpsDir) -> io::Result<Self> {
        let claims = dir.claims().map_err(io::Error::other)?;
        let mut taken: BTreeSet<u32> = claims.iter().filter_map(ClaimDir::group).collect();
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            if entry.file_name().as_bytes().iter().all(u8::is_ascii_digit) {
                match fs::read(entry.path().join("status")) {
                    Ok(status) => taken.extend(of(&status).filter(|group| *group >= FIRST_GROUP)),
                    Err(error) if has_ended(&error) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(Self { taken })
    }

    /// Returns a group that no other claim has, or had while this process runs. It is drawn at random, so
    /// that another supervisor on the node, for a driver of another name, does not give out the same groups.
    pub fn another(&mut self) -> u32 {
        loop {
            let drawn = RandomState::new().hash_one(()) % u64::from(COUNT);
            let group = FIRST_GROUP + u32::try_from(drawn).unwrap_or_default();
            if self.taken.insert(group) {
                return group;
            }
        }
    }
}

fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ESRCH)
}

/// Returns the groups in a process's status, except the supplementary ones. A program's name in the status
/// may contain any bytes.
pub(crate) fn of(status: &[u8]) -> impl Iterator<Item = u32> {
    let mut lines = status.split(|byte| *byte == b'\n');
    let line = lines.find_map(|line| line.strip_prefix(b"Gid:")).unwrap_or_default();
    let words = line.split(u8::is_ascii_whitespace).filter_map(|word| std::str::from_utf8(word).ok());
    words.filter_map(|group| group.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_group_is_given_out_twice_or_while_a_process_has_it() {
        assert_eq!(
            of(b"Name:\t\xff\nUid:\t1\t2\nGid:\t0\t7\t7\t2000000001\n").collect::<Vec<_>>(),
            [0, 7, 7, 2_000_000_001]
        );
        let mut groups = Groups { taken: BTreeSet::new() };
        let given: BTreeSet<u32> = (0..1000).map(|_| groups.another()).collect();
        assert_eq!(given.len(), 1000);
        assert!(given.iter().all(|group| (FIRST_GROUP..FIRST_GROUP + COUNT).contains(group)), "{given:?}");
        let mut beside = Groups { taken: BTreeSet::new() };
        assert!(!(0..1000).all(|_| given.contains(&beside.another())), "another supervisor draws others");
    }
}

//! Reads and bounds the logs of a claim's daemon. The daemon's output goes to a file that it has open and
//! cannot replace. In the directory of the other logs the daemon may put anything: a link, a pipe, a lease
//! that delays whoever opens a file. So nothing there is followed or waited for, and only regular files are
//! opened.

use crate::contract::ClaimDir;
use nix::libc::{O_NOFOLLOW, O_NONBLOCK, O_PATH};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The number of bytes from the end of a log that go into a reason.
const TAIL: u64 = 1024;
/// The size in bytes above which a log is truncated.
const MOST_BYTES: u64 = 16 << 20;
/// The largest number of files that are checked; a daemon has two logs.
const MOST_FILES: usize = 64;

/// The output of one daemon.
#[derive(Debug)]
pub(super) struct Printed {
    file: File,
    start: u64,
}

impl Printed {
    /// Opens the claim's log, at the end of the output of earlier daemons.
    pub(super) fn open(claim: &ClaimDir) -> io::Result<Self> {
        let path = claim.control_log();
        // A daemon has the file open, and may hold a lease on it.
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600).custom_flags(O_NOFOLLOW | O_NONBLOCK);
        let file = options.open(path)?;
        let start = file.metadata()?.len();
        Ok(Self { file, start })
    }

    /// Returns another handle of the file, for the daemon.
    pub(super) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Returns the last lines, joined into one.
    pub(super) fn tail(&self) -> String {
        let read = || -> io::Result<String> {
            let length = self.file.metadata()?.len();
            let mut bytes = vec![0; usize::try_from(TAIL).unwrap_or_default()];
            let from = self.start.min(length).max(length.saturating_sub(TAIL));
            let count = self.file.read_at(&mut bytes, from)?;
            bytes.truncate(count);
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let text = read().unwrap_or_default();
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        lines.iter().skip(lines.len().saturating_sub(5)).copied().collect::<Vec<_>>().join(" | ")
    }

    /// Truncates the file when it has become long.
    pub(super) fn bound(&self) {
        // At worst the file is truncated at the next look.
        let _ = cut(&self.file);
    }
}

/// Truncates logs in a daemon's directory that have become long. Clients can make the daemon write lines.
pub(super) fn bound(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten().take(MOST_FILES) {
        // At worst the file is truncated at the next look.
        let _ = open_regular(&entry.path()).and_then(|file| cut(&file));
    }
}

fn cut(file: &File) -> io::Result<()> {
    if file.metadata()?.len() > MOST_BYTES { file.set_len(0) } else { Ok(()) }
}

/// Opens a regular file for writing. The path is first opened only as a handle: opening a device or a pipe
/// may have effects or block.
fn open_regular(path: &Path) -> io::Result<File> {
    let held = OpenOptions::new().read(true).custom_flags(O_PATH | O_NOFOLLOW).open(path)?;
    if !held.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let held = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    OpenOptions::new().write(true).custom_flags(O_NONBLOCK).open(held)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::MpsDir;
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    use std::io::Write;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_a_daemon_puts_among_its_logs_is_neither_followed_nor_waited_for() {
        let temp = tempfile::tempdir().unwrap();
        let victim = temp.path().join("victim");
        let logs = temp.path().join("log");
        fs::create_dir(&logs).unwrap();
        for path in [&victim, &logs.join("server.log")] {
            File::create(path).unwrap().set_len(MOST_BYTES + 1).unwrap();
        }
        symlink(&victim, logs.join("link")).unwrap();
        nix::unistd::mkfifo(&logs.join("pipe"), Mode::S_IRWXU).unwrap();
        if mknod(&logs.join("null"), SFlag::S_IFCHR, Mode::S_IRWXU, makedev(1, 3)).is_err() {
            println!("SKIPPED: a device among the logs: needs root");
        }
        bound(&logs);
        for name in ["link", "pipe", "null"] {
            assert!(open_regular(&logs.join(name)).is_err(), "{name}");
        }
        assert_eq!(fs::metadata(&victim).unwrap().len(), MOST_BYTES + 1);
        assert_eq!(fs::metadata(logs.join("server.log")).unwrap().len(), 0);
    }

    #[test]
    fn the_last_words_are_of_this_daemon_whatever_it_puts_in_its_directory() {
        let temp = tempfile::tempdir().unwrap();
        let claim = MpsDir::new(temp.path()).claim("c-1").unwrap();
        fs::create_dir_all(claim.log()).unwrap();
        nix::unistd::mkfifo(&claim.log().join("control.log"), Mode::S_IRWXU).unwrap();
        for words in ["first", "second"] {
            let printed = Printed::open(&claim).unwrap();
            writeln!(printed.file().unwrap(), "{words}\n\nmore").unwrap();
            assert_eq!(printed.tail(), format!("{words} | more"));
            printed.bound();
        }
    }
}

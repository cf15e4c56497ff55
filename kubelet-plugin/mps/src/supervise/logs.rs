//! Logs of a claim's daemon. What a daemon prints goes to a file that it has open and cannot replace; in the directory
//! of the others it may put anything: a link, a pipe, a lease that delays who opens a file. So nothing there is
//! followed or waited for, and nothing but a regular file is opened.

use crate::contract::ClaimDir;
use nix::libc::{O_NOFOLLOW, O_NONBLOCK, O_PATH};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// How much of the end of a log goes into a reason.
const TAIL: u64 = 1024;
/// Logs are cut when they are longer.
const MOST_BYTES: u64 = 16 << 20;
/// A daemon has two logs. More are looked at no further.
const MOST_FILES: usize = 64;

/// What one daemon prints.
#[derive(Debug)]
pub(super) struct Printed {
    file: File,
    start: u64,
}

impl Printed {
    /// Opens the claim's log, at the end of what earlier daemons printed.
    pub(super) fn open(claim: &ClaimDir) -> io::Result<Self> {
        let path = claim.control_log();
        // A daemon has it open, and may hold a lease on it.
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600).custom_flags(O_NOFOLLOW | O_NONBLOCK);
        let file = options.open(path)?;
        let start = file.metadata()?.len();
        Ok(Self { file, start })
    }

    /// The file, for the daemon.
    pub(super) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// The last lines, as one.
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

    /// Cuts it when it has become long.
    pub(super) fn bound(&self) {
        // At worst it is cut at the next look.
        let _ = cut(&self.file);
    }
}

/// Cuts logs in a daemon's directory that have become long. Clients have the daemon write lines.
pub(super) fn bound(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten().take(MOST_FILES) {
        // At worst it is cut at the next look.
        let _ = open_regular(&entry.path()).and_then(|file| cut(&file));
    }
}

fn cut(file: &File) -> io::Result<()> {
    if file.metadata()?.len() > MOST_BYTES { file.set_len(0) } else { Ok(()) }
}

/// Opens a file to write to it. First it is only held: to open a device or a pipe may do something or wait.
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

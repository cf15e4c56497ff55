//! Removes trees of any depth and width, with three descriptors and no recursion.
//!
//! A directory's subdirectories are renamed into the trash itself and are removed later, so each directory is
//! emptied without a path and without descending. Everything is relative to open directories: no name is
//! resolved twice and no link is followed. No mount is entered: a mount point cannot be renamed.

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, open, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The number of names that are remembered at a time.
const AT_ONCE: usize = 4096;

/// Empties a directory, which is made if it is missing, except for the entries in `spare`. Returns the
/// entries that could not be removed, with the reason; all others are still tried. Ends early once `stop` is
/// set. Only one process at a time does anything.
///
/// # Errors
/// Fails if the directory itself cannot be opened or listed.
pub fn sweep(dir: &Path, spare: &[OsString], stop: &AtomicBool) -> io::Result<Vec<(OsString, io::Error)>> {
    std::fs::create_dir_all(dir)?;
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let lock =
        match Flock::lock(File::from(open(dir, flags, Mode::empty())?), FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            // During an update the other instance is working on it.
            Err((_, Errno::EWOULDBLOCK)) => return Ok(Vec::new()),
            Err((_, errno)) => return Err(errno.into()),
        };
    let mut work = Work { trash: lock.as_fd(), next: AtomicU64::new(0), todo: Vec::new() };
    let mut failed: Vec<(OsString, io::Error)> = Vec::new();
    let mut skip: BTreeSet<CString> = spare.iter().filter_map(|name| c_string(name)).collect();
    while !stop.load(Ordering::Relaxed) {
        if work.todo.is_empty() {
            work.todo = work.list(&skip)?;
        }
        let Some(name) = work.todo.pop() else { break };
        if let Err((name, errno)) = work.remove(name, stop) {
            failed.push((OsString::from_vec(name.to_bytes().to_vec()), errno.into()));
            skip.insert(name);
        }
    }
    Ok(failed)
}

fn c_string(name: &OsStr) -> Option<CString> {
    CString::new(name.as_bytes()).ok()
}

struct Work<'a> {
    trash: BorrowedFd<'a>,
    next: AtomicU64,
    /// The entries of the trash that are to be removed. Entries that have no room here are found by the next
    /// listing.
    todo: Vec<CString>,
}

impl Work<'_> {
    fn list(&self, skip: &BTreeSet<CString>) -> io::Result<Vec<CString>> {
        let mut dir = self.open(c".")?;
        let mut names = Vec::new();
        for entry in dir.iter() {
            let entry = entry?;
            let name = entry.file_name();
            if !is_dots(name) && !skip.contains(name) {
                names.push(name.to_owned());
                if names.len() == AT_ONCE {
                    break;
                }
            }
        }
        Ok(names)
    }

    fn open(&self, name: &CStr) -> nix::Result<Dir> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Dir::from_fd(openat(self.trash, name, flags, Mode::empty())?)
    }

    /// Removes one entry of the trash. If it is a directory, everything but its subdirectories is removed;
    /// these then are entries of the trash. An error comes with the name that the entry has by then.
    fn remove(&mut self, name: CString, stop: &AtomicBool) -> Result<(), (CString, Errno)> {
        match unlinkat(self.trash, name.as_c_str(), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => return Ok(()),
            Err(Errno::EISDIR | Errno::EPERM) => {}
            Err(errno) => return Err((name, errno)),
        }
        // The rename shows that the entry is no mount point.
        let own = match self.take(self.trash, &name) {
            Ok(own) => own,
            Err(Errno::ENOENT) => return Ok(()),
            Err(errno) => return Err((name, errno)),
        };
        self.remove_dir(&own, stop).map_err(|errno| (own, errno))
    }

    fn remove_dir(&mut self, name: &CStr, stop: &AtomicBool) -> nix::Result<()> {
        loop {
            match unlinkat(self.trash, name, UnlinkatFlags::RemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => return Ok(()),
                Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
                // This is no directory, but a file that could not be unlinked before.
                Err(Errno::ENOTDIR) => return unlinkat(self.trash, name, UnlinkatFlags::NoRemoveDir),
                Err(errno) => return Err(errno),
            }
            let (removed, failed) = self.strip(name, stop)?;
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            // A listing during removal can miss entries; the loop ends when there is no progress.
            match failed {
                Some(errno) => return Err(errno),
                None if removed == 0 => return Err(Errno::ENOTEMPTY),
                None => {}
            }
        }
    }

    /// Removes the files of a directory and moves its subdirectories into the trash. Returns the number of
    /// entries removed and moved, and the last failure.
    fn strip(&mut self, name: &CStr, stop: &AtomicBool) -> nix::Result<(u64, Option<Errno>)> {
        let mut dir = self.open(name)?;
        // A second descriptor of the same directory, as the first is borrowed by the listing.
        let at = dir.as_fd().try_clone_to_owned().map_err(|error| errno_of(&error))?;
        let (mut removed, mut failed) = (0, None);
        for entry in dir.iter() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let entry = entry?;
            let inner = entry.file_name();
            if is_dots(inner) {
                continue;
            }
            let is_dir = entry.file_type() == Some(Type::Directory);
            let unlinked =
                if is_dir { Err(Errno::EISDIR) } else { unlinkat(&at, inner, UnlinkatFlags::NoRemoveDir) };
            let done = match unlinked {
                Ok(()) | Err(Errno::ENOENT) => Ok(()),
                Err(Errno::EISDIR) => self.take(&at, inner).map(|own| {
                    if self.todo.len() < AT_ONCE {
                        self.todo.push(own);
                    }
                }),
                Err(errno) => Err(errno),
            };
            match done {
                Ok(()) | Err(Errno::ENOENT) => removed += 1,
                Err(errno) => failed = Some(errno),
            }
        }
        Ok((removed, failed))
    }

    /// Renames an entry of a directory into the trash, under a name that is free.
    fn take(&self, from: impl AsFd, name: &CStr) -> nix::Result<CString> {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let own = CString::new(format!(".{number}")).unwrap_or_default();
            match renameat(&from, name, self.trash, own.as_c_str()) {
                Ok(()) => return Ok(own),
                // The name was used by an earlier process. An empty directory of that name is replaced, which
                // removes it.
                Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
}

fn is_dots(name: &CStr) -> bool {
    matches!(name.to_bytes(), b"." | b"..")
}

fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

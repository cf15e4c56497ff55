//! Implements the locks that show whether a supervisor is there. The kernel drops them with the process, so
//! nothing here depends on a clock or a process ID.

use super::directory::failed;
use super::{ContractError, MpsDir};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The right to put the directory in order: no other supervisor runs, and the agent sees none yet.
#[derive(Debug)]
pub struct Sole {
    dir: MpsDir,
    lock: Flock<File>,
}

/// A supervisor that the agent sees. When it is dropped, the agent no longer sees it.
#[derive(Debug)]
pub struct Announced {
    _seen: Flock<File>,
    _sole: Flock<File>,
}

impl MpsDir {
    /// Returns true while a supervisor serves this directory. Never waits.
    ///
    /// # Errors
    /// Fails if the lock file cannot be opened, or cannot be locked for another reason than a supervisor.
    /// Without a file there is no supervisor.
    pub fn is_served(&self) -> Result<bool, ContractError> {
        let path = self.lock();
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(source) => return Err(failed("open", &path)(source)),
        };
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Ok(_) => Ok(false),
            Err((_, Errno::EWOULDBLOCK)) => Ok(true),
            Err((_, errno)) => Err(failed("lock", &path)(errno.into())),
        }
    }
}

impl Sole {
    /// Becomes the only supervisor of a directory, which is made if it does not exist.
    ///
    /// # Errors
    /// Fails with [`ContractError::AnotherSupervisor`], or if the file system refuses.
    pub fn take(dir: &MpsDir) -> Result<Self, ContractError> {
        fs::create_dir_all(dir.path()).map_err(failed("create", dir.path()))?;
        let path = dir.sole();
        match Flock::lock(open(&path)?, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Self { dir: dir.clone(), lock }),
            Err((_, Errno::EWOULDBLOCK)) => Err(ContractError::AnotherSupervisor(dir.path().to_owned())),
            Err((_, errno)) => Err(failed("lock", &path)(errno.into())),
        }
    }

    /// Makes this supervisor visible to the agent. Waits while the agent checks the lock, which takes it no
    /// time.
    ///
    /// # Errors
    /// Fails if the file system refuses.
    pub fn announce(self) -> Result<Announced, ContractError> {
        let path = self.dir.lock();
        let mut file = open(&path)?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusive) {
                Ok(seen) => return Ok(Announced { _seen: seen, _sole: self.lock }),
                Err((again, Errno::EINTR)) => file = again,
                Err((_, errno)) => return Err(failed("lock", &path)(errno.into())),
            }
        }
    }
}

fn open(path: &Path) -> Result<File, ContractError> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600).open(path).map_err(failed("open", path))
}

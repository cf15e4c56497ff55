//! Waits for locks that another process may have for a moment.

use super::StoreError;
use super::files::io_error;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The first pause. Locks are held for a millisecond or so, and a call that has to wait for one should not
/// wait for much longer.
const SHORTEST: Duration = Duration::from_micros(200);
/// The longest pause; pauses grow up to it.
const RETRY: Duration = Duration::from_millis(20);

/// Opens a lock file; makes it and its directory if they do not exist.
///
/// # Errors
/// Fails if the file system refuses.
pub(crate) fn open_lock(path: &Path) -> Result<File, StoreError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let opened = match (options.open(path), path.parent()) {
        (Err(error), Some(dir)) if error.kind() == ErrorKind::NotFound => {
            fs::create_dir_all(dir).map_err(io_error("create", dir))?;
            options.open(path)
        }
        (opened, _) => opened,
    };
    opened.map_err(io_error("open", path))
}

/// Repeats an attempt until it returns something; makes at least one attempt. Blocks the thread for at most
/// `timeout`, and returns `None` then.
///
/// # Errors
/// Fails with the first error of an attempt.
pub(crate) fn patiently<T, E>(
    timeout: Duration,
    mut attempt: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let started = Instant::now();
    let mut pause = SHORTEST;
    loop {
        let found = attempt()?;
        if found.is_some() || started.elapsed() >= timeout {
            return Ok(found);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(RETRY);
    }
}

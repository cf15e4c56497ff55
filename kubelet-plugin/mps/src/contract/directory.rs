//! Reads and writes the directory that agent and supervisor share, and the files in it. Writers replace files
//! by rename, so readers see all of a file or nothing.

use super::{Ask, ContractError, FIRST_GROUP, State};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The shared directory, `<plugin-dir>/<driver>/mps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsDir(PathBuf);

/// The directory of one claim in the shared directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimDir {
    path: PathBuf,
    uid: String,
}

impl MpsDir {
    /// Uses the directory at `path`, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Returns the directory's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of the file that the supervisor holds a lock on while it serves.
    pub fn lock(&self) -> PathBuf {
        self.0.join("supervisor.lock")
    }

    /// Returns the path of the file whose lock makes the supervisor the only one.
    pub fn sole(&self) -> PathBuf {
        self.0.join("supervisor.sole")
    }

    /// Returns the directory of a claim, which need not exist.
    ///
    /// # Errors
    /// Fails with [`ContractError::NoUid`] if the UID could lead to another path.
    pub fn claim(&self, uid: &str) -> Result<ClaimDir, ContractError> {
        if uid.is_empty() || !uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            return Err(ContractError::NoUid(uid.to_owned()));
        }
        Ok(ClaimDir { path: self.0.join(uid), uid: uid.to_owned() })
    }

    /// Returns the claims' directories that exist, by UID. A directory whose name cannot be a UID belongs to
    /// no claim.
    ///
    /// # Errors
    /// Fails if the directory cannot be read. If the directory does not exist, there are no claims.
    pub fn claims(&self) -> Result<Vec<ClaimDir>, ContractError> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(failed("read", &self.0)(source)),
        };
        let mut claims = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed("read", &self.0))?;
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let claim = entry.file_name().to_str().and_then(|name| self.claim(name).ok());
            claims.extend(claim.filter(|_| is_dir));
        }
        claims.sort();
        Ok(claims)
    }
}

impl ClaimDir {
    /// Returns the directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the claim's UID.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// Returns the claim's group, once it has one: the group of its directory.
    pub fn group(&self) -> Option<u32> {
        let group = fs::metadata(&self.path).ok()?.gid();
        (group >= FIRST_GROUP).then_some(group)
    }

    /// Gives the claim a group.
    ///
    /// # Errors
    /// Fails if the file system refuses.
    pub fn set_group(&self, group: u32) -> io::Result<()> {
        std::os::unix::fs::chown(&self.path, None, Some(group))
    }

    /// Returns the directory in which the daemon makes its sockets; the claim's containers have it at
    /// [`PIPE_DIR`](super::PIPE_DIR).
    pub fn pipe(&self) -> PathBuf {
        self.path.join("pipe")
    }

    /// Returns the directory of the shared memory of the daemon and of the claim's containers, which have it
    /// at `/dev/shm`.
    pub fn shm(&self) -> PathBuf {
        self.path.join("shm")
    }

    /// Returns the directory in which the daemon writes its logs.
    pub fn log(&self) -> PathBuf {
        self.path.join("log")
    }

    /// Returns the path of the file with the daemon's output. The daemon cannot put anything else in its
    /// place.
    pub fn control_log(&self) -> PathBuf {
        self.path.join("control.log")
    }

    /// Returns the path of the file with the agent's ask.
    pub fn ask_file(&self) -> PathBuf {
        self.path.join("ask.json")
    }

    /// Returns the path of the file with the supervisor's answer.
    pub fn state_file(&self) -> PathBuf {
        self.path.join("state.json")
    }

    /// Reads the agent's ask. Returns `None` if the agent asks for nothing, or no longer does.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is of another version or claim, or if no daemon can be started for
    /// it.
    pub fn ask(&self) -> Result<Option<Ask>, ContractError> {
        let path = self.ask_file();
        let Some(ask) = read::<Ask>(&path)? else { return Ok(None) };
        let other = (ask.claim.uid != self.uid).then(|| format!("it is of claim {}", ask.claim.uid));
        match other.or_else(|| ask.fault()) {
            None => Ok(Some(ask)),
            Some(reason) => Err(ContractError::Unreadable { path, reason }),
        }
    }

    /// Asks for a daemon. The claim's directory must exist, with `pipe/`, `shm/` and `log/` in it.
    ///
    /// # Errors
    /// Fails if the file system refuses; the earlier ask is then still there.
    pub fn write_ask(&self, ask: &Ask) -> Result<(), ContractError> {
        write(&self.ask_file(), ask)
    }

    /// Returns the path of the file with the ask that [`Self::withdraw_ask`] withdrew.
    pub fn withdrawn_file(&self) -> PathBuf {
        self.path.join("withdrawn.json")
    }

    /// Withdraws the ask, and keeps it for [`Self::withdrawn`]. It is no error if there was no ask.
    ///
    /// # Errors
    /// Fails if the file system refuses.
    pub fn withdraw_ask(&self) -> Result<(), ContractError> {
        let path = self.ask_file();
        match fs::rename(&path, self.withdrawn_file()) {
            Ok(()) => sync_parent(&path),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            // There is no room for the other name.
            Err(_) => remove(&path),
        }
    }

    /// Reads the ask that [`Self::withdraw_ask`] withdrew.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is of another version.
    pub fn withdrawn(&self) -> Result<Option<Ask>, ContractError> {
        read(&self.withdrawn_file())
    }

    /// Reads the supervisor's answer. Returns `None` if there is none yet, or none any more. The answer of a
    /// supervisor that died must be ignored: see [`MpsDir::is_served`].
    ///
    /// # Errors
    /// Fails if the file cannot be read or is of another version.
    pub fn state(&self) -> Result<Option<State>, ContractError> {
        read(&self.state_file())
    }

    /// Writes the supervisor's answer.
    ///
    /// # Errors
    /// Fails if the file system refuses; the earlier answer is then still there.
    pub fn write_state(&self, state: &State) -> Result<(), ContractError> {
        write(&self.state_file(), state)
    }

    /// Removes the answer, once there is no daemon any more. It is no error if there was no answer.
    ///
    /// # Errors
    /// Fails if the file system refuses.
    pub fn remove_state(&self) -> Result<(), ContractError> {
        remove(&self.state_file())
    }
}

/// Builds the error of an action on a path.
pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ContractError {
    let path = path.to_owned();
    move |error| ContractError::Io { action, path, error }
}

/// The part of a file that is read and checked before everything else.
#[derive(serde::Deserialize)]
struct Head {
    #[serde(rename = "version")]
    _version: super::Version,
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ContractError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed("read", path)(source)),
    };
    serde_json::from_slice::<Head>(&text)
        .and_then(|_| serde_json::from_slice(&text))
        .map(Some)
        .map_err(|error| ContractError::Unreadable { path: path.to_owned(), reason: error.to_string() })
}

fn write<T: Serialize>(path: &Path, content: &T) -> Result<(), ContractError> {
    let mut text = serde_json::to_vec(content).map_err(|error| failed("write", path)(error.into()))?;
    text.push(b'\n');
    let temp = path.with_extension("tmp");
    let replaced = put(&temp, &text).and_then(|()| fs::rename(&temp, path));
    if replaced.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temp);
    }
    replaced.map_err(failed("write", path))?;
    sync_parent(path)
}

fn put(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(text)?;
    file.sync_all()
}

fn remove(path: &Path) -> Result<(), ContractError> {
    match fs::remove_file(path) {
        Ok(()) => sync_parent(path),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(source) => Err(failed("remove", path)(source)),
    }
}

/// Syncs the directory of a renamed or removed file, so that the change lasts.
fn sync_parent(path: &Path) -> Result<(), ContractError> {
    let parent = path.parent().unwrap_or(path);
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(failed("sync", parent))
}

//! The directory that both have, and the files in it. Writers replace files by rename, so readers see all or nothing.

use super::{Ask, ContractError, State};
use crate::groups;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// `<plugin-dir>/<driver>/mps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsDir(PathBuf);

/// The directory of one claim in it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimDir {
    path: PathBuf,
    uid: String,
}

impl MpsDir {
    /// The directory at `path`, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The file that the supervisor holds a lock on while it serves.
    pub fn lock(&self) -> PathBuf {
        self.0.join("supervisor.lock")
    }

    /// The file that makes the supervisor the only one.
    pub fn sole(&self) -> PathBuf {
        self.0.join("supervisor.sole")
    }

    /// The directory of a claim, which need not exist.
    ///
    /// # Errors
    /// [`ContractError::NoUid`] where the uid could lead elsewhere.
    pub fn claim(&self, uid: &str) -> Result<ClaimDir, ContractError> {
        if uid.is_empty() || !uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            return Err(ContractError::NoUid(uid.to_owned()));
        }
        Ok(ClaimDir { path: self.0.join(uid), uid: uid.to_owned() })
    }

    /// The claims' directories that exist, by uid. A directory of another name is none of a claim.
    ///
    /// # Errors
    /// If the directory cannot be read; one that does not exist has none.
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
    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The claim's uid.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// The claim's group, once it has one: that of its directory.
    pub fn group(&self) -> Option<u32> {
        let group = fs::metadata(&self.path).ok()?.gid();
        (group >= groups::FIRST).then_some(group)
    }

    /// Gives the claim a group.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn set_group(&self, group: u32) -> io::Result<()> {
        std::os::unix::fs::chown(&self.path, None, Some(group))
    }

    /// Where the daemon makes its sockets; the claim's containers have it at [`PIPE_DIR`](super::PIPE_DIR).
    pub fn pipe(&self) -> PathBuf {
        self.path.join("pipe")
    }

    /// The shared memory of the daemon and of the claim's containers, which have it at `/dev/shm`.
    pub fn shm(&self) -> PathBuf {
        self.path.join("shm")
    }

    /// Where the daemon writes its logs.
    pub fn log(&self) -> PathBuf {
        self.path.join("log")
    }

    /// What the daemon prints. It lies where the daemon cannot put anything else in its place.
    pub fn control_log(&self) -> PathBuf {
        self.path.join("control.log")
    }

    /// The file with what the agent asks.
    pub fn ask_file(&self) -> PathBuf {
        self.path.join("ask.json")
    }

    /// The file with what the supervisor answers.
    pub fn state_file(&self) -> PathBuf {
        self.path.join("state.json")
    }

    /// Reads what the agent asks; none: nothing, or no more.
    ///
    /// # Errors
    /// If it cannot be read, is of another version or claim, or no daemon can be started for it.
    pub fn ask(&self) -> Result<Option<Ask>, ContractError> {
        let path = self.ask_file();
        let Some(ask) = read::<Ask>(&path)? else { return Ok(None) };
        let other = (ask.claim.uid != self.uid).then(|| format!("it is of claim {}", ask.claim.uid));
        match other.or_else(|| ask.fault()) {
            None => Ok(Some(ask)),
            Some(reason) => Err(ContractError::Unreadable { path, reason }),
        }
    }

    /// Asks for a daemon. The claim's directory exists, with `pipe/`, `shm/` and `log/` in it.
    ///
    /// # Errors
    /// If the file system refuses; what was there before is then still there.
    pub fn write_ask(&self, ask: &Ask) -> Result<(), ContractError> {
        write(&self.ask_file(), ask)
    }

    /// The file with what the agent asked until [`Self::withdraw_ask`].
    pub fn withdrawn_file(&self) -> PathBuf {
        self.path.join("withdrawn.json")
    }

    /// Asks for no daemon any more, and keeps what was asked for [`Self::withdrawn`]. It is no error if nothing was
    /// asked.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn withdraw_ask(&self) -> Result<(), ContractError> {
        let path = self.ask_file();
        match fs::rename(&path, self.withdrawn_file()) {
            Ok(()) => sync_parent(&path),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            // No room for the other name.
            Err(_) => remove(&path),
        }
    }

    /// Reads what the agent asked until [`Self::withdraw_ask`].
    ///
    /// # Errors
    /// If it cannot be read or is of another version.
    pub fn withdrawn(&self) -> Result<Option<Ask>, ContractError> {
        read(&self.withdrawn_file())
    }

    /// Reads what the supervisor answers; none: nothing yet, or nothing more. What a supervisor that died has
    /// answered is to be passed over: see [`MpsDir::is_served`].
    ///
    /// # Errors
    /// If it cannot be read or is of another version.
    pub fn state(&self) -> Result<Option<State>, ContractError> {
        read(&self.state_file())
    }

    /// Answers.
    ///
    /// # Errors
    /// If the file system refuses; what was there before is then still there.
    pub fn write_state(&self, state: &State) -> Result<(), ContractError> {
        write(&self.state_file(), state)
    }

    /// Says that there is no daemon any more. It is no error if nothing was said.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn remove_state(&self) -> Result<(), ContractError> {
        remove(&self.state_file())
    }
}

/// Makes the error of an action on a path.
pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ContractError {
    let path = path.to_owned();
    move |error| ContractError::Io { action, path, error }
}

/// The part of a file that is read before everything else in it is judged.
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

/// Makes a renamed or removed file last.
fn sync_parent(path: &Path) -> Result<(), ContractError> {
    let parent = path.parent().unwrap_or(path);
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(failed("sync", parent))
}

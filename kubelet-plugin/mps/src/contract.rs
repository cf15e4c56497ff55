//! What the node agent asks of the supervisor of MPS daemons, and what the supervisor answers.
//!
//! Both have one directory of the host at the same path; only root may write to it:
//!
//! ```text
//! supervisor.lock        the supervisor holds an exclusive flock on it while it serves
//! supervisor.sole        the same, from its start: there is one supervisor at a time
//! <claim uid>/           made and removed by the agent
//!   ask.json             [`Ask`], written by the agent last and removed by it first
//!   withdrawn.json       what was in `ask.json`, for the agent: on which GPUs a daemon may still be running
//!   state.json           [`State`], written and removed by the supervisor
//!   control.log          what the daemon prints; it has the open file, and not this directory
//!   pipe/  shm/          mounted into the claim's containers, each a file system of its own
//!   log/                 written by the daemon, not mounted into containers
//! ```
//!
//! While `ask.json` is there the supervisor keeps a control daemon for the claim. Once it is gone the supervisor ends
//! the daemon and then removes `state.json`, so the claim's directory may go when `state.json` is absent. Where no
//! supervisor is there, the daemon may have outlived it: the directory may go when the driver lists no process on the
//! claim's GPUs. A state that a dead supervisor left behind is never seen beside a living one: a supervisor
//! removes what its predecessor left before it takes `supervisor.lock`.

mod directory;
mod lock;

pub use directory::{ClaimDir, MpsDir};
pub use lock::{Announced, Sole};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Where a claim's containers and its daemon have `pipe/`: CUDA's default, at which programs look without being told.
pub const PIPE_DIR: &str = "/tmp/nvidia-mps";

/// How long a supervisor gives a daemon to be ready. Whoever waits for one waits longer, or it would take back what it
/// asked before the supervisor can say why there is none.
pub const ANSWER: Duration = Duration::from_secs(20);

/// Bytes of the unit in which the control daemon takes a limit of pinned memory.
pub const LIMIT_UNIT: u64 = 1 << 20;

/// Why something of the contract cannot be read, written or kept.
#[derive(Debug, thiserror::Error)]
pub enum ContractError {
    /// The file system refused.
    #[error("cannot {action} {}: {error}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// A file says what this release does not understand.
    #[error("{} does not read: {reason}", path.display())]
    Unreadable {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A claim's uid that cannot name a directory.
    #[error("{0:?} is no uid of a claim: expected letters, digits and hyphens, as the API server writes it")]
    NoUid(String),
    /// There is a supervisor already.
    #[error(
        "another aliquot-mps serves {}; there is one for each node: stop the other one, or wait for it to end", .0.display()
    )]
    AnotherSupervisor(PathBuf),
}

/// The version of the contract's files. It reads and writes [`Version::NUMBER`] and refuses any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Version;

impl Version {
    /// The only version there is.
    pub const NUMBER: u32 = 1;
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(Self::NUMBER)
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u32::deserialize(deserializer)? {
            Self::NUMBER => Ok(Self),
            other => Err(serde::de::Error::custom(format!(
                "it has version {other}, and this release knows version {} alone: the agent and aliquot-mps on this \
                 node must be of releases that fit; delete the pod of aliquot-mps once no claim uses MPS there",
                Self::NUMBER
            ))),
        }
    }
}

/// The daemon that a claim needs. A field that this release does not know is refused, for it could be a limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ask {
    /// Version of this file.
    pub version: Version,
    /// The claim.
    pub claim: ClaimRef,
    /// Its GPUs, in the order in which its programs see them.
    pub gpus: Vec<AskedGpu>,
    /// Most percent of the multiprocessors that one client may use; none: all.
    pub active_thread_percentage: Option<u32>,
    /// Most device memory that one client may have on each GPU, in bytes; none: all. The daemon counts in
    /// [`LIMIT_UNIT`], rounded down.
    pub pinned_device_memory_limit_bytes: Option<u64>,
}

/// A ResourceClaim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Uid; it names the claim's directory.
    pub uid: String,
}

/// A GPU of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskedGpu {
    /// NVML's UUID of it, `GPU-…`.
    pub uuid: String,
    /// Minor number of its device node, `/dev/nvidia<minor>`.
    pub minor: u32,
}

impl Ask {
    /// Returns why no daemon can be started for this.
    pub fn fault(&self) -> Option<String> {
        let plain = |uuid: &str| {
            !uuid.is_empty() && uuid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        if self.gpus.is_empty() {
            return Some("it names no GPU".to_owned());
        }
        if let Some(gpu) = self.gpus.iter().find(|gpu| !plain(&gpu.uuid)) {
            return Some(format!("{:?} is no UUID of a GPU", gpu.uuid));
        }
        if let Some(percent) = self.active_thread_percentage.filter(|percent| !(1..=100).contains(percent)) {
            return Some(format!("activeThreadPercentage is {percent}, and must be from 1 to 100"));
        }
        let small = |limit: &u64| *limit < LIMIT_UNIT;
        self.pinned_device_memory_limit_bytes.filter(small).map(|limit| {
            format!(
                "pinnedDeviceMemoryLimitBytes is {limit}, and MPS counts in MiB: use at least {LIMIT_UNIT}"
            )
        })
    }
}

/// How far the supervisor is with a claim's daemon. Fields of a later release are passed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// Version of this file.
    pub version: Version,
    /// How far.
    pub state: Phase,
    /// Why it is not ready, where there is more to say than that it starts.
    pub reason: Option<String>,
    /// The control daemon's process id as the supervisor sees it, while there is one.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u32,
}

/// How far a daemon is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// It is being started, also after it ended by itself.
    Starting,
    /// It answered a command, and all limits are set.
    Ready,
    /// It failed several times in a row. It is tried again all the same.
    Failed,
}

#[cfg(test)]
mod tests;

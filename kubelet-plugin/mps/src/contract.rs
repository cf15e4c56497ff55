//! The contract between the node agent, which asks for MPS daemons, and their supervisor, which answers.
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
//! While `ask.json` is there, the supervisor keeps a control daemon for the claim. Once the file is gone, the
//! supervisor ends the daemon and then removes `state.json`. So the claim's directory may be removed when
//! `state.json` is absent. If there is no supervisor, the daemon may have outlived it; then the directory may
//! be removed when the driver lists no process on the claim's GPUs. A state that a dead supervisor left is
//! never visible while another supervisor serves: a supervisor removes its predecessor's files before it
//! takes `supervisor.lock`.

mod directory;
mod lock;

pub use directory::{ClaimDir, MpsDir};
pub use lock::{Announced, Sole};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The path of `pipe/` in the claim's containers and in its daemon. It is CUDA's default, at which programs
/// look without being told.
pub const PIPE_DIR: &str = "/tmp/nvidia-mps";

/// The time that a supervisor gives a daemon to become ready. A caller that waits for a daemon waits longer.
/// Otherwise it would withdraw its ask before the supervisor can say why there is no daemon.
pub const ANSWER: Duration = Duration::from_secs(20);

/// The first group that a claim may have for itself. No range that systemd knows of contains it or those above.
pub const FIRST_GROUP: u32 = 2_000_000_000;

/// Bytes in one unit of the control daemon's limit of pinned memory.
pub const LIMIT_UNIT: u64 = 1 << 20;

/// The reason why a file of the contract cannot be read or written, or the contract cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum ContractError {
    /// The file system refused an action.
    #[error("cannot {action} {}: {error}", path.display())]
    Io {
        /// The action that was tried.
        action: &'static str,
        /// The path of the action.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A file has content that this release does not understand.
    #[error("{} does not read: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The fault in the file.
        reason: String,
    },
    /// The claim's UID cannot name a directory.
    #[error("{0:?} is no uid of a claim: expected letters, digits and hyphens, as the API server writes it")]
    NoUid(String),
    /// Another supervisor is already running.
    #[error(
        "another aliquot-mps serves {}; there is one for each node: stop the other one, or wait for it to end", .0.display()
    )]
    AnotherSupervisor(PathBuf),
}

/// The version of the contract's files. Serializes as [`Version::NUMBER`] and refuses to deserialize any
/// other number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Version;

impl Version {
    /// The only version so far.
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

/// The daemon that a claim needs. A field that this release does not know is refused, because it could be a
/// limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ask {
    /// The version of this file.
    pub version: Version,
    /// The claim.
    pub claim: ClaimRef,
    /// The claim's GPUs, in the order in which its programs see them.
    pub gpus: Vec<AskedGpu>,
    /// The largest percentage of the multiprocessors that one client may use; `None` means all.
    pub active_thread_percentage: Option<u32>,
    /// The most device memory, in bytes, that one client may have on each GPU; `None` means all. The daemon
    /// counts in units of [`LIMIT_UNIT`], rounded down.
    pub pinned_device_memory_limit_bytes: Option<u64>,
}

/// The identity of a ResourceClaim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimRef {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The UID; it is the name of the claim's directory.
    pub uid: String,
}

/// A GPU of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskedGpu {
    /// The GPU's UUID as NVML writes it, `GPU-…`.
    pub uuid: String,
    /// The minor number of the GPU's device node, `/dev/nvidia<minor>`.
    pub minor: u32,
}

impl Ask {
    /// Returns the reason why no daemon can be started for this ask, or `None`.
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

/// The supervisor's progress with a claim's daemon. Fields of a later release are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// The version of this file.
    pub version: Version,
    /// The phase of the daemon.
    pub state: Phase,
    /// The reason why the daemon is not ready, if there is more to say than that it is starting.
    pub reason: Option<String>,
    /// The control daemon's process ID as the supervisor sees it, while there is a daemon.
    pub pid: Option<u32>,
    /// The number of times that the daemon was started again.
    pub restarts: u32,
}

/// The phase of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The daemon is being started, for the first time or after it ended by itself.
    Starting,
    /// The daemon has answered a command, and all limits are set.
    Ready,
    /// The daemon failed several times in a row. The supervisor still tries again.
    Failed,
}

#[cfg(test)]
mod tests;

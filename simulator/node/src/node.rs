//! An open node.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::board::GiProfile;
use crate::error::NodeError;
use crate::layout::{MAX_POOLS, State};
use crate::map::{Locked, Mapping};
use crate::spec::{Gpu, NodeSpec};

/// The node directory where the environment names none.
pub const DEFAULT_DIR: &str = "/run/aliquot-sim";

/// Where memory is: a whole GPU, or one of its GPU instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pool {
    /// GPU index.
    pub gpu: usize,
    /// GPU instance id.
    pub gi: Option<u32>,
}

impl Pool {
    /// The memory of a GPU with MIG off.
    pub fn whole(gpu: usize) -> Self {
        Self { gpu, gi: None }
    }

    /// The memory of a GPU instance.
    pub fn instance(gpu: usize, gi: u32) -> Self {
        Self { gpu, gi: Some(gi) }
    }

    pub(crate) fn column(self) -> usize {
        self.gi.map_or(0, |gi| usize::try_from(gi).unwrap_or(MAX_POOLS) + 1)
    }
}

/// A simulated node, opened by this process. All processes that open the same directory share its state.
pub struct Node {
    pub(crate) spec: NodeSpec,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) dir: PathBuf,
    pub(crate) map: Mapping,
    /// Our process slot + 1 as last seen; 0 is none. A hint: the slot itself says whose it is.
    pub(crate) slot_hint: AtomicUsize,
    /// The boot in which this process first registered; 0 is not yet.
    pub(crate) boot_seen: AtomicU64,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("dir", &self.dir).field("gpus", &self.gpus.len()).finish_non_exhaustive()
    }
}

impl Node {
    /// Opens the node in `dir`, which [`crate::create`] made.
    pub fn open(dir: &Path) -> Result<Self, NodeError> {
        let path = dir.join("node.json");
        let io = |source| NodeError::Io { what: "could not read", path: path.clone(), source };
        let text = fs::read_to_string(&path).map_err(io)?;
        let spec: NodeSpec =
            serde_json::from_str(&text).map_err(|e| NodeError::Spec(format!("{}: {e}", path.display())))?;
        let gpus = spec.resolve()?;
        Ok(Self {
            map: Mapping::open(dir)?,
            spec,
            gpus,
            dir: dir.to_owned(),
            slot_hint: AtomicUsize::new(0),
            boot_seen: AtomicU64::new(0),
        })
    }

    /// Opens the node that `ALIQUOT_SIM_NODE` names, by default [`DEFAULT_DIR`].
    pub fn from_env() -> Result<Self, NodeError> {
        let dir = std::env::var_os("ALIQUOT_SIM_NODE").filter(|d| !d.is_empty());
        Self::open(&dir.map_or_else(|| PathBuf::from(DEFAULT_DIR), PathBuf::from))
    }

    /// The specification that the node was created from.
    pub fn spec(&self) -> &NodeSpec {
        &self.spec
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The GPUs by index.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The GPU with this index.
    pub fn gpu(&self, index: usize) -> Result<&Gpu, NodeError> {
        self.gpus.get(index).ok_or(NodeError::NotFound("no GPU has this index"))
    }

    /// The kernel boot id of this boot, as `/proc/sys/kernel/random/boot_id` would have it.
    pub fn boot_id(&self) -> Result<String, NodeError> {
        let state = self.lock()?;
        Ok(text_of(&state.boot_id))
    }

    pub(crate) fn lock(&self) -> Result<Locked<'_>, NodeError> {
        self.map.lock()
    }

    /// Bytes that a pool has in all: (total, reserved for the driver).
    pub(crate) fn pool_size(&self, state: &State, pool: Pool) -> Result<(u64, u64), NodeError> {
        let gpu = self.gpu(pool.gpu)?;
        let Some(gi) = pool.gi else {
            return Ok((gpu.memory_bytes(), gpu.board.reserved_bytes()));
        };
        let profile = self.gi_profile(state, pool.gpu, gi)?;
        // What a fresh instance shows as used on real boards: about 12 MiB for each compute slice.
        Ok((profile.memory_bytes(), u64::from(profile.slices) * 12 * crate::board::MIB))
    }

    pub(crate) fn gi_profile(
        &self,
        state: &State,
        gpu: usize,
        gi: u32,
    ) -> Result<&'static GiProfile, NodeError> {
        let slot = state
            .gpus
            .get(gpu)
            .and_then(|g| g.gis.get(usize::try_from(gi).unwrap_or(usize::MAX)))
            .filter(|g| g.in_use == 1)
            .ok_or(NodeError::NotFound("no such GPU instance"))?;
        self.gpu(gpu)?.board.profile_by_id(slot.profile).ok_or(NodeError::NotFound("no such profile"))
    }

    pub(crate) fn remember_boot(&self, boot: u64) -> Result<(), NodeError> {
        match self.boot_seen.compare_exchange(0, boot, Ordering::Relaxed, Ordering::Relaxed) {
            Err(seen) if seen != boot => Err(NodeError::Rebooted),
            _ => Ok(()),
        }
    }
}

/// The text of a zero-terminated field.
pub(crate) fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
}

/// Writes text into a zero-terminated field, cut where it does not fit.
pub(crate) fn write_text(field: &mut [u8], text: &str) {
    field.fill(0);
    let room = field.len().saturating_sub(1);
    for (to, from) in field.iter_mut().zip(text.bytes().take(room)) {
        *to = from;
    }
}

//! Keeps the publisher's state that survives a restart besides the slices themselves: `publish.json` in the
//! data directory.

use crate::allocation_mode::Phase;
use crate::partitioning::Partitioning;
use crate::store::{StoreError, replace};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

const FILE: &str = "publish.json";

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Memory {
    /// The highest pool generation ever used.
    #[serde(default)]
    pub(super) generation: i64,
    /// The phase of the pool between the allocators.
    #[serde(default)]
    pub(super) phase: Option<Phase>,
    /// The other drivers that give out GPUs of the node.
    #[serde(default)]
    pub(super) others: Option<super::others::Seen>,
    /// The party that makes partitions, for an instance that stands by.
    #[serde(default)]
    pub(super) partitioning: Partitioning,
}

impl Memory {
    /// Reads the file. State that is missing or unreadable is learned from the slices again.
    pub(super) fn load(data_dir: &Path) -> Self {
        let path = data_dir.join(FILE);
        let Ok(bytes) = fs::read(&path) else { return Self::default() };
        serde_json::from_slice(&bytes).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "unreadable, starting from the slices");
            Self::default()
        })
    }

    pub(super) fn save(&self, data_dir: &Path) -> Result<(), StoreError> {
        let path = data_dir.join(FILE);
        let bytes = serde_json::to_vec(self).map_err(|error| StoreError::Io {
            action: "encode",
            path: path.clone(),
            source: error.into(),
        })?;
        replace(&path, &bytes, 0o600)
    }
}

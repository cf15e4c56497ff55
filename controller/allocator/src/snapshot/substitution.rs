//! The record of what a claim asked for before its requests were expanded to larger MIG profiles.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What was asked for before a claim's requests were expanded. The record grants nothing: the claim's spec
/// says what may be given.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Record {
    /// The requested profile, by request.
    pub asked: BTreeMap<String, String>,
    /// True if the pod may be evicted when it can have what it asked for.
    pub go_back: bool,
}

impl Record {
    /// Reads the annotation; `None` if it is absent or cannot be read.
    pub fn read(annotation: Option<&String>) -> Option<Self> {
        let record: Self = serde_json::from_str(annotation?).ok()?;
        (!record.asked.is_empty()).then_some(record)
    }
}

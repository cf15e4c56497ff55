//! What is known after the loss of a checkpoint, until everything is accounted for again. Pure.

use crate::claim::ClaimRef;
use aliquot_model::DeviceName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The checkpoint was lost, and not everything is accounted for. Written down with the ledger, so that no start
/// forgets it. An older release keeps it and does not understand it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Lost {
    /// How it was lost, for people.
    pub reason: String,
    /// Claims that pods run with, says the API, of which neither record nor CDI spec is here; by UID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub running: BTreeMap<String, Running>,
}

/// A claim of which only the API knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Running {
    /// The claim.
    pub claim: ClaimRef,
    /// Names of its devices.
    pub devices: Vec<String>,
}

impl Running {
    /// Its devices whose names this release knows.
    pub fn names(&self) -> impl Iterator<Item = DeviceName> {
        self.devices.iter().filter_map(|name| DeviceName::parse(name))
    }
}

//! What is known after the loss of a checkpoint, until everything is accounted for again. Pure.

use crate::claim::ClaimRef;
use aliquot_model::DeviceName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Why there is no checkpoint to go by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Cause {
    /// Nothing on this node says that there ever was one.
    Nothing,
    /// There was one, as other files say, and it is gone. What an earlier release wrote says no more.
    #[default]
    Gone,
    /// No copy of it can be read.
    Unreadable,
    /// A newer release wrote it in a shape that cannot be read, and it is set aside. It may say that anything is held.
    Newer,
}

/// The checkpoint was lost, and not everything is accounted for. Written down with the ledger, so that no start
/// forgets it. An older release keeps it and does not understand it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Lost {
    /// How it was lost, for people.
    pub reason: String,
    /// How it was lost.
    pub cause: Cause,
    /// Claims that pods run with, says the API, of which neither record nor CDI spec is here; by UID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub running: BTreeMap<String, Running>,
}

impl Lost {
    /// Whether there was anything to lose, as far as is known.
    pub fn is_loss(&self) -> bool {
        self.cause != Cause::Nothing
    }

    /// Whether any GPU may be held by claims of which nobody here can know.
    pub fn is_beyond(&self) -> bool {
        self.cause == Cause::Newer
    }
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

//! What is known after the loss of a checkpoint, until everything is accounted for again. Pure.

use super::Ledger;
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
    /// While a checkpoint is set aside that may have records of them: claims that were given back, by UID, and when, in
    /// seconds since the epoch.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ended: BTreeMap<String, i64>,
}

/// How many claims that were given back are remembered; the oldest go first. No claim that may have a record in what is
/// set aside is prepared anew meanwhile, so there are hardly more than a node has devices.
const MOST_ENDED: usize = 4096;

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

impl Ledger {
    /// Notes that a claim was given back, if a checkpoint is set aside that may have a record of it. The first time
    /// counts.
    pub fn note_ended(&mut self, uid: &str, second: i64) {
        let Some(lost) = self.lost.as_mut().filter(|lost| lost.is_beyond()) else { return };
        lost.ended.entry(uid.to_owned()).or_insert(second);
        if lost.ended.len() > MOST_ENDED
            && let Some(oldest) = lost.ended.iter().min_by_key(|(_, second)| **second)
        {
            let oldest = oldest.0.clone();
            lost.ended.remove(&oldest);
        }
    }

    /// Takes in what was noted while this ledger could not be read: claims that it does not have, what was given back,
    /// and which GPUs are here. Doing it again changes nothing that is charged.
    pub fn take_in(&mut self, meanwhile: Self) {
        self.releases.take_in(meanwhile.releases);
        if let Some(mut lost) = meanwhile.lost {
            for (uid, second) in &lost.ended {
                // Its files are gone. Its GPU instances, if it had any, are nobody's.
                if let Some(mut record) = self.claims.remove(uid) {
                    record.ended.get_or_insert(*second);
                    self.releases.count(&record);
                }
            }
            if let Some(own) = self.lost.take() {
                lost.running.extend(own.running);
                lost.ended.extend(own.ended);
                (lost.reason, lost.cause) = (own.reason, own.cause);
            }
            self.lost = Some(lost);
        }
        for (uid, record) in meanwhile.claims {
            if !self.has(&uid) {
                self.claims.insert(uid, record);
            }
        }
        self.bind(meanwhile.bindings.into_iter().map(|(minor, binding)| (minor, binding.gpu)));
    }
}

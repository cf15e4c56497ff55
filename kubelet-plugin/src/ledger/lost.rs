//! What is known after the loss of a checkpoint, until everything is accounted for again. Pure.

use super::{Device, Ledger, Record};
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
    /// While a checkpoint is set aside that may have records of them: claims that were given back, by UID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ended: BTreeMap<String, Ended>,
}

/// That a claim was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// When, in seconds since the epoch.
    pub at: i64,
    /// Whether its release was recorded.
    pub recorded: bool,
}

/// How many claims that were given back are remembered. No claim that holds anything is prepared meanwhile but those that
/// were before, so there are hardly more than a node has devices.
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
    /// Notes that a claim gave its hardware back, if the kubelet asked for it: for the controller, and for what is set
    /// aside.
    pub fn count_end(&mut self, record: &Record) {
        self.releases.count(record);
        let Some(at) = record.ended else { return };
        if record.devices.iter().any(|device| device.held.is_some()) {
            self.note_ended(&record.claim.uid, Ended { at, recorded: record.charge.is_some() });
        }
    }

    /// Notes that a claim was given back, if a checkpoint is set aside that may have a record of it. The first time
    /// counts.
    pub fn note_ended(&mut self, uid: &str, ended: Ended) {
        let Some(lost) = self.lost.as_mut().filter(|lost| lost.is_beyond()) else { return };
        if lost.ended.len() < MOST_ENDED {
            lost.ended.entry(uid.to_owned()).or_insert(ended);
        }
    }

    /// Takes in what was noted while this ledger could not be read. Doing it again changes nothing.
    pub fn take_in(&mut self, meanwhile: Self) {
        self.releases.take_in(meanwhile.releases);
        self.beside.take_in(meanwhile.beside);
        if let Some(mut lost) = meanwhile.lost {
            for (uid, ended) in &mut lost.ended {
                // Its files are gone. Its GPU instances, if it had any, are nobody's.
                let Some(mut record) = self.claims.remove(uid) else { continue };
                if !std::mem::replace(&mut ended.recorded, true) {
                    record.ended.get_or_insert(ended.at);
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
        for (uid, record) in meanwhile.newer {
            if !self.has(&uid) {
                self.newer.insert(uid, record);
            }
        }
        for (uid, record) in meanwhile.claims {
            let outdated = |own: &Record| !own.says_the_same(&record);
            if !self.newer.contains_key(&uid) && self.claims.get(&uid).is_none_or(outdated) {
                self.claims.insert(uid, record);
            }
        }
        self.bind(meanwhile.bindings.into_iter().map(|(minor, binding)| (minor, binding.gpu)));
    }
}

impl Record {
    /// Whether it is of the same hardware as one that was made anew from it: then it says more, what a newer release
    /// wrote.
    fn says_the_same(&self, anew: &Self) -> bool {
        let hardware = |record: &Self| -> Vec<_> {
            let of = |device: &Device| (device.key(), device.gpu.clone(), device.partition.clone());
            record.devices.iter().map(of).collect()
        };
        let prepared = |record: &Self| record.is_prepared(&self.boot_id);
        prepared(self) && prepared(anew) && hardware(self) == hardware(anew)
    }
}

//! The state after the loss of a checkpoint, kept until everything is accounted for again. Pure: it does no
//! I/O.

use super::{Device, Ledger, Record};
use crate::claim::ClaimRef;
use aliquot_model::DeviceName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The reason why there is no checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Cause {
    /// Nothing on this node shows that there ever was a checkpoint.
    Nothing,
    /// There was a checkpoint, as other files show, and it is gone. This is also the value for records of
    /// earlier releases, which do not give the cause.
    #[default]
    Gone,
    /// No copy of the checkpoint can be read.
    Unreadable,
    /// A newer release wrote the checkpoint in a form that cannot be read, and it is set aside. It may say
    /// that anything is held.
    Newer,
}

/// The record that the checkpoint was lost and that not everything is accounted for. It is saved with the
/// ledger, so that no restart forgets it. An older release keeps the record without understanding it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Lost {
    /// The loss in words, for people.
    pub reason: String,
    /// The cause of the loss.
    pub cause: Cause,
    /// Claims that, according to the API, pods are running with, and that have neither record nor CDI spec
    /// here; by UID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub running: BTreeMap<String, Running>,
    /// Claims that were unprepared while a checkpoint is set aside that may have records of them; by UID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ended: BTreeMap<String, Ended>,
}

/// The end of a claim: it was unprepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Unix time in seconds.
    pub at: i64,
    /// True if the release of the claim's hardware was recorded.
    pub recorded: bool,
}

/// The largest number of ended claims that are remembered. Meanwhile the only claims that hold anything and
/// are prepared are those that were prepared before, so there are hardly more than a node has devices.
const MOST_ENDED: usize = 4096;

impl Lost {
    /// Returns true if there was anything to lose, as far as is known.
    pub fn is_loss(&self) -> bool {
        self.cause != Cause::Nothing
    }

    /// Returns true if any GPU may be held by claims that nobody on this node can know.
    pub fn is_beyond(&self) -> bool {
        self.cause == Cause::Newer
    }
}

/// A claim that only the API knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Running {
    /// The claim.
    pub claim: ClaimRef,
    /// The names of the claim's devices.
    pub devices: Vec<String>,
}

impl Running {
    /// Returns the claim's devices whose names this release knows.
    pub fn names(&self) -> impl Iterator<Item = DeviceName> {
        self.devices.iter().filter_map(|name| DeviceName::parse(name))
    }
}

impl Ledger {
    /// Notes that a claim released its hardware, if the kubelet asked for it. The note is for the controller,
    /// and for the checkpoint that is set aside.
    pub fn count_end(&mut self, record: &Record) {
        self.count_release(record);
        let Some(at) = record.ended else { return };
        if record.devices.iter().any(|device| device.held.is_some()) {
            self.note_ended(&record.claim.uid, Ended { at, recorded: record.charge.is_some() });
        }
    }

    /// Notes that a claim was unprepared, if a checkpoint is set aside that may have a record of it. Only the
    /// first call for a claim counts.
    pub fn note_ended(&mut self, uid: &str, ended: Ended) {
        let Some(lost) = self.lost.as_mut().filter(|lost| lost.is_beyond()) else { return };
        if lost.ended.len() < MOST_ENDED {
            lost.ended.entry(uid.to_owned()).or_insert(ended);
        }
    }

    /// Merges what was noted while this ledger could not be read. Repeating the call changes nothing.
    pub fn take_in(&mut self, meanwhile: Self) {
        self.releases.take_in(meanwhile.releases);
        self.beside.take_in(meanwhile.beside);
        if let Some(mut lost) = meanwhile.lost {
            for (uid, ended) in &mut lost.ended {
                // Its files are gone. Its GPU instances, if it had any, are nobody's.
                let Some(mut record) = self.claims.remove(uid) else { continue };
                if !std::mem::replace(&mut ended.recorded, true) {
                    record.ended.get_or_insert(ended.at);
                    self.count_release(&record);
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
    /// Returns true if `anew`, which was made anew from this record, describes the same hardware. This record
    /// then says more: the parts that a newer release wrote.
    fn says_the_same(&self, anew: &Self) -> bool {
        let hardware = |record: &Self| -> Vec<_> {
            let of = |device: &Device| (device.key(), device.gpu.clone(), device.partition.clone());
            record.devices.iter().map(of).collect()
        };
        let prepared = |record: &Self| record.is_prepared(&self.boot_id);
        prepared(self) && prepared(anew) && hardware(self) == hardware(anew)
    }
}

//! The record of what this node holds for each claim: the data of the checkpoint and the rules over it. Pure:
//! it does no I/O.
//!
//! The ledger is the last line of defence (ARCHITECTURE.md, invariant 1): whatever an allocator or a
//! race says, nothing is prepared that overlaps something already prepared.

// The fuzzer of the checkpoint has this file without the rest of the agent (`e2e/fuzz`).
#[path = "ledger/charge.rs"]
mod charge;
#[path = "ledger/device_number.rs"]
mod device_number;
#[path = "ledger/former.rs"]
mod former;
#[path = "ledger/here.rs"]
mod here;
#[path = "ledger/lost.rs"]
mod lost;
#[path = "ledger/newer.rs"]
mod newer;
#[path = "ledger/passed.rs"]
mod passed;
#[path = "ledger/place.rs"]
mod place;
#[path = "ledger/record.rs"]
mod record;
#[path = "ledger/releases.rs"]
mod releases;
#[path = "ledger/shared.rs"]
mod shared;
#[path = "ledger/usage.rs"]
mod usage;

pub use device_number::{DeviceNumber, NoDeviceNumber};
pub use former::{Former, Given};
pub use lost::{Cause, Ended, Lost, Running};
pub use newer::NewerRecord;
pub use place::Place;
pub use record::{Charge, Device, Held, Limit, Metadata, Partition, Passed, Record, Retention, Share, State};
pub use releases::Releases;

use crate::claim::ClaimRef;
use aliquot_model::{GpuUuid, LiveMig};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The GPU that a minor number means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Binding {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The claims that were given the GPU that the number meant before.
    #[serde(default, skip_serializing_if = "Former::is_empty")]
    pub former: Former,
}

/// Everything that this node holds. [`crate::checkpoint`] defines how it is written to disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    /// Records, by claim UID.
    pub claims: BTreeMap<String, Record>,
    /// Records that only a newer release understands, by claim UID.
    pub newer: BTreeMap<String, NewerRecord>,
    /// The GPU that each minor number means, by minor number.
    pub bindings: BTreeMap<u32, Binding>,
    /// Releases that are not acknowledged yet.
    pub releases: Releases,
    /// Set when a checkpoint is lost, until everything is accounted for again.
    pub lost: Option<Lost>,
    /// The rest of the checkpoint that a newer release wrote.
    pub beside: Beside,
}

/// The parts of a checkpoint, apart from claims, that only a newer release understands.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Beside {
    /// The version of the format that the newer release wrote, if it is higher than this release's.
    pub version: Option<u32>,
    /// The release that wrote the parts.
    pub release: Option<String>,
    /// The parts of the checkpoint, as they are on disk, by name.
    pub parts: BTreeMap<String, String>,
}

impl Beside {
    /// Merges the parts that were noted later; what is already here wins.
    fn take_in(&mut self, meanwhile: Self) {
        self.version = self.version.max(meanwhile.version);
        self.release = self.release.take().or(meanwhile.release);
        for (name, part) in meanwhile.parts {
            self.parts.entry(name).or_insert(part);
        }
    }

    /// Returns the release that wrote the parts, or a placeholder for people.
    pub fn release_or_unknown(&self) -> &str {
        self.release.as_deref().unwrap_or("(newer, it does not say which)")
    }
}

/// The claim that holds a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder<'a> {
    /// The claim.
    pub claim: &'a ClaimRef,
    /// The claim's progress, for messages.
    pub standing: &'static str,
}

impl Ledger {
    /// Returns true if the checkpoint has a record of this claim.
    pub fn has(&self, uid: &str) -> bool {
        self.claims.contains_key(uid) || self.newer.contains_key(uid)
    }

    /// Returns true if the checkpoint has anything that only a newer release understands.
    pub fn has_newer(&self) -> bool {
        !self.newer.is_empty() || !self.beside.parts.is_empty()
    }

    /// Returns all devices that are held, each with its holder.
    pub fn held(&self) -> impl Iterator<Item = (Holder<'_>, &Device)> {
        let known = self.claims.values().flat_map(|record| {
            let holder = Holder { claim: &record.claim, standing: record.standing() };
            record.devices.iter().map(move |device| (holder, device))
        });
        let newer = self.newer.values().flat_map(|record| {
            let holder = Holder { claim: &record.claim, standing: "held by a newer release" };
            record.devices().unwrap_or_default().iter().map(move |device| (holder, device))
        });
        known.chain(newer)
    }

    /// Returns the devices that other claims hold on a GPU.
    pub fn others<'a>(
        &'a self,
        uid: &'a str,
        gpu: &'a GpuUuid,
    ) -> impl Iterator<Item = (Holder<'a>, &'a Device)> + 'a {
        self.held().filter(move |(holder, device)| holder.claim.uid != uid && &device.gpu == gpu)
    }

    /// Returns true if a claim holds the whole GPU exclusively.
    pub fn is_held_whole(&self, gpu: &GpuUuid) -> bool {
        self.held().any(|(_, device)| &device.gpu == gpu && device.held == Some(Held::Whole))
    }

    /// Returns true if any claim may hold a partition that overlaps this instance.
    pub fn knows(&self, live: &LiveMig) -> bool {
        self.knows_beside("", live)
    }

    /// Returns true if any claim except `uid` may hold a partition that overlaps this instance.
    pub fn knows_beside(&self, uid: &str, live: &LiveMig) -> bool {
        let known = self
            .claims
            .values()
            .filter(|record| record.claim.uid != uid)
            .flat_map(|record| &record.devices)
            .filter(|device| device.gpu == live.parent)
            .filter_map(|device| device.partition.as_ref())
            .any(|partition| partition.placement.overlaps(live.placement));
        known || self.newer.values().any(|record| record.may_have(live))
    }

    /// Returns true if a claim holds this instance and it existed before the claim.
    pub fn has_adopted(&self, live: &LiveMig) -> bool {
        let devices = self.claims.values().flat_map(|record| &record.devices);
        let partitions =
            devices.filter(|device| device.gpu == live.parent).filter_map(|device| device.partition.as_ref());
        partitions.into_iter().any(|partition| partition.adopted && partition.placement == live.placement)
    }

    /// Records the GPU that each minor number means now. Returns true if a binding changed.
    pub fn bind(&mut self, gpus: impl IntoIterator<Item = (u32, GpuUuid)>) -> bool {
        let mut changed = false;
        for (minor, gpu) in gpus {
            let former = match self.bindings.get(&minor) {
                Some(binding) if binding.gpu == gpu => continue,
                Some(_) => Former::NotAsked,
                None => Former::default(),
            };
            self.bindings.insert(minor, Binding { gpu, former });
            changed = true;
        }
        changed
    }
}

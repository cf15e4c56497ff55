//! Keeps the charges of claims, and numbered records of claims that released their hardware: the data in the
//! ledger for the controller's budgets, and the rules over it. Pure, except for the ledger's name.
//!
//! A record comes into the ledger with the same write that removes the claim from it, so a kill can neither
//! lose nor repeat a record. A record is removed when the controller has acknowledged its number.

use crate::ledger::{Device, Ledger, Record, State};
use aliquot_api::v1alpha1::node_usage::{HeldClaim, Release};
use aliquot_api::v1alpha1::{NodeUsageSpec, NodeUsageStatus};
use aliquot_model::MicroGpus;
use aliquot_model::{GpuInfo, GpuUuid, ProfileName};
use aliquot_nvml::Inventory;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use uuid::Uuid;

/// The largest number of records that are listed in the API at a time; the others follow when these are
/// acknowledged.
const MOST_LISTED: usize = 500;
/// The largest number of records that are kept while no controller acknowledges them.
const MOST_KEPT: usize = 10_000;

/// The charge for a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Charge {
    /// The claim's part of GPUs.
    pub micro_gpus: MicroGpus,
    /// The part that the claim would have if it had been given what it asked for; absent if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<MicroGpus>,
    /// Unix time in seconds since which the claim is charged.
    pub since: i64,
}

impl Charge {
    /// Computes the charge of a claim with these devices. `asked` has the profiles of requests that were
    /// given other profiles.
    pub fn of(
        devices: &[Device],
        asked: &BTreeMap<String, ProfileName>,
        inventory: &Inventory,
        since: i64,
    ) -> Self {
        let (mut given, mut instead, mut other) = (MicroGpus(0), MicroGpus(0), false);
        for device in devices {
            let part = part(device, inventory);
            let wanted = asked
                .get(&device.request)
                .and_then(|profile| of_profile(&device.gpu, profile, &inventory.gpus));
            other |= wanted.is_some();
            given = given.plus(part);
            instead = instead.plus(wanted.unwrap_or(part).min(part));
        }
        Self { micro_gpus: given, asked: other.then_some(instead), since }
    }
}

/// Returns the part that a partition of another profile would be of a device's GPU. If that board has no such
/// profile, returns the largest part on any of the node's GPUs, as the controller does. Returns `None` if no
/// GPU has the profile.
fn of_profile(own: &GpuUuid, profile: &ProfileName, gpus: &[GpuInfo]) -> Option<MicroGpus> {
    let slug = profile.slug();
    let on = |gpu: &GpuInfo| {
        let found = gpu.profiles().iter().find(|known| known.name.slug() == slug)?;
        Some(MicroGpus::of_partition(found, gpu))
    };
    let own = gpus.iter().find(|gpu| gpu.uuid == *own)?;
    on(own).or_else(|| gpus.iter().filter_map(on).max())
}

/// Returns a device's part of its GPU; zero with admin access.
fn part(device: &Device, inventory: &Inventory) -> MicroGpus {
    if device.held.is_none() {
        return MicroGpus(0);
    }
    let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == device.gpu);
    let Some(gpu) = gpu else { return MicroGpus::WHOLE };
    match (&device.partition, &device.consumed) {
        (Some(partition), consumed) => {
            let Some(profile) = gpu.profile(partition.profile_id) else { return MicroGpus::WHOLE };
            consumed.map_or_else(
                || MicroGpus::of_partition(profile, gpu),
                |own| MicroGpus::of_partition_share(own.memory_bytes, own.cores_percent.into(), profile, gpu),
            )
        }
        (None, Some(consumed)) => {
            MicroGpus::of_share(consumed.memory_bytes, consumed.cores_percent.into(), gpu)
        }
        (None, None) => MicroGpus::WHOLE,
    }
}

/// The records that are not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Releases {
    /// The ledger's name, so that numbers of a lost ledger mean nothing.
    #[serde(default)]
    ledger: String,
    /// The number of the last record.
    #[serde(default)]
    last: u64,
    /// The records, ascending by number.
    #[serde(default)]
    list: Vec<Release>,
    /// Fields that a newer release wrote beside them.
    #[serde(flatten)]
    extra: BTreeMap<String, Value>,
}

impl Releases {
    /// Returns true if nothing was ever recorded.
    pub fn is_unused(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns true if there are no records.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Records that a claim released its hardware, if the kubelet asked for it and the claim is charged.
    pub(crate) fn count(&mut self, record: &Record) {
        let (Some(charge), Some(until)) = (record.charge, record.ended) else { return };
        self.push(held(record, charge), until);
    }

    fn push(&mut self, claim: HeldClaim, until: i64) {
        self.last = self.last.saturating_add(1);
        self.list.push(Release { number: self.last, claim, until });
        let surplus = self.list.len().saturating_sub(MOST_KEPT);
        if surplus > 0 {
            tracing::error!(surplus, "nobody acknowledges releases: the oldest are dropped and not charged");
            self.list.drain(..surplus);
        }
    }

    /// Merges what was recorded while this could not be read. A record that is acknowledged already may be
    /// reported again, which charges nothing twice.
    pub(crate) fn take_in(&mut self, meanwhile: Self) {
        let same = meanwhile.ledger == self.ledger;
        if self.is_unused() || (same && meanwhile.last >= self.last) {
            *self = meanwhile;
        } else if !same {
            meanwhile.list.into_iter().for_each(|release| self.push(release.claim, release.until));
        }
    }

    /// Gives the ledger a name and forgets the acknowledged records. Returns true if anything changed.
    pub(crate) fn prepare(&mut self, acknowledged: &NodeUsageStatus) -> bool {
        let before = (self.ledger.is_empty(), self.list.len());
        if self.ledger.is_empty() {
            self.ledger = Uuid::new_v4().to_string();
        }
        let number = acknowledged.acknowledged_of(&self.ledger);
        self.list.retain(|release| release.number > number);
        before != (false, self.list.len())
    }
}

fn held(record: &Record, charge: Charge) -> HeldClaim {
    HeldClaim {
        namespace: record.claim.namespace.clone(),
        name: record.claim.name.clone(),
        uid: record.claim.uid.clone(),
        micro_gpus: charge.micro_gpus,
        asked_micro_gpus: charge.asked,
        since: charge.since,
    }
}

/// Returns the usage that the controller is to know.
pub(crate) fn spec(ledger: &Ledger) -> NodeUsageSpec {
    // A parked claim is charged by what the API says of it.
    let holds =
        |record: &&Record| record.confirmed && record.state != State::Unpreparing && !record.is_parked();
    let records = ledger.claims.values().filter(holds);
    NodeUsageSpec {
        ledger: ledger.releases.ledger.clone(),
        held: records.filter_map(|record| Some(held(record, record.charge?))).collect(),
        released: ledger.releases.list.iter().take(MOST_LISTED).cloned().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use aliquot_model::MigCapability;

    fn record(uid: &str, ended: Option<i64>) -> Record {
        Record {
            claim: testing::claim(uid),
            state: State::Completed,
            boot_id: "boot".into(),
            since: 10,
            devices: Vec::new(),
            indexed_env: false,
            metadata: None,
            charge: Some(Charge { micro_gpus: MicroGpus::WHOLE, asked: None, since: 5 }),
            ended,
            retention: None,
            confirmed: true,
            steps: Vec::new(),
            numbers: Default::default(),
            extra: Default::default(),
        }
    }

    fn numbers(releases: &Releases) -> Vec<u64> {
        releases.list.iter().map(|release| release.number).collect()
    }

    #[test]
    fn what_was_asked_of_a_board_that_cannot_give_it_counts_as_on_another_of_the_node() {
        let (mut own, other) = (testing::h100(0), testing::h100(1));
        let asked = ProfileName::new("1g.10gb");
        let seventh = of_profile(&own.uuid, &asked, std::slice::from_ref(&own));
        assert!(seventh.is_some_and(|part| part < MicroGpus::WHOLE), "{seventh:?}");
        if let MigCapability::Supported { profiles, .. } = &mut own.mig {
            profiles.retain(|profile| profile.name != asked);
        }
        assert_eq!(of_profile(&own.uuid, &asked, &[own.clone(), other]), seventh);
        assert_eq!(of_profile(&own.uuid, &asked, std::slice::from_ref(&own)), None, "charged as given");
    }

    #[test]
    fn records_are_numbered_without_gaps_and_go_when_they_are_acknowledged() {
        let mut releases = Releases::default();
        for uid in ["a", "b", "c"] {
            releases.count(&record(uid, Some(20)));
        }
        assert!(releases.prepare(&NodeUsageStatus::default()), "it got a name");
        assert!(!releases.prepare(&NodeUsageStatus::default()));
        let answer = NodeUsageStatus { ledger: releases.ledger.clone(), acknowledged: 2 };
        assert!(releases.prepare(&answer));
        assert_eq!(numbers(&releases), [3]);
        releases.count(&record("d", Some(30)));
        assert_eq!(numbers(&releases), [3, 4]);
        // An answer to another ledger means nothing here.
        let other = NodeUsageStatus { ledger: "other".to_owned(), acknowledged: 9 };
        assert!(!releases.prepare(&other));
        assert_eq!(numbers(&releases), [3, 4]);
    }

    #[test]
    fn only_what_the_kubelet_gave_back_is_recorded() {
        let mut releases = Releases::default();
        releases.count(&record("a", None));
        releases.count(&Record { charge: None, ..record("b", Some(20)) });
        assert!(releases.is_unused());
    }

    #[test]
    fn what_is_held_is_what_the_kubelet_was_told_and_did_not_give_back() {
        let mut ledger = Ledger::default();
        for (uid, state, confirmed) in [
            ("a", State::Completed, true),
            ("b", State::Lost, true),
            ("c", State::Unpreparing, true),
            ("d", State::Started, false),
        ] {
            ledger.claims.insert(uid.to_owned(), Record { state, confirmed, ..record(uid, None) });
        }
        let uids: Vec<String> = spec(&ledger).held.into_iter().map(|claim| claim.uid).collect();
        assert_eq!(uids, [testing::claim("a").uid, testing::claim("b").uid]);
    }

    #[test]
    fn nobody_who_acknowledges_does_not_fill_the_disk() {
        let mut releases = Releases::default();
        for _ in 0..MOST_KEPT + 3 {
            releases.count(&record("a", Some(20)));
        }
        assert_eq!((releases.len(), releases.list.first().map(|first| first.number)), (MOST_KEPT, Some(4)));
    }
}

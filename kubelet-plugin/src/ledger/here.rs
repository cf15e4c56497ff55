//! Finds out what claims have of the hardware at this moment. Pure: it does no I/O.
//!
//! A record outlives the hardware that it describes. A reboot ends everything that claims had set up. For a
//! claim that waits to be prepared again ([`State::Lost`]), everything was undone before it was made to wait.
//! Such a record keeps its claim's place, so decisions count it ([`Ledger::others`]). But nothing can still
//! be using its hardware, so it keeps nothing set up.

use super::{Device, Held, Ledger, Partition, Place, Record, State};
use crate::claim::ClaimRef;
use aliquot_model::{GpuUuid, MigUuid};
use std::collections::BTreeSet;

impl Record {
    /// Returns true if something of the claim may be set up in this boot: it is prepared, kept without a pod,
    /// or on its way there or back.
    pub fn is_here(&self, boot_id: &str) -> bool {
        self.boot_id == boot_id && self.state != State::Lost
    }

    /// Returns true if the claim is prepared in this boot: containers may be running, or start, with its CDI
    /// spec.
    pub fn is_prepared(&self, boot_id: &str) -> bool {
        self.boot_id == boot_id && self.state == State::Completed && !self.is_parked()
    }
}

impl Device {
    /// Returns the partition's place, if the device is a partition or a share of one.
    pub fn place(&self) -> Option<Place> {
        let partition = self.partition.as_ref()?;
        Some(Place {
            gpu: self.gpu.clone(),
            profile_id: partition.profile_id,
            placement: partition.placement,
        })
    }

    fn is_at(&self, place: &Place) -> bool {
        self.place().as_ref() == Some(place)
    }
}

impl Ledger {
    /// Returns true if another claim may have something set up on a GPU, of the kind that `is_meant` selects.
    /// An operation that undoes this kind then leaves it, and the last claim undoes it. What a newer
    /// release's record may have counts as set up.
    pub fn has_others_here(
        &self,
        uid: &str,
        gpu: &GpuUuid,
        boot_id: &str,
        is_meant: impl Fn(&Device) -> bool,
    ) -> bool {
        let known = self.claims.values().filter(|record| record.claim.uid != uid && record.is_here(boot_id));
        let mut known = known.flat_map(|record| &record.devices);
        let newer = self.newer.values().filter(|record| record.claim.uid != uid);
        // A device that is not understood counts as the whole GPU.
        let may_be_meant = |device: &Device| device.held == Some(Held::Whole) || is_meant(device);
        known.any(|device| &device.gpu == gpu && is_meant(device))
            || newer.map(|record| record.devices()).any(|devices| {
                devices.is_none_or(|all| all.iter().any(|device| &device.gpu == gpu && may_be_meant(device)))
            })
    }

    /// Sets the UUID by which all claims know a partition, or clears it while the partition is made anew.
    /// Until the partition has a UUID, whatever is in its place belongs to these claims. Returns true if
    /// anything changed.
    pub fn name_partition(&mut self, place: &Place, boot_id: &str, uuid: Option<&MigUuid>) -> bool {
        let mut changed = false;
        let here = self.claims.values_mut().filter(|record| record.is_here(boot_id));
        let devices = here.flat_map(|record| &mut record.devices).filter(|device| device.is_at(place));
        for partition in devices.filter_map(|device| device.partition.as_mut()) {
            if partition.uuid.as_ref() != uuid {
                partition.uuid = uuid.cloned();
                changed = true;
            }
        }
        changed
    }

    /// Returns the UUIDs by which claims know a partition.
    pub fn names_of(&self, place: &Place, boot_id: &str) -> BTreeSet<MigUuid> {
        let here = self.claims.values().filter(|record| record.is_here(boot_id));
        let devices = here.flat_map(|record| &record.devices).filter(|device| device.is_at(place));
        devices.filter_map(|device| device.partition.as_ref()?.uuid.clone()).collect()
    }

    /// Returns a claim that has the partition of a device, and the partition as that claim knows it.
    pub fn partition_here(&self, device: &Device, boot_id: &str) -> Option<(&ClaimRef, &Partition)> {
        let place = device.place()?;
        let here = self.claims.values().filter(|record| record.is_here(boot_id));
        let mut devices = here.flat_map(|record| record.devices.iter().map(|other| (&record.claim, other)));
        let (claim, other) = devices.find(|(_, other)| other.is_at(&place))?;
        Some((claim, other.partition.as_ref()?))
    }

    /// Returns the partitions of prepared claims that were being made anew when a process died.
    pub fn unnamed_partitions(&self, boot_id: &str) -> BTreeSet<Place> {
        let here = self.claims.values().filter(|record| record.is_here(boot_id));
        let completed = here.filter(|record| record.state == State::Completed);
        let devices = completed.flat_map(|record| &record.devices);
        let unnamed = devices
            .filter(|device| device.partition.as_ref().is_some_and(|p| p.uuid.is_none() && !p.adopted));
        unnamed.filter_map(Device::place).collect()
    }

    /// Copies the UUIDs by which the ledger knows a record's partitions now into the record.
    pub fn refresh(&self, record: &mut Record) {
        let Some(there) = self.claims.get(&record.claim.uid).filter(|there| there.boot_id == record.boot_id)
        else {
            return;
        };
        for device in &mut record.devices {
            let other = there.devices.iter().find(|other| other.result_id == device.result_id);
            let other = other.and_then(|other| other.partition.as_ref());
            if let (Some(partition), Some(other)) = (&mut device.partition, other) {
                partition.uuid.clone_from(&other.uuid);
            }
        }
    }
}

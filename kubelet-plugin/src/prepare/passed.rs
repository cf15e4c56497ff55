//! Handles GPUs that claims give to virtual machines. NVML does not list them meanwhile, but they still
//! exist.

use super::{Node, PrepareError, UnprepareError};
use crate::claim::Request;
use crate::ledger::{Ledger, Passed};
use crate::plan::Offers;
use crate::reservation;
use crate::store::StoreError;
use crate::vfio::NotOffered;
use crate::vfio::note::{self, Note};
use aliquot_model::{DeviceKind, GpuInfo, GpuUuid};
use aliquot_nvml::{Cause, GpuError, Inventory, Operation, Unreadable};
use std::collections::BTreeSet;
use std::time::Duration;

/// The passthrough facts of the GPUs of a claim that wants them for virtual machines.
#[derive(Debug, Default)]
pub(super) struct Offered {
    /// The GPUs' facts as PCI devices, or the reason why no virtual machine can have them.
    pub(super) offers: Offers,
    /// The GPUs that the driver keeps initialised while nothing uses them.
    pub(super) persistent: BTreeSet<GpuUuid>,
}

impl Node {
    /// Adds the GPUs that are with virtual machines to an inventory, as they were before: those of claims
    /// with records, and those of these notes. Returns the GPUs that were added.
    pub(super) fn add_passed(
        &self,
        inventory: &mut Inventory,
        ledger: &Ledger,
        noted: &[Note],
    ) -> BTreeSet<GpuUuid> {
        // A GPU that is on its way back may be with its driver already, but not listed by a library that was
        // opened before.
        let vfio = &self.machine.vfio;
        let away = |(passed, moving): &(&Passed, bool)| match moving {
            true => vfio.is_there(&passed.address),
            false => vfio.is_away(&passed.address),
        };
        let noted = noted.iter().map(|note| (&note.passed, false));
        add(inventory, ledger.passed().chain(noted).filter(away).map(|(passed, _)| passed))
    }

    /// Returns the notes of GPUs that this agent gave to vfio-pci in this boot for claims without a record.
    ///
    /// # Errors
    /// Fails if the ID of the boot cannot be read.
    pub(super) fn noted(&self, ledger: &Ledger) -> Result<Vec<Note>, PrepareError> {
        let notes = note::all(&self.machine.data_dir, &self.boot_id()?);
        Ok(notes.into_iter().filter(|note| !ledger.has(&note.claim)).collect())
    }

    /// Returns the passthrough facts of the GPUs of a claim. For a claim without such GPUs nothing is read.
    /// The node's lock is not held.
    ///
    /// # Errors
    /// Fails if a GPU cannot be read.
    pub(super) fn offered(&self, request: &Request, facts: &Inventory) -> Result<Offered, PrepareError> {
        let wanted = request.devices.iter().filter(|device| device.device.kind() == DeviceKind::Vfio);
        let minors: BTreeSet<u32> = wanted.map(|device| device.device.minor()).collect();
        let mut offered = Offered::default();
        if minors.is_empty() {
            return Ok(offered);
        }
        let noted = self.noted(&self.ledger()?)?;
        for gpu in facts.gpus.iter().filter(|gpu| minors.contains(&gpu.minor)) {
            let away = gpu.pci_bus_id.as_deref().is_some_and(|address| self.machine.vfio.is_away(address));
            let own = |note: &&Note| note.claim == request.claim.uid && note.passed.info.uuid == gpu.uuid;
            let note = noted.iter().find(own).filter(|_| away);
            let offer = match note {
                // The GPU is with vfio-pci already, whatever is switched on by now.
                Some(note) => Ok(note.passed.device.clone()),
                None => self.machine.vfio.offer(gpu).map_err(NotOffered::from),
            };
            let persistent = match note {
                Some(note) => note.passed.persistence,
                None => !away && offer.is_ok() && self.machine.gpus.persistence_mode(&gpu.uuid)?,
            };
            offered.offers.insert(gpu.uuid.clone(), offer);
            if persistent {
                offered.persistent.insert(gpu.uuid.clone());
            }
        }
        Ok(offered)
    }

    /// Returns the passthrough facts of these GPUs.
    pub(super) fn offers_of<'a>(&self, gpus: impl Iterator<Item = &'a GpuInfo>) -> Offers {
        gpus.map(|gpu| {
            let offer = self.machine.vfio.offer(gpu).map_err(NotOffered::from);
            (gpu.uuid.clone(), offer)
        })
        .collect()
    }

    /// Returns the devices of a claim for administration whose GPUs are with virtual machines: the claim's
    /// containers do not have them.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn left_out(&self, uid: &str) -> Result<Vec<String>, StoreError> {
        let ledger = self.ledger()?;
        let devices = ledger.claims.get(uid).into_iter().flat_map(|record| &record.devices);
        let is_passed = |gpu: &GpuUuid| {
            let mut passed = ledger.passed().filter(|(passed, _)| passed.info.uuid == *gpu);
            passed.any(|(passed, _)| self.machine.vfio.is_away(&passed.address))
        };
        let watched = devices.filter(|device| device.kind() == Some(DeviceKind::Admin));
        let left_out = watched.filter(|device| is_passed(&device.gpu));
        Ok(left_out.map(|device| device.device.clone()).collect())
    }

    /// Gives back GPUs that only notes show to be with virtual machines: no record and no CDI spec has them.
    /// A GPU that a virtual machine uses stays where it is. Returns the number of GPUs that are still away.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub(super) fn take_back_strays(&self) -> Result<usize, PrepareError> {
        let mut away = 0;
        for note in self.noted(&self.ledger()?)? {
            let (uid, gpu) = (&note.claim, &note.passed.info.uuid);
            if self.has_spec(uid) {
                continue;
            }
            // An operation on the claim has it reserved.
            let Ok(_claim) = reservation::claim(self.store.dir(), uid, Duration::ZERO) else {
                away += 1;
                continue;
            };
            if self.ledger()?.has(uid) || self.has_spec(uid) {
                continue;
            }
            match self.take_back(gpu, &note.passed.address, note.passed.persistence) {
                Ok(()) => {
                    tracing::warn!(gpu.uuid = %gpu, claim.uid = %uid, "gave a GPU back that no claim has")
                }
                Err(error) => {
                    tracing::warn!(gpu.uuid = %gpu, claim.uid = %uid, %error, "a GPU that no claim has stays away");
                    away += 1;
                }
            }
        }
        Ok(away)
    }

    /// Gives back a GPU whose claim has no record. The claim is reserved.
    ///
    /// # Errors
    /// Fails with [`UnprepareError`]; the call can be repeated.
    pub(super) fn take_back(
        &self,
        gpu: &GpuUuid,
        address: &str,
        persistence: bool,
    ) -> Result<(), UnprepareError> {
        let boot_id = self.boot_id().map_err(|error| UnprepareError::Boot(Box::new(error)))?;
        let mut gpus = self.all_gpus(&self.ledger()?.bindings);
        gpus.insert(gpu.clone());
        let _gpus = self.reserve_gpus(&gpus)?;
        self.machine.take_back(gpu, address, persistence, &boot_id).map_err(|source| UnprepareError::Undo {
            undo: format!("give {gpu} at {address} back to NVIDIA's driver"),
            source,
        })
    }
}

fn add<'a>(inventory: &mut Inventory, away: impl Iterator<Item = &'a Passed>) -> BTreeSet<GpuUuid> {
    let mut added = BTreeSet::new();
    for passed in away {
        let info = &passed.info;
        if inventory.gpu(&info.uuid).is_some() {
            continue;
        }
        inventory.unreadable.retain(|gpu| gpu.uuid.as_ref() != Some(&info.uuid));
        // The driver gives a number that is free again to the next GPU that comes back. But a name belongs to
        // one GPU.
        while let Some(at) = inventory.gpus.iter().position(|gpu| gpu.minor == info.minor) {
            let other = inventory.gpus.remove(at);
            inventory.live.retain(|mig| mig.parent != other.uuid);
            let why = Cause::NameTaken { minor: other.minor, by: info.uuid.clone() };
            let error = GpuError::on(&other.uuid, Operation::Use, why);
            inventory.unreadable.push(Unreadable { index: other.index, uuid: Some(other.uuid), error });
        }
        inventory.gpus.push(info.clone());
        added.insert(info.uuid.clone());
    }
    inventory.gpus.sort_by_key(|gpu| (gpu.index, gpu.minor));
    added
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::h100;
    use aliquot_nvml::DriverInfo;

    fn inventory(gpus: Vec<GpuInfo>) -> Inventory {
        let driver = DriverInfo { driver_version: "580.65.06".into(), cuda_version: (13, 0) };
        Inventory { driver, gpus, live: Vec::new(), unreadable: Vec::new() }
    }

    fn passed(info: &GpuInfo) -> Passed {
        Passed {
            address: info.pci_bus_id.clone().unwrap(),
            info: info.clone(),
            device: Default::default(),
            iommu: Default::default(),
            persistence: false,
        }
    }

    #[test]
    fn a_gpu_that_a_virtual_machine_has_is_listed_as_it_was() {
        let mut found = inventory(vec![h100(0)]);
        let away = passed(&h100(1));
        assert_eq!(add(&mut found, [&away].into_iter()), BTreeSet::from([h100(1).uuid]));
        assert_eq!(found.gpus, [h100(0), h100(1)]);
        // One that NVML lists is as NVML says.
        let mut found = inventory(vec![GpuInfo { memory_bytes: 1, ..h100(1) }]);
        assert_eq!(add(&mut found, [&away].into_iter()), BTreeSet::new());
        assert_eq!(found.gpus[0].memory_bytes, 1);
    }

    #[test]
    fn another_gpu_with_its_number_is_not_published_under_its_name() {
        let other = GpuInfo { minor: 1, ..h100(2) };
        let mut found = inventory(vec![h100(0), other.clone()]);
        add(&mut found, [&passed(&h100(1))].into_iter());
        assert_eq!(found.gpus, [h100(0), h100(1)]);
        let [unreadable] = found.unreadable.as_slice() else { panic!("{:?}", found.unreadable) };
        assert_eq!(unreadable.uuid.as_ref(), Some(&other.uuid));
        let text = unreadable.error.to_string();
        assert!(text.contains(h100(1).uuid.as_str()), "{text}");
    }
}

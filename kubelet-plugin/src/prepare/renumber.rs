//! Handles device numbers: refuses claims because of them, and updates CDI specs when the driver numbers its
//! devices differently. The rules are in [`crate::device_number_reuse`].

use super::{Node, PrepareError};
use crate::claim::{ClaimRef, Request};
use crate::device_number_reuse::{self, Meaning, Reach};
use crate::devices::Majors;
use crate::execute::{Missing, StepError};
use crate::ledger::{DeviceNumber, Ledger, Record};
use crate::plan::{PlanError, Refusal, Step};
use crate::reservation::{self, ReserveError};
use crate::store::{StoreError, io_error};
use aliquot_model::{DeviceKind, GpuInfo, GpuUuid, LiveMig};
use aliquot_nvml::Inventory;
use aliquot_nvml::caps::MigMinors;
use std::collections::BTreeMap;
use std::time::Duration;

/// The driver's device numbers at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbering {
    majors: Majors,
    caps: MigMinors,
    /// The minor numbers of the GPUs that can be read.
    gpus: BTreeMap<GpuUuid, u32>,
    /// The GPUs' DRM nodes, which are numbered in the order in which their module finds the GPUs.
    drm: BTreeMap<GpuUuid, Vec<DeviceNumber>>,
}

impl Numbering {
    /// Returns the device that each number means.
    pub fn meanings(&self, gpus: &[GpuInfo], live: &[LiveMig]) -> Vec<Meaning> {
        let mut meanings = device_number_reuse::meanings(gpus, live, &self.majors, &self.caps);
        for gpu in gpus {
            let drm = self.drm.get(&gpu.uuid).into_iter().flatten();
            meanings.extend(drm.map(|number| Meaning {
                number: *number,
                gpu: gpu.uuid.clone(),
                partition: None,
            }));
        }
        meanings
    }
}

/// The result of updating CDI specs after the driver's device numbers changed.
#[derive(Debug, Default)]
pub struct Renumbered {
    /// The claims whose specs were written anew.
    pub rewritten: Vec<ClaimRef>,
    /// The claims whose specs could not be compared or written, with the reason.
    pub failed: Vec<(ClaimRef, String)>,
    /// The claims that another operation has reserved; their turn comes later.
    pub busy: Vec<ClaimRef>,
}

impl Node {
    /// Returns the driver's device numbers now.
    pub(super) fn numbering(&self, gpus: &[GpuInfo]) -> Result<Numbering, StepError> {
        let proc_root = &self.machine.proc_root;
        Ok(Numbering {
            majors: Majors::read(proc_root)?,
            caps: MigMinors::read(proc_root).map_err(io_error("read", &MigMinors::path(proc_root)))?,
            gpus: gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.minor)).collect(),
            drm: gpus.iter().map(|gpu| (gpu.uuid.clone(), self.machine.drm_numbers(gpu))).collect(),
        })
    }

    /// Refuses a claim that would get a GPU which containers of another claim may open.
    ///
    /// # Errors
    /// Fails with [`Refusal::Reached`].
    pub(super) fn refuse_reached(
        &self,
        request: &Request,
        facts: &Inventory,
        ledger: &Ledger,
        boot_id: &str,
    ) -> Result<(), PrepareError> {
        let numbering = self.numbering(&facts.gpus).map_err(|source| PrepareError::Step {
            step: "tell which devices are whose".to_owned(),
            source,
        })?;
        let meanings = numbering.meanings(&facts.gpus, &[]);
        let reached = self.reached(ledger, boot_id, &meanings)?;
        for wanted in request.devices.iter().filter(|wanted| wanted.device.kind() != DeviceKind::Admin) {
            let gpu = facts.gpus.iter().find(|gpu| gpu.minor == wanted.device.minor());
            let reach = gpu
                .and_then(|gpu| device_number_reuse::obstacle(&reached, &request.claim.uid, &gpu.uuid, None));
            if let Some(reach) = reach {
                let refusal =
                    Refusal::Reached { device: wanted.device.clone(), reach: Box::new(reach.clone()) };
                return Err(PlanError::new(&wanted.request, refusal).into());
            }
        }
        Ok(())
    }

    /// Refuses hardware that a claim's steps have changed if containers of another claim may open it. It is
    /// called right before the claim's spec is written: by then modes are switched and partitions made.
    ///
    /// # Errors
    /// Fails with [`StepError::Reached`].
    pub(super) fn refuse_reached_hardware(&self, record: &Record) -> Result<(), StepError> {
        self.refuse_reached_switched(record)?;
        self.refuse_reached_partitions(record)
    }

    /// Refuses partitions of a claim which containers of another claim may open. The numbers of a partition
    /// are known only after it was made.
    ///
    /// # Errors
    /// Fails with [`StepError::Reached`].
    fn refuse_reached_partitions(&self, record: &Record) -> Result<(), StepError> {
        let partitions =
            record.devices.iter().filter_map(|device| Some((&device.gpu, device.partition.as_ref()?)));
        for (gpu, partition) in partitions {
            let info = self.machine.gpus.gpu(gpu)?;
            let mut live = self.machine.gpus.live_migs(gpu)?;
            live.retain(|mig| mig.placement == partition.placement);
            let meanings = self.numbering(&[])?.meanings(&[info], &live);
            let capabilities: Vec<Meaning> =
                meanings.into_iter().filter(|meaning| meaning.partition.is_some()).collect();
            let reached = self.reached(&self.ledger()?, &record.boot_id, &capabilities)?;
            if let Some(reach) =
                device_number_reuse::obstacle(&reached, &record.claim.uid, gpu, Some(partition.placement))
            {
                return Err(StepError::Reached(Box::new(reach.clone())));
            }
        }
        Ok(())
    }

    /// Refuses GPUs whose MIG mode was switched for a claim if containers of another claim may open them. The
    /// switch may have given a GPU another number than it had at the first check.
    ///
    /// # Errors
    /// Fails with [`StepError::Reached`].
    fn refuse_reached_switched(&self, record: &Record) -> Result<(), StepError> {
        let switched = record.steps.iter().filter_map(|step| match step {
            Step::SwitchMig { gpu, .. } => Some(gpu),
            _ => None,
        });
        // The device number of a GPU that left the driver opens nothing.
        let with_driver = |gpu: &&GpuUuid| {
            record.devices.iter().all(|device| &device.gpu != *gpu || device.passed.is_none())
        };
        for gpu in switched.filter(with_driver) {
            let info = self.machine.gpus.gpu(gpu)?;
            let meanings = self.numbering(std::slice::from_ref(&info))?.meanings(&[info], &[]);
            let reached = self.reached(&self.ledger()?, &record.boot_id, &meanings)?;
            if let Some(reach) = device_number_reuse::obstacle(&reached, &record.claim.uid, gpu, None) {
                return Err(StepError::Reached(Box::new(reach.clone())));
            }
        }
        Ok(())
    }

    /// Returns the devices that containers may open although their claim does not have them, including
    /// containers of claims whose records are lost.
    fn reached(
        &self,
        ledger: &Ledger,
        boot_id: &str,
        meanings: &[Meaning],
    ) -> Result<Vec<Reach>, StoreError> {
        let unaccounted = self.unaccounted(&self.specs()?, ledger);
        let beside = unaccounted.iter().flat_map(|lost| lost.reaches(meanings));
        Ok(device_number_reuse::reached(ledger, boot_id, meanings).into_iter().chain(beside).collect())
    }

    /// Records the numbers that the specs on disk name. Earlier releases did not record them, and a process
    /// that was killed may have written a spec without recording its numbers.
    pub(super) fn note_numbers(&self, boot_id: &str) -> Result<(), StoreError> {
        let read = |record: &Record| -> Option<_> {
            let spec = self.machine.spec_on_disk(record).ok()??;
            Some((record.claim.uid.clone(), device_number_reuse::named(&spec)))
        };
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        let running = ledger.claims.values().filter(|record| record.is_prepared(boot_id));
        let named: Vec<_> = running.filter_map(read).collect();
        let mut changed = false;
        for (uid, named) in named {
            let Some(record) = ledger.claims.get_mut(&uid) else { continue };
            changed |= !record.numbers.is_superset(&named);
            record.numbers.extend(named);
        }
        if changed {
            locked.save_releasing(&ledger)?;
        }
        Ok(())
    }

    /// Rewrites the CDI specs that name other device numbers than their claims' devices have now. A result
    /// whose hardware is gone gets no device.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available at all.
    pub fn renumber(&self) -> Result<Renumbered, PrepareError> {
        let boot_id = self.boot_id()?;
        self.name_partitions(&boot_id)?;
        let mut done = Renumbered::default();
        let prepared = self.ledger()?.claims.into_values().filter(|record| record.is_prepared(&boot_id));
        for record in prepared.filter(has_numbers) {
            match self.renumber_claim(&record.claim.uid, &boot_id) {
                Ok(true) => done.rewritten.push(record.claim),
                Ok(false) => {}
                Err(PrepareError::Reserved(ReserveError::Busy { .. })) => done.busy.push(record.claim),
                Err(error) => done.failed.push((record.claim, error.to_string())),
            }
        }
        Ok(done)
    }

    fn renumber_claim(&self, uid: &str, boot_id: &str) -> Result<bool, PrepareError> {
        // An operation that has the claim reserved may be writing the spec.
        let _claim = reservation::claim(self.store.dir(), uid, Duration::ZERO)?;
        let Some(mut record) = self.record(uid)?.filter(|record| record.is_prepared(boot_id)) else {
            return Ok(false);
        };
        let rewritten = self.renumber_spec(&mut record)?;
        // This is done even if the spec is up to date: a process that was killed may have written only the
        // spec.
        self.machine.renumber_mps(&record).map_err(|source| PrepareError::Step {
            step: "ask for its MPS daemon by the numbers that its GPUs have now".to_owned(),
            source,
        })?;
        Ok(rewritten)
    }

    /// Rewrites the CDI spec of a claim, which is reserved. Returns false if the spec was up to date.
    fn renumber_spec(&self, record: &mut Record) -> Result<bool, PrepareError> {
        let failed = |source| PrepareError::Step { step: "bring its CDI spec up to date".to_owned(), source };
        // A spec that was wiped starts no container, and is written when the kubelet asks.
        let Some(before) = self.machine.spec_on_disk(record).map_err(failed)? else { return Ok(false) };
        let spec = self.machine.spec(record, Missing::LeftOut).map_err(failed)?;
        if device_number_reuse::same_devices(&before, &spec) {
            return Ok(false);
        }
        {
            let mut locked = self.store.lock(self.lock_timeout)?;
            let mut ledger = locked.load()?.ledger;
            let Some(there) = ledger.claims.get_mut(&record.claim.uid) else { return Ok(false) };
            there.numbers.extend(device_number_reuse::named(&before));
            there.numbers.extend(device_number_reuse::named(&spec));
            self.machine.probe.at("before noting numbers");
            locked.save_releasing(&ledger)?;
        }
        self.machine.probe.at("before renumbering");
        self.machine.write_spec(record, &spec).map_err(failed)?;
        self.machine.probe.at("after renumbering");
        Ok(true)
    }
}

/// Returns true if the claim has a device that the driver numbers. GPUs that are with virtual machines have
/// no numbers.
fn has_numbers(record: &Record) -> bool {
    record.devices.iter().any(|device| device.passed.is_none())
}

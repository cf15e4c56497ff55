//! Device numbers: who is refused because of them, and CDI specs that follow when the driver numbers its devices
//! otherwise. The rules are [`crate::reach`]'.

use super::{Node, PrepareError};
use crate::claim::{ClaimRef, Request};
use crate::devices::Majors;
use crate::execute::{Missing, StepError};
use crate::ledger::{DeviceNumber, Ledger, Record};
use crate::plan::{PlanError, Refusal, Step};
use crate::reach::{self, Meaning, Reach};
use crate::reservation::{self, ReserveError};
use crate::store::{StoreError, io_error};
use aliquot_model::{DeviceKind, GpuInfo, GpuUuid, LiveMig};
use aliquot_nvml::Inventory;
use aliquot_nvml::caps::MigMinors;
use std::collections::BTreeMap;
use std::time::Duration;

/// How the driver numbers its devices at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbering {
    majors: Majors,
    caps: MigMinors,
    /// Minor numbers of the GPUs that can be read.
    gpus: BTreeMap<GpuUuid, u32>,
    /// Their DRM nodes, which are numbered as their module finds the GPUs.
    drm: BTreeMap<GpuUuid, Vec<DeviceNumber>>,
}

impl Numbering {
    /// What the numbers mean.
    pub fn meanings(&self, gpus: &[GpuInfo], live: &[LiveMig]) -> Vec<Meaning> {
        let mut meanings = reach::meanings(gpus, live, &self.majors, &self.caps);
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

/// What became of CDI specs when the driver was found to number its devices otherwise.
#[derive(Debug, Default)]
pub struct Renumbered {
    /// Claims whose specs were written anew.
    pub rewritten: Vec<ClaimRef>,
    /// Claims whose specs could not be compared or written, and why.
    pub failed: Vec<(ClaimRef, String)>,
    /// Claims that somebody is at work on, whose turn comes later.
    pub busy: Vec<ClaimRef>,
}

impl Node {
    /// How the driver numbers its devices now.
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
    /// [`Refusal::Reached`].
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
            let reach = gpu.and_then(|gpu| reach::obstacle(&reached, &request.claim.uid, &gpu.uuid, None));
            if let Some(reach) = reach {
                let refusal =
                    Refusal::Reached { device: wanted.device.clone(), reach: Box::new(reach.clone()) };
                return Err(PlanError::new(&wanted.request, refusal).into());
            }
        }
        Ok(())
    }

    /// Refuses what a claim's steps have changed on its GPUs and containers of another claim may open. Right before its spec
    /// is written: then modes are switched and partitions made.
    ///
    /// # Errors
    /// [`StepError::Reached`].
    pub(super) fn refuse_reached_hardware(&self, record: &Record) -> Result<(), StepError> {
        self.refuse_reached_switched(record)?;
        self.refuse_reached_partitions(record)
    }

    /// Refuses partitions of a claim which containers of another claim may open. Which numbers a partition has is known
    /// only when it was made.
    ///
    /// # Errors
    /// [`StepError::Reached`].
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
            if let Some(reach) = reach::obstacle(&reached, &record.claim.uid, gpu, Some(partition.placement))
            {
                return Err(StepError::Reached(Box::new(reach.clone())));
            }
        }
        Ok(())
    }

    /// Refuses GPUs whose MIG mode was switched for a claim if containers of another claim may open them. By the switch a
    /// GPU may have got another number than it had when that was looked at first.
    ///
    /// # Errors
    /// [`StepError::Reached`].
    fn refuse_reached_switched(&self, record: &Record) -> Result<(), StepError> {
        let switched = record.steps.iter().filter_map(|step| match step {
            Step::SwitchMig { gpu, .. } => Some(gpu),
            _ => None,
        });
        // The number of a GPU that left the driver opens nothing of it.
        let with_driver = |gpu: &&GpuUuid| {
            record.devices.iter().all(|device| &device.gpu != *gpu || device.passed.is_none())
        };
        for gpu in switched.filter(with_driver) {
            let info = self.machine.gpus.gpu(gpu)?;
            let meanings = self.numbering(std::slice::from_ref(&info))?.meanings(&[info], &[]);
            let reached = self.reached(&self.ledger()?, &record.boot_id, &meanings)?;
            if let Some(reach) = reach::obstacle(&reached, &record.claim.uid, gpu, None) {
                return Err(StepError::Reached(Box::new(reach.clone())));
            }
        }
        Ok(())
    }

    /// What containers of claims may open although it is not their claim's, those of claims whose records are lost too.
    fn reached(
        &self,
        ledger: &Ledger,
        boot_id: &str,
        meanings: &[Meaning],
    ) -> Result<Vec<Reach>, StoreError> {
        let unaccounted = self.unaccounted(&self.specs()?, ledger);
        let beside = unaccounted.iter().flat_map(|lost| lost.reaches(meanings));
        Ok(reach::reached(ledger, boot_id, meanings).into_iter().chain(beside).collect())
    }

    /// Writes down which numbers the specs on disk name: earlier releases did not, and a process that was killed may
    /// have written a spec and no more.
    pub(super) fn note_numbers(&self, boot_id: &str) -> Result<(), StoreError> {
        let read = |record: &Record| -> Option<_> {
            let spec = self.machine.spec_on_disk(record).ok()??;
            Some((record.claim.uid.clone(), reach::named(&spec)))
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

    /// Writes the CDI specs anew that name other device numbers than their claims' devices have now. A result whose
    /// hardware is gone gets no device.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had at all.
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
        // Whoever has it reserved may be writing the spec.
        let _claim = reservation::claim(self.store.dir(), uid, Duration::ZERO)?;
        let Some(mut record) = self.record(uid)?.filter(|record| record.is_prepared(boot_id)) else {
            return Ok(false);
        };
        let rewritten = self.renumber_spec(&mut record)?;
        // Also where the spec is as it should be: a process that was killed may have written it and no more.
        self.machine.renumber_mps(&record).map_err(|source| PrepareError::Step {
            step: "ask for its MPS daemon by the numbers that its GPUs have now".to_owned(),
            source,
        })?;
        Ok(rewritten)
    }

    /// Writes the CDI spec of a claim anew, which is reserved. Returns false if it was as it should be.
    fn renumber_spec(&self, record: &mut Record) -> Result<bool, PrepareError> {
        let failed = |source| PrepareError::Step { step: "bring its CDI spec up to date".to_owned(), source };
        // One that was wiped starts no container, and is written when the kubelet asks.
        let Some(before) = self.machine.spec_on_disk(record).map_err(failed)? else { return Ok(false) };
        let spec = self.machine.spec(record, Missing::LeftOut).map_err(failed)?;
        if reach::same_devices(&before, &spec) {
            return Ok(false);
        }
        {
            let mut locked = self.store.lock(self.lock_timeout)?;
            let mut ledger = locked.load()?.ledger;
            let Some(there) = ledger.claims.get_mut(&record.claim.uid) else { return Ok(false) };
            there.numbers.extend(reach::named(&before));
            there.numbers.extend(reach::named(&spec));
            self.machine.probe.at("before noting numbers");
            locked.save_releasing(&ledger)?;
        }
        self.machine.probe.at("before renumbering");
        self.machine.write_spec(record, &spec).map_err(failed)?;
        self.machine.probe.at("after renumbering");
        Ok(true)
    }
}

/// Returns true if the driver numbers something of the claim's. It numbers nothing of GPUs that are with virtual machines.
fn has_numbers(record: &Record) -> bool {
    record.devices.iter().any(|device| device.passed.is_none())
}

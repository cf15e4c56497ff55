//! Gives the same answer again for a claim that is prepared. Missing parts are made anew, and existing parts
//! are not touched.

use super::attempt::put;
use super::{Node, PrepareError, Prepared, partitions};
use crate::edits;
use crate::execute::StepError;
use crate::ledger::{Device, Ledger, Record};
use crate::metadata;
use crate::plan::Step;
use crate::share;
use aliquot_nvml::GpuError;
use std::collections::BTreeSet;

impl Node {
    /// Gives the same answer again. Missing parts (a CDI spec that was wiped, a partition that was destroyed)
    /// are made anew. Existing parts are not touched, because pods may be running on them. The claim is
    /// reserved. `changed` is true if the record differs from the ledger's.
    pub(super) fn prepare_again(
        &self,
        mut record: Record,
        mut changed: bool,
    ) -> Result<Vec<Prepared>, PrepareError> {
        let _gpus = self.reserve_hardware(&mut record)?;
        let before = record.clone();
        for step in record.steps.clone() {
            if self.holds(&record, &step)? {
                continue;
            }
            if let Some(place) = step.place() {
                self.unname(&place, &record.boot_id)?;
                self.ledger()?.refresh(&mut record);
                changed = true;
            }
            // Steps that only write or switch again are no sign that something is missing.
            if !matches!(step, Step::WriteSpec | Step::SwitchMig { .. }) {
                tracing::warn!(claim.uid = %record.claim.uid, %step, "prepared hardware is missing, making it again");
            }
            let made = match step {
                Step::WriteSpec => self.refuse_reached_hardware(&record),
                _ => Ok(()),
            };
            match made.and_then(|()| self.machine.run(&mut record, &step)) {
                Ok(()) => {}
                // The spec of running pods stays as it was written while the GPU answered.
                Err(StepError::Gpu(error))
                    if error.is_stuck() && step == Step::WriteSpec && self.machine.has_spec(&record) =>
                {
                    tracing::warn!(claim.uid = %record.claim.uid, %error, "the CDI spec stays as it is");
                }
                Err(source) => return Err(PrepareError::Step { step: step.to_string(), source }),
            }
        }
        let prepared = self.answer(&record);
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        changed |= before != record;
        if changed {
            put(&mut ledger, record.clone());
        }
        if partitions::name_as(&mut ledger, &record) || changed {
            self.machine.probe.at("before writing down what was made again");
            locked.save_releasing(&ledger)?;
            self.machine.probe.at("after writing down what was made again");
        }
        self.rebalance(&ledger)?;
        Ok(prepared)
    }

    /// Returns true if a step's effect is there.
    fn holds(&self, record: &Record, step: &Step) -> Result<bool, GpuError> {
        Ok(match step {
            // A GPU that is with vfio-pci has no MIG mode.
            Step::SwitchMig { gpu, .. } => record.devices.iter().any(|device| {
                let passed = device.passed.as_deref().filter(|_| device.gpu == *gpu);
                passed.is_some_and(|passed| self.machine.is_on_vfio(&passed.address).unwrap_or(false))
            }),
            // Writing an unchanged spec and switching to the mode in force do nothing.
            Step::WriteSpec => false,
            Step::SetTimeSlice { .. } => true,
            Step::CreatePartition { gpu, placement, .. } => {
                let uuid = record
                    .devices
                    .iter()
                    .filter(|device| &device.gpu == gpu)
                    .filter_map(|device| device.partition.as_ref())
                    .find(|partition| partition.placement == *placement)
                    .and_then(|partition| partition.uuid.as_ref());
                let live = self.machine.gpus.live_migs(gpu)?;
                // A partition without a UUID was left half made by a process that died.
                uuid.is_some()
                    && live.iter().any(|mig| mig.placement == *placement && mig.uuid.as_ref() == uuid)
            }
            // If the GPU does not answer, the settings are assumed to be there.
            Step::MakeExclusive { gpu } => or_stuck(self.machine.is_exclusive(gpu))?,
            Step::StartMps { .. } => or_stuck(self.machine.has_mps(record))?,
            Step::BindVfio { address, .. } => self.machine.is_on_vfio(address).unwrap_or(false),
            Step::MakeShare { result_id } => {
                share::region_path(&self.machine.site.shares_dir, result_id).is_file()
            }
        })
    }

    /// Returns the answer to the kubelet for a completed record.
    pub fn answer(&self, record: &Record) -> Vec<Prepared> {
        self.answer_for(&record.claim.uid, &record.devices, |_| record.metadata.is_some())
    }

    /// Builds the answer. `has_metadata` returns true if containers of a request get device metadata.
    pub(super) fn answer_for(
        &self,
        uid: &str,
        devices: &[Device],
        has_metadata: impl Fn(&str) -> bool,
    ) -> Vec<Prepared> {
        let driver = &self.machine.site.driver;
        let mut told: BTreeSet<&str> = BTreeSet::new();
        let mut answers = Vec::with_capacity(devices.len());
        for device in devices {
            let request = metadata::base(&device.request);
            let common = device.passed.is_none().then(|| edits::common_id(driver, uid));
            let mut cdi: Vec<String> =
                common.into_iter().chain([edits::device_id(driver, &device.result_id)]).collect();
            // The kubelet gives a container the ids of all devices of a request, and one of them is enough.
            if told.insert(request) && has_metadata(request) {
                cdi.push(metadata::device_id(driver, uid, request));
            }
            answers.push(Prepared {
                request: request.to_owned(),
                pool: device.pool.clone(),
                device: device.device.clone(),
                share_id: device.share_id.clone(),
                cdi,
            });
        }
        answers
    }

    /// Gives best-effort shares the compute that no share was promised.
    pub(super) fn rebalance(&self, ledger: &Ledger) -> Result<(), PrepareError> {
        share::rebalance(&self.machine.site.shares_dir, &self.machine.labels, ledger).map_err(|source| {
            PrepareError::Step { step: "divide what no share was promised".to_owned(), source: source.into() }
        })
    }
}

fn or_stuck(found: Result<bool, GpuError>) -> Result<bool, GpuError> {
    match found {
        Err(error) if error.is_stuck() => Ok(true),
        found => found,
    }
}

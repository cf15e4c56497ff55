//! Manages GPUs that a claim has through MPS: their compute mode, and the claim's daemon.

use super::{Machine, StepError};
use crate::ledger::{Ledger, Record};
use aliquot_model::{DeviceKind, GpuUuid};
use aliquot_mps::contract::{Ask, AskedGpu, ClaimRef, Version};
use aliquot_nvml::{ComputeMode, GpuError, GpuProcess, ProcessKind};
use std::collections::BTreeSet;

impl Machine {
    /// Sets the compute mode in which only one process has contexts on a GPU: the MPS daemon's server.
    pub(super) fn make_exclusive(&self, gpu: &GpuUuid) -> Result<(), StepError> {
        match self.gpus.compute_mode(gpu)? {
            ComputeMode::ExclusiveProcess => Ok(()),
            // An administrator set this mode so that nothing runs there.
            ComputeMode::Prohibited => Err(StepError::Prohibited { gpu: gpu.clone() }),
            ComputeMode::Default => Ok(self.gpus.set_compute_mode(gpu, ComputeMode::ExclusiveProcess)?),
        }
    }

    /// Resets the compute mode, so that all processes may have contexts on a GPU again. A mode that stays
    /// would keep the next claim's second process from running, so failures are returned. Nothing needs
    /// undoing if the GPU or its driver is gone.
    pub(crate) fn reset_compute_mode(
        &self,
        uid: &str,
        gpu: &GpuUuid,
        ledger: &Ledger,
        boot_id: &str,
    ) -> Result<(), StepError> {
        if ledger.has_others_here(uid, gpu, boot_id, |device| device.kind() == Some(DeviceKind::Mps)) {
            return Ok(());
        }
        let reset = || match self.gpus.compute_mode(gpu)? {
            ComputeMode::ExclusiveProcess => self.gpus.set_compute_mode(gpu, ComputeMode::Default),
            // There is nothing to undo, or an administrator changed the mode since.
            ComputeMode::Default | ComputeMode::Prohibited => Ok(()),
        };
        match reset() {
            Err(error) if error.is_gone() || self.is_unloaded(&error) => {
                tracing::warn!(gpu.uuid = %gpu, %error, "the GPU or its driver is gone, and the compute mode with it");
                Ok(())
            }
            reset => Ok(reset?),
        }
    }

    pub(super) fn start_mps(&self, record: &Record) -> Result<(), StepError> {
        let running = || self.computing(&mps_gpus(record));
        Ok(self.mps.start(&self.labels, &self.mps_ask(record)?, &running, &self.probe)?)
    }

    pub(super) fn end_mps(&self, record: &Record, uid: &str, boot_id: &str) -> Result<(), StepError> {
        // No process of an earlier boot is left; processes that run there now are not the claim's.
        let is_past = record.boot_id != boot_id;
        let running = || if is_past { Ok(Vec::new()) } else { self.computing(&mps_gpus(record)) };
        self.mps.end(uid, &running, &self.probe)?;
        Ok(())
    }

    /// Updates the claim's ask, so that its next daemon gets the device nodes that its GPUs have now.
    pub(crate) fn renumber_mps(&self, record: &Record) -> Result<(), StepError> {
        if mps_gpus(record).is_empty() {
            return Ok(());
        }
        match self.mps_ask(record) {
            Ok(ask) => Ok(self.mps.ask_anew(&ask)?),
            // No daemon runs on a GPU that is gone.
            Err(error) if error.is_gone() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the processes that compute on GPUs. Graphics processes belong to a screen and not to a claim.
    /// Nothing runs on a GPU that the driver has lost, or without the driver.
    pub(crate) fn computing(&self, gpus: &BTreeSet<GpuUuid>) -> Result<Vec<GpuProcess>, GpuError> {
        let mut found = Vec::new();
        for gpu in gpus {
            match self.gpus.processes(gpu) {
                Ok(processes) => found.extend(processes),
                Err(error) if error.is_gone() || self.is_unloaded(&error) => {}
                Err(error) => return Err(error),
            }
        }
        found.retain(|process| process.kind != ProcessKind::Graphics);
        Ok(found)
    }

    /// Returns true if a GPU is exclusive.
    pub(crate) fn is_exclusive(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        Ok(self.gpus.compute_mode(gpu)? == ComputeMode::ExclusiveProcess)
    }

    /// Returns true if a claim's daemon is there and ready.
    pub(crate) fn has_mps(&self, record: &Record) -> Result<bool, GpuError> {
        Ok(self.mps.is_ready(&self.mps_ask(record)?))
    }

    /// Builds the ask to the supervisor for a claim. All its MPS devices have the same settings.
    fn mps_ask(&self, record: &Record) -> Result<Ask, GpuError> {
        let devices = || record.devices.iter().filter_map(|device| Some((device, device.mps.as_ref()?)));
        let gpu = |uuid: &GpuUuid| {
            let minor = self.gpus.gpu(uuid)?.minor;
            Ok(AskedGpu { uuid: uuid.to_string(), minor })
        };
        let config = devices().map(|(_, config)| config.clone()).next().unwrap_or_default();
        Ok(Ask {
            version: Version,
            claim: ClaimRef {
                namespace: record.claim.namespace.clone(),
                name: record.claim.name.clone(),
                uid: record.claim.uid.clone(),
            },
            gpus: devices().map(|(device, _)| gpu(&device.gpu)).collect::<Result<_, GpuError>>()?,
            active_thread_percentage: config.active_thread_percentage.map(u32::from),
            pinned_device_memory_limit_bytes: config.pinned_bytes(),
        })
    }
}

/// Returns the GPUs that a claim has through MPS.
fn mps_gpus(record: &Record) -> BTreeSet<GpuUuid> {
    let devices = record.devices.iter().filter(|device| device.mps.is_some());
    devices.map(|device| device.gpu.clone()).collect()
}

//! Runs the steps of a claim that gives a GPU to a virtual machine.

use super::{Machine, StepError};
use crate::devices::CharDevice;
use crate::ledger::{Device, Passed, Record};
use crate::vfio::VfioError;
use crate::vfio::note::{self, Note};
use aliquot_model::{GpuInfo, GpuUuid};
use aliquot_nvml::GpuError;

impl Machine {
    pub(super) fn bind_vfio(&self, record: &Record, gpu: &GpuUuid) -> Result<(), StepError> {
        let passed = passed(record, gpu).ok_or_else(|| StepError::NothingToPass(gpu.clone()))?;
        // The note comes first: if the checkpoint is lost, the note is what undoes the rest.
        let (claim, passed) = (record.claim.uid.clone(), passed.clone());
        let note = Note { claim, passed };
        note::write(&self.data_dir, &record.boot_id, &note)?;
        self.probe.at("after the note of a GPU");
        Ok(self.vfio.bind(&*self.gpus, gpu, &note.passed, &self.probe)?)
    }

    /// Undoes the binding to vfio-pci. A boot begins with NVIDIA's driver: bindings of an earlier boot are
    /// gone, and the address may mean another card.
    pub(super) fn unbind_vfio(
        &self,
        record: &Record,
        gpu: &GpuUuid,
        address: &str,
        boot_id: &str,
    ) -> Result<(), StepError> {
        if record.boot_id != boot_id {
            note::forget(&self.data_dir, &record.boot_id, gpu);
            return Ok(());
        }
        let persistence = passed(record, gpu).is_some_and(|passed| passed.persistence);
        self.take_back(gpu, address, persistence, boot_id)
    }

    /// Takes a GPU back from a virtual machine. The driver keeps it initialised again if `persistence` is
    /// true.
    pub(crate) fn take_back(
        &self,
        gpu: &GpuUuid,
        address: &str,
        persistence: bool,
        boot_id: &str,
    ) -> Result<(), StepError> {
        self.vfio.release(&*self.gpus, gpu, address, persistence, &self.probe)?;
        note::forget(&self.data_dir, boot_id, gpu);
        Ok(())
    }

    /// Returns true if a GPU is in the state in which [`Step::BindVfio`](crate::plan::Step::BindVfio) leaves
    /// it.
    pub(crate) fn is_on_vfio(&self, address: &str) -> Result<bool, VfioError> {
        self.vfio.is_bound(address)
    }

    /// Returns the facts of a device's GPU. A GPU that is with a virtual machine is described as it was
    /// before.
    pub(super) fn info_of(&self, device: &Device) -> Result<GpuInfo, GpuError> {
        match &device.passed {
            Some(passed) => Ok(passed.info.clone()),
            None => self.gpus.gpu(&device.gpu),
        }
    }

    /// Returns the facts of a device's GPU as [`Self::info_of`] does. Returns `None` for admin access to a
    /// GPU that is not there now, such as one with a virtual machine.
    pub(super) fn info_unless_gone(&self, device: &Device) -> Result<Option<GpuInfo>, GpuError> {
        match self.info_of(device) {
            Err(error) if device.held.is_none() && error.is_gone() => Ok(None),
            info => info.map(Some),
        }
    }

    pub(super) fn passed_nodes(&self, passed: &Passed) -> Result<Vec<CharDevice>, StepError> {
        Ok(self.vfio.nodes(passed)?)
    }
}

fn passed<'a>(record: &'a Record, gpu: &GpuUuid) -> Option<&'a Passed> {
    let of_gpu = record.devices.iter().filter(|device| &device.gpu == gpu);
    of_gpu.filter_map(|device| device.passed.as_deref()).next()
}

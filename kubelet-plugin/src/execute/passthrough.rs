//! The steps of a claim that gives a GPU to a virtual machine.

use super::{Machine, StepError};
use crate::devices::CharDevice;
use crate::ledger::{Device, Passed, Record};
use crate::vfio::VfioError;
use aliquot_model::{GpuInfo, GpuUuid};
use aliquot_nvml::GpuError;

impl Machine {
    pub(super) fn bind_vfio(&self, record: &Record, gpu: &GpuUuid) -> Result<(), StepError> {
        let passed = record.devices.iter().filter(|device| &device.gpu == gpu);
        let passed = passed.filter_map(|device| device.passed.as_deref()).next();
        let passed = passed.ok_or_else(|| StepError::NothingToPass(gpu.clone()))?;
        Ok(self.vfio.bind(&*self.gpus, gpu, passed, &self.probe)?)
    }

    /// A boot begins with NVIDIA's driver: what an earlier one left is gone, and the address may mean another card.
    pub(super) fn unbind_vfio(
        &self,
        record: &Record,
        gpu: &GpuUuid,
        address: &str,
        boot_id: &str,
    ) -> Result<(), StepError> {
        if record.boot_id != boot_id {
            return Ok(());
        }
        Ok(self.vfio.release(&*self.gpus, gpu, address, &self.probe)?)
    }

    /// Takes a GPU back of which only a CDI spec says that a virtual machine has it.
    pub(crate) fn take_back(&self, gpu: &GpuUuid, address: &str) -> Result<(), StepError> {
        Ok(self.vfio.release(&*self.gpus, gpu, address, &self.probe)?)
    }

    /// Whether a GPU is as [`Step::BindVfio`](crate::plan::Step::BindVfio) leaves it.
    pub(crate) fn is_on_vfio(&self, address: &str) -> Result<bool, VfioError> {
        self.vfio.is_bound(address)
    }

    /// The GPU of a device: one that is with a virtual machine as it was before.
    pub(super) fn info_of(&self, device: &Device) -> Result<GpuInfo, GpuError> {
        match &device.passed {
            Some(passed) => Ok(passed.info.clone()),
            None => self.gpus.gpu(&device.gpu),
        }
    }

    pub(super) fn passed_nodes(&self, passed: &Passed) -> Result<Vec<CharDevice>, StepError> {
        Ok(self.vfio.nodes(passed)?)
    }
}

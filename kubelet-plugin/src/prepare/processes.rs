//! Who runs on what, as far as the driver tells.

use super::{Node, PrepareError, Unaccounted};
use crate::ledger::Record;
use crate::partitioning::Partitioning;
use aliquot_model::{DeviceKind, DeviceName, GpuUuid, LiveMig};
use std::collections::BTreeSet;

impl Node {
    /// Whether a process runs on the hardware of a claim, as far as that can be told: on a shared GPU a
    /// neighbour's process looks the same. In doubt one does.
    pub fn has_processes(&self, record: &Record) -> bool {
        record.devices.iter().filter(|device| device.held.is_some()).any(|device| {
            let Ok(processes) = self.machine.gpus.processes(&device.gpu) else { return true };
            match &device.partition {
                None => !processes.is_empty(),
                Some(partition) => {
                    let Ok(live) = self.machine.gpus.live_migs(&device.gpu) else { return true };
                    let instance = live.iter().find(|mig| mig.placement == partition.placement);
                    let Some(instance) = instance else { return false };
                    processes.iter().any(|process| process.gpu_instance == Some(instance.gpu_instance))
                }
            }
        })
    }

    /// Destroys an instance that no claim has and in which no process runs. Returns whether it was.
    ///
    /// # Errors
    /// If the lock cannot be had or the GPU refuses.
    pub fn destroy_foreign(&self, mig: &LiveMig) -> Result<bool, PrepareError> {
        // Nobody can take the place while the GPU is reserved.
        let _gpu = self.reserve_gpus(&BTreeSet::from([mig.parent.clone()]))?;
        let ledger = self.ledger()?;
        if ledger.knows(mig) || self.partitioning.get() != Partitioning::OnDemand {
            return Ok(false);
        }
        let processes = self.machine.gpus.processes(&mig.parent)?;
        if processes.iter().any(|process| process.gpu_instance == Some(mig.gpu_instance)) {
            return Ok(false);
        }
        self.machine.gpus.destroy_mig(mig)?;
        Ok(true)
    }

    /// Whether a process runs on what the spec of an unaccounted claim names, as far as that can be told. In doubt
    /// one does.
    pub fn has_strangers(&self, unaccounted: &Unaccounted) -> bool {
        unaccounted.named.iter().filter(|named| named.device.kind() != DeviceKind::Admin).any(|named| {
            let inventory = self.machine.gpus.inventory_of(&BTreeSet::from([named.device.minor()]));
            let Some(inventory) = inventory.ok().filter(|inventory| inventory.unreadable.is_empty()) else {
                return true;
            };
            let on = |gpu: &GpuUuid, instance: Option<u32>| {
                self.machine.gpus.processes(gpu).map_or(true, |processes| {
                    processes.iter().any(|process| instance.is_none() || process.gpu_instance == instance)
                })
            };
            match &named.device {
                DeviceName::Mig { .. } => inventory
                    .live
                    .iter()
                    .filter(|mig| mig.uuid.as_ref().is_some_and(|uuid| uuid.as_str() == named.uuid))
                    .any(|mig| on(&mig.parent, Some(mig.gpu_instance))),
                DeviceName::Plain { .. } => inventory
                    .gpus
                    .iter()
                    .filter(|gpu| gpu.uuid.as_str() == named.uuid)
                    .any(|gpu| on(&gpu.uuid, None)),
            }
        })
    }
}

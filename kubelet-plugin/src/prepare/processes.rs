//! Finds the processes that run on hardware, as far as the driver reports them.

use super::{Node, PrepareError, Unaccounted};
use crate::audit::process_owner;
use crate::ledger::Record;
use crate::own_partitions;
use crate::partitioning::Partitioning;
use aliquot_model::{DeviceKind, DeviceName, LiveMig};
use aliquot_nvml::GpuProcess;
use std::collections::BTreeSet;

impl Node {
    /// Returns true if a process runs on the hardware of a claim. On a shared GPU a neighbour's process looks
    /// the same. If it cannot be found out, returns true.
    pub fn has_processes(&self, record: &Record) -> bool {
        record.devices.iter().filter(|device| device.held.is_some()).any(|device| {
            if let Some(passed) = device.passed.as_deref().filter(|p| self.machine.vfio.is_away(&p.address)) {
                return self.machine.vfio.is_in_use(&passed.address);
            }
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

    /// Returns true if no process runs in an instance. If it cannot be found out, returns false.
    pub fn runs_nothing(&self, mig: &LiveMig) -> bool {
        let processes = self.machine.gpus.processes(&mig.parent);
        processes.is_ok_and(|all| all.iter().all(|process| process.gpu_instance != Some(mig.gpu_instance)))
    }

    /// Destroys an instance that no claim has and in which no process runs. Returns true if it was destroyed.
    ///
    /// # Errors
    /// Fails if the lock is not available or the GPU refuses.
    pub fn destroy_foreign(&self, mig: &LiveMig) -> Result<bool, PrepareError> {
        // While the GPU is reserved, no other operation can take the place.
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
        if let Some(uuid) = &mig.uuid {
            own_partitions::forget(&self.machine.data_dir, &self.boot_id()?, uuid);
        }
        Ok(true)
    }

    /// Returns true if a process runs on hardware that an unaccounted claim may have. If it cannot be found
    /// out, returns true. Processes of the pods `others` do not count.
    pub fn has_strangers(&self, unaccounted: &Unaccounted, others: &BTreeSet<String>) -> bool {
        if unaccounted.unreadable.is_some() {
            return self.has_strangers_anywhere(others).unwrap_or(true);
        }
        let passed = unaccounted.named.iter().filter_map(|named| named.passed.as_deref());
        if passed.into_iter().any(|address| self.machine.vfio.is_in_use(address)) {
            return true;
        }
        let named: Vec<(&DeviceName, Option<&str>)> = if unaccounted.named.is_empty() {
            unaccounted.devices.iter().map(|device| (device, None)).collect()
        } else {
            unaccounted.named.iter().map(|named| (&named.device, Some(named.uuid.as_str()))).collect()
        };
        named
            .into_iter()
            .filter(|(device, _)| device.kind() != DeviceKind::Admin)
            .any(|(device, uuid)| self.has_strangers_on(device, uuid, others).unwrap_or(true))
    }

    /// Checks one device; `uuid` is the UUID that it had, if that is known. Returns `None` if it cannot be
    /// found out.
    fn has_strangers_on(
        &self,
        device: &DeviceName,
        uuid: Option<&str>,
        others: &BTreeSet<String>,
    ) -> Option<bool> {
        let inventory = self.machine.gpus.inventory_of(&BTreeSet::from([device.minor()])).ok()?;
        if !inventory.unreadable.is_empty() {
            return None;
        }
        let is_it = |present: &str| uuid.is_none_or(|uuid| uuid == present);
        let Some(partition) = device.partition() else {
            let gpus = inventory.gpus.iter().filter(|gpu| is_it(gpu.uuid.as_str()));
            return any(gpus.map(|gpu| {
                let processes = self.machine.gpus.processes(&gpu.uuid).ok()?;
                Some(processes.iter().any(|process| !self.is_of(process, others)))
            }));
        };
        let at_its_place =
            |mig: &&LiveMig| mig.profile_id == partition.profile_id && mig.placement.start == partition.start;
        // In a partition that a claim has alone, no other claim's pod has a process.
        let is_shared = device.kind().shareable();
        let instances = inventory.live.iter().filter(|mig| match uuid {
            Some(_) => mig.uuid.as_ref().is_some_and(|uuid| is_it(uuid.as_str())),
            None => at_its_place(mig),
        });
        any(instances.map(|mig| {
            let processes = self.machine.gpus.processes(&mig.parent).ok()?;
            Some(processes.iter().any(|process| {
                process.gpu_instance == Some(mig.gpu_instance) && !(is_shared && self.is_of(process, others))
            }))
        }))
    }

    /// Checks every GPU that no claim with a record holds whole. Returns `None` if it cannot be found out.
    fn has_strangers_anywhere(&self, others: &BTreeSet<String>) -> Option<bool> {
        let inventory = self.machine.gpus.inventory().ok()?;
        let ledger = self.ledger().ok()?;
        if !inventory.unreadable.is_empty() {
            return None;
        }
        let open = inventory.gpus.iter().filter(|gpu| !ledger.is_held_whole(&gpu.uuid));
        any(open.map(|gpu| {
            let processes = self.machine.gpus.processes(&gpu.uuid).ok()?;
            let known = |process: &GpuProcess| {
                let mut live = inventory.live.iter().filter(|mig| mig.parent == gpu.uuid);
                live.any(|mig| process.gpu_instance == Some(mig.gpu_instance) && ledger.knows(mig))
            };
            Some(processes.iter().any(|process| !known(process) && !self.is_of(process, others)))
        }))
    }

    /// Returns true if a process belongs to one of these pods, by their UIDs.
    fn is_of(&self, process: &GpuProcess, pods: &BTreeSet<String>) -> bool {
        let cgroups = std::fs::read_to_string(self.machine.proc_root.join(format!("{}/cgroup", process.pid)));
        let owner = cgroups.ok().and_then(|cgroups| process_owner::owner(&cgroups));
        owner.is_some_and(|owner| pods.contains(&owner.pod))
    }
}

/// Returns true if one of the items is true; `None` if one of them is not known.
fn any(all: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    all.collect::<Option<Vec<bool>>>().map(|all| all.contains(&true))
}

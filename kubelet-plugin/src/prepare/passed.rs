//! GPUs that claims give to virtual machines: NVML does not list them meanwhile, and they are there all the same.

use super::Node;
use crate::claim::Request;
use crate::ledger::{Ledger, Passed};
use crate::plan::Offers;
use aliquot_model::{DeviceKind, GpuInfo, GpuUuid};
use aliquot_nvml::{Cause, GpuError, Inventory, Operation, Unreadable};
use std::collections::BTreeSet;

impl Node {
    /// Adds the GPUs that are with virtual machines, as they were before. Returns which.
    pub(super) fn add_passed(&self, inventory: &mut Inventory, ledger: &Ledger) -> BTreeSet<GpuUuid> {
        // One that is on its way back may be with its driver already, and not in a library that was opened before.
        let vfio = &self.machine.vfio;
        let away = |(passed, moving): &(&Passed, bool)| match moving {
            true => vfio.is_there(&passed.address),
            false => vfio.is_away(&passed.address),
        };
        add(inventory, ledger.passed().filter(away).map(|(passed, _)| passed))
    }

    /// Which of these GPUs a virtual machine could have, or why not. Nothing is looked at for a claim without any.
    pub(super) fn offers(&self, request: &Request, facts: &Inventory) -> Offers {
        let wanted = request.devices.iter().any(|device| device.device.kind() == DeviceKind::Vfio);
        self.offers_of(facts.gpus.iter().filter(|_| wanted))
    }

    /// The same of these GPUs.
    pub(super) fn offers_of<'a>(&self, gpus: impl Iterator<Item = &'a GpuInfo>) -> Offers {
        gpus.map(|gpu| {
            let offer = self.machine.vfio.offer(gpu).map_err(|error| error.to_string());
            (gpu.uuid.clone(), offer)
        })
        .collect()
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
        // The driver gives a number that is free again to the next GPU that comes back. A name is one GPU's.
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

//! Computes the charge of a claim for the controller's budgets. Pure: it does no I/O.

use super::{Charge, Device};
use aliquot_model::{GpuInfo, GpuUuid, MicroGpus, ProfileName};
use aliquot_nvml::Inventory;
use std::collections::BTreeMap;

impl Charge {
    /// Computes the charge of a claim with these devices. `asked` has the profiles of requests that were
    /// given other profiles.
    pub fn of(
        devices: &[Device],
        asked: &BTreeMap<String, ProfileName>,
        inventory: &Inventory,
        since: i64,
    ) -> Self {
        let (mut given, mut instead, mut other) = (MicroGpus(0), MicroGpus(0), false);
        for device in devices {
            let part = part(device, inventory);
            let wanted = asked
                .get(&device.request)
                .and_then(|profile| of_profile(&device.gpu, profile, &inventory.gpus));
            other |= wanted.is_some();
            given = given.plus(part);
            instead = instead.plus(wanted.unwrap_or(part).min(part));
        }
        Self { micro_gpus: given, asked: other.then_some(instead), since }
    }
}

/// Returns the part that a partition of another profile would be of a device's GPU. If that board has no such
/// profile, returns the largest part on any of the node's GPUs, as the controller does. Returns `None` if no
/// GPU has the profile.
fn of_profile(own: &GpuUuid, profile: &ProfileName, gpus: &[GpuInfo]) -> Option<MicroGpus> {
    let slug = profile.slug();
    let on = |gpu: &GpuInfo| {
        let found = gpu.profiles().iter().find(|known| known.name.slug() == slug)?;
        Some(MicroGpus::of_partition(found, gpu))
    };
    let own = gpus.iter().find(|gpu| gpu.uuid == *own)?;
    on(own).or_else(|| gpus.iter().filter_map(on).max())
}

/// Returns a device's part of its GPU; zero with admin access.
fn part(device: &Device, inventory: &Inventory) -> MicroGpus {
    if device.held.is_none() {
        return MicroGpus(0);
    }
    let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == device.gpu);
    let Some(gpu) = gpu else { return MicroGpus::WHOLE };
    match (&device.partition, &device.consumed) {
        (Some(partition), consumed) => {
            let Some(profile) = gpu.profile(partition.profile_id) else { return MicroGpus::WHOLE };
            consumed.map_or_else(
                || MicroGpus::of_partition(profile, gpu),
                |own| MicroGpus::of_partition_share(own.memory_bytes, own.cores_percent.into(), profile, gpu),
            )
        }
        (None, Some(consumed)) => {
            MicroGpus::of_share(consumed.memory_bytes, consumed.cores_percent.into(), gpu)
        }
        (None, None) => MicroGpus::WHOLE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use aliquot_model::MigCapability;

    #[test]
    fn what_was_asked_of_a_board_that_cannot_give_it_counts_as_on_another_of_the_node() {
        let (mut own, other) = (testing::h100(0), testing::h100(1));
        let asked = ProfileName::new("1g.10gb");
        let seventh = of_profile(&own.uuid, &asked, std::slice::from_ref(&own));
        assert!(seventh.is_some_and(|part| part < MicroGpus::WHOLE), "{seventh:?}");
        if let MigCapability::Supported { profiles, .. } = &mut own.mig {
            profiles.retain(|profile| profile.name != asked);
        }
        assert_eq!(of_profile(&own.uuid, &asked, &[own.clone(), other]), seventh);
        assert_eq!(of_profile(&own.uuid, &asked, std::slice::from_ref(&own)), None, "charged as given");
    }
}

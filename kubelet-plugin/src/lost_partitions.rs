//! Finds partitions that claims were given and that do not exist any more: a driver that is loaded anew has
//! none. Pure: it does no I/O.

use crate::claim::ClaimRef;
use crate::ledger::Ledger;
use aliquot_model::{GpuUuid, Placement};
use aliquot_nvml::Inventory;

/// A partition of a claim that is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GonePartition {
    /// The claim.
    pub claim: ClaimRef,
    /// The device that the claim was allocated.
    pub device: String,
    /// The GPU.
    pub gpu: GpuUuid,
    /// The placement.
    pub placement: Placement,
}

/// Returns the partitions of prepared claims of this boot that are missing on a GPU which can be read.
/// `before` is the ledger from before the GPUs were read: a claim that was prepared meanwhile has lost
/// nothing.
pub fn partitions(before: &Ledger, now: &Ledger, boot_id: &str, inventory: &Inventory) -> Vec<GonePartition> {
    let prepared = now.claims.values().filter(|record| {
        let unchanged = before.claims.get(&record.claim.uid).is_some_and(|then| {
            then.state == record.state && then.devices == record.devices && then.retention == record.retention
        });
        unchanged && record.is_prepared(boot_id)
    });
    let gone = prepared.flat_map(|record| {
        record.devices.iter().filter_map(|device| {
            let partition = device.partition.as_ref()?;
            inventory.gpu(&device.gpu)?;
            let there = inventory.live_on(&device.gpu).any(|mig| {
                mig.placement == partition.placement
                    && (partition.uuid.is_none() || mig.uuid == partition.uuid)
            });
            (!there).then(|| GonePartition {
                claim: record.claim.clone(),
                device: device.device.clone(),
                gpu: device.gpu.clone(),
                placement: partition.placement,
            })
        })
    });
    gone.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Device, Held, Partition, Retention};
    use crate::testing::{claim, h100, ledger_of, share_of};
    use aliquot_model::{LiveMig, MigUuid, ProfileName};
    use aliquot_nvml::DriverInfo;
    use rstest::rstest;

    const PLACE: Placement = Placement::new(6, 1);

    fn uuid(last: u32) -> MigUuid {
        MigUuid::parse(&format!("MIG-00000000-0000-5000-8000-{last:012}")).unwrap()
    }

    fn ledger() -> Ledger {
        let partition = Partition {
            profile_id: 19,
            profile: ProfileName::new("1g.10gb"),
            placement: PLACE,
            adopted: false,
            uuid: Some(uuid(1)),
        };
        let device = Device {
            device: "gpu-0-mig-1g10gb-19-6".into(),
            held: Some(Held::Partition(PLACE)),
            partition: Some(partition),
            share: None,
            consumed: None,
            ..share_of(&h100(0), 1, 1)
        };
        ledger_of(&[("a", device)])
    }

    /// The node with these GPUs, and partitions on the first at a place and with a UUID.
    fn inventory(gpus: &[u32], live: &[(Placement, u32)]) -> Inventory {
        let live = live.iter().map(|(placement, last)| LiveMig {
            parent: h100(0).uuid,
            gpu_instance: 9,
            compute_instance: Some(0),
            profile_id: 19,
            placement: *placement,
            uuid: Some(uuid(*last)),
        });
        Inventory {
            driver: DriverInfo { driver_version: "1".into(), cuda_version: (13, 0) },
            gpus: gpus.iter().map(|minor| h100(*minor)).collect(),
            live: live.collect(),
            unreadable: Vec::new(),
        }
    }

    #[rstest]
    #[case::there(inventory(&[0], &[(PLACE, 1)]), false)]
    #[case::gone(inventory(&[0], &[]), true)]
    #[case::another_in_its_place(inventory(&[0], &[(PLACE, 2)]), true)]
    #[case::others_are_there(inventory(&[0], &[(Placement::new(0, 1), 1)]), true)]
    #[case::its_gpu_cannot_be_read(inventory(&[1], &[]), false)]
    fn a_partition_is_gone_if_its_gpu_does_not_have_it(#[case] inventory: Inventory, #[case] gone: bool) {
        let found = partitions(&ledger(), &ledger(), "boot", &inventory);
        let wanted = GonePartition {
            claim: claim("a"),
            device: "gpu-0-mig-1g10gb-19-6".into(),
            gpu: h100(0).uuid,
            placement: PLACE,
        };
        assert_eq!(found, if gone { vec![wanted] } else { Vec::new() });
    }

    #[rstest]
    #[case::prepared_meanwhile(Ledger::default(), ledger(), "boot")]
    #[case::unprepared_meanwhile(ledger(), Ledger::default(), "boot")]
    #[case::of_an_earlier_boot(ledger(), ledger(), "another")]
    fn who_has_none_now_has_lost_none(#[case] before: Ledger, #[case] now: Ledger, #[case] boot_id: &str) {
        assert_eq!(partitions(&before, &now, boot_id, &inventory(&[0], &[])), []);
    }

    #[test]
    fn a_claim_that_nobody_uses_is_not_told() {
        let mut parked = ledger();
        parked.claims.get_mut("a").unwrap().retention = Some(Retention::Parked { until: 9 });
        assert_eq!(partitions(&parked, &parked, "boot", &inventory(&[0], &[])), []);
    }
}

//! Partitions that are given out in shares.

use super::*;
use crate::Quantity;

fn all(gpus: &[GpuState], options: &Options) -> Vec<Device> {
    publish(gpus, ServerFeatures::all_of_minor(36), options)
        .into_iter()
        .flat_map(|slice| slice.devices)
        .collect()
}

fn shared(devices: &[Device]) -> Vec<&Device> {
    devices.iter().filter(|device| device.kind() == DeviceKind::MigShare).collect()
}

#[rstest]
#[case::hopper(&SEVEN_SLICES, 18)]
#[case::rtx_pro(&RTX_PRO, 7)]
#[case::no_mig(&[], 0)]
fn every_place_of_a_plain_profile_has_shares_where_they_are_switched_on(
    #[case] rows: &[Row],
    #[case] count: usize,
) {
    let gpus = [board(0, rows, false, false)];
    let devices = all(&gpus, &with_mig_shares(AllocatorMode::Controller));
    assert_eq!(shared(&devices).len(), count);
    assert!(devices.len() <= MAX_DEVICES_PER_SLICE, "one GPU's devices lie in one slice: {}", devices.len());
    assert!(shared(&all(&gpus, &options(AllocatorMode::Controller))).is_empty(), "off unless switched on");
}

#[test]
fn shares_of_a_partition_are_shares_of_its_memory_that_take_its_counters() {
    let gpus = [board(0, &SEVEN_SLICES, false, false)];
    let devices = all(&gpus, &with_mig_shares(AllocatorMode::Controller));
    for device in shared(&devices) {
        let whole = device.name.whole_partition().expect("shares of a partition");
        let partition = devices.iter().find(|other| other.name == whole).expect("published as a whole too");
        assert!(
            device.allow_multiple_allocations && !partition.allow_multiple_allocations,
            "{}",
            device.name
        );
        assert_eq!(device.consumes, partition.consumes, "{}", device.name);
        for name in ["profile", "parentUUID", "productName"] {
            assert_eq!(device.attributes.get(name), partition.attributes.get(name), "{}", device.name);
        }
        assert_eq!(device.capacity["memory"].value, partition.capacity["memory"].value, "{}", device.name);
        assert_eq!(device.capacity["cores"].value, Quantity::from_u64(100));
        assert!(device.capacity.values().all(|capacity| capacity.policy.is_some()), "{}", device.name);
    }
}

#[test]
fn shares_need_counters_to_be_kept_apart_from_their_partition() {
    let mut cut = [board(1, &SEVEN_SLICES, true, false)];
    cut[0].live.push(live(&cut[0]));
    let server = ServerFeatures { counters: false, ..ServerFeatures::all_of_minor(36) };
    let slices = publish(&cut, server, &with_mig_shares(AllocatorMode::Scheduler));
    let devices: Vec<Device> = slices.into_iter().flat_map(|slice| slice.devices).collect();
    assert!(shared(&devices).is_empty());
}

fn live(gpu: &GpuState) -> LiveMig {
    LiveMig {
        parent: gpu.info.uuid.clone(),
        profile_id: 14,
        placement: Placement::new(4, 2),
        gpu_instance: 3,
        compute_instance: Some(0),
        uuid: crate::MigUuid::parse("MIG-00000001"),
    }
}

#[test]
fn only_shares_of_the_same_partition_hold_it_together() {
    let at = Placement::new(0, 1);
    let shared = |profile_id, placement| Holding::SharedPartition { profile_id, placement };
    let own = shared(19, at);
    assert!(!own.conflicts(own));
    assert!(!own.conflicts(shared(19, Placement::new(1, 1))));
    assert!(!own.conflicts(Holding::Partition(Placement::new(1, 1))));
    for other in [
        shared(20, at),
        shared(15, Placement::new(0, 2)),
        Holding::Partition(at),
        Holding::Whole,
        Holding::Shared(DeviceKind::Share),
    ] {
        assert!(own.conflicts(other) && other.conflicts(own), "{other:?}");
    }
}

fn held(gpus: &[GpuState]) -> Vec<String> {
    let devices = all(gpus, &with_mig_shares(AllocatorMode::Controller));
    let closed = |device: &&Device| device.taints.iter().any(|t| t.key == "gpu.aliquot.dev/held");
    devices.iter().filter(closed).map(|device| device.name.to_string()).collect()
}

#[test]
fn a_partition_that_is_given_out_as_it_is_may_be_shared() {
    let mut gpus = [board(0, &SEVEN_SLICES, true, false)];
    gpus[0].standing.push(live(&gpus[0]));
    let closed = held(&gpus);
    assert!(!closed.contains(&"gpu-0-mig-2g20gb-14-4-share".to_owned()));
    assert!(closed.contains(&"gpu-0-mig-1g20gb-15-4-share".to_owned()));
}

#[test]
fn a_held_share_of_a_partition_closes_all_that_overlaps_the_partition() {
    let mut gpus = [board(0, &SEVEN_SLICES, true, false)];
    gpus[0].held.push(Holding::SharedPartition { profile_id: 14, placement: Placement::new(4, 2) });
    let closed = held(&gpus);
    for name in
        ["gpu-0-mig-2g20gb-14-4", "gpu-0-mig-2g20gb-14-4-share", "gpu-0-mig-1g10gb-19-5-share", "gpu-0"]
    {
        assert!(closed.contains(&name.to_owned()), "{name}");
    }
    assert!(!closed.contains(&"gpu-0-mig-2g20gb-14-0-share".to_owned()));
}

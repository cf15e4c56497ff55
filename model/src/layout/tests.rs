use super::*;
use crate::{Architecture, Engines, GpuUuid, ProfileName};
use proptest::prelude::*;
use rstest::rstest;
use std::collections::BTreeSet;

/// One profile of a board: name, id, GiB, multiprocessors, compute slices, size, starts.
type Row<'a> = (&'a str, u32, u64, u32, u32, u32, &'a [u32]);

const SEVEN_SLICES: [Row; 7] = [
    ("1g.10gb", 19, 9, 16, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
    ("1g.10gb+me", 20, 9, 16, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
    ("1g.20gb", 15, 19, 26, 1, 2, &[0, 2, 4, 6]),
    ("2g.20gb", 14, 19, 32, 2, 2, &[0, 2, 4]),
    ("3g.40gb", 9, 39, 60, 3, 4, &[0, 4]),
    ("4g.40gb", 5, 39, 64, 4, 4, &[0]),
    ("7g.80gb", 0, 79, 132, 7, 8, &[0]),
];

const RTX_PRO: [Row; 11] = [
    ("1g.24gb", 14, 23, 46, 1, 3, &[0, 3, 6, 9]),
    ("1g.24gb+me", 21, 23, 46, 1, 3, &[0, 3, 6, 9]),
    ("1g.24gb+gfx", 47, 23, 46, 1, 3, &[0, 3, 6, 9]),
    ("1g.24gb+me.all", 65, 23, 46, 1, 3, &[0, 3, 6, 9]),
    ("1g.24gb-me", 67, 23, 46, 1, 3, &[0, 3, 6, 9]),
    ("2g.48gb", 5, 47, 94, 2, 6, &[0, 6]),
    ("2g.48gb+gfx", 35, 47, 94, 2, 6, &[0, 6]),
    ("2g.48gb+me.all", 64, 47, 94, 2, 6, &[0, 6]),
    ("2g.48gb-me", 66, 47, 94, 2, 6, &[0, 6]),
    ("4g.96gb", 0, 95, 188, 4, 12, &[0]),
    ("4g.96gb+gfx", 32, 95, 188, 4, 12, &[0]),
];

fn board(minor: u32, rows: &[Row], enabled: bool, needs_reset: bool) -> GpuState {
    let profiles: Vec<MigProfile> = rows
        .iter()
        .map(|(name, id, gib, sms, compute, size, starts)| MigProfile {
            name: ProfileName::new(name),
            id: *id,
            nvml_profile: 0,
            memory_bytes: gib << 30,
            multiprocessors: *sms,
            compute_slices: *compute,
            engines: Engines { copy: *compute, ofa: u32::from(name.contains("+me")), ..Engines::default() },
            max_instances: if name.contains("+me") { 1 } else { starts.len() as u32 },
            placements: starts.iter().map(|start| Placement::new(*start, *size)).collect(),
        })
        .collect();
    let mig = if rows.is_empty() {
        MigCapability::Unsupported
    } else {
        MigCapability::Supported { enabled, pending: enabled, needs_reset, profiles }
    };
    let info = GpuInfo {
        minor,
        index: minor,
        uuid: GpuUuid::parse(&format!("GPU-{minor:08x}")).expect("legal"),
        product_name: "NVIDIA Test 80GB".into(),
        brand: "Nvidia".into(),
        architecture: Architecture::Hopper,
        compute_capability: (9, 0),
        driver_version: "580.65.06".into(),
        cuda_driver_version: (13, 0),
        memory_bytes: 80 << 30,
        multiprocessors: 132,
        pci_bus_id: Some("0000:17:00.0".into()),
        pcie_root: Some("pci0000:16".into()),
        numa_node: Some(0),
        nvswitch: false,
        nvlink_domain: Some("nvswitch".into()),
        mig,
    };
    GpuState { info, live: Vec::new(), held: Vec::new(), standing: Vec::new(), taints: Vec::new() }
}

fn options(mode: AllocatorMode) -> Options {
    Options {
        driver: "gpu.aliquot.dev".into(),
        mode,
        slots: DEFAULT_SLOTS,
        mps: (0..64).collect(),
        mig_shares: false,
        passthrough: BTreeMap::new(),
    }
}

fn with_mig_shares(mode: AllocatorMode) -> Options {
    Options { mig_shares: true, ..options(mode) }
}

/// With every GPU of these offered to virtual machines too.
fn with_passthrough(gpus: &[GpuState], mode: AllocatorMode) -> Options {
    let passthrough = Passthrough {
        vendor_id: "0x10de".into(),
        device_id: "0x2330".into(),
        iommu_fd: true,
        addressable_bytes: 128 << 30,
    };
    let all = gpus.iter().map(|gpu| (gpu.info.uuid.clone(), passthrough.clone()));
    Options { passthrough: all.collect(), ..options(mode) }
}

/// With all that can be switched on.
fn with_everything(gpus: &[GpuState]) -> Options {
    Options { mig_shares: true, ..with_passthrough(gpus, AllocatorMode::Controller) }
}

fn names(slices: &[Slice]) -> Vec<String> {
    slices.iter().flat_map(|s| &s.devices).map(|d| d.name.to_string()).collect()
}

#[rstest]
#[case::hopper(&SEVEN_SLICES, false, false, 25, true)]
#[case::hopper_in_mig_mode(&SEVEN_SLICES, true, false, 25, true)]
#[case::rtx_pro(&RTX_PRO, true, false, 30, true)]
#[case::ampere_off(&SEVEN_SLICES, false, true, 0, true)]
#[case::ampere_on(&SEVEN_SLICES, true, true, 25, false)]
#[case::no_mig(&[], false, false, 0, true)]
fn a_board_publishes_what_its_mode_allows(
    #[case] rows: &[Row],
    #[case] enabled: bool,
    #[case] needs_reset: bool,
    #[case] partitions: usize,
    #[case] others: bool,
) {
    let gpus = [board(0, rows, enabled, needs_reset)];
    let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &options(AllocatorMode::Controller));
    let kinds: Vec<DeviceKind> = slices.iter().flat_map(|s| &s.devices).map(Device::kind).collect();
    assert_eq!(kinds.iter().filter(|k| **k == DeviceKind::Mig).count(), partitions);
    for kind in [DeviceKind::Gpu, DeviceKind::Share, DeviceKind::TimeSlice, DeviceKind::Mps] {
        assert_eq!(kinds.contains(&kind), others, "{kind}");
    }
    assert!(kinds.contains(&DeviceKind::Admin));
}

#[rstest]
#[case(34, 9, 9)]
#[case(35, 9, 2 + 9)]
fn slices_keep_within_the_limits_of_the_server(#[case] minor: u32, #[case] gpus: u32, #[case] want: usize) {
    let gpus: Vec<GpuState> = (0..gpus)
        .map(|m| board(m, if m % 2 == 0 { &SEVEN_SLICES } else { &RTX_PRO }, false, false))
        .collect();
    let slices = publish(&gpus, ServerFeatures::all_of_minor(minor), &with_everything(&gpus));
    assert_eq!(slices.len(), want);
    for slice in &slices {
        assert!(slice.devices.len() <= MAX_DEVICES_PER_SLICE);
        assert!(slice.counter_sets.len() <= MAX_COUNTER_SETS_PER_SLICE);
        assert!(slice.counter_sets.iter().all(|set| set.counters.len() <= 32));
        let both = !slice.devices.is_empty() && !slice.counter_sets.is_empty();
        assert_eq!(both, minor < 35, "1.34 wants them together, 1.35 apart");
        let consumed: usize = slice.devices.iter().flat_map(|d| &d.consumes).map(BTreeMap::len).sum();
        assert!(consumed <= 1024, "counters consumed in one slice: {consumed}");
        for device in &slice.devices {
            let facts = device.attributes.len() + device.capacity.len();
            assert!(facts <= MAX_ATTRIBUTES_AND_CAPACITIES, "{} has {facts}", device.name);
        }
    }
    let all = names(&slices);
    assert_eq!(all.len(), all.iter().collect::<BTreeSet<_>>().len(), "device names are unique in the pool");
}

/// Both ways: nothing is published that is not listed, and nothing is listed that nobody publishes.
#[test]
fn the_vocabulary_is_what_is_published() {
    let gpus =
        [board(0, &SEVEN_SLICES, false, false), board(1, &RTX_PRO, true, false), board(2, &[], false, false)];
    let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &with_everything(&gpus));
    for kind in DeviceKind::ALL {
        let devices = || slices.iter().flat_map(|s| &s.devices).filter(|d| d.kind() == kind);
        let attributes: BTreeSet<&str> =
            devices().flat_map(|d| d.attributes.keys()).map(String::as_str).collect();
        assert_eq!(attributes, attribute_names(kind).collect(), "{kind}");
        for (name, value) in devices().flat_map(|d| &d.attributes) {
            let form = match value {
                Attribute::Text(_) => FactType::Text,
                Attribute::Int(_) => FactType::Int,
                Attribute::Version(_) => FactType::Version,
                Attribute::Bool(_) => FactType::Bool,
            };
            let listed = super::attributes(kind).find(|fact| fact.name == name.as_str());
            assert_eq!(listed.map(|fact| fact.form), Some(form), "{kind}: {name}");
        }
        let capacities: BTreeSet<&str> =
            devices().flat_map(|d| d.capacity.keys()).map(String::as_str).collect();
        let (slices, others): (BTreeSet<&str>, BTreeSet<&str>) =
            capacities.iter().partition(|name| name.starts_with("memorySlice"));
        assert_eq!(others, capacity_names(kind).collect(), "{kind}");
        assert_eq!(slices.is_empty(), kind != DeviceKind::Mig);
        assert!(capacities.iter().all(|name| has_capacity(kind, name)), "{kind}: {capacities:?}");
        assert!(!has_capacity(kind, "mem") && !has_capacity(kind, "memorySliceX"));
    }
}

#[test]
fn first_fit_meets_small_devices_first_and_the_whole_gpu_last() {
    let gpus = [board(0, &SEVEN_SLICES, false, false)];
    let all = names(&publish(&gpus, ServerFeatures::all_of_minor(36), &options(AllocatorMode::Scheduler)));
    assert_eq!(all.first().map(String::as_str), Some("gpu-0-mig-1g10gb-19-6"));
    assert_eq!(all.last().map(String::as_str), Some("gpu-0"));
    let at = |name: &str| all.iter().position(|n| n == name).expect(name);
    assert!(
        at("gpu-0-mig-1g10gb-19-0") < at("gpu-0-mig-1g10gb-me-20-6"),
        "media engines are kept for who asks"
    );
    assert!(at("gpu-0-mig-2g20gb-14-4") < at("gpu-0-mig-2g20gb-14-0"));
    assert!(at("gpu-0-mig-4g40gb-5-0") < at("gpu-0-mig-7g80gb-0-0"));
}

#[test]
fn without_counters_a_gpu_is_exactly_one_exclusive_device() {
    let server = ServerFeatures { counters: false, ..ServerFeatures::all_of_minor(36) };
    let whole = [board(0, &SEVEN_SLICES, false, false)];
    let mut cut = [board(1, &SEVEN_SLICES, true, false)];
    cut[0].live.push(LiveMig {
        parent: cut[0].info.uuid.clone(),
        profile_id: 14,
        placement: Placement::new(4, 2),
        gpu_instance: 3,
        compute_instance: Some(0),
        uuid: crate::MigUuid::parse("MIG-00000001"),
    });
    let of = |gpus: &[GpuState]| {
        let slices = publish(gpus, server, &options(AllocatorMode::Scheduler));
        assert!(slices.iter().flat_map(|s| &s.devices).all(|d| d.consumes.is_none()));
        names(&slices).into_iter().filter(|n| !n.ends_with("admin")).collect::<Vec<_>>()
    };
    assert_eq!(of(&whole), ["gpu-0"]);
    assert_eq!(of(&cut), ["gpu-1-mig-2g20gb-14-4"]);
}

#[test]
fn without_consumable_capacity_nothing_shareable_is_published() {
    let server = ServerFeatures { consumable_capacity: false, ..ServerFeatures::all_of_minor(36) };
    let gpus = [board(0, &[], false, false)];
    let slices = publish(&gpus, server, &options(AllocatorMode::Controller));
    assert_eq!(names(&slices), ["gpu-0-mps", "gpu-0-admin", "gpu-0"]);
}

#[test]
fn mps_is_a_whole_gpu_that_one_claim_has_alone() {
    let gpus = [board(0, &SEVEN_SLICES, false, false)];
    let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &options(AllocatorMode::Controller));
    let device = |name: &str| {
        slices
            .iter()
            .flat_map(|s| &s.devices)
            .find(|device| device.name.to_string() == name)
            .expect("published")
    };
    let (mps, whole) = (device("gpu-0-mps"), device("gpu-0"));
    assert!(!mps.allow_multiple_allocations);
    assert_eq!((&mps.consumes, &mps.capacity), (&whole.consumes, &whole.capacity));
    let mut attributes = whole.attributes.clone();
    attributes.insert("type".to_owned(), Attribute::Text("mps".to_owned()));
    assert_eq!(mps.attributes, attributes);
    assert_eq!(Holding::of(&mps.name, &gpus[0].info), Some(Holding::Whole));
}

#[rstest]
#[case::served(true, (7, 0), true)]
#[case::not_served(false, (9, 0), false)]
#[case::before_volta(true, (6, 1), false)]
fn mps_is_published_where_it_is_served_and_the_gpu_keeps_clients_apart(
    #[case] mps: bool,
    #[case] capability: (u32, u32),
    #[case] want: bool,
) {
    let mut gpus = [board(0, &[], false, false)];
    gpus[0].info.compute_capability = capability;
    let mps = (0..1).filter(|_| mps).collect();
    let options = Options { mps, ..options(AllocatorMode::Controller) };
    let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &options);
    assert_eq!(names(&slices).contains(&"gpu-0-mps".to_owned()), want);
    assert!(names(&slices).contains(&"gpu-0".to_owned()));
}

#[test]
fn a_node_without_gpus_publishes_one_empty_slice() {
    for minor in [34, 36] {
        let slices = publish(&[], ServerFeatures::all_of_minor(minor), &options(AllocatorMode::Controller));
        assert_eq!(slices, [Slice::default()]);
    }
}

#[rstest]
#[case(AllocatorMode::Controller, Some(""))]
#[case(AllocatorMode::HandOver, Some("hand-over"))]
#[case(AllocatorMode::Scheduler, None)]
fn the_taint_says_who_allocates(#[case] mode: AllocatorMode, #[case] want: Option<&str>) {
    let gpus = [board(0, &SEVEN_SLICES, false, false)];
    for device in
        publish(&gpus, ServerFeatures::all_of_minor(36), &options(mode)).iter().flat_map(|s| &s.devices)
    {
        let taint = device.taints.iter().find(|t| t.key == "gpu.aliquot.dev/controller-allocated");
        assert_eq!(taint.map(|t| t.value.as_str()), want, "{}", device.name);
    }
}

#[test]
fn held_hardware_closes_exactly_the_devices_that_overlap_it() {
    let mut gpus = [board(0, &SEVEN_SLICES, false, false)];
    gpus[0].held.push(Holding::Partition(Placement::new(4, 2)));
    let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &options(AllocatorMode::Controller));
    let open: Vec<String> = slices
        .iter()
        .flat_map(|s| &s.devices)
        .filter(|d| d.taints.iter().all(|t| t.key != "gpu.aliquot.dev/held"))
        .map(|d| d.name.to_string())
        .collect();
    assert!(open.contains(&"gpu-0-mig-1g10gb-19-6".to_owned()));
    assert!(open.contains(&"gpu-0-mig-4g40gb-5-0".to_owned()));
    assert!(open.contains(&"gpu-0-admin".to_owned()), "administration never waits");
    for closed in
        ["gpu-0", "gpu-0-share", "gpu-0-mig-3g40gb-9-4", "gpu-0-mig-1g10gb-19-4", "gpu-0-mig-7g80gb-0-0"]
    {
        assert!(!open.contains(&closed.to_owned()), "{closed} overlaps");
    }
}

#[test]
fn a_partition_that_is_given_out_as_it_is_closes_all_others_that_overlap_it() {
    let mut gpus = [board(0, &SEVEN_SLICES, true, false)];
    gpus[0].standing.push(LiveMig {
        parent: gpus[0].info.uuid.clone(),
        profile_id: 14,
        placement: Placement::new(4, 2),
        gpu_instance: 3,
        compute_instance: Some(0),
        uuid: None,
    });
    let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &options(AllocatorMode::Controller));
    let held = |name: &str| {
        let device = slices.iter().flat_map(|s| &s.devices).find(|d| d.name.to_string() == name).unwrap();
        device.taints.iter().any(|t| t.key == "gpu.aliquot.dev/held")
    };
    for open in ["gpu-0-mig-2g20gb-14-4", "gpu-0-mig-1g10gb-19-6", "gpu-0-mig-4g40gb-5-0", "gpu-0-admin"] {
        assert!(!held(open), "{open}");
    }
    for closed in
        ["gpu-0", "gpu-0-share", "gpu-0-mig-3g40gb-9-4", "gpu-0-mig-1g10gb-19-4", "gpu-0-mig-1g20gb-15-4"]
    {
        assert!(held(closed), "{closed}");
    }
}

#[test]
fn a_held_share_closes_its_own_device() {
    let mut gpus = [board(0, &[], false, false)];
    gpus[0].held.push(Holding::Shared(DeviceKind::Share));
    let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &options(AllocatorMode::Controller));
    let held = |d: &&Device| d.taints.iter().any(|t| t.key == "gpu.aliquot.dev/held");
    let closed: Vec<String> =
        slices.iter().flat_map(|s| &s.devices).filter(held).map(|d| d.name.to_string()).collect();
    assert_eq!(closed, ["gpu-0-share", "gpu-0-timeslice", "gpu-0-mps", "gpu-0"]);
}

fn condition(what: &str, effect: TaintEffect) -> Taint {
    Taint { key: format!("gpu.aliquot.dev/{what}"), value: String::new(), effect }
}

#[test]
fn taints_of_a_gpu_are_on_all_of_its_devices_but_the_one_for_administration() {
    let mut gpus = [board(0, &SEVEN_SLICES, false, false), board(1, &[], false, false)];
    gpus[0].taints.push(condition("xid", TaintEffect::None));
    let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &options(AllocatorMode::Controller));
    for device in slices.iter().flat_map(|s| &s.devices) {
        let wanted = device.name.minor() == 0 && device.kind() != DeviceKind::Admin;
        assert_eq!(device.taints.iter().any(|t| t.key.ends_with("/xid")), wanted, "{}", device.name);
    }
}

#[test]
fn before_1_35_the_severest_taints_have_the_room_and_none_only_informs() {
    let mut gpus = [board(0, &[], false, false)];
    gpus[0].taints = vec![
        condition("a", TaintEffect::None),
        condition("b", TaintEffect::NoSchedule),
        condition("c", TaintEffect::NoSchedule),
        condition("d", TaintEffect::NoSchedule),
        condition("e", TaintEffect::NoExecute),
    ];
    let of = |minor| {
        let slices = publish(&gpus, ServerFeatures::all_of_minor(minor), &options(AllocatorMode::Controller));
        let mut devices = slices.iter().flat_map(|s| &s.devices);
        let whole = devices.find(|d| d.kind() == DeviceKind::Gpu).expect("a GPU");
        let keys = whole.taints.iter().filter_map(|t| t.key.rsplit('/').next().map(str::to_owned));
        keys.collect::<Vec<_>>()
    };
    assert_eq!(of(34), ["controller-allocated", "e", "b", "c"]);
    assert_eq!(of(36), ["controller-allocated", "e", "b", "c", "d", "a"]);
}

#[test]
fn before_1_35_a_taint_that_nobody_may_tolerate_has_a_place_before_those_of_illness() {
    let mut gpus = [board(0, &[], false, false)];
    let mut of = |what: &[(&str, TaintEffect)]| {
        gpus[0].taints = what.iter().map(|(what, effect)| condition(what, *effect)).collect();
        let slices = publish(&gpus, ServerFeatures::all_of_minor(34), &options(AllocatorMode::Controller));
        let mut devices = slices.iter().flat_map(|s| &s.devices);
        let whole = devices.find(|d| d.kind() == DeviceKind::Gpu).expect("a GPU");
        let keys = whole.taints.iter().filter_map(|t| t.key.rsplit('/').next().map(str::to_owned));
        keys.collect::<Vec<_>>().join(" ")
    };
    use TaintEffect::{NoExecute, NoSchedule};
    let ill = [("gpu-lost", NoExecute), ("ecc", NoExecute), ("xid", NoExecute)];
    assert_eq!(of(&ill), "controller-allocated ecc gpu-lost xid");
    let others = [ill[0], ill[1], ill[2], ("other-driver", NoSchedule)];
    assert_eq!(of(&others), "controller-allocated other-driver ecc gpu-lost");
    let paused = [ill[0], ill[1], ("other-driver", NoSchedule), ("driver-paused", NoSchedule)];
    assert_eq!(of(&paused), "controller-allocated driver-paused ecc gpu-lost");
}

proptest! {
    /// The counters allow two devices together exactly when their holdings do not conflict, and
    /// every set of partitions without overlap stays within them.
    #[test]
    fn counters_and_holdings_exclude_the_same_devices(rtx: bool, picks in prop::collection::vec(0usize..640, 1..12)) {
        let gpus = [board(0, if rtx { &RTX_PRO } else { &SEVEN_SLICES }, false, false)];
        let info = &gpus[0].info;
        let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &with_mig_shares(AllocatorMode::Scheduler));
        let totals = &slices[0].counter_sets[0].counters;
        let devices: Vec<&Device> = slices.iter().flat_map(|s| &s.devices).filter(|d| d.consumes.is_some()).collect();
        let mut left = totals.clone();
        let mut taken: Vec<Holding> = Vec::new();
        let mut media = 0;
        for pick in picks {
            let device = devices[pick % devices.len()];
            let holding = Holding::of(&device.name, info).expect("consumes, so it holds");
            let consumed = device.consumes.as_ref().expect("filtered");
            let fits = consumed.iter().all(|(name, value)| left.get(name).is_some_and(|l| l >= value));
            let free = taken.iter().all(|t| !t.conflicts(holding)) && !taken.contains(&holding);
            let special = matches!(&device.name, DeviceName::Mig { slug, .. } if slug.contains("-me"));
            // The one media set is the only thing that counters know and placements do not.
            if free && !(special && media > 0) {
                prop_assert!(fits, "{} fits by placement, not by counters", device.name);
                for (name, value) in consumed {
                    *left.get_mut(name).expect("known") -= value;
                }
                taken.push(holding);
                media += u32::from(special);
            } else if !free {
                prop_assert!(!fits, "{} overlaps, counters allow it", device.name);
            }
        }
    }
}

#[test]
fn attributes_of_a_device_are_those_that_are_published() {
    for gpu in
        [board(0, &SEVEN_SLICES, false, false), board(3, &RTX_PRO, true, true), board(1, &[], false, false)]
    {
        let gpus = [gpu];
        let slices = publish(&gpus, ServerFeatures::all_of_minor(36), &with_everything(&gpus));
        for device in slices.iter().flat_map(|slice| &slice.devices) {
            let options = with_passthrough(&gpus, AllocatorMode::Controller);
            let passthrough = options.passthrough.get(&gpus[0].info.uuid);
            let told = device_attributes(&gpus[0].info, &device.name, passthrough);
            assert_eq!(told, device.attributes, "{}", device.name);
        }
    }
}

#[rstest]
#[case::hopper(&SEVEN_SLICES, false, false, true)]
#[case::no_mig(&[], false, false, true)]
#[case::ampere_cut_into_partitions(&SEVEN_SLICES, true, true, false)]
fn a_gpu_is_offered_to_virtual_machines_where_that_is_on_and_takes_all_of_its_counters(
    #[case] rows: &[Row],
    #[case] enabled: bool,
    #[case] needs_reset: bool,
    #[case] offered: bool,
) {
    let gpus = [board(0, rows, enabled, needs_reset)];
    let features = ServerFeatures::all_of_minor(36);
    let off = publish(&gpus, features, &options(AllocatorMode::Controller));
    assert!(off.iter().flat_map(|s| &s.devices).all(|device| device.kind() != DeviceKind::Vfio));
    let options = with_passthrough(&gpus, AllocatorMode::Controller);
    let slices = publish(&gpus, features, &options);
    let devices: Vec<&Device> = slices.iter().flat_map(|s| &s.devices).collect();
    let vfio = devices.iter().find(|device| device.kind() == DeviceKind::Vfio);
    assert_eq!(vfio.is_some(), offered);
    let Some(vfio) = vfio else { return };
    assert_eq!(vfio.name.to_string(), "gpu-0-vfio");
    assert_eq!(devices.last().map(|last| &last.name), Some(&vfio.name), "nothing else is taken after it");
    let whole = devices.iter().find(|device| device.kind() == DeviceKind::Gpu).unwrap();
    assert_eq!((&vfio.consumes, &vfio.taints), (&whole.consumes, &whole.taints));
    assert!(!vfio.allow_multiple_allocations);
    for (name, want) in [
        ("type", Attribute::Text("vfio".into())),
        ("vendorID", Attribute::Text("0x10de".into())),
        ("deviceID", Attribute::Text("0x2330".into())),
        ("iommuFDEnabled", Attribute::Bool(true)),
        ("resource.kubernetes.io/pciBusID", Attribute::Text("0000:17:00.0".into())),
    ] {
        assert_eq!(vfio.attributes.get(name), Some(&want), "{name}");
    }
    assert_eq!(vfio.capacity["addressableMemory"].value, crate::Quantity::from_u64(128 << 30));
    // Without counters nothing would keep it and the whole GPU apart.
    let bare = ServerFeatures { counters: false, ..features };
    let all = publish(&gpus, bare, &options);
    assert!(all.iter().flat_map(|s| &s.devices).all(|device| device.kind() != DeviceKind::Vfio));
}

#[path = "mig_share_tests.rs"]
mod mig_share;

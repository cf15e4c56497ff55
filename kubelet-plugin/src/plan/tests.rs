#[path = "tests/passed.rs"]
mod passed;

use super::*;
use crate::claim::Consumed;
use crate::ledger::{Given, State};
use crate::testing::{allocated, board, claim, h100, request};
use aliquot_model::config::{GpuConfig, MpsConfig, ShareConfig};
use aliquot_model::{MigUuid, Placement, Quantity};
use jiff::Timestamp;
use rstest::rstest;

struct World {
    gpus: Vec<GpuInfo>,
    live: Vec<LiveMig>,
    ledger: Ledger,
    existing: Existing,
    made: BTreeSet<String>,
    oversubscribe_at_most: u64,
    mps: bool,
    offers: Offers,
    persistent: BTreeSet<GpuUuid>,
}

impl World {
    fn of(gpus: Vec<GpuInfo>) -> Self {
        Self {
            gpus,
            live: Vec::new(),
            ledger: Ledger::default(),
            existing: Existing::InTheWay,
            made: BTreeSet::new(),
            oversubscribe_at_most: 0,
            mps: true,
            offers: Offers::new(),
            persistent: BTreeSet::new(),
        }
    }

    fn plan(&self, request: &Request) -> Result<Plan, Refusal> {
        self.plan_after(request, None).map_err(|error| *error.refusal)
    }

    fn plan_after(&self, request: &Request, prior: Option<&Record>) -> Result<Plan, PlanError> {
        let snapshot = Snapshot {
            gpus: &self.gpus,
            live: &self.live,
            ledger: &self.ledger,
            existing: self.existing,
            boot_id: "b",
            made: &self.made,
            slots: 10,
            oversubscribe_at_most: self.oversubscribe_at_most,
            mps: self.mps,
            offers: &self.offers,
            persistent: &self.persistent,
        };
        plan(&snapshot, request, prior)
    }

    /// Prepares a claim in the ledger only.
    fn hold(&mut self, request: &Request) -> Record {
        let plan = self.plan(request).unwrap();
        let record = Record {
            claim: request.claim.clone(),
            state: State::Completed,
            boot_id: "b".into(),
            since: 0,
            devices: plan.devices,
            indexed_env: false,
            metadata: None,
            charge: None,
            ended: None,
            retention: None,
            confirmed: true,
            steps: plan.steps,
            numbers: Default::default(),
            extra: Default::default(),
        };
        self.ledger.claims.insert(request.claim.uid.clone(), record.clone());
        record
    }

    fn instance(&mut self, profile_id: u32, start: u32, size: u32) {
        self.live.push(LiveMig {
            parent: self.gpus[0].uuid.clone(),
            profile_id,
            placement: Placement::new(start, size),
            gpu_instance: 1,
            compute_instance: Some(0),
            uuid: MigUuid::parse(&format!("MIG-{start:08x}")),
        });
    }
}

fn texts(plan: &Plan) -> Vec<String> {
    plan.steps.iter().map(ToString::to_string).collect()
}

#[test]
fn a_whole_gpu_needs_only_a_spec() {
    let plan = World::of(vec![h100(0)]).plan(&request("a", &[("g", "gpu-0")])).unwrap();
    assert_eq!(plan.steps, [Step::WriteSpec]);
    assert_eq!(plan.devices[0].held, Some(Held::Whole));
}

#[test]
fn partitions_are_created_after_the_mode_and_before_the_spec() {
    let request = request("a", &[("x", "gpu-0-mig-1g10gb-19-6"), ("y", "gpu-0-mig-3g40gb-9-0")]);
    let plan = World::of(vec![h100(0)]).plan(&request).unwrap();
    let uuid = h100(0).uuid;
    assert_eq!(
        texts(&plan),
        [
            format!("switch MIG mode of {uuid} on"),
            format!("create 1g.10gb at {{6}}:1 on {uuid}"),
            format!("create 3g.40gb at {{0}}:4 on {uuid}"),
            "write the CDI spec".to_owned(),
        ]
    );
    let undo: Vec<String> = plan.steps.iter().rev().map(|step| step.inverse().to_string()).collect();
    assert_eq!(
        undo,
        [
            "remove the CDI spec".to_owned(),
            format!("destroy the partition at {{0}}:4 on {uuid}"),
            format!("destroy the partition at {{6}}:1 on {uuid}"),
            format!("switch MIG mode of {uuid} off if it is empty"),
        ]
    );
}

#[test]
fn a_whole_gpu_in_mig_mode_is_switched_back_where_the_board_can() {
    let plan = World::of(vec![board(0, Some((true, false)))]).plan(&request("a", &[("g", "gpu-0")])).unwrap();
    assert!(matches!(&plan.steps[0], Step::SwitchMig { on: false, .. }));
}

#[rstest]
#[case::partition_with_mode_off(false, "gpu-0-mig-1g10gb-19-6")]
#[case::whole_with_mode_on(true, "gpu-0")]
#[case::share_with_mode_on(true, "gpu-0-share")]
fn boards_that_need_a_reset_are_not_switched(#[case] enabled: bool, #[case] device: &str) {
    let world = World::of(vec![board(0, Some((enabled, true)))]);
    let got = world.plan(&request("a", &[("r", device)]));
    assert!(matches!(got, Err(Refusal::NeedsReset { .. })), "{got:?}");
}

#[rstest]
#[case::same_whole("gpu-0", "gpu-0", false)]
#[case::whole_and_partition("gpu-0", "gpu-0-mig-1g10gb-19-6", false)]
#[case::partition_and_share("gpu-0-mig-1g10gb-19-6", "gpu-0-share", false)]
#[case::share_and_time_slice("gpu-0-share", "gpu-0-timeslice", false)]
#[case::overlapping_partitions("gpu-0-mig-3g40gb-9-4", "gpu-0-mig-1g10gb-19-6", false)]
#[case::other_gpu("gpu-0", "gpu-1", true)]
#[case::disjoint_partitions("gpu-0-mig-3g40gb-9-0", "gpu-0-mig-1g10gb-19-6", true)]
#[case::two_shares("gpu-0-share", "gpu-0-share", true)]
#[case::two_shares_of_a_partition("gpu-0-mig-2g20gb-14-4-share", "gpu-0-mig-2g20gb-14-4-share", true)]
#[case::shares_of_two_partitions("gpu-0-mig-2g20gb-14-4-share", "gpu-0-mig-1g10gb-19-6-share", true)]
#[case::partition_and_its_share("gpu-0-mig-2g20gb-14-4", "gpu-0-mig-2g20gb-14-4-share", false)]
#[case::shares_of_overlapping_partitions("gpu-0-mig-3g40gb-9-4-share", "gpu-0-mig-2g20gb-14-4-share", false)]
#[case::share_and_share_of_a_partition("gpu-0-share", "gpu-0-mig-2g20gb-14-4-share", false)]
#[case::admin_beside_whole("gpu-0", "gpu-0-admin", true)]
fn what_overlaps_a_prepared_claim_is_refused_by_name(
    #[case] first: &str,
    #[case] second: &str,
    #[case] ok: bool,
) {
    for (first, second) in [(first, second), (second, first)] {
        let mut world = World::of(vec![h100(0), h100(1)]);
        world.hold(&request("a", &[("r", first)]));
        match world.plan_after(&request("b", &[("r", second)]), None) {
            Ok(_) => assert!(ok, "{first} and {second}"),
            Err(error) => {
                assert!(!ok, "{error}");
                assert!(error.is_conflict());
                assert!(error.to_string().contains("ns/claim-a"), "{error}");
            }
        }
    }
}

#[test]
fn results_of_one_claim_must_not_overlap_either() {
    let world = World::of(vec![h100(0)]);
    let got = world.plan(&request("a", &[("x", "gpu-0-mig-3g40gb-9-4"), ("y", "gpu-0-mig-1g10gb-19-6")]));
    assert!(matches!(got, Err(Refusal::WithinClaim { .. })), "{got:?}");
}

#[rstest]
#[case::memory(Consumed { memory_bytes: 77 << 30, cores_percent: 0, slots: 1 }, Some("memory"))]
#[case::cores(Consumed { memory_bytes: 1 << 30, cores_percent: 76, slots: 1 }, Some("cores"))]
#[case::slots(Consumed { memory_bytes: 1 << 30, cores_percent: 0, slots: 10 }, Some("slots"))]
#[case::just_fits(Consumed { memory_bytes: 76 << 30, cores_percent: 75, slots: 9 }, None)]
fn shares_never_promise_more_than_there_is(#[case] second: Consumed, #[case] over: Option<&str>) {
    let mut world = World::of(vec![h100(0)]);
    world.hold(&request("a", &[("s", "gpu-0-share")]));
    let mut other = request("b", &[("s", "gpu-0-share")]);
    other.devices[0].consumed = Some(second);
    match (world.plan(&other), over) {
        (Ok(_), None) => {}
        (Err(Refusal::Oversubscribed { capacity, holders, .. }), Some(over)) => {
            assert_eq!(capacity, over);
            assert!(holders.contains("ns/claim-a"));
        }
        (got, want) => panic!("{got:?}, wanted {want:?}"),
    }
}

#[rstest]
#[case::memory(Consumed { memory_bytes: 17 << 30, cores_percent: 0, slots: 1 }, Some("memory"))]
#[case::cores(Consumed { memory_bytes: 1 << 30, cores_percent: 76, slots: 1 }, Some("cores"))]
#[case::slots(Consumed { memory_bytes: 1 << 30, cores_percent: 0, slots: 10 }, Some("slots"))]
#[case::just_fits(Consumed { memory_bytes: 16 << 30, cores_percent: 75, slots: 9 }, None)]
fn shares_of_a_partition_never_promise_more_than_it_has(
    #[case] second: Consumed,
    #[case] over: Option<&str>,
) {
    let mut world = World::of(vec![h100(0)]);
    world.hold(&request("a", &[("s", "gpu-0-mig-2g20gb-14-4-share")]));
    world.hold(&request("c", &[("s", "gpu-0-mig-3g40gb-9-0-share")]));
    let mut other = request("b", &[("s", "gpu-0-mig-2g20gb-14-4-share")]);
    other.devices[0].consumed = Some(second);
    match (world.plan(&other), over) {
        (Ok(_), None) => {}
        (Err(refusal @ Refusal::Oversubscribed { capacity, .. }), Some(over)) => {
            assert_eq!(capacity, over);
            let text = refusal.to_string();
            assert!(
                text.contains("shares of gpu-0-mig-2g20gb-14-4-share") && text.contains("ns/claim-a"),
                "{text}"
            );
            assert!(!text.contains("ns/claim-c"), "{text}");
        }
        (got, want) => panic!("{got:?}, wanted {want:?}"),
    }
}

#[test]
fn the_checkpoint_names_a_shared_partition_in_a_way_that_stays() {
    let plan = World::of(vec![h100(0)]).plan(&request("a", &[("s", "gpu-0-mig-2g20gb-14-4-share")])).unwrap();
    let held = serde_json::to_value(plan.devices[0].held).unwrap();
    let want =
        serde_json::json!({"sharedPartition": {"profileId": 14, "placement": {"start": 4, "size": 2}}});
    assert_eq!(held, want);
    assert_eq!(serde_json::from_value::<Option<Held>>(want).unwrap(), plan.devices[0].held);
}

#[test]
fn two_shares_of_one_claim_count_together() {
    let world = World::of(vec![h100(0)]);
    let mut both = request("a", &[("x", "gpu-0-share"), ("y", "gpu-0-share")]);
    for device in &mut both.devices {
        device.consumed = Some(Consumed { memory_bytes: 41 << 30, cores_percent: 0, slots: 1 });
    }
    assert!(matches!(world.plan(&both), Err(Refusal::Oversubscribed { capacity: "memory", .. })));
}

#[rstest]
#[case::not_asked("0", 0, true)]
#[case::off("1", 0, false)]
#[case::within("8Gi", 8 << 30, true)]
#[case::beyond("9Gi", 8 << 30, false)]
fn a_share_gets_the_managed_memory_that_it_asks_for_or_is_refused(
    #[case] asked: &str,
    #[case] most: u64,
    #[case] fits: bool,
) {
    let mut world = World::of(vec![h100(0)]);
    world.oversubscribe_at_most = most;
    let mut wanted = request("a", &[("s", "gpu-0-share")]);
    let oversubscribe = asked.parse().ok();
    wanted.devices[0].settings = Settings::Share(ShareConfig { oversubscribe, ..ShareConfig::default() });
    match world.plan(&wanted) {
        Ok(plan) => {
            let bytes = plan.devices[0].share.as_ref().unwrap().oversubscribe_bytes;
            assert!(fits && Some(bytes) == asked.parse::<Quantity>().unwrap().to_u64(), "{bytes}");
        }
        Err(refusal) => {
            let text = refusal.to_string();
            assert!(!fits && text.contains(&format!("oversubscribe asks for {asked} of")), "{text}");
            assert!(text.contains("kubeletPlugin.oversubscribeAtMost"), "{text}");
        }
    }
}

#[test]
fn instances_that_nobody_knows_are_not_overlapped() {
    let mut world = World::of(vec![board(0, Some((true, false)))]);
    world.instance(9, 4, 4);
    for device in ["gpu-0", "gpu-0-share", "gpu-0-mig-1g10gb-19-6"] {
        let got = world.plan(&request("a", &[("r", device)]));
        assert!(matches!(got, Err(Refusal::Foreign { .. })), "{device}: {got:?}");
    }
    assert!(world.plan(&request("a", &[("r", "gpu-0-mig-3g40gb-9-0")])).is_ok());
}

#[test]
fn fixed_partitions_are_used_as_they_are() {
    let mut world = World::of(vec![board(0, Some((true, true)))]);
    world.instance(9, 4, 4);
    world.existing = Existing::Fixed;
    let plan = world.plan(&request("a", &[("r", "gpu-0-mig-3g40gb-9-4")])).unwrap();
    assert_eq!(plan.steps, [Step::WriteSpec]);
    assert!(plan.devices[0].partition.as_ref().unwrap().adopted);
    let absent = world.plan(&request("b", &[("r", "gpu-0-mig-3g40gb-9-0")]));
    assert!(matches!(absent, Err(Refusal::NoSuchPartition { .. })));
}

#[test]
fn adopted_partitions_are_used_as_they_are_and_others_are_made_beside_them() {
    let mut world = World::of(vec![board(0, Some((true, false)))]);
    world.existing = Existing::Adopted;
    world.instance(9, 4, 4);
    let plan = world.plan(&request("a", &[("r", "gpu-0-mig-3g40gb-9-4")])).unwrap();
    assert!(!plan.steps.iter().any(|step| matches!(step, Step::CreatePartition { .. })), "{plan}");
    assert!(plan.devices[0].partition.as_ref().unwrap().adopted);
    let beside = world.plan(&request("b", &[("r", "gpu-0-mig-3g40gb-9-0")])).unwrap();
    assert!(beside.steps.iter().any(|step| matches!(step, Step::CreatePartition { .. })), "{beside}");
    for device in ["gpu-0", "gpu-0-share", "gpu-0-mig-1g10gb-19-6", "gpu-0-mig-7g80gb-0-0"] {
        let got = world.plan(&request("a", &[("r", device)]));
        assert!(matches!(got, Err(Refusal::Foreign { .. })), "{device}: {got:?}");
    }
    // One that the agent made is left over from a claim that has gone.
    world.made.insert(world.live[0].uuid.as_ref().unwrap().to_string());
    let got = world.plan(&request("a", &[("r", "gpu-0-mig-3g40gb-9-4")]));
    assert!(matches!(got, Err(Refusal::Foreign { .. })), "{got:?}");
    world.made.clear();
    // One that has no compute instance of its size is not what was published.
    world.live[0].uuid = None;
    let got = world.plan(&request("a", &[("r", "gpu-0-mig-3g40gb-9-4")]));
    assert!(matches!(got, Err(Refusal::Foreign { .. })), "{got:?}");
}

#[test]
fn an_adopted_partition_that_came_back_after_a_reboot_is_adopted_again() {
    let mut world = World::of(vec![board(0, Some((true, false)))]);
    world.existing = Existing::Adopted;
    world.instance(9, 4, 4);
    let request = request("a", &[("r", "gpu-0-mig-3g40gb-9-4")]);
    let before = world.hold(&request);
    let plan = world.plan_after(&request, Some(&before)).unwrap();
    assert!(plan.devices[0].partition.as_ref().unwrap().adopted);
}

#[test]
fn a_name_that_means_another_gpu_than_before_is_refused() {
    let mut world = World::of(vec![h100(0)]);
    let request = request("a", &[("g", "gpu-0")]);
    let record = world.hold(&request);
    world.gpus[0].uuid = h100(7).uuid;
    let got = world.plan_after(&request, Some(&record)).unwrap_err();
    assert!(matches!(*got.refusal, Refusal::OtherGpu { .. }), "{got:?}");
}

#[rstest]
#[case::given_the_gpu_from_before("a", 99, Some("means GPU"))]
#[case::allocated_anew("a", 100, None)]
#[case::another_claim("b", 99, None)]
fn an_allocation_from_before_an_exchange_is_refused(
    #[case] uid: &str,
    #[case] allocated_at: i64,
    #[case] words: Option<&str>,
) {
    let mut world = World::of(vec![h100(0)]);
    let time = |second| Timestamp::from_second(second).unwrap();
    world.ledger.bind([(0, h100(5).uuid)]);
    world.ledger.bind([(0, h100(0).uuid)]);
    let mut request = request(uid, &[("g", "gpu-0")]);
    request.given.at = Some(time(allocated_at));
    let got = world.plan(&request).unwrap_err();
    assert!(matches!(got, Refusal::Exchanged { .. }), "{got:?}");
    let given = Given { at: Some(time(99)), ..Given::of("a") };
    world.ledger.note_former(&world.ledger.not_asked(), &[(0, [given].into())].into());
    let got = world.plan(&request).err().map(|refusal| refusal.to_string());
    assert_eq!(got.is_some(), words.is_some(), "{got:?}");
    assert!(got.is_none_or(|got| words.is_some_and(|words| got.contains(words))));
}

#[test]
fn an_absent_gpu_and_an_absent_placement_are_named() {
    let world = World::of(vec![h100(0)]);
    let got = world.plan(&request("a", &[("g", "gpu-3")]));
    assert!(matches!(got, Err(Refusal::NoGpu { minor: 3, .. })));
    let got = world.plan(&request("a", &[("g", "gpu-0-mig-1g10gb-19-7")]));
    assert!(matches!(got, Err(Refusal::NoSuchPartition { .. })));
    let plain = World::of(vec![board(0, None)]);
    let got = plain.plan(&request("a", &[("g", "gpu-0-mig-1g10gb-19-6")]));
    assert!(matches!(got, Err(Refusal::NoSuchPartition { .. })), "{got:?}");
}

#[test]
fn one_gpu_has_one_time_slice() {
    let mut world = World::of(vec![h100(0)]);
    let with = |uid: &str, interval| {
        let mut request = request(uid, &[]);
        request.devices.push(Allocated {
            settings: Settings::Gpu(Some(GpuConfig { time_slice: interval, ..GpuConfig::default() })),
            ..allocated("t", "gpu-0-timeslice")
        });
        request
    };
    let record = world.hold(&with("a", TimeSliceInterval::Long));
    assert!(record.steps.iter().any(|step| matches!(step, Step::SetTimeSlice { .. })));
    assert!(world.plan(&with("b", TimeSliceInterval::Long)).is_ok());
    assert!(world.plan(&with("b", TimeSliceInterval::Default)).is_ok());
    let got = world.plan(&with("b", TimeSliceInterval::Short));
    assert!(matches!(&got, Err(Refusal::TimeSlice { other, .. }) if *other == claim("a")), "{got:?}");
}

#[test]
fn a_claim_does_not_stand_in_its_own_way() {
    let mut world = World::of(vec![h100(0)]);
    let request = request("a", &[("x", "gpu-0-mig-1g10gb-19-6")]);
    world.hold(&request);
    assert!(world.plan(&request).is_ok());
}

fn through_mps(uid: &str, devices: &[(&str, MpsConfig)]) -> Request {
    let mut request = request(uid, &[]);
    request.devices.extend(devices.iter().map(|(device, config)| Allocated {
        settings: Settings::Mps(config.clone()),
        ..allocated(device, device)
    }));
    request
}

fn percent(percent: u8) -> MpsConfig {
    MpsConfig { active_thread_percentage: Some(percent), ..MpsConfig::default() }
}

fn pinned(limit: &str) -> MpsConfig {
    MpsConfig { pinned_device_memory_limit: limit.parse().ok(), ..MpsConfig::default() }
}

#[test]
fn a_claim_with_several_gpus_through_mps_has_one_daemon_once_all_are_exclusive() {
    let world = World::of(vec![h100(0), h100(1)]);
    let request = through_mps("a", &[("gpu-1-mps", percent(50)), ("gpu-0-mps", percent(50))]);
    let plan = world.plan(&request).unwrap();
    assert_eq!(
        plan.steps,
        [
            Step::MakeExclusive { gpu: h100(1).uuid },
            Step::MakeExclusive { gpu: h100(0).uuid },
            Step::StartMps { uid: "a".to_owned() },
            Step::WriteSpec,
        ]
    );
    let undo: Vec<Undo> = plan.steps.iter().rev().map(Step::inverse).collect();
    assert_eq!(undo[1], Undo::StopMps { uid: "a".to_owned() }, "before another program may use the GPUs");
    assert!(plan.devices.iter().all(|device| device.held == Some(Held::Whole)));
    assert!(plan.devices.iter().all(|device| device.mps == Some(percent(50))));
}

#[rstest]
#[case::whole("gpu-0")]
#[case::share("gpu-0-share")]
#[case::partition("gpu-0-mig-1g10gb-19-6")]
#[case::through_mps_too("gpu-0-mps")]
fn a_gpu_through_mps_is_one_claims_alone(#[case] other: &str) {
    for (first, second) in [("gpu-0-mps", other), (other, "gpu-0-mps")] {
        let mut world = World::of(vec![h100(0)]);
        world.hold(&request("a", &[("r", first)]));
        let got = world.plan(&request("b", &[("r", second)]));
        assert!(matches!(got, Err(Refusal::Conflict { .. })), "{got:?}");
    }
}

#[rstest]
#[case::nobody_serves_it(false, (9, 0), &[("gpu-0-mps", MpsConfig::default())], Some("kubeletPlugin.mps.enabled"))]
#[case::before_volta(true, (6, 1), &[("gpu-0-mps", MpsConfig::default())], Some("compute capability 6.1"))]
#[case::two_settings(true, (9, 0), &[("gpu-0-mps", percent(50)), ("gpu-1-mps", percent(60))],
    Some("the MpsConfig of device gpu-1-mps is not that of device gpu-0-mps of request gpu-0-mps"))]
#[case::more_than_the_gpu_has(true, (9, 0), &[("gpu-0-mps", pinned("81Gi"))], Some("pinnedDeviceMemoryLimit is 81Gi"))]
#[case::less_than_mps_counts(true, (9, 0), &[("gpu-0-mps", pinned("1000"))], Some("from 1Mi"))]
#[case::all_that_the_gpu_has(true, (9, 0), &[("gpu-0-mps", pinned("80Gi")), ("gpu-1-mps", pinned("80Gi"))], None)]
fn what_no_daemon_can_give_is_refused_with_the_reason(
    #[case] served: bool,
    #[case] capability: (u32, u32),
    #[case] devices: &[(&str, MpsConfig)],
    #[case] words: Option<&str>,
) {
    let mut world = World::of(vec![h100(0), h100(1)]);
    world.mps = served;
    world.gpus.iter_mut().for_each(|gpu| gpu.compute_capability = capability);
    let got = world.plan(&through_mps("a", devices)).err().map(|refusal| refusal.to_string());
    assert_eq!(got.is_some(), words.is_some(), "{got:?}");
    assert!(words.is_none_or(|words| got.as_ref().is_some_and(|got| got.contains(words))), "{got:?}");
}

/// No release could give it out while that was its word for it, but a checkpoint may have it.
#[test]
fn a_gpu_that_was_held_through_mps_in_the_words_of_an_earlier_release_is_held_whole() {
    let held: Held = serde_json::from_str("\"mps\"").unwrap();
    assert_eq!(held, Held::Whole);
    for device in ["gpu-0-mps", "gpu-0", "gpu-0-share"] {
        let holding = Holding::of(&aliquot_model::DeviceName::parse(device).unwrap(), &h100(0)).unwrap();
        assert!(held.holding().conflicts(holding), "{device}");
    }
}

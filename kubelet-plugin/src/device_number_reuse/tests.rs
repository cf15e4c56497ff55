use super::*;
use crate::ledger::{Device, Held, Partition, Retention};
use crate::testing::{claim, h100, ledger_of, share_of};
use aliquot_cdi::{ContainerEdits, Device as CdiDevice};
use aliquot_model::ProfileName;
use proptest::prelude::*;
use rstest::rstest;

const BOOT: &str = "boot";
const CAP: u32 = 121;

fn gpu_number(minor: u32) -> DeviceNumber {
    DeviceNumber { major: 195, minor }
}

/// A claim with numbers.
fn hold(ledger: &mut Ledger, uid: &str, device: Device, numbers: &[DeviceNumber]) {
    let mut record = ledger_of(&[(uid, device)]).claims.remove(uid).unwrap();
    record.numbers = numbers.iter().copied().collect();
    ledger.claims.insert(uid.to_owned(), record);
}

fn whole(gpu: u32) -> Device {
    Device { held: Some(Held::Whole), share: None, consumed: None, ..share_of(&h100(gpu), 1, 1) }
}

fn partition(gpu: u32, placement: Placement) -> Device {
    let profile = ProfileName::new("1g.10gb");
    let partition = Partition { profile_id: 19, profile, placement, adopted: false, uuid: None };
    Device { held: Some(Held::Partition(placement)), partition: Some(partition), ..whole(gpu) }
}

/// That a number means a GPU.
fn means(minor: u32, gpu: u32) -> Meaning {
    Meaning { number: gpu_number(minor), gpu: h100(gpu).uuid, partition: None }
}

fn capability(minor: u32, gpu: u32, placement: Placement) -> Meaning {
    let number = DeviceNumber { major: CAP, minor };
    Meaning { number, gpu: h100(gpu).uuid, partition: Some(placement) }
}

/// Two GPUs that have exchanged their numbers, of which a claim holds the first and has its former number, too.
#[rstest]
#[case::as_before(whole(0), &[0], [(0, 0), (1, 1)], None)]
#[case::renumbered(whole(0), &[0], [(0, 1), (1, 0)], Some(1))]
#[case::renumbered_and_written_anew(whole(0), &[0, 1], [(0, 1), (1, 0)], Some(1))]
#[case::renumbered_twice(whole(0), &[0, 1], [(0, 0), (1, 1)], Some(1))]
#[case::a_share(share_of(&h100(0), 1, 1), &[0], [(0, 1), (1, 0)], Some(1))]
#[case::admin_access(Device { held: None, ..whole(0) }, &[0], [(0, 1), (1, 0)], None)]
#[case::its_former_number_means_nothing(whole(0), &[7], [(0, 0), (1, 1)], None)]
fn what_a_number_means_now_is_reached_by_those_who_were_started_with_it(
    #[case] device: Device,
    #[case] numbers: &[u32],
    #[case] now: [(u32, u32); 2],
    #[case] wanted: Option<u32>,
) {
    let mut ledger = Ledger::default();
    let numbers: Vec<DeviceNumber> = numbers.iter().map(|minor| gpu_number(*minor)).collect();
    hold(&mut ledger, "a", device, &numbers);
    let meanings = now.map(|(minor, gpu)| means(minor, gpu));
    let found = reached(&ledger, BOOT, &meanings);
    let gpus: Vec<GpuUuid> = found.iter().map(|reach| reach.gpu.clone()).collect();
    assert_eq!(gpus, wanted.map(|gpu| h100(gpu).uuid).into_iter().collect::<Vec<_>>());
    // Its own claim is kept from nothing, every other one from all of the GPU.
    for reach in &found {
        assert_eq!(obstacle(&found, "a", &reach.gpu, None), None);
        let part = Some(Placement::new(3, 1));
        assert_eq!(obstacle(&found, "b", &reach.gpu, None), Some(reach));
        assert_eq!(obstacle(&found, "b", &reach.gpu, part), Some(reach));
    }
    assert!(reached(&ledger, "another boot", &meanings).is_empty(), "no container outlives a boot");
    ledger.claims.get_mut("a").unwrap().retention = Some(Retention::Parked { until: 9 });
    assert!(reached(&ledger, BOOT, &meanings).is_empty(), "nothing runs with a claim that is parked");
    ledger.claims.clear();
    assert!(reached(&ledger, BOOT, &meanings).is_empty());
}

#[test]
fn a_capability_that_means_another_partition_reaches_that_and_no_other() {
    let (own, other) = (Placement::new(0, 1), Placement::new(6, 1));
    let mut ledger = Ledger::default();
    let numbers =
        [gpu_number(0), DeviceNumber { major: CAP, minor: 12 }, DeviceNumber { major: CAP, minor: 13 }];
    hold(&mut ledger, "a", partition(0, own), &numbers);
    let meanings = |placement| [means(0, 0), capability(12, 0, placement), capability(13, 0, placement)];
    assert!(reached(&ledger, BOOT, &meanings(own)).is_empty());
    let found = reached(&ledger, BOOT, &meanings(other));
    assert!(found.iter().all(|reach| reach.partition == Some(other)) && found.len() == 2, "{found:?}");
    let gpu = h100(0).uuid;
    assert!(obstacle(&found, "b", &gpu, Some(other)).is_some());
    assert!(obstacle(&found, "b", &gpu, Some(Placement::new(3, 1))).is_none());
    assert!(obstacle(&found, "b", &gpu, None).is_none(), "the GPU itself is the claim's");
}

#[test]
fn who_is_kept_from_a_gpu_is_told_by_whom_and_by_which_number() {
    let reach = Reach { gpu: h100(1).uuid, partition: None, claim: claim("a"), number: gpu_number(0) };
    let text = reach.to_string();
    for wanted in [claim("a").to_string(), "195:0".to_owned(), h100(1).uuid.to_string()] {
        assert!(text.contains(&wanted), "{text}");
    }
}

#[test]
fn a_number_is_written_as_the_kernel_shows_it() {
    let numbers: BTreeSet<DeviceNumber> = [gpu_number(3)].into();
    assert_eq!(serde_json::to_string(&numbers).unwrap(), r#"["195:3"]"#);
    assert_eq!(serde_json::from_str::<BTreeSet<DeviceNumber>>(r#"["195:3"]"#).unwrap(), numbers);
    assert!(serde_json::from_str::<DeviceNumber>(r#""195""#).is_err());
}

#[test]
fn specs_are_compared_by_all_their_devices_and_a_record_keeps_them_all() {
    let device = |name: &str, major: i64, minor: i64| {
        let mut edits = ContainerEdits::default();
        edits.device_nodes.push(DeviceNode::character("/dev/x".to_owned(), major as u32, minor as u32));
        edits.set_env("ALIQUOT_DEVICE_1", "gpu-0-mig-1g10gb-19-6=MIG-1");
        CdiDevice::new(name.parse().unwrap(), edits)
    };
    let spec = |uvm, gpu| {
        let kind = "gpu.example.com/claim".parse().unwrap();
        Spec::new(kind, vec![device("u-common", uvm, 0), device("u-1", 195, gpu)])
    };
    assert_eq!(named(&spec(500, 2)), [gpu_number(2), DeviceNumber { major: 500, minor: 0 }].into());
    assert!(same_devices(&spec(500, 2), &spec(500, 2)));
    assert!(!same_devices(&spec(500, 2), &spec(501, 2)), "also where only nvidia-uvm has another number");
    assert!(!same_devices(&spec(500, 2), &spec(500, 3)));
    let mut anew = spec(500, 2);
    anew.devices[1].container_edits.set_env("ALIQUOT_DEVICE_1", "gpu-0-mig-1g10gb-19-6=MIG-2");
    assert!(!same_devices(&spec(500, 2), &anew), "a partition that was made anew has the same numbers");
}

#[test]
fn who_was_started_with_the_number_that_now_divides_gpus_reaches_them_all() {
    let dir = tempfile::tempdir().unwrap();
    let caps = dir.path().join("driver/nvidia-caps");
    std::fs::create_dir_all(&caps).unwrap();
    std::fs::write(caps.join("mig-minors"), "config 1\nmonitor 2\ngpu0/gi0/access 3\n").unwrap();
    std::fs::write(dir.path().join("devices"), "Character devices:\n195 nvidia\n510 nvidia-caps\n").unwrap();
    let (majors, caps) = (Majors::read(dir.path()).unwrap(), MigMinors::read(dir.path()).unwrap());
    let gpus = [h100(0), h100(1)];
    let mut ledger = Ledger::default();
    // As nvidia-uvm-tools it was in the claim's spec.
    hold(&mut ledger, "a", whole(0), &[gpu_number(0), DeviceNumber { major: 510, minor: 1 }]);
    let found = reached(&ledger, BOOT, &meanings(&gpus, &[], &majors, &caps));
    let gpus: Vec<&GpuUuid> = found.iter().map(|reach| &reach.gpu).collect();
    assert_eq!(gpus, [&h100(1).uuid], "{found:?}");
}

/// What happens on a node.
#[derive(Debug, Clone)]
enum Turn {
    /// The driver is loaded anew and numbers the GPUs like this: the number of each.
    Load(Vec<u32>),
    /// The agent has seen it, and the specs say so.
    Follow,
    /// A container of a claim is started, with what its spec says.
    Start(usize),
}

const GPUS: usize = 4;

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let minors: Vec<u32> = (0..4).collect();
    let load = Just(minors).prop_shuffle().prop_map(Turn::Load);
    proptest::collection::vec(prop_oneof![load, Just(Turn::Follow), (0..GPUS).prop_map(Turn::Start)], 1..30)
}

proptest! {
    /// Containers are modelled apart from the ledger: whatever they can open that is not their claim's is found, and
    /// nothing else than what a spec of the claim has named at some time.
    #[test]
    fn nothing_that_a_running_container_can_open_is_given_to_another(
        turns in turns(),
        holds in proptest::collection::vec(any::<bool>(), GPUS),
    ) {
        let mut numbers: Vec<u32> = (0..4).collect();
        let mut specs = numbers.clone();
        let mut containers: Vec<(usize, u32)> = Vec::new();
        let mut ledger = Ledger::default();
        let claims: Vec<usize> = (0..GPUS).filter(|gpu| holds[*gpu]).collect();
        for gpu in &claims {
            hold(&mut ledger, &gpu.to_string(), whole(*gpu as u32), &[gpu_number(numbers[*gpu])]);
        }
        for turn in turns {
            match turn {
                Turn::Load(order) => numbers = order,
                Turn::Follow => {
                    for gpu in &claims {
                        let record = ledger.claims.get_mut(&gpu.to_string()).unwrap();
                        record.numbers.insert(gpu_number(numbers[*gpu]));
                        specs[*gpu] = numbers[*gpu];
                    }
                }
                Turn::Start(gpu) if holds[gpu] => containers.push((gpu, specs[gpu])),
                Turn::Start(_) => {}
            }
            let meanings: Vec<Meaning> =
                numbers.iter().enumerate().map(|(gpu, minor)| means(*minor, gpu as u32)).collect();
            let found = reached(&ledger, BOOT, &meanings);
            for (own, number) in &containers {
                let opens = numbers.iter().position(|minor| minor == number).unwrap();
                let told = found.iter().any(|reach| {
                    reach.claim.uid == own.to_string() && reach.gpu == h100(opens as u32).uuid
                });
                prop_assert_eq!(told, opens != *own);
            }
            for reach in &found {
                prop_assert!(ledger.claims[&reach.claim.uid].numbers.contains(&reach.number));
                prop_assert_ne!(&reach.gpu, &h100(reach.claim.uid.parse().unwrap()).uuid);
            }
        }
    }
}

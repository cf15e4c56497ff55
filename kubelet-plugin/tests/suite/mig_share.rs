//! Shares of a MIG partition: the partition is made with the first of them and goes with the last, whatever is killed
//! when, and its limits are kept by the partition's UUID.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

mod anew;
use crate::common;
mod kills;
mod strangers;

use aliquot_api::v1alpha1::NodeUsageStatus;
use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::ledger::State;
use aliquot_model::hold::Hold;
use aliquot_model::{MicroGpus, MigUuid, Placement};
use aliquot_nvml::fake::{FakeGpus, h100_80};
use aliquot_nvml::{GpuProcess, Gpus, ProcessKind};
use aliquot_quota::QuotaFile;
use common::{DRIVER, World, now, request};
use std::fs;
use std::thread;
use std::time::Instant;

const DEVICE: &str = "gpu-0-mig-2g20gb-14-4-share";
/// What of it exists.
const PARTITION: (u32, u32, u32, bool) = (0, 4, 2, true);

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1)]))
}

fn share(uid: &str) -> Request {
    request(uid, &[("s", DEVICE)])
}

fn uuid(world: &World) -> MigUuid {
    let live = world.gpus.live_migs(&h100_80(0).uuid).unwrap();
    let mut there = live.iter().filter(|mig| mig.placement == Placement::new(4, 2));
    there.next().unwrap().uuid.clone().unwrap()
}

fn created(world: &World) -> usize {
    world.gpus.calls().iter().filter(|call| **call == "nvmlDeviceCreateGpuInstanceWithPlacement").count()
}

/// The quota files of a claim.
fn quotas(world: &World, uid: &str) -> Vec<QuotaFile> {
    let shares = fs::read_dir(world.data().join("shares")).unwrap().map(|entry| entry.unwrap().path());
    let own = shares.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(uid));
    own.map(|path| QuotaFile::decode(&fs::read(path.join("quota/quota")).unwrap()).unwrap()).collect()
}

#[test]
fn the_first_share_makes_the_partition_and_the_last_takes_it_away() {
    for order in [["c-1", "c-2", "c-3"], ["c-3", "c-1", "c-2"]] {
        let world = world();
        let node = world.node();
        for uid in ["c-1", "c-2", "c-3"] {
            node.prepare(&share(uid), false, now()).unwrap();
            assert_eq!(world.instances(), [PARTITION], "{uid}");
        }
        assert_eq!(created(&world), 1);
        let made = uuid(&world);
        for uid in order {
            assert_eq!(
                (world.instances(), uuid(&world)),
                (vec![PARTITION], made.clone()),
                "before {uid} ends"
            );
            node.unprepare(uid).unwrap();
        }
        world.assert_clean();
    }
}

#[test]
fn limits_are_of_the_partition_and_named_by_its_uuid() {
    let world = world();
    let node = world.node();
    node.prepare(&share("c-1"), true, now()).unwrap();
    let mut best_effort = share("c-2");
    best_effort.devices[0].consumed.as_mut().unwrap().cores_percent = 0;
    node.prepare(&best_effort, false, now()).unwrap();
    // Another partition of the same GPU promises nothing here.
    node.prepare(&request("c-3", &[("s", "gpu-0-mig-3g40gb-9-0-share")]), false, now()).unwrap();
    let made = uuid(&world);
    let [one] = quotas(&world, "c-1").try_into().unwrap();
    assert_eq!((one.gpu_uuid.as_str(), one.memory_bytes, one.cores_percent), (made.as_str(), 4 << 30, 25));
    let [two] = quotas(&world, "c-2").try_into().unwrap();
    assert_eq!((two.gpu_uuid.as_str(), two.cores_percent), (made.as_str(), 75), "what c-1 was not promised");
    let spec = fs::read_to_string(world.cdi().join(format!("{DRIVER}-claim-c-1.json"))).unwrap();
    assert!(spec.contains(&format!("={DEVICE}={made}\"")), "{spec}");
    assert!(spec.contains(&format!("uuid={made},memory=4294967296,cores=25")), "{spec}");
    for path in ["/dev/nvidia-caps/nvidia-cap", "libaliquot_preload.so", "/run/aliquot/quota/"] {
        assert!(spec.contains(path), "{path}: {spec}");
    }
}

#[test]
fn a_share_of_a_partition_is_charged_for_its_part_of_the_gpu() {
    let world = world();
    let node = world.node();
    node.prepare(&share("c-1"), false, now()).unwrap();
    let held = node.usage(&NodeUsageStatus::default()).unwrap().held;
    let gpu = h100_80(0);
    let want = MicroGpus::of_partition_share(4 << 30, 25, gpu.profile(14).unwrap(), &gpu);
    assert_eq!(held[0].micro_gpus, want);
    assert!(want < MicroGpus::of_partition(gpu.profile(14).unwrap(), &gpu));
}

#[test]
fn two_shares_of_one_claim_have_one_partition() {
    let world = world();
    let node = world.node();
    node.prepare(&request("c-1", &[("a", DEVICE), ("b", DEVICE)]), false, now()).unwrap();
    assert_eq!((created(&world), quotas(&world, "c-1").len()), (1, 2));
    node.unprepare("c-1").unwrap();
    world.assert_clean();
}

#[test]
fn shares_that_are_prepared_at_the_same_time_have_one_partition() {
    let world = world();
    let uids = ["c-1", "c-2", "c-3", "c-4"];
    thread::scope(|scope| {
        for uid in uids {
            let node = world.node();
            scope.spawn(move || node.prepare(&share(uid), false, now()).unwrap());
        }
    });
    assert_eq!((world.instances(), created(&world)), (vec![PARTITION], 1));
    thread::scope(|scope| {
        for uid in uids {
            let node = world.node();
            scope.spawn(move || node.unprepare(uid).unwrap());
        }
    });
    world.assert_clean();
}

#[test]
fn after_a_reboot_the_partition_is_made_once_for_all_its_shares() {
    let world = world();
    for uid in ["c-1", "c-2"] {
        world.node().prepare(&share(uid), false, now()).unwrap();
    }
    world.reboot("boot-2");
    let node = world.node();
    node.recover().unwrap();
    for uid in ["c-2", "c-1"] {
        node.prepare(&share(uid), false, now()).unwrap();
        assert_eq!(world.instances(), [PARTITION]);
        assert_eq!(quotas(&world, uid)[0].gpu_uuid.as_str(), uuid(&world).as_str());
    }
    assert_eq!(created(&world), 2, "once in each boot");
    for uid in ["c-1", "c-2"] {
        node.unprepare(uid).unwrap();
    }
    world.assert_clean();
}

#[test]
fn a_share_that_was_not_prepared_again_after_a_reboot_keeps_no_partition() {
    let world = world();
    for uid in ["c-1", "c-2"] {
        world.node().prepare(&share(uid), false, now()).unwrap();
    }
    world.reboot("boot-2");
    let node = world.node();
    node.recover().unwrap();
    // Another instance first, so that the new partition has another UUID than before.
    node.prepare(&request("c-3", &[("m", "gpu-0-mig-2g20gb-14-0")]), false, now()).unwrap();
    node.prepare(&share("c-1"), false, now()).unwrap();
    node.unprepare("c-1").unwrap();
    assert_eq!(world.instances(), [(0, 0, 2, true)]);
    for uid in ["c-2", "c-3"] {
        node.unprepare(uid).unwrap();
    }
    world.assert_clean();
}

/// Made by an administrator.
fn with_static_partition() -> World {
    let world = world();
    let gpu = h100_80(0).uuid;
    world.gpus.set_mig_mode(&gpu, true).unwrap();
    world.gpus.create_mig(&gpu, 14, Placement::new(4, 2)).unwrap();
    world
}

#[test]
fn a_partition_that_was_there_before_is_shared_and_stays() {
    let world = with_static_partition();
    let (before, node) = (uuid(&world), world.node());
    node.prepare(&share("c-1"), false, now()).unwrap();
    // What the first share's pod runs is no reason to refuse the second.
    let instance = world.gpus.live_migs(&h100_80(0).uuid).unwrap()[0].gpu_instance;
    world.gpus.start_process(
        &h100_80(0).uuid,
        GpuProcess {
            pid: 4711,
            kind: ProcessKind::Compute,
            memory_bytes: Some(1 << 30),
            gpu_instance: Some(instance),
            compute_instance: Some(0),
            name: None,
        },
    );
    node.prepare(&share("c-2"), false, now()).unwrap();
    world.gpus.stop_process(4711);
    for uid in ["c-1", "c-2"] {
        assert!(world.ledger().claims[uid].devices[0].partition.as_ref().unwrap().adopted, "{uid}");
        node.unprepare(uid).unwrap();
        assert_eq!(uuid(&world), before, "{uid} has given it back");
    }
    assert_eq!((world.files(), created(&world)), (Vec::new(), 1));
}

#[test]
fn after_a_reboot_a_partition_of_the_administrator_in_the_same_place_stays() {
    let world = world();
    for uid in ["c-1", "c-2"] {
        world.node().prepare(&share(uid), false, now()).unwrap();
    }
    world.reboot("boot-2");
    let gpu = h100_80(0).uuid;
    world.gpus.set_mig_mode(&gpu, true).unwrap();
    // Another instance first, so that it has another UUID than ours had.
    world.gpus.create_mig(&gpu, 14, Placement::new(0, 2)).unwrap();
    world.gpus.create_mig(&gpu, 14, Placement::new(4, 2)).unwrap();
    let node = world.node();
    node.recover().unwrap();
    for uid in ["c-1", "c-2"] {
        node.prepare(&share(uid), false, now()).unwrap();
    }
    for uid in ["c-1", "c-2"] {
        node.unprepare(uid).unwrap();
        assert_eq!(world.instances(), [(0, 0, 2, true), PARTITION], "{uid}");
    }
}

#[test]
fn a_partition_that_somebody_destroyed_is_made_once_more_for_all() {
    let world = world();
    let node = world.node();
    for uid in ["c-1", "c-2"] {
        node.prepare(&share(uid), false, now()).unwrap();
    }
    let live = world.gpus.live_migs(&h100_80(0).uuid).unwrap();
    world.gpus.destroy_mig(&live[0]).unwrap();
    // Another instance first, so that the new partition has another UUID than before.
    world.gpus.create_mig(&h100_80(0).uuid, 14, Placement::new(0, 2)).unwrap();
    for uid in ["c-1", "c-2"] {
        node.prepare(&share(uid), false, now()).unwrap();
    }
    assert_eq!(world.instances(), [(0, 0, 2, true), PARTITION]);
    for uid in ["c-1", "c-2"] {
        assert_eq!(quotas(&world, uid)[0].gpu_uuid.as_str(), uuid(&world).as_str(), "{uid}");
    }
    for uid in ["c-1", "c-2"] {
        node.unprepare(uid).unwrap();
    }
    assert_eq!(world.instances(), [(0, 0, 2, true)]);
}

#[test]
fn a_share_that_is_kept_without_a_pod_keeps_the_partition() {
    let world = world();
    let node = world.node();
    let kept = Request { hold: Some(Hold::InUse), ..share("c-1") };
    node.prepare(&kept, false, now()).unwrap();
    node.prepare(&share("c-2"), false, now()).unwrap();
    let made = uuid(&world);
    node.unprepare("c-1").unwrap();
    assert!(world.ledger().claims["c-1"].is_parked());
    node.unprepare("c-2").unwrap();
    assert_eq!((world.instances(), uuid(&world)), (vec![PARTITION], made.clone()), "c-1 keeps it");
    assert_eq!(world.files(), Vec::<String>::new());
    node.prepare(&share("c-2"), false, now()).unwrap();
    node.prepare(&kept, false, now()).unwrap();
    assert_eq!((uuid(&world), created(&world)), (made, 1));
    node.unprepare("c-1").unwrap();
    assert!(node.release_parked("c-1").unwrap());
    assert_eq!(world.instances(), [PARTITION], "c-2 has it");
    node.unprepare("c-2").unwrap();
    world.assert_clean();
}

#[test]
fn records_of_shares_are_made_anew_after_a_loss() {
    for adopted in [false, true] {
        let world = if adopted { with_static_partition() } else { world() };
        let node = world.node();
        for uid in ["c-1", "c-2"] {
            node.prepare(&share(uid), false, now()).unwrap();
        }
        let (before, made) = (world.ledger().claims, uuid(&world));
        for name in ["checkpoint.json", "checkpoint.copy.json"] {
            fs::remove_file(world.data().join(name)).unwrap();
        }
        let node = world.node();
        assert!(node.recover().unwrap().lost.is_some());
        for uid in ["c-2", "c-1"] {
            assert!(node.rebuild(&share(uid), now()).unwrap(), "{uid}");
        }
        node.conclude(Default::default(), Instant::now()).unwrap();
        assert_eq!(world.ledger().claims, before, "adopted: {adopted}");
        for uid in ["c-1", "c-2"] {
            assert_eq!((world.instances(), uuid(&world)), (vec![PARTITION], made.clone()));
            node.unprepare(uid).unwrap();
        }
        assert_eq!(world.instances().is_empty(), !adopted);
    }
}

#[test]
fn a_partition_stays_while_nobody_knows_who_else_has_shares_of_it() {
    let world = world();
    let node = world.node();
    for uid in ["c-1", "c-2"] {
        node.prepare(&share(uid), false, now()).unwrap();
    }
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        fs::remove_file(world.data().join(name)).unwrap();
    }
    let node = world.node();
    assert!(node.recover().unwrap().lost.is_some());
    assert!(node.rebuild(&share("c-1"), now()).unwrap());
    node.unprepare("c-1").unwrap();
    assert_eq!(world.instances(), [PARTITION], "c-2 runs with it");
    assert!(node.rebuild(&share("c-2"), now()).unwrap());
    node.conclude(Default::default(), Instant::now()).unwrap();
    node.unprepare("c-2").unwrap();
    world.assert_clean();
}

#[test]
fn a_partition_is_not_had_alone_and_shared_at_once() {
    let world = world();
    let node = world.node();
    let alone = request("c-1", &[("m", "gpu-0-mig-2g20gb-14-4")]);
    node.prepare(&share("c-2"), false, now()).unwrap();
    let refused = node.prepare(&alone, false, now()).unwrap_err().to_string();
    assert!(refused.contains(&format!("overlaps {DEVICE}")) && refused.contains("claim-c-2"), "{refused}");
    node.unprepare("c-2").unwrap();
    node.prepare(&alone, false, now()).unwrap();
    let refused = node.prepare(&share("c-2"), false, now()).unwrap_err().to_string();
    assert!(refused.contains("overlaps gpu-0-mig-2g20gb-14-4,"), "{refused}");
    assert_eq!(world.ledger().claims["c-1"].state, State::Completed);
    node.unprepare("c-1").unwrap();
    world.assert_clean();
}

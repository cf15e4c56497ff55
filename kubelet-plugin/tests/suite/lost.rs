//! A lost checkpoint: what is kept, what is made anew from API, CDI specs and hardware, and when it is over.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

mod again;
mod agent;
mod boot;
use crate::common;
mod metadata;
mod shares;
mod strangers;
mod unreadable;

use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::ledger::{Ledger, Running, State};
use aliquot_kubelet_plugin::partitioning::Partitioning;
use aliquot_kubelet_plugin::prepare::{Conclusion, PrepareError};
use aliquot_model::{MigUuid, Placement};
use aliquot_nvml::fake::{FakeGpus, FaultKind, h100_80, until_killed};
use aliquot_nvml::{Gpus, NvmlCode};
use aliquot_quota::QuotaFile;
use common::kill::killer;
use common::{DRIVER, World, now, request};
use rstest::rstest;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Instant;

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1), h100_80(2)]))
}

fn lose(world: &World) {
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        fs::remove_file(world.data().join(name)).unwrap();
    }
}

fn parts() -> Request {
    request("c-parts", &[("a", "gpu-0-mig-1g10gb-19-6"), ("b", "gpu-0-mig-3g40gb-9-0")])
}

fn share(uid: &str) -> Request {
    request(uid, &[("s", "gpu-1-share")])
}

fn everything() -> Vec<Request> {
    vec![
        parts(),
        share("c-share"),
        request("c-whole", &[("g", "gpu-2")]),
        request("c-admin", &[("m", "gpu-0-admin")]),
    ]
}

/// The ledger without what only says how it came to be.
fn records(world: &World) -> Ledger {
    Ledger { lost: None, ..world.ledger() }
}

fn spec(uid: &str) -> String {
    format!("{DRIVER}-claim-{uid}")
}

fn region(world: &World, uid: &str) -> PathBuf {
    let shares = world.data().join("shares");
    let mut all = fs::read_dir(shares).unwrap().map(|entry| entry.unwrap().path());
    all.find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(uid))
        .unwrap()
        .join("region/region")
}

fn changes(world: &World, from: usize) -> Vec<&'static str> {
    let calls = world.gpus.calls();
    let changes = calls[from..].iter().copied();
    changes
        .filter(|call| call.contains("Create") || call.contains("Destroy") || call.contains("SetMig"))
        .collect()
}

#[test]
fn records_are_made_anew_as_they_were_from_api_cdi_specs_and_hardware() {
    let world = world();
    let node = world.node();
    for claim in everything() {
        node.prepare(&claim, claim.claim.uid == "c-share", now()).unwrap();
    }
    let (before, files) = (records(&world), world.files());
    lose(&world);
    let node = world.node();
    assert!(node.recover().unwrap().lost.is_some());
    let calls = world.gpus.calls().len();
    for claim in everything() {
        assert!(node.rebuild(&claim, now()).unwrap());
        assert!(!node.rebuild(&claim, now()).unwrap(), "once");
    }
    assert_eq!(records(&world), before);
    assert_eq!((world.files(), changes(&world, calls)), (files, Vec::new()));
    assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Found { .. }));
    assert!(world.node().recover().unwrap().lost.is_none());
    for claim in everything() {
        assert!(node.unprepare(&claim.claim.uid).unwrap());
    }
    world.assert_clean();
}

/// What can be different on the node from what the API says.
#[rstest]
#[case::another_allocation(|request: &mut Request, _: &World| request.devices[1] = self::request("x", &[("b", "gpu-0-mig-3g40gb-9-4")]).devices[0].clone(), "its CDI spec gives")]
#[case::one_device_more(|request: &mut Request, _: &World| drop(request.devices.pop()), "its CDI spec gives")]
#[case::no_spec(|_: &mut Request, world: &World| fs::remove_dir_all(world.cdi()).unwrap(), "no CDI spec")]
#[case::instance_gone(|_: &mut Request, world: &World| {
    let live = world.gpus.live_migs(&h100_80(0).uuid).unwrap();
    world.gpus.destroy_mig(&live[0]).unwrap();
}, "which is gone now")]
#[case::another_instance(|_: &mut Request, world: &World| {
    let gpu = h100_80(0).uuid;
    let live = world.gpus.live_migs(&gpu).unwrap();
    let old = live.iter().find(|mig| mig.placement.start == 6).unwrap().clone();
    world.gpus.destroy_mig(&old).unwrap();
    let beside = world.gpus.create_mig(&gpu, 19, Placement::new(5, 1)).unwrap();
    let new = world.gpus.create_mig(&gpu, 19, Placement::new(6, 1)).unwrap();
    let different: (Option<MigUuid>, Option<MigUuid>) = (old.uuid, new.uuid);
    assert_ne!(different.0, different.1);
    world.gpus.destroy_mig(&beside).unwrap();
}, "which is MIG-")]
fn where_they_do_not_agree_nothing_is_made_up_and_everything_is_spared(
    #[case] change: fn(&mut Request, &World),
    #[case] why: &str,
) {
    let world = world();
    let node = world.node();
    node.prepare(&parts(), false, now()).unwrap();
    lose(&world);
    node.recover().unwrap();
    let mut request = parts();
    change(&mut request, &world);
    let (files, instances) = (world.files(), world.instances());
    let error = node.rebuild(&request, now()).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    assert!(world.ledger().claims.is_empty() && world.ledger().lost.is_some());
    assert_eq!((world.files(), world.instances()), (files, instances));
}

#[rstest]
#[case::all_are_the_administrators(Partitioning::Fixed)]
#[case::adopted_beside_others(Partitioning::OnDemand)]
fn a_lent_partition_is_lent_again_only_if_it_is_the_same(#[case] partitioning: Partitioning) {
    let world = world();
    let gpu = h100_80(0).uuid;
    world.gpus.set_mig_mode(&gpu, true).unwrap();
    let lent = world.gpus.create_mig(&gpu, 19, Placement::new(6, 1)).unwrap();
    let node = world.node();
    node.partitioning.set(partitioning);
    let claim = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]);
    node.prepare(&claim, false, now()).unwrap();
    let before = records(&world);
    lose(&world);
    node.rebuild(&claim, now()).unwrap();
    assert_eq!(records(&world), before);
    // What nobody can vouch for is lent to nobody, until it is known that nothing else was lost.
    let beside = world.gpus.create_mig(&gpu, 19, Placement::new(0, 1)).unwrap();
    assert!(!node.overview().unwrap().0.is_adopted(&beside));
    world.gpus.destroy_mig(&beside).unwrap();
    node.unprepare("c-1").unwrap();
    assert_eq!(world.gpus.live_migs(&gpu).unwrap(), std::slice::from_ref(&lent), "it stays");
    world.settle();
    node.prepare(&claim, false, now()).unwrap();
    lose(&world);
    world.gpus.destroy_mig(&lent).unwrap();
    world.gpus.create_mig(&gpu, 19, Placement::new(5, 1)).unwrap();
    let other = world.gpus.create_mig(&gpu, 19, Placement::new(6, 1)).unwrap();
    assert_ne!(lent.uuid, other.uuid);
    let error = node.rebuild(&claim, now()).unwrap_err().to_string();
    assert!(error.contains(&other.uuid.unwrap().to_string()), "{error}");
}

/// On a node where nothing says that there was a checkpoint.
#[test]
fn a_pod_that_runs_with_a_claim_says_that_there_was_something_to_lose() {
    let world = world();
    fs::remove_dir_all(world.data()).unwrap();
    let node = world.node();
    assert!(!node.recover().unwrap().lost.unwrap().is_loss());
    let running = Running { claim: share("c-1").claim, devices: vec!["gpu-1-share".into()] };
    let running = BTreeMap::from([("c-1".to_owned(), running)]);
    assert_eq!(node.conclude(running, Instant::now()).unwrap(), Conclusion::Unchanged);
    assert!(world.ledger().lost.unwrap().is_loss());
    // Its pod is not seen any more.
    assert_eq!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Unchanged);
    assert!(node.prepare(&request("c-2", &[("g", "gpu-1")]), false, now()).is_err());
    assert!(node.give_up("c-1", now()).unwrap());
    assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Found { .. }));
}

#[test]
fn a_claim_that_overlaps_one_that_has_a_record_is_not_made_anew() {
    let world = world();
    let node = world.node();
    node.prepare(&share("c-1"), false, now()).unwrap();
    lose(&world);
    node.recover().unwrap();
    // As after a second loss, and a claim that came between.
    let file = world.cdi().join(format!("{}.json", spec("c-1")));
    fs::rename(&file, file.with_extension("away")).unwrap();
    node.prepare(&request("c-2", &[("g", "gpu-1")]), false, now()).unwrap();
    fs::rename(file.with_extension("away"), &file).unwrap();
    let error = node.rebuild(&share("c-1"), now()).unwrap_err().to_string();
    assert!(error.contains("overlaps gpu-1") && error.contains("c-2"), "{error}");
}

#[test]
fn the_state_outlasts_every_start_and_every_kill_until_all_is_accounted_for() {
    for at in 1.. {
        let world = world();
        world.node().prepare(&parts(), false, now()).unwrap();
        fs::create_dir_all(world.data().join("shares/c-gone-00000000/quota")).unwrap();
        let (files, instances) = (world.files(), world.instances());
        lose(&world);
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| {
            node.recover().unwrap();
            assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()), Ok(Conclusion::Unchanged)));
            node.rebuild(&parts(), now()).unwrap();
        });
        for _ in 0..2 {
            let node = world.node();
            let recovery = node.recover().unwrap();
            assert!(recovery.lost.is_some() && recovery.orphans.is_empty(), "killed at {at}: {recovery:?}");
            assert!(
                node.prepare(&request("c-2", &[("g", "gpu-0")]), false, now()).is_err(),
                "killed at {at}"
            );
        }
        assert_eq!((world.files(), world.instances()), (files, instances), "killed at {at}");
        let node = world.node();
        node.rebuild(&parts(), now()).unwrap();
        match node.conclude(BTreeMap::new(), Instant::now()).unwrap() {
            Conclusion::Found { orphans, .. } => assert_eq!(orphans, ["share c-gone-00000000"]),
            other => panic!("{other:?}"),
        }
        assert!(node.unprepare("c-parts").unwrap());
        world.assert_clean();
        if done.is_some() {
            break;
        }
    }
}

#[test]
fn prepared_again_after_a_loss_a_claim_keeps_instances_and_regions() {
    let world = world();
    let node = world.node();
    let mut before = Vec::new();
    for claim in everything() {
        before.push(node.prepare(&claim, false, now()).unwrap());
    }
    let inode = fs::metadata(region(&world, "c-share")).unwrap().ino();
    fs::write(region(&world, "c-share"), b"what the old containers account").unwrap();
    lose(&world);
    let node = world.node();
    node.recover().unwrap();
    let calls = world.gpus.calls().len();
    let after: Vec<_> = everything().iter().map(|claim| node.prepare(claim, false, now()).unwrap()).collect();
    assert_eq!((after, changes(&world, calls)), (before, Vec::new()));
    assert_eq!(fs::metadata(region(&world, "c-share")).unwrap().ino(), inode);
    assert_eq!(fs::read(region(&world, "c-share")).unwrap(), b"what the old containers account");
    assert!(world.ledger().claims.values().all(|record| record.state == State::Completed));
}

#[rstest]
#[case::the_spec_is_gone_too(true)]
#[case::the_spec_says_something_else(false)]
fn no_container_gets_another_region_than_those_that_run(#[case] gone: bool) {
    let world = world();
    let node = world.node();
    node.prepare(&share("c-1"), false, now()).unwrap();
    let path = region(&world, "c-1");
    fs::write(&path, b"account").unwrap();
    lose(&world);
    node.recover().unwrap();
    let dir = &node.machine.cdi;
    if gone {
        dir.remove(&spec("c-1")).unwrap();
    } else {
        let mut other = dir.read(&spec("c-1")).unwrap().unwrap();
        other.devices.retain(|device| device.name.to_string().ends_with("-common"));
        dir.write(&spec("c-1"), &other).unwrap();
    }
    node.prepare(&share("c-1"), false, now()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"account");
    let mut larger = share("c-1");
    larger.devices[0].consumed.as_mut().unwrap().memory_bytes = 9 << 30;
    lose(&world);
    dir.remove(&spec("c-1")).unwrap();
    node.prepare(&larger, false, now()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"account");
    let quota = path.parent().unwrap().with_file_name("quota").join("quota");
    assert_eq!(QuotaFile::decode(&fs::read(quota).unwrap()).unwrap().memory_bytes, 9 << 30);
    // Once it is given back, the next one begins with nothing.
    node.unprepare("c-1").unwrap();
    node.prepare(&share("c-1"), false, now()).unwrap();
    assert_ne!(fs::read(region(&world, "c-1")).unwrap(), b"account");
}

/// What containers may be running with that a claim does not have now.
#[rstest]
#[case::another_gpu("gpu-2", |_: &World| {}, "its CDI spec gives gpu-1")]
#[case::another_uuid("gpu-1", |world: &World| rewrite(world, "c-1", h100_80(1).uuid.as_str(), h100_80(2).uuid.as_str()), "which is GPU-")]
#[case::unreadable("gpu-1", |world: &World| {
    fs::write(world.cdi().join(format!("{}.json", spec("c-1"))), b"{").unwrap();
}, "cannot be read")]
fn a_claim_is_not_prepared_over_a_spec_that_gives_containers_something_else(
    #[case] device: &str,
    #[case] change: fn(&World),
    #[case] why: &str,
) {
    let world = world();
    let node = world.node();
    node.prepare(&request("c-1", &[("g", "gpu-1")]), false, now()).unwrap();
    lose(&world);
    node.recover().unwrap();
    change(&world);
    let file = world.cdi().join(format!("{}.json", spec("c-1")));
    let before = fs::read(&file).unwrap();
    let claim = request("c-1", &[("g", device)]);
    let error = node.prepare(&claim, false, now()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, PrepareError::Disagrees { .. }) && text.contains(why), "{text}");
    assert!(text.contains(file.to_str().unwrap()) && text.contains("delete the pods"), "{text}");
    assert_eq!(fs::read(&file).unwrap(), before, "what the containers run with is remembered");
    assert!(world.ledger().claims.is_empty());
    // As the error says.
    assert!(node.unprepare("c-1").unwrap());
    node.prepare(&claim, false, now()).unwrap();
}

fn rewrite(world: &World, uid: &str, from: &str, to: &str) {
    let file = world.cdi().join(format!("{}.json", spec(uid)));
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(from));
    fs::write(&file, text.replace(from, to)).unwrap();
}

/// While a GPU does not answer or is busy, a pod may well be running on it.
#[test]
fn an_error_that_passes_leaves_spec_and_region_of_a_running_pod() {
    let world = world();
    let node = world.node();
    node.prepare(&share("c-1"), false, now()).unwrap();
    let path = region(&world, "c-1");
    fs::write(&path, b"account").unwrap();
    lose(&world);
    node.recover().unwrap();
    let files = world.files();
    world.gpus.fault("nvmlDeviceGetCount_v2", 1, FaultKind::Fail(NvmlCode::UNKNOWN));
    // What is prepared anew would come as far as this, and be undone.
    let away = world.limiter().with_extension("away");
    fs::rename(world.limiter(), &away).unwrap();
    node.prepare(&share("c-1"), false, now()).unwrap_err();
    assert_eq!(world.files(), files);
    assert_eq!(fs::read(&path).unwrap(), b"account");
    assert!(world.ledger().claims.is_empty(), "it is as unaccounted for as before");
    fs::rename(away, world.limiter()).unwrap();
    assert!(node.prepare(&share("c-1"), false, now()).is_ok());
    assert_eq!(fs::read(&path).unwrap(), b"account");
}

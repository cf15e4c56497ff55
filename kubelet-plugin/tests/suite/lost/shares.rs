//! Shares whose record was lost: quota and region are what containers go on with.

use super::common::{World, now, private_mounts};
use super::{lose, records, region, share, spec, world};
use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::prepare::Node;
use aliquot_nvml::fake::h100_80;
use aliquot_quota::QuotaFile;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A share that was prepared and lost: its record, its region and its quota.
struct Lost {
    world: World,
    node: Node,
    before: aliquot_kubelet_plugin::ledger::Ledger,
    region: PathBuf,
    quota: PathBuf,
}

fn lost(claim: &Request) -> Lost {
    let world = world();
    world.node().prepare(claim, false, now()).unwrap();
    let before = records(&world);
    lose(&world);
    let node = world.node();
    node.recover().unwrap();
    let region = region(&world, &claim.claim.uid);
    let quota = region.parent().unwrap().with_file_name("quota").join("quota");
    Lost { world, node, before, region, quota }
}

fn of(gibibytes: u64, uid: &str) -> Request {
    let mut claim = share(uid);
    claim.devices[0].consumed.as_mut().unwrap().memory_bytes = gibibytes << 30;
    claim
}

fn change(quota: &Path, change: impl FnOnce(&mut QuotaFile)) -> QuotaFile {
    let mut file = QuotaFile::decode(&fs::read(quota).unwrap()).unwrap();
    change(&mut file);
    fs::write(quota, file.encode()).unwrap();
    file
}

#[test]
fn a_share_goes_on_under_the_limit_that_is_in_force() {
    let Lost { world, node, quota, .. } = lost(&share("c-1"));
    let file = change(&quota, |file| {
        file.memory_bytes = 6 << 30;
        file.priority = -2;
        file.generation = 9;
    });
    node.rebuild(&share("c-1"), now()).unwrap();
    let now = QuotaFile::decode(&fs::read(&quota).unwrap()).unwrap();
    assert_eq!(now, file, "the limiter reads nothing new");
    let device = &world.ledger().claims["c-1"].devices[0];
    assert_eq!(device.reserved().unwrap().memory_bytes, 6 << 30, "no other claim gets it");
}

/// As where the record is there and the region is not: the next prepare makes it.
#[test]
fn a_share_whose_region_is_gone_has_its_record_from_its_quota() {
    let own = of(60, "c-1");
    let Lost { world, node, before, region, quota } = lost(&own);
    let inode = fs::metadata(quota.parent().unwrap()).unwrap().ino();
    fs::remove_file(&region).unwrap();
    assert!(node.rebuild(&own, now()).unwrap());
    assert_eq!(records(&world), before);
    // Its GPU is open to others, beside what it has.
    let refused = node.prepare(&of(30, "c-2"), false, now()).unwrap_err().to_string();
    assert!(refused.contains("would take") && refused.contains("c-1"), "{refused}");
    node.prepare(&share("c-2"), false, now()).unwrap();
    node.prepare(&own, false, now()).unwrap();
    assert!(region.is_file());
    let after = fs::metadata(quota.parent().unwrap()).unwrap().ino();
    assert_eq!(after, inode, "running containers read this quota");
}

#[test]
fn a_share_without_its_quota_or_with_that_of_another_gpu_is_not_taken_for_whole() {
    let Lost { world: _world, node, quota, .. } = lost(&share("c-1"));
    let refusal = || node.rebuild(&share("c-1"), now()).unwrap_err().to_string();
    let sound = fs::read(&quota).unwrap();
    fs::remove_file(&quota).unwrap();
    assert!(refusal().contains("quota/quota"));
    fs::write(&quota, &sound).unwrap();
    change(&quota, |file| file.gpu_uuid = aliquot_quota::GpuUuid::new(h100_80(2).uuid.as_str()).unwrap());
    assert!(refusal().contains("its quota is for GPU"));
    fs::write(&quota, sound).unwrap();
    assert!(node.rebuild(&share("c-1"), now()).unwrap());
}

#[test]
fn a_region_in_memory_is_taken_over_where_it_is_mounted() {
    if !private_mounts("a region in memory after a loss") {
        return;
    }
    let bounded = |world: &World| -> Node {
        let mut node = world.node();
        node.machine.regions = aliquot_kubelet_plugin::share::RegionStorage::Tmpfs;
        node
    };
    let world = world();
    bounded(&world).prepare(&share("c-1"), false, now()).unwrap();
    let id = |path: PathBuf| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).unwrap();
    let before = id(region(&world, "c-1"));
    lose(&world);
    let node = bounded(&world);
    node.recover().unwrap();
    node.machine.cdi.remove(&spec("c-1")).unwrap();
    node.prepare(&share("c-1"), false, now()).unwrap();
    assert_eq!(id(region(&world, "c-1")), before);
    node.unprepare("c-1").unwrap();
    world.assert_clean();
}

/// The file of a region whose file system containers still have.
#[test]
fn a_region_in_memory_that_is_gone_is_made_in_a_file_system_of_its_own() {
    if !private_mounts("a region in memory that is gone") {
        return;
    }
    let world = world();
    let mut node = world.node();
    node.machine.regions = aliquot_kubelet_plugin::share::RegionStorage::Tmpfs;
    node.prepare(&share("c-1"), false, now()).unwrap();
    let path = region(&world, "c-1");
    let open = fs::File::open(&path).unwrap();
    let before = fs::metadata(&path).unwrap().dev();
    lose(&world);
    node.recover().unwrap();
    fs::remove_file(&path).unwrap();
    node.prepare(&share("c-1"), false, now()).unwrap();
    assert_ne!(fs::metadata(&path).unwrap().dev(), before);
    drop(open);
    node.unprepare("c-1").unwrap();
    world.assert_clean();
}

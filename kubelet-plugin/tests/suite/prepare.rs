//! Prepare and unprepare on a node of fake GPUs: answers, idempotence, refusals, what containers get.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::claim::{Request, Settings};
use aliquot_kubelet_plugin::former::Given;
use aliquot_kubelet_plugin::partitioning::Unclaimed;
use aliquot_kubelet_plugin::prepare::{Node, PrepareError};
use aliquot_model::config::ShareConfig;
use aliquot_model::{GpuInfo, Quantity};
use aliquot_nvml::fake::{FakeGpus, h100_80, t4};
use aliquot_nvml::{GpuProcess, Gpus, ProcessKind};
use aliquot_quota::{QuotaFile, REGION_FILE_SIZE};
use common::{DRIVER, World, now, request};
use jiff::Timestamp;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1), t4(2)]))
}

fn process(gpu_instance: Option<u32>) -> GpuProcess {
    GpuProcess {
        pid: 4711,
        name: Some("python3".into()),
        kind: ProcessKind::Compute,
        memory_bytes: None,
        gpu_instance,
        compute_instance: gpu_instance.map(|_| 0),
    }
}

#[test]
fn the_answer_names_request_device_share_and_cdi_ids() {
    let world = world();
    let request = request("c-1", &[("main/small", "gpu-0-share"), ("b", "gpu-1")]);
    let prepared = world.node().prepare(&request, false, now()).unwrap();
    assert_eq!(prepared[0].request, "main");
    assert_eq!(prepared[0].share_id.as_deref(), Some("share-main/small"));
    assert_eq!(prepared[0].cdi[0], format!("{DRIVER}/claim=c-1-common"));
    assert_eq!(prepared[1].device, "gpu-1");
    let spec = world.node().machine.cdi.read(&format!("{DRIVER}-claim-c-1")).unwrap().unwrap();
    for id in prepared.iter().flat_map(|device| &device.cdi) {
        let name: aliquot_cdi::QualifiedName = id.parse().unwrap();
        assert!(spec.device(&name.name).is_some(), "{id} is not in the spec");
    }
    assert_eq!(spec.devices.len(), 3);
}

#[test]
fn two_requests_get_only_their_own_nodes() {
    let world = world();
    let request = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6"), ("b", "gpu-0-mig-1g10gb-19-5")]);
    let prepared = world.node().prepare(&request, false, now()).unwrap();
    let spec = world.node().machine.cdi.read(&format!("{DRIVER}-claim-c-1")).unwrap().unwrap();
    let nodes: Vec<BTreeSet<String>> = prepared
        .iter()
        .map(|device| {
            let name: aliquot_cdi::QualifiedName = device.cdi[1].parse().unwrap();
            let edits = &spec.device(&name.name).unwrap().container_edits;
            edits.device_nodes.iter().map(|node| node.path.clone()).collect()
        })
        .collect();
    for nodes in &nodes {
        assert_eq!(nodes.len(), 3, "the GPU and two capabilities: {nodes:?}");
    }
    let common: Vec<&String> = nodes[0].intersection(&nodes[1]).collect();
    assert_eq!(common, ["/dev/nvidia0"]);
}

#[test]
fn asking_again_changes_nothing() {
    let world = world();
    let request = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6"), ("s", "gpu-1-share")]);
    let first = world.node().prepare(&request, false, now()).unwrap();
    let ledger = world.ledger();
    let calls = world.gpus.calls().len();
    let second = world.node().prepare(&request, false, now()).unwrap();
    assert_eq!(first, second);
    assert_eq!(world.ledger(), ledger);
    let since: Vec<&str> = world.gpus.calls()[calls..]
        .iter()
        .copied()
        .filter(|call| call.contains("Create") || call.contains("Destroy") || call.contains("SetMigMode"))
        .collect();
    assert_eq!(since, Vec::<&str>::new());
}

#[test]
fn a_wiped_cdi_directory_is_written_again_without_touching_hardware() {
    let world = world();
    let request = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]);
    world.node().prepare(&request, false, now()).unwrap();
    let uuid = world.gpus.live_migs(&h100_80(0).uuid).unwrap()[0].uuid.clone();
    fs::remove_dir_all(world.cdi()).unwrap();
    world.node().prepare(&request, false, now()).unwrap();
    assert_eq!(world.files().len(), 1);
    assert_eq!(world.gpus.live_migs(&h100_80(0).uuid).unwrap()[0].uuid, uuid);
}

#[test]
fn a_partition_that_somebody_destroyed_is_made_again_beside_one_in_use() {
    let world = world();
    let request = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6"), ("b", "gpu-0-mig-1g10gb-19-5")]);
    world.node().prepare(&request, false, now()).unwrap();
    let gpu = h100_80(0).uuid;
    let live = world.gpus.live_migs(&gpu).unwrap();
    let (used, gone) = (&live[0], &live[1]);
    world.gpus.start_process(&gpu, process(Some(used.gpu_instance)));
    world.gpus.destroy_mig(gone).unwrap();
    world.node().prepare(&request, false, now()).unwrap();
    assert_eq!(world.instances().len(), 2);
    let still = world.gpus.live_migs(&gpu).unwrap();
    assert!(still.iter().any(|mig| mig.uuid == used.uuid));
}

#[test]
fn unprepare_of_an_unknown_claim_succeeds() {
    assert!(!world().node().unprepare("never-seen").unwrap());
}

#[test]
fn unprepare_while_in_use_names_the_process_and_can_be_repeated() {
    let world = world();
    let request = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]);
    world.node().prepare(&request, false, now()).unwrap();
    let gpu = h100_80(0).uuid;
    let instance = world.gpus.live_migs(&gpu).unwrap()[0].gpu_instance;
    world.gpus.start_process(&gpu, process(Some(instance)));
    let error = world.node().unprepare("c-1").unwrap_err().to_string();
    assert!(error.contains("4711 (python3)"), "{error}");
    assert_eq!(world.ledger().claims.len(), 1);
    world.gpus.stop_process(4711);
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
}

#[test]
fn a_mode_switch_that_a_process_blocks_names_it() {
    let world = world();
    world.gpus.start_process(&h100_80(0).uuid, process(None));
    let request = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]);
    let error = world.node().prepare(&request, false, now()).unwrap_err().to_string();
    assert!(error.contains("4711 (python3)"), "{error}");
    world.gpus.stop_process(4711);
    world.assert_clean();
}

#[test]
fn a_gpu_that_fell_off_the_bus_does_not_block_release() {
    let world = world();
    let request = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]);
    world.node().prepare(&request, false, now()).unwrap();
    world.gpus.lose(&h100_80(0).uuid);
    assert!(world.node().unprepare("c-1").unwrap());
    assert!(world.ledger().claims.is_empty());
    assert_eq!(world.files(), Vec::<String>::new());
}

#[test]
fn a_share_has_a_quota_that_only_the_node_writes_and_a_region_for_any_user() {
    let world = world();
    let prepared = world.node().prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap();
    let id = prepared[0].cdi[1].rsplit('=').next().unwrap().to_owned();
    let dir = world.data().join("shares").join(&id);
    let quota = QuotaFile::decode(&fs::read(dir.join("quota/quota")).unwrap()).unwrap();
    assert_eq!(quota.gpu_uuid.as_str(), h100_80(0).uuid.as_str());
    assert_eq!((quota.memory_bytes, quota.cores_percent), (4 << 30, 25));
    let region = dir.join("region/region");
    let meta = fs::metadata(&region).unwrap();
    assert_eq!(meta.len(), u64::try_from(REGION_FILE_SIZE).unwrap());
    assert_eq!(meta.permissions().mode() & 0o777, 0o666);
    let bytes = fs::read(&region).unwrap();
    aliquot_quota::region::check(bytes.len(), &bytes).unwrap();
    assert_eq!(fs::metadata(dir.join("quota/quota")).unwrap().permissions().mode() & 0o777, 0o644);
    // The stub's path in the preload file is where the container finds it.
    let version = env!("CARGO_PKG_VERSION");
    let preload = fs::read_to_string(world.data().join(format!("limiter/{version}/ld.so.preload"))).unwrap();
    assert_eq!(preload, format!("/usr/local/lib/aliquot/{version}/libaliquot_preload.so\n"));
}

#[test]
fn managed_memory_beyond_a_share_is_in_its_quota_or_the_claim_is_not_prepared() {
    let world = world();
    let asking = |uid: &str, gib: u64| {
        let mut request = request(uid, &[("s", "gpu-0-share")]);
        let oversubscribe = Some(Quantity::from_u64(gib << 30));
        request.devices[0].settings =
            Settings::Share(ShareConfig { oversubscribe, ..ShareConfig::default() });
        request
    };
    let node = world.node();
    let quota = |id: &str| {
        let path = world.data().join("shares").join(id).join("quota/quota");
        QuotaFile::decode(&fs::read(path).unwrap()).unwrap()
    };
    let prepared = node.prepare(&asking("c-1", 8), false, now()).unwrap();
    let id = prepared[0].cdi[1].rsplit('=').next().unwrap().to_owned();
    assert_eq!((quota(&id).memory_bytes, quota(&id).oversubscribe_bytes), (4 << 30, 8 << 30));
    let error = node.prepare(&asking("c-2", 9), false, now()).unwrap_err().to_string();
    assert!(
        error.contains("asks for 9Gi of managed memory") && error.contains("allows 8Gi at most"),
        "{error}"
    );
    node.prepare(&request("c-3", &[("s", "gpu-0-share")]), false, now()).unwrap();
    assert_eq!(quota(&id).oversubscribe_bytes, 8 << 30, "as it was when others come and go");
}

#[test]
fn best_effort_shares_are_capped_live_at_what_nobody_was_promised() {
    let world = world();
    let share = |uid: &str, cores| {
        let mut request = request(uid, &[("s", "gpu-0-share")]);
        request.devices[0].consumed.as_mut().unwrap().cores_percent = cores;
        request
    };
    let quota = |id: &str| {
        let path = world.data().join("shares").join(id).join("quota/quota");
        let quota = QuotaFile::decode(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        (quota.cores_percent, quota.generation)
    };
    let node = world.node();
    let free = node.prepare(&share("c-1", 0), false, now()).unwrap();
    let id = free[0].cdi[1].rsplit('=').next().unwrap().to_owned();
    assert_eq!(quota(&id), (0, 1), "nobody was promised anything: no cap");
    node.prepare(&share("c-2", 30), false, now()).unwrap();
    assert_eq!(quota(&id), (70, 2));
    node.prepare(&share("c-3", 70), false, now()).unwrap();
    assert_eq!(quota(&id), (1, 3), "never nothing");
    node.unprepare("c-2").unwrap();
    assert_eq!(quota(&id), (30, 4));
    node.unprepare("c-3").unwrap();
    assert_eq!(quota(&id), (0, 5));
}

#[test]
fn without_the_limiter_no_share_is_prepared() {
    let world = world();
    fs::remove_dir_all(world.limiter()).unwrap();
    let error = world.node().prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap_err();
    assert!(error.to_string().contains("limiter is not installed"), "{error}");
    world.assert_clean();
    assert!(world.node().prepare(&request("c-2", &[("g", "gpu-0")]), false, now()).is_ok());
}

#[test]
fn a_changed_allocation_waits_for_unprepare() {
    let world = world();
    world.node().prepare(&request("c-1", &[("g", "gpu-0")]), false, now()).unwrap();
    let moved = request("c-1", &[("g", "gpu-1")]);
    let error = world.node().prepare(&moved, false, now()).unwrap_err();
    assert!(matches!(error, PrepareError::Reallocated { .. }), "{error}");
    world.node().unprepare("c-1").unwrap();
    assert!(world.node().prepare(&moved, false, now()).is_ok());
}

#[test]
fn partitions_and_whole_gpus_alternate_on_a_board_that_can_switch() {
    let world = world();
    for _ in 0..2 {
        world.node().prepare(&request("c-1", &[("a", "gpu-0-mig-7g80gb-0-0")]), false, now()).unwrap();
        world.node().unprepare("c-1").unwrap();
        world.node().prepare(&request("c-2", &[("g", "gpu-0")]), false, now()).unwrap();
        world.node().unprepare("c-2").unwrap();
    }
    world.assert_clean();
}

#[test]
fn the_mode_goes_off_with_the_last_partition_only() {
    let world = world();
    world.node().prepare(&request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]), false, now()).unwrap();
    world.node().prepare(&request("c-2", &[("a", "gpu-0-mig-1g10gb-19-5")]), false, now()).unwrap();
    world.node().unprepare("c-1").unwrap();
    assert!(world.gpus.mig_mode(&h100_80(0).uuid).unwrap().current);
    world.node().unprepare("c-2").unwrap();
    world.assert_clean();
}

#[test]
fn an_admin_sees_the_gpu_and_its_partitions_beside_their_owners() {
    let world = world();
    world.node().prepare(&request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]), false, now()).unwrap();
    let prepared = world.node().prepare(&request("c-2", &[("m", "gpu-0-admin")]), false, now()).unwrap();
    let spec = world.node().machine.cdi.read(&format!("{DRIVER}-claim-c-2")).unwrap().unwrap();
    let name: aliquot_cdi::QualifiedName = prepared[0].cdi[1].parse().unwrap();
    let nodes = &spec.device(&name.name).unwrap().container_edits.device_nodes;
    assert!(nodes.iter().any(|node| node.path == "/dev/nvidia0"));
    assert!(nodes.iter().filter(|node| node.path.starts_with("/dev/nvidia-caps/")).count() >= 2);
    world.node().unprepare("c-2").unwrap();
    assert_eq!(world.instances().len(), 1, "the owner keeps its partition");
}

#[test]
fn instances_of_nobody_are_seen_and_destroyed_only_when_idle() {
    let world = world();
    let gpu = h100_80(0).uuid;
    world.gpus.set_mig_mode(&gpu, true).unwrap();
    let mig = world.gpus.create_mig(&gpu, 19, aliquot_model::Placement::new(6, 1)).unwrap();
    let node = Node { unclaimed: Unclaimed::Destroy, ..world.node() };
    let (overview, _) = node.overview().unwrap();
    assert_eq!(overview.foreign.len(), 1);
    let held = overview.held(&BTreeSet::new());
    assert_eq!(held[&gpu], [aliquot_model::layout::Holding::Partition(mig.placement)]);
    world.gpus.start_process(&gpu, process(Some(mig.gpu_instance)));
    assert!(!node.runs_nothing(&mig) && !node.destroy_foreign(&mig).unwrap());
    world.gpus.stop_process(4711);
    assert!(node.runs_nothing(&mig) && node.destroy_foreign(&mig).unwrap());
    assert_eq!(world.instances(), []);
}

#[test]
fn a_mode_that_waits_for_a_reset_is_refused_and_taken_back() {
    let world = world();
    let gpu = h100_80(0).uuid;
    world.gpus.wait_for_reset(&gpu);
    let refused = world.node().prepare(&request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]), false, now());
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("only with a reset of the GPU") && refused.contains("--gpu-reset"), "{refused}");
    assert_eq!(world.gpus.mig_mode(&gpu), Ok(aliquot_nvml::MigMode { current: false, pending: false }));
    assert!(world.node().record("c-1").unwrap().is_none());
    // So at the end of a claim: the mode stays on, and nothing is left pending.
    let world = self::world();
    world.node().prepare(&request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]), false, now()).unwrap();
    world.gpus.wait_for_reset(&gpu);
    world.node().unprepare("c-1").unwrap();
    assert_eq!(world.gpus.mig_mode(&gpu), Ok(aliquot_nvml::MigMode { current: true, pending: true }));
}

#[test]
fn a_partition_that_was_there_is_lent_as_it_is_and_stays() {
    let world = world();
    let gpu = h100_80(0).uuid;
    world.gpus.set_mig_mode(&gpu, true).unwrap();
    let there = world.gpus.create_mig(&gpu, 19, aliquot_model::Placement::new(6, 1)).unwrap();
    let node = world.node();
    let (overview, _) = node.overview().unwrap();
    assert!(overview.is_adopted(&there));
    assert_eq!(overview.name_of(&there).unwrap().to_string(), "gpu-0-mig-1g10gb-19-6");
    assert!(overview.held(&BTreeSet::new()).is_empty());
    // Somebody else's program runs there: it may have been given to that one.
    world.gpus.start_process(&gpu, process(Some(there.gpu_instance)));
    let own = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]);
    let refused = node.prepare(&own, false, now()).unwrap_err().to_string();
    assert!(refused.contains("4711 (python3)") && refused.contains("no claim has"), "{refused}");
    assert!(node.record("c-1").unwrap().is_none());
    world.gpus.stop_process(4711);
    let prepared = node.prepare(&own, false, now()).unwrap();
    assert_eq!(node.prepare(&own, false, now()).unwrap(), prepared);
    let (overview, _) = node.overview().unwrap();
    assert!(overview.foreign.is_empty(), "it is the claim's now");
    // What overlaps it stays closed: the claim may end before anything is published anew.
    assert_eq!(overview.standing(&gpu), std::slice::from_ref(&there));
    // Beside it one is made, and goes with its claim.
    node.prepare(&request("c-2", &[("b", "gpu-0-mig-2g20gb-14-0")]), false, now()).unwrap();
    assert_eq!(world.instances().len(), 2);
    let over = node.prepare(&request("c-3", &[("w", "gpu-0")]), false, now()).unwrap_err();
    assert!(over.is_conflict(), "{over}");
    node.unprepare("c-2").unwrap();
    node.unprepare("c-1").unwrap();
    assert_eq!(world.gpus.live_migs(&gpu).unwrap(), [there]);
    assert!(world.gpus.mig_mode(&gpu).unwrap().current, "a mode with partitions stays on");
}

#[test]
fn before_the_server_is_known_and_where_partitions_are_fixed_nothing_is_destroyed() {
    use aliquot_kubelet_plugin::partitioning::Partitioning;
    let world = world();
    let gpu = h100_80(0).uuid;
    world.gpus.set_mig_mode(&gpu, true).unwrap();
    let mig = world.gpus.create_mig(&gpu, 19, aliquot_model::Placement::new(6, 1)).unwrap();
    let node = world.node();
    for partitioning in [Partitioning::Unknown, Partitioning::Fixed] {
        node.partitioning.set(partitioning);
        assert!(!node.destroy_foreign(&mig).unwrap());
        assert!(node.overview().unwrap().0.foreign.is_empty());
    }
    // Fixed partitions are lent and given back as they are.
    let prepared = node.prepare(&request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]), false, now()).unwrap();
    assert_eq!(prepared.len(), 1);
    node.unprepare("c-1").unwrap();
    assert_eq!(world.instances(), [(0, 6, 1, true)]);
    assert!(world.gpus.mig_mode(&gpu).unwrap().current);
}

#[test]
fn hardware_of_a_vanished_claim_is_held() {
    let world = world();
    let node = world.node();
    node.prepare(&request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]), false, now()).unwrap();
    node.prepare(&request("c-2", &[("s", "gpu-1-share")]), false, now()).unwrap();
    let (overview, _) = node.overview().unwrap();
    assert!(overview.held(&BTreeSet::new()).is_empty());
    let vanished = BTreeSet::from(["c-1".to_owned(), "c-2".to_owned()]);
    let held = overview.held(&vanished);
    assert_eq!(held.len(), 2);
}

#[test]
fn an_unreadable_checkpoint_is_set_aside_and_running_pods_keep_their_files() {
    let world = world();
    world.node().prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap();
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        fs::write(world.data().join(name), "garbage").unwrap();
    }
    let recovery = world.node().recover().unwrap();
    assert_eq!(recovery.damaged.len(), 2);
    for damage in &recovery.damaged {
        assert_eq!(fs::read_to_string(&damage.kept).unwrap(), "garbage");
    }
    assert_eq!(world.files().len(), 2);
    assert!(world.node().prepare(&request("c-2", &[("g", "gpu-1")]), false, now()).is_ok());
}

/// Of the first start after the loss the checkpoint is whole again, and empty.
#[test]
fn whatever_starts_follow_a_lost_checkpoint_running_pods_keep_their_files_and_their_gpu() {
    let world = world();
    world.node().prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap();
    let files = world.files();
    for loss in ["garbage", ""] {
        for name in ["checkpoint.json", "checkpoint.copy.json"] {
            match loss {
                "" => fs::remove_file(world.data().join(name)).unwrap(),
                garbage => fs::write(world.data().join(name), garbage).unwrap(),
            }
        }
        for start in 0..3 {
            let node = world.node();
            let recovery = node.recover().unwrap();
            assert_eq!(recovery.unaccounted.len(), 1, "start {start}");
            assert_eq!(recovery.unaccounted[0].uid, "c-1");
            assert_eq!(recovery.orphans, [""; 0], "start {start}");
            assert_eq!(world.files(), files, "start {start}");
            for device in ["gpu-0", "gpu-0-share", "gpu-0-mig-1g10gb-19-6"] {
                let error = node.prepare(&request("c-2", &[("g", device)]), false, now()).unwrap_err();
                assert!(error.is_conflict(), "{error}");
                assert!(error.to_string().contains("a claim with UID c-1 may be using"), "{error}");
            }
            assert_eq!(node.overview().unwrap().0.unaccounted.len(), 1);
            // Other GPUs are not concerned.
            node.prepare(&request("c-3", &[("g", "gpu-1")]), false, now()).unwrap();
            assert!(node.unprepare("c-3").unwrap());
        }
    }
    // The pod ends.
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
    assert!(!world.node().unprepare("c-1").unwrap());
    world.node().prepare(&request("c-2", &[("g", "gpu-0")]), false, now()).unwrap();
}

#[test]
fn a_claim_whose_record_was_lost_gets_it_back_when_it_is_prepared_again() {
    let world = world();
    let before = world.node().prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap();
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        fs::remove_file(world.data().join(name)).unwrap();
    }
    let node = world.node();
    assert_eq!(node.recover().unwrap().unaccounted.len(), 1);
    assert_eq!(node.prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap(), before);
    assert!(world.node().recover().unwrap().unaccounted.is_empty());
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
}

#[test]
fn hooks_of_earlier_releases_are_brought_up_to_date_at_the_next_start() {
    let world = world();
    let with_hook = |path: &str| {
        let mut node = world.node();
        node.machine.site.oci_hook = Some(path.into());
        node
    };
    // With a driver there is a hook for its files beside that of the share.
    fs::create_dir_all(world.root().join("usr/lib64")).unwrap();
    fs::write(world.root().join("usr/lib64/libcuda.so.580.65.06"), "").unwrap();
    let node = with_hook("/new/aliquot-oci-hook");
    node.prepare(&request("c-1", &[("s", "gpu-0-share"), ("g", "gpu-1")]), false, now()).unwrap();
    let (dir, name) = (&node.machine.cdi, format!("{DRIVER}-claim-c-1"));
    let today = fs::read(dir.file(&name)).unwrap();
    // As an earlier release wrote it, beside a hook that an administrator added.
    let mut old = dir.read(&name).unwrap().unwrap();
    for (device, task) in [(0, "driver"), (1, "create-container")] {
        let hooks = &mut old.devices[device].container_edits.hooks;
        assert_eq!(hooks.len(), 1);
        assert_eq!(hooks[0].args[1], task);
        // That release would run it with its own program, which does not know today's arguments.
        assert_ne!(hooks[0].args[0], "aliquot-oci-hook");
        hooks[0].args[0] = "aliquot-oci-hook".into();
        hooks[0].env.clear();
        hooks[0].timeout = None;
        hooks[0].path = "/old/aliquot-oci-hook".into();
    }
    let hooks = &mut old.devices[1].container_edits.hooks;
    hooks[0].args.truncate(4);
    let foreign = aliquot_cdi::Hook {
        args: vec!["other".into()],
        path: "/bin/other".into(),
        env: vec!["A=b".into()],
        ..hooks[0].clone()
    };
    let write = |spec| fs::write(dir.file(&name), serde_json::to_vec(spec).unwrap()).unwrap();
    let mut with_foreign = old.clone();
    with_foreign.devices[1].container_edits.hooks.push(foreign.clone());
    write(&with_foreign);
    // Another instance is at work on it.
    let reserved =
        aliquot_kubelet_plugin::reservation::claim(&world.data(), "c-1", std::time::Duration::ZERO);
    assert_eq!(node.recover().unwrap().renewed, [""; 0]);
    drop(reserved.unwrap());
    assert_eq!(node.recover().unwrap().renewed, std::slice::from_ref(&name));
    let renewed = dir.read(&name).unwrap().unwrap();
    assert_eq!(renewed.devices[1].container_edits.hooks[1], foreign);
    write(&old);
    assert_eq!(node.recover().unwrap().renewed, std::slice::from_ref(&name));
    assert_eq!(fs::read(dir.file(&name)).unwrap(), today, "it is what a prepare writes today");
    let inode = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(dir.file(&name)).unwrap());
    let before = inode();
    assert_eq!(node.recover().unwrap().renewed, [""; 0]);
    assert_eq!(inode(), before, "once");
    // An agent that was given no hook leaves the path.
    write(&old);
    world.node().recover().unwrap();
    let hook = dir.read(&name).unwrap().unwrap().devices[1].container_edits.hooks[0].clone();
    assert_eq!((hook.path.as_str(), hook.env.len()), ("/old/aliquot-oci-hook", 1));
}

#[test]
fn files_without_a_claim_are_removed_at_start() {
    let world = world();
    fs::create_dir_all(world.cdi()).unwrap();
    fs::write(world.cdi().join(format!("{DRIVER}-claim-dead.json")), "{}").unwrap();
    fs::write(world.cdi().join("other-vendor.json"), "{}").unwrap();
    fs::create_dir_all(world.data().join("shares/dead-00000000/quota")).unwrap();
    let recovery = world.node().recover().unwrap();
    assert_eq!(recovery.orphans.len(), 2);
    assert_eq!(world.files(), ["other-vendor.json"]);
}

#[test]
fn two_instances_wait_for_each_other() {
    let world = world();
    let node = world.node();
    let held = node.store.lock(std::time::Duration::ZERO).unwrap();
    let error = node.prepare(&request("c-1", &[("g", "gpu-0")]), false, now()).unwrap_err();
    assert!(error.to_string().contains("another instance"), "{error}");
    drop(held);
    let threads: Vec<_> = (0..4)
        .map(|index| {
            let node = world.node();
            std::thread::spawn(move || {
                let start = 3 + index;
                let device = format!("gpu-0-mig-1g10gb-19-{start}");
                node.prepare(&request(&format!("c-{index}"), &[("a", &device)]), false, now()).unwrap();
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(world.instances().len(), 4);
    assert_eq!(world.ledger().claims.len(), 4);
}

/// By whatever its clock says: what the API says is not compared with it.
#[test]
fn a_gpu_that_was_exchanged_is_given_to_nobody_who_was_given_the_one_from_before() {
    let world = World::new(FakeGpus::new([h100_80(0)]));
    world.node().overview().unwrap();
    let exchanged =
        World { gpus: FakeGpus::new([GpuInfo { uuid: h100_80(1).uuid, ..h100_80(0) }]), dir: world.dir };
    let node = exchanged.node();
    let at = |seconds: i64| Timestamp::from_second(now().as_second() + seconds).unwrap();
    let of = |uid: &str, allocated: i64| Request {
        given: Given { at: Some(at(allocated)), ..Given::of(uid) },
        ..request(uid, &[("a", "gpu-0-share")])
    };
    let refusal = |request: &Request| node.prepare(request, false, now()).unwrap_err().to_string();
    // Noticed by a prepare, before the API was asked.
    assert!(refusal(&of("new", 30)).contains("is being asked of the API server"));
    let asked = node.overview().unwrap().0.ledger.not_asked();
    let old = Given { at: Some(at(-10)), ..Given::of("old") };
    assert!(node.note_former(&asked, &[(0, [old].into())].into()).unwrap());
    assert!(refusal(&of("old", -10)).contains("delete the pod so that the claim is allocated anew"));
    for hours_behind in [0, 1, 24 * 365] {
        let uid = format!("new-{hours_behind}");
        node.prepare(&of(&uid, -3600 * hours_behind), false, now()).unwrap();
        node.unprepare(&uid).unwrap();
    }
    // Allocated anew, it is for the GPU that is here.
    node.prepare(&of("old", -9), false, now()).unwrap();
}

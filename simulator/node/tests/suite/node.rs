//! What a node is made of, MIG mode, faults, events, and the driver root.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};

use aliquot_sim_node::events::{EVENT_DOUBLE_BIT_ECC, EVENT_XID};
use aliquot_sim_node::{
    Activation, Fault, GpuSpec, MigMode, Node, NodeError, NodeSpec, Pool, ProcessView, create, reboot,
};
use rstest::rstest;

fn node(boards: &[&str]) -> (tempfile::TempDir, Node) {
    let dir = tempfile::tempdir().unwrap();
    let node = create(dir.path(), &NodeSpec::new(boards.iter().copied())).unwrap();
    (dir, node)
}

const OFF: MigMode = MigMode { current: false, pending: false };
const ON: MigMode = MigMode { current: true, pending: true };
const TURNING_ON: MigMode = MigMode { current: false, pending: true };
const TURNING_OFF: MigMode = MigMode { current: true, pending: false };

#[rstest]
#[case::a30("A30")]
#[case::a100("A100-80")]
fn ampere_changes_its_mig_mode_at_a_reset(#[case] board: &str) {
    let (_dir, node) = node(&[board]);
    assert_eq!(node.set_mig_mode(0, true).unwrap(), Activation::ResetRequired);
    assert_eq!(node.mig_mode(0).unwrap(), TURNING_ON);
    assert!(matches!(node.create_gi(0, 0, None), Err(NodeError::NotSupported(_))));
    node.reset(0).unwrap();
    assert_eq!(node.mig_mode(0).unwrap(), ON);
    node.create_gi(0, 0, None).unwrap();
    assert_eq!(node.set_mig_mode(0, false).unwrap(), Activation::ResetRequired);
    assert_eq!(node.mig_mode(0).unwrap(), TURNING_OFF);
    node.reset(0).unwrap();
    assert_eq!(node.mig_mode(0).unwrap(), OFF);
    node.set_mig_mode(0, true).unwrap();
    assert_eq!(node.set_mig_mode(0, false).unwrap(), Activation::Done, "taken back");
    assert_eq!(node.mig_mode(0).unwrap(), OFF);
}

#[rstest]
#[case::h100("H100-80")]
#[case::h200("H200-141")]
#[case::b200("B200-180")]
#[case::rtx("RTX-PRO-6000")]
fn later_boards_change_at_once_when_idle(#[case] board: &str) {
    let (_dir, node) = node(&[board]);
    node.charge(Pool::whole(0), 1).unwrap();
    assert_eq!(node.set_mig_mode(0, true).unwrap(), Activation::InUse);
    assert_eq!(node.mig_mode(0).unwrap(), TURNING_ON);
    node.detach_process().unwrap();
    assert_eq!(node.set_mig_mode(0, true).unwrap(), Activation::Done);
    assert_eq!(node.mig_mode(0).unwrap(), ON);
    let gi = node.create_gi(0, 0, None).unwrap();
    assert_eq!(node.set_mig_mode(0, false).unwrap(), Activation::InUse, "an instance is there");
    node.destroy_gi(0, gi.id, gi.serial).unwrap();
    assert_eq!(node.set_mig_mode(0, false).unwrap(), Activation::Done);
    assert_eq!(node.mig_mode(0).unwrap(), OFF);
}

#[test]
fn a_client_that_is_in_no_list_holds_a_change_up_until_it_ends() {
    let (_dir, node) = node(&["H100-80", "A30"]);
    let client = node.hold_mode(0).unwrap();
    assert!(node.processes(0).unwrap().is_empty());
    assert_eq!(node.set_mig_mode(0, true).unwrap(), Activation::InUse);
    assert_eq!(node.mig_mode(0).unwrap(), TURNING_ON);
    assert_eq!(node.set_mig_mode(1, true).unwrap(), Activation::ResetRequired, "another GPU");
    drop(client);
    assert_eq!(node.set_mig_mode(0, true).unwrap(), Activation::Done);
}

#[test]
fn a_gpu_can_come_back_under_another_number_when_its_mig_mode_changes() {
    let dir = tempfile::tempdir().unwrap();
    let spec = NodeSpec { renumber_on_mig_switch: true, ..NodeSpec::new(["H100-80", "A30", "T4"]) };
    let node = create(dir.path(), &spec).unwrap();
    let root = dir.path().join("root");
    // By number: what the node tells, and what the kernel and `/dev` show.
    let numbers = || -> Vec<u32> {
        let told: Vec<u32> = (0..3).map(|gpu| node.minor(gpu).unwrap()).collect();
        for (gpu, minor) in node.gpus().iter().zip(&told) {
            let information = read(&root, &format!("proc/driver/nvidia/gpus/{}/information", gpu.bdf()));
            assert!(information.contains(&format!("Device Minor: \t {minor}\n")), "{information}");
            assert!(information.contains(&gpu.uuid), "{information}");
        }
        let nodes: Vec<u32> =
            (0..16).filter(|minor| root.join(format!("dev/nvidia{minor}")).exists()).collect();
        let mut sorted = told.clone();
        sorted.sort_unstable();
        assert_eq!(nodes, sorted);
        told
    };
    let held = node.hold_mode(0).unwrap();
    node.set_mig_mode(0, true).unwrap();
    assert_eq!(numbers(), [0, 1, 2], "held up");
    drop(held);
    node.set_mig_mode(0, true).unwrap();
    assert_eq!(numbers(), [3, 1, 2]);
    node.set_mig_mode(0, true).unwrap();
    assert_eq!(numbers(), [3, 1, 2], "it is on already");
    if node.sight().dev().starts_with(dir.path()) {
        let gi = node.create_gi(0, 19, None).unwrap();
        assert!(capabilities(&root).contains(&aliquot_sim_node::gi_capability_minor(3, gi.id)));
        node.destroy_gi(0, gi.id, gi.serial).unwrap();
        assert_eq!(capabilities(&root), [1, 2]);
    }
    // One that waits for a reset has its number until then, and the next one the number that is free.
    node.set_mig_mode(1, true).unwrap();
    assert_eq!(numbers(), [3, 1, 2]);
    node.reset(1).unwrap();
    assert_eq!(numbers(), [3, 0, 2]);
    node.reset(1).unwrap();
    assert_eq!(numbers(), [3, 0, 2], "the mode is the same");
    // A driver that is loaded anew gives the GPUs their first numbers.
    node.unload_module(true).unwrap();
    node.load_module(None).unwrap();
    assert_eq!(numbers(), [0, 1, 2]);
    node.set_mig_mode(0, true).unwrap();
    reboot(dir.path()).unwrap();
    assert_eq!(numbers(), [0, 1, 2]);
}

#[rstest]
#[case("T4")]
#[case("L40S")]
fn boards_without_mig_say_so(#[case] board: &str) {
    let (_dir, node) = node(&[board]);
    assert!(matches!(node.mig_mode(0), Err(NodeError::NotSupported(_))));
    assert!(matches!(node.set_mig_mode(0, true), Err(NodeError::NotSupported(_))));
    assert!(matches!(node.create_gi(0, 19, None), Err(NodeError::NotSupported(_))));
}

#[rstest]
#[case::pending_comes("A100-40", None, ON)]
#[case::lost_on_hopper("H100-80", None, OFF)]
#[case::kept_on_request("H100-80", Some(true), ON)]
#[case::lost_on_request("A100-40", Some(false), OFF)]
fn the_mig_mode_after_a_reboot_depends_on_the_board(
    #[case] board: &str,
    #[case] survives: Option<bool>,
    #[case] after: MigMode,
) {
    let dir = tempfile::tempdir().unwrap();
    let spec = NodeSpec { mig_survives_reboot: survives, ..NodeSpec::new([board]) };
    let node = create(dir.path(), &spec).unwrap();
    node.set_mig_mode(0, true).unwrap();
    reboot(dir.path()).unwrap();
    assert_eq!(node.mig_mode(0).unwrap(), after);
}

#[test]
fn names_depend_on_the_seed_and_the_place_only() {
    let uuids = |seed: &str| -> Vec<String> {
        let gpus = NodeSpec::new(["H100-80", "H100-80", "T4"]).with_seed(seed).resolve().unwrap();
        gpus.into_iter().map(|g| g.uuid).collect()
    };
    assert_eq!(uuids("one"), uuids("one"));
    assert!(uuids("one").iter().all(|u| !uuids("two").contains(u)));
    assert_ne!(uuids("one")[0], uuids("one")[1]);
}

#[test]
fn a_mixed_node_is_read_back_as_it_was_made() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = NodeSpec::new(["A100-40", "T4", "RTX PRO 6000"]);
    spec.gpus[0].mig = true;
    spec.gpus[1].memory_mib = Some(1024);
    spec.gpus[2].numa_node = Some(-1);
    spec.process_view = ProcessView::NotAvailable;
    let made = create(dir.path(), &spec).unwrap();
    let read = Node::open(dir.path()).unwrap();
    assert_eq!(made.gpus(), read.gpus());
    assert_eq!(read.spec(), &spec);
    assert_eq!(read.memory(Pool::whole(1)).unwrap().total, 1 << 30);
    assert_eq!(read.mig_mode(0).unwrap(), ON);
    assert_eq!(read.process_view().unwrap(), ProcessView::NotAvailable);
}

#[test]
fn a_directory_that_is_no_node_is_named_in_the_error() {
    let dir = tempfile::tempdir().unwrap();
    let error = Node::open(&dir.path().join("nowhere")).unwrap_err();
    assert!(error.to_string().contains("nowhere/node.json"), "{error}");
    let (dir, _node) = node(&["T4"]);
    std::fs::write(dir.path().join("state"), "short").unwrap();
    assert!(matches!(Node::open(dir.path()), Err(NodeError::Layout { .. })));
}

#[test]
fn a_fault_hits_the_calls_it_names() {
    let (_dir, node) = node(&["T4"]);
    assert_eq!(node.enter("nvmlInit_v2"), None);
    node.add_fault(&Fault { times: 2, ..Fault::fail("nvmlInit_v2", 3, 999) }).unwrap();
    let codes: Vec<_> = (0..6).map(|_| node.enter("nvmlInit_v2")).collect();
    assert_eq!(codes, [None, None, Some(999), Some(999), None, None]);
    assert_eq!(node.enter("nvmlInit"), None, "another function");
    assert_eq!(node.faults().unwrap()[0].calls, 6);
}

#[test]
fn a_delay_is_waited_out_and_can_be_removed() {
    let (_dir, node) = node(&["T4"]);
    let id = node.add_fault(&Fault::delay("cuInit", Duration::from_millis(50))).unwrap();
    let start = Instant::now();
    assert_eq!(node.enter("cuInit"), None);
    assert!(start.elapsed() >= Duration::from_millis(50));
    node.remove_faults(Some(id)).unwrap();
    assert!(node.faults().unwrap().is_empty());
    assert!(matches!(node.remove_faults(Some(id)), Err(NodeError::NotFound(_))));
}

#[test]
fn faults_are_counted_over_all_handles_of_the_node() {
    let (dir, node) = node(&["T4"]);
    node.add_fault(&Fault::fail("f", 2, 1)).unwrap();
    let other = Node::open(dir.path()).unwrap();
    assert_eq!(other.enter("f"), None);
    assert_eq!(node.enter("f"), Some(1));
}

#[test]
fn an_event_wakes_a_waiter() {
    let (_dir, node) = node(&["H100-80", "H100-80"]);
    node.raise_xid(0, 13, None, None).unwrap();
    let after = node.last_event().unwrap();
    let event = std::thread::scope(|scope| {
        let waiter = scope
            .spawn(|| node.wait_event(after, Duration::from_secs(60), |e| e.gpu == 1 && e.kind == EVENT_XID));
        node.raise_ecc(1, true, 1).unwrap();
        node.raise_xid(0, 48, None, None).unwrap();
        node.raise_xid(1, 94, Some(3), Some(0)).unwrap();
        waiter.join().unwrap().unwrap().unwrap()
    });
    assert_eq!((event.gpu, event.data, event.gi, event.ci), (1, 94, Some(3), Some(0)));
    assert_eq!(node.settings(1).unwrap().ecc_uncorrected, 1);
    assert!(node.events_after(after).unwrap().iter().any(|e| e.kind == EVENT_DOUBLE_BIT_ECC));
    assert_eq!(node.wait_event(event.number, Duration::ZERO, |_| true).unwrap(), None);
}

#[test]
fn the_event_ring_keeps_the_latest() {
    let (_dir, node) = node(&["T4"]);
    for xid in 0..300 {
        node.raise_xid(0, xid + 1000, None, None).unwrap();
    }
    let kept = node.events_after(0).unwrap();
    assert_eq!((kept.len(), kept[0].data, kept[255].data), (256, 1044, 1299));
}

#[test]
fn xid_79_takes_the_gpu_off_the_bus_until_a_reset() {
    let (_dir, node) = node(&["T4"]);
    node.raise_xid(0, 79, None, None).unwrap();
    assert!(node.settings(0).unwrap().lost);
    node.reset(0).unwrap();
    assert!(!node.settings(0).unwrap().lost);
}

fn read(root: &Path, file: &str) -> String {
    std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

#[test]
fn the_driver_root_looks_like_a_drivers() {
    let dir = tempfile::tempdir().unwrap();
    let library = dir.path().join("built.so");
    std::fs::write(&library, "a library").unwrap();
    let spec = NodeSpec {
        nvml_library: Some(library.clone()),
        cuda_library: Some(library),
        ..NodeSpec::new(["T4", "H100-80", "A30"])
    };
    let node = create(&dir.path().join("node"), &spec).unwrap();
    let root = node.dir().join("root");
    for name in ["libnvidia-ml.so.1", "libcuda.so.1", "libcuda.so.580.95.05"] {
        assert_eq!(read(&root.join("usr/lib/x86_64-linux-gnu"), name), "a library");
    }
    for name in ["nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"] {
        let kind = std::fs::metadata(root.join("dev").join(name)).unwrap().file_type();
        assert!(kind.is_char_device() || kind.is_file(), "{name}");
    }
    let minors = read(&root, "proc/driver/nvidia-caps/mig-minors");
    for line in [
        "config 1",
        "monitor 2",
        "gpu1/gi0/access 138",
        "gpu1/gi0/ci0/access 139",
        "gpu2/gi14/ci7/access 407",
    ] {
        assert!(minors.lines().any(|l| l == line), "{line}");
    }
    assert_eq!(
        minors.lines().last(),
        Some("gpu31/gi14/ci7/access 4322"),
        "the driver's table is as long as it can be"
    );
    assert_eq!(capabilities(&root), [1, 2], "nobody has made an instance");
    assert!(read(&root, "proc/driver/nvidia/version").contains("580.95.05"));
    let bdf = node.gpus()[2].bdf();
    assert_eq!(read(&root, &format!("sys/bus/pci/devices/{bdf}/numa_node")), "1\n");
    let link = std::fs::canonicalize(root.join("sys/bus/pci/devices").join(&bdf)).unwrap();
    assert!(link.starts_with(std::fs::canonicalize(&root).unwrap().join("sys/devices")), "{link:?}");
    assert_eq!(read(&root, "proc/sys/kernel/random/boot_id").trim(), node.boot_id().unwrap());
    assert!(
        read(&root, &format!("proc/driver/nvidia/gpus/{bdf}/information")).contains(&node.gpus()[2].uuid)
    );
}

#[test]
fn a_device_is_seen_if_its_nodes_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let spec =
        NodeSpec { gpus: vec![GpuSpec::new("A30").with_mig(), GpuSpec::new("T4")], ..NodeSpec::new(["T4"]) };
    let node = create(dir.path(), &spec).unwrap();
    if !node.sight().dev().starts_with(dir.path()) {
        eprintln!("skipped: this machine or environment has device nodes of its own");
        return;
    }
    let sight = node.sight();
    let [one, other] = [(); 2].map(|()| instance(&node));
    assert!(sight.gpu(0) && sight.gpu(1) && sight.mig_device(0, one, 0) && sight.mig_device(0, other, 0));
    std::fs::remove_file(sight.dev().join("nvidia1")).unwrap();
    assert!(sight.gpu(0) && !sight.gpu(1));
    let cap = aliquot_sim_node::ci_capability_minor(0, one, 0);
    std::fs::remove_file(sight.dev().join(format!("nvidia-caps/nvidia-cap{cap}"))).unwrap();
    assert!(!sight.mig_device(0, one, 0) && sight.mig_device(0, other, 0));
}

/// A 1g.6gb on an A30 with a compute instance; gives its id.
fn instance(node: &Node) -> u32 {
    let gi = node.create_gi(0, 14, None).unwrap();
    node.create_ci(0, gi.id, gi.serial, 0, None).unwrap();
    gi.id
}

/// Minor numbers of the capability nodes in a root.
fn capabilities(root: &Path) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(root.join("dev/nvidia-caps")) else { return Vec::new() };
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut minors: Vec<u32> =
        entries.map(|entry| name(entry).strip_prefix("nvidia-cap").unwrap().parse().unwrap()).collect();
    minors.sort_unstable();
    minors
}

#[test]
fn capability_nodes_come_and_go_with_their_instances() {
    let dir = tempfile::tempdir().unwrap();
    let spec = NodeSpec { gpus: vec![GpuSpec::new("A30").with_mig()], ..NodeSpec::new(["T4"]) };
    let node = create(dir.path(), &spec).unwrap();
    if !node.sight().dev().starts_with(dir.path()) {
        eprintln!("skipped: this machine or environment has device nodes of its own");
        return;
    }
    let root = dir.path().join("root");
    let caps = |gi: u32| {
        [aliquot_sim_node::gi_capability_minor(0, gi), aliquot_sim_node::ci_capability_minor(0, gi, 0)]
    };
    let gi = node.create_gi(0, 14, None).unwrap();
    assert_eq!(capabilities(&root), [1, 2, caps(gi.id)[0]]);
    let ci = node.create_ci(0, gi.id, gi.serial, 0, None).unwrap();
    assert_eq!(capabilities(&root), [&[1, 2][..], &caps(gi.id)].concat());
    node.destroy_ci(0, gi.id, gi.serial, ci.id).unwrap();
    assert_eq!(capabilities(&root), [1, 2, caps(gi.id)[0]]);
    node.destroy_gi(0, gi.id, gi.serial).unwrap();
    assert_eq!(capabilities(&root), [1, 2]);
    instance(&node);
    node.reset(0).unwrap();
    assert_eq!(capabilities(&root), [1, 2], "a reset ends instances");
    instance(&node);
    reboot(dir.path()).unwrap();
    assert_eq!(capabilities(&root), [1, 2], "and so does a reboot");
}

#[test]
fn nvidia_uvm_can_come_late_after_each_start() {
    let dir = tempfile::tempdir().unwrap();
    let spec = NodeSpec { late_uvm: true, ..NodeSpec::new(["T4"]) };
    let node = create(dir.path(), &spec).unwrap();
    let root = dir.path().join("root");
    let loaded = || {
        let nodes = ["nvidia-uvm", "nvidia-uvm-tools"].map(|name| root.join("dev").join(name).exists());
        assert_eq!(nodes[0], nodes[1]);
        assert_eq!(read(&root, "proc/devices").contains("nvidia-uvm\n"), nodes[0], "kernel and nodes agree");
        nodes[0]
    };
    assert!(!loaded());
    node.load_uvm().unwrap();
    assert!(loaded());
    reboot(dir.path()).unwrap();
    assert!(!loaded());
}

#[test]
fn replacing_a_node_leaves_processes_of_the_old_one_alone() {
    let (dir, old) = node(&["T4"]);
    old.charge(Pool::whole(0), 1000).unwrap();
    let new = create(dir.path(), &NodeSpec::new(["A30"])).unwrap();
    assert_eq!(old.memory(Pool::whole(0)).unwrap().used, 1000);
    assert_eq!(new.memory(Pool::whole(0)).unwrap().used, 0);
}

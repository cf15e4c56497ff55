//! The real code path, down to `dlopen`, on the simulator's `libnvidia-ml.so.1`.

use aliquot_model::{GpuInfo, LiveMig, MigCapability, Placement};
use aliquot_nvml::caps::MigMinors;
use aliquot_nvml::contract::{self, TestNode};
use aliquot_nvml::{Cause, Gpus, NvmlCode, NvmlGpus, Options, TimeSlice};
use aliquot_sim_node::{Fault, GpuSpec, Node, NodeSpec, NvLinks, Pool, gi_capability_minor, reboot};
use rstest::rstest;
use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

/// A simulated node and the real library code on it.
struct SimulatedNode {
    folder: tempfile::TempDir,
    node: RefCell<Node>,
    gpus: RefCell<Option<Arc<NvmlGpus>>>,
}

fn options(folder: &Path) -> Options {
    let root = folder.join("root");
    Options {
        library: root.join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"),
        sys_root: root.join("sys"),
        nvidia_smi: Some(root.join("usr/bin/nvidia-smi")),
    }
}

impl SimulatedNode {
    fn new(mut spec: NodeSpec) -> Self {
        spec.nvml_library = aliquot_sim_node::built_library(aliquot_sim_node::NVML_LIBRARY);
        let folder = tempfile::tempdir().unwrap();
        let node = aliquot_sim_node::create(folder.path(), &spec).unwrap();
        let gpus = NvmlGpus::open(options(folder.path())).unwrap();
        Self { folder, node: RefCell::new(node), gpus: RefCell::new(Some(Arc::new(gpus))) }
    }

    fn of(gpus: impl IntoIterator<Item = GpuSpec>) -> Self {
        let mut spec = NodeSpec::new(["T4"]);
        spec.gpus = gpus.into_iter().collect();
        Self::new(spec)
    }

    fn index(info: &GpuInfo) -> usize {
        usize::try_from(info.index).unwrap()
    }

    fn pool(gpu: &GpuInfo, instance: Option<&LiveMig>) -> Pool {
        let index = Self::index(gpu);
        instance.map_or_else(|| Pool::whole(index), |mig| Pool::instance(index, mig.gpu_instance))
    }
}

impl TestNode for SimulatedNode {
    fn gpus(&self) -> Arc<dyn Gpus> {
        self.gpus.borrow().clone().unwrap()
    }
    fn start_process(&self, gpu: &GpuInfo, instance: Option<&LiveMig>, bytes: u64) -> u32 {
        // The simulator counts the memory of whoever asks: this process plays the tenant.
        let (node, pool) = (self.node.borrow(), Self::pool(gpu, instance));
        node.context_opened(pool, instance.and_then(|mig| mig.compute_instance)).unwrap();
        node.charge(pool, bytes).unwrap();
        std::process::id()
    }
    fn stop_process(&self, _: &GpuInfo, _: Option<&LiveMig>, _: u32) {
        self.node.borrow().detach_process().unwrap();
    }
    fn fail_next(&self, function: &str, code: NvmlCode) {
        self.node.borrow().add_fault(&Fault::fail(function, 1, i32::try_from(code.0).unwrap())).unwrap();
    }
    fn raise_xid(&self, gpu: &GpuInfo, xid: u64, instance: Option<u32>) {
        self.node.borrow().raise_xid(Self::index(gpu), xid, instance, None).unwrap();
    }
    fn lose(&self, gpu: &GpuInfo) {
        self.raise_xid(gpu, 79, None);
    }
    fn reboot(&self) {
        reboot(self.folder.path()).unwrap();
        *self.node.borrow_mut() = Node::open(self.folder.path()).unwrap();
        // The old process died with the old boot: its library is closed before a new one is opened.
        drop(self.gpus.take());
        self.gpus.replace(Some(Arc::new(NvmlGpus::open(options(self.folder.path())).unwrap())));
    }
}

fn node() -> SimulatedNode {
    SimulatedNode::of([GpuSpec::new("H100-80"), GpuSpec::new("A100-40").with_mig(), GpuSpec::new("T4")])
}

/// Runs the clause of that name.
fn keeps(name: &str) {
    let (_, clause) = contract::ALL.into_iter().find(|(known, _)| *known == name).unwrap();
    clause(&node());
}

macro_rules! clauses {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            keeps(stringify!($name));
        })*

        #[test]
        fn no_clause_of_the_contract_is_left_out() {
            let mut here = vec![$(stringify!($name)),*];
            let mut all: Vec<&str> = contract::ALL.iter().map(|(name, _)| *name).collect();
            here.sort_unstable();
            all.sort_unstable();
            assert_eq!(here, all);
        }
    };
}
clauses! {
    the_inventory_has_every_gpu_with_its_facts
    a_mode_switch_is_in_force_at_once_on_hopper
    a_mode_switch_waits_for_a_reset_on_ampere
    a_gpu_that_is_listened_to_switches_and_is_listened_to_again
    a_process_that_blocks_a_mode_switch_is_named
    a_board_without_mig_says_so
    instances_fill_the_board_and_no_more
    a_create_that_cannot_be_says_why
    mixed_profiles_share_a_board
    a_create_that_fails_half_way_leaves_nothing
    a_failed_undo_is_reported_and_can_be_made_up_for
    a_destroy_that_fails_half_way_can_be_repeated
    a_stale_handle_destroys_nothing
    an_instance_in_use_is_not_destroyed
    a_reboot_loses_instances
    a_lost_gpu_is_reported_and_the_others_are_listed
    errors_arrive_as_events
    processes_memory_and_modes_can_be_read
}

#[rstest]
#[case::a30("A30", 4, 13, 56)]
#[case::a100_40("A100-40", 8, 25, 108)]
#[case::a100_80("A100-80", 8, 25, 108)]
#[case::h100_80("H100-80", 8, 25, 132)]
#[case::h200_141("H200-141", 8, 25, 132)]
#[case::b200_180("B200-180", 8, 25, 148)]
#[case::rtx_pro_6000("RTX PRO 6000", 12, 30, 188)]
#[case::t4("T4", 0, 0, 40)]
#[case::l40s("L40S", 0, 0, 142)]
fn every_board_is_read_with_its_whole_table(
    #[case] board: &str,
    #[case] width: u32,
    #[case] places: usize,
    #[case] multiprocessors: u32,
) {
    let node = SimulatedNode::of([GpuSpec::new(board)]);
    let mut inventory = node.gpus().inventory().unwrap();
    assert_eq!(inventory.unreadable, []);
    let info = inventory.gpus.remove(0);
    let table = aliquot_sim_node::board(board).unwrap();
    assert_eq!((info.memory_slices(), info.multiprocessors), (width, multiprocessors));
    assert_eq!(info.profiles().iter().map(|p| p.placements.len()).sum::<usize>(), places);
    assert_eq!(info.memory_bytes, table.memory_bytes() - table.reserved_bytes());
    assert_eq!(info.profiles().len(), table.profiles.len());
    for profile in info.profiles() {
        let row = table.profile_by_id(profile.id).unwrap();
        assert_eq!((profile.name.as_str(), profile.nvml_profile), (row.name, row.nvml));
        assert_eq!(
            (profile.memory_bytes, profile.multiprocessors),
            (row.memory_bytes(), row.multiprocessors)
        );
        assert_eq!((profile.compute_slices, profile.max_instances), (row.slices, row.max));
        let starts: Vec<u32> = profile.placements.iter().map(|place| place.start).collect();
        assert_eq!(starts, row.starts);
        let engines = profile.engines;
        assert_eq!(
            (engines.copy, engines.decoders, engines.jpeg),
            (row.engines.copy, row.engines.decoder, row.engines.jpeg)
        );
        assert_eq!((engines.encoders, engines.ofa), (row.engines.encoder, row.engines.ofa));
    }
    let sizes: Vec<u64> = info.profiles().iter().map(|p| p.memory_bytes).collect();
    assert!(sizes.is_sorted(), "{sizes:?}");
}

#[rstest]
#[case("A30")]
#[case("B200-180")]
#[case("RTX PRO 6000")]
fn every_place_of_every_profile_can_be_made_and_is_found_again(#[case] board: &str) {
    let node = SimulatedNode::of([GpuSpec::new(board).with_mig()]);
    let gpus = node.gpus();
    let info = gpus.inventory().unwrap().gpus.remove(0);
    for profile in info.profiles() {
        for &place in &profile.placements {
            let made = gpus.create_mig(&info.uuid, profile.id, place).unwrap();
            assert_eq!(gpus.live_migs(&info.uuid), Ok(vec![made.clone()]), "{} at {place}", profile.name);
            gpus.destroy_mig(&made).unwrap();
        }
    }
}

#[test]
fn an_instance_that_is_not_one_device_has_no_uuid() {
    let node = SimulatedNode::of([GpuSpec::new("H100-80").with_mig()]);
    let info = node.gpus().inventory().unwrap().gpus.remove(0);
    let (profile, simulated) = (9, Node::open(node.folder.path()).unwrap());
    let gi = simulated.create_gi(0, profile, Some(4)).unwrap();
    let live = || node.gpus().live_migs(&info.uuid).unwrap().remove(0);
    assert_eq!((live().compute_instance, live().uuid), (None, None));
    // One of its three slices: whoever gets the instance would get less than it says.
    simulated.create_ci(0, gi.id, gi.serial, 0, Some(0)).unwrap();
    assert!(live().compute_instance.is_some());
    assert_eq!(live().uuid, None);
    assert!(node.gpus().destroy_mig(&live()).is_ok());
    let made = node.gpus().create_mig(&info.uuid, profile, Placement::new(4, 4)).unwrap();
    assert!(made.uuid.is_some() && live() == made);
}

#[test]
fn capability_minors_are_found_under_the_driver_root() {
    let node = SimulatedNode::of([GpuSpec::new("T4"), GpuSpec::new("H100-80").with_mig()]);
    let info = node.gpus().inventory().unwrap().gpus.remove(1);
    let mig = node.gpus().create_mig(&info.uuid, 19, Placement::new(6, 1)).unwrap();
    let minors = MigMinors::read(&node.folder.path().join("root/proc")).unwrap();
    let of_gi = minors.gpu_instance(info.minor, mig.gpu_instance).unwrap();
    assert_eq!(of_gi, gi_capability_minor(info.minor, mig.gpu_instance));
    let of_ci = minors.compute_instance(info.minor, mig.gpu_instance, mig.compute_instance.unwrap());
    assert_eq!(of_ci, Some(of_gi + 1));
    assert_eq!(minors.gpu_instance(99, 0), None, "the table ends before");
}

#[test]
fn a_fact_that_a_gpu_does_not_tell_costs_that_gpu_only() {
    let node = node();
    for function in ["nvmlDeviceGetMinorNumber", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMigMode"] {
        node.fail_next(function, NvmlCode::UNKNOWN);
        let inventory = node.gpus().inventory().unwrap();
        assert_eq!(inventory.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [1, 2], "{function}");
        let first = inventory.unreadable.first().unwrap();
        assert_eq!((first.index, first.error.code()), (0, Some(NvmlCode::UNKNOWN)), "{function}");
        assert!(first.uuid.is_some() && first.error.gpu == first.uuid, "{function}");
    }
    // What only informs is done without.
    for function in ["nvmlDeviceGetBrand", "nvmlDeviceGetArchitecture", "nvmlDeviceGetPciInfo_v3"] {
        node.fail_next(function, NvmlCode::UNKNOWN);
        let inventory = node.gpus().inventory().unwrap();
        assert_eq!((inventory.gpus.len(), inventory.unreadable.len()), (3, 0), "{function}");
    }
}

#[test]
fn without_core_counts_the_largest_profile_tells_the_multiprocessors() {
    let node = node();
    node.fail_next("nvmlDeviceGetNumGpuCores", NvmlCode::NOT_SUPPORTED);
    assert_eq!(node.gpus().inventory().unwrap().gpus.remove(0).multiprocessors, 132);
}

#[test]
fn names_are_computed_where_the_driver_does_not_tell_them() {
    let node = node();
    let told: Vec<String> = node
        .gpus()
        .inventory()
        .unwrap()
        .gpus
        .remove(1)
        .profiles()
        .iter()
        .map(|p| p.name.to_string())
        .collect();
    let all = Fault { times: u64::MAX, ..Fault::fail("nvmlDeviceGetGpuInstanceProfileInfoV", 1, 25) };
    node.node.borrow().add_fault(&all).unwrap();
    let info = node.gpus().inventory().unwrap().gpus.remove(1);
    let computed: Vec<String> = info.profiles().iter().map(|p| p.name.to_string()).collect();
    assert_eq!(computed, told);
}

#[test]
fn a_refused_mode_switch_is_told_apart_from_one_that_waits() {
    let node = node();
    let info = node.gpus().inventory().unwrap().gpus.remove(0);
    node.fail_next("nvmlDeviceSetMigMode", NvmlCode::NO_PERMISSION);
    let error = node.gpus().set_mig_mode(&info.uuid, true).unwrap_err();
    assert_eq!((error.code(), error.left_behind.clone()), (Some(NvmlCode::NO_PERMISSION), None));
    assert!(error.remedy().contains("SYS_ADMIN"), "{error}");
    assert!(matches!(
        node.gpus().gpu(&info.uuid).unwrap().mig,
        MigCapability::Supported { enabled: false, pending: false, .. }
    ));
}

#[test]
fn a_new_instance_that_has_no_device_is_taken_back() {
    let node = node();
    let info = node.gpus().inventory().unwrap().gpus.remove(1);
    node.fail_next("nvmlDeviceGetMaxMigDeviceCount", NvmlCode::UNKNOWN);
    assert!(node.gpus().create_mig(&info.uuid, 19, Placement::new(0, 1)).is_err());
    assert_eq!(node.gpus().live_migs(&info.uuid), Ok(vec![]));
}

#[test]
fn a_time_slice_is_set_by_the_drivers_own_program() {
    let node = node();
    let info = node.gpus().inventory().unwrap().gpus.remove(0);
    let error = node.gpus().set_time_slice(&info.uuid, TimeSlice::Short).unwrap_err();
    assert!(matches!(&error.cause, Cause::Program(text) if text.contains("nvidia-smi")), "{error}");

    let program = node.folder.path().join("root/usr/bin/nvidia-smi");
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    let write = |script: &str| {
        // Renamed into place: a file that is open for writing cannot be run.
        let aside = program.with_extension("new");
        fs::write(&aside, script).unwrap();
        fs::set_permissions(&aside, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(&aside, &program).unwrap();
    };
    let seen = node.folder.path().join("seen");
    write(&format!("#!/bin/sh\necho \"$@ $LD_LIBRARY_PATH\" > {}\n", seen.display()));
    node.gpus().set_time_slice(&info.uuid, TimeSlice::Long).unwrap();
    let library = node.folder.path().join("root/usr/lib/x86_64-linux-gnu");
    let want = format!("compute-policy -i {} --set-timeslice 3 {}\n", info.uuid, library.display());
    assert_eq!(fs::read_to_string(seen).unwrap(), want);

    write("#!/bin/sh\necho not on this board >&2\nexit 3\n");
    let error = node.gpus().set_time_slice(&info.uuid, TimeSlice::Long).unwrap_err().to_string();
    assert!(error.contains("exit status: 3: not on this board"), "{error}");
}

#[test]
fn a_node_whose_library_does_not_start_says_why() {
    let node = node();
    node.fail_next("nvmlInitWithFlags", NvmlCode::LIB_RM_VERSION_MISMATCH);
    let error = NvmlGpus::open(options(node.folder.path())).err().unwrap();
    assert_eq!(error.code(), Some(NvmlCode::LIB_RM_VERSION_MISMATCH));
    assert!(error.to_string().contains("reboot the node or reload the nvidia kernel module"), "{error}");
}

#[test]
fn events_outlive_the_handle_that_made_them() {
    let node = node();
    let info = node.gpus().inventory().unwrap().gpus.remove(0);
    let mut events = node.gpus().watch(std::slice::from_ref(&info.uuid)).unwrap();
    drop(node.gpus.take());
    node.raise_xid(&info, 48, None);
    let event = events.next(std::time::Duration::from_secs(60)).unwrap().unwrap();
    assert_eq!(event.gpu, Some(info.uuid));
}

#[rstest]
#[case::fabric("H100-80", NvLinks::Switches, true)]
#[case::links_to_switches("A100-40", NvLinks::Switches, true)]
#[case::links_between_gpus("H100-80", NvLinks::Mesh, false)]
#[case::without_links("T4", NvLinks::Switches, false)]
fn a_gpu_that_is_connected_to_nvswitches_says_so(
    #[case] board: &str,
    #[case] nvlinks: NvLinks,
    #[case] want: bool,
) {
    let node = SimulatedNode::new(NodeSpec { nvlinks, ..NodeSpec::new([board, board]) });
    let inventory = node.gpus.borrow().as_ref().unwrap().inventory().unwrap();
    assert_eq!(inventory.gpus.iter().map(|gpu| gpu.nvswitch).collect::<Vec<_>>(), [want, want]);
}

/// The NVLink domains of a node's GPUs.
fn domains(node: &SimulatedNode) -> Vec<Option<String>> {
    let inventory = node.gpus().inventory().unwrap();
    inventory.gpus.into_iter().map(|gpu| gpu.nvlink_domain).collect()
}

#[rstest]
#[case::mesh(NvLinks::Mesh, ["H100-80"; 4], [Some(0); 4])]
#[case::bridges(NvLinks::Pairs, ["A100-80"; 4], [Some(0), Some(0), Some(2), Some(2)])]
#[case::equal_boards_only(NvLinks::Mesh, ["H100-80", "A100-80", "H100-80", "A30"], [Some(0), None, Some(0), None])]
#[case::without_links(NvLinks::Mesh, ["T4"; 4], [None; 4])]
fn gpus_that_are_linked_have_the_address_of_the_first_in_common(
    #[case] nvlinks: NvLinks,
    #[case] boards: [&str; 4],
    #[case] want: [Option<usize>; 4],
) {
    let node = SimulatedNode::new(NodeSpec { nvlinks, ..NodeSpec::new(boards) });
    let addresses: Vec<_> =
        node.gpus().inventory().unwrap().gpus.into_iter().map(|gpu| gpu.pci_bus_id).collect();
    assert_eq!(domains(&node), want.map(|gpu| gpu.and_then(|gpu| addresses[gpu].clone())));
}

#[rstest]
#[case::fabric("H100-80")]
#[case::switches("A100-40")]
fn gpus_on_switches_are_one_domain_in_every_mode(#[case] board: &str) {
    let mut spec = NodeSpec { nvlinks: NvLinks::Switches, ..NodeSpec::new([board, board]) };
    spec.gpus[1].mig = true;
    assert_eq!(
        domains(&SimulatedNode::new(spec)),
        [Some("nvswitch".to_owned()), Some("nvswitch".to_owned())]
    );
}

#[test]
fn links_that_mig_mode_switches_off_count_once_they_were_seen() {
    let node = SimulatedNode::new(NodeSpec { nvlinks: NvLinks::Pairs, ..NodeSpec::new(["H100-80"; 2]) });
    node.gpus().set_mig_mode(&node.gpus().identify(0).unwrap(), true).unwrap();
    assert_eq!(domains(&node), [None, None], "nobody has seen them");
    node.gpus().set_mig_mode(&node.gpus().identify(0).unwrap(), false).unwrap();
    // The first to be read makes both known.
    let linked = domains(&node);
    assert!(linked[0].is_some() && linked[0] == linked[1], "{linked:?}");
    node.gpus().set_mig_mode(&node.gpus().identify(1).unwrap(), true).unwrap();
    assert_eq!(domains(&node), linked);
}

//! Defines the contract that every implementation of [`Gpus`] must keep, as functions that panic when it does
//! not. The fake and the real library over a simulated node both pass all of [`ALL`].
#![allow(clippy::panic, clippy::unwrap_used, clippy::indexing_slicing, reason = "test code that tests share")]

use crate::{
    ComputeMode, Destroyed, EventKind, EventSource, GpuError, Gpus, MigMode, ModeChange, NvmlCode, Operation,
};
use aliquot_model::{Architecture, GpuInfo, GpuUuid, LiveMig, MigCapability, Placement};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// A node to test the contract on: index 0 an H100 80GB with MIG mode off, 1 an A100 40GB with MIG mode on, 2
/// a T4. Its methods change the world around the GPUs.
pub trait TestNode {
    /// Returns the implementation under test; after a reboot, the one of a new process.
    fn gpus(&self) -> Arc<dyn Gpus>;
    /// Starts a process on a GPU (or in an instance of it) that uses at least `bytes` bytes of its memory,
    /// and returns the process ID.
    fn start_process(&self, gpu: &GpuInfo, instance: Option<&LiveMig>, bytes: u64) -> u32;
    /// Ends that process.
    fn stop_process(&self, gpu: &GpuInfo, instance: Option<&LiveMig>, pid: u32);
    /// Makes the next call of an NVML function fail.
    fn fail_next(&self, function: &str, code: NvmlCode);
    /// Makes the driver report an error by number.
    fn raise_xid(&self, gpu: &GpuInfo, xid: u64, instance: Option<u32>);
    /// Makes the GPU fall off the bus.
    fn lose(&self, gpu: &GpuInfo);
    /// Reboots the node. No handle from [`TestNode::gpus`] is held at that moment.
    fn reboot(&self);
}

/// A clause of the contract.
pub type Clause = fn(&dyn TestNode);

/// All clauses, by name.
pub const ALL: [(&str, Clause); 18] = [
    ("the_inventory_has_every_gpu_with_its_facts", the_inventory_has_every_gpu_with_its_facts),
    ("a_mode_switch_is_in_force_at_once_on_hopper", a_mode_switch_is_in_force_at_once_on_hopper),
    ("a_mode_switch_waits_for_a_reset_on_ampere", a_mode_switch_waits_for_a_reset_on_ampere),
    (
        "a_gpu_that_is_listened_to_switches_and_is_listened_to_again",
        a_gpu_that_is_listened_to_switches_and_is_listened_to_again,
    ),
    ("a_process_that_blocks_a_mode_switch_is_named", a_process_that_blocks_a_mode_switch_is_named),
    ("a_board_without_mig_says_so", a_board_without_mig_says_so),
    ("instances_fill_the_board_and_no_more", instances_fill_the_board_and_no_more),
    ("a_create_that_cannot_be_says_why", a_create_that_cannot_be_says_why),
    ("mixed_profiles_share_a_board", mixed_profiles_share_a_board),
    ("a_create_that_fails_half_way_leaves_nothing", a_create_that_fails_half_way_leaves_nothing),
    ("a_failed_undo_is_reported_and_can_be_made_up_for", a_failed_undo_is_reported_and_can_be_made_up_for),
    ("a_destroy_that_fails_half_way_can_be_repeated", a_destroy_that_fails_half_way_can_be_repeated),
    ("a_stale_handle_destroys_nothing", a_stale_handle_destroys_nothing),
    ("an_instance_in_use_is_not_destroyed", an_instance_in_use_is_not_destroyed),
    ("a_reboot_loses_instances", a_reboot_loses_instances),
    ("a_lost_gpu_is_reported_and_the_others_are_listed", a_lost_gpu_is_reported_and_the_others_are_listed),
    ("errors_arrive_as_events", errors_arrive_as_events),
    ("processes_memory_and_modes_can_be_read", processes_memory_and_modes_can_be_read),
];

fn gpu(node: &dyn TestNode, index: usize) -> GpuInfo {
    node.gpus().inventory().unwrap().gpus[index].clone()
}

/// The H100 with MIG mode on.
fn mig_gpu(node: &dyn TestNode) -> GpuInfo {
    let info = gpu(node, 0);
    assert_eq!(node.gpus().set_mig_mode(&info.uuid, true), Ok(ModeChange::InForce));
    gpu(node, 0)
}

fn id_of(info: &GpuInfo, name: &str) -> u32 {
    info.profiles().iter().find(|p| p.name.as_str() == name).unwrap_or_else(|| panic!("no {name}")).id
}

fn code<T: std::fmt::Debug>(result: Result<T, GpuError>) -> NvmlCode {
    result.unwrap_err().code().unwrap()
}

fn the_inventory_has_every_gpu_with_its_facts(node: &dyn TestNode) {
    let inventory = node.gpus().inventory().unwrap();
    assert_eq!(inventory.unreadable, []);
    assert_eq!(inventory.live, []);
    assert_eq!(inventory.driver, node.gpus().driver().unwrap());
    assert!(inventory.driver.driver_semver().is_some());
    let [h100, a100, t4] = inventory.gpus.as_slice() else { panic!("three GPUs: {inventory:#?}") };

    assert_eq!((h100.index, a100.index, t4.index), (0, 1, 2));
    assert_eq!((h100.minor, a100.minor, t4.minor), (0, 1, 2));
    let uuids: BTreeSet<&GpuUuid> = inventory.gpus.iter().map(|gpu| &gpu.uuid).collect();
    assert_eq!(uuids.len(), 3);
    for info in &inventory.gpus {
        assert_eq!(node.gpus().gpu(&info.uuid).as_ref(), Ok(info));
        assert_eq!(inventory.gpu(&info.uuid), Some(info));
        assert_eq!(info.driver_version, inventory.driver.driver_version);
        assert_eq!(info.cuda_driver_version, inventory.driver.cuda_version);
        let bus = info.pci_bus_id.clone().unwrap();
        assert_eq!(crate::pci::bus_id(&bus), Some(bus));
        assert!(info.pcie_root.as_ref().is_some_and(|root| root.starts_with("pci0000:")), "{info:?}");
    }

    assert_eq!(h100.product_name, "NVIDIA H100 80GB HBM3");
    assert_eq!((h100.architecture, h100.compute_capability), (Architecture::Hopper, (9, 0)));
    assert_eq!(h100.multiprocessors, 132);
    assert!((79 << 30..=80 << 30).contains(&h100.memory_bytes), "{}", h100.memory_bytes);
    let MigCapability::Supported { enabled, pending, needs_reset, profiles } = &h100.mig else {
        panic!("an H100 has MIG")
    };
    assert_eq!((*enabled, *pending, *needs_reset), (false, false, false));
    let places: usize = profiles.iter().map(|p| p.placements.len()).sum();
    assert_eq!((profiles.len(), places, h100.memory_slices()), (7, 25, 8));
    let names: Vec<&str> = profiles.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]);
    let ids: Vec<u32> = profiles.iter().map(|p| p.id).collect();
    assert_eq!(ids, [19, 20, 15, 14, 9, 5, 0]);
    let one = &profiles[0];
    assert_eq!((one.memory_bytes, one.multiprocessors, one.compute_slices), (9984 << 20, 16, 1));
    assert_eq!(one.max_instances, 7);

    assert_eq!((a100.architecture, a100.compute_capability), (Architecture::Ampere, (8, 0)));
    assert!(matches!(
        a100.mig,
        MigCapability::Supported { enabled: true, pending: true, needs_reset: true, .. }
    ));
    assert_eq!((t4.architecture, t4.compute_capability), (Architecture::Turing, (7, 5)));
    assert_eq!((t4.multiprocessors, &t4.mig), (40, &MigCapability::Unsupported));
}

fn a_mode_switch_is_in_force_at_once_on_hopper(node: &dyn TestNode) {
    let info = gpu(node, 0);
    let mode = |on| MigMode { current: on, pending: on };
    assert_eq!(node.gpus().mig_mode(&info.uuid), Ok(mode(false)));
    for on in [true, true, false, false] {
        assert_eq!(node.gpus().set_mig_mode(&info.uuid, on), Ok(ModeChange::InForce));
        assert_eq!(node.gpus().mig_mode(&info.uuid), Ok(mode(on)));
        assert_eq!(gpu(node, 0).mig_enabled(), on);
    }
    assert_eq!(gpu(node, 0), info);
}

/// An event set is a client of the GPU: while an event set of this process has the GPU, the mode could not
/// change.
fn a_gpu_that_is_listened_to_switches_and_is_listened_to_again(node: &dyn TestNode) {
    let (h100, a100) = (gpu(node, 0), gpu(node, 1));
    let mut events = node.gpus().watch(&[h100.uuid.clone(), a100.uuid.clone()]).unwrap();
    let switch = |on| assert_eq!(node.gpus().set_mig_mode(&h100.uuid, on), Ok(ModeChange::InForce));
    // Nobody waits for an event, and somebody does.
    switch(true);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| while events.next(Duration::from_millis(20)) == Ok(None) {});
        switch(false);
        while !waiting.is_finished() {
            node.raise_xid(&h100, 31, None);
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    node.raise_xid(&a100, 94, Some(7));
    let of_other = loop {
        let event = next(events.as_mut());
        if event.gpu.as_ref() != Some(&h100.uuid) {
            break event;
        }
    };
    assert_eq!((of_other.gpu, of_other.kind), (Some(a100.uuid), EventKind::Xid(94)));
}

fn a_mode_switch_waits_for_a_reset_on_ampere(node: &dyn TestNode) {
    let uuid = gpu(node, 1).uuid;
    assert_eq!(node.gpus().set_mig_mode(&uuid, false), Ok(ModeChange::AfterReset));
    assert_eq!(node.gpus().mig_mode(&uuid), Ok(MigMode { current: true, pending: false }));
    // Thought better of: nothing is left pending.
    assert_eq!(node.gpus().set_mig_mode(&uuid, true), Ok(ModeChange::InForce));
    assert_eq!(node.gpus().mig_mode(&uuid), Ok(MigMode { current: true, pending: true }));
    assert_eq!(node.gpus().set_mig_mode(&uuid, false), Ok(ModeChange::AfterReset));
    node.reboot();
    assert_eq!(node.gpus().mig_mode(&uuid), Ok(MigMode { current: false, pending: false }));
}

fn a_process_that_blocks_a_mode_switch_is_named(node: &dyn TestNode) {
    let info = gpu(node, 0);
    let pid = node.start_process(&info, None, 1 << 20);
    let error = node.gpus().set_mig_mode(&info.uuid, true).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::IN_USE));
    assert_eq!(error.blocked_by.iter().map(|p| p.pid).collect::<Vec<_>>(), [pid]);
    let text = error.to_string();
    assert!(text.contains(info.uuid.as_str()) && text.contains(&format!("process {pid}")), "{text}");
    assert_eq!(node.gpus().mig_mode(&info.uuid), Ok(MigMode { current: false, pending: false }));
    node.stop_process(&info, None, pid);
    assert_eq!(node.gpus().set_mig_mode(&info.uuid, true), Ok(ModeChange::InForce));
    // Instances block the way back.
    let mig = node.gpus().create_mig(&info.uuid, id_of(&info, "1g.10gb"), Placement::new(0, 1)).unwrap();
    assert_eq!(code(node.gpus().set_mig_mode(&info.uuid, false)), NvmlCode::IN_USE);
    assert_eq!(node.gpus().mig_mode(&info.uuid), Ok(MigMode { current: true, pending: true }));
    assert_eq!(node.gpus().destroy_mig(&mig), Ok(Destroyed::Now));
    assert_eq!(node.gpus().set_mig_mode(&info.uuid, false), Ok(ModeChange::InForce));
}

fn a_board_without_mig_says_so(node: &dyn TestNode) {
    let t4 = gpu(node, 2).uuid;
    assert!(node.gpus().mig_mode(&t4).unwrap_err().is_not_supported());
    let error = node.gpus().set_mig_mode(&t4, true).unwrap_err();
    assert!(error.is_not_supported());
    assert!(error.to_string().ends_with("the board has no MIG: ask for the whole GPU"), "{error}");
    assert_eq!(node.gpus().live_migs(&t4), Ok(vec![]));
}

fn instances_fill_the_board_and_no_more(node: &dyn TestNode) {
    let info = mig_gpu(node);
    let one = id_of(&info, "1g.10gb");
    let mut made = Vec::new();
    for start in [6, 0, 3, 1, 5, 2, 4] {
        let place = Placement::new(start, 1);
        let mig = node.gpus().create_mig(&info.uuid, one, place).unwrap();
        assert_eq!((&mig.parent, mig.profile_id, mig.placement), (&info.uuid, one, place));
        assert!(mig.compute_instance.is_some() && mig.uuid.is_some(), "{mig:?}");
        made.push(mig);
    }
    made.sort_by_key(|mig| mig.placement);
    assert_eq!(node.gpus().live_migs(&info.uuid).as_ref(), Ok(&made));
    assert_eq!(node.gpus().inventory().unwrap().live, made);
    let uuids: BTreeSet<_> = made.iter().map(|mig| mig.uuid.clone()).collect();
    let ids: BTreeSet<_> = made.iter().map(|mig| mig.gpu_instance).collect();
    assert_eq!((uuids.len(), ids.len()), (7, 7));
    for start in 0..7 {
        let again = node.gpus().create_mig(&info.uuid, one, Placement::new(start, 1));
        assert_eq!(code(again), NvmlCode::INSUFFICIENT_RESOURCES);
    }
    for mig in &made {
        assert_eq!(node.gpus().destroy_mig(mig), Ok(Destroyed::Now));
        assert_eq!(node.gpus().destroy_mig(mig), Ok(Destroyed::WasGone));
    }
    assert_eq!(node.gpus().live_migs(&info.uuid), Ok(vec![]));
}

fn a_create_that_cannot_be_says_why(node: &dyn TestNode) {
    let off = gpu(node, 0);
    let (one, two) = (id_of(&off, "1g.10gb"), id_of(&off, "2g.20gb"));
    let place = Placement::new;
    let try_create = |id, place| node.gpus().create_mig(&off.uuid, id, place).unwrap_err();
    let error = try_create(one, place(0, 1));
    assert!(error.is_not_supported(), "{error}");
    assert!(error.remedy().contains("MIG mode is on"), "{error}");
    let info = mig_gpu(node);
    // 2g at 6 would fit the memory, but no board has it.
    for (id, place) in [(two, place(6, 2)), (one, place(7, 1)), (one, place(0, 2)), (4242, place(0, 1))] {
        let error = try_create(id, place);
        assert_eq!(error.code(), Some(NvmlCode::INVALID_ARGUMENT), "{id} {place}: {error}");
        assert_eq!(error.operation, Operation::CreateGpuInstance { profile_id: id, placement: place });
    }
    let three = id_of(&info, "3g.40gb");
    node.gpus().create_mig(&info.uuid, three, place(0, 4)).unwrap();
    let error = try_create(two, place(2, 2));
    assert_eq!(error.code(), Some(NvmlCode::INSUFFICIENT_RESOURCES), "{error}");
    assert!(error.to_string().contains(&format!("profile {two} at {{2}}:2 of {}", info.uuid)), "{error}");
    assert_eq!(node.gpus().live_migs(&info.uuid).unwrap().len(), 1);
}

fn mixed_profiles_share_a_board(node: &dyn TestNode) {
    let info = mig_gpu(node);
    let plan = [("4g.40gb", 0, 4), ("2g.20gb", 4, 2), ("1g.10gb", 6, 1)];
    for (name, start, size) in plan {
        node.gpus().create_mig(&info.uuid, id_of(&info, name), Placement::new(start, size)).unwrap();
    }
    let live = node.gpus().live_migs(&info.uuid).unwrap();
    let seen: Vec<_> = live.iter().map(|mig| (mig.profile_id, mig.placement)).collect();
    let want: Vec<_> =
        plan.map(|(name, start, size)| (id_of(&info, name), Placement::new(start, size))).into();
    assert_eq!(seen, want);
}

fn a_create_that_fails_half_way_leaves_nothing(node: &dyn TestNode) {
    let info = mig_gpu(node);
    let (id, place) = (id_of(&info, "3g.40gb"), Placement::new(4, 4));
    node.fail_next("nvmlGpuInstanceCreateComputeInstance", NvmlCode::UNKNOWN);
    let error = node.gpus().create_mig(&info.uuid, id, place).unwrap_err();
    assert_eq!(error.operation, Operation::CreateComputeInstance { profile_id: id, placement: place });
    assert_eq!((error.code(), &error.left_behind), (Some(NvmlCode::UNKNOWN), &None));
    assert_eq!(node.gpus().live_migs(&info.uuid), Ok(vec![]));
    assert!(node.gpus().create_mig(&info.uuid, id, place).is_ok());
}

fn a_failed_undo_is_reported_and_can_be_made_up_for(node: &dyn TestNode) {
    let info = mig_gpu(node);
    let (id, place) = (id_of(&info, "2g.20gb"), Placement::new(2, 2));
    node.fail_next("nvmlGpuInstanceCreateComputeInstance", NvmlCode::INSUFFICIENT_RESOURCES);
    node.fail_next("nvmlGpuInstanceDestroy", NvmlCode::IN_USE);
    let error = node.gpus().create_mig(&info.uuid, id, place).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::INSUFFICIENT_RESOURCES));
    let live = node.gpus().live_migs(&info.uuid).unwrap();
    let [half] = live.as_slice() else { panic!("one instance: {live:?}") };
    let left = error.left_behind.clone().unwrap();
    assert!(
        left.starts_with(&format!("GPU instance {}", half.gpu_instance)) && left.contains("IN_USE"),
        "{left}"
    );
    assert_eq!((half.profile_id, half.placement), (id, place));
    assert_eq!((half.compute_instance, &half.uuid), (None, &None));
    assert_eq!(node.gpus().destroy_mig(half), Ok(Destroyed::Now));
    assert_eq!(node.gpus().live_migs(&info.uuid), Ok(vec![]));
}

fn a_destroy_that_fails_half_way_can_be_repeated(node: &dyn TestNode) {
    let info = mig_gpu(node);
    let mig = node.gpus().create_mig(&info.uuid, id_of(&info, "1g.20gb"), Placement::new(6, 2)).unwrap();
    node.fail_next("nvmlGpuInstanceDestroy", NvmlCode::UNKNOWN);
    let error = node.gpus().destroy_mig(&mig).unwrap_err();
    assert_eq!(error.operation, Operation::DestroyGpuInstance { gpu_instance: mig.gpu_instance });
    let live = node.gpus().live_migs(&info.uuid).unwrap();
    assert_eq!(live.iter().map(|m| m.compute_instance).collect::<Vec<_>>(), [None]);
    assert_eq!(node.gpus().destroy_mig(&mig), Ok(Destroyed::Now));
    assert_eq!(node.gpus().destroy_mig(&mig), Ok(Destroyed::WasGone));
}

fn a_stale_handle_destroys_nothing(node: &dyn TestNode) {
    let info = mig_gpu(node);
    let one = id_of(&info, "1g.10gb");
    let old = node.gpus().create_mig(&info.uuid, one, Placement::new(0, 1)).unwrap();
    assert_eq!(node.gpus().destroy_mig(&old), Ok(Destroyed::Now));
    let new = node.gpus().create_mig(&info.uuid, one, Placement::new(3, 1)).unwrap();
    assert_eq!(new.gpu_instance, old.gpu_instance, "the id is used again, or this clause tests nothing");
    assert_eq!(node.gpus().destroy_mig(&old), Ok(Destroyed::WasGone));
    // The right place, but another device's UUID.
    let other = node.gpus().create_mig(&info.uuid, one, Placement::new(0, 1)).unwrap();
    let mixed = LiveMig { uuid: other.uuid.clone(), ..new.clone() };
    assert_eq!(node.gpus().destroy_mig(&mixed), Ok(Destroyed::WasGone));
    assert_eq!(node.gpus().live_migs(&info.uuid), Ok(vec![other.clone(), new.clone()]));
    // Known only by place, as after a create whose answer was lost.
    let by_place = LiveMig { compute_instance: None, uuid: None, ..new };
    assert_eq!(node.gpus().destroy_mig(&by_place), Ok(Destroyed::Now));
    assert_eq!(node.gpus().live_migs(&info.uuid), Ok(vec![other]));
}

fn an_instance_in_use_is_not_destroyed(node: &dyn TestNode) {
    let info = mig_gpu(node);
    let mig = node.gpus().create_mig(&info.uuid, id_of(&info, "2g.20gb"), Placement::new(0, 2)).unwrap();
    let idle = node.gpus().create_mig(&info.uuid, id_of(&info, "1g.10gb"), Placement::new(6, 1)).unwrap();
    let pid = node.start_process(&info, Some(&mig), 1 << 20);
    let error = node.gpus().destroy_mig(&mig).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::IN_USE));
    assert_eq!(error.blocked_by.iter().map(|p| p.pid).collect::<Vec<_>>(), [pid]);
    assert_eq!(node.gpus().live_migs(&info.uuid), Ok(vec![mig.clone(), idle.clone()]));
    assert_eq!(node.gpus().destroy_mig(&idle), Ok(Destroyed::Now));
    node.stop_process(&info, Some(&mig), pid);
    assert_eq!(node.gpus().destroy_mig(&mig), Ok(Destroyed::Now));
}

fn a_reboot_loses_instances(node: &dyn TestNode) {
    let info = mig_gpu(node);
    let mig = node.gpus().create_mig(&info.uuid, id_of(&info, "7g.80gb"), Placement::new(0, 8)).unwrap();
    node.reboot();
    assert_eq!(node.gpus().destroy_mig(&mig), Ok(Destroyed::WasGone));
    assert_eq!(node.gpus().live_migs(&info.uuid), Ok(vec![]));
    // The identity stays; of the modes only the older board's.
    let inventory = node.gpus().inventory().unwrap();
    assert_eq!(inventory.gpus[0].uuid, info.uuid);
    assert_eq!(inventory.gpus.iter().map(GpuInfo::mig_enabled).collect::<Vec<_>>(), [false, true, false]);
}

fn a_lost_gpu_is_reported_and_the_others_are_listed(node: &dyn TestNode) {
    let a100 = gpu(node, 1);
    node.lose(&a100);
    let inventory = node.gpus().inventory().unwrap();
    assert_eq!(inventory.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0, 2]);
    let [unreadable] = inventory.unreadable.as_slice() else { panic!("one is lost: {inventory:#?}") };
    assert_eq!(unreadable.index, 1);
    assert!(unreadable.error.is_lost(), "{}", unreadable.error);
    assert!(unreadable.error.to_string().contains("drain the node"), "{}", unreadable.error);
    for result in [node.gpus().processes(&a100.uuid).err(), node.gpus().mig_mode(&a100.uuid).err()] {
        assert!(result.unwrap().is_lost());
    }
}

fn next(events: &mut dyn EventSource) -> crate::GpuEvent {
    events.next(Duration::from_secs(60)).unwrap().unwrap()
}

fn errors_arrive_as_events(node: &dyn TestNode) {
    let (h100, a100) = (gpu(node, 0), gpu(node, 1));
    let missing = GpuUuid::parse("GPU-dead").unwrap();
    let mut events = node.gpus().watch(&[h100.uuid.clone(), a100.uuid.clone(), missing.clone()]).unwrap();
    assert_eq!(events.unmonitored().iter().map(|(gpu, _)| gpu).collect::<Vec<_>>(), [&missing]);
    assert_eq!(events.next(Duration::from_millis(1)), Ok(None));
    node.raise_xid(&h100, 31, None);
    node.raise_xid(&a100, 94, Some(7));
    let first = next(events.as_mut());
    assert_eq!((first.gpu, first.gpu_instance, first.kind), (Some(h100.uuid), None, EventKind::Xid(31)));
    let second = next(events.as_mut());
    let uuid = Some(a100.uuid.clone());
    assert_eq!((second.gpu, second.gpu_instance, second.kind), (uuid, Some(7), EventKind::Xid(94)));
    assert_eq!(events.next(Duration::from_millis(1)), Ok(None));
    node.lose(&a100);
    let lost = next(events.as_mut());
    assert_eq!((lost.gpu, lost.kind), (Some(a100.uuid), EventKind::Xid(79)));
}

fn processes_memory_and_modes_can_be_read(node: &dyn TestNode) {
    let info = gpu(node, 0);
    let before = node.gpus().memory(&info.uuid).unwrap();
    assert_eq!(node.gpus().processes(&info.uuid), Ok(vec![]));
    let pid = node.start_process(&info, None, 1 << 30);
    let processes = node.gpus().processes(&info.uuid).unwrap();
    let [process] = processes.as_slice() else { panic!("one process: {processes:?}") };
    assert_eq!((process.pid, process.gpu_instance), (pid, None));
    let taken = process.memory_bytes.unwrap();
    assert!(taken >= 1 << 30, "{taken}");
    let after = node.gpus().memory(&info.uuid).unwrap();
    assert_eq!((after.total, after.used), (before.total, before.used + taken));
    assert_eq!(after.free, before.free - taken);
    // It has run nothing.
    assert_eq!(node.gpus().utilization(&info.uuid, 0), Ok(vec![]));
    node.stop_process(&info, None, pid);
    assert_eq!(node.gpus().memory(&info.uuid), Ok(before));

    for mode in [ComputeMode::ExclusiveProcess, ComputeMode::Prohibited, ComputeMode::Default] {
        node.gpus().set_compute_mode(&info.uuid, mode).unwrap();
        assert_eq!(node.gpus().compute_mode(&info.uuid), Ok(mode));
    }
    for on in [true, false] {
        node.gpus().set_persistence_mode(&info.uuid, on).unwrap();
        assert_eq!(node.gpus().persistence_mode(&info.uuid), Ok(on));
    }
}

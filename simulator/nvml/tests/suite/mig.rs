//! MIG through the real bindings: profiles, placements, life of instances, devices, and who may do what.
#![allow(unsafe_code, reason = "calls the C interface through its bindings")]

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::process::{Command, Stdio};
use std::ptr::null_mut;

use crate::common::*;
use aliquot_sim_node::{BOARDS, Fault, NodeSpec, Pool, reboot};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;
use rstest::rstest;

const fn version<T>(number: u32) -> u32 {
    (number << 24) | size_of::<T>() as u32
}

fn text(field: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|c| *c as u8).collect();
    CStr::from_bytes_until_nul(&bytes).unwrap().to_str().unwrap().to_owned()
}

fn profile_v2(
    nvml: &Nvml,
    device: sys::nvmlDevice_t,
    profile: u32,
) -> Result<sys::nvmlGpuInstanceProfileInfo_v2_t, u32> {
    // SAFETY: an all-zero value of this plain structure is valid.
    let mut info: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
    info.version = version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
    match nvml!(nvml, nvmlDeviceGetGpuInstanceProfileInfoV(device, profile, &mut info)) {
        SUCCESS => Ok(info),
        code => Err(code),
    }
}

fn create(nvml: &Nvml, device: sys::nvmlDevice_t, profile: u32) -> Result<sys::nvmlGpuInstance_t, u32> {
    let mut gi = null_mut();
    match nvml!(nvml, nvmlDeviceCreateGpuInstance(device, profile, &mut gi)) {
        SUCCESS => Ok(gi),
        code => Err(code),
    }
}

fn create_at(
    nvml: &Nvml,
    device: sys::nvmlDevice_t,
    profile: u32,
    start: u32,
    size: u32,
) -> Result<sys::nvmlGpuInstance_t, u32> {
    let mut gi = null_mut();
    let place = sys::nvmlGpuInstancePlacement_t { start, size };
    match nvml!(nvml, nvmlDeviceCreateGpuInstanceWithPlacement(device, profile, &place, &mut gi)) {
        SUCCESS => Ok(gi),
        code => Err(code),
    }
}

fn create_ci(
    nvml: &Nvml,
    gi: sys::nvmlGpuInstance_t,
    profile: u32,
) -> Result<sys::nvmlComputeInstance_t, u32> {
    let mut ci = null_mut();
    match nvml!(nvml, nvmlGpuInstanceCreateComputeInstance(gi, profile, &mut ci)) {
        SUCCESS => Ok(ci),
        code => Err(code),
    }
}

fn info(nvml: &Nvml, gi: sys::nvmlGpuInstance_t) -> Result<sys::nvmlGpuInstanceInfo_t, u32> {
    // SAFETY: an all-zero value of this plain structure is valid.
    let mut info: sys::nvmlGpuInstanceInfo_t = unsafe { std::mem::zeroed() };
    match nvml!(nvml, nvmlGpuInstanceGetInfo(gi, &mut info)) {
        SUCCESS => Ok(info),
        code => Err(code),
    }
}

fn placements(nvml: &Nvml, device: sys::nvmlDevice_t, profile: u32) -> Vec<(u32, u32)> {
    let mut count = 0;
    let length =
        nvml!(nvml, nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, profile, null_mut(), &mut count));
    assert_eq!(length, SUCCESS);
    let mut rows = vec![sys::nvmlGpuInstancePlacement_t { start: 99, size: 99 }; count as usize];
    let filled = nvml!(
        nvml,
        nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, profile, rows.as_mut_ptr(), &mut count)
    );
    assert_eq!(filled, SUCCESS);
    rows.iter().map(|p| (p.start, p.size)).collect()
}

fn set_mode(nvml: &Nvml, device: sys::nvmlDevice_t, mode: u32) -> (u32, u32) {
    let mut activation = 999;
    let code = nvml!(nvml, nvmlDeviceSetMigMode(device, mode, &mut activation));
    (code, activation)
}

fn mode(nvml: &Nvml, device: sys::nvmlDevice_t) -> (u32, u32) {
    let (mut current, mut pending) = (9, 9);
    assert_eq!(nvml!(nvml, nvmlDeviceGetMigMode(device, &mut current, &mut pending)), SUCCESS);
    (current, pending)
}

/// Every board with MIG, one GPU each, in MIG mode; what is asked is asked of each.
fn for_each_mig_board(check: impl Fn(&Fixture, sys::nvmlDevice_t, &'static aliquot_sim_node::Board)) {
    let boards: Vec<&'static aliquot_sim_node::Board> = BOARDS.iter().filter(|b| b.has_mig()).collect();
    let names: Vec<String> = boards.iter().map(|b| format!("{}:mig", b.key)).collect();
    let f = fixture(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for (index, board) in (0..).zip(&boards) {
        check(&f, gpu(&f.nvml, index), board);
    }
}

#[test]
fn profiles_are_told_by_every_version_of_the_call() {
    for_each_mig_board(|f, device, board| {
        let mut found = 0;
        for number in 0..sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
            let Some(expected) = board.profile_by_nvml(number) else {
                assert_eq!(
                    profile_v2(&f.nvml, device, number).unwrap_err(),
                    NOT_SUPPORTED,
                    "{} {number}",
                    board.key
                );
                continue;
            };
            found += 1;
            // SAFETY: all-zero values of these plain structures are valid.
            let mut v1: sys::nvmlGpuInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
            assert_eq!(nvml!(f.nvml, nvmlDeviceGetGpuInstanceProfileInfo(device, number, &mut v1)), SUCCESS);
            let v2 = profile_v2(&f.nvml, device, number).unwrap();
            // SAFETY: as above.
            let mut v3: sys::nvmlGpuInstanceProfileInfo_v3_t = unsafe { std::mem::zeroed() };
            v3.version = version::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3);
            let pointer = (&raw mut v3).cast();
            assert_eq!(nvml!(f.nvml, nvmlDeviceGetGpuInstanceProfileInfoV(device, number, pointer)), SUCCESS);
            let all = [
                (
                    v1.id,
                    v1.sliceCount,
                    v1.instanceCount,
                    v1.multiprocessorCount,
                    v1.memorySizeMB,
                    v1.jpegCount,
                ),
                (
                    v2.id,
                    v2.sliceCount,
                    v2.instanceCount,
                    v2.multiprocessorCount,
                    v2.memorySizeMB,
                    v2.jpegCount,
                ),
                (
                    v3.id,
                    v3.sliceCount,
                    v3.instanceCount,
                    v3.multiprocessorCount,
                    v3.memorySizeMB,
                    v3.jpegCount,
                ),
            ];
            let p = expected;
            assert_eq!(all, [(p.id, p.slices, p.max, p.multiprocessors, p.memory_mib, p.engines.jpeg); 3]);
            assert_eq!(
                (text(&v2.name), text(&v3.name)),
                (format!("MIG {}", p.name), format!("MIG {}", p.name))
            );
            let graphics = v3.capabilities & sys::NVML_GPU_INSTANCE_PROFILE_CAPS_GFX != 0;
            assert_eq!(graphics, p.name.contains("+gfx"));
            let by_id =
                nvml!(f.nvml, nvmlDeviceGetGpuInstanceProfileInfoByIdV(device, p.id, (&raw mut v3).cast()));
            assert_eq!((by_id, v3.id), (SUCCESS, p.id));
        }
        assert_eq!(found, board.profiles.len(), "{}", board.key);
        let beyond = sys::NVML_GPU_INSTANCE_PROFILE_COUNT;
        assert_eq!(profile_v2(&f.nvml, device, beyond).unwrap_err(), INVALID_ARGUMENT);
        // SAFETY: as above.
        let mut wrong: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        let code = nvml!(f.nvml, nvmlDeviceGetGpuInstanceProfileInfoV(device, 0, &mut wrong));
        assert_eq!(code, VERSION_MISMATCH);
    });
}

#[test]
fn the_wrapper_reads_profiles_too() {
    let f = fixture(&["H100-80"]);
    let device = f.nvml.device_by_index(0).unwrap();
    let seven = device.profile_info(sys::NVML_GPU_INSTANCE_PROFILE_7_SLICE).unwrap();
    assert_eq!((seven.slice_count, seven.multiprocessor_count, seven.memory_size_mb), (7, 132, 81152));
    assert!(matches!(
        device.profile_info(sys::NVML_GPU_INSTANCE_PROFILE_8_SLICE),
        Err(NvmlError::NotSupported)
    ));
}

#[test]
fn every_legal_placement_can_be_made_and_carries_its_size_into_the_mig_device() {
    for_each_mig_board(|f, device, board| {
        for profile in board.profiles {
            let places = placements(&f.nvml, device, profile.id);
            assert_eq!(places, profile.starts.iter().map(|s| (*s, profile.size)).collect::<Vec<_>>());
            for (start, size) in places {
                let what = format!("{} {} at {start}", board.key, profile.name);
                let gi = create_at(&f.nvml, device, profile.id, start, size)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
                let told = info(&f.nvml, gi).unwrap();
                assert_eq!((told.device, told.profileId), (device, profile.id), "{what}");
                assert_eq!((told.placement.start, told.placement.size), (start, size), "{what}");
                let whole =
                    [(1, 0), (2, 1), (3, 2), (4, 3), (7, 4)].into_iter().find(|(s, _)| *s == profile.slices);
                let ci = create_ci(&f.nvml, gi, whole.unwrap().1).unwrap();
                let parent =
                    f.nvml.device_by_uuid(f.node.gpus()[index_of(&f.nvml, device)].uuid.as_str()).unwrap();
                let mig = parent.mig_device_by_index(0).unwrap();
                let attributes = mig.attributes().unwrap();
                assert_eq!(attributes.multiprocessor_count, profile.multiprocessors, "{what}");
                assert_eq!(attributes.memory_size_mb, profile.memory_mib, "{what}");
                assert_eq!(attributes.gpu_instance_slice_count, profile.slices, "{what}");
                assert_eq!(attributes.shared_ofa_count, profile.engines.ofa, "{what}");
                assert_eq!(mig.memory_info().unwrap().total, profile.memory_mib << 20, "{what}");
                assert_eq!(mig.name().unwrap(), format!("{} MIG {}", board.product, profile.name));
                assert_eq!(nvml!(f.nvml, nvmlComputeInstanceDestroy(ci)), SUCCESS);
                assert_eq!(nvml!(f.nvml, nvmlGpuInstanceDestroy(gi)), SUCCESS);
            }
        }
    });
}

fn index_of(nvml: &Nvml, device: sys::nvmlDevice_t) -> usize {
    let mut index = 0;
    assert_eq!(nvml!(nvml, nvmlDeviceGetIndex(device, &mut index)), SUCCESS);
    index as usize
}

#[test]
fn overlapping_placements_are_insufficient_resources() {
    for_each_mig_board(|f, device, board| {
        for first in board.profiles {
            for &start in first.starts {
                let gi = create_at(&f.nvml, device, first.id, start, first.size).unwrap();
                for second in board.profiles {
                    for &other in second.starts {
                        if other < start + first.size && start < other + second.size {
                            let code = create_at(&f.nvml, device, second.id, other, second.size).unwrap_err();
                            assert_eq!(
                                code, INSUFFICIENT_RESOURCES,
                                "{}: {} at {start}, {} at {other}",
                                board.key, first.name, second.name
                            );
                        }
                    }
                }
                assert_eq!(nvml!(f.nvml, nvmlGpuInstanceDestroy(gi)), SUCCESS);
            }
        }
    });
}

#[rstest]
#[case::no_such_start(19, 7, 1, INVALID_ARGUMENT)]
#[case::size_of_another_profile(19, 0, 2, INVALID_ARGUMENT)]
#[case::start_between(9, 2, 4, INVALID_ARGUMENT)]
#[case::no_such_profile(77, 0, 1, INVALID_ARGUMENT)]
#[case::legal(9, 4, 4, SUCCESS)]
fn placements_are_checked(
    #[case] profile: u32,
    #[case] start: u32,
    #[case] size: u32,
    #[case] expected: u32,
) {
    let f = fixture(&["H100-80:mig"]);
    let code = create_at(&f.nvml, gpu(&f.nvml, 0), profile, start, size).err().unwrap_or(SUCCESS);
    assert_eq!(code, expected);
}

#[test]
fn remaining_capacity_counts_down_and_up() {
    let f = fixture(&["A100-40:mig"]);
    let device = gpu(&f.nvml, 0);
    let remaining = |profile| {
        let mut count = 99;
        assert_eq!(
            nvml!(f.nvml, nvmlDeviceGetGpuInstanceRemainingCapacity(device, profile, &mut count)),
            SUCCESS
        );
        count
    };
    assert_eq!([remaining(19), remaining(14), remaining(9), remaining(5), remaining(0)], [7, 3, 2, 1, 1]);
    let gi = create(&f.nvml, device, 14).unwrap();
    assert_eq!(info(&f.nvml, gi).unwrap().placement.start, 4, "from above, to keep 4g possible");
    assert_eq!([remaining(19), remaining(14), remaining(9), remaining(5), remaining(0)], [5, 2, 1, 1, 0]);
    assert_eq!(nvml!(f.nvml, nvmlGpuInstanceDestroy(gi)), SUCCESS);
    assert_eq!(remaining(0), 1);
}

#[test]
fn instances_are_listed_by_profile_and_found_by_id() {
    let f = fixture(&["H200-141:mig"]);
    let device = gpu(&f.nvml, 0);
    let made = [create(&f.nvml, device, 19).unwrap(), create(&f.nvml, device, 19).unwrap()];
    create(&f.nvml, device, 5).unwrap();
    let mut list = [null_mut(); 7];
    let mut count = 0;
    let code = nvml!(f.nvml, nvmlDeviceGetGpuInstances(device, 19, list.as_mut_ptr(), &mut count));
    assert_eq!((code, count), (SUCCESS, 2));
    assert_eq!(list[..2].iter().collect::<BTreeSet<_>>(), made.iter().collect());
    let id = info(&f.nvml, made[1]).unwrap().id;
    let mut found = null_mut();
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetGpuInstanceById(device, id, &mut found)), SUCCESS);
    assert_eq!(found, made[1]);
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetGpuInstanceById(device, 14, &mut found)), NOT_FOUND);
}

#[test]
fn a_destroyed_instance_leaves_an_invalid_handle_even_when_its_id_is_used_again() {
    let f = fixture(&["A30:mig"]);
    let device = gpu(&f.nvml, 0);
    let first = create(&f.nvml, device, 14).unwrap();
    let ci = create_ci(&f.nvml, first, 0).unwrap();
    assert_eq!(nvml!(f.nvml, nvmlGpuInstanceDestroy(first)), IN_USE, "a compute instance is in it");
    assert_eq!(nvml!(f.nvml, nvmlComputeInstanceDestroy(ci)), SUCCESS);
    assert_eq!(nvml!(f.nvml, nvmlComputeInstanceDestroy(ci)), INVALID_ARGUMENT);
    assert_eq!(nvml!(f.nvml, nvmlGpuInstanceDestroy(first)), SUCCESS);
    let second = create(&f.nvml, device, 14).unwrap();
    assert_eq!(info(&f.nvml, first).unwrap_err(), INVALID_ARGUMENT);
    assert_eq!(nvml!(f.nvml, nvmlGpuInstanceDestroy(first)), INVALID_ARGUMENT);
    assert!(info(&f.nvml, second).is_ok());
}

#[test]
fn ampere_keeps_the_old_mode_until_a_reset() {
    let f = fixture(&["A100-40"]);
    let device = gpu(&f.nvml, 0);
    assert_eq!(set_mode(&f.nvml, device, 1), (SUCCESS, RESET_REQUIRED));
    assert_eq!(mode(&f.nvml, device), (0, 1));
    assert_eq!(create(&f.nvml, device, 0).unwrap_err(), NOT_SUPPORTED);
    f.node.reset(0).unwrap();
    assert_eq!(mode(&f.nvml, device), (1, 1));
    assert!(create(&f.nvml, device, 0).is_ok());
}

#[rstest]
#[case("H100-80")]
#[case("H200-141")]
#[case("B200-180")]
#[case("RTX-PRO-6000")]
fn later_boards_switch_at_once_unless_something_is_in_the_way(#[case] board: &str) {
    let f = fixture(&[board]);
    let device = gpu(&f.nvml, 0);
    f.node.charge(Pool::whole(0), 1).unwrap();
    assert_eq!(set_mode(&f.nvml, device, 1), (SUCCESS, IN_USE));
    assert_eq!(mode(&f.nvml, device), (0, 1));
    f.node.detach_process().unwrap();
    assert_eq!(set_mode(&f.nvml, device, 1), (SUCCESS, SUCCESS));
    assert_eq!(mode(&f.nvml, device), (1, 1));
    let gi = create(&f.nvml, device, 0).unwrap();
    assert_eq!(set_mode(&f.nvml, device, 0), (SUCCESS, IN_USE));
    assert_eq!(nvml!(f.nvml, nvmlGpuInstanceDestroy(gi)), SUCCESS);
    assert_eq!(set_mode(&f.nvml, device, 0), (SUCCESS, SUCCESS));
    assert_eq!(set_mode(&f.nvml, device, 2).0, INVALID_ARGUMENT);
    let through_wrapper = f.nvml.device_by_index(0).unwrap().mig_mode().unwrap();
    assert_eq!((through_wrapper.current, through_wrapper.pending), (0, 0));
}

#[test]
fn a_gpu_that_comes_back_under_another_number_is_told_by_it() {
    let f = fixture_of(NodeSpec { renumber_on_mig_switch: true, ..NodeSpec::new(["H100-80", "T4"]) });
    let minors =
        |nvml: &Nvml| [0, 1].map(|index| nvml.device_by_index(index).unwrap().minor_number().unwrap());
    let device = gpu(&f.nvml, 0);
    assert_eq!((set_mode(&f.nvml, device, 1), minors(&f.nvml)), ((SUCCESS, SUCCESS), [2, 1]));
    let gi = create(&f.nvml, device, 19).unwrap();
    assert!(create_ci(&f.nvml, gi, 0).is_ok());
    assert!(f.nvml.device_by_index(0).unwrap().mig_device_by_index(0).is_ok());
    assert_eq!(minors(&load(&f.dir)), [2, 1], "who opens the library then is told the same");
}

/// Monitoring is such a client, in whatever process.
#[test]
fn an_event_set_of_another_library_holds_a_switch_up_and_is_in_no_list() {
    let f = fixture(&["H100-80"]);
    let monitor = {
        let copy = f.dir.path().join("root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.monitor");
        std::fs::copy(std::fs::canonicalize(library_in(&f.dir)).unwrap(), &copy).unwrap();
        Nvml::builder().lib_path(copy.as_os_str()).init().unwrap()
    };
    let device = gpu(&f.nvml, 0);
    let set = monitor.create_event_set().unwrap();
    let types = nvml_wrapper::bitmasks::event::EventTypes::CRITICAL_XID_ERROR;
    let set = monitor.device_by_index(0).unwrap().register_events(types, set).unwrap();
    assert_eq!(set_mode(&f.nvml, device, 1), (SUCCESS, IN_USE));
    assert!(f.nvml.device_by_index(0).unwrap().running_compute_processes().unwrap().is_empty());
    set.release_events().unwrap();
    assert_eq!(set_mode(&f.nvml, device, 1), (SUCCESS, SUCCESS));
}

#[test]
fn boards_without_mig_support_nothing_of_it() {
    let f = fixture(&["T4", "L40S"]);
    for index in 0..2 {
        let device = gpu(&f.nvml, index);
        let mut number = 0;
        assert_eq!(set_mode(&f.nvml, device, 1).0, NOT_SUPPORTED);
        assert_eq!(nvml!(f.nvml, nvmlDeviceGetMigMode(device, &mut number, &mut 0)), NOT_SUPPORTED);
        assert_eq!(create(&f.nvml, device, 19).unwrap_err(), NOT_SUPPORTED);
        assert_eq!(profile_v2(&f.nvml, device, 0).unwrap_err(), NOT_SUPPORTED);
        assert_eq!(nvml!(f.nvml, nvmlDeviceGetMaxMigDeviceCount(device, &mut number)), SUCCESS);
        assert_eq!(number, 0);
    }
}

#[test]
fn mig_devices_have_names_parents_and_memory_of_their_own() {
    let f = fixture(&["H100-80:mig", "H100-80"]);
    let device = gpu(&f.nvml, 0);
    for _ in 0..2 {
        let gi = create(&f.nvml, device, 9).unwrap();
        create_ci(&f.nvml, gi, 2).unwrap();
    }
    let parent = f.nvml.device_by_index(0).unwrap();
    assert_eq!(parent.mig_device_count().unwrap(), 7);
    let devices = [parent.mig_device_by_index(0).unwrap(), parent.mig_device_by_index(1).unwrap()];
    assert!(matches!(parent.mig_device_by_index(2), Err(NvmlError::NotFound)));
    assert!(matches!(parent.mig_device_by_index(7), Err(NvmlError::InvalidArg)));
    assert!(devices[0].mig_is_mig_device_handle().unwrap() && !parent.mig_is_mig_device_handle().unwrap());
    let uuids: Vec<String> = devices.iter().map(|d| d.uuid().unwrap()).collect();
    assert!(uuids.iter().all(|u| u.starts_with("MIG-") && u.len() == 40) && uuids[0] != uuids[1]);
    for (index, (mig, uuid)) in (0..).zip(devices.iter().zip(&uuids)) {
        assert_eq!(mig.mig_parent_device().unwrap().uuid().unwrap(), parent.uuid().unwrap());
        assert_eq!(mig.index().unwrap(), index);
        assert_eq!(f.nvml.device_by_uuid(uuid.as_str()).unwrap().index().unwrap(), index);
        assert!(matches!(mig.minor_number(), Err(NvmlError::NotSupported)));
        assert!(matches!(parent.attributes(), Err(NvmlError::NotSupported)));
    }
    // SAFETY: the handle is a number.
    let handle = unsafe { devices[1].handle() };
    let (mut gi, mut ci) = (99, 99);
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetGpuInstanceId(handle, &mut gi)), SUCCESS);
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetComputeInstanceId(handle, &mut ci)), SUCCESS);
    assert_eq!((gi, ci), (2, 0));
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetGpuInstanceId(device, &mut gi)), NOT_SUPPORTED);

    let pool = Pool::instance(0, 2);
    f.node.context_opened(pool, Some(0)).unwrap();
    f.node.charge(pool, 1 << 30).unwrap();
    assert_eq!(devices[1].memory_info().unwrap().used, 1 << 30);
    assert_eq!(devices[0].memory_info().unwrap().used, 0);
    assert_eq!(parent.memory_info().unwrap().used, 1 << 30);
    let running = |d: &nvml_wrapper::Device| d.running_compute_processes().unwrap();
    assert!(running(&devices[0]).is_empty());
    assert_eq!(running(&devices[1]).len(), 1);
    let on_parent = running(&parent);
    assert_eq!((on_parent[0].gpu_instance_id, on_parent[0].compute_instance_id), (Some(2), Some(0)));
}

#[test]
fn compute_instances_are_told_made_and_found() {
    let f = fixture(&["A100-80:mig"]);
    let gi = create(&f.nvml, gpu(&f.nvml, 0), 5).unwrap();
    // SAFETY: an all-zero value of this plain structure is valid.
    let mut told: sys::nvmlComputeInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
    told.version = version::<sys::nvmlComputeInstanceProfileInfo_v2_t>(2);
    assert_eq!(nvml!(f.nvml, nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 1, 0, &mut told)), SUCCESS);
    assert_eq!((told.id, told.sliceCount, told.instanceCount, told.multiprocessorCount), (1, 2, 2, 28));
    assert_eq!(text(&told.name), "MIG 2c.4g.40gb");
    assert_eq!(
        nvml!(f.nvml, nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 2, 0, &mut told)),
        NOT_SUPPORTED
    );
    assert_eq!(
        nvml!(f.nvml, nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 8, 0, &mut told)),
        INVALID_ARGUMENT
    );
    assert_eq!(
        nvml!(f.nvml, nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 1, 1, &mut told)),
        INVALID_ARGUMENT
    );

    let remaining = |profile| {
        let mut count = 99;
        let code = nvml!(f.nvml, nvmlGpuInstanceGetComputeInstanceRemainingCapacity(gi, profile, &mut count));
        assert_eq!(code, SUCCESS);
        count
    };
    assert_eq!((remaining(0), remaining(1), remaining(3)), (4, 2, 1));
    let place = sys::nvmlComputeInstancePlacement_t { start: 2, size: 2 };
    let mut ci = null_mut();
    let code = nvml!(f.nvml, nvmlGpuInstanceCreateComputeInstanceWithPlacement(gi, 1, &place, &mut ci));
    assert_eq!(code, SUCCESS);
    assert_eq!((remaining(0), remaining(1), remaining(3)), (2, 1, 0));
    assert_eq!(create_ci(&f.nvml, gi, 3).unwrap_err(), INSUFFICIENT_RESOURCES);
    assert_eq!(create_ci(&f.nvml, gi, 6).unwrap_err(), INVALID_ARGUMENT);
    // SAFETY: as above.
    let mut described: sys::nvmlComputeInstanceInfo_t = unsafe { std::mem::zeroed() };
    assert_eq!(nvml!(f.nvml, nvmlComputeInstanceGetInfo_v2(ci, &mut described)), SUCCESS);
    assert_eq!((described.gpuInstance, described.id, described.profileId), (gi, 0, 1));
    assert_eq!((described.placement.start, described.placement.size), (2, 2));
    let (mut list, mut count) = ([null_mut(); 4], 0);
    assert_eq!(
        nvml!(f.nvml, nvmlGpuInstanceGetComputeInstances(gi, 1, list.as_mut_ptr(), &mut count)),
        SUCCESS
    );
    assert_eq!((count, list[0]), (1, ci));
    let mut found = null_mut();
    assert_eq!(nvml!(f.nvml, nvmlGpuInstanceGetComputeInstanceById(gi, 0, &mut found)), SUCCESS);
    assert_eq!(found, ci);
    assert_eq!(nvml!(f.nvml, nvmlGpuInstanceGetComputeInstanceById(gi, 1, &mut found)), NOT_FOUND);
    let parent = f.nvml.device_by_index(0).unwrap();
    assert_eq!(
        parent.mig_device_by_index(0).unwrap().name().unwrap(),
        "NVIDIA A100-SXM4-80GB MIG 2c.4g.40gb"
    );
}

#[test]
fn instances_outlive_the_process_that_made_them_but_not_a_reboot() {
    let f = fixture(&["A30:mig"]);
    let uuid = {
        let maker = load(&f.dir);
        let gi = create(&maker, gpu(&maker, 0), 5).unwrap();
        create_ci(&maker, gi, 1).unwrap();
        maker.device_by_index(0).unwrap().mig_device_by_index(0).unwrap().uuid().unwrap()
    };
    let again = load(&f.dir);
    assert!(again.device_by_uuid(uuid.as_str()).is_ok());
    reboot(f.dir.path()).unwrap();
    assert!(matches!(again.device_by_uuid(uuid.as_str()), Err(NvmlError::NotFound)));
    assert_eq!(mode(&again, gpu(&again, 0)), (1, 1), "an A30 keeps its mode");
    let gi = create(&again, gpu(&again, 0), 5).unwrap();
    create_ci(&again, gi, 1).unwrap();
    assert!(again.device_by_uuid(uuid.as_str()).is_ok(), "the same instance has the same name");
}

#[test]
fn a_failing_create_leaves_nothing_behind() {
    let f = fixture(&["H100-80:mig"]);
    let device = gpu(&f.nvml, 0);
    f.node.add_fault(&Fault::fail("nvmlDeviceCreateGpuInstanceWithPlacement", 1, 999)).unwrap();
    assert_eq!(create_at(&f.nvml, device, 9, 0, 4).unwrap_err(), UNKNOWN);
    assert!(f.node.gis(0).unwrap().is_empty());
    assert!(create_at(&f.nvml, device, 9, 0, 4).is_ok());
}

const RACER: &str = "ALIQUOT_SIM_TEST_RACER";

/// The other side of the next test: takes what it can and says how much that was.
#[test]
fn plays_a_racer() {
    let Some(library) = std::env::var_os(RACER) else { return };
    let nvml = Nvml::builder().lib_path(&library).init().unwrap();
    let device = gpu(&nvml, 0);
    let got = (0..7).filter(|_| create(&nvml, device, 19).is_ok()).count();
    println!("got {got}.");
}

#[test]
fn processes_that_race_for_instances_never_get_the_same_one() {
    let f = fixture(&["B200-180:mig"]);
    let racers: Vec<_> = (0..4)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "mig::plays_a_racer", "--nocapture"])
                .env(RACER, library_in(&f.dir))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut got = 0;
    for racer in racers {
        let output = racer.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        let number = text.split("got ").nth(1).and_then(|rest| rest.split('.').next()).unwrap();
        got += number.parse::<usize>().unwrap();
    }
    assert_eq!(got, 7);
    let starts: BTreeSet<u32> = f.node.gis(0).unwrap().iter().map(|gi| gi.start).collect();
    assert_eq!(starts.len(), 7);
}

/// The container's side of the next test.
#[test]
fn plays_a_container() {
    let Some(library) = std::env::var_os("ALIQUOT_SIM_TEST_CONTAINER") else { return };
    let nvml = Nvml::builder().lib_path(&library).init().unwrap();
    let device = gpu(&nvml, 0);
    assert_eq!(set_mode(&nvml, device, 0).0, NO_PERMISSION);
    assert_eq!(create(&nvml, device, 19).unwrap_err(), NO_PERMISSION);
    assert_eq!(profile_v2(&nvml, device, 0).unwrap().id, 19, "reading is allowed");
    println!("refused");
}

#[test]
fn containers_can_be_kept_from_managing_mig() {
    let base = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let allowed = Command::new("unshare").args(base).arg("true").output().is_ok_and(|o| o.status.success());
    if !allowed {
        eprintln!("skipped: this machine has no unprivileged pid namespaces");
        return;
    }
    let f = fixture(&["H100-80:mig"]);
    f.node.set_deny_mig_in_containers(true).unwrap();
    let output = Command::new("unshare")
        .args(base)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "mig::plays_a_container", "--nocapture"])
        .env("ALIQUOT_SIM_TEST_CONTAINER", library_in(&f.dir))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("refused"), "{text}");
    assert!(create(&f.nvml, gpu(&f.nvml, 0), 19).is_ok(), "the host may");
}

#[test]
fn who_may_not_monitor_all_partitions_learns_nothing_of_their_gpu_as_a_whole() {
    let f = fixture(&["A30:mig", "A30"]);
    if !f.node.sight().dev().starts_with(f.dir.path()) {
        eprintln!("skipped: this machine or environment has device nodes of its own");
        return;
    }
    let gi = create(&f.nvml, gpu(&f.nvml, 0), 14).unwrap();
    create_ci(&f.nvml, gi, 0).unwrap();
    let (divided, other) = (f.nvml.device_by_index(0).unwrap(), f.nvml.device_by_index(1).unwrap());
    assert!(divided.memory_info().is_ok() && divided.running_compute_processes().is_ok());
    std::fs::remove_file(f.dir.path().join("root/dev/nvidia-caps/nvidia-cap2")).unwrap();
    assert!(matches!(divided.memory_info(), Err(NvmlError::NoPermission)));
    assert!(matches!(divided.running_compute_processes(), Err(NvmlError::NoPermission)));
    assert!(matches!(divided.utilization_rates(), Err(NvmlError::NotSupported)));
    let partition = divided.mig_device_by_index(0).unwrap();
    for whole in [partition, other] {
        assert!(whole.memory_info().is_ok() && whole.running_compute_processes().is_ok());
    }
}

#[test]
fn a_mig_device_is_seen_only_with_its_capability_nodes() {
    let f = fixture(&["A30:mig"]);
    if !f.node.sight().dev().starts_with(f.dir.path()) {
        eprintln!("skipped: this machine or environment has device nodes of its own");
        return;
    }
    let device = gpu(&f.nvml, 0);
    for _ in 0..2 {
        let gi = create(&f.nvml, device, 14).unwrap();
        create_ci(&f.nvml, gi, 0).unwrap();
    }
    let all = f.node.mig_devices(0).unwrap();
    let hidden = aliquot_sim_node::gi_capability_minor(0, all[0].gi.id);
    std::fs::remove_file(f.dir.path().join(format!("root/dev/nvidia-caps/nvidia-cap{hidden}"))).unwrap();
    let parent = f.nvml.device_by_index(0).unwrap();
    assert_eq!(parent.mig_device_by_index(0).unwrap().uuid().unwrap(), all[1].uuid);
    assert!(matches!(parent.mig_device_by_index(1), Err(NvmlError::NotFound)));
    assert!(f.nvml.device_by_uuid(all[0].uuid.as_str()).is_err());
}

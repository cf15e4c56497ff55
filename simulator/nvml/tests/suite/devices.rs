//! Whole GPUs through the real wrapper: names, memory, processes, events, faults.
#![allow(unsafe_code, reason = "calls the C interface through its bindings")]

use std::time::Duration;

use crate::common::*;
use aliquot_sim_node::{Fault, NodeSpec, Pool, ProcessView};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{Brand, ComputeMode, EccCounter, MemoryError, TopologyLevel};
use nvml_wrapper::enums::device::{DeviceArchitecture, UsedGpuMemory};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;
use rstest::rstest;

const GIB: u64 = 1 << 30;

#[test]
fn the_library_has_the_soname_that_programs_look_for() {
    let f = fixture(&["T4"]);
    let bytes = std::fs::read(library_in(&f.dir)).unwrap();
    let wanted = b"\0libnvidia-ml.so.1\0";
    assert!(bytes.windows(wanted.len()).any(|w| w == wanted));
}

#[test]
fn the_system_says_what_the_node_was_made_with() {
    let spec =
        NodeSpec { driver_version: "535.104.05".into(), cuda_version: 12020, ..NodeSpec::new(["T4"; 3]) };
    let f = fixture_of(spec);
    assert_eq!(f.nvml.sys_driver_version().unwrap(), "535.104.05");
    assert_eq!(f.nvml.sys_cuda_driver_version().unwrap(), 12020);
    assert_eq!(f.nvml.device_count().unwrap(), 3);
    assert!(f.nvml.sys_nvml_version().unwrap().ends_with("535.104.05"));
}

#[rstest]
#[case("A30", "NVIDIA A30", DeviceArchitecture::Ampere, 24576, 3584)]
#[case("A100-40", "NVIDIA A100-SXM4-40GB", DeviceArchitecture::Ampere, 40960, 6912)]
#[case("A100-80", "NVIDIA A100-SXM4-80GB", DeviceArchitecture::Ampere, 81920, 6912)]
#[case("H100-80", "NVIDIA H100 80GB HBM3", DeviceArchitecture::Hopper, 81559, 16896)]
#[case("H200-141", "NVIDIA H200", DeviceArchitecture::Hopper, 143_771, 16896)]
#[case("B200-180", "NVIDIA B200", DeviceArchitecture::Blackwell, 183_359, 18944)]
#[case(
    "RTX-PRO-6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    DeviceArchitecture::Blackwell,
    97887,
    24064
)]
#[case("T4", "Tesla T4", DeviceArchitecture::Turing, 15360, 2560)]
#[case("L40S", "NVIDIA L40S", DeviceArchitecture::Ada, 46068, 18176)]
fn a_board_is_what_its_table_says(
    #[case] key: &str,
    #[case] name: &str,
    #[case] architecture: DeviceArchitecture,
    #[case] memory_mib: u64,
    #[case] cores: u32,
) {
    let f = fixture(&[key]);
    let device = f.nvml.device_by_index(0).unwrap();
    let board = aliquot_sim_node::board(key).unwrap();
    assert_eq!(device.name().unwrap(), name);
    assert_eq!(device.architecture().unwrap(), architecture);
    assert_eq!(device.num_cores().unwrap(), cores);
    let memory = device.memory_info().unwrap();
    assert_eq!(memory.total, memory_mib << 20);
    assert_eq!((memory.used, memory.reserved), (0, board.reserved_mib << 20));
    assert_eq!(memory.free, memory.total - memory.reserved);
    let capability = device.cuda_compute_capability().unwrap();
    assert_eq!((capability.major as u32, capability.minor as u32), board.compute_capability);
    assert_eq!(device.pci_info().unwrap().pci_device_id, board.pci_device_id);
    assert_eq!(device.memory_bus_width().unwrap(), board.memory_bus_width);
}

#[test]
fn brands_are_those_of_the_product_lines() {
    let f = fixture(&["T4", "H100-80", "RTX-PRO-6000"]);
    let brand = |i| f.nvml.device_by_index(i).unwrap().brand().unwrap();
    assert_eq!([brand(0), brand(1), brand(2)], [Brand::Tesla, Brand::Nvidia, Brand::NvidiaRTX]);
}

#[test]
fn a_gpu_is_found_by_each_of_its_names() {
    let f = fixture(&["T4", "A30", "L40S"]);
    for gpu in f.node.gpus() {
        let index = u32::try_from(gpu.index).unwrap();
        let device = f.nvml.device_by_index(index).unwrap();
        assert_eq!(device.uuid().unwrap(), gpu.uuid);
        assert_eq!(device.minor_number().unwrap(), gpu.minor);
        assert_eq!(device.serial().unwrap(), gpu.serial);
        let bus_id = device.pci_info().unwrap().bus_id;
        assert_eq!(bus_id, gpu.nvml_bus_id());
        assert_eq!(f.nvml.device_by_uuid(gpu.uuid.as_str()).unwrap().index().unwrap(), index);
        #[expect(deprecated, reason = "tools still call it")]
        let by_serial = f.nvml.device_by_serial(gpu.serial.as_str());
        assert_eq!(by_serial.unwrap().index().unwrap(), index);
        for id in [bus_id, gpu.bdf()] {
            assert_eq!(f.nvml.device_by_pci_bus_id(id).unwrap().index().unwrap(), index);
        }
    }
    assert!(matches!(f.nvml.device_by_uuid("GPU-nobody"), Err(NvmlError::NotFound)));
    assert!(matches!(f.nvml.device_by_index(3), Err(NvmlError::InvalidArg)));
}

#[test]
fn calls_before_init_and_after_shutdown_are_refused() {
    let f = fixture(&["T4"]);
    assert_eq!(nvml!(f.nvml, nvmlInit_v2()), SUCCESS);
    assert_eq!(nvml!(f.nvml, nvmlShutdown()), SUCCESS);
    let mut count = 0;
    assert_eq!(
        nvml!(f.nvml, nvmlDeviceGetCount_v2(&mut count)),
        SUCCESS,
        "the wrapper's own init still counts"
    );
    assert_eq!(nvml!(f.nvml, nvmlShutdown()), SUCCESS);
    let uninitialized = sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED;
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetCount_v2(&mut count)), uninitialized);
    assert_eq!(nvml!(f.nvml, nvmlShutdown()), uninitialized);
    assert_eq!(nvml!(f.nvml, nvmlInit_v2()), SUCCESS);
    assert_eq!(count, 1);
}

#[test]
fn without_a_node_the_driver_is_not_loaded() {
    let f = fixture(&["T4"]);
    nvml!(f.nvml, nvmlShutdown());
    std::fs::remove_file(f.dir.path().join("state")).unwrap();
    assert_eq!(nvml!(f.nvml, nvmlInit_v2()), sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
}

#[test]
fn null_pointers_and_foreign_handles_are_invalid_arguments() {
    let f = fixture(&["T4"]);
    let device = gpu(&f.nvml, 0);
    let mut number = 0;
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetIndex(device, std::ptr::null_mut())), INVALID_ARGUMENT);
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetIndex(std::ptr::null_mut(), &mut number)), INVALID_ARGUMENT);
    let foreign = 0x1234_5678 as sys::nvmlDevice_t;
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetIndex(foreign, &mut number)), INVALID_ARGUMENT);
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetUUID(device, std::ptr::null_mut(), 96)), INVALID_ARGUMENT);
    let mut text = [0; 96];
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetUUID(device, text.as_mut_ptr(), 10)), INSUFFICIENT_SIZE);
    assert_eq!(
        nvml!(f.nvml, nvmlDeviceGetUUID(device, text.as_mut_ptr(), 41)),
        SUCCESS,
        "40 bytes and the zero"
    );
}

#[test]
fn the_two_versions_of_memory_info_differ_in_what_is_reserved() {
    let f = fixture(&["H100-80"]);
    f.node.charge(Pool::whole(0), GIB).unwrap();
    let device = gpu(&f.nvml, 0);
    let mut v1 = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetMemoryInfo(device, &mut v1)), SUCCESS);
    let v2 = f.nvml.device_by_index(0).unwrap().memory_info().unwrap();
    assert_eq!(v2.used, GIB);
    assert_eq!(v1.used, GIB + v2.reserved);
    assert_eq!((v1.total, v1.free), (v2.total, v2.free));
    let mut old = sys::nvmlMemory_v2_t { version: 1, total: 0, reserved: 0, free: 0, used: 0 };
    assert_eq!(nvml!(f.nvml, nvmlDeviceGetMemoryInfo_v2(device, &mut old)), VERSION_MISMATCH);
}

#[test]
fn mps_clients_are_listed_as_such_and_among_all() {
    const EMPTY: sys::nvmlProcessInfo_t =
        sys::nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
    let f = fixture(&["A100-40"]);
    let device = f.nvml.device_by_index(0).unwrap();
    f.node.charge(Pool::whole(0), GIB).unwrap();
    let handle = gpu(&f.nvml, 0);
    let clients = || {
        let (mut count, mut rows) = (4, [EMPTY; 4]);
        let said =
            nvml!(f.nvml, nvmlDeviceGetMPSComputeRunningProcesses_v3(handle, &mut count, rows.as_mut_ptr()));
        assert_eq!(said, SUCCESS);
        rows[..count as usize].iter().map(|row| row.pid).collect::<Vec<_>>()
    };
    assert!(clients().is_empty());
    f.node.join_mps(7).unwrap();
    assert_eq!(clients(), [std::process::id()]);
    assert_eq!(device.running_compute_processes().unwrap().len(), 1);
}

#[test]
fn processes_appear_as_the_node_is_told_to_show_them() {
    let f = fixture(&["A100-40"]);
    let device = f.nvml.device_by_index(0).unwrap();
    assert!(device.running_compute_processes().unwrap().is_empty());
    f.node.charge(Pool::whole(0), GIB).unwrap();
    let own = std::process::id();
    let seen = || -> Vec<(u32, UsedGpuMemory)> {
        let all = device.running_compute_processes().unwrap();
        all.into_iter().map(|p| (p.pid, p.used_gpu_memory)).collect()
    };
    assert_eq!(seen(), [(own, UsedGpuMemory::Used(GIB))]);
    f.node.set_process_view(ProcessView::Own).unwrap();
    assert_eq!(seen(), [(own, UsedGpuMemory::Used(GIB))]);
    f.node.set_process_view(ProcessView::NotAvailable).unwrap();
    assert_eq!(seen(), [(own, UsedGpuMemory::Unavailable)]);
    f.node.set_process_view(ProcessView::Empty).unwrap();
    assert_eq!(seen(), []);
    assert_eq!(device.memory_info().unwrap().used, GIB, "whatever the list says");
    assert!(device.running_graphics_processes().unwrap().is_empty());
}

#[test]
fn a_list_that_does_not_fit_says_how_long_it_is() {
    let f = fixture(&["A100-40"]);
    f.node.charge(Pool::whole(0), GIB).unwrap();
    let device = gpu(&f.nvml, 0);
    let mut count = 0;
    let short =
        nvml!(f.nvml, nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, std::ptr::null_mut()));
    assert_eq!((short, count), (INSUFFICIENT_SIZE, 1));
    let empty = sys::nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
    let mut rows = [empty; 4];
    count = 4;
    assert_eq!(
        nvml!(f.nvml, nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, rows.as_mut_ptr())),
        SUCCESS
    );
    assert_eq!((count, rows[0].usedGpuMemory, rows[0].gpuInstanceId), (1, GIB, u32::MAX));
    let mut old = [sys::nvmlProcessInfo_v1_t { pid: 0, usedGpuMemory: 0 }; 2];
    count = 2;
    type Old = unsafe extern "C" fn(sys::nvmlDevice_t, *mut u32, *mut sys::nvmlProcessInfo_v1_t) -> u32;
    // SAFETY: the function has this type in NVML's header.
    let call =
        unsafe { f.nvml.lib().__library.get::<Old>(b"nvmlDeviceGetComputeRunningProcesses\0") }.unwrap();
    // SAFETY: the arguments are live values of the right types.
    assert_eq!(unsafe { call(device, &mut count, old.as_mut_ptr()) }, SUCCESS);
    assert_eq!((count, old[0].pid, old[0].usedGpuMemory), (1, std::process::id(), GIB));
}

#[test]
fn an_idle_gpu_has_no_samples() {
    let f = fixture(&["L40S", "H100-80:mig"]);
    let device = f.nvml.device_by_index(0).unwrap();
    assert_eq!(device.utilization_rates().unwrap().gpu, 0);
    assert!(matches!(device.process_utilization_stats(None), Err(NvmlError::NotFound)));
    let mig = f.nvml.device_by_index(1).unwrap();
    assert!(matches!(mig.utilization_rates(), Err(NvmlError::NotSupported)));
}

#[test]
fn work_shows_as_utilisation_of_the_gpu_and_of_its_process() {
    let f = fixture(&["L40S"]);
    f.node.charge(Pool::whole(0), GIB).unwrap();
    {
        use aliquot_sim_node::compute::{Slices, domain_key};
        let compute = f.node.compute().unwrap();
        let now = aliquot_sim_node::now_ns();
        let domain = compute.domain(domain_key(0, None), Slices::default(), now).unwrap();
        let index = compute.enter(domain, 0).unwrap();
        // Work without end, so that however slow this machine is, some of it lies in the last second.
        domain.tenant(index).set_demand(u64::MAX / 4);
    }
    std::thread::sleep(Duration::from_millis(20));
    let device = f.nvml.device_by_index(0).unwrap();
    let mut rates = device.utilization_rates().unwrap();
    while rates.gpu < 2 {
        rates = device.utilization_rates().unwrap();
    }
    let samples = device.process_utilization_stats(None).unwrap();
    assert_eq!((samples.len(), samples[0].pid), (1, std::process::id()));
    assert!(samples[0].sm_util >= 2 && samples[0].sm_util <= 100);
    let last = samples[0].timestamp;
    assert!(matches!(device.process_utilization_stats(last + 10_000_000_000), Err(NvmlError::NotFound)));
}

#[test]
fn modes_are_kept_by_the_node_and_seen_by_others() {
    let f = fixture(&["A100-40"]);
    let mut device = f.nvml.device_by_index(0).unwrap();
    assert_eq!(device.compute_mode().unwrap(), ComputeMode::Default);
    device.set_compute_mode(ComputeMode::ExclusiveProcess).unwrap();
    device.set_persistent(false).unwrap();
    let other = load(&f.dir);
    let seen = other.device_by_index(0).unwrap();
    assert_eq!(seen.compute_mode().unwrap(), ComputeMode::ExclusiveProcess);
    assert!(!seen.is_in_persistent_mode().unwrap());
    assert!(!seen.is_accounting_enabled().unwrap());
}

#[test]
fn xid_and_ecc_errors_reach_those_who_asked_for_them() {
    let f = fixture(&["H100-80", "H100-80"]);
    f.node.raise_xid(1, 31, None, None).unwrap();
    let set = f.nvml.create_event_set().unwrap();
    let device = f.nvml.device_by_index(1).unwrap();
    assert!(device.supported_event_types().unwrap().contains(EventTypes::CRITICAL_XID_ERROR));
    let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    let set = device.register_events(wanted, set).unwrap();
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)), "nothing from before");
    f.node.raise_xid(0, 13, None, None).unwrap();
    f.node.raise_ecc(1, false, 3).unwrap();
    f.node.raise_ecc(1, true, 2).unwrap();
    f.node.raise_xid(1, 94, Some(9), Some(0)).unwrap();
    let first = set.wait(60_000).unwrap();
    assert_eq!(first.event_type, EventTypes::DOUBLE_BIT_ECC_ERROR);
    assert_eq!(first.device.index().unwrap(), 1);
    let second = set.wait(60_000).unwrap();
    assert_eq!(second.event_type, EventTypes::CRITICAL_XID_ERROR);
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
    set.release_events().unwrap();
    let errors = |kind| device.total_ecc_errors(kind, EccCounter::Volatile).unwrap();
    assert_eq!((errors(MemoryError::Corrected), errors(MemoryError::Uncorrected)), (3, 2));
}

#[test]
fn the_data_of_an_event_names_xid_and_instances() {
    let f = fixture(&["H100-80"]);
    let mut set = std::ptr::null_mut();
    assert_eq!(nvml!(f.nvml, nvmlEventSetCreate(&mut set)), SUCCESS);
    assert_eq!(nvml!(f.nvml, nvmlDeviceRegisterEvents(gpu(&f.nvml, 0), 8, set)), SUCCESS);
    assert_eq!(nvml!(f.nvml, nvmlDeviceRegisterEvents(gpu(&f.nvml, 0), 1 << 40, set)), NOT_SUPPORTED);
    f.node.raise_xid(0, 94, Some(9), Some(2)).unwrap();
    // SAFETY: an all-zero value of this plain structure is valid.
    let mut data: sys::nvmlEventData_t = unsafe { std::mem::zeroed() };
    assert_eq!(nvml!(f.nvml, nvmlEventSetWait_v2(set, &mut data, 60_000)), SUCCESS);
    assert_eq!((data.eventType, data.eventData, data.gpuInstanceId, data.computeInstanceId), (8, 94, 9, 2));
    assert_eq!(nvml!(f.nvml, nvmlEventSetFree(set)), SUCCESS);
    assert_eq!(nvml!(f.nvml, nvmlEventSetWait_v2(set, &mut data, 0)), INVALID_ARGUMENT);
}

#[test]
fn a_gpu_off_the_bus_is_lost_to_every_call() {
    let f = fixture(&["T4", "T4"]);
    f.node.raise_xid(0, 79, None, None).unwrap();
    let device = f.nvml.device_by_index(0).unwrap();
    assert!(matches!(device.name(), Err(NvmlError::GpuLost)));
    assert!(matches!(device.memory_info(), Err(NvmlError::GpuLost)));
    assert!(f.nvml.device_by_index(1).unwrap().name().is_ok());
}

#[test]
fn a_fault_fails_the_nth_call_of_its_function_only() {
    let f = fixture(&["T4"]);
    f.node.add_fault(&Fault::fail("nvmlDeviceGetName", 2, 999)).unwrap();
    let device = f.nvml.device_by_index(0).unwrap();
    assert!(device.name().is_ok());
    assert!(device.uuid().is_ok());
    assert!(matches!(device.name(), Err(NvmlError::Unknown)));
    assert!(device.name().is_ok());
}

#[test]
fn init_itself_can_fail_on_request() {
    let f = fixture(&["T4"]);
    nvml!(f.nvml, nvmlShutdown());
    f.node.add_fault(&Fault::fail("nvmlInit_v2", 1, 9)).unwrap();
    assert_eq!(nvml!(f.nvml, nvmlInit_v2()), sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    let mut count = 0;
    assert_ne!(nvml!(f.nvml, nvmlDeviceGetCount_v2(&mut count)), SUCCESS);
    assert_eq!(nvml!(f.nvml, nvmlInit_v2()), SUCCESS);
}

#[test]
fn boards_of_one_kind_are_meshed_by_their_links() {
    let f = fixture(&["H100-80", "H100-80", "T4", "H100-80:mig"]);
    let device = |i| f.nvml.device_by_index(i).unwrap();
    // Dealt out in turn to the two others.
    assert!(device(0).link_wrapper_for(16).is_active().unwrap());
    assert!(!device(0).link_wrapper_for(17).is_active().unwrap(), "its other end is in MIG mode");
    assert!(matches!(device(0).link_wrapper_for(18).is_active(), Err(NvmlError::InvalidArg)));
    assert!(matches!(device(2).link_wrapper_for(0).is_active(), Err(NvmlError::NotSupported)));
    assert!(!device(3).link_wrapper_for(0).is_active().unwrap(), "not in MIG mode");
    assert_eq!(device(0).topology_common_ancestor(device(1)).unwrap(), TopologyLevel::Node);
    assert_eq!(device(0).topology_common_ancestor(device(2)).unwrap(), TopologyLevel::System);
    assert_eq!(device(2).cpu_affinity(1).unwrap(), [0xffff_ffff_0000_0000]);
    assert_eq!(device(0).cpu_affinity(2).unwrap(), [0xffff_ffff, 0]);
}

#[test]
fn only_gpus_with_device_nodes_are_seen() {
    let f = fixture(&["T4", "A30", "L40S"]);
    if !f.node.sight().dev().starts_with(f.dir.path()) {
        eprintln!("skipped: this machine or environment has device nodes of its own");
        return;
    }
    std::fs::remove_file(f.dir.path().join("root/dev/nvidia1")).unwrap();
    let seen: Vec<String> = (0..f.nvml.device_count().unwrap())
        .map(|i| f.nvml.device_by_index(i).unwrap().name().unwrap())
        .collect();
    assert_eq!(seen, ["Tesla T4", "NVIDIA L40S"]);
    assert_eq!(f.nvml.device_by_index(1).unwrap().minor_number().unwrap(), 2);
    assert!(f.nvml.device_by_uuid(f.node.gpus()[1].uuid.as_str()).is_err());
}

#[test]
fn threads_can_call_at_the_same_time() {
    let f = fixture(&["H100-80"; 8]);
    std::thread::scope(|scope| {
        for index in 0..8 {
            let f = &f;
            scope.spawn(move || {
                for _ in 0..100 {
                    let device = f.nvml.device_by_index(index).unwrap();
                    assert_eq!(device.minor_number().unwrap(), index);
                    assert_eq!(device.memory_info().unwrap().used, 0);
                }
            });
        }
    });
}

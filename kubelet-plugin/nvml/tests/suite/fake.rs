//! The fake passes the contract, and its own promises beside it.

use aliquot_model::{GpuInfo, LiveMig, Placement};
use aliquot_nvml::contract::{self, TestNode};
use aliquot_nvml::fake::{FakeGpus, FaultKind, Killed, a30, a100_40, h100_80, t4};
use aliquot_nvml::{EventKind, GpuProcess, Gpus, NvmlCode, ProcessKind, TimeSlice};
use rstest::rstest;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

struct FakeNode(FakeGpus);

impl TestNode for FakeNode {
    fn gpus(&self) -> Arc<dyn Gpus> {
        Arc::new(self.0.clone())
    }
    fn start_process(&self, gpu: &GpuInfo, instance: Option<&LiveMig>, bytes: u64) -> u32 {
        let process = GpuProcess {
            pid: 4711,
            name: None,
            kind: ProcessKind::Compute,
            memory_bytes: Some(bytes),
            gpu_instance: instance.map(|mig| mig.gpu_instance),
            compute_instance: instance.and_then(|mig| mig.compute_instance),
        };
        self.0.start_process(&gpu.uuid, process);
        4711
    }
    fn stop_process(&self, _: &GpuInfo, _: Option<&LiveMig>, pid: u32) {
        self.0.stop_process(pid);
    }
    fn fail_next(&self, function: &str, code: NvmlCode) {
        self.0.fault(function, 1, FaultKind::Fail(code));
    }
    fn raise_xid(&self, gpu: &GpuInfo, xid: u64, instance: Option<u32>) {
        self.0.raise(&gpu.uuid, EventKind::Xid(xid), instance);
    }
    fn lose(&self, gpu: &GpuInfo) {
        self.0.lose(&gpu.uuid);
    }
    fn reboot(&self) {
        self.0.reboot();
    }
}

fn node() -> FakeNode {
    FakeNode(FakeGpus::new([h100_80(0), a100_40(1, true), t4(2)]))
}

#[test]
fn the_fake_keeps_the_contract() {
    for (name, clause) in contract::ALL {
        println!("{name}");
        clause(&node());
    }
}

#[rstest]
#[case::before_the_gpu_instance("nvmlDeviceCreateGpuInstanceWithPlacement", FaultKind::KillBefore, 0, false)]
#[case::after_the_gpu_instance("nvmlDeviceCreateGpuInstanceWithPlacement", FaultKind::KillAfter, 1, false)]
#[case::before_the_compute_instance("nvmlGpuInstanceCreateComputeInstance", FaultKind::KillBefore, 1, false)]
#[case::after_the_compute_instance("nvmlGpuInstanceCreateComputeInstance", FaultKind::KillAfter, 1, true)]
fn a_death_in_the_middle_of_a_create_leaves_what_the_hardware_would_have(
    #[case] function: &str,
    #[case] kind: FaultKind,
    #[case] instances: usize,
    #[case] complete: bool,
) {
    let FakeNode(gpus) = node();
    let info = gpus.inventory().unwrap().gpus.remove(1);
    gpus.fault(function, 1, kind);
    let died = catch_unwind(AssertUnwindSafe(|| gpus.create_mig(&info.uuid, 19, Placement::new(0, 1))));
    assert!(died.unwrap_err().is::<Killed>());
    let live = gpus.live_migs(&info.uuid).unwrap();
    assert_eq!(live.len(), instances);
    assert!(live.iter().all(|mig| mig.uuid.is_some() == complete));
}

#[test]
fn a_fault_hits_the_call_that_it_names_and_no_other() {
    let FakeNode(gpus) = node();
    gpus.fault("nvmlDeviceGetHandleByIndex_v2", 2, FaultKind::Fail(NvmlCode::UNKNOWN));
    let inventory = gpus.inventory().unwrap();
    assert_eq!(inventory.unreadable.iter().map(|u| u.index).collect::<Vec<_>>(), [1]);
    assert_eq!(gpus.inventory().unwrap().unreadable, []);
    assert_eq!(gpus.calls().iter().filter(|f| **f == "nvmlDeviceGetCount_v2").count(), 2);
}

#[test]
#[should_panic(expected = "no such fault")]
fn a_fault_in_a_function_that_the_fake_does_not_have_is_refused() {
    node().0.fault("nvmlDeviceGetHandle", 1, FaultKind::KillBefore);
}

#[test]
fn an_a30_has_four_slices() {
    let gpus = FakeGpus::new([a30(3, true)]);
    let info = gpus.inventory().unwrap().gpus.remove(0);
    assert_eq!((info.minor, info.index, info.memory_slices()), (3, 0, 4));
    gpus.create_mig(&info.uuid, 5, Placement::new(2, 2)).unwrap();
    assert!(gpus.create_mig(&info.uuid, 0, Placement::new(0, 4)).is_err());
    gpus.create_mig(&info.uuid, 5, Placement::new(0, 2)).unwrap();
    gpus.set_time_slice(&info.uuid, TimeSlice::Long).unwrap();
    assert_eq!(gpus.time_slice(&info.uuid), Some(TimeSlice::Long));
}

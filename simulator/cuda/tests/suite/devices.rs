//! Devices: which a process sees, and what they say of themselves.
#![allow(unsafe_code, reason = "the tests call a C library")]

use crate::common::{Cuda, GIB, MIB, TestNode, at, check, on, role};
use aliquot_sim_node::{GpuSpec, NodeSpec};

fn name(cuda: &Cuda, device: u64) -> String {
    let mut buffer = [0_u8; 64];
    cuda.ok("cuDeviceGetName", &[buffer.as_mut_ptr() as u64, 64, device]);
    let end = buffer.iter().position(|b| *b == 0).unwrap();
    String::from_utf8(buffer[..end].to_vec()).unwrap()
}

fn uuid(cuda: &Cuda, function: &str, device: u64) -> String {
    let mut bytes = [0_u8; 16];
    cuda.ok(function, &[bytes.as_mut_ptr() as u64, device]);
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn plain(uuid: &str) -> String {
    uuid.split_once('-').unwrap().1.replace('-', "")
}

fn count(cuda: &Cuda) -> i32 {
    let mut count = -1;
    cuda.ok("cuDeviceGetCount", &[at(&mut count)]);
    count
}

fn attribute(cuda: &Cuda, attribute: u64, device: u64) -> i32 {
    let mut value = i32::MIN;
    cuda.ok("cuDeviceGetAttribute", &[at(&mut value), attribute, device]);
    value
}

#[test]
fn a_machine_without_a_node_has_no_device() {
    if role().is_some() {
        let cuda = Cuda::load();
        assert_eq!(cuda.call("cuInit", &[0]), 100);
        let mut version = 0;
        cuda.ok("cuDriverGetVersion", &[at(&mut version)]);
        assert!(version >= 13_000);
        return;
    }
    let node = TestNode::of(&["T4"]);
    let mut command = node.command("only");
    command.env("ALIQUOT_SIM_NODE", node.dir().join("nowhere"));
    check(command);
}

#[test]
fn a_board_describes_itself() {
    on(&["H100-80", "T4"], || {
        let cuda = Cuda::start();
        assert_eq!(count(&cuda), 2);
        assert!(name(&cuda, 0).contains("H100"), "{}", name(&cuda, 0));
        assert!(name(&cuda, 1).contains("T4"));
        assert_eq!((attribute(&cuda, 75, 0), attribute(&cuda, 76, 0)), (9, 0));
        assert_eq!((attribute(&cuda, 75, 1), attribute(&cuda, 76, 1)), (7, 5));
        assert_eq!(attribute(&cuda, 16, 0), 132);
        let mut value = 0;
        assert_eq!(cuda.call("cuDeviceGetAttribute", &[at(&mut value), 0, 0]), 1);
        assert_eq!(cuda.call("cuDeviceGetAttribute", &[at(&mut value), 4000, 0]), 1);
        // Every attribute that a header names has a value.
        for number in 1..=161 {
            attribute(&cuda, number, 0);
        }
    });
}

#[test]
fn bus_ids_lead_back_to_their_device() {
    on(&["A100-80", "A100-80"], || {
        let cuda = Cuda::start();
        for device in 0..2_u64 {
            let mut buffer = [0_u8; 16];
            cuda.ok("cuDeviceGetPCIBusId", &[buffer.as_mut_ptr() as u64, 16, device]);
            let mut found = -1;
            cuda.ok("cuDeviceGetByPCIBusId", &[at(&mut found), buffer.as_ptr() as u64]);
            assert_eq!(found, i32::try_from(device).unwrap());
        }
    });
}

#[test]
fn only_gpus_with_a_device_node_are_seen() {
    if role().is_some() {
        let cuda = Cuda::start();
        assert_eq!(count(&cuda), 1);
        assert_eq!(uuid(&cuda, "cuDeviceGetUuid", 0), std::env::var(crate::common::ARGUMENT).unwrap());
        return;
    }
    let node = TestNode::of(&["T4", "T4", "T4"]);
    std::fs::remove_file(node.dir().join("root/dev/nvidia0")).unwrap();
    std::fs::remove_file(node.dir().join("root/dev/nvidia2")).unwrap();
    let mut command = node.command("only");
    command.env(crate::common::ARGUMENT, plain(&node.node.gpus()[1].uuid));
    check(command);
}

#[test]
fn without_nvidia_uvm_no_program_starts() {
    if let Some(role) = role() {
        assert_eq!(Cuda::load().call("cuInit", &[0]), if role == "without" { 999 } else { 0 });
        return;
    }
    let node = TestNode::new(&NodeSpec { late_uvm: true, ..NodeSpec::new(["T4"]) });
    node.run("without");
    node.node.load_uvm().unwrap();
    node.run("with");
}

#[test]
fn while_the_driver_is_not_loaded_there_is_no_device() {
    if let Some(role) = role() {
        assert_eq!(Cuda::load().call("cuInit", &[0]), if role == "without" { 100 } else { 0 });
        return;
    }
    let node = TestNode::of(&["T4"]);
    node.node.unload_module(false).unwrap();
    node.run("without");
    node.node.load_module(None).unwrap();
    node.run("with");
}

#[test]
fn the_visible_devices_can_be_chosen_by_index_and_uuid() {
    if role().is_some() {
        let cuda = Cuda::start();
        let seen: Vec<String> =
            (0..count(&cuda)).map(|d| uuid(&cuda, "cuDeviceGetUuid_v2", d as u64)).collect();
        assert_eq!(seen.join(","), std::env::var(crate::common::ARGUMENT).unwrap());
        return;
    }
    let node = TestNode::of(&["T4", "T4", "T4"]);
    let uuids: Vec<String> = node.node.gpus().iter().map(|g| g.uuid.clone()).collect();
    let see = |list: &str, expected: &[usize]| {
        let mut command = node.command("only");
        let expected: Vec<String> = expected.iter().map(|i| plain(&uuids[*i])).collect();
        command.env("CUDA_VISIBLE_DEVICES", list).env(crate::common::ARGUMENT, expected.join(","));
        check(command);
    };
    see("2,0", &[2, 0]);
    see(&format!("{},1", uuids[2]), &[2, 1]);
    see(&uuids[1][..12], &[1]);
}

#[test]
fn a_mig_device_is_a_device_with_its_instances_memory() {
    if role().is_some() {
        let cuda = Cuda::with_context();
        assert_eq!(count(&cuda), 1);
        assert!(name(&cuda, 0).ends_with("MIG 2g.20gb"), "{}", name(&cuda, 0));
        let expected = std::env::var(crate::common::ARGUMENT).unwrap();
        assert_eq!(
            format!("{} {}", uuid(&cuda, "cuDeviceGetUuid", 0), uuid(&cuda, "cuDeviceGetUuid_v2", 0)),
            expected
        );
        assert!(attribute(&cuda, 16, 0) < 60);
        let (free, total) = cuda.info();
        assert!(total > 19 * GIB && total < 20 * GIB, "{total}");
        cuda.alloc(free / (2 * MIB) * (2 * MIB));
        let mut pointer = 0_u64;
        assert_eq!(cuda.call("cuMemAlloc_v2", &[at(&mut pointer), 2 * MIB]), 2);
        return;
    }
    let spec = NodeSpec { gpus: vec![GpuSpec::new("H100-80").with_mig()], ..NodeSpec::new(["H100-80"]) };
    let node = TestNode::new(&spec);
    let profile = |name| node.node.gpu(0).unwrap().board.profile_by_name(name).unwrap().id;
    let mut made = Vec::new();
    for name in ["1g.10gb", "2g.20gb"] {
        let gi = node.node.create_gi(0, profile(name), None).unwrap();
        let slices = gi.profile.slices;
        let ci_profile =
            aliquot_sim_node::board::ci_profiles(slices).iter().find(|p| p.slices == slices).unwrap();
        node.node.create_ci(0, gi.id, gi.serial, ci_profile.id, None).unwrap();
        made.push(gi);
    }
    let devices = node.node.mig_devices(0).unwrap();
    let wanted = devices.iter().find(|d| d.name == "2g.20gb").unwrap();
    let mut command = node.command("only");
    let parent = plain(&node.node.gpus()[0].uuid);
    command.env("CUDA_VISIBLE_DEVICES", &wanted.uuid);
    command.env(crate::common::ARGUMENT, format!("{parent} {}", plain(&wanted.uuid)));
    check(command);
    // The other instance has lost nothing: nobody is left, and memory is the instance's own.
    let other = aliquot_sim_node::Pool::instance(0, made[0].id);
    assert_eq!(node.node.memory(other).unwrap().used, 0);
}

#[test]
fn a_child_of_a_process_with_a_driver_has_none() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let before = cuda.free_bytes();
        // SAFETY: the child only calls the library and _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let codes = [cuda.call("cuInit", &[0]), cuda.call("cuCtxGetCurrent", &[at(&mut 0_u64)])];
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(if codes == [3, 3] { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: waits for the child that was made above.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        assert_eq!(cuda.free_bytes(), before, "the child's end took nothing of the parent's");
    });
}

#[test]
fn after_exit_has_begun_the_driver_is_gone() {
    static ENTRY: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    extern "C" fn late() {
        let code = crate::common::call_at(ENTRY.load(std::sync::atomic::Ordering::SeqCst), &[0]);
        // SAFETY: ends the process with the answer.
        unsafe { libc::_exit(if code == 4 { 0 } else { 77 }) };
    }
    on(&["T4"], || {
        // Handlers run in reverse order: this one after the driver's, which comes with cuInit.
        // SAFETY: a plain function.
        unsafe { libc::atexit(late) };
        let cuda = Cuda::with_context();
        ENTRY.store(cuda.entry("cuCtxSynchronize"), std::sync::atomic::Ordering::SeqCst);
        std::mem::forget(cuda);
        std::process::exit(1);
    });
}

#[test]
fn the_administrators_compute_mode_holds() {
    if role().is_some() {
        let cuda = Cuda::start();
        let context = || cuda.call("cuDevicePrimaryCtxRetain", &[at(&mut 0_u64), 0]);
        return crate::common::serve(|line| match line {
            "open" => context().to_string(),
            "close" => cuda.call("cuDevicePrimaryCtxRelease_v2", &[0]).to_string(),
            _ => attribute(&cuda, 20, 0).to_string(),
        });
    }
    let node = TestNode::of(&["T4"]);
    let (mut a, mut b) = (node.spawn("a"), node.spawn("b"));
    node.node.set_compute_mode(0, 3).unwrap();
    assert_eq!((a.ask("mode"), a.ask("open"), b.ask("open")), ("3".into(), "0".into(), "46".into()));
    assert_eq!((a.ask("close"), b.ask("open")), ("0".into(), "0".into()));
    node.node.set_compute_mode(0, 2).unwrap();
    assert_eq!(a.ask("open"), "46");
    a.finish();
    b.finish();
}

#[test]
fn a_reboot_of_the_node_ends_what_processes_had() {
    if role().is_some() {
        let cuda = Cuda::with_context();
        let kernel = cuda.kernel("aliquot-sim-module 1\nkernel k ms=100000", "k");
        return crate::common::serve(|line| match line {
            "launch" => cuda.launch(kernel, 0).to_string(),
            "wait" => cuda.call("cuCtxSynchronize", &[]).to_string(),
            _ => cuda.call("cuMemAlloc_v2", &[at(&mut 0_u64), MIB]).to_string(),
        });
    }
    let node = TestNode::of(&["T4"]);
    let mut process = node.spawn("only");
    assert_eq!((process.ask("launch"), process.ask("alloc")), ("0".into(), "0".into()));
    aliquot_sim_node::reboot(node.dir()).unwrap();
    assert_eq!((process.ask("wait"), process.ask("alloc")), ("999".into(), "999".into()));
    process.finish();
}

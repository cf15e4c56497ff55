//! Which device nodes containers get. They are named by the driver's numbers, whatever is in a `/dev`: the nodes of
//! these tests have none at all.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_cdi::{DeviceNode, QualifiedName};
use aliquot_kubelet_plugin::prepare::Prepared;
use aliquot_nvml::Gpus;
use aliquot_nvml::fake::{FakeGpus, h100_80};
use common::container::{Bundle, edits, runcs};
use common::{DEVICES, DRIVER, World, now, request};
use std::fs;

/// A node without a single device node, as an agent's container may see it.
fn world() -> World {
    let world = World::new(FakeGpus::new([h100_80(0), h100_80(1)]));
    assert!(!world.root().join("dev").exists());
    world
}

/// What the kernel lists from now on.
fn lists(world: &World, without: &str) {
    let lines = DEVICES.lines().filter(|line| line.split_whitespace().last() != Some(without));
    fs::write(world.proc().join("devices"), lines.collect::<Vec<_>>().join("\n")).unwrap();
}

fn mig_minors(world: &World) -> std::path::PathBuf {
    world.proc().join("driver/nvidia-caps/mig-minors")
}

/// Path, major and minor of the nodes that a container gets, by path.
fn nodes(world: &World, uid: &str, prepared: &[Prepared]) -> Vec<(String, i64, i64)> {
    let spec = world.node().machine.cdi.read(&format!("{DRIVER}-claim-{uid}")).unwrap().unwrap();
    let names: Vec<QualifiedName> =
        prepared.iter().flat_map(|device| &device.cdi).map(|id| id.parse().unwrap()).collect();
    let edits = aliquot_cdi::resolve(&[spec], &names).unwrap();
    let number = |node: DeviceNode| {
        assert_eq!((node.device_type.as_deref(), &node.host_path), (Some("c"), &None), "{node:?}");
        (node.path, node.major.unwrap(), node.minor.unwrap())
    };
    let mut nodes: Vec<_> = edits.device_nodes.into_iter().map(number).collect();
    nodes.sort();
    nodes.dedup();
    nodes
}

fn listed(nodes: &[(String, i64, i64)]) -> Vec<(&str, i64, i64)> {
    nodes.iter().map(|(path, major, minor)| (path.as_str(), *major, *minor)).collect()
}

#[test]
fn a_partition_has_its_devices_by_number_though_no_dev_has_a_node() {
    let world = world();
    // As the driver numbers them: 135 for each GPU, 9 for each instance.
    let line = |gpu: u32, gi: u32| {
        let cap = 3 + gpu * 135 + gi * 9;
        format!("gpu{gpu}/gi{gi}/access {cap}\ngpu{gpu}/gi{gi}/ci0/access {}\n", cap + 1)
    };
    let all: String = (0..2).flat_map(|gpu| (0..15).map(move |gi| line(gpu, gi))).collect();
    fs::write(mig_minors(&world), format!("config 1\nmonitor 2\n{all}")).unwrap();
    let prepared =
        world.node().prepare(&request("c-1", &[("a", "gpu-1-mig-1g10gb-19-6")]), false, now()).unwrap();
    let gi = i64::from(world.gpus.live_migs(&h100_80(1).uuid).unwrap()[0].gpu_instance);
    let cap = 3 + 135 + gi * 9;
    let (first, second) =
        (format!("/dev/nvidia-caps/nvidia-cap{cap}"), format!("/dev/nvidia-caps/nvidia-cap{}", cap + 1));
    let got = nodes(&world, "c-1", &prepared);
    let wanted = [
        (first.as_str(), 235, cap),
        (second.as_str(), 235, cap + 1),
        ("/dev/nvidia-uvm", 510, 0),
        ("/dev/nvidia-uvm-tools", 510, 1),
        ("/dev/nvidia1", 195, 1),
        ("/dev/nvidiactl", 195, 255),
    ];
    assert_eq!(listed(&got), wanted);
}

#[test]
fn a_partition_without_a_capability_is_refused_and_nothing_stays() {
    let world = world();
    fs::write(mig_minors(&world), "config 1\nmonitor 2\n").unwrap();
    let request = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]);
    let error = world.node().prepare(&request, false, now()).unwrap_err().to_string();
    assert!(error.contains("mig-minors") && error.contains("reload the NVIDIA driver"), "{error}");
    world.assert_clean();
}

#[test]
fn without_capability_devices_no_partition_is_even_begun() {
    let world = world();
    lists(&world, "nvidia-caps");
    let calls = |world: &World| world.gpus.calls().iter().filter(|call| call.contains("SetMigMode")).count();
    let partition = request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]);
    let error = world.node().prepare(&partition, false, now()).unwrap_err().to_string();
    assert!(error.contains("nvidia-caps"), "{error}");
    assert_eq!(calls(&world), 0, "the GPU is left alone");
    world.assert_clean();
    world.node().prepare(&request("c-2", &[("g", "gpu-0")]), false, now()).unwrap();
}

#[test]
fn a_claim_waits_for_nvidia_uvm_and_has_it_when_it_comes() {
    let world = world();
    let node = world.node();
    lists(&world, "nvidia-uvm");
    let request = request("c-1", &[("g", "gpu-0")]);
    let error = node.prepare(&request, false, now()).unwrap_err().to_string();
    assert!(error.contains("nvidia-modprobe -c 0 -u"), "{error}");
    world.assert_clean();
    // The module takes the number that is free when it is loaded.
    fs::write(world.proc().join("devices"), DEVICES.replace("510", "507")).unwrap();
    let prepared = node.prepare(&request, false, now()).unwrap();
    let got = nodes(&world, "c-1", &prepared);
    assert!(listed(&got).contains(&("/dev/nvidia-uvm", 507, 0)), "{got:?}");
}

#[test]
fn without_the_driver_nothing_is_prepared() {
    let world = world();
    fs::write(world.proc().join("devices"), "Character devices:\n  1 mem\n").unwrap();
    let error = world.node().prepare(&request("c-1", &[("g", "gpu-0")]), false, now()).unwrap_err();
    assert!(error.to_string().contains("the NVIDIA driver is not loaded"), "{error}");
    world.assert_clean();
}

#[test]
fn an_admin_is_shown_what_can_be_opened_and_nothing_else() {
    let world = world();
    world.node().prepare(&request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]), false, now()).unwrap();
    let caps = |uid: &str| {
        let prepared = world.node().prepare(&request(uid, &[("m", "gpu-0-admin")]), false, now()).unwrap();
        nodes(&world, uid, &prepared).iter().filter(|(path, ..)| path.contains("nvidia-cap")).count()
    };
    assert_eq!(caps("c-2"), 3, "the monitor and the partition's two");
    fs::write(mig_minors(&world), "config 1\nmonitor 2\n").unwrap();
    assert_eq!(caps("c-3"), 1, "the monitor");
}

#[test]
fn a_spec_of_an_earlier_release_stays_until_it_is_written_again() {
    let world = world();
    let claim = request("c-1", &[("g", "gpu-0")]);
    let prepared = world.node().prepare(&claim, false, now()).unwrap();
    let (cdi, name) = (world.node().machine.cdi, format!("{DRIVER}-claim-c-1"));
    // As that release wrote it: paths alone.
    let mut old = cdi.read(&name).unwrap().unwrap();
    for node in old.devices.iter_mut().flat_map(|device| &mut device.container_edits.device_nodes) {
        let host = format!("/driver{}", node.path);
        *node =
            DeviceNode { permissions: Some("rw".into()), ..DeviceNode::from_host(node.path.clone(), host) };
    }
    cdi.write(&name, &old).unwrap();
    world.node().recover().unwrap();
    assert_eq!(cdi.read(&name).unwrap().unwrap(), old, "a start changes nothing for containers that run");
    assert_eq!(world.node().prepare(&claim, false, now()).unwrap(), prepared);
    assert!(listed(&nodes(&world, "c-1", &prepared)).contains(&("/dev/nvidia0", 195, 0)));
}

#[test]
fn a_real_runtime_makes_the_nodes_of_a_partition_that_are_nowhere_on_the_host() {
    let world = world();
    let node = world.node();
    let prepared = node.prepare(&request("c-1", &[("a", "gpu-0-mig-1g10gb-19-6")]), false, now()).unwrap();
    for runc in runcs("a partition's device nodes") {
        let mut bundle = Bundle::new(&["stat"]);
        bundle.edits = edits(&node, "c-1", &prepared);
        let wanted: Vec<String> = nodes(&world, "c-1", &prepared)
            .into_iter()
            .map(|(path, major, minor)| format!("character special file {major:x}:{minor:x} {path}"))
            .collect();
        assert_eq!(wanted.len(), 6);
        let paths = wanted.iter().filter_map(|line| line.split(' ').next_back());
        let args: Vec<&str> = ["/bin/stat", "-c", "%F %t:%T %n"].into_iter().chain(paths).collect();
        let output = bundle.run(&runc, &args, "/");
        assert!(output.status.success(), "{runc:?}: {output:?}");
        let made = String::from_utf8(output.stdout).unwrap();
        assert_eq!(made.lines().collect::<Vec<_>>(), wanted, "{runc:?}");
    }
}

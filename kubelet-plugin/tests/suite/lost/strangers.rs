//! Whose a process on the GPU of a claim without a record is.

use super::common::{World, now, request};
use super::{lose, share, spec, world};
use aliquot_kubelet_plugin::prepare::{Node, Unaccounted};
use aliquot_model::GpuUuid;
use aliquot_nvml::fake::h100_80;
use aliquot_nvml::{GpuProcess, ProcessKind};
use std::collections::BTreeSet;
use std::fs;

const POD: &str = "0a1b2c3d-1111-2222-3333-444455556666";

fn start(world: &World, gpu: &GpuUuid, pid: u32, pod: Option<&str>) {
    let kind = ProcessKind::Compute;
    let process =
        GpuProcess { pid, name: None, kind, memory_bytes: None, gpu_instance: None, compute_instance: None };
    world.gpus.start_process(gpu, process);
    if let Some(pod) = pod {
        let dir = world.proc().join(pid.to_string());
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("cgroup"), format!("0::/kubepods/pod{pod}/{}", "ab".repeat(32))).unwrap();
    }
}

/// Two shares of gpu-1, one of which has its record.
fn two(change: impl FnOnce(&World)) -> (World, Node, Unaccounted) {
    let world = world();
    let node = world.node();
    for claim in [share("c-lost"), share("c-known"), request("c-whole", &[("g", "gpu-2")])] {
        node.prepare(&claim, false, now()).unwrap();
    }
    lose(&world);
    change(&world);
    let node = world.node();
    node.recover().unwrap();
    node.rebuild(&share("c-known"), now()).unwrap();
    node.rebuild(&request("c-whole", &[("g", "gpu-2")]), now()).unwrap();
    let mut lost = node.overview().unwrap().0.unaccounted;
    assert_eq!(lost.len(), 1);
    (world, node, lost.pop().unwrap())
}

#[test]
fn a_neighbour_with_a_record_is_no_stranger_on_a_shared_gpu() {
    let (world, node, lost) = two(|_| {});
    let known = BTreeSet::from([POD.to_owned()]);
    assert!(!node.has_strangers(&lost, &known));
    start(&world, &h100_80(1).uuid, 11, Some(POD));
    assert!(!node.has_strangers(&lost, &known));
    assert!(node.has_strangers(&lost, &BTreeSet::new()), "of a pod that is not known");
    start(&world, &h100_80(1).uuid, 12, None);
    assert!(node.has_strangers(&lost, &known), "of nobody knows whom");
}

#[test]
fn what_a_spec_that_cannot_be_read_gives_may_be_in_use_on_any_gpu_that_nobody_known_holds_whole() {
    let (world, node, lost) =
        two(|world| fs::write(world.cdi().join(format!("{}.json", spec("c-lost"))), "{").unwrap());
    let known = BTreeSet::from([POD.to_owned()]);
    start(&world, &h100_80(2).uuid, 11, None);
    start(&world, &h100_80(1).uuid, 12, Some(POD));
    assert!(!node.has_strangers(&lost, &known));
    start(&world, &h100_80(0).uuid, 13, None);
    assert!(node.has_strangers(&lost, &known));
    world.gpus.stop_process(13);
    world.gpus.lose(&h100_80(0).uuid);
    assert!(node.has_strangers(&lost, &known), "one that does not answer");
}

#[test]
fn of_what_only_the_api_knows_the_devices_are_looked_at() {
    let (world, node, lost) = two(|_| {});
    let lost = Unaccounted { named: Vec::new(), ..lost };
    assert!(!node.has_strangers(&lost, &BTreeSet::new()));
    start(&world, &h100_80(0).uuid, 11, None);
    assert!(!node.has_strangers(&lost, &BTreeSet::new()));
    start(&world, &h100_80(1).uuid, 12, None);
    assert!(node.has_strangers(&lost, &BTreeSet::new()));
}

//! What containers get for graphics, on the tree of a simulated node.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::prepare::Node;
use aliquot_nvml::fake::{FakeGpus, a100_40, h100_80};
use aliquot_sim_node::NodeSpec;
use common::container::{Bundle, edits, runcs, with_limiter};
use common::{World, now, request};

/// Two GPUs, and a node with what the kernel shows of such.
fn world() -> World {
    let world = World::new(FakeGpus::new([h100_80(0), a100_40(1, false)]));
    let simulated = tempfile::tempdir_in(world.root().parent().unwrap()).unwrap();
    aliquot_sim_node::create(simulated.path(), &NodeSpec::new(["H100-80", "A100-40"])).unwrap();
    std::fs::rename(simulated.path().join("root/sys"), world.root().join("sys")).unwrap();
    world
}

/// A node whose containers draw.
fn drawing(world: &World, capabilities: &str) -> Node {
    let mut node = world.node();
    node.machine.site.capabilities = capabilities.parse().unwrap();
    node
}

/// The DRM nodes of a claim's CDI spec, by the names of its devices.
fn drm(node: &Node, devices: &[(&str, &str)]) -> Vec<String> {
    node.prepare(&request("c", devices), false, now()).unwrap();
    let name = aliquot_kubelet_plugin::edits::spec_name(&node.machine.site.driver, "c");
    let spec = node.machine.cdi.read(&name).unwrap().unwrap();
    node.unprepare("c").unwrap();
    let nodes = spec.devices.iter().flat_map(|device| &device.container_edits.device_nodes);
    let drm = nodes.filter(|node| node.path.starts_with("/dev/dri"));
    drm.map(|node| format!("{} {}:{}", node.path, node.major.unwrap(), node.minor.unwrap())).collect()
}

#[test]
fn a_claim_gets_the_drm_nodes_of_its_own_gpus_where_it_draws() {
    let world = world();
    let (card, render) = ("/dev/dri/card2 123:2", "/dev/dri/renderD129 123:129");
    let none = Vec::<String>::new();
    assert_eq!(drm(&drawing(&world, "compute,utility,video"), &[("r", "gpu-1")]), none);
    assert_eq!(drm(&drawing(&world, "compute,graphics"), &[("r", "gpu-1")]), [card, render]);
    let both = drm(&drawing(&world, "display"), &[("a", "gpu-0"), ("b", "gpu-1")]);
    assert_eq!(both, ["/dev/dri/card1 123:1", "/dev/dri/renderD128 123:128", card, render]);
    assert_eq!(drm(&drawing(&world, "all"), &[("r", "gpu-1-share")]), [render], "no screen of all");
    assert_eq!(drm(&drawing(&world, "all"), &[("r", "gpu-0-mig-1g10gb-19-0")]), none);
    std::fs::remove_dir_all(world.root().join("sys/bus")).unwrap();
    assert_eq!(drm(&drawing(&world, "all"), &[("r", "gpu-1")]), none, "nvidia-drm is not loaded");
}

#[test]
fn a_container_finds_drm_nodes_by_the_gpus_address() {
    let world = world();
    for (number, runc) in runcs("links to DRM nodes").iter().enumerate() {
        let mut bundle = Bundle::new(&["readlink"]);
        let node = with_limiter(drawing(&world, "graphics"), bundle.folder.path());
        let uid = format!("c-{number}");
        let prepared = node.prepare(&request(&uid, &[("r", "gpu-1")]), false, now()).unwrap();
        bundle.edits = edits(&node, &uid, &prepared);
        for (kind, want) in [("card", "/dev/dri/card2\n"), ("render", "/dev/dri/renderD129\n")] {
            let link = format!("/dev/dri/by-path/pci-0000:1f:00.0-{kind}");
            let output = bundle.run(runc, &["/bin/readlink", "-e", &link], "/");
            assert!(output.status.success(), "{runc:?}: {output:?}");
            assert_eq!(String::from_utf8_lossy(&output.stdout), want, "{runc:?}: {output:?}");
        }
        node.unprepare(&uid).unwrap();
    }
}

//! What a real driver does and a simpler stand-in would not, with the shipped binary and the real NVML wrapper.

use super::{Sim, noted, tainted};
use crate::common::cluster::devices;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;

fn capability_nodes(dev: &Path) -> BTreeSet<String> {
    let names = std::fs::read_dir(dev.join("nvidia-caps")).unwrap().flatten();
    names.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

/// The driver's library makes the nodes of a partition in the `/dev` of the process that makes the partition.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_a_partition_are_in_the_agents_own_dev_alone_and_the_spec_names_their_numbers() {
    let sim = Sim::new(&["H100-80"]).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let (host, own) = (sim.cluster.world.root().join("dev"), sim.cluster.world.dir.path().join("agent"));
    std::fs::create_dir_all(own.join("dev/nvidia-caps")).unwrap();
    for name in ["nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"] {
        std::fs::write(own.join("dev").join(name), "").unwrap();
    }
    let _agent = sim.start_with(&[], &[("ALIQUOT_SIM_ROOT", own.to_str().unwrap())]);
    sim.prepared("c", &uid).await;
    let gi = sim.node.gis(0).unwrap()[0].id;
    let minors =
        [aliquot_sim_node::gi_capability_minor(0, gi), aliquot_sim_node::ci_capability_minor(0, gi, 0)];
    let always = ["nvidia-cap1", "nvidia-cap2"].map(str::to_owned);
    let made: BTreeSet<String> = minors.iter().map(|minor| format!("nvidia-cap{minor}")).collect();
    assert_eq!(capability_nodes(&host), always.clone().into());
    assert_eq!(capability_nodes(&own.join("dev")), made.iter().cloned().chain(always.clone()).collect());
    let spec = sim.spec_of(&uid);
    let nodes = spec.devices.iter().flat_map(|device| &device.container_edits.device_nodes);
    let named: BTreeSet<_> = nodes
        .filter(|node| node.path.contains("nvidia-caps/"))
        .map(|node| (node.path.clone(), node.device_type.clone(), node.major, node.minor))
        .collect();
    let wanted = minors.map(|minor| {
        let path = format!("/dev/nvidia-caps/nvidia-cap{minor}");
        (path, Some("c".to_owned()), Some(121), Some(i64::from(minor)))
    });
    assert_eq!(named, wanted.into());
    sim.unprepared("c", &uid).await;
    assert_eq!(capability_nodes(&own.join("dev")), always.into());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_board_whose_mode_waits_for_a_reset_is_divided_once_it_was_reset() {
    let sim = Sim::new(&["A100-40"]).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0-mig-1g5gb-19-6")], json!([])).await;
    let mut agent = sim.start(&[]);
    tainted(&sim, "gpu-0", &[]).await;
    let refused = sim.try_prepare("c", &uid).await.unwrap().unwrap_err();
    assert!(refused.contains("reset") && refused.contains(&sim.node.gpus()[0].uuid), "{refused}");
    assert!(!sim.node.mig_mode(0).unwrap().pending, "nothing waits for a reset that others make");
    // The administrator does it, with the agent ended meanwhile.
    agent.kill();
    sim.node.set_mig_mode(0, true).unwrap();
    let mut agent = sim.start(&[]);
    sim.cluster.pool_where("as it is", |slices| devices(slices).contains(&"gpu-0".to_owned())).await;
    agent.kill();
    sim.node.reset(0).unwrap();
    let _agent = sim.start(&[]);
    let parts = |names: &[String]| names.iter().any(|name| name.starts_with("gpu-0-mig-"));
    let (_, slices) = sim.cluster.pool_where("partitions", |slices| parts(&devices(slices))).await;
    assert!(!devices(&slices).contains(&"gpu-0".to_owned()));
    sim.prepared("c", &uid).await;
    assert_eq!(sim.instances(), [(0, 6, 1)]);
    sim.unprepared("c", &uid).await;
    assert!(sim.node.mig_mode(0).unwrap().current, "the mode of such a board is the administrator's");
    sim.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_gpu_off_the_bus_is_told_and_the_others_go_on() {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let lost = sim.cluster.allocated_claim("lost", &[("a", "gpu-0")], json!([])).await;
    let other = sim.cluster.allocated_claim("other", &[("a", "gpu-1-mig-1g10gb-19-6")], json!([])).await;
    let _agent = sim.start(&[]);
    sim.prepared("lost", &lost).await;
    sim.node.raise_xid(0, 79, None, None).unwrap();
    noted(&sim, "GpuUnreadable", &sim.node.gpus()[0].uuid).await;
    sim.prepared("other", &other).await;
    sim.unprepared("other", &other).await;
    tainted(&sim, "gpu-1", &[]).await;
    // Its claim can end while it is gone.
    sim.unprepared("lost", &lost).await;
    let refused = sim.try_prepare("lost", &lost).await.unwrap().unwrap_err();
    assert!(refused.contains("gpu-0"), "{refused}");
    sim.node.reset(0).unwrap();
    sim.prepared("lost", &lost).await;
    sim.unprepared("lost", &lost).await;
    sim.assert_clean();
}

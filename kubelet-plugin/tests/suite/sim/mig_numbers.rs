//! GPUs that get other minor numbers when their MIG mode is switched.

use super::{Sim, noted, tainted};
use crate::common::cluster::{devices, eventually};
use aliquot_sim_node::Activation;
use serde_json::json;

async fn renumbering(boards: &[&str]) -> Sim {
    Sim::new_with(boards, |spec| spec.renumber_on_mig_switch = true).await
}

impl Sim {
    /// Minor numbers of the capabilities that a claim's spec names.
    fn capabilities_named(&self, uid: &str) -> Vec<i64> {
        let spec = self.spec_of(uid);
        let nodes = spec.devices.iter().flat_map(|device| &device.container_edits.device_nodes);
        nodes.filter(|node| node.path.contains("nvidia-cap")).filter_map(|node| node.minor).collect()
    }

    fn minors(&self) -> Vec<u32> {
        let gpus = self.node.gpus().iter();
        gpus.map(|gpu| self.node.minor(gpu.index).unwrap()).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_switches_the_mode_gets_the_number_that_its_gpu_has_then() {
    let sim = renumbering(&["H100-80", "H100-80"]).await;
    let first = sim.cluster.allocated_claim("first", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let whole = sim.cluster.allocated_claim("whole", &[("a", "gpu-1")], json!([])).await;
    let mut agent = sim.start(&[]);
    sim.prepared("whole", &whole).await;
    let answer = sim.prepared("first", &first).await;
    assert_eq!((sim.minors(), sim.instances()), (vec![2, 1], vec![(0, 6, 1)]));
    assert_eq!((sim.gpus_named(&first), sim.gpus_named(&whole)), ([2].into(), [1].into()));
    let gi = sim.node.gis(0).unwrap()[0].id;
    let wanted =
        [aliquot_sim_node::gi_capability_minor(2, gi), aliquot_sim_node::ci_capability_minor(2, gi, 0)];
    assert_eq!(sim.capabilities_named(&first), wanted.map(i64::from));
    // The API has it as a part of gpu-0, which is gpu-2 by now: nobody else is to be given it by that name.
    let published = |names: &[String]| names.contains(&"gpu-2-mig-1g10gb-19-6".to_owned());
    let (_, slices) = sim.cluster.pool_where("the new name", |slices| published(&devices(slices))).await;
    assert!(!devices(&slices).contains(&"gpu-0-mig-1g10gb-19-6".to_owned()));
    tainted(&sim, "gpu-2-mig-1g10gb-19-6", &["held=:NoSchedule"]).await;
    tainted(&sim, "gpu-2-mig-1g10gb-19-5", &[]).await;
    // Another part of it, by the new name, and the same answer as before after a restart.
    let second = sim.cluster.allocated_claim("second", &[("a", "gpu-2-mig-1g10gb-19-5")], json!([])).await;
    sim.prepared("second", &second).await;
    assert_eq!(sim.gpus_named(&second), [2].into());
    agent.kill();
    let _agent = sim.start(&[]);
    assert_eq!(sim.prepared("first", &first).await, answer);
    assert_eq!((sim.gpus_named(&first), sim.gpus_named(&whole)), ([2].into(), [1].into()));
    // Whoever is last switches the mode off, and the GPU has its first number again.
    for (name, uid) in [("first", &first), ("second", &second), ("whole", &whole)] {
        sim.unprepared(name, uid).await;
    }
    assert_eq!(sim.minors(), [0, 1]);
    tainted(&sim, "gpu-0", &[]).await;
    sim.assert_clean();
}

/// The administrator switches the mode of a GPU whose claim has nothing running, and the agent that of another one, which
/// gets the number that the containers of the first claim were started with.
#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_gets_a_number_of_somebody_elses_containers_by_a_switch_is_not_given_out() {
    let sim = renumbering(&["H100-80", "H100-80"]).await;
    let first = sim.cluster.allocated_claim("first", &[("a", "gpu-0")], json!([])).await;
    let part = sim.cluster.allocated_claim("part", &[("a", "gpu-1-mig-1g10gb-19-6")], json!([])).await;
    let mut agent = sim.start(&[]);
    sim.prepared("first", &first).await;
    agent.kill();
    assert_eq!(sim.node.set_mig_mode(0, true).unwrap(), Activation::Done);
    let _agent = sim.start(&[]);
    eventually("a spec with the number of now", || async {
        let named = sim.gpus_named(&first);
        if named == [2].into() { Ok(()) } else { Err(format!("{named:?}")) }
    })
    .await;
    noted(&sim, "DeviceNumbersChanged", "Delete the pods that use the claim").await;
    let refused = sim.try_prepare("part", &part).await.unwrap().unwrap_err();
    for wanted in ["120:0", "claim ns/first", "delete the pods", &sim.node.gpus()[1].uuid] {
        assert!(refused.contains(wanted), "{wanted}: {refused}");
    }
    assert_eq!((sim.instances(), sim.minors()), (vec![], vec![2, 1]), "nothing is left of it");
    sim.unprepared("first", &first).await;
    sim.prepared("part", &part).await;
    assert_eq!((sim.minors(), sim.gpus_named(&part)), (vec![2, 0], [0].into()));
    sim.unprepared("part", &part).await;
    sim.assert_clean();
}

/// The same where the mode is switched off, for a whole GPU.
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_gpu_that_gets_such_a_number_is_not_given_out_either() {
    let sim = renumbering(&["H100-80", "H100-80:mig"]).await;
    let first = sim.cluster.allocated_claim("first", &[("a", "gpu-0")], json!([])).await;
    let whole = sim.cluster.allocated_claim("whole", &[("a", "gpu-1")], json!([])).await;
    let mut agent = sim.start(&[]);
    sim.prepared("first", &first).await;
    agent.kill();
    assert_eq!(sim.node.set_mig_mode(0, true).unwrap(), Activation::Done);
    let _agent = sim.start(&[]);
    tainted(&sim, "gpu-1-mig-1g10gb-19-6", &[]).await;
    let refused = sim.try_prepare("whole", &whole).await.unwrap().unwrap_err();
    assert!(refused.contains("120:0") && refused.contains("claim ns/first"), "{refused}");
    sim.unprepared("first", &first).await;
}

/// Monitoring, or a display server, has a GPU open and is in no list of the driver's.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_in_no_list_that_holds_up_a_switch_is_named_by_what_it_has_open() {
    let sim = Sim::new(&["H100-80"]).await;
    let uid = sim.cluster.allocated_claim("c", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let _agent = sim.start(&[]);
    tainted(&sim, "gpu-0", &[]).await;
    let client = sim.node.hold_mode(0).unwrap();
    let process = |pid: &str, name: &str, node: &str| {
        let folder = sim.cluster.world.proc().join(pid);
        std::fs::create_dir_all(folder.join("fd")).unwrap();
        std::fs::write(folder.join("comm"), format!("{name}\n")).unwrap();
        std::os::unix::fs::symlink(node, folder.join("fd/7")).unwrap();
    };
    process("4712", "nv-hostengine", "/dev/nvidia0");
    process("4713", "Xorg", "/dev/dri/renderD128");
    process("4714", "other", "/dev/dri/renderD129");
    let refused = sim.try_prepare("c", &uid).await.unwrap().unwrap_err();
    for wanted in
        ["IN_USE", "process 4712 (nv-hostengine)", "/dev/dri/renderD128 is open in process 4713 (Xorg)"]
    {
        assert!(refused.contains(wanted), "{wanted}: {refused}");
    }
    assert!(!refused.contains("4714"), "{refused}");
    assert!(!sim.node.mig_mode(0).unwrap().pending, "no reset later switches it");
    drop(client);
    sim.prepared("c", &uid).await;
}

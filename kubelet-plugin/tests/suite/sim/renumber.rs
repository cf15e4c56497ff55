//! A driver that is unloaded and loaded again by hand while claims are prepared, and numbers its devices otherwise.

use super::{Process, Sim, noted, tainted};
use crate::common::DRIVER;
use crate::common::cluster::eventually;
use aliquot_cdi::Spec;
use rstest::rstest;
use serde_json::json;
use std::collections::BTreeSet;

impl Sim {
    pub(super) fn spec_of(&self, uid: &str) -> Spec {
        let name = format!("{DRIVER}-claim-{uid}");
        self.cluster.world.node().machine.cdi.read(&name).unwrap().unwrap()
    }

    /// Minor numbers of the GPUs that a claim's spec names.
    pub(super) fn gpus_named(&self, uid: &str) -> BTreeSet<i64> {
        let spec = self.spec_of(uid);
        let nodes = spec.devices.iter().flat_map(|device| &device.container_edits.device_nodes);
        let gpu = |path: &str| path.strip_prefix("/dev/nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
        nodes.filter(|node| gpu(&node.path)).filter_map(|node| node.minor).collect()
    }

    /// The major number of nvidia-uvm that a claim's spec names.
    fn uvm_named(&self, uid: &str) -> i64 {
        let spec = self.spec_of(uid);
        let mut nodes = spec.devices.iter().flat_map(|device| &device.container_edits.device_nodes);
        nodes.find(|node| node.path == "/dev/nvidia-uvm").and_then(|node| node.major).unwrap()
    }

    fn reload(&self) {
        self.node.unload_module(true).unwrap();
        self.node.renumber().unwrap();
        self.node.load_module(None).unwrap();
    }
}

async fn names_its_own(sim: &Sim, uid: &str, minor: i64) {
    eventually("a spec with the claim's own GPU", || async {
        let named = sim.gpus_named(uid);
        if named == [minor].into() { Ok(()) } else { Err(format!("{named:?}")) }
    })
    .await;
}

/// How the agent fares while the driver is loaded anew.
#[derive(Clone, Copy, PartialEq)]
enum Agent {
    GoesOn,
    IsKilledBefore,
    IsKilledAfter,
}

#[rstest]
#[case::that_goes_on(Agent::GoesOn)]
#[case::that_was_killed_before(Agent::IsKilledBefore)]
#[case::that_was_killed_after(Agent::IsKilledAfter)]
#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_a_running_container_has_by_its_former_number_is_given_to_nobody_by_an_agent(
    #[case] fate: Agent,
) {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let first = sim.cluster.allocated_claim("first", &[("a", "gpu-0")], json!([])).await;
    let mut agent = sim.start(&[]);
    sim.prepared("first", &first).await;
    tainted(&sim, "gpu-1", &[]).await;
    assert_eq!(sim.gpus_named(&first), [0].into());
    let (uuid, uvm) = (sim.node.gpus()[0].uuid.clone(), sim.uvm_named(&first));
    if fate == Agent::IsKilledBefore {
        agent.kill();
    }
    sim.reload();
    if fate == Agent::IsKilledAfter {
        agent.kill();
    }
    if fate != Agent::GoesOn {
        agent = sim.start(&[]);
    }

    // Containers of its pod that start again have its own GPU, which is number 1 by now.
    names_its_own(&sim, &first, 1).await;
    assert!(serde_json::to_string(&sim.spec_of(&first)).unwrap().contains(&uuid));
    assert_ne!(sim.uvm_named(&first), uvm);
    noted(&sim, "DeviceNumbersChanged", "Delete the pods that use the claim").await;
    // The API has it as gpu-0, and what runs has number 0.
    tainted(&sim, "gpu-0", &["held=:NoSchedule"]).await;
    tainted(&sim, "gpu-1", &["held=:NoSchedule"]).await;
    noted(&sim, "DeviceReachable", "containers of claim ns/first").await;
    let other = sim.cluster.allocated_claim("other", &[("a", "gpu-0")], json!([])).await;
    let refused = sim.try_prepare("other", &other).await.unwrap().unwrap_err();
    for wanted in ["120:0", "claim ns/first", "delete the pods", &sim.node.gpus()[1].uuid] {
        assert!(refused.contains(wanted), "{wanted}: {refused}");
    }
    // It lasts over restarts, also when the spec says nothing of the former number any more.
    agent.kill();
    let _agent = sim.start(&[]);
    let refused = eventually("an answer", || async {
        sim.try_prepare("other", &other).await.ok_or_else(|| "none".to_owned())
    })
    .await
    .unwrap_err();
    assert!(refused.contains("120:0"), "{refused}");

    sim.unprepared("first", &first).await;
    tainted(&sim, "gpu-0", &[]).await;
    tainted(&sim, "gpu-1", &[]).await;
    sim.prepared("other", &other).await;
    assert_eq!(sim.gpus_named(&other), [0].into());
    sim.unprepared("other", &other).await;
    sim.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_whose_gpus_exchanged_their_numbers_are_told_of_one_another() {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let mut claims = Vec::new();
    let _agent: Process = sim.start(&[]);
    for (name, device) in [("first", "gpu-0"), ("second", "gpu-1")] {
        let uid = sim.cluster.allocated_claim(name, &[("a", device)], json!([])).await;
        sim.prepared(name, &uid).await;
        claims.push(uid);
    }
    sim.reload();
    names_its_own(&sim, &claims[0], 1).await;
    names_its_own(&sim, &claims[1], 0).await;
    noted(&sim, "DeviceReachable", "containers of claim ns/first").await;
    noted(&sim, "DeviceReachable", "It is prepared for claim ns/first").await;
    // The kubelet is told the same again: nothing is taken away from a claim that is prepared.
    sim.prepared("first", &claims[0]).await;
    assert_eq!(sim.gpus_named(&claims[0]), [1].into());
    // Back to the numbers from before: whoever was started meanwhile has the other ones.
    sim.reload();
    names_its_own(&sim, &claims[0], 0).await;
    names_its_own(&sim, &claims[1], 1).await;
    let ledger = sim.cluster.world.ledger();
    for uid in &claims {
        // Those of its GPU, and of nvidia-uvm, nvidia-uvm-tools and nvidiactl.
        let minors: BTreeSet<u32> = ledger.claims[uid].numbers.iter().map(|number| number.minor).collect();
        assert_eq!(minors, [0, 1, 255].into());
    }
    for (name, uid) in ["first", "second"].into_iter().zip(&claims) {
        sim.unprepared(name, uid).await;
    }
    tainted(&sim, "gpu-0", &[]).await;
    sim.assert_clean();
}

/// An agent that looks at its GPUs once an hour looks when the driver is loaded anew all the same.
#[tokio::test(flavor = "multi_thread")]
async fn specs_follow_a_driver_that_was_loaded_anew_before_it_is_time_to_look() {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let first = sim.cluster.allocated_claim("first", &[("a", "gpu-0")], json!([])).await;
    let _agent = sim.start(&["--inventory-interval=1h"]);
    sim.prepared("first", &first).await;
    tainted(&sim, "gpu-1", &[]).await;
    let uvm = sim.uvm_named(&first);
    sim.reload();
    names_its_own(&sim, &first, 1).await;
    assert_ne!(sim.uvm_named(&first), uvm);
    sim.unprepared("first", &first).await;
}

/// As long as a claim has its GPU by the number that it was started with, a driver that is loaded anew changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_numbers_as_before_keeps_nobody_from_anything() {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let first = sim.cluster.allocated_claim("first", &[("a", "gpu-0")], json!([])).await;
    let _agent = sim.start(&[]);
    sim.prepared("first", &first).await;
    sim.node.unload_module(true).unwrap();
    tainted(&sim, "gpu-1", &["unmonitored=driver:NoSchedule"]).await;
    sim.node.load_module(None).unwrap();
    tainted(&sim, "gpu-1", &[]).await;
    tainted(&sim, "gpu-0", &[]).await;
    let other = sim.cluster.allocated_claim("other", &[("a", "gpu-1")], json!([])).await;
    sim.prepared("other", &other).await;
}

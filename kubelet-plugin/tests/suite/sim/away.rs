//! An agent that starts while the driver is not loaded, or while the GPU operator asks for it.

use super::{Sim, noted, tainted, taints_of};
use crate::common::cluster::eventually;
use serde_json::json;

const LABEL: &str = "nvidia.com/gpu.deploy.dra-driver";

impl Sim {
    /// An answer to a prepare: why not.
    async fn refused(&self, name: &str, uid: &str) -> String {
        eventually("an answer", || async {
            self.try_prepare(name, uid).await.ok_or_else(|| "nobody answers".to_owned())
        })
        .await
        .unwrap_err()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_starts_without_a_driver_lets_pods_end_and_says_why_no_other_starts() {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let wanted = [("a", "gpu-0-mig-1g10gb-19-6"), ("b", "gpu-1-share")];
    let over = sim.cluster.allocated_claim("over", &wanted, json!([])).await;
    let next = sim.cluster.allocated_claim("next", &[("a", "gpu-1")], json!([])).await;
    let mut agent = sim.start(&[]);
    sim.prepared("over", &over).await;
    agent.kill();
    sim.node.unload_module(true).unwrap();
    let _agent = sim.start(&[]);
    let refused = sim.refused("next", &next).await;
    assert!(refused.contains("load the nvidia kernel module"), "{refused}");
    sim.unprepared("over", &over).await;
    assert!(sim.cluster.world.ledger().claims.is_empty());
    noted(&sim, "NvmlUnavailable", "claims that are over are unprepared").await;
    sim.node.load_module(None).unwrap();
    sim.prepared("next", &next).await;
    tainted(&sim, "gpu-1", &[]).await;
    sim.unprepared("next", &next).await;
    sim.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_starts_while_the_operator_asks_for_the_driver_does_not_open_it() {
    let sim = Sim::new(&["H100-80"]).await;
    let next = sim.cluster.allocated_claim("next", &[("a", "gpu-0")], json!([])).await;
    sim.cluster.annotate(json!({"labels": {LABEL: "paused-for-driver-upgrade"}})).await;
    // As strace would show it: whoever opened NVML would find the driver, and say so.
    sim.node.unload_module(false).unwrap();
    let _agent = sim.start(&[]);
    let refused = sim.refused("next", &next).await;
    assert!(refused.contains("to be unloaded, as its label"), "{refused}");
    noted(&sim, "DriverLetGo", LABEL).await;
    sim.node.load_module(None).unwrap();
    let refused = sim.refused("next", &next).await;
    assert!(refused.contains("to be unloaded, as its label"), "{refused}");
    sim.node.unload_module(false).expect("nobody opened it");
    assert_eq!(taints_of(&sim, "gpu-0").await, None, "nothing is published of GPUs that nobody has seen");
    sim.node.load_module(None).unwrap();
    sim.cluster.annotate(json!({"labels": {LABEL: "true"}})).await;
    tainted(&sim, "gpu-0", &[]).await;
    noted(&sim, "DriverResumed", "").await;
    sim.prepared("next", &next).await;
    sim.unprepared("next", &next).await;
    sim.assert_clean();
}

/// The driver went while a claim was prepared, as when its pods were ended by force, and the operator is at work.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_starts_while_the_driver_is_exchanged_lets_pods_end() {
    let sim = Sim::new(&["H100-80"]).await;
    let over = sim.cluster.allocated_claim("over", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let mut agent = sim.start(&[]);
    sim.prepared("over", &over).await;
    agent.kill();
    sim.node.unload_module(true).unwrap();
    sim.cluster.annotate(json!({"labels": {LABEL: "paused-for-driver-upgrade"}})).await;
    let _agent = sim.start(&[]);
    sim.unprepared("over", &over).await;
    assert!(sim.cluster.world.ledger().claims.is_empty());
}

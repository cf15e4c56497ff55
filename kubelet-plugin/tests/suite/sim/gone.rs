//! A claim whose partition went with the driver.

use super::{Sim, noted};
use crate::common::cluster::eventually;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use rstest::rstest;
use serde_json::json;

/// Status and reason of the condition of the claim's device.
async fn condition_is(sim: &Sim, name: &str, wanted: (&str, &str)) {
    eventually(wanted.1, || async {
        let api: Api<ResourceClaim> = Api::namespaced(sim.cluster.client.clone(), "ns");
        let devices = api.get(name).await.unwrap().status.and_then(|status| status.devices);
        let conditions = devices.into_iter().flatten().flat_map(|device| device.conditions).flatten();
        let found: Vec<_> = conditions.map(|condition| (condition.status, condition.reason)).collect();
        let same = found.iter().any(|(status, reason)| (status.as_str(), reason.as_str()) == wanted);
        if same { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
}

#[rstest]
#[case::numbered_as_before(false)]
#[case::numbered_otherwise(true)]
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_partition_went_with_the_driver_is_told_and_gets_it_again_at_the_next_prepare(
    #[case] renumbered: bool,
) {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let wanted = [("a", "gpu-0-mig-1g10gb-19-6"), ("b", "gpu-0-mig-1g10gb-19-5")];
    let uid = sim.cluster.allocated_claim("c", &wanted, json!([])).await;
    let _agent = sim.start(&[]);
    sim.prepared("c", &uid).await;
    condition_is(&sim, "c", ("True", "Prepared")).await;
    let caps = |sim: &Sim| -> Vec<(i64, i64)> {
        let spec = sim.spec_of(&uid);
        let nodes = spec.devices.iter().flat_map(|device| &device.container_edits.device_nodes);
        let caps = nodes.filter(|node| node.path.contains("nvidia-cap"));
        caps.filter_map(|node| Some((node.major?, node.minor?))).collect()
    };
    let before = caps(&sim);
    assert_eq!(before.len(), 4);

    sim.node.unload_module(true).unwrap();
    if renumbered {
        sim.node.renumber().unwrap();
    }
    sim.node.load_module(None).unwrap();
    noted(&sim, "MigPartitionGone", "Delete the pods that use the claim").await;
    condition_is(&sim, "c", ("False", "MigPartitionGone")).await;
    // A container that starts again has no device rather than somebody else's.
    eventually("a spec without devices that are gone", || async {
        let named = (caps(&sim), sim.gpus_named(&uid));
        if named.0.is_empty() && named.1.is_empty() { Ok(()) } else { Err(format!("{named:?}")) }
    })
    .await;
    // As when its next pod comes, or the kubelet asks again.
    sim.prepared("c", &uid).await;
    assert_eq!(sim.instances().len(), 2);
    let now = caps(&sim);
    assert_eq!(now.len(), 4);
    assert_eq!(now == before, !renumbered, "{before:?} {now:?}");
    condition_is(&sim, "c", ("True", "Prepared")).await;
    sim.unprepared("c", &uid).await;
    sim.assert_clean();
}

/// Who has a partition's capabilities from before could open the one that has them now.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_a_running_container_could_open_is_given_to_nobody() {
    let sim = Sim::new(&["H100-80"]).await;
    let first = sim.cluster.allocated_claim("first", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let _agent = sim.start(&[]);
    sim.prepared("first", &first).await;
    sim.node.unload_module(true).unwrap();
    sim.node.load_module(None).unwrap();
    noted(&sim, "MigPartitionGone", "ns/first").await;
    let other = sim.cluster.allocated_claim("other", &[("a", "gpu-0-mig-1g10gb-19-5")], json!([])).await;
    let refused = eventually("a refusal", || async {
        match sim.try_prepare("other", &other).await {
            Some(Err(refused)) if refused.contains("containers of claim ns/first") => Ok(refused),
            answer => Err(format!("{answer:?}")),
        }
    })
    .await;
    assert!(refused.contains("121:") && refused.contains("delete the pods that use it"), "{refused}");
    assert_eq!(sim.instances(), [], "what was made for it is gone again");
    sim.unprepared("first", &first).await;
    sim.prepared("other", &other).await;
    sim.unprepared("other", &other).await;
    sim.assert_clean();
}

//! From a claim in the API to a bound pod, against the embedded control plane.

mod common;

use common::{Cluster, fixtures};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gated_pod_gets_its_partition_and_is_bound() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &[]).await;
    cluster.claim("small", &[fixtures::partition("part", "1g.10gb")]).await;
    cluster.pod("p", &["small"]).await;
    assert_eq!(cluster.bound("p").await, "n1");
    let claim = cluster.get_claim("small").await;
    let status = claim.status.expect("a status");
    let allocation = status.allocation.expect("an allocation");
    assert!(allocation.allocation_timestamp.is_some());
    assert_eq!(cluster.devices("small").await, ["n1/gpu-0-mig-1g10gb-19-6"]);
    assert_eq!(status.reserved_for.expect("reserved").len(), 1);
    assert_eq!(claim.metadata.finalizers.expect("finalizers"), ["resource.kubernetes.io/delete-protection"]);
    controller.terminate().await;
}

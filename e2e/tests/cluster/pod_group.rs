//! PodGroups of Kubernetes' own API, whose pods have a claim in common (KEP-5729). Only a cluster with
//! [`GATES`] serves them; `tools/test-cluster` brings one up for these tests.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::gated;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use std::time::Duration;

/// What a cluster needs for PodGroups with claims, besides `scheduling.k8s.io/v1beta1`.
const GATES: &str = "GenericWorkload and DRAWorkloadResourceClaims";
/// The PodGroup.
const PAIR: &str = "pair";

async fn serves_pod_groups(cluster: &Cluster) -> Result<bool> {
    let groups = cluster.client.list_api_groups().await?.groups;
    let versions =
        groups.into_iter().filter(|group| group.name == "scheduling.k8s.io").flat_map(|g| g.versions);
    let served = versions.into_iter().any(|version| version.version == "v1beta1");
    if !served {
        eprintln!("SKIPPED: this cluster serves no PodGroups; they need {GATES}");
    }
    Ok(served)
}

/// A pod of the group: the GPU that all have in common, and a partition of its own.
fn member(namespace: &str, name: &str) -> Value {
    PodManifest::new(namespace, name)
        .template("gpu", "whole")
        .template("own", "slice")
        .container("main", &[("gpu", None), ("own", None)])
        .with("schedulingGroup", json!({"podGroupName": PAIR}))
        .build()
}

fn name(claim: &ResourceClaim) -> &str {
    claim.metadata.name.as_deref().unwrap_or_default()
}

/// For whom a claim is reserved.
fn users(claim: &ResourceClaim) -> Vec<String> {
    let reserved = claim.status.as_ref().and_then(|status| status.reserved_for.as_ref());
    reserved.into_iter().flatten().map(|user| format!("{}/{}", user.resource, user.name)).collect()
}

#[test]
fn pods_of_a_group_share_a_claim_that_is_the_groups_own_and_is_given_once() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        if !serves_pod_groups(cluster).await? {
            return Ok(());
        }
        let namespace = &cluster.namespace("pod-group").await?;
        cluster.create(&[
            objects::template(namespace, "whole", &[objects::gpu_of("gpu", "H100")]),
            objects::template(namespace, "slice", &[objects::partition_of("own", "1g.10gb", "H100")]),
            json!({
                "apiVersion": "scheduling.k8s.io/v1beta1",
                "kind": "PodGroup",
                "metadata": {"namespace": namespace, "name": PAIR},
                "spec": {
                    "schedulingPolicy": {"gang": {"minCount": 2}},
                    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "whole"}],
                },
            }),
            member(namespace, "first"),
        ])?;
        // Not before the group is complete.
        cluster
            .holds_for(Duration::from_secs(5), || async {
                let pod = cluster.pod(namespace, "first").await?.context("the first pod")?;
                ensure!(gated(&pod), "its gate is lifted");
                Ok(())
            })
            .await?;
        cluster.create(&[member(namespace, "second")])?;
        for name in ["first", "second"] {
            cluster.running(namespace, name).await?;
        }
        let claims = cluster.claims().await?;
        let own = claims.iter().filter(|claim| claim.metadata.namespace.as_deref() == Some(namespace));
        let mut users: Vec<(Vec<String>, &str)> = own.map(|claim| (users(claim), name(claim))).collect();
        users.sort();
        let of = users.iter().map(|(users, _)| users.join(" ")).collect::<Vec<_>>();
        ensure!(of == ["podgroups/pair", "pods/first", "pods/second"], "reserved for {of:?}");
        // The devices are the group's until it is deleted, whatever becomes of its pods.
        let shared = users.first().map(|(_, name)| *name).context("the group's claim")?;
        let allocation = cluster.allocation(namespace, shared).await?;
        for name in ["first", "second"] {
            cluster.delete_pod(namespace, name).await?;
            cluster.pod_gone(namespace, name).await?;
        }
        cluster
            .holds_for(Duration::from_secs(5), || async {
                ensure!(cluster.allocation(namespace, shared).await? == allocation, "it was taken back");
                Ok(())
            })
            .await?;
        cluster.create(&[member(namespace, "third"), member(namespace, "fourth")])?;
        for name in ["third", "fourth"] {
            cluster.running(namespace, name).await?;
        }
        cluster.delete_namespace(namespace).await
    })
}

//! Two controllers: one leads, and what happens when it stops for longer than its lease.

use crate::support::on_cluster;
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::look::containers;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_e2e::process;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

/// The controller that holds the lease, once its pod runs.
async fn leader(cluster: &Cluster) -> Result<String> {
    let leases = Api::<Lease>::namespaced(cluster.client.clone(), SYSTEM);
    cluster
        .wait_for("a leader", || async {
            let holder = leases.get("aliquot-controller").await?.spec.and_then(|s| s.holder_identity);
            Ok(holder.filter(|h| process::controller(h).is_ok()))
        })
        .await
}

/// Creates pods with a partition each, and gives their names.
fn create_pods(cluster: &Cluster, namespace: &str, template: &str, names: &[&str]) -> Result<()> {
    let pods = names.iter().map(|name| PodManifest::of_template(namespace, name, template).build());
    cluster.create(&pods.collect::<Vec<_>>())
}

#[test]
fn a_controller_that_slept_through_its_lease_is_replaced_and_writes_nothing_when_it_wakes() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("sleeper").await?;
        cluster.create(&[
            objects::template(&namespace, "part", &[objects::partition_of("gpu", "1g.10gb", "A100")]),
            objects::claim(&namespace, "probe", &[objects::request("gpu", "gpu.aliquot.dev")]),
        ])?;
        let old = leader(cluster).await?;
        let sleeper = process::controller(&old)?;
        create_pods(cluster, &namespace, "part", &["a", "b", "c"])?;
        // In the middle of its work.
        let first = cluster.claim_of(&namespace, "a").await?;
        cluster.allocation(&namespace, &first).await?;
        sleeper.stop()?;
        let outcome = async {
            let new = cluster
                .wait_for("another leader", || async {
                    let now = leader(cluster).await?;
                    Ok((now != old).then_some(now))
                })
                .await?;
            // The webhook may be asked of the one that sleeps; pods are created all the same.
            create_pods(cluster, &namespace, "part", &["d", "e"])?;
            for pod in ["a", "b", "c", "d", "e"] {
                cluster.running(&namespace, pod).await?;
            }
            anyhow::Ok(new)
        }
        .await;
        sleeper.resume()?;
        let new = outcome?;
        create_pods(cluster, &namespace, "part", &["f"])?;
        cluster.running(&namespace, "f").await?;
        // Whatever it wants to write is refused, however long it takes to notice.
        let client = cluster.client_of_pod("aliquot-controller", &old).await?;
        let claims = Api::<ResourceClaim>::namespaced(client, &namespace);
        let dry = PatchParams { dry_run: true, ..PatchParams::default() };
        let answer =
            claims.patch_status("probe", &dry, &Patch::Merge(&json!({"status": {"devices": []}}))).await;
        let said = answer.err().context("the one that slept may write")?.to_string();
        ensure!(said.contains(&format!("the holder is {new}")), "{said}");
        ensure!(leader(cluster).await? == new, "it does not take the lease back");
        ensure!(sleeper.runs(), "it stands by; nobody had to restart it");
        let devices = cluster.gpu_instances()?;
        ensure!(devices.len() == 6, "six pods, six partitions: {devices:?}");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_leader_that_is_killed_is_replaced_and_every_pod_runs() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("killed").await?;
        cluster.create(&[
            objects::template(&namespace, "part", &[objects::partition_of("gpu", "1g.10gb", "A100")]),
            objects::template(&namespace, "share", &[objects::share("gpu", "1Gi", 5)]),
        ])?;
        create_pods(cluster, &namespace, "share", &["before"])?;
        let before = cluster.running(&namespace, "before").await?;
        let old = leader(cluster).await?;
        create_pods(cluster, &namespace, "part", &["a", "b", "c", "d"])?;
        process::controller(&old)?.kill()?;
        for pod in ["a", "b", "c", "d"] {
            cluster.running(&namespace, pod).await?;
        }
        ensure!(containers(&cluster.running(&namespace, "before").await?) == containers(&before));
        ensure!(cluster.gpu_instances()?.len() == 4, "{:?}", cluster.gpu_instances()?);
        cluster.delete_namespace(&namespace).await
    })
}

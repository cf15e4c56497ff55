//! A partition that an administrator made before the node agent was there.

use crate::agent::kill;
use crate::support::on_cluster;
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::hardware::A100_MIG;
use aliquot_e2e::look::containers;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_model::names::{DEFAULT_DRIVER, held_taint};
use anyhow::{Result, ensure};
use serde_json::json;

/// The device that the partition is published as.
const DEVICE: &str = "gpu-3-mig-7g80gb-0-0";

/// Profile of the compute instance that takes all of it (`NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE`).
const COMPUTE_OF_ALL: u32 = 4;

/// Keeps the node agent off every node, or lets it come.
async fn agents(cluster: &Cluster, wanted: bool) -> Result<()> {
    let selector = json!({"aliquot-e2e/nowhere": if wanted { None } else { Some("true") }});
    let patch = json!({"spec": {"template": {"spec": {"nodeSelector": selector}}}}).to_string();
    cluster.kubectl(&[
        "-n",
        SYSTEM,
        "patch",
        "daemonset",
        "aliquot-kubelet-plugin",
        "--type=merge",
        "-p",
        &patch,
    ])?;
    if wanted {
        return cluster.ready().await;
    }
    cluster.no_system_pods("kubelet-plugin").await
}

/// UUIDs of the MIG devices of the board, as CUDA says them: it has no prefix of its own for partitions.
fn partitions(cluster: &Cluster) -> Result<Vec<String>> {
    let devices = cluster.hardware()?.mig_devices(A100_MIG)?;
    Ok(devices.into_iter().map(|device| device.uuid.replace("MIG-", "GPU-")).collect())
}

/// Waits until the partition is given out, and nothing that overlaps it.
async fn published(cluster: &Cluster) -> Result<()> {
    let held = held_taint(DEFAULT_DRIVER);
    cluster
        .wait_for("the partition alone on its board", || async {
            let devices = cluster.devices().await?;
            let free = devices.iter().filter(|device| {
                let taints = device.taints.iter().flatten();
                device.name.starts_with("gpu-3-mig") && taints.into_iter().all(|taint| taint.key != held)
            });
            let free: Vec<&str> = free.map(|device| device.name.as_str()).collect();
            Ok((free == [DEVICE]).then_some(()))
        })
        .await
}

#[test]
fn a_partition_from_before_the_agent_is_given_out_as_it_is_and_outlives_claims_and_agents() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster.renew_agent().await?;
        let namespace = cluster.namespace("adopted").await?;
        agents(cluster, false).await?;
        let node = cluster.hardware()?;
        let gi = node.create_gi(A100_MIG, 0, Some(0))?;
        let whole = node.create_ci(A100_MIG, gi.id, gi.serial, COMPUTE_OF_ALL, None)?;
        let made = partitions(cluster)?;
        agents(cluster, true).await?;
        published(cluster).await?;
        let told = cluster.event("default", "MigInstanceAdopted: GPU instance").await?;
        ensure!(told.contains(DEVICE), "{told}");

        let all = [objects::partition_of("gpu", "7g.80gb", "A100")];
        cluster.create(&[
            objects::template(&namespace, "all", &all),
            PodManifest::of_template(&namespace, "first", "all").build(),
        ])?;
        let report = cluster.report(&namespace, "first", "main").await?;
        ensure!(report.uuids == made, "the pod has the administrator's partition: {report:?}, {made:?}");
        ensure!(cluster.devices_of(&namespace, "first").await? == [DEVICE]);
        // An agent that is killed under the pod disturbs neither.
        let before = containers(&cluster.running(&namespace, "first").await?);
        kill(cluster).await?;
        published(cluster).await?;
        ensure!(containers(&cluster.running(&namespace, "first").await?) == before);
        cluster.shell(&namespace, "first", "main", "cuda-probe")?;
        cluster.delete_pod(&namespace, "first").await?;
        cluster.pod_gone(&namespace, "first").await?;
        ensure!(partitions(cluster)? == made, "it is still there after the claim");
        // And after another start of the agent, which had no part in it.
        kill(cluster).await?;
        published(cluster).await?;
        cluster.create(&[PodManifest::of_template(&namespace, "second", "all").build()])?;
        let report = cluster.report(&namespace, "second", "main").await?;
        ensure!(report.uuids == made, "{report:?}, {made:?}");
        cluster.delete_namespace(&namespace).await?;
        cluster
            .wait_for("claims to be released", || async { Ok(cluster.ledger()?.is_empty().then_some(())) })
            .await?;
        ensure!(partitions(cluster)? == made, "it is the administrator's");
        node.destroy_ci(A100_MIG, gi.id, gi.serial, whole.id)?;
        node.destroy_gi(A100_MIG, gi.id, gi.serial)?;
        Ok(())
    })
}

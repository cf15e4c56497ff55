//! A GPU that has an error, or that an administrator took out of service.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_model::names::{DEFAULT_DRIVER, condition_taint};
use anyhow::{Result, ensure};
use serde_json::{Value, json};

/// The only L40S, which has no MIG mode.
const L40S: usize = 4;

/// Waits until all devices of the L40S but the one for administration have a taint about it, or none has any.
async fn tainted(cluster: &Cluster, taint: Option<(&str, &str)>) -> Result<()> {
    let keys = ["xid", "gpu-lost", "ecc", "cordoned"].map(|key| condition_taint(DEFAULT_DRIVER, key));
    let what = format!("taint {taint:?} on the L40S");
    cluster
        .wait_for(&what, || async {
            let devices = cluster.devices().await?;
            let mut of_gpu = devices
                .iter()
                .filter(|d| d.name.starts_with("gpu-4") && !d.name.ends_with("-admin"))
                .peekable();
            let there = of_gpu.peek().is_some();
            let as_wanted = of_gpu.all(|device| {
                let mut taints = device.taints.iter().flatten();
                match taint {
                    Some((key, effect)) => {
                        let key = condition_taint(DEFAULT_DRIVER, key);
                        taints.any(|found| found.key == key && found.effect == effect)
                    }
                    None => !taints.any(|found| keys.contains(&found.key)),
                }
            });
            Ok((there && as_wanted).then_some(()))
        })
        .await
}

#[test]
fn a_gpu_with_a_fatal_error_is_given_only_to_who_tolerates_it_until_it_was_reset() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("health").await?;
        let xid = condition_taint(DEFAULT_DRIVER, "xid");
        let mut tolerant: Value = objects::gpu_of("gpu", "L40S");
        tolerant["exactly"]["tolerations"] =
            json!([{"key": xid, "operator": "Exists", "effect": "NoSchedule"}]);
        let node = cluster.hardware()?;
        node.raise_xid(L40S, 48, None, None)?;
        tainted(cluster, Some(("xid", "NoSchedule"))).await?;
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            objects::template(&namespace, "tolerant", &[tolerant]),
            PodManifest::of_template(&namespace, "waits", "gpu").build(),
        ])?;
        let told = cluster.event(&namespace, "waits DevicesDoNotFit").await?;
        ensure!(told.contains(&format!("untolerated taint {xid}=48:NoSchedule")), "{told}");
        cluster.create(&[PodManifest::of_template(&namespace, "tolerates", "tolerant").build()])?;
        cluster.running(&namespace, "tolerates").await?;
        ensure!(cluster.devices_of(&namespace, "tolerates").await? == ["gpu-4"]);
        cluster.delete_pod(&namespace, "tolerates").await?;
        cluster.pod_gone(&namespace, "tolerates").await?;
        // A GPU that was off the bus and answers was reset, and that ends all that lasts.
        node.raise_xid(L40S, 79, None, None)?;
        tainted(cluster, Some(("gpu-lost", "NoExecute"))).await?;
        node.reset(L40S)?;
        tainted(cluster, None).await?;
        cluster.running(&namespace, "waits").await?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_cordoned_gpu_takes_no_claim_and_is_emptied_on_request_until_it_is_uncordoned() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("cordon").await?;
        let node = cluster.setting("NODE_NAME")?.to_owned();
        let named = ["gpu-4", "--node", &node];
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            PodManifest::of_template(&namespace, "first", "gpu").build(),
        ])?;
        cluster.running(&namespace, "first").await?;
        // It goes on, and who comes later waits.
        let said = cluster.aliquot("cordon", &["gpu-4", "--node", &node, "--reason", "fan"])?;
        ensure!(said.contains("1 claim uses it now") && said.contains("pod first"), "{said}");
        tainted(cluster, Some(("cordoned", "NoSchedule"))).await?;
        cluster.create(&[PodManifest::of_template(&namespace, "second", "gpu").build()])?;
        let told = cluster.event(&namespace, "second DevicesDoNotFit").await?;
        ensure!(told.contains("untolerated taint gpu.aliquot.dev/cordoned:NoSchedule"), "{told}");
        cluster.running(&namespace, "first").await?;
        // Emptied.
        let said = cluster.aliquot("cordon", &["gpu-4", "--node", &node, "--evict"])?;
        ensure!(said.contains("pods are evicted"), "{said}");
        cluster.pod_gone(&namespace, "first").await?;
        tainted(cluster, Some(("cordoned", "NoExecute"))).await?;
        cluster.aliquot("uncordon", &named)?;
        tainted(cluster, None).await?;
        cluster.running(&namespace, "second").await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// As on a driver that does not say that a GPU was reset.
#[test]
fn errors_that_were_looked_at_go_by_command_and_the_next_one_counts_again() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("acknowledge").await?;
        let name = cluster.setting("NODE_NAME")?.to_owned();
        let line = ["gpu-4", "--node", &name, "--reason", "was reset"];
        let node = cluster.hardware()?;
        node.raise_ecc(L40S, true, 1)?;
        node.raise_xid(L40S, 62, None, None)?;
        tainted(cluster, Some(("xid", "NoSchedule"))).await?;
        tainted(cluster, Some(("ecc", "NoSchedule"))).await?;
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            PodManifest::of_template(&namespace, "waits", "gpu").build(),
        ])?;
        cluster.event(&namespace, "waits DevicesDoNotFit").await?;
        let said = cluster.aliquot("acknowledge", &line)?;
        ensure!(said.contains("/xid=62:NoSchedule") && said.contains("has no taint for errors"), "{said}");
        tainted(cluster, None).await?;
        cluster.event("default", "GpuAcknowledged: what happened to GPU").await?;
        cluster.running(&namespace, "waits").await?;
        node.raise_xid(L40S, 62, None, None)?;
        tainted(cluster, Some(("xid", "NoSchedule"))).await?;
        cluster.aliquot("acknowledge", &line)?;
        tainted(cluster, None).await?;
        cluster.delete_namespace(&namespace).await
    })
}

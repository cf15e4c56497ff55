//! A pod that needs much is not starved by small ones that keep coming.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::gated;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::Duration;

/// The node has two of these.
const PRODUCT: &str = "H100";
/// Pods that fill them.
const HALVES: [&str; 4] = ["half-a", "half-b", "half-c", "half-d"];

fn half(namespace: &str, name: &str) -> Value {
    PodManifest::of_template(namespace, name, "half").build()
}

async fn is_gated(cluster: &Cluster, namespace: &str, name: &str) -> Result<bool> {
    Ok(gated(&cluster.pod(namespace, name).await?.with_context(|| format!("no pod {name}"))?))
}

#[test]
fn what_a_large_request_waits_for_is_kept_for_it_while_smaller_ones_come() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster
            .configure(&[
                "controller.reservation.enabled=true",
                "controller.reservation.after=3s",
                "controller.reservation.percent=100",
            ])
            .await?;
        let namespace = &cluster.namespace("reserve").await?;
        cluster.create(&[
            objects::template(namespace, "half", &[objects::partition_of("gpu", "3g.40gb", PRODUCT)]),
            objects::template(namespace, "whole", &[objects::gpu_of("gpu", PRODUCT)]),
        ])?;
        for name in HALVES {
            cluster.create(&[half(namespace, name)])?;
            cluster.running(namespace, name).await?;
        }
        cluster.create(&[PodManifest::of_template(namespace, "whole", "whole").build()])?;
        let told = cluster.event(namespace, "has waited for room").await?;
        let until = told.split("until").nth(1).context("whose end it waits for")?;
        let (awaited, others): (Vec<&str>, Vec<&str>) =
            HALVES.into_iter().partition(|name| until.contains(name));
        ensure!(awaited.len() == 2, "it waits for those on one GPU: {told}");
        // Half of that GPU is free, and a younger pod that would fit there does not get it.
        let [first, last] = awaited.as_slice() else { return Ok(()) };
        cluster.delete_pod(namespace, first).await?;
        cluster.pod_gone(namespace, first).await?;
        cluster.create(&[half(namespace, "late")])?;
        cluster
            .holds_for(Duration::from_secs(8), || async {
                ensure!(is_gated(cluster, namespace, "late").await?, "the late pod got what is kept");
                ensure!(is_gated(cluster, namespace, "whole").await?, "the GPU is not free yet");
                Ok(())
            })
            .await?;
        cluster.delete_pod(namespace, last).await?;
        cluster.running(namespace, "whole").await?;
        ensure!(is_gated(cluster, namespace, "late").await?, "there is no room for it");
        // What is free elsewhere is anybody's.
        let other = others.first().context("somebody on the other GPU")?;
        cluster.delete_pod(namespace, other).await?;
        cluster.running(namespace, "late").await?;
        cluster.delete_namespace(namespace).await?;
        cluster.configure(&[]).await
    })
}

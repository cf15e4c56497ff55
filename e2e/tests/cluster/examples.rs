//! The examples of `examples/` do on a real cluster what their READMEs say.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use anyhow::{Context, Result, ensure};
use serde_json::Value;

const GIB: u64 = 1 << 30;

async fn apply(cluster: &Cluster, example: &str) -> Result<()> {
    let path = cluster.repo().join(format!("examples/{example}/{example}.yaml"));
    cluster.apply(&std::fs::read_to_string(&path).with_context(|| path.display().to_string())?)
}

/// What the probe in a container found: bytes that it got of each device.
async fn probe(cluster: &Cluster, namespace: &str, pod: &str, container: &str) -> Result<Vec<u64>> {
    cluster.running(namespace, pod).await?;
    let line = cluster.first_line(namespace, pod, container).await?;
    let report: Value =
        serde_json::from_str(&line).with_context(|| format!("{namespace}/{pod} printed {line:?}"))?;
    let devices = report.pointer("/devices").and_then(Value::as_array).cloned().unwrap_or_default();
    for device in &devices {
        ensure!(device.get("refused_with").and_then(Value::as_i64) == Some(2), "not out of memory: {line}");
    }
    Ok(devices.iter().filter_map(|d| d.get("allocated_bytes").and_then(Value::as_u64)).collect())
}

/// Device nodes of GPUs that a container sees.
fn nodes(cluster: &Cluster, namespace: &str, pod: &str, container: &str) -> Result<Vec<String>> {
    let listed =
        cluster.exec(namespace, pod, container, &["/usr/bin/bash", "-c", "echo /dev/nvidia[0-9]*"])?;
    Ok(listed.split_whitespace().filter(|n| !n.contains('*')).map(str::to_owned).collect())
}

#[test]
fn a_whole_gpu_is_one_device_with_all_its_memory_and_no_limiter() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "01-whole-gpu").await?;
        let got = probe(cluster, "whole-gpu", "trainer", "main").await?;
        ensure!(got.len() == 1, "one device, got {got:?}");
        ensure!(nodes(cluster, "whole-gpu", "trainer", "main")?.len() == 1);
        let preload = cluster.exec(
            "whole-gpu",
            "trainer",
            "main",
            &["/usr/bin/bash", "-c", "cat /etc/ld.so.preload || true"],
        )?;
        ensure!(!preload.contains("aliquot"), "a whole GPU needs no limiter: {preload}");
        cluster.delete_namespace("whole-gpu").await
    })
}

#[test]
fn a_partition_is_created_for_its_profile_and_destroyed_afterwards() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "02-mig-by-profile").await?;
        let got = probe(cluster, "mig-profile", "notebook", "main").await?;
        ensure!(
            got.len() == 1 && got[0] < 20 * GIB && got[0] > 17 * GIB,
            "a 2g.20gb has just under 20 GiB: {got:?}"
        );
        cluster.delete_namespace("mig-profile").await
    })
}

#[test]
fn a_partition_by_size_is_the_smallest_that_suffices() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "03-mig-by-size").await?;
        let got = probe(cluster, "mig-size", "inference", "main").await?;
        ensure!(
            got.len() == 1 && got[0] > 15 * GIB && got[0] < 20 * GIB,
            "16 GiB asked, 20 GB profile given: {got:?}"
        );
        cluster.delete_namespace("mig-size").await
    })
}

#[test]
fn a_share_ends_at_its_limit_and_shows_its_quota_and_limiter() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "04-share").await?;
        let got = probe(cluster, "share", "chatbot", "main").await?;
        ensure!(got.len() == 1 && got[0] <= 10 * GIB && got[0] > 9 * GIB, "10 GiB asked: {got:?}");
        let seen = cluster.exec(
            "share",
            "chatbot",
            "main",
            &["/usr/bin/bash", "-c", "env; cat /etc/ld.so.preload; echo /run/aliquot/quota/*/quota"],
        )?;
        ensure!(seen.contains("libaliquot_preload.so"), "the limiter is mounted: {seen}");
        ensure!(seen.contains("CUDA_DEVICE_MEMORY_LIMIT"), "the limit is in the environment: {seen}");
        ensure!(!seen.contains("/run/aliquot/quota/*/quota"), "the quota file is mounted: {seen}");
        cluster.delete_namespace("share").await
    })
}

#[test]
fn containers_of_one_pod_see_only_the_request_that_they_name() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "05-two-shares-one-pod").await?;
        let model = probe(cluster, "two-shares", "pair", "model").await?;
        let embedder = probe(cluster, "two-shares", "pair", "embedder").await?;
        ensure!(model.len() == 1 && model[0] <= 12 * GIB && model[0] > 11 * GIB, "12 GiB asked: {model:?}");
        ensure!(
            embedder.len() == 1 && embedder[0] <= 3 * GIB && embedder[0] > 2 * GIB,
            "3 GiB asked: {embedder:?}"
        );
        cluster.delete_namespace("two-shares").await
    })
}

#[test]
fn two_pods_on_one_claim_both_run_and_share_one_limit() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "06-claim-shared-by-two-pods").await?;
        for pod in ["first", "second"] {
            let got = probe(cluster, "shared-claim", pod, "main").await?;
            ensure!(got.len() == 1 && got[0] <= 8 * GIB, "8 GiB between them: {got:?}");
        }
        cluster.delete_namespace("shared-claim").await
    })
}

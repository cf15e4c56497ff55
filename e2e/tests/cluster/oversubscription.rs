//! Managed memory beyond a share.

use crate::support::{GIB, on_cluster};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Runs no CUDA program, and ends when it is told to.
const IDLE: &str = "trap 'exit 0' TERM; while :; do sleep 0.2; done";

/// A claim of 1 GiB that asks for managed memory on top of it.
fn asking(namespace: &str, name: &str, oversubscribe: &str) -> Value {
    let mut claim = objects::claim(namespace, name, &[objects::share("gpu", "1Gi", 10)]);
    if let Some(devices) = claim.pointer_mut("/spec/devices") {
        devices["config"] = json!([{"opaque": {"driver": "gpu.aliquot.dev", "parameters": {
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "oversubscribe": oversubscribe}}}]);
    }
    claim
}

/// Bytes that a program in the pod is given before CUDA refuses.
fn given(cluster: &Cluster, namespace: &str, pod: &str, flags: &str) -> Result<u64> {
    let found = cluster.shell(namespace, pod, "main", &format!("cuda-probe {flags}"))?;
    let report: Value = serde_json::from_str(found.trim())?;
    let bytes = report.pointer("/devices/0/allocated_bytes").and_then(Value::as_u64);
    bytes.with_context(|| format!("no figure in {found}"))
}

#[test]
fn a_share_has_managed_memory_beyond_its_own_only_where_it_asks_and_the_nodes_allow_it() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("oversubscription").await?;
        let refused = cluster.create(&[asking(&namespace, "more", "2Gi")]);
        let text = refused.err().context("it is off by default")?;
        let wanted = "ShareConfig.oversubscribe: 2Gi is more managed memory beyond a share than the nodes give, 0 at most";
        ensure!(format!("{text:#}").contains(wanted), "{text:#}");

        cluster.configure(&["kubeletPlugin.oversubscribeAtMost=2Gi"]).await?;
        cluster.create(&[
            asking(&namespace, "more", "2Gi"),
            objects::claim(&namespace, "plain", &[objects::share("gpu", "1Gi", 10)]),
            PodManifest::of_claim(&namespace, "more", "more").shell(IDLE).build(),
            PodManifest::of_claim(&namespace, "plain", "plain").shell(IDLE).build(),
        ])?;
        for pod in ["more", "plain"] {
            cluster.running(&namespace, pod).await?;
            let own = given(cluster, &namespace, pod, "")?;
            ensure!(own > 0 && own <= GIB, "{pod}: {own} bytes of the device's own memory");
        }
        let more = given(cluster, &namespace, "more", "--managed")?;
        ensure!(more > 2 * GIB && more <= 3 * GIB, "1 GiB and 2 GiB of managed memory: {more}");
        let plain = given(cluster, &namespace, "plain", "--managed")?;
        ensure!(plain > 0 && plain <= GIB, "it did not ask: {plain}");
        cluster.delete_namespace(&namespace).await?;
        cluster.configure(&[]).await
    })
}

//! Leaving a cluster with pods running, and coming back.

use crate::hold::{hold_claims, retention_records, successors};
use crate::support::{GIB, on_cluster};
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::look::{containers, gated, phase};
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_model::names::{COMPANION_OF, GOING_BACK, HAND_OVER_ACKNOWLEDGED, LIMITS, SCHEDULER_IDLE};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use serde_json::json;

#[test]
fn after_an_uninstall_pods_run_on_and_end_and_nothing_of_ours_is_left() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        come_back(cluster, leave(cluster).await).await?;
        let namespace = cluster.namespace("again").await?;
        cluster.create(&[
            objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 10)]),
            PodManifest::of_template(&namespace, "user", "share").build(),
        ])?;
        cluster.report(&namespace, "user", "main").await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// Installs again after a test that left.
pub(crate) async fn come_back(cluster: &Cluster, outcome: Result<()>) -> Result<()> {
    // The same API server has seen the policies before (kubernetes#130887).
    cluster.kubectl(&["-n", SYSTEM, "delete", "pods", "-l", "app.kubernetes.io/component=farewell"])?;
    cluster.configure(&[]).await?;
    outcome
}

async fn leave(cluster: &Cluster) -> Result<()> {
    let namespace = cluster.namespace("uninstall").await?;
    cluster.create(&[
        objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 10)]),
        objects::template(&namespace, "part", &[objects::partition_of("gpu", "1g.10gb", "H100")]),
        objects::template(&namespace, "whole", &[objects::gpu_of("gpu", "L40S")]),
        PodManifest::of_template(&namespace, "share", "share").build(),
        PodManifest::of_template(&namespace, "part", "part").build(),
        PodManifest::of_template(&namespace, "whole", "whole").build(),
        objects::immediate(objects::claim(&namespace, "kept", &[objects::gpu_of("gpu", "H100")])),
    ])?;
    cluster.create(&[
        json!({
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuQuota",
            "metadata": {"name": "theirs", "namespace": &namespace}, "spec": {"hard": {"memory": "1Ti"}},
        }),
        json!({
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuBudget",
            "metadata": {"name": "theirs", "namespace": &namespace},
            "spec": {"gpuHours": 1000, "window": {"rolling": "24h"}, "enforcement": "Warn"},
        }),
    ])?;
    cluster
        .wait_for("a claim that has devices without a pod", || async {
            let claim = cluster.claim(&namespace, "kept").await?.context("no claim")?;
            Ok(claim.status.and_then(|status| status.allocation).map(drop))
        })
        .await?;
    let mut before = Vec::new();
    for pod in ["share", "part", "whole"] {
        before.push(cluster.running(&namespace, pod).await?);
    }
    let claim = cluster.claim_of(&namespace, "share").await?;
    cluster.kubectl(&[
        "-n",
        &namespace,
        "annotate",
        "resourceclaim",
        &claim,
        &format!("{LIMITS}=memory=6Gi"),
    ])?;
    cluster
        .wait_for("a share that grew", || async {
            let out = cluster.shell(&namespace, "share", "main", "cuda-probe --occupy 1")?;
            Ok(out.contains(&format!("\"total_bytes\":{}", 6 * GIB)).then_some(()))
        })
        .await?;
    cluster.create(&[PodManifest::of_template(&namespace, "waiting", "whole").build()])?;
    cluster
        .wait_for("a gated pod", || async {
            Ok(cluster.pod(&namespace, "waiting").await?.filter(gated).map(drop))
        })
        .await?;

    // As after a hand-over that was made long ago.
    cluster.kubectl(&["annotate", "nodes", "--all", &format!("{SCHEDULER_IDLE}=1")])?;

    cluster.uninstall()?;

    let left = cluster.cluster_objects().await?;
    ensure!(left.is_empty(), "left in the cluster: {left:?}");
    let notes = cluster.kubectl(&["-n", SYSTEM, "get", "leases,secrets", "-o", "name"])?;
    ensure!(!notes.contains("aliquot-controller") && !notes.contains("webhook"), "left: {notes}");
    let node = cluster.kubectl(&["get", "nodes", "-o", "jsonpath={.items[*].metadata.annotations}"])?;
    for note in [GOING_BACK, HAND_OVER_ACKNOWLEDGED, SCHEDULER_IDLE] {
        ensure!(!node.contains(note), "{note} is left: {node}");
    }
    for kind in ["gpuquotas.aliquot.dev", "gpubudgets.aliquot.dev"] {
        cluster.kubectl(&["-n", &namespace, "get", kind, "theirs"]).context("the users' own objects stay")?;
    }
    let waiting = cluster.pod(&namespace, "waiting").await?.context("no pod")?;
    ensure!(!gated(&waiting), "no gate of ours is left");
    let kept = cluster.claim(&namespace, "kept").await?.context("no claim")?;
    ensure!(
        kept.status.is_none_or(|status| status.allocation.is_none() && status.reserved_for.is_none()),
        "nobody keeps it any more"
    );
    let companions = cluster.claims().await?;
    let companions = companions.iter().filter(|claim| claim.annotations().contains_key(COMPANION_OF)).count();
    ensure!(companions == 0, "{companions} claims are left that hold what a share grew by");
    for pod in before {
        let name = pod.metadata.name.clone().context("no name")?;
        let now = cluster.running(&namespace, &name).await?;
        ensure!(containers(&now) == containers(&pod), "{name} was disturbed");
    }
    let got = cluster.shell(&namespace, "share", "main", "cuda-probe")?;
    let got: serde_json::Value = serde_json::from_str(got.trim())?;
    let bytes = got.pointer("/devices/0/allocated_bytes").and_then(serde_json::Value::as_u64);
    ensure!(bytes.is_some_and(|b| b <= 6 * GIB && b > 5 * GIB), "the limit holds without us: {got}");

    // Pods end, with nobody of ours but the farewell pod.
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), SYSTEM);
    let farewell = ListParams::default().labels("app.kubernetes.io/component=farewell");
    ensure!(pods.list(&farewell).await?.items.len() == 1, "one farewell pod on the one node");
    cluster.delete_namespace(&namespace).await?;
    for pod in ["share", "part", "whole", "waiting"] {
        cluster.pod_gone(&namespace, pod).await?;
    }
    cluster
        .wait_for("the farewell pod to complete", || async {
            let pods = pods.list(&farewell).await?.items;
            Ok(pods.iter().all(|p| phase(p) == "Succeeded").then_some(()))
        })
        .await?;
    nothing_on_the_node(cluster)
}

/// The folder that the limiter was installed to is a volume of pods, and stays empty.
fn nothing_on_the_node(cluster: &Cluster) -> Result<()> {
    ensure!(!cluster.agent_dir()?.exists(), "the agent's data is left");
    let left = cluster.node_leftovers()?;
    ensure!(left.is_empty(), "left on the node: {left:?}");
    let limiter = std::fs::read_dir(cluster.limiter_dir()?)?.count();
    ensure!(limiter == 0, "{limiter} versions of the limiter are left");
    Ok(())
}

/// Where nothing runs, the files go at once, and the pods that did it.
#[test]
fn an_uninstall_without_claims_leaves_nothing_on_the_node() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let outcome = async {
            cluster.uninstall()?;
            let pods = Api::<Pod>::namespaced(cluster.client.clone(), SYSTEM);
            let farewell = ListParams::default().labels("app.kubernetes.io/component=farewell");
            let left = pods.list(&farewell).await?.items;
            ensure!(left.is_empty(), "farewell pods are left: {left:?}");
            nothing_on_the_node(cluster)
        }
        .await;
        come_back(cluster, outcome).await
    })
}

/// One pod of a StatefulSet has ended and its devices are kept by a claim of ours; of the other it is written
/// down what it will leave.
#[test]
fn an_uninstall_leaves_neither_hold_claims_nor_wills_and_no_claim_that_cannot_go() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let outcome = leave_with_successors(cluster).await;
        come_back(cluster, outcome).await
    })
}

async fn leave_with_successors(cluster: &Cluster) -> Result<()> {
    let namespace = cluster.namespace("successors-left").await?;
    cluster.create(&successors(&namespace, 2)?)?;
    cluster.running(&namespace, "web-0").await?;
    cluster.running(&namespace, "web-1").await?;
    retention_records(cluster, 2).await?;
    cluster.kubectl(&["-n", &namespace, "scale", "statefulset", "web", "--replicas=1"])?;
    hold_claims(cluster, &namespace, 1).await?;
    retention_records(cluster, 1).await?;
    let before = cluster.running(&namespace, "web-0").await?;

    cluster.uninstall()?;

    retention_records(cluster, 0).await?;
    hold_claims(cluster, &namespace, 0).await?;
    let own = cluster.claim_of(&namespace, "web-0").await?;
    for claim in cluster.claims().await? {
        ensure!(claim.metadata.deletion_timestamp.is_none(), "{} is Terminating", claim.name_any());
        ensure!(claim.name_any() == own, "{} is left", claim.name_any());
    }
    let left = cluster.cluster_objects().await?;
    ensure!(left.is_empty(), "left in the cluster: {left:?}");
    let after = cluster.running(&namespace, "web-0").await?;
    ensure!(containers(&before) == containers(&after), "its pod was disturbed");
    // With the StatefulSet gone nothing needs us to end.
    cluster.kubectl(&["-n", &namespace, "delete", "statefulset", "web"])?;
    cluster.pod_gone(&namespace, "web-0").await?;
    cluster.delete_namespace(&namespace).await?;
    cluster.clean().await
}

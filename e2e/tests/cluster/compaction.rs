//! Pods that allow it are moved into gaps, so that a GPU becomes free.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::command;
use aliquot_e2e::look::{device_names, phase};
use aliquot_model::names::COMPACTION;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const NAMESPACE: &str = "compaction";

/// The GPU of each pod of a Deployment, by the pods that claims with devices are reserved for.
async fn gpus_by_pod(cluster: &Cluster, app: &str) -> Result<BTreeMap<String, String>> {
    let mut gpus = BTreeMap::new();
    for claim in cluster.claims().await? {
        if claim.metadata.namespace.as_deref() != Some(NAMESPACE) {
            continue;
        }
        let Some(status) = claim.status else { continue };
        let user = status.reserved_for.and_then(|users| Some(users.into_iter().next()?.name));
        let device = status.allocation.as_ref().and_then(|given| device_names(given).into_iter().next());
        if let (Some(user), Some(device)) = (user, device)
            && user.starts_with(app)
        {
            gpus.insert(user, device.split('-').take(2).collect::<Vec<_>>().join("-"));
        }
    }
    Ok(gpus)
}

/// The GPUs of a Deployment, once so many pods of it have something of one, and all of them run.
async fn gpus_of(cluster: &Cluster, app: &str, pods: usize) -> Result<BTreeSet<String>> {
    cluster
        .wait_for(&format!("{pods} pods of {app} with devices"), || async {
            let gpus = gpus_by_pod(cluster, app).await?;
            for pod in gpus.keys() {
                let pod = cluster.pod(NAMESPACE, pod).await?.context("it is gone")?;
                ensure!(phase(&pod) == "Running", "it does not run");
            }
            Ok((gpus.len() == pods).then(|| gpus.into_values().collect()))
        })
        .await
}

fn scale(cluster: &Cluster, app: &str, replicas: usize) -> Result<()> {
    let replicas = format!("--replicas={replicas}");
    cluster.kubectl(&["-n", NAMESPACE, "scale", &format!("deployment/{app}"), &replicas]).map(drop)
}

/// The example, until each of its two Deployments has half of another GPU; these two.
async fn two_halves(cluster: &Cluster) -> Result<(BTreeSet<String>, BTreeSet<String>)> {
    let path = cluster.repo().join("examples/12-compaction/12-compaction.yaml");
    cluster.apply(&std::fs::read_to_string(&path).with_context(|| path.display().to_string())?)?;
    let stays = gpus_of(cluster, "stays", 1).await?;
    ensure!(gpus_of(cluster, "leaves", 1).await? == stays, "two halves are on one GPU");
    scale(cluster, "moves", 1)?;
    let moves = gpus_of(cluster, "moves", 1).await?;
    scale(cluster, "leaves", 0)?;
    gpus_of(cluster, "leaves", 0).await?;
    ensure!(stays != moves, "each half empty: {stays:?}, {moves:?}");
    Ok((stays, moves))
}

fn plan(cluster: &Cluster) -> Result<String> {
    let kubeconfig = cluster.setting("KUBECONFIG")?;
    command::run(cluster.program("aliquot"), &["plan", "--compact", "--kubeconfig", kubeconfig])
}

/// Between two looks of the controller at the cluster, and some more.
const A_LOOK: Duration = Duration::from_secs(10);

/// Nobody is evicted as long as the controller needs to look again.
async fn nobody_moves(cluster: &Cluster) -> Result<()> {
    let before = gpus_by_pod(cluster, "").await?;
    ensure!(before.len() == 2, "{before:?}");
    cluster
        .holds_for(A_LOOK, || async {
            let now = gpus_by_pod(cluster, "").await?;
            ensure!(now == before, "{now:?} instead of {before:?}");
            for pod in now.keys() {
                let pod = cluster.pod(NAMESPACE, pod).await?.context("it is gone")?;
                ensure!(pod.metadata.deletion_timestamp.is_none(), "it was evicted");
            }
            Ok(())
        })
        .await
}

/// How often GPUs were given up, by the controllers that run.
async fn given_up(cluster: &Cluster) -> Result<bool> {
    let mut found = false;
    for pod in cluster.system_pods("controller").await? {
        let metrics = cluster.metrics(&pod).await?;
        let mut lines = metrics.lines().filter(|line| line.contains("compactions_total"));
        found |= lines.any(|line| line.contains("given_up") && !line.ends_with(" 0"));
    }
    Ok(found)
}

#[test]
fn nobody_is_moved_below_the_threshold_without_consent_or_against_a_disruption_budget() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let outcome = refusals(cluster).await;
        cluster.delete_namespace(NAMESPACE).await?;
        cluster.configure(&[]).await?;
        outcome
    })
}

async fn refusals(cluster: &Cluster) -> Result<()> {
    let enabled = "controller.compaction.enabled=true";
    let (stays, moves) = two_halves(cluster).await?;
    cluster.configure(&[enabled, "controller.compaction.thresholdPercent=60"]).await?;
    let said = plan(cluster)?;
    ensure!(said.contains("fragmentation 27 %"), "{said}");
    nobody_moves(cluster).await.context("below the threshold")?;

    let pods = gpus_by_pod(cluster, "moves").await?;
    let pod = pods.keys().next().context("a pod")?;
    cluster.kubectl(&["-n", NAMESPACE, "annotate", "pod", pod, &format!("{COMPACTION}-")])?;
    cluster.configure(&[enabled, "controller.compaction.thresholdPercent=5"]).await?;
    let said = plan(cluster)?;
    ensure!(said.contains("no GPU can be emptied"), "{said}");
    for pod in gpus_by_pod(cluster, "").await?.keys() {
        let why = format!("pod {NAMESPACE}/{pod} does not allow it (annotation {COMPACTION}: Allow)");
        ensure!(said.contains(&why), "{why} is missing: {said}");
    }
    nobody_moves(cluster).await.context("without consent")?;

    let labels = json!({"app": "moves"});
    cluster.create(&[json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
        "metadata": {"name": "moves", "namespace": NAMESPACE},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}},
    })])?;
    cluster
        .wait_for("the budget to be in force", || async {
            let path = "jsonpath={.status.currentHealthy}";
            let healthy = cluster.kubectl(&["-n", NAMESPACE, "get", "pdb", "moves", "-o", path])?;
            Ok((healthy == "1").then_some(()))
        })
        .await?;
    cluster.kubectl(&["-n", NAMESPACE, "annotate", "pod", pod, &format!("{COMPACTION}=Allow")])?;
    let told = cluster.event("default", &format!("is not emptied: pod {NAMESPACE}/{pod}")).await?;
    ensure!(told.contains("disruption budget"), "{told}");
    ensure!(given_up(cluster).await?, "it is counted");
    ensure!(gpus_of(cluster, "moves", 1).await? == moves && gpus_of(cluster, "stays", 1).await? == stays);
    let still = gpus_by_pod(cluster, "moves").await?;
    ensure!(still == pods, "the same pod: {still:?}");
    Ok(())
}

#[test]
fn a_pod_that_allows_it_is_moved_beside_another_and_a_gpu_becomes_free() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let (stays, moves) = two_halves(cluster).await?;
        let said = plan(cluster)?;
        let freed = moves.iter().next().context("a GPU")?;
        ensure!(said.contains(&format!("empty {freed} of node")), "{said}");
        ensure!(gpus_of(cluster, "moves", 1).await? == moves, "a plan moves nothing");

        cluster
            .configure(&["controller.compaction.enabled=true", "controller.compaction.thresholdPercent=5"])
            .await?;
        let outcome = async {
            cluster
                .wait_for("both on one GPU", || async {
                    let gpus: BTreeSet<String> = gpus_by_pod(cluster, "moves").await?.into_values().collect();
                    Ok((gpus == stays).then_some(()))
                })
                .await?;
            ensure!(gpus_of(cluster, "stays", 1).await? == stays, "who did not allow it stayed");
            cluster.event(NAMESPACE, "becomes free as a whole").await
        }
        .await;
        cluster.delete_namespace(NAMESPACE).await?;
        cluster.configure(&[]).await?;
        outcome.map(drop)
    })
}

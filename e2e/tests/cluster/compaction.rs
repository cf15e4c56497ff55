//! Pods that allow it are moved into gaps, so that a GPU becomes free.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::command;
use aliquot_e2e::look::{device_names, phase};
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};

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
            && user.starts_with(&format!("{app}-"))
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

#[test]
fn a_pod_that_allows_it_is_moved_beside_another_and_a_gpu_becomes_free() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let path = cluster.repo().join("examples/12-compaction/12-compaction.yaml");
        cluster.apply(&std::fs::read_to_string(&path).with_context(|| path.display().to_string())?)?;
        ensure!(gpus_of(cluster, "stays", 3).await?.len() == 2, "three halves are on two GPUs");
        scale(cluster, "moves", 1)?;
        gpus_of(cluster, "moves", 1).await?;
        // Of the three the one stays that is not beside the pod that may be moved.
        let beside = gpus_of(cluster, "moves", 1).await?;
        let mut elsewhere =
            gpus_by_pod(cluster, "stays").await?.into_iter().filter(|(_, gpu)| !beside.contains(gpu));
        let (kept, _) = elsewhere.next().context("a pod on the other GPU")?;
        let cost = "controller.kubernetes.io/pod-deletion-cost=1000";
        cluster.kubectl(&["-n", NAMESPACE, "annotate", "pod", &kept, cost])?;
        scale(cluster, "stays", 1)?;
        let stays = gpus_of(cluster, "stays", 1).await?;
        let moves = gpus_of(cluster, "moves", 1).await?;
        ensure!(stays != moves, "each half empty: {stays:?}, {moves:?}");
        let kubeconfig = cluster.setting("KUBECONFIG")?;
        let said =
            command::run(cluster.program("aliquot"), &["plan", "--compact", "--kubeconfig", kubeconfig])?;
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

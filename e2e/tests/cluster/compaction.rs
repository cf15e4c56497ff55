//! Pods that allow it are moved into gaps, so that a GPU becomes free.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::command;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;

const NAMESPACE: &str = "compaction";

/// The GPUs on which the pods of a Deployment have something, once so many of them run.
async fn gpus_of(cluster: &Cluster, app: &str, pods: usize) -> Result<BTreeSet<String>> {
    let selector = format!("app={app}");
    let listed = cluster
        .wait_for(&format!("{pods} running pods of {app}"), || async {
            let query = r#"{range .items[?(@.status.phase=="Running")]}{.metadata.name}{"\n"}{end}"#;
            let names = cluster.kubectl(&[
                "-n",
                NAMESPACE,
                "get",
                "pods",
                "-l",
                &selector,
                "-o",
                &format!("jsonpath={query}"),
            ])?;
            let names: Vec<String> = names.lines().map(str::to_owned).collect();
            Ok((names.len() == pods).then_some(names))
        })
        .await?;
    let mut gpus = BTreeSet::new();
    for pod in listed {
        for device in cluster.devices_of(NAMESPACE, &pod).await? {
            gpus.insert(device.split('-').take(2).collect::<Vec<_>>().join("-"));
        }
    }
    Ok(gpus)
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
        let kept = pod_elsewhere(cluster, &beside).await?.context("a pod on the other GPU")?;
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
                    Ok((gpus_of(cluster, "moves", 1).await? == stays).then_some(()))
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

/// A pod of `stays` on a GPU on which none of `moves` is.
async fn pod_elsewhere(cluster: &Cluster, beside: &BTreeSet<String>) -> Result<Option<String>> {
    let names = cluster.kubectl(&[
        "-n",
        NAMESPACE,
        "get",
        "pods",
        "-l",
        "app=stays",
        "-o",
        r#"jsonpath={range .items[*]}{.metadata.name}{"\n"}{end}"#,
    ])?;
    for pod in names.lines() {
        let devices = cluster.devices_of(NAMESPACE, pod).await?;
        let elsewhere =
            |device: &String| !beside.contains(&device.split('-').take(2).collect::<Vec<_>>().join("-"));
        if devices.iter().any(elsewhere) {
            return Ok(Some(pod.to_owned()));
        }
    }
    Ok(None)
}

//! The node agent's checkpoint is lost under running pods.

use crate::agent::kill;
use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::containers;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Result, ensure};
use std::fs;

/// What becomes of both copies.
#[derive(Debug, Clone, Copy)]
enum Loss {
    Gone,
    Garbage,
}

fn lose(cluster: &Cluster, loss: Loss) -> Result<()> {
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        let path = cluster.agent_dir()?.join(name);
        match loss {
            Loss::Gone => fs::remove_file(path)?,
            Loss::Garbage => fs::write(path, "garbage")?,
        }
    }
    Ok(())
}

/// How often the node's events have a text.
async fn told(cluster: &Cluster, text: &str) -> Result<usize> {
    Ok(cluster.events("default").await?.lines().filter(|line| line.contains(text)).count())
}

/// Loses the checkpoint under an agent that is killed, and waits until the ledger is what it was.
async fn lose_and_find_again(cluster: &Cluster, loss: Loss, claims: &[String]) -> Result<()> {
    let before = told(cluster, "LedgerRebuilt: everything is accounted for").await?;
    lose(cluster, loss)?;
    kill(cluster).await?;
    cluster
        .wait_for(&format!("the ledger after {loss:?}"), || async {
            let over = told(cluster, "LedgerRebuilt: everything is accounted for").await? > before;
            // While it is written anew it may not read.
            let ledger = cluster.ledger().unwrap_or_default();
            let found = claims.iter().all(|uid| ledger.contains(uid));
            Ok((over && found).then_some(()))
        })
        .await
}

#[test]
fn after_the_loss_of_its_checkpoint_the_agent_finds_every_pod_s_devices_and_disturbs_none() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster.renew_agent().await?;
        let namespace = cluster.namespace("lost").await?;
        let part = [objects::partition_of("gpu", "2g.20gb", "H100")];
        let kept = objects::claim(&namespace, "kept", &[objects::partition_of("gpu", "1g.10gb", "A100")]);
        cluster.create(&[
            objects::template(&namespace, "part", &part),
            objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 10)]),
            objects::retained(kept),
            PodManifest::of_template(&namespace, "part", "part").build(),
            PodManifest::of_template(&namespace, "share", "share").build(),
            PodManifest::of_claim(&namespace, "notebook", "kept").build(),
        ])?;
        let before =
            [cluster.running(&namespace, "part").await?, cluster.running(&namespace, "share").await?];
        cluster.running(&namespace, "notebook").await?;
        let all = cluster.ledger()?;
        // What is left of the claim between two of its pods is its partition alone.
        cluster.delete_pod(&namespace, "notebook").await?;
        cluster.pod_gone(&namespace, "notebook").await?;
        let specs = cluster.cdi_specs()?;
        ensure!(specs.len() + 1 == all.len(), "kept without a CDI spec: {all:?}");
        let in_use: Vec<String> =
            all.into_iter().filter(|uid| specs.iter().any(|(name, _)| name.contains(uid.as_str()))).collect();
        for loss in [Loss::Gone, Loss::Garbage] {
            lose_and_find_again(cluster, loss, &in_use).await?;
            for pod in &before {
                let name = pod.metadata.name.as_deref().unwrap_or_default();
                let now = cluster.running(&namespace, name).await?;
                ensure!(containers(&now) == containers(pod), "{name} was disturbed by {loss:?}");
                cluster.shell(&namespace, name, "main", "cuda-probe")?;
            }
            let now = cluster.cdi_specs()?;
            ensure!(specs.iter().all(|spec| now.contains(spec)), "specs of running pods are as they were");
        }
        cluster.create(&[
            PodManifest::of_claim(&namespace, "notebook", "kept").build(),
            PodManifest::of_template(&namespace, "new", "share").build(),
        ])?;
        cluster.report(&namespace, "new", "main").await?;
        let report = cluster.report(&namespace, "notebook", "main").await?;
        ensure!(report.names.iter().all(|name| name.contains("1g.10gb")), "{report:?}");
        cluster.delete_namespace(&namespace).await
    })
}

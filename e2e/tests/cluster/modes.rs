//! Who allocates, and how that changes while pods run.

use crate::support::{GIB, on_cluster};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::{allocated_by, containers};
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};

async fn writers(cluster: &Cluster, namespace: &str, pod: &str) -> Result<Vec<String>> {
    let name = cluster.claim_of(namespace, pod).await?;
    let claim = cluster.claim(namespace, &name).await?.context("no claim")?;
    Ok(allocated_by(&claim).into_iter().collect())
}

#[test]
fn the_allocator_changes_and_changes_back_while_pods_run() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("modes").await?;
        let create = |names: &[(&str, &str)]| {
            let pods = names.iter().map(|(pod, t)| PodManifest::of_template(&namespace, pod, t).build());
            cluster.create(&pods.collect::<Vec<_>>())
        };
        cluster.create(&[
            objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 10)]),
            objects::template(&namespace, "part", &[objects::partition_of("gpu", "1g.10gb", "A100")]),
            objects::template(&namespace, "whole", &[objects::gpu_of("gpu", "L40S")]),
        ])?;
        create(&[("share-1", "share"), ("part-1", "part")])?;
        let before =
            [cluster.running(&namespace, "share-1").await?, cluster.running(&namespace, "part-1").await?];

        let outcome = async {
            cluster.allocator(Some("scheduler")).await?;
            create(&[("share-2", "share"), ("part-2", "part"), ("whole-2", "whole")])?;
            for pod in ["share-2", "part-2", "whole-2"] {
                cluster.running(&namespace, pod).await?;
                let writers = writers(cluster, &namespace, pod).await?;
                ensure!(writers == ["kube-scheduler"], "{pod} was allocated by {writers:?}");
            }
            let got = cluster.report(&namespace, "share-2", "main").await?;
            ensure!(
                got.allocated.iter().all(|b| *b <= 2 * GIB && *b > GIB),
                "the limit holds as well: {got:?}"
            );
            // One that has to wait is given what becomes free, by whom it may be.
            create(&[("whole-3", "whole")])?;
            cluster.event(&namespace, "whole-3").await?;
            cluster.delete_pod(&namespace, "whole-2").await?;
            cluster.running(&namespace, "whole-3").await?;
            let who = writers(cluster, &namespace, "whole-3").await?;
            ensure!(who == ["kube-scheduler"], "whole-3 was allocated by {who:?}");
            create(&[("whole-4", "whole")])?;
            cluster.event(&namespace, "whole-4").await?;
            anyhow::Ok(())
        }
        .await;
        cluster.allocator(None).await?;
        outcome?;

        create(&[("share-4", "share")])?;
        cluster.running(&namespace, "share-4").await?;
        let who = writers(cluster, &namespace, "share-4").await?;
        ensure!(who == ["aliquot-controller"], "share-4 was allocated by {who:?}");
        // What kube-scheduler gave out is taken into account, and what waited there is served here.
        let first = cluster.devices_of(&namespace, "whole-3").await?;
        cluster.delete_pod(&namespace, "whole-3").await?;
        cluster.running(&namespace, "whole-4").await?;
        ensure!(cluster.devices_of(&namespace, "whole-4").await? == first, "the only L40S");
        let who = writers(cluster, &namespace, "whole-4").await?;
        ensure!(who == ["aliquot-controller"], "whole-4 was allocated by {who:?}");
        for pod in before {
            let name = pod.metadata.name.clone().context("no name")?;
            let now = cluster.running(&namespace, &name).await?;
            ensure!(containers(&now) == containers(&pod), "{name} was disturbed");
        }
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn scheduler_mode_works_without_any_controller() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let outcome = async {
            cluster.configure(&["mode=scheduler", "controller.enabled=false"]).await?;
            cluster
                .wait_for("slices without the controller's taint", || async {
                    let taints = cluster.controller_taints().await?;
                    Ok((taints.len() == 1 && taints.contains(&None)).then_some(()))
                })
                .await?;
            ensure!(cluster.system_pods("controller").await?.is_empty(), "no controller");
            let namespace = cluster.namespace("alone").await?;
            let requests = [
                objects::partition_of("part", "2g.20gb", "H100"),
                objects::share("share", "3Gi", 25),
                objects::gpu_of("whole", "L40S"),
            ];
            let pod = PodManifest::new(&namespace, "user")
                .template("gpu", "three")
                .container("part", &[("gpu", Some("part"))])
                .container("share", &[("gpu", Some("share"))])
                .container("whole", &[("gpu", Some("whole"))]);
            cluster.create(&[objects::template(&namespace, "three", &requests), pod.build()])?;
            let part = cluster.report(&namespace, "user", "part").await?;
            ensure!(part.names.iter().all(|n| n.contains("MIG 2g.20gb")), "{part:?}");
            let share = cluster.report(&namespace, "user", "share").await?;
            ensure!(share.allocated.iter().all(|b| *b <= 3 * GIB && *b > 2 * GIB), "{share:?}");
            let whole = cluster.report(&namespace, "user", "whole").await?;
            ensure!(whole.names.iter().all(|n| n.contains("L40S")), "{whole:?}");
            cluster.delete_namespace(&namespace).await?;
            cluster.clean().await
        }
        .await;
        cluster.configure(&[]).await?;
        cluster.allocator(None).await?;
        outcome
    })
}

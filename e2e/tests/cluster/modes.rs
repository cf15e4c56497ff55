//! Who allocates, and how that changes while pods run.

use crate::support::{GIB, on_cluster};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::{allocated_by, containers};
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::json;

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

/// Without looking what is under way each of these would last for a day.
#[test]
fn a_hand_over_to_the_controller_ends_when_kube_scheduler_has_nothing_under_way() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let outcome = async {
            cluster
                .configure(&[
                    "controller.extraArgs={--lease-duration=8s,--idle-timeout=10s,--scheduler-settle=2s}",
                    "kubeletPlugin.extraArgs={--scheduler-timeouts=24h,--absent-controller-grace=3s}",
                ])
                .await?;
            cluster.allocator(Some("scheduler")).await?;
            cluster.allocator(None).await?;

            // A pod whose scheduler could give it devices at any time.
            cluster.allocator(Some("scheduler")).await?;
            let namespace = cluster.namespace("hand-over").await?;
            let pod = PodManifest::of_template(&namespace, "under-way", "share");
            cluster.create(&[
                objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 10)]),
                pod.with("schedulerName", json!("nobody")).build(),
            ])?;
            let pods = Api::<Pod>::namespaced(cluster.client.clone(), &namespace);
            cluster
                .wait_for("the pod without a gate", || async {
                    let spec = pods.get("under-way").await?.spec.unwrap_or_default();
                    Ok(spec.scheduling_gates.unwrap_or_default().is_empty().then_some(()))
                })
                .await?;
            cluster.kubectl(&[
                "label",
                "node",
                cluster.setting("NODE_NAME")?,
                "aliquot.dev/allocator-mode-",
            ])?;
            let told = cluster.event("default", &format!("{namespace}/under-way")).await?;
            ensure!(told.contains("HandOverWaits") && told.contains("at the latest"), "{told}");
            ensure!(cluster.controller_taints().await? == [Some("hand-over".to_owned())].into());
            // Who waits for devices meanwhile is told so.
            cluster.create(&[PodManifest::of_template(&namespace, "waits", "share").build()])?;
            let told = cluster.event(&namespace, "waits DevicesDoNotFit").await?;
            ensure!(told.contains("being handed over") && told.contains("at the latest"), "{told}");
            let text = cluster.explain(&["pod", "waits", "-n", &namespace])?;
            ensure!(text.contains("nearest: node") && text.contains("being handed over"), "{text}");
            cluster.delete_pod(&namespace, "under-way").await?;
            cluster.running(&namespace, "waits").await?;
            let who = writers(cluster, &namespace, "waits").await?;
            ensure!(who == ["aliquot-controller"], "waits was allocated by {who:?}");
            cluster.delete_namespace(&namespace).await
        }
        .await;
        cluster.configure(&[]).await?;
        cluster.allocator(None).await?;
        outcome
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
            cluster.no_system_pods("controller").await?;
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

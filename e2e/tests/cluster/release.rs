//! A release, from `dist/` to a cluster, to the next one, back, and away.

use crate::support::{GIB, on_cluster};
use crate::uninstall::come_back;
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::look::containers;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_e2e::release::{PULL_SECRET, Registry, Release};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::batch::v1::{Job, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use serde_json::json;

/// The one that was built here, and what comes after it.
const VERSIONS: [&str; 2] = [env!("CARGO_PKG_VERSION"), "99.0.0-next"];
/// Pods that come and go at the same time.
const AT_ONCE: usize = 3;
/// So many more have ended well before the next step is taken, and after the last.
const SOME: i32 = 4;

#[test]
fn a_release_is_installed_from_a_registry_goes_to_the_next_and_back_under_load_and_leaves() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let registry = Registry::start(cluster).await?;
        let mut releases = Vec::new();
        for version in VERSIONS {
            releases.push(Release::make(cluster, &registry, version)?);
        }
        // As somebody who has never had it.
        cluster.uninstall()?;
        let outcome = async {
            registry.admit(cluster)?;
            under_load(cluster, &registry, &releases).await
        };
        let outcome = outcome.await;
        come_back(cluster, outcome).await
    })
}

async fn under_load(cluster: &Cluster, registry: &Registry, releases: &[Release]) -> Result<()> {
    let [now, next] = releases else { anyhow::bail!("two releases are needed") };
    set_up(cluster, registry, now).await?;
    let example = std::fs::read_to_string(cluster.repo().join("examples/04-share/04-share.yaml"))?;
    cluster.apply(&example)?;
    let got = cluster.probe("share", "chatbot", "main").await?;
    ensure!(got.allocated.iter().all(|bytes| *bytes < 10 * GIB), "a share of 10 GiB: {got:?}");
    let stays = cluster.running("share", "chatbot").await?;

    let namespace = cluster.namespace("load").await?;
    cluster.create(&[
        objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 10)]),
        job(&namespace),
    ])?;
    for (release, what) in [(now, "before"), (next, "on the next release"), (now, "back on the first")] {
        set_up(cluster, registry, release).await?;
        more(cluster, &namespace, what).await?;
    }
    let load = status(cluster, &namespace).await?;
    let why = failed(cluster, &namespace).await?;
    ensure!(load.failed.unwrap_or_default() == 0, "pods failed while releases were exchanged: {why}");
    let is = cluster.running("share", "chatbot").await?;
    ensure!(containers(&is) == containers(&stays), "a pod that ran all the while was disturbed");
    let got = cluster.shell("share", "chatbot", "main", "cuda-probe")?;
    ensure!(got.contains("\"refused_with\":2"), "its limit holds: {got}");
    cluster.delete_namespace(&namespace).await?;
    cluster.delete_namespace("share").await?;
    cluster.clean().await?;

    cluster.uninstall()?;
    let left = cluster.cluster_objects().await?;
    ensure!(left.is_empty(), "left in the cluster: {left:?}");
    Ok(())
}

/// Installs or upgrades, as its chart says and with what the registry asks for, until all pods are of it.
async fn set_up(cluster: &Cluster, registry: &Registry, release: &Release) -> Result<()> {
    let secret = format!("image.pullSecrets={{{PULL_SECRET}}}");
    cluster.install_chart(&release.chart, &[&secret]).await?;
    let wanted = format!("{}:{}", registry.repository(), release.version);
    let all = ListParams::default();
    let deployments = Api::<Deployment>::namespaced(cluster.client.clone(), SYSTEM).list(&all).await?;
    let daemons = Api::<DaemonSet>::namespaced(cluster.client.clone(), SYSTEM).list(&all).await?;
    let templates =
        deployments.items.into_iter().filter_map(|deployment| deployment.spec).map(|spec| spec.template);
    let templates =
        templates.chain(daemons.items.into_iter().filter_map(|set| set.spec).map(|spec| spec.template));
    let images = templates.filter_map(|template| template.spec).flat_map(|pod| pod.containers);
    let images: Vec<String> = images.filter_map(|container| container.image).collect();
    ensure!(images.len() == 2 && images.iter().all(|image| *image == wanted), "{images:?} and not {wanted}");
    Ok(())
}

/// Pods that each take a share up to its limit, one after the other without end.
fn job(namespace: &str) -> serde_json::Value {
    let pod = PodManifest::of_template(namespace, "load", "share").shell("exec cuda-probe").build();
    json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "load", "namespace": namespace},
        "spec": {"parallelism": AT_ONCE, "completions": 100_000, "backoffLimit": 0,
            "template": {"spec": pod.get("spec")}},
    })
}

async fn status(cluster: &Cluster, namespace: &str) -> Result<JobStatus> {
    let job = Api::<Job>::namespaced(cluster.client.clone(), namespace).get("load").await?;
    job.status.with_context(|| format!("{} has no status", job.metadata.name.unwrap_or_default()))
}

/// Waits until more pods have ended well.
async fn more(cluster: &Cluster, namespace: &str, when: &str) -> Result<()> {
    let ended = || async {
        let status = status(cluster, namespace).await?;
        ensure!(
            status.failed.unwrap_or_default() == 0,
            "pods failed {when}: {}",
            failed(cluster, namespace).await?
        );
        anyhow::Ok(status.succeeded.unwrap_or_default())
    };
    let wanted = cluster.wait_for("the first pods", || async { Ok(Some(ended().await?)) }).await? + SOME;
    let enough = || async { Ok((ended().await? >= wanted).then_some(())) };
    cluster.wait_for(&format!("{SOME} more pods that end well {when}"), enough).await
}

/// Why pods failed.
async fn failed(cluster: &Cluster, namespace: &str) -> Result<String> {
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), namespace).list(&ListParams::default()).await?;
    let failed = pods.items.into_iter().filter_map(|pod| {
        let status = pod.status.filter(|status| status.phase.as_deref() == Some("Failed"))?;
        let ended = status.container_statuses.into_iter().flatten().map(|container| container.state);
        let ended: Vec<_> = ended.flatten().filter_map(|state| state.terminated).collect();
        Some(format!("{:?}: {:?} {:?}", pod.metadata.name, status.message, ended))
    });
    Ok(failed.collect::<Vec<_>>().join("\n"))
}

//! The kubelet restarts, with pods running.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::containers;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};

#[test]
fn a_kubelet_restart_disturbs_no_pod_and_brings_the_slices_back() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("kubelet").await?;
        cluster.create(&[
            objects::template(&namespace, "part", &[objects::partition_of("gpu", "1g.10gb", "H100")]),
            objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 10)]),
            PodManifest::of_template(&namespace, "part", "part").build(),
            PodManifest::of_template(&namespace, "share", "share").build(),
        ])?;
        let before =
            [cluster.running(&namespace, "part").await?, cluster.running(&namespace, "share").await?];
        let (specs, instances, devices) =
            (cluster.cdi_specs()?, cluster.gpu_instances()?, cluster.devices().await?);
        let old: Vec<_> = cluster.slices().await?.into_iter().map(|s| s.metadata.uid).collect();
        cluster.component("restart", "kubelet")?;
        // At its start the kubelet deletes the slices of its node (reference: wipeResourceSlices).
        cluster
            .wait_for("new slices", || async {
                let slices = cluster.slices().await?;
                let fresh = !slices.is_empty() && slices.iter().all(|s| !old.contains(&s.metadata.uid));
                Ok((fresh && cluster.devices().await?.len() == devices.len()).then_some(()))
            })
            .await?;
        for pod in before {
            let name = pod.metadata.name.clone().context("no name")?;
            let now = cluster.running(&namespace, &name).await?;
            ensure!(containers(&now) == containers(&pod), "{name} was disturbed");
        }
        ensure!(cluster.gpu_instances()? == instances, "the partition is the same");
        // The new kubelet asks for every claim again and gets the same answer.
        cluster.create(&[PodManifest::of_template(&namespace, "new", "share").build()])?;
        cluster.report(&namespace, "new", "main").await?;
        let now = cluster.cdi_specs()?;
        ensure!(specs.iter().all(|spec| now.contains(spec)), "specs of running pods are as they were");
        cluster.shell(&namespace, "share", "main", "cuda-probe")?;
        cluster.delete_namespace(&namespace).await
    })
}

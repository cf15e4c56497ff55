//! The node agent is killed, with pods running and at every stage of its work.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::containers;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_e2e::process;
use anyhow::{Result, ensure};
use std::time::Duration;

/// Kills the agent and waits until its container runs again.
pub(crate) async fn kill(cluster: &Cluster) -> Result<()> {
    let old = process::agent()?;
    old.kill()?;
    cluster
        .wait_for("a new agent", || async {
            let new = process::agent()?;
            Ok((new.pid != old.pid).then_some(()))
        })
        .await
}

#[test]
fn killing_the_agent_disturbs_no_running_pod() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster.renew_agent().await?;
        let namespace = cluster.namespace("kill").await?;
        cluster.create(&[
            objects::template(&namespace, "part", &[objects::partition_of("gpu", "2g.20gb", "H100")]),
            objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 10)]),
            PodManifest::of_template(&namespace, "part", "part").build(),
            PodManifest::of_template(&namespace, "share", "share").build(),
        ])?;
        let part = cluster.running(&namespace, "part").await?;
        let share = cluster.running(&namespace, "share").await?;
        let (specs, instances) = (cluster.cdi_specs()?, cluster.gpu_instances()?);
        kill(cluster).await?;
        // What it holds it still knows, and what is new it serves.
        cluster.create(&[PodManifest::of_template(&namespace, "new", "share").build()])?;
        cluster.report(&namespace, "new", "main").await?;
        ensure!(containers(&cluster.running(&namespace, "part").await?) == containers(&part));
        ensure!(containers(&cluster.running(&namespace, "share").await?) == containers(&share));
        let now = cluster.cdi_specs()?;
        ensure!(specs.iter().all(|spec| now.contains(spec)), "specs of running pods are as they were");
        ensure!(cluster.gpu_instances()? == instances, "no partition came or went");
        cluster.shell(&namespace, "part", "main", "cuda-probe")?;
        cluster.shell(&namespace, "share", "main", "cuda-probe")?;
        cluster.delete_namespace(&namespace).await
    })
}

/// Kills the agent while it is inside a call of the driver that a new pod makes it do.
async fn kill_inside(cluster: &Cluster, function: &str) -> Result<()> {
    cluster.renew_agent().await?;
    let namespace = cluster.namespace("prepare").await?;
    let rule = cluster.delay_calls(function, Duration::from_secs(60))?;
    cluster.create(&[
        objects::template(&namespace, "part", &[objects::partition_of("gpu", "3g.40gb", "H100")]),
        PodManifest::of_template(&namespace, "user", "part").build(),
    ])?;
    cluster
        .wait_for(&format!("the agent to be in {function}"), || async {
            Ok((cluster.calls(rule)? > 0).then_some(()))
        })
        .await?;
    let old = process::agent()?;
    // The rule goes with the process that waits in it.
    old.kill()?;
    cluster.clear_faults()?;
    let report = cluster.report(&namespace, "user", "main").await?;
    ensure!(report.names.iter().all(|n| n.contains("3g.40gb")), "{report:?}");
    ensure!(cluster.gpu_instances()?.len() == 1, "nothing leaked: {:?}", cluster.gpu_instances()?);
    cluster.delete_namespace(&namespace).await
}

#[test]
fn an_agent_killed_before_the_partition_exists_prepares_it_after_its_restart() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        kill_inside(cluster, "nvmlDeviceCreateGpuInstanceWithPlacement").await
    })
}

#[test]
fn an_agent_killed_between_gpu_instance_and_compute_instance_leaks_neither() -> Result<()> {
    on_cluster(async |cluster: &Cluster| kill_inside(cluster, "nvmlGpuInstanceCreateComputeInstance").await)
}

#[test]
fn an_agent_killed_while_it_destroys_a_partition_destroys_it_after_its_restart() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster.renew_agent().await?;
        let namespace = cluster.namespace("unprepare").await?;
        cluster.create(&[
            objects::template(&namespace, "part", &[objects::partition_of("gpu", "1g.10gb", "A100")]),
            PodManifest::of_template(&namespace, "user", "part").build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        let rule = cluster.delay_calls("nvmlGpuInstanceDestroy", Duration::from_secs(60))?;
        cluster.delete_pod(&namespace, "user").await?;
        cluster
            .wait_for("the agent to destroy the instance", || async {
                Ok((cluster.calls(rule)? > 0).then_some(()))
            })
            .await?;
        ensure!(cluster.gpu_instances()?.len() == 1, "it is not destroyed yet");
        let old = process::agent()?;
        old.kill()?;
        cluster.clear_faults()?;
        cluster.pod_gone(&namespace, "user").await?;
        cluster.delete_namespace(&namespace).await
    })
}

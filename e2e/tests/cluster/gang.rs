//! Pods that belong together get all their devices or none.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::{gated, phase};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use std::time::Duration;

const NAMESPACE: &str = "gang";

/// Of a job's pods: how many run, how many have our gate, and how many claims have devices.
async fn state(cluster: &Cluster, job: &str) -> Result<(usize, usize, usize)> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    let pods = api.list(&ListParams::default().labels(&format!("aliquot.dev/gang={job}"))).await?.items;
    let mut allocated = 0;
    for pod in &pods {
        let statuses = pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
        for name in statuses.filter_map(|status| status.resource_claim_name.as_deref()) {
            let claim = cluster.claim(NAMESPACE, name).await?;
            let status = claim.and_then(|claim| claim.status);
            allocated += usize::from(status.is_some_and(|status| status.allocation.is_some()));
        }
    }
    let running = pods.iter().filter(|pod| phase(pod) == "Running").count();
    Ok((running, pods.iter().filter(|pod| gated(pod)).count(), allocated))
}

#[test]
fn of_two_gangs_one_gets_everything_and_the_other_nothing_until_it_has_ended() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        // Both at the same time.
        let mut jobs = String::new();
        for file in ["14-gang.yaml", "blue.yaml"] {
            let path = cluster.repo().join("examples/14-gang").join(file);
            jobs += &std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            jobs += "---\n";
        }
        cluster.apply(&jobs)?;
        let run = |job: &'static str| async move {
            Ok(matches!(state(cluster, job).await?, (3, 0, 3)).then_some(job))
        };
        let first = cluster
            .wait_for("one gang to run", || async {
                Ok(match run("red").await? {
                    Some(job) => Some(job),
                    None => run("blue").await?,
                })
            })
            .await?;
        let other = if first == "red" { "blue" } else { "red" };
        cluster.event(NAMESPACE, "needs devices for 3 pods at once").await?;
        // One half is free, and nobody of the other gang gets it.
        cluster
            .holds_for(Duration::from_secs(5), || async {
                let state = state(cluster, other).await?;
                ensure!(state == (0, 3, 0), "running, gated, allocated: {state:?}");
                Ok(())
            })
            .await?;
        // Whoever leads is killed meanwhile: the next one does not give it either.
        cluster.kubectl(&[
            "-n",
            "aliquot-system",
            "delete",
            "pod",
            "-l",
            "app.kubernetes.io/component=controller",
            "--wait=false",
        ])?;
        cluster.kubectl(&["-n", NAMESPACE, "delete", "job", first])?;
        cluster.wait_for("the other gang to run", || run(other)).await?;
        cluster.delete_namespace(NAMESPACE).await
    })
}

//! Tenants who evade the limiter, and the node agent's answer.

use crate::support::{GIB, on_cluster};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::phase;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};

/// Looks so often that tests can wait for its verdicts.
const OFTEN: [&str; 3] =
    ["kubeletPlugin.audit.interval=300ms", "kubeletPlugin.audit.looks=4", "kubeletPlugin.audit.timeBurst=1s"];

#[test]
fn shares_that_evade_the_limiter_are_reported_and_evicted_and_no_others() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let report = [OFTEN.as_slice(), &["kubeletPlugin.audit.evict=false"]].concat();
        cluster.configure(&report).await?;
        let namespace = cluster.namespace("audit").await?;
        let pod = |name: &str, script: &str| {
            PodManifest::of_template(&namespace, name, "share").shell(script).build()
        };
        // The first two call the driver directly; the third has all its memory and all its time, through the
        // limiter, and new processes again and again.
        cluster.create(&[
            objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 20)]),
            pod("memory", "exec cuda-probe --direct --occupy=6442450944 --hold"),
            pod("time", "exec cuda-probe --direct --occupy=1048576 --busy=600"),
            pod("honest", "while cuda-probe && cuda-probe --occupy=1073741824 --busy=4; do :; done"),
        ])?;
        for name in ["memory", "time", "honest"] {
            cluster.running(&namespace, name).await?;
        }
        let told = cluster.event(&namespace, "memory ShareOverMemory: ").await?;
        let claim = cluster.claim_of(&namespace, "memory").await?;
        let wanted = format!("claim {namespace}/{claim} grants 2.00 GiB");
        ensure!(told.contains("(cuda-probe) use 6.") && told.contains(&wanted), "{told}");
        let told = cluster.event(&namespace, "time ShareOverTime: ").await?;
        ensure!(told.contains("(cuda-probe) take ") && told.contains("grants 20 %"), "{told}");
        for name in ["memory", "time", "honest"] {
            let pod = cluster.pod(&namespace, name).await?.context("reported, not evicted")?;
            ensure!(phase(&pod) == "Running", "{name} is {}", phase(&pod));
        }

        let evict = [OFTEN.as_slice(), &["kubeletPlugin.audit.evict=true"]].concat();
        cluster.configure(&evict).await?;
        for name in ["memory", "time"] {
            cluster.event(&namespace, &format!("{name} EvictedOverShare: ")).await?;
            cluster.pod_gone(&namespace, name).await?;
        }
        let honest = cluster.pod(&namespace, "honest").await?.context("the honest pod stays")?;
        ensure!(phase(&honest) == "Running", "it is {}", phase(&honest));
        let events = cluster.events(&namespace).await?;
        ensure!(!events.contains("honest ShareOver"), "{events}");
        cluster.delete_namespace(&namespace).await?;
        cluster.configure(&[]).await
    })
}

/// Memory that no call asks for, in a container where NVML names processes by the node's pids.
#[test]
fn hidden_memory_counts_against_a_share() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("hidden-memory").await?;
        cluster.create(&[
            objects::template(&namespace, "share", &[objects::share("gpu", "4Gi", 20)]),
            PodManifest::of_template(&namespace, "code", "share")
                .shell("trap 'exit 0' TERM; while :; do sleep 0.2; done")
                .build(),
        ])?;
        cluster.running(&namespace, "code").await?;
        let given = |flags: &str| {
            let found = cluster.shell(&namespace, "code", "main", &format!("cuda-probe {flags}"))?;
            let report: serde_json::Value = serde_json::from_str(found.trim())?;
            let bytes = report.pointer("/devices/0/allocated_bytes").and_then(serde_json::Value::as_u64);
            bytes.with_context(|| format!("no figure in {found}"))
        };
        let (plain, beside) = (given("")?, given(&format!("--code {GIB}"))?);
        ensure!(plain > 3 * GIB && plain <= 4 * GIB, "a share of 4 GiB: {plain}");
        let hidden = plain.saturating_sub(beside);
        ensure!(hidden > GIB * 9 / 10 && hidden <= GIB, "code of 1 GiB left {beside} of {plain}");
        cluster.delete_namespace(&namespace).await
    })
}

//! What pods that wait for devices cost those that need none.

use crate::fleet::{Fleet, GPUS};
use crate::load::{Load, Measured, PART, template_of};
use crate::report::Report;
use crate::settings::Settings;
use aliquot_e2e::objects;
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};
use std::time::Duration;

/// Template of all GPUs of a node.
const NODEFUL: &str = "all-gpus";
/// Runs on each side.
const RUNS: usize = 3;

/// Fills every GPU, then binds pods without claims with and without pods that wait for a partition.
pub(crate) async fn measure(
    load: &Load<'_>,
    fleet: &Fleet,
    settings: &Settings,
    report: &mut Report,
) -> Result<()> {
    let all = json!({"name": "r", "exactly": {"deviceClassName": "gpu.aliquot.dev", "count": GPUS}});
    let template = objects::template(&load.namespace, NODEFUL, &[all]);
    load.api::<ResourceClaimTemplate>()
        .create(&PostParams::default(), &serde_json::from_value(template)?)
        .await?;
    let full = (0..fleet.size()).map(|number| of_template(load, "full", number, NODEFUL));
    load.measure_pods(full.collect()).await.context("filling every GPU")?;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 0..RUNS {
        without.push(plain(load, settings).await?);
        report.line("no backlog", "no claim", round, &without);
    }
    eprintln!("creating {} pods whose claims cannot be satisfied", settings.backlog);
    let waiting =
        (0..settings.backlog).map(|number| of_template(load, "waits", number, &template_of("1g.10gb")));
    load.create::<Pod>(waiting.collect()).await?;
    let (claims, limit) = (settings.backlog + fleet.size(), Duration::from_secs(300));
    load.cluster
        .wait_at_most(limit, "a claim for each pod that waits", || async {
            let all = load.api::<ResourceClaim>().list_metadata(&ListParams::default()).await?;
            Ok((all.items.len() >= claims).then_some(()))
        })
        .await?;
    // All have been looked at by then, and none more often than a backlog is.
    tokio::time::sleep(Duration::from_secs(15)).await;
    for round in 0..RUNS {
        with.push(plain(load, settings).await?);
        report.line("backlog", "no claim", round, &with);
    }
    let waiting =
        load.api::<Pod>().list_metadata(&ListParams::default().labels(&format!("{PART}=waits"))).await?;
    anyhow::ensure!(waiting.items.len() == settings.backlog, "the backlog did not last");
    let unit = format!(
        "pods/s without claims beside {} pods that wait for devices; baseline: without them",
        settings.backlog
    );
    report.compare("allocator.throughput.backlog_ratio", &unit, (&with, &without));
    load.clean().await
}

/// Pods without claims; they are taken away again.
async fn plain(load: &Load<'_>, settings: &Settings) -> Result<Measured> {
    let pods = (0..settings.pods).map(|number| load.pod("plain", number, None));
    let measured = load.measure_pods(pods.collect()).await?;
    let now = DeleteParams::default().grace_period(0);
    let plain = ListParams::default().labels(&format!("{PART}=plain"));
    load.api::<Pod>().delete_collection(&now, &plain).await?;
    load.cluster
        .wait_for("pods to go", || async {
            let left = load.api::<Pod>().list_metadata(&plain).await?;
            Ok(left.items.is_empty().then_some(()))
        })
        .await?;
    Ok(measured)
}

fn of_template(load: &Load<'_>, part: &str, number: usize, template: &str) -> Value {
    let claim = json!({"name": "gpu", "resourceClaimTemplateName": template});
    load.pod(part, number, Some(claim))
}

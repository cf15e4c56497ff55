//! `aliquot acknowledge`: records that the errors of a GPU up to now were looked at and no longer count.
//!
//! Where the driver does not report that a GPU was reset, nothing else ends the errors that it reported
//! before. The command writes an annotation of the Node (`aliquot_model::acknowledge`) with the time, on
//! which the node agent acts once.

use super::gpus::{self, Gpu};
use super::{NotThere, PATIENCE, annotate, find, slices};
use crate::args::AcknowledgeArgs;
use crate::client::connect;
use aliquot_model::acknowledge::{Acknowledgement, CLEARED, key};
use aliquot_model::{GpuUuid, names};
use anyhow::{Error, Result, bail};
use jiff::Timestamp;
use kube::Client;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Runs `aliquot acknowledge`.
///
/// # Errors
/// If there is no such GPU, the Node may not be changed, or the node agent still publishes errors afterwards.
pub(crate) async fn run(args: AcknowledgeArgs) -> Result<()> {
    let client = connect(&args.cluster).await?;
    let now = Timestamp::now();
    let gpu = match find(&client, &args.driver_name, &args.gpu, args.node.as_deref()).await {
        Ok(gpu) => gpu,
        Err(unknown) => {
            say!("{}", unpublished(&client, unknown, &args, now).await?);
            return Ok(());
        }
    };
    let published = errors(&client, &gpu, &args.driver_name).await?;
    say!("{}", acknowledge(&client, &gpu, &published, &args, now).await?);
    if published.is_empty() {
        return Ok(());
    }
    wait(&client, &gpu, &args.driver_name, PATIENCE).await?;
    say!("{gpu} has no taint for errors");
    Ok(())
}

/// Writes the annotation, and returns a text about the published taints that it covers.
pub(super) async fn acknowledge(
    client: &Client,
    gpu: &Gpu,
    published: &BTreeSet<String>,
    args: &AcknowledgeArgs,
    now: Timestamp,
) -> Result<String> {
    write(client, &gpu.node, &gpu.uuid, args, now).await?;
    let about = match published.is_empty() {
        true => format!(
            "no taint for errors is published of it, as where the API server keeps no device taints (feature gate \
             DRADeviceTaints), so {}",
            unverified(&gpu.node)
        ),
        false => format!("published are {}", list(published)),
    };
    Ok(format!("{gpu}: errors until {now} are acknowledged; {about}. What happens later counts again"))
}

/// Writes the annotation of a GPU that is named by its UUID and not published anywhere, such as a cordoned
/// GPU where the API server does not store taints.
pub(super) async fn unpublished(
    client: &Client,
    unknown: Error,
    args: &AcknowledgeArgs,
    now: Timestamp,
) -> Result<String> {
    let Some(uuid) = GpuUuid::parse(&args.gpu).filter(|_| unknown.is::<NotThere>()) else {
        return Err(unknown);
    };
    let Some(node) = &args.node else {
        return Err(
            unknown.context(format!("say with --node which node has GPU {uuid}, which is not published"))
        );
    };
    if find(client, &args.driver_name, &args.gpu, None).await.is_ok() {
        return Err(unknown);
    }
    write(client, node, &uuid, args, now).await?;
    Ok(format!(
        "GPU {uuid} of node {node}, which is not published now: errors until {now} are acknowledged; {}. What happens \
         later counts again",
        unverified(node)
    ))
}

async fn write(
    client: &Client,
    node: &str,
    gpu: &GpuUuid,
    args: &AcknowledgeArgs,
    now: Timestamp,
) -> Result<()> {
    let said = Acknowledgement { at: now, reason: args.reason.clone().unwrap_or_default() };
    annotate(client, node, &key(gpu), json!(said.value())).await
}

/// Returns the text that nobody saw the agent act, and where to see that it did.
fn unverified(node: &str) -> String {
    format!(
        "it was not verified that anything is cleared. The event GpuAcknowledged says what is: kubectl events --for \
         node/{node}"
    )
}

fn list(published: &BTreeSet<String>) -> String {
    published.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Waits until no errors of the GPU are published. Returns an error after `patience`.
pub(super) async fn wait(client: &Client, gpu: &Gpu, driver: &str, patience: Duration) -> Result<()> {
    let started = Instant::now();
    loop {
        let published = errors(client, gpu, driver).await?;
        if published.is_empty() {
            return Ok(());
        }
        if started.elapsed() > patience {
            bail!(
                "the annotation is written, but after {} s the agent of node {} still publishes {}: either there are errors \
                 since, or the agent does not run or is of a release that does not know the annotation, or the clocks differ, \
                 its node's and this one (event AcknowledgementIgnored if this one is far ahead). See its events, \
                 GpuAcknowledged too: kubectl events --for node/{}",
                patience.as_secs(),
                gpu.node,
                list(&published),
                gpu.node
            );
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// Returns the published taints that an acknowledgement clears.
pub(super) async fn errors(client: &Client, gpu: &Gpu, driver: &str) -> Result<BTreeSet<String>> {
    let keys = CLEARED.map(|key| names::condition_taint(driver, key));
    Ok(gpus::taints(&slices(client, driver).await?, gpu, &keys))
}

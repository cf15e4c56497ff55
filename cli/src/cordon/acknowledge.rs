//! `aliquot acknowledge`: the errors of a GPU up to now were looked at, and count no more.
//!
//! Where the driver does not say that a GPU was reset, nothing else ends what it reported before. The command writes an
//! annotation of the Node (`aliquot_model::acknowledge`) with the time, which the node's agent acts upon once.

use super::gpus::{self, Gpu};
use super::{PATIENCE, annotate, find, slices};
use crate::args::AcknowledgeArgs;
use crate::client::connect;
use aliquot_model::acknowledge::{Acknowledgement, key};
use aliquot_model::names;
use anyhow::{Result, bail};
use jiff::Timestamp;
use kube::Client;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Runs `aliquot acknowledge`.
///
/// # Errors
/// If there is no such GPU, the Node may not be changed, or its agent publishes errors all the same.
pub(crate) async fn run(args: AcknowledgeArgs) -> Result<()> {
    let client = connect(args.kubeconfig.as_deref()).await?;
    let gpu = find(&client, &args.driver_name, &args.gpu, args.node.as_deref()).await?;
    say!("{}", acknowledge(&client, &gpu, &args, Timestamp::now()).await?);
    wait(&client, &gpu, &args.driver_name, PATIENCE).await?;
    say!("{gpu} has no taint for errors");
    Ok(())
}

/// Writes the annotation, and says what that is about.
pub(super) async fn acknowledge(
    client: &Client,
    gpu: &Gpu,
    args: &AcknowledgeArgs,
    now: Timestamp,
) -> Result<String> {
    let published = errors(client, gpu, &args.driver_name).await?;
    let said = Acknowledgement { at: now, reason: args.reason.clone().unwrap_or_default() };
    annotate(client, &gpu.node, &key(&gpu.uuid), json!(said.value())).await?;
    let about = match published.is_empty() {
        true => "nothing is published of its errors now".to_owned(),
        false => format!("published are {}", published.into_iter().collect::<Vec<_>>().join(", ")),
    };
    Ok(format!("{gpu}: errors until {now} are acknowledged; {about}. What happens later counts again"))
}

/// Waits until nothing is published of the GPU's errors.
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
                 since, or the agent does not run, is of a release that does not know the annotation, or its node's clock \
                 is ahead of this one. See its event GpuAcknowledged: kubectl events --for node/{}",
                patience.as_secs(),
                gpu.node,
                published.into_iter().collect::<Vec<_>>().join(", "),
                gpu.node
            );
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// Taints for what an acknowledgement clears.
async fn errors(client: &Client, gpu: &Gpu, driver: &str) -> Result<BTreeSet<String>> {
    let keys = ["xid", "ecc"].map(|key| names::condition_taint(driver, key));
    Ok(gpus::taints(&slices(client, driver).await?, gpu, &keys))
}

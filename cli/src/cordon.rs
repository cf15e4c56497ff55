//! `aliquot cordon` and `aliquot uncordon`: take one GPU of a node out of service and put it back.
//!
//! The commands write an annotation of the Node (`aliquot_model::cordon`), which the node agent publishes as
//! a taint on every device of the GPU. A taint rule of the API would name only one device, and a GPU has up
//! to thirty.

pub(crate) mod acknowledge;
mod gpus;
#[cfg(test)]
mod tests;

use crate::args::{CordonArgs, UncordonArgs};
use crate::client::connect;
use crate::snapshot::lean;
use aliquot_model::cordon::{Cordon, key};
use aliquot_model::{GpuUuid, names};
use anyhow::{Context, Result, anyhow, bail};
use gpus::{Gpu, Wanted};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// The time that the node agent gets to publish the taint.
const PATIENCE: Duration = Duration::from_secs(15);

/// Runs `aliquot cordon`.
///
/// # Errors
/// If there is no such GPU, the Node may not be changed, or its agent does not publish the change in time.
pub(crate) async fn run(args: CordonArgs) -> Result<()> {
    let client = connect(&args.cluster).await?;
    let gpu = find(&client, &args.driver_name, &args.gpu, args.node.as_deref()).await?;
    say!("{}", cordon(&client, &gpu, &args).await?);
    let published = wait(&client, &gpu, &args, PATIENCE).await?;
    say!("{}", published.told(&gpu));
    Ok(())
}

/// Runs `aliquot uncordon`.
///
/// # Errors
/// If there is no such GPU, or the Node may not be changed.
pub(crate) async fn undo(args: UncordonArgs) -> Result<()> {
    let client = connect(&args.cluster).await?;
    say!("{}", uncordon(&client, &args).await?);
    Ok(())
}

/// Writes the annotation, and returns a text about its effect.
async fn cordon(client: &Client, gpu: &Gpu, args: &CordonArgs) -> Result<String> {
    let cordon = Cordon { evict: args.evict, reason: args.reason.clone().unwrap_or_default() };
    let taint = cordon.taint(&args.driver_name);
    let users = users(client, &args.driver_name, gpu).await?;
    annotate(client, &gpu.node, &key(&gpu.uuid), json!(cordon.value())).await?;
    let mut text = format!(
        "{gpu}: cordoned; its node's agent gives its devices the taint {}:{}, and no claim gets one that does not tolerate it\n",
        taint.key,
        taint.effect.as_str()
    );
    let what = if args.evict { "are evicted" } else { "keep running until they end" };
    match users.as_slice() {
        [] => text.push_str("no claim uses it now\n"),
        users => {
            let claims = if users.len() == 1 {
                "1 claim uses".to_owned()
            } else {
                format!("{} claims use", users.len())
            };
            let _ = writeln!(text, "{claims} it now; pods {what}:");
            for user in users {
                let _ = writeln!(text, "  {user}");
            }
        }
    }
    let _ = write!(text, "to put it into service again: aliquot uncordon {}", gpu.uuid);
    Ok(text)
}

/// Removes the annotation, also that of a GPU that no longer exists; then the annotation tells which Node it
/// is.
async fn uncordon(client: &Client, args: &UncordonArgs) -> Result<String> {
    let nodes: Api<Node> = Api::all(client.clone());
    let found = find(client, &args.driver_name, &args.gpu, args.node.as_deref()).await;
    let (node, uuid, name) = match (found, GpuUuid::parse(&args.gpu)) {
        (Ok(gpu), _) => (gpu.node.clone(), gpu.uuid.clone(), gpu.to_string()),
        (Err(unknown), Some(uuid)) if unknown.is::<NotThere>() => {
            let all = nodes.list(&ListParams::default()).await.context("cannot list nodes")?;
            let here = |node: &Node| args.node.as_ref().is_none_or(|name| *name == node.name_any());
            let annotated =
                all.iter().find(|node| here(node) && node.annotations().contains_key(&key(&uuid)));
            let Some(node) = annotated else { return Err(unknown) };
            (
                node.name_any(),
                uuid.clone(),
                format!("GPU {uuid} of node {}, which is not published now,", node.name_any()),
            )
        }
        (Err(unknown), _) => return Err(unknown),
    };
    let now = nodes.get(&node).await.with_context(|| format!("cannot read node {node}"))?;
    if !now.annotations().contains_key(&key(&uuid)) {
        return Ok(format!("{name} is not cordoned"));
    }
    annotate(client, &node, &key(&uuid), Value::Null).await?;
    Ok(format!("{name} is not cordoned any more"))
}

async fn annotate(client: &Client, node: &str, name: &str, value: Value) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = json!({"metadata": {"annotations": {name: value}}});
    nodes
        .patch(node, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .with_context(|| format!("node {node} cannot be annotated"))?;
    Ok(())
}

async fn slices(client: &Client, driver: &str) -> Result<Vec<ResourceSlice>> {
    let own = ListParams::default().fields(&format!("spec.driver={driver}"));
    let slices = Api::<ResourceSlice>::all(client.clone()).list(&own).await;
    Ok(slices.context("cannot list ResourceSlices")?.items)
}

async fn find(client: &Client, driver: &str, text: &str, node: Option<&str>) -> Result<Gpu> {
    let wanted = Wanted::parse(text, node).map_err(|why| anyhow!(why))?;
    let all = gpus::published(&slices(client, driver).await?);
    Ok(wanted.among(&all).map_err(NotThere)?)
}

/// Returns the claims that have devices of the GPU, with the pods for which they are reserved.
async fn users(client: &Client, driver: &str, gpu: &Gpu) -> Result<Vec<String>> {
    let claims = lean::<ResourceClaim>(client).await.context("cannot list claims")?;
    let pool = names::pool_name(driver, &gpu.node);
    Ok(claims.iter().filter_map(|claim| gpu.used_by(claim, driver, &pool)).collect())
}

/// The GPU is not published.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NotThere(String);

/// The way in which claims are kept off a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Published {
    /// By a taint.
    Tainted,
    /// By not publishing the GPU, because the API server does not store taints.
    Withdrawn,
}

impl Published {
    fn told(self, gpu: &Gpu) -> String {
        match self {
            Self::Tainted => format!("{gpu} is out of service"),
            Self::Withdrawn => format!(
                "{gpu} is out of service, and not published: this API server keeps no device taints (feature gate \
                 DRADeviceTaints), so no pod is evicted"
            ),
        }
    }
}

/// Waits until the published devices of the GPU keep claims off it. Returns an error after `patience`.
async fn wait(client: &Client, gpu: &Gpu, args: &CordonArgs, patience: Duration) -> Result<Published> {
    let started = Instant::now();
    let key = names::cordoned_taint(&args.driver_name);
    loop {
        let slices = slices(client, &args.driver_name).await?;
        let untainted: BTreeSet<String> = gpus::without_taint(&slices, gpu, &key, args.evict);
        if untainted.is_empty() {
            let is_shown = gpus::published(&slices).iter().any(|shown| shown.uuid == gpu.uuid);
            return Ok(if is_shown { Published::Tainted } else { Published::Withdrawn });
        }
        if started.elapsed() > patience {
            bail!(
                "the annotation is written, but the agent of node {} has not published the taint within {} s: is it \
                 running, and of a release that knows it? The cordon takes effect when it publishes it. Devices without \
                 the taint: {}",
                gpu.node,
                patience.as_secs(),
                untainted.into_iter().collect::<Vec<_>>().join(", ")
            );
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

//! `aliquot release`: frees devices that a claim keeps without a pod.
//!
//! The command only changes the claim's annotations; the controller, which alone writes allocations, releases
//! the devices.

use crate::args::ReleaseArgs;
use crate::client::{check_namespace, connect};
use aliquot_allocator::hold::is_hold;
use aliquot_model::names::{BINDING, HOLD_OF, RECLAIM};
use anyhow::{Context, Result, bail};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use std::time::{Duration, Instant};

/// The time that the controller gets to release the devices.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs `aliquot release`.
///
/// # Errors
/// If a claim does not exist or may not be changed, or the controller does not answer in time.
pub(crate) async fn run(args: ReleaseArgs) -> Result<()> {
    let client = connect(&args.cluster).await?;
    let claims: Vec<ResourceClaim> = match &args.name {
        Some(name) => {
            let namespace = args.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
            check_namespace(&client, &namespace).await?;
            let api = Api::<ResourceClaim>::namespaced(client.clone(), &namespace);
            let claim = api.get_opt(name).await.context("cannot read claims")?;
            let claim = claim.with_context(|| {
                format!("there is no ResourceClaim {namespace}/{name}; `aliquot release --all` frees all that are kept")
            })?;
            if !is_held(&claim) && !wants_to_be(&claim) {
                say!("claim {namespace}/{name} keeps nothing without a pod");
                return Ok(());
            }
            vec![claim]
        }
        None => {
            let api = match &args.namespace {
                Some(namespace) => {
                    check_namespace(&client, namespace).await?;
                    Api::<ResourceClaim>::namespaced(client.clone(), namespace)
                }
                None => Api::all(client.clone()),
            };
            let all = api.list(&ListParams::default()).await.context("cannot list claims")?;
            all.items.into_iter().filter(is_held).collect()
        }
    };
    if claims.is_empty() {
        say!("no claim keeps devices without a pod");
    }
    for claim in claims {
        release(&client, &claim).await?;
    }
    Ok(())
}

fn is_held(claim: &ResourceClaim) -> bool {
    let consumers = claim.status.as_ref().and_then(|status| status.reserved_for.as_deref());
    consumers.unwrap_or_default().iter().any(is_hold) || is_hold_claim(claim)
}

/// Returns true if the controller made the claim, to keep the devices of a pod that has ended. The controller
/// deletes such a claim itself.
fn is_hold_claim(claim: &ResourceClaim) -> bool {
    claim.annotations().contains_key(HOLD_OF)
}

/// Returns true if the claim's annotations request devices before or after its pods.
fn wants_to_be(claim: &ResourceClaim) -> bool {
    let says = |name, value| claim.annotations().get(name).is_some_and(|found| found == value);
    says(BINDING, "Immediate") || says(RECLAIM, "Retain")
}

async fn release(client: &Client, claim: &ResourceClaim) -> Result<()> {
    let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
    let what = format!("claim {namespace}/{name}");
    let api = Api::<ResourceClaim>::namespaced(client.clone(), &namespace);
    // The annotations of the claim have precedence over those of its class.
    let wish = json!({"metadata": {"annotations": {BINDING: "WaitForFirstConsumer", RECLAIM: "Delete"}}});
    api.patch(&name, &PatchParams::default(), &Patch::Merge(&wish))
        .await
        .with_context(|| format!("{what} cannot be changed"))?;
    let started = Instant::now();
    loop {
        let Some(now) = api.get_opt(&name).await.with_context(|| format!("cannot read {what}"))? else {
            say!("{what} is gone");
            return Ok(());
        };
        if !is_held(&now) {
            let status = now.status.unwrap_or_default();
            match status.reserved_for.unwrap_or_default().len() {
                0 => say!("{what}: its devices are free"),
                pods => {
                    say!("{what} is used by {pods} pod(s); its devices are free when the last has ended")
                }
            }
            return Ok(());
        }
        if started.elapsed() > PATIENCE {
            bail!(
                "{what} still keeps its devices after {} s: is the controller running? It releases them as soon as \
                 it is",
                PATIENCE.as_secs()
            );
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

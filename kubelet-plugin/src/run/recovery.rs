//! Runs the recovery at start, and reports its result.

use crate::events::Events;
use crate::prepare::{Node, Recovery};
use crate::{notice, reasons};
use anyhow::Context;
use std::sync::Arc;

/// Repairs what a dead process left, before anything is served.
pub(super) async fn recover(node: &Arc<Node>, events: &Events) -> anyhow::Result<()> {
    let worker = Arc::clone(node);
    let recovery: Recovery = tokio::task::spawn_blocking(move || worker.recover())
        .await
        .context("recovery ended abnormally")?
        .context("cannot recover the node's state")?;
    for damage in &recovery.damaged {
        events.node_warning(reasons::CHECKPOINT_DAMAGED, notice::damage(damage));
    }
    if !recovery.unlabelled.is_empty() {
        events.node_warning(reasons::SELINUX_LABEL_REFUSED, notice::unlabelled(&recovery.unlabelled));
    }
    // A loss is reported with the first look at the hardware, as is a later loss.
    if let Some(lost) = recovery.lost.as_ref().filter(|lost| !lost.is_loss()) {
        tracing::info!(reason = lost.reason, "the ledger begins anew");
    }
    for claim in &recovery.newer {
        tracing::warn!(%claim, "a newer release wrote the claim's record, which is kept as it is");
    }
    for lost in &recovery.unaccounted {
        let devices: Vec<String> = lost.devices.iter().map(ToString::to_string).collect();
        tracing::warn!(
            claim.uid = lost.uid,
            devices = devices.join(", "),
            "the checkpoint has no record of the claim"
        );
    }
    for claim in &recovery.undone {
        tracing::info!(%claim, "undid a half-done claim");
    }
    for (claim, error) in &recovery.failed {
        tracing::warn!(%claim, %error, "a half-done claim could not be undone yet");
    }
    for spec in &recovery.renewed {
        tracing::info!(%spec, "brought the hooks of a CDI spec up to date");
    }
    for orphan in &recovery.orphans {
        tracing::info!(%orphan, "removed what no claim has");
    }
    Ok(())
}

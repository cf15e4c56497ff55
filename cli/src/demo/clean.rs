//! Looks for anything that a released claim left behind.

use super::api;
use super::cluster::Cluster;
use aliquot_model::names::{DEFAULT_DRIVER, SCHEDULING_GATE, held_taint};
use anyhow::{Context, Result};
use kube::ResourceExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The time that controllers get to clean up after the last pod.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns what is left after a while, as texts; empty if nothing is.
pub(crate) async fn leftovers(cluster: &Cluster) -> Result<Vec<String>> {
    let started = Instant::now();
    loop {
        let found = look(cluster).await?;
        if found.is_empty() || started.elapsed() > PATIENCE {
            return Ok(found);
        }
        tokio::time::sleep(super::LOOK).await;
    }
}

async fn look(cluster: &Cluster) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for claim in api::claims(&cluster.client).await? {
        found.push(format!("claim {}/{}", claim.namespace().unwrap_or_default(), claim.name_any()));
    }
    for pod in api::pods(&cluster.client).await? {
        let gates = pod.spec.as_ref().and_then(|s| s.scheduling_gates.as_ref());
        let gated = gates.is_some_and(|g| g.iter().any(|g| g.name == SCHEDULING_GATE));
        found.push(format!(
            "{} {}/{}",
            if gated { "gated pod" } else { "pod" },
            pod.namespace().unwrap_or_default(),
            pod.name_any()
        ));
    }
    let held = held_taint(DEFAULT_DRIVER);
    for slice in api::slices(&cluster.client).await? {
        for device in slice.spec.devices.iter().flatten() {
            if device.taints.iter().flatten().any(|t| t.key == held) {
                found.push(format!("taint {held} on {} of {}", device.name, slice.spec.pool.name));
            }
        }
    }
    for node in cluster.nodes() {
        let name = &node.name;
        found.extend(entries(&node.cdi())?.into_iter().map(|e| format!("CDI file {e} on {name}")));
        found.extend(
            entries(&node.data().join("shares"))?
                .into_iter()
                .map(|e| format!("quota directory {e} on {name}")),
        );
        found.extend(
            checkpoint_entries(&node.data())?.into_iter().map(|e| format!("checkpoint entry {e} on {name}")),
        );
        let hardware = aliquot_sim_node::Node::open(&node.hardware())?;
        for (index, gpu) in hardware.gpus().iter().enumerate().filter(|(_, gpu)| gpu.board.has_mig()) {
            let instances = hardware.gis(index)?.len();
            if instances > 0 {
                found.push(format!("{instances} GPU instances on gpu-{} of {name}", gpu.minor));
            }
        }
    }
    Ok(found)
}

fn entries(dir: &Path) -> Result<Vec<String>> {
    match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot list {}", dir.display())),
        Ok(entries) => entries.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect(),
    }
}

/// Returns the claims that the node agent's checkpoint still contains.
fn checkpoint_entries(data: &Path) -> Result<Vec<String>> {
    let path = data.join("checkpoint.json");
    let text = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.with_context(|| format!("cannot read {}", path.display()))?,
    };
    // The first line is a header with the checksum; the ledger follows.
    let ledger = text.split_once('\n').map_or("", |(_, ledger)| ledger);
    let ledger: serde_json::Value =
        serde_json::from_str(ledger).with_context(|| format!("{} holds no ledger", path.display()))?;
    let claims = ledger.pointer("/claims");
    Ok(claims.and_then(|c| c.as_object()).map(|c| c.keys().cloned().collect()).unwrap_or_default())
}

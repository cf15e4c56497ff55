//! What every test does around its own subject.

use aliquot_e2e::auditor::Auditor;
use aliquot_e2e::cluster::Cluster;
use aliquot_model::names::DEFAULT_DRIVER;
use anyhow::Result;
use std::sync::OnceLock;

/// Hardware, images and chart are put in place once a run.
static INSTALLED: OnceLock<()> = OnceLock::new();

/// Runs a test with the product installed and the auditor watching; afterwards nothing may be left.
pub(crate) fn on_cluster(test: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    if std::env::var_os("ALIQUOT_E2E_CLUSTER").is_none() {
        eprintln!("SKIPPED: needs a real Kubernetes; run tools/test-cluster");
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let cluster = Cluster::join().await?;
        if INSTALLED.get().is_none() {
            cluster.create_hardware()?;
            cluster.build_images()?;
            cluster.install(&[]).await?;
            INSTALLED.set(()).ok();
        }
        let auditor = Auditor::start(cluster.client.clone(), DEFAULT_DRIVER, cluster.setting("CDI_DIR")?);
        let outcome = test(&cluster).await;
        let clean = match &outcome {
            Ok(()) => cluster.clean().await,
            Err(_) => Ok(()),
        };
        let verdict = auditor.verdict();
        outcome?;
        clean?;
        let verdict = verdict?;
        eprintln!(
            "auditor: {} looks, at most {} allocated claims, {} overlaps resolved, overlapping prepares 0",
            verdict.looks,
            verdict.most_claims,
            verdict.resolved.len()
        );
        Ok(())
    })
}

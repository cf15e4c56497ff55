//! What every test does around its own subject.

use aliquot_e2e::auditor::Auditor;
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_model::names::DEFAULT_DRIVER;
use anyhow::Result;
use std::io::Write;
use std::sync::OnceLock;
use std::time::Instant;

/// One gibibyte.
pub(crate) const GIB: u64 = 1 << 30;

/// Hardware, images and chart are put in place once a run.
static INSTALLED: OnceLock<()> = OnceLock::new();

/// What a test needs of the server.
#[derive(PartialEq, Eq)]
enum Server {
    /// Any that has DRA: whole GPUs are published, and kube-scheduler gives them out.
    Any,
    /// One with the feature gates for partitions, shares and taints.
    Full,
}

/// Runs a test with the product installed and the auditor watching; afterwards nothing may be left. On a
/// server without our feature gates it is skipped.
pub(crate) fn on_cluster(test: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    run(Server::Full, test)
}

/// The same for a test that holds on a server without our feature gates too.
pub(crate) fn on_any_cluster(test: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    run(Server::Any, test)
}

/// Says why a test does nothing, where the harness does not swallow it.
pub(crate) fn skipped(why: &str) {
    drop(writeln!(std::io::stderr(), "SKIPPED: {why}"));
}

fn run(needed: Server, test: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    if std::env::var_os("ALIQUOT_E2E_CLUSTER").is_none() {
        eprintln!("SKIPPED: needs a real Kubernetes; run tools/test-cluster");
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let cluster = Cluster::join().await?;
        let off = cluster.gates_off()?;
        if needed == Server::Full && !off.is_empty() {
            let gates = off.join(" and ");
            skipped(&format!("needs a server that has {gates} on: FEATURE_GATES of tools/test-cluster"));
            return Ok(());
        }
        if INSTALLED.get().is_none() {
            cluster.start_anew().await?;
            cluster.configure(&[]).await?;
            INSTALLED.set(()).ok();
        }
        let started = Instant::now();
        let auditor = Auditor::start(cluster.client.clone(), DEFAULT_DRIVER, cluster.setting("CDI_DIR")?);
        let outcome = test(&cluster).await;
        let tested = started.elapsed();
        let outcome = match outcome {
            Ok(()) => cluster.clean().await,
            failed => failed,
        };
        let verdict = auditor.verdict();
        if outcome.is_err() {
            eprintln!("{}", cluster.diagnostics());
            // Why the test failed matters more.
            if let Err(error) = cluster.reset().await {
                eprintln!("what the test made does not go: {error:#}");
            }
        }
        outcome?;
        let verdict = verdict?;
        eprintln!(
            "{:.1} s, and {:.1} s until clean; auditor: {} looks, at most {} allocated claims, {} overlaps resolved, overlapping prepares 0",
            tested.as_secs_f64(),
            (started.elapsed() - tested).as_secs_f64(),
            verdict.looks,
            verdict.most_claims,
            verdict.resolved.len()
        );
        Ok(())
    })
}

/// Does something while no controller runs; it runs again afterwards, whatever came of it.
pub(crate) async fn without_controller(
    cluster: &Cluster,
    part: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let scale = |to: &str| cluster.kubectl(&["-n", SYSTEM, "scale", "deployment", "aliquot-controller", to]);
    scale("--replicas=0")?;
    let outcome = async {
        cluster.no_system_pods("controller").await?;
        part().await
    }
    .await;
    scale("--replicas=2")?;
    cluster.ready().await?;
    outcome
}

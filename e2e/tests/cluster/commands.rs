//! The commands of README.md, `docs/` and `examples/*/README.md` do what is shown below them.
//!
//! A document's console blocks are run in order, but for those that say why not
//! ([`aliquot_e2e::console`]). With `ALIQUOT_RECORD=1` what was printed is written back into the document.

use crate::examples::install_mps;
use crate::support::{on_cluster, skipped};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::console::{self, Command};
use aliquot_e2e::likeness;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_e2e::shell::{Shell, looks};
use aliquot_sim_node::GpuSpec;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The minor version of Kubernetes whose programs print what documents show.
const NEWEST: u32 = 37;
/// How long what is shown may take to become so.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a recording waits for it: what is shown may be out of date.
const SETTLES: Duration = Duration::from_secs(20);

macro_rules! documents {
    ($($name:ident: $file:literal,)*) => {
        mod do_what_is_shown_in {
            $(#[test]
            fn $name() -> anyhow::Result<()> {
                super::do_as_shown($file)
            })*
        }
    };
}

include!("documents.rs");

/// Sees to it that a command did what is shown.
fn judge(command: &Command, succeeded: bool, printed: &[String]) -> Result<()> {
    match (likeness::is_refusal(&command.shown), succeeded) {
        (false, false) => bail!("it failed"),
        (true, true) => bail!("it is shown to be refused, and was not"),
        _ => {}
    }
    let missing = likeness::missing(&command.shown, printed);
    ensure!(missing.is_empty(), "it did not print what is shown:\n{}", missing.join("\n"));
    Ok(())
}

/// Runs a command, one that only looks until it prints what is shown; returns what it printed.
async fn run(shell: &Shell, command: &Command) -> Result<Vec<String>> {
    let started = Instant::now();
    loop {
        let (succeeded, printed) = shell.run(&command.text)?;
        let verdict = judge(command, succeeded, &printed);
        if verdict.is_ok() || !looks(&command.text) || started.elapsed() > PATIENCE {
            return verdict.map(|()| printed.clone()).with_context(|| printed.join("\n"));
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// Runs a command, one that only looks until it prints no more and no less than is shown; what it prints
/// then counts, if it succeeds or fails as is shown.
async fn record(shell: &Shell, command: &Command) -> Result<Vec<String>> {
    let started = Instant::now();
    loop {
        let (succeeded, printed) = shell.run(&command.text)?;
        let as_shown = succeeded != likeness::is_refusal(&command.shown);
        let settled = command.shown != ["…"]
            && likeness::missing(&command.shown, &printed).is_empty()
            && likeness::missing(&printed, &command.shown).is_empty();
        let limit = if as_shown { SETTLES } else { PATIENCE };
        if as_shown && settled || !looks(&command.text) || started.elapsed() > limit {
            ensure!(as_shown, "{}", printed.join("\n"));
            return Ok(printed);
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// Whether a recording replaces what is shown; what is shortened by hand stays.
fn is_recorded(shown: &[String]) -> bool {
    let shortened = shown.iter().any(|line| line.contains(likeness::LEFT_OUT));
    !shown.is_empty() && (!shortened || *shown == ["…"])
}

/// Runs a document's commands; returns whether one of them installed something.
async fn run_document(cluster: &Cluster, file: &str) -> Result<bool> {
    let path = cluster.repo().join(file);
    let text = std::fs::read_to_string(&path).with_context(|| file.to_owned())?;
    let blocks = console::blocks(&text).with_context(|| file.to_owned())?;
    let shell = Shell::new(cluster)?;
    let recording = std::env::var_os("ALIQUOT_RECORD").is_some();
    let (mut recorded, mut installed) = (Vec::new(), false);
    for command in blocks.iter().filter(|block| block.not_run.is_none()).flat_map(|block| &block.commands) {
        let printed = if recording { record(&shell, command).await } else { run(&shell, command).await };
        let printed = printed.with_context(|| format!("{file}:{}: $ {}", command.line, command.text))?;
        installed |= command.text.starts_with("helm ");
        if is_recorded(&command.shown) && !printed.is_empty() {
            recorded.push((command, printed));
        }
    }
    if recording {
        std::fs::write(&path, console::with_output(&text, &recorded))?;
    }
    Ok(installed)
}

/// Runs a document's commands on a node that has what it needs, and has all as before afterwards.
fn do_as_shown(file: &str) -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        if cluster.minor()? < NEWEST {
            skipped("documents show what programs of the newest Kubernetes print");
            return Ok(());
        }
        if file.contains("18-mps")
            && let Err(reason) = install_mps(cluster)
        {
            skipped(&format!("MPS with NVIDIA's control daemon: {reason:#}"));
            return Ok(());
        }
        let small_board = file.contains("09-substitution");
        if small_board {
            cluster.exchange_hardware(&[GpuSpec::new("A100-40").with_mig()]).await?;
        }
        // A bus that does what a kernel would, for as long as the commands run.
        let _bus = if file.contains("19-vfio") { Some(cluster.hardware()?.pci_bus()?) } else { None };
        let outcome = run_on(cluster, file).await;
        // Whether it got that far or not.
        let installs = !matches!(outcome, Ok(false));
        let outcome = match outcome {
            Ok(_) => cluster.clean().await,
            Err(error) => Err(error),
        };
        let restored = async {
            if installs {
                cluster.configure(&[]).await?;
            }
            if small_board {
                cluster.exchange_hardware(&[]).await?;
            }
            Ok(())
        }
        .await;
        outcome.and(restored)
    })
}

/// Runs a document's commands in a cluster that has what they are about; returns whether one of them
/// installed something. An example takes away itself what it made.
async fn run_on(cluster: &Cluster, file: &str) -> Result<bool> {
    // Tests before did not wait for them, and some have the names that documents use.
    cluster
        .wait_for("namespaces of before to go", || async {
            Ok(cluster.namespaces().await?.is_empty().then_some(()))
        })
        .await?;
    let h100 = |count: u32| {
        let expression = r#"device.attributes["gpu.aliquot.dev"].productName.contains("H100")"#;
        let selectors = json!([{"cel": {"expression": expression}}]);
        let exactly = json!({"deviceClassName": "gpu.aliquot.dev", "selectors": selectors, "count": count});
        json!({"name": "gpu", "exactly": exactly})
    };
    match file {
        "README.md" => drop(cluster.uninstall()?),
        "docs/claims.md" => team(cluster, &[("trainer", objects::share("gpu", "4Gi", 25))]).await?,
        "docs/pending.md" => team(cluster, &[("other", h100(1)), ("trainer", h100(2))]).await?,
        "docs/uninstall.md" => team(cluster, &[("trainer", h100(3))]).await?,
        _ => {}
    }
    let installed = run_document(cluster, file).await?;
    if !file.starts_with("examples/") {
        for namespace in cluster.namespaces().await? {
            cluster.delete_namespace(&namespace).await?;
        }
    }
    Ok(installed)
}

/// A namespace `team` with pods, of which all but the last run, each with a claim of its name.
async fn team(cluster: &Cluster, pods: &[(&str, Value)]) -> Result<()> {
    cluster.create(&[json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})])?;
    for (at, (name, request)) in pods.iter().enumerate() {
        cluster.create(&[
            objects::claim("team", name, std::slice::from_ref(request)),
            PodManifest::of_claim("team", name, name).build(),
        ])?;
        if at + 1 < pods.len() {
            cluster.running("team", name).await?;
        }
    }
    Ok(())
}

//! A driver container brings the driver's files, mounted where the agent looks for them, and takes them along when it is
//! replaced.

use crate::support::on_cluster;
use aliquot_e2e::cluster::{Cluster, SIM, SYSTEM};
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_e2e::{command, process};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};

/// Where the chart is told that driver containers mount their root.
const DRIVER_ROOT: &str = "/run/aliquot-e2e/driver";
/// The version that the second one brings.
const NEXT: &str = "590.48.10";

/// What a driver container does: its files are there while it runs.
struct DriverContainer {
    files: PathBuf,
}

impl DriverContainer {
    /// Mounts the installed driver's files, in a copy of its own.
    fn start(name: &str) -> Result<Self> {
        let files = Path::new(DRIVER_ROOT).with_file_name(name);
        std::fs::create_dir_all(DRIVER_ROOT).context(DRIVER_ROOT)?;
        let from = format!("{SIM}/root");
        let own = files.display().to_string();
        command::run("cp", &["-aT", &from, &own])?;
        command::run("mount", &["--bind", &own, DRIVER_ROOT])?;
        Ok(Self { files })
    }
}

impl Drop for DriverContainer {
    /// As the container runtime does it: who has it open keeps it.
    fn drop(&mut self) {
        if let Err(error) = command::run("umount", &["--lazy", DRIVER_ROOT]) {
            eprintln!("the driver's root stays mounted: {error:#}");
            return;
        }
        if let Err(error) = std::fs::remove_dir_all(&self.files) {
            eprintln!("{} stays: {error}", self.files.display());
        }
    }
}

/// A pod has a whole GPU; the versions of libcuda that its CDI spec mounts from the driver's root.
async fn use_gpu(cluster: &Cluster, namespace: &str, name: &str) -> Result<Vec<String>> {
    cluster.create(&[PodManifest::of_template(namespace, name, "whole").build()])?;
    cluster.report(namespace, name, "main").await?;
    let prefix = format!("{DRIVER_ROOT}/");
    let mut versions = Vec::new();
    for (_, text) in cluster.cdi_specs()? {
        let paths = text.split('"').filter(|part| part.starts_with(&prefix));
        let versioned = paths.filter_map(|path| Some(path.rsplit_once("libcuda.so.")?.1.to_owned()));
        versions.extend(versioned.filter(|version| version.contains('.')));
    }
    versions.sort();
    versions.dedup();
    cluster.delete_pod(namespace, name).await?;
    cluster.pod_gone(namespace, name).await?;
    Ok(versions)
}

async fn replaced(cluster: &Cluster) -> Result<()> {
    let node = cluster.hardware()?;
    let version = node.installed_version()?;
    let first = DriverContainer::start("first")?;
    let root = format!("kubeletPlugin.driverRoot={DRIVER_ROOT}");
    cluster.configure(&[&root]).await?;
    let namespace = cluster.namespace("driver").await?;
    cluster.create(&[objects::template(
        &namespace,
        "whole",
        &[objects::request("gpu", "gpu.aliquot.dev")],
    )])?;
    let agent = process::agent()?.pid;
    let before = use_gpu(cluster, &namespace, "before").await?;
    ensure!(before == [version.as_str()], "{before:?}, and {version} is installed");
    // The operator drains the node of GPU pods, and the container goes with the module.
    node.unload_module(true)?;
    drop(first);
    node.load_module(Some(NEXT))?;
    let second = DriverContainer::start("second")?;
    cluster
        .wait_for("the next driver's version to be published", || async {
            let slices = cluster.kubectl(&["get", "resourceslices", "-o", "json"])?;
            Ok(slices.contains(&format!("\"{NEXT}\"")).then_some(()))
        })
        .await?;
    let after = use_gpu(cluster, &namespace, "after").await?;
    ensure!(after == [NEXT], "{after:?}");
    ensure!(process::agent()?.pid == agent, "nobody restarted the agent");
    // One that comes up before the driver waits for it.
    drop(second);
    cluster.kubectl(&["-n", SYSTEM, "delete", "pod", "-l", "app.kubernetes.io/component=kubelet-plugin"])?;
    cluster
        .wait_for("another agent", || async {
            Ok(process::agent().ok().filter(|now| now.pid != agent).map(drop))
        })
        .await?;
    let _third = DriverContainer::start("third")?;
    cluster.ready().await?;
    let last = use_gpu(cluster, &namespace, "last").await?;
    ensure!(last == [NEXT], "{last:?}");
    cluster.delete_namespace(&namespace).await
}

#[test]
fn pods_get_the_files_of_the_driver_container_that_runs() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let outcome = replaced(cluster).await;
        // With a driver whatever came of it, and the version that others expect.
        let restored = async {
            cluster.create_hardware()?;
            cluster.configure(&[]).await?;
            cluster.exchange_hardware(&[]).await
        };
        let restored = restored.await;
        outcome.and(restored)
    })
}

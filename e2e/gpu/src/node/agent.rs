//! The shipped node agent, with an API server of its own and somebody who plays the kubelet.

use super::Setting;
use crate::life;
use aliquot_control_plane::{Controllers, Handle, Options};
use aliquot_kubelet_plugin::args::Args;
use aliquot_model::names::{DEFAULT_DRIVER, pool_name};
use aliquot_sim_kubelet::tether::{self, Tethered};
use aliquot_sim_kubelet::{Kubelet, cdi};
use anyhow::{Context, Result, bail, ensure};
use clap::CommandFactory;
use k8s_openapi::api::core::v1::Node as KubeNode;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// How long the agent may take to start and to publish. A driver that was idle takes seconds to answer.
const START: Duration = Duration::from_secs(90);
const NODE: &str = "gpu-check";
const NAMESPACE: &str = "default";
/// Claims that may be prepared: files by their UIDs, with their names.
const CLAIMS: &str = "claims";
/// The limiter's files and the hook, as the agent's init container installs them.
const LIMITER: [&str; 3] = ["libaliquot_preload.so", "libaliquot_core.so", "aliquot-oci-hook"];

/// A node agent at work.
pub(crate) struct Agent {
    folder: PathBuf,
    log: PathBuf,
    child: Tethered,
    kubelet: Kubelet,
    client: kube::Client,
    _plane: Handle,
}

/// A claim that is prepared.
#[derive(Debug)]
pub(crate) struct Prepared {
    name: String,
    uid: String,
    /// What the runtime is asked for.
    pub(crate) edits: aliquot_cdi::ContainerEdits,
}

impl Agent {
    /// Starts it; everything that it writes lies in `folder`.
    pub(crate) async fn start(setting: &Setting, folder: &Path) -> Result<Self> {
        let path = |name: &str| -> Result<PathBuf> {
            let path = folder.join(name);
            std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
            Ok(path)
        };
        let limiter = path(&format!("limiter/{}", env!("CARGO_PKG_VERSION")))?;
        for name in LIMITER {
            let from = setting.hook.join(name);
            std::fs::copy(&from, limiter.join(name)).with_context(|| from.display().to_string())?;
        }
        let options = Options { controllers: Controllers::NONE, ..Options::default() };
        let plane = aliquot_control_plane::serve(options).await.context("cannot start the API server")?;
        let url = plane.url().parse().context("the API server has no URL")?;
        let client = aliquot_kubelet_plugin::run::client_of(kube::Config::new(url))?;
        let node = serde_json::from_value(json!({"metadata": {"name": NODE}}))?;
        Api::<KubeNode>::all(client.clone()).create(&PostParams::default(), &node).await?;
        let kubeconfig = folder.join("kubeconfig");
        plane.write_kubeconfig(&kubeconfig, "agent")?;
        let flag = |name: &str, value: &Path| format!("--{name}={}", value.display());
        let mut line = vec![
            format!("--node-name={NODE}"),
            flag("kubeconfig", &kubeconfig),
            flag("registrar-dir", &path("registry")?),
            flag("plugin-dir", &path("plugins")?),
            flag("cdi-dir", &path("cdi")?),
            flag("driver-root", &setting.driver_root),
            flag("proc-root", &setting.proc_root),
            flag("sys-root", &setting.sys_root),
            flag("limiter-dir", &path("limiter")?),
            flag("oci-hook", &limiter.join("aliquot-oci-hook")),
            // Nothing stays mounted, however this ends.
            "--region-storage=directory".to_owned(),
            // Partitions that somebody made stay as they are, and nothing is given out over them.
            "--unclaimed-mig=leave".to_owned(),
        ];
        line.extend(setting.agent_args.iter().cloned());
        let log = folder.join("agent.log");
        let file = std::fs::File::create(&log)?;
        let own = std::env::current_exe()?;
        let program = setting.program("aliquot-kubelet-plugin")?;
        let mut command = tether::command(&own, &program);
        command.args(&line).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        // The shell's variables are not the DaemonSet's.
        for variable in Args::command().get_arguments().filter_map(|arg| arg.get_env()) {
            command.env_remove(variable);
        }
        let child = command.spawn().with_context(|| program.display().to_string())?;
        let mut child = Tethered(child);
        let check = || life::check().and_then(|()| still_runs(&mut child, &log));
        let kubelet = Kubelet::register(&folder.join("registry"), DEFAULT_DRIVER, START, check).await?;
        Ok(Self { folder: folder.to_owned(), log, child, kubelet, client, _plane: plane })
    }

    /// Waits for a complete pool; its devices.
    pub(crate) async fn published(&mut self) -> Result<Vec<Device>> {
        let started = Instant::now();
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        loop {
            life::check()?;
            still_runs(&mut self.child, &self.log)?;
            let all = slices.list(&ListParams::default()).await?.items;
            let generation = all.iter().map(|slice| slice.spec.pool.generation).max();
            let newest = all.into_iter().filter(|slice| Some(slice.spec.pool.generation) == generation);
            let newest: Vec<ResourceSlice> = newest.collect();
            let wanted = newest.first().map_or(0, |slice| slice.spec.pool.resource_slice_count);
            let devices: Vec<Device> =
                newest.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).cloned().collect();
            if usize::try_from(wanted) == Ok(newest.len()) && !devices.is_empty() {
                return Ok(devices);
            }
            if started.elapsed() > START {
                bail!("nothing was published within {} s: {}", START.as_secs(), tail(&self.log));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Makes a claim that has this device, and prepares it. `consumed` is what a share takes.
    pub(crate) async fn prepare(
        &mut self,
        name: &str,
        device: &str,
        consumed: Option<Value>,
    ) -> Result<Prepared> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), NAMESPACE);
        let claim = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"devices": {"requests": [
                {"name": "r", "exactly": {"deviceClassName": format!("{name}.aliquot.dev")}},
            ]}},
        }))?;
        let claim = claims.create(&PostParams::default(), &claim).await?;
        let pool = pool_name(DEFAULT_DRIVER, NODE);
        let mut result = json!({"request": "r", "driver": DEFAULT_DRIVER, "pool": pool, "device": device});
        if let (Some(consumed), Some(result)) = (consumed, result.as_object_mut()) {
            result.insert("shareID".to_owned(), json!("0d5f5f9e-0b6c-4e0d-8a44-6c1d0d4f3f01"));
            result.insert("consumedCapacity".to_owned(), consumed);
        }
        let status = json!({"status": {"allocation": {
            "devices": {"results": [result]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields":
                [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}]},
        }}});
        claims.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await?;
        let uid = claim.metadata.uid.context("a claim without UID")?;
        let noted = self.folder.join(CLAIMS);
        std::fs::create_dir_all(&noted)?;
        std::fs::write(noted.join(&uid), name)?;
        let devices = match self.kubelet.prepare(NAMESPACE, name, &uid).await {
            Ok(devices) => devices,
            Err(error) => {
                // As the kubelet does with a pod that does not start.
                self.forget(name, &uid).await.with_context(|| format!("{error:#}"))?;
                return Err(error);
            }
        };
        let ids: Vec<String> = devices.into_iter().flat_map(|device| device.cdi_ids).collect();
        ensure!(!ids.is_empty(), "the agent named no CDI device");
        let edits = cdi::edits(&self.folder.join("cdi"), &ids)?;
        Ok(Prepared { name: name.to_owned(), uid, edits })
    }

    /// Unprepares a claim, and forgets it.
    pub(crate) async fn unprepare(&mut self, prepared: &Prepared) -> Result<()> {
        self.forget(&prepared.name, &prepared.uid).await?;
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), NAMESPACE);
        claims.delete(&prepared.name, &kube::api::DeleteParams::default()).await?;
        Ok(())
    }

    /// Unprepares a claim that may be gone from the API.
    async fn forget(&mut self, name: &str, uid: &str) -> Result<()> {
        self.kubelet.unprepare(NAMESPACE, name, uid).await?;
        Ok(std::fs::remove_file(self.folder.join(CLAIMS).join(uid))?)
    }

    /// Files that belong to claims: CDI specs and directories of shares.
    pub(crate) fn files(&self) -> Vec<String> {
        let shares = self.folder.join("plugins").join(DEFAULT_DRIVER).join("shares");
        let mut names = Vec::new();
        for folder in [self.folder.join("cdi"), shares] {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            names.extend(entries.map(|entry| entry.path().display().to_string()));
        }
        names
    }

    /// SIGTERM; an error if it does not end by itself.
    pub(crate) async fn stop(mut self) -> Result<()> {
        let pid = self.child.0.id().context("the agent has ended")?;
        let pid = nix::unistd::Pid::from_raw(i32::try_from(pid)?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        let ended = tokio::time::timeout(Duration::from_secs(20), self.child.0.wait()).await;
        let status = ended.context("the agent did not end within 20 s")??;
        ensure!(status.success(), "the agent ended with {status}: {}", tail(&self.log));
        Ok(())
    }
}

/// Unprepares what an agent in this folder left prepared, by an agent that is started there anew.
pub(super) async fn undo(setting: &Setting, folder: &Path) -> Result<()> {
    let mut left = Vec::new();
    for claim in std::fs::read_dir(folder.join(CLAIMS)).into_iter().flatten().flatten() {
        let name = std::fs::read_to_string(claim.path())?;
        left.push((name, claim.file_name().to_string_lossy().into_owned()));
    }
    if left.is_empty() {
        return Ok(());
    }
    let mut agent = Agent::start(setting, folder).await?;
    for (name, uid) in &left {
        agent.forget(name, uid).await?;
    }
    agent.stop().await
}

fn still_runs(child: &mut Tethered, log: &Path) -> Result<()> {
    match child.0.try_wait()? {
        None => Ok(()),
        Some(status) => bail!("the agent ended with {status}: {}", tail(log)),
    }
}

/// The end of a log.
fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines.get(lines.len().saturating_sub(12)..).unwrap_or_default().join("\n")
}

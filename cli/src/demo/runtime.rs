//! Plays the container runtime: makes of CDI devices what a container gets, and runs the probe in it.

use aliquot_cdi::ContainerEdits;
use aliquot_sim_kubelet::container::{self, Bind, ContainerSpec, Isolation};
use aliquot_sim_kubelet::tether::Tethered;
use aliquot_sim_node::limiter_at;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Command;

/// Where the probe is in a container, as an image would have it.
const PROBE: &str = "/usr/local/bin/cuda-probe";
const PRELOAD: &str = "/etc/ld.so.preload";

/// How containers are made on this machine.
pub(crate) struct Runtime {
    pub(crate) own_program: PathBuf,
    pub(crate) probe: PathBuf,
    pub(crate) namespaces: bool,
    pub(crate) dir: PathBuf,
}

/// What the probe says of a device.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ProbedDevice {
    pub(crate) allocated_bytes: u64,
    pub(crate) refused_with: i32,
}

#[derive(Debug, Deserialize)]
struct ProbeReport {
    devices: Vec<ProbedDevice>,
    error: Option<String>,
}

/// A running container. Killed when dropped.
pub(crate) struct Container {
    _child: Tethered,
    pub(crate) devices: Vec<ProbedDevice>,
}

impl Runtime {
    /// Starts a container and waits for the probe's report; the probe stays.
    pub(crate) async fn run(
        &self,
        name: &str,
        edits: &ContainerEdits,
        env: BTreeMap<String, String>,
    ) -> Result<Container> {
        let spec = self.spec(name, edits, env)?;
        let path = self.dir.join(format!("{name}.json"));
        std::fs::create_dir_all(&spec.scratch)?;
        std::fs::write(&path, serde_json::to_vec_pretty(&spec)?)?;
        let mut command = Command::from(container::command(&self.own_program, &path));
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .process_group(0)
            .spawn()
            .context("cannot start a container")?;
        let mut child = Tethered(child);
        let mut line = String::new();
        let mut out = BufReader::new(child.0.stdout.take().context("no stdout")?);
        tokio::time::timeout(Duration::from_secs(60), out.read_line(&mut line))
            .await
            .with_context(|| format!("container {name} said nothing for a minute"))??;
        let report: Result<ProbeReport, _> = serde_json::from_str(&line);
        let failure = match report {
            Ok(ProbeReport { devices, error: None }) => return Ok(Container { _child: child, devices }),
            Ok(ProbeReport { error: Some(error), .. }) => error,
            Err(_) => line.trim().to_owned(),
        };
        child.0.start_kill().ok();
        let mut said = String::new();
        if let Some(mut stderr) = child.0.stderr.take() {
            stderr.read_to_string(&mut said).await.ok();
        }
        bail!("container {name} failed: {failure} {}", said.trim())
    }

    fn spec(
        &self,
        name: &str,
        edits: &ContainerEdits,
        mut env: BTreeMap<String, String>,
    ) -> Result<ContainerSpec> {
        let scratch = self.dir.join(name);
        let (given, nodes, hooks) = aliquot_sim_kubelet::cdi::apply(edits)?;
        let mut binds = vec![Bind { host: self.probe.clone(), container: PROBE.into(), read_only: true }];
        binds.extend(given);
        env.entry("PATH".into()).or_insert_with(|| "/usr/local/bin:/usr/bin:/bin".into());
        env.extend(edits.environment().into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())));
        let mut argv = vec![PROBE.to_owned(), "--hold".to_owned()];
        if !self.namespaces {
            if let Some(program) = argv.first_mut() {
                *program = self.probe.display().to_string();
            }
            without_namespaces(&scratch, &binds, &mut env)?;
        }
        let isolation = if self.namespaces { Isolation::User } else { Isolation::None };
        Ok(ContainerSpec { scratch, isolation, root: None, binds, nodes, hooks, env, argv })
    }
}

/// What paths would have done in a root of its own, said in the environment.
fn without_namespaces(scratch: &Path, binds: &[Bind], env: &mut BTreeMap<String, String>) -> Result<()> {
    let root = scratch.display().to_string();
    env.insert("ALIQUOT_SIM_ROOT".into(), root.clone());
    env.insert("ALIQUOT_SIM_NODE".into(), format!("{root}/run/aliquot-sim"));
    if let Some(cuda) = binds.iter().find(|b| b.container.ends_with("libcuda.so.1"))
        && let Some(dir) = cuda.container.parent()
    {
        env.insert("LD_LIBRARY_PATH".into(), format!("{root}{}", dir.display()));
    }
    if let Some(preload) = binds.iter().find(|b| b.container == Path::new(PRELOAD)) {
        let text = std::fs::read_to_string(&preload.host)
            .with_context(|| format!("cannot read {}", preload.host.display()))?;
        let at = scratch.join("run/aliquot");
        let stubs = text.split_whitespace().map(|file| {
            let mounted = binds.iter().find(|bind| bind.container == Path::new(file));
            let limiter = mounted.and_then(|bind| bind.host.parent());
            let limiter = limiter.with_context(|| format!("{file} is not mounted"))?;
            Ok(limiter_at(&at, limiter, &scratch.join("limiter"))?.display().to_string())
        });
        env.insert("LD_PRELOAD".into(), stubs.collect::<Result<Vec<String>>>()?.join(" "));
    }
    Ok(())
}

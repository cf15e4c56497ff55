//! Plays the container runtime: applies CDI devices to a container, and runs the probe and the container's
//! own program in it.

use super::program::State;
use super::said::{Heard, Lines};
use aliquot_cdi::ContainerEdits;
use aliquot_sim_kubelet::container::{self, Bind, ContainerSpec, Isolation};
use aliquot_sim_kubelet::tether::Tethered;
use aliquot_sim_node::limiter_at;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{ChildStderr, ChildStdin, ChildStdout, Command};

/// The path of the probe in a container, as an image would have it.
const PROBE: &str = "/usr/local/bin/cuda-probe";
/// The longest report of the probe, in bytes.
const REPORT: u64 = 1 << 16;
const PRELOAD: &str = "/etc/ld.so.preload";

/// How containers are made on this machine.
pub(crate) struct Runtime {
    pub(crate) own_program: PathBuf,
    pub(crate) probe: PathBuf,
    /// The reason why containers have no namespaces; `None` if they have.
    pub(crate) without: Option<String>,
    pub(crate) dir: PathBuf,
}

/// The probe's result for a device.
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

/// A running container. When it is dropped, none of its processes is left.
pub(crate) struct Container {
    child: Tethered,
    pub(crate) devices: Vec<ProbedDevice>,
    /// The pipes of the container; `None` after its own program was started.
    pipes: Option<(ChildStdin, BufReader<ChildStdout>, ChildStderr)>,
    heard: Arc<Mutex<Heard>>,
}

impl Container {
    /// Starts the container's own program.
    pub(crate) async fn start_program(&mut self) -> Result<()> {
        let (mut input, out, err) = self.pipes.take().context("it has started")?;
        input.write_all(b"\n").await.context("the container has ended")?;
        listen(out, self.heard.clone());
        listen(err, self.heard.clone());
        Ok(())
    }

    /// Returns the state of the container's own program, once it was started, and its output so far.
    pub(crate) fn program(&mut self) -> Result<(State, Heard)> {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let state = match self.child.0.try_wait().context("cannot look at a container")? {
            None => State::Running,
            Some(status) => State::Ended { code: status.code().unwrap_or(-1) },
        };
        Ok((state, heard))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.child.terminate();
    }
}

/// Keeps the first lines of an output, and reads the rest without keeping it.
fn listen(mut out: impl AsyncReadExt + Unpin + Send + 'static, heard: Arc<Mutex<Heard>>) {
    tokio::spawn(async move {
        let (mut lines, mut chunk) = (Lines::default(), [0; 4096]);
        while let Ok(count @ 1..) = out.read(&mut chunk).await {
            let chunk = chunk.get(..count).unwrap_or_default();
            heard.lock().unwrap_or_else(PoisonError::into_inner).add(lines.take(chunk));
        }
        heard.lock().unwrap_or_else(PoisonError::into_inner).add(lines.rest());
    });
}

impl Runtime {
    /// Starts a container, and waits for the probe's report. The container's own program, if there is one,
    /// waits to be started.
    pub(crate) async fn run(
        &self,
        name: &str,
        edits: &ContainerEdits,
        env: BTreeMap<String, String>,
        program: &[String],
    ) -> Result<Container> {
        let spec = self.spec(name, edits, env, program)?;
        let path = self.dir.join(format!("{name}.json"));
        std::fs::create_dir_all(&spec.scratch)?;
        std::fs::write(&path, serde_json::to_vec_pretty(&spec)?)?;
        let mut command = Command::from(container::command(&self.own_program, &path));
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .process_group(0)
            .spawn()
            .context("cannot start a container")?;
        let mut child = Tethered(child);
        let mut line = String::new();
        let (input, out, mut err) = (child.0.stdin.take(), child.0.stdout.take(), child.0.stderr.take());
        let mut out = BufReader::new(out.context("no stdout")?);
        tokio::time::timeout(Duration::from_secs(60), (&mut out).take(REPORT).read_line(&mut line))
            .await
            .with_context(|| format!("container {name} said nothing for a minute"))??;
        let report: Result<ProbeReport, _> = serde_json::from_str(&line);
        let failure = match report {
            Ok(ProbeReport { devices, error: None }) => {
                let pipes = Some((input.context("no stdin")?, out, err.context("no stderr")?));
                return Ok(Container { child, devices, pipes, heard: Arc::default() });
            }
            Ok(ProbeReport { error: Some(error), .. }) => error,
            Err(_) => line.trim().to_owned(),
        };
        child.0.start_kill().ok();
        let mut said = String::new();
        if let Some(stderr) = &mut err {
            stderr.read_to_string(&mut said).await.ok();
        }
        bail!("container {name} failed: {failure} {}", said.trim())
    }

    fn spec(
        &self,
        name: &str,
        edits: &ContainerEdits,
        mut env: BTreeMap<String, String>,
        program: &[String],
    ) -> Result<ContainerSpec> {
        let scratch = self.dir.join(name);
        let (given, nodes, hooks) = aliquot_sim_kubelet::cdi::apply(edits)?;
        let mut binds = vec![Bind { host: self.probe.clone(), container: PROBE.into(), read_only: true }];
        binds.extend(given);
        env.entry("PATH".into()).or_insert_with(|| "/usr/local/bin:/usr/bin:/bin".into());
        env.extend(edits.environment().into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())));
        let mut probe = PROBE.to_owned();
        if self.without.is_some() {
            probe = self.probe.display().to_string();
            without_namespaces(&scratch, &binds, &mut env)?;
        }
        let isolation = if self.without.is_none() { Isolation::User } else { Isolation::None };
        let (before, argv) = (vec![probe], program.to_vec());
        Ok(ContainerSpec { scratch, isolation, root: None, binds, nodes, hooks, env, before, argv })
    }
}

/// Sets environment variables that replace the paths of a separate root.
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

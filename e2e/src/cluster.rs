//! The product on the real Kubernetes of `e2e/cluster`: installs it as an operator would, and sees it
//! as a user and as the node's administrator do.

use crate::command;
use aliquot_model::names::{CLAIM_FINALIZER, DEFAULT_DRIVER, SCHEDULING_GATE};
use aliquot_sim_node::{GpuSpec, NodeSpec};
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Namespace that the product is installed in.
pub const SYSTEM: &str = "aliquot-system";
/// Where the simulated node is, on the host and in every container.
pub const SIM: &str = "/run/aliquot-sim";
/// Most time that anything may take on a loaded machine; tests wait for conditions, never for time.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// The running cluster.
pub struct Cluster {
    /// What `cluster.env` says.
    pub env: BTreeMap<String, String>,
    /// An administrator's client.
    pub client: Client,
    repo: PathBuf,
    build: PathBuf,
}

impl Cluster {
    /// Joins the cluster that is up, or brings it up.
    ///
    /// # Errors
    /// If it does not come up.
    pub async fn join() -> Result<Self> {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("no repository")?.to_owned();
        let path = command::run(repo.join("e2e/cluster/up"), &[])?;
        let text = std::fs::read_to_string(path.trim()).with_context(|| format!("cannot read {path}"))?;
        let env: BTreeMap<String, String> = text
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.trim_matches('\'').to_owned()))
            .collect();
        let kubeconfig = env.get("KUBECONFIG").context("cluster.env has no KUBECONFIG")?;
        let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig)?;
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await?;
        // Programs run from `<target>/<profile>`, tests from `deps` in it.
        let own = std::env::current_exe()?;
        let beside = own.parent().context("no build directory")?;
        let build =
            if beside.ends_with("deps") { beside.parent().unwrap_or(beside) } else { beside }.to_owned();
        Ok(Self { env, client: Client::try_from(config)?, repo, build })
    }

    /// A value of `cluster.env`.
    ///
    /// # Errors
    /// If it is not there.
    pub fn setting(&self, name: &str) -> Result<&str> {
        self.env.get(name).map(String::as_str).with_context(|| format!("cluster.env has no {name}"))
    }

    /// The repository.
    pub fn repo(&self) -> &Path {
        &self.repo
    }

    /// kubectl as administrator.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.kubectl_apply(args, "")
    }

    fn kubectl_apply(&self, args: &[&str], input: &str) -> Result<String> {
        let kubeconfig = format!("--kubeconfig={}", self.setting("KUBECONFIG")?);
        let all: Vec<&str> = std::iter::once(kubeconfig.as_str()).chain(args.iter().copied()).collect();
        command::run_with_input(self.setting("KUBECTL")?, &all, input)
    }

    /// Applies a manifest's text.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn apply(&self, manifest: &str) -> Result<()> {
        self.kubectl_apply(&["apply", "--server-side", "--force-conflicts", "-f", "-"], manifest).map(drop)
    }

    /// Stops, starts, kills or pauses a part of the cluster (`e2e/cluster/component`).
    ///
    /// # Errors
    /// What the script says.
    pub fn component(&self, action: &str, name: &str) -> Result<String> {
        command::run(self.repo.join("e2e/cluster/component"), &[action, name])
    }

    // --- the product --------------------------------------------------------------------------

    /// Makes the simulated node on this host, as after a first boot.
    ///
    /// # Errors
    /// If the stand-in libraries are not built or the directory cannot be written.
    pub fn create_hardware(&self) -> Result<()> {
        if Path::new(SIM).exists() {
            std::fs::remove_dir_all(SIM).context("cannot remove the old simulated node")?;
        }
        let mut spec = NodeSpec::new(Vec::<String>::new()).with_seed("e2e");
        spec.gpus = vec![
            GpuSpec::new("H100-80"),
            GpuSpec::new("H100-80"),
            GpuSpec::new("A100-80"),
            GpuSpec::new("A100-80").with_mig(),
            GpuSpec::new("L40S"),
        ];
        spec.nvml_library = Some(self.build.join("libnvidia_ml.so"));
        spec.cuda_library = Some(self.build.join("libcuda.so"));
        aliquot_sim_node::create(Path::new(SIM), &spec).context("cannot create the simulated node")?;
        Ok(())
    }

    /// Builds the product's image and the examples' image, and gives both to the cluster.
    ///
    /// # Errors
    /// If something is not built.
    pub fn build_images(&self) -> Result<()> {
        let image = self.repo.join("e2e/cluster/image");
        let add = |path: PathBuf, to: &str| -> Result<String> {
            if !path.is_file() {
                bail!("{} is not there: run `make build`", path.display());
            }
            Ok(format!("--add={}={to}", path.display()))
        };
        let hook = self.build.parent().context("no target directory")?.join("hook");
        let mut args = vec![
            format!("--name=aliquot.dev/aliquot:{}", env!("CARGO_PKG_VERSION")),
            "--base=glibc".to_owned(),
        ];
        for program in ["aliquot", "aliquot-controller", "aliquot-kubelet-plugin"] {
            args.push(add(self.build.join(program), &format!("/usr/bin/{program}"))?);
        }
        args.push(add(self.build.join("aliquot-oci-hook"), "/usr/lib/aliquot/aliquot-oci-hook")?);
        for library in ["libaliquot_preload.so", "libaliquot_core.so"] {
            args.push(add(hook.join(library), &format!("/usr/lib/aliquot/{library}"))?);
        }
        command::run(&image, &args.iter().map(String::as_str).collect::<Vec<_>>())?;
        let probe = add(self.build.join("cuda-probe"), "/usr/bin/cuda-probe")?;
        command::run(&image, &["--name=aliquot.dev/tools:latest", "--base=glibc", &probe])?;
        Ok(())
    }

    /// Installs the chart with helm's rendering and waits until both parts are ready and every GPU is
    /// published.
    ///
    /// # Errors
    /// If it does not become ready.
    pub async fn install(&self, values: &[&str]) -> Result<()> {
        let kubelet_root = format!("kubeletPlugin.kubeletRoot={}", self.setting("KUBELET_ROOT")?);
        let own = [
            "image.pullPolicy=Never",
            "kubeletPlugin.driverRoot=/run/aliquot-sim/root",
            "kubeletPlugin.devRoot=/run/aliquot-sim/root",
            "kubeletPlugin.procRoot=/run/aliquot-sim/root/proc",
            "kubeletPlugin.sysRoot=/run/aliquot-sim/root/sys",
            "kubeletPlugin.containerMounts={/run/aliquot-sim:/run/aliquot-sim:rw}",
            kubelet_root.as_str(),
        ];
        let chart = self.repo.join("deploy/helm/aliquot").display().to_string();
        let kubeconfig = format!("--kubeconfig={}", self.setting("KUBECONFIG")?);
        let mut args =
            vec!["upgrade", "--install", "aliquot", &chart, "-n", SYSTEM, "--create-namespace", &kubeconfig];
        for value in own.iter().chain(values) {
            args.extend(["--set", value]);
        }
        command::run(self.setting("HELM")?, &args)?;
        self.kubectl(&[
            "-n",
            SYSTEM,
            "rollout",
            "status",
            "--timeout=180s",
            "daemonset/aliquot-kubelet-plugin",
        ])?;
        self.kubectl(&[
            "-n",
            SYSTEM,
            "rollout",
            "status",
            "--timeout=180s",
            "deployment/aliquot-controller",
        ])?;
        self.wait_for("devices of every GPU", || async {
            let devices: usize =
                self.slices().await?.iter().map(|s| s.spec.devices.iter().flatten().count()).sum();
            Ok((devices > 0).then_some(()))
        })
        .await
    }

    // --- looking ------------------------------------------------------------------------------

    /// Polls until the condition gives a value.
    ///
    /// # Errors
    /// After [`PATIENCE`], with the last error if there was one.
    pub async fn wait_for<T, F: Future<Output = Result<Option<T>>>>(
        &self,
        what: &str,
        mut look: impl FnMut() -> F,
    ) -> Result<T> {
        let started = Instant::now();
        loop {
            let last = look().await;
            if let Ok(Some(value)) = last {
                return Ok(value);
            }
            if started.elapsed() > PATIENCE {
                let why = last.err().map(|e| format!(": {e:#}")).unwrap_or_default();
                bail!("waited {} s for {what}{why}", PATIENCE.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// The pod once it runs.
    ///
    /// # Errors
    /// If it does not run in time, with its events.
    pub async fn running(&self, namespace: &str, name: &str) -> Result<Pod> {
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let result = self
            .wait_for(&format!("pod {namespace}/{name} to run"), || async {
                let pod = api.get_opt(name).await?;
                Ok(pod.filter(|p| p.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running")))
            })
            .await;
        match result {
            Ok(pod) => Ok(pod),
            Err(error) => Err(error.context(self.events(namespace).await.unwrap_or_default())),
        }
    }

    /// A namespace's events, a line each.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn events(&self, namespace: &str) -> Result<String> {
        let events =
            Api::<Event>::namespaced(self.client.clone(), namespace).list(&ListParams::default()).await?;
        let line = |e: &Event| {
            format!(
                "{} {} {}: {}",
                e.type_.as_deref().unwrap_or_default(),
                e.involved_object.name.as_deref().unwrap_or_default(),
                e.reason.as_deref().unwrap_or_default(),
                e.message.as_deref().unwrap_or_default()
            )
        };
        Ok(events.items.iter().map(line).collect::<Vec<_>>().join("\n"))
    }

    /// Our driver's slices.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn slices(&self) -> Result<Vec<ResourceSlice>> {
        let of_driver = ListParams::default().fields(&format!("spec.driver={DEFAULT_DRIVER}"));
        Ok(Api::<ResourceSlice>::all(self.client.clone()).list(&of_driver).await?.items)
    }

    /// All claims.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn claims(&self) -> Result<Vec<ResourceClaim>> {
        Ok(Api::<ResourceClaim>::all(self.client.clone()).list(&ListParams::default()).await?.items)
    }

    /// The first line that a container printed, once it is there.
    ///
    /// # Errors
    /// If it prints nothing in time.
    pub async fn first_line(&self, namespace: &str, pod: &str, container: &str) -> Result<String> {
        self.wait_for(&format!("output of {namespace}/{pod} {container}"), || async {
            let log = self.kubectl(&["-n", namespace, "logs", pod, "-c", container])?;
            Ok(log.lines().next().map(str::to_owned))
        })
        .await
    }

    /// Runs a command in a container.
    ///
    /// # Errors
    /// What it says.
    pub fn exec(&self, namespace: &str, pod: &str, container: &str, command: &[&str]) -> Result<String> {
        let args: Vec<&str> = ["-n", namespace, "exec", pod, "-c", container, "--"]
            .into_iter()
            .chain(command.iter().copied())
            .collect();
        self.kubectl(&args)
    }

    /// Deletes a namespace with everything in it and waits until it is gone.
    ///
    /// # Errors
    /// If it does not go in time: something blocks it.
    pub async fn delete_namespace(&self, namespace: &str) -> Result<()> {
        self.kubectl(&["delete", "namespace", namespace, "--ignore-not-found", "--wait=false"])?;
        let api = Api::<k8s_openapi::api::core::v1::Namespace>::all(self.client.clone());
        self.wait_for(&format!("namespace {namespace} to go"), || async {
            Ok(api.get_opt(namespace).await?.is_none().then_some(()))
        })
        .await
    }

    /// What users of the product have left behind, in words; empty is clean.
    ///
    /// # Errors
    /// If something cannot be read.
    pub async fn leftovers(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for claim in self.claims().await? {
            let kept = claim.finalizers().iter().any(|f| f == CLAIM_FINALIZER);
            found.push(format!(
                "claim {}/{} (finalizer: {kept})",
                claim.namespace().unwrap_or_default(),
                claim.name_any()
            ));
        }
        for pod in Api::<Pod>::all(self.client.clone()).list(&ListParams::default()).await? {
            let gates = pod.spec.as_ref().and_then(|s| s.scheduling_gates.as_ref());
            if gates.is_some_and(|g| g.iter().any(|g| g.name == SCHEDULING_GATE)) {
                found.push(format!("gated pod {}/{}", pod.namespace().unwrap_or_default(), pod.name_any()));
            }
        }
        let held = aliquot_model::names::held_taint(DEFAULT_DRIVER);
        for slice in self.slices().await? {
            for device in slice.spec.devices.iter().flatten() {
                if device.taints.iter().flatten().any(|t| t.key == held) {
                    found.push(format!("taint {held} on {}", device.name));
                }
            }
        }
        found.extend(self.node_leftovers()?);
        Ok(found)
    }

    /// What is left on the node: GPU instances, CDI files, ledger entries, quota directories.
    ///
    /// # Errors
    /// If something cannot be read.
    pub fn node_leftovers(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let node = aliquot_sim_node::Node::open(Path::new(SIM))?;
        for (index, gpu) in node.gpus().iter().enumerate() {
            for instance in node.gis(index)? {
                found.push(format!("GPU instance {} on gpu-{}", instance.id, gpu.minor));
            }
        }
        for file in list(Path::new(self.setting("CDI_DIR")?))? {
            if file.contains("aliquot") {
                found.push(format!("CDI file {file}"));
            }
        }
        let data = Path::new(self.setting("PLUGIN_DIR")?).join(DEFAULT_DRIVER);
        found.extend(list(&data.join("shares"))?.into_iter().map(|d| format!("quota directory {d}")));
        found.extend(self.ledger()?.into_iter().map(|uid| format!("checkpoint entry {uid}")));
        Ok(found)
    }

    /// Claims in the node agent's checkpoint.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn ledger(&self) -> Result<Vec<String>> {
        let path = Path::new(self.setting("PLUGIN_DIR")?).join(DEFAULT_DRIVER).join("checkpoint.json");
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        // The first line is the header.
        let body = text.split_once('\n').map_or("", |(_, body)| body);
        let ledger: serde_json::Value = serde_json::from_str(body).context("the checkpoint is no JSON")?;
        Ok(ledger
            .pointer("/claims")
            .and_then(|c| c.as_object())
            .map(|c| c.keys().cloned().collect())
            .unwrap_or_default())
    }

    /// Waits until nothing is left.
    ///
    /// # Errors
    /// What is left after [`PATIENCE`].
    pub async fn clean(&self) -> Result<()> {
        let result = self
            .wait_for("everything to be released", || async {
                Ok(self.leftovers().await?.is_empty().then_some(()))
            })
            .await;
        match result {
            Ok(()) => Ok(()),
            Err(error) => Err(error.context(self.leftovers().await?.join("\n"))),
        }
    }
}

fn list(dir: &Path) -> Result<Vec<String>> {
    match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot list {}", dir.display())),
        Ok(entries) => entries.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect(),
    }
}

//! Installing the product as an operator does, and taking it away.

use crate::cluster::{Cluster, SIM, SYSTEM};
use crate::command;
use crate::hardware::list;
use anyhow::{Context, Result, bail};
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use std::path::{Path, PathBuf};

/// Waits that tests cannot afford at their defaults, and who reads metrics.
const SHORT: &[&str] = &[
    "controller.extraArgs={--lease-duration=8s,--idle-timeout=10s,--compaction-interval=4s}",
    "substitution.goBackAfter=2s",
    "metrics.authentication.readers[0].kind=ServiceAccount",
    "metrics.authentication.readers[0].name=default",
    "metrics.authentication.readers[0].namespace=default",
    "kubeletPlugin.extraArgs={--scheduler-timeouts=4s,--claim-check-interval=1s,--orphan-grace=20s,--absent-controller-grace=3s}",
];

/// An option of `e2e/cluster/image`: a file that was built, and where it goes.
fn added(path: PathBuf, to: &str) -> Result<String> {
    if !path.is_file() {
        bail!("{} is not there: run `make build`", path.display());
    }
    Ok(format!("--add={}={to}", path.display()))
}

/// Options of `e2e/cluster/image`: this machine's Python.
fn python() -> Result<Vec<String>> {
    let say = "import os, sys, sysconfig, _ctypes; print(os.path.realpath(sys.executable)); \
        print(sysconfig.get_path('stdlib')); print(_ctypes.__file__)";
    let said = command::run("/usr/bin/python3", &["-c", say])?;
    let [program, library, extension] = said.lines().collect::<Vec<_>>()[..] else {
        bail!("python3 says {said:?}");
    };
    Ok(vec![
        format!("--add-bin={program}=/usr/bin/python3"),
        format!("--add={library}={library}"),
        format!("--add-bin={extension}={extension}"),
    ])
}

impl Cluster {
    /// Simulated GPUs and images, all new: what an earlier run left is removed first.
    ///
    /// # Errors
    /// If something is not built.
    pub async fn start_anew(&self) -> Result<()> {
        // A node that another release of the simulator left cannot be read, and nobody uses it any more.
        if Path::new(SIM).exists() && self.hardware().is_err() {
            std::fs::remove_dir_all(SIM).context("cannot remove the simulated node of an earlier run")?;
        }
        self.remove_all().await.context("cannot remove what an earlier run left")?;
        self.create_hardware()?;
        self.build_images()
    }

    /// Installs or upgrades with values, and with waits that tests can afford.
    ///
    /// # Errors
    /// If it does not become ready.
    pub async fn configure(&self, values: &[&str]) -> Result<()> {
        let all: Vec<&str> = SHORT.iter().chain(values).copied().collect();
        self.install(&all).await
    }

    /// Removes the product and all that tests made.
    async fn remove_all(&self) -> Result<()> {
        self.reset().await?;
        let installed =
            command::run(self.setting("HELM")?, &["list", "-q", "-n", SYSTEM, &self.kubeconfig_flag()?])?;
        if !installed.trim().is_empty() {
            let remove =
                ["uninstall", "aliquot", "-n", SYSTEM, "--no-hooks", "--wait", &self.kubeconfig_flag()?];
            command::run(self.setting("HELM")?, &remove)?;
        }
        self.kubectl(&["-n", SYSTEM, "delete", "pods", "--all", "--ignore-not-found"])?;
        self.no_pods_in_system().await?;
        self.kubectl(&["delete", "resourceslices", "--all"])?;
        let shares = self.agent_dir()?.join("shares");
        for share in list(&shares).unwrap_or_default() {
            // None where the share was given back already.
            let _ = nix::mount::umount2(&shares.join(share).join("region"), nix::mount::MntFlags::MNT_DETACH);
        }
        let dirs = [self.agent_dir()?, self.limiter_dir()?, PathBuf::from(SIM)];
        for dir in dirs.iter().filter(|d| d.exists()) {
            std::fs::remove_dir_all(dir).with_context(|| dir.display().to_string())?;
        }
        let cdi = Path::new(self.setting("CDI_DIR")?);
        for file in list(cdi)?.iter().filter(|f| f.contains("aliquot")) {
            std::fs::remove_file(cdi.join(file))?;
        }
        Ok(())
    }

    /// Waits until none of our pods is there, farewell pods included.
    ///
    /// # Errors
    /// If one does not go.
    pub async fn no_pods_in_system(&self) -> Result<()> {
        let pods = Api::<k8s_openapi::api::core::v1::Pod>::namespaced(self.client.clone(), SYSTEM);
        self.wait_for("our pods to go", || async {
            Ok(pods.list(&ListParams::default()).await?.items.is_empty().then_some(()))
        })
        .await
    }

    /// After a test that failed: whatever it may have stopped runs again, and what it made is deleted.
    ///
    /// # Errors
    /// If it does not go.
    pub async fn reset(&self) -> Result<()> {
        for process in crate::process::of_program("/usr/bin/aliquot-controller")? {
            process.resume()?;
        }
        for component in ["kubelet", "kube-scheduler", "kube-controller-manager"] {
            // Paused, stopped, or neither.
            if self.component("continue", component).is_err() {
                self.component("start", component)?;
            }
        }
        if Path::new(SIM).exists() {
            self.clear_faults()?;
        }
        self.kubectl(&["uncordon", self.setting("NODE_NAME")?])?;
        for namespace in self.namespaces().await? {
            self.delete_namespace(&namespace).await?;
        }
        self.wait_for("the tests' namespaces to go", || async {
            Ok(self.namespaces().await?.is_empty().then_some(()))
        })
        .await
    }

    /// Builds the product's image and the examples' image, and gives both to the cluster.
    ///
    /// # Errors
    /// If something is not built.
    pub fn build_images(&self) -> Result<()> {
        let image = self.repo().join("e2e/cluster/image");
        let probe = added(self.build.join("cuda-probe"), "/usr/bin/cuda-probe")?;
        command::run(&image, &["--name=aliquot.dev/tools:latest", "--base=glibc", &probe])?;
        // Public images that examples name, as far as they use them, with the probe beside it.
        command::run(&image, &["--name=ubuntu:24.04", "--base=glibc", &probe])?;
        let mut args = vec!["--name=python:3.13-slim".to_owned(), "--base=glibc".to_owned(), probe];
        args.extend(python()?);
        command::run(&image, &args.iter().map(String::as_str).collect::<Vec<_>>())?;
        // The one that is shipped, where it was built: `make image`.
        if let Some(archive) = std::env::var_os("ALIQUOT_IMAGE") {
            let archive = archive.to_str().context("ALIQUOT_IMAGE is not UTF-8")?;
            return command::run(&image, &["--archive", archive]).map(drop);
        }
        self.build_product(&format!("aliquot.dev/aliquot:{}", env!("CARGO_PKG_VERSION")), &[])
    }

    /// Builds the product's image of what was built here.
    ///
    /// # Errors
    /// If something is not built.
    pub(crate) fn build_product(&self, name: &str, options: &[&str]) -> Result<()> {
        let hook = self.build.parent().context("no target directory")?.join("hook");
        let mut args = vec![format!("--name={name}"), "--base=glibc".to_owned()];
        args.extend(options.iter().map(|option| (*option).to_owned()));
        for program in ["aliquot", "aliquot-controller", "aliquot-kubelet-plugin", "aliquot-mps"] {
            args.push(added(self.build.join(program), &format!("/usr/bin/{program}"))?);
        }
        for file in ["libaliquot_preload.so", "libaliquot_core.so", "aliquot-oci-hook"] {
            args.push(added(hook.join(file), &format!("/usr/lib/aliquot/{file}"))?);
        }
        let image = self.repo().join("e2e/cluster/image");
        command::run(image, &args.iter().map(String::as_str).collect::<Vec<_>>()).map(drop)
    }

    fn kubeconfig_flag(&self) -> Result<String> {
        Ok(format!("--kubeconfig={}", self.setting("KUBECONFIG")?))
    }

    /// Where the limiter is installed on the node.
    ///
    /// # Errors
    /// If the cluster does not say where it has its own files.
    pub fn limiter_dir(&self) -> Result<PathBuf> {
        Ok(Path::new(self.setting("CLUSTER_STATE")?).join("limiter"))
    }

    /// Installs or upgrades the chart of this repository and waits until both parts are ready and the GPUs are published.
    ///
    /// # Errors
    /// If it does not become ready.
    pub async fn install(&self, values: &[&str]) -> Result<()> {
        let values = [&["image.pullPolicy=Never"], values].concat();
        self.install_chart(&self.repo().join("deploy/helm/aliquot"), &values).await
    }

    /// The same with a chart, and values for a node of this machine.
    ///
    /// # Errors
    /// As [`Self::install`].
    pub async fn install_chart(&self, chart: &Path, values: &[&str]) -> Result<()> {
        let own = self.node_values()?;
        // By which agents find their nodes, where nothing else labels those with GPUs.
        self.kubectl(&[
            "label",
            "node",
            self.setting("NODE_NAME")?,
            "aliquot.dev/gpu-node=true",
            "--overwrite",
        ])?;
        let chart = chart.display().to_string();
        let kubeconfig = self.kubeconfig_flag()?;
        let mut args =
            vec!["upgrade", "--install", "aliquot", &chart, "-n", SYSTEM, "--create-namespace", &kubeconfig];
        for value in own.iter().map(String::as_str).chain(values.iter().copied()) {
            args.extend(["--set", value]);
        }
        command::run(self.setting("HELM")?, &args)?;
        self.ready().await
    }

    /// Values for a node of this machine, and waits that tests can afford: what [`Self::configure`] installs with.
    ///
    /// # Errors
    /// If `cluster.env` lacks a path.
    pub fn values(&self) -> Result<Vec<String>> {
        let more = ["image.pullPolicy=Never"].iter().chain(SHORT).map(|value| (*value).to_owned());
        Ok(self.node_values()?.into_iter().chain(more).collect())
    }

    fn node_values(&self) -> Result<Vec<String>> {
        Ok(vec![
            format!("kubeletPlugin.driverRoot={SIM}/root"),
            format!("kubeletPlugin.procRoot={SIM}/root/proc"),
            format!("kubeletPlugin.sysRoot={SIM}/root/sys"),
            format!("kubeletPlugin.containerMounts={{{SIM}:{SIM}:rw}}"),
            format!("kubeletPlugin.kubeletRoot={}", self.setting("KUBELET_ROOT")?),
            format!("kubeletPlugin.cdiDir={}", self.setting("CDI_DIR")?),
            format!("kubeletPlugin.limiterDir={}", self.limiter_dir()?.display()),
        ])
    }

    /// Waits until agent and controllers are ready and every GPU is published.
    ///
    /// # Errors
    /// If they do not become ready.
    pub async fn ready(&self) -> Result<()> {
        let deployed = self.kubectl(&["-n", SYSTEM, "get", "daemonsets,deployments", "-o", "name"])?;
        for what in deployed.lines() {
            // Pods that are updated when somebody deletes them have no roll-out to wait for, only a number.
            let done: &[&str] = match what {
                "daemonset.apps/aliquot-mps" => &["wait", "--for=jsonpath={.status.numberReady}=1", what],
                _ => &["rollout", "status", what],
            };
            let args = [&["-n", SYSTEM, "--timeout=120s"], done].concat();
            self.kubectl(&args).with_context(|| {
                let pods = self.kubectl(&["-n", SYSTEM, "get", "pods,events"]);
                pods.unwrap_or_default()
            })?;
        }
        let node = self.hardware()?;
        let in_mig_mode = |gpu: &usize| node.mig_mode(*gpu).is_ok_and(|mode| mode.current);
        let whole = (0..node.gpus().len()).filter(|gpu| !in_mig_mode(gpu)).count();
        self.wait_for("devices of every GPU", || async {
            let devices = self.devices().await?;
            let admin = devices.iter().filter(|d| d.name.ends_with("-admin")).count();
            // A server without our feature gates gets whole GPUs alone.
            let published = admin == node.gpus().len() || admin == 0 && devices.len() == whole;
            Ok(published.then_some(()))
        })
        .await
    }

    /// Another node of simulated GPUs in the place of the one that is there, under a node agent of its own.
    /// Nothing may be running on it.
    ///
    /// # Errors
    /// If it does not become ready.
    pub async fn exchange_hardware(&self, more: &[aliquot_sim_node::GpuSpec]) -> Result<()> {
        self.create_hardware_with(more)?;
        for name in self.system_pods("kubelet-plugin").await? {
            self.kubectl(&["-n", SYSTEM, "delete", "pod", &name])?;
        }
        self.ready().await
    }

    /// A node agent that has not been killed yet: the kubelet waits longer before each restart of a
    /// container, and forgets that with the pod.
    ///
    /// # Errors
    /// If it does not become ready.
    pub async fn renew_agent(&self) -> Result<()> {
        for name in self.system_pods("kubelet-plugin").await? {
            let pod = self.pod(SYSTEM, &name).await?.context("no agent")?;
            if crate::look::containers(&pod).values().any(|(_, restarts)| *restarts > 0) {
                self.kubectl(&["-n", SYSTEM, "delete", "pod", &name])?;
                self.ready().await?;
            }
        }
        Ok(())
    }

    /// `helm uninstall`, with the chart's delete hook.
    ///
    /// # Errors
    /// What helm says.
    pub fn uninstall(&self) -> Result<String> {
        let flag = self.kubeconfig_flag()?;
        command::run(self.setting("HELM")?, &["uninstall", "aliquot", "-n", SYSTEM, "--timeout=120s", &flag])
    }

    /// Runs `aliquot explain` on the cluster; that a pod waits (exit codes 3 and 4) is an answer, too.
    ///
    /// # Errors
    /// What it says.
    pub fn explain(&self, args: &[&str]) -> Result<String> {
        let flag = self.kubeconfig_flag()?;
        let all: Vec<&str> = ["explain"].iter().chain(args).copied().chain([flag.as_str()]).collect();
        command::run_accepting(self.build.join("aliquot"), &all, &[3, 4])
    }

    /// Runs a subcommand of `aliquot` on the cluster.
    ///
    /// # Errors
    /// What it says.
    pub fn aliquot(&self, subcommand: &str, args: &[&str]) -> Result<String> {
        let program = self.build.join("aliquot");
        let flag = self.kubeconfig_flag()?;
        let all: Vec<&str> = [subcommand].iter().chain(args).copied().chain([flag.as_str()]).collect();
        command::run(program, &all)
    }

    /// Sets or removes the label of the node that says who allocates, and waits until it is so.
    ///
    /// # Errors
    /// If it does not become so.
    pub async fn allocator(&self, mode: Option<&str>) -> Result<()> {
        let label = mode.map_or_else(
            || "aliquot.dev/allocator-mode-".to_owned(),
            |m| format!("aliquot.dev/allocator-mode={m}"),
        );
        self.kubectl(&["label", "node", self.setting("NODE_NAME")?, &label, "--overwrite"])?;
        let wanted = if mode == Some("scheduler") { None } else { Some(String::new()) };
        self.wait_for(&format!("the slices of mode {mode:?}"), || async {
            let taints = self.controller_taints().await?;
            Ok((taints.len() == 1 && taints.contains(&wanted)).then_some(()))
        })
        .await
    }

    /// Names of cluster-wide objects of ours.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn cluster_objects(&self) -> Result<Vec<String>> {
        use k8s_openapi::api::admissionregistration::v1::{
            MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
            ValidatingWebhookConfiguration,
        };
        use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
        use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
        let mut found = Vec::new();
        macro_rules! look {
            ($($kind:ty),*) => {$(
                for object in Api::<$kind>::all(self.client.clone()).list(&ListParams::default()).await? {
                    let name = object.name_any();
                    if name.contains("aliquot") {
                        found.push(format!("{} {name}", stringify!($kind)));
                    }
                }
            )*};
        }
        look!(
            MutatingWebhookConfiguration,
            ValidatingWebhookConfiguration,
            ValidatingAdmissionPolicy,
            ValidatingAdmissionPolicyBinding,
            ClusterRole,
            ClusterRoleBinding,
            DeviceClass,
            ResourceSlice
        );
        Ok(found)
    }
}

//! The product on the cluster: the shipped chart, with the controller that lies beside this program. Node
//! agents run nowhere, as the nodes have no machines.

use crate::load::{Claims, Load};
use crate::settings::Settings;
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::command;
use anyhow::{Context, Result, bail};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Lease of the controllers.
const LEASE: &str = "aliquot-controller";
/// Pods that show that all is well before anything is measured.
const TRIAL: usize = 20;

/// The product.
pub(crate) struct Product<'a> {
    cluster: &'a Cluster,
}

impl<'a> Product<'a> {
    /// Builds the image and installs the chart.
    pub(crate) async fn install(cluster: &'a Cluster, settings: &Settings) -> Result<Self> {
        eprintln!("installing the chart ({} nodes will follow)", settings.nodes);
        let program = cluster.program("aliquot-controller");
        if !program.is_file() {
            bail!("{} is not there: build aliquot-controller in the same profile", program.display());
        }
        let name = format!("--name=aliquot.dev/aliquot:{}", env!("CARGO_PKG_VERSION"));
        let add = format!("--add={}=/usr/bin/aliquot-controller", program.display());
        command::run(cluster.repo().join("e2e/cluster/image"), &[&name, "--base=glibc", &add])?;
        let chart = cluster.repo().join("deploy/helm/aliquot").display().to_string();
        let kubeconfig = format!("--kubeconfig={}", cluster.setting("KUBECONFIG")?);
        // Not on nodes without a kubelet.
        let real = json!({"kubernetes.io/hostname": cluster.setting("NODE_NAME")?});
        let here = format!("controller.nodeSelector={real}");
        let nowhere = r#"kubeletPlugin.nodeSelector={"aliquot.dev/no-such-node":"true"}"#;
        let install =
            ["upgrade", "--install", "aliquot", &chart, "-n", SYSTEM, "--create-namespace", &kubeconfig];
        let values = ["--set", "image.pullPolicy=Never", "--set-json", &here, "--set-json", nowhere];
        let arguments: Vec<&str> = install.into_iter().chain(values).collect();
        command::run(cluster.setting("HELM")?, &arguments)?;
        let rollout = ["-n", SYSTEM, "rollout", "status", "--timeout=120s", "deployment/aliquot-controller"];
        cluster.kubectl(&rollout)?;
        Ok(Self { cluster })
    }

    /// Waits until a controller leads and allocates.
    pub(crate) async fn settle(&self, load: &Load<'_>) -> Result<()> {
        load.measure(Claims::Template, TRIAL).await.context("no controller allocates")?;
        load.clean().await
    }

    fn lease(&self) -> Api<Lease> {
        Api::namespaced(self.cluster.client.clone(), SYSTEM)
    }

    /// Has the controllers stand by, with their webhook at work: somebody else holds their lease.
    pub(crate) async fn stand_by(&self) -> Result<StandingBy> {
        let api = self.lease();
        hold(&api, "throughput").await?;
        let renewing = tokio::spawn({
            let api = api.clone();
            async move {
                loop {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    if let Err(error) = hold(&api, "throughput").await {
                        eprintln!("renewing the lease: {error:#}");
                    }
                }
            }
        });
        let standing_by = StandingBy { api, renewing };
        self.cluster.wait_for("the controllers to stand by", || async { self.nobody_leads().await }).await?;
        Ok(standing_by)
    }

    async fn nobody_leads(&self) -> Result<Option<()>> {
        let pods = Api::<Pod>::namespaced(self.cluster.client.clone(), SYSTEM);
        let ours = ListParams::default().labels("app.kubernetes.io/component=controller");
        for pod in pods.list(&ours).await? {
            let metrics = self.cluster.metrics(&pod.name_any()).await?;
            let leads = metrics.lines().find(|line| line.starts_with("aliquot_controller_leading "));
            if leads
                .context("a controller without the metric aliquot_controller_leading")?
                .trim_end()
                .ends_with('1')
            {
                return Ok(None);
            }
        }
        Ok(Some(()))
    }

    /// Leaves the cluster to kube-scheduler.
    pub(crate) async fn switch_off(&self) -> Result<()> {
        let kinds = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"];
        for kind in kinds {
            self.cluster.kubectl(&["delete", kind, "aliquot"])?;
        }
        self.cluster.kubectl(&["-n", SYSTEM, "scale", "deployment/aliquot-controller", "--replicas=0"])?;
        self.cluster.no_pods_in_system().await
    }
}

/// The lease is held by nobody who allocates.
pub(crate) struct StandingBy {
    api: Api<Lease>,
    renewing: JoinHandle<()>,
}

impl StandingBy {
    /// Gives the lease back.
    pub(crate) async fn end(self) -> Result<()> {
        self.renewing.abort();
        hold(&self.api, "").await
    }
}

async fn hold(api: &Api<Lease>, holder: &str) -> Result<()> {
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string();
    let patch = json!({"spec": {"holderIdentity": holder, "renewTime": now}});
    api.patch(LEASE, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

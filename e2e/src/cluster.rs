//! The real Kubernetes of `e2e/cluster`, and who one can be on it.

use crate::command;
use anyhow::{Context, Result};
use kube::Client;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, NamedAuthInfo};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// Namespace that the product is installed in.
pub const SYSTEM: &str = "aliquot-system";
/// Where the simulated node is, on the host and in every container.
pub const SIM: &str = "/run/aliquot-sim";
/// Most time that anything may take on a loaded machine; tests wait for conditions, never for time.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Feature gates without which a server drops what all but whole GPUs is published with.
const GATES: [&str; 3] = ["DRAPartitionableDevices", "DRAConsumableCapacity", "DRADeviceTaints"];

/// Path of `cluster.env`, once this process knows that the cluster is up.
static UP: OnceLock<String> = OnceLock::new();

/// The running cluster.
pub struct Cluster {
    /// What `cluster.env` says.
    pub env: BTreeMap<String, String>,
    /// An administrator's client.
    pub client: Client,
    kubeconfig: Kubeconfig,
    repo: PathBuf,
    /// Where the product was built: beside this program.
    pub(crate) build: PathBuf,
}

impl Cluster {
    /// Joins the cluster that is up, or brings it up.
    ///
    /// # Errors
    /// If it does not come up.
    pub async fn join() -> Result<Self> {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("no repository")?.to_owned();
        let path = match UP.get() {
            Some(path) => path.clone(),
            None => {
                let said = command::run(repo.join("e2e/cluster/up"), &[])?;
                let path = said.lines().last().unwrap_or_default().to_owned();
                UP.get_or_init(|| path).clone()
            }
        };
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path:?}"))?;
        let env: BTreeMap<String, String> = text
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.trim_matches('\'').to_owned()))
            .collect();
        let kubeconfig =
            Kubeconfig::read_from(env.get("KUBECONFIG").context("cluster.env has no KUBECONFIG")?)?;
        let client = client(kubeconfig.clone()).await?;
        // Programs run from `<target>/<profile>`, tests from `deps` in it.
        let own = std::env::current_exe()?;
        let beside = own.parent().context("no build directory")?;
        let build =
            if beside.ends_with("deps") { beside.parent().unwrap_or(beside) } else { beside }.to_owned();
        Ok(Self { env, client, kubeconfig, repo, build })
    }

    /// A value of `cluster.env`.
    ///
    /// # Errors
    /// If it is not there.
    pub fn setting(&self, name: &str) -> Result<&str> {
        self.env.get(name).map(String::as_str).with_context(|| format!("cluster.env has no {name}"))
    }

    /// A program that was built with the tests.
    pub fn program(&self, name: &str) -> PathBuf {
        self.build.join(name)
    }

    /// The minor version, such as 37.
    ///
    /// # Errors
    /// If `cluster.env` does not say.
    pub fn minor(&self) -> Result<u32> {
        let text = self.setting("K8S_MINOR")?;
        text.rsplit('.').next().and_then(|m| m.parse().ok()).with_context(|| format!("no minor: {text}"))
    }

    /// Those feature gates that Aliquot needs for everything but whole GPUs and that this server has off.
    ///
    /// # Errors
    /// If the API server does not say.
    pub fn gates_off(&self) -> Result<Vec<&'static str>> {
        let metrics = self.kubectl(&["get", "--raw", "/metrics"])?;
        let enabled = metrics.lines().filter(|line| line.starts_with("kubernetes_feature_enabled{"));
        let off: Vec<&str> = enabled.filter(|line| line.ends_with(" 0")).collect();
        let is_off = |gate: &&str| off.iter().any(|line| line.contains(&format!("name=\"{gate}\"")));
        // One that a server no longer lists can no longer be switched off.
        Ok(GATES.into_iter().filter(is_off).collect())
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
        self.kubectl_with(args, "")
    }

    fn kubectl_with(&self, args: &[&str], input: &str) -> Result<String> {
        let kubeconfig = format!("--kubeconfig={}", self.setting("KUBECONFIG")?);
        let all: Vec<&str> = std::iter::once(kubeconfig.as_str()).chain(args.iter().copied()).collect();
        command::run_with_input(self.setting("KUBECTL")?, &all, input)
    }

    /// Applies a manifest's text.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn apply(&self, manifest: &str) -> Result<()> {
        self.kubectl_with(&["apply", "--server-side", "--force-conflicts", "-f", "-"], manifest).map(drop)
    }

    /// Creates what a manifest's text says, and returns what is warned of; empty without warnings. What fails
    /// shows there as well.
    pub fn warnings(&self, manifest: &str) -> String {
        let created = self.kubectl_with(&["create", "--warnings-as-errors", "-f", "-"], manifest);
        created.err().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    /// Stops, starts, kills or pauses a part of the cluster (`e2e/cluster/component`).
    ///
    /// # Errors
    /// What the script says.
    pub fn component(&self, action: &str, name: &str) -> Result<String> {
        command::run(self.repo.join("e2e/cluster/component"), &[action, name])
    }

    /// A client with the token that a pod of ours has.
    ///
    /// # Errors
    /// If there is no such pod, or it has another service account.
    pub async fn client_of_pod(&self, service_account: &str, pod: &str) -> Result<Client> {
        let bound = format!("--bound-object-name={pod}");
        let create = ["-n", SYSTEM, "create", "token", service_account, "--bound-object-kind=Pod", &bound];
        let token = self.kubectl(&create)?.trim().to_owned().into();
        self.client_as(AuthInfo { token: Some(token), ..AuthInfo::default() }).await
    }

    /// A client with a service account's token that is bound to no pod.
    ///
    /// # Errors
    /// If there is no such account.
    pub async fn client_of_account(&self, service_account: &str) -> Result<Client> {
        let token = self.kubectl(&["-n", SYSTEM, "create", "token", service_account])?;
        let token = token.trim().to_owned().into();
        self.client_as(AuthInfo { token: Some(token), ..AuthInfo::default() }).await
    }

    /// A client that acts as somebody.
    ///
    /// # Errors
    /// If the kubeconfig has no user.
    pub async fn client_of_user(&self, user: &str) -> Result<Client> {
        let admin = self.kubeconfig.auth_infos.first().and_then(|u| u.auth_info.clone());
        let admin = admin.context("the kubeconfig has no user")?;
        self.client_as(AuthInfo { impersonate: Some(user.to_owned()), ..admin }).await
    }

    async fn client_as(&self, auth_info: AuthInfo) -> Result<Client> {
        let mut config = self.kubeconfig.clone();
        let name = config.auth_infos.first().map(|u| u.name.clone()).unwrap_or_default();
        config.auth_infos =
            vec![NamedAuthInfo { name, auth_info: Some(auth_info), ..NamedAuthInfo::default() }];
        client(config).await
    }
}

async fn client(config: Kubeconfig) -> Result<Client> {
    let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

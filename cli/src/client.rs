//! How commands reach the cluster.

use anyhow::{Context, Result};
use kube::Client;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use std::path::Path;

/// By the kubeconfig that is named; else `KUBECONFIG`, `~/.kube/config`, or the pod's service account.
///
/// # Errors
/// If there is none, or it cannot be used.
pub(crate) async fn connect(kubeconfig: Option<&Path>) -> Result<Client> {
    let Some(path) = kubeconfig else {
        return Client::try_default().await.context("cannot find out how to reach the cluster");
    };
    let file = Kubeconfig::read_from(path).with_context(|| format!("cannot read {}", path.display()))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    Client::try_from(config.with_context(|| format!("cannot use {}", path.display()))?)
        .context("cannot make a client")
}

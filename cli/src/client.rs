//! How commands reach the cluster.

use anyhow::{Context, Result, anyhow};
use kube::Client;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use std::error::Error;
use std::path::Path;

/// By the kubeconfig that is named; else `KUBECONFIG`, `~/.kube/config`, or the pod's service account.
///
/// # Errors
/// If there is none, or it cannot be used.
pub(crate) async fn connect(kubeconfig: Option<&Path>) -> Result<Client> {
    let Some(path) = kubeconfig else {
        let config = Config::infer().await.map_err(|error| {
            // Of the two ways that were tried people mean the file.
            let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            anyhow!("no cluster to talk to: {why}; set KUBECONFIG or --kubeconfig (a pod uses its service account)")
        })?;
        return Client::try_from(config).context("cannot make a client");
    };
    let file = Kubeconfig::read_from(path).with_context(|| format!("cannot read {}", path.display()))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    Client::try_from(config.with_context(|| format!("cannot use {}", path.display()))?)
        .context("cannot make a client")
}

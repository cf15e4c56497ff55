//! Plays the kubelet of one node towards the node agent: finds its registration socket, registers it,
//! and calls prepare and unprepare over the DRA socket that it names.

use aliquot_proto::dra::v1::{
    Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest, dra_plugin_client::DraPluginClient,
};
use aliquot_proto::pluginregistration::v1::{
    InfoRequest, RegistrationStatus, registration_client::RegistrationClient,
};
use anyhow::{Context, Result, bail};
use hyper_util::rt::TokioIo;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// A registered node agent, as its kubelet sees it.
pub struct Kubelet {
    client: DraPluginClient<Channel>,
}

/// A device of a prepared claim.
#[derive(Debug, Clone)]
pub struct PreparedDevice {
    /// Requests of the claim that it answers; empty is all.
    pub requests: Vec<String>,
    /// What the runtime is asked for.
    pub cdi_ids: Vec<String>,
}

async fn connect(socket: PathBuf) -> Result<Channel> {
    let what = format!("cannot connect to {}", socket.display());
    Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        }))
        .await
        .context(what)
}

/// The first socket in the directory whose name does not start with a dot.
fn socket_in(dir: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?;
    let names = entries.flatten().map(|e| e.path());
    names.into_iter().find(|p| p.extension().is_some_and(|e| e == "sock"))
}

impl Kubelet {
    /// Waits for the agent's registration socket and registers it, unless `check` says that there is nothing to wait
    /// for.
    ///
    /// # Errors
    /// If there is no such agent in time, or it is another driver.
    pub async fn register(
        registrar_dir: &Path,
        driver: &str,
        patience: Duration,
        mut check: impl FnMut() -> Result<()>,
    ) -> Result<Self> {
        let found = tokio::time::timeout(patience, async {
            loop {
                check()?;
                if let Some(socket) = socket_in(registrar_dir)
                    && let Ok(channel) = connect(socket).await
                {
                    return anyhow::Ok(channel);
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let channel = found.await.with_context(|| {
            format!("no node agent registered in {} within {} s", registrar_dir.display(), patience.as_secs())
        })??;
        let mut registration = RegistrationClient::new(channel);
        let info = registration.get_info(InfoRequest {}).await.context("GetInfo failed")?.into_inner();
        if info.r#type != aliquot_proto::PLUGIN_TYPE_DRA || info.name != driver {
            bail!("the agent introduced itself as {} {:?}, expected {driver:?}", info.r#type, info.name);
        }
        if !info.supported_versions.iter().any(|v| v == aliquot_proto::registered::DRA_V1) {
            bail!(
                "the agent serves {:?}, not {}",
                info.supported_versions,
                aliquot_proto::registered::DRA_V1
            );
        }
        let client = DraPluginClient::new(connect(PathBuf::from(&info.endpoint)).await?);
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        registration.notify_registration_status(status).await.context("NotifyRegistrationStatus failed")?;
        Ok(Self { client })
    }

    /// NodePrepareResources for one claim.
    ///
    /// # Errors
    /// What the agent answers.
    pub async fn prepare(&mut self, namespace: &str, name: &str, uid: &str) -> Result<Vec<PreparedDevice>> {
        let claim = Claim { namespace: namespace.into(), name: name.into(), uid: uid.into() };
        let request = NodePrepareResourcesRequest { claims: vec![claim] };
        let mut reply = self.client.node_prepare_resources(request).await?.into_inner();
        let answer = reply
            .claims
            .remove(uid)
            .with_context(|| format!("the agent's answer leaves out claim {namespace}/{name}"))?;
        if !answer.error.is_empty() {
            bail!("claim {namespace}/{name} cannot be prepared: {}", answer.error);
        }
        let device = |d: aliquot_proto::dra::v1::Device| PreparedDevice {
            requests: d.request_names,
            cdi_ids: d.cdi_device_ids,
        };
        Ok(answer.devices.into_iter().map(device).collect())
    }

    /// NodeUnprepareResources for one claim.
    ///
    /// # Errors
    /// What the agent answers.
    pub async fn unprepare(&mut self, namespace: &str, name: &str, uid: &str) -> Result<()> {
        let claim = Claim { namespace: namespace.into(), name: name.into(), uid: uid.into() };
        let request = NodeUnprepareResourcesRequest { claims: vec![claim] };
        let mut reply = self.client.node_unprepare_resources(request).await?.into_inner();
        match reply.claims.remove(uid) {
            Some(answer) if answer.error.is_empty() => Ok(()),
            Some(answer) => bail!("claim {namespace}/{name} cannot be unprepared: {}", answer.error),
            None => bail!("the agent's answer leaves out claim {namespace}/{name}"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nobody_waits_for_an_agent_that_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let check = || bail!("it ended with 3");
        let day = Duration::from_secs(24 * 60 * 60);
        let refused = Kubelet::register(dir.path(), "gpu.example.com", day, check).await.err().unwrap();
        assert_eq!(refused.to_string(), "it ended with 3");
    }
}

//! Maintains the certificate: the Secret that the replicas share, its renewal, and the authority in the
//! webhook's configurations.

use super::Config;
use super::certificate::{self, Certificate};
use super::snapshot::SnapshotStore;
use crate::field_manager::{creation, params};
use crate::http::Health;
use crate::webhook::budgets::Watched;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::api::Patch;
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The time that API servers get to learn of a new authority.
const SPREAD: Duration = Duration::from_secs(10);

/// The shortest time between two looks.
const LEAST: Duration = Duration::from_millis(500);

/// The certificate that is served; `None` until there is one.
pub(super) type Current = watch::Receiver<Option<Arc<Certificate>>>;

pub(super) struct Keeper {
    client: Client,
    config: Config,
    current: watch::Sender<Option<Arc<Certificate>>>,
    snapshots: SnapshotStore,
    budgets: Option<Watched>,
}

impl Keeper {
    /// Returns a keeper. The replica becomes ready when `snapshots` and `budgets` are complete: checks, gates
    /// and priorities depend on them, and a review before that time gets none. Everything else in a review is
    /// checked again by the controller.
    pub(super) fn new(
        client: Client,
        config: Config,
        snapshots: SnapshotStore,
        budgets: Option<Watched>,
    ) -> Self {
        Self { client, config, current: watch::Sender::new(None), snapshots, budgets }
    }

    /// Waits until slices, classes and budgets were listed.
    async fn complete(&self) {
        self.snapshots.complete().await;
        if let Some(budgets) = &self.budgets {
            budgets.complete().await;
        }
    }

    pub(super) fn current(&self) -> Current {
        self.current.subscribe()
    }

    pub(super) async fn run(self, health: Health, stop: CancellationToken) {
        let soon = Duration::from_secs(2).min(self.config.interval);
        loop {
            let round = async {
                let pause = match self.look_after().await {
                    Ok(()) => {
                        if tokio::time::timeout(self.config.interval, self.complete()).await.is_ok() {
                            health.set_ready();
                            self.config.interval.min(self.fresh_for().max(LEAST))
                        } else {
                            tracing::warn!(
                                "the webhook is not ready: slices, classes or budgets could not be listed yet"
                            );
                            soon
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the webhook's certificate");
                        soon
                    }
                };
                tokio::time::sleep(pause).await;
            };
            tokio::select! {
                () = round => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Returns how long the served certificate is still fresh. It may be from a time when certificates had a
    /// shorter life.
    fn fresh_for(&self) -> Duration {
        let served = self.current.borrow();
        let fresh =
            |served: &Arc<Certificate>| served.fresh_for(self.config.certificate_life, Timestamp::now());
        served.as_ref().map_or(Duration::ZERO, fresh)
    }

    /// Serves the shared certificate, then announces its authority. If another certificate is served that
    /// stays trusted, the order is reversed: API servers learn of the new authority with a delay.
    async fn look_after(&self) -> anyhow::Result<()> {
        let certificate = Arc::new(self.certificate().await?);
        let served = self.current.borrow().clone();
        if served.as_ref().is_some_and(|served| served.bundle == certificate.bundle) {
            return self.announce(&certificate.bundle).await;
        }
        if served.is_some_and(|served| certificate.vouches_for(&served)) {
            self.announce(&certificate.bundle).await?;
            tokio::time::sleep(SPREAD.min(self.config.certificate_life / 12)).await;
            self.current.send_replace(Some(certificate));
            return Ok(());
        }
        self.current.send_replace(Some(certificate.clone()));
        self.announce(&certificate.bundle).await
    }

    /// Returns the shared certificate; makes or renews it if necessary. Of several replicas that try, one
    /// succeeds, and the others read what it wrote.
    async fn certificate(&self) -> anyhow::Result<Certificate> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.config.namespace);
        let (name, namespace, names) = (&self.config.secret, &self.config.namespace, &self.config.names);
        let life = self.config.certificate_life;
        for _ in 0..3 {
            let now = Timestamp::now();
            let written = match api.get_opt(name).await? {
                None => {
                    let secret = certificate::make(name, namespace, names, life, None, now)?;
                    api.create(&creation(), &secret).await
                }
                Some(present) => {
                    let known = Certificate::read(&present)?;
                    if !known.is_stale(names, life, now) {
                        return Ok(known);
                    }
                    tracing::info!(secret = name, "renewing the webhook's certificate");
                    let mut secret = certificate::make(name, namespace, names, life, Some(&known), now)?;
                    secret.metadata.resource_version = present.metadata.resource_version;
                    api.replace(name, &creation(), &secret).await
                }
            };
            match written {
                Ok(secret) => return Ok(Certificate::read(&secret)?),
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Err(error.into()),
            }
        }
        anyhow::bail!("Secret {namespace}/{name} changes all the time")
    }

    /// Writes the authorities into the webhook configurations, which the chart creates.
    async fn announce(&self, bundle: &str) -> anyhow::Result<()> {
        let mutating: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        self.announce_in(&mutating, bundle, |configuration| {
            let webhooks = configuration.webhooks.iter().flatten();
            webhooks.map(|webhook| (webhook.name.as_str(), &webhook.client_config)).collect()
        })
        .await?;
        let validating: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        self.announce_in(&validating, bundle, |configuration| {
            let webhooks = configuration.webhooks.iter().flatten();
            webhooks.map(|webhook| (webhook.name.as_str(), &webhook.client_config)).collect()
        })
        .await
    }

    async fn announce_in<K>(
        &self,
        api: &Api<K>,
        bundle: &str,
        webhooks: impl Fn(&K) -> Vec<(&str, &WebhookClientConfig)> + Send,
    ) -> anyhow::Result<()>
    where
        K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync,
    {
        let (name, kind) = (&self.config.configuration, K::kind(&()));
        let Some(configuration) = api.get_opt(name).await? else {
            tracing::debug!(name, %kind, "there is no configuration of webhooks");
            return Ok(());
        };
        let wanted = ByteString(bundle.as_bytes().to_vec());
        let stale: Vec<_> = webhooks(&configuration)
            .into_iter()
            .filter(|(_, config)| config.ca_bundle.as_ref() != Some(&wanted))
            .map(|(name, _)| json!({"name": name, "clientConfig": {"caBundle": wanted}}))
            .collect();
        if stale.is_empty() {
            return Ok(());
        }
        let params = params();
        api.patch(name, &params, &Patch::Strategic(json!({"webhooks": stale}))).await?;
        tracing::info!(name, %kind, "the webhook's authority is announced");
        Ok(())
    }
}

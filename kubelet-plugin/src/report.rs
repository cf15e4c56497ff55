//! Tells the controller what this node holds and released, in the node's own `NodeUsage` object.
//!
//! The ledger is authoritative; the object is a copy of it that is written whenever it differs. Records are
//! removed from the ledger only when the object's status acknowledges them. The status is read for as long as
//! there are any records.

use crate::metrics::Metrics;
use crate::prepare::{Node, Overview};
use crate::status::FIELD_MANAGER;
use aliquot_api::v1alpha1::{NodeUsage, NodeUsageSpec, NodeUsageStatus, resource};
use aliquot_model::names::API_VERSION;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

const API_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest interval between comparisons of the object with the ledger: somebody may have deleted the
/// object.
const COMPARE: Duration = Duration::from_secs(60);
/// The pause before a server that does not know the kind is asked again.
const UNKNOWN: Duration = Duration::from_secs(60);

/// The task that reports usage.
pub struct Reporter {
    /// The node.
    pub node: Arc<Node>,
    /// The API client.
    pub client: Client,
    /// The name of the node.
    pub node_name: String,
    /// The metrics.
    pub metrics: Metrics,
    /// The overview, which changes with the ledger.
    pub overview: watch::Receiver<Arc<Overview>>,
    /// The interval between looks for an acknowledgement.
    pub interval: Duration,
}

impl std::fmt::Debug for Reporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reporter").field("node_name", &self.node_name).finish_non_exhaustive()
    }
}

/// The object in the API, as far as it is known.
#[derive(Debug, Default)]
struct Published {
    spec: Option<NodeUsageSpec>,
    status: NodeUsageStatus,
    looked: Option<Instant>,
}

impl Reporter {
    /// Runs until cancelled.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut published = Published::default();
        loop {
            self.overview.mark_unchanged();
            let wait = match self.step(&mut published).await {
                Ok(()) => self.interval,
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    tracing::warn!("the API server does not know the kind NodeUsage: no usage is reported");
                    UNKNOWN
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot report usage, trying again");
                    published = Published::default();
                    self.interval
                }
            };
            tokio::select! {
                () = cancel.cancelled() => return,
                changed = self.overview.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    async fn step(&self, published: &mut Published) -> Result<(), kube::Error> {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource::<NodeUsage>());
        let pending = published.spec.as_ref().is_none_or(|spec| !spec.released.is_empty());
        if pending || published.looked.is_none_or(|at| at.elapsed() >= COMPARE) {
            let found = in_time(api.get_opt(&self.node_name)).await?;
            let part = |name: &str| found.as_ref().and_then(|object| object.data.get(name).cloned());
            published.spec = part("spec").and_then(|spec| serde_json::from_value(spec).ok());
            published.status =
                part("status").and_then(|status| serde_json::from_value(status).ok()).unwrap_or_default();
            published.looked = Some(Instant::now());
        }
        let (node, status) = (Arc::clone(&self.node), published.status.clone());
        let spec = match tokio::task::spawn_blocking(move || node.usage(&status)).await {
            Ok(Ok(spec)) => spec,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot read the ledger, trying again");
                return Ok(());
            }
            Err(error) => {
                tracing::error!(%error, "reading the ledger ended abnormally");
                return Ok(());
            }
        };
        self.metrics.pending_releases.set(i64::try_from(spec.released.len()).unwrap_or(i64::MAX));
        if published.spec.as_ref() != Some(&spec) {
            let object = json!({
                "apiVersion": API_VERSION, "kind": "NodeUsage",
                "metadata": {"name": self.node_name}, "spec": spec,
            });
            let params = PatchParams::apply(FIELD_MANAGER).force();
            in_time(api.patch(&self.node_name, &params, &Patch::Apply(&object))).await?;
            published.spec = Some(spec);
        }
        Ok(())
    }
}

async fn in_time<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    match timeout(API_TIMEOUT, request).await {
        Ok(answer) => answer,
        Err(late) => Err(kube::Error::Service(Box::new(late))),
    }
}

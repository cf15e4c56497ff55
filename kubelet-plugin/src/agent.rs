//! Handles prepare and unprepare as the kubelet calls them. It looks the claim up in the API, outside the
//! node's lock, and hands it to [`crate::prepare`] on a blocking thread. Then it reports the result in
//! metrics, events and the claim's status.

mod call_error;

pub use call_error::CallError;

use crate::claim::{self, ClaimRef, Request};
use crate::events::Events;
use crate::metrics::Metrics;
use crate::notice;
use crate::object_names;
use crate::prepare::{Node, Prepared};
use crate::reasons;
use crate::retained;
use crate::status::StatusWriter;
use aliquot_api::Lean;
use aliquot_model::DeviceKind;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::task::JoinError;
use tracing::Instrument;

/// The longest wait for one answer of the API server within a kubelet call of 45 s.
const API_TIMEOUT: Duration = Duration::from_secs(10);

/// The agent as the kubelet sees it.
#[derive(Clone)]
pub struct Agent {
    /// The node.
    pub node: Arc<Node>,
    /// The API client.
    pub client: Client,
    /// The name of the driver.
    pub driver: String,
    /// The name of this node's pool.
    pub pool: String,
    /// The metrics.
    pub metrics: Metrics,
    /// The event recorder.
    pub events: Events,
    /// The writer of `status.devices`.
    pub status: StatusWriter,
    /// Notified after every change of the ledger.
    pub changed: Arc<Notify>,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent")
            .field("driver", &self.driver)
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

/// The result of looking a claim up.
enum Lookup {
    Found(Box<ResourceClaim>),
    Gone,
    Unreachable(String),
}

impl Agent {
    /// Prepares one claim.
    ///
    /// # Errors
    /// Fails with the error that the user finds in the pod's events.
    pub async fn prepare(&self, claim: ClaimRef) -> Result<Vec<Prepared>, CallError> {
        let span = tracing::info_span!(
            "prepare",
            claim.uid = %claim.uid,
            claim.name = %claim.name,
            claim.namespace = %claim.namespace
        );
        async {
            let started = Instant::now();
            let result = self.try_prepare(&claim).await;
            let outcome = result.as_ref().map_or_else(CallError::outcome, |_| "ok");
            self.metrics.observe("prepare", outcome, started.elapsed());
            match &result {
                Ok(devices) => {
                    let devices: Vec<&str> = devices.iter().map(|d| d.device.as_str()).collect();
                    tracing::info!(devices = devices.join(","), took = ?started.elapsed(), "prepared");
                }
                Err(error) => tracing::warn!(%error, outcome, "not prepared"),
            }
            self.changed.notify_one();
            result
        }
        .instrument(span)
        .await
    }

    async fn try_prepare(&self, claim: &ClaimRef) -> Result<Vec<Prepared>, CallError> {
        if !object_names::is_safe_uid(&claim.uid) {
            return Err(CallError::BadUid(claim.clone()));
        }
        let object = match self.look_up(claim).await {
            Lookup::Found(object) => object,
            Lookup::Gone => return Err(CallError::Gone(claim.clone())),
            Lookup::Unreachable(why) => return self.prepare_known(claim, why).await,
        };
        let request = claim::decode(claim, &object, &self.driver, &self.pool).map_err(CallError::from);
        let request = request.inspect_err(|error| self.warn(claim, error))?;
        let indexed = self.is_only_claim(&object).await;
        let mut prepared = self.call_prepare(&request, indexed).await;
        if matches!(&prepared, Err(CallError::Prepare(error)) if error.is_conflict())
            && retained::end_in_the_way(&self.node, &self.client, &self.driver, &request).await
        {
            prepared = self.call_prepare(&request, indexed).await;
        }
        match &prepared {
            Ok(_) => {
                self.status.prepared(&claim.uid);
                self.say_left_out(&request).await;
            }
            Err(error) => {
                self.warn(claim, error);
                if let Some(reason) = error.reason() {
                    self.status.failed(&request, reason, &error.to_string());
                }
            }
        }
        prepared
    }

    /// Records an event for an error that the claim's users can do something about.
    fn warn(&self, claim: &ClaimRef, error: &CallError) {
        if let Some(reason) = error.reason() {
            self.events.claim_warning(claim, reason, error.to_string());
        }
    }

    async fn call_prepare(&self, request: &Request, indexed: bool) -> Result<Vec<Prepared>, CallError> {
        let (node, wanted) = (Arc::clone(&self.node), request.clone());
        Ok(blocking(move || node.prepare(&wanted, indexed, Timestamp::now())).await??)
    }

    /// Sends an event to a claim for administration that names the GPUs it does not have because virtual
    /// machines have them.
    async fn say_left_out(&self, request: &Request) {
        if request.devices.iter().all(|device| device.device.kind() != DeviceKind::Admin) {
            return;
        }
        let (node, uid) = (Arc::clone(&self.node), request.claim.uid.clone());
        match blocking(move || node.left_out(&uid)).await {
            Ok(Ok(devices)) if devices.is_empty() => {}
            Ok(Ok(devices)) => {
                self.events.claim_warning(
                    &request.claim,
                    reasons::DEVICE_LEFT_OUT,
                    notice::left_out(&devices),
                );
            }
            Ok(Err(error)) => tracing::warn!(%error, "whether all GPUs were given cannot be told"),
            Err(error) => tracing::error!(%error, "looking for GPUs of virtual machines failed"),
        }
    }

    /// Answers while the API does not: the answer that the kubelet was given before still holds.
    async fn prepare_known(&self, claim: &ClaimRef, why: String) -> Result<Vec<Prepared>, CallError> {
        let (node, uid) = (Arc::clone(&self.node), claim.uid.clone());
        match blocking(move || node.prepare_known(&uid)).await?? {
            Some(prepared) => {
                tracing::warn!(error = %why, "the claim cannot be read, giving the same answer as before");
                Ok(prepared)
            }
            None => Err(CallError::Unreachable { claim: claim.clone(), why }),
        }
    }

    /// Releases one claim, from local state alone.
    ///
    /// # Errors
    /// Fails with the error that appears in the kubelet's log and the pod's events.
    pub async fn unprepare(&self, claim: ClaimRef) -> Result<(), CallError> {
        let span = tracing::info_span!(
            "unprepare",
            claim.uid = %claim.uid,
            claim.name = %claim.name,
            claim.namespace = %claim.namespace
        );
        async {
            let started = Instant::now();
            let (node, uid) = (Arc::clone(&self.node), claim.uid.clone());
            let result = blocking(move || node.unprepare(&uid)).await.map_err(CallError::from);
            let result = result.and_then(|done| done.map_err(CallError::from));
            match &result {
                Ok(true) => tracing::info!(took = ?started.elapsed(), "unprepared"),
                Ok(false) => tracing::debug!("nothing to unprepare"),
                Err(error) => {
                    tracing::warn!(%error, "not unprepared");
                    self.events.claim_warning(&claim, reasons::UNPREPARE_FAILED, error.to_string());
                }
            }
            let outcome = result.as_ref().map_or_else(CallError::outcome, |_| "ok");
            self.metrics.observe("unprepare", outcome, started.elapsed());
            self.status.forget(&claim.uid);
            self.changed.notify_one();
            result.map(drop)
        }
        .instrument(span)
        .await
    }

    async fn look_up(&self, claim: &ClaimRef) -> Lookup {
        let api: Api<Lean<ResourceClaim>> = Api::namespaced(self.client.clone(), &claim.namespace);
        match tokio::time::timeout(API_TIMEOUT, api.get_opt(&claim.name)).await {
            Ok(Ok(Some(Lean(object)))) => Lookup::Found(Box::new(object)),
            Ok(Ok(None)) => Lookup::Gone,
            Ok(Err(error)) => Lookup::Unreachable(error.to_string()),
            Err(_) => Lookup::Unreachable(format!("no answer within {API_TIMEOUT:?}")),
        }
    }

    /// Returns true if every container that uses the claim uses no other claim. Only then are HAMi's indexed
    /// variables, which have no room for the claim's name, unambiguous. Claims of several pods never qualify.
    async fn is_only_claim(&self, object: &ResourceClaim) -> bool {
        let Some(namespace) = object.metadata.namespace.as_deref() else { return false };
        let owner = object.metadata.owner_references.iter().flatten().find(|owner| owner.kind == "Pod");
        let Some(owner) = owner else { return false };
        let api: Api<Lean<Pod>> = Api::namespaced(self.client.clone(), namespace);
        match tokio::time::timeout(API_TIMEOUT, api.get_opt(&owner.name)).await {
            Ok(Ok(Some(Lean(pod)))) if pod.metadata.uid.as_deref() == Some(&owner.uid) => {
                names_only(&pod, object)
            }
            _ => false,
        }
    }
}

/// Returns true if no container of the pod combines the claim with another one.
fn names_only(pod: &Pod, claim: &ResourceClaim) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    let Some(name) = annotations.and_then(|a| a.get(aliquot_model::names::POD_CLAIM_NAME)) else {
        return false;
    };
    let Some(spec) = &pod.spec else { return false };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut uses = containers.filter_map(|container| container.resources.as_ref()?.claims.as_ref());
    uses.all(|claims| {
        let ours = claims.iter().any(|used| &used.name == name);
        !ours || claims.iter().all(|used| &used.name == name)
    })
}

/// Runs blocking work. A panic in it is an error of that claim, not of the agent.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    let span = tracing::Span::current();
    tokio::task::spawn_blocking(move || span.in_scope(work)).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[rstest]
    #[case::alone(json!([["gpu"], []]), true)]
    #[case::two_requests_of_it(json!([["gpu", "gpu"]]), true)]
    #[case::beside_another(json!([["gpu", "nic"]]), false)]
    #[case::another_container_has_another(json!([["gpu"], ["nic"]]), true)]
    fn indexed_variables_are_for_containers_with_one_claim(#[case] uses: Value, #[case] want: bool) {
        let containers: Vec<Value> = uses
            .as_array()
            .unwrap()
            .iter()
            .enumerate()
            .map(|(index, names)| {
                let claims: Vec<Value> =
                    names.as_array().unwrap().iter().map(|name| json!({"name": name})).collect();
                json!({"name": format!("c{index}"), "resources": {"claims": claims}})
            })
            .collect();
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": containers}})).unwrap();
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": {"annotations": {"resource.kubernetes.io/pod-claim-name": "gpu"}}, "spec": {}}))
        .unwrap();
        assert_eq!(names_only(&pod, &claim), want);
    }
}

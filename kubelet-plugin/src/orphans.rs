//! Compares the ledger with the claims in the API.
//!
//! A claim can vanish under its hardware: a user drops the finalizer, a pod is force-deleted, an allocation
//! is cleared. Its devices then look free to allocators, so they get the `held` taint until they are
//! unprepared. Normally the kubelet unprepares them. If the kubelet has lost its state, it does not, so after
//! a grace period without any consumer on this node the agent does it itself.
//!
//! Claims that a start found half unprepared are finished here once their MPS daemons have ended.
//!
//! GPU instances that no claim has are reported here. They are destroyed if the node is configured so and
//! nothing can depend on them.

mod foreign;
mod known;
mod lost;
mod pace;

use crate::claim::{self, ClaimRef, ResultKey, still_allocated};
use crate::events::Events;
use crate::http::Notes;
use crate::ledger::{Record, Retention, State};
use crate::metrics::Metrics;
use crate::notice;
use crate::pages;
use crate::prepare::{Node, Overview};
use crate::reasons;
use crate::retained;
use aliquot_api::{Lean, lean};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{GetParams, ListParams};
use kube::{Api, Client};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

const API_TIMEOUT: Duration = Duration::from_secs(10);

/// The task that compares ledger and API.
pub struct Collector {
    /// The node.
    pub node: Arc<Node>,
    /// The API client.
    pub client: Client,
    /// The name of the driver.
    pub driver: String,
    /// The name of this node's pool.
    pub pool: String,
    /// The name of the node.
    pub node_name: String,
    /// The metrics.
    pub metrics: Metrics,
    /// The event recorder.
    pub events: Events,
    /// The notes for `/healthz`.
    pub notes: Notes,
    /// The overview of ledger and hardware.
    pub overview: watch::Receiver<Arc<Overview>>,
    /// The channel for the UIDs of vanished claims.
    pub vanished: watch::Sender<Arc<BTreeSet<String>>>,
    /// Notified after a change of the ledger.
    pub changed: Arc<Notify>,
    /// The interval between looks.
    pub interval: Duration,
    /// The time for which the hardware of vanished claims is kept.
    pub grace: Duration,
}

impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Collector").field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// The state of a claim in the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// The claim is allocated as it was prepared.
    Allocated {
        /// True if the controller keeps the claim for its next pod; see [`claim::hold`].
        kept: bool,
    },
    /// The claim is gone, is another claim, or is allocated otherwise.
    Vanished,
    /// The API could not be asked.
    Unknown,
}

impl Collector {
    /// Runs until cancelled.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut since: BTreeMap<String, Instant> = BTreeMap::new();
        let mut foreign = foreign::Memory::default();
        let mut lost = lost::Memory::default();
        let mut left = Vec::new();
        loop {
            self.end_left_daemons(&mut left).await;
            let overview = Arc::clone(&self.overview.borrow_and_update());
            let gone = self.check_lost(&overview, &mut lost).await;
            self.check_claims(&overview, &mut since, gone).await;
            self.check_foreign(&overview, &mut foreign).await;
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(self.interval) => {}
            }
        }
    }

    /// Finishes claims that a start found half unprepared, and left until their MPS daemons end. `told` holds
    /// the last note about each claim.
    async fn end_left_daemons(&self, told: &mut Vec<(String, String)>) {
        let node = Arc::clone(&self.node);
        match tokio::task::spawn_blocking(move || node.end_left_daemons()).await {
            Ok(Ok(ended)) => {
                if ended.tell(told) {
                    self.changed.notify_one();
                }
            }
            Ok(Err(error)) => tracing::warn!(%error, "cannot look for MPS daemons that were left"),
            Err(error) => tracing::error!(%error, "ending MPS daemons ended abnormally"),
        }
    }

    /// Checks all claims in the ledger. `gone` are claims that have vanished besides.
    async fn check_claims(
        &self,
        overview: &Overview,
        since: &mut BTreeMap<String, Instant>,
        gone: BTreeSet<String>,
    ) {
        let (parked, settled): (Vec<&Record>, Vec<&Record>) = overview
            .ledger
            .claims
            .values()
            .filter(|record| record.state != State::Started)
            .partition(|record| record.parked_until().is_some());
        for record in parked {
            if retained::review(&self.node, &self.client, &self.driver, record, Timestamp::now()).await {
                self.changed.notify_one();
            }
        }
        for record in &settled {
            let uid = &record.claim.uid;
            let keys = record.keys();
            match self.standing(&record.claim, &keys).await {
                Standing::Unknown => {}
                Standing::Allocated { kept } => {
                    since.remove(uid);
                    self.note_retention(record, kept).await;
                }
                Standing::Vanished => self.note_vanished(&record.claim, &keys, since).await,
            }
        }
        // Records of a newer release are left for that release to give back.
        let newer = overview.ledger.newer.values().filter(|record| !record.claim.namespace.is_empty());
        for record in newer.filter(|record| record.devices().is_some()) {
            let (uid, keys) = (&record.claim.uid, record.keys());
            match self.standing(&record.claim, &keys).await {
                Standing::Unknown => {}
                Standing::Allocated { .. } => drop(since.remove(uid)),
                Standing::Vanished => self.note_vanished(&record.claim, &keys, since).await,
            }
        }
        since.retain(|uid, _| {
            overview.ledger.newer.contains_key(uid) || settled.iter().any(|record| &record.claim.uid == uid)
        });
        self.metrics.vanished_claims.set(i64::try_from(since.len()).unwrap_or(i64::MAX));
        let uids: BTreeSet<String> = since.keys().cloned().chain(gone).collect();
        self.vanished.send_if_modified(|current| {
            let changed = **current != uids;
            if changed {
                *current = Arc::new(uids);
            }
            changed
        });
        for record in settled {
            let due = since.get(&record.claim.uid).is_some_and(|at| at.elapsed() >= self.grace);
            if due && self.is_unused(record).await {
                self.release(&record.claim).await;
            }
        }
    }

    /// Notes whether the controller keeps the claim. The controller may have written its entry after the
    /// claim was prepared, or removed it.
    async fn note_retention(&self, record: &Record, kept: bool) {
        if kept == (record.retention == Some(Retention::Keep)) {
            return;
        }
        let (node, uid) = (Arc::clone(&self.node), record.claim.uid.clone());
        match tokio::task::spawn_blocking(move || node.note_retention(&uid, kept)).await {
            Ok(Ok(())) => self.changed.notify_one(),
            Ok(Err(error)) => {
                tracing::warn!(claim.uid = %record.claim.uid, %error, "cannot note whether a claim is kept")
            }
            Err(error) => tracing::error!(claim.uid = %record.claim.uid, %error, "noting ended abnormally"),
        }
    }

    /// Notes the time since which a claim is gone while it has these results prepared, and reports it.
    async fn note_vanished(
        &self,
        claim: &ClaimRef,
        keys: &[ResultKey],
        since: &mut BTreeMap<String, Instant>,
    ) {
        if since.contains_key(&claim.uid) || !self.is_held(&claim.uid, keys).await {
            return;
        }
        since.insert(claim.uid.clone(), Instant::now());
        let devices: Vec<&str> = keys.iter().map(|key| key.device.as_str()).collect();
        self.events.node_warning(reasons::CLAIM_VANISHED, notice::vanished(claim, &devices));
    }

    /// Returns true if a claim has these results prepared now. Since the ledger was read it may have been
    /// unprepared, and then deleted or allocated otherwise. If the ledger cannot be read, returns false; the
    /// next look decides.
    async fn is_held(&self, uid: &str, keys: &[ResultKey]) -> bool {
        let (node, owned, keys) = (Arc::clone(&self.node), uid.to_owned(), keys.to_vec());
        match tokio::task::spawn_blocking(move || node.has_prepared(&owned, &keys)).await {
            Ok(Ok(held)) => held,
            Ok(Err(error)) => {
                tracing::warn!(claim.uid = %uid, %error, "cannot look whether a claim that is gone has anything here");
                false
            }
            Err(error) => {
                tracing::error!(claim.uid = %uid, %error, "looking for a claim ended abnormally");
                false
            }
        }
    }

    /// Asks the API's cache, and the store itself before a claim is believed to be gone.
    async fn standing(&self, claim: &ClaimRef, keys: &[ResultKey]) -> Standing {
        match self.look(claim, keys, &GetParams::any()).await {
            Standing::Vanished => self.look(claim, keys, &GetParams::default()).await,
            other => other,
        }
    }

    async fn look(&self, claim: &ClaimRef, keys: &[ResultKey], params: &GetParams) -> Standing {
        let api: Api<Lean<ResourceClaim>> = Api::namespaced(self.client.clone(), &claim.namespace);
        match timeout(API_TIMEOUT, lean(api.get_with(&claim.name, params))).await {
            Ok(Ok(object)) => {
                let same = object.metadata.uid.as_deref() == Some(&claim.uid);
                if same && still_allocated(&object, &self.driver, keys) {
                    Standing::Allocated { kept: claim::hold(&object).is_some() }
                } else {
                    Standing::Vanished
                }
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Standing::Vanished,
            Ok(Err(error)) => {
                tracing::debug!(claim.uid = %claim.uid, %error, "cannot ask for the claim");
                Standing::Unknown
            }
            Err(_) => Standing::Unknown,
        }
    }

    /// Returns true if no pod of this node uses the claim and no process uses its hardware. If this cannot be
    /// found out, returns false.
    async fn is_unused(&self, record: &Record) -> bool {
        let api: Api<Lean<Pod>> = Api::all(self.client.clone());
        let params = ListParams::default().fields(&format!("spec.nodeName={}", self.node_name));
        let pods = match pages::all(&api, params, API_TIMEOUT, Some).await {
            Ok(pods) => pods,
            Err(error) => {
                tracing::debug!(%error, "cannot list the node's pods");
                return false;
            }
        };
        if pods.iter().any(|pod| consumes(pod, &record.claim)) {
            return false;
        }
        let (node, record) = (Arc::clone(&self.node), record.clone());
        tokio::task::spawn_blocking(move || !node.has_processes(&record)).await.unwrap_or(false)
    }

    async fn release(&self, claim: &ClaimRef) {
        let (node, uid) = (Arc::clone(&self.node), claim.uid.clone());
        match tokio::task::spawn_blocking(move || node.give_up(&uid, Timestamp::now())).await {
            Ok(Ok(_)) => {
                self.metrics.collected_claims.inc();
                self.events.node_normal(
                    reasons::CLAIM_COLLECTED,
                    format!("released the hardware of claim {claim}, which is gone and used by no pod of this node"),
                );
                self.changed.notify_one();
            }
            Ok(Err(error)) => {
                tracing::warn!(claim.uid = %claim.uid, %error, "cannot release a vanished claim")
            }
            Err(error) => tracing::error!(claim.uid = %claim.uid, %error, "releasing ended abnormally"),
        }
    }
}

/// Returns true if containers of the pod may be running.
fn may_run(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    !matches!(phase, "Succeeded" | "Failed")
}

/// Returns the names of the claims that a pod uses: claims named in its spec, made for it, or made for its
/// extended resources.
fn claims_of(pod: &Pod) -> impl Iterator<Item = &str> {
    let direct = pod
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten())
        .filter_map(|used| used.resource_claim_name.as_deref());
    let generated = pod
        .status
        .iter()
        .flat_map(|status| status.resource_claim_statuses.iter().flatten())
        .filter_map(|used| used.resource_claim_name.as_deref());
    let extended = pod
        .status
        .iter()
        .filter_map(|status| status.extended_resource_claim_status.as_ref())
        .map(|used| used.resource_claim_name.as_str());
    direct.chain(generated).chain(extended)
}

/// Returns true if a pod that may still run uses the claim.
fn consumes(pod: &Pod, claim: &ClaimRef) -> bool {
    pod.metadata.namespace.as_deref() == Some(&claim.namespace)
        && may_run(pod)
        && claims_of(pod).any(|name| name == claim.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[rstest]
    #[case::by_name(json!({"metadata": {"namespace": "ns"},
        "spec": {"containers": [], "resourceClaims": [{"name": "g", "resourceClaimName": "claim-a"}]}}), true)]
    #[case::by_template(json!({"metadata": {"namespace": "ns"}, "spec": {"containers": []},
        "status": {"resourceClaimStatuses": [{"name": "g", "resourceClaimName": "claim-a"}]}}), true)]
    #[case::by_extended_resource(json!({"metadata": {"namespace": "ns"}, "spec": {"containers": []},
        "status": {"extendedResourceClaimStatus": {"resourceClaimName": "claim-a", "requestMappings": []}}}), true)]
    #[case::finished(json!({"metadata": {"namespace": "ns"}, "status": {"phase": "Succeeded"},
        "spec": {"containers": [], "resourceClaims": [{"name": "g", "resourceClaimName": "claim-a"}]}}), false)]
    #[case::elsewhere(json!({"metadata": {"namespace": "other"},
        "spec": {"containers": [], "resourceClaims": [{"name": "g", "resourceClaimName": "claim-a"}]}}), false)]
    #[case::another_claim(json!({"metadata": {"namespace": "ns"},
        "spec": {"containers": [], "resourceClaims": [{"name": "g", "resourceClaimName": "claim-b"}]}}), false)]
    fn pods_consume_claims_by_name_and_by_template(#[case] pod: Value, #[case] want: bool) {
        let pod: Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(consumes(&pod, &crate::testing::claim("a")), want);
    }
}

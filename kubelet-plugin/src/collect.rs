//! Compares the ledger with the claims in the API.
//!
//! A claim can vanish under its hardware: a user drops the finalizer, a pod is force-deleted, an
//! allocation is cleared. Its devices then look free to allocators, so they get the `held` taint until
//! they are unprepared. Normally the kubelet does that; when it lost its state, nobody would, so after a
//! grace period without any consumer on this node the agent does it itself.
//!
//! Claims that a start found half given back are finished here once their MPS daemons have ended.
//!
//! GPU instances that no claim has are told of here, and destroyed if the node is told so and nothing can depend
//! on them.

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
use crate::parked;
use crate::prepare::{Node, Overview};
use crate::reasons;
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

/// The task.
pub struct Collector {
    /// The node.
    pub node: Arc<Node>,
    /// The API.
    pub client: Client,
    /// Driver name.
    pub driver: String,
    /// Our pool.
    pub pool: String,
    /// Node name.
    pub node_name: String,
    /// Metrics.
    pub metrics: Metrics,
    /// Events.
    pub events: Events,
    /// What `/healthz` names.
    pub notes: Notes,
    /// Ledger and hardware.
    pub overview: watch::Receiver<Arc<Overview>>,
    /// Where the UIDs of vanished claims go.
    pub vanished: watch::Sender<Arc<BTreeSet<String>>>,
    /// Told after a change of the ledger.
    pub changed: Arc<Notify>,
    /// Look this often.
    pub interval: Duration,
    /// Keep hardware of vanished claims so long.
    pub grace: Duration,
}

impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Collector").field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// What the API says of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// As it was prepared, and whether the controller keeps it for its next pod.
    Allocated {
        /// See [`claim::hold`].
        kept: bool,
    },
    /// Gone, another claim, or allocated otherwise.
    Vanished,
    /// It could not be asked.
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

    /// Finishes what a start found half given back, and left for its MPS daemon to end. `told` is what was said of claims
    /// last.
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

    /// `gone` are claims that have vanished besides.
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
            if parked::review(&self.node, &self.client, &self.driver, record, Timestamp::now()).await {
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
        // Those of a newer release are for it to give back.
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

    /// The controller may have written its entry after the claim was prepared, or taken it back.
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

    /// Notes since when a claim is gone while it has these results prepared, and says so.
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

    /// Whether a claim has these results prepared now: it may have been given back, and then deleted or given others,
    /// since the ledger was read and while the API was asked. In doubt the next look tells.
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

    /// Asks the API's cache, and the store itself before anything is believed to be gone.
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

    /// Whether no pod of this node uses the claim and no process its hardware. In doubt it is used.
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

/// Names of the claims that a pod uses, written in its spec or made for it, also for extended resources.
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

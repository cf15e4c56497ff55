//! Follows the node's `NodeLimits` object and answers in its status.
//!
//! The object is authoritative: its limits are applied again whenever it or the ledger changes, and at every
//! start. Lowered memory is acknowledged when every limiter has had time to read the new limit. The answer
//! names the shares that still use more, so that memory in use is not given to others.

use crate::claim::ClaimRef;
use crate::events::Events;
use crate::prepare::{Limited, Node, Overview};
use crate::reasons;
use aliquot_api::v1alpha1::{NodeLimits, NodeLimitsSpec, NodeLimitsStatus, resource};
use futures::StreamExt;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::json;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

const API_TIMEOUT: Duration = Duration::from_secs(10);
/// The time after which lowered limits are in effect: limiters read their quota twice a second, and a driver
/// frees the memory of dead processes.
const SETTLE: Duration = Duration::from_secs(2);
/// The interval after an error, and while a share uses more than its limit.
const AGAIN: Duration = Duration::from_secs(2);
/// The interval otherwise.
const COMPARE: Duration = Duration::from_secs(60);

/// The task that follows the node's limits.
pub struct Follower {
    /// The node.
    pub node: Arc<Node>,
    /// The API client.
    pub client: Client,
    /// The name of the node.
    pub node_name: String,
    /// The event recorder.
    pub events: Events,
    /// The overview, which changes with the ledger.
    pub overview: watch::Receiver<Arc<Overview>>,
    /// Notified after every change of the ledger.
    pub changed: Arc<Notify>,
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("node_name", &self.node_name).finish_non_exhaustive()
    }
}

/// The object as it was last seen.
#[derive(Debug, Clone, Default)]
struct Said {
    generation: i64,
    spec: NodeLimitsSpec,
    status: NodeLimitsStatus,
}

/// The object's state in the API.
#[derive(Debug, Clone, Default)]
enum Seen {
    /// The state is not known yet.
    #[default]
    Nothing,
    /// There is no object: shares have the limits that they were allocated.
    Absent,
    /// The object exists.
    Object(Said),
}

/// The state that is remembered between two looks.
struct Memory {
    /// The time at which every limiter is known to have read lowered limits, and the driver to have freed
    /// memory.
    settled: Instant,
    /// True if a share used more than its limit.
    beyond: bool,
    /// The refusals of the last look, which were reported.
    told: HashSet<(String, String)>,
}

/// Reads the object. An object that cannot be read counts as absent.
fn read(object: &DynamicObject) -> Option<Said> {
    let spec = object.data.get("spec").cloned().unwrap_or_default();
    let spec =
        serde_json::from_value(spec).inspect_err(|error| tracing::error!(%error, "cannot read NodeLimits"));
    let status = object.data.get("status").cloned().and_then(|status| serde_json::from_value(status).ok());
    Some(Said {
        generation: object.metadata.generation.unwrap_or_default(),
        spec: spec.ok()?,
        status: status.unwrap_or_default(),
    })
}

impl Follower {
    /// Runs until cancelled.
    pub async fn run(mut self, cancel: CancellationToken) {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource::<NodeLimits>());
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.node_name));
        let mut events = watcher(api.clone(), config).default_backoff().boxed();
        let mut seen = Seen::Nothing;
        let mut listed = None;
        // An earlier process may have lowered a limit just before it died.
        let mut memory = Memory { settled: Instant::now() + SETTLE, beyond: false, told: HashSet::new() };
        loop {
            self.overview.mark_unchanged();
            let wait = self.step(&api, &mut seen, &mut memory).await;
            tokio::select! {
                () = cancel.cancelled() => return,
                changed = self.overview.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
                event = events.next() => match event {
                    None => return,
                    Some(Ok(event)) => take(event, &mut seen, &mut listed),
                    // The watcher's pauses grow; most likely the kind is not defined in this cluster.
                    Some(Err(error)) => tracing::debug!(%error, "watching NodeLimits"),
                },
            }
        }
    }

    /// Makes one look and acts on it. Returns the longest time until the next look.
    async fn step(&self, api: &Api<DynamicObject>, seen: &mut Seen, memory: &mut Memory) -> Duration {
        let wanted = match &*seen {
            Seen::Nothing => return COMPARE,
            Seen::Absent => Vec::new(),
            Seen::Object(said) => said.spec.shares.clone(),
        };
        let node = Arc::clone(&self.node);
        let limited = match tokio::task::spawn_blocking(move || node.limit(&wanted)).await {
            Ok(Ok(limited)) => limited,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot bring limits of shares into force, trying again");
                return AGAIN;
            }
            Err(error) => {
                tracing::error!(%error, "limiting shares ended abnormally");
                return AGAIN;
            }
        };
        if limited.changed {
            self.changed.notify_one();
        }
        let beyond = !limited.beyond.is_empty();
        if limited.lowered || (memory.beyond && !beyond) {
            memory.settled = Instant::now() + SETTLE;
        }
        memory.beyond = beyond;
        let Seen::Object(said) = seen else { return COMPARE };
        self.say_refused(said, &limited, &mut memory.told);
        let left = memory.settled.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return left;
        }
        let pending = beyond || !limited.refused.is_empty();
        let status = NodeLimitsStatus {
            observed_generation: said.generation,
            beyond: limited.beyond,
            refused: limited.refused,
        };
        if status != said.status {
            let patch = Patch::Merge(json!({"status": status}));
            let params = PatchParams::default();
            match timeout(API_TIMEOUT, api.patch_status(&self.node_name, &params, &patch)).await {
                Ok(Ok(_)) => said.status = status,
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot answer in NodeLimits, trying again");
                    return AGAIN;
                }
                Err(_) => return AGAIN,
            }
        }
        if pending { AGAIN } else { COMPARE }
    }

    fn say_refused(&self, said: &Said, limited: &Limited, told: &mut HashSet<(String, String)>) {
        let mut before = std::mem::take(told);
        for refused in &limited.refused {
            let Some(limit) = said.spec.shares.iter().find(|limit| limit.share == refused.share) else {
                continue;
            };
            let refusal = (refused.share.uid.clone(), refused.reason.clone());
            if !before.remove(&refusal) && !told.contains(&refusal) {
                let claim = ClaimRef {
                    namespace: limit.namespace.clone(),
                    name: limit.name.clone(),
                    uid: refused.share.uid.clone(),
                };
                let note = format!(
                    "the share on {} keeps its limit: {} bytes and {} percent do not fit on the node: {}",
                    limit.device, limit.memory_bytes, limit.cores_percent, refused.reason
                );
                self.events.claim_warning(&claim, reasons::LIMIT_REFUSED, note);
            }
            told.insert(refusal);
        }
    }
}

fn take(event: watcher::Event<DynamicObject>, seen: &mut Seen, listed: &mut Option<Said>) {
    match event {
        watcher::Event::Init => *listed = None,
        watcher::Event::InitApply(object) => *listed = read(&object),
        watcher::Event::InitDone => *seen = listed.take().map_or(Seen::Absent, Seen::Object),
        watcher::Event::Apply(object) => {
            if let Some(said) = read(&object) {
                *seen = Seen::Object(said);
            }
        }
        watcher::Event::Delete(_) => *seen = Seen::Absent,
    }
}

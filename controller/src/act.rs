//! The one writer. Everything that we change in the API is changed here: with the version that was
//! seen, within a time limit, and only while the lease is ours.

mod budgets;
mod claims;
mod elastic;
mod holds;
mod moves;
mod pods;
mod room;
mod together;

pub use moves::MovesIn;
pub use room::{Eviction, Fate, Victim};

pub use budgets::Kept;

use crate::brain::{GivesWay, Report};
use crate::budget::window::time;
use crate::compact::Allowance;
use crate::decide::{Plan, Reservation};
use crate::fence::Fence;
use crate::govern::{GpuQuota, GpuQuotaStatus};
use crate::hold::Hold;
use crate::index::{CompanionOf, ObjectKey, Uid};
use crate::lease::{Leadership, NotLeader};
use crate::metrics::Metrics;
use aliquot_model::limits::NodeLimitsSpec;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference};
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// Field manager of our writes.
pub const FIELD_MANAGER: &str = "aliquot-controller";

/// Something to write.
#[derive(Debug, Clone)]
pub enum Job {
    /// A decision: every claim, then the reservations, then the gate.
    Allocate {
        /// The decision.
        plan: Box<Plan>,
        /// Its drafts with time and share ids, in their order.
        allocations: Vec<AllocationResult>,
        /// The claims as they were seen, in the same order.
        claims: Vec<ResourceClaim>,
        /// The pod's gates, if ours is among them.
        gates: Option<Gates>,
        /// Hold claims that give their devices back before.
        gives: Vec<GivesWay>,
    },
    /// Make a hold claim.
    MakeHold {
        /// The claim.
        claim: Box<ResourceClaim>,
        /// Identity of the claim whose devices it is to keep.
        source: Uid,
    },
    /// Write down what a running pod's claim will leave to the next.
    MakeWill {
        /// The object.
        will: Box<ConfigMap>,
        /// Identity of the claim.
        source: Uid,
    },
    /// Destroy it.
    DropWill {
        /// Its namespace and name.
        will: (Arc<str>, String),
        /// Identity of the claim.
        source: Uid,
    },
    /// Delete a hold claim.
    DropHold {
        /// The claim.
        claim: ObjectKey,
        /// Its identity.
        uid: Uid,
    },
    /// Devices for a claim without a pod.
    Bind {
        /// The decision, for the claim in place of a pod.
        plan: Box<Plan>,
        /// Its draft with time and share ids.
        allocations: Vec<AllocationResult>,
        /// The claim as it was seen.
        claims: Vec<ResourceClaim>,
        /// Until when it is kept.
        until: i64,
    },
    /// Nothing to allocate (any more): reservations, then the gate.
    Lift {
        /// The pod.
        pod: ObjectKey,
        /// Its identity.
        uid: Uid,
        /// Claims in which the pod, or its group, is missing.
        reserve: Vec<Reservation>,
        /// The pod's gates.
        gates: Option<Gates>,
    },
    /// Note on a pod where room is made for it, then evict those who are in the way.
    MakeRoom {
        /// The pod.
        pod: ObjectKey,
        /// Its identity.
        uid: Uid,
        /// The node; `None` if room is made nowhere any more.
        node: Option<Arc<str>>,
        /// Pods to evict.
        victims: Vec<Victim>,
    },
    /// Take an allocation back.
    Deallocate {
        /// The claim.
        claim: ObjectKey,
        /// Its identity.
        uid: Uid,
        /// Name of the allocation: one that came after it stays.
        mark: Arc<str>,
        /// Which consumers may lose it.
        consumers: Consumers,
    },
    /// Have a pod go elsewhere, so that a GPU becomes free.
    Move {
        /// The pod.
        pod: ObjectKey,
        /// Its identity.
        uid: Uid,
        /// What is said before it is evicted.
        why: Report,
        /// Where it is written down before, and how many an hour allows.
        within: MovesIn,
    },
    /// Write down how many moves an hour allows.
    AllowMoves(MovesIn),
    /// Change our entry among a claim's consumers.
    Hold {
        /// The claim.
        claim: ObjectKey,
        /// Its identity.
        uid: Uid,
        /// The entry; none takes it away.
        hold: Option<Hold>,
    },
    /// Answer a hand-over.
    Acknowledge {
        /// The node.
        node: Arc<str>,
        /// The pool generation that is answered.
        generation: i64,
    },
    /// Make a claim that holds what a share grew by.
    MakeCompanion {
        /// Whose.
        of: CompanionOf,
        /// The claim.
        claim: Box<ResourceClaim>,
    },
    /// Delete one that holds nothing.
    DeleteCompanion {
        /// Whose.
        of: CompanionOf,
        /// The claim.
        companion: ObjectKey,
        /// Its identity.
        uid: Uid,
    },
    /// Give one its devices.
    Grow {
        /// Whose.
        of: CompanionOf,
        /// The claim.
        companion: ObjectKey,
        /// Its identity.
        uid: Uid,
        /// Its devices.
        allocation: Box<AllocationResult>,
        /// Who uses them.
        consumers: Vec<ResourceClaimConsumerReference>,
    },
    /// Have a companion be reserved for those who use the share.
    Share {
        /// Whose.
        of: CompanionOf,
        /// The claim.
        companion: ObjectKey,
        /// Its identity.
        uid: Uid,
        /// Who uses the share.
        consumers: Vec<ResourceClaimConsumerReference>,
    },
    /// Say to a node what its shares may use.
    Limits {
        /// The node.
        node: Arc<str>,
        /// The claim whose shares it is about.
        about: Uid,
        /// What its owner is told.
        note: Option<String>,
        /// `resourceVersion` of the object that this replaces; `None` if there is none.
        version: Option<String>,
        /// What is said.
        spec: NodeLimitsSpec,
    },
    /// Note on a node which place is held for whom, then evict the pod that goes back to it.
    GoBack {
        /// The pod.
        pod: ObjectKey,
        /// Its identity.
        uid: Uid,
        /// The node.
        node: Arc<str>,
        /// The note.
        place: String,
        /// What is said before it is evicted.
        why: Report,
    },
    /// No place is held on the node any more.
    PlaceFree {
        /// The node.
        node: Arc<str>,
    },
    /// What the claims under a quota hold.
    QuotaStatus {
        /// The quota.
        quota: ObjectKey,
        /// Its status.
        status: GpuQuotaStatus,
    },
    /// Which classes can select our devices.
    Classes {
        /// Their names.
        names: Vec<String>,
    },
}

/// The gates of a pod as they were seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gates {
    /// `resourceVersion` of the pod.
    pub version: String,
    /// Names.
    pub names: Vec<String>,
}

/// Which consumers of a claim may lose it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Consumers {
    /// None: it is taken back only if nobody uses it.
    Nobody,
    /// We ourselves, who keep it without a pod.
    Holds,
    /// A pod alone, under whichever of these identities: its own, or its PodGroup's.
    Only(Vec<Uid>),
    /// Whoever is there: the devices are somebody else's as well.
    Anybody,
}

/// What became of a job.
#[derive(Debug)]
pub struct Outcome {
    /// The job.
    pub job: Job,
    /// Claims as the API returned them.
    pub claims: Vec<ResourceClaim>,
    /// Claims that are gone.
    pub gone: Vec<(ObjectKey, Uid)>,
    /// The pod as the API returned it.
    pub pod: Option<Pod>,
    /// What became of evictions.
    pub evictions: Vec<Eviction>,
    /// What nodes are told, as the API returned it.
    pub limits: Option<Box<DynamicObject>>,
    /// Moves that count, as they are written down now.
    pub moves: Option<Allowance>,
    /// The first thing that went wrong.
    pub error: Option<WriteError>,
}

impl Outcome {
    /// Nothing done yet.
    pub const fn of(job: Job) -> Self {
        Self {
            job,
            claims: Vec::new(),
            gone: Vec::new(),
            pod: None,
            evictions: Vec::new(),
            limits: None,
            moves: None,
            error: None,
        }
    }
}

/// Why something was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// We do not lead.
    #[error(transparent)]
    NotLeader(#[from] NotLeader),
    /// It does not exist (any more), or is another of the same name.
    #[error("{0} is gone")]
    Gone(ObjectKey),
    /// Somebody else allocated the claim.
    #[error("claim {0} was allocated by somebody else in the meantime")]
    Taken(ObjectKey),
    /// Things are not as they were when this was decided.
    #[error("{0} changed in the meantime: {1}")]
    Changed(ObjectKey, &'static str),
    /// The API server says no, and will again.
    #[error("the API server refuses to change {what}: {message}")]
    Refused {
        /// What.
        what: String,
        /// Why.
        message: String,
    },
    /// The API server does not let us see what this depends on.
    #[error("the API server does not let the controller read {what}: {message}")]
    Unread {
        /// What.
        what: String,
        /// Why.
        message: String,
    },
    /// As many pods were moved as an hour allows.
    #[error("{per_hour} pods were moved within the hour, which is the most; more may be from {} on", time(*more_at))]
    Enough {
        /// How many an hour allows.
        per_hour: usize,
        /// When more may be moved, in seconds of Unix time.
        more_at: i64,
    },
    /// The API server cannot be reached, or conflicts do not end.
    #[error("giving up on {what} after {attempts} attempts: {last}")]
    Exhausted {
        /// What.
        what: String,
        /// How often.
        attempts: u32,
        /// The last error.
        last: String,
    },
}

/// Writes.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    leadership: Leadership,
    timeout: Duration,
    fence: Option<Fence>,
    metrics: Arc<Metrics>,
    /// Who says what is said.
    instance: Arc<str>,
}

/// What to do about an error.
enum Verdict {
    /// Read what is there and try again.
    Again(String),
    NotFound,
    Never(String),
}

fn judge(error: &kube::Error) -> Verdict {
    match error {
        kube::Error::Api(status) => match status.code {
            404 => Verdict::NotFound,
            // Waiting does not help against a budget, not as long as we wait.
            429 if room::is_budget(status) => Verdict::Never(status.message.clone()),
            // Conflicts, time-outs and overload pass.
            409 | 408 | 429 | 500..=599 => Verdict::Again(status.message.clone()),
            _ => Verdict::Never(status.message.clone()),
        },
        other => Verdict::Again(other.to_string()),
    }
}

impl Writer {
    /// Attempts before the decision is made anew.
    const ATTEMPTS: u32 = 8;

    /// A writer that is fenced by `leadership`; no request takes longer than `timeout`. `fence` is what
    /// the admission policies read, where there are any; `instance` is who events are from.
    pub const fn new(
        client: Client,
        leadership: Leadership,
        timeout: Duration,
        fence: Option<Fence>,
        metrics: Arc<Metrics>,
        instance: Arc<str>,
    ) -> Self {
        Self { client, leadership, timeout, fence, metrics, instance }
    }

    /// Does a job to the end.
    pub async fn run(&self, job: Job) -> Outcome {
        let mut outcome = Outcome::of(job.clone());
        let result = match job {
            Job::Allocate { plan, allocations, claims, gates, gives } => {
                match self.give_way(&gives, &mut outcome).await {
                    Ok(()) => self.allocate(&plan, &allocations, claims, gates, &mut outcome).await,
                    Err(error) => Err(error),
                }
            }
            Job::MakeHold { claim, source: _ } => self.make_hold(&claim, &mut outcome).await,
            Job::MakeWill { will, source: _ } => self.make_will(&will).await,
            Job::DropWill { will: (namespace, name), source: _ } => self.drop_will(&namespace, &name).await,
            Job::DropHold { claim, uid } => self.drop_hold(&claim, &uid).await,
            Job::Bind { plan, allocations, claims, until } => {
                self.bind(&plan, &allocations, claims, until, &mut outcome).await
            }
            Job::Move { pod, uid, why, within } => {
                self.fill_gap(&pod, &uid, &why, &within, &mut outcome).await
            }
            Job::AllowMoves(within) => self.allow_moves(&within, &mut outcome).await,
            Job::Hold { claim, uid, hold } => self.hold(&claim, &uid, hold, &mut outcome).await,
            Job::Lift { pod, uid, reserve, gates } => {
                self.settle(&pod, &uid, &reserve, gates, &mut outcome).await
            }
            Job::MakeRoom { pod, uid, node, victims } => {
                self.make_room(&pod, &uid, node.as_deref(), victims, &mut outcome).await
            }
            Job::Deallocate { claim, uid, mark, consumers } => {
                self.deallocate(&claim, &uid, &mark, &consumers, &mut outcome).await
            }
            Job::MakeCompanion { claim, .. } => self.make_companion(*claim, &mut outcome).await,
            Job::DeleteCompanion { companion, uid, .. } => {
                self.delete_companion(&companion, &uid, &mut outcome).await
            }
            Job::Grow { companion, uid, allocation, consumers, .. } => {
                self.grow(&companion, &uid, &allocation, &consumers, &mut outcome).await
            }
            Job::Share { companion, uid, consumers, .. } => {
                self.share(&companion, &uid, &consumers, &mut outcome).await
            }
            Job::Limits { node, version, spec, .. } => {
                self.limits(&node, version.as_deref(), &spec, &mut outcome).await
            }
            Job::Acknowledge { node, generation } => self.acknowledge(&node, generation).await,
            Job::GoBack { pod, uid, node, place, why } => {
                self.go_back(&pod, &uid, (&node, &place), &why, &mut outcome).await
            }
            Job::PlaceFree { node } => self.note_place(&node, None).await,
            Job::QuotaStatus { quota, status } => self.quota_status(&quota, &status).await,
            Job::Classes { names } => self.classes(&names).await,
        };
        outcome.error = result.err();
        outcome
    }

    /// A request, if the lease is ours, within the time limit. Nothing is sent otherwise.
    async fn send<T>(
        &self,
        verb: &'static str,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<Result<T, Verdict>, NotLeader> {
        self.leadership.check()?;
        let answer = match tokio::time::timeout(self.timeout, request).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(judge(&error)),
            Err(_) => Err(Verdict::Again("the request took too long".to_owned())),
        };
        let outcome = match &answer {
            Ok(_) => "ok",
            Err(Verdict::Again(_)) => "retry",
            Err(Verdict::NotFound) => "gone",
            Err(Verdict::Never(_)) => "refused",
        };
        self.metrics.write(verb, outcome);
        Ok(answer)
    }

    /// Waits before the next attempt, longer each time.
    async fn pause(attempt: u32) {
        let doubled = 1u32.checked_shl(attempt.min(6)).unwrap_or(64);
        tokio::time::sleep(Duration::from_millis(10).saturating_mul(doubled)).await;
    }

    async fn acknowledge(&self, node: &str, generation: i64) -> Result<(), WriteError> {
        let api: Api<Node> = Api::all(self.client.clone());
        let patch =
            json!({"metadata": {"annotations": {crate::index::ACKNOWLEDGED: generation.to_string()}}});
        self.patch_until_done(&format!("node {node}"), || {
            let (api, patch) = (api.clone(), patch.clone());
            async move { api.patch(node, &params(), &Patch::Merge(&patch)).await.map(drop) }
        })
        .await
    }

    async fn quota_status(&self, quota: &ObjectKey, status: &GpuQuotaStatus) -> Result<(), WriteError> {
        let api: Api<GpuQuota> = Api::namespaced(self.client.clone(), &quota.namespace);
        let patch = json!({"status": status});
        self.patch_until_done(&format!("GpuQuota {quota}"), || {
            let (api, patch) = (api.clone(), patch.clone());
            async move { api.patch_status(&quota.name, &params(), &Patch::Merge(&patch)).await.map(drop) }
        })
        .await
    }

    /// Tells the policies which classes can select our devices.
    async fn classes(&self, names: &[String]) -> Result<(), WriteError> {
        let Some(fence) = &self.fence else { return Ok(()) };
        self.patch_until_done("our service account", || fence.classes(names)).await
    }

    async fn patch_until_done<F, R>(&self, what: &str, mut request: F) -> Result<(), WriteError>
    where
        F: FnMut() -> R,
        R: Future<Output = Result<(), kube::Error>>,
    {
        let mut last = String::new();
        for attempt in 0..Self::ATTEMPTS {
            match self.send("patch", request()).await? {
                // An object that is gone needs no patch.
                Ok(()) | Err(Verdict::NotFound) => return Ok(()),
                Err(Verdict::Never(message)) => {
                    return Err(WriteError::Refused { what: what.to_owned(), message });
                }
                Err(Verdict::Again(message)) => last = message,
            }
            Self::pause(attempt).await;
        }
        Err(WriteError::Exhausted { what: what.to_owned(), attempts: Self::ATTEMPTS, last })
    }
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// How objects of ours are made.
pub(crate) fn creation() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

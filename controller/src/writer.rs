//! The one writer: every change that the controller makes in the API is made here. A request is sent with the
//! version that was seen, within a time limit, and only while the lease is held. The number of concurrent
//! requests is limited, in total and for each namespace. A job that waits between two requests occupies no
//! turn.

mod answer;
mod budgets;
mod claims;
mod disruption_check;
mod elastic;
mod eviction;
mod holds;
mod job;
mod moves;
pub(crate) mod object_backoff;
mod pods;
mod retry_wait;
mod scheduler_activity;
mod uncertain;

pub use eviction::{Eviction, Fate, Victim};
pub use job::{ClaimWrite, Consumers, Gates, GivesWay, Job, Outcome};
pub use moves::MovesIn;
pub use scheduler_activity::{Look, Pending};

pub use budgets::BudgetOutcome;

use crate::events::Reporter;
use crate::fair_permits::Gate;
use crate::fence::Fence;
use crate::field_manager::params;
use crate::lease::{Leadership, NotLeader};
use crate::metrics::Metrics;
use aliquot_allocator::api_time::time;
use aliquot_allocator::snapshot::ObjectKey;
use aliquot_api::v1alpha1::{GpuQuota, GpuQuotaStatus};
use aliquot_model::names::SCHEDULER_IDLE;
use answer::{Doubt, Verdict, judge};
use k8s_openapi::api::core::v1::Node;
use kube::api::Patch;
use kube::{Api, Client};
use object_backoff::Slow;
use parking_lot::Mutex;
use serde_json::json;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The reason why something was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// This controller does not lead.
    #[error(transparent)]
    NotLeader(#[from] NotLeader),
    /// The object does not exist any more, or another object has its name.
    #[error("{0} is gone")]
    Gone(ObjectKey),
    /// Another allocator allocated the claim.
    #[error("claim {0} was allocated by somebody else in the meantime")]
    Taken(ObjectKey),
    /// The object changed since the decision.
    #[error("{0} changed in the meantime: {1}")]
    Changed(ObjectKey, &'static str),
    /// The API server refuses the change, and will refuse it again.
    #[error("the API server refuses to change {what}: {message}")]
    Refused {
        /// The object.
        what: String,
        /// The answer of the API server.
        message: String,
    },
    /// The API server refuses to show what the change depends on.
    #[error("the API server does not let the controller read {what}: {message}")]
    Unread {
        /// The object or list.
        what: String,
        /// The answer of the API server.
        message: String,
    },
    /// As many pods were moved as an hour allows.
    #[error("{per_hour} pods were moved within the hour, which is the most; more may be from {} on", time(*more_at))]
    Enough {
        /// The most moves in an hour.
        per_hour: usize,
        /// When more pods may be moved, in seconds of Unix time.
        more_at: i64,
    },
    /// The API server cannot be reached, or conflicts do not end.
    #[error("giving up on {what} after {attempts} attempts: {last}")]
    Exhausted {
        /// The object.
        what: String,
        /// The number of attempts.
        attempts: u32,
        /// The last error.
        last: String,
    },
}

impl WriteError {
    /// Returns true if the error is about the object or the API server, so that it may well repeat; false if
    /// another writer was faster, or this controller does not lead.
    pub const fn is_of_the_object(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Unread { .. } | Self::Exhausted { .. })
    }
}

/// The writer of the API. Clones share the limits of concurrent requests.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    leadership: Leadership,
    timeout: Duration,
    fence: Option<Fence>,
    metrics: Arc<Metrics>,
    /// The reporting instance of events.
    instance: Arc<str>,
    gate: Gate,
    /// The lane whose turns requests take: a namespace, or empty for cluster-scoped objects.
    lane: Arc<str>,
    slow: Arc<Mutex<Slow>>,
    reporter: Option<Reporter>,
    /// Cancelled when the leadership ends: no wait goes on after that.
    ending: CancellationToken,
}

/// The most requests that are under way at the same time.
const AT_A_TIME: usize = 64;
/// The part of them that one namespace may use.
const AT_A_TIME_OF_ONE: usize = AT_A_TIME / 8;

impl Writer {
    /// The number of attempts after which the decision is made anew.
    const ATTEMPTS: u32 = 8;

    /// Returns a writer that is fenced by `leadership` and whose requests take no longer than `timeout`.
    /// `fence` is the service account that the admission policies read, if there are any; `instance` is the
    /// reporting instance of events.
    pub fn new(
        client: Client,
        leadership: Leadership,
        timeout: Duration,
        fence: Option<Fence>,
        metrics: Arc<Metrics>,
        instance: Arc<str>,
    ) -> Self {
        Self {
            client,
            leadership,
            timeout,
            fence,
            metrics,
            instance,
            gate: Gate::new(AT_A_TIME, AT_A_TIME_OF_ONE),
            lane: Arc::default(),
            slow: Arc::default(),
            reporter: None,
            ending: CancellationToken::new(),
        }
    }

    /// Returns the writer with a reporter, which tells users what an allocation waits for.
    #[must_use]
    pub fn telling(self, reporter: Reporter) -> Self {
        Self { reporter: Some(reporter), ..self }
    }

    /// Returns a writer for one leadership: it gives up all waits when `ending` is cancelled.
    #[must_use]
    pub fn until(&self, ending: CancellationToken) -> Self {
        Self { ending, ..self.clone() }
    }

    /// Carries out a job. If the jobs of the same object fail again and again, the outcome is returned later
    /// each time. Jobs that keep devices meanwhile are not delayed; their objects wait before the next
    /// decision.
    pub async fn run(&self, job: Job) -> Outcome {
        let slowed = job.slowed().cloned();
        let outcome = Self { lane: job.lane(), ..self.clone() }.carry_out_job(job).await;
        if let Some(uid) = slowed {
            self.slow_down(&uid, outcome.error.as_ref()).await;
        }
        outcome
    }

    async fn carry_out_job(&self, job: Job) -> Outcome {
        let mut outcome = Outcome::of(job.clone());
        let result = match job {
            Job::Allocate { plan, writes, gates, gives } => match self.give_way(&gives, &mut outcome).await {
                Ok(()) => self.allocate(&plan, writes, gates, &mut outcome).await,
                Err(error) => Err(error),
            },
            Job::MakeHold { claim, source: _ } => self.make_hold(&claim, &mut outcome).await,
            Job::MakeRetentionRecord { record, source: _ } => self.make_retention_record(&record).await,
            Job::DropRetentionRecord { record: (namespace, name), source: _ } => {
                self.drop_retention_record(&namespace, &name).await
            }
            Job::DropHold { claim, uid } => self.drop_hold(&claim, &uid).await,
            Job::Bind { writes, .. } => self.write_claims(writes, &mut outcome).await,
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
            Job::Acknowledge { node, generation } => {
                self.note_generation(&node, aliquot_allocator::snapshot::ACKNOWLEDGED, generation).await
            }
            Job::SchedulerIdle { node, generation } => {
                self.note_generation(&node, SCHEDULER_IDLE, generation).await
            }
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

    /// Sends a request in its turn, within the time limit. Sends nothing and returns an error if the lease is
    /// not held by then.
    async fn send<T>(
        &self,
        verb: &'static str,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<Result<T, Verdict>, NotLeader> {
        let turn = self.gate.enter(&self.lane).await;
        self.leadership.check()?;
        let answer = match tokio::time::timeout(self.timeout, request).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(judge(&error)),
            Err(_) => Err(Verdict::Unsure(Doubt::Late, "the request took too long".to_owned())),
        };
        drop(turn);
        let outcome = match &answer {
            Ok(_) => "ok",
            Err(Verdict::Again(_)) => "retry",
            Err(Verdict::Unsure(..)) => "unsure",
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

    /// Writes a generation of a node's pool into an annotation of the node.
    async fn note_generation(&self, node: &str, key: &str, generation: i64) -> Result<(), WriteError> {
        let api: Api<Node> = Api::all(self.client.clone());
        let patch = json!({"metadata": {"annotations": {key: generation.to_string()}}});
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

    /// Tells the policies which device classes can select this driver's devices.
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
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => last = message,
            }
            Self::pause(attempt).await;
        }
        Err(WriteError::Exhausted { what: what.to_owned(), attempts: Self::ATTEMPTS, last })
    }
}

//! The kinds of writes, as jobs, and their outcomes.

use super::eviction::{Eviction, Victim};
use super::{MovesIn, WriteError};
use crate::report::Report;
use aliquot_allocator::compaction::Allowance;
use aliquot_allocator::hold::Hold;
use aliquot_allocator::schedule::{Plan, Reservation};
use aliquot_allocator::snapshot::{CompanionOf, ObjectKey, Uid};
use aliquot_api::v1alpha1::GpuQuotaStatus;
use aliquot_api::v1alpha1::NodeLimitsSpec;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference};
use kube::api::DynamicObject;
use std::sync::Arc;

/// An allocation to be written to a claim, with a consumer.
#[derive(Debug, Clone)]
pub struct ClaimWrite {
    /// The claim.
    pub claim: ObjectKey,
    /// UID of the claim.
    pub uid: Uid,
    /// The allocation, with time and share ids.
    pub allocation: AllocationResult,
    /// The consumer that is written with it.
    pub user: ResourceClaimConsumerReference,
    /// The claim as it was seen; `None` if it has to be read first.
    pub seen: Option<ResourceClaim>,
}

/// A hold claim that gives way to a claim in the same job.
#[derive(Debug, Clone)]
pub struct GivesWay {
    /// The hold claim.
    pub claim: ObjectKey,
    /// UID of the hold claim.
    pub uid: Uid,
    /// Fingerprint of its allocation; `None` if it has none.
    pub mark: Option<Arc<str>>,
}

/// A write to be done.
#[derive(Debug, Clone)]
pub enum Job {
    /// Carries out a decision: writes every claim, then the reservations, then removes the scheduling gate.
    Allocate {
        /// The decision.
        plan: Box<Plan>,
        /// A write for each of the plan's drafts.
        writes: Vec<ClaimWrite>,
        /// The pod's gates, if this driver's gate is among them.
        gates: Option<Gates>,
        /// Hold claims that are deallocated first.
        gives: Vec<GivesWay>,
    },
    /// Creates a hold claim.
    MakeHold {
        /// The claim.
        claim: Box<ResourceClaim>,
        /// UID of the claim whose devices it will keep.
        source: Uid,
    },
    /// Creates a retention record: which devices the claim of a running pod leaves to the next pod.
    MakeRetentionRecord {
        /// The retention record.
        record: Box<ConfigMap>,
        /// UID of the claim.
        source: Uid,
    },
    /// Deletes a retention record.
    DropRetentionRecord {
        /// Namespace and name of the retention record.
        record: (Arc<str>, String),
        /// UID of the claim.
        source: Uid,
    },
    /// Deletes a hold claim.
    DropHold {
        /// The claim.
        claim: ObjectKey,
        /// UID of the claim.
        uid: Uid,
    },
    /// Allocates a claim that has no pod.
    Bind {
        /// The decision, with the claim in place of a pod.
        plan: Box<Plan>,
        /// The write of the plan's draft.
        writes: Vec<ClaimWrite>,
        /// The time until which the claim is kept, in seconds since the epoch.
        until: i64,
    },
    /// Nothing is left to allocate: writes the reservations, then removes the gate.
    Lift {
        /// The pod.
        pod: ObjectKey,
        /// UID of the pod.
        uid: Uid,
        /// Claims whose consumers lack the pod or its PodGroup.
        reserve: Vec<Reservation>,
        /// The pod's gates.
        gates: Option<Gates>,
    },
    /// Notes on a pod where room is made for it, then evicts the pods in the way.
    MakeRoom {
        /// The pod.
        pod: ObjectKey,
        /// UID of the pod.
        uid: Uid,
        /// The node; `None` if room is no longer made anywhere.
        node: Option<Arc<str>>,
        /// The pods to evict.
        victims: Vec<Victim>,
    },
    /// Takes an allocation back.
    Deallocate {
        /// The claim.
        claim: ObjectKey,
        /// UID of the claim.
        uid: Uid,
        /// Fingerprint of the allocation; a later allocation of the claim stays.
        mark: Arc<str>,
        /// The consumers that may lose the claim.
        consumers: Consumers,
    },
    /// Evicts a pod so that it starts elsewhere and a GPU becomes free.
    Move {
        /// The pod.
        pod: ObjectKey,
        /// UID of the pod.
        uid: Uid,
        /// The event that is recorded before the eviction.
        why: Report,
        /// Where the move is recorded first, and the most moves in an hour.
        within: MovesIn,
    },
    /// Records how many moves an hour allows.
    AllowMoves(MovesIn),
    /// Changes the driver's own entry among the consumers of a claim.
    Hold {
        /// The claim.
        claim: ObjectKey,
        /// UID of the claim.
        uid: Uid,
        /// The new entry; `None` removes it.
        hold: Option<Hold>,
    },
    /// Answers the hand-over of a node.
    Acknowledge {
        /// The node.
        node: Arc<str>,
        /// The pool generation that is answered.
        generation: i64,
    },
    /// Tells a node that is being handed over to this driver that kube-scheduler has nothing under way for
    /// it.
    SchedulerIdle {
        /// The node.
        node: Arc<str>,
        /// The pool generation to which this applies.
        generation: i64,
    },
    /// Creates a companion: a claim that holds what a share grew by.
    MakeCompanion {
        /// The claim and share that it belongs to.
        of: CompanionOf,
        /// The companion.
        claim: Box<ResourceClaim>,
    },
    /// Deletes a companion that holds no devices.
    DeleteCompanion {
        /// The claim and share that it belongs to.
        of: CompanionOf,
        /// The companion.
        companion: ObjectKey,
        /// UID of the companion.
        uid: Uid,
    },
    /// Allocates a companion.
    Grow {
        /// The claim and share that it belongs to.
        of: CompanionOf,
        /// The companion.
        companion: ObjectKey,
        /// UID of the companion.
        uid: Uid,
        /// The devices of the companion.
        allocation: Box<AllocationResult>,
        /// The consumers of the share.
        consumers: Vec<ResourceClaimConsumerReference>,
    },
    /// Reserves a companion for the consumers of the share.
    Share {
        /// The claim and share that it belongs to.
        of: CompanionOf,
        /// The companion.
        companion: ObjectKey,
        /// UID of the companion.
        uid: Uid,
        /// The consumers of the share.
        consumers: Vec<ResourceClaimConsumerReference>,
    },
    /// Tells a node what its shares may use.
    Limits {
        /// The node.
        node: Arc<str>,
        /// UID of the claim whose shares this change is about.
        about: Uid,
        /// The note for the owner of the claim.
        note: Option<String>,
        /// `resourceVersion` of the object that this replaces; `None` if there is none.
        version: Option<String>,
        /// The limits.
        spec: NodeLimitsSpec,
    },
    /// Notes on a node which place is held for whom, then evicts the pod that goes back to it.
    GoBack {
        /// The pod.
        pod: ObjectKey,
        /// UID of the pod.
        uid: Uid,
        /// The node.
        node: Arc<str>,
        /// The note.
        place: String,
        /// The event that is recorded before the eviction.
        why: Report,
    },
    /// Removes the note of a held place from a node.
    PlaceFree {
        /// The node.
        node: Arc<str>,
    },
    /// Writes the status of a quota: what the claims under it hold.
    QuotaStatus {
        /// The quota.
        quota: ObjectKey,
        /// The new status.
        status: GpuQuotaStatus,
    },
    /// Publishes the device classes that can select this driver's devices.
    Classes {
        /// Names of the classes.
        names: Vec<String>,
    },
}

impl Job {
    /// Returns the lane whose turns the job's requests take: a namespace, or empty for cluster-scoped
    /// objects.
    pub(super) fn lane(&self) -> Arc<str> {
        let namespace = |name: Option<&String>| name.map(String::as_str).unwrap_or_default().into();
        match self {
            Self::Allocate { plan, .. } | Self::Bind { plan, .. } => plan.pod.namespace.clone(),
            Self::Lift { pod, .. }
            | Self::MakeRoom { pod, .. }
            | Self::Move { pod, .. }
            | Self::GoBack { pod, .. } => pod.namespace.clone(),
            Self::DropHold { claim, .. } | Self::Deallocate { claim, .. } | Self::Hold { claim, .. } => {
                claim.namespace.clone()
            }
            Self::DeleteCompanion { companion, .. }
            | Self::Grow { companion, .. }
            | Self::Share { companion, .. } => companion.namespace.clone(),
            Self::MakeHold { claim, .. } | Self::MakeCompanion { claim, .. } => {
                namespace(claim.metadata.namespace.as_ref())
            }
            Self::MakeRetentionRecord { record, .. } => namespace(record.metadata.namespace.as_ref()),
            Self::DropRetentionRecord { record, .. } => record.0.clone(),
            Self::AllowMoves(within) => within.namespace.clone(),
            Self::QuotaStatus { quota, .. } => quota.namespace.clone(),
            Self::Acknowledge { .. }
            | Self::SchedulerIdle { .. }
            | Self::Limits { .. }
            | Self::PlaceFree { .. }
            | Self::Classes { .. } => Arc::default(),
        }
    }

    /// Returns the UID of the object that has to wait when jobs of this kind fail again and again. None of
    /// these jobs keeps devices from others while it waits. `None` for jobs that keep devices, which would
    /// have to wait before they are decided, and for evictions, which are decided anew each time.
    pub(super) const fn slowed(&self) -> Option<&Uid> {
        match self {
            Self::DropHold { uid, .. }
            | Self::Deallocate { uid, .. }
            | Self::Hold { uid, .. }
            | Self::Lift { uid, .. }
            | Self::DeleteCompanion { uid, .. }
            | Self::Share { uid, .. } => Some(uid),
            Self::MakeHold { source, .. }
            | Self::MakeRetentionRecord { source, .. }
            | Self::DropRetentionRecord { source, .. } => Some(source),
            Self::MakeCompanion { of, .. } => Some(&of.uid),
            Self::Limits { about, .. } => Some(about),
            _ => None,
        }
    }
}

/// The scheduling gates of a pod as they were seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gates {
    /// `resourceVersion` of the pod.
    pub version: String,
    /// Names of the gates.
    pub names: Vec<String>,
}

/// Consumers from which a claim may be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Consumers {
    /// No consumer: the claim is taken back only if nobody uses it.
    Nobody,
    /// Only the driver's own entries, which keep the claim without a pod.
    Holds,
    /// One pod alone, under any of these UIDs: its own, or that of its PodGroup. The driver's own entries do
    /// not count.
    Only(Vec<Uid>),
    /// Any consumer, because the devices belong to another claim as well.
    Anybody,
}

/// The result of a job.
#[derive(Debug)]
pub struct Outcome {
    /// The job.
    pub job: Job,
    /// Claims as the API server returned them.
    pub claims: Vec<ResourceClaim>,
    /// Keys and UIDs of claims that are gone.
    pub gone: Vec<(ObjectKey, Uid)>,
    /// The pod as the API server returned it.
    pub pod: Option<Pod>,
    /// The results of evictions.
    pub evictions: Vec<Eviction>,
    /// The limits object of a node as the API server returned it.
    pub limits: Option<Box<DynamicObject>>,
    /// The recorded moves that count, as they are now.
    pub moves: Option<Allowance>,
    /// The first error; `None` if the job succeeded.
    pub error: Option<WriteError>,
}

impl Outcome {
    /// Returns the outcome of a job of which nothing is done yet.
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

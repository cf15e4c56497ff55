//! What there is to write, and what came of it.

use super::room::{Eviction, Victim};
use super::{MovesIn, WriteError};
use crate::brain::{GivesWay, Report};
use crate::compact::Allowance;
use crate::decide::{Plan, Reservation};
use crate::govern::GpuQuotaStatus;
use crate::hold::Hold;
use crate::index::{CompanionOf, ObjectKey, Uid};
use aliquot_model::limits::NodeLimitsSpec;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference};
use kube::api::DynamicObject;
use std::sync::Arc;

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
    /// Say that kube-scheduler has nothing under way for a node that is handed over to us.
    SchedulerIdle {
        /// The node.
        node: Arc<str>,
        /// The pool generation of which it is said.
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

impl Job {
    /// Whose turns its requests take: a namespace, or nothing for what is the cluster's.
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
            Self::MakeWill { will, .. } => namespace(will.metadata.namespace.as_ref()),
            Self::DropWill { will, .. } => will.0.clone(),
            Self::AllowMoves(within) => within.namespace.clone(),
            Self::QuotaStatus { quota, .. } => quota.namespace.clone(),
            Self::Acknowledge { .. }
            | Self::SchedulerIdle { .. }
            | Self::Limits { .. }
            | Self::PlaceFree { .. }
            | Self::Classes { .. } => Arc::default(),
        }
    }

    /// The object that waits when jobs of this kind fail again and again. None of them keeps devices from others while
    /// it does; those that would wait before they are decided, and evictions are decided anew each time.
    pub(super) const fn slowed(&self) -> Option<&Uid> {
        match self {
            Self::DropHold { uid, .. }
            | Self::Deallocate { uid, .. }
            | Self::Hold { uid, .. }
            | Self::Lift { uid, .. }
            | Self::DeleteCompanion { uid, .. }
            | Self::Share { uid, .. } => Some(uid),
            Self::MakeHold { source, .. } | Self::MakeWill { source, .. } | Self::DropWill { source, .. } => {
                Some(source)
            }
            Self::MakeCompanion { of, .. } => Some(&of.uid),
            Self::Limits { about, .. } => Some(about),
            _ => None,
        }
    }
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

//! What users are told, and how often.

use super::{Core, Effect};
use crate::index::{Claim, ObjectKey, Pod, Uid};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reasons of events.
pub mod reasons {
    /// A pod's claims got their devices.
    pub const ALLOCATED: &str = "DevicesAllocated";
    /// A larger profile was given than the one that was asked for.
    pub const SUBSTITUTED: &str = "ProfileSubstituted";
    /// A pod is evicted because what it asked for is free, or is not because of its budget.
    pub const GOING_BACK: &str = "GoingBackToAskedProfile";
    /// A pod's devices would exceed a GpuQuota of its namespace.
    pub const QUOTA: &str = "GpuQuotaExceeded";
    /// A pod fits nowhere at the moment.
    pub const DOES_NOT_FIT: &str = "DevicesDoNotFit";
    /// A search ran out of time.
    pub const OUT_OF_TIME: &str = "AllocationOutOfTime";
    /// A claim asks for what can never be.
    pub const CLAIM_REJECTED: &str = "ClaimRejected";
    /// Something has to happen first.
    pub const WAITING: &str = "AllocationWaiting";
    /// Claims of a pod were taken back.
    pub const UNDONE: &str = "AllocationUndone";
    /// Devices of a pod that cannot be bound were taken back.
    pub const STRANDED: &str = "UnboundAllocationReleased";
    /// Pods of lower priority are being evicted for a pod.
    pub const PREEMPTING: &str = "PreemptionStarted";
    /// A pod is evicted for one of higher priority.
    pub const PREEMPTED: &str = "Preempted";
    /// A pod that was told that it is evicted stays after all.
    pub const NOT_EVICTED: &str = "EvictionCalledOff";
    /// A pod waits for devices that are kept for it.
    pub const NOMINATED: &str = "WaitingForNominatedDevices";
    /// Pods could not be evicted for a pod.
    pub const PREEMPTION_REFUSED: &str = "PreemptionRefused";
    /// Devices are kept for a pod that has waited long for room.
    pub const RESERVED: &str = "DevicesReserved";
    /// They are kept no longer, or cannot be.
    pub const RESERVATION_ENDED: &str = "ReservationEnded";
    /// A write failed.
    pub const WRITE_FAILED: &str = "AllocationWriteFailed";
    /// Nobody knows whether an allocation was written.
    pub const WRITE_UNCERTAIN: &str = "AllocationUncertain";
    /// A claim of ours that nobody uses was taken back.
    pub const IDLE: &str = "UnusedAllocationReleased";
    /// A claim keeps its devices without a pod.
    pub const HELD_WITHOUT_POD: &str = "DevicesRetained";
    /// It keeps them no longer.
    pub const HOLD_ENDED: &str = "RetainedDevicesReleased";
    /// The limit of a share is another one.
    pub const LIMIT_CHANGED: &str = "ShareLimitChanged";
    /// A share cannot have the limit that its claim asks for, not now.
    pub const LIMIT_WAITS: &str = "ShareLimitWaiting";
    /// An annotation of ours is not understood.
    pub const ANNOTATION: &str = "AnnotationNotUnderstood";
    /// A pod goes elsewhere, so that a GPU becomes free.
    pub const MOVED: &str = "MovedToFillGaps";
    /// A GPU is being emptied, or was.
    pub const COMPACTION: &str = "GpuCompaction";
    /// Devices were given out twice.
    pub const OVERLAP: &str = "OverlappingAllocation";
    /// Hardware was given out that is held for a claim that is gone.
    pub const HELD: &str = "HardwareStillHeld";
    /// Somebody else allocates what is ours to give.
    pub const FOREIGN: &str = "ForeignAllocation";
    /// A node's hand-over from kube-scheduler waits for pods.
    pub const HAND_OVER_WAITS: &str = "HandOverWaits";
    /// A claim tolerates the taint that keeps kube-scheduler off.
    pub const TOLERATES: &str = "ClaimToleratesControllerTaint";
    /// A budget is used up.
    pub const BUDGET_USED_UP: &str = "BudgetUsedUp";
    /// A budget has something left again.
    pub const BUDGET_BACK: &str = "BudgetAvailable";
    /// A pod gets its devices although the budget is used up.
    pub const BUDGET_EXCEEDED: &str = "BudgetExceeded";
    /// A pod waits for its budget.
    pub const BUDGET_REFUSED: &str = "BudgetRefused";
}

/// The object that an event is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Regarding {
    /// A pod.
    Pod(ObjectKey, Uid),
    /// A claim.
    Claim(ObjectKey, Uid),
    /// A node.
    Node(Arc<str>),
    /// A budget.
    Budget(ObjectKey, Uid),
}

impl Regarding {
    /// The namespace of its events; those of nodes are kept in the namespace `default`.
    pub fn namespace(&self) -> Arc<str> {
        match self {
            Self::Pod(key, _) | Self::Claim(key, _) | Self::Budget(key, _) => key.namespace.clone(),
            Self::Node(_) => "default".into(),
        }
    }
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// About what.
    pub regarding: Regarding,
    /// Whether something is wrong.
    pub warning: bool,
    /// One of [`reasons`].
    pub reason: &'static str,
    /// For people.
    pub note: String,
}

/// What pods and claims were told last.
#[derive(Debug, Default)]
pub(super) struct Told {
    pods: HashMap<ObjectKey, (&'static str, Said)>,
    /// By reason, as one look at a claim can have several.
    claims: HashMap<Uid, HashMap<&'static str, Said>>,
}

/// Words, and when they were said.
#[derive(Debug)]
struct Said(String, Instant);

impl Said {
    /// Whether it is too soon for words with the same reason.
    fn stands(&self, note: &str, now: Instant) -> bool {
        let Self(words, at) = self;
        now.saturating_duration_since(*at) < if words == note { REPEAT } else { REFRESH }
    }
}

/// The same words are said again after this long.
const REPEAT: Duration = Duration::from_secs(300);
/// Other words with the same reason, after this long: on a busy cluster the counts in them change all
/// the time.
const REFRESH: Duration = Duration::from_secs(15);

impl Told {
    pub(super) fn forget_pod(&mut self, pod: &ObjectKey) {
        self.pods.remove(pod);
    }

    fn is_news(&mut self, pod: &ObjectKey, reason: &'static str, note: &str, now: Instant) -> bool {
        if self.pods.get(pod).is_some_and(|(before, said)| *before == reason && said.stands(note, now)) {
            return false;
        }
        self.pods.insert(pod.clone(), (reason, Said(note.to_owned(), now)));
        true
    }

    pub(super) fn forget_claim(&mut self, claim: &str) {
        self.claims.remove(claim);
    }

    /// The same for a claim. What was done is news, unless in the very same words, and so is all that follows.
    fn is_news_of_claim(
        &mut self,
        claim: &Uid,
        (reason, warning): (&'static str, bool),
        note: &str,
        now: Instant,
    ) -> bool {
        let before = self.claims.entry(claim.clone()).or_default();
        if before.get(reason).is_some_and(|said| said.stands(note, now) && (warning || said.0 == note)) {
            return false;
        }
        if !warning {
            before.clear();
        }
        before.insert(reason, Said(note.to_owned(), now));
        true
    }
}

impl Core {
    pub(super) fn tell(&mut self, report: Report) {
        self.effects.push(Effect::Tell(report));
    }

    /// A warning about a pod, unless it has just been given; whether it was news.
    pub(super) fn tell_pod(&mut self, pod: &Pod, reason: &'static str, note: &str, now: Instant) -> bool {
        let news = self.told.is_news(&pod.key, reason, note, now);
        if news {
            tracing::debug!(pod = %pod.key, reason, note, "told");
            self.tell(Report {
                regarding: Regarding::Pod(pod.key.clone(), pod.uid.clone()),
                warning: true,
                reason,
                note: note.to_owned(),
            });
        }
        news
    }

    /// Something about a claim, unless it has just been said.
    pub(super) fn tell_claim(
        &mut self,
        claim: &Claim,
        warning: bool,
        reason: &'static str,
        note: &str,
        now: Instant,
    ) {
        if self.told.is_news_of_claim(&claim.uid, (reason, warning), note, now) {
            self.tell(Report {
                regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
                warning,
                reason,
                note: note.to_owned(),
            });
        }
    }
}

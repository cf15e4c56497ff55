//! Claims that keep devices without a pod: carries out what [`aliquot_allocator::hold`] decides.

use super::retention::{Lost, PendingHold};
use super::{Effect, Reconciler, reasons};
use crate::writer::{Consumers, Job, WriteError};
use aliquot_allocator::hold::{self, ByUs, Ended, Hold, Limits, Policy, Step, Wish};
use aliquot_allocator::queue::{Queue, Rank};
use aliquot_allocator::snapshot::{Claim, ObjectKey, Snapshot, Uid};
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use k8s_openapi::jiff::Timestamp;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause after a failed write.
pub(super) const RETRY: Duration = Duration::from_secs(5);
/// The pause before the next look where the API and the known state of it differ.
const LOOK: Duration = Duration::from_secs(1);

/// The state of claims that keep devices without a pod.
#[derive(Debug)]
pub(super) struct Holds {
    /// Claims to look at.
    changed: HashSet<ObjectKey>,
    /// The time when a claim is looked at without a change.
    pub(super) due: HashMap<ObjectKey, Instant>,
    /// Claims that want devices before a pod.
    pub(super) unbound: Queue,
    /// Claims for which a write is under way.
    pub(super) writing: HashSet<Uid>,
    /// Hold claims that are not in the API yet, by the UID of the claim that ends.
    pub(super) pending_holds: HashMap<Uid, PendingHold>,
    /// Claims that lost their devices before their pod was seen to end, by the UID of the pod.
    pub(super) lost: HashMap<Uid, Vec<Lost>>,
    /// Claims that were seen to end.
    pub(super) ended_claims: HashSet<Uid>,
    /// Time of the last look, in seconds of Unix time.
    pub(super) wall: i64,
    /// Namespaces with a claim that a used-up budget kept from being bound.
    pub(super) refused: HashSet<Arc<str>>,
}

impl Holds {
    pub(super) fn new(backoff: (Duration, Duration)) -> Self {
        Self {
            changed: HashSet::new(),
            due: HashMap::new(),
            unbound: Queue::new(backoff.0, backoff.1),
            writing: HashSet::new(),
            pending_holds: HashMap::new(),
            lost: HashMap::new(),
            ended_claims: HashSet::new(),
            wall: 0,
            refused: HashSet::new(),
        }
    }

    pub(super) fn note(&mut self, key: &ObjectKey) {
        self.changed.insert(key.clone());
    }

    pub(super) fn wake(&mut self, now: Instant) {
        self.unbound.wake(now);
    }

    pub(super) fn writes_under_way(&self) -> usize {
        self.writing.len()
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.due.values().min().copied().into_iter().chain(self.unbound.next()).min()
    }

    pub(super) fn has_ready(&mut self, now: Instant) -> bool {
        self.unbound.has_ready(now)
    }

    /// Queues a claim that wants devices.
    pub(super) fn offer(&mut self, claim: &Claim, now: Instant) {
        self.unbound.offer(Rank::new(claim.key.clone(), 0, claim.created), now);
    }

    /// Returns true if a claim of the pod lost its devices, so that the pod is about to be seen to end.
    pub(super) fn awaits_end_of(&self, pod: &Uid) -> bool {
        self.lost.contains_key(pod)
    }

    pub(super) fn forget(&mut self, key: &ObjectKey) {
        self.due.remove(key);
        self.unbound.remove(key);
    }
}

impl Reconciler {
    /// Does the next step for claims that changed or are due. `wall` is the clock in which the ends of holds
    /// are written.
    pub fn keep_holds(&mut self, now: Instant, wall: Timestamp) {
        if !self.is_synced() {
            return;
        }
        self.holds.wall = wall.as_second();
        self.make_hold_claims(wall.as_second());
        let mut keys = std::mem::take(&mut self.holds.changed);
        keys.extend(self.holds.due.iter().filter(|(_, at)| **at <= now).map(|(key, _)| key.clone()));
        for key in keys {
            self.keep_hold(&key, now, wall.as_second());
        }
    }

    /// Looks at every claim again, because a class may say something else now.
    pub(super) fn review_holds(&mut self) {
        self.holds.changed.extend(self.index.claims().map(|claim| claim.key.clone()));
    }

    fn keep_hold(&mut self, key: &ObjectKey, now: Instant, wall: i64) {
        self.holds.due.remove(key);
        if self.index.claim(key).is_some_and(|claim| claim.companion.is_some()) {
            return;
        }
        let Some(claim) = self.index.claim(key).cloned() else {
            self.holds.forget(key);
            return;
        };
        // A claim with a write under way is looked at again when the write has returned.
        if self.holds.writing.contains(&claim.uid)
            || self.deallocating.contains_key(&claim.uid)
            || self.index.is_assumed(&claim.uid)
        {
            return;
        }
        if let Some(retention) = claim.retention.clone() {
            return self.advance_hold_claim(&claim, &retention, now, wall);
        }
        self.write_retention_record(&claim);
        let facts = self.facts(&claim);
        let step = hold::step(self.hold_policy(&claim), facts, wall);
        if !matches!(step, Step::Bind(_)) {
            self.holds.unbound.remove(key);
        }
        match step {
            Step::Wait(until) => {
                if let Some(until) = until {
                    let left = u64::try_from(until.saturating_sub(wall)).unwrap_or(0);
                    self.holds.due.insert(key.clone(), now + Duration::from_secs(left));
                }
            }
            Step::Bind(_) => {
                self.holds.offer(&claim, now);
                if let Some(until) = self.slow.until(&claim.uid, now) {
                    self.holds.unbound.hold_back(key, until);
                }
            }
            Step::Set(hold) => self.set_hold(&claim, Some(hold), now),
            Step::Unset => {
                if facts.evicted {
                    let note = "its pod was evicted, so its devices are not kept when the pod has ended";
                    self.tell_claim(&claim, false, reasons::HOLD_ENDED, note, now);
                }
                self.set_hold(&claim, None, now);
            }
            Step::Release(ended) => {
                self.tell_claim(&claim, false, reasons::HOLD_ENDED, &ended_note(ended), now);
                self.deallocate(key, Consumers::Holds, "hold");
            }
        }
    }

    pub(super) fn hold_policy(&self, claim: &Claim) -> Policy {
        policy(&self.index, self.settings.holds, claim)
    }

    pub(super) fn facts(&self, claim: &Claim) -> hold::Facts {
        let pods = || claim.reserved_for.iter().filter(|consumer| !hold::is_hold(consumer));
        let known = |consumer: &ResourceClaimConsumerReference| {
            let key =
                ObjectKey { namespace: claim.key.namespace.clone(), name: consumer.name.as_str().into() };
            self.index.pod(&key).filter(|pod| *pod.uid == *consumer.uid)
        };
        let evicted = |consumer: &ResourceClaimConsumerReference| {
            known(consumer).is_some_and(|pod| pod.disrupted || self.preemptions.evicted(&pod.uid))
        };
        // A pod that is unknown here may only not be known yet: the writer asks the API first.
        let gone = |consumer: &&ResourceClaimConsumerReference| {
            hold::is_pod(consumer) && known(consumer).is_none_or(|pod| pod.terminal)
        };
        hold::Facts {
            created: claim.created,
            deleting: claim.deleting,
            generated: claim.owner_pod.is_some(),
            allocated: claim.allocation.as_ref().map(|allocation| ByUs(self.index.is_ours(allocation))),
            hold: claim.reserved_for.iter().find_map(hold::read),
            consumers: pods().count(),
            gone: pods().filter(gone).count(),
            evicted: pods().next().is_some() && pods().all(evicted),
        }
    }

    fn set_hold(&mut self, claim: &Claim, hold: Option<Hold>, now: Instant) {
        self.holds.writing.insert(claim.uid.clone());
        if let Some(Hold::Until(second)) = hold {
            let note = format!(
                "no pod uses this claim; it keeps its devices until {}. `aliquot release {} -n {}` frees them now",
                clock(second),
                claim.key.name,
                claim.key.namespace
            );
            self.tell_claim(claim, false, reasons::HELD_WITHOUT_POD, &note, now);
        }
        self.effects.push(Effect::Do(Job::Hold { claim: claim.key.clone(), uid: claim.uid.clone(), hold }));
    }

    /// Takes in the result of a change of the driver's own entry among the consumers.
    pub(super) fn hold_written(
        &mut self,
        key: &ObjectKey,
        uid: &Uid,
        error: Option<WriteError>,
        now: Instant,
    ) {
        self.holds.writing.remove(uid);
        match error {
            None => {
                let facts = self.index.claim(key).map(|claim| self.facts(claim));
                if facts.is_some_and(|facts| facts.gone > 0 && facts.gone == facts.consumers) {
                    // The pods exist, but are not known here yet.
                    self.holds.due.insert(key.clone(), now + LOOK);
                } else {
                    self.holds.note(key);
                }
                // Pods of higher priority may have the devices now.
                self.queue.wake(now);
            }
            Some(error) => {
                tracing::warn!(claim = %key, %error, "could not change the hold on a claim");
                self.holds.due.insert(key.clone(), now + RETRY);
            }
        }
    }

    /// Drops what is stored for a claim that is gone.
    pub(super) fn hold_gone(&mut self, uid: &str) {
        self.holds.writing.remove(uid);
        self.told.forget_claim(uid);
        self.holds.ended_claims.remove(uid);
    }
}

/// Returns the hold policy of a claim, from the claim itself and its classes.
pub(super) fn policy(index: &Snapshot, limits: Limits, claim: &Claim) -> Policy {
    let requests = claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    let classes = requests.flat_map(|request| {
        let exact = request.exactly.iter().map(|exact| &exact.device_class_name);
        exact.chain(request.first_available.iter().flatten().map(|sub| &sub.device_class_name))
    });
    let of_classes: Vec<&Wish> =
        classes.filter_map(|class| index.class(class)).map(|class| &class.hold).collect();
    Policy::of(limits, std::iter::once(&claim.hold).chain(of_classes))
}

pub(super) fn clock(second: i64) -> String {
    Timestamp::from_second(second).map_or_else(|_| format!("second {second}"), |time| time.to_string())
}

pub(super) fn ended_note(ended: Ended) -> String {
    let why = match ended {
        Ended::Expired => "its time without a pod is over",
        Ended::Withdrawn => "it does not ask to keep them any more",
        Ended::Deleted => "it is being deleted",
    };
    format!("no pod uses this claim and {why}, so its devices are free again")
}

//! Devices of claims that are deleted with their pod, kept for the next pod: carries out what
//! [`aliquot_allocator::hold::retention`] decides.

use super::holds::RETRY;
use super::{Effect, Reconciler, Regarding, Report, reasons};
use crate::writer::{GivesWay, Job, WriteError};
use aliquot_allocator::hold::Policy;
use aliquot_allocator::hold::retention::{Retention, Step};
use aliquot_allocator::schedule::{Decision, Overlay, Situation};
use aliquot_allocator::snapshot::{
    Allocation, Change, Claim, ClaimSource, ObjectKey, Pod, PodClaim, Resolution, Uid,
};
use aliquot_model::names::{HOLD_FOR, HOLD_OF, RECLAIM};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval at which an ended pod that is not gone yet is looked at.
const LOOK: Duration = Duration::from_millis(500);
/// The longest time, in seconds after a hold claim was made, that a pod waits for an ending pod, and a hold
/// claim for its devices.
const PATIENCE: i64 = 60;

/// The time, in seconds, that the end of a pod is awaited after its claim has lost its devices.
const LOST_FOR: i64 = 5;

/// A claim that lost its devices before its pod was seen to end.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) claim: Claim,
    pub(super) allocation: Allocation,
    since: i64,
}

/// A hold claim that is not in the API yet.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PendingHold {
    /// The claim as it will be created, but without the end of its time.
    pub(super) claim: ResourceClaim,
    pub(super) retention: Retention,
    /// The time that the devices are kept, in seconds.
    seconds: i64,
    /// True if the claim is being written.
    #[serde(skip)]
    sent: bool,
}

impl PendingHold {
    /// Returns the UID of the claim that ends.
    pub(super) fn source(&self) -> &str {
        &self.retention.claim_uid
    }

    /// Returns the key of the claim that ends.
    pub(super) fn of_claim(&self) -> ObjectKey {
        ObjectKey::new(self.claim.metadata.namespace.as_deref().unwrap_or_default(), &self.retention.claim)
    }

    /// Returns the key of the claim's pod.
    pub(super) fn of_pod(&self) -> ObjectKey {
        ObjectKey { name: self.retention.pod.as_str().into(), ..self.of_claim() }
    }

    /// Returns true if the hold claim was tried for the first time just now, so that its successor waits for it.
    const fn is_early(&self, wall: i64) -> bool {
        let Retention { until, .. } = self.retention;
        until == 0 || wall <= until.saturating_sub(self.seconds).saturating_add(PATIENCE)
    }
}

impl Lost {
    pub(super) fn is_of(&self, claim: &Uid) -> bool {
        self.claim.uid == *claim
    }
}

/// UID of a pod's claim, the hold claim for it, and the retention in the hold claim.
type Offer<'a> = (Uid, &'a Claim, &'a Retention);

/// What is kept for a pod.
enum Retained {
    /// Nothing is kept.
    None,
    /// The pod whose devices it gets is not gone yet.
    Later,
    /// UIDs of the pod's claims, with the hold claims that keep their devices.
    Of(Vec<(Uid, ObjectKey)>),
}

/// Returns the name of the hold claim for a claim; it is always the same for one UID.
fn name_of(claim_uid: &str) -> String {
    format!("aliquot-hold-{claim_uid}")
}

/// Returns true if a hold claim was made just now, so that the end of the pod that left it may not be over
/// yet.
const fn is_early(claim: &Claim, wall: i64) -> bool {
    wall <= claim.created.saturating_add(PATIENCE)
}

impl Reconciler {
    /// Takes in a pod that ends or has ended: the devices of its claims may be kept for the next pod.
    pub(super) fn note_ended_pod(&mut self, pod: &Pod, now: Instant) {
        if let Some(lost) = self.holds.lost.remove(&pod.uid) {
            for Lost { claim, allocation, .. } in lost {
                self.note_ended_claim(claim, allocation, pod);
            }
            self.queue.wake(now);
        }
        let keys: Vec<ObjectKey> = pod.claim_keys().collect();
        for key in keys {
            // If the pod was evicted, a claim that is kept may not be kept any more.
            self.holds.note(&key);
            let Some(claim) = self.index.claim(&key) else { continue };
            // An assumed allocation counts too: the end of a short pod can be seen before the answer to the
            // write.
            if let Some(allocation) = self.index.effective_allocation(&key).cloned() {
                self.note_ended_claim(claim.clone(), allocation, pod);
            }
        }
    }

    /// Notes a claim that lost its devices, if this controller did not take them: Kubernetes saw the end of
    /// the claim's pod first. Until that end is seen here too, the devices are given to nobody, because only
    /// the pod shows whether it was evicted.
    pub(super) fn note_lost(&mut self, claim: &Claim, taken: &Allocation) {
        let Some(owner) = claim.owner_pod.clone() else { return };
        if self.deallocating.contains_key(&claim.uid) || !taken.by_us || !self.hold_policy(claim).retain {
            return;
        }
        // The devices are taken care of already.
        if self.holds.ended_claims.contains(&claim.uid) || self.is_retained(&claim.uid) {
            return;
        }
        let ended = |pod: &&Pod| pod.uid == owner && (pod.deleting || pod.terminal);
        let pod = self.index.pods_of_claim(&claim.key).find(ended).cloned();
        if let Some(pod) = pod {
            self.note_ended_claim(claim.clone(), taken.clone(), &pod);
        } else {
            let lost = Lost { claim: claim.clone(), allocation: taken.clone(), since: self.holds.wall };
            self.holds.lost.entry(owner).or_default().push(lost);
        }
    }

    /// Returns true if there is a hold claim for the devices of a claim.
    pub(super) fn is_retained(&self, claim: &Uid) -> bool {
        let mut retentions = self.index.retentions().filter_map(|hold| hold.retention.as_ref());
        retentions.any(|retention| *retention.claim_uid == **claim)
    }

    /// Gives up waiting for the ends of pods that do not come.
    pub(super) fn tidy_lost(&mut self, now: Instant) {
        let (before, wall) = (self.holds.lost.len(), self.holds.wall);
        self.holds.lost.retain(|_, lost| lost.iter().any(|lost| wall - lost.since <= LOST_FOR));
        if self.holds.lost.len() < before {
            self.queue.wake(now);
        }
    }

    fn note_ended_claim(&mut self, claim: Claim, allocation: Allocation, pod: &Pod) {
        let made_for_it = claim.owner_pod.as_ref() == Some(&pod.uid);
        // An evicted pod makes room for another pod, so its devices are not kept.
        let leaves = pod.node.is_some() && !pod.disrupted && !self.preemptions.evicted(&pod.uid);
        if made_for_it
            && leaves
            && pod.maker.is_some()
            && allocation.by_us
            && !allocation.others
            && !self.holds.ended_claims.contains(&claim.uid)
            && !self.is_retained(&claim.uid)
            && let Some(pending) = self.pending_hold(&claim, &allocation, pod)
        {
            tracing::info!(claim = %claim.key, pod = %pod.key, "its devices are kept for the next");
            self.holds.ended_claims.insert(claim.uid.clone());
            self.holds.pending_holds.insert(claim.uid, pending);
        }
    }

    /// Creates hold claims for the claims that end.
    pub(super) fn make_hold_claims(&mut self, wall: i64) {
        self.holds
            .pending_holds
            .retain(|_, pending| pending.retention.until == 0 || wall < pending.retention.until);
        for (source, pending) in &mut self.holds.pending_holds {
            if std::mem::replace(&mut pending.sent, true) {
                continue;
            }
            // The time is fixed here, however often the claim has to be written.
            if pending.retention.until == 0 {
                pending.retention.until = wall.saturating_add(pending.seconds);
            }
            let Ok(text) = serde_json::to_string(&pending.retention) else { continue };
            let mut claim = pending.claim.clone();
            claim.metadata.annotations.get_or_insert_default().insert(HOLD_OF.to_owned(), text);
            self.effects.push(Effect::Do(Job::MakeHold { claim: Box::new(claim), source: source.clone() }));
        }
    }

    /// Returns the hold claim for a claim whose pod ends; `None` if its devices are not to be kept.
    pub(super) fn pending_hold(
        &self,
        claim: &Claim,
        allocation: &Allocation,
        pod: &Pod,
    ) -> Option<PendingHold> {
        let policy: Policy = self.hold_policy(claim);
        if !policy.retain || policy.seconds == 0 || self.refusal(&claim.key.namespace).is_some() {
            return None;
        }
        let owner = pod.made_by.as_deref()?;
        let of_claim = |entry: &&PodClaim| matches!(&entry.resolution, Resolution::Claim(name) if *name == claim.key.name);
        let entry = pod.claims.iter().find(of_claim)?;
        let ClaimSource::Template(template) = &entry.source else { return None };
        let devices: Vec<(String, String)> = allocation
            .held
            .iter()
            .map(|held| (self.index.name(held.pool).to_owned(), self.index.name(held.device).to_owned()))
            .collect();
        if devices.is_empty() || allocation.held.iter().any(|held| held.admin) {
            return None;
        }
        let retention = Retention {
            maker: owner.uid.clone(),
            template: template.to_string(),
            entry: entry.name.to_string(),
            pod: pod.key.name.to_string(),
            claim: claim.key.name.to_string(),
            claim_uid: claim.uid.to_string(),
            node: allocation.node.as_deref()?.to_owned(),
            devices,
            until: 0,
        };
        let annotations = BTreeMap::from([
            (RECLAIM.to_owned(), "Retain".to_owned()),
            (HOLD_FOR.to_owned(), format!("{}s", policy.seconds)),
        ]);
        // The hold claim is deleted with the owner that would make the next pod.
        let owner = OwnerReference { controller: None, block_owner_deletion: None, ..owner.clone() };
        let claim = ResourceClaim {
            metadata: ObjectMeta {
                name: Some(name_of(&claim.uid)),
                namespace: Some(claim.key.namespace.to_string()),
                annotations: Some(annotations),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: (*claim.spec).clone(),
            status: None,
        };
        Some(PendingHold { claim, retention, seconds: policy.seconds, sent: false })
    }

    /// Takes in the result of the creation of a hold claim. After a failure that may pass it is created
    /// again.
    pub(super) fn hold_made(&mut self, source: &Uid, error: Option<WriteError>) {
        // Without an entry, the hold claim was seen, or its time is over.
        let Some(pending) = self.holds.pending_holds.get_mut(source) else { return };
        if let Some(error @ WriteError::Exhausted { .. }) = &error {
            tracing::warn!(claim = %source, %error, "the hold claim for its devices is not made, and tried again");
            pending.sent = false;
            return;
        }
        self.holds.pending_holds.remove(source);
        if let Some(error) = error {
            tracing::warn!(claim = %source, %error, "its devices are not kept for the next");
        }
    }

    /// Does the next step for a hold claim.
    pub(super) fn advance_hold_claim(
        &mut self,
        claim: &Claim,
        retention: &Retention,
        now: Instant,
        wall: i64,
    ) {
        let key = &claim.key;
        let step = self.reserved_for_others().retention_step(claim, retention, wall);
        if !matches!(step, Step::Bind(_)) {
            self.holds.unbound.remove(key);
        }
        match step {
            Step::Wait(None) => {}
            Step::Wait(Some(until)) => {
                let left = u64::try_from(until.saturating_sub(wall)).unwrap_or(0);
                self.holds.due.insert(key.clone(), now + Duration::from_secs(left));
            }
            Step::Look => {
                self.holds.due.insert(key.clone(), now + LOOK);
            }
            Step::Bind(_) => self.holds.offer(claim, now),
            Step::Drop(ended) => {
                self.tell_claim(claim, false, reasons::HOLD_ENDED, &super::holds::ended_note(ended), now);
                self.drop_hold(claim);
            }
            Step::Clear => {
                let mark = claim.allocation.as_ref().map_or_else(|| "".into(), |a| a.mark.clone());
                self.deallocating.insert(claim.uid.clone(), "hold");
                self.effects.push(Effect::Do(Job::Deallocate {
                    claim: key.clone(),
                    uid: claim.uid.clone(),
                    mark,
                    consumers: crate::writer::Consumers::Holds,
                }));
            }
        }
    }

    fn drop_hold(&mut self, claim: &Claim) {
        self.holds.writing.insert(claim.uid.clone());
        self.effects.push(Effect::Do(Job::DropHold { claim: claim.key.clone(), uid: claim.uid.clone() }));
    }

    /// Takes in the result of a deletion of a hold claim.
    pub(super) fn hold_dropped(
        &mut self,
        key: &ObjectKey,
        uid: &Uid,
        error: Option<WriteError>,
        now: Instant,
    ) {
        self.holds.writing.remove(uid);
        if let Some(error) = error {
            tracing::warn!(claim = %key, %error, "could not delete a hold claim");
        }
        self.holds.due.insert(key.clone(), now + RETRY);
    }

    /// Decides for a hold claim that is to get its devices.
    pub(super) fn bind_retention(
        &mut self,
        claim: &Claim,
        retention: &Retention,
        is_first_look: bool,
        now: Instant,
        wall: Timestamp,
    ) {
        let pod = Pod::in_place_of(claim);
        let mut situation = self.situation(&pod, now);
        self.narrow(&mut situation, &claim.uid, retention);
        let decision = match self.consider(&pod, &situation, is_first_look) {
            Ok(decision) => decision,
            Err(cost) => {
                return self.holds.unbound.put_behind(&claim.key, cost, &mut self.account, now);
            }
        };
        match decision {
            Decision::Placed(plan) if self.refusal(&claim.key.namespace).is_none() => {
                self.write_binding(claim, plan, retention.until, wall);
            }
            Decision::OutOfTime(_) => {
                self.holds.unbound.run_late(&claim.key, self.cost(), now);
            }
            _ if is_early(claim, wall.as_second()) && self.reserved_for_others().is_unsettled(retention) => {
                self.holds.unbound.delay(&claim.key, now);
            }
            // The devices are no longer available.
            _ => self.give_retention_up(claim, now),
        }
    }

    /// Drops a hold claim whose devices are gone, or belong to somebody else by now.
    fn give_retention_up(&mut self, claim: &Claim, now: Instant) {
        self.holds.unbound.remove(&claim.key);
        self.tell_claim(
            claim,
            false,
            reasons::HOLD_ENDED,
            "the devices that it was to keep are not free, or its namespace's budget is used up",
            now,
        );
        self.drop_hold(claim);
    }

    /// Restricts a decision to exactly the devices of a retention, for one claim.
    fn narrow(&self, situation: &mut Situation, claim: &Uid, retention: &Retention) {
        let known = retention
            .devices
            .iter()
            .filter_map(|(pool, device)| Some((self.index.sym(pool)?, self.index.sym(device)?)));
        let devices: BTreeSet<_> = known.collect();
        situation.only = Some(retention.node.as_str().into());
        situation.exactly.insert(claim.clone(), Arc::new(devices));
    }

    /// Returns what is kept for a pod. It gets the devices of one ended pod: of the pod with its own name
    /// first, otherwise of the pod whose time ends first.
    fn retained_for(&self, pod: &Pod) -> Retained {
        if pod.maker.is_none() || pod.claims.is_empty() {
            return Retained::None;
        }
        let reserved = self.reserved_for_others();
        let mut groups: BTreeMap<(bool, i64, &str), Vec<Offer<'_>>> = BTreeMap::new();
        for claim in self.index.retentions() {
            let Some(retention) = claim.retention.as_deref() else { continue };
            let taken = claim.deleting || self.deallocating.contains_key(&claim.uid);
            if taken || retention.until <= self.holds.wall {
                continue;
            }
            if let Some(successor) = reserved.successor_of(pod, claim, retention) {
                let key = (*retention.pod != *pod.key.name, retention.until, &*retention.pod);
                groups.entry(key).or_default().push((successor.uid.clone(), claim, retention));
            }
        }
        let coming = self.holds.pending_holds.values().filter(|pending| {
            pending.is_early(self.holds.wall) && reserved.successor_of_pending(pod, pending).is_some()
        });
        let of_its_name = groups.keys().next().is_some_and(|(other_name, _, _)| !other_name);
        if coming.into_iter().any(|pending| !of_its_name || *pending.retention.pod == *pod.key.name) {
            return Retained::Later;
        }
        let Some(group) = groups.into_values().next() else { return Retained::None };
        let busy = |claim: &Claim, retention: &Retention| {
            reserved.source_holds(claim, retention)
                || reserved.is_unsettled(retention)
                || self.holds.writing.contains(&claim.uid)
                || self.index.is_assumed(&claim.uid)
        };
        if group.iter().any(|(_, claim, retention)| busy(claim, retention)) {
            let all_late = group.iter().all(|(_, claim, _)| !is_early(claim, self.holds.wall));
            return if all_late { Retained::None } else { Retained::Later };
        }
        let mut seen = HashSet::new();
        let firsts = group.into_iter().filter(|(successor, _, _)| seen.insert(successor.clone()));
        Retained::Of(firsts.map(|(successor, claim, _)| (successor, claim.key.clone())).collect())
    }

    /// Gives a pod what is kept for it. Returns false if nothing is kept, or if the pod cannot have it
    /// together with the rest that it needs.
    pub(super) fn take_retained(&mut self, pod: &Pod, now: Instant, wall: Timestamp) -> bool {
        if pod.node.is_some() || self.refusal(&pod.key.namespace).is_some() {
            return false;
        }
        let list = match self.retained_for(pod) {
            Retained::None => return false,
            Retained::Later => {
                self.queue.delay(&pod.key, now);
                let note =
                    "the devices of an ended pod are kept for this one, which waits until that is gone";
                self.tell_pod(pod, reasons::WAITING, note, now);
                return true;
            }
            Retained::Of(list) => list,
        };
        let mut situation = self.situation(pod, now);
        let mut gives = Vec::new();
        let mut released = HashSet::new();
        for (successor, key) in &list {
            let Some(claim) = self.index.claim(key).cloned() else { return false };
            let Some(retention) = claim.retention.clone() else { return false };
            self.narrow(&mut situation, successor, &retention);
            released.insert(claim.uid.clone());
            let mark = claim.allocation.as_ref().map(|allocation| allocation.mark.clone());
            gives.push(GivesWay { claim: key.clone(), uid: claim.uid, mark });
        }
        if let Some(node) = situation.only.clone() {
            let stages = &mut situation.stages;
            let stage = stages.entry(node.clone()).or_insert_with(|| Overlay::new(&self.index, &node));
            stage.release(&self.index, &released);
        }
        let Decision::Placed(plan) = self.decide(pod, &situation) else { return false };
        // Retained devices are charged to the quota already.
        let successors: HashSet<&Uid> = list.iter().map(|(successor, _)| successor).collect();
        let mut more = (*plan).clone();
        more.drafts.retain(|draft| !successors.contains(&draft.uid));
        if !more.drafts.is_empty() && self.waits_for_quota(pod, &more, now) {
            return true;
        }
        for give in &gives {
            self.holds.unbound.remove(&give.claim);
            self.deallocating.insert(give.uid.clone(), "successor");
        }
        tracing::info!(pod = %pod.key, node = %plan.node, holds = gives.len(), "gets what was kept for it");
        self.write_plan_after(pod, plan, gives, wall);
        true
    }

    /// Takes in the result of an allocation, for the hold claims that gave way.
    pub(super) fn gave_way(&mut self, gives: Vec<GivesWay>, written: bool, now: Instant) -> Change {
        for give in &gives {
            self.deallocating.remove(&give.uid);
            self.holds.note(&give.claim);
            let ours = |c: &&Claim| written && c.uid == give.uid && c.retention.is_some();
            if let Some(claim) = self.index.claim(&give.claim).filter(ours).cloned() {
                self.drop_hold(&claim);
            }
        }
        if gives.is_empty() || written {
            return Change::Nothing;
        }
        self.queue.wake(now);
        Change::Room
    }

    /// Reports on a hold claim that it keeps the devices of an ended pod, and until when.
    pub(super) fn tell_retained(&mut self, claim: &Claim, retention: &Retention, until: &str) {
        let note = format!(
            "keeps the devices of pod {}, which has ended, on node {} for the next pod of its controller until {until}. \
             `aliquot release {} -n {}` frees them now",
            retention.pod, retention.node, claim.key.name, claim.key.namespace
        );
        self.tell(Report {
            regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
            warning: false,
            reason: reasons::HELD_WITHOUT_POD,
            note,
        });
    }
}

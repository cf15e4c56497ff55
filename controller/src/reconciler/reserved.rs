//! Devices that are kept for others, and so are not free for a pod although nobody has them: those of
//! nominations and reservations, the place of a pod that goes back, and what ended pods leave to their successors.

use super::Reconciler;
use super::holds::{Holds, policy};
use super::preemption::Preemptions;
use super::retention::PendingHold;
use super::substitutes::Returns;
use aliquot_allocator::budget::Book;
use aliquot_allocator::hold::retention::{self, Retention, Step};
use aliquot_allocator::hold::{self, ByUs, Limits};
use aliquot_allocator::schedule::{Overlay, Situation};
use aliquot_allocator::snapshot::{
    Claim, ClaimSource, Holder, ObjectKey, Pod, PoolState, Resolution, Snapshot, Sym, Uid,
};
use aliquot_model::names::held_taint;
use k8s_openapi::api::resource::v1::ResourceClaimSpec;
use std::sync::Arc;

/// Everything that tells which devices are kept.
#[derive(Clone, Copy)]
pub(super) struct Reserved<'a> {
    pub(super) index: &'a Snapshot,
    pub(super) preemptions: &'a Preemptions,
    pub(super) book: &'a Book,
    pub(super) returns: &'a Returns,
    pub(super) holds: &'a Holds,
    pub(super) limits: Limits,
    /// True if reservations count.
    pub(super) reservations: bool,
}

impl Reconciler {
    pub(super) const fn reserved_for_others(&self) -> Reserved<'_> {
        Reserved {
            index: &self.index,
            preemptions: &self.preemptions,
            book: &self.book,
            returns: &self.returns,
            holds: &self.holds,
            limits: self.settings.holds,
            reservations: true,
        }
    }
}

impl<'a> Reserved<'a> {
    /// Removes what is kept for others than this pod from its situation.
    pub(super) fn keep(&self, pod: &Pod, situation: &mut Situation) {
        self.keep_nominated(pod, situation);
        self.keep_place(pod, situation);
        self.keep_retentions(pod, situation);
    }

    fn keep_nominated(&self, pod: &Pod, situation: &mut Situation) {
        let own = self.book.standing(&pod.key.namespace, pod.priority);
        for (key, nomination) in &self.preemptions.nominations {
            let counts = self.reservations || nomination.until.is_none();
            if *key == pod.key || nomination.standing < own || !counts {
                continue;
            }
            let stage = self.stage(&nomination.node, situation);
            stage.hold(self.index, &nomination.held);
            stage.join(&nomination.needs);
        }
    }

    /// Keeps the place that is held for a pod that goes back.
    fn keep_place(&self, pod: &Pod, situation: &mut Situation) {
        let Some(hold) = self.returns.held_from(pod) else { return };
        let stage = self.stage(&hold.node, situation);
        stage.hold(self.index, &hold.held);
        // The pod's needs count only once: the pod that leaves may still be there.
        if self.index.accounted_node(&hold.leaves) != Some(&hold.node) {
            stage.join(&hold.needs);
        }
    }

    fn stage<'s>(&self, node: &Arc<str>, situation: &'s mut Situation) -> &'s mut Overlay {
        situation.stages.entry(node.clone()).or_insert_with(|| Overlay::new(self.index, node))
    }

    pub(super) fn retention_step(&self, claim: &Claim, retention: &Retention, wall: i64) -> Step {
        let most = i64::try_from(self.limits.most.as_secs()).unwrap_or(i64::MAX);
        let facts = retention::Facts {
            deleting: claim.deleting,
            finalizer: claim.has_finalizer(),
            allocated: claim.allocation.as_ref().map(|allocation| ByUs(self.index.is_ours(allocation))),
            hold: claim.reserved_for.iter().find_map(hold::read),
            consumers: claim.reserved_for.iter().filter(|consumer| !hold::is_hold(consumer)).count(),
            source: self.source_holds(claim, retention),
            wanted: policy(self.index, self.limits, claim).retain,
            until: retention.until.min(claim.created.saturating_add(most)),
        };
        retention::step(facts, wall)
    }

    /// Returns true if the ended pod's claim still has its devices.
    pub(super) fn source_holds(&self, claim: &Claim, retention: &Retention) -> bool {
        let key = ObjectKey::new(&claim.key.namespace, &retention.claim);
        self.index.claim(&key).is_some_and(|source| *source.uid == *retention.claim_uid)
            && self.index.effective_allocation(&key).is_some()
    }

    /// Returns true if it is unknown yet whether a hold claim's devices are free: the node is publishing
    /// anew, or reports that the hardware is held for a claim that is gone, as it may for a moment after the
    /// end of a pod.
    pub(super) fn is_unsettled(&self, retention: &Retention) -> bool {
        let held = held_taint(self.index.driver());
        retention.devices.iter().any(|(pool, device)| {
            let Some(pool) = self.index.sym(pool).and_then(|pool| self.index.pool(pool)) else {
                return false;
            };
            let Some(layout) = &pool.layout else {
                return matches!(pool.state, PoolState::Incomplete { .. });
            };
            let at = self.index.sym(device).and_then(|device| layout.position(device));
            let known = at.and_then(|at| layout.devices.get(at as usize));
            known.is_some_and(|known| self.index.taints(known).iter().any(|taint| *taint.key == *held))
        })
    }

    /// Keeps devices for hold claims that do not have them yet: nobody else has them, but they are not free
    /// for others.
    fn keep_retentions(&self, pod: &Pod, situation: &mut Situation) {
        for pending in self.holds.pending_holds.values() {
            if self.successor_of_pending(pod, pending).is_none() {
                self.keep_devices(&pending.retention, situation);
            }
        }
        for lost in self.holds.lost.values().flatten() {
            if let Some(node) = &lost.allocation.node {
                let held = lost.allocation.held.iter().filter(|held| !held.admin);
                self.keep_held(node, &lost.claim.uid, held.map(|held| (held.pool, held.device)), situation);
            }
        }
        for claim in self.index.retentions() {
            let Some(retention) = &claim.retention else { continue };
            let own = claim.uid == pod.uid || self.successor_of(pod, claim, retention).is_some();
            if !own && self.reserves(claim, retention) {
                self.keep_devices(retention, situation);
            }
        }
    }

    fn keep_devices(&self, retention: &Retention, situation: &mut Situation) {
        let known = retention
            .devices
            .iter()
            .filter_map(|(pool, device)| Some((self.index.sym(pool)?, self.index.sym(device)?)));
        self.keep_held(
            &retention.node.as_str().into(),
            &retention.claim_uid.as_str().into(),
            known,
            situation,
        );
    }

    fn keep_held(
        &self,
        node: &Arc<str>,
        claim: &Uid,
        devices: impl Iterator<Item = (Sym, Sym)>,
        situation: &mut Situation,
    ) {
        let held: Vec<_> = devices
            .map(|(pool, device)| {
                let claim = claim.clone();
                (
                    pool,
                    Holder {
                        claim,
                        device,
                        admin: false,
                        share: None,
                        consumed: Box::default(),
                        time_slice: None,
                    },
                )
            })
            .collect();
        let stages = &mut situation.stages;
        let stage = stages.entry(node.clone()).or_insert_with(|| Overlay::new(self.index, node));
        stage.hold(self.index, &held);
    }

    /// Returns true if the hold claim's annotation alone keeps the devices.
    fn reserves(&self, claim: &Claim, retention: &Retention) -> bool {
        self.index.effective_allocation(&claim.key).is_none()
            && matches!(self.retention_step(claim, retention, self.holds.wall), Step::Bind(_))
    }

    /// Returns the pod's claim for which a hold claim keeps devices; `None` if there is none, or it is
    /// allocated already.
    pub(super) fn successor_of(&self, pod: &Pod, claim: &Claim, retention: &Retention) -> Option<&'a Claim> {
        self.successor(pod, &claim.key.namespace, &claim.spec, retention)
    }

    pub(super) fn successor_of_pending(&self, pod: &Pod, pending: &PendingHold) -> Option<&'a Claim> {
        let namespace = pending.claim.metadata.namespace.as_deref()?;
        self.successor(pod, namespace, &pending.claim.spec, &pending.retention)
    }

    fn successor(
        &self,
        pod: &Pod,
        namespace: &str,
        spec: &ResourceClaimSpec,
        retention: &Retention,
    ) -> Option<&'a Claim> {
        if pod.maker.as_deref() != Some(&*retention.maker) || *pod.key.namespace != *namespace {
            return None;
        }
        let entry = pod.claims.iter().find(|entry| {
            *entry.name == *retention.entry
                && matches!(&entry.source, ClaimSource::Template(template) if **template == *retention.template)
        })?;
        let Resolution::Claim(name) = &entry.resolution else { return None };
        let key = ObjectKey { namespace: pod.key.namespace.clone(), name: name.clone() };
        let successor = self.index.claim(&key)?;
        let wants = *successor.uid != *retention.claim_uid
            && successor.spec.devices == spec.devices
            && self.index.effective_allocation(&key).is_none();
        wants.then_some(successor)
    }
}

//! Devices that are kept for others, and so are not free for a pod although nobody has them: those of
//! nominations and reservations, the place of a pod that goes back, and what ended pods leave to their heirs.

use super::Reconciler;
use super::heirs::Ending;
use super::holds::{Holds, policy};
use super::preemption::Preemptions;
use super::substitutes::Returns;
use aliquot_allocator::budget::Book;
use aliquot_allocator::hold::heir::{self, Bequest, Step};
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
pub(super) struct Kept<'a> {
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
    pub(super) const fn kept_for_others(&self) -> Kept<'_> {
        Kept {
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

impl<'a> Kept<'a> {
    /// Removes what is kept for others than this pod from its situation.
    pub(super) fn keep(&self, pod: &Pod, situation: &mut Situation) {
        self.keep_nominated(pod, situation);
        self.keep_place(pod, situation);
        self.keep_bequests(pod, situation);
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

    pub(super) fn bequest_step(&self, claim: &Claim, bequest: &Bequest, wall: i64) -> Step {
        let most = i64::try_from(self.limits.most.as_secs()).unwrap_or(i64::MAX);
        let facts = heir::Facts {
            deleting: claim.deleting,
            finalizer: claim.has_finalizer(),
            allocated: claim.allocation.as_ref().map(|allocation| ByUs(self.index.is_ours(allocation))),
            hold: claim.reserved_for.iter().find_map(hold::read),
            consumers: claim.reserved_for.iter().filter(|consumer| !hold::is_hold(consumer)).count(),
            source: self.source_holds(claim, bequest),
            wanted: policy(self.index, self.limits, claim).retain,
            until: bequest.until.min(claim.created.saturating_add(most)),
        };
        heir::step(facts, wall)
    }

    /// Returns true if the ended pod's claim still has its devices.
    pub(super) fn source_holds(&self, claim: &Claim, bequest: &Bequest) -> bool {
        let key = ObjectKey::new(&claim.key.namespace, &bequest.claim);
        self.index.claim(&key).is_some_and(|source| *source.uid == *bequest.claim_uid)
            && self.index.effective_allocation(&key).is_some()
    }

    /// Returns true if it is unknown yet whether a hold claim's devices are free: the node is publishing
    /// anew, or reports that the hardware is held for a claim that is gone, as it may for a moment after the
    /// end of a pod.
    pub(super) fn is_unsettled(&self, bequest: &Bequest) -> bool {
        let held = held_taint(self.index.driver());
        bequest.devices.iter().any(|(pool, device)| {
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
    fn keep_bequests(&self, pod: &Pod, situation: &mut Situation) {
        for ending in self.holds.endings.values() {
            if self.heir_of_ending(pod, ending).is_none() {
                self.keep_devices(&ending.bequest, situation);
            }
        }
        for lost in self.holds.lost.values().flatten() {
            if let Some(node) = &lost.allocation.node {
                let held = lost.allocation.held.iter().filter(|held| !held.admin);
                self.keep_held(node, &lost.claim.uid, held.map(|held| (held.pool, held.device)), situation);
            }
        }
        for claim in self.index.bequests() {
            let Some(bequest) = &claim.bequest else { continue };
            let own = claim.uid == pod.uid || self.heir_of(pod, claim, bequest).is_some();
            if !own && self.reserves(claim, bequest) {
                self.keep_devices(bequest, situation);
            }
        }
    }

    fn keep_devices(&self, bequest: &Bequest, situation: &mut Situation) {
        let known = bequest
            .devices
            .iter()
            .filter_map(|(pool, device)| Some((self.index.sym(pool)?, self.index.sym(device)?)));
        self.keep_held(&bequest.node.as_str().into(), &bequest.claim_uid.as_str().into(), known, situation);
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
    fn reserves(&self, claim: &Claim, bequest: &Bequest) -> bool {
        self.index.effective_allocation(&claim.key).is_none()
            && matches!(self.bequest_step(claim, bequest, self.holds.wall), Step::Bind(_))
    }

    /// Returns the pod's claim for which a hold claim keeps devices; `None` if there is none, or it is
    /// allocated already.
    pub(super) fn heir_of(&self, pod: &Pod, claim: &Claim, bequest: &Bequest) -> Option<&'a Claim> {
        self.heir(pod, &claim.key.namespace, &claim.spec, bequest)
    }

    pub(super) fn heir_of_ending(&self, pod: &Pod, ending: &Ending) -> Option<&'a Claim> {
        let namespace = ending.claim.metadata.namespace.as_deref()?;
        self.heir(pod, namespace, &ending.claim.spec, &ending.bequest)
    }

    fn heir(
        &self,
        pod: &Pod,
        namespace: &str,
        spec: &ResourceClaimSpec,
        bequest: &Bequest,
    ) -> Option<&'a Claim> {
        if pod.maker.as_deref() != Some(&*bequest.maker) || *pod.key.namespace != *namespace {
            return None;
        }
        let entry = pod.claims.iter().find(|entry| {
            *entry.name == *bequest.entry
                && matches!(&entry.source, ClaimSource::Template(template) if **template == *bequest.template)
        })?;
        let Resolution::Claim(name) = &entry.resolution else { return None };
        let key = ObjectKey { namespace: pod.key.namespace.clone(), name: name.clone() };
        let heir = self.index.claim(&key)?;
        let wants = *heir.uid != *bequest.claim_uid
            && heir.spec.devices == spec.devices
            && self.index.effective_allocation(&key).is_none();
        wants.then_some(heir)
    }
}

//! Devices that claims keep without a pod are given to pods of higher priority that fit nowhere else. No work
//! runs on them, so they are taken before any pod is evicted.

use super::holds::policy;
use super::{GivesWay, Reconciler, Regarding, Report, reasons};
use aliquot_allocator::budget::Book;
use aliquot_allocator::hold::{self, Limits};
use aliquot_allocator::schedule::{Decision, Overlay, Plan};
use aliquot_allocator::snapshot::{Claim, Pod, Snapshot, Uid};
use k8s_openapi::jiff::Timestamp;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

/// A claim that keeps devices without a pod, and its node.
struct Reclaimable {
    claim: Claim,
    node: Arc<str>,
}

impl Reconciler {
    fn hold_standing(&self, claim: &Claim) -> i32 {
        hold_standing(&self.index, self.settings.holds, &self.book, claim)
    }

    /// Gives a pod that fits nowhere devices that are kept without a pod; returns false if those are not
    /// enough.
    pub(super) fn reclaim_for(&mut self, pod: &Pod, now: Instant, wall: Timestamp) -> bool {
        let may = self.settings.preemption
            && pod.gated
            && pod.node.is_none()
            && !pod.never_preempts
            && self.may_allocate(&pod.key.namespace);
        if !may {
            return false;
        }
        let standing = self.standing(pod);
        let all = self.reclaimable(standing);
        if all.is_empty() {
            return false;
        }
        let mut situation = self.situation(pod, now);
        let nodes: HashSet<Arc<str>> = all.iter().map(|one| one.node.clone()).collect();
        for node in nodes {
            let stage =
                situation.stages.entry(node.clone()).or_insert_with(|| Overlay::new(&self.index, &node));
            stage.release(&self.index, &uids(all.iter().filter(|one| one.node == node)));
        }
        let Decision::Placed(plan) = self.decide(pod, &situation) else { return false };
        let taken = self.needed(&plan, all);
        if self.waits_for_quota(pod, &plan, now) {
            self.end_nomination(&pod.key, now);
            return true;
        }
        let mut gives = Vec::new();
        for Reclaimable { claim, .. } in taken {
            self.tell_taken(&claim, pod, standing);
            self.deallocating.insert(claim.uid.clone(), "preempted");
            let mark = claim.allocation.map(|allocation| allocation.mark);
            gives.push(GivesWay { claim: claim.key, uid: claim.uid, mark });
        }
        tracing::info!(pod = %pod.key, node = %plan.node, holds = gives.len(), "takes what is kept without a pod");
        self.write_plan_after(pod, plan, gives, wall);
        true
    }

    /// Returns the claims without a pod that stand below `standing`.
    fn reclaimable(&self, standing: i32) -> Vec<Reclaimable> {
        let held = self.index.claims().filter(|claim| {
            claim.companion.is_none()
                && !claim.reserved_for.is_empty()
                && claim.reserved_for.iter().all(hold::is_hold)
                && !claim.deleting
                && !self.deallocating.contains_key(&claim.uid)
                && !self.holds.writing.contains(&claim.uid)
                && self.hold_standing(claim) < standing
        });
        let one = |claim: &Claim| {
            let allocation = claim.allocation.as_ref().filter(|a| self.index.is_ours(a) && !a.others)?;
            Some(Reclaimable { claim: claim.clone(), node: allocation.node.clone()? })
        };
        held.filter_map(one).collect()
    }

    /// Returns those of the claims without which the plan does not work.
    fn needed(&mut self, plan: &Plan, all: Vec<Reclaimable>) -> Vec<Reclaimable> {
        let holders = plan.holders(&mut self.index);
        let mut needed: Vec<Reclaimable> = all.into_iter().filter(|one| one.node == plan.node).collect();
        // Claims that stand highest are spared first.
        needed.sort_by_key(|one| (self.hold_standing(&one.claim), one.claim.created));
        let mut at = needed.len();
        while at > 0 {
            at -= 1;
            let one = needed.remove(at);
            let mut stage = Overlay::new(&self.index, &plan.node);
            stage.release(&self.index, &uids(needed.iter()));
            stage.hold(&self.index, &holders);
            if !stage.is_consistent(&self.index) {
                needed.insert(at, one);
            }
        }
        needed
    }

    fn tell_taken(&mut self, claim: &Claim, pod: &Pod, standing: i32) {
        let whose = if claim.key.namespace == pod.key.namespace {
            format!("pod {}", pod.key.name)
        } else {
            format!("pod {} of another namespace", pod.uid)
        };
        let note = format!(
            "its devices, which no pod uses, are given to {whose} of priority {standing}; it stands at {} itself",
            self.hold_standing(claim)
        );
        self.tell(Report {
            regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
            warning: true,
            reason: reasons::PREEMPTED,
            note,
        });
    }
}

/// Returns the rank of a claim while it keeps devices without a pod: at most that of pods without a priority
/// class, and lower with a used-up budget.
pub(super) fn hold_standing(index: &Snapshot, limits: Limits, book: &Book, claim: &Claim) -> i32 {
    book.standing(&claim.key.namespace, policy(index, limits, claim).priority.min(0))
}

fn uids<'s>(all: impl Iterator<Item = &'s Reclaimable>) -> HashSet<Uid> {
    all.map(|one| one.claim.uid.clone()).collect()
}

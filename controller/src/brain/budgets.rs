//! Budgets: feeding the book, and what a used-up one means for a pod that would get devices now.

use super::{Core, Effect, Regarding, Report, Seen, reasons};
use crate::act::Kept;
use crate::budget::account::AllocatedClaim;
use crate::budget::{Action, Around, Budget, Enforcement, NodeUsage, Verdict, part};
use crate::index::{Change, Node, ObjectKey, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Budgets are looked at so often.
const LOOK: Duration = Duration::from_secs(1);
/// Taints of nodes that nobody hears of: what they said is old.
const SILENT: [&str; 2] = ["node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service"];

impl Core {
    /// A budget changed.
    pub(super) fn budget(&mut self, seen: Seen<DynamicObject>) -> Change {
        let now = self.wall;
        match seen {
            Seen::Apply(object) => {
                if let Some(budget) = Budget::read(&object) {
                    self.book.apply_budget(budget, now);
                }
            }
            Seen::Delete(object) => {
                if let Some(key) = super::key_of(&object.metadata) {
                    self.book.delete_budget(&key);
                }
            }
            Seen::Reset(objects) => {
                self.synced.insert("budgets");
                self.book.reset_budgets(objects.iter().filter_map(Budget::read).collect(), now);
            }
        }
        self.budgets_looked = None;
        Change::Nothing
    }

    /// A node says something else.
    pub(super) fn node_usage(&mut self, seen: Seen<DynamicObject>) -> Change {
        match seen {
            Seen::Apply(object) => {
                if let Some(usage) = NodeUsage::read(&object) {
                    self.book.apply_usage(usage);
                }
            }
            Seen::Delete(object) => {
                self.book.delete_usage(object.metadata.name.as_deref().unwrap_or_default());
            }
            Seen::Reset(objects) => {
                self.synced.insert("nodeusages");
                self.book.reset_usages(objects.iter().filter_map(NodeUsage::read).collect());
            }
        }
        Change::Nothing
    }

    /// What became of something that the book wanted.
    pub(super) fn kept(&mut self, kept: Kept) -> Change {
        if let Err(error) = &kept.result {
            tracing::warn!(%error, "a budget could not be kept, trying again");
        }
        if let Action::Store { key, uid, revision, .. } = &kept.action {
            self.book.stored(key, uid, *revision, kept.result.ok(), self.wall);
        }
        Change::Nothing
    }

    /// Counts what there is now, at most once a second.
    pub fn keep_budgets(&mut self, now: Instant, wall: Timestamp) {
        self.wall = wall.as_second();
        if !self.settings.budgets || !self.is_synced() || !self.book.is_synced() {
            return;
        }
        if self.budgets_looked.is_some_and(|at| now.saturating_duration_since(at) < LOOK) {
            return;
        }
        self.budgets_looked = Some(now);
        let around = self.around();
        let mut back = false;
        for action in self.book.step(&around, self.wall) {
            match action {
                Action::Tell { key, uid, over, note } => {
                    tracing::info!(budget = %key, over, note, "a budget changed its state");
                    back |= !over;
                    self.tell(Report {
                        regarding: Regarding::Budget(key, uid),
                        warning: over,
                        reason: if over { reasons::BUDGET_USED_UP } else { reasons::BUDGET_BACK },
                        note,
                    });
                }
                action => self.effects.push(Effect::Keep(action)),
            }
        }
        self.metrics.budgets.update(&self.book);
        // Pods that were refused for another reason, or by a budget that is gone, are asked for anew too.
        let refused = std::mem::take(&mut self.refused);
        let (still, free): (HashSet<ObjectKey>, HashSet<ObjectKey>) =
            refused.into_iter().partition(|key| self.refusal(&key.namespace).is_some());
        self.refused = still;
        for key in &free {
            self.offer(key, now);
        }
        if back {
            self.queue.wake(now);
        }
        self.bind_within_budget(now);
    }

    fn around(&self) -> Around {
        let mut claims: HashMap<Arc<str>, Vec<AllocatedClaim>> = HashMap::new();
        let mut asked = HashMap::new();
        if !self.book.is_empty() {
            for claim in self.index.claims().filter(|claim| self.book.has_budget(&claim.key.namespace)) {
                let Some(allocation) = claim.allocation.as_ref().filter(|a| !a.held.is_empty()) else {
                    continue;
                };
                if let Some(part) = part::of_asked(&self.index, claim, allocation) {
                    asked.insert(claim.uid.clone(), part);
                }
                claims.entry(claim.key.namespace.clone()).or_default().push(AllocatedClaim {
                    uid: claim.uid.clone(),
                    name: claim.key.name.clone(),
                    since: part::allocated_at(claim),
                    part: part::of_allocation(&self.index, allocation),
                });
            }
        }
        let heard =
            |node: &Node| node.known && !node.taints.iter().any(|taint| SILENT.contains(&taint.key.as_str()));
        let nodes = self.book.nodes().filter(|name| self.index.node(name).is_some_and(heard));
        let gone = self.book.nodes().filter(|name| self.index.node(name).is_none_or(|node| !node.known));
        Around { claims, nodes: nodes.cloned().collect(), gone: gone.cloned().collect(), asked }
    }

    /// The used-up budget that holds a namespace back, if one does.
    pub(super) fn refusal(&self, namespace: &str) -> Option<Verdict> {
        self.book.verdict(namespace).filter(|verdict| verdict.enforcement == Enforcement::Refuse)
    }

    /// Whether a budget keeps a pod, for which devices were found, from getting them; it is told so.
    pub(super) fn is_refused(&mut self, pod: &Pod, now: Instant) -> bool {
        let Some(verdict) = self.book.verdict(&pod.key.namespace) else { return false };
        let first = !self.refused.contains(&pod.key);
        match verdict.enforcement {
            Enforcement::Refuse => {
                let note = format!("{}; the pod waits for its devices until then", verdict.note);
                if first {
                    self.metrics.budgets.pod(verdict.enforcement);
                }
                self.refused.insert(pod.key.clone());
                self.tell_pod(pod, reasons::BUDGET_REFUSED, &note, now);
                true
            }
            Enforcement::Warn | Enforcement::LowerPriority => {
                self.metrics.budgets.pod(verdict.enforcement);
                self.tell_pod(pod, reasons::BUDGET_EXCEEDED, &verdict.note, now);
                false
            }
        }
    }

    /// Whether a pod may be given devices as far as budgets are concerned: what is refused makes no room
    /// for itself either.
    pub fn may_allocate(&self, namespace: &str) -> bool {
        self.refusal(namespace).is_none()
    }
}

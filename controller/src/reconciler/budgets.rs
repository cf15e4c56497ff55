//! Budgets: feeds the book of budgets, and applies a used-up budget to a pod that would get devices now.

use super::{Effect, Reconciler, Regarding, Report, Seen, reasons};
use crate::writer::BudgetOutcome;
use aliquot_allocator::budget::{Action, AllocatedClaim, Budget, NodeReport, Presence, Verdict, part};
use aliquot_allocator::snapshot::{Change, Claim, Node, ObjectKey, Pod, Snapshot};
use aliquot_api::v1alpha1::gpu_budget::Enforcement;
use aliquot_model::names::pool_node;
use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval at which budgets are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Taints of nodes that are not heard from: their last report is old.
const SILENT: [&str; 2] = ["node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service"];

/// The state of the looks at budgets.
#[derive(Debug, Default)]
pub(super) struct Looks {
    last: Option<Instant>,
    /// Time of the last look, in seconds since the epoch.
    wall: i64,
    /// Nodes that changed, or that sent a report, since the last look.
    nodes: HashSet<Arc<str>>,
    /// Pods that a budget keeps waiting, by namespace.
    refused: HashMap<Arc<str>, HashSet<ObjectKey>>,
}

impl Looks {
    /// Returns true if a budget keeps a pod waiting.
    pub(super) fn has_refused(&self, pod: &ObjectKey) -> bool {
        self.refused.get(&pod.namespace).is_some_and(|pods| pods.contains(pod))
    }

    /// Forgets a pod that does not want a decision any more.
    pub(super) fn forget(&mut self, pod: &ObjectKey) {
        if let Some(pods) = self.refused.get_mut(&pod.namespace) {
            pods.remove(pod);
        }
    }
}

impl Reconciler {
    /// Takes in a change of budgets.
    pub(super) fn budget(&mut self, seen: Seen<DynamicObject>) -> Change {
        let now = self.budgets.wall;
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
        self.budgets.last = None;
        Change::Nothing
    }

    /// Takes in a change of usage reports of nodes.
    pub(super) fn node_usage(&mut self, seen: Seen<DynamicObject>) -> Change {
        match seen {
            Seen::Apply(object) => {
                if let Some(usage) = NodeReport::read(&object) {
                    self.budgets.nodes.insert(usage.node.clone());
                    self.book.apply_usage(usage);
                }
            }
            Seen::Delete(object) => {
                self.book.delete_usage(object.metadata.name.as_deref().unwrap_or_default());
            }
            Seen::Reset(objects) => {
                self.synced.insert("nodeusages");
                self.book.reset_usages(objects.iter().filter_map(NodeReport::read).collect());
                self.budget_nodes();
            }
        }
        Change::Nothing
    }

    /// Notes that a node changed.
    pub(super) fn budget_node(&mut self, name: &str) {
        if self.book.hears_from(name) {
            self.budgets.nodes.insert(name.into());
        }
    }

    /// Notes that any node may have changed.
    pub(super) fn budget_nodes(&mut self) {
        self.budgets.nodes.extend(self.book.nodes().cloned());
    }

    /// Takes in the result of an action of the book.
    pub(super) fn budget_written(&mut self, outcome: BudgetOutcome) -> Change {
        if let Err(error) = &outcome.result {
            tracing::warn!(%error, "a budget could not be kept, trying again");
        }
        if let Action::Store { key, uid, revision, .. } = &outcome.action {
            self.book.stored(key, uid, *revision, outcome.result.ok(), self.budgets.wall);
        }
        Change::Nothing
    }

    /// Brings the book up to date, at most once a second, and passes on its actions.
    pub fn keep_budgets(&mut self, now: Instant, wall: Timestamp) {
        self.budgets.wall = wall.as_second();
        if !self.settings.budgets || !self.is_synced() || !self.book.is_synced() {
            return;
        }
        if self.budgets.last.is_some_and(|at| now.saturating_duration_since(at) < LOOK) {
            return;
        }
        self.budgets.last = Some(now);
        self.tell_book();
        let mut back = false;
        for action in self.book.step(self.budgets.wall) {
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
                action => self.effects.push(Effect::WriteBudget(action)),
            }
        }
        self.metrics.budgets.update(&self.book);
        // Pods that were refused for another reason, or by a budget that is deleted, are offered again too.
        let book = &self.book;
        let free: Vec<ObjectKey> = self
            .budgets
            .refused
            .extract_if(|namespace, _| !book.refuses(namespace))
            .flat_map(|(_, pods)| pods)
            .collect();
        for key in &free {
            self.offer(key, now);
        }
        if back {
            self.queue.wake(now);
        }
        self.bind_within_budget(now);
    }

    /// Tells the book about changes of claims and nodes since the last look.
    fn tell_book(&mut self) {
        match self.index.take_changed_claims() {
            Some(changed) => {
                let swept = self.book.sweep();
                for key in changed.into_iter().chain(swept) {
                    if self.book.has_budget(&key.namespace) {
                        let claim = self.index.claim(&key).and_then(|claim| charged(&self.index, claim));
                        self.book.apply_claim(&key, claim);
                    }
                }
            }
            None => self.book.read_again(),
        }
        if !self.book.unread().is_empty() {
            let unread =
                self.index.claims().filter(|claim| self.book.unread().contains(&claim.key.namespace));
            let claims: Vec<(ObjectKey, AllocatedClaim)> =
                unread.filter_map(|claim| Some((claim.key.clone(), charged(&self.index, claim)?))).collect();
            self.book.read_claims(claims);
        }
        for name in std::mem::take(&mut self.budgets.nodes) {
            self.book.presence(&name, presence(self.index.node(&name)));
        }
    }

    /// Returns the verdict of the used-up budget that holds a namespace back; `None` if none does.
    pub(super) fn refusal(&self, namespace: &str) -> Option<Verdict> {
        self.book.verdict(namespace).filter(|verdict| verdict.enforcement == Enforcement::Refuse)
    }

    /// Returns true if a budget keeps a pod from the devices that were found for it, and reports that on the
    /// pod.
    pub(super) fn is_refused(&mut self, pod: &Pod, now: Instant) -> bool {
        let Some(verdict) = self.book.verdict(&pod.key.namespace) else { return false };
        let first = !self.budgets.has_refused(&pod.key);
        match verdict.enforcement {
            Enforcement::Refuse => {
                let note = format!("{}; the pod waits for its devices until then", verdict.note);
                if first {
                    self.metrics.budgets.pod(verdict.enforcement);
                }
                self.budgets.refused.entry(pod.key.namespace.clone()).or_default().insert(pod.key.clone());
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

    /// Returns true if budgets allow devices for pods of a namespace. A pod that a budget refuses makes no
    /// room for itself either.
    pub fn may_allocate(&self, namespace: &str) -> bool {
        !self.book.refuses(namespace)
    }
}

/// Returns a claim as it is charged; `None` if it has no devices of this driver.
fn charged(index: &Snapshot, claim: &Claim) -> Option<AllocatedClaim> {
    let allocation = claim.allocation.as_ref().filter(|allocation| !allocation.held.is_empty())?;
    let part = part::of_allocation(index, allocation);
    let pools = allocation.held.iter().map(|held| index.name(held.pool));
    Some(AllocatedClaim {
        uid: claim.uid.clone(),
        since: part::allocated_at(claim),
        part,
        asked: part::of_asked(index, claim, allocation),
        node: pools.filter_map(|pool| pool_node(index.driver(), pool)).next().map(Into::into),
        most: part.unwrap_or_else(|| part::at_most(allocation)),
        created: claim.created,
    })
}

fn presence(node: Option<&Node>) -> Presence {
    match node.filter(|node| node.known) {
        None => Presence::Gone,
        Some(node) if node.taints.iter().any(|taint| SILENT.contains(&taint.key.as_str())) => {
            Presence::Silent
        }
        Some(_) => Presence::Heard,
    }
}

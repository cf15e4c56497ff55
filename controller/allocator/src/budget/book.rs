//! The book: all budgets, what nodes report, and what has to be written. It is synchronous; the time is a
//! parameter.
//!
//! The order of writes matters. An account that counts a release is first stored in the budget's status. Only
//! then is the release acknowledged to its node, which forgets it. After a crash in between, the node repeats
//! the release, and an account that already has it does not count it again.

mod entry;
mod sights;

pub use sights::{AllocatedClaim, Presence};

use super::account::Extent;
use super::amount;
use super::kinds::{Budget, NodeReport, Terms};
use super::status::Standing;
use crate::api_time;
use crate::snapshot::{ObjectKey, Uid};
use aliquot_api::v1alpha1::gpu_budget::Enforcement;
use aliquot_model::charge::Release;
use entry::{Entry, account_of};
use serde_json::Value;
use sights::Sights;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// The longest time between two writes of an account, in seconds, while claims are charged. After an outage,
/// what was seen is known up to at most this long before it.
pub const HEARTBEAT: i64 = 15;
/// The lowest of the priorities that are Kubernetes' own (`system-cluster-critical`).
pub const SYSTEM: i32 = 2_000_000_000;
/// The time after which a failed write is repeated, in seconds.
const RETRY: i64 = 2;

/// A write or an event that the controller has to make.
#[derive(Debug, Clone)]
pub enum Action {
    /// Write the status of a budget.
    Store {
        /// The budget.
        key: ObjectKey,
        /// UID of the budget.
        uid: Uid,
        /// The `resourceVersion` that the status is based on.
        version: String,
        /// The new status.
        status: Value,
        /// The revision, to be handed back to [`Book::stored`].
        revision: u64,
    },
    /// Tell a node that its releases up to a number are counted.
    Acknowledge {
        /// The node.
        node: Arc<str>,
        /// The node's ledger.
        ledger: String,
        /// The number of the last release that is counted.
        number: u64,
    },
    /// Delete the record of a node that is gone and whose releases are all counted.
    Forget {
        /// The node.
        node: Arc<str>,
        /// The `resourceVersion` of the record that was counted.
        version: String,
    },
    /// Report in an event that a budget was used up, or has something left again.
    Tell {
        /// The budget.
        key: ObjectKey,
        /// UID of the budget.
        uid: Uid,
        /// True if the budget was used up.
        over: bool,
        /// The text of the event.
        note: String,
    },
}

/// A used-up budget and its consequence for pods of its namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// The budget.
    pub budget: ObjectKey,
    /// The consequence for pods.
    pub enforcement: Enforcement,
    /// The text for events of pods: the budget, what is used, the limit, and when it frees up.
    pub note: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Counted {
    ledger: String,
    number: u64,
    revision: u64,
}

/// All budgets, and what claims and nodes report for them.
#[derive(Debug, Default)]
pub struct Book {
    budgets: HashMap<ObjectKey, Entry>,
    of_namespace: HashMap<Arc<str>, BTreeSet<ObjectKey>>,
    sights: Sights,
    /// Namespaces that got a budget and whose claims were not read since.
    unread: HashSet<Arc<str>>,
    counted: HashMap<Arc<str>, Counted>,
    answering: HashMap<Arc<str>, i64>,
    revision: u64,
    synced: (bool, bool),
}

impl Book {
    /// Returns true once budgets and node usages have been listed.
    pub const fn is_synced(&self) -> bool {
        self.synced.0 && self.synced.1
    }

    /// Returns true if there are no budgets.
    pub fn is_empty(&self) -> bool {
        self.budgets.is_empty()
    }

    /// Adds or replaces a budget, as read from the API.
    pub fn apply_budget(&mut self, budget: Budget, now: i64) {
        let keys = self.of_namespace.entry(budget.key.namespace.clone()).or_default();
        if keys.is_empty() {
            self.unread.insert(budget.key.namespace.clone());
        }
        keys.insert(budget.key.clone());
        match self.budgets.get_mut(&budget.key) {
            Some(entry) if entry.budget.uid == budget.uid => {
                if is_older(&budget.version, &entry.budget.version) {
                    return;
                }
                let foreign = budget.stored.as_ref().is_none_or(|stored| !entry.ours.contains(stored));
                if foreign && entry.budget.version != budget.version && !entry.ours.is_empty() {
                    tracing::warn!(budget = %budget.key, "its account was written by somebody else, which is taken over");
                    entry.account = account_of(&budget, now);
                    entry.extent = Extent::All;
                    entry.ours.clear();
                }
                if entry.substitutes() != budget.substitutes() {
                    entry.extent = Extent::All;
                }
                entry.looked_at = i64::MIN;
                entry.budget = budget;
            }
            _ => {
                self.budgets.insert(budget.key.clone(), Entry::new(budget, now));
            }
        }
    }

    /// Removes a budget.
    pub fn delete_budget(&mut self, key: &ObjectKey) {
        self.budgets.remove(key);
        if let Some(keys) = self.of_namespace.get_mut(&key.namespace) {
            keys.remove(key);
            if keys.is_empty() {
                self.of_namespace.remove(&key.namespace);
                self.unread.remove(&key.namespace);
                self.sights.reset_claims(&key.namespace, Vec::new());
            }
        }
    }

    /// Replaces all budgets.
    pub fn reset_budgets(&mut self, budgets: Vec<Budget>, now: i64) {
        self.synced.0 = true;
        let kept: HashSet<&ObjectKey> = budgets.iter().map(|budget| &budget.key).collect();
        let gone: Vec<ObjectKey> = self.budgets.keys().filter(|key| !kept.contains(key)).cloned().collect();
        for key in gone {
            self.delete_budget(&key);
        }
        for budget in budgets {
            self.apply_budget(budget, now);
        }
    }

    /// Returns the namespaces whose claims must all be passed to [`Self::read_claims`] before the next step.
    pub const fn unread(&self) -> &HashSet<Arc<str>> {
        &self.unread
    }

    /// Requests that all claims are read again, because changes of claims may have been missed.
    pub fn read_again(&mut self) {
        self.unread.extend(self.of_namespace.keys().cloned());
    }

    /// Takes in all claims with devices of this driver in the namespaces that are to be read.
    pub fn read_claims(&mut self, claims: impl IntoIterator<Item = (ObjectKey, AllocatedClaim)>) {
        let mut all: HashMap<Arc<str>, Vec<(ObjectKey, AllocatedClaim)>> = HashMap::new();
        for (key, claim) in claims {
            all.entry(key.namespace.clone()).or_default().push((key, claim));
        }
        for namespace in std::mem::take(&mut self.unread) {
            let claims = all.remove(&namespace).unwrap_or_default();
            self.sights.reset_claims(&namespace, claims);
        }
    }

    /// Takes in a claim; `None` if it has no devices of this driver or does not exist.
    pub fn apply_claim(&mut self, key: &ObjectKey, claim: Option<AllocatedClaim>) {
        if self.has_budget(&key.namespace) {
            self.sights.claim(key, claim);
        }
    }

    /// Returns claims that the caller should compare with the cluster now, although no change of them was
    /// reported. It is a fixed number of all claims, in turn, and as many of those whose part is not known.
    pub fn sweep(&mut self) -> Vec<ObjectKey> {
        self.sights.sweep()
    }

    /// Takes in what a node reports now.
    pub fn apply_usage(&mut self, usage: NodeReport) {
        self.sights.apply_usage(usage);
    }

    /// Removes the record of a node.
    pub fn delete_usage(&mut self, node: &str) {
        self.sights.delete_usage(node);
        self.counted.remove(node);
    }

    /// Replaces the records of all nodes.
    pub fn reset_usages(&mut self, usages: Vec<NodeReport>) {
        self.synced.1 = true;
        let kept: HashSet<&Arc<str>> = usages.iter().map(|usage| &usage.node).collect();
        self.counted.retain(|node, _| kept.contains(node));
        self.sights.reset_usages(usages);
    }

    /// Sets whether a node with a record exists and can be reached.
    pub fn presence(&mut self, node: &str, presence: Presence) {
        self.sights.presence(node, presence);
    }

    /// Counts the current state, and returns what has to be done. Returns nothing until everything was listed
    /// and read.
    pub fn step(&mut self, now: i64) -> Vec<Action> {
        if !self.is_synced() || !self.unread.is_empty() {
            return Vec::new();
        }
        self.revision = self.revision.saturating_add(1);
        let mut actions = Vec::new();
        let touched = self.sights.take_touched();
        let mut all = None;
        for entry in self.budgets.values_mut() {
            let namespace = &entry.budget.key.namespace;
            let keep = entry.counts_from(now);
            let substitutes = entry.substitutes();
            let extent = std::mem::replace(&mut entry.extent, Extent::Changed);
            let uids = match extent {
                Extent::All => all.get_or_insert_with(|| self.sights.all()).get(namespace),
                Extent::Changed => touched.get(namespace),
            };
            let sights = &self.sights;
            let seen = uids.into_iter().flatten();
            let seen = seen.map(|uid| (uid.clone(), sights.of(namespace, uid, substitutes)));
            let changed = entry.account.observe(seen, extent, keep, now);
            if changed {
                entry.changed = self.revision;
                entry.dirty.get_or_insert(self.revision);
            }
            entry.judge(changed, now, &mut actions);
            entry.store(self.revision, now, &mut actions);
        }
        self.acknowledge(now, &mut actions);
        actions
    }

    fn acknowledge(&mut self, now: i64, actions: &mut Vec<Action>) {
        for usage in self.sights.waiting() {
            let node = &usage.node;
            let last = usage.spec.released.last().map(|release| release.number);
            if self.sights.is_over(usage)
                && usage.spec.released.iter().all(|release| self.is_past(usage, release, now))
            {
                self.answering.entry(node.clone()).or_insert_with(|| {
                    actions.push(Action::Forget { node: node.clone(), version: usage.version.clone() });
                    now.saturating_add(RETRY)
                });
            }
            let Some(last) = last else { continue };
            let known = self.counted.get(node);
            if known.is_none_or(|known| known.ledger != usage.spec.ledger || known.number < last) {
                let counted =
                    Counted { ledger: usage.spec.ledger.clone(), number: last, revision: self.revision };
                self.counted.insert(node.clone(), counted);
            }
            let Some(counted) =
                self.counted.get(node).filter(|counted| counted.number > usage.acknowledged())
            else {
                continue;
            };
            let stored = usage.spec.released.iter().all(|release| {
                let keys = self.of_namespace.get(release.claim.namespace.as_str());
                keys.into_iter()
                    .flatten()
                    .filter_map(|key| self.budgets.get(key))
                    .all(|entry| entry.dirty.is_none_or(|dirty| dirty > counted.revision))
            });
            if stored && !self.answering.contains_key(node) {
                self.answering.insert(node.clone(), now.saturating_add(RETRY));
                actions.push(Action::Acknowledge {
                    node: node.clone(),
                    ledger: counted.ledger.clone(),
                    number: counted.number,
                });
            }
        }
        self.answering.retain(|_, until| *until > now);
    }

    /// Returns true if a release is counted for good and would not be counted again if the node came back and
    /// listed it anew: it is older than every window of its namespace.
    fn is_past(&self, usage: &NodeReport, release: &Release, now: i64) -> bool {
        let keys = self.of_namespace.get(release.claim.namespace.as_str()).into_iter().flatten();
        let mut entries = keys.filter_map(|key| self.budgets.get(key));
        release.number <= usage.acknowledged() && entries.all(|entry| release.until <= entry.counts_from(now))
    }

    /// Takes in the result of a status write. `version` is the object's `resourceVersion` after the write;
    /// `None` means that the write failed.
    pub fn stored(&mut self, key: &ObjectKey, uid: &str, revision: u64, version: Option<String>, now: i64) {
        let Some(entry) = self.budgets.get_mut(key).filter(|entry| *entry.budget.uid == *uid) else { return };
        entry.writing = None;
        let Some(version) = version else {
            entry.retry_at = now.saturating_add(RETRY);
            return;
        };
        if !is_older(&version, &entry.budget.version) {
            entry.budget.version = version;
        }
        entry.dirty = (entry.changed > revision).then_some(revision.saturating_add(1));
    }

    /// Returns the strictest used-up budget of a namespace.
    fn strictest(&self, namespace: &str) -> Option<(&Entry, &Terms, &Standing)> {
        let keys = self.of_namespace.get(namespace)?;
        let over = keys.iter().filter_map(|key| self.budgets.get(key)).filter_map(|entry| {
            let terms = entry.budget.terms.as_ref().ok()?;
            let standing = entry.standing.as_ref().filter(|standing| standing.is_over())?;
            Some((entry, terms, standing))
        });
        over.max_by_key(|(_, terms, _)| terms.enforcement)
    }

    /// Returns what the strictest used-up budget of a namespace means for its pods; `None` if no budget is
    /// used up.
    pub fn verdict(&self, namespace: &str) -> Option<Verdict> {
        let (entry, terms, standing) = self.strictest(namespace)?;
        let free = match standing.frees_at {
            Some(at) => format!("; it frees up at {} at the earliest", api_time::time(at)),
            None => "; it does not free up by itself".to_owned(),
        };
        Some(Verdict {
            budget: entry.budget.key.clone(),
            enforcement: terms.enforcement,
            note: format!(
                "budget {} is used up: {} of {} GPU-hours ({}){free}",
                entry.budget.key,
                amount::hours(standing.used),
                amount::short(standing.limit),
                terms.window
            ),
        })
    }

    /// Returns the used-up budget with `LowerPriority` that makes the pods of a namespace the first victims.
    pub fn first_victim_of(&self, namespace: &str) -> Option<&ObjectKey> {
        let (entry, terms, _) = self.strictest(namespace)?;
        (terms.enforcement == Enforcement::LowerPriority).then_some(&entry.budget.key)
    }

    /// Returns how many claims the steps have looked at for the budgets that are known, as a measure of cost.
    pub fn visited(&self) -> u64 {
        self.budgets.values().map(|entry| entry.account.visited()).sum()
    }

    /// Returns true if a used-up budget makes new pods of a namespace wait.
    pub fn refuses(&self, namespace: &str) -> bool {
        self.strictest(namespace).is_some_and(|(_, terms, _)| terms.enforcement == Enforcement::Refuse)
    }

    /// Returns true if the pods of any namespace are the first victims.
    pub fn has_first_victims(&self) -> bool {
        self.of_namespace.keys().any(|namespace| self.first_victim_of(namespace).is_some())
    }

    /// Returns the standing of a pod for the choice of victims. This is its priority. If its namespace is
    /// over a budget with `LowerPriority`, it is a value below every pod that is within its budget, and in
    /// the order of priorities. Pods that keep the cluster itself running keep their priority.
    pub fn standing(&self, namespace: &str, priority: i32) -> i32 {
        if priority >= SYSTEM || self.first_victim_of(namespace).is_none() {
            return priority;
        }
        let above_least = i64::from(priority).saturating_sub(i64::from(i32::MIN)) / 4;
        i32::try_from(i64::from(i32::MIN).saturating_add(above_least)).unwrap_or(i32::MIN)
    }

    /// Returns true if a namespace has a budget.
    pub fn has_budget(&self, namespace: &str) -> bool {
        self.of_namespace.contains_key(namespace)
    }

    /// Returns true if a node has a record.
    pub fn hears_from(&self, node: &str) -> bool {
        self.sights.hears_from(node)
    }

    /// Returns the nodes that have a record.
    pub fn nodes(&self) -> impl Iterator<Item = &Arc<str>> {
        self.sights.nodes()
    }

    /// Returns every budget with its standing, for metrics.
    pub fn standings(&self) -> impl Iterator<Item = (&ObjectKey, &Standing)> {
        self.budgets.iter().filter_map(|(key, entry)| Some((key, entry.standing.as_ref()?)))
    }

    /// Returns the number of releases that nodes list and that are not acknowledged, for metrics.
    pub fn pending_releases(&self) -> usize {
        let pending = |usage: &NodeReport| {
            let acknowledged = usage.acknowledged();
            usage.spec.released.iter().filter(|release| release.number > acknowledged).count()
        };
        self.sights.waiting().map(pending).sum()
    }
}

/// Returns true if a version is older than another: a watch may show an older object than a write has
/// returned.
fn is_older(version: &str, than: &str) -> bool {
    matches!((version.parse::<u64>(), than.parse::<u64>()), (Ok(version), Ok(than)) if version < than)
}

#[cfg(test)]
#[path = "book/tests.rs"]
mod tests;

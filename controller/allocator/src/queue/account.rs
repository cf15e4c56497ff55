//! Measures what decisions cost, for pods and for claims before their pods, and chooses the next decision
//! accordingly.
//!
//! Seven eighths of the time go by order. One eighth goes by waiting: to pods and claims that have been ready
//! for [`GIVES_WAY`] without a turn, for whatever reason they are behind others. Namespaces share that eighth
//! by time. So pods in front make those behind them wait for a limited time, and pods behind take at most an
//! eighth of the time from those in front.

use super::{Queue, Rank};
use crate::snapshot::ObjectKey;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time that a pod or claim waits behind others without a share of the time.
pub const GIVES_WAY: Duration = Duration::from_secs(30);
/// The divisor of the share for those that have waited this long: one of this many parts.
const PARTS: u32 = 8;

/// A decision up to this long is not counted against its namespace.
pub(super) const CHEAP: Duration = Duration::from_millis(20);
/// The divisor of the pace at which spent time is forgotten.
const FORGOTTEN: u32 = 10;
/// The most decision time that is counted against a namespace.
const MOST_SPENT: Duration = Duration::from_secs(5);

/// The kind of object that a decision is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// A pod.
    Pod,
    /// A claim that wants devices before its pod.
    Claim,
}

/// The decision that comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Next {
    /// The kind of object.
    pub is: For,
    /// The key of the pod or claim.
    pub key: ObjectKey,
    /// True if it gets only a short look: it had none, and others wait.
    pub is_first_look: bool,
    /// True if it is decided because it has waited, not by order.
    has_waited: bool,
}

/// The cost of decisions.
#[derive(Debug, Default)]
pub struct Account {
    /// For each namespace that spent much decision time: the time spent, and when it was last updated.
    spent: HashMap<Arc<str>, (Duration, Instant)>,
    /// The total time spent on decisions by order.
    by_order: Duration,
    /// The total time spent on decisions by waiting.
    by_waiting: Duration,
    /// The time by waiting that namespaces have had. A namespace that had less than `least` counts as if it
    /// had had `least`, so no namespace saves up time.
    had: HashMap<Arc<str>, Duration>,
    least: Duration,
}

impl Account {
    /// Returns the next pod, or the next claim if no pod is ready; those that have waited for long get their
    /// share. The object stays in its queue, and the caller has to park, delay, offer or remove it there.
    pub fn next(&mut self, pods: &mut Queue, claims: &mut Queue, now: Instant) -> Option<Next> {
        self.forget(now);
        let (are_pods_ready, _) = (pods.has_ready(now), claims.has_ready(now));
        let first = pods.first(self).map(|rank| (For::Pod, rank));
        let first = first.or_else(|| claims.first(self).map(|rank| (For::Claim, rank)))?;
        let waited = self.has_waited(pods, claims, now);
        let has_waited = waited.is_some();
        let (is, rank) = waited.unwrap_or(first);
        let is_first_look = match is {
            For::Pod => {
                pods.take(&rank, now);
                pods.is_first_look(&rank)
            }
            For::Claim => {
                claims.take(&rank, now);
                claims.is_first_look(&rank) || (are_pods_ready && !rank.behind)
            }
        };
        if has_waited {
            self.least = self.had(&rank.key.namespace);
            self.had.retain(|_, had| *had > self.least);
        }
        Some(Next { is, key: rank.key, is_first_look, has_waited })
    }

    /// Notes how long the decision took.
    pub fn took(&mut self, next: &Next, cost: Duration, now: Instant) {
        let namespace = &next.key.namespace;
        if next.has_waited {
            self.by_waiting = self.by_waiting.saturating_add(cost);
            let had = self.had(namespace).saturating_add(cost);
            self.had.insert(namespace.clone(), had);
        } else {
            self.by_order = self.by_order.saturating_add(cost);
        }
        self.hold_against(namespace, cost.saturating_sub(CHEAP), now);
    }

    /// Counts decision time against a namespace.
    pub(super) fn hold_against(&mut self, namespace: &Arc<str>, much: Duration, now: Instant) {
        if !much.is_zero() {
            let (spent, _) = self.spent.entry(namespace.clone()).or_insert((Duration::ZERO, now));
            *spent = spent.saturating_add(much).min(MOST_SPENT);
        }
    }

    /// Returns the decision time that is counted against a namespace.
    pub(super) fn spent(&self, namespace: &str) -> Duration {
        self.spent.get(namespace).map_or(Duration::ZERO, |(spent, _)| *spent)
    }

    fn forget(&mut self, now: Instant) {
        self.spent.retain(|_, (spent, at)| {
            *spent = spent.saturating_sub(now.saturating_duration_since(*at) / FORGOTTEN);
            *at = now.max(*at);
            !spent.is_zero()
        });
    }

    /// Returns the pod or claim that has waited for long and whose namespace had the least time, if the share
    /// for waiting is due.
    fn has_waited(&mut self, pods: &Queue, claims: &Queue, now: Instant) -> Option<(For, Rank)> {
        let due = self.by_order / (PARTS - 1);
        if self.by_waiting >= due {
            return None;
        }
        let pods = pods.longest_ready().map(|(since, rank)| (since, rank, For::Pod));
        let claims = claims.longest_ready().map(|(since, rank)| (since, rank, For::Claim));
        let waited =
            pods.chain(claims).filter(|(since, ..)| now.saturating_duration_since(*since) >= GIVES_WAY);
        let longest = waited.min_by_key(|(since, rank, _)| (self.had(&rank.key.namespace), *since));
        if longest.is_none() {
            // A share that nobody wanted is not saved up.
            self.by_waiting = due;
            self.had.clear();
        }
        longest.map(|(_, rank, is)| (is, rank.clone()))
    }

    /// Returns the time by waiting that a namespace counts as having had.
    fn had(&self, namespace: &str) -> Duration {
        self.had.get(namespace).map_or(self.least, |had| self.least.max(*had))
    }
}

//! What decisions cost, for pods and for claims before their pods alike, and who has the next one because of that.
//!
//! Seven eighths of the time go by order, one eighth by how long somebody has waited: to what has been ready for
//! [`GIVES_WAY`] without a turn, in whichever way it stands behind. Namespaces share that eighth by time. So what
//! stands before costs what stands behind its patience, and what stands behind costs what stands before an eighth.

use super::{Queue, Rank};
use crate::index::ObjectKey;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For no longer than this anything gives way to others without a part of the time.
pub const GIVES_WAY: Duration = Duration::from_secs(30);
/// The part that goes to those who gave way so long: one of so many.
const PARTS: u32 = 8;

/// A decision up to this long is not held against its namespace.
pub(super) const CHEAP: Duration = Duration::from_millis(20);
/// What a namespace has spent is forgotten at this part of the pace at which it was spent.
const FORGOTTEN: u32 = 10;
/// Most that is held against a namespace.
const MOST_SPENT: Duration = Duration::from_secs(5);

/// What a decision is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// A pod.
    Pod,
    /// A claim that wants devices before its pod.
    Claim,
}

/// Who is decided next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Next {
    /// What it is.
    pub is: For,
    /// Which one.
    pub key: ObjectKey,
    /// Whether it is to be given a short look only: it had none, and others wait.
    pub is_first_look: bool,
    /// Whether it is decided because it waited, and not by order.
    has_waited: bool,
}

/// What decisions cost.
#[derive(Debug, Default)]
pub struct Account {
    /// Decision time of namespaces that spent much of it, and when it was that.
    spent: HashMap<Arc<str>, (Duration, Instant)>,
    /// What went by order in all,
    by_order: Duration,
    /// and by waiting.
    by_waiting: Duration,
    /// What namespaces had of the latter. Who had less than `least` counts as if it had that: nobody saves up.
    had: HashMap<Arc<str>, Duration>,
    least: Duration,
}

impl Account {
    /// The next pod, or the next claim where no pod is ready; but those that waited for long have their part. It stays
    /// known in its queue, and has to be parked, delayed, offered or removed there.
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

    /// Holds decision time against a namespace.
    pub(super) fn hold_against(&mut self, namespace: &Arc<str>, much: Duration, now: Instant) {
        if !much.is_zero() {
            let (spent, _) = self.spent.entry(namespace.clone()).or_insert((Duration::ZERO, now));
            *spent = spent.saturating_add(much).min(MOST_SPENT);
        }
    }

    /// What is held against a namespace.
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

    /// Of the namespaces in which somebody has waited for long the one that had least, if it is time for that.
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
            // A part that nobody wanted is not saved up.
            self.by_waiting = due;
            self.had.clear();
        }
        longest.map(|(_, rank, is)| (is, rank.clone()))
    }

    /// What a namespace counts as having had.
    fn had(&self, namespace: &str) -> Duration {
        self.had.get(namespace).map_or(self.least, |had| self.least.max(*had))
    }
}

//! Decides which pod is decided next.
//!
//! Pods are ordered by priority, then by age. Among pods of one priority, those come first whose namespace
//! has not spent much decision time recently. While others wait, each pod first gets a short look; a pod that
//! this does not decide goes behind the pods of its priority that had no look yet. Pods that wait long behind
//! others get a share of the time in any case (see [`account`]).
//!
//! A pod that did not fit waits until something changes, each time longer. A pod that ran out of time waits
//! in proportion to the time that it took, whatever changes.

pub mod account;

use crate::snapshot::ObjectKey;
use account::Account;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The order of pods: first the higher priority, then pods without an undecided short look, then the older,
/// then by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    priority: Reverse<i32>,
    behind: bool,
    created: i64,
    key: ObjectKey,
}

impl Rank {
    /// Returns the rank of a pod, or of a claim that wants devices before its pod.
    pub const fn new(key: ObjectKey, priority: i32, created: i64) -> Self {
        Self { priority: Reverse(priority), behind: false, created, key }
    }
}

/// The place of a pod in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Ready to be decided, since this time.
    Ready(Instant),
    /// Waits until this time, whatever happens.
    Delayed(Instant),
    /// Waits until something changes.
    Parked,
}

#[derive(Debug, Clone)]
struct Entry {
    rank: Rank,
    place: Place,
    failures: u32,
    last: Option<Instant>,
    /// How many times in a row the pod ran out of time.
    late: u32,
    /// True if the pod waits because it ran out of time, so nothing makes it ready earlier.
    owes: bool,
}

/// The ready pods of one namespace: by order, and by the time since which they are ready.
#[derive(Debug, Default)]
struct Lane {
    order: BTreeSet<Rank>,
    since: BTreeSet<(Instant, Rank)>,
}

/// A pod that ran out of time waits this many times as long as it took, doubled each time.
const PATIENCE: u32 = 20;
/// The longest wait of such a pod.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// Returns how long a pod waits that ran out of time for the n-th time in a row.
pub fn wait_of_late(cost: Duration, times: u32) -> Duration {
    let doubled = 1u32.checked_shl(times.saturating_sub(1)).unwrap_or(u32::MAX);
    cost.saturating_mul(PATIENCE).saturating_mul(doubled).min(LONGEST_WAIT)
}

/// The pods that wait for a decision.
#[derive(Debug)]
pub struct Queue {
    entries: HashMap<ObjectKey, Entry>,
    ready: BTreeSet<Rank>,
    /// The ready pods by namespace.
    lanes: BTreeMap<Arc<str>, Lane>,
    delayed: BTreeSet<(Instant, ObjectKey)>,
    wakes: u64,
    first_delay: Duration,
    longest_delay: Duration,
}

impl Queue {
    /// Creates an empty queue. The parameters are the shortest and the longest wait after a failure.
    pub fn new(first_delay: Duration, longest_delay: Duration) -> Self {
        Self {
            entries: HashMap::new(),
            ready: BTreeSet::new(),
            lanes: BTreeMap::new(),
            delayed: BTreeSet::new(),
            wakes: 0,
            first_delay,
            longest_delay,
        }
    }

    /// Adds a pod, or makes a waiting pod ready because the pod itself has changed. A pod that ran out of
    /// time does not become ready, as otherwise a change of its labels would shorten its wait.
    pub fn offer(&mut self, rank: Rank, now: Instant) {
        let before = self.take_out(&rank.key);
        let behind = before.as_ref().is_some_and(|entry| entry.rank.behind);
        let rank = Rank { behind, ..rank };
        match before {
            Some(entry) if entry.owes || matches!(entry.place, Place::Ready(_)) => {
                let place = entry.place;
                self.put(Entry { rank, ..entry }, place);
            }
            Some(entry) => self.put(Entry { rank, ..entry }, Place::Ready(now)),
            None => {
                let place = Place::Ready(now);
                self.put(Entry { rank, place, failures: 0, last: None, late: 0, owes: false }, place);
            }
        }
    }

    /// Removes a pod that no longer needs a decision.
    pub fn remove(&mut self, pod: &ObjectKey) {
        self.take_out(pod);
    }

    /// Returns the first pod in order. Among the pods of the highest priority, this is the oldest if its
    /// namespace has spent nothing recently, else one of the namespace that has spent the least.
    fn first(&self, account: &Account) -> Option<Rank> {
        let first = self.ready.first()?;
        if account.spent(&first.key.namespace).is_zero() {
            return Some(first.clone());
        }
        let firsts = self.lanes.iter().filter_map(|(namespace, lane)| Some((namespace, lane.order.first()?)));
        let firsts = firsts.filter(|(_, rank)| rank.priority == first.priority);
        firsts.map(|(namespace, rank)| (account.spent(namespace), rank)).min().map(|(_, rank)| rank.clone())
    }

    /// Returns for each namespace the pod that has been ready for the longest time, and since when.
    fn longest_ready(&self) -> impl Iterator<Item = (Instant, &Rank)> {
        self.lanes.values().filter_map(|lane| lane.since.first()).map(|(since, rank)| (*since, rank))
    }

    /// Notes that a pod is being decided now.
    fn take(&mut self, rank: &Rank, now: Instant) {
        if let Some(mut entry) = self.take_out(&rank.key) {
            entry.last = Some(now);
            self.put(entry, Place::Parked);
        }
    }

    /// Returns true if a pod that was taken gets only a short look: it had none, and another pod is ready
    /// that has a higher priority, or has the same priority and had no look yet.
    fn is_first_look(&self, rank: &Rank) -> bool {
        let waits = |next: &Rank| match next.priority.cmp(&rank.priority) {
            Ordering::Less => true,
            Ordering::Equal => !next.behind,
            Ordering::Greater => false,
        };
        !rank.behind && self.ready.first().is_some_and(waits)
    }

    /// Puts a pod behind those that had no short look yet, because its short look did not decide it. The full
    /// cost of the look is counted against its namespace.
    pub fn put_behind(&mut self, pod: &ObjectKey, cost: Duration, account: &mut Account, now: Instant) {
        account.hold_against(&pod.namespace, cost, now);
        if let Some(mut entry) = self.take_out(pod) {
            entry.rank.behind = true;
            self.put(entry, Place::Ready(now));
        }
    }

    /// Notes that a pod ran out of time after `cost`. It waits in proportion to that, whatever changes.
    /// Returns how many times in a row this has happened, and how long the pod waits.
    pub fn run_late(&mut self, pod: &ObjectKey, cost: Duration, now: Instant) -> (u32, Duration) {
        let times = self.entries.get(pod).map_or(0, |entry| entry.late).saturating_add(1);
        let wait = wait_of_late(cost, times).max(self.first_delay);
        self.put_off(pod, times, now + wait);
        (times, wait)
    }

    /// Makes a pod wait until a time, as a pod that ran out of time so many times.
    pub fn put_off(&mut self, pod: &ObjectKey, times: u32, until: Instant) {
        if let Some(mut entry) = self.take_out(pod) {
            (entry.late, entry.owes) = (times, true);
            self.put(entry, Place::Delayed(until));
        }
    }

    /// Notes that a pod was decided in time.
    pub fn in_time(&mut self, pod: &ObjectKey) {
        if let Some(entry) = self.entries.get_mut(pod) {
            entry.late = 0;
            // A pod that is being decided is in no order, so its rank may be changed.
            if entry.place == Place::Parked {
                entry.rank.behind = false;
            }
        }
    }

    /// Returns true if a ready pod comes before this rank.
    pub fn is_ahead(&mut self, rank: &Rank, now: Instant) -> bool {
        self.promote(now);
        self.ready.first().is_some_and(|first| first < rank)
    }

    /// Makes a pod that did not fit wait for a change.
    pub fn park(&mut self, pod: &ObjectKey) {
        if let Some(mut entry) = self.take_out(pod) {
            entry.failures = entry.failures.saturating_add(1);
            self.put(entry, Place::Parked);
        }
    }

    /// Makes a pod wait after an error; it is tried again without a change, each time later.
    pub fn delay(&mut self, pod: &ObjectKey, now: Instant) {
        if let Some(mut entry) = self.take_out(pod) {
            entry.failures = entry.failures.saturating_add(1);
            let until = now + self.wait(entry.failures);
            self.put(entry, Place::Delayed(until));
        }
    }

    /// Makes a pod wait until a time, whatever changes.
    pub fn hold_back(&mut self, pod: &ObjectKey, until: Instant) {
        if let Some(entry) = self.take_out(pod) {
            self.put(entry, Place::Delayed(until));
        }
    }

    /// Notes that there may be room: pods that did not fit are tried again. No pod is tried more often than
    /// its failures allow, so that many pods that never fit do not take all the time.
    pub fn wake(&mut self, now: Instant) {
        self.wakes = self.wakes.wrapping_add(1);
        let parked: Vec<ObjectKey> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.place == Place::Parked)
            .map(|(pod, _)| pod.clone())
            .collect();
        for pod in parked {
            let Some(entry) = self.take_out(&pod) else { continue };
            let until = entry.last.map_or(now, |last| last + self.wait(entry.failures));
            self.put(entry, if until <= now { Place::Ready(now) } else { Place::Delayed(until) });
        }
    }

    /// Returns how often there may have been room. What did not fit since the last time does not fit now.
    pub const fn wakes(&self) -> u64 {
        self.wakes
    }

    /// Returns when the next waiting pod becomes ready by itself.
    pub fn next(&self) -> Option<Instant> {
        self.delayed.first().map(|(until, _)| *until)
    }

    /// Returns true if a pod is ready now.
    pub fn has_ready(&mut self, now: Instant) -> bool {
        self.promote(now);
        !self.ready.is_empty()
    }

    /// Returns the numbers of ready, delayed and parked pods.
    pub fn lengths(&self) -> (usize, usize, usize) {
        let waiting = self.ready.len() + self.delayed.len();
        (self.ready.len(), self.delayed.len(), self.entries.len().saturating_sub(waiting))
    }

    fn promote(&mut self, now: Instant) {
        while let Some((_, pod)) = self.delayed.first().filter(|(until, _)| *until <= now).cloned() {
            let Some(mut entry) = self.take_out(&pod) else { break };
            entry.owes = false;
            self.put(entry, Place::Ready(now));
        }
    }

    fn wait(&self, failures: u32) -> Duration {
        let doubled = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first_delay.saturating_mul(doubled).min(self.longest_delay)
    }

    fn take_out(&mut self, pod: &ObjectKey) -> Option<Entry> {
        let entry = self.entries.remove(pod)?;
        match entry.place {
            Place::Ready(since) => {
                self.ready.remove(&entry.rank);
                if let Some(lane) = self.lanes.get_mut(&pod.namespace) {
                    lane.order.remove(&entry.rank);
                    lane.since.remove(&(since, entry.rank.clone()));
                    if lane.order.is_empty() {
                        self.lanes.remove(&pod.namespace);
                    }
                }
            }
            Place::Delayed(until) => {
                self.delayed.remove(&(until, pod.clone()));
            }
            Place::Parked => {}
        }
        Some(entry)
    }

    /// Puts an entry that was taken out into its new place.
    fn put(&mut self, entry: Entry, place: Place) {
        let pod = entry.rank.key.clone();
        match place {
            Place::Ready(since) => {
                let lane = self.lanes.entry(pod.namespace.clone()).or_default();
                lane.order.insert(entry.rank.clone());
                lane.since.insert((since, entry.rank.clone()));
                self.ready.insert(entry.rank.clone());
            }
            Place::Delayed(until) => {
                self.delayed.insert((until, pod.clone()));
            }
            Place::Parked => {}
        }
        self.entries.insert(pod, Entry { place, ..entry });
    }
}

#[cfg(test)]
mod tests;

//! Which pod is decided next: by priority, then age; of pods of one priority those first whose namespace has not
//! spent much time on decisions of late. While others wait, each is first given a short look; what that does not
//! decide goes behind those of its priority that had none. What waits for long behind others has a part of the time,
//! whatever comes (see [`account`]). What did not fit waits until something changes, and each time longer; what ran
//! out of time waits in proportion to what it cost, whatever changes.

pub mod account;

use crate::index::ObjectKey;
use account::Account;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Order of pods: higher priority first, then those that were not looked at in vain, then older, then by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    priority: Reverse<i32>,
    behind: bool,
    created: i64,
    key: ObjectKey,
}

impl Rank {
    /// The rank of a pod, or of a claim before its pod.
    pub const fn new(key: ObjectKey, priority: i32, created: i64) -> Self {
        Self { priority: Reverse(priority), behind: false, created, key }
    }
}

/// Where a pod is in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Since then.
    Ready(Instant),
    /// Until then, whatever happens.
    Delayed(Instant),
    /// Until something changes.
    Parked,
}

#[derive(Debug, Clone)]
struct Entry {
    rank: Rank,
    place: Place,
    failures: u32,
    last: Option<Instant>,
    /// How often in a row it ran out of time.
    late: u32,
    /// Whether it waits for that, so that nothing makes it ready before.
    owes: bool,
}

/// What is ready in one namespace: by order, and by since when.
#[derive(Debug, Default)]
struct Lane {
    order: BTreeSet<Rank>,
    since: BTreeSet<(Instant, Rank)>,
}

/// What ran out of time waits so many times as long as it took, doubled each time.
const PATIENCE: u32 = 20;
/// And this long at most.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// How long something waits that ran out of time for the n-th time in a row.
pub fn wait_of_late(cost: Duration, times: u32) -> Duration {
    let doubled = 1u32.checked_shl(times.saturating_sub(1)).unwrap_or(u32::MAX);
    cost.saturating_mul(PATIENCE).saturating_mul(doubled).min(LONGEST_WAIT)
}

/// Pods that want a decision.
#[derive(Debug)]
pub struct Queue {
    entries: HashMap<ObjectKey, Entry>,
    ready: BTreeSet<Rank>,
    /// The same by namespace.
    lanes: BTreeMap<Arc<str>, Lane>,
    delayed: BTreeSet<(Instant, ObjectKey)>,
    wakes: u64,
    first_delay: Duration,
    longest_delay: Duration,
}

impl Queue {
    /// An empty queue with the shortest and the longest wait after a failure.
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

    /// Adds a pod, or makes a waiting one ready because it changed itself; not one that ran out of time, or a
    /// change of its labels would be a way round its wait.
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

    /// Removes a pod: it needs no decision any more.
    pub fn remove(&mut self, pod: &ObjectKey) {
        self.take_out(pod);
    }

    /// The first in order: of the highest priority the oldest whose namespace has spent nothing of late, else
    /// one of the namespace that has spent least.
    fn first(&self, account: &Account) -> Option<Rank> {
        let first = self.ready.first()?;
        if account.spent(&first.key.namespace).is_zero() {
            return Some(first.clone());
        }
        let firsts = self.lanes.iter().filter_map(|(namespace, lane)| Some((namespace, lane.order.first()?)));
        let firsts = firsts.filter(|(_, rank)| rank.priority == first.priority);
        firsts.map(|(namespace, rank)| (account.spent(namespace), rank)).min().map(|(_, rank)| rank.clone())
    }

    /// Of each namespace what has been ready for longest, and since when.
    fn longest_ready(&self) -> impl Iterator<Item = (Instant, &Rank)> {
        self.lanes.values().filter_map(|lane| lane.since.first()).map(|(since, rank)| (*since, rank))
    }

    /// It is decided now.
    fn take(&mut self, rank: &Rank, now: Instant) {
        if let Some(mut entry) = self.take_out(&rank.key) {
            entry.last = Some(now);
            self.put(entry, Place::Parked);
        }
    }

    /// Whether one that was taken is to be given a short look only: it had none, and another one of its priority
    /// that had none is ready, or one of a higher priority.
    fn is_first_look(&self, rank: &Rank) -> bool {
        let waits = |next: &Rank| match next.priority.cmp(&rank.priority) {
            Ordering::Less => true,
            Ordering::Equal => !next.behind,
            Ordering::Greater => false,
        };
        !rank.behind && self.ready.first().is_some_and(waits)
    }

    /// A short look, which took so long, did not decide it: it goes behind those that had none. All of it is held
    /// against its namespace.
    pub fn put_behind(&mut self, pod: &ObjectKey, cost: Duration, account: &mut Account, now: Instant) {
        account.hold_against(&pod.namespace, cost, now);
        if let Some(mut entry) = self.take_out(pod) {
            entry.rank.behind = true;
            self.put(entry, Place::Ready(now));
        }
    }

    /// It ran out of time, which took so long: it waits in proportion to that, whatever changes. How often in a
    /// row that has happened, and how long it waits.
    pub fn run_late(&mut self, pod: &ObjectKey, cost: Duration, now: Instant) -> (u32, Duration) {
        let times = self.entries.get(pod).map_or(0, |entry| entry.late).saturating_add(1);
        let wait = wait_of_late(cost, times).max(self.first_delay);
        self.put_off(pod, times, now + wait);
        (times, wait)
    }

    /// It waits until then as one that ran out of time so often.
    pub fn put_off(&mut self, pod: &ObjectKey, times: u32, until: Instant) {
        if let Some(mut entry) = self.take_out(pod) {
            (entry.late, entry.owes) = (times, true);
            self.put(entry, Place::Delayed(until));
        }
    }

    /// It was decided in time.
    pub fn in_time(&mut self, pod: &ObjectKey) {
        if let Some(entry) = self.entries.get_mut(pod) {
            entry.late = 0;
            // It is in no order while it is being decided.
            if entry.place == Place::Parked {
                entry.rank.behind = false;
            }
        }
    }

    /// Whether a pod is ready that stands before this.
    pub fn is_ahead(&mut self, rank: &Rank, now: Instant) -> bool {
        self.promote(now);
        self.ready.first().is_some_and(|first| first < rank)
    }

    /// It did not fit: wait for a change.
    pub fn park(&mut self, pod: &ObjectKey) {
        if let Some(mut entry) = self.take_out(pod) {
            entry.failures = entry.failures.saturating_add(1);
            self.put(entry, Place::Parked);
        }
    }

    /// Something went wrong: try again, change or not, each time later.
    pub fn delay(&mut self, pod: &ObjectKey, now: Instant) {
        if let Some(mut entry) = self.take_out(pod) {
            entry.failures = entry.failures.saturating_add(1);
            let until = now + self.wait(entry.failures);
            self.put(entry, Place::Delayed(until));
        }
    }

    /// Not before `until`, change or not.
    pub fn hold_back(&mut self, pod: &ObjectKey, until: Instant) {
        if let Some(entry) = self.take_out(pod) {
            self.put(entry, Place::Delayed(until));
        }
    }

    /// There may be room: whoever did not fit tries again, but none more often than its failures
    /// allow, so that many who never fit do not keep everybody busy.
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

    /// How often there may have been room: what did not fit since the last time does not fit now.
    pub const fn wakes(&self) -> u64 {
        self.wakes
    }

    /// When the next waiting pod becomes ready by itself.
    pub fn next(&self) -> Option<Instant> {
        self.delayed.first().map(|(until, _)| *until)
    }

    /// Whether a pod is ready now.
    pub fn has_ready(&mut self, now: Instant) -> bool {
        self.promote(now);
        !self.ready.is_empty()
    }

    /// Ready, delayed and parked pods.
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

    /// Puts one that was taken out to where it belongs now.
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

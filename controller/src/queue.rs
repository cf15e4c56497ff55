//! Which pod is decided next: by priority, then age; of pods of one priority those first whose namespace has not
//! spent much time on decisions of late. While others wait, each is first given a short look; what that does not
//! decide goes behind those of its priority that had none. While decisions take long, a small part of the turns is
//! for those of lower priority that many others went before. What did not fit waits until something changes, and each
//! time longer; what ran out of time waits in proportion to what it cost, whatever changes.

use crate::index::ObjectKey;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Order of pods: higher priority first, then those that were not looked at in vain, then older, then by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    priority: Reverse<i32>,
    behind: bool,
    created: i64,
    pod: ObjectKey,
}

impl Rank {
    /// The rank of a pod.
    pub const fn new(pod: ObjectKey, priority: i32, created: i64) -> Self {
        Self { priority: Reverse(priority), behind: false, created, pod }
    }
}

/// Where a pod is in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Ready,
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
    /// Which turn it was when it became ready.
    since: u64,
}

/// A decision up to this long is not held against its namespace.
const CHEAP: Duration = Duration::from_millis(20);
/// What a namespace has spent is forgotten at this part of the pace at which it was spent.
const FORGOTTEN: u32 = 10;
/// Most that is held against a namespace.
const MOST_SPENT: Duration = Duration::from_secs(5);
/// What ran out of time waits so many times as long as it took, doubled each time.
const PATIENCE: u32 = 20;
/// And this long at most.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// One of those behind is decided after so many others of its priority, however many come.
const MOST_BEFORE: u32 = 100;
/// While decisions take long, one of lower priority is decided after so many others
const MOST_ABOVE: u64 = 100;
/// in one of so many turns.
const EVERY: u64 = 8;

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
    delayed: BTreeSet<(Instant, ObjectKey)>,
    /// Decision time of namespaces that spent much of it, and when it was that.
    spent: HashMap<Arc<str>, (Duration, Instant)>,
    /// How many were decided in a row while others were behind.
    passed: u32,
    /// How many were decided at all.
    turns: u64,
    /// When one of lower priority was decided before others, by namespace, since decisions take long.
    let_through: HashMap<Arc<str>, u64>,
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
            delayed: BTreeSet::new(),
            spent: HashMap::new(),
            passed: 0,
            turns: 0,
            let_through: HashMap::new(),
            wakes: 0,
            first_delay,
            longest_delay,
        }
    }

    /// Adds a pod, or makes a waiting one ready because it changed itself; not one that ran out of time, or a
    /// change of its labels would be a way round its wait.
    pub fn offer(&mut self, rank: Rank) {
        let pod = rank.pod.clone();
        let before = self.take_out(&pod);
        let behind = before.as_ref().is_some_and(|entry| entry.rank.behind);
        let rank = Rank { behind, ..rank };
        match before {
            Some(entry) if entry.owes => self.put(Entry { rank, ..entry }, entry.place),
            Some(entry) => self.put(Entry { rank, ..entry }, Place::Ready),
            None => {
                let new = Entry {
                    rank,
                    place: Place::Parked,
                    failures: 0,
                    last: None,
                    late: 0,
                    owes: false,
                    since: 0,
                };
                self.put(new, Place::Ready);
            }
        }
    }

    /// Removes a pod: it needs no decision any more.
    pub fn remove(&mut self, pod: &ObjectKey) {
        self.take_out(pod);
    }

    /// The next pod. It stays known, and has to be parked, delayed, offered or removed.
    pub fn pop(&mut self, now: Instant) -> Option<ObjectKey> {
        self.promote(now);
        let rank = self.first(now)?;
        self.ready.remove(&rank);
        self.turns = self.turns.wrapping_add(1);
        let entry = self.entries.get_mut(&rank.pod)?;
        entry.place = Place::Parked;
        entry.last = Some(now);
        Some(rank.pod)
    }

    /// Whether a pod that was popped is to be given a short look only: it had none, and another one of its priority
    /// that had none is ready, or one of a higher priority.
    pub fn is_first_look(&self, pod: &ObjectKey) -> bool {
        let Some(Entry { rank, .. }) = self.entries.get(pod) else { return false };
        let waits = |next: &Rank| match next.priority.cmp(&rank.priority) {
            Ordering::Less => true,
            Ordering::Equal => !next.behind,
            Ordering::Greater => false,
        };
        !rank.behind && self.ready.first().is_some_and(waits)
    }

    /// A short look, which took so long, did not decide it: it goes behind those that had none. All of it is held
    /// against its namespace.
    pub fn put_behind(&mut self, pod: &ObjectKey, cost: Duration, now: Instant) {
        self.charge(&pod.namespace, cost.saturating_add(CHEAP), now);
        if let Some(mut entry) = self.take_out(pod) {
            entry.rank.behind = true;
            self.put(entry, Place::Ready);
        }
    }

    /// The first of those behind, if enough others of its priority went before.
    fn overdue(&mut self) -> Option<Rank> {
        let priority = self.ready.first()?.priority;
        let pod = ObjectKey { namespace: Arc::default(), name: Arc::default() };
        let least = Rank { priority, behind: true, created: i64::MIN, pod };
        let behind = self.ready.range(least..).next().filter(|rank| rank.priority == priority)?.clone();
        self.passed = self.passed.saturating_add(1);
        if self.passed <= MOST_BEFORE {
            return None;
        }
        self.passed = 0;
        Some(behind)
    }

    /// One of lower priority, now and then while decisions take long: of the namespaces that have spent nothing of
    /// late, which take turns, the one that waits longest, if enough others went before. Where decisions are quick
    /// those of higher priority are soon through, and come first without exception.
    fn let_through(&mut self) -> Option<Rank> {
        let highest = self.ready.first()?.priority;
        if self.spent.is_empty() {
            self.let_through.clear();
            return None;
        }
        if !self.turns.is_multiple_of(EVERY) || self.ready.last()?.priority == highest {
            return None;
        }
        let since = |rank: &Rank| self.entries.get(&rank.pod).map_or(self.turns, |entry| entry.since);
        let waits = self.ready.iter().filter(|rank| {
            rank.priority != highest
                && !self.spent.contains_key(&rank.pod.namespace)
                && self.turns.wrapping_sub(since(rank)) >= MOST_ABOVE
        });
        let rank = waits.min_by_key(|rank| (self.let_through.get(&rank.pod.namespace), since(rank)))?.clone();
        self.let_through.insert(rank.pod.namespace.clone(), self.turns);
        Some(rank)
    }

    /// The first in order: of the highest priority the oldest whose namespace has spent nothing of late, else
    /// one of the namespace that has spent least.
    fn first(&mut self, now: Instant) -> Option<Rank> {
        self.spent.retain(|_, (spent, at)| {
            *spent = spent.saturating_sub(now.saturating_duration_since(*at) / FORGOTTEN);
            *at = now.max(*at);
            !spent.is_zero()
        });
        if let Some(before) = self.let_through().or_else(|| self.overdue()) {
            return Some(before);
        }
        let oldest = self.ready.first()?;
        let spent =
            |rank: &Rank| self.spent.get(&rank.pod.namespace).map_or(Duration::ZERO, |(spent, _)| *spent);
        let mut best = oldest;
        for rank in self.ready.iter().take_while(|rank| rank.priority == oldest.priority) {
            if spent(best).is_zero() {
                break;
            }
            if spent(rank) < spent(best) {
                best = rank;
            }
        }
        Some(best.clone())
    }

    /// Notes how long the decision for a pod of a namespace took.
    pub fn charge(&mut self, namespace: &Arc<str>, cost: Duration, now: Instant) {
        let Some(much) = cost.checked_sub(CHEAP).filter(|much| !much.is_zero()) else { return };
        let (spent, _) = self.spent.entry(namespace.clone()).or_insert((Duration::ZERO, now));
        *spent = spent.saturating_add(much).min(MOST_SPENT);
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
            self.put(entry, if until <= now { Place::Ready } else { Place::Delayed(until) });
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
            self.put(entry, Place::Ready);
        }
    }

    fn wait(&self, failures: u32) -> Duration {
        let doubled = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first_delay.saturating_mul(doubled).min(self.longest_delay)
    }

    fn take_out(&mut self, pod: &ObjectKey) -> Option<Entry> {
        let entry = self.entries.remove(pod)?;
        match entry.place {
            Place::Ready => {
                self.ready.remove(&entry.rank);
            }
            Place::Delayed(until) => {
                self.delayed.remove(&(until, pod.clone()));
            }
            Place::Parked => {}
        }
        Some(entry)
    }

    /// Puts one that was taken out to where it belongs now.
    fn put(&mut self, mut entry: Entry, place: Place) {
        let pod = entry.rank.pod.clone();
        match place {
            Place::Ready => {
                if entry.place != Place::Ready {
                    entry.since = self.turns;
                }
                self.ready.insert(entry.rank.clone());
            }
            Place::Delayed(until) => {
                self.delayed.insert((until, pod.clone()));
            }
            Place::Parked => {}
        }
        entry.place = place;
        self.entries.insert(pod, entry);
    }
}

#[cfg(test)]
mod tests;

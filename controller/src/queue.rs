//! Which pod is decided next: by priority, then age. What did not fit waits until something
//! changes, and each time longer.

use crate::index::ObjectKey;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Order of pods: higher priority first, then older, then by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    priority: Reverse<i32>,
    created: i64,
    pod: ObjectKey,
}

impl Rank {
    /// The rank of a pod.
    pub const fn new(pod: ObjectKey, priority: i32, created: i64) -> Self {
        Self { priority: Reverse(priority), created, pod }
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
}

/// Pods that want a decision.
#[derive(Debug)]
pub struct Queue {
    entries: HashMap<ObjectKey, Entry>,
    ready: BTreeSet<Rank>,
    delayed: BTreeSet<(Instant, ObjectKey)>,
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
            first_delay,
            longest_delay,
        }
    }

    /// Adds a pod, or makes a waiting one ready because it changed itself.
    pub fn offer(&mut self, rank: Rank) {
        let pod = rank.pod.clone();
        let (failures, last) = match self.take_out(&pod) {
            Some(entry) => (entry.failures, entry.last),
            None => (0, None),
        };
        self.ready.insert(rank.clone());
        self.entries.insert(pod, Entry { rank, place: Place::Ready, failures, last });
    }

    /// Removes a pod: it needs no decision any more.
    pub fn remove(&mut self, pod: &ObjectKey) {
        self.take_out(pod);
    }

    /// The next pod. It stays known, and has to be parked, delayed, offered or removed.
    pub fn pop(&mut self, now: Instant) -> Option<ObjectKey> {
        self.promote(now);
        let rank = self.ready.pop_first()?;
        let entry = self.entries.get_mut(&rank.pod)?;
        entry.place = Place::Parked;
        entry.last = Some(now);
        Some(rank.pod)
    }

    /// It did not fit: wait for a change.
    pub fn park(&mut self, pod: &ObjectKey) {
        if let Some(mut entry) = self.take_out(pod) {
            entry.failures = entry.failures.saturating_add(1);
            entry.place = Place::Parked;
            self.entries.insert(pod.clone(), entry);
        }
    }

    /// Something went wrong: try again, change or not, each time later.
    pub fn delay(&mut self, pod: &ObjectKey, now: Instant) {
        if let Some(mut entry) = self.take_out(pod) {
            entry.failures = entry.failures.saturating_add(1);
            let until = now + self.wait(entry.failures);
            entry.place = Place::Delayed(until);
            self.delayed.insert((until, pod.clone()));
            self.entries.insert(pod.clone(), entry);
        }
    }

    /// There may be room: whoever did not fit tries again, but none more often than its failures
    /// allow, so that many who never fit do not keep everybody busy.
    pub fn wake(&mut self, now: Instant) {
        let parked: Vec<ObjectKey> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.place == Place::Parked)
            .map(|(pod, _)| pod.clone())
            .collect();
        for pod in parked {
            let Some(mut entry) = self.take_out(&pod) else { continue };
            let until = entry.last.map_or(now, |last| last + self.wait(entry.failures));
            if until <= now {
                entry.place = Place::Ready;
                self.ready.insert(entry.rank.clone());
            } else {
                entry.place = Place::Delayed(until);
                self.delayed.insert((until, pod.clone()));
            }
            self.entries.insert(pod, entry);
        }
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
        while let Some((until, pod)) = self.delayed.first().cloned() {
            if until > now {
                break;
            }
            self.delayed.pop_first();
            if let Some(entry) = self.entries.get_mut(&pod) {
                entry.place = Place::Ready;
                self.ready.insert(entry.rank.clone());
            }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_millis(100);

    fn queue() -> Queue {
        Queue::new(FIRST, Duration::from_secs(1))
    }

    fn pod(name: &str) -> ObjectKey {
        ObjectKey::new("default", name)
    }

    fn rank(name: &str, priority: i32, created: i64) -> Rank {
        Rank::new(pod(name), priority, created)
    }

    #[test]
    fn higher_priority_then_older_comes_first() {
        let mut queue = queue();
        for rank in [rank("young", 0, 9), rank("old", 0, 1), rank("important", 5, 8)] {
            queue.offer(rank);
        }
        let now = Instant::now();
        let order: Vec<_> = std::iter::from_fn(|| queue.pop(now)).collect();
        assert_eq!(order, [pod("important"), pod("old"), pod("young")]);
    }

    #[test]
    fn a_parked_pod_waits_for_a_change() {
        let mut queue = queue();
        let now = Instant::now();
        queue.offer(rank("a", 0, 0));
        assert_eq!(queue.pop(now), Some(pod("a")));
        queue.park(&pod("a"));
        assert_eq!(queue.pop(now + Duration::from_secs(999)), None);
        queue.wake(now + Duration::from_secs(999));
        assert_eq!(queue.pop(now + Duration::from_secs(999)), Some(pod("a")));
    }

    #[test]
    fn changes_do_not_wake_a_pod_more_often_than_its_failures_allow() {
        let mut queue = queue();
        let mut now = Instant::now();
        queue.offer(rank("a", 0, 0));
        let mut waits = Vec::new();
        for _ in 0..6 {
            assert_eq!(queue.pop(now), Some(pod("a")));
            queue.park(&pod("a"));
            queue.wake(now);
            let until = queue.next().expect("delayed");
            assert!(!queue.has_ready(until - Duration::from_millis(1)));
            waits.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(waits, [100, 200, 400, 800, 1000, 1000]);
    }

    #[test]
    fn a_pod_that_changed_itself_is_ready_at_once() {
        let mut queue = queue();
        let now = Instant::now();
        queue.offer(rank("a", 0, 0));
        queue.pop(now);
        queue.delay(&pod("a"), now);
        assert_eq!(queue.pop(now), None);
        queue.offer(rank("a", 0, 0));
        assert_eq!(queue.pop(now), Some(pod("a")));
    }

    #[test]
    fn a_removed_pod_never_comes_back() {
        let mut queue = queue();
        let now = Instant::now();
        queue.offer(rank("a", 0, 0));
        queue.offer(rank("b", 0, 0));
        queue.pop(now);
        queue.delay(&pod("a"), now);
        queue.remove(&pod("a"));
        queue.remove(&pod("b"));
        queue.wake(now + Duration::from_secs(999));
        assert_eq!(queue.pop(now + Duration::from_secs(999)), None);
        assert_eq!(queue.lengths(), (0, 0, 0));
    }
}

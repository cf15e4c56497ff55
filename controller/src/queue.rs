//! Which pod is decided next: by priority, then age; of pods of one priority those first whose namespace has not
//! spent much time on decisions of late. What did not fit waits until something changes, and each time longer;
//! what ran out of time waits in proportion to what it cost, whatever changes.

use crate::index::ObjectKey;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
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
    /// How often in a row it ran out of time.
    late: u32,
    /// Whether it waits for that, so that nothing makes it ready before.
    owes: bool,
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
            first_delay,
            longest_delay,
        }
    }

    /// Adds a pod, or makes a waiting one ready because it changed itself; not one that ran out of time, or a
    /// change of its labels would be a way round its wait.
    pub fn offer(&mut self, rank: Rank) {
        let pod = rank.pod.clone();
        let before = self.take_out(&pod);
        let entry = match before {
            Some(entry) if entry.owes => Entry { rank, ..entry },
            Some(entry) => Entry { rank, place: Place::Ready, ..entry },
            None => Entry { rank, place: Place::Ready, failures: 0, last: None, late: 0, owes: false },
        };
        match entry.place {
            Place::Delayed(until) => {
                self.delayed.insert((until, pod.clone()));
            }
            Place::Ready => {
                self.ready.insert(entry.rank.clone());
            }
            Place::Parked => {}
        }
        self.entries.insert(pod, entry);
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
        let entry = self.entries.get_mut(&rank.pod)?;
        entry.place = Place::Parked;
        entry.last = Some(now);
        Some(rank.pod)
    }

    /// The first in order: of the highest priority the oldest whose namespace has spent nothing of late, else
    /// one of the namespace that has spent least.
    fn first(&mut self, now: Instant) -> Option<Rank> {
        self.spent.retain(|_, (spent, at)| {
            *spent = spent.saturating_sub(now.saturating_duration_since(*at) / FORGOTTEN);
            *at = now.max(*at);
            !spent.is_zero()
        });
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
            entry.place = Place::Delayed(until);
            self.delayed.insert((until, pod.clone()));
            self.entries.insert(pod.clone(), entry);
        }
    }

    /// It was decided in time.
    pub fn in_time(&mut self, pod: &ObjectKey) {
        if let Some(entry) = self.entries.get_mut(pod) {
            entry.late = 0;
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

    /// Not before `until`, change or not.
    pub fn hold_back(&mut self, pod: &ObjectKey, until: Instant) {
        if let Some(mut entry) = self.take_out(pod) {
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
                (entry.place, entry.owes) = (Place::Ready, false);
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

    #[test]
    fn no_change_shortens_the_wait_of_what_ran_out_of_time() {
        let mut queue = queue();
        let mut now = Instant::now();
        queue.offer(rank("a", 0, 0));
        let cost = Duration::from_millis(500);
        for (times, seconds) in [(1, 10), (2, 20), (3, 40), (4, 80), (5, 160), (6, 300), (7, 300)] {
            assert_eq!(queue.pop(now), Some(pod("a")));
            assert_eq!(queue.run_late(&pod("a"), cost, now), (times, Duration::from_secs(seconds)));
            queue.wake(now);
            queue.offer(rank("a", 0, 0));
            assert!(!queue.has_ready(now + Duration::from_secs(seconds - 1)));
            now += Duration::from_secs(seconds);
        }
        assert_eq!(queue.pop(now), Some(pod("a")));
        queue.in_time(&pod("a"));
        assert_eq!(queue.run_late(&pod("a"), cost, now), (1, Duration::from_secs(10)));
    }

    #[test]
    fn a_namespace_that_spent_much_lets_others_of_its_priority_go_first_for_a_while() {
        let mut queue = queue();
        let now = Instant::now();
        let other = ObjectKey::new("other", "easy");
        for number in 0..3 {
            queue.offer(rank(&format!("hard-{number}"), 0, number));
        }
        queue.offer(Rank::new(other.clone(), 0, 9));
        queue.offer(rank("important", 1, 9));
        assert_eq!(queue.pop(now), Some(pod("important")), "priority comes first");
        queue.charge(&"default".into(), CHEAP, now);
        assert_eq!(queue.pop(now), Some(pod("hard-0")), "what is cheap is not counted");
        queue.charge(&"default".into(), Duration::from_millis(520), now);
        assert_eq!(queue.pop(now), Some(other.clone()));
        assert_eq!(queue.pop(now), Some(pod("hard-1")), "nobody else is there");
        queue.offer(Rank::new(other.clone(), 0, 9));
        let later = now + Duration::from_secs(6);
        assert_eq!(queue.pop(later), Some(pod("hard-2")), "it is forgotten");
    }
}

//! Which pod is decided next: by priority, then age; of pods of one priority those first whose namespace has not
//! spent much time on decisions of late. While others wait, each is first given a short look; what that does not
//! decide goes behind those of its priority that had none. What did not fit waits until something changes, and each
//! time longer; what ran out of time waits in proportion to what it cost, whatever changes.

use crate::index::ObjectKey;
use std::cmp::Reverse;
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

    /// Whether a pod that was popped is to be given a short look only: it had none, and another one of its priority
    /// that had none is ready.
    pub fn is_first_look(&self, pod: &ObjectKey) -> bool {
        let Some(Entry { rank, .. }) = self.entries.get(pod) else { return false };
        let next = self.ready.first();
        !rank.behind && next.is_some_and(|next| !next.behind && next.priority == rank.priority)
    }

    /// A short look, which took so long, did not decide it: it goes behind those that had none. All of it is held
    /// against its namespace.
    pub fn put_behind(&mut self, pod: &ObjectKey, cost: Duration, now: Instant) {
        self.charge(&pod.namespace, cost.saturating_add(CHEAP), now);
        if let Some(mut entry) = self.take_out(pod) {
            (entry.rank.behind, entry.place) = (true, Place::Ready);
            self.ready.insert(entry.rank.clone());
            self.entries.insert(pod.clone(), entry);
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

    /// The first in order: of the highest priority the oldest whose namespace has spent nothing of late, else
    /// one of the namespace that has spent least.
    fn first(&mut self, now: Instant) -> Option<Rank> {
        if let Some(overdue) = self.overdue() {
            return Some(overdue);
        }
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
        self.wakes = self.wakes.wrapping_add(1);
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

    #[test]
    fn what_a_short_look_does_not_decide_goes_behind_those_that_had_none() {
        let mut queue = queue();
        let now = Instant::now();
        for number in 0..50 {
            queue.offer(rank(&format!("hard-{number:02}"), 0, number));
        }
        queue.offer(rank("easy", 0, 99));
        queue.offer(rank("unimportant", -1, 0));
        for number in 0..50 {
            let next = queue.pop(now).expect("one");
            assert_eq!(next, pod(&format!("hard-{number:02}")));
            assert!(queue.is_first_look(&next));
            queue.put_behind(&next, Duration::ZERO, now);
        }
        assert_eq!(queue.pop(now), Some(pod("easy")));
        assert!(!queue.is_first_look(&pod("easy")), "nobody waits for it but those behind");
        assert_eq!(queue.pop(now), Some(pod("hard-00")), "before those of lower priority");
        assert!(!queue.is_first_look(&pod("hard-00")));
        // A change of the pod is no way round.
        queue.offer(rank("hard-00", 0, 0));
        queue.offer(rank("new", 0, 100));
        assert_eq!(queue.pop(now), Some(pod("new")));
        assert_eq!(queue.pop(now), Some(pod("hard-00")));
        queue.in_time(&pod("hard-00"));
        queue.offer(rank("hard-00", 0, 0));
        queue.offer(rank("new", 0, 100));
        assert_eq!(queue.pop(now), Some(pod("hard-00")), "what was decided in time is like any other");
    }

    #[test]
    fn those_behind_get_their_turn_however_many_come() {
        let mut queue = queue();
        let now = Instant::now();
        queue.offer(rank("hard", 0, 0));
        queue.offer(rank("easy", 0, 1));
        assert_eq!(queue.pop(now), Some(pod("hard")));
        queue.put_behind(&pod("hard"), Duration::ZERO, now);
        let before = (2..1_000).take_while(|created| {
            queue.offer(rank(&format!("easy-{created}"), 0, *created));
            queue.pop(now) != Some(pod("hard"))
        });
        assert_eq!(before.count(), 100);
    }
}

use super::account::{CHEAP, For, GIVES_WAY, Next};
use super::*;
use crate::fixtures;
use std::ops::{Deref, DerefMut};

mod shares;

const FIRST: Duration = Duration::from_millis(100);

/// The queues and their account, and who was decided last.
struct Line {
    pods: Queue,
    claims: Queue,
    account: Account,
    next: Option<Next>,
}

impl Deref for Line {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.pods
    }
}

impl DerefMut for Line {
    fn deref_mut(&mut self) -> &mut Queue {
        &mut self.pods
    }
}

impl Line {
    fn whose_turn(&mut self, now: Instant) -> Option<Next> {
        self.next = self.account.next(&mut self.pods, &mut self.claims, now);
        self.next.clone()
    }

    fn pop(&mut self, now: Instant) -> Option<ObjectKey> {
        self.whose_turn(now).map(|next| next.key)
    }

    fn is_first_look(&self, pod: &ObjectKey) -> bool {
        self.next.as_ref().is_some_and(|next| next.key == *pod && next.is_first_look)
    }

    fn put_behind(&mut self, pod: &ObjectKey, cost: Duration, now: Instant) {
        self.pods.put_behind(pod, cost, &mut self.account, now);
    }

    /// What was decided last took so long.
    fn took(&mut self, cost: Duration, now: Instant) {
        self.account.took(self.next.as_ref().expect("one"), cost, now);
    }
}

fn queue() -> Line {
    let queue = || Queue::new(FIRST, Duration::from_secs(1));
    Line { pods: queue(), claims: queue(), account: Account::default(), next: None }
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
    let now = fixtures::some_moment();
    for rank in [rank("young", 0, 9), rank("old", 0, 1), rank("important", 5, 8)] {
        queue.offer(rank, now);
    }
    let order: Vec<_> = std::iter::from_fn(|| queue.pop(now)).collect();
    assert_eq!(order, [pod("important"), pod("old"), pod("young")]);
}

/// Six hundred different pods of a namespace that are hard to decide.
fn hard(queue: &mut Queue, namespace: &str, priority: i32, now: Instant) {
    for number in 0..600 {
        queue.offer(Rank::new(ObjectKey::new(namespace, &format!("hard-{number}")), priority, number), now);
    }
}

/// After how long a pod is looked at whose name is `easy`, where every other one takes all the time that a look or a
/// decision may take; within an hour.
fn wait_of_easy(line: &mut Line, start: Instant) -> Option<Duration> {
    let mut now = start;
    while now - start < Duration::from_hours(1) {
        let Some(next) = line.whose_turn(now) else {
            now = line.pods.next()?;
            continue;
        };
        if &*next.key.name == "easy" {
            return Some(now - start);
        }
        let cost = Duration::from_millis(if next.is_first_look { 10 } else { 500 });
        now += cost;
        if next.is_first_look {
            line.put_behind(&next.key, cost, now);
        } else {
            line.run_late(&next.key, cost, now);
        }
        line.took(cost, now);
    }
    None
}

#[test]
fn hard_pods_of_a_higher_priority_do_not_keep_those_of_a_lower_one_waiting_for_ever() {
    let (mut queue, now) = (queue(), fixtures::some_moment());
    hard(&mut queue, "hostile", 1, now);
    queue.offer(Rank::new(ObjectKey::new("victim", "easy"), 0, 0), now);
    let wait = wait_of_easy(&mut queue, now).expect("looked at");
    assert!(wait < Duration::from_mins(1), "{wait:?}");
}

#[test]
fn below_a_priority_whose_pods_are_hard_namespaces_take_turns() {
    let (mut queue, now) = (queue(), fixtures::some_moment());
    hard(&mut queue, "hostile", 2, now);
    hard(&mut queue, "accomplice", 1, now);
    queue.offer(Rank::new(ObjectKey::new("victim", "easy"), 0, 9_999), now);
    let wait = wait_of_easy(&mut queue, now).expect("looked at");
    assert!(wait < Duration::from_mins(1), "{wait:?}");
}

#[test]
fn a_higher_priority_comes_first_where_decisions_are_quick_or_nobody_waits_long() {
    for (cost, many) in [(CHEAP, 1_000), (Duration::from_millis(500), 50)] {
        let (mut queue, mut now) = (queue(), fixtures::some_moment());
        queue.offer(rank("unimportant", 0, 0), now);
        for number in 0..many {
            queue.offer(rank(&format!("important-{number}"), 1, number), now);
        }
        for _ in 0..many {
            assert_ne!(queue.pop(now), Some(pod("unimportant")));
            now += cost;
            queue.took(cost, now);
        }
        assert_eq!(queue.pop(now), Some(pod("unimportant")));
    }
}

#[test]
fn a_parked_pod_waits_for_a_change() {
    let mut queue = queue();
    let now = fixtures::some_moment();
    queue.offer(rank("a", 0, 0), now);
    assert_eq!(queue.pop(now), Some(pod("a")));
    queue.park(&pod("a"));
    assert_eq!(queue.pop(now + Duration::from_secs(999)), None);
    queue.wake(now + Duration::from_secs(999));
    assert_eq!(queue.pop(now + Duration::from_secs(999)), Some(pod("a")));
}

#[test]
fn changes_do_not_wake_a_pod_more_often_than_its_failures_allow() {
    let mut queue = queue();
    let mut now = fixtures::some_moment();
    queue.offer(rank("a", 0, 0), now);
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
    let now = fixtures::some_moment();
    queue.offer(rank("a", 0, 0), now);
    queue.pop(now);
    queue.delay(&pod("a"), now);
    assert_eq!(queue.pop(now), None);
    queue.offer(rank("a", 0, 0), now);
    assert_eq!(queue.pop(now), Some(pod("a")));
}

#[test]
fn a_removed_pod_never_comes_back() {
    let mut queue = queue();
    let now = fixtures::some_moment();
    queue.offer(rank("a", 0, 0), now);
    queue.offer(rank("b", 0, 0), now);
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
    let mut now = fixtures::some_moment();
    queue.offer(rank("a", 0, 0), now);
    let cost = Duration::from_millis(500);
    for (times, seconds) in [(1, 10), (2, 20), (3, 40), (4, 80), (5, 160), (6, 300), (7, 300)] {
        assert_eq!(queue.pop(now), Some(pod("a")));
        assert_eq!(queue.run_late(&pod("a"), cost, now), (times, Duration::from_secs(seconds)));
        queue.wake(now);
        queue.offer(rank("a", 0, 0), now);
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
    let now = fixtures::some_moment();
    let other = ObjectKey::new("other", "easy");
    for number in 0..3 {
        queue.offer(rank(&format!("hard-{number}"), 0, number), now);
    }
    queue.offer(Rank::new(other.clone(), 0, 9), now);
    queue.offer(rank("important", 1, 9), now);
    assert_eq!(queue.pop(now), Some(pod("important")), "priority comes first");
    queue.took(CHEAP, now);
    assert_eq!(queue.pop(now), Some(pod("hard-0")), "what is cheap is not counted");
    queue.took(Duration::from_millis(520), now);
    assert_eq!(queue.pop(now), Some(other.clone()));
    assert_eq!(queue.pop(now), Some(pod("hard-1")), "nobody else is there");
    queue.offer(Rank::new(other.clone(), 0, 9), now);
    let later = now + Duration::from_secs(6);
    assert_eq!(queue.pop(later), Some(pod("hard-2")), "it is forgotten");
}

#[test]
fn what_a_short_look_does_not_decide_goes_behind_those_that_had_none() {
    let mut queue = queue();
    let now = fixtures::some_moment();
    for number in 0..50 {
        queue.offer(rank(&format!("hard-{number:02}"), 0, number), now);
    }
    queue.offer(rank("easy", 0, 99), now);
    queue.offer(rank("unimportant", -1, 0), now);
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
    queue.offer(rank("hard-00", 0, 0), now);
    queue.offer(rank("new", 0, 100), now);
    assert_eq!(queue.pop(now), Some(pod("new")));
    assert_eq!(queue.pop(now), Some(pod("hard-00")));
    queue.in_time(&pod("hard-00"));
    queue.offer(rank("hard-00", 0, 0), now);
    queue.offer(rank("new", 0, 100), now);
    assert_eq!(queue.pop(now), Some(pod("hard-00")), "what was decided in time is like any other");
}

#[test]
fn those_behind_get_their_turn_however_many_come() {
    let (mut queue, start) = (queue(), fixtures::some_moment());
    let mut now = start;
    queue.offer(rank("hard", 0, 0), now);
    queue.offer(rank("easy", 0, 1), now);
    assert_eq!(queue.pop(now), Some(pod("hard")));
    queue.put_behind(&pod("hard"), Duration::ZERO, now);
    for created in 2.. {
        queue.offer(rank(&format!("easy-{created}"), 0, created), now);
        if queue.pop(now) == Some(pod("hard")) {
            break;
        }
        now += Duration::from_millis(2);
        queue.took(Duration::from_millis(2), now);
        assert!(now - start < GIVES_WAY * 2, "it starves");
    }
    assert!(now - start >= GIVES_WAY, "{:?}", now - start);
}

#[test]
fn claims_before_their_pods_come_after_all_pods_and_have_a_short_look_first() {
    let (mut line, now) = (queue(), fixtures::some_moment());
    line.claims.offer(rank("claim", 0, 0), now);
    line.offer(rank("first", 0, 8), now);
    line.offer(rank("unimportant", -9, 9), now);
    let mut order = Vec::new();
    while let Some(next) = line.whose_turn(now) {
        order.push((next.key, next.is, next.is_first_look));
    }
    let last = (pod("claim"), For::Claim, false);
    assert_eq!(order, [(pod("first"), For::Pod, false), (pod("unimportant"), For::Pod, false), last]);
    // Where it gets its part while pods are there.
    line.claims.offer(rank("claim", 0, 0), now);
    line.offer(rank("first", 0, 8), now);
    assert_eq!(line.pop(now), Some(pod("first")));
    line.took(CHEAP, now);
    line.offer(rank("first", 0, 8), now + CHEAP);
    let next = line.whose_turn(now + GIVES_WAY).expect("one");
    assert_eq!((next.is, next.is_first_look), (For::Claim, true));
}

#[test]
fn what_a_namespace_spent_on_claims_is_held_against_its_pods() {
    let (mut line, now) = (queue(), fixtures::some_moment());
    line.claims.offer(rank("claim", 0, 0), now);
    assert_eq!(line.whose_turn(now).map(|next| next.is), Some(For::Claim));
    line.took(Duration::from_millis(500), now);
    let other = ObjectKey::new("other", "young");
    line.offer(rank("old", 0, 0), now);
    line.offer(Rank::new(other.clone(), 0, 9), now);
    assert_eq!(line.pop(now), Some(other));
}

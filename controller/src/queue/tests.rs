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

/// Six hundred different pods of a namespace that are hard to decide.
fn hard(queue: &mut Queue, namespace: &str, priority: i32) {
    for number in 0..600 {
        queue.offer(Rank::new(ObjectKey::new(namespace, &format!("hard-{number}")), priority, number));
    }
}

/// After how long a pod is looked at whose name is `easy`, where every other one takes all the time that a look or a
/// decision may take; within an hour.
fn wait_of_easy(queue: &mut Queue) -> Option<Duration> {
    let start = Instant::now();
    let mut now = start;
    while now - start < Duration::from_hours(1) {
        let Some(next) = queue.pop(now) else {
            now = queue.next()?;
            continue;
        };
        if &*next.name == "easy" {
            return Some(now - start);
        }
        let is_first_look = queue.is_first_look(&next);
        let cost = Duration::from_millis(if is_first_look { 10 } else { 500 });
        now += cost;
        if is_first_look {
            queue.put_behind(&next, cost, now);
        } else {
            queue.charge(&next.namespace, cost, now);
            queue.run_late(&next, cost, now);
        }
    }
    None
}

#[test]
fn hard_pods_of_a_higher_priority_do_not_keep_those_of_a_lower_one_waiting_for_ever() {
    let mut queue = queue();
    hard(&mut queue, "hostile", 1);
    queue.offer(Rank::new(ObjectKey::new("victim", "easy"), 0, 0));
    let wait = wait_of_easy(&mut queue).expect("looked at");
    assert!(wait < Duration::from_mins(1), "{wait:?}");
}

#[test]
fn below_a_priority_whose_pods_are_hard_namespaces_take_turns() {
    let mut queue = queue();
    hard(&mut queue, "hostile", 2);
    hard(&mut queue, "accomplice", 1);
    queue.offer(Rank::new(ObjectKey::new("victim", "easy"), 0, 9_999));
    let wait = wait_of_easy(&mut queue).expect("looked at");
    assert!(wait < Duration::from_mins(1), "{wait:?}");
}

#[test]
fn a_higher_priority_comes_first_where_decisions_are_quick_or_nobody_waits_long() {
    for (costly, many) in [(false, 1_000), (true, 90)] {
        let (mut queue, now) = (queue(), Instant::now());
        if costly {
            queue.charge(&"other".into(), Duration::from_secs(5), now);
        }
        queue.offer(rank("unimportant", 0, 0));
        for number in 0..many {
            queue.offer(rank(&format!("important-{number}"), 1, number));
        }
        for _ in 0..many {
            assert_ne!(queue.pop(now), Some(pod("unimportant")));
            queue.charge(&"default".into(), CHEAP, now);
        }
        assert_eq!(queue.pop(now), Some(pod("unimportant")));
    }
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

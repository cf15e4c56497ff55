//! Who gets how much of the time, with the real queue and a clock that only decisions move.

use super::*;
use std::collections::BTreeMap;

const EASY: Duration = Duration::from_millis(2);
const LOOK: Duration = Duration::from_millis(10);
const ALL: Duration = Duration::from_millis(500);
const MINUTES: Duration = Duration::from_secs(300);

/// A queue, what time it is, and what namespaces had of it.
struct Sim {
    line: Line,
    began: Instant,
    now: Instant,
    pods: i64,
    had: BTreeMap<String, Duration>,
}

impl Sim {
    fn new() -> Self {
        let now = fixtures::some_moment();
        Self { line: queue(), began: now, now, pods: 0, had: BTreeMap::new() }
    }

    fn offer(&mut self, namespace: &str, name: &str, priority: i32) {
        self.pods += 1;
        self.line.offer(Rank::new(ObjectKey::new(namespace, name), priority, self.pods), self.now);
    }

    /// Pods that take all the time that a look or a decision may take.
    fn hard(&mut self, namespace: &str, many: u32, priority: i32) {
        (0..many).for_each(|number| self.offer(namespace, &format!("hard-{number}"), priority));
    }

    /// Pods of which another one comes whenever one is decided.
    fn easy(&mut self, namespace: &str, many: u32, priority: i32) {
        (0..many).for_each(|number| self.offer(namespace, &format!("easy-{number}"), priority));
    }

    fn run(mut self, priority_of_easy: i32) -> Self {
        while self.now - self.began < MINUTES {
            let Some(Next { key: next, is_first_look, .. }) = self.line.whose_turn(self.now) else {
                self.now = self.line.pods.next().expect("somebody comes");
                continue;
            };
            let is_easy = next.name.starts_with("easy");
            let cost = match (is_easy, is_first_look) {
                (true, _) => EASY,
                (false, true) => LOOK,
                (false, false) => ALL,
            };
            *self.had.entry(next.namespace.to_string()).or_default() += cost;
            self.now += cost;
            if is_easy {
                self.line.remove(&next);
                self.offer(&next.namespace, &next.name, priority_of_easy);
            } else if is_first_look {
                self.line.put_behind(&next, cost, self.now);
            } else {
                self.line.run_late(&next, cost, self.now);
            }
            self.line.took(cost, self.now);
        }
        self
    }

    fn had(&self, namespace: &str) -> Duration {
        let of = self.had.iter().filter(|(name, _)| name.starts_with(namespace));
        of.map(|(_, time)| *time).sum()
    }
}

/// What easy pods, hard ones of their priority, and those of so many namespaces below have of five minutes.
fn with_hostile_namespaces_below(many: u32) -> (Duration, Duration, Duration) {
    let mut sim = Sim::new();
    sim.easy("easy", 10, 0);
    sim.hard("hard", 20, 0);
    (0..many).for_each(|number| sim.hard(&format!("below-{number}"), 40, -1));
    let sim = sim.run(0);
    (sim.had("easy"), sim.had("hard"), sim.had("below"))
}

#[test]
fn however_many_namespaces_are_below_those_above_keep_seven_eighths_of_the_time_and_nobody_starves() {
    let (alone, ..) = with_hostile_namespaces_below(0);
    for many in [1, 5, 10, 20] {
        let (easy, hard, below) = with_hostile_namespaces_below(many);
        assert!(easy >= alone * 7 / 8, "{many}: {easy:?} of {alone:?}");
        // But for the decision that is under way at the end.
        assert!(easy + ALL >= MINUTES * 7 / 8, "{many}: {easy:?}");
        // From when they have waited for long.
        let eighth = (MINUTES - GIVES_WAY) / 8;
        assert!(hard + below >= eighth * 9 / 10, "{many}: {hard:?} and {below:?} of {eighth:?}");
        let part = eighth * many / (many + 1);
        assert!(below >= part * 9 / 10, "{many}: {below:?} of {part:?}");
    }
}

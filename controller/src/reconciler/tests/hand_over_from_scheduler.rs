//! Hand-overs from kube-scheduler to us: when they end, and what is said meanwhile.

use super::*;
use crate::writer::{Look, Pending};
use aliquot_model::names::{HAND_OVER_UNTIL, SCHEDULER_IDLE};

const UNTIL: &str = "2026-01-02T03:14:05Z";

impl World {
    fn publish(&mut self, mode: AllocatorMode, generation: i64, until: Option<&str>) {
        for mut slice in fixtures::slices("n1", 1, mode, generation) {
            slice.metadata.annotations =
                until.map(|until| [(HAND_OVER_UNTIL.to_owned(), until.to_owned())].into());
            slice.metadata.resource_version = Some(self.stamp());
            self.handle(Input::Slice(Seen::Apply(Box::new(slice))));
        }
    }

    /// Answers a look that is asked for with what the API has; whether one was.
    fn show(&mut self, pods: &[ApiPod], claims: &[ResourceClaim]) -> bool {
        let Some(began) = self.looks.pop() else { return false };
        assert!(self.looks.is_empty(), "one at a time");
        let seen = Ok(Pending { pods: pods.to_vec(), claims: claims.to_vec() });
        self.handle(Input::Looked(Box::new(Look { began, seen })));
        while self.core.has_steps() {
            self.core.step(self.now);
        }
        self.collect();
        true
    }

    fn idle_told(&mut self) -> Vec<i64> {
        let jobs = self.take_jobs();
        let of = |job: &Job| match job {
            Job::SchedulerIdle { node, generation } if **node == *"n1" => Some(*generation),
            _ => None,
        };
        jobs.iter().filter_map(of).collect()
    }
}

fn ungated(name: &str) -> ApiPod {
    let mut pod = fixtures::pod(name, &[name]);
    pod.metadata.uid = Some(format!("uid-{name}"));
    pod.spec.as_mut().expect("a spec").scheduling_gates = None;
    pod
}

#[test]
fn an_idle_kube_scheduler_ends_a_hand_over_to_us() {
    let mut world = World::new(&[("n1", 1)]);
    world.publish(AllocatorMode::HandOver, 2, Some(UNTIL));
    world.later(1);
    assert!(world.show(&[], &[]) && world.idle_told().is_empty());
    world.later(29);
    assert!(!world.show(&[], &[]));
    world.later(1);
    assert!(world.show(&[], &[]));
    assert_eq!(world.idle_told(), [2]);
    world.later(60);
    assert!(!world.show(&[], &[]), "once");
}

#[test]
fn only_a_hand_over_that_waits_for_kube_scheduler_is_looked_after() {
    let mut world = World::new(&[("n1", 1)]);
    world.publish(AllocatorMode::HandOver, 2, None);
    world.later(100);
    assert!(world.looks.is_empty(), "it waits for us");
    world.publish(AllocatorMode::Scheduler, 3, None);
    world.later(100);
    world.publish(AllocatorMode::HandOver, 4, Some(UNTIL));
    let mut node = fixtures::node("n1");
    node.metadata.annotations = Some([(SCHEDULER_IDLE.to_owned(), "4".to_owned())].into());
    world.handle(Input::Node(Seen::Apply(Box::new(node.clone()))));
    world.later(1);
    assert!(world.looks.is_empty(), "it is said already");
    // What was said of an earlier one is nothing.
    node.metadata.annotations = Some([(SCHEDULER_IDLE.to_owned(), "3".to_owned())].into());
    world.handle(Input::Node(Seen::Apply(Box::new(node))));
    world.later(1);
    assert!(world.show(&[], &[]));
}

/// What the watches show is older than what the look does.
#[test]
fn what_only_the_look_shows_holds_the_hand_over_up_until_it_is_allocated() {
    let mut world = World::new(&[("n1", 1)]);
    world.publish(AllocatorMode::HandOver, 2, Some(UNTIL));
    let waits = world.claim_with("a", &gpu(), json!({}), json!({}));
    for seconds in [1, 30, 30] {
        world.later(seconds);
        assert!(world.show(&[ungated("a")], std::slice::from_ref(&waits)));
    }
    let told: Vec<&Report> =
        world.reports.iter().filter(|report| report.reason == reasons::HAND_OVER_WAITS).collect();
    let [told] = told.as_slice() else { panic!("once: {told:?}") };
    assert_eq!(told.regarding, Regarding::Node("n1".into()));
    assert!(told.note.contains("default/a") && told.note.contains(UNTIL), "{}", told.note);
    let result = json!({"request": "r", "driver": DRIVER, "pool": format!("{DRIVER}/n1"), "device": "gpu-0"});
    let status = json!({"allocation": {"devices": {"results": [result]}}});
    let has = world.claim_with("a", &gpu(), status, json!({}));
    assert!(world.idle_told().is_empty());
    for _ in 0..2 {
        world.later(30);
        assert!(world.show(&[ungated("a")], std::slice::from_ref(&has)));
    }
    assert_eq!(world.idle_told(), [2]);
}

#[test]
fn a_look_that_fails_is_no_look() {
    let mut world = World::new(&[("n1", 1)]);
    world.publish(AllocatorMode::HandOver, 2, Some(UNTIL));
    for _ in 0..4 {
        world.later(30);
        let began = world.looks.pop().expect("a look");
        let seen = Err(WriteError::NotLeader(NotLeader));
        world.handle(Input::Looked(Box::new(Look { began, seen })));
    }
    assert!(world.idle_told().is_empty());
}

#[test]
fn a_look_at_many_is_taken_in_step_by_step_and_pods_are_decided_between() {
    const MANY: usize = 1000;
    const STEP: usize = 256;
    let mut world = World::new(&[("n1", 1), ("n2", 1)]);
    world.publish(AllocatorMode::HandOver, 2, Some(UNTIL));
    world.later(1);
    let names: Vec<String> = (0..MANY).map(|number| format!("a{number}")).collect();
    let pods = names.iter().map(|name| ungated(name)).collect();
    let claims = names.iter().map(|name| world.claim_with(name, &gpu(), json!({}), json!({}))).collect();
    let began = world.looks.pop().expect("a look");
    world.handle(Input::Looked(Box::new(Look { began, seen: Ok(Pending { pods, claims }) })));
    let known = |world: &World| world.core.index().claims().count();
    assert_eq!(known(&world), 0, "nothing is taken in before its turn");
    let mut turns = 0;
    let mut before = 0;
    while world.core.has_steps() {
        world.core.step(world.now);
        assert!(known(&world) <= before + STEP, "{} claims in a turn", known(&world) - before);
        turns += 1;
        if turns == 1 {
            world.take_jobs();
            world.one("b", &gpu());
            assert_eq!(devices(&world.take_job()), ["gpu-0"]);
        }
        before = known(&world);
        // Whatever time passes, there is one look.
        world.later(30);
        assert!(world.looks.is_empty() || !world.core.has_steps());
    }
    assert_eq!((turns, known(&world)), (2 * MANY.div_ceil(STEP), MANY + 1));
    assert_eq!(world.core.hand_overs.counts(), (1, MANY));
}

#[test]
fn the_next_look_is_known_to_be_due() {
    let mut world = World::new(&[("n1", 1)]);
    assert_eq!(world.core.next_due(), None);
    world.publish(AllocatorMode::HandOver, 2, Some(UNTIL));
    world.later(1);
    assert_eq!(world.core.next_due(), None, "it is being looked");
    assert!(world.show(&[], &[]));
    assert_eq!(world.core.next_due(), Some(world.now + Duration::from_secs(30)));
    world.later(30);
    assert!(world.show(&[], &[]) && world.idle_told() == [2]);
    assert_eq!(world.core.next_due(), None, "it is over");
}

#[test]
fn who_waits_for_the_node_is_told_that_it_is_handed_over_and_until_when() {
    let mut world = World::new(&[("n1", 1)]);
    world.publish(AllocatorMode::HandOver, 2, Some(UNTIL));
    world.one("a", &gpu());
    let note = &world.reports.last().expect("told").note;
    assert!(note.contains("1 (n1) are being handed over from kube-scheduler to the controller"), "{note}");
    assert!(note.contains("until 2026-01-02T03:15:00Z at the latest"), "{note}");
}

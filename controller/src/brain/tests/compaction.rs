use super::*;
use crate::act::{Eviction, Fate};

const HALF: &str = "3g.40gb";

impl World {
    /// A pod with half a GPU that runs where it was put.
    fn half(&mut self, name: &str, may_move: bool) -> String {
        self.claim(name, &[partition("r", HALF)]);
        self.pod(name, &[name], |_| {});
        self.work();
        let job = self.take_job();
        let Job::Allocate { allocations, plan, .. } = &job else { panic!("an allocation: {job:?}") };
        let devices = allocations.first().and_then(|a| a.devices.clone()).and_then(|d| d.results);
        let device = devices.and_then(|results| results.into_iter().next()).expect("a device").device;
        let node = plan.node.to_string();
        let claim = self.written(name, &[partition("r", HALF)], &allocations[0].clone(), name);
        self.done(job, vec![claim], None);
        self.pod(name, &[name], |pod| {
            let spec = pod.spec.as_mut().expect("a spec");
            spec.node_name = Some(node);
            spec.scheduling_gates = None;
            if may_move {
                let said = ("aliquot.dev/compaction".to_owned(), "Allow".to_owned());
                pod.metadata.annotations = Some([said].into_iter().collect());
                pod.metadata.owner_references = Some(vec![object(json!({
                    "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true,
                }))]);
            }
        });
        self.work();
        self.jobs.clear();
        device
    }

    /// Two GPUs, each half empty: `stays` on one, `moves` on the other.
    fn halves() -> (Self, String) {
        let mut world = Self::new(&[("n1", 2)]);
        world.core.settings.compaction = Some(Compacting::default());
        world.half("stays", false);
        world.half("x", false);
        let gpu = world.half("moves", true);
        world.compaction_ended("x");
        world.reports.clear();
        (world, gpu.split('-').take(2).collect::<Vec<_>>().join("-"))
    }

    fn compaction_ended(&mut self, name: &str) {
        let mut pod = fixtures::pod(name, &[name]);
        pod.metadata.uid = Some(format!("uid-{name}"));
        self.handle(Input::Pod(Seen::Delete(Box::new(pod))));
        let mut claim = self.claim_with(name, &[partition("r", HALF)], json!({}), json!({}));
        claim.metadata.uid = Some(format!("uid-{name}"));
        self.handle(Input::Claim(Seen::Delete(Box::new(claim))));
        self.work();
    }

    fn moving(&mut self) -> Job {
        self.later(31);
        let job = self.take_job();
        assert!(matches!(&job, Job::Move { pod, .. } if &*pod.name == "moves"), "{job:?}");
        job
    }

    fn moved(&mut self, job: Job, fate: Fate) {
        let Job::Move { pod, uid, .. } = &job else { panic!("a move: {job:?}") };
        let evictions = vec![Eviction { pod: pod.clone(), uid: uid.clone(), fate }];
        let outcome = Outcome { evictions, ..Outcome::of(job) };
        self.handle(Input::Done(Box::new(outcome)));
        self.work();
    }

    fn notes(&self, reason: &str) -> Vec<String> {
        let of = self.reports.iter().filter(|report| report.reason == reason);
        of.map(|report| report.note.clone()).collect()
    }
}

#[test]
fn who_is_moved_away_finds_the_gap_and_does_not_come_back() {
    let (mut world, gpu) = World::halves();
    let job = world.moving();
    world.moved(job, Fate::Evicted);
    assert_eq!(world.notes(reasons::MOVED).len(), 1);
    world.compaction_ended("moves");
    let device = world.half("again", true);
    assert!(!device.starts_with(&format!("{gpu}-")), "{device} on {gpu}");
    world.later(1);
    let notes = world.notes(reasons::COMPACTION);
    assert_eq!(notes.last().map(String::as_str), Some(&*format!("{gpu} is free as a whole: 1 pod(s) moved")));
    world.later(31);
    assert_eq!(world.take_jobs().len(), 0, "nothing more to gain");
}

#[test]
fn a_disruption_budget_ends_it_and_it_is_tried_again_later() {
    let (mut world, gpu) = World::halves();
    let job = world.moving();
    world.moved(job, Fate::Refused("budget".to_owned()));
    let notes = world.notes(reasons::COMPACTION);
    let why = format!("{gpu} is not emptied: pod default/moves was not evicted: budget");
    assert_eq!(notes.last(), Some(&why));
    world.later(1);
    assert_eq!(world.take_jobs().len(), 0, "not at once");
    world.moving();
}

#[test]
fn a_pod_that_fits_nowhere_else_gets_the_gpu_that_is_being_emptied() {
    let (mut world, gpu) = World::halves();
    let job = world.moving();
    world.moved(job, Fate::Evicted);
    world.compaction_ended("moves");
    assert!(!world.half("first", false).starts_with(&format!("{gpu}-")));
    assert!(world.half("second", false).starts_with(&format!("{gpu}-")), "there is no other");
    assert!(world.notes(reasons::COMPACTION).last().is_some_and(|note| note.contains("needs the room")));
}

#[test]
fn nothing_is_moved_while_somebody_waits_or_where_it_is_switched_off() {
    let (mut world, _) = World::halves();
    world.core.settings.compaction = None;
    world.later(31);
    assert_eq!(world.take_jobs().len(), 0);
    let (mut world, _) = World::halves();
    world.core.settings.compaction = Some(Compacting { threshold: 1000, ..Compacting::default() });
    world.later(31);
    assert_eq!(world.take_jobs().len(), 0, "all that is free is in gaps, which is not more than allowed");
}

#[test]
fn who_is_evicted_is_told_why_also_when_the_compaction_was_given_up_meanwhile() {
    let (mut world, _) = World::halves();
    let job = world.moving();
    world.half("first", false);
    world.half("second", false);
    assert!(world.notes(reasons::COMPACTION).last().is_some_and(|note| note.contains("needs the room")));
    world.moved(job, Fate::Evicted);
    assert_eq!(world.notes(reasons::MOVED).len(), 1);
}

#[test]
fn who_waits_for_a_whole_gpu_gets_the_one_that_is_emptied() {
    let (mut world, gpu) = World::halves();
    world.claim("whole", &[request("r", "gpu.aliquot.dev", 1)]);
    world.pod("whole", &["whole"], |_| {});
    world.work();
    assert_eq!(world.take_jobs().len(), 0, "it does not fit");
    let job = world.moving();
    world.moved(job, Fate::Evicted);
    world.compaction_ended("moves");
    let job = world.take_job();
    let Job::Allocate { plan, .. } = &job else { panic!("an allocation: {job:?}") };
    assert_eq!((&*plan.pod.name, plan.devices()), ("whole", vec![gpu.clone()]));
    assert!(!world.half("again", true).starts_with(&format!("{gpu}-")), "the gap was kept for it");
}

#[test]
fn each_time_that_it_is_given_up_it_waits_longer() {
    let (mut world, _) = World::halves();
    let mut job = world.moving();
    for wait in [30, 60, 120] {
        world.moved(job, Fate::Refused("budget".to_owned()));
        world.later(wait - 1);
        assert_eq!(world.take_jobs().len(), 0, "not before {wait} s");
        world.later(1);
        job = world.take_job();
    }
}

#[test]
fn who_would_not_get_devices_back_is_not_moved() {
    let (mut world, _) = World::halves();
    world.core.settings.budgets = true;
    world.handle(Input::NodeUsage(Seen::Reset(Vec::new())));
    let used_up = budgets::budget(budgets::terms("0", "Refuse"));
    world.handle(Input::Budget(Seen::Reset(vec![used_up])));
    world.look(1_000);
    world.later(31);
    assert_eq!(world.take_jobs().len(), 0, "its namespace has used up its budget");
    world.handle(Input::Budget(Seen::Reset(Vec::new())));
    world.look(1_001);
    world.moving();
}

use super::*;
use crate::writer::{Eviction, Fate, MovesIn};
use aliquot_allocator::compaction::{Allowance, Terms};
use std::cell::RefCell;
use std::sync::Once;

const HALF: &str = "3g.40gb";

impl World {
    /// A pod with half a GPU that runs where it was put.
    fn half(&mut self, name: &str, may_move: bool) -> String {
        self.bound_with(name, HALF, may_move)
    }

    /// A pod with a partition that runs where it was put.
    fn bound_with(&mut self, name: &str, profile: &str, may_move: bool) -> String {
        self.claim(name, &[partition("r", profile)]);
        self.pod(name, &[name], |_| {});
        self.work();
        let job = self.take_job();
        let Job::Allocate { writes, plan, .. } = &job else { panic!("an allocation: {job:?}") };
        let devices =
            writes.first().and_then(|write| write.allocation.devices.clone()).and_then(|d| d.results);
        let device = devices.and_then(|results| results.into_iter().next()).expect("a device").device;
        let node = plan.node.to_string();
        let claim = self.written(name, &[partition("r", profile)], &writes[0].allocation.clone(), name);
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
        world.handle(Input::Moves(None));
        world.jobs.clear();
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
        self.moving_of("moves")
    }

    fn moving_of(&mut self, name: &str) -> Job {
        self.later(31);
        let job = self.take_job();
        assert!(matches!(&job, Job::Move { pod, .. } if &*pod.name == name), "{job:?}");
        job
    }

    /// What is free on a GPU is kept for a pod that waits: a reservation, say.
    fn keep_for(&mut self, name: &str, profile: &str, gpu: &str) {
        self.claim(name, &[partition("r", profile)]);
        // Something else has it wait for now.
        self.pod(name, &[name], |pod| {
            let gates = &mut pod.spec.get_or_insert_default().scheduling_gates;
            gates.get_or_insert_default().push(object(json!({"name": "example.com/later"})));
        });
        let pod = self.core.index.pod(&ObjectKey::new("default", name)).cloned().expect("a pod");
        let pool = self.core.index.pools().next().expect("a pool");
        let devices = pool.layout.iter().flat_map(|layout| &layout.devices).map(|device| device.name);
        let there = devices.filter(|device| self.core.index.name(*device).starts_with(&format!("{gpu}-")));
        let there = Arc::new(there.map(|device| (pool.name, device)).collect());
        let mut situation = self.core.situation(&pod, self.now);
        situation.exactly.insert(format!("uid-{name}").as_str().into(), there);
        let decision = self.core.decide(&pod, &situation);
        let aliquot_allocator::schedule::Decision::Placed(plan) = decision else { panic!("{decision:?}") };
        let until = Some(self.now + Duration::from_secs(10_000));
        self.core.keep(
            &pod,
            &plan,
            crate::reconciler::preemption::Terms { until, ..Default::default() },
            self.now,
        );
        self.core.queue.park(&pod.key);
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

thread_local! {
    /// What the log of this thread goes to, if anywhere.
    static SINK: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

/// Writes to the sink of the thread that logs.
struct Sink;

impl std::io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        SINK.with_borrow_mut(|sink| sink.iter_mut().for_each(|sink| sink.extend_from_slice(bytes)));
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Everything that this thread logs meanwhile. One subscriber is there for the whole process: with one of each test's own
/// a place in the code that another thread comes to first, without one, can stay silent.
fn logged(work: impl FnOnce()) -> String {
    static SUBSCRIBED: Once = Once::new();
    SUBSCRIBED.call_once(|| tracing_subscriber::fmt().with_ansi(false).with_writer(|| Sink).init());
    SINK.set(Some(Vec::new()));
    work();
    String::from_utf8(SINK.take().unwrap_or_default()).expect("text")
}

#[test]
fn why_nobody_is_moved_is_said_once_and_again_when_the_reason_changes() {
    let (mut world, _) = World::halves();
    let looks = |world: &mut World, settings: Compacting| {
        world.core.settings.compaction = Some(settings);
        let text = logged(|| (0..3).for_each(|_| world.later(31)));
        assert_eq!(world.take_jobs().len(), 0);
        text.lines().filter(|line| line.contains("no GPU is emptied")).map(str::to_owned).collect::<Vec<_>>()
    };
    let nothing_much = Compacting { threshold: 1000, ..Compacting::default() };
    let said = looks(&mut world, nothing_much.clone());
    assert!(said.len() == 1 && said[0].contains("100 % of what is free lies in gaps"), "{said:?}");
    assert!(said[0].contains("only above 100 %"), "{said:?}");
    let none = Terms { per_gpu: 0, ..Terms::default() };
    let said = looks(&mut world, Compacting { terms: none, ..Compacting::default() });
    assert!(
        said.len() == 1 && said[0].contains("no GPU can be emptied by moving at most 0 pods"),
        "{said:?}"
    );
    assert_eq!(looks(&mut world, nothing_much).len(), 1, "it changed");
    for (outcome, times) in [("below_threshold", 6), ("no_gain", 3), ("begun", 0)] {
        assert_eq!(world.core.metrics.compaction_looks(outcome), times, "{outcome}");
    }
    world.core.settings.compaction = Some(Compacting::default());
    world.moving();
    assert_eq!(world.core.metrics.compaction_looks("begun"), 1);
}

#[test]
fn a_look_that_was_put_off_for_somebody_who_was_being_placed_comes_right_behind_it() {
    let (mut world, _) = World::halves();
    world.claim("new", &[partition("r", HALF)]);
    world.pod("new", &["new"], |_| {});
    world.work();
    let job = world.take_job();
    world.later(31);
    assert_eq!(world.take_jobs().len(), 0, "its devices are being written");
    let error = WriteError::Refused { what: "node n1".to_owned(), message: "no".to_owned() };
    world.done(job, Vec::new(), Some(error));
    world.compaction_ended("new");
    world.take_jobs();
    world.later(1);
    let job = world.take_job();
    assert!(matches!(&job, Job::Move { pod, .. } if &*pod.name == "moves"), "{job:?}");
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

#[test]
fn nobody_is_moved_before_an_hour_allows_it_whichever_controller_began_the_last_move() {
    let (mut world, _) = World::halves();
    world.core.settings.compaction = Some(Compacting {
        within: MovesIn { per_hour: 1, namespace: "own".into() },
        ..Compacting::default()
    });
    let mut moves = Allowance::new(1);
    assert!(moves.begin(&"another".into(), 900));
    world.handle(Input::Moves(Some(Box::new(moves.write(ConfigMap::default()).expect("a record")))));
    world.later(3_499);
    assert_eq!(world.take_jobs().len(), 0, "the hour began at second 900");
    world.later(1);
    world.moving();
}

#[test]
fn nobody_is_moved_before_it_is_known_who_was_moved_before() {
    let (mut world, _) = World::halves();
    world.core.compaction.moves = None;
    world.later(31);
    assert_eq!(world.take_jobs().len(), 0);
    world.handle(Input::Moves(None));
    let Job::AllowMoves(within) = world.take_job() else {
        panic!("the bound is written down for those who plan")
    };
    assert_eq!(within.per_hour, Compacting::default().within.per_hour);
    world.moving();
}

#[test]
fn what_the_writer_read_of_moves_is_known_from_then_on() {
    let (mut world, _) = World::halves();
    let job = world.moving();
    let mut moves = Allowance::new(1);
    assert!(moves.begin(&"another".into(), 1_000));
    let error = Some(WriteError::Enough { per_hour: 1, more_at: 4_600 });
    world.handle(Input::Done(Box::new(Outcome { moves: Some(moves), error, ..Outcome::of(job) })));
    world.work();
    assert!(
        world
            .notes(reasons::COMPACTION)
            .last()
            .is_some_and(|note| note.contains("more may be from 1970-01-01T01:16:40Z on"))
    );
    world.later(3_500);
    assert_eq!(world.take_jobs().len(), 0);
    world.later(100);
    world.moving();
}

#[test]
fn a_gap_that_is_kept_for_somebody_else_is_no_place_to_move_to() {
    let (mut world, gpu) = World::halves();
    assert_eq!(gpu, "gpu-1");
    world.keep_for("waits", HALF, "gpu-0");
    world.later(31);
    assert_eq!(world.take_jobs().len(), 0);
    assert!(world.core.preemptions.forget(&ObjectKey::new("default", "waits")));
    world.moving();
}

#[test]
fn a_gpu_of_which_something_is_kept_would_not_be_free_as_a_whole() {
    let (mut world, gpu) = World::halves();
    world.keep_for("waits", HALF, &gpu);
    world.later(31);
    assert_eq!(world.take_jobs().len(), 0);
}

#[test]
fn who_is_to_move_stays_when_the_gap_is_kept_for_somebody_else_meanwhile() {
    let mut world = World::new(&[("n1", 2)]);
    world.core.settings.compaction = Some(Compacting { threshold: 0, ..Compacting::default() });
    world.handle(Input::Moves(None));
    world.jobs.clear();
    for (name, profile) in [("stays", HALF), ("too", "2g.20gb"), ("x", "1g.10gb"), ("y", "1g.10gb")] {
        assert!(world.bound_with(name, profile, false).starts_with("gpu-0-"));
    }
    for name in ["m1", "m2"] {
        assert!(world.bound_with(name, "1g.10gb", true).starts_with("gpu-1-"));
    }
    world.compaction_ended("x");
    world.compaction_ended("y");
    world.jobs.clear();
    let job = world.moving_of("m1");
    world.moved(job, Fate::Evicted);
    for name in ["w1", "w2"] {
        world.keep_for(name, "1g.10gb", "gpu-0");
    }
    world.compaction_ended("m1");
    world.later(1);
    assert_eq!(world.take_jobs().len(), 0);
    let why = "gpu-1 is not emptied: there is no room for pod default/m2 elsewhere any more";
    assert_eq!(world.notes(reasons::COMPACTION).last().map(String::as_str), Some(why));
}

#[test]
fn a_gap_that_an_ended_pod_leaves_to_its_successor_is_no_place_to_move_to() {
    let mut world = retention::left_behind(HALF);
    world.core.settings.compaction = Some(Compacting::default());
    world.handle(Input::Moves(None));
    world.jobs.clear();
    world.half("stays", false);
    let gpu = world.half("moves", true);
    assert!(gpu.starts_with("gpu-1-"), "{gpu}");
    retention::end(&mut world);
    world.later(31);
    let moves = world.take_jobs().into_iter().filter(|job| matches!(job, Job::Move { .. }));
    assert_eq!(moves.count(), 0, "the gap is kept");
}

/// A pod of anybody that never gets anything, and is tried again and again.
#[test]
fn one_pod_that_is_tried_again_and_again_does_not_keep_gaps_from_being_filled() {
    let (mut world, _) = World::halves();
    world.one("hopeless", &[request("r", "gpu.aliquot.dev", 2)]);
    let key = ObjectKey::new("default", "hopeless");
    let moves = (0..120).find(|_| {
        // As after a decision that ran out of time, or a write that the API server refuses.
        world.core.queue.put_off(&key, 9, world.now + Duration::from_secs(60));
        world.later(1);
        world.take_jobs().iter().any(|job| matches!(job, Job::Move { .. }))
    });
    // Half a minute each for it before a GPU is chosen, and before the pod goes.
    assert!(moves.is_some_and(|seconds| (30..95).contains(&seconds)), "after {moves:?} seconds");
}

impl World {
    /// After how many seconds a GPU is chosen, with a pod there that is tried again later and again.
    fn seconds_until_chosen(&mut self) -> Option<u64> {
        let key = ObjectKey::new("default", "hopeless");
        (1..200).find(|_| {
            self.core.queue.put_off(&key, 9, self.now + Duration::from_secs(60));
            self.later(1);
            self.core.compaction.is_under_way()
        })
    }
}

#[test]
fn after_an_end_pods_that_are_tried_again_come_first_as_long_as_before() {
    let (mut world, _) = World::halves();
    world.one("hopeless", &[request("r", "gpu.aliquot.dev", 2)]);
    let first = world.seconds_until_chosen().expect("chosen");
    world.later(10);
    world.core.end_compaction("of the test", world.now);
    // And what lies between two looks.
    let second = world.seconds_until_chosen().expect("chosen again");
    assert!(first >= 30 && second >= first + 29, "{first} s, then {second} s");
}

#[test]
fn while_pods_are_ready_those_that_are_tried_again_lose_no_time() {
    let (mut world, _) = World::halves();
    world.one("hopeless", &[request("r", "gpu.aliquot.dev", 2)]);
    let key = ObjectKey::new("default", "hopeless");
    world.core.queue.put_off(&key, 9, world.now);
    assert!(world.core.queue.has_ready(world.now));
    for _ in 0..60 {
        world.later(1);
    }
    let seconds = world.seconds_until_chosen();
    assert!(seconds.is_some_and(|seconds| seconds >= 30), "{seconds:?}");
}

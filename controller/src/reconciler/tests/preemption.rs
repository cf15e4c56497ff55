use super::*;
use crate::writer::{Eviction, Fate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

fn gpu() -> Value {
    request("r", "gpu.aliquot.dev", 1)
}

fn priority(priority: i32) -> impl FnOnce(&mut ApiPod) {
    move |pod| pod.spec.as_mut().expect("a spec").priority = Some(priority)
}

/// A share that is kept for somebody, whose GPU another claim holds until its pod is gone, is no share
/// that others could join.
#[test]
fn nobody_joins_a_share_whose_gpu_a_victim_still_holds() {
    let mut world = World::new(&[("n1", 1)]);
    let partition = [partition("r", "1g.10gb")];
    world.claim("victim", &partition);
    world.pod("victim", &["victim"], priority(-10));
    world.work();
    world.succeed("victim", &partition);
    world.pod("victim", &["victim"], |pod| {
        let spec = pod.spec.as_mut().expect("a spec");
        (spec.scheduling_gates, spec.node_name, spec.priority) = (None, Some("n1".to_owned()), Some(-10));
    });
    world.jobs.clear();
    let share = [fixtures::share("r", "8Gi", "5")];
    world.claim("urgent", &share);
    world.pod("urgent", &["urgent"], priority(10));
    world.work();
    assert!(matches!(world.take_job(), Job::MakeRoom { .. }));
    world.claim("other", &share);
    world.pod("other", &["other"], priority(0));
    world.work();
    let jobs = world.take_jobs();
    assert!(!jobs.iter().any(|job| matches!(job, Job::Allocate { .. })), "{jobs:?}");
}

impl World {
    /// A pod of that priority that runs with a claim of its own.
    fn placed(&mut self, name: &str, of: i32) {
        self.claim(name, &[gpu()]);
        self.pod(name, &[name], priority(of));
        self.work();
        self.succeed(name, &[gpu()]);
        self.pod(name, &[name], |pod| {
            priority(of)(pod);
            let spec = pod.spec.as_mut().expect("a spec");
            spec.node_name = Some("n1".to_owned());
            spec.scheduling_gates = None;
        });
        self.work();
        self.jobs.clear();
    }

    fn wanting(&mut self, name: &str, of: i32) {
        self.claim(name, &[gpu()]);
        self.pod(name, &[name], priority(of));
        self.work();
    }

    fn make_room(&mut self) -> (Job, Option<String>, Vec<String>) {
        let job = self.take_job();
        let Job::MakeRoom { node, victims, .. } = &job else { panic!("expected room, got {job:?}") };
        let names = victims.iter().map(|victim| victim.pod.name.to_string()).collect();
        let node = node.as_ref().map(ToString::to_string);
        (job, node, names)
    }

    /// The answer to a job that makes room, the pod's nominated node included.
    fn room_made(&mut self, job: Job, fate: &Fate) {
        let Job::MakeRoom { pod, node, victims, .. } = &job else { panic!("expected room, got {job:?}") };
        let known = self.core.index().pod(pod).expect("a pod").clone();
        let claims: Vec<String> = known.claim_keys().map(|key| key.name.to_string()).collect();
        let claims: Vec<&str> = claims.iter().map(String::as_str).collect();
        let mut api = fixtures::pod(&pod.name, &claims);
        api.metadata.uid = Some(known.uid.to_string());
        api.metadata.resource_version = Some(self.stamp());
        priority(known.priority)(&mut api);
        api.status = Some(object(json!({"nominatedNodeName": node.as_deref()})));
        let evictions = victims
            .iter()
            .map(|victim| Eviction { pod: victim.pod.clone(), uid: victim.uid.clone(), fate: fate.clone() })
            .collect();
        let outcome = Outcome { pod: Some(api), evictions, ..Outcome::of(job) };
        self.handle(Input::Done(Box::new(outcome)));
        self.work();
    }

    /// The pod ends: it is gone, and its claim is not allocated any more.
    fn ended(&mut self, name: &str) {
        let mut pod = fixtures::pod(name, &[name]);
        pod.metadata.uid = Some(format!("uid-{name}"));
        self.handle(Input::Pod(Seen::Delete(Box::new(pod))));
        self.work();
        let free = self.claim_with(name, &[gpu()], json!({}), json!({}));
        self.handle(Input::Claim(Seen::Apply(Box::new(free))));
        self.work();
    }

    fn told(&self, reason: &str) -> Vec<String> {
        self.reports
            .iter()
            .filter(|report| report.reason == reason)
            .map(|report| report.note.clone())
            .collect()
    }
}

#[test]
fn who_stands_lower_goes_and_what_it_had_is_kept() {
    let mut world = World::new(&[("n1", 1)]);
    world.placed("low", 0);
    world.wanting("high", 10);
    let (job, node, victims) = world.make_room();
    assert_eq!((node.as_deref(), victims), (Some("n1"), vec!["low".to_owned()]));
    world.room_made(job, &Fate::Evicted);
    assert_eq!(world.told(reasons::PREEMPTED).len(), 1);
    assert!(world.told(reasons::PREEMPTED)[0].contains("pod high"), "{:?}", world.reports);
    // While it ends nobody is evicted again, and who comes in between gets nothing.
    assert_eq!(world.take_jobs().len(), 0);
    world.wanting("between", 9);
    assert_eq!(world.take_jobs().len(), 0);
    world.ended("low");
    world.later(11);
    world.work();
    let job = world.take_job();
    let Job::Allocate { plan, .. } = &job else { panic!("expected an allocation, got {job:?}") };
    assert_eq!(&*plan.pod.name, "high");
}

#[test]
fn what_is_kept_for_a_pod_goes_to_it_or_to_one_that_stands_higher() {
    for higher in [false, true] {
        let mut world = World::new(&[("n1", 2)]);
        world.placed("low", 0);
        world.placed("peer", 10);
        world.wanting("high", 10);
        let (job, _, victims) = world.make_room();
        assert_eq!(victims, ["low"]);
        world.room_made(job, &Fate::Evicted);
        // As old, of the same priority, and before it in the order of names.
        world.wanting("first", 10);
        if higher {
            world.wanting("urgent", 11);
            let (job, node, victims) = world.make_room();
            assert_eq!((node.as_deref(), victims.len()), (Some("n1"), 0), "it is enough to wait");
            world.room_made(job, &Fate::Evicted);
        }
        assert_eq!(world.take_jobs().len(), 0);
        world.ended("low");
        let jobs = world.take_jobs();
        let given = jobs.iter().filter_map(|job| match job {
            Job::Allocate { plan, .. } => Some(&*plan.pod.name),
            _ => None,
        });
        let given: Vec<&str> = given.collect();
        assert_eq!(given, [if higher { "urgent" } else { "high" }]);
    }
}

#[test]
fn nobody_is_evicted_for_pods_that_do_not_want_it() {
    let mut world = World::new(&[("n1", 1)]);
    world.placed("low", 0);
    world.claim("never", &[gpu()]);
    world.pod("never", &["never"], |pod| {
        priority(10)(pod);
        pod.spec.as_mut().expect("a spec").preemption_policy = Some("Never".to_owned());
    });
    world.work();
    assert_eq!(world.take_jobs().len(), 0);
    // Without our gate it is kube-scheduler's.
    world.claim("free", &[gpu()]);
    world.pod("free", &["free"], |pod| {
        priority(10)(pod);
        pod.spec.as_mut().expect("a spec").scheduling_gates = None;
    });
    world.work();
    assert_eq!(world.take_jobs().len(), 0);
    world.core.settings.preemption = false;
    world.wanting("off", 10);
    assert_eq!(world.take_jobs().len(), 0);
    world.core.settings.preemption = true;
    world.later(20);
    world.pod("off", &["off"], priority(11));
    world.work();
    let (_, _, victims) = world.make_room();
    assert_eq!(victims, ["low"]);
}

#[test]
fn a_refused_eviction_leads_to_the_next_best_and_then_to_patience() {
    let mut world = World::new(&[("n1", 2)]);
    world.placed("a", 0);
    world.placed("b", 1);
    world.wanting("high", 10);
    let (job, _, victims) = world.make_room();
    assert_eq!(victims, ["a"]);
    world.room_made(job, &Fate::Refused("the budget says no".to_owned()));
    assert!(world.told(reasons::PREEMPTION_REFUSED)[0].contains("the budget says no"));
    let (job, _, victims) = world.make_room();
    assert_eq!(victims, ["b"]);
    world.room_made(job, &Fate::Refused("the budget says no".to_owned()));
    assert_eq!(world.take_jobs().len(), 0, "nobody is left");
    assert!(world.core.preemptions.nominations.is_empty(), "nothing is kept that nobody gave up");
    world.later(30);
    world.work();
    let (_, _, victims) = world.make_room();
    assert_eq!(victims, ["a"], "asked again");
}

#[test]
fn a_successor_keeps_what_was_made_room_for() {
    let mut world = World::new(&[("n1", 1)]);
    world.placed("low", 0);
    world.wanting("high", 10);
    let (job, _, _) = world.make_room();
    world.room_made(job, &Fate::Evicted);
    let claims: Vec<ResourceClaim> = vec![
        {
            let known = world.core.index().claim(&ObjectKey::new("default", "low")).expect("a claim").clone();
            let mut claim = known.stub();
            claim.spec = (*known.spec).clone();
            claim
        },
        world.claim_with("high", &[gpu()], json!({}), json!({})),
        world.claim_with("rival", &[gpu()], json!({}), json!({})),
    ];
    // A new controller finds: the victim ends, its claim is free, a rival of the same priority is older.
    let mut next = World::new(&[("n1", 1)]);
    let mut free = claims[0].clone();
    free.status = None;
    let mut low = fixtures::pod("low", &["low"]);
    low.metadata.uid = Some("uid-low".to_owned());
    low.metadata.deletion_timestamp = Some(Time(Timestamp::from_second(1_010).expect("a time")));
    let mut high = fixtures::pod("high", &["high"]);
    high.metadata.uid = Some("uid-high".to_owned());
    high.metadata.creation_timestamp = Some(Time(Timestamp::from_second(900).expect("a time")));
    high.status = Some(object(json!({"nominatedNodeName": "n1"})));
    priority(10)(&mut high);
    let mut rival = fixtures::pod("rival", &["rival"]);
    rival.metadata.uid = Some("uid-rival".to_owned());
    rival.metadata.creation_timestamp = Some(Time(Timestamp::from_second(800).expect("a time")));
    priority(10)(&mut rival);
    next.handle(Input::Claim(Seen::Reset(vec![free, claims[1].clone(), claims[2].clone()])));
    next.handle(Input::Pod(Seen::Reset(vec![low, high, rival])));
    next.work();
    let job =
        next.take_jobs().into_iter().find(|job| matches!(job, Job::Allocate { .. })).expect("an allocation");
    let Job::Allocate { plan, .. } = &job else { panic!("just found") };
    assert_eq!(&*plan.pod.name, "high", "not the older rival");
}

#[test]
fn what_is_kept_for_a_pod_that_goes_is_free_at_once() {
    let mut world = World::new(&[("n1", 1)]);
    world.placed("low", 0);
    world.wanting("high", 10);
    let (job, _, _) = world.make_room();
    world.room_made(job, &Fate::Evicted);
    world.ended("low");
    world.wanting("other", 5);
    let mut high = fixtures::pod("high", &["high"]);
    high.metadata.uid = Some("uid-high".to_owned());
    world.take_jobs();
    world.handle(Input::Pod(Seen::Delete(Box::new(high))));
    world.later(11);
    world.work();
    assert!(world.core.preemptions.nominations.is_empty());
}

impl World {
    /// How often it was looked whom to evict.
    fn searches(&self) -> usize {
        let text = self.core.metrics.text();
        let line = text.lines().find(|line| line.contains("preemption_seconds_count"));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_default()
    }
}

#[test]
fn pods_that_ask_for_the_same_cost_one_search_for_victims_until_somebody_ends() {
    let mut world = World::new(&[("n1", 1)]);
    world.placed("high", 20);
    // Of lower priority than those that come, but it has nothing.
    world.wanting("low", -10);
    for number in 0..20 {
        world.wanting(&format!("pod-{number}"), 0);
    }
    assert_eq!(world.searches(), 1);
    assert!(world.jobs.is_empty(), "{:?}", world.jobs);
    // Who has the GPU is to end: the next one waits for that.
    world.pod("high", &["high"], |pod| {
        priority(20)(pod);
        let spec = pod.spec.as_mut().expect("a spec");
        (spec.node_name, spec.scheduling_gates) = (Some("n1".to_owned()), None);
        pod.metadata.deletion_timestamp = Some(Time(Timestamp::from_second(1_010).expect("a time")));
    });
    world.wanting("last", 0);
    assert_eq!(world.searches(), 2);
    let (_, node, victims) = world.make_room();
    assert_eq!((node.as_deref(), victims.len()), (Some("n1"), 0));
}

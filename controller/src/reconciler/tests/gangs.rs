use super::*;
use aliquot_model::names::{GANG, GANG_SIZE};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::DynamicObject;
use proptest::prelude::*;
use rstest::rstest;
use std::collections::BTreeMap;

const NODES: &[(&str, u32)] = &[("n1", 2), ("n2", 2)];

#[derive(Debug, Clone)]
struct GangPod {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    created: i64,
    gated: bool,
    gpus: u32,
    /// What its claim has.
    allocation: Option<AllocationResult>,
}

/// A reconciler, and what the API has: it outlives the reconciler.
struct Scene {
    world: World,
    pods: BTreeMap<String, GangPod>,
    /// Groups of which a gate was lifted.
    begun: Vec<String>,
}

impl Scene {
    fn new() -> Self {
        Self { world: World::new(NODES), pods: BTreeMap::new(), begun: Vec::new() }
    }

    /// A pod of a group: its size, and how many GPUs it wants.
    fn add(&mut self, name: &str, gang: &str, size: Option<usize>, gpus: u32) {
        self.add_labelled(name, (GANG, gang), size, gpus);
    }

    fn add_labelled(&mut self, name: &str, label: (&str, &str), size: Option<usize>, gpus: u32) {
        let pod = GangPod {
            labels: [(label.0.to_owned(), label.1.to_owned())].into(),
            annotations: size.map(|size| (GANG_SIZE.to_owned(), size.to_string())).into_iter().collect(),
            created: i64::try_from(self.pods.len()).expect("few"),
            gated: true,
            gpus,
            allocation: None,
        };
        self.pods.insert(name.to_owned(), pod);
        self.show(name);
    }

    fn requests(&self, name: &str) -> Vec<Value> {
        vec![request("r", "gpu.aliquot.dev", self.pods[name].gpus)]
    }

    fn api_claim(&mut self, name: &str) -> ResourceClaim {
        let requests = self.requests(name);
        match self.pods[name].allocation.clone() {
            Some(allocation) => self.world.written(name, &requests, &allocation, name),
            None => self.world.claim_with(name, &requests, json!({}), json!({})),
        }
    }

    fn api_pod(&mut self, name: &str) -> ApiPod {
        let known = &self.pods[name];
        let mut pod = fixtures::pod(name, &[name]);
        let meta = &mut pod.metadata;
        meta.uid = Some(format!("uid-{name}"));
        meta.labels = Some(known.labels.clone());
        meta.annotations = Some(known.annotations.clone());
        meta.creation_timestamp = Some(Time(Timestamp::from_second(known.created).expect("a time")));
        if !known.gated {
            pod.spec.as_mut().expect("a spec").scheduling_gates = None;
        }
        pod.metadata.resource_version = Some(self.world.stamp());
        pod
    }

    /// The API shows a pod and its claim.
    fn show(&mut self, name: &str) {
        let claim = self.api_claim(name);
        self.world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
        let pod = self.api_pod(name);
        self.world.handle(Input::Pod(Seen::Apply(Box::new(pod))));
        self.world.work();
    }

    fn delete(&mut self, name: &str) {
        let (pod, claim) = (self.api_pod(name), self.api_claim(name));
        self.pods.remove(name);
        self.world.handle(Input::Pod(Seen::Delete(Box::new(pod))));
        self.world.handle(Input::Claim(Seen::Delete(Box::new(claim))));
        self.world.work();
    }

    /// The API does a job; its answer.
    fn apply(&mut self, job: Job) -> Outcome {
        match &job {
            Job::Allocate { plan, writes, gates, .. } => {
                let name = plan.pod.name.to_string();
                let in_gang = self.pods[&name].labels.contains_key(GANG);
                let begun = self.pods[&name].labels.get(GANG).is_some_and(|gang| self.begun.contains(gang));
                assert!(gates.is_none() || !in_gang || begun, "the gate of {name} would go with its claim");
                self.pods.get_mut(&name).expect("a pod").allocation = Some(writes[0].allocation.clone());
                if gates.is_some() {
                    self.pods.get_mut(&name).expect("a pod").gated = false;
                }
                let (claim, pod) = (self.api_claim(&name), gates.is_some().then(|| self.api_pod(&name)));
                Outcome { claims: vec![claim], pod, ..Outcome::of(job) }
            }
            Job::Lift { pod, .. } => {
                let name = pod.name.to_string();
                self.judge_lift(&name);
                self.pods.get_mut(&name).expect("a pod").gated = false;
                let pod = self.api_pod(&name);
                Outcome { pod: Some(pod), ..Outcome::of(job) }
            }
            Job::Deallocate { claim, .. } => {
                let name = claim.name.to_string();
                self.pods.get_mut(&name).expect("a pod").allocation = None;
                let claim = self.api_claim(&name);
                Outcome { claims: vec![claim], ..Outcome::of(job) }
            }
            _ => Outcome::of(job),
        }
    }

    /// When the first gate of a group is lifted, the whole group has its devices.
    fn judge_lift(&mut self, name: &str) {
        let Some(gang) = self.pods[name].labels.get(GANG).cloned() else { return };
        if !self.begun.contains(&gang) {
            let size = self.core_size(&gang);
            let given = self.members(&gang).filter(|(_, pod)| pod.allocation.is_some()).count();
            assert!(given >= size, "a gate of {gang} is lifted, and {given} of {size} pods have devices");
            self.begun.push(gang);
        }
    }

    fn core_size(&self, gang: &str) -> usize {
        self.world.core.index().gang_size(&ObjectKey::new("default", gang)).expect("a size")
    }

    fn members<'a>(&'a self, gang: &'a str) -> impl Iterator<Item = (&'a String, &'a GangPod)> {
        self.pods.iter().filter(move |(_, pod)| pod.labels.get(GANG).is_some_and(|of| of == gang))
    }

    fn gone(&self, job: &Job) -> bool {
        let name = match job {
            Job::Allocate { plan, .. } => &plan.pod.name,
            Job::Lift { pod, .. } => &pod.name,
            Job::Deallocate { claim, .. } => &claim.name,
            _ => return false,
        };
        !self.pods.contains_key(&**name)
    }

    /// The next job is done, or fails.
    fn step(&mut self, succeeds: bool) -> bool {
        if self.world.jobs.is_empty() {
            return false;
        }
        let job = self.world.jobs.remove(0);
        let outcome = if succeeds && !self.gone(&job) {
            self.apply(job)
        } else {
            let what = "it".to_owned();
            let error = WriteError::Exhausted { what, attempts: 3, last: "no answer".to_owned() };
            Outcome { error: Some(error), ..Outcome::of(job) }
        };
        self.world.handle(Input::Done(Box::new(outcome)));
        self.world.work();
        true
    }

    fn settle(&mut self) {
        while self.step(true) {}
    }

    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.world.later(1);
            self.world.work();
        }
    }

    /// The controller ends; some of what it had sent is done, and another one begins.
    fn crash(&mut self, done: usize) {
        let jobs: Vec<Job> = self.world.take_jobs();
        for job in jobs.into_iter().take(done) {
            if !self.gone(&job) {
                self.apply(job);
            }
        }
        self.world = World::new(NODES);
        let names: Vec<String> = self.pods.keys().cloned().collect();
        let claims = names.iter().map(|name| self.api_claim(name)).collect();
        let pods = names.iter().map(|name| self.api_pod(name)).collect();
        self.world.handle(Input::Claim(Seen::Reset(claims)));
        self.world.handle(Input::Pod(Seen::Reset(pods)));
        self.world.work();
    }

    fn given(&self) -> Vec<&str> {
        self.pods.iter().filter(|(_, pod)| pod.allocation.is_some()).map(|(name, _)| name.as_str()).collect()
    }

    fn lifted(&self) -> Vec<&str> {
        self.pods.iter().filter(|(_, pod)| !pod.gated).map(|(name, _)| name.as_str()).collect()
    }

    fn told(&self, words: &str) -> bool {
        self.world.reports.iter().any(|report| report.note.contains(words))
    }
}

#[test]
fn nobody_of_a_gang_gets_anything_before_all_are_there_and_fit() {
    let mut scene = Scene::new();
    for name in ["a-0", "a-1"] {
        scene.add(name, "a", Some(3), 1);
    }
    scene.settle();
    assert!(scene.given().is_empty());
    assert!(!scene.told("not complete"), "pods come one after the other");
    scene.pass(10);
    assert!(scene.told("its group a is not complete: 2 of 3 pods are there"), "{:?}", scene.world.reports);
    scene.add("a-2", "a", Some(3), 1);
    scene.settle();
    assert_eq!(scene.given(), ["a-0", "a-1", "a-2"]);
    assert_eq!(scene.lifted(), ["a-0", "a-1", "a-2"]);
}

#[test]
fn a_gang_that_does_not_fit_as_a_whole_leaves_the_room_to_others() {
    let mut scene = Scene::new();
    for number in 0..5 {
        scene.add(&format!("a-{number}"), "a", Some(5), 1);
    }
    scene.settle();
    assert!(scene.given().is_empty());
    assert!(scene.told("4 of 5 would fit, then pod a-4"), "{:?}", scene.world.reports);
    for number in 0..2 {
        scene.add(&format!("b-{number}"), "b", Some(2), 2);
    }
    scene.settle();
    assert_eq!(scene.lifted(), ["b-0", "b-1"]);
    // When they have ended, the first does not fit yet, as it needs five.
    scene.delete("b-0");
    scene.delete("b-1");
    scene.pass(15);
    scene.settle();
    assert!(scene.given().is_empty());
}

#[test]
fn two_gangs_of_which_one_fits_do_not_wait_for_each_other() {
    let mut scene = Scene::new();
    for number in 0..3 {
        scene.add(&format!("a-{number}"), "a", Some(3), 1);
        scene.add(&format!("b-{number}"), "b", Some(3), 1);
    }
    scene.settle();
    assert_eq!(scene.lifted(), ["a-0", "a-1", "a-2"]);
    assert_eq!(scene.given(), ["a-0", "a-1", "a-2"]);
    for number in 0..3 {
        scene.delete(&format!("a-{number}"));
    }
    scene.pass(15);
    scene.settle();
    assert_eq!(scene.lifted(), ["b-0", "b-1", "b-2"]);
}

#[test]
fn what_a_crash_leaves_half_done_is_completed() {
    for done in 0..=3 {
        let mut scene = Scene::new();
        for number in 0..3 {
            scene.add(&format!("a-{number}"), "a", Some(3), 1);
        }
        scene.crash(done);
        assert_eq!(scene.given().len(), done);
        assert!(scene.lifted().is_empty());
        scene.settle();
        scene.pass(5);
        scene.settle();
        assert_eq!(scene.lifted(), ["a-0", "a-1", "a-2"], "{done} were written");
    }
}

#[test]
fn what_cannot_be_completed_is_taken_back_after_the_time_out_and_a_gate_was_never_lifted() {
    let mut scene = Scene::new();
    for number in 0..4 {
        scene.add(&format!("a-{number}"), "a", Some(4), 1);
    }
    scene.crash(2);
    // Somebody takes the room in between.
    scene.world.jobs.clear();
    scene.crash(0);
    scene.world.jobs.clear();
    scene.pods.remove("a-3");
    scene.crash(0);
    scene.settle();
    assert_eq!(scene.given(), ["a-0", "a-1"]);
    scene.pass(20);
    scene.settle();
    assert_eq!(scene.given(), ["a-0", "a-1"], "a while it may still be completed");
    scene.pass(30);
    scene.settle();
    assert!(scene.given().is_empty() && scene.lifted().is_empty());
    assert!(scene.told("could not be completed within 30s"), "{:?}", scene.world.reports);
}

#[test]
fn pods_that_come_later_follow_by_themselves() {
    let mut scene = Scene::new();
    for number in 0..3 {
        scene.add(&format!("a-{number}"), "a", Some(2), 1);
    }
    scene.settle();
    scene.pass(15);
    scene.settle();
    assert_eq!(scene.lifted(), ["a-0", "a-1", "a-2"]);
    scene.add("a-3", "a", Some(2), 1);
    scene.settle();
    assert_eq!(scene.lifted().len(), 4);
}

#[test]
fn a_pod_of_our_label_without_a_size_waits_and_says_so() {
    let mut scene = Scene::new();
    scene.add("a-0", "a", None, 1);
    scene.settle();
    assert!(scene.given().is_empty());
    assert!(scene.told("set the annotation aliquot.dev/gang-size"), "{:?}", scene.world.reports);
}

/// The label of another scheduler's groups.
const THEIRS: (&str, &str) = ("scheduling.x-k8s.io/pod-group", "g");

#[rstest]
#[case::coscheduling("scheduling.x-k8s.io", json!({"minMember": 2}))]
#[case::kubernetes("scheduling.k8s.io", json!({"schedulingPolicy": {"gang": {"minCount": 2}}}))]
fn the_size_can_come_from_a_pod_group(#[case] api: &'static str, #[case] spec: Value) {
    let mut scene = Scene::new();
    let group: DynamicObject = object(json!({
        "apiVersion": "x/v1", "kind": "PodGroup", "metadata": {"name": "g", "namespace": "default"}, "spec": spec,
    }));
    scene.world.handle(Input::PodGroup(api, Seen::Reset(vec![group.clone()])));
    scene.add_labelled("a-0", THEIRS, None, 1);
    scene.settle();
    scene.pass(10);
    assert!(scene.told("1 of 2 pods are there"), "{:?}", scene.world.reports);
    assert!(scene.given().is_empty());
    // Without the PodGroup nobody says that they belong together.
    scene.world.handle(Input::PodGroup(api, Seen::Delete(Box::new(group))));
    scene.pass(15);
    scene.settle();
    assert_eq!(scene.lifted(), ["a-0"]);
}

#[test]
fn without_a_size_the_labels_of_others_mean_nothing() {
    let mut scene = Scene::new();
    scene.add_labelled("a-0", THEIRS, None, 1);
    scene.settle();
    assert_eq!(scene.lifted(), ["a-0"]);
}

#[derive(Debug, Clone)]
enum Op {
    Add { gang: usize, gpus: u32 },
    Delete(usize),
    Step,
    Fail,
    Pass(u64),
    Crash(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (0usize..4, 1u32..=2).prop_map(|(gang, gpus)| Op::Add { gang, gpus }),
        1 => (0usize..12).prop_map(Op::Delete),
        6 => Just(Op::Step),
        2 => Just(Op::Fail),
        2 => (1u64..20).prop_map(Op::Pass),
        1 => (0usize..4).prop_map(Op::Crash),
    ];
    prop::collection::vec(op, 1..50)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 5))]
    /// `judge_lift` sees to it at each step; here is what holds in the end.
    #[test]
    fn no_gang_is_left_with_a_part_whatever_fails_and_whenever(ops in ops()) {
        let mut scene = Scene::new();
        for (at, op) in ops.into_iter().enumerate() {
            match op {
                Op::Add { gang, gpus } => {
                    let (gang, size) = (format!("g{gang}"), gang + 1);
                    // Once it has begun, whoever comes is by itself.
                    if !scene.begun.contains(&gang) {
                        scene.add(&format!("{gang}-{at}"), &gang, Some(size), gpus);
                    }
                }
                Op::Delete(which) => {
                    let waiting: Vec<String> = scene.pods.iter()
                        .filter(|(_, pod)| pod.labels.get(GANG).is_some_and(|gang| !scene.begun.contains(gang)))
                        .map(|(name, _)| name.clone())
                        .collect();
                    // A gate that is being lifted is as good as lifted.
                    let lifting = scene.world.jobs.iter().any(|job| matches!(job, Job::Lift { .. }));
                    if let Some(name) = waiting.get(which).filter(|_| !lifting) {
                        scene.delete(name);
                    }
                }
                Op::Step => { scene.step(true); }
                Op::Fail => { scene.step(false); }
                Op::Pass(seconds) => scene.pass(seconds),
                Op::Crash(done) => scene.crash(done),
            }
        }
        for _ in 0..20 {
            scene.settle();
            scene.pass(6);
        }
        scene.settle();
        let gangs: std::collections::BTreeSet<String> =
            scene.pods.values().filter_map(|pod| pod.labels.get(GANG).cloned()).collect();
        for gang in gangs {
            let members: Vec<_> = scene.members(&gang).collect();
            let given = members.iter().filter(|(_, pod)| pod.allocation.is_some()).count();
            let lifted = members.iter().filter(|(_, pod)| !pod.gated).count();
            if scene.begun.contains(&gang) {
                prop_assert_eq!(given, lifted, "{}: {:?}", gang, &members);
            } else {
                prop_assert!(given == 0 && lifted == 0, "{}: {} given, {} lifted", gang, given, lifted);
            }
        }
    }
}

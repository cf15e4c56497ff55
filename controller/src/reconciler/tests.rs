use super::*;
use crate::lease::NotLeader;
use crate::writer::{Consumers, WriteError};
use aliquot_allocator::fixtures::{self, DRIVER, object, partition, request};
use aliquot_model::layout::{AllocatorMode, GpuState, Holding};
use k8s_openapi::api::resource::v1::AllocationResult;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::time::Duration;

mod budgets;
mod compaction;
mod decision_timeouts;
mod elastic;
mod gangs;
mod hand_over_from_scheduler;
mod preemption;
mod relists;
mod repeats;
mod reservations;
mod retention;
mod substitutes;

/// A reconciler with a cluster in front of it, and a clock.
struct World {
    core: Reconciler,
    began: Instant,
    now: Instant,
    version: u64,
    jobs: Vec<Job>,
    reports: Vec<Report>,
    /// Looks at what schedulers have under way.
    looks: Vec<Instant>,
}

impl World {
    fn new(nodes: &[(&str, u32)]) -> Self {
        let settings = Settings { idle: Duration::from_secs(30), ..Settings::default() };
        let core = Reconciler::new(DRIVER, settings, Arc::new(Metrics::new()));
        let now = Instant::now();
        let mut world = Self {
            core,
            began: now,
            now,
            version: 0,
            jobs: Vec::new(),
            reports: Vec::new(),
            looks: Vec::new(),
        };
        let slices = nodes
            .iter()
            .flat_map(|(name, gpus)| fixtures::slices(name, *gpus, AllocatorMode::Controller, 1))
            .collect();
        world.handle(Input::Class(Seen::Reset(fixtures::classes())));
        world.handle(Input::Slice(Seen::Reset(slices)));
        world.handle(Input::Claim(Seen::Reset(Vec::new())));
        world.handle(Input::Pod(Seen::Reset(Vec::new())));
        world.handle(Input::Node(Seen::Reset(nodes.iter().map(|(name, _)| fixtures::node(name)).collect())));
        world.jobs.retain(|job| !matches!(job, Job::Classes { .. }));
        world
    }

    fn handle(&mut self, input: Input) {
        self.core.handle(input, self.now);
        self.collect();
    }

    fn collect(&mut self) {
        for effect in self.core.take_effects() {
            match effect {
                Effect::Do(job) => {
                    // Who does it says so before.
                    match &job {
                        Job::MakeRoom { victims, .. } => {
                            self.reports.extend(victims.iter().map(|v| v.why.clone()))
                        }
                        Job::Move { why, .. } | Job::GoBack { why, .. } => self.reports.push(why.clone()),
                        _ => {}
                    }
                    self.jobs.push(job);
                }
                Effect::WriteBudget(_) => {}
                Effect::Look(began) => self.looks.push(began),
                Effect::Tell(report) => self.reports.push(report),
            }
        }
    }

    /// Decides all there is to decide.
    fn work(&mut self) {
        while self.core.has_work(self.now) {
            self.core.work(self.now, Timestamp::from_second(1_000).expect("a time"));
        }
        self.collect();
    }

    fn later(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        let passed = i64::try_from((self.now - self.began).as_secs()).expect("some seconds");
        let wall = Timestamp::from_second(1_000 + passed).expect("a time");
        self.core.tick(self.now, wall);
        self.collect();
    }

    fn stamp(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    fn claim_with(
        &mut self,
        name: &str,
        requests: &[Value],
        status: Value,
        annotations: Value,
    ) -> ResourceClaim {
        let version = self.stamp();
        object(json!({
            "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"),
                         "resourceVersion": version, "annotations": annotations},
            "spec": fixtures::spec(requests), "status": status,
        }))
    }

    fn claim(&mut self, name: &str, requests: &[Value]) {
        let claim = self.claim_with(name, requests, json!({}), json!({}));
        self.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    }

    fn pod(&mut self, name: &str, claims: &[&str], more: impl FnOnce(&mut ApiPod)) {
        let mut pod = fixtures::pod(name, claims);
        pod.metadata.uid = Some(format!("uid-{name}"));
        pod.metadata.resource_version = Some(self.stamp());
        more(&mut pod);
        self.handle(Input::Pod(Seen::Apply(Box::new(pod))));
    }

    fn one(&mut self, name: &str, requests: &[Value]) {
        self.claim(name, requests);
        self.pod(name, &[name], |_| {});
        self.work();
    }

    /// The jobs since the last call.
    fn take_jobs(&mut self) -> Vec<Job> {
        std::mem::take(&mut self.jobs)
    }

    fn take_job(&mut self) -> Job {
        let mut jobs = self.take_jobs();
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        jobs.remove(0)
    }

    /// The claim as the API has it after a job to allocate it.
    fn written(
        &mut self,
        name: &str,
        requests: &[Value],
        allocation: &AllocationResult,
        pod: &str,
    ) -> ResourceClaim {
        let seconds = allocation.allocation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
        let results = allocation.devices.clone().and_then(|devices| devices.results).unwrap_or_default();
        let mark = aliquot_allocator::snapshot::fingerprint(&format!("uid-{name}"), seconds, &results);
        let reserved = json!([{"resource": "pods", "name": pod, "uid": format!("uid-{pod}")}]);
        let status = json!({"allocation": allocation, "reservedFor": reserved});
        self.claim_with(name, requests, status, json!({aliquot_allocator::snapshot::FINGERPRINT: mark}))
    }

    fn done(&mut self, job: Job, claims: Vec<ResourceClaim>, error: Option<WriteError>) {
        let outcome = Outcome { claims, error, ..Outcome::of(job) };
        self.handle(Input::Done(Box::new(outcome)));
    }

    /// The node n1 with two GPUs says that these are held for somebody whose claim is gone.
    fn says_held(&mut self, minors: &[u32], generation: i64) {
        let gpus: Vec<GpuState> = (0..2)
            .map(|minor| GpuState {
                info: fixtures::h100("n1", minor),
                live: Vec::new(),
                held: if minors.contains(&minor) { vec![Holding::Whole] } else { Vec::new() },
                standing: Vec::new(),
                taints: Vec::new(),
            })
            .collect();
        for slice in fixtures::slices_of("n1", &gpus, AllocatorMode::Controller, generation) {
            self.handle(Input::Slice(Seen::Apply(Box::new(slice))));
        }
    }

    /// Does a job for one claim as if the API had taken it.
    fn succeed(&mut self, name: &str, requests: &[Value]) {
        let job = self.take_job();
        let Job::Allocate { writes, .. } = &job else { panic!("expected an allocation, got {job:?}") };
        let claim = self.written(name, requests, &writes[0].allocation.clone(), name);
        self.done(job, vec![claim], None);
    }
}

fn devices(job: &Job) -> Vec<String> {
    let Job::Allocate { writes, .. } = job else { panic!("expected an allocation, got {job:?}") };
    writes
        .iter()
        .flat_map(|write| write.allocation.devices.clone().and_then(|d| d.results).unwrap_or_default())
        .map(|result| result.device)
        .collect()
}

fn gpu() -> Vec<Value> {
    vec![request("r", "gpu.aliquot.dev", 1)]
}

#[test]
fn nothing_is_decided_before_everything_was_listed() {
    let mut core = Reconciler::new(DRIVER, Settings::default(), Arc::new(Metrics::new()));
    let now = Instant::now();
    let mut claim = fixtures::claim("c", &fixtures::spec(&gpu()));
    claim.metadata.uid = Some("uid-c".to_owned());
    let mut pod = fixtures::pod("c", &["c"]);
    pod.metadata.uid = Some("uid-p".to_owned());
    let slices = fixtures::slices("n1", 1, AllocatorMode::Controller, 1);
    let inputs = [
        Input::Class(Seen::Reset(fixtures::classes())),
        Input::Slice(Seen::Reset(slices)),
        Input::Claim(Seen::Reset(vec![claim])),
        Input::Node(Seen::Reset(vec![fixtures::node("n1")])),
        Input::Pod(Seen::Reset(vec![pod])),
    ];
    for input in inputs {
        assert!(!core.has_work(now));
        core.handle(input, now);
    }
    assert!(core.has_work(now));
}

#[test]
fn what_is_being_written_is_taken_already() {
    let mut world = World::new(&[("n1", 2)]);
    for name in ["a", "b", "c"] {
        world.one(name, &gpu());
    }
    let jobs = world.take_jobs();
    assert_eq!(jobs.iter().flat_map(devices).collect::<Vec<_>>(), ["gpu-0", "gpu-1"]);
    assert_eq!(world.reports.last().map(|report| report.reason), Some(reasons::DOES_NOT_FIT));
}

#[test]
fn a_failed_write_frees_what_it_held_and_the_pod_is_decided_anew() {
    let mut world = World::new(&[("n1", 1)]);
    world.one("a", &gpu());
    let job = world.take_job();
    world.one("b", &gpu());
    assert!(world.take_jobs().is_empty());
    world.done(job, Vec::new(), Some(WriteError::NotLeader(NotLeader)));
    world.now += Duration::from_secs(1);
    world.work();
    // Whoever comes first; not both.
    assert_eq!(world.take_jobs().len(), 1);
}

#[test]
fn a_pod_has_one_write_at_a_time() {
    let mut world = World::new(&[("n1", 2)]);
    world.one("a", &gpu());
    assert_eq!(world.take_jobs().len(), 1);
    world.pod("a", &["a"], |pod| pod.metadata.labels = Some([("new".to_owned(), "label".to_owned())].into()));
    world.claim("a", &gpu());
    world.work();
    assert!(world.take_jobs().is_empty());
}

#[test]
fn an_old_version_of_a_claim_does_not_undo_what_is_known() {
    let mut world = World::new(&[("n1", 1)]);
    let old = world.claim_with("a", &gpu(), json!({}), json!({}));
    world.one("a", &gpu());
    world.succeed("a", &gpu());
    world.handle(Input::Claim(Seen::Apply(Box::new(old))));
    world.one("b", &gpu());
    let jobs = world.take_jobs();
    assert!(jobs.iter().all(|job| matches!(job, Job::Lift { .. })), "{jobs:?}");
}

#[test]
fn the_answer_to_a_write_does_not_bring_a_deleted_claim_back() {
    let mut world = World::new(&[("n1", 1)]);
    world.one("a", &gpu());
    let job = world.take_job();
    let Job::Allocate { writes, .. } = &job else { panic!("an allocation") };
    let late = world.written("a", &gpu(), &writes[0].allocation.clone(), "a");
    world.handle(Input::Claim(Seen::Delete(Box::new(late.clone()))));
    world.done(job, vec![late], None);
    world.jobs.clear();
    world.one("b", &gpu());
    assert_eq!(world.take_jobs().iter().flat_map(devices).collect::<Vec<_>>(), ["gpu-0"]);
}

#[test]
fn a_hand_over_is_answered_when_the_last_write_of_its_pool_has_returned() {
    let mut world = World::new(&[("n1", 2)]);
    world.one("a", &gpu());
    let job = world.take_job();
    for slice in fixtures::slices("n1", 2, AllocatorMode::HandOver, 2) {
        world.handle(Input::Slice(Seen::Apply(Box::new(slice))));
    }
    world.later(1);
    assert!(world.take_jobs().is_empty());
    let Job::Allocate { writes, .. } = &job else { panic!("an allocation") };
    let claim = world.written("a", &gpu(), &writes[0].allocation.clone(), "a");
    world.done(job, vec![claim], None);
    let jobs = world.take_jobs();
    assert!(
        matches!(jobs.as_slice(), [Job::Acknowledge { node, generation: 2 }] if **node == *"n1"),
        "{jobs:?}"
    );
    // And not again.
    world.later(1);
    assert!(world.take_jobs().is_empty());
    // Unless it could not be written.
    let error = WriteError::Refused { what: "node n1".to_owned(), message: "no".to_owned() };
    world.done(jobs[0].clone(), Vec::new(), Some(error));
    world.later(1);
    assert_eq!(world.take_jobs().len(), 1);
}

#[test]
fn a_claim_without_consumers_is_taken_back_after_its_time_and_not_before() {
    let mut world = World::new(&[("n1", 1)]);
    world.one("a", &gpu());
    let job = world.take_job();
    let Job::Allocate { writes, .. } = &job else { panic!("an allocation") };
    let mut claim = world.written("a", &gpu(), &writes[0].allocation.clone(), "a");
    world.done(job, vec![claim.clone()], None);
    world.jobs.clear();
    claim.status.as_mut().expect("a status").reserved_for = None;
    claim.metadata.resource_version = Some(world.stamp());
    world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    world.later(29);
    assert!(world.take_jobs().iter().all(|job| matches!(job, Job::Lift { .. })));
    world.later(1);
    let job = world.take_job();
    assert!(matches!(&job, Job::Deallocate { consumers: Consumers::Nobody, .. }), "{job:?}");
    // Once is enough.
    world.later(60);
    assert!(world.take_jobs().is_empty());
}

#[test]
fn what_is_ours_to_give_is_taken_back_also_without_its_annotation() {
    let mut world = World::new(&[("n1", 1)]);
    world.one("a", &gpu());
    let job = world.take_job();
    let Job::Allocate { writes, .. } = &job else { panic!("an allocation") };
    let mut claim = world.written("a", &gpu(), &writes[0].allocation.clone(), "a");
    world.done(job, vec![claim.clone()], None);
    world.jobs.clear();
    claim.metadata.annotations = None;
    claim.metadata.resource_version = Some(world.stamp());
    world.handle(Input::Claim(Seen::Apply(Box::new(claim.clone()))));
    assert!(world.reports.iter().all(|report| report.reason != reasons::FOREIGN), "{:?}", world.reports);
    claim.status.as_mut().expect("a status").reserved_for = None;
    claim.metadata.resource_version = Some(world.stamp());
    world.handle(Input::Claim(Seen::Apply(Box::new(claim.clone()))));
    world.later(30);
    let job = world.jobs.pop().expect("it is taken back");
    assert!(matches!(&job, Job::Deallocate { consumers: Consumers::Nobody, .. }), "{job:?}");
}

#[test]
fn a_controller_that_comes_later_takes_back_what_lost_its_annotation() {
    let slices = || fixtures::slices("n1", 1, AllocatorMode::Controller, 1);
    let mut first = World::new(&[("n1", 1)]);
    first.one("a", &gpu());
    let job = first.take_job();
    let Job::Allocate { writes, .. } = &job else { panic!("an allocation") };
    let status = json!({"allocation": writes[0].allocation});
    let claim = first.claim_with("a", &gpu(), status, json!({}));
    // It sees the claim before it knows whose devices these are.
    let settings = Settings { idle: Duration::from_secs(30), ..Settings::default() };
    let core = Reconciler::new(DRIVER, settings, Arc::new(Metrics::new()));
    let now = Instant::now();
    let mut second =
        World { core, began: now, now, version: 0, jobs: Vec::new(), reports: Vec::new(), looks: Vec::new() };
    second.handle(Input::Claim(Seen::Reset(vec![claim])));
    second.handle(Input::Class(Seen::Reset(fixtures::classes())));
    second.handle(Input::Pod(Seen::Reset(Vec::new())));
    second.handle(Input::Node(Seen::Reset(vec![fixtures::node("n1")])));
    second.handle(Input::Slice(Seen::Reset(slices())));
    second.later(30);
    let taken = |job: &Job| matches!(job, Job::Deallocate { consumers: Consumers::Nobody, .. });
    assert!(second.jobs.iter().any(taken), "{:?}", second.jobs);
}

#[test]
fn a_node_that_is_given_back_again_and_again_is_left_out() {
    let mut world = World::new(&[("n1", 1), ("n2", 1)]);
    let requests = vec![partition("r", "1g.10gb")];
    world.claim("a", &requests);
    let mut nodes = Vec::new();
    for round in 0..3 {
        world.pod("a", &["a"], |pod| {
            pod.spec.as_mut().expect("a spec").scheduling_gates = None;
            // Something that a decision looks at, so that it is one.
            pod.spec.as_mut().expect("a spec").priority = Some(round);
        });
        world.now += Duration::from_secs(1);
        world.work();
        let job = world.take_job();
        let Job::Allocate { plan, writes, .. } = &job else { panic!("an allocation") };
        nodes.push(plan.node.to_string());
        let claim = world.written("a", &requests, &writes[0].allocation.clone(), "a");
        world.done(job, vec![claim], None);
        // kube-scheduler takes it back.
        let back = world.claim_with("a", &requests, json!({}), json!({}));
        world.handle(Input::Claim(Seen::Apply(Box::new(back))));
    }
    assert_eq!(nodes, ["n1", "n1", "n2"]);
    // With nowhere else to go, the reason that kube-scheduler gave is told.
    world.claim("rest", &gpu());
    world.pod("rest", &["rest"], |_| {});
    let said = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                       "message": "0/2 nodes are available: 2 node(s) had a feeling."}]);
    world.pod("a", &["a"], |pod| {
        pod.spec.as_mut().expect("a spec").scheduling_gates = None;
        pod.spec.as_mut().expect("a spec").node_selector =
            Some([("kubernetes.io/hostname".to_owned(), "n1".to_owned())].into());
        pod.status.get_or_insert_default().conditions = serde_json::from_value(said).ok();
    });
    world.now += Duration::from_secs(5);
    world.work();
    let told = world.reports.iter().filter(|report| report.reason == reasons::DOES_NOT_FIT);
    let notes: Vec<&str> = told.map(|report| report.note.as_str()).collect();
    assert!(
        notes.iter().any(|note| note.contains("were given back by kube-scheduler (2 times, the last time: 0/2 nodes")),
        "{notes:?}"
    );
}

#[test]
fn devices_of_a_pod_that_kube_scheduler_cannot_bind_are_taken_back_and_given_elsewhere() {
    let mut world = World::new(&[("n1", 1), ("n2", 1)]);
    world.claim("a", &gpu());
    let status = |reason: &str| json!([{"type": "PodScheduled", "status": "False", "reason": reason}]);
    let pod = |world: &mut World, reason: &str| {
        let conditions = serde_json::from_value(status(reason)).expect("conditions");
        world.pod("a", &["a"], |pod| {
            pod.spec.as_mut().expect("a spec").scheduling_gates = None;
            pod.status.get_or_insert_default().conditions = Some(conditions);
        });
    };
    let mut nodes = Vec::new();
    pod(&mut world, "SchedulerError");
    for _ in 0..3 {
        world.work();
        let job = world.take_job();
        let Job::Allocate { plan, writes, .. } = &job else { panic!("an allocation: {job:?}") };
        nodes.push(plan.node.to_string());
        let claim = world.written("a", &gpu(), &writes[0].allocation.clone(), "a");
        world.done(job, vec![claim], None);
        world.later(60);
        assert!(world.take_jobs().is_empty(), "an error is no verdict");
        pod(&mut world, "Unschedulable");
        world.later(29);
        assert!(world.take_jobs().is_empty(), "not so soon");
        world.later(1);
        let job = world.take_job();
        assert!(
            matches!(&job, Job::Deallocate { consumers: Consumers::Only(users), .. } if *users[0] == *"uid-a"),
            "{job:?}"
        );
        pod(&mut world, "SchedulerError");
        let back = world.claim_with("a", &gpu(), json!({}), json!({}));
        world.handle(Input::Claim(Seen::Apply(Box::new(back.clone()))));
        world.done(job, vec![back], None);
    }
    assert_eq!(nodes, ["n1", "n1", "n2"]);
    assert!(world.reports.iter().any(|report| report.reason == reasons::UNBINDABLE));
}

#[test]
fn a_pod_is_told_that_a_claim_which_it_names_does_not_exist() {
    let mut world = World::new(&[("a", 1)]);
    world.pod("lonely", &["missing"], |_| {});
    world.work();
    let said = world.reports.iter().find(|report| report.reason == reasons::WAITING).expect("a word");
    assert_eq!(said.note, "ResourceClaim default/missing does not exist; create it");
    // It goes on once somebody has made it.
    world.claim("missing", &gpu());
    world.work();
    assert_eq!(devices(&world.take_job()).len(), 1);
    // One that is made from a template comes by itself.
    world.reports.clear();
    world.pod("made", &["made"], |pod| {
        let claims = pod.spec.as_mut().and_then(|spec| spec.resource_claims.as_mut()).expect("claims");
        for claim in claims {
            claim.resource_claim_template_name = claim.resource_claim_name.take();
        }
    });
    world.work();
    assert_eq!(world.reports.len(), 0, "{:?}", world.reports);
}

#[test]
fn the_same_words_are_not_said_twice_in_a_row() {
    let mut world = World::new(&[("n1", 1)]);
    world.one("a", &gpu());
    world.take_jobs();
    world.one("b", &gpu());
    let said = world.reports.len();
    for _ in 0..5 {
        world.now += Duration::from_secs(20);
        world.handle(Input::Node(Seen::Apply(Box::new(object(json!({
            "metadata": {"name": "n1", "labels": {"x": world.now.elapsed().as_nanos().to_string()}},
            "status": {"allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110"}},
        }))))));
        world.work();
    }
    assert_eq!(world.reports.len(), said);
}

#[test]
fn an_allocation_is_ours_also_where_the_server_drops_its_timestamp() {
    let mut world = World::new(&[("n1", 2)]);
    world.one("a", &gpu());
    let job = world.take_job();
    let Job::Allocate { writes, .. } = &job else { panic!("expected an allocation, got {job:?}") };
    let allocation = writes[0].allocation.clone();
    let mut claim = world.written("a", &gpu(), &allocation, "a");
    let stored = claim.status.as_mut().and_then(|status| status.allocation.as_mut()).unwrap();
    assert!(stored.allocation_timestamp.take().is_some());
    world.done(job, vec![claim.clone()], None);
    world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    assert!(world.reports.iter().all(|report| report.reason != reasons::FOREIGN), "{:?}", world.reports);
    world.one("b", &gpu());
    assert!(world.take_jobs().iter().any(|job| matches!(job, Job::Allocate { .. })), "the pool goes on");
}

#[test]
fn a_foreign_allocation_that_happened_while_nobody_watched_is_noticed() {
    let mut world = World::new(&[("n1", 2)]);
    world.claim("a", &gpu());
    let status = json!({"allocation": {"devices": {"results": [
        {"request": "r", "driver": DRIVER, "pool": format!("{DRIVER}/n1"), "device": "gpu-1"}]}}});
    let claim = world.claim_with("a", &gpu(), status, json!({}));
    world.handle(Input::Claim(Seen::Reset(vec![claim])));
    assert_eq!(world.reports.iter().filter(|report| report.reason == reasons::FOREIGN).count(), 2);
    world.one("b", &gpu());
    assert!(world.take_jobs().is_empty());
    world.handle(Input::Claim(Seen::Reset(Vec::new())));
    world.claim("c", &gpu());
    world.pod("c", &["c"], |_| {});
    world.work();
    assert_eq!(world.take_jobs().len(), 1);
}

#[test]
fn claims_that_tolerate_our_taint_are_reported_at_start() {
    let settings = Settings::default();
    let mut core = Reconciler::new(DRIVER, settings, Arc::new(Metrics::new()));
    let now = Instant::now();
    let mut tolerant = request("r", "gpu.aliquot.dev", 1);
    tolerant["exactly"]["tolerations"] = json!([{"operator": "Exists"}]);
    let mut claim = fixtures::claim("c", &fixtures::spec(&[tolerant]));
    claim.metadata.uid = Some("uid-c".to_owned());
    core.handle(Input::Class(Seen::Reset(fixtures::classes())), now);
    core.handle(Input::Slice(Seen::Reset(Vec::new())), now);
    core.handle(Input::Claim(Seen::Reset(vec![claim])), now);
    core.handle(Input::Node(Seen::Reset(Vec::new())), now);
    core.handle(Input::Pod(Seen::Reset(Vec::new())), now);
    let told = core.take_effects().into_iter().any(|effect| {
        matches!(effect, Effect::Tell(report) if report.reason == reasons::TOLERATES
            && report.note.contains("make the claim anew without that toleration"))
    });
    assert!(told);
}

#[test]
fn the_policy_is_told_which_classes_can_select_our_devices() {
    let mut world = World::new(&[]);
    let foreign = fixtures::class("nic.example.com", r#"device.driver == "nic.example.com""#);
    world.handle(Input::Class(Seen::Apply(Box::new(foreign))));
    assert!(world.take_jobs().is_empty(), "nothing new to tell");
    world.handle(Input::Class(Seen::Apply(Box::new(fixtures::class("anything", "true")))));
    let Job::Classes { names } = world.take_job() else { panic!("the list") };
    assert_eq!(
        names,
        ["admin.aliquot.dev", "anything", "gpu.aliquot.dev", "mig.aliquot.dev", "share.aliquot.dev"]
    );
}

#[test]
fn a_pod_that_others_hold_back_is_not_decided_yet() {
    let mut world = World::new(&[("n1", 1)]);
    world.claim("a", &gpu());
    world.pod("a", &["a"], |pod| {
        let gates = pod.spec.as_mut().expect("a spec").scheduling_gates.as_mut().expect("gates");
        gates.push(object(json!({"name": "other"})));
    });
    world.work();
    assert!(world.take_jobs().is_empty());
    world.pod("a", &["a"], |_| {});
    world.work();
    assert_eq!(world.take_jobs().len(), 1);
}

#[test]
fn urgent_pods_come_first_when_room_appears() {
    let mut world = World::new(&[("n1", 1)]);
    world.core.settings.preemption = false;
    world.one("a", &gpu());
    world.succeed("a", &gpu());
    world.jobs.clear();
    for (name, priority) in [("low", 0), ("high", 9)] {
        world.claim(name, &gpu());
        world.pod(name, &[name], |pod| pod.spec.as_mut().expect("a spec").priority = Some(priority));
    }
    world.work();
    world.jobs.retain(|job| !matches!(job, Job::Lift { .. }));
    assert!(world.take_jobs().is_empty());
    world.now += Duration::from_secs(30);
    let gone = world.claim_with("a", &gpu(), json!({}), json!({}));
    world.handle(Input::Claim(Seen::Delete(Box::new(gone))));
    world.work();
    let Job::Allocate { plan, .. } = world.take_job() else { panic!("an allocation") };
    assert_eq!(&*plan.pod.name, "high");
}

#[test]
fn what_was_given_out_of_held_hardware_is_taken_back_unless_it_runs() {
    for started in [false, true] {
        let mut world = World::new(&[("n1", 2)]);
        world.one("a", &gpu());
        world.succeed("a", &gpu());
        world.pod("a", &["a"], |pod| {
            let spec = pod.spec.as_mut().expect("a spec");
            (spec.scheduling_gates, spec.node_name) = (None, Some("n1".to_owned()));
            pod.status = object(json!({"phase": if started { "Running" } else { "Pending" }}));
        });
        world.jobs.clear();
        world.says_held(&[0], 2);
        world.later(1);
        let jobs = world.take_jobs();
        assert_eq!(
            jobs.iter().filter(|job| matches!(job, Job::Deallocate { .. })).count(),
            usize::from(!started)
        );
        if started {
            continue;
        }
        let free = world.claim_with("a", &gpu(), json!({}), json!({}));
        world.done(jobs[0].clone(), vec![free], None);
        world.work();
        assert_eq!(devices(&world.take_job()), ["gpu-1"]);
    }
}

fn quota(spec: Value) -> aliquot_api::v1alpha1::GpuQuota {
    object(json!({"metadata": {"name": "limits", "namespace": "default"}, "spec": spec}))
}

#[test]
fn two_requests_at_once_cannot_slip_past_a_quota_together() {
    let mut world = World::new(&[("n1", 2)]);
    world.handle(Input::Quota(Seen::Reset(vec![quota(json!({"hard": {"gpus": 1}}))])));
    // The first is being written, and counts.
    world.one("a", &gpu());
    world.one("b", &gpu());
    let first = world.take_job();
    assert_eq!(devices(&first).len(), 1);
    let told: Vec<_> = world.reports.iter().filter(|r| r.reason == reasons::QUOTA).collect();
    assert_eq!(told.len(), 2, "the pod and the claim: {told:?}");
    assert!(told.iter().all(|r| r.note.contains("gpus: hard 1, used 1, asked 1")), "{told:?}");
    // It was not written, so the second may have it.
    world.done(first, Vec::new(), Some(WriteError::NotLeader(NotLeader)));
    world.pod("a", &[], |pod| pod.spec.as_mut().expect("a spec").scheduling_gates = None);
    world.now += Duration::from_secs(20);
    world.work();
    assert_eq!(devices(&world.take_job()).len(), 1);
}

#[test]
fn a_raised_quota_lets_the_waiting_pod_go_on_and_status_says_what_is_held() {
    let mut world = World::new(&[("n1", 2)]);
    world.handle(Input::Quota(Seen::Reset(vec![quota(json!({"hard": {"memory": "40Gi"}}))])));
    world.one("a", &gpu());
    assert!(world.take_jobs().is_empty());
    world.handle(Input::Quota(Seen::Apply(Box::new(quota(json!({"hard": {"memory": "80Gi"}}))))));
    world.now += Duration::from_secs(20);
    world.work();
    world.succeed("a", &gpu());
    world.later(1);
    let jobs = world.take_jobs();
    let status = jobs.iter().find_map(|job| match job {
        Job::QuotaStatus { status, .. } => Some(status),
        _ => None,
    });
    assert_eq!(
        status.map(|s| (s.claims, s.used.memory.0, s.used.gpus.0)),
        Some((1, 80 << 30, 1)),
        "{jobs:?}"
    );
    // It is on its way: not again.
    world.later(1);
    assert!(world.take_jobs().is_empty());
}

#[test]
fn nothing_is_decided_before_the_quotas_were_listed() {
    let settings = Settings { quotas: true, ..Settings::default() };
    let mut core = Reconciler::new(DRIVER, settings, Arc::new(Metrics::new()));
    let now = Instant::now();
    core.handle(Input::Class(Seen::Reset(Vec::new())), now);
    core.handle(Input::Slice(Seen::Reset(Vec::new())), now);
    core.handle(Input::Claim(Seen::Reset(Vec::new())), now);
    core.handle(Input::Pod(Seen::Reset(Vec::new())), now);
    core.handle(Input::Node(Seen::Reset(Vec::new())), now);
    assert!(!core.is_synced());
    core.handle(Input::Quota(Seen::Reset(Vec::new())), now);
    assert!(core.is_synced());
}

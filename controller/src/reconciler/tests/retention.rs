//! Devices of claims that die with their pod.

use super::*;
use aliquot_model::names::{HOLD_FOR, RECLAIM};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// For so long a hold claim waits for its devices, in seconds.
const PATIENCE: u64 = 60;

fn owner(kind: &str, name: &str) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: kind.to_owned(),
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        controller: Some(true),
        ..OwnerReference::default()
    }
}

/// The claim `a` as made for the pod `a` from a template that keeps devices.
fn of_template(mut claim: ResourceClaim) -> ResourceClaim {
    let wish = [(RECLAIM.to_owned(), "Retain".to_owned()), (HOLD_FOR.to_owned(), "1h".to_owned())];
    claim.metadata.annotations.get_or_insert_default().extend(wish);
    claim.metadata.owner_references = Some(vec![owner("Pod", "a")]);
    claim
}

/// The pod `a` of a controller, its claim made.
fn made(pod: &mut ApiPod) {
    pod.metadata.owner_references = Some(vec![owner("ReplicaSet", "maker")]);
    let claims = json!([{"name": "gpu", "resourceClaimTemplateName": "t"}]);
    pod.spec.get_or_insert_default().resource_claims = Some(serde_json::from_value(claims).expect("claims"));
    let made = json!({"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "a"}]});
    pod.status = Some(serde_json::from_value(made).expect("a status"));
}

/// The same on its node, not seen to run yet.
fn bound(pod: &mut ApiPod) {
    made(pod);
    if let Some(spec) = &mut pod.spec {
        spec.scheduling_gates = None;
        spec.node_name = Some("n1".to_owned());
    }
}

/// The pod `a` has its devices, is bound, and Kubernetes takes the devices back.
fn robbed() -> World {
    let mut world = World::new(&[("n1", 2)]);
    let claim = of_template(world.claim_with("a", &gpu(), json!({}), json!({})));
    world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    world.pod("a", &["a"], made);
    world.work();
    let job = world.take_job();
    let Job::Allocate { writes, .. } = &job else { panic!("an allocation") };
    let claim = of_template(world.written("a", &gpu(), &writes[0].allocation.clone(), "a"));
    world.done(job, vec![claim], None);
    world.pod("a", &["a"], bound);
    world.work();
    world.take_jobs();
    let cleared = of_template(world.claim_with("a", &gpu(), json!({}), json!({})));
    world.handle(Input::Claim(Seen::Apply(Box::new(cleared))));
    world.work();
    world
}

fn allocates(jobs: &[Job]) -> usize {
    jobs.iter().filter(|job| matches!(job, Job::Allocate { .. })).count()
}

#[test]
fn a_pod_whose_devices_kubernetes_took_as_it_ended_is_not_given_others_and_leaves_them() {
    let mut world = robbed();
    assert_eq!(allocates(&world.take_jobs()), 0);
    world.pod("a", &["a"], |pod| {
        bound(pod);
        pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
    });
    world.core.keep_holds(world.now, Timestamp::from_second(1_001).expect("a time"));
    world.collect();
    let jobs = world.take_jobs();
    assert!(jobs.iter().any(|job| matches!(job, Job::MakeHold { .. })), "{jobs:?}");
}

#[test]
fn a_pod_that_lost_its_devices_and_does_not_end_gets_others_after_a_while() {
    let mut world = robbed();
    world.take_jobs();
    world.core.keep_holds(world.now, Timestamp::from_second(1_010).expect("a time"));
    world.later(10);
    world.work();
    assert_eq!(allocates(&world.take_jobs()), 1);
}

/// What is done for claims without a pod.
fn keep(world: &mut World) -> Vec<Job> {
    world.core.keep_holds(world.now, Timestamp::from_second(1_001).expect("a time"));
    world.work();
    world.take_jobs()
}

/// The same, and its pod ends: what is to be done first, the making of the hold claim.
fn ended() -> (World, Job, ResourceClaim) {
    let mut world = robbed();
    world.take_jobs();
    world.pod("a", &["a"], |pod| {
        bound(pod);
        pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
    });
    let jobs = keep(&mut world);
    let [job @ Job::MakeHold { claim, .. }] = jobs.as_slice() else { panic!("a hold claim, not {jobs:?}") };
    (world, job.clone(), (**claim).clone())
}

/// The same, and the hold claim is in the API.
fn survived() -> (World, ResourceClaim) {
    let (mut world, _, claim) = ended();
    let claim = in_the_api(&mut world, claim);
    (world, claim)
}

/// The hold claim as it is seen.
fn in_the_api(world: &mut World, mut claim: ResourceClaim) -> ResourceClaim {
    claim.metadata.uid = Some("uid-hold".to_owned());
    claim.metadata.creation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        Timestamp::from_second(1_001).expect("a time"),
    ));
    let seen = again(world, &claim);
    world.handle(Input::Claim(Seen::Apply(seen)));
    claim
}

/// A later version of a claim.
fn again(world: &mut World, claim: &ResourceClaim) -> Box<ResourceClaim> {
    let mut claim = Box::new(claim.clone());
    claim.metadata.resource_version = Some(world.stamp());
    claim
}

#[test]
fn a_hold_claim_that_is_seen_before_the_answer_to_its_making_is_not_in_its_own_way() {
    let (mut world, _) = survived();
    let jobs = keep(&mut world);
    assert!(matches!(jobs.as_slice(), [Job::Bind { .. }]), "{jobs:?}");
}

#[test]
fn a_hold_claim_that_the_api_server_does_not_take_now_is_made_later() {
    let (mut world, job, _) = ended();
    let error = WriteError::Exhausted { what: "claim".to_owned(), attempts: 1, last: "no answer".to_owned() };
    world.done(job, Vec::new(), Some(error));
    let jobs = keep(&mut world);
    let [job @ Job::MakeHold { .. }] = jobs.as_slice() else { panic!("a hold claim, not {jobs:?}") };
    // A word against it is the last.
    let error = WriteError::Refused { what: "claim".to_owned(), message: "over quota".to_owned() };
    world.done(job.clone(), Vec::new(), Some(error));
    let jobs = keep(&mut world);
    assert!(jobs.is_empty(), "{jobs:?}");
}

#[test]
fn a_hold_claim_that_was_made_without_an_answer_is_not_made_again() {
    let (mut world, job, claim) = ended();
    let seen = in_the_api(&mut world, claim);
    let gone = again(&mut world, &seen);
    world.handle(Input::Claim(Seen::Delete(gone)));
    let error = WriteError::Exhausted { what: "claim".to_owned(), attempts: 1, last: "no answer".to_owned() };
    world.done(job, Vec::new(), Some(error));
    let jobs = keep(&mut world);
    assert!(jobs.is_empty(), "{jobs:?}");
}

#[test]
fn a_hold_claim_that_cannot_be_made_for_all_its_time_is_given_up() {
    let (mut world, job, _) = ended();
    let error =
        || WriteError::Exhausted { what: "claim".to_owned(), attempts: 1, last: "no answer".to_owned() };
    world.done(job, Vec::new(), Some(error()));
    let at = |world: &mut World, second| {
        world.core.keep_holds(world.now, Timestamp::from_second(second).expect("a time"));
        world.collect();
        world.take_jobs()
    };
    let jobs = at(&mut world, 1_001 + 3_599);
    let [job @ Job::MakeHold { .. }] = jobs.as_slice() else { panic!("a hold claim, not {jobs:?}") };
    world.done(job.clone(), Vec::new(), Some(error()));
    let jobs = at(&mut world, 1_001 + 3_600);
    assert!(jobs.is_empty(), "{jobs:?}");
}

#[test]
fn the_next_pod_does_not_wait_for_ever_for_a_hold_claim_that_cannot_be_made() {
    let (mut world, job, _) = ended();
    let error = WriteError::Exhausted { what: "claim".to_owned(), attempts: 1, last: "no answer".to_owned() };
    world.done(job, Vec::new(), Some(error));
    let mut claim = of_template(world.claim_with("b", &gpu(), json!({}), json!({})));
    claim.metadata.owner_references = Some(vec![owner("Pod", "b")]);
    world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    world.pod("b", &["b"], |pod| {
        made(pod);
        let made = json!({"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "b"}]});
        pod.status = Some(serde_json::from_value(made).expect("a status"));
    });
    let jobs = keep(&mut world);
    assert_eq!(allocates(&jobs), 0, "{jobs:?}");
    let wall = Timestamp::from_second(1_002 + i64::try_from(PATIENCE).expect("seconds")).expect("a time");
    world.later(PATIENCE);
    world.core.work(world.now, wall);
    world.collect();
    let jobs = world.take_jobs();
    assert_eq!(allocates(&jobs), 1, "{jobs:?}");
}

#[test]
fn a_hold_claim_waits_for_devices_that_are_held_for_the_claim_of_its_pod() {
    let (mut world, _) = survived();
    world.says_held(&[0], 2);
    let jobs = keep(&mut world);
    assert!(jobs.is_empty(), "{jobs:?}");
    world.says_held(&[], 3);
    world.later(2);
    let jobs = keep(&mut world);
    assert!(matches!(jobs.as_slice(), [Job::Bind { .. }]), "{jobs:?}");
}

#[test]
fn a_hold_claim_waits_while_its_node_publishes_anew() {
    let (mut world, _) = survived();
    let mut slices = fixtures::slices("n1", 2, AllocatorMode::Controller, 2);
    let last = slices.pop().expect("some slices");
    assert!(!slices.is_empty(), "a pool of several slices");
    for slice in slices {
        world.handle(Input::Slice(Seen::Apply(Box::new(slice))));
    }
    let jobs = keep(&mut world);
    assert!(jobs.is_empty(), "{jobs:?}");
    world.handle(Input::Slice(Seen::Apply(Box::new(last))));
    world.later(2);
    let jobs = keep(&mut world);
    assert!(matches!(jobs.as_slice(), [Job::Bind { .. }]), "{jobs:?}");
}

#[test]
fn a_hold_claim_whose_devices_stay_held_is_given_up_after_a_while() {
    let (mut world, _) = survived();
    world.says_held(&[0], 2);
    keep(&mut world);
    world.later(PATIENCE);
    let wall = Timestamp::from_second(1_002 + i64::try_from(PATIENCE).expect("seconds")).expect("a time");
    world.core.keep_holds(world.now, wall);
    world.core.work(world.now, wall);
    world.collect();
    let jobs = world.take_jobs();
    assert!(matches!(jobs.as_slice(), [Job::DropHold { .. }]), "{jobs:?}");
}

#[test]
fn what_a_hold_claim_has_stays_when_its_node_says_that_it_is_held() {
    let (mut world, mut claim) = survived();
    let jobs = keep(&mut world);
    let [job @ Job::Bind { writes, .. }] = jobs.as_slice() else { panic!("a binding, not {jobs:?}") };
    let allocation = writes.first().expect("one").allocation.clone();
    let seconds = allocation.allocation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
    let results = allocation.devices.clone().and_then(|devices| devices.results).unwrap_or_default();
    let mark = aliquot_allocator::snapshot::fingerprint("uid-hold", seconds, &results);
    claim
        .metadata
        .annotations
        .get_or_insert_default()
        .insert(aliquot_allocator::snapshot::FINGERPRINT.to_owned(), mark);
    claim.status = Some(object(json!({"allocation": allocation})));
    let claim = *again(&mut world, &claim);
    world.done(job.clone(), vec![claim], None);
    world.says_held(&[0], 2);
    world.later(1);
    let jobs = keep(&mut world);
    assert!(jobs.is_empty(), "{jobs:?}");
}

/// A pod that has a partition and leaves it to the next.
pub(super) fn left_behind(profile: &str) -> World {
    let mut world = World::new(&[("n1", 2)]);
    let requests = [partition("r", profile)];
    let claim = of_template(world.claim_with("a", &requests, json!({}), json!({})));
    world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    world.pod("a", &["a"], made);
    world.work();
    let job = world.take_job();
    let Job::Allocate { writes, .. } = &job else { panic!("an allocation") };
    let claim = of_template(world.written("a", &requests, &writes[0].allocation.clone(), "a"));
    world.done(job, vec![claim], None);
    world.pod("a", &["a"], bound);
    world.work();
    world.take_jobs();
    world
}

/// It ends, and its claim with it.
pub(super) fn end(world: &mut World) {
    world.pod("a", &["a"], |pod| {
        bound(pod);
        pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
    });
    world.core.keep_holds(world.now, Timestamp::from_second(1_001).expect("a time"));
    let mut pod = fixtures::pod("a", &["a"]);
    bound(&mut pod);
    pod.metadata.uid = Some("uid-a".to_owned());
    pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
    world.handle(Input::Pod(Seen::Delete(Box::new(pod))));
    let claim = of_template(world.claim_with("a", &gpu(), json!({}), json!({})));
    world.handle(Input::Claim(Seen::Delete(Box::new(claim))));
    world.work();
}

use super::*;
use aliquot_allocator::elastic::Size;
use aliquot_allocator::snapshot::Claim;
use aliquot_api::v1alpha1::{NodeLimitsSpec, NodeLimitsStatus};
use aliquot_model::names::{COMPANION_OF, LIMITS};
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;

mod partition;

const GIB: u64 = 1 << 30;

/// The API as far as this goes: it takes every write.
#[derive(Default)]
struct Api {
    generation: i64,
    spec: Option<NodeLimitsSpec>,
    status: NodeLimitsStatus,
}

fn base() -> Vec<Value> {
    vec![fixtures::share("r", "10Gi", "30")]
}

impl World {
    /// A pod that runs on a share of 10 GiB and 30 percent.
    fn elastic() -> (Self, Api) {
        let mut world = Self::new(&[("n1", 1)]);
        world.core.settings.elastic = true;
        world.handle(Input::NodeLimits(Seen::Reset(Vec::new())));
        world.one("a", &base());
        world.succeed("a", &base());
        world.runs("a");
        (world, Api::default())
    }

    fn runs(&mut self, name: &str) {
        self.pod(name, &[name], |pod| {
            let spec = pod.spec.as_mut().expect("a spec");
            (spec.node_name, spec.scheduling_gates) = (Some("n1".to_owned()), None);
        });
        self.work();
        self.jobs.clear();
    }

    fn share(&self, name: &str) -> Claim {
        self.core.index.claim(&ObjectKey::new("default", name)).expect("known").clone()
    }

    /// The claim's annotation is this from now on.
    fn wish(&mut self, text: Option<&str>) {
        let known = self.share("a");
        let mut claim = self.again(&known);
        let annotations = claim.metadata.annotations.get_or_insert_default();
        annotations.remove(LIMITS);
        if let Some(text) = text {
            annotations.insert(LIMITS.to_owned(), text.to_owned());
        }
        self.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    }

    /// A claim that is known, as an object.
    fn again(&mut self, known: &Claim) -> ResourceClaim {
        let index = &self.core.index;
        let results: Vec<Value> = known
            .allocation
            .iter()
            .flat_map(|allocation| &allocation.held)
            .map(|held| {
                let consumed: serde_json::Map<String, Value> = held
                    .consumed
                    .iter()
                    .map(|(name, amount)| (index.name(*name).to_owned(), json!(amount.to_string())))
                    .collect();
                json!({"request": &*held.request, "driver": DRIVER, "pool": index.name(held.pool),
                       "device": index.name(held.device), "shareID": held.share.as_deref(),
                       "consumedCapacity": consumed})
            })
            .collect();
        let mut annotations = serde_json::Map::new();
        let mut status = json!({"reservedFor": known.reserved_for});
        if let Some(allocation) = &known.allocation {
            annotations.insert(aliquot_allocator::snapshot::FINGERPRINT.to_owned(), json!(&*allocation.mark));
            status["allocation"] = json!({
                "allocationTimestamp": Timestamp::from_second(allocation.timestamp.unwrap_or_default()).expect("a time").to_string(),
                "devices": {"results": results},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]},
            });
        }
        if let Some(of) = &known.companion {
            annotations.insert(COMPANION_OF.to_owned(), json!(of.text()));
        }
        if let Some(limits) = &known.limits {
            annotations.insert(LIMITS.to_owned(), json!(&**limits));
        }
        let version = self.stamp();
        object(json!({
            "metadata": {"name": &*known.key.name, "namespace": "default", "uid": &*known.uid,
                         "resourceVersion": version, "annotations": annotations},
            "spec": &*known.spec, "status": status,
        }))
    }

    /// The node does what it is told.
    fn node_confirms(&mut self, api: &mut Api) {
        api.status.observed_generation = api.generation;
        let object = self.limits_object(api);
        self.handle(Input::NodeLimits(Seen::Apply(Box::new(object))));
    }

    fn limits_object(&mut self, api: &Api) -> DynamicObject {
        let version = self.stamp();
        object(json!({
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "NodeLimits",
            "metadata": {"name": "n1", "resourceVersion": version, "generation": api.generation},
            "spec": api.spec, "status": api.status,
        }))
    }

    /// Does one job as the API would; its name.
    fn serve(&mut self, api: &mut Api) -> Option<&'static str> {
        self.core.keep_elastic(self.now, Timestamp::from_second(2_000).expect("a time"));
        self.collect();
        let jobs = self.take_jobs();
        assert!(jobs.len() < 2, "one step at a time: {jobs:?}");
        let job = jobs.into_iter().next()?;
        let mut outcome = Outcome::of(job.clone());
        let name = match &job {
            Job::Limits { spec, .. } => {
                api.generation += 1;
                api.spec = Some(spec.clone());
                outcome.limits = Some(Box::new(self.limits_object(api)));
                "limit"
            }
            Job::MakeCompanion { claim, .. } => {
                let mut claim = (**claim).clone();
                claim.metadata.uid = claim.metadata.name.as_ref().map(|name| format!("uid-{name}"));
                claim.metadata.resource_version = Some(self.stamp());
                outcome.claims.push(claim);
                "make"
            }
            Job::Grow { companion, allocation, consumers, .. } => {
                let known = self.share(&companion.name);
                let mut claim = self.again(&known);
                let seconds = allocation.allocation_timestamp.as_ref().expect("stamped").0.as_second();
                let results = allocation.devices.clone().and_then(|d| d.results).unwrap_or_default();
                let mark = aliquot_allocator::snapshot::fingerprint(&known.uid, seconds, &results);
                let annotations = claim.metadata.annotations.get_or_insert_default();
                annotations.insert(aliquot_allocator::snapshot::FINGERPRINT.to_owned(), mark);
                let status = claim.status.get_or_insert_default();
                status.allocation = Some((**allocation).clone());
                status.reserved_for = Some(consumers.clone());
                outcome.claims.push(claim);
                "grow"
            }
            Job::Deallocate { claim, .. } => {
                let mut known = self.share(&claim.name);
                (known.allocation, known.reserved_for) = (None, Vec::new());
                let claim = self.again(&known);
                outcome.claims.push(claim);
                "release"
            }
            Job::DeleteCompanion { companion, uid, .. } => {
                outcome.gone.push((companion.clone(), uid.clone()));
                "delete"
            }
            Job::Share { companion, consumers, .. } => {
                let mut known = self.share(&companion.name);
                known.reserved_for = consumers.clone();
                let claim = self.again(&known);
                outcome.claims.push(claim);
                "share"
            }
            other => panic!("unexpected {other:?}"),
        };
        self.handle(Input::Done(Box::new(outcome)));
        Some(name)
    }

    /// Steps until there are none; the node confirms whenever it is waited for.
    fn settle(&mut self, api: &mut Api) -> Vec<&'static str> {
        let mut steps = Vec::new();
        loop {
            match self.serve(api) {
                Some(step) => steps.push(step),
                None if api.spec.is_some() && api.status.observed_generation != api.generation => {
                    self.node_confirms(api);
                }
                None => return steps,
            }
            assert!(steps.len() < 50, "{steps:?}");
        }
    }

    /// What the node is told, and what is reserved on the GPU.
    fn standing(&self, api: &Api) -> (Option<Size>, Size) {
        let told = api.spec.iter().flat_map(|spec| &spec.shares).next();
        let told = told.map(|limit| Size { memory: limit.memory_bytes, cores: limit.cores_percent.into() });
        let index = &self.core.index;
        let of = |held: &aliquot_allocator::snapshot::Held, name: &str| {
            let name = index.find_qualified(name).expect("published");
            held.consumed
                .iter()
                .find(|(known, _)| *known == name)
                .and_then(|(_, a)| a.to_u64())
                .expect("units")
        };
        let held = index.claims().filter_map(|claim| claim.allocation.as_ref()).flat_map(|a| &a.held);
        let sum = held.fold(Size::ZERO, |sum, held| {
            sum.plus(Size { memory: of(held, "memory"), cores: of(held, "cores") })
        });
        (told, sum)
    }
}

fn size(gib: u64, cores: u64) -> Size {
    Size { memory: gib * GIB, cores }
}

#[test]
fn a_share_grows_by_a_claim_of_its_own_and_shrinks_back() {
    let (mut world, mut api) = World::elastic();
    assert_eq!(world.settle(&mut api), Vec::<&str>::new());
    world.wish(Some("memory=20Gi,cores=50"));
    assert_eq!(world.settle(&mut api), ["make", "grow", "limit"]);
    assert_eq!(world.standing(&api), (Some(size(20, 50)), size(20, 50)));
    let companion = world.core.index.claims().find(|claim| claim.companion.is_some()).expect("one").clone();
    let held = &companion.allocation.as_ref().expect("allocated").held[0];
    let slots = world.core.index.find_qualified("slots").expect("published");
    assert!(held.consumed.iter().any(|(name, amount)| *name == slots && amount.to_u64() == Some(0)));
    assert_eq!(companion.reserved_for, world.share("a").reserved_for);
    let note = &world.reports.last().expect("told").note;
    assert_eq!(
        note,
        "its share on gpu-0-share may use 20Gi of memory and 50 percent of compute from now on; it was allocated 10Gi of memory and 30 percent of compute"
    );
    world.wish(None);
    assert_eq!(world.settle(&mut api), ["limit", "release", "delete"]);
    assert_eq!(world.standing(&api), (None, size(10, 30)));
    assert_eq!(world.settle(&mut api), Vec::<&str>::new());
}

#[test]
fn nothing_is_given_back_that_is_still_in_use() {
    let (mut world, mut api) = World::elastic();
    world.wish(Some("memory=20Gi"));
    world.settle(&mut api);
    world.wish(Some("memory=4Gi"));
    assert_eq!(world.serve(&mut api), Some("limit"));
    let share = api.spec.as_ref().expect("told").shares[0].share.clone();
    api.status.beyond = vec![aliquot_api::v1alpha1::node_limits::Beyond { share, used_bytes: 15 * GIB }];
    world.node_confirms(&mut api);
    assert_eq!(world.serve(&mut api), None);
    assert_eq!(world.standing(&api), (Some(size(4, 30)), size(20, 30)));
    api.status.beyond.clear();
    world.node_confirms(&mut api);
    assert_eq!(world.settle(&mut api), ["release", "delete"]);
    assert_eq!(world.standing(&api), (Some(size(4, 30)), size(10, 30)));
}

#[test]
fn what_does_not_fit_is_told_and_granted_when_there_is_room() {
    let (mut world, mut api) = World::elastic();
    let other = vec![fixtures::share("r", "60Gi", "10")];
    world.one("b", &other);
    world.succeed("b", &other);
    world.runs("b");
    world.wish(Some("memory=30Gi"));
    assert_eq!(world.settle(&mut api), Vec::<&str>::new());
    let told = world.reports.last().expect("told").clone();
    assert_eq!(told.reason, reasons::LIMIT_WAITS);
    assert!(told.note.contains("does not have 20Gi and 0 percent"), "{}", told.note);
    let gone = world.claim_with("b", &other, json!({}), json!({}));
    world.handle(Input::Claim(Seen::Delete(Box::new(gone))));
    // Its pod is older than the wish, and is looked at first.
    world.work();
    world.jobs.clear();
    assert_eq!(world.settle(&mut api), ["make", "grow", "limit"]);
}

#[test]
fn a_mistake_is_told_and_changes_nothing() {
    let (mut world, mut api) = World::elastic();
    world.wish(Some("memory=20Gi"));
    world.settle(&mut api);
    world.wish(Some("memory=lots"));
    assert_eq!(world.settle(&mut api), Vec::<&str>::new());
    let told = world.reports.last().expect("told");
    assert_eq!((told.reason, told.warning), (reasons::ANNOTATION, true));
    assert_eq!(world.standing(&api), (Some(size(20, 30)), size(20, 30)));
}

#[test]
fn the_companion_is_for_those_who_use_the_share_and_goes_with_the_last() {
    let (mut world, mut api) = World::elastic();
    world.wish(Some("memory=20Gi"));
    world.settle(&mut api);
    let mut known = world.share("a");
    known.reserved_for.push(ResourceClaimConsumerReference {
        resource: "pods".to_owned(),
        name: "second".to_owned(),
        uid: "uid-second".to_owned(),
        api_group: None,
    });
    let claim = world.again(&known);
    world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    assert_eq!(world.settle(&mut api), ["share"]);
    // Nobody takes it for idle, however long.
    world.later(120);
    assert_eq!(world.take_jobs().len(), 0);
    (known.allocation, known.reserved_for) = (None, Vec::new());
    let claim = world.again(&known);
    world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    assert_eq!(world.settle(&mut api), ["limit", "release", "delete"]);
    assert_eq!(world.standing(&api), (None, Size::ZERO));
}

#[test]
fn a_controller_that_comes_later_ends_what_another_began() {
    for done in 0..4 {
        let (mut world, mut api) = World::elastic();
        world.wish(Some("memory=20Gi"));
        for _ in 0..done {
            world.serve(&mut api);
        }
        let all: Vec<Claim> = world.core.index.claims().cloned().collect();
        let objects: Vec<ResourceClaim> = all.iter().map(|claim| world.again(claim)).collect();
        let mut next = World::new(&[("n1", 1)]);
        next.version = world.version;
        next.core.settings.elastic = true;
        next.handle(Input::Claim(Seen::Reset(objects)));
        let told = if api.spec.is_some() { vec![next.limits_object(&api)] } else { Vec::new() };
        next.handle(Input::NodeLimits(Seen::Reset(told)));
        next.jobs.clear();
        let steps = next.settle(&mut api);
        assert_eq!(steps, ["make", "grow", "limit"][done.min(3)..], "after {done} steps");
        assert_eq!(next.standing(&api), (Some(size(20, 30)), size(20, 30)));
    }
}

#[test]
fn a_failed_write_is_tried_again_and_holds_nothing() {
    let (mut world, mut api) = World::elastic();
    world.wish(Some("memory=20Gi"));
    assert_eq!(world.serve(&mut api), Some("make"));
    world.core.keep_elastic(world.now, Timestamp::from_second(2_000).expect("a time"));
    world.collect();
    let job = world.take_job();
    assert!(matches!(job, Job::Grow { .. }), "{job:?}");
    world.done(job, Vec::new(), Some(WriteError::NotLeader(NotLeader)));
    assert_eq!(world.standing(&api).1, size(10, 30));
    assert_eq!(world.serve(&mut api), None);
    world.now += Duration::from_secs(5);
    assert_eq!(world.settle(&mut api), ["grow", "limit"]);
}

#[test]
fn what_a_share_grew_by_counts_in_quotas_of_the_namespace_and_of_one_claim() {
    for limits in [json!({"hard": {"memory": "15Gi"}}), json!({"hard": {}, "perClaim": {"memory": "15Gi"}})] {
        let (mut world, mut api) = World::elastic();
        world.handle(Input::Quota(Seen::Reset(vec![quota(limits)])));
        world.wish(Some("memory=20Gi"));
        assert_eq!(world.settle(&mut api), Vec::<&str>::new());
        let told = world.reports.last().expect("told");
        assert!(told.reason == reasons::LIMIT_WAITS && told.note.contains("GpuQuota"), "{told:?}");
        // It is looked at again without a change of the claim.
        world.handle(Input::Quota(Seen::Apply(Box::new(quota(json!({"hard": {"memory": "25Gi"}}))))));
        world.now += Duration::from_secs(5);
        assert_eq!(world.settle(&mut api), ["make", "grow", "limit"]);
    }
}

#[test]
fn what_a_share_grew_by_is_of_use_while_a_quota_is_in_the_way_of_more() {
    let (mut world, mut api) = World::elastic();
    world.handle(Input::Quota(Seen::Reset(vec![quota(json!({"hard": {"memory": "25Gi"}}))])));
    world.wish(Some("memory=20Gi"));
    assert_eq!(world.serve(&mut api), Some("make"));
    assert_eq!(world.serve(&mut api), Some("grow"));
    // Before the node was told.
    world.wish(Some("memory=40Gi"));
    assert_eq!(world.settle(&mut api), ["limit"]);
    assert_eq!(world.standing(&api), (Some(size(20, 30)), size(20, 30)));
    // So is what it is to have less of.
    world.wish(Some("memory=40Gi,cores=10"));
    assert_eq!(world.settle(&mut api), ["limit"]);
    assert_eq!(world.standing(&api), (Some(size(20, 10)), size(20, 30)));
}

/// Pods that wait stand where their priority puts them, and so does a share that is to grow.
#[rstest::rstest]
#[case::of_higher_priority(5, "gets")]
#[case::of_the_same_and_older(0, "gets")]
#[case::of_lower_priority(-5, "waits")]
fn a_share_grows_behind_pods_that_stand_before_it(#[case] priority: i32, #[case] pod: &str) {
    let (mut world, _) = World::elastic();
    // All that is left of the GPU's memory, for one of them.
    world.wish(Some("memory=80Gi"));
    world.claim("b", &[fixtures::share("r", "70Gi", "10")]);
    world.pod("b", &["b"], |pod| pod.spec.as_mut().expect("a spec").priority = Some(priority));
    world.core.keep_elastic(world.now, Timestamp::from_second(2_000).expect("a time"));
    world.collect();
    let grows = world.jobs.iter().any(|job| matches!(job, Job::MakeCompanion { .. }));
    assert_eq!(grows, pod == "waits", "{:?}", world.jobs);
    world.work();
    let given = world.jobs.iter().any(|job| matches!(job, Job::Allocate { .. }));
    assert!(given || pod == "waits", "{:?}", world.jobs);
    world.core.keep_elastic(world.now, Timestamp::from_second(2_000).expect("a time"));
    world.collect();
    let made = world.jobs.iter().filter(|job| matches!(job, Job::MakeCompanion { .. })).count();
    assert_eq!(made, usize::from(pod == "waits"));
}

impl World {
    /// A claim of that name that has nothing, and asks for other limits.
    fn wishful(&mut self, name: &str) {
        let claim = self.claim_with(name, &base(), json!({}), json!({LIMITS: "memory=20Gi"}));
        self.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    }

    fn look_at_claims(&mut self) {
        self.core.keep_elastic(self.now, Timestamp::from_second(2_000).expect("a time"));
        self.collect();
    }
}

#[test]
fn many_claims_are_looked_at_in_steps_and_pods_come_after_all_of_them() {
    let (mut world, _) = World::elastic();
    world.look_at_claims();
    let many = 2 * crate::reconciler::elastic::MOST + 1;
    for number in 0..many {
        world.wishful(&format!("wish-{number}"));
    }
    world.claim("b", &base());
    world.pod("b", &["b"], |_| {});
    assert!(world.core.has_work(world.now));
    world.look_at_claims();
    let mut steps = 1;
    while world.core.has_steps() {
        // Nothing is decided meanwhile; writes that return, probes and the lease go on.
        assert!(!world.core.has_work(world.now));
        world.core.step(world.now);
        world.look_at_claims();
        steps += 1;
        assert!(steps <= many);
    }
    assert!(steps >= 3, "{steps}");
    world.work();
    assert!(world.jobs.iter().any(|job| matches!(job, Job::Allocate { .. })), "{:?}", world.jobs);
}

#[test]
fn claims_that_only_wait_for_room_let_pods_have_their_turn() {
    let (mut world, _) = World::elastic();
    world.look_at_claims();
    for number in 0..2 * crate::reconciler::elastic::MOST {
        world.wishful(&format!("wish-{number}"));
    }
    world.look_at_claims();
    assert!(world.core.has_steps());
    // Somebody waits for room, and there is some again and again.
    let uid: Uid = "uid-wish-1".into();
    for _ in 0..4 * crate::reconciler::elastic::MOST {
        world.core.elastic.waiting.insert(uid.clone());
        world.core.elastic.look_again();
        world.look_at_claims();
        if !world.core.has_steps() {
            assert!(world.core.elastic.next.contains(&uid));
            return;
        }
    }
    panic!("it goes on for ever");
}

#[test]
fn an_annotation_is_read_once_until_it_says_something_else() {
    let (mut world, _) = World::elastic();
    world.wish(Some("memory=20Gi"));
    let share = world.share("a");
    let first = world.core.elastic.wish_of(&share).expect("asked").expect("fine");
    // Another version of the claim that says the same.
    world.wish(Some("memory=20Gi"));
    let share = world.share("a");
    let second = world.core.elastic.wish_of(&share).expect("asked").expect("fine");
    assert!(Arc::ptr_eq(&first, &second));
    world.wish(Some("memory=30Gi"));
    let share = world.share("a");
    let third = world.core.elastic.wish_of(&share).expect("asked").expect("fine");
    assert_eq!(third.parts[0].memory, Some(30 * GIB));
    world.core.elastic.gone("uid-a");
    assert!(world.core.elastic.wishes.is_empty());
}

/// A node agent says what it likes of its own node, as often as it likes.
#[test]
fn what_one_node_says_of_its_limits_makes_nobody_look_at_shares_of_another() {
    let (mut world, mut api) = World::elastic();
    world.wish(Some("memory=20Gi"));
    world.settle(&mut api);
    world.look_at_claims();
    assert!(world.core.elastic.look.is_empty());
    world.handle(Input::NodeLimits(Seen::Apply(Box::new(empty_limits("n2")))));
    assert!(world.core.elastic.look.is_empty(), "{:?}", world.core.elastic.look);
    // What its own node has lost is told it again.
    world.handle(Input::NodeLimits(Seen::Delete(Box::new(empty_limits("n1")))));
    world.core.elastic.look.clear();
    world.handle(Input::NodeLimits(Seen::Apply(Box::new(empty_limits("n1")))));
    assert_eq!(world.core.elastic.look, ["uid-a".into()].into());
}

fn empty_limits(node: &str) -> DynamicObject {
    object(json!({
        "apiVersion": "aliquot.dev/v1alpha1", "kind": "NodeLimits",
        "metadata": {"name": node, "resourceVersion": "1", "generation": 1},
        "spec": {"shares": []}, "status": {"observedGeneration": 1},
    }))
}

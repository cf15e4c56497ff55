use super::*;

/// A budget of the namespace, used up or not by its limit.
pub(super) fn budget(spec: Value) -> DynamicObject {
    object(json!({
        "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuBudget",
        "metadata": {"namespace": "default", "name": "gpu", "uid": "b", "resourceVersion": "1"}, "spec": spec,
    }))
}

fn world(spec: Value) -> World {
    let mut world = World::new(&[("n1", 2)]);
    world.core.settings.budgets = true;
    world.handle(Input::NodeUsage(Seen::Reset(Vec::new())));
    world.handle(Input::Budget(Seen::Reset(vec![budget(spec)])));
    world.look(1_000);
    world
}

impl World {
    /// A look at budgets at a second.
    pub(super) fn look(&mut self, second: i64) {
        self.now += Duration::from_secs(1);
        self.core.keep_budgets(self.now, Timestamp::from_second(second).expect("a time"));
        self.collect();
    }

    /// A look at claims that have, or want, devices without a pod.
    fn hold(&mut self, second: i64) {
        self.core.keep_holds(self.now, Timestamp::from_second(second).expect("a time"));
        self.work();
    }

    fn said(&self, reason: &str) -> Vec<&str> {
        self.reports
            .iter()
            .filter(|report| report.reason == reason)
            .map(|report| report.note.as_str())
            .collect()
    }
}

pub(super) fn terms(hours: &str, enforcement: &str) -> Value {
    json!({
        "gpuHours": hours, "window": {"rolling": "24h"}, "enforcement": enforcement,
        "lowerPriorityClassName": "low",
    })
}

#[test]
fn nothing_is_decided_before_budgets_were_listed() {
    let mut world = World::new(&[("n1", 1)]);
    world.core.settings.budgets = true;
    world.one("a", &gpu());
    assert!(world.take_jobs().is_empty());
    world.handle(Input::Budget(Seen::Reset(Vec::new())));
    world.handle(Input::NodeUsage(Seen::Reset(Vec::new())));
    world.work();
    assert_eq!(world.take_jobs().len(), 1, "a namespace without a budget is not limited");
}

#[test]
fn a_refused_pod_waits_and_is_decided_when_the_budget_is_raised_or_deleted() {
    for raised in [true, false] {
        let mut world = world(terms("0", "Refuse"));
        world.one("a", &gpu());
        assert!(world.take_jobs().is_empty());
        assert_eq!(world.said(reasons::BUDGET_REFUSED).len(), 1);
        for second in 1_001..1_010 {
            world.look(second);
            world.work();
        }
        assert!(world.take_jobs().is_empty());
        let mut other = budget(terms("5", "Refuse"));
        other.metadata.resource_version = Some("2".to_owned());
        let seen = if raised { Seen::Apply(Box::new(other)) } else { Seen::Delete(Box::new(other)) };
        world.handle(Input::Budget(seen));
        world.look(1_010);
        world.work();
        assert_eq!(
            world.take_jobs().iter().flat_map(devices).collect::<Vec<_>>(),
            ["gpu-0"],
            "raised: {raised}"
        );
    }
}

#[test]
fn a_pod_with_devices_keeps_them_when_its_budget_is_used_up() {
    let mut world = world(terms("5", "Refuse"));
    world.one("a", &gpu());
    world.succeed("a", &gpu());
    world.jobs.clear();
    let mut less = budget(terms("0", "Refuse"));
    less.metadata.resource_version = Some("2".to_owned());
    world.handle(Input::Budget(Seen::Apply(Box::new(less))));
    world.look(1_001);
    world.later(5);
    assert!(world.take_jobs().iter().all(|job| matches!(job, Job::Lift { .. })));
    assert_eq!(world.said(reasons::BUDGET_USED_UP).len(), 1);
}

#[test]
fn a_warning_budget_says_so_and_gives() {
    for enforcement in ["Warn", "LowerPriority"] {
        let mut world = world(terms("0", enforcement));
        world.one("a", &gpu());
        assert_eq!(world.take_jobs().len(), 1, "{enforcement}");
        assert!(world.said(reasons::BUDGET_EXCEEDED)[0].contains("default/gpu"));
    }
}

#[test]
fn nobody_is_evicted_for_a_pod_that_a_budget_holds_back() {
    let mut world = world(terms("0", "Refuse"));
    // They were there before the budget was.
    world.handle(Input::Budget(Seen::Reset(Vec::new())));
    for name in ["a", "b"] {
        world.one(name, &gpu());
        world.jobs.retain(|job| matches!(job, Job::Allocate { .. }));
        world.succeed(name, &gpu());
        world.pod(name, &[name], |pod| {
            let spec = pod.spec.as_mut().expect("a spec");
            (spec.scheduling_gates, spec.node_name) = (None, Some("n1".to_owned()));
        });
    }
    world.handle(Input::Budget(Seen::Reset(vec![budget(terms("0", "Refuse"))])));
    world.look(1_001);
    world.jobs.clear();
    world.claim("urgent", &gpu());
    let urgent = |pod: &mut ApiPod| pod.spec.as_mut().expect("a spec").priority = Some(1000);
    world.pod("urgent", &["urgent"], urgent);
    world.work();
    let makes_room = |jobs: Vec<Job>| jobs.iter().any(|job| matches!(job, Job::MakeRoom { .. }));
    assert!(!makes_room(world.take_jobs()));
    // Without the budget somebody would have to go.
    world.handle(Input::Budget(Seen::Reset(Vec::new())));
    world.look(1_002);
    world.pod("urgent", &["urgent"], |pod| {
        urgent(pod);
        pod.metadata.labels = Some([("seen".to_owned(), "again".to_owned())].into());
        pod.spec.as_mut().expect("a spec").priority = Some(1001);
    });
    world.work();
    assert!(makes_room(world.take_jobs()));
}

#[test]
fn a_claim_that_wants_devices_before_a_pod_waits_for_the_budget_too() {
    let mut world = world(terms("0", "Refuse"));
    let wish = json!({aliquot_model::names::BINDING: "Immediate"});
    let claim = world.claim_with("a", &gpu(), json!({}), wish);
    world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    world.hold(1_002);
    assert!(world.take_jobs().is_empty());
    assert!(world.said(reasons::DOES_NOT_FIT)[0].contains("default/gpu"));
    world.handle(Input::Budget(Seen::Reset(Vec::new())));
    world.look(1_003);
    world.hold(1_004);
    assert!(matches!(world.take_job(), Job::Bind { .. }));
}

/// A claim that holds this share of a board.
fn shared(world: &mut World, name: &str, node: &str) -> ResourceClaim {
    let result = json!({
        "request": "r", "driver": DRIVER, "pool": aliquot_model::names::pool_name(DRIVER, node),
        "device": "gpu-0-share", "shareID": format!("share-{name}"),
        "consumedCapacity": {"memory": "8Gi", "cores": "10", "slots": "1"},
    });
    let status = json!({"allocation": {
        "devices": {"results": [result]}, "allocationTimestamp": "1970-01-01T00:16:40Z",
    }});
    world.claim_with(name, &[fixtures::share("r", "8Gi", "10")], status, json!({}))
}

impl World {
    fn visited(&self) -> u64 {
        self.core.book.visited()
    }

    /// GPUs that are charged to the one budget, in millionths.
    fn charged(&self) -> u64 {
        self.core.book.standings().map(|(_, standing)| standing.rate.0).sum()
    }
}

#[test]
fn a_look_at_budgets_visits_the_claims_of_which_something_changed() {
    let mut world = world(terms("1000", "Refuse"));
    for number in 0..300 {
        let claim = shared(&mut world, &format!("c{number}"), "n1");
        world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    }
    world.look(1_001);
    assert_eq!((world.visited(), world.charged()), (300, 30_000_000));
    for second in 1_002..1_070 {
        world.look(second);
    }
    assert_eq!(world.visited(), 300, "nothing changed");
    let gone = shared(&mut world, "c7", "n1");
    world.handle(Input::Claim(Seen::Delete(Box::new(gone))));
    world.look(1_070);
    assert_eq!((world.visited(), world.charged()), (301, 29_900_000));
}

#[test]
fn a_part_that_is_published_later_is_charged_though_no_claim_changed() {
    let mut world = world(terms("1000", "Refuse"));
    for (node, count) in [("n1", 300), ("n2", 50)] {
        for number in 0..count {
            let claim = shared(&mut world, &format!("{node}-{number}"), node);
            world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
        }
    }
    world.look(1_001);
    assert_eq!(
        (world.core.book.standings().next().expect("one").1.claims, world.charged()),
        (350, 30_000_000)
    );
    for slice in fixtures::slices("n2", 1, AllocatorMode::Controller, 1) {
        world.handle(Input::Slice(Seen::Apply(Box::new(slice))));
    }
    world.look(1_002);
    assert_eq!(world.charged(), 35_000_000);
}

#[test]
fn a_budget_that_is_made_later_is_told_of_the_claims_that_are_there() {
    let mut world = world(terms("1000", "Refuse"));
    world.handle(Input::Budget(Seen::Reset(Vec::new())));
    let claim = shared(&mut world, "early", "n1");
    world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
    world.look(1_001);
    world.handle(Input::Budget(Seen::Reset(vec![budget(terms("1000", "Refuse"))])));
    world.look(1_002);
    assert_eq!(world.charged(), 100_000);
}

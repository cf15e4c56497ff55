//! Pods that cannot be decided in time, and who waits for them.

use super::*;

/// Each request fits one GPU, which leaves too little there for another, and there is one more of them than GPUs;
/// counting does not tell. `number` makes no difference but to what is asked.
fn hard(number: u32) -> Value {
    let requests: Vec<Value> =
        (0..5).map(|n| request(&format!("r{n}-{number}"), "mig.aliquot.dev", 4)).collect();
    let mut spec = fixtures::spec(&requests);
    let on_one = |n| {
        let name = format!("r{n}-{number}");
        json!({"requests": [name], "matchAttribute": format!("{DRIVER}/parentUUID")})
    };
    spec["devices"]["constraints"] = (0..5).map(on_one).collect();
    spec
}

impl World {
    fn with_short_decisions() -> Self {
        let mut world = Self::new(&[("n1", 4)]);
        world.core.settings.deadline = Duration::from_millis(50);
        world
    }

    fn waits(&mut self, (namespace, name): (&str, &str), spec: &Value, created: i64) {
        let version = self.stamp();
        let claim: ResourceClaim = object(json!({
            "metadata": {"name": name, "namespace": namespace, "uid": format!("uid-c-{name}"),
                         "resourceVersion": version},
            "spec": spec,
        }));
        self.handle(Input::Claim(Seen::Apply(Box::new(claim))));
        let at = Timestamp::from_second(created).expect("a time").to_string();
        self.pod(name, &[name], |pod| {
            pod.metadata.namespace = Some(namespace.to_owned());
            pod.metadata.creation_timestamp = Some(object(json!(at)));
        });
    }

    fn turn(&mut self) {
        self.core.work(self.now, Timestamp::from_second(1_000).expect("a time"));
        self.collect();
    }

    fn late(&self) -> usize {
        let text = self.core.metrics.text();
        let line = text.lines().find(|line| line.contains("decisions_total{outcome=\"out_of_time\"}"));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_default()
    }

    fn is_given(&self, name: &str) -> bool {
        self.jobs.iter().any(|job| matches!(job, Job::Allocate { plan, .. } if *plan.pod.name == *name))
    }
}

#[test]
fn fifty_pods_that_no_board_can_hold_cost_a_later_one_nothing() {
    let mut world = World::new(&[("n1", 4)]);
    let mut spec = fixtures::spec(&[request("r", "mig.aliquot.dev", 8)]);
    spec["devices"]["constraints"] = json!([{"matchAttribute": format!("{DRIVER}/parentUUID")}]);
    for number in 0..50 {
        world.waits(("default", &format!("hard-{number}")), &spec, number);
    }
    world.waits(("default", "easy"), &fixtures::spec(&gpu()), 99);
    for _ in 0..51 {
        world.turn();
    }
    assert!(world.is_given("easy"));
    assert_eq!(world.late(), 0);
    let told = world.reports.iter().filter(|report| report.note.contains("hold at most 7 devices")).count();
    assert_eq!(told, 50, "{:?}", world.reports.first());
}

#[test]
fn pods_that_ask_for_the_same_run_out_of_time_once() {
    let mut world = World::with_short_decisions();
    for number in 0..50 {
        world.waits(("default", &format!("hard-{number}")), &hard(0), number);
    }
    world.waits(("default", "easy"), &fixtures::spec(&gpu()), 99);
    for _ in 0..51 {
        world.turn();
    }
    assert!(world.is_given("easy"));
    assert_eq!(world.late(), 1);
    let told = |report: &&Report| report.reason == reasons::OUT_OF_TIME && report.note.contains("attempt 1");
    assert_eq!(world.reports.iter().filter(told).count(), 50);
    // Neither room nor a change of the pods lets them try again before their time.
    world.core.queue.wake(world.now);
    world.waits(("default", "hard-1"), &hard(0), 1);
    world.work();
    assert_eq!(world.late(), 1);
    // In proportion to what it cost: at least twenty times 50 ms.
    world.later(1);
    assert_eq!(world.late(), 1);
}

#[test]
fn hard_pods_of_one_namespace_do_not_keep_another_waiting() {
    let mut world = World::with_short_decisions();
    for number in 0..20 {
        world.waits(("default", &format!("hard-{number}")), &hard(number), number.into());
    }
    world.waits(("other", "easy"), &fixtures::spec(&gpu()), 99);
    // The oldest of all first, then whoever has not cost anything.
    world.turn();
    assert_eq!(world.late(), 1);
    world.turn();
    assert!(world.is_given("easy"));
    assert_eq!(world.late(), 1);
}

#[test]
fn a_gang_is_decided_within_one_time_however_many_it_is() {
    let mut world = World::with_short_decisions();
    for number in 0..40 {
        let name = format!("m{number}");
        world.claim(&name, &[]);
        let claim: ResourceClaim = object(json!({
            "metadata": {"name": name, "namespace": "default", "uid": format!("uid-c-{name}"),
                         "resourceVersion": world.stamp()},
            "spec": hard(number),
        }));
        world.handle(Input::Claim(Seen::Apply(Box::new(claim))));
        world.pod(&name, &[&name], |pod| {
            pod.metadata.labels = Some([("aliquot.dev/gang".to_owned(), "g".to_owned())].into());
            pod.metadata.annotations = Some([("aliquot.dev/gang-size".to_owned(), "40".to_owned())].into());
        });
    }
    world.work();
    assert_eq!(world.late(), 1, "who follows is not asked");
    let report = world.reports.iter().find(|report| report.reason == reasons::OUT_OF_TIME);
    assert!(report.is_some_and(|report| report.note.contains("was not decided within 100ms")), "{report:?}");
    world.core.queue.wake(world.now);
    assert!(!world.core.has_work(world.now), "all of it waits");
}

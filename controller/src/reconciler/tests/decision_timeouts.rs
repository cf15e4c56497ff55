//! Pods that cannot be decided in time, and who waits for them.

use super::*;
use aliquot_allocator::clock::Clock;
use std::sync::atomic::{AtomicU64, Ordering};

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
    /// By a clock that goes on by 5 ms whenever somebody looks, as a search does every so many steps: no machine is
    /// too slow or too fast.
    fn with_short_decisions() -> Self {
        let mut world = Self::new(&[("n1", 4)]);
        let (began, looks) = (world.now, AtomicU64::new(0));
        world.core.settings.clock =
            Clock::new(move || began + Duration::from_millis(5 * looks.fetch_add(1, Ordering::Relaxed)));
        // Far more than what is easy takes.
        world.core.settings.first_look = Duration::from_millis(50);
        world.core.settings.deadline = Duration::from_millis(150);
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
        self.outcomes("out_of_time")
    }

    fn outcomes(&self, outcome: &str) -> usize {
        let text = self.core.metrics.text();
        let name = format!("decisions_total{{outcome=\"{outcome}\"}}");
        let line = text.lines().find(|line| line.contains(&name));
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
    assert_eq!((world.outcomes("put_behind"), world.late()), (1, 0), "one short look for all of them");
    for _ in 0..50 {
        world.turn();
    }
    assert_eq!(world.late(), 1);
    let told = |report: &&Report| report.reason == reasons::OUT_OF_TIME && report.note.contains("attempt 1");
    assert_eq!(world.reports.iter().filter(told).count(), 50);
    // Neither room nor a change of the pods lets them try again before their time.
    world.core.queue.wake(world.now);
    world.waits(("default", "hard-1"), &hard(0), 1);
    world.work();
    assert_eq!(world.late(), 1);
    // In proportion to what it cost: at least twenty times 150 ms.
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
    assert_eq!(world.outcomes("put_behind"), 1);
    world.turn();
    assert!(world.is_given("easy"));
    assert_eq!((world.outcomes("put_behind"), world.late()), (1, 0));
}

#[test]
fn fifty_hard_pods_cost_an_easy_one_of_their_namespace_a_short_look_each() {
    let mut world = World::with_short_decisions();
    for number in 0..50 {
        world.waits(("default", &format!("hard-{number}")), &hard(number), number.into());
    }
    world.waits(("default", "easy"), &fixtures::spec(&gpu()), 99);
    for _ in 0..50 {
        world.turn();
    }
    assert_eq!((world.outcomes("put_behind"), world.late()), (50, 0));
    world.turn();
    assert!(world.is_given("easy"));
    world.turn();
    assert_eq!(world.late(), 1, "then they have all the time that a decision may take");
}

#[test]
fn pods_that_ask_for_what_does_not_fit_cost_one_decision_until_there_is_room() {
    let mut world = World::new(&[("n1", 1)]);
    world.one("has", &gpu());
    world.succeed("has", &gpu());
    for number in 0..50 {
        world.waits(("default", &format!("more-{number}")), &fixtures::spec(&gpu()), number);
    }
    world.work();
    assert_eq!((world.outcomes("no_fit"), world.outcomes("no_fit_again")), (1, 49));
    let told = |report: &&Report| report.reason == reasons::DOES_NOT_FIT;
    assert_eq!(world.reports.iter().filter(told).count(), 50, "each is told why");
    // Others ask for something else, or it is something else for them.
    world.waits(("default", "other"), &fixtures::spec(&[partition("r", "1g.10gb")]), 60);
    world.waits(("elsewhere", "same"), &fixtures::spec(&gpu()), 61);
    world.work();
    assert_eq!((world.outcomes("no_fit"), world.outcomes("no_fit_again")), (3, 49));
    // A node that changes may make room.
    for slice in fixtures::slices("n2", 1, AllocatorMode::Controller, 1) {
        world.handle(Input::Slice(Seen::Apply(Box::new(slice))));
    }
    world.handle(Input::Node(Seen::Apply(Box::new(fixtures::node("n2")))));
    world.later(60);
    world.work();
    assert!((0..50).any(|number| world.is_given(&format!("more-{number}"))));
}

#[test]
fn what_an_earlier_controller_kept_is_looked_at_within_one_time_for_all() {
    let mut world = World::with_short_decisions();
    world.core.settings.reserving = Some(Reserving::default());
    let resumed = 40;
    for number in 0..resumed {
        world.waits(("default", &format!("hard-{number}")), &hard(number), number.into());
        let name = format!("hard-{number}");
        let at = Timestamp::from_second(number.into()).expect("a time").to_string();
        world.pod(&name, &[&name], |pod| {
            pod.metadata.creation_timestamp = Some(object(json!(at)));
            let status = pod.status.get_or_insert_default();
            status.nominated_node_name = Some("n1".to_owned());
        });
    }
    world.core.nominate_again(world.now, Timestamp::from_second(1_000).expect("a time"));
    // Ten times as long as one decision may take, and the one that is under way then.
    let looked = world.late();
    assert!((1..=11).contains(&looked), "{looked} of {resumed}");
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
    assert!(report.is_some_and(|report| report.note.contains("was not decided within 300ms")), "{report:?}");
    world.core.queue.wake(world.now);
    assert!(!world.core.has_work(world.now), "all of it waits");
}

/// What the API server would not accept, for which an older one, or a looser estimate, may have.
const TOO_COSTLY: &str = "lists.range(3000).all(a, lists.range(3000).all(b, a + b >= 0)) || true";

#[test]
fn a_selector_that_costs_too_much_is_told_so_and_keeps_nobody_waiting() {
    let mut world = World::new(&[("n1", 4)]);
    // Steps are counted, not time.
    world.core.settings.deadline = Duration::from_hours(1);
    world.core.settings.first_look = Duration::from_hours(1);
    for number in 0..5 {
        let mut costly = gpu();
        costly[0]["exactly"]["selectors"] = json!([{"cel": {"expression": TOO_COSTLY}}]);
        world.waits(("default", &format!("costly-{number}")), &fixtures::spec(&costly), number);
    }
    world.waits(("other", "easy"), &fixtures::spec(&gpu()), 99);
    world.turn();
    let evaluated = world.core.matcher.evaluations();
    for _ in 0..5 {
        world.turn();
    }
    assert!(world.is_given("easy"));
    let told = |report: &&Report| {
        report.reason == reasons::CLAIM_REJECTED && report.note.contains("costs more than 10000000 steps")
    };
    // The pod and the claim.
    assert_eq!(world.reports.iter().filter(told).count(), 10, "{:?}", world.reports);
    let of_claim = |report: &&Report| matches!(report.regarding, Regarding::Claim(..));
    assert_eq!(world.reports.iter().filter(told).filter(of_claim).count(), 5);
    // Every other device and claim would cost the same again.
    assert_eq!(world.core.matcher.evaluations(), evaluated);
}

#[test]
fn who_runs_out_of_time_within_a_selector_is_told_which() {
    let mut world = World::with_short_decisions();
    let mut costly = gpu();
    costly[0]["exactly"]["selectors"] = json!([{"cel": {"expression": TOO_COSTLY}}]);
    world.waits(("default", "costly"), &fixtures::spec(&costly), 1);
    world.core.settings.deadline = Duration::from_millis(50);
    world.turn();
    let note = &world.reports.first().expect("told").note;
    assert!(
        note.contains("within the CEL expression \"lists.range(3000)") && note.contains("simplify it"),
        "{note}"
    );
}

impl World {
    /// A claim is to have devices before its first pod.
    fn wants_early(&mut self, (namespace, name): (&str, &str), spec: &Value, created: i64) {
        let version = self.stamp();
        let at = Timestamp::from_second(created).expect("a time").to_string();
        let claim: ResourceClaim = object(json!({
            "metadata": {"name": name, "namespace": namespace, "uid": format!("uid-c-{name}"),
                         "resourceVersion": version, "creationTimestamp": at,
                         "annotations": {aliquot_model::names::BINDING: "Immediate"}},
            "spec": spec,
        }));
        self.handle(Input::Claim(Seen::Apply(Box::new(claim))));
        self.core.keep_holds(self.now, Timestamp::from_second(1_000).expect("a time"));
    }

    fn is_bound(&self, name: &str) -> bool {
        self.jobs.iter().any(|job| matches!(job, Job::Bind { plan, .. } if *plan.pod.name == *name))
    }
}

#[test]
fn hard_claims_before_their_pods_do_not_keep_those_of_another_namespace_waiting() {
    let mut world = World::with_short_decisions();
    for number in 0..20 {
        world.wants_early(("default", &format!("hard-{number}")), &hard(number), number.into());
    }
    world.wants_early(("other", "easy"), &fixtures::spec(&gpu()), 99);
    world.turn();
    assert_eq!(world.outcomes("put_behind"), 1);
    world.turn();
    assert!(world.is_bound("easy"));
    assert_eq!((world.outcomes("put_behind"), world.late()), (1, 0));
}

#[test]
fn hard_claims_before_their_pods_cost_an_easy_one_of_their_namespace_a_short_look_each() {
    let mut world = World::with_short_decisions();
    for number in 0..20 {
        world.wants_early(("default", &format!("hard-{number}")), &hard(number), number.into());
    }
    world.wants_early(("default", "easy"), &fixtures::spec(&gpu()), 99);
    for _ in 0..21 {
        world.turn();
    }
    assert!(world.is_bound("easy"));
    assert_eq!((world.outcomes("put_behind"), world.late()), (20, 0));
}

#[test]
fn pods_that_are_hard_to_decide_leave_an_eighth_of_the_time_to_claims_before_their_pods() {
    let mut world = World::with_short_decisions();
    for number in 0..20 {
        world.waits(("default", &format!("hard-{number}")), &hard(number), number.into());
    }
    world.wants_early(("other", "easy"), &fixtures::spec(&gpu()), 99);
    for _ in 0..20 {
        world.turn();
    }
    assert!(!world.is_bound("easy"), "pods come first");
    // But not for ever: after one decision for the oldest pod, which waits as long, and seven by order.
    world.now += aliquot_allocator::queue::account::GIVES_WAY;
    for _ in 0..10 {
        world.turn();
    }
    assert!(world.is_bound("easy"));
}

#[test]
fn claims_before_their_pods_that_ran_out_of_time_wait_whatever_changes() {
    let mut world = World::with_short_decisions();
    world.wants_early(("default", "hard"), &hard(0), 0);
    world.turn();
    assert_eq!(world.late(), 1);
    // Neither room, nor a change of it, nor another one that asks for the same.
    world.core.holds.wake(world.now);
    world.wants_early(("default", "hard"), &hard(0), 0);
    world.wants_early(("default", "again"), &hard(0), 1);
    world.work();
    assert_eq!(world.late(), 1);
    let told = |report: &&Report| report.reason == reasons::OUT_OF_TIME && report.note.contains("attempt 1");
    assert_eq!(world.reports.iter().filter(told).count(), 2, "{:?}", world.reports);
    // In proportion to what it cost: at least twenty times 150 ms.
    world.now += Duration::from_secs(1);
    world.work();
    assert_eq!(world.late(), 1);
}

#[test]
fn hard_claims_before_their_pods_keep_no_pod_waiting() {
    let mut world = World::with_short_decisions();
    for number in 0..40 {
        world.wants_early(("hostile", &format!("hard-{number}")), &hard(number), number.into());
    }
    for _ in 0..39 {
        world.turn();
    }
    assert_eq!((world.outcomes("put_behind"), world.late()), (39, 0));
    for number in 0..70 {
        // Each asks for something else, of which there is not enough.
        let easy = fixtures::spec(&[request(&format!("r{number}"), "gpu.aliquot.dev", 5)]);
        world.waits(("other", &format!("easy-{number}")), &easy, 100 + number);
    }
    for _ in 0..70 {
        world.turn();
    }
    assert_eq!((world.outcomes("put_behind"), world.late()), (39, 0));
    assert_eq!(world.outcomes("no_fit"), 70);
}

#[test]
fn a_claim_that_waits_is_told_other_words_as_seldom_as_a_pod() {
    let mut world = World::new(&[("n1", 1)]);
    for number in 0..10 {
        let name = format!("takes-{number}");
        world.one(&name, &[fixtures::share("r", "1Gi", "1")]);
        world.succeed(&name, &[fixtures::share("r", "1Gi", "1")]);
        // There may be room, and something of it changes, so that it is looked at.
        world.core.queue.wake(world.now);
        world.wants_early(
            ("default", "waits"),
            &fixtures::spec(&[fixtures::share("r", "80Gi", "1")]),
            number,
        );
        world.work();
        world.jobs.clear();
        world.now += Duration::from_secs(2);
    }
    let told = world.reports.iter().filter(|report| report.reason == reasons::DOES_NOT_FIT);
    let words: Vec<&String> = told.map(|report| &report.note).collect();
    assert_eq!(words.len(), 2, "once in 15 s: {words:?}");
}

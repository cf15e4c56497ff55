use super::*;
use crate::reconciler::Reserving;
use rstest::rstest;

const AFTER: u64 = 60;

fn gpus(count: u32) -> Vec<Value> {
    vec![request("r", "gpu.aliquot.dev", count)]
}

impl World {
    fn reserving(nodes: &[(&str, u32)], percent: usize) -> Self {
        let mut world = Self::new(nodes);
        world.core.settings.reserving =
            Some(Reserving { after: Duration::from_secs(AFTER), at_most: Duration::from_secs(600), percent });
        world
    }

    /// Time passes, and what follows from it; no claim that is used is idle.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.core.tick(self.now, Timestamp::UNIX_EPOCH);
            self.core.keep_reservations(self.now, Timestamp::from_second(1_000).expect("a time"));
            self.work();
            self.answer();
        }
    }

    /// The API takes whatever is written: whoever gets devices runs.
    fn answer(&mut self) {
        while let Some(job) = self.jobs.pop() {
            match &job {
                Job::Allocate { plan, writes, .. } => {
                    let name = plan.pod.name.to_string();
                    let known = self.core.index().claim(&plan.pod).expect("a claim").clone();
                    let requests = known.spec.devices.clone().and_then(|d| d.requests).expect("requests");
                    let requests: Vec<Value> =
                        requests.iter().map(|r| serde_json::to_value(r).expect("JSON")).collect();
                    let claim = self.written(&name, &requests, &writes[0].allocation.clone(), &name);
                    let node = plan.node.to_string();
                    self.done(job, vec![claim], None);
                    self.pod(&name, &[&name], |pod| {
                        let spec = pod.spec.as_mut().expect("a spec");
                        spec.node_name = Some(node);
                        spec.scheduling_gates = None;
                    });
                }
                Job::MakeRoom { pod, node, victims, .. } => {
                    assert!(victims.is_empty(), "nobody is evicted for a reservation");
                    let known = self.core.index().pod(pod).expect("a pod").clone();
                    let mut api = fixtures::pod(&pod.name, &[&pod.name]);
                    api.metadata.uid = Some(known.uid.to_string());
                    api.metadata.resource_version = Some(self.stamp());
                    api.metadata.creation_timestamp =
                        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
                            Timestamp::from_second(known.created).expect("a time"),
                        ));
                    api.spec.as_mut().expect("a spec").priority = Some(known.priority);
                    api.status = Some(object(json!({"nominatedNodeName": node.as_deref()})));
                    self.handle(Input::Done(Box::new(Outcome { pod: Some(api), ..Outcome::of(job) })));
                }
                _ => {}
            }
            self.work();
        }
    }

    /// A pod that asks for so many GPUs, made at that second.
    fn asks(&mut self, name: &str, count: u32, created: i64, priority: i32) {
        self.claim(name, &gpus(count));
        self.pod(name, &[name], |pod| {
            pod.spec.as_mut().expect("a spec").priority = Some(priority);
            let time = Timestamp::from_second(created).expect("a time");
            pod.metadata.creation_timestamp =
                Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(time));
        });
        self.work();
        self.answer();
    }

    fn ends(&mut self, name: &str, count: u32) {
        let mut pod = fixtures::pod(name, &[name]);
        pod.metadata.uid = Some(format!("uid-{name}"));
        self.handle(Input::Pod(Seen::Delete(Box::new(pod))));
        let free = self.claim_with(name, &gpus(count), json!({}), json!({}));
        self.handle(Input::Claim(Seen::Delete(Box::new(free))));
        self.work();
        self.answer();
    }

    fn has_devices(&self, name: &str) -> bool {
        self.core.index().effective_allocation(&ObjectKey::new("default", name)).is_some()
    }

    fn words(&self, reason: &str) -> Vec<&str> {
        let reports = self.reports.iter().filter(|report| report.reason == reason);
        reports.map(|report| report.note.as_str()).collect()
    }

    fn reserved(&self) -> Vec<&str> {
        let nominations = self.core.preemptions.nominations.iter();
        let mut names: Vec<&str> =
            nominations.filter(|(_, kept)| kept.until.is_some()).map(|(key, _)| &*key.name).collect();
        names.sort_unstable();
        names
    }
}

#[rstest]
#[case::without_reservation(false)]
#[case::with_reservation(true)]
fn small_pods_do_not_starve_a_large_one_for_ever(#[case] reserving: bool) {
    let mut world = World::reserving(&[("n1", 2)], 100);
    if !reserving {
        world.core.settings.reserving = None;
    }
    world.asks("small-0", 1, 1, 0);
    world.asks("small-1", 1, 2, 0);
    world.asks("large", 2, 3, 0);
    // Every half minute the older one of those that run ends, and there is always a next one.
    let mut running = vec!["small-0".to_owned(), "small-1".to_owned()];
    for round in 2..20i64 {
        world.pass(30);
        let next = format!("small-{round}");
        world.asks(&next, 1, 3 + round, 0);
        if !running.is_empty() {
            let ended = running.remove(0);
            world.ends(&ended, 1);
        }
        world.pass(1);
        for number in 2..=round {
            let name = format!("small-{number}");
            if world.has_devices(&name) && !running.contains(&name) {
                running.push(name);
            }
        }
        if world.has_devices("large") {
            break;
        }
    }
    assert_eq!(world.has_devices("large"), reserving);
    assert_eq!(world.core.metrics.reservations("met"), u64::from(reserving));
    if reserving {
        let told = world.words(reasons::RESERVED);
        assert!(told[0].contains("devices on node n1 are kept for it for at most 600s"), "{told:?}");
        let refused = world.words(reasons::DOES_NOT_FIT);
        let reason = "it would fit on node n1, but devices are kept for pods that have waited longer: large";
        assert!(refused.iter().any(|note| note.contains(reason)), "{refused:?}");
    }
}

#[test]
fn what_fits_beside_a_reservation_is_given_and_higher_priority_passes_it() {
    let mut world = World::reserving(&[("n1", 2), ("n2", 1)], 100);
    world.asks("a", 1, 1, 0);
    world.asks("b", 1, 2, 0);
    world.asks("c", 1, 3, 0);
    world.asks("large", 2, 4, 0);
    world.pass(AFTER + 2);
    assert_eq!(world.reserved(), ["large"]);
    let on_n2 = ["a", "b", "c"].into_iter().find(|name| {
        let key = ObjectKey::new("default", name);
        world.core.index().effective_allocation(&key).and_then(|a| a.node.clone()).as_deref() == Some("n2")
    });
    let on_n2 = on_n2.expect("one is on n2");
    let on_n1: Vec<&str> = ["a", "b", "c"].into_iter().filter(|name| *name != on_n2).collect();
    world.ends(on_n2, 1);
    world.asks("beside", 1, 5, 0);
    assert!(world.has_devices("beside"), "n2 is not reserved");
    world.ends(on_n1[0], 1);
    world.asks("small", 1, 6, 0);
    assert!(!world.has_devices("small"), "what became free on n1 is kept");
    world.asks("urgent", 1, 7, 5);
    assert!(world.has_devices("urgent"));
}

/// A node of two GPUs, held by `a` and `b` and reserved for `large`, which wants both.
fn large_behind_two() -> World {
    let mut world = World::reserving(&[("n1", 2)], 100);
    world.asks("a", 1, 1, 0);
    world.asks("b", 1, 2, 0);
    world.asks("large", 2, 3, 0);
    world.pass(AFTER + 2);
    assert_eq!(world.reserved(), ["large"]);
    world
}

#[test]
fn a_reservation_ends_after_its_time_and_what_was_kept_is_for_others() {
    let mut world = large_behind_two();
    world.ends("a", 1);
    world.asks("small", 1, 4, 0);
    world.pass(300);
    assert!(!world.has_devices("small"));
    world.pass(310);
    assert!(world.has_devices("small"), "{:?}", world.reserved());
    assert_eq!(world.core.metrics.reservations("expired"), 1);
    assert_eq!(world.words(reasons::RESERVATION_ENDED).len(), 1);
    assert!(world.core.index().pod(&ObjectKey::new("default", "large")).expect("a pod").nominated.is_none());
}

#[test]
fn no_more_than_the_stated_part_of_the_gpus_is_reserved_and_in_order() {
    let mut world = World::reserving(&[("n1", 2), ("n2", 2), ("n3", 4)], 50);
    for name in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        world.asks(name, 1, 1, 0);
    }
    world.asks("too-large", 8, 2, 9);
    world.asks("second", 2, 4, 0);
    world.asks("first", 2, 3, 0);
    world.asks("third", 2, 5, 0);
    world.pass(AFTER + 10);
    assert_eq!(world.reserved(), ["first", "second"], "four of eight GPUs");
    assert!(world.core.metrics.reservations("made") == 2);
}

#[test]
fn the_next_controller_takes_a_reservation_up() {
    let mut world = large_behind_two();
    // It knows what the API shows: the node is noted on the pod.
    world.core.preemptions = Default::default();
    world.core.reservations = Default::default();
    world.ends("a", 1);
    world.asks("small", 1, 4, 0);
    assert_eq!(world.reserved(), ["large"]);
    assert!(!world.has_devices("small"));
    world.ends("b", 1);
    world.pass(15);
    assert!(world.has_devices("large"));
}

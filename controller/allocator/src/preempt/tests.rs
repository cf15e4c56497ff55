use super::*;
use crate::fixtures::{self, DRIVER, object, partition, request, share};
use crate::snapshot::FINGERPRINT;
use aliquot_model::layout::AllocatorMode;
use aliquot_model::names::{HOLD_GROUP, HOLD_RESOURCE};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::{Just, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::strategy::Strategy as Generator;
use proptest::test_runner::Config;
use serde_json::{Value, json};

const NOW: i64 = 100_000;

/// A cluster to play through.
pub(crate) struct World {
    pub(crate) index: Snapshot,
    pub(crate) matcher: Matcher,
    version: u64,
    evicted: HashSet<Uid>,
    spared: HashSet<Uid>,
    wall: i64,
    /// Somebody takes the controller's annotation off what is allocated from now on.
    stripped: bool,
}

impl World {
    pub(crate) fn new(nodes: &[(&str, u32)]) -> Self {
        let mut index = Snapshot::new(DRIVER);
        index.reset_classes(&fixtures::classes());
        for (name, gpus) in nodes {
            index.apply_node(&fixtures::node(name));
            for slice in fixtures::slices(name, *gpus, AllocatorMode::Controller, 1) {
                index.apply_slice(&slice);
            }
        }
        let (evicted, spared) = (HashSet::new(), HashSet::new());
        Self { index, matcher: Matcher::new(), version: 0, evicted, spared, wall: NOW, stripped: false }
    }

    fn stamp(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    pub(crate) fn claim(&mut self, name: &str, requests: &[Value]) {
        let mut claim = fixtures::claim(name, &fixtures::spec(requests));
        claim.metadata.uid = Some(format!("uid-{name}"));
        claim.metadata.resource_version = Some(self.stamp());
        self.index.apply_claim(&claim);
    }

    pub(crate) fn pod_with(
        &mut self,
        name: &str,
        claims: &[&str],
        priority: i32,
        more: impl FnOnce(&mut ApiPod),
    ) -> Pod {
        let mut pod = fixtures::pod(name, claims);
        pod.metadata.uid = Some(format!("uid-{name}"));
        pod.metadata.resource_version = Some(self.stamp());
        pod.spec.as_mut().expect("a spec").priority = Some(priority);
        more(&mut pod);
        self.index.apply_pod(&pod);
        self.index.pod(&ObjectKey::new("default", name)).expect("kept").clone()
    }

    fn pod(&mut self, name: &str, claims: &[&str], priority: i32) -> Pod {
        self.pod_with(name, claims, priority, |_| {})
    }

    fn decide(&mut self, pod: &Pod) -> Decision {
        let situation = Situation::default();
        decide_in(&self.index, &mut self.matcher, pod, &situation, Options::default(), &mut || false)
    }

    /// Lets the API show a decision: allocated at that time, for these pods.
    fn show(&mut self, plan: &Plan, since: i64, users: &[&str]) {
        for draft in &plan.drafts {
            let time = Timestamp::from_second(since).expect("a time");
            let allocation = draft.finish(time, || format!("share-{}", draft.claim.name));
            let results = allocation.devices.as_ref().and_then(|d| d.results.clone()).unwrap_or_default();
            let mark = crate::snapshot::fingerprint(&draft.uid, since, &results);
            let annotations = if self.stripped { json!({}) } else { json!({FINGERPRINT: mark}) };
            let reserved: Vec<Value> = users
                .iter()
                .map(|user| match user.strip_prefix("hold:") {
                    Some(name) => {
                        json!({"apiGroup": HOLD_GROUP, "resource": HOLD_RESOURCE, "name": name, "uid": "uid-hold"})
                    }
                    None => json!({"resource": "pods", "name": user, "uid": format!("uid-{user}")}),
                })
                .collect();
            let spec = self.index.claim(&draft.claim).expect("a claim").spec.clone();
            let claim: ResourceClaim = object(json!({
                "metadata": {"name": &*draft.claim.name, "namespace": "default", "uid": &*draft.uid,
                             "resourceVersion": self.stamp(), "annotations": annotations},
                "spec": *spec, "status": {"allocation": allocation, "reservedFor": reserved},
            }));
            self.index.apply_claim(&claim);
        }
    }

    /// A pod with a claim of its own that is allocated and runs, if it fits.
    pub(crate) fn run(&mut self, name: &str, requests: &[Value], priority: i32, since: i64) -> bool {
        self.run_for(name, requests, priority, since, &[name])
    }

    /// The same, with other users of the claim; `hold:<name>` is an entry of ours.
    fn run_for(&mut self, name: &str, requests: &[Value], priority: i32, since: i64, users: &[&str]) -> bool {
        self.claim(name, requests);
        let pod = self.pod(name, &[name], priority);
        let Decision::Placed(plan) = self.decide(&pod) else {
            self.remove(name);
            self.index.delete_claim(&ObjectKey::new("default", name), None);
            return false;
        };
        self.show(&plan, since, users);
        self.bind(name, &[name], priority, &plan.node);
        true
    }

    pub(crate) fn bind(&mut self, name: &str, claims: &[&str], priority: i32, node: &str) {
        self.pod_with(name, claims, priority, |pod| {
            let spec = pod.spec.as_mut().expect("a spec");
            spec.node_name = Some(node.to_owned());
            spec.scheduling_gates = None;
        });
    }

    pub(crate) fn remove(&mut self, pod: &str) {
        self.index.delete_pod(&ObjectKey::new("default", pod));
    }

    fn choose(&mut self, pod: &Pod) -> Choice {
        let terms = Terms {
            standing: &|pod| pod.priority,
            kept: &|_| 0,
            wall: self.wall,
            evicted: &self.evicted,
            spared: &self.spared,
        };
        let situation = Situation::default();
        choose(&self.index, &mut self.matcher, pod, &situation, &terms, Options::default(), &mut || false)
    }

    /// Names of the victims, ascending.
    fn victims(&mut self, pod: &Pod) -> Vec<String> {
        match self.choose(pod) {
            Choice::Room(room) => {
                let mut names: Vec<String> = room.victims.iter().map(|v| v.pod.name.to_string()).collect();
                names.sort();
                names
            }
            other => panic!("expected room, got {other:?}"),
        }
    }

    fn wants(&mut self, name: &str, requests: &[Value], priority: i32) -> Pod {
        self.claim(name, requests);
        self.pod(name, &[name], priority)
    }
}

fn gpu(count: u32) -> Value {
    request("r", "gpu.aliquot.dev", count)
}

#[test]
fn fewest_pods_go_then_the_lowest_then_those_that_lose_least() {
    let mut world = World::new(&[("n1", 4)]);
    // Two GPUs with several pods each, two with one.
    for number in 0..7 {
        assert!(world.run(&format!("small{number}"), &[partition("r", "1g.10gb")], 0, NOW - 10));
    }
    assert!(world.run("half0", &[partition("r", "3g.40gb")], 0, NOW - 10));
    assert!(world.run("half1", &[partition("r", "3g.40gb")], 0, NOW - 10));
    assert!(world.run("old", &[gpu(1)], 1, NOW - 1_000));
    assert!(world.run("young", &[gpu(1)], 1, NOW - 500));
    let pod = world.wants("high", &[gpu(1)], 10);
    assert_eq!(world.victims(&pod), ["young"], "one pod, and the one that loses less");
    world.spared.insert("uid-young".into());
    assert_eq!(world.victims(&pod), ["old"]);
    world.spared.insert("uid-old".into());
    assert_eq!(world.victims(&pod), ["half0", "half1"]);
    let two = world.wants("higher", &[gpu(2)], 10);
    world.spared.clear();
    assert_eq!(world.victims(&two), ["old", "young"]);
}

#[test]
fn lower_priority_weighs_more_than_time() {
    let mut world = World::new(&[("n1", 2)]);
    assert!(world.run("low", &[gpu(1)], 1, NOW - 90_000));
    assert!(world.run("middle", &[gpu(1)], 2, NOW - 1));
    let pod = world.wants("high", &[gpu(1)], 3);
    assert_eq!(world.victims(&pod), ["low"]);
}

#[test]
fn nobody_of_the_same_priority_goes() {
    let mut world = World::new(&[("n1", 1)]);
    assert!(world.run("peer", &[gpu(1)], 5, NOW));
    let pod = world.wants("wants", &[gpu(1)], 5);
    assert_eq!(world.choose(&pod), Choice::None);
}

#[test]
fn nobody_escapes_by_taking_the_annotation_off_its_claim() {
    let mut world = World::new(&[("n1", 1)]);
    world.stripped = true;
    assert!(world.run("low", &[gpu(1)], 0, NOW));
    let claim = world.index.claim(&ObjectKey::new("default", "low")).expect("kept");
    assert!(!claim.allocation.as_ref().expect("allocated").by_us, "nothing says who wrote it");
    let pod = world.wants("high", &[gpu(1)], 5);
    assert_eq!(world.victims(&pod), ["low"]);
    // What kube-scheduler may give is kube-scheduler's to make room in.
    for slice in fixtures::slices("n1", 1, AllocatorMode::Scheduler, 2) {
        world.index.apply_slice(&slice);
    }
    assert_eq!(world.choose(&pod), Choice::None);
}

#[test]
fn a_pod_whose_claim_is_kept_goes_if_the_claim_gives_way_too() {
    let mut world = World::new(&[("n1", 1)]);
    assert!(world.run_for("low", &[gpu(1)], -10, NOW, &["low", "hold:in-use"]));
    let pod = world.wants("high", &[gpu(1)], 1);
    assert_eq!(world.victims(&pod), ["low"]);
    // Without its pod the claim stands at 0: what does not stand above that would gain nothing.
    let pod = world.wants("same", &[gpu(1)], 0);
    assert_eq!(world.choose(&pod), Choice::None);
}

#[test]
fn what_is_kept_without_a_pod_counts_beside_who_goes() {
    let mut world = World::new(&[("n1", 2)]);
    assert!(world.run_for("spare", &[gpu(1)], 0, NOW, &["hold:until-99999999999"]));
    world.remove("spare");
    assert!(world.run("low", &[gpu(1)], 0, NOW));
    let two = world.wants("two", &[gpu(2)], 5);
    assert_eq!(world.victims(&two), ["low"]);
}

#[test]
fn nobody_goes_for_what_would_not_fit_afterwards() {
    let mut world = World::new(&[("n1", 2)]);
    assert!(world.run("low", &[gpu(1)], 0, NOW));
    assert!(world.run("peer", &[gpu(1)], 5, NOW));
    let two = world.wants("two", &[gpu(2)], 5);
    assert_eq!(world.choose(&two), Choice::None);
    // Nor where the pod itself cannot be.
    world.claim("picky", &[gpu(1)]);
    let picky = world.pod_with("picky", &["picky"], 5, |pod| {
        let labels = [("zone".to_owned(), "nowhere".to_owned())];
        pod.spec.as_mut().expect("a spec").node_selector = Some(labels.into());
    });
    assert_eq!(world.choose(&picky), Choice::None);
}

#[test]
fn all_users_of_a_claim_go_or_none() {
    let mut world = World::new(&[("n1", 1)]);
    world.claim("shared", &[gpu(1)]);
    let first = world.pod("a", &["shared"], 0);
    let Decision::Placed(plan) = world.decide(&first) else { panic!("fits") };
    world.show(&plan, NOW, &["a", "b"]);
    world.bind("a", &["shared"], 0, "n1");
    world.bind("b", &["shared"], 1, "n1");
    let pod = world.wants("high", &[gpu(1)], 3);
    assert_eq!(world.victims(&pod), ["a", "b"]);
    world.bind("b", &["shared"], 3, "n1");
    assert_eq!(world.choose(&pod), Choice::None, "one of them stands as high");
}

#[test]
fn what_ends_already_is_waited_for_and_not_for_ever() {
    let mut world = World::new(&[("n1", 2)]);
    assert!(world.run("ends", &[gpu(1)], 9, NOW));
    assert!(world.run("low", &[gpu(1)], 0, NOW));
    let pod = world.wants("high", &[gpu(1)], 3);
    world.pod_with("ends", &["ends"], 9, |pod| {
        pod.spec.as_mut().expect("a spec").node_name = Some("n1".to_owned());
        pod.metadata.deletion_timestamp =
            Some(object(json!(Timestamp::from_second(NOW + 30).expect("a time").to_string())));
    });
    let Choice::Room(room) = world.choose(&pod) else { panic!("room comes by itself") };
    assert_eq!((room.victims.len(), room.awaited.len()), (0, 1));
    world.wall = NOW + 30 + 61;
    assert_eq!(world.victims(&pod), ["low"], "it hangs");
    // An accepted eviction counts before the pod shows it.
    world.evicted.insert("uid-low".into());
    assert_eq!(world.victims(&pod), Vec::<String>::new());
    // So does a pod that is gone while its claim is still allocated.
    world.evicted.clear();
    world.remove("low");
    assert_eq!(world.victims(&pod), Vec::<String>::new());
}

#[test]
fn a_claim_that_is_kept_without_a_consumer_is_not_counted_on() {
    let mut world = World::new(&[("n1", 1)]);
    world.claim("kept", &[gpu(1)]);
    let first = world.pod("first", &["kept"], 0);
    let Decision::Placed(plan) = world.decide(&first) else { panic!("fits") };
    world.show(&plan, NOW, &[]);
    world.remove("first");
    let pod = world.wants("high", &[gpu(1)], 3);
    assert_eq!(world.choose(&pod), Choice::None);
}

#[test]
fn room_on_the_node_counts_as_well() {
    let mut world = World::new(&[("n1", 2)]);
    world.claim("hog", &[gpu(1)]);
    let hog = world.pod("hog", &["hog"], 0);
    let Decision::Placed(plan) = world.decide(&hog) else { panic!("fits") };
    world.show(&plan, NOW, &["hog"]);
    let big = |pod: &mut ApiPod| {
        let containers = &mut pod.spec.as_mut().expect("a spec").containers;
        containers[0].resources = Some(object(json!({"requests": {"cpu": "60"}})));
    };
    world.pod_with("hog", &["hog"], 0, |pod| {
        big(pod);
        pod.spec.as_mut().expect("a spec").node_name = Some("n1".to_owned());
    });
    world.claim("high", &[gpu(1)]);
    let pod = world.pod_with("high", &["high"], 1, big);
    assert!(matches!(world.decide(&pod), Decision::NoFit(_)), "a GPU is free, processors are not");
    assert_eq!(world.victims(&pod), ["hog"]);
}

#[test]
fn devices_kept_for_another_are_not_counted_on() {
    let mut world = World::new(&[("n1", 2)]);
    assert!(world.run("a", &[gpu(1)], 0, NOW));
    assert!(world.run("b", &[gpu(1)], 0, NOW - 50));
    let first = world.wants("first", &[gpu(1)], 5);
    let Choice::Room(room) = world.choose(&first) else { panic!("room") };
    assert_eq!(&*room.victims[0].pod.name, "a");
    let allocation = room.plan.drafts[0].finish(Timestamp::from_second(NOW).expect("a time"), String::new);
    let kept: Vec<_> = world
        .index
        .read_allocation("uid-first", None, &allocation)
        .held
        .into_iter()
        .map(|held| {
            let claim: Uid = "uid-first".into();
            let holder = crate::snapshot::Holder {
                claim,
                device: held.device,
                admin: false,
                share: None,
                consumed: held.consumed,
                time_slice: None,
            };
            (held.pool, holder)
        })
        .collect();
    let mut stage = Overlay::new(&world.index, "n1");
    stage.hold(&world.index, &kept);
    let situation = Situation { stages: [("n1".into(), stage)].into(), ..Situation::default() };
    let second = world.wants("second", &[gpu(1)], 5);
    let terms = Terms {
        standing: &|pod| pod.priority,
        kept: &|_| 0,
        wall: NOW,
        evicted: &world.evicted,
        spared: &world.spared,
    };
    let choice = choose(
        &world.index,
        &mut world.matcher,
        &second,
        &situation,
        &terms,
        Options::default(),
        &mut || false,
    );
    let Choice::Room(room) = choice else { panic!("room: {choice:?}") };
    assert_eq!(&*room.victims[0].pod.name, "b");
}

#[derive(Debug, Clone)]
enum Want {
    Part(&'static str),
    Share(u32),
    Gpus(u32),
    Two(&'static str, &'static str),
}

impl Want {
    fn requests(&self) -> Vec<Value> {
        match self {
            Self::Part(profile) => vec![partition("r", profile)],
            Self::Share(gib) => vec![share("r", &format!("{gib}Gi"), "0")],
            Self::Gpus(count) => vec![gpu(*count)],
            Self::Two(one, other) => vec![partition("r", one), partition("s", other)],
        }
    }
}

fn want() -> impl Generator<Value = Want> {
    let profile = || prop::sample::select(vec!["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb"]);
    prop_oneof![
        4 => profile().prop_map(Want::Part),
        2 => (10u32..60).prop_map(Want::Share),
        1 => (1u32..3).prop_map(Want::Gpus),
        1 => (profile(), profile()).prop_map(|(one, other)| Want::Two(one, other)),
    ]
}

/// What the cheapest set costs, by trying every set of pods that stand lower: whoever is in the set is
/// really removed.
fn cheapest_by_trying(
    running: &[(String, i32, i64)],
    fits_without: &dyn Fn(&[&str]) -> bool,
    priority: i32,
) -> Option<(usize, Vec<i32>)> {
    let lower: Vec<&(String, i32, i64)> = running.iter().filter(|(_, p, _)| *p < priority).collect();
    let mut best: Option<(usize, Vec<i32>)> = None;
    for set in 0u32..(1 << lower.len()) {
        let gone: Vec<&(String, i32, i64)> =
            lower.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1).map(|(_, pod)| *pod).collect();
        let mut standings: Vec<i32> = gone.iter().map(|(_, priority, _)| *priority).collect();
        standings.sort_unstable_by_key(|standing| Reverse(*standing));
        let cost = (gone.len(), standings);
        if best.as_ref().is_some_and(|best| *best <= cost) {
            continue;
        }
        let names: Vec<&str> = gone.iter().map(|(name, _, _)| name.as_str()).collect();
        if fits_without(&names) {
            best = Some(cost);
        }
    }
    best
}

type Story = (Vec<u32>, Vec<(Want, i32, i64)>, Want, i32);

/// A cluster with the story's pods on it, and the pod that wants room.
fn play(story: &Story) -> (World, Vec<(String, i32, i64)>, Pod) {
    let (nodes, pods, wanted, priority) = story;
    let names: Vec<String> = (0..nodes.len()).map(|number| format!("n{number}")).collect();
    let nodes: Vec<(&str, u32)> = names.iter().map(String::as_str).zip(nodes.iter().copied()).collect();
    let mut world = World::new(&nodes);
    let mut running = Vec::new();
    for (number, (want, priority, age)) in pods.iter().enumerate() {
        let name = format!("p{number}");
        if world.run(&name, &want.requests(), *priority, NOW - age) {
            running.push((name, *priority, *age));
        }
    }
    let pod = world.wants("wants", &wanted.requests(), *priority);
    (world, running, pod)
}

fn story() -> impl Generator<Value = Story> {
    let nodes = prop_oneof![Just(vec![1]), Just(vec![2]), Just(vec![1, 1])];
    (nodes, prop::collection::vec((want(), 0i32..4, 1i64..1000), 1..8), want(), 1i32..5)
}

proptest! {
    #![proptest_config(Config::with_cases(Config::default().cases / 5))]

    /// Against every set of pods there is: only lower ones go, what is chosen makes room, nothing of it
    /// can be left out, nothing is cheaper, and nothing is chosen only if no set at all makes room.
    #[test]
    fn the_chosen_are_the_cheapest_that_make_room(story in story()) {
        let (mut world, running, pod) = play(&story);
        if !matches!(world.decide(&pod), Decision::NoFit(_)) {
            return Ok(());
        }
        let fits_without = |gone: &[&str]| {
            let (mut world, _, pod) = play(&story);
            for name in gone {
                world.remove(name);
                world.index.delete_claim(&ObjectKey::new("default", name), None);
            }
            matches!(world.decide(&pod), Decision::Placed(_))
        };
        let cheapest = cheapest_by_trying(&running, &fits_without, pod.priority);
        match world.choose(&pod) {
            Choice::Room(room) => {
                prop_assert!(room.victims.iter().all(|victim| victim.standing < pod.priority));
                let names: Vec<&str> = room.victims.iter().map(|victim| &*victim.pod.name).collect();
                prop_assert!(fits_without(&names), "{names:?} make no room");
                for left_out in &names {
                    let rest: Vec<&str> = names.iter().copied().filter(|name| name != left_out).collect();
                    prop_assert!(!fits_without(&rest), "{left_out} need not go");
                }
                prop_assert_eq!(Some((room.cost.victims, room.cost.standings.clone())), cheapest);
            }
            Choice::None => prop_assert_eq!(cheapest, None),
            Choice::OutOfTime => prop_assert!(false, "no time limit was set"),
        }
    }
}

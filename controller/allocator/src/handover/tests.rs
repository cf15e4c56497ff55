use super::*;
use crate::fixtures::{self, DRIVER, object, request};
use aliquot_model::layout::AllocatorMode;
use rstest::rstest;
use serde_json::{Value, json};

const SETTLE: Duration = Duration::from_secs(30);

/// Hand-overs with a clock: looks take no time.
struct World {
    hand_overs: HandOvers,
    began: Instant,
}

impl World {
    /// One node, handed over at generation 7 at second 0.
    fn new() -> Self {
        let mut world = Self { hand_overs: HandOvers::default(), began: fixtures::some_moment() };
        world.note(0, &[("n1", 7)]);
        world
    }

    fn at(&self, second: u64) -> Instant {
        self.began + Duration::from_secs(second)
    }

    fn note(&mut self, second: u64, nodes: &[(&str, i64)]) {
        let nodes = nodes.iter().map(|(node, generation)| ((*node).into(), *generation)).collect();
        self.hand_overs.note(&nodes, self.at(second));
    }

    fn is_due(&mut self, second: u64) -> bool {
        self.hand_overs.begin_look(self.at(second), SETTLE)
    }

    /// A look that began then; whether the hand-overs are over, and whether somebody is said to hold them up.
    fn look(&mut self, second: u64, pods: &[&str]) -> (Vec<String>, bool) {
        let pods = pods.iter().map(|name| (Uid::from(*name), ObjectKey::new("default", name))).collect();
        let news = self.hand_overs.looked(self.at(second), self.at(second), &pods, SETTLE);
        let idle = news.idle.iter().map(|(node, generation)| format!("{node}/{generation}")).collect();
        (idle, !news.held_up.is_empty())
    }
}

fn nothing() -> (Vec<String>, bool) {
    (Vec::new(), false)
}

fn over() -> (Vec<String>, bool) {
    (vec!["n1/7".to_owned()], false)
}

#[test]
fn an_idle_cluster_is_looked_at_twice_a_settle_time_apart() {
    let mut world = World::new();
    assert!(world.is_due(0) && !world.is_due(1), "one look at a time");
    assert_eq!(world.look(0, &[]), nothing());
    assert!(!world.is_due(29) && world.is_due(30));
    assert_eq!(world.look(30, &[]), over());
    assert!(!world.is_due(100), "it is said once");
}

#[test]
fn nodes_that_come_one_after_the_other_share_looks() {
    let mut world = World::new();
    assert!(world.is_due(0));
    world.look(0, &[]);
    world.note(1, &[("n1", 7), ("n2", 3)]);
    assert!(!world.is_due(1), "too soon after the last one");
    world.note(2, &[("n1", 7), ("n2", 3), ("n3", 1)]);
    assert!(world.is_due(2), "for both");
}

#[test]
fn a_look_that_began_before_the_hand_over_was_seen_says_nothing() {
    let mut world = World::new();
    world.note(10, &[("n1", 8)]);
    assert_eq!(world.look(9, &[]), nothing());
    assert_eq!(world.look(39, &[]), nothing(), "the first that counts");
    assert_eq!(world.look(69, &[]), (vec!["n1/8".to_owned()], false));
}

#[test]
fn looks_closer_than_the_settle_time_are_not_enough() {
    let mut world = World::new();
    for second in [0, 10, 20, 29] {
        assert_eq!(world.look(second, &[]), nothing(), "{second}");
    }
    assert_eq!(world.look(30, &[]), over());
}

#[test]
fn what_is_under_way_holds_it_up_and_is_told_once() {
    let mut world = World::new();
    assert_eq!(world.look(0, &["a"]), nothing());
    assert_eq!(world.look(30, &["a"]), (Vec::new(), true));
    assert_eq!(world.hand_overs.counts(), (1, 1));
    assert_eq!(world.look(60, &["a"]), nothing());
    // It may have been deleted, and its write be under way all the same.
    assert_eq!(world.look(90, &[]), nothing());
    assert_eq!(world.look(120, &[]), over());
    assert_eq!(world.hand_overs.counts(), (0, 0));
}

#[test]
fn a_pod_that_came_while_slices_may_not_have_been_seen_is_waited_for() {
    let mut world = World::new();
    assert_eq!(world.look(0, &[]), nothing());
    assert_eq!(world.look(30, &["late"]), (Vec::new(), true));
    assert_eq!(world.look(60, &["late"]), nothing());
    assert_eq!(world.look(90, &[]), nothing());
    assert_eq!(world.look(120, &[]), over());
}

#[test]
fn what_comes_after_the_settle_time_knows_of_the_hand_over() {
    let mut world = World::new();
    assert_eq!(world.look(0, &["a"]), nothing());
    assert_eq!(world.look(30, &["b"]).0, nothing().0);
    assert_eq!(world.look(60, &["c"]), nothing());
    assert_eq!(world.look(90, &["c", "d"]), over());
}

#[test]
fn another_generation_begins_anew() {
    let mut world = World::new();
    world.look(0, &[]);
    world.note(20, &[("n1", 8)]);
    assert_eq!(world.look(30, &[]), nothing());
    assert_eq!(world.look(60, &[]), (vec!["n1/8".to_owned()], false));
    // As does one that was not there for a while.
    world.note(61, &[]);
    world.note(62, &[("n1", 8)]);
    assert_eq!(world.look(90, &[]), nothing());
}

#[test]
fn what_could_not_be_seen_or_written_is_tried_again() {
    let mut world = World::new();
    assert!(world.is_due(0));
    let now = world.at(5);
    world.hand_overs.not_looked(now);
    assert!(!world.is_due(34) && world.is_due(35));
    assert_eq!(world.look(35, &[]), nothing());
    assert_eq!(world.look(65, &[]), over());
    world.hand_overs.not_written("n1", 6);
    assert!(!world.is_due(95), "of an earlier one");
    world.hand_overs.not_written("n1", 7);
    assert!(world.is_due(95));
    assert_eq!(world.look(95, &[]), over());
}

#[test]
fn a_node_that_is_handed_over_later_is_looked_after_at_once_and_by_itself() {
    let mut world = World::new();
    assert!(world.is_due(0));
    world.look(0, &[]);
    world.note(10, &[("n1", 7), ("n2", 3)]);
    assert!(world.is_due(10));
    assert_eq!(world.look(10, &[]), nothing());
    assert_eq!(world.look(30, &[]), over());
    assert_eq!(world.look(40, &[]), (vec!["n2/3".to_owned()], false));
}

/// The index with classes of ours and of another driver, and these claims.
fn index(claims: &[Value]) -> Snapshot {
    let mut index = Snapshot::new(DRIVER);
    let mut classes = fixtures::classes();
    classes.push(fixtures::class("other.example.com", "device.driver == 'other.example.com'"));
    let mut extended = fixtures::class("extended", &format!("device.driver == '{DRIVER}'"));
    extended.spec.extended_resource_name = Some("example.com/gpu".to_owned());
    classes.push(extended);
    index.reset_classes(&classes);
    for slice in fixtures::slices("n1", 1, AllocatorMode::HandOver, 7) {
        index.apply_slice(&slice);
    }
    for claim in claims {
        index.apply_claim(&object(claim.clone()));
    }
    index
}

fn claim(class: &str, status: &Value) -> Value {
    json!({"metadata": {"name": "c", "namespace": "default", "uid": "uid-c"},
           "spec": fixtures::spec(&[request("r", class, 1)]), "status": status})
}

fn pod(spec: &Value, status: &Value) -> ApiPod {
    let mut pod = json!({"metadata": {"name": "p", "namespace": "default", "uid": "uid-p"},
        "spec": {"containers": [], "resourceClaims": [{"name": "c", "resourceClaimName": "c"}]},
        "status": status});
    for (key, value) in spec.as_object().into_iter().flatten() {
        pod["spec"][key] = value.clone();
    }
    object(pod)
}

fn allocation() -> Value {
    let result = json!({"request": "r", "driver": DRIVER, "pool": format!("{DRIVER}/n1"), "device": "gpu-0"});
    json!({"allocation": {"devices": {"results": [result]}}})
}

fn requesting(resource: &str) -> Value {
    let container = json!({"name": "main", "image": "i", "resources": {"requests": {resource: "1"}}});
    json!({"resourceClaims": null, "containers": [container]})
}

fn from_template() -> Value {
    json!({"resourceClaims": [{"name": "c", "resourceClaimTemplateName": "t"}]})
}

fn made(name: Option<&str>) -> Value {
    json!({"resourceClaimStatuses": [{"name": "c", "resourceClaimName": name}]})
}

#[rstest]
#[case::a_claim_of_ours("gpu.aliquot.dev", json!({}), json!({}), json!({}), true)]
#[case::of_another_scheduler("gpu.aliquot.dev", json!({}), json!({"schedulerName": "x"}), json!({}), true)]
#[case::unschedulable("gpu.aliquot.dev", json!({}), json!({}),
    json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}), true)]
#[case::nominated("gpu.aliquot.dev", json!({}), json!({}), json!({"nominatedNodeName": "n1"}), true)]
#[case::of_a_class_that_is_gone("gone", json!({}), json!({}), json!({}), true)]
#[case::not_known("gpu.aliquot.dev", json!({}),
    json!({"resourceClaims": [{"name": "c", "resourceClaimName": "unknown"}]}), json!({}), true)]
#[case::not_made_yet("gpu.aliquot.dev", json!({}), from_template(), json!({}), true)]
#[case::made("gpu.aliquot.dev", json!({}), from_template(), made(Some("c")), true)]
#[case::not_needed("gpu.aliquot.dev", json!({}), from_template(), made(None), false)]
#[case::of_a_source_that_we_do_not_know("gpu.aliquot.dev", json!({}),
    json!({"resourceClaims": [{"name": "c"}]}), json!({}), true)]
#[case::by_a_resource("gpu.aliquot.dev", json!({}), requesting("example.com/gpu"), json!({}), true)]
#[case::by_a_class_as_resource("gpu.aliquot.dev", json!({}),
    requesting("deviceclass.resource.kubernetes.io/gpu.aliquot.dev"), json!({}), true)]
#[case::other_resources("gpu.aliquot.dev", json!({}), requesting("example.com/other"), json!({}), false)]
#[case::a_class_of_others_as_resource("gpu.aliquot.dev", json!({}),
    requesting("deviceclass.resource.kubernetes.io/other.example.com"), json!({}), false)]
#[case::allocated("gpu.aliquot.dev", allocation(), json!({}), json!({}), false)]
#[case::of_another_driver("other.example.com", json!({}), json!({}), json!({}), false)]
#[case::gated("gpu.aliquot.dev", json!({}), json!({"schedulingGates": [{"name": "any"}]}), json!({}), false)]
#[case::bound("gpu.aliquot.dev", json!({}), json!({"nodeName": "n1"}), json!({}), false)]
#[case::ended("gpu.aliquot.dev", json!({}), json!({}), json!({"phase": "Failed"}), false)]
fn what_a_scheduler_may_be_giving_devices(
    #[case] class: &str,
    #[case] claim_status: Value,
    #[case] spec: Value,
    #[case] status: Value,
    #[case] want: bool,
) {
    let index = index(&[claim(class, &claim_status)]);
    assert_eq!(under_way(&index, &mut Matcher::new(), &pod(&spec, &status)), want);
}

#[test]
fn a_pod_that_is_being_deleted_counts_for_as_long_as_it_is_there() {
    let index = index(&[claim("gpu.aliquot.dev", &json!({}))]);
    let mut pod = pod(&json!({}), &json!({}));
    let mut matcher = Matcher::new();
    pod.metadata.deletion_timestamp = Some(object(json!("2026-01-02T03:04:05Z")));
    pod.metadata.finalizers = Some(vec!["example.com/mine".to_owned()]);
    assert!(under_way(&index, &mut matcher, &pod));
}

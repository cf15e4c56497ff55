use super::*;
use crate::fixtures::{self, DRIVER, object, partition, request};
use crate::snapshot::FINGERPRINT;
use aliquot_model::layout::AllocatorMode;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

struct World {
    index: Snapshot,
    matcher: Matcher,
}

impl World {
    fn new(nodes: &[&str]) -> Self {
        let mut index = Snapshot::new(DRIVER);
        index.reset_classes(&fixtures::classes());
        for name in nodes {
            index.apply_node(&fixtures::node(name));
            for slice in fixtures::slices(name, 1, AllocatorMode::Controller, 1) {
                index.apply_slice(&slice);
            }
        }
        Self { index, matcher: Matcher::new() }
    }

    fn pod(&mut self, name: &str, request: &Value, priority: i32) -> Pod {
        let mut claim = fixtures::claim(name, &fixtures::spec(std::slice::from_ref(request)));
        claim.metadata.uid = Some(format!("uid-{name}"));
        self.index.apply_claim(&claim);
        let mut pod = fixtures::pod(name, &[name]);
        pod.metadata.uid = Some(format!("uid-{name}"));
        pod.spec.as_mut().expect("a spec").priority = Some(priority);
        self.index.apply_pod(&pod);
        self.index.pod(&ObjectKey::new("default", name)).expect("kept").clone()
    }

    /// Gives a pod its devices as the API would show it.
    fn place(&mut self, name: &str, request: &Value, priority: i32) -> Pod {
        let pod = self.pod(name, request, priority);
        let decision = decide(
            &self.index,
            &mut self.matcher,
            &pod,
            &Default::default(),
            Options::default(),
            &mut || false,
        );
        let Decision::Placed(plan) = decision else { panic!("fits: {decision:?}") };
        let draft = &plan.drafts[0];
        let allocation = draft.finish(Timestamp::from_second(1_000).expect("a time"), || "share".to_owned());
        let results = allocation.devices.as_ref().and_then(|d| d.results.clone()).unwrap_or_default();
        let mark = crate::snapshot::fingerprint(&draft.uid, 1_000, &results);
        let reserved = json!([{"resource": "pods", "name": name, "uid": &*pod.uid}]);
        self.index.apply_claim(&object(json!({
            "metadata": {"name": name, "namespace": "default", "uid": &*draft.uid, "annotations": {FINGERPRINT: mark}},
            "spec": *self.index.claim(&draft.claim).expect("a claim").spec.clone(),
            "status": {"allocation": allocation, "reservedFor": reserved},
        })));
        pod
    }

    fn explain(&mut self, pod: &Pod) -> String {
        explain(&mut self.index, &mut self.matcher, pod, Options::default(), 2_000, &mut || false).to_string()
    }
}

fn gpu() -> Value {
    request("r", "gpu.aliquot.dev", 1)
}

#[test]
fn an_allocated_pod_is_told_what_it_has_and_how_the_nodes_compare() {
    let mut world = World::new(&["n1", "n2", "n3"]);
    world.place("first", &partition("r", "3g.40gb"), 0);
    world.place("whole", &gpu(), 0);
    let pod = world.place("second", &partition("r", "1g.10gb"), 0);
    let text = world.explain(&pod);
    assert!(text.contains("claim default/second has devices on node n1, given by the controller"), "{text}");
    assert!(text.contains("r: gpu-0-mig-1g10gb-"), "{text}");
    assert!(text.contains("n1 would be chosen again"), "{text}");
    assert!(text.contains("it fits on 2 of 3 node(s)"), "{text}");
    assert!(text.contains("1. n1: opens 0 untouched") && text.contains("2. n3: opens 1 untouched"), "{text}");
    assert!(text.contains("1 (n2) have not enough free devices for request r"), "{text}");
}

#[test]
fn a_pod_without_devices_is_told_the_counts_of_reasons_and_the_nearest_miss() {
    let mut world = World::new(&["n1", "n2"]);
    for number in 0..8 {
        world.place(&format!("small{number}"), &partition("r", "1g.10gb"), 0);
    }
    let pod = world.pod("high", &gpu(), 5);
    let text = world.explain(&pod);
    assert!(text.contains("it fits on none of 2 node(s) with devices"), "{text}");
    assert!(text.contains("2 (such as n1) have not enough free devices for request r"), "{text}");
    assert!(
        text.contains("nearest: gpu-0 on node n2, if 1 pod(s) ended: default/small7; 1 of them have"),
        "{text}"
    );
}

#[test]
fn what_no_end_of_a_pod_would_change_is_said_so() {
    let mut world = World::new(&["n1"]);
    let nothing = world.pod("nothing", &partition("r", "9g.999gb"), 0);
    assert!(world.explain(&nothing).contains("no published device is what it asks for"));
    let mut node = fixtures::node("n1");
    node.spec = Some(object(json!({"unschedulable": true})));
    world.index.apply_node(&node);
    let pod = world.pod("closed", &gpu(), 0);
    let text = world.explain(&pod);
    assert!(text.contains("nearest: node n1, one of those that are cordoned"), "{text}");
}

#[test]
fn a_pod_that_fits_is_told_what_it_would_get() {
    let mut world = World::new(&["n1"]);
    let pod = world.pod("waits", &gpu(), 0);
    let text = world.explain(&pod);
    assert!(text.contains("nothing is allocated yet, but gpu-0 on node n1 would do"), "{text}");
}

#[test]
fn a_selector_that_costs_too_much_is_named_with_what_to_do() {
    let mut world = World::new(&["n1"]);
    let mut costly = gpu();
    let expression = "lists.range(3000).all(a, lists.range(3000).all(b, a + b >= 0))";
    costly["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    let pod = world.pod("costly", &costly, 0);
    let text = world.explain(&pod);
    assert!(
        text.contains("request r") && text.contains("costs more than 10000000 steps on a device"),
        "{text}"
    );
    assert!(text.contains("simplify it"), "{text}");
}

#[test]
fn a_pod_that_waits_for_a_hand_over_is_told_until_when() {
    let mut world = World::new(&[]);
    world.index.apply_node(&fixtures::node("n1"));
    for mut slice in fixtures::slices("n1", 1, AllocatorMode::HandOver, 2) {
        let noted = (aliquot_model::names::HAND_OVER_UNTIL.to_owned(), "2026-01-02T03:14:00Z".to_owned());
        slice.metadata.annotations = Some([noted].into());
        world.index.apply_slice(&slice);
    }
    let pod = world.pod("waits", &gpu(), 0);
    let text = world.explain(&pod);
    assert!(text.contains("nearest: node n1, one of those that are being handed over"), "{text}");
    assert!(text.contains("until 2026-01-02T03:14:00Z at the latest"), "{text}");
    assert!(!text.contains("check class and selectors"), "{text}");
}

//! A place that is held for a pod that goes back to what it asked for.

use super::*;
use aliquot_allocator::snapshot::GOING_BACK;
use rstest::rstest;

/// Processors of the node, and of a pod.
const CPUS: u32 = 4;

fn held() -> World {
    held_by("successor")
}

/// A node with two GPUs on which another controller holds a place for the pod of a maker, which it calls so. It needs all
/// processors.
fn held_by(name: &str) -> World {
    let mut world = World::new(&[("n1", 2)]);
    let place = json!({
        name: {"namespace": "default", "maker": "uid-maker", "templates": ["t"], "leaves": "uid-left"},
        "devices": [["gpu.aliquot.dev/n1", "gpu-0-mig-1g10gb-19-0"]],
        "needs": {"requests": {"cpu": CPUS.to_string()}},
    });
    let mut node = fixtures::node("n1");
    let cpus = k8s_openapi::apimachinery::pkg::api::resource::Quantity(CPUS.to_string());
    let allocatable = node.status.get_or_insert_default().allocatable.get_or_insert_default();
    allocatable.insert("cpu".to_owned(), cpus);
    node.metadata.annotations = Some([(GOING_BACK.to_owned(), place.to_string())].into());
    world.handle(Input::Node(Seen::Apply(Box::new(node))));
    world.core.returns.resumed = false;
    world
}

#[rstest]
#[case::of_this_build("successor")]
#[case::of_an_earlier_build("heir")]
fn a_place_that_an_earlier_controller_held_is_held_with_its_processors(#[case] name: &str) {
    let mut world = held_by(name);
    world.one("rival", &[partition("r", "1g.10gb")]);
    assert_eq!(world.take_jobs().len(), 0, "a GPU is free, and no processor");
}

#[test]
fn processors_are_not_kept_twice_while_the_pod_that_leaves_has_them() {
    let mut world = held();
    world.pod("left", &[], |pod| {
        let spec = pod.spec.as_mut().expect("a spec");
        spec.node_name = Some("n1".to_owned());
        spec.scheduling_gates = None;
        pod.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::UNIX_EPOCH));
    });
    // One of the four is the leaving pod's, three are free; when it is gone all four are kept.
    world.one("rival", &[partition("r", "1g.10gb")]);
    assert_eq!(world.take_jobs().len(), 1);
}

//! What no device is: each answer names the request, what was asked, what there is, and what to do.

use super::*;
use crate::fixtures::class;

fn selecting(expression: &str) -> Value {
    let mut wanted = request("r", "gpu.aliquot.dev", 1);
    wanted["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    wanted
}

fn asking_for(capacity: &str, amount: &str) -> Value {
    let mut wanted = request("r", "share.aliquot.dev", 1);
    wanted["exactly"]["capacity"] = json!({"requests": {capacity: amount}});
    wanted
}

#[rstest]
#[case::memory_beyond_any_gpu(
    asking_for("memory", "1000Gi"),
    "have no device that is large enough for request r, which asks for 1000Gi of memory: the largest has 80Gi, and at \
     most 80Gi of that is free on one now; ask for 80Gi or less"
)]
#[case::cores_beyond_any_gpu(
    asking_for("cores", "130"),
    "have no device that is large enough for request r, which asks for 130 of cores: the largest has 100, and at most \
     100 of that is free on one now; ask for 100 or less"
)]
#[case::two_slots_of_one_share(
    asking_for("slots", "2"),
    "have no device that is large enough for request r, which asks for 2 of slots: the largest has 1, and at most 1 of \
     that is free on one now; ask for 1 or less"
)]
#[case::misspelt_capacity(
    asking_for("memorry", "10Gi"),
    "have no device with the capacity memorry, which request r asks for; those of DeviceClass share.aliquot.dev have \
     cores, memory, slots: is memory meant?"
)]
#[case::unknown_capacity(
    asking_for("bandwidth", "10Gi"),
    "have no device with the capacity bandwidth, which request r asks for; those of DeviceClass share.aliquot.dev have \
     cores, memory, slots"
)]
#[case::impossible_profile(
    partition("r", "2g.21gb"),
    "request r selects: profile has to be 2g.21gb, published are 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, \
     7g.80gb; ask for one of these"
)]
#[case::board_that_is_not_there(
    selecting(r#"device.attributes["gpu.aliquot.dev"].productName == "NVIDIA B999""#),
    "request r selects: productName has to be NVIDIA B999, published are NVIDIA H100 80GB HBM3; ask for one of these"
)]
#[case::selector_of_which_nothing_can_be_told(
    selecting(r#"device.capacity["gpu.aliquot.dev"].memory.isGreaterThan(quantity("900Gi"))"#),
    "have no device of DeviceClass gpu.aliquot.dev that the selector \"device.capacity[\\\"gpu.aliquot.dev\\\"].memory.\
     isGreaterThan(quantity(\\\"900Gi\\\"))\" of request r selects; change the selector"
)]
#[case::class_that_nothing_publishes(
    request("r", "mps.aliquot.dev", 1),
    "have no device of DeviceClass mps.aliquot.dev, which request r names: type has to be mps, published are admin, gpu, \
     mig, share, timeslice; name another class, or let an administrator switch this kind on"
)]
fn what_no_device_is_is_told_with_what_there_is(#[case] wanted: Value, #[case] told: &str) {
    let mut world = World::new();
    for (name, gpus) in [("n1", 2), ("n2", 1)] {
        world.index.apply_node(&fixtures::node(name));
        let mut options = fixtures::options(AllocatorMode::Controller, false);
        options.mps.clear();
        let gpus: Vec<GpuState> =
            (0..gpus).map(|minor| fixtures::state(fixtures::h100(name, minor))).collect();
        for slice in fixtures::slices_by(name, &gpus, &options, 1) {
            world.index.apply_slice(&slice);
        }
    }
    let mps = class(
        "mps.aliquot.dev",
        r#"device.driver == "gpu.aliquot.dev" && device.attributes["gpu.aliquot.dev"].type == "mps""#,
    );
    let classes: Vec<_> = fixtures::classes().into_iter().chain([mps]).collect();
    world.index.reset_classes(&classes);
    let said = world.refused("c", &[wanted]);
    assert!(said.starts_with("0 of 2 nodes with devices fit: 2 "), "{said}");
    assert!(said.contains(told), "{said}");
    assert!(said.len() < 1024, "an event has no room for more");
}

#[test]
fn what_is_free_is_the_most_of_all_nodes_alike() {
    let mut world = World::with_nodes(&[("n1", 1), ("n2", 1), ("n3", 1)]);
    world.one("some", &[share("s", "70Gi", "0")]);
    world.one("whole", &[request("r", "gpu.aliquot.dev", 1)]);
    let told = world.refused("c", &[asking_for("memory", "90Gi")]);
    assert!(told.contains("the largest has 80Gi, and at most 80Gi of that is free on one now"), "{told}");
    world.one("more", &[share("s", "45Gi", "0")]);
    let told = world.refused("d", &[asking_for("memory", "90Gi")]);
    assert!(told.contains("the largest has 80Gi, and at most 35Gi of that is free on one now"), "{told}");
}

#[test]
fn nodes_with_different_boards_are_told_as_one_with_all_that_they_publish() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    world.index.apply_node(&fixtures::node("n2"));
    let mut other = fixtures::h100("n2", 0);
    other.product_name = "NVIDIA L40S".to_owned();
    let gpus = [fixtures::state(other)];
    for slice in fixtures::slices_of("n2", &gpus, AllocatorMode::Controller, 1) {
        world.index.apply_slice(&slice);
    }
    let wanted = selecting(r#"device.attributes["gpu.aliquot.dev"].productName == "NVIDIA B999""#);
    let said = world.refused("c", &[wanted]);
    assert!(said.contains("2 have no device"), "{said}");
    assert!(said.contains("published are NVIDIA H100 80GB HBM3, NVIDIA L40S;"), "{said}");
}

#[test]
fn what_is_free_is_the_most_of_nodes_alike_also_where_shares_are_in_the_way() {
    let mut world = World::with_nodes(&[("n1", 1), ("n2", 1)]);
    world.one("much", &[share("s", "75Gi", "0")]);
    world.one("less", &[share("s", "50Gi", "0")]);
    let told = world.refused("c", &[share("s", "35Gi", "0")]);
    assert!(told.contains("at most 30Gi is free on one now, of 80Gi; ask for that or less"), "{told}");
    world.one("rest", &[share("s", "30Gi", "0")]);
    world.one("last", &[share("s", "5Gi", "0")]);
    let told = world.refused("d", &[share("s", "35Gi", "0")]);
    assert!(told.contains("none is free now, of 80Gi on one; wait until some is free"), "{told}");
}

#[test]
fn which_gpus_there_are_is_not_told_to_whoever_asks_for_one_by_its_uuid() {
    let mut world = World::with_nodes(&[("n1", 2)]);
    let said = world.refused("c", &[selecting(r#"device.attributes["gpu.aliquot.dev"].uuid == "GPU-none""#)]);
    assert!(said.ends_with("uuid has to be GPU-none; change the selector"), "{said}");
}

#[test]
fn a_value_that_is_published_is_not_told_as_what_is_lacking() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    let both = r#"device.attributes["gpu.aliquot.dev"].productName == "NVIDIA H100 80GB HBM3" &&
        device.attributes["gpu.aliquot.dev"].minor == 7"#;
    let said = world.refused("c", &[selecting(both)]);
    assert!(!said.contains("has to be") && said.ends_with("change the selector"), "{said}");
}

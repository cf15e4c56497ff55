//! Devices that may not be given out, and pools that cannot be told from.

use super::*;

#[test]
fn only_devices_with_our_taint_are_given_out() {
    let mut world = World::new();
    world.node("n1", 1, AllocatorMode::HandOver);
    let reason = world.refused("a", &[request("r", "gpu.aliquot.dev", 1)]);
    assert!(reason.contains("1 (n1) are being handed over between"), "{reason}");
    world.node("n2", 1, AllocatorMode::Scheduler);
    world.requests("b", &[request("r", "gpu.aliquot.dev", 1)]);
    let pod = world.pod("b", &["b"]);
    assert_eq!(world.decide(&pod), Decision::LeaveToScheduler { node: "n2".into() });
    world.node("n3", 1, AllocatorMode::Controller);
    assert_eq!(&*world.place(&pod).0.node, "n3");
}

#[test]
fn held_hardware_is_given_only_to_who_tolerates_it() {
    let mut world = World::new();
    world.index.apply_node(&fixtures::node("n1"));
    let gpu = GpuState {
        info: fixtures::h100("n1", 0),
        live: Vec::new(),
        held: vec![Holding::Whole],
        standing: Vec::new(),
        taints: Vec::new(),
    };
    for slice in fixtures::slices_of("n1", &[gpu], AllocatorMode::Controller, 1) {
        world.index.apply_slice(&slice);
    }
    let wanted = request("r", "gpu.aliquot.dev", 1);
    let reason = world.refused("a", std::slice::from_ref(&wanted));
    assert!(reason.contains("only with the untolerated taint gpu.aliquot.dev/held:NoSchedule"), "{reason}");
    let mut tolerant = wanted;
    tolerant["exactly"]["tolerations"] = json!([{"key": "gpu.aliquot.dev/held", "operator": "Exists"}]);
    let placed = world.one("b", &[tolerant]);
    assert_eq!(placed.results()[0].tolerations.as_ref().map(Vec::len), Some(1));
}

#[test]
fn taint_rules_count_like_taints() {
    let mut world = World::with_nodes(&[("n1", 2)]);
    let rule = |device: &str, effect: &str| {
        TaintRule::read(
            "rule",
            &json!({"deviceSelector": {"driver": DRIVER, "device": device}, "taint": {"key": "k", "effect": effect}}),
        )
    };
    world.index.apply_taint_rule("rule", rule("gpu-0", "NoSchedule"));
    assert_eq!(world.one("a", &[request("r", "gpu.aliquot.dev", 1)]).devices(), ["gpu-1"]);
    assert!(world.refused("b", &[request("r", "gpu.aliquot.dev", 1)]).contains("not enough free"));
    world.index.apply_taint_rule("rule", rule("gpu-0", "None"));
    let pod = world.pod("b", &["b"]);
    assert_eq!(world.place(&pod).devices(), ["gpu-0"]);
}

#[test]
fn a_pool_between_two_generations_gives_nothing() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    let next = fixtures::slices("n1", 1, AllocatorMode::Controller, 2);
    world.index.apply_slice(&next[0]);
    let reason = world.refused("a", &[request("r", "gpu.aliquot.dev", 1)]);
    assert!(reason.contains("are publishing their devices anew (pool gpu.aliquot.dev/n1)"), "{reason}");
    world.index.apply_slice(&next[1]);
    let pod = world.pod("a", &["a"]);
    world.place(&pod);
}

#[test]
fn a_pool_that_contradicts_itself_gives_nothing_and_says_why() {
    let mut world = World::new();
    world.index.apply_node(&fixtures::node("n1"));
    let mut slices = fixtures::slices("n1", 1, AllocatorMode::Controller, 1);
    slices[0].spec.shared_counters = Some(Vec::new());
    for slice in &slices {
        world.index.apply_slice(slice);
    }
    let reason = world.refused("a", &[request("r", "gpu.aliquot.dev", 1)]);
    assert!(reason.contains("consumes of counter set gpu-0, which is not published"), "{reason}");
}

#[test]
fn a_gpu_on_which_something_unknown_is_held_is_left_alone() {
    let mut world = World::with_nodes(&[("n1", 2)]);
    // MIG was switched off under a claim: its device is not published any more.
    let allocation = object(json!({
        "devices": {"results": [{"request": "r", "driver": DRIVER, "pool": format!("{DRIVER}/n1"),
                                 "device": "gpu-0-mig-9g99gb-77-0"}]},
    }));
    world.requests("old", &[request("r", "gpu.aliquot.dev", 1)]);
    world.allocate("old", &allocation, &[]);
    assert_eq!(world.one("a", &[request("r", "gpu.aliquot.dev", 1)]).devices(), ["gpu-1"]);
    world.refused("b", &[partition("p", "1g.10gb")]);
}

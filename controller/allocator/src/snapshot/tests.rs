use super::*;
use crate::fixtures::{self, DRIVER, object, request};
use crate::quantity::Quantity;
use aliquot_model::layout::AllocatorMode;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn claim(name: &str, version: u64, devices: &[&str]) -> ResourceClaim {
    let results: Vec<Value> = devices
        .iter()
        .enumerate()
        .map(|(number, device)| {
            let mut result =
                json!({"request": "r", "driver": DRIVER, "pool": format!("{DRIVER}/n1"), "device": device});
            if device.ends_with("share") {
                result["shareID"] = json!(format!("{name}-{number}"));
                result["consumedCapacity"] = json!({"memory": "1Gi", "cores": "10", "slots": "1"});
            }
            result
        })
        .collect();
    let selector = json!({"nodeSelectorTerms": [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]});
    let status = if devices.is_empty() {
        json!({})
    } else {
        json!({"allocation": {"devices": {"results": results}, "nodeSelector": selector}})
    };
    object(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"),
                     "resourceVersion": version.to_string()},
        "spec": fixtures::spec(&[request("r", "gpu.aliquot.dev", 1)]), "status": status,
    }))
}

fn pod(name: &str, version: u64, node: Option<&str>, phase: &str) -> ApiPod {
    let mut pod = fixtures::pod(name, &[name]);
    pod.metadata.uid = Some(format!("uid-{name}"));
    pod.metadata.resource_version = Some(version.to_string());
    pod.spec.as_mut().expect("a spec").node_name = node.map(str::to_owned);
    pod.status = object(json!({"phase": phase}));
    pod
}

#[test]
fn a_late_answer_brings_no_pod_back_and_takes_no_others_place() {
    let mut index = Snapshot::new(DRIVER);
    let answer = pod("p", 2, None, "Pending");
    let key = ObjectKey::new("default", "p");
    index.apply_pod(&pod("p", 1, None, "Pending"));
    index.answer_pod(&answer);
    assert_eq!(index.pod(&key).map(|known| known.version.to_string()).as_deref(), Some("2"));
    index.delete_pod(&key);
    index.answer_pod(&answer);
    assert!(index.pod(&key).is_none());
    let mut next = pod("p", 9, None, "Pending");
    next.metadata.uid = Some("uid-next".to_owned());
    index.apply_pod(&next);
    index.answer_pod(&answer);
    assert_eq!(index.pod(&key).map(|known| &*known.uid), Some("uid-next"));
}

/// Everything that decisions read, in an order of its own.
#[derive(Debug, PartialEq)]
struct Picture {
    free: BTreeMap<String, Quantity>,
    devices: BTreeMap<String, String>,
    blocked: BTreeMap<String, Vec<u32>>,
    nodes: BTreeMap<String, (u64, BTreeMap<String, Quantity>)>,
    conflicts: Vec<String>,
}

fn picture(index: &Snapshot) -> Picture {
    let mut picture = Picture {
        free: BTreeMap::new(),
        devices: BTreeMap::new(),
        blocked: BTreeMap::new(),
        nodes: BTreeMap::new(),
        conflicts: Vec::new(),
    };
    for pool in index.pools() {
        let name = index.name(pool.name).to_owned();
        let Some(layout) = &pool.layout else { continue };
        for set in &layout.sets {
            for (at, (counter, _)) in set.counters.iter().enumerate() {
                let counter = format!("{name}/{}/{}", index.name(set.name), index.name(*counter));
                picture.free.insert(counter, pool.usage.free[set.offset + at]);
            }
        }
        picture.blocked.insert(name.clone(), pool.usage.blocked.keys().copied().collect());
        for (position, used) in &pool.usage.devices {
            let device = &layout.devices[*position as usize];
            let names = index.shape(device).capacities.iter().map(|(name, _)| index.name(*name));
            let consumed: BTreeMap<&str, &Quantity> = names.zip(used.consumed.iter()).collect();
            picture.devices.insert(
                format!("{name}/{}", index.name(device.name)),
                format!("{} {} {consumed:?}", used.exclusive, used.shares),
            );
        }
        for conflict in index.conflicts(pool) {
            let mut claims: Vec<String> = conflict.claims.iter().map(ToString::to_string).collect();
            claims.sort();
            picture.conflicts.push(format!("{name} {} {claims:?}", conflict.gpu));
        }
    }
    picture.conflicts.sort();
    for name in ["n1", "n2"] {
        if let Some(node) = index.node(name) {
            let used = node.used.iter().filter(|(_, amount)| **amount != Quantity::ZERO);
            let used = used.map(|(name, amount)| (name.to_string(), *amount)).collect();
            picture.nodes.insert(name.to_owned(), (node.pods, used));
        }
    }
    picture
}

#[derive(Debug, Clone)]
enum Step {
    Claim(usize, Vec<usize>),
    Unclaim(usize),
    Pod(usize, Option<bool>, bool),
    Unpod(usize),
    Slices(i64, bool),
    Unslice(usize),
    Assume(usize, Vec<usize>),
    Forget(usize),
}

const DEVICES: [&str; 8] = [
    "gpu-0",
    "gpu-1",
    "gpu-0-share",
    "gpu-1-share",
    "gpu-0-mig-1g10gb-19-6",
    "gpu-0-mig-3g40gb-9-4",
    "gpu-1-mig-7g80gb-0-0",
    "gpu-1-mig-9g99gb-99-0",
];

fn step() -> impl Strategy<Value = Step> {
    let devices = || prop::collection::vec(0..DEVICES.len(), 0..3);
    prop_oneof![
        4 => (0usize..4, devices()).prop_map(|(claim, devices)| Step::Claim(claim, devices)),
        1 => (0usize..4).prop_map(Step::Unclaim),
        3 => (0usize..4, prop::option::of(any::<bool>()), any::<bool>()).prop_map(|(p, n, t)| Step::Pod(p, n, t)),
        1 => (0usize..4).prop_map(Step::Unpod),
        2 => (1i64..4, any::<bool>()).prop_map(|(generation, all)| Step::Slices(generation, all)),
        1 => (0usize..3).prop_map(Step::Unslice),
        2 => (0usize..4, devices()).prop_map(|(claim, devices)| Step::Assume(claim, devices)),
        2 => (0usize..4).prop_map(Step::Forget),
    ]
}

proptest! {
    // Each case builds dozens of slices.
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 4))]

    /// However it came to be, the index says what one says that is built from the last state of
    /// each object.
    #[test]
    fn what_was_kept_step_by_step_is_what_is_built_at_once(steps in prop::collection::vec(step(), 1..40)) {
        let mut index = Snapshot::new(DRIVER);
        for name in ["n1", "n2"] {
            index.apply_node(&fixtures::node(name));
        }
        let mut slices: BTreeMap<String, ResourceSlice> = BTreeMap::new();
        let mut claims: BTreeMap<usize, ResourceClaim> = BTreeMap::new();
        let mut pods: BTreeMap<usize, ApiPod> = BTreeMap::new();
        let key = |kind: &str, number: usize| ObjectKey::new("default", &format!("{kind}{number}"));
        for (version, step) in (1u64..).zip(steps) {
            match step {
                Step::Claim(number, devices) => {
                    let devices: Vec<&str> = devices.iter().map(|device| DEVICES[*device]).collect();
                    // An identity is used once: a claim that is made anew is another one.
                    let mut object = claim(&format!("x{number}"), version, &devices);
                    let uid = claims.get(&number).and_then(|known| known.metadata.uid.clone());
                    object.metadata.uid = Some(uid.unwrap_or_else(|| format!("uid-{number}-{version}")));
                    index.apply_claim(&object);
                    claims.insert(number, object);
                }
                Step::Unclaim(number) => {
                    index.delete_claim(&key("x", number), None);
                    claims.remove(&number);
                }
                Step::Pod(number, node, terminal) => {
                    let node = node.map(|first| if first { "n1" } else { "n2" });
                    let phase = if terminal { "Succeeded" } else { "Pending" };
                    let object = pod(&format!("x{number}"), version, node, phase);
                    index.apply_pod(&object);
                    pods.insert(number, object);
                }
                Step::Unpod(number) => {
                    index.delete_pod(&key("x", number));
                    pods.remove(&number);
                }
                Step::Slices(generation, all) => {
                    let new = fixtures::slices("n1", 2, AllocatorMode::Controller, generation);
                    for slice in new.into_iter().take(if all { 3 } else { 2 }) {
                        index.apply_slice(&slice);
                        slices.insert(slice.metadata.name.clone().expect("a name"), slice);
                    }
                }
                Step::Unslice(number) => {
                    if let Some(name) = slices.keys().nth(number).cloned() {
                        index.delete_slice(&name);
                        slices.remove(&name);
                    }
                }
                Step::Assume(number, devices) => {
                    let devices: Vec<&str> = devices.iter().map(|device| DEVICES[*device]).collect();
                    let wanted = claim("any", 0, &devices).status.and_then(|status| status.allocation);
                    if let Some(wanted) = wanted {
                        let allocation = index.read_allocation("any", None, &wanted);
                        index.assume(&key("x", number), allocation);
                    }
                }
                Step::Forget(number) => {
                    if let Some(uid) = index.claim(&key("x", number)).map(|claim| claim.uid.clone()) {
                        index.forget(&key("x", number), &uid);
                    }
                }
            }
        }
        index.forget_all();
        let mut fresh = Snapshot::new(DRIVER);
        for name in ["n1", "n2"] {
            fresh.apply_node(&fixtures::node(name));
        }
        fresh.reset_slices(&slices.values().cloned().collect::<Vec<_>>());
        fresh.reset_pods(&pods.values().cloned().collect::<Vec<_>>());
        fresh.reset_claims(&claims.values().cloned().collect::<Vec<_>>());
        prop_assert_eq!(picture(&index), picture(&fresh));
        // And a reset changes nothing that a list would confirm.
        index.reset_claims(&claims.values().cloned().collect::<Vec<_>>());
        index.reset_slices(&slices.values().cloned().collect::<Vec<_>>());
        index.reset_pods(&pods.values().cloned().collect::<Vec<_>>());
        prop_assert_eq!(picture(&index), picture(&fresh));
    }
}

#[test]
fn equal_nodes_share_one_layout() {
    let mut index = Snapshot::new(DRIVER);
    for name in ["n1", "n2"] {
        for slice in fixtures::slices(name, 8, AllocatorMode::Controller, 7) {
            index.apply_slice(&slice);
        }
    }
    let ids: Vec<u64> =
        index.pools().filter_map(|pool| pool.layout.as_ref()).map(|layout| layout.id).collect();
    assert_eq!(ids.len(), 2);
    assert_eq!(ids[0], ids[1]);
}

/// How often a pool was built: every change of it counts.
fn built(index: &Snapshot, node: &str) -> u64 {
    index.pools_of_node(node).map(|pool| pool.version).sum()
}

#[test]
fn a_pool_is_built_once_for_a_list_and_not_at_all_for_one_that_says_nothing_new() {
    let mut slices = fixtures::slices("n1", 8, AllocatorMode::Controller, 1);
    assert!(slices.len() > 2);
    for (slice, version) in slices.iter_mut().zip(1..) {
        slice.metadata.resource_version = Some(format!("{version}"));
    }
    let mut index = Snapshot::new(DRIVER);
    assert_eq!(index.reset_slices(&slices), Change::Room);
    assert_eq!(built(&index, "n1"), 1);
    assert_eq!(index.reset_slices(&slices), Change::Nothing);
    // Written anew with what was in it before.
    slices[1].metadata.resource_version = Some("100".to_owned());
    assert_eq!(index.apply_slices(&slices), Change::Nothing);
    assert_eq!(built(&index, "n1"), 1);
    let mut next = fixtures::slices("n1", 8, AllocatorMode::Controller, 2);
    for (slice, version) in next.iter_mut().zip(200..) {
        slice.metadata.resource_version = Some(format!("{version}"));
    }
    assert_eq!(index.apply_slices(&next), Change::Room);
    assert_eq!(built(&index, "n1"), 2);
    assert!(index.pools_of_node("n1").all(|pool| pool.state == PoolState::Ready));
    let names: Vec<String> = next.iter().filter_map(|slice| slice.metadata.name.clone()).collect();
    assert_eq!(index.delete_slices(names.iter().map(String::as_str)), Change::Room);
    assert_eq!(index.pools().count(), 0);
}

#[test]
fn slices_of_other_drivers_are_not_ours() {
    let mut index = Snapshot::new(DRIVER);
    let mut slices = fixtures::slices("n1", 1, AllocatorMode::Controller, 1);
    for slice in &mut slices {
        slice.spec.driver = "other.example.com".to_owned();
        index.apply_slice(slice);
    }
    assert_eq!(index.pools().count(), 0);
}

#[test]
fn losers_are_those_that_do_not_fit_beside_their_seniors() {
    let mut index = Snapshot::new(DRIVER);
    index.reset_slices(&fixtures::slices("n1", 1, AllocatorMode::Controller, 1));
    for (name, device) in [
        ("a", "gpu-0-mig-1g10gb-19-0"),
        ("b", "gpu-0-mig-4g40gb-5-0"),
        ("c", "gpu-0-mig-3g40gb-9-4"),
        ("d", "gpu-0-share"),
    ] {
        index.apply_claim(&claim(name, 1, &[device]));
    }
    let pool = index.pools().next().expect("a pool");
    let conflicts = index.conflicts(pool);
    assert_eq!(conflicts.len(), 1);
    assert_eq!(conflicts[0].claims.len(), 4);
    let order: Vec<Uid> = ["a", "b", "c", "d"].iter().map(|name| format!("uid-{name}").into()).collect();
    let losers: Vec<String> = index.losers(pool, &order).iter().map(ToString::to_string).collect();
    assert_eq!(losers, ["uid-b", "uid-d"]);
}

/// As with a stolen token of one node's agent, where the policy is not there.
#[test]
fn a_slice_of_one_node_in_the_pool_of_another_changes_nothing_there() {
    let mut index = Snapshot::new(DRIVER);
    index.reset_slices(&fixtures::slices("n1", 2, AllocatorMode::Controller, 1));
    let mut forged = fixtures::slices("n2", 1, AllocatorMode::Controller, i64::MAX).remove(0);
    forged.spec.pool.name = aliquot_model::names::pool_name(DRIVER, "n1");
    forged.spec.pool.resource_slice_count = 1;
    forged.spec.devices = None;
    index.apply_slice(&forged);
    let states: Vec<_> = index.pools_of_node("n1").map(|pool| pool.state.clone()).collect();
    assert_eq!(states, [PoolState::Ready]);
    assert!(
        index.pools_of_node("n1").all(|pool| pool.layout.as_ref().is_some_and(|l| !l.devices.is_empty()))
    );
}

/// As many as memory took a hundred times of: see `aliquot_api` for what a watch makes of them.
#[test]
fn claims_with_large_configurations_take_little_memory_whatever_driver_they_are_for() {
    /// What serde_json takes for a value: an object of one field has a node of a B-tree.
    fn bytes(value: &Value) -> usize {
        let inner = match value {
            Value::Object(object) if object.is_empty() => 0,
            Value::Object(object) => {
                640 + object.iter().map(|(name, value)| name.len() + bytes(value)).sum::<usize>()
            }
            Value::Array(list) => list.iter().map(bytes).sum(),
            Value::String(text) => text.len(),
            _ => 0,
        };
        32 + inner
    }
    let parameters = json!({"a": vec![json!({"": 0}); 1390]});
    for driver in ["nic.example.com", DRIVER] {
        let config: Vec<Value> =
            (0..32).map(|_| json!({"opaque": {"driver": driver, "parameters": parameters}})).collect();
        let mut index = Snapshot::new(DRIVER);
        let (mut text, mut sent) = (0, 0);
        for number in 0..10 {
            let mut claim = claim(&format!("c{number}"), 1, &[]);
            claim.spec.devices.as_mut().expect("devices").config = object(json!(config));
            text += serde_json::to_string(&claim.spec).expect("JSON").len();
            sent += 32 * bytes(&parameters);
            index.apply_claim(&claim);
        }
        assert!(text > 2_790_000 && sent > 200 << 20, "{text} bytes of text are {sent} in memory");
        let devices = || index.claims().filter_map(|claim| claim.spec.devices.as_ref());
        let configs = || devices().flat_map(|devices| devices.config.iter().flatten());
        let kept: usize = configs()
            .filter_map(|entry| entry.opaque.as_ref())
            .map(|opaque| bytes(&opaque.parameters.0))
            .sum();
        assert!(kept < 20 << 20, "{driver}: {kept} bytes");
        assert_eq!(configs().count(), if driver == DRIVER { 320 } else { 0 });
        for opaque in configs().filter_map(|entry| entry.opaque.as_ref()) {
            let error = aliquot_model::config::decode_strict(&opaque.parameters.0).expect_err("too large");
            assert!(error.to_string().contains("at most 64 values"), "{error}");
        }
    }
}

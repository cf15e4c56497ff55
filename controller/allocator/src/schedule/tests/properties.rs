//! Random small clusters against a checker that shares nothing with the search: it tries every
//! assignment, and judges each from scratch by the rules of the API.

use super::*;
use proptest::prelude::{any, prop, prop_assert, proptest};
use proptest::strategy::Strategy as Generator;
use std::collections::BTreeSet;

const KINDS: [&str; 2] = ["a", "b"];
const ZONES: [&str; 2] = ["x", "y"];

#[derive(Debug, Clone)]
struct GenDevice {
    kind: usize,
    zone: Option<usize>,
    /// Amounts of the two counters of the set of its GPU.
    draws: Option<(u64, u64)>,
    gpu: usize,
    tainted: bool,
    ours: bool,
    /// Capacity and, if shared, the step of requests.
    capacity: Option<u64>,
    shared: bool,
}

#[derive(Debug, Clone)]
struct GenNode {
    totals: [(u64, u64); 2],
    devices: Vec<GenDevice>,
}

#[derive(Debug, Clone)]
struct GenAlternative {
    kind: Option<usize>,
    /// `None` for all.
    count: Option<usize>,
    tolerates: bool,
    capacity: Option<u64>,
}

#[derive(Debug, Clone)]
struct GenRequest {
    alternatives: Vec<GenAlternative>,
    admin: bool,
}

#[derive(Debug, Clone)]
struct GenClaim {
    requests: Vec<GenRequest>,
    /// Match or distinct, over the zone; of the first request only if `first`.
    constraint: Option<(bool, bool)>,
}

const DEFAULT: u64 = 2;
const STEP: u64 = 2;

fn device() -> impl Generator<Value = GenDevice> {
    (
        0..KINDS.len(),
        prop::option::weighted(0.8, 0..ZONES.len()),
        prop::option::weighted(0.7, (0u64..3, 0u64..3)),
        0usize..2,
        prop::bool::weighted(0.15),
        prop::bool::weighted(0.9),
        prop::option::weighted(0.5, 2u64..8),
        prop::bool::weighted(0.35),
    )
        .prop_map(|(kind, zone, draws, gpu, tainted, ours, capacity, shared)| GenDevice {
            kind,
            zone,
            draws,
            gpu,
            tainted,
            ours,
            capacity,
            shared,
        })
}

fn node() -> impl Generator<Value = GenNode> {
    let parts = (
        prop::array::uniform2((1u64..5, 1u64..5)),
        prop::collection::vec(device(), 1..6),
        any::<bool>(),
        0u8..6,
    );
    parts.prop_map(|(mut totals, mut devices, mirrored, difference)| {
        if mirrored {
            // Two GPUs that are equal, so that the search may try one for both, or nearly so.
            totals[1] = totals[0];
            devices.truncate(3);
            for device in &mut devices {
                device.gpu = 0;
                device.draws.get_or_insert((0, 0));
            }
            let mut other = devices.clone();
            other.iter_mut().for_each(|device| device.gpu = 1);
            match difference {
                0 => other[0].kind = 1 - other[0].kind,
                1 => other[0].zone = Some(1 - other[0].zone.unwrap_or_default()),
                2 => other[0].tainted = !other[0].tainted,
                _ => {}
            }
            devices.extend(other);
        }
        GenNode { totals, devices }
    })
}

fn alternative() -> impl Generator<Value = GenAlternative> {
    (
        prop::option::weighted(0.6, 0..KINDS.len()),
        prop::option::weighted(0.85, 1usize..3),
        prop::bool::weighted(0.3),
        prop::option::weighted(0.4, 1u64..6),
    )
        .prop_map(|(kind, count, tolerates, capacity)| GenAlternative {
            kind,
            count,
            tolerates,
            capacity,
        })
}

fn wanted() -> impl Generator<Value = GenRequest> {
    (prop::collection::vec(alternative(), 1..3), prop::bool::weighted(0.1)).prop_map(
        |(alternatives, admin)| {
            let admin = admin && alternatives.len() == 1;
            GenRequest { alternatives, admin }
        },
    )
}

fn claims() -> impl Generator<Value = Vec<GenClaim>> {
    let claim =
        (prop::collection::vec(wanted(), 1..3), prop::option::weighted(0.4, (any::<bool>(), any::<bool>())))
            .prop_map(|(requests, constraint)| GenClaim { requests, constraint });
    prop::collection::vec(claim, 1..3)
}

fn slice_json(name: &str, node: &GenNode) -> Value {
    let sets: Vec<Value> = node
        .totals
        .iter()
        .enumerate()
        .map(|(gpu, (one, two))| {
            json!({"name": format!("gpu-{gpu}"), "counters": {
                "one": {"value": one.to_string()}, "two": {"value": two.to_string()}}})
        })
        .collect();
    let devices: Vec<Value> = node
        .devices
        .iter()
        .enumerate()
        .map(|(position, device)| {
            let mut attributes = json!({"kind": {"string": KINDS[device.kind]}});
            if let Some(zone) = device.zone {
                attributes["zone"] = json!({"string": ZONES[zone]});
            }
            let mut object = json!({"name": format!("dev-{}-{position}", device.gpu), "attributes": attributes});
            if let Some((one, two)) = device.draws {
                object["consumesCounters"] = json!([{"counterSet": format!("gpu-{}", device.gpu), "counters": {
                    "one": {"value": one.to_string()}, "two": {"value": two.to_string()}}}]);
            }
            if let Some(value) = device.capacity {
                let mut capacity = json!({"value": value.to_string()});
                if device.shared {
                    capacity["requestPolicy"] = json!({"default": DEFAULT.to_string(),
                        "validRange": {"min": "0", "step": STEP.to_string()}});
                }
                object["capacity"] = json!({"size": capacity});
            }
            if device.shared {
                object["allowMultipleAllocations"] = json!(true);
            }
            let mut taints = Vec::new();
            if device.ours {
                taints.push(json!({"key": format!("{DRIVER}/controller-allocated"), "effect": "NoSchedule"}));
            }
            if device.tainted {
                taints.push(json!({"key": "sick", "effect": "NoSchedule"}));
            }
            object["taints"] = json!(taints);
            object
        })
        .collect();
    json!({"metadata": {"name": name}, "spec": {
        "driver": DRIVER, "nodeName": name,
        "pool": {"name": format!("{DRIVER}/{name}"), "generation": 1, "resourceSliceCount": 1},
        "sharedCounters": sets, "devices": devices,
    }})
}

fn exact_json(alternative: &GenAlternative, admin: bool) -> Value {
    let mut exact = json!({"deviceClassName": "any"});
    if let Some(kind) = alternative.kind {
        let expression = format!(r#"device.attributes["{DRIVER}"].kind == "{}""#, KINDS[kind]);
        exact["selectors"] = json!([{"cel": {"expression": expression}}]);
    }
    match alternative.count {
        Some(count) => exact["count"] = json!(count),
        None => exact["allocationMode"] = json!("All"),
    }
    if alternative.tolerates {
        exact["tolerations"] = json!([{"key": "sick", "operator": "Exists"}]);
    }
    if let Some(capacity) = alternative.capacity {
        exact["capacity"] = json!({"requests": {"size": capacity.to_string()}});
    }
    if admin {
        exact["adminAccess"] = json!(true);
    }
    exact
}

fn claim_json(claim: &GenClaim) -> Value {
    let requests: Vec<Value> = claim
        .requests
        .iter()
        .enumerate()
        .map(|(position, request)| {
            let name = format!("r{position}");
            match request.alternatives.as_slice() {
                [one] => json!({"name": name, "exactly": exact_json(one, request.admin)}),
                several => {
                    let subs: Vec<Value> = several
                        .iter()
                        .enumerate()
                        .map(|(n, alternative)| {
                            let mut sub = exact_json(alternative, false);
                            sub["name"] = json!(format!("s{n}"));
                            sub
                        })
                        .collect();
                    json!({"name": name, "firstAvailable": subs})
                }
            }
        })
        .collect();
    let mut spec = json!({"devices": {"requests": requests}});
    if let Some((matching, first)) = claim.constraint {
        let kind = if matching { "matchAttribute" } else { "distinctAttribute" };
        let mut constraint = json!({kind: format!("{DRIVER}/zone")});
        if first {
            constraint["requests"] = json!(["r0"]);
        }
        spec["devices"]["constraints"] = json!([constraint]);
    }
    spec
}

/// A hold on a device: what it consumes if it is a share.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Hold {
    device: usize,
    share: Option<u64>,
    admin: bool,
}

/// A device for a request, as the checker sees it.
#[derive(Debug, Clone, Copy)]
struct Chosen {
    claim: usize,
    request: usize,
    alternative: usize,
    device: usize,
}

/// What an alternative would consume of a device; `Err` if the device is not eligible.
fn amount(device: &GenDevice, alternative: &GenAlternative) -> Result<Option<u64>, ()> {
    match (device.capacity, alternative.capacity) {
        (None, Some(_)) => Err(()),
        (None, None) => Ok(device.shared.then_some(0)),
        (Some(total), wanted) => {
            let taken = match (device.shared, wanted) {
                (true, Some(wanted)) => wanted.div_ceil(STEP) * STEP,
                (true, None) => DEFAULT,
                (false, Some(wanted)) => wanted,
                (false, None) => total,
            };
            if taken > total { Err(()) } else { Ok(device.shared.then_some(taken)) }
        }
    }
}

fn matches(device: &GenDevice, alternative: &GenAlternative) -> bool {
    alternative.kind.is_none_or(|kind| kind == device.kind) && amount(device, alternative).is_ok()
}

/// Whether holds can stand beside each other on a node.
fn consistent(node: &GenNode, holds: &[Hold]) -> bool {
    let real: Vec<&Hold> = holds.iter().filter(|hold| !hold.admin).collect();
    let mut used = [(0, 0); 2];
    let devices: BTreeSet<usize> = real.iter().map(|hold| hold.device).collect();
    for position in devices {
        let device = &node.devices[position];
        let of_device: Vec<_> = real.iter().filter(|hold| hold.device == position).collect();
        if device.shared {
            let sum: u64 = of_device.iter().filter_map(|hold| hold.share).sum();
            if device.capacity.is_some_and(|total| sum > total) {
                return false;
            }
        } else if of_device.len() > 1 {
            return false;
        }
        if let Some((one, two)) = device.draws {
            used[device.gpu].0 += one;
            used[device.gpu].1 += two;
        }
    }
    used.iter().zip(&node.totals).all(|(used, total)| used.0 <= total.0 && used.1 <= total.1)
}

/// Whether a complete choice satisfies every rule.
fn valid(node: &GenNode, before: &[Hold], claims: &[GenClaim], chosen: &[Chosen]) -> bool {
    let mut holds = before.to_vec();
    for (number, claim) in claims.iter().enumerate() {
        let mut zones = Vec::new();
        for (place, request) in claim.requests.iter().enumerate() {
            let picks: Vec<&Chosen> =
                chosen.iter().filter(|c| c.claim == number && c.request == place).collect();
            let Some(alternative) = picks.first().and_then(|pick| request.alternatives.get(pick.alternative))
            else {
                return false;
            };
            let devices: BTreeSet<usize> = picks.iter().map(|pick| pick.device).collect();
            let wanted: BTreeSet<usize> = match alternative.count {
                Some(count) if picks.len() != count => return false,
                Some(_) => devices.clone(),
                None => (0..node.devices.len()).filter(|d| matches(&node.devices[*d], alternative)).collect(),
            };
            if devices != wanted || devices.len() != picks.len() {
                return false;
            }
            for pick in picks {
                let device = &node.devices[pick.device];
                if !device.ours || (device.tainted && !alternative.tolerates) || !matches(device, alternative)
                {
                    return false;
                }
                // Not twice in one claim if one of the two is with admin access.
                let of_claim = |c: &&Chosen| c.claim == number && c.device == pick.device;
                let same: Vec<&Chosen> = chosen.iter().filter(of_claim).collect();
                if !device.shared && same.len() > 1 && same.iter().any(|c| claim.requests[c.request].admin) {
                    return false;
                }
                let share = amount(device, alternative).unwrap_or(None);
                holds.push(Hold { device: pick.device, share, admin: request.admin });
                if claim.constraint.is_some_and(|(_, first)| !first || place == 0) {
                    zones.push(device.zone);
                }
            }
        }
        if let Some((matching, _)) = claim.constraint {
            if zones.iter().any(Option::is_none) {
                return false;
            }
            let different: BTreeSet<_> = zones.iter().collect();
            let fine = if matching { different.len() <= 1 } else { different.len() == zones.len() };
            if !fine {
                return false;
            }
        }
    }
    consistent(node, &holds)
}

/// Every choice there is, until one is valid.
fn possible(node: &GenNode, before: &[Hold], claims: &[GenClaim]) -> bool {
    let slots: Vec<(usize, usize)> = claims
        .iter()
        .enumerate()
        .flat_map(|(number, claim)| (0..claim.requests.len()).map(move |request| (number, request)))
        .collect();
    choose_from(node, before, claims, &slots, &mut Vec::new())
}

fn choose_from(
    node: &GenNode,
    before: &[Hold],
    claims: &[GenClaim],
    slots: &[(usize, usize)],
    chosen: &mut Vec<Chosen>,
) -> bool {
    let Some(((claim, request), rest)) = slots.split_first() else {
        return valid(node, before, claims, chosen);
    };
    let alternatives = &claims[*claim].requests[*request].alternatives;
    for (number, alternative) in alternatives.iter().enumerate() {
        let matching: Vec<usize> =
            (0..node.devices.len()).filter(|device| matches(&node.devices[*device], alternative)).collect();
        for subset in 1u32..(1 << matching.len()) {
            let picked = |(place, device): (usize, &usize)| (subset & (1 << place) != 0).then_some(*device);
            let devices: Vec<usize> = matching.iter().enumerate().filter_map(picked).collect();
            if devices.len() != alternative.count.unwrap_or(matching.len()) {
                continue;
            }
            let length = chosen.len();
            chosen.extend(devices.into_iter().map(|device| Chosen {
                claim: *claim,
                request: *request,
                alternative: number,
                device,
            }));
            if choose_from(node, before, claims, rest, chosen) {
                return true;
            }
            chosen.truncate(length);
        }
    }
    false
}

/// What a plan chose, in the checker's words.
fn read(plan: &Plan) -> Vec<Chosen> {
    let mut chosen = Vec::new();
    for (claim, draft) in plan.drafts.iter().enumerate() {
        let results = draft.allocation().devices.clone().expect("devices").results.expect("results");
        for result in results {
            let (request, alternative) = match result.request.split_once('/') {
                Some((request, sub)) => (request.to_owned(), sub[1..].parse().expect("a number")),
                None => (result.request.clone(), 0),
            };
            chosen.push(Chosen {
                claim,
                request: request[1..].parse().expect("a number"),
                alternative,
                device: result.device.rsplit('-').next().expect("a number").parse().expect("a number"),
            });
        }
    }
    chosen
}

proptest! {
    /// Pods come one after the other; each gets devices exactly if some choice of devices on some
    /// node is valid beside what the earlier ones hold, and what it gets is such a choice.
    #[test]
    fn what_is_found_is_valid_and_what_is_not_found_does_not_exist(
        nodes in prop::collection::vec(node(), 1..3),
        pods in prop::collection::vec(claims(), 1..5),
        spread in any::<bool>(),
        twins in any::<bool>(),
    ) {
        let mut nodes = nodes;
        if twins {
            // What is found out about one node is used for those that are equal.
            nodes.extend(nodes.clone());
        }
        let mut world = World::new();
        world.index.apply_class(&fixtures::class("any", "true"));
        for (number, node) in nodes.iter().enumerate() {
            let name = format!("n{number}");
            world.index.apply_node(&fixtures::node(&name));
            world.index.apply_slice(&object(slice_json(&name, node)));
        }
        let strategy = if spread { Strategy::Spread } else { Strategy::BinPack };
        let mut holds: Vec<Vec<Hold>> = vec![Vec::new(); nodes.len()];
        for (number, claims) in pods.iter().enumerate() {
            let names: Vec<String> = (0..claims.len()).map(|c| format!("c{number}-{c}")).collect();
            for (name, claim) in names.iter().zip(claims) {
                world.claim(name, &claim_json(claim));
            }
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let pod = world.pod(&format!("p{number}"), &names);
            let fits = |index: usize| possible(&nodes[index], &holds[index], claims);
            match world.decide_with(&pod, Options { strategy }) {
                Decision::Placed(plan) => {
                    let index: usize = plan.node[1..].parse().expect("a number");
                    let chosen = read(&plan);
                    prop_assert!(
                        valid(&nodes[index], &holds[index], claims, &chosen),
                        "not valid: {chosen:?}"
                    );
                    for pick in &chosen {
                        let request = &claims[pick.claim].requests[pick.request];
                        let device = &nodes[index].devices[pick.device];
                        holds[index].push(Hold {
                            device: pick.device,
                            share: amount(device, &request.alternatives[pick.alternative]).unwrap_or(None),
                            admin: request.admin,
                        });
                    }
                    world.show(&plan, &pod);
                }
                // Devices without our taint are kube-scheduler's, and may do; ours do not.
                Decision::NoFit(_) | Decision::LeaveToScheduler { .. } => {
                    for index in 0..nodes.len() {
                        prop_assert!(!fits(index), "n{index} would have done");
                    }
                }
                other => prop_assert!(false, "unexpected: {other:?}"),
            }
        }
        // Nothing is given out twice, as the index sees it.
        for pool in world.index.pools() {
            prop_assert!(world.index.conflicts(pool).is_empty());
        }
    }
}

/// What the search itself took tells devices apart that were equal before: first fit leads astray
/// here, and the way back leads over the other of two devices that looked the same.
#[test]
fn devices_that_differ_only_by_what_was_just_taken_are_both_tried() {
    let shared = |gpu| GenDevice {
        kind: 0,
        zone: None,
        draws: Some((0, 0)),
        gpu,
        tainted: false,
        ours: true,
        capacity: Some(14),
        shared: true,
    };
    let node = GenNode { totals: [(1, 1); 2], devices: vec![shared(0), shared(1)] };
    let wants = |capacity, count| GenRequest {
        alternatives: vec![GenAlternative {
            kind: None,
            count: Some(count),
            tolerates: false,
            capacity: Some(capacity),
        }],
        admin: false,
    };
    let claim = GenClaim { requests: vec![wants(8, 1), wants(4, 1), wants(6, 2)], constraint: None };
    assert!(possible(&node, &[], std::slice::from_ref(&claim)));
    let mut world = World::new();
    world.index.apply_class(&fixtures::class("any", "true"));
    world.index.apply_node(&fixtures::node("n0"));
    world.index.apply_slice(&object(slice_json("n0", &node)));
    world.claim("c", &claim_json(&claim));
    let pod = world.pod("p", &["c"]);
    assert!(matches!(world.decide(&pod), Decision::Placed(_)));
}

/// The decision for a claim on one node.
fn decided(slices: &[Value], spec: &Value) -> Decision {
    let mut world = World::new();
    world.index.apply_class(&fixtures::class("any", "true"));
    world.index.apply_node(&fixtures::node("n0"));
    for slice in slices {
        world.index.apply_slice(&object(slice.clone()));
    }
    world.claim("c", spec);
    let pod = world.pod("p", &["c"]);
    world.decide(&pod)
}

fn two_pools() -> [Value; 2] {
    let plain = |gpu| GenDevice {
        kind: 0,
        zone: None,
        draws: None,
        gpu,
        tainted: false,
        ours: true,
        capacity: None,
        shared: false,
    };
    let node = GenNode { totals: [(1, 1); 2], devices: vec![plain(0)] };
    let one = slice_json("n0", &node);
    let mut other = one.clone();
    other["metadata"]["name"] = json!("n0-more");
    other["spec"]["pool"]["name"] = json!("more");
    [one, other]
}

#[test]
fn an_alternative_beyond_the_limit_of_results_is_passed_over() {
    let sub = |name, count| json!({"name": name, "deviceClassName": "any", "count": count});
    let claim = |subs| json!({"devices": {"requests": [{"name": "r", "firstAvailable": subs}]}});
    let fits = decided(&two_pools(), &claim(json!([sub("a", 40), sub("b", 1)])));
    assert!(matches!(fits, Decision::Placed(_)), "{fits:?}");
    let wrong = decided(&two_pools(), &claim(json!([sub("a", 40), sub("b", 33)])));
    assert!(matches!(wrong, Decision::Rejected(_)), "{wrong:?}");
}

#[rstest]
#[case::incomplete(|slice: &mut Value| slice["spec"]["pool"]["resourceSliceCount"] = json!(2))]
#[case::invalid(|slice: &mut Value| slice["spec"]["devices"][0]["consumesCounters"] =
    json!([{"counterSet": "nowhere", "counters": {"one": {"value": "1"}}}]))]
fn a_pool_that_cannot_be_given_from_stops_only_all(#[case] spoil: fn(&mut Value)) {
    let mut pools = two_pools();
    spoil(&mut pools[1]);
    let claim = |mode| {
        json!({"devices": {"requests": [{"name": "r", "exactly":
            {"deviceClassName": "any", "allocationMode": mode}}]}})
    };
    let exact = decided(&pools, &claim("ExactCount"));
    assert!(matches!(exact, Decision::Placed(_)), "{exact:?}");
    let all = decided(&pools, &claim("All"));
    assert!(matches!(all, Decision::NoFit(_)), "{all:?}");
}

#[test]
fn a_claim_has_no_device_both_with_admin_access_and_without() {
    let request =
        |name, admin| json!({"name": name, "exactly": {"deviceClassName": "any", "adminAccess": admin}});
    for (first, second) in [(true, false), (false, true)] {
        let spec = json!({"devices": {"requests": [request("a", first), request("b", second)]}});
        let both = decided(&two_pools()[..1], &spec);
        assert!(matches!(both, Decision::NoFit(_)), "{both:?}");
    }
}

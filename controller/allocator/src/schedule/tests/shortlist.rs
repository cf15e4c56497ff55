//! Deciding from the states of GPUs against a look at each node, which a taint rule makes necessary,
//! even one that is about nothing of ours.

use super::*;

fn step(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*seed >> 40).expect("24 bits")
}

/// Requests, and for some that are two a constraint.
fn wanted_spec(seed: &mut u64) -> Value {
    let requests = wanted(seed);
    let mut spec = fixtures::spec(&requests);
    if requests[0]["name"] == "several" {
        let attribute = ["parentUUID", "profile", "type"][step(seed) % 3];
        spec["devices"]["constraints"] = json!([{"matchAttribute": format!("{DRIVER}/{attribute}")}]);
    }
    if requests.len() == 2 && !step(seed).is_multiple_of(3) {
        let attributes = ["resource.kubernetes.io/pcieRoot".to_owned()]
            .into_iter()
            .chain(["parentUUID", "minor", "profile"].map(|name| format!("{DRIVER}/{name}")));
        let attribute = attributes.into_iter().nth(step(seed) % 4).expect("one of four");
        let kind = if step(seed).is_multiple_of(3) { "distinctAttribute" } else { "matchAttribute" };
        spec["devices"]["constraints"] = json!([{"requests": ["a", "b"], kind: attribute}]);
    }
    spec
}

fn wanted(seed: &mut u64) -> Vec<Value> {
    let profiles = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "9g.90gb"];
    let any = |seed: &mut u64, name: &str| partition(name, profiles[step(seed) % profiles.len()]);
    let count = |seed: &mut u64, most: usize| u32::try_from(1 + step(seed) % most).expect("few");
    match step(seed) % 15 {
        12 => vec![request("several", "mig.aliquot.dev", count(seed, 8))],
        13 => vec![
            request("several", "mig.aliquot.dev", count(seed, 3)),
            request("large", "gpu.aliquot.dev", count(seed, 2)),
        ],
        14 => vec![
            request("many", "mig.aliquot.dev", count(seed, 9)),
            request("whole", "gpu.aliquot.dev", count(seed, 2)),
        ],
        0 => vec![request("r", "gpu.aliquot.dev", 1)],
        1 => vec![request("r", "gpu.aliquot.dev", 3)],
        2 => vec![share("r", "30Gi", "20")],
        3 => vec![request("r", "mig.aliquot.dev", 2)],
        4 | 10 | 11 => vec![any(seed, "a"), any(seed, "b")],
        5 => vec![share("a", "50Gi", "20"), any(seed, "b")],
        _ => vec![any(seed, "r")],
    }
}

#[rstest]
#[case::bin_pack(Strategy::BinPack)]
#[case::spread(Strategy::Spread)]
#[case::spread_nodes(Strategy::SpreadNodes)]
#[case::spread_gpus(Strategy::SpreadGpus)]
fn a_shortlist_decides_as_a_look_at_each_node_does(#[case] strategy: Strategy) {
    let elsewhere = TaintRule::read(
        "elsewhere",
        &json!({"deviceSelector": {"driver": "other.example.com"}, "taint": {"key": "k", "effect": "NoSchedule"}}),
    );
    assert!(elsewhere.is_some(), "the rule must be one");
    let options = Options { strategy };
    for first in 0..3 {
        let mut seed = first;
        let mut world = World::with_nodes(&[("n1", 2), ("n2", 1), ("n3", 2), ("n4", 1)]);
        let mut live: Vec<String> = Vec::new();
        for number in 0..60 {
            let name = format!("c{number}");
            let spec = wanted_spec(&mut seed);
            world.claim(&name, &spec);
            let pod = world.pod(&name, &[&name]);
            let short = world.decide_with(&pod, options);
            world.index.apply_taint_rule("elsewhere", elsewhere.clone());
            let full = world.decide_with(&pod, options);
            world.index.delete_taint_rule("elsewhere");
            match (short, full) {
                (Decision::Placed(short), Decision::Placed(full)) => {
                    let facts = |plan: &Plan| strategy.facts(plan.score);
                    let of = |plan: &Plan| (plan.score.alternatives, facts(plan).opened);
                    assert_eq!(of(&short), of(&full), "seed {first}, claim {number}, {spec}");
                    if strategy == Strategy::BinPack {
                        assert_eq!(facts(&short).cost, facts(&full).cost, "seed {first}, claim {number}");
                    }
                    world.show(&short, &pod);
                    live.push(name);
                }
                (Decision::NoFit(short), Decision::NoFit(full)) => {
                    assert_eq!(short.to_string(), full.to_string(), "seed {first}, claim {number}");
                    if !live.is_empty() {
                        let gone = live.swap_remove(step(&mut seed) % live.len());
                        let key = ObjectKey::new("default", &gone);
                        world.index.delete_claim(&key, None);
                        world.index.delete_pod(&key);
                    }
                }
                (short, full) => panic!("seed {first}, claim {number}: {short:?}, but {full:?}"),
            }
        }
    }
}

//! Strategies of two levels, from the cluster's default and from classes.

use super::*;
use crate::schedule::Placing::{self, BinPack, Spread};
use k8s_openapi::api::resource::v1::DeviceClass;

/// On both nodes one GPU is in use by a small partition; n1 has one more, n2 three.
fn world() -> World {
    let mut world = World::with_nodes(&[("n1", 2), ("n2", 4)]);
    for node in ["n1", "n2"] {
        world.requests(node, &[partition("r", "1g.10gb")]);
        let pod = world.pod_with(node, &[node], |pod| {
            pod.spec.as_mut().expect("a spec").node_selector =
                Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
        });
        let devices = world.place(&pod).devices();
        assert!(devices[0].starts_with("gpu-0-"), "{devices:?}");
    }
    world
}

/// What the class of partitions says.
fn class(policies: &[Value]) -> DeviceClass {
    let mut all = fixtures::classes().into_iter();
    let mut class =
        all.find(|class| class.metadata.name.as_deref() == Some("mig.aliquot.dev")).expect("a class");
    let config: Vec<Value> = policies
        .iter()
        .map(|policy| {
            let mut parameters = json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "AllocationPolicy"});
            parameters.as_object_mut().expect("fields").extend(policy.as_object().expect("fields").clone());
            json!({"opaque": {"driver": DRIVER, "parameters": parameters}})
        })
        .collect();
    class.spec.config = Some(object(json!(config)));
    class
}

fn placed(world: &mut World, pod: &Pod, options: Options) -> (String, bool) {
    match world.decide_with(pod, options) {
        Decision::Placed(plan) => {
            let device = plan.devices().join(",");
            (plan.node.to_string(), !device.contains("gpu-0-"))
        }
        other => panic!("{other:?}"),
    }
}

/// The node, and whether an untouched GPU is opened.
#[rstest]
#[case::pack(BinPack, BinPack, "n1", false)]
#[case::spread(Spread, Spread, "n2", true)]
#[case::spread_over_nodes_only(Spread, BinPack, "n2", false)]
#[case::spread_over_gpus_only(BinPack, Spread, "n1", true)]
fn nodes_and_gpus_are_chosen_each_in_its_way(
    #[case] node: Placing,
    #[case] gpu: Placing,
    #[case] expected: &str,
    #[case] opens: bool,
) {
    let expected = (expected.to_owned(), opens);
    let mut world = world();
    world.requests("c", &[partition("r", "1g.10gb")]);
    let pod = world.pod("p", &["c"]);
    let default = Options { strategy: Strategy::of(node, gpu) };
    assert_eq!(placed(&mut world, &pod, default), expected, "as the cluster's default");
    // A class overrules the default, whatever that is, and a later entry an earlier one.
    world.index.apply_class(&class(&[
        json!({"nodeStrategy": if node == BinPack { "Spread" } else { "BinPack" }}),
        json!({"nodeStrategy": format!("{node:?}"), "gpuStrategy": format!("{gpu:?}")}),
    ]));
    for strategy in [Strategy::BinPack, Strategy::Spread, Strategy::SpreadNodes, Strategy::SpreadGpus] {
        assert_eq!(placed(&mut world, &pod, Options { strategy }), expected, "over {strategy:?}");
    }
    // And leaves open what it does not say.
    world.index.apply_class(&class(&[json!({"nodeStrategy": format!("{node:?}")})]));
    let default = Options { strategy: Strategy::of(BinPack, gpu) };
    assert_eq!(placed(&mut world, &pod, default), expected, "with the node's way alone");
}

#[test]
fn what_a_claim_says_of_strategies_changes_nothing() {
    let mut world = world();
    let mut spec = fixtures::spec(&[partition("r", "1g.10gb")]);
    spec["devices"]["config"] = json!([{"opaque": {"driver": DRIVER, "parameters": {
        "apiVersion": "aliquot.dev/v1alpha1", "kind": "AllocationPolicy", "nodeStrategy": "Spread",
        "gpuStrategy": "Spread"}}}]);
    world.claim("c", &spec);
    let pod = world.pod("p", &["c"]);
    assert_eq!(placed(&mut world, &pod, Options::default()), ("n1".to_owned(), false));
}

#[test]
fn what_a_score_says_is_independent_of_the_strategy() {
    use crate::schedule::score::Facts;
    use crate::snapshot::worth::Cost;
    for strategy in [Strategy::BinPack, Strategy::Spread, Strategy::SpreadNodes, Strategy::SpreadGpus] {
        let score = strategy.score(1, 2, Cost { stranded: 3, lost: 4 }, 5);
        let facts = Facts { opened: 2, cost: Cost { stranded: 3, lost: 4 }, left: 5 };
        assert_eq!(Strategy::BinPack.facts(score), facts, "{strategy:?}");
        assert_eq!(Strategy::of(strategy.node(), strategy.gpu()), strategy);
    }
}

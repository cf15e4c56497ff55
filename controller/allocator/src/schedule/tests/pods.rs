//! Where a pod may be, and what it already has.

use super::*;
use aliquot_model::names::POD_GROUP;

fn reservation(world: &World, pod: &Pod, claim: &str) -> Reservation {
    let claim = ObjectKey::new("default", claim);
    Reservation { user: world.index.user_of(pod, &claim), claim }
}

/// A PodGroup of Kubernetes' own API whose pods have claims in common, by their names in the pods.
fn pod_group(world: &mut World, name: &str, claims: &[(&str, &str)]) {
    let claims: Vec<Value> =
        claims.iter().map(|(name, claim)| json!({"name": name, "resourceClaimName": claim})).collect();
    let group = object(json!({
        "apiVersion": "scheduling.k8s.io/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-of-{name}")},
        "spec": {"resourceClaims": claims, "schedulingPolicy": {"gang": {"minCount": 2}}},
    }));
    world.index.apply_pod_group("scheduling.k8s.io", &group);
}

fn in_group(world: &mut World, name: &str, claims: &[&str], group: &str) -> Pod {
    world.pod_with(name, claims, |pod| {
        pod.metadata.annotations = Some([(POD_GROUP.to_owned(), group.to_owned())].into());
    })
}

#[test]
fn a_pod_whose_claims_take_too_long_to_read_runs_out_of_time() {
    let mut world = World::with_nodes(&[("n1", 2)]);
    let names: Vec<String> = (0..100).map(|n| format!("c{n}")).collect();
    for name in &names {
        world.requests(name, &[request("r", "gpu.aliquot.dev", 1)]);
    }
    let claims: Vec<&str> = names.iter().map(String::as_str).collect();
    let pod = world.pod_with("p", &claims, |_| {});
    let mut asked = 0;
    let mut expired = || {
        asked += 1;
        asked > 3
    };
    let World { index, matcher, .. } = &mut world;
    let decision = decide(index, matcher, &pod, &LeftOut::new(), Options::default(), &mut expired);
    let Decision::OutOfTime(reason) = decision else { panic!("{decision:?}") };
    assert_eq!(reason.to_string(), "not even all that its claims ask for was read");
    assert!(asked <= 5, "it went on for {asked} claims");
}

#[test]
fn a_claim_of_a_pod_group_is_reserved_for_the_group_and_so_for_each_of_its_pods() {
    let mut world = World::with_nodes(&[("n1", 2), ("n2", 2)]);
    let first = in_group(&mut world, "first", &["shared", "own"], "group");
    pod_group(&mut world, "group", &[(&*first.claims[0].name, "shared"), (&*first.claims[0].name, "other")]);
    world.requests("shared", &[request("r", "gpu.aliquot.dev", 1)]);
    world.requests("own", &[request("r", "gpu.aliquot.dev", 1)]);
    let Decision::Placed(plan) = world.decide(&first) else { panic!("fits") };
    let users: Vec<_> = plan.drafts.iter().map(|draft| draft.user.clone()).collect();
    assert_eq!(
        (users[0].resource.as_str(), users[0].name.as_str(), users[0].uid.as_str()),
        ("podgroups", "group", "uid-of-group")
    );
    assert_eq!(users[0].api_group.as_deref(), Some("scheduling.k8s.io"));
    assert_eq!((users[1].resource.as_str(), users[1].uid.as_str()), ("pods", "uid-first"));
    world.show(&plan, &first);
    // Who is in the group needs no reservation of its own; who only names the claim does.
    let second = in_group(&mut world, "second", &["shared"], "group");
    assert_eq!(world.decide(&second), Decision::Settled { reserve: vec![] });
    for (name, group) in [("stranger", "another"), ("alone", "")] {
        let other = in_group(&mut world, name, &["shared"], group);
        let Decision::Settled { reserve } = world.decide(&other) else { panic!("is settled") };
        assert_eq!((reserve[0].user.resource.as_str(), &*reserve[0].user.name), ("pods", name));
    }
    // Under another name in the pod it is the pod's own, as kube-scheduler has it.
    let renamed = world.pod_with("renamed", &["shared"], |pod| {
        pod.metadata.annotations = Some([(POD_GROUP.to_owned(), "group".to_owned())].into());
        pod.spec.as_mut().expect("a spec").resource_claims.as_mut().expect("claims")[0].name =
            "mine".to_owned();
    });
    assert_eq!(world.index.user_of(&renamed, &ObjectKey::new("default", "shared")).resource, "pods");
}

#[test]
fn a_claim_of_a_pod_group_is_taken_back_only_while_no_other_pod_of_it_has_begun() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    let first = in_group(&mut world, "first", &["shared"], "group");
    pod_group(&mut world, "group", &[(&*first.claims[0].name, "shared")]);
    world.requests("shared", &[request("r", "gpu.aliquot.dev", 1)]);
    let Decision::Placed(plan) = world.decide(&first) else { panic!("fits") };
    world.show(&plan, &first);
    let key = ObjectKey::new("default", "shared");
    let users = |world: &World| world.index.sole_users(world.index.claim(&key).expect("a claim"), &first);
    assert_eq!(users(&world), Some(vec![first.uid.clone(), "uid-of-group".into()]));
    in_group(&mut world, "waits", &["shared"], "group");
    assert!(users(&world).is_some(), "our gate is on it");
    world.pod_with("runs", &["shared"], |pod| pod.spec.as_mut().expect("a spec").scheduling_gates = None);
    assert_eq!(users(&world), None);
}

#[test]
fn what_a_gang_has_in_common_is_decided_once_and_the_rest_beside_it() {
    let mut world = World::with_nodes(&[("n1", 2), ("n2", 3)]);
    let first = in_group(&mut world, "first", &["shared", "a"], "group");
    pod_group(&mut world, "group", &[(&*first.claims[0].name, "shared")]);
    for claim in ["shared", "a", "b", "c"] {
        world.requests(claim, &[request("r", "gpu.aliquot.dev", 1)]);
    }
    let Decision::Placed(plan) = world.decide(&first) else { panic!("fits") };
    let shared = &plan.drafts[0];
    let assumed = world.index.read_allocation(&shared.uid, None, shared.allocation());
    world.index.assume(&shared.claim, assumed);
    let second = in_group(&mut world, "second", &["shared", "b"], "group");
    let Decision::Waiting(Wait::InFlight { .. }) = world.decide(&second) else { panic!("is being written") };
    let situation = Situation { together: [shared.uid.clone()].into(), ..Situation::default() };
    let mut expired = || false;
    let decision =
        decide_in(&world.index, &mut world.matcher, &second, &situation, Options::default(), &mut expired);
    let Decision::Placed(beside) = decision else { panic!("fits beside: {decision:?}") };
    assert_eq!((&beside.node, beside.drafts.len(), beside.reserve.len()), (&plan.node, 1, 0));
}

#[test]
fn the_second_pod_of_a_claim_is_reserved_and_stays_on_its_node() {
    let mut world = World::with_nodes(&[("n1", 1), ("n2", 1)]);
    let first = world.one("shared", &[request("r", "gpu.aliquot.dev", 1)]);
    let second = world.pod("second", &["shared"]);
    assert_eq!(
        world.decide(&second),
        Decision::Settled { reserve: vec![reservation(&world, &second, "shared")] }
    );
    // With a claim of its own it has to be where the shared one is.
    world.requests("own", &[partition("p", "1g.10gb")]);
    let third = world.pod("third", &["shared", "own"]);
    let Decision::NoFit(reason) = world.decide(&third) else { panic!("must not fit") };
    assert!(reason.to_string().starts_with("0 of 1 nodes"), "{reason} on {}", first.0.node);
}

#[test]
fn what_was_written_in_part_is_completed_on_its_node_or_taken_back() {
    let mut world = World::with_nodes(&[("n1", 2), ("n2", 2)]);
    world.requests("a", &[request("r", "gpu.aliquot.dev", 1)]);
    world.requests("b", &[request("r", "gpu.aliquot.dev", 1)]);
    let pod = world.pod("p", &["a", "b"]);
    let Decision::Placed(plan) = world.decide(&pod) else { panic!("fits") };
    let allocation = plan.drafts[0].finish(Timestamp::from_second(1).expect("a time"), String::new);
    world.allocate("a", &allocation, &[&pod]);
    let Decision::Placed(rest) = world.decide(&pod) else { panic!("fits") };
    assert_eq!((&rest.node, rest.drafts.len()), (&plan.node, 1));
    // Somebody takes the other GPU of that node.
    world.requests("x", &[request("r", "gpu.aliquot.dev", 1)]);
    let other = world.pod_with("x", &["x"], |pod| {
        pod.spec.as_mut().expect("a spec").node_selector =
            Some([("kubernetes.io/hostname".to_owned(), plan.node.to_string())].into());
    });
    world.place(&other);
    let Decision::Undo { claims, .. } = world.decide(&pod) else { panic!("must be taken back") };
    assert_eq!(claims, [ObjectKey::new("default", "a")]);
}

#[test]
fn claims_on_different_nodes_cannot_be_one_pods() {
    let mut world = World::with_nodes(&[("n1", 1), ("n2", 1)]);
    world.one("a", &[request("r", "gpu.aliquot.dev", 1)]);
    world.one("b", &[request("r", "gpu.aliquot.dev", 1)]);
    world.requests("c", &[request("r", "gpu.aliquot.dev", 1)]);
    let pod = world.pod("p", &["a", "b", "c"]);
    let Decision::Rejected(rejection) = world.decide(&pod) else { panic!("impossible") };
    assert!(rejection.to_string().contains("use claims on one node"), "{rejection}");
}

#[rstest]
#[case::cpu(json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "65"}}}]}), "have too little cpu")]
#[case::memory(json!({"containers": [{"name": "c", "resources": {"requests": {"memory": "513Gi"}}}]}), "have too little memory")]
#[case::sum(json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "40"}}}, {"name": "d", "resources": {"requests": {"cpu": "40"}}}]}), "have too little cpu")]
#[case::init(json!({"containers": [], "initContainers": [{"name": "c", "resources": {"requests": {"cpu": "65"}}}]}), "have too little cpu")]
#[case::sidecar_and_init(json!({"containers": [], "initContainers": [
    {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "40"}}},
    {"name": "c", "resources": {"requests": {"cpu": "40"}}}]}), "have too little cpu")]
#[case::overhead(json!({"containers": [], "overhead": {"cpu": "65"}}), "have too little cpu")]
#[case::unknown_resource(json!({"containers": [{"name": "c", "resources": {"requests": {"example.com/x": "1"}}}]}), "have too little example.com/x")]
#[case::selector(json!({"containers": [], "nodeSelector": {"zone": "a"}}), "do not match the pod's node selector")]
#[case::affinity(json!({"containers": [], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
    "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]}}}}), "do not match the pod's node selector")]
fn a_node_that_the_pod_cannot_be_on_is_not_used(#[case] spec: Value, #[case] expected: &str) {
    let mut world = World::with_nodes(&[("n1", 1)]);
    world.requests("c", &[request("r", "gpu.aliquot.dev", 1)]);
    let pod = world.pod_with("p", &["c"], |pod| {
        let claims = pod.spec.as_ref().and_then(|spec| spec.resource_claims.clone());
        pod.spec = object(spec);
        pod.spec.as_mut().expect("a spec").resource_claims = claims;
    });
    let Decision::NoFit(reason) = world.decide(&pod) else { panic!("must not fit") };
    assert!(reason.to_string().contains(expected), "{reason}");
}

#[test]
fn tainted_and_cordoned_nodes_are_for_those_who_tolerate_it() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    let mut node = fixtures::node("n1");
    node.spec = object(
        json!({"unschedulable": true, "taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}),
    );
    world.index.apply_node(&node);
    world.requests("c", &[request("r", "gpu.aliquot.dev", 1)]);
    let pod = world.pod("p", &["c"]);
    let Decision::NoFit(reason) = world.decide(&pod) else { panic!("cordoned") };
    assert!(reason.to_string().contains("are cordoned"), "{reason}");
    let with = |tolerations: Value| {
        move |pod: &mut ApiPod| pod.spec.as_mut().expect("a spec").tolerations = object(tolerations)
    };
    let cordon = json!({"key": "node.kubernetes.io/unschedulable", "operator": "Exists"});
    let pod = world.pod_with("p", &["c"], with(json!([cordon])));
    let Decision::NoFit(reason) = world.decide(&pod) else { panic!("tainted") };
    assert!(reason.to_string().contains("have the taint gpu=yes:NoSchedule"), "{reason}");
    let pod = world.pod_with("p", &["c"], with(json!([cordon, {"key": "gpu", "operator": "Exists"}])));
    world.place(&pod);
}

#[test]
fn pods_that_are_on_their_way_count_on_their_node() {
    let mut world = World::with_nodes(&[("n1", 8)]);
    let greedy = |pod: &mut ApiPod| {
        pod.spec.as_mut().expect("a spec").containers[0].resources =
            object(json!({"requests": {"cpu": "40"}}));
    };
    for (name, fits) in [("a", true), ("b", false)] {
        world.requests(name, &[request("r", "gpu.aliquot.dev", 1)]);
        let pod = world.pod_with(name, &[name], greedy);
        if fits {
            world.place(&pod);
        } else {
            assert!(matches!(world.decide(&pod), Decision::NoFit(_)));
        }
    }
}

#[test]
fn the_nominated_node_comes_first() {
    let mut world = World::with_nodes(&[("n1", 1), ("n2", 2)]);
    world.requests("c", &[partition("p", "1g.10gb")]);
    let pod = world.pod_with("p", &["c"], |pod| {
        pod.status = object(json!({"nominatedNodeName": "n2"}));
    });
    assert_eq!(&*world.place(&pod).0.node, "n2");
}

#[test]
fn a_bound_pod_gets_its_devices_on_its_node_only() {
    let mut world = World::with_nodes(&[("n1", 1), ("n2", 1)]);
    world.requests("c", &[request("r", "gpu.aliquot.dev", 1)]);
    let pod = world.pod_with("p", &["c"], |pod| {
        let spec = pod.spec.as_mut().expect("a spec");
        spec.node_name = Some("n2".to_owned());
        spec.scheduling_gates = None;
    });
    assert_eq!(&*world.place(&pod).0.node, "n2");
}

#[test]
fn nodes_that_were_given_back_are_left_out() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    world.requests("c", &[request("r", "gpu.aliquot.dev", 1)]);
    let pod = world.pod("p", &["c"]);
    let left_out = LeftOut::from([(Arc::from("n1"), "2 times".to_owned())]);
    let decision =
        decide(&world.index, &mut world.matcher, &pod, &left_out, Options::default(), &mut || false);
    let Decision::NoFit(reason) = decision else { panic!("left out") };
    assert!(reason.to_string().contains("were given back by kube-scheduler (2 times)"), "{reason}");
}

//! What kube-scheduler checks of a pod besides the node itself: ports, the pods around, volumes. Each
//! case says on which of four nodes a pod can be: n1 and n2 are in zone a, n3 and n4 in zone b.

use super::*;
use k8s_openapi::api::core::v1::Node;

const NODES: [(&str, &str); 4] = [("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "b")];

fn world() -> World {
    let mut world = World::with_nodes(&NODES.map(|(name, _)| (name, 1)));
    for (name, zone) in NODES {
        let mut node = fixtures::node(name);
        node.metadata.labels.get_or_insert_default().insert("zone".to_owned(), zone.to_owned());
        world.index.apply_node(&node);
    }
    world
}

/// Another pod, without claims: `{name, node, namespace?, labels?, spec?}`.
fn add(world: &mut World, other: &Value) {
    let mut spec = json!({"nodeName": other["node"], "containers": [{"name": "main"}]});
    merge(&mut spec, &other["spec"]);
    let pod: ApiPod = object(json!({
        "metadata": {
            "name": other["name"], "namespace": other["namespace"].as_str().unwrap_or("default"),
            "uid": format!("uid-{}", other["name"]), "resourceVersion": world.stamp(),
            "labels": other["labels"], "deletionTimestamp": other["deletionTimestamp"],
        },
        "spec": spec,
    }));
    world.index.apply_pod(&pod);
}

fn merge(into: &mut Value, from: &Value) {
    for (key, value) in from.as_object().into_iter().flatten() {
        into[key] = value.clone();
    }
}

/// A pod with one GPU, labels `app: me`, and more in its spec.
fn pod(world: &mut World, spec: &Value) -> Pod {
    world.requests("mine", &[request("r", "gpu.aliquot.dev", 1)]);
    world.pod_with("mine", &["mine"], |pod| {
        let mut all = serde_json::to_value(&pod.spec).expect("a spec");
        merge(&mut all, spec);
        pod.spec = Some(object(all));
        pod.metadata.labels =
            Some([("app".to_owned(), "me".to_owned()), ("v".to_owned(), "2".to_owned())].into());
    })
}

/// The nodes that a pod can be on, each looked at by itself.
fn nodes_for(world: &mut World, pod: &Pod) -> String {
    let mut fitting = Vec::new();
    for (name, _) in NODES {
        let situation = Situation { only: Some(name.into()), ..Situation::default() };
        let options = Options::default();
        match decide_in(&world.index, &mut world.matcher, pod, &situation, options, &mut || false) {
            Decision::Placed(_) => fitting.push(name),
            Decision::NoFit(_) => {}
            other => panic!("{name}: {other:?}"),
        }
    }
    // All at once says the same.
    match world.decide(pod) {
        Decision::Placed(plan) => assert!(fitting.contains(&&*plan.node), "{plan:?}, but {fitting:?}"),
        Decision::NoFit(_) => assert!(fitting.is_empty(), "{fitting:?}"),
        other => panic!("{other:?}"),
    }
    fitting.join(" ")
}

fn ports(port: i32, more: Value) -> Value {
    let mut port = json!({"containerPort": 80, "hostPort": port});
    merge(&mut port, &more);
    json!({"containers": [{"name": "main", "ports": [port]}]})
}

#[rstest]
#[case::other_port(ports(81, json!({})), ports(80, json!({})), "n1 n2 n3 n4")]
#[case::same_port(ports(80, json!({})), ports(80, json!({})), "n2 n3 n4")]
#[case::other_protocol(ports(80, json!({"protocol": "UDP"})), ports(80, json!({})), "n1 n2 n3 n4")]
#[case::other_address(ports(80, json!({"hostIP": "10.0.0.1"})), ports(80, json!({"hostIP": "10.0.0.2"})), "n1 n2 n3 n4")]
#[case::any_address(ports(80, json!({"hostIP": "10.0.0.1"})), ports(80, json!({})), "n2 n3 n4")]
#[case::sidecar(ports(80, json!({})),
    json!({"initContainers": [{"name": "s", "restartPolicy": "Always", "ports": [{"containerPort": 1, "hostPort": 80}]}]}),
    "n2 n3 n4")]
#[case::initialisation(ports(80, json!({})),
    json!({"initContainers": [{"name": "s", "ports": [{"containerPort": 1, "hostPort": 80}]}]}), "n1 n2 n3 n4")]
fn a_port_of_a_node_is_had_once(#[case] theirs: Value, #[case] mine: Value, #[case] expected: &str) {
    let mut world = world();
    add(&mut world, &json!({"name": "other", "node": "n1", "spec": theirs}));
    let pod = pod(&mut world, &mine);
    assert_eq!(nodes_for(&mut world, &pod), expected);
}

#[test]
fn a_port_is_free_again_when_its_pod_has_gone_and_not_before_the_last() {
    let mut world = world();
    for name in ["one", "two"] {
        add(&mut world, &json!({"name": name, "node": "n1", "spec": ports(80, json!({}))}));
    }
    let pod = pod(&mut world, &ports(80, json!({})));
    assert_eq!(nodes_for(&mut world, &pod), "n2 n3 n4");
    world.index.delete_pod(&ObjectKey::new("default", "one"));
    assert_eq!(nodes_for(&mut world, &pod), "n2 n3 n4");
    world.index.delete_pod(&ObjectKey::new("default", "two"));
    assert_eq!(nodes_for(&mut world, &pod), "n1 n2 n3 n4");
}

#[test]
fn a_pod_is_not_in_the_way_of_its_own_ports() {
    let mut world = world();
    world.requests("first", &[request("r", "gpu.aliquot.dev", 1)]);
    let one = pod(&mut world, &ports(80, json!({})));
    world.place(&one);
    // The pod counts on n1 now; another claim of it is decided on the same node.
    let again = world.pod_with("mine", &["mine", "first"], |pod| {
        let mut all = serde_json::to_value(&pod.spec).expect("a spec");
        merge(&mut all, &ports(80, json!({})));
        pod.spec = Some(object(all));
    });
    match world.decide(&again) {
        Decision::Undo { reason, .. } => assert!(!reason.to_string().contains("port"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

fn term(key: &str, more: Value) -> Value {
    let mut term = json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": "them"}}});
    merge(&mut term, &more);
    term
}

fn affinity(kind: &str, terms: &[Value]) -> Value {
    json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": terms}}})
}

fn near(terms: &[Value]) -> Value {
    affinity("podAffinity", terms)
}

fn far(terms: &[Value]) -> Value {
    affinity("podAntiAffinity", terms)
}

/// A pod on n1 that terms are about.
fn them() -> Value {
    json!({"name": "them", "node": "n1", "labels": {"app": "them"}})
}

fn them_elsewhere() -> Value {
    json!({"name": "them", "node": "n1", "namespace": "team", "labels": {"app": "them"}})
}

#[rstest]
#[case::near_on_a_node(near(&[term("kubernetes.io/hostname", json!({}))]), them(), "n1")]
#[case::near_in_a_zone(near(&[term("zone", json!({}))]), them(), "n1 n2")]
#[case::near_nobody(near(&[term("zone", json!({}))]), json!({"name": "x", "node": "n1"}), "")]
#[case::near_somebody_of_another_namespace(near(&[term("zone", json!({}))]), them_elsewhere(), "")]
#[case::near_in_a_named_namespace(near(&[term("zone", json!({"namespaces": ["team"]}))]), them_elsewhere(), "n1 n2")]
#[case::near_in_a_selected_namespace(
    near(&[term("zone", json!({"namespaceSelector": {"matchLabels": {"kind": "team"}}}))]), them_elsewhere(), "n1 n2")]
#[case::near_in_any_namespace(near(&[term("zone", json!({"namespaceSelector": {}}))]), them_elsewhere(), "n1 n2")]
#[case::near_in_no_selected_namespace(
    near(&[term("zone", json!({"namespaceSelector": {"matchLabels": {"kind": "x"}}}))]), them_elsewhere(), "")]
#[case::near_without_the_label(near(&[term("rack", json!({}))]), them(), "")]
#[case::the_first_of_a_group(
    near(&[term("zone", json!({"labelSelector": {"matchLabels": {"app": "me"}}}))]), them(), "n1 n2 n3 n4")]
#[case::the_first_needs_the_label_too(
    near(&[term("rack", json!({"labelSelector": {"matchLabels": {"app": "me"}}}))]), them(), "")]
#[case::all_terms_about_one_pod(
    near(&[term("zone", json!({})), term("zone", json!({"labelSelector": {"matchLabels": {"app": "x"}}}))]), them(), "")]
#[case::far_from_a_node(far(&[term("kubernetes.io/hostname", json!({}))]), them(), "n2 n3 n4")]
#[case::far_from_a_zone(far(&[term("zone", json!({}))]), them(), "n3 n4")]
#[case::far_from_another_namespace(far(&[term("zone", json!({}))]), them_elsewhere(), "n1 n2 n3 n4")]
#[case::far_without_the_label(far(&[term("rack", json!({}))]), them(), "n1 n2 n3 n4")]
#[case::kept_away(json!({}), json!({"name": "them", "node": "n1",
    "spec": far(&[term("zone", json!({"labelSelector": {"matchLabels": {"app": "me"}}}))])}), "n3 n4")]
#[case::kept_away_from_another_namespace(json!({}), json!({"name": "them", "node": "n1", "namespace": "team",
    "spec": far(&[term("zone", json!({"labelSelector": {"matchLabels": {"app": "me"}}, "namespaces": ["default"]}))])}),
    "n3 n4")]
#[case::others_are_kept_away(json!({}), json!({"name": "them", "node": "n1", "namespace": "team",
    "spec": far(&[term("zone", json!({"labelSelector": {"matchLabels": {"app": "me"}}}))])}), "n1 n2 n3 n4")]
#[case::only_preferred(json!({"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
    {"weight": 1, "podAffinityTerm": term("zone", json!({}))}]}}}), json!({"name": "x", "node": "n1"}), "n1 n2 n3 n4")]
fn pods_are_near_and_far_as_kube_scheduler_wants_it(
    #[case] mine: Value,
    #[case] other: Value,
    #[case] expected: &str,
) {
    let mut world = world();
    let team = json!({"metadata": {"name": "team", "labels": {"kind": "team"}}});
    world.index.apply_namespace(&object(team));
    add(&mut world, &other);
    let pod = pod(&mut world, &mine);
    assert_eq!(nodes_for(&mut world, &pod), expected);
}

#[test]
fn pods_that_are_on_their_way_are_company_too() {
    let mut world = world();
    world.requests("first", &[request("r", "gpu.aliquot.dev", 1)]);
    let first = world.pod_with("first", &["first"], |pod| {
        pod.metadata.labels = Some([("app".to_owned(), "them".to_owned())].into());
        pod.spec.as_mut().expect("a spec").node_selector = Some([("zone".to_owned(), "b".to_owned())].into());
    });
    let pod = pod(&mut world, &near(&[term("zone", json!({}))]));
    assert_eq!(nodes_for(&mut world, &pod), "");
    world.place(&first);
    // One GPU of the two is in use.
    assert_eq!(nodes_for(&mut world, &pod), "n4");
}

#[test]
fn who_leaves_for_a_pod_does_not_keep_it_away() {
    let mut world = world();
    add(&mut world, &them());
    let pod = pod(&mut world, &far(&[term("zone", json!({}))]));
    let them = world.index.pod(&ObjectKey::new("default", "them")).expect("there").clone();
    let mut stage = Overlay::new(&world.index, "n1");
    stage.leave(&world.index, "n1", &them);
    let situation = Situation {
        only: Some("n2".into()),
        stages: [("n1".into(), stage)].into_iter().collect(),
        ..Situation::default()
    };
    let options = Options::default();
    let decision = decide_in(&world.index, &mut world.matcher, &pod, &situation, options, &mut || false);
    assert!(matches!(decision, Decision::Placed(_)), "{decision:?}");
}

fn spread(skew: i32, more: Value) -> Value {
    let mut constraint = json!({
        "maxSkew": skew, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "me"}},
    });
    merge(&mut constraint, &more);
    json!({"topologySpreadConstraints": [constraint]})
}

fn with(mut spec: Value, more: Value) -> Value {
    merge(&mut spec, &more);
    spec
}

/// One pod of the same labels on n1, two of others there.
#[rstest]
#[case::one_more_in_the_other_zone(spread(1, json!({})), "n3 n4")]
#[case::a_larger_skew(spread(2, json!({})), "n1 n2 n3 n4")]
#[case::by_node(spread(1, json!({"topologyKey": "kubernetes.io/hostname"})), "n2 n3 n4")]
#[case::only_wished(spread(1, json!({"whenUnsatisfiable": "ScheduleAnyway"})), "n1 n2 n3 n4")]
#[case::no_such_label(spread(1, json!({"topologyKey": "rack"})), "")]
#[case::others_do_not_count(spread(1, json!({"labelSelector": {"matchLabels": {"app": "x"}}})), "n1 n2 n3 n4")]
#[case::an_empty_selector_counts_nobody(spread(1, json!({"labelSelector": {}})), "n1 n2 n3 n4")]
#[case::another_version(spread(1, json!({"matchLabelKeys": ["v"]})), "n1 n2 n3 n4")]
#[case::a_key_that_the_pod_lacks(spread(1, json!({"matchLabelKeys": ["x"]})), "n3 n4")]
#[case::enough_places(spread(1, json!({"minDomains": 2})), "n3 n4")]
#[case::too_few_places(with(spread(1, json!({"minDomains": 3})), json!({})), "n3 n4")]
#[case::places_that_it_cannot_be_in_do_not_count(
    with(spread(1, json!({})), json!({"nodeSelector": {"zone": "a"}})), "n1 n2")]
#[case::unless_they_shall(
    with(spread(1, json!({"nodeAffinityPolicy": "Ignore"})), json!({"nodeSelector": {"zone": "a"}})), "")]
#[case::and_with_too_few_the_fewest_is_zero(
    with(spread(1, json!({"minDomains": 2})), json!({"nodeSelector": {"zone": "a"}})), "")]
fn pods_are_spread_as_kube_scheduler_wants_it(#[case] mine: Value, #[case] expected: &str) {
    let mut world = world();
    add(&mut world, &json!({"name": "same", "node": "n1", "labels": {"app": "me", "v": "1"}}));
    add(&mut world, &json!({"name": "x", "node": "n1", "labels": {"app": "x"}}));
    add(&mut world, &json!({"name": "far", "node": "n3", "labels": {"app": "x"}}));
    add(&mut world, &json!({"name": "foreign", "node": "n3", "namespace": "team", "labels": {"app": "me"}}));
    add(
        &mut world,
        &json!({"name": "ends", "node": "n3", "labels": {"app": "me"},
                            "deletionTimestamp": "2026-01-01T00:00:00Z"}),
    );
    let pod = pod(&mut world, &mine);
    assert_eq!(nodes_for(&mut world, &pod), expected);
}

#[rstest]
#[case::ignored("Ignore", "")]
#[case::honored("Honor", "n1 n2")]
fn tainted_places_count_unless_taints_are_honored(#[case] policy: &str, #[case] expected: &str) {
    let mut world = world();
    for name in ["n3", "n4"] {
        let mut node: Node = fixtures::node(name);
        node.metadata.labels.get_or_insert_default().insert("zone".to_owned(), "b".to_owned());
        node.spec.get_or_insert_default().taints =
            Some(vec![object(json!({"key": "k", "effect": "NoSchedule"}))]);
        world.index.apply_node(&node);
    }
    add(&mut world, &json!({"name": "same", "node": "n1", "labels": {"app": "me"}}));
    let pod = pod(&mut world, &spread(1, json!({"nodeTaintsPolicy": policy})));
    assert_eq!(nodes_for(&mut world, &pod), expected);
}

#[test]
fn preferred_affinity_comes_before_packing_and_after_the_order_of_alternatives() {
    let mut world = world();
    // n1 is the fuller one.
    assert_eq!(&*world.one("small", &[partition("r", "1g.10gb")]).0.node, "n1");
    world.requests("mine", &[partition("r", "1g.10gb")]);
    let prefer = |weights: &[(i32, &str)]| {
        let terms: Vec<Value> = weights
            .iter()
            .map(|(weight, zone)| {
                json!({"weight": weight, "preference":
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}})
            })
            .collect();
        json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}})
    };
    for (weights, expected) in [(vec![], "n1"), (vec![(1, "b")], "n3"), (vec![(3, "a"), (2, "b")], "n1")] {
        let pod = world.pod_with("mine", &["mine"], |pod| {
            pod.spec.as_mut().expect("a spec").affinity = Some(object(prefer(&weights)));
        });
        match world.decide(&pod) {
            Decision::Placed(plan) => assert_eq!(&*plan.node, expected, "{weights:?}"),
            other => panic!("{other:?}"),
        }
    }
}

fn volume_claim(more: Value) -> Value {
    let mut spec = json!({
        "storageClassName": "local", "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
    });
    merge(&mut spec, &more["spec"]);
    json!({"metadata": {"name": more["name"].as_str().unwrap_or("data"), "namespace": "default", "uid": "uid-data",
                        "annotations": more["annotations"], "deletionTimestamp": more["deletionTimestamp"],
                        "ownerReferences": more["ownerReferences"]},
           "spec": spec})
}

fn volume(name: &str, node: &str, more: Value) -> Value {
    let mut volume = json!({
        "metadata": {"name": name},
        "spec": {
            "storageClassName": "local", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "10Gi"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions":
                [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]}},
        },
        "status": {"phase": "Available"},
    });
    merge(&mut volume["metadata"], &more["metadata"]);
    merge(&mut volume["spec"], &more["spec"]);
    merge(&mut volume["status"], &more["status"]);
    volume
}

fn bound_to(volume: &str) -> Value {
    json!({"spec": {"volumeName": volume}, "annotations": {"pv.kubernetes.io/bind-completed": "yes"}})
}

fn of_class(class: &str) -> Value {
    json!({"spec": {"storageClassName": class}})
}

fn zone_label(zones: &str) -> Value {
    json!({"metadata": {"labels": {"topology.kubernetes.io/zone": zones}}, "spec": {"nodeAffinity": null}})
}

#[rstest]
#[case::its_volume_is_on_a_node(volume_claim(bound_to("v")), vec![volume("v", "n2", json!({}))], "n2")]
#[case::its_volume_is_gone(volume_claim(bound_to("v")), vec![], "")]
#[case::its_volume_is_everywhere(volume_claim(bound_to("v")),
    vec![volume("v", "n2", json!({"spec": {"nodeAffinity": null}}))], "n1 n2 n3 n4")]
#[case::its_volume_is_in_a_zone(volume_claim(bound_to("v")), vec![volume("v", "", zone_label("b"))], "n3 n4")]
#[case::its_volume_is_in_several_zones(volume_claim(bound_to("v")), vec![volume("v", "", zone_label("c__a"))], "n1 n2")]
#[case::the_binding_is_not_complete(volume_claim(json!({"spec": {"volumeName": "v"}})), vec![volume("v", "n2", json!({}))], "")]
#[case::bound_at_once_but_not_yet(volume_claim(of_class("immediate")), vec![], "")]
#[case::being_deleted(volume_claim(json!({"deletionTimestamp": "2026-01-01T00:00:00Z"})), vec![volume("v", "n2", json!({}))], "")]
#[case::a_volume_that_can_be_bound(volume_claim(json!({})), vec![volume("v", "n2", json!({})), volume("w", "n4", json!({}))], "n2 n4")]
#[case::too_small(volume_claim(json!({})), vec![volume("v", "n2", json!({"spec": {"capacity": {"storage": "1Gi"}}}))], "")]
#[case::another_class(volume_claim(json!({})), vec![volume("v", "n2", json!({"spec": {"storageClassName": "x"}}))], "")]
#[case::another_mode(volume_claim(json!({})), vec![volume("v", "n2", json!({"spec": {"accessModes": ["ReadOnlyMany"]}}))], "")]
#[case::a_block_device(volume_claim(json!({})), vec![volume("v", "n2", json!({"spec": {"volumeMode": "Block"}}))], "")]
#[case::bound_to_another(volume_claim(json!({})),
    vec![volume("v", "n2", json!({"spec": {"claimRef": {"namespace": "default", "name": "x"}}}))], "")]
#[case::kept_for_it(volume_claim(json!({})),
    vec![volume("v", "n2", json!({"spec": {"claimRef": {"namespace": "default", "name": "data"}}}))], "n2")]
#[case::not_available(volume_claim(json!({})), vec![volume("v", "n2", json!({"status": {"phase": "Released"}}))], "")]
#[case::not_selected(volume_claim(json!({"spec": {"selector": {"matchLabels": {"a": "b"}}}})), vec![volume("v", "n2", json!({}))], "")]
#[case::made_on_demand(volume_claim(of_class("made")), vec![], "n1 n2 n3 n4")]
#[case::made_in_a_zone(volume_claim(of_class("made-in-b")), vec![], "n3 n4")]
#[case::made_on_the_chosen_node(
    volume_claim(json!({"spec": {"storageClassName": "made"}, "annotations": {"volume.kubernetes.io/selected-node": "n3"}})),
    vec![], "n3")]
#[case::no_such_claim(volume_claim(json!({"name": "other"})), vec![volume("v", "n2", json!({}))], "")]
fn a_pod_is_where_its_volumes_are_or_can_be(
    #[case] claim: Value,
    #[case] volumes: Vec<Value>,
    #[case] expected: &str,
) {
    let mut world = world();
    for (name, zone) in NODES {
        let mut node = fixtures::node(name);
        let labels = node.metadata.labels.get_or_insert_default();
        labels.insert("zone".to_owned(), zone.to_owned());
        labels.insert("topology.kubernetes.io/zone".to_owned(), zone.to_owned());
        world.index.apply_node(&node);
    }
    let class = |name: &str, mode: &str, provisioner: &str, zones: Value| {
        json!({"metadata": {"name": name}, "provisioner": provisioner, "volumeBindingMode": mode,
               "allowedTopologies": zones})
    };
    let (waits, none) = ("WaitForFirstConsumer", "kubernetes.io/no-provisioner");
    let in_b = json!([{"matchLabelExpressions": [{"key": "zone", "values": ["b", "c"]}]}]);
    world.index.reset_storage_classes(&[
        object(class("local", waits, none, Value::Null)),
        object(class("immediate", "Immediate", "example.com", Value::Null)),
        object(class("made", waits, "example.com", Value::Null)),
        object(class("made-in-b", waits, "example.com", in_b)),
    ]);
    world.index.apply_volume_claim(&object(claim));
    for volume in volumes {
        world.index.apply_volume(&object(volume));
    }
    let mounts = json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]});
    let pod = pod(&mut world, &mounts);
    assert_eq!(nodes_for(&mut world, &pod), expected);
}

#[test]
fn two_claims_are_not_bound_to_one_volume() {
    let mut world = world();
    world.index.reset_storage_classes(&[object(json!({"metadata": {"name": "local"},
        "provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer"}))]);
    for (name, size) in [("data", "10Gi"), ("small", "1Gi")] {
        let resources = json!({"resources": {"requests": {"storage": size}}});
        world.index.apply_volume_claim(&object(volume_claim(json!({"name": name, "spec": resources}))));
    }
    let small = json!({"spec": {"capacity": {"storage": "2Gi"}}});
    world.index.reset_volumes(&[
        object(volume("v", "n2", json!({}))),
        object(volume("w", "n3", json!({}))),
        object(volume("x", "n3", small)),
    ]);
    let claims =
        ["data", "small"].map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}));
    let pod = pod(&mut world, &json!({"volumes": claims}));
    assert_eq!(nodes_for(&mut world, &pod), "n3");
}

#[test]
fn an_ephemeral_volume_must_be_the_pods_own() {
    let mut world = world();
    world.index.reset_storage_classes(&[object(json!({"metadata": {"name": "local"},
        "provisioner": "example.com", "volumeBindingMode": "WaitForFirstConsumer"}))]);
    let template = json!({"volumes": [{"name": "v", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]});
    let pod = pod(&mut world, &template);
    assert_eq!(nodes_for(&mut world, &pod), "");
    let owners = |uid: &str| json!([{"apiVersion": "v1", "kind": "Pod", "name": "mine", "uid": uid}]);
    for (uid, expected) in [("uid-other", ""), ("uid-mine", "n1 n2 n3 n4")] {
        let claim = volume_claim(json!({"name": "mine-v", "ownerReferences": owners(uid)}));
        world.index.apply_volume_claim(&object(claim));
        assert_eq!(nodes_for(&mut world, &pod), expected, "{uid}");
    }
}

#[test]
fn reasons_name_what_is_in_the_way() {
    let mut world = world();
    add(&mut world, &them());
    for (spec, words) in [
        (near(&[term("rack", json!({}))]), "lack the label rack"),
        (near(&[term("zone", json!({}))]), "do not match the pod's affinity to other pods"),
        (far(&[term("zone", json!({}))]), "anti-affinity to other pods"),
        (
            json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]}),
            "PersistentVolumeClaim default/data does not exist; create it",
        ),
    ] {
        let mut spec = spec;
        // A reason for the rest.
        spec["nodeSelector"] = json!({"zone": if words.contains("anti") { "a" } else { "b" }});
        let pod = pod(&mut world, &spec);
        match world.decide(&pod) {
            Decision::NoFit(reason) => assert!(reason.to_string().contains(words), "{words}: {reason}"),
            other => panic!("{words}: {other:?}"),
        }
    }
}

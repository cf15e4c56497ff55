//! ResourceSlices.

use aliquot_control_plane::ServerVersion;
use serde_json::{Map, Value, json};

use super::{MERGE, Scenario, delete, get, patch, post};

const S: &str = "/apis/resource.k8s.io/v1/resourceslices";

fn slice(name: &str, spec: Value) -> Value {
    let mut full = json!({
        "driver": "d.example.com", "nodeName": "n",
        "pool": {"name": "d.example.com/n", "generation": 1, "resourceSliceCount": 1},
    });
    full.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    full.as_object_mut().unwrap().retain(|_, v| !v.is_null());
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": full})
}

fn one(device: Value) -> Value {
    json!({"devices": [device]})
}

fn many(n: usize, extra: Value) -> Value {
    let list: Vec<Value> = (0..n)
        .map(|i| {
            let mut d = json!({"name": format!("gpu-{i}")});
            d.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            d
        })
        .collect();
    json!({"devices": list})
}

fn counters(n: usize) -> Value {
    (0..n).map(|i| (format!("c{i}"), json!({"value": "1"}))).collect::<Map<_, _>>().into()
}

fn sets(n: usize, each: usize) -> Value {
    let list: Vec<Value> =
        (0..n).map(|i| json!({"name": format!("set-{i}"), "counters": counters(each)})).collect();
    json!({"sharedCounters": list})
}

fn with(mut a: Value, b: Value) -> Value {
    a.as_object_mut().unwrap().extend(b.as_object().unwrap().clone());
    a
}

fn shared(policy: Value) -> Value {
    one(json!({"name": "s", "allowMultipleAllocations": true,
        "capacity": {"memory": {"value": "80Gi", "requestPolicy": policy}}}))
}

pub(crate) fn all(_version: ServerVersion) -> Vec<Scenario> {
    vec![limits(), life()]
}

fn limits() -> Scenario {
    let taint = || json!({"taints": [{"key": "a/b", "effect": "NoSchedule"}]});
    let consuming =
        || json!({"consumesCounters": [{"counterSet": "set-0", "counters": {"c0": {"value": "1"}}}]});
    let attributes = |n: usize| -> Value {
        (0..n).map(|i| (format!("a{i}"), json!({"int": 1}))).collect::<Map<_, _>>().into()
    };
    let cases: Vec<(&'static str, Value)> = vec![
        ("empty", json!({})),
        ("128 plain", many(128, json!({}))),
        ("129 plain", many(129, json!({}))),
        ("64 tainted", many(64, taint())),
        ("65 tainted", many(65, taint())),
        ("64 consuming", many(64, consuming())),
        ("65 consuming", many(65, consuming())),
        ("counters and devices", with(many(1, consuming()), sets(1, 1))),
        ("counters and plain devices", with(many(1, json!({})), sets(1, 1))),
        ("8 sets", sets(8, 1)),
        ("9 sets", sets(9, 1)),
        ("32 counters", sets(1, 32)),
        ("33 counters", sets(1, 33)),
        ("8 sets of 32", sets(8, 32)),
        ("set without counters", json!({"sharedCounters": [{"name": "a", "counters": {}}]})),
        (
            "set twice",
            json!({"sharedCounters": [{"name": "a", "counters": counters(1)}, {"name": "a", "counters": counters(1)}]}),
        ),
        ("bad set name", json!({"sharedCounters": [{"name": "A", "counters": {"B": {"value": "1"}}}]})),
        ("unknown set", many(1, consuming())),
        (
            "unknown counter",
            with(
                many(
                    1,
                    json!({"consumesCounters": [{"counterSet": "set-0", "counters": {"zz": {"value": "1"}}}]}),
                ),
                sets(1, 1),
            ),
        ),
        (
            "2 sets consumed",
            one(json!({"name": "a", "consumesCounters": [
            {"counterSet": "x", "counters": counters(1)}, {"counterSet": "y", "counters": counters(1)}]})),
        ),
        (
            "3 sets consumed",
            one(json!({"name": "a", "consumesCounters": [
            {"counterSet": "x", "counters": counters(1)}, {"counterSet": "y", "counters": counters(1)},
            {"counterSet": "z", "counters": counters(1)}]})),
        ),
        (
            "set consumed twice",
            one(json!({"name": "a", "consumesCounters": [
            {"counterSet": "x", "counters": counters(1)}, {"counterSet": "x", "counters": counters(1)}]})),
        ),
        (
            "consumes nothing",
            one(json!({"name": "a", "consumesCounters": [{"counterSet": "x", "counters": {}}]})),
        ),
        (
            "32 attributes",
            one(json!({"name": "a", "attributes": attributes(31), "capacity": {"m": {"value": "1"}}})),
        ),
        (
            "33 attributes",
            one(json!({"name": "a", "attributes": attributes(32), "capacity": {"m": {"value": "1"}}})),
        ),
        (
            "attribute kinds",
            one(
                json!({"name": "a", "attributes": {"i": {"int": 1}, "b": {"bool": true}, "s": {"string": "x"},
            "v": {"version": "1.2.3-rc.1+b"}, "x.example.com/q": {"int": 2}}}),
            ),
        ),
        ("attribute without value", one(json!({"name": "a", "attributes": {"i": {}}}))),
        ("attribute with two", one(json!({"name": "a", "attributes": {"i": {"int": 1, "bool": true}}}))),
        ("attribute long", one(json!({"name": "a", "attributes": {"i": {"string": "x".repeat(65)}}}))),
        ("attribute short version", one(json!({"name": "a", "attributes": {"i": {"version": "12.8"}}}))),
        ("attribute zero version", one(json!({"name": "a", "attributes": {"i": {"version": "12.08.1"}}}))),
        (
            "attribute long version",
            one(json!({"name": "a", "attributes": {"i": {"version": format!("1.2.3-{}", "a".repeat(64))}}})),
        ),
        ("attribute bad id", one(json!({"name": "a", "attributes": {"a-b": {"int": 1}}}))),
        (
            "attribute long id",
            one(json!({"name": "a", "attributes": {"a23456789012345678901234567890123": {"int": 1}}})),
        ),
        ("attribute two slashes", one(json!({"name": "a", "attributes": {"a/b/c": {"int": 1}}}))),
        ("attribute no domain", one(json!({"name": "a", "attributes": {"/c": {"int": 1}}}))),
        (
            "quantities",
            one(json!({"name": "a", "capacity": {"a": {"value": "1024Mi"}, "b": {"value": "1500m"},
            "c": {"value": "1000"}, "d": {"value": 7}, "e": {"value": "0.5Gi"}, "f": {"value": "1e3"}, "g": {"value": "1023Ki"}}})),
        ),
        ("device name", one(json!({"name": "GPU"}))),
        ("device twice", json!({"devices": [{"name": "a"}, {"name": "a"}]})),
        (
            "4 taints",
            one(json!({"name": "a", "taints": vec![json!({"key": "a", "effect": "NoExecute"}); 4]})),
        ),
        (
            "5 taints",
            one(json!({"name": "a", "taints": vec![json!({"key": "a", "effect": "NoExecute"}); 5]})),
        ),
        (
            "16 taints",
            one(json!({"name": "a", "taints": vec![json!({"key": "a", "effect": "NoExecute"}); 16]})),
        ),
        (
            "17 taints",
            one(json!({"name": "a", "taints": vec![json!({"key": "a", "effect": "NoExecute"}); 17]})),
        ),
        ("taint none", one(json!({"name": "a", "taints": [{"key": "a", "effect": "None"}]}))),
        (
            "taint bad",
            one(json!({"name": "a", "taints": [{"key": "a b", "value": "x y", "effect": "Maybe"}, {}]})),
        ),
        (
            "taint in own domain",
            one(
                json!({"name": "a", "taints": [{"key": "d.example.com/controller-allocated", "effect": "NoSchedule"}]}),
            ),
        ),
        ("policy range", shared(json!({"default": "80Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}))),
        (
            "policy range zero",
            shared(json!({"default": "0", "validRange": {"min": "0", "max": "100", "step": "1"}})),
        ),
        ("policy default low", shared(json!({"default": "0", "validRange": {"min": "1Mi", "step": "1Mi"}}))),
        (
            "policy default off",
            shared(json!({"default": "1025Ki", "validRange": {"min": "1Mi", "step": "1Mi"}})),
        ),
        ("policy max high", shared(json!({"default": "1Mi", "validRange": {"min": "1Mi", "max": "81Gi"}}))),
        (
            "policy max below min",
            shared(json!({"default": "2Gi", "validRange": {"min": "2Gi", "max": "1Gi"}})),
        ),
        (
            "policy max off step",
            shared(json!({"default": "1Gi", "validRange": {"min": "1Gi", "max": "3000Mi", "step": "1Gi"}})),
        ),
        ("policy step zero", shared(json!({"default": "1Gi", "validRange": {"min": "1Gi", "step": "0"}}))),
        ("policy step big", shared(json!({"default": "1Gi", "validRange": {"min": "1Gi", "step": "80Gi"}}))),
        ("policy no min", shared(json!({"default": "1Gi", "validRange": {"max": "2Gi"}}))),
        ("policy no default", shared(json!({"validRange": {"min": "1Gi"}}))),
        ("policy fraction", shared(json!({"default": "1500m", "validRange": {"min": "1", "step": "500m"}}))),
        ("policy values", shared(json!({"default": "1", "validValues": ["1", "2"]}))),
        ("policy values descend", shared(json!({"default": "1", "validValues": ["2", "1"]}))),
        ("policy values twice", shared(json!({"default": "1", "validValues": ["1", "1"]}))),
        ("policy values above", shared(json!({"default": "1", "validValues": ["1", "81Gi"]}))),
        ("policy default not among", shared(json!({"default": "3", "validValues": ["1", "2"]}))),
        ("policy values no default", shared(json!({"validValues": ["1"]}))),
        ("policy both", shared(json!({"default": "1", "validValues": ["1"], "validRange": {"min": "1"}}))),
        ("policy default only", shared(json!({"default": "5"}))),
        (
            "policy 10 values",
            shared(json!({"default": "1", "validValues": ["1","2","3","4","5","6","7","8","9","10"]})),
        ),
        (
            "policy 11 values",
            shared(json!({"default": "1", "validValues": ["1","2","3","4","5","6","7","8","9","10","11"]})),
        ),
        (
            "policy unshared",
            one(
                json!({"name": "a", "capacity": {"m": {"value": "1Gi", "requestPolicy": {"default": "1Mi"}}}}),
            ),
        ),
        ("no node", json!({"nodeName": null})),
        ("all nodes", json!({"nodeName": null, "allNodes": true})),
        ("all nodes false", json!({"nodeName": null, "allNodes": false})),
        ("two places", json!({"allNodes": true})),
        (
            "selector",
            json!({"nodeName": null, "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}}),
        ),
        (
            "selector of two",
            json!({"nodeName": null, "nodeSelector": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchExpressions": [{"key": "b", "operator": "Exists"}]}]}}),
        ),
        (
            "per device",
            with(
                json!({"nodeName": null, "perDeviceNodeSelection": true}),
                many(1, json!({"nodeName": "n"})),
            ),
        ),
        (
            "per device none",
            with(json!({"nodeName": null, "perDeviceNodeSelection": true}), many(1, json!({}))),
        ),
        ("device with node", many(1, json!({"nodeName": "n"}))),
        ("pool bad", json!({"pool": {"name": "a//B", "generation": -1, "resourceSliceCount": 0}})),
        ("driver bad", json!({"driver": "a_b"})),
        ("driver long", json!({"driver": "a".repeat(64)})),
        (
            "binding",
            one(
                json!({"name": "a", "bindingConditions": ["x"], "bindingFailureConditions": ["y"], "bindsToNode": true}),
            ),
        ),
        ("binding half", one(json!({"name": "a", "bindingConditions": ["x"]}))),
    ];
    let mut steps = Vec::new();
    for (i, (name, spec)) in cases.into_iter().enumerate() {
        steps.push(post(name, S, slice(&format!("limit-{i}"), spec)));
    }
    steps.push(delete(
        "clean",
        "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver%3Dd.example.com",
        Value::Null,
    ));
    Scenario { name: "slice limits", accepted: vec![], steps }
}

fn life() -> Scenario {
    const ONE: &str = "/apis/resource.k8s.io/v1/resourceslices/one";
    Scenario {
        name: "life of a slice",
        accepted: vec![],
        steps: vec![
            post(
                "create",
                S,
                slice(
                    "one",
                    json!({"devices": [{"name": "a", "taints": [{"key": "x", "effect": "NoSchedule"}]}]}),
                ),
            ),
            patch("label", ONE, MERGE, json!({"metadata": {"labels": {"a": "b"}}})),
            patch("devices", ONE, MERGE, json!({"spec": {"devices": [{"name": "b"}]}})),
            patch("generation", ONE, MERGE, json!({"spec": {"pool": {"generation": 2}}})),
            patch("node", ONE, MERGE, json!({"spec": {"nodeName": "m"}})),
            patch("driver", ONE, MERGE, json!({"spec": {"driver": "e.example.com"}})),
            patch("pool", ONE, MERGE, json!({"spec": {"pool": {"name": "other"}}})),
            get("by node", "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3Dn"),
            get(
                "by node and driver",
                "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3Dn,spec.driver%3Dzz",
            ),
            get("by pool", "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.pool.name%3Dzz"),
            get(
                "by other",
                "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.pool.generation%3Dzz",
            ),
            delete("delete", ONE, Value::Null),
        ],
    }
}

//! Pods, their lists under apply, leases, nodes, priorities.

use serde_json::{Value, json};

use super::{APPLY, MERGE, STRATEGIC, Scenario, delete, get, namespace, patch, post, put};

pub(crate) fn pod(name: &str, spec: Value) -> Value {
    let mut full = json!({"containers": [{"name": "c", "image": "i:1"}]});
    full.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": full})
}

pub(crate) fn all() -> Vec<Scenario> {
    vec![apply_lists(), pods(), leases_and_nodes()]
}

fn apply_lists() -> Scenario {
    const P: &str = "/api/v1/namespaces/d-lists/pods/p";
    let gates = |names: &[&str]| {
        let list: Vec<Value> = names.iter().map(|n| json!({"name": n})).collect();
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"schedulingGates": list}})
    };
    let status = |claims: Value| json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "status": {"resourceClaimStatuses": claims}});
    let finalizers = |names: Value| json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "finalizers": names}});
    Scenario {
        name: "apply to lists",
        accepted: vec![],
        steps: vec![
            namespace("d-lists"),
            post(
                "create",
                "/api/v1/namespaces/d-lists/pods",
                pod(
                    "p",
                    json!({
                        "schedulingGates": [{"name": "a/a"}, {"name": "b/b"}],
                        "resourceClaims": [{"name": "x", "resourceClaimName": "c"}, {"name": "y", "resourceClaimTemplateName": "t"}],
                    }),
                ),
            ),
            patch("gate added", "/api/v1/namespaces/d-lists/pods/p?fieldManager=one", APPLY, gates(&["c/c"])),
            patch(
                "gates owned",
                "/api/v1/namespaces/d-lists/pods/p?fieldManager=one",
                APPLY,
                gates(&["a/a"]),
            ),
            patch(
                "gate kept by other",
                "/api/v1/namespaces/d-lists/pods/p?fieldManager=one",
                APPLY,
                gates(&[]),
            ),
            patch(
                "gate deleted",
                P,
                STRATEGIC,
                json!({"spec": {"schedulingGates": [{"name": "a/a", "$patch": "delete"}]}}),
            ),
            patch(
                "gate added by patch",
                P,
                STRATEGIC,
                json!({"spec": {"schedulingGates": [{"name": "z/z"}]}}),
            ),
            patch(
                "status",
                "/api/v1/namespaces/d-lists/pods/p/status?fieldManager=kcm&force=true",
                APPLY,
                status(json!([{"name": "y", "resourceClaimName": "made"}])),
            ),
            patch(
                "status of unknown claim",
                "/api/v1/namespaces/d-lists/pods/p/status?fieldManager=kcm",
                APPLY,
                status(json!([{"name": "zz", "resourceClaimName": "made"}])),
            ),
            patch(
                "finalizer",
                "/api/v1/namespaces/d-lists/pods/p?fieldManager=one",
                APPLY,
                finalizers(json!(["one/x"])),
            ),
            patch(
                "finalizer of two",
                "/api/v1/namespaces/d-lists/pods/p?fieldManager=two",
                APPLY,
                finalizers(json!(["two/x"])),
            ),
            patch(
                "finalizer given up",
                "/api/v1/namespaces/d-lists/pods/p?fieldManager=one",
                APPLY,
                finalizers(json!([])),
            ),
            patch(
                "conditions",
                "/api/v1/namespaces/d-lists/pods/p/status",
                STRATEGIC,
                json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
            ),
            patch(
                "containers by name",
                "/api/v1/namespaces/d-lists/pods/p?fieldManager=img",
                APPLY,
                json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
                "spec": {"containers": [{"name": "c", "image": "i:2"}]}}),
            ),
            patch(
                "containers by force",
                "/api/v1/namespaces/d-lists/pods/p?fieldManager=img&force=true",
                APPLY,
                json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
                "spec": {"containers": [{"name": "c", "image": "i:2"}]}}),
            ),
            get("after all", P),
        ],
    }
}

fn pods() -> Scenario {
    const M: &str = "/api/v1/namespaces/d-pods/pods";
    const P: &str = "/api/v1/namespaces/d-pods/pods/p";
    let bind = |pod: &str, node: &str| json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": {"kind": "Node", "name": node}});
    Scenario {
        name: "pods",
        accepted: vec![],
        steps: vec![
            namespace("d-pods"),
            post(
                "create",
                M,
                pod(
                    "p",
                    json!({"containers": [{"name": "c", "image": "i:1",
                "resources": {"limits": {"cpu": "1000m", "memory": "1024Mi"}}}]}),
                ),
            ),
            post("no containers", M, pod("q", json!({"containers": []}))),
            post(
                "two claim sources",
                M,
                pod(
                    "q",
                    json!({
                "resourceClaims": [{"name": "x", "resourceClaimName": "a", "resourceClaimTemplateName": "b"}]}),
                ),
            ),
            post("no claim source", M, pod("q", json!({"resourceClaims": [{"name": "x"}]}))),
            post(
                "unknown claim used",
                M,
                pod(
                    "q",
                    json!({
                "containers": [{"name": "c", "image": "i", "resources": {"claims": [{"name": "x"}]}}]}),
                ),
            ),
            post(
                "gated with node",
                M,
                pod("q", json!({"schedulingGates": [{"name": "a/b"}], "nodeName": "n"})),
            ),
            post("gate twice", M, pod("q", json!({"schedulingGates": [{"name": "a/b"}, {"name": "a/b"}]}))),
            post("no such priority", M, pod("q", json!({"priorityClassName": "nope"}))),
            post("gated", M, pod("g", json!({"schedulingGates": [{"name": "a/b"}]}))),
            post("bind gated", "/api/v1/namespaces/d-pods/pods/g/binding", bind("g", "n")),
            patch(
                "narrow gated",
                "/api/v1/namespaces/d-pods/pods/g",
                MERGE,
                json!({"spec": {"nodeSelector": {"a": "b"}}}),
            ),
            patch(
                "widen gated",
                "/api/v1/namespaces/d-pods/pods/g",
                MERGE,
                json!({"spec": {"nodeSelector": null}}),
            ),
            patch(
                "ungate",
                "/api/v1/namespaces/d-pods/pods/g",
                MERGE,
                json!({"spec": {"schedulingGates": null}}),
            ),
            patch(
                "narrow ungated",
                "/api/v1/namespaces/d-pods/pods/g",
                MERGE,
                json!({"spec": {"nodeSelector": {"c": "d"}}}),
            ),
            patch("image", P, STRATEGIC, json!({"spec": {"containers": [{"name": "c", "image": "i:2"}]}})),
            patch("node by patch", P, MERGE, json!({"spec": {"nodeName": "n"}})),
            patch("status by front", P, MERGE, json!({"status": {"phase": "Running"}})),
            post(
                "bind wrong uid",
                "/api/v1/namespaces/d-pods/pods/p/binding",
                json!({
                "metadata": {"name": "p", "uid": "11111111-1111-1111-1111-111111111111"}, "target": {"name": "n"}}),
            ),
            post("bind no node", "/api/v1/namespaces/d-pods/pods/p/binding", bind("p", "")),
            post("bind", "/api/v1/namespaces/d-pods/pods/p/binding", bind("p", "n")),
            post("bind again", "/api/v1/namespaces/d-pods/pods/p/binding", bind("p", "m")),
            get("bound", P),
            patch(
                "status",
                "/api/v1/namespaces/d-pods/pods/p/status",
                MERGE,
                json!({"status": {"phase": "Running"}, "spec": {"hostname": "x"}, "metadata": {"labels": {"by": "status"}}}),
            ),
            delete("delete", P, Value::Null),
            delete("delete sooner", P, json!({"gracePeriodSeconds": 5})),
            delete("delete later", P, json!({"gracePeriodSeconds": 50})),
            get("leaving", P),
            delete("delete now", P, json!({"gracePeriodSeconds": 0})),
            get("gone", P),
            delete("delete unbound", "/api/v1/namespaces/d-pods/pods/g", Value::Null),
            post("for eviction", M, pod("e", json!({"nodeName": "n"}))),
            post(
                "evict",
                "/api/v1/namespaces/d-pods/pods/e/eviction",
                json!({
                "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "e"}}),
            ),
            get("evicted", "/api/v1/namespaces/d-pods/pods/e"),
        ],
    }
}

fn leases_and_nodes() -> Scenario {
    const L: &str = "/apis/coordination.k8s.io/v1/namespaces/d-lease/leases/l";
    Scenario {
        name: "leases and nodes",
        // The real server records no owners for a node made in this way.
        accepted: vec![".body.metadata.managedFields: ours"],
        steps: vec![
            namespace("d-lease"),
            put(
                "put new",
                L,
                json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": "l"}, "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15}}),
            ),
            put(
                "put without version",
                L,
                json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": "l"}, "spec": {"holderIdentity": "b"}}),
            ),
            put(
                "put with version",
                L,
                json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": "l", "resourceVersion": "<<put new.metadata.resourceVersion>>"},
                "spec": {"holderIdentity": "b", "leaseDurationSeconds": 15}}),
            ),
            put(
                "put old version",
                L,
                json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": "l", "resourceVersion": "<<put new.metadata.resourceVersion>>"},
                "spec": {"holderIdentity": "c", "leaseDurationSeconds": 15}}),
            ),
            delete("delete", L, Value::Null),
            post(
                "node",
                "/api/v1/nodes",
                json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "d-node"},
                "status": {"capacity": {"cpu": "4000m", "memory": "8192Mi"}}}),
            ),
            patch(
                "node status",
                "/api/v1/nodes/d-node/status",
                STRATEGIC,
                json!({"status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "3"}},
                       "metadata": {"annotations": {"a": "b"}}}),
            ),
            patch(
                "node taint",
                "/api/v1/nodes/d-node",
                STRATEGIC,
                json!({"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}),
            ),
            delete("delete node", "/api/v1/nodes/d-node", Value::Null),
            post(
                "class",
                "/apis/scheduling.k8s.io/v1/priorityclasses",
                json!({
                "metadata": {"name": "d-class"}, "value": 5}),
            ),
            post(
                "classy pod",
                "/api/v1/namespaces/d-lease/pods",
                pod("p", json!({"priorityClassName": "d-class"})),
            ),
            delete("delete class", "/apis/scheduling.k8s.io/v1/priorityclasses/d-class", Value::Null),
        ],
    }
}

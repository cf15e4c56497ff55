//! Claims, templates and classes.

use aliquot_control_plane::ServerVersion;
use serde_json::{Value, json};

use super::pods::pod;
use super::{APPLY, MERGE, Scenario, delete, get, namespace, patch, post, put};

const API: &str = "resource.k8s.io/v1";

fn claim(name: &str, devices: Value) -> Value {
    json!({"apiVersion": API, "kind": "ResourceClaim", "metadata": {"name": name}, "spec": {"devices": devices}})
}

fn exactly(extra: Value) -> Value {
    let mut e = json!({"deviceClassName": "c.example.com"});
    e.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    json!({"requests": [{"name": "gpu", "exactly": e}]})
}

fn result(extra: Value) -> Value {
    let mut r = json!({"request": "gpu", "driver": "d.example.com", "pool": "p/q", "device": "gpu-0"});
    r.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    r
}

fn allocation(results: Value) -> Value {
    json!({
        "devices": {"results": results},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": ["n"]}]}]},
        "allocationTimestamp": "2026-01-01T00:00:00Z",
    })
}

pub(crate) fn all(version: ServerVersion) -> Vec<Scenario> {
    vec![specs(), life(version), allocations(), refused(), classes(), templates()]
}

fn specs() -> Scenario {
    const C: &str = "/apis/resource.k8s.io/v1/namespaces/d-specs/resourceclaims";
    let many = |n: usize| -> Value {
        let requests: Vec<Value> = (0..n)
            .map(|i| json!({"name": format!("r{i}"), "exactly": {"deviceClassName": "c.example.com"}}))
            .collect();
        json!({"requests": requests})
    };
    let configured = |parameters: Value| {
        let mut d = exactly(json!({}));
        d["config"] =
            json!([{"requests": ["gpu"], "opaque": {"driver": "d.example.com", "parameters": parameters}}]);
        d
    };
    let constrained = |constraint: Value| {
        let mut d = exactly(json!({}));
        d["constraints"] = json!([constraint]);
        d
    };
    let alternatives = |n: usize| -> Value {
        let list: Vec<Value> =
            (0..n).map(|i| json!({"name": format!("s{i}"), "deviceClassName": "c.example.com"})).collect();
        json!({"requests": [{"name": "gpu", "firstAvailable": list}]})
    };
    let cases: Vec<(&'static str, Value)> = vec![
        ("plain", exactly(json!({}))),
        ("empty", json!({})),
        ("count", exactly(json!({"count": 3}))),
        ("count zero", exactly(json!({"count": 0}))),
        ("count negative", exactly(json!({"count": -1}))),
        ("all", exactly(json!({"allocationMode": "All"}))),
        ("all with count", exactly(json!({"allocationMode": "All", "count": 2}))),
        ("unknown mode", exactly(json!({"allocationMode": "Some"}))),
        ("no class", json!({"requests": [{"name": "gpu", "exactly": {}}]})),
        ("bad class", exactly(json!({"deviceClassName": "Not_A"}))),
        ("no kind of request", json!({"requests": [{"name": "gpu"}]})),
        (
            "both kinds",
            json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "c"},
            "firstAvailable": [{"name": "a", "deviceClassName": "c"}]}]}),
        ),
        ("bad name", json!({"requests": [{"name": "GPU", "exactly": {"deviceClassName": "c"}}]})),
        ("no name", json!({"requests": [{"exactly": {"deviceClassName": "c"}}]})),
        (
            "same name twice",
            json!({"requests": [{"name": "a", "exactly": {"deviceClassName": "c"}},
            {"name": "a", "exactly": {"deviceClassName": "c"}}]}),
        ),
        ("32 requests", many(32)),
        ("33 requests", many(33)),
        ("8 alternatives", alternatives(8)),
        ("9 alternatives", alternatives(9)),
        ("selector", exactly(json!({"selectors": [{"cel": {"expression": "device.driver == 'x'"}}]}))),
        ("empty selector", exactly(json!({"selectors": [{}]}))),
        ("empty expression", exactly(json!({"selectors": [{"cel": {"expression": ""}}]}))),
        (
            "toleration",
            exactly(json!({"tolerations": [{"key": "a/b", "operator": "Exists", "effect": "NoSchedule"}]})),
        ),
        ("toleration default", exactly(json!({"tolerations": [{"key": "a/b", "value": "c"}]}))),
        ("toleration for all", exactly(json!({"tolerations": [{"operator": "Exists"}]}))),
        ("toleration bad operator", exactly(json!({"tolerations": [{"key": "a", "operator": "Like"}]}))),
        (
            "toleration exists with value",
            exactly(json!({"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]})),
        ),
        ("toleration bad effect", exactly(json!({"tolerations": [{"key": "a", "effect": "Maybe"}]}))),
        (
            "17 tolerations",
            exactly(json!({"tolerations": vec![json!({"key": "a", "operator": "Exists"}); 17]})),
        ),
        ("capacity", exactly(json!({"capacity": {"requests": {"memory": "1024Mi"}}}))),
        ("parameters", configured(json!({"a": {"b": [1, null]}}))),
        ("parameters no object", configured(json!([1]))),
        ("parameters text", configured(json!("x"))),
        ("parameters absent", configured(Value::Null)),
        ("parameters long", configured(json!({"a": "x".repeat(11_000)}))),
        (
            "config for nobody",
            json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "c"}}],
            "config": [{"requests": ["other"], "opaque": {"driver": "d", "parameters": {}}}]}),
        ),
        ("config without opaque", json!({"config": [{}]})),
        ("config bad driver", json!({"config": [{"opaque": {"driver": "A_b", "parameters": {}}}]})),
        ("match", constrained(json!({"matchAttribute": "a.example.com/x"}))),
        ("distinct", constrained(json!({"distinctAttribute": "a.example.com/x"}))),
        ("match unqualified", constrained(json!({"matchAttribute": "x"}))),
        ("match two slashes", constrained(json!({"matchAttribute": "a/b/c"}))),
        ("no attribute", constrained(json!({}))),
        ("match for nobody", constrained(json!({"matchAttribute": "a/x", "requests": ["zz"]}))),
        ("admin", exactly(json!({"adminAccess": true}))),
        ("admin false", exactly(json!({"adminAccess": false}))),
    ];
    let mut steps = vec![namespace("d-specs")];
    for (i, (name, devices)) in cases.into_iter().enumerate() {
        steps.push(post(name, C, claim(&format!("c{i}"), devices)));
    }
    Scenario { name: "claim specs", accepted: vec![], steps }
}

fn life(version: ServerVersion) -> Scenario {
    const C: &str = "/apis/resource.k8s.io/v1/namespaces/d-claims/resourceclaims";
    const ONE: &str = "/apis/resource.k8s.io/v1/namespaces/d-claims/resourceclaims/c";
    const S: &str = "/apis/resource.k8s.io/v1/namespaces/d-claims/resourceclaims/c/status";
    let reserved = |n: usize| -> Value {
        (0..n).map(|i| json!({"resource": "pods", "name": format!("p{i}"), "uid": format!("u{i}")})).collect()
    };
    let device = |name: &str| {
        json!({"apiVersion": API, "kind": "ResourceClaim", "metadata": {"name": "c"}, "status": {"devices": [{
            "driver": "d.example.com", "pool": "p/q", "device": name,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Up", "message": "m",
                            "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            "data": {"a": 1, "b": null},
        }]}})
    };
    let mut steps = vec![
        namespace("d-claims"),
        post(
            "create",
            C,
            json!({"apiVersion": API, "kind": "ResourceClaim", "metadata": {"name": "c"},
            "spec": {"devices": exactly(json!({}))}, "status": {"reservedFor": reserved(1)}}),
        ),
        patch("change spec", ONE, MERGE, json!({"spec": {"devices": {"requests": null}}})),
        patch("status by front", ONE, MERGE, json!({"status": {"reservedFor": reserved(1)}})),
        patch("reserve first", S, MERGE, json!({"status": {"reservedFor": reserved(1)}})),
        patch(
            "device status first",
            "/apis/resource.k8s.io/v1/namespaces/d-claims/resourceclaims/c/status?fieldManager=drv&force=true",
            APPLY,
            device("gpu-0"),
        ),
        patch(
            "finalizer",
            ONE,
            MERGE,
            json!({"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}}),
        ),
        patch(
            "unknown request",
            S,
            MERGE,
            json!({"status": {"allocation": allocation(json!([result(json!({"request": "x"}))]))}}),
        ),
        patch(
            "bad names",
            S,
            MERGE,
            json!({"status": {"allocation":
            allocation(json!([result(json!({"driver": "A_", "pool": "A", "device": "A"}))]))}}),
        ),
        patch(
            "bad share id",
            S,
            MERGE,
            json!({"status": {"allocation":
            allocation(json!([result(json!({"shareID": "x"}))]))}}),
        ),
        patch(
            "too many results",
            S,
            MERGE,
            json!({"status": {"allocation": allocation(json!(vec![result(json!({})); 33]))}}),
        ),
        patch(
            "bad config",
            S,
            MERGE,
            json!({"status": {"allocation": {"devices": {
            "results": [result(json!({}))], "config": [{"source": "FromThere", "opaque": {"driver": "d", "parameters": {}}},
            {"opaque": {"driver": "d", "parameters": {}}}]}}}}),
        ),
        patch(
            "bad selector",
            S,
            MERGE,
            json!({"status": {"allocation": {
            "devices": {"results": [result(json!({}))]}, "nodeSelector": {"nodeSelectorTerms": []}}}}),
        ),
        patch(
            "admin result",
            S,
            MERGE,
            json!({"status": {"allocation":
            allocation(json!([result(json!({"adminAccess": true}))]))}}),
        ),
        patch(
            "allocate",
            S,
            MERGE,
            json!({"status": {
                "allocation": {
                    "devices": {
                        "results": [result(json!({"shareID": "7f1f8f2e-0b3c-4a53-9f0c-6f2f0d5d8a11",
                            "consumedCapacity": {"memory": "2048Mi"}, "tolerations": [{"key": "a/b", "operator": "Exists"}]}))],
                        "config": [{"source": "FromClass", "opaque": {"driver": "d.example.com", "parameters": {"x": 1}}}],
                    },
                    "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                        {"key": "metadata.name", "operator": "In", "values": ["n"]}]}]},
                    "allocationTimestamp": "2026-01-01T00:00:00Z",
                },
                "reservedFor": reserved(1),
            }}),
        ),
        patch("change allocation", S, MERGE, json!({"status": {"allocation": {"nodeSelector": null}}})),
        patch(
            "change time stamp",
            S,
            MERGE,
            json!({"status": {"allocation": {"allocationTimestamp": "2026-01-02T00:00:00Z"}}}),
        ),
        patch(
            "same allocation otherwise written",
            S,
            MERGE,
            json!({"status": {"allocation": {
            "allocationTimestamp": "2026-01-01T00:00:00Z"}}}),
        ),
        patch("clear while reserved", S, MERGE, json!({"status": {"allocation": null}})),
        patch("more reservations", S, MERGE, json!({"status": {"reservedFor": reserved(256)}})),
        patch("too many reservations", S, MERGE, json!({"status": {"reservedFor": reserved(257)}})),
        patch(
            "same pod twice",
            S,
            MERGE,
            json!({"status": {"reservedFor": [reserved(1)[0], reserved(1)[0]]}}),
        ),
        patch("empty reservation", S, MERGE, json!({"status": {"reservedFor": [{}]}})),
        patch(
            "of another kind",
            S,
            MERGE,
            json!({"status": {"reservedFor": [
            {"apiGroup": "x.example.com", "resource": "jobs", "name": "j", "uid": "u"}]}}),
        ),
        patch(
            "labels through status",
            S,
            MERGE,
            json!({"metadata": {"labels": {"a": "b"}, "finalizers": null}}),
        ),
        patch("label", ONE, MERGE, json!({"metadata": {"labels": {"a": "b"}}})),
    ];
    // The status of a device is found by its share id, where that is known.
    if version >= ServerVersion::V1_36 {
        steps.push(patch(
            "device status without share",
            "/apis/resource.k8s.io/v1/namespaces/d-claims/resourceclaims/c/status?fieldManager=drv&force=true",
            APPLY,
            device("gpu-0"),
        ));
    }
    let mut shared = device("gpu-0");
    if version >= ServerVersion::V1_36 {
        shared["status"]["devices"][0]["shareID"] = json!("7f1f8f2e-0b3c-4a53-9f0c-6f2f0d5d8a11");
    }
    steps.extend([
        patch("device status", "/apis/resource.k8s.io/v1/namespaces/d-claims/resourceclaims/c/status?fieldManager=drv&force=true",
            APPLY, shared),
        patch("status of another device", "/apis/resource.k8s.io/v1/namespaces/d-claims/resourceclaims/c/status?fieldManager=drv&force=true",
            APPLY, device("gpu-1")),
        get("read", ONE),
        delete("delete", ONE, Value::Null),
        patch("reserve while leaving", S, MERGE, json!({"status": {"reservedFor": reserved(2)}})),
        patch("unreserve while leaving", S, MERGE, json!({"status": {"reservedFor": null}})),
        patch("deallocate", S, MERGE, json!({"status": {"allocation": null}})),
        patch("lift", ONE, MERGE, json!({"metadata": {"finalizers": null}})),
        get("gone", ONE),
    ]);
    Scenario { name: "life of a claim", accepted: vec![], steps }
}

fn allocations() -> Scenario {
    const C: &str = "/apis/resource.k8s.io/v1/namespaces/d-alloc/resourceclaims";
    let full = result(json!({
        "shareID": "7f1f8f2e-0b3c-4a53-9f0c-6f2f0d5d8a11", "consumedCapacity": {"memory": "2048Mi", "cores": "30"},
        "tolerations": [{"key": "a/b", "operator": "Exists"}],
        "bindingConditions": ["x"], "bindingFailureConditions": ["y"],
    }));
    Scenario {
        name: "allocations",
        accepted: vec![],
        steps: vec![
            namespace("d-alloc"),
            post("first", C, claim("a", exactly(json!({"capacity": {"requests": {"memory": "2Gi"}}})))),
            patch(
                "in full",
                "/apis/resource.k8s.io/v1/namespaces/d-alloc/resourceclaims/a/status",
                MERGE,
                json!({"status": {"allocation": allocation(json!([full]))}}),
            ),
            patch(
                "other fields",
                "/apis/resource.k8s.io/v1/namespaces/d-alloc/resourceclaims/a/status",
                MERGE,
                json!({"status": {"allocation": {"devices": {"config": []}}}}),
            ),
            post("second", C, claim("b", exactly(json!({})))),
            patch(
                "without node",
                "/apis/resource.k8s.io/v1/namespaces/d-alloc/resourceclaims/b/status",
                MERGE,
                json!({"status": {"allocation": {"devices": {"results": [result(json!({}))]}}}}),
            ),
            patch(
                "time stamp later",
                "/apis/resource.k8s.io/v1/namespaces/d-alloc/resourceclaims/b/status",
                MERGE,
                json!({"status": {"allocation": {"allocationTimestamp": "2026-01-01T00:00:00Z"}}}),
            ),
        ],
    }
}

fn refused() -> Scenario {
    const C: &str = "/apis/resource.k8s.io/v1/namespaces/d-put/resourceclaims";
    const S: &str = "/apis/resource.k8s.io/v1/namespaces/d-put/resourceclaims/c/status";
    Scenario {
        name: "claims by PUT",
        accepted: vec![],
        steps: vec![
            namespace("d-put"),
            post("create", C, claim("c", exactly(json!({})))),
            put(
                "allocate",
                S,
                json!({"apiVersion": API, "kind": "ResourceClaim",
                "metadata": {"name": "c", "resourceVersion": "<<create.metadata.resourceVersion>>"},
                "spec": {"devices": exactly(json!({}))},
                "status": {"allocation": allocation(json!([result(json!({}))]))}}),
            ),
            put(
                "allocate again",
                S,
                json!({"apiVersion": API, "kind": "ResourceClaim",
                "metadata": {"name": "c", "resourceVersion": "<<create.metadata.resourceVersion>>"},
                "status": {"allocation": allocation(json!([result(json!({}))]))}}),
            ),
            put(
                "without spec",
                "/apis/resource.k8s.io/v1/namespaces/d-put/resourceclaims/c",
                json!({
                "apiVersion": API, "kind": "ResourceClaim", "metadata": {"name": "c"}}),
            ),
            put(
                "same spec",
                "/apis/resource.k8s.io/v1/namespaces/d-put/resourceclaims/c",
                claim(
                    "c",
                    json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "c.example.com"}}], "config": []}),
                ),
            ),
            post(
                "pod",
                "/api/v1/namespaces/d-put/pods",
                pod(
                    "p",
                    json!({
                "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}],
                "containers": [{"name": "c", "image": "i", "resources": {"claims": [{"name": "gpu", "request": "gpu"}]}}]}),
                ),
            ),
        ],
    }
}

fn classes() -> Scenario {
    const D: &str = "/apis/resource.k8s.io/v1/deviceclasses";
    let class = |name: &str, spec: Value| json!({"apiVersion": API, "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec});
    Scenario {
        name: "classes",
        accepted: vec![],
        steps: vec![
            post(
                "create",
                D,
                class(
                    "d.example.com",
                    json!({
                "selectors": [{"cel": {"expression": "device.driver == 'd.example.com'"}}],
                "config": [{"opaque": {"driver": "d.example.com", "parameters": {"a": 1}}}],
                "extendedResourceName": "example.com/gpu"}),
                ),
            ),
            patch(
                "change",
                "/apis/resource.k8s.io/v1/deviceclasses/d.example.com",
                MERGE,
                json!({"spec": {"config": null}}),
            ),
            post("bad resource", D, class("e.example.com", json!({"extendedResourceName": "cpu"}))),
            post(
                "no spec",
                D,
                json!({"apiVersion": API, "kind": "DeviceClass", "metadata": {"name": "f.example.com"}}),
            ),
            post("bad config", D, class("g.example.com", json!({"config": [{}]}))),
            delete("delete", "/apis/resource.k8s.io/v1/deviceclasses/d.example.com", Value::Null),
            delete("delete f", "/apis/resource.k8s.io/v1/deviceclasses/f.example.com", Value::Null),
        ],
    }
}

fn templates() -> Scenario {
    const T: &str = "/apis/resource.k8s.io/v1/namespaces/d-templates/resourceclaimtemplates";
    Scenario {
        name: "templates",
        accepted: vec![],
        steps: vec![
            namespace("d-templates"),
            post(
                "create",
                T,
                json!({"apiVersion": API, "kind": "ResourceClaimTemplate", "metadata": {"name": "t"},
                "spec": {"metadata": {"labels": {"a": "b"}}, "spec": {"devices": exactly(json!({}))}}}),
            ),
            patch(
                "change",
                "/apis/resource.k8s.io/v1/namespaces/d-templates/resourceclaimtemplates/t",
                MERGE,
                json!({"spec": {"spec": {"devices": {"requests": []}}}}),
            ),
            post(
                "admin",
                T,
                json!({"apiVersion": API, "kind": "ResourceClaimTemplate", "metadata": {"name": "u"},
                "spec": {"spec": {"devices": exactly(json!({"adminAccess": true}))}}}),
            ),
            post(
                "bad",
                T,
                json!({"apiVersion": API, "kind": "ResourceClaimTemplate", "metadata": {"name": "v"},
                "spec": {"spec": {"devices": {"requests": [{"name": "x"}]}}}}),
            ),
        ],
    }
}

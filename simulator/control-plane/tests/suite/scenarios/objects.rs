//! Plain objects, pods, patches, apply, finalizers.

use serde_json::{Value, json};

use super::pods::pod;
use super::{APPLY, JSON_PATCH, MERGE, STRATEGIC, Scenario, delete, get, namespace, patch, post, put, wait};

fn map(name: &str, extra: Value) -> Value {
    let mut m =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "1"}});
    m.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    m
}

pub(crate) fn all() -> Vec<Scenario> {
    vec![lifecycle(), patches(), apply(), finalizers(), custom(), lists(), watches()]
}

fn lifecycle() -> Scenario {
    const M: &str = "/api/v1/namespaces/d-life/configmaps";
    const A: &str = "/api/v1/namespaces/d-life/configmaps/a";
    Scenario {
        name: "life of an object",
        accepted: vec![],
        steps: vec![
            namespace("d-life"),
            post("create", M, map("a", json!({}))),
            post("create again", M, map("a", json!({}))),
            post("generated", M, json!({"metadata": {"generateName": "g-"}})),
            post("no name", M, json!({"metadata": {}})),
            post("bad name", M, map("A_b", json!({}))),
            post("other namespace in body", M, json!({"metadata": {"name": "x", "namespace": "other"}})),
            post(
                "other kind in body",
                M,
                json!({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "x"}}),
            ),
            post("with version", M, json!({"metadata": {"name": "x", "resourceVersion": "5"}})),
            post("no namespace", "/api/v1/namespaces/d-none/configmaps", map("a", json!({}))),
            post(
                "bad labels",
                M,
                json!({"metadata": {"name": "x", "labels": {"a b": "c", "ok": "not ok!"}}}),
            ),
            post("bad owner", M, json!({"metadata": {"name": "x", "ownerReferences": [{"kind": "Pod"}]}})),
            post("bad finalizer", M, json!({"metadata": {"name": "x", "finalizers": ["plain"]}})),
            post("dry run", "/api/v1/namespaces/d-life/configmaps?dryRun=All", map("dry", json!({}))),
            get("read", A),
            get("read dry", "/api/v1/namespaces/d-life/configmaps/dry"),
            put("replace", A, map("a", json!({"data": {"b": "2"}}))),
            put(
                "replace old version",
                A,
                json!({
                "metadata": {"name": "a", "resourceVersion": "<<create.metadata.resourceVersion>>"}}),
            ),
            put(
                "replace other uid",
                A,
                json!({
                "metadata": {"name": "a", "uid": "11111111-1111-1111-1111-111111111111"}}),
            ),
            put("replace other name", A, map("b", json!({}))),
            put("replace missing", "/api/v1/namespaces/d-life/configmaps/zz", map("zz", json!({}))),
            delete("wrong uid", A, json!({"preconditions": {"uid": "11111111-1111-1111-1111-111111111111"}})),
            delete("wrong version", A, json!({"preconditions": {"resourceVersion": "1"}})),
            delete("delete", A, Value::Null),
            delete("delete again", A, Value::Null),
            get("unknown resource", "/api/v1/namespaces/d-life/thingies"),
            get("unknown group", "/apis/none.example.com/v1/things"),
        ],
    }
}

fn patches() -> Scenario {
    const A: &str = "/api/v1/namespaces/d-patch/configmaps/a";
    Scenario {
        name: "patches",
        accepted: vec![],
        steps: vec![
            namespace("d-patch"),
            post("create", "/api/v1/namespaces/d-patch/configmaps", map("a", json!({}))),
            patch(
                "merge",
                A,
                MERGE,
                json!({"data": {"a": null, "b": "2"}, "metadata": {"labels": {"x": "y"}}}),
            ),
            patch("nothing", A, MERGE, json!({"data": {"b": "2"}})),
            patch(
                "strategic",
                A,
                STRATEGIC,
                json!({"metadata": {"finalizers": ["a/b"], "labels": {"x": null}}}),
            ),
            patch("strategic adds", A, STRATEGIC, json!({"metadata": {"finalizers": ["c/d"]}})),
            patch(
                "strategic removes",
                A,
                STRATEGIC,
                json!({"metadata": {
                "$deleteFromPrimitiveList/finalizers": ["a/b"], "$setElementOrder/finalizers": ["c/d"]}}),
            ),
            patch(
                "json",
                A,
                JSON_PATCH,
                json!([{"op": "test", "path": "/data/b", "value": "2"},
                {"op": "add", "path": "/data/c", "value": "3"}, {"op": "remove", "path": "/metadata/finalizers"}]),
            ),
            patch("json test fails", A, JSON_PATCH, json!([{"op": "test", "path": "/data/b", "value": "9"}])),
            patch("json bad path", A, JSON_PATCH, json!([{"op": "remove", "path": "/nope/x"}])),
            patch("json no array", A, JSON_PATCH, json!({"op": "remove"})),
            patch(
                "old version",
                A,
                MERGE,
                json!({
                "metadata": {"resourceVersion": "<<create.metadata.resourceVersion>>"}, "data": {"z": "1"}}),
            ),
            patch(
                "other uid",
                A,
                MERGE,
                json!({"metadata": {"uid": "11111111-1111-1111-1111-111111111111"}}),
            ),
            patch("missing", "/api/v1/namespaces/d-patch/configmaps/zz", MERGE, json!({"data": {}})),
            patch("unknown type", A, "application/x-patch", json!({})),
            get("after all", A),
        ],
    }
}

fn apply() -> Scenario {
    const ONE: &str = "/api/v1/namespaces/d-apply/configmaps/a?fieldManager=one";
    const TWO: &str = "/api/v1/namespaces/d-apply/configmaps/a?fieldManager=two";
    const FORCE: &str = "/api/v1/namespaces/d-apply/configmaps/a?fieldManager=two&force=true";
    let config = |data: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data});
    Scenario {
        name: "apply",
        accepted: vec![],
        steps: vec![
            namespace("d-apply"),
            patch("made", ONE, APPLY, config(json!({"a": "1", "b": "1"}))),
            patch("again", ONE, APPLY, config(json!({"a": "1", "b": "1"}))),
            patch("no manager", "/api/v1/namespaces/d-apply/configmaps/a", APPLY, config(json!({}))),
            patch("same value", TWO, APPLY, config(json!({"a": "1", "c": "1"}))),
            patch("conflict", TWO, APPLY, config(json!({"a": "2"}))),
            patch("forced", FORCE, APPLY, config(json!({"a": "2"}))),
            patch("given up", ONE, APPLY, config(json!({"b": "1"}))),
            patch(
                "update takes over",
                "/api/v1/namespaces/d-apply/configmaps/a?fieldManager=edit",
                MERGE,
                json!({"data": {"b": "9"}}),
            ),
            patch("conflict with update", ONE, APPLY, config(json!({"b": "1"}))),
            patch(
                "with managed fields",
                ONE,
                APPLY,
                json!({"apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": "a", "managedFields": [{"manager": "x", "operation": "Apply", "apiVersion": "v1"}]}}),
            ),
            patch(
                "other name",
                ONE,
                APPLY,
                json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "b"}}),
            ),
            patch(
                "uid of nothing",
                "/api/v1/namespaces/d-apply/configmaps/n?fieldManager=one",
                APPLY,
                json!({
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": "n", "uid": "11111111-1111-1111-1111-111111111111"}}),
            ),
            patch(
                "empty",
                TWO,
                APPLY,
                json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}),
            ),
            get("after all", "/api/v1/namespaces/d-apply/configmaps/a"),
        ],
    }
}

fn finalizers() -> Scenario {
    const A: &str = "/api/v1/namespaces/d-final/configmaps/a";
    Scenario {
        name: "finalizers",
        accepted: vec![],
        steps: vec![
            namespace("d-final"),
            post(
                "create",
                "/api/v1/namespaces/d-final/configmaps",
                json!({
                "metadata": {"name": "a", "finalizers": ["x/one", "x/two"]}}),
            ),
            delete("delete", A, Value::Null),
            delete("delete twice", A, Value::Null),
            patch("add one", A, MERGE, json!({"metadata": {"finalizers": ["x/one", "x/two", "x/three"]}})),
            patch("one left", A, MERGE, json!({"metadata": {"finalizers": ["x/two"]}})),
            patch("change while leaving", A, MERGE, json!({"data": {"z": "1"}})),
            patch("none left", A, MERGE, json!({"metadata": {"finalizers": null}})),
            get("gone", A),
            post("foreground", "/api/v1/namespaces/d-final/configmaps", json!({"metadata": {"name": "a"}})),
            delete("delete foreground", A, json!({"propagationPolicy": "Foreground"})),
            patch("lift", A, MERGE, json!({"metadata": {"finalizers": null}})),
            post("orphan", "/api/v1/namespaces/d-final/configmaps", json!({"metadata": {"name": "a"}})),
            delete("delete orphan", A, json!({"propagationPolicy": "Orphan"})),
        ],
    }
}

fn custom() -> Scenario {
    const B: &str = "/apis/d.example.com/v1alpha1/namespaces/d-custom/budgets";
    const ONE: &str = "/apis/d.example.com/v1alpha1/namespaces/d-custom/budgets/b";
    Scenario {
        name: "custom resources",
        // The definition's status comes from a controller that takes its time.
        accepted: vec![".body.status", ".body.metadata.managedFields"],
        steps: vec![
            namespace("d-custom"),
            post(
                "crd",
                "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
                json!({
                    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
                    "metadata": {"name": "budgets.d.example.com"},
                    "spec": {
                        "group": "d.example.com", "scope": "Namespaced", "names": {"kind": "Budget", "plural": "budgets"},
                        "versions": [{
                            "name": "v1alpha1", "served": true, "storage": true, "subresources": {"status": {}},
                            "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                                "spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                                "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                            }}},
                        }],
                    },
                }),
            ),
            wait("/apis/d.example.com/v1alpha1/namespaces/d-custom/budgets"),
            post(
                "create",
                B,
                json!({"apiVersion": "d.example.com/v1alpha1", "kind": "Budget",
                "metadata": {"name": "b"}, "spec": {"a": 1}, "status": {"x": 1}}),
            ),
            put(
                "no version",
                ONE,
                json!({"apiVersion": "d.example.com/v1alpha1", "kind": "Budget",
                "metadata": {"name": "b"}, "spec": {"a": 2}}),
            ),
            patch("spec", ONE, MERGE, json!({"spec": {"a": 2}})),
            patch("label", ONE, MERGE, json!({"metadata": {"labels": {"a": "b"}}})),
            patch(
                "status",
                "/apis/d.example.com/v1alpha1/namespaces/d-custom/budgets/b/status",
                MERGE,
                json!({"status": {"x": 2}, "spec": {"a": 3}, "metadata": {"labels": {"c": "d"}}}),
            ),
            patch("strategic", ONE, STRATEGIC, json!({"spec": {"a": 4}})),
            post(
                "wrong kind",
                B,
                json!({"apiVersion": "d.example.com/v1alpha1", "kind": "Other", "metadata": {"name": "x"}}),
            ),
            post("no kind", B, json!({"metadata": {"name": "x"}})),
            delete("delete", ONE, Value::Null),
        ],
    }
}

fn lists() -> Scenario {
    const M: &str = "/api/v1/namespaces/d-list/configmaps";
    Scenario {
        name: "lists",
        accepted: vec![".metadata.continue"],
        steps: vec![
            namespace("d-list"),
            post("a", M, json!({"metadata": {"name": "a", "labels": {"k": "1"}}})),
            post("b", M, json!({"metadata": {"name": "b", "labels": {"k": "2"}}})),
            post("c", M, json!({"metadata": {"name": "c"}})),
            get("some", "/api/v1/namespaces/d-list/configmaps?labelSelector=k%20in%20(1,3)"),
            get("absent", "/api/v1/namespaces/d-list/configmaps?labelSelector=!k"),
            get("not", "/api/v1/namespaces/d-list/configmaps?labelSelector=k!%3D1"),
            get("bad label selector", "/api/v1/namespaces/d-list/configmaps?labelSelector=k%20in%20("),
            get("by name", "/api/v1/namespaces/d-list/configmaps?fieldSelector=metadata.name%3Db"),
            get("bad field", "/api/v1/namespaces/d-list/configmaps?fieldSelector=data.a%3Db"),
            get("bad field selector", "/api/v1/namespaces/d-list/configmaps?fieldSelector=what"),
            get("page", "/api/v1/namespaces/d-list/configmaps?limit=2"),
            get(
                "second page",
                "/api/v1/namespaces/d-list/configmaps?limit=2&continue=<<page.metadata.continue>>",
            ),
            get("bad token", "/api/v1/namespaces/d-list/configmaps?limit=2&continue=xxx"),
            get("bad version", "/api/v1/namespaces/d-list/configmaps?resourceVersion=abc"),
            get("empty", "/api/v1/namespaces/d-list/secrets"),
            delete("collection", "/api/v1/namespaces/d-list/configmaps?labelSelector=k", Value::Null),
            get("rest", M),
        ],
    }
}

fn watches() -> Scenario {
    const M: &str = "/api/v1/namespaces/d-watch/configmaps";
    let named = |name: &str, label: &str| json!({"metadata": {"name": name, "labels": {"k": label}}});
    Scenario {
        name: "watches",
        // Which version history begins with differs from server to server.
        accepted: vec![".object.message"],
        steps: vec![
            namespace("d-watch"),
            post("a", M, named("a", "1")),
            post("b", M, named("b", "1")),
            patch(
                "a changes",
                "/api/v1/namespaces/d-watch/configmaps/a",
                MERGE,
                json!({"metadata": {"labels": {"k": "2"}}}),
            ),
            patch(
                "a comes back",
                "/api/v1/namespaces/d-watch/configmaps/a",
                MERGE,
                json!({"metadata": {"labels": {"k": "1"}}}),
            ),
            delete("b goes", "/api/v1/namespaces/d-watch/configmaps/b", Value::Null),
            post("f", M, json!({"metadata": {"name": "f", "finalizers": ["x/y"]}})),
            delete("f marked", "/api/v1/namespaces/d-watch/configmaps/f", Value::Null),
            patch(
                "f goes",
                "/api/v1/namespaces/d-watch/configmaps/f",
                MERGE,
                json!({"metadata": {"finalizers": null}}),
            ),
            post("pod", "/api/v1/namespaces/d-watch/pods", pod("p", json!({}))),
            delete("pod goes", "/api/v1/namespaces/d-watch/pods/p", Value::Null),
            get(
                "resume",
                "/api/v1/namespaces/d-watch/configmaps?watch=1&timeoutSeconds=1&resourceVersion=<<a.metadata.resourceVersion>>",
            ),
            get(
                "selected",
                "/api/v1/namespaces/d-watch/configmaps?watch=1&timeoutSeconds=1&labelSelector=k%3D1&resourceVersion=<<a.metadata.resourceVersion>>",
            ),
            get(
                "one",
                "/api/v1/namespaces/d-watch/configmaps?watch=1&timeoutSeconds=1&fieldSelector=metadata.name%3Db&resourceVersion=<<a.metadata.resourceVersion>>",
            ),
            get(
                "pods",
                "/api/v1/namespaces/d-watch/pods?watch=1&timeoutSeconds=1&resourceVersion=<<a.metadata.resourceVersion>>",
            ),
            get("from now", "/api/v1/namespaces/d-watch/configmaps?watch=1&timeoutSeconds=1"),
            get(
                "from any",
                "/api/v1/namespaces/d-watch/configmaps?watch=1&timeoutSeconds=1&resourceVersion=0",
            ),
            get(
                "with list",
                "/api/v1/namespaces/d-watch/configmaps?watch=1&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true",
            ),
            get(
                "with list wrongly",
                "/api/v1/namespaces/d-watch/configmaps?watch=1&timeoutSeconds=1&sendInitialEvents=true",
            ),
            get("match without version", "/api/v1/namespaces/d-watch/configmaps?resourceVersionMatch=Exact"),
            get(
                "bad version",
                "/api/v1/namespaces/d-watch/configmaps?watch=1&timeoutSeconds=1&resourceVersion=x",
            ),
            get(
                "bad selector",
                "/api/v1/namespaces/d-watch/configmaps?watch=1&timeoutSeconds=1&fieldSelector=a%3Db",
            ),
            get(
                "exact",
                "/api/v1/namespaces/d-watch/configmaps?resourceVersion=<<b.metadata.resourceVersion>>&resourceVersionMatch=Exact",
            ),
            get(
                "not older",
                "/api/v1/namespaces/d-watch/configmaps?resourceVersion=<<b.metadata.resourceVersion>>&resourceVersionMatch=NotOlderThan",
            ),
            get(
                "future",
                "/api/v1/namespaces/d-watch/configmaps?resourceVersion=99999999&resourceVersionMatch=NotOlderThan",
            ),
        ],
    }
}

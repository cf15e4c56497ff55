use super::*;
use kube::core::{ObjectList, WatchEvent};
use rstest::rstest;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Everything that a watch, a list and a look-up make of an object's text.
fn read<K: Kept<DynamicType = ()> + DeserializeOwned + Clone>(object: &Value) -> [K; 3] {
    let list = json!({"apiVersion": K::api_version(&()), "kind": format!("{}List", K::kind(&())),
        "metadata": {}, "items": [object]});
    let mut list: ObjectList<Lean<K>> = serde_json::from_str(&list.to_string()).expect("a list");
    // As the API server writes it: a map of ours would have the object before the type.
    let event = format!(r#"{{"type":"ADDED","object":{object}}}"#);
    let WatchEvent::Added(Lean(seen)) = serde_json::from_str(&event).expect("an event") else {
        panic!("{event}")
    };
    let Lean(found) = serde_json::from_str(&object.to_string()).expect("an object");
    [list.items.remove(0).0, seen, found]
}

fn expect<K>(object: &Value, expected: &Value)
where
    K: Kept<DynamicType = ()> + DeserializeOwned + Clone + Serialize + PartialEq + std::fmt::Debug,
{
    let expected: K = serde_json::from_value(expected.clone()).expect("an object");
    for read in read::<K>(object) {
        assert_eq!(
            serde_json::to_value(&read).expect("JSON"),
            serde_json::to_value(&expected).expect("JSON")
        );
    }
}

/// The same object with a field more, or none.
fn plus(object: &Value, path: &str, field: &str, value: &Value) -> Value {
    let mut more = object.clone();
    let at = more.pointer_mut(path).and_then(Value::as_object_mut).expect("an object");
    at.insert(field.to_owned(), value.clone());
    more
}

fn claim() -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {
            "name": "c", "namespace": "n", "uid": "u", "resourceVersion": "7", "finalizers": ["a/b"],
            "annotations": {"parameters": "no", "labels": "no"}, "creationTimestamp": "2026-01-02T03:04:05Z",
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "p", "controller": true}],
        },
        "spec": {"devices": {
            "requests": [{"name": "r", "exactly": {"deviceClassName": "share.aliquot.dev", "count": 2,
                "allocationMode": "ExactCount", "selectors": [{"cel": {"expression": "true"}}],
                "capacity": {"requests": {"memory": "1Gi"}}}}],
            "config": [{"requests": ["r"], "opaque": {"driver": "gpu.aliquot.dev", "parameters": {
                "apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "priority": 5}}}],
        }},
        "status": {
            "allocation": {"devices": {
                "config": [{"source": "FromClaim", "opaque": {"driver": "gpu.aliquot.dev", "parameters": {"a": [1, -2, 0.5, null, true, "t"]}}}],
                "results": [{"driver": "gpu.aliquot.dev", "pool": "n", "device": "gpu-0", "request": "r",
                    "consumedCapacity": {"memory": "1Gi"}, "adminAccess": false}]},
                "nodeSelector": {"nodeSelectorTerms": []}},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "p"}],
        },
    })
}

#[rstest]
#[case::field_managers("/metadata", "managedFields", json!([{"manager": "m", "fieldsV1": {"f:a": {}}}]))]
#[case::labels("/metadata", "labels", json!({"a": "b"}))]
#[case::what_drivers_say("/status", "devices", json!([{"driver": "d", "pool": "p", "device": "d", "data": {"a": {}}}]))]
fn of_a_claim_all_is_read_but(#[case] path: &str, #[case] field: &str, #[case] value: Value) {
    expect::<ResourceClaim>(&claim(), &claim());
    expect::<ResourceClaim>(&plus(&claim(), path, field, &value), &claim());
}

#[rstest]
#[case::of_the_claim("/spec/devices/config/0/opaque")]
#[case::of_the_allocation("/status/allocation/devices/config/0/opaque")]
fn parameters_beyond_the_bounds_say_so_and_the_rest_is_read(#[case] path: &str) {
    // Deeper than serde_json reads as well: one such claim would break the list of all.
    let mut deep = json!(0);
    for _ in 0..200 {
        deep = json!([deep]);
    }
    for large in [json!({"a": vec![json!({"": 0}); 1700]}), json!({"a": deep})] {
        let claim = plus(&claim(), path, "parameters", &large);
        let mut expected = claim.clone();
        *expected.pointer_mut(path).expect("there") = json!({"driver": "gpu.aliquot.dev", "parameters": {"apiVersion": "aliquot.dev/v1alpha1", "kind": "TooLarge"}});
        expect::<ResourceClaim>(&claim, &expected);
    }
}

#[test]
fn of_a_template_the_requests_of_its_claims_are_read() {
    let spec = claim()["spec"].clone();
    let template = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t", "namespace": "n", "labels": {"a": "b"}, "annotations": {"a": "b"},
            "managedFields": [{"manager": "m"}]},
        "spec": {"metadata": {"annotations": {"a": "b"}}, "spec": spec},
    });
    let mut expected = template.clone();
    expected["metadata"] = json!({"name": "t", "namespace": "n"});
    expected["spec"]["spec"]["devices"]["config"] = Value::Null;
    expected["spec"]["metadata"] = Value::Null;
    expect::<ResourceClaimTemplate>(&template, &expected);
}

#[test]
fn of_a_pods_containers_what_they_run_is_not_read() {
    let pod = |more: Value| {
        let mut container = json!({"name": "c", "image": "i", "ports": [{"containerPort": 1, "hostPort": 1}],
            "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}, "claims": [{"name": "g"}]}});
        for (field, value) in more.as_object().expect("fields") {
            container[field] = value.clone();
        }
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "namespace": "n", "labels": {"env": "a"}, "annotations": {"args": "b"}},
            "spec": {"containers": [container], "initContainers": [container], "nodeSelector": {"env": "a"},
                "volumes": [{"name": "v", "emptyDir": {}}], "resourceClaims": [{"name": "g", "resourceClaimName": "g"}]},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "c", "image": "i", "imageID": "i", "ready": true, "restartCount": 0, "containerID": "x"}]},
        })
    };
    let probe = json!({"exec": {"command": ["a"]}});
    let full = json!({
        "args": ["a"], "command": ["a"], "env": [{"name": "a"}], "envFrom": [{}], "lifecycle": {},
        "livenessProbe": probe, "readinessProbe": probe, "startupProbe": probe,
        "volumeMounts": [{"name": "v", "mountPath": "/"}], "volumeDevices": [{"name": "v", "devicePath": "/"}],
    });
    expect::<Pod>(&pod(full), &pod(json!({})));
}

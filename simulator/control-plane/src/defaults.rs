//! Values that the server fills in.

use serde_json::{Map, Value, json};

use crate::kinds::Kind;
use crate::quantity::Quantity;
use crate::value::{now, set, set_default, text};

/// Fills in the defaults of a decoded object.
pub(crate) fn apply(kind: &Kind, object: &mut Value) {
    match (kind.group.as_str(), kind.plural.as_str()) {
        ("", "pods") => pod(object),
        ("", "namespaces") => {
            let name = text(object, &["metadata", "name"]).to_owned();
            set(object, &["metadata", "labels", "kubernetes.io/metadata.name"], name);
        }
        ("scheduling.k8s.io", "priorityclasses") => {
            set_default(object, &["preemptionPolicy"], "PreemptLowerPriority");
        }
        ("resource.k8s.io", "deviceclasses") => set_default(object, &["spec"], json!({})),
        ("", "nodes") => {
            set_default(object, &["spec"], json!({}));
            if let Some(capacity) = object.pointer("/status/capacity").cloned() {
                set_default(object, &["status", "allocatable"], json!({}));
                for (name, amount) in capacity.as_object().into_iter().flatten() {
                    set_default(object, &["status", "allocatable", name], amount.clone());
                }
            }
            canonical_map(object.pointer_mut("/status/capacity"));
            canonical_map(object.pointer_mut("/status/allocatable"));
        }
        ("resource.k8s.io", "resourceslices") => slice(object),
        ("resource.k8s.io", "resourceclaims") => {
            claim_spec(object.pointer_mut("/spec"));
            for result in each(Some(object), "/status/allocation/devices/results") {
                canonical_map(result.get_mut("consumedCapacity"));
            }
        }
        ("resource.k8s.io", "resourceclaimtemplates") => {
            set_default(object, &["spec", "metadata"], json!({}));
            claim_spec(object.pointer_mut("/spec/spec"));
        }
        ("resource.k8s.io", "devicetaintrules") => {
            set_default(object, &["spec", "taint", "timeAdded"], now());
        }
        ("admissionregistration.k8s.io", plural) if plural.ends_with("webhookconfigurations") => {
            webhooks(object)
        }
        _ => {}
    }
}

fn each<'a>(value: Option<&'a mut Value>, pointer: &str) -> impl Iterator<Item = &'a mut Value> {
    value.and_then(|v| v.pointer_mut(pointer)).and_then(Value::as_array_mut).into_iter().flatten()
}

/// Quantities come back in their canonical form, whatever they were written as.
fn canonical(value: Option<&mut Value>) {
    if let Some(value) = value
        && let Some(quantity) = Quantity::from_json(value)
    {
        *value = Value::from(quantity.to_string());
    }
}

fn canonical_map(map: Option<&mut Value>) {
    for value in map.and_then(Value::as_object_mut).into_iter().flat_map(Map::values_mut) {
        canonical(Some(value));
    }
}

fn counters(map: Option<&mut Value>) {
    for counter in map.and_then(Value::as_object_mut).into_iter().flat_map(Map::values_mut) {
        canonical(counter.get_mut("value"));
    }
}

fn pod(pod: &mut Value) {
    for (field, value) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("schedulerName", json!("default-scheduler")),
        ("securityContext", json!({})),
        ("enableServiceLinks", json!(true)),
    ] {
        set_default(pod, &["spec", field], value);
    }
    for list in ["/spec/containers", "/spec/initContainers"] {
        for container in each(Some(&mut *pod), list) {
            set_default(container, &["resources"], json!({}));
            set_default(container, &["terminationMessagePath"], "/dev/termination-log");
            set_default(container, &["terminationMessagePolicy"], "File");
            let pull = pull_policy(text(container, &["image"]));
            set_default(container, &["imagePullPolicy"], pull);
            // Limits are requests where no request is given.
            let limits = container.pointer("/resources/limits").and_then(Value::as_object).cloned();
            for (name, limit) in limits.into_iter().flat_map(Map::into_iter) {
                set_default(container, &["resources", "requests", &name], limit);
            }
            canonical_map(container.pointer_mut("/resources/limits"));
            canonical_map(container.pointer_mut("/resources/requests"));
        }
    }
}

/// Images without a tag, or with the tag `latest`, are always pulled.
fn pull_policy(image: &str) -> &'static str {
    let name = image.rsplit('/').next().unwrap_or(image);
    let tagged = name.contains('@') || name.split_once(':').is_some_and(|(_, tag)| tag != "latest");
    if tagged { "IfNotPresent" } else { "Always" }
}

fn slice(slice: &mut Value) {
    for device in each(Some(&mut *slice), "/spec/devices") {
        for taint in each(Some(&mut *device), "/taints") {
            set_default(taint, &["timeAdded"], now());
        }
        for consumption in each(Some(&mut *device), "/consumesCounters") {
            counters(consumption.get_mut("counters"));
        }
        for capacity in
            device.get_mut("capacity").and_then(Value::as_object_mut).into_iter().flat_map(Map::values_mut)
        {
            canonical(capacity.get_mut("value"));
            for pointer in ["default", "validRange/min", "validRange/max", "validRange/step"] {
                canonical(capacity.pointer_mut(&format!("/requestPolicy/{pointer}")));
            }
            for value in each(Some(capacity), "/requestPolicy/validValues") {
                canonical(Some(value));
            }
        }
    }
    for set in each(Some(slice), "/spec/sharedCounters") {
        counters(set.get_mut("counters"));
    }
}

fn claim_spec(spec: Option<&mut Value>) {
    for request in each(spec, "/devices/requests") {
        if let Some(exactly) = request.get_mut("exactly") {
            device_request(exactly);
        }
        for sub in each(Some(request), "/firstAvailable") {
            device_request(sub);
        }
    }
}

fn device_request(request: &mut Value) {
    if !request.is_object() {
        return;
    }
    set_default(request, &["allocationMode"], "ExactCount");
    if text(request, &["allocationMode"]) == "ExactCount" {
        let absent = request.get("count").and_then(Value::as_i64).unwrap_or(0) == 0;
        if absent {
            set(request, &["count"], 1);
        }
    }
    canonical_map(request.pointer_mut("/capacity/requests"));
    for toleration in each(Some(request), "/tolerations") {
        set_default(toleration, &["operator"], "Equal");
    }
}

fn webhooks(configuration: &mut Value) {
    for hook in each(Some(configuration), "/webhooks") {
        for (field, value) in [
            ("failurePolicy", json!("Fail")),
            ("matchPolicy", json!("Equivalent")),
            ("namespaceSelector", json!({})),
            ("objectSelector", json!({})),
            ("timeoutSeconds", json!(10)),
        ] {
            set_default(hook, &[field], value);
        }
        for rule in each(Some(hook), "/rules") {
            set_default(rule, &["scope"], "*");
        }
    }
}

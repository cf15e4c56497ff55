//! Fields of disabled feature gates are dropped without a word, unless the old object has them.

use serde_json::{Map, Value};

use crate::api::ApiServer;
use crate::kinds::Kind;
use crate::value::{at, entry, list, remove};

/// Drops what disabled gates cover.
pub(crate) fn drop_disabled(server: &ApiServer, kind: &Kind, new: &mut Value, old: Option<&Value>) {
    match kind.plural.as_str() {
        "resourceslices" => drop_from_slice(server, new, old),
        "resourceclaims" => {
            drop_from_spec(server, entry(new, &["spec"]), old.and_then(|o| o.get("spec")));
            drop_from_status(server, new, old);
        }
        "resourceclaimtemplates" => {
            let before = old.and_then(|o| at(o, &["spec", "spec"]));
            drop_from_spec(server, entry(new, &["spec", "spec"]), before);
        }
        "deviceclasses" if !server.gates.extended_resource => {
            let used = old.is_some_and(|o| at(o, &["spec", "extendedResourceName"]).is_some());
            if !used {
                remove(new, &["spec", "extendedResourceName"]);
            }
        }
        _ => {}
    }
}

type Fields = Map<String, Value>;

fn devices_mut(slice: &mut Value) -> impl Iterator<Item = &mut Fields> {
    slice
        .pointer_mut("/spec/devices")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
        .filter_map(Value::as_object_mut)
}

fn any_device(slice: Option<&Value>, test: impl Fn(&Value) -> bool) -> bool {
    slice.is_some_and(|s| list(s, &["spec", "devices"]).iter().any(test))
}

fn drop_from_slice(server: &ApiServer, new: &mut Value, old: Option<&Value>) {
    let gates = server.gates;
    let has = |name: &'static str| move |d: &Value| d.get(name).is_some();
    if !gates.device_taints && !any_device(old, has("taints")) {
        devices_mut(new).for_each(|d| {
            d.remove("taints");
        });
    }
    let per_device = ["consumesCounters", "nodeName", "nodeSelector", "allNodes"];
    let counters_used = old.is_some_and(|o| {
        at(o, &["spec", "sharedCounters"]).is_some() || at(o, &["spec", "perDeviceNodeSelection"]).is_some()
    }) || any_device(old, |d| per_device.iter().any(|f| d.get(f).is_some()));
    if !gates.partitionable_devices && !counters_used {
        remove(new, &["spec", "sharedCounters"]);
        remove(new, &["spec", "perDeviceNodeSelection"]);
        devices_mut(new).for_each(|d| d.retain(|k, _| !per_device.contains(&k.as_str())));
    }
    let binding = ["bindingConditions", "bindingFailureConditions", "bindsToNode"];
    let binding_used = any_device(old, |d| binding.iter().any(|f| d.get(f).is_some()));
    let binding_on = gates.binding_conditions && gates.device_status;
    if !binding_on && !binding_used {
        devices_mut(new).for_each(|d| d.retain(|k, _| !binding.contains(&k.as_str())));
    }
    let has_policy = |d: &Value| {
        at(d, &["capacity"])
            .and_then(Value::as_object)
            .is_some_and(|c| c.values().any(|v| v.get("requestPolicy").is_some()))
    };
    let sharing_used = any_device(old, |d| d.get("allowMultipleAllocations").is_some() || has_policy(d));
    if !gates.consumable_capacity && !sharing_used {
        devices_mut(new).for_each(|d| {
            d.remove("allowMultipleAllocations");
            for capacity in
                d.get_mut("capacity").and_then(Value::as_object_mut).into_iter().flat_map(Fields::values_mut)
            {
                remove(capacity, &["requestPolicy"]);
            }
        });
    }
    let lists = ["bools", "ints", "strings", "versions"];
    let list_used = any_device(old, |d| {
        at(d, &["attributes"])
            .and_then(Value::as_object)
            .is_some_and(|a| a.values().any(|v| lists.iter().any(|l| v.get(l).is_some())))
    });
    if !gates.list_attributes && !list_used {
        devices_mut(new).for_each(|d| {
            for attribute in d
                .get_mut("attributes")
                .and_then(Value::as_object_mut)
                .into_iter()
                .flat_map(Fields::values_mut)
            {
                for name in lists {
                    remove(attribute, &[name]);
                }
            }
        });
    }
}

fn requests_mut(spec: &mut Value) -> impl Iterator<Item = &mut Fields> {
    spec.pointer_mut("/devices/requests")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
        .filter_map(Value::as_object_mut)
}

/// `exactly` and the entries of `firstAvailable`.
fn parts_mut(request: &mut Fields) -> Vec<&mut Fields> {
    let mut out = Vec::new();
    for (name, value) in request.iter_mut() {
        match (name.as_str(), value) {
            ("exactly", Value::Object(o)) => out.push(o),
            ("firstAvailable", Value::Array(items)) => {
                out.extend(items.iter_mut().filter_map(Value::as_object_mut));
            }
            _ => {}
        }
    }
    out
}

fn any_part(spec: Option<&Value>, field: &str) -> bool {
    spec.is_some_and(|s| {
        list(s, &["devices", "requests"]).iter().any(|r| {
            r.get("exactly").is_some_and(|e| e.get(field).is_some())
                || list(r, &["firstAvailable"]).iter().any(|e| e.get(field).is_some())
        })
    })
}

fn drop_from_spec(server: &ApiServer, spec: &mut Value, old: Option<&Value>) {
    let gates = server.gates;
    if !gates.prioritized_list
        && !old.is_some_and(|s| {
            list(s, &["devices", "requests"]).iter().any(|r| r.get("firstAvailable").is_some())
        })
    {
        requests_mut(spec).for_each(|r| {
            r.remove("firstAvailable");
        });
    }
    // Tolerations and distinctAttribute stay, whatever the gates say: so does the real server.
    for (on, field) in [(gates.admin_access, "adminAccess"), (gates.consumable_capacity, "capacity")] {
        if !on && !any_part(old, field) {
            for request in requests_mut(spec) {
                for part in parts_mut(request) {
                    part.remove(field);
                }
            }
        }
    }
}

fn drop_from_status(server: &ApiServer, new: &mut Value, old: Option<&Value>) {
    let gates = server.gates;
    if !gates.device_status && old.is_none_or(|o| list(o, &["status", "devices"]).is_empty()) {
        remove(new, &["status", "devices"]);
    }
    let results = &["status", "allocation", "devices", "results"];
    let used = |field: &str| old.is_some_and(|o| list(o, results).iter().any(|r| r.get(field).is_some()));
    let binding = gates.binding_conditions && gates.device_status;
    for (on, fields) in [
        (gates.admin_access, &["adminAccess"][..]),
        (gates.consumable_capacity, &["shareID", "consumedCapacity"][..]),
        (binding, &["bindingConditions", "bindingFailureConditions"][..]),
    ] {
        if on || fields.iter().any(|f| used(f)) {
            continue;
        }
        for result in new
            .pointer_mut("/status/allocation/devices/results")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            for field in fields {
                remove(result, &[field]);
            }
        }
    }
    let stamped = old.is_some_and(|o| at(o, &["status", "allocation", "allocationTimestamp"]).is_some());
    if !binding && !stamped {
        remove(new, &["status", "allocation", "allocationTimestamp"]);
    }
}

/// The status of devices goes with their allocation.
pub(crate) fn drop_deallocated_devices(old: &Value, new: &mut Value) {
    let id = |v: &Value| {
        ["driver", "pool", "device"].map(|f| v.get(f).and_then(Value::as_str).unwrap_or_default().to_owned())
    };
    let results = &["status", "allocation", "devices", "results"];
    let kept: Vec<_> = list(new, results).iter().map(id).collect();
    let gone: Vec<_> = list(old, results).iter().map(id).filter(|i| !kept.contains(i)).collect();
    if let Some(devices) = new.pointer_mut("/status/devices").and_then(Value::as_array_mut) {
        devices.retain(|d| !gone.contains(&id(d)));
        if devices.is_empty() {
            remove(new, &["status", "devices"]);
        }
    }
}

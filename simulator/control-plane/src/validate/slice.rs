//! ResourceSlices: the limits of each release, and the two layouts for counters.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::device::{self, Rules};
use super::{Errors, at_most, driver, immutable, node_selector, pool, required_label, unique};
use crate::api::ApiServer;
use crate::error::FieldError;
use crate::options::ServerVersion;
use crate::value::{at, list, object, text};

const MAX_DEVICES: usize = 128;
const MAX_DEVICES_WITH_EXTRAS: usize = 64;
const MAX_COUNTER_SETS: usize = 8;
/// Up to 1.34, of all sets of a slice together.
const MAX_COUNTERS_PER_SLICE: usize = 32;
/// Up to 1.34, of all devices of a slice together.
const MAX_CONSUMED_PER_SLICE: usize = 1024;

pub(super) fn check(server: &ApiServer, slice: &Value, old: Option<&Value>, errors: &mut Errors) {
    let rules = Rules { version: server.options.version, gates: server.gates };
    driver(text(slice, &["spec", "driver"]), "spec.driver", errors);
    pool(text(slice, &["spec", "pool", "name"]), "spec.pool.name", errors);
    let number = |name: &str| at(slice, &["spec", "pool", name]).and_then(Value::as_i64);
    let count = number("resourceSliceCount").unwrap_or(0);
    if count <= 0 {
        errors.push(FieldError::invalid(
            "spec.pool.resourceSliceCount",
            &Value::from(count),
            "must be greater than zero",
        ));
    }
    let generation = number("generation").unwrap_or(0);
    if generation < 0 {
        let why = "must not be negative";
        errors.push(FieldError::invalid("spec.pool.generation", &Value::from(generation), why));
    }
    if let Some(old) = old {
        immutable(old, slice, &["spec", "pool", "name"], "spec.pool.name", errors);
        immutable(old, slice, &["spec", "driver"], "spec.driver", errors);
        immutable(old, slice, &["spec", "nodeName"], "spec.nodeName", errors);
    }
    let per_device = check_nodes(slice, errors);
    check_devices(slice, old, per_device, rules, errors);
    check_counter_sets(slice, rules, errors);
}

fn check_nodes(slice: &Value, errors: &mut Errors) -> bool {
    let spec = slice.get("spec").unwrap_or(&Value::Null);
    let places = ["nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection"];
    let given = |p: &str| spec.get(p).is_some_and(|v| v.as_bool() != Some(false));
    let set: Vec<&str> = places.into_iter().filter(|p| given(p)).collect();
    let choice = "exactly one of nodeName, nodeSelector, allNodes, perDeviceNodeSelection";
    match set.len() {
        1 => {}
        0 => errors.push(FieldError::required("spec", choice)),
        _ => errors.push(FieldError::invalid("spec", &Value::from(set.join(", ")), choice)),
    }
    for flag in ["allNodes", "perDeviceNodeSelection"] {
        if let Some(value) = spec.get(flag).filter(|v| v.as_bool() != Some(true)) {
            errors.push(FieldError::invalid(format!("spec.{flag}"), value, "must be true or absent"));
        }
    }
    if let Some(name) = spec.get("nodeName") {
        super::subdomain(name.as_str().unwrap_or_default(), "spec.nodeName", errors);
    }
    if let Some(selector) = spec.get("nodeSelector") {
        node_selector(selector, "spec.nodeSelector", errors);
        let terms = list(selector, &["nodeSelectorTerms"]).len();
        if terms != 1 {
            errors.push(FieldError::invalid(
                "spec.nodeSelector.nodeSelectorTerms",
                &Value::from(terms),
                "must have exactly one term",
            ));
        }
    }
    spec.get("perDeviceNodeSelection").and_then(Value::as_bool) == Some(true)
}

fn check_devices(slice: &Value, old: Option<&Value>, per_device: bool, rules: Rules, errors: &mut Errors) {
    let devices = list(slice, &["spec", "devices"]);
    let has_list = |d: &Value| {
        object(d, &["attributes"]).is_some_and(|a| {
            a.values().any(|v| ["bools", "ints", "strings", "versions"].iter().any(|l| v.get(l).is_some()))
        })
    };
    let extras = devices
        .iter()
        .any(|d| d.get("taints").is_some() || d.get("consumesCounters").is_some() || has_list(d));
    let max =
        if extras && rules.version >= ServerVersion::V1_35 { MAX_DEVICES_WITH_EXTRAS } else { MAX_DEVICES };
    if !at_most(devices, max, "spec.devices", errors) {
        return;
    }
    let before: BTreeMap<&str, &Value> = old
        .map(|o| list(o, &["spec", "devices"]).iter().map(|d| (text(d, &["name"]), d)).collect())
        .unwrap_or_default();
    for (i, d) in devices.iter().enumerate() {
        let was = before.get(text(d, &["name"])).copied();
        device::check(d, was, per_device, rules, &format!("spec.devices[{i}]"), errors);
    }
    unique(devices.iter().map(|d| text(d, &["name"]).to_owned()).enumerate(), "spec.devices", errors);
}

fn check_counter_sets(slice: &Value, rules: Rules, errors: &mut Errors) {
    let sets = list(slice, &["spec", "sharedCounters"]);
    let devices = list(slice, &["spec", "devices"]);
    if rules.version >= ServerVersion::V1_35 {
        if !sets.is_empty() && !devices.is_empty() {
            let why = "a slice has either sharedCounters or devices";
            errors.push(FieldError::invalid("spec", &Value::from(""), why));
        }
        at_most(sets, MAX_COUNTER_SETS, "spec.sharedCounters", errors);
    } else {
        let total: usize = sets.iter().map(|s| object(s, &["counters"]).map_or(0, Map::len)).sum();
        if total > MAX_COUNTERS_PER_SLICE {
            let why = format!("a slice has at most {MAX_COUNTERS_PER_SLICE} counters in all its sets");
            errors.push(FieldError::invalid("spec.sharedCounters", &Value::from(total), why));
        }
        check_local_counters(sets, devices, errors);
    }
    unique(sets.iter().map(|s| text(s, &["name"]).to_owned()).enumerate(), "spec.sharedCounters", errors);
    for (i, set) in sets.iter().enumerate() {
        let field = format!("spec.sharedCounters[{i}]");
        required_label(text(set, &["name"]), &format!("{field}.name"), errors);
        device::counters(set, &format!("{field}.counters"), errors);
    }
}

/// Up to 1.34 the counters that devices consume are in the same slice.
fn check_local_counters(sets: &[Value], devices: &[Value], errors: &mut Errors) {
    let known: BTreeMap<&str, Option<&Map<String, Value>>> =
        sets.iter().map(|s| (text(s, &["name"]), object(s, &["counters"]))).collect();
    let mut consumed = 0;
    for (i, device) in devices.iter().enumerate() {
        for (j, consumption) in list(device, &["consumesCounters"]).iter().enumerate() {
            let field = format!("spec.devices[{i}].consumesCounters[{j}]");
            let name = text(consumption, &["counterSet"]);
            let Some(counters) = known.get(name) else {
                let why = "this counter set is not in the slice";
                errors.push(FieldError::invalid(format!("{field}.counterSet"), &Value::from(name), why));
                continue;
            };
            for counter in object(consumption, &["counters"]).into_iter().flat_map(Map::keys) {
                consumed += 1;
                if counters.is_none_or(|c| !c.contains_key(counter)) {
                    let why = format!("this counter is not in the counter set {name}");
                    errors.push(FieldError::invalid(
                        format!("{field}.counters[{counter}]"),
                        &Value::from(counter.as_str()),
                        why,
                    ));
                }
            }
        }
    }
    if consumed > MAX_CONSUMED_PER_SLICE {
        let why = format!("the devices of a slice consume from at most {MAX_CONSUMED_PER_SLICE} counters");
        errors.push(FieldError::invalid("spec.devices", &Value::from(consumed), why));
    }
}

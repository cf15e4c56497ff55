//! Devices of slices, their attributes, capacities, taints and counters.

use serde_json::{Map, Value};

use super::{Errors, at_most, label, node_selector, qualified, required_label, unique};
use crate::error::FieldError;
use crate::options::{Gates, ServerVersion};
use crate::quantity::Quantity;
use crate::value::{list, object, text};

/// What the checks depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) version: ServerVersion,
    pub(super) gates: Gates,
}

const MAX_ATTRIBUTES_AND_CAPACITIES: usize = 32;
const MAX_ATTRIBUTE_VALUES: usize = 48;
const MAX_VALUE: usize = 64;
const MAX_COUNTERS: usize = 32;
const MAX_CONSUMPTIONS: usize = 2;
const LISTS: [&str; 4] = ["bools", "ints", "strings", "versions"];

pub(super) fn check(
    device: &Value,
    old: Option<&Value>,
    per_device: bool,
    rules: Rules,
    field: &str,
    errors: &mut Errors,
) {
    let shared = device.get("allowMultipleAllocations").and_then(Value::as_bool) == Some(true);
    label(text(device, &["name"]), &format!("{field}.name"), errors);
    let empty = Map::new();
    let attributes = object(device, &["attributes"]).unwrap_or(&empty);
    let capacity = object(device, &["capacity"]).unwrap_or(&empty);
    let count = attributes.len() + capacity.len();
    if count > MAX_ATTRIBUTES_AND_CAPACITIES {
        errors.push(FieldError::invalid(
            field,
            &Value::from(count),
            format!("attributes and capacities together are more than {MAX_ATTRIBUTES_AND_CAPACITIES}"),
        ));
    }
    let values: usize = attributes.values().map(attribute_values).sum();
    if values > MAX_ATTRIBUTE_VALUES {
        errors.push(FieldError::invalid(
            field,
            &Value::from(values),
            format!("attribute values are more than {MAX_ATTRIBUTE_VALUES}"),
        ));
    }
    for (name, attribute) in attributes {
        qualified(name, false, &format!("{field}.attributes"), errors);
        let field = format!("{field}.attributes[{name}]");
        check_attribute(attribute, &field, errors);
    }
    let same_capacity = old.is_some_and(|o| o.get("capacity") == device.get("capacity"));
    for (name, capacity) in capacity {
        qualified(name, false, &format!("{field}.capacity"), errors);
        let field = format!("{field}.capacity[{name}]");
        if !same_capacity {
            check_capacity(capacity, shared, rules, &field, errors);
        }
    }
    if old.is_none_or(|o| o.get("taints") != device.get("taints")) {
        let taints = list(device, &["taints"]);
        let max = if rules.version >= ServerVersion::V1_35 { 16 } else { 4 };
        if at_most(taints, max, &format!("{field}.taints"), errors) {
            for (i, t) in taints.iter().enumerate() {
                let none = rules.version >= ServerVersion::V1_35;
                taint(t, none, &format!("{field}.taints[{i}]"), errors);
            }
        }
    }
    check_consumption(device, rules, field, errors);
    check_node(device, per_device, field, errors);
    for (name, max) in [("bindingConditions", 4), ("bindingFailureConditions", 4)] {
        at_most(list(device, &[name]), max, &format!("{field}.{name}"), errors);
    }
    check_binding(device, field, errors);
}

/// Conditions to bind and conditions to give up come together.
fn check_binding(device: &Value, field: &str, errors: &mut Errors) {
    let empty = |name: &str| list(device, &[name]).is_empty();
    for (present, absent) in
        [("bindingConditions", "bindingFailureConditions"), ("bindingFailureConditions", "bindingConditions")]
    {
        if !empty(present) && empty(absent) {
            let why = format!("is needed together with {present}");
            errors.push(FieldError::invalid(format!("{field}.{absent}"), &Value::Null, why));
        }
    }
}

fn attribute_values(attribute: &Value) -> usize {
    let listed: usize = LISTS.iter().map(|l| list(attribute, &[l]).len()).sum();
    listed.max(1)
}

fn check_attribute(attribute: &Value, field: &str, errors: &mut Errors) {
    let kinds = ["int", "bool", "string", "version"];
    let set = kinds.iter().chain(LISTS.iter()).filter(|k| attribute.get(**k).is_some()).count();
    if set != 1 {
        errors.push(FieldError::invalid(field, attribute, "must have exactly one value"));
    }
    for (one, many) in [("string", "strings"), ("version", "versions")] {
        for value in attribute.get(one).into_iter().chain(list(attribute, &[many])) {
            if value.as_str().is_some_and(|s| s.len() > MAX_VALUE) {
                errors.push(FieldError::too_long(format!("{field}.{one}"), MAX_VALUE));
            }
        }
    }
    for value in attribute.get("version").into_iter().chain(list(attribute, &["versions"])) {
        if value.as_str().is_none_or(|v| semver::Version::parse(v).is_err()) {
            errors.push(FieldError::invalid(
                format!("{field}.version"),
                value,
                "must be a version as of semver 2.0.0",
            ));
        }
    }
}

fn check_capacity(capacity: &Value, shared: bool, rules: Rules, field: &str, errors: &mut Errors) {
    let Some(max) = capacity.get("value").and_then(Quantity::from_json) else {
        errors.push(FieldError::required(format!("{field}.value"), "must be a quantity"));
        return;
    };
    let Some(policy) = capacity.get("requestPolicy") else { return };
    let field = format!("{field}.requestPolicy");
    if !shared {
        errors.push(FieldError::forbidden(
            field,
            "only devices with allowMultipleAllocations have a request policy",
        ));
        return;
    }
    let default = policy.get("default").and_then(Quantity::from_json);
    let values = list(policy, &["validValues"]);
    let range = policy.get("validRange");
    match (values.is_empty(), range) {
        (false, Some(_)) => {
            errors.push(FieldError::forbidden(field, "validValues and validRange exclude each other"));
        }
        (true, None) => {}
        (false, None) => check_values(values, default, max, &field, errors),
        (true, Some(range)) => check_range(range, default, max, rules, &field, errors),
    }
}

fn check_values(
    values: &[Value],
    default: Option<Quantity>,
    max: Quantity,
    field: &str,
    errors: &mut Errors,
) {
    let Some(default) = default else {
        errors.push(FieldError::required(format!("{field}.default"), "needed with validValues"));
        return;
    };
    let field = format!("{field}.validValues");
    let parsed: Vec<Option<Quantity>> = if at_most(values, 10, &field, errors) {
        values.iter().map(Quantity::from_json).collect()
    } else {
        Vec::new()
    };
    for (i, value) in parsed.iter().enumerate() {
        let field = format!("{field}[{i}]");
        let Some(value) = value else {
            errors.push(FieldError::invalid(
                field,
                values.get(i).unwrap_or(&Value::Null),
                "must be a quantity",
            ));
            continue;
        };
        let before = i.checked_sub(1).and_then(|p| parsed.get(p)).copied().flatten();
        if before.is_some_and(|b| b > *value) {
            errors.push(FieldError::invalid(&field, &Value::from(value.to_string()), "values must ascend"));
        }
        if before.is_some_and(|b| b == *value) {
            errors.push(FieldError::duplicate(&field, &value.to_string()));
        }
        if *value > max {
            let why = format!("is larger than the capacity {max}");
            errors.push(FieldError::invalid(&field, &Value::from(value.to_string()), why));
        }
    }
    if !parsed.contains(&Some(default)) {
        let why = "the default is not among the valid values";
        errors.push(FieldError::invalid(&field, &Value::from(default.to_string()), why));
    }
}

fn check_range(
    range: &Value,
    default: Option<Quantity>,
    max: Quantity,
    rules: Rules,
    field: &str,
    errors: &mut Errors,
) {
    let Some(default) = default else {
        errors.push(FieldError::required(format!("{field}.default"), "needed with validRange"));
        return;
    };
    let field = format!("{field}.validRange");
    let part = |name: &str| range.get(name).and_then(Quantity::from_json);
    let Some(min) = part("min") else {
        errors.push(FieldError::required(format!("{field}.min"), "needed with validRange"));
        return;
    };
    let mut bad = |name: &str, value: Quantity, why: String| {
        errors.push(FieldError::invalid(format!("{field}.{name}"), &Value::from(value.to_string()), why));
    };
    if min > max {
        bad("min", min, format!("is larger than the capacity {max}"));
    }
    if default < min {
        bad("default", default, format!("is less than min {min}"));
    }
    let top = part("max");
    if let Some(top) = top {
        if min > top {
            bad("max", top, format!("is less than min {min}"));
        }
        if top > max {
            bad("max", top, format!("is larger than the capacity {max}"));
        }
        if default > top {
            bad("default", default, format!("is more than max {top}"));
        }
    }
    let Some(step) = part("step") else { return };
    if step.is_zero_or_less() {
        bad("step", step, "must be greater than zero".into());
        return;
    }
    if min.plus(step) > max {
        bad("step", step, format!("one step from min is larger than the capacity {max}"));
    }
    let parts = [Some(default), Some(min), top, Some(step)];
    if parts.iter().flatten().any(|q| q.is_negative()) {
        bad("step", step, "no part of a range with a step may be negative".into());
        return;
    }
    let fractional = parts.iter().flatten().any(|q| q.is_fractional());
    for value in [Some(default), top].into_iter().flatten() {
        let whole = if fractional && !rules.gates.fractional_capacity {
            // Older servers calculate with values rounded up to whole units.
            let step = step.units();
            step != 0 && (value.units() - min.units()) % step == 0
        } else {
            value.is_step_from(min, step)
        };
        if !whole {
            bad("step", value, format!("is not min {min} plus a multiple of step {step}"));
        }
    }
}

pub(super) fn taint(taint: &Value, none_allowed: bool, field: &str, errors: &mut Errors) {
    let key = text(taint, &["key"]);
    if !crate::names::is_qualified(key) {
        errors.push(FieldError::invalid(
            format!("{field}.key"),
            &Value::from(key),
            "must be a qualified name",
        ));
    }
    let value = text(taint, &["value"]);
    if !crate::names::is_label_value(value) {
        errors.push(FieldError::invalid(
            format!("{field}.value"),
            &Value::from(value),
            "must be a label value",
        ));
    }
    let known: &[&str] =
        if none_allowed { &["NoExecute", "NoSchedule", "None"] } else { &["NoExecute", "NoSchedule"] };
    match text(taint, &["effect"]) {
        "" => errors.push(FieldError::required(format!("{field}.effect"), "")),
        effect if !known.contains(&effect) => {
            errors.push(FieldError::not_supported(format!("{field}.effect"), effect, known));
        }
        _ => {}
    }
}

fn check_consumption(device: &Value, rules: Rules, field: &str, errors: &mut Errors) {
    let consumed = list(device, &["consumesCounters"]);
    let field = format!("{field}.consumesCounters");
    if rules.version >= ServerVersion::V1_35 {
        if !at_most(consumed, MAX_CONSUMPTIONS, &field, errors) {
            return;
        }
    } else {
        let total: usize = consumed.iter().map(|c| object(c, &["counters"]).map_or(0, Map::len)).sum();
        if total > MAX_COUNTERS {
            let why = format!("a device consumes from at most {MAX_COUNTERS} counters");
            errors.push(FieldError::invalid(&field, &Value::from(total), why));
        }
    }
    unique(consumed.iter().map(|c| text(c, &["counterSet"]).to_owned()).enumerate(), &field, errors);
    for (i, consumption) in consumed.iter().enumerate() {
        let field = format!("{field}[{i}]");
        required_label(text(consumption, &["counterSet"]), &format!("{field}.counterSet"), errors);
        counters(consumption, &format!("{field}.counters"), errors);
    }
}

/// A map of counters, as devices consume and sets provide them.
pub(super) fn counters(holder: &Value, field: &str, errors: &mut Errors) {
    let Some(map) = object(holder, &["counters"]).filter(|m| !m.is_empty()) else {
        errors.push(FieldError::required(field, ""));
        return;
    };
    if map.len() > MAX_COUNTERS {
        errors.push(FieldError::too_many(field, map.len(), MAX_COUNTERS));
        return;
    }
    for (name, counter) in map {
        label(name, field, errors);
        if counter.get("value").and_then(Quantity::from_json).is_none() {
            errors.push(FieldError::required(format!("{field}[{name}].value"), "must be a quantity"));
        }
    }
}

fn check_node(device: &Value, per_device: bool, field: &str, errors: &mut Errors) {
    let places = ["nodeName", "nodeSelector", "allNodes"];
    let set = places.iter().filter(|p| device.get(**p).is_some()).count();
    if per_device && set != 1 {
        errors.push(FieldError::required(
            field,
            "exactly one of nodeName, nodeSelector, allNodes is needed with perDeviceNodeSelection",
        ));
    }
    if !per_device && set > 0 {
        errors.push(FieldError::invalid(
            field,
            &Value::Null,
            "a device names nodes only with perDeviceNodeSelection",
        ));
    }
    if let Some(selector) = device.get("nodeSelector") {
        node_selector(selector, &format!("{field}.nodeSelector"), errors);
    }
}

//! ResourceClaims, their templates, and DeviceClasses.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{
    Errors, at_most, driver, immutable, label, node_selector, pool, qualified, raw_object, subdomain, unique,
};
use crate::api::ApiServer;
use crate::error::FieldError;
use crate::store::Key;
use crate::value::{at, list, text};

const MAX_ENTRIES: usize = 32;
const MAX_ALTERNATIVES: usize = 8;
const MAX_RESERVED: usize = 256;
const MAX_CONDITIONS: usize = 8;
const MAX_EXPRESSION: usize = 10 * 1024;
const ADMIN_LABEL: &str = "resource.kubernetes.io/admin-access";

/// Requests, and the alternatives of those that have them.
type Names = BTreeMap<String, BTreeSet<String>>;

fn request_names(spec: Option<&Value>) -> Names {
    spec.map(|s| list(s, &["devices", "requests"]))
        .unwrap_or_default()
        .iter()
        .map(|r| {
            let subs = list(r, &["firstAvailable"]).iter().map(|s| text(s, &["name"]).to_owned()).collect();
            (text(r, &["name"]).to_owned(), subs)
        })
        .collect()
}

fn known(names: &Names, reference: &str) -> bool {
    match reference.split_once('/') {
        None => names.contains_key(reference),
        Some((request, sub)) => names.get(request).is_some_and(|subs| subs.contains(sub)),
    }
}

fn references(holder: &Value, names: &Names, field: &str, errors: &mut Errors) {
    let requests = list(holder, &["requests"]);
    let field = format!("{field}.requests");
    if !at_most(requests, MAX_ENTRIES, &field, errors) {
        return;
    }
    for (i, r) in requests.iter().enumerate() {
        if !known(names, r.as_str().unwrap_or_default()) {
            errors.push(FieldError::invalid(format!("{field}[{i}]"), r, "is no request of this claim"));
        }
    }
    unique(requests.iter().map(|r| r.as_str().unwrap_or_default().to_owned()).enumerate(), &field, errors);
}

pub(super) fn check_spec(server: &ApiServer, spec: Option<&Value>, field: &str, errors: &mut Errors) {
    let nothing = Value::Null;
    let devices = spec.and_then(|s| s.get("devices")).unwrap_or(&nothing);
    let names = request_names(spec);
    let field = format!("{field}.devices");
    let requests = list(devices, &["requests"]);
    let requests_field = format!("{field}.requests");
    if at_most(requests, MAX_ENTRIES, &requests_field, errors) {
        for (i, request) in requests.iter().enumerate() {
            check_request(request, &format!("{requests_field}[{i}]"), errors);
        }
        unique(requests.iter().map(|r| text(r, &["name"]).to_owned()).enumerate(), &requests_field, errors);
    }
    let constraints = list(devices, &["constraints"]);
    if at_most(constraints, MAX_ENTRIES, &format!("{field}.constraints"), errors) {
        for (i, constraint) in constraints.iter().enumerate() {
            let field = format!("{field}.constraints[{i}]");
            references(constraint, &names, &field, errors);
            let attribute = |name: &str| at(constraint, &[name]).and_then(Value::as_str);
            match (attribute("matchAttribute"), attribute("distinctAttribute")) {
                (Some(name), None) => qualified(name, true, &format!("{field}.matchAttribute"), errors),
                (None, Some(name)) => qualified(name, true, &format!("{field}.distinctAttribute"), errors),
                (Some(_), Some(_)) => {
                    let why = "matchAttribute and distinctAttribute exclude each other";
                    errors.push(FieldError::invalid(field, constraint, why));
                }
                (None, None) if server.gates.consumable_capacity => {
                    errors.push(FieldError::required(field, "one of matchAttribute, distinctAttribute"));
                }
                (None, None) => errors.push(FieldError::required(format!("{field}.matchAttribute"), "")),
            }
        }
    }
    let config = list(devices, &["config"]);
    if at_most(config, MAX_ENTRIES, &format!("{field}.config"), errors) {
        for (i, entry) in config.iter().enumerate() {
            let field = format!("{field}.config[{i}]");
            references(entry, &names, &field, errors);
            check_opaque(entry, &field, errors);
        }
    }
}

fn check_request(request: &Value, field: &str, errors: &mut Errors) {
    label(text(request, &["name"]), &format!("{field}.name"), errors);
    let alternatives = list(request, &["firstAvailable"]);
    let choice = "exactly one of exactly, firstAvailable";
    match (request.get("exactly"), alternatives.is_empty()) {
        (None, true) => errors.push(FieldError::required(field, choice)),
        (Some(_), false) => errors.push(FieldError::invalid(field, &Value::Null, choice)),
        (Some(exactly), true) => check_exactly(exactly, &format!("{field}.exactly"), errors),
        (None, false) => {
            let field = format!("{field}.firstAvailable");
            if at_most(alternatives, MAX_ALTERNATIVES, &field, errors) {
                for (i, sub) in alternatives.iter().enumerate() {
                    let field = format!("{field}[{i}]");
                    label(text(sub, &["name"]), &format!("{field}.name"), errors);
                    check_exactly(sub, &field, errors);
                }
                unique(
                    alternatives.iter().map(|s| text(s, &["name"]).to_owned()).enumerate(),
                    &field,
                    errors,
                );
            }
        }
    }
}

fn check_exactly(request: &Value, field: &str, errors: &mut Errors) {
    subdomain(text(request, &["deviceClassName"]), &format!("{field}.deviceClassName"), errors);
    check_selectors(request, field, errors);
    let count = request.get("count").and_then(Value::as_i64).unwrap_or(0);
    let shown = Value::from(count);
    match text(request, &["allocationMode"]) {
        "All" if count != 0 => {
            errors.push(FieldError::invalid(
                format!("{field}.count"),
                &shown,
                "has no meaning with allocationMode All",
            ));
        }
        "All" => {}
        "ExactCount" if count <= 0 => {
            errors.push(FieldError::invalid(format!("{field}.count"), &shown, "must be greater than zero"));
        }
        "ExactCount" => {}
        other => errors.push(FieldError::not_supported(
            format!("{field}.allocationMode"),
            other,
            &["All", "ExactCount"],
        )),
    }
    // Sixteen are documented as the limit; the server takes more.
    for (i, toleration) in list(request, &["tolerations"]).iter().enumerate() {
        check_toleration(toleration, &format!("{field}.tolerations[{i}]"), errors);
    }
    for (name, amount) in
        at(request, &["capacity", "requests"]).and_then(Value::as_object).into_iter().flatten()
    {
        let field = format!("{field}.capacity.requests[{name}]");
        qualified(name, false, &field, errors);
        if crate::quantity::Quantity::from_json(amount).is_none() {
            errors.push(FieldError::invalid(field, amount, "must be a quantity"));
        }
    }
}

fn check_toleration(toleration: &Value, field: &str, errors: &mut Errors) {
    let key = text(toleration, &["key"]);
    if !key.is_empty() && !crate::names::is_qualified(key) {
        errors.push(FieldError::invalid(
            format!("{field}.key"),
            &Value::from(key),
            "must be a qualified name",
        ));
    }
    match text(toleration, &["operator"]) {
        "Exists" => {
            let value = text(toleration, &["value"]);
            if !value.is_empty() {
                let why = "must be empty with operator Exists";
                errors.push(FieldError::invalid(format!("{field}.value"), &Value::from(value), why));
            }
        }
        "Equal" => {}
        other => {
            errors.push(FieldError::not_supported(format!("{field}.operator"), other, &["Equal", "Exists"]))
        }
    }
    let effects = ["NoExecute", "NoSchedule", "None"];
    let effect = text(toleration, &["effect"]);
    if !effect.is_empty() && !effects.contains(&effect) {
        errors.push(FieldError::not_supported(format!("{field}.effect"), effect, &effects));
    }
}

/// Expressions are checked for presence and length; they are not compiled here.
fn check_selectors(holder: &Value, field: &str, errors: &mut Errors) {
    let selectors = list(holder, &["selectors"]);
    if !at_most(selectors, MAX_ENTRIES, &format!("{field}.selectors"), errors) {
        return;
    }
    for (i, selector) in selectors.iter().enumerate() {
        let field = format!("{field}.selectors[{i}].cel");
        let Some(cel) = selector.get("cel") else {
            errors.push(FieldError::required(field, ""));
            continue;
        };
        match text(cel, &["expression"]) {
            "" => {
                let why = "there is no expression to compile";
                errors.push(FieldError::invalid(format!("{field}.expression"), &Value::from(""), why));
            }
            e if e.len() > MAX_EXPRESSION => {
                errors.push(FieldError::too_long(format!("{field}.expression"), MAX_EXPRESSION));
            }
            _ => {}
        }
    }
}

fn check_opaque(holder: &Value, field: &str, errors: &mut Errors) {
    let Some(opaque) = holder.get("opaque") else {
        errors.push(FieldError::required(format!("{field}.opaque"), ""));
        return;
    };
    driver(text(opaque, &["driver"]), &format!("{field}.opaque.driver"), errors);
    raw_object(opaque.get("parameters"), true, &format!("{field}.opaque.parameters"), errors);
}

pub(super) fn check_class(class: &Value, errors: &mut Errors) {
    let spec = class.get("spec").unwrap_or(&Value::Null);
    check_selectors(spec, "spec", errors);
    let config = list(spec, &["config"]);
    if at_most(config, MAX_ENTRIES, "spec.config", errors) {
        for (i, entry) in config.iter().enumerate() {
            check_opaque(entry, &format!("spec.config[{i}]"), errors);
        }
    }
    if let Some(name) = spec.get("extendedResourceName") {
        let text = name.as_str().unwrap_or_default();
        let native = text.starts_with("kubernetes.io/") || text.starts_with("requests.");
        if !text.contains('/') || native || !crate::names::is_qualified(text) {
            let why = "must be the name of an extended resource, as in domain/name";
            errors.push(FieldError::invalid("spec.extendedResourceName", name, why));
        }
    }
}

fn admin_namespace(server: &ApiServer, object: &Value) -> bool {
    let name = text(object, &["metadata", "namespace"]);
    let namespace = server.store.get("namespaces", &Key::new("", name));
    namespace.is_some_and(|n| text(&n.object, &["metadata", "labels", ADMIN_LABEL]) == "true")
}

/// Admin access needs a namespace that is marked for it.
pub(super) fn check_admin(server: &ApiServer, object: &Value, spec: Option<&Value>, errors: &mut Errors) {
    let requests = spec.map(|s| list(s, &["devices", "requests"])).unwrap_or_default();
    for (i, request) in requests.iter().enumerate() {
        let asked = at(request, &["exactly", "adminAccess"]).and_then(Value::as_bool) == Some(true);
        if asked && !admin_namespace(server, object) {
            errors.push(FieldError::forbidden(
                format!("spec.devices.requests[{i}].adminAccess"),
                format!("admin access needs the label {ADMIN_LABEL}: \"true\" on the namespace"),
            ));
        }
    }
}

fn device_id(value: &Value) -> [String; 4] {
    ["driver", "pool", "device", "shareID"].map(|f| text(value, &[f]).to_owned())
}

pub(super) fn check_status(server: &ApiServer, old: &Value, new: &Value, errors: &mut Errors) {
    let allocation = at(new, &["status", "allocation"]);
    let before = at(old, &["status", "allocation"]);
    let results = allocation.map(|a| list(a, &["devices", "results"])).unwrap_or_default();
    check_reserved(old, new, allocation.is_some(), errors);
    check_device_status(new, results, errors);
    let admin = |r: &Value| r.get("adminAccess").and_then(Value::as_bool) == Some(true);
    let admin_before = before.is_some_and(|a| list(a, &["devices", "results"]).iter().any(admin));
    if !admin_before && results.iter().any(admin) && !admin_namespace(server, new) {
        for (i, _) in results.iter().enumerate().filter(|(_, r)| admin(r)) {
            errors.push(FieldError::forbidden(
                format!("status.allocation.devices.results[{i}].adminAccess"),
                format!("admin access needs the label {ADMIN_LABEL}: \"true\" on the namespace"),
            ));
        }
    }
    match (before, allocation) {
        (Some(_), Some(_)) => {
            immutable(old, new, &["status", "allocation"], "status.allocation", errors);
        }
        (None, Some(allocation)) => {
            check_allocation(allocation, &request_names(at(new, &["spec"])), errors);
        }
        _ => {}
    }
}

fn check_reserved(old: &Value, new: &Value, allocated: bool, errors: &mut Errors) {
    let field = "status.reservedFor";
    let reserved = list(new, &["status", "reservedFor"]);
    if at_most(reserved, MAX_RESERVED, field, errors) {
        for (i, entry) in reserved.iter().enumerate() {
            for part in ["resource", "name", "uid"] {
                if text(entry, &[part]).is_empty() {
                    errors.push(FieldError::required(format!("{field}[{i}].{part}"), ""));
                }
            }
        }
        unique(reserved.iter().map(|r| text(r, &["uid"]).to_owned()).enumerate(), field, errors);
    }
    if reserved.is_empty() {
        return;
    }
    if !allocated {
        errors.push(FieldError::forbidden(field, "may not be specified when `allocated` is not set"));
    }
    let deleting = at(new, &["metadata", "deletionTimestamp"]).is_some();
    let before = list(old, &["status", "reservedFor"]);
    if deleting && reserved.iter().any(|r| !before.contains(r)) {
        errors.push(FieldError::forbidden(field, "nothing may be added while the claim is being deleted"));
    }
}

fn check_device_status(new: &Value, results: &[Value], errors: &mut Errors) {
    let allocated: BTreeSet<[String; 4]> = results.iter().map(device_id).collect();
    let devices = list(new, &["status", "devices"]);
    for (i, device) in devices.iter().enumerate() {
        let field = format!("status.devices[{i}]");
        driver(text(device, &["driver"]), &format!("{field}.driver"), errors);
        pool(text(device, &["pool"]), &format!("{field}.pool"), errors);
        label(text(device, &["device"]), &format!("{field}.device"), errors);
        if !allocated.contains(&device_id(device)) {
            let shown = Value::from(device_id(device).join("/"));
            errors.push(FieldError::invalid(&field, &shown, "must be an allocated device in the claim"));
        }
        let conditions = list(device, &["conditions"]);
        if at_most(conditions, MAX_CONDITIONS, &format!("{field}.conditions"), errors) {
            for (j, c) in conditions.iter().enumerate() {
                for part in ["type", "status", "lastTransitionTime", "reason"] {
                    if text(c, &[part]).is_empty() {
                        errors.push(FieldError::required(format!("{field}.conditions[{j}].{part}"), ""));
                    }
                }
            }
        }
        raw_object(device.get("data"), false, &format!("{field}.data"), errors);
        at_most(list(device, &["networkData", "ips"]), 16, &format!("{field}.networkData.ips"), errors);
    }
    unique(devices.iter().map(|d| device_id(d).join("/")).enumerate(), "status.devices", errors);
}

fn check_allocation(allocation: &Value, names: &Names, errors: &mut Errors) {
    let field = "status.allocation.devices.results";
    let results = list(allocation, &["devices", "results"]);
    if at_most(results, MAX_ENTRIES, field, errors) {
        for (i, result) in results.iter().enumerate() {
            let field = format!("{field}[{i}]");
            let request = text(result, &["request"]);
            if !known(names, request) {
                let why = "is no request of this claim";
                errors.push(FieldError::invalid(format!("{field}.request"), &Value::from(request), why));
            }
            driver(text(result, &["driver"]), &format!("{field}.driver"), errors);
            pool(text(result, &["pool"]), &format!("{field}.pool"), errors);
            label(text(result, &["device"]), &format!("{field}.device"), errors);
            if let Some(share) = result.get("shareID") {
                let id = share.as_str().unwrap_or_default();
                let normal = uuid::Uuid::parse_str(id).is_ok_and(|u| u.hyphenated().to_string() == id);
                if !normal {
                    errors.push(FieldError::invalid(
                        format!("{field}.shareID"),
                        share,
                        "must be a lower-case UUID",
                    ));
                }
            }
            for (j, toleration) in list(result, &["tolerations"]).iter().enumerate() {
                check_toleration(toleration, &format!("{field}.tolerations[{j}]"), errors);
            }
        }
    }
    let field = "status.allocation.devices.config";
    let config = list(allocation, &["devices", "config"]);
    if at_most(config, 2 * MAX_ENTRIES, field, errors) {
        for (i, entry) in config.iter().enumerate() {
            let field = format!("{field}[{i}]");
            match text(entry, &["source"]) {
                "" => errors.push(FieldError::required(format!("{field}.source"), "")),
                "FromClaim" | "FromClass" => {}
                other => errors.push(FieldError::not_supported(
                    format!("{field}.source"),
                    other,
                    &["FromClaim", "FromClass"],
                )),
            }
            references(entry, names, &field, errors);
            check_opaque(entry, &field, errors);
        }
    }
    if let Some(selector) = allocation.get("nodeSelector") {
        node_selector(selector, "status.allocation.nodeSelector", errors);
    }
}

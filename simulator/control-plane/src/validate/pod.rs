//! Pods: claims, gates, and what of a pod may change.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Errors, label, unique};
use crate::error::FieldError;
use crate::value::{at, list, remove, text};

pub(super) fn create(pod: &Value, errors: &mut Errors) {
    let containers = list(pod, &["spec", "containers"]);
    if containers.is_empty() {
        errors.push(FieldError::required("spec.containers", ""));
    }
    let claims = list(pod, &["spec", "resourceClaims"]);
    let names: BTreeSet<&str> = claims.iter().map(|c| text(c, &["name"])).collect();
    for (i, claim) in claims.iter().enumerate() {
        let field = format!("spec.resourceClaims[{i}]");
        label(text(claim, &["name"]), &format!("{field}.name"), errors);
        let sources = ["resourceClaimName", "resourceClaimTemplateName"];
        let set = sources.iter().filter(|s| !text(claim, &[s]).is_empty()).count();
        if set != 1 {
            let why = "exactly one of resourceClaimName, resourceClaimTemplateName";
            errors.push(FieldError::invalid(field, claim, why));
        }
    }
    unique(claims.iter().map(|c| text(c, &["name"]).to_owned()).enumerate(), "spec.resourceClaims", errors);
    for kind in ["containers", "initContainers"] {
        let containers = list(pod, &["spec", kind]);
        let field = format!("spec.{kind}");
        for (i, container) in containers.iter().enumerate() {
            check_container(container, &names, &format!("{field}[{i}]"), errors);
        }
        unique(containers.iter().map(|c| text(c, &["name"]).to_owned()).enumerate(), &field, errors);
    }
    let gates = list(pod, &["spec", "schedulingGates"]);
    unique(gates.iter().map(|g| text(g, &["name"]).to_owned()).enumerate(), "spec.schedulingGates", errors);
    if !gates.is_empty() && !text(pod, &["spec", "nodeName"]).is_empty() {
        let why = "cannot be set until all schedulingGates have been cleared";
        errors.push(FieldError::forbidden("spec.nodeName", why));
    }
}

fn check_container(container: &Value, claims: &BTreeSet<&str>, field: &str, errors: &mut Errors) {
    label(text(container, &["name"]), &format!("{field}.name"), errors);
    let used = list(container, &["resources", "claims"]);
    for (i, claim) in used.iter().enumerate() {
        let name = text(claim, &["name"]);
        if !claims.contains(name) {
            errors.push(FieldError::not_found(format!("{field}.resources.claims[{i}]"), name));
        }
    }
    let id = |c: &Value| format!("{}/{}", text(c, &["name"]), text(c, &["request"]));
    unique(used.iter().map(id).enumerate(), &format!("{field}.resources.claims"), errors);
}

pub(super) fn update(old: &Value, new: &Value, errors: &mut Errors) {
    let before = list(old, &["spec", "schedulingGates"]);
    for (i, gate) in list(new, &["spec", "schedulingGates"]).iter().enumerate() {
        if !before.iter().any(|b| text(b, &["name"]) == text(gate, &["name"])) {
            let field = format!("spec.schedulingGates[{i}].name");
            errors.push(FieldError::forbidden(field, "gates may be taken away, none may be added"));
        }
    }
    if !errors.is_empty() {
        return;
    }
    let kept_tolerations =
        list(old, &["spec", "tolerations"]).iter().all(|t| list(new, &["spec", "tolerations"]).contains(t));
    if !kept_tolerations {
        errors.push(FieldError::forbidden("spec.tolerations", "tolerations may only be added"));
    }
    let gated = !before.is_empty();
    if gated {
        check_narrowing(old, new, errors);
    }
    if frozen(old, gated) != frozen(new, gated) {
        errors.push(FieldError::forbidden(
            "spec",
            "a pod's spec does not change, apart from images, tolerations, gates and deadlines",
        ));
    }
}

/// A gated pod may ask for more of its node, not for less.
fn check_narrowing(old: &Value, new: &Value, errors: &mut Errors) {
    let before = at(old, &["spec", "nodeSelector"]).and_then(Value::as_object);
    let after = at(new, &["spec", "nodeSelector"]).and_then(Value::as_object);
    let kept = before.into_iter().flatten().all(|(k, v)| after.and_then(|a| a.get(k)) == Some(v));
    if !kept {
        errors.push(FieldError::invalid("spec.nodeSelector", &Value::Null, "entries may only be added"));
    }
}

/// The parts of a spec that stay as they are.
fn frozen(pod: &Value, gated: bool) -> Value {
    let mut spec = pod.get("spec").cloned().unwrap_or(Value::Null);
    for field in ["schedulingGates", "tolerations", "activeDeadlineSeconds", "terminationGracePeriodSeconds"]
    {
        remove(&mut spec, &[field]);
    }
    if gated {
        remove(&mut spec, &["nodeSelector"]);
        remove(&mut spec, &["affinity", "nodeAffinity"]);
        if at(&spec, &["affinity"]).and_then(Value::as_object).is_some_and(serde_json::Map::is_empty) {
            remove(&mut spec, &["affinity"]);
        }
    }
    for kind in ["containers", "initContainers"] {
        for container in spec.get_mut(kind).and_then(Value::as_array_mut).into_iter().flatten() {
            remove(container, &["image"]);
        }
    }
    spec
}

pub(super) fn status(pod: &Value, errors: &mut Errors) {
    let names: BTreeSet<&str> =
        list(pod, &["spec", "resourceClaims"]).iter().map(|c| text(c, &["name"])).collect();
    for (i, status) in list(pod, &["status", "resourceClaimStatuses"]).iter().enumerate() {
        let name = text(status, &["name"]);
        if !names.contains(name) {
            errors.push(FieldError::invalid(
                format!("status.resourceClaimStatuses[{i}].name"),
                &Value::from(name),
                "must match the name of an entry in `spec.resourceClaims`",
            ));
        }
    }
}

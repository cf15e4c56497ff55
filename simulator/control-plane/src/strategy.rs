//! What each kind does to an object before it is stored: which fields a write may touch, what is
//! reset, what disabled gates drop, when the generation counts on.

mod gates;
mod pods;

use serde_json::{Value, json};

use crate::api::{ApiServer, Request};
use crate::error::ApiError;
use crate::kinds::Kind;
use crate::value::{at, list, now, put, remove, set, set_default, text};

/// The surroundings of one write.
pub(crate) struct Context<'a> {
    pub(crate) server: &'a ApiServer,
    pub(crate) request: &'a Request,
}

/// Prepares a new object.
pub(crate) fn prepare_create(context: &Context<'_>, new: &mut Value) -> Result<(), ApiError> {
    let kind: &Kind = &context.request.target.kind;
    set(new, &["metadata", "uid"], uuid::Uuid::new_v4().to_string());
    set(new, &["metadata", "creationTimestamp"], now());
    for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "resourceVersion"] {
        remove(new, &["metadata", field]);
    }
    if kind.generation {
        set(new, &["metadata", "generation"], 1);
    } else {
        remove(new, &["metadata", "generation"]);
    }
    // The kubelet registers its node with a status.
    if kind.status && !kind.is("", "nodes") {
        remove(new, &["status"]);
    }
    match (kind.group.as_str(), kind.plural.as_str()) {
        ("", "pods") => pods::prepare_create(context, new)?,
        ("", "namespaces") => {
            set(new, &["spec", "finalizers"], json!(["kubernetes"]));
            set(new, &["status", "phase"], "Active");
        }
        ("", "persistentvolumes" | "persistentvolumeclaims") => set(new, &["status", "phase"], "Pending"),
        ("apiextensions.k8s.io", _) => establish(new),
        ("resource.k8s.io", _) => {
            if kind.plural == "resourceclaims" {
                set(new, &["status"], json!({}));
            }
            gates::drop_disabled(context.server, kind, new, None);
        }
        _ => {}
    }
    Ok(())
}

/// Prepares a changed object.
pub(crate) fn prepare_update(context: &Context<'_>, old: &Value, new: &mut Value) -> Result<(), ApiError> {
    let request = context.request;
    let kind: &Kind = &request.target.kind;
    for field in [
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "name",
        "namespace",
    ] {
        put(new, &["metadata", field], at(old, &["metadata", field]).cloned());
    }
    if at(new, &["metadata", "generateName"]).is_none() {
        put(new, &["metadata", "generateName"], at(old, &["metadata", "generateName"]).cloned());
    }
    let subresource = request.target.subresource.as_str();
    match subresource {
        "status" => prepare_status(kind, old, new),
        // Binding sets a condition as well, finalizing a phase.
        "binding" | "eviction" | "finalize" => {}
        _ if kind.status => put(new, &["status"], at(old, &["status"]).cloned()),
        _ => {}
    }
    if subresource == "finalize" {
        return Ok(());
    }
    match (kind.group.as_str(), kind.plural.as_str()) {
        ("", "pods") => pods::prepare_update(old, new),
        ("", "namespaces") => {
            put(new, &["spec", "finalizers"], at(old, &["spec", "finalizers"]).cloned());
        }
        ("apiextensions.k8s.io", _) if subresource.is_empty() => establish(new),
        ("resource.k8s.io", plural) => {
            if plural == "resourceclaims" && subresource == "status" {
                gates::drop_deallocated_devices(old, new);
            }
            gates::drop_disabled(context.server, kind, new, Some(old));
        }
        _ => {}
    }
    if kind.generation && subresource.is_empty() && spec_changed(kind, old, new) {
        let generation = at(old, &["metadata", "generation"]).and_then(Value::as_i64).unwrap_or(0);
        set(new, &["metadata", "generation"], generation + 1);
    }
    Ok(())
}

/// A status write leaves everything else as it is.
fn prepare_status(kind: &Kind, old: &Value, new: &mut Value) {
    put(new, &["spec"], at(old, &["spec"]).cloned());
    // Pods and nodes let a status write change labels and annotations; the others do not.
    if kind.is("", "pods") {
        put(new, &["metadata", "ownerReferences"], at(old, &["metadata", "ownerReferences"]).cloned());
        return;
    }
    if kind.is("", "nodes") {
        return;
    }
    for field in ["labels", "annotations", "finalizers", "ownerReferences"] {
        put(new, &["metadata", field], at(old, &["metadata", field]).cloned());
    }
    if kind.custom {
        let status = new.get("status").cloned();
        let managed = at(new, &["metadata", "managedFields"]).cloned();
        let version = at(new, &["metadata", "resourceVersion"]).cloned();
        let mut out = old.clone();
        put(&mut out, &["status"], status);
        put(&mut out, &["metadata", "managedFields"], managed);
        put(&mut out, &["metadata", "resourceVersion"], version);
        *new = out;
    }
}

fn spec_changed(kind: &Kind, old: &Value, new: &Value) -> bool {
    if kind.custom || at(old, &["spec"]).is_none() {
        let strip = |v: &Value| {
            let mut v = v.clone();
            for part in ["metadata", "status", "kind", "apiVersion"] {
                remove(&mut v, &[part]);
            }
            v
        };
        return strip(old) != strip(new);
    }
    old.get("spec") != new.get("spec")
}

/// A definition is served at once.
fn establish(crd: &mut Value) {
    let names = at(crd, &["spec", "names"]).cloned().unwrap_or_else(|| json!({}));
    let plural = text(&names, &["plural"]).to_owned();
    let mut names = names;
    let singular = text(&names, &["kind"]).to_lowercase();
    set_default(&mut names, &["singular"], singular);
    let list_kind = format!("{}List", text(&names, &["kind"]));
    set_default(&mut names, &["listKind"], list_kind);
    set(crd, &["spec", "names"], names.clone());
    set_default(crd, &["spec", "conversion"], json!({"strategy": "None"}));
    let stored: Vec<Value> = list(crd, &["spec", "versions"])
        .iter()
        .filter(|v| v.get("storage").and_then(Value::as_bool) == Some(true))
        .filter_map(|v| v.get("name").cloned())
        .collect();
    let condition = |kind: &str, reason: &str, message: &str| json!({"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()});
    if at(crd, &["status", "conditions"]).is_none() && !plural.is_empty() {
        set(
            crd,
            &["status"],
            json!({
                "acceptedNames": names,
                "storedVersions": stored,
                "conditions": [
                    condition("NamesAccepted", "NoConflicts", "no conflicts found"),
                    condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
                ],
            }),
        );
    }
}

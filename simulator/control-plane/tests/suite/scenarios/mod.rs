//! Requests whose answers are compared with those of a real API server.

use aliquot_control_plane::ServerVersion;
use serde_json::{Value, json};

mod claims;
mod objects;
mod pods;
mod slices;

/// One request.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    pub(crate) content_type: &'static str,
    pub(crate) body: Value,
}

/// Requests that build on each other, in a namespace of their own.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) steps: Vec<Step>,
    /// Differences that are known and written down in README.md.
    pub(crate) accepted: Vec<&'static str>,
}

pub(crate) const JSON: &str = "application/json";
pub(crate) const MERGE: &str = "application/merge-patch+json";
pub(crate) const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub(crate) const JSON_PATCH: &str = "application/json-patch+json";
pub(crate) const APPLY: &str = "application/apply-patch+yaml";

pub(crate) fn step(
    name: &'static str,
    method: &'static str,
    path: &'static str,
    content_type: &'static str,
    body: Value,
) -> Step {
    Step { name, method, path, content_type, body }
}

pub(crate) fn get(name: &'static str, path: &'static str) -> Step {
    step(name, "GET", path, JSON, Value::Null)
}

/// Goes on once this can be read.
pub(crate) fn wait(path: &'static str) -> Step {
    step("wait", "WAIT", path, JSON, Value::Null)
}

pub(crate) fn post(name: &'static str, path: &'static str, body: Value) -> Step {
    step(name, "POST", path, JSON, body)
}

pub(crate) fn put(name: &'static str, path: &'static str, body: Value) -> Step {
    step(name, "PUT", path, JSON, body)
}

pub(crate) fn delete(name: &'static str, path: &'static str, body: Value) -> Step {
    step(name, "DELETE", path, JSON, body)
}

pub(crate) fn patch(name: &'static str, path: &'static str, kind: &'static str, body: Value) -> Step {
    step(name, "PATCH", path, kind, body)
}

pub(crate) fn namespace(name: &str) -> Step {
    post(
        "namespace",
        "/api/v1/namespaces",
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}),
    )
}

pub(crate) fn all(version: ServerVersion) -> Vec<Scenario> {
    let mut all = objects::all();
    all.extend(pods::all());
    all.extend(claims::all(version));
    all.extend(slices::all(version));
    all
}

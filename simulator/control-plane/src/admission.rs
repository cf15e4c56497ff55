//! Calls of admission webhooks.
//!
//! Mutating ones first, in the order of their configurations' names, then validating ones.
//! Rules, selectors, match conditions, failure policies and timeouts hold as on the real server;
//! no webhook is called a second time for what a later one has changed.

mod call;
mod conditions;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::api::{ApiServer, Request};
use crate::error::ApiError;
use crate::patch::json_patch;
use crate::selector::Selector;
use crate::store::Key;
use crate::value::{at, list, text};

/// Calls at a time, a connection each. The real server shares connections between calls; a webhook that bounds how many
/// a peer has must not meet more of them here.
const CALLS: usize = 64;

/// What is done to the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Create,
    Update,
    Delete,
}

impl Operation {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
        }
    }
}

const MUTATING: &str = "mutatingwebhookconfigurations.admissionregistration.k8s.io";
const VALIDATING: &str = "validatingwebhookconfigurations.admissionregistration.k8s.io";

/// Calls the webhooks that are configured.
pub(crate) struct Admission {
    services: BTreeMap<String, SocketAddr>,
    calls: Semaphore,
}

/// One change on its way in.
struct Change<'a> {
    request: &'a Request,
    operation: Operation,
    object: Option<&'a Value>,
    old: Option<&'a Value>,
}

impl Admission {
    pub(crate) const fn new(services: BTreeMap<String, SocketAddr>) -> Self {
        Self { services, calls: Semaphore::const_new(CALLS) }
    }

    /// Lets the mutating webhooks change an object.
    pub(crate) async fn mutate(
        &self,
        server: &ApiServer,
        request: &Request,
        operation: Operation,
        new: &mut Value,
        old: Option<&Value>,
    ) -> Result<(), ApiError> {
        for hook in hooks(server, request, MUTATING) {
            let change = Change { request, operation, object: Some(new), old };
            if !matches(server, &hook, &change) {
                continue;
            }
            let Some(response) = self.review(&hook, &change).await? else { continue };
            let patch = text(&response, &["patch"]);
            if patch.is_empty() {
                continue;
            }
            let wrong = |why: String| {
                ApiError::internal(format!("admission webhook {:?}: {why}", text(&hook, &["name"])))
            };
            let bytes = STANDARD.decode(patch).map_err(|e| wrong(format!("its patch is not base64: {e}")))?;
            let patch: Value =
                serde_json::from_slice(&bytes).map_err(|e| wrong(format!("its patch is not JSON: {e}")))?;
            *new = json_patch(new, &patch).map_err(|e| wrong(e.message))?;
            crate::value::normalise(new);
            crate::defaults::apply(&request.target.kind, new);
        }
        Ok(())
    }

    /// Asks the validating webhooks.
    pub(crate) async fn validate(
        &self,
        server: &ApiServer,
        request: &Request,
        operation: Operation,
        new: Option<&Value>,
        old: Option<&Value>,
    ) -> Result<(), ApiError> {
        let change = Change { request, operation, object: new, old };
        for hook in hooks(server, request, VALIDATING) {
            if matches(server, &hook, &change) {
                self.review(&hook, &change).await?;
            }
        }
        Ok(())
    }

    /// The response of one webhook; `None` when it failed and that is to be ignored.
    async fn review(&self, hook: &Value, change: &Change<'_>) -> Result<Option<Value>, ApiError> {
        let name = text(hook, &["name"]);
        let uid = uuid::Uuid::new_v4().to_string();
        let review = admission_review(&uid, change);
        match conditions::hold(hook, &review) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(why) => return failed(hook, &why),
        }
        // It is never closed.
        let place = self.calls.acquire().await;
        let answer = call::call(hook, &self.services, &review).await;
        drop(place);
        match answer {
            Ok(answer) => {
                let response = answer.get("response").cloned().unwrap_or(Value::Null);
                if text(&response, &["uid"]) != uid {
                    return failed(hook, "the response is not for this request");
                }
                if response.get("allowed").and_then(Value::as_bool) == Some(true) {
                    return Ok(Some(response));
                }
                Err(denied(name, &response))
            }
            Err(error) => failed(hook, &error.to_string()),
        }
    }
}

fn denied(name: &str, response: &Value) -> ApiError {
    let message = match (text(response, &["status", "message"]), text(response, &["status", "reason"])) {
        ("", "") => format!("admission webhook \"{name}\" denied the request without explanation"),
        ("", reason) => format!("admission webhook \"{name}\" denied the request: {reason}"),
        (message, _) => format!("admission webhook \"{name}\" denied the request: {message}"),
    };
    let code = at(response, &["status", "code"]).and_then(Value::as_u64).and_then(|c| u16::try_from(c).ok());
    let reason = match text(response, &["status", "reason"]) {
        "" if code.is_none() => "Forbidden",
        other => other,
    };
    ApiError::new(code.filter(|c| *c >= 400).unwrap_or(403), reason, message)
}

fn failed(hook: &Value, why: &str) -> Result<Option<Value>, ApiError> {
    let name = text(hook, &["name"]);
    if text(hook, &["failurePolicy"]) == "Ignore" {
        tracing::warn!(webhook = name, why, "failed, and is ignored as its policy says");
        return Ok(None);
    }
    Err(ApiError::internal(format!("Internal error occurred: failed calling webhook \"{name}\": {why}")))
}

/// All webhooks of one kind, in order.
fn hooks(server: &ApiServer, request: &Request, table: &str) -> Vec<Value> {
    // The configurations themselves are never subject to webhooks.
    if request.target.kind.group == "admissionregistration.k8s.io" {
        return Vec::new();
    }
    let configurations = server.store.list(table, "").items;
    configurations.iter().flat_map(|(_, s)| list(&s.object, &["webhooks"]).to_vec()).collect()
}

fn matches(server: &ApiServer, hook: &Value, change: &Change<'_>) -> bool {
    list(hook, &["rules"]).iter().any(|r| rule_matches(r, change))
        && namespace_matches(server, hook, change)
        && object_matches(hook, change)
}

fn rule_matches(rule: &Value, change: &Change<'_>) -> bool {
    let target = &change.request.target;
    let any = |field: &str, value: &str| {
        list(rule, &[field]).iter().filter_map(Value::as_str).any(|v| v == "*" || v == value)
    };
    let resource = list(rule, &["resources"]).iter().filter_map(Value::as_str).any(|r| {
        let (plural, sub) = r.split_once('/').unwrap_or((r, ""));
        (plural == "*" || plural == target.kind.plural) && (sub == "*" || sub == target.subresource)
    });
    let scope = match text(rule, &["scope"]) {
        "Namespaced" => target.kind.namespaced,
        "Cluster" => !target.kind.namespaced,
        _ => true,
    };
    any("operations", change.operation.as_str())
        && any("apiGroups", &target.kind.group)
        && any("apiVersions", &target.version)
        && resource
        && scope
}

fn namespace_matches(server: &ApiServer, hook: &Value, change: &Change<'_>) -> bool {
    let selector = Selector::from_label_selector(hook.get("namespaceSelector"));
    let target = &change.request.target;
    if target.kind.is("", "namespaces") {
        return change.object.or(change.old).is_some_and(|o| selector.matches(o));
    }
    if !target.kind.namespaced {
        return true;
    }
    let namespace = server.store.get("namespaces", &Key::new("", &target.namespace));
    namespace.is_some_and(|n| selector.matches(&n.object))
}

fn object_matches(hook: &Value, change: &Change<'_>) -> bool {
    let selector = Selector::from_label_selector(hook.get("objectSelector"));
    change.object.into_iter().chain(change.old).any(|o| selector.matches(o))
}

fn admission_review(uid: &str, change: &Change<'_>) -> Value {
    let request = change.request;
    let target = &request.target;
    let kind = &target.kind;
    let gvk = json!({"group": kind.group, "version": target.version, "kind": kind.kind});
    let gvr = json!({"group": kind.group, "version": target.version, "resource": kind.plural});
    let shown = |object: Option<&Value>| {
        object.map(|o| crate::api::show(&Arc::new(o.clone()), kind, &target.version).as_ref().clone())
    };
    let name = change.object.or(change.old).map_or("", |o| text(o, &["metadata", "name"]));
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": uid,
            "kind": gvk, "resource": gvr, "subResource": target.subresource,
            "requestKind": gvk, "requestResource": gvr, "requestSubResource": target.subresource,
            "name": name,
            "namespace": target.namespace,
            "operation": change.operation.as_str(),
            "userInfo": {"username": request.caller.user, "groups": ["system:authenticated"]},
            "object": shown(change.object),
            "oldObject": shown(change.old),
            "dryRun": request.dry_run,
            "options": null,
        },
    })
}

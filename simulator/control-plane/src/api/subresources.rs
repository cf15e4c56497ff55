//! Subresources that are actions: `pods/binding`, `pods/eviction`.

use serde_json::{Value, json};

use super::delete::stamp;
use super::{ApiServer, DeleteOptions, Request};
use crate::error::ApiError;
use crate::value::{at, entry, list, object, set, text};

impl ApiServer {
    /// POST to a subresource that is an action.
    pub(crate) async fn act(&self, request: &Request, body: Value) -> Result<Value, ApiError> {
        let kind = &request.target.kind;
        match request.target.subresource.as_str() {
            "binding" if kind.is("", "pods") => self.bind(request, &body).await,
            "eviction" if kind.is("", "pods") => self.evict(request, &body).await,
            other => Err(ApiError::method_not_allowed(&format!("POST to {}/{other}", kind.plural))),
        }
    }

    async fn bind(&self, request: &Request, body: &Value) -> Result<Value, ApiError> {
        let target = &request.target;
        let node = text(body, &["target", "name"]).to_owned();
        if node.is_empty() {
            return Err(ApiError::new(500, "", "target.name: Required value"));
        }
        let uid = text(body, &["metadata", "uid"]).to_owned();
        let annotations = object(body, &["metadata", "annotations"]).cloned().unwrap_or_default();
        let refuse = |why: String| ApiError::conflict(&target.kind, &target.name, &why);
        self.modify(request, |pod| {
            let real = text(pod, &["metadata", "uid"]);
            if !uid.is_empty() && uid != real {
                return Err(refuse(format!(
                    "Precondition failed: UID in precondition: {uid}, UID in object meta: {real}"
                )));
            }
            if at(pod, &["metadata", "deletionTimestamp"]).is_some() {
                return Err(refuse(format!(
                    "pod {} is being deleted, cannot be assigned to a host",
                    target.name
                )));
            }
            let bound = text(pod, &["spec", "nodeName"]);
            if !bound.is_empty() {
                return Err(refuse(format!("pod {} is already assigned to node {bound:?}", target.name)));
            }
            if !list(pod, &["spec", "schedulingGates"]).is_empty() {
                return Err(refuse(format!("pod {} has non-empty .spec.schedulingGates", target.name)));
            }
            let mut new = pod.clone();
            set(&mut new, &["spec", "nodeName"], node.clone());
            for (name, value) in &annotations {
                set(&mut new, &["metadata", "annotations", name], value.clone());
            }
            set_condition(&mut new, json!({"type": "PodScheduled", "status": "True"}));
            Ok(new)
        })
        .await?;
        Ok(created_status())
    }

    async fn evict(&self, request: &Request, body: &Value) -> Result<Value, ApiError> {
        let mut inner = request.clone();
        inner.target.subresource = String::new();
        inner.verb = "delete";
        let options = body.get("deleteOptions").map(DeleteOptions::parse).unwrap_or_default();
        self.modify(request, |pod| {
            // Before anything is written: another pod may have the name by now.
            options.check(&request.target, pod)?;
            let mut new = pod.clone();
            let condition = json!({
                "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting",
            });
            set_condition(&mut new, condition);
            Ok(new)
        })
        .await?;
        // What was just written has another version.
        self.delete(&inner, &DeleteOptions { resource_version: None, ..options }).await?;
        Ok(created_status())
    }
}

fn created_status() -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})
}

/// Sets a condition, with the time of its last transition.
pub(crate) fn set_condition(object: &mut Value, mut condition: Value) {
    let kind = text(&condition, &["type"]).to_owned();
    let conditions = entry(object, &["status", "conditions"]);
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    let Some(items) = conditions.as_array_mut() else { return };
    let place = items.iter().position(|c| text(c, &["type"]) == kind);
    let old = place.and_then(|p| items.get(p));
    let same_status = old.is_some_and(|o| text(o, &["status"]) == text(&condition, &["status"]));
    let time = match old {
        Some(old) if same_status => text(old, &["lastTransitionTime"]).to_owned(),
        _ => stamp(),
    };
    set(&mut condition, &["lastTransitionTime"], time);
    match place.and_then(|p| items.get_mut(p)) {
        Some(slot) => *slot = condition,
        None => items.push(condition),
    }
}

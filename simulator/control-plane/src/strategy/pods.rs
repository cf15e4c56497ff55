//! What the server does to pods.

use serde_json::{Value, json};

use super::Context;
use crate::api::ApiServer;
use crate::error::ApiError;
use crate::store::Key;
use crate::value::{at, entry, list, now, put, set, set_default, text};

pub(crate) fn prepare_create(context: &Context<'_>, pod: &mut Value) -> Result<(), ApiError> {
    set(pod, &["status", "phase"], "Pending");
    let class = qos_class(pod);
    set(pod, &["status", "qosClass"], class);
    if !list(pod, &["spec", "schedulingGates"]).is_empty() {
        let condition = json!({
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
            "lastTransitionTime": now(),
        });
        set(pod, &["status", "conditions"], json!([condition]));
    }
    // What admission plugins add on a default cluster.
    set_default(pod, &["spec", "serviceAccountName"], "default");
    tolerate_lost_nodes(pod);
    set_priority(context.server, context, pod)
}

/// Pods stay for five minutes on a node that does not answer.
fn tolerate_lost_nodes(pod: &mut Value) {
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        let covered = list(pod, &["spec", "tolerations"]).iter().any(|t| {
            let for_key = text(t, &["key"]) == key || text(t, &["key"]).is_empty();
            for_key && matches!(text(t, &["effect"]), "NoExecute" | "")
        });
        if !covered {
            let slot = entry(pod, &["spec", "tolerations"]);
            if !slot.is_array() {
                *slot = json!([]);
            }
            if let Some(items) = slot.as_array_mut() {
                items.push(json!({
                    "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300,
                }));
            }
        }
    }
}

pub(crate) fn prepare_update(old: &Value, new: &mut Value) {
    // Set by the server for life.
    put(new, &["status", "qosClass"], at(old, &["status", "qosClass"]).cloned());
}

fn set_priority(server: &ApiServer, context: &Context<'_>, pod: &mut Value) -> Result<(), ApiError> {
    let name = text(pod, &["spec", "priorityClassName"]).to_owned();
    let class = match name.as_str() {
        "" => server
            .store
            .list("priorityclasses.scheduling.k8s.io", "")
            .items
            .into_iter()
            .map(|(_, s)| s.object)
            .find(|c| c.get("globalDefault").and_then(Value::as_bool) == Some(true)),
        name => match server.store.get("priorityclasses.scheduling.k8s.io", &Key::new("", name)) {
            Some(stored) => Some(stored.object),
            None => {
                return Err(ApiError::forbidden(
                    &context.request.target.kind,
                    text(pod, &["metadata", "name"]),
                    &format!("no PriorityClass with name {name} was found"),
                ));
            }
        },
    };
    let value = class.as_ref().and_then(|c| c.get("value")).and_then(Value::as_i64).unwrap_or(0);
    let policy = class.as_ref().map_or("", |c| text(c, &["preemptionPolicy"]));
    if let Some(class) = &class {
        set(pod, &["spec", "priorityClassName"], text(class, &["metadata", "name"]));
    }
    set(pod, &["spec", "priority"], value);
    set_default(
        pod,
        &["spec", "preemptionPolicy"],
        if policy.is_empty() { "PreemptLowerPriority" } else { policy },
    );
    Ok(())
}

/// Best effort without requests and limits, guaranteed with equal ones everywhere.
fn qos_class(pod: &Value) -> &'static str {
    let containers: Vec<&Value> =
        list(pod, &["spec", "containers"]).iter().chain(list(pod, &["spec", "initContainers"])).collect();
    let part = |c: &Value, which: &str, what: &str| at(c, &["resources", which, what]).cloned();
    let any = containers.iter().any(|c| {
        ["requests", "limits"].iter().any(|w| ["cpu", "memory"].iter().any(|r| part(c, w, r).is_some()))
    });
    let all_equal = containers.iter().all(|c| {
        ["cpu", "memory"].iter().all(|r| {
            let limit = part(c, "limits", r);
            let request = part(c, "requests", r).or_else(|| limit.clone());
            limit.is_some() && limit == request
        })
    });
    if !any {
        "BestEffort"
    } else if all_equal {
        "Guaranteed"
    } else {
        "Burstable"
    }
}

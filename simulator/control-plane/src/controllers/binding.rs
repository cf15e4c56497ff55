//! Binds pods to nodes, as kube-scheduler does when somebody else allocates.
//!
//! A pod is bound when it has no gates, all its claims are allocated, and a node is left that
//! fits it and them; the pod is first added to `reservedFor` where it is missing. If no node is
//! left, a claim of which only this pod can be the user is deallocated, as kube-scheduler does.
//! Nothing is ever allocated here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};

use super::nodes::{Misfit, misfit, selector_matches};
use super::{
    CLAIMS, Controller, claim, is, is_deleting, is_reserved_for, key_of, owning_pod, pod, pod_claims,
    request, reserve, uid, uses_claim,
};
use crate::api::{ApiServer, set_condition};
use crate::audit::AuditEntry;
use crate::error::ApiError;
use crate::options::Controllers;
use crate::store::Key;
use crate::value::{at, list, remove, text};

const USER: &str = "system:kube-scheduler";
const MAX_RESERVED: usize = 256;

/// The pods that wait for a node, and those that have one.
#[derive(Default)]
pub(super) struct Binding {
    waiting: BTreeSet<Key>,
    bound: BTreeMap<String, BTreeMap<Key, Arc<Value>>>,
    place: BTreeMap<Key, String>,
}

impl Binding {
    /// Keeps the index of bound pods; true when a node has room that it had not.
    fn note(&mut self, key: &Key, pod: Option<&Arc<Value>>) -> bool {
        let before = self.place.remove(key);
        if let Some(pods) = before.as_ref().and_then(|n| self.bound.get_mut(n)) {
            pods.remove(key);
        }
        let running = pod.filter(|p| {
            !text(p, &["spec", "nodeName"]).is_empty()
                && !matches!(text(p, &["status", "phase"]), "Succeeded" | "Failed")
        });
        if let Some(pod) = running {
            let node = text(pod, &["spec", "nodeName"]).to_owned();
            self.bound.entry(node.clone()).or_default().insert(key.clone(), Arc::clone(pod));
            self.place.insert(key.clone(), node);
        }
        before.is_some() && running.is_none()
    }
}

impl Controller for Binding {
    /// Higher priority first, older first.
    type Item = (std::cmp::Reverse<i64>, String, Key);

    fn enabled(switches: Controllers) -> bool {
        switches.binding
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn affected(&mut self, api: &ApiServer, entry: &AuditEntry, queue: &mut BTreeSet<Self::Item>) {
        if is(entry, "", "pods") {
            let key = key_of(entry);
            let freed = self.note(&key, entry.after.as_ref());
            if entry.after.as_deref().is_some_and(wants_node) {
                self.waiting.insert(key.clone());
                queue.extend(item(api, &key));
            } else {
                self.waiting.remove(&key);
            }
            if freed {
                queue.extend(self.waiting.iter().filter_map(|k| item(api, k)));
            }
        } else if is(entry, "", "nodes") {
            queue.extend(self.waiting.iter().filter_map(|k| item(api, k)));
        } else if is(entry, CLAIMS.0, CLAIMS.1) {
            let users = self.waiting.iter().filter(|k| {
                k.namespace == entry.namespace && pod(api, k).is_some_and(|p| uses_claim(&p, &entry.name))
            });
            queue.extend(users.filter_map(|k| item(api, k)));
        }
    }

    async fn sync(&mut self, api: &ApiServer, item: &Self::Item) -> Result<(), ApiError> {
        let key = &item.2;
        let Some(pod) = pod(api, key).filter(|p| wants_node(p)) else { return Ok(()) };
        let claims = match gather(api, key, &pod) {
            Ok(claims) => claims,
            Err(why) => return unschedulable(api, key, &pod, &why).await,
        };
        match self.choose(api, &pod, &claims) {
            Ok(node) => {
                for claim in claims.iter().filter(|c| !is_reserved_for(c, &pod)) {
                    let claim = Key::new(&key.namespace, text(claim, &["metadata", "name"]));
                    reserve(api, USER, &claim, &pod).await?;
                }
                bind(api, key, &pod, &node).await?;
                let now = super::pod(api, key);
                self.note(key, now.as_ref());
                Ok(())
            }
            Err(reasons) => {
                if reasons.contains_key(&Misfit::Claim)
                    && let Some(claim) = claims.iter().find(|c| only_for(c, &pod))
                {
                    deallocate(api, key, claim).await?;
                }
                unschedulable(api, key, &pod, &describe(api, &reasons)).await
            }
        }
    }
}

fn item(api: &ApiServer, key: &Key) -> Option<(std::cmp::Reverse<i64>, String, Key)> {
    let pod = pod(api, key)?;
    let priority = at(&pod, &["spec", "priority"]).and_then(Value::as_i64).unwrap_or(0);
    Some((
        std::cmp::Reverse(priority),
        text(&pod, &["metadata", "creationTimestamp"]).to_owned(),
        key.clone(),
    ))
}

fn wants_node(pod: &Value) -> bool {
    text(pod, &["spec", "nodeName"]).is_empty()
        && list(pod, &["spec", "schedulingGates"]).is_empty()
        && !is_deleting(pod)
        && text(pod, &["spec", "schedulerName"]) == "default-scheduler"
        && !matches!(text(pod, &["status", "phase"]), "Succeeded" | "Failed")
}

/// The pod's claims, all allocated, or what is missing.
fn gather(api: &ApiServer, key: &Key, pod: &Value) -> Result<Vec<Arc<Value>>, String> {
    let mut claims = Vec::new();
    for (local, name) in pod_claims(pod) {
        let Some(name) = name else {
            return Err(format!("waiting for resource claim {local:?} to be created from its template"));
        };
        let Some(claim) = claim(api, &key.namespace, &name) else {
            return Err(format!("waiting for resource claim {name:?} to be created"));
        };
        if is_deleting(&claim) {
            return Err(format!("resource claim {name:?} is being deleted"));
        }
        let generated = list(pod, &["status", "resourceClaimStatuses"])
            .iter()
            .any(|s| text(s, &["resourceClaimName"]) == name);
        if generated && owning_pod(&claim).is_none_or(|(_, owner)| owner != uid(pod)) {
            return Err(format!("resource claim {name:?} was not made for this pod"));
        }
        if at(&claim, &["status", "allocation"]).is_none() {
            return Err(format!("waiting for resource claim {name:?} to be allocated"));
        }
        let full = list(&claim, &["status", "reservedFor"]).len() >= MAX_RESERVED;
        if full && !is_reserved_for(&claim, pod) {
            return Err(format!("resource claim {name:?} is reserved for as many pods as possible"));
        }
        claims.push(claim);
    }
    Ok(claims)
}

impl Binding {
    /// The fitting node with the fewest pods, or what is wrong with how many.
    fn choose(
        &self,
        api: &ApiServer,
        pod: &Value,
        claims: &[Arc<Value>],
    ) -> Result<String, BTreeMap<Misfit, usize>> {
        let nobody = BTreeMap::new();
        let mut reasons = BTreeMap::new();
        let mut best: Option<(usize, String)> = None;
        for (node_key, node) in api.store.list("nodes", "").items {
            let here = self.bound.get(&node_key.name).unwrap_or(&nobody);
            let excluded = claims.iter().any(|c| {
                at(c, &["status", "allocation", "nodeSelector"])
                    .is_some_and(|s| !selector_matches(s, &node.object))
            });
            // What a claim excludes counts as that, whatever else is wrong.
            let wrong = if excluded {
                Some(Misfit::Claim)
            } else {
                let others: Vec<&Value> = here.values().map(AsRef::as_ref).collect();
                misfit(&node.object, pod, &others)
            };
            match wrong {
                Some(why) => *reasons.entry(why).or_insert(0) += 1,
                None if best.as_ref().is_none_or(|(n, _)| here.len() < *n) => {
                    best = Some((here.len(), node_key.name));
                }
                None => {}
            }
        }
        best.map(|(_, name)| name).ok_or(reasons)
    }
}

fn describe(api: &ApiServer, reasons: &BTreeMap<Misfit, usize>) -> String {
    let total = api.store.list("nodes", "").items.len();
    let parts: Vec<String> = reasons.iter().map(|(why, n)| format!("{n} {}", why.text())).collect();
    format!("0/{total} nodes are available: {}.", parts.join(", "))
}

fn only_for(claim: &Value, pod: &Value) -> bool {
    list(claim, &["status", "reservedFor"]).iter().all(|r| text(r, &["uid"]) == uid(pod))
}

async fn deallocate(api: &ApiServer, key: &Key, claim: &Value) -> Result<(), ApiError> {
    let claim_key = Key::new(&key.namespace, text(claim, &["metadata", "name"]));
    let version = text(claim, &["metadata", "resourceVersion"]).to_owned();
    let mut request = request(api, USER, "update", CLAIMS, &claim_key)?;
    request.target.subresource = "status".into();
    api.modify(&request, |live| {
        let mut new = live.clone();
        crate::value::set(&mut new, &["metadata", "resourceVersion"], version.clone());
        remove(&mut new, &["status", "allocation"]);
        remove(&mut new, &["status", "reservedFor"]);
        Ok(new)
    })
    .await?;
    Ok(())
}

async fn bind(api: &ApiServer, key: &Key, pod: &Value, node: &str) -> Result<(), ApiError> {
    let mut request = request(api, USER, "create", ("", "pods"), key)?;
    request.target.subresource = "binding".into();
    let body = json!({
        "metadata": {"name": key.name, "namespace": key.namespace, "uid": uid(pod)},
        "target": {"kind": "Node", "name": node},
    });
    match api.act(&request, body).await {
        // Somebody else was faster, or the pod is gone: the change shows up by itself.
        Err(e) if matches!(e.code, 404 | 409) => Ok(()),
        other => other.map(|_| ()),
    }
}

async fn unschedulable(api: &ApiServer, key: &Key, pod: &Value, why: &str) -> Result<(), ApiError> {
    let mut request = request(api, USER, "patch", ("", "pods"), key)?;
    request.target.subresource = "status".into();
    let uid = uid(pod).to_owned();
    let result = api
        .modify(&request, |live| {
            let mut new = live.clone();
            if super::uid(live) == uid && wants_node(live) {
                let condition = json!({
                    "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why,
                });
                set_condition(&mut new, condition);
            }
            Ok(new)
        })
        .await;
    match result {
        Err(e) if e.code == 404 => Ok(()),
        other => other.map(|_| ()),
    }
}

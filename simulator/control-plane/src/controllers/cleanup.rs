//! Takes reservations of ended pods back, deallocates what nobody uses any more, lifts the
//! finalizer, and deletes generated claims of ended pods.
//!
//! A claim is deallocated on the change from used to unused only: one that was allocated and
//! never reserved stays allocated. Reservations of types other than pods are left alone.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{CLAIMS, Controller, claim, is, is_deleting, key_of, owning_pod, pod, pod_is_done, request, uid};
use crate::api::{ApiServer, DeleteOptions, Request};
use crate::audit::{AuditEntry, ChangeKind};
use crate::error::ApiError;
use crate::options::Controllers;
use crate::store::Key;
use crate::value::{at, list, put, remove, text};

const USER: &str = "system:serviceaccount:kube-system:resource-claim-controller";
pub(crate) const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

pub(super) struct Cleanup;

impl Controller for Cleanup {
    type Item = Key;

    fn enabled(switches: Controllers) -> bool {
        switches.claim_cleanup
    }

    fn affected(&mut self, api: &ApiServer, entry: &AuditEntry, queue: &mut BTreeSet<Key>) {
        if is(entry, CLAIMS.0, CLAIMS.1) {
            if entry.change != ChangeKind::Deleted {
                queue.insert(key_of(entry));
            }
            return;
        }
        if !is(entry, "", "pods") {
            return;
        }
        let Some(pod) = entry.after.as_deref().or(entry.before.as_deref()) else { return };
        if entry.change != ChangeKind::Deleted && !pod_is_done(pod) {
            return;
        }
        queue.extend(api.store.keys_where("resourceclaims.resource.k8s.io", &entry.namespace, |claim| {
            let reserved = list(claim, &["status", "reservedFor"]);
            owning_pod(claim).is_some_and(|(_, owner)| owner == uid(pod))
                || reserved.iter().any(|r| text(r, &["uid"]) == uid(pod))
        }));
    }

    async fn sync(&mut self, api: &ApiServer, key: &Key) -> Result<(), ApiError> {
        let Some(claim) = claim(api, &key.namespace, &key.name) else { return Ok(()) };
        let reserved = list(&claim, &["status", "reservedFor"]);
        let valid: Vec<Value> = reserved.iter().filter(|r| still_valid(api, key, r)).cloned().collect();
        let protected = has_finalizer(&claim);
        if valid.len() < reserved.len() {
            let deallocate = valid.is_empty() && protected;
            let version = text(&claim, &["metadata", "resourceVersion"]).to_owned();
            let after = set_status(api, key, &version, &valid, deallocate).await?;
            if has_finalizer(&after) && at(&after, &["status", "allocation"]).is_none() {
                lift_finalizer(api, key).await?;
            }
        } else if protected && is_deleting(&claim) && valid.is_empty() {
            if at(&claim, &["status", "allocation"]).is_some() {
                let version = text(&claim, &["metadata", "resourceVersion"]).to_owned();
                set_status(api, key, &version, &valid, true).await?;
            }
            lift_finalizer(api, key).await?;
        }
        if valid.is_empty() {
            self.delete_of_ended_pod(api, key).await?;
        }
        Ok(())
    }
}

impl Cleanup {
    async fn delete_of_ended_pod(&self, api: &ApiServer, key: &Key) -> Result<(), ApiError> {
        let Some(claim) = claim(api, &key.namespace, &key.name) else { return Ok(()) };
        let Some((name, owner)) = owning_pod(&claim) else { return Ok(()) };
        // If the pod is gone, the garbage collector sees to the claim.
        let Some(pod) = pod(api, &Key::new(&key.namespace, name)) else { return Ok(()) };
        if (uid(&pod) != owner || pod_is_done(&pod)) && !is_deleting(&claim) {
            let request = request(api, USER, "delete", CLAIMS, key)?;
            let options = DeleteOptions { uid: Some(uid(&claim).to_owned()), ..DeleteOptions::default() };
            match api.delete(&request, &options).await {
                Err(e) if e.code == 404 => {}
                other => {
                    other?;
                }
            }
        }
        Ok(())
    }
}

fn still_valid(api: &ApiServer, key: &Key, reserved: &Value) -> bool {
    let of_pod = text(reserved, &["apiGroup"]).is_empty() && text(reserved, &["resource"]) == "pods";
    if !of_pod {
        return true;
    }
    pod(api, &Key::new(&key.namespace, text(reserved, &["name"])))
        .is_some_and(|p| uid(&p) == text(reserved, &["uid"]) && !pod_is_done(&p))
}

fn has_finalizer(claim: &Value) -> bool {
    list(claim, &["metadata", "finalizers"]).iter().any(|f| f.as_str() == Some(FINALIZER))
}

fn claim_request(api: &ApiServer, key: &Key, subresource: &str) -> Result<Request, ApiError> {
    let mut request = request(api, USER, "update", CLAIMS, key)?;
    request.target.subresource = subresource.to_owned();
    Ok(request)
}

async fn set_status(
    api: &ApiServer,
    key: &Key,
    version: &str,
    valid: &[Value],
    deallocate: bool,
) -> Result<std::sync::Arc<Value>, ApiError> {
    let request = claim_request(api, key, "status")?;
    api.modify(&request, |live| {
        let mut new = live.clone();
        // Refused if anything has changed since.
        put(&mut new, &["metadata", "resourceVersion"], Some(Value::from(version)));
        put(&mut new, &["status", "reservedFor"], (!valid.is_empty()).then(|| Value::Array(valid.to_vec())));
        if deallocate {
            remove(&mut new, &["status", "allocation"]);
        }
        Ok(new)
    })
    .await
}

async fn lift_finalizer(api: &ApiServer, key: &Key) -> Result<(), ApiError> {
    let request = claim_request(api, key, "")?;
    let result = api
        .modify(&request, |live| {
            let mut new = live.clone();
            if let Some(finalizers) = new.pointer_mut("/metadata/finalizers").and_then(Value::as_array_mut) {
                finalizers.retain(|f| f.as_str() != Some(FINALIZER));
            }
            Ok(new)
        })
        .await;
    match result {
        Err(e) if e.code == 404 => Ok(()),
        other => other.map(|_| ()),
    }
}

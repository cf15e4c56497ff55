//! Deletes objects whose owners are gone; foreground and orphan deletion.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;

use super::{Controller, is_deleting, request, uid};
use crate::api::{ApiServer, DeleteOptions};
use crate::audit::{AuditEntry, ChangeKind};
use crate::error::ApiError;
use crate::kinds::Kind;
use crate::options::Controllers;
use crate::store::Key;
use crate::value::{list, text};

const USER: &str = "system:serviceaccount:kube-system:generic-garbage-collector";

/// An object of whatever kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Id {
    group: String,
    plural: String,
    key: Key,
}

/// Who depends on whom, by the owner's UID.
#[derive(Default)]
pub(super) struct Garbage {
    dependents: BTreeMap<String, BTreeSet<Id>>,
}

impl Controller for Garbage {
    type Item = Id;

    fn enabled(switches: Controllers) -> bool {
        switches.garbage_collection
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn affected(&mut self, _api: &ApiServer, entry: &AuditEntry, queue: &mut BTreeSet<Id>) {
        let id = Id {
            group: entry.origin.group.clone(),
            plural: entry.origin.resource.clone(),
            key: Key::new(&entry.namespace, &entry.name),
        };
        for owner in entry.before.iter().flat_map(|b| owners(b)) {
            if let Some(set) = self.dependents.get_mut(text(owner, &["uid"])) {
                set.remove(&id);
            }
            // A foreground deletion may have waited for this one.
            if entry.change == ChangeKind::Deleted {
                queue.extend(self.waiting_owner(owner, &entry.namespace, _api));
            }
        }
        let Some(object) = entry.after.as_deref().or(entry.before.as_deref()) else { return };
        if entry.change == ChangeKind::Deleted {
            if let Some(orphans) = self.dependents.get(uid(object)) {
                queue.extend(orphans.iter().cloned());
            }
            return;
        }
        for owner in owners(object) {
            self.dependents.entry(text(owner, &["uid"]).to_owned()).or_default().insert(id.clone());
        }
        if !owners(object).is_empty() || waits_for(object).is_some() {
            queue.insert(id);
        }
    }

    async fn sync(&mut self, api: &ApiServer, id: &Id) -> Result<(), ApiError> {
        let Some(kind) = api.kinds.by_plural(&id.group, &id.plural) else { return Ok(()) };
        let Some(stored) = api.store.get(&kind.table(), &id.key) else { return Ok(()) };
        if let Some(finalizer) = waits_for(&stored.object) {
            return self.finish(api, id, &stored.object, finalizer).await;
        }
        if is_deleting(&stored.object) || owners(&stored.object).is_empty() {
            return Ok(());
        }
        self.check_owners(api, id, &kind, &stored.object).await
    }
}

fn owners(object: &Value) -> &[Value] {
    list(object, &["metadata", "ownerReferences"])
}

/// The finalizer of a deletion that waits for this controller.
fn waits_for(object: &Value) -> Option<&'static str> {
    if !is_deleting(object) {
        return None;
    }
    let has = |name: &str| list(object, &["metadata", "finalizers"]).iter().any(|f| f.as_str() == Some(name));
    if has("orphan") {
        Some("orphan")
    } else if has("foregroundDeletion") {
        Some("foregroundDeletion")
    } else {
        None
    }
}

impl Garbage {
    fn waiting_owner(&self, owner: &Value, namespace: &str, api: &ApiServer) -> Option<Id> {
        let kind = api.kinds.by_kind(text(owner, &["apiVersion"]), text(owner, &["kind"]))?;
        let namespace = if kind.namespaced { namespace } else { "" };
        let key = Key::new(namespace, text(owner, &["name"]));
        Some(Id { group: kind.group.clone(), plural: kind.plural.clone(), key })
    }

    fn owner_state(&self, api: &ApiServer, dependent: &Id, owner: &Value) -> Owner {
        let Some(kind) = api.kinds.by_kind(text(owner, &["apiVersion"]), text(owner, &["kind"])) else {
            // A kind that is not served cannot be looked up, so nothing is concluded.
            return Owner::Unknown;
        };
        if kind.namespaced && dependent.key.namespace.is_empty() {
            return Owner::Unknown;
        }
        let namespace = if kind.namespaced { dependent.key.namespace.as_str() } else { "" };
        match api.store.get(&kind.table(), &Key::new(namespace, text(owner, &["name"]))) {
            Some(found) if uid(&found.object) == text(owner, &["uid"]) => {
                if waits_for(&found.object) == Some("foregroundDeletion") {
                    Owner::Leaving
                } else {
                    Owner::Present
                }
            }
            _ => Owner::Gone,
        }
    }

    async fn check_owners(
        &self,
        api: &ApiServer,
        id: &Id,
        kind: &Arc<Kind>,
        object: &Value,
    ) -> Result<(), ApiError> {
        let states: Vec<(Owner, &Value)> =
            owners(object).iter().map(|o| (self.owner_state(api, id, o), o)).collect();
        let kept = states.iter().any(|(s, _)| matches!(s, Owner::Present | Owner::Unknown));
        let leaving = states.iter().any(|(s, _)| *s == Owner::Leaving);
        let gone: Vec<&str> =
            states.iter().filter(|(s, _)| *s == Owner::Gone).map(|(_, o)| text(o, &["uid"])).collect();
        if kept && gone.is_empty() {
            return Ok(());
        }
        if kept {
            return self.drop_owners(api, id, &gone).await;
        }
        let options = DeleteOptions {
            uid: Some(uid(object).to_owned()),
            propagation: leaving.then(|| "Foreground".to_owned()),
            ..DeleteOptions::default()
        };
        let request = request(api, USER, "delete", (&kind.group, &kind.plural), &id.key)?;
        match api.delete(&request, &options).await {
            Err(e) if e.code == 404 => Ok(()),
            other => other.map(|_| ()),
        }
    }

    async fn drop_owners(&self, api: &ApiServer, id: &Id, gone: &[&str]) -> Result<(), ApiError> {
        let request = request(api, USER, "update", (&id.group, &id.plural), &id.key)?;
        let result = api
            .modify(&request, |live| {
                let mut new = live.clone();
                if let Some(refs) = new.pointer_mut("/metadata/ownerReferences").and_then(Value::as_array_mut)
                {
                    refs.retain(|r| !gone.contains(&text(r, &["uid"])));
                }
                Ok(new)
            })
            .await;
        match result {
            Err(e) if e.code == 404 => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Does what a deletion with dependents waits for, then lifts its finalizer.
    async fn finish(
        &self,
        api: &ApiServer,
        id: &Id,
        object: &Value,
        finalizer: &str,
    ) -> Result<(), ApiError> {
        let dependents: Vec<Id> =
            self.dependents.get(uid(object)).map(|d| d.iter().cloned().collect()).unwrap_or_default();
        let mut blocking = false;
        for dependent in dependents {
            if finalizer == "orphan" {
                self.drop_owners(api, &dependent, &[uid(object)]).await?;
                continue;
            }
            let Some(kind) = api.kinds.by_plural(&dependent.group, &dependent.plural) else { continue };
            let Some(stored) = api.store.get(&kind.table(), &dependent.key) else { continue };
            blocking |= owners(&stored.object).iter().any(|o| {
                text(o, &["uid"]) == uid(object)
                    && o.get("blockOwnerDeletion").and_then(Value::as_bool) == Some(true)
            });
            if !is_deleting(&stored.object) {
                self.check_owners(api, &dependent, &kind, &stored.object).await?;
            }
        }
        // Those that were deleted just now are seen when the store says so.
        let left = blocking && self.still_blocked(api, object);
        if left {
            return Ok(());
        }
        let request = request(api, USER, "update", (&id.group, &id.plural), &id.key)?;
        let result = api
            .modify(&request, |live| {
                let mut new = live.clone();
                if let Some(list) = new.pointer_mut("/metadata/finalizers").and_then(Value::as_array_mut) {
                    list.retain(|f| f.as_str() != Some(finalizer));
                }
                Ok(new)
            })
            .await;
        match result {
            Err(e) if e.code == 404 => Ok(()),
            other => other.map(|_| ()),
        }
    }

    fn still_blocked(&self, api: &ApiServer, owner: &Value) -> bool {
        self.dependents.get(uid(owner)).into_iter().flatten().any(|d| {
            api.kinds
                .by_plural(&d.group, &d.plural)
                .and_then(|k| api.store.get(&k.table(), &d.key))
                .is_some_and(|s| {
                    owners(&s.object).iter().any(|o| {
                        text(o, &["uid"]) == uid(owner)
                            && o.get("blockOwnerDeletion").and_then(Value::as_bool) == Some(true)
                    })
                })
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Present,
    /// In foreground deletion: it waits for its dependents.
    Leaving,
    Gone,
    Unknown,
}

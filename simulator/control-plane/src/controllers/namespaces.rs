//! Empties namespaces that are being deleted.

use std::collections::BTreeSet;

use super::{Controller, is, is_deleting, request};
use crate::api::{ApiServer, DeleteOptions};
use crate::audit::{AuditEntry, ChangeKind};
use crate::error::ApiError;
use crate::options::Controllers;
use crate::store::Key;
use crate::value::remove;

const USER: &str = "system:serviceaccount:kube-system:namespace-controller";

pub(super) struct Namespaces;

impl Controller for Namespaces {
    type Item = String;

    fn enabled(switches: Controllers) -> bool {
        switches.namespaces
    }

    fn affected(&mut self, api: &ApiServer, entry: &AuditEntry, queue: &mut BTreeSet<String>) {
        if is(entry, "", "namespaces") && entry.change != ChangeKind::Deleted {
            if entry.after.as_deref().is_some_and(is_deleting) {
                queue.insert(entry.name.clone());
            }
        } else if !entry.namespace.is_empty() && entry.change == ChangeKind::Deleted {
            let namespace = api.store.get("namespaces", &Key::new("", &entry.namespace));
            if namespace.is_some_and(|n| is_deleting(&n.object)) {
                queue.insert(entry.namespace.clone());
            }
        }
    }

    async fn sync(&mut self, api: &ApiServer, name: &String) -> Result<(), ApiError> {
        let key = Key::new("", name);
        let Some(namespace) = api.store.get("namespaces", &key) else { return Ok(()) };
        if !is_deleting(&namespace.object) {
            return Ok(());
        }
        let mut left = false;
        for kind in api.kinds.all().into_iter().filter(|k| k.namespaced && k.storage.is_none()) {
            for (key, stored) in api.store.list(&kind.table(), name).items {
                if !is_deleting(&stored.object) {
                    let request = request(api, USER, "delete", (&kind.group, &kind.plural), &key)?;
                    match api.delete(&request, &DeleteOptions::default()).await {
                        Err(e) if e.code == 404 => continue,
                        other => left |= !other?.gone,
                    }
                } else {
                    left = true;
                }
            }
        }
        if left {
            return Ok(());
        }
        let mut request = request(api, USER, "update", ("", "namespaces"), &key)?;
        request.target.subresource = "finalize".into();
        let result = api
            .modify(&request, |live| {
                let mut new = live.clone();
                remove(&mut new, &["spec", "finalizers"]);
                Ok(new)
            })
            .await;
        match result {
            Err(e) if e.code == 404 => Ok(()),
            other => other.map(|_| ()),
        }
    }
}

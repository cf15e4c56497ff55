//! Deletion: preconditions, grace, finalizers, propagation.

use std::sync::Arc;

use serde_json::{Value, json};

use super::write::ready_to_go;
use super::{ApiServer, Caller, Request, Target, show};
use crate::admission::Operation;
use crate::error::ApiError;
use crate::options::PodDeletion;
use crate::store::{Mismatch, Write};
use crate::value::{at, entry, list, now, remove, set, text};

/// `metav1.DeleteOptions`, as far as it matters.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeleteOptions {
    pub(crate) grace: Option<i64>,
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
    pub(crate) propagation: Option<String>,
    /// Deletions say it here, all other requests in the query.
    pub(crate) dry_run: bool,
}

impl DeleteOptions {
    /// From the body of a request; absent or empty bodies mean the defaults.
    pub(crate) fn parse(body: &Value) -> Self {
        let string = |path: &[&str]| at(body, path).and_then(Value::as_str).map(str::to_owned);
        let orphan = body.get("orphanDependents").and_then(Value::as_bool);
        Self {
            grace: body.get("gracePeriodSeconds").and_then(Value::as_i64),
            uid: string(&["preconditions", "uid"]),
            resource_version: string(&["preconditions", "resourceVersion"]),
            propagation: string(&["propagationPolicy"])
                .or_else(|| orphan.map(|o| if o { "Orphan" } else { "Background" }.to_owned())),
            dry_run: body["dryRun"].as_array().is_some_and(|all| all.iter().any(|one| one == "All")),
        }
    }

    /// Whether an object is the one that is meant.
    pub(crate) fn check(&self, target: &Target, object: &Value) -> Result<(), ApiError> {
        let check = |wanted: &Option<String>, field: &str, what: &str| {
            let real = text(object, &["metadata", field]);
            match wanted {
                Some(wanted) if !wanted.is_empty() && wanted != real => Err(ApiError::conflict(
                    &target.kind,
                    &target.name,
                    &format!(
                        "Precondition failed: {what} in precondition: {wanted}, {what} in object meta: {real}"
                    ),
                )),
                _ => Ok(()),
            }
        };
        check(&self.uid, "uid", "UID")?;
        check(&self.resource_version, "resourceVersion", "ResourceVersion")
    }
}

/// How a deletion went.
#[derive(Debug, Clone)]
pub(crate) struct Deleted {
    pub(crate) object: Arc<Value>,
    /// False while something is waited for.
    pub(crate) gone: bool,
}

impl ApiServer {
    pub(crate) async fn delete(
        &self,
        request: &Request,
        options: &DeleteOptions,
    ) -> Result<Deleted, ApiError> {
        let target = &request.target;
        let kind = &target.kind;
        for _ in 0..16 {
            let old = self.stored(target)?;
            options.check(target, &old.object)?;
            self.admission.validate(self, request, Operation::Delete, None, Some(&old.object)).await?;
            let new = self.marked(request, options, &old.object);
            let gone = ready_to_go(&new);
            // Kinds with a grace period show their marks first, even when it is zero.
            if gone && kind.is("", "pods") && !request.dry_run && !same_marks(&old.object, &new) {
                let write = Write { key: target.key(), expected: Some(old.revision), object: Some(new) };
                match self.store.write(&kind.table(), write, &request.origin()) {
                    Err(Mismatch::Gone) => return Err(ApiError::not_found(kind, &target.name)),
                    _ => continue,
                }
            }
            let out = if request.dry_run {
                old.clone()
            } else if !gone && same_marks(&old.object, &new) {
                old
            } else {
                let object = (!gone).then_some(new);
                let write = Write { key: target.key(), expected: Some(old.revision), object };
                match self.store.write(&kind.table(), write, &request.origin()) {
                    Ok(stored) => {
                        self.written(kind, &stored.object, gone);
                        stored
                    }
                    Err(Mismatch::Gone) => return Err(ApiError::not_found(kind, &target.name)),
                    Err(_) => continue,
                }
            };
            return Ok(Deleted { object: show(&out.object, kind, &target.version), gone });
        }
        Err(ApiError::modified(kind, &target.name))
    }

    /// The object with its marks of deletion.
    fn marked(&self, request: &Request, options: &DeleteOptions, old: &Value) -> Value {
        let kind = &request.target.kind;
        let mut new = old.clone();
        remove(&mut new, &["metadata", "resourceVersion"]);
        if let Some(finalizer) = match options.propagation.as_deref() {
            Some("Foreground") => Some("foregroundDeletion"),
            Some("Orphan") => Some("orphan"),
            _ => None,
        } {
            let list = entry(&mut new, &["metadata", "finalizers"]);
            if !list.is_array() {
                *list = json!([]);
            }
            if let Some(items) = list.as_array_mut()
                && !items.iter().any(|f| f.as_str() == Some(finalizer))
            {
                items.push(json!(finalizer));
            }
        }
        let grace = if kind.is("", "pods") { self.pod_grace(options, old) } else { 0 };
        let present = at(old, &["metadata", "deletionGracePeriodSeconds"]).and_then(Value::as_i64);
        match present {
            // A shorter period replaces a longer one; a longer one changes nothing.
            Some(present) if grace >= present => {}
            _ => {
                let due = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(grace);
                let due = due.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
                set(&mut new, &["metadata", "deletionTimestamp"], due);
                set(&mut new, &["metadata", "deletionGracePeriodSeconds"], grace);
                if let Some(n) = at(old, &["metadata", "generation"]).and_then(Value::as_i64)
                    && present.is_none()
                {
                    set(&mut new, &["metadata", "generation"], n + 1);
                }
            }
        }
        if kind.is("", "namespaces") {
            set(&mut new, &["status", "phase"], "Terminating");
        }
        new
    }

    fn pod_grace(&self, options: &DeleteOptions, pod: &Value) -> i64 {
        let ended = matches!(text(pod, &["status", "phase"]), "Succeeded" | "Failed");
        if ended || text(pod, &["spec", "nodeName"]).is_empty() {
            return 0;
        }
        if self.options.pod_deletion == PodDeletion::Immediate {
            return 0;
        }
        let own = at(pod, &["spec", "terminationGracePeriodSeconds"]).and_then(Value::as_i64);
        match options.grace.or(own).unwrap_or(30) {
            negative if negative < 0 => 1,
            grace => grace,
        }
    }

    /// Removes the objects of a custom resource whose definition is gone.
    pub(crate) fn drop_custom_objects(&self, group: &str, plural: &str) {
        let Some(kind) = self.kinds.by_plural(group, plural) else { return };
        let request = |key: &crate::store::Key| {
            let mut target = super::Target {
                kind: Arc::clone(&kind),
                version: kind.storage_version().to_owned(),
                namespace: key.namespace.clone(),
                name: key.name.clone(),
                subresource: String::new(),
            };
            target.name.clone_from(&key.name);
            Request::new(target, Caller::internal("apiserver"), "delete")
        };
        for (key, stored) in self.store.list(&kind.table(), "").items {
            let origin = request(&key).origin();
            let _ = self.store.write(
                &kind.table(),
                Write { key, expected: Some(stored.revision), object: None },
                &origin,
            );
        }
    }
}

fn same_marks(old: &Value, new: &Value) -> bool {
    let marks = |v: &Value| {
        (
            at(v, &["metadata", "deletionTimestamp"]).cloned(),
            at(v, &["metadata", "deletionGracePeriodSeconds"]).cloned(),
            list(v, &["metadata", "finalizers"]).to_vec(),
        )
    };
    marks(old) == marks(new)
}

/// The answer to a deletion that left nothing to show.
pub(crate) fn success_status(request: &Request, uid: &str) -> Value {
    let target = &request.target;
    let mut details = json!({"name": target.name, "kind": target.kind.plural, "uid": uid});
    if !target.kind.group.is_empty() {
        set(&mut details, &["group"], target.kind.group.clone());
    }
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}

/// Now, for callers that stamp conditions.
pub(crate) fn stamp() -> String {
    now()
}

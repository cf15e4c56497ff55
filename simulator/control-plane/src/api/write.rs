//! Create, update, patch and apply.

use std::sync::Arc;

use serde_json::Value;

use super::{ApiServer, Request, show};
use crate::admission::Operation;
use crate::apply::{Writer, apply, track_update};
use crate::error::ApiError;
use crate::kinds::Kind;
use crate::patch::{Patch, json_patch, merge_patch, strategic_patch};
use crate::schema::Schema;
use crate::store::{Mismatch, Stored, Write, revision_of};
use crate::strategy::{self, Context};
use crate::value::{at, list, normalise, remove, set, text};
use crate::{convert, defaults, names, validate};

/// How often a patch that lost a race is tried again before the client hears of it.
const RETRIES: usize = 5;

impl ApiServer {
    /// Creates an object; answers with it as the client's version shows it.
    pub(crate) async fn create(&self, request: &Request, body: Value) -> Result<Arc<Value>, ApiError> {
        let generated = text(&body, &["metadata", "name"]).is_empty();
        for attempt in 0.. {
            let mut new = self.start_create(request, body.clone())?;
            track_create(request, &mut new);
            self.admission.mutate(self, request, Operation::Create, &mut new, None).await?;
            self.finish_create(request, &mut new)?;
            self.admission.validate(self, request, Operation::Create, Some(&new), None).await?;
            match self.commit_create(request, new) {
                Err(e) if generated && e.reason == "AlreadyExists" && attempt < 8 => {}
                other => return other,
            }
        }
        Err(ApiError::internal("unreachable: creation neither succeeded nor failed"))
    }

    /// Creates without calling webhooks: for what the server itself makes.
    pub(crate) fn create_now(&self, request: &Request, body: Value) -> Result<Arc<Value>, ApiError> {
        let mut new = self.start_create(request, body)?;
        track_create(request, &mut new);
        self.finish_create(request, &mut new)?;
        self.commit_create(request, new)
    }

    fn start_create(&self, request: &Request, body: Value) -> Result<Value, ApiError> {
        let target = &request.target;
        let kind = &target.kind;
        let mut new = decode(kind, target.api_version(), body)?;
        if !text(&new, &["metadata", "resourceVersion"]).is_empty() {
            return Err(ApiError::new(500, "", "resourceVersion should not be set on objects to be created"));
        }
        self.check_namespace(request, &mut new)?;
        if text(&new, &["metadata", "name"]).is_empty() {
            let base = text(&new, &["metadata", "generateName"]).to_owned();
            if base.is_empty() {
                return Err(names::missing(kind));
            }
            set(&mut new, &["metadata", "name"], names::generate(&base));
        }
        if !target.name.is_empty() && text(&new, &["metadata", "name"]) != target.name {
            return Err(ApiError::bad_request("the name of the object does not match the name on the URL"));
        }
        defaults::apply(kind, &mut new);
        Ok(new)
    }

    fn finish_create(&self, request: &Request, new: &mut Value) -> Result<(), ApiError> {
        let kind = &request.target.kind;
        let context = Context { server: self, request };
        strategy::prepare_create(&context, new)?;
        let name = text(new, &["metadata", "name"]).to_owned();
        let mut errors = names::check_metadata(kind, new);
        errors.extend(validate::create(self, kind, new));
        if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, &name, &errors)) }
    }

    fn commit_create(&self, request: &Request, mut new: Value) -> Result<Arc<Value>, ApiError> {
        let target = &request.target;
        let name = text(&new, &["metadata", "name"]).to_owned();
        let mut key = target.key();
        key.name.clone_from(&name);
        let table = target.kind.table();
        if self.store.get(&table, &key).is_some() {
            return Err(ApiError::already_exists(&target.kind, &name));
        }
        if request.dry_run {
            return Ok(show(&Arc::new(new), &target.kind, &target.version));
        }
        remove(&mut new, &["metadata", "resourceVersion"]);
        let write = Write { key, expected: None, object: Some(new) };
        match self.store.write(&table, write, &request.origin()) {
            Ok(stored) => {
                self.written(&target.kind, &stored.object, false);
                Ok(show(&stored.object, &target.kind, &target.version))
            }
            Err(_) => Err(ApiError::already_exists(&target.kind, &name)),
        }
    }

    /// Replaces an object. True when it was made.
    pub(crate) async fn update(
        &self,
        request: &Request,
        body: Value,
    ) -> Result<(Arc<Value>, bool), ApiError> {
        let target = &request.target;
        let body = decode(&target.kind, target.api_version(), body)?;
        let name = text(&body, &["metadata", "name"]);
        if name != target.name {
            return Err(ApiError::bad_request(format!(
                "the name of the object ({name}) does not match the name on the URL ({})",
                target.name
            )));
        }
        let exists = self.store.get(&target.kind.table(), &target.key()).is_some();
        if !exists && target.kind.create_on_update && target.subresource.is_empty() {
            let mut body = body;
            if !text(&body, &["metadata", "resourceVersion"]).is_empty() {
                return Err(ApiError::not_found(&target.kind, &target.name));
            }
            remove(&mut body, &["metadata", "uid"]);
            return Ok((self.create(request, body).await?, true));
        }
        let expected = revision_of(&body);
        if expected == 0 && !target.kind.unconditional && target.subresource.is_empty() {
            let error = crate::error::FieldError::invalid(
                "metadata.resourceVersion",
                &Value::from(0),
                "must be specified for an update",
            );
            return Err(ApiError::invalid(&target.kind, &target.name, &[error]));
        }
        let object = self.modify(request, |_| Ok(body.clone())).await?;
        Ok((object, false))
    }

    /// Patches or applies. True when the object was made.
    pub(crate) async fn patch(
        &self,
        request: &Request,
        patch: &Patch,
    ) -> Result<(Arc<Value>, bool), ApiError> {
        let target = &request.target;
        let kind = &target.kind;
        let exists = self.store.get(&kind.table(), &target.key()).is_some();
        if let Patch::Apply(config) = patch {
            let config = decode_config(kind, target.api_version(), config.clone())?;
            let named = text(&config, &["metadata", "name"]);
            if named != target.name {
                return Err(ApiError::bad_request(format!(
                    "the name of the object ({named}) does not match the name on the URL ({})",
                    target.name
                )));
            }
            if !exists && target.subresource.is_empty() {
                let uid = text(&config, &["metadata", "uid"]);
                if !uid.is_empty() {
                    return Err(ApiError::conflict(
                        kind,
                        &target.name,
                        &format!(
                            "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                        ),
                    ));
                }
                let made = self.apply_config(request, None, &config)?;
                match self.create(request, made).await {
                    Err(e) if e.reason == "AlreadyExists" => {}
                    other => return Ok((other?, true)),
                }
            }
            let object = self.modify(request, |live| self.apply_config(request, Some(live), &config)).await?;
            return Ok((object, false));
        }
        let schema = Schema::new(kind, &target.version);
        let object = self
            .modify(request, |live| match patch {
                Patch::Json(p) => json_patch(live, p),
                Patch::Merge(p) => Ok(merge_patch(live, p)),
                Patch::Strategic(_) if kind.custom => Err(ApiError::new(
                    415,
                    "UnsupportedMediaType",
                    "the body of the request was in an unknown format - accepted media types include: \
                     application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
                )),
                Patch::Strategic(p) | Patch::Apply(p) => strategic_patch(live, p, &schema),
            })
            .await?;
        Ok((object, false))
    }

    fn apply_config(
        &self,
        request: &Request,
        live: Option<&Value>,
        config: &Value,
    ) -> Result<Value, ApiError> {
        let target = &request.target;
        if request.manager.is_empty() {
            return Err(missing_manager());
        }
        let api_version = target.api_version();
        let who =
            Writer { manager: &request.manager, api_version: &api_version, subresource: &target.subresource };
        let schema = Schema::new(&target.kind, &target.version);
        let reset = reset_fields(&target.kind, &target.subresource);
        let mut out = apply(live, config, &schema, who, request.force, reset)?;
        // The revision in a configuration is a precondition, not a value.
        if let Some(live) = live {
            let asked = text(config, &["metadata", "resourceVersion"]);
            let rv = if asked.is_empty() { text(live, &["metadata", "resourceVersion"]) } else { asked };
            set(&mut out, &["metadata", "resourceVersion"], rv);
        }
        Ok(out)
    }

    /// Changes an object through a function from its present state to the wished one.
    pub(crate) async fn modify(
        &self,
        request: &Request,
        change: impl Fn(&Value) -> Result<Value, ApiError>,
    ) -> Result<Arc<Value>, ApiError> {
        let target = &request.target;
        let kind = &target.kind;
        for _ in 0..RETRIES {
            let old = self.stored(target)?;
            let live = show(&old.object, kind, &target.version);
            let mut new = change(&live)?;
            self.check_preconditions(request, &live, &mut new)?;
            new = decode(kind, target.api_version(), new)?;
            defaults::apply(kind, &mut new);
            track_change(request, &old.object, &mut new);
            if target.subresource.is_empty() || target.subresource == "status" {
                self.admission.mutate(self, request, Operation::Update, &mut new, Some(&old.object)).await?;
            }
            self.finish_update(request, &old.object, &mut new)?;
            self.admission.validate(self, request, Operation::Update, Some(&new), Some(&old.object)).await?;
            match self.commit_update(request, &old, new)? {
                Some(object) => return Ok(object),
                None => continue,
            }
        }
        Err(ApiError::modified(kind, &target.name))
    }

    fn check_preconditions(&self, request: &Request, live: &Value, new: &mut Value) -> Result<(), ApiError> {
        let target = &request.target;
        let asked = text(new, &["metadata", "resourceVersion"]);
        if !asked.is_empty() && asked != text(live, &["metadata", "resourceVersion"]) {
            return Err(ApiError::modified(&target.kind, &target.name));
        }
        let uid = text(new, &["metadata", "uid"]);
        let real = text(live, &["metadata", "uid"]);
        // In a whole object the UID is a precondition, in a patch a change.
        if !uid.is_empty() && uid != real && request.verb != "update" {
            let error =
                crate::error::FieldError::invalid("metadata.uid", &Value::from(uid), "field is immutable");
            return Err(ApiError::invalid(&target.kind, &target.name, &[error]));
        }
        if !uid.is_empty() && uid != real {
            let why = format!("Precondition failed: UID in precondition: {uid}, UID in object meta: {real}");
            return Err(ApiError::conflict(&target.kind, &target.name, &why));
        }
        let namespace = text(new, &["metadata", "namespace"]);
        if !namespace.is_empty() && namespace != target.namespace {
            return Err(ApiError::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        Ok(())
    }

    fn finish_update(&self, request: &Request, old: &Value, new: &mut Value) -> Result<(), ApiError> {
        let target = &request.target;
        let kind = &target.kind;
        let context = Context { server: self, request };
        strategy::prepare_update(&context, old, new)?;
        let mut errors = names::check_metadata_update(old, new);
        errors.extend(validate::update(self, kind, &target.subresource, old, new));
        if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, &target.name, &errors)) }
    }

    /// `None` when somebody else was faster.
    fn commit_update(
        &self,
        request: &Request,
        old: &Stored,
        mut new: Value,
    ) -> Result<Option<Arc<Value>>, ApiError> {
        let target = &request.target;
        let kind = &target.kind;
        let finished = ready_to_go(&new);
        if !finished && same_but_for_times(&old.object, &new) {
            return Ok(Some(show(&old.object, kind, &target.version)));
        }
        if request.dry_run {
            return Ok(Some(show(&Arc::new(new), kind, &target.version)));
        }
        // With the last finalizer the object goes, without showing the change that removed it.
        let object = if finished { None } else { Some(new.clone()) };
        let write = Write { key: target.key(), expected: Some(old.revision), object };
        let stored = match self.store.write(&kind.table(), write, &request.origin()) {
            Ok(stored) => stored,
            Err(Mismatch::Gone) => return Err(ApiError::not_found(kind, &target.name)),
            Err(Mismatch::Modified | Mismatch::Exists) => return Ok(None),
        };
        self.written(kind, &stored.object, finished);
        if finished {
            set(&mut new, &["metadata", "resourceVersion"], stored.revision.to_string());
            return Ok(Some(show(&Arc::new(new), kind, &target.version)));
        }
        Ok(Some(show(&stored.object, kind, &target.version)))
    }

    fn check_namespace(&self, request: &Request, new: &mut Value) -> Result<(), ApiError> {
        let target = &request.target;
        let kind = &target.kind;
        if !kind.namespaced {
            remove(new, &["metadata", "namespace"]);
            return Ok(());
        }
        let given = text(new, &["metadata", "namespace"]).to_owned();
        if !given.is_empty() && given != target.namespace {
            return Err(ApiError::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        set(new, &["metadata", "namespace"], target.namespace.clone());
        let namespaces = self.target("", "namespaces", "", &target.namespace)?;
        let namespace = self.stored(&namespaces)?;
        if text(&namespace.object, &["status", "phase"]) == "Terminating" {
            let why = format!(
                "unable to create new content in namespace {} because it is being terminated",
                target.namespace
            );
            return Err(ApiError::forbidden(kind, text(new, &["metadata", "name"]), &why));
        }
        Ok(())
    }

    /// What the server itself does after a write.
    pub(crate) fn written(&self, kind: &Kind, object: &Value, deleted: bool) {
        if kind.is("apiextensions.k8s.io", "customresourcedefinitions") {
            let group = text(object, &["spec", "group"]);
            let plural = text(object, &["spec", "names", "plural"]);
            if deleted {
                self.drop_custom_objects(group, plural);
                self.kinds.undefine(group, plural);
            } else {
                self.kinds.define(object);
            }
        }
    }
}

/// Records who owns the fields of a new object: those that were sent, not those that admission adds.
fn track_create(request: &Request, new: &mut Value) {
    if request.verb == "apply" {
        return;
    }
    let (manager, api_version) = (request.manager(), request.target.api_version());
    let who = Writer { manager: &manager, api_version: &api_version, subresource: "" };
    let kind = &request.target.kind;
    track_update(None, new, &Schema::new(kind, &request.target.version), who, reset_fields(kind, ""));
}

fn track_change(request: &Request, old: &Value, new: &mut Value) {
    // Actions such as binding are the server's own doing.
    if request.verb == "apply" || !matches!(request.target.subresource.as_str(), "" | "status") {
        return;
    }
    let target = &request.target;
    let (manager, api_version) = (request.manager(), target.api_version());
    let who = Writer { manager: &manager, api_version: &api_version, subresource: &target.subresource };
    let schema = Schema::new(&target.kind, &target.version);
    track_update(Some(old), new, &schema, who, reset_fields(&target.kind, &target.subresource));
}

/// Marked for deletion, with nothing left to wait for.
pub(crate) fn ready_to_go(object: &Value) -> bool {
    let meta = |name| at(object, &["metadata", name]);
    meta("deletionTimestamp").is_some_and(|t| !t.is_null())
        && list(object, &["metadata", "finalizers"]).is_empty()
        && list(object, &["spec", "finalizers"]).is_empty()
        && meta("deletionGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(0) == 0
}

/// Fields that a write through this door does not touch.
fn reset_fields(kind: &Kind, subresource: &str) -> &'static [&'static str] {
    match subresource {
        "status" if kind.custom || kind.status_without_metadata => &["spec", "metadata"],
        "status" => &["spec"],
        "" if kind.status && !kind.is("", "nodes") => &["status"],
        _ => &[],
    }
}

/// Reads a body: checks its type and normalises it, as decoding into a typed object does.
fn decode(kind: &Kind, api_version: String, body: Value) -> Result<Value, ApiError> {
    let mut body = decode_config(kind, api_version, body)?;
    if !kind.custom {
        let managed = remove(&mut body, &["metadata", "managedFields"]);
        normalise(&mut body);
        if let Some(managed) = managed.filter(|m| !m.is_null()) {
            set(&mut body, &["metadata", "managedFields"], managed);
        }
    }
    Ok(body)
}

/// Reads a body, and leaves empty lists in it, which mean something in a configuration to apply.
fn decode_config(kind: &Kind, api_version: String, mut body: Value) -> Result<Value, ApiError> {
    if !body.is_object() {
        return Err(ApiError::bad_request("the body of the request is not an object"));
    }
    let given = text(&body, &["apiVersion"]).to_owned();
    let given_kind = text(&body, &["kind"]).to_owned();
    if given_kind.is_empty() && kind.custom {
        return Err(ApiError::bad_request(format!("the object has no kind (must be of type {})", kind.kind)));
    }
    if !given_kind.is_empty() && given_kind != kind.kind {
        if kind.custom {
            let error = crate::error::FieldError::invalid(
                "kind",
                &Value::from(given_kind),
                format!("must be {}", kind.kind),
            );
            return Err(ApiError::invalid(kind, text(&body, &["metadata", "name"]), &[error]));
        }
        return Err(ApiError::bad_request(format!(
            "{given_kind} in version \"{given}\" cannot be handled as a {}: expected kind {}",
            kind.kind, kind.kind
        )));
    }
    let storage = kind.api_version(kind.storage_version());
    if !given.is_empty() && given != api_version && given != storage {
        return Err(ApiError::bad_request(format!(
            "the API version in the data ({given}) does not match the expected API version ({api_version})"
        )));
    }
    if body.get("metadata").is_none_or(Value::is_null) {
        set(&mut body, &["metadata"], serde_json::json!({}));
    }
    set(&mut body, &["kind"], kind.kind.clone());
    set(&mut body, &["apiVersion"], api_version);
    convert::to_storage(&mut body, kind);
    Ok(body)
}

fn missing_manager() -> ApiError {
    let message =
        "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch";
    let mut e = ApiError::new(422, "Invalid", message);
    e.details = Some(serde_json::json!({"group": "meta.k8s.io", "kind": "PatchOptions", "causes": [{
        "reason": "FieldValueRequired",
        "message": "Required value: is required for apply patch",
        "field": "fieldManager",
    }]}));
    e
}

/// A write that changes nothing but the record of who wrote is none.
fn same_but_for_times(old: &Value, new: &Value) -> bool {
    let strip = |v: &Value| {
        let mut v = v.clone();
        remove(&mut v, &["metadata", "resourceVersion"]);
        if let Some(entries) = v.pointer_mut("/metadata/managedFields").and_then(Value::as_array_mut) {
            for entry in entries {
                remove(entry, &["time"]);
            }
        }
        v
    };
    strip(old) == strip(new)
}

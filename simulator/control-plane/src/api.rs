//! The API server without HTTP: what each verb does to the store.
//!
//! The order of a write is that of the real server: decode and default, mutating admission,
//! the kind's own preparation, ownership of fields, validation, validating admission, and one
//! compare-and-swap on the store that is tried again when a patch lost a race.

mod delete;
mod lists;
mod subresources;
mod write;

use std::sync::Arc;

use serde_json::Value;

use crate::admission::Admission;
use crate::audit::Origin;
use crate::error::ApiError;
use crate::kinds::{Kind, Registry};
use crate::options::{Gates, Options};
use crate::store::{Key, Store, Stored};
use crate::value::{set, text};

pub(crate) use delete::{DeleteOptions, success_status};
pub(crate) use lists::{ListOptions, ListPage};
pub(crate) use subresources::set_condition;

/// Which object a request is about.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) kind: Arc<Kind>,
    /// The version the client speaks.
    pub(crate) version: String,
    pub(crate) namespace: String,
    /// Empty for creations and lists.
    pub(crate) name: String,
    pub(crate) subresource: String,
}

impl Target {
    pub(crate) fn key(&self) -> Key {
        Key::new(&self.namespace, &self.name)
    }

    pub(crate) fn api_version(&self) -> String {
        self.kind.api_version(&self.version)
    }
}

/// Who asks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller {
    pub(crate) user: String,
    pub(crate) user_agent: String,
}

impl Caller {
    /// A controller of this control plane.
    pub(crate) fn internal(name: &str) -> Self {
        Self { user: format!("system:{name}"), user_agent: format!("aliquot-control-plane/{name}") }
    }
}

/// One write request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) target: Target,
    pub(crate) caller: Caller,
    /// `create`, `update`, `patch`, `apply`, `delete`.
    pub(crate) verb: &'static str,
    /// The field manager; empty for the default, the first part of the user agent.
    pub(crate) manager: String,
    pub(crate) force: bool,
    pub(crate) dry_run: bool,
}

impl Request {
    pub(crate) fn new(target: Target, caller: Caller, verb: &'static str) -> Self {
        Self { target, caller, verb, manager: String::new(), force: false, dry_run: false }
    }

    pub(crate) fn origin(&self) -> Origin {
        Origin {
            user: self.caller.user.clone(),
            user_agent: self.caller.user_agent.clone(),
            verb: self.verb.to_owned(),
            group: self.target.kind.group.clone(),
            resource: self.target.kind.plural.clone(),
            subresource: self.target.subresource.clone(),
        }
    }

    pub(crate) fn manager(&self) -> String {
        if !self.manager.is_empty() {
            return self.manager.clone();
        }
        let agent = self.caller.user_agent.split(['/', ' ']).next().unwrap_or_default();
        if agent.is_empty() { "unknown".to_owned() } else { agent.to_owned() }
    }
}

/// The API server.
pub(crate) struct ApiServer {
    pub(crate) options: Options,
    pub(crate) gates: Gates,
    pub(crate) store: Store,
    pub(crate) kinds: Registry,
    pub(crate) admission: Admission,
}

impl ApiServer {
    pub(crate) fn new(options: Options) -> Self {
        let gates = options.effective_gates();
        let kinds = Registry::new(&options);
        let store = Store::new(options.watch_history, options.audit_limit);
        let admission = Admission::new(options.services.clone());
        let server = Self { options, gates, store, kinds, admission };
        server.seed();
        server
    }

    /// The object as the client's version shows it.
    pub(crate) fn get(&self, target: &Target) -> Result<Arc<Value>, ApiError> {
        let stored = self.stored(target)?;
        Ok(show(&stored.object, &target.kind, &target.version))
    }

    pub(crate) fn stored(&self, target: &Target) -> Result<Stored, ApiError> {
        self.store
            .get(&target.kind.table(), &target.key())
            .ok_or_else(|| ApiError::not_found(&target.kind, &target.name))
    }

    /// A target of a built-in kind in its storage version.
    pub(crate) fn target(
        &self,
        group: &str,
        plural: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Target, ApiError> {
        let kind = self.kinds.by_plural(group, plural).ok_or_else(ApiError::no_such_path)?;
        let version = kind.storage_version().to_owned();
        Ok(Target {
            kind,
            version,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: String::new(),
        })
    }

    /// Objects that every cluster has.
    fn seed(&self) {
        let usual = ["default", "kube-system", "kube-public", "kube-node-lease"];
        for name in usual.into_iter().chain(self.options.namespaces.iter().map(String::as_str)) {
            self.seed_object("", "namespaces", serde_json::json!({"metadata": {"name": name}}));
        }
        for (name, value) in
            [("system-cluster-critical", 2_000_000_000), ("system-node-critical", 2_000_001_000)]
        {
            let body = serde_json::json!({
                "metadata": {"name": name}, "value": value, "preemptionPolicy": "PreemptLowerPriority",
            });
            self.seed_object("scheduling.k8s.io", "priorityclasses", body);
        }
    }

    fn seed_object(&self, group: &str, plural: &str, body: Value) {
        let name = text(&body, &["metadata", "name"]).to_owned();
        let Ok(target) = self.target(group, plural, "", &name) else { return };
        let request = Request::new(target, Caller::internal("apiserver"), "create");
        // Only fails when the object is there, which is as good.
        let _ = self.create_now(&request, body);
    }
}

/// Converts a stored object to the version that a client speaks.
pub(crate) fn show(object: &Arc<Value>, kind: &Kind, version: &str) -> Arc<Value> {
    let wanted = kind.api_version(version);
    if text(object, &["apiVersion"]) == wanted {
        return Arc::clone(object);
    }
    let mut out = Value::clone(object);
    crate::convert::from_storage(&mut out, kind, version);
    set(&mut out, &["apiVersion"], wanted);
    Arc::new(out)
}

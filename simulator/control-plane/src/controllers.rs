//! The bits of kube-controller-manager and kube-scheduler that our resources need.
//!
//! Each controller follows the log of all writes, keeps a queue of what may need work, and works
//! through the same API as everybody else, so its writes are validated and audited. They can be
//! switched while they run; what is off keeps its queue.

mod binding;
mod cleanup;
mod garbage;
mod namespaces;
mod nodes;
mod templates;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::{ApiServer, Caller, Request, Target};
use crate::audit::{AuditEntry, ChangeKind, Origin};
use crate::error::ApiError;
use crate::options::Controllers;
use crate::store::Key;
use crate::value::{at, list, now, text};

const RETRY: Duration = Duration::from_millis(50);

/// What a controller does; the loop around it is [`run`].
trait Controller: Send + 'static {
    /// What it works on.
    type Item: Ord + Clone + Send + Sync + std::fmt::Debug;

    /// Whether it is switched on.
    fn enabled(switches: Controllers) -> bool;

    /// Forgets what it keeps in memory: everything is about to be shown anew.
    fn reset(&mut self) {}

    /// Which items a write may have given work.
    fn affected(&mut self, api: &ApiServer, entry: &AuditEntry, queue: &mut BTreeSet<Self::Item>);

    /// Does what an item needs; on failure it is tried again.
    fn sync(
        &mut self,
        api: &ApiServer,
        item: &Self::Item,
    ) -> impl Future<Output = Result<(), ApiError>> + Send;
}

/// Starts all controllers; the switches say which of them work.
pub(crate) fn start(
    api: &Arc<ApiServer>,
    switches: &watch::Sender<Controllers>,
    shutdown: &CancellationToken,
    tasks: &TaskTracker,
) {
    let spawn = |task| tasks.spawn(shutdown.clone().run_until_cancelled_owned(task));
    spawn(futures::FutureExt::boxed(run(Arc::clone(api), switches.subscribe(), templates::Templates)));
    spawn(futures::FutureExt::boxed(run(Arc::clone(api), switches.subscribe(), cleanup::Cleanup)));
    spawn(futures::FutureExt::boxed(run(Arc::clone(api), switches.subscribe(), garbage::Garbage::default())));
    spawn(futures::FutureExt::boxed(run(Arc::clone(api), switches.subscribe(), binding::Binding::default())));
    spawn(futures::FutureExt::boxed(run(Arc::clone(api), switches.subscribe(), namespaces::Namespaces)));
}

async fn run<C: Controller>(
    api: Arc<ApiServer>,
    mut switches: watch::Receiver<Controllers>,
    mut controller: C,
) {
    let mut changed = api.store.subscribe_all();
    let mut queue = BTreeSet::new();
    let mut cursor = 0;
    loop {
        changed.borrow_and_update();
        let (complete, entries) = api.store.audit(|a| (a.is_complete_since(cursor), a.since(cursor)));
        if !complete {
            // Too far behind: what was missed is made up for by looking at everything.
            controller.reset();
            for entry in everything(&api) {
                controller.affected(&api, &entry, &mut queue);
            }
        }
        for entry in entries {
            cursor = entry.revision;
            controller.affected(&api, &entry, &mut queue);
        }
        let enabled = C::enabled(*switches.borrow_and_update());
        let mut failed = BTreeSet::new();
        if enabled {
            for item in std::mem::take(&mut queue) {
                if let Err(error) = controller.sync(&api, &item).await {
                    tracing::debug!(?item, %error, "will be tried again");
                    failed.insert(item);
                }
            }
        }
        let retry = !failed.is_empty();
        queue.extend(failed);
        tokio::select! {
            r = changed.changed() => if r.is_err() { return },
            r = switches.changed() => if r.is_err() { return },
            () = tokio::time::sleep(RETRY), if retry => {}
        }
    }
}

/// All objects, as if each had just been made.
fn everything(api: &ApiServer) -> Vec<AuditEntry> {
    let mut out = Vec::new();
    for kind in api.kinds.all().into_iter().filter(|k| k.storage.is_none()) {
        for (key, stored) in api.store.list(&kind.table(), "").items {
            out.push(AuditEntry {
                revision: stored.revision,
                time: jiff::Timestamp::now(),
                origin: Origin {
                    group: kind.group.clone(),
                    resource: kind.plural.clone(),
                    ..Origin::default()
                },
                change: ChangeKind::Added,
                namespace: key.namespace,
                name: key.name,
                before: None,
                after: Some(stored.object),
            });
        }
    }
    out
}

const CLAIMS: (&str, &str) = ("resource.k8s.io", "resourceclaims");

fn is(entry: &AuditEntry, group: &str, plural: &str) -> bool {
    entry.origin.group == group && entry.origin.resource == plural
}

fn key_of(entry: &AuditEntry) -> Key {
    Key::new(&entry.namespace, &entry.name)
}

/// A write of a built-in controller.
fn request(
    api: &ApiServer,
    user: &str,
    verb: &'static str,
    kind: (&str, &str),
    key: &Key,
) -> Result<Request, ApiError> {
    let target: Target = api.target(kind.0, kind.1, &key.namespace, &key.name)?;
    let caller = Caller { user: user.to_owned(), user_agent: format!("aliquot-control-plane/{user}") };
    let mut request = Request::new(target, caller, verb);
    request.manager = user.rsplit(':').next().unwrap_or(user).to_owned();
    Ok(request)
}

fn pod(api: &ApiServer, key: &Key) -> Option<Arc<Value>> {
    api.store.get("pods", key).map(|s| s.object)
}

fn claim(api: &ApiServer, namespace: &str, name: &str) -> Option<Arc<Value>> {
    api.store.get("resourceclaims.resource.k8s.io", &Key::new(namespace, name)).map(|s| s.object)
}

fn uid(object: &Value) -> &str {
    text(object, &["metadata", "uid"])
}

fn is_deleting(object: &Value) -> bool {
    at(object, &["metadata", "deletionTimestamp"]).is_some()
}

/// The pod has ended, or will never run.
fn pod_is_done(pod: &Value) -> bool {
    matches!(text(pod, &["status", "phase"]), "Succeeded" | "Failed")
        || (is_deleting(pod) && text(pod, &["spec", "nodeName"]).is_empty())
}

/// The controlling owner, if it is a pod: name and UID.
fn owning_pod(claim: &Value) -> Option<(&str, &str)> {
    list(claim, &["metadata", "ownerReferences"])
        .iter()
        .find(|o| {
            o.get("controller").and_then(Value::as_bool) == Some(true)
                && text(o, &["apiVersion"]) == "v1"
                && text(o, &["kind"]) == "Pod"
        })
        .map(|o| (text(o, &["name"]), text(o, &["uid"])))
}

/// The claims of a pod: name in the pod, and the object's name where it is known.
fn pod_claims(pod: &Value) -> Vec<(String, Option<String>)> {
    let known = list(pod, &["status", "resourceClaimStatuses"]);
    list(pod, &["spec", "resourceClaims"])
        .iter()
        .map(|c| {
            let name = text(c, &["name"]).to_owned();
            let direct = at(c, &["resourceClaimName"]).and_then(Value::as_str);
            let generated = known
                .iter()
                .find(|s| text(s, &["name"]) == name)
                .and_then(|s| at(s, &["resourceClaimName"]))
                .and_then(Value::as_str);
            (name, direct.or(generated).map(str::to_owned))
        })
        .collect()
}

/// Whether a pod asks for a claim of this name.
fn uses_claim(pod: &Value, claim: &str) -> bool {
    pod_claims(pod).iter().any(|(_, name)| name.as_deref() == Some(claim))
}

fn is_reserved_for(claim: &Value, pod: &Value) -> bool {
    list(claim, &["status", "reservedFor"]).iter().any(|r| text(r, &["uid"]) == uid(pod))
}

/// Adds a pod to `reservedFor`; an error when there is no room or nothing to reserve.
async fn reserve(api: &ApiServer, user: &str, claim: &Key, pod: &Value) -> Result<(), ApiError> {
    let mut request = request(api, user, "update", CLAIMS, claim)?;
    request.target.subresource = "status".into();
    let entry = json!({"resource": "pods", "name": text(pod, &["metadata", "name"]), "uid": uid(pod)});
    api.modify(&request, |live| {
        let mut new = live.clone();
        if !is_reserved_for(live, pod) {
            let reserved = crate::value::entry(&mut new, &["status", "reservedFor"]);
            if !reserved.is_array() {
                *reserved = json!([]);
            }
            if let Some(items) = reserved.as_array_mut() {
                items.push(entry.clone());
            }
        }
        Ok(new)
    })
    .await?;
    Ok(())
}

/// Records an event about a pod; failures to do so are of no consequence.
async fn pod_event(api: &ApiServer, user: &str, pod: &Value, reason: &str, message: &str) {
    let namespace = text(pod, &["metadata", "namespace"]);
    let name = text(pod, &["metadata", "name"]);
    let Ok(request) = request(api, user, "create", ("", "events"), &Key::new(namespace, "")) else { return };
    let component = user.rsplit(':').next().unwrap_or(user);
    let event = json!({
        "metadata": {"generateName": format!("{name}.")},
        "involvedObject": {"kind": "Pod", "apiVersion": "v1", "namespace": namespace, "name": name, "uid": uid(pod)},
        "reason": reason, "message": message, "type": "Warning", "count": 1,
        "firstTimestamp": now(), "lastTimestamp": now(),
        "source": {"component": component}, "reportingComponent": component, "reportingInstance": "",
    });
    if let Err(error) = api.create(&request, event).await {
        tracing::debug!(%error, "event was not recorded");
    }
}

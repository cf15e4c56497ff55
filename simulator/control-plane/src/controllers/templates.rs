//! Makes claims from templates, and reserves claims for pods that came with a node.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{
    CLAIMS, Controller, claim, is, is_deleting, is_reserved_for, key_of, owning_pod, pod, pod_claims,
    pod_event, pod_is_done, request, reserve, uid,
};
use crate::api::ApiServer;
use crate::audit::{AuditEntry, ChangeKind};
use crate::error::ApiError;
use crate::options::{Controllers, ServerVersion};
use crate::patch::Patch;
use crate::store::Key;
use crate::value::{at, list, set, text};

const USER: &str = "system:serviceaccount:kube-system:resource-claim-controller";
const ANNOTATION: &str = "resource.kubernetes.io/pod-claim-name";
/// Room for a hyphen and five characters in a label.
const MAX_BASE: usize = 57;

pub(super) struct Templates;

impl Controller for Templates {
    type Item = Key;

    fn enabled(switches: Controllers) -> bool {
        switches.claim_templates
    }

    fn affected(&mut self, api: &ApiServer, entry: &AuditEntry, queue: &mut BTreeSet<Key>) {
        let object = entry.after.as_deref().or(entry.before.as_deref());
        if is(entry, "", "pods") && entry.change != ChangeKind::Deleted {
            if object.is_some_and(|p| !list(p, &["spec", "resourceClaims"]).is_empty()) {
                queue.insert(key_of(entry));
            }
        } else if is(entry, CLAIMS.0, CLAIMS.1) {
            if let Some((owner, _)) = object.and_then(owning_pod) {
                queue.insert(Key::new(&entry.namespace, owner));
            }
        } else if is(entry, "resource.k8s.io", "resourceclaimtemplates") && entry.change == ChangeKind::Added
        {
            // Pods that were waiting for the template.
            queue.extend(api.store.keys_where("pods", &entry.namespace, |pod| {
                pod_claims(pod).iter().any(|(_, name)| name.is_none())
            }));
        }
    }

    async fn sync(&mut self, api: &ApiServer, key: &Key) -> Result<(), ApiError> {
        let Some(pod) = pod(api, key) else { return Ok(()) };
        if is_deleting(&pod) || pod_is_done(&pod) {
            return Ok(());
        }
        let mut made = BTreeMap::new();
        let mut problem = None;
        for entry in list(&pod, &["spec", "resourceClaims"]) {
            match self.claim_for(api, &pod, entry).await {
                Ok(Some(name)) => {
                    made.insert(text(entry, &["name"]).to_owned(), name);
                }
                Ok(None) => {}
                Err(e) => {
                    pod_event(api, USER, &pod, "FailedResourceClaimCreation", &e.message).await;
                    problem = Some(e);
                }
            }
        }
        if !made.is_empty() {
            record(api, key, &pod, &made).await?;
        }
        match problem {
            // A missing template is waited for, not polled for.
            Some(e) if e.code != 404 => return Err(e),
            _ => {}
        }
        self.reserve_on_node(api, key, &pod).await
    }
}

impl Templates {
    /// The name of a claim that the pod's status does not have yet.
    async fn claim_for(
        &self,
        api: &ApiServer,
        pod: &Value,
        entry: &Value,
    ) -> Result<Option<String>, ApiError> {
        let template = text(entry, &["resourceClaimTemplateName"]);
        if template.is_empty() {
            return Ok(None);
        }
        let namespace = text(pod, &["metadata", "namespace"]);
        let name = text(entry, &["name"]);
        let recorded =
            list(pod, &["status", "resourceClaimStatuses"]).iter().find(|s| text(s, &["name"]) == name);
        let owned = |c: &Value| owning_pod(c).is_some_and(|(_, owner)| owner == uid(pod));
        if let Some(recorded) = recorded.map(|s| text(s, &["resourceClaimName"])).filter(|n| !n.is_empty())
            && claim(api, namespace, recorded).is_some_and(|c| owned(&c))
        {
            return Ok(None);
        }
        // One that was made before its name could be recorded.
        let mut orphans = api.store.keys_where("resourceclaims.resource.k8s.io", namespace, |c| {
            text(c, &["metadata", "annotations", ANNOTATION]) == name && owned(c)
        });
        if let Some(key) = orphans.pop() {
            return Ok(Some(key.name));
        }
        let templates = api.target("resource.k8s.io", "resourceclaimtemplates", namespace, template)?;
        let template = api.stored(&templates)?.object;
        let mut body = from_template(&template, pod, name);
        if api.options.version >= ServerVersion::V1_37 {
            remove_block(&mut body);
        }
        let request = request(api, USER, "create", CLAIMS, &Key::new(namespace, ""))?;
        let made = api.create(&request, body).await?;
        Ok(Some(text(&made, &["metadata", "name"]).to_owned()))
    }

    /// A pod that was made with a node gets no scheduler to reserve its claims.
    async fn reserve_on_node(&self, api: &ApiServer, key: &Key, pod: &Value) -> Result<(), ApiError> {
        if text(pod, &["spec", "nodeName"]).is_empty() {
            return Ok(());
        }
        for (_, name) in pod_claims(pod) {
            let Some(name) = name else { continue };
            let Some(claim) = claim(api, &key.namespace, &name) else { continue };
            let allocated = at(&claim, &["status", "allocation"]).is_some();
            let room = list(&claim, &["status", "reservedFor"]).len() < 256;
            if allocated && room && !is_deleting(&claim) && !is_reserved_for(&claim, pod) {
                reserve(api, USER, &Key::new(&key.namespace, &name), pod).await?;
            }
        }
        Ok(())
    }
}

fn from_template(template: &Value, pod: &Value, name: &str) -> Value {
    let pod_name = text(pod, &["metadata", "name"]);
    let mut metadata = json!({
        "generateName": generate_base(pod_name, name),
        "ownerReferences": [{
            "apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": uid(pod),
            "controller": true, "blockOwnerDeletion": true,
        }],
    });
    for field in ["labels", "annotations"] {
        if let Some(value) = at(template, &["spec", "metadata", field]) {
            set(&mut metadata, &[field], value.clone());
        }
    }
    set(&mut metadata, &["annotations", ANNOTATION], name);
    let spec = at(template, &["spec", "spec"]).cloned().unwrap_or_else(|| json!({}));
    json!({"metadata": metadata, "spec": spec})
}

/// Newer releases do not let a claim hold up the foreground deletion of its pod.
fn remove_block(claim: &mut Value) {
    if let Some(owner) = claim.pointer_mut("/metadata/ownerReferences/0").and_then(Value::as_object_mut) {
        owner.remove("blockOwnerDeletion");
    }
}

/// `<pod>-<claim>-`, both cut in proportion when that is too long.
fn generate_base(pod: &str, claim: &str) -> String {
    let whole = format!("{pod}-{claim}-");
    if whole.len() <= MAX_BASE {
        return whole;
    }
    let cut = |s: &str| s.get(..s.len() * MAX_BASE / whole.len()).unwrap_or(s).to_owned();
    format!("{}-{}", cut(pod), cut(claim))
}

async fn record(
    api: &ApiServer,
    key: &Key,
    pod: &Value,
    made: &BTreeMap<String, String>,
) -> Result<(), ApiError> {
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    for s in list(pod, &["status", "resourceClaimStatuses"]) {
        all.insert(text(s, &["name"]).to_owned(), text(s, &["resourceClaimName"]).to_owned());
    }
    all.extend(made.clone());
    let statuses: Vec<Value> =
        all.iter().map(|(name, claim)| json!({"name": name, "resourceClaimName": claim})).collect();
    let mut request = request(api, USER, "apply", ("", "pods"), key)?;
    request.target.subresource = "status".into();
    request.force = true;
    let config = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": key.name, "uid": uid(pod)},
        "status": {"resourceClaimStatuses": statuses},
    });
    api.patch(&request, &Patch::Apply(config)).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_on_both_sides() {
        assert_eq!(generate_base("pod", "gpu"), "pod-gpu-");
        let base = generate_base(&"p".repeat(100), &"c".repeat(50));
        assert!(base.len() <= MAX_BASE + 1, "{}", base.len());
        assert!(base.contains("p-c"));
    }
}

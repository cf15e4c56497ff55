//! Plays kube-controller-manager for the pods of Deployments, StatefulSets and Jobs.

use super::api;
use super::manifests::{Document, Place};
use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

/// The objects that make pods and keep their number.
#[derive(Debug, Default)]
pub(crate) struct Workloads {
    items: Vec<Workload>,
}

#[derive(Debug, Clone)]
struct Workload {
    /// The object; for a Deployment, its ReplicaSet.
    object: Document,
    place: Place,
    namespace: String,
    /// The owner reference of its pods.
    owner: Value,
    uid: String,
    name: String,
    /// True if pods have numbers instead of generated names.
    numbered: bool,
    wanted: usize,
    template: Value,
}

/// Returns true if an object makes pods.
pub(crate) fn is_workload(document: &Document) -> bool {
    matches!(document.text("/kind"), "Deployment" | "StatefulSet" | "Job")
}

/// Returns the pods that an object makes, as one pod; `None` if it makes none.
pub(crate) fn pod_of(document: &Document) -> Option<Document> {
    let spec = document.object.pointer("/spec/template/spec").filter(|_| is_workload(document))?;
    let metadata = json!({"name": document.text("/metadata/name"), "namespace": document.namespace()});
    let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
    Some(Document { place: document.place.clone(), object })
}

impl Workloads {
    /// Takes over an object that was created. For a Deployment, it creates a ReplicaSet, which makes the
    /// pods.
    ///
    /// # Errors
    /// If the ReplicaSet is refused.
    pub(crate) async fn add(&mut self, client: &Client, document: &Document, uid: &str) -> Result<()> {
        if !is_workload(document) {
            return Ok(());
        }
        let (mut owner, mut uid) = (document.clone(), uid.to_owned());
        if document.text("/kind") == "Deployment" {
            owner = replica_set(document, &uid);
            uid = api::create(client, &owner).await?;
        }
        let field = if owner.text("/kind") == "Job" { "/spec/parallelism" } else { "/spec/replicas" };
        let wanted = owner.object.pointer(field).and_then(Value::as_u64).unwrap_or(1);
        self.items.push(Workload {
            place: document.place.clone(),
            namespace: document.namespace().to_owned(),
            object: owner.clone(),
            owner: reference(&owner, &uid),
            uid,
            name: owner.text("/metadata/name").to_owned(),
            numbered: owner.text("/kind") == "StatefulSet",
            wanted: usize::try_from(wanted).unwrap_or(usize::MAX),
            template: owner.object.pointer("/spec/template").cloned().unwrap_or_default(),
        });
        Ok(())
    }

    /// Creates the pods that are missing; returns false if none are.
    ///
    /// # Errors
    /// If a pod is refused.
    pub(crate) async fn create_missing(&self, client: &Client, pods: &[Pod]) -> Result<bool> {
        let missing: Vec<Document> = self.items.iter().flat_map(|workload| workload.missing(pods)).collect();
        for pod in &missing {
            api::create(client, pod).await?;
        }
        Ok(!missing.is_empty())
    }

    /// Deletes the objects that make pods, and so the pods.
    ///
    /// # Errors
    /// If a deletion is refused.
    pub(crate) async fn delete(&self, client: &Client) -> Result<()> {
        for workload in &self.items {
            api::delete(client, &workload.object).await?;
        }
        Ok(())
    }

    /// Returns the place of the object that made a pod.
    pub(crate) fn place_of(&self, pod: &Pod) -> Option<&Place> {
        let made = self.items.iter().find(|workload| workload.made(pod));
        made.map(|workload| &workload.place)
    }
}

impl Workload {
    fn made(&self, pod: &Pod) -> bool {
        pod.owner_references().iter().any(|owner| owner.uid == self.uid)
    }

    fn missing(&self, pods: &[Pod]) -> Vec<Document> {
        let own: Vec<&Pod> = pods.iter().filter(|pod| self.made(pod)).collect();
        if self.numbered {
            let names = (0..self.wanted).map(|number| format!("{}-{number}", self.name));
            let absent = names.filter(|name| !own.iter().any(|pod| pod.name_any() == *name));
            return absent.map(|name| self.pod("name", &name)).collect();
        }
        let alive = own.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).count();
        let prefix = format!("{}-", self.name);
        (alive..self.wanted).map(|_| self.pod("generateName", &prefix)).collect()
    }

    fn pod(&self, field: &str, name: &str) -> Document {
        let mut metadata =
            self.template.get("metadata").and_then(Value::as_object).cloned().unwrap_or_default();
        metadata.insert(field.to_owned(), json!(name));
        metadata.insert("namespace".to_owned(), json!(self.namespace));
        metadata.insert("ownerReferences".to_owned(), json!([self.owner]));
        let spec = self.template.get("spec").cloned().unwrap_or_default();
        let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
        Document { place: self.place.clone(), object }
    }
}

fn replica_set(deployment: &Document, uid: &str) -> Document {
    let mut spec = deployment.object.get("spec").cloned().unwrap_or_default();
    if let Some(fields) = spec.as_object_mut() {
        fields.retain(|field, _| ["replicas", "selector", "template"].contains(&field.as_str()));
    }
    let object = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "spec": spec,
        "metadata": {
            "name": deployment.text("/metadata/name"), "namespace": deployment.namespace(),
            "ownerReferences": [reference(deployment, uid)],
        },
    });
    Document { place: deployment.place.clone(), object }
}

fn reference(owner: &Document, uid: &str) -> Value {
    json!({
        "apiVersion": owner.text("/apiVersion"), "kind": owner.text("/kind"),
        "name": owner.text("/metadata/name"), "uid": uid, "controller": true, "blockOwnerDeletion": true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::manifests::parse;

    fn workload(kind: &str, field: &str) -> Workload {
        let text = format!(
            "apiVersion: apps/v1\nkind: {kind}\nmetadata: {{name: web, namespace: n}}\n\
             spec: {{{field}: 2, template: {{metadata: {{labels: {{a: b}}}}, spec: {{containers: []}}}}}}\n"
        );
        let document = parse("f.yaml", &text).unwrap().remove(0);
        Workload {
            object: document.clone(),
            place: document.place.clone(),
            namespace: "n".into(),
            owner: reference(&document, "u"),
            uid: "u".into(),
            name: "web".into(),
            numbered: kind == "StatefulSet",
            wanted: 2,
            template: document.object["spec"]["template"].clone(),
        }
    }

    fn pod(document: &Document, name: &str) -> Pod {
        let mut pod: Pod = serde_json::from_value(document.object.clone()).unwrap();
        pod.metadata.name = Some(name.to_owned());
        pod
    }

    #[test]
    fn a_pod_that_ends_is_replaced() {
        let deployment = workload("Deployment", "replicas");
        let made = deployment.missing(&[]);
        assert_eq!(made.len(), 2);
        assert_eq!(made[0].text("/metadata/generateName"), "web-");
        assert_eq!(made[0].text("/metadata/labels/a"), "b");
        let mut pods = vec![pod(&made[0], "web-x"), pod(&made[1], "web-y")];
        assert!(deployment.missing(&pods).is_empty());
        pods[0].metadata.deletion_timestamp =
            Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        assert_eq!(deployment.missing(&pods).len(), 1, "as soon as it is being deleted");
    }

    #[test]
    fn a_numbered_pod_comes_back_under_its_name_once_it_is_gone() {
        let set = workload("StatefulSet", "replicas");
        let made = set.missing(&[]);
        let names: Vec<&str> = made.iter().map(|one| one.text("/metadata/name")).collect();
        assert_eq!(names, ["web-0", "web-1"]);
        let missing = set.missing(&[pod(&made[0], "web-0")]);
        assert_eq!(missing.iter().map(|one| one.text("/metadata/name")).collect::<Vec<_>>(), ["web-1"]);
    }
}

//! The demo's access to the API: applies objects, and reads pods, claims, slices and events.

use super::manifests::Document;
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};

const CLUSTER_SCOPED: [&str; 6] = [
    "Namespace",
    "DeviceClass",
    "PriorityClass",
    "CustomResourceDefinition",
    "MutatingWebhookConfiguration",
    "ValidatingWebhookConfiguration",
];

/// Creates an object, whose namespace must exist, and returns its UID; the UID is empty for a namespace that
/// exists already.
pub(crate) async fn create(client: &Client, document: &Document) -> Result<String> {
    let object: DynamicObject = serde_json::from_value(document.object.clone())
        .with_context(|| format!("{}: {}", document.place, document.label()))?;
    let kind = document.text("/kind");
    let cluster_scoped = CLUSTER_SCOPED.contains(&kind);
    match api(client, document).create(&PostParams::default(), &object).await {
        Err(kube::Error::Api(status)) if status.code == 409 && kind == "Namespace" => Ok(String::new()),
        Err(kube::Error::Api(status)) if status.code == 404 && !cluster_scoped => bail!(
            "{}: {} is in namespace {}, which does not exist; put a Namespace of that name before it",
            document.place,
            document.label(),
            document.namespace()
        ),
        result => {
            let created =
                result.with_context(|| format!("{}: {} was refused", document.place, document.label()))?;
            Ok(created.uid().unwrap_or_default())
        }
    }
}

/// Returns the API of the object's kind, in the object's namespace if the kind has one.
fn api(client: &Client, document: &Document) -> Api<DynamicObject> {
    let (api_version, kind) = (document.text("/apiVersion"), document.text("/kind"));
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    if CLUSTER_SCOPED.contains(&kind) {
        Api::all_with(client.clone(), &resource)
    } else {
        Api::namespaced_with(client.clone(), document.namespace(), &resource)
    }
}

/// Returns all pods with resource claims.
pub(crate) async fn pods(client: &Client) -> Result<Vec<Pod>> {
    let pods = Api::<Pod>::all(client.clone()).list(&ListParams::default()).await?;
    let mut pods: Vec<Pod> = pods
        .items
        .into_iter()
        .filter(|p| p.spec.as_ref().is_some_and(|s| s.resource_claims.is_some()))
        .collect();
    pods.sort_by_key(|p| (p.namespace(), p.name_any()));
    Ok(pods)
}

pub(crate) async fn claims(client: &Client) -> Result<Vec<ResourceClaim>> {
    Ok(Api::<ResourceClaim>::all(client.clone()).list(&ListParams::default()).await?.items)
}

pub(crate) async fn slices(client: &Client) -> Result<Vec<ResourceSlice>> {
    Ok(Api::<ResourceSlice>::all(client.clone()).list(&ListParams::default()).await?.items)
}

/// Returns the newest warning about an object, as reason and message; `None` if there is none.
pub(crate) async fn warning(client: &Client, namespace: &str, name: &str) -> Result<Option<String>> {
    let about =
        |e: &Event| e.type_.as_deref() == Some("Warning") && e.involved_object.name.as_deref() == Some(name);
    newest(client, namespace, about).await
}

/// Returns the newest event of a pod, as reason and message.
pub(crate) async fn last_event(client: &Client, pod: &Pod) -> Result<String> {
    let about = |e: &Event| e.involved_object.uid == pod.uid();
    let event = newest(client, &pod.namespace().unwrap_or_default(), about).await?;
    Ok(event.unwrap_or_else(|| "it was deleted".to_owned()))
}

async fn newest(client: &Client, namespace: &str, about: impl Fn(&Event) -> bool) -> Result<Option<String>> {
    let events = Api::<Event>::namespaced(client.clone(), namespace).list(&ListParams::default()).await?;
    let newest = events.items.iter().filter(|event| about(event)).max_by_key(|e| {
        (
            e.last_timestamp.as_ref().map(|t| t.0),
            e.event_time.as_ref().map(|t| t.0),
            e.creation_timestamp().map(|t| t.0),
        )
    });
    Ok(newest.map(|e| {
        format!("{}: {}", e.reason.as_deref().unwrap_or("Event"), e.message.as_deref().unwrap_or_default())
    }))
}

/// Returns the name of the claim of a pod's entry in `spec.resourceClaims`; `None` if it is not known yet.
pub(crate) fn claim_name(pod: &Pod, entry: &str) -> Option<String> {
    let spec = pod.spec.as_ref()?.resource_claims.as_ref()?.iter().find(|c| c.name == entry)?;
    if let Some(name) = &spec.resource_claim_name {
        return Some(name.clone());
    }
    let statuses = pod.status.as_ref()?.resource_claim_statuses.as_ref()?;
    statuses.iter().find(|s| s.name == entry)?.resource_claim_name.clone()
}

/// Marks a pod as running, as its kubelet would.
pub(crate) async fn mark_running(client: &Client, pod: &Pod) -> Result<()> {
    let api = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let patch = serde_json::json!({"status": {"phase": "Running"}});
    api.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

/// Removes a pod whose containers have ended.
pub(crate) async fn remove_pod(client: &Client, pod: &Pod) -> Result<()> {
    let api = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    ignore_absent(api.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await.map(drop))
}

/// Deletes an object and the objects that it owns.
pub(crate) async fn delete(client: &Client, document: &Document) -> Result<()> {
    let (name, parameters) = (document.text("/metadata/name"), DeleteParams::background());
    ignore_absent(api(client, document).delete(name, &parameters).await.map(drop))
}

/// Deletes a claim that no pod owns.
pub(crate) async fn remove_claim(client: &Client, claim: &ResourceClaim) -> Result<()> {
    let api = Api::<ResourceClaim>::namespaced(client.clone(), &claim.namespace().unwrap_or_default());
    ignore_absent(api.delete(&claim.name_any(), &DeleteParams::default()).await.map(drop))
}

fn ignore_absent(result: kube::Result<()>) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other?),
    }
}

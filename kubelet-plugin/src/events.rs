//! Events on our Node and on claims. Losing one is no error, but where something hangs on
//! it: each is also a log line.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use crate::claim::ClaimRef;

/// Writes events.
#[derive(Clone)]
pub struct Events {
    recorder: Recorder,
    node: ObjectReference,
}

impl Events {
    /// Events of this agent.
    pub fn new(client: kube::Client, node: &str) -> Self {
        let reporter =
            Reporter { controller: "aliquot-kubelet-plugin".into(), instance: Some(node.to_owned()) };
        let node = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: Some(node.to_owned()),
            // As the kubelet does it: `kubectl describe node` looks for the name here.
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        Self { recorder: Recorder::new(client, reporter), node }
    }

    /// Something about the node that somebody should look at.
    pub fn node_warning(&self, reason: &str, note: String) {
        tracing::warn!(reason, "{note}");
        self.publish(EventType::Warning, reason, note, self.node.clone());
    }

    /// Something about the node worth knowing.
    pub fn node_normal(&self, reason: &str, note: String) {
        tracing::info!(reason, "{note}");
        self.publish(EventType::Normal, reason, note, self.node.clone());
    }

    /// Something about a claim that somebody should look at.
    pub fn claim_warning(&self, claim: &ClaimRef, reason: &str, note: String) {
        let reference = ObjectReference {
            api_version: Some("resource.k8s.io/v1".into()),
            kind: Some("ResourceClaim".into()),
            namespace: Some(claim.namespace.clone()),
            name: Some(claim.name.clone()),
            uid: Some(claim.uid.clone()),
            ..ObjectReference::default()
        };
        self.publish(EventType::Warning, reason, note, reference);
    }

    /// Something about a pod that somebody should look at.
    pub fn pod_warning(&self, namespace: &str, name: &str, uid: &str, reason: &str, note: String) {
        tracing::warn!(pod.namespace = namespace, pod.name = name, reason, "{note}");
        self.publish(EventType::Warning, reason, note, pod(namespace, name, uid));
    }

    /// The same, for what must be on record before something is done.
    ///
    /// # Errors
    /// If the API does not take it.
    pub async fn pod_warning_on_record(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        reason: &str,
        note: String,
    ) -> kube::Result<()> {
        tracing::warn!(pod.namespace = namespace, pod.name = name, reason, "{note}");
        self.recorder.publish(&event(EventType::Warning, reason, note), &pod(namespace, name, uid)).await
    }

    fn publish(&self, type_: EventType, reason: &str, note: String, about: ObjectReference) {
        let event = event(type_, reason, note);
        let recorder = self.recorder.clone();
        tokio::spawn(async move {
            if let Err(error) = recorder.publish(&event, &about).await {
                tracing::debug!(%error, "an event could not be written");
            }
        });
    }
}

fn event(type_: EventType, reason: &str, mut note: String) -> Event {
    // The API refuses notes above 1 KiB.
    while note.len() > 1000 {
        note.pop();
    }
    Event { type_, reason: reason.to_owned(), note: Some(note), action: reason.to_owned(), secondary: None }
}

fn pod(namespace: &str, name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Events")
    }
}

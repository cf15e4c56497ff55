//! Events on our Node and on claims. Losing one is no error, but where something hangs on
//! it: each is also a log line.

use aliquot_model::event::{About, is_as_listed};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::claim::ClaimRef;
use crate::reasons::REASONS;

/// Most notes that are remembered.
const NOTES: usize = 256;

/// Object, reason and note of an event.
type Key = (ObjectReference, String, String);

/// Writes events. Equal ones become a series of one event; others, such as two errors of a GPU or the same
/// error of two, are events of their own.
#[derive(Clone)]
pub struct Events {
    client: kube::Client,
    reporter: Reporter,
    node: ObjectReference,
    /// A recorder takes events for equal whose object and reason are, whatever they say, so each note has one.
    recorders: Arc<Mutex<VecDeque<(Key, Recorder)>>>,
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
        Self { client, reporter, node, recorders: Arc::default() }
    }

    /// The recorder for what an event says about an object. The oldest note is forgotten first: said again it
    /// is a new event.
    fn recorder(&self, event: &Event, about: &ObjectReference) -> Recorder {
        let key = (about.clone(), event.reason.clone(), event.note.clone().unwrap_or_default());
        let mut recorders = self.recorders.lock();
        if let Some((_, known)) = recorders.iter().find(|(other, _)| *other == key) {
            return known.clone();
        }
        if recorders.len() >= NOTES {
            recorders.pop_front();
        }
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        recorders.push_back((key, recorder.clone()));
        recorder
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
        let (event, about) = (event(EventType::Warning, reason, note), pod(namespace, name, uid));
        debug_assert!(is_listed(&event, &about), "{} is in no table, or otherwise", event.reason);
        self.recorder(&event, &about).publish(&event, &about).await
    }

    fn publish(&self, type_: EventType, reason: &str, note: String, about: ObjectReference) {
        let event = event(type_, reason, note);
        debug_assert!(is_listed(&event, &about), "{} is in no table, or otherwise", event.reason);
        let recorder = self.recorder(&event, &about);
        tokio::spawn(async move {
            if let Err(error) = recorder.publish(&event, &about).await {
                tracing::debug!(%error, "an event could not be written");
            }
        });
    }
}

/// Whether it is what the table of reasons, from which operators read, says of its reason.
fn is_listed(event: &Event, about: &ObjectReference) -> bool {
    let kinds = [About::Node, About::Pod, About::ResourceClaim];
    let kind = kinds.into_iter().find(|kind| about.kind.as_deref() == Some(kind.kind()));
    let warning = matches!(event.type_, EventType::Warning);
    kind.and_then(|kind| is_as_listed(REASONS, &event.reason, warning, kind)) == Some(true)
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

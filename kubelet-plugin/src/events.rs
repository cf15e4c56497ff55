//! Writes events on the Node, on claims and on pods. Losing an event is no error, unless something depends on
//! it. Events about the node and about pods are also log lines.

use aliquot_model::event::{About, is_as_listed};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::claim::ClaimRef;
use crate::reasons::REASONS;

/// The largest number of notes that are remembered.
const NOTES: usize = 256;

/// The object, reason and note of an event.
type Key = (ObjectReference, String, String);

/// The writer of events. Equal events become a series of one event. Others, such as two errors of a GPU or
/// the same error of two GPUs, are events of their own.
#[derive(Clone)]
pub struct Events {
    client: kube::Client,
    reporter: Reporter,
    node: ObjectReference,
    /// A recorder takes events for equal if their object and reason are equal, whatever the note says. So
    /// each note has its own recorder.
    recorders: Arc<Mutex<VecDeque<(Key, Recorder)>>>,
}

impl Events {
    /// Creates the writer of events of this agent.
    pub fn new(client: kube::Client, node: &str) -> Self {
        let reporter =
            Reporter { controller: "aliquot-kubelet-plugin".into(), instance: Some(node.to_owned()) };
        let node = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: Some(node.to_owned()),
            // The kubelet does the same: `kubectl describe node` looks for the name here.
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        Self { client, reporter, node, recorders: Arc::default() }
    }

    /// Returns the recorder for an event's note about an object. The oldest note is forgotten first; if it
    /// comes again, it is a new event.
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

    /// Sends a warning about the node.
    pub fn node_warning(&self, reason: &str, note: String) {
        tracing::warn!(reason, "{note}");
        self.publish(EventType::Warning, reason, note, self.node.clone());
    }

    /// Sends information about the node.
    pub fn node_normal(&self, reason: &str, note: String) {
        tracing::info!(reason, "{note}");
        self.publish(EventType::Normal, reason, note, self.node.clone());
    }

    /// Sends a warning about a claim.
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

    /// Sends a warning about a pod.
    pub fn pod_warning(&self, namespace: &str, name: &str, uid: &str, reason: &str, note: String) {
        tracing::warn!(pod.namespace = namespace, pod.name = name, reason, "{note}");
        self.publish(EventType::Warning, reason, note, pod(namespace, name, uid));
    }

    /// Sends a warning about a pod and waits until it is written, for a warning that must be on record before
    /// an action.
    ///
    /// # Errors
    /// Fails if the API does not accept the event.
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

/// Returns true if the event agrees with the table of reasons, which operators read.
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

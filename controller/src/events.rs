//! Events, which users see with `kubectl describe`.

use crate::fair_permits::Gate;
use crate::field_manager::{FIELD_MANAGER, creation};
use crate::report::{Regarding, Report};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Longest name that an API object may have, in bytes.
const LONGEST_NAME: usize = 253;
/// Longest note that the API accepts, in bytes.
const LONGEST_NOTE: usize = 1024;
/// The most events that are queued for the task that sends them. Further events are dropped, with a debug
/// message in the log.
const ON_THE_WAY: usize = 1024;
/// The most events of one namespace that wait to be sent, so that one namespace neither delays the events of
/// all others nor fills memory.
const WAITING: usize = 256;

/// The most events that are sent at the same time. Sent one by one, events would arrive minutes late when
/// many pods are decided, and be lost when the controller ends. One namespace gets only a part of them, see
/// [`Gate`].
const AT_A_TIME: usize = 16;
/// The part of [`AT_A_TIME`] that one namespace may use.
const AT_A_TIME_OF_ONE: usize = 4;

/// Sends events in the background. The loss of an event is not an error.
#[derive(Debug, Clone)]
pub struct Reporter {
    queue: mpsc::Sender<Report>,
}

impl Reporter {
    /// Starts the task that sends events; the task ends when every clone is dropped and the last event is
    /// sent.
    pub fn start(client: Client, instance: &str) -> Self {
        let (queue, reports) = mpsc::channel::<Report>(ON_THE_WAY);
        tokio::spawn(send_all(client, instance.into(), reports));
        Self { queue }
    }

    /// Queues an event and returns at once; the event is dropped if the queue is full.
    pub fn tell(&self, report: Report) {
        if self.queue.try_send(report).is_err() {
            tracing::debug!("too many events at once: one is dropped");
        }
    }
}

async fn send_all(client: Client, instance: Arc<str>, mut reports: mpsc::Receiver<Report>) {
    let gate = Gate::new(AT_A_TIME, AT_A_TIME_OF_ONE);
    let mut waiting: HashMap<Arc<str>, usize> = HashMap::new();
    let mut sending: JoinSet<Arc<str>> = JoinSet::new();
    loop {
        tokio::select! {
            Some(sent) = sending.join_next() => {
                if let Ok(lane) = sent
                    && let Entry::Occupied(mut count) = waiting.entry(lane)
                {
                    *count.get_mut() -= 1;
                    if *count.get() == 0 {
                        count.remove();
                    }
                }
            }
            report = reports.recv() => {
                let Some(report) = report else { break };
                let lane = report.regarding.namespace();
                let count = waiting.entry(lane.clone()).or_default();
                if *count >= WAITING {
                    tracing::debug!(namespace = %lane, "too many events of one namespace wait: one is dropped");
                    continue;
                }
                *count += 1;
                let (client, instance, gate) = (client.clone(), instance.clone(), gate.clone());
                sending.spawn(async move {
                    let _turn = gate.enter(&lane).await;
                    send(&client, &instance, report).await;
                    lane
                });
            }
        }
    }
    while sending.join_next().await.is_some() {}
}

async fn send(client: &Client, instance: &str, report: Report) {
    let event = event(&report, instance);
    let namespace = event.metadata.namespace.clone().unwrap_or_default();
    let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
    match tokio::time::timeout(Duration::from_secs(5), api.create(&creation(), &event)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::debug!(%error, reason = report.reason, "event not written"),
        Err(_) => tracing::debug!(reason = report.reason, "event not written in time"),
    }
}

/// Returns the event of a report.
pub(crate) fn event(report: &Report, instance: &str) -> Event {
    let (kind, api_version, key, uid) = match &report.regarding {
        Regarding::Pod(key, uid) => ("Pod", "v1", Some(key), Some(uid.to_string())),
        Regarding::Claim(key, uid) => {
            ("ResourceClaim", "resource.k8s.io/v1", Some(key), Some(uid.to_string()))
        }
        // As the kubelet does it: `kubectl describe node` looks for events with the node's name as UID.
        Regarding::Node(name) => ("Node", "v1", None, Some(name.to_string())),
        Regarding::Budget(key, uid) => {
            ("GpuBudget", aliquot_model::names::API_VERSION, Some(key), Some(uid.to_string()))
        }
    };
    let name = match &report.regarding {
        Regarding::Pod(key, _) | Regarding::Claim(key, _) | Regarding::Budget(key, _) => key.name.to_string(),
        Regarding::Node(name) => name.to_string(),
    };
    let namespace = report.regarding.namespace().to_string();
    let now = Timestamp::now();
    Event {
        metadata: ObjectMeta {
            name: Some(event_name(report, &name, now)),
            namespace: Some(namespace),
            ..ObjectMeta::default()
        },
        action: Some("Allocate".to_owned()),
        event_time: Some(MicroTime(now)),
        note: Some(shorten(&report.note)),
        reason: Some(report.reason.to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some(api_version.to_owned()),
            kind: Some(kind.to_owned()),
            name: Some(name),
            namespace: key.map(|key| key.namespace.to_string()),
            uid,
            ..ObjectReference::default()
        }),
        reporting_controller: Some(FIELD_MANAGER.to_owned()),
        reporting_instance: Some(instance.to_owned()),
        type_: Some(if report.warning { "Warning" } else { "Normal" }.to_owned()),
        ..Event::default()
    }
}

/// Returns the name of an event. The name differs for another object of the same name, and for another text
/// about the same object at the same moment.
fn event_name(report: &Report, object: &str, now: Timestamp) -> String {
    let mut hasher = DefaultHasher::new();
    (&report.regarding, report.reason, &report.note).hash(&mut hasher);
    let own = format!(".{:x}{:08x}", now.as_nanosecond(), hasher.finish() & 0xffff_ffff);
    // Names are ASCII. What is left of a long name must end with a letter or digit.
    let room = LONGEST_NAME.saturating_sub(own.len()).min(object.len());
    let begin = object.get(..room).unwrap_or_default().trim_end_matches(['.', '-']);
    format!("{begin}{own}")
}

fn shorten(note: &str) -> String {
    if note.len() <= LONGEST_NOTE {
        return note.to_owned();
    }
    let room = LONGEST_NOTE.saturating_sub('…'.len_utf8());
    let end = (0..=room).rev().find(|end| note.is_char_boundary(*end)).unwrap_or(0);
    format!("{}…", note.get(..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(regarding: Regarding, note: &str) -> Report {
        Report { regarding, warning: true, reason: "Reason", note: note.to_owned() }
    }

    #[test]
    fn events_about_other_objects_or_with_other_words_are_other_events() {
        let now = Timestamp::now();
        let key = aliquot_allocator::snapshot::ObjectKey::new("team", "same");
        let reports = [
            report(Regarding::Pod(key.clone(), "1".into()), "one"),
            report(Regarding::Pod(key.clone(), "1".into()), "another"),
            report(Regarding::Pod(key.clone(), "2".into()), "one"),
            report(Regarding::Claim(key, "1".into()), "one"),
        ];
        let names: std::collections::HashSet<String> =
            reports.iter().map(|report| event_name(report, "same", now)).collect();
        assert_eq!(names.len(), reports.len());
    }

    #[test]
    fn an_object_with_a_long_name_gets_its_events_too() {
        for name in ["x".repeat(253), format!("{}-{}", "x".repeat(226), "y".repeat(26))] {
            let key = aliquot_allocator::snapshot::ObjectKey::new("team", &name);
            let event = event(&report(Regarding::Pod(key, "1".into()), "note"), "c1");
            let own = event.metadata.name.expect("a name");
            assert!(own.len() <= 253 && !own.contains("-."), "{own}");
            assert_eq!(event.regarding.expect("an object").name, Some(name), "the object is named in full");
        }
    }

    #[test]
    fn an_event_of_a_node_is_found_by_those_who_describe_the_node() {
        let event = event(&report(Regarding::Node("n1".into()), "note"), "c1");
        assert_eq!(event.regarding.expect("an object").uid.as_deref(), Some("n1"));
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
    }

    #[test]
    fn long_notes_are_cut_to_what_the_api_takes() {
        for note in ["é".repeat(2000), "x".repeat(1025), "x".repeat(1024)] {
            let short = shorten(&note);
            assert!(short.len() <= LONGEST_NOTE && short.len() > LONGEST_NOTE - 8);
        }
        assert_eq!(shorten("fine"), "fine");
    }
}

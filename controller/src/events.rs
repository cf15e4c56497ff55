//! Events: what users see with `kubectl describe`.

use crate::act::{FIELD_MANAGER, creation};
use crate::brain::{Regarding, Report};
use futures::StreamExt;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use std::time::Duration;
use tokio::sync::mpsc;

/// Longest note that the API takes.
const LONGEST_NOTE: usize = 1024;
/// Events that wait to be sent; beyond that they are dropped, with a word in the log.
const WAITING: usize = 1024;

/// Events that are sent at a time: one after the other they would come minutes late where many pods are
/// decided, and be lost with a controller that ends.
const AT_A_TIME: usize = 16;

/// Sends events in the background. Losing one is not an error.
#[derive(Debug, Clone)]
pub struct Reporter {
    queue: mpsc::Sender<Report>,
}

impl Reporter {
    /// Starts the task that sends; it ends when every clone is gone.
    pub fn start(client: Client, instance: &str) -> Self {
        let (queue, reports) = mpsc::channel::<Report>(WAITING);
        let instance = instance.to_owned();
        tokio::spawn(async move {
            let reports = futures::stream::unfold(reports, async |mut reports| {
                reports.recv().await.map(|report| (report, reports))
            });
            reports.for_each_concurrent(AT_A_TIME, |report| send(&client, &instance, report)).await;
        });
        Self { queue }
    }

    /// Sends an event, some time.
    pub fn tell(&self, report: Report) {
        if self.queue.try_send(report).is_err() {
            tracing::debug!("too many events at once: one is dropped");
        }
    }
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

/// The event of a report.
pub(crate) fn event(report: &Report, instance: &str) -> Event {
    let (kind, api_version, key, uid) = match &report.regarding {
        Regarding::Pod(key, uid) => ("Pod", "v1", Some(key), Some(uid.to_string())),
        Regarding::Claim(key, uid) => {
            ("ResourceClaim", "resource.k8s.io/v1", Some(key), Some(uid.to_string()))
        }
        Regarding::Node(_) => ("Node", "v1", None, None),
        Regarding::Budget(key, uid) => {
            ("GpuBudget", aliquot_model::names::API_VERSION, Some(key), Some(uid.to_string()))
        }
    };
    let name = match &report.regarding {
        Regarding::Pod(key, _) | Regarding::Claim(key, _) | Regarding::Budget(key, _) => key.name.to_string(),
        Regarding::Node(name) => name.to_string(),
    };
    // Events of nodes are kept in the namespace default.
    let namespace = key.map_or_else(|| "default".to_owned(), |key| key.namespace.to_string());
    let now = Timestamp::now();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{name}.{:x}", now.as_nanosecond())),
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

    #[test]
    fn long_notes_are_cut_to_what_the_api_takes() {
        for note in ["é".repeat(2000), "x".repeat(1025), "x".repeat(1024)] {
            let short = shorten(&note);
            assert!(short.len() <= LONGEST_NOTE && short.len() > LONGEST_NOTE - 8);
        }
        assert_eq!(shorten("fine"), "fine");
    }
}

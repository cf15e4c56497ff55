//! Events of the controller about a pod and its claims.

use super::EVENTS;
use crate::rights::Right;
use aliquot_controller::report::reasons;
use anyhow::{Error, Result};
use k8s_openapi::api::core::v1;
use k8s_openapi::api::events::v1 as events;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

/// The name of the controller in its events.
const CONTROLLER: &str = "aliquot-controller";
/// Reasons of events which mean that the pod gets no devices in the current state of the cluster.
const REFUSALS: [&str; 4] =
    [reasons::DOES_NOT_FIT, reasons::CLAIM_REJECTED, reasons::QUOTA, reasons::BUDGET_REFUSED];

/// An event.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Said {
    time: String,
    name: String,
    reason: String,
    note: String,
    uid: Option<String>,
}

impl Said {
    /// Returns the event as a line.
    pub(super) fn line(&self) -> String {
        let seconds = self.time.split(['.', 'Z']).next().unwrap_or_default();
        format!("{seconds} {} {}: {}", self.name, self.reason, self.note)
    }

    /// Returns true if the event means that the pod gets nothing, even if there is room.
    pub(super) fn is_forbidden(&self) -> bool {
        self.is_refusal() && self.reason != reasons::DOES_NOT_FIT
    }

    /// Returns reason and text.
    pub(super) fn words(&self) -> String {
        format!("{}: {}", self.reason, self.note)
    }

    /// Returns the event as JSON.
    pub(super) fn to_json(&self) -> Value {
        json!({"time": self.time, "name": self.name, "reason": self.reason, "message": self.note})
    }

    /// Returns true if the event means that the pod gets no devices in the current state of the cluster.
    pub(super) fn is_refusal(&self) -> bool {
        REFUSALS.contains(&self.reason.as_str())
    }
}

/// Returns the controller's events about objects with these names and UIDs, oldest first; or the right that
/// is missing. Events about an earlier object with the same name are left out.
///
/// Roles such as `view` allow events to be read in one API group and not in the other; the events are the
/// same.
///
/// # Errors
/// If the API server does not answer.
pub(super) async fn read(
    client: &Client,
    namespace: &str,
    names: &[String],
    uids: &[String],
) -> Result<Result<Vec<Said>, Right>> {
    let all = ListParams::default();
    let newer = Api::<events::Event>::namespaced(client.clone(), namespace).list(&all).await;
    let found: Result<Vec<Said>, kube::Error> = match newer {
        Ok(list) => Ok(list.items.into_iter().filter_map(newer_said).collect()),
        Err(kube::Error::Api(status)) if status.code == 403 => {
            let list = Api::<v1::Event>::namespaced(client.clone(), namespace).list(&all).await;
            list.map(|list| list.items.into_iter().filter_map(older_said).collect())
        }
        Err(error) => Err(error),
    };
    let mut found = match found {
        Ok(found) => found,
        Err(error) => {
            let error = Error::new(error).context("events");
            return match Right::refused("list", &error, Some(namespace)) {
                Some(right) => Ok(Err(right)),
                None => Err(error.context("cannot read events")),
            };
        }
    };
    found.retain(|said| names.contains(&said.name) && said.uid.as_ref().is_none_or(|uid| uids.contains(uid)));
    found.sort();
    let skipped = found.len().saturating_sub(EVENTS);
    Ok(Ok(found.split_off(skipped)))
}

fn newer_said(event: events::Event) -> Option<Said> {
    event.reporting_controller.as_deref().filter(|controller| *controller == CONTROLLER)?;
    let time = event.event_time.map(|time| time.0.to_string()).unwrap_or_default();
    let regarding = event.regarding?;
    Some(Said {
        time,
        name: regarding.name?,
        reason: event.reason?,
        note: event.note.unwrap_or_default(),
        uid: regarding.uid,
    })
}

fn older_said(event: v1::Event) -> Option<Said> {
    event.reporting_component.as_deref().filter(|controller| *controller == CONTROLLER)?;
    let time = event.event_time.as_ref().map(|time| time.0.to_string());
    let time = time.or_else(|| event.creation_timestamp().map(|time| time.0.to_string())).unwrap_or_default();
    let note = event.message.unwrap_or_default();
    let regarding = event.involved_object;
    Some(Said { time, name: regarding.name?, reason: event.reason?, note, uid: regarding.uid })
}

//! The two shapes of an Event; every other kind has the same shape in all versions that are served.

use serde_json::Value;

use crate::kinds::Kind;
use crate::value::{at, put, remove, set};

/// Field names in `v1` and in `events.k8s.io/v1`.
const EVENT: &[(&[&str], &[&str])] = &[
    (&["involvedObject"], &["regarding"]),
    (&["message"], &["note"]),
    (&["source"], &["deprecatedSource"]),
    (&["firstTimestamp"], &["deprecatedFirstTimestamp"]),
    (&["lastTimestamp"], &["deprecatedLastTimestamp"]),
    (&["count"], &["deprecatedCount"]),
    (&["reportingComponent"], &["reportingController"]),
];

fn is_new_event(kind: &Kind) -> bool {
    kind.is("events.k8s.io", "events")
}

/// From what is kept to what the client's version shows.
pub(crate) fn from_storage(object: &mut Value, kind: &Kind, _version: &str) {
    if is_new_event(kind) {
        for (core, new) in EVENT {
            let value = remove(object, core);
            put(object, new, value);
        }
    }
}

/// From what a client sends to what is kept.
pub(crate) fn to_storage(object: &mut Value, kind: &Kind) {
    if is_new_event(kind) {
        for (core, new) in EVENT {
            if let Some(value) = remove(object, new) {
                put(object, core, Some(value));
            }
        }
        set(object, &["apiVersion"], "v1");
    } else if at(object, &["apiVersion"]).is_some() {
        set(object, &["apiVersion"], kind.api_version(kind.storage_version()));
    }
}

//! Builds one entry of `status.devices`: condition and data, based on the entry that was there before. Pure:
//! it does no I/O.

use crate::claim::ResultKey;
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::AllocatedDeviceStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Map, Value, json};

/// The type of the condition that this driver writes.
pub const CONDITION: &str = "Prepared";
/// The longest message of a condition, in characters.
const MOST_CHARACTERS: usize = 1024;

/// The result of the kubelet's last call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Said {
    /// The device is prepared. This is also the state if there was no call since this agent started: the
    /// ledger shows it.
    #[default]
    Prepared,
    /// The device could not be prepared.
    Failed {
        /// The reason in CamelCase.
        reason: &'static str,
        /// The note for people.
        note: String,
    },
}

/// Builds the wanted entry of a result. If it says the same as the entry before, it is equal to what [`ours`]
/// reads from that entry.
pub(super) fn entry(
    driver: &str,
    key: &ResultKey,
    said: &Said,
    data: Option<&Value>,
    before: Option<&AllocatedDeviceStatus>,
    now: Timestamp,
) -> Value {
    let before = before.and_then(condition_of);
    let (status, reason, message) = match said {
        Said::Prepared => ("True", crate::reasons::PREPARED, "the device is prepared".to_owned()),
        Said::Failed { reason, note } => ("False", *reason, note.chars().take(MOST_CHARACTERS).collect()),
    };
    let since =
        before.filter(|before| before.status == status).map_or(now, |before| before.last_transition_time.0);
    told(driver, key, (status, reason, &message, since), data)
}

/// Returns the fields of an entry that this driver writes, and nothing else of it.
pub(super) fn ours(driver: &str, key: &ResultKey, before: &AllocatedDeviceStatus) -> Option<Value> {
    let condition = condition_of(before)?;
    let Condition { status, reason, message, last_transition_time, .. } = condition;
    let data = before.data.as_ref().map(|data| &data.0);
    Some(told(driver, key, (status, reason, message, last_transition_time.0), data))
}

fn condition_of(entry: &AllocatedDeviceStatus) -> Option<&Condition> {
    entry.conditions.iter().flatten().find(|condition| condition.type_ == CONDITION)
}

fn told(
    driver: &str,
    key: &ResultKey,
    (status, reason, message, since): (&str, &str, &str, Timestamp),
    data: Option<&Value>,
) -> Value {
    let mut entry = Map::new();
    entry.insert("driver".into(), json!(driver));
    entry.insert("pool".into(), json!(key.pool));
    entry.insert("device".into(), json!(key.device));
    if let Some(share_id) = &key.share_id {
        entry.insert("shareID".into(), json!(share_id));
    }
    let condition = json!({
        "type": CONDITION,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    });
    entry.insert("conditions".into(), json!([condition]));
    if let Some(data) = data {
        entry.insert("data".into(), data.clone());
    }
    Value::Object(entry)
}

/// Returns the entry of a result among those of a claim.
pub(super) fn find<'a>(
    devices: &'a [AllocatedDeviceStatus],
    driver: &str,
    key: &ResultKey,
) -> Option<&'a AllocatedDeviceStatus> {
    devices.iter().find(|entry| {
        entry.driver == driver
            && entry.pool == key.pool
            && entry.device == key.device
            && entry.share_id == key.share_id
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{DRIVER, POOL};
    use rstest::rstest;

    fn key() -> ResultKey {
        ResultKey { request: "r".into(), pool: POOL.into(), device: "gpu-0".into(), share_id: None }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn failed() -> Said {
        Said::Failed { reason: "DeviceConflict", note: "held".into() }
    }

    fn before(said: &Said, data: Option<&Value>) -> AllocatedDeviceStatus {
        let mut before = entry(DRIVER, &key(), said, data, None, at(100));
        before["networkData"] = json!({"interfaceName": "eth7"});
        serde_json::from_value(before).unwrap()
    }

    #[rstest]
    #[case::prepared(Said::Prepared, None, "True", 200)]
    #[case::failed(failed(), None, "False", 200)]
    #[case::prepared_again(Said::Prepared, Some(Said::Prepared), "True", 100)]
    #[case::prepared_at_last(Said::Prepared, Some(failed()), "True", 200)]
    #[case::failed_again(failed(), Some(failed()), "False", 100)]
    fn a_condition_says_since_when_it_is_so(
        #[case] said: Said,
        #[case] earlier: Option<Said>,
        #[case] status: &str,
        #[case] since: i64,
    ) {
        let earlier = earlier.map(|earlier| before(&earlier, None));
        let entry = entry(DRIVER, &key(), &said, None, earlier.as_ref(), at(200));
        let condition = &entry["conditions"][0];
        assert_eq!(
            (condition["type"].as_str(), condition["status"].as_str()),
            (Some("Prepared"), Some(status))
        );
        assert_eq!(condition["lastTransitionTime"], json!(at(since).to_string()));
    }

    #[test]
    fn an_entry_that_says_the_same_is_the_same() {
        let data = json!({"uuid": "GPU-1"});
        let there = before(&Said::Prepared, Some(&data));
        let same = |said: &Said, data: Option<&Value>| {
            let wanted = entry(DRIVER, &key(), said, data, Some(&there), at(200));
            ours(DRIVER, &key(), &there) == Some(wanted)
        };
        assert!(same(&Said::Prepared, Some(&data)));
        assert!(!same(&failed(), Some(&data)) && !same(&Said::Prepared, None));
        assert!(!same(&Said::Prepared, Some(&json!({"uuid": "GPU-2"}))));
        assert!(
            entry(DRIVER, &key(), &Said::Prepared, None, Some(&there), at(200)).get("networkData").is_none()
        );
    }

    #[test]
    fn shares_of_one_device_have_entries_of_their_own() {
        let of = |share: &str| ResultKey { share_id: Some(share.into()), ..key() };
        let devices = ["a", "b"].map(|share| {
            serde_json::from_value(entry(DRIVER, &of(share), &Said::Prepared, None, None, at(100))).unwrap()
        });
        assert_eq!(find(&devices, DRIVER, &of("b")).unwrap().share_id.as_deref(), Some("b"));
        assert!(find(&devices, DRIVER, &key()).is_none() && find(&devices, "other", &of("a")).is_none());
    }
}

//! Groups of pods: all of their devices, or none.

use super::results;
use aliquot_control_plane::AuditEntry;
use aliquot_model::names::{GANG, GANG_SIZE};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

type Key = (String, String);

/// Pods of groups, and which claims have devices, at one moment.
#[derive(Default)]
struct Now {
    /// By group, then by name.
    groups: BTreeMap<Key, BTreeMap<String, Value>>,
    /// Claims that have devices, and the revision that gave them.
    allocated: BTreeMap<Key, u64>,
    /// Groups of which a pod may be scheduled.
    begun: BTreeSet<Key>,
    /// Members that had devices and were deleted, and not evicted: name, revision and time.
    left: BTreeMap<Key, Vec<(String, u64, Timestamp)>>,
}

/// Of what others did so shortly before, and after the first of a group was given devices, the controller need not
/// know when it lets the group go.
const UNSEEN: SignedDuration = SignedDuration::from_secs(10);

fn is_gated(pod: &Value) -> bool {
    pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty())
}

impl Now {
    /// The revision from which on a pod has devices for all of its claims, if it has.
    fn has_devices(&self, namespace: &str, pod: &Value) -> Option<u64> {
        let claims = pod["status"]["resourceClaimStatuses"].as_array().cloned().unwrap_or_default();
        let since = |claim: &Value| {
            let name = claim["resourceClaimName"].as_str().unwrap_or_default();
            self.allocated.get(&(namespace.to_owned(), name.to_owned())).copied()
        };
        claims.iter().map(since).collect::<Option<Vec<u64>>>()?.into_iter().max()
    }

    /// Takes a write in; the group whose first pod it lets go, if it does.
    fn take(&mut self, entry: &AuditEntry) -> Option<Key> {
        let object = entry.after.as_ref().or(entry.before.as_ref())?;
        let key = (entry.namespace.clone(), entry.name.clone());
        if entry.origin.resource == "resourceclaims" {
            match entry.after.as_ref().is_some_and(|claim| !results(claim).is_empty()) {
                true => drop(self.allocated.entry(key).or_insert(entry.revision)),
                false => drop(self.allocated.remove(&key)),
            }
            return None;
        }
        let group =
            object["metadata"]["labels"][GANG].as_str().filter(|_| entry.origin.resource == "pods")?;
        let group = (entry.namespace.clone(), group.to_owned());
        let members = self.groups.entry(group.clone()).or_default();
        match &entry.after {
            None => {
                let pod = members.remove(&entry.name);
                let evicted = entry.origin.subresource == "eviction";
                if pod.is_some_and(|pod| !evicted && self.has_devices(&group.0, &pod).is_some()) {
                    let left = (entry.name.clone(), entry.revision, entry.time);
                    self.left.entry(group).or_default().push(left);
                }
            }
            Some(pod) => {
                members.insert(entry.name.clone(), (**pod).clone());
                if !is_gated(pod) && self.begun.insert(group.clone()) {
                    return Some(group);
                }
            }
        }
        None
    }
}

/// How many groups began, and those that did before all the pods that they need had devices.
pub fn judge(record: &[AuditEntry]) -> (usize, Vec<String>) {
    let mut now = Now::default();
    let mut torn = Vec::new();
    for entry in record {
        let Some(group) = now.take(entry) else { continue };
        let members = &now.groups[&group];
        let size = entry.after.as_ref().expect("a pod")["metadata"]["annotations"][GANG_SIZE]
            .as_str()
            .unwrap_or_default();
        let size: usize = size.parse().expect("a size");
        let since: Vec<u64> = members.values().filter_map(|pod| now.has_devices(&group.0, pod)).collect();
        let (have, first) = (since.len(), since.iter().copied().min());
        let left = now.left.get(&group).into_iter().flatten();
        let left = left.filter(|(name, revision, at)| {
            let just_now = entry.time.duration_since(*at) < UNSEEN;
            just_now && first.is_some_and(|first| *revision > first) && !members.contains_key(name)
        });
        let left = left.count();
        if have + left < size {
            torn.push(format!("{group:?} at {}: {have} of {size} had devices", entry.revision));
        }
    }
    (now.begun.len(), torn)
}

/// How many groups are there now that nothing happens; fails if one that has not begun has some devices.
pub fn quiet(record: &[AuditEntry]) -> usize {
    let mut now = Now::default();
    for entry in record {
        now.take(entry);
    }
    let mut some = Vec::new();
    let there = now.groups.iter().filter(|(_, members)| !members.is_empty());
    for (group, members) in there.clone().filter(|(group, _)| !now.begun.contains(group)) {
        let have = members.values().filter(|pod| now.has_devices(&group.0, pod).is_some()).count();
        if have > 0 {
            some.push(format!("{group:?}: {have} of {} have devices", members.len()));
        }
    }
    assert_eq!(some, Vec::<String>::new(), "groups that have some of their devices");
    there.count()
}

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
    allocated: BTreeSet<Key>,
    /// Groups of which a pod may be scheduled.
    begun: BTreeSet<Key>,
    /// When members that had devices were deleted, and not evicted.
    left: BTreeMap<Key, Vec<Timestamp>>,
}

/// Of what others did so shortly before, the controller need not know when it lets a group go.
const UNSEEN: SignedDuration = SignedDuration::from_secs(10);

fn is_gated(pod: &Value) -> bool {
    pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty())
}

impl Now {
    fn has_devices(&self, namespace: &str, pod: &Value) -> bool {
        let claims = pod["status"]["resourceClaimStatuses"].as_array().cloned().unwrap_or_default();
        let has = |claim: &Value| {
            let name = claim["resourceClaimName"].as_str().unwrap_or_default();
            self.allocated.contains(&(namespace.to_owned(), name.to_owned()))
        };
        !claims.is_empty() && claims.iter().all(has)
    }

    /// Takes a write in; the group whose first pod it lets go, if it does.
    fn take(&mut self, entry: &AuditEntry) -> Option<Key> {
        let object = entry.after.as_ref().or(entry.before.as_ref())?;
        let key = (entry.namespace.clone(), entry.name.clone());
        if entry.origin.resource == "resourceclaims" {
            match entry.after.as_ref().is_some_and(|claim| !results(claim).is_empty()) {
                true => drop(self.allocated.insert(key)),
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
                if pod.is_some_and(|pod| !evicted && self.has_devices(&group.0, &pod)) {
                    self.left.entry(group).or_default().push(entry.time);
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
        let members: Vec<&Value> = now.groups[&group].values().collect();
        let size = members[0]["metadata"]["annotations"][GANG_SIZE].as_str().unwrap_or_default();
        let size: usize = size.parse().expect("a size");
        let have = members.iter().filter(|pod| now.has_devices(&group.0, pod)).count();
        let left = now.left.get(&group).into_iter().flatten();
        let left = left.filter(|at| entry.time.duration_since(**at) < UNSEEN).count();
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
        let have = members.values().filter(|pod| now.has_devices(&group.0, pod)).count();
        if have > 0 {
            some.push(format!("{group:?}: {have} of {} have devices", members.len()));
        }
    }
    assert_eq!(some, Vec::<String>::new(), "groups that have some of their devices");
    there.count()
}

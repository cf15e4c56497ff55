//! Going back: a pod has a larger profile than it asked for, and could have the requested one now.
//!
//! The pod is evicted, so its controller creates a pod like it; the place of the requested profile is held
//! for that pod. So only pods go back that have a controller and whose claims are all generated for them.

use super::substituted;
use crate::snapshot::{ClaimSource, HostPort, ObjectKey, Pod, PodNeeds, Snapshot};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The pod that a place is held for: the next pod of the same controller with claims of the same templates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Successor {
    /// Namespace of the pod.
    pub namespace: String,
    /// UID of the pod's controller, such as a ReplicaSet.
    pub maker: String,
    /// Templates of the pod's claims.
    pub templates: BTreeSet<String>,
    /// UID of the pod that goes.
    pub leaves: String,
}

/// A place that is held. It is written on its node before a pod is evicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Place {
    /// The pod that the place is held for. Earlier builds called it the heir.
    #[serde(alias = "heir")]
    pub successor: Successor,
    /// The devices, each as pool and device name.
    pub devices: Vec<(String, String)>,
    /// The pod's needs on the node, besides devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs: Option<Needs>,
}

/// The needs of a pod on a node, besides devices.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Needs {
    /// Requests for CPU, memory and other resources, as quantities.
    pub requests: BTreeMap<String, String>,
    /// Host ports, each as protocol, number and address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<(String, i32, String)>,
}

impl From<&PodNeeds> for Needs {
    fn from(needs: &PodNeeds) -> Self {
        let requests = needs.requests.iter().map(|(name, amount)| (name.to_string(), amount.to_string()));
        let ports = needs.ports.iter();
        let ports = ports.map(|port| (port.protocol.to_string(), port.port, port.address.to_string()));
        Self { requests: requests.collect(), ports: ports.collect() }
    }
}

impl From<Needs> for PodNeeds {
    fn from(needs: Needs) -> Self {
        let requests = needs.requests.iter();
        let requests =
            requests.map(|(name, amount)| (name.as_str().into(), amount.parse().unwrap_or_default()));
        let ports = needs.ports.iter();
        let ports =
            ports.map(|(protocol, port, address)| HostPort::new(Some(protocol), *port, Some(address)));
        Self { requests: requests.collect(), ports: ports.collect(), ..Self::default() }
    }
}

impl Successor {
    /// Returns the successor of a pod; `None` if no pod would follow it, or if not all of its claims are generated
    /// for it.
    pub fn of(pod: &Pod) -> Option<Self> {
        let maker = pod.maker.as_deref()?.to_owned();
        let templates = pod.claims.iter().map(|claim| match &claim.source {
            ClaimSource::Template(template) => Some(template.to_string()),
            ClaimSource::Named(_) => None,
        });
        let templates: BTreeSet<String> = templates.collect::<Option<_>>()?;
        Some(Self { namespace: pod.key.namespace.to_string(), maker, templates, leaves: pod.uid.to_string() })
    }

    /// Returns true if the place is for this pod.
    pub fn is(&self, pod: &Pod) -> bool {
        let of = Self::of(pod);
        *pod.uid != *self.leaves && of.is_some_and(|of| Self { leaves: self.leaves.clone(), ..of } == *self)
    }
}

/// Returns the pods that may go back, oldest first: they run, and have more than they asked for in an
/// allocation by the controller.
pub fn candidates(index: &Snapshot) -> Vec<ObjectKey> {
    let mut found: Vec<(i64, ObjectKey)> = index
        .claims()
        .filter(|claim| claim.substitution.as_ref().is_some_and(|record| record.go_back))
        .filter(|claim| {
            let allocation = claim.allocation.as_ref().filter(|allocation| allocation.by_us);
            allocation.is_some_and(|allocation| !substituted(claim, allocation).is_empty())
        })
        .flat_map(|claim| index.pods_of_claim(&claim.key))
        .filter(|pod| may_go(index, pod))
        .map(|pod| (pod.created, pod.key.clone()))
        .collect();
    found.sort();
    found.dedup();
    found.into_iter().map(|(_, pod)| pod).collect()
}

/// Returns true if a pod may go: it runs, has a successor, and every claim that was given more allows it.
fn may_go(index: &Snapshot, pod: &Pod) -> bool {
    let running = pod.started && pod.node.is_some() && !pod.deleting && !pod.terminal;
    running
        && Successor::of(pod).is_some()
        && pod.claim_keys().filter_map(|key| index.claim(&key)).all(|claim| {
            let allocation = claim.allocation.as_ref();
            let given_more = allocation.is_some_and(|allocation| !substituted(claim, allocation).is_empty());
            !given_more || claim.substitution.as_ref().is_some_and(|record| record.go_back)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pod_needs_of_a_node_survives_its_being_written_down() {
        let requests = [("cpu", "1500m"), ("memory", "3Gi"), ("nvidia.com/rdma", "2")];
        let requests = requests.map(|(name, amount)| (name.into(), amount.parse().expect("a quantity")));
        let needs = PodNeeds {
            requests: requests.into(),
            ports: vec![HostPort::new(Some("UDP"), 53, None)],
            ..PodNeeds::default()
        };
        let text = serde_json::to_string(&Needs::from(&needs)).expect("a text");
        let read: Needs = serde_json::from_str(&text).expect("needs");
        assert_eq!(PodNeeds::from(read), needs);
    }
}

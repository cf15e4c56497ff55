//! Nodes and the room on them.

use super::{Change, ObjectKey, PodNeeds, Snapshot, Uid, convert};
use crate::quantity::Quantity;
use aliquot_model::names::SCHEDULER_IDLE;
pub use aliquot_model::names::{GOING_BACK, HAND_OVER_ACKNOWLEDGED as ACKNOWLEDGED};
use k8s_openapi::api::core::v1::{Node as ApiNode, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// A node, and the resources used by the pods on it and on their way to it.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// True if the API has the node; pods can be seen before their node.
    pub known: bool,
    /// Labels of the node.
    pub labels: BTreeMap<String, String>,
    /// Value of the annotation that acknowledges a hand-over.
    pub acknowledged: Option<String>,
    /// Value of the annotation that names the generation of a pool for which kube-scheduler was found idle.
    pub scheduler_idle: Option<String>,
    /// Value of the annotation for a place that is held on the node for a pod that goes back to what it asked
    /// for.
    pub going_back: Option<String>,
    /// Taints of the node.
    pub taints: Vec<Taint>,
    /// True if the node is cordoned.
    pub unschedulable: bool,
    /// Amounts that pods may request, by resource.
    pub allocatable: BTreeMap<Arc<str>, Quantity>,
    /// Amounts that the counted pods request, by resource.
    pub used: BTreeMap<Arc<str>, Quantity>,
    /// The number of pods counted on the node.
    pub pods: u64,
    /// Host ports in use, with the number of pods' uses of each.
    pub ports: BTreeMap<HostPort, u32>,
}

/// A host port that a pod wants.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: Arc<str>,
    /// Port number.
    pub port: i32,
    /// Address of the node; `0.0.0.0` stands for all addresses.
    pub address: Arc<str>,
}

impl HostPort {
    const ALL: &str = "0.0.0.0";

    /// Creates a host port from a container's fields; an absent protocol is TCP, and an absent address stands
    /// for all.
    pub fn new(protocol: Option<&str>, port: i32, address: Option<&str>) -> Self {
        let or = |value: Option<&str>, otherwise: &str| match value {
            None | Some("") => otherwise.into(),
            Some(value) => value.into(),
        };
        Self { protocol: or(protocol, "TCP"), port, address: or(address, Self::ALL) }
    }

    /// Returns true if only one of the two ports can be in use at a time.
    pub fn excludes(&self, other: &Self) -> bool {
        let addresses =
            &*self.address == Self::ALL || &*other.address == Self::ALL || self.address == other.address;
        addresses && self.port == other.port && self.protocol == other.protocol
    }
}

impl Node {
    /// Counts a pod on the node.
    pub(crate) fn add(&mut self, needs: &PodNeeds) {
        self.pods = self.pods.saturating_add(1);
        for (name, amount) in &needs.requests {
            let used = self.used.entry(name.clone()).or_default();
            *used = *used + *amount;
        }
        for port in &needs.ports {
            *self.ports.entry(port.clone()).or_default() += 1;
        }
    }

    /// Stops counting a pod on the node.
    pub(crate) fn subtract(&mut self, needs: &PodNeeds) {
        self.pods = self.pods.saturating_sub(1);
        for (name, amount) in &needs.requests {
            if let Some(used) = self.used.get_mut(name) {
                *used = *used - *amount;
            }
        }
        for port in &needs.ports {
            if let Some(count) = self.ports.get_mut(port) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.ports.remove(port);
                }
            }
        }
    }
}

/// A pod that is counted on a node.
#[derive(Debug, Clone)]
pub(crate) struct Accounted {
    node: Arc<str>,
    needs: Arc<PodNeeds>,
}

/// Reads amounts by resource. An amount that cannot be parsed counts as zero; the API server has parsed all
/// of them.
pub fn resources_of(amounts: Option<&BTreeMap<String, ApiQuantity>>) -> BTreeMap<Arc<str>, Quantity> {
    amounts
        .into_iter()
        .flatten()
        .map(|(name, amount)| (name.as_str().into(), convert::quantity(amount).unwrap_or_default()))
        .collect()
}

impl Snapshot {
    /// Adds or replaces a node.
    pub fn apply_node(&mut self, node: &ApiNode) -> Change {
        let Some(name) = node.metadata.name.as_deref() else { return Change::Nothing };
        let entry = self.nodes.entry(name.into()).or_default();
        let before = entry.clone();
        entry.known = true;
        entry.labels = node.metadata.labels.clone().unwrap_or_default();
        let annotation =
            |name: &str| node.metadata.annotations.as_ref().and_then(|all| all.get(name)).cloned();
        entry.acknowledged = annotation(ACKNOWLEDGED);
        entry.scheduler_idle = annotation(SCHEDULER_IDLE);
        entry.going_back = annotation(GOING_BACK);
        let spec = node.spec.as_ref();
        entry.taints = spec.and_then(|spec| spec.taints.clone()).unwrap_or_default();
        entry.unschedulable = spec.and_then(|spec| spec.unschedulable).unwrap_or(false);
        entry.allocatable = resources_of(node.status.as_ref().and_then(|status| status.allocatable.as_ref()));
        // A node changes with every heartbeat; the fields that matter here change seldom.
        let same = before.known
            && before.labels == entry.labels
            && before.taints == entry.taints
            && before.unschedulable == entry.unschedulable
            && before.allocatable == entry.allocatable;
        if same { Change::Nothing } else { Change::Room }
    }

    /// Removes a node.
    pub fn delete_node(&mut self, name: &str) -> Change {
        if let Some(entry) = self.nodes.get_mut(name) {
            *entry = Node {
                used: std::mem::take(&mut entry.used),
                pods: entry.pods,
                ports: std::mem::take(&mut entry.ports),
                ..Node::default()
            };
            if entry.pods == 0 {
                self.nodes.remove(name);
            }
        }
        Change::Nothing
    }

    /// Replaces all nodes.
    pub fn reset_nodes(&mut self, nodes: &[ApiNode]) -> Change {
        let kept: HashSet<&str> = nodes.iter().filter_map(|node| node.metadata.name.as_deref()).collect();
        let gone: Vec<Arc<str>> = self
            .nodes
            .iter()
            .filter(|(name, node)| node.known && !kept.contains(&***name))
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            self.delete_node(&name);
        }
        for node in nodes {
            self.apply_node(node);
        }
        Change::Room
    }

    /// Counts a pod on the node where it is or will be. Returns true if there may be room for another pod.
    pub(crate) fn account(&mut self, key: &ObjectKey) -> bool {
        let Some(pod) = self.pods.get(key) else { return false };
        let target = match (&pod.node, pod.terminal) {
            (_, true) => None,
            (Some(node), false) => Some(node.clone()),
            (None, false) if pod.deleting => None,
            (None, false) => self.pinned_node(pod),
        };
        let (uid, needs) = (pod.uid.clone(), pod.needs.clone());
        if let (Some(now), Some(wanted)) = (self.accounted.get(&uid), &target)
            && now.node == *wanted
            && now.needs == needs
        {
            return false;
        }
        let freed = self.unaccount(&uid);
        if let Some(node) = target {
            self.nodes.entry(node.clone()).or_default().add(&needs);
            self.accounted.insert(uid, Accounted { node, needs });
            // A pod may wait for affinity to this one.
            return freed || !self.companies.waiting.is_empty();
        }
        freed
    }

    /// Stops counting a pod. Returns true if the pod was counted.
    pub(crate) fn unaccount(&mut self, uid: &Uid) -> bool {
        let Some(accounted) = self.accounted.remove(uid) else { return false };
        let Some(node) = self.nodes.get_mut(&accounted.node) else { return false };
        node.subtract(&accounted.needs);
        if node.pods == 0 && !node.known {
            self.nodes.remove(&accounted.node);
        }
        true
    }

    /// Returns the node that a pod is counted on.
    pub fn accounted_node(&self, pod: &str) -> Option<&Arc<str>> {
        self.accounted.get(pod).map(|accounted| &accounted.node)
    }
}

//! The rules about which other pods a pod must be near to or far from: required inter-pod affinity and
//! anti-affinity, and topology spread constraints with `DoNotSchedule`. Preferences are left to
//! kube-scheduler.

use super::labels::{Labels, Selector};
use super::{Change, ObjectKey, Pod, Snapshot};
use k8s_openapi::api::core::v1::{Namespace, PodAffinityTerm, PodSpec, TopologySpreadConstraint};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The conditions that a pod sets for the pods around it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Affinity {
    /// Required affinity: pods that must be in the same place.
    pub near: Vec<Term>,
    /// Required anti-affinity: pods that must not be in the same place.
    pub far: Vec<Term>,
    /// Topology spread constraints with `DoNotSchedule`.
    pub spread: Vec<Spread>,
}

/// A term of affinity or anti-affinity. Its selector includes `matchLabelKeys` and `mismatchLabelKeys`: the
/// API server writes them there before anybody reads the pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Term {
    selector: Selector,
    namespaces: BTreeSet<String>,
    namespace_selector: Selector,
    /// Node label whose value names the place (topology domain).
    pub topology_key: String,
}

impl Term {
    fn read(namespace: &str, term: &PodAffinityTerm) -> Self {
        let mut namespaces: BTreeSet<String> = term.namespaces.iter().flatten().cloned().collect();
        if namespaces.is_empty() && term.namespace_selector.is_none() {
            namespaces.insert(namespace.to_owned());
        }
        Self {
            selector: Selector::read(term.label_selector.as_ref()),
            namespaces,
            namespace_selector: Selector::read(term.namespace_selector.as_ref()),
            topology_key: term.topology_key.clone(),
        }
    }

    /// Returns true if the term selects a pod.
    pub fn matches(&self, index: &Snapshot, pod: &Pod) -> bool {
        let namespace = &*pod.key.namespace;
        let of_interest = || {
            self.namespaces.contains(namespace)
                || self.namespace_selector.matches(index.namespace_labels(namespace))
        };
        self.selector.matches(&pod.labels) && of_interest()
    }
}

/// A topology spread constraint.
#[derive(Debug, Clone, PartialEq)]
pub struct Spread {
    /// The most matching pods that a place may have more than the place with the fewest.
    pub max_skew: i64,
    /// Node label whose value names the place (topology domain).
    pub topology_key: String,
    /// Selects the pods that are counted, in the pod's namespace.
    pub selector: Selector,
    /// The least number of places; if there are fewer, the lowest count is taken as zero.
    pub min_domains: usize,
    /// True if nodes that the pod's node selector and affinity exclude do not count as places.
    pub honors_affinity: bool,
    /// True if nodes with taints that the pod does not tolerate do not count as places.
    pub honors_taints: bool,
}

impl Spread {
    fn read(constraint: &TopologySpreadConstraint, labels: &Labels) -> Self {
        let mut selector = Selector::read(constraint.label_selector.as_ref());
        for key in constraint.match_label_keys.iter().flatten() {
            // A key that the pod does not have is ignored.
            if let Some(value) = labels.get(key) {
                selector.and(key, value);
            }
        }
        let honors = |policy: Option<&str>, otherwise: &str| policy.unwrap_or(otherwise) == "Honor";
        Self {
            max_skew: i64::from(constraint.max_skew),
            topology_key: constraint.topology_key.clone(),
            selector,
            min_domains: usize::try_from(constraint.min_domains.unwrap_or(1)).unwrap_or(1),
            honors_affinity: honors(constraint.node_affinity_policy.as_deref(), "Honor"),
            honors_taints: honors(constraint.node_taints_policy.as_deref(), "Ignore"),
        }
    }
}

/// Reads the conditions of a pod for other pods; `None` if it has none.
pub(super) fn read(namespace: &str, labels: &Labels, spec: &PodSpec) -> Option<Arc<Affinity>> {
    let affinity = spec.affinity.as_ref();
    let near = affinity
        .and_then(|affinity| affinity.pod_affinity.as_ref())
        .and_then(|pods| pods.required_during_scheduling_ignored_during_execution.as_ref());
    let far = affinity
        .and_then(|affinity| affinity.pod_anti_affinity.as_ref())
        .and_then(|pods| pods.required_during_scheduling_ignored_during_execution.as_ref());
    let terms = |terms: Option<&Vec<PodAffinityTerm>>| {
        terms.into_iter().flatten().map(|term| Term::read(namespace, term)).collect()
    };
    let constraints = spec.topology_spread_constraints.iter().flatten();
    let affinity = Affinity {
        near: terms(near),
        far: terms(far),
        spread: constraints
            .filter(|constraint| constraint.when_unsatisfiable == "DoNotSchedule")
            .map(|constraint| Spread::read(constraint, labels))
            .collect(),
    };
    (affinity != Affinity::default()).then(|| Arc::new(affinity))
}

/// Pods that affect more than the room on their node.
#[derive(Debug, Default)]
pub(super) struct Companies {
    /// Pods with anti-affinity, which also keeps other pods away.
    pub(super) repelling: BTreeSet<ObjectKey>,
    /// Pods that wait and have conditions for other pods: when another pod comes, there may be a place for
    /// them.
    pub(super) waiting: BTreeSet<ObjectKey>,
    /// Pods that wait and have volumes.
    pub(super) with_volumes: BTreeSet<ObjectKey>,
    namespaces: HashMap<Arc<str>, Labels>,
}

impl Companies {
    pub(super) fn add(&mut self, pod: &Pod) {
        let affinity = pod.affinity.as_deref();
        if affinity.is_some_and(|affinity| !affinity.far.is_empty()) {
            self.repelling.insert(pod.key.clone());
        }
        if pod.node.is_none() && affinity.is_some() {
            self.waiting.insert(pod.key.clone());
        }
        if pod.node.is_none() && !pod.volumes.is_empty() {
            self.with_volumes.insert(pod.key.clone());
        }
    }

    pub(super) fn remove(&mut self, pod: &ObjectKey) {
        for set in [&mut self.repelling, &mut self.waiting, &mut self.with_volumes] {
            set.remove(pod);
        }
    }
}

const NO_LABELS: &Labels = &Labels::new();

impl Snapshot {
    /// Adds or replaces a namespace.
    pub fn apply_namespace(&mut self, namespace: &Namespace) -> Change {
        let Some(name) = namespace.metadata.name.as_deref() else { return Change::Nothing };
        let labels = namespace.metadata.labels.clone().unwrap_or_default();
        let before = self.companies.namespaces.insert(name.into(), labels.clone());
        if before.as_ref() == Some(&labels) || self.companies.waiting.is_empty() {
            Change::Nothing
        } else {
            Change::Room
        }
    }

    /// Removes a namespace.
    pub fn delete_namespace(&mut self, name: &str) -> Change {
        self.companies.namespaces.remove(name);
        Change::Nothing
    }

    /// Replaces all namespaces.
    pub fn reset_namespaces(&mut self, namespaces: &[Namespace]) -> Change {
        self.companies.namespaces.clear();
        for namespace in namespaces {
            self.apply_namespace(namespace);
        }
        Change::Room
    }

    /// Returns the labels of a namespace; empty if it is not known.
    pub fn namespace_labels(&self, name: &str) -> &Labels {
        self.companies.namespaces.get(name).unwrap_or(NO_LABELS)
    }

    /// Returns the pods whose anti-affinity keeps other pods away.
    pub(crate) fn repelling_pods(&self) -> impl Iterator<Item = &Pod> {
        self.companies.repelling.iter().filter_map(|key| self.pods.get(key))
    }
}

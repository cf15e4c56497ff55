//! Which other pods a pod wants near or far: required inter-pod affinity and anti-affinity, and
//! topology spread constraints that must hold. What is only preferred is kube-scheduler's matter.

use super::labels::{Labels, Selector};
use super::{Change, Index, ObjectKey, Pod};
use k8s_openapi::api::core::v1::{Namespace, PodAffinityTerm, PodSpec, TopologySpreadConstraint};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// What a pod demands of the pods around it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Company {
    /// Required affinity: pods that must be in the same place.
    pub near: Vec<Term>,
    /// Required anti-affinity: pods that must not.
    pub far: Vec<Term>,
    /// Spread constraints with `DoNotSchedule`.
    pub spread: Vec<Spread>,
}

/// A term of affinity or anti-affinity. `matchLabelKeys` and `mismatchLabelKeys` are in its selector
/// by the time that anybody sees it: the API server writes them there.
#[derive(Debug, Clone, PartialEq)]
pub struct Term {
    selector: Selector,
    namespaces: BTreeSet<String>,
    namespace_selector: Selector,
    /// Label of nodes whose value says what one place is.
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

    /// Whether it is about a pod.
    pub fn matches(&self, index: &Index, pod: &Pod) -> bool {
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
    /// How many more matching pods a place may have than the one with the fewest.
    pub max_skew: i64,
    /// Label of nodes whose value says what one place is.
    pub topology_key: String,
    /// Pods that are counted, in the pod's namespace.
    pub selector: Selector,
    /// With fewer places than this the fewest is zero.
    pub min_domains: usize,
    /// Whether nodes that the pod's selector and affinity leave out do not count as places.
    pub honors_affinity: bool,
    /// Whether nodes with taints that the pod does not tolerate do not count as places.
    pub honors_taints: bool,
}

impl Spread {
    fn read(constraint: &TopologySpreadConstraint, labels: &Labels) -> Self {
        let mut selector = Selector::read(constraint.label_selector.as_ref());
        for key in constraint.match_label_keys.iter().flatten() {
            // A key that the pod does not have is left out.
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

/// What a pod demands, if it demands something.
pub(super) fn read(namespace: &str, labels: &Labels, spec: &PodSpec) -> Option<Arc<Company>> {
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
    let company = Company {
        near: terms(near),
        far: terms(far),
        spread: constraints
            .filter(|constraint| constraint.when_unsatisfiable == "DoNotSchedule")
            .map(|constraint| Spread::read(constraint, labels))
            .collect(),
    };
    (company != Company::default()).then(|| Arc::new(company))
}

/// Pods of which more than their room matters.
#[derive(Debug, Default)]
pub(super) struct Companies {
    /// Pods with anti-affinity: it binds others as well.
    pub(super) repelling: BTreeSet<ObjectKey>,
    /// Pods that wait and look at others: when one comes, there may be a place for them.
    pub(super) waiting: BTreeSet<ObjectKey>,
    /// Pods that wait and have volumes.
    pub(super) with_volumes: BTreeSet<ObjectKey>,
    namespaces: HashMap<Arc<str>, Labels>,
}

impl Companies {
    pub(super) fn add(&mut self, pod: &Pod) {
        let company = pod.company.as_deref();
        if company.is_some_and(|company| !company.far.is_empty()) {
            self.repelling.insert(pod.key.clone());
        }
        if pod.node.is_none() && company.is_some() {
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

impl Index {
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

    /// Labels of a namespace.
    pub fn namespace_labels(&self, name: &str) -> &Labels {
        self.companies.namespaces.get(name).unwrap_or(NO_LABELS)
    }

    /// Pods whose anti-affinity keeps others away.
    pub(crate) fn repelling_pods(&self) -> impl Iterator<Item = &Pod> {
        self.companies.repelling.iter().filter_map(|key| self.pods.get(key))
    }
}

//! Says whether the pod itself can be on a node. kube-scheduler checks this after the controller, and an
//! allocation on a node that it refuses would be useless.

use crate::quantity::Quantity;
use crate::snapshot::{HostPort, Node, ObjectKey, Pod, PodNeeds, Snapshot};
use k8s_openapi::api::core::v1::{
    NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Taint, Toleration,
};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Prefix of extended resources that stand for the DeviceClass whose name follows.
pub(crate) const IMPLICIT_EXTENDED: &str = "deviceclass.resource.kubernetes.io/";
/// Prefix of taints that Kubernetes sets when nodes become unreachable or full.
const STATE_OF_NODE: &str = "node.kubernetes.io/";
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// The reason why a pod cannot be on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum NotOnNode {
    /// The node is cordoned.
    Unschedulable,
    /// The node has a taint that the pod does not tolerate.
    Taint(String),
    /// The node does not match `nodeSelector` or the required node affinity.
    Selector,
    /// The node has too little of a resource.
    Insufficient(Arc<str>),
    /// The node has as many pods as it takes.
    TooManyPods,
    /// Another pod has a host port that the pod wants.
    Port(i32),
    /// The node lacks the label of an affinity term, anti-affinity term or spread constraint.
    NoLabel(Arc<str>),
    /// The place lacks the pods that the pod's affinity asks for.
    NotNear,
    /// The place has pods that the pod's anti-affinity excludes.
    TooNear,
    /// The place has pods whose anti-affinity excludes the pod.
    KeptAway,
    /// The place would have more pods than a spread constraint allows; the value is the label of the
    /// constraint.
    Spread(Arc<str>),
    /// A volume does not allow the node.
    Volume(NoVolume),
}

/// The reason why a pod's volumes do not allow a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoVolume {
    /// The PersistentVolumeClaim does not exist.
    NoClaim(ObjectKey),
    /// The PersistentVolumeClaim is being deleted.
    Deleting(ObjectKey),
    /// The PersistentVolumeClaim was not created for this pod.
    OfAnother(ObjectKey),
    /// The PersistentVolumeClaim is bound independently of the pod's place, and is not bound yet.
    NotBound(ObjectKey),
    /// The PersistentVolumeClaim is bound to a volume that does not exist.
    NoVolume(ObjectKey),
    /// The node does not reach the volume of the PersistentVolumeClaim.
    Elsewhere(ObjectKey),
    /// No volume can be bound or created for the PersistentVolumeClaim on the node.
    NoneToBind(ObjectKey),
}

impl fmt::Display for NoVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoClaim(claim) => {
                write!(f, "cannot be judged: PersistentVolumeClaim {claim} does not exist; create it")
            }
            Self::Deleting(claim) => {
                write!(f, "cannot be used: PersistentVolumeClaim {claim} is being deleted; make it anew")
            }
            Self::OfAnother(claim) => write!(
                f,
                "cannot be used: PersistentVolumeClaim {claim} was not made for this pod; rename the pod or the claim"
            ),
            Self::NotBound(claim) => {
                write!(f, "have to wait until PersistentVolumeClaim {claim} is bound")
            }
            Self::NoVolume(claim) => {
                write!(f, "cannot be judged: the volume of PersistentVolumeClaim {claim} does not exist")
            }
            Self::Elsewhere(claim) => write!(f, "do not reach the volume of PersistentVolumeClaim {claim}"),
            Self::NoneToBind(claim) => {
                write!(f, "have no volume for PersistentVolumeClaim {claim}, and none can be made there")
            }
        }
    }
}

impl fmt::Display for NotOnNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unschedulable => f.write_str("are cordoned"),
            Self::Taint(taint) => write!(f, "have the taint {taint}, which the pod does not tolerate"),
            Self::Selector => f.write_str("do not match the pod's node selector or affinity"),
            Self::Insufficient(resource) => write!(f, "have too little {resource}"),
            Self::TooManyPods => f.write_str("have as many pods as they take"),
            Self::Port(port) => write!(f, "have a pod on host port {port}"),
            Self::NoLabel(label) => {
                write!(f, "lack the label {label} of the pod's affinity or spread constraints")
            }
            Self::NotNear => f.write_str("do not match the pod's affinity to other pods"),
            Self::TooNear => f.write_str("do not match the pod's anti-affinity to other pods"),
            Self::KeptAway => f.write_str("have pods whose anti-affinity keeps this one away"),
            Self::Spread(label) => write!(f, "would break the pod's spread over {label}"),
            Self::Volume(reason) => reason.fmt(f),
        }
    }
}

/// Checks whether a pod can be on a node. The pod itself is left out of what is counted on the node.
///
/// # Errors
/// The first reason why it cannot.
pub fn fits(index: &Snapshot, name: &str, node: &Node, pod: &Pod) -> Result<(), NotOnNode> {
    let needs = &*pod.needs;
    if node.unschedulable && !tolerates(&needs.tolerations, UNSCHEDULABLE, "", "NoSchedule") {
        return Err(NotOnNode::Unschedulable);
    }
    if let Some(taint) = untolerated(node, needs) {
        let value = taint.value.as_deref().unwrap_or("");
        return Err(NotOnNode::Taint(format!("{}={}:{}", taint.key, value, taint.effect)));
    }
    if !selected(needs, name, node) {
        return Err(NotOnNode::Selector);
    }
    let counted_here = index.accounted_node(&pod.uid).is_some_and(|on| **on == *name);
    let own_pod = u64::from(counted_here);
    if let Some(most) = node.allocatable.get("pods")
        && Quantity::from_u64(node.pods.saturating_sub(own_pod).saturating_add(1)) > *most
    {
        return Err(NotOnNode::TooManyPods);
    }
    for port in needs.ports.iter().filter(|_| !node.ports.is_empty()) {
        let own = |other: &HostPort| counted_here && needs.ports.contains(other);
        if node.ports.iter().any(|(other, count)| other.excludes(port) && (*count > 1 || !own(other))) {
            return Err(NotOnNode::Port(port.port));
        }
    }
    for (resource, wanted) in &needs.requests {
        if *wanted == Quantity::ZERO || is_claimed(index, resource) {
            continue;
        }
        let used = node.used.get(resource).copied().unwrap_or_default();
        let used = if counted_here { used - *wanted } else { used };
        let total = node.allocatable.get(resource).copied().unwrap_or_default();
        if used + *wanted > total {
            return Err(NotOnNode::Insufficient(resource.clone()));
        }
    }
    Ok(())
}

/// Returns true if a resource stands for devices: nodes do not list such resources.
fn is_claimed(index: &Snapshot, resource: &str) -> bool {
    resource.starts_with(IMPLICIT_EXTENDED)
        || (resource.contains('/')
            && index.classes().any(|class| class.extended_resource.as_deref() == Some(resource)))
}

/// Returns a taint that keeps the pod away from the node.
pub(super) fn untolerated<'n>(node: &'n Node, needs: &PodNeeds) -> Option<&'n Taint> {
    let matters = |taint: &&Taint| !needs.unknown || taint.key.starts_with(STATE_OF_NODE);
    node.taints.iter().filter(matters).find(|taint| repels(taint, &needs.tolerations))
}

/// Returns how much less the pod prefers a node than a node that meets all preferences: the sum of the
/// weights of the preferred node affinities that the node does not meet.
pub fn dislike(needs: &PodNeeds, name: &str, node: &Node) -> i64 {
    let missed = needs.preferred.iter().filter(|term| !term_matches(&term.preference, name, &node.labels));
    missed.map(|term| i64::from(term.weight)).sum()
}

fn repels(taint: &Taint, tolerations: &[Toleration]) -> bool {
    matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
        && !tolerates(tolerations, &taint.key, taint.value.as_deref().unwrap_or(""), &taint.effect)
}

fn tolerates(tolerations: &[Toleration], key: &str, value: &str, effect: &str) -> bool {
    tolerations.iter().any(|toleration| {
        let wanted_effect = toleration.effect.as_deref().unwrap_or("");
        let wanted_key = toleration.key.as_deref().unwrap_or("");
        (wanted_effect.is_empty() || wanted_effect == effect)
            && (wanted_key.is_empty() || wanted_key == key)
            && match toleration.operator.as_deref().unwrap_or("") {
                "" | "Equal" => toleration.value.as_deref().unwrap_or("") == value,
                "Exists" => true,
                operator => compares(operator, value, toleration.value.as_deref().unwrap_or("")),
            }
    })
}

/// Compares by `Gt` or `Lt`, operators of tolerations and of node selectors.
fn compares(operator: &str, value: &str, than: &str) -> bool {
    match (operator, value.parse::<i64>(), than.parse::<i64>()) {
        ("Gt", Ok(value), Ok(than)) => value > than,
        ("Lt", Ok(value), Ok(than)) => value < than,
        _ => false,
    }
}

/// Returns true if `nodeSelector` and the required node affinity select a node.
pub(super) fn selected(needs: &PodNeeds, name: &str, node: &Node) -> bool {
    needs.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value))
        && needs.affinity.as_ref().is_none_or(|affinity| selector_matches(affinity, name, &node.labels))
}

/// Returns true if a node selector selects a node. Its terms are alternatives; a term without requirements
/// selects nothing.
pub fn selector_matches(selector: &NodeSelector, name: &str, labels: &BTreeMap<String, String>) -> bool {
    selector.node_selector_terms.iter().any(|term| term_matches(term, name, labels))
}

fn term_matches(term: &NodeSelectorTerm, name: &str, labels: &BTreeMap<String, String>) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    expressions.iter().all(|requirement| holds(requirement, labels.get(&requirement.key).map(String::as_str)))
        && fields
            .iter()
            .all(|requirement| requirement.key == "metadata.name" && holds(requirement, Some(name)))
}

fn holds(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = value.is_some_and(|value| values.iter().any(|wanted| wanted == value));
    match requirement.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        operator => match (value, values) {
            (Some(value), [than]) => compares(operator, value, than),
            _ => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    fn labels() -> BTreeMap<String, String> {
        BTreeMap::from([("zone".to_owned(), "a".to_owned()), ("gpus".to_owned(), "8".to_owned())])
    }

    #[rstest]
    #[case::listed(json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]), true)]
    #[case::not_listed(json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}]), false)]
    #[case::not_in(json!([{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["b"]}]}]), true)]
    #[case::not_in_missing(json!([{"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["b"]}]}]), true)]
    #[case::exists(json!([{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]), true)]
    #[case::does_not_exist(json!([{"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}]), false)]
    #[case::greater(json!([{"matchExpressions": [{"key": "gpus", "operator": "Gt", "values": ["4"]}]}]), true)]
    #[case::less(json!([{"matchExpressions": [{"key": "gpus", "operator": "Lt", "values": ["8"]}]}]), false)]
    #[case::compare_text(json!([{"matchExpressions": [{"key": "zone", "operator": "Gt", "values": ["4"]}]}]), false)]
    #[case::name(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]), true)]
    #[case::other_name(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]), false)]
    #[case::all_of_a_term(json!([{"matchExpressions": [{"key": "zone", "operator": "Exists"}, {"key": "x", "operator": "Exists"}]}]), false)]
    #[case::any_term(json!([{"matchExpressions": [{"key": "x", "operator": "Exists"}]}, {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]), true)]
    #[case::empty_term(json!([{}]), false)]
    fn node_selectors_select_as_kubernetes_does(#[case] terms: Value, #[case] expected: bool) {
        let selector = serde_json::from_value(json!({"nodeSelectorTerms": terms})).expect("a selector");
        assert_eq!(selector_matches(&selector, "n1", &labels()), expected);
    }

    #[rstest]
    #[case::key(json!({"key": "k", "operator": "Exists"}), true)]
    #[case::value(json!({"key": "k", "value": "v"}), true)]
    #[case::other_value(json!({"key": "k", "value": "w"}), false)]
    #[case::other_effect(json!({"key": "k", "operator": "Exists", "effect": "NoExecute"}), false)]
    #[case::everything(json!({"operator": "Exists"}), true)]
    fn tolerations_tolerate_as_kubernetes_does(#[case] toleration: Value, #[case] expected: bool) {
        let toleration: Toleration = serde_json::from_value(toleration).expect("a toleration");
        assert_eq!(tolerates(&[toleration], "k", "v", "NoSchedule"), expected);
    }
}

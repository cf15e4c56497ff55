//! Whether a pod fits a node: labels, affinity, taints and plain resources.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::quantity::Quantity;
use crate::value::{at, list, object, text};

/// Why a node does not take a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Misfit {
    Unschedulable,
    Selector,
    Taint,
    Resources,
    Claim,
}

impl Misfit {
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Unschedulable => "node(s) were unschedulable",
            Self::Selector => "node(s) didn't match Pod's node affinity/selector",
            Self::Taint => "node(s) had untolerated taint(s)",
            Self::Resources => "Insufficient resources",
            Self::Claim => "resourceclaim not available on the node",
        }
    }
}

/// Checks everything but claims.
pub(super) fn misfit(node: &Value, pod: &Value, others: &[&Value]) -> Option<Misfit> {
    if at(node, &["spec", "unschedulable"]).and_then(Value::as_bool) == Some(true) {
        return Some(Misfit::Unschedulable);
    }
    let labels = object(node, &["metadata", "labels"]);
    let selected = object(pod, &["spec", "nodeSelector"])
        .into_iter()
        .flatten()
        .all(|(k, v)| labels.and_then(|l| l.get(k)) == Some(v));
    let required = ["spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"];
    let affine = at(pod, &required).is_none_or(|s| selector_matches(s, node));
    if !selected || !affine {
        return Some(Misfit::Selector);
    }
    let untolerated = list(node, &["spec", "taints"]).iter().any(|taint| {
        text(taint, &["effect"]) != "PreferNoSchedule"
            && !list(pod, &["spec", "tolerations"]).iter().any(|t| tolerates(t, taint))
    });
    if untolerated {
        return Some(Misfit::Taint);
    }
    (!resources_fit(node, pod, others)).then_some(Misfit::Resources)
}

fn tolerates(toleration: &Value, taint: &Value) -> bool {
    let same = |field: &str| text(toleration, &[field]) == text(taint, &[field]);
    let effect = text(toleration, &["effect"]).is_empty() || same("effect");
    let key = text(toleration, &["key"]);
    match text(toleration, &["operator"]) {
        "Exists" => effect && (key.is_empty() || same("key")),
        _ => effect && same("key") && same("value"),
    }
}

/// A `core/v1.NodeSelector`: any of its terms, each of them in full.
pub(super) fn selector_matches(selector: &Value, node: &Value) -> bool {
    list(selector, &["nodeSelectorTerms"]).iter().any(|term| {
        let expressions = list(term, &["matchExpressions"]);
        let fields = list(term, &["matchFields"]);
        if expressions.is_empty() && fields.is_empty() {
            return false;
        }
        expressions.iter().all(|e| {
            let value = at(node, &["metadata", "labels", text(e, &["key"])]).and_then(Value::as_str);
            expression_matches(e, value)
        }) && fields.iter().all(|e| {
            let value = (text(e, &["key"]) == "metadata.name").then(|| text(node, &["metadata", "name"]));
            expression_matches(e, value)
        })
    })
}

fn expression_matches(expression: &Value, value: Option<&str>) -> bool {
    let values = || list(expression, &["values"]).iter().filter_map(Value::as_str);
    let number = |s: &str| s.parse::<i64>().ok();
    let compared = |smaller: bool| {
        let limit = values().next().and_then(number);
        matches!((value.and_then(number), limit), (Some(v), Some(l)) if if smaller { v < l } else { v > l })
    };
    match text(expression, &["operator"]) {
        "In" => value.is_some_and(|v| values().any(|x| x == v)),
        "NotIn" => value.is_none_or(|v| values().all(|x| x != v)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared(false),
        "Lt" => compared(true),
        _ => false,
    }
}

fn resources_fit(node: &Value, pod: &Value, others: &[&Value]) -> bool {
    let Some(room) =
        object(node, &["status", "allocatable"]).or_else(|| object(node, &["status", "capacity"]))
    else {
        // A node that says nothing about its size takes everything.
        return true;
    };
    let mut used: BTreeMap<String, Quantity> = BTreeMap::new();
    for pod in others.iter().chain(std::iter::once(&pod)) {
        for (name, amount) in requests(pod) {
            let sum = used.entry(name).or_insert(Quantity::ZERO);
            *sum = sum.plus(amount);
        }
    }
    let pods = Quantity::parse(&(others.len() + 1).to_string()).unwrap_or(Quantity::ZERO);
    used.insert("pods".into(), pods);
    used.iter().all(|(name, amount)| match room.get(name).and_then(Quantity::from_json) {
        Some(limit) => *amount <= limit,
        // Absent cpu, memory and pods are not limited here; an extended resource is then not there.
        None => !name.contains('/') || amount.is_zero_or_less(),
    })
}

/// What a pod asks for: the sum of its containers, or its largest init container.
fn requests(pod: &Value) -> BTreeMap<String, Quantity> {
    let mut sum: BTreeMap<String, Quantity> = BTreeMap::new();
    for container in list(pod, &["spec", "containers"]) {
        for (name, value) in object(container, &["resources", "requests"]).into_iter().flatten() {
            let amount = Quantity::from_json(value).unwrap_or(Quantity::ZERO);
            let total = sum.entry(name.clone()).or_insert(Quantity::ZERO);
            *total = total.plus(amount);
        }
    }
    for container in list(pod, &["spec", "initContainers"]) {
        for (name, value) in object(container, &["resources", "requests"]).into_iter().flatten() {
            let amount = Quantity::from_json(value).unwrap_or(Quantity::ZERO);
            let total = sum.entry(name.clone()).or_insert(Quantity::ZERO);
            *total = (*total).max(amount);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node() -> Value {
        json!({
            "metadata": {"name": "n", "labels": {"zone": "a", "size": "5"}},
            "spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"cpu": "2", "pods": "2"}},
        })
    }

    fn tolerant(spec: Value) -> Value {
        let mut pod = json!({"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}});
        for (k, v) in spec.as_object().unwrap() {
            pod["spec"][k] = v.clone();
        }
        pod
    }

    #[test]
    fn a_taint_needs_a_toleration() {
        assert_eq!(misfit(&node(), &json!({"spec": {}}), &[]), Some(Misfit::Taint));
        assert_eq!(misfit(&node(), &tolerant(json!({})), &[]), None);
    }

    #[test]
    fn requests_add_up_on_a_node() {
        let pod = tolerant(json!({"containers": [{"resources": {"requests": {"cpu": "1500m"}}}]}));
        assert_eq!(misfit(&node(), &pod, &[]), None);
        assert_eq!(misfit(&node(), &pod, &[&pod]), Some(Misfit::Resources));
        let small = tolerant(json!({}));
        assert_eq!(misfit(&node(), &small, &[&small]), None);
        assert_eq!(misfit(&node(), &small, &[&small, &small]), Some(Misfit::Resources));
    }

    #[rstest::rstest]
    #[case(json!({"key": "zone", "operator": "In", "values": ["a", "b"]}), true)]
    #[case(json!({"key": "zone", "operator": "NotIn", "values": ["a"]}), false)]
    #[case(json!({"key": "size", "operator": "Gt", "values": ["4"]}), true)]
    #[case(json!({"key": "size", "operator": "Lt", "values": ["4"]}), false)]
    #[case(json!({"key": "other", "operator": "DoesNotExist"}), true)]
    fn selector_terms_are_evaluated(#[case] expression: Value, #[case] want: bool) {
        let selector = json!({"nodeSelectorTerms": [{"matchExpressions": [expression]}]});
        assert_eq!(selector_matches(&selector, &node()), want);
    }
}

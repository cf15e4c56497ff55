//! Labels and label selectors.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use std::collections::BTreeMap;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// A label selector. An absent selector selects nothing, an empty one everything.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Selector(Option<LabelSelector>);

impl Selector {
    /// Reads the selector of an API object.
    pub fn read(selector: Option<&LabelSelector>) -> Self {
        Self(selector.cloned())
    }

    /// Returns true if the selector selects everything.
    pub fn is_empty(&self) -> bool {
        self.0.as_ref().is_some_and(|selector| {
            selector.match_labels.as_ref().is_none_or(BTreeMap::is_empty)
                && selector.match_expressions.as_ref().is_none_or(Vec::is_empty)
        })
    }

    /// Adds the condition that a label has this value.
    pub fn and(&mut self, key: &str, value: &str) {
        let selector = self.0.get_or_insert_default();
        // It is a requirement of its own: if `match_labels` has another value for the key, nothing matches
        // any more.
        selector.match_expressions.get_or_insert_default().push(LabelSelectorRequirement {
            key: key.to_owned(),
            operator: "In".to_owned(),
            values: Some(vec![value.to_owned()]),
        });
    }

    /// Returns true if the selector selects an object with these labels.
    pub fn matches(&self, labels: &Labels) -> bool {
        let Some(selector) = &self.0 else { return false };
        selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value))
            && selector.match_expressions.iter().flatten().all(|requirement| holds(requirement, labels))
    }
}

fn holds(requirement: &LabelSelectorRequirement, labels: &Labels) -> bool {
    let value = labels.get(&requirement.key);
    let listed = || value.is_some_and(|value| requirement.values.iter().flatten().any(|v| v == value));
    match requirement.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[rstest]
    #[case::not_set(Value::Null, false)]
    #[case::empty(json!({}), true)]
    #[case::labels(json!({"matchLabels": {"app": "a"}}), true)]
    #[case::other(json!({"matchLabels": {"app": "b"}}), false)]
    #[case::listed(json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["b", "a"]}]}), true)]
    #[case::not_in(json!({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["a"]}]}), false)]
    #[case::not_in_missing(json!({"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["a"]}]}), true)]
    #[case::exists(json!({"matchExpressions": [{"key": "x", "operator": "Exists"}]}), false)]
    #[case::missing(json!({"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}), true)]
    #[case::unknown(json!({"matchExpressions": [{"key": "app", "operator": "Like"}]}), false)]
    fn selectors_select_as_kubernetes_does(#[case] selector: Value, #[case] expected: bool) {
        let selector: Option<LabelSelector> = serde_json::from_value(selector).expect("a selector");
        let labels = Labels::from([("app".to_owned(), "a".to_owned())]);
        assert_eq!(Selector::read(selector.as_ref()).matches(&labels), expected);
    }

    #[test]
    fn a_demand_beside_another_value_selects_nothing() {
        let read: LabelSelector =
            serde_json::from_value(json!({"matchLabels": {"app": "a"}})).expect("a selector");
        let mut selector = Selector::read(Some(&read));
        selector.and("app", "b");
        for value in ["a", "b"] {
            assert!(!selector.matches(&Labels::from([("app".to_owned(), value.to_owned())])));
        }
    }
}

//! Says whether disruption budgets let several pods go together: a pure function.
//!
//! An eviction in a dry run uses up nothing of a budget. So under a budget that allows one disruption, each
//! of two pods may go by itself. What the Eviction API counts is counted here in the same way, for all of the
//! pods together.

use crate::snapshot::{Labels, Selector};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

/// The part of a PodDisruptionBudget that evictions depend on.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    /// Name of the budget.
    pub name: String,
    selector: Selector,
    /// `status.disruptionsAllowed`
    allowed: usize,
    /// True if pods that are not ready may go without using up the budget.
    lets_unready_go: bool,
}

impl Budget {
    /// Reads the API object. As for the Eviction API, a budget whose status is not of its newest generation
    /// allows nothing.
    pub fn read(budget: &PodDisruptionBudget) -> Self {
        let spec = budget.spec.as_ref();
        let status = budget.status.clone().unwrap_or_default();
        let current = status.observed_generation.unwrap_or(0) >= budget.metadata.generation.unwrap_or(0);
        let always =
            spec.and_then(|spec| spec.unhealthy_pod_eviction_policy.as_deref()) == Some("AlwaysAllow");
        let healthy = status.desired_healthy > 0 && status.current_healthy >= status.desired_healthy;
        Self {
            name: budget.metadata.name.clone().unwrap_or_default(),
            selector: Selector::read(spec.and_then(|spec| spec.selector.as_ref())),
            allowed: if current { usize::try_from(status.disruptions_allowed).unwrap_or(0) } else { 0 },
            lets_unready_go: always || healthy,
        }
    }

    /// Returns the reason why not all of `pods` pods may go together.
    pub fn refusal(&self, pods: usize) -> String {
        format!(
            "disruption budget {} allows {} more disruption(s), and {pods} pods under it would have to go together",
            self.name, self.allowed
        )
    }

    /// Returns true if the eviction of this pod uses up the budget.
    fn counts(&self, leaver: &Leaver) -> bool {
        // The Eviction API looks for no budget of a pod without labels.
        leaver.counts
            && !leaver.labels.is_empty()
            && self.selector.matches(&leaver.labels)
            && (leaver.ready || !self.lets_unready_go)
    }
}

/// A pod that is to be evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaver {
    labels: Labels,
    ready: bool,
    /// True if budgets apply at all. They do not apply to pods that have not begun, have ended or are ending.
    counts: bool,
}

impl Leaver {
    /// Reads the API object.
    pub fn read(pod: &Pod) -> Self {
        let status = pod.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref());
        let conditions = status.iter().flat_map(|status| status.conditions.iter().flatten());
        Self {
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            ready: conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True"),
            counts: !matches!(phase, Some("Pending" | "Succeeded" | "Failed"))
                && pod.metadata.deletion_timestamp.is_none(),
        }
    }
}

/// Returns the pods of a namespace that its budgets do not let go after the pods before them. Each is given
/// by its position, with the first such budget and the number of pods under that budget that are to go.
pub fn too_many<'b>(budgets: &'b [Budget], leavers: &[Leaver]) -> Vec<(usize, &'b Budget, usize)> {
    let mut beyond: Vec<(usize, &Budget, usize)> = Vec::new();
    for budget in budgets {
        let under = leavers.iter().enumerate().filter(|(_, leaver)| budget.counts(leaver));
        let under: Vec<usize> = under.map(|(at, _)| at).collect();
        for at in under.iter().skip(budget.allowed) {
            if beyond.iter().all(|(known, _, _)| known != at) {
                beyond.push((*at, budget, under.len()));
            }
        }
    }
    beyond.sort_by_key(|(at, _, _)| *at);
    beyond
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::object;
    use rstest::rstest;
    use serde_json::{Value, json};

    fn budget(name: &str, selector: Value, allowed: i32, more: Value) -> Budget {
        let mut spec = json!({"selector": selector});
        if more["always"] == json!(true) {
            spec["unhealthyPodEvictionPolicy"] = json!("AlwaysAllow");
        }
        let seen = more["seen"].as_i64().unwrap_or(1);
        let (healthy, wanted) = (more["healthy"].as_i64().unwrap_or(0), more["wanted"].as_i64().unwrap_or(1));
        Budget::read(&object(json!({
            "metadata": {"name": name, "generation": 1}, "spec": spec,
            "status": {"disruptionsAllowed": allowed, "observedGeneration": seen, "expectedPods": 3,
                       "currentHealthy": healthy, "desiredHealthy": wanted},
        })))
    }

    fn pod(labels: Value, phase: &str, ready: bool) -> Leaver {
        let ready = if ready { "True" } else { "False" };
        Leaver::read(&object(json!({
            "metadata": {"name": "p", "labels": labels},
            "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]},
        })))
    }

    fn app(value: &str) -> Leaver {
        pod(json!({"app": value}), "Running", true)
    }

    const NONE: Value = Value::Null;

    #[rstest]
    #[case::one_too_many(json!({"matchLabels": {"app": "a"}}), 1, NONE, vec![app("a"), app("a")], vec![1])]
    #[case::enough(json!({"matchLabels": {"app": "a"}}), 2, NONE, vec![app("a"), app("a")], vec![])]
    #[case::none_at_all(json!({"matchLabels": {"app": "a"}}), 0, NONE, vec![app("a"), app("a")], vec![0, 1])]
    #[case::less_than_none(json!({"matchLabels": {"app": "a"}}), -1, NONE, vec![app("a")], vec![0])]
    #[case::others_do_not_count(json!({"matchLabels": {"app": "a"}}), 1, NONE, vec![app("b"), app("a"), app("b")], vec![])]
    #[case::expressions(
        json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["a", "b"]}]}), 1, NONE,
        vec![app("b"), app("c"), app("a")], vec![2]
    )]
    #[case::everybody(json!({}), 1, NONE, vec![app("a"), app("b")], vec![1])]
    #[case::everybody_with_labels(json!({}), 1, NONE, vec![app("a"), pod(json!({}), "Running", true)], vec![])]
    #[case::nobody(NONE, 0, NONE, vec![app("a"), app("b")], vec![])]
    #[case::not_begun(json!({}), 1, NONE, vec![app("a"), pod(json!({"app": "a"}), "Pending", false)], vec![])]
    #[case::ended(json!({}), 1, NONE, vec![app("a"), pod(json!({"app": "a"}), "Succeeded", false)], vec![])]
    #[case::unready(json!({}), 1, NONE, vec![app("a"), pod(json!({"app": "a"}), "Running", false)], vec![1])]
    #[case::unready_where_enough_are_healthy(
        json!({}), 1, json!({"healthy": 2, "wanted": 2}),
        vec![app("a"), pod(json!({"app": "a"}), "Running", false)], vec![]
    )]
    #[case::unready_where_none_are_wanted(
        json!({}), 1, json!({"healthy": 2, "wanted": 0}),
        vec![app("a"), pod(json!({"app": "a"}), "Running", false)], vec![1]
    )]
    #[case::unready_may_always_go(
        json!({}), 1, json!({"always": true}),
        vec![app("a"), pod(json!({"app": "a"}), "Running", false)], vec![]
    )]
    #[case::status_of_another_generation(json!({}), 5, json!({"seen": 0}), vec![app("a"), app("a")], vec![0, 1])]
    fn budgets_are_counted_as_the_eviction_api_does(
        #[case] selector: Value,
        #[case] allowed: i32,
        #[case] more: Value,
        #[case] pods: Vec<Leaver>,
        #[case] stay: Vec<usize>,
    ) {
        let budgets = [budget("keep", selector, allowed, more)];
        let found: Vec<usize> = too_many(&budgets, &pods).iter().map(|(at, _, _)| *at).collect();
        assert_eq!(found, stay);
    }

    #[test]
    fn who_ends_already_uses_nothing_up() {
        let mut ending: Pod = object(json!({"metadata": {"name": "p", "labels": {"app": "a"}}}));
        ending.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:00Z")));
        let budgets = [budget("keep", json!({}), 1, NONE)];
        assert_eq!(too_many(&budgets, &[Leaver::read(&ending), app("a")]), vec![]);
    }

    #[test]
    fn every_budget_counts_and_the_first_is_named() {
        let budgets = [
            budget("wide", json!({}), 2, NONE),
            budget("keep", json!({"matchLabels": {"app": "a"}}), 1, NONE),
        ];
        let found = too_many(&budgets, &[app("a"), app("a"), app("b")]);
        let named: Vec<(usize, &str, usize)> =
            found.iter().map(|(at, budget, pods)| (*at, budget.name.as_str(), *pods)).collect();
        assert_eq!(named, [(1, "keep", 2), (2, "wide", 3)]);
        let (_, keep, pods) = found[0];
        assert_eq!(
            keep.refusal(pods),
            "disruption budget keep allows 1 more disruption(s), and 2 pods under it would have to go together"
        );
    }
}

//! Budgets at admission: pods of a namespace whose budget is used up get the budget's lower priority class.
//! This happens only at creation, because Kubernetes does not let the priority of a pod change. Pods that
//! exist already change their place in the order of victims instead, see
//! [`aliquot_allocator::budget::Book::standing`].

use crate::watch::{self, Pauses};
use aliquot_allocator::budget::kinds::Budget;
use aliquot_api::v1alpha1::gpu_budget::Enforcement;
use aliquot_api::v1alpha1::{GpuBudget, resource};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::DynamicObject;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch::{Receiver, Sender};
use tokio_util::sync::CancellationToken;

/// The JSON patch path of [`aliquot_model::names::PRIORITY_CLASS`].
const OWN_CLASS_PATH: &str = "/metadata/annotations/aliquot.dev~1priority-class";

/// The change of a pod at admission.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Lowered {
    /// JSON patch operations.
    pub patch: Vec<Value>,
    /// The warning for the creator of the pod.
    pub warning: Option<String>,
}

/// Returns the change of a pod of a namespace with these budgets. `value` returns the value of a priority
/// class.
pub(super) fn lower(pod: &Pod, budgets: &[Budget], value: impl Fn(&str) -> Option<i32>) -> Lowered {
    let over = budgets.iter().filter(|budget| budget.is_over()).filter_map(|budget| {
        let terms = budget.terms.as_ref().ok()?;
        let class =
            terms.lower_class.as_deref().filter(|_| terms.enforcement == Enforcement::LowerPriority)?;
        Some((budget, class))
    });
    let spec = pod.spec.clone().unwrap_or_default();
    let own = spec.priority.unwrap_or(0);
    let mut missing = None;
    let lowest = over
        .filter_map(|(budget, class)| match value(class) {
            Some(priority) => Some((priority, budget, class)),
            None => {
                missing = Some(format!(
                    "budget {} is used up, but its priority class {class} does not exist: the pod keeps its own",
                    budget.key
                ));
                None
            }
        })
        .min_by_key(|(priority, _, _)| *priority);
    let Some((priority, budget, class)) = lowest else {
        return Lowered { patch: Vec::new(), warning: missing };
    };
    // No priority is raised, and pods that keep the cluster running keep theirs.
    if own <= priority
        || own >= aliquot_allocator::budget::book::SYSTEM
        || spec.priority_class_name.as_deref() == Some(class)
    {
        return Lowered { patch: Vec::new(), warning: missing };
    }
    let mut patch = vec![json!({"op": "add", "path": "/spec/priorityClassName", "value": class})];
    // The API server computes both fields from the class, and refuses a pod that has other values.
    if spec.priority.is_some() {
        patch.push(json!({"op": "remove", "path": "/spec/priority"}));
    }
    if spec.preemption_policy.is_some() {
        patch.push(json!({"op": "remove", "path": "/spec/preemptionPolicy"}));
    }
    if pod.metadata.annotations.is_none() {
        patch.push(json!({"op": "add", "path": "/metadata/annotations", "value": {}}));
    }
    let class_before = spec.priority_class_name.unwrap_or_default();
    patch.push(json!({"op": "add", "path": OWN_CLASS_PATH, "value": class_before}));
    let warning = format!("budget {} is used up: the pod gets the priority class {class}", budget.key);
    Lowered { patch, warning: Some(warning) }
}

/// The budgets and priority classes, which every replica watches for the webhook.
#[derive(Clone)]
pub(super) struct Watched {
    budgets: Store<DynamicObject>,
    classes: Store<PriorityClass>,
    listed: Receiver<bool>,
}

impl Watched {
    /// Starts the watches, which run until `stop`.
    pub(super) fn start(client: Client, stop: CancellationToken) -> Self {
        let writer = reflector::store::Writer::new(resource::<GpuBudget>());
        let budgets = writer.as_reader();
        let (classes, class_writer) = reflector::store();
        let known = Sender::new(false);
        let listed = known.subscribe();
        let own = Self { budgets, classes, listed };
        let stores = own.clone();
        tokio::spawn(async move {
            let watching = async {
                // Without budgets, none is used up.
                watch::wait_until_served::<GpuBudget>(&client, || {
                    known.send_replace(true);
                })
                .await;
                let all = watcher::Config::default;
                let api = Api::<DynamicObject>::all_with(client.clone(), &resource::<GpuBudget>());
                let budgets = watcher(api, all()).backoff(Pauses::default()).reflect(writer);
                let classes = watcher(Api::all(client.clone()), all()).backoff(Pauses::default());
                let classes = classes.reflect(class_writer);
                let (budgets, classes) = (budgets.for_each(|_| async {}), classes.for_each(|_| async {}));
                let list = async {
                    let (budgets, classes) =
                        (stores.budgets.wait_until_ready(), stores.classes.wait_until_ready());
                    if let (Ok(()), Ok(())) = futures::future::join(budgets, classes).await {
                        known.send_replace(true);
                    }
                };
                futures::future::join3(budgets, classes, list).await;
            };
            tokio::select! {
                () = watching => {}
                () = stop.cancelled() => {}
            }
        });
        own
    }

    /// Waits until all budgets and priority classes were listed, or it is known that budgets are not defined.
    pub(super) async fn complete(&self) {
        // An error means that the watches have ended; after that there are no reviews.
        let _ = self.listed.clone().wait_for(|listed| *listed).await;
    }

    /// Returns the change of a pod that is being created.
    pub(super) fn lower(&self, namespace: &str, pod: &Pod) -> Lowered {
        let budgets = self.budgets.state();
        let budgets: Vec<Budget> = budgets
            .iter()
            .filter(|object| object.metadata.namespace.as_deref() == Some(namespace))
            .filter_map(|object| Budget::read(object))
            .collect();
        lower(pod, &budgets, |class| self.classes.get(&ObjectRef::new(class)).map(|class| class.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn budget(enforcement: &str, class: &str, state: &str) -> Budget {
        let object: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuBudget",
            "metadata": {"namespace": "team", "name": class, "uid": "u"},
            "spec": {"gpuHours": 1, "window": {"calendar": "Day"}, "enforcement": enforcement,
                     "lowerPriorityClassName": class},
            "status": {"state": state},
        }))
        .expect("a budget");
        Budget::read(&object).expect("readable")
    }

    fn value(class: &str) -> Option<i32> {
        match class {
            "low" => Some(10),
            "lower" => Some(5),
            _ => None,
        }
    }

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {}, "spec": spec})).expect("a pod")
    }

    fn class_of(lowered: &Lowered) -> Option<&str> {
        lowered.patch.iter().find(|op| op["path"] == "/spec/priorityClassName")?["value"].as_str()
    }

    #[rstest]
    #[case::over(&[("LowerPriority", "low", "Over")], Some("low"))]
    #[case::within(&[("LowerPriority", "low", "Within")], None)]
    #[case::warns(&[("Warn", "low", "Over")], None)]
    #[case::refuses(&[("Refuse", "low", "Over")], None)]
    #[case::lowest_of_two(&[("LowerPriority", "low", "Over"), ("LowerPriority", "lower", "Over")], Some("lower"))]
    #[case::one_within(&[("LowerPriority", "low", "Over"), ("LowerPriority", "lower", "Within")], Some("low"))]
    #[case::none(&[], None)]
    fn only_used_up_budgets_that_say_so_lower_a_pod(
        #[case] budgets: &[(&str, &str, &str)],
        #[case] class: Option<&str>,
    ) {
        let budgets: Vec<Budget> = budgets.iter().map(|(e, c, s)| budget(e, c, s)).collect();
        let lowered = lower(&pod(json!({"containers": [], "priority": 1000})), &budgets, value);
        assert_eq!(class_of(&lowered), class);
        assert_eq!(lowered.warning.is_some(), class.is_some());
    }

    #[test]
    fn what_the_server_computed_from_the_own_class_is_removed_and_the_own_class_noted() {
        let spec = json!({"containers": [], "priority": 1000, "preemptionPolicy": "Never", "priorityClassName": "high"});
        let lowered = lower(&pod(spec), &[budget("LowerPriority", "low", "Over")], value);
        let paths: Vec<&str> = lowered.patch.iter().filter_map(|op| op["path"].as_str()).collect();
        assert_eq!(
            paths,
            [
                "/spec/priorityClassName",
                "/spec/priority",
                "/spec/preemptionPolicy",
                "/metadata/annotations",
                OWN_CLASS_PATH
            ]
        );
        assert_eq!(lowered.patch.last().map(|op| &op["value"]), Some(&json!("high")));
    }

    #[rstest]
    #[case::lower_already(json!({"containers": [], "priority": 3}))]
    #[case::asked_again(json!({"containers": [], "priority": 1000, "priorityClassName": "low"}))]
    #[case::of_the_cluster(json!({"containers": [], "priority": 2_000_001_000}))]
    fn nobody_is_raised_lowered_twice_or_taken_from_the_cluster(#[case] spec: Value) {
        let lowered = lower(&pod(spec), &[budget("LowerPriority", "low", "Over")], value);
        assert!(lowered.patch.is_empty());
    }

    #[test]
    fn a_class_that_does_not_exist_is_told_and_changes_nothing() {
        let budgets = [budget("LowerPriority", "absent", "Over")];
        let lowered = lower(&pod(json!({"containers": [], "priority": 1000})), &budgets, value);
        assert!(lowered.patch.is_empty());
        assert!(lowered.warning.is_some_and(|warning| warning.contains("absent does not exist")));
    }
}

//! Decides which pods get the scheduling gate: a pure function of the pod and of what is known of its claims.

use aliquot_allocator::schedule::Matcher;
use aliquot_allocator::snapshot::Class;
use aliquot_model::names::{POD_GROUP, SCHEDULING_GATE};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaimSpec;
use serde_json::{Value, json};

/// What is known of one of a pod's claims.
#[derive(Debug, Clone, PartialEq)]
pub enum KnownClaim {
    /// The spec of the claim, which is not allocated yet.
    Asks(ResourceClaimSpec),
    /// The claim is allocated: the pod need not wait for it.
    Allocated,
    /// Neither claim nor template exists, or the API server did not answer. The pod cannot start before they
    /// exist, so the gate costs nothing, and the controller removes it once it knows better.
    Unknown,
}

/// What to do with a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Set the gate.
    Gate,
    /// Leave the pod as it is.
    Leave,
}

/// Returns true if a pod can wait at all: it is not bound and does not have the gate.
pub(super) fn may_wait(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let bound = spec.node_name.as_deref().is_some_and(|node| !node.is_empty());
    let gated = spec.scheduling_gates.iter().flatten().any(|gate| gate.name == SCHEDULING_GATE);
    !bound && !gated
}

/// Decides whether a pod must wait for this driver. Pods that are bound already or have the gate are left
/// alone.
pub fn needs_gate(
    pod: &Pod,
    claims: &[KnownClaim],
    driver: &str,
    class: impl Fn(&str) -> Option<Class>,
    matcher: &mut Matcher,
) -> Verdict {
    if !may_wait(pod) {
        return Verdict::Leave;
    }
    // A class that does not exist yet may become one of this driver.
    let mut ours = |name: &str| class(name).is_none_or(|class| matcher.may_select(driver, &class));
    let wanted = claims.iter().any(|claim| match claim {
        KnownClaim::Unknown => true,
        KnownClaim::Allocated => false,
        KnownClaim::Asks(spec) => {
            let requests = spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
            requests
                .flat_map(|request| {
                    let exactly = request.exactly.iter().map(|exact| exact.device_class_name.as_str());
                    let first = request.first_available.iter().flatten();
                    exactly.chain(first.map(|sub| sub.device_class_name.as_str()))
                })
                .any(&mut ours)
        }
    });
    if wanted { Verdict::Gate } else { Verdict::Leave }
}

/// Returns the JSON patch operations that copy the PodGroup of a pod's spec into an annotation, because the
/// controller reads only annotations.
pub(super) fn note_group(pod: &Value) -> Vec<Value> {
    let Some(group) = pod.pointer("/spec/schedulingGroup/podGroupName").and_then(Value::as_str) else {
        return Vec::new();
    };
    let mut operations = Vec::new();
    if !pod.pointer("/metadata/annotations").is_some_and(Value::is_object) {
        operations.push(json!({"op": "add", "path": "/metadata/annotations", "value": {}}));
    }
    let path = format!("/metadata/annotations/{}", POD_GROUP.replace('/', "~1"));
    operations.push(json!({"op": "add", "path": path, "value": group}));
    operations
}

/// Returns the JSON patch that sets the gate.
pub(super) fn patch(pod: &Pod) -> Value {
    let gate = json!({"name": SCHEDULING_GATE});
    let has_gates = pod.spec.as_ref().is_some_and(|spec| spec.scheduling_gates.is_some());
    if has_gates {
        json!([{"op": "add", "path": "/spec/schedulingGates/-", "value": gate}])
    } else {
        json!([{"op": "add", "path": "/spec/schedulingGates", "value": [gate]}])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::sync::Arc;

    const DRIVER: &str = "gpu.aliquot.dev";

    fn class(name: &str) -> Option<Class> {
        let expression = match name {
            "ours" => r#"device.driver == "gpu.aliquot.dev""#,
            "theirs" => r#"device.driver == "nic.example.com""#,
            _ => return None,
        };
        Some(Class {
            name: name.into(),
            selectors: vec![Some(Arc::from(expression))],
            config: Vec::new(),
            extended_resource: None,
            hold: aliquot_allocator::hold::Wish::default(),
            node_strategy: None,
            gpu_strategy: None,
        })
    }

    fn asks(requests: Value) -> KnownClaim {
        KnownClaim::Asks(serde_json::from_value(json!({"devices": {"requests": requests}})).expect("a spec"))
    }

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({"spec": spec})).expect("a pod")
    }

    #[rstest]
    #[case::ours(asks(json!([{"name": "r", "exactly": {"deviceClassName": "ours"}}])), Verdict::Gate)]
    #[case::theirs(asks(json!([{"name": "r", "exactly": {"deviceClassName": "theirs"}}])), Verdict::Leave)]
    #[case::one_of_two(asks(json!([{"name": "r", "exactly": {"deviceClassName": "theirs"}}, {"name": "s", "exactly": {"deviceClassName": "ours"}}])), Verdict::Gate)]
    #[case::alternative(asks(json!([{"name": "r", "firstAvailable": [{"name": "a", "deviceClassName": "theirs"}, {"name": "b", "deviceClassName": "ours"}]}])), Verdict::Gate)]
    #[case::unknown_class(asks(json!([{"name": "r", "exactly": {"deviceClassName": "later"}}])), Verdict::Gate)]
    #[case::nothing(asks(json!([])), Verdict::Leave)]
    #[case::allocated(KnownClaim::Allocated, Verdict::Leave)]
    #[case::unknown_claim(KnownClaim::Unknown, Verdict::Gate)]
    fn pods_wait_for_what_is_or_may_be_ours(#[case] claim: KnownClaim, #[case] expected: Verdict) {
        let pod = pod(json!({"containers": []}));
        assert_eq!(needs_gate(&pod, &[claim], DRIVER, class, &mut Matcher::new()), expected);
    }

    #[rstest]
    #[case::bound(json!({"containers": [], "nodeName": "n1"}))]
    #[case::gated(json!({"containers": [], "schedulingGates": [{"name": "aliquot.dev/allocation"}]}))]
    fn bound_and_gated_pods_are_left_alone(#[case] spec: Value) {
        let claims = [KnownClaim::Unknown];
        assert_eq!(needs_gate(&pod(spec), &claims, DRIVER, class, &mut Matcher::new()), Verdict::Leave);
    }

    #[rstest]
    #[case::none(json!({"spec": {}}), json!([]))]
    #[case::named(json!({"spec": {"schedulingGroup": {"podGroupName": "g"}}}), json!([
        {"op": "add", "path": "/metadata/annotations", "value": {}},
        {"op": "add", "path": "/metadata/annotations/aliquot.dev~1pod-group", "value": "g"}]))]
    #[case::annotated(json!({"metadata": {"annotations": {"a": "b"}}, "spec": {"schedulingGroup": {"podGroupName": "g"}}}),
        json!([{"op": "add", "path": "/metadata/annotations/aliquot.dev~1pod-group", "value": "g"}]))]
    fn the_pod_group_of_the_spec_is_noted(#[case] pod: Value, #[case] expected: Value) {
        assert_eq!(Value::from(note_group(&pod)), expected);
    }

    #[rstest]
    #[case::none(json!({"containers": []}), "/spec/schedulingGates")]
    #[case::others(json!({"containers": [], "schedulingGates": [{"name": "other"}]}), "/spec/schedulingGates/-")]
    fn the_gate_is_added_to_those_that_are_there(#[case] spec: Value, #[case] path: &str) {
        assert_eq!(patch(&pod(spec))[0]["path"], path);
    }
}

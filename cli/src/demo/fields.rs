//! Finds fields of an object that its kind does not have, which an API server would drop silently.

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Returns the path of the first field that the object's kind does not have; `None` if there is none, or the
/// kind is unknown here.
///
/// # Errors
/// If a field has a value of the wrong type.
pub(super) fn unknown(kind: &str, object: &Value) -> serde_json::Result<Option<String>> {
    let understood = match kind {
        "Namespace" => understood::<Namespace>(object),
        "Pod" => understood::<Pod>(object),
        "ConfigMap" => understood::<ConfigMap>(object),
        "ServiceAccount" => understood::<ServiceAccount>(object),
        "ResourceClaim" => understood::<ResourceClaim>(object),
        "ResourceClaimTemplate" => understood::<ResourceClaimTemplate>(object),
        "DeviceClass" => understood::<DeviceClass>(object),
        "PriorityClass" => understood::<PriorityClass>(object),
        "Deployment" => understood::<Deployment>(object),
        "StatefulSet" => understood::<StatefulSet>(object),
        "Job" => understood::<Job>(object),
        "PodDisruptionBudget" => understood::<PodDisruptionBudget>(object),
        _ => return Ok(None),
    };
    Ok(missing(object, &understood?))
}

/// Returns what is left of an object after it was read as its type.
fn understood<K: DeserializeOwned + Serialize>(object: &Value) -> serde_json::Result<Value> {
    serde_json::to_value(serde_json::from_value::<K>(object.clone())?)
}

/// Returns the path of the first field of `from` that `left` does not have.
fn missing(from: &Value, left: &Value) -> Option<String> {
    match (from, left) {
        (Value::Object(from), Value::Object(left)) => {
            let mut fields = from.iter().filter(|(_, value)| !value.is_null());
            fields.find_map(|(name, value)| match left.get(name) {
                None => Some(name.clone()),
                Some(left) => missing(value, left).map(|below| join(name, &below)),
            })
        }
        (Value::Array(from), Value::Array(left)) => {
            let mut items = from.iter().zip(left).enumerate();
            items.find_map(|(at, (from, left))| {
                missing(from, left).map(|below| join(&format!("[{at}]"), &below))
            })
        }
        _ => None,
    }
}

fn join(name: &str, below: &str) -> String {
    if below.starts_with('[') { format!("{name}{below}") } else { format!("{name}.{below}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case::none(json!({"containers": [{"name": "a", "resources": {"claims": [{"name": "g"}]}, "args": []}]}), None)]
    #[case::at_the_top(json!({"containers": [], "resourceClaim": []}), Some("spec.resourceClaim"))]
    #[case::in_a_list(json!({"containers": [{"name": "a"}, {"name": "b", "resorces": {}}]}), Some("spec.containers[1].resorces"))]
    #[case::empty_and_null(json!({"containers": [], "volumes": [{"name": "v", "emptyDir": {}}], "nodeName": null}), None)]
    fn a_field_that_the_kind_does_not_have_is_named(#[case] spec: Value, #[case] wanted: Option<&str>) {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec});
        assert_eq!(unknown("Pod", &pod).unwrap().as_deref(), wanted);
    }

    #[test]
    fn parameters_of_drivers_may_have_any_field() {
        let config = json!([{"opaque": {"driver": "gpu.aliquot.dev", "parameters": {"anything": {"a": 1}}}}]);
        let claim = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
            "spec": {"devices": {"requests": [], "config": config}}});
        assert_eq!(unknown("ResourceClaim", &claim).unwrap(), None);
    }
}

//! ResourceSlices: limits by release, and what disabled gates drop.

use crate::common::{code, start};
use aliquot_control_plane::{Gates, Options, ServerVersion};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

async fn slices(
    version: ServerVersion,
    change: impl FnOnce(&mut Gates),
) -> (aliquot_control_plane::Handle, Api<ResourceSlice>) {
    let mut gates = Gates::of(version);
    change(&mut gates);
    let (handle, client) = start(Options { version, gates: Some(gates), ..Options::default() }).await;
    (handle, Api::all(client))
}

fn all_on(gates: &mut Gates) {
    gates.partitionable_devices = true;
    gates.consumable_capacity = true;
    gates.device_taints = true;
}

fn slice(spec: Value) -> ResourceSlice {
    let mut full = json!({
        "driver": "gpu.example.com", "nodeName": "n",
        "pool": {"name": "gpu.example.com/n", "generation": 1, "resourceSliceCount": 2},
    });
    full.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    serde_json::from_value(json!({"metadata": {"generateName": "s-"}, "spec": full})).unwrap()
}

fn devices(n: usize, extra: &Value) -> Value {
    let one = |i: usize| {
        let mut d = json!({"name": format!("gpu-{i}")});
        d.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        d
    };
    (0..n).map(one).collect()
}

fn counters(n: usize) -> Value {
    let map: serde_json::Map<String, Value> =
        (0..n).map(|i| (format!("c{i}"), json!({"value": "1"}))).collect();
    json!([{"name": "gpu-0", "counters": map}])
}

fn consuming() -> Value {
    json!({"consumesCounters": [{"counterSet": "gpu-0", "counters": {"c0": {"value": "1"}}}]})
}

fn tainted() -> Value {
    json!({"taints": [{"key": "a/b", "effect": "NoSchedule"}]})
}

#[rstest::rstest]
#[case::up_to_128_plain_devices(ServerVersion::V1_36, json!({"devices": devices(128, &json!({}))}), true)]
#[case::no_129_devices(ServerVersion::V1_36, json!({"devices": devices(129, &json!({}))}), false)]
#[case::up_to_64_with_taints(ServerVersion::V1_36, json!({"devices": devices(64, &tainted())}), true)]
#[case::no_65_with_taints(ServerVersion::V1_36, json!({"devices": devices(65, &tainted())}), false)]
#[case::many_with_taints_in_1_34(ServerVersion::V1_34, json!({"devices": devices(128, &tainted())}), true)]
#[case::counters_elsewhere(ServerVersion::V1_36, json!({"devices": devices(1, &consuming())}), true)]
#[case::counters_elsewhere_in_1_34(ServerVersion::V1_34, json!({"devices": devices(1, &consuming())}), false)]
#[case::counters_beside_devices_in_1_34(
    ServerVersion::V1_34, json!({"devices": devices(1, &consuming()), "sharedCounters": counters(1)}), true)]
#[case::counters_beside_devices(
    ServerVersion::V1_36, json!({"devices": devices(1, &consuming()), "sharedCounters": counters(1)}), false)]
#[case::counters_alone(ServerVersion::V1_36, json!({"sharedCounters": counters(32)}), true)]
#[case::too_many_counters(ServerVersion::V1_36, json!({"sharedCounters": counters(33)}), false)]
#[case::two_places(ServerVersion::V1_36, json!({"allNodes": true}), false)]
#[case::twice_the_same_name(ServerVersion::V1_36, json!({"devices": [{"name": "a"}, {"name": "a"}]}), false)]
#[case::upper_case_name(ServerVersion::V1_36, json!({"devices": [{"name": "GPU"}]}), false)]
#[case::strict_version(ServerVersion::V1_36,
    json!({"devices": [{"name": "a", "attributes": {"v": {"version": "12.8"}}}]}), false)]
#[case::two_values(ServerVersion::V1_36,
    json!({"devices": [{"name": "a", "attributes": {"v": {"int": 1, "string": "x"}}}]}), false)]
#[case::long_value(ServerVersion::V1_36,
    json!({"devices": [{"name": "a", "attributes": {"v": {"string": "x".repeat(65)}}}]}), false)]
#[case::policy_of_an_unshared_device(ServerVersion::V1_36,
    json!({"devices": [{"name": "a", "capacity": {"m": {"value": "1Gi", "requestPolicy": {"default": "1Mi"}}}}]}), false)]
#[tokio::test]
async fn limits_are_those_of_the_release(
    #[case] version: ServerVersion,
    #[case] spec: Value,
    #[case] good: bool,
) {
    let (_handle, api) = slices(version, all_on).await;
    let result = api.create(&PostParams::default(), &slice(spec)).await;
    if good {
        result.unwrap();
    } else {
        assert_eq!(code(result), (422, "Invalid".into()));
    }
}

#[rstest::rstest]
#[case::range(json!({"default": "80Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}), true)]
#[case::default_outside(json!({"default": "0", "validRange": {"min": "1Mi", "step": "1Mi"}}), false)]
#[case::default_off_step(json!({"default": "1025Ki", "validRange": {"min": "1Mi", "step": "1Mi"}}), false)]
#[case::max_above_value(json!({"default": "1Mi", "validRange": {"min": "1Mi", "max": "81Gi"}}), false)]
#[case::no_default(json!({"validRange": {"min": "1Mi"}}), false)]
#[case::values(json!({"default": "1", "validValues": ["1", "2"]}), true)]
#[case::values_descend(json!({"default": "1", "validValues": ["2", "1"]}), false)]
#[case::default_not_among(json!({"default": "3", "validValues": ["1", "2"]}), false)]
#[tokio::test]
async fn request_policies_are_checked(#[case] policy: Value, #[case] good: bool) {
    let (_handle, api) = slices(ServerVersion::V1_36, |_| ()).await;
    let device = json!([{
        "name": "share", "allowMultipleAllocations": true,
        "capacity": {"memory": {"value": "80Gi", "requestPolicy": policy}},
    }]);
    let result = api.create(&PostParams::default(), &slice(json!({"devices": device}))).await;
    assert_eq!(result.is_ok(), good, "{result:?}");
}

#[tokio::test]
async fn attributes_and_capacities_are_at_most_32_together() {
    let (_handle, api) = slices(ServerVersion::V1_36, |_| ()).await;
    let device = |n: usize| {
        let attributes: serde_json::Map<String, Value> =
            (0..n).map(|i| (format!("a{i}"), json!({"int": 1}))).collect();
        json!({"devices": [{"name": "d", "attributes": attributes, "capacity": {"memory": {"value": "1"}}}]})
    };
    api.create(&PostParams::default(), &slice(device(31))).await.unwrap();
    assert_eq!(code(api.create(&PostParams::default(), &slice(device(32))).await).0, 422);
}

#[tokio::test]
async fn disabled_gates_drop_their_fields_silently() {
    let (_handle, api) = slices(ServerVersion::V1_34, |_| ()).await;
    let spec = json!({
        "sharedCounters": counters(1),
        "devices": [{
            "name": "d", "allowMultipleAllocations": true,
            "taints": [{"key": "a/b", "effect": "NoSchedule"}],
            "consumesCounters": consuming()["consumesCounters"],
            "capacity": {"memory": {"value": "1Gi", "requestPolicy": {"default": "1Mi"}}},
        }],
    });
    let made = api.create(&PostParams::default(), &slice(spec)).await.unwrap();
    let device = &made.spec.devices.as_ref().unwrap()[0];
    assert!(made.spec.shared_counters.is_none() && device.consumes_counters.is_none());
    assert!(device.taints.is_none() && device.allow_multiple_allocations.is_none());
    assert!(device.capacity.as_ref().unwrap()["memory"].request_policy.is_none());
}

#[tokio::test]
async fn the_server_fills_in_and_counts() {
    let (_handle, api) = slices(ServerVersion::V1_36, |_| ()).await;
    let spec = json!({"devices": [{
        "name": "d", "taints": [{"key": "a/b", "effect": "NoSchedule"}], "capacity": {"memory": {"value": "1024Mi"}},
    }]});
    let made = api.create(&PostParams::default(), &slice(spec)).await.unwrap();
    let device = &made.spec.devices.as_ref().unwrap()[0];
    assert!(device.taints.as_ref().unwrap()[0].time_added.is_some());
    assert_eq!(device.capacity.as_ref().unwrap()["memory"].value.0, "1Gi");
    assert_eq!(made.metadata.generation, Some(1));
    let name = made.metadata.name.unwrap();
    let patch = |spec: Value| Patch::Merge(json!({"spec": spec}));
    let label = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    let same = api.patch(&name, &PatchParams::default(), &label).await.unwrap();
    assert_eq!(same.metadata.generation, Some(1));
    let more = patch(json!({"pool": {"generation": 2}}));
    assert_eq!(api.patch(&name, &PatchParams::default(), &more).await.unwrap().metadata.generation, Some(2));
    for fixed in
        [json!({"nodeName": "other"}), json!({"driver": "other"}), json!({"pool": {"name": "other"}})]
    {
        assert_eq!(code(api.patch(&name, &PatchParams::default(), &patch(fixed)).await).0, 422);
    }
}

#[tokio::test]
async fn slices_are_selected_by_node_and_driver() {
    let (_handle, api) = slices(ServerVersion::V1_36, |_| ()).await;
    api.create(&PostParams::default(), &slice(json!({"devices": []}))).await.unwrap();
    for (fields, count) in
        [("spec.nodeName=n", 1), ("spec.nodeName=m", 0), ("spec.driver=gpu.example.com,spec.nodeName=n", 1)]
    {
        assert_eq!(api.list(&ListParams::default().fields(fields)).await.unwrap().items.len(), count);
    }
    // By pool only from 1.37 on.
    let by_pool = ListParams::default().fields("spec.pool.name=gpu.example.com/n");
    assert_eq!(code(api.list(&by_pool).await).0, 400);
    let (_handle, api) = slices(ServerVersion::V1_37, |_| ()).await;
    assert!(api.list(&by_pool).await.unwrap().items.is_empty());
}

use super::*;
use aliquot_model::allocation::{self, MarkedResult};
use rstest::rstest;
use serde_json::{Value, json};

const DRIVER: &str = "gpu.aliquot.dev";
const POOL: &str = "gpu.aliquot.dev/n1";

fn reference() -> ClaimRef {
    ClaimRef { namespace: "ns".into(), name: "c".into(), uid: "u-1".into() }
}

fn claim(results: Value, config: Value) -> ResourceClaim {
    serde_json::from_value(json!({
        "metadata": {"namespace": "ns", "name": "c", "uid": "u-1"},
        "spec": {},
        "status": {"allocation": {
            "allocationTimestamp": "2026-01-02T03:04:05Z",
            "devices": {"results": results, "config": config}}},
    }))
    .unwrap()
}

fn result(request: &str, device: &str) -> Value {
    let mut value = json!({"request": request, "driver": DRIVER, "pool": POOL, "device": device});
    if device.ends_with("share") || device.ends_with("timeslice") {
        value["shareID"] = json!("s-1");
        value["consumedCapacity"] = json!({"memory": "4Gi", "cores": "30", "slots": "1"});
    }
    value
}

fn entry(source: &str, requests: Value, parameters: Value) -> Value {
    json!({"source": source, "requests": requests, "opaque": {"driver": DRIVER, "parameters": parameters}})
}

fn config(kind: &str, body: Value) -> Value {
    let mut value = body;
    value["apiVersion"] = json!("aliquot.dev/v1alpha1");
    value["kind"] = json!(kind);
    value
}

fn decoded(results: Value, config: Value) -> Result<Request, ClaimError> {
    decode(&reference(), &claim(results, config), DRIVER, POOL)
}

#[test]
fn results_of_other_drivers_are_not_ours() {
    let results = json!([
        {"request": "nic", "driver": "nic.example.com", "pool": "n1", "device": "eth0"},
        result("gpu", "gpu-3"),
    ]);
    let request = decoded(results, json!([])).unwrap();
    assert_eq!(request.devices.len(), 1);
    assert_eq!(request.devices[0].device, DeviceName::gpu(3));
    assert_eq!(request.given.at.unwrap().to_string(), "2026-01-02T03:04:05Z");
}

#[test]
fn another_uid_is_another_claim() {
    let other = ClaimRef { uid: "u-2".into(), ..reference() };
    let got = decode(&other, &claim(json!([]), json!([])), DRIVER, POOL);
    assert_eq!(got, Err(ClaimError::OtherUid { claim: other, found: "u-1".into() }));
}

#[test]
fn a_claim_without_allocation_is_refused() {
    let mut object = claim(json!([]), json!([]));
    object.status = None;
    assert_eq!(decode(&reference(), &object, DRIVER, POOL), Err(ClaimError::NotAllocated(reference())));
}

#[test]
fn devices_of_another_pool_are_refused() {
    let mut foreign = result("gpu", "gpu-0");
    foreign["pool"] = json!("gpu.aliquot.dev/n2");
    assert!(matches!(decoded(json!([foreign]), json!([])), Err(ClaimError::OtherPool { .. })));
}

#[test]
fn quantities_come_from_consumed_capacity() {
    let request = decoded(json!([result("s", "gpu-0-share")]), json!([])).unwrap();
    let want = Consumed { memory_bytes: 4 << 30, cores_percent: 30, slots: 1 };
    assert_eq!(request.devices[0].consumed, Some(want));
}

#[rstest]
#[case::absent(json!({"memory": "1Gi", "slots": "1"}), "cores")]
#[case::negative(json!({"memory": "-1", "cores": "0", "slots": "1"}), "memory")]
#[case::nothing(json!({"memory": "0", "cores": "0", "slots": "1"}), "memory")]
#[case::beyond(json!({"memory": "1Gi", "cores": "101", "slots": "1"}), "cores")]
#[case::garbage(json!({"memory": "lots", "cores": "1", "slots": "1"}), "memory")]
fn impossible_capacities_name_the_capacity(#[case] consumed: Value, #[case] which: &str) {
    let mut share = result("s", "gpu-0-share");
    share["consumedCapacity"] = consumed;
    match decoded(json!([share]), json!([])) {
        Err(ClaimError::Capacity { capacity, .. }) => assert_eq!(capacity, which),
        other => panic!("{other:?}"),
    }
}

#[test]
fn capacities_in_the_drivers_domain_count_too() {
    let mut share = result("s", "gpu-0-share");
    share["consumedCapacity"] = json!({
        "gpu.aliquot.dev/memory": "1Gi", "gpu.aliquot.dev/cores": "0", "gpu.aliquot.dev/slots": "1"});
    assert_eq!(
        decoded(json!([share]), json!([])).unwrap().devices[0].consumed.unwrap().memory_bytes,
        1 << 30
    );
}

#[rstest]
#[case::admin_device_without_access("gpu-0-admin", false, false)]
#[case::admin_device_with_access("gpu-0-admin", true, true)]
#[case::admin_access_to_a_gpu("gpu-0", true, false)]
fn admin_devices_and_admin_access_go_together(#[case] device: &str, #[case] access: bool, #[case] ok: bool) {
    let mut value = result("a", device);
    value["adminAccess"] = json!(access);
    assert_eq!(decoded(json!([value]), json!([])).is_ok(), ok);
}

#[test]
fn later_entries_override_and_the_class_comes_first() {
    let config = json!([
        entry("FromClaim", json!([]), config("ShareConfig", json!({"priority": 5}))),
        entry(
            "FromClass",
            json!(["s"]),
            config("ShareConfig", json!({"priority": 1, "computePolicy": "Soft"}))
        ),
    ]);
    let request = decoded(json!([result("s", "gpu-0-share")]), config).unwrap();
    let want = ShareConfig { priority: 5, ..ShareConfig::default() };
    assert_eq!(request.devices[0].settings, Settings::Share(want));
}

#[test]
fn a_request_of_alternatives_is_configured_for_the_kinds_that_fit() {
    let config = json!([
        entry("FromClaim", json!(["main"]), config("GpuConfig", json!({"timeSlice": "Long"}))),
        entry("FromClaim", json!(["main"]), config("ShareConfig", json!({"priority": 2}))),
    ]);
    let request = decoded(json!([result("main/small", "gpu-0-share")]), config).unwrap();
    assert!(matches!(&request.devices[0].settings, Settings::Share(share) if share.priority == 2));
    assert_eq!(request.devices[0].container_request(), "main");
}

#[test]
fn shares_of_a_partition_are_configured_as_shares_of_a_gpu() {
    let results = || json!([result("s", "gpu-0-mig-1g10gb-19-6-share")]);
    let soft = config("ShareConfig", json!({"computePolicy": "Soft", "driverCapabilities": "video"}));
    let request = decoded(results(), json!([entry("FromClaim", json!(["s"]), soft)])).unwrap();
    let Settings::Share(own) = &request.devices[0].settings else { panic!("{request:?}") };
    assert_eq!(own.compute_policy, aliquot_model::config::ComputePolicy::Soft);
    assert!(!own.driver_capabilities.is_empty());
    assert_eq!(request.devices[0].consumed.unwrap().memory_bytes, 4 << 30);
    let wrong = json!([entry("FromClaim", json!(["s"]), config("MigConfig", json!({})))]);
    assert!(matches!(decoded(results(), wrong), Err(ClaimError::ConfigMismatch { .. })));
}

#[test]
fn a_config_that_names_a_request_must_fit_its_device() {
    let config = json!([entry("FromClaim", json!(["m"]), config("GpuConfig", json!({})))]);
    let got = decoded(json!([result("m", "gpu-0-mig-1g10gb-19-6")]), config);
    assert!(matches!(got, Err(ClaimError::ConfigMismatch { index: 0, .. })), "{got:?}");
}

#[test]
fn unknown_fields_are_named() {
    let config = json!([entry("FromClaim", json!([]), config("ShareConfig", json!({"prioriti": 5})))]);
    let error = decoded(json!([result("s", "gpu-0-share")]), config).unwrap_err().to_string();
    assert!(error.contains("prioriti"), "{error}");
}

#[test]
fn parameters_of_other_drivers_are_not_read() {
    let config = json!([{"source": "FromClaim", "requests": [],
        "opaque": {"driver": "nic.example.com", "parameters": {"kind": "Nonsense"}}}]);
    assert!(decoded(json!([result("g", "gpu-0")]), config).is_ok());
}

#[rstest]
#[case::tenant("FromClaim", false)]
#[case::class("FromClass", true)]
fn fail_open_is_for_classes_only(#[case] source: &str, #[case] ok: bool) {
    let config = json!([entry(source, json!(["s"]), config("ShareConfig", json!({"failMode": "Open"})))]);
    assert_eq!(decoded(json!([result("s", "gpu-0-share")]), config).is_ok(), ok);
}

#[test]
fn result_ids_differ_by_share_and_are_stable() {
    let id = |share| result_id("u-1", "s", "gpu-0-share", share);
    assert_eq!(id(Some("a")), id(Some("a")));
    assert_ne!(id(Some("a")), id(Some("b")));
    assert_eq!(id(Some("a")).len(), "u-1-".len() + 8);
}

#[test]
fn a_reallocated_claim_is_told_from_the_prepared_one() {
    let object = claim(json!([result("g", "gpu-0")]), json!([]));
    let key = |device: &str| ResultKey {
        request: "g".into(),
        pool: POOL.into(),
        device: device.into(),
        share_id: None,
    };
    assert!(still_allocated(&object, DRIVER, &[key("gpu-0")]));
    assert!(!still_allocated(&object, DRIVER, &[key("gpu-1")]));
    assert!(!still_allocated(&object, DRIVER, &[]));
}

#[test]
fn how_devices_are_chosen_is_no_business_of_the_node() {
    let policy = config("AllocationPolicy", json!({"substitution": "Larger"}));
    let config = json!([entry("FromClaim", json!(["main"]), policy)]);
    let request = decoded(json!([result("main", "gpu-0-share")]), config).unwrap();
    assert_eq!(request.devices[0].settings, Settings::Share(ShareConfig::default()));
}

#[test]
fn a_claim_is_charged_from_its_allocation_or_what_the_controller_wrote_down() {
    let mut object = claim(json!([result("gpu", "gpu-3")]), json!([]));
    let since = |object: &ResourceClaim| decode(&reference(), object, DRIVER, POOL).unwrap().charged_since;
    // 2026-01-02T03:04:05Z
    assert_eq!(since(&object), Some(1_767_323_045));
    // A server of 1.34 drops the time.
    object.status.as_mut().unwrap().allocation.as_mut().unwrap().allocation_timestamp = None;
    assert_eq!(since(&object), None);
    let mut written = |text: &str| {
        object.metadata.annotations =
            Some([(aliquot_model::names::ALLOCATION.to_owned(), text.to_owned())].into());
        since(&object)
    };
    let mark = |uid: &str, seconds| {
        let result =
            MarkedResult { request: "gpu", driver: DRIVER, pool: POOL, device: "gpu-3", share_id: None };
        allocation::mark(uid, seconds, [result])
    };
    assert_eq!(written(&mark("u-1", 1_767_323_000)), Some(1_767_323_000));
    for nonsense in ["", "x.y", "1767323000", "-5.x", "0.x", &mark("u-1", 0)] {
        assert_eq!(written(nonsense), None, "{nonsense}");
    }
    object.metadata.creation_timestamp = serde_json::from_value(json!("2026-01-02T03:04:00Z")).unwrap();
    object.metadata.annotations =
        Some([(aliquot_model::names::ALLOCATION.to_owned(), mark("u-1", 7))].into());
    assert_eq!(since(&object), Some(1_767_323_040), "not before the claim was made");
}

#[test]
fn a_time_that_the_controller_did_not_write_for_this_allocation_charges_nothing_less() {
    let mut object = claim(json!([result("gpu", "gpu-3")]), json!([]));
    object.status.as_mut().unwrap().allocation.as_mut().unwrap().allocation_timestamp = None;
    let late = 9_999_999_999;
    let result = MarkedResult { request: "gpu", driver: DRIVER, pool: POOL, device: "gpu-3", share_id: None };
    for forged in [
        format!("{late}.x"),
        format!("{late}.0d5f5f9e-0b6c-4e0d-8a44-6c1d0d4f3f00"),
        // Of a claim that this one is a copy of, and of other devices.
        allocation::mark("u-0", late, [result]),
        allocation::mark("u-1", late, [MarkedResult { device: "gpu-4", ..result }]),
    ] {
        object.metadata.annotations =
            Some([(aliquot_model::names::ALLOCATION.to_owned(), forged.clone())].into());
        let request = decode(&reference(), &object, DRIVER, POOL).unwrap();
        assert_eq!(request.charged_since, None, "{forged}");
    }
}
